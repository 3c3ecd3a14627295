"""Clocks that jump and clients that disagree: on SQLite leases move by the jump, and an outcome that comes too late is
refused; on PostgreSQL the server's clock decides, and nothing happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kestrelpy import SystemClock
from kestrelpy.outbox.outbox import Outbox
from tests.support.patience import until

LEASE = 30.0
HOUR = 3600.0


class JumpingClock(SystemClock):
    """The system's, but for what the clock on the wall says."""

    ahead_ns = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.ahead_ns

    def jump(self, seconds: float) -> None:
        self.ahead_ns += round(seconds * 1e9)


class Consumer:
    """An outbox with a clock of its own, and a handler that waits until it may end."""

    def __init__(self, url: str, clock: JumpingClock | None) -> None:
        self.clock = clock or JumpingClock()
        self.begun: list[str] = []
        self.may_end = threading.Event()
        self.outbox = Outbox(url, clock=clock, lease=LEASE, backoff=0.0)
        self.outbox.add_consumer("q", self._handle)
        self.outbox.create_tables()

    def _handle(self, name: str) -> None:
        self.begun.append(name)
        assert self.may_end.wait(20)

    def start(self) -> None:
        self.outbox.start(threads=2, poll_interval=0.05, retry_interval=0.01)

    def put(self, name: str) -> int:
        with self.outbox.begin() as connection:
            return self.outbox.put(connection, "q", name).id


@pytest.fixture
def consumers() -> Iterator[Callable[..., Consumer]]:
    """``consumers(url, clock)``; all are stopped at the end."""
    with ExitStack() as stack:

        def make(url: str, clock: JumpingClock | None = None) -> Consumer:
            made = Consumer(url, clock)
            stack.callback(made.outbox.close)
            stack.callback(made.may_end.set)
            return made

        yield make


def test_an_outcome_is_refused_whose_lease_a_jump_has_taken(
    sqlite_url: str, consumers: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    """The second client's clock is an hour ahead: to it the lease is over."""
    first, second = consumers(sqlite_url, JumpingClock()), consumers(sqlite_url, JumpingClock())
    first.start()
    job_id = first.put("job")
    until(lambda: first.begun)
    second.clock.jump(HOUR)
    second.start()
    until(lambda: second.begun)
    assert first.outbox.get(job_id).tries == 2
    first.may_end.set()
    until(lambda: "came too late" in caplog.text)
    job = second.outbox.get(job_id)
    assert (job.status, job.tries) == ("running", 2)  # the second one's
    assert job.error is not None
    assert "its lease was over" in job.error
    second.may_end.set()
    until(lambda: second.outbox.get(job_id).status == "done")
    assert second.outbox.get(job_id).error is None
    assert (first.begun, second.begun) == (["job"], ["job"])


def test_a_failure_is_refused_whose_lease_a_jump_has_taken(
    sqlite_url: str, consumers: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    """It does not put the job that somebody else has done by then into error."""
    first, second = consumers(sqlite_url, JumpingClock()), consumers(sqlite_url, JumpingClock())
    called: list[object] = []

    def fails(name: str) -> None:
        first._handle(name)
        raise RuntimeError(name)

    first.outbox.add_consumer("q", fails, replace=True, on_error=lambda job, error: called.append(job))
    first.start()
    job_id = first.put("job")
    until(lambda: first.begun)
    second.clock.jump(HOUR)
    second.may_end.set()
    second.start()
    until(lambda: second.outbox.get(job_id).status == "done")
    first.may_end.set()
    until(lambda: "came too late" in caplog.text)
    assert first.outbox.stop()
    assert second.outbox.get(job_id).status == "done"
    assert not called


def test_a_clock_that_jumps_ahead_takes_the_lease_of_its_own_process(
    sqlite_url: str, consumers: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    """One process, whose clock jumps while a handler runs: the job runs again, and one outcome is saved."""
    only = consumers(sqlite_url, JumpingClock())
    only.start()
    job_id = only.put("job")
    until(lambda: only.begun)
    only.clock.jump(HOUR)
    until(lambda: len(only.begun) == 2 or "came too late" in caplog.text or _is_renewed(only, job_id))
    only.may_end.set()
    until(lambda: only.outbox.get(job_id).status == "done")
    assert only.outbox.get(job_id).tries == len(only.begun)


def _is_renewed(consumer: Consumer, job_id: int) -> bool:
    """Before the sweep has seen the jump: then the lease is as long as ever, and the job goes on."""
    return consumer.outbox.get(job_id).due_ms > consumer.clock.time_ns() // 1_000_000


def test_a_clock_that_jumps_back_holds_up_what_is_due(sqlite_url: str, consumers: Callable[..., Consumer]) -> None:
    """Due times move by the jump: a job that was put before it is due when the clock is there again."""
    only = consumers(sqlite_url, JumpingClock())
    before = only.put("before")
    only.clock.jump(-HOUR)
    after = only.put("after")
    only.may_end.set()
    only.start()
    until(lambda: only.outbox.get(after).status == "done")
    assert only.outbox.get(before).status == "ready"
    only.clock.jump(HOUR)
    until(lambda: only.outbox.get(before).status == "done")
    assert only.begun == ["after", "before"]


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_the_server_decides_on_postgresql(jump: float, postgres_url: str, consumers: Callable[..., Consumer]) -> None:
    """A client whose own clock is wrong by an hour puts, claims and sweeps as all others do."""
    right, wrong = consumers(postgres_url), consumers(postgres_url)
    wrong.clock.jump(jump)
    wrong.outbox.core.time = wrong.clock  # as if it were the machine's
    right.start()
    job_id = right.put("mine")
    until(lambda: right.begun)
    wrong.may_end.set()
    wrong.start()
    other = wrong.put("yours")
    until(lambda: "yours" in right.begun + wrong.begun)
    right.may_end.set()
    until(lambda: {right.outbox.get(each).status for each in (job_id, other)} == {"done"})
    assert {right.outbox.get(each).tries for each in (job_id, other)} == {1}
    assert abs(right.outbox.get(other).added_ms - right.outbox.get(job_id).added_ms) < 60_000
