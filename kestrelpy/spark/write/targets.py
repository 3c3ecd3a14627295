"""Where the sink writes to: a folder of queues, or a store of shipped ones.

Rules:
1. A target is pickled into each task. It has no secret and no connection in it: both are made where it is used.
2. In a store, a failed commit may have published all the same, or may do so later. So parts are removed after a failure
   only if a task has sent nothing: then nobody has tried to publish. What stays is removed by the queue's owner, a day
   later.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kestrelpy import KestrelError, QueueLocked, _logging
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.purpose import refuse_jobs_in
from kestrelpy.arrow.errors import FilesNotSeen
from kestrelpy.inbox import Part, PartWriter, discard, publish, take_in
from kestrelpy.inbox.format import BatchPart
from kestrelpy.spark.locations import local_folder
from kestrelpy.spark.stores import StorePlace, is_store_alone


class SinkMistake(KestrelError, ValueError):
    """The rows cannot become items, or the options of the write are wrong or incomplete."""


class RowWriter(Protocol):
    """What takes rows: a ``PartWriter``, or a ``PartUploader``."""

    def add_packed(
        self, lengths: bytes, data: bytes | memoryview, count: int, *, expires_ms: int | None = None
    ) -> None: ...


class FolderTarget:
    """A queue in a folder on the driver's machine. Raises ``SinkMistake`` if it cannot be one, ``WrongKind``."""

    def __init__(self, path: str, queue: str) -> None:
        try:
            self._directory = local_folder(path)
        except ValueError as mistake:
            raise SinkMistake(str(mistake)) from None
        if is_store_alone(self._directory):
            raise SinkMistake(f"{path} is a store, and has no queue {queue!r}: its owner ships it there first")
        self._queue = queue
        _check_local(self._directory)
        refuse_jobs_in(self._directory, queue)

    def writer(self) -> AbstractContextManager[PartWriter]:
        """In a task: what its rows are written to."""
        return PartWriter(self._directory, self._queue)

    def finish(self, writer: PartWriter) -> tuple[Part, ...]:
        """In a task: seal what was written."""
        return (writer.seal(),)

    def publish(self, parts: Sequence[Part], app_id: str | None, version: int) -> None:
        """On the driver: publish the parts of all tasks, and ingest them if nobody has the queue open."""
        try:
            publish(self._directory, self._queue, parts, app_id=app_id, version=version)
        except FileNotFoundError as error:
            path = f"{self._directory}/inbox/{error.filename}"
            raise FilesNotSeen(path, "a task has written this part, and the driver does not see it") from error
        try:
            take_in(self._directory, self._queue)
        except QueueLocked:
            return  # an owner has the queue open, and ingests the batch

    def discard(self, parts: Sequence[Part], *, was_whole: bool) -> None:  # noqa: ARG002 - publishing is never in doubt
        """On the driver: remove the parts of a failed job. A failure is logged, so that Spark reports the job's."""
        try:
            discard(self._directory, self._queue, parts)
        except Exception:
            _logging.warning("the parts of a failed job stay in %s/inbox", self._directory, error=True)


class StoreTarget:
    """A shipped queue in a store, whose owner may be anywhere. ``wait``: seconds that a commit waits for the owner."""

    def __init__(self, place: StorePlace, queue: str, wait: float) -> None:
        self._place = place
        self._queue = queue
        self._wait = wait

    def writer(self) -> AbstractContextManager[Any]:
        """In a task: what its rows are written to."""
        from kestrelpy.ship import PartUploader

        return PartUploader(self._place.open(), self._queue)

    def finish(self, writer: Any) -> tuple[BatchPart, ...]:
        """In a task: upload the rest."""
        parts: tuple[BatchPart, ...] = writer.finish()
        return parts

    def publish(self, parts: Sequence[BatchPart], app_id: str | None, version: int) -> None:
        """On the driver: publish the parts of all tasks. The queue's owner takes them in."""
        from kestrelpy.ship import publish as publish_there

        publish_there(self._place.open(), self._queue, parts, app_id=app_id, version=version, wait=self._wait)

    def discard(self, parts: Sequence[BatchPart], *, was_whole: bool) -> None:
        """On the driver: remove the parts of a failed job, if nobody has tried to publish them. A failure is logged:
        who writes may have no right to delete.
        """
        if was_whole or not parts:
            return
        from kestrelpy.ship.in_objects import part_key

        try:
            self._place.open().delete([f"{self._queue}/{part_key(part.part_id)}" for part in parts])
        except Exception:
            _logging.warning("the parts of a failed job stay in %s/%s/in", self._place.url, self._queue, error=True)


def rows_of(batches: Iterator[Any], target: FolderTarget | StoreTarget, write: Any) -> tuple[Any, ...]:
    """In a task: write all rows, by ``write(writer, batch)``. Returns the parts."""
    with target.writer() as writer:
        for batch in batches:
            write(writer, batch)
        return target.finish(writer)


def wait_of(options: Mapping[str, str]) -> float:
    """The option ``txnWait``. Raises ``SinkMistake``."""
    given = options.get("txnWait", "0")
    try:
        seconds = float(given)
        if not seconds >= 0:
            raise ValueError
    except ValueError:
        raise SinkMistake(f"option txnWait must be seconds, and not negative, not {given!r}") from None
    return seconds


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
