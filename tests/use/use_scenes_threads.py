"""Threads that use one queue, under the deterministic scheduler of tests/interleavings: ``run(seed, scenes)``.

Several tasks do drawn operations in drawn order, on virtual time. A queue beside (``other``) belongs to somebody who
has nothing to do with it: whatever hooks and callbacks of the first do, its puts must be on disk in time.

What must be true: nothing refused is delivered, nothing is delivered twice at a time, or after it was committed, unless
a seek was there; in the end all that was acknowledged is committed or still there; nobody waits for ever; no hook is
called without end.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

from kestrelpy import (
    DurabilityUnknown,
    FullPolicy,
    Item,
    JournaledQueue,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueLocked,
    Reader,
    ReaderConfig,
    UnknownItem,
    open_reader,
)
from tests.interleavings import schedules, standins
from tests.interleavings.scene import Scene, YieldingDisk, require

LONG = 100_000.0
SYNC = 0.1
SLOW = 400.0
"""Seconds that a callback takes which sleeps."""
MOST_HOOK_CALLS = 600
THREAD_FAULT = "can't start new thread"


class Threads:
    """One scene: a queue, a reader that moves between processes, and the accounts."""

    def __init__(self, scene: Scene, lean: frozenset[str]) -> None:
        self.scene = scene
        self.rng = scene.rng
        self.lean = lean
        self.acknowledged: dict[int, bytes] = {}
        self.refused: set[bytes] = set()
        self.doubtful: set[bytes] = set()
        self.committed: set[int] = set()
        self.held: dict[int, Item] = {}
        self.moved = False
        """A seek was there: items come again."""
        self.dropped = 0
        self.hook_calls = 0
        self.number = 0
        self.steps = 0
        self.ending = False
        self.disk = YieldingDisk(scene)
        self.config = self.draw_config()
        self.sync: Any = self.rng.choice(("always", SYNC, SYNC, "never"))
        self.queue = scene.open(
            self.disk,
            sync=self.sync,
            segment_bytes=4096,
            checkpoint_interval=self.rng.choice((0.2, 1.0)),
            default_reader=self.config,
        )
        self.reader: Reader = self.queue.reader("r", start="earliest")
        self.seeks = self.chance("seek", 0.3) and self.config.max_items is None

    def chance(self, name: str, probability: float) -> bool:
        return name in self.lean or self.rng.random() < probability

    def draw_config(self) -> ReaderConfig:
        options: dict[str, Any] = {"memory_bytes": self.rng.choice((1, 2000, 1 << 20))}
        if self.chance("limits", 0.5):
            options["max_items"] = self.rng.choice((1, 1, 2, 4))
            options["full_policy"] = FullPolicy.BLOCK if self.chance("block", 0.8) else FullPolicy.REFUSE
        if self.chance("expired hook", 0.3):
            options["on_expired"] = self.on_expired
        if self.chance("timeout hook", 0.3):
            options["on_timeout"] = lambda reader, seconds: self.misbehave("on_timeout")
        self.raises = self.chance("raising", 0.3)
        self.exits = self.chance("severe", 0.15)
        self.sleeps = self.chance("sleeping", 0.15)
        return ReaderConfig(**options)

    # -- what is called back -----------------------------------------------------------------------------------------

    def on_expired(self, item: Item) -> None:
        self.hook_calls += 1
        require(self.hook_calls < MOST_HOOK_CALLS, f"on_expired was called {self.hook_calls} times")
        if self.raises and self.scene.scheduler.now < 50 and not self.ending:
            raise RuntimeError("thrown by on_expired")
        self.committed.add(item.id)

    def misbehave(self, where: str) -> None:
        self.scene.check_free(where)
        if self.ending:
            return
        dice = self.rng.random()
        if self.exits and dice < 0.5:
            raise SystemExit(f"thrown by {where}")
        if self.sleeps and dice < 0.8:
            self.scene.sleep(SLOW)
        elif dice < 0.3:
            with contextlib.suppress(QueueFull, QueueClosed):
                self.put_some(timeout=0)

    # -- operations --------------------------------------------------------------------------------------------------

    def payload(self) -> bytes:
        self.number += 1
        return b"%d:" % self.number + b"x" * self.rng.choice((0, 30, 700, 2000))

    def put_some(self, timeout: float | None = LONG) -> None:
        items = [self.payload() for _ in range(self.rng.choice((1, 1, 1, 2)))]
        expires = 0.0 if self.config.on_expired is not None and self.rng.random() < 0.4 else None
        self.doubtful.update(items)
        try:
            if len(items) == 1:
                ids = [self.queue.put(items[0], timeout=timeout, expires_in=expires)]
            else:
                ids = list(self.queue.put_many(items, timeout=timeout, expires_in=expires))
        except SystemExit:
            return
        except (QueueFull, QueueClosed):
            self.doubtful.difference_update(items)
            self.refused.update(items)
            raise
        for item_id, data in zip(ids, items, strict=True):
            require(item_id not in self.acknowledged, f"the id {item_id} is given out twice")
            self.acknowledged[item_id] = data

    def put_future(self) -> None:
        data = self.payload()
        self.doubtful.add(data)
        try:
            future = self.queue.put_future(data)
        except QueueFull:
            self.doubtful.discard(data)
            self.refused.add(data)
            return

        def done(future: Future[int]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.acknowledged[future.result()] = data
            self.misbehave("a callback of put_future")

        future.add_done_callback(done)

    def deliver(self, item: Item) -> None:
        require(item.data not in self.refused, f"item {item.id} is of a put that raised")
        if not self.moved:
            require(item.id not in self.held, f"item {item.id} is delivered twice at a time")
            require(item.id not in self.committed, f"item {item.id} is delivered after it was committed")
        self.held[item.id] = item

    def settle(self, item: Item) -> None:
        self.held.pop(item.id, None)
        try:
            if self.rng.random() < 0.15:
                item.abort()
            else:
                item.commit()
                self.committed.add(item.id)
        except (UnknownItem, QueueClosed):  # it was moved or closed meanwhile
            return

    def get_some(self) -> None:
        way, reader = self.rng.randrange(3), self.reader
        try:
            if way == 0:
                items = [reader.get(timeout=0.3)]
            elif way == 1:
                items = reader.get_many(3, timeout=0.3)
            else:
                future = reader.get_future(0.3)
                with contextlib.suppress(SystemExit):  # where it is called at once
                    future.add_done_callback(lambda done: self.misbehave("a callback of get_future"))
                items = [future.result()]
        except (QueueEmpty, QueueClosed):
            return
        except RuntimeError as error:  # of a future with a timeout, as docs/locking.md says
            if way != 2 or str(error) != THREAD_FAULT:
                raise
            return
        if reader is not self.reader or reader._backlog.broken is not None:
            return  # it was handed over meanwhile: these come again there
        for item in items:
            self.deliver(item)
        for item in items:
            self.scene.point()
            with contextlib.suppress(SystemExit):
                self.settle(item)

    def seek(self) -> None:
        if not self.seeks:
            return
        self.moved = True
        with contextlib.suppress(QueueClosed):
            self.reader.seek(1)

    def checkpoint(self) -> None:
        with contextlib.suppress(QueueClosed):
            self.queue.checkpoint(self.rng.random() < 0.5)

    def hand_over(self) -> None:
        """The reader is closed here, and opened elsewhere for a while, where all that is there is done."""
        before = self.reader
        before.close()
        self.held.clear()
        try:
            outside = open_reader("/data", "jobs", "r", config=ReaderConfig(), disk=self.disk, create=True)
        except QueueLocked:  # another task was faster
            return
        for _ in range(self.rng.randrange(1, 6)):
            try:
                item = outside.get(timeout=0.2)
            except QueueEmpty:
                continue
            require(item.data not in self.refused, f"item {item.id} is of a put that raised")
            self.committed.add(item.id)
            outside.commit(item)
        outside.checkpoint(durable=True)
        self.scene.sleep(self.rng.choice((0.1, 3.0)))
        outside.close()
        with contextlib.suppress(QueueClosed, QueueLocked):
            self.reader = self.queue.reader("r")

    def work(self, count: int) -> None:
        calls = [
            self.put_some,
            self.put_some,
            self.get_some,
            self.get_some,
            self.put_future,
            self.checkpoint,
            self.seek,
        ]
        for _ in range(count):
            self.steps += 1
            with contextlib.suppress(QueueFull, SystemExit, QueueClosed):
                self.rng.choice(calls)()

    # -- the queue beside --------------------------------------------------------------------------------------------

    def stand_beside(self) -> None:
        """Somebody else's queue: its puts are on disk in time, whatever happens next door."""
        for _ in range(2):
            last = self.other.put(b"beside")
            begun = self.scene.scheduler.now
            for _ in range(40):  # more than there are deadlines that come early
                self.scene.sleep(1.0)
                if self.other.stats().durable_id >= last:
                    break
            late = self.scene.scheduler.now - begun
            require(self.other.stats().durable_id >= last, f"another queue's item is not on disk after {late} s")

    # -- the run -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        scene, rng = self.scene, self.rng
        self.other = JournaledQueue("/data", "other", disk=self.disk, sync=SYNC, inbox_interval=None)
        scene.opened.append(self.other)
        steps = rng.randrange(2, 6) * (3 if self.seeks else 1)
        tasks = [scene.start(self.work, steps) for _ in range(rng.randrange(1, 4))]
        if self.chance("beside", 0.4):
            tasks.append(scene.start(self.stand_beside))
        for _ in range(1 + ("hand over" in self.lean)):
            if self.chance("hand over", 0.3):
                with contextlib.suppress(SystemExit):
                    self.hand_over()
        self.drain_until(tasks)
        self.ending = True
        for task in tasks:
            task.join()
        self.finish()

    def drain_until(self, tasks: list[Any]) -> None:
        """Let producers go on: somebody takes what is there."""
        while any(task.state != "ended" for task in tasks):
            require(self.scene.scheduler.now < 30_000, "producers wait for ever, and the queue is drained")
            try:
                item = self.reader.get(timeout=100.0)
            except (QueueEmpty, SystemExit):
                continue
            except QueueClosed:
                self.scene.sleep(0.1)
                self.reader = self.queue.reader("r")
                continue
            self.deliver(item)
            with contextlib.suppress(SystemExit):
                self.settle(item)

    def finish(self) -> None:
        self.queue.close()
        self.other.close()
        try:
            again = self.scene.open(self.disk, inbox_interval=None, segment_bytes=4096)
        except Exception as error:
            raise AssertionError(f"the queue does not open any more: {error!r}") from error
        reader = again.reader("r")
        rest: dict[int, bytes] = {}
        with contextlib.suppress(QueueEmpty):
            while True:
                for item in reader.get_many(100, timeout=0):
                    require(item.data not in self.refused, f"item {item.id} is of a put that raised")
                    rest[item.id] = item.data
        expired = {item_id for item_id in self.acknowledged if self.config.on_expired is not None}
        lost = self.acknowledged.keys() - rest.keys() - self.committed - expired
        require(not lost, f"the items {sorted(lost)} are lost")
        again.close()


