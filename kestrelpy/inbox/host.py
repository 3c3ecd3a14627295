"""The inbox of a queue that is open here: ingests published batches beside puts and readers.

Rules:
1. ``watcher`` decides when to look at the inbox.
2. Outside of an ingest, puts and gets run no code of this module. While a batch is not completely ingested, the
   journal refuses puts, and the slow path of a put finishes the batch first.

NOTE ON LOCKING: ``InboxHost._lock`` (I in docs/locking.md) is held during a look at the inbox and the ingest. It comes
before the queue's lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import Disk
from kestrelpy._journal.format import FRAME_BYTES
from kestrelpy._journal.journal import SEGMENT_COST
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy.config import FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, KestrelError, QueueClosed, QueueLocked
from kestrelpy.inbox.format import Intent, LedgerState, PublishedBatch, StoreMark
from kestrelpy.inbox.ingest import DAY_MS, Ingest, erase_inbox
from kestrelpy.inbox.parts import open_inbox

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Directory
    from kestrelpy._journal.journal import Journal
    from kestrelpy._journal.queue_files import QueueFiles
    from kestrelpy._reading.limits import Limited
    from kestrelpy._reading.local_source import LocalSource
    from kestrelpy._reading.registry import ReaderRegistry
    from kestrelpy.clock import Clock
    from kestrelpy.inbox.watcher import InboxWatcher


MOST_ITEM_COST = FRAME_BYTES + 12
"""The most bytes that an item takes beside its data: a frame of its own, its length in a batch, and its expiry."""


class Copy(Protocol):
    """Whoever copies the queue to a store, and what its inbox needs of that. ``taken``: the number of the last batch
    that was taken from the store, by what is there; 0 if none was. ``remembers_ms``: see ``Ingest``.
    """

    taken: int
    remembers_ms: int

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        """``Copied.note_ledger``."""

    def copied_items(self) -> int:
        """How many items are in the store, of all that were ever put."""

    def fetch_unfinished(self, folder: Directory, intent: Intent) -> None:
        """Make the files of that batch of the store in the inbox ``folder`` again, as far as they can be had. Raises
        ``OSError`` if it cannot be known now whether they can.
        """


class Status(Protocol):
    """The part of a queue's status that its inbox reads and sets."""

    error: Exception | None
    fast: bool
    is_unfinished: bool

    def choose_path(self) -> None: ...

    def check_usable(self) -> None: ...


class Writer(Protocol):
    """The part of a queue that its inbox needs: a ``PutPath``."""

    max_item_bytes: int
    journal: Journal
    source: LocalSource
    registry: ReaderRegistry
    clock: Clock

    @property
    def status(self) -> Status: ...

    def fits(self, reader: Limited, count: int, before_last: int = 0) -> bool: ...

    def has_room(self, size: int) -> bool:
        """True if the journal may grow by so many bytes. Called with the queue's lock held."""

    def find_room(self) -> None:
        """Make room in the journal, as far as it can be made. With no lock held."""

    def fail(self, error: DurabilityUnknown, *, reported: bool) -> None:
        """Fail the queue after a failed sync."""

    def note_durable(self, item_id: int) -> None:
        """Notify the waiters for durability: everything up to ``item_id`` is on disk."""


