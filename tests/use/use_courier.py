"""Threads of shipping that go on when they are told: one at a time, as far as the world says, on a clock of their own.

The real ``Shipper`` runs on a real thread, but that thread has a baton to wait for. It gives the baton back where it
would sleep, and before each request to a store. So a seed decides how long a request is under way and what happens
meanwhile, and the same seed is the same world. ``ShipClock`` is the time of shipping. It goes on when the world's does,
and when somebody waits for a store.

Rules:
1. Whoever resumes a thread waits until it gives the baton back: two never run at the same time.
2. The thread of a queue is resumed where its process holds no lock: by a step of the world, in a callback, or in a call
   that waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest.mock import patch

from kestrelpy._writing.group_commit import Absent, GroupCommit
from kestrelpy.ship import following, gatekeeper, lazy, lease, opened, reading, shipper, standby
from kestrelpy.ship.gatekeeper import Gatekeeper
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.standby_folder import StandbyFolder
from kestrelpy.ship.uploads import PendingUpload
from tests.use.use_model import UseFailure

STUCK_SECONDS = 10.0
"""Of real time: a thread of shipping that does not give the baton back for so long is stuck."""
MOST_TURNS = 5000
"""More turns than that, and whoever waits would wait for ever."""
ASLEEP, REQUEST, ENDED = "asleep", "request", "ended"


class ShipClock:
    """In place of the clocks of the system, in the modules of shipping."""

    seconds: ClassVar[float] = 0.0

    @staticmethod
    def monotonic() -> float:
        return ShipClock.seconds

    elapsed = monotonic


class ShipThread:
    """Stands in for the thread of a ``Shipper``."""

    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool | None = None) -> None:
        del name, daemon
        self.shipper: Shipper = target.__self__  # type: ignore[attr-defined]
        self.disk: Any = getattr(self.shipper.log._directory, "_disk", None)
        self.state = ASLEEP
        self.until = 0.0
        self.bell: Bell | None = None
        self.is_running = self.is_killed = False
        self.died_of: BaseException | None = None
        self.asks: Any = None
        """The store that its request is under way to."""
        self.on_its_way: Callable[[], object] | None = None
        """The request that is under way: it may be carried out, though its process is killed."""
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(target,), daemon=True)

    def _run(self, target: Callable[[], None]) -> None:
        self._go.acquire()
        try:
            if not self.is_killed:
                target()
        except BaseException as error:
            if not self.is_killed:
                self.died_of = error
        self.state = ENDED
        self._back.release()

    def start(self) -> None:
        self._thread.start()
        courier().threads.append(self)

    def is_alive(self) -> bool:
        return self.state != ENDED and self in courier().threads

    def join(self, timeout: float | None = None) -> None:
        courier().wait(lambda: not self.is_alive(), timeout, self)

    @property
    def may_go_on(self) -> bool:
        """Whether there is something for it to do now."""
        rung = self.bell is not None and self.bell.is_rung
        return self.state == REQUEST or (self.state == ASLEEP and (rung or self.until <= ShipClock.seconds))

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread that runs now."""
        return threading.get_ident() == self._thread.ident

    def resume(self) -> None:
        """Let it go on until it gives the baton back."""
        if self.is_running or self.state == ENDED:
            return
        self.is_running = True
        try:
            with courier().alone():
                self._go.release()
                if not self._back.acquire(timeout=STUCK_SECONDS):
                    raise UseFailure(f"the thread that ships {self.shipper.log.queue} waits for a lock")
        finally:
            self.is_running = False
        if self.state == ENDED:
            courier().forget(self)
        if self.died_of is not None:
            raise UseFailure(f"the thread that ships {self.shipper.log.queue} has died of {self.died_of!r}")
        if self.shipper._gatekeeper._has_thread:
            self.shipper._gatekeeper.look()

    def give_back(self, state: str) -> None:
        self.state = state
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise shipper._GivenUp

    def kill(self) -> None:
        """Its process is gone: it does nothing more."""
        self.shipper._gatekeeper.end()
        self.is_killed = True
        for _ in range(5):  # it may look twice whether that is so
            self.resume()


class Bell:
    """In place of a ``ThreadWaiter`` of the module ``shipper``."""

    def __init__(self) -> None:
        self.is_rung = False

    def give(self, value: object) -> None:
        del value
        self.is_rung = True

    def wait(self, timeout: float | None) -> bool:
        thread = courier().running
        if thread is None:
            courier().wait(lambda: self.is_rung, timeout, courier().awaited)
        else:
            thread.until = float("inf") if timeout is None else ShipClock.seconds + timeout
            thread.bell = self
            while not self.is_rung and ShipClock.seconds < thread.until:
                thread.give_back(ASLEEP)
        was_rung, self.is_rung = self.is_rung, False
        return was_rung


