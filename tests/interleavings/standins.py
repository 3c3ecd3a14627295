"""What stands in for ``threading`` and ``time`` while a run is scheduled, and the order of locks, which is checked.

The library makes every lock, condition, event and thread by the name ``threading`` in the module at hand. So that name
is what is replaced, in all of its modules and in the one that has ``Future``; the library knows nothing of it and pays
nothing for it. The few locks that were made when it was imported are replaced one by one.

``LEVELS`` is the order of docs/locking.md: a lock is taken only while all that are held have a lower level. A lock
that is not in the table is an error: it has to be documented first.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import re
import sys
import threading as real_threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import _base as futures
from contextlib import ExitStack
from types import CodeType
from typing import Any
from unittest.mock import patch

import kestrelpy._disk.memory
import kestrelpy._reading.detached_source
import kestrelpy.blocking
import kestrelpy.inbox.host
import kestrelpy.inbox.watcher
import kestrelpy.inspection.scan
from kestrelpy import _process, clock
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._reading import dispatch
from kestrelpy._waiting import deferred, put_future
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy._writing.put_path import PutPath
from tests.interleavings.scheduler import Scheduler, Stopped, Task

START_MS = 1_700_000_000_000
LEAF = 9
SLEEPER = "a waiter's sleep"
LEVELS = {
    "D (DiskRoom.looking)": 0,
    "O (ReaderRegistry._opening)": 0,
    "B (Burial.moving)": 1,
    "C (Checkpointer.lock)": 2,
    "G (readers.lock)": 3,
    "I (InboxHost._lock)": 4,
    "Q (LocalSource.lock)": 5,
    "R (Backlog.lock)": 6,
    "S (OpenJournal.syncing)": 6,
    "M (SimpleBlockingQueue._lock)": 6,
    "the watches (InboxWatcher._guard)": 7,
    "N (ReaderRegistry._limiting)": 8,
    "J (ReaderRegistry._listing)": 8,
    "T (GroupCommit._lock)": 8,
    "L (DetachedSource._looking)": 8,
    "the timers (_Timers._lock)": 8,
    "the gets of a face (JournaledBlockingQueue._counting)": LEAF,
    "a future's": LEAF,
    "the disk's": LEAF,
    "the open objects": LEAF,
    "the put futures": LEAF,
    "a test's": LEAF,
}
NOT_WHILE_ASLEEP = {"B", "Q", "R", "S", "T", "L", "M", "the timers"}
"""What nobody may hold while they wait in line. A checkpoint, and the making of a reader, may wait for a sync."""

_NAMED = {
    ("DiskRoom", "looking"): "D (DiskRoom.looking)",
    ("ReaderRegistry", "_opening"): "O (ReaderRegistry._opening)",
    ("ReaderRegistry", "_limiting"): "N (ReaderRegistry._limiting)",
    ("ReaderRegistry", "_listing"): "J (ReaderRegistry._listing)",
    ("Burial", "moving"): "B (Burial.moving)",
    ("Checkpointer", "lock"): "C (Checkpointer.lock)",
    ("InboxHost", "_lock"): "I (InboxHost._lock)",
    ("LocalSource", "lock"): "Q (LocalSource.lock)",
    ("Backlog", "lock"): "R (Backlog.lock)",
    ("OpenJournal", "syncing"): "S (OpenJournal.syncing)",
    ("SimpleBlockingQueue", "_lock"): "M (SimpleBlockingQueue._lock)",
    ("GroupCommit", "_lock"): "T (GroupCommit._lock)",
    ("DetachedSource", "_looking"): "L (DetachedSource._looking)",
    ("_Timers", "_lock"): "the timers (_Timers._lock)",
    ("_Timers", "_wake"): SLEEPER,
    ("JournaledBlockingQueue", "_counting"): "the gets of a face (JournaledBlockingQueue._counting)",
    ("Future", "_condition"): "a future's",
    ("PutFuture", "condition"): "a future's",
    ("ThreadWaiter", "_asleep"): SLEEPER,
}
_kinds: dict[tuple[CodeType, int, type], str] = {}


def kind_of_caller() -> str:
    """Which lock is being made, by the class of its owner and the attribute that the line of source stores it in."""
    frame = sys._getframe(2)
    owner = type(frame.f_locals.get("self"))
    key = (frame.f_code, frame.f_lineno, owner)
    if key not in _kinds:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        names = [(each.__name__, name) for name in re.findall(r"(\w+) = ", line) for each in owner.__mro__]
        found = [_NAMED[name] for name in names if name in _NAMED]
        if not found:
            raise AssertionError(f"a lock that docs/locking.md does not name: {owner.__name__}: {line.strip()}")
        _kinds[key] = found[-1]
    return _kinds[key]


class Mutex:
    """A lock, reentrant or not, that belongs to a scheduler."""

    def __init__(self, scheduler: Scheduler, kind: str, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self.kind = kind
        self.short = kind.partition(" (")[0]
        self.level = LEVELS.get(kind, -1)
        self._reentrant = reentrant
        self._count = 0
        self._owner: Task | None = None
        self._queue: list[Task] = []

    def __str__(self) -> str:
        return self.kind

    __repr__ = __str__

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        me = scheduler.here()
        if me is None:
            assert not self._count or not blocking, f"nobody will release {self} for the thread outside"
            self._count += not self._count
            return True
        scheduler.point()
        if self._reentrant and self._owner is me:
            self._count += 1
            return True
        deadline = scheduler.now + timeout
        while self._count:
            if not blocking:
                return False
            if self.kind is SLEEPER:
                self._check_asleep(me)
            if not scheduler.wait(self._queue, self, None if timeout < 0 else deadline - scheduler.now):
                return False
        self._count, self._owner = 1, me
        if self.level >= 0:
            if blocking:  # who does not wait keeps nobody waiting in a circle
                check_order(scheduler, me, self)
            me.held.append(self)
        return True

    def release(self) -> None:
        if self._count == 0:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if self._count:
            return
        owner, self._owner = self._owner, None
        if owner is not None and self in owner.held:
            owner.held.remove(self)
        for task in list(self._queue):  # all of them: whoever comes first has it, as with the system's locks
            self._scheduler.wake(task)
        if not self._scheduler.stopping:
            self._scheduler.point()

    def locked(self) -> bool:
        return bool(self._count)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *details: object) -> None:
        self.release()

    def _check_asleep(self, me: Task) -> None:
        if any(lock.short in NOT_WHILE_ASLEEP for lock in me.held):
            self._scheduler.fail(f"{me.name} waits in line and holds {me.held}")


def check_order(scheduler: Scheduler, me: Task, new: Any) -> None:
    for lock in me.held:
        scheduler.counts[f"{lock.short} before {new.short}"] += 1
        if lock.level >= new.level:
            scheduler.fail(f"order of locks: {me.name} takes {new} and holds {me.held}")


class Condition:
    """As ``threading.Condition``, over a reentrant lock."""

    def __init__(self, scheduler: Scheduler, lock: Mutex) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._queue: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *details: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, lock = self._scheduler, self._lock
        me = scheduler.here()
        assert me is not None, "only a task can wait"
        count, lock._count, lock._owner = lock._count, 0, None
        me.held.remove(lock)
        for task in list(lock._queue):
            scheduler.wake(task)
        woken = scheduler.wait(self._queue, f"a notice at {lock}", timeout)
        lock.acquire()
        lock._count = count
        return woken

    def notify(self, count: int = 1) -> None:
        for task in self._queue[:count]:
            self._scheduler.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._queue))


class Event:
    """As ``threading.Event``."""

    def __init__(self, scheduler: Scheduler, kind: str = "an event") -> None:
        self._scheduler = scheduler
        self._kind = kind
        self._is_set = False
        self._queue: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._scheduler.point()
        self._is_set = True
        for task in list(self._queue):
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._scheduler.point()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.point()
        return self._is_set or self._scheduler.wait(self._queue, self._kind, timeout) or self._is_set


class Thread:
    """As ``threading.Thread``, as far as the library uses it."""

    def __init__(self, scheduler: Scheduler, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._scheduler = scheduler
        self._target = target
        self._name = name
        self._daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._scheduler.start(self._name, self._run, daemon=self._daemon)

    def is_alive(self) -> bool:
        return self._task is not None and self._task.state != "ended"

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # what the death of a thread raises is nobody else's affair
            self._target()


class Threading:
    """The module ``threading``, by another hand."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Mutex:  # noqa: N802 - the name that it stands in for
        return Mutex(self._scheduler, kind_of_caller())

    def RLock(self) -> Mutex:  # noqa: N802
        return Mutex(self._scheduler, kind_of_caller(), reentrant=True)

    def Condition(self) -> Condition:  # noqa: N802
        return Condition(self._scheduler, Mutex(self._scheduler, kind_of_caller(), reentrant=True))

    def Event(self) -> Event:  # noqa: N802
        return Event(self._scheduler, kind_of_caller())

    def Thread(self, *, target: Callable[[], object], name: str, daemon: bool) -> Thread:  # noqa: N802
        return Thread(self._scheduler, target, name, daemon)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_threading, name)


