"""The journal: all segments of a queue, in order. It appends, rotates and retires. ``view`` reads. It knows no readers.

Rules:
1. The journal is a single-threaded state machine over the disk interface: no lock, no thread, no clock. A method that
   may be called during an append says so; only the writer may call the others.
2. A record is built before the file is touched (R14). Memory changes after the bytes are in place, by one store of
   ``_at``. What an exception leaves in the file is undone before the next append (R12, R13).
3. The old segment is synced and closed before the next one takes a record (R7).
4. A failed sync ends the journal: ``refuse`` makes every later append raise (R9).
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
from kestrelpy._journal.growth import Growth
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
"""The room for a large item below this size is filled with zeros by the megabyte. That brings in its pages in larger
pieces than the item's own write would.
"""
SEGMENT_COST = fmt.HEADER_BYTES + FRAME_BYTES + fmt.FOOTER_BYTES
"""The bytes of a segment of one item, without the item's data."""


class Journal(JournalView):
    """The segments of one queue, open for appending.

    ``exclusive`` is held around everything that must not run during a sync of the active file.
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
        """The end of the last frame, the last id given out, and the bytes of all items ever put. One store changes all
        three.
        """
        self.missing = found.tail_id - (last.header.base_items + last.items if last else 0)
        """How many ids up to the tail have no item: they were given out and lost, or skipped. The other ``tail_id -
        missing`` have one.
        """
        self.durable_id = last.last_id if last else 0  # not the tail: items that a crash has lost are not on disk
        self.quarantined, self._counted = found.quarantined, found.counted
        self._tally = (0, 0)  # segments archived, and closed: one attribute, as the journal has as many as it may
        self.growth = Growth()
        self._file: File | None = None
        self._segment: Segment | None = None
        self._buffer: Buffer | None = None
        self._room = 0  # frames may end up to here; 0: look first. The footer's room comes after it
        self._limit = 0
        self._marker = 0
        self._last_ms = 0
        self._is_torn = False
        self._refusal: Exception | None = None
        self._begun: str | None = None  # the name of a segment that was begun and is not in ``segments`` yet

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
        """Store one item; returns its id. The item is in the kernel then: the death of the process does not lose it.

        Raises ``QueueDiskFull`` or another ``OSError`` with nothing stored, ``DurabilityUnknown`` if the sync of a
        rotation failed.
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
        """``append`` for an item of many pages. One call writes it, with no copy but the kernel's, and from
        ``UNFILLED_BYTES`` on with no zeros written there first. A new segment is made without room for the item: it
        would sync that room for nothing.
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
        """Store items whose frame's body is already encoded. Guarantees and errors as ``append``."""
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
        """The largest body of a frame that fits into an empty segment of the usual size."""
        return self._segment_bytes - SEGMENT_COST

    def _note_time(self, added_ms: int) -> None:
        segment = self._segment
        if segment is not None:
            segment.min_added_ms = min(segment.min_added_ms or added_ms, added_ms)
            segment.max_added_ms = max(segment.max_added_ms, added_ms)
        self._last_ms = added_ms

    def _make_room(self, frame_bytes: int, added_ms: int, *, large: bool = False) -> None:
        """Make room for ``frame_bytes`` after the last frame: clear a torn append, grow the file, or rotate and begin.

        Raises ``QueueDiskFull`` if one of these steps finds no room, and ``QueueFull`` if a limit allows none.
        """
        if self._refusal is not None:
            raise copy_of(self._refusal)
        if frame_bytes > self._segment_bytes - SEGMENT_COST:
            self.growth.check_alone(frame_bytes)
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
        """Undo an append that was cut short. It may have left a whole frame, if its data ends in zeros. The rest is
        cleared at once, or else before the next append, which finds no room until then.

        Raises ``QueueDiskFull`` if ``error`` says that there is no room, as it may where stores are writes.
        """
        self._is_torn, self._room = True, 0
        with contextlib.suppress(OSError):
            self._clear_torn_append()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise QueueDiskFull(self._directory.path) from error

    def _clear_torn_append(self) -> None:
        """Zero what an interrupted append left after the last frame."""
        if self._file is not None and self._buffer is not None and self._segment is not None:
            offset, size = self._at[0], self._segment.size
            left = self._file.read(offset, size - offset).rstrip(b"\0")
            if left:
                self._buffer[offset : offset + len(left)] = bytes(len(left))
            self._room = size - fmt.FOOTER_BYTES if self._refusal is None else 0
        self._is_torn = False

    def _grow(self, needed: int, *, large: bool) -> None:
        """Make the file at least ``needed`` bytes long.

        A ``large`` item is written, not stored through the mapping. So ``_room`` stays as it is: then the next append,
        large or not, comes here first.
        """
        file, segment = self._file, self._segment
        assert file is not None
        assert segment is not None
        step = min(max(segment.size, FIRST_GROWTH), MARK_EVERY)
        fill = not large or needed - self._at[0] < UNFILLED_BYTES
        if needed > segment.size:
            most = max(needed, min(segment.size + step, self._limit)) - segment.size
            size = segment.size + self.growth.allow(self, needed - segment.size, most)
            try:
                self._take_buffer(file, size, fill=fill)
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
        """Start the next segment (R1, R34). A segment that was begun and not finished is removed first, durably: it
        would stand between the last segment and this one.
        """
        needed = fmt.HEADER_BYTES + frame_bytes + fmt.FOOTER_BYTES
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
        limit = max(self._segment_bytes, needed)
        size = self.growth.allow(self, needed, max(needed, min(FIRST_GROWTH, limit)))
        name = new_segment_name(self._queue, number)
        segment = Segment(name, header, tail_id, 0, fmt.HEADER_BYTES, size=size)
        segments, at, room = (
            (*self.segments, segment),
            (fmt.HEADER_BYTES, tail_id, total_bytes),
            size - fmt.FOOTER_BYTES,
        )
        self._begun = name
        file, buffer = create_segment(self._directory, name, header, size)
        # Only stores from here on: an interrupt falls before all of them or after all of them.
        self._file, self._buffer, self._segment = file, buffer, segment
        self._limit, self._marker, self._room, self._last_ms = limit, header.marker, room, 0
        self.segments, self._at = segments, at
        self._begun = None
        if before is not None:
            self.growth.on_followed()

    @property
    def archived_count(self) -> int:
        """How many segments were moved to the archive."""
        return self._tally[0]

    @property
    def rotation_count(self) -> int:
        """How many segments were closed."""
        return self._tally[1]

    def rotate(self) -> None:
        """Close the active segment: it is synced and has its footer when this returns. The next append begins another.

        Raises ``DurabilityUnknown``, and the journal refuses everything from then on. Raises ``QueueDiskFull`` if a
        full disk has no room for the lasting name: the segment is synced, and is still the active one.
        """
        file, segment = self._file, self._segment
        if file is None or segment is None:
            return
        if self._is_torn:
            self._clear_torn_append()
        end, tail_id, total_bytes = self._at
        segment.records_end, segment.last_id = end, tail_id
        segment.data_bytes = total_bytes - segment.header.base_bytes
        self._room = self._limit = 0  # after an interrupt in here, the next append rotates first
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
            self._tally = (self._tally[0], self._tally[1] + 1)
            self.abandon()

    # -- durability --------------------------------------------------------------------------------------------------

    def sync_target(self) -> tuple[File | None, int]:
        """The file that has to be synced, and the id that is durable after that. Raises why no sync can help (R9)."""
        if isinstance(self._refusal, DurabilityUnknown):
            raise copy_of(self._refusal)
        return self._file, self.durable_id if self._file is None else self._at[1]

    def tip(self) -> tuple[Segment | None, int, int, int]:
        """The segment that is being written, the end of its last frame, the last id given out, and the bytes of all
        items ever put. For the writer.
        """
        return (self._segment, *self._at)

    def is_active(self, file: File) -> bool:
        """Whether a sync target still has to be synced: a rotation closes a file after syncing it. Call under
        ``exclusive``. If that sync failed, raises why the file never will be synced.
        """
        if isinstance(self._refusal, DurabilityUnknown):
            raise copy_of(self._refusal)
        return file is self._file and self._segment is not None and not self._segment.closed

    def sync(self, file: File) -> None:
        """Sync the active file. Call under ``exclusive``. Raises ``OSError``."""
        assert self._segment is not None
        sync_and_name(self._directory, file, self._segment)

    def keep_name(self) -> None:
        """The files are about to be deleted: no sync may look for the active one, to rename it. Under ``exclusive``."""
        if self._segment is not None:
            self._segment.name = lasting_name(self._segment.name)

    def fail(self, cause: OSError) -> DurabilityUnknown:
        """A sync failed: refuse everything from now on. Returns the error to raise."""
        error = DurabilityUnknown(self._directory.path, self.durable_id + 1, self._at[1], cause)
        error.__cause__ = cause
        self.refuse(error)
        return copy_of(error)

    def refuse(self, error: Exception) -> None:
        """Let every later append raise ``error``."""
        self._refusal = error
        self._room = 0

    def allow(self) -> None:
        """Accept appends again after ``refuse``, unless a sync has failed (R9)."""
        if not isinstance(self._refusal, DurabilityUnknown):
            self._refusal = None

    def abandon(self) -> None:
        """Release the file as it is. It is closed first: after an interrupt, the next call closes it again."""
        if self._file is not None:
            self._file.close()
        self._file = self._buffer = self._segment = None

    # -- retiring ----------------------------------------------------------------------------------------------------

    def take_retired(self, head: int, limit: int = fmt.LARGEST) -> list[Segment]:
        """Remove and return the segments that hold nothing above ``head``, the lowest durable head of all readers (R5),
        up to number ``limit``.

        The newest segment always stays. So does the newest one that is known to be on disk: it shows the tail.
        """
        segments = self.segments
        most = len(segments) - 2 if segments and is_new(segments[-1].name) else len(segments) - 1
        count = 0
        while count < most and segments[count].last_id <= head and segments[count].number <= limit:
            count += 1
        retired = list(segments[:count])
        self.segments = segments[count:]
        return retired

    def dispose(self, segment: Segment) -> None:
        """Delete or archive a retired segment; do nothing if that was done already. May be called during an append.

        Raises ``OSError`` with the file still there.
        """
        if self._archive is None:
            with contextlib.suppress(FileNotFoundError):
                self._directory.unlink(segment.name)
        elif archive_segment(self._directory, segment.name, self._archive, self._queue, segment.header):
            self._tally = (self._tally[0] + 1, self._tally[1])
