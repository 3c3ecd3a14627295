"""The operations of relays: the lease of a relay, and the batches of jobs that it moves.

Rules:
1. Only the owner of the relay's row changes a batch: each operation that does so first updates that row, where
   ``owner`` is still its own. Whoever takes the row over has the next word on the batch.
2. A batch has its number and its jobs for good. Until it is sealed, nothing of it can have been published: jobs that
   can't be moved leave it, and it may get a higher number. Once it is sealed, one part file, and no other, may be
   published under its number.
3. A batch is sealed, published and marked before the next one is begun: the numbers in the queue rise.
4. The seal alone waits for the disk of PostgreSQL, with all that was committed before it. If a server that crashed has
   forgotten the numbers of a batch, nothing of it was published. If it has forgotten the marks, the batch is sealed and
   is repeated: none is begun while the one before it is sealed.
5. Where there is nothing to do, nothing is written, and no lock is taken: on SQLite each commit wakes every process.
6. Lanes: the jobs of a lane are moved in the order of their ids. Those that are behind one in error are ``held``, as
   claims do it, so that they do not hide the jobs of other lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox.claims import free_waiting, next_due_ms, notify
from kestrelpy.outbox.errors import OutboxError
from kestrelpy.outbox.job import COLUMNS
from kestrelpy.outbox.sql import reading, single

if TYPE_CHECKING:
    from kestrelpy.outbox.sql import Compiler, Operation, Rows

__all__ = [
    "FULL",
    "NARROW",
    "RelayBatch",
    "RelayLease",
    "RelayLook",
    "RelayState",
    "begin_again",
    "begin_batch",
    "drop_failed",
    "finish_batch",
    "free_held",
    "jobs_of",
    "look",
    "open_relay",
    "peek_relay",
    "release_lease",
    "renew_lease",
    "seal_batch",
]

NARROW = "id, payload, payload_binary, lane"
"""What is read of a job whose payload is moved as it is stored."""
FULL = COLUMNS
"""What is read of a job for ``encode``."""
MAX_BYTES = 16 << 20
"""Payloads of a batch, together; one larger job is a batch of its own."""
RETRIES = 10
"""One in so many jobs of a batch may be a retry: neither retries nor first tries wait for the others to end."""

_STATE = """SELECT queue, app_id, owner, until_ms - {now}, batch, part, sealed,
    EXISTS (SELECT 1 FROM {queues} q WHERE q.queue = :queue AND q.paused)
FROM {relays} WHERE name = :name"""
SEALED = 6
"""The place in a row of ``_STATE``."""
_CREATE = """INSERT INTO {relays} (name, queue, app_id, until_ms, batch) VALUES (:name, :queue, :app_id, 0, 0)
ON CONFLICT (name) DO NOTHING"""
_TAKE = """UPDATE {relays} SET owner = :owner, until_ms = {now} + CAST(:lease_ms AS bigint) WHERE name IN (
    SELECT name FROM {relays} WHERE name = :name AND (owner = :owner OR owner IS NULL OR until_ms <= {now})
    {skip_locked}
) RETURNING name"""
_HOLD = "UPDATE {relays} SET until_ms = {now} + CAST(:lease_ms AS bigint)"
_IS_OURS = " WHERE name = :name AND owner = :owner"
_RENEW = _HOLD + _IS_OURS + " RETURNING name"
_NUMBER = _HOLD + ", batch = :number, part = :part, sealed = NULL" + _IS_OURS + " RETURNING name"
_SEAL = (
    _HOLD + ", sealed = :sealed" + _IS_OURS + " AND batch = :number AND part = :part AND sealed IS NULL RETURNING name"
)
_FINISH = _HOLD + ", part = NULL, sealed = NULL" + _IS_OURS + " AND batch = :number RETURNING name"
_RELEASE = "UPDATE {relays} SET owner = NULL, until_ms = 0" + _IS_OURS
_UNFINISHED = """SELECT worker, min(relay_batch), count(*) FROM {jobs}
WHERE relay_batch IS NOT NULL AND queue = :queue GROUP BY worker ORDER BY worker"""
_HELD_LANES = """SELECT DISTINCT lane FROM {jobs} WHERE queue = :queue AND lane IS NOT NULL AND held
AND status IN ('ready', 'running', 'error') AND status = 'ready'"""

_READY = "queue = :queue AND status = 'ready' AND NOT held"
_LEVEL = "SELECT priority FROM {jobs} WHERE " + _READY + "%s ORDER BY priority LIMIT 1"
_FIRST_LEVEL = _LEVEL % ""
_NEXT_LEVEL = _LEVEL % " AND priority > :level"
"""Not ``min(priority)``: for a table that it knows little of, PostgreSQL's planner would read all that is ready."""
_PICK = "SELECT i.id, i.payload_bytes, i.lane, "
_PICK_READY = (
    _PICK
    + "0 FROM {jobs} i WHERE "
    + _READY
    + " AND priority = :level AND due_ms <= {now} ORDER BY due_ms, id LIMIT %d {skip_locked}"
)
_PICK_ERROR = (
    _PICK
    + """1 FROM {jobs} i WHERE i.queue = :queue AND i.status = 'error' AND i.due_ms <= {now}
AND NOT (i.lane IS NOT NULL AND EXISTS (
    SELECT 1 FROM {jobs} a WHERE a.queue = i.queue AND a.lane = i.lane AND a.lane IS NOT NULL AND a.id < i.id
    AND a.status IN ('ready', 'running', 'error') AND a.status = 'error'))
ORDER BY due_ms, id LIMIT %d {skip_locked}"""
)

