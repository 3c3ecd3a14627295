"""``transactional`` handlers: what they write and the mark of their job are one transaction, so that they have had
their effect exactly once in that database, however often they run.

The mark comes last: until then the row is not locked, and its lease can be renewed. A mark that is refused rolls the
handler's writes back. An error of the commit is a failure of the job; if the commit took place all the same, the token
is gone, and that failure is refused.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox._logging import log
from kestrelpy.outbox.claims import Finish, finish
from kestrelpy.outbox.connections import fetch_on, given_async
from kestrelpy.outbox.errors import OutboxError
from kestrelpy.outbox.execution import Attempt, Outcome, outcome_of
from kestrelpy.outbox.sql import arun, run

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from kestrelpy.outbox.database import Database

__all__ = ["arun_within", "run_within"]


PAUSE_MS = 1000
"""A job whose transaction could not begin comes again then."""


class _RolledBack(Exception):
    """The handler's transaction is rolled back, and ``outcome`` is what came of the attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("rolled back")
        self.outcome = outcome


class _CommitGuard:
    """Refuses a commit until ``is_over``: a handler that commits by itself would have its effects at each of its runs,
    and its job could not be marked.
    """

    def __init__(self, connection: Connection | None) -> None:
        from sqlalchemy import event

        self.is_over = False
        event.listen(connection, "commit", self._check)

    def _check(self, connection: Connection) -> None:
        if not self.is_over:
            driver: Any = connection.connection.dbapi_connection
            driver.rollback()  # SQLAlchemy takes a commit that raises for the end, and gives the connection to the next
            raise OutboxError(
                "a transactional handler must not commit: what it writes is committed with the mark of its job"
            )


def run_within(store: Any, attempt: Attempt, clock: Callable[[], float]) -> Outcome:
    """Run a ``def`` handler in a transaction that marks its job, too."""
    database: Database = store.database

    def work(connection: Connection) -> Outcome:
        attempt.connection = connection
        guard = _CommitGuard(connection)
        outcome = _committable(attempt.run(clock))
        return _saved(outcome, guard, *run(finish(database.sql, _mark_of(attempt)), fetch_on(connection)))

    try:
        return database.transact_apart(work)
    except _RolledBack as rolled_back:
        return rolled_back.outcome
    except BaseException as error:
        return _failed(attempt, error, clock)
    finally:
        attempt.connection = None


async def arun_within(
    store: Any, attempt: Attempt, clock: Callable[[], float], is_stopping: Callable[[], bool]
) -> Outcome:
    """Run an ``async`` handler in a transaction that marks its job, too. With a sync engine its connection is sync."""
    database: Database = store.database
    try:
        if database.async_engine is None:
            async with _turn():
                with database.begin() as connection:
                    database.begin_writing(connection)
                    attempt.connection = connection
                    guard = _CommitGuard(connection)
                    outcome = _committable(await attempt.arun(clock, is_stopping))
                    return _saved(outcome, guard, *run(finish(database.sql, _mark_of(attempt)), fetch_on(connection)))
        async with database.abegin() as connection:
            await connection.run_sync(database.begin_writing)
            attempt.connection = connection
            guard = _CommitGuard(connection.sync_connection)
            outcome = _committable(await attempt.arun(clock, is_stopping))
            fetch = (await given_async(connection)).fetch
            return _saved(outcome, guard, *await arun(finish(database.sql, _mark_of(attempt)), fetch))
    except _RolledBack as rolled_back:
        return rolled_back.outcome
    except BaseException as error:
        return _failed(attempt, error, clock, is_stopping)
    finally:
        attempt.connection = None


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


def _turn() -> asyncio.Lock:
    """One at a time on each loop. A second handler with a sync connection could wait, on the thread of the loop, for
    a lock of the first one's transaction, which needs that thread to go on.
    """
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Lock()
    return _turns[loop]


def _failed(
    attempt: Attempt, error: BaseException, clock: Callable[[], float], is_stopping: Callable[[], bool] = lambda: False
) -> Outcome:
    """The transaction could not begin: the job is given back, as its handler was not called. Or it could not end."""
    if isinstance(error, asyncio.CancelledError) and (attempt.started is None or is_stopping()):
        return Outcome(attempt, "back")
    if attempt.started is None:
        log.warning("job %s of queue %r waits for a transaction: %s", attempt.id, attempt.consumer.queue, error)
        return Outcome(attempt, "back", delay_ms=PAUSE_MS)
    return outcome_of(attempt, error, clock() - attempt.started)


def _committable(outcome: Outcome) -> Outcome:
    """Raises ``_RolledBack`` for what must not be committed: also an error that ``done_on`` counts as success."""
    if outcome.status != "done" or outcome.exception is not None:
        raise _RolledBack(outcome)
    return outcome


def _mark_of(attempt: Attempt) -> Finish:
    what = Finish()
    (what.deleted if attempt.consumer.options.keep_done == 0 else what.done).append((attempt.id, attempt.token))
    return what


def _saved(outcome: Outcome, guard: _CommitGuard, saved: set[int], freed: list[str]) -> Outcome:
    if outcome.attempt.id not in saved:
        raise _RolledBack(outcome)  # its lease was over: the writer finds that the outcome is refused
    outcome.is_saved, outcome.freed = True, freed
    guard.is_over = True
    return outcome
