"""Workloads on Spark, ``local[2]``: reading a queue as a DataFrame, next to the same bytes in other formats.

All rows are made once for a run: items of 100 printable bytes, as closed segments, as Parquet files of as many rows,
and as JSON lines. *Cold* is the first read after the files have been put out of the page cache.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from bench.measure import Contender, Figures, LeftOut, Workload
from kestrelpy import JournaledQueue

ITEM_BYTES = 100
ROWS = 4_000_000
QUEUE = "rows"
_BATCH = 1000


@cache
def session() -> Any:
    """The one Spark session of a run. Raises ``LeftOut`` where Java is missing."""
    from kestrelpy.spark import JavaMissing, local_session

    settings: dict[str, Any] = {
        "spark.master": "local[2]",
        "spark.driver.memory": "4g",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": False,
    }
    try:
        made = local_session(**settings)
    except JavaMissing as missing:
        raise LeftOut(str(missing)) from None
    made.range(1000).selectExpr("sum(id)").collect()
    return made


def payloads(count: int) -> Iterator[list[bytes]]:
    """Items of printable bytes that do not compress, in lists; always the same ones."""
    chance = random.Random(1)
    pool = "".join(chance.choices(string.ascii_letters + string.digits, k=1 << 20)).encode("ascii")
    starts = len(pool) - ITEM_BYTES
    for first in range(0, count, _BATCH):
        places = [chance.randrange(starts) for _ in range(min(_BATCH, count - first))]
        yield [pool[at : at + ITEM_BYTES] for at in places]


@cache
def rows_folder(scale: float) -> Path:
    """A folder with all rows in every format, removed at the end of the run."""
    folder = Path(tempfile.mkdtemp(prefix="kestrelpy-bench-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_rows(folder, max(_BATCH, int(ROWS * scale)))
    return folder


def make_rows(folder: Path, count: int) -> None:
    """Write ``count`` rows in each format: one by one into the queue, as a service puts them."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    per_file = 16 * (1 << 20) // (ITEM_BYTES + 32)
    (folder / "parquet").mkdir()
    (folder / "json").mkdir()
    held: list[bytes] = []
    number = 0

    def flush() -> None:
        nonlocal held, number
        first = number * per_file + 1
        added_ms = 1_700_000_000_000
        columns = {
            "id": pa.array(range(first, first + len(held)), pa.int64()),
            "added": pa.array([added_ms * 1000] * len(held), pa.timestamp("us", "UTC")),
            "data": pa.array(held, pa.binary()),
        }
        parquet.write_table(pa.table(columns), folder / "parquet" / f"{number:05d}.parquet")
        with open(folder / "json" / f"{number:05d}.json", "w", encoding="ascii") as file:
            for item_id, data in enumerate(held, first):
                file.write(json.dumps({"id": item_id, "added": added_ms, "data": data.decode("ascii")}) + "\n")
        held, number = [], number + 1

    with JournaledQueue(folder / "queues", QUEUE, sync="never") as queue:
        for batch in payloads(count):
            for data in batch:
                queue.put(data)
                held.append(data)
                if len(held) == per_file:
                    flush()
        flush()


