"""Exactly once, from queue to queue and from queue to Parquet, over SIGKILLs of the driver at seeded moments."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet

from kestrelpy import JournaledQueue, scan
from tests.spark.sessions import long_spark, need_java
from tests.support.budget import SEED, Tally
from tests.support.paths import ROOT

KILLS = int(os.environ.get("KESTRELPY_KILLS", "4"))
"""Of a driver with two queries: each interrupts two reads, a sink of files and a sink of items."""
PATIENCE = 120.0
TO_THE_END = PATIENCE + 30.0 * KILLS
"""The last driver reads what was put in all that time: each one before it was killed when it had read a little."""


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(folder / "driver.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.killed_stream", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def lives(driver: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the driver is still there so many seconds later."""
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def kill(driver: subprocess.Popen[bytes]) -> None:
    """The driver and its JVM; the workers see that and go."""
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


@long_spark
def test_a_driver_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path, tally: Tally) -> None:
    need_java()
    print(f"seed {SEED}")
    choose = random.Random(SEED)
    with JournaledQueue(tmp_path / "queues", "in", segment_bytes=1 << 16) as queue:
        for name in ("files", "items"):
            queue.reader(name, start="earliest").close()

        def put(count: int) -> None:
            tail_id = queue.stats().tail_id
            queue.put_many([b"%d %d" % (tail_id + at, choose.getrandbits(64)) for at in range(1, count + 1)])

        put(1500)
        for _ in range(KILLS):
            (tmp_path / "running").unlink(missing_ok=True)
            driver = start(tmp_path)
            try:
                deadline = time.monotonic() + PATIENCE
                while not (tmp_path / "running").exists():
                    assert lives(driver, 0.02), (tmp_path / "driver.log").read_text()[-3000:]
                    assert time.monotonic() < deadline, "no batch has come through"
                put(choose.randrange(2000))
                assert lives(driver, choose.uniform(0.0, 2.5))
            finally:
                kill(driver)
            tally.add("drivers of Spark killed", 1)
        (tmp_path / "all.put").touch()
        driver = start(tmp_path)
        try:
            assert driver.wait(TO_THE_END) == 0, (tmp_path / "driver.log").read_text()[-3000:]
        finally:
            if driver.poll() is None:
                kill(driver)
        wanted = [record.data for record in scan(tmp_path / "queues", "in")]
        tail_id = queue.stats().tail_id
    check_items(tmp_path, wanted)
    check_files(tmp_path, tail_id)


def digest(items: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(sorted(items))).hexdigest()


def check_items(folder: Path, wanted: list[bytes]) -> None:
    """Of ``in`` only the last segments may be left: whatever was put is numbered, and ``out`` has each number once."""
    got = [record.data for record in scan(folder / "queues", "out")]
    numbers = Counter(int(item.split()[0]) for item in got)
    last = int(wanted[-1].split()[0])
    assert max(numbers.values()) == 1, f"{sum(count > 1 for count in numbers.values())} items came twice"
    assert sorted(numbers) == list(range(1, last + 1)), f"{last - len(numbers)} items are missing"
    kept = {item.split()[0] for item in wanted}
    assert digest([item for item in got if item.split()[0] in kept]) == digest(wanted)


def check_files(folder: Path, tail_id: int) -> None:
    """The files that the sink has committed, by its own log: what a reader of the folder with Spark sees."""
    log = folder / "files" / "_spark_metadata"
    named: set[str] = set()
    for entry in log.iterdir():
        if entry.name.isdigit() or entry.name.endswith(".compact"):
            for line in entry.read_text().splitlines()[1:]:
                named.add(line.split('"path":"')[1].split('"')[0].removeprefix("file://"))
    ids: list[int] = []
    for path in named:
        table = parquet.read_table(path, columns=["id", "data"])
        ids += table["id"].to_pylist()
        assert [int(data.split()[0]) for data in table["data"].to_pylist()] == table["id"].to_pylist()
    assert sorted(ids) == list(range(1, tail_id + 1))
