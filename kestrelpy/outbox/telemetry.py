"""Traces with OpenTelemetry: a carrier for the option ``context`` of an outbox. It needs the extra ``[otel]``.

What is saved is W3C trace context, as in the headers of an HTTP request. The handler gets a trace of its own, linked to
the span of the put, and not a span below it: a job may run days later, many times, or together with others.
Source: the conventions of OpenTelemetry for messaging (names of spans and attributes, kinds, links).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kestrelpy import __version__
from kestrelpy.outbox.errors import MissingPackage
from kestrelpy.outbox.job import RetryLater, current_job

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kestrelpy.outbox.context import Carrier

__all__ = ["opentelemetry"]


def opentelemetry(tracer_provider: TracerProvider | None = None) -> Carrier:
    """A carrier of the trace context: ``Outbox(..., context={"trace": opentelemetry()})``.

    A job that is put within a span runs in a span of kind CONSUMER, called ``process QUEUE``, which is linked to the
    span of the put. An exception of the handler is recorded in it, and sets its status; ``RetryLater`` is none. A job
    that is put outside of a span gets no span. ``tracer_provider``: by default the global one. Raises
    ``MissingPackage`` without ``opentelemetry-api``.
    """
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise MissingPackage("opentelemetry-api", "otel") from error
    return _TraceContext(tracer_provider)


class _TraceContext:
    def __init__(self, tracer_provider: TracerProvider | None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("kestrelpy.outbox", __version__, tracer_provider)

    def capture(self) -> dict[str, str] | None:
        saved: dict[str, str] = {}
        self._propagator.inject(saved)  # nothing if there is no valid span
        return saved or None

    @contextmanager
    def restore(self, value: Any) -> Iterator[None]:
        from opentelemetry.context import Context

        trace = self._trace
        put = trace.get_current_span(self._propagator.extract(value, Context())).get_span_context()
        job = current_job()
        attributes = {
            "messaging.system": "kestrelpy",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
        }
        if job is not None:
            attributes |= {"messaging.destination.name": job.queue, "messaging.message.id": str(job.id)}
        with self._tracer.start_as_current_span(
            "process" if job is None else f"process {job.queue}",
            Context(),  # no parent, also where a worker has a span of its own
            trace.SpanKind.CONSUMER,
            attributes,
            [trace.Link(put)] if put.is_valid else [],
            record_exception=False,  # it records no SystemExit, which is a failure of a handler
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except RetryLater:
                raise
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.record_exception(error)
                span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
                raise
