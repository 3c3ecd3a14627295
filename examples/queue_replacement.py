"""Old code that was written against queue.Queue, on a durable queue: the line that makes it, and the sentinel, are new.

    python queue_replacement.py

Producer, workers and ``queue.Empty`` are as before. ``JSON`` lets the items be what they were: dictionaries. A sentinel
is an item, too, and survives: after a kill, the sentinels that ended the workers may come again, and ``None`` would end
the new workers at once. So a sentinel names its run, and a worker passes over those of other runs. It prints:

    handled 20 jobs of this run, and ... of earlier ones
    left for the next start: 3
    found at the next start: ['c', 'd', 'e']

What the workers had not got when the process ended is there at the next start; with queue.Queue it would be gone. After
a kill at any moment, the next run in the same folder hands to its workers what is left, and does its own jobs. A get
commits at once, and is saved once a second: what was got before the last save is gone, even if nobody has worked on it,
and what was got after it comes again. If a job has to come again until it is done, keep the ``JournaledQueue``:

    item = jobs.get()
    handle(item.value)
    item.commit()
"""

import queue
import threading
import uuid
from typing import Any

from kestrelpy import BlockingQueue, JournaledQueue
from kestrelpy.codecs import JSON

WORKERS = 2
RUN = uuid.uuid4().hex
END = {"end": RUN}  # was: None


def make_queue() -> BlockingQueue[Any]:
    return JournaledQueue("old-data", "jobs", codec=JSON).as_blocking_queue()  # was: return queue.Queue()


def worker(jobs: BlockingQueue[Any], handled: list[tuple[str, str]]) -> None:
    while True:
        job = jobs.get()
        if job == END:
            return
        if "end" not in job:  # else the sentinel of an earlier run
            handled.append((job["run"], job["name"]))


def main() -> None:
    jobs = make_queue()
    handled: list[tuple[str, str]] = []
    workers = [threading.Thread(target=worker, args=(jobs, handled)) for _ in range(WORKERS)]
    for thread in workers:
        thread.start()
    for number in range(20):
        jobs.put({"run": RUN, "name": f"job {number}"})
    for _ in workers:
        jobs.put(END)
    for thread in workers:
        thread.join()
    mine = sum(run == RUN for run, _ in handled)
    print(f"handled {mine} jobs of this run, and {len(handled) - mine} of earlier ones")
    for name in "abcde":
        jobs.put({"run": RUN, "name": name})
    assert [jobs.get(timeout=1)["name"], jobs.get_nowait()["name"]] == ["a", "b"]
    print("left for the next start:", jobs.qsize())
    jobs.close()

    jobs = make_queue()
    found = []
    while True:
        try:
            found.append(jobs.get_nowait()["name"])
        except queue.Empty:
            break
    print("found at the next start:", found)
    jobs.close()


if __name__ == "__main__":
    main()
