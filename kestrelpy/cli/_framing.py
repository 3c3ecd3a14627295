"""Items in a byte stream: a line for each item, a NUL after each item, or a length before each. No I/O but write_out.

lines             item LF item LF ...         the last LF may be missing; an item that contains an LF becomes two items
null              item NUL item NUL ...       the same with NUL
length-prefixed   length item length item     length: 4 bytes, big-endian; an item may contain any bytes
"""

from __future__ import annotations

import argparse
import enum
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kestrelpy.cli._common import CommandError
from kestrelpy.errors import ItemTooLarge

_LENGTH = struct.Struct(">I")
MAX_LENGTH = (1 << 32) - 1


class Framing(enum.Enum):
    """How the items in a stream are separated."""

    LINES = b"\n"
    NULL = b"\0"
    LENGTH = b""


def add_framing(parser: argparse.ArgumentParser) -> None:
    """Add ``--null`` and ``--length-prefixed``. Without them, items are lines."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-0",
        "--null",
        dest="framing",
        action="store_const",
        const=Framing.NULL,
        help="a NUL ends each item, instead of a line end",
    )
    group.add_argument(
        "--length-prefixed",
        dest="framing",
        action="store_const",
        const=Framing.LENGTH,
        help="each item comes after its length (4 bytes, big-endian); for any binary data",
    )
    parser.set_defaults(framing=Framing.LINES)


def join(items: Iterable[bytes], framing: Framing) -> bytes:
    """The items as a stream."""
    if framing is not Framing.LENGTH:
        return b"".join([item + framing.value for item in items])
    return b"".join([part for item in items for part in (_LENGTH.pack(len(item)), item)])


def write_out(data: bytes) -> None:
    """Write to standard output and flush. When this returns, all data has left this process."""
    output: BinaryIO = sys.stdout.buffer
    rest = memoryview(data)
    while rest:  # with PYTHONUNBUFFERED this is the raw file, which may write only a part
        rest = rest[output.write(rest) :]
    output.flush()


def split(chunks: Iterable[bytes], framing: Framing, limit: int) -> Iterator[list[bytes]]:
    """Yield the items of a stream as soon as they are whole: one list for each chunk that completes items.

    Raises ``ItemTooLarge`` for an item above ``limit`` bytes, after all items before it were yielded, and as soon as a
    chunk shows that the item is too large. Raises ``CommandError`` if the stream ends inside a length-prefixed item.
    """
    return _split_lengths(chunks, limit) if framing is Framing.LENGTH else _split_at(chunks, framing.value, limit)


def _split_at(chunks: Iterable[bytes], mark: bytes, limit: int) -> Iterator[list[bytes]]:
    pieces: list[bytes] = []  # the pieces of the item that is not whole yet
    size = 0
    for chunk in chunks:
        items = chunk.split(mark)
        rest = items.pop()
        if items:
            pieces.append(items[0])
            items[0] = b"".join(pieces)
            pieces, size = [], 0
            yield from _up_to_limit(items, limit)
        pieces.append(rest)
        size += len(rest)
        if size > limit:
            raise ItemTooLarge(size, limit)
    if size:
        yield [b"".join(pieces)]


def _split_lengths(chunks: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        items, at, wanted = [], 0, 0
        while len(rest) - at >= _LENGTH.size:
            (wanted,) = _LENGTH.unpack_from(rest, at)
            end = at + _LENGTH.size + wanted
            if wanted > limit or end > len(rest):
                break
            items.append(bytes(memoryview(rest)[at + _LENGTH.size : end]))
            at, wanted = end, 0
        del rest[:at]
        if items:
            yield items
        if wanted > limit:
            raise ItemTooLarge(wanted, limit)
    if rest:
        raise CommandError(f"the input ends inside an item: {len(rest)} bytes are left over")


def _up_to_limit(items: list[bytes], limit: int) -> Iterator[list[bytes]]:
    if max(map(len, items)) <= limit:
        yield items
        return
    first = next(number for number, item in enumerate(items) if len(item) > limit)
    if first:
        yield items[:first]
    raise ItemTooLarge(len(items[first]), limit)


def batches(items: list[bytes], max_items: int, max_bytes: int) -> Iterator[list[bytes]]:
    """Split ``items``, in order, into lists of at most so many items and bytes. A larger item is a list alone."""
    if len(items) <= max_items and sum(map(len, items)) <= max_bytes:
        yield items
        return
    batch: list[bytes] = []
    size = 0
    for item in items:
        if batch and (len(batch) == max_items or size + len(item) > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item)
    if batch:
        yield batch
