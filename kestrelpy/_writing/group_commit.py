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

Nobody who leads runs what users call back: a callback that waits for a sync would wait for itself. A leader wakes
threads, which runs nothing of theirs; who else must be notified is noted (``owed``) and notified when the lead has been
passed on (``notify``), by the same thread, or by another if this one holds locks or syncs for every queue.

NOTE ON LOCKING: ``_lock`` guards the tickets and is a leaf. It is not held during a sync or while a ticket is
completed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from kestrelpy._waiting.waiters import ThreadWaiter, Waiter, is_deep
from kestrelpy.errors import KestrelError, copy_of

if TYPE_CHECKING:
    from kestrelpy._waiting.put_future import PutFuture
    from kestrelpy.clock import Timer

    Ticket: TypeAlias = ThreadWaiter | PutFuture[Any]
    Debt: TypeAlias = tuple[Waiter | PutFuture[Any], Any, BaseException | None]

_DONE, _LEAD = "done", "lead"
SYNC_FRAMES = 30
"""So many frames on the stack are enough for a sync, and for telling of it later."""
FEW_FRAMES = 8
"""What it takes to leave the tickets and to pass the lead on."""


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
    arranges for ``run`` to be called soon on another thread, for tickets that have no thread of their own; it raises
    ``RuntimeError`` if there is none. ``serve`` is called after each sync, with no lock held and by nobody who leads,
    for those who wait for what is on disk now. ``notify_later`` sees to it that another thread calls ``notify``.
    """

    def __init__(
        self,
        sync_once: Callable[[], int],
        schedule: Callable[[], object],
        serve: Callable[[], object] = bool,
        notify_later: Callable[[], object] | None = None,
    ) -> None:
        self._sync_once = sync_once
        self._schedule = schedule
        self._serve = serve
        self._notify_later = notify_later or self.notify
        self._lock = threading.Lock()
        self._tickets: list[tuple[int, Ticket]] = []  # guarded by self._lock
        self._leader: object = None  # guarded by self._lock: whose turn it is to sync, by its ticket
        self._error: BaseException | None = None  # guarded by self._lock
        self.owed: list[Debt] = []  # guarded by self._lock: who is to be told, and of what
        self.notifies = False  # somebody is about to call notify()
        self._runs = False  # somebody is about to call run()
        self.timer: Timer | None = None  # the next sync in the background, for who closes the queue
        self.durable_id = 0
        self.sync_count = 0

    def wait(self, item_id: int, *, holding: bool = False) -> None:
        """Return when ``item_id`` is on disk. Raises what the sync that was to bring it there raised.

        ``holding``: the caller has locks of its own. Then this thread tells nobody, as that runs what users call back:
        another one does, soon.
        """
        deep = is_deep()  # once: to find that there is room costs as much as all else here
        if deep:
            _need_frames(FEW_FRAMES)
        ticket = ThreadWaiter() if threading.get_ident() == threading.main_thread().ident else _Link()
        try:
            with self._lock:
                if self.durable_id >= item_id:  # first: what is on disk stays so, whatever has failed since
                    return
                if self._error is not None:
                    raise copy_of(self._error)
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
            self._lead(ticket, holding or deep)
            if self.durable_id < item_id and self._error is not None:  # there was nothing left to sync
                raise copy_of(self._error)
        except BaseException:  # also an interrupt: the lead must not be left with a thread that is gone
            self._leave(ticket)
            self._notify(holding or deep)
            raise

    def add(self, item_id: int, ticket: PutFuture[int], *, soon: bool) -> None:
        """Complete ``ticket`` with ``item_id`` once that is on disk; with ``soon``, see to it that a sync comes."""
        with self._lock:
            error, done, leader = self._error, self.durable_id >= item_id, self._leader
            if error is None and not done:
                self._tickets.append((item_id, ticket))
        if error is not None or done:
            _pay([(ticket, item_id, None if done else error)])
        elif soon and leader is None:
            try:
                self._schedule_once()
            except RuntimeError:  # no thread can be started: this one syncs, and the ticket says how that went
                with contextlib.suppress(KestrelError):
                    self.wait(item_id)

    def run(self) -> None:
        """One sync on this thread, unless one is under way: then that one's leader sees to what is left. It tells
        nobody: another thread does.
        """
        self._runs = False  # before the look: a ticket from here on asks for the next one
        _need_frames(FEW_FRAMES)
        leader = object()
        try:
            with self._lock:
                if self._leader is not None or self._error is not None:
                    return
                self._leader = leader
            self._lead(leader, holding=True)
        except BaseException:
            self._pass_on(leader)
            self._notify(holding=True)
            raise

    def sync_soon(self) -> None:
        """See to it that another thread syncs; if none can be started, this one does. With no lock held."""
        try:
            self._schedule_once()
        except RuntimeError:
            with contextlib.suppress(KestrelError):  # whoever waits for it is told
                self.run()

    def _schedule_once(self) -> None:
        if not self._runs:
            try:
                self._runs = True
                self._schedule()
            except BaseException:
                self._runs = False
                raise

    def note(self, durable_id: int) -> None:
        """Everything up to ``durable_id`` is on disk by other means (a rotation). With no lock held."""
        self._complete_through(durable_id)
        self.notify()

    def fail(self, error: BaseException) -> None:
        """No sync will be believed any more (R9): whoever waits or comes for what is not on disk gets ``error``; those
        who have no thread of their own by the next ``notify``.
        """
        covered: list[tuple[int, Ticket]] = []
        left: list[tuple[int, Ticket]] = []
        try:
            with self._lock:
                self._error = error
                covered = self._take_covered_locked()
                left = self._take_left_locked(error)
                self._leader = None
            _complete(covered)
            _complete(left, error)
        except BaseException:
            _complete(covered)
            _complete(left, error)
            raise

    def owe(self, waiters: list[Waiter], error: BaseException) -> None:
        """These are to be told ``error`` by the next ``notify``. May be repeated."""
        debts: list[Debt] = [(waiter, None, error) for waiter in waiters]
        with self._lock:
            self.owed += debts

    def notify(self) -> None:
        """Tell everybody who is owed it, and serve those who wait for what has become durable. With no lock held, and
        by nobody who leads: this runs what users call back.
        """
        owed: list[Debt] = []
        self.notifies = False
        try:
            try:
                if self.owed:  # whoever adds to it from here on tells
                    with self._lock:
                        owed, self.owed = self.owed, owed
                self._serve()
            finally:
                _pay(owed)
        except BaseException:
            _pay(owed)
            raise

    @property
    def is_silent(self) -> bool:
        """Whether somebody is owed something, and nobody is about to tell."""
        return bool(self.owed) and not self.notifies

    def _notify(self, holding: bool) -> None:
        if holding:
            self._notify_later()
        else:
            self.notify()

    def _lead(self, leader: object, holding: bool = False) -> None:
        """``holding``: this thread tells nobody, as it has locks, or hardly room on the stack."""
        if holding and is_deep(SYNC_FRAMES):
            # Another thread leads: the others must not wait for one that can't tell them.
            raise RecursionError("no room on the stack for a sync")
        try:
            durable_id = self._sync_once()
        except MemoryError:  # as an interrupt: whether the sync was done is unknown, and another will say
            raise
        except Exception as error:
            self.fail(copy_of(error))
            raise
        self._finish(leader, durable_id, holding)

    def _finish(self, leader: object, durable_id: int, holding: bool = False) -> None:
        """A sync has brought everything up to ``durable_id`` to the disk."""
        self.sync_count += 1
        self._complete_through(durable_id, leader)
        self._pass_on(leader)  # unless it has been, in the chain
        self._notify(holding)

    def _complete_through(self, durable_id: int, leader: object = None) -> None:
        """Wake the threads that are covered, and note whom else to tell."""
        covered: list[tuple[int, Ticket]] = []
        try:
            with self._lock:
                self.durable_id = max(self.durable_id, durable_id)
                if self._tickets:
                    covered = self._take_covered_locked(leader)
            if covered:
                _complete(_without_followers(covered))
        except BaseException:
            with self._lock:
                covered += self._take_covered_locked(leader)
            _complete(covered)
            raise

    def _take_covered_locked(self, leader: object = None) -> list[tuple[int, Ticket]]:
        """Take out the tickets that are covered; the threads among them, and the one whose turn it is to lead after
        ``leader``. The others are owed it.
        """
        covered: list[tuple[int, Ticket]] = []
        left: list[tuple[int, Ticket]] = []
        owed: list[Debt] = []
        for entry in self._tickets:
            item_id, ticket = entry
            if item_id > self.durable_id:
                left.append(entry)
            elif isinstance(ticket, ThreadWaiter):
                covered.append(entry)
            else:
                owed.append((ticket, item_id, None))
        heir = None
        if leader is not None and self._leader is leader:
            heir = next((ticket for _, ticket in left if isinstance(ticket, _Link)), None)
        if heir is not None:
            left = _without(left, heir)
            covered.insert(len(covered) // 2, (0, heir))
        _chain(covered, heir)
        self.owed += owed  # from here on there is no call, and so no interrupt
        self._tickets = left
        if heir is not None:
            heir.news = _LEAD
            self._leader = heir
        return covered

    def _take_left_locked(self, error: BaseException) -> list[tuple[int, Ticket]]:
        """Take out all tickets; the threads among them. The others are owed ``error``."""
        threads = [entry for entry in self._tickets if isinstance(entry[1], ThreadWaiter)]
        owed: list[Debt] = [(each, None, error) for _, each in self._tickets if not isinstance(each, ThreadWaiter)]
        self.owed += owed  # no call from here on
        self._tickets = []
        return threads

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
                if not self._tickets:
                    self._leader = None
                    return
                others = _without(self._tickets, leader)
                heir = next((ticket for _, ticket in others if isinstance(ticket, ThreadWaiter)), None)
                left = _without(others, heir)
                self._tickets, self._leader = left, heir
            if heir is not None:
                heir.give(_LEAD)
            elif self._tickets:
                self.sync_soon()
        except BaseException:
            if self._leader is leader:
                self._pass_on(leader)
            elif heir is not None:
                heir.give(_LEAD)
            elif self._tickets:
                self.sync_soon()
            raise


def _need_frames(count: int) -> None:
    """Raise ``RecursionError`` here, and not where somebody who was made the leader has to pass that on."""
    if count:
        _need_frames(count - 1)


def _without(tickets: list[tuple[int, Ticket]], gone: object) -> list[tuple[int, Ticket]]:
    # Not where a lock is held: docs/interrupts.md, rule 3.
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
    """Wake these threads. May be repeated after an interrupt."""
    for _, ticket in tickets:
        if error is not None:
            ticket.fail(copy_of(error))
        else:
            ticket.give(ticket.news if isinstance(ticket, _Link) else _DONE)


def _pay(owed: list[Debt]) -> None:
    """Tell each of them, whatever is raised on the way by what they call back; the last of it is raised in the end.
    May be repeated.
    """
    raised: BaseException | None = None
    for ticket, result, error in owed:
        try:
            if ticket.claim():
                if error is None:
                    ticket.give(result)
                else:
                    ticket.fail(copy_of(error))
        except BaseException as struck:
            raised = struck
    if raised is not None:
        raise raised
