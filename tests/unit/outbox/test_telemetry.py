"""Trace context: the handler's span is a span of its own, and linked to the span of the put."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

from kestrelpy.outbox import Carrier, MissingPackage, opentelemetry
from kestrelpy.outbox.context import capture, check_context, restored
from kestrelpy.outbox.job import GiveUp, Job, RetryLater, running

LOG = logging.getLogger("kestrelpy.outbox")


class Traced:
    """A provider that keeps its spans in memory, and an outbox's option ``context`` for it."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.context = check_context({"trace": opentelemetry(self.provider)})

    def put(self) -> tuple[str | None, SpanContext]:
        """What is saved with a job that is put within a span, and the context of that span."""
        with self.tracer.start_as_current_span("order") as span:
            return capture(self.context, "mail"), span.get_span_context()

    def handle(self, text: str | None, handler: Callable[[], Any] = lambda: None, job_id: int = 7) -> Any:
        """Run a handler as the outbox does."""

        def run() -> Any:
            running.set(self.of_job(job_id))
            with restored(self.context, text, LOG):
                return handler()

        return contextvars.Context().run(run)

    @staticmethod
    def of_job(job_id: int) -> Any:
        return SimpleNamespace(job=lambda: cast(Job, SimpleNamespace(id=job_id, queue="mail")))

    def spans(self, name: str = "process mail") -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_the_span_is_linked_to_the_span_of_the_put(traced: Traced) -> None:
    text, put = traced.put()
    found = traced.handle(text, lambda: trace.get_current_span().get_span_context())
    (span,) = traced.spans()
    assert span.kind is SpanKind.CONSUMER
    assert span.parent is None
    assert span.context == found  # current within the handler
    assert span.context.trace_id != put.trace_id
    (link,) = span.links
    assert (link.context.trace_id, link.context.span_id) == (put.trace_id, put.span_id)
    assert link.context.is_remote
    assert span.status.status_code is StatusCode.UNSET
    assert span.end_time is not None
    assert dict(span.attributes or {}) == {
        "messaging.system": "kestrelpy",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.message.id": "7",
    }
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "kestrelpy.outbox"


def test_what_is_saved_is_w3c_trace_context() -> None:
    state = TraceState([("vendor", "x"), ("other", "y")])
    put = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1), trace_state=state)
    traced = Traced()
    with trace.use_span(NonRecordingSpan(put)):
        text = capture(traced.context, "mail")
    assert json.loads(text or "") == {
        "trace": {
            "traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01",
            "tracestate": "vendor=x,other=y",
        }
    }
    traced.handle(text)
    (link,) = traced.spans()[0].links
    assert link.context.trace_state == state


def test_without_a_valid_span_nothing_is_saved_and_no_span_made(traced: Traced) -> None:
    assert capture(traced.context, "mail") is None
    with trace.use_span(trace.INVALID_SPAN):
        assert capture(traced.context, "mail") is None
    found = traced.handle(None, trace.get_current_span)
    assert found is trace.INVALID_SPAN
    assert not traced.exporter.get_finished_spans()


def test_a_worker_within_a_span_does_not_become_the_parent(traced: Traced) -> None:
    text, _ = traced.put()
    with traced.tracer.start_as_current_span("worker"):
        traced.handle(text)
        assert traced.handle(None, trace.get_current_span) is trace.INVALID_SPAN
        with restored(traced.context, text, LOG):  # also in a context that is not empty
            pass
    assert [span.parent for span in traced.exporter.get_finished_spans()] == [None] * 4
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_spans_of_the_handler_are_below(traced: Traced) -> None:
    def handler() -> None:
        with traced.tracer.start_as_current_span("smtp"):
            pass

    traced.handle(traced.put()[0], handler)
    (inner,), (outer,) = traced.spans("smtp"), traced.spans()
    assert inner.parent is not None
    assert outer.context is not None
    assert inner.parent.span_id == outer.context.span_id


