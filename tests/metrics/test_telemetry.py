"""``observe``: OpenTelemetry's SDK reads the same figures, by the same names."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

from kestrelpy import JournaledQueue
from kestrelpy.metrics import observe
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue
from tests.metrics.pages import Figures, figures_on, page_of, types_on
from tests.support.queues import START_MS


def metrics_of(reader: InMemoryMetricReader) -> dict[str, Any]:
    """What one collection finds, by name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def figures_of(reader: InMemoryMetricReader) -> Figures:
    return {
        (name, frozenset(point.attributes.items())): point.value
        for name, metric in metrics_of(reader).items()
        for point in metric.data.data_points
    }


def observed(*targets: Any, **options: Any) -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    observe(MeterProvider([reader]), *targets, **options)
    return reader


def test_names_labels_and_values_are_those_of_prometheus(tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    with JournaledQueue(tmp_path, "jobs", clock=clock, sync="always") as queue, WorkQueue(None, "work") as work:
        queue.reader("slow")
        queue.put_many([b"one", b"three"])
        queue.reader("slow").get().commit()
        work.put(b"x", tube="t")
        clock.advance(7)
        labels = {"app": "shop"}
        page = page_of(queue, work, labels=labels)
        assert figures_of(observed(queue, work, labels=labels)) == figures_on(page)


def test_counters_are_sums_that_rise_and_the_rest_is_gauges(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue, WorkQueue(None, "work") as work:
        queue.reader().get_future()
        queue.put(b"x")
        types, metrics = types_on(page_of(queue, work)), metrics_of(observed(queue, work))
        for name, metric in metrics.items():
            kind = types.get(name, "counter")  # the three parts of the histogram
            data = metric.data
            assert isinstance(data, Gauge) if kind == "gauge" else isinstance(data, Sum) and data.is_monotonic, name
        assert {name: metrics[name].unit for name in ("kestrel_oldest_item_age_seconds", "kestrel_bytes")} == {
            "kestrel_oldest_item_age_seconds": "s",
            "kestrel_bytes": "By",
        }
        assert all(metric.description for metric in metrics.values())


def test_a_collection_reads_the_queue_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        reader = observed(queue)
        calls: list[object] = []
        real: Callable[[JournaledQueue], Any] = JournaledQueue.stats

        def stats(self: JournaledQueue) -> Any:
            calls.append(self)
            return real(self)

        monkeypatch.setattr(JournaledQueue, "stats", stats)
        for count in (1, 2, 3):
            queue.put(b"x")
            assert figures_of(reader)["kestrel_put_total", frozenset({("queue", "jobs")})] == count
            assert len(calls) == count


def test_trouble_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = JournaledQueue(tmp_path, "jobs")
    reader = observed(queue, tmp_path / "nowhere")
    queue.close()
    names = {(name, dict(labels)["queue"]): value for (name, labels), value in figures_of(reader).items()}
    assert names == {("kestrel_up", "jobs"): 0, ("kestrel_up", ""): 0}
    assert caplog.records == []


def test_closing_it_lets_the_queue_go(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    queue = JournaledQueue(tmp_path, "jobs")
    observation = observe(provider, queue)
    assert figures_of(reader)
    observation.close()
    observation.close()
    assert figures_of(reader) == {}
    queue.close()
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None
