"""What the fuzzer has found, played again: the smallest inputs that reach every branch of the codecs it could reach."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest

from kestrelpy._journal import format as fmt
from tests.fuzz.codec_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = 1500


def inputs_of(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def test_every_target_has_a_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert all(inputs_of(target) for target in TARGETS)


def play(target: str) -> None:
    for data in inputs_of(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_holds(target: str) -> None:
    play(target)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_near_the_corpus_holds(target: str) -> None:
    """A few blind steps from each input: a little of the fuzzing, on any Python."""
    generator, inputs = random.Random(target), inputs_of(target)
    for _ in range(INPUTS):
        data = bytearray(generator.choice(inputs))
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(data) + 1)
            data[at : at + generator.choice([0, 1, 1, 1, 4])] = generator.randbytes(generator.choice([0, 1, 1, 4]))
        TARGETS[target](bytes(data))


def test_a_codec_that_is_wrong_is_caught() -> None:
    """The targets see what they are for."""
    real = fmt.split_batch

    def shifted(body: bytes) -> list[bytes] | None:
        found = real(body)
        return found and [*found[1:], found[0]]

    with mock.patch.object(fmt, "split_batch", shifted), pytest.raises(AssertionError):
        play("sealed_frame")
    with mock.patch.object(fmt, "_spans_rise", return_value=True), pytest.raises(AssertionError):
        play("sealed_checkpoint")
