"""What the workloads ask of a queue of jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

SIZE = 100
THREADS = 4
QUEUE = "bench"
MARGIN_SECONDS = 3600.0
"""How far away what is put for later is."""

Handler = Callable[[str], None]


def payload(number: int) -> str:
    """A hundred bytes that begin with the number."""
    return f"{number:012}".ljust(SIZE, "x")


def number_of(text: str) -> int:
    """The number of a payload."""
    return int(text[:12])


class Peer:
    """A queue of jobs. ``where``: the address of its server, or the path of its file.

    Nothing is opened before it is needed: the process that puts makes one, and so does the process that runs jobs.
    """

    name: ClassVar[str]
    tells_starts: ClassVar[bool] = True
    """Whether handlers run in this process, so that it sees each of them."""
    crowds: ClassVar[Sequence[str]] = ()
    """What ``crowd`` can make: of ``ready``, ``done``, ``error``, ``other queue``."""
    claims: ClassVar[int] = 1
    """How many jobs ``claim`` asks for."""

    def __init__(self, where: str) -> None:
        self.where = where

    def create(self) -> None:
        """Make the tables."""
        raise NotImplementedError

    def fill(self, numbers: Sequence[int]) -> None:
        """Put these jobs in as few transactions as there can be; not measured."""
        raise NotImplementedError

    def put(self, number: int) -> None:
        """Put one job in a transaction of its own, and commit."""
        raise NotImplementedError

    def start(self, handler: Handler) -> None:
        """Run jobs as they come, with ``THREADS`` threads or what there is in their place."""
        raise NotImplementedError

    def stop(self) -> None:
        """Run no more."""
        raise NotImplementedError

    def left(self) -> int:
        """How many jobs are not finished."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what was opened."""

    def crowd(self, what: str, count: int) -> None:
        """Store so many rows beside the jobs, without running them."""
        raise NotImplementedError

    def claim(self) -> int:
        """Claim jobs by one call, as a consumer does, and commit; how many there were."""
        raise NotImplementedError


def sqlalchemy_url(where: str) -> str:
    """The same place, as SQLAlchemy names it."""
    if where.startswith("postgresql://"):
        return where.replace("postgresql://", "postgresql+psycopg://", 1)
    return f"sqlite:///{where}"
