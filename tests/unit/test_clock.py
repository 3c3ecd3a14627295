"""The clocks: the one that stands still, and the machine's with its one maintenance thread."""

from __future__ import annotations

import doctest
import logging
import math
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kestrelpy.clock
import kestrelpy.testing.clock
from kestrelpy import _logging
from kestrelpy._logging import Trouble
from kestrelpy._waiting import deferred
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.testing import ManualClock
from tests.support.patience import until

PATIENCE = 30.0
ROOT = Path(kestrelpy.clock.__file__).parent.parent


# -- the clock that stands still -------------------------------------------------------------------------------------


def test_the_example_in_the_documentation_runs() -> None:
    outcome = doctest.testmod(kestrelpy.testing.clock)
    assert (outcome.attempted, outcome.failed) == (5, 0)


def test_it_stands_still() -> None:
    clock: Clock = ManualClock(now_ms=5)
    assert [clock.time_ns(), clock.time_ns()] == [5_000_000, 5_000_000]
    assert [clock.monotonic(), clock.monotonic()] == [0.0, 0.0]


def test_it_goes_on_by_what_it_is_told() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    clock.advance(0)
    assert (clock.time_ns(), clock.monotonic()) == (1_500_000_000, 1.5)


@pytest.mark.parametrize("seconds", [-0.001, -1, math.inf, math.nan])
def test_it_does_not_go_back(seconds: float) -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="seconds"):
        clock.advance(seconds)
    assert clock.monotonic() == 0.0


def test_timers_run_in_order_each_at_its_moment() -> None:
    clock = ManualClock()
    found: list[tuple[str, float]] = []
    for name, seconds in (("c", 3), ("a", 1), ("b", 2), ("a too", 1), ("never", 9)):

        def note(name: str = name) -> None:
            found.append((name, clock.monotonic()))

        clock.call_later(seconds, note)
    clock.advance(8)
    assert found == [("a", 1.0), ("a too", 1.0), ("b", 2.0), ("c", 3.0)]
    assert (clock.monotonic(), clock.timer_count) == (8.0, 1)


def test_a_timer_is_due_when_its_moment_is_reached() -> None:
    clock = ManualClock()
    found: list[int] = []
    clock.call_later(1, lambda: found.append(1))
    clock.advance(0.999_999_999)
    assert found == []
    clock.advance(0.000_000_001)
    assert found == [1]


def test_many_small_steps_reach_a_deadline_exactly() -> None:
    clock = ManualClock()
    clock.advance(0.1)
    found: list[int] = []
    clock.call_later(0.7, lambda: found.append(1))
    for _ in range(6):
        clock.advance(0.1)
    assert found == []
    clock.advance(0.1)  # 0.1 * 8 in floats would be a little too early, or too late
    assert found == [1]


@pytest.mark.parametrize("seconds", [0, -5])
def test_what_is_due_at_once_waits_for_the_next_advance(seconds: float) -> None:
    clock = ManualClock()
    found: list[float] = []
    clock.call_later(seconds, lambda: found.append(clock.monotonic()))
    assert found == []
    clock.advance(0)
    assert found == [0.0]


def test_a_timer_at_infinity_never_runs() -> None:
    clock = ManualClock()
    clock.call_later(math.inf, pytest.fail)
    clock.advance(1e6)
    assert clock.timer_count == 1


def test_a_cancelled_timer_does_not_run() -> None:
    clock = ManualClock()
    timers = [clock.call_later(seconds, pytest.fail) for seconds in (1, 2)]
    for timer in timers:
        timer.cancel()
        timer.cancel()
    assert clock.timer_count == 0
    clock.advance(5)


def test_a_timer_may_cancel_another_that_is_due() -> None:
    clock = ManualClock()
    clock.call_later(1, lambda: other.cancel())
    other = clock.call_later(1, pytest.fail)
    clock.advance(1)


