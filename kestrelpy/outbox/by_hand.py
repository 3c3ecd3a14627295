"""``retry_one``: run one failed job in the calling thread or task, without a running outbox."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING

from kestrelpy.outbox import admin, claims
from kestrelpy.outbox.errors import JobNotFound, UnknownQueue
from kestrelpy.outbox.execution import Attempt, Outcome, call_hooks
from kestrelpy.outbox.job import ID, Job
from kestrelpy.outbox.saving import save
from kestrelpy.outbox.sql import Claim
from kestrelpy.outbox.transactions import arun_within, run_within

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.queues import QueueConsumer

__all__ = ["aretry_one", "retry_one"]


def retry_one(core: OutboxCore, consumer: QueueConsumer) -> Job | None:
    """Run the job of the queue that fails longest, due or not, worn out or not; as it is afterwards.

    An interrupt of the handler is its failure, and is raised again once that is saved: it was meant for the caller.
    """
    store = core.open_store()
    attempt = _attempt(core, consumer, store.perform(None, admin.oldest_error, consumer.queue))
    if attempt is None:
        return None
    clock = core.time.monotonic
    rows = store.perform(None, claims.claim_failed, attempt.id, _claim(core, attempt))
    if not rows:
        return None  # somebody else runs it, or has dealt with it
    attempt.row = rows[0]
    if consumer.is_async:
        outcome = asyncio.run(_arun_apart(core, attempt))
    elif consumer.options.transactional:
        outcome = run_within(store, attempt, clock)
    else:
        outcome = attempt.run(clock)
    found = _afterwards(core, outcome, save(store, [outcome]), attempt)
    if isinstance(outcome.exception, KeyboardInterrupt):
        raise outcome.exception
    return found


async def aretry_one(core: OutboxCore, consumer: QueueConsumer) -> Job | None:
    """``retry_one`` for asyncio: an ``async`` handler runs on this loop, a ``def`` one on a thread."""
    if not consumer.is_async:
        return await asyncio.to_thread(retry_one, core, consumer)
    store = core.open_store()
    attempt = _attempt(core, consumer, await store.aperform(None, admin.oldest_error, consumer.queue))
    if attempt is None:
        return None
    rows = await store.aperform(None, claims.claim_failed, attempt.id, _claim(core, attempt))
    if not rows:
        return None
    attempt.row = rows[0]
    outcome = await _arun(core, attempt)
    saved = await asyncio.to_thread(save, store, [outcome])
    found = await asyncio.to_thread(_afterwards, core, outcome, saved, attempt)
    task = asyncio.current_task()
    if isinstance(outcome.exception, asyncio.CancelledError) and task is not None and task.cancelling():
        raise outcome.exception
    return found


async def _arun_apart(core: OutboxCore, attempt: Attempt) -> Outcome:
    async with core.open_store().on_this_loop():
        return await _arun(core, attempt)


async def _arun(core: OutboxCore, attempt: Attempt) -> Outcome:
    clock = core.time.monotonic
    if attempt.consumer.options.transactional:
        coroutine = arun_within(core.open_store(), attempt, clock, lambda: False)
    else:
        coroutine = attempt.arun(clock)
    return await asyncio.get_running_loop().create_task(coroutine, context=Context())


def _attempt(core: OutboxCore, consumer: QueueConsumer, rows: Sequence[Sequence[Any]]) -> Attempt | None:
    if consumer.handler is None:
        raise UnknownQueue(consumer.queue)
    return Attempt(core, consumer, rows[0], core.token()) if rows else None


def _claim(core: OutboxCore, attempt: Attempt) -> Claim:
    """With a lease for as long as a handler may take: nobody renews it."""
    seconds = min(max(core.settings.lease, attempt.consumer.options.hung_after), 1 << 32)
    return Claim(worker=core.worker, token=attempt.token, lease_ms=round(seconds * 1000), jobs=1)


def _afterwards(core: OutboxCore, outcome: Outcome, saved: set[int], attempt: Attempt) -> Job | None:
    if attempt.id in saved:
        call_hooks(outcome)
    for queue in outcome.freed:
        core.open_store().perform(None, claims.notify, queue)
    try:
        return core.job(core.open_store().perform(None, admin.get, attempt.row[ID]))
    except JobNotFound:
        return None  # done, and deleted with its mark
