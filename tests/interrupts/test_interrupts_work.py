"""A KeyboardInterrupt at the places of a work queue's calls: afterwards memory is whole, and the journal says the same.

Each call is struck at one place; then the queue is used, checked, killed and opened again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import QueueClosed, QueueEmpty
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, MemoryDisk
from kestrelpy.work import NewJob, Session, WorkQueue
from kestrelpy.work.core import WorkCore
from tests.interrupts import strikes
from tests.interrupts.strikes import interrupter_at
from tests.support.budget import SEED, share
from tests.support.patience import PATIENCE, until

Call = Callable[[], object]
MANY = [NewJob(b"new 1", "t", key="k"), NewJob(b"new 2", "other", priority=1), NewJob(b"new 3", delay=3)]
PLACES = 60
"""How many places of each call are struck in one run; all of those that it has, if these are fewer."""


class Scene:
    """A queue with jobs in every state, two sessions, and somebody who waits."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.disk = disk or MemoryDisk()
        self.queue = self.open()
        self.queue.put_many([b"%d" % number for number in range(6)], priority=100)
        self.queue.put_many([b"delayed"] * 3, delay=5)
        self.queue.put(b"expires", expires_in=5)
        self.session: Session = self.queue.session(deadline_soon=False)
        self.waiting = self.queue.session()
        self.waiting.watch("other")
        self.waiting.ignore("default")
        self.future = self.waiting.reserve_future()
        self.jobs = self.session.reserve_many(3)
        self.jobs[2].bury()

    def open(self) -> WorkQueue:
        return WorkQueue(
            "/q", clock=self.clock, disk=self.disk, segment_bytes=8192, max_job_bytes=4000, checkpoint_interval=1000
        )

    def kill(self) -> None:
        self.disk.kill()
        forget(self.queue)
        self.queue._abandon()

    def states(self) -> dict[int, tuple[Any, ...]]:
        """What a restart must keep."""
        found = {}
        for tube in self.queue.tubes():
            for job in self.queue.jobs(tube):
                state = "ready" if job.state == "reserved" else job.state
                counts = (job.timeouts, job.releases, job.buries, job.kicks)
                found[job.id] = (tube, state, job.priority, job.delay, *counts, self.queue.peek(job.id).body)
        return found

    def check(self) -> None:
        self.queue.stats()  # the next call after the interrupt mends
        self.queue._check()
        again = self.queue.put(b"goes on")
        self.queue.delete(again)
        assert again not in self.states()
        self.queue.checkpoint()
        self.queue._check()
        states, last_id = self.states(), self.queue.stats().last_id
        self.kill()
        self.queue = self.open()
        self.queue._check()
        assert self.states() == states
        assert self.queue.stats().last_id == last_id
        self.queue.close()


CALLS: dict[str, Callable[[Scene], Call]] = {
    "put": lambda scene: lambda: scene.queue.put(b"new"),
    "put with all": lambda scene: lambda: scene.queue.put(b"new", tube="t", delay=1, key="k", expires_in=9),
    "put to one who waits": lambda scene: lambda: scene.queue.put(b"new", tube="other"),
    "put_many": lambda scene: lambda: scene.queue.put_many([b"a", b"b", b"c"], tube="t"),
    "put_all": lambda scene: lambda: scene.queue.put_all(MANY),
    "reserve": lambda scene: lambda: scene.session.reserve(0),
    "reserve in vain": lambda scene: lambda: _nothing(lambda: scene.waiting.reserve(0)),
    "reserve_future": lambda scene: lambda: scene.waiting.reserve_future(3),
    "reserve_job": lambda scene: lambda: scene.session.reserve_job(7),
    "delete": lambda scene: scene.jobs[0].delete,
    "delete by id": lambda scene: lambda: scene.queue.delete(8),
    "release": lambda scene: lambda: scene.jobs[0].release(priority=5),
    "release with a delay": lambda scene: lambda: scene.jobs[0].release(delay=5),
    "release with a body": lambda scene: lambda: scene.jobs[0].release(priority=5, delay=5, body=b"tried once"),
    "bury": lambda scene: scene.jobs[0].bury,
    "bury with a body": lambda scene: lambda: scene.jobs[0].bury(body=b"tried in vain"),
    "touch": lambda scene: scene.jobs[0].touch,
    "kick": lambda scene: lambda: scene.queue.kick(9),
    "kick_job": lambda scene: lambda: scene.queue.kick_job(7),
    "move": lambda scene: lambda: scene.queue.move(8, "other"),
    "clear": lambda scene: scene.queue.clear,
    "pause_tube": lambda scene: lambda: scene.queue.pause_tube("default", 3),
    "watch": lambda scene: lambda: scene.session.watch("other"),
    "use": lambda scene: lambda: scene.session.use("t"),
    "close a session": lambda scene: scene.session.close,
    "time": lambda scene: lambda: scene.clock.advance(70),
    "save_reserves": lambda scene: scene.queue.save_reserves,
    "checkpoint": lambda scene: scene.queue.checkpoint,
}


def _nothing(call: Call) -> None:
    with pytest.raises(QueueEmpty):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_memory_and_journal_agree_afterwards(name: str) -> None:
    scene = Scene()
    counting = interrupter_at(0)
    counting.run(CALLS[name](scene))
    scene.check()
    assert counting.places > 3, "the tracer sees nothing"
    choose = random.Random(f"{SEED} {name}")
    count = min(counting.places, share(PLACES))
    struck = 0
    for at in sorted(choose.sample(range(1, counting.places + 1), count)):
        scene = Scene()
        striker = interrupter_at(at)
        struck += striker.run(CALLS[name](scene))
        try:
            scene.check()
        except BaseException as error:
            raise AssertionError(f"{name}, struck at place {at}, {striker.where}: {error!r}") from error
    assert struck > count // 2


