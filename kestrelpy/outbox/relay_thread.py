"""``RelayThreads``: the relays of a running outbox, each on a thread of its own.

A relay is as slow as its disk and its ``encode``, and fails when its folder does: no claim and no lease waits for it.

Rules:
1. Batch after batch while there are more. Then it sleeps until somebody wakes, the next job is due, the lease must be
   renewed, or it is time to look for what no hint was given for.
2. Nothing that is raised ends a thread: it goes on after a pause, which grows from failure to failure.
3. A thread ends after the step in progress, and releases the lease. If a stop does not wait for that, ``end`` releases
   it, and the step can change nothing in the database any more. The next start makes new relays.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kestrelpy.outbox._logging import brief, log
from kestrelpy.outbox.writer import pause_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from kestrelpy.outbox.core import OutboxCore, Relaying
    from kestrelpy.outbox.store import JobStore

__all__ = ["RelayThreads"]

LOOK_SECONDS = 0.05
"""Between two looks that find nothing: other commits wake, too, and in busy times there are thousands a second."""
MAX_LOOK_SECONDS = 1.0
"""The same, if something is due and nothing can be moved: it is locked, or waits for its lane."""
LONGEST = 3600.0


class RelayThread:
    """Moves what is due while its outbox runs."""

    def __init__(self, relay: Relaying, clock: Callable[[], float], poll_seconds: float) -> None:
        self.relay = relay
        self._clock = clock
        self._poll_seconds = min(poll_seconds, LONGEST)
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self.ended = threading.Event()
        self._failures = 0  # in a row
        self._in_vain = 0  # looks in a row that found something due, of which nothing could be moved
        self._thread = threading.Thread(target=self._run, name=f"kestrelpy-outbox-relay-{relay.queue}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be a job: look."""
        self._woken.set()

    def begin_stop(self) -> None:
        """End after the step in progress."""
        self._stopping.set()
        self._woken.set()

    def end(self) -> None:
        """Wait for a thread that has ended; let go of one that has not."""
        if self.ended.is_set():
            self._thread.join()
        else:
            self.relay.give_up()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except BaseException as error:
                self._stopping.wait(self._failed(error))
        try:
            self.relay.release()
        finally:
            self.ended.set()

    def _turn(self) -> None:
        """Move a batch, or sleep."""
        self._woken.clear()
        begun = self._clock()
        moved = self.relay.step()
        if self._failures:
            log.info("relay %r works again after %s failures", self.relay.name, self._failures)
        self._failures = 0
        if moved:
            self._in_vain = 0
            return
        self._woken.wait(self._pause())
        rest = begun + LOOK_SECONDS - self._clock()
        if rest > 0:
            self._stopping.wait(min(rest, LOOK_SECONDS))

    def _pause(self) -> float:
        """How long to sleep after a step that has moved nothing, if nobody wakes."""
        idle = self.relay.idle_seconds
        if idle is not None and idle > 0:
            self._in_vain = 0
            return min(idle, self._poll_seconds)
        self._in_vain += 1
        if idle is None and self._in_vain == 1:
            return 0.0
        return min(LOOK_SECONDS * float(1 << min(self._in_vain, 10)), MAX_LOOK_SECONDS, self._poll_seconds)

    def _failed(self, error: BaseException) -> float:
        """How long to wait after an error."""
        if not self._failures and not self._stopping.is_set():
            log.warning("relay %r failed; trying again until it works: %s", self.relay.name, brief(error))
        self._failures += 1
        return pause_after(self._failures)


class RelayThreads:
    """The relays of a running outbox; of ``queues`` only, if these are given. The feeder starts and ends them."""

    def __init__(self, core: OutboxCore, store: JobStore, queues: frozenset[str] | None) -> None:
        self._core = core
        self._store = store
        self._queues = queues
        self._begun = 0  # how many of the outbox's relays were looked at
        self._threads: list[RelayThread] = []

    def start_new(self, poll_seconds: float) -> None:
        """Start those that were added since the last call."""
        while self._begun < len(self._core.relays):
            relay = self._core.relays[self._begun]
            if self._queues is None or relay.queue in self._queues:
                thread = RelayThread(relay.twin(self._store), self._core.time.monotonic, poll_seconds)
                thread.start()
                self._threads.append(thread)
            self._begun += 1

    @property
    def are_running(self) -> bool:
        return not all(thread.ended.is_set() for thread in self._threads)

    def wake(self) -> None:
        """There may be jobs: look."""
        for thread in self._threads:
            thread.wake()

    def begin_stop(self) -> None:
        """Let all of them end after the steps in progress."""
        for thread in self._threads:
            thread.begin_stop()

    def end(self) -> None:
        """After a stop: release the leases of those that have not ended, too."""
        for thread in self._threads:
            thread.end()
