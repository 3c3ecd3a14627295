"""Which items a read wants, from its options and from the filters that Spark pushes down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from kestrelpy.arrow.wanted import Wanted

NEVER_NULL = {"queue", "id", "added", "error_count", "data", "segment"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FAR = 1 << 64
"""Larger than every id and every time; its negative is smaller than all of them."""


def push(filters: Iterable[Filter], wanted: Wanted) -> tuple[Wanted, list[Callable[[str], bool]], list[Filter]]:
    """Split ``filters`` into those that the read applies exactly and those that Spark must apply.

    Returns ``wanted``, narrowed by the former, then the conditions on the name of the queue, then the latter.
    """
    conditions: list[Callable[[str], bool]] = []
    rest: list[Filter] = []
    for each in filters:
        path: tuple[str, ...] = getattr(each, "attribute", ())
        column = path[0] if len(path) == 1 else ""
        narrowed: Wanted | None = None
        if isinstance(each, IsNotNull) and column in NEVER_NULL:
            narrowed = wanted
        elif column == "id":
            narrowed = _by_id(each, wanted)
        elif column == "added":
            narrowed = _by_instant(each, wanted)
        elif column == "queue" and (condition := _by_queue(each)) is not None:
            conditions.append(condition)
            narrowed = wanted
        if narrowed is None:
            rest.append(each)
        else:
            wanted = narrowed
    return wanted, conditions, rest


def _by_id(each: Filter, wanted: Wanted) -> Wanted | None:
    if isinstance(each, In):
        known = [value for value in each.value if value is not None]
        return wanted.among_ids(known) if all(map(_is_int, known)) else None
    value = getattr(each, "value", None)
    if not _is_int(value):
        return None
    assert isinstance(value, int)
    reach = _reach(each, value, value)
    return None if reach is None else wanted.ids_from(reach[0]).ids_before(reach[1])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _by_instant(each: Filter, wanted: Wanted) -> Wanted | None:
    """Narrow ``wanted`` by a filter on ``added``; ``None`` if the filter is not understood.

    Items are added at whole milliseconds; Spark's timestamps have microseconds.
    """
    if isinstance(each, In):
        known = [_microseconds(value) for value in each.value if value is not None]
        exact = [value // 1000 for value in known if value is not None and value % 1000 == 0]
        return None if None in known else wanted.among_instants(exact)
    value = _microseconds(getattr(each, "value", None))
    if value is None:
        return None
    reach = _reach(each, value // 1000, -(-value // 1000))
    return None if reach is None else wanted.added_from(reach[0]).added_before(reach[1])


def _reach(each: Filter, below: int, above: int) -> tuple[int, int] | None:
    """The range of whole numbers for which a comparison holds, with an exclusive end; ``None`` for any other filter.

    ``below``: the last whole number at or before the value of the comparison. ``above``: the first one at or after it.
    """
    if isinstance(each, EqualTo | EqualNullSafe):
        return above, below + 1
    if isinstance(each, GreaterThan):
        return below + 1, _FAR
    if isinstance(each, GreaterThanOrEqual):
        return above, _FAR
    if isinstance(each, LessThan):
        return -_FAR, above
    if isinstance(each, LessThanOrEqual):
        return -_FAR, below + 1
    return None


def _microseconds(value: object) -> int | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)


def _by_queue(each: Filter) -> Callable[[str], bool] | None:
    value: Any = getattr(each, "value", None)
    if isinstance(each, In):
        return frozenset(value).__contains__
    if not isinstance(value, str):
        return None
    if isinstance(each, EqualTo | EqualNullSafe):
        return value.__eq__
    # Spark compares the bytes of UTF-8, and names have one byte a character.
    if isinstance(each, GreaterThan):
        return value.__lt__
    if isinstance(each, GreaterThanOrEqual):
        return value.__le__
    if isinstance(each, LessThan):
        return value.__gt__
    if isinstance(each, LessThanOrEqual):
        return value.__ge__
    return None


# -- options ---------------------------------------------------------------------------------------------------------


def check_names(options: Mapping[str, str], known: Iterable[str], what: str) -> None:
    """Raise ``ValueError`` for an option that is not ``known``. Case does not matter in the names of Spark's options.

    ``what``: the operation, for the message.
    """
    names = {name.lower() for name in known}
    for name in options:
        if name.lower() not in names:
            raise ValueError(f"{what} has no option {name!r}; the options are {', '.join(sorted(known))}")


def whole_number(options: Mapping[str, str], name: str, *, least: int) -> int | None:
    """The value of an option that is a whole number of at least ``least``. Raises ``ValueError``."""
    text = options.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"option {name} must be a whole number of at least {least}, not {text!r}")
    return number


def truth(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """The value of an option that is ``true`` or ``false``. Raises ``ValueError``."""
    text = options.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise ValueError(f"option {name} must be true or false, not {text!r}")
    return text.lower() == "true"


def instant_ms(options: Mapping[str, str], name: str) -> int | None:
    """The value of an option that is a time: milliseconds since 1970, or a date or a date with a time as in ISO 8601.

    A time without an offset is UTC. Returns the first millisecond at or after the time. Raises ``ValueError``.
    """
    text = options.get(name)
    if text is None:
        return None
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        there = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"option {name} must be a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970, not {text!r}"
        ) from None
    there = there if there.tzinfo is not None else there.replace(tzinfo=UTC)
    return -(-((there - _EPOCH) // timedelta(microseconds=1)) // 1000)


def wanted_by(options: Mapping[str, str]) -> Wanted:
    """The range that ``startId``, ``endId``, ``startTime`` and ``endTime`` name. As in ``scan``, ends are exclusive.

    Raises ``ValueError``.
    """
    wanted = Wanted()
    start_id, stop_id = whole_number(options, "startId", least=0), whole_number(options, "endId", least=0)
    start_ms, stop_ms = instant_ms(options, "startTime"), instant_ms(options, "endTime")
    wanted = wanted if start_id is None else wanted.ids_from(start_id)
    wanted = wanted if stop_id is None else wanted.ids_before(stop_id)
    wanted = wanted if start_ms is None else wanted.added_from(start_ms)
    return wanted if stop_ms is None else wanted.added_before(stop_ms)
