"""The operations of consumers: claims, leases, outcomes, and the sweep that finds what others have left.

Rules:
1. An outcome is written only where ``token`` is still the claim's. A job that lapsed and was claimed again has another.
2. Leaving ``running`` takes the token away, whoever does it.
3. A caller may keep his transaction open. What frees jobs leaves those alone that he has changed (``SKIP LOCKED``): the
   sweep finds them when he has come to an end.
4. Lanes: a claim puts a ready job behind others of its lane (``held``), and the end of a job frees the next. Each of
   them looks again once its own transaction is committed (``free_lanes``), so of two that overlap one sees the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox.flavours import CLAIMED, HELD, WAS_DUE
from kestrelpy.outbox.job import COLUMNS, ID, LANE, PRIORITY, QUEUE
from kestrelpy.outbox.sql import looking, single

if TYPE_CHECKING:
    from kestrelpy.outbox.sql import Claim, Compiler, Operation, Rows

__all__ = [
    "Done",
    "Failure",
    "Finish",
    "Lane",
    "claim",
    "claim_failed",
    "claimed_among",
    "delete_done",
    "fail",
    "finish",
    "free_lanes",
    "free_overlooked",
    "give_back",
    "held_lanes",
    "lanes_of",
    "lapsed",
    "mark_done",
    "next_due_ms",
    "notify",
    "overlooked",
    "renew",
]

Lane = tuple[str, str]
"""A queue, and a lane of it."""
Done = tuple[int, int]
"""A job's id and token."""
Failure = tuple[int, int, str, int, str]
"""A job's id and token, its new status (``error``, ``dead``), milliseconds until it comes again, and the traceback."""
Return = tuple[int, int, int | None]
"""A job's id and token, and milliseconds until it is due; ``None``: as before the claim."""

_OWN = {"r_id": "bigint", "r_token": "bigint"}
_MARK = """UPDATE {jobs} AS j SET status = 'done', finished_ms = {now}, due_ms = j.was_due_ms, was_due_ms = NULL,
    error = NULL, token = NULL
FROM {rows} WHERE j.id = r_id AND j.token = r_token {of_rows} RETURNING id"""
_MARK_AND_FREE = (
    "WITH marked AS ("
    + _MARK
    + """), freed AS (
    UPDATE {jobs} SET status = 'ready' WHERE id {is_in}(
        SELECT w.id FROM {jobs} w WHERE w.status = 'waiting' AND w.depends_on {is_in}(SELECT id FROM marked){end_in}
        {skip_locked}
    ){end_in} RETURNING id, queue
) SELECT id, NULL FROM marked UNION ALL SELECT id, queue FROM freed"""
)
_DELETE_DONE = "DELETE FROM {jobs} WHERE id {is_one_of} AND token = :token RETURNING id"
_FREE = """UPDATE {jobs} SET status = 'ready' WHERE id {is_in}(
    SELECT w.id FROM {jobs} w WHERE w.status = 'waiting' AND w.depends_on {is_one_of} {skip_locked}
){end_in} RETURNING """
_FREE_WAITING = _FREE + "queue"
_FREE_OVERLOOKED = _FREE + COLUMNS
_FAILED = {"r_id": "bigint", "r_token": "bigint", "r_status": "text", "r_delay_ms": "bigint", "r_error": "text"}
_FAIL = """UPDATE {jobs} AS j SET status = r_status, token = NULL, was_due_ms = NULL, error = r_error,
    first_error_ms = coalesce(j.first_error_ms, {now}),
    finished_ms = CASE WHEN r_status = 'dead' THEN {now} END,
    due_ms = CASE WHEN r_status = 'dead' THEN j.was_due_ms ELSE {now} + r_delay_ms END
FROM {rows} WHERE j.id = r_id AND j.token = r_token {of_rows}"""
_FAIL_LAPSED = _FAIL + " AND j.due_ms <= {now} RETURNING id"
_FAIL += " RETURNING id"
_RETURNED = {"r_id": "bigint", "r_token": "bigint", "r_delay_ms": "bigint"}
_GIVE_BACK = """UPDATE {jobs} AS j SET status = CASE WHEN j.first_error_ms IS NULL THEN 'ready' ELSE 'error' END,
    tries = j.tries - 1, token = NULL, was_due_ms = NULL,
    due_ms = coalesce({now} + r_delay_ms, j.was_due_ms)
FROM {rows} WHERE j.id = r_id AND j.token = r_token {of_rows} RETURNING id"""
_RENEW = """UPDATE {jobs} AS j SET due_ms = {now} + CAST(:lease_ms AS bigint)
FROM {rows} WHERE j.id = r_id AND j.token = r_token {of_rows} RETURNING id"""
_LAPSED = (
    "SELECT "
    + COLUMNS
    + """, token FROM {jobs} WHERE status = 'running' AND due_ms <= {now} AND relay_batch IS NULL
    AND queue {is_one_of_names} ORDER BY due_ms, id LIMIT 1000"""
)
_LANES = {"r_queue": "text", "r_lane": "text"}
_FREE_LANES = """UPDATE {jobs} SET held = false WHERE id {is_in}(
    SELECT f.id FROM {jobs} f WHERE f.held AND f.id {is_in}(
    SELECT min(h.id) FROM {jobs} h JOIN {rows} ON h.queue = r_queue AND h.lane = r_lane
    WHERE h.held AND h.status = 'ready' AND h.lane IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM {jobs} a WHERE a.queue = h.queue AND a.lane = h.lane AND a.lane IS NOT NULL AND a.id <> h.id
        AND a.status IN ('ready', 'running', 'error')
        AND (a.status IN ('running', 'error') OR (a.id < h.id AND NOT a.held AND a.due_ms <= {now})))
    GROUP BY h.queue, h.lane
){end_in} {skip_locked}){end_in} RETURNING queue"""
SLICE = 1000
"""How many lanes, or jobs that others wait for, one slice of a sweep looks at."""
_LIMIT = f" LIMIT {SLICE}"
_HELD_LANES = (
    """SELECT DISTINCT queue, lane FROM {jobs} WHERE held AND status = 'ready' AND lane IS NOT NULL
    AND (queue, lane) > (:queue, :lane) ORDER BY queue, lane"""
    + _LIMIT
)
_WAITED_FOR = (
    """SELECT DISTINCT depends_on FROM {jobs} WHERE status = 'waiting' AND depends_on > :after
ORDER BY depends_on"""
    + _LIMIT
)
_NOT_DONE = "SELECT id FROM {jobs} WHERE id {is_one_of} AND status <> 'done'"
_NOTIFY = "SELECT pg_notify(:channel, :queue)"
_CLAIM_FAILED = (
    """UPDATE {jobs} AS j SET status = 'running', token = :token, worker = :worker, tries = tries + 1,
finished_ms = NULL, started_ms = {now}, was_due_ms = due_ms, due_ms = {now} + CAST(:lease_ms AS bigint)
WHERE id = :id AND status IN ('error', 'dead') AND (lane IS NULL OR NOT EXISTS (
    SELECT 1 FROM {jobs} a WHERE a.queue = j.queue AND a.lane = j.lane AND a.lane IS NOT NULL
    AND a.status = 'running')) RETURNING """
    + CLAIMED
)


