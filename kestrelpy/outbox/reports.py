"""The operations that count and measure jobs, and the look at an outbox's health.

Source of the reports: yoltq's ``retry-stats`` and ``processing-time-stats``. As there, the age of a job is the time
since its put. The database does the work: what comes back is a row for each queue.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox._checks import check_number
from kestrelpy.outbox.errors import NotInTransaction, OutboxError
from kestrelpy.outbox.queues import check_name, check_text
from kestrelpy.outbox.results import Health, QueueCount, RetryStats, Times
from kestrelpy.outbox.sql import reading

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.sql import Compiler, Operation
    from kestrelpy.outbox.store import JobStore

__all__ = [
    "alook",
    "check_group",
    "check_optional",
    "group_progress",
    "health",
    "look",
    "processing_times",
    "retry_stats",
    "stats",
    "wanted",
    "wanted_times",
]

DAY_MS = 86_400_000
FOR_EVER_MS = 1 << 60
"""Longer than any job can be there. Subtracted from the time, it is still a number that a database can store."""
PATIENCE_MS = 10_000
"""How long a look at the health waits for PostgreSQL, say because a migration has locked the table."""
MAX_REASON = 300

_OF_QUEUE = " AND queue = :queue"
_STATS = "SELECT queue, status, count(*) FROM {jobs} GROUP BY queue, status"
_STATS_OF_QUEUE = "SELECT queue, status, count(*) FROM {jobs} WHERE queue = :queue GROUP BY queue, status"
_PROGRESS = """SELECT status, count(*) FROM {jobs}
WHERE queue = :queue AND job_group = :job_group AND job_group IS NOT NULL GROUP BY status"""
_YOUNG = " WHERE added_ms >= {now} - CAST(:age_ms AS bigint)"
_RETRY_STATS = (
    """SELECT queue,
    count(CASE WHEN status = 'done' THEN 1 END),
    sum(CASE WHEN tries > 1 THEN tries - 1 ELSE 0 END),
    count(CASE WHEN status IN ('error', 'dead') THEN 1 END),
    count(CASE WHEN status = 'running' THEN 1 END)
FROM {jobs}"""
    + _YOUNG
)
SPANS = {
    "total": "finished_ms - added_ms",
    "wait": "started_ms - due_ms",
    "run": "finished_ms - started_ms",
}
"""Of a done job; its ``due_ms`` is when it was due before its last claim."""
PERCENTS = (50, 90, 95, 99)
_FRACTIONS = ", ".join(f"{percent / 100}" for percent in PERCENTS)
_RANKS = ", ".join(f"max(CASE WHEN place = (jobs * {percent} + 99) / 100 THEN ms END)" for percent in PERCENTS)
_TIMES = {
    "postgresql": (
        "SELECT queue, count(*), min(ms), CAST(avg(ms) AS double precision), max(ms), "
        f"percentile_disc(CAST(ARRAY[{_FRACTIONS}] AS double precision[])) WITHIN GROUP (ORDER BY ms) FROM (",
        ") AS timed WHERE ms IS NOT NULL GROUP BY queue",
    ),
    "sqlite": (
        f"SELECT queue, count(*), min(ms), avg(ms), max(ms), {_RANKS} FROM (SELECT queue, ms, row_number() OVER "
        "(PARTITION BY queue ORDER BY ms) AS place, count(*) OVER (PARTITION BY queue) AS jobs FROM (",
        ") WHERE ms IS NOT NULL) GROUP BY queue",
    ),
}
_PATIENCE = f"SELECT set_config('statement_timeout', '{PATIENCE_MS}', true), set_config('jit', 'off', true)"
"""Compiling it takes four times as long as what it then does, which the planner can't know."""
_HEALTH = """WITH RECURSIVE ready_queue(queue) AS (
    SELECT min(j.queue) FROM {jobs} j WHERE j.status = 'ready' AND NOT j.held
    UNION ALL
    SELECT (SELECT min(j.queue) FROM {jobs} j WHERE j.status = 'ready' AND NOT j.held AND j.queue > q.queue)
    FROM ready_queue q WHERE q.queue IS NOT NULL
), level(queue, priority) AS (
    SELECT q.queue, (SELECT min(j.priority) FROM {jobs} j
                     WHERE j.queue = q.queue AND j.status = 'ready' AND NOT j.held)
    FROM ready_queue q WHERE q.queue IS NOT NULL
    UNION ALL
    SELECT l.queue, (SELECT min(j.priority) FROM {jobs} j
                     WHERE j.queue = l.queue AND j.status = 'ready' AND NOT j.held AND j.priority > l.priority)
    FROM level l WHERE l.priority IS NOT NULL
), first_due(due_ms) AS (
    SELECT (SELECT min(j.due_ms) FROM {jobs} j
            WHERE j.queue = l.queue AND j.status = 'ready' AND NOT j.held AND j.priority = l.priority
            AND j.due_ms <= {now})
    FROM level l WHERE l.priority IS NOT NULL
)
SELECT
    (SELECT count(*) FROM {jobs} WHERE status IN ('error', 'dead')
     AND first_error_ms <= {now} - CAST(:age_ms AS bigint)),
    (SELECT count(*) FROM {jobs} w JOIN {jobs} d ON d.id = w.depends_on
     WHERE w.status = 'waiting' AND d.status IN ('dead', 'cancelled')),
    (SELECT {now} - min(due_ms) FROM first_due)"""
