"""A driver that gets killed: ``killed_stream.py FOLDER [URL]``. Reads queue ``in`` with two queries: one writes
Parquet, the other puts what it reads into queue ``out``. Ends when both have everything that was put. ``URL``: of
the store in which Spark finds the queues.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kestrelpy import scan
from kestrelpy.spark import local_session
from tests.spark.sessions import QUIET


def last_id(query: Any) -> int:
    """Up to which id the sink of a query has everything."""
    progress = query.lastProgress
    end = progress["sources"][0]["endOffset"] if progress else None
    return int((json.loads(end) if isinstance(end, str) else end)["id"]) if end else 0


def main(folder: Path, url: str | None = None) -> None:
    spark = local_session(master="local[2]", **QUIET)
    queues = str(folder / "queues")
    place = url or queues

    def source(reader: str) -> Any:
        reading = spark.readStream.format("kestrel").option("queue", "in").option("reader", reader)
        return reading.option("maxItemsPerTrigger", 300).load(place).select("id", "data")

    files = source("files").writeStream.format("parquet").option("checkpointLocation", str(folder / "files.state"))
    items = source("items").select("data").writeStream.format("kestrel").option("queue", "out")
    items = items.option("checkpointLocation", str(folder / "items.state"))
    running = [files.start(str(folder / "files"))]
    while running[0].lastProgress is None:  # two that begin at once trip over each other, in Spark's own serialiser
        running[0].awaitTermination(0.05)
    running.append(items.start(place))
    while True:
        is_all = (folder / ("put" if url else "all.put")).exists()
        tail_id = max(record.id for record in scan(queues, "in"))
        if any(last_id(query) for query in running):
            (folder / "running").touch()
        if is_all and min(map(last_id, running)) >= tail_id:
            break
        for query in running:
            query.awaitTermination(0.05)  # raises what has ended it
    for query in running:
        query.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