def test_a_timer_set_by_a_timer() -> None:
    clock = ManualClock()
    found: list[float] = []

    def again() -> None:
        found.append(clock.monotonic())
        clock.call_later(2, again)

    clock.call_later(2, again)
    clock.advance(7)
    assert found == [2.0, 4.0, 6.0]


def test_a_timer_that_raises_stops_the_time() -> None:
    clock = ManualClock()
    found: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    clock.call_later(1, fail)
    clock.call_later(2, lambda: found.append(2))
    with pytest.raises(ZeroDivisionError):
        clock.advance(3)
    assert clock.monotonic() == 1.0
    clock.advance(1)
    assert found == [2]


def test_callbacks_run_with_no_lock_held() -> None:
    clock = ManualClock()
    done = threading.Event()

    def call_later_and_say_so() -> None:
        clock.call_later(1, int)
        done.set()

    def from_another_thread() -> None:
        threading.Thread(target=call_later_and_say_so).start()
        assert done.wait(PATIENCE)

    clock.call_later(1, from_another_thread)
    clock.advance(1)
    assert clock.timer_count == 1


def test_a_jump_moves_the_wall_clock_only() -> None:
    clock = ManualClock(now_ms=10_000)
    clock.call_later(1, pytest.fail)
    clock.jump(3600)
    assert (clock.time_ns(), clock.monotonic()) == (3_610_000_000_000, 0.0)
    clock.jump(-3605)
    assert clock.time_ns() == 5_000_000_000


# -- the machine's clock ---------------------------------------------------------------------------------------------


class Timers:
    """The maintenance thread of a process of its own: this one's is shared by every test."""

    def __init__(self) -> None:
        self.timers = kestrelpy.clock._Timers("kestrelpy-test")
        self.ran: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call_later(self, seconds: float, what: Any, **options: Any) -> kestrelpy.clock.Timer:
        return self.timers.add(seconds, lambda: self.ran.put(what), options.get("on_lost"))

    def next(self) -> Any:
        return self.ran.get(timeout=PATIENCE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """None of them runs before the end of the block, however long that takes."""
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            leave.wait(PATIENCE)

        self.timers.add(0, hold, None)
        assert entered.wait(PATIENCE)
        try:
            yield
        finally:
            leave.set()

    def kill(self) -> threading.Thread:
        """Strike the thread itself, between two calls, or after those that are due. Returns the thread."""
        thread = self.thread
        self.timers._pop_due_locked = _die  # type: ignore[method-assign]
        self.timers._ring()
        return thread

    @property
    def thread(self) -> threading.Thread:
        assert self.timers._thread is not None
        return self.timers._thread

    def revive(self) -> None:
        del self.timers._pop_due_locked


@pytest.fixture
def timers() -> Iterator[Timers]:
    made = Timers()
    yield made
    if made.timers._thread is not None:
        ended = threading.Event()
        hook, threading.excepthook = threading.excepthook, lambda _: ended.set()
        try:
            made.kill().join(PATIENCE)
        finally:
            threading.excepthook = hook
        assert ended.is_set()


def _die(now: float) -> list[kestrelpy.clock.Timer]:
    raise _Died


class _Died(BaseException):
    """Ends a maintenance thread."""


def test_who_patches_the_time_of_a_test_does_not_stop_the_threads() -> None:
    """As users' tests do, and ``freezegun``: a thread that slept by such a time would wake hours later, for all."""
    called = threading.Event()
    with patch.object(time, "monotonic", lambda: 100.0):
        SystemClock().call_later(0.01, called.set)
        assert called.wait(PATIENCE)


def test_the_system_clock_tells_the_time() -> None:
    clock: Clock = SystemClock()
    before = time.time_ns(), time.monotonic()
    now = clock.time_ns(), clock.monotonic()
    after = time.time_ns(), time.monotonic()
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]


def test_the_system_clock_calls_later_on_its_own_thread() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    start = time.monotonic()
    SystemClock().call_later(0.01, lambda: names.put(threading.current_thread().name))
    assert names.get(timeout=PATIENCE) == "kestrelpy-maintenance"
    assert time.monotonic() >= start + 0.01


