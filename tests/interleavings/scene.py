"""What the scenes have in common: tasks, a disk whose operations are scheduling points, an event loop, a ledger.

A scene is a function that is run as the first task of a schedule, with a ``Scene``. It starts others, and checks at
the end what has to be true then.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from kestrelpy import Item, JournaledQueue, QueueClosed, Reader, _process
from kestrelpy._disk.memory import MemoryDisk, MemoryNode
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy.testing import CrashingDisk
from kestrelpy.testing._history import CrashingNode
from tests.interleavings.scheduler import BrokenSchedule, Scheduler, Task
from tests.interleavings.standins import Event, Mutex


class Scene:
    """One run of one scene."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.opened: list[JournaledQueue] = []
        self.afterwards: Callable[[], None] | None = None
        """What is to be checked when all tasks are gone, also after a planned stop."""

    def start(self, work: Callable[..., object], *arguments: object) -> Task:
        name = f"{work.__name__} {len(self.scheduler.tasks)}"
        return self.scheduler.start(name, lambda: work(*arguments))

    def point(self) -> None:
        self.scheduler.point()

    def sleep(self, seconds: float) -> None:
        self.scheduler.wait([], "time to pass", seconds)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def open(self, disk: MemoryDisk, **options: Any) -> JournaledQueue:
        options.setdefault("inbox_interval", None)  # a timer that never ends would look like progress
        queue = JournaledQueue("/data", "jobs", disk=disk, **options)
        self.opened.append(queue)
        return queue

    def payload(self, what: str, largest: int = 1500) -> bytes:
        return b"%s %s" % (what.encode(), bytes(self.rng.choice((0, 0, 100, largest))))

    def check_free(self, what: str) -> None:
        """Whoever is called back must not find a lock held by this thread, nor that it leads a sync."""
        me = self.scheduler.here()
        if me is None:
            return
        if me.held:
            self.scheduler.fail(f"{what} with {me.held} held")
        if any(commit._leader is leader for commit, leader in me.leads):
            self.scheduler.fail(f"{what} by a leader")
        if me.name == "kestrelpy-sync":
            self.scheduler.fail(f"{what} on the thread that every queue's syncs count on")


def require(condition: object, what: str) -> None:
    if not condition:
        raise BrokenSchedule(what)


class _Yielding:
    """A file of which a sync takes time: what is stored meanwhile is not covered by it."""

    __slots__ = ()
    disk: YieldingDisk | YieldingCrashingDisk

    def sync(self) -> None:
        scene = self.disk.scene
        self.disk.syncs += 1
        if self.disk.syncs == self.disk.fail_at:
            self.fail_sync()
            scene.point()
            raise OSError(5, "the disk has failed")
        node: Any = super()
        node.sync()
        scene.point()

    def fail_sync(self) -> None:
        node: Any = super()
        node.fail_sync()


class _Node(_Yielding, MemoryNode):
    __slots__ = ("disk",)


class _CrashingNode(_Yielding, CrashingNode):
    __slots__ = ("disk",)


class YieldingDisk(MemoryDisk):
    """A disk in memory with a scheduling point before each operation and at the end of each sync.

    The sync number ``fail_at`` fails, counted from when ``syncs`` was set to 0.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.syncs = self.fail_at = 0
        super().__init__()

    def _before(self, *operation: Any) -> int:
        self.scene.point()
        return super()._before(*operation)

    def _new_node(self) -> Any:
        node = _Node()
        node.disk = self
        return node


class YieldingCrashingDisk(CrashingDisk):
    """The same, and it knows what a crash would leave. ``_before`` of a store is a point at which one may be cut."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.syncs = self.fail_at = 0
        super().__init__()
        self.before_operation = scene.point

    def _new_node(self) -> Any:
        node = _CrashingNode()
        node.disk = self
        return node

    def _wait(self) -> None:
        MemoryDisk._wait(self)


class Loop(asyncio.BaseEventLoop):
    """An event loop that waits as tasks do, by virtual time."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self._scheduler = scene.scheduler
        self._selector = self
        self._call = Event(scene.scheduler, "a call of the event loop")

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout == 0:
            self._scheduler.point()
        else:
            self._call.wait(timeout)
            self._call.clear()
        return ()

    def _process_events(self, events: object) -> None:
        """There are none: nothing here reads sockets."""

    def _write_to_self(self) -> None:
        self._call.set()


class Ledger:
    """What was promised to producers and what readers were given: the accounts of one queue."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.acknowledged: dict[int, bytes] = {}
        self.doubtful: Counter[bytes] = Counter()  # of puts that raised DurabilityUnknown, or were cut short
        self.refused: set[bytes] = set()  # of puts that raised anything else
        self.open: dict[str, dict[int, Item]] = {}
        self.committed: dict[str, set[int]] = {}
        self.settling: dict[str, set[int]] = {}  # a commit is under way
        self.expirable: set[int] = set()
        self.aborts = 0
        self._guard = Mutex(scene.scheduler, "a test's")

    def add_reader(self, name: str) -> None:
        self.open[name], self.committed[name], self.settling[name] = {}, set(), set()

    def acknowledge(self, item_id: int, data: bytes) -> None:
        require(item_id not in self.acknowledged, f"the id {item_id} was given out twice")
        self.acknowledged[item_id] = data

    def deliver(self, reader: str, item: Item) -> None:
        held = self.open[reader]
        require(item.id not in held, f"{reader!r} was given {item.id} twice at a time")
        require(item.id not in self.committed[reader], f"{reader!r} was given {item.id} after it was committed")
        known = self.acknowledged.get(item.id)
        require(known is None or known == item.data, f"the item {item.id} has changed")
        require(item.data not in self.refused, f"the item {item.id} is of a put that raised")
        held[item.id] = item

    def commit(self, reader: str, item: Item, how: Callable[[Item], object]) -> None:
        del self.open[reader][item.id]
        self.settling[reader].add(item.id)
        how(item)
        self.settling[reader].discard(item.id)
        self.committed[reader].add(item.id)

    def abort(self, reader: Reader, item: Item) -> None:
        del self.open[reader.name][item.id]
        self.aborts += 1
        reader.abort(item)

    def settle(self, reader: Reader, item: Item) -> None:
        """Commit it or, seldom, abort it."""
        if self.scene.chance(0.15):
            self.abort(reader, item)
        else:
            self.commit(reader.name, item, reader.commit)

    def check_rest(self, reader: str, rest: dict[int, bytes], *, crashed: bool = False, dropped: int = 0) -> None:
        """``rest``: what the reader is still given in the end, after everything."""
        committed, settling = self.committed[reader], self.settling[reader]
        if not crashed:
            again = committed & rest.keys()
            require(not again, f"{reader!r} was given {sorted(again)} again, committed before")
        lost = self.acknowledged.keys() - rest.keys() - committed - settling - self.expirable
        require(len(lost) <= dropped, f"{reader!r} has lost {sorted(lost)}")
        for item_id, data in rest.items():
            known = self.acknowledged.get(item_id)
            require(known is None or known == data, f"the item {item_id} has changed")
            require(data not in self.refused, f"the item {item_id} is of a put that raised")
            may_be = known or (crashed and data) or data in self.doubtful
            require(may_be, f"the item {item_id} was never acknowledged")


def close_quietly(queue: JournaledQueue) -> None:
    """What a run has left behind when it was cut short: not to be warned of."""
    if queue._status.error is None:
        queue._status.error = QueueClosed("its process is gone")


def leave_quietly() -> None:
    """The same for readers from outside: those that are still open in this run."""
    for each in list(_process._live):
        if isinstance(each, DetachedSource):
            each._gone = True
