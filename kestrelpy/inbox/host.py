"""The inbox of a queue that is open here: when it is looked at, and what that means to puts and readers.

Rules:
1. When it is looked at is the business of ``watcher``.
2. Nothing of this is on the way of a put or a get. While a batch is not taken in to its end, the journal refuses puts,
   and the queue's slow path goes on with it first.

NOTE ON LOCKING: ``InboxHost._lock`` (I in docs/locking.md) is held while the inbox is looked at and taken in; it comes
before the queue's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import Disk
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy.config import FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, KestrelError, QueueClosed
from kestrelpy.inbox.format import PublishedBatch
from kestrelpy.inbox.ingest import Ingest, erase_inbox
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


class Status(Protocol):
    """What an inbox sees, and sets, of its queue's status."""

    error: Exception | None
    fast: bool
    is_unfinished: bool

    def choose_path(self) -> None: ...

    def check_usable(self) -> None: ...


class Writer(Protocol):
    """What an inbox needs of its queue: the path of its puts."""

    max_item_bytes: int
    journal: Journal
    source: LocalSource
    registry: ReaderRegistry
    clock: Clock

    @property
    def status(self) -> Status: ...

    def fits(self, reader: Limited, count: int, before_last: int = 0) -> bool: ...

    def fail(self, error: DurabilityUnknown, *, reported: bool) -> None:
        """A sync failed: the queue is failed."""

    def note_durable(self, item_id: int) -> None:
        """All up to ``item_id`` is on disk: whoever waits for that is notified."""


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
        self._was_logged = False  # whether it was logged that it does not go on

    # -- the host ----------------------------------------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[object]:
        return self._source.lock

    def now_ms(self) -> int:
        return self._writer.clock.time_ns() // 1_000_000

    def has_room_locked(self, batch: PublishedBatch) -> bool:
        """A batch that is larger than a reader's limit waits until that reader is empty."""
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
                journal.is_active(file)  # it is, and this raises if a sync of it has failed meanwhile (R9)
                try:
                    journal.sync(file)
                except OSError as cause:
                    raise journal.fail(cause) from cause
        journal.durable_id = max(journal.durable_id, tail_id)
        self._source.show_durable_locked(tail_id, journal.total_bytes)

    def hide_locked(self, first_id: int) -> None:
        status = self._status
        status.is_unfinished, status.fast = True, False
        self._source.hide_locked(first_id)
        self.journal.allow()

    def show_locked(self) -> None:
        status = self._status
        self.journal.allow()
        self._source.show_hidden_locked()
        status.is_unfinished = False
        status.choose_path()

    def refuse_locked(self, error: Exception) -> None:
        if not isinstance(error, DurabilityUnknown):
            self.journal.refuse(error)

    @property
    def refused(self) -> int:
        """How many published batches are kept aside because they can never be taken in. May be read at any time."""
        ingest = self._ingest
        return 0 if ingest is None else ingest.refused

    @property
    def is_open(self) -> bool:
        """Whether its queue can be used."""
        return self._status.error is None

    def do_later(self, what: Callable[[], object]) -> None:
        """Have the next put do ``what``: a thread that was to do it could not be started."""
        self._source.leave(what)

    # -- the owner's calls -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """When the queue is opened: go on with what an earlier owner has begun, and take in what there is.

        Raises ``CorruptJournal``, ``UnsupportedFormat``, ``DurabilityUnknown``, and ``OSError`` if it can't be known
        whether something was begun. What can't be taken in now is later.
        """
        with self._lock:
            if self._look() is None:
                return
        try:
            self.take_in(opening=True)
        except (KestrelError, OSError) as error:
            if isinstance(error, DurabilityUnknown):
                raise
            self._say()
        self._note()

    def _look(self) -> Ingest | None:
        """The inbox, if there is one. Under the lock."""
        if self._ingest is None:
            try:
                folder = open_inbox(self.path, self._disk, create=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                ingest = Ingest(folder, self.name, self)
                ingest.open(quarantine=self._quarantine)
            except BaseException:
                folder.close()
                raise
            self._folder, self._ingest = folder, ingest
        return self._ingest

    def take_in(self, *, opening: bool = False, reported: bool = True) -> int:
        """Ingest the published batches and return the number of items. Raises as ``JournaledQueue.take_in``.
        ``reported``: whether the error reaches a caller of the queue.
        """
        taken = 0
        try:
            with self._lock:
                if not opening:
                    self._status.check_usable()
                ingest = None if self._stopped else self._look()
                if ingest is not None:
                    self._registry.refresh_limits()
                    self._discard_expired()
                    taken = ingest.run()
                    self._was_logged = False
        except DurabilityUnknown as error:
            self._writer.fail(error, reported=reported)
            raise
        finally:
            self._notify()
        return taken

    def finish(self) -> None:
        """Before a put: go on with what is not taken in to its end. Raises as ``take_in``."""
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
        """Expired items do not count where a batch would be refused. Not those that have a hook: none is run here."""
        for reader in self._registry.limited:
            if isinstance(reader, Dispatcher) and reader.config.on_expired is None:
                with contextlib.suppress(OSError, KestrelError):
                    reader.discard_expired()

    def _note(self) -> None:
        """Whoever waits for what is on disk is told of what is visible, too: a rotation may have synced more."""
        self._writer.note_durable(min(self.journal.durable_id, self._source.visible_id))

    def _notify(self) -> None:
        """Something may be on disk, and visible: serve who waits for it. With no lock held."""
        if self.is_open:
            self._note()
            self._registry.keep_limits()
            if self._source.waiting:
                self._source.wake()

    def look(self) -> None:
        """As ``take_in``, for the watch: what goes wrong is logged, once."""
        try:
            self.take_in(reported=False)
        except (QueueClosed, ForkedQueue, DurabilityUnknown):
            return  # the next call says so
        except (KestrelError, OSError):
            self._say()

    def _say(self) -> None:
        if not self._was_logged:
            self._was_logged = True
            _logging.warning("the inbox of %s can't be taken in now; it is tried again", self.name, error=True)

    def stop(self) -> None:
        """The queue is about to close: nothing is taken in from here on. Waits for what is under way."""
        with self._lock:
            self._stopped = True
        if self.watcher is not None:
            self.watcher.leave(self)
        self.leave()

    def leave(self) -> None:
        """Let go of the folder. May be repeated."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have held the lock, in the middle of a batch."""
        self._lock = threading.Lock()
        self.leave()

    def erase(self) -> None:
        """Delete the queue's files in the inbox. After ``stop``. Raises ``OSError``."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder = open_inbox(self.path, self._disk, create=False)
            try:
                erase_inbox(folder, self.name)
            finally:
                folder.close()
