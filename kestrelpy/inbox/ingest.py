"""Ingests published batches into a queue's journal: each batch once, all of it or nothing.

Rules:
1. A batch is checked to the last byte before any item of it is ingested. A batch that can never be ingested is kept
   aside.
2. Before the first item of a batch is appended, these are on disk: all items before it in the journal, the names of the
   batch and of its parts, and after them the intent, which names the batch and the count of items before it.
3. Nothing else is put until all items of the batch are on disk, and after them the record that it was ingested. Readers
   see no item of the batch before that.
4. An ingest that was cut short is resumed, by the count of items that are there: ids may jump at a crash. A process
   relies on an intent only after it has written the intent to disk itself.
5. The files are deleted last, and the parts before the batch that names them. So a part that no batch names was never
   ingested, and may be published. The ledger forgets a batch only when the batch's name is gone for good.
6. A batch that was fetched from a store is published here like any other, and has its number there. The record that it
   was ingested has that number, too: so a copy of the ledger says at once what is in the journal and what is to be
   fetched next. One is fetched when the one before is over: ingested, known or refused, by the ledger.

NOTE ON LOCKING: this is a single-threaded state machine; the caller ensures that. Everything that must not run beside
puts runs within ``Host.lock``.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_REGULAR_FILE, NO_ROOM, Directory
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.moves import is_move
from kestrelpy.errors import CorruptJournal, KestrelError, QueueDiskFull, QueueFull, QueueLocked, UnsupportedFormat
from kestrelpy.inbox.format import Intent, LedgerState, PublishedBatch, StoreMark, encode_batch_file
from kestrelpy.inbox.ledger import IngestLedger, read_batch
from kestrelpy.inbox.parts import PartFile, is_old

DAY_MS = 86_400_000
OLD_SECONDS = 24 * 3600.0
"""A part that no batch names and that was begun this long ago is a leftover: no task writes a part for a day."""


class Host(Protocol):
    """What an ingest needs of the process that has the queue open: the journal, the limits, the readers."""

    journal: Journal
    max_item_bytes: int | None

    def lock(self) -> AbstractContextManager[object]:
        """The lock that keeps puts out."""

    def now_ms(self) -> int: ...

    def items(self) -> int:
        """``Copied.items``, as the next two."""

    def copied_items(self) -> int | None: ...

    def note_ledger(self, state: LedgerState, from_items: int) -> None: ...

    def has_room_locked(self, batch: PublishedBatch) -> bool:
        """True if the limits of all readers allow the batch now."""

    def sync_locked(self) -> None:
        """Sync the journal: return when all of it is on disk. Raises ``DurabilityUnknown``."""

    def hide_from_locked(self, first_id: int) -> None:
        """Hide all items from ``first_id`` on from readers. May be repeated."""

    def publish_locked(self) -> None:
        """Show all items to readers. All of them are on disk."""

    def refuse_locked(self, error: Exception) -> None:
        """Make puts raise ``error`` until the next call of ``hide_from_locked`` or ``publish_locked``."""


class Ingest:
    """Ingests from the inbox of one queue, for the process that has the queue open.

    ``unfinished``: the batch that is not completely ingested, if any. ``refused``: the number of batches kept aside, by
    this process or before. ``remembers_ms``: for so long a batch of a store is remembered, if it has no app_id.
    """

    def __init__(self, folder: Directory, queue: str, host: Host, *, remembers_ms: int = DAY_MS) -> None:
        self._folder = folder
        self._remembers_ms = remembers_ms
        self._queue = queue
        self._host = host
        self._ledger = IngestLedger(folder, queue, host.now_ms(), host)
        self._intent: Intent | None = None
        self._checked: set[bytes] = set()  # batches that were checked and wait for room
        self.unfinished: PublishedBatch | None = None
        self.refused = len(file_names.refused_among(folder.names(), queue))

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self, *, quarantine: bool) -> None:
        """Find a batch that an earlier owner began, and prepare to resume it. Called before anything is put.

        Raises ``CorruptJournal`` if some items of the batch are in the journal and the rest cannot be read; with
        ``quarantine`` the items that are there stay, and the batch counts as ingested. Raises ``OSError`` if it cannot
        be known whether a batch was begun, and ``UnsupportedFormat``.
        """
        self._remove_old()
        intent, journal = self._ledger.state.intent, self._host.journal
        if intent is None:
            return
        there = self._count_there(intent) if intent.queue_id == journal.queue_id else 0
        batch = self._published(intent)
        objection = None if there >= intent.items else self._why_refused(batch)
        if there <= 0 and (objection is not None or intent.queue_id != journal.queue_id):
            self._ledger.give_up()  # the next look at the batch decides what becomes of it
            return
        if batch is None or objection is not None:
            if there < intent.items:
                reason = objection or "the published batch is missing"
                if not quarantine:
                    path = f"{self._folder.path}/{file_names.batch_name(self._queue, intent.number)}"
                    raise CorruptJournal(path, 0, f"{there} of its {intent.items} items are ingested, but {reason}")
                _logging.warning("%d of %d items of batch %d stay, as %s", there, intent.items, intent.number, reason)
            batch = batch or PublishedBatch(
                intent.batch_id, intent.number, intent.app_id, intent.version, (), intent.stored
            )
            self._finish(batch)
            return
        self.unfinished, self._intent = batch, intent
        with self._host.lock():
            self._host.hide_from_locked(intent.first_id)

    def _published(self, intent: Intent) -> PublishedBatch | None:
        batch = read_batch(self._folder, file_names.batch_name(self._queue, intent.number))
        return batch if batch is not None and batch.batch_id == intent.batch_id else None

    def _count_there(self, intent: Intent) -> int:
        """The number of the batch's items that are in the journal."""
        return self._host.items() - intent.base_items

    def _remove_old(self) -> None:
        """Remove leftovers: temporary files, and old parts that no batch names.

        Nothing is removed while another process publishes. No part is removed while there is a batch that cannot be
        read, as that batch may name the part.
        """
        try:
            old = [name for name in self._folder.names() if self._may_be_old(name)]
            if old:
                self._remove(old)
        except QueueLocked:
            return
        except (KestrelError, OSError):
            _logging.warning("leftover files in %s could not be removed", self._folder.path, error=True)

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

    # -- ingesting ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Ingest all published batches, in the order of publishing; returns the number of items.

        Stops at a batch for which a reader has no room. Raises ``OSError`` (``QueueDiskFull``, ``DurabilityUnknown``);
        the batches that are left wait for the next call.
        """
        taken = self.finish()
        for _, name in file_names.batches_among(self._folder.names(), self._queue):
            batch = None
            try:
                batch = read_batch(self._folder, name)
            except OSError as error:
                if error.errno not in NO_REGULAR_FILE:
                    raise
            except UnsupportedFormat:
                _logging.warning("%s/%s has a newer version: it waits, with all after it", self._folder.path, name)
                break
            if batch is not None and file_names.batch_name(self._queue, batch.number) == name:
                if self._is_known(batch):
                    self._ledger.make_durable()
                    self._put_away(batch)
                    continue
                objection = None if batch.batch_id in self._checked else self._why_refused(batch)
                if objection is None:
                    self._checked.add(batch.batch_id)
                    if not self._begin(batch):
                        break
                    taken += batch.items
                    continue
            else:
                objection = "this is not a published batch"
            if batch is not None and batch.stored:
                self._pass_over(batch.stored, StoreMark(batch.batch_id, self._host.now_ms(), refused=True))
            self._refuse(name, objection)
        return taken

    def _is_known(self, batch: PublishedBatch) -> bool:
        """Whether nothing is left to do for a batch, by the ledger. What a store had twice, it has no more for us."""
        state = self._ledger.state
        is_known = state.knows(batch)
        if is_known and batch.stored > state.taken:
            self._pass_over(batch.stored, None)
        return is_known or state.is_over(batch)

    def _put_away(self, batch: PublishedBatch) -> None:
        """Delete the files of a batch that is over, or keep them if it was refused."""
        if self._ledger.state.has_refused(batch.stored, batch.batch_id):
            name = file_names.batch_name(self._queue, batch.number)
            self._refuse(name, "it was refused before")
        else:
            self._clear(batch)

    def finish(self) -> int:
        """Finish the unfinished batch, if any; returns the number of all its items. Raises as ``run``."""
        batch, intent = self.unfinished, self._intent
        if batch is None or intent is None:
            return 0
        with self._host.lock():
            self._resume_locked(batch, intent)
        self._clear(batch)
        return batch.items

    def _why_refused(self, batch: PublishedBatch | None) -> str | None:
        """Why the batch can never be ingested; ``None`` if it can. Raises ``OSError`` for errors that may pass."""
        if batch is None:
            return "the published batch is missing"
        is_checked = is_move(batch.app_id) and not batch.stored
        most = None if is_checked else self._host.max_item_bytes
        for part in batch.parts:
            try:
                file = PartFile(self._folder, self._queue, part)
            except OSError as error:
                if error.errno not in (errno.ENOENT, *NO_REGULAR_FILE):
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

    def _refuse(self, name: str, objection: str) -> None:
        number = file_names.batches_among([name], self._queue)[0][0]
        _logging.warning("%s/%s can't be ingested, and is kept as .refused: %s", self._folder.path, name, objection)
        with contextlib.suppress(FileNotFoundError):
            self._folder.rename(name, file_names.refused_name(self._queue, number))
            self.refused += 1

    def _begin(self, batch: PublishedBatch) -> bool:
        """Ingest a batch that was checked; False if there is no room for it."""
        names = self._folder.names()
        self._folder.sync()  # now the batch and its parts stay, and a file that is not listed never comes back
        self._ledger.forget_cleared({number for number, _ in file_names.batches_among(names, self._queue)})
        host = self._host
        with host.lock():
            if not host.has_room_locked(batch):
                return False
            host.sync_locked()
            journal = host.journal
            first_id, base_items = journal.tail_id + 1, host.items()
            place = batch.batch_id, journal.queue_id, batch.number, first_id, base_items
            about = batch.items, batch.version, batch.app_id, batch.stored
            self._resume_locked(batch, Intent(*place, *about))
        self._checked.discard(batch.batch_id)
        self._clear(batch)
        return True

    def _resume_locked(self, batch: PublishedBatch, intent: Intent) -> None:
        """Append the missing items of the batch, sync them, and record on disk that the batch was ingested."""
        host, ledger = self._host, self._ledger
        try:
            self.unfinished, self._intent = batch, intent
            host.hide_from_locked(intent.first_id)
            ledger.begin(intent)
            self._append_rest(batch, self._count_there(intent))
            host.sync_locked()
            self._finish(batch)
        except BaseException as error:
            if ledger.state.intent is None and not ledger.is_unsure:  # nothing was begun, so nothing has changed
                self.unfinished = self._intent = None
                host.publish_locked()
            else:
                host.refuse_locked(
                    error
                    if isinstance(error, Exception)
                    else QueueFull(f"queue {self._queue}: a batch is being ingested; retry")
                )
            if isinstance(error, OSError) and not isinstance(error, KestrelError) and error.errno in NO_ROOM:
                raise QueueDiskFull(self._folder.path) from error
            raise
        self.unfinished = self._intent = None
        host.publish_locked()

    def _finish(self, batch: PublishedBatch) -> None:
        now_ms = self._host.now_ms()
        if batch.stored:
            self._ledger.forget_marks(now_ms - self._remembers_ms)
        self._ledger.finish(batch, now_ms)

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
        """Delete the files of an ingested batch. If that fails, the next ``run`` finds the batch in the ledger."""
        for part in batch.parts:
            self._unlink(file_names.part_name(self._queue, part.part_id))
        self._unlink(file_names.batch_name(self._queue, batch.number))

    # -- from a store ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> LedgerState:
        """What the ledger says."""
        return self._ledger.state

    def raise_taken(self, taken: int) -> None:
        """The last batch that was taken from the store is this one, by the log there."""
        self._ledger.raise_taken(taken)

    def unfinished_of_store(self) -> Intent | None:
        """The intent of a batch of a store that cannot be finished with the files here; ``None`` if there is none.
        Called before ``open``. Raises ``OSError``.
        """
        intent, journal = self._ledger.state.intent, self._host.journal
        if intent is None or not intent.stored or intent.queue_id != journal.queue_id:
            return None
        is_whole = self._count_there(intent) >= intent.items or self._why_refused(self._published(intent)) is None
        return None if is_whole else intent

    def next_stored(self) -> int:
        """The number of the batch of a store that is fetched next; 0 if one was fetched and is not over. Raises
        ``OSError``.
        """
        taken = self._ledger.state.taken
        for _, name in file_names.batches_among(self._folder.names(), self._queue):
            try:
                batch = read_batch(self._folder, name)
            except UnsupportedFormat:
                return 0  # it waits, and all after it
            except OSError as error:
                if error.errno not in NO_REGULAR_FILE:
                    raise
                continue
            if batch is not None and batch.stored > taken:
                return 0
        return taken + 1

    def publish_stored(self, batch: PublishedBatch) -> None:
        """Publish a batch that was fetched from a store: its parts are here, under names of their own. It gets the next
        number here. Raises ``OSError``, ``QueueLocked`` while another process publishes.
        """
        with self._publishing():
            number = max(self._host.now_ms(), last_number(self._folder.names(), self._queue) + 1)
            write_stored(self._folder, self._queue, batch._replace(number=number))

    def pass_over(self, stored: int, mark: StoreMark | None) -> bool:
        """Nothing is left to do for the store's batch of that number. Returns False if that is to be said later.

        Raises ``OSError``.
        """
        if self.unfinished is not None or stored != self.next_stored():
            return False
        self._pass_over(stored, mark)
        return True

    def _pass_over(self, stored: int, mark: StoreMark | None) -> None:
        self._ledger.forget_marks(self._host.now_ms() - self._remembers_ms)
        self._ledger.pass_over(stored, mark)


def write_stored(folder: Directory, queue: str, batch: PublishedBatch) -> None:
    """Publish a batch of a store durably under its number here; its parts are in the folder. Raises ``OSError``."""
    folder.sync()  # the names of the parts are durable before a batch names them
    replace_file(folder, file_names.batch_name(queue, batch.number), encode_batch_file(batch))


def last_number(names: list[str], queue: str) -> int:
    """The number of the last published batch, refused ones included; 0 if there is none."""
    about = (file_names.parse_inbox(name) for name in names if name.startswith(f"{queue}."))
    return max((each.number for each in about if each is not None and each.number is not None), default=0)


def erase_inbox(folder: Directory, queue: str) -> None:
    """Delete the files of this queue in the inbox. Raises ``OSError``.

    The ledger is deleted first, durably: then the intent of a half-ingested batch is gone, if a crash leaves the other
    files.
    """
    there = [(name, file_names.parse_inbox(name)) for name in folder.names()]
    mine = [name for name, about in there if about is not None and about.queue == queue]
    ledger = file_names.ledger_name(queue)
    for name in sorted(mine, key=lambda name: (name != ledger, name.endswith(".lock"), name.endswith(".part"), name)):
        with contextlib.suppress(FileNotFoundError):
            folder.unlink(name)
        if name == ledger:
            folder.sync()
    folder.sync()