_LANES = {"r_lane": "text"}
_OF_LANE = """FROM {jobs} a WHERE a.queue = :queue AND a.lane = r_lane AND a.lane IS NOT NULL AND a.status = """
_RUNS = "EXISTS (SELECT 1 " + _OF_LANE + "'running' AND a.relay_batch IS NULL)"
_IN_LANE = " AND a.status IN ('ready', 'running', 'error')"
_FAILED_IN_LANE = "(SELECT min(a.id) " + _OF_LANE + "'error' AND NOT (a.id {is_one_of}))"
_BLOCKERS = (
    "SELECT r_lane, "
    + _RUNS
    + ", "
    + _FAILED_IN_LANE
    + ", (SELECT a.id "
    + _OF_LANE
    + "'ready'"
    + _IN_LANE
    + """ AND a.due_ms <= {now} AND a.id < CAST(:last_id AS bigint) AND NOT (a.id {is_one_of}) ORDER BY a.id LIMIT 1)
FROM {rows}"""
)
"""Of each lane: whether a consumer runs a job of it, its first job in error, and its first one that is ready, due, and
not among those that were picked.
"""
_FIRST_OF_LANE = """SELECT id, payload_bytes, lane, 0 FROM {jobs} WHERE queue = :queue AND lane = :lane
AND lane IS NOT NULL AND status IN ('ready', 'running', 'error') AND status = 'ready' AND due_ms <= {now}
ORDER BY id LIMIT :count"""
_LOCK = "SELECT id FROM {jobs} WHERE id {is_one_of} AND status = 'ready' {skip_locked}"
_HOLD_JOBS = "UPDATE {jobs} SET held = true WHERE id {is_one_of}"
_OF_HELD = " AND a.held AND a.status IN ('ready', 'running', 'error')"
_HELD_IN_LANE = "EXISTS (SELECT 1 " + _OF_LANE + "'ready'" + _OF_HELD + ")"
_BEFORE_FAILED = (
    "EXISTS (SELECT 1 "
    + _OF_LANE
    + "'ready'"
    + _OF_HELD
    + " AND a.id < coalesce((SELECT min(f.id) FROM {jobs} f WHERE f.queue = :queue AND f.lane = r_lane"
    + " AND f.lane IS NOT NULL AND f.status = 'error'), CAST(9223372036854775807 AS bigint)))"
)
_LOOK_AT_LANES = "SELECT r_lane, " + _HELD_IN_LANE + ", NOT " + _RUNS + " AND " + _BEFORE_FAILED + " FROM {rows}"
"""Of each lane: whether it has held jobs, and whether some of them wait for nothing any more."""
_UNHOLD = """UPDATE {jobs} SET held = false WHERE queue = :queue AND lane {is_one_of_names} AND lane IS NOT NULL
AND held AND status = 'ready' AND status IN ('ready', 'running', 'error') AND NOT EXISTS (
    SELECT 1 FROM {jobs} f WHERE f.queue = :queue AND f.lane = {jobs}.lane AND f.lane IS NOT NULL
    AND f.status = 'error' AND f.id < {jobs}.id)"""

