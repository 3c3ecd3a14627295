"""Rows of docs/kestrel-protocol.md that no other file here covers.

An id that begins with KP in a docstring is that of a row of docs/kestrel-protocol.md, which the test covers.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from pathlib import Path
from unittest.mock import patch

import pytest
from thriftpy2.thrift import TApplicationException

from kestrelpy import queue_names
from kestrelpy.server import KestrelServer
from kestrelpy.server.kestrel.queues import Queues
from tests.server.kestrel.kestrel_harness import START_S, Kestrel, kestrel
from tests.server.kestrel.test_kestrel_command import HERE, Process
from tests.server.kestrel.test_memcache import put, value
from tests.server.kestrel.test_queues import END, take
from tests.server.kestrel.test_thrift import FIRST, client, pairs
from tests.server.kestrel.test_trouble import thrift_call

CLIENT_ERROR, SERVER_ERROR = b"CLIENT_ERROR\r\n", b"SERVER_ERROR\r\n"
ALL = {"text": "127.0.0.1:0", "thrift": "127.0.0.1:0"}


def reload(it: Kestrel, config: str) -> None:
    it.server._config_text = config
    it.client().ask(b"reload\r\n", b"Reloaded config.\r\n")


# -- the command -------------------------------------------------------------------------------------------------------


def test_max_connections_of_the_command() -> None:
    """KP-1.7: the same as the key; the command line wins over it."""
    with Process("--max-connections", "1", *HERE) as server:
        first, second = server.client(), server.client()
        first.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
        second.hear(SERVER_ERROR)
        second.hear_the_end()
        for one in (first, second):
            one.hang_up()


def test_ports_that_are_not_said() -> None:
    """KP-1.2, KP-1.3: the usual ones, by protocol."""
    server = KestrelServer(text="127.0.0.1", thrift="127.0.0.1")
    asked: list[tuple[str, int]] = []

    def note(place: str, port: int) -> list[socket.socket]:
        asked.append((place, port))
        return []

    server.bind(note)
    assert asked == [("127.0.0.1:22133", 22133), ("127.0.0.1", 2222), ("127.0.0.1", 2229)]


@pytest.mark.root
def test_it_becomes_another_user(tmp_path: Path) -> None:
    """KP-1.8: -u."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    nobody = pwd.getpwnam("nobody")
    with Process("-u", "nobody", *HERE) as server:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        one = server.client()
        put(one, b"q", b"1")
        one.hang_up()
    assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}" in status


def test_a_client_too_many_is_told_in_its_own_words() -> None:
    """KP-1.26: one client more, by protocol."""
    with kestrel(max_connections=1, **ALL) as it:
        it.client().ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
        for place, said in enumerate((SERVER_ERROR, b"-Too many connections.\n", b"")):
            one = it.client(place)
            one.hear(said)
            one.hear_the_end()


# -- queues ------------------------------------------------------------------------------------------------------------


def test_errors_are_counted_from_0_in_another_queue() -> None:
    """KP-1.45: an item in an error queue has no aborts."""
    config = (
        "[queues.q]\nmany_errors_to_queue = 'bad'\nmany_errors_count = 2\n"
        "[queues.bad]\nmany_errors_to_queue = 'worse'\nmany_errors_count = 2\n"
    )
    with kestrel(config=config) as it:
        one = it.client()
        put(one, b"q", b"x")
        for name in (b"q", b"q", b"bad", b"bad"):
            one.ask(b"get %b/open\r\nget %b/abort\r\n" % (name, name), value(name, b"x") + END)
        take(one, b"worse", b"x")


def test_the_age_of_a_queue_begins_at_the_start(tmp_path: Path) -> None:
    """KP-1.37, KP-7.11, KP-7.15: max_queue_age, create_time and counters at a restart."""
    config = "[queues.q]\nmax_queue_age = 100\nmax_items = 1\ndiscard_old_when_full = true"
    with kestrel(tmp_path, config=config) as it:
        one = it.client()
        put(one, b"q", b"1", b"2")
        one.ask(b"set r 0 5 1\r\nx\r\n", b"STORED\r\n")
        it.advance(90)
        stats = it.stats()
        assert stats["queue_q_create_time"] == str(START_S)
        assert (stats["queue_q_discarded"], stats["queue_r_expired_items"], stats["queue_q_total_items"]) == (
            "1",
            "1",
            "2",
        )
        clock = it.clock
    with kestrel(tmp_path, config=config, clock=clock) as it:
        take(it.client(), b"q", b"2")
        stats = it.stats()
        assert stats["queue_q_create_time"] == str(START_S + 90)
        assert [stats[f"queue_{key}"] for key in ("q_discarded", "r_expired_items", "q_total_items")] == ["0"] * 3
        it.advance(50)
        assert "queue_q_items" in it.stats()
        it.advance(52)
        it.until(lambda: it.server.queues.find(b"q") is None)


