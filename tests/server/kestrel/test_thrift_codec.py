"""The thrift codec without a network, beside two others: thriftpy2, and Apache's own protocol classes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import thriftpy2
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift.protocol.TBinaryProtocol import TBinaryProtocol as ApacheProtocol
from thrift.Thrift import TMessageType, TType
from thrift.transport.TTransport import TMemoryBuffer
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TMemoryBuffer as Buffer

from kestrelpy.server.kestrel import thrift_codec as codec
from kestrelpy.server.kestrel.thrift_codec import QueueInfo, ThriftParser
from tests.server.parsing import commands, cut, memory_of

IDL: Any = thriftpy2.load(str(Path(__file__).parent / "kestrel.thrift"), module_name="kestrel_codec_thrift")


def framed(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


def call(method: str, number: int = 7, **arguments: Any) -> bytes:
    """The call as thriftpy2 writes it."""
    buffer = Buffer()
    protocol = TBinaryProtocol(buffer)
    protocol.write_message_begin(method, 1, number)
    made = getattr(IDL.Kestrel, f"{method}_args")(**arguments)
    made.write(protocol)
    return framed(buffer.getvalue())


CALLS = [
    ("put", {"queue_name": "q", "items": [b"a", b"", b"\xff" * 300], "expiration_msec": -5}),
    ("get", {"queue_name": "q", "max_items": 3, "timeout_msec": 4, "auto_abort_msec": 5}),
    ("confirm", {"queue_name": "q", "ids": {3, 1, 2}}),
    ("abort", {"queue_name": "", "ids": set()}),
    ("peek", {"queue_name": "q\xe9"}),
    ("flush_queue", {"queue_name": "q"}),
    ("flush_all_queues", {}),
    ("delete_queue", {"queue_name": "q"}),
    ("current_status", {}),
    ("set_status", {"status": 2}),
    ("get_version", {}),
]


@pytest.mark.parametrize(("method", "arguments"), CALLS)
def test_calls_as_thriftpy2_writes_them(method: str, arguments: dict[str, Any]) -> None:
    """framed transport, strict binary protocol; the sequence number comes back."""
    data = call(method, **arguments)
    (command,) = commands(ThriftParser(), data)
    assert command[:2] == (method, 7)
    for found, given_value in zip(command[2:], arguments.values(), strict=True):
        if isinstance(given_value, str):
            assert found == given_value.encode()
        else:
            assert type(given_value)(found) == given_value
    assert commands(ThriftParser(), *[data[at : at + 1] for at in range(len(data))]) == [command]
    assert commands(ThriftParser(), data * 3) == [command] * 3


def test_calls_as_apache_writes_them() -> None:
    buffer = TMemoryBuffer()
    out = ApacheProtocol(buffer, strictWrite=True)
    out.writeMessageBegin("put", TMessageType.CALL, -3)
    out.writeStructBegin("put_args")
    out.writeFieldBegin("queue_name", TType.STRING, 1)
    out.writeString("q")
    out.writeFieldBegin("unknown", TType.MAP, 9)
    out.writeMapBegin(TType.STRING, TType.LIST, 1)
    out.writeString("x")
    out.writeListBegin(TType.STRUCT, 1)
    out.writeFieldBegin("inner", TType.DOUBLE, 1)
    out.writeDouble(1.5)
    out.writeFieldStop()
    out.writeFieldBegin("items", TType.LIST, 2)
    out.writeListBegin(TType.STRING, 2)
    out.writeBinary(b"a")
    out.writeBinary(b"b")
    out.writeFieldBegin("expiration_msec", TType.I64, 3)  # another type: skipped
    out.writeI64(5)
    out.writeFieldStop()
    assert commands(ThriftParser(), framed(buffer.getvalue())) == [("put", -3, b"q", [b"a", b"b"], 0)]


def read_reply(data: bytes, method: str) -> tuple[int, Any]:
    """What thriftpy2 reads of a reply."""
    assert struct.unpack("!i", data[:4])[0] == len(data) - 4
    protocol = TBinaryProtocol(Buffer(data[4:]), strict_read=True)
    name, kind, number = protocol.read_message_begin()
    assert name == method
    if kind == 3:
        error = TApplicationException()
        error.read(protocol)
        return number, error
    result = getattr(IDL.Kestrel, f"{method}_result")()
    result.read(protocol)
    return number, getattr(result, "success", None)


def test_replies_as_thriftpy2_reads_them() -> None:
    assert read_reply(codec.i32_reply(b"put", 5, -7), "put") == (5, -7)
    assert read_reply(codec.void_reply(b"flush_queue", 5), "flush_queue") == (5, None)
    assert read_reply(codec.string_reply(b"get_version", 5, b"x"), "get_version") == (5, "x")
    number, items = read_reply(codec.items_reply(5, [(b"a", 1 << 40), (b"", 0)]), "get")
    assert [(item.data, item.id) for item in items] == [(b"a", 1 << 40), (b"", 0)]
    assert read_reply(codec.items_reply(6, []), "get") == (6, [])
    _, info = read_reply(codec.queue_info_reply(5, QueueInfo(b"h", 1, 2, 3, 4, 5, 6)), "peek")
    assert (info.head_item, info.items, info.bytes, info.journal_bytes) == (b"h", 1, 2, 3)
    assert (info.age, info.waiters, info.open_transactions) == (4, 5, 6)
    _, info = read_reply(codec.queue_info_reply(5, QueueInfo(None, 0, 0, 0, 0, 0, 0)), "peek")
    assert info.head_item is None
    number, error = read_reply(codec.exception_reply(b"put", 9, 6, "no"), "put")
    assert (number, error.type, error.message) == (9, 6, "no")


def test_replies_as_apache_writes_them() -> None:
    buffer = TMemoryBuffer()
    out = ApacheProtocol(buffer, strictWrite=True)
    out.writeMessageBegin("get", TMessageType.REPLY, 5)
    out.writeFieldBegin("success", TType.LIST, 0)
    out.writeListBegin(TType.STRUCT, 1)
    out.writeFieldBegin("data", TType.STRING, 1)
    out.writeBinary(b"abc")
    out.writeFieldBegin("id", TType.I64, 2)
    out.writeI64(9)
    out.writeFieldStop()
    out.writeFieldStop()
    assert codec.items_reply(5, [(b"abc", 9)]) == framed(buffer.getvalue())


def head(method: bytes, kind: int = 1) -> bytes:
    return struct.pack("!Ii", 0x80010000 | kind, len(method)) + method + struct.pack("!i", 1)


NAME = struct.pack("!bhi", 11, 1, 1) + b"q"
HOSTILE = {
    "a negative frame": b"\xff\xff\xff\xff",
    "a frame that is too long": struct.pack("!i", (17 << 20)),
    "an empty frame": framed(b""),
    "no strict version": framed(struct.pack("!i", 3) + b"put\x01" + struct.pack("!i", 1) + b"\0"),
    "another version": framed(struct.pack("!Ii", 0x80020001, 3) + b"put" + struct.pack("!i", 1) + b"\0"),
    "a reply": framed(head(b"put", 2) + b"\0"),
    "a name that does not fit": framed(struct.pack("!Ii", 0x80010001, 1 << 30) + b"put"),
    "a negative name": framed(struct.pack("!Ii", 0x80010001, -1) + b"put"),
    "no end": framed(head(b"put") + NAME),
    "a string that does not fit": framed(head(b"put") + struct.pack("!bhi", 11, 1, 1 << 30)),
    "a negative string": framed(head(b"put") + struct.pack("!bhi", 11, 1, -1) + b"\0"),
    "a list of billions": framed(head(b"put") + struct.pack("!bhbi", 15, 2, 11, (1 << 31) - 1)),
    "a negative list": framed(head(b"put") + struct.pack("!bhbi", 15, 2, 11, -1) + b"\0"),
    "a set of billions": framed(head(b"confirm") + struct.pack("!bhbi", 14, 2, 10, (1 << 31) - 1)),
    "an unknown list of billions": framed(head(b"put") + struct.pack("!bhbi", 15, 9, 2, (1 << 31) - 1)),
    "an unknown map of billions": framed(head(b"put") + struct.pack("!bhbbi", 13, 9, 2, 2, (1 << 31) - 1)),
    "a negative map": framed(head(b"put") + struct.pack("!bhbbi", 13, 9, 2, 2, -1)),
    "an unknown type": framed(head(b"put") + struct.pack("!bh", 77, 9)),
    "too deep": framed(head(b"put") + struct.pack("!bh", 12, 1) * 5000),
    "many empty items": framed(head(b"put") + struct.pack("!bhbi", 15, 2, 11, 100_000) + b"\0" * 400_000),
    "many empty structs": framed(head(b"put") + struct.pack("!bhbi", 15, 9, 12, 100_000) + b"\0" * 100_001),
    "lists in lists": framed(head(b"put") + struct.pack("!bh", 15, 9) + struct.pack("!bi", 15, 1) * 5000),
    "many fields": framed(head(b"put") + struct.pack("!bhb", 2, 9, 0) * 101 + b"\0"),
    "many fields in a struct": framed(
        head(b"put") + struct.pack("!bh", 12, 9) + struct.pack("!bhb", 2, 9, 0) * 70_000 + b"\0\0"
    ),
    "many lists of items": framed(
        head(b"put") + (struct.pack("!bhbi", 15, 2, 11, 40_000) + b"\0" * 160_000) * 2 + b"\0"
    ),
    "many lists of structs": framed(
        head(b"put") + (struct.pack("!bhbi", 15, 9, 12, 40_000) + b"\0" * 40_000) * 2 + b"\0"
    ),
    "many maps": framed(head(b"put") + (struct.pack("!bhbbi", 13, 9, 2, 2, 20_000) + b"\0" * 40_000) * 2 + b"\0"),
    "many lists in a list": framed(
        head(b"put")
        + struct.pack("!bhbi", 15, 9, 15, 9)
        + (struct.pack("!bi", 11, 10_000) + b"\0" * 40_000) * 9
        + b"\0"
    ),
    "empty structs, billions of them": framed(head(b"put") + struct.pack("!bhbi", 15, 9, 12, (1 << 31) - 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames(name: str) -> None:
    """KP-5.24, KP-5.25: a frame ends the connection, whatever lengths it claims; nothing is allocated for a claim."""
    parser = ThriftParser()
    tracemalloc.start()
    try:
        assert commands(parser, HOSTILE[name]) == [("malformed",)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert commands(parser, call("get_version")) == []
    assert parser.held == 0


def test_a_frame_in_tiny_pieces_takes_its_own_size() -> None:
    assert memory_of(ThriftParser(), struct.pack("!i", 100_000) + b"x" * 99_999) < 130_000


def test_lists_without_bytes_cost_nothing() -> None:
    """A list of a billion members that have no bytes would take a billion steps: there is no such type."""
    for kind in (0, 1, 5, 7, 9, 77):
        data = framed(head(b"put") + struct.pack("!bhbi", 15, 9, kind, (1 << 31) - 1) + b"\0" * 100)
        assert commands(ThriftParser(), data) == [("malformed",)]


def test_as_many_items_as_may_be() -> None:
    items = [b""] * (1 << 16)
    (command,) = commands(ThriftParser(), call("put", queue_name="q", items=items, expiration_msec=5))
    assert command == ("put", 7, b"q", items, 5)


def test_missing_and_odd_arguments() -> None:
    assert commands(ThriftParser(), framed(head(b"put") + b"\0")) == [("put", 1, b"", (), 0)]
    odd = framed(head(b"put") + struct.pack("!bhbi", 15, 2, 8, 2) + b"\0" * 8 + NAME + b"\0" + b"trailing")
    assert commands(ThriftParser(), odd) == [("put", 1, b"q", (), 0)]
    negative = framed(head(b"get") + struct.pack("!bh", 8, -5) + b"\0" * 4 + b"\0")
    assert commands(ThriftParser(), negative) == [("get", 1, b"", 0, 0, 0)]
    doubled = framed(head(b"confirm") + struct.pack("!bhbiqqq", 14, 2, 10, 3, 5, 5, 6) + b"\0")
    assert commands(ThriftParser(), doubled) == [("confirm", 1, b"", [5, 6])]
    assert commands(ThriftParser(), framed(head(b"frob"))) == [("unknown-method", 1, b"frob")]


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(CALLS), st.data())
def test_spoilt_frames_raise_nothing(made: tuple[str, dict[str, Any]], choices: st.DataObject) -> None:
    data = bytearray(call(made[0], **made[1]))
    for _ in range(choices.draw(st.integers(0, 4))):
        data[choices.draw(st.integers(4, len(data) - 1))] = choices.draw(st.integers(0, 255))
    cut = bytes(data[4 : choices.draw(st.integers(4, len(data)))])
    commands(ThriftParser(), framed(cut))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    parser = ThriftParser(1000)
    commands(parser, *pieces)
    commands(parser, *map(framed, pieces))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(CALLS), max_size=8), st.binary(max_size=20), st.randoms(use_true_random=False))
def test_cuts_do_not_matter(calls: list[tuple[str, dict[str, Any]]], spoilt: bytes, rng: random.Random) -> None:
    data = b"".join(call(method, **arguments) for method, arguments in calls) + spoilt
    whole = commands(ThriftParser(), data)
    assert commands(ThriftParser(), *cut(data, rng)) == whole
