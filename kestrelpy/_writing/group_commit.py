"""Group commit: many producers wait for durability, and few syncs serve them.

One thread at a time syncs: the leader. A thread that comes during a sync leaves a ticket and sleeps. After the sync,
the leader completes every ticket that the sync covered, and passes the lead to a thread that still waits. No thread
queues on a lock just to find that its item is on disk already (rule R33).

The threads that a sync covered wake each other in a chain. The leader wakes the first thread; each thread wakes the
next one before it does anything else. If all were woken at once, they would queue for the interpreter's lock: each
thread would be woken there a second time, and would reach the queue's lock together with all the others. The next
leader is the middle thread of the chain: when it wakes, half of the others have put their next items, and the next sync
covers those.

An exception such as ``KeyboardInterrupt`` may strike anywhere. The lead is one attribute, and a thread that does not
use the lead passes it on. A thread that has taken out tickets completes them. A thread in a chain wakes the next one,
however its own call ends.

A leader never runs callbacks of users: a callback that waits for a sync would wait for itself. A leader may wake
threads, as that runs no code of theirs. All other notifications are collected in ``notifications``. ``notify`` delivers
them after the lead has been passed on. The same thread calls ``notify``, or another one if this thread holds locks or
syncs for every queue.

NOTE ON LOCKING: ``_lock`` guards the tickets and is a leaf. It is not held during a sync or while a ticket is
completed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kestrelpy._waiting.waiters import ThreadWaiter, Waiter, is_deep
from kestrelpy.errors import KestrelError, copy_of

if TYPE_CHECKING:
    from kestrelpy._waiting.put_future import PutFuture
    from kestrelpy.clock import Timer

    Ticket: TypeAlias = ThreadWaiter | PutFuture[Any]
    Notification: TypeAlias = tuple[Waiter | PutFuture[Any], Any, BaseException | None]

_DONE, _LEAD = "done", "lead"


class Absent(NamedTuple):
    """A leader that is a thread elsewhere, and keeps the lead: it is asked to make progress, and says ``note_later``.

    ``ask``: called after each ticket, with no lock held; it must be short. A thread waits ``patience`` seconds
    (``None``: for ever), and raises ``late(first_id, last_id)``.
    """

    ask: Callable[[], object]
    patience: float | None
    late: Callable[[int, int], Exception]


SYNC_FRAMES = 30
"""This many stack frames are enough for a sync, and for scheduling its notifications."""
FEW_FRAMES = 8
"""This many stack frames are enough to withdraw a ticket and to pass on the lead."""


class _Link(ThreadWaiter):
    """A thread in a chain of wake-ups.

    The main thread is never in a chain: a signal handler may run there before the thread wakes the next one, and the
    handler may wait for the threads after it.
    """

    next: _Link | None = None  # set under the lock, in one step with the removal of the ticket
    wake_value: str | None = None  # set likewise: the value to wake this thread with; None: its ticket was not removed

    def wake_next(self) -> None:
        """Wake the next thread of the chain. May be repeated."""
        if self.next is not None and self.next.wake_value is not None:
            self.next.give(self.next.wake_value)


class GroupCommit:
    """Tickets for ids that wait to become durable.

    ``sync_once`` syncs and returns the highest id then on disk; an exception of it reaches every ticket. ``schedule``
    arranges for another thread to call ``run`` soon, for tickets without a thread of their own; it raises
    ``RuntimeError`` if no thread can be started. ``serve`` serves consumers that wait for items which are on disk now;
    it is called after each sync, with no lock held and never by a leader. ``notify_later`` makes another thread call
    ``notify``. ``leader``: one that always leads; then no other thread does, and ``sync_once`` is not called.
    """

    def __init__(
        self,
        sync_once: Callable[[], int],
        schedule: Callable[[], object],
        serve: Callable[[], object] = bool,
        notify_later: Callable[[], object] | None = None,
        *,
        leader: Absent | None = None,
    ) -> None:
        self._sync_once = sync_once
        self._schedule = schedule
        self._serve = serve
        self._notify_later = notify_later or self.notify
        self._lock = threading.Lock()
        self._tickets: list[tuple[int, Ticket]] = []  # guarded by self._lock
        self._absent = leader
        self._leader: object = leader  # guarded by self._lock: the ticket of the thread that leads
        self._error: BaseException | None = None  # guarded by self._lock
        self.notifications: list[Notification] = []  # guarded by self._lock: notifications to deliver
        self.notifies = False  # a thread is about to call notify()
        self._runs = False  # a thread is about to call run()
        self.timer: Timer | None = None  # of the next sync in the background; closing the queue cancels it
        self.durable_id = 0
        self.sync_count = 0

    def wait(self, item_id: int, *, holding: bool = False, first_id: int = 0) -> None:
        """Return when ``item_id`` is on disk. Raises the error of the sync that should have made it durable.
        ``first_id``: of the items that the caller waits for, for an error.

        ``holding``: the caller holds locks. Then this thread delivers no notifications, as they run callbacks of users;
        another thread delivers them soon.
        """
        deep = is_deep()  # once: this check costs as much as everything else here
        if deep:
            _need_frames(FEW_FRAMES)
        ticket = ThreadWaiter() if threading.get_ident() == threading.main_thread().ident else _Link()
        try:
            with self._lock:
                if self.durable_id >= item_id:  # first: an item on disk stays there, whatever has failed since
                    return
                if self._error is not None:
                    raise copy_of(self._error)
                leads = self._leader is None
                if leads:
                    self._leader = ticket
                else:
                    self._tickets.append((item_id, ticket))
            if not leads:  # not ``self._leader is ticket``: a fail() meanwhile may have taken the lead away
                if self._absent is None:
                    ticket.wait(None)
                else:
                    self._wait_for(self._absent, ticket, first_id, item_id)
                if isinstance(ticket, _Link):
                    ticket.wake_next()
                if ticket.result() is _DONE:
                    return
            self._lead(ticket, holding or deep)
            if self.durable_id < item_id and self._error is not None:  # there was no file left to sync
                raise copy_of(self._error)
        except BaseException:  # also an interrupt: a thread that is gone must not keep the lead
            self._leave(ticket)
            self._notify(holding or deep)
            raise

    def _wait_for(self, absent: Absent, ticket: ThreadWaiter, first_id: int, last_id: int) -> None:
        absent.ask()
        if not ticket.wait(absent.patience):
            if self.durable_id < last_id:
                raise absent.late(first_id or last_id, last_id)
            ticket.wait(None)  # it is being woken

    def add(self, item_id: int, ticket: PutFuture[int], *, soon: bool) -> None:
        """Complete ``ticket`` with ``item_id`` once that is on disk. With ``soon``, schedule a sync if none runs."""
        with self._lock:
            error, done, leader = self._error, self.durable_id >= item_id, self._leader
            if error is None and not done:
                self._tickets.append((item_id, ticket))
        if error is not None or done:
            _deliver([(ticket, item_id, None if done else error)])
        elif self._absent is not None:
            self._absent.ask()
        elif soon and leader is None:
            try:
                self._schedule_once()
            except RuntimeError:  # no thread can be started: this one syncs, and the ticket gets the result
                with contextlib.suppress(KestrelError):
                    self.wait(item_id)

    def run(self) -> None:
        """Sync once on this thread. If a sync is under way, return: its leader ensures a sync for the tickets left.

        This thread delivers no notifications; another thread does.
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
        """Make another thread sync; if none can be started, sync on this thread. With no lock held."""
        try:
            self._schedule_once()
        except RuntimeError:
            with contextlib.suppress(KestrelError):  # the waiters get the error
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
        """Note that everything up to ``durable_id`` is on disk by other means (a rotation). With no lock held."""
        self._complete_through(durable_id)
        self.notify()

    def note_later(self, durable_id: int) -> None:
        """``note``, but another thread delivers the notifications: this one is a leader for others, too."""
        self._complete_through(durable_id)
        self._notify_later()

    def fail(self, error: BaseException) -> None:
        """Trust no sync from here on (R9): every wait for an item that is not on disk raises ``error``, now and later.

        Tickets without a thread of their own get ``error`` from the next ``notify``.
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

    def add_notifications(self, waiters: list[Waiter], error: BaseException) -> None:
        """Let the next ``notify`` fail these waiters with ``error``. May be repeated."""
        added: list[Notification] = [(waiter, None, error) for waiter in waiters]
        with self._lock:
            self.notifications += added

    def notify(self) -> None:
        """Deliver the notifications in ``notifications``, and serve consumers that wait for items which are durable
        now.

        This runs callbacks of users. So call it with no lock held, and not while leading.
        """
        notifications: list[Notification] = []
        self.notifies = False
        try:
            try:
                if self.notifications:  # a thread that adds to it from here on calls notify() itself
                    with self._lock:
                        notifications, self.notifications = self.notifications, notifications
                self._serve()
            finally:
                _deliver(notifications)
        except BaseException:
            _deliver(notifications)
            raise

    @property
    def needs_notify(self) -> bool:
        """True if there are notifications to deliver, and no thread is about to deliver them."""
        return bool(self.notifications) and not self.notifies

    def _notify(self, holding: bool) -> None:
        if holding:
            self._notify_later()
        else:
            self.notify()

    def _lead(self, leader: object, holding: bool = False) -> None:
        """Sync as the leader. ``holding``: this thread must not notify, as it holds locks or is deep in its stack."""
        if holding and is_deep(SYNC_FRAMES):
            # Let another thread lead: the others must not wait for a leader that cannot wake them.
            raise RecursionError("no room on the stack for a sync")
        try:
            durable_id = self._sync_once()
        except MemoryError:  # like an interrupt: it is unknown whether the sync was done, and the next one will show
            raise
        except Exception as error:
            self.fail(copy_of(error))
            raise
        self._finish(leader, durable_id, holding)

    def _finish(self, leader: object, durable_id: int, holding: bool = False) -> None:
        """After a sync that made everything up to ``durable_id`` durable: complete tickets and pass on the lead."""
        self.sync_count += 1
        self._complete_through(durable_id, leader)
        self._pass_on(leader)  # unless the chain has passed on the lead
        self._notify(holding)

    def _complete_through(self, durable_id: int, leader: object = None) -> None:
        """Wake the threads whose items are durable, and add the other notifications to ``notifications``."""
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
        """Take out the tickets of durable items. Returns the threads to wake, and adds all other tickets to
        ``notifications``.

        If ``leader`` has the lead, it passes to the first waiting thread that may be in a chain; that one is returned,
        too.
        """
        covered: list[tuple[int, Ticket]] = []
        left: list[tuple[int, Ticket]] = []
        notifications: list[Notification] = []
        for entry in self._tickets:
            item_id, ticket = entry
            if item_id > self.durable_id:
                left.append(entry)
            elif isinstance(ticket, ThreadWaiter):
                covered.append(entry)
            else:
                notifications.append((ticket, item_id, None))
        next_leader = None
        if leader is not None and self._leader is leader:
            next_leader = next((ticket for _, ticket in left if isinstance(ticket, _Link)), None)
        if next_leader is not None:
            left = _without(left, next_leader)
            covered.insert(len(covered) // 2, (0, next_leader))
        _chain(covered, next_leader)
        self.notifications += notifications  # from here on there is no call, and so no interrupt
        self._tickets = left
        if next_leader is not None:
            next_leader.wake_value = _LEAD
            self._leader = next_leader
        return covered

    def _take_left_locked(self, error: BaseException) -> list[tuple[int, Ticket]]:
        """Take out all tickets. Returns those of threads; for the others, adds ``error`` to ``notifications``."""
        threads = [entry for entry in self._tickets if isinstance(entry[1], ThreadWaiter)]
        notifications: list[Notification] = [
            (each, None, error) for _, each in self._tickets if not isinstance(each, ThreadWaiter)
        ]
        self.notifications += notifications  # no call from here on
        self._tickets = []
        return threads

    def _leave(self, ticket: ThreadWaiter) -> None:
        """Withdraw a thread: remove its ticket, wake the next thread of its chain, and pass on its lead."""
        with self._lock:
            self._tickets = _without(self._tickets, ticket)
        if isinstance(ticket, _Link):
            ticket.wake_next()
        self._pass_on(ticket)

    def _pass_on(self, leader: object) -> None:
        """If ``leader`` has the lead, pass the lead to a waiting thread.

        If no thread waits but other tickets are left, another thread is made to sync for them.
        """
        next_leader: Ticket | None = None
        try:
            with self._lock:
                if self._leader is not leader:
                    return
                if not self._tickets:
                    self._leader = None
                    return
                others = _without(self._tickets, leader)
                next_leader = next((ticket for _, ticket in others if isinstance(ticket, ThreadWaiter)), None)
                left = _without(others, next_leader)
                self._tickets, self._leader = left, next_leader
            if next_leader is not None:
                next_leader.give(_LEAD)
            elif self._tickets:
                self.sync_soon()
        except BaseException:
            if self._leader is leader:
                self._pass_on(leader)
            elif next_leader is not None:
                next_leader.give(_LEAD)
            elif self._tickets:
                self.sync_soon()
            raise


def _need_frames(count: int) -> None:
    """Raise ``RecursionError`` here, if at all, and not later, where a leader has to pass on the lead."""
    if count:
        _need_frames(count - 1)


def _without(tickets: list[tuple[int, Ticket]], gone: object) -> list[tuple[int, Ticket]]:
    # Not where a lock is held: docs/interrupts.md, rule 3.
    return [entry for entry in tickets if entry[1] is not gone]


def _chain(covered: list[tuple[int, Ticket]], next_leader: _Link | None) -> None:
    """Link the threads of ``covered``, each to the next. ``next_leader`` is the next leader."""
    before: _Link | None = None
    for _, ticket in covered:
        if isinstance(ticket, _Link):
            if before is not None:
                before.next = ticket
            if ticket is not next_leader:
                ticket.wake_value = _DONE
            before = ticket


def _without_followers(covered: list[tuple[int, Ticket]]) -> list[tuple[int, Ticket]]:
    """The tickets of ``covered`` that the leader must wake: the first link of the chain, and all that are no links."""
    links = [entry for entry in covered if isinstance(entry[1], _Link)]
    return links[:1] + [entry for entry in covered if not isinstance(entry[1], _Link)]


def _complete(tickets: list[tuple[int, Ticket]], error: BaseException | None = None) -> None:
    """Wake the threads of these tickets. May be repeated after an interrupt."""
    for _, ticket in tickets:
        if error is not None:
            ticket.fail(copy_of(error))
        else:
            ticket.give(ticket.wake_value if isinstance(ticket, _Link) else _DONE)


def _deliver(notifications: list[Notification]) -> None:
    """Deliver each notification, even if callbacks of users raise. Raises the last of these exceptions at the end.

    May be repeated.
    """
    raised: BaseException | None = None
    for ticket, result, error in notifications:
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
