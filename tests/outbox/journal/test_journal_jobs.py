"""Jobs of an outbox in a work queue: their states there, what outcomes change, and what is there after a restart."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import ForkedQueue, QueueDiskFull
from kestrelpy.outbox import Job, JobNotFound, Outbox, QueueCount, admin, claims
from kestrelpy.outbox.claims import Finish
from kestrelpy.outbox.sweeping import fail_lapsed
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import JobStats, WorkQueue
from tests.outbox.claimant import Claimant
from tests.outbox.journal.looks import check, die, put, states, store_of
from tests.support.queues import START_MS

MakeOutbox = Callable[..., Outbox]
OPTIONS: dict[str, Any] = {"segment_bytes": 8192, "max_job_bytes": 4000}


class Life:
    """A work queue on a disk in memory, with an outbox; its process dies or ends, and another one goes on."""

    def __init__(self, clock: ManualClock, disk: MemoryDisk, through: FailingDisk | None = None) -> None:
        self.clock = clock
        self.disk = disk
        self.through = through
        self.begin()

    def begin(self) -> None:
        self.queue = WorkQueue("/work", clock=self.clock, disk=self.through or self.disk, **OPTIONS)
        self.outbox = Outbox(self.queue, clock=self.clock)
        for name in ("mail", "bills"):
            self.outbox.queue(name)
        self.claimant = Claimant(self.outbox)

    def die(self) -> None:
        die(self.outbox)
        self.disk.kill()
        self.begin()
        check(self.outbox)

    def end(self) -> None:
        self.outbox.close()
        self.queue.close()
        self.begin()
        check(self.outbox)

    def job(self, job_id: int = 1) -> Job:
        return self.outbox.get(job_id)

    def facts(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(getattr(job, name) for name in names) for job in self.outbox.jobs()]


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    made = Life(clock, MemoryDisk())
    yield made
    check(made.outbox)
    made.outbox.close()
    made.queue.close()


# -- states ----------------------------------------------------------------------------------------------------------


def test_each_status_is_a_state_in_the_work_queue(life: Life) -> None:
    outbox, claimant = life.outbox, life.claimant
    put(outbox, "mail", "ready")
    put(outbox, "mail", "later", delay=60)
    for payload in ("running", "error", "dead", "done", "cancelled"):
        put(outbox, "bills", payload)
    _, error, dead, done, _ = claimant.claim("bills", jobs=5)
    claimant.fail(error)
    claimant.fail(dead, is_dead=True)
    assert claimant.done(done) == {done.id}
    assert outbox.cancel(1)
    assert {job.payload: job.status for job in outbox.jobs()} == {
        "later": "ready",
        "running": "running",
        "error": "error",
        "dead": "dead",
        "cancelled": "running",
    }
    assert states(life.queue) == {2: "delayed"}
    assert states(life.queue, "bills") == {3: "reserved", 4: "buried", 5: "buried", 7: "reserved"}
    assert outbox.stats() == [
        QueueCount("bills", "dead", 1),
        QueueCount("bills", "error", 1),
        QueueCount("bills", "running", 2),
        QueueCount("mail", "ready", 1),
    ]
    assert outbox.stats("mail") == [QueueCount("mail", "ready", 1)]
    assert outbox.stats("nobody") == []
    for gone in (1, 6, 99):
        with pytest.raises(JobNotFound) as caught:
            outbox.get(gone)
        assert caught.value.job_id == gone


def test_a_job_that_is_retried_while_all_are_listed_is_listed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    for payload in ("error", "ready", "later"):
        put(life.outbox, "mail", payload)
    life.claimant.fail(*life.claimant.claim("mail", jobs=1))
    jobs = store_of(life.outbox)._jobs
    row = jobs.row

    def retried_first(stats: JobStats) -> list[Any]:
        monkeypatch.undo()
        assert life.outbox.retry(1)
        return row(stats)

    monkeypatch.setattr(jobs, "row", retried_first)
    assert sorted(job.id for job in life.outbox.jobs()) == [1, 2, 3]


def test_a_running_job_shows_its_claim(life: Life) -> None:
    put(life.outbox, "mail", {"a": 1}, key="k", group="g", priority=-3)
    life.clock.advance(2)
    life.claimant.claim()
    job = life.job()
    assert (job.status, job.tries, job.started_ms, job.due_ms, job.worker) == (
        "running",
        1,
        START_MS + 2000,
        START_MS + 32_000,
        "tests",
    )
    assert (job.key, job.group, job.priority, job.payload, job.added_ms) == ("k", "g", -3, {"a": 1}, START_MS)
    assert job == life.outbox.find("mail", "k") == life.outbox.jobs(status="running")[0]


def test_failures_are_noted_and_survive(life: Life) -> None:
    for payload in range(2):
        put(life.outbox, "mail", payload, priority=7, key=f"k{payload}", group="g")
    life.clock.advance(1)
    first, second = life.claimant.claim()
    life.claimant.fail(first, seconds=5, error="Boom ü")
    life.claimant.fail(second, is_dead=True, error="x" * 20_000)
    before = life.outbox.jobs()
    assert [(job.status, job.tries, job.error and job.error[:6]) for job in before] == [
        ("error", 1, "Boom ü"),
        ("dead", 1, "xxxxxx"),
    ]
    assert len(life.job(2).error or "") < 4000  # there is room for so much
    assert [(job.due_ms, job.started_ms, job.finished_ms, job.first_error_ms) for job in before] == [
        (START_MS + 6000, START_MS + 1000, None, START_MS + 1000),
        (START_MS, START_MS + 1000, START_MS + 1000, START_MS + 1000),
    ]
    for again in (life.die, life.end):
        again()
        assert life.outbox.jobs() == before
        assert life.outbox.errors() == before
        assert life.outbox.errors("mail", limit=1) == before[:1]
        assert life.claimant.ids(status="error") == []
    life.clock.advance(5)
    (retry,) = life.claimant.claim(status="error")
    assert (retry.id, retry.row["tries"], retry.row["error"]) == (1, 2, "Boom ü")
    life.claimant.fail(retry, seconds=1)
    assert (life.job().tries, life.job().first_error_ms, life.job().error) == (2, START_MS + 1000, "Boom")


def test_outcomes_of_all_kinds_at_once(life: Life) -> None:
    life.outbox.put_many(None, "mail", list(range(6)))
    jobs = life.claimant.claim()
    what = Finish()
    what.done.append(jobs[0].own)
    what.deleted.append(jobs[1].own)
    what.failed += [(*jobs[2].own, "error", 500, "e"), (*jobs[3].own, "dead", 0, "d")]
    what.returned += [(*jobs[4].own, None), (*jobs[5].own, 700)]
    saved, freed = store_of(life.outbox).perform(None, claims.finish, what)
    assert (saved, freed) == (set(range(1, 7)), [])
    wanted = [(3, "error", 1, 500), (4, "dead", 1, 0), (5, "ready", 0, 0), (6, "ready", 0, 700)]
    assert [(job.id, job.status, job.tries, job.due_ms - START_MS) for job in life.outbox.jobs()] == wanted
    assert store_of(life.outbox).perform(None, claims.finish, what) == (set(), [])
    life.die()
    assert [(job.id, job.status, job.tries, job.due_ms - START_MS) for job in life.outbox.jobs()] == wanted


@pytest.mark.parametrize("late", ["done", "error", "dead", "back", "renew"])
@pytest.mark.parametrize("meanwhile", ["lapsed", "claimed again", "given back", "done", "another token"])
def test_a_late_outcome_is_refused(life: Life, late: str, meanwhile: str) -> None:
    claimant = life.claimant
    put(life.outbox)
    (first,) = claimant.claim()
    again = []
    if meanwhile == "given back":
        claimant.give_back(first)
    elif meanwhile == "done":
        claimant.done(first)
    elif meanwhile == "another token":
        first.token += 1
    else:
        life.clock.advance(31)
        assert claimant.lapse(seconds=0) == {1}
        again = claimant.claim(status="error") if meanwhile == "claimed again" else []
    before = life.outbox.jobs()
    refused = {
        "done": lambda: claimant.done(first),
        "error": lambda: claimant.fail(first),
        "dead": lambda: claimant.fail(first, is_dead=True),
        "back": lambda: claimant.give_back(first),
        "renew": lambda: claimant.renew(first),
    }[late]()
    assert refused == set()
    assert life.outbox.jobs() == before
    if again:
        assert claimant.done(*again) == {1}


def test_a_batch_of_which_some_are_late(life: Life) -> None:
    life.outbox.put_many(None, "mail", [1, 2, 3])
    first, second, third = life.claimant.claim()
    life.claimant.give_back(second)
    assert life.claimant.done(first, second, third) == {1, 3}
    assert states(life.queue) == {2: "ready"}


def test_delayed_and_failed_jobs_say_when_they_are_due(life: Life) -> None:
    def next_due(*queues: str) -> Any:
        return store_of(life.outbox).perform(None, claims.next_due_ms, queues or ("mail", "bills", "nobody"))

    now = START_MS
    assert next_due() == (now, None, None)
    put(life.outbox, delay=9, priority=-1)
    put(life.outbox, delay=7.5)
    put(life.outbox, "bills")
    life.claimant.fail(*life.claimant.claim("bills"), seconds=3)
    assert next_due() == (now, now + 7500, now + 3000)
    assert next_due("mail") == (now, now + 7500, None)
    life.clock.advance(2)
    life.die()
    assert next_due() == (now + 2000, now + 7500, now + 3000)
    life.clock.advance(6)
    assert next_due() == (now + 8000, now + 8000, now + 3000)


def test_ready_jobs_of_one_priority_come_by_id(life: Life) -> None:
    """Whenever each was due: the one difference to a database."""
    put(life.outbox, "mail", "later", delay=5)
    put(life.outbox, "mail", "at once")
    put(life.outbox, "mail", "urgent", priority=-1)
    life.clock.advance(6)
    assert life.claimant.ids() == [3, 1, 2]


# -- the death of the process ----------------------------------------------------------------------------------------


def test_what_ran_when_the_process_died_has_lapsed(life: Life) -> None:
    life.outbox.put_many(None, "mail", [1, 2, 3])
    life.claimant.claim(jobs=2)
    life.die()
    assert life.facts("status", "tries") == [("running", 1), ("running", 1), ("ready", 0)]
    assert states(life.queue) == {1: "buried", 2: "buried", 3: "ready"}
    assert life.claimant.ids() == [3]  # they are not claimed before the sweep has found them
    assert life.outbox.retry(1) is False
    assert life.outbox.cancel(1) is False
    assert life.outbox.errors() == []
    assert store_of(life.outbox).perform(None, claims.lapsed, ["bills"]) == []
    rows = store_of(life.outbox).perform(None, claims.lapsed, ["mail"])
    assert life.claimant.note_lapses(rows, seconds=2) == {1, 2}
    assert life.claimant.note_lapses(rows) == set()
    assert life.facts("status", "tries", "first_error_ms")[:2] == [("error", 1, START_MS)] * 2
    life.clock.advance(2)
    assert life.claimant.ids(status="error") == [1, 2]


def test_a_job_that_kills_wears_out_although_nobody_sweeps_in_between(life: Life) -> None:
    put(life.outbox)
    for tries in range(1, 4):
        assert life.claimant.claim() or life.claimant.claim(status="error")
        life.die()
        life.die()  # once more, before anybody has looked
        assert life.facts("status", "tries") == [("running", tries)]
        assert life.claimant.lapse(seconds=0, is_dead=tries == 3) == {1}
    assert life.facts("status", "tries", "error") == [("dead", 3, "its lease was over")]


def test_the_sweep_fails_what_has_lapsed_and_calls_its_hook(life: Life) -> None:
    put(life.outbox, "mail", "worn out")
    life.claimant.claim()
    life.die()
    told: list[Job] = []
    life.outbox.add_consumer("mail", print, max_retries=0, on_dead=told.append)
    (outcome,) = fail_lapsed(life.outbox.core, life.outbox.core.open_store())
    assert (outcome.status, outcome.attempt.id) == ("dead", 1)
    assert life.job().status == "dead"
    assert "its lease was over at try 1" in (life.job().error or "")


def test_a_retry_that_ran_when_the_process_died(life: Life) -> None:
    put(life.outbox)
    life.claimant.fail(*life.claimant.claim(), seconds=1, error="first")
    life.clock.advance(1)
    assert life.claimant.ids(status="error") == [1]
    life.die()
    assert life.facts("status", "tries", "error") == [("running", 2, "first")]
    assert life.claimant.lapse(seconds=9) == {1}
    assert life.facts("status", "tries", "first_error_ms") == [("error", 2, START_MS)]


def test_a_claim_that_was_not_on_disk_has_not_been(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies between the reservation and the record of it. Nothing had begun."""
    put(life.outbox, "mail", "ready")
    put(life.outbox, "mail", "retry")
    life.claimant.fail(life.claimant.claim(jobs=2)[1], seconds=0)
    life.claimant.lapse()
    life.end()
    assert life.claimant.lapse(seconds=0) == {1}
    life.outbox.retry(1)
    with monkeypatch.context() as patch:
        patch.setattr(WorkQueue, "save_reserves", lambda _: None)
        assert life.claimant.ids(jobs=1) == [1]
        assert life.claimant.ids(status="error") == [2]
    life.die()
    assert life.facts("status", "tries") == [("ready", 0), ("error", 1)]
    assert life.claimant.ids() == [1]


