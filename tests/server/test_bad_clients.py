"""Clients that are slow, greedy, broken or gone: what they cost is bounded, and no other client notices."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kestrelpy.server import _server as server_module
from kestrelpy.server._connection import COMMANDS_PER_TURN, MAX_HELD_BYTES, MAX_REPLY_BYTES, Connection
from kestrelpy.server.beanstalk.commands import KICK_SLICE
from tests.server.beanstalk_harness import Client, Served, served
from tests.support.budget import SEED, share

ASYNCIO_READS = 256 * 1024
"""What asyncio reads from a socket at a time."""


@pytest.fixture
def it(caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    with served() as one:
        yield one
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def connections(it: Served) -> list[Connection]:
    return it.call(lambda: list(it.server.connections))


def sending(client: Client, data: bytes) -> threading.Thread:
    """A thread that sends it, however long that takes."""
    thread = threading.Thread(target=client.send, args=(data,), daemon=True)
    thread.start()
    return thread


def test_one_who_does_not_read_is_not_served_any_further(it: Served) -> None:
    slow, other = it.clients(2)
    other.ask(b"put 0 0 1 60000\r\n" + b"x" * 60_000 + b"\r\n", b"INSERTED 1\r\n")
    thread = sending(slow, b"peek 1\r\n" * 2000)
    it.until(lambda: any(one._is_stuck for one in it.server.connections))
    for _ in range(20):
        other.ask(b"peek 2\r\n", b"NOT_FOUND\r\n")
    stuck = next(one for one in connections(it) if one._is_stuck)
    assert it.call(lambda: it.server.commands.counts["peek"]) < 1500
    buffered = it.call(lambda: stuck._transport.get_write_buffer_size() + stuck._reply_bytes)
    assert buffered < 2 * MAX_REPLY_BYTES + 200_000
    for _ in range(2000):  # and once it reads, it gets all of it
        assert slow.line() == b"FOUND 1 60000\r\n"
        assert slow.exactly(60_002) == b"x" * 60_000 + b"\r\n"
    thread.join()


def test_a_line_without_an_end_is_not_kept(it: Served) -> None:
    endless, other = it.clients(2)
    endless.send(b"x" * 5_000_000)
    other.ask(b"use a\r\n", b"USING a\r\n")
    assert max(one._parser.held for one in connections(it)) < ASYNCIO_READS
    endless.ask(b"\r\nuse b\r\n", b"BAD_FORMAT\r\nUSING b\r\n")


def test_one_who_says_nothing_any_more_holds_nothing(it: Served) -> None:
    idle, waiting, other = it.clients(3)
    idle.ask(b"put 0 0 1 60000\r\n" + b"x" * 60_000 + b"\r\n", b"INSERTED 1\r\n")
    waiting.send(
        b"watch nothing\r\nignore default\r\nput 0 0 1 60000\r\n" + b"x" * 60_000 + b"\r\nreserve\r\nuse a\r\n"
    )
    waiting.hear(b"WATCHING 2\r\nWATCHING 1\r\nINSERTED 2\r\n")
    it.wait_for_waiting(1)
    other.ask(b"use b\r\n", b"USING b\r\n")
    assert max(len(one.client.parser._data) for one in connections(it)) < 100


def test_tubes_may_be_bounded() -> None:
    with served(max_tubes=3) as it:
        greedy, other = it.clients(2)
        greedy.ask(b"watch a\r\nuse b\r\n", b"WATCHING 2\r\nUSING b\r\n")
        for command in (b"watch c\r\n", b"use c\r\n"):
            greedy.ask(command, b"OUT_OF_MEMORY\r\n")
        other.ask(b"watch a\r\nuse b\r\nput 0 0 1 1\r\nx\r\n", b"WATCHING 2\r\nUSING b\r\nINSERTED 1\r\n")
        greedy.ask(b"list-tubes-watched\r\n", b"OK 18\r\n---\n- default\n- a\n\r\n")
        greedy.ask(b"ignore a\r\n", b"WATCHING 1\r\n")
        other.ask(b"ignore a\r\nuse c\r\n", b"WATCHING 1\r\nUSING c\r\n")


def test_half_a_body_and_gone(it: Served) -> None:
    gone, other = it.clients(2)
    gone.send(b"put 0 0 1 1000\r\n" + b"x" * 500)
    it.until(lambda: it.queue.stats().last_id == 1)
    gone.hang_up()
    it.until(lambda: len(it.server.connections) == 1)
    other.ask(b"put 0 0 1 1\r\na\r\npeek 1\r\nreserve\r\n", b"INSERTED 2\r\nNOT_FOUND\r\nRESERVED 2 1\r\na\r\n")


def test_a_body_that_comes_byte_by_byte_costs_no_more_than_its_bytes(it: Served) -> None:
    client = it.client()
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.send(b"put 0 0 1 5000\r\n")
    for _ in range(5000):
        client.send(b"x")
    client.ask(b"\r\n", b"INSERTED 1\r\n")


class Rounds:
    """What a measure says in every round of the server's loop."""

    def __init__(self, it: Served, measure: Callable[[], int]) -> None:
        self.values: list[int] = []
        self._it = it
        self._measure = measure
        self._goes_on = True
        it.call(self._watch)

    def _watch(self) -> None:
        self.values.append(self._measure())
        if self._goes_on:
            self._it.server.loop.call_soon(self._watch)

    def largest_step(self) -> int:
        """By how much it grew in one round at most. It is not watched any longer then."""
        self._goes_on = False
        return max(after - before for before, after in itertools.pairwise(self.values))


