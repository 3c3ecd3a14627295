"""Faults that are planted into the metrics, and the tests that fail with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._writing.put_path import PutPath
from kestrelpy._writing.sync_times import SyncTimes
from kestrelpy.metrics import collector, page_server, panel, sources, telemetry
from kestrelpy.metrics.page import Page
from kestrelpy.metrics.table import COUNTER, GAUGE, METRICS
from kestrelpy.testing import ManualClock
from kestrelpy.work import figures as work_module
from kestrelpy.work.scheduler import Scheduler
from tests.metrics import test_collector, test_contrib, test_page_server, test_telemetry
from tests.metrics.pages import needs_prometheus
from tests.support.queues import START_MS

Plant = Callable[[], AbstractContextManager[Any]]


def a_counter_is_a_gauge() -> Any:
    metric = METRICS["kestrel_put_total"]
    return patch.dict(METRICS, {metric.name: metric._replace(kind=GAUGE)})


def a_gauge_is_a_counter() -> Any:
    metric = METRICS["kestrel_items"]
    return patch.dict(METRICS, {metric.name: metric._replace(kind=COUNTER)})


def a_metric_has_no_help() -> Any:
    metric = METRICS["kestrel_items"]
    return patch.dict(METRICS, {metric.name: metric._replace(help="")})


def ages_are_milliseconds() -> Any:
    real = sources._report_backlog
    return patch.object(
        sources, "_report_backlog", lambda page, key, items, size, age: real(page, key, items, size, age * 1000)
    )


def bytes_are_items() -> Any:
    real = sources._report_backlog
    return patch.object(
        sources, "_report_backlog", lambda page, key, items, size, age: real(page, key, items, items, age)
    )


def trouble_is_raised() -> Any:
    return patch.object(sources, "_or_none", lambda read: read())


def trouble_is_hidden() -> Any:
    return patch.object(sources, "_report_down", lambda page, directory, name: None)


def figures_of_a_closed_queue_are_shown() -> Any:
    real = JournaledQueue.stats
    return patch.object(JournaledQueue, "stats", lambda self: real(self).__replace__(usable=True))


def buckets_are_not_cumulative() -> Any:
    return patch.object(sources, "accumulate", lambda buckets: buckets)


def syncs_are_not_timed() -> Any:
    return patch.object(SyncTimes, "note", lambda self, seconds: None)


def the_wait_for_a_lock() -> Any:
    """The figures of a work queue are read under its lock."""
    real = work_module.work_figures

    def figures(core: Any) -> Any:
        with core.lock:
            return real(core)

    return patch("kestrelpy.work.queue.work_figures", figures)


def stats_take_the_lock_of_puts() -> Any:
    real = JournaledQueue.stats

    def stats(self: JournaledQueue) -> Any:
        with self._lock:
            return real(self)

    return patch.object(JournaledQueue, "stats", stats)


def refusals_are_not_counted() -> Any:
    real = PutPath.recover
    return patch.object(PutPath, "recover", lambda self, error: real(self, ValueError()))


def refusals_count_twice() -> Any:
    real = PutPath.recover

    def recover(self: PutPath, error: BaseException) -> None:
        real(self, error)
        real(self, error)

    return patch.object(PutPath, "recover", recover)


def failed_checkpoints_are_not_counted() -> Any:
    def store(self: Checkpointer, state: Any, *, durable: bool) -> None:
        self._source.make_durable(state.last_named_id)
        self._source.save(self.backlog.owner, state, durable)

    return patch.object(Checkpointer, "_store", store)


def reservations_are_forgotten_as_they_end() -> Any:
    real = work_module.work_figures
    return patch("kestrelpy.work.queue.work_figures", lambda core: _without_ended(real(core), core))


def _without_ended(figures: Any, core: Any) -> Any:
    return figures._replace(reservations=figures.reservations - core.scheduler.ended)


def timeouts_are_not_exported() -> Any:
    def take_out(self: Scheduler, now: float) -> bool:
        before = self.timeouts
        done = real(self, now)
        self.timeouts = before
        return done

    real = Scheduler._reservation_over
    return patch.object(Scheduler, "_reservation_over", take_out)


def labels_are_not_checked() -> Any:
    return patch.object(panel, "_checked", lambda labels: dict(labels or {}))


def labels_are_forgotten() -> Any:
    return patch.object(panel, "_checked", lambda labels: {})


def folders_are_not_told_apart() -> Any:
    return patch.object(panel, "DIRECTORY", "queue")


def a_registry_reads_at_once() -> Any:
    return patch.object(collector.Collector, "describe", lambda self: list(self.collect()))


def every_page_is_the_page() -> Any:
    return patch.object(page_server, "_only_page", lambda app: app)


def the_query_chooses() -> Any:
    real = page_server._only_page

    def only_page(app: Any) -> Any:
        def answer(environ: Any, start_response: Any) -> Any:
            return real(lambda inner, start: app({**inner, "QUERY_STRING": environ["QUERY_STRING"]}, start))(
                environ, start_response
            )

        return answer

    return patch.object(page_server, "_only_page", only_page)


def every_instrument_reads() -> Any:
    return patch.object(telemetry._Pages, "page_for", lambda self, name: self.read())


def one_page_for_ever() -> Any:
    def page_for(self: Any, name: str) -> Page:
        page: Page = self._page if self._had is not None else self.read()
        self._page, self._had = page, set()
        return page

    return patch.object(telemetry._Pages, "page_for", page_for)


def victims(folder: Path) -> dict[str, Callable[[], None]]:
    """The tests that must fail, by name; each with what it needs."""

    def with_clock(test: Callable[[ManualClock, Path], None]) -> Callable[[], None]:
        return lambda: test(ManualClock(START_MS), folder)

    def with_server(test: Callable[[Any], None]) -> Callable[[], None]:
        def run() -> None:
            made: Iterator[Any] = test_page_server.server.__wrapped__(folder)  # type: ignore[attr-defined]
            try:
                test(next(made))
            finally:
                next(made, None)

        return run

    def with_patch(test: Callable[[Path, pytest.MonkeyPatch], None]) -> Callable[[], None]:
        def run() -> None:
            with pytest.MonkeyPatch.context() as patches:
                test(folder, patches)

        return run

    mine = test_collector
    return {
        "figures": with_clock(mine.test_the_figures_are_those_of_stats),
        "types": with_clock(mine.test_every_metric_has_its_type_and_a_help),
        "promtool": with_clock(mine.test_promtool_likes_the_page),
        "jobs": lambda: mine.test_jobs_by_tube_and_state(ManualClock(START_MS)),
        "journal": lambda: mine.test_the_journal_of_a_work_queue(folder),
        "closed": lambda: mine.test_a_queue_that_is_closed_and_one_that_is_erased(folder),
        "odd": with_patch(mine.test_whatever_stats_raises_the_others_are_shown),
        "locks": lambda: mine.test_no_lock_is_taken_that_a_put_needs(folder),
        "refusals": lambda: mine.test_every_way_to_put_counts_its_refusals_once(folder),
        "checkpoints": lambda: mine.test_a_checkpoint_that_fails_is_counted(folder),
        "two": lambda: mine.test_two_collectors_in_one_registry(folder),
        "folders": lambda: mine.test_queues_of_several_folders_are_told_apart(folder),
        "labels": lambda: mine.test_labels_that_can_not_be("queue", folder),
        "lazy": with_patch(mine.test_nothing_is_read_before_the_first_scrape),
        "pages": with_server(lambda server: test_page_server.test_other_pages_are_not_there(server, "/")),
        "query": with_server(test_page_server.test_the_query_changes_nothing),
        "once": with_patch(test_telemetry.test_a_collection_reads_the_queue_once),
        "sdk": lambda: test_telemetry.test_names_labels_and_values_are_those_of_prometheus(folder),
        "sums": lambda: test_telemetry.test_counters_are_sums_that_rise_and_the_rest_is_gauges(folder),
        "page": test_contrib.test_the_page_lists_each_metric_with_its_labels,
    }


PLANTED: list[tuple[Plant, str]] = [
    (a_counter_is_a_gauge, "types"),
    (a_counter_is_a_gauge, "promtool"),
    (a_gauge_is_a_counter, "types"),
    (a_gauge_is_a_counter, "promtool"),
    (a_metric_has_no_help, "promtool"),
    (ages_are_milliseconds, "figures"),
    (bytes_are_items, "figures"),
    (trouble_is_raised, "odd"),
    (trouble_is_hidden, "closed"),
    (figures_of_a_closed_queue_are_shown, "closed"),
    (buckets_are_not_cumulative, "figures"),
    (syncs_are_not_timed, "journal"),
    (stats_take_the_lock_of_puts, "locks"),
    (the_wait_for_a_lock, "locks"),
    (refusals_are_not_counted, "refusals"),
    (refusals_count_twice, "refusals"),
    (failed_checkpoints_are_not_counted, "checkpoints"),
    (reservations_are_forgotten_as_they_end, "jobs"),
    (timeouts_are_not_exported, "jobs"),
    (labels_are_not_checked, "labels"),
    (labels_are_forgotten, "two"),
    (folders_are_not_told_apart, "folders"),
    (a_registry_reads_at_once, "lazy"),
    (every_page_is_the_page, "pages"),
    (the_query_chooses, "query"),
    (every_instrument_reads, "once"),
    (one_page_for_ever, "once"),
]


@needs_prometheus
@pytest.mark.parametrize(("plant", "test"), PLANTED, ids=lambda each: getattr(each, "__name__", each))
def test_a_planted_fault_is_found(plant: Plant, test: str, tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    victims(tmp_path / "right")[test]()
    with ExitStack() as rest:
        rest.enter_context(patch.object(test_collector, "PATIENCE", 1.0))
        rest.enter_context(plant())
        with pytest.raises((AssertionError, pytest.fail.Exception, KeyError, ValueError, ZeroDivisionError)):
            victims(tmp_path / "wrong")[test]()
