"""What is known of a queue whose processes are killed and whose power is cut, and what is promised of it.

Each item says whose it is: its data is an ``Identity``, some bytes, and a checksum over both. Processes tell what they
are about to do and what they were told; the ledger hears it. After an end, a fresh process tells what is left, and the
ledger holds that against docs/guarantees.md. It knows more than the promises need: since every survivor is counted
after every end, each next life must begin with exactly what was left.

Rules:
1. What a process *begins* is announced before (commits, aborts): it may have happened. What a call *returned* is
   announced after (puts, syncs, checkpoints): it has happened.
2. A put that was in flight is the one after the last acknowledged put of its thread: there, whole, or not there.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple
from zlib import crc32

IDENTITY = Struct("<IHIHH")
SIZES = (0, 10, 100, 1000, 5000)


class Identity(NamedTuple):
    """Item ``index`` of the ``count`` that the ``sequence``-th put of a thread stored at once."""

    generation: int
    thread: int
    sequence: int
    index: int  # type: ignore[assignment]
    count: int  # type: ignore[assignment]


class Kept(NamedTuple):
    """An item as a fresh process found it."""

    id: int
    identity: Identity
    error_count: int = 0


class BrokenPromise(AssertionError):
    """Something was lost, doubled, out of order, or came from nowhere."""


def payload(identity: Identity, choose: random.Random) -> bytes:
    data = IDENTITY.pack(*identity) + choose.randbytes(choose.choice(SIZES))
    return data + crc32(data).to_bytes(4, "little")


def identify(data: bytes) -> Identity:
    """Whose item it is. Raises ``BrokenPromise`` if it is not whole."""
    promised(len(data) >= IDENTITY.size + 4, "an item of {} bytes is not whole", len(data))
    promised(crc32(data[:-4]) == int.from_bytes(data[-4:], "little"), "an item of {} bytes is not whole", len(data))
    return Identity(*IDENTITY.unpack_from(data))


def promised(kept: bool, text: str, *facts: object) -> None:
    if not kept:
        raise BrokenPromise(text.format(*facts))


class Place:
    """One reader: what it was delivered, what of it is done, and how safely."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun: set[int] = set()
        """Commits that may have happened."""
        self.saved: set[int] = set()
        """Done, by a checkpoint that survives the process."""
        self.durable: set[int] = set()
        """Done, by a checkpoint that survives a power cut."""
        self.errors: Counter[int] = Counter()
        self.saved_errors: Counter[int] = Counter()
        self.durable_errors: Counter[int] = Counter()
        self.seen: dict[int, Identity] = {}
        self.redelivered = 0
        self._due: deque[int] = deque()  # what a new life begins with
        self._returned: set[int] = set()
        self._fresh: list[int] = []  # delivered in this life, after what was due
        self._last_id = self._checked_id = 0

    # -- what its process tells ------------------------------------------------------------------------------------

    def deliver(self, item_id: int, identity: Identity, error_count: int) -> None:
        if self._returned:
            due = min(self._returned)
            promised(item_id == due, "{}: {} was aborted and is next, not {}", self.name, due, item_id)
            self._returned.remove(item_id)
        elif self._due:
            due = self._due.popleft()
            promised(item_id == due, "{}: {} is next, not {}", self.name, due, item_id)
        else:
            promised(item_id > self._last_id, "{}: {} comes after {}", self.name, item_id, self._last_id)
            self._fresh.append(item_id)
        known = self.seen.setdefault(item_id, identity)
        promised(known == identity, "{}: item {} is {} and was {}", self.name, item_id, identity, known)
        promised(
            error_count == self.errors[item_id],
            "{}: {} was aborted {} times, not {}",
            self.name,
            item_id,
            self.errors[item_id],
            error_count,
        )
        self._last_id = max(self._last_id, item_id)

    def begin_commit(self, item_id: int) -> None:
        self.begun.add(item_id)

    def begin_abort(self, item_id: int) -> None:
        self.errors[item_id] += 1
        self._returned.add(item_id)

    def save(self, durable: bool) -> None:
        self.saved |= self.begun
        self.saved_errors = self.errors.copy()
        if durable:
            self.durable |= self.begun
            self.durable_errors = self.errors.copy()

    # -- what is left of it ----------------------------------------------------------------------------------------

    def check_life(self, survivors: Sequence[int], archived: bool) -> None:
        """What it was delivered must be what survived, with nothing passed over. Without an archive what is before the
        first survivor is gone, as all readers were done with it.
        """
        if not self._fresh:
            return
        first, last = self._checked_id, self._fresh[-1]
        kept_from = 0 if archived or not survivors else survivors[0]
        there = [item_id for item_id in survivors if first < item_id <= last]
        delivered = [item_id for item_id in self._fresh if survivors and kept_from <= item_id <= survivors[-1]]
        promised(delivered == there, "{}: delivered {}, and there are {}", self.name, delivered, there)
        self._checked_id, self._fresh = last, []

    def check_left(self, left: Sequence[Kept], survivors: dict[int, Identity], power: bool) -> None:
        """``left`` is what a fresh process was delivered, all of it."""
        ids = [kept.id for kept in left]
        promised(ids == sorted(set(ids)), "{}: ids do not rise: {}", self.name, ids)
        done = self.durable if power else self.saved
        errors = self.durable_errors if power else self.saved_errors
        for item_id, identity, error_count in left:
            promised(item_id in survivors, "{}: {} comes from nowhere", self.name, item_id)
            promised(survivors[item_id] == identity, "{}: {} has other data", self.name, item_id)
            promised(item_id not in done, "{}: {} was saved as done and came again", self.name, item_id)
            promised(
                errors[item_id] <= error_count <= self.errors[item_id],
                "{}: {} has {} errors; saved {}, told {}",
                self.name,
                item_id,
                error_count,
                errors[item_id],
                self.errors[item_id],
            )
        lost = survivors.keys() - set(ids) - self.begun
        promised(not lost, "{}: {} were never committed and do not come", self.name, sorted(lost))

    def begin_life(self, left: Sequence[Kept], survivors: Iterable[int], last_id: int, durable: bool) -> None:
        """From here on this is what there is, up to ``last_id``: ``durable`` if a power cut can't change it."""
        ids = [kept.id for kept in left]
        self.redelivered += sum(item_id in self.begun for item_id in ids)
        there = set(survivors)
        self.begun = there - set(ids)
        self.saved = set(self.begun)
        self._forget_errors(there)
        for kept in left:
            self.errors[kept.id] = kept.error_count
        self.saved_errors = self.errors.copy()
        if durable:
            self.durable = set(self.begun)
            self.durable_errors = self.errors.copy()
        self.durable &= self.begun
        self.seen = {}
        self._due = deque(ids)
        self._returned = set()
        self._fresh = []
        self._checked_id = self._last_id = last_id

    def forget_below(self, item_id: int) -> None:
        for ids in (self.begun, self.saved, self.durable):
            ids -= {each for each in ids if each < item_id}

    def _forget_errors(self, there: set[int]) -> None:
        for errors in (self.errors, self.saved_errors, self.durable_errors):
            for item_id in errors.keys() - there:
                del errors[item_id]


