"""Group commit: many producers wait for durability, few syncs.

One thread at a time syncs, the leader; whoever comes meanwhile leaves a ticket and sleeps. After its sync the leader
completes every ticket that it covered, each with one wake-up, and hands the lead to the first thread that is left.
Nobody queues on a lock to find out that its item is on disk already (rule R33).

NOTE ON LOCKING: ``_lock`` guards the tickets and is a leaf. It is not held during a sync or while a ticket is
completed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kestrelpy._line import ThreadWaiter, Waiter

_DONE, _LEAD = "done", "lead"


class GroupCommit:
    """Tickets for ids that are to become durable.

    ``sync_once`` syncs and returns the highest id then on disk; what it raises reaches every ticket. ``schedule``
    arranges for ``run`` to be called soon on another thread: for tickets that have no thread of their own.
    """

    def __init__(self, sync_once: Callable[[], int], schedule: Callable[[], object]) -> None:
        self._sync_once = sync_once
        self._schedule = schedule
        self._lock = threading.Lock()
        self._tickets: list[tuple[int, Waiter]] = []  # guarded by self._lock
        self._syncing = False  # guarded by self._lock
        self._error: BaseException | None = None  # guarded by self._lock
        self.durable_id = 0
        self.sync_count = 0

    def wait(self, item_id: int) -> None:
        """Return when ``item_id`` is on disk. Raises what the sync that was to bring it there raised."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.durable_id >= item_id:
                return
            if self._syncing:
                ticket = ThreadWaiter()
                self._tickets.append((item_id, ticket))
            else:
                self._syncing = True
                ticket = None
        if ticket is None or self._sleep(ticket) is _LEAD:
            self._lead()

    def add(self, item_id: int, ticket: Waiter, *, soon: bool) -> None:
        """Complete ``ticket`` with ``item_id`` once that is on disk; with ``soon``, see to it that a sync comes."""
        with self._lock:
            error, done, syncing = self._error, self.durable_id >= item_id, self._syncing
            if error is None and not done:
                self._tickets.append((item_id, ticket))
        if error is not None or done:
            _complete([(item_id, ticket)], error)
        elif soon and not syncing:
            self._schedule()

    def run(self) -> None:
        """One sync on this thread, unless one is under way: then that one's leader sees to what is left."""
        with self._lock:
            if self._syncing or self._error is not None:
                return
            self._syncing = True
        self._lead()

    def note(self, durable_id: int) -> None:
        """Everything up to ``durable_id`` is on disk by other means (a rotation)."""
        with self._lock:
            if durable_id <= self.durable_id:
                return
            self.durable_id = durable_id
            covered = self._take_covered_locked()
        _complete(covered)

    def fail(self, error: BaseException) -> None:
        """No sync will be believed any more (R9): whoever waits or comes gets ``error``."""
        with self._lock:
            self._error = error
            left, self._tickets = self._tickets, []
            self._syncing = False
        _complete(left, error)

    def _sleep(self, ticket: ThreadWaiter) -> object:
        try:
            ticket.wait(None)
        except BaseException:  # an interrupt: the lead must not be left with a thread that is gone
            with self._lock:
                waiting = any(other is ticket for _, other in self._tickets)
                self._tickets = [entry for entry in self._tickets if entry[1] is not ticket]
            if not waiting and ticket.wait(1.0) and ticket.result() is _LEAD:
                self._pass_on()
            raise
        return ticket.result()

    def _lead(self) -> None:
        try:
            durable_id = self._sync_once()
        except Exception as error:
            self.fail(error)
            raise
        except BaseException:  # an interrupt: whether the sync was done is unknown, and another will say
            self._pass_on()
            raise
        with self._lock:
            self.sync_count += 1
            self.durable_id = max(self.durable_id, durable_id)
            covered = self._take_covered_locked()
        _complete(covered)
        self._pass_on()

    def _take_covered_locked(self) -> list[tuple[int, Waiter]]:
        covered = [entry for entry in self._tickets if entry[0] <= self.durable_id]
        if covered:
            self._tickets = [entry for entry in self._tickets if entry[0] > self.durable_id]
        return covered

    def _pass_on(self) -> None:
        """Hand the lead to a waiting thread; without one, let somebody else sync for the tickets that are left."""
        with self._lock:
            at = next((at for at, (_, ticket) in enumerate(self._tickets) if isinstance(ticket, ThreadWaiter)), None)
            heir = None if at is None else self._tickets.pop(at)[1]
            self._syncing = heir is not None
            left = bool(self._tickets)
        if heir is not None:
            heir.give(_LEAD)
        elif left:
            self._schedule()


def _complete(tickets: list[tuple[int, Waiter]], error: BaseException | None = None) -> None:
    for item_id, ticket in tickets:
        if not ticket.claim():
            continue
        if error is not None:
            ticket.fail(error)
        else:
            ticket.give(_DONE if isinstance(ticket, ThreadWaiter) else item_id)
