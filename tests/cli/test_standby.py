"""``kestrelpy standby`` and ``kestrelpy ship rejoin``, on a store in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, scan
from kestrelpy.ship import Fenced, Ship, open_store, orphans, restore
from kestrelpy.ship import slots as codec
from kestrelpy.testing import MemoryDisk
from tests.cli.programs import Run, refused
from tests.ship.restores import queue_on
from tests.ship.shipped import Shipper
from tests.support.paths import PYTHONPATH
from tests.support.patience import PATIENCE


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def handed_over(url: str) -> str:
    """The URL of a store with a queue that its owner has handed over."""
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        queue.put(b"two")
        shipper = Shipper(open_store(url), disk)
        shipper.fence(lease_ms=60_000)
        shipper.ship()
        shipper.append(codec.CLOSE, note=codec.close_note(handed_over=True))
    return url


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kestrelpy", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH}


def test_it_ends_when_the_queue_may_be_taken_over(run: Run, handed_over: str, tmp_path: Path) -> None:
    done = run("standby", handed_over, "jobs", tmp_path / "there", "--interval", "0.05")
    assert done.status == 0
    assert "over, owner host:1" in done.err
    assert "queue jobs may be taken over" in done.err
    with JournaledQueue(tmp_path / "there", "jobs", ship=handed_over) as queue:
        assert [queue.get().data for _ in range(2)] == [b"one", b"two"]


def test_the_program_takes_over(handed_over: str, tmp_path: Path) -> None:
    service = (
        "import sys; from kestrelpy import JournaledQueue\n"
        "with JournaledQueue(sys.argv[1], 'jobs', ship=sys.argv[2]) as queue: print(queue.get().data.decode())"
    )
    command = program("standby", handed_over, "jobs", tmp_path / "there", "--exec")
    done = subprocess.run(
        [*command, sys.executable, "-c", service, str(tmp_path / "there"), handed_over],
        capture_output=True, text=True, timeout=PATIENCE, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
    assert f"running {sys.executable}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(url: str, tmp_path: Path, number: signal.Signals) -> None:
    with JournaledQueue(tmp_path / "here", "jobs", ship=url) as queue:
        queue.put(b"one")
    command = program("standby", url, "jobs", tmp_path / "there", "--interval", "0.05")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        while "following" not in said:
            said = process.stderr.readline()
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
    assert [record.data for record in scan(tmp_path / "there", "jobs")] == [b"one"]


def test_wrong_use(run: Run, handed_over: str, tmp_path: Path) -> None:
    refused(run("standby", handed_over, "jobs", tmp_path / "there", "--exec"), 2, "--exec")
    refused(run("standby", handed_over, "jobs", tmp_path / "there", "--interval", "0"), 2, "--interval")
    refused(run("standby", "nowhere", "jobs", tmp_path / "there"), 2)
    refused(run("standby", handed_over, "jobs", tmp_path / "there", "--exec", "/no/such"), 2, "no program '/no/such'")
    with JournaledQueue(tmp_path / "mine", "jobs") as queue:
        queue.put(b"1")
    refused(run("standby", handed_over, "jobs", tmp_path / "mine"), 1, "a queue of this name is there")


def test_an_old_owner_rejoins(run: Run, url: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    with JournaledQueue(here, "jobs", ship=Ship(url, interval=0)) as queue:
        queue.put(b"one")
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        restore(url, "jobs", tmp_path / "there")
        JournaledQueue(tmp_path / "there", "jobs", ship=url).close()
        queue.put(b"not shipped")
        with pytest.raises(Fenced):
            queue.shipping.flush(PATIENCE)
        refused(run("ship", "rejoin", here, "jobs", url), 1, "held by")
    refused(run("ship", "rejoin", here, "nobody", url), 1, "no queue")
    done = run("ship", "rejoin", here, "jobs", url)
    assert done.status == 0
    assert done.out.decode() == f"set aside 1 item, 11 bytes, ids 2 to 2 of epoch 1: {here}/jobs.1.orphan\n"
    assert run("scan", here / "jobs.1.orphan", "jobs").out.splitlines()[-1].endswith(b"not shipped")
    assert [each.items for each in orphans(here, "jobs")] == [1]
    assert b"nothing is set aside" in run("ship", "rejoin", here, "jobs", url).out
    assert json.loads(run("ship", "rejoin", here, "jobs", url, "--json").out) is None
