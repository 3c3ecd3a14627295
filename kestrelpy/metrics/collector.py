"""``Collector``: the figures as a collector of ``prometheus_client``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue
from kestrelpy.metrics.page import Key, Spread
from kestrelpy.metrics.panel import Panel
from kestrelpy.metrics.table import METRICS
from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from kestrelpy.server import QueueServer

__all__ = ["Collector"]


class Collector:
    """The figures of queues, for ``registry.register(Collector(...))`` of ``prometheus_client``.

    ``queues_or_folders``: queues and work queues that are open here; folders, with all queues in them, whoever has them
    open; servers of ``kestrelpy.server``. ``labels``: names and values that all samples have in addition, by which two
    collectors in one registry are told apart.

    Nothing is read before ``collect`` is called, and no lock is held that puts need. ``collect`` raises nothing: a
    queue in trouble, one that is closed, and one that belongs to the parent of this forked process, has ``kestrel_up
    0`` and, in a folder, ``kestrel_pending_batches``; nothing else. A collector keeps its queues alive, so unregister
    it when they are closed; a queue that is opened again is another object, and its counters begin at 0.

    Raises ``TypeError`` for what is no queue, folder or server, ``ValueError`` for labels that Prometheus does not
    allow or that the library sets, and for a queue that is given twice, and ``ImportError`` without
    ``prometheus_client``. Thread-safe: two scrapes take turns. Cost of a scrape: O(queues, readers and tubes), and for
    a folder what ``kestrelpy.inspection.FolderWatch`` costs.
    """

    def __init__(
        self,
        *queues_or_folders: str | os.PathLike[str] | JournaledQueue | WorkQueue | QueueServer,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import prometheus_client.core  # noqa: F401
        except ImportError as error:
            raise ImportError("a Collector needs prometheus_client: pip install 'kestrelpy[metrics]'") from error
        self._panel = Panel(queues_or_folders, labels)

    def describe(self) -> list[Family]:
        """Nothing: so a registry accepts a second collector, and reads no queue before the first scrape."""
        return []

    def collect(self) -> Iterator[Family]:
        """Read the figures now. Raises nothing."""
        from prometheus_client.core import Metric as Family

        page = self._panel.read()
        labels: dict[tuple[Key, tuple[str, ...]], dict[str, str]] = {}  # shared by all samples that have them
        for metric in METRICS.values():
            samples = page.samples(metric.name)
            if samples:
                name, kind = metric.name, metric.kind
                family = Family(name.removesuffix("_total"), metric.help, kind)
                for key, value in samples.items():
                    its = labels.get((key, metric.labels))
                    if its is None:
                        its = labels[key, metric.labels] = self._panel.labels(metric, key)
                    if isinstance(value, Spread):
                        _add_spread(family, its, value)
                    else:
                        family.add_sample(name, its, value)
                yield family


def _add_spread(family: Family, labels: dict[str, str], value: Spread) -> None:
    name = family.name
    for bound, count in value.buckets:
        family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{name}_count", labels, value.number)
    family.add_sample(f"{name}_sum", labels, value.total)