_ASSIGN = """UPDATE {jobs} SET status = 'running', relay_batch = :number, worker = :name, held = false, token = NULL,
    tries = tries + 1, started_ms = {now}
WHERE id {is_one_of} AND status IN ('ready', 'error') RETURNING """
_OF_BATCH = " WHERE relay_batch = :number AND queue = :queue AND worker = :name"
_RENUMBER = (
    "UPDATE {jobs} SET relay_batch = :number WHERE relay_batch = :old_number AND queue = :queue AND worker = :name"
)
_DELETE = "DELETE FROM {jobs}" + _OF_BATCH + " RETURNING id"
_MARK = (
    "UPDATE {jobs} SET status = 'done', relay_batch = NULL, finished_ms = {now}, error = NULL"
    + _OF_BATCH
    + " RETURNING id"
)
_JOBS_OF = "SELECT " + COLUMNS + " FROM {jobs} WHERE id {is_one_of} ORDER BY id"
_FAILED = {"r_id": "bigint", "r_status": "text", "r_delay_ms": "bigint", "r_error": "text"}
_FAIL = """UPDATE {jobs} AS j SET status = r_status, relay_batch = NULL, error = r_error,
    first_error_ms = coalesce(j.first_error_ms, {now}), finished_ms = CASE WHEN r_status = 'dead' THEN {now} END,
    due_ms = CASE WHEN r_status = 'dead' THEN j.due_ms ELSE {now} + r_delay_ms END
FROM {rows} WHERE j.id = r_id AND j.relay_batch = :number AND j.queue = :queue AND j.worker = :name"""
_GIVE_BACK = (
    """UPDATE {jobs} SET status = CASE WHEN first_error_ms IS NULL THEN 'ready' ELSE 'error' END, relay_batch = NULL,
    held = first_error_ms IS NULL, tries = tries - 1"""
    + _OF_BATCH
    + " AND id {is_one_of}"
)

_DO_NOT_WAIT = "SET LOCAL synchronous_commit TO off"

Failed = tuple[int, str, int, str]
"""A job's id, its new status, milliseconds until it comes again, and the error."""
Picked = Sequence[Any]
"""A job's id, the bytes of its payload, its lane, and whether it was in error."""
ID, BYTES, LANE, WAS_IN_ERROR = range(4)


class RelayLease:
    """Who asks: the relay's name, its queue, the process that works for it, and for how long that owns it."""

    __slots__ = ("lease_ms", "name", "owner", "queue")

    def __init__(self, *, name: str, queue: str, owner: str, lease_ms: int) -> None:
        self.name = name
        self.queue = queue
        self.owner = owner
        self.lease_ms = lease_ms

    def parameters(self, sql: Compiler) -> dict[str, Any]:
        return {
            **sql.time(),
            "name": self.name,
            "queue": self.queue,
            "owner": self.owner,
            "lease_ms": self.lease_ms,
        }


class RelayState:
    """What the next owner of a relay finds.

    ``app_id``: under which it publishes. ``batch``: the last number that was given out. ``unfinished``: the number of a
    batch that is not marked yet, or ``None``. ``part``, ``sealed``: its file, and what that holds, if it is sealed.
    ``held``: lanes with jobs that wait for others. ``strangers``: relays of other names that have jobs of this queue.
    """

    __slots__ = ("app_id", "batch", "held", "part", "sealed", "strangers", "unfinished")

    def __init__(self, app_id: str, batch: int, part: str | None, sealed: str | None) -> None:
        self.app_id = app_id
        self.batch = batch
        self.part = part
        self.sealed = sealed
        self.unfinished: int | None = None
        self.held: set[str] = set()
        self.strangers: list[tuple[str, int]] = []


