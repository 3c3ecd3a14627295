"""The format ``"kestrel"``: what Spark asks for a reader, a stream or a sink, and the columns of each."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

SCHEMA = "queue string, id bigint, added timestamp, expires timestamp, error_count int, data binary, segment string"


class KestrelSource(DataSource):
    """A folder of queues, as Spark sees it. Made by Spark, from the options of a read or a write."""

    @classmethod
    def name(cls) -> str:
        return "kestrel"

    def schema(self) -> str:
        return SCHEMA