class RawThreads:
    """The module ``_thread``, as far as ``_deferred`` uses it: what a finaliser has left is done by a task."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start_new_thread(self, work: Callable[[], object], arguments: tuple[()]) -> None:
        if self._scheduler.here() is None:  # the run is over
            work()
        else:
            self._scheduler.start("what was deferred", work)


class VirtualTime:
    """The module ``time``, on the scheduler's clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now

    def time_ns(self) -> int:
        return START_MS * 1_000_000 + round(self._scheduler.now * 1e9)


_places = [
    module
    for name, module in sorted(sys.modules.items())
    if name.partition(".")[0] == "kestrelpy" and getattr(module, "threading", None) is real_threading
]


def _noting_guard(scheduler: Scheduler) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """``QueueFiles.guard``, whose lock is a file's, as a lock with its place in the order."""
    real = QueueFiles.guard

    @contextlib.contextmanager
    def guard(self: QueueFiles, *, wait: bool = True) -> Iterator[None]:
        with real(self, wait=wait):
            me = scheduler.here()
            if me is None:
                yield
                return
            noted = Mutex(scheduler, "G (readers.lock)")
            check_order(scheduler, me, noted)
            me.held.append(noted)
            try:
                yield
            finally:
                me.held.remove(noted)

    return guard


