"""One queue of a folder, followed by its files: what is cheap to know again each second, beside a live writer.

Rules:
1. Nothing is written and no lock is taken. A segment, a checkpoint and the folder may change between any two reads.
2. A look costs the same however long the queue is: the newest segment says what was ever put before it, a checkpoint
   what its reader has done. Headers of older segments are read once, some at each look.
3. What a writer puts is counted frame by frame: a block with checksums, then many frames by their heads alone. Beyond
   that the look goes on at the last frame, which the marker of the segment finds: ids are dense, so items stay exact,
   and the bytes passed over are estimated by those before them until the footer has them.
4. Checkpoints are read before the segments, which so reach at least as far. If they do not, the list of files is older
   than the checkpoints, and the caller lists again.
5. The figures are those of ``inspect``. What is wrong is raised after all that could be known in spite of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kestrelpy._disk.interface import Directory, File, FileStatus
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.purpose import ITEMS, kind_of
from kestrelpy._journal.segment import (
    READ_BYTES,
    Objection,
    Segment,
    identify,
    is_abandoned,
    iterate_frames,
    load_segment,
    open_segment,
    read_footer,
    stored_header,
    was_on_disk,
)
from kestrelpy.errors import CorruptJournal

CHECKED_AT_ONCE = 64
"""So many older segments are opened at one look, to see their headers and footers."""
FRAMES_AT_ONCE = 4_000
"""So many frames one look passes by their heads, which takes some 2 ms, before it begins to estimate."""
PROBE_BYTES = 4096
WINDOW_BYTES = 512 << 10
"""How far before the end of the bytes the last frame is searched. A larger item hides it until the next one."""
WALK_BYTES = 1 << 20
"""How many bytes of frames one look passes on the way to a reader's oldest item."""
SETTLED_MS = 2_000
"""A file's date is believed if it is that much older than the look: file systems count in milliseconds, some in
seconds, and a later write may have the same date.
"""
_HEAD_BYTES = fmt.FRAME_BYTES + 12
"""The head of a frame, and after it at most the time of expiry and the number of items."""
_TABLE_BYTES = 4
"""Of a batch: its number of items, and the size of each."""


class _AnotherQueue(Exception):
    """The newest segment is of another queue than those before: the name was given again."""


class _Head(NamedTuple):
    """A frame by its head: ``data_bytes`` of ``items``."""

    offset: int
    first_id: int
    items: int
    data_bytes: int
    added_ms: int
    end: int


def _heads(file: File, marker: int, offset: int, item_id: int) -> Iterator[_Head]:
    """The frames from ``offset`` on, whose checksums are not looked at, as far as ids and marker are those due."""
    block, base, want = b"", offset, PROBE_BYTES
    while True:
        at = offset - base
        if at + _HEAD_BYTES > len(block):
            block, base, at = file.read(offset, want), offset, 0
            if len(block) < fmt.FRAME_BYTES:
                return
        _, length, first_id, stamp, _, found = fmt.unpack_frame(block, at)
        kind = stamp >> fmt.KIND_SHIFT
        if found != marker or first_id != item_id or kind == fmt.KIND_FOOTER:
            return
        items, beside = 1, 8 if kind & fmt.KIND_EXPIRES else 0
        if kind & fmt.KIND_BATCH:
            start = at + fmt.FRAME_BYTES + beside
            items = int.from_bytes(block[start : start + 4], "little")
            beside += _TABLE_BYTES * (items + 1)
        if not items or beside > length:
            return
        end = offset + fmt.FRAME_BYTES + length
        yield _Head(offset, first_id, items, length - beside, stamp & fmt.ADDED_MASK, end)
        item_id, offset = item_id + items, end
        want = _HEAD_BYTES if length >= PROBE_BYTES else min(READ_BYTES, max(PROBE_BYTES, 4 * want))


