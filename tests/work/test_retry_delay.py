"""``WorkQueue(retry_delay=)``: when a job is ready again that was released without a delay."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue


def opened(clock: ManualClock, disk: MemoryDisk, **options: Any) -> WorkQueue:
    return WorkQueue("/work", "jobs", clock=clock, disk=disk, **options)


def test_it_is_for_a_release_without_a_delay_and_for_blocks_that_raise() -> None:
    clock = ManualClock(1_000_000)
    with opened(clock, MemoryDisk(), retry_delay=10) as queue, queue.session() as session:
        queue.put(b"job")
        session.reserve(0).release()
        for wait in (10.0, 10.0):
            assert queue.stats().delayed == 1
            clock.advance(wait - 0.5)
            assert queue.stats().ready == 0
            clock.advance(0.5)
            with pytest.raises(ZeroDivisionError), session.reserve(0):
                raise ZeroDivisionError
        clock.advance(10)
        session.reserve(0).release(delay=0)
        assert queue.stats().ready == 1
        job = session.reserve(0)
        session.release(job.id)
        assert queue.stats().delayed == 1


def test_it_is_a_function_of_the_attempts_and_survives_an_opening() -> None:
    clock, disk, counts = ManualClock(1_000_000), MemoryDisk(), []

    def delay(attempts: int) -> float:
        counts.append(attempts)
        return 2.0**attempts

    with opened(clock, disk, retry_delay=delay) as queue, queue.session() as session:
        queue.put(b"job")
        session.reserve(0).release()
        clock.advance(2)
        session.reserve(0).release()
    with opened(clock, disk) as queue, queue.session() as session:
        clock.advance(3.5)
        assert queue.stats().ready == 0
        clock.advance(0.5)
        session.reserve(0).delete()
    assert counts == [1, 2]


def test_one_that_gives_no_delay_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(1_000_000)
    for result in (-1, "soon", None, float("nan")):
        with opened(clock, MemoryDisk(), retry_delay=lambda _, result=result: result) as queue:
            queue.put(b"job")
            with caplog.at_level(logging.ERROR, "kestrelpy"), queue.session() as session:
                session.reserve(0).release()
            assert queue.stats().ready == 1
    assert caplog.text.count("retry_delay of a work queue gave no delay") == 4
    with pytest.raises(ValueError, match="retry_delay must be"):
        opened(clock, MemoryDisk(), retry_delay=-1)
