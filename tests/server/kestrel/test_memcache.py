"""The memcache protocol of the kestrel server: every command, every option, every error.

An id that begins with KP in a docstring is that of a row of docs/kestrel-protocol.md, which the test covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Client
from tests.server.kestrel.kestrel_harness import START_S, Kestrel, kestrel


@pytest.fixture(params=["memory", "disk"])
def it(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kestrel]:
    with kestrel(tmp_path if request.param == "disk" else None, max_open_transactions=3) as running:
        yield running


def put(client: Client, name: bytes, *bodies: bytes) -> None:
    for body in bodies:
        client.ask(b"set %b 0 0 %d\r\n%b\r\n" % (name, len(body), body), b"STORED\r\n")


def value(name: bytes, body: bytes) -> bytes:
    return b"VALUE %b 0 %d\r\n%b\r\nEND\r\n" % (name, len(body), body)


# -- set ---------------------------------------------------------------------------------------------------------------


def test_set_and_get(it: Kestrel) -> None:
    """KP-3.1, KP-3.3: set, get."""
    client = it.client()
    put(client, b"jobs", b"one", b"", b"with\r\nlines and \0 bytes")
    client.ask(b"get jobs\r\n", value(b"jobs", b"one"))
    client.ask(b"GET jobs other ignored\r\n", value(b"jobs", b""))
    client.ask(b"get jobs\n", value(b"jobs", b"with\r\nlines and \0 bytes"))
    client.ask(b"get jobs\r\n", b"END\r\n")


def test_gets_has_the_id(it: Kestrel) -> None:
    """KP-3.4: gets."""
    client = it.client()
    put(client, b"q", b"a", b"b")
    client.ask(b"gets q\r\n", b"VALUE q 0 1 1\r\na\r\nEND\r\n")
    client.ask(b"gets q\r\n", b"VALUE q 0 1 2\r\nb\r\nEND\r\n")


@pytest.mark.parametrize(
    ("expiry", "lives"),
    [
        (b"0", 10**7),
        (b"5", 5),
        (b"999999", 999_999),
        (b"%d" % (START_S + 60), 60),
        (b"-1", 0),
        (b"-99999999999999999999", 0),
        (b"99999999999999999999", 10**7),
    ],
)
def test_expiry(it: Kestrel, expiry: bytes, lives: int) -> None:
    """KP-3.2: set: 0 never, small numbers from now, negative over already, others in unix seconds."""
    client = it.client()
    client.ask(b"set q 7 %b 1\r\nx\r\n" % expiry, b"STORED\r\n")
    client.ask(b"get q/peek\r\n", value(b"q", b"x") if lives else b"END\r\n")
    if 0 < lives < 10**7:
        it.call(lambda: it.clock.jump(lives - 1))
        client.ask(b"get q/peek\r\n", value(b"q", b"x"))
        it.call(lambda: it.clock.jump(1))
        client.ask(b"get q\r\n", b"END\r\n")


def test_noreply_is_obeyed(it: Kestrel) -> None:
    """KP-3.24: noreply of set, delete, flush and flush_all."""
    client = it.client()
    client.send(b"set q 0 0 1 noreply\r\na\r\nflush q noreply\r\ndelete q noreply\r\nflush_all noreply\r\n")
    client.send(b"set q 0 0 1 noreply\r\nb\r\n")
    client.ask(b"get q\r\n", value(b"q", b"b"))


# -- get and its options -----------------------------------------------------------------------------------------------


def test_open_and_close(it: Kestrel) -> None:
    """KP-3.31, KP-3.32, KP-3.33, KP-7.3: open, close: the oldest open read is done."""
    client = it.client()
    put(client, b"q", b"a", b"b", b"c")
    client.ask(b"get q/open\r\n", value(b"q", b"a"))
    client.ask(b"get q/open\r\n", value(b"q", b"b"))
    stats = it.stats()
    assert (stats["queue_q_items"], stats["queue_q_bytes"], stats["queue_q_open_transactions"]) == ("1", "1", "2")
    client.ask(b"get q/close/open\r\n", value(b"q", b"c"))
    client.ask(b"get q/t=5000/close\r\n", b"END\r\n")  # without open it does not get, and so does not wait
    client.ask(b"get q/close\r\nget q/close\r\n", b"END\r\nEND\r\n")  # the second has nothing to close
    stats = it.stats()
    assert (stats["queue_q_items"], stats["queue_q_open_transactions"], stats["queue_q_transactions"]) == (
        "0",
        "0",
        "3",
    )
    client.ask(b"get q/close/open/t=0\r\n", b"END\r\n")


def test_abort(it: Kestrel) -> None:
    """KP-3.34: abort: the oldest comes back, ahead of the unread."""
    client = it.client()
    put(client, b"q", b"a", b"b", b"c")
    client.ask(b"get q/open\r\nget q/open\r\n", value(b"q", b"a") + value(b"q", b"b"))
    client.ask(b"get q/abort\r\n", b"END\r\n")
    client.ask(b"get q/open\r\n", value(b"q", b"a"))
    client.ask(b"get q/abort\r\nget q/abort\r\nget q/abort\r\n", b"END\r\n" * 3)
    client.ask(b"get q\r\n" * 4, value(b"q", b"a") + value(b"q", b"b") + value(b"q", b"c") + b"END\r\n")
    assert it.stats()["queue_q_canceled_transactions"] == "3"


def test_peek(it: Kestrel) -> None:
    """KP-3.35, KP-7.8: peek: the item stays; may wait; counts in cmd_peek."""
    client, other = it.clients(2)
    client.send(b"get q/peek/t=60000\r\n")
    it.wait_for_waiting(b"q")
    put(other, b"q", b"a")
    client.hear(value(b"q", b"a"))
    client.ask(b"get q/peek\r\n", value(b"q", b"a"))
    client.ask(b"get none/peek\r\n", b"END\r\n")
    stats = it.stats()
    assert [stats[key] for key in ("cmd_peek", "cmd_get", "get_hits", "get_misses")] == ["3", "0", "2", "1"]
    assert stats["queue_q_items"] == "1"


def test_a_get_waits(it: Kestrel) -> None:
    """KP-3.30: t=ms: waits so long; 0, negative and absent do not wait."""
    client, other = it.clients(2)
    client.ask(b"get q\r\nget q/t=0\r\nget q/t=-5\r\nget q/unknown=1/\r\n", b"END\r\n" * 4)
    client.send(b"get q/t=60000\r\nversion\r\n")  # what follows waits, too
    it.wait_for_waiting(b"q")
    assert it.stats()["queue_q_waiters"] == "1"
    put(other, b"q", b"a")
    client.hear(value(b"q", b"a") + b"VERSION 2.4.7+kestrelpy\r\n")
    client.send(b"get q/t=1500\r\n")
    it.wait_for_waiting(b"q")
    it.advance(1.4)
    client.hear_nothing()
    it.advance(0.1)
    client.hear(b"END\r\n")
    stats = it.stats()
    assert [stats[key] for key in ("cmd_get", "get_hits", "get_misses")] == ["6", "1", "5"]


def test_consumers_wait_in_line(it: Kestrel) -> None:
    """KP-2.9."""
    first, second, third, producer = it.clients(4)
    for number, client in enumerate((first, second, third), start=1):
        client.send(b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q", number)
    second.hang_up()
    it.wait_for_waiting(b"q", 2)
    put(producer, b"q", b"a", b"b")
    first.hear(value(b"q", b"a"))
    third.hear(value(b"q", b"b"))


def test_as_many_open_reads_as_may_be(it: Kestrel) -> None:
    """KP-1.21, KP-3.49, KP-3.60: open: as many as max_open_transactions: ERROR, ends."""
    client = it.client()
    put(client, b"q", *[b"%d" % number for number in range(4)])
    for number in range(3):
        client.ask(b"get q/open\r\n", value(b"q", b"%d" % number))
    client.ask(b"get q/open\r\n", b"ERROR\r\n")
    client.hear_the_end()
    it.until(lambda: not it.server.connections)
    assert it.stats()["queue_q_items"] == "4"


def test_a_plain_get_beside_an_open_read(it: Kestrel) -> None:
    """KP-3.50: a get without open while a read is open: ERROR, ends. Peek, and gets of other queues, are allowed."""
    client = it.client()
    put(client, b"q", b"a", b"b")
    put(client, b"other", b"c")
    client.ask(b"get q/open\r\n", value(b"q", b"a"))
    client.ask(b"get q/peek\r\n", value(b"q", b"b"))
    client.ask(b"get other\r\n", value(b"other", b"c"))
    client.ask(b"get q\r\n", b"ERROR\r\n")
    client.hear_the_end()


@pytest.mark.parametrize("options", [b"peek/open", b"abort/open", b"peek/close", b"close/abort", b"peek/abort"])
def test_options_that_exclude_each_other(it: Kestrel, options: bytes) -> None:
    """KP-3.48: peek or abort with open or close, peek with abort: CLIENT_ERROR, ends."""
    client = it.client()
    client.ask(b"get q/%b\r\n" % options, b"CLIENT_ERROR\r\n")
    client.hear_the_end()


# -- monitor and confirm -----------------------------------------------------------------------------------------------


def test_monitor_and_confirm(it: Kestrel) -> None:
    """KP-3.5, KP-3.9: monitor, confirm."""
    client, other = it.clients(2)
    put(other, b"q", b"a")
    client.send(b"monitor q 10 2\r\n")
    client.hear(value(b"q", b"a"))
    put(other, b"q", b"b", b"c")
    client.hear(value(b"q", b"b") + b"END\r\n")
    client.ask(b"confirm q 3\r\n", b"ERROR\r\n")  # there are two
    client.ask(b"confirm q 0\r\nconfirm q -1\r\n", b"ERROR\r\nERROR\r\n")
    client.ask(b"confirm q 2\r\n", b"END\r\n")
    client.ask(b"confirm q 1\r\nconfirm none 1\r\n", b"ERROR\r\nERROR\r\n")
    client.ask(b"get q\r\n", value(b"q", b"c"))
    stats = it.stats()
    assert [stats[key] for key in ("get_hits", "get_misses", "cmd_get")] == ["3", "0", "1"]


def test_a_monitor_ends_by_time(it: Kestrel) -> None:
    """KP-3.6, KP-3.7, KP-7.7: monitor: its end by time is a miss; max 0 or seconds 0 end at once."""
    client = it.client()
    put(client, b"q", b"a")
    client.ask(b"monitor q 10 0\r\nmonitor q 0\r\n", b"END\r\nEND\r\n")
    client.send(b"monitor q 10\r\n")
    client.hear(value(b"q", b"a"))
    it.wait_for_waiting(b"q")
    it.advance(10)
    client.hear(b"END\r\n")
    assert it.stats()["get_misses"] == "1"


def test_a_monitor_opens_as_many_as_may_be(it: Kestrel) -> None:
    """KP-3.6, KP-3.8: monitor: at most max_open_transactions, if nothing is said."""
    client = it.client()
    put(client, b"q", *[b"%d" % number for number in range(5)])
    client.ask(b"monitor q 60\r\n", b"".join(value(b"q", b"%d" % number) for number in range(3)) + b"END\r\n")
    client.ask(b"monitor q 60 9\r\n", b"END\r\n")
    client.ask(b"confirm q 3\r\nmonitor q 60 1\r\n", b"END\r\n" + value(b"q", b"3") + b"END\r\n")


def test_a_monitor_goes_to_the_end_of_the_line(it: Kestrel) -> None:
    """KP-2.9."""
    monitor, getter, producer = it.clients(3)
    monitor.send(b"monitor q 60 3\r\n")
    it.wait_for_waiting(b"q", 1)
    getter.send(b"get q/t=60000\r\n")
    it.wait_for_waiting(b"q", 2)
    put(producer, b"q", b"a", b"b", b"c")
    monitor.hear(value(b"q", b"a"))
    getter.hear(value(b"q", b"b"))
    monitor.hear(value(b"q", b"c"))


# -- whole queues ------------------------------------------------------------------------------------------------------


def test_delete(it: Kestrel) -> None:
    """KP-3.11, KP-3.12: delete: known or not; its waiters get END; open reads of it are forgotten everywhere."""
    client, holder, waiter = it.clients(3)
    put(client, b"q", b"a")
    holder.ask(b"get q/open\r\n", value(b"q", b"a"))
    waiter.send(b"get q/t=60000\r\n")
    it.wait_for_waiting(b"q")
    client.ask(b"delete q\r\ndelete unknown\r\n", b"DELETED\r\nDELETED\r\n")
    waiter.hear(b"END\r\n")
    holder.ask(b"confirm q 1\r\n", b"ERROR\r\n")
    holder.ask(b"get q/abort\r\nget q/close\r\n", b"END\r\nEND\r\n")
    stats = it.stats()
    assert (stats["queue_deletes"], stats["queue_creates"]) == ("1", "1")
    assert "queue_q_items" not in stats
    put(client, b"q", b"new")
    holder.ask(b"get q/open\r\n", value(b"q", b"new"))


def test_flush(it: Kestrel) -> None:
    """KP-3.13: flush, flush_all: open reads stay."""
    client = it.client()
    put(client, b"q", b"a", b"b")
    put(client, b"r", b"c")
    client.ask(b"get q/open\r\n", value(b"q", b"a"))
    client.ask(b"flush q\r\nflush unknown\r\n", b"END\r\nEND\r\n")
    client.ask(b"get q/abort\r\nget q\r\nget q\r\n", b"END\r\n" + value(b"q", b"a") + b"END\r\n")
    client.ask(b"flush_all\r\n", b"Flushed all queues.\r\n")
    client.ask(b"get r\r\n", b"END\r\n")
    assert it.stats()["queue_q_total_flushes"] == "2"


def test_flush_expired(it: Kestrel) -> None:
    """KP-3.14: flush_expired, flush_all_expired: the number alone."""
    client = it.client()
    for name in (b"q", b"q", b"r"):
        client.ask(b"set %b 0 5 1\r\nx\r\n" % name, b"STORED\r\n")
    it.call(lambda: it.clock.jump(6))
    client.ask(b"flush_expired q\r\nflush_expired unknown\r\n", b"2\r\n0\r\n")
    client.ask(b"flush_all_expired\r\n", b"1\r\n")
    assert it.stats()["queue_q_expired_items"] == "2"
    assert "queue_unknown_items" not in it.stats()


def test_dumps(it: Kestrel) -> None:
    """KP-3.16, KP-3.17: dump_stats, dump_config."""
    client = it.client()
    client.ask(b"dump_stats\r\ndump_config\r\n", b"END\r\nEND\r\n")
    put(client, b"q", b"abc")
    client.send(b"dump_stats q none\r\n")
    assert client.line() == b"queue 'q' {\r\n"
    lines = []
    while (line := client.line()) != b"}\r\n":
        assert line.startswith(b"  ")
        lines.append(line.strip())
    assert lines[:3] == [b"items=1", b"bytes=3", b"total_items=1"]
    client.hear(b"queue 'none' {\r\n  \r\n}\r\nEND\r\n")
    client.send(b"dump_config q\r\n")
    assert client.line() == b"queue 'q' {\r\n"
    assert client.line() == b"  max_items=none\r\n"
    while (line := client.line()) != b"}\r\n":
        assert b"=" in line
    client.hear(b"END\r\n")


def test_version_and_quit(it: Kestrel) -> None:
    """KP-3.20, KP-3.22: version, quit."""
    client = it.client()
    client.ask(b"version\r\nVERSION\r\n", b"VERSION 2.4.7+kestrelpy\r\n" * 2)
    client.send(b"quit\r\nversion\r\n")
    client.hear_the_end()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"set q 0 0\r\n",
        b"set q 0 0 x\r\n",
        b"set q 0 0 -1\r\n",
        b"set q 0 0 2147483648\r\n",
        b"add q 0 0\r\n",
        b"cas q 0 0 -1\r\n",
        b"bogus\r\n",
        b"\x80\r\n",
        b"\r\n",
        b"get ~q\r\n",
        b"get /open\r\n",
        b"get q+\r\n",
        b"get +q\r\n",
        b"flush a.b\r\n",
        b"monitor a/b 1\r\n",
        b"status down\r\n",
        b"status asleep\r\n",
        b"x" * 8193 + b"\r\n",
        b"x" * 9000,
    ],
)
def test_errors_that_end(it: Kestrel, line: bytes) -> None:
    """KP-3.19, KP-3.40, KP-3.41, KP-3.43, KP-3.44: errors that end: few words, sizes, unknown commands, empty
    lines, names, lines above max_line_bytes.
    """
    client = it.client()
    client.ask(line, b"CLIENT_ERROR\r\n")
    client.hear_the_end()


@pytest.mark.parametrize("word", [b"add", b"replace", b"append", b"prepend", b"cas", b"set"])
def test_a_body_is_read_before_the_end(it: Kestrel, word: bytes) -> None:
    """KP-3.42, KP-3.43: add, replace, append, prepend, cas, and an illegal name: their body is read first."""
    client = it.client()
    name = b"a~b" if word == b"set" else b"q"
    client.send(b"%b %b 0 0 5\r\n" % (word, name))
    client.hear_nothing()
    client.send(b"hello\r\n")
    client.hear(b"CLIENT_ERROR\r\n")
    client.hear_the_end()
    assert "queue_q_items" not in it.stats()


@pytest.mark.parametrize(
    "line",
    [
        b"get\r\n",
        b"get   \r\n",
        b"monitor q\r\n",
        b"monitor q x\r\n",
        b"monitor q 1 x\r\n",
        b"monitor q 1 -1\r\n",
        b"confirm q\r\n",
        b"confirm q x\r\n",
        b"get q/t=x\r\n",
        b"get q/t=\r\n",
        b"flush\r\n",
        b"delete\r\n",
        b"flush_expired\r\n",
        b"set q x 0 1\r\na\r\n",
        b"set q 0 x 1\r\na\r\n",
    ],
)
def test_errors_that_go_on(it: Kestrel, line: bytes) -> None:
    """KP-3.46, KP-3.47: errors that go on: words missing, flags, expiry, t, seconds, n or max no number."""
    client = it.client()
    client.ask(line, b"CLIENT_ERROR\r\n")
    client.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")


def test_the_longest_line_of_all() -> None:
    """KP-1.28: max_line_bytes: a line that arrives in pieces, and one byte more, at the most that may be set."""
    with kestrel(config="max_line_bytes = 65536") as it:
        for more in (0, 1):
            client, read = it.client(), it.server.bytes_read
            client.send(b"version " + b"x" * 60_000)
            it.until(lambda: it.server.bytes_read == read + 60_008)  # noqa: B023 - called at once
            client.send(b"x" * (5527 + more) + b"\r\n")
            client.hear([b"VERSION 2.4.7+kestrelpy\r\n", b"CLIENT_ERROR\r\n"][more])


def test_a_body_without_its_end(it: Kestrel) -> None:
    """KP-3.45: a body not followed by CRLF: CLIENT_ERROR, ends, and nothing is stored."""
    client = it.client()
    client.ask(b"set q 0 0 3\r\nabcde\r\n", b"CLIENT_ERROR\r\n")
    client.hear_the_end()
    client = it.client()
    client.ask(b"get q\r\n", b"END\r\n")


# -- the connection's end ----------------------------------------------------------------------------------------------


def test_open_reads_come_back_when_the_connection_ends(it: Kestrel) -> None:
    """KP-2.10, KP-3.60: a connection's end: its open reads come back, in the order of ids."""
    holder, waiter, client = it.clients(3)
    put(client, b"q", b"a", b"b", b"c", b"d")
    for body in (b"a", b"b", b"c"):
        holder.ask(b"get q/open\r\n", value(b"q", body))
    client.ask(b"get q\r\n", value(b"q", b"d"))
    waiter.send(b"get q/t=60000\r\n")
    it.wait_for_waiting(b"q")
    holder.hang_up()
    waiter.hear(value(b"q", b"a"))
    client.ask(b"get q\r\nget q\r\nget q\r\n", value(b"q", b"b") + value(b"q", b"c") + b"END\r\n")
    assert it.stats()["queue_q_canceled_transactions"] == "3"


