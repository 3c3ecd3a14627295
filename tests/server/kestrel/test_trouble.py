"""What goes wrong under a kestrel server, and what its clients and its files are like then."""

from __future__ import annotations

import asyncio
import errno
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, DurabilityUnknown
from kestrelpy.server import ConfigError, KestrelServer
from kestrelpy.server.kestrel.journal import SharedJournal
from kestrelpy.server.kestrel.queue import ServedQueue
from kestrelpy.server.kestrel.queues import Queues
from kestrelpy.work import WorkQueue
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


def thrift_call(method: bytes, fields: bytes) -> bytes:
    call = struct.pack("!II", 0x80010001, len(method)) + method + struct.pack("!i", 1) + fields + b"\0"
    return struct.pack("!i", len(call)) + call


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
    """KP-1.34, KP-1.44: error_to_queue, expire_to_queue: and it does not come again in the first one."""
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
        acks = it.server.queues.storage.acks
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
    """KP-1.39: keep_journal: what is on disk stays there, as it was."""
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
        acks = it.server.queues.storage.acks
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


def test_a_start_that_fails_loses_no_acknowledgements(tmp_path: Path) -> None:
    """What was answered does not come again at the start after it; and all that it had opened is closed."""
    with kestrel(tmp_path / "queues") as it:
        client = it.client()
        put(client, b"q", b"1", b"2", b"3")
        client.ask(b"get q\r\n", value(b"q", b"1"))
        copied = after_kill(tmp_path / "queues")
    with (
        patch.object(Queues, "_restore_all", side_effect=OSError(errno.EMFILE, "no")),
        pytest.raises(OSError, match="no"),
        kestrel(copied),
    ):
        pass
    with kestrel(copied) as it:
        take(it.client(), b"q", b"2", b"3")


@pytest.mark.parametrize("later", ["status", "listening"])
def test_a_start_that_fails_late_leaves_nothing_open(tmp_path: Path, later: str) -> None:
    name, error = ("_stored_status", MemoryError()) if later == "status" else ("_listen", OSError("no"))
    with patch.object(KestrelServer, name, side_effect=error), pytest.raises(type(error)), kestrel(tmp_path):
        pass
    with kestrel(tmp_path) as it:
        put(it.client(), b"q", b"1")


