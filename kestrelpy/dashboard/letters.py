"""The dead letters of a folder: which queues hold some, where they come from, and the newest of them. Read-only.

Which reader has which dead-letter queue is in the memory of its process, and in no file. So the letters themselves are
asked: a queue is taken for a dead-letter queue if its first or its last unread item is a dead letter.

Rules:
1. A letter is read once to be counted, and again if it is among the newest that are shown.
2. One request looks at so many queues, and reads so many items, and no more. What is left is for the next request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from kestrelpy import DeadLetter, QueueInspection, inspect, scan
from kestrelpy.inspection import WatchedQueue

PROBED_AT_ONCE = 50
"""So many queues are asked at one request whether they hold letters: some 50 ms."""
READ_AT_ONCE = 20_000
"""So many items of one queue are read at one request."""
MOST_LETTERS = 200_000
"""So many letters of a queue are counted: 20 MB at most. A queue with more says so."""
MOST_BOXES = 20
MOST_NAME = 200
"""Characters of a name that are kept. No queue and no reader has a longer one, but a forged letter may say so."""


class LetterOrigin(NamedTuple):
    """The queue and the reader that gave a letter up, as the letter says. What is not printable is escaped."""

    queue: str
    reader: str


class LetterBox:
    """A queue that holds dead letters. ``reader``: the one that has not done them. ``others``: unread items that are no
    letters. ``is_whole``: whether all were counted.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.name = name
        self.reader = ""
        self.others = 0
        self.is_whole = False
        self._directory = directory
        self._letters: dict[int, LetterOrigin | None] = {}  # by id, rising; ``None`` for no letter
        self._names: dict[LetterOrigin, LetterOrigin] = {}  # each once: letters share them
        self._seen = 0  # all ids up to it were read
        self._seen_of: tuple[int, list[tuple[str, int, int]]] | None = None

    def look(self, one: WatchedQueue) -> None:
        """Read what has come, and forget what was done. Raises as ``scan`` and ``inspect``."""
        now = one.tail_id, [(reader.name, reader.head, reader.items) for reader in one.readers]
        if self.is_whole and self._seen_of == now:
            return
        saved = inspect(self._directory, self.name)
        if saved.tail_id < self._seen:  # another queue of that name
            self._letters, self._seen = {}, 0
        head = self._forget_done(saved)
        room = min(READ_AT_ONCE, MOST_LETTERS - len(self._letters))
        for record in islice(scan(self._directory, self.name, start_id=max(self._seen, head) + 1), max(0, room)):
            letter = record.dead_letter
            self._letters[record.id] = None if letter is None else self._origin(letter)
            self._seen = record.id
        self._forget_done(saved)
        self.others = sum(origin is None for origin in self._letters.values())
        self.is_whole = self._seen >= saved.tail_id
        self._seen_of = now

    def _forget_done(self, saved: QueueInspection) -> int:
        """Forget the letters that the reader has done. Returns its head."""
        readers = {reader.name: reader for reader in saved.readers}
        reader = readers.get("") or next(iter(readers.values()), None)
        if reader is None:
            return 0
        self.reader = reader.name
        spans = iter(reader.done)
        first, last = next(spans, (0, 0))
        left: dict[int, LetterOrigin | None] = {}
        for number, origin in self._letters.items():
            while last and last < number:
                first, last = next(spans, (0, 0))
            if number > reader.head and not first <= number <= last:
                left[number] = origin
        self._letters = left
        return reader.head

    def _origin(self, letter: DeadLetter) -> LetterOrigin:
        origin = LetterOrigin(printable(letter.queue)[:MOST_NAME], printable(letter.reader)[:MOST_NAME])
        return self._names.setdefault(origin, origin)

    def counts(self) -> Counter[LetterOrigin]:
        """How many letters there are, by origin."""
        return Counter(origin for origin in self._letters.values() if origin is not None)

    def newest(self, count: int, queue: str) -> list[DeadLetter]:
        """The last letters that came, the newest first; with ``queue``, of those that come from it."""
        wanted: set[int] = set()
        for number, origin in reversed(self._letters.items()):
            if origin is not None and queue in ("", origin.queue):
                wanted.add(number)
                if len(wanted) == count:
                    break
        if not wanted:
            return []
        records = islice(scan(self._directory, self.name, start_id=min(wanted)), READ_AT_ONCE)
        found = [record.dead_letter for record in records if record.id in wanted]
        return [letter for letter in reversed(found) if letter is not None]


class FoundLetters:
    """The queues of a folder that hold dead letters. Not thread-safe."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._boxes: dict[str, LetterBox] = {}
        self._probed: dict[str, int] = {}  # by queue: the last id that it had then, the queue asked last at the end

    def boxes_of(self, name: str, queues: Mapping[str, WatchedQueue]) -> list[LetterBox]:
        """``name`` if it holds letters; and the other queues that hold letters of ``name``, as far as is known by now.
        Raises as ``scan`` and ``inspect`` for ``name``; what is wrong with others is passed over.
        """
        for gone in self._boxes.keys() - queues.keys():
            del self._boxes[gone]
        self._probed = {queue: seen for queue, seen in self._probed.items() if queue in queues}
        self._find(name, queues)
        found = []
        for box in list(self._boxes.values()):
            try:
                box.look(queues[box.name])
            except Exception:
                if box.name == name:
                    raise
                continue
            if box.name == name or any(origin.queue == name for origin in box.counts()):
                found.append(box)
        return found

    def _find(self, name: str, queues: Mapping[str, WatchedQueue]) -> None:
        """Ask ``name``, and some others that have changed since they were asked, for letters."""
        unknown = [one for one in queues.values() if one.name not in self._boxes and one.kind == "queue" and one.items]
        changed = [one for one in unknown if self._probed.get(one.name) != one.tail_id]
        order = {queue: at for at, queue in enumerate(self._probed)}
        changed.sort(key=lambda one: (one.name != name, order.get(one.name, -1)))
        for one in changed[:PROBED_AT_ONCE]:
            if len(self._boxes) >= MOST_BOXES:
                return
            self._probed.pop(one.name, None)
            self._probed[one.name] = one.tail_id
            try:
                holds_letters = self._holds_letters(one)
            except Exception:
                if one.name == name:
                    raise
                continue
            if holds_letters:
                self._boxes[one.name] = LetterBox(self._directory, one.name)

    def _holds_letters(self, one: WatchedQueue) -> bool:
        first = min((reader.head for reader in one.readers), default=0) + 1
        for item_id in {first, one.tail_id}:
            record = next(scan(self._directory, one.name, start_id=max(1, item_id)), None)
            if record is not None and record.dead_letter is not None:
                return True
        return False


def printable(text: str) -> str:
    """The text, with escapes for what is not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
