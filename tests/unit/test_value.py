"""Values: to whoever uses them they are frozen dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    Damage,
    FullPolicy,
    JournaledQueue,
    LagPolicy,
    QueueInspection,
    QueueStats,
    ReaderConfig,
    ReaderStats,
    Record,
    SavedReader,
    SegmentInfo,
    VerifyReport,
)
from kestrelpy._value import Value

FIGURES: dict[str, Any] = {name: at for at, name in enumerate(ReaderStats._annotated)} | {"name": "a"}
SAVED = SavedReader("a", 4, 2, 20, ((6, 7),), ((8, 1),))
SEGMENT = SegmentInfo("jobs.1.segment", 1, 1, 9, 9, 90, 4096, False)
VALUES: dict[str, Any] = {
    "Record": Record(7, b"data", 1000, None, 2, "jobs.1.segment"),
    "ReaderConfig": ReaderConfig(max_items=5, full_policy=FullPolicy.BLOCK, on_abort=callable),
    "ReaderStats": ReaderStats(**FIGURES),
    "Damage": Damage("/d/jobs.1.segment", 96, "bad"),
    "VerifyReport": VerifyReport(queue="jobs", items=3, readers=("a",), damage=(Damage("/d/x", 0, "worse"),)),
    "SavedReader": SAVED,
    "SegmentInfo": SEGMENT,
    "QueueInspection": QueueInspection("jobs", (SEGMENT,), (SAVED,), 9, 9, 90, 4096),
}
each = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@each
def test_nothing_can_be_assigned_or_deleted(value: Any) -> None:
    for name, held in [*fields(value).items(), ("another", 1)]:
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"assign to field '{name}'"):
            setattr(value, name, held)
        with pytest.raises(AttributeError, match=f"delete field '{name}'"):
            delattr(value, name)


@each
def test_equal_is_what_holds_the_same(value: Any) -> None:
    same = type(value)(**fields(value))
    assert same == value
    assert hash(same) == hash(value)
    assert len({same, value}) == 1
    for name in fields(value):
        if not isinstance(value, ReaderConfig) or name.startswith("on_"):
            other = copy.copy(value)
            object.__setattr__(other, name, "something else")
            assert other != value, name
    assert value != tuple(fields(value).values())
    assert Damage("a", 1, "b") != type("Other", (Damage,), {})("a", 1, "b")


@each
def test_it_is_copied_and_pickled(value: Any) -> None:
    copies = [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for one in (*copies, copy.copy(value), copy.deepcopy(value)):
        assert type(one) is type(value)
        assert one == value


@each
def test_repr_is_what_would_make_it(value: Any) -> None:
    said = ", ".join(f"{name}={held!r}" for name, held in fields(value).items())
    assert repr(value) == f"{type(value).__name__}({said})"


def test_repr_of_one_that_holds_itself() -> None:
    held: list[Any] = []
    config = ReaderConfig(on_expired=held)  # type: ignore[arg-type]
    held.append(config)
    assert "on_expired=[...]" in repr(config)


@each
def test_dataclasses_takes_it_for_one(value: Any) -> None:
    kind: Any = type(value)
    assert all(dataclasses.is_dataclass(each) for each in (value, kind))
    assert list(fields(value)) == list(kind._annotated)
    assert list(dataclasses.asdict(value)) == list(fields(value))
    assert len(dataclasses.astuple(value)) == len(fields(value))
    for name in fields(value):
        if not isinstance(value, ReaderConfig) or name.startswith("on_"):
            expected = {**fields(value), name: "new"}
            assert fields(dataclasses.replace(value, **{name: "new"})) == expected
            assert fields(value.__replace__(**{name: "new"})) == expected  # what copy.replace calls
    with pytest.raises(TypeError):
        dataclasses.replace(value, another=1)
    assert not dataclasses.is_dataclass(Value)


@each
def test_the_signature_says_the_fields(value: Any) -> None:
    parameters = inspect.signature(type(value)).parameters
    assert list(parameters) == list(fields(value))
    by_name = isinstance(value, ReaderConfig | ReaderStats | QueueStats | VerifyReport)
    assert {each.kind is each.KEYWORD_ONLY for each in parameters.values()} == {by_name}
    assert type(value).__match_args__ == (() if by_name else tuple(fields(value)))


def test_values_inside_values_become_dictionaries() -> None:
    inside = dataclasses.asdict(VALUES["QueueInspection"])["readers"][0]
    assert inside == {"name": "a", "head": 4, "items": 2, "bytes": 20, "done": ((6, 7),), "error_counts": ((8, 1),)}


def test_defaults() -> None:
    assert fields(ReaderConfig()) == {
        "max_items": None,
        "max_bytes": None,
        "max_age": None,
        "full_policy": FullPolicy.REFUSE,
        "on_expired": None,
        "on_abort": None,
        "max_expire_sweep": None,
        "max_idle": None,
        "memory_bytes": 16 << 20,
        "on_delivery": None,
        "on_timeout": None,
        "counts_open": True,
        "max_lag_bytes": None,
        "max_lag_age": None,
        "lag_policy": LagPolicy.WARN,
        "retry_delay": 0.0,
        "max_deliveries": None,
        "dead_letter": None,
    }
    assert inspect.signature(ReaderConfig).parameters["memory_bytes"].default == 16 << 20
    assert vars(VerifyReport(queue="jobs"))["damage"] == ()
    figures: dict[str, Any] = dict.fromkeys([name for name in QueueStats._annotated if name != "readers"], 0)
    stats = QueueStats(**figures)
    assert stats.readers == {}
    with pytest.raises(TypeError, match="does not change"):
        stats.readers["a"] = stats  # type: ignore[index]
    assert dataclasses.replace(stats, items=5).items == 5


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ReaderConfig(5), "positional"),  # type: ignore[call-arg]
        (lambda: ReaderConfig(max_item=5), "unexpected keyword argument 'max_item'"),  # type: ignore[call-arg]
        (lambda: ReaderStats(name="a"), "missing 17 required keyword-only arguments: 'head'"),  # type: ignore[call-arg]
        (lambda: Damage("a", 1), "missing 1 required positional argument: 'reason'"),  # type: ignore[call-arg]
        (lambda: Damage("a", 1, "b", "c"), "takes 4 positional arguments but 5 were given"),  # type: ignore[call-arg]
        (lambda: Damage("a", 1, "b", path="a"), "multiple values for argument 'path'"),  # type: ignore[misc]
        (lambda: Record(1, b""), "missing 4 required positional arguments"),  # type: ignore[call-arg]
    ],
)
def test_wrong_arguments_are_named(make: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        make()


@pytest.mark.parametrize("name", ["max_items", "max_bytes", "max_age", "max_expire_sweep", "max_idle", "memory_bytes"])
def test_a_limit_below_zero_is_refused(name: str) -> None:
    limits: dict[str, Any] = {name: -1}
    allowed = "be at least 1" if name == "max_items" else "not be negative"
    with pytest.raises(ValueError, match=f"{name} must {allowed}, not -1"):
        ReaderConfig(**limits)
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(ReaderConfig(), **limits)


def test_a_limit_that_no_put_could_meet_is_refused() -> None:
    with pytest.raises(ValueError, match="max_items must be at least 1, not 0"):
        ReaderConfig(max_items=0)


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="full_policy must be a FullPolicy, not None"):
        ReaderConfig(full_policy=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="full_policy must be one of 'block', 'refuse', 'drop-oldest', not 'blocks'"):
        ReaderConfig(full_policy="blocks")


@pytest.mark.parametrize("name", ["drop-oldest", "drop_oldest", "DROP_OLDEST"])
def test_a_policy_has_a_name(name: str) -> None:
    assert ReaderConfig(full_policy=name) == ReaderConfig(full_policy=FullPolicy.DROP_OLDEST)
    assert FullPolicy(name) is FullPolicy.DROP_OLDEST


def test_positions_match() -> None:
    match VALUES["Damage"]:
        case Damage(path, 96, reason):
            assert (path, reason) == ("/d/jobs.1.segment", "bad")
        case _:
            pytest.fail("it does not match")


def test_dataclasses_and_classes_may_be_derived_from_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Located(Damage):
        line: int = 0

    class Small(ReaderConfig):
        max_items: int | None = 10

    found = Located("a", 1, "b", 9)
    assert found == Located("a", 1, "b", line=9) != Located("a", 1, "b")
    assert dataclasses.asdict(found) == {"path": "a", "offset": 1, "reason": "b", "line": 9}
    assert repr(found).endswith("Located(path='a', offset=1, reason='b', line=9)")
    assert copy.copy(found) == found
    assert (Small().max_items, Small(max_bytes=5).max_bytes, Small(max_items=3).max_items) == (10, 5, 3)
    assert "Small(max_items=10, max_bytes=None" in repr(Small())


def test_each_class_has_the_fields_that_are_its_own() -> None:
    class Measured(Damage):
        length: int = 0

    assert list(dataclasses.asdict(VALUES["Damage"])) == ["path", "offset", "reason"]
    assert list(dataclasses.asdict(Measured("a", 1, "b"))) == ["path", "offset", "reason", "length"]
    assert Measured("a", 1, "b", 5) == Measured("a", 1, "b", length=5) != Measured("a", 1, "b")


def test_the_figures_of_a_queue_are_a_value_as_all_others(folder: Path) -> None:
    with JournaledQueue(folder, "jobs") as queue:
        queue.reader("a")
        stats = queue.stats()
    assert stats.readers["a"].items == 0
    for again in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats), dataclasses.replace(stats)):
        assert (again, hash(again)) == (stats, hash(stats))
    assert dataclasses.asdict(stats)["readers"]["a"] == dataclasses.asdict(stats.readers["a"])
