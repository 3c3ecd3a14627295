"""Part files: items on their way into a queue. The writer of a part need not have the queue open.

Rules:
1. A part is a segment in format version 1, with ids from 1, and with a footer once it is sealed. Its number is 0, so
   that its old bytes in the blocks of a queue's segment are never taken for that segment. A part that no batch names
   may be removed when it is old (``ingest``).
2. A part is synced when it is sealed. Its name is on disk when the batch that names it is published.
3. A frame has up to ``FRAME_TARGET_BYTES``, or one item. The ingest copies whole bodies, and has one body in memory at
   a time.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from kestrelpy._checks import check_whole
from kestrelpy._disk.interface import Directory, Disk, File, text_of
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import format as fmt
from kestrelpy._journal.bodies import Body, body_lengths, cut_body, pack_body
from kestrelpy._journal.file_names import (
    INBOX,
    batches_among,
    check_name,
    parse_inbox,
    part_begun_ms,
    part_name,
    refused_among,
)
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
"""Items collect up to this many bytes, or this many items, and then become one frame."""
MAX_ITEM_BYTES = (1 << 31) - fmt.SEGMENT_OVERHEAD


def refused_batches(directory: str, queue: str, disk: Disk) -> int:
    """The number of published batches of a queue that are kept aside in its inbox. Raises ``OSError``."""
    return inbox_counts(directory, queue, disk)[1]


def inbox_counts(directory: str, queue: str, disk: Disk) -> tuple[int, int]:
    """How many published batches of a queue wait in its inbox, and how many it keeps aside. Raises ``OSError``."""
    try:
        folder = open_inbox(directory, disk, create=False)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    try:
        names = folder.names()
        return len(batches_among(names, queue)), len(refused_among(names, queue))
    finally:
        folder.close()


def open_inbox(directory: str, disk: Disk | None, *, create: bool) -> Directory:
    """Open the inbox of a folder of queues. Raises ``OSError``, ``FileNotFoundError`` if there is no inbox."""
    return (disk or RealDisk()).directory(f"{text_of(directory)}/{INBOX}", create=create)


class PartEncoder:
    """Makes the bytes of one part, from its first to its last. ``write(offset, *pieces)`` gets them in their order.

    ``limit``: of an item's bytes. ``size``: of what was written. ``items``, ``data_bytes``, ``digest``, ``largest``: as
    ``Part`` has them, of what was added and written; ``flush`` writes the rest.
    """

    def __init__(self, limit: int, clock: Clock, write: Callable[..., object]) -> None:
        self._limit = limit
        self._clock = clock
        self._out = write
        self._begun_ms = clock.time_ns() // 1_000_000
        self._marker = int.from_bytes(os.urandom(4), "little") | 1 << 31
        self.size = fmt.HEADER_BYTES
        self.items = self.data_bytes = self.digest = self.largest = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._expires_ms: int | None = None

    def add(self, items: Sequence[bytes], *, expires_ms: int | None = None) -> None:
        """``PartWriter.add``."""
        expires_ms = _check_expiry(expires_ms)
        items = [each if type(each) is bytes else _as_bytes(each) for each in items]
        largest = max(map(len, items), default=0)
        if largest > self._limit:
            raise ItemTooLarge(largest, self._limit)
        self.largest = max(self.largest, largest)
        if expires_ms != self._expires_ms:
            self.flush()
            self._expires_ms = expires_ms
        for data in items:
            if self._waiting and (
                self._waiting_bytes + len(data) > FRAME_TARGET_BYTES or len(self._waiting) >= MOST_IN_FRAME
            ):
                self.flush()
            self._waiting.append(data)
            self._waiting_bytes += len(data)

    def add_packed(
        self, lengths: bytes, data: bytes | memoryview, count: int, *, expires_ms: int | None = None
    ) -> None:
        """``PartWriter.add_packed``."""
        expires_ms = _check_expiry(expires_ms)
        if len(lengths) != 4 * count:
            raise ValueError(f"{count} items need {4 * count} bytes of lengths, not {len(lengths)}")
        sizes = struct.unpack(f"<{count}I", lengths)
        if sum(sizes) != len(data):
            raise ValueError(f"the lengths make {sum(sizes)} bytes, and the data has {len(data)}")
        largest = max(sizes, default=0)
        if largest > self._limit:
            raise ItemTooLarge(largest, self._limit)
        self.largest = max(self.largest, largest)
        self.flush()
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

    def flush(self) -> None:
        """Write what was added."""
        if self._waiting:
            items, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._write(pack_body(items, self._expires_ms))

    def finish(self) -> None:
        """Write the footer, after ``flush``. The part has at least one item."""
        footer = fmt.SegmentFooter(
            1, self.items, self.items, self.data_bytes, self._begun_ms, self._last_ms(), self.size
        )
        self._out(self.size, fmt.encode_footer(footer, 0, self._marker))

    def _last_ms(self) -> int:
        return max(self._begun_ms, self._clock.time_ns() // 1_000_000)

    def _write(self, body: Body) -> None:
        if not self.items:
            header = fmt.SegmentHeader(self._marker, bytes(16), 0, 1, 0, 0, 0, 0, 0)
            self._out(0, fmt.encode_header(header))
        stamp = self._last_ms() | body.kind << fmt.KIND_SHIFT
        head = fmt.pack_frame(len(body.data), self.items + 1, stamp, self.items + 1, self._marker)
        crc = fmt.pack_crc(crc32(body.data, crc32(head)))
        self._out(self.size, crc + head, body.data)
        self.digest = crc32(crc, self.digest)
        self.size += fmt.FRAME_BYTES + len(body.data)
        self.items += body.items
        self.data_bytes += body.size


class PartWriter:
    """Writes one part: items for ``queue`` in ``directory``, which nobody sees until the part is published.

    The inbox folder is made if it is missing (mode 0700). The queue need not exist, and may be open in any process.
    Used as a context manager, a writer discards its part if that was not sealed. A writer is for one thread. Items are
    written a megabyte at a time, and are on disk when ``seal`` returns. Any number of processes may write any number of
    parts at once, over a network file system, too. Only a machine that has the disk can publish.

    Raises ``InvalidName``, ``WrongKind`` for a work queue, ``OSError``.
    """

    _is_limited = True  # to ``max_item_bytes`` of the queue

    def __init__(
        self,
        directory: str | os.PathLike[str],
        queue: str,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_name(queue)
        clock = clock if clock is not None else SystemClock()
        now_ms = clock.time_ns() // 1_000_000
        refuse_jobs_in(directory, queue, disk)
        limit = limit_of(directory, queue, disk) if self._is_limited else None
        limit = min(limit or MAX_ITEM_BYTES, MAX_ITEM_BYTES)
        part_id = new_part_id(now_ms)
        self.name = part_name(queue, part_id)
        disk = disk or RealDisk(allow_network=True)  # a part needs no lock, and the publisher syncs its name
        self._folder = open_inbox(os.fspath(directory), disk, create=True)
        self._encoder = PartEncoder(limit, clock, self._write)
        self._file: File | None = None
        self._is_done = False

    def add(self, items: Sequence[bytes], *, expires_ms: int | None = None) -> None:
        """Add items, which expire at ``expires_ms`` (milliseconds since 1970) if that is given.

        Raises ``ItemTooLarge``, ``TypeError`` or ``ValueError``; then nothing was added. Raises ``OSError``; then
        discard the part. The largest item is ``max_item_bytes`` of the queue's last owner; if nobody has opened the
        queue yet, an item must be smaller than 2 GiB.
        """
        self._check_open()
        self._encoder.add(items, expires_ms=expires_ms)

    def add_packed(
        self, lengths: bytes, data: bytes | memoryview, count: int, *, expires_ms: int | None = None
    ) -> None:
        """Add ``count`` items that stand one after the other in ``data``, without an object for each item.

        ``lengths`` has the length of each item, as a little-endian unsigned number of 4 bytes. ``expires_ms``: when all
        of them expire, in milliseconds since 1970. Raises ``ValueError`` if ``lengths``, ``count`` and ``data`` do not
        agree, and otherwise as ``add``.
        """
        self._check_open()
        self._encoder.add_packed(lengths, data, count, expires_ms=expires_ms)

    def seal(self) -> Part:
        """Close the part. When this returns, the part is whole and on disk; its name is on disk once it is published.

        A part without items has no file. Raises ``OSError``; then discard the part. Raises ``ValueError`` if the part
        is sealed or discarded already.
        """
        self._check_open()
        made = self._encoder
        made.flush()
        if self._file is not None:
            made.finish()
            self._file.sync()
        self._release_all()
        return Part(self.name, made.items, made.data_bytes, made.digest, made.largest)

    def discard(self) -> None:
        """Remove the file of a part that is not sealed. Does nothing after ``seal``. Idempotent. Raises ``OSError``."""
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

    def _release_all(self) -> None:
        self._is_done = True
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        finally:
            self._folder.close()

    def _write(self, offset: int, *pieces: bytes) -> None:
        if self._file is None:
            self._file = self._folder.create(self.name)
        self._file.write(offset, *pieces)


class MovePartWriter(PartWriter):
    """Writes the part of a move. Who makes the move has checked the sizes of its items, without their first lines."""

    _is_limited = False


def new_part_id(now_ms: int) -> bytes:
    """The id of a new part in a folder: when it was begun, and something random."""
    return now_ms.to_bytes(6, "big") + os.urandom(10)


def _as_bytes(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"an item must be bytes, bytearray or memoryview, not {type(data).__name__}")
    return bytes(data)


def _check_expiry(expires_ms: int | None) -> int | None:
    """``expires_ms`` as an ``int``. Raises ``TypeError``, ``ValueError``."""
    if expires_ms is None:
        return None
    instant = check_whole("expires_ms", expires_ms)
    if instant >= 1 << 63:
        raise ValueError(f"expires_ms must be milliseconds since 1970, not {expires_ms!r}")
    return instant


def _packed_body(lengths: bytes, data: bytes | memoryview, count: int, expires_ms: int | None) -> Body:
    if count == 1:
        return pack_body([bytes(data)], expires_ms)
    kind, head = fmt.KIND_BATCH, fmt.pack_crc(count)
    if expires_ms is not None:
        kind, head = kind | fmt.KIND_EXPIRES, expires_ms.to_bytes(8, "little") + head
    return Body(kind, count, len(data), b"".join((head, lengths, data)))


# -- reading ---------------------------------------------------------------------------------------------------------


def as_batch_part(part: Part, queue: str) -> BatchPart:
    """The part as a published batch names it. Raises ``ValueError`` if it is not a part of ``queue``."""
    about = parse_inbox(part.name)
    if about is None or about.queue != queue or about.part_id is None or about.is_temporary:
        raise ValueError(f"{part.name!r} is not a part of queue {queue!r}")
    return BatchPart(about.part_id, part.items, part.data_bytes, part.digest)


def is_old(part_id: bytes, now_ms: int, seconds: float) -> bool:
    """True if, by its name, the part was begun more than ``seconds`` ago."""
    return part_begun_ms(part_id) + seconds * 1000 < now_ms


class PartFile:
    """A part file, open for reading.

    ``CorruptJournal`` means that the file is not as ``part`` says; any other ``OSError`` that this is not known.
    """

    def __init__(self, folder: Directory, queue: str, part: BatchPart) -> None:
        self.part = part
        name = part_name(queue, part.part_id)
        self._path = f"{folder.path}/{name}"
        self._file = folder.open(name)

    def close(self) -> None:
        self._file.close()

    def check_sealed(self) -> tuple[fmt.SegmentHeader, int]:
        """Check header and footer; returns the header and the offset at which the frames end."""
        header = fmt.decode_header(self._file.read(0, fmt.HEADER_BYTES))
        if header is None:
            raise CorruptJournal(self._path, 0, "this part has no valid header")
        at = self._file.size() - fmt.FOOTER_BYTES
        footer = fmt.decode_footer(self._file.read(at, fmt.FOOTER_BYTES), header) if at >= fmt.HEADER_BYTES else None
        if footer is None or footer.records_end != at:
            raise CorruptJournal(self._path, max(at, 0), "this part is not sealed")
        if (footer.items, footer.data_bytes) != (self.part.items, self.part.data_bytes):
            raise CorruptJournal(self._path, at, f"this part has {footer.items} items, not {self.part.items}")
        return header, at

    def bodies(self, skip: int = 0, most: int = fmt.MAX_BODY_BYTES) -> Iterator[Body]:
        """Yield the bodies of the frames, without the first ``skip`` items.

        A body of several items is cut into bodies of at most ``most`` bytes. Each body is checked before it is yielded.
        The totals and the digest are checked after the last body.
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
        """The size of the largest item. Checks the whole part."""
        most = 0
        for body in self.bodies():
            most = max(most, max(body_lengths(body.kind, body.data) or ()))
        return most
