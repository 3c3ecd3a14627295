"""Every crash state of a kestrel server's queues: random programs over fan-outs, killed and cut at every operation.

The program drives ``Queues`` as the protocols do, turn by turn, on a disk that can crash. Before each operation on the
disk, states that a kill or a power cut may leave are opened by another server, and all queues are read to their ends.

The promises, by letter:
(a) an item that was STORED is there, in each queue that it is owed to;
(b) an item whose get or confirm was answered does not come again, nor one that was flushed or deleted;
(c) an item that was not answered yet is in all queues that it is owed to, or in none;
(d) no queue has an item twice, out of order, or one that nobody put;
(e) the server starts.
After a power cut, (a) and (b) hold where ``sync_journal`` is 0.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kestrelpy import KestrelError
from kestrelpy.server.kestrel.client import Client
from kestrelpy.server.kestrel.config import parse_config
from kestrelpy.server.kestrel.queue import ServedQueue
from kestrelpy.server.kestrel.queues import Queues
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel

NAMES = (b"q", b"q+a", b"q+b", b"q+c", b"r", b"r+a")
FOLDER = "queues"
MODELS = (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY)
STEPS = {
    "put": 10.0,
    "get": 6.0,
    "open": 4.0,
    "confirm": 3.0,
    "abort": 1.5,
    "turn": 10.0,
    "mention": 1.5,
    "delete": 0.7,
    "flush": 0.5,
    "save": 1.0,
    "advance": 0.7,
    "restart": 0.3,
    "kill": 0.3,
}


class BrokenPromise(AssertionError):
    """A promise, by its letter, and what was seen."""


def short(items: Iterable[bytes]) -> list[int]:
    """The numbers of these items."""
    return [int(item[:6]) for item in items]


class Turns:
    """The part of ``Rounds`` that the queues call: the program ends each turn itself."""

    def schedule(self) -> None:
        """The turn ends when the program says so."""


class Wire:
    """The part of a connection that the queues call."""

    is_open = True
    is_finished = False


class Expected:
    """What one queue owes its consumers. An item is in ``owed`` from its put until it must not come any more."""

    def __init__(self) -> None:
        self.owed: dict[bytes, None] = {}
        self.pending_puts: dict[bytes, None] = {}
        self.pending_ends: dict[bytes, None] = {}
        self.weak: set[bytes] = set()  # never answered, and found after a kill: a power cut may still take them

    def settle(self) -> None:
        """The turn's replies were sent."""
        for item in self.pending_ends:
            self.owed.pop(item, None)
        self.pending_puts.clear()
        self.pending_ends.clear()


