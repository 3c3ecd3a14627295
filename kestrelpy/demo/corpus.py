"""The demo's input: the lines of files. They are the same in the same order, however often a process starts again.

A line is the bytes between two line ends, without the line ends. Empty lines count. A line longer than
``MAX_LINE_BYTES`` is cut into pieces. A file is read up to the size that it had when the corpus was gathered, so a log
file may grow meanwhile.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files with their sizes, read one after the other, ``repeat`` times."""

    files: tuple[tuple[str, int], ...]
    repeat: int = 1

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield all lines, in lists."""
        for _ in range(self.repeat):
            for name, size in self.files:
                yield from _lines(name, size)

    def batches(self, skip: int, count: int, size: int) -> Iterator[list[bytes]]:
        """Yield the lines after the first ``skip``, in lists of at most ``count`` lines and about ``size`` bytes."""
        batch: list[bytes] = []
        total = 0
        for block in self.blocks():
            if skip >= len(block):
                skip -= len(block)
                continue
            for line in block[skip:]:
                batch.append(line)
                total += len(line)
                if len(batch) == count or total >= size:
                    yield batch
                    batch, total = [], 0
            skip = 0
        if batch:
            yield batch

    def save(self, path: Path) -> None:
        """Write the corpus to a file, for the other processes."""
        path.write_text(json.dumps({"files": self.files, "repeat": self.repeat}), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read the corpus that ``save`` wrote."""
        facts = json.loads(path.read_text(encoding="ascii"))
        return cls(tuple((name, size) for name, size in facts["files"]), facts["repeat"])


class NoLines(Exception):
    """There are no lines to put. ``str(error)`` is the message for the user."""


def gather(source: str | None) -> Corpus:
    """The files of ``source``, a file or a folder. ``None``: the sources of the Python standard library.

    Hidden files, links and unreadable files are left out. Raises ``NoLines`` if no lines remain.
    """
    if source is None:
        source = sysconfig.get_path("stdlib")
        paths = [path for path in _walk(source, ("site-packages", "dist-packages")) if path.endswith(".py")]
    elif os.path.isfile(source):
        paths = [os.path.abspath(source)]
    elif os.path.isdir(source):
        paths = list(_walk(source))
    else:
        raise NoLines(f"{source}: no such file or folder")
    files = tuple((path, os.path.getsize(path)) for path in paths if os.access(path, os.R_OK))
    if not any(size for _, size in files):
        raise NoLines(f"{source}: it has no lines that can be read")
    return Corpus(files)


def _walk(folder: str, skipped: tuple[str, ...] = ()) -> Iterator[str]:
    for parent, folders, names in os.walk(os.path.abspath(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for name in sorted(names):
            path = os.path.join(parent, name)
            if not name.startswith(".") and os.path.isfile(path) and not os.path.islink(path):
                yield path


def _lines(name: str, size: int) -> Iterator[list[bytes]]:
    pending = b""
    with open(name, "rb") as file:
        while True:  # and no condition: docs/interrupts.md, rule 3
            block = file.read(min(size, _BLOCK_BYTES))
            if not block:
                break
            size -= len(block)
            lines = (pending + block).split(b"\n")
            pending = lines.pop()
            if lines and max(map(len, lines)) > MAX_LINE_BYTES:
                lines = [piece for line in lines for piece in _cut(line)]
            if len(pending) > MAX_LINE_BYTES:
                *whole, pending = _cut(pending)
                lines += whole
            if lines:
                yield lines
    if pending:
        yield [pending]


def _cut(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)] or [line]
