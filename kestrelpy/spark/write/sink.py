"""The sink: rows of a DataFrame become items of a queue, through the queue's inbox.

    executors                                     driver                          owner of the queue
    task: rows -> a part, sealed, on disk  --.
    task: rows -> a part, sealed, on disk  ---+-> commit: publish, one rename --> ingests the batch, once
    failed or duplicate task: a part that no batch names, removed a day later

In a store (``kestrelpy.ship``) parts and the batch are objects, and the owner may be anywhere.

Rules:
1. Before a job's commit, none of its rows are in the queue. After the commit, all of them are: one rename publishes a
   batch, and the owner ingests it as a whole.
2. A batch carries its identity: ``txnAppId`` and ``txnVersion``. For a stream these are the id of the query, which is
   stored in the query's checkpoint, and the batch id. A batch that is published or ingested is not published again.
3. The queue need not be open. If no owner has it open, the commit ingests the batch. In a store it waits for an owner.
4. Names, folders and options are checked on the driver, before the first row. There a mistake gives one sentence. In a
   task, Spark would try four times, and a stream would not say why it failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType, TimestampNTZType, TimestampType

from kestrelpy._journal.file_names import check_name
from kestrelpy.spark.stores import STORE_OPTIONS, refuse_secrets, store_of
from kestrelpy.spark.write.targets import FolderTarget, RowWriter, SinkMistake, StoreTarget, rows_of, wait_of

CHUNK_BYTES = 256 << 10
CHUNK_ITEMS = 4096
"""The limits of one batch in a part, in bytes and in items. An item of any size can be a batch alone."""

_OPTIONS = {"path", "queue", "txnappid", "txnversion", "checkpointlocation"}
_STORE_OPTIONS = {"txnwait", *(name.lower() for name in STORE_OPTIONS)}


class Sealed(WriterCommitMessage):
    """What a task passes to the commit: its parts, and the id of its query (``""`` if there is no query)."""

    def __init__(self, parts: tuple[Any, ...], query_id: str) -> None:
        self.parts = parts
        self.query_id = query_id


class _Sink:
    """The common base of a batch write and a stream."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        _check_schema(schema)
        if overwrite:
            raise SinkMistake('items of a queue cannot be overwritten: write with mode("append")')
        self._target = _target_of(options)
        self._app_id = options.get("txnAppId")
        version = options.get("txnVersion")
        try:
            self._version = None if version is None else int(version)
        except ValueError:
            raise SinkMistake(f"option txnVersion must be a whole number, not {version!r}") from None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sealed:
        """In a task: write all rows of the task into parts."""
        parts = rows_of(iterator, self._target, _write_rows)
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        return Sealed(parts, query_id or "")

    def _publish(self, messages: Iterable[Sealed], app_id: str | None, version: int) -> None:
        parts: list[Any] = [part for message in messages for part in message.parts]
        self._target.publish(parts, app_id, 0 if app_id is None else version)

    def _discard(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the parts of a failed job."""
        sent = _sealed(messages)
        parts: list[Any] = [part for message in sent for part in message.parts]
        self._target.discard(parts, was_whole=len(sent) == len(messages))


def _target_of(options: Mapping[str, str]) -> FolderTarget | StoreTarget:
    """Where the options say that rows go. Raises ``SinkMistake``, ``WrongKind``, ``InvalidName``."""
    path, queue = options.get("path", ""), options.get("queue", "")
    try:
        refuse_secrets(options)
    except ValueError as mistake:
        raise SinkMistake(str(mistake)) from None
    unknown = sorted(name for name in options if name.lower() not in {*_OPTIONS, *_STORE_OPTIONS})
    if unknown:
        raise SinkMistake(f"unknown option {unknown[0]!r}: the sink has the options queue, txnAppId and txnVersion")
    if not path or not queue:
        raise SinkMistake('name the queue by .option("queue", name), and its folder or store in save() or start()')
    check_name(queue)
    try:
        place = store_of(options)
    except ValueError as mistake:
        raise SinkMistake(str(mistake)) from None
    if place is not None:
        return StoreTarget(place, queue, wait_of(options))
    target = FolderTarget(path, queue)
    misplaced = sorted(name for name in options if name.lower() in _STORE_OPTIONS)
    if misplaced:
        raise SinkMistake(f"option {misplaced[0]!r} goes with a store, and {path} is a folder of queues")
    return target


class BatchSink(_Sink, DataSourceArrowWriter):
    """``df.write``: one batch. Its identity is the transaction that the options name, if they name one."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if (self._app_id is None) != (self._version is None):
            raise SinkMistake("txnAppId and txnVersion belong together: one is missing")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: publish the sealed parts of the tasks.

        Without a ``txnAppId``, only the parts identify the batch. Then a job that runs again is another batch.
        """
        self._publish(_sealed(messages), self._app_id, self._version or 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: the job failed; remove its parts."""
        self._discard(messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """``df.writeStream``: a batch for each micro-batch, identified by the query and the batch id."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if self._version is not None:
            raise SinkMistake("txnVersion of a stream is its batch id: remove the option txnVersion")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """On the driver: publish the sealed parts of this batch's tasks."""
        sealed = _sealed(messages)
        app_id = self._app_id or next((message.query_id for message in sealed if message.query_id), None)
        if sealed and not app_id:
            raise SinkMistake("Spark does not say which query this is: set the option txnAppId")
        self._publish(sealed, app_id, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """On the driver: the batch failed, and will come again; remove its parts."""
        self._discard(messages)


def _sealed(messages: Iterable[WriterCommitMessage | None]) -> list[Sealed]:
    """The messages of those tasks that have sent one."""
    return [message for message in messages if isinstance(message, Sealed)]


def _check_schema(schema: StructType) -> None:
    kinds = {field.name: field.dataType for field in schema.fields}
    other = sorted(set(kinds) - {"data", "expires"})
    if other:
        raise SinkMistake(f"column {other[0]!r} cannot be part of an item: select data, and expires if there is one")
    if not isinstance(kinds.get("data"), BinaryType | StringType):
        raise SinkMistake("the rows need the column data, binary or string")
    if not isinstance(kinds.get("expires", TimestampType()), TimestampType | TimestampNTZType):
        raise SinkMistake("the column expires must be a timestamp")


# -- rows into a part ------------------------------------------------------------------------------------------------


def _write_rows(writer: RowWriter, batch: pa.RecordBatch) -> None:
    """Write all rows of an Arrow batch, without an object for each row. Consecutive rows of one expiry go together."""
    data = batch.column("data")
    if data.null_count:
        raise SinkMistake("data is null in a row: an item must be bytes, and may be empty")
    if not len(data):
        return
    if not pa.types.is_binary(data.type):
        data = data.cast(pa.binary())
    _, offsets_buffer, data_buffer = data.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i4")[data.offset : data.offset + len(data) + 1].astype(np.int64)
    payload = memoryview(b"" if data_buffer is None else data_buffer)
    for first, end, expires_ms in _spans(offsets, _expiries(batch)):
        lengths = np.diff(offsets[first : end + 1]).astype("<u4").tobytes()
        writer.add_packed(lengths, payload[offsets[first] : offsets[end]], end - first, expires_ms=expires_ms)


def _expiries(batch: pa.RecordBatch) -> Any:
    """The expiry of each row in milliseconds since 1970, or -1 for none; ``None`` if no row has an expiry."""
    if "expires" not in batch.schema.names:
        return None
    column = batch.column("expires")
    if column.null_count == len(column):
        return None
    micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    expiries = np.maximum(micros.fill_null(0).to_numpy(zero_copy_only=False) // 1000, 0)
    expiries[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return expiries


def _spans(offsets: Any, expiries: Any) -> Iterator[tuple[int, int, int | None]]:
    """Cut the rows into batches of one expiry: the first row, the row after the last, and the expiry."""
    count = len(offsets) - 1
    breaks = [0, count] if expiries is None else [0, *(np.flatnonzero(np.diff(expiries)) + 1).tolist(), count]
    for first, last in pairwise(breaks):
        expires_ms = None if expiries is None or expiries[first] < 0 else int(expiries[first])
        while first < last:
            fits = int(np.searchsorted(offsets, offsets[first] + CHUNK_BYTES, "right")) - 1
            end = min(max(fits, first + 1), first + CHUNK_ITEMS, last)
            yield first, end, expires_ms
            first = end
