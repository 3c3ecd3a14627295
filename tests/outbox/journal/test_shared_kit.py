"""Tests of the test kit that hold without a database, too. They are collected here once more, with ``bind`` of this
module: a work queue in memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.outbox import JobTooBig, NotSupported, Outbox, OutboxError
from kestrelpy.outbox.testing import VirtualOutbox, virtual
from kestrelpy.work import WorkQueue
from tests.outbox import test_testing
from tests.outbox.test_testing import kit, outbox

__all__ = ["kit", "outbox"]

NAMES = (
    "the_next_one_is_the_most_urgent_and_first_runs_come_before_retries a_failure_is_expected_and_returned "
    "another_status_than_the_expected_one_says_why a_handler_says_later_and_that_is_no_failure "
    "what_counts_as_done_is_done a_paused_queue_is_hinted_at a_payload_that_does_not_decode_is_a_failure "
    "context_and_current_job_are_those_of_the_job hooks_come_after_the_state_is_saved "
    "a_lost_mark_leaves_the_job_running_until_its_lease_is_over the_outcome_of_a_failure_is_lost_too "
    "a_job_that_was_taken_comes_again_after_its_lease_and_wears_out "
    "an_outcome_that_comes_after_the_lease_is_refused run_once a_pass_stops_at_the_failure_of_a_retry "
    "successes_of_retries_go_on_at_once drain_moves_the_clock_to_each_due_time "
    "drain_of_one_queue_and_of_a_paused_one async_handlers_run_on_a_loop_of_their_own "
    "aconsume_runs_on_the_callers_loop a_cancelled_aconsume_gives_the_job_back jobs_are_all_of_them"
)
globals().update({f"test_{name}": getattr(test_testing, f"test_{name}") for name in NAMES.split()})


@pytest.fixture
def bind() -> Any:
    """What ``virtual`` is bound to."""
    return WorkQueue


def test_an_outbox_on_a_work_queue_has_one_in_memory(tmp_path: Path) -> None:
    with WorkQueue(tmp_path, max_job_bytes=200) as queue:
        real = Outbox(queue)
        seen: list[Any] = []
        real.add_consumer("mail", seen.append)
        real.put(None, "mail", "real")
        with virtual(real) as test:
            assert test.jobs() == []
            real.put(None, "mail", "virtual")
            test.put("mail", "too", delay=1)
            assert len(test.drain()) == 2
            with pytest.raises(JobTooBig):
                test.put("mail", "x" * 200)
            with pytest.raises(NotSupported):
                real.add_consumer("orders", seen.append, transactional=True)
        assert seen == ["virtual", "too"]
        assert [job.payload for job in real.jobs()] == ["real"]
        real.close()


def test_a_work_queue_has_a_clock_of_its_own(outbox: Outbox) -> None:
    with WorkQueue(None) as queue, pytest.raises(OutboxError, match="has a clock of its own"), virtual(outbox, queue):
        pass


def test_what_it_can_not_have_is_said_when_the_block_begins(outbox: Outbox) -> None:
    outbox.add_consumer("orders", print, transactional=True)
    with pytest.raises(NotSupported, match="transactional"), virtual(outbox, WorkQueue):
        pass
    with virtual(outbox):
        pass


def test_force_retry_of_a_job_that_is_deleted(outbox: Outbox, kit: VirtualOutbox) -> None:
    seen: list[Any] = []

    def handler(payload: Any) -> int:
        seen.append(payload)
        return len(seen)

    outbox.add_consumer("mail", handler)
    job = kit.put("mail", {"n": 1}, key="k", group="g", priority=3)
    assert kit.consume("mail") == 1
    assert kit.jobs() == []
    assert kit.force_retry("mail") == 2
    assert seen == [{"n": 1}] * 2
    assert kit.put("mail", key="k").id == job.id + 1


async def no_threads(outbox: Outbox) -> None:
    async with outbox.abegin() as tx:
        await outbox.aput(tx, "mail", 1)
    await outbox.aput(None, "mail", 2)
    assert len(await outbox.ajobs("mail")) == 2


def test_the_async_twins_make_no_thread(outbox: Outbox, kit: VirtualOutbox) -> None:
    import asyncio

    outbox.queue("mail")
    before = set(threading.enumerate())
    asyncio.run(no_threads(outbox))
    assert set(threading.enumerate()) <= before
    assert [job.payload for job in kit.jobs()] == [1, 2]
