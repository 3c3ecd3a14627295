"""``pg_ctl stop -m immediate`` and starts of PostgreSQL, under load: consumers come back by themselves.

The actors are those of ``kills.py``, but nobody kills them. The server is stopped at random moments, is away for a
while, and once in a while stopped again as soon as it is back. What is asked for is the driver of the consumers.

The server does not sync, so that it is back soon: what it has written survives its end, as that of any process.
"""

from __future__ import annotations

import bisect
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.outbox.faults.actors import Setting
from tests.outbox.faults.kills import Stage
from tests.outbox.planted import plant_from_environment
from tests.processes.programs import as_program, rounds
from tests.support import postgres

LEASE = 3.0
SOON = 5.0
"""Seconds after a start within which the first job begins."""
CONSUMERS, PRODUCERS = 2, 2


def main(what: str, seed: int, limit: int | None, seconds: float | None, _: object) -> Counter[str]:
    choose, counts = random.Random(seed), Counter[str]()
    plant_from_environment()
    with tempfile.TemporaryDirectory() as name, postgres.private_cluster(fsync=False) as cluster:
        setting = Setting(cluster.url(), Path(name), seed, driver=what, lease=LEASE, pause=0.02)
        setting.create()
        stage, stops, starts = Stage(setting), [], []
        try:
            for kind in ("consumer",) * CONSUMERS + ("producer",) * PRODUCERS:
                stage.start(kind)
            stage.wait_until_started()
            for number in rounds(limit, seconds):
                time.sleep(0.3 + choose.random())
                for _ in range(2 if number % 10 == 4 else 1):
                    asked = time.monotonic_ns()
                    cluster.stop("immediate")
                    stops.append((asked, time.monotonic_ns()))
                    time.sleep(choose.choice((0.0, 0.1, 0.5, 0.5, LEASE + 1.0 if number % 10 == 9 else 1.0)))
                    cluster.start()
                    counts["stops"] += 1
                starts.append(time.monotonic_ns())
                _wait_for_a_job(setting.folder, starts[-1])
            stage.end("producer")
            stage.wait_until_done()
            stage.end("consumer")
            ledger = stage.check()
            counts["run again after a stop"] = ledger.check_reruns(stops)
        finally:
            stage.close()
    slowest = max(ledger.begins[bisect.bisect(ledger.begins, start)] - start for start in starts)
    counts["milliseconds to the first job, at most"] = slowest // 1_000_000
    counts.update(ledger.figures())
    return counts


def _wait_for_a_job(folder: Path, since: int) -> None:
    """A job begins ``SOON`` after ``since``."""
    while not any(_last_begin(path) > since for path in folder.glob("consumer-*.ledger")):
        assert time.monotonic_ns() - since < SOON * 1e9, f"no job for {SOON} s after a start"
        time.sleep(0.01)


def _last_begin(path: Path) -> int:
    """When its last job began; 0 if that is long ago."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()[1:]
    return max((int(line.split()[0]) for line in lines if b" begins " in line), default=0)


if __name__ == "__main__":
    as_program(main)
