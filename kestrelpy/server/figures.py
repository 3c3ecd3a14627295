"""The figures of a server for those who watch it (``kestrelpy.metrics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kestrelpy import JournaledQueue
    from kestrelpy.work import WorkQueue

__all__ = ["ServedJournal", "ServerFigures"]


class ServedJournal(NamedTuple):
    """A journaled queue behind a server. ``name``: what clients call it. ``readers``: by its name in the library, what
    clients call a reader, and how many of them wait for it.
    """

    name: str
    queue: JournaledQueue
    readers: Mapping[str, tuple[str, int]]


class ServerFigures(NamedTuple):
    """A server at one moment. ``commands``: how often clients have given each command that is counted."""

    connections: int
    commands: Mapping[str, int]
    jobs: WorkQueue | None = None
    queues: tuple[ServedJournal, ...] = ()
