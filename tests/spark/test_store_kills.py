"""Exactly once, from a queue in a store to another one and to Parquet, over SIGKILLs of the driver and of the owner."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from kestrelpy import scan
from kestrelpy.ship import restore
from tests.spark.sessions import long_spark, need_java
from tests.spark.test_kills import KILLS, PATIENCE, TO_THE_END, check_files, kill, lives
from tests.support.budget import SEED, Tally
from tests.support.paths import ROOT


def start(program: str, folder: Path, url: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(folder / f"{program}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.spark.{program}", str(folder), url],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(path: Path, driver: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert lives(driver, 0.02), (folder / "killed_stream.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"there is no {path.name}"


@long_spark
def test_drivers_and_owners_are_killed(tmp_path: Path, tally: Tally) -> None:
    need_java()
    choose, url = random.Random(SEED), f"file://{tmp_path}/store"
    owner = start("killed_shipper", tmp_path, url)
    try:
        for _ in range(KILLS):
            (tmp_path / "running").unlink(missing_ok=True)
            driver = start("killed_stream", tmp_path, url)
            try:
                wait_for(tmp_path / "running", driver, tmp_path)
                if choose.random() < 0.5:
                    assert lives(driver, choose.uniform(0.0, 1.5))
                    os.killpg(owner.pid, signal.SIGKILL)
                    owner.wait()
                    owner = start("killed_shipper", tmp_path, url)
                    tally.add("owners killed beside Spark", 1)
                assert lives(driver, choose.uniform(0.0, 2.5))
            finally:
                kill(driver)
            tally.add("drivers of Spark killed, on a store", 1)
        (tmp_path / "all.put").touch()
        driver = start("killed_stream", tmp_path, url)
        try:
            assert driver.wait(TO_THE_END) == 0, (tmp_path / "killed_stream.log").read_text()[-3000:]
        finally:
            if driver.poll() is None:
                kill(driver)
        last = int((tmp_path / "put").read_text())
        deadline = time.monotonic() + PATIENCE
        while max((record.id for record in scan(tmp_path / "queues", "out")), default=0) < last:
            assert time.monotonic() < deadline, "what was published is not taken in"
            assert lives(owner, 0.1), (tmp_path / "killed_shipper.log").read_text()[-3000:]
        (tmp_path / "done").touch()
        assert owner.wait(PATIENCE) == 0, (tmp_path / "killed_shipper.log").read_text()[-3000:]
    finally:
        if owner.poll() is None:
            kill(owner)
    check_files(tmp_path, last)
    restore(url, "out", tmp_path / "elsewhere")
    for folder in (tmp_path / "queues", tmp_path / "elsewhere"):
        got = Counter(int(record.data) for record in scan(folder, "out"))
        assert max(got.values()) == 1, f"{sum(count > 1 for count in got.values())} items came twice"
        assert sorted(got) == list(range(1, last + 1)), f"{last - len(got)} items are missing"
