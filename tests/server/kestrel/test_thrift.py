"""The thrift service of the kestrel server, over a connection, with thriftpy2 and the IDL in ``kestrel.thrift``.

An id that begins with KP in a docstring is that of a row of docs/kestrel-protocol.md, which the test covers.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import thriftpy2
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TFramedTransportFactory

from tests.server.kestrel.kestrel_harness import START_S, Kestrel, kestrel

IDL: Any = thriftpy2.load(str(Path(__file__).parent / "kestrel.thrift"), module_name="kestrel_thrift")


@pytest.fixture
def it() -> Iterator[Kestrel]:
    with kestrel(thrift="127.0.0.1:0", max_open_transactions=3) as running:
        yield running


@contextlib.contextmanager
def client(it: Kestrel) -> Iterator[Any]:
    host, port = it.server.addresses[1]
    made = make_client(
        IDL.Kestrel,
        host,
        port,
        proto_factory=TBinaryProtocolFactory(strict_read=True, strict_write=True),
        trans_factory=TFramedTransportFactory(),
        timeout=20_000,
    )
    try:
        yield made
    finally:
        made.close()


FIRST = START_S * 1000 << 20
"""What the ids of open reads begin after, by the clock of the tests."""


def pairs(items: list[Any]) -> list[tuple[bytes, int]]:
    """Data and ids, counted from 1; 0 for no open read."""
    return [(item.data, max(0, item.id - FIRST)) for item in items]


def ids(*numbers: int) -> set[int]:
    return {FIRST + number for number in numbers}


class Call(threading.Thread):
    """A call that waits."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        self.result = self._call()


def test_put_and_get(it: Kestrel) -> None:
    """KP-5.1, KP-5.2, KP-5.3: put, get: with timeout 0 what is there; auto_abort 0: done with, id 0."""
    with client(it) as c:
        assert c.put("q", [b"a", b"b", b"\xff"], 0) == 3
        assert pairs(c.get("q", 2, 0, 0)) == [(b"a", 0), (b"b", 0)]
        assert pairs(c.get("q", 5, 0, 0)) == [(b"\xff", 0)]
        assert c.get("q", 5, 0, 0) == c.get("q", 0, 0, 0) == c.get("q", -1, 0, 0) == []
        assert c.put("q", [], 0) == 0
        assert c.put("q", [b"late"], 500) == 1
        it.call(lambda: it.clock.jump(1))
        assert c.get("q", 5, 0, 0) == []


def test_large_calls_are_bounded(it: Kestrel) -> None:
    """KP-5.6: A reply has at most 10,000 items or 16 MiB, whatever is asked for; many puts let others in."""
    with client(it) as c, client(it) as other:
        assert c.put("q", [b""] * 12_000, 0) == 12_000
        assert other.put("r", [], 0) == 0
        assert len(c.get("q", 2_000_000_000, 0, 0)) == 10_000
        assert len(c.get("q", 2_000_000_000, 0, 0)) == 2000
        for _ in range(20):
            c.put("q", [b"x" * 1_000_000], 0)
        assert len(c.get("q", 100, 0, 0)) == 17
        assert len(c.get("q", 100, 0, 0)) == 3


def test_put_stops_at_the_first_refusal() -> None:
    """KP-5.1: put: stops at the first refusal; the number taken."""
    with kestrel(thrift="127.0.0.1:0", config="[queues.q]\nmax_item_size = 3") as it, client(it) as c:
        assert c.put("q", [b"abc", b"long", b"ab"], 0) == 1


def test_get_waits_for_all(it: Kestrel) -> None:
    """KP-5.2: get: until max_items are there or the time is over."""
    with client(it) as waiting, client(it) as c:
        call = Call(lambda: waiting.get("q", 2, 60_000, 0))
        it.wait_for_waiting(b"q")
        c.put("q", [b"a"], 0)
        assert it.waiting(b"q") == 1
        c.put("q", [b"b", b"c"], 0)
        call.join()
        assert pairs(call.result) == [(b"a", 0), (b"b", 0)]
        call = Call(lambda: waiting.get("q", 2, 5000, 0))
        it.wait_for_waiting(b"q")
        it.advance(5)
        call.join()
        assert pairs(call.result) == [(b"c", 0)]
        call = Call(lambda: waiting.get("q", 2, 5000, 0))
        it.wait_for_waiting(b"q")
        it.advance(5)
        call.join()
        assert call.result == []
        stats = it.stats()
        assert [stats[key] for key in ("cmd_get", "get_hits", "get_misses")] == ["3", "3", "1"]