def test_a_half_closed_client_gets_its_answers(it: Kestrel) -> None:
    """KP-3.61: a half-closed client: answers to what it sent; a waiting get is ended at once."""
    client = it.client()
    client.send(b"set q 0 0 1\r\na\r\nget q\r\nget q/t=60000\r\nversion\r\n")
    client.half_close()
    client.hear(b"STORED\r\n" + value(b"q", b"a") + b"END\r\nVERSION 2.4.7+kestrelpy\r\n")
    client.hear_the_end()
    waiting = it.client()
    waiting.send(b"monitor q 60\r\n")
    it.wait_for_waiting(b"q")
    waiting.half_close()
    waiting.hear(b"END\r\n")
    waiting.hear_the_end()


def test_silent_clients_are_disconnected() -> None:
    """KP-1.22: client_timeout: no byte for so long, and nothing being waited for."""
    with kestrel(config="client_timeout = 10") as it:
        silent, waiting, busy = it.clients(3)
        for client in (silent, busy):
            client.ask(b"get q\r\n", b"END\r\n")
        waiting.send(b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q")
        for _ in range(4):
            it.advance(3)
            busy.ask(b"get q\r\n", b"END\r\n")
        silent.hear_the_end()
        busy.ask(b"set q 0 0 1\r\na\r\n", b"STORED\r\n")
        waiting.hear(value(b"q", b"a"))


def test_an_item_on_its_way_to_a_closed_connection_goes_to_the_next(it: Kestrel) -> None:
    """KP-2.11: KS-B10: the plain get of a client that is gone before its reply is sent takes nothing."""
    client, other = it.clients(2)
    put(other, b"q", b"a")
    gone = it.client()
    gone.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")

    def get_and_lose() -> None:
        connection = list(it.server.connections)[-1]
        connection._transport.abort()  # tells the connection in the loop's next round, before the turn ends
        connection.data_received(b"get q\r\n")

    it.call(get_and_lose)
    client.ask(b"get q\r\n", value(b"q", b"a"))
