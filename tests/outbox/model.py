"""What an outbox is, as a dict of rows: each change of a job in a few lines of Python, without SQL or transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

LEASE_MS = 30_000
REPLACEABLE = ("ready", "waiting", "error")
CANCELLABLE = ("ready", "waiting", "error", "dead")
ENDED = ("error", "dead", "cancelled", "done")
SHOWN = (
    "queue",
    "key",
    "group",
    "lane",
    "status",
    "priority",
    "payload",
    "depends_on",
    "tries",
    "added_ms",
    "due_ms",
    "started_ms",
    "finished_ms",
    "first_error_ms",
    "error",
    "worker",
)


class Duplicate(Exception):
    """Of the job with this id."""

    def __init__(self, job_id: int) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class Unknown(Exception):
    """There is nothing to depend on."""


@dataclass
class ModelRow:
    """A job. ``token``: of the claim that it runs by; ``was_due_ms``: when it was due before that."""

    queue: str
    payload: Any
    key: str | None
    group: str | None
    lane: str | None
    priority: int
    added_ms: int
    due_ms: int
    depends_on: int | None = None
    status: str = "ready"
    id: int = 0
    tries: int = 0
    started_ms: int | None = None
    finished_ms: int | None = None
    first_error_ms: int | None = None
    error: str | None = None
    worker: str | None = None
    token: int | None = None
    was_due_ms: int = 0

    def shown(self) -> dict[str, Any]:
        """What can be seen of it."""
        return {name: getattr(self, name) for name in SHOWN}


class OutboxModel:
    """All jobs by id, and the queues that are paused."""

    def __init__(self) -> None:
        self.rows: dict[int, ModelRow] = {}
        self.paused: set[str] = set()

    def copy(self) -> OutboxModel:
        """For what may be rolled back."""
        return deepcopy(self)

    # -- puts --------------------------------------------------------------------------------------------------------

    def put(
        self, queue: str, items: Sequence[tuple[Any, str | None]], *, if_exists: str, depends_on: Any, **common: Any
    ) -> list[tuple[ModelRow, bool]]:
        """The jobs, each with whether it is new; new ones have no id yet, and are no part of the model."""
        needed, status = self._dependency(depends_on)
        found: list[tuple[ModelRow, bool]] = []
        for payload, key in items:
            there = self.find(queue, key)
            if there is None:
                row = ModelRow(queue, payload, key, depends_on=needed, status=status, **common)
                found.append((row, True))
            elif if_exists == "return" or (if_exists == "replace" and there.status in REPLACEABLE):
                found.append((there, False))
            else:
                raise Duplicate(there.id)
        if if_exists == "replace":
            for (row, is_new), (payload, _) in zip(found, items, strict=True):
                if not is_new:
                    row.payload, row.priority, row.due_ms = payload, common["priority"], common["due_ms"]
                    row.status = "waiting" if row.status == "waiting" else "ready"
                    row.tries, row.error, row.first_error_ms = 0, None, None
        return found

    def add(self, row: ModelRow, job_id: int) -> None:
        """A new one, by the id that it was given."""
        row.id = job_id
        self.rows[job_id] = row

    def find(self, queue: str, key: str | None) -> ModelRow | None:
        """The one with this key, if it is one."""
        found = (row for row in self.rows.values() if key is not None and (row.queue, row.key) == (queue, key))
        return next(found, None)

    def _dependency(self, depends_on: Any) -> tuple[int | None, str]:
        if depends_on is None:
            return None, "ready"
        other = self.find(*depends_on) if isinstance(depends_on, tuple) else self.rows.get(depends_on)
        if other is None:
            raise Unknown
        return other.id, "ready" if other.status == "done" else "waiting"

    # -- claims and outcomes -----------------------------------------------------------------------------------------

    def to_claim(self, status: str, queues: Iterable[str], now: int) -> list[ModelRow]:
        """All that could be claimed, in the order of the claim."""
        found = [
            row
            for row in self.rows.values()
            if row.status == status and row.due_ms <= now and row.queue in queues and row.queue not in self.paused
            if not self._is_behind(row, now)
        ]
        if status == "ready":
            return sorted(found, key=lambda row: (row.priority, row.due_ms, row.id))
        return sorted(found, key=lambda row: (row.due_ms, row.id))

    def _is_behind(self, row: ModelRow, now: int) -> bool:
        """Whether another one of its lane runs, is in error, or comes first."""
        for other in self.rows.values():
            if row.lane is None or other is row or (other.queue, other.lane) != (row.queue, row.lane):
                continue
            if other.status == "running":
                return True
            if other.status == "error" and (row.status == "ready" or other.id < row.id):
                return True
            if other.status == row.status == "ready" and other.id < row.id and other.due_ms <= now:
                return True
        return False

    def claim(self, row: ModelRow, token: int, now: int) -> None:
        row.status, row.token, row.worker = "running", token, "tests"
        row.tries += 1
        row.started_ms, row.was_due_ms, row.due_ms = now, row.due_ms, now + LEASE_MS

    def of_claim(self, job_id: int, token: int) -> ModelRow | None:
        """The job, if it still runs by this claim."""
        row = self.rows.get(job_id)
        return row if row is not None and row.token == token else None

    def done(self, row: ModelRow, now: int, *, delete: bool) -> None:
        row.status, row.token, row.error, row.finished_ms, row.due_ms = "done", None, None, now, row.was_due_ms
        if delete:
            del self.rows[row.id]
        for other in self.rows.values():
            if other.status == "waiting" and other.depends_on == row.id:
                other.status = "ready"

    def fail(self, row: ModelRow, now: int, delay_ms: int, error: str, *, is_dead: bool) -> None:
        row.status, row.token, row.error = "dead" if is_dead else "error", None, error
        row.first_error_ms = now if row.first_error_ms is None else row.first_error_ms
        row.finished_ms = now if is_dead else None
        row.due_ms = row.was_due_ms if is_dead else now + delay_ms

    def give_back(self, row: ModelRow, now: int, delay_ms: int | None) -> None:
        row.status, row.token = "ready" if row.first_error_ms is None else "error", None
        row.tries -= 1
        row.due_ms = row.was_due_ms if delay_ms is None else now + delay_ms

    def lapsed(self, queues: Iterable[str], now: int) -> list[ModelRow]:
        running = [row for row in self.rows.values() if row.status == "running" and row.queue in queues]
        return [row for row in running if row.due_ms <= now]

    # -- mending -----------------------------------------------------------------------------------------------------

    def retry(self, row: ModelRow, now: int) -> bool:
        if row.status not in ENDED:
            return False
        other = None if row.depends_on is None else self.rows.get(row.depends_on)
        row.status = "ready" if other is None or other.status == "done" else "waiting"
        row.due_ms, row.tries = now, 0
        row.error = row.first_error_ms = row.started_ms = row.finished_ms = None
        return True

    def cancel(self, row: ModelRow, now: int) -> bool:
        if row.status not in CANCELLABLE:
            return False
        row.status, row.finished_ms = "cancelled", now
        return True

    def prune(self, keep_ms: dict[str, int], now: int) -> int:
        """``keep_ms``: by status, how long."""
        needed = {row.depends_on for row in self.rows.values() if row.status == "waiting"}
        gone = [
            row.id
            for row in self.rows.values()
            if row.status in keep_ms and row.id not in needed
            if row.finished_ms is not None and row.finished_ms <= now - keep_ms[row.status]
        ]
        for job_id in gone:
            del self.rows[job_id]
        return len(gone)

    def counts(self) -> list[tuple[str, str, int]]:
        found = Counter((row.queue, row.status) for row in self.rows.values())
        return sorted((*key, count) for key, count in found.items())
