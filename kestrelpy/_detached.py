"""A reader in another process than the writer: it reads segments and writes its own checkpoint, nothing else.

Rules:
1. What is seen ends at the first frame that is not whole: the writer may be in the middle of it, or may have died
   there. A footer says which, in time.
2. Nobody wakes this process: while somebody waits in line, the files are looked at again, soon at first and then more
   seldom, and the more often the less time has passed since something came.

NOTE ON LOCKING: ``_looking`` guards the view while it follows the writer; a reader's lock may be held when it is
asked for, and nothing is asked for while it is held.
"""

from __future__ import annotations

import os
import threading
from typing import Any, cast

from kestrelpy import _format as fmt
from kestrelpy import _log
from kestrelpy._checkpoint import known_queue_id
from kestrelpy._disk import Directory, File
from kestrelpy._format import Checkpoint, SegmentHeader
from kestrelpy._lifetime import forget, remember
from kestrelpy._names import is_new, segments_among
from kestrelpy._readership import Readership
from kestrelpy._segment import (
    Place,
    Segment,
    first_header,
    is_none,
    iterate_frames,
    load_segment,
    open_segment,
    read_footer,
    read_header,
)
from kestrelpy._source import Take
from kestrelpy._taking import Taking
from kestrelpy._view import Block, JournalView
from kestrelpy.clock import Clock
from kestrelpy.config import FullPolicy
from kestrelpy.errors import CorruptJournal, ForkedQueue, KestrelError, QueueClosed
from kestrelpy.reader import Reader

FIRST_POLL = 0.0005
"""Seconds before the first look; no wait is shorter. A look costs 25 microseconds, 3 of its own and the rest to wake up
for it.
"""

POLL_SHARE = 1 / 32
"""No wait between two looks is a larger share of the time since something came (but for ``FIRST_POLL``). Of items that
come one by one at any pace, each so waits for at most this share of the pause before it, and half of that on average.
"""

CHECKPOINT_INTERVAL = 1.0


