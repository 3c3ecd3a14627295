"""Old code that was written against queue.Queue, on a durable queue: only the line that makes the queue is new.

    python queue_replacement.py

Producer, workers, sentinels and ``queue.Empty`` are as before. ``JSON`` lets the items be what they were: dictionaries,
strings, None. What the workers had not got when the process ended is there at the next start; with queue.Queue it would
be gone. A get takes the item for good, as in queue.Queue. It prints:

    handled 20 jobs
    left for the next start: 3
    found at the next start: ['c', 'd', 'e']
"""

import queue
import threading
from typing import Any

from kestrelpy import BlockingQueue, JournaledQueue
from kestrelpy.codecs import JSON

WORKERS = 2


def make_queue() -> BlockingQueue[Any]:
    return JournaledQueue("old-data", "jobs", codec=JSON).as_blocking_queue()  # was: return queue.Queue()


def worker(jobs: BlockingQueue[Any], handled: list[str]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        handled.append(job["name"])


def main() -> None:
    jobs = make_queue()
    handled: list[str] = []
    workers = [threading.Thread(target=worker, args=(jobs, handled)) for _ in range(WORKERS)]
    for thread in workers:
        thread.start()
    for number in range(20):
        jobs.put({"name": f"job {number}"})
    for _ in workers:
        jobs.put(None)
    for thread in workers:
        thread.join()
    print(f"handled {len(set(handled))} jobs")
    for name in "abcde":
        jobs.put(name)
    assert [jobs.get(timeout=1), jobs.get_nowait()] == ["a", "b"]
    print("left for the next start:", jobs.qsize())
    jobs.close()

    jobs = make_queue()
    found = []
    while True:
        try:
            found.append(jobs.get_nowait())
        except queue.Empty:
            break
    print("found at the next start:", found)
    jobs.close()


if __name__ == "__main__":
    main()
