"""``JournaledQueue``: one object for the journal of one writer and any number of readers.

The journal is a single-threaded core. This module, ``_reading`` and ``_writing`` add the locks and threads around it.

NOTE ON LOCKING: ``_lock`` is Q in docs/locking.md, which has the order of all locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, overload
from zlib import crc32

from kestrelpy._disk.interface import Disk, text_of
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.format import FRAME_BYTES, pack_crc, pack_frame
from kestrelpy._journal.growth import JournalFull
from kestrelpy._journal.item_limit import write_limit
from kestrelpy._journal.purpose import Purpose
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import ITEM_COST
from kestrelpy._process import forget, remember, warn_unclosed
from kestrelpy._reading.consuming import Consuming
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry, Start
from kestrelpy._writing import options
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.disk_room import DiskRoom, RoomOptions
from kestrelpy._writing.ending import Ending
from kestrelpy._writing.figures import figures_of
from kestrelpy._writing.maintenance import Maintenance
from kestrelpy._writing.open_journal import OpenJournal
from kestrelpy._writing.put_path import PutPath
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, QueueStats, ReaderConfig, check_codec
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, ItemTooLarge, QueueClosed
from kestrelpy.item import Item, V

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Unpack

    from kestrelpy._queue_options import OpeningOptions, StrPath
    from kestrelpy.blocking import JournaledBlockingQueue
    from kestrelpy.inbox.host import InboxHost
    from kestrelpy.ship.opened import OpenLog
    from kestrelpy.ship.options import Ship
    from kestrelpy.ship.shipment import Shipment
    from kestrelpy.ship.shipping import Shipping

__all__ = ["JournaledQueue"]

_NO_READERS: Mapping[str, ReaderConfig] = MappingProxyType({})


class JournaledQueue(Consuming[V]):
    """A durable blocking queue: queue ``name`` in folder ``directory``. It is created, or opened again.

    One object in one process has the queue open for writing. Each put appends one record to the journal (a write-ahead
    log), and every reader sees the record. All arguments after the name are options, by keyword:

    ``sync``: ``"always"`` (or 0): a put returns when its item is on disk. Seconds: the time between background syncs.
    ``"never"``: the operating system decides. In every mode an item whose put returned survives the death of the
    process. ``segment_bytes``: the size at which a segment of the journal is closed and the next one begins.
    ``max_item_bytes``: the largest item; at most, and by default, as much as an empty segment holds. ``archive_dir``:
    consumed segments are moved to this folder instead of being deleted; no queue of this name may live there.
    ``keep_for``, ``keep_bytes``: consumed segments stay readable for so many seconds after their last item, and up to
    so many bytes together; the oldest go first. ``archive_keep_for``, ``archive_keep_bytes``: the same for archived
    ones. ``max_journal_bytes``: a put that would make the journal larger raises ``QueueFull``, or waits
    (``timeout``, ``BLOCK``); kept segments go first. At least twice ``segment_bytes``, and no put may be above half.
    ``checkpoint_interval``: seconds between checkpoints of readers that moved. ``readers``: the configuration of
    readers, by name; ``default_reader``: that of all other readers. ``journaled=False``: the same queue in memory only.
    ``codec``: values instead of bytes. ``on_corruption``: ``"raise"``, or ``"quarantine"`` to skip exactly the damaged
    records and keep their bytes aside. ``inbox_interval``: seconds between looks for batches that other processes
    published for this queue (``kestrelpy.inbox``); with ``None``, only the opening and ``take_in`` look. ``ship``: a
    store to which the journal is copied, as a URL or a ``kestrelpy.ship.Ship``; with ``False``, this queue is not
    shipped any more. ``clock`` and ``disk`` replace those of the system, for tests.

    Raises ``InvalidName``, ``QueueLocked`` if the queue has another owner, ``WrongKind`` for a work queue,
    ``CorruptJournal``, ``UnsupportedFormat``, ``ShipError`` if the queue is shipped, ``ValueError`` for an option out
    of range, ``TypeError`` for one of a wrong type, and ``OSError``. Cost of opening: O(segments), and a scan of the
    last segment if it was not closed.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync has failed,
    ``ForkedQueue`` in a forked child, ``OSError`` where the system refuses a file, ``CorruptJournal`` where it reads
    damaged data, and, if it is shipped, ``Fenced`` once another owner has it and ``ShipError`` if shipping has failed.
    """

    _inbox: InboxHost | None = None
    _shipment: Shipment | None = None
    _holds_jobs: ClassVar[bool] = False
    """True in the class below a work queue: that journal holds jobs, and nobody publishes items for it."""

    @overload  # the type of the values is that of the codec
    def __init__(
        self: JournaledQueue[bytes], directory: StrPath, name: str, *, codec: None = None, **_: Unpack[OpeningOptions]
    ) -> None: ...

    @overload
    def __init__(self, directory: StrPath, name: str, *, codec: Codec[V], **_: Unpack[OpeningOptions]) -> None: ...

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
        ship: str | Ship | Literal[False] | None = None,
        keep_for: float | None = None,
        keep_bytes: int | None = None,
        max_journal_bytes: int | None = None,
        archive_keep_for: float | None = None,
        archive_keep_bytes: int | None = None,
        clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.name = file_names.check_name(name)
        self.directory = text_of(directory)
        sync_seconds = options.check_sync(sync, ship, journaled=journaled, of_jobs=self._holds_jobs)
        self.max_item_bytes = options.check_sizes(segment_bytes, max_item_bytes)
        interval = options.check_intervals(checkpoint_interval, inbox_interval)
        quarantine = options.check_corruption(on_corruption)
        default_config = options.check_configs(readers, default_reader)
        self.codec = codec = check_codec(codec)
        bounds = keep_for, keep_bytes, max_journal_bytes, archive_keep_for, archive_keep_bytes
        room = RoomOptions.checked(*bounds, segment_bytes=segment_bytes, has_archive=archive_dir is not None)
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._time_ns = self._clock.time_ns
        self._pid = os.getpid()
        self._room = Room()
        self._status = status = QueueStatus(sync_seconds, has_codec=codec is not None)
        if not journaled:  # this is the only place that knows: a queue in memory uses no other disk
            disk, archive_dir, inbox_interval = options.memory_disk(), None, None
        real = disk or RealDisk()
        files = QueueFiles(real.directory(self.directory, create=True), name, real if journaled else None)
        self._held = held = OpenJournal(files)
        open_log, of_jobs = partial(self._open_log, ship), self._holds_jobs
        try:
            registry = ReaderRegistry(files, readers, default_config, status.choose_path, status.check_usable)
            self._registry = status.registry = registry
            if ship:
                from kestrelpy.ship.preparing import prepare

                prepare(ship, files, disk, of_jobs=of_jobs)
            held.open(archive_dir, disk, open_log, segment_bytes=segment_bytes, quarantine=quarantine, of_jobs=of_jobs)
            self._set_up(codec, interval, room)
            self._open(disk, inbox_interval, quarantine=quarantine)
        except BaseException as error:
            status.error = error if isinstance(error, Exception) else QueueClosed("opening was interrupted")
            with ExitStack() as rest:
                held.release(rest)
                if self._inbox is not None:
                    rest.callback(self._inbox.leave)
                if self._shipment is not None:
                    rest.callback(self._shipment.release)
            forget(self)
            raise

    def _set_up(self, codec: Codec | None, interval: float, options: RoomOptions) -> None:
        """Make the parts of the queue. Each part gets the other parts that it needs; no part gets the queue."""
        held, status, registry, room = self._held, self._status, self._registry, self._room
        self._journal = journal = held.journal
        self._opened_at = (journal.tail_id, journal.total_bytes)
        self._source = registry.source = source = LocalSource(
            held.files,
            self._clock,
            journal,
            codec,
            holds_back=status.sync_seconds == 0,
            make_durable=self._make_durable,
            guard=registry.guard,
            save=registry.save,
            moved=lambda: self._maintenance.moved(),  # which is made below, as it needs the source
            configured=registry.configure,
            closed_reader=lambda reader: self._maintenance.reader_closed(reader),
        )
        self._lock = source.lock
        self._append = journal.append
        self._syncer = syncer = Syncer(self.directory, status, source, registry, room, held)
        self._disk_room = disk_room = DiskRoom(options, status, source, registry, room, held.archive, interval)
        self._puts = PutPath(status, syncer, source, registry, room, codec, self.max_item_bytes, disk_room)
        self._maintenance = Maintenance(status, syncer, source, registry, room, interval, disk_room)
        journal.growth.on_followed = self._maintenance.arm  # readers in other processes may be past the previous one
        registry.began_to_limit = self._maintenance.watch_limits
        registry.dispose_stale(held.found.stale)

    def _open_log(self, ship: str | Ship | Literal[False] | None) -> OpenLog | None:
        """Open the log in the store, if the queue is shipped: that decides where ids begin."""
        held = self._held
        if ship is None and file_names.ship_name(self.name) not in held.names:
            return None
        from kestrelpy.ship.opened import open_log_of

        return open_log_of(ship, held.files, held.names, held.found, self._clock, of_jobs=self._holds_jobs)

    def _open(self, disk: Disk | None, inbox_interval: float | None, *, quarantine: bool) -> None:
        """Ingest the published batches, and let readers and puts begin."""
        from kestrelpy.inbox.host import InboxHost
        from kestrelpy.inbox.watcher import InboxWatcher

        held, status, files, names = self._held, self._status, self._held.files, self._held.names
        if not self._holds_jobs:
            write_limit(files.directory, self.name, names, self.max_item_bytes)
            self._inbox = InboxHost(self._puts, files, disk, held.syncing, inbox_interval, quarantine=quarantine)
            self._puts.finish_batch = self._inbox.finish
        parts = (status, self._syncer, self._source, self._registry, self._room)
        if held.log is not None:
            from kestrelpy.ship.shipment import Shipment

            self._shipment = Shipment(held.log, *parts, files, self._maintenance, holds_back=status.sync_seconds == 0)
        if self._inbox is not None:
            self._inbox.open(None if self._shipment is None else self._shipment.inbox_for(self._inbox))
        self._ending = Ending(*parts, held, self._inbox, self._shipment, partial(forget, self))
        status.error = None
        self._registry.tidy(files.reader_names(names))
        files.hold_back(names)
        remember(self)
        self._maintenance.begin()
        self._disk_room.start()
        if self._inbox is not None and inbox_interval is not None:
            InboxWatcher.join(self._inbox, disk, self._clock)
        if self._shipment is not None:
            self._shipment.start()

    def _make_durable(self, item_id: int) -> None:
        self._syncer.commit.wait(item_id, holding=True)

    @property
    def _purpose(self) -> Purpose:
        return Purpose(self._held.files.directory, self.name)

    # -- putting -------------------------------------------------------------------------------------------------

    def put(
        self,
        data: V | bytearray | memoryview,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Add one item for every reader; returns the item's id.

        When this returns, the item survives the death of the process; with ``sync="always"``, a power cut too.
        ``data``: ``bytes``, ``bytearray`` or ``memoryview``; with a codec, any value. The item expires ``expires_in``
        seconds from now, or at ``expires_at_ms`` (milliseconds since 1970). If a reader with the policy ``BLOCK`` is
        full, waits for room up to ``timeout`` seconds (0: not at all; ``None``: for ever, but in a reader's hook not at
        all), in line with other producers.

        Raises ``QueueFull`` if a reader or the journal has no room (at once if it never will) or a reader lags,
        ``ItemTooLarge``, ``QueueDiskFull``; then nothing was stored. Also raises ``DurabilityUnknown``, ``TypeError``,
        ``QueueClosed``, ``ForkedQueue``, ``ValueError``, ``OSError``, ``NotShipped`` (which says more). Thread-safe.
        """
        status = self._status
        if (
            not status.fast
            or type(data) is not bytes
            or expires_in is not None
            or expires_at_ms is not None
            or timeout  # this also sends invalid values to the slow path, which checks them
        ):
            return self._puts.put([data], expires_in, expires_at_ms, timeout)[0]
        size = len(data)
        if size > self.max_item_bytes:
            raise ItemTooLarge(size, self.max_item_bytes)
        source, journal, time_ns = self._source, self._journal, self._time_ns
        try:
            with self._lock:
                added_ms = time_ns() // 1_000_000
                # HOT COPY of Journal.append: on the hottest path of all, a call less is a seventh.
                offset, item_id, total_bytes = journal._at
                end = offset + FRAME_BYTES + size
                if end > journal._room or added_ms != journal._last_ms:
                    item_id = self._append(data, added_ms)
                else:
                    item_id += 1
                    frame = pack_frame(size, item_id, added_ms, item_id - journal.durable_id, journal._marker) + data
                    try:
                        journal._buffer[offset:end] = pack_crc(crc32(frame)) + frame  # type: ignore[index]  # as there
                        journal._at = (end, item_id, total_bytes + size)
                    except BaseException as error:
                        journal._undo(error)
                        raise
                window = source.shared
                if window.is_open:
                    window.entries[item_id] = (data, added_ms, None)
                    window.left -= size + ITEM_COST
                    if window.left < 0:
                        source.trim_locked()
                source.visible_id = item_id
                if not status.sync_armed:
                    self._syncer.arm()
            if source.waiting:
                source.wake()
        except JournalFull:  # there may be room all the same, once the lock is released
            return self._puts.put([data], None, None, timeout)[0]
        except DurabilityUnknown as error:
            self._syncer.fail(error, reported=True)
            raise
        except BaseException as error:
            self._puts.recover(error)
            raise
        return item_id

    def put_nowait(self, data: V | bytearray | memoryview) -> int:
        """``put(data, timeout=0)``: raises ``QueueFull`` at once if there is no room."""
        return self.put(data, timeout=0)

    def put_many(
        self,
        items: Iterable[V | bytearray | memoryview],
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = None,
    ) -> range:
        """Add several items as one record: all or nothing, also across a crash. Returns their ids, a ``range``.

        One write and one sync for all items. When this returns, the items survive the death of the process; with
        ``sync="always"``, a power cut too. They expire ``expires_in`` seconds from now, or at ``expires_at_ms``. Waits
        for room as ``put`` does, up to ``timeout`` seconds. No items: returns an empty range.

        Raises ``QueueFull`` if a reader has no room (at once for more items than its ``max_items``), ``ItemTooLarge``,
        ``BatchTooLarge`` for more than 2 GiB together, and ``QueueDiskFull``; then nothing was stored. Also raises
        ``DurabilityUnknown``, ``QueueClosed``, ``ForkedQueue``, ``NotShipped``, ``TypeError`` and ``ValueError``.
        """
        values = list(items)
        if not values:
            self._status.check_usable()
            return range(0)
        ids = self._puts.put(values, expires_in, expires_at_ms, timeout)
        return range(ids[0], ids[-1] + 1)

    def put_future(
        self,
        data: V | bytearray | memoryview,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> Future[int]:
        """Add one item without waiting for the disk; returns a future of the item's id. Thread-safe.

        The future completes when the item is on disk (``sync="never"``: at once; ``acks="shipped"``: in the store). It
        fails with ``DurabilityUnknown`` if the sync fails. ``data``, ``expires_in``, ``expires_at_ms``: as in ``put``.
        Waits for room up to ``timeout`` seconds (``None``: for ever). Before anything is stored it raises
        ``QueueFull``, ``ItemTooLarge``, ``QueueDiskFull``, ``DurabilityUnknown`` and the other errors of ``put``.
        """
        return self._puts.put_future(data, expires_in, expires_at_ms, timeout)

    async def aput(
        self,
        data: V | bytearray | memoryview,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Add one item, for asyncio; returns its id when the item is on disk, with ``sync="never"`` at once.

        Waits for room and for the disk without blocking the loop, and without a thread. ``timeout`` limits the wait for
        room (0: not at all; ``None``: for ever), in seconds of the queue's clock. A task that is cancelled while it
        waits for room has put nothing. A task that is cancelled while it waits for the disk has put its item: the item
        stays, and is on disk as soon as it would have been. ``data``, ``expires_in`` and ``expires_at_ms`` are as in
        ``put``. Raises ``QueueFull``, ``ItemTooLarge``, ``QueueDiskFull``, ``DurabilityUnknown``, ``QueueClosed``,
        ``ForkedQueue``, ``TypeError``, ``ValueError`` and ``OSError``, and ``NotShipped`` as ``put_future``.
        """
        return await self._puts.aput(data, expires_in, expires_at_ms, timeout)

    def sync(self) -> None:
        """Return when everything put before is on disk, in every mode. Raises ``DurabilityUnknown`` if that fails."""
        self._syncer.sync()

    @property
    def shipping(self) -> Shipping | None:
        """The shipping of this queue to a store; ``None`` if it is not shipped."""
        return None if self._shipment is None else self._shipment.shipping(self.close)

    # -- readers --------------------------------------------------------------------------------------------------

    def reader(self, name: str = "", *, start: Start = "tail") -> Reader[V]:
        """The reader of that name, which is opened or made if need be. This process then owns the reader.

        The default reader's name is empty. The first named reader takes over the default reader's position and unread
        items (in this process it is the same object); the queue's own ``get`` and ``commit`` then raise
        ``NoDefaultReader``. If another process has the default reader open at that moment, the named reader takes over
        nothing, and the default reader stays beside it. A later new reader begins at ``start``: ``"tail"``,
        ``"earliest"`` or an item id. For a reader that exists, ``start`` is ignored.

        Raises ``NoDefaultReader`` if there are named readers and no default reader, ``InvalidName``, ``QueueLocked`` if
        another process owns the reader, ``ValueError`` for a bad ``start``, and ``OSError``. Thread-safe.
        """
        self._status.check_usable()
        found = self._registry.open.get(name)
        if found is not None and not checkpointer_of(found).is_half_closed:
            return found
        with self._status.while_open():
            reader = self._registry.reader(name, start)
        self._room.ring_first()  # its limits are those of its configuration from here on
        return reader

    def drop_reader(self, name: str) -> None:
        """Close a reader and delete its saved position; its waiters get ``QueueClosed``.

        Does nothing if there is no such reader. Raises ``QueueLocked`` if another process owns it, and ``OSError``.
        """
        self._status.check_usable()
        with self._status.while_open():
            self._registry.drop(name)
        self._maintenance.moved()

    @property
    def readers(self) -> Mapping[str, Reader]:
        """The readers that this process has open, by name."""
        return MappingProxyType(self._registry.open)

    def get(self, block: bool = True, timeout: float | None = None) -> Item[V]:
        """Open a read of the next item of the default reader: commit it when the work is done, or abort it.

        An aborted item comes first, else the next unread one. Waits in line up to ``timeout`` seconds of real time
        (``None``: for ever; ``block=False``: not at all). Raises ``QueueEmpty`` if no item came in time,
        ``NoDefaultReader`` if there are named readers only, ``ValueError`` for a negative timeout, ``CorruptJournal``
        if the next item is damaged on disk, ``QueueClosed``, ``DurabilityUnknown``, ``ForkedQueue``. Thread-safe.
        """
        reader = self._registry.alone
        return (reader if reader is not None else self.reader()).get(block, timeout)

    def get_nowait(self) -> Item[V]:
        """``get(block=False)`` of the default reader. Raises ``QueueEmpty`` at once if there is no item."""
        return self.reader().get(False)

    def get_many(self, max_items: int, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Item[V]]:
        """Open reads of up to ``max_items`` items of the default reader: waits for the first, then takes what is there.

        Waits up to ``timeout`` seconds (``None``: for ever). Stops before the item that would bring the data above
        ``max_bytes``, but takes at least one. Raises ``QueueEmpty`` if no item came in time, ``NoDefaultReader`` if
        there are named readers only, ``CorruptJournal`` for a damaged item, ``QueueClosed``, and ``ValueError``.
        """
        return self.reader().get_many(max_items, max_bytes=max_bytes, timeout=timeout)

    def get_future(self, timeout: float | None = None) -> Future[Item[V]]:
        """A future of the next item of the default reader; never blocks. ``cancel()`` loses no item.

        The future fails with ``QueueEmpty`` after ``timeout`` seconds of the queue's clock. Raises ``NoDefaultReader``,
        ``ValueError`` for a negative timeout, and ``RuntimeError`` if a timeout needs a thread that cannot be started.
        """
        return self.reader().get_future(timeout)

    async def aget(self, timeout: float | None = None) -> Item[V]:
        """Open a read of the next item of the default reader, for asyncio. A cancelled task loses no item.

        Raises ``QueueEmpty`` after ``timeout`` seconds of the queue's clock (``None``: never), ``NoDefaultReader``,
        ``ValueError`` for a negative timeout, and ``RuntimeError`` if a timeout needs a thread that cannot be started.
        """
        return await self.reader().aget(timeout)

    def peek_future(self, timeout: float | None = None) -> Future[Item[V]]:
        """A future of the next item of the default reader, without an open read; never blocks.

        It fails with ``QueueEmpty`` after ``timeout`` seconds of the queue's clock. Raises as ``get_future``.
        """
        return self.reader().peek_future(timeout)

    def peek(self, timeout: float | None = 0) -> Item[V]:
        """The next item of the default reader. No read is opened: the item stays, and cannot be committed.

        Waits up to ``timeout`` seconds. Raises ``QueueEmpty``, ``NoDefaultReader``, ``CorruptJournal``, ``ValueError``.
        """
        return self.reader().peek(timeout)

    def commit(self, item_or_id: Item | int) -> None:
        """Acknowledge an open read of the default reader: the work is done. In any order, from any thread.

        The commit is durable with the next checkpoint. Raises ``UnknownItem`` if the item is not an open read,
        ``NoDefaultReader``, ``QueueClosed``, and ``TypeError`` for an argument that is neither an item nor an id.
        """
        reader = self._registry.alone
        (reader if reader is not None else self.reader()).commit(item_or_id)

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """Commit all of these items of the default reader; none if one is not an open read (``UnknownItem``)."""
        self.reader().commit_many(items)

    def abort(
        self, item_or_id: Item | int, delay: float | None = None, reason: str | None = None, *, counts: bool = True
    ) -> None:
        """Give an item of the default reader back, for a delivery after ``delay`` seconds. ``reason`` goes with a dead
        letter, ``counts`` is as in ``Reader.abort``. Raises ``UnknownItem``, ``NoDefaultReader``, ``ValueError``.
        """
        self.reader().abort(item_or_id, delay, reason, counts=counts)

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """Move the default reader: its next item is ``item_id``, or the first one added at ``time_ms`` or later.

        Goes back as far as segments last, or forward to after the tail. Drops all open reads and aborted items
        of the default reader; those after the new position come again. The position is saved when this returns. Raises
        ``TypeError`` unless exactly one of the two is given, ``ValueError``, ``NoDefaultReader``, and ``OSError``.
        """
        self.reader().seek(item_id, time_ms=time_ms)

    def discard(self, items: Iterable[Item | int]) -> int:
        """Drop these items (or ids) of the default reader as far as they are unread or aborted; returns how many."""
        return self.reader().discard(items)

    # -- all readers ----------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the position of every reader open here, and retire the segments that no reader needs any more.

        Items committed before do not come again after the death of the process, nor, with ``durable``, after a power
        cut. Raises ``DurabilityUnknown``, ``QueueClosed``, ``OSError``.
        """
        self._status.check_usable()
        with self._status.while_open():
            self._registry.of_each(lambda reader: reader.checkpoint(durable))
            self._registry.retire(self._source)

    def flush(self) -> int:
        """Drop the unread and aborted items of every reader open here; returns how many. Open reads stay open."""
        self._status.check_usable()
        self._default_if_alone()
        return sum(self._registry.of_each(lambda reader: reader.flush()))

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front of every reader open here, at most ``limit`` of each; returns how many."""
        self._status.check_usable()
        self._default_if_alone()
        return sum(self._registry.of_each(lambda reader: reader.discard_expired(limit)))

    def evict_waiters(self) -> int:
        """Give ``QueueEmpty`` to all waiting consumers of the readers open here; returns how many there were."""
        return sum(reader.evict_waiters() for reader in list(self._registry.open.values()))

    def _default_if_alone(self) -> None:
        """Open the default reader if there is no other reader: a queue has at least one."""
        if not self._registry.open and not any(self._held.files.readers(self._journal.queue_id)):
            self.reader()

    def take_in(self) -> int:
        """Ingest what other processes published for this queue (``kestrelpy.inbox``); returns the number of items.

        The queue also looks by itself every ``inbox_interval`` seconds. Each batch is ingested once and as a whole, in
        the order of publishing: its items become durable, and visible to readers, all at once. They are added at this
        moment, by this queue's clock. A batch for which a reader has no room waits, with all batches after it; a batch
        larger than that reader's limits waits until the reader is empty. With ``journaled=False``, returns 0.

        Raises ``QueueDiskFull`` or another ``OSError``: the queue tries again later, and if the batch was begun, puts
        raise until it is done. Also raises ``DurabilityUnknown``, ``QueueClosed``, ``ForkedQueue``. Thread-safe.
        """
        self._status.check_usable()
        return 0 if self._inbox is None else self._inbox.take_in()

    # -- figures --------------------------------------------------------------------------------------------------

    def _consumed(self) -> Reader[V]:
        return self.reader()

    @property
    def closed(self) -> bool:
        """True once ``close()`` or ``erase()`` was called."""
        return isinstance(self._status.error, QueueClosed)

    def stats(self) -> QueueStats:
        """The figures of the queue and of the readers open here, at this moment. Cost: O(segments + open reads)."""
        refused = 0 if self._inbox is None else self._inbox.refused
        return figures_of(self._puts, self._opened_at, refused)

    def as_blocking_queue(self) -> JournaledBlockingQueue[V]:
        """The default reader behind the interface of ``queue.Queue``: a get commits at once, a put waits for room.

        ``qsize`` counts unread items; ``put_head`` and ``get_if`` raise ``NotImplementedError``. Raises
        ``NoDefaultReader`` if there are named readers only, and what ``reader()`` raises.
        """
        from kestrelpy.blocking import JournaledBlockingQueue

        return JournaledBlockingQueue(self.reader(), self._puts, self.close)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save the checkpoints, close the journal, and give ``QueueClosed`` to all waiters. Idempotent.

        Raises ``DurabilityUnknown`` or ``OSError`` if something could not be written, or if a sync in the background
        has failed and no call of the queue has raised that yet (calls of readers and futures do not count). If it is
        shipped, also ``NotShipped`` and ``Fenced``. It is closed all the same; its files have what was acknowledged.
        """
        self._ending.end(QueueClosed(f"queue {self.name!r} is closed"))

    def erase(self) -> None:
        """Close the queue and delete its files, and no others. Does nothing if the queue is erased already.

        If another process has a reader open, the calls of that reader raise ``QueueClosed`` from then on, and it saves
        nothing. Raises ``OSError``, ``ForkedQueue``, and ``QueueClosed`` if the queue is closed or being closed: the
        files may belong to another owner by now.
        """
        self._ending.end(QueueClosed(f"queue {self.name!r} is erased"), erase=True)

    def _dismiss(self, error: QueueClosed) -> None:
        """At the end of the interpreter: give ``error`` to every waiter."""
        self._ending.dismiss(error)

    def _abandon(self) -> None:
        """In a forked child: abandon everything, as it belongs to the parent (R26)."""
        self._ending.abandon(ForkedQueue(self._pid))
        self._lock = self._source.lock

    @property
    def _what(self) -> str:
        return f"JournaledQueue {self.name!r} in {self.directory}"

    def __del__(self) -> None:
        status = getattr(self, "_status", None)
        if status is not None and status.error is None:
            warn_unclosed(self)

    def __repr__(self) -> str:
        state = "" if self._status.error is None else " closed" if self.closed else " failed"
        readers = ", ".join(repr(reader) for reader in self._registry.open.values())
        tail = self._journal.tail_id if hasattr(self, "_journal") else "?"  # it is being opened
        return f"<JournaledQueue {self.name}: tail={tail} readers=[{readers}]{state}>"

    def _check(self) -> None:
        """Assert the invariants. For tests, while no other thread uses the queue."""
        source, journal, status = self._source, self._journal, self._status
        source._check()
        with self._lock:
            assert source.visible_id == journal.tail_id or status.sync_seconds == 0 or status.is_unfinished
            ids = [(segment.first_id, segment.last_id) for segment in journal.segments]
            assert ids == sorted(ids)
        for reader in self._registry.open.values():
            reader._check()
