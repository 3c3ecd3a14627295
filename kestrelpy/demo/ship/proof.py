"""The proof of the demo: compares what was acknowledged, what each machine found in the store, and what was read.

Rules, for each queue:
1. Ids rise: of all puts, from machine to machine too; and of what one machine reads.
2. What is read was put into this queue, in this run, and has the id that it got.
3. What was acknowledged on a machine, and is not in the queue that the next machine restored, is lost. Ids rise, so
   that is a suffix. Of the queue that waits for the store nothing is lost. Of the other one, it is what was put in the
   last ``MOST_SECONDS``.
4. All else that was acknowledged is read, at least once.
5. If Spark has read the queues from the store: it has every line that was acknowledged and is not lost, each once, with
   its id, in the order of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kestrelpy.demo.ship.ledger import KEPT, QUEUES, line_of, noted, number_of

__all__ = ["BurnProof", "QueueFigures", "prove"]

MOST_SECONDS = 3.0
"""About two seconds is what acks="disk" may lose: an interval, a sync and an upload. This computer has other work."""
MOST_COMPLAINTS = 10


@dataclass
class QueueFigures:
    """What came of one queue. ``by_spark``: the lines that Spark has read, ``None`` if it was not asked.
    ``worst_seconds``: the most that one burn took, back from the burn.
    """

    put: int = 0
    read: int = 0
    read_again: int = 0
    lost: int = 0
    by_spark: int | None = None
    worst_seconds: float = 0.0


@dataclass
class BurnProof:
    """What the proof says. ``takeovers``: for each burn, the seconds until both queues had acknowledged again."""

    complaints: list[str] = field(default_factory=list)
    queues: dict[str, QueueFigures] = field(default_factory=dict)
    takeovers: list[float] = field(default_factory=list)


@dataclass
class _Life:
    """One machine and one queue. ``puts``: first number, last number, first id, time."""

    number: int
    restored_id: int
    puts: list[tuple[int, int, int, float]] = field(default_factory=list)


class _QueueProof:
    """The proof of one queue. ``burns``: the last moment of each machine that burnt."""

    def __init__(self, folder: Path, queue: str, seed: int, burns: dict[int, float]) -> None:
        self._queue = queue
        self._seed = seed
        self._burns = burns
        self._gots = noted(folder, f"{queue}.got")
        self._by_spark = noted(folder, f"{queue}.spark") if (folder / f"{queue}.spark.ledger").exists() else None
        self._tried = 0
        self._ids: dict[int, int] = {}
        """The id of each line that was acknowledged."""
        self._lost: set[int] = set()
        self._got: set[int] = set()
        self.lives: list[_Life] = []
        self.complaints: list[str] = []
        self.figures = QueueFigures()
        self._read_puts(noted(folder, f"{queue}.put"))

    def run(self) -> None:
        self._find_losses()
        self._check_reads()
        self._check_spark()
        missing = sorted(self._ids.keys() - self._lost - self._got)
        if missing:
            self._complain(f"{len(missing)} acknowledged lines were never read; the first one is line {missing[0]}")
        self.figures.put, self.figures.read = len(self._ids), len(self._got)
        self.figures.lost = len(self._lost)

    def _complain(self, text: str) -> None:
        self.complaints.append(f"{self._queue}: {text}")

    def _read_puts(self, notes: list[list[bytes]]) -> None:
        last_id = 0
        for words in notes:
            if words[0] == b"begin":
                self.lives.append(_Life(int(words[1]), int(words[2])))
            elif words[0] == b"try":
                self._tried = max(self._tried, int(words[2]))
            else:
                first, last, first_id = (int(word) for word in words[1:4])
                if first_id <= last_id:
                    self._complain(f"ids do not rise: line {first} has id {first_id}, after id {last_id}")
                last_id = first_id + last - first
                self._ids.update(zip(range(first, last + 1), range(first_id, last_id + 1), strict=True))
                self.lives[-1].puts.append((first, last, first_id, float(words[4])))

    def _find_losses(self) -> None:
        for life, following in zip(self.lives, self.lives[1:], strict=False):
            lost = [
                (first + at, moment)
                for first, last, first_id, moment in life.puts
                for at in range(last - first + 1)
                if first_id + at > following.restored_id
            ]
            if not lost:
                continue
            self._lost.update(number for number, _ in lost)
            seconds = self._burns[life.number] - lost[0][1]
            self.figures.worst_seconds = max(self.figures.worst_seconds, seconds)
            if self._queue == KEPT:
                self._complain(f"{len(lost)} acknowledged lines burnt with machine {life.number}; all were to be kept")
            elif seconds > MOST_SECONDS:
                self._complain(f"machine {life.number} took {seconds:.1f} s of acknowledged lines with it")

    def _check_reads(self) -> None:
        last_id = 0
        for words in self._gots:
            if words[0] == b"begin":
                last_id = 0
                continue
            item_id, line = int(words[1]), words[2]
            number = number_of(self._queue, line)
            if not 0 < number <= self._tried or line != line_of(self._seed, self._queue, number):
                self._complain(f"a foreign line was read, with id {item_id}: {line[:60]!r}")
                continue
            if self._ids.get(number, item_id) != item_id:
                self._complain(f"line {number} was put with id {self._ids[number]}, and read with id {item_id}")
            if item_id <= last_id:
                self._complain(f"id {item_id} was read after id {last_id}, by the same machine")
            last_id = item_id
            self.figures.read_again += number in self._got
            self._got.add(number)

    def _check_spark(self) -> None:
        if self._by_spark is None:
            return
        last_id, found = 0, set()
        for words in self._by_spark:
            item_id, line = int(words[1]), words[2]
            number = number_of(self._queue, line)
            if line != line_of(self._seed, self._queue, number) or self._ids.get(number, item_id) != item_id:
                self._complain(f"Spark has read a foreign line, with id {item_id}: {line[:60]!r}")
            elif item_id <= last_id:
                self._complain(f"Spark has read id {item_id} after id {last_id}")
            last_id = item_id
            found.add(number)
        missing = sorted(self._ids.keys() - self._lost - found)
        if missing:
            self._complain(f"Spark has not read {len(missing)} lines; the first one is line {missing[0]}")
        self.figures.by_spark = len(found)


def prove(folder: Path, seed: int) -> BurnProof:
    """The proof, from the ledgers in ``folder``."""
    burns = {int(words[1]): float(words[2]) for words in noted(folder, "burns")}
    proof = BurnProof()
    begun: dict[int, list[float]] = {}
    for queue in QUEUES:
        one = _QueueProof(folder, queue, seed, burns)
        one.run()
        proof.queues[queue] = one.figures
        proof.complaints += one.complaints[:MOST_COMPLAINTS]
        if len(one.complaints) > MOST_COMPLAINTS:
            proof.complaints.append(f"{queue}: and {len(one.complaints) - MOST_COMPLAINTS} more complaints")
        if [life.number for life in one.lives] != list(range(len(burns) + 1)):
            proof.complaints.append(f"{queue}: {len(burns)} machines burnt, and {len(one.lives)} had the queue")
        for life in one.lives:
            if not life.puts:
                proof.complaints.append(f"{queue}: machine {life.number} has put nothing")
            elif life.number - 1 in burns:
                begun.setdefault(life.number, []).append(life.puts[0][3] - burns[life.number - 1])
    proof.takeovers = [max(begun[number]) for number in sorted(begun)]
    return proof
