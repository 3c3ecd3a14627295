"""The sink: rows become items, whole batches at once, and none of them twice, whatever dies on the way."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType, TimestampType

from kestrelpy import InvalidName, ItemTooLarge, JournaledQueue, QueueLocked, inbox, scan
from kestrelpy._disk import real as real_module
from kestrelpy.spark import FilesNotSeen
from kestrelpy.spark.write.sink import CHUNK_ITEMS, BatchSink, Sealed, SinkMistake, StreamSink
from tests.spark.sessions import SPARK_PATIENCE, need_java, slow_spark, spark  # noqa: F401 - a fixture
from tests.support.budget import ALL, SEED
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE

ROWS = StructType().add("data", BinaryType())
EXPIRING = StructType().add("data", StringType()).add("expires", TimestampType())


def datas(folder: Path, queue: str = "jobs") -> list[bytes]:
    return [record.data for record in scan(folder, queue)]


def sink_of(folder: Path, schema: StructType = ROWS, kind: Any = BatchSink, **options: str) -> Any:
    return kind({"path": str(folder), "queue": "jobs", **options}, schema, False)


def batch_of(*data: bytes | None) -> pa.RecordBatch:
    return pa.record_batch({"data": pa.array(data, pa.binary())})


def sealed(sink: Any, *data: bytes) -> Sealed:
    message = sink.write(iter([batch_of(*data)]))
    assert isinstance(message, Sealed)
    return message


# -- rows into items, without Spark ----------------------------------------------------------------------------------


def test_rows_become_items_in_their_order(folder: Path) -> None:
    sink = sink_of(folder)
    many = [b"%d" % number for number in range(2 * CHUNK_ITEMS + 5)]
    first = sink.write(iter([batch_of(*many), batch_of(), batch_of(b"", b"x" * (10 << 20))]))
    assert (first.parts[0].items, first.query_id) == (len(many) + 2, "")
    sink.commit([first, None, sealed(sink, b"last")])
    assert datas(folder) == [*many, b"", b"x" * (10 << 20), b"last"]


def test_a_slice_of_a_batch_is_what_is_written(folder: Path) -> None:
    """Spark may hand out a batch that begins in the middle of its buffers."""
    sink = sink_of(folder)
    rows = batch_of(*(b"%d" % number for number in range(100)))
    sink.commit([sink.write(iter([rows.slice(90), rows.slice(3, 2)]))])
    assert datas(folder) == [b"%d" % number for number in (*range(90, 100), 3, 4)]


def test_strings_and_instants_of_expiry(folder: Path) -> None:
    late = [datetime(2100, 1, 1, tzinfo=UTC), None, None, datetime(2100, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)]
    sink = sink_of(folder, EXPIRING)
    rows = pa.record_batch({"data": ["a", "ü", "", "d"], "expires": pa.array(late, pa.timestamp("us", "UTC"))})
    early = pa.record_batch({"data": ["e"], "expires": pa.array([datetime(1960, 1, 1)], pa.timestamp("us"))})
    none = pa.record_batch({"data": ["f"], "expires": pa.array([None], pa.timestamp("us", "UTC"))})
    sink.commit([sink.write(iter([rows, early, none]))])
    found = [(record.data, record.expires_ms) for record in scan(folder, "jobs")]
    at = int(late[0].timestamp() * 1000) if late[0] else 0
    assert found == [(b"a", at), ("ü".encode(), None), (b"", None), (b"d", at + 1500), (b"e", 0), (b"f", None)]


def test_nothing_of_a_job_is_there_before_its_commit_or_after_its_abort(folder: Path) -> None:
    sink = sink_of(folder)
    messages = [sealed(sink, b"one"), sealed(sink, b"two")]
    assert inbox.pending(folder, "jobs") == 0
    sink.abort([*messages, None])
    with JournaledQueue(folder, "jobs") as queue:
        assert queue.take_in() == 0
        assert queue.stats().tail_id == 0
    assert not list((folder / "inbox").glob("*.part"))


def test_a_task_that_fails_leaves_no_part(folder: Path) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield batch_of(b"one")
        raise OSError("the disk of the shuffle")

    with pytest.raises(OSError, match="shuffle"):
        sink_of(folder).write(rows())
    assert not list((folder / "inbox").glob("*.part"))


def test_an_open_queue_takes_a_batch_in_by_itself(folder: Path) -> None:
    with JournaledQueue(folder, "jobs", inbox_interval=0.01) as queue:
        sink = sink_of(folder)
        sink.commit([sealed(sink, b"one", b"two")])
        assert [queue.get(timeout=PATIENCE).data for _ in range(2)] == [b"one", b"two"]


def test_what_was_written_before_is_not_written_again(folder: Path) -> None:
    for version in (3, 3, 2, 4):
        sink = sink_of(folder, txnAppId="nightly", txnVersion=str(version))
        sink.commit([sealed(sink, b"%d" % version)])
    assert datas(folder) == [b"3", b"4"]
    for _ in range(2):  # without a transaction each job is one of its own
        sink = sink_of(folder)
        sink.commit([sealed(sink, b"again")])
    assert datas(folder) == [b"3", b"4", b"again", b"again"]


def test_a_stream_knows_its_batches_by_their_numbers(folder: Path) -> None:
    for number in (0, 0, 1, 1, 2):
        sink = sink_of(folder, kind=StreamSink, txnAppId="query")
        sink.commit([sealed(sink, b"%d" % number)], number)
    assert datas(folder) == [b"0", b"1", b"2"]
    assert inbox.last_version(folder, "jobs", "query") == 2
    sink = sink_of(folder, kind=StreamSink)
    with pytest.raises(SinkMistake, match="txnAppId"):
        sink.commit([sealed(sink, b"3")], 3)
    sink.abort([sealed(sink, b"3")], 3)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda f: BatchSink({"path": str(f)}, ROWS, False), "name the queue by"),
        (lambda f: BatchSink({"queue": "jobs"}, ROWS, False), "name the queue by"),
        (lambda f: sink_of(f, codec="json"), "unknown option 'codec'"),
        (lambda f: sink_of(f, txnAppId="a"), "belong together"),
        (lambda f: sink_of(f, txnVersion="1"), "belong together"),
        (lambda f: sink_of(f, txnAppId="a", txnVersion="one"), "whole number, not 'one'"),
        (lambda f: sink_of(f, kind=StreamSink, txnVersion="1"), "is its batch id"),
        (lambda f: BatchSink({"path": str(f), "queue": "jobs"}, ROWS, True), "cannot be overwritten"),
        (lambda f: sink_of(f, StructType().add("value", StringType())), "column 'value' cannot be part"),
        (lambda f: sink_of(f, StructType()), "the column data, binary or string"),
        (lambda f: sink_of(f, StructType().add("data", IntegerType())), "the column data, binary or string"),
        (lambda f: sink_of(f, StructType().add("data", StringType()).add("expires", IntegerType())), "a timestamp"),
        (lambda f: sink_of(f).write(iter([batch_of(b"a", None)])), "data is null in a row"),
        (lambda f: sink_of(f, path="hdfs://host/q"), "'hdfs://host/q' is not a folder of this machine"),
        (lambda f: sink_of(f, path="file://host/q"), "after file: comes an absolute path"),
    ],
)
def test_a_mistake_is_one_clear_sentence(folder: Path, mistake: Callable[[Path], object], words: str) -> None:
    with pytest.raises(SinkMistake, match=words) as caught:
        mistake(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "{}"])
def test_a_folder_may_be_written_as_spark_writes_it(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(folder.parent)
    sink = sink_of(folder, path=form.format(folder))
    sink.commit([sealed(sink, b"one")])
    relative = sink_of(folder, path=folder.name)
    monkeypatch.chdir("/")  # an executor is somewhere else
    relative.commit([sealed(pickle.loads(pickle.dumps(relative)), b"two")])
    assert datas(folder) == [b"one", b"two"]
    assert not list(folder.parent.glob("file:*"))


@pytest.mark.parametrize("kind", [BatchSink, StreamSink])
def test_a_name_is_checked_where_the_sink_is_made(folder: Path, kind: Any) -> None:
    with pytest.raises(InvalidName, match="no/such"):
        sink_of(folder, kind=kind, queue="no/such")


def test_an_abort_never_raises(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that is told is the first one, that of the job."""
    sink = sink_of(folder)
    message = sealed(sink, b"one")
    (folder / "inbox").rename(folder / "elsewhere")
    (folder / "inbox").touch()
    sink.abort([message])
    stream = sink_of(folder, kind=StreamSink)
    stream.abort([message], 7)
    assert caplog.text.count("the parts of a failed job stay in") == 2


