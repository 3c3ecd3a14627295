"""Payloads as text: JSON, for values that come back from it as they were.

``json.dumps`` takes more than it gives back: a tuple returns as a list, the key 1 as "1", an ``IntEnum`` as an int. A
handler would get another value than was put, and only for the jobs that have it. So such a value is refused at the put.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable
from typing import Any

__all__ = ["JsonText", "exact_json"]

MAX_DEPTH = 200
"""So many lists and dicts may be in one another. Python's JSON works as deep as the stack of its caller has room: what
can be encoded in one place could not be decoded in another.
"""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_SCALARS = frozenset((str, int, float, bool, type(None)))
_KEYS = frozenset((str,))
_BASES = ((str, "a str"), (int, "an int"), (float, "a float"), (list | tuple, "a list"), (dict, "a dict"))
_SHOWN_KEY = 40


def exact_json(value: object, name: str = "payload") -> str:
    """``value`` as compact JSON, from which it comes back equal, and of the same types.

    Raises ``ValueError`` for any other value. The message names the part that is wrong, as a path that begins with
    ``name``. The cost is that of ``json.dumps`` and a look at each type.
    """
    try:
        # First the encoder, which sees a value that contains itself: the look at the types would not end.
        text = _encode(value)
        if _is_plain(value, MAX_DEPTH):
            text.isascii() or text.encode()  # raises for lone surrogates
            return text
        error: Exception | None = None
    except Exception as refusal:  # not only TypeError and ValueError: a dict of the user's own may raise anything
        error = refusal
    try:
        reason = _objection(value, name, ())
    except RecursionError as too_deep:
        reason, error = None, too_deep
    if reason is None and isinstance(error, RecursionError):
        reason = f"{name} is nested too deep for the stack of its caller"
    raise ValueError(reason or f"{name} can't be written as JSON: {error}") from error


class JsonText:
    """The codec of queues that have no other: JSON, for values that come back from it as they were."""

    def encode(self, value: Any) -> str:
        """``value`` as text. Raises ``ValueError``, which names the part that JSON can't hold."""
        return exact_json(value)

    def decode(self, stored: str | bytes) -> Any:
        """The value of a text. Raises ``ValueError`` for one that is not JSON."""
        return json.loads(stored)


def _is_plain(value: Any, room: int) -> bool:
    """Whether ``value`` consists of the types that JSON has, in at most ``room`` lists and dicts in one another."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        if not _KEYS.issuperset(map(type, value)):
            return False
        inner: Any = value.values()
    elif kind is list:
        inner = value
    else:
        return False
    if not room:
        return False
    if _SCALARS.issuperset(map(type, inner)):
        return True
    for each in inner:  # noqa: SIM110  # all() would put two frames on the stack for each level
        if type(each) not in _SCALARS and not _is_plain(each, room - 1):
            return False
    return True


def _objection(value: Any, path: str, around: tuple[int, ...]) -> str | None:
    """What is wrong with ``value``, or with the first part of it that is wrong. ``around``: the ids of what it is in.

    Runs no code of the value's own: a subclass is refused by its type alone.
    """
    kind = type(value)
    if kind is dict or kind is list:
        if id(value) in around:
            return f"{path} contains itself"
        if len(around) == MAX_DEPTH:
            return f"{path.partition('[')[0]} is nested more than {MAX_DEPTH} deep"
        return _objection_to_parts(value, path, (*around, id(value)))
    if kind is str:
        return f"{path} has a lone surrogate, which is no text" if _has_surrogate(value) else None
    if kind is float:
        return None if math.isfinite(value) else f"{path} is {value!r}, which JSON does not have"
    if kind is int:
        return None if _can_be_written(value) else f"{path} is an int of too many digits"
    if kind in _SCALARS:
        return None
    for base, name in _BASES:
        if isinstance(value, base):
            return f"{path} is {_a(kind)}, which JSON gives back as {name}"
    return f"{path} is {_a(kind)}, which JSON does not have"


def _objection_to_parts(value: dict[Any, Any] | list[Any], path: str, around: tuple[int, ...]) -> str | None:
    parts: Iterable[tuple[str, object]]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                but = f", and not {_a(type(key))}" if isinstance(key, str) else ""
                return f"{path} has the key {_shown(key)}: a key must be a str{but}"
            if _has_surrogate(key):
                return f"{path} has the key {_quoted(key)}, with a lone surrogate, which is no text"
        parts = ((f"{path}[{_quoted(key)}]", part) for key, part in value.items())
    else:
        parts = ((f"{path}[{at}]", part) for at, part in enumerate(value))
    for place, part in parts:
        reason = _objection(part, place, around)
        if reason:
            return reason
    return None


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _can_be_written(number: int) -> bool:
    try:
        str(number)
    except ValueError:  # Python's own limit, sys.set_int_max_str_digits
        return False
    return True


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[:1].lower() in 'aeio' else 'a'} {kind.__name__}"


def _quoted(key: str) -> str:
    return json.dumps(key if len(key) <= _SHOWN_KEY else key[:_SHOWN_KEY] + "...")


def _shown(key: object) -> str:
    try:
        return reprlib.repr(key)
    except Exception:  # of an int of too many digits, say
        return f"<{type(key).__name__}>"
