"""The demo's ledgers: the record of each process about its own work, outside the queue.

A ledger is a file of entries. One system call appends the entries of a batch, so a SIGKILL can cut off only its end:

    | id or position, 8 bytes | monotonic seconds, 8 | digest of the line, 16 |

Each start of a process writes an entry with the digest ``BEGIN``. The producer notes the last id of each batch after
the put has returned. A reader notes each item after the get and before the commit. So every committed item is noted.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

ENTRY = struct.Struct("<Qd16s")
DIGEST_BYTES = 16
BEGIN = b"a life begins   "
PUT = bytes(DIGEST_BYTES)
_BLOCK_ENTRIES = 1 << 14


def digest(line: bytes) -> bytes:
    """The digest of a line, as in ledgers and in the reference."""
    return blake2b(line, digest_size=DIGEST_BYTES).digest()


class Ledger:
    """The ledger of one process, open for appending. Entries of earlier starts stay."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as this object
        whole = self._file.tell() // ENTRY.size * ENTRY.size
        self._file.truncate(whole)  # remove the end of a write that a SIGKILL cut short: its items were not committed
        self.is_new = whole == 0

    def begin(self, place: int) -> None:
        """Note the start of a process. ``place``: the id after which it continues, as far as it knows."""
        self._write(ENTRY.pack(place, time.monotonic(), BEGIN))

    def put(self, last_id: int) -> None:
        """Note that the put of a batch returned. ``last_id``: the last id of the batch."""
        self._write(ENTRY.pack(last_id, time.monotonic(), PUT))

    def got(self, items: Sequence[tuple[int, bytes]]) -> None:
        """Note items that were read: id and digest of each."""
        now, pack = time.monotonic(), ENTRY.pack
        self._write(b"".join([pack(item_id, now, seen) for item_id, seen in items]))

    def _write(self, data: bytes) -> None:
        written = self._file.write(data)
        while written < len(data):
            written += self._file.write(data[written:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def entries(path: Path) -> Iterator[tuple[int, float, bytes]]:
    """Yield all whole entries of a ledger."""
    with open(path, "rb") as file:
        while True:  # and no condition: docs/interrupts.md, rule 3
            block = file.read(ENTRY.size * _BLOCK_ENTRIES)
            if not block:
                break
            yield from ENTRY.iter_unpack(block[: len(block) // ENTRY.size * ENTRY.size])


def last_id(path: Path) -> int:
    """The id or position in the last whole entry; 0 if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        whole = os.fstat(descriptor).st_size // ENTRY.size
        if not whole:
            return 0
        place: int = ENTRY.unpack(os.pread(descriptor, ENTRY.size, (whole - 1) * ENTRY.size))[0]
        return place
    finally:
        os.close(descriptor)
