"""Figures of queues for Prometheus and OpenTelemetry. docs/metrics.md lists each of them.

``Collector`` is a collector of ``prometheus_client`` (extra ``[metrics]``). ``observe`` makes observable instruments
of OpenTelemetry (extra ``[otel]``). ``MetricsServer`` is a page for Prometheus in a program that has none. All of them
read the figures when they are asked, and cost the queues nothing until then.
"""

from __future__ import annotations

from kestrelpy.metrics.collector import Collector
from kestrelpy.metrics.page_server import MetricsServer
from kestrelpy.metrics.telemetry import Observation, observe

__all__ = ["Collector", "MetricsServer", "Observation", "observe"]
