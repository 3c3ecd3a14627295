"""What may be delivered to whom: the model of one queue and of its readers.

Every put has a number, which its bytes begin with; so whatever comes out of a queue says which put it was.

Rules:
1. A put is flying (its call has not returned), stored, refused, or in doubt. A refused one is never delivered.
2. For each reader an item is done, open (somebody has it), with a hook, or available. ``optional`` are those of which
   the model does not know whether they are done: after a crash, or where a call was cut short. All others are exact.
3. What is available and neither optional nor expired must be delivered, the lowest id first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy import FullPolicy, Item, Reader, ReaderConfig

if TYPE_CHECKING:
    from tests.use.use_graves import Letter, Moving

FLYING, STORED, REFUSED, DOUBTFUL = "flying", "stored", "refused", "in doubt"
LETTER = b'{"dead_letter"'
"""What the bytes of a dead letter begin with."""


class UseFailure(AssertionError):
    """The library did what it must not do."""


class Put:
    """One item, from the call that puts it on."""

    __slots__ = ("added_ms", "data", "expires_ms", "id", "letter", "number", "state")

    def __init__(self, number: int, data: bytes) -> None:
        self.number = number
        self.data = data
        self.id = 0
        self.state = FLYING
        self.added_ms = 0
        self.expires_ms: int | None = None
        self.letter: Letter | None = None
        """What it says, if it is a dead letter."""

    def __lt__(self, other: Put) -> bool:
        return self.id < other.id

    def fits(self, data: bytes) -> bool:
        """Whether it may come out as these bytes."""
        return self.data == data if self.letter is None else self.letter.fits(data)

    def __repr__(self) -> str:
        return f"<put {self.number}: id {self.id}, {self.state}>"


class ReaderModel:
    """One reader that has a place, or, for the default reader, would have one at its first use."""

    def __init__(self, queue: QueueModel, name: str, config: ReaderConfig | None) -> None:
        self.queue = queue
        self.name = name
        self.config = config
        self.process: Any = None
        """Who has it open."""
        self.handle: Reader | None = None
        self.exists = False
        """Whether its place was saved by a call that has returned."""
        self.half_dropped = False
        """Whether dropping it has raised: it may be made anew, and begin with what comes then."""
        self.may_have_name = False
        """Of a default reader: whether a named one may have its place, whose making has raised, or came in the middle
        of a closing or an erase. Then the next named one begins anew.
        """
        self.done: set[Put] = set()
        self.optional: set[Put] = set()
        self.saved: set[Put] = set()
        """What is done by the last place that is known to be saved."""
        self.saved_optional: set[Put] = set()
        self.open: dict[Put, Item] = {}
        self.settling: set[Put] = set()
        """A hook has them, or has failed on them; or ``returning``."""
        self.returning: set[Put] = set()
        """What a task may have had in hand that was thrown away. It is back a moment later, and nobody says when."""
        self.in_hook: set[Put] = set()
        self.made_at = 0.0
        self.waiting = 0
        """How many futures and tasks wait in its line."""
        self.former: ReaderConfig | None = None
        """By which it was open until it got another name: what had expired by then may be shown to a hook later."""
        self.moves = 0
        """How often something else than a delivery has moved it: what was under way meanwhile is not exact."""
        self.seeks = 0
        """How often it was moved back, or may have been."""
        self.delayed: dict[Put, tuple[float, float]] = {}
        """Aborted items: not before the one time, and surely after the other, by the clock of its process."""
        self.errors: dict[Put, tuple[int, int]] = {}
        """How often an item has failed, at least and at the most; not at all if it is not here."""
        self.saved_errors: dict[Put, tuple[int, int]] = {}
        self.most_errors: dict[Put, int] = {}
        """What it may have been at some time: a checkpoint may say so."""
        self.pending: dict[Put, Moving] = {}
        """Items of which it is not known yet whether they are here or in another queue: in one of the two."""
        self.dying: set[Put] = set()
        """Those of them that it has moved nowhere so far: nobody gets them as long as it is open."""
        self.moved: set[Put] = set()
        """Items that are in another queue, and perhaps not done by its checkpoint: that says that they are moved."""

    @property
    def full_name(self) -> str:
        return f"{self.queue.name}+{self.name}" if self.name else self.queue.name

    def is_expired(self, put: Put, now_ms: int, config: ReaderConfig | None = None) -> bool:
        expires_ms = put.expires_ms
        config = config or self.config
        age = None if config is None else config.max_age
        if age is not None and age < 1e9:
            limit_ms = put.added_ms + int(age * 1000)
            expires_ms = limit_ms if expires_ms is None else min(expires_ms, limit_ms)
        return expires_ms is not None and expires_ms <= now_ms

    def is_delayed(self, put: Put) -> bool:
        """Whether it may be that it is not due yet."""
        times = self.delayed.get(put)
        return times is not None and (self.process is None or times[1] > self.process.clock.monotonic() - 1e-6)

    def too_early(self, put: Put) -> float:
        """So many seconds later it is due, at the earliest; at most 0 if it is due."""
        times = self.delayed.get(put)
        return 0.0 if times is None or self.process is None else times[0] - self.process.clock.monotonic() - 1e-6

    def available(self) -> list[Put]:
        """Not done as far as is known, in the order of their ids."""
        done, opened, settling = self.done, self.open, self.settling
        return [put for put in self.queue.stored if put not in done and put not in opened and put not in settling]

    def surely_left(self, now_ms: int, *, delayed: bool = False) -> list[Put]:
        """What must be delivered. ``delayed``: with what is not due yet."""
        flying = self.queue.flying
        left = [put for put in self.available() if put not in self.optional and put not in flying]
        if self.delayed and not delayed:
            left = [put for put in left if not self.is_delayed(put)]
        return [put for put in left if not self.is_expired(put, now_ms)]

    def finish(self, put: Put) -> None:
        self._forget(put)
        self.errors.pop(put, None)
        self.open.pop(put, None)
        self.settling.discard(put)
        self.returning.discard(put)
        self.optional.discard(put)
        self.done.add(put)

    def arrived(self, put: Put) -> None:
        """It is in another queue, for good: no owner of this reader delivers it any more."""
        self.pending.pop(put, None)
        self.finish(put)
        self.saved.add(put)
        self.saved_optional.discard(put)
        self.moved.add(put)

    def _forget(self, put: Put) -> None:
        """Of its delay, and of where it was to go."""
        self.delayed.pop(put, None)
        self.dying.discard(put)
        moving = self.pending.pop(put, None)
        if moving is not None:
            moving.leave_open()

    def doubt(self, puts: list[Put] | set[Put]) -> None:
        """Of these it is not known whether they are done."""
        for put in puts:
            self._forget(put)
            self.open.pop(put, None)
            self.done.discard(put)
            self.optional.add(put)
            self.doubt_errors(put)

    def doubt_errors(self, put: Put) -> None:
        """Its failures may have been forgotten."""
        if put in self.most_errors:
            self.errors[put] = 0, self.most_errors[put]

    def doubt_all(self) -> None:
        self.moves += 1
        self.seeks += 1
        self.doubt(list(self.queue.stored))
        self.optional |= self.queue.unsettled()
        self.saved_optional |= self.optional
        self.settling.clear()
        self.returning.clear()

    def restart(self) -> None:
        """Its owner is gone without a word: it goes on from what was saved, perhaps from more."""
        for put, most in self.most_errors.items():
            here, saved = self.errors.get(put, (0, 0)), self.saved_errors.get(put, (0, 0))
            self.errors[put] = min(here[0], saved[0]), most
        maybe = (self.done | self.optional) - (self.saved - self.saved_optional)
        self.done = set(self.saved) - self.saved_optional
        self.optional = {put for put in maybe if put.state != REFUSED} | self.saved_optional
        self.optional -= self.done
        self.leave()

    def leave(self) -> None:
        """It has no owner any more; open reads come again. What has expired by its options was dropped, or not."""
        self.moves += 1
        self.doubt_expired()
        for put in self.dying:  # if its checkpoint says that they are to be moved, the next owner does it
            self.optional.add(put)
            if self.is_expired(put, self.queue.now()) or drops(self.config):
                self.pending.pop(put).leave_open()
        self.dying.clear()
        self.delayed.clear()
        self.open.clear()
        self.settling.clear()
        self.returning.clear()
        self.process = self.handle = None

    def doubt_expired(self) -> None:
        if self.queue.expires or (self.config is not None and self.config.max_age is not None):
            now_ms = self.queue.now()
            left = [put for put in self.queue.stored if put not in self.done and put not in self.open]
            self.optional.update(put for put in left if self.is_expired(put, now_ms))
            self.optional.update(put for put in self.queue.unsettled() if self.is_expired(put, now_ms))

    def note_saved(self) -> None:
        self.exists = True
        self.saved, self.saved_optional = set(self.done), set(self.optional)
        self.saved_errors = dict(self.errors)
        self.moved.clear()

    def move_to(self, item_id: int) -> None:
        """After a seek that has returned. What was to be moved is moved by now, or is not moved at all: if its place is
        after the new one, it comes again.
        """
        self.moves += 1
        self.seeks += 1
        for put in self.queue.stored:
            self._forget(put)
            self.doubt_errors(put)
        self.open.clear()
        self.settling.clear()
        self.returning.clear()
        self.done = {put for put in self.queue.stored if put.id < item_id}
        self.optional = self.queue.unsettled()


class QueueModel:
    """One life of one queue, from its first opening to ``erase()``."""

    def __init__(self, name: str, now: Callable[[], int]) -> None:
        self.name = name
        self.now = now
        self.stored: list[Put] = []
        self.flying: set[Put] = set()
        self.by_number: dict[int, Put] = {}
        self.again: dict[int, list[Put]] = {}
        """What is there with the number of an item that is there already, or is in another queue: dead letters, and
        what was put back out of them.
        """
        self.readers: dict[str, ReaderModel] = {"": ReaderModel(self, "", None)}
        self.writer: Any = None
        """The process that has it open for writing."""
        self.made = False
        self.failed = False
        self.damaged = False
        self.half_erased = False
        """Whether an erase has raised: some of its files may be gone, or all."""
        self.erased = False
        self.is_going = False
        """Whether somebody is about to erase it."""
        self.expires = False
        """Whether something in it can expire."""
        self.archive: str | None = None
        self.always_archived = True
        self.batches: list[Batch] = []
        self.may_refuse = False
        """Whether a published batch may be refused, for a part that is too large or gone."""
        self.unsure = False
        """Whether there may be readers of which nothing is known: their making has raised."""
        self.versions: dict[str, int] = {}
        self.holes = False
        """Whether ids may be missing: items in doubt that were lost."""

    @property
    def tail_id(self) -> int:
        return self.stored[-1].id if self.stored else 0

    def named(self) -> list[str]:
        return [name for name in self.readers if name]

    def new_copy(self, number: int, data: bytes) -> Put:
        """As ``new_put``, of a number that there may be already."""
        put = Put(number, data)
        self.again.setdefault(number, []).append(put)
        self.flying.add(put)
        return put

    def new_put(self, number: int, data: bytes) -> Put:
        put = self.by_number[number] = Put(number, data)
        self.flying.add(put)
        return put

    def store(self, put: Put, item_id: int, *, seen: bool = False) -> None:
        """``put`` is in the queue under this id. ``seen``: its call is still under way, and somebody has it already."""
        if not seen:
            self.flying.discard(put)
        if put.state == REFUSED:
            raise UseFailure(f"{put} was refused, and is there")
        if put.id and put.id != item_id:
            raise UseFailure(f"{put} has become item {item_id}")
        put.state = STORED
        if not put.id:
            put.id = item_id
            if self.stored and item_id <= self.stored[-1].id:
                if any(other.id == item_id for other in self.stored) and not self.damaged:
                    raise UseFailure(f"item id {item_id} is given out twice")
                insort(self.stored, put)
            else:
                self.stored.append(put)

    def refuse(self, put: Put) -> None:
        self.flying.discard(put)
        if put.id:
            raise UseFailure(f"the put of {put} has raised, and it was delivered")
        put.state = REFUSED

    def may_be_there(self, put: Put) -> None:
        """Its put raised what leaves that open."""
        self.flying.discard(put)
        if not put.id:
            put.state = DOUBTFUL

    def find(self, data: bytes, item_id: int = 0) -> Put:
        """``item_id``: where it was seen, if several may have the same bytes."""
        text = data.partition(b"\n")[2] if data.startswith(LETTER) else data
        head = text.split(b":", 1)[0].lstrip(b'"')
        put = self._chosen(int(head), data, item_id) if head.isdigit() else None
        if put is None:
            raise UseFailure(f"queue {self.name} has an item that nobody has put: {data[:400]!r}")
        if put.letter is not None:
            put.letter.see(put, data)
        if put.data != data:
            raise UseFailure(f"{put} came out with other bytes")
        if put.state == REFUSED:
            raise UseFailure(f"the put of {put} has raised, and it is delivered")
        return put

    def _chosen(self, number: int, data: bytes, item_id: int) -> Put | None:
        first = self.by_number.get(number)
        several = self.again.get(number)
        if not several:
            return first
        fitting = [put for put in ([first] if first is not None else []) + several if put.fits(data)]
        there = [put for put in fitting if put.id == item_id or not item_id] or [put for put in fitting if not put.id]
        return next((put for put in there if put.state != REFUSED), next(iter(there or fitting), None))

    def see(self, item_id: int, data: bytes) -> Put:
        """An item has come out."""
        put = self.find(data, item_id)
        if put.id != item_id:
            self.store(put, item_id, seen=put in self.flying and put.letter is None)
        return put

    def needed(self) -> set[Put]:
        """What some reader has not done, for sure."""
        wanted: set[Put] = set()
        now_ms = self.now()
        for reader in self.readers.values():
            sure = [put for put in self.stored if put not in reader.done and put not in reader.optional]
            if self.expires or (reader.config is not None and reader.config.max_age is not None):
                sure = [put for put in sure if put in reader.open or not reader.is_expired(put, now_ms)]
            wanted.update(sure)
        return wanted

    def unsettled(self) -> set[Put]:
        """Puts of which it is not known whether they are there, or under which id."""
        if not self.holes:
            return set(self.flying)
        return self.flying | {put for put in self.every_put() if put.state == DOUBTFUL}

    def every_put(self) -> list[Put]:
        return [*self.by_number.values(), *(put for puts in self.again.values() for put in puts)]


class Batch:
    """A published batch of the inbox."""

    def __init__(self, puts: list[Put], published_at: float) -> None:
        self.puts = puts
        self.published_at = published_at


def drops(config: ReaderConfig | None) -> bool:
    return (
        config is not None
        and config.full_policy is FullPolicy.DROP_OLDEST
        and (config.max_items is not None or config.max_bytes is not None)
    )
