"""Faults injected into single operations of a disk: short runs, each repeated with its n-th operation failing, for all
n; only documented errors are seen, and nothing acknowledged is lost.

A run keeps a ledger of what it was told. What an error meant is checked when the fault is gone and the queue is opened
by another process, after a kill or a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kestrelpy import DurabilityUnknown, Item, JournaledQueue, QueueEmpty
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Choose, Leaning
from tests.crash import core
from tests.crash.explorer import collecting_seldom
from tests.crash.recovered import MODELS, Unread, opened, read_all, vanish
from tests.support.queues import Sync

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
NAMES = ("left", "right")


class Recording(FailingDisk):
    """Knows the kinds of operations that it made fail, and recovers after so many of them."""

    failed: frozenset[str] = frozenset()
    at_most = 1 << 62

    def due(self, kind: str, path: str = "") -> OSError | None:
        error = super().due(kind, path)
        if error is not None:
            self.failed |= {kind}
            if self.failures >= self.at_most:
                self.disarm()
        return error


@dataclass
class Run:
    """The run, and its ledger."""

    sync: Sync
    error: int
    mapped: bool = True
    disk: CrashingDisk = field(default_factory=CrashingDisk)
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    doubtful: set[bytes] = field(default_factory=set)
    durable_id: int = 0
    in_doubt_to: int = 0
    committed: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NAMES})
    opened: dict[str, list[Item]] = field(default_factory=lambda: {name: [] for name in NAMES})
    errors: int = 0
    queue: JournaledQueue | None = None
    serial: int = 0
    whole: bool = True
    """Whether what it leaves is looked at through a whole queue."""

    def __post_init__(self) -> None:
        self.failing = Recording(self.disk, mapped=self.mapped)

    def twin(self, error: int, *, mapped: bool = True) -> Run:
        """Another run that goes on from the end of this one, whose queue is closed, on a disk that will fail."""
        assert self.queue is None
        return replace(
            self,
            error=error,
            mapped=mapped,
            disk=self.disk.after_kill(),
            acknowledged=dict(self.acknowledged),
            refused=set(self.refused),
            doubtful=set(self.doubtful),
            committed={name: set(ids) for name, ids in self.committed.items()},
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Puts over three segments, reads by two readers, checkpoints, retirement, a clean end and a death."""
        self.open()
        for _ in range(3):
            self.put(1200)
        self.take("left", 2)
        self.put(10, 900, 900)
        self.commit("left", 1)
        self.checkpoint()
        self.put(40)
        self.do(lambda queue: queue.sync(), self.synced)
        self.abort("left")
        for name in NAMES:
            self.take(name, 100)
            self.commit(name, 100)
        self.put(3000)
        self.wait()
        self.close()
        self.open()
        self.put(100)
        self.checkpoint()
        self.die()
        self.open()
        self.put(2000)
        self.put(5, 5)
        self.take("right", 2)
        self.commit("right", 2)
        self.checkpoint()
        self.close()

    def script(self, choose: random.Random, count: int) -> list[Callable[[Run], object]]:
        """So many steps, chosen for this run and its twins."""
        steps: list[Callable[[Run], object]] = []
        for _ in range(count):
            name, size = choose.choice(NAMES), choose.choice((0, 40, 1200, 3000))
            number = choose.randrange(1, 4)
            steps.append(
                choose.choice(
                    (
                        lambda run, size=size: run.put(size),
                        lambda run, size=size: run.put(size),
                        lambda run, size=size: run.put(10, size, 900),
                        lambda run, name=name, number=number: (run.take(name, number), run.commit(name, number)),
                        lambda run, name=name, number=number: (run.take(name, number), run.abort(name)),
                        lambda run: [(run.take(name, 100), run.commit(name, 100)) for name in NAMES],
                        Run.checkpoint,
                        lambda run: run.do(lambda queue: queue.sync(), run.synced),
                        Run.wait,
                        lambda run: (run.close(), run.open()),
                        lambda run: (run.die(), run.open()),
                    )
                )
            )
        return [Run.open, *steps, choose.choice((Run.close, Run.die))]

    def do(self, call: Callable[[JournaledQueue], Any], then: Callable[[Any], object] = lambda _: None) -> None:
        """One call. What it raises must be documented; after a failed sync nothing works but ``close()``."""
        if self.queue is None:
            return
        try:
            result = call(self.queue)
        except QueueEmpty:
            return
        except DurabilityUnknown as error:
            self.note(error)
            self.in_doubt(error)
            if not self.queue.closed:
                self.is_failed(error)
                self.end()
        except OSError as error:
            self.note(error)
        else:
            then(result)

    def note(self, error: OSError) -> None:
        assert self.failing.failures, error
        assert error.errno == self.error, error
        self.errors += 1

    def in_doubt(self, error: DurabilityUnknown) -> None:
        """The items in doubt are named; what was acknowledged before them stands, and is looked for in the end."""
        assert error.first_id > self.durable_id
        assert error.last_id >= max(self.acknowledged, default=0)
        self.durable_id = error.first_id - 1
        self.in_doubt_to = error.last_id
        self.doubt()

    def doubt(self) -> None:
        for item_id in [item_id for item_id in self.acknowledged if item_id > self.durable_id]:
            self.doubtful.add(self.acknowledged.pop(item_id))

    def is_failed(self, error: DurabilityUnknown) -> None:
        """Everybody is told, now and later, although the disk is well again: only a reopening helps (R9)."""
        assert self.queue is not None
        queue = self.queue
        self.failing.disarm()
        calls: list[Callable[[], object]] = [lambda: queue.put(b"after the failure"), queue.sync, queue.checkpoint]
        calls += [reader.get_nowait for reader in queue.readers.values()]
        calls += [reader.checkpoint for reader in queue.readers.values()]
        for call in calls:
            with pytest.raises(DurabilityUnknown) as again:
                call()
            assert again.value.first_id == error.first_id

    def end(self) -> None:
        """Close what has failed, as a program would, and go on."""
        assert self.queue is not None
        with contextlib.suppress(OSError):
            self.queue.close()
        self.queue = None
        self.open()

    def open(self) -> None:
        self.opened = {name: [] for name in NAMES}
        for attempt in range(2):
            clock = self.clock = ManualClock(1_000_000)
            queue = None
            try:
                queue = JournaledQueue(
                    "/data",
                    "jobs",
                    sync=self.sync,
                    segment_bytes=4096,
                    clock=clock,
                    disk=self.failing,
                )
                opened.add(queue)
                for name in NAMES:
                    queue.reader(name, start="earliest")
                self.queue = queue
            except OSError as error:
                self.note(error)
                assert attempt == 0
                self.doubt()  # if it was the sync of a recovery
                self.failing.disarm()
                if queue is not None:
                    with contextlib.suppress(OSError):
                        queue.close()
            else:
                return

    def put(self, *sizes: int) -> None:
        items = []
        for size in sizes:
            self.serial += 1
            items.append(b"%05d" % self.serial + bytes(size))
        self.refused |= set(items)
        tail_id = self.queue.stats().tail_id if self.queue is not None else 0
        try:
            self.do(lambda queue: queue.put_many(items) if len(items) > 1 else queue.put(items[0]), self.stored(items))
        finally:
            if self.errors and self.queue is None:
                self.refused -= set(items)
            if self.in_doubt_to > tail_id:  # stored, and then the sync failed, or what comes after it
                self.refused -= set(items)
                self.doubtful |= set(items)

    def stored(self, items: list[bytes]) -> Callable[[Any], None]:
        def note(result: Any) -> None:
            ids = result if isinstance(result, range) else range(result, result + 1)
            self.acknowledged.update(zip(ids, items, strict=True))
            self.refused.difference_update(items)
            if self.sync == "always":
                self.durable_id = ids[-1]

        return note

    def synced(self, _: Any) -> None:
        self.durable_id = max(self.acknowledged, default=self.durable_id)

    def take(self, name: str, count: int) -> None:
        self.do(lambda queue: queue.reader(name).get_many(count, timeout=0), self.opened[name].extend)

    def commit(self, name: str, count: int) -> None:
        chosen, self.opened[name] = self.opened[name][:count], self.opened[name][count:]
        if chosen:
            self.committed[name] |= {item.id for item in chosen}
            self.do(lambda queue: queue.reader(name).commit_many(chosen))

    def abort(self, name: str) -> None:
        if self.opened[name]:
            item = self.opened[name].pop()
            self.do(lambda queue: queue.reader(name).abort(item))

    def checkpoint(self) -> None:
        self.do(lambda queue: queue.checkpoint(durable=True))

    def wait(self) -> None:
        self.do(lambda queue: self.clock.advance(1.5))
        self.do(lambda queue: queue.sync(), self.synced)

    def close(self) -> None:
        queue = self.queue
        if queue is not None:
            failed = self.errors
            self.do(lambda queue: queue.close(), self.synced)
            if self.queue is queue:
                assert queue.closed
                if self.errors > failed:
                    self.doubt()
                self.queue = None

    def die(self) -> None:
        if self.queue is not None:
            vanish(self.queue, self.disk)
            self.queue = None

    # -- afterwards --------------------------------------------------------------------------------------------------

    def check_after_kill(self) -> None:
        self.failing.disarm()
        self.die()
        self.check_contents(self.disk.after_kill(), self.acknowledged)

    def check_after_power_cut(self, choose: Choose, model: PowerModel) -> None:
        self.failing.disarm()
        self.die()
        if "sync_directory" in self.failing.failed:
            return  # of the names from then on nothing is known
        durable = {item_id: data for item_id, data in self.acknowledged.items() if item_id <= self.durable_id}
        self.check_contents(self.disk.after_power_cut(choose, model), durable)

    def check_contents(self, disk: CrashingDisk, kept: dict[int, bytes]) -> None:
        """By the core alone, or through a queue, which goes on then."""
        unread: dict[str, Sequence[Item | Unread]] = {}
        if self.whole:
            clock = ManualClock(NOW_MS)
            queue = JournaledQueue("/data", "jobs", sync="never", segment_bytes=4096, disk=disk, clock=clock)
            opened.add(queue)
            for name in NAMES:
                unread[name] = read_all(queue.reader(name, start="earliest"))
            last_id = queue.put(b"and on it goes")
            vanish(queue, disk)
        else:
            found, tail_id = core.contents(disk, NAMES, NOW_MS)
            unread.update(found)
            last_id = tail_id + 1
        assert last_id > max(kept, default=0)
        known = self.doubtful | set(self.acknowledged.values())
        for name, items in unread.items():
            ids = [item.id for item in items]
            assert ids == sorted(set(ids))
            seen = {item.id: item.data for item in items}
            assert not self.refused & set(seen.values())
            for item_id, data in kept.items():
                assert item_id in self.committed[name] or seen.get(item_id) == data, (name, item_id)
            assert all(data in known for data in seen.values())


