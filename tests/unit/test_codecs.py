"""Codecs: values in, the same values out; nothing unpickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import JournaledQueue
from kestrelpy.codecs import JSON, UTF8

Open = Callable[..., JournaledQueue]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_json_round_trip(value: object) -> None:
    assert JSON.decode(JSON.encode(value)) == value


@given(st.text())
def test_utf8_round_trip(value: str) -> None:
    assert UTF8.decode(UTF8.encode(value)) == value


def test_json_is_compact_utf8() -> None:
    assert JSON.encode({"a": [1, "\u00e4"]}) == b'{"a":[1,"\xc3\xa4"]}'


def test_values_that_do_not_fit() -> None:
    with pytest.raises(TypeError):
        JSON.encode(object())
    with pytest.raises(TypeError, match="bytes"):
        UTF8.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expecting"):
        JSON.decode(b"{")
    with pytest.raises(UnicodeDecodeError):
        UTF8.decode(b"\xff")


def test_json_that_is_nested_too_deeply() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="too deeply"):
        JSON.encode(deep)
    with pytest.raises(ValueError, match="too deeply"):
        JSON.decode(b"[" * 100_000)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("codec", [JSON, UTF8])
def test_pickles_stay_closed(codec: Any) -> None:
    """persist-queue's and Spark's lesson: bytes from a disk are data, never code."""
    with pytest.raises(ValueError, match=r"utf-8|Expecting|invalid"):
        codec.decode(pickle.dumps(_Bomb(), protocol=2))


@pytest.mark.parametrize(("codec", "values"), [(JSON, [None, 1, {"a": ["\u20ac"]}]), (UTF8, ["", "\u20ac", "x" * 9])])
def test_a_queue_with_a_codec(codec: object, values: list[object], open_queue: Open) -> None:
    with open_queue(codec=codec) as queue:
        for value in values:
            queue.put(value)
        queue.put_many(values)
        seen = []
        for _ in range(2 * len(values)):
            with queue.get_nowait() as item:
                seen.append(item.value)
                assert isinstance(item.data, bytes)
        assert seen == values + values
        with pytest.raises(TypeError):
            queue.put(object())
        assert queue.stats().tail_id == 2 * len(values)


def test_a_codec_must_make_bytes(open_queue: Open) -> None:
    class Broken:
        def encode(self, value: object) -> str:
            return "text"

        def decode(self, data: bytes) -> object:
            return data

    with open_queue(codec=Broken()) as queue, pytest.raises(TypeError, match="str"):
        queue.put(1)


def test_without_a_codec_the_value_is_the_data(open_queue: Open) -> None:
    with open_queue() as queue:
        queue.put(b"plain")
        assert queue.get_nowait().value == b"plain"
