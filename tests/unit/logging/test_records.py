"""Log records as JSON: what comes back is what a handler needs, and nothing is pickled."""

from __future__ import annotations

import enum
import json
import logging
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.codecs import DecodeError
from kestrelpy.logging import RECORDS
from kestrelpy.logging.records import ATTRIBUTES, VERSION, decode_record, encode_record

FORMAT = logging.Formatter("%(levelname)s %(name)s %(message)s %(filename)s:%(lineno)d %(process)d %(threadName)s")


def record(message: object = "sold %d of %s", *arguments: object, **options: Any) -> logging.LogRecord:
    """A record as a logger makes it; ``exc_info`` and ``extra`` as for ``Logger.log``."""
    made: list[logging.LogRecord] = []
    logger = logging.Logger("shop.till")
    handler = logging.Handler()
    handler.emit = made.append  # type: ignore[method-assign, assignment]
    logger.addHandler(handler)
    logger.warning(message, *(arguments or (3, "apples") if message == "sold %d of %s" else arguments), **options)
    return made[0]


def test_a_record_comes_back() -> None:
    before = record()
    after = decode_record(encode_record(before))
    assert after.getMessage() == after.message == "sold 3 of apples"
    assert (after.args, after.exc_info) == (None, None)
    for name in ATTRIBUTES:
        assert getattr(after, name, None) == getattr(before, name, None), name
    assert FORMAT.format(after) == FORMAT.format(before)


def test_it_is_json_of_one_line() -> None:
    fields = json.loads(encode_record(record(extra={"user": 7})))
    assert (fields["v"], fields["message"], fields["extra"]) == (VERSION, "sold 3 of apples", {"user": 7})
    assert b"\n" not in encode_record(record("two\nlines"))


def test_a_traceback_and_a_stack_come_back_as_text() -> None:
    try:
        raise LookupError("nothing there")
    except LookupError:
        before = record("failed", exc_info=True, stack_info=True)
    after = decode_record(encode_record(before))
    assert "LookupError: nothing there" in (after.exc_text or "")
    assert "test_a_traceback" in (after.stack_info or "")
    assert FORMAT.format(after) == FORMAT.format(before)


def test_what_another_formatter_has_made_of_the_traceback_is_kept() -> None:
    before = record("failed")
    before.exc_text = "as somebody has shown it"
    assert decode_record(encode_record(before)).exc_text == "as somebody has shown it"


def test_a_message_of_a_formatter_has_the_traceback_in_it() -> None:
    before = record("failed", stack_info=True)
    before.exc_text = "Traceback"
    after = decode_record(encode_record(before, "all of it"))
    assert (after.getMessage(), after.exc_text, after.stack_info) == ("all of it", None, None)


class Shown:
    """A value that JSON does not know."""

    def __repr__(self) -> str:
        return "<shown>"


class Sulky:
    """A value that does not say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_extra_goes_as_far_as_json_does() -> None:
    loop: list[object] = []
    loop.append(loop)
    extra = {
        "plain": {"a": [1, None, True, "\u20ac"]},
        "tuple": (1, 2),
        "inside": {"deep": [Shown()]},
        "object": Shown(),
        "sulky": Sulky(),
        "nan": float("nan"),
        "keys": {(1, 2): 3},
        "loop": loop,
        "surrogate": "\ud800",
        "bytes": b"\xff",
        "large": 1 << 70,
    }
    after = decode_record(encode_record(record(extra=extra)))
    assert {name: getattr(after, name) for name in extra} == {
        "plain": {"a": [1, None, True, "\u20ac"]},
        "tuple": [1, 2],
        "inside": {"deep": ["<shown>"]},
        "object": "<shown>",
        "sulky": "<Sulky, whose repr raises RuntimeError>",
        "nan": "nan",
        "keys": "{(1, 2): 3}",
        "loop": "[[...]]",
        "surrogate": "\ud800",
        "bytes": "b'\\xff'",
        "large": 1 << 70,
    }


def test_a_lone_surrogate_in_the_message() -> None:
    assert decode_record(encode_record(record("a\udc80b"))).getMessage() == "a\udc80b"


def test_an_extra_takes_nothing_from_the_record() -> None:
    """Neither by a record that somebody forged, nor by names that are methods."""
    fields = json.loads(encode_record(record()))
    fields["extra"] = {
        "msg": "%s %s %s",
        "args": [1],
        "exc_info": 1,
        "getMessage": 1,
        "__class__": 1,
        "name": "x",
        "ok": 1,
    }
    after = decode_record(json.dumps(fields).encode())
    assert (after.getMessage(), after.name, after.__dict__["ok"]) == ("sold 3 of apples", "shop.till", 1)
    assert FORMAT.format(after)


def test_a_record_that_can_not_be_formatted_raises() -> None:
    with pytest.raises(TypeError):
        encode_record(record("%d", "x"))


@pytest.mark.parametrize(
    "changes",
    [
        {"created": float("nan")},
        {"created": "now"},
        {"created": None},
        {"created": 1e300},
        {"msecs": float("inf")},
        {"name": 7},
        {"levelno": "30"},
        {"levelno": True},
        {"process": "7"},
        {"threadName": ["x"]},
    ],
)
def test_strange_attributes_raise(changes: dict[str, Any]) -> None:
    """What can't be decoded is not stored: it would keep the records after it from their handlers."""
    strange = record()
    strange.__dict__.update(changes)
    with pytest.raises(ValueError, match=r"record|JSON"):
        encode_record(strange)


