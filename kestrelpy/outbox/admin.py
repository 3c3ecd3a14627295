"""The operations that look at jobs and mend them, on the outbox's own connection or on a caller's."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox._checks import check_count
from kestrelpy.outbox.claims import free_lanes, notify
from kestrelpy.outbox.errors import JobNotFound
from kestrelpy.outbox.job import COLUMNS, LANE, QUEUE
from kestrelpy.outbox.queues import check_name, check_text
from kestrelpy.outbox.sql import reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kestrelpy.outbox.queues import QueueConsumer
    from kestrelpy.outbox.sql import Compiler, Operation, Rows

__all__ = [
    "STATUSES",
    "cancel",
    "check_ended",
    "check_key",
    "errors",
    "find",
    "get",
    "jobs",
    "oldest_error",
    "prunable",
    "prune",
    "retry",
    "retry_all",
    "set_paused",
    "wanted",
    "wanted_errors",
]

STATUSES = ("ready", "waiting", "running", "error", "done", "dead", "cancelled")
MAX_SECONDS = 1 << 32
NO_LIMIT = (1 << 63) - 1
SLICE = 1000
"""How many rows one statement of ``prune`` deletes."""

_SELECT = "SELECT " + COLUMNS + " FROM {jobs} "
_GET = _SELECT + "WHERE id = :id"
_FIND = _SELECT + 'WHERE queue = :queue AND "key" = :key'
_WHERE = {
    "queue": " AND queue = :queue",
    "status": " AND status = :status",
    "group": " AND job_group = :group",
}
_ERRORS = _SELECT + "WHERE status IN ('error', 'dead')"
_OLDEST_FIRST = " ORDER BY first_error_ms, id"
_READY = """UPDATE {jobs} AS j SET due_ms = {now}, tries = 0, held = false, error = NULL, first_error_ms = NULL,
    started_ms = NULL, finished_ms = NULL,
    status = CASE WHEN j.depends_on IS NOT NULL AND EXISTS (
        SELECT 1 FROM {jobs} d WHERE d.id = j.depends_on AND d.status <> 'done') THEN 'waiting' ELSE 'ready' END
WHERE """
_RETRY = _READY + "j.id = :id AND j.status IN ('error', 'dead', 'cancelled', 'done') RETURNING queue"
_RETRY_ALL = _READY + "j.queue = :queue AND j.status = :status RETURNING id"
_CANCEL = (
    """UPDATE {jobs} SET status = 'cancelled', finished_ms = {now}, held = false
