"""The journal of a writer in another process, read as one sequence.

The view ends at the first frame that is not whole: the writer may be in the middle of it, or may have died there. Which
of the two, a footer shows later. A segment is made when the one before it is closed. If that has no footer, it is
damaged: it counts as closed with the items that it had, and whoever reads those that are gone is told.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import is_new, refuse_unrestored, segments_among
from kestrelpy._journal.segment import (
    ListedSegments,
    Objection,
    Segment,
    first_header,
    identify,
    is_abandoned,
    iterate_frames,
    load_segment,
    open_segment,
    read_footer,
    segments_in,
)
from kestrelpy._journal.view import JournalView
from kestrelpy.errors import CorruptJournal, copy_of

LOOK_EVERY = 32
"""So many looks that find nothing new are followed by one for a later segment: the last one may have been cut short."""


class FrameCounter(Protocol):
    """Counts a view's frames in a way of its own: a streaming query decodes them block by block."""

    def count(self, file: File, segment: Segment) -> None:
        """Count the whole frames from ``segment.records_end`` on into ``segment``."""

    def bytes_to(self, segment: Segment, last_id: int) -> int:
        """The bytes of a segment's items up to ``last_id``. Raises ``CorruptJournal``, ``OSError``."""


class FollowingView(JournalView):
    """The journal that another process writes. ``follow`` brings the view up to date.

    ``check`` is called before new segments are accepted as this journal's. It raises if the queue has gone: then the
    new segments belong to a queue that was made again under the same name. ``counter`` counts frames; by default they
    are read one by one.
    """

    def __init__(
        self,
        directory: Directory,
        queue: str,
        check: Callable[[], object] = bool,
        counter: FrameCounter | None = None,
    ) -> None:
        super().__init__(directory, queue)
        self._check = check
        self._counter = counter
        self._file: File | None = None
        self._at = (0, 0)
        self._idle_looks = 0
        self.queue_id = bytes(16)
        self.durable_id = 0  # as the writer states it: what a sync from here shows of it may be wrong
        self._synced_id = 0
        self.holes: tuple[tuple[int, int, str], ...] = ()
        """First and last id that were in segments that are not there, and the path of the segment after them. Retired
        segments are among them: readers need nothing of those.
        """
        self._doubted: tuple[File, OSError] | None = None  # a file whose sync has failed, and the error

    @property
    def tail_id(self) -> int:
        return self._at[0]

    @property
    def total_bytes(self) -> int:
        return self._at[1]

    def _end(self) -> tuple[int, int]:
        return self._at

    def follow(self) -> None:
        """Read what the writer has done since. Raises ``CorruptJournal``, ``OSError``, ``UnsupportedFormat``.

        The folder is listed once for all new segments, and once more to see whether there are others by then.
        """
        later: ListedSegments | None = None
        while True:
            last = self.segments[-1] if self.segments else None
            if last is not None and not last.closed and not self._follow_active(last) and not self._is_cut_short(last):
                if last.items or last.number in self._numbers():
                    return
                last = self._forget_last()
            number = last.number if last is not None else -1
            if later is None or not self._take_following(later, number):
                later = self._list_behind(number)
                if not self._take_following(later, number):
                    return

    def _is_cut_short(self, segment: Segment) -> bool:
        """Whether there is a segment after the last one, which so is closed, or damaged. Looks now and then."""
        self._idle_looks += 1
        if self._idle_looks % LOOK_EVERY:
            return False
        after = self._list_behind(segment.number).header_from(0)
        if after is None:
            return False
        if not self._follow_active(segment):  # the writer has not closed it meanwhile
            _end_without_footer(segment, after)
            self.close()
            self._at = (segment.last_id, segment.header.base_bytes + segment.data_bytes)
        return True

    def _list_behind(self, number: int) -> ListedSegments:
        """The segments that are there after the one of that number."""
        names = self._directory.names()
        refuse_unrestored(names, self._queue, self._directory.path)
        later = [each for each in segments_among(names, self._queue) if each[0] > number]
        if later:  # else there is nothing new, or the next look has it
            later = [each for each in segments_in(self._directory, self._queue, names) if each[0] > number]
        if later and not any(self.queue_id):
            newest = first_header(self._directory, reversed(later))
            self.queue_id = newest.queue_id if newest is not None else self.queue_id
        return ListedSegments(self._directory, later, self.queue_id if any(self.queue_id) else b"")

    def _forget_last(self) -> Segment | None:
        """The creation of the last segment failed after all, and its file is gone. Returns the segment before it."""
        self.close()
        self.segments = self.segments[:-1]
        return self.segments[-1] if self.segments else None

    def _follow_active(self, segment: Segment) -> bool:
        """Read further in the last segment. True if it turns out to be closed."""
        file = self._file
        assert file is not None
        if not file.read(segment.records_end, fmt.FRAME_BYTES).strip(b"\0"):
            return False
        footer = read_footer(file, segment.header)
        try:
            if footer is not None:
                segment.apply(footer)
            else:
                self._count(file, segment)
        finally:  # frames that were counted are not read again, even if others can't be read now
            if segment.last_id > self._at[0]:
                self._idle_looks = 0
            self._at = (segment.last_id, segment.header.base_bytes + segment.data_bytes)
        if footer is not None:
            file.close()
            self._file = None
            self.durable_id = segment.last_id
        return footer is not None

    def _count(self, file: File, segment: Segment) -> None:
        if self._counter is not None:
            self._counter.count(file, segment)
        else:
            _count_frames(file, segment)

    def _bytes_to(self, segment: Segment, last_id: int) -> int:
        counter = self._counter
        return super()._bytes_to(segment, last_id) if counter is None else counter.bytes_to(segment, last_id)

    def _take_following(self, later: ListedSegments, last_number: int) -> bool:
        """Add the listed segments after the one of that number, up to the first that is not closed. Whether there were
        any.
        """
        added: list[Segment] = []
        try:
            self._follow_list(later, bisect_right(later.numbered, last_number, key=_number), added)
        finally:
            if added:
                self._check_and_add(added)
        return bool(added)

    def _check_and_add(self, added: list[Segment]) -> None:
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self._add(added)

    def _follow_list(self, later: ListedSegments, start: int, added: list[Segment]) -> None:
        for at in range(start, len(later)):
            try:
                file = open_segment(self._directory, later.numbered[at][1])
            except FileNotFoundError:
                continue  # retired at this moment
            try:
                segment = self._load(file, later, at)
            except BaseException:
                file.close()
                raise
            if segment is not None:
                added.append(segment)
                if not segment.closed:
                    self._file = file
                    return
            file.close()
            if segment is None and later.header_from(at + 1) is None:  # it is being made at this moment
                return

    def _load(self, file: File, later: ListedSegments, at: int) -> Segment | None:
        """The next segment; ``None`` if the file is not one, or not yet.

        Raises ``CorruptJournal`` for a segment of another queue, and for a header that is not valid or has another
        number than the file's name.
        """
        number, name = later.numbered[at]
        path = f"{self._directory.path}/{name}"
        queue_id = self.queue_id if any(self.queue_id) else b""

        def look() -> fmt.SegmentHeader | Objection | None:
            return identify(file, path, name, number, queue_id, lambda: later.header_from(at + 1))

        header = look()
        if isinstance(header, Objection):
            header = look()  # the writer may have completed it since
        if isinstance(header, Objection):
            raise header.error(path)
        if header is None:
            return None
        segment = load_segment(file, name, header)
        after = later.header_from(at + 1) if not segment.closed else None
        if after is None:
            return segment
        if is_abandoned(file, name, number, header, after):
            return None
        self._count(file, segment)
        _end_without_footer(segment, after)
        return segment

    def _add(self, added: list[Segment]) -> None:
        segment = added[-1]
        header = segment.header
        self._note_holes(added)
        self.queue_id = header.queue_id
        self.durable_id = segment.last_id if segment.closed else header.previous_last_id
        self.segments = (*self.segments, *added)  # once for all of them: there may be very many
        self._at = (segment.last_id, header.base_bytes + segment.data_bytes)
        self.missing = header.first_id - 1 - header.base_items

    def _note_holes(self, added: list[Segment]) -> None:
        end_id = self.segments[-1].last_id if self.segments else 0
        for segment in added:
            previous_id = segment.header.previous_last_id
            if previous_id > end_id:
                path = f"{self._directory.path}/{segment.name}"
                self.holes = (*self.holes, (end_id + 1, previous_id, path))
            end_id = segment.last_id

    def last_id_without_hole(self, item_id: int, last_id: int) -> int:
        """The last id up to ``last_id`` before which no segment is missing, for a reader that needs ``item_id``.

        Raises ``CorruptJournal`` if ``item_id`` was in a missing segment: a segment that a reader needs is not retired.
        """
        for first_id, end_id, path in self.holes:
            if first_id <= item_id <= end_id:
                reason = f"a reader needs item {item_id}; the next item in the journal is {end_id + 1}"
                raise CorruptJournal(path, fmt.HEADER_OFFSET["previous_last_id"], reason, item_id=item_id)
            if item_id < first_id <= last_id:
                last_id = first_id - 1
        return last_id

    def make_durable(self, item_id: int) -> None:
        """Sync the writer's file from this process (R4): a checkpoint must not name an item that a power cut may lose.

        If that fails, no later sync of the file is believed (R9); the writer's footer is. A sync that succeeds is no
        proof either: this process does not learn of an earlier sync of the writer's that failed. So this sync is never
        the reason to tell anybody that the items are on disk.
        """
        if item_id > max(self.durable_id, self._synced_id) and self._file is not None:
            tail_id = self.tail_id
            if self._doubted is not None and self._doubted[0] is self._file:
                raise copy_of(self._doubted[1])
            try:
                self._file.sync()
                if is_new(self.segments[-1].name):
                    self._directory.sync()
            except OSError as error:
                self._doubted = self._file, error
                raise
            self._synced_id = max(self._synced_id, tail_id)

    def is_still_there(self) -> bool:
        """Whether the last segment that was seen is still there, and not one of another queue with the same number."""
        if not self.segments:
            return False
        number = self.segments[-1].number
        last = [each for each in segments_among(self._directory.names(), self._queue) if each[0] == number]
        header = first_header(self._directory, last)
        return header is not None and header.queue_id == self.queue_id

    def _numbers(self) -> set[int]:
        """The numbers of the segments that are there. Names would not do: a new segment gets its lasting name. One
        listing does: what it may leave out is the newest one, and then that is found again.
        """
        return {number for number, _ in segments_among(self._directory.names(), self._queue)}

    def forget_gone(self) -> None:
        """Forget the segments that are gone: every reader was past them, and they may have been retired."""
        there = self._numbers()
        gone = [at for at, segment in enumerate(self.segments[:-1]) if segment.number not in there]
        if gone:
            self.segments = self.segments[gone[-1] + 1 :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_without_footer(segment: Segment, after: fmt.SegmentHeader) -> None:
    """Close a segment, for reading: ``after``, the next one with a whole header, is made when all before it are closed.
    Items that are not there are damage, or a hole before ``after``.
    """
    if after.previous_number == segment.number:
        segment.last_id = max(segment.last_id, after.previous_last_id)
        segment.data_bytes = after.base_bytes - segment.header.base_bytes
    segment.closed = True


def _count_frames(file: File, segment: Segment) -> None:
    for offset, frame in iterate_frames(file, segment.header.marker, segment.records_end, file.size()):
        if frame.footer is not None or frame.first_id != segment.last_id + 1:
            return
        segment.count(offset, frame)


def _number(each: tuple[int, str]) -> int:
    return each[0]
