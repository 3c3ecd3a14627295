"""``Shipper``: the thread that ships one queue, and what its queue calls.

Rules:
1. Puts never talk to the store. They find out by ``QueueStatus`` whether they may go on (``gatekeeper``), and with
   ``acks="shipped"`` they wait in the line of ``Syncer.acks``.
2. The thread does one thing at a time: it looks what there is, makes it durable, appends a slot, says so.
3. It holds its queue by a weak reference while it sleeps or waits for the store, so that a queue that nobody has ends.
4. A fenced queue is over: ``Export.fail``. Other errors of the store are repeated for ever; an error that nobody
   foresaw begins again from the log, three times.

NOTE ON LOCKING: this module has no lock. The attributes that other threads read change by one store each; the bells and
the deque of flushes are atomic. The thread takes the locks that ``Export`` says.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy import _logging
from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy._writing.export import Export
from kestrelpy._writing.group_commit import Absent
from kestrelpy.clock import SystemClock
from kestrelpy.errors import (
    DurabilityUnknown,
    ForkedQueue,
    KestrelError,
    QueueClosed,
    QueueFull,
    UnsupportedFormat,
    copy_of,
)
from kestrelpy.ship import uploads
from kestrelpy.ship.errors import Fenced, NotShipped, ShipError, StoreDamaged, StoreUnavailable
from kestrelpy.ship.garbage import Collected, Known
from kestrelpy.ship.gatekeeper import Gatekeeper
from kestrelpy.ship.log import LONGEST_PAUSE, Create, Delete, ListBelow, SlotTaken, ask, read_end, read_slot, resume
from kestrelpy.ship.opened import OpenLog
from kestrelpy.ship.options import ShipStatus
from kestrelpy.ship.owner import UNDER_WAY, Expect, LogOwner, Shipped, Upload, Uploaded, Work, carry_upload
from kestrelpy.ship.slots import FENCE, ShippedLedger
from kestrelpy.ship.uploads import PendingUpload

if TYPE_CHECKING:
    from kestrelpy.inbox.format import LedgerState
    from kestrelpy.ship.store_inbox import StoreInbox

T = TypeVar("T")

RESTARTS = (1.0, 5.0, 25.0)
"""Seconds until an unforeseen error is got over; after the last one shipping has failed."""
IDLE_SECONDS = 1.0
"""So often an idle queue is looked at, at most."""
COLLECT_SECONDS = 3600.0
"""So often garbage is collected."""
LEAST_SECONDS = 0.05
"""So often an idle queue is looked at, at least, however small its interval is."""
LOG_SECONDS = 60.0
"""So often an ERROR is logged when shipping has failed and nobody else finds out."""


class _GivenUp(Exception):
    """The queue is being closed, and the store has not answered in time; or nobody has the queue any more."""


class _Flush:
    """A thread that waits until the log has so many items: ids may jump, and the last one given out may have none."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.bell = ThreadWaiter()


class _Collection:
    """A thread that waits for a collection of garbage."""

    def __init__(self) -> None:
        self.bell = ThreadWaiter()
        self.result: Collected | KestrelError | None = None

    def give(self, result: Collected | KestrelError) -> None:
        self.result = result
        self.bell.give(None)


