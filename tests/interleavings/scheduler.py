"""A scheduler for real threads of which exactly one runs at a time, so that a seed decides what happens.

Rules:
1. A task is a thread that runs while it has the baton. It passes it on at scheduling points only: where a lock is
   taken or released, where somebody waits, is woken, starts or ends, at operations of the disk, and if wanted
   between any two lines (or opcodes) of the library.
2. Who runs next is chosen by a strategy, out of the seed. ``RandomWalk`` picks anybody; ``Priorities`` follows
   Burckhardt and others, "A randomized scheduler with probabilistic guarantees of finding bugs" (ASPLOS 2010):
   random priorities, and d places at which whoever runs becomes the least important.
3. Time is virtual. It passes when nobody can run, or when the seed says that a deadline comes first.
4. Nobody can run and no deadline is left: that is a deadlock, or a wake-up that was lost. Too many points, for the time
   that has passed: nobody gets anywhere. Both end the run with a ``BrokenSchedule`` that says where everybody is.
5. A run that ends early, at a failure or a planned stop, unwinds every task by ``Stopped``, one after the other.
"""

from __future__ import annotations

import random
import sys
import traceback
from _thread import allocate_lock, get_ident, start_new_thread
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ClassVar, Protocol

MAX_POINTS = 100_000
POINTS_A_SECOND = 20_000
"""So many more for each second that has passed, where somebody can run or has a deadline before long: while all wait
for theirs the library goes on looking, some of it twenty times a second."""
MOST_POINTS = 2_000_000
REAL_SECONDS = 60.0
"""After so much real time a task has gone to sleep on something that the scheduler does not know."""
MUCH_TIME = 1000.0
"""Seconds after which a deadline does not come early: it comes if nobody can run."""
MAX_HURRIES = 30
"""So many deadlines come early in one run, and no more: who polls would else keep all others from running."""
MAX_STREAK = 400
"""So many points in a row by one task while others could run: then these come first, as on any real machine."""

READY, WAITING, ENDED = "ready", "waiting", "ended"
_LIBRARY = "/kestrelpy/"
_UNWATCHED = (
    "/kestrelpy/testing/",
    "/_disk/memory.py",
    "/format.py",
    "/file_names.py",
    "errors.py",
    "item.py",
    "config.py",
)


class Stopped(BaseException):
    """The run is over for this task."""


class BrokenSchedule(AssertionError):
    """What went wrong in a run."""


class _Worker:
    """A thread of the system that runs one task after another: they are dear to make."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.gate = allocate_lock()
        self.gate.acquire()
        self.task: Task
        start_new_thread(self._work, ())

    def _work(self) -> None:
        while True:
            self.gate.acquire()
            self.task._run()


class Task:
    """A thread under the scheduler."""

    def __init__(self, scheduler: Scheduler, name: str, work: Callable[[], object], *, daemon: bool, traced: bool):
        self.scheduler = scheduler
        self.name = name
        self.work = work
        self.daemon = daemon
        self.traced = traced
        self.state = READY
        self.waits_for: object = None
        self.queue: list[Task] | None = None  # where it waits
        self.deadline = 0.0
        self.timed_out = False
        self.held: list[Any] = []
        self.leads: list[tuple[Any, object]] = []  # the group commits whose sync it does, each with its ticket
        self.priority = scheduler.strategy.priority()
        self.joiners: list[Task] = []
        self.number = len(scheduler.tasks)
        self.ident = 0
        self.worker = _Worker.idle.pop() if _Worker.idle else _Worker()
        self.worker.task = self

    def join(self) -> None:
        """Wait for its end."""
        while self.state is not ENDED:
            self.scheduler.wait(self.joiners, f"the end of {self.name}", None)

    def _run(self) -> None:
        scheduler = self.scheduler
        self.ident = get_ident()
        before = sys.gettrace()
        try:
            if scheduler.stopping:
                return
            if self.traced and scheduler.gap:
                sys.settrace(scheduler._enter_frame)
            self.work()
        except Stopped:
            pass
        except BaseException as error:
            sys.settrace(before)
            if not scheduler.stopping:
                scheduler.failure = error
                scheduler.stopping = True
        finally:
            sys.settrace(before)
            scheduler._end(self)


class Strategy(Protocol):
    def priority(self) -> float: ...

    def choose(self, ready: list[Task], me: Task | None, point: int) -> Task: ...


class RandomWalk:
    """Anybody who can run, with a leaning to whoever runs already."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._stay = rng.choice((0.0, 0.5, 0.8, 0.95))

    def priority(self) -> float:
        return 0.0

    def choose(self, ready: list[Task], me: Task | None, point: int) -> Task:
        if me is not None and self._random() < self._stay:
            return me
        return ready[int(self._random() * len(ready))]


