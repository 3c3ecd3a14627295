"""Looking at jobs and mending them: get, find, jobs, errors, retry, cancel, prune, pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy import InvalidName
from kestrelpy.outbox import JobNotFound, Outbox, admin
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import in_status, put
from tests.support.queues import START_MS

MakeOutbox = Callable[..., Outbox]
STATUSES = ("ready", "waiting", "running", "error", "done", "dead", "cancelled")
NO_ID = [0, -1, 10**12, 1 << 63, -(1 << 63) - 1, 1 << 200]


# -- looking ---------------------------------------------------------------------------------------------------------


def test_get_and_find(outbox: Outbox) -> None:
    job = put(outbox, "mail", {"a": 1}, key="kü", group="g")
    put(outbox, "bills", 2, key="kü")
    assert outbox.get(job.id) == outbox.find("mail", "kü") == job
    assert hash(outbox.get(job.id)) == hash(job)
    assert outbox.get(job.id) != outbox.find("bills", "kü")


def test_a_job_does_not_change(outbox: Outbox) -> None:
    job = put(outbox)
    with pytest.raises(AttributeError, match="does not change"):
        job.status = "done"
    with pytest.raises(AttributeError):
        del job.key
    outbox.cancel(job.id)
    assert job.status == "ready"


@pytest.mark.parametrize("call", ["get", "retry", "cancel"])
def test_what_is_not_there(outbox: Outbox, call: str) -> None:
    for job_id in NO_ID:
        with pytest.raises(JobNotFound) as caught:
            getattr(outbox, call)(job_id)
        assert caught.value.job_id == job_id
        assert isinstance(caught.value, LookupError)
    for nonsense in ("1", 1.5, None):
        with pytest.raises(TypeError):
            getattr(outbox, call)(nonsense)


def test_what_is_not_found(outbox: Outbox) -> None:
    put(outbox, "mail", key="k")
    for queue, key in (("bills", "k"), ("nobody", "k"), ("mail", "K")):
        with pytest.raises(JobNotFound) as caught:
            outbox.find(queue, key)
        assert (caught.value.queue, caught.value.key, caught.value.job_id) == (queue, key, None)
    with pytest.raises(InvalidName):
        outbox.find("a b", "k")
    wrong: list[tuple[type[Exception], Any]]
    wrong = [(TypeError, 7), (TypeError, None), (ValueError, ""), (ValueError, "a\0b"), (ValueError, "\ud800")]
    for error, key in wrong:
        with pytest.raises(error, match="key"):
            outbox.find("mail", key)


def test_a_rolled_back_job_was_never_there(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        job = outbox.put(connection, "mail")
        assert outbox.get(job.id, connection=connection) == job
        connection.rollback()
    with pytest.raises(JobNotFound, match="never committed"):
        outbox.get(job.id)


def test_jobs_by_queue_status_and_group(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        mails = outbox.put_many(connection, "mail", [1, 2, 3], group="g")
        bills = outbox.put_many(connection, "bills", [4, 5])
        other = outbox.put(connection, "bills", 6, group="h", delay=9)
    outbox.cancel(mails[1].id)
    assert [job.id for job in outbox.jobs()] == [job.id for job in (*mails, *bills, other)]
    assert [job.payload for job in outbox.jobs("mail")] == [1, 2, 3]
    assert [job.payload for job in outbox.jobs("mail", status="ready")] == [1, 3]
    assert [job.payload for job in outbox.jobs(status="cancelled")] == [2]
    assert [job.payload for job in outbox.jobs(group="g", status="ready")] == [1, 3]
    assert [job.payload for job in outbox.jobs("bills", group="h", status="ready")] == [6]
    assert outbox.jobs("bills", group="g") == outbox.jobs("nobody") == outbox.jobs(status="dead") == []


def test_jobs_page_by_page(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        ids = [job.id for job in outbox.put_many(connection, "mail", list(range(250)))]
    assert [job.id for job in outbox.jobs()] == ids[:100]
    found: list[int] = []
    while page := outbox.jobs("mail", limit=80, after_id=found[-1] if found else 0):
        found += [job.id for job in page]
    assert found == ids
    assert outbox.jobs(limit=0) == []
    assert len(outbox.jobs(limit=1 << 70)) == 250
    assert outbox.jobs(after_id=1 << 70) == []
    assert len(outbox.jobs(after_id=-(1 << 70))) == 100


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"status": "finished"}),
        (ValueError, {"status": 7}),
        (ValueError, {"limit": -1}),
        (TypeError, {"limit": 1.5}),
        (TypeError, {"limit": None}),
        (TypeError, {"after_id": "1"}),
        (InvalidName, {"queue": "a b"}),
        (InvalidName, {"queue": 7}),
        (ValueError, {"group": ""}),
        (TypeError, {"group": 7}),
    ],
    ids=str,
)
def test_wrong_arguments_of_jobs(outbox: Outbox, error: type[Exception], arguments: dict[str, Any]) -> None:
    with pytest.raises(error):
        outbox.jobs(**arguments)


def test_errors_the_oldest_failure_first(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    with outbox.begin() as connection:
        jobs = outbox.put_many(connection, "mail", list(range(4)))
        bill = outbox.put(connection, "bills")
    claimed = {each.id: each for each in claimant.claim("mail", "bills")}
    for job, is_dead in ((jobs[2], False), (bill, True), (jobs[0], True), (jobs[3], False)):
        clock.advance(1)
        claimant.fail(claimed[job.id], is_dead=is_dead, seconds=1)
    clock.advance(10)
    (again,) = claimant.claim(status="error", jobs=1)
    assert again.id == jobs[2].id
    assert [job.id for job in outbox.errors()] == [bill.id, jobs[0].id, jobs[3].id]
    claimant.fail(again)  # its first failure is the oldest
    assert [job.id for job in outbox.errors()] == [jobs[2].id, bill.id, jobs[0].id, jobs[3].id]
    assert [job.id for job in outbox.errors("mail")] == [jobs[2].id, jobs[0].id, jobs[3].id]
    assert outbox.errors("nobody") == []
    outbox.cancel(bill.id)
    assert bill.id not in [job.id for job in outbox.errors()]
    for wrong in ("a b", 7):
        with pytest.raises(InvalidName):
            outbox.errors(wrong)  # type: ignore[arg-type]


# -- retry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
def test_retry(outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str) -> None:
    there = in_status(outbox, claimant, status, key="k", priority=3)
    clock.advance(7)
    is_retried = status in ("error", "dead", "cancelled", "done")
    assert outbox.retry(there.id) is is_retried
    found = outbox.get(there.id)
    if not is_retried:
        assert found == there
        return
    assert (found.status, found.tries, found.due_ms) == ("ready", 0, START_MS + 7000)
    assert (found.error, found.first_error_ms, found.started_ms, found.finished_ms) == (None, None, None, None)
    assert (found.payload, found.key, found.priority, found.added_ms) == ("old", "k", 3, START_MS)
    assert claimant.ids() == [there.id]
    assert outbox.get(there.id).tries == 1


@pytest.mark.parametrize("status", ["error", "dead", "cancelled", "done"])
def test_retry_all(outbox: Outbox, claimant: Claimant, status: str) -> None:
    jobs = [in_status(outbox, claimant, each) for each in STATUSES if each not in ("running", "ready")]
    wanted = [job.id for job in jobs if job.status == status]
    assert outbox.retry_all("bills", status) == (0 if status != "done" else outbox.retry_all("bills", "done"))
    arguments = () if status == "dead" else (status,)
    assert outbox.retry_all("mail", *arguments) == 1
    assert [job.id for job in outbox.jobs("mail", status="ready")] == wanted
    assert outbox.retry_all("mail", *arguments) == 0


@pytest.mark.parametrize("status", ["ready", "waiting", "running", "all", None, ""])
def test_retry_all_of_what_has_not_ended(outbox: Outbox, status: Any) -> None:
    with pytest.raises(ValueError, match="error, dead, cancelled or done"):
        outbox.retry_all("mail", status)
    with pytest.raises(InvalidName):
        outbox.retry_all("a b")


# -- cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
def test_cancel(outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str) -> None:
    there = in_status(outbox, claimant, status)
    clock.advance(7)
    is_cancelled = status in ("ready", "waiting", "error", "dead")
    assert outbox.cancel(there.id) is is_cancelled
    found = outbox.get(there.id)
    if not is_cancelled:
        assert found == there
        return
    assert (found.status, found.finished_ms, found.tries) == ("cancelled", START_MS + 7000, there.tries)
    assert outbox.cancel(there.id) is False
    assert claimant.ids() == claimant.ids(status="error") == []


def test_what_is_cancelled_while_it_runs_is_not(outbox: Outbox, claimant: Claimant) -> None:
    job = put(outbox)
    (claimed,) = claimant.claim()
    assert outbox.cancel(job.id) is False
    assert claimant.done(claimed) == {job.id}


def test_mending_in_the_transaction_of_a_caller(outbox: Outbox, claimant: Claimant) -> None:
    job = in_status(outbox, claimant, "dead")
    with outbox.begin() as connection:
        assert outbox.retry(job.id, connection=connection)
        assert outbox.get(job.id, connection=connection).status == "ready"
        connection.rollback()
    assert outbox.get(job.id).status == "dead"


# -- prune -----------------------------------------------------------------------------------------------------------

KEPT = {"done": 10, "cancelled": 10, "dead": 20}


@pytest.mark.parametrize("status", STATUSES)
def test_prune_deletes_what_was_kept_long_enough(
    outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str
) -> None:
    outbox.queue("mail", keep_done=10, keep_dead=20)
    job = in_status(outbox, claimant, status)
    left = len(outbox.jobs())
    clock.advance(KEPT.get(status, 1 << 30) - 0.001)
    assert outbox.prune() == 0
    clock.advance(0.001)
    assert outbox.prune() == (1 if status in KEPT else 0)
    assert len(outbox.jobs()) == left - (status in KEPT)
    if status in KEPT:
        with pytest.raises(JobNotFound, match="keep_done"):
            outbox.get(job.id)


def test_what_is_kept_for_ever(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    """Dead ones, by default; and jobs of queues that are not known here, which only their owners delete."""
    outbox.queue("elsewhere")
    dead = in_status(outbox, claimant, "dead")
    put(outbox, "bills")
    claimant.done(*claimant.claim("bills"))
    with Outbox(outbox.core.open_store().database.engine, clock=clock) as other:  # type: ignore[attr-defined]
        other.queue("mail", keep_done=None)
        clock.advance(10 * 365 * 86_400)
        assert other.prune() == 0
    outbox.queue("bills", keep_done=float("inf"))
    assert outbox.prune() == 0
    outbox.queue("bills")
    assert outbox.prune() == 0  # declared again without options: what it had stays
    assert outbox.get(dead.id).status == "dead"


def test_the_defaults(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    in_status(outbox, claimant, "done")
    clock.advance(7 * 86_400 - 1)
    assert outbox.prune() == 0
    clock.advance(1)
    assert outbox.prune() == 1


def test_keep_none_at_all(outbox: Outbox, claimant: Claimant) -> None:
    outbox.queue("mail", keep_done=0, keep_dead=0)
    for status in ("done", "dead", "cancelled"):
        in_status(outbox, claimant, status)
    assert outbox.prune() == 3


@pytest.mark.parametrize("status", ["done", "dead", "cancelled"])
def test_prune_never_deletes_what_another_job_waits_for(
    outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str
) -> None:
    outbox.queue("mail", keep_done=0, keep_dead=0)
    first = in_status(outbox, claimant, status if status != "done" else "ready")
    waiting = put(outbox, "bills", depends_on=first)
    if status == "done":  # as if the mark had overlapped with the put
        with outbox.begin() as connection:
            connection.exec_driver_sql("UPDATE kestrel_jobs SET status = 'done', finished_ms = 0 WHERE queue = 'mail'")
    free = in_status(outbox, claimant, "cancelled")
    clock.advance(100)
    assert outbox.prune() == 1
    assert [job.id for job in outbox.jobs()] == [first.id, waiting.id]
    assert free.id not in [job.id for job in outbox.jobs()]
    assert outbox.cancel(waiting.id)
    assert outbox.prune() == 1


def test_prune_in_slices(outbox: Outbox, claimant: Claimant, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox.queue("mail", keep_done=0)
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", [1] * (2 * admin.SLICE + 5))
    while claimed := claimant.claim(jobs=1000):
        claimant.done(*claimed)
    slices: list[int] = []
    store = outbox.core.open_store()
    perform = store.perform

    def watched(*args: Any, **kw: Any) -> Any:
        slices.append(perform(*args, **kw))
        return slices[-1]

    monkeypatch.setattr(store, "perform", watched)
    assert outbox.prune() == 2 * admin.SLICE + 5
    assert [each for each in slices if each] == [admin.SLICE, admin.SLICE, 5]


# -- pauses ----------------------------------------------------------------------------------------------------------


def test_a_pause_is_seen_by_all(make_outbox: MakeOutbox, outbox: Outbox) -> None:
    put(outbox, "mail")
    outbox.pause("mail")
    other = Claimant(make_outbox())
    assert other.ids() == []
    other.outbox.resume("mail")
    assert len(Claimant(outbox).ids()) == 1
    outbox.resume("nobody")
    outbox.pause("somebody")
    with pytest.raises(InvalidName):
        outbox.pause("a b")
    with pytest.raises(InvalidName):
        outbox.resume(None)  # type: ignore[arg-type]


def test_what_runs_goes_on_in_a_pause(outbox: Outbox, claimant: Claimant) -> None:
    job = put(outbox)
    (claimed,) = claimant.claim()
    outbox.pause("mail")
    assert claimant.renew(claimed) == {job.id}
    assert claimant.done(claimed) == {job.id}


def test_a_pause_that_is_rolled_back(outbox: Outbox, claimant: Claimant) -> None:
    put(outbox)
    with outbox.begin() as connection:
        outbox.pause("mail", connection=connection)
        connection.rollback()
    assert len(claimant.ids()) == 1
