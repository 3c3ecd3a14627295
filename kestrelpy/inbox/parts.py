"""Part files: items on their way into a queue, written by who need not have it open.

Rules:
1. A part is a segment in format version 1 with ids from 1, and a footer when it is sealed. Its number is 0, so that
   its old bytes in the room of a queue's segment are never taken for that. Until its writer tells of it, it is
   nobody's: it may be removed when it is old (``ingest``).
2. It is synced when it is sealed. Its name is on disk when the batch is published that names it.
3. Frames are as large as ``FRAME_TARGET_BYTES``, or one item: who takes them in copies whole bodies, and has one in
   memory at a time.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from kestrelpy._disk.interface import Directory, Disk, File
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import format as fmt
from kestrelpy._journal.bodies import Body, body_lengths, cut_body, pack_body
from kestrelpy._journal.file_names import INBOX, check_name, parse_inbox, part_begun_ms, part_name, refused_among
from kestrelpy._journal.item_limit import limit_of
from kestrelpy._journal.purpose import refuse_jobs_in
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.errors import CorruptJournal, ItemTooLarge
from kestrelpy.inbox.format import BatchPart, Part

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

FRAME_TARGET_BYTES = 1 << 20
MOST_IN_FRAME = 1 << 16
"""Items are gathered up to so many bytes, or so many items, and are one frame then."""
MAX_ITEM_BYTES = (1 << 31) - fmt.SEGMENT_OVERHEAD


def refused_batches(directory: str, queue: str, disk: Disk) -> int:
    """How many published batches of a queue are kept aside in its inbox. Raises ``OSError``."""
    try:
        folder = open_inbox(directory, disk, create=False)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    try:
        return len(refused_among(folder.names(), queue))
    finally:
        folder.close()


def open_inbox(directory: str, disk: Disk | None, *, create: bool) -> Directory:
    """The inbox of a folder of queues. Raises ``OSError``, ``FileNotFoundError`` if there is none."""
    return (disk or RealDisk()).directory(f"{directory}/{INBOX}", create=create)


class PartWriter:
    """Writes one part: items for ``queue`` of ``directory``, which no one sees until the part is published.

    The inbox folder is made if it is missing (0700); the queue need not exist, and may be open anywhere. ``with``
    discards what was not sealed. For one thread. Items are written a megabyte at a time, and are on disk once ``seal``
    has returned. Any number of parts may be written at once, by any number of processes, and over a network file
    system, too; publishing is for a machine that has the disk.

    Raises ``InvalidName``, ``WrongKind`` for a work queue, ``OSError``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        queue: str,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_name(queue)
        self._clock: Clock = clock if clock is not None else SystemClock()
        now_ms = self._clock.time_ns() // 1_000_000
        refuse_jobs_in(directory, queue, disk)
        self._limit = min(limit_of(directory, queue, disk) or MAX_ITEM_BYTES, MAX_ITEM_BYTES)
        part_id = now_ms.to_bytes(6, "big") + os.urandom(10)
        self.name = part_name(queue, part_id)
        disk = disk or RealDisk(allow_network=True)  # no lock is needed here, and the name is synced by who publishes
        self._folder = open_inbox(os.fspath(directory), disk, create=True)
        self._marker = int.from_bytes(os.urandom(4), "little") | 1 << 31
        self._now_ms = now_ms
        self._file: File | None = None
        self._is_done = False
        self._end = fmt.HEADER_BYTES
        self._items = self._data_bytes = self._digest = self._largest = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._expires_ms: int | None = None

    def add(self, items: Sequence[bytes], *, expires_ms: int | None = None) -> None:
        """Add items, which expire at ``expires_ms`` (Unix milliseconds) if given.

        Raises ``ItemTooLarge``, ``TypeError``, ``ValueError``, with nothing added; ``OSError``, after which the part is
        to be discarded. Too large is what the queue's last owner did not take (``max_item_bytes``); of a queue that
        nobody has opened yet, what has 2 GiB or more.
        """
        self._check_open()
        _check_expiry(expires_ms)
        items = [each if type(each) is bytes else _as_bytes(each) for each in items]
        largest = max(map(len, items), default=0)
        if largest > self._limit:
            raise ItemTooLarge(largest, self._limit)
        self._largest = max(self._largest, largest)
        if expires_ms != self._expires_ms:
            self._flush()
            self._expires_ms = expires_ms
        for data in items:
            if self._waiting and (
                self._waiting_bytes + len(data) > FRAME_TARGET_BYTES or len(self._waiting) >= MOST_IN_FRAME
            ):
                self._flush()
            self._waiting.append(data)
            self._waiting_bytes += len(data)

    def add_packed(
        self, lengths: bytes, data: bytes | memoryview, count: int, *, expires_ms: int | None = None
    ) -> None:
        """``add`` for ``count`` items that stand one behind the other in ``data``; ``lengths`` has 4 bytes for each, an
        unsigned little-endian number. Costs no object per item.

        Raises ``ValueError`` if lengths, count and data do not agree, otherwise as ``add``.
        """
        self._check_open()
        _check_expiry(expires_ms)
        if len(lengths) != 4 * count:
            raise ValueError(f"{count} items have {4 * count} bytes of lengths, not {len(lengths)}")
        sizes = struct.unpack(f"<{count}I", lengths)
        if sum(sizes) != len(data):
            raise ValueError(f"the lengths make {sum(sizes)} bytes, and the data has {len(data)}")
        largest = max(sizes, default=0)
        if largest > self._limit:
            raise ItemTooLarge(largest, self._limit)
        self._largest = max(self._largest, largest)
        self._flush()
        self._expires_ms = expires_ms
        first = at = 0
        while first < count:
            last = min(first + MOST_IN_FRAME, count)
            size = sum(sizes[first:last])
            while size > FRAME_TARGET_BYTES and last - first > 1:
                middle = (first + last + 1) // 2
                size -= sum(sizes[middle:last])
                last = middle
            self._write(_packed_body(lengths[4 * first : 4 * last], data[at : at + size], last - first, expires_ms))
            first, at = last, at + size

    def seal(self) -> Part:
        """Close the part: it is whole, and on disk, when this returns; its name is when it is published.

        Raises ``OSError``; then it is to be discarded. A part without items has no file.
        """
        self._check_open()
        self._flush()
        if self._file is not None:
            footer = fmt.SegmentFooter(
                1, self._items, self._items, self._data_bytes, self._now_ms, self._last_ms(), self._end
            )
            self._file.write(self._end, fmt.encode_footer(footer, 0, self._marker))
            self._file.sync()
        self._release_all()
        return Part(self.name, self._items, self._data_bytes, self._digest, self._largest)

    def discard(self) -> None:
        """Remove what was written. Nothing if it was sealed. Idempotent; raises ``OSError``."""
        if self._is_done:
            return
        made = self._file is not None
        try:
            if made:
                with contextlib.suppress(FileNotFoundError):
                    self._folder.unlink(self.name)
        finally:
            self._release_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _check_open(self) -> None:
        if self._is_done:
            raise ValueError(f"part {self.name} is sealed, or was discarded")

    def _last_ms(self) -> int:
        return max(self._now_ms, self._clock.time_ns() // 1_000_000)

    def _release_all(self) -> None:
        self._is_done = True
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        finally:
            self._folder.close()

    def _flush(self) -> None:
        if self._waiting:
            items, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._write(pack_body(items, self._expires_ms))

    def _write(self, body: Body) -> None:
        header = b""
        if self._file is None:
            header = fmt.encode_header(fmt.SegmentHeader(self._marker, bytes(16), 0, 1, 0, 0, 0, 0, 0))
            self._file = self._folder.create(self.name)
            self._file.write(0, header)
        stamp = self._last_ms() | body.kind << fmt.KIND_SHIFT
        head = fmt.pack_frame(len(body.data), self._items + 1, stamp, self._items + 1, self._marker)
        crc = fmt.pack_crc(crc32(body.data, crc32(head)))
        self._file.write(self._end, crc + head, body.data)
        self._digest = crc32(crc, self._digest)
        self._end += fmt.FRAME_BYTES + len(body.data)
        self._items += body.items
        self._data_bytes += body.size


def _as_bytes(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"an item must be bytes, bytearray or memoryview, not {type(data).__name__}")
    return bytes(data)


def _check_expiry(expires_ms: int | None) -> None:
    if expires_ms is not None and not 0 <= expires_ms < 1 << 63:
        raise ValueError(f"expires_ms must be milliseconds since 1970, not {expires_ms!r}")


def _packed_body(lengths: bytes, data: bytes | memoryview, count: int, expires_ms: int | None) -> Body:
    if count == 1:
        return pack_body([bytes(data)], expires_ms)
    kind, head = fmt.KIND_BATCH, fmt.pack_crc(count)
    if expires_ms is not None:
        kind, head = kind | fmt.KIND_EXPIRES, expires_ms.to_bytes(8, "little") + head
    return Body(kind, count, len(data), b"".join((head, lengths, data)))


# -- reading ---------------------------------------------------------------------------------------------------------


def as_batch_part(part: Part, queue: str) -> BatchPart:
    """A part as a batch names it. Raises ``ValueError`` if it is not one of ``queue``."""
    about = parse_inbox(part.name)
    if about is None or about.queue != queue or about.part_id is None or about.is_temporary:
        raise ValueError(f"{part.name!r} is no part of queue {queue!r}")
    return BatchPart(about.part_id, part.items, part.data_bytes, part.digest)


def is_old(part_id: bytes, now_ms: int, seconds: float) -> bool:
    """Whether a part was begun so long ago, by its name."""
    return part_begun_ms(part_id) + seconds * 1000 < now_ms


class PartFile:
    """A part for reading. ``CorruptJournal`` says what is not as ``part`` has it; ``OSError`` that it is not known."""

    def __init__(self, folder: Directory, queue: str, part: BatchPart) -> None:
        self.part = part
        name = part_name(queue, part.part_id)
        self._path = f"{folder.path}/{name}"
        self._file = folder.open(name)

    def close(self) -> None:
        self._file.close()

    def check_sealed(self) -> tuple[fmt.SegmentHeader, int]:
        """By header and footer; returns the header and where the frames end."""
        header = fmt.decode_header(self._file.read(0, fmt.HEADER_BYTES))
        if header is None:
            raise CorruptJournal(self._path, 0, "this part has no valid header")
        at = self._file.size() - fmt.FOOTER_BYTES
        footer = fmt.decode_footer(self._file.read(at, fmt.FOOTER_BYTES), header) if at >= fmt.HEADER_BYTES else None
        if footer is None or footer.records_end != at:
            raise CorruptJournal(self._path, max(at, 0), "this part is not sealed")
        if (footer.items, footer.data_bytes) != (self.part.items, self.part.data_bytes):
            raise CorruptJournal(self._path, at, f"this part has {footer.items} items, and not {self.part.items}")
        return header, at

    def bodies(self, skip: int = 0, most: int = fmt.MAX_BODY_BYTES) -> Iterator[Body]:
        """The bodies of its frames, from item ``skip`` on, cut to at most ``most`` bytes where they have several
        items. Each is checked before it comes, all that can be said of them together after the last.
        """
        header, end = self.check_sealed()
        at, items, size, digest = fmt.HEADER_BYTES, 0, 0, 0
        while at + fmt.FRAME_BYTES <= end:
            head = self._file.read(at, fmt.FRAME_BYTES)
            crc, length, first_id, stamp, _, marker = fmt.unpack_frame(head)
            is_ours = marker == header.marker and length <= end - at - fmt.FRAME_BYTES
            data = self._file.read(at + fmt.FRAME_BYTES, length) if is_ours else b""
            if not is_ours or len(data) < length or first_id != items + 1 or crc32(data, crc32(head[4:])) != crc:
                break
            kind = stamp >> fmt.KIND_SHIFT
            lengths = body_lengths(kind, data)
            if lengths is None:
                break
            if items + len(lengths) > skip:
                yield from cut_body(kind, data, lengths, max(skip - items, 0), most)
            at += fmt.FRAME_BYTES + length
            items, size, digest = items + len(lengths), size + sum(lengths), crc32(head[:4], digest)
        if at != end:
            raise CorruptJournal(self._path, at, f"item {items + 1} of this part is not intact", item_id=items + 1)
        if (items, size, digest) != self.part[1:]:
            raise CorruptJournal(self._path, at, "this part is not the one that was published")

    def largest(self) -> int:
        """The largest item, after all of it was checked."""
        most = 0
        for body in self.bodies():
            most = max(most, max(body_lengths(body.kind, body.data) or ()))
        return most
