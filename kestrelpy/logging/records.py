"""Log records as JSON, and back. Nothing is pickled, and nothing of the caller's is kept alive.

The layout is in docs/format.md: an object with the attributes of the record, its message formatted, the traceback as
text, and the attributes that ``extra`` has added in a member of their own. What JSON does not know of those is their
``repr``.
"""

from __future__ import annotations

import json
import logging
from math import isfinite
from typing import Any

from kestrelpy.codecs import DecodeError

VERSION = 1

ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "levelno": (int,),
    "levelname": (str,),
    "created": (int, float),
    "msecs": (int, float),
    "relativeCreated": (int, float),
    "pathname": (str,),
    "filename": (str,),
    "module": (str,),
    "lineno": (int,),
    "funcName": (str,),
    "process": (int,),
    "processName": (str,),
    "thread": (int,),
    "threadName": (str,),
    "taskName": (str,),
    "exc_text": (str,),
    "stack_info": (str,),
}
"""The attributes that are stored as they are, and their types. One that is ``None`` is left out."""

_ABSENT: dict[str, object] = {
    "name": "",
    "levelno": 0,
    "levelname": "",
    "msecs": 0,
    "relativeCreated": 0,
    "pathname": "",
    "lineno": 0,
}
"""What a formatter, or a level, can deal with in the place of ``None``. Only the time must be there."""

_OTHERS = frozenset(("msg", "args", "exc_info", "message", "asctime"))
_METHODS = frozenset(dir(logging.LogRecord))
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999: what a formatter can show."""

_formatter = logging.Formatter()


def _shown(value: object) -> str:
    """What is stored for a value that JSON does not know."""
    try:
        return repr(value)
    except Exception as error:  # the record is worth more than this value
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_shown).encode
_ASCII = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_shown).encode


def encode_record(record: logging.LogRecord, message: str | None = None) -> bytes:
    """``record`` as JSON. ``message``: in place of message and traceback, formatted by the caller.

    Raises what ``record.getMessage()`` raises, and ``ValueError`` for attributes that are not what logging makes them:
    nobody could decode the record.
    """
    held = record.__dict__
    fields: dict[str, Any] = {"v": VERSION}
    for name, kinds in ATTRIBUTES.items():
        value = held.get(name)
        if value is not None:
            if type(value) not in kinds and not _fits(value, kinds):
                raise ValueError(f"{name} of a log record is {value!r:.80}, which is not of its type")
            fields[name] = value
    created = fields.get("created")
    if created is None or not _FIRST_SECOND <= created <= _LAST_SECOND:
        raise ValueError(f"a log record of {created!r:.80} seconds since 1970")
    if message is None:
        message = record.getMessage()
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = _formatter.formatException(record.exc_info)
    else:  # which has them in it
        fields.pop("exc_text", None)
        fields.pop("stack_info", None)
    if not isinstance(message, str):
        raise ValueError(f"the message of a log record is a str, not {type(message).__name__}")
    fields["message"] = message
    extra = {name: value for name, value in held.items() if name not in ATTRIBUTES and name not in _OTHERS}
    if extra:
        fields["extra"] = extra
    try:
        return _COMPACT(fields).encode("utf-8")
    except Exception:  # of a value of the caller's: whatever it is
        if extra:
            fields["extra"] = {str(name): _storable(value) for name, value in extra.items()}
        return _ASCII(fields).encode("ascii")  # which can show a lone surrogate


def _storable(value: object) -> object:
    try:
        _ASCII(value)
    except Exception:  # as above
        return _shown(value)
    return value


def decode_record(data: bytes) -> logging.LogRecord:
    """The record that ``encode_record`` has stored, without ``args`` and ``exc_info``. Raises ``DecodeError``."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a log record: {error}") from None
    return record_of(fields)


def record_of(fields: Any) -> logging.LogRecord:
    """A record of the members of its JSON object. Raises ``DecodeError``."""
    if not isinstance(fields, dict) or "v" not in fields:
        raise DecodeError("not a log record")
    if fields["v"] != VERSION:
        raise DecodeError(f"a log record of version {fields['v']!r}, and this release knows version {VERSION}")
    values: dict[str, Any] = {**dict.fromkeys(ATTRIBUTES), **_ABSENT}
    for name, kinds in ATTRIBUTES.items():
        value = fields.get(name)
        if value is None:
            if name == "created":
                raise DecodeError("a log record without its time")
            continue
        if not _fits(value, kinds) or not _is_finite(value):
            raise DecodeError(f"a log record whose {name} is {value!r:.80}")
        values[name] = value
    if not _FIRST_SECOND <= values["created"] <= _LAST_SECOND:
        raise DecodeError(f"a log record of {values['created']!r:.80} seconds since 1970")
    message, extra = fields.get("message"), fields.get("extra", {})
    if not isinstance(message, str) or not isinstance(extra, dict):
        raise DecodeError("a log record without a message, or with an extra that is no object")
    known = {name: value for name, value in extra.items() if not _is_taken(name)}
    return logging.makeLogRecord(
        {**known, **values, "msg": message, "message": message, "args": None, "exc_info": None}
    )


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _is_taken(name: str) -> bool:
    """True if an ``extra`` of that name would replace what the record itself has."""
    return name in ATTRIBUTES or name in _OTHERS or name in _METHODS


class _Records:
    """Log records as values, for ``JournaledQueue(codec=RECORDS)``: as JSON, with the message formatted.

    ``None`` is a value, too: ``logging.handlers.QueueListener`` puts it to mark the end. So ``QueueHandler`` and
    ``QueueListener`` work with ``queue.as_blocking_queue()`` of such a queue. Raises ``TypeError`` for other values,
    and ``DecodeError`` for bytes that are no log record.
    """

    def encode(self, value: logging.LogRecord | None) -> bytes:
        if value is None:
            return b"null"
        if not isinstance(value, logging.LogRecord):
            raise TypeError(f"the RECORDS codec takes log records, not {type(value).__name__}")
        return encode_record(value)

    def decode(self, data: bytes) -> logging.LogRecord | None:
        return None if data == b"null" else decode_record(data)


RECORDS = _Records()