def forget(folder: Path) -> None:
    """Put the files of a folder out of the page cache, as far as the system does as it is asked."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# -- who reads, and how ----------------------------------------------------------------------------------------------


def all_columns(folder: Path) -> Any:
    reading = session().read.format("kestrel").option("queue", QUEUE).option("pushFilters", True)
    return reading.load(str(folder / "queues"))


def kestrel(folder: Path) -> Any:
    """The columns that the files have, too."""
    reading = session().read.format("kestrel").schema("id bigint, added timestamp, data binary")
    return reading.option("queue", QUEUE).option("pushFilters", True).load(str(folder / "queues"))


def parquet_files(folder: Path) -> Any:
    return session().read.parquet(str(folder / "parquet"))


def json_lines(folder: Path) -> Any:
    return session().read.schema("id bigint, added bigint, data string").json(str(folder / "json"))


def binary_files(folder: Path) -> Any:
    """``binaryFile`` and a plain parser in Python: the least that one would write by hand."""
    files = session().read.format("binaryFile").option("pathGlobFilter", "*.segment").load(str(folder / "queues"))
    return files.select("content").mapInArrow(parse_segments, "id bigint, added bigint, data binary")


def parse_segments(batches: Any) -> Any:
    """Frame by frame, with the checksum of each, as docs/format.md says."""
    import struct
    import zlib

    import pyarrow as pa

    head = struct.Struct("<IIQHIHII")
    for batch in batches:
        for content in batch.column(0):
            data = content.as_py()
            marker = int.from_bytes(data[12:16], "little")
            at, ids, added, items = 96, [], [], []
            while at + 32 <= len(data):
                crc, length, item_id, low, high, kind, _, mark = head.unpack_from(data, at)
                if mark != marker or kind != 0 or zlib.crc32(data[at + 4 : at + 32 + length]) != crc:
                    break
                ids.append(item_id)
                added.append(low | high << 16)
                items.append(data[at + 32 : at + 32 + length])
                at += 32 + length
            yield pa.record_batch({"id": ids, "added": added, "data": pa.array(items, pa.binary())})


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "kestrelpy": (kestrel, "queues"),
    "kestrelpy, all columns": (all_columns, "queues"),
    "Parquet": (parquet_files, "parquet"),
    "JSON lines": (json_lines, "json"),
    "binaryFile, parsed": (binary_files, "queues"),
}


@contextmanager
def timed(count: int, into: Figures, phase: str) -> Iterator[None]:
    """Microseconds an item of what is done inside."""
    began = time.perf_counter()
    yield
    into[phase] = (time.perf_counter() - began) / count * 1e6


def _read(name: str, _: Path, scale: float) -> Figures:
    """All columns into nothing, cold and warm, and one figure out of all items."""
    folder, figures = rows_folder(scale), Figures()
    reader, part = READERS[name]
    count = max(_BATCH, int(ROWS * scale))
    forget(folder / part)
    with timed(count, figures, "cold"):
        reader(folder).write.format("noop").mode("overwrite").save()
    with timed(count, figures, "warm"):
        reader(folder).write.format("noop").mode("overwrite").save()
    with timed(count, figures, "sum of lengths"):
        row = reader(folder).selectExpr("count(*)", "sum(length(data))").first()
    assert tuple(row) == (count, count * ITEM_BYTES), f"{name} has read {row}"
    return figures


def _convert(name: str, folder: Path, scale: float) -> Figures:
    """Into Parquet."""
    figures = Figures()
    with timed(max(_BATCH, int(ROWS * scale)), figures, "to Parquet"):
        READERS[name][0](rows_folder(scale)).select("id", "added", "data").write.parquet(str(folder / "out"))
    return figures


def _one_percent(name: str, _: Path, scale: float) -> Figures:
    """One row of a hundred, by id, from the middle; per item of the whole. Each ``load()`` has this one condition."""
    count, figures = max(_BATCH, int(ROWS * scale)), Figures()
    first, last = count // 2, count // 2 + count // 100 - 1
    with timed(count, figures, "1% by id"):
        rows = READERS[name][0](rows_folder(scale)).where(f"id between {first} and {last}")
        row = rows.selectExpr("count(*)", "sum(length(data))").first()
    assert row[0] == count // 100, f"{name} has found {row}"
    return figures


def _contenders(work: Callable[[str, Path, float], Figures]) -> tuple[Contender, ...]:
    def of(name: str) -> Callable[[Path, float], Figures]:
        return lambda folder, scale: work(name, folder, scale)

    return tuple(Contender(name, of(name)) for name in READERS)


WORKLOADS = (
    Workload(
        "spark-read",
        f"read {ROWS:,} items of 100 bytes as a DataFrame, on local[2]",
        "us an item",
        _contenders(_read),
        max_repeats=5,
    ),
    Workload("spark-filter", "the same, 1% of them", "us an item of all", _contenders(_one_percent), max_repeats=5),
    Workload("spark-parquet", "the same, into Parquet", "us an item", _contenders(_convert), max_repeats=3),
)
