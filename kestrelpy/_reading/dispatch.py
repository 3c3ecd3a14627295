"""Taking: the next item for whoever asked first. The line, the hooks and the end of a reader.

Rules:
1. Hooks run outside every lock; one that raises is logged and counted, and its item stays where it was.
2. Whoever is interrupted while it moves items says so (``_let_fall``): they find their place again before it is told
   (R13). What an interrupted get had in its hands comes again.

NOTE ON LOCKING: ``_lock`` (R in docs/locking.md) guards everything here that is not said to be otherwise. It is held
for memory work and for the read of one block of the journal; never while a hook runs, a waiter is completed or the
queue's lock is asked for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, cast

from kestrelpy import _logging
from kestrelpy._journal.format import Entry
from kestrelpy._process import why_not_wait
from kestrelpy._reading.backlog import Unread
from kestrelpy._reading.window import Requeued
from kestrelpy._waiting.line import Line, taken_now
from kestrelpy._waiting.waiters import Waiter, is_deep
from kestrelpy.errors import KestrelError, QueueClosed, QueueEmpty, copy_of
from kestrelpy.item import Item

if TYPE_CHECKING:
    from kestrelpy._reading.reader import Reader

Tell = Callable[[list[Waiter], Exception], object]
"""Who sees to it that these waiters hear of an error."""
DEEPEST = 8
"""So many hand-offs of one thread may be under way, each called back by the one before."""
_RAISED: list[None] = []
"""Stands for what a hook that raised has returned."""
_in_hook: dict[tuple[int, Taking], list[Item]] = {}
"""By thread and reader: expired items whose hook runs, or comes next. Here as few readers have such a hook."""


def fail_all(waiters: list[Waiter], error: Exception) -> None:
    """Tell each of them, whatever is raised on the way by what they call back; the last of it is raised in the end. May
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


