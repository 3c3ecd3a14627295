"""A first explorer of crash states: a seeded workload, a model of what was promised, and a check of every state it may end in.

Before every change that the workload makes to the disk, the disk is cloned as a kill would leave it and as power cuts might. Each clone is
recovered and drained; what comes out is held against the promises of docs/guarantees.md. Everything follows from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kestrelpy import Item, JournaledQueue, KestrelError, QueueEmpty, Reader, ReaderConfig
from kestrelpy._lifetime import forget
from kestrelpy.testing import ManualClock
from kestrelpy.testing.disks import CrashingDisk, PowerModel

READERS = ("left", "right")


class BrokenPromise(AssertionError):
    """A recovered state breaks an invariant; says which, and how to get there again."""


@dataclass
class Promise:
    """What the workload was promised so far. What is in flight at a crash may be there or not."""

    acknowledged: dict[int, bytes] = field(default_factory=dict)
    durable_id: int = 0
    in_flight: list[bytes] = field(default_factory=list)
    committed: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in READERS})
    saved: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in READERS})
    saved_durably: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in READERS})
    errors: dict[str, dict[int, int]] = field(default_factory=lambda: {name: {} for name in READERS})
    saved_errors: dict[str, dict[int, int]] = field(default_factory=lambda: {name: {} for name in READERS})

    def after(self, end: str) -> Promise:
        """What is left of it after this end: without its checkpoint a reader sees everything again, and skips nothing."""
        if end == "lost checkpoint":
            nothing: dict[str, set[int]] = {name: set() for name in READERS}
            counts: dict[str, dict[int, int]] = {name: {} for name in READERS}
            return replace(self, saved=nothing, saved_durably=nothing, saved_errors=counts)
        return self

    def copy(self) -> Promise:
        return Promise(
            dict(self.acknowledged),
            self.durable_id,
            list(self.in_flight),
            *(
                {name: set(ids) for name, ids in each.items()}
                for each in (self.committed, self.saved, self.saved_durably)
            ),
            *({name: dict(counts) for name, counts in each.items()} for each in (self.errors, self.saved_errors)),
        )


@dataclass
class Setting:
    """How the workload's queue is opened."""

    sync: float | str
    archive: bool
    segment_bytes: int

    def open(self, disk: CrashingDisk) -> tuple[JournaledQueue, ManualClock]:
        clock = ManualClock(1_000_000)
        queue = JournaledQueue(
            "/data",
            "jobs",
            sync=self.sync,  # type: ignore[arg-type]
            segment_bytes=self.segment_bytes,
            archive_dir="/archive" if self.archive else None,
            readers={name: ReaderConfig(memory_bytes=2048) for name in READERS},
            clock=clock,
            disk=disk,
        )
        return queue, clock


def vanish(queue: JournaledQueue, disk: CrashingDisk) -> None:
    """The death of the process: no call is made, nothing is written."""
    disk.kill()
    forget(queue)
    queue._abandon()


def without_checkpoint(disk: CrashingDisk, choose: random.Random) -> CrashingDisk:
    """One reader's checkpoint is damaged, or gone."""
    folder = disk.directory("/data", create=True)
    name = f"jobs+{READERS[choose.randrange(2)]}.checkpoint"
    if name in folder.names():
        if choose.random() < 0.5:
            folder.unlink(name)
        else:
            file = folder.open(name, write=True)
            file.write(20, b"\xff" * 60)
            file.close()
    disk.kill()
    return disk


