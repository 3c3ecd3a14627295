"""Faults of locks and threads, planted by patching, each of which the scheduler has to find.

A fault is a context manager that puts it in; it names the scenes in which to look for it, and what is said of it.
Nothing is patched while a schedule runs: of two tasks that patch the same name in turn, the one that began first ends
first, and what the other restores at its end is the first one's patch, for good.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kestrelpy._journal.journal import Journal
from kestrelpy._reading.dispatch import Dispatcher, Notify, fail_all
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._waiting.waiters import ThreadWaiter, Waiter
from kestrelpy._writing.group_commit import GroupCommit, _Link
from kestrelpy._writing.put_path import PutPath
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.memory._simple import SimpleBlockingQueue


@dataclass(frozen=True)
class Race:
    """A fault: how to plant it, where it shows, and a part of what is said of it."""

    plant: Callable[[], AbstractContextManager[None]]
    scenes: tuple[str, ...]
    says: str


RACES: dict[str, Race] = {}


def race(says: str, *scenes: str) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        RACES[function.__name__] = Race(contextmanager(function), scenes, says)

    return note


MEMORY = ("traffic of SimpleBlockingQueue", "room of SimpleBlockingQueue")
NOT_WOKEN = "deadlock|nobody gets anywhere|not woken|no item within|no room within|is full"


# -- the line --------------------------------------------------------------------------------------------------------


@race(NOT_WOKEN, "flow", "detached")
def looks_and_then_registers() -> Iterator[None]:
    """A consumer that found nothing enters the line and does not look again: an item put in between stays."""

    def enter(self: Dispatcher, waiter: Waiter) -> None:
        backlog = self.backlog
        with backlog.lock:
            backlog.check_usable()
            self._line.add(waiter)
            backlog.fast = False
            self.source.waiting[self] = None
        self.source.polls()

    with patch.object(Dispatcher, "_enter", enter):
        yield


@race("twice|InvalidStateError|QueueEmpty|nobody gets|deadlock|are missing|AssertionError", *MEMORY)
def claims_without_removing() -> Iterator[None]:
    """The first in line is served and stays in line: the next item goes to him too."""

    def settle(self: SimpleBlockingQueue[Any]) -> None:
        with self._lock:
            waiter = self._line.head()
            item = self._items.popleft() if waiter is not None and self._items else None
        if item is not None:
            assert waiter is not None
            waiter.give(item)
            with self._lock:
                self._line.remove(waiter)

    with patch.object(SimpleBlockingQueue, "_match", settle):
        yield


@race(NOT_WOKEN, "flow", "detached")
def wakes_before_it_stores() -> Iterator[None]:
    """A put serves the line and stores its item after that."""
    real, real_wake = PutPath._store, LocalSource.wake
    storing: set[int] = set()

    def store(self: PutPath, *arguments: Any, **options: Any) -> range:
        self.source.wake()
        storing.add(get_ident())
        try:
            return real(self, *arguments, **options)
        finally:
            storing.discard(get_ident())

    def wake(self: LocalSource) -> None:
        if get_ident() not in storing:
            real_wake(self)

    never = property(lambda _: False, lambda *_: None)
    with (
        patch.object(PutPath, "_store", store),
        patch.object(LocalSource, "wake", wake),
        patch.object(QueueStatus, "fast", never),
    ):
        yield


@race("was given|was not woken|deadlock|nobody gets|InvalidStateError", "flow", "coroutines")
def removes_in_a_second_step() -> Iterator[None]:
    """Who is first in line is found and served, and taken out after that: two producers serve the same one."""

    def hand_off(self: Dispatcher) -> None:
        backlog = self.backlog
        while True:
            with backlog.lock:
                waiter = self._line.head()
                found = None if waiter is None else backlog.find([])
                if waiter is None or found is None:
                    return
                item = backlog.opened[found[0]] = backlog.make_item(*found)
            if waiter.claim():
                waiter.give(item)
            with backlog.lock:
                self._line.remove(waiter)
                self._after_line_locked()

    with patch.object(Dispatcher, "hand_off", hand_off):
        yield


@race("waits in line and holds", "flow", "limited")
def waits_with_the_lock_held() -> Iterator[None]:
    """A consumer sleeps in line under its reader's lock."""
    real = ThreadWaiter.wait

    def wait(self: ThreadWaiter, timeout: float | None) -> bool:
        owner = self._owner
        if not isinstance(owner, Dispatcher):
            return real(self, timeout)
        with owner.backlog.lock:
            return real(self, timeout)

    with patch.object(ThreadWaiter, "wait", wait):
        yield


@race("completed with .* held", "flow", "closing")
def completes_under_the_lock() -> Iterator[None]:
    """What a user calls back runs with the reader's lock held."""

    def break_(self: Dispatcher, error: Exception, notify: Notify = fail_all) -> None:
        backlog = self.backlog
        with backlog.lock:
            backlog.broken, backlog.fast, backlog.opened = error, False, {}
            for waiter in self._line.drain():
                waiter.fail(error)
            self._after_line_locked()

    with patch.object(Dispatcher, "fail_waiting", break_):
        yield


