"""Spools: where a process that does not own a queue keeps its records, until they are published in the inbox.

A spool is a small journaled queue of its own, in the folder ``spool/QUEUE`` beside the queue. A process has one open at
a time. So a put into it has the price and the promise of a put into a queue: the record survives the death of the
process. What is in a spool is published for the queue, as batches that the queue's owner ingests.

Rules:
1. A batch has the spool's name as its ``app_id``, and the id of its last record as its version. So a batch that was
   published before a kill, and is published again after it, is dropped: each record arrives once.
2. Whoever opens a spool first publishes what another process has left in it. Its records are older.
3. The name of a spool is random and never used again, as versions must rise. Spools stay for the next process.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from kestrelpy import (
    CorruptJournal,
    ItemTooLarge,
    JournaledQueue,
    KestrelError,
    QueueLocked,
    SystemClock,
    inbox,
    inspect,
    queue_names,
)
from kestrelpy._disk.interface import text_of
from kestrelpy._process import remember
from kestrelpy.logging.threads import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from kestrelpy.clock import Timer
    from kestrelpy.item import Item

MOST_ITEMS = 20_000
MOST_BYTES = 8 << 20
"""So many records, or so many bytes of them, are published at once."""
SEGMENT_BYTES = 4 << 20
SWEEP_SECONDS = 10.0
"""How often a process looks for spools that others have left."""


def folder_of(directory: str, queue: str) -> str:
    """Where the spools for a queue are."""
    return f"{directory}/spool/{queue}"


class Spool:
    """One spool that this process has open. Thread-safe but for ``publish``, which one thread calls at a time."""

    def __init__(self, directory: str, queue: str, name: str) -> None:
        """Open it. Raises ``QueueLocked`` if another process has it, ``KestrelError``, ``OSError``."""
        self._directory = directory
        self._queue = queue
        self._app_id = f"kestrelpy.logging {name}"
        self._last: int | None = None  # the last id that is known to be published, or None if that is not known
        self.journal = JournaledQueue(
            folder_of(directory, queue),
            name,
            segment_bytes=SEGMENT_BYTES,
            on_corruption="quarantine",
            inbox_interval=None,
        )
        remember(self.journal, must_close=False)  # a program may end while a thread of this package has it open
        self.put = self.journal.put

    @classmethod
    def open(cls, directory: str, queue: str) -> Spool:
        """A spool that nobody has, or a new one. Raises ``OSError``, ``WrongKind``, ``InvalidName``."""
        with inbox.PartWriter(directory, queue):  # raises what would be raised when the records are published
            pass
        names = spools_of(directory, queue)
        random = os.urandom(8)
        first = random[0] % (len(names) or 1)  # processes that start together do not all try the same ones
        for name in (*names[first:], *names[:first]):
            with suppress(QueueLocked, CorruptJournal):
                return cls(directory, queue, name)
        return cls(directory, queue, random.hex())

    def publish(self) -> int:
        """Publish for the queue what is there now; returns the number of records. Raises ``KestrelError``, ``OSError``:
        then the rest stays, and the next call goes on.
        """
        reader, count = self.journal.reader(), 0
        most = reader.items  # those that come meanwhile wait for others: a batch costs several syncs
        while count < most:
            items = reader.get_many(min(MOST_ITEMS, most - count), max_bytes=MOST_BYTES, timeout=0)
            try:
                last, self._last = self._last, None
                if last is None:
                    last = inbox.last_version(self._directory, self._queue, self._app_id) or 0
                self._publish(_after(last, items), items[-1].id)
                self._last = max(last, items[-1].id)
            except BaseException:
                with suppress(KestrelError):  # of a spool that is closed: its items come again
                    for item in items:
                        reader.abort(item, counts=False)
                raise
            reader.commit_many(items)
            count += len(items)
        return count

    def _publish(self, items: list[Item], version: int) -> None:
        if not items:
            return
        with inbox.PartWriter(self._directory, self._queue) as writer:
            try:
                writer.add([item.data for item in items])
            except ItemTooLarge:
                for item in items:
                    _add_if_it_fits(writer, item, self._queue)
            part = writer.seal()
        try:
            inbox.publish(self._directory, self._queue, [part], app_id=self._app_id, version=version)
        except BaseException:
            with suppress(KestrelError, OSError):
                inbox.discard(self._directory, self._queue, [part])
            raise


def _after(last_id: int, items: list[Item]) -> list[Item]:
    return [item for item in items if item.id > last_id]


def _add_if_it_fits(writer: inbox.PartWriter, item: Item, queue: str) -> None:
    try:
        writer.add([item.data])
    except ItemTooLarge as error:
        import logging

        logging.getLogger("kestrelpy").warning("a log record for queue %s is dropped: %s", queue, error)


def spools_of(directory: str, queue: str) -> list[str]:
    """The names of all spools for a queue."""
    try:
        return queue_names(folder_of(directory, queue))
    except FileNotFoundError:
        return []


def _has_records(directory: str, queue: str, name: str) -> bool:
    """False if all that was ever put into the spool is published. Opens nothing."""
    try:
        found = inspect(folder_of(directory, queue), name)
    except (KestrelError, OSError):  # opening it will show why
        return True
    return found.tail_id > max((reader.head for reader in found.readers), default=0)


def collect(directory: str | os.PathLike[str], queue: str) -> int:
    """Publish the records that processes have left, which were killed, for their ``queue`` in ``directory``; returns
    how many. The owner of the queue ingests them as all that is published.

    Handlers and listeners of ``kestrelpy.logging`` do this every ten seconds. So this call is for a service that has
    none of them. Records of processes that live are left to those processes. May be called by any process at any time.
    Raises ``InvalidName``, ``WrongKind``, ``OSError``.
    """
    directory, count = text_of(directory), 0
    for name in spools_of(directory, queue):
        if _has_records(directory, queue, name):
            try:
                spool = Spool(directory, queue, name)
            except QueueLocked:
                continue
            try:
                count += spool.publish()
            finally:
                spool.journal.close()
    return count


class SpoolSweep:
    """Calls ``collect`` every ten seconds, until ``stop``, or until nobody has this object any more."""

    def __init__(self, directory: str, queue: str) -> None:
        self._directory = directory
        self._queue = queue
        self._stopped = False
        self._clock = SystemClock()
        self._timer: Timer | None = None
        self._arm()

    def stop(self) -> None:
        self._stopped = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _arm(self) -> None:
        look = weakref.WeakMethod(self._look)
        if not self._stopped:
            with suppress(RuntimeError):  # no thread can be started: the next process that looks finds what is left
                self._timer = self._clock.call_later(SWEEP_SECONDS, lambda: _call(look()))

    def _look(self) -> None:
        """On the maintenance thread: a folder is listed, and the rest is done by a thread of its own."""
        names = []
        with suppress(KestrelError, OSError):
            names = spools_of(self._directory, self._queue)
        if names:
            with suppress(RuntimeError):
                Thread(target=self._collect, name="kestrelpy-logging", daemon=True).start()
                return
        self._arm()

    def _collect(self) -> None:
        state.is_silent = True
        try:
            with suppress(KestrelError, OSError):  # it is tried again
                collect(self._directory, self._queue)
        finally:
            self._arm()


def _call(look: Callable[[], object] | None) -> None:
    if look is not None:
        look()