def test_a_clean_end_of_an_outbox_with_running_jobs(life: Life) -> None:
    put(life.outbox)
    life.claimant.claim()
    life.outbox.close()
    life.outbox = Outbox(life.queue, clock=life.clock)
    assert life.facts("status", "tries") == [("running", 1)]
    life.claimant = Claimant(life.outbox)
    assert life.claimant.lapse() == {1}


def test_a_pause_outlives_the_process(life: Life) -> None:
    put(life.outbox)
    put(life.outbox)
    life.claimant.fail(*life.claimant.claim(jobs=1), seconds=0)
    life.outbox.pause("mail")
    life.outbox.pause("nobody")
    life.die()
    assert life.claimant.ids() == life.claimant.ids(status="error") == []
    life.outbox.resume("mail")
    life.outbox.resume("nobody")
    life.outbox.resume("nobody-at-all")
    assert life.claimant.ids() == [2]
    assert life.claimant.ids(status="error") == [1]
    assert life.queue.tubes() == ["default", "mail"]


# -- mending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_failed_job_is_retried_from_the_start(life: Life, is_dead: bool) -> None:
    put(life.outbox, "mail", 1, key="k", group="g", priority=3)
    life.claimant.fail(*life.claimant.claim(), is_dead=is_dead)
    life.clock.advance(1)
    assert life.outbox.retry(1) is True
    assert life.outbox.retry(1) is False
    job = life.job()
    assert (job.status, job.tries, job.due_ms, job.added_ms) == ("ready", 0, START_MS + 1000, START_MS)
    assert (job.error, job.first_error_ms, job.started_ms, job.finished_ms) == (None,) * 4
    assert (job.key, job.group, job.priority, job.payload) == ("k", "g", 3, 1)
    life.die()
    assert life.job() == job
    assert life.outbox.errors() == []
    (claimed,) = life.claimant.claim()
    assert claimed.row["tries"] == 1
    assert life.outbox.retry(1) is False
    with pytest.raises(JobNotFound):
        life.outbox.retry(7)


