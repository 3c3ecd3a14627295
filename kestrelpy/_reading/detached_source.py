"""A reader in another process than the writer: it reads segments and writes its own checkpoint, nothing else.

Rules:
1. A reader sees the journal up to the first frame that is not whole (``kestrelpy._journal.follow``).
2. Nobody wakes this process: while a consumer waits in line, the source polls the files. It polls soon at first, then
   less often; and more often the less time has passed since the last item came.

NOTE ON LOCKING: ``_looking`` guards the view while it follows the writer. It may be asked for while a reader's lock is
held. Only leaves, such as a lock file's ``_releasing``, are asked for while ``_looking`` is held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, cast, overload

from kestrelpy._checks import check_seconds
from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import known_queue_id
from kestrelpy._journal.follow import FollowingView, FrameCounter
from kestrelpy._journal.format import Checkpoint
from kestrelpy._journal.purpose import refuse_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import (
    FramePosition,
)
from kestrelpy._journal.view import Block
from kestrelpy._process import forget, remember, warn_unclosed
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.lag import has_lag_limits
from kestrelpy._reading.lag_watch import OneReader, tend
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry, Start, check_start
from kestrelpy._reading.source import Cursor, Served, Take
from kestrelpy.clock import Clock, SystemClock, Timer
from kestrelpy.config import Codec, FullPolicy, ReaderConfig, check_codec, check_config
from kestrelpy.errors import (
    CorruptJournal,
    ForkedQueue,
    KestrelError,
    QueueClosed,
    QueueLocked,
    UnknownReader,
    copy_of,
)
from kestrelpy.item import V

FIRST_POLL = 0.0005
"""Seconds before the first poll; no wait is shorter. A poll costs 25 microseconds: 3 of its own, the rest to wake up
for it.
"""

POLL_SHARE = 1 / 32
"""The wait between two polls is at most this share of the time since the last item came (but at least ``FIRST_POLL``).
So if items come one by one, at any pace, each waits for at most this share of the pause before it, and for half of that
on average.
"""

CHECKPOINT_INTERVAL = 1.0


class CheckpointDirectory:
    """A queue's folder, for a process that saves a reader's checkpoint there and does not own the queue. Every file is
    looked up, made and renamed under the guard, and only as long as ``check`` raises nothing: if the queue is erased
    meanwhile and made again, with a reader of that name, it is another queue.
    """

    GUARDED = ("open", "create", "rename", "exchange", "unlink")

    def __init__(self, files: QueueFiles, check: Callable[[], None]) -> None:
        self._files = files
        self._check = check

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._files.directory, name)
        return partial(self._guarded, call) if name in self.GUARDED else call

    def _guarded(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._check()  # before the guard too: asking for it makes its file
        with nullcontext() if self._files.is_guarded else self._files.guard():
            self._check()
            return call(*arguments, **options)


class DetachedSource:
    """The ``Source`` of a reader in another process."""

    knows_heads = False
    _gone = False  # guarded by self._looking: the reader is closed, and the files with it

    def __init__(
        self,
        directory: Directory,
        queue: str,
        clock: Clock,
        poll_interval: float,
        registry: ReaderRegistry,
        counter: FrameCounter | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.name = queue
        self._codec = codec
        self.clock = clock
        self.disk = registry.files.disk
        self.waiting: dict[Served, None] = {}
        self._directory = directory
        self._poll_interval = poll_interval
        self._first_poll = min(FIRST_POLL, poll_interval)
        self._registry = registry
        self._counter = counter
        self._view = FollowingView(directory, queue, self._check_there, counter)
        self._looking = threading.Lock()
        self._polling = False
        self._maintenance_armed = False
        self._next_poll: Timer | None = None
        self._next_round: Timer | None = None
        self._next_lag_look: Timer | None = None
        self._lag: OneReader | None = None
        self._pid = os.getpid()
        registry.files.checkpoint_directory = cast("Directory", CheckpointDirectory(registry.files, self._check_there))
        self._look()
        self._moved_at = clock.monotonic()
        remember(self)

    def _look(self) -> None:
        with self._looking:
            self._view.follow()
            if not self._view.segments:
                states = self._registry.files.load_all(self._directory.names())
                self._view.queue_id = known_queue_id(states) or self._view.queue_id
        self._seen_id = self._view.tail_id

    def look_again(self) -> None:
        """Start again if the queue was erased, and perhaps made again, since the first look. Nothing else shows that
        until this process holds a lock of the queue. Called under the guard, before a reader is made or opened: from
        then on, whoever makes these files follow a log sees the reader. Raises ``QueueLocked`` if they do already.
        """
        file_names.refuse_standby(self._directory.names(), self.name, self._directory.path)
        if not self._view.is_still_there():
            self._view.close()
            self._view = FollowingView(self._directory, self.name, self._check_there, self._counter)
            self._look()

    @property
    def view(self) -> FollowingView:
        """The journal, as it was seen last."""
        return self._view

    @property
    def visible_id(self) -> int:
        """The id of the last whole item. Looks at the files again, unless the reader is closed: then it is the last id
        that was seen. Raises ``QueueClosed`` if the queue was erased.
        """
        view = self._view
        with self._looking:
            seen = view.tail_id
            if self._gone:
                return seen
            with self._erasure_noticed():
                view.follow()
        if view.tail_id == seen:
            self._check_there()
        return view.tail_id

    @property
    def seen_id(self) -> int:
        return self._view.tail_id

    def _check_there(self) -> None:
        if self._registry.is_erased():
            raise QueueClosed(f"queue {self.name!r} was erased")

    @contextmanager
    def _erasure_noticed(self) -> Iterator[None]:
        """Raise ``QueueClosed`` if an error comes from the queue having been erased: its files are gone, or they are
        another queue's.
        """
        try:
            yield
        except (CorruptJournal, FileNotFoundError):
            self._check_there()
            raise

    @property
    def missing(self) -> int:
        return self._view.missing

    @property
    def visible_bytes(self) -> int:
        return self._view.total_bytes

    @property
    def first_id(self) -> int:
        """The earliest id that is kept. Looks at the files again."""
        with self._looking:
            self._view.forget_gone()
        return self._view.first_id

    @property
    def queue_id(self) -> bytes:
        return self._view.queue_id

    @property
    def directory(self) -> Directory:
        return self._directory

    @property
    def files(self) -> QueueFiles:
        """The queue's files, and who owns which of them."""
        return self._registry.files

    @property
    def durable_id(self) -> int:
        return self._view.durable_id

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, FramePosition] | None) -> Block:
        with self._erasure_noticed():
            return self._view.read(item_id, self._view.last_id_without_hole(item_id, last_id), max_bytes, hint)

    def is_gap(self, item_id: int) -> bool:
        return self._view.is_gap(item_id)

    def before(self, item_id: int) -> tuple[int, int]:
        with self._erasure_noticed():
            return self._view.before(item_id)

    def find_time(self, time_ms: int, last_id: int) -> int:
        with self._erasure_noticed():
            with self._looking:
                self._view.forget_gone()
            return self._view.find_time(time_ms, last_id)

    def hint(self, item_id: int) -> tuple[int, FramePosition]:
        return self._view.hint(item_id)

    def window(self, cursor: Cursor) -> Take | None:  # noqa: ARG002 - there is none to share
        return None

    def attach(self, cursor: Cursor) -> None:
        """Nothing to do: there is no shared window."""

    def detach(self, cursor: Cursor) -> None:
        """Nothing to do: there is no shared window."""

    @property
    def _reader(self) -> Checkpointer | None:
        """The only reader of this source; ``None`` before it is made and after it is closed."""
        return next((checkpointer_of(reader) for reader in self._registry.open.values()), None)

    def decode(self, data: bytes) -> Any:
        return data if self._codec is None else self._codec.decode(data)

    def make_durable(self, item_id: int) -> None:
        with self._looking:
            self._view.make_durable(item_id)

    def guard(self) -> AbstractContextManager[None]:
        return self._registry.guard()

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None:
        try:
            self._registry.save(reader, state, durable)
        except QueueClosed:
            if checkpointer_of(reader).backlog.broken is None:
                raise
            return  # the reader is closing, and its queue was erased before
        with self._looking:
            self._view.forget_gone()

    # -- polling ----------------------------------------------------------------------------------------------------

    def polls(self) -> None:
        if not self._polling:
            self._polling = True
            try:
                self._poll_in(self._first_poll)
            except BaseException:
                self._polling = False
                raise

    def _poll_in(self, seconds: float) -> None:
        self._next_poll = self.clock.call_later(seconds, lambda: self._poll(seconds), on_lost=self._lost)

    def _poll(self, waited: float) -> None:
        reader = self._reader
        if reader is None or reader.backlog.broken is not None or not reader.backlog.line:
            self._polling = False
            if reader is not None and reader.backlog.line:  # a waiter entered in between
                self.polls()
            return
        if self._is_orphan(reader):
            return
        try:
            reader.dispatcher.hand_off()
        finally:  # whatever a callback raises: other waiters need the next poll
            tail_id, now = self._view.tail_id, self.clock.monotonic()
            if tail_id != self._seen_id:  # seen by this poll, or by the reader itself
                self._seen_id, self._moved_at = tail_id, now
            seconds = min(waited * 2, (now - self._moved_at) * POLL_SHARE)
            self._poll_in(min(max(seconds, self._first_poll), self._poll_interval))

    def _is_orphan(self, reader: Checkpointer) -> bool:
        """Whether the queue was erased. If so, the waiters and every later call get ``QueueClosed``."""
        try:
            self._check_there()
        except QueueClosed as error:
            self._polling = False
            reader.orphan(copy_of(error))
            return True
        return False

    def _lost(self, cause: BaseException) -> None:
        reader = self._reader
        if reader is not None:
            reader.dispatcher.fail_waiting(KestrelError(f"the maintenance thread died: {cause!r}"))

    def moved(self) -> None:
        if not self._maintenance_armed:
            self._maintenance_armed = True
            try:
                call_later = self.clock.call_later
                self._next_round = call_later(CHECKPOINT_INTERVAL, self._maintain, on_lost=self._lost)
            except RuntimeError:  # no thread can be started: the next commit tries again
                self._maintenance_armed = False
            except BaseException:
                self._maintenance_armed = False
                raise

    def _maintain(self) -> None:
        self._maintenance_armed = False
        reader = self._reader
        if reader is None or reader.backlog.broken is not None or self._is_orphan(reader):
            return
        backlog = reader.backlog
        backlog.may_skip_notify = False
        if backlog.config.full_policy is FullPolicy.DROP_OLDEST:
            reader.dispatcher.keep_limits()
        if reader.holds_segments:
            trouble, what = self._registry.trouble, f"saving the position of {backlog.full_name}"
            try:
                with self._registry.guard(wait=False):  # else this thread waits, and so do all timers
                    pass
                reader.save(True)
                trouble.end(what)
            except QueueLocked:
                self.moved()
            except (OSError, QueueClosed) as error:
                if not isinstance(backlog.broken, QueueClosed):  # else it was closed meanwhile, and that saves
                    trouble.begin(what, error)
                    self.moved()

    def watch_lag(self) -> None:
        """Every ``CHECKPOINT_INTERVAL`` seconds, look how far the reader is behind, if its configuration has limits of
        that. The timer holds a weak reference only, so it does not keep alive a reader that nobody has.
        """
        reader = self._reader
        if self._lag is None and reader is not None and has_lag_limits(reader.backlog.config):
            self._lag = OneReader()
            self._watch_lag()

    def _watch_lag(self) -> None:
        mine = weakref.ref(self)

        def look(_lost: object = None) -> None:
            source = mine()
            if source is not None:
                source._look_at_lag()

        with suppress(RuntimeError):  # no thread can be started: then nobody looks
            self._next_lag_look = self.clock.call_later(CHECKPOINT_INTERVAL, look, on_lost=look)

    def _look_at_lag(self) -> None:
        reader, known = self._reader, self._lag
        if reader is None or known is None or reader.backlog.broken is not None or self._is_orphan(reader):
            return
        trouble, what = self._registry.trouble, f"looking how far {reader.backlog.full_name} is behind"
        try:
            with self._registry.guard(wait=False):  # as in ``_maintain``
                pass
            tend(reader, self, known)
            trouble.end(what)
        except QueueClosed:
            return
        except QueueLocked:
            pass
        except (OSError, KestrelError) as error:
            trouble.begin(what, error)
        self._watch_lag()
        if known.take_moved():
            self.moved()

    # -- the end -----------------------------------------------------------------------------------------------------

    def configured(self, reader: Reader, config: ReaderConfig) -> None:
        self._registry.configure(reader, config)
        self.watch_lag()

    def closed_reader(self, reader: Reader) -> None:
        """The reader has closed: close everything that was opened for it."""
        forget(self)
        try:
            self._registry.release(reader)
        finally:
            self._registry.leave()
            self._release_all()

    def _release_all(self) -> None:
        for timer in (self._next_poll, self._next_round, self._next_lag_look):
            if timer is not None:  # it would keep these objects alive
                timer.cancel()
        with self._looking:
            self._gone = True
            self._view.close()
        self._directory.close()

    def _dismiss(self, error: QueueClosed) -> None:
        reader = self._reader
        if reader is not None:
            reader.dispatcher.dismiss(error)

    def close(self) -> None:
        """Close the reader and its files: at the end of the interpreter, or if the reader could not be made."""
        forget(self)
        try:
            reader = self._reader
            if reader is not None:
                reader.close()
        finally:
            self._registry.leave()
            self._release_all()

    @property
    def _what(self) -> str:
        return f"Reader {', '.join(map(repr, self._registry.open))} of queue {self.name!r} in {self._directory.path}"

    def __del__(self) -> None:
        if not getattr(self, "_gone", True) and self._registry.open:
            warn_unclosed(self)

    def __repr__(self) -> str:
        names = ", ".join(f"{self.name}+{reader}" if reader else self.name for reader in self._registry.open)
        return f"<Reader {names}>"

    def _abandon(self) -> None:
        self._registry.abandon(ForkedQueue(self._pid))
        self._looking = threading.Lock()
        self._gone = True  # figures show what was seen last
        self._view.close()
        self._directory.close()


