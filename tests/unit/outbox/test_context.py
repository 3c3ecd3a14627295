"""Context variables and carriers: captured at the put, there around the handler, and gone after it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from kestrelpy.outbox import Carrier, InvalidPayload
from kestrelpy.outbox.context import capture, check_context, restored

request: ContextVar[Any] = ContextVar("request")
tenant: ContextVar[Any] = ContextVar("tenant", default="nobody")
VARIABLES = {"request": request, "tenant": tenant}
LOG = logging.getLogger("kestrelpy.outbox")


class Baggage:
    """A carrier that says what happens to it. ``at`` is a name of the steps at which it raises."""

    def __init__(self, value: Any = "b", at: str = "") -> None:
        self.value = value
        self.at = at
        self.steps: list[Any] = []

    def _raise(self, step: str) -> None:
        if step == self.at:
            raise OSError(f"no {step} today")

    def capture(self) -> Any:
        self._raise("capture")
        return self.value

    @contextmanager
    def restore(self, value: Any) -> Iterator[None]:
        self._raise("enter")
        self.steps.append(("enter", value, request.get(None)))
        try:
            yield
        except BaseException as error:
            self.steps.append(type(error).__name__)
            raise
        finally:
            self.steps.append("leave")
            self._raise("leave")


def seen() -> tuple[Any, Any]:
    return request.get("unset"), tenant.get("unset")


def in_empty(context: Any, text: str | None, call: Callable[[], Any] = seen) -> Any:
    """As the outbox does it for a handler that is ``def``."""

    def run() -> Any:
        with restored(context, text, LOG):
            return call()

    return contextvars.Context().run(run)


def with_set(values: dict[ContextVar[Any], Any], call: Callable[[], Any]) -> Any:
    def run() -> Any:
        for variable, value in values.items():
            variable.set(value)
        return call()

    return contextvars.Context().run(run)


# -- capture ---------------------------------------------------------------------------------------------------------


def test_values_that_are_set_are_captured() -> None:
    assert with_set({request: 7, tenant: {"id": "ä"}}, lambda: capture(VARIABLES, "mail")) == (
        '{"request":7,"tenant":{"id":"ä"}}'
    )


def test_a_default_is_not_a_value_and_none_is_one() -> None:
    assert with_set({}, lambda: capture(VARIABLES, "mail")) is None
    assert with_set({request: None}, lambda: capture(VARIABLES, "mail")) == '{"request":null}'
    assert capture({}, "mail") is None


def test_a_carrier_is_captured_unless_it_has_nothing() -> None:
    assert capture({"baggage": Baggage({"k": "v"})}, "mail") == '{"baggage":{"k":"v"}}'
    assert capture({"baggage": Baggage(None)}, "mail") is None


def test_what_json_cannot_hold_is_an_invalid_payload() -> None:
    with pytest.raises(InvalidPayload, match="tuple") as raised:
        with_set({tenant: {"ids": (1,)}}, lambda: capture(VARIABLES, "mail"))
    assert raised.value.queue == "mail"
    assert raised.value.reason == 'context["tenant"]["ids"] is a tuple, which JSON gives back as a list'


def test_so_is_a_carrier_that_raises() -> None:
    with pytest.raises(InvalidPayload) as raised:
        capture({"baggage": Baggage(at="capture")}, "mail")
    assert raised.value.reason == 'context["baggage"] could not be captured: OSError: no capture today'
    assert isinstance(raised.value.__cause__, OSError)


# -- restore ---------------------------------------------------------------------------------------------------------


def test_a_handler_on_a_thread_sees_what_the_put_saw() -> None:
    text = with_set({request: "r1"}, lambda: capture(VARIABLES, "mail"))
    found: list[Any] = []

    def worker() -> None:
        request.set("the worker's")
        tenant.set("the worker's")
        found.append(in_empty(VARIABLES, text))
        found.append(seen())
        found.append(in_empty(VARIABLES, None))  # a job that was put where neither was set
        found.append(in_empty(VARIABLES, '{"tenant":null}'))

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert found == [
        ("r1", "unset"),
        ("the worker's", "the worker's"),
        ("unset", "unset"),
        ("unset", None),
    ]


def test_nothing_that_a_handler_sets_is_seen_by_the_next() -> None:
    def careless() -> Any:
        before = seen()
        request.set("left over")
        tenant.set("left over")
        return before

    assert in_empty(VARIABLES, '{"request":1}', careless) == (1, "unset")
    assert in_empty(VARIABLES, None, careless) == ("unset", "unset")
    assert seen() == ("unset", "unset")


@pytest.mark.parametrize("how", ["task", "runner", "run"])
def test_async_handlers_in_tasks(how: str) -> None:
    async def handler() -> Any:
        await asyncio.sleep(0)
        inner = await asyncio.gather(asyncio.to_thread(seen), asyncio.create_task(ask()))
        return [seen(), *inner]

    async def ask() -> Any:
        return seen()

    async def run(text: str | None) -> Any:
        with restored(VARIABLES, text, LOG):
            return await handler()

    async def tasks() -> list[Any]:
        request.set("the loop's")
        tasks = [
            asyncio.get_running_loop().create_task(run(text), context=contextvars.Context())
            for text in ('{"request":1}', None, '{"request":3,"tenant":"t"}')
        ]
        found = list(await asyncio.gather(*tasks))
        assert seen() == ("the loop's", "unset")
        return found

    if how == "task":
        assert asyncio.run(tasks()) == [[(1, "unset")] * 3, [("unset", "unset")] * 3, [(3, "t")] * 3]
    elif how == "runner":
        with asyncio.Runner() as runner:
            assert runner.run(run('{"request":1}'), context=contextvars.Context()) == [(1, "unset")] * 3
    else:
        empty = contextvars.Context()
        found = with_set({request: "the caller's"}, lambda: empty.run(asyncio.run, run(None)))
        assert found == [("unset", "unset")] * 3


def test_within_a_context_that_is_not_empty_it_is_undone_after() -> None:
    def run() -> Any:
        request.set("before")
        with restored(VARIABLES, '{"request":1,"tenant":2}', LOG):
            assert seen() == (1, 2)
        return seen()

    assert contextvars.Context().run(run) == ("before", "unset")


def test_carriers_are_entered_after_the_variables_in_order_and_left_in_reverse() -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def capture(self) -> Any:
            return self.name

        @contextmanager
        def restore(self, value: Any) -> Iterator[None]:
            order.append(f"+{self.name}{value}{request.get('unset')}")
            yield
            order.append(f"-{self.name}{request.get('unset')}")

    context = {"a": Named("a"), "b": Named("b"), "request": request}
    in_empty(context, '{"b":2,"request":7,"a":1}')
    assert order == ["+a17", "+b27", "-b7", "-a7"]


def test_a_carrier_without_a_value_is_left_alone() -> None:
    baggage = Baggage()
    in_empty({"baggage": baggage}, '{"request":1}')
    in_empty({"baggage": baggage}, None)
    assert baggage.steps == []


def test_a_carrier_sees_what_the_handler_raises() -> None:
    baggage = Baggage()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_empty({"baggage": baggage}, '{"baggage":1}', fail)
    assert baggage.steps == [("enter", 1, None), "ZeroDivisionError", "leave"]


def test_a_carrier_may_not_swallow_what_the_handler_raises() -> None:
    class Greedy:
        def capture(self) -> Any: ...
        def restore(self, value: Any) -> Greedy:
            return self

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> bool:
            return True

    with pytest.raises(ZeroDivisionError):
        in_empty({"greedy": Greedy()}, '{"greedy":1}', lambda: 1 // 0)


# -- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "", "[1]", "7", '{"request":', "[" * 100_000])
def test_a_text_that_is_none_is_logged_and_the_job_runs(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert in_empty(VARIABLES, text) == ("unset", "unset")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kestrelpy.outbox", logging.WARNING)
    assert "context" in record.message


def test_a_carrier_that_does_not_restore_is_logged_and_the_job_runs(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Baggage(at="enter"), Baggage()
    context = {"bad": bad, "good": good, "request": request}
    assert in_empty(context, '{"bad":1,"good":2,"request":3}') == (3, "unset")
    assert [step for step in good.steps if step == "leave"] == ["leave"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'bad'" in record.message
    assert record.exc_info
    assert "no enter today" in str(record.exc_info[1])


def test_so_is_one_that_gives_no_context_manager(caplog: pytest.LogCaptureFixture) -> None:
    class NoManager:
        def capture(self) -> Any: ...
        def restore(self, value: Any) -> Any:
            return value

    assert in_empty({"none": NoManager(), "request": request}, '{"none":1,"request":2}') == (2, "unset")
    assert "'none'" in caplog.records[0].message


@pytest.mark.parametrize("raises", [False, True])
def test_so_is_one_that_is_not_left_and_the_outcome_stays(raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Baggage(at="leave"), Baggage()
    context = {"good": good, "bad": bad}
    if raises:
        with pytest.raises(ZeroDivisionError):
            in_empty(context, '{"bad":1,"good":2}', lambda: 1 // 0)
    else:
        assert in_empty(context, '{"bad":1,"good":2}', lambda: "value") == "value"
    assert good.steps[-1] == "leave"
    (record,) = caplog.records
    assert "'bad'" in record.message


def test_the_handlers_own_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError):
        in_empty({"a": Baggage(), "b": Baggage()}, '{"a":1,"b":2}', lambda: 1 // 0)
    assert not caplog.records


def test_a_carrier_that_raises_it_once_more_is_no_trouble_either(caplog: pytest.LogCaptureFixture) -> None:
    class Again:
        def capture(self) -> Any: ...
        def restore(self, value: Any) -> Again:
            return self

        def __enter__(self) -> None: ...
        def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
            if error is not None:
                raise error

    with pytest.raises(ZeroDivisionError):
        in_empty({"again": Again()}, '{"again":1}', lambda: 1 // 0)
    assert not caplog.records


def test_names_that_this_process_does_not_have_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert in_empty({"request": request}, '{"request":1,"locale":"de"}') == (1, "unset")
    assert not caplog.records


def test_an_interrupt_while_entering_undoes_what_was_entered() -> None:
    class Interrupted(Baggage):
        def restore(self, value: Any) -> Any:
            raise KeyboardInterrupt

    first = Baggage()

    def run() -> Any:
        with (
            pytest.raises(KeyboardInterrupt),
            restored({"first": first, "second": Interrupted(), "request": request}, '{"first":1,"second":2}', LOG),
        ):
            pytest.fail("it must not be entered")
        return seen()

    assert contextvars.Context().run(run) == ("unset", "unset")
    assert first.steps[-2:] == ["KeyboardInterrupt", "leave"]


def test_an_interrupt_while_leaving_undoes_the_rest_and_goes_on() -> None:
    class Interrupted(Baggage):
        @contextmanager
        def restore(self, value: Any) -> Iterator[None]:
            yield
            raise KeyboardInterrupt

    first = Baggage()

    def run() -> Any:
        with (
            pytest.raises(KeyboardInterrupt),
            restored({"first": first, "second": Interrupted(), "request": request}, '{"first":1,"second":2}', LOG),
        ):
            pass
        return seen()

    assert contextvars.Context().run(run) == ("unset", "unset")
    assert first.steps[-1] == "leave"


def test_a_log_with_a_filter_that_raises_changes_nothing() -> None:
    def broken(record: logging.LogRecord) -> bool:
        raise ValueError("a filter of the user's")

    LOG.addFilter(broken)
    try:
        assert in_empty(VARIABLES, "{") == ("unset", "unset")
    finally:
        LOG.removeFilter(broken)


def test_a_log_adapter_will_do(caplog: pytest.LogCaptureFixture) -> None:
    with restored(VARIABLES, "{", logging.LoggerAdapter(LOG, {"job_id": 7})):
        pass
    assert vars(caplog.records[0])["job_id"] == 7


# -- the option ------------------------------------------------------------------------------------------------------


def test_the_option_is_checked_and_copied() -> None:
    baggage: Carrier = Baggage()
    given: dict[str, Any] = {"request": request, "baggage": baggage}
    checked = check_context(given)
    assert checked == given
    given.clear()
    assert list(checked) == ["request", "baggage"]
    assert check_context(None) == {}


@pytest.mark.parametrize(
    ("context", "error", "match"),
    [
        ([request], TypeError, "context must be a mapping"),
        ({1: request}, TypeError, "context: a name must be a str"),
        ({"": request}, ValueError, "context: a name must not be empty"),
        ({"\ud800": request}, ValueError, "surrogate"),
        ({"request": "r1"}, TypeError, r"context\[\"request\"\] must be a ContextVar or a Carrier"),
        ({"baggage": Baggage}, TypeError, r"context\[\"baggage\"\] must be .*call it"),
        ({"baggage": {"capture": 1}}, TypeError, "ContextVar or a Carrier"),
    ],
)
def test_an_option_that_is_none(context: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_context(context)


def test_what_is_captured_can_be_read_by_people() -> None:
    text = with_set({request: "r1"}, lambda: capture({**VARIABLES, "baggage": Baggage()}, "mail"))
    assert json.loads(text or "") == {"request": "r1", "baggage": "b"}
