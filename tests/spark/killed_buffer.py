"""A process with a driver buffer that is killed again and again: ``killed_buffer.py FOLDER tables|spark KILLS SEED``.

Each life is a forked child (``spark``: a process of its own, with a session) that opens the queue, puts, and drains it
through an idempotent ``process``: a file per batch id, replaced as a whole, that must say the same if it is there. It
kills itself at its n-th step, n drawn: a step is the beginning or the end of a plan's save, of its mark, of a
``process``, a commit, a checkpoint. The last life goes on until nothing is left. The last line printed is what is to be
proved from, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kestrelpy import JournaledQueue
from kestrelpy.spark import DriverBuffer
from kestrelpy.spark.buffer.batch_plan import PlanFile

STEPS = 12
"""The steps of two batches: a kill is at one of them."""


class Tables:
    """A session whose DataFrames are Arrow tables."""

    def createDataFrame(self, table: Any) -> Any:  # noqa: N802 - Spark's name
        return table


def write_batch(folder: Path, df: Any, batch_id: int) -> None:
    """Idempotent by the batch's id; a batch that comes again must be the same."""
    rows = df.to_pylist() if hasattr(df, "to_pylist") else [row.asDict() for row in df.collect()]
    told = [[row["id"], hashlib.sha256(row["data"]).hexdigest()] for row in rows]
    path = folder / "out" / f"{batch_id}.json"
    if path.exists():
        if json.loads(path.read_text()) != told:
            raise SystemExit(f"batch {batch_id} is not the same again")
        with (folder / "repeated").open("a") as repeated:
            repeated.write(f"{batch_id}\n")
    path.with_suffix(".tmp").write_text(json.dumps(told))
    path.with_suffix(".tmp").rename(path)


def count_steps(owner: Any, names: tuple[str, ...], left: list[int]) -> None:
    """Make these methods kill the process when ``left`` is used up, as they begin or as they end."""

    def step() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(inner: Any) -> Any:
        def call(*each: Any, **more: Any) -> Any:
            step()
            result = inner(*each, **more)
            step()
            return result

        return call

    for name in names:
        setattr(owner, name, counted(getattr(owner, name)))


def live(folder: Path, kind: str, steps: int, seed: int) -> None:
    """One life; ``steps`` 0: until nothing is left."""
    draw = random.Random(seed)
    if kind == "spark":
        from kestrelpy.spark import local_session

        spark: Any = local_session(
            master="local[1]", **{"spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"}
        )
    else:
        spark = Tables()
    queue = JournaledQueue(folder / "queues", "jobs", segment_bytes=4096, checkpoint_interval=0.002)
    count_steps(PlanFile, ("save", "finish"), left := [steps])
    count_steps(queue.reader(), ("commit_many", "checkpoint"), left)

    def process(df: Any, batch_id: int) -> None:
        if draw.random() < 0.2:
            raise RuntimeError("not this time")
        write_batch(folder, df, batch_id)

    buffer = DriverBuffer(queue, spark, process, max_items=7, max_wait=0.001, backoff=(0.0, 0.0))
    count_steps(buffer, ("_process",), left)
    buffer.start()
    tail_id = queue.stats().tail_id
    while True:
        tail_id = queue.put_many([b"item %d" % (tail_id + 1 + n) for n in range(draw.randrange(1, 9))])[-1]
        if steps == 0 or not buffer.running:
            break
        buffer.wait_idle(0.3 if kind == "spark" else 0.001)
    buffer.wait_idle(60)
    buffer.stop()
    last_id = queue.stats().tail_id
    queue.close()
    repeated = folder / "repeated"
    kills = json.loads((folder / "kills").read_text())
    count = len(repeated.read_text().splitlines()) if repeated.exists() else 0
    print(json.dumps({"kills": kills, "last_id": last_id, "repeated": count}), flush=True)


def main(folder: Path, kind: str, kills: int, seed: int) -> None:
    """All lives, one after the other."""
    import pandas  # noqa: F401 - what each life would import for itself, and what takes longest
    import portalocker  # noqa: F401

    draw = random.Random(seed)
    (folder / "out").mkdir()
    for at in range(kills + 1):
        steps = draw.randrange(1, 2 * STEPS) if at < kills else 0
        (folder / "kills").write_text(str(at))
        if kind == "spark":
            status = subprocess.call([sys.executable, __file__, str(folder), "live-spark", str(steps), str(seed + at)])
        else:
            child = os.fork()
            if child == 0:
                live(folder, kind, steps, seed + at)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != (-signal.SIGKILL if steps else 0):
            raise SystemExit(f"life {at} ended with {status}")


if __name__ == "__main__":
    where, what, count, start = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if what == "live-spark":
        live(where, "spark", count, start)
    else:
        main(where, what, count, start)