@race("cancelled|lost|deadlock|are missing|InvalidStateError", "coroutines of SimpleBlockingQueue", "coroutines")
def a_cancelled_task_keeps_what_it_was_given() -> Iterator[None]:
    with patch("kestrelpy._waiting.waiters.Sleeper._send_back", lambda self: None):
        yield


# -- group commit ----------------------------------------------------------------------------------------------------


@race("acknowledged before its sync|has lost", "cut", "failing", "flow")
def followers_are_told_before_the_sync() -> Iterator[None]:
    def wait(self: GroupCommit, item_id: int, *, holding: bool = False, first_id: int = 0) -> None:
        if self._leader is None:
            real(self, item_id, holding=holding)

    real = GroupCommit.wait
    with patch.object(GroupCommit, "wait", wait):
        yield


@race("has lost|was on disk and is not|were on disk; the journal ends", "cut")
def the_end_is_read_after_the_sync() -> Iterator[None]:
    """What was put while the sync went on is taken for durable."""
    real = Syncer._sync_once

    def sync_once(self: Syncer) -> int:
        real(self)
        with self._source.lock:
            tail_id, total_bytes = self._journal._end()
            self._journal.durable_id = tail_id
            self._source.show_durable_locked(tail_id, total_bytes)
        return tail_id

    with patch.object(Syncer, "_sync_once", sync_once):
        yield


@race(NOT_WOKEN, "failing")
def a_failed_sync_is_told_to_the_leader_alone() -> Iterator[None]:
    def fail(self: GroupCommit, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._tickets, self._leader = [], None

    with patch.object(GroupCommit, "fail", fail):
        yield


@race(NOT_WOKEN, "flow", "failing")
def the_lead_is_not_passed_on() -> Iterator[None]:
    def pass_on(self: GroupCommit, leader: object) -> None:
        with self._lock:
            if self._leader is leader:
                self._leader = None

    with patch.object(GroupCommit, "_pass_on", pass_on):
        yield


@race(NOT_WOKEN, "flow", "failing")
def who_is_woken_wakes_nobody() -> Iterator[None]:
    with patch.object(_Link, "wake_next", lambda self: None):
        yield


@race("acknowledged before its sync|nobody gets anywhere|deadlock", "crowd")
def who_is_to_lead_is_told_that_it_is_done() -> Iterator[None]:
    def wake_next(self: _Link) -> None:
        if self.next is not None:
            self.next.give("done")

    with patch.object(_Link, "wake_next", wake_next):
        yield


@race("acknowledged before its sync", "one_sync_fails")
def a_journal_that_has_failed_has_nothing_to_sync() -> Iterator[None]:
    """A rotation's sync has failed, and a leader finds no file: it takes that for good."""

    def target(self: Journal) -> Any:
        return self._file, self.durable_id if self._file is None else self._at[1]

    with patch.object(Journal, "sync_target", target):
        yield


@race(NOT_WOKEN, "last_put", "one_sync_fails")
def who_leads_is_looked_up_twice() -> Iterator[None]:
    """Between the two looks everybody is told of a failure; this one is in no list by then."""

    def wait(self: GroupCommit, item_id: int, *, holding: bool = False, first_id: int = 0) -> None:
        ticket = ThreadWaiter()
        with self._lock:
            if self.durable_id >= item_id:
                return
            if self._error is not None:
                raise self._error
            if self._leader is None:
                self._leader = ticket
            else:
                self._tickets.append((item_id, ticket))
        if self._leader is not ticket:
            ticket.wait(None)
            if ticket.result() == "done":
                return
        self._lead(ticket, holding)

    with patch.object(GroupCommit, "wait", wait):
        yield


@race("is of a put that raised", "last_put", "closing")
def an_error_comes_before_what_is_on_disk() -> Iterator[None]:
    """A put whose item a closing queue has synced is told that the queue is closed."""
    real = GroupCommit.wait

    def wait(self: GroupCommit, item_id: int, *, holding: bool = False, first_id: int = 0) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
        real(self, item_id, holding=holding)

    with patch.object(GroupCommit, "wait", wait):
        yield


@race("completed by a leader|deadlock", "crowd", "flow")
def a_leader_calls_back() -> Iterator[None]:
    """Consumers are served, and futures completed, before the lead is passed on."""
    real = GroupCommit._pass_on

    def pass_on(self: GroupCommit, leader: object) -> None:
        self.notify()
        real(self, leader)

    with patch.object(GroupCommit, "_pass_on", pass_on):
        yield


@race("on the thread that every queue's syncs count on", "flow")
def the_thread_of_syncs_calls_back() -> Iterator[None]:
    with patch.object(GroupCommit, "_notify", lambda self, holding: self.notify()):
        yield


@race("completed with .* held", "readers_come_and_go", "detached", "maintenance_dies", "flow")
def a_checkpoint_completes_futures() -> Iterator[None]:
    real = GroupCommit.wait
    with patch.object(GroupCommit, "wait", lambda self, item_id, holding=False, first_id=0: real(self, item_id)):
        yield
