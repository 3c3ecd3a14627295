"""``JobsOutside``: the jobs of a work queue by its files are those that its owner has."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from kestrelpy import CorruptJournal, JournaledQueue
from kestrelpy.testing import ManualClock
from kestrelpy.work import JobsOutside, WorkQueue
from tests.support.queues import START_MS

TUBES = ("a", "b", "c")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


def same(outside: JobsOutside, queue: WorkQueue) -> None:
    """Everything that both know; reserved jobs are ready ones from outside."""
    outside.look()
    for tube in TUBES:
        for state in ("delayed", "buried"):
            assert [j.id for j in outside.jobs(tube=tube, state=state)] == [j.id for j in queue.jobs(tube, state)]
        ready = {job.id: job for job in outside.jobs(tube=tube, state="ready")}
        theirs = [*queue.jobs(tube, "ready"), *queue.jobs(tube, "reserved")]
        assert ready.keys() == {job.id for job in theirs}
        for job in theirs:
            mine = ready[job.id]
            assert (mine.priority, mine.body, mine.body_bytes) == (job.priority, job.body, job.body_bytes)
            assert (mine.key, mine.timeouts, mine.releases) == (job.key, job.timeouts, job.releases)
    counts = {tube.name: (tube.ready, tube.delayed, tube.buried) for tube in outside.tubes() if tube.name in TUBES}
    assert {name: count for name, count in counts.items() if any(count)} == {
        name: (stats.ready + stats.reserved, stats.delayed, stats.buried)
        for name in queue.tubes()
        if name in TUBES and any((stats := queue.stats_tube(name))[at] for at in (2, 3, 4, 5))
    }


@pytest.mark.parametrize("seed", range(4))
def test_a_random_life_looks_the_same_from_outside(tmp_path: Path, clock: ManualClock, seed: int) -> None:
    dice = random.Random(seed)
    with WorkQueue(tmp_path, "work", clock=clock, segment_bytes=1 << 17) as queue, queue.session() as session:
        seldom, often = (JobsOutside(tmp_path, "work", head_bytes=None, clock=clock) for _ in range(2))
        for tube in TUBES:
            session.watch(tube)
        for step in range(40):
            for _ in range(dice.randrange(60)):
                act = dice.randrange(8)
                if act < 3:
                    body = dice.randbytes(dice.randrange(2000))
                    delay = dice.choice((0, 0, 5, 50))
                    queue.put(body, tube=dice.choice(TUBES), priority=dice.randrange(5), delay=delay, expires_in=300)
                elif act == 3:
                    queue.kick(2, dice.choice(TUBES))
                elif act == 4:
                    queue.pause_tube("a", dice.choice((0, 10))) if "a" in queue.tubes() else None
                elif sum(len(list(queue.jobs(tube, "ready"))) for tube in TUBES) > 3:
                    queue.pause_tube("a", 0) if "a" in queue.tubes() else None
                    job = session.reserve(timeout=0)
                    dice.choice((job.delete, job.delete, job.bury, job.release, partial(job.release, delay=20)))()
            clock.advance(dice.choice((0, 1, 30)))
            if dice.randrange(3) == 0:
                queue.checkpoint()
            same(often, queue)
            if step % 13 == 0:
                same(seldom, queue)
        assert {tube.name: tube.paused_until_ms > 0 for tube in often.tubes()}.keys() <= set(TUBES)


def test_heads_of_bodies_and_the_newest(tmp_path: Path, clock: ManualClock) -> None:
    with WorkQueue(tmp_path, "work", clock=clock) as queue:
        for number in range(5):
            queue.put(b"body %d" % number, tube="a")
        outside = JobsOutside(tmp_path, "work", head_bytes=4, clock=clock)
        outside.look()
        assert [(job.id, job.body, job.body_bytes) for job in outside.newest(2)] == [(5, b"body", 6), (4, b"body", 6)]
        assert outside.job(3) is not None
        assert outside.job(99) is None
        queue.clear("a")
    outside.look()
    assert outside.newest(5) == []
    assert outside.tubes() == []


def test_another_queue_of_the_same_name(tmp_path: Path, clock: ManualClock) -> None:
    outside = JobsOutside(tmp_path, "work", clock=clock)
    with WorkQueue(tmp_path, "work", clock=clock) as queue:
        for _ in range(9):
            queue.put(b"old")
        outside.look()
    for path in tmp_path.glob("work*"):
        path.unlink()
    with WorkQueue(tmp_path, "work", clock=clock) as queue:
        queue.put(b"new", tube="new")
        outside.look()
    assert [tube.name for tube in outside.tubes()] == ["new"]


def test_a_look_that_is_not_needed_is_left_out(tmp_path: Path, clock: ManualClock) -> None:
    outside = JobsOutside(tmp_path, "work", clock=clock)
    with WorkQueue(tmp_path, "work", clock=clock) as queue:
        queue.put(b"x")
        assert outside.look_if_cheap(1)
        assert not outside.look_if_cheap(1)
        queue.put(b"x")
        assert outside.look_if_cheap(2)
    usual = outside.look

    def slowly() -> None:
        usual()
        clock.advance(2)

    outside.look = slowly  # type: ignore[method-assign]
    assert outside.look_if_cheap(3)
    assert not outside.look_if_cheap(4)
    clock.advance(21)
    assert outside.look_if_cheap(4)


def test_items_that_are_no_records(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"\x7fnot a job")
    with pytest.raises(CorruptJournal):
        JobsOutside(tmp_path, "jobs").look()
