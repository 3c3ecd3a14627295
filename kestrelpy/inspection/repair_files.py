"""The steps of a repair on disk, in an order that a kill or a power cut at any of them does no harm to.

1. *Staged.* New segments are written under the names of temporary files, and bad bytes into ``.quarantine`` files, all
   synced. Nothing that counts has changed; if there is no room, these files are removed again.
2. *Committed.* ``jobs.repair`` says durably what is to be done. From here on nobody opens the queue
   (``RepairIncomplete``), and the next repair resumes here.
3. *Applied.* Files are set aside, new segments get their names, old ones are removed, checkpoints and the mark are
   written. Each step may be repeated: it is done if what it begins with is there.
4. ``jobs.repair`` is removed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import replace_file, write_temporary
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, write_mark
from kestrelpy._journal.salvage import FrameRun, SalvagedSegment
from kestrelpy._journal.segment import iterate_frames, read_used
from kestrelpy._journal.small_files import read_small
from kestrelpy.errors import CorruptJournal
from kestrelpy.inspection.repair_plan import NewSegment

_MOST_BYTES = 64 << 20
_FORMAT = 1


class RepairSteps:
    """What is to be done once all new files are there. It is stored as JSON, after a line with its CRC-32.

    ``moves``: files that are set aside, with their new names. ``installs``: names of new files, which are there as
    temporary files. ``removes``: files that are gone afterwards. ``readers``: with their checkpoints, as hex digits.
    ``mark``: the queue's id, its last id, and the last one on disk. ``found``: the report, for whoever resumes.
    """

    def __init__(self) -> None:
        self.moves: list[tuple[str, str]] = []
        self.installs: list[str] = []
        self.removes: list[str] = []
        self.readers: dict[str, str] = {}
        self.mark: tuple[str, int, int] | None = None
        self.found: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.moves or self.installs or self.removes or self.readers or self.mark)

    def encode(self) -> bytes:
        """The content of ``jobs.repair``."""
        body = json.dumps({"format": _FORMAT, **vars(self)}, indent=1).encode()
        return b"%08x\n" % crc32(body) + body

    @classmethod
    def decode(cls, data: bytes) -> RepairSteps | None:
        """``None`` if the file is damaged."""
        head, _, body = data.partition(b"\n")
        if head != b"%08x" % crc32(body):
            return None
        steps = cls()
        vars(steps).update(json.loads(body))
        return steps if vars(steps).pop("format") == _FORMAT else None


def read_steps(folder: Directory, queue: str) -> RepairSteps:
    """What a repair that was cut short has still to do. Raises ``CorruptJournal`` if that is damaged, ``OSError``."""
    name = file_names.repair_name(queue)
    steps = RepairSteps.decode(read_small(folder, name, _MOST_BYTES) or b"")
    if steps is None:
        raise CorruptJournal(f"{folder.path}/{name}", 0, "what a repair has still to do can't be read")
    return steps


def commit(files: QueueFiles, steps: RepairSteps) -> None:
    """Say durably what is to be done. The new files are there, and synced. Raises ``OSError``."""
    files.directory.sync()  # the new files have their names on disk
    replace_file(files.directory, file_names.repair_name(files.queue), steps.encode())


def apply_steps(files: QueueFiles, steps: RepairSteps) -> None:
    """Apply steps that are committed. May be repeated. Raises ``OSError``."""
    folder = files.directory
    names = set(folder.names())
    for old, new in steps.moves:
        if old in names and new not in names:
            folder.rename(old, new)
    folder.sync()  # before a new file takes such a name
    for name in steps.installs:
        if file_names.temporary_name(name) in names:
            folder.rename(file_names.temporary_name(name), name)
    folder.sync()
    for name in steps.removes:
        with contextlib.suppress(FileNotFoundError):
            folder.unlink(name)
    folder.sync()
    for reader, encoded in steps.readers.items():
        state = fmt.decode_checkpoint_body(bytes.fromhex(encoded))
        assert state is not None
        files.checkpoint_file(reader).save(state, durable=True)
    if steps.mark is not None:
        queue_id, tail_id, durable_id = steps.mark
        found = Recovered(queue_id=bytes.fromhex(queue_id), tail_id=tail_id)
        write_mark(folder, files.queue, found, durable_id)
    _end(files)


def _end(files: QueueFiles) -> None:
    """All is done: the queue may be opened."""
    files.directory.unlink(file_names.repair_name(files.queue))
    files.directory.sync()


class RepairStage:
    """The new files of one repair, before it is committed."""

    def __init__(self, folder: Directory) -> None:
        self._folder = folder
        self._made: list[str] = []

    def discard(self) -> None:
        """Remove the files again, as far as that is possible."""
        for name in self._made:
            with contextlib.suppress(OSError):
                self._folder.unlink(name)

    def keep(self, name: str, data: bytes) -> None:
        """Write bytes that are kept aside. Raises ``OSError``."""
        self._made.append(file_names.temporary_name(name))
        temporary = write_temporary(self._folder, name, data)
        self._folder.rename(temporary, name)
        self._made[-1] = name

    def write(self, name: str, new: NewSegment, randomness: Callable[[int], bytes], now_ms: int) -> None:
        """Write a new segment, which will have that name, as a temporary file. Raises ``OSError``."""
        name = file_names.temporary_name(name)
        with contextlib.suppress(FileNotFoundError):
            self._folder.unlink(name)
        self._made.append(name)
        file = self._folder.create(name)
        try:
            _write_segment(file, self._folder, new, int.from_bytes(randomness(4), "little") | 1 << 31, now_ms)
            file.sync()
        finally:
            file.close()


def _write_segment(file: File, folder: Directory, new: NewSegment, marker: int, now_ms: int) -> None:
    header = new.header._replace(marker=marker)
    file.write(0, fmt.encode_header(header))
    at, size, low, high = fmt.HEADER_BYTES, 0, 0, 0
    if new.record is not None:
        frame = fmt.encode_item(header.first_id, new.record, now_ms, None, header.first_id - 1, marker)
        file.write(at, frame)
        at, size, low, high = at + len(frame), len(new.record), now_ms, now_ms
    if new.source is not None:
        source = folder.open(new.source.name)
        try:
            for run in new.runs:
                for offset, frame_of in iterate_frames(source, new.source.header.marker, run.offset, run.end):
                    if frame_of.first_id > run.last_id:
                        break
                    data, items = _with_marker(source.read(offset, frame_of.size), frame_of, run, marker)
                    file.write(at, data)
                    at, size = at + len(data), size + sum(map(len, items))
                    added_ms = frame_of.entries[0][1]
                    low, high = min(low or added_ms, added_ms), max(high, added_ms)
        finally:
            source.close()
    footer = fmt.SegmentFooter(header.first_id, new.last_id, new.last_id + 1 - header.first_id, size, low, high, at)
    file.write(at, fmt.encode_footer(footer, header.number, marker))


def _with_marker(data: bytes, frame: fmt.Frame, run: FrameRun, marker: int) -> tuple[bytes, Sequence[bytes]]:
    """A frame with another marker, and its items. Of a batch, the items after the end of the run are left out."""
    items = [entry[0] for entry in frame.entries]
    if frame.last_id > run.last_id:
        items = items[: run.last_id + 1 - frame.first_id]
        _, added_ms, expires_ms = frame.entries[0]
        sizes = list(map(len, items))
        return (
            fmt.encode_batch(frame.first_id, items, sizes, added_ms, expires_ms, frame.watermark, marker),
            items,
        )
    _, length, first_id, stamp, lag, _ = fmt.unpack_frame(data)
    head = fmt.pack_frame(length, first_id, stamp, lag, marker)
    body = data[fmt.FRAME_BYTES :]
    return fmt.pack_crc(crc32(body, crc32(head))) + head + body, items


def bytes_left(file: File, segment: SalvagedSegment) -> list[tuple[int, bytes]]:
    """The bytes of a segment that are in no whole frame of its runs, with their offsets: without a valid header or
    footer, and without zeros at the end of a place.
    """
    marker = segment.header.marker
    at = fmt.HEADER_BYTES if segment.has_header else 0
    end = fmt.footer_offset(segment.size) if segment.has_footer else segment.size
    left: list[tuple[int, bytes]] = []
    for run in segment.runs:
        for offset, frame in iterate_frames(file, marker, run.offset, run.end):
            if frame.last_id > run.last_id:
                break
            if offset > at:
                left.append((at, read_used(file, at, offset)))
            at = offset + frame.size
    left.append((at, read_used(file, at, end)))
    return [(offset, data) for offset, data in left if data]