def test_a_message_that_is_no_text_raises() -> None:
    with pytest.raises(ValueError, match="is a str, not int"):
        encode_record(record(), 7)  # type: ignore[arg-type]


def test_subclasses_of_what_logging_makes_are_fine() -> None:
    class Level(enum.IntEnum):
        NOTICE = 25

    class Name(str):
        __slots__ = ()

    before = record()
    before.levelno, before.name = Level.NOTICE, Name("shop")
    after = decode_record(encode_record(before))
    assert (after.levelno, after.name) == (25, "shop")


@given(st.text(), st.dictionaries(st.text(min_size=1), st.none() | st.integers() | st.text() | st.lists(st.booleans())))
def test_any_message_and_extra(message: str, extra: dict[str, Any]) -> None:
    before = record("%s", message)
    names = [name for name in extra if not hasattr(before, name)]
    before.__dict__.update({name: extra[name] for name in names})
    after = decode_record(encode_record(before))
    assert after.getMessage() == message
    assert {name: after.__dict__[name] for name in names if name not in ("message", "asctime")} == {
        name: extra[name] for name in names if name not in ("message", "asctime")
    }


GOOD = json.loads(encode_record(record()))


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": None},
        {"message": 7},
        {"message": None},
        {"extra": []},
        {"levelno": "30"},
        {"levelno": True},
        {"created": 1e300},
        {"created": None},
        {"created": "now"},
        {"name": 7},
        {"msecs": 1e999},
        {"lineno": 1.5},
        {"exc_text": ["x"]},
    ],
)
def test_what_is_no_record(changes: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="log record"):
        decode_record(json.dumps({**GOOD, **changes}).encode())


@given(st.binary())
def test_any_bytes_are_a_record_or_a_decode_error(data: bytes) -> None:
    for each in (data, json.dumps({**GOOD, "message": data.decode("latin-1")}).encode()):
        try:
            found = decode_record(each)
        except DecodeError:
            continue
        assert FORMAT.format(found)


def test_a_record_that_has_next_to_nothing() -> None:
    """As somebody makes one out of what came over a network."""
    after = decode_record(encode_record(logging.makeLogRecord({"msg": "x"})))
    assert logging.Formatter("%(name)s %(levelname)s %(lineno)d %(message)s").format(after)
    assert after.levelno >= logging.NOTSET


def test_deep_and_other_bytes() -> None:
    for data in (b"[" * 100_000, b"{}", b"[]", b"null", b"", b"\xff", b"7", encode_record(record())[:-1]):
        with pytest.raises(DecodeError):
            decode_record(data)


def test_the_codec() -> None:
    assert RECORDS.decode(RECORDS.encode(None)) is None
    found = RECORDS.decode(RECORDS.encode(record()))
    assert found is not None
    assert found.getMessage() == "sold 3 of apples"
    with pytest.raises(TypeError, match="log records, not dict"):
        RECORDS.encode({})  # type: ignore[arg-type]
    with pytest.raises(DecodeError):
        RECORDS.decode(b"{}")


def test_pickles_stay_closed() -> None:
    with pytest.raises(DecodeError):
        decode_record(pickle.dumps(record()))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="records know their task from Python 3.12 on")
def test_the_name_of_the_task() -> None:
    import asyncio

    async def logs() -> logging.LogRecord:
        return record()

    before = asyncio.run(logs())
    assert before.taskName.startswith("Task-")  # type: ignore[attr-defined]
    assert decode_record(encode_record(before)).taskName == before.taskName  # type: ignore[attr-defined]
