"""``Standby``: a queue on another machine that follows its log, and takes it over.

Rules:
1. A thread follows. It holds no reference to the ``Standby``, so one that nobody has is noticed.
2. Whatever goes wrong is tried again after ``poll_interval``, and nothing of it ever leads to a takeover.
3. A takeover reads the log to its end, applies it, makes sure of room, and only then opens the queue, which appends the
   FENCE. The opening appends nothing if another owner came in between.

NOTE ON LOCKING: ``_Following.turn`` is held for one look at the log, and for a takeover: requests to the store and
syncs. Nobody waits for anything else with it. ``close`` does not ask for it before the thread has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, cast

from kestrelpy._checks import check_seconds, check_timeout
from kestrelpy._disk.interface import NO_ROOM, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.file_names import check_name
from kestrelpy._process import forget, remember, warn_unclosed
from kestrelpy._writing.options import check_sizes
from kestrelpy.clock import SystemClock
from kestrelpy.errors import ForkedQueue, KestrelError, QueueClosed, QueueDiskFull, copy_of
from kestrelpy.ship.errors import HistoryMismatch, NoSuchQueue, OwnerAlive, ShipError, StoreUnavailable
from kestrelpy.ship.following import Follower, StandbyStatus
from kestrelpy.ship.opening import open_store, url_of
from kestrelpy.ship.options import Ship
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.rejoining import set_aside
from kestrelpy.ship.standby_folder import StandbyFolder
from kestrelpy.ship.store import Store
from kestrelpy.ship.takeover import Takeover

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kestrelpy.queue import JournaledQueue

__all__ = ["Standby"]

SEGMENT_BYTES = 16 << 20
"""There must be room for so much before a takeover, unless ``segment_bytes`` is among its options."""


class Standby:
    """A queue's files in ``directory``, kept at the end of its log in ``store``, to be taken over from there.

    It has the queue's lock. What is missing is restored; then a thread looks at the log each ``poll_interval`` seconds,
    and writes what is new. ``scan`` may look at the files meanwhile; a ``JournaledQueue`` or ``open_reader`` there
    raises ``QueueLocked``. If these files are those of an owner that was taken over, what it had not shipped is set
    aside first (``rejoin``). ``options``: for ``open_store``. ``owner``: what the owner is called after the takeover.
    ``disk`` replaces the system's, for tests.

    Raises ``QueueLocked`` if somebody has the queue or one of its readers open here, ``RestoreTargetExists`` if the
    folder has a queue of that name that is not shipped, ``HistoryMismatch`` if it is shipped elsewhere,
    ``BadStoreURL``, ``InvalidName``, ``CorruptJournal``, ``ValueError``, ``TypeError``, ``OSError``. What goes wrong
    later is in ``status()``. Thread-safe. A context manager.
    """

    _following: _Following | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        queue: str,
        store: str | Store | Any,
        *,
        poll_interval: float = 1.0,
        options: Mapping[str, Any] | None = None,
        owner: str | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.name = check_name(queue)
        self.directory = os.fspath(directory)
        check_seconds("poll_interval", poll_interval, above_zero=True)
        self._ship = Ship(store, options=options, owner=owner)
        self._disk = disk
        self._url = url_of(store, opened := open_store(store, options=options))
        self._following = following = _Following(self.directory, queue, opened, self._url, poll_interval, disk)
        try:
            following.start()
        except BaseException:
            following.close()
            raise
        remember(self)

    def status(self) -> StandbyStatus:
        """How it goes, at this moment. Asks the store nothing."""
        return self._its.status()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the queue may be taken over: its owner's lease is over, or it was handed over. Returns whether
        that is so after ``timeout`` seconds (``None``: however long it takes).

        An owner without a lease may be taken over when it has handed the queue over, and else by force alone. Raises
        ``QueueClosed``, ``ForkedQueue``.
        """
        check_timeout(timeout)
        return self._its.wait(timeout)

    def take_over(self, *, force: bool = False, **queue_options: Any) -> JournaledQueue:
        """Become the queue's owner: return it, open. It is a ``WorkQueue`` instead if the store says so. This standby
        is over then.

        ``queue_options``: those of the queue. ``ship`` among them must be of the same store; by default it is
        ``Ship(store)``. ``force``: whatever the lease says. An owner that is alive is fenced; with ``acks="disk"`` it
        has then acknowledged puts that are in no log.

        Raises ``OwnerAlive`` if the queue may not be taken over yet, ``QueueDiskFull`` if there is no room for a
        segment, ``Fenced`` if another one has taken it over meanwhile, and what the opening raises. Then it follows on.
        """
        following = self._its
        ship = self._options_of(queue_options)
        size = queue_options.get("segment_bytes", SEGMENT_BYTES)
        check_sizes(size, None)
        with following.turn_now():
            while True:
                epoch = following.make_ready(size, force=force)
                slot = following.follower.slot
                options = {"disk": self._disk, **queue_options, "ship": Takeover(ship, epoch)}
                try:
                    queue = self._open(following, options)
                except BaseException as error:
                    is_back = following.go_on(error)
                    if not is_back or not isinstance(error, HistoryMismatch) or not following.has_grown(slot):
                        raise
                    continue  # the old owner has appended something in between
                following.end(QueueClosed("the standby has taken the queue over"), "taken")  # while it is our turn
                break
        following.close()
        forget(self)
        return queue

    def _open(self, following: _Following, options: dict[str, Any]) -> JournaledQueue:
        kind = _kind_of_queue(of_jobs=following.shipped.of_jobs)
        following.folder.unlock()  # as late as can be
        return kind(self.directory, self.name, **options)

    def _options_of(self, queue_options: dict[str, Any]) -> Ship:
        given = queue_options.get("ship", self._ship)
        ship = Ship(given) if isinstance(given, str) else given
        if not isinstance(ship, Ship):
            raise TypeError(f"ship must be a URL or a Ship, not {type(given).__name__}")
        if ship is not self._ship and url_of(ship.store, ship.open()) != self._url:
            raise ValueError(f"ship is of another store than the standby: {ship.shown}")
        return ship

    @property
    def _its(self) -> _Following:
        assert self._following is not None
        return self._following

    def close(self) -> None:
        """Follow no more. The files stay: another ``Standby`` goes on with them. May be repeated."""
        self._its.close()
        forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _what(self) -> str:
        return f"Standby of queue {self.name!r} in {self.directory}"

    def __del__(self) -> None:
        following = self._following
        if following is not None and following.ended is None:
            following.stop()
            warn_unclosed(self)

    def __repr__(self) -> str:
        status = self.status()
        return f"<Standby of {self.name} in {self.directory}: {status.state} slot={status.slot}>"

    def _dismiss(self, error: QueueClosed) -> None:
        self._its.dismiss(error)

    def _abandon(self) -> None:
        self._its.abandon()