class FollowedReader:
    """A reader by its checkpoint. ``state``: ``None`` if no whole one was ever read. ``oldest_ms``: when the first item
    that is not done was put, 0 if none is known.
    """

    def __init__(self, name: str, file_name: str) -> None:
        self.name = name
        self.file_name = file_name
        self.state: fmt.Checkpoint | None = None
        self.oldest_ms = 0
        self.size = 0
        self.seen: FileStatus | None = None
        """The status of the file, if ``state`` is what is in a file that has it."""
        self._found = (0, 0, 0)  # number of the segment, offset and first id of the frame where the last search ended
        self._sought = -1

    def look(self, folder: Directory, now_ms: int) -> bool:
        """Load the checkpoint if it has changed, or may have. Raises ``OSError``, ``UnsupportedFormat``."""
        about = folder.status(self.file_name)
        if about is None:
            raise CorruptJournal(f"{folder.path}/{self.file_name}", 0, "this is no file")
        if self.seen == about:
            return False
        self.state, _ = load_checkpoint(folder, self.file_name)
        self.seen = about if is_settled(about, now_ms) else None
        self.size = about.size
        return True

    def knows_oldest(self, head: int) -> bool:
        """Whether ``oldest_ms`` is that of the first item after ``head``."""
        return self._sought == head

    def find_oldest(
        self, folder: Directory, head: int, segments: list[tuple[int, str]], headers: dict[int, fmt.SegmentHeader]
    ) -> None:
        """Set ``oldest_ms`` to the time of the first item after ``head``. A long way is gone at several looks."""
        if self._sought == head:
            return
        position: tuple[int, int, int] | None = self._start(head, segments, headers)
        names = dict(segments)
        while position is not None and position[0] in names:
            try:
                file = open_segment(folder, names[position[0]])
            except FileNotFoundError:  # retired at this moment: the reader has moved on
                return
            try:
                is_over = self._walk(file, head, *position)
            finally:
                file.close()
            number = min((each for each in names if each > position[0]), default=0) if is_over else 0
            position = (number, 0, 0) if number else None

    def _start(
        self, head: int, segments: list[tuple[int, str]], headers: dict[int, fmt.SegmentHeader]
    ) -> tuple[int, int, int]:
        wanted = max((number for number, header in headers.items() if header.first_id <= head + 1), default=0)
        best = (wanted, fmt.HEADER_BYTES, headers[wanted].first_id) if wanted else (segments[0][0], 0, 0)
        hint = (0, 0, 0)
        if self.state is not None:
            hint = (self.state.hint_number, self.state.hint_offset, self.state.hint_id)
        for number, offset, item_id in (hint, self._found):
            if number in headers and item_id <= head + 1 and (number, item_id) >= (best[0], best[2]):
                best = (number, offset, item_id)
        return best

    def _walk(self, file: File, head: int, number: int, offset: int, item_id: int) -> bool:
        """Stop at the frame that has the item. True if the frames end before it."""
        header = fmt.decode_header(file.read(0, fmt.HEADER_BYTES))
        if header is None or header.number != number:
            return False
        at, item_id = (offset, item_id) if offset else (fmt.HEADER_BYTES, header.first_id)
        stop = at + WALK_BYTES
        for frame in _heads(file, header.marker, at, item_id):
            if frame.first_id + frame.items > head + 1:
                self.oldest_ms, self._sought = frame.added_ms, head
                self._found = (number, frame.offset, frame.first_id)
                return False
            self._found = (number, frame.end, frame.first_id + frame.items)
            if frame.end >= stop:
                return False
        return True