class Courier:
    """All threads of shipping of a world. ``meanwhile``: lets others do something while an opening waits."""

    def __init__(self) -> None:
        self.threads: list[ShipThread] = []
        self.keepers: list[Gatekeeper] = []
        self.awaited: ShipThread | None = None
        self.meanwhile: Callable[[], object] = bool
        self.is_stuck: Callable[[ShipThread], bool] = lambda thread: False
        self.alone: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Entered while a thread goes on: nobody else does a step in the middle of that."""

    @property
    def running(self) -> ShipThread | None:
        """The thread that runs now, if it is one of shipping."""
        return next((thread for thread in self.threads if thread.is_mine), None)

    def forget(self, thread: ShipThread) -> None:
        thread._thread.join()
        if thread in self.threads:
            self.threads.remove(thread)

    def advance(self, seconds: float) -> None:
        """Time passes. Those who look at leases and limits are in time."""
        ShipClock.seconds += max(0.0, seconds)
        self.keepers = [keeper for keeper in self.keepers if not keeper._is_over]
        for keeper in self.keepers:
            keeper.look()

    def turn(self, thread: ShipThread, count: int) -> int:
        """Let a thread go on, ``count`` times at most, as long as it has something to do. Returns how often."""
        for at in range(count):
            if thread.is_running or not thread.may_go_on or self.is_stuck(thread):
                return at
            thread.resume()
        return count

    def wait(self, done: Callable[[], bool], seconds: float | None, thread: ShipThread | None) -> bool:
        """Let time pass, and ``thread`` go on, until it is ``done``, or for so many seconds. Returns whether it is."""
        until = float("inf") if seconds is None else ShipClock.seconds + seconds
        for _ in range(MOST_TURNS):
            if done():
                return True
            if thread is not None and self.turn(thread, 1):
                continue
            may_come = thread is not None and thread.state == ASLEEP and not thread.is_running
            due = thread.until if thread is not None and may_come else float("inf")
            if min(due, until) == float("inf"):
                break
            self.advance(min(due, until) - ShipClock.seconds)
            if due > until:
                return done()
        raise UseFailure("a call waits for a store for ever")

    @contextlib.contextmanager
    def waiting_for(self, thread: Any) -> Iterator[None]:
        before, self.awaited = self.awaited, thread
        try:
            yield
        finally:
            self.awaited = before

    def end(self, disk: object = None) -> None:
        """End the threads of a process that is killed, by its disk; all, if no disk is given."""
        for thread in [each for each in self.threads if disk is None or each.disk is disk]:
            thread.kill()
        if disk is None:
            self.keepers.clear()


_COURIER: list[Courier] = []


def courier() -> Courier:
    """Of the world that runs now."""
    return _COURIER[-1]


class Ask:
    """``Absent.ask`` of a queue, which says whom it asks."""

    def __init__(self, ask: Callable[[], None], thread: Any) -> None:
        self._ask = ask
        self.thread = thread

    def __call__(self) -> None:
        self._ask()


class AtOnce:
    """In place of the pool of threads that upload: the thread of shipping does it."""

    @staticmethod
    def begin(work: Callable[[], Any], most: int) -> PendingUpload:
        del most
        pending = PendingUpload(work)
        pending.run()
        return pending


class NoThread:
    """Stands in for a thread whose work is done by steps."""

    ident = None

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


def _follower(folder: StandbyFolder, shipped: ShippedQueue) -> following.Follower:
    return following.Follower(folder, shipped, ShipClock.elapsed)


def _start_keeper(self: Gatekeeper) -> None:
    if self._lease is not None or self._options.when_behind != "go_on":
        self._has_thread = True
        courier().keepers.append(self)


def _pause(seconds: float) -> None:
    courier().advance(seconds)
    courier().meanwhile()


@contextlib.contextmanager
def deterministic_shipping() -> Iterator[Courier]:
    """While this lasts, shipping goes on when the courier lets it."""
    real_ask, real_wait_for = Shipper._ask, GroupCommit._wait_for
    real_flush, real_collect = Shipper.flush, Shipper.collect

    def ask(self: Shipper) -> Ask:
        return Ask(real_ask(self), self._thread)

    def wait_for(self: GroupCommit, absent: Absent, ticket: Any, first_id: int, last_id: int) -> None:
        absent.ask()
        thread = getattr(absent.ask, "thread", None)
        courier().wait(lambda: self.durable_id >= last_id or self._error is not None, absent.patience, thread)
        real_wait_for(self, absent._replace(ask=bool, patience=0), ticket, first_id, last_id)

    def flush(self: Shipper, timeout: float | None) -> int:
        with courier().waiting_for(self._thread):
            return real_flush(self, timeout)

    def collect(self: Shipper, timeout: float | None) -> Any:
        with courier().waiting_for(self._thread):
            return real_collect(self, timeout)

    _COURIER.append(Courier())
    ShipClock.seconds = 0.0
    with contextlib.ExitStack() as patches:
        for module in (shipper, opened, gatekeeper, lease, standby, following):
            patches.enter_context(patch.object(module, "SystemClock", ShipClock))
        patches.enter_context(patch.object(standby, "Follower", _follower))
        for module in (standby, lazy):  # a standby looks, and the rest is fetched, when a step says so
            stand_in = types.SimpleNamespace(**{**vars(threading), "Thread": NoThread})
            patches.enter_context(patch.object(module, "threading", stand_in))
        patches.enter_context(patch.object(shipper, "threading", types.SimpleNamespace(Thread=ShipThread)))
        patches.enter_context(patch.object(shipper, "ThreadWaiter", Bell))
        patches.enter_context(patch.object(shipper, "uploads", types.SimpleNamespace(pool=AtOnce)))
        patches.enter_context(patch.object(Gatekeeper, "start", _start_keeper))
        patches.enter_context(patch.object(opened, "pause", _pause))
        patches.enter_context(patch.object(reading, "PAUSES", (0.0, 0.0, 0.0)))
        patches.enter_context(patch.object(Shipper, "_ask", ask))
        patches.enter_context(patch.object(Shipper, "flush", flush))
        patches.enter_context(patch.object(Shipper, "collect", collect))
        patches.enter_context(patch.object(GroupCommit, "_wait_for", wait_for))
        try:
            yield courier()
        finally:
            courier().end()
            _COURIER.pop()
