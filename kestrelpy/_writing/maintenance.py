"""``Maintenance``: saves the checkpoints of a queue's readers and retires segments, in the background.

NOTE ON LOCKING: nothing here takes a lock. Only ``arm`` may be called with a lock held.
"""

from __future__ import annotations

import weakref

from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.disk_room import DiskRoom
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.errors import QueueClosed, QueueLocked


class Maintenance:
    """The background work of one queue: every ``interval`` seconds, as long as something changes."""

    def __init__(
        self,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        interval: float,
        disk_room: DiskRoom,
    ) -> None:
        self._disk_room = disk_room
        self._status = status
        self._syncer = syncer
        self._source = source
        self._registry = registry
        self._room = room
        self._interval = interval
        self._clock = source.clock
        self._is_armed = False
        self._is_due = False  # the opening itself has asked for a round

    def begin(self) -> None:
        """The queue may be used from here on."""
        if self._is_due:
            self.arm()
        if self._registry.may_limit:
            self.watch_limits()

    def moved(self) -> None:
        """A reader has moved: schedule a checkpoint, and let the first producer in line look for room again."""
        if self._room:
            self._room.ring_first()
        self.arm()

    def reader_closed(self, reader: Reader) -> None:
        """A reader that was open here has closed."""
        try:
            self._registry.closed(reader)
        except OSError:
            # Once the queue has ended, its folder is closed, and the thread that closes it releases the reader.
            if self._status.error is None:
                raise
        finally:
            self._room.ring_first()  # the reader's limits count by its file from here on

    def watch_limits(self) -> None:
        """Every ``interval`` seconds, look for readers that another process made or dropped, and pass over producers
        in line that do not come. Called for a queue with limits. The timer holds a weak reference only, so it does not
        keep alive a queue that nobody has.
        """
        mine = weakref.ref(self)

        def look(_lost: object = None) -> None:
            maintenance = mine()
            if maintenance is not None:
                maintenance._look()

        try:
            self._clock.call_later(self._interval, look, on_lost=look)
        except RuntimeError:  # no thread can be started
            self._source.leave(self.watch_limits)

    def _look(self) -> None:
        if self._status.error is None:
            if self._registry.refresh_limits():
                self._room.ring_first()
            self._room.pass_over()
            self.watch_limits()

    def arm(self) -> None:
        """Schedule ``_maintain`` to run after ``interval`` seconds. If no thread can be started for it, the next put or
        commit tries again. May be called with the queue's lock held.
        """
        if self._is_armed:
            return
        self._is_armed = True
        try:
            call_later = self._clock.call_later
            timer = call_later(self._interval, self._maintain, on_lost=self._syncer.lose_thread)
            self._registry.timer = timer
            if self._status.error is not None:  # look again: a close may have cancelled the timer before this one
                timer.cancel()
                self._is_armed, self._is_due = False, True  # or it is not open yet
        except RuntimeError:
            self._is_armed = False
            self._source.leave(self.arm)
        except BaseException:
            self._is_armed = False
            raise

    def _maintain(self) -> None:
        """Checkpoint the readers that moved, then retire segments that no reader needs. On the maintenance thread."""
        self._is_armed = False
        if self._status.error is not None:
            return
        again, trouble = False, self._registry.trouble
        for reader in list(self._registry.open.values()):
            saver = checkpointer_of(reader)
            saver.backlog.may_skip_notify = False  # from here on, the reader's next commit arms the next round
            if saver.is_unsaved:
                what = f"saving the position of {reader.full_name}"
                try:
                    reader.checkpoint(durable=self._status.sync_seconds is not None)
                    trouble.end(what)
                except (OSError, QueueClosed) as error:
                    if not isinstance(saver.backlog.broken, QueueClosed):  # else it was closed meanwhile
                        again = True
                        trouble.begin(what, error)
        what = f"retiring segments of {self._source.name}"
        try:
            with self._disk_room.looking:
                self._registry.retire(self._source, wait=False)
            trouble.end(what)
        except QueueLocked:
            again = True
        except (OSError, QueueClosed) as error:
            again = True
            trouble.begin(what, error)
        if again or self._others_wait():
            self.moved()

    def _others_wait(self) -> bool:
        """True if readers in other processes hold a segment back, or if that cannot be seen now."""
        trouble, what = self._registry.trouble, f"looking for readers of {self._source.name}"
        try:
            waits = self._registry.waits_for_others(self._source)
            trouble.end(what)
        except (OSError, QueueClosed) as error:
            trouble.begin(what, error)
            return True
        return waits
