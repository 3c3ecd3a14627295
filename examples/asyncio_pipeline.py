"""An asyncio pipeline with back-pressure: a bounded queue between a fast producer and slow consumers.

    python asyncio_pipeline.py

The producer puts sixty numbers as fast as it may. The queue holds ten that are not committed: then ``aput`` waits until
a consumer has committed one, and the event loop serves the others meanwhile. It prints:

    squares of 60 numbers, sum 70210
    the producer waited for room: True
    the backlog was never above 10: True

With ``sync="always"`` each ``aput`` returns as soon as its item is on disk. With the default (``sync=0.1``) it waits
for the sync of each tenth of a second, so that one producer would put ten items a second.
"""

import asyncio

from kestrelpy import FullPolicy, JournaledQueue, ReaderConfig

FOLDER, NUMBERS, CONSUMERS = "pipeline-data", 60, 2
CONFIG = ReaderConfig(max_items=10, full_policy=FullPolicy.BLOCK)


async def produce(queue: JournaledQueue[bytes]) -> None:
    for number in range(NUMBERS):
        await queue.aput(b"%d" % number)  # timeout=5 would raise QueueFull after five seconds


async def consume(queue: JournaledQueue[bytes], squares: list[int]) -> None:
    async for item in queue:  # ends when the queue is closed. A sentinel would survive a kill, and end the next run
        async with item:  # committed at the end of the block; a task that is cancelled gives it back
            await asyncio.sleep(0.03)  # the slow work
            squares.append(int(item.data) ** 2)


async def watch(queue: JournaledQueue[bytes], waiting: list[int], backlog: list[int]) -> None:
    while True:
        stats = queue.stats()
        waiting.append(stats.waiting_producers)
        backlog.append(stats.items)
        await asyncio.sleep(0.005)


async def main() -> None:
    squares: list[int] = []
    waiting: list[int] = []
    backlog: list[int] = []
    async with (
        asyncio.TaskGroup() as tasks,
        JournaledQueue(FOLDER, "numbers", sync="always", default_reader=CONFIG) as queue,
    ):
        queue.flush()  # so that the sum is always the same. Your program leaves this out: it drops what is not done yet
        for _ in range(CONSUMERS):
            tasks.create_task(consume(queue, squares))
        watcher = tasks.create_task(watch(queue, waiting, backlog))
        await produce(queue)
        await asyncio.to_thread(queue.join)  # until each item is committed
        watcher.cancel()
    print(f"squares of {len(squares)} numbers, sum {sum(squares)}")
    print("the producer waited for room:", max(waiting) == 1)
    print("the backlog was never above 10:", max(backlog) <= 10)


if __name__ == "__main__":
    asyncio.run(main())