def _noting_lead(scheduler: Scheduler) -> Callable[..., None]:
    """``GroupCommit._lead``: the lead is a lock in all but name, as who is called back by a leader may wait for it."""
    real = GroupCommit._lead

    def lead(self: GroupCommit, leader: object, *arguments: Any, **options: Any) -> None:
        me = scheduler.here()
        if me is None:
            real(self, leader, *arguments, **options)
            return
        me.leads.append((self, leader))
        try:
            real(self, leader, *arguments, **options)
        finally:
            me.leads.remove((self, leader))

    return lead


@contextlib.contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """The library under ``scheduler``, with clocks of its own and nothing alive from before."""
    with ExitStack() as patches:
        stand_in, time = Threading(scheduler), VirtualTime(scheduler)
        disk_guard = Mutex(scheduler, "the disk's", reentrant=True)
        for module in (*_places, futures):
            patches.enter_context(patch.object(module, "threading", stand_in))
        for owner, name, value in (
            (kestrelpy._disk.memory, "_guard", disk_guard),
            (kestrelpy._disk.memory, "_released", Condition(scheduler, disk_guard)),
            (kestrelpy.inbox.watcher.InboxWatcher, "_guard", Mutex(scheduler, "the watches (InboxWatcher._guard)")),
            (kestrelpy.inbox.watcher.InboxWatcher, "_shared", weakref.WeakValueDictionary()),
            (_process, "_guard", Mutex(scheduler, "the open objects")),
            (put_future, "_making", Mutex(scheduler, "the put futures", reentrant=True)),
            (_process, "_live", weakref.WeakKeyDictionary()),
            (_process, "_is_ending", False),
            (_process, "warn_unclosed", lambda thing: None),  # a scene may end with an open queue
            (_process, "_knows_pools", True),  # and registers nothing, once, in the midst of a run
            (deferred, "_thread", RawThreads(scheduler)),
            (deferred, "_left", deque()),
            (deferred, "_working", False),
            (dispatch, "_turns", dispatch._Turns()),  # made anew for a thread, which plays many tasks in its life
            (PutPath, "_future_class", put_future.PutFuture),  # as if looked up before
            (clock, "time", time),
            (clock.SystemClock, "monotonic", staticmethod(time.monotonic)),
            (clock.SystemClock, "time_ns", staticmethod(time.time_ns)),
            (QueueFiles, "guard", _noting_guard(scheduler)),
            (GroupCommit, "_lead", _noting_lead(scheduler)),
            (
                os,
                "urandom",
                random.Random(START_MS).randbytes,
            ),  # markers and ids: what a crash leaves is by the seed too
        ):
            patches.enter_context(patch.object(owner, name, value))
        timers = clock._Timers("kestrelpy-maintenance")
        patches.enter_context(patch.object(clock, "_timers", timers))
        patches.enter_context(patch.object(clock, "_syncs", clock._Timers("kestrelpy-sync", timers)))
        yield


__all__ = ["START_MS", "Event", "Mutex", "Stopped", "installed"]
