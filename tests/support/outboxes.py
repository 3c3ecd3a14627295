"""What tests of a running outbox share: quick intervals, puts in a transaction of their own, waits for a status."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kestrelpy.outbox import Job, Outbox
from tests.support.patience import PATIENCE, until

QUICK: dict[str, Any] = {"threads": 2, "poll_interval": 0.05, "retry_interval": 0.01}
"""For ``start``: where a test needs several passes."""
ALONE: dict[str, Any] = {"threads": 2, "poll_interval": 1000.0, "retry_interval": 0.01}
"""For ``start``: polling finds nothing within the patience of a test."""
KINDS = ["def", "async"]


def as_kind(kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """``work`` as a handler that is ``def`` or ``async def``."""
    if kind == "def":
        return work

    @functools.wraps(work)
    async def handler(*arguments: Any) -> Any:
        return work(*arguments)

    return handler


@contextlib.contextmanager
def running(outbox: Outbox, queues: Any = None, **options: Any) -> Iterator[None]:
    """``outbox.running``, and nothing may be left running at the end."""
    outbox.start(queues, **options)
    try:
        yield
    finally:
        is_done = outbox.stop(timeout=PATIENCE / 4)
    assert is_done


def put(outbox: Outbox, queue: str | Callable[..., Any], payload: Any = None, **options: Any) -> Job:
    """In a transaction of its own."""
    with outbox.begin() as connection:
        return outbox.put(connection, queue, payload, **options)


def put_each(outbox: Outbox, queue: str, payloads: Any, **options: Any) -> list[Job]:
    """In one transaction."""
    with outbox.begin() as connection:
        return outbox.put_many(connection, queue, list(payloads), **options)


def becomes(outbox: Outbox, job: Job, status: str) -> Job:
    """Wait until a job is in ``status``."""
    until(lambda: outbox.get(job.id).status == status)
    return outbox.get(job.id)


def all_become(outbox: Outbox, queue: str, status: str) -> list[Job]:
    """Wait until all jobs of a queue are in ``status``."""
    until(lambda: all(job.status == status for job in outbox.jobs(queue, limit=10_000)))
    return outbox.jobs(queue, limit=10_000)


def is_idle(outbox: Outbox, asked: list[str]) -> bool:
    """Whether a running outbox has asked its database nothing for a while, and plans nothing within a second. How soon
    after a look it looks ahead again depends on how long that look has taken.
    """
    if not _plans_nothing(outbox):
        return False
    before = len(asked)
    threading.Event().wait(0.15)
    return len(asked) == before and _plans_nothing(outbox)


def _plans_nothing(outbox: Outbox) -> bool:
    runner = outbox._lifecycle._runner
    assert runner is not None
    agenda = runner._agenda
    with agenda._lock:
        first = min(agenda._planned.values())
    return first > agenda._clock() + 1.0


def threads_left() -> list[str]:
    """The names of the threads that outboxes have here."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kestrelpy-outbox"))


class Steps:
    """What several threads have seen, in order, and how to wait for it."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._changed = threading.Condition()

    def add(self, what: Any) -> None:
        with self._changed:
            self._seen.append(what)
            self._changed.notify_all()

    @property
    def seen(self) -> list[Any]:
        with self._changed:
            return list(self._seen)

    def wait(self, count: int = 1) -> list[Any]:
        """Until there are so many, and no longer than the patience."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._seen) >= count, PATIENCE), self._seen
            return list(self._seen)


class Records(logging.Handler):
    """The records of ``kestrelpy.outbox``."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, *words: str) -> list[logging.LogRecord]:
        """Those whose text has all these words."""
        return [each for each in list(self.records) if all(word in each.getMessage() for word in words)]


@contextlib.contextmanager
def logged() -> Iterator[Records]:
    """Collect what is logged in the block."""
    records = Records()
    log = logging.getLogger("kestrelpy.outbox")
    before = log.level
    log.addHandler(records)
    log.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        log.removeHandler(records)
        log.setLevel(before)
