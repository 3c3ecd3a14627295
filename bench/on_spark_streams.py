"""Workloads on Spark that move items: a stream into Parquet, the sink, the buffer of a driver.

``python -m bench.on_spark_streams FOLDER ITEMS RATE [STORE]`` is the service beside a stream: a process of its own that
puts ``ITEMS`` items at ``RATE`` a second, and says when it began. With ``STORE``, a URL, its queue is shipped there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Contender, Figures, Workload, percentile
from bench.on_spark import ITEM_BYTES, QUEUE, READERS, ROWS, payloads, rows_folder, session, timed
from kestrelpy import JournaledQueue, scan

STREAM_ITEMS, STREAM_RATE = 6_000_000, 400_000
SPARSE_ITEMS, SPARSE_RATE = 20_000, 1000
SINK_ITEMS = 2_000_000
BUFFER_ITEMS = 500_000
READER = "spark"


def put(folder: str, items: int, rate: float, store: str | None = None) -> None:
    """The service: at a steady pace, in batches of a hundredth of a second, or one by one below 10,000 a second."""
    with JournaledQueue(folder, QUEUE, ship=store) as queue:
        print(time.time(), flush=True)
        began, done = time.monotonic(), 0
        for batch in payloads(items):
            size = 1 if rate < 10_000 else len(batch)
            for first in range(0, len(batch), size):
                queue.put_many(batch[first : first + size])
                done += size
                time.sleep(max(0.0, began + done / rate - time.monotonic()))


@contextmanager
def _service(folder: Path, items: int, rate: int, store: str | None) -> Iterator[float]:
    """Beside what is done inside; when it began, in seconds since the epoch."""
    command = [sys.executable, "-m", "bench.on_spark_streams", str(folder), str(items), str(rate)]
    if store is not None:
        command.append(store)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        try:
            yield float(service.stdout.readline())
            assert service.wait() == 0, "the service has failed"
        finally:
            service.kill()


def _run_stream(folder: Path, items: int, rate: int, store: str | None = None) -> tuple[float, list[tuple[int, float]]]:
    """When the service began, and for each batch the last id in it and when the sink had committed it. With ``store``,
    a URL, the query reads there.
    """
    queues, checkpoint = folder / "queues", folder / "checkpoint"
    with JournaledQueue(queues, QUEUE, ship=store) as queue:
        queue.reader(READER, start="earliest").close()
    source = session().readStream.format("kestrel").option("queue", QUEUE).option("reader", READER)
    writing = (
        source.load(store or str(queues)).writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
    )
    query = writing.start(str(folder / "out"))
    try:
        with _service(queues, items, rate, store) as began:
            while _last_id(query) < items:
                if query.exception() is not None:
                    raise query.exception()
                time.sleep(0.05)
    finally:
        query.stop()
    batches = sorted(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    ends = [json.loads((checkpoint / "offsets" / str(one)).read_text().splitlines()[-1])["id"] for one in batches]
    return began, list(zip(ends, [(checkpoint / "commits" / str(one)).stat().st_mtime for one in batches], strict=True))


def _last_id(query: Any) -> int:
    """The last id that the sink has."""
    progress = query.lastProgress
    end = progress["sources"][0]["endOffset"] if progress else None
    return int((json.loads(end) if isinstance(end, str) else end)["id"]) if end else 0


def _sustained(folder: Path, scale: float) -> Figures:
    items = int(STREAM_ITEMS * scale)
    began, commits = _run_stream(folder, items, STREAM_RATE)
    count = session().read.parquet(str(folder / "out")).selectExpr("count(distinct id)").first()[0]
    assert count == items, f"{count} of {items} items are in the sink"
    first = commits[0][1] if len(commits) > 2 else began
    done = commits[0][0] if len(commits) > 2 else 0
    return {
        "thousand items a second, from the first put": items / (commits[-1][1] - began) / 1000,
        "thousand items a second, after the first batch": (items - done) / (commits[-1][1] - first) / 1000,
    }


def _latency(folder: Path, scale: float, *, by_store: bool = False) -> Figures:
    items = int(SPARSE_ITEMS * scale)
    _, commits = _run_stream(folder, items, SPARSE_RATE, f"file://{folder}/store" if by_store else None)
    waits, at = [], 0
    for record in scan(folder / "queues", QUEUE):
        while commits[at][0] < record.id:
            at += 1
        waits.append(commits[at][1] - record.added_ms / 1000)
    return {"seconds p50": percentile(waits, 0.5), "seconds p99": percentile(waits, 0.99)}


def _sink(format_name: str, folder: Path, scale: float) -> Figures:
    """Rows of Parquet into a queue that nobody has open, or into files."""
    figures = Figures()
    count = min(int(SINK_ITEMS * scale), int(ROWS * scale))
    rows = READERS["Parquet"][0](rows_folder(scale)).where(f"id <= {count}").select("data")
    out = str(folder / "out")
    with timed(count, figures, "sink"):
        writer = rows.write.format(format_name).mode("append")
        (writer.option("queue", QUEUE) if format_name == "kestrel" else writer).save(out)
    if format_name == "kestrel":
        with JournaledQueue(out, QUEUE) as queue:
            assert queue.stats().tail_id == count, f"{queue.stats().tail_id} of {count} items are in the queue"
    return figures


def _buffer(folder: Path, scale: float) -> Figures:
    """Items that wait in a queue of this process, by batches of 10,000, each counted by Spark."""
    from kestrelpy.spark import DriverBuffer

    count, figures = int(BUFFER_ITEMS * scale), Figures()
    with JournaledQueue(folder, QUEUE) as queue:
        for batch in payloads(count):
            queue.put_many(batch)
        seen: list[int] = []
        buffer = DriverBuffer(queue, session(), lambda rows, _: seen.append(rows.count()))
        with timed(count, figures, "buffer"), buffer:
            while sum(seen) < count:
                time.sleep(0.01)
        assert sum(seen) == count, f"{sum(seen)} of {count} items came"
    return figures


WORKLOADS = (
    Workload(
        "spark-stream",
        f"a service puts {STREAM_RATE:,} items a second; a query writes them as Parquet",
        "",
        (Contender("kestrelpy", _sustained),),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "spark-latency",
        f"the same with {SPARSE_RATE:,} a second: from the put to the sink's commit, at the default trigger",
        "",
        (Contender("kestrelpy", _latency), Contender("a folder as store", partial(_latency, by_store=True))),
        max_repeats=1,
        warm_up=False,
    ),
    Workload(
        "spark-sink",
        f"a DataFrame of {SINK_ITEMS:,} items of {ITEM_BYTES} bytes into a queue, and into files",
        "us an item",
        tuple(
            Contender(name, partial(_sink, form))
            for name, form in (("kestrelpy", "kestrel"), ("Parquet", "parquet"), ("JSON lines", "json"))
        ),
        max_repeats=3,
    ),
    Workload(
        "spark-buffer",
        f"DriverBuffer: {BUFFER_ITEMS:,} items through a count, 10,000 at a time",
        "us an item",
        (Contender("kestrelpy", _buffer),),
        max_repeats=3,
    ),
)


if __name__ == "__main__":
    put(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:5])