WHERE id = :id AND status IN ('ready', 'waiting', 'error', 'dead') RETURNING """
    + COLUMNS
)
_PRUNE = """DELETE FROM {jobs} WHERE id IN (
    SELECT f.id FROM {jobs} f WHERE f.queue = :queue AND f.status IN ('done', 'dead', 'cancelled')
    AND f.status {is_one_of_names} AND f.finished_ms <= {now} - CAST(:keep_ms AS bigint)
    AND NOT EXISTS (SELECT 1 FROM {jobs} w WHERE w.status = 'waiting' AND w.depends_on = f.id)
    ORDER BY f.finished_ms LIMIT 1000 {skip_locked}
) RETURNING id"""
_PAUSE = """INSERT INTO {queues} (queue, paused) VALUES (:queue, :paused)
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused"""


def wanted(
    queue: str | None, status: str | None = None, group: str | None = None, limit: int = 100, after_id: int = 0
) -> tuple[str | None, str | None, str | None, int, int]:
    """The arguments of ``jobs``, checked. Raises ``ValueError``, ``TypeError``, ``InvalidName``."""
    if status is not None and status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {status!r}")
    if index(limit) < 0:
        raise ValueError(f"limit must not be negative, not {limit!r}")
    name = None if queue is None else check_name(queue)
    after = max(-1, min(index(after_id), NO_LIMIT))
    return name, status, check_text("group", group), min(index(limit), NO_LIMIT), after


def check_key(key: object) -> str:
    """A key that is looked for. Raises ``TypeError``, ``ValueError``."""
    found = check_text("key", key)
    if found is None:
        raise TypeError("key must be a str, not None")
    return found


def wanted_errors(queue: str | None, limit: int | None) -> tuple[str | None, int]:
    """The arguments of ``errors``, checked. Raises ``ValueError``, ``TypeError``, ``InvalidName``."""
    name = None if queue is None else check_name(queue)
    return name, NO_LIMIT if limit is None else check_count("limit", limit)


def check_ended(status: str) -> str:
    """A status that ``retry`` makes ready. Raises ``ValueError``."""
    if status not in ("error", "dead", "cancelled", "done"):
        raise ValueError(f"status must be error, dead, cancelled or done, not {status!r}")
    return status


def _in_range(job_id: int) -> int:
    """An id as the database can be asked for; one that no job has for all others."""
    return job_id if 0 < job_id <= NO_LIMIT else 0


@reading
def get(sql: Compiler, job_id: int) -> Operation[Sequence[Any]]:
    """Raises ``JobNotFound``."""
    rows = yield sql(_GET), {"id": _in_range(job_id)}
    if not rows:
        raise JobNotFound(job_id)
    return rows[0]


@reading
def find(sql: Compiler, queue: str, key: str) -> Operation[Sequence[Any]]:
    """Raises ``JobNotFound``."""
    rows = yield sql(_FIND), {"queue": queue, "key": key}
    if not rows:
        raise JobNotFound(queue=queue, key=key)
    return rows[0]


@reading
def jobs(
    sql: Compiler, queue: str | None, status: str | None, group: str | None, limit: int, after_id: int
) -> Operation[Rows]:
    """Jobs by id."""
    wanted = {"queue": queue, "status": status, "group": group}
    conditions = "".join(_WHERE[name] for name, value in wanted.items() if value is not None)
    text = _SELECT + "WHERE id > :after_id" + conditions + " ORDER BY id LIMIT :limit"
    return (yield sql(text), {**wanted, "after_id": after_id, "limit": limit})


@reading
def errors(sql: Compiler, queue: str | None, limit: int) -> Operation[Rows]:
    """Jobs in error or dead, the oldest failure first."""
    text = _ERRORS + ("" if queue is None else _WHERE["queue"]) + _OLDEST_FIRST + " LIMIT :limit"
    return (yield sql(text), {"queue": queue, "limit": limit})


@reading
def oldest_error(sql: Compiler, queue: str) -> Operation[Rows]:
    """The job in error or dead that has failed longest, or no row."""
    return (yield sql(_ERRORS + _WHERE["queue"] + _OLDEST_FIRST + " LIMIT 1"), {"queue": queue})


def retry(sql: Compiler, job_id: int) -> Operation[bool]:
    """Make a job ready that has ended or failed, or waiting if what it depends on is not done; False while it is ready,
    waiting or running. Raises ``JobNotFound``.
    """
    rows = yield sql(_RETRY), {**sql.time(), "id": _in_range(job_id)}
    if not rows:
        yield from get(sql, job_id)
        return False
    yield from notify(sql, rows[0][0])
    return True


def retry_all(sql: Compiler, queue: str, status: str) -> Operation[int]:
    """Make ready, or waiting, all jobs of a queue in this status."""
    rows = yield sql(_RETRY_ALL), {**sql.time(), "queue": queue, "status": status}
    if rows:
        yield from notify(sql, queue)
    return len(rows)


def cancel(sql: Compiler, job_id: int) -> Operation[bool]:
    """Cancel a job that is not running and has not ended. Raises ``JobNotFound``."""
    rows = yield sql(_CANCEL), {**sql.time(), "id": _in_range(job_id)}
    if not rows:
        yield from get(sql, job_id)
    for row in rows:
        if row[LANE] is not None:
            for queue in (yield from free_lanes(sql, [(row[QUEUE], row[LANE])])):
                yield from notify(sql, queue)
    return bool(rows)


def prune(sql: Compiler, queue: str, statuses: Iterable[str], keep_ms: int) -> Operation[int]:
    """Delete a slice of the jobs of a queue that ended ``keep_ms`` ago; fewer than ``SLICE`` were the last.

    A job that another one waits for stays.
    """
    names = sql.flavour.list_of(statuses)
    rows = yield sql(_PRUNE), {**sql.time(), "queue": queue, "names": names, "keep_ms": keep_ms}
    return len(rows)


def set_paused(sql: Compiler, queue: str, is_paused: bool) -> Operation[None]:
    """Pause or resume a queue, for all processes."""
    yield sql(_PAUSE), {"queue": queue, "paused": is_paused}
    if not is_paused:
        yield from notify(sql, queue)


def prunable(consumers: Iterable[QueueConsumer]) -> list[tuple[str, list[str], int]]:
    """Queues and statuses whose jobs are not kept for ever, and for how many milliseconds they are."""
    found = []
    for consumer in consumers:
        options = consumer.options
        for statuses, seconds in ((["done", "cancelled"], options.keep_done), (["dead"], options.keep_dead)):
            if seconds is not None:
                found.append((consumer.queue, statuses, int(min(seconds, MAX_SECONDS) * 1000)))
    return found