@overload
def open_reader(
    directory: str | os.PathLike[str],
    queue: str,
    reader: str,
    *,
    config: ReaderConfig | None = None,
    create: bool = False,
    start: Start = "tail",
    poll_interval: float = 0.05,
    codec: None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> Reader[bytes]: ...


@overload
def open_reader(
    directory: str | os.PathLike[str],
    queue: str,
    reader: str,
    *,
    config: ReaderConfig | None = None,
    create: bool = False,
    start: Start = "tail",
    poll_interval: float = 0.05,
    codec: Codec[V],
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> Reader[V]: ...


def open_reader(
    directory: str | os.PathLike[str],
    queue: str,
    reader: str,
    *,
    config: ReaderConfig | None = None,
    create: bool = False,
    start: Start = "tail",
    poll_interval: float = 0.05,
    codec: Codec | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> Reader:
    """Open one reader of a queue that another process writes (or nobody does).

    This process owns the reader until its ``close()``. While a consumer waits in its line, the files are polled every
    ``poll_interval`` seconds at the latest. While items come, they are polled whenever a thirtieth of the time since
    the last item has passed, but at most twice a millisecond, which takes a few percent of a processor.

    ``create=True`` makes the reader if the queue does not have it, also before the queue itself is made. A new reader
    begins at ``start``: ``"tail"``, ``"earliest"`` or an item id. The first named reader takes over the default
    reader's position instead. If the default reader is open at that time, it stays: the new reader begins at ``start``
    and stands beside it. ``config``: its limits and hooks here. ``codec`` is that of the queue, for ``Item.value``;
    without it, values are bytes.

    Raises ``UnknownReader`` if there is no such reader, ``QueueLocked`` if it has an owner, ``InvalidName``,
    ``NoDefaultReader``, ``WrongKind`` for a work queue, ``CorruptJournal``, ``UnsupportedFormat``, ``ValueError``,
    ``TypeError``, ``OSError`` (``FileNotFoundError`` for a folder that is not there).
    """
    file_names.check_name(queue)
    if reader:
        file_names.check_name(reader)
    check_start(start)
    check_codec(codec)
    poll_interval = check_seconds("poll_interval", poll_interval, above_zero=True)
    config = check_config("config", config if config is not None else ReaderConfig())
    real = disk or RealDisk()
    folder = real.directory(os.fspath(directory))
    outside: DetachedSource | None = None
    try:
        refuse_jobs(folder, queue)
        files = QueueFiles(folder, queue, real)
        if reader and not create:
            _require_reader(files, reader)
        registry = ReaderRegistry(files, {}, config, _nothing)
        clock = clock if clock is not None else SystemClock()
        outside = DetachedSource(folder, queue, clock, poll_interval, registry, codec=codec)
        registry.source = outside
        opened = registry.reader(reader, start)
        outside.watch_lag()
        return opened
    except BaseException:
        if outside is None:
            folder.close()
        else:
            outside.close()
        raise


def _require_reader(files: QueueFiles, reader: str) -> None:
    """Raise ``UnknownReader`` unless the queue has the reader: a checkpoint, or, if it was lost, an owner."""
    names = files.directory.names()
    readers = files.reader_names(names)
    if reader not in readers and file_names.reader_lock_name(files.queue, reader) not in names:
        queues = file_names.queues_among(names)
        named = tuple(sorted(readers - {""}))
        raise UnknownReader(files.queue, reader, named, None if files.queue in queues else tuple(queues))


def _nothing() -> None:
    """Nothing to do if limits change: this process puts nothing."""
