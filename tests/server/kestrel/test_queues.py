"""Queues of the kestrel server: fan-outs, aliases, limits, expiry, error queues, timeouts, and what a restart keeps.

An id that begins with KP in a docstring is that of a row of docs/kestrel-protocol.md, which the test covers.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from kestrelpy import QueueLocked, queue_names
from kestrelpy.server import serve_in_thread
from tests.server.harness import Client
from tests.server.kestrel.kestrel_harness import kestrel
from tests.server.kestrel.test_memcache import put, value
from tests.support.small_disk import SmallDisk

NOT_STORED, END = b"NOT_STORED\r\n", b"END\r\n"


def refuse(client: Client, name: bytes, body: bytes = b"x") -> None:
    client.ask(b"set %b 0 0 %d\r\n%b\r\n" % (name, len(body), body), NOT_STORED)


def take(client: Client, name: bytes, *bodies: bytes) -> None:
    """Exactly these are there."""
    client.ask(b"get %b\r\n" % name * (len(bodies) + 1), b"".join(value(name, body) for body in bodies) + END)


# -- fan-outs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_fanout_gets_what_comes_after_its_mention(tmp_path: Path, place: str) -> None:
    """KP-2.20: fan-out: gets what is added to its parent from its first mention on."""
    with kestrel(tmp_path if place == "disk" else None, max_open_transactions=9) as it:
        client = it.client()
        put(client, b"orders", b"before")
        holder = it.client()
        holder.ask(b"get orders/open\r\n", value(b"orders", b"before"))
        client.ask(b"get orders+audit\r\n", END)
        put(client, b"orders", b"one", b"two")
        take(client, b"orders+audit", b"one", b"two")
        take(client, b"orders", b"one", b"two")
        holder.ask(b"get orders/abort\r\n", END)  # its open read is still valid
        take(client, b"orders", b"before")
        stats = it.stats()
        assert stats["queue_orders_children"] == "orders+audit"
        assert stats["total_items"] == "5"
        assert (stats["queue_orders_total_items"], stats["queue_orders+audit_total_items"]) == ("3", "2")


def test_a_fanout_is_one_record(tmp_path: Path) -> None:
    """KP-2.21, KP-7.13: KS-B12: parent and fan-outs share one journal."""
    with kestrel(tmp_path) as it:
        client = it.client()
        for child in (b"a", b"b", b"_", b"x--1"):
            client.ask(b"get q+%b\r\n" % child, END)
        put(client, b"q", b"once")
        assert it.stats()["queue_q_children"] == "q+a,q+b,q+_,q+x--1"
        for child in (b"a", b"b", b"_", b"x--1"):
            take(client, b"q+" + child, b"once")
    assert queue_names(tmp_path) == ["q", "x--acks"]


def test_a_set_to_the_fanout_reaches_it_alone(tmp_path: Path) -> None:
    """KP-2.23, KP-2.24: fan-out: a set to the child itself reaches that child only; both are read by the time of
    adding.
    """
    long = b"x" * 60
    for name in (b"q+a", b"q+" + long):
        folder = tmp_path / str(len(name))
        with kestrel(folder) as it:
            client = it.client()
            client.ask(b"get %b\r\nget q+b\r\n" % name, END + END)
            for number, target in enumerate((name, b"q", name, b"q")):
                put(client, target, b"%d" % number)
                it.call(lambda: it.clock.jump(1))
            stats = it.stats()
            assert stats[f"queue_{name.decode()}_items"] == "4"
            assert stats["total_items"] == "8"
            client.ask(b"get %b/peek\r\n" % name, value(name, b"0"))
            client.ask(b"get %b\r\n" % name, value(name, b"0"))
        with kestrel(folder) as it:
            client = it.client()
            take(client, name, b"1", b"2", b"3")
            take(client, b"q+b", b"1", b"3")
            put(client, name, b"again")
            client.ask(b"flush %b\r\n" % name, END)
            take(client, name)
            put(client, name, b"again")
            client.ask(b"delete %b\r\n" % name, b"DELETED\r\n")
            take(client, name)
        assert [each for each in queue_names(folder) if each.startswith("x--") and each != "x--acks"] == []


def test_deleting_a_parent_leaves_its_fanouts(tmp_path: Path) -> None:
    """KP-2.26, KP-2.27, KP-2.28: fan-out: delete of the parent drops its items, children stay; flush leaves
    children alone.
    """
    with kestrel(tmp_path) as it:
        client = it.client()
        client.ask(b"get q+a\r\n", END)
        put(client, b"q", b"1", b"2")
        client.ask(b"flush q\r\n", END)
        client.ask(b"get q+a\r\n", value(b"q+a", b"1"))
        client.ask(b"delete q\r\n", b"DELETED\r\n")
        assert "queue_q_items" not in it.stats()
        put(client, b"q", b"3")
        take(client, b"q", b"3")
        take(client, b"q+a", b"2", b"3")
        put(client, b"q", b"4")
        client.ask(b"delete q+a\r\n", b"DELETED\r\n")
        client.ask(b"get q+a\r\n", END)
        take(client, b"q", b"4")
        client.ask(b"delete q\r\ndelete q+a\r\n", b"DELETED\r\nDELETED\r\n")
    assert queue_names(tmp_path) == ["x--acks"]


def test_a_parent_for_fanouts_only(tmp_path: Path) -> None:
    """KP-1.38: fanout_only: the queue itself takes nothing. STORED even without children."""
    with kestrel(tmp_path, config="[queues.q]\nfanout_only = true") as it:
        client = it.client()
        put(client, b"q", b"nobody")
        client.ask(b"get q+a\r\n", END)
        put(client, b"q", b"one")
        take(client, b"q")
        take(client, b"q+a", b"one")
        assert it.stats()["queue_q_items"] == "0"
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", b"both")
        take(client, b"q", b"both")
        take(client, b"q+a", b"both")
        it.server._config_text = "[queues.q]\nfanout_only = true"
        client.ask(b"reload\r\n", b"Reloaded config.\r\n")
        put(client, b"q", b"child")
        take(client, b"q")
        take(client, b"q+a", b"child")


def test_a_full_fanout_refuses_for_all() -> None:
    """KP-2.22: fan-out: a child that is full and refuses makes the whole set NOT_STORED."""
    config = '[queues."q+a"]\nmax_items = 1\n[queues."q+b"]\nmax_items = 1\ndiscard_old_when_full = true\n'
    with kestrel(config=config) as it:
        client = it.client()
        client.ask(b"get q+b\r\n", END)
        put(client, b"q", b"1", b"2")
        take(client, b"q+b", b"2")
        client.ask(b"get q+a\r\n", END)
        put(client, b"q", b"3")
        refuse(client, b"q")
        take(client, b"q", b"1", b"2", b"3")
        take(client, b"q+a", b"3")
        put(client, b"q", b"4")


def test_limits_of_a_fanout_with_a_side_queue_are_of_both() -> None:
    """KP-2.24."""
    config = (
        '[queues."q+a"]\nmax_items = 2\n[queues."q+b"]\nmax_items = 2\ndiscard_old_when_full = true\n'
        '[queues."q+c"]\nmax_item_size = 3\n'
    )
    with kestrel(config=config) as it:
        client = it.client()
        put(client, b"q+a", b"1")
        it.call(lambda: it.clock.jump(1))
        put(client, b"q", b"2")
        refuse(client, b"q")
        refuse(client, b"q+a")
        take(client, b"q+a", b"1", b"2")
        for body in (b"1", b"2", b"3"):
            put(client, b"q+b", body)
            it.call(lambda: it.clock.jump(1))
        put(client, b"q", b"4")
        take(client, b"q+b", b"3", b"4")
        assert it.stats()["queue_q+b_discarded"] == "2"
        refuse(client, b"q+c", b"long")
        refuse(client, b"q", b"long")


# -- aliases -----------------------------------------------------------------------------------------------------------


def test_aliases() -> None:
    """KP-2.30, KP-2.31, KP-2.32, KP-2.33, KP-7.4, KP-7.13: alias: set goes to every destination; get, peek,
    monitor: END; flush, delete without effect; stats.
    """
    config = '[aliases]\nwx = ["weather", "ship+log"]\nall = ["wx", "extra"]\n[queues.extra]\nmax_items = 1\n'
    with kestrel(config=config) as it:
        client = it.client()
        put(client, b"wx", b"a")
        take(client, b"weather", b"a")
        take(client, b"ship+log", b"a")
        client.ask(b"get wx\r\nget wx/peek\r\nmonitor wx 1\r\nget wx/t=1000/open\r\n", END * 4)
        client.ask(b"flush wx\r\ndelete wx\r\nflush_expired wx\r\n", b"END\r\nDELETED\r\n0\r\n")
        put(client, b"all", b"b")
        refuse(client, b"all", b"c")  # extra is full: the others have it
        take(client, b"weather", b"b", b"c")
        stats = it.stats()
        assert stats["queue_wx_children"] == "weather,ship+log"
        assert (stats["queue_wx_put_items"], stats["queue_wx_put_bytes"]) == ("3", "3")
        assert "queue_wx_items" not in stats
        assert stats["total_items"] == "7"


# -- limits ------------------------------------------------------------------------------------------------------------


def test_max_items_leaves_open_reads_out() -> None:
    """KP-1.30: max_items: refused when so many wait; open reads do not count, and one that comes back may exceed it."""
    with kestrel(config="[queues.q]\nmax_items = 2", max_open_transactions=5) as it:
        client, holder = it.clients(2)
        put(client, b"q", b"1", b"2")
        refuse(client, b"q")
        holder.ask(b"get q/open\r\n", value(b"q", b"1"))
        put(client, b"q", b"3")
        refuse(client, b"q")
        holder.ask(b"get q/abort\r\n", END)
        refuse(client, b"q")
        take(client, b"q", b"1", b"2", b"3")


def test_max_size_may_be_exceeded_by_one() -> None:
    """KP-1.30: max_size: KS-F52: one item may go beyond it."""
    with kestrel(config="[queues.q]\nmax_size = 10") as it:
        client = it.client()
        put(client, b"q", b"x" * 9, b"y" * 50)
        refuse(client, b"q")
        take(client, b"q", b"x" * 9, b"y" * 50)
        put(client, b"q", b"z" * 10)
        refuse(client, b"q")


def test_discard_old_when_full() -> None:
    """KP-1.31: discard_old_when_full: heads are dropped, the add succeeds."""
    with kestrel(config="[queues.q]\nmax_items = 2\ndiscard_old_when_full = true") as it:
        client = it.client()
        put(client, b"q", b"1", b"2", b"3", b"4")
        take(client, b"q", b"3", b"4")
        assert it.stats()["queue_q_discarded"] == "2"


def test_max_item_size() -> None:
    """KP-1.32: max_item_size: larger: NOT_STORED, equal: taken; never more than the journal takes."""
    with kestrel(config="[queues.q]\nmax_item_size = 5\n[queues.small]\ndefault_journal_size = '64k'") as it:
        client = it.client()
        put(client, b"q", b"12345")
        refuse(client, b"q", b"123456")
        refuse(client, b"small", b"x" * 70_000)
        refuse(client, b"small", b"x" * 65_536)
        put(client, b"small", b"x" * 60_000)
        refuse(client, b"r", b"x" * (17 << 20))
        client.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")


def test_no_more_queues_than_max_queues() -> None:
    """KP-1.27: max_queues: SERVER_ERROR, connection kept."""
    with kestrel(max_queues=2) as it:
        client = it.client()
        put(client, b"a", b"1")
        client.ask(b"get b\r\nget c\r\nset d 0 0 1\r\nx\r\n", END + b"SERVER_ERROR\r\nSERVER_ERROR\r\n")
        client.ask(b"get c+d\r\nmonitor c 1\r\n", b"SERVER_ERROR\r\nSERVER_ERROR\r\n")
        client.ask(b"flush c\r\ndelete c\r\n", b"END\r\nDELETED\r\n")
        client.ask(b"delete b\r\nget c\r\n", b"DELETED\r\nEND\r\n")


def test_what_makes_a_queue() -> None:
    """KP-2.4, KP-2.5: KS-F51: get, gets, set, peek and monitor make a queue; flush, delete, confirm, abort and
    close do not.
    """
    with kestrel() as it:
        client = it.client()
        client.ask(
            b"flush a\r\ndelete b\r\nconfirm c 1\r\nget d/abort\r\nget e/close\r\n",
            b"END\r\nDELETED\r\nERROR\r\nEND\r\nEND\r\n",
        )
        client.ask(b"flush_expired f\r\n", b"0\r\n")
        client.ask(
            b"dump_stats k\r\ndump_config l\r\n", b"queue 'k' {\r\n  \r\n}\r\nEND\r\nqueue 'l' {\r\n  \r\n}\r\nEND\r\n"
        )
        client.ask(b"get g\r\ngets h\r\nget i/peek\r\nmonitor j 0\r\n", END * 4)
        names = [key[6:-6] for key in it.stats() if re.fullmatch(r"queue_\w_items", key)]
        assert names == ["g", "h", "i", "j"]


def test_polling_names_costs_no_files(tmp_path: Path) -> None:
    """KP-2.6."""
    with kestrel(tmp_path) as it:
        client = it.client()
        before = sorted(os.listdir(tmp_path))
        client.ask(b"get q\r\nget r/open\r\nmonitor s 0\r\n", END * 3)
        assert sorted(os.listdir(tmp_path)) == before
        client.ask(b"get q+child\r\n", END)  # it is owed items from now on
        assert sorted(os.listdir(tmp_path)) != before


# -- expiry ------------------------------------------------------------------------------------------------------------


def test_max_age_and_a_change_of_it() -> None:
    """KP-1.33: max_age: KS-T24: a changed max_age holds for what is queued."""
    with kestrel(config="[queues.q]\nmax_age = 100") as it:
        client = it.client()
        put(client, b"q", b"1")
        client.ask(b"set q 0 20 1\r\n2\r\n", b"STORED\r\n")
        it.call(lambda: it.clock.jump(30))
        client.ask(b"get q/peek\r\n", value(b"q", b"1"))
        it.server._config_text = "[queues.q]\nmax_age = '29s'"
        client.ask(b"reload\r\n", b"Reloaded config.\r\n")
        take(client, b"q")


def test_expire_to_queue(caplog: pytest.LogCaptureFixture) -> None:
    """KP-1.23, KP-1.34, KP-7.4, KP-7.9: expire_to_queue, expiration_timer_frequency: added there, without an
    expiry, in order; no room there:
    dropped, expired_lost + 1.
    """
    config = "[queues.q]\nmax_age = 10\nexpire_to_queue = 'late'\n[queues.late]\nmax_items = 2\n"
    with kestrel(config=config) as it, caplog.at_level(logging.WARNING):
        client, waiter = it.clients(2)
        put(client, b"q", b"1", b"2", b"3", b"4")
        waiter.send(b"get late/t=60000\r\n")
        it.wait_for_waiting(b"late")
        it.advance(10.5)  # the timer looks each second
        waiter.hear(value(b"late", b"1"))
        take(client, b"late", b"2")
        stats = it.stats()
        assert (stats["queue_q_expired_items"], stats["queue_q_expired_lost"], stats["queue_q_items"]) == (
            "4",
            "2",
            "0",
        )
        assert stats["total_items"] == "4"  # what moves does not count
        assert len([one for one in caplog.messages if "expired items" in one]) == 1


def test_a_sweep_is_limited_and_a_get_is_not() -> None:
    """KP-1.23, KP-1.35: max_expire_sweep: of a round of the timer, and a flush_expired; KS-B2: gets have no limit."""
    with kestrel(
        config="[queues.q]\nmax_expire_sweep = 2\n[queues.r]\nmax_expire_sweep = 2", expiration_timer_frequency=0
    ) as it:
        client = it.client()
        for name in (b"q", b"r"):
            for _ in range(5):
                client.ask(b"set %b 0 5 1\r\nx\r\n" % name, b"STORED\r\n")
            put(client, name, b"fresh")
        it.call(lambda: it.clock.jump(6))
        client.ask(b"flush_expired q\r\n" * 4, b"2\r\n2\r\n1\r\n0\r\n")
        take(client, b"r", b"fresh")


def test_old_empty_queues_are_deleted(tmp_path: Path) -> None:
    """KP-1.23, KP-1.37: max_queue_age: KS-B3: empty, no open read, no waiter, and made longer ago."""
    config = "[default]\nmax_queue_age = 10"
    with kestrel(tmp_path, config=config, expiration_timer_frequency=1.0) as it:
        client, holder, waiter = it.clients(3)
        put(client, b"empty", b"x")
        take(client, b"empty", b"x")
        put(client, b"full", b"x")
        put(client, b"open", b"x")
        holder.ask(b"get open/open\r\n", value(b"open", b"x"))
        waiter.send(b"get waited/t=100000\r\n")
        it.wait_for_waiting(b"waited")
        it.advance(12)
        it.until(lambda: it.server.queues.find(b"empty") is None)
        stats = it.stats()
        left = [key[6:-6] for key in stats if re.fullmatch(r"queue_[a-z]+_items", key) and "total" not in key]
        assert left == ["full", "open", "waited"]
        assert (stats["queue_expires"], stats["queue_deletes"]) == ("1", "1")


# -- open reads that end by themselves ---------------------------------------------------------------------------------


def test_open_reads_time_out() -> None:
    """KP-1.36, KP-3.10: open_transaction_timeout: KS-B1: aborted by a timer, waiters are woken; confirm counts what
    is left.
    """
    with kestrel(config="[queues.q]\nopen_transaction_timeout = 10", max_open_transactions=5) as it:
        holder, waiter = it.clients(2)
        put(waiter, b"q", b"1", b"2")
        holder.ask(b"get q/open\r\n", value(b"q", b"1"))
        it.advance(5)
        holder.ask(b"get q/open\r\n", value(b"q", b"2"))
        waiter.send(b"get q/t=60000\r\n")
        it.wait_for_waiting(b"q")
        it.advance(5)
        waiter.hear(value(b"q", b"1"))
        holder.ask(b"confirm q 2\r\n", b"ERROR\r\n")
        holder.ask(b"confirm q 1\r\n", END)
        it.advance(60)
        take(waiter, b"q")
        assert it.stats()["queue_q_canceled_transactions"] == "1"


def test_error_queues() -> None:
    """KP-1.44, KP-2.4: error_to_queue, many_errors_to_queue, many_errors_count: KS-B7; reads that end by disconnect
    count, too.
    """
    config = (
        "[queues.a]\nerror_to_queue = 'bad'\n"
        "[queues.b]\nmany_errors_to_queue = 'worse'\nmany_errors_count = 2\n"
        "[queues.c]\nerror_to_queue = 'bad'\nmany_errors_to_queue = 'worse'\nmany_errors_count = 1\n"
        "[queues.d]\nerror_to_queue = 'full'\n[queues.full]\nmax_items = 0\n"
    )
    with kestrel(config=config) as it:
        client = it.client()
        for name in (b"a", b"b", b"c", b"d"):
            put(client, name, name)
            client.ask(b"get %b/open\r\nget %b/abort\r\n" % (name, name), value(name, name) + END)
        take(client, b"bad", b"a")
        take(client, b"worse", b"c")
        take(client, b"d", b"d")  # no room there: it stays
        loser = it.client()
        loser.ask(b"get b/open\r\n", value(b"b", b"b"))
        loser.hang_up()
        it.until(lambda: it.server.queues.find(b"worse").items == 1)  # type: ignore[union-attr]
        take(client, b"worse", b"b")
        take(client, b"b")


# -- what a restart keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [0, 0.1, "never"])
def test_a_restart_keeps_everything(tmp_path: Path, sync: float) -> None:
    """KP-1.40, KP-2.3, KP-6.13, KP-7.12: sync_journal: whatever it is."""
    with kestrel(tmp_path, sync_journal=sync, max_open_transactions=5) as it:
        client = it.client()
        client.ask(b"get q+a\r\n", END)
        put(client, b"q", b"1", b"2", b"3")
        put(client, b"odd name".replace(b" ", b"\xff"), b"odd")
        client.ask(b"get q\r\nget q/open\r\n", value(b"q", b"1") + value(b"q", b"2"))
        client.ask(b"get q+a/open\r\nget q+a/close\r\n", value(b"q+a", b"1") + END)
        client.ask(b"status readonly\r\n", END)
    with kestrel(tmp_path, sync_journal=sync, max_open_transactions=5) as it:
        client = it.client()
        client.ask(b"status\r\n", b"READONLY\r\n")
        client.ask(b"status up\r\n", END)
        take(client, b"q", b"2", b"3")
        take(client, b"q+a", b"2", b"3")
        take(client, b"odd\xffname", b"odd")
        assert it.stats()["queue_creates"] == "3"


def test_the_log_of_acknowledgements_is_applied_and_trimmed(tmp_path: Path) -> None:
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", *[b"%d" % number for number in range(50)])
        for number in range(20):
            client.ask(b"get q\r\n", value(b"q", b"%d" % number))
        acks = it.server.queues.storage.acks
        assert acks is not None
        assert acks._log._reader.items == 20
        it.advance(6)
        it.until(lambda: not acks._is_saving and acks._log._reader.items == 0)
        take_one = value(b"q", b"20")
        client.ask(b"get q\r\n", take_one)
        assert acks._log._reader.items == 1


def test_reads_that_are_open_at_the_end_are_no_aborts(tmp_path: Path) -> None:
    """They are unread at the next start, and do not go to an error queue."""
    config = "[queues.q]\nerror_to_queue = 'bad'"
    with kestrel(tmp_path, config=config, max_open_transactions=5) as it:
        holder = it.client()
        put(holder, b"q", b"1", b"2")
        holder.ask(b"get q/open\r\n", value(b"q", b"1"))
        it.call(lambda: it.server.loop.create_task(it.server.stop()))
        holder.hear_the_end()
    with kestrel(tmp_path, config=config) as it:
        client = it.client()
        take(client, b"bad")
        take(client, b"q", b"1", b"2")


def test_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    """KP-2.14: disk full: NOT_STORED; gets and confirms go on, and hold."""
    disk = SmallDisk(120)
    config = "[default]\ndefault_journal_size = '64k'"
    with kestrel("queues", config=config, disk=disk, max_open_transactions=9, sync_journal=0) as it:
        client = it.client()
        stored = 0
        while True:
            client.send(b"set q 0 0 3000\r\n" + b"%04d" % stored + b"x" * 2996 + b"\r\n")
            if client.line() == NOT_STORED:
                break
            stored += 1
        assert 5 < stored < 200
        it.call(disk.fill)
        bodies = [b"%04d" % number + b"x" * 2996 for number in range(stored)]
        client.ask(b"get q\r\n", value(b"q", bodies[0]))
        client.ask(b"get q/open\r\n", value(b"q", bodies[1]))
        client.ask(b"confirm q 1\r\n", END)
        client.ask(b"get q/open\r\nget q/abort\r\n", value(b"q", bodies[2]) + END)
        refuse(client, b"q", b"x" * 3000)
        refuse(client, b"another", b"x")  # which has no file yet
        client.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
    with kestrel("queues", config=config, disk=disk) as it:
        take(it.client(), b"q", *bodies[2:])


def test_one_server_in_a_folder(tmp_path: Path) -> None:
    """KP-1.1: two servers in one folder: refused."""
    with kestrel(tmp_path), pytest.raises(QueueLocked), serve_in_thread(tmp_path, protocol="kestrel"):
        pass


def test_a_queue_that_is_kept_in_memory(tmp_path: Path) -> None:
    """KP-1.39: keep_journal: false: memory only."""
    with kestrel(tmp_path, config="[queues.m]\nkeep_journal = false") as it:
        client = it.client()
        put(client, b"m", b"1", b"2")
        client.ask(b"get m\r\n", value(b"m", b"1"))
        assert it.stats()["queue_m_logsize"] != ""
        client.ask(b"delete m\r\n", b"DELETED\r\n")
        put(client, b"m", b"3")
    assert queue_names(tmp_path) == ["x--acks"]
    with kestrel(tmp_path) as it:
        take(it.client(), b"m")


def test_archives(tmp_path: Path) -> None:
    """KP-1.41, KP-1.43: archive_dir, default_journal_size: retired segments go there."""
    archive = tmp_path / "archive"
    archive.mkdir()
    config = f"[default]\narchive_dir = '{archive}'\ndefault_journal_size = '64k'"
    with kestrel(tmp_path / "queues", config=config) as it:
        client = it.client()
        for _ in range(5):
            put(client, b"q", b"x" * 40_000)
        assert it.stats()["queue_q_journal_rotations"] == "4"
        take(client, b"q", *[b"x" * 40_000] * 5)
        it.advance(6)
        acks = it.server.queues.storage.acks
        it.until(lambda: acks is not None and not acks._is_saving)
    assert len([name for name in os.listdir(archive) if name.startswith("q.")]) >= 3


# -- status and configuration ------------------------------------------------------------------------------------------


def test_status_forbids() -> None:
    """KP-3.18, KP-3.51, KP-6.1, KP-6.2, KP-6.3, KP-6.4, KP-6.5, KP-6.6: status: up, writeavoid, readonly,
    quiescent, and what always works.
    """
    with kestrel(max_open_transactions=5) as it:
        holder, operator = it.clients(2)
        put(holder, b"q", b"1", b"2", b"3", b"4")
        holder.ask(b"get q/open\r\nget q/open\r\nget q/open\r\n", b"".join(value(b"q", b"%d" % n) for n in (1, 2, 3)))
        operator.ask(b"status\r\nstatus WRITEAVOID\r\nstatus\r\n", b"UP\r\nEND\r\nWRITEAVOID\r\n")
        put(holder, b"q", b"5")
        operator.ask(b"status readonly\r\n", END)
        for line in (
            b"set q 0 0 1\r\nx\r\n",
            b"delete q\r\n",
            b"flush q\r\n",
            b"flush_all\r\n",
            b"flush_expired q\r\n",
            b"flush_all_expired\r\n",
        ):
            client = it.client()
            client.ask(line, b"SERVER_ERROR\r\n")
            client.hear_the_end()
        it.client().ask(b"get q/peek\r\n", value(b"q", b"4"))
        operator.ask(b"status quiescent\r\nstatus\r\nversion\r\n", b"END\r\nQUIESCENT\r\nVERSION 2.4.7+kestrelpy\r\n")
        for line in (b"get q\r\n", b"get q/open\r\n", b"get q/peek\r\n", b"monitor q 5\r\n"):
            client = it.client()
            client.ask(line, b"SERVER_ERROR\r\n")
            client.hear_the_end()
        holder.ask(b"get q/close\r\nget q/abort\r\nconfirm q 1\r\n", END * 3)
        assert it.stats()["queue_q_open_transactions"] == "0"
        operator.ask(b"status up\r\n", END)
        put(operator, b"r", b"x")
        operator.ask(
            b"get r/open\r\nstatus quiescent\r\nget r/close/open\r\n", value(b"r", b"x") + END + b"SERVER_ERROR\r\n"
        )
        operator.hear_the_end()
        assert it.stats()["queue_r_open_transactions"] == "0"  # it closed, and then refused


@pytest.mark.parametrize(
    ("stored", "shown"), [(None, b"READONLY"), ("quiescent\n", b"QUIESCENT"), ("asleep", b"READONLY")]
)
def test_the_status_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str | None, shown: bytes
) -> None:
    """KP-1.24, KP-6.13: default_status: unless another is stored; unreadable: the default and a warning."""
    if stored is not None:
        (tmp_path / "kestrel.status").write_text(stored)
    with caplog.at_level(logging.WARNING), kestrel(tmp_path, default_status="readonly") as it:
        it.client().ask(b"status\r\n", shown + b"\r\n")
    assert any("kestrel.status" in one for one in caplog.messages) == (stored == "asleep")


def test_memory_is_limited(tmp_path: Path) -> None:
    """KP-1.42: max_memory_size: kept in memory, the rest in the journal."""
    with kestrel(tmp_path, config="[queues.q]\nmax_memory_size = '64k'") as it:
        client = it.client()
        bodies = [b"%d" % number + b"x" * 10_000 for number in range(40)]
        put(client, b"q", *bodies)
        client.ask(b"get q\r\n", value(b"q", bodies[0]))
        stats = it.stats()
        assert int(stats["queue_q_mem_bytes"]) <= 65_536
        assert int(stats["queue_q_mem_items"]) <= 6
        take(client, b"q", *bodies[1:])


def test_a_stricter_status_counts_after_a_while() -> None:
    """KP-1.24, KP-3.19, KP-6.10, KP-6.11, KP-6.12: status_change_grace_period."""
    with kestrel(config="status_change_grace_period = 10") as it:
        client = it.client()
        client.ask(b"status readonly\r\nstatus\r\n", b"END\r\nREADONLY\r\n")
        put(client, b"q", b"1")
        client.ask(b"status quiescent\r\nstatus\r\n", b"END\r\nREADONLY\r\n")
        it.advance(10)
        client.ask(b"status\r\nget q/peek\r\n", b"READONLY\r\n" + value(b"q", b"1"))
        client.ask(b"status up\r\n", END)
        put(client, b"q", b"2")
        client.ask(b"status quiescent\r\nstatus writeavoid\r\n", END + END)
        it.advance(20)
        client.ask(b"status\r\nget q\r\n", b"WRITEAVOID\r\n" + value(b"q", b"1"))


def test_a_wait_that_began_before_is_not_broken_off() -> None:
    """KP-3.6, KP-6.14."""
    with kestrel(max_open_transactions=5) as it:
        waiter, monitor, operator = it.clients(3)
        operator.ask(b"set r 0 0 1\r\nx\r\n", b"STORED\r\n")
        waiter.send(b"get q/t=60000\r\n")
        monitor.send(b"monitor q 60 2\r\n")
        it.wait_for_waiting(b"q", 2)
        operator.ask(b"status quiescent\r\n", END)
        it.call(lambda: it.server.queues.move(b"q", b"a"))
        waiter.hear(value(b"q", b"a"))
        it.call(lambda: it.server.queues.move(b"q", b"b"))
        monitor.hear(value(b"q", b"b") + END)  # reads are forbidden by now


def test_connection_limits() -> None:
    """KP-1.25, KP-1.26, KP-3.51: connection_limit_refuse_writes, connection_limit_refuse_reads, max_connections."""
    with kestrel(
        config="connection_limit_refuse_writes = 1\nconnection_limit_refuse_reads = 2\nmax_connections = 4"
    ) as it:
        first = it.client()
        put(first, b"q", b"a")
        second = it.client()
        second.ask(b"get q/peek\r\n", value(b"q", b"a"))
        second.ask(b"set q 0 0 1\r\nb\r\n", b"SERVER_ERROR\r\n")
        second.hear_the_end()
        it.until(lambda: len(it.server.connections) == 1)
        others = it.clients(2)
        for other in others:
            other.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
        others[1].ask(b"get q\r\n", b"SERVER_ERROR\r\n")
        others[1].hear_the_end()
        it.until(lambda: len(it.server.connections) == 2)
        for client in it.clients(2):
            client.ask(b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n")
        it.client().hear(b"SERVER_ERROR\r\n")


def test_reload(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """KP-1.18, KP-1.19, KP-3.21: reload: queues that exist change, a broken file changes nothing, the rest says
    that it needs a restart.
    """
    texts = iter(
        ["[queues.q]\nmax_items = 1", "[queues.q]\nmax_items = 2\nkeep_journal = false", "[queues.q]\nmax_itemz = 3"]
    )
    text = [next(texts)]
    with kestrel(tmp_path, config=lambda: text[0]) as it:  # a function that reads it
        client = it.client()
        put(client, b"q", b"1")
        refuse(client, b"q")
        text[0] = next(texts)
        with caplog.at_level(logging.WARNING):
            client.ask(b"reload\r\n", b"Reloaded config.\r\n")
        assert any("keep_journal changes at the next start" in one for one in caplog.messages)
        put(client, b"q", b"2")
        refuse(client, b"q")
        text[0] = next(texts)
        client.ask(b"reload\r\n", b"SERVER_ERROR\r\n")
        assert any("max_itemz" in one for one in caplog.messages)
        take(client, b"q", b"1", b"2")
        put(client, b"q", b"3", b"4")
        refuse(client, b"q")


def test_shutdown() -> None:
    """KP-1.29, KP-3.23: shutdown: acts 0.1 s later; allow_shutdown = false: SERVER_ERROR, ends."""
    with kestrel() as it:
        client = it.client()
        client.send(b"shutdown\r\n")
        client.hear_the_end()
        assert not it.server._end.done()
        it.advance(0.1)
        assert it.call(it.server._end.done)
    with kestrel(allow_shutdown=False) as it:
        client = it.client()
        client.ask(b"shutdown\r\n", b"SERVER_ERROR\r\n")
        client.hear_the_end()
        it.advance(1)
        assert not it.call(it.server._end.done)


def test_stopping_answers_those_who_wait() -> None:
    """KP-1.10, KP-3.6."""
    with kestrel() as it:
        getter, monitor = it.clients(2)
        getter.send(b"get q/t=60000\r\n")
        monitor.send(b"monitor q 60\r\n")
        it.wait_for_waiting(b"q", 2)
        it.call(lambda: it.server.loop.create_task(it.server.stop()))
        for client in (getter, monitor):
            client.hear(END)
            client.hear_the_end()


def test_figures(tmp_path: Path) -> None:
    """KP-3.15, KP-7.1, KP-7.2, KP-7.6: stats: the keys, in their order."""
    with kestrel(tmp_path) as it:
        client = it.client()
        put(client, b"q", b"abc")
        it.call(lambda: it.clock.jump(2))
        stats = it.stats()
        keys = list(stats)
        server_keys = (
            "uptime time version curr_items total_items bytes reserved_memory_ratio curr_connections "
            "total_connections cmd_get cmd_set cmd_peek get_hits get_misses bytes_read bytes_written "
            "queue_creates queue_deletes queue_expires"
        )
        assert keys[:19] == server_keys.split()
        queue_keys = (
            "items bytes total_items logsize expired_items mem_items mem_bytes age discarded waiters "
            "open_transactions transactions canceled_transactions total_flushes journal_rewrites "
            "journal_rotations expired_lost hook_errors create_time"
        )
        assert [key.removeprefix("queue_q_") for key in keys[19:]] == queue_keys.split()
        assert (stats["curr_items"], stats["bytes"], stats["cmd_set"]) == ("1", "3", "1")
        assert stats["queue_q_age"] == "2000"
        assert int(stats["queue_q_logsize"]) > 0
        assert int(stats["bytes_read"]) >= 20
        assert (stats["curr_connections"], stats["total_connections"]) == ("2", "2")