class RelayLook:
    """What there is to do for the owner of a relay.

    ``wait_ms``: until the next job is due, or ``None`` if none will be. ``must_renew``: a third of the lease is over.
    ``open_lanes``: lanes with held jobs that wait for nothing any more. ``empty_lanes``: those with no held jobs.
    """

    __slots__ = ("empty_lanes", "must_renew", "open_lanes", "wait_ms")

    def __init__(self) -> None:
        self.wait_ms: int | None = None
        self.must_renew = False
        self.open_lanes: list[str] = []
        self.empty_lanes: list[str] = []

    @property
    def is_due(self) -> bool:
        """Whether there are jobs to be moved."""
        return self.wait_ms == 0


class RelayBatch:
    """Jobs that have a number: rows of ``NARROW`` or ``FULL``, by id. Without rows nothing was written.

    ``is_full``: there may be more. ``held``: lanes with jobs that were found to wait for others.
    """

    __slots__ = ("held", "is_full", "number", "rows")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: Rows = ()
        self.is_full = False
        self.held: set[str] = set()


# -- the lease -------------------------------------------------------------------------------------------------------


@reading
def peek_relay(sql: Compiler, lease: RelayLease) -> Operation[int]:
    """For how many milliseconds another process has the lease; 0 if none has it. Raises ``OutboxError`` for a relay
    that is another queue's.
    """
    rows = yield sql(_STATE), lease.parameters(sql)
    if not rows:
        return 0
    queue, _, owner, left_ms, *_ = rows[0]
    if queue != lease.queue:
        raise OutboxError(f"the relay {lease.name!r} is the one of queue {queue!r}: give this one another name")
    return 0 if owner is None or owner == lease.owner else max(0, left_ms)


def open_relay(sql: Compiler, lease: RelayLease, app_id: str) -> Operation[RelayState | None]:
    """Take the lease of a relay, which is made if there is none. ``None`` if another process has it."""
    parameters = {**lease.parameters(sql), "app_id": app_id}
    rows = yield sql(_TAKE), parameters
    if not rows:
        yield sql(_CREATE), parameters
        rows = yield sql(_TAKE), parameters
    if not rows:
        return None
    _, found_id, _, _, batch, part, sealed, *_ = (yield sql(_STATE), parameters)[0]
    state = RelayState(found_id, batch, part, sealed)
    for worker, number, count in (yield sql(_UNFINISHED), parameters):
        if worker != lease.name:
            state.strangers.append((worker, count))
        else:
            state.unfinished = number
    if state.unfinished != batch:
        state.part = state.sealed = None
    state.held = {row[0] for row in (yield sql(_HELD_LANES), parameters)}
    return state


@single
def renew_lease(sql: Compiler, lease: RelayLease) -> Operation[bool]:
    """False if the lease is another process's by now."""
    return bool((yield sql(_RENEW), lease.parameters(sql)))


@single
def release_lease(sql: Compiler, lease: RelayLease) -> Operation[None]:
    """Let another process take the lease at once."""
    yield sql(_RELEASE), lease.parameters(sql)


@reading
def look(sql: Compiler, lease: RelayLease, held: Iterable[str]) -> Operation[RelayLook | None]:
    """What there is to do; ``None`` if the lease is another process's. ``held``: lanes with held jobs."""
    parameters = lease.parameters(sql)
    state = yield from _own_state(sql, lease)
    if state is None:
        return None
    left_ms, is_paused = state[3], state[7]
    found = RelayLook()
    found.must_renew = not lease.lease_ms * 2 // 3 <= left_ms <= lease.lease_ms
    if is_paused:
        return found
    lanes = [(lane,) for lane in sorted(held)]
    if lanes:
        statement, rows = sql.rows(_LOOK_AT_LANES, _LANES, lanes)
        for lane, has_held, is_open in (yield statement, {**parameters, **rows}):
            if is_open:
                found.open_lanes.append(lane)
            if not has_held:
                found.empty_lanes.append(lane)
    now_ms, *due = yield from next_due_ms(sql, [lease.queue])
    found.wait_ms = min((max(0, due_ms - now_ms) for due_ms in due if due_ms is not None), default=None)
    return found