class Workload:
    """A seeded run of puts, gets, commits, aborts, checkpoints, syncs and reopenings."""

    def __init__(self, seed: int, sync: float | str, steps: int) -> None:
        self.random = random.Random(seed)
        self.setting = Setting(sync, self.random.random() < 0.3, self.random.choice((4096, 24_000)))
        self.steps = steps
        self.disk = CrashingDisk()
        self.promise = Promise()
        self.open_reads: dict[str, list[Item]] = {name: [] for name in READERS}
        self.queue: JournaledQueue | None = None

    def run(self) -> None:
        self._open()
        actions: list[tuple[int, Callable[[], None]]] = [
            (8, self._put),
            (3, self._put_many),
            (8, self._get),
            (7, self._commit),
            (2, self._abort),
            (2, self._checkpoint),
            (2, self._sync),
            (2, self._wait),
            (1, self._reopen),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(self.steps):
            self.random.choices([action for _, action in actions], weights)[0]()
        self._close()

    def _open(self) -> None:
        self.queue, self.clock = self.setting.open(self.disk)
        self.readers = {name: self.queue.reader(name, start="earliest") for name in READERS}

    def _payload(self) -> bytes:
        size = self.random.choice((0, 1, 40, 200, 900, 3500))
        return self.random.randbytes(size)

    def _acknowledge(self, ids: range, items: list[bytes]) -> None:
        promise = self.promise
        promise.acknowledged.update(zip(ids, items, strict=True))
        promise.in_flight = []
        if self.setting.sync == "always":
            promise.durable_id = ids[-1]

    def _put(self) -> None:
        assert self.queue is not None
        data = self._payload()
        self.promise.in_flight = [data]
        item_id = self.queue.put(data)
        self._acknowledge(range(item_id, item_id + 1), [data])

    def _put_many(self) -> None:
        assert self.queue is not None
        items = [self._payload() for _ in range(self.random.randrange(2, 6))]
        self.promise.in_flight = items
        self._acknowledge(self.queue.put_many(items), items)

    def _reader(self) -> tuple[str, Reader, list[Item]]:
        name = self.random.choice(READERS)
        return name, self.readers[name], self.open_reads[name]

    def _get(self) -> None:
        _, reader, opened = self._reader()
        try:
            opened += reader.get_many(self.random.randrange(1, 5), timeout=0)
        except QueueEmpty:
            return

    def _commit(self) -> None:
        name, reader, opened = self._reader()
        if opened:
            chosen = [
                opened.pop(self.random.randrange(len(opened))) for _ in range(self.random.randint(1, len(opened)))
            ]
            self.promise.committed[name] |= {item.id for item in chosen}
            reader.commit_many(chosen)

    def _abort(self) -> None:
        name, reader, opened = self._reader()
        if opened:
            item = opened.pop(self.random.randrange(len(opened)))
            errors = self.promise.errors[name]
            errors[item.id] = errors.get(item.id, 0) + 1
            reader.abort(item)

    def _checkpoint(self) -> None:
        name, reader, _ = self._reader()
        durable = self.random.random() < 0.5
        reader.checkpoint(durable)
        self._note_saved(name, durable=durable)
        if self.random.random() < 0.5:
            assert self.queue is not None
            self.queue.checkpoint()
            for other in READERS:
                self._note_saved(other, durable=False)

    def _note_saved(self, name: str, *, durable: bool) -> None:
        promise = self.promise
        promise.saved[name] = set(promise.committed[name])
        if durable:
            promise.saved_durably[name] = set(promise.committed[name])
            promise.saved_errors[name] = dict(promise.errors[name])

    def _sync(self) -> None:
        assert self.queue is not None
        tail_id = max(self.promise.acknowledged, default=0)
        self.queue.sync()
        self.promise.durable_id = tail_id

    def _wait(self) -> None:
        """Time passes: background syncs, checkpoints and retirement happen."""
        tail_id = max(self.promise.acknowledged, default=0)
        self.clock.advance(self.random.choice((0.2, 1.5)))
        if self.setting.sync == 0.1:
            self.promise.durable_id = tail_id

    def _close(self) -> None:
        assert self.queue is not None
        tail_id = max(self.promise.acknowledged, default=0)
        self.queue.close()
        self.promise.durable_id = tail_id
        for name in READERS:
            self._note_saved(name, durable=True)

    def _reopen(self) -> None:
        self._close()
        self.open_reads = {name: [] for name in READERS}
        self._open()


class Explorer:
    """Runs workloads and checks crash states until ``limit`` of them are seen."""

    def __init__(self, seed: int, limit: int) -> None:
        self.seed = seed
        self.limit = limit
        self.states = 0

    def run(self) -> None:
        seed = self.seed
        while self.states < self.limit:
            for sync in ("always", 0.1, "never"):
                self.run_one(seed, sync)
            seed += 1

    def run_one(self, seed: int, sync: float | str, steps: int = 25) -> None:
        """One workload, all its crash points. Raises ``BrokenPromise``."""
        workload = Workload(seed, sync, steps)
        choose = random.Random(seed)
        points: list[tuple[CrashingDisk, Promise]] = []

        def before() -> None:
            if choose.random() < 0.4 and len(points) < 40:
                # Half of the time a part of the store under way is there.
                part = choose if choose.random() < 0.5 else None
                points.append((workload.disk.after_kill(part), workload.promise.copy()))

        workload.disk.before_operation = before
        try:
            workload.run()
        except KestrelError as error:
            raise BrokenPromise(f"seed {seed}, sync {sync!r}: the workload itself failed: {error!r}") from error
        workload.disk.before_operation = None
        points.append((workload.disk.after_kill(), workload.promise.copy()))
        for at, (disk, promise) in enumerate(points):
            for end, crashed in self._ends(disk, choose):
                self.states += 1
                try:
                    self._check(
                        workload.setting, crashed, promise.after(end), power=end not in ("kill", "lost checkpoint")
                    )
                except (BrokenPromise, KestrelError, OSError) as broken:
                    raise BrokenPromise(f"seed {seed}, sync {sync!r}, point {at}, {end}: {broken}") from broken
                if self.states >= self.limit:
                    return

    @staticmethod
    def _ends(disk: CrashingDisk, choose: random.Random) -> Iterator[tuple[str, CrashingDisk]]:
        yield "kill", disk.after_kill()
        if choose.random() < 0.3:
            yield "lost checkpoint", without_checkpoint(disk.after_kill(), choose)
        for model in (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY):
            for crashed in disk.power_states(model, 2, seed=choose.randrange(1 << 30)):
                yield model.name, crashed

    def _check(self, setting: Setting, disk: CrashingDisk, promise: Promise, *, power: bool) -> None:
        seen, heads = self._drain(setting, disk, promise, power=power)
        again, _ = self._drain(setting, disk, promise, power=power)
        for name in READERS:
            if again[name] != seen[name]:
                raise BrokenPromise(
                    f"(6) a second recovery gives {name} {sorted(again[name])}, not {sorted(seen[name])}"
                )
        self._go_on(setting, disk, seen, heads)

    def _drain(
        self, setting: Setting, disk: CrashingDisk, promise: Promise, *, power: bool
    ) -> tuple[dict[str, dict[int, bytes]], dict[str, int]]:
        """Recover, read everything, and go away without a word: nothing is committed. Leaves the disk recovered."""
        try:
            queue, _ = setting.open(disk)
            seen: dict[str, dict[int, bytes]] = {}
            heads = {}
            for name in READERS:
                reader = queue.reader(name, start="earliest")
                heads[name] = reader.head
                counted = reader.items
                items = self._read_all(reader)
                seen[name] = {item.id: item.data for item in items}
                if [item.id for item in items] != sorted(seen[name]):
                    raise BrokenPromise(f"(4) {name}: ids do not rise: {[item.id for item in items]}")
                if counted != len(items) or reader.bytes != sum(len(item.data) for item in items):
                    raise BrokenPromise(f"{name}: counts {counted} items, {reader.bytes} bytes; got {len(items)}")
                self._check_reader(name, seen[name], items, promise, power=power)
            queue._check()
        except (KestrelError, OSError) as error:
            raise BrokenPromise(f"(10) opening or draining raised {error!r}") from error
        vanish(queue, disk)
        return seen, heads

    @staticmethod
    def _read_all(reader: Reader) -> list[Item]:
        items: list[Item] = []
        try:
            while True:
                items += reader.get_many(100, timeout=0)
        except QueueEmpty:
            return items

    @staticmethod
    def _check_reader(name: str, seen: dict[int, bytes], items: list[Item], promise: Promise, *, power: bool) -> None:
        acknowledged, committed = promise.acknowledged, promise.committed[name]
        kept_id = promise.durable_id if power else max(acknowledged, default=0)
        saved = promise.saved_durably[name] if power else promise.saved[name]
        for item_id, data in acknowledged.items():
            if item_id <= kept_id and item_id not in committed and seen.get(item_id) != data:
                raise BrokenPromise(f"(1) {name}: item {item_id} was promised and is not there; {sorted(seen)}")
        if again := saved & seen.keys():
            raise BrokenPromise(f"(2) {name}: items {sorted(again)} were committed and saved, and come again")
        tail_id = max(acknowledged, default=0)
        for item_id, data in seen.items():
            expected = acknowledged.get(item_id)
            if expected is None:
                place = item_id - tail_id - 1
                expected = promise.in_flight[place] if 0 <= place < len(promise.in_flight) else None
            if data != expected:
                raise BrokenPromise(f"(3) {name}: item {item_id} was never put: {data[:20]!r}")
        in_flight = {item_id for item_id in seen if item_id > tail_id}
        if in_flight and len(in_flight) != len(promise.in_flight):
            raise BrokenPromise(
                f"(1) {name}: a batch of {len(promise.in_flight)} is there in part: {sorted(in_flight)}"
            )
        last_id = max(seen, default=0)
        for item_id in range(1, last_id):
            if item_id not in seen and item_id not in committed:
                raise BrokenPromise(f"(5) {name}: item {item_id} is missing before {last_id}")
        for item in items:
            if item.error_count < promise.saved_errors[name].get(item.id, 0):
                raise BrokenPromise(f"{name}: item {item.id} has error_count {item.error_count}")

    @staticmethod
    def _go_on(setting: Setting, disk: CrashingDisk, seen: dict[str, dict[int, bytes]], heads: dict[str, int]) -> None:
        """Life goes on: two more items, a clean close, and both are there with ids of their own."""
        queue, _ = setting.open(disk)
        new = {queue.put(data): data for data in (b"one more", b"and another")}
        queue.close()
        for name in READERS:
            if used := new.keys() & seen[name].keys():
                raise BrokenPromise(f"(7) new ids {sorted(used)} were in use")
            if min(new) <= heads[name]:
                raise BrokenPromise(f"(7) new ids {sorted(new)} are not above the head of {name}, {heads[name]}")
        queue, _ = setting.open(disk)
        for name in READERS:
            after = {item.id: item.data for item in Explorer._read_all(queue.reader(name))}
            if after != {**seen[name], **new}:
                raise BrokenPromise(f"(8) {name}: after two more puts there are {sorted(after)}")
        queue.close()