SYNCS: tuple[Sync, ...] = ("always", 0.1, "never")
PREPARED, STEPS = 8, (1, 2, 2, 3, 4)
"""Steps before the faults, and steps in which they strike."""
WHOLE = 0.3
NOW_MS = 2_000_000


def prepared(choose: random.Random) -> Run:
    """A queue with a past, at its end: on a disk that has not failed yet."""
    run = Run(choose.choice(SYNCS), 0)
    if choose.random() < 0.8:
        for step in run.script(choose, PREPARED):
            step(run)
        run.queue = None
    return run


def run(seed: int, limit: int) -> Counter[str]:
    """``limit`` faults or a few more, by errno and how they end, in runs that no other seed brings.

    Each run is repeated with each of its operations failing, with each errno, once and for a while. Raises
    ``AssertionError``, or what is not documented.
    """
    counts: Counter[str] = Counter()
    with collecting_seldom():
        at = 0
        while counts.total() < limit:
            where = f"seed {seed}, run {at}"
            choose = random.Random(where)
            base = prepared(choose)
            steps = base.script(choose, choose.choice(STEPS))
            try:
                counts += _fail_each(base, steps, choose, limit - counts.total())
            except BaseException as broken:
                broken.add_note(where)
                raise
            gc.collect(1)
            at += 1
    return counts


def _fail_each(base: Run, steps: list[Callable[[Run], object]], choose: random.Random, limit: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    unharmed = base.twin(0)
    for step in steps:
        step(unharmed)
    operations = unharmed.failing.operations
    unharmed.check_after_kill()
    for at in range(1, operations + 1):
        for error in ERRORS:
            for sticky in (False, True):
                run = base.twin(error)
                run.failing.arm(error, at=at, sticky=sticky)
                run.whole = choose.random() < WHOLE
                if sticky and choose.random() < 0.5:
                    run.failing.at_most = choose.randrange(2, 5)
                cut = choose.random() < 0.5
                try:
                    for step in steps:
                        step(run)
                    if cut:
                        run.check_after_power_cut(Leaning(choose), choose.choice(MODELS))
                    else:
                        run.check_after_kill()
                except BaseException as broken:
                    name = errno.errorcode[error]
                    often = min(run.failing.at_most, run.failing.failures)
                    broken.add_note(f"sync {run.sync!r}, {name} at operation {at}, {often} times, power cut {cut}")
                    raise
                assert run.failing.failures
                counts[f"{errno.errorcode[error]} {'sticky' if sticky else 'once'}"] += 1
        if counts.total() >= limit:
            break
    return counts