def test_a_hundred_thousand_commands_at_once(it: Served) -> None:
    greedy, other = it.clients(2)
    count = 100_000
    counts = it.server.commands.counts
    rounds = Rounds(it, lambda: counts["delete"])
    thread = sending(greedy, b"delete 1\r\n" * count)
    hearing = threading.Thread(target=greedy.exactly, args=(len(b"NOT_FOUND\r\n") * count,))
    hearing.start()
    it.until(lambda: counts["delete"] > 1000)
    other.ask(b"use a\r\n", b"USING a\r\n")
    thread.join()
    hearing.join()
    assert counts["delete"] == count
    assert rounds.largest_step() <= 2 * COMMANDS_PER_TURN  # its turn, and that of what has just come


def test_many_greedy_ones_take_turns(it: Served) -> None:
    greedy = it.clients(4)
    for number, client in enumerate(greedy):
        client.ask(b"use tube%d\r\n" % number, b"USING tube%d\r\n" % number)

    def spread() -> int:
        ready = [it.queue.stats_tube(f"tube{number}").ready for number in range(4)]
        return max(ready) - min(ready)

    def all_at_once() -> None:
        for one in it.server.connections:
            one._parser.feed(b"put 0 0 1 1\r\nx\r\n" * 2000)
            it.server.rounds.again(one)

    rounds = Rounds(it, spread)
    it.call(all_at_once)
    it.until(lambda: it.queue.stats().ready == 8000)
    assert rounds.largest_step() <= COMMANDS_PER_TURN
    assert max(rounds.values) <= COMMANDS_PER_TURN
    for client in greedy:
        for _ in range(2000):
            assert client.line().startswith(b"INSERTED ")


def test_a_large_kick_lets_others_in(it: Served) -> None:
    greedy, other = it.clients(2)
    it.call(lambda: it.queue.put_many([b"x"] * 20_000, delay=1000))
    rounds = Rounds(it, lambda: it.queue.stats().ready)
    greedy.send(b"kick 1000000\r\n")
    other.ask(b"use a\r\n", b"USING a\r\n")
    greedy.hear(b"KICKED 20000\r\n")
    assert rounds.largest_step() == KICK_SLICE


def test_who_goes_away_in_a_large_kick(it: Served) -> None:
    greedy = it.client()
    it.call(lambda: it.queue.put_many([b"x"] * 20_000, delay=1000))

    def ready_until_it_breaks() -> int:
        ready = it.queue.stats().ready
        for one in it.server.connections if ready else ():
            one._transport.abort()
        return ready

    rounds = Rounds(it, ready_until_it_breaks)
    greedy.send(b"kick 1000000\r\n")
    it.until(lambda: it.queue.stats().ready and not it.server.connections)
    assert rounds.largest_step() == KICK_SLICE
    it.client().ask(b"use a\r\n", b"USING a\r\n")
    assert it.queue.stats().ready <= 3 * KICK_SLICE


def test_one_who_waits_and_talks_on_is_not_read_from_for_ever(it: Served) -> None:
    talker, other = it.clients(2)
    talker.send(b"reserve\r\n")
    it.wait_for_waiting()
    thread = sending(talker, b"use a\r\n" * 200_000)
    it.until(lambda: any(one._is_unread for one in it.server.connections))
    assert max(one._parser.held for one in connections(it)) <= MAX_HELD_BYTES + ASYNCIO_READS
    other.ask(b"put 0 0 1 1\r\na\r\n", b"INSERTED 1\r\n")
    talker.hear(b"RESERVED 1 1\r\na\r\n")
    assert talker.exactly(9 * 200_000) == b"USING a\r\n" * 200_000
    thread.join()