class Priorities:
    """The most important one that can run; at ``changes`` places whoever runs becomes the least important."""

    def __init__(self, rng: random.Random, *, changes: int, points: int) -> None:
        self._random = rng.random
        self._changes = {int(rng.random() * points) for _ in range(changes)}
        self._lowest = 0.0

    def priority(self) -> float:
        return self._random()

    def choose(self, ready: list[Task], me: Task | None, point: int) -> Task:
        if me is not None and point in self._changes:
            self._lowest -= 1.0
            me.priority = self._lowest
        return max(ready, key=lambda task: task.priority)


class Scheduler:
    """One run: tasks, a baton, a clock.

    ``gap``: how many lines of the library there are between two points on average; 0 for none. ``opcodes``: count
    opcodes instead. ``early``: how likely it is at a point that the next deadline comes now. ``stop_at``: the point
    at which everything stops, as by a crash; ``on_stop`` is called there.
    """

    def __init__(
        self,
        strategy: Strategy,
        rng: random.Random,
        *,
        gap: int = 0,
        opcodes: bool = False,
        early: float = 0.0,
        stop_at: int = 0,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        self.strategy = strategy
        self.gap = gap
        self.opcodes = opcodes
        self.early = early
        self.stop_at = stop_at
        self.on_stop = on_stop
        self.now = 0.0
        self.points = self.switches = self.digest = 0
        self.stopped = False  # as planned
        self.stopping = False
        self.failure: BaseException | None = None
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.counts: Counter[str] = Counter()
        self._random = rng.random
        self._ready: list[Task] = []
        self._timed: list[Task] = []
        self._streak = 0
        self._hurries = MAX_HURRIES
        self._finished = allocate_lock()
        self._finished.acquire()
        self._left = self._next_gap()

    # -- from outside ------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], object]) -> None:
        """Run ``work`` as the first task, and all that it starts. Raises what went wrong.

        It is over when every task has ended but for daemons, which are unwound.
        """
        self.current = first = self.start("main", work, traced=False)
        first.worker.gate.release()
        if not self._finished.acquire(True, REAL_SECONDS):
            raise BrokenSchedule(f"a task sleeps on what is not scheduled\n{self.describe()}")
        if self.failure is not None:
            raise self.failure

    # -- for tasks ---------------------------------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], object], *, daemon: bool = False, traced: bool = True) -> Task:
        """A new task, which runs when it is chosen."""
        task = Task(self, name, work, daemon=daemon, traced=traced)
        self.tasks.append(task)
        self._ready.append(task)
        self.point()
        return task

    def here(self) -> Task | None:
        """The task that runs on this thread; ``None`` on a thread that is no task's."""
        me = self.current
        return me if me is not None and me.ident == get_ident() else None

    def point(self) -> None:
        """Somebody else may run from here on."""
        me = self.here()
        if me is None:
            return
        if self.stopping:
            raise Stopped
        self.points += 1
        if self.points >= self.stop_at > 0:
            self.stopped = True
            if self.on_stop is not None:
                self.on_stop()
            self.stopping = True
            raise Stopped
        if self.points > MAX_POINTS:
            self._check_time_passes()
        if self._timed and self._hurries and self._random() < self.early:
            self._hurries -= 1
            self._pass_time(self.now + MUCH_TIME)
        if len(self._ready) > 1:
            self._give_to(self._choose(me), me)

    def wait(self, queue: list[Task], what: object, seconds: float | None) -> bool:
        """Sleep in ``queue`` until woken, or for so long; true if woken."""
        me = self.here()
        assert me is not None, "only a task can wait"
        if self.stopping:
            raise Stopped
        me.state, me.waits_for, me.queue, me.timed_out = WAITING, what, queue, False
        queue.append(me)
        self._ready.remove(me)
        if seconds is not None:
            me.deadline = self.now + seconds
            self._timed.append(me)
        self.points += 1
        if self.points > MAX_POINTS:
            self._check_time_passes()
        while not self._ready:
            if not self._timed:
                self.fail("a deadlock, or a wake-up that was lost")
            self._pass_time()
        self._give_to(self._choose(None), me)
        return not me.timed_out

    def wake(self, task: Task) -> None:
        """Let a waiting task go on."""
        assert task.queue is not None
        task.queue.remove(task)
        if task in self._timed:
            self._timed.remove(task)
        task.state, task.waits_for, task.queue = READY, None, None
        self._ready.append(task)

    def fail(self, what: str) -> None:
        """End the run: this is what is wrong."""
        if not self.stopping:
            self.failure = BrokenSchedule(f"{what}\n{self.describe()}")
            self.stopping = True
        raise Stopped

    def _check_time_passes(self) -> None:
        soon = [task for task in self._timed if task.deadline <= self.now + MUCH_TIME]
        goes_on = any(not task.daemon for task in (*self._ready, *soon))
        if not goes_on or self.points > min(MAX_POINTS + POINTS_A_SECOND * self.now, MOST_POINTS):
            self.fail("nobody gets anywhere")

    def describe(self) -> str:
        """Where every task is."""
        frames = sys._current_frames()
        lines = [f"after {self.points} points, {self.now:g} s"]
        for task in self.tasks:
            if task.state is ENDED:
                continue
            what = f"waits for {task.waits_for}" if task.state is WAITING else "can run"
            held = ", ".join(str(lock) for lock in task.held)
            lines.append(f"- {task.name} {what}" + (f", holds {held}" if held else ""))
            stack = [
                entry
                for entry in traceback.extract_stack(frames.get(task.ident))
                if "scheduler.py" not in entry.filename
            ]
            lines += [
                f"    {entry.filename.rpartition('/')[2]}:{entry.lineno} {entry.name}: {entry.line}"
                for entry in stack[-7:]
            ]
        return "\n".join(lines)

    # -- the baton ---------------------------------------------------------------------------------------------------

    def _choose(self, me: Task | None) -> Task:
        task = self.strategy.choose(self._ready, me, self.points)
        if task is not me:
            self._streak = 0
            return task
        self._streak += 1
        if self._streak < MAX_STREAK:
            return task
        self._streak = 0
        others = [task for task in self._ready if task is not me]
        return others[int(self._random() * len(others))]

    def _give_to(self, task: Task, me: Task) -> None:
        if task is me:
            return
        self.switches += 1
        self.digest = (self.digest * 1_000_003 + task.number * 65_537 + self.points) & 0xFFFF_FFFF_FFFF
        self.current = task
        task.worker.gate.release()
        me.worker.gate.acquire()
        if self.stopping:
            raise Stopped

    def _pass_time(self, until: float = float("inf")) -> None:
        """The next deadline has come, if it is not later than ``until``."""
        task = min(self._timed, key=lambda task: task.deadline)
        if task.deadline > until:
            return
        self.now = max(self.now, task.deadline)
        self.wake(task)
        task.timed_out = True

    def _end(self, me: Task) -> None:
        """The last thing a task does: pass the baton on for good."""
        if me.queue is not None:  # it was stopped in its sleep
            self.wake(me)
        me.state = ENDED
        self._ready.remove(me)
        if me.held and not self.stopping:
            self.failure = BrokenSchedule(f"{me.name} ended and holds {me.held}")
            self.stopping = True
        for task in list(me.joiners):
            self.wake(task)
        following = self._after(me)
        self.current = following
        _Worker.idle.append(me.worker)
        if following is None:
            self._finished.release()
        else:
            following.worker.gate.release()

    def _after(self, me: Task) -> Task | None:
        left = [task for task in self.tasks if task.state is not ENDED]
        if not self.stopping and all(task.daemon for task in left):
            self.stopping = True
        if not self.stopping:
            while not self._ready and self._timed:
                self._pass_time()
            if self._ready:
                return self._choose(None)
            self.failure = BrokenSchedule(f"a deadlock, or a wake-up that was lost\n{self.describe()}")
            self.stopping = True
        return left[0] if left else None

    # -- between the lines -------------------------------------------------------------------------------------------

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        watched = _watched.get(code)
        if watched is None:
            name = code.co_filename
            watched = _watched[code] = _LIBRARY in name and not any(each in name for each in _UNWATCHED)
        if not watched:
            return None
        if self.opcodes:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._between

    def _between(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" or event == "opcode":
            self._left -= 1
            if self._left <= 0:
                self._left = self._next_gap()
                try:
                    self.point()
                except Stopped:  # not between two lines: the next lock or the like raises it
                    sys.settrace(None)
        return self._between

    def _next_gap(self) -> int:
        return 1 + int(self._random() * 2 * self.gap)


_watched: dict[CodeType, bool] = {}
