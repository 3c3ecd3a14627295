"""The sink: rows of a DataFrame become items of a queue, through the queue's inbox.

    executors                                     driver                          owner of the queue
    task: rows -> a part, sealed, on disk  --.
    task: rows -> a part, sealed, on disk  ---+-> commit: publish, one rename --> ingests the batch, once
    failed or duplicate task: a part that no batch names, removed a day later

Rules:
1. Before a job's commit, none of its rows are in the queue. After the commit, all of them are: one rename publishes a
   batch, and the owner ingests it as a whole.
2. A batch carries its identity: ``txnAppId`` and ``txnVersion``. For a stream these are the id of the query, which is
   stored in the query's checkpoint, and the batch id. A batch that is published or ingested is not published again.
3. The queue need not be open. If no owner has it open, the commit ingests the batch.
4. Names, folders and options are checked on the driver, before the first row. There a mistake gives one sentence. In a
   task, Spark would try four times, and a stream would not say why it failed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType, TimestampNTZType, TimestampType

from kestrelpy import KestrelError, QueueLocked, _logging
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.file_names import check_name
from kestrelpy._journal.purpose import refuse_jobs_in
from kestrelpy.inbox import Part, PartWriter, discard, publish, take_in
from kestrelpy.spark.locations import FilesNotSeen, local_folder

CHUNK_BYTES = 256 << 10
CHUNK_ITEMS = 4096
"""The limits of one batch in a part, in bytes and in items. An item of any size can be a batch alone."""

_OPTIONS = {"path", "queue", "txnappid", "txnversion", "checkpointlocation"}


class SinkMistake(KestrelError, ValueError):
    """The rows cannot become items, or the options of the write are wrong or incomplete."""


class Sealed(WriterCommitMessage):
    """What a task passes to the commit: its part, and the id of its query (``""`` if there is no query)."""

    def __init__(self, part: Part, query_id: str) -> None:
        self.part = part
        self.query_id = query_id


class _Sink:
    """The common base of a batch write and a stream."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        _check_schema(schema)
        if overwrite:
            raise SinkMistake('items of a queue cannot be overwritten: write with mode("append")')
        unknown = sorted(name for name in options if name.lower() not in _OPTIONS)
        if unknown:
            raise SinkMistake(f"unknown option {unknown[0]!r}: the sink has the options queue, txnAppId and txnVersion")
        path, self._queue = options.get("path", ""), options.get("queue", "")
        if not path or not self._queue:
            raise SinkMistake('name the queue by .option("queue", name), and its folder in save() or start()')
        check_name(self._queue)
        try:
            self._directory = local_folder(path)
        except ValueError as mistake:
            raise SinkMistake(str(mistake)) from None
        _check_local(self._directory)
        refuse_jobs_in(self._directory, self._queue)
        self._app_id = options.get("txnAppId")
        version = options.get("txnVersion")
        try:
            self._version = None if version is None else int(version)
        except ValueError:
            raise SinkMistake(f"option txnVersion must be a whole number, not {version!r}") from None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sealed:
        """In a task: write all rows of the task into one sealed part."""
        with PartWriter(self._directory, self._queue) as writer:
            for batch in iterator:
                _write_rows(writer, batch)
            part = writer.seal()
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        return Sealed(part, query_id or "")

    def _publish(self, messages: Iterable[Sealed], app_id: str | None, version: int) -> None:
        parts = [message.part for message in messages]
        try:
            publish(self._directory, self._queue, parts, app_id=app_id, version=0 if app_id is None else version)
        except FileNotFoundError as error:
            path = f"{self._directory}/inbox/{error.filename}"
            raise FilesNotSeen(path, "a task has written this part, and the driver does not see it") from error
        try:
            take_in(self._directory, self._queue)
        except QueueLocked:
            return  # an owner has the queue open, and ingests the batch

    def _discard(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        """Remove the parts of a failed job.

        A failure here is logged only, so that Spark reports why the job failed. The queue's owner then removes the
        parts a day later.
        """
        try:
            discard(self._directory, self._queue, [message.part for message in _sealed(messages)])
        except Exception:
            _logging.warning("the parts of a failed job stay in %s/inbox", self._directory, error=True)


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


def _check_local(directory: str) -> None:
    """Raise ``SinkMistake`` if the driver cannot take locks in the folder, as publishing must.

    Tasks may write over a network file system.
    """
    try:
        RealDisk().directory(directory).close()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise SinkMistake(
            f"{directory}: {error.strerror}. The driver must be on the machine that has the queue's disk; "
            "executors may write over a shared file system"
        ) from None


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


def _write_rows(writer: PartWriter, batch: pa.RecordBatch) -> None:
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