def test_all_that_failed_are_retried(life: Life) -> None:
    life.outbox.put_many(None, "mail", list(range(5)))
    jobs = life.claimant.claim()
    life.claimant.fail(*jobs[:2], is_dead=True)
    life.claimant.fail(*jobs[2:4])
    assert life.outbox.retry_all("mail") == 2
    assert life.outbox.retry_all("mail", "cancelled") == life.outbox.retry_all("mail", "done") == 0
    assert life.outbox.retry_all("bills", "error") == 0
    assert life.outbox.retry_all("mail", "error") == 2
    assert life.facts("status") == [("ready",)] * 4 + [("running",)]


def test_cancelled_jobs_are_deleted(life: Life) -> None:
    life.outbox.put_many(None, "mail", list(range(4)))
    put(life.outbox, "mail", "later", delay=9)
    running, error, dead = life.claimant.claim(jobs=3)
    life.claimant.fail(error)
    life.claimant.fail(dead, is_dead=True)
    assert [life.outbox.cancel(job_id) for job_id in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    with pytest.raises(JobNotFound):
        life.outbox.cancel(2)
    assert states(life.queue) == {running.id: "reserved"}
    assert life.outbox.errors() == []
    life.clock.advance(100)
    assert life.claimant.ids() == life.claimant.ids(status="error") == []


def test_dead_jobs_are_pruned_when_they_are_old_enough(life: Life) -> None:
    life.outbox.queue("mail", keep_dead=60)
    life.outbox.put_many(None, "mail", [1, 2])
    put(life.outbox, "bills")
    life.claimant.fail(*life.claimant.claim("mail", "bills", jobs=2), is_dead=True)
    life.clock.advance(30)
    life.claimant.fail(*life.claimant.claim("mail", "bills"), is_dead=True)
    assert life.outbox.prune() == 0
    life.clock.advance(30)
    assert life.outbox.prune() == 2
    assert life.facts("queue", "status") == [("bills", "dead")]
    life.die()
    assert life.facts("queue", "status") == [("bills", "dead")]


def test_errors_by_their_first_failure(life: Life) -> None:
    life.outbox.put_many(None, "mail", [1, 2])
    put(life.outbox, "bills")
    jobs = life.claimant.claim("mail", "bills")
    for job in (jobs[1], jobs[2], jobs[0]):
        life.clock.advance(1)
        life.claimant.fail(job, is_dead=job is jobs[2], seconds=0)
    assert [job.id for job in life.outbox.errors()] == [2, 3, 1]
    assert [job.id for job in life.outbox.errors("mail")] == [2, 1]
    assert [job.id for job in life.outbox.errors(limit=2)] == [2, 3]
    rows = store_of(life.outbox).perform(None, admin.oldest_error, "mail")
    assert [row[0] for row in rows] == [2]
    assert life.outbox.health().errors == 0
    life.clock.advance(898)
    assert life.outbox.health().errors == 1
    life.clock.advance(2)
    assert life.outbox.health().errors == 3
    assert not life.outbox.healthy()


def test_health_says_how_long_the_oldest_ready_job_waits(life: Life) -> None:
    assert life.outbox.health().oldest_ready_age is None
    put(life.outbox, "mail", 1, priority=5)
    life.clock.advance(10)
    put(life.outbox, "mail", 2)
    put(life.outbox, "bills", 2, delay=5)
    life.clock.advance(1)
    assert life.outbox.health().oldest_ready_age == 11.0
    life.claimant.claim()
    assert life.outbox.health().oldest_ready_age is None
    life.clock.advance(10)
    assert life.outbox.health().oldest_ready_age == 6.0


def test_groups_and_pages_of_jobs(life: Life) -> None:
    life.outbox.put_many(None, "mail", list(range(5)), group="g")
    life.outbox.put_many(None, "bills", list(range(3)), group="g")
    put(life.outbox)
    life.claimant.fail(*life.claimant.claim(jobs=2))
    assert life.outbox.group_progress("mail", "g") == {"error": 2, "ready": 3}
    assert life.outbox.group_progress("mail", "h") == life.outbox.group_progress("nobody", "g") == {}
    assert [job.id for job in life.outbox.jobs(limit=4, after_id=3)] == [4, 5, 6, 7]
    assert [job.id for job in life.outbox.jobs("bills", group="g", limit=2)] == [6, 7]
    assert [job.id for job in life.outbox.jobs(status="error")] == [1, 2]
    for status in ("waiting", "done", "cancelled"):
        assert life.outbox.jobs(status=status) == []


# -- others in its tubes ---------------------------------------------------------------------------------------------


def test_a_body_of_others_is_a_payload(life: Life) -> None:
    life.queue.put(b'{"n": 1}', tube="mail", priority=1 << 31, key="k")
    life.queue.put(b"\xff\0", tube="bills", priority=1 << 31)
    life.queue.put(b"x", tube="no/queue")
    job = life.outbox.find("mail", "k")
    assert (job.payload, job.priority, job.tries, job.status) == ({"n": 1}, 0, 0, "ready")
    assert [job.stored for job in life.outbox.jobs()] == ['{"n": 1}', b"\xff\0"]
    first, second = life.claimant.claim("mail", "bills")
    life.claimant.fail(first, seconds=1)
    life.claimant.give_back(second, seconds=2)
    life.die()
    assert life.facts("stored", "tries", "status") == [('{"n": 1}', 1, "error"), (b"\xff\0", 0, "ready")]
    life.clock.advance(2)
    life.claimant.done(*life.claimant.claim("bills"), *life.claimant.claim(status="error"))
    assert life.outbox.jobs() == []


def test_where_a_head_has_no_room_a_job_of_others_is_dead(life: Life) -> None:
    for _ in range(2):
        life.queue.put(b"x" * 3990, tube="mail")
    first, second = life.claimant.claim()
    assert life.claimant.fail(first) == {1}
    assert life.claimant.give_back(second) == {2}
    assert life.facts("status") == [("dead",), ("ready",)]
    assert life.outbox.retry(1)
    assert life.facts("status") == [("ready",)] * 2


def test_what_others_do_to_its_jobs(life: Life) -> None:
    """It is not asked for, and hurts nobody."""
    life.outbox.put_many(None, "mail", list(range(5)))
    jobs = life.claimant.claim(jobs=3)
    life.claimant.fail(*jobs, seconds=0)
    life.queue.kick_job(1)
    life.queue.delete(2)
    with life.queue.session() as session:
        session.reserve_job(3)
        session.reserve_job(4).bury()
        assert life.facts("id", "status") == [(1, "error"), (3, "running"), (4, "dead"), (5, "ready")]
        assert life.claimant.ids(status="error") == [1]
        assert life.outbox.retry(3) is False
    assert life.claimant.ids() == [3, 5]
    life.end()
    life.claimant.lapse(seconds=0)
    assert life.facts("id", "status") == [(1, "error"), (3, "error"), (4, "dead"), (5, "error")]
    assert [job.id for job in life.outbox.errors()][:1] == [1]


# -- room ------------------------------------------------------------------------------------------------------------


def test_max_bytes_leaves_no_room_for_an_error(clock: ManualClock) -> None:
    with WorkQueue(None, clock=clock, max_bytes=200) as queue, Outbox(queue, clock=clock) as outbox:
        outbox.queue("mail")
        put(outbox, "mail", "x" * 100)
        claimant = Claimant(outbox)
        assert claimant.fail(*claimant.claim(), error="E" * 100, seconds=0) == {1}
        assert outbox.get(1).error is None or len(outbox.get(1).error or "") < 40
        assert claimant.ids(status="error") == [1]
        check(outbox)


def test_max_tubes(clock: ManualClock) -> None:
    with WorkQueue(None, clock=clock, max_tubes=2) as queue, Outbox(queue, clock=clock) as outbox:
        for name in ("mail", "bills", "default"):
            outbox.queue(name)
        put(outbox, "default", 0)
        put(outbox, "mail", 1)
        claimant = Claimant(outbox)
        assert claimant.ids("bills") == []
        assert claimant.ids("bills", "mail") == [2]
        assert claimant.ids("bills") == []
        assert claimant.ids("default", "bills") == [1]


def full(failing: FailingDisk) -> None:
    failing.arm(errno.ENOSPC, sticky=True, kinds=frozenset({"grow"}))


def fill(outbox: Outbox, queue: str) -> None:
    for _ in range(100):
        put(outbox, queue, "x" * 500)


def test_on_a_full_disk_jobs_run_and_failures_are_saved_later(clock: ManualClock) -> None:
    disk = MemoryDisk()
    failing = FailingDisk(disk)
    life = Life(clock, disk, failing)
    life.outbox.put_many(None, "mail", list(range(20)), group="g" * 200)
    full(failing)
    with pytest.raises(QueueDiskFull):
        fill(life.outbox, "mail")
    jobs = life.claimant.claim(jobs=20)
    assert [job.id for job in jobs] == list(range(1, 21))
    assert life.claimant.done(*jobs[:10]) == set(range(1, 11))
    what = Finish()
    what.done += [job.own for job in jobs[10:12]]
    what.failed += [(*job.own, "error", 0, "E" * 3000) for job in jobs[12:]]
    perform = store_of(life.outbox).perform
    with pytest.raises(QueueDiskFull):
        perform(None, claims.finish, what)
    failing.disarm()
    saved, _ = perform(None, claims.finish, what)
    assert saved == {job.id for job in jobs[10:]}  # also what the first call had saved
    assert not store_of(life.outbox)._claims._unreported
    life.die()
    assert [job.status for job in life.outbox.jobs() if job.group] == ["error"] * 8
    life.outbox.close()
    life.queue.close()


def test_an_opening_on_a_full_disk(clock: ManualClock) -> None:
    disk = MemoryDisk()
    failing = FailingDisk(disk)
    life = Life(clock, disk, failing)
    life.outbox.put_many(None, "mail", ["x" * 300] * 8)
    assert len(life.claimant.claim()) == 8
    full(failing)
    with pytest.raises(QueueDiskFull):
        fill(life.outbox, "bills")
    life.die()
    assert [job.status for job in life.outbox.jobs("mail")] == ["running"] * 8
    assert life.claimant.ids() == []
    with pytest.raises(QueueDiskFull):
        life.claimant.lapse()
    failing.disarm()
    while life.claimant.lapse(seconds=0):
        pass
    assert [job.status for job in life.outbox.jobs("mail")] == ["error"] * 8
    assert all(job.tries in (1, 2) for job in life.outbox.jobs("mail"))
    life.outbox.close()
    life.queue.close()


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_what_an_interrupt_has_left_reserved_is_given_back(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def struck(*_: Any) -> Any:
        raise KeyboardInterrupt

    put(life.outbox, "mail", "first run")
    put(life.outbox, "mail", "retry")
    life.claimant.fail(life.claimant.claim(jobs=2)[1], seconds=0)
    life.clock.advance(30)
    life.claimant.lapse(seconds=0)
    life.outbox.retry(1)
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.journal_jobs.RunningJob", struck)
        patch.setattr("kestrelpy.outbox.journal_claims.RunningJob", struck)
        for status in ("ready", "error"):
            with pytest.raises(KeyboardInterrupt):
                life.claimant.ids(status=status)
    assert life.facts("status") == [("running",), ("error",)] or life.facts("status") == [("running",)] * 2
    assert life.claimant.lapse() == set()
    assert life.claimant.lapse() == set()
    assert life.facts("status", "tries") == [("ready", 1), ("error", 2)]
    (first,) = life.claimant.claim(jobs=1)
    assert (first.id, first.row["tries"]) == (1, 2)
    life.claimant.done(first)


# -- a fork ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_can_do_nothing_to_the_parents_jobs(tmp_path: Path) -> None:
    with WorkQueue(tmp_path) as queue, Outbox(queue) as outbox:
        outbox.queue("mail")
        put(outbox, "mail", 1)
        child = os.fork()
        if not child:
            try:
                put(outbox, "mail", 2)
            except ForkedQueue:
                outbox.close()
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert [job.payload for job in outbox.jobs()] == [1]
