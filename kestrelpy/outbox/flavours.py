"""What PostgreSQL and SQLite say differently: the time, lists and rows as parameters, and the claim of jobs.

The other statements are the same text for both, with these fields in it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox.job import COLUMNS

if TYPE_CHECKING:
    from kestrelpy.outbox.sql import Claim, Compiler, Operation, Rows

__all__ = ["BYTES", "CLAIMED", "HELD", "WAS_DUE", "Postgresql", "Sqlite"]

CLAIMED = f"{COLUMNS}, held, was_due_ms, payload_bytes"
"""What a claim returns of a row. A row that is ``held`` was not claimed, but put behind others of its lane."""
HELD, WAS_DUE, BYTES = 19, 20, 21
SIZES = (250, 16, 1)
"""How many rows an INSERT of SQLite has."""

_BEHIND = """(i.lane IS NOT NULL AND EXISTS (
    SELECT 1 FROM {jobs} a WHERE a.queue = i.queue AND a.lane = i.lane AND a.lane IS NOT NULL AND a.id <> i.id
    AND a.status IN ('ready', 'running', 'error')
    AND (a.status IN ('running', 'error') OR (a.id < i.id AND a.due_ms <= {now}))))"""
"""Whether a ready job has to wait for another one of its lane."""
_RETRY_BEHIND = """(i.lane IS NOT NULL AND EXISTS (
    SELECT 1 FROM {jobs} a WHERE a.queue = i.queue AND a.lane = i.lane AND a.lane IS NOT NULL AND a.id <> i.id
    AND a.status IN ('ready', 'running', 'error')
    AND (a.status = 'running' OR (a.status = 'error' AND a.id < i.id))))"""
"""The same of a job in error, which itself holds its lane."""


class Postgresql:
    """PostgreSQL 13 or newer. ``server_time``: the server's clock decides what is due.

    The literal limits keep the planner from guessing that a tenth of the table is claimed, and so from hash joins over
    all of it. ``statement_timestamp()`` can be compared in an index, as ``clock_timestamp()`` can't.
    """

    name = "postgresql"
    aborts = True
    updates_in_with = True

    def __init__(self, *, server_time: bool, takes_text: bool) -> None:
        self._takes_text = takes_text  # whether the driver takes an array as text; asyncpg takes lists alone
        now = "CAST(extract(epoch FROM statement_timestamp()) * 1000 AS bigint)"
        self.fields: Mapping[str, str] = {
            "now": now if server_time else "CAST(:now AS bigint)",
            "is_one_of": "= ANY (CAST(:ids AS bigint[]))",
            "is_one_of_names": "= ANY (CAST(:names AS text[]))",
            "for_update": "FOR UPDATE",
            "skip_locked": "FOR UPDATE SKIP LOCKED",
            "is_in": "= ANY (ARRAY",  # a join could be planned over all of the table
            "end_in": ")",
            "of_rows": "AND j.id = ANY (CAST(:rows_r_id AS bigint[]))",  # else all of a small table is read
        }

    def list_of(self, values: Iterable[Any]) -> Any:
        found = list(values)
        are_ids = self._takes_text and all(type(each) is int for each in found)
        return _array("bigint", found) if are_ids else found

    def rows(self, columns: Mapping[str, str]) -> str:
        arrays = ", ".join(f"CAST(:rows_{name} AS {kind}[])" for name, kind in columns.items())
        return f"unnest({arrays}) WITH ORDINALITY AS r({', '.join(columns)}, place)"

    def row_values(self, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        found = zip(*rows, strict=True) if rows else [()] * len(columns)
        if not self._takes_text:
            return {f"rows_{name}": list(values) for name, values in zip(columns, found, strict=True)}
        return {
            f"rows_{name}": _array(kind, values) for (name, kind), values in zip(columns.items(), found, strict=True)
        }

    def batches(
        self, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        yield self.rows(columns), 0, self.row_values(columns, rows)

    def claim(self, sql: Compiler, status: str, queues: Sequence[tuple[str, int]], claim: Claim) -> Operation[Rows]:
        parameters = {
            **claim.parameters(),
            **sql.time(),
            "queues": [name for name, _ in queues],
            "most": [min(most, claim.jobs) for _, most in queues],
        }
        return (yield sql(_claim_of(status, len(queues))), parameters)

    def next_due_ms(self, sql: Compiler, queues: Sequence[str]) -> Operation[tuple[int, int | None, int | None]]:
        rows = yield sql(_NEXT_DUE), {**sql.time(), "names": list(queues)}
        now, ready, failed = rows[0]
        return now, ready, failed


def _array(kind: str, values: Iterable[Any]) -> str:
    """An array as PostgreSQL writes it. Drivers escape the quotes of JSON so slowly that it took most of a put."""
    if kind == "text":
        parts = [
            "NULL" if each is None else '"' + each.replace("\\", "\\\\").replace('"', '\\"') + '"' for each in values
        ]
    elif kind == "bytea":
        parts = ["NULL" if each is None else f'"\\\\x{each.hex()}"' for each in values]
    else:
        parts = ["NULL" if each is None else str(each) for each in values]
    return "{" + ",".join(parts) + "}"


_OPEN_QUEUES = """wanted AS (
    SELECT q.queue, q.most FROM unnest(CAST(:queues AS text[]), CAST(:most AS bigint[])) AS q(queue, most)
    WHERE NOT EXISTS (SELECT 1 FROM {queues} p WHERE p.queue = q.queue AND p.paused)
)"""
_LEVELS = """RECURSIVE level(priority) AS (
    SELECT min(f.priority) FROM {jobs} f WHERE f.queue = wanted.queue AND f.status = 'ready' AND NOT f.held
    UNION ALL
    SELECT (SELECT min(f.priority) FROM {jobs} f
            WHERE f.queue = wanted.queue AND f.status = 'ready' AND NOT f.held AND f.priority > level.priority)
    FROM level WHERE level.priority IS NOT NULL
)"""
"""The priorities there are in a queue, one look into the index for each, and only as far as they are needed: within
each the due jobs come first. Without it a million jobs put for the future would be passed at each claim.
"""
_NEXT_DUE = (
    """WITH wanted AS (
    SELECT q.queue FROM unnest(CAST(:names AS text[])) AS q(queue)
    WHERE NOT EXISTS (SELECT 1 FROM {queues} p WHERE p.queue = q.queue AND p.paused)
)
SELECT {now}, (
    SELECT min(first.due_ms) FROM wanted CROSS JOIN LATERAL (
        WITH """
    + _LEVELS
    + """
        SELECT soonest.due_ms FROM level CROSS JOIN LATERAL (
            SELECT j.due_ms FROM {jobs} j WHERE j.queue = wanted.queue AND j.status = 'ready' AND NOT j.held
            AND j.priority = level.priority ORDER BY j.due_ms LIMIT 1
        ) soonest
    ) first
), (
    SELECT min(first.due_ms) FROM wanted CROSS JOIN LATERAL (
        SELECT j.due_ms FROM {jobs} j WHERE j.queue = wanted.queue AND j.status = 'error' ORDER BY j.due_ms LIMIT 1
    ) first
)"""
)
_TAKE = """, chosen AS (
    SELECT id, is_behind FROM (
        SELECT p.*, row_number() OVER (ORDER BY priority, due_ms, id) AS place,
               sum(payload_bytes) OVER (ORDER BY priority, due_ms, id) - payload_bytes AS bytes_before
        FROM picked p
    ) ranked WHERE place <= CAST(:jobs AS bigint) AND bytes_before < CAST(:max_bytes AS bigint) LIMIT 1000
)
UPDATE {jobs} AS j SET
    status = CASE WHEN c.is_behind THEN 'ready' ELSE 'running' END,
    held = c.is_behind,
    token = CASE WHEN c.is_behind THEN NULL ELSE CAST(:token AS bigint) END,
    worker = CASE WHEN c.is_behind THEN j.worker ELSE CAST(:worker AS text) END,
    tries = j.tries + CASE WHEN c.is_behind THEN 0 ELSE 1 END,
    started_ms = CASE WHEN c.is_behind THEN j.started_ms ELSE {now} END,
    was_due_ms = CASE WHEN c.is_behind THEN NULL ELSE j.due_ms END,
    due_ms = CASE WHEN c.is_behind THEN j.due_ms ELSE {now} + CAST(:lease_ms AS bigint) END"""
_RETURN_CLAIMED = """
FROM chosen c WHERE j.id = c.id AND j.id = ANY (ARRAY(SELECT id FROM chosen))
RETURNING """ + ", ".join(f"j.{name.strip()}" for name in CLAIMED.split(","))

_CLAIM_READY = (
    "WITH "
    + _OPEN_QUEUES
    + """, picked AS MATERIALIZED (
    SELECT found.* FROM wanted CROSS JOIN LATERAL (
        WITH """
    + _LEVELS
    + """
        SELECT ordered.* FROM level CROSS JOIN LATERAL (SELECT * FROM (
            SELECT i.id, i.priority, i.due_ms, i.payload_bytes, """
    + _BEHIND
    + """ AS is_behind
            FROM {jobs} i
            WHERE i.queue = wanted.queue AND i.status = 'ready' AND NOT i.held AND i.priority = level.priority
            AND i.due_ms <= {now}
            ORDER BY i.due_ms, i.id LIMIT wanted.most FOR UPDATE SKIP LOCKED
        ) unlimited LIMIT 1000) ordered LIMIT wanted.most
    ) found LIMIT 1000
)"""
    + _TAKE
    + _RETURN_CLAIMED
)
_CLAIM_ERROR = (
    "WITH "
    + _OPEN_QUEUES
    + """, picked AS MATERIALIZED (
    SELECT found.* FROM wanted CROSS JOIN LATERAL (SELECT * FROM (
        SELECT i.id, 0 AS priority, i.due_ms, i.payload_bytes, false AS is_behind
        FROM {jobs} i
        WHERE i.queue = wanted.queue AND i.status = 'error' AND i.due_ms <= {now} AND NOT """
    + _RETRY_BEHIND
    + """
        ORDER BY i.due_ms, i.id LIMIT wanted.most FOR UPDATE SKIP LOCKED
    ) unlimited LIMIT 1000) found LIMIT 1000
)"""
    + _TAKE
    + _RETURN_CLAIMED
)


@functools.cache
def _claim_of(status: str, queues: int) -> str:
    """With room for what each of so many queues may give: with less the first ones would hide the others. A few texts
    are enough, each of which is compiled once.
    """
    room = f") found LIMIT {1000 << (queues - 1).bit_length()}\n"
    return (_CLAIM_READY if status == "ready" else _CLAIM_ERROR).replace(") found LIMIT 1000\n", room)


class Sqlite:
    """SQLite 3.35 or newer. One connection at a time writes, so a claim may look first and then update."""

    name = "sqlite"
    aborts = False
    updates_in_with = False

    def __init__(self) -> None:
        self.fields: Mapping[str, str] = {
            "now": ":now",
            "is_one_of": "IN (SELECT value FROM json_each(:ids))",
            "is_one_of_names": "IN (SELECT value FROM json_each(:names))",
            "for_update": "",
            "skip_locked": "",
            "is_in": "IN ",
            "end_in": "",
            "of_rows": "",
        }

    def list_of(self, values: Iterable[Any]) -> Any:
        return json.dumps(list(values))

    def rows(self, columns: Mapping[str, str]) -> str:
        found = ", ".join(f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(columns))
        return f'(SELECT {found}, "key" AS place FROM json_each(:rows)) AS r'

    def row_values(self, _columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {"rows": json.dumps([list(row) for row in rows], ensure_ascii=False)}

    def batches(
        self, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """As VALUES, which take bytes, and half the time of JSON; in few sizes, each of which is compiled once."""
        start = 0
        for size in SIZES:
            while len(rows) - start >= size:
                yield self._values(columns, size), size, self._placed(rows[start : start + size])
                start += size

    def _values(self, columns: Mapping[str, str], size: int) -> str:
        names = ", ".join(f"column{place + 1} AS {name}" for place, name in enumerate(columns))
        row = "(" + ", ".join(f":rows_{{at}}_{place}" for place in range(len(columns))) + ")"
        values = ", ".join(row.replace("{at}", str(at)) for at in range(size))
        return f"(SELECT {names}, 0 AS place FROM (VALUES {values})) AS r"

    def _placed(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {f"rows_{at}_{place}": value for at, row in enumerate(rows) for place, value in enumerate(row)}

    def claim(self, sql: Compiler, status: str, queues: Sequence[tuple[str, int]], claim: Claim) -> Operation[Rows]:
        parameters = {**claim.parameters(), **sql.time(), "names": self.list_of(name for name, _ in queues)}
        paused = {row[0] for row in (yield sql(_PAUSED), parameters)}
        found: list[Sequence[Any]] = []
        for name, most in queues:
            if name in paused:
                continue
            limits = {**parameters, "queue": name, "most": min(most, claim.jobs)}
            if status == "error":
                found += yield sql(_FIND_ERROR), limits
                continue
            level = (yield sql(_FIRST_LEVEL), limits)[0][0]
            while level is not None and limits["most"] > 0:
                limits["level"] = level
                rows = yield sql(_FIND_READY), limits
                found += rows
                limits["most"] -= len(rows)
                level = (yield sql(_NEXT_LEVEL), limits)[0][0]
        chosen, held, size = [], [], 0
        for job_id, _, _, payload_bytes, is_behind in sorted(found, key=lambda row: (row[1], row[2], row[0]))[
            : claim.jobs
        ]:
            if is_behind:
                held.append(job_id)
            elif size < claim.max_bytes:
                chosen.append(job_id)
                size += payload_bytes
        rows = []
        if chosen:
            rows += yield sql(_UPDATE_CLAIMED), {**parameters, "ids": self.list_of(chosen)}
        if held:
            rows += yield sql(_HOLD), {**parameters, "ids": self.list_of(held)}
        return rows

    def next_due_ms(self, sql: Compiler, queues: Sequence[str]) -> Operation[tuple[int, int | None, int | None]]:
        ready: list[int] = []
        failed: list[int] = []
        paused = {row[0] for row in (yield sql(_PAUSED), {"names": self.list_of(queues)})}
        for queue in set(queues) - paused:
            failed += [row[0] for row in (yield sql(_NEXT_ERROR), {"queue": queue}) if row[0] is not None]
            level = (yield sql(_FIRST_LEVEL), {"queue": queue})[0][0]
            while level is not None:
                parameters = {"queue": queue, "level": level}
                ready.append((yield sql(_FIRST_DUE), parameters)[0][0])
                level = (yield sql(_NEXT_LEVEL), parameters)[0][0]
        return sql.time()["now"], min(ready, default=None), min(failed, default=None)


_PAUSED = "SELECT queue FROM {queues} WHERE paused AND queue {is_one_of_names}"
_FIRST_LEVEL = "SELECT min(priority) FROM {jobs} WHERE queue = :queue AND status = 'ready' AND NOT held"
_NEXT_LEVEL = _FIRST_LEVEL + " AND priority > :level"
_NEXT_ERROR = "SELECT min(due_ms) FROM {jobs} WHERE status = 'error' AND queue = :queue"
_FIRST_DUE = """SELECT min(due_ms) FROM {jobs} WHERE queue = :queue AND status = 'ready' AND NOT held
AND priority = :level"""
_FIND_READY = (
    "SELECT i.id, i.priority, i.due_ms, i.payload_bytes, "
    + _BEHIND
    + """ FROM {jobs} i
WHERE i.queue = :queue AND i.status = 'ready' AND NOT i.held AND i.priority = :level AND i.due_ms <= {now}
ORDER BY i.due_ms, i.id LIMIT :most"""
)
_FIND_ERROR = (
    "SELECT i.id, 0, i.due_ms, i.payload_bytes, 0 FROM {jobs} i"
    " WHERE i.queue = :queue AND i.status = 'error' AND i.due_ms <= {now} AND NOT "
    + _RETRY_BEHIND
    + " ORDER BY i.due_ms, i.id LIMIT :most"
)
_UPDATE_CLAIMED = (
    """UPDATE {jobs} SET status = 'running', held = false, token = :token, worker = :worker, tries = tries + 1,
started_ms = {now}, was_due_ms = due_ms, due_ms = {now} + :lease_ms WHERE id {is_one_of} RETURNING """
    + CLAIMED
)
_HOLD = "UPDATE {jobs} SET held = true WHERE id {is_one_of} RETURNING " + CLAIMED
