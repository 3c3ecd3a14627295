"""Checking a queue's files from outside. Every byte is read; whatever an opening would object to is reported.

Nothing is written and no lock is taken.
"""

from __future__ import annotations

import os

from kestrelpy._disk.interface import Directory, Disk, File, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.catalog import SegmentCatalog
from kestrelpy._journal.checkpoint import field_offset, load_checkpoint
from kestrelpy._journal.purpose import ITEMS, kind_of
from kestrelpy._journal.queue_files import QueueFiles, is_checkpoint_of
from kestrelpy._journal.recovery import claimed_at, why_tail_impossible
from kestrelpy._journal.segment import (
    Objection,
    Segment,
    frames_of,
    load_segment,
    open_segment,
    read_used,
    segments_in,
)
from kestrelpy._value import Value
from kestrelpy.errors import CorruptJournal
from kestrelpy.inbox.parts import refused_batches
from kestrelpy.inspection.archive_check import ARCHIVE, is_archive, look_at_archive
from kestrelpy.inspection.inbox_check import check_inbox
from kestrelpy.inspection.strange_files import WHY_NOT_READ, strange_files

_TRIES = 20  # a live writer may retire all listed segments, before the newest of them is opened


class Damage(Value):
    """One place in a file that is damaged, and why."""

    path: str
    offset: int
    reason: str


