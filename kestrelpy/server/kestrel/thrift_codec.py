"""Thrift's strict binary protocol in framed transport, for the calls of kestrel's service and their replies.

1. No I/O, as ``MemcacheParser``. No input raises an error: what is no call of this protocol is ``("malformed",)``, and
   nothing follows it.
2. No length is believed before its bytes are there: a frame is collected as it arrives, and a list that claims to have
   a billion members is read until the frame ends.
3. Fields that the service does not know, or that have another type, are skipped. Missing ones have their defaults.

The commands: the method's name, the sequence number, then its arguments, as in ``_METHODS``; ``("unknown-method",
number, name)``; ``("malformed",)``.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any, NamedTuple

__all__ = [
    "Command",
    "ThriftParser",
    "exception_reply",
    "i32_reply",
    "items_reply",
    "queue_info_reply",
    "string_reply",
    "void_reply",
]

Command = tuple[Any, ...]

MAX_FRAME_BYTES = (16 << 20) + (64 << 10)
MAX_MEMBERS = 1 << 16
"""The lists, sets and maps of a call have at most so many members together: reading them takes some ten milliseconds,
in which nobody is served."""
MAX_FIELDS = 100
MAX_DEPTH = 16
"""How deep an unknown field may be nested."""

VERSION_1 = 0x80010000
CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
STOP, BOOL, BYTE, DOUBLE, I16, I32, I64, STRING, STRUCT, MAP, SET, LIST = 0, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15
UNKNOWN_METHOD, INTERNAL_ERROR = 1, 6
"""Types of a TApplicationException."""

_FIXED = {BOOL: 1, BYTE: 1, DOUBLE: 8, I16: 2, I32: 4, I64: 8}
_I32 = Struct("!i")
_I64 = Struct("!q")
_U32 = Struct("!I")
_FIELD = Struct("!bh")
_FIELD_I32 = Struct("!bhi")
_FIELD_I64 = Struct("!bhq")
_LIST = Struct("!bi")
_MAP = Struct("!bbi")
_ITEM = Struct("!bhi")

_METHODS: dict[bytes, tuple[tuple[int, int | None, Any], ...]] = {
    # for each field, in the order of ids from 1: its type, that of its members, its default
    b"put": ((STRING, None, b""), (LIST, STRING, ()), (I32, None, 0)),
    b"get": ((STRING, None, b""), (I32, None, 0), (I32, None, 0), (I32, None, 0)),
    b"confirm": ((STRING, None, b""), (SET, I64, ())),
    b"abort": ((STRING, None, b""), (SET, I64, ())),
    b"peek": ((STRING, None, b""),),
    b"flush_queue": ((STRING, None, b""),),
    b"flush_all_queues": (),
    b"delete_queue": ((STRING, None, b""),),
    b"current_status": (),
    b"set_status": ((I32, None, 0),),
    b"get_version": (),
}


class Malformed(Exception):
    """The bytes are no call."""


class FrameReader:
    """The bytes of one frame, read from the front. Raises ``Malformed`` at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._left = MAX_MEMBERS + MAX_FIELDS  # how many more values may be read

    def unpack(self, form: Struct) -> tuple[Any, ...]:
        try:
            values = form.unpack_from(self._data, self._at)
        except struct.error:
            raise Malformed from None
        self._at += form.size
        return values

    def string(self) -> bytes:
        (size,) = self.unpack(_I32)
        return self.bytes(size)

    def bytes(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise Malformed
        data = self._data[self._at : end]
        self._at = end
        return data

    def members(self, wanted: int) -> list[Any] | None:
        """The members of a list or a set; ``None`` if they have another type: they are skipped then."""
        kind, count = self.unpack(_LIST)
        if not 0 <= count <= MAX_MEMBERS:
            raise Malformed
        if kind != wanted and count:
            self.skip_members(kind, count, 1)
            return None
        self._count(count)
        read = self.string if wanted == STRING else self._i64
        return [read() for _ in range(count)]

    def _i64(self) -> int:
        return int(self.unpack(_I64)[0])

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise Malformed

    def skip_members(self, kind: int, count: int, depth: int) -> None:
        size = _FIXED.get(kind)
        if size is not None:
            self.bytes(size * count)
        elif count > MAX_MEMBERS:
            raise Malformed
        else:
            for _ in range(count):
                self.skip(kind, depth)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value."""
        if depth > MAX_DEPTH:
            raise Malformed
        self._count(1)
        size = _FIXED.get(kind)
        if size is not None:
            self.bytes(size)
        elif kind == STRING:
            self.string()
        elif kind == STRUCT:
            while (field := self.bytes(1)[0]) != STOP:
                self.bytes(2)
                self.skip(field, depth + 1)
        elif kind == MAP:
            key, value, count = self.unpack(_MAP)
            if not 0 <= count <= MAX_MEMBERS:
                raise Malformed
            for _ in range(count):
                self.skip(key, depth + 1)
                self.skip(value, depth + 1)
        elif kind in (LIST, SET):
            member, count = self.unpack(_LIST)
            if count < 0:
                raise Malformed
            self.skip_members(member, count, depth + 1)
        else:
            raise Malformed

    def arguments(self, fields: tuple[tuple[int, int | None, Any], ...]) -> list[Any]:
        """The fields of the struct that holds the arguments."""
        values = [default for _, _, default in fields]
        for _ in range(MAX_FIELDS):
            if (kind := self.bytes(1)[0]) == STOP:
                return values
            number = int.from_bytes(self.bytes(2), "big", signed=True)
            if not 1 <= number <= len(fields) or fields[number - 1][0] != kind:
                self.skip(kind)
                continue
            values[number - 1] = self._value(kind, fields[number - 1])
        raise Malformed

    def _value(self, kind: int, field: tuple[int, int | None, Any]) -> Any:
        if kind == STRING:
            return self.string()
        if kind == I32:
            return self.unpack(_I32)[0]
        member = field[1]
        assert member is not None
        found = self.members(member)
        if found is None:
            return field[2]
        return list(dict.fromkeys(found)) if kind == SET else found


def read_call(data: bytes) -> Command:
    """The command of one frame. Raises ``Malformed``."""
    frame = FrameReader(data)
    (head,) = frame.unpack(_U32)
    kind = head & 0xFF
    if head & 0xFFFF0000 != VERSION_1 or kind not in (CALL, ONEWAY):
        raise Malformed
    name = frame.string()
    (number,) = frame.unpack(_I32)
    fields = _METHODS.get(name)
    if fields is None:
        return ("unknown-method", number, name)
    return (name.decode("ascii"), number, *frame.arguments(fields))


class ThriftParser:
    """The parser of one connection."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._data = b""
        self._at = 0  # all bytes of _data before this index are done
        self._frame = bytearray()  # what has arrived of a frame that comes in pieces
        self._missing = 0  # how many bytes of that frame are missing; while there are any, _data is empty
        self._has_ended = False

    def _check(self) -> None:
        assert 0 <= self._at <= len(self._data)
        assert self._missing >= 0
        assert not self._missing or not self.held
        assert not self._has_ended or not (self._data or self._frame)

    @property
    def held(self) -> int:
        """How many bytes were fed and belong to no command yet, without an incomplete frame."""
        return len(self._data) - self._at

    def trim(self) -> None:
        """Drop the bytes that are done: a client that waits for hours must not keep its last call in memory."""
        self._data, self._at = self._data[self._at :], 0

    def feed(self, data: bytes) -> None:
        """Take the bytes that arrived."""
        if self._has_ended:
            return
        if self._missing:
            here = data[: self._missing]
            self._frame += here
            self._missing -= len(here)
            data = data[len(here) :]
        self._data = self._data[self._at :] + data if len(self._data) > self._at else data
        self._at = 0

    def next(self) -> Command | None:
        """The next command, or ``None``: more bytes are needed."""
        if self._missing or self._has_ended:
            return None
        if self._frame:
            frame = bytes(self._frame)
            self._frame = bytearray()
        else:
            data, begin = self._data, self._at + 4
            if len(data) < begin:
                return None
            (size,) = _I32.unpack_from(data, self._at)
            if not 0 <= size <= self._max_frame_bytes:
                return self._end()
            end = begin + size
            if len(data) < end:
                self._frame += data[begin:]
                self._missing = end - len(data)
                self._data, self._at = b"", 0
                return None
            frame = data[begin:end]
            if len(data) == end:
                self._data, self._at = b"", 0
            else:
                self._at = end
        try:
            return read_call(frame)
        except Malformed:
            return self._end()

    def _end(self) -> Command:
        self._has_ended = True
        self._data, self._at = b"", 0
        return ("malformed",)


# -- replies -----------------------------------------------------------------------------------------------------------


def _message(kind: int, method: bytes, number: int, body: bytes) -> bytes:
    head = _U32.pack(VERSION_1 | kind) + _string(method) + _I32.pack(number)
    return _I32.pack(len(head) + len(body)) + head + body


def _string(data: bytes) -> bytes:
    return _I32.pack(len(data)) + data


def i32_reply(method: bytes, number: int, value: int) -> bytes:
    """The reply of a method that returns an ``i32``, or an enum."""
    return _message(REPLY, method, number, _FIELD_I32.pack(I32, 0, value) + b"\0")


def void_reply(method: bytes, number: int) -> bytes:
    """The reply of a method that returns nothing."""
    return _message(REPLY, method, number, b"\0")


def string_reply(method: bytes, number: int, value: bytes) -> bytes:
    """The reply of a method that returns a string."""
    return _message(REPLY, method, number, _FIELD.pack(STRING, 0) + _string(value) + b"\0")


def items_reply(number: int, items: list[tuple[bytes, int]]) -> bytes:
    """The reply of ``get``: the data and the id of each item."""
    parts = [_FIELD.pack(LIST, 0), _LIST.pack(STRUCT, len(items))]
    for data, item_id in items:
        parts += [_ITEM.pack(STRING, 1, len(data)), data, _FIELD_I64.pack(I64, 2, item_id), b"\0"]
    return _message(REPLY, b"get", number, b"".join([*parts, b"\0"]))


class QueueInfo(NamedTuple):
    """The answer of ``peek``: the next item, if there is one, and figures of the queue."""

    head_item: bytes | None
    items: int
    bytes: int
    journal_bytes: int
    age: int
    waiters: int
    open_transactions: int


def queue_info_reply(number: int, info: QueueInfo) -> bytes:
    """The reply of ``peek``."""
    parts = [_FIELD.pack(STRUCT, 0)]
    if info.head_item is not None:
        parts += [_FIELD.pack(STRING, 1), _string(info.head_item)]
    long_fields = enumerate((info.items, info.bytes, info.journal_bytes, info.age), start=2)
    parts += [_FIELD_I64.pack(I64, field, value) for field, value in long_fields]
    parts += [_FIELD_I32.pack(I32, 6, info.waiters), _FIELD_I32.pack(I32, 7, info.open_transactions)]
    return _message(REPLY, b"peek", number, b"".join([*parts, b"\0\0"]))


def exception_reply(method: bytes, number: int, kind: int, message: str) -> bytes:
    """A ``TApplicationException``."""
    body = _FIELD.pack(STRING, 1) + _string(message.encode()) + _FIELD_I32.pack(I32, 2, kind) + b"\0"
    return _message(EXCEPTION, method, number, body)
