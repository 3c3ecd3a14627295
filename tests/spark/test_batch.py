"""The batch read, as Spark runs it: rows, filters, options, and a writer at work meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kestrelpy import CorruptJournal, InvalidName, JournaledQueue
from kestrelpy.arrow.columns import ARROW_SCHEMA, SCHEMA
from kestrelpy.spark import FilesNotSeen
from kestrelpy.spark.read.batch import BatchReader, FilteringReader, batch_reader
from kestrelpy.testing import ManualClock
from tests.spark.journals import read_part
from tests.spark.sessions import need_java, slow_spark, spark  # noqa: F401 - a fixture
from tests.support.journals import ROW, fill, fill_over_time, scanned
from tests.support.paths import ROOT
from tests.support.queues import START_MS

Open = Callable[..., JournaledQueue]
COLUMNS = from_arrow_schema(ARROW_SCHEMA)


def load(spark: Any, folder: Path, **options: Any) -> Any:  # noqa: F811
    return spark.read.format("kestrel").options(**options).load(str(folder))


def collected(frame: Any) -> list[ROW]:
    """The rows of a DataFrame as ``row_of`` has them, in the order of ids."""
    table = frame.select("id", "added", "expires", "error_count", "data", "segment").toArrow()
    columns = [table[0], table[1].cast("int64"), table[2].cast("int64"), *table.columns[3:]]
    return sorted(zip(*(column.to_pylist() for column in columns), strict=True))


@pytest.fixture
def jobs(folder: Path, open_queue: Open, clock: ManualClock) -> JournaledQueue:
    """A queue of several segments in which time goes by, and which is still open."""
    queue = open_queue(segment_bytes=16 << 10)
    fill_over_time(queue, clock)
    return queue


def test_what_spark_reads_is_what_scan_reads(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    frame = load(spark, folder, queue="jobs", minPartitionBytes=1)
    assert ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema) == SCHEMA
    assert collected(frame) == scanned(folder)
    assert frame.rdd.getNumPartitions() > 3
    assert load(spark, folder).rdd.getNumPartitions() == 1


def test_filters_are_followed_to_the_letter(folder: Path, jobs: JournaledQueue) -> None:
    rows = scanned(folder)
    micros = rows[len(rows) // 2][1]
    then, later = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros + more) for more in (0, 999))
    i, a, q = ("id",), ("added",), ("queue",)
    cases: list[tuple[list[Filter], Callable[[ROW], bool]]] = [
        ([EqualTo(i, 100)], lambda row: row[0] == 100),
        ([EqualNullSafe(i, 100)], lambda row: row[0] == 100),
        ([GreaterThan(i, 100), LessThanOrEqual(i, 120)], lambda row: 100 < row[0] <= 120),
        ([GreaterThanOrEqual(i, 100), LessThan(i, 120), IsNotNull(i)], lambda row: 100 <= row[0] < 120),
        ([In(i, (5, 7, 600, 1000000, None))], lambda row: row[0] in (5, 7, 600)),
        ([In(i, (5, 7, 600)), In(i, (7, 9)), GreaterThan(i, -1)], lambda row: row[0] == 7),
        ([GreaterThan(i, 3), LessThan(i, 2)], lambda row: False),
        ([EqualTo(a, then)], lambda row: row[1] == micros),
        ([EqualTo(a, later)], lambda row: False),
        ([GreaterThan(a, then)], lambda row: row[1] > micros),
        ([GreaterThanOrEqual(a, later)], lambda row: row[1] > micros),
        ([LessThan(a, then)], lambda row: row[1] < micros),
        ([LessThan(a, later)], lambda row: row[1] <= micros),
        ([LessThanOrEqual(a, later), GreaterThan(i, 9)], lambda row: row[1] <= micros and row[0] > 9),
        ([In(a, (then, later))], lambda row: row[1] == micros),
        ([EqualTo(q, "jobs"), LessThan(i, 3)], lambda row: row[0] < 3),
        ([GreaterThanOrEqual(q, "jobs"), LessThanOrEqual(q, "jobs")], lambda row: True),
        ([GreaterThan(q, "jobs")], lambda row: False),
        ([LessThan(q, "jobs")], lambda row: False),
        ([In(q, ("a", None))], lambda row: False),
    ]
    for filters, right in cases:
        reader = FilteringReader({"path": str(folder)}, COLUMNS)
        assert list(reader.pushFilters(filters)) == []
        found = [row for part in reader.partitions() for row in read_part(part)[0]]
        assert found == [row for row in rows if right(row)], filters


def test_filters_that_cannot_be_followed_are_left_to_spark(folder: Path, jobs: JournaledQueue) -> None:
    naive = datetime(2026, 1, 1)
    left: list[Filter] = [
        Not(EqualTo(("id",), 3)),
        EqualTo(("id",), 3.0),
        EqualTo(("id",), True),
        In(("id",), (3, 4.5)),
        EqualTo(("added",), naive),
        In(("added",), (naive,)),
        IsNotNull(("expires",)),
        IsNull(("id",)),
        EqualTo(("data",), b"x"),
        EqualTo(("queue", "id"), 3),
        EqualTo(("queue",), 3),
        StringStartsWith(("queue",), "j"),
    ]
    reader = FilteringReader({"path": str(folder)}, COLUMNS)
    assert list(reader.pushFilters([*left, EqualTo(("id",), 4)])) == left
    assert [row[0] for part in reader.partitions() for row in read_part(part)[0]] == [4]


def test_one_load_may_be_used_with_several_filters(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    """Unless it is told to follow them: Spark would take what one of them has planned for all."""
    frame, count = load(spark, folder), len(scanned(folder))
    assert frame.where("id <= 3").count() == 3
    assert frame.where("id = 3 or expires is not null").where("id < 4").count() == 1
    assert frame.count() == count
    assert frame.where("id = 1").union(frame.where("id > 2")).count() == count - 1


def test_spark_hands_its_filters_over(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    rows = scanned(folder)
    when = rows[len(rows) // 2][1]
    condition = f"queue = 'jobs' and id in (5, 7, 600) and added >= timestamp_micros({when})"
    frame = load(spark, folder, pushFilters=True).where(condition)
    assert "Filter (" not in frame._jdf.queryExecution().executedPlan().toString()
    assert collected(frame) == [row for row in rows if row[0] in (5, 7, 600) and row[1] >= when]


def test_options_say_what_is_read(folder: Path, jobs: JournaledQueue) -> None:
    rows = scanned(folder)
    stop_ms = rows[300][1] // 1000
    stop = datetime.fromtimestamp(stop_ms / 1000, UTC)
    assert rows_read(folder, startId="7", endId="9") == rows[6:8]
    assert rows_read(folder, startTime=str(START_MS + 1), endTime=stop.isoformat()) == [
        row for row in rows if START_MS * 1000 < row[1] < stop_ms * 1000
    ]
    assert rows_read(folder, endTime=stop.replace(tzinfo=None).isoformat()) == [
        row for row in rows if row[1] < stop_ms * 1000
    ]
    assert rows_read(folder, startTime="2100-01-01") == []


def rows_read(folder: Path, **options: str) -> list[ROW]:
    reader = BatchReader({"path": str(folder), "queue": "jobs", **options}, COLUMNS)
    return [row for part in reader.partitions() for row in read_part(part)[0]]


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "FILE://{}/", "{}"])
def test_a_folder_may_be_written_as_spark_writes_it(
    folder: Path, jobs: JournaledQueue, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    rows = scanned(folder)
    assert rows_read(folder, path=form.format(folder)) == rows
    monkeypatch.chdir(folder.parent)
    assert rows_read(folder, path=folder.name) == rows
    folder.rename(odd := folder.parent / "a%20b: c")
    assert rows_read(odd, path=form.format(odd)) == rows, "it is a path, and nothing in it is decoded"
    odd.rename(folder)


def test_a_view_of_a_queue_is_read(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    spark.sql(f"CREATE TEMPORARY VIEW of_jobs USING kestrel OPTIONS (path 'file:{folder}', queue 'jobs')")
    assert spark.table("of_jobs").count() == len(scanned(folder))


def test_all_queues_of_a_folder(spark: Any, folder: Path, jobs: JournaledQueue, open_queue: Open) -> None:  # noqa: F811
    for number in range(5):
        open_queue(f"q{number}").put(b"%d" % number)
    frame = load(spark, folder)
    counts = {row["queue"]: row["count"] for row in frame.groupBy("queue").count().collect()}
    assert counts == {"jobs": len(scanned(folder)), **{f"q{number}": 1 for number in range(5)}}
    assert [row.data for row in frame.where("queue > 'q2'").orderBy("queue").collect()] == [b"3", b"4"]


def test_an_empty_queue_has_no_rows(spark: Any, folder: Path, open_queue: Open) -> None:  # noqa: F811
    open_queue()
    assert load(spark, folder, queue="jobs").count() == 0


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"queues": "jobs"}, ValueError, "reading kestrel has no option 'queues'; the options are archive, endId, "),
        ({"startId": "x"}, ValueError, "option startId must be a whole number of at least 0, not 'x'"),
        ({"minPartitionBytes": "0"}, ValueError, "option minPartitionBytes must be a whole number of at least 1"),
        ({"endTime": "noon"}, ValueError, "option endTime must be a time such as 2026-01-31T12:00:00Z"),
        ({"pushFilters": "yes"}, ValueError, "option pushFilters must be true or false, not 'yes'"),
        ({"queue": "other"}, LookupError, "there is no queue 'other' in "),
        ({"queue": "a/b"}, InvalidName, "invalid name 'a/b'"),
        ({"archive": "/nowhere"}, FileNotFoundError, "there is no folder /nowhere"),
        ({"path": "/nowhere"}, FileNotFoundError, "there is no folder /nowhere"),
        (
            {"path": "hdfs://host/q"},
            ValueError,
            "'hdfs://host/q' is not a folder of this machine, and a queue is in one",
        ),
        ({"path": "file://host/q"}, ValueError, "after file: comes an absolute path, and no other machine's name"),
        ({"archive": "file:q"}, ValueError, "after file: comes an absolute path"),
        ({"path": ""}, ValueError, r"reading kestrel needs the folder of the queues: load\(directory\)\. .*VIEW"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    folder: Path, jobs: JournaledQueue, options: dict[str, str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        batch_reader({"path": str(folder), **options}, COLUMNS)


def test_spark_shows_the_sentence(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    with pytest.raises(Exception, match="there is no queue 'other' in"):
        load(spark, folder, queue="other").count()
    with pytest.raises(Exception, match="may name some of them"):
        spark.read.format("kestrel").schema("id int").load(str(folder)).count()


def test_a_schema_names_the_columns_that_are_wanted(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    frame = spark.read.format("kestrel").schema("data binary, id bigint").load(str(folder))
    assert frame.columns == ["data", "id"]
    assert sorted((row.id, row.data) for row in frame.collect()) == [(row[0], row[4]) for row in scanned(folder)]
    assert frame.selectExpr("sum(id)").first()[0] == sum(row[0] for row in scanned(folder))


def test_a_schema_of_ones_own_is_refused(folder: Path, jobs: JournaledQueue) -> None:
    with pytest.raises(
        ValueError, match=r"has the columns queue string, .*: schema\(\) may name some of them, not id string"
    ):
        BatchReader({"path": str(folder)}, StructType().add("id", "string"))


def test_damage_is_an_error_that_names_it(spark: Any, folder: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    jobs.close()
    path = min(folder.glob("*.segment"))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"CorruptJournal.*item \d+ is not intact here"):
        load(spark, folder).count()


# -- beside a writer -------------------------------------------------------------------------------------------------


def test_segments_that_are_retired_after_planning_have_no_rows(folder: Path, jobs: JournaledQueue) -> None:
    rows = scanned(folder)
    parts = BatchReader({"path": str(folder)}, COLUMNS).partitions()
    consume(jobs, 400)
    kept = scanned(folder)
    assert len(kept) < len(rows)
    assert [row for part in parts for row in read_part(part)[0]] == kept


def test_segments_that_are_archived_after_planning_are_read_there(folder: Path, open_queue: Open) -> None:
    archive = folder.parent / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    fill(queue, random.Random(3), 300)
    rows = scanned(folder)
    parts = BatchReader({"path": str(folder), "archive": str(archive)}, COLUMNS).partitions()
    consume(queue, 300)
    assert len(list(archive.iterdir())) > 1
    assert [row for part in parts for row in read_part(part)[0]] == rows


def test_a_segment_that_a_reader_needs_is_missed(folder: Path, jobs: JournaledQueue) -> None:
    consume(jobs, 10)
    jobs.close()
    parts = BatchReader({"path": str(folder), "minPartitionBytes": "1"}, COLUMNS).partitions()
    min(folder.glob("*.segment")).unlink()
    with pytest.raises(CorruptJournal, match="a reader needs item 11; this segment is gone"):
        read_part(parts[0])
    with pytest.raises(CorruptJournal, match="a reader needs item 11; the journal begins after it"):
        BatchReader({"path": str(folder)}, COLUMNS).partitions()


def test_another_queue_in_the_place_of_one_is_told(folder: Path, jobs: JournaledQueue, open_queue: Open) -> None:
    parts = BatchReader({"path": str(folder)}, COLUMNS).partitions()
    jobs.erase()
    open_queue().put(b"another")
    with pytest.raises(FilesNotSeen, match="another queue of that name is there"):
        read_part(parts[0])


def consume(queue: JournaledQueue, count: int) -> None:
    queue.commit_many(queue.get_many(count))
    queue.checkpoint()


def test_a_writer_works_while_spark_reads(spark: Any, folder: Path, open_queue: Open) -> None:  # noqa: F811
    """What is read is a run of ids without a hole, from the first to at least what was there before."""
    archive = folder.parent / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    fill(queue, random.Random(3), 200)
    before = queue.stats().tail_id
    frame = load(spark, folder, queue="jobs", archive=archive, minPartitionBytes=1)
    ids = []
    for row in frame.select("id").toLocalIterator():  # one part after the other
        ids.append(row.id)
        if row.id % 50 == 0:
            fill(queue, random.Random(4), 20)
            consume(queue, 30)
    assert sorted(ids) == list(range(1, len(ids) + 1))
    assert len(ids) >= before
    assert len(list(archive.iterdir())) > 1


CLUSTER = """
    import sys
    sys.path[:0] = sys.argv[2:]
    from tests.spark.sessions import cluster
    with cluster() as spark:
        frame = spark.read.format("kestrel").option("minPartitionBytes", 1).load(sys.argv[1])
        print(frame.count(), frame.selectExpr("sum(id)").first()[0], frame.where("id > 20").count())
"""


@slow_spark
def test_executors_of_their_own_read_it(folder: Path, jobs: JournaledQueue) -> None:
    need_java()
    command = [sys.executable, "-c", textwrap.dedent(CLUSTER), str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    count = len(scanned(folder))
    assert done.stdout.split() == [str(count), str(count * (count + 1) // 2), str(count - 20)], done.stderr
