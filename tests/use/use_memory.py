"""The queues in memory: callbacks that call again, tasks left behind, the collector at any allocation.

One operation is a queue of its own, a few dozen calls, and the account: each item that was put comes out once.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue
from tests.use.use_operations import operation

if TYPE_CHECKING:
    from tests.use.use_world import Process, World

MOST_NESTED = 3


class Memory:
    """One queue and its account."""

    def __init__(self, rng: random.Random, kind: Any) -> None:
        self.rng = rng
        self.queue = kind(maxsize=rng.choice((0, 1, 3)))
        self.number = 0
        self.put_items: set[int] = set()
        self.maybe: set[int] = set()
        """Of tasks that were left behind or cancelled in ``aput``."""
        self.got: list[int] = []
        self.futures: list[Future[int]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.depth = 0
        self.ending = False
        self.left_behind = 0
        """Tasks of loops that are closed: they stay in line until something comes, which then goes back."""
        self.loop = asyncio.new_event_loop()

    def new(self) -> int:
        self.number += 1
        return self.number

    def put(self) -> None:
        item = self.new()
        self.maybe.add(item)
        try:
            if self.rng.random() < 0.3:
                self.queue.put_head(item)
            else:
                self.queue.put_nowait(item)
        except queue.Full:
            self.maybe.discard(item)
            return
        self.maybe.discard(item)
        self.put_items.add(item)

    def get(self) -> None:
        try:
            taken = self.queue.get_nowait() if self.rng.random() < 0.7 else self.queue.get_if(lambda item: item % 2)
        except queue.Empty:
            return
        self.got.append(taken)

    def future(self) -> None:
        future: Future[int] = self.queue.get_future(self.rng.choice((None, 0)))
        self.futures.append(future)

        def done(future: Future[int]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.got.append(future.result())
            dice = self.rng.random()
            if dice < 0.4 and self.depth < MOST_NESTED and not self.ending:
                self.call()
            elif dice > 0.9:
                raise RuntimeError("thrown by a callback")

        future.add_done_callback(done)

    def cancel(self) -> None:
        if self.futures:
            self.rng.choice(self.futures).cancel()

    def task(self) -> None:
        if asyncio._get_running_loop() is not None:
            return
        taking, item = self.rng.random() < 0.6, self.new()

        async def work() -> None:
            if taking:
                self.got.append(await self.queue.aget())
                return
            self.maybe.add(item)
            await self.queue.aput(item)
            self.maybe.discard(item)
            self.put_items.add(item)

        task = self.loop.create_task(work())
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.tasks.append(task)
        self.turn(1)

    def turn(self, times: int = 2) -> None:
        if asyncio._get_running_loop() is None:
            for _ in range(times):
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()

    def cancel_task(self) -> None:
        if self.tasks:
            self.rng.choice(self.tasks).cancel()
            if self.rng.random() < 0.5:
                self.turn()

    def leave(self) -> None:
        """The loop is closed with its tasks waiting, and thrown away."""
        if asyncio._get_running_loop() is None and self.rng.random() < 0.3:
            self.left_behind += sum(not task.done() for task in self.tasks)
            self.tasks.clear()
            self.loop.close()
            self.loop = asyncio.new_event_loop()
            gc.collect(0)

    def call(self) -> None:
        self.depth += 1
        try:
            calls = (self.put, self.put, self.put, self.get, self.get, self.future, self.future, self.cancel)
            self.rng.choice((*calls, self.task, self.turn, self.cancel_task, self.leave))()
        finally:
            self.depth -= 1

    def account(self) -> list[int]:
        """What is left in the end."""
        self.ending = True
        for future in self.futures:
            future.cancel()
        for task in self.tasks:
            task.cancel()
        self.turn(4)
        self.tasks.clear()
        self.loop.close()
        gc.collect(1)
        left = self.rest()
        if len(left) + len(self.got) < len(self.put_items) or self.queue.waiter_count:
            gc.collect()  # what has lived through collections takes a whole one
            left += self.rest()
        return left

    def rest(self) -> list[int]:
        left = []
        while True:
            try:
                left.append(self.queue.get_nowait())
            except queue.Empty:
                return left


@operation("memory", 0.3, nestable=False)
def memory(w: World, rng: random.Random, process: Process) -> None:
    del process
    if asyncio._get_running_loop() is not None:
        return
    one = Memory(rng, rng.choice((ConcurrentBlockingQueue, SimpleBlockingQueue)))
    threshold = gc.get_threshold()
    often = rng.random() < 0.5
    if often:
        gc.set_threshold(rng.choice((1, 2, 7)))
        gc.enable()
    try:
        for _ in range(rng.choice((10, 40))):
            one.call()
    finally:
        if often:
            gc.disable()
            gc.set_threshold(*threshold)
    left = one.account()
    out = one.got + left
    w.require(len(out) == len(set(out)), f"{one.queue!r} has given an item out twice: {sorted(out)}")
    lost = one.put_items - set(out)
    w.require(not lost, f"{one.queue!r} has lost the items {sorted(lost)}")
    w.require(set(out) <= one.put_items | one.maybe, f"{one.queue!r} has given out what nobody has put")
    w.require(
        one.queue.waiter_count <= one.left_behind, f"{one.queue.waiter_count} wait in {one.queue!r}, and nobody is left"
    )
    w.saw("a queue in memory")
