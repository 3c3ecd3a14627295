"""Which jobs are in doubt when records of a work queue are lost, for ``kestrelpy.repair``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from kestrelpy.work import records
from kestrelpy.work.held_room import HeldRoom
from kestrelpy.work.recovery import JobRecovery
from kestrelpy.work.scheduler import Scheduler

if TYPE_CHECKING:
    from kestrelpy._disk.interface import File
    from kestrelpy.work.job_log import JobLog
    from kestrelpy.work.journal import JobJournal

Spans = tuple[tuple[int, int], ...]


def jobs_in_doubt(
    items: Iterable[tuple[int, bytes | None]], queue_id: bytes, marks: bytes, path: str
) -> tuple[Spans, Spans, bytes]:
    """Which jobs may be lost, and of which the last changes may be: as spans of ids. Also a TOTALS record, which keeps
    the ids of lost jobs used.

    ``items``: the records that are not committed, with their ids; ``None`` for one that is lost. ``marks``: the content
    of the file that marks the queue. Raises ``UnsupportedFormat``.
    """
    scheduler = Scheduler()
    held = HeldRoom(cast("JobJournal", _Marks(queue_id, marks)))
    log = cast("JobLog", _Replayed(items))
    recovery = JobRecovery(scheduler, log, held.load(), path, None, now=0, now_ms=0, is_known=True, quarantine=True)
    recovery.build()
    totals = records.Totals(scheduler.last_id, scheduler.total_jobs, scheduler.timeouts, scheduler.burials)
    losses = recovery.losses
    return tuple(losses.missing), tuple(losses.doubtful), records.encode_totals(totals)


class _Replayed:
    """Stands for the log: records that were read already."""

    def __init__(self, items: Iterable[tuple[int, bytes | None]]) -> None:
        self._items = items

    def replay(self, _disk: object, *, quarantine: bool) -> Iterator[tuple[int, bytes | None]]:
        assert quarantine
        yield from self._items

    def over(self, _at: int) -> None:
        """Nothing is committed here."""

    leave_out = over


class _Marks:
    """Stands for the journal of the queue: the file that marks it."""

    def __init__(self, queue_id: bytes, marks: bytes) -> None:
        self.queue_id = queue_id
        self._marks = marks

    def open_mark(self, *, make: bool) -> File:
        assert not make
        return cast("File", _MarksFile(self._marks))


class _MarksFile:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Nothing is open."""
