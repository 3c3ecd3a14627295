"""The operations of a put. They run on the caller's connection, in the caller's transaction.

Rules:
1. A put never makes a unique violation, which would leave the caller's transaction unusable: ``ON CONFLICT``.
2. What a batch has written before it meets a conflict is deleted again, in the same transaction. What it has written
   before an error of SQLite, or an interrupt, goes with a savepoint; an error of PostgreSQL ends the transaction.
3. A put takes no lock on the job that it depends on. One that overlaps with the mark of that job is found by the sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox.claims import notify
from kestrelpy.outbox.errors import DuplicateJob, OutboxError, UnknownDependency
from kestrelpy.outbox.job import COLUMNS, ID, KEY

if TYPE_CHECKING:
    from kestrelpy.outbox.sql import Compiler, Operation, Rows

__all__ = ["PutOptions", "put_all", "put_one"]

ATTEMPTS = 100
"""So often a put finds that the job with its key was deleted just now, before it gives up."""

Dependency = int | tuple[str, str]
Known = dict[Dependency | None, tuple[int | None, str]]
"""What is depended on: its id, and the status of a job that depends on it."""


class PutOptions:
    """What is common to the jobs of one call, checked and encoded."""

    __slots__ = ("at_ms", "context", "delay_ms", "group", "if_exists", "lane", "priority", "queue")

    def __init__(
        self,
        queue: str,
        *,
        if_exists: str,
        group: str | None,
        lane: str | None,
        priority: int,
        delay_ms: int,
        at_ms: int | None,
        context: str | None,
    ) -> None:
        self.queue = queue
        self.if_exists = if_exists
        self.group = group
        self.lane = lane
        self.priority = priority
        self.delay_ms = delay_ms
        self.at_ms = at_ms
        self.context = context

    def parameters(self, sql: Compiler) -> dict[str, Any]:
        return {
            **sql.time(),
            "queue": self.queue,
            "job_group": self.group,
            "lane": self.lane,
            "priority": self.priority,
            "delay_ms": self.delay_ms,
            "at_ms": self.at_ms,
            "context": self.context,
        }


class NewPayload:
    """What each job has of its own: its encoded payload (text or bytes), its size, its key, what it depends on."""

    __slots__ = ("binary", "depends_on", "key", "payload_bytes", "text")

    def __init__(self, stored: str | bytes, payload_bytes: int, key: str | None, depends_on: Dependency | None) -> None:
        self.text = stored if isinstance(stored, str) else None
        self.binary = None if isinstance(stored, str) else stored
        self.payload_bytes = payload_bytes
        self.key = key
        self.depends_on = depends_on


_DUE = "coalesce(CAST(:at_ms AS bigint), {now} + CAST(:delay_ms AS bigint))"
_INTO = """INSERT INTO {jobs} (queue, "key", job_group, lane, status, priority, payload, payload_binary,
    payload_bytes, context, depends_on, added_ms, due_ms)"""
_INSERT = (
    _INTO
    + """
VALUES (:queue, :key, :job_group, :lane, :status, :priority, :payload, :payload_binary, :payload_bytes, :context,
    :depends_on, {now}, """
    + _DUE
    + """)
ON CONFLICT (queue, "key") WHERE "key" IS NOT NULL DO NOTHING RETURNING id, added_ms, due_ms"""
)
_INSERT_NOTIFY = _INSERT + ", pg_notify(:channel, :queue)"
_ROWS = {
    "new_key": "text",
    "new_payload": "text",
    "new_binary": "bytea",
    "new_bytes": "integer",
    "new_status": "text",
    "new_depends_on": "bigint",
}
_INSERT_ALL = (
    _INTO
    + """
SELECT :queue, new_key, :job_group, :lane, new_status, CAST(:priority AS integer), new_payload, new_binary, new_bytes,
    :context, new_depends_on, {now}, """
    + _DUE
    + """
