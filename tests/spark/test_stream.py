"""The streaming read: offsets, limits, parts, commits, what is lost; and whole queries."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from kestrelpy import InvalidName, JournaledQueue, KestrelError, NoDefaultReader, QueueLocked, Reader, open_reader
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.follow import FollowingView
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy.arrow.columns import ARROW_SCHEMA
from kestrelpy.ship import Ship, restore
from kestrelpy.spark.read import folder_feed
from kestrelpy.spark.read.folder_feed import FolderFeed
from kestrelpy.spark.read.part import SegmentPart
from kestrelpy.spark.read.run_counter import RunCounter
from kestrelpy.spark.read.stream import DataLoss, Offset, StreamReader
from kestrelpy.testing.stores import MemoryStore
from tests.spark.journals import read_part
from tests.spark.sessions import SPARK_PATIENCE, need_java, slow_spark, spark  # noqa: F401 - a fixture
from tests.support.budget import share
from tests.support.journals import ROW, fill, scanned
from tests.support.paths import ROOT
from tests.support.patience import until

Open = Callable[..., JournaledQueue]
Query = Callable[..., StreamReader]
COLUMNS = from_arrow_schema(ARROW_SCHEMA)
ALL = ReadAllAvailable()


@pytest.fixture
def query(folder: Path) -> Iterator[Query]:
    """``query(**options)``: the source of a query on ``jobs``, by the reader ``spark``; stopped at the end."""
    made: list[StreamReader] = []

    def make(**options: str) -> StreamReader:
        for earlier in made:
            earlier.stop()
        settings = {"path": str(folder), "queue": "jobs", "reader": "spark", **options}
        made.append(StreamReader(settings, COLUMNS))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def rows_between(source: StreamReader, start: Offset, end: Offset) -> list[ROW]:
    """What the tasks of a batch read, with what Spark does to them on the way."""
    parts = [pickle.loads(pickle.dumps(part)) for part in source.partitions(start, end)]
    return [row for part in parts for row in read_part(part)[0]]


def feed_of(source: StreamReader) -> FolderFeed:
    assert isinstance(source._feed, FolderFeed)
    return source._feed


def reader_of(source: StreamReader) -> Reader:
    reader = feed_of(source)._reader
    assert reader is not None
    return reader


def put(queue: JournaledQueue, count: int, size: int = 100) -> None:
    for _ in range(count):
        queue.put(bytes(size))


# -- offsets and batches ---------------------------------------------------------------------------------------------


def test_batches_are_the_items_in_order(folder: Path, open_queue: Open, query: Query) -> None:
    rnd = random.Random(1)
    queue = open_queue(segment_bytes=16 << 10)
    fill(queue, rnd, 300)
    source = query()
    offset, rows = source.initialOffset(), []
    assert offset["id"] == 0
    for _ in range(5):
        latest = source.latestOffset(offset, ALL)
        assert latest == {"id": queue.stats().tail_id, "queue": offset["queue"]}
        assert source.reportLatestOffset() == latest
        rows += rows_between(source, offset, latest)
        source.commit(latest)
        offset = latest
        fill(queue, rnd, 60)
    assert rows == scanned(folder, stop_id=offset["id"] + 1)
    latest = source.latestOffset(offset, ALL)
    assert source.latestOffset(latest, ALL) is latest
    assert source.partitions(latest, latest) == []


def test_a_query_that_is_started_while_its_queue_is_erased_is_of_what_is_there_then(
    folder: Path, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    queue.put(b"old")
    real = ReaderRegistry.reader

    def reader(self: ReaderRegistry, *arguments: Any) -> Any:
        queue.erase()
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ReaderRegistry, "reader", reader)
        place, _, _ = folder_feed.open_source(str(folder), "jobs", "q", "earliest")
    with closing(place):
        assert place.items == 0
    assert scanned(folder) == []


def test_an_empty_queue_and_its_first_item(open_queue: Open, query: Query) -> None:
    queue = open_queue()
    source = query()
    start = source.initialOffset()
    assert source.latestOffset(start, ALL) is start
    queue.put(b"a")
    end = source.latestOffset(start, ALL)
    assert [row[4] for row in rows_between(source, start, end)] == [b"a"]
    source.commit(end)
    again = query()
    assert again.latestOffset(end, ALL) == end


def test_a_new_query_begins_where_it_is_told_to(open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 10)
    queue.reader("other").close()
    assert query(reader="a").initialOffset()["id"] == 0
    assert query(reader="b", startingPosition="latest").initialOffset()["id"] == 10
    assert query(reader="c", startingPosition="4").initialOffset()["id"] == 3
    assert query(reader="c", startingPosition="earliest").initialOffset()["id"] == 3, "a reader that is there goes on"


def test_the_first_query_takes_over_what_nobody_has_read(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 10)
    queue.commit_many(queue.get_many(4))
    queue.close()
    open_queue()
    assert query().initialOffset()["id"] == 4


@pytest.mark.parametrize(("told", "first_id"), [("latest", 11), ("8", 8), ("500", 11)])
def test_the_first_query_begins_where_it_is_told_to(open_queue: Open, query: Query, told: str, first_id: int) -> None:
    """And what the default reader has not read stays its own, also where it was never opened."""
    queue = open_queue()
    put(queue, 10)
    source = query(startingPosition=told)
    offset = source.initialOffset()
    assert offset["id"] == first_id - 1
    put(queue, 1)
    assert source.latestOffset(offset, ALL)["id"] == 11
    source.stop()
    queue.close()
    assert [item.id for item in open_queue().get_many(20)] == list(range(1, 12))
    assert query(startingPosition="earliest").initialOffset()["id"] == first_id - 1, "a reader that is there goes on"


@pytest.mark.parametrize(("told", "first_id"), [("earliest", 1), ("3", 3), ("5", 5)])
def test_a_first_query_that_sees_all_takes_the_default_place_over(
    open_queue: Open, query: Query, told: str, first_id: int
) -> None:
    queue = open_queue()
    put(queue, 10)
    queue.commit_many(queue.get_many(4))
    queue.close()
    source = query(startingPosition=told)
    offset = source.initialOffset()
    assert offset["id"] == first_id - 1
    source.stop()
    assert query(startingPosition="latest").initialOffset()["id"] == first_id - 1
    with pytest.raises(NoDefaultReader):
        open_queue().get()


def test_a_first_query_beside_the_default_reader_at_work(open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 10)
    queue.commit_many(queue.get_many(4))
    assert query(startingPosition="3").initialOffset()["id"] == 2
    assert queue.get().id == 5
    assert query(reader="later", startingPosition="latest").initialOffset()["id"] == 10


def test_error_counts_are_shown(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 3)
    other = queue.reader("other", start="earliest")
    other.get()
    other.get().abort()
    other.checkpoint()
    source = query()
    start = source.initialOffset()
    rows = rows_between(source, start, source.latestOffset(start, ALL))
    assert [row[3] for row in rows] == [0, 1, 0]


def test_an_offset_names_only_what_is_on_disk(open_queue: Open, query: Query) -> None:
    queue = open_queue(sync="never")
    put(queue, 10)
    source = query()
    end = source.latestOffset(source.initialOffset(), ALL)
    view = feed_of(source)._source.view
    assert max(view.durable_id, view._synced_id) >= end["id"] == 10
    assert queue.stats().durable_id == 0, "the writer has not synced: the query has"


# -- limits ----------------------------------------------------------------------------------------------------------


def limited(source: StreamReader, limit: ReadLimit) -> list[int]:
    """The ids that batches end with."""
    offset, ends = source.initialOffset(), []
    while (latest := source.latestOffset(offset, limit)) is not offset:
        ends.append(latest["id"])
        offset = latest
    return ends


def test_items_and_bytes_of_a_batch_are_limited(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue(segment_bytes=4096)
    for size in [100] * 50 + [3000, 10, 10] + [0] * 5:
        queue.put(bytes(size))
    assert query().getDefaultReadLimit() == ALL
    assert query(maxItemsPerTrigger="20").getDefaultReadLimit() == ReadMaxRows(20)
    assert query(maxBytesPerTrigger="20").getDefaultReadLimit() == ReadMaxBytes(20)
    assert limited(query(), ALL) == [58]
    assert limited(query(), ReadMaxRows(20)) == [20, 40, 58]
    assert limited(query(), ReadMaxBytes(2000)) == [20, 40, 50, 51, 58], "at least one item, however large"
    assert limited(query(maxBytesPerTrigger="1500"), ReadMaxRows(20)) == [15, 30, 45, 50, 51, 58]
    assert limited(query(maxBytesPerTrigger="1500"), ALL) == [58]


def test_items_of_a_batch_are_counted_across_a_gap_of_ids(folder: Path, query: Query) -> None:
    """A queue that was taken over from a store gives out ids far above: no batch is spent on the ids in between."""
    store = MemoryStore()
    with JournaledQueue(folder.parent / "before", "jobs", ship=Ship(store)) as queue:
        put(queue, 25)
    restore(store, "jobs", folder)
    with JournaledQueue(folder, "jobs", ship=Ship(store)) as queue:
        put(queue, 25)
        far = queue.stats().tail_id
        assert far > 1 << 30
        assert limited(query(), ReadMaxRows(10)) == [10, 20, far - 20, far - 10, far]
        assert limited(query(), ReadMaxRows(25)) == [25, far]


def test_bytes_are_counted_exactly(folder: Path, open_queue: Open, query: Query) -> None:
    rnd = random.Random(8)
    fill(open_queue(segment_bytes=8192), rnd, 400)
    sizes = [len(row[4]) for row in scanned(folder)]
    source = query()
    source.initialOffset()
    for _ in range(share(200)):
        first, most = rnd.randrange(len(sizes)), rnd.randrange(9000)
        last = first
        while last + 1 < len(sizes) and sum(sizes[first : last + 2]) <= most:
            last += 1
        assert feed_of(source).reach(first + 1, len(sizes), most) == last + 1


def test_available_now_ends_with_what_there_is(open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 10)
    source = query()
    source.prepareForTriggerAvailableNow()
    put(queue, 10)
    assert limited(source, ReadMaxRows(4)) == [4, 8, 10]
    later = query()
    later.prepareForTriggerAvailableNow()
    assert later.latestOffset({"id": 10, "queue": ""}, ALL)["id"] == 20


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_large_segment_is_split_and_small_ones_come_together(open_queue: Open, query: Query) -> None:
    queue = open_queue(segment_bytes=64 << 20, sync="never")
    put(queue, 100_000)
    source = query()
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    parts = source.partitions(start, end)
    assert len(parts) >= 2
    read = [read_part(cast("SegmentPart", part)) for part in parts]
    assert [row[0] for rows, _ in read for row in rows] == list(range(1, 100_001))
    assert max(size for _, size in read) < 10_000_000
    small = open_queue("small", segment_bytes=4096)
    put(small, 300)
    tiny = query(queue="small")
    start = tiny.initialOffset()
    assert len(tiny.partitions(start, tiny.latestOffset(start, ALL))) == 1


def test_the_view_sees_what_the_core_sees(folder: Path, open_queue: Open) -> None:
    rnd = random.Random(6)
    queue = open_queue(segment_bytes=8192)
    directory = RealDisk().directory(str(folder))
    ours = FollowingView(directory, "jobs", counter=RunCounter(directory))
    theirs = FollowingView(directory, "jobs")
    for _ in range(share(60)):
        fill(queue, rnd, rnd.randrange(30))
        for view in (ours, theirs):
            view.follow()
        assert ours._end() == theirs._end() == (queue.stats().tail_id, queue.stats().put_bytes)
        assert [each.as_footer() for each in ours.segments] == [each.as_footer() for each in theirs.segments]
        for _ in range(3):
            item_id = rnd.randrange(1, max(ours.tail_id, 1) + 2)
            assert ours.before(item_id) == theirs.before(item_id)
    for view in (ours, theirs):
        view.close()
    directory.close()


# -- commits ---------------------------------------------------------------------------------------------------------


def test_what_is_not_committed_is_kept(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue(segment_bytes=4096)
    source = query()
    start = source.initialOffset()
    put(queue, 200)
    end = source.latestOffset(start, ReadMaxRows(100))
    queue.checkpoint()
    assert scanned(folder)[0][0] == 1
    source.commit(end)
    queue.checkpoint()
    first_id = scanned(folder)[0][0]
    assert 50 < first_id <= 101, "the segments before are retired, and none that has an item behind the commit"
    source.commit({"id": 40, "queue": end["queue"]})
    source.commit(end)
    assert reader_of(source).head == 100
    source.commit({"id": 5000, "queue": end["queue"]})
    assert reader_of(source).head == 200
    assert reader_of(source).items == reader_of(source).bytes == 0


def test_a_query_that_was_killed_is_planned_again_as_it_was(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue(segment_bytes=4096)
    put(queue, 100)
    source = query()
    start = source.initialOffset()
    end = source.latestOffset(start, ReadMaxRows(60))
    before = rows_between(source, start, end)
    put(queue, 100)
    again = query()
    assert rows_between(again, start, end) == before
    again.commit(end)
    queue.checkpoint()
    assert query().latestOffset(end, ALL)["id"] == 200


def test_an_older_checkpoint_of_spark_keeps_what_it_needs(folder: Path, open_queue: Open, query: Query) -> None:
    queue = open_queue(segment_bytes=64 << 10)
    put(queue, 100)
    source = query()
    start = source.initialOffset()
    source.commit(source.latestOffset(start, ALL))
    again = query()
    again.latestOffset(start, ReadMaxRows(10))
    assert reader_of(again).head == 0


def test_a_reader_has_one_query(folder: Path, open_queue: Open, query: Query, monkeypatch: Any) -> None:
    open_queue()
    monkeypatch.setattr(folder_feed, "LOCK_PATIENCE", 0.0)
    sentence = r"reader 'spark' of queue 'jobs' is owned by process \d+: a reader belongs to one query"
    with closing(open_reader(folder, "jobs", "spark", create=True)), pytest.raises(KestrelError, match=sentence):
        query().initialOffset()


def test_what_spark_makes_besides_the_planner_owns_nothing(open_queue: Open, query: Query) -> None:
    queue = open_queue()
    put(queue, 3)
    source = query()
    copy = pickle.loads(pickle.dumps(source))
    start = source.initialOffset()
    (part,) = source.partitions(start, source.latestOffset(start, ALL))
    assert sum(batch.num_rows for batch in copy.read(part)) == 3
    copy.stop()


# -- what is lost ----------------------------------------------------------------------------------------------------


def test_items_that_were_retired_are_named(folder: Path, open_queue: Open, query: Query, caplog: Any) -> None:
    queue = open_queue(segment_bytes=4096)
    put(queue, 200)
    source = query()
    start = source.initialOffset()
    source.commit({"id": 150, "queue": start["queue"]})
    queue.checkpoint()
    first_id = scanned(folder)[0][0]
    with pytest.raises(DataLoss, match=f"items 1 to {first_id - 1} of queue 'jobs' are lost") as caught:
        query().latestOffset(start, ALL)
    assert (caught.value.first_id, caught.value.last_id) == (1, first_id - 1)
    with pytest.raises(DataLoss, match=f"the journal begins with item {first_id}"):
        query().partitions(start, {"id": 200, "queue": start["queue"]})
    lenient = query(failOnDataLoss="false")
    end = lenient.latestOffset(start, ALL)
    assert [row[0] for row in rows_between(lenient, start, end)] == list(range(first_id, 201))
    assert "are lost to this query" in caplog.text


def test_a_segment_in_the_middle_that_is_not_there_is_told(
    folder: Path, open_queue: Open, query: Query, caplog: Any
) -> None:
    queue = open_queue(segment_bytes=4096)
    put(queue, 200)
    start = query().initialOffset()
    second = sorted(folder.glob("*.segment"))[1]
    lost = [row[0] for row in scanned(folder) if row[5] == second.name]
    second.unlink()
    with pytest.raises(DataLoss, match=f"items {lost[0]} to {lost[-1]} of queue 'jobs' are lost"):
        query().latestOffset(start, ALL)
    with pytest.raises(DataLoss, match="the segment that they are in is not there"):
        query().partitions(start, {"id": 200, "queue": start["queue"]})
    lenient = query(failOnDataLoss="false")
    found = [row[0] for row in rows_between(lenient, start, lenient.latestOffset(start, ALL))]
    assert found == [each for each in range(1, 201) if each not in lost]
    assert query().latestOffset({"id": lost[-1], "queue": start["queue"]}, ALL)["id"] == 200


def test_ids_that_are_not_there_any_more_are_named(open_queue: Open, query: Query, caplog: Any) -> None:
    """The files were put back to an older state: ids that the query has seen will be given out again."""
    queue = open_queue()
    put(queue, 10)
    start = query().initialOffset()
    gone = {"id": 15, "queue": start["queue"]}
    with pytest.raises(DataLoss, match=r"items 11 to 15 of queue 'jobs' are lost .*: the journal ends with item 10"):
        query().latestOffset(gone, ALL)
    with pytest.raises(DataLoss, match="items 11 to 15"):
        query().partitions(start, gone)
    lenient = query(failOnDataLoss="false")
    assert [row[0] for row in rows_between(lenient, start, gone)] == list(range(1, 11))
    assert lenient.latestOffset(gone, ALL)["id"] == 10
    assert caplog.text.count("items 11 to 15") == 2


def test_another_queue_in_its_place_is_told(folder: Path, open_queue: Open, query: Query, caplog: Any) -> None:
    queue = open_queue()
    put(queue, 10)
    source = query()
    end = source.latestOffset(start := source.initialOffset(), ALL)
    source.stop()
    queue.erase()
    put(open_queue(), 20)
    with pytest.raises(DataLoss, match=r"items 1 to 10 .* another queue of that name is in their place"):
        query().latestOffset(end, ALL)
    lenient = query(failOnDataLoss="false")
    latest = lenient.latestOffset(end, ALL)
    assert [row[0] for row in rows_between(lenient, end, latest)] == list(range(1, 21))
    assert rows_between(lenient, start, end) == []
    lenient.commit(end)
    assert reader_of(lenient).head == 0


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"reader": ""}, ValueError, "streaming from kestrel needs the option reader"),
        ({"queue": ""}, ValueError, "streaming from kestrel needs the option queue"),
        ({"queue": "other"}, LookupError, "there is no queue 'other' in "),
        ({"reader": "a/b"}, InvalidName, "invalid name 'a/b'"),
        (
            {"startId": "3"},
            ValueError,
            "streaming from kestrel has no option 'startId'; the options are failOnDataLoss, ",
        ),
        ({"startingPosition": "now"}, ValueError, "option startingPosition must be earliest, latest or an item id"),
        ({"maxItemsPerTrigger": "0"}, ValueError, "option maxItemsPerTrigger must be a whole number of at least 1"),
        ({"failOnDataLoss": "no"}, ValueError, "option failOnDataLoss must be true or false, not 'no'"),
        ({"path": "hdfs://host/q"}, ValueError, "'hdfs://host/q' is not a folder of this machine"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    folder: Path, open_queue: Open, query: Query, options: dict[str, str], error: type[Exception], sentence: str
) -> None:
    open_queue()
    with pytest.raises(error, match=sentence):
        query(**options)


# -- whole queries ---------------------------------------------------------------------------------------------------


def run_to(spark: Any, folder: Path, target: Path, **options: Any) -> Any:  # noqa: F811
    """A query that writes what it reads as Parquet, started."""
    stream = spark.readStream.format("kestrel").options(queue="jobs", reader="spark", **options).load(str(folder))
    sink = stream.writeStream.format("parquet").option("checkpointLocation", str(target / "checkpoint"))
    return sink.trigger(availableNow=True).start(str(target / "rows"))


def test_a_query_goes_on_where_it_was(spark: Any, folder: Path, open_queue: Open, tmp_path: Path) -> None:  # noqa: F811
    """Beside a writer, over two runs, in limited batches: every item once, and what the first run took may go."""
    queue = open_queue(segment_bytes=8192)
    fill(queue, random.Random(1), 200)
    first_tail = queue.stats().tail_id
    writer = threading.Thread(target=fill, args=(queue, random.Random(2), 2000))
    writer.start()
    assert run_to(spark, folder, tmp_path).awaitTermination(SPARK_PATIENCE)
    writer.join()
    fill(queue, random.Random(3), 300)
    expected = scanned(folder)
    assert expected[0][0] == 1, "the last batch of a run is committed by the next one"
    assert run_to(spark, folder, tmp_path, maxItemsPerTrigger=2000).awaitTermination(SPARK_PATIENCE)
    queue.checkpoint()
    assert scanned(folder)[0][0] > first_tail
    table = spark.read.parquet(str(tmp_path / "rows")).toArrow().sort_by("id")
    assert table["id"].to_pylist() == [row[0] for row in expected]
    assert table["data"].to_pylist() == [row[4] for row in expected]


def test_a_query_is_told_what_is_lost(spark: Any, folder: Path, open_queue: Open, tmp_path: Path) -> None:  # noqa: F811
    queue = open_queue(segment_bytes=4096)
    put(queue, 20)
    assert run_to(spark, folder, tmp_path).awaitTermination(SPARK_PATIENCE)
    until(lambda: dropped(queue))  # the process that planned the query is about to end
    put(queue, 200)
    other = queue.reader("other", start="earliest")
    other.commit_many(other.get_many(150))
    queue.checkpoint()
    first_id = scanned(folder)[0][0]
    with pytest.raises(Exception, match=f"items 21 to {first_id - 1} of queue 'jobs' are lost to this query"):
        run_to(spark, folder, tmp_path).awaitTermination(SPARK_PATIENCE)


def dropped(queue: JournaledQueue) -> bool:
    try:
        queue.drop_reader("spark")
    except QueueLocked:
        return False
    return True


CHILD = """
    import sys
    sys.path[:0] = sys.argv[4:]
    from tests.spark.sessions import QUIET, cluster
    from kestrelpy.spark import local_session
    folder, target, master = sys.argv[1:4]
    def go(spark):
        stream = spark.readStream.format("kestrel").options(queue="jobs", reader="spark", maxItemsPerTrigger=300)
        sink = stream.load(folder).writeStream.format("parquet").option("checkpointLocation", target + "/checkpoint")
        query = sink.trigger(availableNow=True).start(target + "/rows")
        while not query.awaitTermination(0.1):
            print(len(query.recentProgress), flush=True)
        rows = spark.read.parquet(target + "/rows")
        print(rows.count(), rows.select("id").distinct().count(), rows.agg({"id": "max"}).first()[0], flush=True)
    if master == "cluster":
        with cluster() as spark:
            go(spark)
    else:
        go(local_session(master=master, **QUIET))
"""


def child(folder: Path, target: Path, master: str) -> Any:
    need_java()
    command = [sys.executable, "-c", textwrap.dedent(CHILD), *map(str, (folder, target, master, ROOT))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@slow_spark
def test_a_driver_that_is_killed_loses_and_doubles_nothing(folder: Path, open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue(segment_bytes=16 << 10)
    put(queue, 6000)
    for _ in range(3):
        process = child(folder, tmp_path, "local[2]")
        for line in process.stdout:
            if int(line.split()[0]) >= 3:
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        queue.checkpoint()
    shown, errors = child(folder, tmp_path, "local[2]").communicate(timeout=300)
    assert shown.splitlines()[-1:] == ["6000 6000 6000"], errors


@slow_spark
def test_executors_of_their_own_stream(folder: Path, open_queue: Open, tmp_path: Path) -> None:
    put(open_queue(segment_bytes=16 << 10), 1000)
    shown, errors = child(folder, tmp_path, "cluster").communicate(timeout=300)
    assert shown.splitlines()[-1:] == ["1000 1000 1000"], errors
