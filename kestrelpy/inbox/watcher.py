"""Looks at the inbox of a folder at intervals, once per process, for all queues that this process has open there.

A look costs one system call where there is no inbox, and one listing where there is one. The batches that a look finds
are ingested on a separate thread: an ingest may take long, and syncs of other queues must not wait.

NOTE ON LOCKING: ``InboxWatcher._guard`` guards the table of watchers and their members; only the timers' lock comes
after it.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import Disk
from kestrelpy._journal.file_names import publishing_queues
from kestrelpy._process import reset_after_fork
from kestrelpy.clock import Clock, SystemClock, Timer
from kestrelpy.inbox.parts import open_inbox

if TYPE_CHECKING:
    from collections.abc import Callable


class Watched(Protocol):
    """The inbox of a queue that is open here: an ``InboxHost``."""

    name: str
    path: str
    interval: float | None
    """Seconds between the looks that this queue asks for; ``None``: none."""
    watcher: InboxWatcher | None

    @property
    def is_open(self) -> bool:
        """True if the queue can be used."""

    def look(self) -> None:
        """Ingest the published batches. An error is logged."""

    def do_later(self, what: Callable[[], object]) -> None:
        """Leave ``what`` to the next put."""


class InboxWatcher:
    """Looks at the inbox of one folder for all queues that this process has open there."""

    _guard = threading.Lock()
    # One table for the process. A watcher lives as long as one of its queues, or its timer.
    _shared: ClassVar[weakref.WeakValueDictionary[tuple[object, ...], InboxWatcher]] = weakref.WeakValueDictionary()

    def __init__(self, key: tuple[object, ...], path: str, disk: Disk | None, clock: Clock) -> None:
        self._key = key
        self._path = path
        self._disk = disk
        self._clock = clock
        self._members: weakref.WeakValueDictionary[str, Watched] = weakref.WeakValueDictionary()
        self._timer: Timer | None = None  # guarded by self._guard, as the next one
        self._due = 0.0  # the time of the next look
        self._trouble = _logging.Trouble()

    @classmethod
    def join(cls, queue: Watched, disk: Disk | None, clock: Clock) -> None:
        """Look for ``queue``, too, every ``inbox_interval`` seconds of it, as long as it is open."""
        path = queue.path
        key = (path, id(disk), None if type(clock) is SystemClock else id(clock))
        with cls._guard:
            watch = cls._shared.get(key)
            starts = watch is None
            if watch is None:
                watch = cls._shared[key] = InboxWatcher(key, path, disk, clock)
            watch._members[queue.name] = queue
        queue.watcher = watch
        if starts or watch._is_late():
            watch._arm()

    def leave(self, queue: Watched) -> None:
        """Stop looking for ``queue``, which is being closed. May be repeated."""
        with self._guard:
            if self._members.get(queue.name) is queue:
                del self._members[queue.name]
            self._give_up_locked()

    def _give_up_locked(self) -> bool:
        """Stop the timer and return True if there is no queue left to look for."""
        if self._members:
            return False
        if self._shared.get(self._key) is self:
            del self._shared[self._key]
        if self._timer is not None:
            self._timer.cancel()
        return True

    def _arm(self) -> None:
        """Schedule the next look, if there is a queue to look for. If no thread can be started for it, the next put of
        each queue tries again.
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
                queue.do_later(self._arm)

    def _seconds(self) -> float:
        """The shortest interval that any of the queues asks for."""
        return min((queue.interval or math.inf for queue in list(self._members.values())), default=math.inf)

    def _is_late(self) -> bool:
        """True if the next look is scheduled later than a queue that has joined since asks for.

        A look that is under way schedules the next one itself, so then this is False.
        """
        with self._guard:
            return self._timer is not None and self._due > self._clock.monotonic() + self._seconds()

    def _lost(self, _cause: BaseException) -> None:
        """The maintenance thread died: schedule the next look on another one."""
        self._arm()

    def _look(self) -> None:
        """On the maintenance thread: find the queues for which something is published."""
        with self._guard:
            if self._timer is not None:
                self._timer.cancel()  # the timer of this look, or one set meanwhile; this look sets the next one
                self._timer = None
        found: list[Watched] = []
        what = f"looking at the inbox of {self._path}"
        try:
            folder = open_inbox(self._path, self._disk, create=False)
            try:
                names = publishing_queues(folder.names())
            finally:
                folder.close()
            self._trouble.end(what)
            queues = [self._members.get(name) for name in names]
            found = [queue for queue in queues if queue is not None and queue.is_open]
        except FileNotFoundError:
            found = []
        except OSError as error:
            self._trouble.begin(what, error)
        finally:
            if not found:
                self._arm()
        if found:
            self._start(found)

    def _start(self, found: list[Watched]) -> None:
        thread = threading.Thread(target=self._take_in, args=(found,), name="kestrelpy-inbox", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started, or the interpreter is shutting down
            self._arm()

    def _take_in(self, found: list[Watched]) -> None:
        try:
            _look_for(found)
        finally:
            self._arm()


def _look_for(found: list[Watched]) -> None:
    """A separate function: docs/interrupts.md, rule 3."""
    while found:
        found.pop().look()


def _forget_watches() -> None:
    """In a forked child: forget the watchers, whose timers are the parent's."""
    InboxWatcher._guard = threading.Lock()
    InboxWatcher._shared = weakref.WeakValueDictionary()


reset_after_fork(_forget_watches)
