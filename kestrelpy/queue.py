"""``JournaledQueue``: one writer's journal, any number of readers, one object.

The journal is a single-threaded core; this is the shell of locks and threads around it.

NOTE ON LOCKING: ``_lock`` (Q in docs/locking.md) guards the journal's appends, the feed and the set of readers. A sync runs without it,
under ``_syncing``. Readers' locks come after it; the folder's ``readers.lock`` may be asked for while it is held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kestrelpy import _names
from kestrelpy._disk import Directory, Disk, Lock, RealDisk
from kestrelpy._feed import Feed
from kestrelpy._format import SEGMENT_OVERHEAD, Entry
from kestrelpy._home import Home
from kestrelpy._journal import MAX_BATCH_BYTES, Journal
from kestrelpy._lifetime import forget, remember, warn_unclosed
from kestrelpy._line import FutureWaiter, Line, ThreadWaiter, check_timeout
from kestrelpy._readership import AbsentReader, Limited, Readership, Start
from kestrelpy._recovery import Recovered, Recovery, write_mark
from kestrelpy._segment import ITEM_COST
from kestrelpy._sync import GroupCommit
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, FullPolicy, QueueStats, ReaderConfig
from kestrelpy.errors import (
    DurabilityUnknown,
    ForkedQueue,
    ItemTooLarge,
    QueueClosed,
    QueueFull,
)
from kestrelpy.item import Item
from kestrelpy.reader import Reader

if TYPE_CHECKING:
    from kestrelpy.memory import BlockingQueue

__all__ = ["JournaledQueue"]

_log = logging.getLogger("kestrelpy")
_NO_READERS: Mapping[str, ReaderConfig] = MappingProxyType({})
_MIN_SEGMENT_BYTES = 4096
_NO_LIMIT = 1 << 62


class JournaledQueue:
    """A durable blocking queue: ``name`` in ``directory``, created or reopened.

    One process, one object at a time has it open for writing. Every put is one record in the journal, seen by every reader. All
    arguments after the name are options, by keyword:

    ``sync``: ``"always"`` (or 0): a put returns once its item is on disk. Seconds: synced in the background that often.
    ``"never"``: the system decides. In every mode a put that returned survives the death of the process.
    ``segment_bytes``: the size at which a journal segment is closed and the next begun. ``max_item_bytes``: at most what fits an empty
    segment, which is the default. ``archive_dir``: consumed segments are moved there instead of deleted.
    ``checkpoint_interval``: seconds between checkpoints of readers that moved. ``readers``, ``default_reader``: how readers are
    configured, by name and otherwise. ``journaled=False``: the same queue in memory only. ``codec``: values instead of bytes.
    ``on_corruption``: ``"raise"``, or ``"quarantine"`` to skip exactly the bad records and keep their bytes aside. ``clock`` and
    ``disk``: other than the system's, for tests.

    Raises ``InvalidName``, ``QueueLocked``, ``CorruptJournal``, ``UnsupportedFormat``, ``ValueError`` for an option out of range, and
    ``OSError``. Thread-safe. Cost of opening: O(segments), and the scan of the last one if it was not closed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        *,
        sync: float | Literal["always", "never"] = 0.1,
        segment_bytes: int = 16 << 20,
        max_item_bytes: int | None = None,
        archive_dir: str | os.PathLike[str] | None = None,
        checkpoint_interval: float = 1.0,
        readers: Mapping[str, ReaderConfig] = _NO_READERS,
        default_reader: ReaderConfig | None = None,
        journaled: bool = True,
        codec: Codec | None = None,
        on_corruption: Literal["raise", "quarantine"] = "raise",
        clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._state: Exception | None = QueueClosed("this queue was never opened")
        self.name = _names.check_name(name)
        self.directory = os.fspath(directory)
        self._sync_seconds = _check_sync(sync)
        self.max_item_bytes = _check_sizes(segment_bytes, max_item_bytes)
        if not checkpoint_interval > 0:
            raise ValueError(f"checkpoint_interval must be above 0, not {checkpoint_interval!r}")
        if on_corruption not in ("raise", "quarantine"):
            raise ValueError(f"on_corruption must be 'raise' or 'quarantine', not {on_corruption!r}")
        for reader_name in readers:
            _names.check_name(reader_name)
        self._interval = checkpoint_interval
        self._codec = codec
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._time_ns = self._clock.time_ns
        self._pid = os.getpid()
        self._room = Line()  # producers waiting for room; guarded by self._lock
        self._syncing = threading.Lock()
        self._sync_armed = self._maintenance_armed = False
        self._put_count = self._put_bytes = 0  # guarded by self._lock; plain puts are counted by their ids
        self._readership = Readership(
            Home(_open_directory(disk, self.directory, journaled), name),
            readers,
            default_reader if default_reader is not None else ReaderConfig(),
            self._choose_path,
        )
        self._open(segment_bytes, archive_dir if journaled else None, disk, quarantine=on_corruption == "quarantine")

    def _open(
        self, segment_bytes: int, archive_dir: str | os.PathLike[str] | None, disk: Disk | None, *, quarantine: bool
    ) -> None:
        home = self._home = self._readership._home
        archive = None
        writer_lock: Lock | None = None
        try:
            writer_lock = home.lock()
            home.remove_leftovers()
            if archive_dir is not None:
                archive = (disk or RealDisk()).directory(os.fspath(archive_dir), create=True)
            found = Recovery(home.directory, self.name, home.load_all(), quarantine=quarantine).run()
            journal = Journal(
                home.directory,
                self.name,
                found,
                segment_bytes=segment_bytes,
                randomness=os.urandom,
                archive=archive,
                quarantine=quarantine,
                exclusive=self._syncing,
                pressure=self._sync_soon,
            )
            self._set_up(journal, found)
            self._state = None
            self._readership.tidy()
        except BaseException as error:
            self._state = error if isinstance(error, Exception) else QueueClosed("opening was interrupted")
            if writer_lock is not None:
                writer_lock.release()
            if archive is not None:
                archive.close()
            home.directory.close()
            raise
        self._writer_lock = writer_lock
        self._archive = archive
        remember(self)

    def _set_up(self, journal: Journal, found: Recovered) -> None:
        self._journal = journal
        self._append = journal.append
        self._marked_id = found.tail_id
        self._opened_at = (journal.tail_id, journal.total_bytes)
        self._commit = GroupCommit(self._sync_once, self._sync_soon)
        self._commit.durable_id = journal.durable_id
        self._feed = self._readership.feed = Feed(
            self.name,
            self._clock,
            journal,
            self._codec,
            make_durable=self._commit.wait,
            save=self._readership.save,
            moved=self._moved,
            closed_reader=self._readership.closed,
        )
        self._lock = self._feed.lock
        self._readership.dispose_stale(found.stale)

    def _choose_path(self) -> None:
        """Whether a put may take the short way: nothing but journal and window to see to."""
        self._plain = (
            self._state is None and self._codec is None and self._sync_seconds != 0 and not self._readership.limited
        )

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> int:
        """Add one item for every reader; returns its id.

        When it returns, the item survives the death of the process; with ``sync="always"`` a power cut too. ``data``: ``bytes``,
        ``bytearray`` or ``memoryview``, or any value with a codec. It expires ``expires_in`` seconds from now or at ``expires_at_ms``.
        Where a reader's policy is ``BLOCK``, waits for room up to ``timeout`` seconds.

        Raises ``QueueFull``, ``ItemTooLarge``, ``QueueDiskFull`` (in each case nothing was stored), ``DurabilityUnknown``,
        ``QueueClosed``, ``ForkedQueue``, ``TypeError``, ``ValueError``.
        """
        if not self._plain or type(data) is not bytes or expires_in is not None or expires_at_ms is not None:
            return self._put_slowly([data], expires_in, expires_at_ms, timeout)[0]
        size = len(data)
        if size > self.max_item_bytes:
            raise ItemTooLarge(size, self.max_item_bytes)
        feed = self._feed
        try:
            with self._lock:
                added_ms = self._time_ns() // 1_000_000
                item_id = self._append(data, added_ms)
                window = feed.shared
                if window.is_open:
                    window.entries[item_id] = (data, added_ms, None)
                    window.left -= size + ITEM_COST
                    if window.left < 0:
                        feed.trim_locked()
                feed.visible_id = item_id
                if not self._sync_armed:
                    self._arm_sync()
        except DurabilityUnknown as error:
            self._fail(error)
            raise
        if feed.waiting:
            feed.wake()
        return item_id

    def put_many(
        self,
        items: Iterable[Any],
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> range:
        """Add several items as one record: all or nothing, also across a crash. Returns their ids; of nothing, an empty range.

        One write, one sync. Guarantees and errors as ``put``.
        """
        values = list(items)
        if not values:
            self._check_usable()
            return range(0)
        ids = self._put_slowly(values, expires_in, expires_at_ms, timeout)
        return range(ids[0], ids[-1] + 1)

    def _put_slowly(
        self, values: list[Any], expires_in: float | None, expires_at_ms: int | None, timeout: float | None
    ) -> range:
        ids = self._store(values, expires_in, expires_at_ms, timeout)
        if self._sync_seconds == 0:
            self._commit.wait(ids[-1])
        return ids

    def _put_waiting(self, value: Any, timeout: float | None) -> int:
        """``put`` that waits for room whatever the reader's policy: for the blocking-queue face."""
        ids = self._store([value], None, None, timeout, patient=True)
        if self._sync_seconds == 0:
            self._commit.wait(ids[-1])
        return ids[0]

    def _store(
        self,
        values: list[Any],
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        *,
        patient: bool = False,
    ) -> range:
        """Everything of a put but waiting for the disk. ``patient``: wait for room whatever the policy."""
        check_timeout(timeout)
        items = self._encode(values)
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            try:
                with self._making_room(items) as refusing:
                    if refusing is None:
                        ids = self._append_locked(items, expires_in, expires_at_ms)
                        break
            except DurabilityUnknown as error:
                self._fail(error)
                raise
            self._await_room(refusing, items, deadline, patient=patient)
        for reader in self._readership.limited:
            if reader.config.full_policy is FullPolicy.DROP_OLDEST and isinstance(reader, Reader):
                reader._drop_oldest()
        if self._feed.waiting:
            self._feed.wake()
        return ids

    def _encode(self, values: list[Any]) -> list[bytes]:
        items: list[bytes] = []
        for value in values:
            data = value if self._codec is None else self._codec.encode(value)
            if not isinstance(data, bytes | bytearray | memoryview):
                raise TypeError(f"an item must be bytes, bytearray or memoryview, not {type(data).__name__}")
            data = bytes(data)
            if len(data) > self.max_item_bytes:
                raise ItemTooLarge(len(data), self.max_item_bytes)
            items.append(data)
        if len(items) > 1 and (size := sum(map(len, items)) + 4 * len(items)) > MAX_BATCH_BYTES:
            raise ItemTooLarge(size, MAX_BATCH_BYTES)
        return items

    @contextlib.contextmanager
    def _making_room(self, items: list[bytes]) -> Iterator[Limited | None]:
        """Under the lock: the reader that refuses these items, if one does."""
        for reader in self._readership.limited:  # expired items do not count; their hooks run outside the lock
            if isinstance(reader, Reader) and self._is_refused(reader, items):
                reader.discard_expired(_NO_LIMIT)
        with self._lock:
            self._check_usable()
            yield next((reader for reader in self._readership.limited if self._is_refused(reader, items)), None)

    def _is_refused(self, reader: Limited, items: list[bytes]) -> bool:
        config = reader.config
        if config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        if isinstance(reader, AbsentReader) and not self._fits(reader, items):
            reader.refresh()
        return not self._fits(reader, items)

    def _fits(self, reader: Limited, items: list[bytes]) -> bool:
        """Items are limited to the last one; bytes may be overshot by one put, as anything else would keep a large item out."""
        config, waiting = reader.config, len(self._feed.pending)
        return (config.max_items is None or reader.items + waiting + len(items) <= config.max_items) and (
            config.max_bytes is None or reader.bytes < config.max_bytes
        )

    def _append_locked(self, items: list[bytes], expires_in: float | None, expires_at_ms: int | None) -> range:
        added_ms = self._time_ns() // 1_000_000
        expires_ms = _expiry(added_ms, expires_in, expires_at_ms)
        if len(items) == 1 and expires_ms is None:
            first_id = self._append(items[0], added_ms)
            ids = range(first_id, first_id + 1)
        else:
            ids = self._journal.append_frame(items, added_ms, expires_ms)
        entries: list[Entry] = [(data, added_ms, expires_ms) for data in items]
        if self._sync_seconds == 0:
            self._feed.hold_locked(ids[0], entries)
        else:
            self._feed.show_locked(ids[0], entries)
        if not self._sync_armed:
            self._arm_sync()
        return ids

    def _await_room(self, refusing: Limited, items: list[bytes], deadline: float | None, *, patient: bool) -> None:
        """Wait until a reader may have room, or raise ``QueueFull``."""
        left = None if deadline is None else deadline - self._clock.monotonic()
        waits = patient or refusing.config.full_policy is FullPolicy.BLOCK
        if not waits or (left is not None and left <= 0):
            raise QueueFull(f"reader {refusing.full_name!r} is full", reader=refusing.full_name)
        waiter = ThreadWaiter()
        with self._lock:
            self._check_usable()
            self._room.add(waiter)
        try:
            if not self._is_refused(refusing, items):
                return  # registered, then looked again
            if isinstance(refusing, AbsentReader):  # nobody here is told when it moves
                left = 0.05 if left is None else min(left, 0.05)
            if waiter.wait(left):
                waiter.result()
        finally:
            with self._lock:
                self._room.remove(waiter)

    def put_future(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> Future[int]:
        """As ``put``, without waiting for the disk: the future completes with the id when the item is there under the sync policy.

        With ``sync="never"`` it is complete at once. Raises what ``put`` raises before anything is stored; the future fails with
        ``DurabilityUnknown``.
        """
        item_id = self._store([data], expires_in, expires_at_ms, timeout)[0]
        ticket = FutureWaiter()
        if self._sync_seconds is None:
            ticket.claim()
            ticket.give(item_id)
        else:
            self._commit.add(item_id, ticket, soon=self._sync_seconds == 0)
        future: Future[int] = ticket.future
        return future

    async def aput(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> int:
        """``put`` for asyncio: waits for room and for the disk without blocking the loop. The item stays put if it is cancelled."""
        import asyncio  # here and not above: who does not use it must not pay for it

        if timeout == 0:
            future = self.put_future(data, expires_in=expires_in, expires_at_ms=expires_at_ms)
            return await asyncio.wrap_future(future)
        return await asyncio.to_thread(
            self.put, data, expires_in=expires_in, expires_at_ms=expires_at_ms, timeout=timeout
        )

    # -- durability --------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when everything put before is on disk, in every mode. Raises ``DurabilityUnknown``."""
        self._check_usable()
        self._commit.wait(self._journal.tail_id)

    def _sync_once(self) -> int:
        """One sync of the active segment, without the queue's lock (R33)."""
        with self._lock:
            if self._state is not None:
                raise self._state
            file, tail_id = self._journal.sync_target()
        failure: DurabilityUnknown | None = None
        if file is not None:
            with self._syncing:
                if self._journal.is_active(file):
                    try:
                        file.sync()
                    except OSError as cause:
                        failure = self._journal.fail(cause)
                        failure.__cause__ = cause
        if failure is not None:
            self._fail(failure)
            raise failure
        with self._lock:
            if self._state is not None:
                raise self._state
            self._journal.durable_id = max(self._journal.durable_id, tail_id)
            self._feed.show_durable_locked(tail_id)
        if self._feed.waiting:
            self._feed.wake()
        return tail_id

    def _arm_sync(self) -> None:
        """The first put since the last sync: see to the next one."""
        self._sync_armed = True
        if self._sync_seconds:
            self._clock.call_later(self._sync_seconds, self._background_sync, on_lost=self._maintenance_lost)

    def _sync_soon(self) -> None:
        self._clock.call_later(0, self._background_sync, on_lost=self._maintenance_lost)

    def _background_sync(self) -> None:
        if self._sync_seconds:
            self._sync_armed = False  # before the look: a put from here on arms the next one
        with contextlib.suppress(DurabilityUnknown, QueueClosed, ForkedQueue):  # told at the next call
            self._commit.run()

    def _fail(self, error: DurabilityUnknown) -> None:
        """A sync failed: the queue is failed until it is reopened (R9). Called with no lock held."""
        with self._lock:
            if self._state is not None:
                return
            self._state = error
            self._plain = False
            self._journal.refuse(error)
            waiting = self._room.drain()
        for waiter in waiting:
            waiter.fail(error)
        self._commit.fail(error)
        for reader in self._readership.open.values():
            reader._break(error)

    def _maintenance_lost(self, _cause: BaseException) -> None:
        """The maintenance thread died (R30): nobody would sync any more."""
        self._fail(DurabilityUnknown(self.directory, self._journal.durable_id + 1, self._journal.tail_id))

    # -- readers -----------------------------------------------------------------------------------------------------

    def reader(self, name: str = "", *, start: Start = "tail") -> Reader:
        """The reader of that name, made and owned by this process if need be; the default reader's name is empty.

        The first named reader takes over the default reader's place and unread items (in this process it is the same object). A later
        new one begins where ``start`` says: ``"tail"``, ``"earliest"`` or an item id; it is ignored for one that exists.

        Raises ``NoDefaultReader``, ``InvalidName``, ``QueueLocked`` if another process owns it, ``ValueError``, ``OSError``.
        """
        self._check_usable()
        return self._readership.reader(name, start)

    def drop_reader(self, name: str) -> None:
        """Close a reader, wake its waiters and forget its place; no error for one that does not exist.

        Raises ``QueueLocked`` if another process owns it.
        """
        self._check_usable()
        self._readership.drop(name)
        self._moved(None)

    @property
    def readers(self) -> Mapping[str, Reader]:
        """The readers open here, by name."""
        return MappingProxyType(self._readership.open)

    def _default(self) -> Reader:
        return self._readership.open.get("") or self.reader()

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """``get`` of the default reader."""
        return self._default().get(block, timeout)

    def get_nowait(self) -> Item:
        """``get_nowait`` of the default reader."""
        return self._default().get(False)

    def get_many(self, max_items: int, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Item]:
        """``get_many`` of the default reader."""
        return self._default().get_many(max_items, max_bytes=max_bytes, timeout=timeout)

    def get_future(self, timeout: float | None = None) -> Future[Item]:
        """``get_future`` of the default reader."""
        return self._default().get_future(timeout)

    async def aget(self, timeout: float | None = None) -> Item:
        """``aget`` of the default reader."""
        return await self._default().aget(timeout)

    def peek(self, timeout: float | None = 0) -> Item:
        """``peek`` of the default reader."""
        return self._default().peek(timeout)

    def commit(self, item_or_id: Item | int) -> None:
        """``commit`` of the default reader."""
        self._default().commit(item_or_id)

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """``commit_many`` of the default reader."""
        self._default().commit_many(items)

    def abort(self, item_or_id: Item | int) -> None:
        """``abort`` of the default reader."""
        self._default().abort(item_or_id)

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """``seek`` of the default reader."""
        self._default().seek(item_id, time_ms=time_ms)

    # -- all readers -------------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the place of every reader open here, and retire the segments that nobody needs any more.

        Raises ``DurabilityUnknown``, ``OSError``.
        """
        self._check_usable()
        for reader in list(self._readership.open.values()):
            reader.checkpoint(durable)
        self._readership.retire(self._feed)

    def flush(self) -> int:
        """Drop what every reader open here has unread; returns how many items in all."""
        self._check_usable()
        self._default_if_alone()
        return sum(reader.flush() for reader in list(self._readership.open.values()))

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front of every reader open here; returns how many in all."""
        self._check_usable()
        self._default_if_alone()
        return sum(reader.discard_expired(limit) for reader in list(self._readership.open.values()))

    def evict_waiters(self) -> int:
        """Every waiter of every reader gets ``QueueEmpty`` now; returns how many there were."""
        return sum(reader.evict_waiters() for reader in list(self._readership.open.values()))

    def _default_if_alone(self) -> None:
        """There is always at least one reader: open the default one if there is no other."""
        if not self._readership.open and not any(self._home.reader_names()):
            self.reader()

    def _moved(self, _reader: Reader | None) -> None:
        """Something was released: checkpoint before long, and let producers look for room again."""
        if self._room:
            with self._lock:
                waiting = self._room.drain()
            for waiter in waiting:
                waiter.give(None)
        if not self._maintenance_armed:
            self._maintenance_armed = True
            self._clock.call_later(self._interval, self._maintain, on_lost=self._maintenance_lost)

    def _maintain(self) -> None:
        """Checkpoint the readers that moved, and retire what that lets go. On the maintenance thread."""
        self._maintenance_armed = False
        if self._state is not None:
            return
        again = False
        for reader in list(self._readership.open.values()):
            reader._quiet = False  # from here on its next commit arms the next round
            if reader._unsaved:
                try:
                    reader.checkpoint(durable=self._sync_seconds is not None)
                except (OSError, QueueClosed):
                    again = True
                    _log.warning("a checkpoint of %s failed and will be tried again", reader.full_name, exc_info=True)
        try:
            self._readership.retire(self._feed)
        except (OSError, QueueClosed):
            again = True
            _log.warning("retiring segments of %s failed and will be tried again", self.name, exc_info=True)
        if again or self._readership.waits_for_others(self._feed):
            self._moved(None)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the checkpoints, close the journal properly, wake all waiters with ``QueueClosed``. Idempotent.

        Raises ``DurabilityUnknown`` or ``OSError`` if something could not be written; the queue is closed all the same, and what
        was acknowledged is in its files.
        """
        closed = QueueClosed(f"queue {self.name!r} is closed")
        with self._lock:
            if isinstance(self._state, QueueClosed | ForkedQueue):
                return
            failed, self._state, self._plain = self._state, closed, False
            self._journal.refuse(closed)
            waiting = self._room.drain()
        forget(self)
        for waiter in waiting:
            waiter.fail(closed)
        try:
            if failed is None:
                self._close_cleanly()
        finally:
            self._let_go(closed)

    def _close_cleanly(self) -> None:
        with self._lock:
            self._journal.rotate()
            tail_id = self._journal.tail_id
            self._feed.show_durable_locked(tail_id)
        self._commit.note(tail_id)
        for reader in list(self._readership.open.values()):
            if reader._broken is None:
                reader.checkpoint(durable=True)
        self._readership.retire(self._feed)
        if tail_id != self._marked_id:
            mark = Recovered(queue_id=self._journal.queue_id, tail_id=tail_id)
            write_mark(self._home.directory, self.name, mark, self._journal.durable_id)

    def _let_go(self, closed: Exception) -> None:
        self._commit.fail(closed)
        for reader in list(self._readership.open.values()):
            reader._break(closed)
            self._readership.closed(reader)
        self._journal.abandon()
        if self._archive is not None:
            self._archive.close()
        self._writer_lock.release()
        self._home.directory.close()

    def erase(self) -> None:
        """Close the queue and delete its files, and no others. Raises ``OSError``."""
        if self._state is None:
            closed = QueueClosed(f"queue {self.name!r} is erased")
            with self._lock:
                self._state, self._plain = closed, False
                self._journal.refuse(closed)
            forget(self)
            self._home.erase()
            self._let_go(closed)

    def _abandon(self) -> None:
        """In a forked child: everything here is the parent's (R26)."""
        foreign = ForkedQueue(self._pid)
        self._state, self._plain = foreign, False
        self._lock = self._feed.lock = threading.Lock()
        self._journal.refuse(foreign)
        self._readership.abandon(foreign)
        self._journal.abandon()
        self._writer_lock.abandon()
        self._home.directory.close()

    def __enter__(self) -> JournaledQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_state", self) is None:
            warn_unclosed(self)

    def _check_usable(self) -> None:
        if self._state is not None:
            raise self._state

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close()`` or ``erase()`` was called."""
        return isinstance(self._state, QueueClosed)

    def stats(self) -> QueueStats:
        """The queue's figures at this moment. Cost: O(segments + open reads)."""
        journal, readers = self._journal, self._readership.open
        figures = {name: reader.stats() for name, reader in readers.items()}
        tail_id, total_bytes = journal.tail_id, journal.total_bytes
        return QueueStats(
            items=sum(each.items for each in figures.values()),
            bytes=sum(each.bytes for each in figures.values()),
            journal_bytes=journal.journal_bytes,
            segments=len(journal.segments),
            archived_segments=journal.archived_count,
            tail_id=tail_id,
            durable_id=max(journal.durable_id, self._commit.durable_id),
            put_count=tail_id - self._opened_at[0],
            put_bytes=total_bytes - self._opened_at[1],
            sync_count=self._commit.sync_count,
            quarantined=journal.quarantined,
            readers=MappingProxyType(figures),
        )

    def as_blocking_queue(self) -> BlockingQueue[Any]:
        """The default reader as a ``BlockingQueue``: a get commits at once, a put waits for room.

        ``qsize`` counts unread items; ``put_head`` and ``get_if`` raise ``NotImplementedError``.
        """
        from kestrelpy._blocking import JournaledBlockingQueue

        return JournaledBlockingQueue(self)

    def __repr__(self) -> str:
        state = "" if self._state is None else " closed" if self.closed else " failed"
        readers = ", ".join(repr(reader) for reader in self._readership.open.values())
        return f"<JournaledQueue {self.name}: tail={self._journal.tail_id} readers=[{readers}]{state}>"

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        feed, journal = self._feed, self._journal
        with self._lock:
            assert feed.visible_id <= journal.tail_id
            assert journal.durable_id <= journal.tail_id
            assert feed.visible_id + len(feed.pending) == journal.tail_id
            assert all(item_id <= feed.visible_id for item_id in feed.shared.entries)
            ids = [(segment.first_id, segment.last_id) for segment in journal.segments]
            assert ids == sorted(ids)
        for reader in self._readership.open.values():
            reader._check()


def _check_sync(sync: float | Literal["always", "never"]) -> float | None:
    """Seconds between syncs: 0 for always, ``None`` for never."""
    if sync == "always":
        return 0.0
    if sync == "never":
        return None
    if isinstance(sync, bool) or not isinstance(sync, int | float) or not sync >= 0:
        raise ValueError(f"sync must be 'always', 'never' or seconds, not {sync!r}")
    return float(sync)


def _check_sizes(segment_bytes: int, max_item_bytes: int | None) -> int:
    if segment_bytes < _MIN_SEGMENT_BYTES or segment_bytes > MAX_BATCH_BYTES:
        raise ValueError(f"segment_bytes must be {_MIN_SEGMENT_BYTES:,} to {MAX_BATCH_BYTES:,}, not {segment_bytes!r}")
    largest = segment_bytes - SEGMENT_OVERHEAD
    if max_item_bytes is None:
        return largest
    if not 0 < max_item_bytes <= largest:
        raise ValueError(f"max_item_bytes must be 1 to {largest:,} with these segments, not {max_item_bytes!r}")
    return max_item_bytes


def _expiry(added_ms: int, expires_in: float | None, expires_at_ms: int | None) -> int | None:
    if expires_in is None:
        if expires_at_ms is not None and not 0 <= expires_at_ms < 1 << 63:
            raise ValueError(f"expires_at_ms must be milliseconds since 1970, not {expires_at_ms!r}")
        return expires_at_ms
    if expires_at_ms is not None:
        raise ValueError("an item expires expires_in seconds from now or at expires_at_ms, not both")
    if not expires_in >= 0:
        raise ValueError(f"expires_in must not be negative, not {expires_in!r}")
    return added_ms + int(expires_in * 1000)


def _open_directory(disk: Disk | None, path: str, journaled: bool) -> Directory:
    if not journaled:
        from kestrelpy._memory_disk import MemoryDisk

        return MemoryDisk().directory(path, create=True)
    return (disk or RealDisk()).directory(path, create=True)
