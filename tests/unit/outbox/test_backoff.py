"""Back-off: the pauses between retries, and what becomes of a ``backoff`` option that misbehaves."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.outbox import exponential
from kestrelpy.outbox.backoff import MAX_SECONDS, Exponential, seconds_of

DEFAULT = exponential(first=7)


def test_it_doubles_up_to_the_most() -> None:
    backoff = exponential()
    assert [backoff(failures) for failures in range(1, 11)] == [5, 10, 20, 40, 80, 160, 320, 640, 900, 900]
    assert [exponential(first=1, factor=3, most=20)(failures) for failures in (1, 2, 3, 4)] == [1, 3, 9, 20]
    assert [exponential(first=2, factor=1)(failures) for failures in (1, 2, 99)] == [2, 2, 2]
    assert [exponential(first=0)(failures) for failures in (1, 2, 10**5)] == [0, 0, 0]


@pytest.mark.parametrize("failures", [10**3, 10**6, 10**400])
def test_any_number_of_failures(failures: int) -> None:
    assert exponential()(failures) == 900
    assert exponential(factor=1)(failures) == 5
    assert exponential(first=0)(failures) == 0
    assert exponential(factor=1 + 2**-52)(failures) == (900 if failures > 10**20 else pytest.approx(5))


def test_jitter_is_around_the_value() -> None:
    backoff = exponential(first=100, most=1000, jitter=0.2)
    assert [backoff.seconds(1, unit) for unit in (0, 0.25, 0.5, 0.75)] == pytest.approx([80, 90, 100, 110])
    assert backoff.seconds(1, 0.999999) == pytest.approx(120, abs=0.001)
    assert backoff.seconds(9, 0.75) == pytest.approx(1100)  # also where all come to the most: they must not meet there
    assert backoff.seconds(3) == backoff.seconds(3, 0.5) == backoff(3) == 400
    assert {exponential(jitter=0).seconds(2, unit) for unit in (0, 0.3, 0.9)} == {10}


@given(st.integers(1, 10**30), st.floats(0, 1, exclude_max=True))
def test_it_is_never_below_zero_or_far_from_its_value(failures: int, unit: float) -> None:
    backoff = exponential(jitter=1)
    assert 0 <= backoff.seconds(failures, unit) <= 2 * backoff(failures)
    assert backoff(failures) <= backoff(failures + 1) <= 900


def test_it_is_a_value() -> None:
    backoff = exponential(first=Decimal(1), factor=Fraction(3), most=10**3)  # type: ignore[arg-type]  # but it works
    assert backoff == Exponential(1, 3, 1000, 0.1)
    assert hash(backoff) == hash(exponential(1, 3, 1000))
    assert repr(exponential()) == "Exponential(first=5.0, factor=2.0, most=900.0, jitter=0.1)"
    assert backoff(2) == 3.0
    for other in (copy.copy(backoff), pickle.loads(pickle.dumps(backoff))):
        assert other == backoff
    with pytest.raises(AttributeError):
        backoff.first = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"first": -1}, ValueError, "first"),
        ({"first": "5"}, TypeError, "first"),
        ({"first": True}, TypeError, "first"),
        ({"first": math.nan}, ValueError, "first"),
        ({"first": 10**400}, ValueError, "first"),
        ({"factor": 0.5}, ValueError, "factor"),
        ({"factor": math.inf}, ValueError, "factor"),
        ({"most": math.inf}, ValueError, "most"),
        ({"most": 1e300}, ValueError, "most"),
        ({"first": 3600}, ValueError, "most must be at least first"),
        ({"jitter": 1.1}, ValueError, "jitter"),
        ({"jitter": None}, TypeError, "jitter"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        exponential(**arguments)


def test_so_are_failures_and_unit() -> None:
    with pytest.raises(ValueError, match="failures"):
        exponential()(0)
    with pytest.raises(TypeError, match="failures"):
        exponential()(1.5)  # type: ignore[arg-type]
    for unit in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="unit"):
            exponential().seconds(1, unit)


@pytest.mark.parametrize(
    ("backoff", "seconds"),
    [
        (30, 30.0),
        (0, 0.0),
        (2.5, 2.5),
        (exponential(first=100, jitter=0.2), 220.0),
        (lambda failures: failures * 10, 20.0),
        (lambda failures: Decimal("1.5"), 1.5),
        (lambda failures: Fraction(1, 4), 0.25),
        (exponential(first=100, jitter=0.2).__call__, 200.0),
    ],
)
def test_what_a_queue_may_have(backoff: Any, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    assert seconds_of(backoff, 2, 0.75, DEFAULT) == pytest.approx(seconds)
    assert not caplog.records


def _raise(failures: int) -> float:
    raise LookupError("no such pause")


@pytest.mark.parametrize(
    ("backoff", "said"),
    [
        (_raise, "no such pause"),
        (lambda: 5, "takes 0 positional arguments"),
        (lambda failures: None, "None"),
        (lambda failures: True, "True"),
        (lambda failures: "5", "'5'"),
        (lambda failures: -1, "-1"),
        (lambda failures: math.nan, "nan"),
        (lambda failures: math.inf, "inf"),
        (lambda failures: 10**400, "1000"),
        (lambda failures: 1j, "1j"),
        (True, "True"),
        ("5", "'5'"),
        (None, "None"),
    ],
)
def test_a_bad_one_is_logged_and_the_default_is_used(backoff: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert seconds_of(backoff, 2, 0.5, DEFAULT, queue="mail") == 14
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kestrelpy.outbox", logging.ERROR)
    assert "backoff" in record.message
    assert "'mail'" in record.message
    assert "14.0 s" in record.message
    assert record.exc_info
    assert said in str(record.exc_info[1])


def test_the_default_has_its_jitter() -> None:
    assert seconds_of(_raise, 1, 0.0, exponential(first=100, jitter=0.2)) == pytest.approx(80)


def test_seconds_fit_into_a_row() -> None:
    assert seconds_of(1e300, 1, 0.5, DEFAULT) == MAX_SECONDS
    assert seconds_of(lambda failures: 10**300, 1, 0.5, DEFAULT) == MAX_SECONDS
    assert seconds_of(exponential(most=MAX_SECONDS, jitter=1), 99, 0.99, DEFAULT) == MAX_SECONDS


def test_an_interrupt_in_it_goes_on() -> None:
    def interrupted(failures: int) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seconds_of(interrupted, 1, 0.5, DEFAULT)


def test_a_log_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(record: logging.LogRecord) -> bool:
        raise ValueError("a filter of the user")

    log = logging.getLogger("kestrelpy.outbox")
    log.addFilter(broken)
    try:
        assert seconds_of(_raise, 1, 0.5, DEFAULT) == 7
    finally:
        log.removeFilter(broken)


def test_any_callable_that_takes_failures_is_a_backoff() -> None:
    backoff: Callable[[int], float] = exponential()
    assert backoff(1) == 5
