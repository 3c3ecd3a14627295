"""Defects of the figures that a scrape shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy.inspection import folder_watch, followed
from kestrelpy.metrics import sources
from tests.use.planting import defect


@defect(
    "metrics open items",
    "a scrape leaves the open items out of those that are not done",
    test="tests/metrics/test_collector.py::test_the_figures_are_those_of_stats",
)
def open_items_are_left_out() -> Iterator[None]:
    real = sources._report_reader

    def report(page: Any, queue: Any, stats: Any, name: str, waiting: int) -> None:
        real(page, queue, stats.__replace__(items=stats.items - stats.open_items), name, waiting)

    with patch.object(sources, "_report_reader", report):
        yield


@defect(
    "metrics trouble",
    "a queue that has failed is shown as one that can be used",
    test="tests/metrics/test_collector.py::test_a_queue_whose_sync_has_failed",
)
def failed_queues_are_up() -> Iterator[None]:
    real = sources._report_queue

    def report(page: Any, directory: str, name: str, stats: Any, *called: Any) -> None:
        real(page, directory, name, stats and stats.__replace__(usable=True), *called)

    with patch.object(sources, "_report_queue", report):
        yield


@defect(
    "metrics watch",
    "a queue that was erased and made again within a moment has the figures of the one before",
    test="tests/unit/inspection/test_followed.py::test_a_queue_in_the_place_of_another",
)
def a_file_is_known_by_its_name() -> Iterator[None]:
    with patch.object(followed, "is_settled", lambda about, now_ms: True):
        yield


@defect(
    "metrics inbox",
    "what waits in the inbox is not shown for a name that is no queue",
    test="tests/unit/inspection/test_folder_watch.py::test_what_waits_in_the_inbox_is_seen_also_without_a_queue",
)
def names_without_a_queue_are_left_out() -> Iterator[None]:
    real = folder_watch.FolderWatch.look

    def look(self: folder_watch.FolderWatch) -> dict[str, folder_watch.WatchedQueue]:
        return {name: one for name, one in real(self).items() if one.exists}

    with patch.object(folder_watch.FolderWatch, "look", look):
        yield
