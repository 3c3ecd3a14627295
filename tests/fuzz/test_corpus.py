"""What the fuzzer has found, played again: the smallest inputs that reach every branch of the codecs it could reach."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kestrelpy._journal import format as fmt
from kestrelpy.codecs import DecodeError, schemas
from kestrelpy.codecs.compression import ZstdCodec
from kestrelpy.codecs.encryption import EncryptedCodec
from kestrelpy.inbox.format import LedgerState
from kestrelpy.logging import records
from kestrelpy.ship import identity, in_objects, manifest, outside_reader, ship_file, slots
from tests.fuzz import value_targets
from tests.fuzz.codec_targets import TARGETS
from tests.fuzz.ship_targets import SHIP_TARGETS
from tests.fuzz.value_targets import VALUE_TARGETS
from tests.ship import second_reader

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


decode_ledger = slots.decode_ledger


def ends_with_the_data(data: bytes) -> tuple[LedgerState, int]:
    """A ledger whatever comes after its last whole record."""
    return decode_ledger(data)[0], len(data)


def lenient(pattern: str) -> Any:
    """A pattern of keys that takes numbers of any length."""
    return re.compile(pattern.replace("{13}|[1-9][0-9]{13,18}", "+").replace("[1-9][0-9]{0,18}", "[0-9]+"))


SHIP_FAULTS: dict[str, tuple[str, Any]] = {
    "a note of any kind": ("sealed_ship_slot", lambda: mock.patch.object(slots, "_is_note", return_value=True)),
    "a slot without its crc": ("ship_slot", lambda: mock.patch.object(slots, "slot_crc", return_value=0)),
    "a header that contradicts itself": (
        "sealed_ship_header", lambda: mock.patch.object(slots, "_is_header", return_value=True),
    ),
    "a reader of any name": ("ship_states", lambda: mock.patch.object(slots, "check_name")),
    "a footer of another segment": (
        "sealed_ship_note", lambda: mock.patch.object(slots, "_is_sealed", return_value=True),
    ),
    "a ledger that is cut": (
        "sealed_ship_ledger", lambda: mock.patch.object(slots, "decode_ledger", ends_with_the_data),
    ),
    "a manifest without its crc": (
        "ship_manifest", lambda: mock.patch.object(manifest, "_whole_body", lambda data: data),
    ),
    "a manifest that nothing adds up to": (
        "sealed_ship_manifest", lambda: mock.patch.object(manifest, "_is_consistent", return_value=True),
    ),
    "a segment that follows none": (
        "sealed_ship_log", lambda: mock.patch.object(manifest.LogState, "_place_objection", return_value=None),
    ),
    "a flag that is not known": ("sealed_ship_file", lambda: mock.patch.object(ship_file, "_FLAGS", 15)),
    "a queue.json with spaces": (
        "ship_identity", lambda: mock.patch.object(identity, "encode_identity", return_value=mock.ANY),
    ),
    "an id that no queue has": ("sealed_ship_commit", lambda: mock.patch.object(outside_reader, "LARGEST", 1 << 64)),
    "a part of another name": (
        "ship_batch", lambda: mock.patch.object(in_objects, "_PART", re.compile("in/[a-f]{32}\\.part")),
    ),
    "a key of another form": (
        "ship_keys", lambda: mock.patch.object(slots, "_SEGMENT_KEY", lenient(slots._SEGMENT_KEY.pattern)),
    ),
}  # fmt: skip


def without_binding(codec: EncryptedCodec, data: bytes) -> bytes:
    """What a codec would open that passes no associated data, and looks for no version."""
    end = 3 + data[2]
    cipher = codec._ciphers.get(data[3:end])
    if cipher is None:
        raise DecodeError("not known")
    return b"apples"


VALUE_FAULTS: dict[str, tuple[str, Any]] = {
    "a schema of JSON that leaks its library's error": (
        "msgspec_json", lambda: mock.patch.object(schemas, "DecodeError", RuntimeError),
    ),
    "a schema of msgpack that leaks its library's error": (
        "msgspec_msgpack", lambda: mock.patch.object(schemas, "DecodeError", RuntimeError),
    ),
    "a model that leaks its library's error": (
        "pydantic_json", lambda: mock.patch.object(schemas, "DecodeError", RuntimeError),
    ),
    "a frame without a bound": (
        "zstd_frame",
        lambda: mock.patch.object(ZstdCodec, "_unpacked", return_value=bytes(value_targets.MOST_BYTES + 1)),
    ),
    "an item that anybody makes": (
        "encrypted_item", lambda: mock.patch.object(EncryptedCodec, "_opened", return_value=b""),
    ),
    "a record whose methods are replaced": (
        "log_record", lambda: mock.patch.object(records, "_is_taken", return_value=False),
    ),
    "a head that is not bound": (
        "sealed_encrypted_item", lambda: mock.patch.object(EncryptedCodec, "_opened", without_binding),
    ),
}  # fmt: skip


def test_every_target_of_values_has_a_fault() -> None:
    assert {target for target, _ in VALUE_FAULTS.values()} == set(VALUE_TARGETS)


@pytest.mark.parametrize("fault", VALUE_FAULTS)
def test_a_codec_of_values_that_is_wrong_is_caught(fault: str) -> None:
    target, plant = VALUE_FAULTS[fault]
    play(target)
    with plant(), pytest.raises((AssertionError, RuntimeError, TypeError)):
        play(target)


def test_every_target_of_shipping_has_a_fault() -> None:
    assert {target for target, _ in SHIP_FAULTS.values()} == set(SHIP_TARGETS)


@pytest.mark.parametrize("fault", SHIP_FAULTS)
def test_a_codec_of_shipping_that_is_wrong_is_caught(fault: str) -> None:
    target, plant = SHIP_FAULTS[fault]
    play(target)
    with plant(), pytest.raises((AssertionError, second_reader.Bad, LookupError, ValueError)):
        play(target)
