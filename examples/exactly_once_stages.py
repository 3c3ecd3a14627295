"""Three stages, each a process, with an exactly-once hand-over from queue to queue, and into a table at the end.

    python exactly_once_stages.py

Lines go from the queue "raw" to the queue "clean", from there to "priced", and from there into SQLite. In the middle
the second stage is killed with SIGKILL and started again. Look at the number of rows. It prints:

    the second stage was killed and started again
    200 rows of this run
    all rows: ..., each once: True

How it works: a stage publishes its results under the name of its source (``app_id``), with the id of the last item that
they are made of as the ``version``. After a kill it asks for the last version, and leaves out what was handed over.
A kill at any moment, of all processes too, loses no line and doubles none: start the program again in the same folder.
"""

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable

from kestrelpy import JournaledQueue, inbox

FOLDER, RESULTS, LINES = "stages-data", "results.db", 200


def clean(line: bytes) -> bytes:
    return line.strip().lower()


def price(line: bytes) -> bytes:
    time.sleep(0.001)  # it asks somebody
    return line + b" 3.50"


def stage(source: str, work: Callable[[bytes], bytes], target: str) -> None:
    """Own the queue ``source``, and hand over to ``target`` what ``work`` makes of its items."""
    with JournaledQueue(FOLDER, source, sync="always", inbox_interval=0.02) as queue:  # an id is never given out again
        done = inbox.last_version(FOLDER, target, source) or 0
        while True:
            items = queue.get_many(20)  # in the order of their ids; after a kill from the last checkpoint on
            results = [work(item.data) for item in items if item.id > done]
            if results:
                inbox.put_many(FOLDER, target, results, app_id=source, version=items[-1].id)
            queue.commit_many(items)


def store(source: str) -> None:
    """The last stage: the id of the item is the key of its row."""
    with JournaledQueue(FOLDER, source, sync="always", inbox_interval=0.02) as queue, contextlib.closing(rows()) as db:
        while True:
            items = queue.get_many(20)
            with db:
                values = [(item.id, item.data.decode()) for item in items]
                db.executemany("INSERT OR IGNORE INTO results VALUES (?, ?)", values)
            queue.commit_many(items)


def rows() -> sqlite3.Connection:
    db = sqlite3.connect(RESULTS, timeout=20)
    db.execute("CREATE TABLE IF NOT EXISTS results (id INTEGER PRIMARY KEY, line TEXT)")
    return db


def main() -> None:
    run = (inbox.last_version(FOLDER, "raw", "input") or 0) + 1
    inbox.put_many(FOLDER, "raw", [b" Line %d/%d\n" % (run, n) for n in range(LINES)], app_id="input", version=run)
    spawn = multiprocessing.get_context("spawn")
    stages = [("raw", clean, "clean"), ("clean", price, "priced")]
    second = [spawn.Process(target=stage, args=stages[1], daemon=True) for _ in range(2)]
    others = [spawn.Process(target=stage, args=stages[0], daemon=True)]
    others.append(spawn.Process(target=store, args=("priced",), daemon=True))
    for process in (*others, second[0]):
        process.start()
    with contextlib.closing(rows()) as db:
        mine = "SELECT count(*) FROM results WHERE line LIKE ?"
        killed = False
        while (count := db.execute(mine, (f"line {run}/%",)).fetchone()[0]) < LINES or not killed:
            if count and not killed:
                os.kill(second[0].pid or 0, signal.SIGKILL)
                second[0].join()
                second[1].start()
                killed = True
                print("the second stage was killed and started again", flush=True)
            time.sleep(0.01)
        print(count, "rows of this run")
        total, lines = db.execute("SELECT count(*), count(DISTINCT line) FROM results").fetchone()
        print(f"all rows: {total}, each once: {total == lines == LINES * run}")
    for process in (*others, second[1]):
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
