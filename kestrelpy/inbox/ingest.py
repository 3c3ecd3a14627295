"""Taking published batches into a queue's journal: each once, and all of it or nothing.

Rules:
1. A batch is checked to the last byte before anything of it is taken. One that can never be taken is kept aside.
2. Before the first item of a batch is appended, all that is before it in the journal is on disk, so are the names of
   the batch and its parts, and then the intent: which batch, from which count of items on.
3. Nothing else is put until all items of it are on disk, and then that it is done. Readers see nothing of it before.
4. What is cut short is gone on with, by the count of items that are there: ids may jump at a crash. An intent is
   believed only when it is on disk by the hand of who goes on with it.
5. The files go last, the parts before the batch that names them: a part that no batch names was never taken in, and
   may be published. What is remembered of a batch is forgotten only when its name is gone for good.

NOTE ON LOCKING: a single-threaded state machine: its caller sees to that. What must not run beside puts is done within
``Host.lock``.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_ROOM, Directory
from kestrelpy._journal import file_names
from kestrelpy._journal.journal import Journal
from kestrelpy.errors import CorruptJournal, KestrelError, QueueDiskFull, QueueFull, QueueLocked, UnsupportedFormat
from kestrelpy.inbox.format import Intent, PublishedBatch
from kestrelpy.inbox.ledger import FOREIGN, IngestLedger, read_batch
from kestrelpy.inbox.parts import PartFile, is_old

OLD_SECONDS = 24 * 3600.0
"""A part that no batch names, begun so long ago, was left over: no task writes one for a day."""


class Host(Protocol):
    """Who has the queue open."""

    journal: Journal
    max_item_bytes: int | None

    def lock(self) -> AbstractContextManager[object]:
        """Keeps puts out."""

    def now_ms(self) -> int: ...

    def has_room_locked(self, batch: PublishedBatch) -> bool:
        """Whether the readers' limits allow it now."""

    def sync_locked(self) -> None:
        """Return when all of the journal is on disk. Raises ``DurabilityUnknown``."""

    def hide_locked(self, first_id: int) -> None:
        """Let readers see nothing from that id on. May be repeated."""

    def show_locked(self) -> None:
        """Let readers see all there is, which is on disk."""

    def refuse_locked(self, error: Exception) -> None:
        """Let puts raise ``error``, until ``hide_locked`` or ``show_locked`` is called again."""