def test_an_item_that_the_owner_does_not_take_fails_the_job(folder: Path) -> None:
    """In the task; or in the commit, if the owner has changed its mind meanwhile."""
    JournaledQueue(folder, "jobs", max_item_bytes=100).close()
    sink = sink_of(folder)
    good = sealed(sink, bytes(100))
    with pytest.raises(ItemTooLarge, match="101 bytes is larger than max_item_bytes=100"):
        sealed(sink, b"small", bytes(101))
    JournaledQueue(folder, "jobs", max_item_bytes=99).close()
    with pytest.raises(ItemTooLarge, match="100 bytes is larger than max_item_bytes=99"):
        sink.commit([good])
    sink.abort([good])
    assert datas(folder) == []
    assert not list((folder / "inbox").glob("*.part"))


def test_parts_that_the_driver_does_not_see_are_told(folder: Path) -> None:
    sink = sink_of(folder)
    message = sealed(sink, b"one")
    (folder / "inbox" / message.parts[0].name).unlink()
    with pytest.raises(FilesNotSeen, match="a task has written this part, and the driver does not see it") as caught:
        sink.commit([message])
    assert caught.value.path == str(folder / "inbox" / message.parts[0].name)


def test_tasks_may_write_over_a_network_and_the_driver_may_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    sink = sink_of(folder)
    monkeypatch.setattr(real_module, "_file_system", lambda number: "nfs4")
    message = sealed(sink, b"one")
    with pytest.raises(SinkMistake, match=r"nfs4 is a network file system.*The driver must be on the machine"):
        sink_of(folder)
    monkeypatch.undo()
    sink.commit([message])
    assert datas(folder) == [b"one"]


