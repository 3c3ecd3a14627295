"""Through pandas, polars and duckdb and back: streams, and exported files, have what ``scan`` has."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pytest

from kestrelpy import JournaledQueue
from kestrelpy.arrow import read
from kestrelpy.cli import main
from tests.arrow.rows import rows_of
from tests.support.journals import ROW, fill, scanned

Open = Callable[..., JournaledQueue]
SELECT = "select queue, id, added, expires, error_count, data, segment from {} order by id"


def of_table(table: pa.Table) -> list[ROW]:
    """Rows of a table that may have other widths and units."""
    return rows_of(table.cast(read_schema(table)).to_batches())


def read_schema(table: pa.Table) -> pa.Schema:
    """The schema of ``read``, for the columns of ``table``, in its order."""
    from kestrelpy.arrow.columns import schema_of

    return schema_of(table.column_names)


@pytest.fixture
def jobs(folder: Path, open_queue: Open) -> JournaledQueue:
    """Items of all kinds, in several segments, some of which were aborted."""
    queue = open_queue(segment_bytes=16 << 10)
    fill(queue, random.Random(8), 600)
    queue.put(b"until the end of days", expires_in=1e12)
    for item in queue.get_many(5):
        item.abort()
    queue.checkpoint()
    return queue


# -- streams ---------------------------------------------------------------------------------------------------------


def test_pandas(folder: Path, jobs: JournaledQueue) -> None:
    frame = read(folder, "jobs").read_pandas()
    assert frame["data"].tolist() == [row[4] for row in clamped(folder)]
    assert str(frame["added"].dtype) == "datetime64[us, UTC]"
    assert of_table(pa.Table.from_pandas(frame, preserve_index=False)) == clamped(folder)
    frame = read(folder, "jobs").read_pandas(types_mapper=pandas.ArrowDtype)
    assert of_table(pa.Table.from_pandas(frame, preserve_index=False)) == clamped(folder)


def test_polars(folder: Path, jobs: JournaledQueue) -> None:
    for make in (polars.from_arrow, polars.DataFrame):
        frame: Any = make(read(folder, "jobs"))
        assert of_table(frame.to_arrow()) == clamped(folder)


def test_duckdb(folder: Path, jobs: JournaledQueue) -> None:
    assert from_duckdb(read(folder, "jobs")) == clamped(folder)
    stream = read(folder, "jobs", columns=["data", "id"], start_id=10)
    found = duckdb.execute("select id from stream where octet_length(data) > 30 order by id").fetchall()
    assert [each[0] for each in found] == [row[0] for row in clamped(folder) if row[0] >= 10 and len(row[4]) > 30]
    assert len(stream.schema) == 2


def clamped(folder: Path) -> list[ROW]:
    """What ``scan`` shows, where an expiry after the year 9999 is shown as its end."""
    rows = scanned(folder)
    assert sum(row[3] for row in rows) == 5
    assert sum(row[2] is not None and row[2] > 1 << 57 for row in rows) == 1
    return rows


def from_duckdb(stream: Any) -> list[ROW]:
    assert stream is not None  # duckdb finds it by its name
    found: Any = duckdb.execute(SELECT.format("stream")).fetchall()
    return [(*(row[1:2]), micros(row[2]), micros(row[3]), *row[4:]) for row in found]


def micros(instant: Any) -> int | None:
    """An instant of duckdb, in microseconds."""
    if instant is None:
        return None
    found: int = pa.scalar(instant, pa.timestamp("us", tz="UTC")).value
    return found


def test_an_empty_queue_has_columns_everywhere(folder: Path, open_queue: Open) -> None:
    open_queue()
    names = ["id", "data"]
    frame: Any = polars.from_arrow(read(folder, "jobs", columns=names))
    assert (frame.shape, frame.columns) == ((0, 2), names)
    assert list(read(folder, "jobs", columns=names).read_pandas().columns) == names
    stream = read(folder, "jobs")
    assert duckdb.execute("select count(*) from stream").fetchall() == [(0,)]
    assert len(stream.schema) == 7


def test_damage_ends_what_is_built_of_it(folder: Path, jobs: JournaledQueue) -> None:
    """The error is not swallowed on its way through C, and says where."""
    jobs.close()
    path = sorted(folder.glob("*.segment"))[1]
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=str(path)):
        polars.from_arrow(read(folder, "jobs"))
    with pytest.raises(Exception, match=str(path)):
        read(folder, "jobs").read_pandas()
    stream = read(folder, "jobs")
    with pytest.raises(Exception, match=str(path)):
        duckdb.execute("select sum(id) from stream").fetchall()
    assert len(stream.schema) == 7


# -- files -----------------------------------------------------------------------------------------------------------


def exported(folder: Path, kind: str) -> str:
    path = str(folder.parent / f"x.{kind}")
    assert main(["export", str(folder), "jobs", "--format", kind, "--output", path]) == 0
    return path


def test_parquet_files(folder: Path, jobs: JournaledQueue) -> None:
    path = exported(folder, "parquet")
    assert of_table(pa.Table.from_pandas(pandas.read_parquet(path), preserve_index=False)) == clamped(folder)
    assert of_table(polars.read_parquet(path).to_arrow()) == clamped(folder)
    found: Any = duckdb.execute(SELECT.format(f"'{path}'")).fetchall()
    assert [(row[1], micros(row[2]), micros(row[3]), *row[4:]) for row in found] == clamped(folder)


def test_arrow_files(folder: Path, jobs: JournaledQueue) -> None:
    path = exported(folder, "arrow")
    assert of_table(polars.read_ipc(path).to_arrow()) == clamped(folder)
    assert of_table(pa.Table.from_pandas(pandas.read_feather(path), preserve_index=False)) == clamped(folder)
    with pa.OSFile(path) as file:
        stream = pa.ipc.open_file(file).read_all()
    assert from_duckdb(stream) == clamped(folder)


def test_lines_of_json(folder: Path, jobs: JournaledQueue) -> None:
    path = exported(folder, "jsonl")
    rows = [(row[0], row[1] // 1000, row[4]) for row in clamped(folder)]
    frame = polars.read_ndjson(path)
    data = frame["data"].str.decode("base64").to_list()
    assert list(zip(frame["id"].to_list(), frame["added_ms"].to_list(), data, strict=True)) == rows
    other = pandas.read_json(path, lines=True, convert_dates=False)
    assert list(zip(other["id"].tolist(), other["added_ms"].tolist(), strict=True)) == [row[:2] for row in rows]
    found = duckdb.execute(f"select id, added_ms, from_base64(data) from read_json('{path}') order by id").fetchall()
    assert found == rows
