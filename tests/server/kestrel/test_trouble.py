"""What goes wrong under a kestrel server, and what its clients and its files are like then."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import DurabilityUnknown
from kestrelpy.server.kestrel.journal import SharedJournal
from tests.server.kestrel.kestrel_harness import Kestrel, kestrel
from tests.server.kestrel.test_memcache import put, value
from tests.server.kestrel.test_queues import END, take

SERVER_ERROR = b"SERVER_ERROR\r\n"


def in_one_turn(it: Kestrel, *said: bytes) -> list[Any]:
    """New clients, each of whom says this, all in one turn."""
    clients = [it.client() for _ in said]
    for client in clients:
        client.ask(b"status\r\n", b"UP\r\n")

    def say() -> None:
        connections = list(it.server.connections)[-len(said) :]
        for connection, data in zip(connections, said, strict=True):
            connection.data_received(data)

    it.call(say)
    return clients


def after_kill(folder: Path) -> Path:
    """What another server would find if this one was killed now."""
    copied = folder.with_name(folder.name + "-killed")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    return copied


def test_a_plain_get_beside_a_sync_that_fails_takes_nothing(tmp_path: Path) -> None:
    """The client is told SERVER_ERROR, and the item is there at the next start."""
    with kestrel(tmp_path, sync_journal=0) as it:
        put(it.client(), b"b", b"kept")
        put(it.client(), b"a", b"first")
        journal = it.call(lambda: it.server.queues.by_name[b"a"].journal.queue)
        with patch.object(journal, "sync", side_effect=DurabilityUnknown("a", 2, 2)):
            writer, reader = in_one_turn(it, b"set a 0 0 1\r\nx\r\n", b"get b\r\n")
            writer.hear(SERVER_ERROR)
            reader.hear(SERVER_ERROR)
            reader.hear_the_end()
    with kestrel(tmp_path) as it:
        take(it.client(), b"b", b"kept")


def test_what_is_moved_is_in_one_queue_after_a_kill(tmp_path: Path) -> None:
    """Row: error_to_queue, expire_to_queue: and it does not come again in the first one."""
    config = "[queues.q]\nerror_to_queue = 'bad'\n[queues.r]\nexpire_to_queue = 'late'"
    with kestrel(tmp_path / "queues", config=config, sync_journal="never") as it:
        client = it.client()
        put(client, b"q", b"poison", b"other")
        client.ask(b"get q/open\r\nget q/abort\r\n", value(b"q", b"poison") + END)
        client.ask(b"set r 0 1 3\r\nold\r\n", b"STORED\r\n")
        it.advance(3)
        client.ask(b"get r\r\n", END)
        copied = after_kill(tmp_path / "queues")
    with kestrel(copied, config=config) as it:
        client = it.client()
        take(client, b"bad", b"poison")
        take(client, b"q", b"other")
        take(client, b"late", b"old")
        take(client, b"r")


def test_a_slow_save_is_followed_by_others(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", b"1", b"2", b"3")
        acks = it.server.queues._acks
        assert acks is not None
        begun: list[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = []
        acks._off_loop = lambda call, done: begun.append((call, done))
        client.ask(b"get q\r\n", value(b"q", b"1"))
        it.advance(6)
        assert len(begun) == 1
        client.ask(b"get q\r\n", value(b"q", b"2"))
        it.advance(6)
        assert len(begun) == 1, "one at a time"
        call, done = begun.pop()
        it.call(call)
        it.call(lambda: done(None))
        it.advance(6)
        call, done = begun.pop()
        it.call(call)
        it.call(lambda: done(None))
        assert acks._log._reader.items == 0


def test_a_delete_that_the_disk_refuses_leaves_the_queue_as_it_is(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        holder, client = it.clients(2)
        put(client, b"q", b"1", b"2")
        holder.ask(b"get q/open\r\n", value(b"q", b"1"))
        with patch.object(SharedJournal, "delete", side_effect=OSError(errno.EIO, "no")):
            client.ask(b"delete q\r\n", SERVER_ERROR)
        holder.ask(b"get q/abort\r\n", END)
        take(it.client(), b"q", b"1", b"2")


def test_a_name_that_can_not_be_made_is_not_kept(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        with patch.object(SharedJournal, "_make_reader", side_effect=OSError(errno.EIO, "no")):
            for number in range(20):
                it.client().ask(b"get n%d+c\r\n" % number, SERVER_ERROR)
        assert it.call(lambda: (it.server.queues.by_name, it.server.queues._journals)) == ({}, {})
        assert it.stats()["queue_creates"] == "0"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("n")] == []


def test_acknowledgements_of_what_is_not_served_now_are_kept(tmp_path: Path) -> None:
    """Row: keep_journal: what is on disk stays there, as it was."""
    with kestrel(tmp_path / "queues") as it:
        client = it.client()
        put(client, b"q", b"1", b"2", b"3")
        client.ask(b"get q\r\n", value(b"q", b"1"))
        copied = after_kill(tmp_path / "queues")
    with kestrel(copied, config="[queues.q]\nkeep_journal = false") as it:
        take(it.client(), b"q")
    with kestrel(copied) as it:
        take(it.client(), b"q", b"2", b"3")


def test_a_cut_of_the_log_never_goes_back(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", b"1", b"2", b"3")
        for number in range(3):
            client.ask(b"get q\r\n", value(b"q", b"%d" % (number + 1)))
        acks = it.server.queues._acks
        assert acks is not None
        it.call(lambda: acks._log.drop_through(3))
        it.call(lambda: acks._log.drop_through(1))
        assert acks._log._reader.items == 0


def test_a_connection_that_the_server_hangs_up_takes_no_plain_get_with_it(tmp_path: Path) -> None:
    """At a graceful stop, say, when its replies can't be sent any more."""
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", *[b"%d" % number for number in range(10)])
        one = it.client()
        one.ask(b"status\r\n", b"UP\r\n")

        def get_and_hang_up() -> None:
            connection = list(it.server.connections)[-1]
            connection.data_received(b"get q\r\n" * 10)
            connection.hang_up()

        it.call(get_and_hang_up)
        one.hear_the_end()
        take(client, b"q", *[b"%d" % number for number in range(10)])
