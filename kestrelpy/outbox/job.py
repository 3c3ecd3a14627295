"""``Job``: one row of an outbox, as it was when it was read; and what a handler may say of the job that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

__all__ = ["COLUMNS", "GiveUp", "Job", "RetryLater", "current_job"]

COLUMNS = (
    'id, queue, "key", job_group, lane, status, priority, payload, payload_binary, context, depends_on, tries, '
    "added_ms, due_ms, started_ms, finished_ms, first_error_ms, error, worker"
)
"""What is selected of a row, in the order that ``Job`` takes."""


class RetryLater(Exception):
    """Raised by a handler: run this job again in ``seconds``. It is no failure, and does not count as a try."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"again in {seconds} s")
        self.seconds = seconds


class GiveUp(Exception):
    """Raised by a handler: this job is dead at once, however many retries it has left. The text is kept with it."""


class Decoder(Protocol):
    """Gives the codec of a queue."""

    def decode(self, queue: str, stored: str | bytes) -> Any: ...


class Job:
    """A job as it was when it was read. Does not change. Instants are milliseconds since the Unix epoch.

    ``status``: ``"ready"`` (may run from ``due_ms`` on), ``"waiting"`` (for the job ``depends_on``), ``"running"``
    (its lease lasts until ``due_ms``), ``"error"`` (failed, comes again at ``due_ms``), ``"done"``, ``"dead"`` (given
    up), ``"cancelled"``. ``tries``: the runs so far. ``error``: the last traceback. ``context``: what was captured at
    the put, as JSON text. ``is_new``: False if the put found a job with the same key.
    """

    __slots__ = (
        "_decoder",
        "_stored",
        "added_ms",
        "context",
        "depends_on",
        "due_ms",
        "error",
        "finished_ms",
        "first_error_ms",
        "group",
        "id",
        "is_new",
        "key",
        "lane",
        "priority",
        "queue",
        "started_ms",
        "status",
        "tries",
        "worker",
    )

    id: int
    queue: str
    key: str | None
    group: str | None
    lane: str | None
    status: str
    priority: int
    depends_on: int | None
    tries: int
    added_ms: int
    due_ms: int
    started_ms: int | None
    finished_ms: int | None
    first_error_ms: int | None
    error: str | None
    worker: str | None
    context: str | None
    is_new: bool
    _stored: str | bytes
    _decoder: Decoder

    def __init__(self, row: Sequence[Any], decoder: Decoder, *, is_new: bool = False) -> None:
        store = object.__setattr__
        for name, value in zip(_FIELDS, row, strict=True):
            store(self, name, value)
        binary = row[_BINARY]
        store(self, "_stored", row[_TEXT] if binary is None else bytes(binary))
        store(self, "_decoder", decoder)
        store(self, "is_new", is_new)

    @property
    def payload(self) -> Any:
        """The payload, decoded by the codec of its queue at each access. Raises what the codec raises."""
        return self._decoder.decode(self.queue, self._stored)

    @property
    def stored(self) -> str | bytes:
        """The payload as the codec has encoded it."""
        return self._stored

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Job does not change: {name} is as it was read")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Job):
            return all(getattr(self, name) == getattr(other, name) for name in (*_COMPARED, "_stored"))
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.id, self.queue, self.status, self.tries))

    def __repr__(self) -> str:
        key = "" if self.key is None else f" key={self.key!r}"
        return f"<Job {self.id} of {self.queue}{key}: {self.status}, tries={self.tries}>"


_FIELDS = (
    "id",
    "queue",
    "key",
    "group",
    "lane",
    "status",
    "priority",
    "_stored",  # the text, and then what the codec gave as bytes, if it did: see __init__
    "_stored",
    "context",
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
_COMPARED = tuple(name for name in _FIELDS if name != "_stored")
_TEXT, _BINARY = 7, 8
ID, QUEUE, KEY, LANE, STATUS, PRIORITY, CONTEXT, TRIES = 0, 1, 2, 4, 5, 6, 9, 11
"""Places in a row of ``COLUMNS`` that are read without a ``Job`` being made of it."""


class Running(Protocol):
    """What runs a job."""

    def job(self) -> Job: ...


running: ContextVar[Running | None] = ContextVar("kestrelpy_outbox_running", default=None)
"""What runs the job of this context."""


def current_job() -> Job | None:
    """The job that the calling handler runs, or ``None`` outside of a handler. Seen by what the handler calls, by its
    hooks, and by tasks that it makes.
    """
    found = running.get()
    return None if found is None else found.job()
