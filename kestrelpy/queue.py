"""``JournaledQueue``: one writer's journal, any number of readers, one object.

The journal is a single-threaded core; this and ``put`` are the shell of locks and threads around it.

NOTE ON LOCKING: as in ``put``; docs/locking.md has the order of all locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from kestrelpy._checks import check_seconds
from kestrelpy._disk.interface import Directory, Disk, File, Lock
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.item_limit import leave_limit
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.purpose import kind_of, mark_as_jobs, open_mark, refuse_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, Recovery
from kestrelpy._process import forget, remember
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry, Start
from kestrelpy._reading.window import last_of
from kestrelpy._value import ReadOnlyDict
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.ending import Ending
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy._writing.options import check_codec, check_configs, check_sizes, check_sync, memory_disk
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, QueueStats, ReaderConfig
from kestrelpy.errors import QueueClosed, QueueLocked
from kestrelpy.item import Item

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

    ``sync``: ``"always"`` (or 0): a put returns once its item is on disk. Seconds: synced in the background that often.
    ``"never"``: the system decides. In every mode a put that returned survives the death of the process.
    ``segment_bytes``: the size at which a journal segment is closed and the next begun. ``max_item_bytes``: at most
    what fits an empty segment, which is the default. ``archive_dir``: consumed segments are moved there instead of
    deleted; a folder in which no queue of this name lives. ``checkpoint_interval``: seconds between checkpoints of
    readers that moved. ``readers``, ``default_reader``: how readers are configured, by name and otherwise.
    ``journaled=False``: the same queue in memory only. ``codec``: values instead of bytes. ``on_corruption``:
    ``"raise"``, or ``"quarantine"`` to skip exactly the bad records and keep their bytes aside. ``inbox_interval``:
    seconds between looks for what other processes have published for this queue (``kestrelpy.inbox``); ``None``: only
    at opening, and when ``take_in`` is called. ``clock`` and ``disk``: other than the system's, for tests.

    Raises ``InvalidName``, ``QueueLocked``, ``WrongKind`` for a work queue, ``CorruptJournal``, ``UnsupportedFormat``,
    ``ValueError`` for an option out of range, ``TypeError`` for one of a wrong type, and ``OSError``. Cost of opening:
    O(segments), and the scan of the last one if it was not closed.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync has failed,
    ``ForkedQueue`` in a forked child, ``OSError`` where the system refuses a file, and ``CorruptJournal`` where it has
    to read what is damaged.
    """

    _holds_jobs: ClassVar[bool] = False
    """Of the class that a work queue stands on: its journal is no other's, and nothing is published for it."""

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
        self.name = file_names.check_name(name)
        self.directory = os.fspath(directory)
        self._sync_seconds = check_sync(sync)
        self.max_item_bytes = check_sizes(segment_bytes, max_item_bytes)
        self._interval = check_seconds("checkpoint_interval", checkpoint_interval, above_zero=True)
        if inbox_interval is not None:
            check_seconds("inbox_interval", inbox_interval, above_zero=True)
        if on_corruption not in ("raise", "quarantine"):
            raise ValueError(f"on_corruption must be 'raise' or 'quarantine', not {on_corruption!r}")
        default_config = check_configs(readers, default_reader)
        self._codec = check_codec(codec)
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._time_ns = self._clock.time_ns
        self._pid = os.getpid()
        self._room = Room()
        self._syncing = threading.Lock()
        self._sync_armed = self._maintenance_armed = False
        if not journaled:  # said here and nowhere else: what is in memory has nothing on another disk
            disk, archive_dir, inbox_interval = memory_disk(), None, None
        home = QueueFiles((disk or RealDisk()).directory(self.directory, create=True), name)
        try:
            self._readership = ReaderRegistry(home, readers, default_config, self._choose_path, self._check_usable)
        except BaseException:
            home.directory.close()
            raise
        self._inbox_interval = inbox_interval
        self._open(segment_bytes, archive_dir, disk, quarantine=on_corruption == "quarantine")

    def _open(
        self, segment_bytes: int, archive_dir: str | os.PathLike[str] | None, disk: Disk | None, *, quarantine: bool
    ) -> None:
        from kestrelpy.inbox.host import InboxHost
        from kestrelpy.inbox.watcher import InboxWatcher

        home = self._home = self._readership._home
        archive = None
        journal: Journal | None = None
        writer_lock: Lock | None = None
        try:
            writer_lock, names = home.lock()
            if not self._holds_jobs:
                refuse_jobs(home.directory, self.name, names)
            home.remove_leftovers(names)
            if archive_dir is not None:
                archive = (disk or RealDisk()).directory(os.fspath(archive_dir), create=True)
                self._check_apart(archive)
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
            if not self._holds_jobs:
                leave_limit(home.directory, self.name, names, self.max_item_bytes)
                self._inflow = inflow = InboxHost(self, disk, quarantine=quarantine)
                inflow.open()
            self._state = None
            self._readership.tidy(home.reader_names(names))
            home.hold_back(names)
            remember(self)
            if self._readership.may_limit:
                self._look_for_limits()
            if self._inbox_interval is not None:
                InboxWatcher.join(self, disk, self._clock)
        except BaseException as error:
            self._state = error if isinstance(error, Exception) else QueueClosed("opening was interrupted")
            if journal is not None:
                journal.abandon()  # before the lock goes (R25)
            if writer_lock is not None:
                writer_lock.release()
            if archive is not None:
                archive.close()
            if self._inflow is not None:
                self._inflow.leave()
            home.directory.close()
            forget(self)
            raise

    def _check_apart(self, archive: Directory) -> None:
        """A queue's own folder is no archive: each segment would be taken for one that is there already, and deleted.
        Nor is one where another queue of that name lives, which could not tell its segments from these. Each has a
        lock file, and this one's is there by now.
        """
        try:
            archive.open(file_names.lock_name(self.name)).close()
        except FileNotFoundError:
            return
        raise ValueError(f"archive_dir must not be where a queue named {self.name!r} lives: {archive.path}")

    def _set_up(self, journal: Journal, found: Recovered) -> None:
        self._journal = journal
        self._append = journal.append
        self._marked_id = found.tail_id
        self._opened_at = (journal.tail_id, journal.total_bytes)
        self._commit = GroupCommit(self._sync_once, lambda: self._sync_in(0), self._serve, self._tell_later)
        self._commit.durable_id = journal.durable_id
        self._feed = self._readership.feed = LocalSource(
            self.name,
            self._clock,
            journal,
            self._codec,
            holds_back=self._sync_seconds == 0,
            make_durable=partial(self._commit.wait, holding=True),
            guard=self._readership.guard,
            save=self._readership.save,
            moved=self._moved,
            closed_reader=self._reader_closed,
        )
        self._lock = self._feed.lock
        journal.on_followed = self._arm_maintenance  # readers elsewhere may be past the segment before
        self._readership.dispose_stale(found.stale)

    # -- what it is for -------------------------------------------------------------------------------------------

    def _kind(self) -> str:
        """What the folder says that it is."""
        return kind_of(self._home.directory.names(), self.name)

    def _mark_as_jobs(self) -> None:
        """It is a work queue from here on, on disk. Raises ``OSError``."""
        mark_as_jobs(self._home.directory, self.name)

    def _open_mark(self) -> File:
        """The file that says so. Raises ``OSError``."""
        return open_mark(self._home.directory, self.name)

    # -- readers --------------------------------------------------------------------------------------------------

    def reader(self, name: str = "", *, start: Start = "tail") -> Reader:
        """The reader of that name, made and owned by this process if need be; the default reader's name is empty.

        The first named reader takes over the default reader's place and unread items (in this process it is the same
        object); the queue's own ``get`` and ``commit`` raise ``NoDefaultReader`` from then on. A later new one begins
        where ``start`` says: ``"tail"``, ``"earliest"`` or an item id; it is ignored for one that exists. One that was
        first made while another process had the default reader open has taken nothing over: the default reader stays
        beside it.

        Raises ``NoDefaultReader`` if there are named readers and no default one, ``InvalidName``,
        ``QueueLocked`` if another process owns it, ``ValueError``, ``OSError``.
        """
        self._check_usable()
        found = self._readership.open.get(name)
        if found is not None and not checkpointer_of(found).is_half_closed:
            return found
        with self._while_open():
            reader = self._readership.reader(name, start)
        self._room.ring_first()  # what it is configured with counts now, and not what it was before
        return reader

    def _reader_closed(self, reader: Reader) -> None:
        try:
            self._readership.closed(reader)
        except OSError:
            if self._state is None:  # else its folder is closed, and who closes it gives back what the reader has
                raise
        finally:
            self._room.ring_first()  # it is looked up by its file from here on

    def drop_reader(self, name: str) -> None:
        """Close a reader, wake its waiters and forget its place; no error for one that does not exist.

        Raises ``QueueLocked`` if another process owns it, ``OSError``.
        """
        self._check_usable()
        with self._while_open():
            self._readership.drop(name)
        self._moved()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Who closes the queue meanwhile, a callback perhaps, closes its folder."""
        try:
            yield
        except OSError:
            self._check_usable()
            raise

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
        with self._while_open():
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
        if not self._readership.open and not any(self._home.readers(self._journal.queue_id)):
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

    def _moved(self) -> None:
        """Something was released: checkpoint before long, and let producers look for room again."""
        if self._room:
            self._room.ring_first()
        self._arm_maintenance()

    def _look_for_limits(self) -> None:
        """Where there are limits, every now and then: readers that were made or dropped elsewhere, and producers in
        line that do not come. Nothing of this keeps a queue alive that nobody has.
        """
        mine = weakref.ref(self)

        def look(_lost: object = None) -> None:
            queue = mine()
            if queue is not None and queue._state is None:
                if queue._readership.refresh_limits():
                    queue._room.ring_first()
                queue._room.pass_over()
                queue._look_for_limits()

        try:
            self._clock.call_later(self._interval, look, on_lost=look)
        except RuntimeError:  # no thread can be started
            self._feed.leave(self._look_for_limits)

    def _arm_maintenance(self) -> None:
        """See to it that ``_maintain`` runs before long; if no thread can be started for it, the next put or
        commit tries again. With or without the lock.
        """
        if self._maintenance_armed:
            return
        self._maintenance_armed = True
        try:
            call_later = self._clock.call_later
            timer = call_later(self._interval, self._maintain, on_lost=self._maintenance_lost)
            self._readership.timer = timer
            if self._state is not None:  # look again: who closes it may have cancelled the one before
                timer.cancel()
        except RuntimeError:
            self._maintenance_armed = False
            self._feed.leave(self._arm_maintenance)
        except BaseException:
            self._maintenance_armed = False
            raise

    def _maintain(self) -> None:
        """Checkpoint the readers that moved, and retire what that lets go. On the maintenance thread."""
        self._maintenance_armed = False
        if self._state is not None:
            return
        again, trouble = False, self._readership.trouble
        for reader in list(self._readership.open.values()):
            saver = checkpointer_of(reader)
            saver.backlog.may_skip_notify = False  # from here on its next commit arms the next round
            if saver.is_unsaved:
                what = f"saving the place of {reader.full_name}"
                try:
                    reader.checkpoint(durable=self._sync_seconds is not None)
                    trouble.end(what)
                except (OSError, QueueClosed) as error:
                    again = True
                    trouble.begin(what, error)
        what = f"retiring segments of {self.name}"
        try:
            self._readership.retire(self._feed, wait=False)
            trouble.end(what)
        except QueueLocked:
            again = True
        except (OSError, QueueClosed) as error:
            again = True
            trouble.begin(what, error)
        if again or self._others_wait():
            self._moved()

    def _others_wait(self) -> bool:
        """Whether readers elsewhere hold a segment back; if that can't be seen, it is looked for again."""
        trouble, what = self._readership.trouble, f"looking for readers of {self.name}"
        try:
            waits = self._readership.waits_for_others(self._feed)
            trouble.end(what)
        except (OSError, QueueClosed) as error:
            trouble.begin(what, error)
            return True
        return waits

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
        left = list(self._readership.undisposed)  # the archive has no room for them, say
        segments = [*left, *journal.segments]
        return QueueStats(
            items=sum(each.items for each in figures.values()),
            bytes=sum(each.bytes for each in figures.values()),
            journal_bytes=journal.journal_bytes + sum(each.size for each in left),
            segments=len(segments),
            archived_segments=journal.archived_count,
            tail_id=tail_id,
            durable_id=max(journal.durable_id, self._commit.durable_id),
            put_count=tail_id - self._opened_at[0],
            put_bytes=total_bytes - self._opened_at[1],
            sync_count=self._commit.sync_count,
            quarantined=journal.quarantined,
            refused_batches=0 if self._inflow is None else self._inflow.refused,
            readers=ReadOnlyDict(figures),
            oldest_segment=segments[0].number if segments else 0,
            newest_segment=segments[-1].number if segments else 0,
        )

    def as_blocking_queue(self) -> BlockingQueue[Any]:
        """The default reader as a ``BlockingQueue``: a get commits at once, a put waits for room.

        ``qsize`` counts unread items; ``put_head`` and ``get_if`` raise ``NotImplementedError``.
        """
        from kestrelpy.blocking import JournaledBlockingQueue

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