class VerifyReport(Value, kw_only=True):
    """What ``verify`` found. ``items``, ``bytes``: those that are intact; of a damaged segment, those before its first
    damage. ``torn_bytes``: left by crashes above what was durable; they are no damage. Of a damaged segment none are
    counted: there, bytes after the frames may be what is left of missing items. ``kind``: ``"queue"`` or
    ``"work queue"``, or ``"archive"`` for a folder that has archived segments and nothing else. ``batches``, ``parts``:
    published in the inbox, and not ingested yet. ``refused_batches``: published batches that the owner could not
    ingest, and keeps aside in the inbox; they are no damage either. ``archived_segments``: those in ``archive_dir``, of
    which ``archived_items`` are the items.
    """

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
    kind: str = ITEMS
    refused_batches: int = 0
    batches: int = 0
    parts: int = 0
    archived_segments: int = 0
    archived_items: int = 0

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
        self._items = self._bytes = 0
        self._torn: dict[str, int] = {}  # bytes after the frames, by segment
        self._catalog = SegmentCatalog([folder], queue, reads_all=True)
        self._watermark = self._catalog.watermark
        self.queue_id = self._catalog.queue_id
        self.put_items = 0
        """How many items were ever put, once the check has run."""
        self._tail_id = max((state.highest_id for state in self._catalog.states), default=0)

    def _report(self, name: str, offset: int, reason: str) -> None:
        self._damage.append(Damage(f"{self._folder.path}/{name}", offset, reason))

    def run(self, refused: int) -> VerifyReport:
        """``refused``: how many batches are kept aside in the inbox."""
        readers = tuple(sorted(QueueFiles(self._folder, self._queue).reader_names()))
        self._check_states(readers)
        segments: list[Segment] = []
        after, tries = -1, _TRIES
        while tries and (after := self._check_newer(after, segments)) >= 0:
            tries -= 1
        if tries:
            self._check_end(segments)
        self.put_items = segments[-1].header.base_items + segments[-1].items if segments else 0
        return VerifyReport(
            queue=self._queue,
            segments=len(segments),
            items=self._items,
            bytes=self._bytes,
            first_id=segments[0].first_id if segments else 0,
            last_id=segments[-1].last_id if segments else 0,
            torn_bytes=self._torn_bytes(),
            readers=readers,
            damage=tuple(self._damage),
            refused_batches=refused,
            kind=kind_of(self._folder.names(), self._queue),
            unknown_files=tuple(
                sorted(
                    name
                    for name in file_names.of_queue(self._folder.names(), self._queue)
                    if file_names.parse_owner(name) is None and not file_names.is_plan(name, self._queue)
                )
            ),
        )

    def _check_newer(self, number: int, segments: list[Segment]) -> int:
        """Check the listed segments after the one of that number. Returns -1, or the last number of the list if that
        segment is gone by now: then there are others after it.
        """
        numbered = [each for each in segments_in(self._folder, self._queue) if each[0] > number]
        is_last_gone = False
        for number, name in numbered:
            segment, is_last_gone = self._check_segment(number, name, last=name == numbered[-1][1])
            if segment is not None:
                objection = self._catalog.objection(segments[-1] if segments else None, segment)
                if objection is not None:
                    self._report(name, *objection)
                segments.append(segment)
        return numbered[-1][0] if is_last_gone else -1

    def _check_states(self, readers: tuple[str, ...]) -> None:
        names = {file_names.checkpoint_name(self._queue, reader): reader for reader in readers}
        queue_id = self._catalog.queue_id
        for name in [*names, file_names.mark_name(self._queue)]:
            state, exists = load_checkpoint(self._folder, name)
            if state is not None and not queue_id:  # no id was there at the first look: the queue was made since
                queue_id = state.queue_id
            if state is None:
                if exists:
                    self._report(name, 0, "no whole state in this checkpoint")
            elif not (is_checkpoint_of(state, names[name], queue_id) if name in names else state.queue_id == queue_id):
                is_other, reason = state.queue_id != queue_id, "this checkpoint belongs to another queue"
                field, reason = ("queue_id", reason) if is_other else ("reader", "this checkpoint is another reader's")
                self._report(name, field_offset(self._folder, name, field), reason)

    def _check_end(self, segments: list[Segment]) -> None:
        """No item that a reader needs or that was on disk may be after the end, nor may the last id be out of reach."""
        last = segments[-1] if segments else None
        name, end, last_id = (last.name, last.records_end, last.last_id) if last is not None else ("", 0, 0)
        if self._watermark > last_id:
            self._report(name, end, f"items {last_id + 1} to {self._watermark} are missing")
        tail_id = max(self._tail_id, self._watermark, last_id)
        reason = why_tail_impossible(tail_id, last_id, last)
        if reason is not None:
            found = claimed_at(self._folder, self._queue, self._catalog.queue_id, tail_id, segments[-1:])
            self._report(*(found or (name or file_names.mark_name(self._queue), end)), reason)

    def _check_segment(self, number: int, name: str, *, last: bool) -> tuple[Segment | None, bool]:
        """The segment, if it is one, and whether it is gone: retired at this moment. If it was not retired, the check
        of the next segment objects.
        """
        try:
            file = open_segment(self._folder, name)
        except FileNotFoundError:
            self._catalog.note_gone()
            return None, True
        try:
            return self._check_file(file, number, name, last), False
        finally:
            file.close()

    def _check_file(self, file: File, number: int, name: str, last: bool) -> Segment | None:
        path = f"{self._folder.path}/{name}"
        segment = None
        try:
            if number > fmt.LARGEST >> 1:
                self._report(name, 0, f"no segment has a number as large as {number}")
                return None
            header = self._catalog.identify(file, path, name, number)
            if header is None:
                return None
            if isinstance(header, Objection):
                self._report(name, *header)
                return None
            segment = load_segment(file, name, header)
            self._watermark = max(self._watermark, header.previous_last_id)
            if not segment.closed and not last:
                if self._catalog.is_abandoned(file, segment):
                    return None
                self._report(name, fmt.footer_offset(segment.size), "no valid footer")
            self._count(file, segment, path)
            return segment
        except CorruptJournal as damage:
            self._report(name, damage.offset, damage.reason)
            return segment

    def _count(self, file: File, segment: Segment, path: str) -> None:
        items = size = 0
        end = fmt.HEADER_BYTES
        last_id = segment.first_id - 1
        try:
            for offset, frame in frames_of(file, segment, path):
                items += len(frame.entries)
                size += sum(len(entry[0]) for entry in frame.entries)
                self._watermark = max(self._watermark, frame.watermark)
                end, last_id = offset + frame.size, frame.last_id
        finally:  # what is intact counts, also if the next frame is damaged
            self._items += items
            self._bytes += size
        if not segment.closed:
            segment.last_id, segment.data_bytes, segment.records_end = last_id, size, end
        elif (items, size) != (segment.items, segment.data_bytes):
            self._report(segment.name, fmt.footer_offset(segment.size), "the footer does not match the frames")
        after = segment.size - (fmt.FOOTER_BYTES if segment.closed else 0)
        self._torn[segment.name] = len(read_used(file, segment.records_end, after))

    def _torn_bytes(self) -> int:
        damaged = {damage.path for damage in self._damage}
        return sum(size for name, size in self._torn.items() if f"{self._folder.path}/{name}" not in damaged)


