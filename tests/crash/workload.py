"""A seeded run of everything that a program does with a queue, deaths included, and the promises that come of it."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

from kestrelpy import DurabilityUnknown, Item, JournaledQueue, QueueEmpty, Reader, open_reader
from kestrelpy._reading import lag_watch
from kestrelpy._reading.lag_watch import LagWatch
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock
from kestrelpy.testing._choices import Leaning
from tests.crash.promise import READERS, Promise, Put
from tests.crash.recovered import CONFIG, FOREIGN, MODELS, Setting, bury, check_reader, drain, read_all, vanish
from tests.support.queues import Sync

PAYLOADS = (0, 1, 40, 200, 900, 3500)
SMALL_SEGMENTS, LARGER_SEGMENTS = 4096, 24_000


@dataclass(frozen=True)
class Style:
    """What a workload leans to. The probabilities are of the workload as a whole, the weights of its steps."""

    steps: int = 25
    segment_bytes: tuple[int, ...] = (SMALL_SEGMENTS, SMALL_SEGMENTS, LARGER_SEGMENTS)
    payloads: tuple[int, ...] = PAYLOADS
    archive: float = 0.3
    other_mount: float = 0.5
    detached: float = 0.25
    failing: float = 0.15
    starts_with_default: float = 0.2
    deaths: int = 1
    """Weight of a kill or a power cut in the middle."""
    deaths_elsewhere: int = 0
    """Weight of a kill in the middle of a save by a reader elsewhere, while the queue's process lives on."""
    commits: int = 7
    aborts: int = 2
    checkpoints: int = 3
    syncs: int = 2
    durable: float = 0.55
    """How likely a checkpoint is to survive a power cut."""
    expiring: float = 0.2
    """How likely a put has an expiry."""
    keeps: bool = False
    """Whether all that is consumed is kept."""
    skips: int = 0
    """Weight of a reader being moved forward that is too far behind."""


MANY_LIVES = Style(steps=200, deaths=20, commits=40, checkpoints=40, durable=0.0)
"""One after the other, and what each has saved is lost with the power, or is not."""
ROOM = Style(steps=60, keeps=True, skips=8, archive=0, commits=20, checkpoints=20)
"""What is consumed is kept, and readers are moved past what they have not consumed."""
ELSEWHERE = Style(steps=80, detached=1.0, deaths_elsewhere=40, commits=30, checkpoints=20, durable=1.0, failing=0)
"""The process of a reader elsewhere dies again and again while it saves."""


class _Killed(BaseException):
    """The end of a process in the middle of a call."""


