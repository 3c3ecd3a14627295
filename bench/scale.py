"""Workloads about size: what a backlog, a reopening, a small queue, a thousand queues and an import cost.

Memory and descriptors are looked at in a process of their own: ``python -m bench.scale NAME FOLDER SCALE`` does the
work and prints its figures as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.measure import Contender, Figures, Workload

ITEM = b"x" * 100
BACKLOG_ITEMS = 2_000_000
REOPEN_BYTES = 1 << 30
REOPEN_ITEM_BYTES = 1000
REOPENINGS = 7
QUEUES = 1000
GETS = 20_000
_HOME = Path(__file__).parent.parent


def _resident() -> tuple[float, float]:
    """MiB resident: all of it, and without the pages of files."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    return tuple(int(facts[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def backlog(folder: Path, scale: float) -> Figures:
    """Put a backlog, then get in front of it."""
    from kestrelpy import JournaledQueue

    count, gets = int(BACKLOG_ITEMS * scale) // 1000 * 1000, int(GETS * scale) or 1
    batch = [ITEM] * 1000
    with JournaledQueue(folder, "bench", sync="never") as queue:
        reader = queue.reader()
        get, commit = reader.get, reader.commit

        def take() -> float:
            began = time.perf_counter()
            for _ in range(gets):
                commit(get())
            return (time.perf_counter() - began) / gets * 1e6

        for _ in range(0, gets, 1000):
            queue.put_many(batch)
        gets = gets // 1000 * 1000 or 1000
        short = take()
        all_before, anonymous_before = _resident()
        for _ in range(count // 1000):
            queue.put_many(batch)
        all_after, anonymous_after = _resident()
        for _ in range(count // 2 // 1000):  # past what a reader keeps in memory: from here it reads the journal
            reader.commit_many(reader.get_many(1000))
        return {
            "MiB resident, growth": all_after - all_before,
            "MiB resident without files, growth": anonymous_after - anonymous_before,
            "us a get and commit, short queue": short,
            "us a get and commit, in the backlog": take(),
            "MiB resident, growth, half of it read": _resident()[0] - all_before,
        }


def reopen(folder: Path, scale: float) -> Figures:
    """Open a queue again that holds a large backlog and was closed cleanly."""
    from kestrelpy import JournaledQueue

    batch = [b"x" * REOPEN_ITEM_BYTES] * 1000
    rounds = int(REOPEN_BYTES * scale) // (REOPEN_ITEM_BYTES * 1000) + 1
    with JournaledQueue(folder, "large", sync="never") as queue:
        queue.reader()
        for _ in range(rounds):
            queue.put_many(batch)
    with JournaledQueue(folder, "small", sync="never") as queue:
        queue.put(ITEM)
    figures: Figures = {}
    for name in ("small", "large"):
        times = []
        for _ in range(REOPENINGS):
            began = time.perf_counter()
            queue = JournaledQueue(folder, name, sync="never")
            times.append((time.perf_counter() - began) * 1e3)
            queue.close()
        figures["ms, one item" if name == "small" else f"ms, {rounds * 1000 * REOPEN_ITEM_BYTES:,} bytes"] = times
    return figures


def _disk_use(folder: Path) -> tuple[float, float]:
    """KiB: apparent and real."""
    facts = [path.stat() for path in folder.iterdir()]
    return sum(fact.st_size for fact in facts) / 1024, sum(fact.st_blocks for fact in facts) / 2


def disk(folder: Path, _scale: float) -> Figures:
    """What a queue with three small items takes on disk."""
    from kestrelpy import JournaledQueue

    with JournaledQueue(folder, "small") as queue:
        for _ in range(3):
            queue.put(b"hello")
        apparent, real = _disk_use(folder)
    closed_apparent, closed_real = _disk_use(folder)
    return {
        "KiB apparent, open": apparent,
        "KiB real, open": real,
        "KiB apparent, closed": closed_apparent,
        "KiB real, closed": closed_real,
    }


def thousand(folder: Path, scale: float) -> Figures:
    """Open many queues in one process."""
    from kestrelpy import JournaledQueue

    count = max(1, int(QUEUES * scale))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    resident = _resident()[0]
    began = time.perf_counter()
    queues = [JournaledQueue(folder, f"q{number}") for number in range(count)]
    opened = time.perf_counter()
    for queue in queues:
        queue.put(ITEM)
        queue.get().commit()
    used = time.perf_counter()
    figures: Figures = {
        "threads": threading.active_count() - threads,
        "descriptors a queue": (len(os.listdir("/proc/self/fd")) - descriptors) / count,
        "MiB resident": _resident()[0] - resident,
        "ms a queue to open": (opened - began) / count * 1e3,
        "ms a queue for a first put, get, commit": (used - opened) / count * 1e3,
    }
    for queue in queues:
        queue.close()
    return figures


def _import(module: str, folder: Path, _scale: float) -> Figures:
    """The second import counts: the first one compiles, into the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder)
    code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    command = [sys.executable, "-c", code]
    seconds = 0.0
    for _ in range(2):
        done = subprocess.run(command, cwd=_HOME, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImportError(done.stderr.strip().splitlines()[-1], name=module)
        seconds = float(done.stdout)
    return {"ms": seconds * 1e3}


def _elsewhere(name: str, folder: Path, scale: float) -> Figures:
    """Do one of the above in a process of its own."""
    command = [sys.executable, "-m", "bench.scale", name, str(folder), str(scale)]
    done = subprocess.run(command, cwd=_HOME, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


APART: dict[str, Callable[[Path, float], Figures]] = {
    "backlog": backlog,
    "reopen": reopen,
    "disk": disk,
    "thousand": thousand,
}

WORKLOADS = (
    Workload(
        "backlog",
        f"{BACKLOG_ITEMS:,} items of 100 bytes wait: memory, and a get in front of them",
        "",
        (Contender("kestrelpy", partial(_elsewhere, "backlog")),),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "reopen",
        "open a queue with 1 GiB of backlog after a clean close, its files in the page cache",
        "",
        (Contender("kestrelpy", partial(_elsewhere, "reopen")),),
        max_repeats=1,
        warm_up=False,
    ),
    Workload(
        "disk",
        "disk space of a queue that holds three small items",
        "",
        (Contender("kestrelpy", partial(_elsewhere, "disk")),),
        max_repeats=1,
        warm_up=False,
    ),
    Workload(
        "thousand",
        f"{QUEUES:,} queues open in one process",
        "",
        (Contender("kestrelpy", partial(_elsewhere, "thousand")),),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "import",
        "time to import, in a fresh interpreter",
        "",
        tuple(
            Contender(module, partial(_import, module))
            for module in ("kestrelpy", "queue", "queuelib", "persistqueue", "litequeue", "diskcache", "sqlite3")
        ),
    ),
)


if __name__ == "__main__":
    print(json.dumps(APART[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]))))