# -- kills in the commit, without Spark ------------------------------------------------------------------------------

CALLS = ("rename", "fsync", "fdatasync", "unlink", "open", "pwrite", "pwritev", "ftruncate")


def commit_killed_at(sink: Any, messages: list[Any], at: int) -> bool:
    """Commit in a child that dies at its ``at``-th call that changes a file; whether it died."""
    child = os.fork()
    if not child:
        left = at

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    os._exit(9)
                return call(*args, **kwargs)

            return counted

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            sink.commit(messages, 7)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), f"the commit failed by itself, with status {status}"
    return status == 9


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_driver_killed_anywhere_in_the_commit(tmp_path: Path) -> None:
    """The batch comes again with new parts, as Spark runs it again: each item is there once."""
    wanted = [b"%d" % number for number in range(10)]
    for at in range(1, 1000) if ALL else range(1 + SEED % 5, 1000, 5):
        folder = tmp_path / str(at)
        with JournaledQueue(folder, "jobs") as queue:
            queue.put(b"before")
        first = sink_of(folder, kind=StreamSink, txnAppId="query")
        died = commit_killed_at(first, [sealed(first, *wanted[:5]), sealed(first, *wanted[5:])], at)
        again = sink_of(folder, kind=StreamSink, txnAppId="query")
        again.commit([sealed(again, *wanted[:3]), sealed(again, *wanted[3:])], 7)
        assert datas(folder) == [b"before", *wanted], f"killed at call {at}"
        assert inbox.pending(folder, "jobs") == 0
        if not died:
            break
    assert at > 20, f"a commit makes more than {at} calls"


# -- on Spark --------------------------------------------------------------------------------------------------------


