"""The objects of a queue's inbox in its store: parts, and the batches that publish them.

docs/format.md is the specification. Whoever has items for a queue creates ``in/<32 hex>.part``, and publishes parts by
``in/<13 digits>.batch``; batches are numbered from 1 without a gap. Both have the bytes that the files of an inbox on
disk have (``kestrelpy.inbox``). A key that is not exactly of these patterns is never followed.
"""

from __future__ import annotations

import re

from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.format import (
    BATCH_MAGIC,
    PLAIN_VERSION,
    PublishedBatch,
    decode_batch_file,
    encode_batch_file,
    file_version,
)
from kestrelpy.inbox.ledger import MAX_FILE_BYTES as MOST_BATCH_BYTES
from kestrelpy.inbox.publishing import MOST_PARTS
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.log import Read

MOST_PART_BYTES = 64 << 20
"""No part is larger: an owner, and a task of Spark, have one in memory."""
MOST_BATCHES = 10**13 - 1
"""The number of a batch has 13 digits: so the keys are in the order of the numbers."""
_BATCH = re.compile(r"in/([0-9]{13})\.batch")
_PART = re.compile(r"in/[0-9a-f]{32}\.part")


def part_key(part_id: bytes) -> str:
    """The key of a part, below that of the queue."""
    return f"in/{part_id.hex()}.part"


def batch_key(number: int) -> str:
    """The key of a published batch, below that of the queue."""
    return f"in/{number:013d}.batch"


def parse_batch_key(key: str) -> int:
    """The number of the batch; 0 if this is not the key of one."""
    match = _BATCH.fullmatch(key)
    return int(match[1]) if match is not None else 0


def is_part_key(key: str) -> bool:
    """Whether this is the key of a part."""
    return _PART.fullmatch(key) is not None


def read_of_batch(prefix: str, number: int) -> Read:
    """The request for a batch. One that is too large is not read to its end, and is none then."""
    return Read(prefix + batch_key(number), 0, MOST_BATCH_BYTES + 1)


def read_of_part(prefix: str, part_id: bytes) -> Read:
    """The request for a part. One that is too large is not read to its end."""
    return Read(prefix + part_key(part_id), 0, MOST_PART_BYTES + 1)


def encode_batch(batch: PublishedBatch) -> bytes:
    """The object that publishes a batch. Raises ``ValueError`` if it is larger than anybody would read."""
    data = encode_batch_file(batch)
    if len(data) > MOST_BATCH_BYTES:
        raise ValueError(f"the batch would have {len(data):,} bytes, more than {MOST_BATCH_BYTES:,}: use fewer parts")
    return data


def decode_batch(key: str, number: int, data: bytes) -> PublishedBatch:
    """Decode the object at ``key``. Raises ``StoreDamaged`` unless it is the batch of that number, and
    ``UnsupportedFormat`` if a newer library has published it.
    """
    version = file_version(data, BATCH_MAGIC)
    if version is not None and version > PLAIN_VERSION:
        raise UnsupportedFormat(key, version, PLAIN_VERSION)
    batch = decode_batch_file(data)
    if batch is None or batch.number != number or len(data) > MOST_BATCH_BYTES:
        raise StoreDamaged(key, 0, f"it is not published batch {number}", 0)
    if len(batch.parts) > MOST_PARTS or len({part.part_id for part in batch.parts}) < len(batch.parts):
        raise StoreDamaged(key, 0, "it names too many parts, or one of them twice", 0)
    return batch
