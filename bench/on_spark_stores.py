"""The rows of ``on_spark``, shipped to a store, next to the same rows in the owner's folder: ``local[2]``.

The store is a folder, and SeaweedFS on the loopback, which shares the processors with Spark. Nothing is put out of the
page cache: a store's own memory can't be.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from bench.measure import Contender, Figures, LeftOut, Workload
from bench.on_spark import ITEM_BYTES, QUEUE, ROWS, kestrel, rows_folder, session, timed
from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship, detach
from tests.support import seaweed

OWNERS_FOLDER, FOLDER, OBJECTS = "the owner's folder", "a folder as store", "SeaweedFS"


@cache
def _server() -> seaweed.Seaweed:
    """One for the run, started before Spark: its workers find the credentials in the environment that it began with."""
    if seaweed.program() is None:
        raise LeftOut(seaweed.NOT_INSTALLED)
    closing = contextlib.ExitStack()
    atexit.register(closing.close)
    server = closing.enter_context(seaweed.seaweed())
    os.environ.update({"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret})
    return server


@cache
def _shipped(name: str, scale: float) -> dict[str, str]:
    """The options that read all rows from a store, to which they have been shipped."""
    folder = rows_folder(scale)
    url, secrets, options = f"file://{folder}/store", None, {}
    if name == OBJECTS:
        url, secrets = f"s3://{seaweed.BUCKET}/rows", _server().options()
        options = {"storeEndpoint": _server().endpoint, "storeRegion": "us-east-1", "storeAllowHttp": "true"}
    with JournaledQueue(folder / "queues", QUEUE, sync="never", ship=Ship(url, options=secrets)) as queue:
        assert queue.shipping is not None
        queue.shipping.flush()
    detach(folder / "queues", QUEUE)
    return {"path": url, "queue": QUEUE, **options}


def _rows(name: str, scale: float) -> Any:
    if name == OWNERS_FOLDER:
        return kestrel(rows_folder(scale))
    reading = session().read.format("kestrel").schema("id bigint, added timestamp, data binary")
    return reading.options(pushFilters="true", **_shipped(name, scale)).load()


def _read(name: str) -> Callable[[Path, float], Figures]:
    def measure(_: Path, scale: float) -> Figures:
        count, figures = max(1000, int(ROWS * scale)), Figures()
        with contextlib.suppress(LeftOut):
            _server()
        rows = _rows(name, scale)
        with timed(count, figures, "read"):
            rows.write.format("noop").mode("overwrite").save()
        with timed(count, figures, "sum of lengths"):
            row = rows.selectExpr("count(*)", "sum(length(data))").first()
        assert tuple(row) == (count, count * ITEM_BYTES), f"{name} has read {row}"
        return figures

    return measure


WORKLOADS = (
    Workload(
        "spark-store",
        f"read {ROWS:,} items of 100 bytes as a DataFrame, from the owner's folder and from a store, on local[2]",
        "us an item",
        tuple(Contender(name, _read(name)) for name in (OWNERS_FOLDER, FOLDER, OBJECTS)),
        max_repeats=5,
    ),
)
