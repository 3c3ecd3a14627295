"""The demo's proof: compares the ledgers with the input, afterwards and without the queue.

For the producer: no acknowledged line was missing after a restart, and every line was put. For a reader: without
repetitions, it saw exactly the lines of the input, all of them, in order. A line came again only after a kill, and it
was the same line. The reference is a file with the digests of the input's lines. A process without a queue writes it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kestrelpy.demo.corpus import Corpus
from kestrelpy.demo.queue.ledger import BEGIN, DIGEST_BYTES, digest, entries

MAX_PROBLEMS = 5
Entries = Iterable[tuple[int, float, bytes]]


class Reference:
    """The digests of the input's lines, by line number from 1."""

    def __init__(self, digests: bytes | mmap.mmap, repeat: int, data_bytes: int) -> None:
        self._digests = digests
        self._once = len(digests) // DIGEST_BYTES
        self.lines = self._once * repeat
        self.data_bytes = data_bytes * repeat

    def __getitem__(self, line: int) -> bytes:
        at = (line - 1) % self._once * DIGEST_BYTES
        return self._digests[at : at + DIGEST_BYTES]

    def digest(self) -> str:
        """One digest over all lines, in order."""
        return total_digest(self[line] for line in range(1, self.lines + 1))


def total_digest(digests: Iterable[bytes]) -> str:
    """One digest over digests of lines, in order."""
    total = blake2b(digest_size=DIGEST_BYTES)
    for one in digests:
        total.update(one)
    return total.hexdigest()


def write_reference(corpus: Corpus, path: Path) -> tuple[int, int]:
    """Write the digests of a corpus, without repetition. Returns its number of lines and bytes."""
    lines = size = 0
    with open(path, "wb") as file:
        for block in Corpus(corpus.files).blocks():
            file.write(b"".join([digest(line) for line in block]))
            lines += len(block)
            size += sum(map(len, block))
    return lines, size


def open_reference(path: Path, repeat: int, data_bytes: int) -> Reference:
    """Open the reference that ``write_reference`` wrote. It is mapped, because it may be larger than memory."""
    with open(path, "rb") as file:
        return Reference(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), repeat, data_bytes)


@dataclass
class Finding:
    """The result of checking one ledger. The proof holds if ``problems`` is empty."""

    role: str
    lines: int = 0
    again: int = 0
    lives: int = 0
    seconds: float = 0.0
    digest: str = ""
    problems: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """Note a problem. Only the first few are described."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{self.role}: {text}")
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append(f"{self.role}: and more")

    @property
    def per_second(self) -> float:
        """Lines per second of running time, with lines that came again."""
        return (self.lines + self.again) / self.seconds if self.seconds else 0.0


def check_puts(ledger: Entries, wanted: int, role: str = "put") -> Finding:
    """Check the producer's ledger: no acknowledged line was missing after a kill, and all ``wanted`` lines were put."""
    found = Finding(role)
    began = 0.0
    place = acknowledged = 0
    for number, moment, kind in ledger:
        if kind == BEGIN:
            found.lives += 1
            if number < acknowledged:
                found.complain(f"{acknowledged - number:,} acknowledged lines were missing after a restart")
            place, began = number, moment
            continue
        if number <= place:
            found.complain(f"line {number:,} was put after line {place:,}")
        place = acknowledged = max(number, acknowledged)
        found.seconds += moment - began
        began = moment
    found.lines = max(acknowledged, place)
    if found.lines != wanted:
        found.complain(f"{found.lines:,} lines are in the queue, {wanted:,} are in the input")
    return found


def check_reader(ledger: Entries, reference: Reference, role: str) -> Finding:
    """Check a reader's ledger against the input."""
    found = Finding(role)
    total = blake2b(digest_size=DIGEST_BYTES)
    began = 0.0
    last = floor = 0  # the highest line seen ever, and since the last start
    for number, moment, seen in ledger:
        if seen == BEGIN:
            found.lives += 1
            floor, began = 0, moment
            continue
        if number <= floor:
            found.complain(f"line {number:,} came again or out of order, although nothing was killed in between")
        floor = number
        if moment != began:
            found.seconds += moment - began
            began = moment
        if number <= last:
            found.again += 1
        else:
            if number != last + 1:
                found.complain(f"lines {last + 1:,} to {number - 1:,} never came")
            last = number
            found.lines += 1
            total.update(seen)
        if number > reference.lines or seen != reference[number]:
            found.complain(f"line {number:,} differs from the input")
    if last < reference.lines:
        found.complain(f"lines {last + 1:,} to {reference.lines:,} never came")
    found.digest = total.hexdigest()
    return found


def check_files(folder: Path, reference: Reference) -> tuple[Finding, Finding, Finding]:
    """Check the ledgers in the demo's folder: the producer's, the near reader's, the far reader's."""
    return (
        check_puts(entries(folder / "put.ledger"), reference.lines),
        check_reader(entries(folder / "near.ledger"), reference, "near"),
        check_reader(entries(folder / "far.ledger"), reference, "far"),
    )