@single
def free_held(sql: Compiler, lease: RelayLease, lanes: Sequence[str]) -> Operation[None]:
    """Let the held jobs of these lanes be picked."""
    yield sql(_UNHOLD), {**lease.parameters(sql), "names": sql.flavour.list_of(lanes)}


def _do_not_wait(sql: Compiler) -> Operation[None]:
    """Commit without waiting for the disk: see rule 4."""
    if sql.flavour.name == "postgresql":
        yield sql(_DO_NOT_WAIT), {}


def _own_state(sql: Compiler, lease: RelayLease) -> Operation[Sequence[Any] | None]:
    rows = yield sql(_STATE), lease.parameters(sql)
    return rows[0] if rows and rows[0][2] == lease.owner else None


# -- a batch ---------------------------------------------------------------------------------------------------------


def begin_batch(
    sql: Compiler, lease: RelayLease, *, jobs: int, last: int, part: str, columns: str
) -> Operation[RelayBatch | None]:
    """Give the next number, above ``last``, to jobs that are due: up to ``jobs`` of them, and up to 16 MiB.

    They are the most urgent ones, as a claim would take them. ``part``: the file that will be written. ``None`` if the
    lease is another process's, or if the database has forgotten the marks of the batch before.
    """
    state = yield from _own_state(sql, lease)
    if state is None or state[SEALED] is not None:
        return None
    parameters = lease.parameters(sql)
    batch = RelayBatch(max(state[4], last) + 1)
    if state[7]:
        return batch
    picked = yield from _pick(sql, parameters, jobs)
    chosen = list(_within(picked, MAX_BYTES))
    batch.is_full = len(chosen) >= jobs or len(chosen) < len(picked)
    lanes = sorted({each[LANE] for each in chosen if each[LANE] is not None})
    if lanes:
        chosen, held = yield from _in_order_of_lanes(sql, parameters, chosen, lanes)
        if held:
            yield sql(_HOLD_JOBS), {"ids": sql.flavour.list_of([each[ID] for each in held])}
            batch.held = {each[LANE] for each in held}
    if not chosen:
        return batch
    parameters |= {"number": batch.number, "part": part}
    yield from _do_not_wait(sql)
    if not (yield sql(_NUMBER), parameters):
        return None
    ids = sql.flavour.list_of([each[ID] for each in chosen])
    batch.rows = sorted((yield sql(_ASSIGN + columns), {**parameters, "ids": ids}), key=lambda row: row[0])
    return batch


def begin_again(
    sql: Compiler, lease: RelayLease, *, number: int, new_number: int, part: str, columns: str
) -> Operation[RelayBatch | None]:
    """Begin with a batch once more of which nothing was published: with another part file, with the same jobs.

    ``None`` if the lease is another process's.
    """
    parameters = {**lease.parameters(sql), "number": new_number, "old_number": number, "part": part}
    if not (yield sql(_NUMBER), parameters):
        return None
    if new_number != number:
        yield sql(_RENUMBER), parameters
    batch = RelayBatch(new_number)
    batch.rows = yield sql("SELECT " + columns + " FROM {jobs}" + _OF_BATCH + " ORDER BY id"), parameters
    return batch


@single
def seal_batch(sql: Compiler, lease: RelayLease, *, number: int, part: str, sealed: str) -> Operation[bool]:
    """Let this part file, and no other, be what the batch is published as. False if the lease is another process's."""
    parameters = {**lease.parameters(sql), "number": number, "part": part, "sealed": sealed}
    return bool((yield sql(_SEAL), parameters))


def finish_batch(sql: Compiler, lease: RelayLease, *, number: int, deletes: bool) -> Operation[int | None]:
    """Mark the jobs of a published batch done, or delete them, and make ready what waits for them. Returns how many
    there were; ``None`` if the lease is another process's.
    """
    parameters = {**lease.parameters(sql), "number": number}
    yield from _do_not_wait(sql)
    if not (yield sql(_FINISH), parameters):
        return None
    rows = yield sql(_DELETE if deletes else _MARK), parameters
    if rows:
        for queue in (yield from free_waiting(sql, [row[0] for row in rows])):
            yield from notify(sql, queue)
    return len(rows)