def test_a_client_that_goes_takes_nothing_with_it(it: Kestrel) -> None:
    """KP-5.7: get: a client that goes while it waits takes nothing with it."""
    call = struct.pack("!Ii3si", 0x80010001, 3, b"get", 1) + struct.pack("!bhi1s", 11, 1, 1, b"q")
    call += struct.pack("!bhi", 8, 2, 2) + struct.pack("!bhi", 8, 3, 60_000) + b"\0"
    with client(it) as c:
        c.put("q", [b"a"], 0)
        waiting = it.client(1)
        waiting.send(struct.pack("!i", len(call)) + call)
        it.wait_for_waiting(b"q")
        waiting.hang_up()
        it.until(lambda: not it.waiting(b"q"))
        assert pairs(c.get("q", 2, 0, 0)) == [(b"a", 0)]


def test_open_reads(it: Kestrel) -> None:
    """KP-5.4, KP-5.5, KP-5.9, KP-5.10, KP-5.11: get: auto_abort: open reads with ids; confirm, abort: how many were
    open; from any connection.
    """
    with client(it) as c, client(it) as other:
        c.put("q", [b"1", b"2", b"3", b"4"], 0)
        got = pairs(c.get("q", 9, 0, 10_000))  # as many as may be open
        assert got == [(b"1", 1), (b"2", 2), (b"3", 3)]
        assert c.get("q", 9, 0, 10_000) == []
        assert pairs(other.get("q", 1, 0, 10_000)) == [(b"4", 4)]
        assert other.confirm("whatever", ids(1, 99)) == 1
        assert other.abort("q", ids(2, 1)) == 1
        assert pairs(c.get("q", 9, 0, 10_000)) == [(b"2", 5)]  # the confirm gave room to the one that opened
        assert it.stats()["queue_q_open_transactions"] == "3"


def test_open_reads_end_by_time_and_outlive_their_connection(it: Kestrel) -> None:
    """KP-5.4, KP-5.8: get: open reads outlive their connection until their time."""
    with client(it) as c:
        c.put("q", [b"1", b"2"], 0)
        c.get("q", 2, 0, 10_000)
    it.until(lambda: not it.server.connections)
    with client(it) as c:
        assert c.get("q", 2, 0, 0) == []
        assert c.confirm("q", ids(1)) == 1
        it.advance(9.9)
        assert c.get("q", 2, 0, 0) == []
        it.advance(0.1)
        assert pairs(c.get("q", 2, 0, 0)) == [(b"2", 0)]
        assert c.abort("q", ids(2)) == 0


def test_the_sooner_time_counts() -> None:
    """KP-5.4: get: aborted after auto_abort, or after open_transaction_timeout if that is sooner."""
    config = "max_open_transactions = 9\n[queues.q]\nopen_transaction_timeout = 5"
    with kestrel(thrift="127.0.0.1:0", config=config) as it, client(it) as c:
        c.put("q", [b"1", b"2"], 0)
        c.get("q", 1, 0, 60_000)
        c.get("q", 1, 0, 1000)
        it.advance(1)
        assert pairs(c.get("q", 2, 0, 0)) == [(b"2", 0)]
        it.advance(4)
        assert pairs(c.get("q", 2, 0, 0)) == [(b"1", 0)]


def test_peek(it: Kestrel) -> None:
    """KP-2.4, KP-5.12: peek: QueueInfo; it makes the queue."""
    with client(it) as c:
        info = c.peek("q")
        assert (info.head_item, info.items, info.bytes, info.waiters, info.open_transactions) == (None, 0, 0, 0, 0)
        assert "queue_q_items" in it.stats()
        c.put("q", [b"abc", b"de"], 0)
        it.call(lambda: it.clock.jump(2))
        c.get("q", 1, 0, 60_000)
        info = c.peek("q")
        assert (info.head_item, info.items, info.bytes, info.age, info.open_transactions) == (b"de", 1, 2, 2000, 1)
        assert info.journal_bytes > 0
        assert it.stats()["cmd_peek"] == "2"


