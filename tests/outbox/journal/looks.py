"""What the tests of an outbox on a work queue look at, and how its process dies."""

from __future__ import annotations

from typing import Any

from kestrelpy.outbox import Job, Outbox
from kestrelpy.outbox.journal_store import JournalStore, _bound
from kestrelpy.work import WorkQueue


def store_of(outbox: Outbox) -> JournalStore:
    """Of an outbox on a work queue."""
    store = outbox.core.open_store()
    assert isinstance(store, JournalStore)
    return store


def check(outbox: Outbox) -> None:
    """The invariants, if it is open."""
    if not outbox._is_closed and not store_of(outbox)._queue.closed:
        store_of(outbox)._jobs._check()
        store_of(outbox)._queue._check()


def die(outbox: Outbox) -> None:
    """Let its process die: nothing is given back. Its work queue is to be dealt with by the caller."""
    queue = store_of(outbox)._queue
    queue._abandon()
    _bound.discard(queue)


def put(outbox: Outbox, queue: str = "mail", payload: Any = None, **options: Any) -> Job:
    """Stored at once."""
    return outbox.put(None, queue, payload, **options)


def states(queue: WorkQueue, tube: str = "mail") -> dict[int, str]:
    """The state of each job of a tube, in the work queue."""
    return {stats.id: stats.state for stats in queue.jobs(tube)}