@single
def claim(sql: Compiler, status: str, queues: Sequence[tuple[str, int]], wanted: Claim) -> Operation[Rows]:
    """Claim jobs that are ``"ready"`` or in ``"error"``, and due, of queues with the most of each: rows of ``CLAIMED``,
    the most urgent first; of those in error, what was due first.

    A row that is ``held`` was not claimed; they come last. If there are any, call ``free_lanes`` for their lanes after
    the commit.
    """
    if not queues or wanted.jobs < 1:
        return []
    rows = yield from sql.flavour.claim(sql, status, queues, wanted)
    if status == "ready":
        return sorted(rows, key=lambda row: (row[HELD], row[PRIORITY], row[WAS_DUE], row[ID]))
    return sorted(rows, key=lambda row: (row[WAS_DUE], row[ID]))


def lanes_of(rows: Rows) -> list[Lane]:
    """The lanes of the rows of a claim that are held."""
    return sorted({(row[QUEUE], row[LANE]) for row in rows if row[HELD]})


@single
def mark_done(sql: Compiler, done: Sequence[Done]) -> Operation[tuple[set[int], list[str]]]:
    """Mark jobs done, and make ready those that waited for them. Returns the ids whose token was still good, and the
    queues that have jobs ready now.
    """
    if sql.flavour.updates_in_with:
        rows = yield sql.rows(_MARK_AND_FREE, _OWN, done)
        return {row[0] for row in rows if row[1] is None}, sorted({row[1] for row in rows if row[1] is not None})
    rows = yield sql.rows(_MARK, _OWN, done)
    marked = {row[0] for row in rows}
    return marked, (yield from free_waiting(sql, marked))


def delete_done(sql: Compiler, done: Sequence[Done]) -> Operation[tuple[set[int], list[str]]]:
    """``mark_done`` for queues that keep no done jobs."""
    deleted: set[int] = set()
    by_token: dict[int, list[int]] = {}
    for job_id, token in done:
        by_token.setdefault(token, []).append(job_id)
    for token, ids in by_token.items():
        rows = yield sql(_DELETE_DONE), {"ids": sql.flavour.list_of(ids), "token": token}
        deleted.update(row[0] for row in rows)
    return deleted, (yield from free_waiting(sql, deleted))


def free_waiting(sql: Compiler, done: Iterable[int]) -> Operation[list[str]]:
    """Make ready what waits for these jobs, in the transaction that marks them. Returns the queues."""
    ids = sql.flavour.list_of(done)
    return sorted({row[0] for row in (yield sql(_FREE_WAITING), {"ids": ids})})