class Taking(Unread):
    """What is unread, returned or open, and the line of those who wait for it."""

    _overfull = False  # it was logged that the oldest items can't be dropped; set on the reader while that is so
    _failed: dict[int, Item] | None = None  # expired, and their hook raised; these are being settled, too

    # -- taking one item --------------------------------------------------------------------------------------------

    def _take_now(self) -> Item:
        expired: list[Item] = []
        found: tuple[int, Entry] | None = None
        try:
            with self._lock:
                self._check_usable()
                found = None if self._line else self._find_locked(expired)
                item = None if found is None else self._open_locked(*found)
            self._after_taking([] if item is None else [item], expired)
        except BaseException as error:
            self._let_fall(error, [] if found is None else [found[0]], expired)
            raise
        if item is None:
            raise QueueEmpty("nothing is there")
        return item

    def _after_taking(self, items: list[Item], expired: list[Item]) -> None:
        """What must be done with no lock held: hooks, joining the window, telling the queue what was released."""
        if self._wants_window:
            self._wants_window = False
            self._source.attach(self)
        for item in expired:
            self._settle_expired(item)
        if self.config.on_delivery is not None:
            now_ms = self._clock.time_ns() // 1_000_000
            for item in items:
                self._call(self.config.on_delivery, cast("Reader", self), (now_ms - item.added_ms) / 1000)
        if not self._may_skip_notify:
            self._tell()

    def _tell(self) -> None:
        try:
            with self._lock:
                self._may_skip_notify = self._wants_quiet
                self._busy_at = self._clock.monotonic()
            self._source.moved(self)
        except BaseException:
            self._may_skip_notify = False  # nobody may have been told
            raise

    # -- the line --------------------------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        with self._lock:
            self._check_usable()
            self._line.add(waiter)
            self._fast = False
            self._source.waiting[self] = None
        self._source.polls(self)
        self._hand_off()
        ending = why_not_wait()
        if ending is not None:
            self._dismiss(ending)

    def _leave(self, waiter: Waiter) -> bool:
        with self._lock:
            left = self._line.remove(waiter)
            self._after_line_locked()
        return left

    def _leave_now(self, waiter: Waiter) -> bool | None:
        held = left = False
        try:
            for held in taken_now(self._lock.acquire):  # noqa: B007 - one step
                break
            if held:
                left = self._line.remove(waiter)
                self._after_line_locked()
        finally:
            if held:
                self._lock.release()
        return left if held else None

    def _after_line_locked(self) -> None:
        if not self._line:
            self._source.waiting.pop(self, None)
            self._update_fast_path_locked()

    def _hand_off(self) -> None:
        """Serve the line, as far as there are items. Called by whoever brings an item or enters the line.

        What is called back here may put, which comes here again, and so on. Such a chain is served in a loop by the
        ``DEEPEST`` of its calls, and not by one within the other until there is no room on the stack.
        """
        if self._line and is_deep():
            with contextlib.suppress(RuntimeError):  # no thread can be started
                self._clock.call_later(0, self._hand_off)
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
        """Whether to look again: what was called back may have brought items, and was not let in here."""
        given: list[tuple[Waiter, Item]] = []
        expired: list[Item] = []
        failed: list[tuple[Waiter, Exception]] = []
        try:
            with self._lock:
                self._serve_locked(given, failed, expired)
            _complete(given, failed)
            self._after_taking(_opened(given), expired)
            return bool(self._line) and bool(given or expired)
        except BaseException as error:
            with self._lock:
                left, missed = self._still_in_line_locked(given)
            _complete(left, [each for each in failed if each[0] not in self._line.waiters])
            self._let_fall(error, missed, expired)
            raise

    def _still_in_line_locked(self, given: list[tuple[Waiter, Item]]) -> tuple[list[tuple[Waiter, Item]], list[int]]:
        """Those of ``given`` who have left the line, and the ids of the items that the others were to get."""
        waiters = self._line.waiters
        missed = [item.id for waiter, item in given if waiter in waiters]
        return [each for each in given if each[0] not in waiters], missed

    def _serve_locked(
        self, given: list[tuple[Waiter, Item]], failed: list[tuple[Waiter, Exception]], expired: list[Item]
    ) -> None:
        """Take waiters out of the line, each with its item, or with why it could not be read."""
        while True:
            try:
                self._give_locked(given, expired)
                break
            except (KestrelError, OSError) as error:  # the consumer's trouble, not the producer's
                waiter = self._line.wanting()
                if waiter is None:
                    break
                failed.append((waiter, error))  # the next one tries anew, and is told the same at worst
                del self._line.waiters[waiter]
        self._after_line_locked()

    def _give_locked(self, given: list[tuple[Waiter, Item]], expired: list[Item]) -> None:
        """Until nobody waits or nothing is there. One that is noted and still in line has not got its item: between the
        opening of the read and the leaving of the line there is no call, and so no interrupt. Raises as ``read``.
        """
        while True:
            found = self._find_locked(expired) if self._line else None
            if found is None:
                break
            waiter = self._line.wanting()
            if waiter is None or waiter.peeks:
                self._returned.add(*found)
            if waiter is None:
                break
            item = self._item(*found)
            given.append((waiter, item))
            if not waiter.peeks:
                self._open[item.id] = item
                self._opened += 1
            del self._line.waiters[waiter]

    def _give_back(self, waiter: Waiter, item: Item) -> None:
        if not waiter.peeks:
            self._unget(item)

    def _unget(self, item: Item) -> None:
        """An open read that nobody got to see: back to its place, as if it had not been opened."""
        try:
            with self._lock:
                if self._open.get(item.id) is not item:
                    return
                del self._open[item.id]
                self._opened -= 1
                self._returned.add(item.id, (item.data, item.added_ms, item.expires_ms))
                self._update_fast_path_locked()
            self._hand_off()
        except BaseException as error:
            self._let_fall(error)
            raise

    def _let_fall(self, error: BaseException, item_ids: Iterable[int] = (), expired: Iterable[Item] = ()) -> None:
        """``error`` struck while items were being moved: all find their place again. Nobody got those of ``item_ids``,
        and the hooks of those that are ``expired`` may not have been called.

        Errors of our own are raised where nothing is on its way, but for items that had expired before one that can't
        be read.
        """
        if isinstance(error, KestrelError | OSError) and not item_ids and not expired:
            return
        with self._lock:
            if self._broken is not None:
                return
            self._drop_locked(item_ids, expired)
            self._disturbed, self._fast = True, False
            self._mend_locked()
            self._after_line_locked()
        self._hand_off()

    def _drop_locked(self, item_ids: Iterable[int], expired: Iterable[Item]) -> None:
        for item_id in item_ids:
            if self._open.pop(item_id, None) is not None:
                self._opened -= 1
        for item in expired:
            self._settling.pop(item.id, None)

    def _missed(self, waiter: Waiter) -> None:
        self._count_miss(waiter.entered)

    def _count_miss(self, entered: float) -> None:
        self._misses += 1
        if self.config.on_timeout is not None:
            self._call(self.config.on_timeout, cast("Reader", self), self._clock.monotonic() - entered)

    def _dismiss(self, error: Exception) -> int:
        gone: list[Waiter] = []
        try:
            with self._lock:
                gone = self._line.drain()
                self._after_line_locked()
            fail_all(gone, error)
        except BaseException:
            fail_all(gone, error)
            raise
        return len(gone)

    def _dismiss_empty_handed(self, error: Exception) -> None:
        """``_dismiss`` those in line for whom there is no item. Who enters it later must look for ``error`` himself."""
        with self._lock:
            waiting = list(self._line.waiters)
        self._hand_off()
        gone: list[Waiter] = []
        try:
            with self._lock:
                for waiter in waiting:
                    gone.append(waiter)  # before it leaves: the append may fail
                    if not self._line.remove(waiter) or not waiter.claim():
                        gone.pop()
                self._after_line_locked()
            fail_all(gone, error)
        except BaseException:
            fail_all(gone, error)
            raise

    # -- expiry and limits -----------------------------------------------------------------------------------------

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front, at most ``limit`` (default: ``max_expire_sweep``); returns how many.

        Only the front is looked at: an expired item behind one that is not waits until that is gone.
        """
        limit = self.config.max_expire_sweep if limit is None else limit
        if self._failed:
            self._try_failed_again()
        tried = count = 0
        while limit is None or tried < limit:
            expired: list[Item] = []
            try:
                with self._lock:
                    self._check_usable()
                    found = self._peek_locked()
                    if found is None or not self._is_expired(found[1]):
                        break
                    self._expire_locked(*found, expired)
                tried += 1
                self._after_taking([], expired)
                count += not any(self._settling.get(item.id) is item for item in expired)
            except BaseException as error:
                self._let_fall(error, (), expired)
                raise
        return count  # nothing is told where nothing was dropped: two producers without room would wake each other

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _settle_expired(self, item: Item) -> None:
        """Show an expired item to its hook, once. An item that the hook itself comes upon has its turn when the hook
        has returned: the hook never calls itself.
        """
        key = (threading.get_ident(), self)
        following = _in_hook.get(key)
        if following is not None:
            following.append(item)
            return
        items = _in_hook[key] = [item]
        try:
            while True:  # and no condition: at its jump backwards CPython 3.13 does not see the "except"
                if not items:
                    break
                self._show_expired(items[0])
                del items[0]
        except BaseException as error:
            self._let_fall(error, (), items)
            raise
        finally:
            _in_hook.pop(key, None)

    def _show_expired(self, item: Item) -> None:
        hook = self.config.on_expired  # None: the reader has another name and configuration since it expired
        if hook is None or self._call(hook, item) is not _RAISED:
            self._settled(item)
            return
        with self._lock:  # it stays with us, undelivered and not done
            if self._settling.get(item.id) is item:
                if self._failed is None:
                    self._failed = {}
                self._failed[item.id] = item

    def _try_failed_again(self) -> None:
        """Show the items whose hook raised to it again, each by one thread. Nothing is told where the hook took
        nothing: two producers without room would wake each other.
        """
        for _ in range(len(self._failed or ())):
            item = None
            try:
                with self._lock:
                    item_id, item = next(iter((self._failed or {}).items()), (0, None))
                    if item is not None and self._failed is not None:
                        del self._failed[item_id]
                if item is not None and self._settling.get(item.id) is item:  # else the reader was moved
                    self._settle_expired(item)
                    if not self._may_skip_notify and self._settling.get(item.id) is not item:
                        self._tell()
            except BaseException as error:
                self._let_fall(error, (), [] if item is None else [item])
                raise

    def _settled(self, item: Item) -> None:
        """A hook has taken the item: it is done, unless the reader was closed or moved meanwhile."""
        try:
            with self._lock:
                if self._settling.get(item.id) is item:
                    self._release_locked(item.id, item.data)
                    del self._settling[item.id]
        except BaseException as error:
            self._let_fall(error, (), [item])
            raise

    def _keep_limits(self) -> None:
        """For ``FullPolicy.DROP_OLDEST``: ``_drop_oldest`` as housekeeping. It raises nothing: the put that called it
        has stored its items. What can't be dropped now, as the journal can't be read, is dropped after a later put.
        """
        try:
            self._drop_oldest()
        except QueueClosed:  # meanwhile
            return
        except Exception:
            if not self._overfull:
                self._overfull = True
                _logging.warning(
                    "reader %s can't drop its oldest items now; it is tried again", self.full_name, error=True
                )
        else:
            if self._overfull:
                self._overfull = False

    def _drop_oldest(self) -> None:
        """Drop unread items from the front until the limits are kept."""
        try:
            with self._lock:
                while True:
                    found = self._next_locked() if self._is_over_limit() else None
                    if found is None:  # or the rest is open
                        break
                    self._release_locked(found[0], found[1][0])
                    self._discarded += 1
                self._update_fast_path_locked()
            self._after_taking([], [])
        except BaseException as error:
            self._let_fall(error)
            raise

    def _call(self, hook: Callable[..., object], *arguments: object) -> object:
        """What the hook returns; ``_RAISED``, which is false, if it raised."""
        try:
            return hook(*arguments)
        except (Exception, SystemExit):
            self._hook_errors += 1
            _logging.exception("a hook of reader %s raised", self.full_name)
            return _RAISED

    # -- the end -----------------------------------------------------------------------------------------------------

    def _break(self, error: Exception, tell: Tell = fail_all) -> None:
        """Make every later call raise ``error``, and wake whoever waits with it. May be repeated. ``tell`` is given
        those who wait, where they can't be told here.
        """
        gone: list[Waiter] = []
        returned, ahead = Requeued(), {}  # type: ignore[var-annotated]
        try:
            with self._lock:
                self._broken, self._fast, self._open, self._settling = error, False, {}, {}
                self._returned, self._ahead, self._batch, self._take = returned, ahead, None, ahead.pop
                gone = self._line.drain()  # at once: else the next item would be given to one of them
                self._after_line_locked()
            tell(gone, error)
        except BaseException:
            tell(gone, error)
            raise

    def _abandon(self, error: Exception) -> None:
        """In a forked child: break without touching any lock that another thread may have held."""
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._line = Line()
        self._broken, self._fast = error, False
        self._open = {}


class _Turns(threading.local):
    """The hand-offs of one thread. ``depth``: how many are under way, one called back by the other; ``left``: readers
    whom the innermost of them has still to serve.
    """

    depth = 0

    def __init__(self) -> None:
        self.left: dict[Taking, None] = {}


_turns = _Turns()


def _is_nested() -> bool:
    """Whether there is a hand-off of this thread to go on with what is left: an exception from outside that struck as
    it ended may have left ``depth`` as it was.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is Taking._hand_off.__code__:
            return True
        frame = frame.f_back
    _turns.depth = 0
    return False


def _serve_left() -> None:
    left = _turns.left
    while left:
        reader = next(iter(left))
        reader._serve_line()
        left.pop(reader, None)  # after that: what strikes in between leaves it to an outer one


def _complete(given: list[tuple[Waiter, Item]], failed: list[tuple[Waiter, Exception]]) -> None:
    """Complete each of them, whatever is raised by what it calls back; the last of that is raised in the end. May be
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