@reading
def jobs_of(sql: Compiler, ids: Iterable[int]) -> Operation[Rows]:
    """Rows of ``COLUMNS`` by id."""
    return (yield sql(_JOBS_OF), {"ids": sql.flavour.list_of(ids)})


def drop_failed(
    sql: Compiler, lease: RelayLease, *, number: int, failed: Sequence[Failed], behind: Sequence[int]
) -> Operation[bool]:
    """Take jobs out of a batch that is not sealed: those that can't be moved, and the ids ``behind`` them in a lane.

    False if the lease is another process's.
    """
    parameters = {**lease.parameters(sql), "number": number}
    if not (yield sql(_RENEW), parameters):
        return False
    statement, rows = sql.rows(_FAIL, _FAILED, failed)
    yield statement, {**parameters, **rows}
    if behind:
        yield sql(_GIVE_BACK), {**parameters, "ids": sql.flavour.list_of(behind)}
    return True


# -- which jobs ------------------------------------------------------------------------------------------------------


def _pick(sql: Compiler, parameters: dict[str, Any], jobs: int) -> Operation[list[Picked]]:
    """Jobs that are due, most urgent first. Limits are literals: PostgreSQL's planner knows no parameter's value."""
    found = list((yield sql(_PICK_ERROR % max(1, jobs // RETRIES)), parameters))
    levels = yield sql(_FIRST_LEVEL), parameters
    while levels and len(found) < jobs:
        limits = {**parameters, "level": levels[0][0]}
        rows = yield sql(_PICK_READY % jobs), limits
        found += rows[: jobs - len(found)]
        if len(found) < jobs:
            levels = yield sql(_NEXT_LEVEL), limits
    return found


def _within(picked: Iterable[Picked], max_bytes: int) -> Iterable[Picked]:
    size = 0
    for each in picked:
        if size and size + each[BYTES] > max_bytes:
            return
        size += each[BYTES]
        yield each


def _in_order_of_lanes(
    sql: Compiler, parameters: dict[str, Any], picked: list[Picked], lanes: list[str]
) -> Operation[tuple[list[Picked], list[Picked]]]:
    """Those that may be moved now, and those to be held: what is ready behind an earlier job in error, or beside one
    that a consumer runs.

    A job may have been picked before an earlier one of its lane, which is less urgent: then the earlier ones take the
    places of the later ones.
    """
    ids = sql.flavour.list_of([each[ID] for each in picked])
    last_id = max(each[ID] for each in picked)
    statement, rows = sql.rows(_BLOCKERS, _LANES, [(lane,) for lane in lanes])
    found = yield statement, {**parameters, **rows, "ids": ids, "last_id": last_id}
    blockers = {lane: (runs, failed_id, ready_id) for lane, runs, failed_id, ready_id in found}
    chosen: list[Picked] = []
    held: list[Picked] = []
    early: dict[str, list[Picked]] = {}
    for each in picked:
        runs, failed_id, ready_id = blockers.get(each[LANE], (False, None, None))
        if runs or (failed_id is not None and failed_id < each[ID]):
            if not each[WAS_IN_ERROR]:
                held.append(each)
        elif ready_id is not None and ready_id < each[ID]:
            early.setdefault(each[LANE], []).append(each)
        else:
            chosen.append(each)
    for lane, too_early in early.items():
        taken = {each[ID] for each in chosen if each[LANE] == lane and not each[WAS_IN_ERROR]}
        stops = [each[ID] for each in too_early if each[WAS_IN_ERROR]]
        stops += [failed_id for failed_id in [blockers[lane][1]] if failed_id is not None]
        count = len(too_early) + len(taken)
        first = yield sql(_FIRST_OF_LANE), {**parameters, "lane": lane, "count": count}
        rows = yield sql(_LOCK), {"ids": sql.flavour.list_of([each[ID] for each in first])}
        locked = {row[0] for row in rows}
        for each in first:
            if each[ID] not in locked or each[ID] > min(stops, default=each[ID]):
                break  # somebody else has locked it, or it is behind one in error: so are those after it
            if each[ID] not in taken:
                chosen.append(each)
    return chosen, held
