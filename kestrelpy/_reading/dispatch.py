"""``Dispatcher``: gives the next item of a backlog to the consumer that asked first. The line, limits, and the end of a
reader.

A call that is interrupted while it moves items calls ``recover``, which puts every item into exactly one state again
before the exception is raised (R13). The items that an interrupted get had taken are delivered again.

NOTE ON LOCKING: ``backlog.lock`` (R in docs/locking.md) guards the line, the backlog and everything else here, unless a
comment says otherwise. It is held for work in memory and for the read of one block of the journal; never while a hook
runs, a waiter is completed or the queue's lock is asked for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from kestrelpy import _logging
from kestrelpy._checks import check_timeout
from kestrelpy._journal.format import Entry
from kestrelpy._process import why_not_wait
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.hooks import Hooks
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.source import Source
from kestrelpy._reading.window import Requeued
from kestrelpy._waiting.line import Line, Waiting, taken_now
from kestrelpy._waiting.waiters import FutureWaiter, Waiter, is_deep
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, QueueClosed, QueueEmpty, copy_of
from kestrelpy.item import Item, ItemOwner, new_item

if TYPE_CHECKING:
    from concurrent.futures import Future

Notify = Callable[[list[Waiter], Exception], object]
"""Fails these waiters with an error, now or later."""
DEEPEST = 8
"""How many hand-offs of one thread may be nested, each called back by the one before."""


def fail_all(waiters: list[Waiter], error: Exception) -> None:
    """Fail each waiter with ``error``, even if callbacks raise; the last of these exceptions is raised at the end. May
    be repeated.
    """
    raised: BaseException | None = None
    for waiter in waiters:
        try:
            waiter.fail(copy_of(error))
        except BaseException as struck:
            raised = struck
    if raised is not None:
        raise raised


class Dispatcher(Waiting[Item]):
    """One reader's backlog, and the line of the consumers that wait for its items. ``owner``: the reader."""

    def __init__(self, owner: ItemOwner, source: Source, name: str, config: ReaderConfig, progress: Progress) -> None:
        self.source = source
        self._clock = source.clock
        self._line = Line()
        self.backlog = Backlog(owner, source, name, config, progress, self._line)
        self.hooks = Hooks(self)
        self.busy_at = self._clock.monotonic()
        self.misses = self.discarded = 0
        self._overfull = False  # it was logged that the oldest items can't be dropped
        self._choose_notify()

    def _choose_notify(self) -> None:
        config = self.backlog.config
        self._allows_skip = config.full_policy is not FullPolicy.BLOCK and config.max_idle is None

    def rename(self, name: str, config: ReaderConfig) -> None:
        """Turn the default reader into the first named reader."""
        with self.backlog.lock:
            self.backlog.name = name
            self._use_locked(config)

    def configure(self, config: ReaderConfig) -> None:
        """Use other limits and hooks from now on."""
        with self.backlog.lock:
            self.backlog.check_usable()
            self._use_locked(config)

    def _use_locked(self, config: ReaderConfig) -> None:
        backlog = self.backlog
        backlog.config = config
        self._choose_notify()
        backlog.may_skip_notify = False
        backlog.update_fast_path()

    @property
    def name(self) -> str:
        """The reader's name; empty for the default reader."""
        return self.backlog.name

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return self.backlog.full_name

    @property
    def config(self) -> ReaderConfig:
        """The reader's limits and hooks."""
        return self.backlog.config

    @property
    def items(self) -> int:
        """Items not done."""
        return self.backlog.items

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        return self.backlog.bytes

    def counted(self) -> tuple[int, int]:
        """The items and bytes that count against the limits."""
        return self.backlog.counted()

    @property
    def broken(self) -> Exception | None:
        """Why the reader can't be used any more."""
        return self.backlog.broken

    @property
    def waiter_count(self) -> int:
        """How many consumers wait in line."""
        return len(self._line)

    def look_again(self) -> None:
        """The reader was made, and has what it needs to continue: decide which path a get takes."""
        with self.backlog.lock:
            self.backlog.update_fast_path()

    def expires_in(self) -> float | None:
        """Seconds until the next item expires; ``None`` if it does not, or can't be read."""
        with self.backlog.lock:
            return self.backlog.expires_in()

    # -- taking one item --------------------------------------------------------------------------------------------

    def get_at_hand(self) -> Item | None:
        """An item that the fast path of ``Reader.get`` finds. ``None`` is no miss: the caller goes on to ``get``."""
        item = None
        try:
            # HOT COPY of Reader.get
            backlog = self.backlog
            with backlog.lock:
                if backlog.fast:
                    progress, take = backlog.progress, backlog.take
                    item_id = progress.next_id
                    entry = take(item_id, None)
                    if entry is not None:
                        data, added_ms, expires_ms = entry
                        if expires_ms is None:
                            item = new_item(Item)
                            item.id = item_id
                            item.data = data
                            item.added_ms = added_ms
                            item.expires_ms = None
                            item.error_count = 0
                            item._owner = backlog.owner
                            backlog.opened[item_id] = item
                            progress.next_id = item_id + 1
                            backlog.opened_count += 1
                            return item
                        backlog.ahead[item_id] = entry
        except BaseException as error:
            self.recover(error, [] if item is None else [item.id])
            raise
        return None

    def get(self, block: bool, timeout: float | None, *, counts: bool = True) -> Item:
        """``Reader.get`` after its fast path has found nothing. Without ``counts``, finding no item is no miss yet: the
        caller goes on to wait by itself.
        """
        if block:
            check_timeout(timeout)
        entered = self._clock.monotonic() if self.backlog.config.on_timeout else 0.0
        try:
            return self._take_now()
        except QueueEmpty:
            if not block or timeout == 0:
                if counts:
                    self._count_miss(entered)
                raise
        return self._wait(timeout)

    def peek(self, timeout: float | None) -> Item:
        """``Reader.peek``."""
        check_timeout(timeout)
        try:
            return self._peek_now()
        except QueueEmpty:
            if timeout == 0:
                self.misses += 1
                raise
        return self._wait(timeout, peeks=True)

    def peek_future(self, timeout: float | None) -> Future[Item]:
        """``Reader.peek_future``."""
        waiter = FutureWaiter()
        waiter.peeks = True
        return self._future_of(waiter, timeout)

    def _peek_now(self) -> Item:
        backlog = self.backlog
        expired: list[Item] = []
        try:
            with backlog.lock:
                backlog.check_usable()
                found = None if self._line else backlog.find(expired)
                if found is not None:
                    backlog.requeued.add(*found)
                    backlog.update_fast_path()
            self.after_taking([], expired)
        except BaseException as error:
            self.recover(error, (), expired)
            raise
        if found is None:
            raise QueueEmpty(f"reader {self.full_name}: no item to deliver")
        return backlog.make_item(*found)

    def _take_now(self) -> Item:
        backlog = self.backlog
        expired: list[Item] = []
        found: tuple[int, Entry] | None = None
        try:
            with backlog.lock:
                backlog.check_usable()
                found = None if self._line else backlog.find(expired)
                item = None if found is None else backlog.open_read(*found)
            self.after_taking([] if item is None else [item], expired)
        except BaseException as error:
            self.recover(error, [] if found is None else [found[0]], expired)
            raise
        if item is None:
            raise QueueEmpty(f"reader {self.full_name}: no item to deliver")
        return item

    def after_taking(self, items: list[Item], expired: list[Item]) -> None:
        """Do what must be done with no lock held: join the window, run hooks, notify the queue of released items."""
        backlog = self.backlog
        if backlog.wants_window:
            backlog.wants_window = False
            self.source.attach(backlog)
        for item in expired:
            self.hooks.show_expired(item)
        if backlog.config.on_delivery is not None:
            now_ms = self._clock.time_ns() // 1_000_000
            for item in items:
                self.hooks.call(backlog.config.on_delivery, backlog.owner, (now_ms - item.added_ms) / 1000)
        if not backlog.may_skip_notify:
            self.notify()

    def notify(self) -> None:
        """Items were released: have the queue arm a checkpoint and notify producers that wait for room."""
        backlog = self.backlog
        try:
            with backlog.lock:
                backlog.may_skip_notify = self._allows_skip
                self.busy_at = self._clock.monotonic()
            self.source.moved()
        except BaseException:
            backlog.may_skip_notify = False  # perhaps nobody was notified
            raise

    # -- the line --------------------------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        backlog = self.backlog
        with backlog.lock:
            backlog.check_usable()
            self._line.add(waiter)
            backlog.fast = False
            self.source.waiting[self] = None
        self.source.polls()
        self.hand_off()
        ending = why_not_wait()
        if ending is not None:
            self.dismiss(ending)

    def _leave(self, waiter: Waiter) -> bool:
        with self.backlog.lock:
            left = self._line.remove(waiter)
            self._after_line_locked()
        return left

    def _leave_now(self, waiter: Waiter) -> bool | None:
        held = left = False
        try:
            for held in taken_now(self.backlog.lock.acquire):  # noqa: B007 - one step
                break
            if held:
                left = self._line.remove(waiter)
                self._after_line_locked()
        finally:
            if held:
                self.backlog.lock.release()
        return left if held else None

    def _after_line_locked(self) -> None:
        if not self._line:
            self.source.waiting.pop(self, None)
            self.backlog.update_fast_path()

    def hand_off(self) -> None:
        """Give items to the waiters in line, as far as there are items. Called after an item comes or a waiter enters.

        A callback that runs here may put, which calls this method again, and so on. At a depth of ``DEEPEST`` such
        calls are no longer nested, which would exhaust the stack: the innermost one serves the rest in a loop.
        """
        if self._line and is_deep():
            with contextlib.suppress(RuntimeError):  # no thread can be started
                self._clock.call_later(0, self.hand_off)
                return
        if _turns.depth >= DEEPEST and _is_nested():
            _turns.left[self] = None
            return
        depth = _turns.depth
        try:
            _turns.depth = depth + 1
            self._serve_line()
        finally:
            if _turns.left:
                _serve_left()
            _turns.depth = depth

    def _serve_line(self) -> None:
        while self._serve_once():
            pass

    def _serve_once(self) -> bool:
        """Whether to look again: callbacks may have brought items, and their hand-offs were not let in here."""
        given: list[tuple[Waiter, Item]] = []
        expired: list[Item] = []
        failed: list[tuple[Waiter, Exception]] = []
        try:
            with self.backlog.lock:
                self._serve_locked(given, failed, expired)
            _complete(given, failed)
            self.after_taking(_opened(given), expired)
            return bool(self._line) and bool(given or expired)
        except BaseException as error:
            with self.backlog.lock:
                left, missed = self._still_in_line_locked(given)
            _complete(left, [each for each in failed if each[0] not in self._line.waiters])
            self.recover(error, missed, expired)
            raise

    def _still_in_line_locked(self, given: list[tuple[Waiter, Item]]) -> tuple[list[tuple[Waiter, Item]], list[int]]:
        """The pairs of ``given`` whose waiter has left the line, and the ids of the items meant for the others."""
        waiters = self._line.waiters
        missed = [item.id for waiter, item in given if waiter in waiters]
        return [each for each in given if each[0] not in waiters], missed

    def _serve_locked(
        self, given: list[tuple[Waiter, Item]], failed: list[tuple[Waiter, Exception]], expired: list[Item]
    ) -> None:
        """Take waiters out of the line, each with its item, or with the error that kept the item from being read."""
        while True:
            try:
                self._give_locked(given, expired)
                break
            except (KestrelError, OSError) as error:  # for the consumer, not for a producer that serves it
                waiter = self._line.wanting()
                if waiter is None:
                    break
                failed.append((waiter, error))  # the next one tries again; at worst it gets the same error
                del self._line.waiters[waiter]
        self._after_line_locked()

    def _give_locked(self, given: list[tuple[Waiter, Item]], expired: list[Item]) -> None:
        """Give items to waiters until nobody waits or there is no item. A waiter that is in ``given`` and still in line
        has not got its item: no call, and so no interrupt, comes between opening the read and leaving the line. Raises
        as ``Source.read``.
        """
        backlog = self.backlog
        while True:
            found = backlog.find(expired) if self._line else None
            if found is None:
                break
            waiter = self._line.wanting()
            if waiter is None or waiter.peeks:
                backlog.requeued.add(*found)
            if waiter is None:
                break
            item = backlog.make_item(*found)
            given.append((waiter, item))
            if not waiter.peeks:
                backlog.opened[item.id] = item
                backlog.opened_count += 1
            del self._line.waiters[waiter]

    def _give_back(self, waiter: Waiter, item: Item) -> None:
        if not waiter.peeks:
            self.unget(item)

    def unget(self, item: Item) -> None:
        """Undo an open read that no consumer has seen: the item goes back to its old position."""
        backlog = self.backlog
        try:
            with backlog.lock:
                if backlog.opened.get(item.id) is not item:
                    return
                del backlog.opened[item.id]
                backlog.opened_count -= 1
                backlog.requeued.add(item.id, (item.data, item.added_ms, item.expires_ms))
                backlog.update_fast_path()
            self.hand_off()
        except BaseException as error:
            self.recover(error)
            raise

    def recover(self, error: BaseException, item_ids: Iterable[int] = (), expired: Iterable[Item] = ()) -> None:
        """Put every item into exactly one state again, after ``error`` struck while items were moving. Nobody got the
        items of ``item_ids``, and the hook may not have been called for those of ``expired``.

        The library's own errors are raised while no item is moving, with one exception: items that expired before an
        item that can't be read.
        """
        backlog = self.backlog
        if isinstance(error, KestrelError | OSError) and not item_ids and not expired:
            return
        with backlog.lock:
            if backlog.broken is not None:
                return
            self._drop_locked(item_ids, expired)
            backlog.disturbed, backlog.fast = True, False
            backlog.repair()
            self._after_line_locked()
        self.hand_off()

    def _drop_locked(self, item_ids: Iterable[int], expired: Iterable[Item]) -> None:
        backlog = self.backlog
        for item_id in item_ids:
            if backlog.opened.pop(item_id, None) is not None:
                backlog.opened_count -= 1
        for item in expired:
            backlog.with_hook.pop(item.id, None)

    def _nothing_within(self, timeout: float | None) -> QueueEmpty:
        return QueueEmpty(f"reader {self.full_name}: no item within {timeout} s")

    def _missed(self, waiter: Waiter) -> None:
        self._count_miss(waiter.entered)

    def _count_miss(self, entered: float) -> None:
        backlog = self.backlog
        self.misses += 1
        if backlog.config.on_timeout is not None:
            self.hooks.call(backlog.config.on_timeout, backlog.owner, self._clock.monotonic() - entered)

    def dismiss(self, error: Exception) -> int:
        """Fail all waiters in line with ``error`` now; returns how many there were."""
        gone: list[Waiter] = []
        try:
            with self.backlog.lock:
                gone = self._line.drain()
                self._after_line_locked()
            fail_all(gone, error)
        except BaseException:
            fail_all(gone, error)
            raise
        return len(gone)

    def dismiss_empty_handed(self, error: Exception) -> None:
        """``dismiss`` the waiters for whom there is no item. Later consumers must check for ``error`` themselves."""
        with self.backlog.lock:
            waiting = list(self._line.waiters)
        self.hand_off()
        gone: list[Waiter] = []
        try:
            with self.backlog.lock:
                self._take_out_locked(waiting, gone)
                self._after_line_locked()
            fail_all(gone, error)
        except BaseException:
            fail_all(gone, error)
            raise

    def _take_out_locked(self, waiting: list[Waiter], gone: list[Waiter]) -> None:
        for waiter in waiting:
            gone.append(waiter)  # before the waiter leaves: the append may fail
            if not self._line.remove(waiter) or not waiter.claim():
                gone.pop()

    # -- expiry and limits -----------------------------------------------------------------------------------------

    def discard_expired(self, limit: int | None = None) -> int:
        """``Reader.discard_expired``."""
        backlog = self.backlog
        limit = backlog.config.max_expire_sweep if limit is None else limit
        if self.hooks.failed:
            self.hooks.try_failed_again()
        tried = count = 0
        while limit is None or tried < limit:
            expired: list[Item] = []
            try:
                with backlog.lock:
                    backlog.check_usable()
                    found = backlog.peek()
                    if found is None or not backlog.is_expired(found[1]):
                        break
                    backlog.expire(*found, expired)
                tried += 1
                self.after_taking([], expired)
                count += not any(backlog.with_hook.get(item.id) is item for item in expired)
            except BaseException as error:
                self.recover(error, (), expired)
                raise
        return count  # nobody is notified if nothing was dropped: two producers without room would wake each other

    def discard(self, ids: Iterable[int]) -> int:
        """``Reader.discard``."""
        wanted = list(ids)
        backlog = self.backlog
        with backlog.lock:
            backlog.check_usable()
            if backlog.disturbed:
                backlog.repair()
            dropped = backlog.discard(wanted)
            self.discarded += dropped
            backlog.update_fast_path()
        if dropped:
            self.notify()
        return dropped

    def keep_limits(self) -> None:
        """``_drop_oldest`` as housekeeping, for ``FullPolicy.DROP_OLDEST``. It raises nothing, as the put that called
        it has stored its items. If items can't be dropped now, as the journal can't be read, a later put drops them.
        """
        try:
            self._drop_oldest()
        except QueueClosed:  # closed meanwhile
            return
        except Exception:
            if not self._overfull:
                self._overfull = True
                _logging.warning(
                    "reader %s can't drop its oldest items; a later put tries again", self.backlog.full_name, error=True
                )
        else:
            if self._overfull:
                self._overfull = False

    def _drop_oldest(self) -> None:
        """Drop unread items from the front until the limits are kept."""
        backlog = self.backlog
        try:
            with backlog.lock:
                while True:
                    found = backlog.take_next() if backlog.is_over_limit() else None
                    if found is None:  # within the limits, or the other items are open
                        break
                    backlog.release(found[0], found[1][0])
                    self.discarded += 1
                backlog.update_fast_path()
            self.after_taking([], [])
        except BaseException as error:
            self.recover(error)
            raise

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail_waiting(self, error: Exception, notify: Notify = fail_all) -> None:
        """Make every later call raise ``error``, and fail all waiters with it. May be repeated. ``notify`` gets the
        waiters, for a caller that must not fail them here.
        """
        gone: list[Waiter] = []
        requeued, ahead = Requeued(), {}  # type: ignore[var-annotated]
        try:
            with self.backlog.lock:
                self.backlog.fail_waiting(error, requeued, ahead)
                gone = self._line.drain()  # at once: else the next item would go to one of them
                self._after_line_locked()
            notify(gone, error)
        except BaseException:
            notify(gone, error)
            raise

    def abandon(self, error: Exception) -> None:
        """In a forked child: break off without touching any lock that another thread may have held."""
        self._line = Line()
        self.backlog.abandon(error, self._line)


