"""What a workload was promised so far: the model that every recovered state is held against.

What is in flight may have happened or not. So each reader has two pairs of sets, one for a kill and one for a power
cut: ids that its place on disk surely says are done, and ids that it may say are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

READERS = ("left", "right")


class BrokenPromise(AssertionError):
    """A recovered state breaks an invariant; says which, and how to get there again."""


class Put(NamedTuple):
    """An item as it was put."""

    data: bytes
    expires_ms: int | None = None

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass
class Place:
    """What a checkpoint may say. ``maybe`` is ``None`` where nothing is promised: there is no such reader."""

    surely: set[int] = field(default_factory=set)
    maybe: set[int] | None = None
    errors: dict[int, int] = field(default_factory=dict)
    """Error counts that are at least so high."""

    def exactly(self, done: set[int]) -> None:
        self.surely, self.maybe = set(done), set(done)

    def either(self, done: set[int]) -> None:
        """A state that may have replaced the one before, or not."""
        self.surely &= done
        self.allow(done)

    def allow(self, ids: set[int]) -> None:
        if self.maybe is not None:
            self.maybe |= ids

    def copy(self) -> Place:
        return Place(set(self.surely), None if self.maybe is None else set(self.maybe), dict(self.errors))


@dataclass
class ReaderPromise:
    """One reader: what it is done with, and what of that is saved."""

    exists: bool = False
    done: set[int] = field(default_factory=set)
    kill: Place = field(default_factory=Place)
    power: Place = field(default_factory=Place)
    errors: dict[int, int] = field(default_factory=dict)

    def commit(self, ids: set[int]) -> None:
        self.done |= ids
        self.errors = {item_id: count for item_id, count in self.errors.items() if item_id not in ids}
        self.kill.allow(ids)
        self.power.allow(ids)

    def save(self, *, durable: bool) -> None:
        """What is done now is saved; another state may have been before."""
        self.kill.exactly(self.done)
        self.kill.errors = dict(self.errors)
        if durable:
            self.power.exactly(self.done)
            self.power.errors = dict(self.errors)
        else:
            self.power.either(self.done)

    def move(self, done: set[int]) -> None:
        """A seek is under way."""
        self.done = set(done)
        self.kill.either(done)
        self.power.either(done)
        self.errors, self.kill.errors, self.power.errors = {}, {}, {}

    def settle(self, done: set[int]) -> None:
        """It was opened. A new one's place is on disk then; that of one which was there is what it was before."""
        self.done = set(done)
        self.kill.exactly(done)
        if self.exists:
            self.power.allow(done)
        else:
            self.power.exactly(done)
        self.exists = True

    def forget(self) -> None:
        """It is being dropped: nobody is promised anything."""
        self.exists = False
        self.done = set()
        self.kill, self.power = Place(), Place()
        self.errors = {}

    def lose_checkpoint(self) -> None:
        """Everything may come again, and nothing may be skipped."""
        for place in (self.kill, self.power):
            place.surely, place.errors = set(), {}

    def copy(self) -> ReaderPromise:
        return ReaderPromise(
            self.exists,
            set(self.done),
            self.kill.copy(),
            self.power.copy(),
            dict(self.errors),
        )


@dataclass
class Promise:
    """All of it. ``doubtful``: items that may have survived the last crash or not. ``failed``: a sync has failed since
    the opening, so that what is not durable is in doubt whatever comes.
    """

    acknowledged: dict[int, Put] = field(default_factory=dict)
    durable_id: int = 0
    tail_id: int = 0
    in_flight: list[Put] = field(default_factory=list)
    doubtful: dict[int, Put] = field(default_factory=dict)
    now_ms: int = 0
    failed: bool = False
    readers: dict[str, ReaderPromise] = field(default_factory=lambda: {name: ReaderPromise() for name in READERS})

    def copy(self) -> Promise:
        return Promise(
            dict(self.acknowledged),
            self.durable_id,
            self.tail_id,
            list(self.in_flight),
            dict(self.doubtful),
            self.now_ms,
            self.failed,
            {name: reader.copy() for name, reader in self.readers.items()},
        )

    def acknowledge(self, ids: range) -> None:
        self.acknowledged.update(zip(ids, self.in_flight, strict=True))
        self.in_flight = []
        self.tail_id = ids[-1]

    def kept_id(self, *, power: bool) -> int:
        """Acknowledged items up to here are there."""
        return self.durable_id if power or self.failed else self.tail_id

    def known(self) -> dict[int, Put]:
        """All items that may be there."""
        return {**self.doubtful, **self.acknowledged, **dict(enumerate(self.in_flight, self.tail_id + 1))}

    def adopt(
        self,
        seen: dict[str, dict[int, bytes]],
        errors: dict[str, dict[int, int]],
        existing: set[int],
        *,
        power: bool,
    ) -> None:
        """A crash has happened: what a recovery found is how it is, as soon as the queue is open again.

        What was before the first item there is retired; its segment may come back from its deletion.
        """
        known, kept_id = self.known(), max(self.kept_id(power=power), min(existing, default=0) - 1)
        self.acknowledged = {key: put for key, put in known.items() if key in existing or key <= kept_id}
        self.doubtful = {key: put for key, put in known.items() if key not in self.acknowledged}
        self.in_flight = []
        for name, reader in self.readers.items():
            if reader.exists:
                done = {key for key in self.acknowledged if key not in seen[name]}
                reader.done = done
                reader.errors = dict(errors[name])
                reader.kill.exactly(done)
                reader.kill.errors = dict(errors[name])
                if power:
                    reader.power.exactly(done)
        if power:
            self.durable_id = max(existing, default=self.durable_id)

    def reopened(self, tail_id: int) -> None:
        """The queue is open again: what was recovered is on disk, and what is not there never comes back."""
        self.tail_id = self.durable_id = tail_id
        self.doubtful = {}
        self.failed = False