def verify(
    directory: StrPath, queue: str, *, archive_dir: StrPath | None = None, disk: Disk | None = None
) -> VerifyReport:
    """Read every byte of a queue and check it: checksums, order of ids, footers, the chain of segments, checkpoints;
    its inbox: published batches, their parts, the ledger; and its archive, if ``archive_dir`` is given. ``directory``
    may also be an archive by itself.

    Read-only and without a lock, also while the writer works. If the queue is erased meanwhile, items may be reported
    as missing. Damage is reported, not raised. If one of the queue's files is no regular file (a link, a folder), such
    files are all that is reported. Raises ``OSError`` (``PermissionError`` for a file that may not be read),
    ``InvalidName`` and ``UnsupportedFormat``.
    """
    file_names.check_name(queue)
    disk = disk or RealDisk()
    path = os.fspath(directory)
    folder = disk.directory(path)
    try:
        strange = _strange_in(folder, queue)
        if strange:
            return VerifyReport(queue=queue, kind=kind_of(folder.names(), queue), damage=strange)
        if is_archive(folder, folder.names(), queue):
            return _verify_archive(folder, queue)
        verification = Verification(folder, queue)
        report = verification.run(refused_batches(path, queue, disk))
        inbox = check_inbox(path, queue, disk, verification.put_items, verification.queue_id)
    finally:
        folder.close()
    if inbox is not None:
        damage = tuple(Damage(f"{path}/{file_names.INBOX}/{name}", at, why) for name, at, why in inbox.damage)
        report = report.__replace__(damage=(*report.damage, *damage), batches=inbox.batches, parts=inbox.parts)
    if archive_dir is None:
        return report
    folder = disk.directory(os.fspath(archive_dir))
    try:
        archive = _verify_archive(folder, queue)
    finally:
        folder.close()
    return report.__replace__(
        damage=(*report.damage, *archive.damage),
        archived_segments=archive.archived_segments,
        archived_items=archive.archived_items,
    )


def _strange_in(folder: Directory, queue: str) -> tuple[Damage, ...]:
    return tuple(Damage(f"{folder.path}/{name}", 0, WHY_NOT_READ) for name in strange_files(folder, queue))


def _verify_archive(folder: Directory, queue: str) -> VerifyReport:
    """The report of a folder of archived segments."""
    strange = _strange_in(folder, queue)
    if strange:
        return VerifyReport(queue=queue, kind=ARCHIVE, damage=strange)
    found = look_at_archive(folder, queue, folder.names())
    segments = [segment for salvage in found for segment in salvage.segments]
    damage = [Damage(f"{folder.path}/{bad.name}", bad.offset, bad.reason) for each in found for bad in each.all_bad()]
    items = sum(segment.intact_items for segment in segments)
    return VerifyReport(
        queue=queue,
        kind=ARCHIVE,
        segments=len(segments),
        items=items,
        bytes=sum(segment.data_bytes for segment in segments),
        first_id=min((segment.first_id for segment in segments), default=0),
        last_id=max((segment.last_id for segment in segments), default=0),
        damage=tuple(damage),
        archived_segments=len(segments),
        archived_items=items,
    )
