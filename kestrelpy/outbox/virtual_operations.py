"""The operations of the test kit alone, on a database. ``journal_virtual`` has them for a work queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox.flavours import BYTES, CLAIMED
from kestrelpy.outbox.job import COLUMNS, ID
from kestrelpy.outbox.sql import reading

if TYPE_CHECKING:
    from kestrelpy.outbox.sql import Claim, Compiler, Operation

__all__ = ["NAMES", "claim_again", "next_later_ms", "with_due_errors"]

_LATER = """SELECT min(due_ms) FROM {jobs} j WHERE queue {is_one_of_names} AND due_ms > {now} AND (
    (status = 'running' AND relay_batch IS NULL) OR (
        status IN ('ready', 'error')
        AND NOT EXISTS (SELECT 1 FROM {queues} p WHERE p.queue = j.queue AND p.paused)))"""
_DUE_ERRORS = """SELECT DISTINCT queue FROM {jobs} WHERE status = 'error' AND due_ms <= {now}
AND queue {is_one_of_names} ORDER BY queue"""
_CLAIM_AGAIN = (
    """UPDATE {jobs} SET status = 'running', token = :token, worker = :worker, tries = tries + 1, finished_ms = NULL,
started_ms = {now}, was_due_ms = coalesce(was_due_ms, due_ms), due_ms = {now} + CAST(:lease_ms AS bigint)
WHERE id = :id RETURNING """
    + CLAIMED
)
NAMES = [name.strip().strip('"') for name in COLUMNS.split(",")]
"""Of the columns of a row of ``COLUMNS``."""
_PUT_BACK = f"""INSERT INTO {{jobs}} ({COLUMNS}, payload_bytes)
VALUES ({", ".join(f":{name}" for name in NAMES)}, :payload_bytes)"""


@reading
def next_later_ms(sql: Compiler, names: Sequence[str]) -> Operation[int | None]:
    """When something of these queues is due after now."""
    found = (yield sql(_LATER), {**sql.time(), "names": sql.flavour.list_of(names)})[0][0]
    return None if found is None else int(found)


@reading
def with_due_errors(sql: Compiler, queues: Sequence[str]) -> Operation[list[str]]:
    """Those of the queues that have jobs in error that are due."""
    return [row[0] for row in (yield sql(_DUE_ERRORS), {**sql.time(), "names": sql.flavour.list_of(queues)})]


def claim_again(sql: Compiler, row: Sequence[Any], wanted: Claim) -> Operation[Sequence[Any]]:
    """Claim the job of this row of ``CLAIMED``, whatever its status is, and also if its row was deleted."""
    parameters = {**sql.time(), **wanted.parameters(), "id": row[ID]}
    rows = yield sql(_CLAIM_AGAIN), parameters
    if not rows:
        yield sql(_PUT_BACK), {**dict(zip(NAMES, row, strict=False)), "payload_bytes": row[BYTES]}
        rows = yield sql(_CLAIM_AGAIN), parameters
    return rows[0]
