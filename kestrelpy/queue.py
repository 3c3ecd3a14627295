"""``JournaledQueue``: one writer's journal, any number of readers, one object.

The journal is a single-threaded core; this and ``_writing`` are the shell of locks and threads around it.

NOTE ON LOCKING: as in ``_writing``; docs/locking.md has the order of all locks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kestrelpy import _log, _names
from kestrelpy._disk import Disk, Lock, RealDisk
from kestrelpy._ending import Ending
from kestrelpy._feed import Feed
from kestrelpy._home import Home
from kestrelpy._journal import Journal
from kestrelpy._lifetime import forget, remember
from kestrelpy._line import Line
from kestrelpy._options import check_sizes, check_sync, open_directory
from kestrelpy._readership import Readership, Start
from kestrelpy._recovery import Recovered, Recovery
from kestrelpy._sync import GroupCommit
from kestrelpy._window import last_of
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, QueueStats, ReaderConfig
from kestrelpy.errors import (
    QueueClosed,
)
from kestrelpy.item import Item
from kestrelpy.reader import Reader

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy.memory import BlockingQueue

__all__ = ["JournaledQueue"]

T = TypeVar("T")

_NO_READERS: Mapping[str, ReaderConfig] = MappingProxyType({})


class JournaledQueue(Ending):
    """A durable blocking queue: ``name`` in ``directory``, created or reopened.

    One process, one object at a time has it open for writing. Every put is one record in the journal, seen by every
    reader. All arguments after the name are options, by keyword:

    ``sync``: ``"always"`` (or 0): a put returns once its item is on disk. Seconds: synced in the background that
    often. ``"never"``: the system decides. In every mode a put that returned survives the death of the process.
    ``segment_bytes``: the size at which a journal segment is closed and the next begun. ``max_item_bytes``: at most
    what fits an empty segment, which is the default. ``archive_dir``: consumed segments are moved there instead of
    deleted. ``checkpoint_interval``: seconds between checkpoints of readers that moved. ``readers``,
    ``default_reader``: how readers are configured, by name and otherwise. ``journaled=False``: the same queue in
    memory only. ``codec``: values instead of bytes. ``on_corruption``: ``"raise"``, or ``"quarantine"`` to skip
    exactly the bad records and keep their bytes aside. ``inbox_interval``: seconds between looks for what other
    processes have published for this queue (``kestrelpy.inbox``); ``None``: only at opening, and when ``take_in`` is
    called. ``clock`` and ``disk``: other than the system's, for tests.

    Raises ``InvalidName``, ``QueueLocked``, ``CorruptJournal``, ``UnsupportedFormat``, ``ValueError`` for an option
    out of range, and ``OSError``. Thread-safe. Cost of opening: O(segments), and the scan of the last one if it was
    not closed.
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
        inbox_interval: float | None = 0.5,
        clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._state: Exception | None = QueueClosed("this queue was never opened")
        self.name = _names.check_name(name)
        self.directory = os.fspath(directory)
        self._sync_seconds = check_sync(sync)
        self.max_item_bytes = check_sizes(segment_bytes, max_item_bytes)
        if not checkpoint_interval > 0:
            raise ValueError(f"checkpoint_interval must be above 0, not {checkpoint_interval!r}")
        if inbox_interval is not None and not inbox_interval > 0:
            raise ValueError(f"inbox_interval must be above 0, or None, not {inbox_interval!r}")
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
        default_config = default_reader if default_reader is not None else ReaderConfig()
        home = Home(open_directory(disk, self.directory, journaled), name)
        try:
            self._readership = Readership(home, readers, default_config, self._choose_path)
        except BaseException:
            home.directory.close()
            raise
        self._inbox_interval = inbox_interval if journaled else None
        self._open(segment_bytes, archive_dir if journaled else None, disk, quarantine=on_corruption == "quarantine")
        if not journaled:
            self._inflow = None

    def _open(
        self, segment_bytes: int, archive_dir: str | os.PathLike[str] | None, disk: Disk | None, *, quarantine: bool
    ) -> None:
        from kestrelpy._inflow import Inflow, Watch  # here and not above: a queue in memory must not pay for it

        home = self._home = self._readership._home
        archive = None
        writer_lock: Lock | None = None
        try:
            writer_lock, names = home.lock()
            home.remove_leftovers(names)
            if archive_dir is not None:
                archive = (disk or RealDisk()).directory(os.fspath(archive_dir), create=True)
                archive.sync()  # a segment that was moved there is there for good before it is gone from here for good
            found = Recovery(home.directory, self.name, home.load_all(names), quarantine=quarantine).run(names)
            journal = Journal(
                home.directory,
                self.name,
                found,
                segment_bytes=segment_bytes,
                randomness=os.urandom,
                archive=archive,
                quarantine=quarantine,
                exclusive=self._syncing,
            )
            self._set_up(journal, found)
            self._writer_lock, self._archive = writer_lock, archive
            self._inflow = inflow = Inflow(self, disk, quarantine=quarantine)
            inflow.open()
            self._state = None
            self._readership.tidy(home.reader_names(names))
            remember(self)
            if self._inbox_interval is not None:
                Watch.join(self, disk, self._clock, self._inbox_interval)
        except BaseException as error:
            self._state = error if isinstance(error, Exception) else QueueClosed("opening was interrupted")
            if writer_lock is not None:
                writer_lock.release()
            if archive is not None:
                archive.close()
            if self._inflow is not None:
                self._inflow.leave()
            home.directory.close()
            forget(self)
            raise

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
            holds_back=self._sync_seconds == 0,
            make_durable=partial(self._commit.wait, holding=True),
            save=self._readership.save,
            moved=self._moved,
            closed_reader=self._readership.closed,
        )
        self._lock = self._feed.lock
        journal.on_followed = self._arm_maintenance  # readers elsewhere may be past the segment before
        self._readership.dispose_stale(found.stale)

    # -- readers --------------------------------------------------------------------------------------------------

    def reader(self, name: str = "", *, start: Start = "tail") -> Reader:
        """The reader of that name, made and owned by this process if need be; the default reader's name is empty.

        The first named reader takes over the default reader's place and unread items (in this process it is the same
        object). A later new one begins where ``start`` says: ``"tail"``, ``"earliest"`` or an item id; it is ignored
        for one that exists.

        Raises ``NoDefaultReader``, ``InvalidName``, ``QueueLocked`` if another process owns it, ``ValueError``,
        ``OSError``.
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

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """``get`` of the default reader."""
        reader = self._readership.alone
        return (reader if reader is not None else self.reader()).get(block, timeout)

    def get_nowait(self) -> Item:
        """``get_nowait`` of the default reader."""
        return self.reader().get(False)

    def get_many(self, max_items: int, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Item]:
        """``get_many`` of the default reader."""
        return self.reader().get_many(max_items, max_bytes=max_bytes, timeout=timeout)

    def get_future(self, timeout: float | None = None) -> Future[Item]:
        """``get_future`` of the default reader."""
        return self.reader().get_future(timeout)

    async def aget(self, timeout: float | None = None) -> Item:
        """``aget`` of the default reader."""
        return await self.reader().aget(timeout)

    def peek(self, timeout: float | None = 0) -> Item:
        """``peek`` of the default reader."""
        return self.reader().peek(timeout)

    def commit(self, item_or_id: Item | int) -> None:
        """``commit`` of the default reader."""
        reader = self._readership.alone
        (reader if reader is not None else self.reader()).commit(item_or_id)

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """``commit_many`` of the default reader."""
        self.reader().commit_many(items)

    def abort(self, item_or_id: Item | int) -> None:
        """``abort`` of the default reader."""
        self.reader().abort(item_or_id)

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """``seek`` of the default reader."""
        self.reader().seek(item_id, time_ms=time_ms)

    # -- all readers ----------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the place of every reader open here, and retire the segments that nobody needs any more.

        Raises ``DurabilityUnknown``, ``OSError``.
        """
        self._check_usable()
        self._of_each(lambda reader: reader.checkpoint(durable))
        self._readership.retire(self._feed)

    def flush(self) -> int:
        """Drop what every reader open here has unread; returns how many items in all."""
        self._check_usable()
        self._default_if_alone()
        return sum(self._of_each(lambda reader: reader.flush()))

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front of every reader open here; returns how many in all."""
        self._check_usable()
        self._default_if_alone()
        return sum(self._of_each(lambda reader: reader.discard_expired(limit)))

    def evict_waiters(self) -> int:
        """Every waiter of every reader gets ``QueueEmpty`` now; returns how many there were."""
        return sum(reader.evict_waiters() for reader in list(self._readership.open.values()))

    def _of_each(self, call: Callable[[Reader], T]) -> list[T]:
        """``call`` of every reader open here, but for one that is closed meanwhile."""
        results = []
        for reader in list(self._readership.open.values()):
            try:
                results.append(call(reader))
            except QueueClosed:
                self._check_usable()
        return results

    def _default_if_alone(self) -> None:
        """There is always at least one reader: open the default one if there is no other."""
        if not self._readership.open and not any(self._home.reader_names()):
            self.reader()

    def take_in(self) -> int:
        """Take in now what other processes have published for this queue (``kestrelpy.inbox``); how many items.

        Each published batch is taken in once and as a whole, in the order of its publishing: its items are on disk, and
        visible to readers, all at once. They are added at this moment, whatever their writer's clock says. A batch for
        which a reader has no room waits, with all behind it; one larger than that reader's limits until it is empty.
        0 if there is nothing, also with ``journaled=False``. Looked for by itself every ``inbox_interval`` seconds.

        Raises ``QueueDiskFull`` or another ``OSError``: then it is tried again, and puts raise until it is done, if it
        had begun. ``DurabilityUnknown``, ``QueueClosed``, ``ForkedQueue``. Thread-safe.
        """
        self._check_usable()
        return 0 if self._inflow is None else self._inflow.take_in()

    def _moved(self, _reader: object) -> None:
        """Something was released: checkpoint before long, and let producers look for room again."""
        if self._room:
            with self._lock:
                waiting = self._room.drain()
            for waiter in waiting:
                waiter.give(None)
        self._arm_maintenance()

    def _arm_maintenance(self) -> None:
        """See to it that ``_maintain`` runs before long. With or without the lock."""
        if not self._maintenance_armed:
            self._maintenance_armed = True
            try:
                self._clock.call_later(self._interval, self._maintain, on_lost=self._maintenance_lost)
            except BaseException:
                self._maintenance_armed = False
                raise

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
                    _log.warning("a checkpoint of %s failed and will be tried again", reader.full_name, error=True)
        try:
            self._readership.retire(self._feed)
        except (OSError, QueueClosed):
            again = True
            _log.warning("retiring segments of %s failed and will be tried again", self.name, error=True)
        if again or self._others_wait():
            self._moved(None)

    def _others_wait(self) -> bool:
        """Whether readers elsewhere hold a segment back; if that can't be seen, it is looked for again."""
        try:
            return self._readership.waits_for_others(self._feed)
        except (OSError, QueueClosed):
            _log.warning("looking for readers of %s failed and will be tried again", self.name, error=True)
            return True

    # -- figures --------------------------------------------------------------------------------------------------

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
            oldest_segment=journal.segments[0].number if journal.segments else 0,
            newest_segment=journal.segments[-1].number if journal.segments else 0,
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
            assert feed.visible_id == journal.tail_id or self._sync_seconds == 0 or self._unfinished
            assert all(feed.visible_id < item_id <= journal.tail_id for item_id, _ in feed.pending)
            assert all(item_id <= feed.visible_id for item_id in feed.shared.entries)
            assert all(last_of(batch) <= feed.visible_id for batch in feed.shared.batches.values())
            ids = [(segment.first_id, segment.last_id) for segment in journal.segments]
            assert ids == sorted(ids)
        for reader in self._readership.open.values():
            reader._check()
