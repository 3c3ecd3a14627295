"""The text protocol of the kestrel server, over a connection and without one.

An id that begins with KP in a docstring is that of a row of docs/kestrel-protocol.md, which the test covers.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy.server.kestrel.operations import Operations
from kestrelpy.server.kestrel.text_parser import TextParser
from tests.server.harness import Client
from tests.server.kestrel.kestrel_harness import Kestrel, kestrel
from tests.server.parsing import commands, cut, memory_of

ILLEGAL = b"-Queue name contains illegal characters (one of: ~ . /).\n"


@pytest.fixture
def it() -> Iterator[Kestrel]:
    with kestrel(text="127.0.0.1:0", max_open_transactions=3) as running:
        yield running


def text(it: Kestrel) -> Client:
    return it.client(1)


def test_put_and_get(it: Kestrel) -> None:
    """KP-4.1, KP-4.4: put, get: an item a line; a get confirms all reads of the queue that are open here, then
    opens one.
    """
    client = text(it)
    client.ask(b"put q:\none\ntwo\xff\r\nthree\n\n", b"+3\n")
    client.ask(b"GET q\n", b":one\n")
    assert it.stats()["queue_q_open_transactions"] == "1"
    client.ask(b"get q\n", b":two\xff\n")
    assert it.stats()["queue_q_open_transactions"] == "1"
    client.ask(b"get q 0\nget q\n", b":three\n*\n")
    assert it.stats()["queue_q_open_transactions"] == "0"
    client.ask(b"put q:\n\n", b"+0\n")


def test_any_number_of_items(it: Kestrel) -> None:
    """KP-4.1: put: any number, taken in pieces of 1024; refused ones are left out and the rest is tried."""
    client = text(it)
    client.ask(b"put q:\n" + b"".join(b"%d\n" % number for number in range(3000)) + b"\n", b"+3000\n")
    assert it.stats()["queue_q_items"] == "3000"
    with kestrel(text="127.0.0.1:0", config="[queues.q]\nmax_item_size = 3") as small:
        other = text(small)
        other.ask(b"put q:\nabc\ntoo long\nab\n\n", b"+2\n")
        other.ask(b"get q\nget q\n", b":abc\n:ab\n")


def test_a_put_in_pieces_is_refused_once(it: Kestrel) -> None:
    """KP-4.3: put: of more than 1024 items; one command has one reply, and what was taken before is not counted
    later.
    """
    client, items = text(it), b"a\n" * 3000
    refused = b"-Server not available for operation setItem\n"
    client.ask(b"status readonly\nput q:\n" + items + b"\nversion\n", b"+0\n" + refused + b":2.4.7+kestrelpy\n")
    client.ask(b"status up\nput q:\n" + b"a\n" * 1024, b"+0\n")
    it.until(lambda: it.server.queues.find(b"q"))
    other = text(it)
    other.ask(b"status readonly\n", b"+0\n")
    client.ask(items + b"\n", refused)
    other.ask(b"status up\n", b"+0\n")
    client.ask(b"put q:\na\n\n", b"+1\n")


def test_a_put_without_a_colon(it: Kestrel) -> None:
    """KP-4.2: put: without the colon it has no items, as in the original."""
    client = text(it)
    client.ask(b"put q\nput q 500\nversion\n", b"+0\n+0\n:2.4.7+kestrelpy\n")
    client.ask(b"put q:\na\n\nput q\nget q\n", b"+1\n+0\n:a\n")


def test_a_large_item(it: Kestrel) -> None:
    """KP-4.1: put: an item of more than a client may send ahead, and of more than one read."""
    client, item = text(it), b"x" * 1_000_000
    client.ask(b"put q:\n" + item + b"\n\n", b"+1\n")
    client.ask(b"get q\n", b":" + item + b"\n")


def test_what_a_queue_takes_is_read() -> None:
    """KP-1.32, KP-1.41: default_journal_size, max_item_size: of the queue, or of an alias's; what it does not take
    is not held.
    """
    config = """
        default_status = "up"
        [queues.big]
        default_journal_size = "32M"
        [queues.small]
        max_item_size = 100_000
        [aliases]
        both = ["small", "big"]
        """
    with kestrel(text="127.0.0.1:0", config=config) as it:
        client, item = text(it), b"x" * (20 << 20)
        client.ask(b"put big:\n" + item + b"\n\n", b"+1\n")
        client.ask(b"put q:\n" + item + b"\n\n", b"+0\n")
        client.ask(b"put both:\n" + item + b"\n\n", b"+0\n")  # one of them has it: NOT_STORED
        assert it.stats()["queue_big_items"] == "2"
        before = it.server.bytes_read
        client.send(b"put small:\n" + b"x" * 200_000)
        it.until(lambda: it.server.bytes_read == before + 200_011)
        (parser,) = [each.client.parser for each in it.server.connections if each.client.parser.__class__ is TextParser]
        assert not parser._later
        client.ask(b"\nshort\n\n", b"+1\n")


def test_a_client_that_waits_is_not_read_from_for_ever(it: Kestrel) -> None:
    """get: what it sends meanwhile is kept, and is too much at some time, though each line is empty."""
    client, lines = text(it), 70_000
    client.send(b"get q 60000\n")
    it.wait_for_waiting(b"q")
    client.send(b"\n" * lines)
    it.until(lambda: any(connection._is_unread for connection in it.server.connections))
    text(it).ask(b"put q:\na\n\n", b"+1\n")
    client.hear(b":a\n" + b"-Unknown command: \n" * lines)
    client.ask(b"version\n", b":2.4.7+kestrelpy\n")


def test_expiry(it: Kestrel) -> None:
    """KP-4.1, KP-4.23: put q ms: milliseconds."""
    client = text(it)
    client.ask(b"put q 1500:\na\n\n", b"+1\n")
    it.call(lambda: it.clock.jump(1.4))
    client.ask(b"peek q\n", b":a\n")
    it.call(lambda: it.clock.jump(0.1))
    client.ask(b"peek q\n", b"*\n")
    client.ask(b"put q soon:\na\n\nversion\n", b"-Error parsing expiration time.\n:2.4.7+kestrelpy\n")


def test_peek_and_waiting(it: Kestrel) -> None:
    """KP-4.4, KP-4.5: peek, get q ms: peek confirms like get, opens nothing."""
    client, other = text(it), text(it)
    client.send(b"peek q 60000\n")
    it.wait_for_waiting(b"q")
    other.ask(b"put q:\na\nb\n\n", b"+2\n")
    client.hear(b":a\n")
    client.ask(b"get q 50\npeek q\n", b":a\n:b\n")
    assert it.stats()["queue_q_open_transactions"] == "0"
    client.ask(b"get q\nget q 0\n", b":b\n*\n")
    client.send(b"get q 2000\n")
    it.wait_for_waiting(b"q")
    it.advance(2)
    client.hear(b"*\n")


def test_monitor_and_confirm(it: Kestrel) -> None:
    """KP-4.6, KP-4.7, KP-4.13: monitor, confirm: at most max_open_transactions."""
    client = text(it)
    client.ask(b"put q:\na\nb\nc\nd\n\n", b"+4\n")
    client.ask(b"monitor q 5000\n", b":a\n:b\n:c\n*\n")
    client.ask(b"confirm q 4\nconfirm q 0\n", b"-Not that many transactions open.\n" * 2)
    client.ask(b"confirm q 2\n", b"+2\n")
    client.send(b"monitor q 5000\n")  # confirms the third
    client.hear(b":d\n")
    it.wait_for_waiting(b"q")
    it.advance(5)
    client.hear(b"*\n")
    assert it.stats()["queue_q_open_transactions"] == "1"
    client.hang_up()
    it.until(lambda: not it.server.queues.find(b"q").reads)  # type: ignore[union-attr]
    text(it).ask(b"get q\n", b":d\n")


def test_whole_queues(it: Kestrel) -> None:
    """KP-4.8, KP-4.9, KP-4.11, KP-4.12: flush, delete, flush_all, flush_expired, flush_all_expired, reload,
    version, quit.
    """
    client = text(it)
    client.ask(b"put q:\na\n\nflush q\nget q\n", b"+1\n+0\n*\n")
    client.ask(b"put q 1000:\na\nb\n\nput r 1000:\na\n\n", b"+2\n+1\n")
    it.call(lambda: it.clock.jump(2))
    client.ask(b"flush_expired q\nflush_all_expired\n", b"+2\n+1\n")
    client.ask(b"put q:\na\n\nflush_all\nget q\n", b"+1\n+0\n*\n")
    client.ask(b"delete q\ndelete unknown\nreload\nversion\n", b"+0\n+0\n+0\n:2.4.7+kestrelpy\n")
    client.ask(b"quit\nversion\n", b"+0\n")
    client.hear_the_end()


def test_status(it: Kestrel) -> None:
    """KP-4.8, KP-4.10, KP-4.29, KP-4.30: status; what a status forbids; shutdown."""
    client = text(it)
    client.ask(b"status\nstatus readonly\nstatus\n", b":UP\n+0\n:READONLY\n")
    for line, name in (
        (b"put q:\na\n\n", b"setItem"),
        (b"flush q\n", b"flush"),
        (b"delete q\n", b"delete"),
        (b"flush_all\n", b"flushAll"),
        (b"flush_expired q\n", b"flushExpired"),
        (b"flush_all_expired\n", b"flushExpired"),
    ):
        client.ask(line, b"-Server not available for operation %b\n" % name)
    client.ask(b"status quiescent\n", b"+0\n")
    for line, name in ((b"get q\n", b"getItem"), (b"peek q\n", b"getItem"), (b"monitor q 5\n", b"monitorUntil")):
        client.ask(line, b"-Server not available for operation %b\n" % name)
    client.ask(b"status asleep\nstatus down\nstatus up\n", b"-Unknown status.\n-Status forbidden.\n+0\n")
    client.ask(b"shutdown\n", b"+0\n")
    it.advance(0.1)
    assert it.call(it.server._end.done)


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (b"get\n", b"-Queue name required.\n"),
        (b"flush\n", b"-Queue name required.\n"),
        (b"monitor q\n", b"-Queue name & timeout required.\n"),
        (b"confirm q\n", b"-Queue name & count required.\n"),
        (b"get q x\n", b"-Error parsing timeout.\n"),
        (b"monitor q x\n", b"-Error parsing timeout.\n"),
        (b"confirm q x\n", b"-Error parsing count.\n"),
        (b"frob x\n", b"-Unknown command: frob\n"),
        (b"\n", b"-Unknown command: \n"),
        (b"get a.b\n", ILLEGAL),
        (b"put a~b:\nitem\nget q\n\n", ILLEGAL),
        (b"put :\nitem\n\n", b"-Queue name required.\n"),
        (b"put\n", b"-Queue name required.\n"),
        (b"put q soon\n", b"-Error parsing expiration time.\n"),
        (b"put a.b\n", ILLEGAL),
        (b"x" * 9000 + b"\n", b"-Line too long.\n"),
    ],
)
def test_errors(it: Kestrel, line: bytes, reply: bytes) -> None:
    """KP-4.20, KP-4.21, KP-4.22, KP-4.23, KP-4.24, KP-4.25, KP-4.26, KP-4.27, KP-4.28: errors: no error ends the
    connection.
    """
    client = text(it)
    client.ask(line, reply)
    client.ask(b"version\n", b":2.4.7+kestrelpy\n")


def test_too_many_open_reads() -> None:
    """The reply, if it ever comes: a get confirms first, and so has room."""
    with kestrel(text="127.0.0.1:0") as it, patch.object(Operations, "confirm_all"):
        client = text(it)
        client.ask(b"put q:\na\n\nget q\nget q\n", b"+1\n:a\n-Too many open transactions; limit=1\n")


@pytest.mark.parametrize("name", [b"a\tb", b"\ta", b"a\x0b", b"\x0c", b"a\x1cb", b"a\xa0"])
def test_blanks_that_are_no_spaces_belong_to_words(it: Kestrel, name: bytes) -> None:
    """KP-2.1: names have any bytes but a few: words end at spaces."""
    client = text(it)
    client.ask(b"put " + name + b":\na\n\nput  %b  5000 : \nb\n\n" % name, b"+1\n+1\n")
    client.ask(b"get %b\n  get   %b  0 \n" % (name, name), b":a\n:b\n")
    client.ask(b"get\tq\n", b"-Unknown command: get\tq\n")
    assert name in it.call(lambda: list(it.server.queues.by_name))


# -- the parser --------------------------------------------------------------------------------------------------------


PIECES = [
    b"put",
    b"get",
    b"monitor",
    b"confirm",
    b" ",
    b"\n",
    b"\r\n",
    b"q",
    b"q:",
    b"5",
    b"x~",
    b"item",
    b"status",
    b"\n\n",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.randoms(use_true_random=False))
def test_cuts_do_not_matter(pieces: list[bytes], rng: random.Random) -> None:
    data = b"".join(pieces)
    whole = commands(TextParser(lambda _name: 100), data)
    assert commands(TextParser(lambda _name: 100), *cut(data, rng)) == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    parser = TextParser(lambda _name: 50, 100)
    for piece in pieces:
        commands(parser, piece)
        assert parser.held == 0
        assert len(parser._later) <= 102


def test_long_items_are_left_out_and_not_held() -> None:
    parser = TextParser(lambda _name: 10, 20)
    assert commands(parser, b"put q:\n", *[b"x" * 10] * 50, b"\nshort\n" + b"y" * 15 + b"\n\n") == [
        ("put", b"q", None, [b"short"], True)
    ]
    assert commands(parser, b"put q:\n" + b"z" * 10) == []
    assert commands(parser, *[b"z" * 10] * 10, b"\r\n\r\nversion\n") == [("put", b"q", None, [], True), ("version",)]


@pytest.mark.parametrize("line", [b"", b"a", b"ab", b"get q"])
def test_lines_that_wait_are_held_in_their_own_size(line: bytes) -> None:
    """A client that waits sends them: nothing asks for the next command."""
    data = (line + b"\n") * (100_000 // (len(line) + 1))
    parser = TextParser(lambda _name: 1 << 20)
    tracemalloc.start()
    try:
        for at in range(0, len(data), 1000):
            parser.feed(data[at : at + 1000])
        assert parser.held == len(data)
        assert tracemalloc.get_traced_memory()[0] < 1.3 * len(data)
    finally:
        tracemalloc.stop()
    assert len(commands(parser, b"")) == data.count(b"\n")
    assert parser.held == 0


def test_an_incomplete_line_is_not_held_and_takes_its_own_size() -> None:
    parser = TextParser(lambda _name: 1 << 20)
    assert memory_of(parser, b"put q:\n" + b"x" * 100_000) < 130_000
    assert parser.held == 0
    assert commands(parser, b"\n\n") == [("put", b"q", None, [b"x" * 100_000], True)]


@pytest.mark.parametrize(
    ("begin", "most"), [(b"", 8193), (b"put q:\n", (1 << 20) + 1), (b"put a.b:\n", 1), (b"version\n", 8193)]
)
def test_a_line_without_an_end_is_kept_as_long_as_it_may_mean_something(begin: bytes, most: int) -> None:
    """A command, an item, or an item of a put that is refused: of this no more than what an empty line has."""
    parser = TextParser(lambda _name: 1 << 20)
    commands(parser, begin)
    for _ in range(2000):
        parser.feed(b"x" * 1000)
        assert parser.next() is None
        assert len(parser._later) <= most
        assert parser.held == 0