class Ingest:
    """The inbox of one queue, for who has the queue open. ``unfinished``: a batch of which not all is taken in.
    ``refused``: how many were kept aside, before and since.
    """

    def __init__(self, folder: Directory, queue: str, host: Host) -> None:
        self._folder = folder
        self._queue = queue
        self._host = host
        self._memory = IngestLedger(folder, queue, host.now_ms())
        self._intent: Intent | None = None
        self._sound: set[bytes] = set()  # batches that were checked, and wait for room
        self.unfinished: PublishedBatch | None = None
        self.refused = len(file_names.refused_among(folder.names(), queue))

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, *, quarantine: bool) -> None:
        """Find what an earlier owner has begun, and go on with it. Before anything is put.

        Raises ``CorruptJournal`` if half of a batch is there and the other half can't be read; with ``quarantine``
        what is there counts. ``DurabilityUnknown``. Any other failure leaves it ``unfinished``.
        """
        self._remove_old()
        intent, journal = self._memory.state.intent, self._host.journal
        if intent is None:
            return
        there = self._count_there(intent) if intent.queue_id == journal.queue_id else 0
        batch = self._published(intent)
        objection = None if there >= intent.items else self._objection(batch)
        if there <= 0 and (objection is not None or intent.queue_id != journal.queue_id):
            self._memory.give_up()  # what becomes of the batch is seen when it is looked at again
            return
        if batch is None or objection is not None:
            if there < intent.items:
                reason = objection or "it is not there"
                if not quarantine:
                    path = f"{self._folder.path}/{file_names.batch_name(self._queue, intent.number)}"
                    raise CorruptJournal(path, 0, f"{there} of its {intent.items} items are taken in; but {reason}")
                _logging.warning("%d of %d items of batch %d stay: %s", there, intent.items, intent.number, reason)
            batch = batch or PublishedBatch(intent.batch_id, intent.number, intent.app_id, intent.version, ())
            self._memory.finish(batch)
            return
        self.unfinished, self._intent = batch, intent
        with self._host.lock():
            self._host.hide_locked(intent.first_id)

    def _published(self, intent: Intent) -> PublishedBatch | None:
        batch = read_batch(self._folder, file_names.batch_name(self._queue, intent.number))
        return batch if batch is not None and batch.batch_id == intent.batch_id else None

    def _count_there(self, intent: Intent) -> int:
        """How many of the batch's items are in the journal."""
        journal = self._host.journal
        return journal.tail_id - journal.missing - intent.base_items

    def _remove_old(self) -> None:
        """Remove what was left over: temporary files, and old parts that no batch names. Not while somebody publishes,
        and no part while there is a batch of which nobody knows what it names.
        """
        try:
            old = [name for name in self._folder.names() if self._may_be_old(name)]
            if old:
                self._remove(old)
        except QueueLocked:
            return
        except (KestrelError, OSError):
            _logging.warning("what was left over in %s could not be removed", self._folder.path, error=True)

    def _remove(self, old: list[str]) -> None:
        with self._publishing():
            self._remove_unnamed(old)  # a separate function: docs/interrupts.md, rule 3

    def _remove_unnamed(self, old: list[str]) -> None:
        there = [(name, file_names.parse_inbox(name)) for name in self._folder.names()]
        mine = [(name, about) for name, about in there if about is not None and about.queue == self._queue]
        batches = [read_batch(self._folder, name) for name, about in mine if about.number and not about.is_temporary]
        named = {part.part_id for batch in batches if batch is not None for part in batch.parts}
        for name, about in mine:
            is_unnamed = about.part_id is not None and about.part_id not in named and None not in batches
            if name in old and (about.is_temporary or is_unnamed):
                self._unlink(name)

    def _may_be_old(self, name: str) -> bool:
        about = file_names.parse_inbox(name)
        if about is None or about.queue != self._queue:
            return False
        return about.is_temporary or (
            about.part_id is not None and is_old(about.part_id, self._host.now_ms(), OLD_SECONDS)
        )

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        lock = self._folder.lock(file_names.lock_name(self._queue))
        try:
            yield
        finally:
            lock.release()

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._folder.unlink(name)

    # -- taking in ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take in all that is published, in the order of its publishing; how many items. Stops at a batch for which
        a reader has no room.

        Raises ``OSError`` (``QueueDiskFull``, ``DurabilityUnknown``); the rest waits for the next call.
        """
        taken = self.finish()
        for _, name in file_names.batches_among(self._folder.names(), self._queue):
            batch = None
            try:
                batch = read_batch(self._folder, name)
            except OSError as error:
                if error.errno not in FOREIGN:
                    raise
            except UnsupportedFormat:
                _logging.warning("%s/%s is of a newer version: it waits, and all behind it", self._folder.path, name)
                break
            if batch is not None and file_names.batch_name(self._queue, batch.number) == name:
                if self._memory.state.knows(batch):
                    self._memory.settle()
                    self._clear(batch)
                    continue
                objection = None if batch.batch_id in self._sound else self._objection(batch)
                if objection is None:
                    self._sound.add(batch.batch_id)
                    if not self._begin(batch):
                        break
                    taken += batch.items
                    continue
            else:
                objection = "this is no published batch"
            self._put_aside(name, objection)
        return taken

    def finish(self) -> int:
        """Go on with what is unfinished; how many items that brings in all. Raises as ``run``."""
        batch, intent = self.unfinished, self._intent
        if batch is None or intent is None:
            return 0
        with self._host.lock():
            self._go_on_locked(batch, intent)
        self._clear(batch)
        return batch.items

    def _objection(self, batch: PublishedBatch | None) -> str | None:
        """Why a batch can never be taken in, if so. Raises ``OSError`` for what may be otherwise the next time."""
        if batch is None:
            return "it is not there"
        most = self._host.max_item_bytes
        for part in batch.parts:
            try:
                file = PartFile(self._folder, self._queue, part)
            except OSError as error:
                if error.errno not in (errno.ENOENT, *FOREIGN):
                    raise
                return str(error)
            try:
                largest = file.largest()
            except CorruptJournal as damage:
                return str(damage)
            finally:
                file.close()
            if most is not None and largest > most:
                return f"an item of {largest:,} bytes is larger than max_item_bytes={most:,}"
        return None

    def _put_aside(self, name: str, objection: str) -> None:
        number = file_names.batches_among([name], self._queue)[0][0]
        _logging.warning("%s/%s can't be taken in, and is kept as .refused: %s", self._folder.path, name, objection)
        with contextlib.suppress(FileNotFoundError):
            self._folder.rename(name, file_names.refused_name(self._queue, number))
            self.refused += 1

    def _begin(self, batch: PublishedBatch) -> bool:
        """Take in a batch that was checked; whether there was room for it."""
        names = self._folder.names()
        self._folder.sync()  # the batch and its parts are there for good, and what is not listed never comes back
        self._memory.forget_cleared({number for number, _ in file_names.batches_among(names, self._queue)})
        host = self._host
        with host.lock():
            if not host.has_room_locked(batch):
                return False
            host.sync_locked()
            journal = host.journal
            first_id, base_items = journal.tail_id + 1, journal.tail_id - journal.missing
            about = batch.batch_id, journal.queue_id, batch.number
            self._go_on_locked(batch, Intent(*about, first_id, base_items, batch.items, batch.version, batch.app_id))
        self._sound.discard(batch.batch_id)
        self._clear(batch)
        return True

    def _go_on_locked(self, batch: PublishedBatch, intent: Intent) -> None:
        """Append what is not there of the batch, and see to it that all of it, and the word of it, is on disk."""
        host, memory = self._host, self._memory
        try:
            self.unfinished, self._intent = batch, intent
            host.hide_locked(intent.first_id)
            memory.begin(intent)
            self._append_rest(batch, self._count_there(intent))
            host.sync_locked()
            memory.finish(batch)
        except BaseException as error:
            if memory.state.intent is None and not memory.is_unsure:  # nothing was begun: it is as it was before
                self.unfinished = self._intent = None
                host.show_locked()
            else:
                host.refuse_locked(error if isinstance(error, Exception) else QueueFull("a batch is being taken in"))
            if isinstance(error, OSError) and not isinstance(error, KestrelError) and error.errno in NO_ROOM:
                raise QueueDiskFull(self._folder.path) from error
            raise
        self.unfinished = self._intent = None
        host.show_locked()

    def _append_rest(self, batch: PublishedBatch, there: int) -> None:
        journal, added_ms = self._host.journal, self._host.now_ms()
        for part in batch.parts:
            if there < part.items:
                file = PartFile(self._folder, self._queue, part)
                try:
                    for body in file.bodies(max(there, 0), journal.most_body_bytes):
                        journal.append_body(body, added_ms)
                finally:
                    file.close()
            there -= part.items

    def _clear(self, batch: PublishedBatch) -> None:
        """The files of a batch that is done go. Failing that they are looked at again, and known."""
        for part in batch.parts:
            self._unlink(file_names.part_name(self._queue, part.part_id))
        self._unlink(file_names.batch_name(self._queue, batch.number))


def erase_inbox(folder: Directory, queue: str) -> None:
    """Delete the files of this queue in the inbox. First what is remembered, for good: a batch that is half taken in is
    none then, should the rest be there after a crash. Raises ``OSError``.
    """
    there = [(name, file_names.parse_inbox(name)) for name in folder.names()]
    mine = [name for name, about in there if about is not None and about.queue == queue]
    memory = file_names.ledger_name(queue)
    for name in sorted(mine, key=lambda name: (name != memory, name.endswith(".lock"), name.endswith(".part"), name)):
        with contextlib.suppress(FileNotFoundError):
            folder.unlink(name)
        if name == memory:
            folder.sync()
    folder.sync()