class Shipper:
    """Ships one open queue. ``log``: the log, opened."""

    def __init__(self, log: OpenLog, export: Export) -> None:
        options = log.options
        self.log = log
        self._options = options
        self._store = log.store
        self._export = weakref.ref(export)
        self._owner = LogOwner(
            log.prefix,
            log.opening,
            log.state,
            weakref.proxy(export),
            log.now_ms,
            chunk_bytes=options.chunk_bytes,
            uploads=options.uploads,
            manifest_interval=options.manifest_interval,
            history=options.history,
            data_first=options.acks == "shipped",
            lease=log.lease,
        )
        self._gatekeeper = Gatekeeper(log.queue, options, self._owner, self._export, log.first_id, log.lease)
        self._sealed_number = self._owner.sealed_number
        self._bell = ThreadWaiter()  # rung, it stays rung until the thread next sleeps
        self._flushes: deque[_Flush] = deque()
        self._collections: deque[_Collection] = deque()
        self._collect_at = SystemClock.monotonic() + COLLECT_SECONDS
        self._batches: Known = {}
        self._pending: dict[str, PendingUpload] = {}
        self._requests = self._failures = 0
        self._last_error = ""
        self._is_away = self._is_closing = self._is_over = self._hands_over = False
        self.inbox: StoreInbox | None = None
        """What takes in the batches of the store, if the queue has an inbox."""
        self._ended: KestrelError | None = None
        """Why nothing is shipped any more."""
        self._has_left = False
        self._deadline: float | None = None
        self._close_timeout = options.close_timeout
        self._slot_at = float("-inf")
        self._is_asked = self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name=f"kestrelpy-ship-{log.queue}", daemon=True)
        export.keep_above(self._retire_limit())
        if options.acks == "shipped":
            leader = Absent(self._ask(), options.ack_timeout, NotShipped)
            export.acknowledge_by(leader, log.state.place.last_id)

    def _retire_limit(self) -> Callable[[], int]:
        """Of the queue, which must not keep this object alive by it."""
        mine = weakref.ref(self)

        def limit() -> int:
            shipper = mine()
            return 0 if shipper is None else shipper._sealed_number

        return limit

    def _ask(self) -> Callable[[], None]:
        mine = weakref.ref(self)

        def ask_for_more() -> None:
            shipper = mine()
            if shipper is not None:
                shipper._is_asked = True
                shipper._bell.give(None)

        return ask_for_more

    # -- calls of the queue ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to ship. Raises ``RuntimeError`` if no thread can be started."""
        self._gatekeeper.start()
        self._thread.start()

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        """``LogOwner.note_ledger``. Called under locks of the queue, by any thread."""
        self._owner.note_ledger(ShippedLedger.of(max(state.taken, self.log.taken), state), from_items)

    def copied_items(self) -> int:
        """How many items are in the log, of all that were ever put. Any thread."""
        return self._owner.shipped.total_items

    def flush(self, timeout: float | None) -> int:
        """``Shipping.flush``."""
        export = self._export()
        if not self._goes_on or export is None:
            raise self._why_ended()
        first_id, last_id, mine = self._owner.shipped.last_id + 1, export.last_id, _Flush(export.totals[0])
        self._flushes.append(mine)
        try:
            self._hurry()
            if self._goes_on:  # after the entry: who ends it looks at the entries after that
                mine.bell.wait(timeout)
            if self._owner.shipped.total_items < mine.items:
                raise self._why_ended() if self._ended is not None else NotShipped(first_id, last_id)
        finally:
            with contextlib.suppress(ValueError):  # the thread has removed it
                self._flushes.remove(mine)
        return self._owner.state.slot

    def collect(self, timeout: float | None) -> Collected:
        """``Shipping.collect``."""
        mine = _Collection()
        self._collections.append(mine)
        self._hurry()
        if self._goes_on:
            mine.bell.wait(timeout)
        result = mine.result
        if isinstance(result, KestrelError):
            raise copy_of(result)
        if result is None:
            raise TimeoutError("the store has not answered in time") if self._goes_on else self._why_ended()
        return result

    @property
    def _goes_on(self) -> bool:
        """Whether the thread may do something yet. Once it is over, the thread may hang in a last request."""
        return self._ended is None and not self._is_over

    def _hurry(self) -> None:
        """Wake the thread: somebody waits for it."""
        self._is_hurried = True
        self._bell.give(None)

    def _why_ended(self) -> KestrelError:
        export = self._export()
        if export is not None:
            export.note_reported()
        return copy_of(self._ended) if self._ended is not None else QueueClosed(f"queue {self.log.queue!r} is closed")

    def status(self) -> ShipStatus:
        """``Shipping.status``."""
        owner, export, lease = self._owner, self._export(), self.log.lease
        header, shipped = owner.state.header, owner.shipped
        items = unshipped = 0
        if export is not None:
            items, unshipped = self._gatekeeper.unshipped(export)
        taken, refused = self.inbox.figures() if self.inbox is not None else (0, 0)
        return ShipStatus(
            state=self._state_word(),
            store=self._store.describe(),
            epoch=header.epoch if header is not None else 0,
            slot=owner.state.slot,
            shipped_id=shipped.last_id,
            unshipped_items=items,
            unshipped_bytes=unshipped,
            unshipped_seconds=self._gatekeeper.unshipped_seconds(items),
            shipped_bytes=owner.sent_bytes,
            slots=owner.slots,
            segments=owner.segments,
            requests=self._requests,
            failures=self._failures,
            last_error=self._last_error,
            lease_left=max(0.0, lease.left) if lease is not None else None,
            taken_over=self.log.taken_over,
            taken_batch=taken,
            refused_batches=refused,
            inbox_error=self.inbox.error if self.inbox is not None else "",
        )

    def _state_word(self) -> str:
        if isinstance(self._ended, Fenced):
            return "fenced"
        if self._ended is not None:
            return "closed" if isinstance(self._ended, QueueClosed) else "failed"
        if self._is_over:
            return "closed"
        return "away" if self._is_away else "behind" if self._gatekeeper.is_behind else "shipping"

    def hand_over(self, timeout: float) -> None:
        """The next ``close``, which has so many seconds, says that this owner has handed the queue over. Raises if it
        comes too late.
        """
        if self._is_over:
            error = self._why_ended()
            is_closed = isinstance(error, QueueClosed)
            raise QueueClosed(f"queue {self.log.queue!r} is closed already") if is_closed else error
        self._hands_over, self._close_timeout = True, timeout

    def close(self) -> None:
        """Ship what is left, say that this owner has left, and end. The queue accepts nothing any more, and has saved
        where its readers are. Raises ``NotShipped``, ``Fenced`` and ``DurabilityUnknown``.
        """
        self._deadline = SystemClock.monotonic() + self._close_timeout
        self._is_closing = True
        self._bell.give(None)
        try:
            if self._thread.is_alive():
                self._thread.join(self._close_timeout + 0.5)
        finally:
            self.release()
        if isinstance(self._ended, Fenced | DurabilityUnknown):
            raise copy_of(self._ended)
        export = self._export()
        waits = export is not None and self._gatekeeper.unshipped(export)[0]
        if not self._has_left and export is not None and (waits or self._hands_over):
            raise NotShipped(self._owner.shipped.last_id + 1, export.last_id, hands_over=self._hands_over)

    def release(self) -> None:
        """End without another word: the thread does nothing any more, once its request is answered."""
        self._is_over = True
        self._gatekeeper.end()
        self._bell.give(None)
        self._wake_waiters()

    def abandon(self, error: KestrelError) -> None:
        """In a forked child: there is no thread, and the store is the parent's."""
        self._ended, self._is_over = error, True
        self._flushes, self._collections = deque(), deque()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_it()
        finally:
            if self._ended is None:  # whatever has struck: nobody may wait for a thread that is gone
                self._end(ShipError(f"shipping queue {self.log.queue!r} has failed: {self._last_error}"))

    def _run_it(self) -> None:
        failed = slots = 0
        while True:
            try:
                self._ship()
            except _GivenUp:
                self._end(QueueClosed(f"queue {self.log.queue!r} is closed"))
            except SlotTaken as taken:
                self._be_fenced(taken)
            except (DurabilityUnknown, ForkedQueue, QueueClosed) as error:
                self._end(error)
            except ReferenceError:  # nobody has the queue any more
                self._end(QueueClosed(f"queue {self.log.queue!r} is closed"))
            except BaseException as error:
                self._last_error = f"{type(error).__name__}: {error}"
                if self._owner.slots > slots:  # it has gone on since the last time
                    failed, slots = 0, self._owner.slots
                is_local = isinstance(error, OSError) and not isinstance(error, KestrelError)
                if not (is_local and failed):
                    _logging.exception("shipping queue %s failed", self.log.queue)
                if is_local:  # too many open files, say: that may end
                    failed = min(failed + 1, len(RESTARTS) - 1)
                    if self._begin_again(LONGEST_PAUSE):
                        continue
                elif failed < len(RESTARTS) and self._begin_again(RESTARTS[failed]):
                    failed += 1
                    continue
                if self._ended is None:
                    self._fail(error)
            return

    def _ship(self) -> None:
        """Ship until the queue is closed."""
        while True:
            if self._is_over:
                raise _GivenUp
            now = SystemClock.monotonic()
            ending = self._is_closing
            self._is_asked = self._is_hurried = False
            export = self._export()
            if export is None:
                raise _GivenUp
            before = self._owner.data_slots
            may_send = ending or now >= self._slot_at + self._options.seconds or self._must_send(export)
            del export  # the store may be away for long, and nobody have the queue any more
            goes_on = self._carry_out(self._owner.step(now, ending=ending, may_send=may_send))
            self._note()
            if self._owner.data_slots > before:
                self._slot_at = now
            if ending and not goes_on:
                self._carry_out(self._owner.close(now, handed_over=self._hands_over))
                self._has_left = True
                with contextlib.suppress(OSError):  # the log says it; this is for a store that is put back
                    self.log.note_slot(self._owner.state)
                self._end(QueueClosed(f"queue {self.log.queue!r} is closed"))
                return
            if self._collections or now >= self._collect_at:
                self._collect(now)
            if not (goes_on or self._is_closing):
                self._sleep()

    def _must_send(self, export: Export) -> bool:
        """Whether new items are sent before ``interval`` is over."""
        return bool(self._flushes) or self._gatekeeper.unshipped(export)[1] >= self._options.chunk_bytes

    def _collect(self, now: float) -> None:
        """Collect garbage, and tell those who wait for it. If the store does not answer, the next time goes on. If what
        it has is damaged, nothing is deleted; that is no reason to ship no more.
        """
        waiting, options = list(self._collections), self._options
        self._collect_at = now + COLLECT_SECONDS
        result: Collected | KestrelError
        try:
            steps = self._owner.collect(now, options.history_ms, options.keep_ms, self._batches)
            result = self._carry_out(steps)
        except StoreUnavailable as error:
            result = error
        except (StoreDamaged, UnsupportedFormat) as error:
            result, self._last_error = error, f"{type(error).__name__}: {error}"
            _logging.warning("queue %s: no garbage was collected: %s", self.log.queue, error)
        for each in waiting:
            each.give(result)
            with contextlib.suppress(ValueError):  # the queue was closed meanwhile
                self._collections.remove(each)

    def _sleep(self) -> None:
        """Sleep until something may be to be done: at most for a second, as readers move and segments are closed."""
        interval = self._options.seconds
        now = SystemClock.monotonic()
        until = now + min(IDLE_SECONDS, max(interval, LEAST_SECONDS))
        due = self._slot_at + interval
        if due > now:
            until = min(until, due)
        if self.log.lease is not None:
            until = min(until, now + max(0.0, self.log.lease.next_beat))
        while True:
            if self._is_asked:
                until = min(until, due)
            left = until - SystemClock.monotonic()
            if left <= 0 or self._is_closing or self._is_over or self._is_hurried:
                return
            self._bell.wait(left)

    def _carry_out(self, steps: Work[T]) -> T:
        """``log.carry_out``, with what an owner asks for in addition, and with figures."""
        answer: object = None
        while True:
            try:
                request: Any = resume(steps, answer)
            except StopIteration as end:
                result: T = end.value
                return result
            self._check_deadline()
            answer = self._answer(request)
            self._check_deadline()

    def _answer(self, request: Any) -> object:
        if isinstance(request, Expect):
            for each in request.uploads:
                if each.key not in self._pending:
                    self._pending[each.key] = uploads.pool.begin(self._work_of(each), self._options.uploads)
            return None
        answer = self._uploaded(request) if isinstance(request, Upload) else ask(request, self._store, self._wait)
        self._requests += 1
        if isinstance(answer, StoreUnavailable):
            self._failures += 1
            self._is_away, self._last_error = True, str(answer)
        elif isinstance(request, Create | Delete | ListBelow | Upload):  # a store that may be read only is away
            self._is_away = False
        return answer

    def _work_of(self, upload: Upload) -> Callable[[], Uploaded | None]:
        store = self._store
        return lambda: carry_upload(upload, store)

    def _uploaded(self, upload: Upload) -> object:
        pending, lease = self._pending.get(upload.key), self.log.lease
        if pending is not None and not pending.wait(None if lease is None else max(0.0, lease.next_beat)):
            return UNDER_WAY
        self._pending.pop(upload.key, None)
        try:
            return carry_upload(upload, self._store) if pending is None else pending.result()
        except StoreUnavailable as error:
            return error

    def _wait(self, seconds: float) -> None:
        """A pause between two repetitions of a request."""
        self._note()
        until = SystemClock.monotonic() + seconds
        while not self._is_over:
            left = until - SystemClock.monotonic()
            if left <= 0:
                return
            self._check_deadline()
            self._bell.wait(left)

    def _check_deadline(self) -> None:
        if self._is_over or (self._deadline is not None and SystemClock.monotonic() > self._deadline):
            raise _GivenUp

    # -- what is said of it ------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """Tell the queue and its waiters how far the log has come. Raises ``_GivenUp`` if nobody has the queue."""
        owner, export = self._owner, self._export()
        if export is None:
            raise _GivenUp
        shipped = owner.shipped
        if self._options.acks == "shipped":
            export.acknowledge(shipped.last_id, shipped.total_bytes)
        if owner.sealed_number > self._sealed_number:
            self._sealed_number = owner.sealed_number
            export.retire_soon()
        for each in list(self._flushes):
            if each.items <= shipped.total_items:
                self._flushes.remove(each)
                each.bell.give(None)
        self._gatekeeper.note_slot()

    def _be_fenced(self, taken: SlotTaken) -> None:
        header = taken.slot.header
        owner = taken.slot.owner if header.kind == FENCE else ""
        export = self._export()
        last_id = export.last_id if export is not None else 0
        error = Fenced(header.epoch, owner, self._owner.shipped.last_id + 1, last_id)
        _logging.warning("queue %s: %s", self.log.queue, error)
        self._end(error)
        if export is not None:
            export.fail(error)

    def _fail(self, error: BaseException) -> None:
        """Shipping is over, by an error that begins again each time."""
        ended = ShipError(f"shipping queue {self.log.queue!r} has failed: {type(error).__name__}: {error}")
        self._end(ended)
        export = self._export()
        if export is not None and (self._options.acks == "shipped" or self.log.lease is not None):
            export.fail(ended)
            return
        if export is not None and self._options.when_behind != "go_on":
            reason = str(ended)
            export.refuse(lambda: QueueFull(reason), waits=False)
        del export
        while not (self._is_closing or self._is_over or self._export() is None):
            _logging.warning("queue %s is not shipped any more: %s", self.log.queue, self._last_error)
            self._bell.wait(LOG_SECONDS)

    def _end(self, error: KestrelError) -> None:
        """Nothing is shipped from here on. Whoever waits is told."""
        self._ended = error
        self._is_over = self._is_over or isinstance(error, QueueClosed)
        self._gatekeeper.end()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Nobody may wait any more for what the thread does not do."""
        for waiting in (self._flushes, self._collections):
            with contextlib.suppress(IndexError):
                while True:
                    waiting.popleft().bell.give(None)

    def _begin_again(self, seconds: float) -> bool:
        """Read the log again, after a while. Returns False if that is not possible; if ``_ended`` is set then, that is
        why.
        """
        try:
            self._wait(seconds)
            state = self._carry_out(read_end(self.log.prefix))
            header = state.header
            if header is None or header.nonce != self.log.opening.nonce:
                if header is not None:
                    slot = self._carry_out(read_slot(self.log.prefix, state.fences[-1]))
                    if slot is not None:
                        self._be_fenced(SlotTaken(slot))
                return False
            export, last_id = self._export(), state.place.last_id
            if export is not None:
                shipped = Shipped(last_id, *export.totals_through(last_id))
        except _GivenUp:
            self._end(QueueClosed(f"queue {self.log.queue!r} is closed"))
            return False
        except BaseException as error:
            self._last_error = f"{type(error).__name__}: {error}"
            return True
        self._pending.clear()
        self._owner.state = state
        if export is not None:
            self._owner.shipped = shipped
        return True
