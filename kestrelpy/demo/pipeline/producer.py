"""The service: ``python -m kestrelpy.demo.pipeline.producer FOLDER``. Puts lines at a steady pace until all are in.

Killed and started again, it goes on behind the last line that the queue has: ids are dense, so the tail says which.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from kestrelpy import JournaledQueue
from kestrelpy.codecs import JSON
from kestrelpy.demo.corpus import Corpus
from kestrelpy.demo.pipeline._plan import LINES, READER, PipelineRun, items

BATCH = 200


def produce(plan: PipelineRun) -> None:
    """Put what is missing, then stay until the query is through, so that segments go into the archive."""
    with JournaledQueue(
        plan.queues, LINES, codec=JSON, segment_bytes=plan.segment_bytes, archive_dir=plan.archive
    ) as queue:
        if not queue.stats().tail_id:
            queue.reader(READER, start="earliest").close()  # its place is kept from the first line on
        put_missing(queue, plan)
        queue.sync()
        (plan.root / "put.done").touch()
        wait_for(plan.root / "read.done")


def put_missing(queue: JournaledQueue, plan: PipelineRun) -> None:
    """Put the lines behind the tail, at the pace of the plan."""
    tail_id = queue.stats().tail_id
    rest = itertools.islice(items(Corpus.load(plan.root / "corpus.json"), plan.lines), tail_id, None)
    began, done = time.monotonic(), 0
    early = plan.lines // 4  # that much is there when the query comes; the rest is put beside it
    while batch := list(itertools.islice(rest, BATCH)):
        tail_id = queue.put_many(batch)[-1]
        done += len(batch)
        (plan.root / "put").write_text(str(tail_id), encoding="ascii")
        if tail_id >= early and wait_for(plan.root / "batch"):
            began = time.monotonic() - done / plan.pace
        time.sleep(max(0.0, began + done / plan.pace - time.monotonic()))


def wait_for(path: Path) -> bool:
    """Until another process has made the file; whether it was not there yet."""
    waited = False
    while not path.exists():
        waited = True
        time.sleep(0.05)
    return waited


if __name__ == "__main__":
    produce(PipelineRun.load(sys.argv[1]))
