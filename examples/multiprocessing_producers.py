"""Several processes put, one process reads: in place of a multiprocessing.Queue.

    python multiprocessing_producers.py

Four processes publish batches of ten items through the inbox of the queue. They do not own the queue, and it need not
be open. The main process owns it and reads. A batch whose ``put_many`` has returned is on disk, as a whole. It prints:

    ...
    published ...:3/19
    ...
    from producer 0: 200 items of this run, in order
    from producer 1: 200 items of this run, in order
    from producer 2: 200 items of this run, in order
    from producer 3: 200 items of this run, in order

A kill at any moment, of one process or of all, loses no batch that was published: start the program again in the same
folder. What was read in the last second before the kill may be read twice. received.txt has all that was read.
"""

import collections
import contextlib
import multiprocessing
import uuid

from kestrelpy import JournaledQueue, QueueEmpty, inbox

FOLDER, PRODUCERS, BATCHES, BATCH = "producers-data", 4, 20, 10


def produce(name: str) -> None:
    """A process of its own. A put of one item is a batch of one, and costs as many syncs."""
    for number in range(BATCHES):
        first = number * BATCH
        inbox.put_many(FOLDER, "results", [f"{name}/{item}".encode() for item in range(first, first + BATCH)])
        print(f"published {name}/{number}\n", end="", flush=True)


def main() -> None:
    run = uuid.uuid4().hex
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=produce, args=(f"{run}:{number}",)) for number in range(PRODUCERS)]
    for process in processes:
        process.start()
    received: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    expected = PRODUCERS * BATCHES * BATCH
    with (
        JournaledQueue(FOLDER, "results", inbox_interval=0.05) as queue,  # looks into the inbox every 50 ms
        open("received.txt", "a") as file,
        contextlib.suppress(QueueEmpty),
    ):
        while sum(len(numbers) for name, numbers in received.items() if name.startswith(run)) < expected:
            with queue.get(timeout=10) as item:
                text = item.data.decode()
                print(text, file=file, flush=True)
                name, _, number = text.partition("/")
                received[name].append(int(number))
    for process in processes:
        process.join()
    for name, numbers in sorted(received.items()):
        if name.startswith(run):
            order = "in order" if numbers == sorted(numbers) else "out of order"
            print(f"from producer {name.rpartition(':')[2]}: {len(numbers)} items of this run, {order}")


if __name__ == "__main__":
    main()
