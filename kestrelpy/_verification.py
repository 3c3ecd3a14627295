"""Checking a queue's files from outside: every byte is read, and what an opening would object to is reported.

Nothing is written and no lock is taken.
"""

from __future__ import annotations

from kestrelpy import _format as fmt
from kestrelpy import _names
from kestrelpy._chain import Chain
from kestrelpy._checkpoint import load_checkpoint
from kestrelpy._disk import Directory, File
from kestrelpy._home import Home, is_place_of
from kestrelpy._recovery import out_of_reach
from kestrelpy._segment import Segment, frames_of, load_segment, open_segment, read_header, read_used
from kestrelpy._value import Value
from kestrelpy.errors import CorruptJournal


class Damage(Value):
    """One place that is not as it should be."""

    path: str
    offset: int
    reason: str


class VerifyReport(Value, kw_only=True):
    """What ``verify`` found. ``torn_bytes``: left behind by crashes above what was durable; no damage."""

    queue: str
    segments: int = 0
    items: int = 0
    bytes: int = 0
    first_id: int = 0
    last_id: int = 0
    torn_bytes: int = 0
    readers: tuple[str, ...] = ()
    damage: tuple[Damage, ...] = ()
    unknown_files: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


class Verification:
    """One check."""

    def __init__(self, folder: Directory, queue: str) -> None:
        self._folder = folder
        self._queue = queue
        self._damage: list[Damage] = []
        self._items = self._bytes = self._torn = 0
        self._chain = Chain([folder], queue)
        self._watermark = self._chain.watermark
        self._tail_id = max((state.highest_id for state in self._chain.states), default=0)

    def _report(self, name: str, offset: int, reason: str) -> None:
        self._damage.append(Damage(f"{self._folder.path}/{name}", offset, reason))

    def run(self) -> VerifyReport:
        readers = tuple(sorted(Home(self._folder, self._queue).reader_names()))
        self._check_states(readers)
        segments: list[Segment] = []
        numbered = _names.segments_among(self._folder.names(), self._queue)
        for number, name in numbered:
            segment = self._check_segment(number, name, last=name == numbered[-1][1])
            if segment is not None:
                objection = self._chain.objection(segments[-1] if segments else None, segment)
                if objection is not None:
                    self._report(name, 48, objection)
                segments.append(segment)
        self._check_end(segments)
        return VerifyReport(
            queue=self._queue,
            segments=len(segments),
            items=self._items,
            bytes=self._bytes,
            first_id=segments[0].first_id if segments else 0,
            last_id=segments[-1].last_id if segments else 0,
            torn_bytes=self._torn,
            readers=readers,
            damage=tuple(self._damage),
            unknown_files=tuple(
                sorted(
                    name
                    for name in self._folder.names()
                    if name.startswith((f"{self._queue}.", f"{self._queue}+")) and _names.parse_owner(name) is None
                )
            ),
        )

    def _check_states(self, readers: tuple[str, ...]) -> None:
        names = {_names.checkpoint_name(self._queue, reader): reader for reader in readers}
        queue_id = self._chain.queue_id
        for name in [*names, _names.mark_name(self._queue)]:
            state, exists = load_checkpoint(self._folder, name)
            if state is None:
                if exists:
                    self._report(name, 0, "no whole state in this checkpoint")
            elif not (is_place_of(state, names[name], queue_id) if name in names else state.queue_id == queue_id):
                self._report(name, 24, "this checkpoint belongs to another queue")

    def _check_end(self, segments: list[Segment]) -> None:
        """What a reader needs, and what was on disk, must not be behind the end; nor may the end be out of reach."""
        last = segments[-1] if segments else None
        name, last_id = (last.name, last.last_id) if last is not None else ("", 0)
        if self._watermark > last_id:
            self._report(name, 0, f"items {last_id + 1} to {self._watermark} are missing")
        reason = out_of_reach(max(self._tail_id, self._watermark, last_id), last_id, last)
        if reason is not None:
            self._report(name or _names.mark_name(self._queue), 0, reason)

    def _check_segment(self, number: int, name: str, *, last: bool) -> Segment | None:
        try:
            file = open_segment(self._folder, name)
        except FileNotFoundError:
            return None  # retired in this moment: if it was not, the next one objects
        path = f"{self._folder.path}/{name}"
        segment = None
        try:
            if number > fmt.LARGEST >> 1:
                self._report(name, 0, f"no segment has a number like {number}")
                return None
            header = read_header(file, path)
            if header is None or header.number != number:
                if not self._chain.is_none(file, name, number, None):
                    self._report(name, 0, "no valid header")
                return None
            if self._chain.queue_id not in (b"", header.queue_id):
                self._report(name, 32, "this segment belongs to another queue")
                return None
            segment = load_segment(file, name, header)
            self._watermark = max(self._watermark, header.previous_last_id)
            if not segment.closed and not last:
                if self._chain.is_none(file, name, number, header):
                    return None
                self._report(name, segment.size, "no valid footer")
            self._count(file, segment, path)
            return segment
        except CorruptJournal as damage:
            self._report(name, damage.offset, damage.reason)
            return segment
        finally:
            file.close()

    def _count(self, file: File, segment: Segment, path: str) -> None:
        items = size = 0
        end = fmt.HEADER_BYTES
        last_id = segment.first_id - 1
        for offset, frame in frames_of(file, segment, path):
            items += len(frame.entries)
            size += sum(len(entry[0]) for entry in frame.entries)
            self._watermark = max(self._watermark, frame.watermark)
            end, last_id = offset + frame.size, frame.last_id
        self._items += items
        self._bytes += size
        if not segment.closed:
            segment.last_id, segment.data_bytes, segment.records_end = last_id, size, end
        elif (items, size) != (segment.items, segment.data_bytes):
            self._report(segment.name, segment.records_end, "the footer does not match the frames")
        behind = segment.size - (fmt.FOOTER_BYTES if segment.closed else 0)
        self._torn += len(read_used(file, segment.records_end, behind))
