"""SIGKILL at any moment of the process that has an outbox on a work queue: ``journal_kills.py`` says what is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kestrelpy.outbox import Outbox
from kestrelpy.work import WorkQueue
from tests.outbox.faults import journal_kills as kills
from tests.processes.programs import counts_of
from tests.support.budget import SEED, Tally, drawn, share
from tests.support.paths import PYTHONPATH

KILLS = max(6, share(100))


@pytest.mark.parametrize("sync", drawn(kills.SYNCS, 1))
def test_the_process_is_killed(sync: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(kills, tmp_path, sync, SEED, limit=KILLS)
    tally.add("SIGKILLs of an outbox on a work queue", counts["kills"])
    tally.add("jobs of an outbox on a work queue that were run to their end", counts["jobs"])
    assert counts["kills"] == KILLS
    assert counts["jobs"] > 10 * KILLS
    assert counts["rolled"]
    assert counts["failures"]


POISON = """
import os, signal, sys

from kestrelpy.outbox import Outbox, current_job
from kestrelpy.work import WorkQueue

def handler(payload):
    if payload == "poison":
        print(current_job().tries, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with WorkQueue("work") as queue, Outbox(queue, backoff=0) as outbox:
    outbox.add_consumer("mail", handler, max_retries=2, on_dead=lambda job: print("dead", job.tries, flush=True))
    if not outbox.jobs():
        outbox.put_many(None, "mail", ["poison", "good", "good"])
    with outbox.running(threads=1, poll_interval=0.05, retry_interval=0.01):
        while any(job.status != "dead" for job in outbox.jobs()):
            pass
"""


def test_a_job_that_kills_its_process_wears_out(tmp_path: Path) -> None:
    ends, said = [], []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", POISON],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            capture_output=True,
            text=True,
            check=False,
        )
        ends.append(done.returncode)
        said += done.stdout.splitlines()
    assert ends == [-signal.SIGKILL] * 3 + [0]
    assert said == ["1", "2", "3", "dead 3"]
    with WorkQueue(tmp_path / "work") as queue, Outbox(queue) as outbox:
        assert [(job.payload, job.status, job.tries) for job in outbox.jobs()] == [("poison", "dead", 3)]
