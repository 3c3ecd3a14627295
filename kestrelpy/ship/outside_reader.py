"""How far a reader outside has come: one that reads a queue from its store, without its owner, as a Spark query does.

docs/format.md is the specification. Such a reader creates ``reader/<name>/<13 digits>``, numbered from 1; the one with
the highest number counts. The rules are those of ``kestrelpy.ship.slots``.

    | KSTRLOUT | 1 2 | 0 6 | queue_id 16 | nonce 16 | id 8 | crc 4 |
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple
from zlib import crc32

from kestrelpy._journal.format import LARGEST

OUTSIDE_MAGIC = b"KSTRLOUT"
OUTSIDE_VERSION = 1
MOST_COMMITS = 10**13 - 1
"""The number of an object has 13 digits: so the keys are in the order of the numbers."""
_BODY = struct.Struct("<8sH6s16s16sQ")
_CRC = struct.Struct("<I")
_UNUSED = bytes(6)
_KEY = re.compile(r"reader/([A-Za-z0-9_][A-Za-z0-9_-]{0,99})/([0-9]{13})")


class OutsideReader(NamedTuple):
    """A reader outside needs no item up to ``id``. ``nonce``: random, of the query; it tells two of one name apart."""

    queue_id: bytes
    nonce: bytes
    id: int


def outside_key(name: str, number: int) -> str:
    """The key of the reader's commit of that number, below that of the queue."""
    return f"reader/{name}/{number:013d}"


def parse_outside_key(key: str) -> tuple[str, int] | None:
    """The reader's name and the number; ``None`` if this is not the key of a commit."""
    match = _KEY.fullmatch(key)
    return (match[1], int(match[2])) if match is not None and int(match[2]) else None


def encode_outside(reader: OutsideReader) -> bytes:
    """The object."""
    body = _BODY.pack(OUTSIDE_MAGIC, OUTSIDE_VERSION, _UNUSED, reader.queue_id, reader.nonce, reader.id)
    return body + _CRC.pack(crc32(body))


def outside_version(data: bytes) -> int | None:
    """The format version of a commit of any version; ``None`` unless ``data`` is a whole one, by its magic and crc."""
    if len(data) < _BODY.size + _CRC.size or data[:8] != OUTSIDE_MAGIC:
        return None
    body, (crc,) = data[: -_CRC.size], _CRC.unpack(data[-_CRC.size :])
    return int.from_bytes(data[8:10], "little") if crc32(body) == crc else None


def decode_outside(data: bytes) -> OutsideReader | None:
    """The commit, if ``data`` is exactly one of this version."""
    if len(data) != _BODY.size + _CRC.size or outside_version(data) != OUTSIDE_VERSION:
        return None
    _, _, unused, queue_id, nonce, last_id = _BODY.unpack_from(data)
    return OutsideReader(queue_id, nonce, last_id) if unused == _UNUSED and last_id <= LARGEST else None