def test_one_who_waits_unread_and_hangs_up_is_noticed(it: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_SECONDS", 0.01)
    talker, other = it.clients(2)
    talker.send(b"reserve\r\n")
    it.wait_for_waiting()
    data = b"use b\r\n" * 14_000  # little enough for the rest to fit the buffers of the system, or nobody could know
    thread = sending(talker, data)
    it.until(lambda: any(one._is_unread for one in it.server.connections))
    thread.join()
    talker.half_close()
    talker.hear(b"TIMED_OUT\r\n" + b"USING b\r\n" * 14_000)
    talker.hear_the_end()
    other.ask(b"put 0 0 1 1\r\na\r\nreserve\r\n", b"INSERTED 1\r\nRESERVED 1 1\r\na\r\n")


def reset(client: Client) -> None:
    """Break the connection off, as a crashed machine's router does."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.hang_up()


def test_a_connection_that_breaks_gives_its_jobs_back(it: Served) -> None:
    broken, waiting = it.clients(2)
    broken.ask(b"put 0 0 100 1\r\na\r\nreserve\r\n", b"INSERTED 1\r\nRESERVED 1 1\r\na\r\n")
    waiting.send(b"reserve\r\n")
    it.wait_for_waiting()
    broken.send(b"reserve\r\n")
    it.wait_for_waiting(2)
    reset(broken)
    waiting.hear(b"RESERVED 1 1\r\na\r\n")
    it.wait_for_waiting(0)


def test_no_more_connections_than_allowed() -> None:
    with served(max_connections=2) as it:
        first, second = it.clients(2)
        first.ask(b"use a\r\n", b"USING a\r\n")
        second.ask(b"use a\r\n", b"USING a\r\n")
        third = it.client()
        third.hear(b"OUT_OF_MEMORY\r\n")
        third.hear_the_end()
        second.hang_up()
        it.until(lambda: len(it.server.connections) == 1)
        it.client().ask(b"use a\r\n", b"USING a\r\n")


def test_a_connection_that_is_gone_leaves_nothing_for_the_collector(it: Served) -> None:
    """The process of a server does not collect what is old, as these are."""
    other = it.client()
    other.ask(b"put 0 0 100 1\r\na\r\n", b"INSERTED 1\r\n")
    gc.disable()
    try:
        for ends in (Client.hang_up, Client.half_close, reset, served_and_gone):
            client = it.client()
            client.ask(
                b"reserve\r\nrelease 1 0 0\r\nwatch a\r\nfoo\r\n",
                b"RESERVED 1 1\r\na\r\nRELEASED\r\nWATCHING 2\r\nUNKNOWN_COMMAND\r\n",
            )
            other.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
            client.send(b"reserve\r\n")
            it.wait_for_waiting()
            gone = it.call(lambda: [made for one in it.server.connections for made in refs(one) if one.is_waiting])
            gc.collect()
            ends(client)
            it.until(lambda: len(it.server.connections) == 1)

            def are_gone(made: list[Any] = gone) -> bool:
                return not any(one() for one in made)

            it.until(are_gone)
            other.ask(b"release 1 0 0\r\n", b"RELEASED\r\n")
    finally:
        gc.enable()


def served_and_gone(client: Client) -> None:
    """It has its job, and then it goes."""
    producer = Client(client.socket.getpeername())
    producer.ask(b"use a\r\nput 0 0 1 1\r\nb\r\nquit\r\n", b"USING a\r\nINSERTED 2\r\n")
    client.ask(b"delete 2\r\n", b"RESERVED 2 1\r\nb\r\nDELETED\r\n")
    producer.hang_up()
    client.hang_up()


def refs(connection: Connection) -> list[weakref.ref[object]]:
    client = connection.client
    return [weakref.ref(made) for made in (connection, connection._transport, client, client.session)]


def test_noise(it: Served) -> None:
    """Random bytes, with commands among them: the server answers whatever it will, and the next client is served."""
    noise = random.Random(SEED)
    words = [
        b"put 0 0 1 3\r\nabc\r\n",
        b"reserve-with-timeout 0\r\n",
        b"kick 10\r\n",
        b"release 1 0 0\r\n",
        b"stats\r\n",
    ]
    words += [b"bury 1 0\r\n", b"delete 2\r\n", b"watch a\r\n", b"ignore default\r\n", b"quit\r\n", b"put 0 0 1 9\r\n"]
    for _ in range(share(40)):
        client = it.client()
        pieces = [
            noise.choice(words) if noise.random() < 0.7 else noise.randbytes(noise.randrange(300)) for _ in range(50)
        ]
        client.socket.settimeout(5)
        with contextlib.suppress(ConnectionError):  # it may have quit before it was through
            client.send(b"".join(pieces))
            client.half_close()
            while client.socket.recv(100_000):
                pass
        client.hang_up()
    it.until(lambda: not it.server.connections)
    it.client().ask(b"use a\r\n", b"USING a\r\n")
    assert it.queue.stats().reserved == 0
