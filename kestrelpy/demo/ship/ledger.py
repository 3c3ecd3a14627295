"""What is noted outside of the machines that burn: lines of text, appended to files that no burn takes.

    begin LIFE LAST_ID TIME       a machine has the queue: it was restored up to LAST_ID, and opened at TIME
    try FIRST LAST TIME           lines FIRST to LAST are about to be put
    put FIRST LAST FIRST_ID TIME  they are acknowledged; their ids begin at FIRST_ID
    got ID LINE                   of the consumer: written before it commits
    burn LIFE TIME                of the one who sets fire: the last moment of that machine

TIME: seconds of the clock that all processes of this computer share. The last line of one who was killed may be torn:
it does not count, and the next one cuts it off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

__all__ = ["KEPT", "LOOSE", "QUEUES", "OutsideLedger", "line_of", "noted", "number_of"]

KEPT, LOOSE = QUEUES = ("safe", "fast")
"""The queues: puts of the first one wait for the store, those of the second one for nobody."""
_FILLER = "the quick brown fox jumps over the lazy dog and the queue goes on elsewhere"


def line_of(seed: int, queue: str, number: int) -> bytes:
    """Line ``number`` that is put into ``queue``. No other run has it, and no other queue."""
    about = f"{queue} {number} {_FILLER[: number % len(_FILLER)]}"
    return f"{about} {crc32(f'{seed} {about}'.encode()):08x}".encode()


def number_of(queue: str, line: bytes) -> int:
    """The number that a line says it has; 0 if it says none, or that of another queue."""
    words = line.split(b" ", 2)
    return int(words[1]) if len(words) == 3 and words[0] == queue.encode() and words[1].isdigit() else 0


class OutsideLedger:
    """A file of notes, of one thread at a time. Each call is one write at the end of the file."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.ledger"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.truncate(self._file, path.read_bytes().rfind(b"\n") + 1)

    def note(self, word: str, *numbers: int) -> None:
        """Note this, and when."""
        text = " ".join((word, *map(str, numbers), f"{time.monotonic():.6f}"))
        os.write(self._file, f"{text}\n".encode())

    def got(self, items: Iterable[tuple[int, bytes]]) -> None:
        """Note that the consumer has these."""
        os.write(self._file, b"".join(b"got %d %b\n" % item for item in items))

    def close(self) -> None:
        os.close(self._file)


def noted(folder: Path, name: str) -> list[list[bytes]]:
    """The notes of a file, each in words; what comes after the id of a ``got`` is one word."""
    try:
        data = (folder / f"{name}.ledger").read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    return [line.split(b" ", 2 if line.startswith(b"got ") else -1) for line in whole.splitlines()]
