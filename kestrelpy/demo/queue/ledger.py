"""The demo's ledgers: what each process says it has done, kept outside of the queue.

A ledger is a file of entries, appended to with one system call for each batch; a SIGKILL takes at most the end of one:

    | id or place, 8 bytes | monotonic seconds, 8 | digest of the line, 16 |

Every life of a process begins with an entry whose digest is ``BEGIN``. The producer notes the last id of each batch
after its put returned; a reader notes every item after it got it and before it commits it. What is committed is noted.
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
    """What stands for a line in ledgers and in the reference."""
    return blake2b(line, digest_size=DIGEST_BYTES).digest()


class Ledger:
    """One process's ledger, open for appending. Entries of an earlier life stay."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - it is open as long as this object
        whole = self._file.tell() // ENTRY.size * ENTRY.size
        self._file.truncate(whole)  # a write that a SIGKILL cut short: its items were not committed
        self.is_new = whole == 0

    def begin(self, place: int) -> None:
        """A life begins; ``place``: where it goes on, as far as it knows."""
        self._write(ENTRY.pack(place, time.monotonic(), BEGIN))

    def put(self, last_id: int) -> None:
        """The put of a batch that ends in this id has returned."""
        self._write(ENTRY.pack(last_id, time.monotonic(), PUT))

    def got(self, items: Sequence[tuple[int, bytes]]) -> None:
        """These items, id and digest, were got."""
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
    """All whole entries of a ledger."""
    with open(path, "rb") as file:
        while block := file.read(ENTRY.size * _BLOCK_ENTRIES):
            yield from ENTRY.iter_unpack(block[: len(block) // ENTRY.size * ENTRY.size])


def last_id(path: Path) -> int:
    """The id or place in the last whole entry; 0 if there is none."""
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
