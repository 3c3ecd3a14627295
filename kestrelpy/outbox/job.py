"""``Job``: one row of an outbox, as it was when it was read; and what a handler may say of the job that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, Protocol, TypeVar, overload

__all__ = ["COLUMNS", "GiveUp", "Job", "RetryLater", "current_job"]

COLUMNS = (
    'id, queue, "key", job_group, lane, status, priority, payload, payload_binary, context, depends_on, tries, '
    "added_ms, due_ms, started_ms, finished_ms, first_error_ms, error, worker"
)
"""What is selected of a row, in the order that ``Job`` takes."""


F = TypeVar("F")


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


class _Field(Generic[F]):
    """One column of a job's row. Rows are read by the thousand, and few of their fields are looked at."""

    def __init__(self, place: int) -> None:
        self._place = place

    @overload
    def __get__(self, job: None, kind: type[Job]) -> _Field[F]: ...
    @overload
    def __get__(self, job: Job, kind: type[Job]) -> F: ...
    def __get__(self, job: Job | None, kind: type[Job]) -> F | _Field[F]:
        if job is None:
            return self
        value: F = job.row[self._place]
        return value

    def __set__(self, job: Job, value: object) -> NoReturn:
        raise AttributeError("a Job does not change: it is as it was read")


class Job:
    """A job as it was when it was read. Does not change. Instants are milliseconds since the Unix epoch.

    ``status``: ``"ready"`` (may run from ``due_ms`` on), ``"waiting"`` (for the job ``depends_on``), ``"running"``
    (its lease lasts until ``due_ms``), ``"error"`` (failed, comes again at ``due_ms``), ``"done"``, ``"dead"`` (given
    up), ``"cancelled"``. ``tries``: the runs so far. ``error``: the last traceback. ``context``: what was captured at
    the put, as JSON text. ``is_new``: False if the put found a job with the same key.
    """

    __slots__ = ("_decoder", "is_new", "row")

    id = _Field[int](0)
    queue = _Field[str](1)
    key = _Field["str | None"](2)
    group = _Field["str | None"](3)
    lane = _Field["str | None"](4)
    status = _Field[str](5)
    priority = _Field[int](6)
    context = _Field["str | None"](9)
    depends_on = _Field["int | None"](10)
    tries = _Field[int](11)
    added_ms = _Field[int](12)
    due_ms = _Field[int](13)
    started_ms = _Field["int | None"](14)
    finished_ms = _Field["int | None"](15)
    first_error_ms = _Field["int | None"](16)
    error = _Field["str | None"](17)
    worker = _Field["str | None"](18)

    row: tuple[Any, ...]
    is_new: bool
    _decoder: Decoder

    def __init__(self, row: Sequence[Any], decoder: Decoder, *, is_new: bool = False) -> None:
        _set_row(self, tuple(row[:_WIDTH]))
        _set_decoder(self, decoder)
        _set_is_new(self, is_new)

    @property
    def payload(self) -> Any:
        """The payload, decoded by the codec of its queue at each access. Raises what the codec raises."""
        return self._decoder.decode(self.queue, self.stored)

    @property
    def stored(self) -> str | bytes:
        """The payload as the codec has encoded it."""
        binary = self.row[_BINARY]
        stored: str | bytes = self.row[_TEXT] if binary is None else bytes(binary)
        return stored

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Job does not change: {name} is as it was read")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Job does not change: {name} is as it was read")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Job):
            return self.row[:_TEXT] == other.row[:_TEXT] and (self.stored, self.row[_BINARY + 1 :]) == (
                other.stored,
                other.row[_BINARY + 1 :],
            )
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.id, self.queue, self.status, self.tries))

    def __repr__(self) -> str:
        key = "" if self.key is None else f" key={self.key!r}"
        return f"<Job {self.id} of {self.queue}{key}: {self.status}, tries={self.tries}>"


_set_row, _set_decoder, _set_is_new = (
    vars(Job)[name].__set__ for name in ("row", "_decoder", "is_new")
)  # past __setattr__, and quicker than object.__setattr__
FIELDS = tuple(name for name, field in vars(Job).items() if isinstance(field, _Field))
"""The names of the columns that a ``Job`` has."""
_WIDTH = COLUMNS.count(",") + 1
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
