"""``LocalSource``: the source of a queue's readers in the process that writes the queue.

It has the journal, the shared window, and the border between the items that are written and those that may be seen.

NOTE ON LOCKING: ``lock`` is the queue's (Q in docs/locking.md). It guards ``attached``, ``pending`` and the opening
of the window. ``visible_id`` is stored after the items up to it are in place, and is read without a lock. A method
that takes a reader's lock as well says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._journal.format import Checkpoint, Entry
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import ITEM_COST, FramePosition
from kestrelpy._journal.view import Block
from kestrelpy._reading.backlog import BLOCK_BYTES, NO_LIMIT
from kestrelpy._reading.reader import Reader
from kestrelpy._reading.source import Cursor, Served, Take
from kestrelpy._reading.window import Window, last_of
from kestrelpy._waiting.deferred import leave
from kestrelpy.clock import Clock
from kestrelpy.config import Codec, ReaderConfig
from kestrelpy.errors import CorruptJournal


class _DeferredCall:
    """An entry in ``LocalSource.waiting``: a call for the next thread that serves it."""

    def __init__(self, source: LocalSource, what: Callable[[], object]) -> None:
        self._source = source
        self._what = what

    def hand_off(self) -> None:
        self._source.waiting.pop(self, None)
        self._what()


class LocalSource:
    """The ``Source`` of a queue's own readers."""

    knows_heads = True

    def __init__(
        self,
        files: QueueFiles,
        clock: Clock,
        journal: Journal,
        codec: Codec | None,
        *,
        holds_back: bool,
        make_durable: Callable[[int], None],
        guard: Callable[[], AbstractContextManager[None]],
        save: Callable[[Reader, Checkpoint, bool], None],
        moved: Callable[[], None],
        configured: Callable[[Reader, ReaderConfig], None],
        closed_reader: Callable[[Reader], None],
    ) -> None:
        self.name = files.queue
        self.disk = files.disk
        self.clock = clock
        self.lock = threading.Lock()
        self.journal = journal
        self.shared = Window()
        self.visible_id = journal.tail_id
        self.waiting: dict[Served, None] = {}
        self.attached: dict[Cursor, None] = {}  # guarded by self.lock: who shares the window
        self.pending: list[tuple[int, Entry]] = []  # guarded by self.lock: written, not durable, not to be seen yet
        self.limit_id = NO_LIMIT
        """No item above it is visible, because the rest of an inbox batch is missing. Guarded by self.lock, as is
        ``_limit_bytes``.
        """
        self._limit_bytes = 0
        self.shown_limit: tuple[int, int] | None = None
        """No item above this id is visible, because it is not acknowledged elsewhere yet; and the bytes of all items up
        to it. Guarded by self.lock. ``None``: nobody else acknowledges.
        """
        self._holds_back = holds_back
        self._shown_bytes = journal.total_bytes if holds_back else None  # guarded by self.lock
        self._codec = codec
        self._make_durable = make_durable
        self.guard = guard
        self._save = save
        self._moved = moved
        self._configured = configured
        self._closed_reader = closed_reader
        self._logged = 0  # of journal.quarantined
        if journal.quarantined:
            self._log_quarantined()

    @property
    def view(self) -> Journal:
        return self.journal

    @property
    def seen_id(self) -> int:
        return self.visible_id

    @property
    def missing(self) -> int:
        return self.journal.missing

    @property
    def visible_bytes(self) -> int:
        return self.journal.total_bytes if self._shown_bytes is None else self._shown_bytes

    @property
    def first_id(self) -> int:
        return self.journal.first_id

    @property
    def queue_id(self) -> bytes:
        return self.journal.queue_id

    @property
    def directory(self) -> Directory:
        return self.journal._directory

    @property
    def durable_id(self) -> int:
        return self.journal.durable_id

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, FramePosition] | None) -> Block:
        block = self.journal.read(item_id, last_id, max_bytes, hint)
        if self.journal.quarantined != self._logged:
            self._log_quarantined()
        return block

    def _log_quarantined(self) -> None:
        """Log how many items were skipped. Another thread does it: a handler may put into this queue, and the caller
        has its lock.
        """
        count, self._logged = self.journal.quarantined - self._logged, self.journal.quarantined
        words = "queue %s: damaged records are skipped, with %d items; what is left of them is kept aside in %s"
        leave(partial(_logging.warning, words, self.name, count, self.directory.path))

    def is_gap(self, item_id: int) -> bool:
        return self.journal.is_gap(item_id)

    def before(self, item_id: int) -> tuple[int, int]:
        return self.journal.before(item_id)

    def find_time(self, time_ms: int, last_id: int) -> int:
        return self.journal.find_time(time_ms, last_id)

    def hint(self, item_id: int) -> tuple[int, FramePosition]:
        return self.journal.hint(item_id)

    def decode(self, data: bytes) -> Any:
        return data if self._codec is None else self._codec.decode(data)

    def make_durable(self, item_id: int) -> None:
        self._make_durable(item_id)

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None:
        self._save(reader, state, durable)

    def moved(self) -> None:
        self._moved()

    def configured(self, reader: Reader, config: ReaderConfig) -> None:
        with self.lock:
            self._resize_locked()
        self._configured(reader, config)
        self._moved()

    def closed_reader(self, reader: Reader) -> None:
        self._closed_reader(reader)

    def polls(self) -> None:
        """Nothing to do: the producers are in this process, and wake the line."""

    # -- the window --------------------------------------------------------------------------------------------------

    def window(self, cursor: Cursor) -> Take | None:
        if cursor not in self.attached:
            return None
        next_id = cursor.progress.next_id
        if next_id in self.shared.entries:
            return self._take()
        batch = self.shared.batch_of(next_id)
        if batch is None:
            return None
        if len(self.attached) == 1:
            self.shared.batches.pop(batch[0], None)
        cursor.batch = batch
        return cursor.expand()

    def _take(self) -> Take:
        """A single reader takes items out; several leave them for each other, and ``trim`` removes them."""
        entries = self.shared.entries
        return entries.pop if len(self.attached) == 1 else entries.get

    def look_again(self) -> None:
        """Nothing to do: nobody else erases a queue that is open here."""

    def attach(self, cursor: Cursor) -> None:
        """Let a reader share the window. Takes the queue's lock and the reader's. If the reader is at most one block
        behind, the items that it lacks are read from the journal while nothing can be put.
        """
        with self.lock:
            with cursor.lock:
                if cursor.broken is not None or not self._catch_up_locked(cursor):
                    return
                if not self.shared.is_open:
                    self.attached.clear()
                    self.shared.restart()
                self.attached[cursor] = None
            self._resize_locked()
            self._share_out_locked()

    def _catch_up_locked(self, cursor: Cursor) -> bool:
        ahead = cursor.ahead
        held_id = max(ahead, default=cursor.progress.next_id - 1)
        if held_id < self.visible_id:
            if cursor in self.attached and self.shared.is_open and self._is_kept(held_id + 1):
                return True
            try:
                block = self.journal.read(held_id + 1, self.visible_id, BLOCK_BYTES, cursor.hint)
            except (CorruptJournal, OSError):
                return False  # the get of that item raises; this one has got another
            if block.next_id <= self.visible_id or len(block.entries) != self.visible_id - held_id:
                return False  # too far behind, or with gaps: it keeps reading the journal
            ahead.update(block.entries)
            cursor.hint = (block.number, block.position)
        return True

    def _is_kept(self, item_id: int) -> bool:
        return item_id in self.shared.entries or self.shared.batch_of(item_id) is not None

    def detach(self, cursor: Cursor) -> None:
        """The reader is closed. Takes the queue's lock, and those of the other readers."""
        with self.lock:
            if self.attached.pop(cursor, cursor) is None:
                if not self.attached:
                    self.shared.close()
                    self.shared.clear()
                self._resize_locked()
                self._share_out_locked()

    def _resize_locked(self) -> None:
        self.shared.resize(max((cursor.config.memory_bytes for cursor in self.attached), default=0))

    def _share_out_locked(self) -> None:
        """Set how readers take from the window, which depends on how many they are."""
        take = self._take()
        for cursor in self.attached:
            with cursor.lock:
                cursor.take = cursor.ahead.pop if cursor.ahead else take

    def trim_locked(self) -> None:
        """Make room in the window, or close it."""
        self.shared.trim(cursor.progress.next_id for cursor in self.attached)

    # -- items -------------------------------------------------------------------------------------------------------

    def publish_locked(self, first_id: int, entries: list[Entry], size: int) -> None:
        """Publish items directly after ``visible_id`` to readers. They have ``size`` bytes together."""
        count = len(entries)
        if self.shared.is_open:
            self._keep_locked(enumerate(entries, first_id), count, size)
        self.visible_id = first_id + count - 1

    def show_batch_locked(self, first_id: int, items: list[bytes], added_ms: int, size: int) -> None:
        """As ``publish_locked``, for a batch of items without an expiry."""
        window = self.shared
        if window.is_open:
            window.batches[first_id] = (first_id, items, added_ms)
            window.left -= size + ITEM_COST * len(items)
            if window.left < 0:
                self.trim_locked()
        self.visible_id = first_id + len(items) - 1

    def _keep_locked(self, entries: Iterable[tuple[int, Entry]], count: int, size: int) -> None:
        window = self.shared
        window.entries.update(entries)
        window.left -= size + ITEM_COST * count
        if window.left < 0:
            self.trim_locked()

    def hold_locked(self, first_id: int, entries: list[Entry]) -> None:
        """Hold back items that are written, until they are durable (``sync="always"``)."""
        self.pending.extend(enumerate(entries, first_id))

    def show_durable_locked(self, durable_id: int, total_bytes: int) -> bool:
        """Publish the items up to ``durable_id`` to readers; true if there are new ones. ``total_bytes``: the bytes of
        all items up to ``durable_id``.

        ``pending`` does not decide: an interrupted put may have stored its item and not yet noted it there.
        """
        if self.shown_limit is not None and durable_id > self.shown_limit[0]:
            durable_id, total_bytes = self.shown_limit
        if durable_id > self.limit_id:
            durable_id, total_bytes = self.limit_id, self._limit_bytes
        count = 0
        while count < len(self.pending) and self.pending[count][0] <= durable_id:
            count += 1
        shown, left = self.pending[:count], self.pending[count:]
        if self.shared.is_open and shown:
            self._keep_locked(shown, count, sum([len(entry[0]) for _, entry in shown]))
        self.pending = left
        if durable_id <= self.visible_id:
            return False
        if self._shown_bytes is not None:
            self._shown_bytes = total_bytes
        self.visible_id = durable_id
        return True

    def show_only_locked(self, last_id: int, total_bytes: int) -> None:
        """Before any reader is made: items above this id are to be acknowledged first. ``total_bytes``: of all items
        ever put up to it.
        """
        self.shown_limit = (last_id, total_bytes)
        self.visible_id, self._shown_bytes = last_id, total_bytes

    def hide_from_locked(self, first_id: int) -> None:
        """Hide the items from ``first_id`` on, until ``show_hidden_locked``; all items before it are visible. May be
        repeated. Raises ``OSError``, ``CorruptJournal``.
        """
        if self.limit_id == NO_LIMIT:
            self._limit_bytes = self.journal.before(first_id)[1]
            self._shown_bytes = self._limit_bytes
            self.limit_id = first_id - 1
            self.visible_id = min(self.visible_id, self.limit_id)

    def show_hidden_locked(self) -> None:
        """Publish all items; they are on disk. The window has not got them: readers read them from the journal."""
        journal = self.journal
        if journal.tail_id > self.visible_id:
            self.shared.close()
        self.limit_id = NO_LIMIT
        if not self._holds_back:
            self._shown_bytes = None
        self.show_durable_locked(journal.tail_id, journal.total_bytes)

    def _check(self) -> None:
        """Assert the invariants. For tests."""
        with self.lock:
            visible_id, tail_id = self.visible_id, self.journal.tail_id
            assert visible_id <= tail_id
            assert self.journal.durable_id <= tail_id
            assert all(visible_id < item_id <= tail_id for item_id, _ in self.pending)
            assert all(item_id <= visible_id for item_id in self.shared.entries)
            assert all(last_of(batch) <= visible_id for batch in self.shared.batches.values())

    def leave(self, what: Callable[[], object]) -> None:
        """Have the next caller of ``wake``, such as a put, call ``what``: the thread that was to do it could not be
        started.
        """
        self.waiting[_DeferredCall(self, what)] = None

    def wake(self) -> None:
        """Serve everything in ``waiting``. Called with no lock held, after every put."""
        for reader in list(self.waiting):
            reader.hand_off()