def test_what_is_on_disk_waits_for_keep_journal(tmp_path: Path) -> None:
    """KP-1.39: it stays there, unserved, until keep_journal is true again; a delete leaves it alone."""
    in_memory = "[queues.q]\nkeep_journal = false"
    with kestrel(tmp_path) as it:
        put(it.client(), b"q", b"old")
    with kestrel(tmp_path, config=in_memory) as it:
        one = it.client()
        put(one, b"q", b"new")
        take(one, b"q", b"new")
        one.ask(b"delete q\r\n", b"DELETED\r\n")
    with kestrel(tmp_path) as it:
        take(it.client(), b"q", b"old")


def test_a_queue_costs_so_many_descriptors(tmp_path: Path) -> None:
    """KP-2.7: four, and one for each reader."""

    def files() -> int:
        paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(path).startswith(str(tmp_path)) for path in paths)

    with kestrel(tmp_path) as it:
        one = it.client()
        before, counted = it.call(files), it.call(lambda: it.server.queues.descriptors)
        for number in range(10):
            put(one, b"q%d" % number, b"x")
        for number in range(10):
            one.ask(b"get q0+%d\r\n" % number, END)
        assert it.call(lambda: it.server.queues.descriptors) - counted == 4 * 10 + 10 + 10
        assert 40 <= it.call(files) - before <= 60