def test_whole_queues(it: Kestrel) -> None:
    """KP-5.13, KP-5.16: flush_queue, flush_all_queues, delete_queue, get_version."""
    with client(it) as c:
        flushes: list[Callable[[], object]] = [
            lambda: c.flush_queue("q"),
            lambda: c.flush_all_queues(),
            lambda: c.delete_queue("q"),
        ]
        for flush in flushes:
            c.put("q", [b"a"], 0)
            assert flush() is None
            assert c.get("q", 1, 0, 0) == []
        c.delete_queue("unknown")
        assert c.get_version() == "2.4.7+kestrelpy"


def test_status(it: Kestrel) -> None:
    """KP-5.14, KP-5.15, KP-5.22: current_status, set_status; errors: TApplicationException on a connection that
    goes on.
    """
    with client(it) as c:
        assert c.current_status() == IDL.Status.UP
        c.set_status(IDL.Status.READ_ONLY)
        assert c.current_status() == IDL.Status.READ_ONLY
        writes: list[tuple[Callable[[], object], str]] = [
            (lambda: c.put("q", [b"a"], 0), "setItem"),
            (lambda: c.flush_queue("q"), "flush"),
            (lambda: c.flush_all_queues(), "flushAll"),
            (lambda: c.delete_queue("q"), "delete"),
        ]
        for call, name in writes:
            with pytest.raises(TApplicationException, match=f"Server not available for operation {name}") as raised:
                call()
            assert raised.value.type == 6
        c.set_status(IDL.Status.QUIESCENT)
        with pytest.raises(TApplicationException, match="getItem"):
            c.get("q", 1, 0, 0)
        with pytest.raises(TApplicationException, match="getItem"):
            c.peek("q")
        for wrong in (IDL.Status.NOT_CONFIGURED, 4, -1):
            with pytest.raises(TApplicationException, match="Unknown status"):
                c.set_status(wrong)
        it.call(lambda: it.server.set_status(b"writeavoid"))
        assert c.current_status() == IDL.Status.NOT_CONFIGURED


def test_errors(it: Kestrel) -> None:
    """KP-5.20, KP-5.21, KP-5.23: errors: 1 for an unknown method, 6 for a name; too many queues."""
    with client(it) as c:
        with pytest.raises(TApplicationException, match="Invalid method name: unheard_of") as raised:
            c.unheard_of("x")
        assert raised.value.type == 1
        illegal: list[Callable[[], object]] = [
            lambda: c.put("a.b", [b"a"], 0),
            lambda: c.get("a~", 1, 0, 0),
            lambda: c.peek(""),
        ]
        for call in illegal:
            with pytest.raises(TApplicationException, match="illegal characters") as raised:
                call()
            assert raised.value.type == 6
    with kestrel(thrift="127.0.0.1:0", max_queues=1) as small, client(small) as c:
        c.put("a", [b"a"], 0)
        with pytest.raises(TApplicationException, match="Too many queues"):
            c.put("b", [b"a"], 0)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x04abcd", b"\0\0\0\0"])
def test_what_is_no_frame_ends_the_connection(it: Kestrel, data: bytes) -> None:
    """KP-5.24: a frame that is longer, negative, or no call ends the connection."""
    plain = it.client(1)
    plain.send(data)
    plain.hear_the_end()


def test_a_deleted_queue_answers_those_who_wait(it: Kestrel) -> None:
    with client(it) as waiting, client(it) as c:
        c.put("q", [b"a"], 0)
        call = Call(lambda: waiting.get("q", 2, 60_000, 5000))
        it.wait_for_waiting(b"q")
        c.delete_queue("q")
        call.join()
        assert len(call.result) <= 1
        assert c.confirm("q", ids(1)) == 0
        assert c.peek("q").items == 0


def test_a_long_name_of_a_method_is_not_multiplied(it: Kestrel) -> None:
    """KP-5.20: errors: its name comes back; the message has the beginning of it only."""
    name = b"\xff" * 1_000_000
    body = struct.pack("!Ii", 0x80010001, len(name)) + name + struct.pack("!i", 7)
    raw = it.client(1)
    raw.send(struct.pack("!i", len(body)) + body)
    (size,) = struct.unpack("!i", raw.exactly(4))
    assert len(body) < size < len(body) + 1000
    assert raw.exactly(size).startswith(struct.pack("!Ii", 0x80010003, len(name)) + name + struct.pack("!i", 7))
