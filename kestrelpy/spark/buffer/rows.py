"""Turns items into Arrow tables, from which a driver buffer makes DataFrames.

The columns are ``id``, ``added``, ``expires`` and ``error_count``, and then the data. Without a codec and a schema, the
data is the column ``data``, as it is. With a codec, it is the column ``value``, of the type that Arrow infers. With a
schema, it is the columns of the schema. A value of a declared type has its fields there. A column of the schema
replaces a column of the item with the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as st

from kestrelpy.config import Codec
from kestrelpy.errors import KestrelError
from kestrelpy.item import Item

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_INSTANT = pa.timestamp("us", tz="UTC")
_MOST_ERRORS = (1 << 31) - 1
LAST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999. Spark can store later times, but Python cannot show them."""


class UndecodableItem(KestrelError, ValueError):
    """The codec or the schema refuses the data of an item: one of the items ``item_id`` to ``last_id``."""

    def __init__(self, item_id: int, last_id: int, cause: Exception) -> None:
        which = f"item {item_id}" if item_id == last_id else f"one of the items {item_id} to {last_id}"
        super().__init__(f"{which} cannot be decoded: {type(cause).__name__}: {cause}")
        self.item_id = item_id
        self.last_id = last_id


class Rows:
    """Turns the items of one buffer into DataFrames."""

    def __init__(self, spark: SparkSession, schema: st.StructType | str | None, codec: Codec | None) -> None:
        self._spark = spark
        self._codec = codec
        self._schema = _struct(schema)
        self._names: list[str] = []
        self._type: Any = None
        if self._schema is not None:
            from pyspark.sql.pandas.types import to_arrow_type

            self._names, self._type = self._schema.names, to_arrow_type(self._schema, timezone="UTC")

    def frame(self, items: Sequence[Item]) -> DataFrame:
        """The items as a DataFrame. Raises ``UndecodableItem``."""
        return self._spark.createDataFrame(self.table(items))

    def table(self, items: Sequence[Item]) -> pa.Table:
        """The items as an Arrow table. Raises ``UndecodableItem``."""
        columns: dict[str, Any] = {
            "id": pa.array([item.id for item in items], pa.int64()),
            "added": instants([item.added_ms for item in items]),
            "expires": instants([item.expires_ms for item in items]),
            "error_count": pa.array([min(item.error_count, _MOST_ERRORS) for item in items], pa.int32()),
        }
        if self._schema is None and self._codec is None:
            columns["data"] = pa.array([item.data for item in items], pa.binary())
        elif self._schema is None:
            columns["value"] = self._array(items)
        else:
            columns.update(zip(self._names, self._array(items).flatten(), strict=True))
        return pa.table(columns)

    def _array(self, items: Sequence[Item]) -> Any:
        values = []
        for item in items:
            try:
                values.append(as_fields(item.value if self._codec is None else self._codec.decode(item.data)))
            except Exception as error:
                raise UndecodableItem(item.id, item.id, error) from error
        try:
            return pa.array(values, self._type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UndecodableItem(items[0].id, items[-1].id, error) from error


def as_fields(value: Any) -> Any:
    """A value of a declared type (a dataclass, a model of pydantic, a ``Struct`` of msgspec) as a dict of its fields,
    which Arrow knows; so are those inside lists, tuples and dicts. Any other value is returned as it is.
    """
    kind = type(value)
    if kind is dict:
        return {name: as_fields(held) for name, held in value.items()}
    if kind is list or kind is tuple:
        return kind(map(as_fields, value))
    for fields in ("__dataclass_fields__", "__pydantic_fields__", "__struct_fields__"):
        names = getattr(kind, fields, None)
        if names is not None:
            return {name: as_fields(getattr(value, name)) for name in names}
    return value


def _struct(schema: st.StructType | str | None) -> st.StructType | None:
    if not isinstance(schema, str):
        return schema
    parsed = st.DataType.fromDDL(schema)
    if not isinstance(parsed, st.StructType):
        raise ValueError(f"schema must have columns with names, such as 'a int, b string', not {schema!r}")
    return parsed


def instants(milliseconds: Sequence[int | None]) -> Any:
    """Milliseconds as an Arrow column of timestamps for Spark: microseconds, UTC.

    ``None`` becomes null. A time after the year 9999 becomes the last millisecond of that year.
    """
    if all(ms is None for ms in milliseconds):
        return pa.nulls(len(milliseconds), _INSTANT)
    return pa.array([None if ms is None else min(ms, LAST_MS) * 1000 for ms in milliseconds], pa.int64()).cast(_INSTANT)