"""The first due job of each priority of each queue is found by one look into an index, however many are ready."""


# -- what they are given ---------------------------------------------------------------------------------------------


def check_optional(queue: str | None) -> str | None:
    """The name of a queue, or ``None`` for all of them. Raises ``InvalidName``."""
    return None if queue is None else check_name(queue)


def check_group(group: object) -> str:
    """Raises ``ValueError``, ``TypeError``."""
    text = check_text("group", group)
    if text is None:
        raise TypeError("group must be a str, not None")
    return text


def wanted(age_days: float | None = 30, queue: str | None = None) -> tuple[int, str | None]:
    """The age in milliseconds (of ``None``: of all jobs), and the queue. Raises ``TypeError``, ``ValueError``,
    ``InvalidName``.
    """
    name = check_optional(queue)
    if age_days is None:
        return FOR_EVER_MS, name
    return int(min(check_number("age_days", age_days) * DAY_MS, FOR_EVER_MS)), name


def wanted_times(
    age_days: float | None = 30, queue: str | None = None, of: str = "total"
) -> tuple[int, str | None, str]:
    """``wanted``, and the span that ``of`` names. Raises the same."""
    if of not in SPANS:
        raise ValueError(f"of must be 'total', 'wait' or 'run', not {of!r}")
    return *wanted(age_days, queue), of


# -- the operations --------------------------------------------------------------------------------------------------


@reading
def stats(sql: Compiler, queue: str | None) -> Operation[list[QueueCount]]:
    """The jobs of each queue in each status."""
    rows = yield sql(_STATS if queue is None else _STATS_OF_QUEUE), {"queue": queue}
    return [QueueCount(*row) for row in sorted(map(tuple, rows))]


@reading
def group_progress(sql: Compiler, queue: str, group: str) -> Operation[dict[str, int]]:
    """The jobs of a group in each status."""
    rows = yield sql(_PROGRESS), {"queue": queue, "job_group": group}
    return dict(sorted((row[0], row[1]) for row in rows))


@reading
def retry_stats(sql: Compiler, age_ms: int, queue: str | None) -> Operation[dict[str, RetryStats]]:
    """Of the jobs that were put ``age_ms`` ago or later."""
    text = _RETRY_STATS + ("" if queue is None else _OF_QUEUE) + " GROUP BY queue"
    rows = yield sql(text), {**sql.time(), "age_ms": age_ms, "queue": queue}
    found = {}
    for name, ok, retries, errors, running in sorted(rows, key=itemgetter(0)):
        found[name] = RetryStats(ok, retries, errors, running, 100 * retries / ok if ok else None)
    return found


