"""Restoring a queue from a store: its files are made again, as they were when a slot was written.

Rules:
1. ``jobs.restore`` is in the folder, durably, from before the first file until after everything is on disk. While it is
   there, nobody opens the queue, and the next restore removes what this one has made and begins from the start.
2. Nothing that is in the folder already is touched: it must have no file of a queue of that name.
3. What is written has been checked. A closed segment is written as it is; the active one from the slots' bytes, without
   a footer: the next opening finds its end and closes it, as after a crash.
4. All that the log has at that slot is here at the end: the journal from the lowest head on, the checkpoints, and the
   ledger. A batch of the store's inbox that was being taken in is here, too: whoever opens the queue finishes it. A
   mark is added: by it an opening sees that everything up to the slot's last id was on disk. It also keeps the ids
   used that were given out and are in no slot, as far as the FENCE says.
5. The store is asked for all that the log has before the folder is touched. Only segments, and the slots of the active
   one, are fetched later.

NOTE ON LOCKING: ``_Progress._lock`` is held while the caller's function is called.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from kestrelpy._checks import check_whole
from kestrelpy._disk.interface import NO_ROOM, Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.purpose import mark_as_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import MOST_LOST, Recovered, write_mark
from kestrelpy._journal.small_files import make_sign
from kestrelpy._value import Value
from kestrelpy.clock import SystemClock
from kestrelpy.errors import QueueDiskFull
from kestrelpy.inbox.parts import open_inbox
from kestrelpy.ship import fetching
from kestrelpy.ship.errors import NoSuchQueue, RestoreTargetExists
from kestrelpy.ship.lazy import may_be_lazy, write_lazy, write_outline
from kestrelpy.ship.log import carry_out
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.opened import pause
from kestrelpy.ship.opening import open_store, url_of
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.ship_file import ShipFile, write_ship_file
from kestrelpy.ship.slots import SealedSegment, ShippedLedger
from kestrelpy.ship.store import Store

__all__ = ["Restored", "restore"]

_FOR_PEOPLE = b"The queue beside this file is not completely restored: restore it again (kestrelpy.ship.restore).\n"


class Restored(Value, kw_only=True):
    """What ``restore`` has made. ``slot``, ``epoch``, ``written_ms``: of the last slot that counts, and when it was
    written, by its owner's clock. ``last_id``: the last item. ``items``: those in the segments that were fetched, also
    if readers have passed them. ``segments``, ``bytes``: of the journal. ``seconds``: how long it took. ``readers``:
    the names of those with a checkpoint; the default reader's is empty.
    """

    queue: str
    slot: int
    epoch: int
    written_ms: int
    last_id: int
    items: int
    segments: int
    bytes: int
    seconds: float
    readers: tuple[str, ...]


def restore(
    store: str | Store | Any,
    queue: str,
    directory: str | os.PathLike[str],
    *,
    at_ms: int | None = None,
    at_slot: int | None = None,
    all: bool = False,
    lazy: bool = False,
    threads: int = 4,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
    disk: Disk | None = None,
) -> Restored:
    """Make the files of ``queue`` in ``directory`` again, from ``store``, as ``open_store`` takes it with ``options``.

    The queue is as it was at the end of its log, or at the last slot that was written at ``at_ms`` or before, or at
    ``at_slot``. Items that all readers have passed are left out, by whole segments, unless ``all``. When this returns,
    everything is on disk, and ``JournaledQueue`` opens it: readers continue at their last shipped checkpoints. The
    owner may ship meanwhile; what he does next is not in the copy.

    With ``lazy`` only the end of the journal is fetched now. ``JournaledQueue(..., ship=)`` with the same store fetches
    the rest, segment by segment, when it is read, and ahead of that; until it has, nobody else opens the queue
    (``RestoreIncomplete``). A queue of many gigabytes can be opened within seconds then; but the opening of a work
    queue fetches all of it. ``lazy`` goes with the end of the log (``ValueError``).

    ``threads`` segments are fetched at once, each in parts of 4 MiB. ``progress(done_bytes, total_bytes)`` is called
    now and then, by one thread at a time. ``disk`` replaces the system's, for tests.

    If this is cut short, by an error or the end of the process, ``directory`` has a file ``QUEUE.restore``. Until a
    second call has ended, all openings of the queue raise ``RestoreIncomplete``.

    Raises ``NoSuchQueue`` if the store has no such queue, or does not keep that moment any more;
    ``RestoreTargetExists`` if the folder has a queue of that name, ``QueueLocked`` if another process restores it;
    ``StoreDamaged`` for what is missing or altered in the store, ``UnsupportedFormat``, ``StoreUnavailable``,
    ``BadStoreURL``, ``InvalidName``, ``QueueDiskFull``, ``ValueError``, ``TypeError``, ``OSError``.
    """
    clock = SystemClock()
    began = clock.monotonic()
    file_names.check_name(queue)
    check_whole("threads", threads, 1)
    opened = open_store(store, options=options)
    shipped = ShippedQueue(opened, queue)
    state, is_end = _log_at(shipped, at_ms, at_slot)
    assert state.header is not None
    about = ShipFile(url_of(store, opened), state.header.queue_id, restored_slot=state.slot, restored_to_end=is_end)
    if lazy and not is_end:
        raise ValueError("lazy=True goes with the end of the log: the rest of an earlier moment would be kept nowhere")
    made = _Restore(shipped, state, disk, wants_all=all, lazy=lazy)
    try:
        made.run(os.fspath(directory), about, threads, progress)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise QueueDiskFull(os.fspath(directory)) from error
        raise
    return Restored(
        queue=queue,
        slot=state.slot,
        epoch=state.header.epoch,
        written_ms=state.header.written_ms,
        last_id=state.last_id,
        items=made.items,
        segments=len(made.segments) + bool(state.tail),
        bytes=made.total_bytes,
        seconds=clock.monotonic() - began,
        readers=tuple(sorted(state.checkpoints)),
    )


def restore_missing(ship: Any, files: QueueFiles, disk: Disk | None) -> None:
    """Before a queue is opened: restore it if the store has it and the folder has not. ``ship``: a ``Ship``.

    Raises as ``restore``.
    """
    if is_taken(files.directory, files.queue, disk):
        return
    with contextlib.suppress(NoSuchQueue):  # a new queue
        restore(ship.store, files.queue, files.directory.path, options=ship.options, disk=disk)


def is_taken(folder: Directory, queue: str, disk: Disk | None) -> bool:
    """Whether a folder has a queue of this name, so that none is restored there: its files, but for its locks alone, or
    its ledger in the inbox. What a restore has left that was cut short is none. Raises ``OSError``.
    """
    names = folder.names()
    if file_names.restore_name(queue) in names:
        return False
    return bool(file_names.but_for_locks(names, queue)) or _has_ledger(folder.path, queue, disk)


def _has_ledger(path: str, queue: str, disk: Disk | None) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folder = open_inbox(path, disk, create=False)
        try:
            return file_names.ledger_name(queue) in folder.names()
        finally:
            folder.close()
    return False


def _log_at(shipped: ShippedQueue, at_ms: int | None, at_slot: int | None) -> tuple[LogState, bool]:
    """The log up to that moment, and whether it ends there."""
    if at_ms is not None and at_slot is not None:
        raise ValueError("give at_ms or at_slot, not both")
    if at_slot is not None:
        return shipped.at_slot(check_whole("at_slot", at_slot, 1))
    if at_ms is not None:
        return shipped.at_time(check_whole("at_ms", at_ms))
    return shipped.at_end(), True


class _Restore:
    """One restore into one folder, of the log up to ``state``."""

    _target: Directory
    _files: QueueFiles

    def __init__(
        self, shipped: ShippedQueue, state: LogState, disk: Disk | None, *, wants_all: bool, lazy: bool = False
    ) -> None:
        self._shipped = shipped
        self._state = state
        self._disk = disk
        self._stopped = False
        self._given_out = shipped.given_out(state)
        self.segments = state.segments if wants_all else needed(state)
        """The closed segments that are made."""
        last = None if state.tail or not self.segments else self.segments[-1]
        self._later = [each for each in self.segments if lazy and each is not last and may_be_lazy(each)]
        """Those of them that are made without their frames."""
        self._later_keys = {each.key for each in self._later}

    @property
    def items(self) -> int:
        closed = sum(footer.items for footer in (each.segment_footer() for each in self.segments))
        tail = self._state.tail
        return closed + (self._state.last_id + 1 - tail[0].first_id if tail else 0)

    @property
    def total_bytes(self) -> int:
        return sum(each.file_bytes for each in self.segments) + self._tail_bytes

    @property
    def fetched_bytes(self) -> int:
        """What is fetched now."""
        return self.total_bytes - sum(each.file_bytes for each in self._later)

    @property
    def _tail_bytes(self) -> int:
        return self._state.place.offset if self._state.tail else 0

    def run(self, path: str, about: ShipFile, threads: int, progress: Callable[[int, int], object] | None) -> None:
        self._target = (self._disk or RealDisk()).directory(path, create=True)
        try:
            self._files = QueueFiles(self._target, self._shipped.queue)
            self._check_free()  # before a lock is made
            lock, names = self._files.lock(restoring=True)
            try:
                self._begin(names)
                self._write(about, threads, _Progress(self.fetched_bytes, progress))
            finally:
                lock.release()
        finally:
            self._target.close()

    def _write(self, about: ShipFile, threads: int, progress: _Progress) -> None:
        self._fetch(threads, progress)
        self._write_tail(progress)
        self._write_states()
        write_ship_file(self._target, self._shipped.queue, about)  # it syncs the folder: with that, all names are there
        self._target.unlink(file_names.restore_name(self._shipped.queue))
        self._target.sync()

    # -- the folder --------------------------------------------------------------------------------------------------

    def _check_free(self) -> None:
        """Raise ``RestoreTargetExists`` if a queue of this name is there."""
        queue = self._shipped.queue
        if is_taken(self._target, queue, self._disk):
            raise RestoreTargetExists(f"{self._target.path}/{queue}")

    def _begin(self, names: list[str]) -> None:
        """Say durably that a restore is under way. If one was already, remove what it has made."""
        self._check_free()
        queue = self._shipped.queue
        sign = file_names.restore_name(queue)
        if sign not in names:
            make_sign(self._target, sign, _FOR_PEOPLE)
            return
        for name in names:
            owner = file_names.parse_owner(name)
            if owner is not None and owner[0] == queue and name not in (sign, file_names.lock_name(queue)):
                self._target.unlink(name)
        if _has_ledger(self._target.path, queue, self._disk):
            folder = open_inbox(self._target.path, self._disk, create=False)
            try:
                folder.unlink(file_names.ledger_name(queue))
                folder.sync()
            finally:
                folder.close()
        self._target.sync()  # if it was killed before it had synced the sign, it had made nothing else

    # -- the journal -------------------------------------------------------------------------------------------------

    def _fetch(self, threads: int, progress: _Progress) -> None:
        """Fetch the closed segments. If one of them fails, or this thread is interrupted, the others stop soon."""
        if self._later:
            write_lazy(self._target, self._shipped.queue, self._later)
        if threads == 1 or len(self.segments) < 2:
            for segment in self.segments:
                self._fetch_segment(segment, progress)
            return
        pool = ThreadPoolExecutor(min(threads, len(self.segments)), thread_name_prefix="kestrelpy-restore")
        try:
            under_way = [pool.submit(self._fetch_segment, each, progress) for each in self.segments]
            for each in as_completed(under_way):
                each.result()
        except BaseException:
            self._stopped = True
            self._shipped.store.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch_segment(self, segment: SealedSegment, progress: _Progress) -> None:
        if segment.key in self._later_keys:
            write_outline(self._target, self._shipped.queue, segment)
            return
        file = self._target.create(file_names.segment_name(self._shipped.queue, segment.number))
        try:
            at = 0
            for part in self._shipped.segment_parts(segment):
                if self._stopped:
                    return
                file.write(at, part)
                at += len(part)
                progress.add(len(part))
            file.sync()
        finally:
            file.close()

    def _write_tail(self, progress: _Progress) -> None:
        """Write the active segment, as far as it is in the log."""
        if not self._state.tail:
            return
        file = self._target.create(file_names.segment_name(self._shipped.queue, self._state.place.number))
        try:
            at = 0
            for part in self._shipped.tail_parts(self._state):
                file.write(at, part)
                at += len(part)
                progress.add(len(part))
            file.sync()
        finally:
            file.close()

    # -- what is beside it -------------------------------------------------------------------------------------------

    def _write_states(self) -> None:
        state, queue = self._state, self._shipped.queue
        if self._shipped.of_jobs:
            mark_as_jobs(self._target, queue)
        for reader, saved in sorted(state.checkpoints.items()):
            # A reader that was owned has a lock file. Without it, one whose checkpoint is lost may begin at the tail.
            self._files.lock_reader(reader).release()
            self._files.checkpoint_file(reader).save(saved, durable=True)
        write_restored_mark(self._target, queue, state, self._given_out)
        if state.ledger is not None:
            folder = open_inbox(self._target.path, self._disk, create=True)
            try:
                self._fetch_unfinished(folder, state.ledger)
                replace_file(folder, file_names.ledger_name(queue), state.ledger.file())
            finally:
                folder.close()

    def _fetch_unfinished(self, folder: Directory, ledger: ShippedLedger) -> None:
        """Fetch the batch that was being taken in from the store. If it is damaged there, an opening says so."""
        intent = ledger.state().intent
        if intent is not None and intent.stored:
            now_ms = SystemClock().time_ns() // 1_000_000
            shipped = self._shipped
            steps = fetching.fetch_unfinished(shipped.prefix, shipped.queue, intent, folder, now_ms)
            carry_out(steps, shipped.store, pause)


class _Progress:
    """Counts the bytes that are written, for the caller's function."""

    def __init__(self, total_bytes: int, report: Callable[[int, int], object] | None) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._lock = threading.Lock()
        self._done_bytes = 0  # guarded by self._lock

    def add(self, size: int) -> None:
        with self._lock:
            self._done_bytes += size
            if self._report is not None:
                self._report(self._done_bytes, self._total_bytes)


def write_restored_mark(folder: Directory, queue: str, state: LogState, given_out: int) -> None:
    """The mark says that everything in the log is on disk here. An id that is in no slot may have been given out before
    the last FENCE: no id below its ``first_id`` is given out again, if an opening believes that. ``given_out``: the
    last one. An empty queue has a mark, too: it says which queue that is. Raises ``OSError``.
    """
    assert state.header is not None
    is_further = state.last_id < given_out <= state.last_id + MOST_LOST
    tail_id = given_out if is_further else state.last_id
    write_mark(folder, queue, Recovered(queue_id=state.header.queue_id, tail_id=tail_id), state.last_id)


def needed(state: LogState) -> list[SealedSegment]:
    """The closed segments with an item that a reader has not passed: all, if no reader has a checkpoint. The last one
    is needed in any case if there is no active one: the journal continues from there.
    """
    head = min((saved.head for saved in state.checkpoints.values()), default=0)
    first = next((at for at, each in enumerate(state.segments) if each.segment_footer().last_id > head), None)
    if first is None:
        return [] if state.tail else state.segments[-1:]
    return state.segments[first:]
