"""``retry_one``: a failed job is run here and now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine

from kestrelpy.outbox import GiveUp, Outbox, UnknownQueue


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    made = Outbox(engine)
    made.create_tables()
    return made


def failed(outbox: Outbox, queue: str, payload: Any, seen: list[Any], **options: Any) -> int:
    """A dead job of a queue whose handler fails until ``seen`` has something."""

    def handler(value: Any) -> None:
        if not seen:
            raise ValueError("not yet")
        seen.append(value)

    outbox.add_consumer(queue, handler, max_retries=0, **options)
    with outbox.begin() as connection:
        job = outbox.put(connection, queue, payload)
    with outbox.running(poll_interval=0.01):
        while outbox.get(job.id).status != "dead":
            pass
    return job.id


def test_a_dead_job_runs_once_more(outbox: Outbox) -> None:
    seen: list[Any] = []
    job_id = failed(outbox, "mail", 7, seen)
    again = outbox.retry_one("mail")
    assert again is not None
    assert (again.id, again.status, again.tries) == (job_id, "dead", 2)
    seen.append("now")
    done = outbox.retry_one("mail")
    assert done is not None
    assert (done.status, done.tries, done.error, seen) == ("done", 3, None, ["now", 7])
    assert outbox.retry_one("mail") is None


def test_one_that_is_deleted_with_its_mark_is_none(outbox: Outbox) -> None:
    seen: list[Any] = []
    failed(outbox, "mail", 7, seen, keep_done=0)
    seen.append("now")
    assert outbox.retry_one("mail") is None
    assert seen == ["now", 7]
    assert not outbox.jobs()


def test_hooks_are_called(outbox: Outbox) -> None:
    called: list[str] = []
    failed(
        outbox,
        "mail",
        7,
        [],
        on_error=lambda job, error: called.append(f"error {job.status} {error}"),
        on_dead=lambda job: called.append(f"dead {job.tries}"),
    )
    del called[:]
    outbox.retry_one("mail")
    assert called == ["error dead not yet", "dead 2"]


def test_an_async_handler_runs_too(outbox: Outbox) -> None:
    failed(outbox, "mail", 7, [])
    seen: list[Any] = []

    async def handler(value: Any) -> None:
        await asyncio.sleep(0)
        seen.append(value)

    outbox.add_consumer("mail", handler, replace=True)
    done = outbox.retry_one("mail")
    assert done is not None
    assert (done.status, seen) == ("done", [7])


def test_a_transactional_one_is_one_transaction(outbox: Outbox) -> None:
    failed(outbox, "mail", 7, [])

    def handler(value: Any, connection: Any) -> None:
        outbox.put(connection, "mail", "child")
        if value == 7 and len(outbox.jobs(connection=connection, status="ready")) == 1 and not fails:
            return
        raise ValueError("rolled back")

    fails = [True]
    outbox.add_consumer("mail", handler, replace=True, transactional=True, max_retries=0)
    still = outbox.retry_one("mail")
    assert still is not None
    assert still.status == "dead"
    assert not outbox.jobs(status="ready")
    fails.clear()
    done = outbox.retry_one("mail")
    assert done is not None
    assert done.status == "done"
    assert [job.payload for job in outbox.jobs(status="ready")] == ["child"]


def test_a_queue_that_is_not_consumed_here(outbox: Outbox) -> None:
    outbox.queue("mail")
    with pytest.raises(UnknownQueue):
        outbox.retry_one("mail")


def test_an_error_that_counts_as_done_calls_no_hook(outbox: Outbox) -> None:
    told: list[BaseException] = []
    job_id = failed(outbox, "mail", 7, [], on_error=lambda _, error: told.append(error))
    told.clear()

    def handler(value: Any) -> None:
        raise FileExistsError

    options: dict[str, Any] = {"done_on": FileExistsError, "on_error": lambda _, error: told.append(error)}
    outbox.add_consumer("mail", handler, replace=True, **options)
    again = outbox.retry_one("mail")
    assert again is not None
    assert (again.id, again.status) == (job_id, "done")
    assert told == []


def test_a_dead_job_that_is_not_kept_is_deleted_with_its_mark(outbox: Outbox) -> None:
    def handler(value: Any) -> None:
        raise GiveUp("no")

    outbox.add_consumer("mail", handler, keep_dead=0)
    with outbox.begin() as connection:
        gone = outbox.put(connection, "mail", 1)
        kept = outbox.put(connection, "mail", 2)
        outbox.put(connection, "mail", 3, depends_on=kept)
    with outbox.running(poll_interval=0.01):
        while outbox.jobs(status="ready") or outbox.jobs(status="running"):
            pass
    assert [job.id for job in outbox.jobs(status="dead")] == [kept.id]
    assert gone.id not in {job.id for job in outbox.jobs()}