def test_a_status_that_can_not_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KP-6.13: kestrel.status: unreadable: the default and a warning."""
    (tmp_path / "kestrel.status").mkdir()
    with kestrel(tmp_path) as it:
        it.client().ask(b"status\r\n", b"UP\r\n")
    assert "can't be read, and the status is up" in caplog.text


@pytest.mark.parametrize("protocol", ["memcache", "text", "thrift"])
def test_a_queue_that_can_not_be_read_for_one_who_waits(protocol: str) -> None:
    """KP-3.53, KP-4.34, KP-5.23: Each client is told in its own words."""
    with kestrel(text="127.0.0.1:0", thrift="127.0.0.1:0") as it:
        number = ["memcache", "text", "thrift"].index(protocol)
        waiting = it.client(number)
        if protocol == "thrift":
            fields = struct.pack("!bhi1s", 11, 1, 1, b"q") + struct.pack("!bhibhi", 8, 2, 2, 8, 3, 60_000)
            waiting.send(thrift_call(b"get", fields))
        else:
            waiting.send(b"get q 60000\n" if protocol == "text" else b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q")
        with patch.object(ServedQueue, "take", side_effect=CorruptJournal("q", 0, "bad")):
            put(it.client(), b"q", b"1")
            if protocol == "memcache":
                waiting.hear(SERVER_ERROR)
                waiting.hear_the_end()
            elif protocol == "text":
                waiting.ask(b"version\n", b"-Internal error.\n:2.4.7+kestrelpy\n")
            else:
                size = int.from_bytes(waiting.exactly(4), "big")
                reply = waiting.exactly(size)
                assert reply[:8] == bytes.fromhex("8001000300000003")
                assert b"Internal error." in reply
        take(it.client(), b"q", b"1")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sync_that_fails(tmp_path: Path, place: int) -> None:
    """KP-3.52, KP-4.34, KP-5.26: a sync that failed: SERVER_ERROR, ends; and so in the other protocols."""
    with kestrel(tmp_path, sync_journal=0, text="127.0.0.1:0", thrift="127.0.0.1:0") as it:
        put(it.client(), b"q", b"1")
        client = it.client(place)
        journal = it.call(lambda: it.server.queues.by_name[b"q"].journal.queue)
        with patch.object(journal, "sync", side_effect=DurabilityUnknown("q", 2, 2)):
            if place == 2:
                fields = struct.pack("!bhi1s", 11, 1, 1, b"q") + struct.pack("!bhbii1s", 15, 2, 11, 1, 1, b"2")
                client.send(thrift_call(b"put", fields))
            else:
                client.send(b"put q:\n2\n\n" if place else b"set q 0 0 1\r\n2\r\n")
                client.hear(b"-Internal error.\n" if place else SERVER_ERROR)
            client.hear_the_end()
        assert isinstance(it.call(it.server._end.exception), DurabilityUnknown)


def test_expired_items_are_dropped_in_slices() -> None:
    """A sweep of one large queue lets other clients in between."""
    with kestrel(config="[queues.q]\nexpire_to_queue = 'late'\n[queues.r]\nmax_expire_sweep = 600") as it:
        client = it.client()
        for name in (b"q", b"r"):
            client.ask(b"set %b 0 5 1 noreply\r\nx\r\n" % name * 2000 + b"status\r\n", b"UP\r\n")
        it.call(lambda: it.clock.jump(6))
        turns = 0

        def sweep() -> None:
            nonlocal turns
            turns += 1
            next(dropping)

        dropping = it.call(lambda: it.server.queues.by_name[b"q"].flush_expired())
        it.call(sweep)
        assert 1000 < it.call(lambda: it.server.queues.by_name[b"q"].items) < 2000
        client.ask(b"flush_expired q\r\n", b"1500\r\n")
        client.ask(b"flush_expired r\r\n", b"600\r\n")
        client.ask(b"flush_all_expired\r\n", b"600\r\n")
        assert it.stats()["queue_late_items"] == "2000"


def test_a_monitor_takes_a_turn_s_worth_at_a_time() -> None:
    """KP-3.62: monitor: one who does not read gets no more than a turn's replies, and its reads are few."""
    with kestrel(max_open_transactions=1000) as it:
        putter, watcher = it.clients(2)
        put(putter, b"q", *[b"%03d" % number + b"x" * 100_000 for number in range(100)])
        watcher.send(b"monitor q 60 100\r\n")
        it.wait_for_waiting(b"q")
        putter.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
        assert int(it.stats()["queue_q_open_transactions"]) < 100
        for number in range(100):
            watcher.hear(value(b"q", b"%03d" % number + b"x" * 100_000))
        watcher.hear(END)


def test_names_without_number_and_descriptors(tmp_path: Path) -> None:
    """KP-2.8: max_connections: there is a reply for the client that is too many, and the server goes on."""
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", b"1")
        it.call(lambda: setattr(it.server, "_most_descriptors", 48 + 1 + 5 + 5 + 1))
        put(client, b"r", b"1")
        client.ask(b"set s 0 0 1\r\nx\r\n", SERVER_ERROR)
        one = it.client()
        one.hear(SERVER_ERROR)
        one.hear_the_end()
        take(client, b"q", b"1")


def test_the_same_status_again_does_not_end_the_grace() -> None:
    """KP-6.11: status_change_grace_period: the same status has no effect meanwhile."""
    with kestrel(config="status_change_grace_period = 10") as it:
        client = it.client()
        client.ask(b"status readonly\r\nstatus readonly\r\n", END + END)
        put(client, b"q", b"1")
        it.advance(10)
        client.ask(b"set q 0 0 1\r\nx\r\n", SERVER_ERROR)