def test_one_line_for_all_protocols() -> None:
    """KP-2.9: first come, first served, whatever their protocol."""
    with kestrel(**ALL) as it:
        text, memcache, thrift = it.client(1), it.client(), it.client(2)
        text.send(b"get q 60000\n")
        it.wait_for_waiting(b"q", 1)
        fields = struct.pack("!bhi1s", 11, 1, 1, b"q") + struct.pack("!bhibhi", 8, 2, 1, 8, 3, 60_000)
        thrift.send(thrift_call(b"get", fields))
        it.wait_for_waiting(b"q", 2)
        memcache.send(b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q", 3)
        put(it.client(), b"q", b"1", b"2", b"3")
        text.hear(b":1\n")
        assert b"2" in thrift.exactly(int.from_bytes(thrift.exactly(4), "big"))
        memcache.hear(value(b"q", b"3"))


def test_a_plain_get_is_at_most_once() -> None:
    """KP-2.12: its item is gone although the client did not read it; that of an open read comes back."""
    with kestrel() as it:
        one = it.client()
        for options, left in ((b"", ()), (b"/open", (b"x",))):
            put(one, b"q", b"x")
            gone = it.client()
            gone.send(b"get q%b\r\n" % options)
            it.until(lambda: not it.server.queues.find(b"q").items)  # type: ignore[union-attr]
            gone.hang_up()
            it.until(lambda: len(it.server.connections) == 1)
            take(one, b"q", *left)


def test_options_of_a_fanout_count_for_what_is_put_to_it_alone(tmp_path: Path) -> None:
    """KP-2.25: sync_journal and keep_journal of a fan-out; for the rest, those of its parent count."""
    config = "sync_journal = 'never'\n[queues.'q+a']\nsync_journal = 0\n[queues.'q+b']\nkeep_journal = false"
    with kestrel(tmp_path, config="[queues.q]\n" + config) as it:
        one = it.client()
        put(one, b"q+a", b"alone")
        put(one, b"q+b", b"alone")
        it.call(lambda: it.clock.jump(1))
        put(one, b"q", b"both")
        synced = it.call(lambda: {queue.name for queue in it.server.queues.storage.synced_each_turn})
        assert synced == {"x--712b61"}
        assert sorted(queue_names(tmp_path)) == ["q", "x--712b61", "x--acks"]
        it.client().ask(b"get q+b/peek\r\n", value(b"q+b", b"alone"))
    with kestrel(tmp_path, config="[queues.q]\n" + config) as it:
        take(it.client(), b"q+a", b"alone", b"both")
        take(it.client(), b"q+b", b"both")


def test_the_last_fanout_leaves_the_parent(tmp_path: Path) -> None:
    """KP-2.28: also at the next start."""
    with kestrel(tmp_path) as it:
        one = it.client()
        one.ask(b"get q+a\r\n", END)
        put(one, b"q", b"1", b"2")
        one.ask(b"delete q+a\r\nget q\r\n", b"DELETED\r\n" + value(b"q", b"1"))
        assert "queue_q_children" not in it.stats()
    with kestrel(tmp_path) as it:
        take(it.client(), b"q", b"2")


def test_reads_that_an_alias_hides() -> None:
    """KP-2.34: confirm, close and abort work on them, and a get finds nothing."""
    with kestrel(max_open_transactions=3) as it:
        one = it.client()
        put(one, b"q", b"1", b"2", b"3")
        one.ask(b"get q/open\r\n" * 3, b"".join(value(b"q", body) for body in (b"1", b"2", b"3")))
        reload(it, "[aliases]\nq = ['r']")
        one.ask(b"get q/close\r\nconfirm q 1\r\nget q/abort\r\nget q\r\nconfirm q 1\r\n", END * 4 + b"ERROR\r\n")
        one.ask(b"dump_stats q\r\n", b"queue 'q' {\r\n  \r\n}\r\nEND\r\n")
        reload(it, "")
        take(one, b"q", b"3")


# -- the protocols -----------------------------------------------------------------------------------------------------


def test_errors_are_replied_in_spite_of_noreply() -> None:
    """KP-3.24: only the reply to what was done is left out."""
    with kestrel() as it:
        for line in (b"delete a.b noreply\r\n", b"set q 0 0 x noreply\r\n"):
            one = it.client()
            one.ask(line, CLIENT_ERROR)
            one.hear_the_end()
        it.client().ask(b"set q x 0 1 noreply\r\na\r\n", CLIENT_ERROR)
        it.client().ask(b"status readonly\r\nset q 0 0 1 noreply\r\na\r\n", END + SERVER_ERROR)


def test_aliases_and_unknown_names_in_dumps() -> None:
    """KP-3.16: one line of two spaces."""
    with kestrel(config="[aliases]\nwx = ['a']") as it:
        put(it.client(), b"wx", b"1")
        for command in (b"dump_stats", b"dump_config"):
            it.client().ask(command + b" wx b\r\n", b"queue 'wx' {\r\n  \r\n}\r\nqueue 'b' {\r\n  \r\n}\r\nEND\r\n")


def test_what_the_end_of_a_monitor_is() -> None:
    """KP-3.6: a delete, and as many reads as may be, also if they were opened before."""
    with kestrel(max_open_transactions=2) as it:
        one, other = it.client(), it.client()
        put(other, b"q", b"1", b"2", b"3")
        one.ask(b"get q/open\r\nmonitor q 60\r\n", value(b"q", b"1") + value(b"q", b"2") + END)
        one.ask(b"monitor q 60\r\n", END)
        other.send(b"monitor r 60\r\n")
        it.wait_for_waiting(b"r")
        one.ask(b"delete r\r\n", b"DELETED\r\n")
        other.hear(END)
        assert it.stats()["get_misses"] == "0"


def test_text_messages_of_ours() -> None:
    """KP-4.3, KP-4.30, KP-4.31, KP-4.32, KP-4.33: items that were taken before stay."""
    with kestrel(max_queues=1, allow_shutdown=False, **ALL) as it:
        one = it.client(1)
        one.ask(b"put q:\na\n\nput r:\nb\nc\n\nget r\n", b"+1\n-Too many queues.\n-Too many queues.\n")
        one.ask(b"shutdown\n", b"-Shutdown is not allowed.\n")
        it.server._config_text = "nonsense"
        one.ask(b"reload\nversion\n", b"-The configuration is wrong; see the log.\n:2.4.7+kestrelpy\n")
        one.send(b"put q:\n" + b"a\n" * 1024)
        it.until(lambda: it.server.queues.find(b"q").items == 1025)  # type: ignore[union-attr]
        it.client().ask(b"status readonly\r\n", END)
        one.ask(b"a\n\n", b"-Server not available for operation setItem\n")
        assert it.stats()["queue_q_items"] == "1025"
    with kestrel(config="connection_limit_refuse_reads = 0", **ALL) as it:
        it.client(1).ask(b"get q\nversion\n", b"-Server not available for operation getItem\n:2.4.7+kestrelpy\n")


def test_a_refused_text_get_has_confirmed() -> None:
    """KP-4.4: it confirms first, whatever comes after."""
    with kestrel(**ALL) as it:
        one = it.client(1)
        one.ask(b"put q:\na\n\nget q\nstatus quiescent\n", b"+1\n:a\n+0\n")
        one.ask(b"get q\n", b"-Server not available for operation getItem\n")
        assert it.stats()["queue_q_open_transactions"] == "0"


def test_a_late_confirm_hits_no_other_read(tmp_path: Path) -> None:
    """KP-5.11: the ids of another life of the server are others."""
    with kestrel(tmp_path, thrift="127.0.0.1:0") as it, client(it) as c:
        c.put("q", [b"1"], 0)
        (item,) = c.get("q", 1, 0, 10_000)
        assert item.id == FIRST + 1
        it.call(lambda: it.clock.jump(1))
        clock = it.clock
    with kestrel(tmp_path, clock=clock, thrift="127.0.0.1:0") as it, client(it) as c:
        assert [each.data for each in c.get("q", 1, 0, 10_000)] == [b"1"]
        assert c.confirm("q", {item.id}) == 0
        assert it.stats()["queue_q_open_transactions"] == "1"


def test_thrift_limits_and_troubles() -> None:
    """KP-5.22, KP-5.25: a limit of connections; a call with too many members ends the connection."""
    with kestrel(config="connection_limit_refuse_writes = 1", thrift="127.0.0.1:0") as it, client(it) as c:
        assert c.put("q", [b""] * 65_536, 0) == 65_536
        one = it.client(1)
        it.until(lambda: len(it.server.connections) == 2)
        with pytest.raises(TApplicationException, match="setItem") as raised:
            c.put("q", [b"1"], 0)
        assert raised.value.type == 6
        assert pairs(c.get("q", 1, 0, 0)) == [(b"", 0)]
        members = struct.pack("!bhbi", 15, 2, 11, 65_537) + b"\0" * 4 * 65_537
        one.send(thrift_call(b"put", struct.pack("!bhi1s", 11, 1, 1, b"q") + members))
        one.hear_the_end()


# -- status and figures ------------------------------------------------------------------------------------------------


def test_a_looser_status_than_the_one_that_is_shown(tmp_path: Path) -> None:
    """KP-6.12, KP-6.13: it counts at once, even if it is stricter than what counts; at a start, all count at once."""
    config = "status_change_grace_period = 10"
    with kestrel(tmp_path, config=config) as it:
        one = it.client()
        one.ask(b"status quiescent\r\nget q\r\nstatus readonly\r\n", END * 3)
        one.ask(b"set q 0 0 1\r\nx\r\n", SERVER_ERROR)
        it.client().ask(b"status up\r\nstatus quiescent\r\nget q\r\n", END * 3)
        assert (tmp_path / "kestrel.status").read_text() == "quiescent\n"
    with kestrel(tmp_path, config=config) as it:
        it.client().ask(b"get q\r\n", SERVER_ERROR)


def test_the_order_of_queues(tmp_path: Path) -> None:
    """KP-7.13, KP-7.16: that of making; at a start, by the name on disk; aliases are last."""

    def order(it: Kestrel) -> tuple[str, list[str]]:
        stats = it.stats()
        keys = [key.split("_") for key in stats if key.startswith("queue_") and key.endswith(("_age", "_put_items"))]
        return stats["queue_q_children"], [key[1] for key in keys]

    config = "[aliases]\na = ['q']"
    with kestrel(tmp_path, config=config) as it:
        one = it.client()
        for name in (b"z", b"q+b", b"q+a", b"q"):
            one.ask(b"get %b\r\n" % name, END)
            put(one, name, b"x")
        assert order(it) == ("q+b,q+a", ["z", "q+b", "q+a", "q", "a"])
    with kestrel(tmp_path, config=config) as it:
        it.client().ask(b"get b\r\n", END)
        assert order(it) == ("q+a,q+b", ["q", "q+a", "q+b", "z", "b", "a"])


def test_figures_of_files_and_memory(tmp_path: Path) -> None:
    """KP-7.5, KP-7.10, KP-7.14: logsize of a fan-out, hook_errors, reserved_memory_ratio."""
    config = "[queues.q]\nmax_memory_size = '1000G'\n[queues.e]\nerror_to_queue = 'bad'"
    with kestrel(tmp_path, config=config) as it:
        one = it.client()
        one.ask(b"get q+a\r\nget q+b\r\n", END * 2)
        put(one, b"q", b"x" * 100)
        put(one, b"q+a", b"x" * 1000)
        put(one, b"e", b"x")
        stats = it.stats()
        assert stats["queue_q_logsize"] == stats["queue_q+b_logsize"]
        assert int(stats["queue_q+a_logsize"]) >= int(stats["queue_q_logsize"]) + 1000
        memory = 3 * 1000 * 2**30 / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        assert abs(float(stats["reserved_memory_ratio"]) / memory - 1) < 0.01
        with patch.object(Queues, "move", side_effect=RuntimeError("no")):
            one.ask(b"get e/open\r\nget e/abort\r\n", value(b"e", b"x") + END)
        assert it.stats()["queue_e_hook_errors"] == "1"
