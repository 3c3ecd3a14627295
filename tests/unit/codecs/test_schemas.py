"""``codecs.msgspec``, ``codecs.pydantic``: declared types come back as they were, all else is a ``DecodeError``."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pickle
import re
import sys
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import KestrelError, codecs
from kestrelpy.config import Codec

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed: the extra [dev] has it")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: the extra [dev] has it")


@dataclasses.dataclass
class Line:
    """One article of an order."""

    article: str
    count: int
    tags: list[str]
    price: float | None = None


class Order(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """A model with an alias, a default and an instant."""

    number: int
    buyer: str = pydantic.Field(alias="who")
    at: datetime.datetime | None = None
    lines: list[Line] = []  # noqa: RUF012 - pydantic copies it


LINES = st.builds(
    Line,
    st.text(),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.text(), max_size=3),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
ORDERS = st.builds(
    lambda number, buyer, at, lines: Order(number=number, who=buyer, at=at, lines=lines),
    st.integers(),
    st.text(),
    st.none() | st.datetimes(timezones=st.just(datetime.UTC)),
    st.lists(LINES, max_size=3),
)
FORMATS: list[Literal["json", "msgpack"]] = ["json", "msgpack"]
GOOD = Line("apple", 3, ["red"], 0.5)


def all_codecs() -> list[Codec[Any]]:
    return [codecs.msgspec(Line), codecs.msgspec(Line, "msgpack"), codecs.pydantic(Line)]


@pytest.mark.parametrize("form", FORMATS)
@given(line=LINES)
def test_msgspec_round_trip(form: Literal["json", "msgpack"], line: Line) -> None:
    codec = codecs.msgspec(Line, form)
    assert codec.decode(codec.encode(line)) == line


@given(ORDERS)
def test_pydantic_round_trip(order: Order) -> None:
    codec = codecs.pydantic(Order)
    assert codec.decode(codec.encode(order)) == order


def test_other_types_than_classes() -> None:
    assert codecs.msgspec(list[int]).decode(b"[1,2]") == [1, 2]
    assert codecs.msgspec(int | str, "msgpack").decode(b"\x07") == 7
    assert codecs.pydantic(dict[str, int]).decode(b'{"a":"1"}') == {"a": 1}


def test_pydantic_takes_names_and_aliases() -> None:
    codec = codecs.pydantic(Order)
    assert codec.decode(b'{"number":1,"who":"x"}') == codec.decode(b'{"number":1,"buyer":"x"}')
    assert b'"buyer":"x"' in codec.encode(Order(number=1, who="x"))


@given(data=st.binary())
def test_any_bytes_are_a_value_or_a_decode_error(data: bytes) -> None:
    for codec in all_codecs():
        with contextlib.suppress(codecs.DecodeError):
            assert isinstance(codec.decode(data), Line)


@pytest.mark.parametrize("which", range(3))
def test_damaged_cut_and_other_bytes(which: int) -> None:
    codec = all_codecs()[which]
    whole = codec.encode(GOOD)
    others = [other.encode(GOOD) for other in all_codecs() if ("msgpack" in repr(other)) != ("msgpack" in repr(codec))]
    for data in [*(whole[:end] for end in range(len(whole))), whole + b"x", *others, b"[" * 100_000, b"\x91" * 100_000]:
        with pytest.raises(codecs.DecodeError, match="Line"):
            codec.decode(data)


def test_whatever_a_type_raises_for_bytes_is_one_error() -> None:
    with pytest.raises(codecs.DecodeError, match="repetition number"):
        codecs.pydantic(re.Pattern).decode(b'"a{99999999999999}"')


def test_a_value_that_does_not_fit_the_type() -> None:
    for codec in all_codecs():
        with pytest.raises((TypeError, ValueError)):
            codec.encode(object())
    with pytest.raises(ValueError, match="msgpack"):
        codecs.msgspec(int, "msgpack").encode(1 << 70)
    wrong = Line("apple", "three", [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count"):
        codecs.pydantic(Line).encode(wrong)


def test_errors_are_those_of_the_library_and_can_be_pickled() -> None:
    assert issubclass(codecs.DecodeError, KestrelError)
    assert issubclass(codecs.DecodeError, ValueError)
    with pytest.raises(codecs.DecodeError) as caught:
        codecs.msgspec(Line).decode(b"{")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ValueError, match="'yaml'"):
        codecs.msgspec(Line, "yaml")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["msgspec", "pydantic"])
def test_without_the_package(name: str) -> None:
    with mock.patch.dict(sys.modules, {name: None}), pytest.raises(ImportError, match=rf"kestrelpy\[{name}\]"):
        getattr(codecs, name)(Line)
