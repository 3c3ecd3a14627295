"""A cluster whose executors do not see the owner's folder writes to the queue in its store: exactly once, with tasks
and a driver that are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, scan
from kestrelpy.ship import open_store
from tests.spark.sessions import SPARK_PATIENCE, slow_spark
from tests.spark.store_clusters import store_cluster
from tests.support.patience import PATIENCE, until

FILES = 6
PROGRAM = """
    def kills_itself(batches):
        import os, signal
        from pyspark import TaskContext
        task = TaskContext.get()
        for batch in batches:
            yield batch
            if task.attemptNumber() == 0 and task.partitionId() % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with cluster(python, **{"spark.python.use.daemon": "false"}) as spark:
        rows = spark.range(0, 1000, 1, 4).selectExpr("cast(concat('batch ', id) as binary) as data")
        for _ in range(2):  # the same version twice
            doomed = rows.mapInArrow(kills_itself, "data binary").write.format("kestrel").options(**options)
            named = doomed.option("txnAppId", "batch").option("txnVersion", 1).option("txnWait", 100)
            named.mode("append").save(url)
        print("batch", flush=True)
        texts = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(base + "/texts")
        sink = texts.selectExpr("cast(value as binary) as data").writeStream.format("kestrel").options(**options)
        query = sink.option("checkpointLocation", base + "/state").trigger(availableNow=True).start(url)
        assert query.awaitTermination(200)
        print("stream", flush=True)
"""


def patiently(condition: Callable[[], object]) -> None:
    """``until``, as long as Spark may take."""
    for _ in range(int(SPARK_PATIENCE / PATIENCE)):
        with contextlib.suppress(AssertionError):
            until(condition)
            return
    until(condition)


def batches_in(url: str, options: dict[str, object] | None) -> int:
    listing = open_store(url, options=options).list("jobs/in/")
    return sum(each.key.endswith(".batch") for each in listing)


@slow_spark
@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_executors_without_the_folder_write_to_the_store(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    made = store_cluster(tmp_path, kind, request, PROGRAM)
    url, options = made.url, made.options
    (tmp_path / "texts").mkdir()
    for number in range(FILES):
        lines = "".join(f"stream {number} {line}\n" for line in range(50))
        (tmp_path / "texts" / f"{number}.txt").write_text(lines)
    with (
        JournaledQueue(made.folder, "jobs", ship=made.ship(inbox_interval=0.1)) as queue,
        (tmp_path / "err").open("wb") as err,
    ):
        for is_killed in (True, False):
            program = subprocess.Popen(
                made.command, stdout=subprocess.PIPE, stderr=err, env=made.environment, start_new_session=True
            )
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == b"batch\n", (tmp_path / "err").read_text()[-3000:]
                if is_killed:
                    patiently(lambda: batches_in(url, options) >= 3)
                else:
                    assert program.stdout.readline() == b"stream\n", (tmp_path / "err").read_text()[-3000:]
                    assert program.wait(SPARK_PATIENCE) == 0
            finally:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)
                    program.wait()
                if program.stdout is not None:
                    program.stdout.close()
        wanted = 1000 + 50 * FILES
        patiently(lambda: queue.stats().tail_id >= wanted)
    found = Counter(record.data for record in scan(made.folder, "jobs"))
    assert set(found.values()) == {1}
    assert set(found) == {
        *(b"batch %d" % number for number in range(1000)),
        *(b"stream %d %d" % (number, line) for number in range(FILES) for line in range(50)),
    }
