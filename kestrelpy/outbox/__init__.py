"""Jobs that are put in the caller's own database transaction, and run by consumers in any number of processes.

A job and the caller's data are committed together, or neither is. This needs the extra ``[outbox]`` (SQLAlchemy), and
PostgreSQL or SQLite. In one process a ``WorkQueue`` will do, without a database. Importing this package imports no
other one: what is missing is named when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy.errors import InvalidName
from kestrelpy.outbox.errors import (
    DuplicateJob,
    InvalidPayload,
    JobNotFound,
    MissingPackage,
    NotInTransaction,
    NotSupported,
    OutboxError,
    UnknownDependency,
    UnknownQueue,
    UnsupportedDatabase,
)

if TYPE_CHECKING:
    from kestrelpy.outbox.backoff import exponential
    from kestrelpy.outbox.context import Carrier
    from kestrelpy.outbox.job import GiveUp, Job, RetryLater, current_job
    from kestrelpy.outbox.outbox import Outbox
    from kestrelpy.outbox.results import Health, QueueCount, RetryStats, Times
    from kestrelpy.outbox.telemetry import opentelemetry
    from kestrelpy.outbox.watch import ErrorWatch
    from kestrelpy.work import JobTooBig

__all__ = [
    "Carrier",
    "DuplicateJob",
    "ErrorWatch",
    "GiveUp",
    "Health",
    "InvalidName",
    "InvalidPayload",
    "Job",
    "JobNotFound",
    "JobTooBig",
    "MissingPackage",
    "NotInTransaction",
    "NotSupported",
    "Outbox",
    "OutboxError",
    "QueueCount",
    "RetryLater",
    "RetryStats",
    "Times",
    "UnknownDependency",
    "UnknownQueue",
    "UnsupportedDatabase",
    "current_job",
    "exponential",
    "opentelemetry",
]

if not TYPE_CHECKING:  # type checkers see the imports above; with a __getattr__ they would accept any name
    _LATER = {
        "Carrier": "kestrelpy.outbox.context",
        "ErrorWatch": "kestrelpy.outbox.watch",
        "GiveUp": "kestrelpy.outbox.job",
        "Health": "kestrelpy.outbox.results",
        "Job": "kestrelpy.outbox.job",
        "JobTooBig": "kestrelpy.work",
        "Outbox": "kestrelpy.outbox.outbox",
        "QueueCount": "kestrelpy.outbox.results",
        "RetryLater": "kestrelpy.outbox.job",
        "RetryStats": "kestrelpy.outbox.results",
        "Times": "kestrelpy.outbox.results",
        "current_job": "kestrelpy.outbox.job",
        "exponential": "kestrelpy.outbox.backoff",
        "opentelemetry": "kestrelpy.outbox.telemetry",
    }

    def __getattr__(name: str) -> object:
        """Import on first use (PEP 562)."""
        from importlib import import_module

        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(_LATER[name]), name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
