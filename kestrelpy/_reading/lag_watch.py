"""Looks how far readers are behind, and does what their configurations say about that.

Rules:
1. Whoever has a reader open moves it. A reader that nobody has open is moved by the queue's owner, who takes the
   reader's lock for that, so that nobody opens it meanwhile.
2. A move is one checkpoint, saved durably before anything else is done: a crash leaves the reader where it was, or
   where it is to be. It counts the items that the reader was moved past, for its next opening.
3. Nothing is logged again and again: one line when a reader falls behind, one when that is over, and at most one a
   minute while it is moved.

NOTE ON LOCKING: none of its own; one look at a time. A look takes what a checkpoint takes, and the guard for a reader
that is not open, for which it does not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy import _logging
from kestrelpy._journal import file_names
from kestrelpy._journal.format import LARGEST
from kestrelpy._journal.queue_files import is_checkpoint_of
from kestrelpy._reading.lag import LagGauge, LagPlace, bytes_behind, has_lag_limits, place_within, shown_lag_limits
from kestrelpy._reading.limits import progress_of
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.skipping import moved_past
from kestrelpy.config import LagPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, QueueClosed, QueueLocked

if TYPE_CHECKING:
    from kestrelpy._journal.format import Checkpoint
    from kestrelpy._reading.checkpointer import Checkpointer
    from kestrelpy._reading.local_source import LocalSource
    from kestrelpy._reading.registry import ReaderRegistry
    from kestrelpy._reading.source import Source

SAID_EVERY = 60.0
"""Seconds between two lines about the items that one reader is moved past."""


class OneReader:
    """What is known of one reader's lag, and what was logged of it."""

    def __init__(self) -> None:
        self.is_behind = False
        self.has_moved = False
        self._gauge = LagGauge()
        self._skipped = 0  # and not logged yet
        self._said_at: float | None = None

    def take_moved(self) -> bool:
        """Whether a look has moved the reader, open in this process, since the last call. The caller of that look then
        calls ``moved`` of the source, with no lock held.
        """
        moved, self.has_moved = self.has_moved, False
        return moved

    def look(self, source: Source, place: LagPlace, config: ReaderConfig) -> bool:
        """Whether the reader is too far behind. Raises ``OSError``."""
        return has_lag_limits(config) and self._gauge.is_behind(source, place, config)

    def note(self, name: str, config: ReaderConfig, *, is_behind: bool, more: str = "") -> None:
        """Log it if the reader has fallen behind since the last look, or has caught up."""
        if is_behind and not self.is_behind:
            _logging.warning("reader %s is too far behind (%s)%s", name, shown_lag_limits(config), more)
        elif self.is_behind and not is_behind:
            _logging.warning("reader %s is not too far behind any more", name)
        self.is_behind = is_behind

    def count_skipped(self, name: str, config: ReaderConfig, items: int, now: float) -> None:
        """The reader was moved past so many items."""
        self.is_behind = False
        self._skipped += items
        if self._skipped and (self._said_at is None or now - self._said_at >= SAID_EVERY):
            limits, count = shown_lag_limits(config), f"{self._skipped:,}"
            _logging.warning("reader %s was too far behind (%s): it was moved past %s items", name, limits, count)
            self._said_at, self._skipped = now, 0


def tend(saver: Checkpointer, source: Source, known: OneReader) -> LagPlace:
    """Look at a reader that is open in this process, and move it if its configuration says so. Returns where it is.

    Raises ``OSError``, ``CorruptJournal`` and ``KestrelError``: it is left for the next look.
    """
    backlog = saver.backlog
    config, place = backlog.config, saver.place()
    is_behind = known.look(source, place, config)
    if is_behind and config.lag_policy is LagPolicy.SKIP:
        items = saver.skip_to(place_within(source, config, place.head))
        known.count_skipped(backlog.full_name, config, items, source.clock.monotonic())
        place, is_behind = saver.place(), False
        known.has_moved = True
    else:
        known.note(backlog.full_name, config, is_behind=is_behind)
    saver.lagging = is_behind
    return place


