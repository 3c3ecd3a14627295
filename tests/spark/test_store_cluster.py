"""A cluster whose executors do not see the owner's folder reads a queue from the store."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.ship import open_store, restore
from tests.spark.journals import flush
from tests.spark.sessions import slow_spark
from tests.spark.store_clusters import store_cluster

PROGRAM = """
    def seen(batches):
        import os, pyarrow as pa
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"names": [len(os.listdir(os.environ["OWNERS_FOLDER"]))]})

    def batch(**more):
        return spark.read.format("kestrel").options(minPartitionBytes=1, **options, **more).load(url)

    def stream():
        rows = spark.readStream.format("kestrel").options(reader="spark", maxItemsPerTrigger=900, **options).load(url)
        sink = rows.select("id", "data").writeStream.format("parquet").option("checkpointLocation", base + "/state")
        query = sink.trigger(availableNow=True).start(base + "/rows")
        assert query.awaitTermination(200)
        found = spark.read.parquet(base + "/rows")
        print("stream", found.count(), found.selectExpr("sum(id)").first()[0], flush=True)

    with cluster(python, **{"spark.python.use.daemon": "false"}) as spark:
        print("here", len(os.listdir(os.environ["OWNERS_FOLDER"])) > 2, flush=True)
        hidden = spark.range(0, 4, 1, 4).mapInArrow(seen, "names long").collect()
        print("there", sorted({row.names for row in hidden}), flush=True)
        frame = batch()
        total = frame.selectExpr("sum(id)").first()[0]
        print("batch", frame.count(), total, frame.rdd.getNumPartitions() > 2, flush=True)
        print("range", sorted(row.id for row in batch(startId=5, endId=8).select("id").collect()), flush=True)
        stream()
        input()
        stream()
        try:
            spark.read.format("kestrel").option("queue", "jobs").load(os.environ["OWNERS_FOLDER"]).count()
        except Exception as error:
            print("folder", "FilesNotSeen" in str(error), flush=True)
        try:
            input()
            batch().count()
        except Exception as error:
            print("damage", "StoreDamaged" in str(error), flush=True)
"""


@slow_spark
@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_executors_without_the_folder_read_the_store(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Batch and stream, with a takeover between two runs; and an object that is gone is an error."""
    made = store_cluster(tmp_path, kind, request, PROGRAM)
    with JournaledQueue(made.folder, "jobs", segment_bytes=64 << 10, ship=made.ship()) as queue:
        for _ in range(20):
            queue.put_many([bytes(100)] * 100)
            flush(queue)
    with (
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(
            made.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=made.environment
        ) as program,
    ):
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            lines = [program.stdout.readline().decode().strip() for _ in range(5)]
            assert lines == [
                "here True",
                "there [0]",
                "batch 2000 2001000 True",
                "range [5, 6, 7]",
                "stream 2000 2001000",
            ], (tmp_path / "err").read_text()[-3000:]
            restore(made.url, "jobs", tmp_path / "second", options=made.options)
            with JournaledQueue(tmp_path / "second", "jobs", segment_bytes=64 << 10, ship=made.ship()) as queue:
                first_id = queue.put_many([bytes(100)] * 1000)[0]
                flush(queue)
            program.stdin.write(b"\n")
            program.stdin.flush()
            total = 2001000 + sum(range(first_id, first_id + 1000))
            assert program.stdout.readline().decode().strip() == f"stream 3000 {total}"
            assert program.stdout.readline().decode().strip() == "folder True"
            delete_a_segment(made.url, made.options)
            program.stdin.write(b"\n")
            program.stdin.flush()
            assert program.stdout.readline().decode().strip() == "damage True"
            program.stdin.close()
            program.wait()
        finally:
            program.kill()


def delete_a_segment(url: str, options: dict[str, object] | None) -> None:
    store = open_store(url, options=options)
    store.delete([store.list("jobs/seg/")[1].key])