FROM {rows} WHERE true ORDER BY place
ON CONFLICT (queue, "key") WHERE "key" IS NOT NULL DO NOTHING RETURNING id, added_ms, due_ms, "key"\n"""
)
_FIND_KEY = "SELECT " + COLUMNS + ' FROM {jobs} WHERE queue = :queue AND "key" = :key'
_FIND_KEYS = "SELECT " + COLUMNS + ' FROM {jobs} WHERE queue = :queue AND "key" {is_one_of_names}'
_LOCK_KEYS = _FIND_KEYS + " AND status IN ('ready', 'waiting', 'error') ORDER BY id {for_update}"
"""Not those that run: a slow caller must not hold up the mark of one. In one order, so that two callers do not wait for
each other.
"""
_STATUS_OF_ID = "SELECT id, status FROM {jobs} WHERE id = :id"
_STATUS_OF_KEY = 'SELECT id, status FROM {jobs} WHERE queue = :queue AND "key" = :key'
_REPLACE = (
    """UPDATE {jobs} SET payload = :payload, payload_binary = :payload_binary, payload_bytes = :payload_bytes,
    priority = :priority, due_ms = """
    + _DUE
    + """, tries = 0, first_error_ms = NULL, error = NULL, held = false,
    status = CASE WHEN status = 'waiting' THEN 'waiting' ELSE 'ready' END