@single
def fail(sql: Compiler, failures: Sequence[Failure], *, are_lapsed: bool = False) -> Operation[set[int]]:
    """Mark jobs as in error, or dead. Returns the ids whose token was still good, and whose lease is still over."""
    rows = yield sql.rows(_FAIL_LAPSED if are_lapsed else _FAIL, _FAILED, failures)
    return {row[0] for row in rows}


@single
def give_back(sql: Compiler, returned: Sequence[Return]) -> Operation[set[int]]:
    """Undo claims: the try is not counted. Returns the ids whose token was still good."""
    rows = yield sql.rows(_GIVE_BACK, _RETURNED, returned)
    return {row[0] for row in rows}


@single
def renew(sql: Compiler, running: Sequence[Done], lease_ms: int) -> Operation[set[int]]:
    """Renew the leases of running jobs. Returns the ids whose token was still good."""
    statement, values = sql.rows(_RENEW, _OWN, running)
    rows = yield statement, {**values, "lease_ms": lease_ms}
    return {row[0] for row in rows}


@looking
def lapsed(sql: Compiler, queues: Iterable[str]) -> Operation[Rows]:
    """Jobs of these queues whose lease is over: rows of ``COLUMNS`` and the token."""
    return (yield sql(_LAPSED), {**sql.time(), "names": sql.flavour.list_of(queues)})


@single
def free_lanes(sql: Compiler, lanes: Sequence[Lane]) -> Operation[list[str]]:
    """Free the first job that is held in each of these lanes, if nothing of the lane is active.

    Returns the queues of what was freed.
    """
    rows = yield sql.rows(_FREE_LANES, _LANES, lanes)
    return sorted({row[0] for row in rows})


@looking
def held_lanes(sql: Compiler, after: Lane) -> Operation[tuple[list[Lane], Lane | None]]:
    """The next lanes after ``after`` in which a job is held, and after which there may be more; ``None``: these are the
    last.
    """
    rows = yield sql(_HELD_LANES), {"queue": after[0], "lane": after[1]}
    lanes = [(row[0], row[1]) for row in rows]
    return lanes, lanes[-1] if len(lanes) == SLICE else None


@looking
def overlooked(sql: Compiler, after: int) -> Operation[tuple[list[int], int | None]]:
    """Of the next jobs that others wait for, those that are done, or gone; and the id after which there may be more.

    A put that overlaps with the mark of the job that it depends on is not freed by the mark.
    """
    found = [row[0] for row in (yield sql(_WAITED_FOR), {"after": after})]
    if not found:
        return [], None
    left = {row[0] for row in (yield sql(_NOT_DONE), {"ids": sql.flavour.list_of(found)})}
    return [job_id for job_id in found if job_id not in left], found[-1] if len(found) == SLICE else None


@single
def free_overlooked(sql: Compiler, done: Sequence[int]) -> Operation[Rows]:
    """Make ready what waits for these jobs, which are done or gone: its rows of ``COLUMNS``."""
    return (yield sql(_FREE_OVERLOOKED), {"ids": sql.flavour.list_of(done)})


@looking
def next_due_ms(sql: Compiler, queues: Iterable[str]) -> Operation[tuple[int, int | None, int | None]]:
    """The time, and when the next job of these queues is due that is ready, and that is in error; ``None``: none is."""
    return (yield from sql.flavour.next_due_ms(sql, list(queues)))


def claim_failed(sql: Compiler, job_id: int, wanted: Claim) -> Operation[Rows]:
    """Claim one job that is in error or dead, due or not: its row of ``CLAIMED``, or none if another one of its lane
    runs.
    """
    return (yield sql(_CLAIM_FAILED), {**sql.time(), **wanted.parameters(), "id": job_id})


@single
def notify(sql: Compiler, queue: str) -> Operation[None]:
    """Wake the consumers in all processes when this transaction is committed, if they listen. They look at all queues:
    the name is for people who listen.
    """
    if sql.channel is not None:
        yield sql(_NOTIFY), {"channel": sql.channel, "queue": queue}


class Finish:
    """Outcomes to be saved in one transaction."""

    __slots__ = ("deleted", "done", "failed", "returned")

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.deleted: list[Done] = []
        self.failed: list[Failure] = []
        self.returned: list[Return] = []


def finish(sql: Compiler, what: Finish) -> Operation[tuple[set[int], list[str]]]:
    """Save outcomes: the ids whose token was still good, and the queues that have more jobs ready now."""
    saved: set[int] = set()
    freed: list[str] = []
    if what.done:
        ids, queues = yield from mark_done(sql, what.done)
        saved |= ids
        freed += queues
    if what.deleted:
        ids, queues = yield from delete_done(sql, what.deleted)
        saved |= ids
        freed += queues
    if what.failed:
        saved |= yield from fail(sql, what.failed)
    if what.returned:
        saved |= yield from give_back(sql, what.returned)
    return saved, freed


def claimed_among(rows: Rows) -> list[Sequence[Any]]:
    """The rows of a claim that are running now."""
    return [row for row in rows if not row[HELD]]
