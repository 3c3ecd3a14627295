"""The format ``"kestrel"``: the data source that gives Spark its readers, streams and sinks, and their columns."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from kestrelpy.arrow.columns import SCHEMA

__all__ = ["SCHEMA", "KestrelSource"]


class KestrelSource(DataSource):
    """A folder of queues, as Spark sees it. Spark makes this object, from the options of a read or a write."""

    @classmethod
    def name(cls) -> str:
        return "kestrel"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from kestrelpy.spark.read.batch import batch_reader

        return batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from kestrelpy.spark.read.stream import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from kestrelpy.spark.write.sink import BatchSink

        return BatchSink(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from kestrelpy.spark.write.sink import StreamSink

        return StreamSink(self.options, schema, overwrite)