class _Turns(threading.local):
    """The hand-offs of one thread. ``depth``: how many are nested, each called back by the one before; ``left``:
    readers that the innermost of them still has to serve.
    """

    depth = 0

    def __init__(self) -> None:
        self.left: dict[Dispatcher, None] = {}


_turns = _Turns()


def _is_nested() -> bool:
    """Whether a hand-off of this thread is under way, and will serve ``left``. If there is none, an interrupt at the
    end of one has left ``depth`` too high: it is reset.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is Dispatcher.hand_off.__code__:
            return True
        frame = frame.f_back
    _turns.depth = 0
    return False


def _serve_left() -> None:
    left = _turns.left
    while left:
        reader = next(iter(left))
        reader._serve_line()
        left.pop(reader, None)  # after serving: if an interrupt strikes, an outer one does it


def _complete(given: list[tuple[Waiter, Item]], failed: list[tuple[Waiter, Exception]]) -> None:
    """Complete each waiter, even if its callbacks raise; the last of these exceptions is raised at the end. May be
    repeated after an interrupt.
    """
    raised: BaseException | None = None
    for waiter, item in given:
        try:
            waiter.give(item)
        except BaseException as struck:
            raised = struck
    for waiter, error in failed:
        try:
            waiter.fail(error)
        except BaseException as struck:
            raised = struck
    if raised is not None:
        raise raised


def _opened(given: list[tuple[Waiter, Item]]) -> list[Item]:
    return [item for waiter, item in given if not waiter.peeks]