@reading
def processing_times(sql: Compiler, age_ms: int, queue: str | None, of: str) -> Operation[dict[str, Times]]:
    """Of the done jobs that were put ``age_ms`` ago or later."""
    before, after = _TIMES[sql.flavour.name]
    text = f"{before}SELECT queue, {SPANS[of]} AS ms FROM {{jobs}}{_YOUNG} AND status = 'done'"
    text += ("" if queue is None else _OF_QUEUE) + after
    rows = yield sql(text), {**sql.time(), "age_ms": age_ms, "queue": queue}
    found = {}
    for name, count, least, mean, most, *ranks in sorted(rows, key=itemgetter(0)):
        percentiles = ranks[0] if sql.flavour.name == "postgresql" else ranks
        seconds = [milliseconds / 1000 for milliseconds in (least, mean, *percentiles, most)]
        found[name] = Times(count, *seconds)
    return found


@reading
def health(sql: Compiler, age_ms: int, *, is_patient: bool) -> Operation[tuple[int, int, int | None]]:
    """Jobs whose first failure is ``age_ms`` ago, jobs that wait for a dead or cancelled one, and for how many
    milliseconds the oldest ready one has been due. ``is_patient``: wait for as long as the database takes.
    """
    if not is_patient and sql.flavour.name == "postgresql":
        yield sql(_PATIENCE), {}
    errors, waiting_on_dead, oldest_ms = (yield sql(_HEALTH), {**sql.time(), "age_ms": age_ms})[0]
    return errors, waiting_on_dead, oldest_ms


# -- health ----------------------------------------------------------------------------------------------------------


def look(core: OutboxCore, connection: Any = None, store: JobStore | None = None) -> Health:
    """The health of an outbox, seen from this process, in ``store`` or in its own.

    It is unhealthy if a job is in error or dead whose first failure is ``healthy_error_age`` ago, if a handler here is
    slow, and if the database does not answer. It is healthy for ``health_grace`` seconds after the start here, whatever
    there is. A database that does not answer is a reason and no exception. Raises ``TypeError`` and
    ``NotInTransaction`` for a connection that can't be used.
    """
    patient = connection is not None
    try:
        found = (store or core.open_store()).perform(connection, health, _error_age_ms(core), is_patient=patient)
    except Exception as error:
        if patient and isinstance(error, TypeError | NotInTransaction):
            raise
        return _health(core, error)
    return _health(core, found)


async def alook(core: OutboxCore, connection: Any = None) -> Health:
    """``look`` for asyncio."""
    patient = connection is not None
    try:
        found = await core.open_store().aperform(connection, health, _error_age_ms(core), is_patient=patient)
    except Exception as error:
        if patient and isinstance(error, TypeError | NotInTransaction):
            raise
        return _health(core, error)
    return _health(core, found)


def _error_age_ms(core: OutboxCore) -> int:
    return int(min(core.settings.healthy_error_age * 1000, FOR_EVER_MS))


def _health(core: OutboxCore, found: tuple[int, int, int | None] | Exception) -> Health:
    reasons = []
    errors, waiting_on_dead, oldest_ms = (0, 0, None) if isinstance(found, Exception) else found
    slow = core.slow()
    if isinstance(found, Exception):
        reasons.append(
            str(found) if isinstance(found, OutboxError) else f"the database did not answer: {_line_of(found)}"
        )
    if errors:
        since = core.settings.healthy_error_age
        reasons.append(f"{_jobs(errors)} in error or dead, failed first {since:g} s ago or earlier (healthy_error_age)")
    if slow:
        reasons.append(f"{slow:,} handler{'s' * (slow > 1)} running for longer than slow_after")
    if _is_in_grace(core):
        reasons = []
    age = None if oldest_ms is None else oldest_ms / 1000
    return Health(not reasons, tuple(reasons), errors, slow, waiting_on_dead, age)


def _is_in_grace(core: OutboxCore) -> bool:
    """A clock that was set back since the start gives no grace."""
    if core.started_ms is None:
        return False
    return 0 <= core.now_ms() - core.started_ms < core.settings.health_grace * 1000


def _jobs(count: int) -> str:
    return f"{count:,} job{'s' * (count > 1)}"


def _line_of(error: Exception) -> str:
    """One line that says what happened: the first of what the driver said; the others show the statement."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}"[:MAX_REASON] if lines else type(cause).__name__
