"""``Export``: what somebody who copies a queue elsewhere may ask of it, and tell it. It knows nothing of where.

Four things: where the journal is durable, which segments may be retired, where the readers are, and up to where puts
are acknowledged.

NOTE ON LOCKING: each call takes the queue's lock (Q in docs/locking.md) or a reader's for a moment, and no call holds
one while it reads a file. Only ``make_durable`` waits, for the disk. No callback of a user runs here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from kestrelpy._disk.interface import File
from kestrelpy._journal.file_names import lasting_name
from kestrelpy._journal.format import Checkpoint
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import Segment
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.gate import Gate
from kestrelpy._writing.group_commit import Absent
from kestrelpy._writing.maintenance import Maintenance
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.errors import KestrelError, QueueDiskFull


class Tip(NamedTuple):
    """Where a journal ends. ``segment``: the one that is being written, if there is one; ``end``: of its last frame.
    ``last_id``: the last id given out. ``total_items``, ``total_bytes``: of all items ever put.
    """

    segment: Segment | None
    end: int
    last_id: int
    total_items: int
    total_bytes: int


class Export:
    """One open queue, as it is seen by whoever copies it. ``holds_back``: readers see an item when the put of it has
    been acknowledged.
    """

    def __init__(
        self,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        files: QueueFiles,
        maintenance: Maintenance,
        *,
        holds_back: bool,
    ) -> None:
        self._status = status
        self._syncer = syncer
        self._source = source
        self._journal = source.journal
        self._registry = registry
        self._room = room
        self._files = files
        self._maintenance = maintenance
        self._holds_back = holds_back

    # -- the journal -------------------------------------------------------------------------------------------------

    @property
    def queue_id(self) -> bytes:
        return self._journal.queue_id

    @property
    def last_id(self) -> int:
        """The last id given out."""
        return self._journal.tail_id

    @property
    def totals(self) -> tuple[int, int]:
        """All items ever put, and their bytes."""
        last_id, total_bytes = self._journal.tail_id, self._journal.total_bytes
        return last_id - self._journal.missing, total_bytes

    def look(self) -> tuple[list[Segment], Tip]:
        """The closed segments, in order, and where the journal ends. Raises ``DurabilityUnknown`` once a sync has
        failed: then the last segment may be closed without its footer.
        """
        with self._source.lock:
            self._journal.sync_target()
            active, end, last_id, total_bytes = self._journal.tip()
            segments, total_items = self._journal.segments, last_id - self._journal.missing
        closed = [each for each in segments if each is not active]
        return closed, Tip(active, end, last_id, total_items, total_bytes)

    def make_durable(self, last_id: int) -> None:
        """Return when all up to this id is on disk: a sync in this process has said so, or recovery has read it from
        the disk (R10). Raises ``DurabilityUnknown``.
        """
        self._syncer.commit.wait(last_id, holding=True)

    def read(self, segment: Segment, offset: int, size: int) -> bytes:
        """The bytes of a segment's file. Only what is durable is read. Raises ``OSError``."""
        file = self._open(segment)
        try:
            return file.read(offset, size)
        finally:
            file.close()

    def read_file(self, segment: Segment) -> bytes:
        """The whole file of a closed segment. Raises ``OSError``."""
        file = self._open(segment)
        try:
            return file.read(0, file.size())
        finally:
            file.close()

    def _open(self, segment: Segment) -> File:
        try:
            return self._files.directory.open(segment.name)
        except FileNotFoundError:  # it is being given its lasting name
            return self._files.directory.open(lasting_name(segment.name))

    def close_segment(self) -> None:
        """Close the segment that is being written. The next put begins another. Raises ``OSError``."""
        with self._source.lock, contextlib.suppress(QueueDiskFull):
            self._journal.rotate()

    def totals_through(self, item_id: int) -> tuple[int, int]:
        """All items ever put up to this id, and their bytes. Raises ``OSError``, ``CorruptJournal``."""
        return self._journal.before(item_id + 1)

    # -- segments and readers ----------------------------------------------------------------------------------------

    def keep_above(self, limit: Callable[[], int]) -> None:
        """Retire no segment with a number above ``limit()``."""
        self._registry.retire_limit = limit

    def retire_soon(self) -> None:
        """The limit has moved."""
        self._maintenance.arm()

    def readers(self) -> tuple[dict[str, Checkpoint], set[str]]:
        """Where each reader is, here or elsewhere; and the names of those that are there, and of which that is not
        known now. Raises ``OSError``.
        """
        return self._registry.states()

    # -- puts --------------------------------------------------------------------------------------------------------

    def acknowledge_by(self, leader: Absent, last_id: int) -> None:
        """From here on, puts wait for ``leader``. ``last_id``: the last item that is acknowledged already. Called
        before the first put.
        """
        self._syncer.acknowledge_elsewhere(leader)
        seen_id = max([last_id, *(state.highest_id for state in self._registry.states()[0].values())])
        if self.totals_through(seen_id)[0] == self.totals[0]:  # no item is left, though ids may have jumped
            seen_id = self._journal.tail_id
        seen_id = min(seen_id, self._journal.tail_id)
        if self._holds_back:
            with self._source.lock:
                self._source.show_only_locked(seen_id, self.totals_through(seen_id)[1])
        self._syncer.acks.durable_id = seen_id

    def acknowledge(self, last_id: int, total_bytes: int) -> None:
        """All up to this id is safe elsewhere. ``total_bytes``: of all items ever put up to there."""
        if self._holds_back:
            with self._source.lock:
                self._source.shown_limit = (last_id, total_bytes)
                self._source.show_durable_locked(last_id, total_bytes)
        self._syncer.acks.note_later(last_id)

    def refuse(self, error: Callable[[], KestrelError], *, waits: bool) -> None:
        """Let every put wait, or raise what ``error`` makes, until ``accept``."""
        self._status.gate = Gate(self._source.name, error, waits=waits)
        self._status.choose_path()

    def accept(self) -> None:
        if self._status.gate is not None:
            self._status.gate = None
            self._status.choose_path()
            self._room.ring_all()

    def note_reported(self) -> None:
        """``QueueStatus.note_reported``."""
        self._status.note_reported()

    def fail(self, error: KestrelError) -> None:
        """Every call of the queue raises ``error`` from here on, and its waiters get it."""
        self._syncer.fail_later(error)
        self._status.on_failed(error)