LEAN: list[frozenset[str]] = [frozenset()]
"""What a scene is to have; a list, as ``schedules.play`` passes nothing on."""


def anything(scene: Scene) -> None:
    lean = LEAN[0]
    failing = [scene.rng.randrange(3)] if "threads" in lean or scene.rng.random() < 0.1 else []
    faulty = bool(failing)
    real = standins.Thread.start

    def start(self: standins.Thread) -> None:
        if failing:
            failing[0] -= 1
            if failing[0] < 0:
                failing.clear()
                raise RuntimeError(THREAD_FAULT)
        real(self)

    with patch.object(standins.Thread, "start", start):
        try:
            threads = Threads(scene, lean)
            threads.play()
        except (RuntimeError, DurabilityUnknown) as error:
            if not faulty:  # a call may raise it, and a queue may fail of it
                raise
            del error


schedules.SCENES["use: anything"] = anything


def run(seed: int, count: int, lean: tuple[str, ...] = ()) -> Counter[str]:
    """So many schedules from ``seed`` on. Raises ``BrokenSchedule``."""
    total: Counter[str] = Counter()
    LEAN[0] = frozenset(lean)
    try:
        for number in range(seed, seed + count):
            total += schedules.play("use: anything", number)
    finally:
        LEAN[0] = frozenset()
    return total


if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, tuple(sys.argv[3:])))
