"""``DiskRoom``: the room on the disk that one queue may take: kept segments, the journal's limit, readers that lag.

Rules:
1. The fast path of a put knows nothing of it. A journal that may not grow says so where it would grow
   (``_journal/growth.py``); then the put comes here, on its slow path.
2. Puts are refused for a reader that lags by a gate, like those of a full reader. A put that finds the gate closed has
   the reader looked at once more.
3. What depends on time or on other processes is looked at every ``interval`` seconds, and only if an option asks for
   it.

NOTE ON LOCKING: ``looking`` (D in docs/locking.md) is held while readers are looked at, and while this or the
maintenance retires, so that two threads without room do not get in each other's way. It comes before all locks of
readers, and before the guard, for which nobody waits with it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from kestrelpy._checks import check_seconds, check_whole
from kestrelpy._journal.archive_trimming import ArchiveTrimmer
from kestrelpy._journal.format import LARGEST
from kestrelpy._journal.retention import Retention
from kestrelpy._reading.lag import shown_lag_limits
from kestrelpy._reading.lag_watch import LagWatch
from kestrelpy._writing.gate import Gate
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, QueueClosed, QueueFull, QueueLocked

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Directory
    from kestrelpy._journal.growth import JournalFull
    from kestrelpy._reading.local_source import LocalSource
    from kestrelpy._reading.registry import ReaderRegistry
    from kestrelpy._writing.backpressure import Room
    from kestrelpy._writing.status import QueueStatus


class RoomOptions(NamedTuple):
    """The options of a queue about its room on the disk."""

    kept: Retention
    archived: Retention
    max_journal_bytes: int | None

    @classmethod
    def checked(
        cls,
        keep_for: float | None,
        keep_bytes: int | None,
        max_journal_bytes: int | None,
        archive_keep_for: float | None,
        archive_keep_bytes: int | None,
        *,
        segment_bytes: int,
        has_archive: bool,
    ) -> RoomOptions:
        """The options as the queue got them. Raises ``ValueError``, ``TypeError``."""
        for name, seconds in (("keep_for", keep_for), ("archive_keep_for", archive_keep_for)):
            if seconds is not None:
                check_seconds(name, seconds)
        for name, size in (("keep_bytes", keep_bytes), ("archive_keep_bytes", archive_keep_bytes)):
            if size is not None:
                check_whole(name, size)
        archived = Retention(archive_keep_for, archive_keep_bytes)
        if archived.keeps and not has_archive:
            raise ValueError("archive_keep_for and archive_keep_bytes are about archive_dir, which is not given")
        if max_journal_bytes is not None and check_whole("max_journal_bytes", max_journal_bytes) < 2 * segment_bytes:
            least = f"twice segment_bytes, {2 * segment_bytes:,}"
            raise ValueError(f"max_journal_bytes must be at least {least}, not {max_journal_bytes!r}")
        return cls(Retention(keep_for, keep_bytes), archived, max_journal_bytes)


class DiskRoom:
    """The room on the disk of one queue."""

    def __init__(
        self,
        options: RoomOptions,
        status: QueueStatus,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        archive: Directory | None,
        interval: float,
    ) -> None:
        self._status = status
        self._source = source
        self._registry = registry
        self._room = room
        self._interval = interval
        self._clock = source.clock
        self._kept, self._archived = options.kept, options.archived
        self.looking = threading.Lock()
        self._lags = LagWatch(registry, source)  # guarded by self.looking
        self._is_watching = False
        self.growth = growth = source.journal.growth
        growth.max_bytes = options.max_journal_bytes
        growth.left = lambda: tuple(registry.undisposed)
        registry.retention = options.kept
        registry.on_configured = self._note_configured
        self._trimmer: ArchiveTrimmer | None = None
        if archive is not None and options.archived.keeps:
            self._trimmer = ArchiveTrimmer(archive, source.name, source.queue_id, options.archived)
            registry.on_disposed = self._trim
        self.gate = Gate(source.name, self._no_room, waits=registry.may_block, waits_if_told=True)
        """Stands for the journal's limit among those that refuse a put."""

    @property
    def may_refuse(self) -> bool:
        """Whether a put may have to wait for room that no limit of a reader asks for."""
        return self.growth.max_bytes is not None or self._status.room_gate is not None

    def _no_room(self) -> QueueFull:
        limit = self.growth.max_bytes or LARGEST
        return QueueFull(f"the journal of queue {self._source.name} has no room (max_journal_bytes={limit:,})")

    def refusal(self, error: JournalFull) -> Gate:
        """Who refuses a put that the journal has refused. Raises ``QueueFull`` if it would never accept it."""
        if error.is_hopeless:
            raise QueueFull(str(error)) from None
        return self.gate

    def find_room(self) -> None:
        """After a refusal: retire what may go, kept segments first, and look at the readers that lag. Raises nothing:
        what cannot be retired now takes its room.
        """
        with self.looking, contextlib.suppress(OSError, KestrelError):  # the maintenance thread meets and logs it, too
            excess = self.growth.excess(self._source.journal)
            if excess > 0:
                self._registry.retire(self._source, wait=False, excess=excess)
        self._look_at_readers()

    # -- looks -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The queue is open: look at what may have become due while it was closed."""
        self._look_at_readers()
        if self._kept.keeps:
            self._retire()
        self._trim()
        self.watch()

    def watch(self) -> None:
        """Look every ``interval`` seconds, if an option asks for it. The timer holds a weak reference only, so it does
        not keep alive a queue that nobody has.
        """
        if not self._is_watching and self._is_needed():
            self._is_watching = True
            self._watch()

    def _note_configured(self) -> None:
        """A reader was opened, or has another configuration: look before the journal grows again."""
        if self._registry.may_lag:
            self.growth.max_total = -1
        self.watch()

    def _is_needed(self) -> bool:
        by_time = (self._kept.keep_for, self._archived.keep_for)
        return self._registry.may_lag or any(seconds is not None for seconds in by_time)

    def _watch(self) -> None:
        mine = weakref.ref(self)

        def look(_lost: object = None) -> None:
            room = mine()
            if room is not None:
                room._look()

        try:
            self._clock.call_later(self._interval, look, on_lost=look)
        except RuntimeError:  # no thread can be started
            self._source.leave(self._watch)

    def _look(self) -> None:
        if self._status.error is not None:
            return
        try:
            self._look_at_readers()
            if self._kept.keep_for is not None:
                self._retire()
            if self._trimmer is not None and self._trimmer.is_due(self._clock.time_ns() // 1_000_000):
                self._trim()
        finally:
            self._watch()

    def _look_at_readers(self) -> None:
        if not self._registry.may_lag:
            return
        what, trouble = f"looking how far readers of {self._source.name} are behind", self._registry.trouble
        with self.looking:
            try:
                self._lags.look()
                trouble.end(what)
            except (OSError, KestrelError) as error:
                if self._status.error is None:
                    trouble.begin(what, error)
            opened, moved = self._choose_gate(), self._lags.take_moved()
        if moved:
            self._source.moved()
        if opened:
            self._room.ring_first()

    def _choose_gate(self) -> bool:
        """Refuse puts, or accept them again; true if they are accepted again. Under ``looking``."""
        lags, status = self._lags, self._status
        waiting = {name: config.full_policy is FullPolicy.BLOCK for name, config in lags.refusing.items()}
        was = gate = status.room_gate
        if gate is None or waiting.get(gate.name) is not gate.waits:  # else the producers in line wait for that one
            chosen = sorted(waiting, key=lambda name: waiting[name])[:1]  # a reader that lets nobody wait comes first
            gate = self._gate_of(chosen[0], lags.refusing[chosen[0]]) if chosen else None
        status.room_gate = gate
        self.growth.max_total = lags.max_total
        status.choose_path()
        return was is not None and gate is None

    @staticmethod
    def _gate_of(name: str, config: ReaderConfig) -> Gate:
        message = f"reader {name} is too far behind ({shown_lag_limits(config)})"
        return Gate(name, lambda: QueueFull(message, reader=name), waits=config.full_policy is FullPolicy.BLOCK)

    def _retire(self) -> None:
        what, trouble = f"retiring segments of {self._source.name}", self._registry.trouble
        try:
            with self.looking:
                self._registry.retire(self._source, wait=False)
            trouble.end(what)
        except QueueLocked:  # the next look tries again
            return
        except (OSError, QueueClosed) as error:
            trouble.begin(what, error)

    def _trim(self) -> None:
        if self._trimmer is None:
            return
        what, trouble = f"trimming the archive of {self._source.name}", self._registry.trouble
        try:
            self._trimmer.trim(self._clock.time_ns() // 1_000_000)
            trouble.end(what)
        except OSError as error:
            if self._status.error is None:
                trouble.begin(what, error)