WHERE queue = :queue AND "key" = :key AND status IN ('ready', 'waiting', 'error') RETURNING """
    + COLUMNS
)
_DELETE = "DELETE FROM {jobs} WHERE id {is_one_of}"
_BEGIN = "DELETE FROM {jobs} WHERE id = 0"
"""Python's ``sqlite3`` begins the caller's transaction before it. Else the savepoint would be a transaction."""
_SAVEPOINT = "SAVEPOINT kestrelpy_put_many"
_ROLLBACK = "ROLLBACK TO kestrelpy_put_many"
_RELEASE = "RELEASE kestrelpy_put_many"


def put_one(sql: Compiler, new: PutOptions, payload: NewPayload) -> Operation[tuple[Sequence[Any], bool]]:
    """Put one job: its row, and whether it is new. Raises ``UnknownDependency``, ``DuplicateJob``."""
    depends_on, status = yield from _dependency(sql, payload.depends_on)
    parameters = {**new.parameters(sql), **_own(payload, depends_on, status)}
    insert = sql(_INSERT)
    if sql.channel is not None:
        insert, parameters["channel"] = sql(_INSERT_NOTIFY), sql.channel
    for _ in range(ATTEMPTS):
        rows = yield insert, parameters
        if rows:
            return _row(new, payload, status, depends_on, rows[0]), True
        if payload.key is None:
            break
        if new.if_exists == "replace":
            rows = yield sql(_REPLACE), parameters
            if rows:
                yield from notify(sql, new.queue)
                return rows[0], False
        rows = yield sql(_FIND_KEY), parameters
        if rows and new.if_exists == "return":
            return rows[0], False
        if rows:
            raise DuplicateJob(rows[0][ID], new.queue, payload.key)
        # The other was deleted between the two statements: the key is free.
    raise _swallowed(new)


def put_all(
    sql: Compiler, new: PutOptions, payloads: Sequence[NewPayload]
) -> Operation[list[tuple[Sequence[Any], bool]]]:
    """Put jobs of one queue, all of them or none: each row, and whether it is new."""
    if sql.flavour.aborts:
        return (yield from _put_all(sql, new, payloads))
    for statement in (_BEGIN, _SAVEPOINT):
        yield sql(statement), {}
    try:
        found = yield from _put_all(sql, new, payloads)
    except GeneratorExit:
        raise
    except BaseException:  # a full disk, an interrupt: the caller may go on and commit
        with suppress(Exception):
            yield sql(_ROLLBACK), {}
            yield sql(_RELEASE), {}
        raise
    yield sql(_RELEASE), {}
    return found


def _put_all(
    sql: Compiler, new: PutOptions, payloads: Sequence[NewPayload]
) -> Operation[list[tuple[Sequence[Any], bool]]]:
    known: Known = {None: (None, "ready")}
    for each in payloads:
        if each.depends_on not in known:
            known[each.depends_on] = yield from _dependency(sql, each.depends_on)
    for _ in range(ATTEMPTS):
        made = yield from _insert_all(sql, new, payloads, known)
        if len(made) == len(payloads):
            there: dict[str, Sequence[Any]] | None = {}
        else:
            there = yield from _those_there(sql, new, payloads, made)
        if there is not None:
            if made or new.if_exists == "replace":
                yield from notify(sql, new.queue)
            return _in_order(new, made, payloads, known, there)
        # One of the others was deleted between the two statements: its key is free.
    raise _swallowed(new)


def _insert_all(sql: Compiler, new: PutOptions, payloads: Sequence[NewPayload], known: Known) -> Operation[Rows]:
    """Insert those whose keys are free: id, times and key of each."""
    parameters = new.parameters(sql)
    rows = [
        (each.key, each.text, each.binary, each.payload_bytes, status, depends_on)
        for each in payloads
        for depends_on, status in [known[each.depends_on]]
    ]
    made: list[Sequence[Any]] = []
    for statement, values in sql.batches(_INSERT_ALL, _ROWS, rows):
        made += yield statement, {**parameters, **values}
    return made


def _those_there(
    sql: Compiler, new: PutOptions, payloads: Sequence[NewPayload], made: Rows
) -> Operation[dict[str, Sequence[Any]] | None]:
    """The jobs that have the keys that were not free, by key; replaced, if they are to be.

    If one of them is gone by now, or is in the way, what was made is deleted again: ``None``, or ``DuplicateJob``.
    """
    new_keys = {row[3] for row in made}
    taken = {each.key: each for each in payloads if each.key is not None and each.key not in new_keys}
    parameters = {**new.parameters(sql), "names": sql.flavour.list_of(taken)}
    there: dict[str, Sequence[Any]] = {}
    if new.if_exists == "replace":  # locked, so that all of them can be replaced once the first one is
        there = {row[KEY]: row for row in (yield sql(_LOCK_KEYS), parameters)}
    others: dict[str, Sequence[Any]] = {}
    if len(there) < len(taken):
        others = {row[KEY]: row for row in (yield sql(_FIND_KEYS), parameters) if row[KEY] not in there}
    if new.if_exists == "return":
        there, others = others, {}
    if len(there) == len(taken) and len(made) + len(taken) == len(payloads):
        if new.if_exists == "replace":
            for key, each in taken.items():
                there[key] = (yield sql(_REPLACE), {**parameters, **_own(each, None, "")})[0]
        return there
    yield sql(_DELETE), {"ids": sql.flavour.list_of([row[0] for row in made])}
    for key in taken:
        if key in others:
            raise DuplicateJob(others[key][ID], new.queue, key)
    if len(made) + len(taken) < len(payloads):
        raise _swallowed(new)
    return None


def _in_order(
    new: PutOptions, made: Rows, payloads: Sequence[NewPayload], known: Known, there: dict[str, Sequence[Any]]
) -> list[tuple[Sequence[Any], bool]]:
    """The rows in the order of the payloads. Ids are given out in that order; keys say which were not new."""
    rows = iter(sorted(made, key=lambda row: row[0]))
    found: list[tuple[Sequence[Any], bool]] = []
    for each in payloads:
        if each.key is not None and each.key in there:
            found.append((there[each.key], False))
        else:
            depends_on, status = known[each.depends_on]
            found.append((_row(new, each, status, depends_on, next(rows)), True))
    return found


def _own(payload: NewPayload, depends_on: int | None, status: str) -> dict[str, Any]:
    """The parameters of one row that are not ``new.parameters``."""
    return {
        "key": payload.key,
        "status": status,
        "payload": payload.text,
        "payload_binary": payload.binary,
        "payload_bytes": payload.payload_bytes,
        "depends_on": depends_on,
    }


def _swallowed(new: PutOptions) -> OutboxError:
    return OutboxError(
        f"the database did not take the job of queue {new.queue!r}, and says nothing: is there a trigger or a policy?"
    )


def _row(
    new: PutOptions, payload: NewPayload, status: str, depends_on: int | None, made: Sequence[Any]
) -> tuple[Any, ...]:
    """A new row of ``COLUMNS``. Asking the database for what is known would cost more than the INSERT."""
    given = (new.queue, payload.key, new.group, new.lane, status, new.priority, payload.text, payload.binary)
    return (made[0], *given, new.context, depends_on, 0, made[1], made[2], None, None, None, None, None)


def _dependency(sql: Compiler, depends_on: Dependency | None) -> Operation[tuple[int | None, str]]:
    """The id of the job that is waited for, and the status of one that waits for it."""
    if depends_on is None:
        return None, "ready"
    if isinstance(depends_on, int):
        rows = yield sql(_STATUS_OF_ID), {"id": depends_on}
    else:
        rows = yield sql(_STATUS_OF_KEY), {"queue": depends_on[0], "key": depends_on[1]}
    if not rows:
        raise UnknownDependency(depends_on)
    return rows[0][0], "ready" if rows[0][1] == "done" else "waiting"