class FollowingView(JournalView):
    """The journal as another process writes it. ``follow`` brings it up to date."""

    def __init__(self, directory: Directory, queue: str) -> None:
        super().__init__(directory, queue)
        self._file: File | None = None
        self._at = (0, 0)
        self.queue_id = bytes(16)
        self.durable_id = 0  # by the writer's word: what a sync from here says of it may be wrong
        self._synced_id = 0
        self._doubted: tuple[File, OSError] | None = None  # a file of which a sync has failed

    @property
    def tail_id(self) -> int:
        return self._at[0]

    @property
    def total_bytes(self) -> int:
        return self._at[1]

    def _end(self) -> tuple[int, int]:
        return self._at

    def follow(self) -> None:
        """See what the writer has done since. Raises ``CorruptJournal``, ``OSError``, ``UnsupportedFormat``."""
        while True:
            last = self.segments[-1] if self.segments else None
            if last is not None and not last.closed and not self._follow_active(last):
                if last.items or last.number in self._numbers():
                    return
                last = self._forget_last()
            if not self._take_following(last):
                return

    def _forget_last(self) -> Segment | None:
        """The last segment could not be made after all, and has gone. Returns the one before."""
        self.close()
        self.segments = self.segments[:-1]
        return self.segments[-1] if self.segments else None

    def _follow_active(self, segment: Segment) -> bool:
        """Read on in the last segment; true if it turns out to be closed."""
        file = self._file
        assert file is not None
        if not file.read(segment.records_end, fmt.FRAME_BYTES).strip(b"\0"):
            return False
        for offset, frame in iterate_frames(file, segment.header.marker, segment.records_end, file.size()):
            if frame.footer is not None or frame.first_id != segment.last_id + 1:
                break
            segment.count(offset, frame)
        footer = read_footer(file, segment.header)
        if footer is not None:
            segment.apply(footer)
        self._at = (segment.last_id, segment.header.base_bytes + segment.data_bytes)
        if footer is not None:
            file.close()
            self._file = None
            self.durable_id = segment.last_id
        return footer is not None

    def _take_following(self, last: Segment | None) -> bool:
        """Add the next segment, if there is one."""
        number = last.number if last is not None else -1
        later = [each for each in segments_among(self._directory.names(), self._queue) if each[0] > number]
        if later and not any(self.queue_id):
            newest = first_header(self._directory, reversed(later))
            self.queue_id = newest.queue_id if newest is not None else self.queue_id
        for at, (number, name) in enumerate(later):
            try:
                file = open_segment(self._directory, name)
            except FileNotFoundError:
                continue  # retired in this moment
            try:
                segment = self._load(file, number, name, later[at + 1 :])
            except BaseException:
                file.close()
                raise
            if segment is not None:
                self._add(file, segment)
                return True
            file.close()
            if self._first_header(later[at + 1 :]) is None:  # being made in this moment
                return False
        return False

    def _first_header(self, numbered: list[tuple[int, str]]) -> SegmentHeader | None:
        """The first whole header of this queue among the segments named."""
        return first_header(self._directory, numbered, self.queue_id if any(self.queue_id) else b"")

    def _load(self, file: File, number: int, name: str, later: list[tuple[int, str]]) -> Segment | None:
        """The next segment; ``None`` if the file is none, or not yet. Raises ``CorruptJournal`` for one that is not of
        this queue or not in its place.
        """
        path = f"{self._directory.path}/{name}"
        header = read_header(file, path)
        if header is None or header.number != number:
            if is_none(file, name, number, None, self._first_header(later)):
                return None
            header = read_header(file, path)  # it may have been made meanwhile
            if header is None or header.number != number:
                raise CorruptJournal(path, 0, "this segment has no valid header")
        if any(self.queue_id) and header.queue_id != self.queue_id:
            raise CorruptJournal(path, 32, "this segment belongs to another queue")
        segment = load_segment(file, name, header)
        after = self._first_header(later) if not segment.closed else None
        return None if after is not None and is_none(file, name, number, header, after) else segment

    def _add(self, file: File, segment: Segment) -> None:
        header = segment.header
        self._file = file
        if segment.closed:
            file.close()
            self._file = None
        self.queue_id = header.queue_id
        self.durable_id = segment.last_id if segment.closed else header.previous_last_id
        self.segments = (*self.segments, segment)
        self._at = (segment.last_id, header.base_bytes + segment.data_bytes)
        self.missing = header.first_id - 1 - header.base_items

    def make_durable(self, item_id: int) -> None:
        """Sync the writer's file from here (R4): a checkpoint must not name what a power cut may take.

        If that fails, no later sync of the file is believed (R9); the writer's footer is. And if it does not, that is
        no proof: of a sync of the writer's that has failed before, this one hears nothing. So nobody is told by it
        that the items are on disk.
        """
        if item_id > max(self.durable_id, self._synced_id) and self._file is not None:
            tail_id = self.tail_id
            if self._doubted is not None and self._doubted[0] is self._file:
                raise self._doubted[1]
            try:
                self._file.sync()
                if is_new(self.segments[-1].name):
                    self._directory.sync()
            except OSError as error:
                self._doubted = self._file, error
                raise
            self._synced_id = max(self._synced_id, tail_id)

    def _numbers(self) -> set[int]:
        """Of the segments that are there. Names change: a new one is given its lasting one."""
        return {number for number, _ in segments_among(self._directory.names(), self._queue)}

    def forget_gone(self) -> None:
        """Segments that every reader was past may have been retired since."""
        there = self._numbers()
        gone = [at for at, segment in enumerate(self.segments[:-1]) if segment.number not in there]
        if gone:
            self.segments = self.segments[gone[-1] + 1 :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Outside:
    """The ``Source`` of a reader in another process."""

    view_type = FollowingView

    def __init__(
        self, directory: Directory, queue: str, clock: Clock, poll_interval: float, readership: Readership
    ) -> None:
        self.name = queue
        self.clock = clock
        self.waiting: dict[Taking, None] = {}
        self._directory = directory
        self._poll_interval = poll_interval
        self._first_poll = min(FIRST_POLL, poll_interval)
        self._readership = readership
        self._view = self.view_type(directory, queue)
        self._looking = threading.Lock()
        self._polling = False
        self._maintenance_armed = False
        self._reader: Reader | None = None
        self._pid = os.getpid()
        with self._looking:
            self._view.follow()
            if not self._view.segments:
                states = readership._home.load_all(directory.names())
                self._view.queue_id = known_queue_id(states) or self._view.queue_id
        self._seen_id, self._moved_at = self._view.tail_id, clock.monotonic()
        remember(self)

    @property
    def visible_id(self) -> int:
        """The last whole item there is, looked up anew."""
        with self._looking:
            self._view.follow()
        return self._view.tail_id

    @property
    def missing(self) -> int:
        return self._view.missing

    @property
    def visible_bytes(self) -> int:
        return self._view.total_bytes

    @property
    def first_id(self) -> int:
        """The earliest id that is kept, looked up anew."""
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
    def durable_id(self) -> int:
        return self._view.durable_id

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, Place] | None) -> Block:
        return self._view.read(item_id, last_id, max_bytes, hint)

    def is_gap(self, item_id: int) -> bool:
        return self._view.is_gap(item_id)

    def before(self, item_id: int) -> tuple[int, int]:
        return self._view.before(item_id)

    def find_time(self, time_ms: int, last_id: int) -> int:
        return self._view.find_time(time_ms, last_id)

    def hint(self, item_id: int) -> tuple[int, Place]:
        return self._view.hint(item_id)

    def window(self, reader: Taking) -> Take | None:  # noqa: ARG002 - there is none to share
        return None

    def attach(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)

    def detach(self, reader: Reader) -> None:
        """Nothing is shared."""

    def decode(self, data: bytes) -> Any:
        return data

    def make_durable(self, item_id: int) -> None:
        with self._looking:
            self._view.make_durable(item_id)

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None:
        self._readership.save(reader, state, durable)
        with self._looking:
            self._view.forget_gone()

    # -- looking again -----------------------------------------------------------------------------------------------

    def polls(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)
        if not self._polling:
            self._polling = True
            try:
                self._poll_in(self._first_poll)
            except BaseException:
                self._polling = False
                raise

    def _poll_in(self, seconds: float) -> None:
        self.clock.call_later(seconds, lambda: self._poll(seconds), on_lost=self._lost)

    def _poll(self, waited: float) -> None:
        reader = self._reader
        if reader is None or reader._broken is not None or not reader._line:
            self._polling = False
            if reader is not None and reader._line:  # somebody came in between
                self.polls(reader)
            return
        reader._hand_off()
        tail_id, now = self._view.tail_id, self.clock.monotonic()
        if tail_id != self._seen_id:  # in this look, or in one that the reader took by itself
            self._seen_id, self._moved_at = tail_id, now
        seconds = min(waited * 2, (now - self._moved_at) * POLL_SHARE)
        self._poll_in(min(max(seconds, self._first_poll), self._poll_interval))

    def _lost(self, cause: BaseException) -> None:
        if self._reader is not None:
            self._reader._break(KestrelError(f"the maintenance thread died: {cause!r}"))

    def moved(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)
        if not self._maintenance_armed:
            self._maintenance_armed = True
            try:
                self.clock.call_later(CHECKPOINT_INTERVAL, self._maintain, on_lost=self._lost)
            except BaseException:
                self._maintenance_armed = False
                raise

    def _maintain(self) -> None:
        self._maintenance_armed = False
        reader = self._reader
        if reader is None or reader._broken is not None:
            return
        reader._quiet = False
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            reader._drop_oldest()
        if reader._unsaved:
            try:
                reader.checkpoint(durable=True)
            except (OSError, QueueClosed):
                _log.warning("a checkpoint of %s failed and will be tried again", reader.full_name, error=True)
                self.moved(reader)

    # -- the end -----------------------------------------------------------------------------------------------------

    def closed_reader(self, reader: Reader) -> None:
        """The reader has closed, and with it all that was opened for it."""
        forget(self)
        try:
            self._readership.release(reader)
        finally:
            self._readership.leave()
            self._let_go()

    def _let_go(self) -> None:
        with self._looking:
            self._view.close()
        self._directory.close()

    def close(self) -> None:
        """At the end of the interpreter, or when the reader could not be made."""
        forget(self)
        try:
            if self._reader is not None:
                self._reader.close()
        finally:
            self._readership.leave()
            self._let_go()

    def _abandon(self) -> None:
        self._readership.abandon(ForkedQueue(self._pid))
        self._looking = threading.Lock()
        self._view.close()
        self._directory.close()
