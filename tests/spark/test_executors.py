"""Executors that do not see the folder that a read was planned in: they say so. "Not here" is not "retired".

Without Spark: what was planned is pickled, another folder is put under the path, and it is read, as on another machine.
On a cluster: the path leads through the working folder of each process, so that every executor has a folder of its own.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kestrelpy import CorruptJournal, JournaledQueue, inspect, scan
from kestrelpy._journal.format import HEADER_BYTES
from kestrelpy.arrow.columns import ARROW_SCHEMA
from kestrelpy.spark import FilesNotSeen
from kestrelpy.spark.read.batch import BatchReader
from kestrelpy.spark.read.part import SegmentPart
from kestrelpy.spark.read.stream import StreamReader
from kestrelpy.testing import ManualClock
from tests.spark.journals import read_part
from tests.spark.sessions import need_java, slow_spark
from tests.support.paths import ROOT

COLUMNS = from_arrow_schema(ARROW_SCHEMA)
ITEMS = 150
Open = Callable[..., JournaledQueue]


def put_some(folder: Path, name: str = "jobs", count: int = ITEMS) -> None:
    with JournaledQueue(folder, name, segment_bytes=4096, sync="never") as queue:
        for number in range(count):
            queue.put(b"%d" % number + bytes(100))


@pytest.fixture(params=["batch", "stream"])
def planned(request: pytest.FixtureRequest, folder: Path) -> list[SegmentPart]:
    """A read of some segments, the last one of which is not closed, as the driver hands it out."""
    put_some(folder)
    with JournaledQueue(folder, "jobs", segment_bytes=4096, sync="never") as queue:
        queue.put(b"in the segment that is not closed")
        if request.param == "batch":
            parts = BatchReader({"path": str(folder), "queue": "jobs", "minPartitionBytes": "1"}, COLUMNS).partitions()
        else:
            source = StreamReader({"path": str(folder), "queue": "jobs", "reader": "spark"}, COLUMNS)
            start = source.initialOffset()
            found = source.partitions(start, source.latestOffset(start, ReadAllAvailable()))
            parts = [part for part in found if isinstance(part, SegmentPart)]
            source.stop()
        back: list[SegmentPart] = pickle.loads(pickle.dumps(parts))
        assert len(rows_of(back)) == ITEMS + 1
        kept = folder.parent / "kept"
        shutil.copytree(folder, kept)
    shutil.rmtree(folder)
    kept.rename(folder)
    return back


def rows_of(parts: Sequence[InputPartition]) -> list[int]:
    return [row[0] for part in parts for row in read_part(part)[0]]


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def an_empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def another_queue(folder: Path) -> None:
    shutil.rmtree(folder)
    put_some(folder, "other")


def a_queue_of_that_name(folder: Path) -> None:
    shutil.rmtree(folder)
    put_some(folder)


def a_queue_of_that_name_that_was_read(folder: Path) -> None:
    shutil.rmtree(folder)
    put_some(folder)
    with JournaledQueue(folder, "jobs", segment_bytes=4096) as queue:
        queue.commit_many(queue.get_many(10 * ITEMS))
        queue.put(b"lets go of what is before")
        queue.checkpoint(durable=True)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def keep_only(folder: Path, kept: list[Path]) -> None:
    for path in folder.iterdir():
        if path not in kept:
            path.unlink()


def the_oldest_segments_alone(folder: Path) -> None:
    keep_only(folder, segments(folder)[:2])


def the_oldest_segments_and_the_places(folder: Path) -> None:
    for path in segments(folder)[2:]:
        path.unlink()


def the_newest_segments_alone(folder: Path) -> None:
    keep_only(folder, segments(folder)[2:])


def an_older_copy(folder: Path) -> None:
    """The segment that is not closed has nothing in it there."""
    path = segments(folder)[-1]
    data = path.read_bytes()
    path.write_bytes(data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES))


@pytest.mark.parametrize(
    ("happens", "sentence"),
    [
        (nothing, "does not see what was planned to be read: there is no such folder"),
        (an_empty_folder, "nothing of that queue is there"),
        (another_queue, "nothing of that queue is there"),
        (a_queue_of_that_name, "another queue of that name is there"),
        (a_queue_of_that_name_that_was_read, "another queue of that name is there"),
        (the_oldest_segments_alone, "no later segment is there"),
        (the_oldest_segments_and_the_places, "no later segment is there|a reader needs item"),
        (the_newest_segments_alone, "no reader has a checkpoint there that says so"),
        (an_older_copy, "were there when this read was planned"),
    ],
)
def test_what_is_not_there_is_an_error(
    folder: Path, planned: list[SegmentPart], happens: Callable[[Path], None], sentence: str
) -> None:
    happens(folder)
    with pytest.raises((FilesNotSeen, CorruptJournal), match=sentence):
        rows_of(planned)


def test_an_archive_that_is_not_seen_is_an_error(folder: Path, open_queue: Open) -> None:
    """Both for what was in it when the read was planned, and for what went there since."""
    archive = folder.parent / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive, sync="never")
    for _ in range(2):
        queue.put_many([bytes(100)] * 30)
        queue.put_many([bytes(100)] * 30)
        queue.commit_many(queue.get_many(100))
        queue.checkpoint(durable=True)
    options = {"path": str(folder), "archive": str(archive), "minPartitionBytes": "1"}
    parts = BatchReader(options, COLUMNS).partitions()
    assert len(rows_of(parts)) == 120
    for path in archive.iterdir():
        path.unlink()
    with pytest.raises(FilesNotSeen, match="this segment was in the archive, and is gone"):
        rows_of(parts[:1])
    later = BatchReader(options, COLUMNS).partitions()
    queue.put_many([bytes(100)] * 30)
    queue.put_many([bytes(100)] * 30)
    queue.commit_many(queue.get_many(100))
    queue.checkpoint(durable=True)
    assert list(archive.iterdir())
    for path in archive.iterdir():
        path.unlink()
    with pytest.raises(FilesNotSeen, match="was retired, and is not in the archive"):
        rows_of(later)


def test_what_a_query_needs_was_not_retired(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    """Whatever readers' places say: the query's own keeps it."""
    queue = open_queue(segment_bytes=4096, sync="never")
    for _ in range(60):
        queue.put(bytes(100))
    source = StreamReader({"path": str(folder), "queue": "jobs", "reader": "spark"}, COLUMNS)
    start = source.initialOffset()
    end = source.latestOffset(start, ReadAllAvailable())
    parts = [part for part in source.partitions(start, end) if isinstance(part, SegmentPart)]
    source.commit(end)
    source.stop()
    queue.checkpoint(durable=True)
    with pytest.raises(FilesNotSeen, match="the reader of the query keeps this segment, and it is gone"):
        rows_of(parts)


CLUSTER = """
    import os, sys
    sys.path[:0] = sys.argv[2:]
    from tests.spark.sessions import cluster
    from kestrelpy import JournaledQueue
    os.chdir(sys.argv[1])
    FOLDER = "/proc/self/cwd/queues"  # another one for each process

    def make(kind):
        def task(batches):
            import glob
            for mine in glob.glob("../*/"):
                if kind == "a queue of that name":
                    from kestrelpy import JournaledQueue
                    with JournaledQueue(mine + "queues", "jobs") as queue:
                        queue.put_many([b"not what was planned"] * 10)
                        queue.commit_many(queue.get_many(10))
                else:
                    os.makedirs(mine + "queues", exist_ok=True)
            yield from batches
        spark.range(0, 1, 1, 1).mapInArrow(task, "id long").collect()

    def told(read):
        try:
            return f"no error: {read()}"
        except Exception as error:
            known = ("there is no such folder", "nothing of that queue is there", "another queue of that name is there")
            return next((each for each in known if "FilesNotSeen" in str(error) and each in str(error)), str(error))

    def batch():
        return spark.read.format("kestrel").option("queue", "jobs").load(FOLDER).count()

    def stream():
        rows = spark.readStream.format("kestrel").options(queue="jobs", reader="spark").load(FOLDER)
        sink = rows.writeStream.format("parquet").option("checkpointLocation", sys.argv[1] + "/checkpoint")
        query = sink.trigger(availableNow=True).start(sys.argv[1] + "/rows")
        query.awaitTermination(120)
        return query.recentProgress

    with cluster() as spark:
        for kind in ("no folder", "an empty folder", "a queue of that name"):
            if kind != "no folder":
                make(kind)
            for read in (batch, stream):
                print(f"{kind}: {told(read)}", flush=True)
"""


@slow_spark
def test_executors_with_a_folder_of_their_own_say_so(tmp_path: Path) -> None:
    """Neither a batch nor a stream takes nothing for all there is; and the query's reader stays where it was."""
    need_java()
    folder = tmp_path / "queues"
    put_some(folder, count=1000)
    command = [sys.executable, "-c", textwrap.dedent(CLUSTER), str(tmp_path), str(ROOT)]
    environment = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path / "work")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    expected = []
    for kind, sentence in [
        ("no folder", "there is no such folder"),
        ("an empty folder", "nothing of that queue is there"),
        ("a queue of that name", "another queue of that name is there"),
    ]:
        expected += [f"{kind}: {sentence}"] * 2
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
    assert [(reader.name, reader.head) for reader in inspect(folder, "jobs").readers] == [("spark", 0)]
    assert sum(1 for _ in scan(folder, "jobs")) == 1000