def _kind_of_queue(*, of_jobs: bool) -> Callable[..., JournaledQueue]:
    """What opens the queue: a ``WorkQueue`` for one of jobs."""
    if of_jobs:
        from kestrelpy.work import WorkQueue

        return cast("Callable[..., JournaledQueue]", WorkQueue)
    from kestrelpy.queue import JournaledQueue

    return JournaledQueue


class _Following:
    """The thread of a standby, and what it has open."""

    def __init__(
        self, directory: str, queue: str, store: Store, url: str, poll_interval: float, disk: Disk | None
    ) -> None:
        self.turn = threading.Lock()
        self.ended: KestrelError | None = None
        """Why it follows no more."""
        self._end_word = "closed"
        self._pid = os.getpid()
        self._directory = directory
        self._poll_interval = poll_interval
        self._disk = disk
        self._is_wanted = False  # somebody waits for the turn
        self._rung = threading.Event()
        self._news = threading.Event()  # it may be taken over, or is over
        self._has_rejoined = False
        self._trouble = ""
        self._last_error = ""
        self._began = SystemClock.elapsed()
        folder = (disk or RealDisk()).directory(directory, create=True)
        try:
            self.shipped = ShippedQueue(store, queue)
            self.folder = StandbyFolder(folder, self.shipped, url, disk)
            self.folder.lock()
        except BaseException:
            folder.close()
            raise
        self.follower = Follower(self.folder, self.shipped)
        self.thread = threading.Thread(target=self._run, name=f"kestrelpy-standby-{queue}", daemon=True)

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to follow. Raises ``RuntimeError`` if no thread can be started."""
        self.thread.start()

    def _run(self) -> None:
        while self.ended is None:
            with self.turn:
                more = self.ended is None and self.look()
            if not more or self._is_wanted:
                self._rung.wait(self._poll_interval)
            if self.ended is None:
                self._rung.clear()

    def look(self) -> bool:
        """One look at the log, with whatever error. Returns whether there was something. With ``turn``."""
        try:
            return self._look()
        except BaseException as error:
            self._note_error(error)
            return False

    def _look(self, *, surely: bool = False) -> bool:
        if not self._has_rejoined:
            set_aside(self.folder, self.shipped, self._disk)
            self._has_rejoined = True
        more = self.follower.look(surely=surely)
        self._trouble = ""
        self._notify()
        return more

    def _notify(self) -> None:
        """Let those go on who wait for news, or wait for other ones."""
        if self.follower.is_over:
            self._news.set()
            return
        self._news.clear()
        if self.ended is not None:  # after the clearing: who ends it looks the other way round
            self._news.set()

    def _note_error(self, error: BaseException) -> None:
        """What is tried again leads to nothing else (rule 2)."""
        self.follower.is_over = False
        self._notify()
        if isinstance(error, StoreUnavailable | NoSuchQueue):
            self._trouble = "away"
        elif isinstance(error, OSError) and error.errno in NO_ROOM:
            self._trouble = "full"
        else:
            self._trouble = "damaged"
        self._last_error = f"{type(error).__name__}: {error}"

    @contextlib.contextmanager
    def turn_now(self) -> Iterator[None]:
        """``turn``, for another thread than the one that follows. Raises ``QueueClosed``, ``ForkedQueue``."""
        self._is_wanted = True
        try:
            with self.turn:
                self._is_wanted = False
                self.check_usable()
                yield
        finally:
            self._is_wanted = False
            self._rung.set()

    # -- a takeover --------------------------------------------------------------------------------------------------

    def make_ready(self, size: int, *, force: bool) -> int:
        """Read the log to its end, and apply it; make sure that there is room for a segment. Returns the epoch that may
        be taken over. Raises as ``Standby.take_over``. With ``turn``.
        """
        follower = self.follower
        try:
            self._read_on()
            state = follower.state
            assert state is not None
            if not (force or follower.is_over or self.folder.is_ours(state)):
                left = follower.watch.left
                raise OwnerAlive(follower.owner, inf if left is None else left)
            self.folder.hold_room(size)
            self.folder.save_mark(state)
            self.folder.note(state)
        except OwnerAlive:
            raise
        except BaseException as error:
            self._note_error(error)
            if isinstance(error, OSError) and not isinstance(error, ShipError) and error.errno in NO_ROOM:
                raise QueueDiskFull(self._directory) from error
            raise
        return len(state.fences)

    def _read_on(self) -> None:
        """Look at the log until its end is reached."""
        while self._look(surely=True):
            pass

    def go_on(self, error: BaseException) -> bool:
        """An opening was given up: take the lock again, and believe nothing of the files. Returns False if somebody
        else has the lock: then this standby is over.
        """
        self._last_error = f"{type(error).__name__}: {error}"
        try:
            self.folder.unlock()  # it may not have come so far
            self.folder.lock()
        except Exception as lost:  # somebody else was quicker, and opens the queue
            self._last_error = f"{type(lost).__name__}: {lost}"
            self.end(QueueClosed(f"the standby is over, somebody else has the queue here: {lost}"), "closed")
            return False
        self._has_rejoined = False
        self.follower.begin_again()
        return True

    def has_grown(self, slot: int) -> bool:
        """Whether the log has more than that slot by now."""
        return self.shipped.at_end().slot > slot

    # -- the end -----------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        if self.ended is not None:
            raise copy_of(self.ended)

    def wait(self, timeout: float | None) -> bool:
        until = inf if timeout is None else SystemClock.monotonic() + timeout
        while True:
            self.check_usable()
            self._news.wait(min(max(0.0, until - SystemClock.monotonic()), threading.TIMEOUT_MAX))
            self.check_usable()
            if self.follower.is_over:
                return True
            if SystemClock.monotonic() >= until:  # else there were news, and they are old already
                return False

    def end(self, error: KestrelError, word: str) -> None:
        """Follow no more. Does not wait for a look that is under way."""
        if self.ended is None:
            self.ended, self._end_word = error, word
        self._news.set()
        self._rung.set()

    def stop(self) -> None:
        """End soon, without waiting for it."""
        self.end(QueueClosed("the standby is closed"), "closed")
        self.shipped.store.stop()

    def close(self) -> None:
        if isinstance(self.ended, ForkedQueue):
            return
        self.stop()
        if self.thread.ident is not None:
            self.thread.join()
        state = self.follower.state
        if self._end_word == "closed" and self.follower.is_over and state is not None:
            with contextlib.suppress(KestrelError, OSError):  # who opens the queue next need not wait for it again
                self.folder.note(state, lease_over=True)
        self.folder.unlock()
        self.folder.directory.close()

    def dismiss(self, error: QueueClosed) -> None:
        """The interpreter is ending: nobody may wait any more."""
        self.end(error, "closed")

    def abandon(self) -> None:
        """In a forked child: there is no thread, and the rest is the parent's."""
        self.turn, self._news, self._rung = threading.Lock(), threading.Event(), threading.Event()
        self.ended = ForkedQueue(self._pid)
        self.folder.abandon()

    def status(self) -> StandbyStatus:
        follower = self.follower
        if self.ended is not None:
            word = self._end_word
        elif self._trouble:
            word = self._trouble
        elif follower.is_over:
            word = "over"
        else:
            word = "following" if follower.is_at_end else "behind"
        since = follower.at_end_since
        behind = SystemClock.elapsed() - (self._began if since is None else since)
        return StandbyStatus(
            slot=follower.slot,
            last_id=follower.last_id,
            behind_seconds=0.0 if word in ("following", "over") else behind,
            owner=follower.owner,
            lease_left=follower.watch.left,
            state=word,
            last_error=self._last_error,
        )
