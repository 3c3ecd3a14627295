"""ErrorWatch: alarms that neither flap nor go quiet, against a model that looks at the whole history."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kestrelpy.outbox.watch
from kestrelpy.outbox import ErrorWatch


def told(watch: ErrorWatch, *looks: tuple[int, int]) -> list[str | None]:
    """What each look (errors, milliseconds since the look before it) gave. ``_check`` is called after each."""
    answers: list[str | None] = []
    now_ms = 0
    for errors, after_ms in looks:
        now_ms += after_ms
        answers.append(watch.observe(now_ms, errors))
        watch._check()
    return answers


def test_the_first_alarm_needs_min_count_bad_looks_in_a_row() -> None:
    assert told(ErrorWatch(), (1, 1), (9, 1), (0, 1), (1, 1), (1, 1), (1, 1)) == [None] * 5 + ["error"]
    assert told(ErrorWatch(min_count=1), (0, 1), (5, 1), (0, 1)) == [None, "error", "recovery"]


def test_recovery_needs_as_many_good_looks_and_an_alarm_before_it() -> None:
    assert told(ErrorWatch(min_count=2), *[(0, 1)] * 5) == [None] * 5
    looks = [(1, 1), (1, 1), (0, 1), (1, 1), (0, 1), (0, 1), (0, 1)]
    assert told(ErrorWatch(min_count=2), *looks) == [None, "error", None, None, None, "recovery", None]


def test_an_alarm_is_repeated_when_more_than_repeat_after_has_gone_by() -> None:
    watch = ErrorWatch(min_count=1, repeat_after=0.1)
    assert told(watch, (1, 50), (1, 100), (1, 1), (1, 100), (1, 1)) == ["error", None, "error", None, "error"]


def test_what_yoltq_does() -> None:
    """The run of yoltq's own test (error_poller_test.clj): a single good look does not hold back a repeated alarm."""
    looks = [(0, 1), (1, 1), (1, 1), (1, 1), (0, 100), (0, 1), (0, 1), (1, 1), (1, 1), (1, 1), (1, 100), (1, 1)]
    said = [None, None, None, "error", None, "error", "recovery", None, None, "error", None, "error"]
    assert told(ErrorWatch(3, 0.1), *looks) == said


def test_an_alarm_that_is_never_repeated() -> None:
    watch = ErrorWatch(min_count=1, repeat_after=float("inf"))
    assert told(watch, (1, 1), (1, 10**15)) == ["error", None]


def test_a_clock_that_was_ahead_does_not_silence_the_alarm() -> None:
    watch = ErrorWatch(min_count=1, repeat_after=60)
    assert watch.observe(10**12, 1) == "error"
    assert watch.observe(5_000, 1) is None
    assert watch.observe(65_000, 1) is None
    assert watch.observe(65_001, 1) == "error"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"min_count": 0}, ValueError),
        ({"min_count": True}, TypeError),
        ({"min_count": 1.5}, TypeError),
        ({"repeat_after": -1}, ValueError),
        ({"repeat_after": float("nan")}, ValueError),
        ({"repeat_after": "60"}, TypeError),
        ({"repeat_after": None}, TypeError),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        ErrorWatch(**arguments)


def test_errors_are_a_number_of_them() -> None:
    watch = ErrorWatch(min_count=1)
    with pytest.raises(ValueError, match="errors"):
        watch.observe(0, -1)
    with pytest.raises(TypeError, match="errors"):
        watch.observe(0, None)  # type: ignore[arg-type]
    assert watch.observe(0, 0) is None


def model(min_count: int, repeat_ms: float, history: list[tuple[int, int]]) -> list[str | None]:
    """What is said at each (instant, errors): by looking back at everything, each time."""
    said: list[str | None] = []
    for at, (now_ms, _) in enumerate(history):
        window = [errors > 0 for _, errors in history[: at + 1]][-min_count:]
        words = [each for each in said if each]
        alarmed = bool(words) and words[-1] == "error"
        answer = None
        if len(window) == min_count:
            if alarmed and not any(window):
                answer = "recovery"
            elif alarmed:
                last = max(i for i, each in enumerate(said) if each == "error")
                is_due = now_ms > min(instant for instant, _ in history[last : at + 1]) + repeat_ms
                answer = "error" if is_due else None
            elif all(window):
                answer = "error"
        said.append(answer)
    return said


@given(
    st.integers(1, 4),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(-3, 5), st.sampled_from([0, 0, 1, 7])), max_size=60),
)
def test_it_says_what_the_model_says(min_count: int, repeat: int, looks: list[tuple[int, int]]) -> None:
    watch = ErrorWatch(min_count, repeat / 1000)
    history, now_ms = [], 0
    for after_ms, errors in looks:
        now_ms += after_ms
        history.append((now_ms, errors))
    answers = []
    for instant, errors in history:
        answers.append(watch.observe(instant, errors))
        watch._check()
    assert answers == model(min_count, repeat, history)


def test_the_example() -> None:
    assert doctest.testmod(kestrelpy.outbox.watch) == (0, 2)
