"""The service: ``python -m kestrelpy.demo.pipeline.producer FOLDER``. Puts lines at a steady pace until all are put.

If it is killed and started again, it continues after the last line that the queue has. Ids have no gaps, so the tail
says which line that is.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from pathlib import Path

from kestrelpy import JournaledQueue, QueueEmpty
from kestrelpy.codecs import JSON
from kestrelpy.demo.corpus import Corpus
from kestrelpy.demo.pipeline._plan import LINES, READER, PipelineRun, items

BATCH = 200


def produce(plan: PipelineRun) -> None:
    """Put the missing lines, and then stay until the query is done, so that segments go into the archive."""
    with JournaledQueue(
        plan.queues, LINES, codec=JSON, segment_bytes=plan.segment_bytes, archive_dir=plan.archive, ship=plan.ship
    ) as queue:
        if not queue.stats().tail_id:
            queue.reader(READER, start="earliest").close()  # so that lines are kept for it from the first one on
        put_missing(queue, plan)
        queue.sync()
        (plan.root / "put.done").touch()
        wait_for(plan.root / "read.done")


def put_missing(queue: JournaledQueue, plan: PipelineRun) -> None:
    """Put the lines after the tail, at the pace of the plan."""
    tail_id = queue.stats().tail_id
    rest = itertools.islice(items(Corpus.load(plan.root / "corpus.json"), plan.lines), tail_id, None)
    began, done = time.monotonic(), 0
    early = plan.lines // 4  # so many lines are there when the query starts; the others are put while it runs
    while batch := list(itertools.islice(rest, BATCH)):
        tail_id = queue.put_many(batch)[-1]
        done += len(batch)
        if queue.shipping is not None:
            pass_on(queue)
        (plan.root / "put").write_text(str(tail_id), encoding="ascii")
        if tail_id >= early and wait_for(plan.root / "batch"):
            began = time.monotonic() - done / plan.pace
        time.sleep(max(0.0, began + done / plan.pace - time.monotonic()))


def pass_on(queue: JournaledQueue) -> None:
    """Spark reads what is in the store, and is no reader here: have the lines there, and let their segments go."""
    assert queue.shipping is not None
    queue.shipping.flush()
    reader = queue.reader(READER)
    with contextlib.suppress(QueueEmpty):
        while True:
            reader.commit_many(reader.get_many(1000, timeout=0))


def wait_for(path: Path) -> bool:
    """Wait until another process has made the file. Returns false if it was there already."""
    waited = False
    while not path.exists():
        waited = True
        time.sleep(0.05)
    return waited


if __name__ == "__main__":
    produce(PipelineRun.load(sys.argv[1]))