@pytest.mark.parametrize("error", [ValueError("no such user"), GiveUp("why"), SystemExit(3), asyncio.CancelledError()])
def test_an_exception_is_recorded_and_sets_the_status(traced: Traced, error: BaseException) -> None:
    def fail() -> None:
        raise error

    text, _ = traced.put()
    with pytest.raises(type(error)) as raised:
        traced.handle(text, fail)
    assert raised.value is error
    (span,) = traced.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == f"{type(error).__name__}: {error}"
    (event,) = span.events
    assert event.name == "exception"
    assert (event.attributes or {})["exception.message"] == str(error)
    assert (span.attributes or {})["error.type"] == type(error).__qualname__


def test_a_job_that_is_to_come_later_has_not_failed(traced: Traced) -> None:
    def later() -> None:
        raise RetryLater(5)

    with pytest.raises(RetryLater):
        traced.handle(traced.put()[0], later)
    (span,) = traced.spans()
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events
    assert span.end_time is not None


def test_async_handlers_beside_each_other(traced: Traced) -> None:
    texts = [traced.put() for _ in range(3)]

    async def run(job_id: int, text: str | None) -> SpanContext:
        running.set(traced.of_job(job_id))
        with restored(traced.context, text, LOG):
            await asyncio.sleep(0)
            return trace.get_current_span().get_span_context()

    async def main() -> list[SpanContext]:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(run(at, text), context=contextvars.Context()) for at, (text, _) in enumerate(texts)]
        return list(await asyncio.gather(*tasks))

    found = asyncio.run(main())
    spans = {str((span.attributes or {})["messaging.message.id"]): span for span in traced.spans()}
    for at, (_, put) in enumerate(texts):
        span = spans[str(at)]
        assert span.context == found[at]
        assert [link.context.span_id for link in span.links] == [put.span_id]


def test_a_put_that_is_not_sampled_is_linked_all_the_same() -> None:
    silent, traced = TracerProvider(sampler=ALWAYS_OFF), Traced()
    with silent.get_tracer("x").start_as_current_span("order") as span:
        text = capture(traced.context, "mail")
    traced.handle(text)
    (link,) = traced.spans()[0].links
    assert link.context.span_id == span.get_span_context().span_id
    assert not link.context.trace_flags.sampled


def test_a_saved_context_of_another_program_gives_a_span_without_a_link(traced: Traced) -> None:
    traced.handle('{"trace":{"traceparent":"00-garbage"}}')
    traced.handle('{"trace":{}}')
    assert [list(span.links) for span in traced.spans()] == [[], []]


@pytest.mark.parametrize("text", ['{"trace":7}', '{"trace":null}', '{"trace":{"traceparent":7}}', '{"trace":"00-1"}'])
def test_one_that_is_none_is_logged_and_the_job_runs(
    traced: Traced, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert traced.handle(text, lambda: "ran") == "ran"
    (record,) = caplog.records
    assert "'trace'" in record.message
    assert not traced.spans()


def test_outside_of_a_job_the_span_has_no_queue(traced: Traced) -> None:
    text, _ = traced.put()
    with restored(traced.context, text, LOG):
        pass
    (span,) = traced.spans("process")
    assert "messaging.destination.name" not in (span.attributes or {})


def test_without_a_provider_the_global_one_is_used() -> None:
    """There is none in this process: nothing is recorded, and nothing fails."""
    carrier: Carrier = opentelemetry()
    context = check_context({"trace": carrier})
    put = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(put)):
        text = capture(context, "mail")
    assert text is not None
    with restored(context, text, LOG):
        assert not trace.get_current_span().is_recording()


def test_a_missing_package_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingPackage) as raised:
        opentelemetry()
    assert str(raised.value) == "opentelemetry-api is not installed: pip install kestrelpy[otel]"
    assert isinstance(raised.value, ImportError)