def test_no_thread_before_the_first_timer(timers: Timers) -> None:
    assert timers.timers._thread is None
    timers.call_later(0, "x")
    assert timers.next() == "x"
    assert timers.timers._thread is not None
    assert timers.timers._thread.daemon


def test_they_run_by_deadline(timers: Timers) -> None:
    with timers.held(), patch.object(timers.timers, "_monotonic", return_value=time.monotonic()):
        for seconds in (0.03, 0.01, 0.02):
            timers.call_later(seconds, seconds)
    assert [timers.next() for _ in range(3)] == [0.01, 0.02, 0.03]


def test_an_earlier_deadline_wakes_the_thread(timers: Timers) -> None:
    timers.call_later(1_000_000, "late")
    timers.call_later(math.inf, "never")
    timers.call_later(0.01, "soon")
    assert timers.next() == "soon"


def test_a_cancelled_one_does_not_run(timers: Timers) -> None:
    with timers.held():
        timers.call_later(0.01, "cancelled").cancel()
    timers.call_later(0.02, "runs")
    assert timers.next() == "runs"


def test_one_that_fails_is_logged_and_does_not_stop_the_others(
    timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    timers.timers.add(0, lambda: 1 / 0, None)
    timers.call_later(0.01, "runs")
    assert timers.next() == "runs"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


class _BrokenHandler(logging.Handler):
    """A user's, whose log server is gone."""

    def emit(self, record: logging.LogRecord) -> None:
        raise (OSError if record.levelno < logging.ERROR else SystemExit)("no log today")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler = _BrokenHandler()
    logging.getLogger("kestrelpy").addHandler(handler)
    yield
    logging.getLogger("kestrelpy").removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_one_that_fails_does_not_stop_the_others_where_it_cannot_be_logged(timers: Timers) -> None:
    timers.timers.add(0, lambda: 1 / 0, None)
    timers.call_later(0.01, "runs")
    assert timers.next() == "runs"


@pytest.mark.usefixtures("broken_log")
def test_what_a_finaliser_leaves_is_done_though_it_cannot_be_logged_that_something_failed() -> None:
    done: list[int] = []
    deferred.leave(lambda: 1 // 0)
    deferred.leave(lambda: done.append(1))
    until(lambda: done and not deferred._working)


@pytest.mark.usefixtures("broken_log")
def test_what_is_only_said_does_not_fail_what_is_done() -> None:
    _logging.warning("the disk is slow today")
    Trouble().begin("saving", OSError("no room"))


def test_one_that_ran_is_let_go(timers: Timers) -> None:
    timer = timers.call_later(0, "x")
    assert timers.next() == "x"
    until(lambda: timer.callback is kestrelpy.clock._nothing)
    assert timer.cancelled


def test_when_the_thread_dies_those_who_count_on_it_are_told(timers: Timers) -> None:
    """Rule R30. The next timer starts another thread."""
    lost: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        timers.call_later(1_000, "never", on_lost=lost.put)
        timers.call_later(1_000, "not told, it was cancelled", on_lost=pytest.fail).cancel()
        timers.call_later(1_000, "nobody to be told")
        timers.call_later(1_000, "one that fails", on_lost=lambda _: sys.exit(1))
        timers.call_later(1_000, "is no reason not to tell the others", on_lost=lost.put)
        struck = timers.kill()
        assert [type(lost.get(timeout=PATIENCE)) for _ in range(2)] == [_Died, _Died]
        struck.join(PATIENCE)  # it raises after it has told them
    finally:
        threading.excepthook = hook
    timers.revive()
    timers.call_later(0, "again")
    assert timers.next() == "again"


def test_what_was_due_when_the_thread_was_struck_is_told_too(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    hold = threading.Event()

    def strike(_timer: kestrelpy.clock.Timer) -> None:
        assert hold.wait(PATIENCE)
        raise _Died

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(kestrelpy.clock, "_run_timer", strike)
    timers.call_later(0, "struck")
    timers.call_later(0, "due together", on_lost=lost.put)
    thread = timers.thread
    hold.set()
    assert isinstance(lost.get(timeout=PATIENCE), _Died)
    thread.join(PATIENCE)  # it raises after it has told them


def test_a_thread_that_is_gone_without_a_word_is_replaced(timers: Timers) -> None:
    timers.timers._thread = gone = threading.Thread(target=int)
    gone.start()
    gone.join()
    timers.call_later(0, "runs")
    assert timers.next() == "runs"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_thread_outlives_whatever_a_callback_raises(timers: Timers, error: type[BaseException]) -> None:
    """C17: a hook that calls ``sys.exit()`` must not fail every queue of the process."""

    def fail() -> None:
        raise error

    timers.call_later(1_000, "not lost", on_lost=pytest.fail)
    timers.timers.add(0, fail, lambda error: pytest.fail(str(error)))
    timers.call_later(0.01, "runs")
    assert timers.next() == "runs"


def test_a_thread_that_cannot_be_started_is_told_of_and_started_by_the_next_call(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: the timer is not left in a heap that nobody looks at."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            timers.call_later(0, "not added")
    timers.call_later(0.01, "runs")
    assert timers.next() == "runs"
    assert timers.ran.empty()


def test_syncs_have_a_thread_of_their_own() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    hold = threading.Event()
    SystemClock().call_later(0, lambda: hold.wait(PATIENCE))
    try:
        later = kestrelpy.clock.sync_later
        later(SystemClock(), 0, lambda: names.put(threading.current_thread().name), lambda _: None)
        assert names.get(timeout=PATIENCE) == "kestrelpy-sync"
    finally:
        hold.set()
    clock = ManualClock()  # one that has no such thread
    later(clock, 1, lambda: names.put("by advance()"), lambda _: None)
    clock.advance(1)
    assert names.get(timeout=0) == "by advance()"


def test_cancelled_timers_do_not_stay_until_their_deadline(timers: Timers) -> None:
    """C28, H8: whether they are cancelled one by one or, with nobody who adds any, all at once."""
    live = timers.call_later(1_000, "live")
    for _ in range(1_000):
        timers.call_later(2_000, "served in time").cancel()
    assert len(timers.timers._heap) < 250
    many = [timers.call_later(2_000, "served in time") for _ in range(1_000)]
    for timer in many:
        timer.cancel()
    until(lambda: len(timers.timers._heap) < 250)
    timers.call_later(0.01, "runs")
    assert timers.next() == "runs"
    assert live in [timer for _, _, timer in timers.timers._heap.entries]


def test_a_timer_may_be_cancelled_with_the_lock_held(timers: Timers) -> None:
    """By a finaliser, say, which runs anywhere."""
    many = [timers.call_later(2_000, "served in time") for _ in range(300)]
    with timers.timers._lock:
        for timer in many:
            timer.cancel()
    until(lambda: len(timers.timers._heap) < 250)


def test_the_clock_that_stands_still_forgets_cancelled_timers_too() -> None:
    clock = ManualClock()
    for _ in range(1_000):
        clock.call_later(1_000, pytest.fail).cancel()
    assert len(clock._heap) < 250
    many = [clock.call_later(1_000, pytest.fail) for _ in range(1_000)]
    for timer in many:
        timer.cancel()
    clock.advance(1)
    assert len(clock._heap) == clock.timer_count == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_has_timers_of_its_own() -> None:
    source = """
        import os, queue, sys, threading
        from kestrelpy.clock import SystemClock, _timers
        ran = queue.SimpleQueue()
        SystemClock().call_later(0, lambda: ran.put("parent"))
        assert ran.get(timeout=30) == "parent"
        SystemClock().call_later(1000, lambda: ran.put("never"))
        child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert _timers._thread is None and not _timers._heap
        SystemClock().call_later(0, lambda: ran.put("child"))
        os._exit(0 if ran.get(timeout=30) == "child" else 1)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0
