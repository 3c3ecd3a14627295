"""The journal: all segments of a queue, in order. It appends, rotates and retires (it reads by ``view``); it knows
no readers.

Rules:
1. A single-threaded state machine over the disk interface: no lock, no thread, no clock. What may be called beside an
   append is said at each method; everything else is for the writer alone.
2. A record is built before the file is touched (R14); memory changes after the bytes are in place, by one store of
   ``_at``, and what an exception leaves behind is undone before the next append (R12, R13).
3. The old segment is synced and closed before the next one takes a record (R7).
4. A sync that failed ends it: ``refuse`` makes every later append raise (R9).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from zlib import crc32

from kestrelpy._disk.interface import NO_ROOM, Buffer, Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.archive import archive_segment
from kestrelpy._journal.bodies import Body
from kestrelpy._journal.file_names import is_new, lasting_name, new_segment_name
from kestrelpy._journal.format import FRAME_BYTES, pack_crc, pack_frame
from kestrelpy._journal.recovery import Recovered
from kestrelpy._journal.segment import (
    FIRST_GROWTH,
    LARGE_BYTES,
    MARK_EVERY,
    Segment,
    close_segment,
    create_segment,
    sync_and_name,
)
from kestrelpy._journal.view import JournalView
from kestrelpy.errors import DurabilityUnknown, KestrelError, QueueDiskFull, copy_of

MAX_BATCH_BYTES = 1 << 31
UNFILLED_BYTES = 512 << 10
"""Room for smaller ones is filled by the megabyte: so its pages come in larger pieces than by their own writes."""
SEGMENT_COST = fmt.HEADER_BYTES + FRAME_BYTES + fmt.FOOTER_BYTES
"""Bytes of a segment of one item beside its data."""


class Journal(JournalView):
    """The segments of one queue, open for appending.

    ``exclusive`` is held around what must not run beside a sync of the active file.
    """

    def __init__(
        self,
        directory: Directory,
        queue: str,
        found: Recovered,
        *,
        segment_bytes: int,
        randomness: Callable[[int], bytes],
        archive: Directory | None = None,
        quarantine: bool = False,
        exclusive: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(directory, queue, quarantine=quarantine)
        self._queue_id = found.queue_id or randomness(16)
        self._segment_bytes = segment_bytes
        self._randomness = randomness
        self._archive = archive
        self._exclusive = exclusive or nullcontext()
        self._last_number = found.last_number
        self.segments = tuple(found.segments)
        last = self.segments[-1] if self.segments else None
        base_bytes = last.header.base_bytes + last.data_bytes if last else 0
        self._at = (0, found.tail_id, base_bytes)
        """Where the last frame ends, the last id given out, the bytes of all items ever put: one store changes all
        three.
        """
        self.missing = found.tail_id - (last.header.base_items + last.items if last else 0)
        """How many ids up to the tail were given out and lost, or passed over: what is there is ``tail_id -
        missing``.
        """
        self.durable_id = last.last_id if last else 0  # not the tail: what a crash has lost is not on disk
        self.quarantined, self._counted = found.quarantined, found.counted
        self.archived_count = 0
        self.on_followed: Callable[[], None] | None = None
        """Called when a segment was begun behind another one, which may be retired some day. A failure of it fails the
        put.
        """
        self._file: File | None = None
        self._segment: Segment | None = None
        self._buffer: Buffer | None = None
        self._room = 0  # frames may end up to here; 0: look first. The footer's room is behind it
        self._limit = 0
        self._marker = 0
        self._last_ms = 0
        self._is_torn = False
        self._refusal: Exception | None = None
        self._begun: str | None = None  # the name of a segment that was begun and is not among ours yet

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def queue_id(self) -> bytes:
        return self._queue_id

    @property
    def tail_id(self) -> int:
        """The last id given out. May be read at any time."""
        return self._at[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all items ever put. May be read at any time."""
        return self._at[2]

    def _end(self) -> tuple[int, int]:
        return self._at[1:]

    @property
    def journal_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, data: bytes, added_ms: int) -> int:
        """Store one item; its id. In the kernel when this returns: the death of the process does not lose it.

        Raises ``QueueDiskFull`` or another ``OSError`` with nothing stored, ``DurabilityUnknown`` if a rotation's
        sync failed.
        """
        offset, tail_id, total_bytes = self._at
        size = len(data)
        end = offset + FRAME_BYTES + size
        if end > self._room:
            if LARGE_BYTES <= size <= self._segment_bytes - SEGMENT_COST:
                return self._append_large(data, added_ms)
            self._make_room(FRAME_BYTES + size, added_ms)
            offset = self._at[0]
            end = offset + FRAME_BYTES + size
        if added_ms != self._last_ms:
            self._note_time(added_ms)
        tail_id += 1
        # HOT COPY of format.encode_item
        frame = pack_frame(size, tail_id, added_ms, tail_id - self.durable_id, self._marker) + data
        try:
            self._buffer[offset:end] = pack_crc(crc32(frame)) + frame  # type: ignore[index]  # room means a buffer
            self._at = (end, tail_id, total_bytes + size)
        except BaseException as error:
            self._undo(error)
            raise
        return tail_id

    def _append_large(self, data: bytes, added_ms: int) -> int:
        """``append`` for an item of many pages, which is written by one call: with no zeros before it in its place, and
        no copy but the kernel's. A new segment is made without room for it, which it would sync for nothing.
        """
        size = len(data)
        self._make_room(FRAME_BYTES + size, added_ms, large=True)
        if added_ms != self._last_ms:
            self._note_time(added_ms)
        offset, tail_id, total_bytes = self._at
        tail_id += 1
        head = pack_frame(size, tail_id, added_ms, tail_id - self.durable_id, self._marker)
        head = pack_crc(crc32(data, crc32(head))) + head
        try:
            self._file.write(offset, head, data)  # type: ignore[union-attr]  # room means a file
            self._at = (offset + FRAME_BYTES + size, tail_id, total_bytes + size)
        except BaseException as error:
            self._undo(error)
            raise
        return tail_id

    def append_frame(self, items: Sequence[bytes], added_ms: int, expires_ms: int | None) -> range:
        """Store one item that expires, or a batch as one frame; their ids. Guarantees and errors as ``append``."""
        single = len(items) == 1
        sizes = list(map(len, items))
        size = sum(sizes)
        bound = FRAME_BYTES + 8 + size if single else fmt.batch_bytes(size, len(items))
        if self._at[0] + bound > self._room:
            self._make_room(bound, added_ms)
        if added_ms != self._last_ms:
            self._note_time(added_ms)
        offset, tail_id, total_bytes = self._at
        first_id = tail_id + 1
        if single:
            frame = fmt.encode_item(first_id, items[0], added_ms, expires_ms, self.durable_id, self._marker)
        else:
            frame = fmt.encode_batch(first_id, items, sizes, added_ms, expires_ms, self.durable_id, self._marker)
        end = offset + len(frame)
        try:
            self._buffer[offset:end] = frame  # type: ignore[index]  # room means a buffer
            self._at = (end, tail_id + len(items), total_bytes + size)
        except BaseException as error:
            self._undo(error)
            raise
        return range(first_id, first_id + len(items))

    def append_body(self, body: Body, added_ms: int) -> None:
        """Store items whose frame's body was made elsewhere. Guarantees and errors as ``append``."""
        size = len(body.data)
        large = LARGE_BYTES <= size <= self._segment_bytes - SEGMENT_COST
        if large or self._at[0] + FRAME_BYTES + size > self._room:
            self._make_room(FRAME_BYTES + size, added_ms, large=large)
        if added_ms != self._last_ms:
            self._note_time(added_ms)
        offset, tail_id, total_bytes = self._at
        first_id, stamp = tail_id + 1, added_ms | body.kind << fmt.KIND_SHIFT
        head = pack_frame(size, first_id, stamp, first_id - self.durable_id, self._marker)
        head = pack_crc(crc32(body.data, crc32(head))) + head
        end = offset + FRAME_BYTES + size
        try:
            if large:
                self._file.write(offset, head, body.data)  # type: ignore[union-attr]  # room means a file
            else:
                self._buffer[offset:end] = head + body.data  # type: ignore[index]  # and a buffer
            self._at = (end, tail_id + body.items, total_bytes + body.size)
        except BaseException as error:
            self._undo(error)
            raise

    @property
    def most_body_bytes(self) -> int:
        """The largest body of a frame that an empty segment of the usual size has room for."""
        return self._segment_bytes - SEGMENT_COST

    def _note_time(self, added_ms: int) -> None:
        segment = self._segment
        if segment is not None:
            segment.min_added_ms = min(segment.min_added_ms or added_ms, added_ms)
            segment.max_added_ms = max(segment.max_added_ms, added_ms)
        self._last_ms = added_ms

    def _make_room(self, frame_bytes: int, added_ms: int, *, large: bool = False) -> None:
        """See to it that ``frame_bytes`` fit behind the last frame: settle, grow, or rotate and begin. Raises
        ``QueueDiskFull`` for whatever finds no room on the way.
        """
        if self._refusal is not None:
            raise copy_of(self._refusal)
        try:
            if self._is_torn:
                self._clear_torn_append()
            if self._file is not None and self._at[0] + frame_bytes + fmt.FOOTER_BYTES > self._limit:
                self.rotate()
            if self._file is None:
                self._begin(0 if large else frame_bytes, added_ms)
            if self._at[0] + frame_bytes > self._room:
                self._grow(self._at[0] + frame_bytes + fmt.FOOTER_BYTES, large=large)
        except OSError as error:
            if isinstance(error, KestrelError) or error.errno not in NO_ROOM:
                raise
            raise QueueDiskFull(self._directory.path) from error

    def _undo(self, error: BaseException) -> None:
        """An append was cut short. What is there of it may be a whole frame, if its data ends in zeros: it goes at
        once, or else before the next append, for which there is no room until then. Raises ``QueueDiskFull`` for an
        ``error`` that is one, where stores are writes.
        """
        self._is_torn, self._room = True, 0
        with contextlib.suppress(OSError):
            self._clear_torn_append()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise QueueDiskFull(self._directory.path) from error

    def _clear_torn_append(self) -> None:
        """Zero what an interrupted append left behind the last frame."""
        if self._file is not None and self._buffer is not None and self._segment is not None:
            offset, size = self._at[0], self._segment.size
            left = self._file.read(offset, size - offset).rstrip(b"\0")
            if left:
                self._buffer[offset : offset + len(left)] = bytes(len(left))
            self._room = size - fmt.FOOTER_BYTES if self._refusal is None else 0
        self._is_torn = False

    def _grow(self, needed: int, *, large: bool) -> None:
        """Make the file ``needed`` bytes at least. For a ``large`` item, which is written and not stored, ``_room``
        stays where it is: what comes next looks here first, whether it is large, too, or not.
        """
        file, segment = self._file, self._segment
        assert file is not None
        assert segment is not None
        step = min(max(segment.size, FIRST_GROWTH), MARK_EVERY)
        fill = not large or needed - self._at[0] < UNFILLED_BYTES
        if needed > segment.size:
            try:
                self._take_buffer(file, max(needed, min(segment.size + step, self._limit)), fill=fill)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._take_buffer(file, needed, fill=fill)
            segment.marks.append((self._at[1] + 1, self._at[0]))
        if not large:
            self._room = segment.size - fmt.FOOTER_BYTES

    def _take_buffer(self, file: File, size: int, *, fill: bool) -> None:
        assert self._segment is not None
        self._buffer = file.grow(size, fill=fill)
        self._segment.size = size

    def _begin(self, frame_bytes: int, added_ms: int) -> None:
        """Start the next segment (R1, R34). One that was begun and not finished goes first, durably: it would stand
        between the last one and this one.
        """
        if self._begun is not None:
            with contextlib.suppress(FileNotFoundError):
                self._directory.unlink(self._begun)
            self._directory.sync()
            self._begun = None
        _, tail_id, total_bytes = self._at
        number = self._last_number = max(added_ms, self._last_number + 1)
        before = self.segments[-1] if self.segments else None
        header = fmt.SegmentHeader(
            marker=int.from_bytes(self._randomness(4), "little") | 1 << 31,
            queue_id=self._queue_id,
            number=number,
            first_id=tail_id + 1,
            base_items=tail_id - self.missing,
            base_bytes=total_bytes,
            previous_number=before.number if before else 0,
            previous_last_id=before.last_id if before else 0,
            previous_end=before.records_end if before else 0,
        )
        needed = fmt.HEADER_BYTES + frame_bytes + fmt.FOOTER_BYTES
        limit = max(self._segment_bytes, needed)
        size = max(needed, min(FIRST_GROWTH, limit))
        name = new_segment_name(self._queue, number)
        segment = Segment(name, header, tail_id, 0, fmt.HEADER_BYTES, size=size)
        segments, at, room = (
            (*self.segments, segment),
            (fmt.HEADER_BYTES, tail_id, total_bytes),
            size - fmt.FOOTER_BYTES,
        )
        self._begun = name
        file, buffer = create_segment(self._directory, name, header, size)
        # Nothing but stores from here on: what strikes from outside comes before all of this or after it.
        self._file, self._buffer, self._segment = file, buffer, segment
        self._limit, self._marker, self._room, self._last_ms = limit, header.marker, room, 0
        self.segments, self._at = segments, at
        self._begun = None
        if before is not None and self.on_followed is not None:
            self.on_followed()

    def rotate(self) -> None:
        """Close the active segment: synced and with its footer when this returns. The next append begins another.

        Raises ``DurabilityUnknown``; then the journal refuses everything from then on. ``QueueDiskFull`` if a full disk
        has no room for its lasting name: it is synced, and still the active one.
        """
        file, segment = self._file, self._segment
        if file is None or segment is None:
            return
        if self._is_torn:
            self._clear_torn_append()
        end, tail_id, total_bytes = self._at
        segment.records_end, segment.last_id = end, tail_id
        segment.data_bytes = total_bytes - segment.header.base_bytes
        self._room = self._limit = 0  # after an interrupt in here the next append begins with this once more
        self._buffer = None
        with self._exclusive:
            try:
                if self.durable_id < tail_id or is_new(segment.name):
                    sync_and_name(self._directory, file, segment)  # the footer says that all before it is on disk
                    self.durable_id = tail_id
                if is_new(segment.name):
                    raise QueueDiskFull(self._directory.path)
                if not segment.closed:
                    close_segment(file, segment)
            except QueueDiskFull:
                raise
            except OSError as error:
                failure = self.fail(error)
                self.abandon()
                raise failure from error
            self.durable_id = tail_id
            self.abandon()

    # -- durability --------------------------------------------------------------------------------------------------

    def sync_target(self) -> tuple[File | None, int]:
        """What a sync has to sync, and the id that is durable once it has. Raises why there is none any more (R9)."""
        if isinstance(self._refusal, DurabilityUnknown):
            raise copy_of(self._refusal)
        return self._file, self.durable_id if self._file is None else self._at[1]

    def is_active(self, file: File) -> bool:
        """Whether a sync target is still to be synced: a rotation closes a file after syncing it. Raises why it never
        will be, if that sync failed. Under ``exclusive``.
        """
        if isinstance(self._refusal, DurabilityUnknown):
            raise copy_of(self._refusal)
        return file is self._file and self._segment is not None and not self._segment.closed

    def sync(self, file: File) -> None:
        """Sync the active file. Under ``exclusive``; raises ``OSError``."""
        assert self._segment is not None
        sync_and_name(self._directory, file, self._segment)

    def keep_name(self) -> None:
        """The files are about to go: let no sync look for the active one, to rename it. Under ``exclusive``."""
        if self._segment is not None:
            self._segment.name = lasting_name(self._segment.name)

    def fail(self, cause: OSError) -> DurabilityUnknown:
        """A sync failed: refuse everything from now on; returns what to raise."""
        error = DurabilityUnknown(self._directory.path, self.durable_id + 1, self._at[1], cause)
        error.__cause__ = cause
        self.refuse(error)
        return copy_of(error)

    def refuse(self, error: Exception) -> None:
        """Let every later append raise ``error``."""
        self._refusal = error
        self._room = 0

    def allow(self) -> None:
        """Take appends again after ``refuse``, unless a sync has failed (R9)."""
        if not isinstance(self._refusal, DurabilityUnknown):
            self._refusal = None

    def abandon(self) -> None:
        """Let go of the file, as it is. Closed first: if that is interrupted, it is done again."""
        if self._file is not None:
            self._file.close()
        self._file = self._buffer = self._segment = None

    # -- retiring ----------------------------------------------------------------------------------------------------

    def take_retired(self, head: int) -> list[Segment]:
        """Take the segments out that hold nothing above ``head``, the lowest durable head of all readers (R5).

        The newest segment always stays, and the newest that is known to be on disk: it tells the tail.
        """
        segments = self.segments
        most = len(segments) - 2 if segments and is_new(segments[-1].name) else len(segments) - 1
        count = 0
        while count < most and segments[count].last_id <= head:
            count += 1
        retired = list(segments[:count])
        self.segments = segments[count:]
        return retired

    def dispose(self, segment: Segment) -> None:
        """Delete or archive a retired segment; nothing if that was done already. May be called beside appends; raises
        ``OSError`` with the file still there.
        """
        if self._archive is None:
            with contextlib.suppress(FileNotFoundError):
                self._directory.unlink(segment.name)
        elif archive_segment(self._directory, segment.name, self._archive, self._queue, segment.header):
            self.archived_count += 1
