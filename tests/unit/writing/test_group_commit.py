"""Group commit: who waits is told once, by as few syncs as will do."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kestrelpy._waiting.put_future import PutFuture
from kestrelpy._waiting.waiters import FutureWaiter, ThreadWaiter
from kestrelpy._writing.group_commit import GroupCommit, _Link
from tests.support.budget import share
from tests.support.patience import until


class Disk:
    """``sync`` waits at a gate, and returns the highest id written when it began."""

    def __init__(self) -> None:
        self.written = 0
        self.count = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.scheduled: list[None] = []
        self.commit = GroupCommit(self.sync, lambda: self.scheduled.append(None))

    def sync(self) -> int:
        seen = self.written
        self.count += 1
        self.entered.release()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return seen


def a_future(ticket: FutureWaiter) -> PutFuture[int]:
    """``ticket`` as the future of a put: a commit asks no more of one than it can do."""
    return cast("PutFuture[int]", ticket)


def test_one_waiter_syncs_once() -> None:
    disk = Disk()
    disk.written = 5
    disk.commit.wait(3)
    assert (disk.count, disk.commit.durable_id, disk.commit.sync_count) == (1, 5, 1)
    disk.commit.wait(5)
    assert disk.count == 1, "it was covered"


def test_the_followers_of_a_leader_share_the_next_sync(start: Callable[..., threading.Thread]) -> None:
    disk = Disk()
    disk.gate.clear()
    disk.written = 1
    threads = [start(disk.commit.wait, 1)]
    assert disk.entered.acquire(timeout=20)
    disk.written = 11
    threads += [start(disk.commit.wait, item_id) for item_id in range(2, 12)]
    until(lambda: len(disk.commit._tickets) == 10)
    disk.gate.set()
    for thread in threads:
        thread.join(20)
    assert disk.count == 2
    assert disk.commit.durable_id == 11
    assert not disk.commit._tickets
    assert disk.commit._leader is None


def test_an_error_reaches_the_leader_and_everybody_behind_it(start: Callable[..., threading.Thread]) -> None:
    disk = Disk()
    disk.gate.clear()
    disk.written = 1
    disk.error = OSError(5, "bad")
    heard: list[BaseException] = []

    def wait(item_id: int) -> None:
        with pytest.raises(OSError, match="bad") as caught:
            disk.commit.wait(item_id)
        heard.append(caught.value)

    threads = [start(wait, 1)]
    assert disk.entered.acquire(timeout=20)
    threads += [start(wait, 2) for _ in range(3)]
    ticket = FutureWaiter()
    disk.commit.add(2, a_future(ticket), soon=False)
    until(lambda: len(disk.commit._tickets) == 4)
    disk.gate.set()
    for thread in threads:
        thread.join(20)
    told = [*heard, ticket.future.exception(0)]
    assert [repr(each) for each in told] == [repr(disk.error)] * 5
    assert len(set(map(id, told))) == 5, "each has one of its own"
    # R9: it stays failed, whatever the disk says now
    disk.error = None
    with pytest.raises(OSError, match="bad"):
        disk.commit.wait(9)
    late = FutureWaiter()
    disk.commit.add(9, a_future(late), soon=True)
    assert isinstance(late.future.exception(0), OSError)
    disk.commit.run()
    assert disk.count == 1


def test_many_tickets_ask_for_one_sync() -> None:
    """Puts that are refused while a sync is under way ask for one too: each took memory and a sync of its own."""
    disk = Disk()
    disk.written = 9
    for item_id in range(1, 4):
        disk.commit.add(item_id, a_future(FutureWaiter()), soon=True)
        disk.commit.sync_soon()
    assert len(disk.scheduled) == 1
    disk.commit.run()
    disk.written = 10
    disk.commit.add(10, a_future(FutureWaiter()), soon=True)
    assert len(disk.scheduled) == 2


def test_tickets_without_a_thread_are_completed_by_whoever_syncs() -> None:
    disk = Disk()
    disk.written = 3
    tickets = [FutureWaiter() for _ in range(4)]
    for item_id, ticket in enumerate(tickets, 1):
        disk.commit.add(item_id, a_future(ticket), soon=False)
    assert disk.scheduled == []
    disk.commit.run()
    assert [ticket.future.done() for ticket in tickets] == [True, True, True, False]
    assert [ticket.future.result(0) for ticket in tickets[:3]] == [1, 2, 3]
    assert disk.scheduled == [None], "somebody has to sync for the one that is left"
    done = FutureWaiter()
    disk.commit.add(2, a_future(done), soon=True)
    assert done.future.result(0) == 2


def test_soon_asks_for_a_sync_unless_one_is_under_way(start: Callable[..., threading.Thread]) -> None:
    disk = Disk()
    disk.commit.add(1, a_future(FutureWaiter()), soon=True)
    assert len(disk.scheduled) == 1
    disk.gate.clear()
    thread = start(disk.commit.run)
    assert disk.entered.acquire(timeout=20)
    disk.commit.add(2, a_future(FutureWaiter()), soon=True)
    assert len(disk.scheduled) == 1
    disk.commit.run()  # returns at once: the leader will see to it
    assert disk.count == 1
    disk.gate.set()
    thread.join(20)
    assert len(disk.scheduled) == 2


def test_note_completes_what_a_rotation_made_durable() -> None:
    disk = Disk()
    ticket = FutureWaiter()
    disk.commit.add(4, a_future(ticket), soon=False)
    disk.commit.note(3)
    assert not ticket.future.done()
    disk.commit.note(4)
    assert ticket.future.result(0) == 4
    disk.commit.note(2)
    assert disk.commit.durable_id == 4


def test_a_cancelled_ticket_is_passed_over() -> None:
    disk = Disk()
    ticket = FutureWaiter()
    disk.commit.add(1, a_future(ticket), soon=False)
    assert ticket.future.cancel()
    disk.written = 1
    disk.commit.run()
    assert ticket.future.cancelled()
    assert disk.commit.durable_id == 1


def test_an_interrupted_leader_passes_the_lead_on(start: Callable[..., threading.Thread]) -> None:
    disk = Disk()
    disk.gate.clear()
    disk.written = 2
    disk.error = KeyboardInterrupt()

    def lead() -> None:
        with pytest.raises(KeyboardInterrupt):
            disk.commit.wait(1)

    leader = start(lead)
    assert disk.entered.acquire(timeout=20)
    follower = start(disk.commit.wait, 2)
    until(lambda: len(disk.commit._tickets) == 1)
    real: Any = disk.sync

    def once_more() -> int:
        disk.error = None
        return int(real())

    disk.commit._sync_once = once_more
    disk.gate.set()
    leader.join(20)
    follower.join(20)
    assert disk.commit.durable_id == 2
    assert disk.count == 2


def covered(commit: GroupCommit, *tickets: Any) -> None:
    """A sync has brought what these wait for to the disk."""
    with commit._lock:
        commit._tickets += [(commit.durable_id + 1, ticket) for ticket in tickets]
    commit.note(commit.durable_id + 1)
    assert not commit._tickets


def is_woken(waiter: ThreadWaiter) -> bool:
    return not waiter._asleep.locked()


def test_each_thread_of_a_chain_wakes_the_next() -> None:
    commit = Disk().commit
    links, alone, ticket = [_Link(), _Link(), _Link()], ThreadWaiter(), FutureWaiter()
    covered(commit, links[0], alone, links[1], ticket, links[2])
    assert [is_woken(link) for link in links] == [True, False, False]
    assert is_woken(alone)
    assert ticket.future.done()
    links[0].wake_next()
    assert [is_woken(link) for link in links] == [True, True, False]
    links[1].wake_next()
    links[1].wake_next()  # may be repeated
    links[2].wake_next()
    assert [link.wait(0) and link.result() for link in links] == ["done"] * 3


def test_a_chain_is_of_those_whom_one_sync_covered() -> None:
    commit = Disk().commit
    links = [_Link(), _Link(), _Link()]
    commit._tickets = [(1, links[0]), (2, links[1]), (1, links[2])]
    commit.note(1)
    links[0].wake_next()
    assert [is_woken(link) for link in links] == [True, False, True]
    commit.note(2)
    assert is_woken(links[1])


def test_who_is_to_lead_is_the_middle_one_of_the_chain() -> None:
    disk = Disk()
    commit, leader = disk.commit, object()
    commit._leader = leader
    done, heir, other = [_Link(), _Link()], _Link(), _Link()
    commit._tickets = [(2, heir), (1, done[0]), (2, other), (1, done[1])]
    commit._finish(leader, 1)
    assert commit._leader is heir
    assert commit._tickets == [(2, other)]
    assert [is_woken(link) for link in (done[0], heir, done[1])] == [True, False, False]
    done[0].wake_next()
    assert [is_woken(link) for link in (done[0], heir, done[1])] == [True, True, False]
    heir.wake_next()
    assert is_woken(done[1])
    assert not is_woken(other)
    assert [link.result() for link in (done[0], heir, done[1])] == ["done", "lead", "done"]
    commit._leave(heir)  # it is interrupted, and leads no sync
    assert commit._leader is other
    assert is_woken(other)


def test_an_heir_who_was_not_appointed_is_not_woken() -> None:
    """The one before it is interrupted while the leader is, in the middle of linking them."""
    commit = Disk().commit
    before, heir = _Link(), _Link()
    commit._tickets = [(1, before), (2, heir)]
    before.next = heir
    commit._leave(before)
    assert not is_woken(heir)


def test_a_rotation_leaves_the_lead_where_it_is() -> None:
    commit = Disk().commit
    commit._leader = leader = object()
    commit._tickets = [(1, _Link()), (2, _Link())]
    commit.note(1)
    assert commit._leader is leader
    assert len(commit._tickets) == 1


@pytest.mark.parametrize("woken", [False, True])
def test_who_leaves_a_chain_wakes_the_next(woken: bool) -> None:
    """Whether it has been woken by then or not."""
    commit = Disk().commit
    before, gone, behind = _Link(), _Link(), _Link()
    covered(commit, before, gone, behind)
    if woken:
        before.wake_next()
    assert not is_woken(behind)
    commit._leave(gone)
    assert is_woken(behind)


def test_an_interrupted_follower_is_not_missed_in_the_chain(
    start: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    disk.gate.clear()
    disk.written = 1
    threads = [start(disk.commit.run)]
    assert disk.entered.acquire(timeout=20)

    def struck() -> None:
        with pytest.raises(KeyboardInterrupt):
            disk.commit.wait(1)

    def wait(self: ThreadWaiter, timeout: float | None, real: Any = ThreadWaiter.wait) -> bool:
        woken = bool(real(self, timeout))
        if threading.current_thread() is victim:
            raise KeyboardInterrupt
        return woken

    monkeypatch.setattr(ThreadWaiter, "wait", wait)
    victim = start(struck)
    until(lambda: len(disk.commit._tickets) == 1)
    threads += [start(disk.commit.wait, item_id) for item_id in (1, 1, 1)]
    until(lambda: len(disk.commit._tickets) == 4)
    disk.gate.set()
    for thread in [*threads, victim]:
        thread.join(20)
        assert not thread.is_alive()
    assert disk.commit._leader is None


def test_a_signal_handler_may_wait_for_those_behind(start: Callable[..., threading.Thread]) -> None:
    """It runs in the main thread, before that can wake anybody."""
    disk = Disk()
    disk.gate.clear()
    disk.written = 1
    leader = start(disk.commit.run)
    assert disk.entered.acquire(timeout=20)
    ended: list[bool] = []

    def strike() -> None:
        until(lambda: len(disk.commit._tickets) == 1)
        followers = [start(disk.commit.wait, 1) for _ in range(2)]
        until(lambda: len(disk.commit._tickets) == 3)

        def join(_: int, __: object) -> None:
            disk.gate.set()
            for follower in followers:
                follower.join(20)
                ended.append(not follower.is_alive())

        handlers.append(join)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    handlers: list[Callable[[int, object], None]] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handlers[0](number, frame))
    try:
        striker = start(strike)
        disk.commit.wait(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    striker.join(20)
    leader.join(20)
    assert ended == [True, True]


@pytest.fixture
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_often")
def test_nobody_is_forgotten_whoever_comes_when(start: Callable[..., threading.Thread]) -> None:
    """Threads that come again and again; the interpreter may switch between any two steps of theirs."""
    rounds, count = share(100_000), 8
    disk = Disk()
    given = threading.Lock()

    def put_and_wait() -> None:
        for _ in range(rounds // count + 1):
            with given:
                disk.written += 1
                item_id = disk.written
            disk.commit.wait(item_id)
            assert disk.commit.durable_id >= item_id

    threads = [start(put_and_wait) for _ in range(count)]
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert not disk.commit._tickets
    assert disk.commit._leader is None
