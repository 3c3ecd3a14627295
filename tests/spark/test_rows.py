"""Items as Arrow tables, with every codec: a value of a declared type is the columns of its fields."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from pyspark.sql import types as st

from kestrelpy import Item, codecs
from kestrelpy.codecs import DecodeError, WrongKey
from kestrelpy.config import Codec
from kestrelpy.spark import UndecodableItem
from kestrelpy.spark.buffer.rows import Rows
from tests.support.packages import need_codecs

need_codecs()
msgspec, pydantic = pytest.importorskip("msgspec"), pytest.importorskip("pydantic")

KEYS = {"k": bytes(16)}


@dataclasses.dataclass
class Part:
    """A part of an order."""

    article: str


@dataclasses.dataclass
class Order:
    """An order of parts."""

    number: int
    parts: list[Part]


class Struct(msgspec.Struct):  # type: ignore[misc, name-defined, unused-ignore]
    """The same of msgspec."""

    number: int
    parts: list[Part]


class Model(pydantic.BaseModel):  # type: ignore[misc, name-defined, unused-ignore]
    """The same of pydantic."""

    number: int
    parts: list[Part]


FIELDS = {"number": 7, "parts": [{"article": "apple"}]}
PARTS = [Part("apple")]
CODECS: list[tuple[Codec[Any], Any]] = [
    (codecs.JSON, FIELDS),
    (codecs.msgspec(Order), Order(7, PARTS)),
    (codecs.msgspec(Struct, "msgpack"), Struct(7, PARTS)),
    (codecs.pydantic(Model), Model(number=7, parts=PARTS)),
    (codecs.zstd(codecs.pydantic(Order)), Order(7, PARTS)),
    (codecs.encrypted(KEYS, codecs.msgspec(Order)), Order(7, PARTS)),
]


def item(data: bytes) -> Item:
    return Item(5, data, 1_700_000_000_000, None, 0, cast("Any", None))


@pytest.mark.parametrize(("codec", "value"), CODECS)
def test_a_declared_type_is_a_column_of_its_fields(codec: Codec[Any], value: Any) -> None:
    table = Rows(cast("Any", None), None, codec).table([item(codec.encode(value))])
    assert table.column("value").to_pylist() == [FIELDS]


@pytest.mark.parametrize(("codec", "value"), CODECS)
def test_a_schema_has_a_column_for_each_field(codec: Codec[Any], value: Any) -> None:
    part = st.StructType([st.StructField("article", st.StringType())])
    schema = st.StructType([st.StructField("number", st.IntegerType()), st.StructField("parts", st.ArrayType(part))])
    table = Rows(cast("Any", None), schema, codec).table([item(codec.encode(value))])
    assert (table.column("number").to_pylist(), table.column("parts").to_pylist()) == ([7], [FIELDS["parts"]])


def test_bytes_and_values_stay_as_they_are() -> None:
    for codec, value in ((codecs.zstd(), b"\x00"), (codecs.JSON, [1, None]), (codecs.UTF8, "x")):
        table = Rows(cast("Any", None), None, cast("Any", codec)).table([item(cast("Any", codec).encode(value))])
        assert table.column("value").to_pylist() == [value]


def test_what_does_not_decode_names_its_item() -> None:
    data = codecs.encrypted(KEYS).encode(b"x")
    for codec, cause in ((codecs.encrypted({"j": KEYS["k"]}), WrongKey), (codecs.zstd(), DecodeError)):
        with pytest.raises(UndecodableItem, match=f"item 5 cannot be decoded: {cause.__name__}") as caught:
            Rows(cast("Any", None), None, codec).table([item(data)])
        assert isinstance(caught.value.__cause__, cause)
