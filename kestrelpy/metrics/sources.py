"""Where figures come from: queues and work queues that are open here, folders, servers.

Rules:
1. A source reads first, and then adds all of its samples. A queue that can't be read has ``kestrel_up 0``, and what
   waits for it in the inbox, and nothing else. ``report`` raises nothing.
2. What is open here is reported before the folders: a folder adds what is not on the page yet.
3. No lock is taken that puts need. ``stats`` takes a reader's lock for a look at its next item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from kestrelpy import JournaledQueue, QueueStats, ReaderStats, SystemClock
from kestrelpy import __version__ as version
from kestrelpy.config import SYNC_BOUNDS
from kestrelpy.inspection import FolderWatch, WatchedQueue
from kestrelpy.metrics.page import Page, Spread
from kestrelpy.work import WorkFigures, WorkQueue

if TYPE_CHECKING:
    from kestrelpy.server import QueueServer

__all__ = ["FolderSource", "QueueSource", "ServerSource", "WorkSource"]

T = TypeVar("T")
_JOBS = "work queue"
_BOUNDS = (*map(repr, SYNC_BOUNDS), "+Inf")
_NO_NAMES: Mapping[str, tuple[str, int]] = {}


class QueueSource:
    """A journaled queue that is open here, and the readers that it has open here."""

    def __init__(self, queue: JournaledQueue, directory: str) -> None:
        self._queue = queue
        self.directory = directory
        self.name = queue.name

    def report(self, page: Page) -> None:
        stats = _or_none(self._queue.stats)
        _report_queue(page, self.directory, self.name, stats)


class WorkSource:
    """A work queue that is open here."""

    def __init__(self, queue: WorkQueue, directory: str) -> None:
        self._queue = queue
        self._reservations = 0
        self.directory = directory
        self.name = queue.name

    def report(self, page: Page) -> None:
        figures = _or_none(self._queue.figures)
        if figures is None or not figures.usable:
            _report_down(page, self.directory, self.name)
            return
        # Reservations that end at this moment may be missing: a counter must not go back.
        self._reservations = max(self._reservations, figures.reservations)
        _report_jobs(page, self.directory, self.name, figures, self._reservations)


class FolderSource:
    """All queues in a folder, by their files. A queue that is on the page already is not reported again, but for its
    readers that are not open here, and for its inbox.
    """

    name = ""

    def __init__(self, folder: str, directory: str) -> None:
        self._watch = FolderWatch(folder)
        self.directory = directory

    def report(self, page: Page) -> None:
        found = _or_none(self._watch.look)
        if found is None:
            _report_down(page, self.directory, "")
            return
        now_ms = SystemClock.time_ns() // 1_000_000
        for name, queue in found.items():
            if not self._watch.inbox_problem:  # else nobody knows, and 0 would be a lie
                page.add("kestrel_pending_batches", (self.directory, name), queue.pending_batches)
            if queue.problem:
                _report_down(page, self.directory, name)
            elif queue.exists:
                _report_files(page, self.directory, queue, now_ms)


class ServerSource:
    """A server of ``kestrelpy.server``, and the queues that it serves."""

    directory = name = ""

    def __init__(self, server: QueueServer) -> None:
        self._server = server
        self._jobs: WorkSource | None = None

    def report(self, page: Page) -> None:
        figures = _or_none(self._server.figures)
        if figures is None:
            _report_down(page, self.directory, "")
            return
        page.add("kestrel_server_connections", ("",), figures.connections)
        for command, count in figures.commands.items():
            page.add("kestrel_server_commands_total", ("", command), count)
        if figures.jobs is not None:
            self._jobs = self._jobs or WorkSource(figures.jobs, self.directory)
            self._jobs.report(page)
        for served in figures.queues:
            _report_queue(page, "", served.name, _or_none(served.queue.stats), served.readers)


def _or_none(read: Callable[[], T]) -> T | None:
    """What ``read`` returns; ``None`` if it raises, whatever that is: the other queues have to be read."""
    try:
        return read()
    except Exception:
        return None


def _report_down(page: Page, directory: str, name: str) -> None:
    page.add("kestrel_up", (directory, name), 0)


def _report_up(page: Page, directory: str, name: str, kind: str) -> None:
    page.add("kestrel_up", (directory, name), 1)
    page.add("kestrel_info", (directory, name, kind, version), 1)


def _report_queue(
    page: Page,
    directory: str,
    name: str,
    stats: QueueStats | None,
    called: Mapping[str, tuple[str, int]] = _NO_NAMES,
) -> None:
    """A journaled queue. ``called``: what clients of a server call a reader, and how many of them wait."""
    if stats is None or not stats.usable:
        _report_down(page, directory, name)
        return
    key = directory, name
    _report_up(page, directory, name, "queue")
    page.add("kestrel_put_total", key, stats.put_count)
    page.add("kestrel_refused_total", key, stats.refused)
    page.add("kestrel_waiting_producers", key, stats.waiting_producers)
    _report_journal(page, key, stats)
    for reader in stats.readers.values():
        _report_reader(page, key, reader, *called.get(reader.name, (reader.name, reader.waiter_count)))


def _report_journal(page: Page, key: tuple[str, str], stats: QueueStats) -> None:
    """What a journaled queue and the journal of a work queue have in common."""
    page.add("kestrel_journal_bytes", key, stats.journal_bytes)
    page.add("kestrel_segments", key, stats.segments)
    page.add("kestrel_unsynced_items", key, max(0, stats.tail_id - stats.durable_id))
    page.add("kestrel_quarantined_total", key, stats.quarantined)
    buckets = tuple(zip(_BOUNDS, accumulate(stats.sync_buckets), strict=True))
    page.add("kestrel_sync_seconds", key, Spread(buckets, stats.sync_seconds))


def _report_reader(page: Page, queue: tuple[str, str], stats: ReaderStats, name: str, waiting: int) -> None:
    key = *queue, name
    _report_backlog(page, key, stats.items, stats.bytes, stats.age)
    page.add("kestrel_open_items", key, stats.open_items)
    page.add("kestrel_waiting_consumers", key, waiting)
    page.add("kestrel_delivered_total", key, stats.opened)
    page.add("kestrel_committed_total", key, stats.committed)
    page.add("kestrel_aborted_total", key, stats.aborted)
    page.add("kestrel_expired_total", key, stats.expired)
    page.add("kestrel_discarded_total", key, stats.discarded)
    page.add("kestrel_skipped_total", key, stats.skipped)
    page.add("kestrel_dead_total", key, stats.dead)
    page.add("kestrel_dead_letter_failures_total", key, stats.dead_letter_failures)
    page.add("kestrel_dead_too_large", key, stats.dead_too_large)
    page.add("kestrel_timeouts_total", key, stats.get_misses)
    page.add("kestrel_checkpoint_failures_total", key, stats.checkpoint_failures)
    page.add("kestrel_hook_errors_total", key, stats.hook_errors)


def _report_backlog(page: Page, key: tuple[str, str, str], items: int, size: int, age: float) -> None:
    page.add("kestrel_items", key, items)
    page.add("kestrel_bytes", key, size)
    page.add("kestrel_lag_bytes", key, size)
    page.add("kestrel_oldest_item_age_seconds", key, age)


def _report_jobs(page: Page, directory: str, name: str, figures: WorkFigures, reservations: int) -> None:
    _report_up(page, directory, name, _JOBS)
    key = directory, name
    page.add("kestrel_put_total", key, figures.puts)
    page.add("kestrel_refused_total", key, figures.refused)
    page.add("kestrel_bytes", (*key, ""), figures.bytes)
    page.add("kestrel_waiting_consumers", (*key, ""), figures.waiting)
    page.add("kestrel_job_reservations_total", key, reservations)
    page.add("kestrel_job_timeouts_total", key, figures.timeouts)
    for tube in figures.tubes:
        page.add("kestrel_jobs", (*key, tube.name, "ready"), tube.ready)
        page.add("kestrel_jobs", (*key, tube.name, "reserved"), tube.reserved)
        page.add("kestrel_jobs", (*key, tube.name, "delayed"), tube.delayed)
        page.add("kestrel_jobs", (*key, tube.name, "buried"), tube.buried)
    if figures.journal is not None:
        _report_journal(page, key, figures.journal)


def _report_files(page: Page, directory: str, queue: WatchedQueue, now_ms: int) -> None:
    """A queue by its files. If it is on the page already, those of its readers that are not."""
    key = directory, queue.name
    if key not in page.samples("kestrel_up"):
        _report_up(page, directory, queue.name, queue.kind)
        page.add("kestrel_journal_bytes", key, queue.journal_bytes)
        page.add("kestrel_segments", key, queue.segments)
        if queue.kind != _JOBS:
            page.add("kestrel_put_total", key, queue.put_items)
    elif key not in page.samples("kestrel_segments"):  # it is open here, and in trouble
        return
    for reader in queue.readers if queue.kind != _JOBS else ():  # the items of a work queue are records of jobs
        age = max(0, now_ms - reader.oldest_ms) / 1000 if reader.oldest_ms else 0.0
        _report_backlog(page, (*key, reader.name), reader.items, reader.bytes, age)