class LagWatch:
    """The lag of all readers of a queue, in the process that owns it.

    ``refusing``: the configurations of the readers for whom puts are refused now, by full name. ``max_total``: once the
    bytes of all items ever put are more than this, another one of these may be too far behind.
    """

    def __init__(self, registry: ReaderRegistry, source: LocalSource) -> None:
        self._registry = registry
        self._source = source
        self._known: dict[str, OneReader] = {}
        self.refusing: dict[str, ReaderConfig] = {}
        self.max_total = LARGEST

    def look(self) -> None:
        """Look at every reader that has limits of its lag. Raises ``OSError`` and ``KestrelError``: a reader that could
        not be looked at refuses nothing until the next look.
        """
        registry, most = self._registry, LARGEST
        refusing: dict[str, ReaderConfig] = {}
        failure: OSError | KestrelError | None = None
        names = self._names()
        self._known = {name: one for name, one in self._known.items() if name in names}
        for name in sorted(names):
            config, reader = registry.config_for(name), registry.open.get(name)
            if not has_lag_limits(config):
                continue
            one = self._known.setdefault(name, OneReader())
            try:
                if reader is not None:
                    place = tend(checkpointer_of(reader), self._source, one)
                else:
                    place = self._tend_absent(name, config, one)
            except (QueueClosed, QueueLocked):  # closed meanwhile, or somebody makes or drops a reader
                continue
            except (OSError, KestrelError) as error:  # the other readers are looked at all the same
                failure = error
                continue
            if config.lag_policy is LagPolicy.REFUSE:
                if one.is_behind:
                    refusing[self._full_name(name)] = config
                elif config.max_lag_bytes is not None:
                    behind = bytes_behind(self._source, place)
                    most = min(most, self._source.journal.total_bytes - behind + config.max_lag_bytes)
        self.refusing, self.max_total = refusing, most
        if failure is not None:
            raise failure

    def take_moved(self) -> bool:
        """Whether a reader that is open here was moved since the last call."""
        return sum(one.take_moved() for one in self._known.values()) > 0  # any() would not ask all of them

    def _names(self) -> set[str]:
        """The readers that there are; while there is none, the default reader counts, even if nobody has made it."""
        files, queue_id, opened = self._registry.files, self._source.queue_id, set(self._registry.open)
        names = files.directory.names()
        there = files.readers(queue_id, names, known=opened)
        return there | files.lost_names(names, there) | opened or {""}

    def _full_name(self, name: str) -> str:
        queue = self._registry.files.queue
        return f"{queue}+{name}" if name else queue

    def _tend_absent(self, name: str, config: ReaderConfig, known: OneReader) -> LagPlace:
        """Look at a reader that is not open in this process, by its checkpoint, and move it if nobody has it open."""
        files, source = self._registry.files, self._source
        progress = self._progress(files.find(name, source.queue_id))
        place = LagPlace(progress.head, progress.released_bytes)
        full_name = self._full_name(name)
        is_behind, more = known.look(source, place, config), ""
        if is_behind and config.lag_policy is LagPolicy.SKIP:
            items = self._skip_absent(name, config)
            if items is not None:
                known.count_skipped(full_name, config, items, source.clock.monotonic())
                return place
            more = ": another process has it open, and only that process moves it"
        known.note(full_name, config, is_behind=is_behind, more=more)
        return place

    def _progress(self, state: Checkpoint | None) -> Progress:
        """Where a reader with that checkpoint goes on. Without one it begins with the earliest item that is kept."""
        source = self._source
        if state is not None:
            progress = progress_of(state, source)
            if progress.head + 1 >= source.first_id:
                return progress
        return Progress(source.first_id - 1, *source.before(source.first_id))

    def _skip_absent(self, name: str, config: ReaderConfig) -> int | None:
        """Move a reader that nobody has open; how many items it was moved past. ``None`` if another process has it.

        Raises ``QueueLocked`` while somebody makes or drops a reader.
        """
        files, source = self._registry.files, self._source
        with self._registry.guard_open(wait=False):
            was_known = file_names.reader_lock_name(files.queue, name) in files.directory.names()
            try:
                lock = files.lock_reader(name)
            except QueueLocked:
                return None
            try:
                file = files.checkpoint_file(name)
                state, _ = file.load()
                if state is not None and not is_checkpoint_of(state, name, source.queue_id):
                    state = None
                progress = self._progress(state)
                item_id = place_within(source, config, progress.head)
                if item_id <= progress.head + 1:
                    return 0
                moved = moved_past(source, progress, item_id, {})
                kept = name if state is None else state.reader
                saved = moved.checkpoint(source.queue_id, kept, source.durable_id, source.hint(moved.head + 1))
                source.make_durable(saved.last_named_id)
                file.save(saved, durable=True)
                return moved.skipped - progress.skipped
            except BaseException:
                if not was_known:
                    files.forget_owner(name, source.queue_id)
                raise
            finally:
                lock.release()