class InboxHost:
    """The inbox of one queue, and its ``Host``. ``syncing``: the lock S of docs/locking.md."""

    def __init__(
        self,
        writer: Writer,
        files: QueueFiles,
        disk: Disk | None,
        syncing: threading.Lock,
        interval: float | None,
        *,
        quarantine: bool,
    ) -> None:
        self.journal = writer.journal
        self.max_item_bytes: int | None = writer.max_item_bytes
        self.name = files.queue
        self.path = files.directory.path
        self.interval = interval
        self.watcher: InboxWatcher | None = None
        self._writer = writer
        self._status = writer.status
        self._source = writer.source
        self._registry = writer.registry
        self._disk = disk
        self._syncing = syncing
        self._quarantine = quarantine
        self._lock = threading.Lock()
        self._folder: Directory | None = None  # guarded by self._lock, as all below
        self._ingest: Ingest | None = None
        self._stopped = False
        self._copy: Copy | None = None
        self._was_logged = False  # True once a failed ingest was logged; a good one resets it
        self._lacks_room = False  # the journal had no room for a batch

    # -- the host ----------------------------------------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[object]:
        return self._source.lock

    def now_ms(self) -> int:
        return self._writer.clock.time_ns() // 1_000_000

    def has_room_locked(self, batch: PublishedBatch) -> bool:
        """True if neither a reader nor the journal refuses the batch. A batch above a reader's limits waits until that
        reader is empty.
        """
        segments = 2 + batch.data_bytes // self.journal.most_body_bytes
        most = batch.data_bytes + MOST_ITEM_COST * batch.items + SEGMENT_COST * segments
        if not self._writer.has_room(most):
            self._lacks_room = True
            return False
        return not any(self._is_refused(reader, batch) for reader in self._registry.limited)

    def _is_refused(self, reader: Limited, batch: PublishedBatch) -> bool:
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        return not self._writer.fits(reader, batch.items, max(0, batch.data_bytes - 1)) and reader.items > 0

    def sync_locked(self) -> None:
        journal = self.journal
        file, tail_id = journal.sync_target()
        if file is not None and journal.durable_id < tail_id:
            with self._syncing:
                journal.is_active(file)  # True here; it raises if a sync of the file has failed meanwhile (R9)
                try:
                    journal.sync(file)
                except OSError as cause:
                    raise journal.fail(cause) from cause
        journal.durable_id = max(journal.durable_id, tail_id)
        self._source.show_durable_locked(tail_id, journal.total_bytes)

    def hide_from_locked(self, first_id: int) -> None:
        status = self._status
        status.is_unfinished, status.fast = True, False
        self._source.hide_from_locked(first_id)
        self.journal.growth.is_suspended = True
        self.journal.allow()

    def publish_locked(self) -> None:
        status = self._status
        self.journal.allow()
        self._source.show_hidden_locked()
        status.is_unfinished = self.journal.growth.is_suspended = False
        status.choose_path()

    def refuse_locked(self, error: Exception) -> None:
        if not isinstance(error, DurabilityUnknown):
            self.journal.refuse(error)

    @property
    def refused(self) -> int:
        """The number of published batches kept aside as they can never be ingested. May be read without a lock."""
        ingest = self._ingest
        return 0 if ingest is None else ingest.refused

    @property
    def is_open(self) -> bool:
        """True if the queue can be used."""
        return self._status.error is None

    def do_later(self, what: Callable[[], object]) -> None:
        """Leave ``what`` to the next put, as no thread can be started for it."""
        self._source.leave(what)

    # -- the owner's calls -------------------------------------------------------------------------------------------

    def items(self) -> int:
        return self.journal.tail_id - self.journal.missing

    def copied_items(self) -> int | None:
        return None if self._copy is None else self._copy.copied_items()

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        if self._copy is not None:
            self._copy.note_ledger(state, from_items)

    def open(self, copy: Copy | None = None) -> None:
        """At the opening of the queue: finish a batch that an earlier owner began, and ingest the published batches.
        ``copy``: who copies the queue.

        Raises ``CorruptJournal``, ``UnsupportedFormat``, ``DurabilityUnknown``, and ``OSError`` if it cannot be known
        whether a batch was begun, or one that came from a store cannot be fetched now. Batches that cannot be ingested
        now are ingested later.
        """
        self._copy = copy
        with self._lock:
            if self._look(create=copy is not None and copy.taken > 0) is None:
                return
        try:
            self.take_in(opening=True)
        except (KestrelError, OSError) as error:
            if isinstance(error, DurabilityUnknown):
                raise
            self._log_failure(error)
        self._note()

    def _look(self, *, create: bool = False) -> Ingest | None:
        """The inbox, opened if need be, or ``None`` if there is none and none is to be made. Under the lock."""
        if self._ingest is None:
            try:
                folder = open_inbox(self.path, self._disk, create=create)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                ingest = self._open_ingest(folder)
            except BaseException:
                folder.close()
                raise
            self._folder, self._ingest = folder, ingest
        return self._ingest

    def _open_ingest(self, folder: Directory) -> Ingest:
        copy = self._copy
        ingest = Ingest(folder, self.name, self, remembers_ms=DAY_MS if copy is None else copy.remembers_ms)
        if copy is not None:
            ingest.raise_taken(copy.taken)
            intent = ingest.unfinished_of_store()
            if intent is not None:
                copy.fetch_unfinished(folder, intent)
        ingest.open(quarantine=self._quarantine)
        return ingest

    def take_in(self, *, opening: bool = False, reported: bool = True) -> int:
        """Ingest the published batches; returns the number of items. Raises as ``JournaledQueue.take_in``.

        ``opening``: the queue is not usable yet. ``reported``: a caller of the queue gets the error.
        """
        taken = 0
        try:
            taken = self._run(opening=opening)
            if self._lacks_room:
                self._lacks_room = False
                self._writer.find_room()
                taken += self._run(opening=opening)
        except DurabilityUnknown as error:
            self._writer.fail(error, reported=reported)
            raise
        finally:
            self._notify()
        return taken

    def _run(self, *, opening: bool) -> int:
        with self._lock:
            if not opening:
                self._status.check_usable()
            ingest = None if self._stopped else self._look()
            if ingest is None:
                return 0
            self._registry.refresh_limits()
            self._discard_expired()
            taken = ingest.run()
            self._was_logged = False
        return taken

    def finish(self) -> None:
        """Before a put: finish a batch that is not completely ingested. Raises as ``take_in``."""
        try:
            with self._lock:
                if self._ingest is not None and not self._stopped:
                    self._ingest.finish()
        except DurabilityUnknown as error:
            self._writer.fail(error, reported=True)
            raise
        finally:
            self._notify()

    def _discard_expired(self) -> None:
        """Discard expired items, which must not keep a batch out. Readers with an ``on_expired`` hook are skipped, as
        no hook runs here.
        """
        for reader in self._registry.limited:
            if isinstance(reader, Dispatcher) and reader.config.on_expired is None:
                with contextlib.suppress(OSError, KestrelError):
                    reader.discard_expired()

    def _note(self) -> None:
        """Notify the waiters for durability, but only up to the last visible item: a rotation may have synced more."""
        self._writer.note_durable(min(self.journal.durable_id, self._source.visible_id))

    def _notify(self) -> None:
        """Serve all waiters: items may have become durable and visible. With no lock held."""
        if self.is_open:
            self._note()
            self._registry.keep_limits()
            if self._source.waiting:
                self._source.wake()

    def look(self) -> None:
        """``take_in`` for the watcher: an error is logged, once."""
        try:
            self.take_in(reported=False)
        except (QueueClosed, ForkedQueue, DurabilityUnknown):
            return  # the next call raises it
        except (KestrelError, OSError) as error:
            if self.is_open:  # else, too, the next call raises it
                self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        if not self._was_logged:
            self._was_logged = True
            what = "the inbox of queue %s can't be ingested now"
            _logging.warning(f"{what}; it is tried again: %s: %s", self.name, type(error).__name__, error)
            _logging.debug(error, what, self.name)

    # -- from a store ------------------------------------------------------------------------------------------------

    def open_folder(self) -> Directory:
        """The inbox, made if it is missing, for parts that are fetched from a store. Raises ``OSError``."""
        return open_inbox(self.path, self._disk, create=True)

    def next_stored(self) -> int:
        """The number of the batch of the store that is fetched next; 0 if none is, as one was fetched and is not over,
        or as the queue is closed. Raises ``OSError``.
        """
        with self._lock:
            if not self._may_take():
                return 0
            ingest = self._look()
            if ingest is None:  # nothing was ever published here, or fetched
                return 1 if self._copy is None else self._copy.taken + 1
            return ingest.next_stored()

    def knows(self, batch: PublishedBatch) -> bool:
        """Whether a batch was ingested before, or a later version of its app_id was."""
        with self._lock:
            ingest = self._look() if self._may_take() else None
            return ingest is not None and ingest.state.knows(batch)

    def pass_over(self, stored: int, mark: StoreMark | None) -> None:
        """Nothing is left to do for the store's batch of that number: it is known, or refused as ``mark`` says. Raises
        ``OSError``.
        """
        with self._lock:
            ingest = self._look(create=True) if self._may_take() else None
            if ingest is not None:
                ingest.pass_over(stored, mark)

    def take_stored(self, batch: PublishedBatch) -> bool:
        """Publish a batch that was fetched from the store here, and ingest what there is. Its parts are in the folder.
        Returns False if it is not published: the queue is closed, or another process publishes at this moment. Raises
        ``OSError``.
        """
        with self._lock:
            ingest = self._look(create=True) if self._may_take() else None
            if ingest is None or ingest.next_stored() != batch.stored:
                return False
            try:
                ingest.publish_stored(batch)
            except QueueLocked:
                return False
        self.look()
        return True

    def _may_take(self) -> bool:
        return self.is_open and not self._stopped

    def store_figures(self) -> tuple[int, int]:
        """The number of the last batch taken from the store, and how many are remembered that were refused. May be read
        without a lock.
        """
        ingest = self._ingest
        if ingest is None:
            return (0, 0) if self._copy is None else (self._copy.taken, 0)
        marks = ingest.state.marks
        return ingest.state.taken, sum(mark.refused for mark in list(marks.values()))

    def stop(self) -> None:
        """Ingest nothing from here on, as the queue is about to close. Waits for an ingest that is under way."""
        with self._lock:
            self._stopped = True
        if self.watcher is not None:
            self.watcher.leave(self)
        self.leave()

    def leave(self) -> None:
        """Close the folder. May be repeated."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def abandon(self) -> None:
        """In a forked child: make a new lock, as a thread of the parent may have held the old one during an ingest."""
        self._lock = threading.Lock()
        self.leave()

    def erase(self) -> None:
        """Delete the queue's files in the inbox. Call ``stop`` first. Raises ``OSError``."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder = open_inbox(self.path, self._disk, create=False)
            try:
                erase_inbox(folder, self.name)
            finally:
                folder.close()