BATCHES: dict[str, Callable[[Scene], Call]] = {
    "put_all": lambda scene: lambda: scene.queue.put_all(MANY),
    "put_many": lambda scene: lambda: scene.queue.put_many([b"new 1", b"new 2", b"new 3"], tube="other"),
}
"""The first of their jobs is for somebody who waits."""


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_whole_or_not_there(name: str) -> None:
    """In memory, and in the journal: if the process dies right then, or while the next call repairs."""
    counting = interrupter_at(0)
    scene = Scene()
    counting.run(BATCHES[name](scene))
    scene.check()
    for at in range(1, counting.places + 1):
        disk = CrashingDisk()
        scene = Scene(disk)
        striker = interrupter_at(at)
        striker.run(BATCHES[name](scene))
        left: list[MemoryDisk] = []
        disk.before_operation = partial(_note, disk, left)
        found = [new_jobs(scene.queue)]
        disk.before_operation = None
        scene.check()
        for each in left:
            scene.disk = each
            scene.queue = scene.open()
            found.append(new_jobs(scene.queue))
            scene.queue.close()
        assert set(found) <= {0, 3}, f"struck at place {at}, {striker.where}: {found}"


def _note(disk: CrashingDisk, left: list[MemoryDisk]) -> None:
    left.append(disk.after_kill())


def new_jobs(queue: WorkQueue) -> int:
    return sum(queue.peek(job.id).body.startswith(b"new") for tube in queue.tubes() for job in queue.jobs(tube))


def test_a_close_that_was_struck_is_finished_by_the_next() -> None:
    """Waiters hear of it, and the journal's lock is free, wherever Ctrl-C strikes."""
    counting = interrupter_at(0)
    counting.run(Scene().queue.close)
    assert counting.places > 20, "the tracer sees nothing"
    choose = random.Random(SEED)
    count = min(counting.places, share(4 * PLACES))
    for at in sorted(choose.sample(range(1, counting.places + 1), count)):
        scene = Scene()
        states = scene.states()
        other = scene.queue.session()
        other.watch("other")
        other.ignore("default")
        cancelled = other.reserve_future()
        cancelled.cancel()
        striker = interrupter_at(at)
        striker.run(scene.queue.close)
        try:
            scene.queue.close()
            with pytest.raises(QueueClosed):
                scene.future.result(0)
            assert cancelled.cancelled()
            assert not scene.queue._core.lock.locked()
            assert not scene.queue._core.scheduler.completions
            scene.queue = scene.open()
            assert scene.states() == states
            scene.queue.close()
        except BaseException as error:
            raise AssertionError(f"struck at place {at}, {striker.where}: {error!r}") from error


class Waiting:
    """A thread that waits for a future."""

    def __init__(self, future: Any) -> None:
        self._outcomes: list[object] = []
        self._thread = threading.Thread(target=lambda: self._outcomes.append(future.exception()), daemon=True)
        self._thread.start()
        until(lambda: future._condition._waiters)

    def outcome(self) -> object:
        self._thread.join(PATIENCE)
        return self._outcomes[0] if self._outcomes else "it still waits"


def test_a_session_whose_close_was_struck_is_closed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits hears of it, wherever Ctrl-C strikes: also in a call of ``Future``, and in another thread."""
    monkeypatch.setattr(strikes, "HELPERS", (*strikes.HELPERS, "/concurrent/futures/_base.py", "/threading.py"))
    for at in itertools.count(1):
        queue = WorkQueue(None)
        session = queue.session()
        futures = [session.reserve_future() for _ in range(2)]
        called: list[object] = []
        futures[0].add_done_callback(called.append)
        waiting = [Waiting(future) for future in futures]
        striker = interrupter_at(at)
        struck = striker.run(session.close)
        session.close()
        try:
            assert [type(each.outcome()) for each in waiting] == [QueueClosed] * 2
            assert called == futures[:1]
            assert queue.stats().sessions == 0
            queue._check()
        except BaseException as error:
            raise AssertionError(f"struck at place {at}, {striker.where}: {error!r}") from error
        finally:
            queue.close()
        if not struck:
            break
    assert at > 20, "the tracer sees nothing"


@pytest.mark.parametrize("kind", ["future", "task"])
def test_a_completion_that_was_struck_is_made_again(kind: str) -> None:
    """A future and a task get their job, wherever Ctrl-C strikes the call that notifies them."""
    places = _strike_a_completion(kind, 0)
    assert places > 3
    for at in range(1, places + 1):
        _strike_a_completion(kind, at)


def _strike_a_completion(kind: str, at: int) -> int:
    """The places of the call."""
    queue = WorkQueue(None)
    session = queue.session()
    loop = asyncio.new_event_loop()
    try:
        future: Any = session.reserve_future() if kind == "future" else loop.create_task(session.areserve())
        loop.run_until_complete(asyncio.sleep(0))
        striker = interrupter_at(at)
        with patch.object(WorkCore, "notify", lambda self: None):
            job_id = queue.put(b"job")
        striker.run(queue._core.notify)
        queue.stats()  # the next call makes what is left
        job = future.result(1) if kind == "future" else loop.run_until_complete(asyncio.wait_for(future, 1))
        assert (job.id, job.body) == (job_id, b"job"), striker.where
        assert queue.stats().reserved == 1
        job.delete()
        assert not queue._core.scheduler.completions
        queue._check()
    except BaseException as error:
        raise AssertionError(f"{kind}, struck at place {at}: {error!r}") from error
    finally:
        queue.close()
        loop.close()
    return striker.places
