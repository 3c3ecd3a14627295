"""Scenes of the queues in memory, both classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kestrelpy import ConcurrentBlockingQueue, FullPolicy, QueueClosed, QueueEmpty, QueueFull, SimpleBlockingQueue
from tests.interleavings.scene import Loop, Scene, require

LONG = 1_000_000.0
"""Seconds that end only where nobody else can do anything: a wake-up is missing then."""

Make = Callable[..., SimpleBlockingQueue[Any]]


class Flow:
    """Producers and consumers of one queue, and what went through it."""

    def __init__(self, scene: Scene, queue: SimpleBlockingQueue[Any]) -> None:
        self.scene = scene
        self.queue = queue
        self.put: list[Any] = []
        self.got: list[Any] = []
        self.flushed = 0
        self.refused: set[Any] = set()
        self.ordered = True

    def produce(self, name: int, count: int) -> None:
        for number in range(count):
            item = (name, number)
            try:
                self._put(item)
            except QueueFull:
                self.refused.add(item)
            except QueueClosed:
                self.refused.add(item)
                return
            else:
                self.put.append(item)

    def _put(self, item: Any) -> None:
        way = self.scene.rng.randrange(8)
        if way == 0:
            self.queue.put(item, timeout=0.5)
        elif way == 1:
            self.queue.put_nowait(item)
        elif way == 2 and not self.ordered:
            self.queue.put_head(item)
        else:
            self.queue.put(item)

    def consume(self) -> None:
        last: dict[int, int] = {}
        while True:
            try:
                name, number = self._get()
            except QueueEmpty:
                continue
            except QueueClosed:
                return
            require(not self.ordered or number > last.get(name, -1), f"the items of {name} are out of order")
            last[name] = number
            self.got.append((name, number))

    def _get(self) -> Any:
        queue, way = self.queue, self.scene.rng.randrange(10)
        if way == 0:
            return queue.get(timeout=0.5)
        if way == 1:
            self.scene.point()
            return queue.get_nowait()
        if way == 2:
            return queue.get_if(lambda item: True)
        if way in (3, 4):
            return self._get_future()
        if way == 5:
            queue.peek()
        return queue.get()

    def _get_future(self) -> Any:
        future = self.queue.get_future(self.scene.rng.choice((None, 0.5)))
        future.add_done_callback(lambda done: self.scene.check_free("a future is completed"))
        self.scene.point()
        if self.scene.chance(0.5) and future.cancel():
            raise QueueEmpty("cancelled")
        return future.result()

    def disturb(self) -> None:
        for _ in range(self.scene.rng.randrange(3)):
            self.scene.point()
            if self.scene.chance(0.5):
                self.queue.evict_waiters()
            else:
                self.flushed += self.queue.flush()

    def check(self) -> None:
        while True:
            try:
                self.got.append(self.queue.get_nowait())
            except (QueueEmpty, QueueClosed):
                break
        require(len(set(self.got)) == len(self.got), f"given twice: {self.got}")
        require(not self.refused & set(self.got), "an item of a put that raised was given to somebody")
        missing = set(self.put) - set(self.got)
        require(set(self.got) <= set(self.put), "what nobody put was given to somebody")
        gone = self.flushed + self.queue.dropped_count
        require(len(missing) == gone, f"{missing} are missing, and {gone} were dropped")
        require(self.queue.waiter_count == 0, "somebody was left waiting")
        self.queue._check()


def traffic(scene: Scene, make: Make) -> None:
    """Everything at once; in the end the queue is shut down and drained."""
    rng = scene.rng
    policy = rng.choice((FullPolicy.BLOCK, FullPolicy.BLOCK, FullPolicy.DROP_OLDEST, FullPolicy.REFUSE))
    flow = Flow(scene, make(rng.choice((0, 0, 1, 2)), full_policy=policy))
    flow.ordered = scene.chance(0.5)
    producers = [scene.start(flow.produce, name, rng.randrange(1, 5)) for name in range(rng.randrange(1, 4))]
    consumers = [scene.start(flow.consume) for _ in range(rng.randrange(1, 4))]
    other = scene.start(flow.disturb)
    for task in (*producers, other):
        task.join()
    flow.queue.shutdown()
    for task in consumers:
        task.join()
    flow.check()


def shutting(scene: Scene, make: Make) -> None:
    """The queue is shut down, or closed with all that is in it, in the midst of it."""
    rng = scene.rng
    flow = Flow(scene, make(rng.choice((0, 1, 1, 2))))
    tasks = [scene.start(flow.produce, name, 3) for name in range(rng.randrange(1, 4))]
    tasks += [scene.start(flow.consume) for _ in range(rng.randrange(1, 3))]
    for _ in range(rng.randrange(10)):
        scene.point()
    if scene.chance(0.5):
        flow.queue.shutdown()
        for task in tasks:
            task.join()
        flow.check()
        return
    flow.queue.close()
    for task in tasks:
        task.join()
    require(len(set(flow.got)) == len(flow.got), "given twice")
    require(not flow.refused & set(flow.got), "an item of a put that raised was given to somebody")
    flow.queue._check()


def fairness(scene: Scene, make: Make) -> None:
    """First come, first served: consumers who came one after the other get the items in that order."""
    queue = make(0)
    got: dict[int, Any] = {}

    def consume(name: int) -> None:
        got[name] = queue.get(timeout=LONG) if scene.chance(0.5) else queue.get_future(LONG).result()

    count = scene.rng.randrange(2, 5)
    tasks = []
    for name in range(count):
        tasks.append(scene.start(consume, name))
        while queue.waiter_count <= name:
            scene.sleep(0.01)
    for number in range(count):
        tasks.append(scene.start(queue.put, number))
        if not scene.chance(0.5):
            tasks[-1].join()
    late = scene.start(consume, count)
    for task in tasks:
        task.join()
    require(sorted(got[name] for name in range(count)) == list(range(count)), f"a late consumer was served: {got}")
    queue.put("late")
    late.join()
    require(got[count] == "late", "the last one got what was not his")
    queue._check()


def room(scene: Scene, make: Make) -> None:
    """Producers wait for room as long as it takes; each of them gets it."""
    queue = make(scene.rng.choice((1, 2)))
    puts, gets = scene.rng.randrange(2, 4), 3
    got: list[Any] = []

    def produce(name: int) -> None:
        for number in range(gets):
            queue.put((name, number), timeout=LONG)

    def consume() -> None:
        for _ in range(gets):
            got.append(queue.get(timeout=LONG))  # noqa: PERF401 - each is there as soon as it is got

    def widen() -> None:
        queue.maxsize = scene.rng.choice((2, 3))

    tasks = [scene.start(produce, name) for name in range(puts)] + [scene.start(consume) for _ in range(puts)]
    if scene.chance(0.3):
        tasks.append(scene.start(widen))
    for task in tasks:
        task.join()
    require(len(set(got)) == puts * gets, f"not each item once: {got}")
    queue._check()


def coroutines(scene: Scene, make: Make) -> None:
    """Coroutines that are cancelled while threads produce and consume: no item and no place is lost by it."""
    queue = make(scene.rng.choice((0, 1, 2)))
    flow = Flow(scene, queue)
    flow.ordered = False

    async def get(timeout: float | None) -> None:
        flow.got.append(await queue.aget(timeout))

    async def put(item: Any) -> None:
        await queue.aput(item)
        flow.put.append(item)

    async def work() -> None:
        tasks = [asyncio.ensure_future(get(scene.rng.choice((None, 0.5)))) for _ in range(3)]
        tasks += [asyncio.ensure_future(put(("async", number))) for number in range(2)]
        for _ in range(scene.rng.randrange(6)):
            await asyncio.sleep(scene.rng.choice((0, 0, 0.3)))
        for task in tasks:
            if scene.chance(0.5):
                task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, QueueEmpty | QueueClosed):
                raise error

    def run_loop() -> None:
        loop = Loop(scene)
        try:
            loop.run_until_complete(work())
        finally:
            loop.close()

    producer, consumer = scene.start(flow.produce, 0, 4), scene.start(flow.consume)
    with_loop = scene.start(run_loop)
    producer.join()
    queue.shutdown()
    for task in (consumer, with_loop):
        task.join()
    flow.check()


SCENES = {
    f"{scene.__name__} of {make.__name__}": (scene, make)
    for make in (SimpleBlockingQueue, ConcurrentBlockingQueue)
    for scene in (traffic, shutting, fairness, room, coroutines)
}