class FollowedQueue:
    """One queue. ``problem``: what is wrong with it, empty if nothing is known to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem = ""
        self.revision = 0
        """Grows whenever the figures may have changed."""
        self._begin()

    def _begin(self) -> None:
        """Know nothing: at first, and when another queue has the name."""
        self.kind = ITEMS
        self.queue_id = b""
        self.put_items = self.put_bytes = self.tail_id = self.segments = 0
        self.journal_bytes = self.file_bytes = 0
        self.is_estimated = False
        self.readers: list[FollowedReader] = []
        self._names: list[str] = []
        self._numbered: list[tuple[int, str]] = []
        self._headers: dict[int, fmt.SegmentHeader] = {}
        self._sizes: dict[int, int] = {}
        self._checked: set[int] = set()  # numbers of closed segments whose headers were seen, but for the newest
        self._unclosed: set[int] = set()  # of segments without a footer that were seen since the list has changed
        self._abandoned: set[int] = set()  # those of them that are no segments
        self._skipped: set[int] = set()  # of the newest files, those that are no segments yet
        self._active: Segment | None = None
        self._first_bytes = b""
        self._closed_as: FileStatus | None = None
        self._holds = False  # while the closed segment and the checkpoints have their dates
        self._saved: list[FollowedReader] = []  # all that have a file
        self._unsaved = FollowedReader("", "")  # no checkpoint yet: the default reader, at the beginning
        self._stuck_at = (0, 0)  # the segment and offset at which bytes are no frame, since the last look
        self._judged_at = (0, 0)
        self._condemned: tuple[int, int, str] | None = None

    def look(self, folder: Directory, names: list[str], now_ms: int) -> bool:
        """Look again. ``names``: the files of this queue in the folder. False if they are of an earlier moment than
        what is in them. Raises ``OSError``, ``KestrelError``.
        """
        held, self._holds = self._holds and names == self._names, False
        if held and self._is_unchanged(folder):
            self._holds = True
            return True
        try:
            return self._look(folder, names, now_ms, held)
        except _AnotherQueue:
            self._begin()
            return self._look(folder, names, now_ms, False)

    def _is_unchanged(self, folder: Directory) -> bool:
        """Whether what is known holds, by the dates of the files."""
        if self._closed_as is None or folder.status(self._numbered[-1][1]) != self._closed_as:
            return False
        return all(folder.status(reader.file_name) == reader.seen for reader in self._saved)

    def _look(self, folder: Directory, names: list[str], now_ms: int, held: bool) -> bool:
        """``held``: what is known is all that was in the files at the last look."""
        if names != self._names:
            self._list(folder, names)
        objection = self._check_some(folder)
        for reader in self._saved:
            held = not reader.look(folder, now_ms) and held
        self.revision += not held
        before = self._place()
        objection = self._follow(folder, now_ms) or objection
        if held and self._place() == before and objection is None and self._condemned is None:
            self._holds = True
            return True
        self.revision += 1
        is_complete = self._draw(folder)
        states = [reader.state for reader in self._saved if reader.state is not None]
        if objection is not None:
            raise objection
        if self._condemned is not None:
            raise CorruptJournal(f"{folder.path}/{self.name}", self._condemned[1], self._condemned[2])
        if self._skipped and any(state.watermark > self.tail_id for state in states):
            reason = "this segment has no valid header, and items are missing"
            raise CorruptJournal(f"{folder.path}/{self._numbered[-1][1]}", 0, reason)
        is_consistent = all(state.released_items <= self.put_items for state in states)
        self._holds = is_complete and is_consistent and len(states) == len(self._saved)
        return is_consistent

    def _place(self) -> tuple[int, int, int, bool]:
        """As long as it is the same, nothing was put."""
        active = self._active
        return (0, 0, 0, False) if active is None else (active.number, active.records_end, active.size, active.closed)

    def _draw(self, folder: Directory) -> bool:
        """Put the figures together. False if they may be others at the next look, although no file has changed."""
        none = self._abandoned | self._skipped
        self.segments = len(self._numbered) - len(none)
        self.journal_bytes = sum(self._sizes.values()) - sum(self._sizes[number] for number in none)
        self.file_bytes = self.journal_bytes + sum(reader.size for reader in self._saved)
        self.readers = [reader for reader in self._saved if reader.state is not None]
        if not self.readers and self.segments:
            self.readers = [self._unsaved]
        is_complete = not none and len(self._checked) + 1 == len(self._numbered)
        for reader in self.readers:
            head = self.head_of(reader)
            if head >= self.tail_id or not self._numbered:
                reader.oldest_ms = 0
            else:
                reader.find_oldest(folder, head, self._numbered, self._headers)
                is_complete = is_complete and reader.knows_oldest(head)
        return is_complete

    def head_of(self, reader: FollowedReader) -> int:
        """Every id up to it is done."""
        if reader.state is not None:
            return reader.state.head
        return self._headers[min(self._headers)].first_id - 1 if self._headers else 0

    def left_of(self, reader: FollowedReader) -> tuple[int, int]:
        """Items and bytes that the reader has not done."""
        if reader.state is not None:
            done = reader.state.released_items, reader.state.released_bytes
        elif self._headers:
            first = self._headers[min(self._headers)]
            done = first.base_items, first.base_bytes
        else:
            return 0, 0
        return max(0, self.put_items - done[0]), max(0, self.put_bytes - done[1])

    def _list(self, folder: Directory, names: list[str]) -> None:
        file_names.refuse_unrestored(names, self.name, folder.path)
        self.kind = kind_of(names, self.name)
        self._numbered = file_names.segments_among(names, self.name)
        there = {number for number, _ in self._numbered}
        self._checked &= there
        self._unclosed, self._abandoned, self._skipped = set(), set(), set()
        self._headers = {number: header for number, header in self._headers.items() if number in there}
        self._sizes = {
            number: self._sizes[number] if number in self._checked else _size(folder, name)
            for number, name in self._numbered[:-1]
        }
        if self._numbered:
            self._sizes[self._numbered[-1][0]] = 0  # the look at it says how large it is
        before = {reader.name: reader for reader in self._saved}
        self._saved = [
            before.get(reader) or FollowedReader(reader, file_names.checkpoint_name(self.name, reader))
            for reader in sorted(file_names.readers_among(names, self.name))
        ]
        self._names = names

    def _check_some(self, folder: Directory) -> CorruptJournal | None:
        """Open segments that were not seen yet, but for the newest, as far as one look goes. Returns what is wrong."""
        seen = self._checked | self._unclosed
        if len(seen) + 1 >= len(self._numbered):
            return None
        unseen = [each for each in self._numbered[:-1] if each[0] not in seen]
        for number, name in unseen[:CHECKED_AT_ONCE]:
            try:
                file = open_segment(folder, name)
            except FileNotFoundError:
                continue
            try:
                self._check(folder, file, number, name)
            except CorruptJournal as error:
                return error
            finally:
                file.close()
        return None

    def _check(self, folder: Directory, file: File, number: int, name: str) -> None:
        """See what an older segment is. The writer has closed it before it began the next one, or has crashed."""
        header = self._identified(folder, file, number, name)
        self._sizes[number] = file.size()
        if header is not None and read_footer(file, header) is not None:
            self._headers[number] = header
            self._checked.add(number)
            return
        if header is None or is_abandoned(file, name, number, header, self._header_after(folder, number)):
            self._abandoned.add(number)
        else:
            self._headers[number] = header
        self._unclosed.add(number)

    def _header_after(self, folder: Directory, number: int) -> fmt.SegmentHeader | None:
        later = (stored_header(folder, *each) for each in self._numbered if each[0] > number)
        return next((header for header in later if header is not None), None)

    def _identified(self, folder: Directory, file: File, number: int, name: str) -> fmt.SegmentHeader | None:
        """The header; ``None`` for a segment that is being made, or whose making was given up."""
        path = f"{folder.path}/{name}"
        header = identify(file, path, name, number, b"", lambda: self._header_after(folder, number))
        if isinstance(header, Objection):
            raise header.error(path)
        return header

    def _follow(self, folder: Directory, now_ms: int) -> CorruptJournal | None:
        """Read what was put since the last look, and say how much was ever put. Returns what is wrong."""
        objection: CorruptJournal | None = None
        self._skipped.clear()
        for number, name in reversed(self._numbered):
            about = self._status_if_closed(folder, number, name)
            if about is not None and about == self._closed_as:
                return objection
            try:
                file = open_segment(folder, name)
            except FileNotFoundError:
                continue
            try:
                size = self._sizes[number] = file.size()
                if self._follow_in(folder, file, number, name, size):
                    self._closed_as = about if about is not None and is_settled(about, now_ms) else None
                    return objection
                self._skipped.add(number)
            except CorruptJournal as error:
                objection = objection or error
            finally:
                file.close()
        if objection is None and len(self._skipped) < len(self._numbered):
            raise FileNotFoundError  # all of them were retired at this moment: list again
        self.put_items = self.put_bytes = self.tail_id = 0
        return objection

    def _status_if_closed(self, folder: Directory, number: int, name: str) -> FileStatus | None:
        """The status of the segment that is followed, if it is closed: while it is the same, nothing is read."""
        if self._active is None or self._active.number != number or not self._active.closed:
            return None
        try:
            return folder.status(name)
        except FileNotFoundError:
            return None

    def _follow_in(self, folder: Directory, file: File, number: int, name: str, size: int) -> bool:
        """Follow the newest segment; false if this file is none."""
        segment = self._active
        first_bytes = file.read(0, fmt.HEADER_BYTES)
        is_first = segment is None or segment.number != number or first_bytes != self._first_bytes
        if segment is None or is_first:
            header = self._identified(folder, file, number, name)
            if header is None:
                return False
            if self.queue_id not in (b"", header.queue_id):
                raise _AnotherQueue
            segment = self._active = load_segment(file, name, header)
            self.queue_id = header.queue_id
            self._first_bytes = first_bytes  # others at a later look: the file was replaced, or is damaged
            self._headers[number] = header
            self.is_estimated = False
            self._condemned = None
        if not segment.closed:
            head = file.read(segment.records_end, fmt.FRAME_BYTES).strip(b"\0")
            footer = read_footer(file, segment.header) if head or size != segment.size else None
            segment.size = size
            if footer is not None:
                segment.apply(footer)
                self.is_estimated = False
            elif head or is_first:
                self._count(file, segment, is_first=is_first)
            else:
                self._stuck_at = (0, 0)
        self.put_items = segment.header.base_items + segment.items
        self.put_bytes = segment.header.base_bytes + segment.data_bytes
        self.tail_id = segment.last_id
        return True

    def _count(self, file: File, segment: Segment, *, is_first: bool) -> None:
        """Count frames from where the last look ended."""
        start = segment.records_end
        self._count_frames(file, segment)
        end = segment.records_end
        if end > start:
            self._condemned = None
        head = file.read(end, fmt.FRAME_BYTES).strip(b"\0")
        if self._judged_at == (segment.number, end):  # once: a torn tail stays as it is, and may be long
            return
        if not is_first:
            if not head:
                self._stuck_at = (0, 0)
                return
            if self._stuck_at != (segment.number, end):
                self._stuck_at = (segment.number, end)  # perhaps a frame that is being stored: the next look shows it
                return
        if head:
            self._judged_at = (segment.number, end)
        if was_on_disk(file, segment, end, segment.last_id + 1):
            reason = f"item {segment.last_id + 1} was on disk and is not intact here"
            self._condemned = (segment.number, end, reason)

    def _count_frames(self, file: File, segment: Segment) -> None:
        start = segment.records_end
        self._count_block(file, segment)
        if segment.records_end < start + READ_BYTES:
            return
        is_long = self._pass_frames(file, segment)
        self._count_block(file, segment)
        if is_long and self._jump(file, segment):
            self._count_block(file, segment)

    def _count_block(self, file: File, segment: Segment) -> None:
        """Count the frames that begin in the next block."""
        stop = segment.records_end + READ_BYTES
        for offset, frame in iterate_frames(file, segment.header.marker, segment.records_end, file.size()):
            if offset >= stop or frame.footer is not None or frame.first_id != segment.last_id + 1:
                return
            segment.count(offset, frame)

    def _pass_frames(self, file: File, segment: Segment) -> bool:
        """Count frames by their heads, but for the last one, of which only the head may be stored. True if there are
        more of them than one look passes.
        """
        before: _Head | None = None
        heads = _heads(file, segment.header.marker, segment.records_end, segment.last_id + 1)
        for number, frame in enumerate(heads):
            if before is not None:
                segment.last_id += before.items
                segment.data_bytes += before.data_bytes
                segment.records_end = before.end
            if number == FRAMES_AT_ONCE:
                return True
            before = frame
        return False

    def _jump(self, file: File, segment: Segment) -> bool:
        """Go on at the last frame, if it is far away. False if it is not found."""
        low, high = segment.records_end, file.size()
        while high - low > WINDOW_BYTES // 8:  # after the frames there are zeros only
            middle = (low + high) // 2
            if file.read(middle, PROBE_BYTES).strip(b"\0"):
                low = middle
            else:
                high = middle
        base = max(segment.records_end, low - WINDOW_BYTES)
        data = file.read(base, min(high + WINDOW_BYTES, file.size()) - base)
        marker = fmt.pack_crc(segment.header.marker)
        at = data.rfind(marker)
        while at >= fmt.MARKER_OFFSET:
            frame = fmt.decode_frame(data, at - fmt.MARKER_OFFSET, segment.header.marker)
            if frame is not None and frame.footer is None and frame.first_id > segment.last_id:
                self._pass_over(segment, base + at - fmt.MARKER_OFFSET, frame)
                return True
            at = data.rfind(marker, 0, at)
        return False

    def _pass_over(self, segment: Segment, offset: int, frame: fmt.Frame) -> None:
        passed = offset - segment.records_end
        if passed:
            segment.data_bytes += passed * segment.data_bytes // (segment.records_end - fmt.HEADER_BYTES)
            self.is_estimated = True
        segment.count(offset, frame)


def is_settled(about: FileStatus, now_ms: int) -> bool:
    """Whether a file with this status, which is read now, need not be read again while it has it."""
    return 0 < about.modified_ms < now_ms - SETTLED_MS


def _size(folder: Directory, name: str) -> int:
    """The size of a file; 0 for what is none, or gone at this moment."""
    try:
        about = folder.status(name)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    return about.size if about is not None else 0