def open_queues(disk: CrashingDisk, clock: ManualClock, sync: float | str) -> Queues:
    config = parse_config('[default]\ndefault_journal_size = "64k"', sync_journal=sync)  # type: ignore[arg-type]

    def at_once(call: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        try:
            call()
        except Exception as error:
            done(error)
        else:
            done(None)

    rounds: Any = Turns()
    queues = Queues(FOLDER, config, at_once, rounds, clock, clock, disk)
    queues.open()
    return queues


def drained(queues: Queues) -> dict[bytes, list[bytes]]:
    """All items of all queues, in the order in which consumers get them."""
    found: dict[bytes, list[bytes]] = {}
    for name, queue in list(queues.by_name.items()):
        items = found[name] = []
        while (item := queue.take()) is not None:
            items.append(item.data)
    return found


class KestrelExplorer:
    """Programs from ``seed`` on, until ``wanted`` states were looked at. ``counts``: of which kind they were."""

    def __init__(
        self, seed: int, wanted: int, *, steps: dict[str, float] | None = None, sync: float | str | None = None
    ):
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._wanted = wanted
        self._steps = {**STEPS, **(steps or {})}
        self._sync_of_all = sync

    def run(self) -> None:
        while self.counts.total() < self._wanted:
            self._seed += 1
            try:
                self._program(random.Random(self._seed))
            except BrokenPromise as error:
                raise BrokenPromise(f"program {self._seed}: {error}; before it: {' '.join(self._story)}") from error

    # -- the program ---------------------------------------------------------------------------------------------------

    def _program(self, rng: random.Random) -> None:
        self._rng = rng
        syncs: list[float | str] = [0, 0, 0.1, "never"]
        self._sync: float | str = self._sync_of_all if self._sync_of_all is not None else rng.choice(syncs)
        self._clock = ManualClock(1_700_000_000_000)
        self._disk = CrashingDisk()
        self._expected: dict[bytes, Expected] = {}
        self._targets: dict[bytes, list[bytes]] = {}  # of each item of this turn
        self._number = 0
        self._story = [f"sync={self._sync}"]
        self._looks = 0.15
        self._opened_queues: Queues | None = None
        try:
            self._start()
            names, weights = list(self._steps), list(self._steps.values())
            for step in rng.choices(names, weights, k=rng.randint(10, 60)):
                self._clock.jump(0.001)
                self._story.append(step)
                getattr(self, f"_{step}")()
                if self.counts.total() >= self._wanted:
                    break
        finally:
            self._disk.before_operation = None
            if self._opened_queues is not None:
                self._opened_queues.close()

    def _start(self) -> None:
        self._disk.before_operation = self._look
        self._client = Client(Wire(), None)  # type: ignore[arg-type]  # no connection is needed
        self._queues = self._opened_queues = open_queues(self._disk, self._clock, self._sync)

    def _of(self, name: bytes) -> Expected:
        return self._expected.setdefault(name, Expected())

    def _members(self, name: bytes) -> list[bytes]:
        """The queues that get what is put into this one."""
        if b"+" in name:
            return [name]
        return [name, *[each for each in self._queues.by_name if each.startswith(name + b"+")]]

    def _name(self) -> bytes:
        return self._rng.choice(NAMES)

    def _existing(self) -> ServedQueue | None:
        queues = list(self._queues.by_name.values())
        return self._rng.choice(queues) if queues else None

    def _put(self) -> None:
        name = self._name()
        self._number += 1
        item = b"%06d" % self._number + b"." * self._rng.choice([0, 0, 10, 3000])
        targets = self._members(name)
        self._targets[item] = targets
        self._story.append(f"{self._number}>{name.decode()}")
        for target in targets:  # before the call: it may be killed in it
            self._of(target).owed[item] = None
            self._of(target).pending_puts[item] = None
        if not self._queues.add(name, item, None):
            raise BrokenPromise("(a) an item is refused without a limit")

    def _mention(self) -> None:
        name = self._name()
        self._story.append(name.decode())
        self._queues.get(name)

    def _get(self) -> None:
        queue = self._existing()
        if queue is None:
            return
        item = self._queues.next_item(queue)
        if item is not None:
            self._story.append(f"{int(item.data[:6])}<{queue.name.decode()}")
            self._queues.take_plain(queue, item, self._client.connection)
            self._of(queue.name).pending_ends[item.data] = None

    def _open(self) -> None:
        queue = self._existing()
        item = None if queue is None else self._queues.next_item(queue)
        if queue is not None and item is not None:
            queue.open_read(self._client.reads, item)

    def _confirm(self) -> None:
        reads = self._client.reads.all()
        if reads:
            read = self._rng.choice(reads)
            self._of(read.queue.name).pending_ends[read.item.data] = None
            read.queue.confirm(read)

    def _abort(self) -> None:
        reads = self._client.reads.all()
        if reads:
            read = self._rng.choice(reads)
            read.queue.take_back(read)

    def _flush(self) -> None:
        queue = self._existing()
        if queue is not None:
            self._story.append(queue.name.decode())
            opened = {read.item.data for read in self._client.reads.all() if read.queue is queue}
            expected = self._of(queue.name)
            expected.pending_ends.update(dict.fromkeys(item for item in expected.owed if item not in opened))
            queue.flush()

    def _delete(self) -> None:
        queue = self._existing()
        if queue is not None:
            self._story.append(queue.name.decode())
            expected = self._of(queue.name)
            expected.pending_ends.update(expected.owed)
            self._queues.delete(queue)

    def _turn(self) -> None:
        self._queues.commit()
        for expected in self._expected.values():
            expected.settle()
        self._targets.clear()

    def _save(self) -> None:
        assert self._queues.storage.acks is not None
        self._queues.storage.acks._save()

    def _advance(self) -> None:
        self._clock.advance(self._rng.choice([0.2, 2.0, 70.0]))

    def _restart(self) -> None:
        self._turn()
        self._queues.close()
        self._start()

    def _kill(self) -> None:
        """Go on with the disk as a kill leaves it, and with what is found there."""
        old, self._disk = self._disk, self._disk.after_kill()
        old.before_operation = None
        with_items = self._opened(self._disk.after_kill(), "kill")
        self._check(with_items, is_durable=True)
        self._queues.close()
        for name, expected in self._expected.items():
            expected.weak |= expected.pending_puts.keys()
            expected.owed = dict.fromkeys(with_items.get(name, []))
            expected.pending_puts.clear()
            expected.pending_ends.clear()
        self._targets.clear()
        self._start()

    # -- the states ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._rng.random() > self._looks or self.counts.total() >= self._wanted:
            return
        kept, self._disk.before_operation = self._disk.before_operation, None
        self._look_at(self._disk.after_kill(), "kill", is_durable=True)
        self._look_at(self._disk.after_kill(self._rng), "kill", is_durable=True)
        model = self._rng.choice(MODELS)
        for state in self._disk.power_states(model, 4, seed=self._rng.randrange(1 << 30)):
            self._look_at(state, model.name, is_durable=self._sync == 0)
        self._disk.before_operation = kept  # not after a broken promise: what is open is closed in peace

    def _look_at(self, state: CrashingDisk, kind: str, *, is_durable: bool) -> None:
        self.counts[kind] += 1
        if self._rng.random() < 0.2:  # a second crash, while the server starts after the first
            state = self._crash_of_the_start(state, kind)
        self._check(self._opened(state, kind), is_durable=is_durable)

    def _crash_of_the_start(self, state: CrashingDisk, kind: str) -> CrashingDisk:
        class Killed(BaseException):
            """The process is gone."""

        at = self._rng.randint(1, 60)
        second: list[CrashingDisk] = []

        def kill() -> None:
            if state.operations >= at and not second:
                second.append(
                    state.after_kill() if kind == "kill" else state.after_power_cut(self._rng, PowerModel.EXT4)
                )
                raise Killed

        state.before_operation = kill
        clock = ManualClock(self._clock.time_ns() // 1_000_000 + 1)
        try:
            open_queues(state, clock, self._sync).close()
        except (Killed, KestrelError, OSError):
            pass
        finally:
            state.before_operation = None
        self.counts["in the start"] += bool(second)
        return second[0] if second else state

    def _opened(self, state: CrashingDisk, kind: str) -> dict[bytes, list[bytes]]:
        clock = ManualClock(self._clock.time_ns() // 1_000_000 + 1)
        try:
            queues = open_queues(state, clock, self._sync)
        except (KestrelError, OSError) as error:
            raise BrokenPromise(f"(e) after {kind}: the server does not start: {error!r}") from error
        try:
            queues._check()
            return drained(queues)
        except (KestrelError, OSError) as error:
            raise BrokenPromise(f"(e) after {kind}: a queue can't be read: {error!r}") from error
        finally:
            queues.close()

    def _check(self, found: dict[bytes, list[bytes]], *, is_durable: bool) -> None:
        for name, items in found.items():
            if items != sorted(set(items)):
                raise BrokenPromise(f"(d) {name!r} has {short(items)}")
            if unknown := [item for item in items if int(item[:6]) > self._number]:
                raise BrokenPromise(f"(d) {name!r} has {unknown}, which nobody put")
        if is_durable:
            for name, expected in self._expected.items():
                have = set(found.get(name, ()))
                may = {*expected.pending_puts, *expected.pending_ends, *expected.weak}
                must = expected.owed.keys() - may
                if missing := must - have:
                    raise BrokenPromise(f"(a) {name!r} has lost {short(missing)}")
                if back := have - set(expected.owed):
                    raise BrokenPromise(f"(b) {name!r} has {short(back)} again")
        for item, targets in self._targets.items():
            waiting = [name for name in targets if item not in self._of(name).pending_ends]
            there = [name for name in waiting if item in found.get(name, ())]
            if there and there != waiting:
                raise BrokenPromise(f"(c) {short([item])} is in {there}, and not in all of {waiting}")
