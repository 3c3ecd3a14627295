"""Random programs of calls on a work queue and on its model, step by step; whatever can be seen of the two is the same
after each step, and after each end.

Segments are small, so that they are closed, retired and carried forward all the time; the disk is one that crashes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kestrelpy.testing import CrashingDisk, PowerModel
from tests.support.budget import share
from tests.work.model import ModelJob
from tests.work.pair import TUBES, Pair

SIZES = st.sampled_from([0, 3, 100, 700])
PRIORITIES = st.sampled_from([0, 5, 1023, 1024, 65536, 2**32 - 1])
TUBE = st.sampled_from(TUBES)
BASES = st.sampled_from([0, 1, 2, 5])
AT = st.integers(0, 1 << 16)


class WorkMachine(RuleBasedStateMachine):
    @initialize(
        max_jobs=st.sampled_from([None, None, 4]),
        max_bytes=st.sampled_from([None, None, 1500]),
        max_attempts=st.sampled_from([None, None, 1, 2]),
        sync=st.sampled_from(["always", 0.1, "never"]),
    )
    def set_up(self, **limits: Any) -> None:
        self.pair = Pair(CrashingDisk(), max_job_bytes=600, segment_bytes=4096, **limits)
        self.pair.new_session()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def a_job(self, at: int, *, reserved: bool | None = None) -> ModelJob | None:
        jobs = list(self.pair.model.jobs.values())
        if reserved is not None:
            jobs = [job for job in jobs if (job.state == "reserved") == reserved]
        return jobs[at % len(jobs)] if jobs else None

    def some_id(self, at: int) -> int:
        """Mostly of a job that lives, and now and then of one that is gone, or is to come."""
        job = self.a_job(at)
        return job.id if job is not None and at % 7 else at % (self.pair.model.last_id + 2)

    def a_session(self, at: int) -> int:
        if not self.pair.sessions:
            self.pair.new_session()
        return at % len(self.pair.sessions)

    def holder(self, at: int) -> tuple[int, int]:
        """A session and a job that it holds, mostly."""
        job = self.a_job(at, reserved=True)
        models = [model for _, model in self.pair.sessions]
        if job is None or not at % 7:
            return self.a_session(at), self.some_id(at)
        return models.index(job.holder), job.id  # type: ignore[arg-type]

    def options(self, base: int, ttr: int, delayed: bool) -> dict[str, Any]:
        delay = self.pair.seconds(base) if delayed else 0
        return {"delay": delay, "ttr": self.pair.seconds(ttr)}

    # -- putting -----------------------------------------------------------------------------------------------------

    @rule(size=SIZES, tube=TUBE, priority=PRIORITIES, base=BASES, ttr=BASES, delayed=st.booleans(), drawn=st.booleans())
    def put(self, size: int, tube: str, priority: int, base: int, ttr: int, delayed: bool, drawn: bool) -> None:
        how = {"tube": tube, "priority": priority, **self.options(base, ttr, delayed)}
        ids = sorted(self.pair.model.drawn)
        if drawn and ids:
            how["job_id"] = ids[0]
        self.pair.put(size, **how)

    @rule(size=SIZES, tube=TUBE, key=st.sampled_from(["k", "l"]), ttr=BASES)
    def put_with_key(self, size: int, tube: str, key: str, ttr: int) -> None:
        self.pair.put(size, tube=tube, key=key, ttr=self.pair.seconds(ttr))

    @rule(size=SIZES, tube=TUBE, lives=BASES, base=BASES, delayed=st.booleans())
    def put_what_expires(self, size: int, tube: str, lives: int, base: int, delayed: bool) -> None:
        options = self.options(base, 2, delayed)
        self.pair.put(size, tube=tube, expires_in=self.pair.seconds(lives), **options)

    @rule(sizes=st.lists(SIZES, max_size=5), tube=TUBE, priority=PRIORITIES, ttr=BASES)
    def put_many(self, sizes: list[int], tube: str, priority: int, ttr: int) -> None:
        # One ttr for all of them would let two reservations end at the same moment, if they are made at the same one.
        self.pair.put_many(sizes[:1] if ttr else sizes, tube=tube, priority=priority, ttr=self.pair.seconds(ttr or 900))

    @rule(
        jobs=st.lists(st.tuples(SIZES, TUBE, PRIORITIES, st.sampled_from([None, None, "k", "l"])), max_size=4),
        base=st.none() | BASES,
        lives=st.none() | BASES,
        ttr=BASES,
    )
    def put_all(
        self, jobs: list[tuple[int, str, int, str | None]], base: int | None, lives: int | None, ttr: int
    ) -> None:
        made = []
        for number, (size, tube, priority, key) in enumerate(jobs):
            how = {"tube": tube, "priority": priority, "key": key, **self.options(base or 0, ttr, base is not None)}
            if lives is not None and number % 2:
                how["expires_in"] = self.pair.seconds(lives)
            made.append((size, how))
        self.pair.put_all(made)

    @rule()
    def draw_an_id(self) -> None:
        assert self.pair.queue.new_id() == self.pair.model.new_id()

    # -- sessions ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.pair.sessions) < 4)
    @rule(deadline_soon=st.booleans())
    def new_session(self, deadline_soon: bool) -> None:
        self.pair.new_session(deadline_soon=deadline_soon)

    @rule(at=AT)
    def close_session(self, at: int) -> None:
        self.pair.close_session(self.a_session(at))

    @rule(at=AT, tube=TUBE)
    def use(self, at: int, tube: str) -> None:
        session, model = self.pair.sessions[self.a_session(at)]
        session.use(tube)
        self.pair.model.use(model, tube)

    @rule(at=AT, tube=TUBE)
    def watch(self, at: int, tube: str) -> None:
        session, model = self.pair.sessions[self.a_session(at)]
        self.pair.same(lambda: session.watch(tube), lambda: self.pair.model.watch(model, tube))

    @rule(at=AT, tube=TUBE)
    def ignore(self, at: int, tube: str) -> None:
        session, model = self.pair.sessions[self.a_session(at)]
        self.pair.same(lambda: session.ignore(tube), lambda: self.pair.model.ignore(model, tube))

    @rule(at=AT)
    def reserve(self, at: int) -> None:
        self.pair.reserve(self.a_session(at))

    @rule(at=AT, count=st.integers(1, 4))
    def reserve_many(self, at: int, count: int) -> None:
        self.pair.reserve(self.a_session(at), count)

    @rule(at=AT, which=AT)
    def reserve_job(self, at: int, which: int) -> None:
        self.pair.reserve_job(self.a_session(at), self.some_id(which))

    @rule(at=AT, base=st.none() | BASES)
    def wait(self, at: int, base: int | None) -> None:
        self.pair.wait(self.a_session(at), None if base is None else self.pair.seconds(base))

    @precondition(lambda self: self.pair.futures)
    @rule(at=AT)
    def cancel(self, at: int) -> None:
        self.pair.cancel(at % len(self.pair.futures))

    @rule(at=AT)
    def delete_what_is_held(self, at: int) -> None:
        which, job_id = self.holder(at)
        session, model = self.pair.sessions[which]
        self.pair.same(lambda: session.delete(job_id), lambda: self.pair.model.delete(job_id, model))

    @rule(at=AT, count=st.integers(1, 4))
    def delete_many(self, at: int, count: int) -> None:
        self.pair.delete_many(self.a_session(at), count)

    @rule(at=AT, priority=st.none() | PRIORITIES, base=st.none() | BASES, size=st.none() | SIZES)
    def release(self, at: int, priority: int | None, base: int | None, size: int | None) -> None:
        delay = 0 if base is None else self.pair.seconds(base)
        self.pair.release(*self.holder(at), priority, delay, size)

    @rule(at=AT, priority=st.none() | PRIORITIES, size=st.none() | SIZES)
    def bury(self, at: int, priority: int | None, size: int | None) -> None:
        self.pair.bury(*self.holder(at), priority, size)

    @rule(at=AT)
    def touch(self, at: int) -> None:
        which, job_id = self.holder(at)
        session, model = self.pair.sessions[which]
        self.pair.same(lambda: session.touch(job_id), lambda: self.pair.model.touch(model, job_id))

    # -- anybody -----------------------------------------------------------------------------------------------------

    @rule(at=AT)
    def delete(self, at: int) -> None:
        job_id = self.some_id(at)
        self.pair.same(lambda: self.pair.queue.delete(job_id), lambda: self.pair.model.delete(job_id))

    @rule(count=st.integers(0, 4), tube=TUBE)
    def kick(self, count: int, tube: str) -> None:
        self.pair.same(lambda: self.pair.queue.kick(count, tube), lambda: self.pair.model.kick(count, tube))

    @rule(at=AT)
    def kick_job(self, at: int) -> None:
        job_id = self.some_id(at)
        self.pair.same(lambda: self.pair.queue.kick_job(job_id), lambda: self.pair.model.kick_job(job_id))

    @rule(at=AT, tube=TUBE)
    def move(self, at: int, tube: str) -> None:
        job_id = self.some_id(at)
        self.pair.same(lambda: self.pair.queue.move(job_id, tube), lambda: self.pair.model.move(job_id, tube))

    @rule(tube=TUBE, sure=st.integers(0, 3))
    def clear(self, tube: str, sure: int) -> None:
        if not sure:
            self.pair.same(lambda: self.pair.queue.clear(tube), lambda: self.pair.model.clear(tube))

    @rule(tube=TUBE, base=st.none() | BASES)
    def pause(self, tube: str, base: int | None) -> None:
        seconds = 0 if base is None else self.pair.seconds(base)
        self.pair.same(
            lambda: self.pair.queue.pause_tube(tube, seconds), lambda: self.pair.model.pause_tube(tube, seconds)
        )

    @rule(sure=st.integers(0, 5))
    def drain(self, sure: int) -> None:
        if not sure:
            self.pair.queue.drain()
            self.pair.model.draining = True

    # -- time, and ends ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 1, 2, 10]))
    def advance(self, seconds: int) -> None:
        self.pair.advance(seconds)

    @rule()
    def save_reserves(self) -> None:
        self.pair.same(self.pair.queue.save_reserves, self.pair.model.save_reserves)

    @rule()
    def sync(self) -> None:
        self.pair.queue.sync()

    @rule()
    def checkpoint(self) -> None:
        self.pair.queue.checkpoint()

    @rule(seconds=st.sampled_from([0, 1, 3]))
    def close(self, seconds: int) -> None:
        self.pair.close(seconds)

    @rule(seconds=st.sampled_from([0, 1, 3]))
    def kill(self, seconds: int) -> None:
        disk = self.pair.disk
        assert isinstance(disk, CrashingDisk)
        self.pair.kill(seconds, disk.after_kill())

    @rule(choices=st.randoms(use_true_random=False), seconds=st.sampled_from([0, 3]))
    def cut_the_power_after_a_sync(self, choices: Any, seconds: int) -> None:
        """What was there before the sync is there, and nothing else has happened since."""
        self.pair.queue.sync()
        disk = self.pair.disk
        assert isinstance(disk, CrashingDisk)
        self.pair.kill(seconds, disk.after_power_cut(choices, PowerModel.EXT4))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.vanish()


TestWork = WorkMachine.TestCase
TestWork.settings = settings(
    max_examples=max(50, share(150)),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