class Ledger:
    """One queue, for as many lives as it has. ``inside`` are the readers of the writing process."""

    def __init__(self, inside: Iterable[str], outside: Iterable[str]) -> None:
        self.items: dict[int, Identity] = {}
        self.places = [Place(name) for name in (*inside, *outside)]
        self.inside = len(tuple(inside))
        self.durable_id = 0
        """Up to here items survive a power cut, whatever the mode."""
        self.last_id = 0
        """Where the journal ended when it was last looked at."""
        self.lost = 0
        self.first_id = 1
        """What was below is done with, and checked."""
        self.generation = 0
        self.acknowledged = 0
        self._sequences: Counter[tuple[int, int]] = Counter()
        self._too_late: Counter[tuple[int, int]] = Counter()

    def put(self, first_id: int, identity: Identity) -> None:
        """Acknowledged."""
        for index in range(identity.count):
            item_id = first_id + index
            promised(item_id not in self.items, "id {} was given out twice", item_id)
            self.items[item_id] = identity._replace(index=index)
        self._sequences[identity[:2]] = identity.sequence
        self.acknowledged += identity.count

    def put_too_late(self, identity: Identity) -> None:
        """Told, but after the power was cut: it may be there."""
        self._too_late[identity[:2]] = identity.sequence

    def check(
        self, records: Sequence[Kept], end_id: int, *, power: bool, always: bool, archived: bool
    ) -> dict[int, Identity]:
        """Hold what is left against what is promised; returns the survivors.

        ``end_id``: where the newest segment ends, for when it is empty and the only one. ``always``: every
        acknowledgement since the last check was under ``sync="always"``.
        """
        ids = [record.id for record in records]
        promised(ids == sorted(set(ids)), "ids do not rise: {}", ids)
        survivors = {record.id: record.identity for record in records if record.id >= self.first_id}
        self._check_known(survivors)
        last_id = max(ids, default=end_id)
        if power and not always:
            promised(last_id >= self.durable_id, "{} was on disk; the journal ends at {}", self.durable_id, last_id)
        else:
            lost = [item_id for item_id in self.items if item_id > last_id]
            promised(not lost, "acknowledged and lost: {}", lost)
        missing = [item_id for item_id in self.items if item_id <= last_id and item_id not in survivors]
        for item_id in missing:
            retired = not archived and item_id < min(survivors, default=last_id + 1)
            done = all(item_id in place.begun for place in self.places)
            promised(retired and done, "item {} is gone, and {} is there", item_id, last_id)
        self._check_places(survivors, last_id, power=power, always=always, archived=archived)
        self.lost += sum(item_id > last_id for item_id in self.items)
        self.last_id = self.durable_id = last_id  # an opening syncs what it finds
        self.items = dict(survivors)
        return survivors

    def _check_known(self, survivors: dict[int, Identity]) -> None:
        """Each is one that was put, or one that was being put: whole."""
        for item_id, identity in survivors.items():
            known = self.items.get(item_id)
            if known is None:
                told = self._sequences[identity[:2]]
                due = max(told, self._too_late[identity[:2]]) + 1
                in_flight = identity.generation == self.generation and told < identity.sequence <= due
                promised(in_flight, "item {}, {}, was never put", item_id, identity)
            else:
                promised(known == identity, "item {} is {} and was {}", item_id, identity, known)
            first = item_id - identity.index
            for index in range(identity.count):
                beside = survivors.get(first + index)
                promised(
                    first + index < self.first_id or beside == identity._replace(index=index),
                    "the batch of item {} is not whole: {} beside it",
                    item_id,
                    beside,
                )

    def _check_places(
        self, survivors: dict[int, Identity], last_id: int, *, power: bool, always: bool, archived: bool
    ) -> None:
        order = sorted(survivors)
        for at, place in enumerate(self.places):
            for item_id, identity in place.seen.items():
                known = survivors.get(item_id, self.items.get(item_id, identity))
                promised(known == identity, "{}: item {} was delivered as {}", place.name, item_id, identity)
            if power:
                named = max(place.saved, default=0)
                promised(named <= last_id, "{}: its checkpoint names {}, lost behind {}", place.name, named, last_id)
            if not power or (always and at < self.inside):
                seen = max(place.seen, default=0)
                promised(seen <= last_id, "{}: {} was delivered and is lost", place.name, seen)
            place.check_life(order, archived)

    def forget_below(self, item_id: int) -> None:
        """What is before is not kept any more."""
        self.first_id = max(self.first_id, item_id)
        self.items = {each: identity for each, identity in self.items.items() if each >= self.first_id}
        for place in self.places:
            place.forget_below(self.first_id)
