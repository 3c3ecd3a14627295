"""Group commit: many producers wait for durability, few syncs.

One thread at a time syncs, the leader; whoever comes meanwhile leaves a ticket and sleeps. After its sync the leader
completes every ticket that it covered and hands the lead to a thread that is left. Nobody queues on a lock to find out
that its item is on disk already (rule R33).

The threads that a sync covered are woken in a chain: the leader wakes the first, and each, as the first thing it does,
the next. Woken all at once they would stand in line for the interpreter's lock: each would be woken there once more,
and come to the queue's lock together with all others. Who is to lead next is the middle one of the chain: by then
half of the others have put their next items, which the next sync covers.

An exception may strike anywhere, such as ``KeyboardInterrupt``. The lead is one attribute: who leaves it unused passes
it on; who has taken tickets out completes them, and who is in a chain wakes the next, in whatever way it ends.

NOTE ON LOCKING: ``_lock`` guards the tickets and is a leaf. It is not held during a sync or while a ticket is
completed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from kestrelpy._line import ThreadWaiter

if TYPE_CHECKING:
    from kestrelpy._promise import Promise

    Ticket: TypeAlias = ThreadWaiter | Promise[Any]

_DONE, _LEAD = "done", "lead"


class _Link(ThreadWaiter):
    """A thread in a chain of wake-ups. Not the main thread, where a handler of signals may run before it wakes anybody,
    and wait for those behind.
    """

    next: _Link | None = None  # set under the lock, in one step with leaving the tickets
    news: str | None = None  # as above: what it is woken with; None: it has not left them after all

    def wake_next(self) -> None:
        """May be repeated."""
        if self.next is not None and self.next.news is not None:
            self.next.give(self.next.news)


class GroupCommit:
    """Tickets for ids that are to become durable.

    ``sync_once`` syncs and returns the highest id then on disk; what it raises reaches every ticket. ``schedule``
    arranges for ``run`` to be called soon on another thread: for tickets that have no thread of their own.
    """

    def __init__(self, sync_once: Callable[[], int], schedule: Callable[[], object]) -> None:
        self._sync_once = sync_once
        self._schedule = schedule
        self._lock = threading.Lock()
        self._tickets: list[tuple[int, Ticket]] = []  # guarded by self._lock
        self._leader: object = None  # guarded by self._lock: whose turn it is to sync, by its ticket
        self._error: BaseException | None = None  # guarded by self._lock
        self.durable_id = 0
        self.sync_count = 0

    def wait(self, item_id: int, *, holding: bool = False) -> None:
        """Return when ``item_id`` is on disk. Raises what the sync that was to bring it there raised.

        ``holding``: the caller has locks of its own. A sync by this thread then completes no future, as that runs what
        users call back: another one does, soon.
        """
        ticket = ThreadWaiter() if threading.get_ident() == threading.main_thread().ident else _Link()
        try:
            with self._lock:
                if self.durable_id >= item_id:  # first: what is on disk stays so, whatever has failed since
                    return
                if self._error is not None:
                    raise self._error
                leads = self._leader is None
                if leads:
                    self._leader = ticket
                else:
                    self._tickets.append((item_id, ticket))
            if not leads:  # and not by another look: who fails meanwhile takes the lead from everybody
                ticket.wait(None)
                if isinstance(ticket, _Link):
                    ticket.wake_next()
                if ticket.result() is _DONE:
                    return
            self._lead(ticket, holding)
            if self.durable_id < item_id and self._error is not None:  # there was nothing left to sync
                raise self._error
        except BaseException:  # also an interrupt: the lead must not be left with a thread that is gone
            self._leave(ticket)
            raise

    def add(self, item_id: int, ticket: Promise[int], *, soon: bool) -> None:
        """Complete ``ticket`` with ``item_id`` once that is on disk; with ``soon``, see to it that a sync comes."""
        with self._lock:
            error, done, leader = self._error, self.durable_id >= item_id, self._leader
            if error is None and not done:
                self._tickets.append((item_id, ticket))
        if error is not None or done:
            _complete([(item_id, ticket)], None if done else error)
        elif soon and leader is None:
            self._schedule()

    def run(self) -> None:
        """One sync on this thread, unless one is under way: then that one's leader sees to what is left."""
        leader = object()
        try:
            with self._lock:
                if self._leader is not None or self._error is not None:
                    return
                self._leader = leader
            self._lead(leader)
        except BaseException:
            self._pass_on(leader)
            raise

    def note(self, durable_id: int) -> None:
        """Everything up to ``durable_id`` is on disk by other means (a rotation)."""
        self._complete_through(durable_id)

    def fail(self, error: BaseException) -> None:
        """No sync will be believed any more (R9): whoever waits or comes for what is not on disk gets ``error``."""
        covered: list[tuple[int, Ticket]] = []
        left: list[tuple[int, Ticket]] = []
        try:
            with self._lock:
                self._error = error
                covered = self._take_covered_locked(threads_only=False)
                left, self._tickets = self._tickets, []
                self._leader = None
            _complete(covered)
            _complete(left, error)
        except BaseException:
            _complete(covered)
            _complete(left, error)
            raise

    def _lead(self, leader: object, holding: bool = False) -> None:
        try:
            durable_id = self._sync_once()
        except MemoryError:  # as an interrupt: whether the sync was done is unknown, and another will say
            raise
        except Exception as error:
            self.fail(error)
            raise
        self._finish(leader, durable_id, holding)

    def _finish(self, leader: object, durable_id: int, holding: bool = False) -> None:
        """A sync has brought everything up to ``durable_id`` to the disk."""
        self.sync_count += 1
        self._complete_through(durable_id, holding, leader)
        self._pass_on(leader)  # unless it has been, in the chain

    def _complete_through(self, durable_id: int, holding: bool = False, leader: object = None) -> None:
        covered: list[tuple[int, Ticket]] = []
        try:
            with self._lock:
                self.durable_id = max(self.durable_id, durable_id)
                covered = self._take_covered_locked(holding, leader)
            _complete(_without_followers(covered))
        except BaseException:
            with self._lock:
                covered += self._take_covered_locked(holding, leader)
            _complete(covered)
            raise

    def _take_covered_locked(self, threads_only: bool, leader: object = None) -> list[tuple[int, Ticket]]:
        """Take out the tickets that are covered, and among them the one whose turn it is to lead after ``leader``."""
        covered: list[tuple[int, Ticket]] = []
        left: list[tuple[int, Ticket]] = []
        for entry in self._tickets:
            is_ready = entry[0] <= self.durable_id and not (threads_only and not isinstance(entry[1], ThreadWaiter))
            (covered if is_ready else left).append(entry)
        heir = None
        if leader is not None and self._leader is leader:
            heir = next((ticket for _, ticket in left if isinstance(ticket, _Link)), None)
        if heir is not None:
            left = _without(left, heir)
            covered.insert(len(covered) // 2, (0, heir))
        _chain(covered, heir)
        self._tickets = left  # from here on there is no call, and so no interrupt
        if heir is not None:
            heir.news = _LEAD
            self._leader = heir
        return covered

    def _leave(self, ticket: ThreadWaiter) -> None:
        """The thread of this ticket will not wait any more, not lead, and not be woken to wake the next."""
        with self._lock:
            self._tickets = _without(self._tickets, ticket)
        if isinstance(ticket, _Link):
            ticket.wake_next()
        self._pass_on(ticket)

    def _pass_on(self, leader: object) -> None:
        """If ``leader`` has the lead, hand it to a waiting thread; without one, let somebody else sync for the tickets
        that are left.
        """
        heir: Ticket | None = None
        try:
            with self._lock:
                if self._leader is not leader:
                    return
                others = _without(self._tickets, leader)
                heir = next((ticket for _, ticket in others if isinstance(ticket, ThreadWaiter)), None)
                left = _without(others, heir)
                self._tickets, self._leader = left, heir
            if heir is not None:
                heir.give(_LEAD)
            elif self._tickets:
                self._schedule()
        except BaseException:
            if self._leader is leader:
                self._pass_on(leader)
            elif heir is not None:
                heir.give(_LEAD)
            elif self._tickets:
                self._schedule()
            raise


def _without(tickets: list[tuple[int, Ticket]], gone: object) -> list[tuple[int, Ticket]]:
    # Not where a lock is held: at the jumps of such a loop CPython 3.13 does not see the "with".
    return [entry for entry in tickets if entry[1] is not gone]


def _chain(covered: list[tuple[int, Ticket]], heir: _Link | None) -> None:
    before: _Link | None = None
    for _, ticket in covered:
        if isinstance(ticket, _Link):
            if before is not None:
                before.next = ticket
            if ticket is not heir:
                ticket.news = _DONE
            before = ticket


def _without_followers(covered: list[tuple[int, Ticket]]) -> list[tuple[int, Ticket]]:
    """Those of ``covered`` that nobody in the chain wakes: its first link, and who is in none."""
    links = [entry for entry in covered if isinstance(entry[1], _Link)]
    return links[:1] + [entry for entry in covered if not isinstance(entry[1], _Link)]


def _complete(tickets: list[tuple[int, Ticket]], error: BaseException | None = None) -> None:
    """May be repeated after an interrupt."""
    for item_id, ticket in tickets:
        if not ticket.claim():
            continue
        if error is not None:
            ticket.fail(error)
        elif isinstance(ticket, _Link):
            ticket.give(ticket.news)
        else:
            ticket.give(_DONE if isinstance(ticket, ThreadWaiter) else item_id)
