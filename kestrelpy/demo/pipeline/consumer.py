"""The consumer of alerts: ``python -m kestrelpy.demo.pipeline.consumer FOLDER``. Owns the queue of alerts.

It ingests the batches that the query publishes in the inbox, or in the store, and reads their items like any others.
For each item it writes a line to its ledger: the id that the line had in the first queue, and its text.
"""

from __future__ import annotations

import json
import sys

from kestrelpy import JournaledQueue, QueueEmpty
from kestrelpy.codecs import JSON
from kestrelpy.demo.pipeline._plan import ALERTS, PipelineRun


def consume(plan: PipelineRun) -> None:
    """Write alerts to the ledger until the query is done and no alert is left."""
    with (
        JournaledQueue(plan.queues, ALERTS, codec=JSON, inbox_interval=0.2, ship=plan.ship) as queue,
        open(plan.root / "alerts.ledger", "a", encoding="utf-8") as ledger,
    ):
        while True:
            over = (plan.root / "read.done").exists()
            if over:
                queue.take_in()
            try:
                with queue.get(timeout=0 if over else 0.2) as item:
                    ledger.write(json.dumps(item.value) + "\n")
            except QueueEmpty:
                ledger.flush()
                if over:
                    return


if __name__ == "__main__":
    consume(PipelineRun.load(sys.argv[1]))
