"""The errors of the outbox. Each carries its facts as attributes, and can be pickled with them."""

from __future__ import annotations

from kestrelpy.errors import KestrelError

__all__ = [
    "DuplicateJob",
    "InvalidPayload",
    "JobNotFound",
    "MissingPackage",
    "NotInTransaction",
    "NotSupported",
    "OutboxError",
    "UnknownDependency",
    "UnknownQueue",
    "UnsupportedDatabase",
]


class OutboxError(KestrelError):
    """The base of the errors that the outbox alone raises, and itself raised for a call that came at the wrong time."""


class UnknownQueue(OutboxError):
    """This process neither consumes ``queue`` nor has declared it. Nothing was written."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} has no consumer in this process and is not declared: "
            f"add a consumer, or declare it with outbox.queue({queue!r})"
        )
        self.queue = queue


class UnknownDependency(OutboxError):
    """The put's connection sees no job ``depends_on``, which is an id, or a queue and a key. Nothing was written."""

    def __init__(self, depends_on: int | tuple[str, str]) -> None:
        super().__init__(
            f"depends_on: this connection sees no {_words(depends_on)}: put it first, in this transaction or in one "
            "that is committed"
        )
        self.depends_on = depends_on


class JobNotFound(OutboxError, LookupError):
    """There is no job ``job_id``, or no job of ``queue`` with ``key``. A fact that was not asked for is ``None``."""

    def __init__(self, job_id: int | None = None, *, queue: str | None = None, key: str | None = None) -> None:
        what = f"job {job_id}" if queue is None or key is None else _words((queue, key))
        super().__init__(f"there is no {what}: it was never committed, or its row is deleted (keep_done, keep_dead)")
        self.job_id = job_id
        self.queue = queue
        self.key = key


class InvalidPayload(OutboxError):
    """``queue`` does not take this payload, or this context; ``reason`` says why. Nothing was written."""

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(f"queue {queue!r} does not take this: {reason}")
        self.queue = queue
        self.reason = reason


class DuplicateJob(OutboxError):
    """Job ``job_id`` of ``queue`` has ``key`` already. Nothing was written, and the transaction can go on."""

    def __init__(self, job_id: int, queue: str, key: str) -> None:
        super().__init__(
            f"job {job_id} of queue {queue!r} has the key {key!r} already: "
            'pass another key, or if_exists="return" or "replace"'
        )
        self.job_id = job_id
        self.queue = queue
        self.key = key


class UnsupportedDatabase(OutboxError, ValueError):
    """``database`` (its name, and its version where that is the reason) can't hold an outbox."""

    def __init__(self, database: str) -> None:
        hint = " (the URL begins with postgresql://)" if database == "postgres" else ""
        super().__init__(f"{database} can't hold an outbox: use PostgreSQL 13 or newer{hint}, or SQLite 3.35 or newer")
        self.database = database


class NotInTransaction(OutboxError):
    """A put was given a connection (``connection`` is the name of its class) that commits each statement by itself.
    Nothing was written.
    """

    def __init__(self, connection: str) -> None:
        super().__init__(
            f"this {connection} commits each statement by itself: begin a transaction and put within it, "
            "or use outbox.begin()"
        )
        self.connection = connection


class NotSupported(OutboxError):
    """An outbox on a ``WorkQueue`` has no ``feature``. Nothing was written."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"an outbox on a WorkQueue has no {feature}: bind it to PostgreSQL or SQLite")
        self.feature = feature


class MissingPackage(OutboxError, ImportError):
    """``package`` can't be imported, and what was asked for needs it. ``extra`` of kestrelpy installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install kestrelpy[{extra}]")
        self.package = package
        self.extra = extra


def _words(job: int | tuple[str, str]) -> str:
    return f"job {job}" if isinstance(job, int) else f"job of queue {job[0]!r} with the key {job[1]!r}"