class Workload:
    """One run, on a disk of its own. ``watch`` is called before each operation on the disk."""

    def __init__(self, seed: int, sync: Sync, style: Style, watch: Callable[[], None]) -> None:
        self.random = choose = random.Random(seed)
        self.style = style
        self.setting = Setting(sync, choose.random() < style.archive, choose.choice(style.segment_bytes))
        self.setting.keeps = style.keeps
        self.watch = watch
        other_mount = choose.random() < style.other_mount
        self.disk = CrashingDisk(mounts=["/archive"] if other_mount else [])
        self.fails = choose.random() < style.failing
        self.promise = Promise(now_ms=1_000_000)
        self.readers: dict[str, Reader] = {}
        self.detached: Reader | None = None
        self.open_reads: dict[str, list[Item]] = {}
        self.starts_with_default = choose.random() < style.starts_with_default
        self.queue: JournaledQueue
        self.clock: ManualClock
        self.failing: FailingDisk

    def run(self) -> None:
        self._plant_foreign_files()
        self._use(self.disk)
        self._open()
        actions: list[tuple[int, Callable[[], None]]] = [
            (8, self._put),
            (3, self._put_many),
            (8, self._get),
            (self.style.commits, self._commit),
            (self.style.aborts, self._abort),
            (self.style.checkpoints, self._checkpoint),
            (self.style.syncs, self._sync),
            (2, self._wait),
            (1, self._reopen),
            (1, self._drop_or_make),
            (1, self._seek),
            (self.style.deaths, self._die),
            (2 if self.fails else 0, self._arm),
            (self.style.deaths_elsewhere, self._die_elsewhere),
            (self.style.skips, self._skip),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(self.style.steps):
            self._do(self.random.choices([action for _, action in actions], weights)[0])
        self.failing.disarm()
        self._do(self._close)
        if not self.queue.closed:  # a sync had failed before, which shows only now
            self._close()

    def snapshot(self) -> Promise:
        """What is promised at this moment, in the middle of an operation."""
        promise = self.promise.copy()
        promise.failed |= self.failing.failures > 0
        promise.now_ms = self.clock.time_ns() // 1_000_000
        return promise

    def _do(self, action: Callable[[], None]) -> None:
        """Failures are in the plan: a sync that failed ends the queue, any other error ends only what it struck."""
        try:
            action()
        except DurabilityUnknown:
            if not self.failing.failures:
                raise
            self._fail_over()
        except OSError:
            if not self.failing.failures:
                raise
            self.promise.in_flight = []  # nothing of it is stored
            if self.queue.closed or not self.readers:  # it was closed, or opened and no reader could be
                self._fail_over()

    # -- the disk ----------------------------------------------------------------------------------------------------

    def _plant_foreign_files(self) -> None:
        folder = self.disk.directory("/data", create=True)
        for name, content in FOREIGN.items():
            file = folder.create(name)
            file.write(0, content)
            file.sync()
            file.close()
        folder.sync()
        folder.close()

    def _use(self, disk: CrashingDisk) -> None:
        self.disk = disk
        self.failing = FailingDisk(disk)
        self.clock = ManualClock(self.promise.now_ms)
        disk.before_operation = self.watch

    def _arm(self) -> None:
        """The next sync of a file, or one soon after, fails. (A folder whose sync fails ends a real file system.)"""
        self.failing.arm(errno.EIO, at=self.random.randrange(1, 4), kinds={"sync"})

    # -- opening and the end -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the queue, and its readers, which are on disk then."""
        self.promise.now_ms = self.clock.time_ns() // 1_000_000
        self.queue, self.clock = self.setting.open(self.failing, self.promise.now_ms)
        self.readers = {}
        self.open_reads = {name: [] for name in READERS}
        if self.starts_with_default and not self.promise.readers["left"].exists:
            self.readers["left"] = self.queue.reader()
            self._settled("left")
        else:
            self.starts_with_default = False
            for name in READERS:
                promise = self.promise.readers[name]
                if promise.exists or not self.promise.tail_id:
                    self._make_reader(name, "earliest")
        self.promise.reopened(self.queue.stats().tail_id)

    def _make_reader(self, name: str, start: str) -> None:
        if name == "right" and self.readers and self.random.random() < self.style.detached:
            self._make_elsewhere(start)
        else:
            self.readers[name] = self.queue.reader(name, start=start)
        self._settled(name)

    def _make_elsewhere(self, start: str) -> None:
        self.detached = self.readers["right"] = open_reader(
            "/data", "jobs", "right", config=CONFIG, create=True, start=start, clock=self.clock, disk=self.failing
        )

    def _settled(self, name: str) -> None:
        """A reader was opened: what it is done with is known by its head, or as it was saved."""
        reader = self.promise.readers[name]
        reader.settle(reader.done | set(range(1, self.readers[name].head + 1)))

    def _close(self) -> None:
        elsewhere = self.detached
        self._close_detached()
        self.queue.close()
        self.promise.durable_id = self.promise.tail_id
        for name, reader in self.readers.items():
            self.promise.readers[name].save(durable=reader is not elsewhere)

    def _close_detached(self) -> None:
        """Close it once: one whose close has failed is closed, and a second close saves nothing."""
        detached, self.detached = self.detached, None
        if detached is not None:
            try:
                detached.close()
            except OSError:  # its place is not saved: what there is of it, a recovery will say
                with contextlib.suppress(OSError):
                    self.queue.close()
                raise
            self.promise.readers["right"].save(durable=False)

    def _reopen(self) -> None:
        self._close()
        self._open()

    def _die(self) -> None:
        """All processes die, or the power goes; what is found then is how it is."""
        self._end(power=self.random.random() < 0.5)

    def _die_elsewhere(self) -> None:
        """The process of the reader elsewhere dies in a save of its place, and another one opens it: that is as the one
        or as the other state has it.
        """
        reader, promise = self.detached, self.promise.readers["right"]
        if reader is None:
            return
        opened = self.open_reads["right"] or read_all(reader)
        if opened:
            promise.commit({opened[0].id})
            reader.commit(opened[0])
        durable = self.random.random() < self.style.durable
        kind, count = self.random.choice(("write", "sync", "rename", "sync_directory")), self.random.choice((1, 1, 2))

        def strike() -> None:
            nonlocal count
            self.watch()
            count -= self.disk.next_operation[0] == kind
            if count <= 0:
                raise _Killed

        self.disk.before_operation = strike
        try:
            reader.checkpoint(durable)
            promise.save(durable=durable)
        except _Killed:
            pass
        finally:
            self.disk.before_operation = self.watch
        bury(reader)
        self._make_elsewhere("earliest")
        items = self.open_reads["right"] = read_all(self.readers["right"])
        check_reader("right", items, self.snapshot(), self.promise.known(), power=False)
        promise.done = self.promise.acknowledged.keys() - {item.id for item in items}
        promise.errors = {item.id: item.error_count for item in items if item.error_count}
        promise.kill.exactly(promise.done)
        promise.kill.errors = dict(promise.errors)

    def _end(self, *, power: bool) -> None:
        self.leave()
        if power:
            self._use(self.disk.after_power_cut(Leaning(self.random), self.random.choice(MODELS)))
        self._recover(power=power)

    def leave(self) -> None:
        """The death of the processes."""
        self.disk.before_operation = None
        self.promise.now_ms = self.clock.time_ns() // 1_000_000
        vanish(self.queue, self.disk, *([self.detached] if self.detached else []))
        self.detached = None

    def _recover(self, *, power: bool) -> None:
        self.promise.failed |= self.failing.failures > 0
        probe = self.disk.after_kill()
        found = drain(self.setting, probe, self.promise, power=power)
        existing = set(self.setting.existing(probe))
        self.promise.adopt(found.seen, found.errors, existing, power=power)
        self._use(self.disk)
        self._open()

    def _fail_over(self) -> None:
        """A sync has failed: the queue is of no use, and what was not durable is in doubt."""
        self.failing.disarm()
        self.promise.failed = True
        if self.random.random() < 0.5:
            self._close_failed()
        self.leave()
        self._recover(power=False)

    def _close_failed(self) -> None:
        try:
            self._close_detached()
            self.queue.close()
        except OSError:
            return

    # -- writing -----------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        self._store(self._some_items(1), self._some_expiry())

    def _put_many(self) -> None:
        self._store(self._some_items(self.random.randrange(2, 6)), self._some_expiry())

    def _some_items(self, count: int) -> list[bytes]:
        return [self.random.randbytes(self.random.choice(self.style.payloads)) for _ in range(count)]

    def _some_expiry(self) -> float | None:
        return self.random.choice((0.1, 1.0, 600.0)) if self.random.random() < self.style.expiring else None

    def _store(self, items: list[bytes], expires_in: float | None = None) -> None:
        now_ms = self.clock.time_ns() // 1_000_000
        expires_ms = None if expires_in is None else now_ms + int(expires_in * 1000)
        promise = self.promise
        promise.in_flight = [Put(data, expires_ms) for data in items]
        if len(items) == 1:
            self.queue.put(items[0], expires_in=expires_in)
        else:
            self.queue.put_many(items, expires_in=expires_in)
        promise.acknowledge(range(promise.tail_id + 1, promise.tail_id + len(items) + 1))
        if self.setting.sync == "always":
            promise.durable_id = promise.tail_id

    def _sync(self) -> None:
        self.queue.sync()
        self.promise.durable_id = self.promise.tail_id

    def _wait(self) -> None:
        """Time passes: background syncs, checkpoints and retirement happen, items expire."""
        failures = self.failing.failures
        self.clock.advance(self.random.choice((0.2, 1.5)))
        if self.setting.sync == 0.1 and failures == self.failing.failures:
            self.queue.sync()  # raises if the background sync failed before
            self.promise.durable_id = self.promise.tail_id

    # -- reading -----------------------------------------------------------------------------------------------------

    def _reader(self) -> str:
        return self.random.choice(list(self.readers))

    def _get(self) -> None:
        name = self._reader()
        try:
            self.open_reads[name] += self.readers[name].get_many(self.random.randrange(1, 5), timeout=0)
        except QueueEmpty:
            return

    def _commit(self) -> None:
        name = self._reader()
        opened = self.open_reads[name]
        if self.random.random() < 0.3:
            opened += read_all(self.readers[name])
        if opened:
            count = self.random.choice((1, len(opened), self.random.randint(1, len(opened))))
            chosen = [opened.pop(self.random.randrange(len(opened))) for _ in range(count)]
            self.promise.readers[name].commit({item.id for item in chosen})
            self.readers[name].commit_many(chosen)

    def _abort(self) -> None:
        name = self._reader()
        opened = self.open_reads[name]
        if opened:
            item = opened.pop(self.random.randrange(len(opened)))
            errors = self.promise.readers[name].errors
            errors[item.id] = errors.get(item.id, 0) + 1
            self.readers[name].abort(item)

    def _checkpoint(self) -> None:
        if self.random.random() < 0.6:
            name, durable = self._reader(), self.random.random() < self.style.durable
            self.readers[name].checkpoint(durable)
            self.promise.readers[name].save(durable=durable)
        if self.random.random() < 0.6:
            durable = self.random.random() < self.style.durable
            self.queue.checkpoint(durable)
            for name, reader in self.readers.items():
                if reader is not self.detached:
                    self.promise.readers[name].save(durable=durable)

    def _seek(self) -> None:
        name = self._reader()
        target = self.random.randrange(1, self.promise.tail_id + 2)
        promise = self.promise.readers[name]
        promise.move(set(range(1, target)))
        self.open_reads[name] = []
        self.readers[name].seek(target)
        promise.move(set(range(1, self.readers[name].head + 1)))
        promise.save(durable=False)

    def _skip(self) -> None:
        """A reader is moved forward, as if it were too far behind: one that is open, or one that nobody has open."""
        name = self._reader()
        reader, promise = self.readers[name], self.promise.readers[name]
        first_id = reader.head + 2
        if first_id > self.promise.tail_id + 1:
            return
        target = self.random.randrange(first_id, self.promise.tail_id + 2)
        if reader is self.detached or self.starts_with_default or self.random.random() < 0.5:
            promise.commit(set(range(1, target)))
            self.open_reads[name] = [item for item in self.open_reads[name] if item.id >= target]
            assert reader.items >= 0, "a reader elsewhere sees the tail by that"
            checkpointer_of(reader).skip_to(target)
        else:
            reader.close()
            self.open_reads[name] = []
            promise.save(durable=False)
            promise.commit(set(range(1, target)))
            with patch.object(lag_watch, "place_within", lambda source, config, head: target):
                LagWatch(self.queue._registry, self.queue._source)._skip_absent(name, CONFIG)
            self.readers[name] = self.queue.reader(name)
        promise.save(durable=True)

    def _drop_or_make(self) -> None:
        """The second reader goes, or comes; the default one gets a name."""
        if self.starts_with_default:
            self.starts_with_default = False
            self.readers["left"] = self.queue.reader("left")  # the same reader: nothing is saved by it
        elif "right" not in self.readers:
            self._make_reader("right", self.random.choice(("earliest", "tail")))
        else:
            self.promise.readers["right"].forget()
            self.open_reads["right"] = []
            self.failing.disarm()  # a reader whose close raises is closed and not dropped: nothing is promised of it
            detached, self.detached = self.detached, None
            if detached is not None:
                with contextlib.suppress(OSError):  # after a sync that failed before: it is closed all the same
                    detached.close()
            del self.readers["right"]
            self.queue.drop_reader("right")