def test_a_dataframe_is_written_and_read_back(spark: Any, folder: Path) -> None:  # noqa: F811
    rows = spark.range(2500).selectExpr("cast(id as string) as data", "timestamp_millis(4000000000000) as expires")
    rows.write.format("kestrel").mode("append").option("queue", "jobs").save(str(folder))
    back = spark.read.format("kestrel").option("queue", "jobs").load(str(folder))
    found = back.selectExpr("count(*)", "sum(int(string(data)))", "min(unix_millis(expires))", "max(id)").first()
    assert tuple(found) == (2500, sum(range(2500)), 4_000_000_000_000, 2500)


def test_spark_says_what_the_mistake_is(spark: Any, folder: Path) -> None:  # noqa: F811
    frame = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(Exception, match="column 'value' cannot be part of an item"):
        frame.write.format("kestrel").mode("append").option("queue", "jobs").save(str(folder))
    assert not folder.exists() or not list(folder.iterdir())


def test_a_stream_is_known_by_its_query(spark: Any, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Restarted from its checkpoint it goes on; with a new checkpoint it is another query, and writes anew."""
    source = tmp_path / "source"
    source.mkdir()

    def run(checkpoint: str) -> str:
        lines = spark.readStream.format("text").load(str(source)).selectExpr("value as data")
        sink = lines.writeStream.format("kestrel").option("queue", "jobs").trigger(availableNow=True)
        query = sink.option("checkpointLocation", str(tmp_path / checkpoint)).start(str(folder))
        assert query.awaitTermination(SPARK_PATIENCE)
        return str(query.id)

    (source / "1.txt").write_text("one\ntwo\n")
    query_id = run("checkpoint")
    (source / "2.txt").write_text("three\n")
    assert run("checkpoint") == query_id
    assert sorted(datas(folder)) == [b"one", b"three", b"two"]
    assert inbox.last_version(folder, "jobs", query_id) == 1
    (tmp_path / "checkpoint" / "commits" / "1").unlink()  # as if it had died between our commit and Spark's
    (tmp_path / "checkpoint" / "commits" / ".1.crc").unlink(missing_ok=True)
    run("checkpoint")
    assert sorted(datas(folder)) == [b"one", b"three", b"two"]
    run("another")
    assert Counter(datas(folder)) == {b"one": 2, b"two": 2, b"three": 2}


CLUSTER = """
import os, sys, time
from pathlib import Path
from tests.spark.sessions import cluster
folder, marks = sys.argv[1:]

def unlucky(batches):
    from pyspark import TaskContext
    for number, batch in enumerate(batches):
        yield batch
    context = TaskContext.get()
    mark = Path(marks, str(context.partitionId()))
    if context.partitionId() % 2 and not mark.exists():
        mark.touch()
        if context.partitionId() == 3:
            os._exit(11)
        raise RuntimeError("the first attempt fails when all is written")

with cluster() as spark:
    rows = spark.range(0, 4000, 1, 4).selectExpr("cast(id as string) as data").mapInArrow(unlucky, "data string")
    rows.write.format("kestrel").mode("append").option("queue", "jobs").save(folder)
"""


@slow_spark
def test_tasks_that_fail_on_a_cluster_are_written_once(folder: Path, tmp_path: Path) -> None:
    need_java()
    marks = tmp_path / "marks"
    marks.mkdir()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    told = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(folder), str(marks)], env=environment, capture_output=True, timeout=200
    )
    assert told.returncode == 0, told.stderr[-2000:].decode()
    assert sorted(path.name for path in marks.iterdir()) == ["1", "3"]
    assert sorted(map(int, datas(folder))) == list(range(4000))


def test_a_queue_that_is_open_elsewhere_is_left_to_its_owner(folder: Path) -> None:
    sink = sink_of(folder)
    with JournaledQueue(folder, "jobs", inbox_interval=None) as queue:
        with pytest.raises(QueueLocked):
            inbox.take_in(folder, "jobs")
        sink.commit([sealed(sink, b"one")])
        assert inbox.pending(folder, "jobs") == 1
        assert queue.take_in() == 1
