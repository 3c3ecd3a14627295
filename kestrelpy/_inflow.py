"""The inbox of a queue that is open here: when it is looked at, and what that means to puts and readers.

Rules:
1. One look per folder and process, every so many seconds, whatever the number of queues: it costs a call of the system
   where there is no inbox, and a listing where there is one.
2. What a look finds is taken in on a thread of its own: it may take long, and syncs of other queues must not wait.
3. Nothing of this is on the way of a put or a get. While a batch is not taken in to its end, the journal refuses puts,
   and the queue's slow path goes on with it first.

NOTE ON LOCKING: ``Inflow._lock`` (I in docs/locking.md) is held while the inbox is looked at and taken in; it comes
before the queue's. ``Watch._guard`` guards the table of watches and their members; only the timers' lock comes after
it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from kestrelpy import _log
from kestrelpy._disk import Disk
from kestrelpy._inbox_format import Batch
from kestrelpy._intake import Intake, erase_inbox
from kestrelpy._names import publishing_queues
from kestrelpy._parts import open_inbox
from kestrelpy.clock import Clock, SystemClock, Timer
from kestrelpy.config import FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, KestrelError, QueueClosed
from kestrelpy.reader import Reader

if TYPE_CHECKING:
    from kestrelpy._disk import Directory
    from kestrelpy._readership import Limited
    from kestrelpy.queue import JournaledQueue


class Inflow:
    """The inbox of one queue, and its ``Host``."""

    def __init__(self, queue: JournaledQueue, disk: Disk | None, *, quarantine: bool) -> None:
        self.journal = queue._journal
        self.max_item_bytes: int | None = queue.max_item_bytes
        self._queue = queue
        self._disk = disk
        self._quarantine = quarantine
        self._lock = threading.Lock()
        self._folder: Directory | None = None  # guarded by self._lock, as all below
        self._intake: Intake | None = None
        self._stopped = False
        self._told = False  # whether it was logged that it does not go on

    # -- the host ----------------------------------------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[object]:
        return self._queue._lock

    def now_ms(self) -> int:
        return self._queue._time_ns() // 1_000_000

    def has_room_locked(self, batch: Batch) -> bool:
        """A batch that is larger than a reader's limit waits until that reader is empty."""
        return not any(self._is_refused(reader, batch) for reader in self._queue._readership.limited)

    def _is_refused(self, reader: Limited, batch: Batch) -> bool:
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        return not self._queue._fits(reader, batch.items, max(0, batch.data_bytes - 1)) and reader.items > 0

    def sync_locked(self) -> None:
        queue, journal = self._queue, self.journal
        file, tail_id = journal.sync_target()
        if file is not None and journal.durable_id < tail_id:
            with queue._syncing:
                journal.is_active(file)  # it is, and this raises if a sync of it has failed meanwhile (R9)
                try:
                    journal.sync(file)
                except OSError as cause:
                    raise journal.fail(cause) from cause
        journal.durable_id = max(journal.durable_id, tail_id)
        queue._feed.show_durable_locked(tail_id, journal.total_bytes)

    def hide_locked(self, first_id: int) -> None:
        queue = self._queue
        queue._unfinished, queue._plain = True, False
        queue._feed.hide_locked(first_id)
        self.journal.allow()

    def show_locked(self) -> None:
        queue = self._queue
        self.journal.allow()
        queue._feed.show_hidden_locked()
        queue._unfinished = False
        queue._choose_path()

    def refuse_locked(self, error: Exception) -> None:
        if not isinstance(error, DurabilityUnknown):
            self.journal.refuse(error)

    @property
    def refused(self) -> int:
        """How many published batches are kept aside because they can never be taken in. May be read at any time."""
        intake = self._intake
        return 0 if intake is None else intake.refused

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

    def _look(self) -> Intake | None:
        """The inbox, if there is one. Under the lock."""
        if self._intake is None:
            try:
                folder = open_inbox(self._queue._home.directory.path, self._disk, create=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                intake = Intake(folder, self._queue.name, self)
                intake.open(quarantine=self._quarantine)
            except BaseException:
                folder.close()
                raise
            self._folder, self._intake = folder, intake
        return self._intake

    def take_in(self, *, opening: bool = False, told: bool = True) -> int:
        """Take in what is published; how many items. Raises as ``JournaledQueue.take_in``. ``told``: to who uses the
        queue.
        """
        queue = self._queue
        taken = 0
        try:
            with self._lock:
                if not opening:
                    queue._check_usable()
                intake = None if self._stopped else self._look()
                if intake is not None:
                    self._queue._readership.refresh_limits()
                    self._discard_expired()
                    taken = intake.run()
                    self._told = False
        except DurabilityUnknown as error:
            queue._fail(error, told=told)
            raise
        finally:
            self._tell()
        return taken

    def finish(self) -> None:
        """Before a put: go on with what is not taken in to its end. Raises as ``take_in``."""
        try:
            with self._lock:
                if self._intake is not None and not self._stopped:
                    self._intake.finish()
        except DurabilityUnknown as error:
            self._queue._fail(error, told=True)
            raise
        finally:
            self._tell()

    def _discard_expired(self) -> None:
        """Expired items do not count where a batch would be refused. Not those that have a hook: none is run here."""
        for reader in self._queue._readership.limited:
            if isinstance(reader, Reader) and reader.config.on_expired is None:
                with contextlib.suppress(OSError, KestrelError):
                    reader.discard_expired()

    def _note(self) -> None:
        """Whoever waits for what is on disk is told of what is visible, too: a rotation may have synced more."""
        self._queue._commit.note(min(self.journal.durable_id, self._queue._feed.visible_id))

    def _tell(self) -> None:
        """Something may be on disk, and visible: serve who waits for it. With no lock held."""
        queue = self._queue
        if queue._state is None:
            self._note()
            queue._keep_limits()
            if queue._feed.waiting:
                queue._feed.wake()

    def look(self) -> None:
        """As ``take_in``, for the watch: what goes wrong is logged, once."""
        try:
            self.take_in(told=False)
        except (QueueClosed, ForkedQueue, DurabilityUnknown):
            return  # the next call says so
        except (KestrelError, OSError):
            self._say()

    def _say(self) -> None:
        if not self._told:
            self._told = True
            _log.warning("the inbox of %s can't be taken in now; it is tried again", self._queue.name, error=True)

    def stop(self) -> None:
        """The queue is about to close: nothing is taken in from here on. Waits for what is under way."""
        with self._lock:
            self._stopped = True
        watch = self._queue._watch
        if watch is not None:
            watch.leave(self._queue)
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
            folder = open_inbox(self._queue._home.directory.path, self._disk, create=False)
            try:
                erase_inbox(folder, self._queue.name)
            finally:
                folder.close()


class Watch:
    """Looks at the inbox of one folder for all queues that this process has open there."""

    _guard = threading.Lock()
    # One table for the process. A watch lives as long as one of its queues does, or its timer.
    _shared: ClassVar[weakref.WeakValueDictionary[tuple[object, ...], Watch]] = weakref.WeakValueDictionary()

    def __init__(self, key: tuple[object, ...], path: str, disk: Disk | None, clock: Clock) -> None:
        self._key = key
        self._path = path
        self._disk = disk
        self._clock = clock
        self._members: weakref.WeakValueDictionary[str, JournaledQueue] = weakref.WeakValueDictionary()
        self._timer: Timer | None = None  # guarded by self._guard, as the next one
        self._due = 0.0  # when it is
        self._trouble = _log.Trouble()

    @classmethod
    def join(cls, queue: JournaledQueue, disk: Disk | None, clock: Clock) -> None:
        """Look for ``queue`` too, as often as it asks for (``inbox_interval``), for as long as it is open."""
        path = queue._home.directory.path
        key = (path, id(disk), None if type(clock) is SystemClock else id(clock))
        with cls._guard:
            watch = cls._shared.get(key)
            starts = watch is None
            if watch is None:
                watch = cls._shared[key] = Watch(key, path, disk, clock)
            watch._members[queue.name] = queue
        queue._watch = watch
        if starts or watch._is_late():
            watch._arm()

    def leave(self, queue: JournaledQueue) -> None:
        """``queue`` is closed. May be repeated."""
        with self._guard:
            if self._members.get(queue.name) is queue:
                del self._members[queue.name]
            self._give_up_locked()

    def _give_up_locked(self) -> bool:
        """Whether there is nobody left to look for."""
        if self._members:
            return False
        if self._shared.get(self._key) is self:
            del self._shared[self._key]
        if self._timer is not None:
            self._timer.cancel()
        return True

    def _arm(self) -> None:
        """See to the next look, if there is anybody to look for. If no thread can be started for it, the next put of
        each of them tries again.
        """
        try:
            with self._guard:
                if not self._give_up_locked():
                    if self._timer is not None:
                        self._timer.cancel()
                    seconds = self._seconds()
                    self._due = self._clock.monotonic() + seconds
                    self._timer = self._clock.call_later(seconds, self._look, on_lost=self._lost)
        except RuntimeError:
            for queue in list(self._members.values()):
                queue._feed.leave(self._arm)

    def _seconds(self) -> float:
        """How often the one asks that asks most often."""
        return min((queue._inbox_interval or math.inf for queue in list(self._members.values())), default=math.inf)

    def _is_late(self) -> bool:
        """Whether a look is set that comes later than somebody who has joined since asks for. A look that is under way
        sets the next one by itself.
        """
        with self._guard:
            return self._timer is not None and self._due > self._clock.monotonic() + self._seconds()

    def _lost(self, _cause: BaseException) -> None:
        """The maintenance thread died: another one goes on."""
        self._arm()

    def _look(self) -> None:
        """On the maintenance thread: see whether there is anything to take in, and for whom."""
        with self._guard:
            if self._timer is not None:
                self._timer.cancel()  # it is this one; or one that was set meanwhile, and this look sets the next
                self._timer = None
        found: list[JournaledQueue] = []
        what = f"looking at the inbox of {self._path}"
        try:
            folder = open_inbox(self._path, self._disk, create=False)
            try:
                names = publishing_queues(folder.names())
            finally:
                folder.close()
            self._trouble.end(what)
            queues = [self._members.get(name) for name in names]
            found = [queue for queue in queues if queue is not None and queue._state is None]
        except FileNotFoundError:
            found = []
        except OSError as error:
            self._trouble.begin(what, error)
        finally:
            if not found:
                self._arm()
        if found:
            self._start(found)

    def _start(self, found: list[JournaledQueue]) -> None:
        thread = threading.Thread(target=self._take_in, args=(found,), name="kestrelpy-inbox", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had, or the interpreter is shutting down
            self._arm()

    def _take_in(self, found: list[JournaledQueue]) -> None:
        try:
            _look_for(found)
        finally:
            self._arm()


def _look_for(found: list[JournaledQueue]) -> None:
    """By itself: at the jump backwards of this loop CPython 3.13 would not see a "finally"."""
    while found:
        inflow = found.pop()._inflow
        assert inflow is not None  # who is in a watch has one
        inflow.look()


def _forget_watches() -> None:
    """In a forked child: the timers were the parent's."""
    Watch._guard = threading.Lock()
    Watch._shared = weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watches)
