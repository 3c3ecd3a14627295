"""``observe``: the figures as observable instruments of OpenTelemetry. It needs the extra ``[otel]``.

The names are those of the samples that Prometheus gets. OpenTelemetry has no observable histogram: a histogram is three
counters, as it is on a page for Prometheus, with the bound of a bucket in the attribute ``le``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue, __version__
from kestrelpy.metrics.page import Page, Spread, Value
from kestrelpy.metrics.panel import Panel
from kestrelpy.metrics.table import COUNTER, HISTOGRAM, METRICS, Metric
from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider
    from opentelemetry.metrics import Observation as Observed

    from kestrelpy.server import QueueServer

__all__ = ["Observation", "observe"]


def observe(
    meter_provider: MeterProvider | None = None,
    *queues_or_folders: str | os.PathLike[str] | JournaledQueue | WorkQueue | QueueServer,
    labels: Mapping[str, str] | None = None,
) -> Observation:
    """Let a ``MeterProvider`` read the figures of these queues, folders and servers, by the names that Prometheus has.

    ``meter_provider``: by default the global one. The other arguments are those of ``Collector``, as are guarantees,
    costs and errors; ``labels`` become attributes. Returns what ends it. Raises ``ImportError`` without
    ``opentelemetry-api``.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise ImportError("observe needs opentelemetry-api: pip install 'kestrelpy[otel]'") from error
    observation = Observation(Panel(queues_or_folders, labels))
    observation.start(metrics.get_meter("kestrelpy", __version__, meter_provider))
    return observation


class Observation:
    """Queues whose figures OpenTelemetry reads. Made by ``observe``. ``close`` ends it."""

    def __init__(self, panel: Panel) -> None:
        self._panel: Panel | None = panel
        self._pages = _Pages(panel.read)

    def start(self, meter: Meter) -> None:
        """Make the instruments."""
        for metric in METRICS.values():
            if metric.kind == HISTOGRAM:
                count = f"{metric.name}_count"
                meter.create_observable_counter(count, [self._of(metric, count, _count)], "1", metric.help)
                total = f"{metric.name}_sum"
                meter.create_observable_counter(total, [self._of(metric, total, _sum)], metric.unit, metric.help)
                buckets = f"{metric.name}_bucket"
                meter.create_observable_counter(buckets, [self._of(metric, buckets, _buckets)], "1", metric.help)
            elif metric.kind == COUNTER:
                callback = self._of(metric, metric.name, _plain)
                meter.create_observable_counter(metric.name, [callback], metric.unit, metric.help)
            else:
                callback = self._of(metric, metric.name, _plain)
                meter.create_observable_gauge(metric.name, [callback], metric.unit, metric.help)

    def close(self) -> None:
        """Observe nothing from now on, and forget the queues. OpenTelemetry keeps the instruments, without values."""
        self._panel = None
        self._pages.read = Page

    def _of(
        self, metric: Metric, name: str, values: Callable[[Value], Iterator[tuple[float, dict[str, str]]]]
    ) -> Callable[[CallbackOptions], Iterable[Observed]]:
        from opentelemetry.metrics import Observation as Observed

        def callback(_options: CallbackOptions) -> list[Observed]:
            panel = self._panel
            if panel is None:
                return []
            return [
                Observed(number, panel.labels(metric, key) | more)
                for key, value in self._pages.page_for(name).samples(metric.name).items()
                for number, more in values(value)
            ]

        return callback


class _Pages:
    """One page for all instruments of one collection: the figures are read once, and are of one moment.

    A collection asks each instrument once. So a page is read when an instrument asks that has had the one before.

    NOTE ON LOCKING: ``_lock`` guards the page, and is held while it is read.
    """

    def __init__(self, read: Callable[[], Page]) -> None:
        self.read = read
        self._lock = threading.Lock()
        self._page = Page()
        self._had: set[str] | None = None

    def page_for(self, name: str) -> Page:
        with self._lock:
            if self._had is None or name in self._had:
                self._page, self._had = self.read(), set()
            self._had.add(name)
            return self._page


def _plain(value: Value) -> Iterator[tuple[float, dict[str, str]]]:
    assert not isinstance(value, Spread)
    yield value, {}


def _count(value: Value) -> Iterator[tuple[float, dict[str, str]]]:
    assert isinstance(value, Spread)
    yield value.number, {}


def _sum(value: Value) -> Iterator[tuple[float, dict[str, str]]]:
    assert isinstance(value, Spread)
    yield value.total, {}


def _buckets(value: Value) -> Iterator[tuple[float, dict[str, str]]]:
    assert isinstance(value, Spread)
    for bound, count in value.buckets:
        yield count, {"le": bound}
