"""The journal as a streaming query follows it: a reader's view of a queue that another process writes.

What the core finds out frame by frame is found out here by the block, as a query may be hundreds of thousands of items
a second: where the last segment ends by now, and how many bytes there are up to an id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.follow import FollowingView
from kestrelpy._journal.segment import MARK_EVERY, Segment, open_segment, read_footer
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy.errors import CorruptJournal
from kestrelpy.spark._decode import Run, decode

BLOCK_BYTES = 1 << 20


class StreamView(FollowingView):
    """As ``FollowingView``; the same is seen, at a tenth of the cost."""

    def __init__(self, directory: Directory, queue: str, check: Callable[[], object] = bool) -> None:
        super().__init__(directory, queue, check)
        self._counted_to = (0, 0, 0, 0)
        """How far a segment was counted: its number, the next id, where its frame is, the bytes of items before it."""

    def _follow_active(self, segment: Segment) -> bool:
        file = self._file
        assert file is not None
        if not file.read(segment.records_end, fmt.FRAME_BYTES).strip(b"\0"):
            return False
        footer = read_footer(file, segment.header)
        if footer is not None:
            segment.apply(footer)
            file.close()
            self._file = None
            self.durable_id = segment.last_id
        try:
            if footer is None:
                for offset, run in runs(file, segment, segment.last_id + 1, segment.records_end, file.size()):
                    _count(segment, offset, run)
        finally:  # what was counted is not looked at again, whatever can't be read now
            self._at = (segment.last_id, segment.header.base_bytes + segment.data_bytes)
        return footer is not None

    def _sizes(self, segment: Segment, last_id: int, *, around: bool = False) -> dict[int, int]:
        """What is asked for is the sum of them, so that comes under ``last_id`` alone, unless there is damage."""
        if around:
            return super()._sizes(segment, last_id, around=True)
        if self._counted_to[:2] == (segment.number, last_id + 1):
            return {last_id: self._counted_to[3]}
        total, due = 0, segment.first_id
        for run, before in self._counted_runs(segment, last_id, last_id):
            count = min(len(run.starts), last_id + 1 - run.first_id)
            total, due = before + int(run.sizes[:count].sum()), run.first_id + count
        if due <= last_id:
            path = f"{self._directory.path}/{segment.name}"
            raise CorruptJournal(path, segment.records_end, f"item {due} is not intact here", item_id=due)
        return {last_id: total}

    def reach(self, first_id: int, last_id: int, max_bytes: int) -> int:
        """The last id up to ``last_id`` such that the items from ``first_id`` to it have no more than ``max_bytes``;
        ``first_id`` if the first one has more. Behind damage it may be one further on.
        """
        left, reached = max_bytes, first_id - 1
        for segment in self.segments:
            if segment.last_id <= reached or segment.first_id > last_id:
                continue
            whole = first_id <= segment.first_id and segment.last_id <= last_id
            if whole and segment.data_bytes <= left:
                left, reached = left - segment.data_bytes, segment.last_id
                continue
            for run, _ in self._counted_runs(segment, first_id, last_id):
                skipped = max(first_id - run.first_id, 0)
                sizes = run.sizes[skipped : last_id + 1 - run.first_id].cumsum()
                fitting = int(sizes.searchsorted(left, "right"))
                reached = max(reached, run.first_id + skipped + fitting - 1)
                if fitting < len(sizes):
                    return max(reached, first_id)
                left -= int(sizes[-1]) if len(sizes) else 0
            if reached < min(segment.last_id, last_id):  # damage: whoever reads it is told
                return max(reached, first_id)
        return max(reached, first_id)

    def _counted_runs(self, segment: Segment, first_id: int, last_id: int) -> Iterator[tuple[Run, int]]:
        """The runs of a segment that have ids from ``first_id`` to ``last_id``, and perhaps some before, each with the
        bytes of all items of the segment before it. Goes on from where it was counted to, if that helps.
        """
        number, due, offset, before = self._counted_to
        if number != segment.number or due > first_id:
            due, offset, before = segment.first_id, fmt.HEADER_BYTES, 0
        file = open_segment(self._directory, segment.name)
        try:
            end = segment.records_end
            for _, run in runs(file, segment, due, offset, end):
                yield run, before
                if run.next_id > last_id:
                    break
                offset, before = offset + run.end, before + int(run.sizes.sum())
                self._counted_to = segment.number, run.next_id, offset, before
        finally:
            file.close()


class StreamSource(DetachedSource):
    """As ``DetachedSource``, by a ``StreamView``."""

    view_type = StreamView
    _view: StreamView

    @property
    def view(self) -> StreamView:
        """The journal, as of the last look."""
        return self._view


def runs(file: File, segment: Segment, due: int, offset: int, end: int) -> Iterator[tuple[int, Run]]:
    """The runs of frames from ``offset`` on, as far as they are whole, with their offsets."""
    want = BLOCK_BYTES
    while offset < end:
        data, at = memoryview(file.read(offset, min(want, end - offset))), 0
        while (run := decode(data[at:], segment.header.marker, due)).end:
            yield offset + at, run
            at, due = at + run.end, run.next_id
        claimed = fmt.FRAME_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
        if not at and not want < claimed <= end - offset:
            return
        offset, want = offset + at, max(BLOCK_BYTES, claimed)


def _count(segment: Segment, offset: int, run: Run) -> None:
    """These frames of the segment were found at ``offset``."""
    if not segment.marks or offset - segment.marks[-1][1] >= MARK_EVERY:
        segment.marks.append((run.first_id, offset))
    first_ms, last_ms = int(run.added_ms.min()), int(run.added_ms.max())
    segment.min_added_ms = min(segment.min_added_ms or first_ms, first_ms)
    segment.max_added_ms = max(segment.max_added_ms, last_ms)
    segment.last_id = run.next_id - 1
    segment.data_bytes += int(run.sizes.sum())
    segment.records_end = offset + run.end