def test_a_waiting_get_whose_queue_is_deleted_is_a_miss() -> None:
    """KP-7.7: get_misses: a get that waits is one or the other when it ends."""
    with kestrel() as it:
        waiting, client = it.clients(2)
        waiting.send(b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q")
        client.ask(b"delete q\r\n", b"DELETED\r\n")
        waiting.hear(END)
        assert it.stats()["get_misses"] == "1"


def test_noreply_beyond_max_queues_is_silent() -> None:
    """KP-3.25: noreply: the connection stays in step."""
    with kestrel(max_queues=1) as it:
        client = it.client()
        put(client, b"q", b"1")
        client.ask(b"set r 0 0 1 noreply\r\nx\r\nset r 0 0 1\r\nx\r\nstatus\r\n", SERVER_ERROR + b"UP\r\n")


def test_a_silent_client_that_does_not_read_is_disconnected() -> None:
    """KP-1.22: client_timeout: its replies are not waited for."""
    with kestrel(config="client_timeout = 5") as it:
        client = it.client()
        put(client, b"q", b"x" * 8_000_000)
        silent = it.client()
        silent.send(b"get q\r\n")
        it.until(lambda: any(one.is_stuck for one in it.server.connections))
        it.advance(7)
        it.until(lambda: not it.server.connections)


def test_what_was_put_for_a_fanout_alone_is_there_whoever_makes_it_again(tmp_path: Path) -> None:
    """KP-2.25: keep_journal: of a fan-out whose parent is in memory."""
    config = "[queues.q]\nkeep_journal = false\n[queues.'q+a']\nkeep_journal = true"
    with kestrel(tmp_path, config=config) as it:
        put(it.client(), b"q+a", b"1")
    with kestrel(tmp_path, config=config) as it:
        take(it.client(), b"q+a", b"1")


def test_reads_of_a_queue_that_an_alias_hides_can_be_confirmed() -> None:
    """KP-2.34."""
    config = ""
    with kestrel(config=lambda: config) as it:
        client = it.client()
        put(client, b"q", b"1", b"2")
        client.ask(b"get q/open\r\n", value(b"q", b"1"))
        config = "[aliases]\nq = ['r']"
        client.ask(b"reload\r\nconfirm q 1\r\n", b"Reloaded config.\r\n" + END)


def test_what_a_side_queue_drops_stays_dropped(tmp_path: Path) -> None:
    """KP-1.31, KP-2.24: discard_old_when_full: also after a kill."""
    config = "[queues.'q+a']\nmax_items = 2\ndiscard_old_when_full = true"
    with kestrel(tmp_path / "queues", config=config) as it:
        client = it.client()
        client.ask(b"get q+a\r\n", END)
        put(client, b"q+a", *[b"%d" % number for number in range(6)])
        copied = after_kill(tmp_path / "queues")
    with kestrel(copied, config=config) as it:
        take(it.client(), b"q+a", b"4", b"5")


def test_the_log_does_not_grow_by_deletions(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        client = it.client()
        for number in range(20):
            put(client, b"q%d" % number, b"1")
            client.ask(b"delete q%d\r\n" % number, b"DELETED\r\n")
        acks = it.server.queues.storage.acks
        assert acks is not None
        put(client, b"q", b"1")
        it.advance(6)
        it.until(lambda: not acks._is_saving and not acks._log._dropped and not acks._log._reader.items)


def test_a_server_that_stops_lets_its_clients_read_their_last_replies(tmp_path: Path) -> None:
    """KP-1.10: a plain get is done with once its reply is handed to the system: the client gets all of it."""
    body = b"x" * 8_000_000
    with kestrel(tmp_path, config="[default]\nmax_item_size = '16M'") as it:
        client = it.client()
        put(client, b"q", body)
        client.send(b"get q\r\n")
        it.until(lambda: any(one.is_stuck for one in it.server.connections))
        stopped = asyncio.run_coroutine_threadsafe(it.server.stop(), it.server.loop)
        assert client.exactly(len(value(b"q", body))) == value(b"q", body)
        stopped.result(10)


def test_a_queue_of_another_kind_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KP-2.15: the beanstalk server's, say."""
    WorkQueue(tmp_path, "work").close()
    with kestrel(tmp_path) as it:
        put(it.client(), b"q", b"1")
        it.client().ask(b"set work 0 0 1\r\nx\r\n", SERVER_ERROR)
    assert "left alone, and not served" in caplog.text


def test_damage_is_skipped_if_that_is_wanted(tmp_path: Path) -> None:
    """KP-1.9: --on-corruption: quarantine: all but the damaged records is served."""
    items = [b"item-%d" % number for number in range(10)]
    with kestrel(tmp_path) as it:
        put(it.client(), b"q", *items)
    (segment,) = tmp_path.glob("q.*segment")
    segment.write_bytes(segment.read_bytes().replace(b"item-4", b"item-5", 1))
    with kestrel(tmp_path) as it:
        client = it.client()
        client.ask(b"get q\r\n" * 4, b"".join(value(b"q", item) for item in items[:4]))
        client.ask(b"get q\r\n", SERVER_ERROR)
    with kestrel(tmp_path, on_corruption="quarantine") as it:
        take(it.client(), b"q", *items[5:])


def test_the_archive_is_another_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KP-1.43: archive_dir: not the folder of the queues, at the start and at a reload."""
    text = f"[queues.q]\narchive_dir = '{tmp_path}'"
    with pytest.raises(ConfigError, match=r"archive_dir: .* is a folder of queues"), kestrel(tmp_path, config=text):
        pass
    texts = ["", text]
    with kestrel(tmp_path, config=lambda: texts.pop(0)) as it:
        it.client().ask(b"reload\r\n", SERVER_ERROR)
    assert "is a folder of queues" in caplog.text
