"""Workloads about size: what a backlog, a reopening, a small queue, thousands of queues and an import cost.

Memory and descriptors are looked at in a process of their own: ``python -m bench.scale NAME FOLDER SCALE`` does the
work and prints its figures as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.measure import Contender, Figures, LeftOut, Workload

ITEM = b"x" * 100
BACKLOG_ITEMS = 2_000_000
REOPEN_BYTES = 10_000_000_000
REOPEN_BATCH = [b"x" * 10_000] * 100
REOPENINGS = 7
KILLS = 3
UNCLEAN_BATCHES = 15
"""What a process writes before it is killed: nearly a segment, which is all that an opening has to look through."""
QUEUES = 1000
FOLDER_QUEUES = 10_000
BUSY_QUEUES = 1_000
BUSY_ROUNDS = 20
SPARE_DESCRIPTORS = 200
GETS = 20_000
IMPORTS = 12
_HOME = Path(__file__).parent.parent


def _resident() -> tuple[float, float]:
    """MiB resident: all of it, and without the pages of files."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    return tuple(int(facts[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _allow_descriptors() -> int:
    """Raise the limit of descriptors as far as this process may; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


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


def _openings(folder: Path, name: str, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds to open a queue and its reader, and until the first item is there too."""
    from kestrelpy import JournaledQueue

    opened, got = [], []
    for _ in range(times):
        began = time.perf_counter()
        queue = JournaledQueue(folder, name, sync="never")
        reader = queue.reader()
        opened.append((time.perf_counter() - began) * 1e3)
        reader.get()
        got.append((time.perf_counter() - began) * 1e3)
        queue.close()
    return opened, got


def killed(folder: Path, _scale: float) -> Figures:
    """Write into the large queue, and die."""
    from kestrelpy import JournaledQueue

    queue = JournaledQueue(folder, "large", sync="never")
    for _ in range(UNCLEAN_BATCHES):
        queue.put_many(REOPEN_BATCH)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def reopen(folder: Path, scale: float) -> Figures:
    """Open a queue again that holds a large backlog: closed cleanly, and after its process was killed."""
    from kestrelpy import JournaledQueue

    rounds = int(REOPEN_BYTES * scale / sum(map(len, REOPEN_BATCH))) + 1
    with JournaledQueue(folder, "large", sync="never") as queue:
        queue.reader()
        for _ in range(rounds):
            queue.put_many(REOPEN_BATCH)
    with JournaledQueue(folder, "small", sync="never") as queue:
        queue.put(ITEM)
    small, _ = _openings(folder, "small", REOPENINGS)
    clean, clean_got = _openings(folder, "large", REOPENINGS)
    unclean: list[float] = []
    unclean_got: list[float] = []
    for _ in range(KILLS):
        died = subprocess.run([sys.executable, "-m", "bench.scale", "killed", str(folder), "1"], cwd=_HOME, check=False)
        if died.returncode != -signal.SIGKILL:
            raise RuntimeError(f"what was to be killed ended with {died.returncode}")
        opened, got = _openings(folder, "large", 1)
        unclean += opened
        unclean_got += got
    with JournaledQueue(folder, "large", sync="never") as queue:
        gigabytes = queue.reader().bytes / 1e9
    return {
        "ms, one item": small,
        "ms, backlog, closed": clean,
        "ms, backlog, killed": unclean,
        "ms to the first item, closed": clean_got,
        "ms to the first item, killed": unclean_got,
        "GB of backlog": gigabytes,
    }


def _reopen(folder: Path, scale: float) -> Figures:
    """As ``reopen``, if there is room on the disk for half as much again."""
    needed, free = REOPEN_BYTES * scale * 1.5, shutil.disk_usage(folder).free
    if free < needed:
        raise LeftOut(f"it needs {needed / 1e9:,.1f} GB of free disk and there are {free / 1e9:,.1f} (--dir, --scale)")
    return _elsewhere("reopen", folder, scale)


def _disk_use(folder: Path, name: str = "") -> tuple[float, float]:
    """KiB that a queue's files take: apparent and real."""
    facts = [path.stat() for path in folder.iterdir() if path.name.startswith(name)]
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


def thousand(folder: Path, scale: float, sync: float | str = 0.1) -> Figures:
    """Open many queues in one process, put one item into each. With a ``sync`` in seconds, others are synced beside
    that.
    """
    from kestrelpy import JournaledQueue

    count = max(1, int(QUEUES * scale))
    _allow_descriptors()
    threads, descriptors, resident = threading.active_count(), _descriptors(), _resident()[0]
    os.sync()  # what the one before has left to write is nobody's here
    began = time.perf_counter()
    queues = []
    for number in range(count):
        queue = JournaledQueue(folder, f"q{number:04}", sync=sync)  # type: ignore[arg-type]
        queue.put(ITEM)
        queues.append(queue)
    put = time.perf_counter() - began
    uses = [_disk_use(folder, f"q{number:04}") for number in range(min(count, 100))]
    figures: Figures = {
        "s to open 1,000 and put one each": put / count * 1000,
        "threads": threading.active_count() - threads,
        "descriptors a queue": (_descriptors() - descriptors) / count,
        "MiB resident": _resident()[0] - resident,
        "KiB of disk, apparent, the largest": max(apparent for apparent, _ in uses),
        "KiB of disk, real, the largest": max(real for _, real in uses),
    }
    began = time.perf_counter()
    for queue in queues:
        queue.get().commit()
    figures["ms a queue for a first get and commit"] = (time.perf_counter() - began) / count * 1e3
    for queue in queues:
        queue.close()
    return figures


def thousand_files(folder: Path, scale: float) -> Figures:
    """The floor: a thousand files, one write into each."""
    count = max(1, int(QUEUES * scale))
    _allow_descriptors()
    os.sync()
    began = time.perf_counter()
    files = []
    for number in range(count):
        descriptor = os.open(folder / f"{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, ITEM)
        files.append(descriptor)
    put = time.perf_counter() - began
    for descriptor in files:
        os.close(descriptor)
    return {"s to open 1,000 and put one each": put / count * 1000}


def folder_of_queues(folder: Path, scale: float) -> Figures:
    """Make many queues in one folder, close them, open them all again, and use a tenth of them.

    As many are open at a time as there are descriptors for; the figures say how many those are.
    """
    from kestrelpy import JournaledQueue

    limit, before = _allow_descriptors(), _descriptors()
    threads, resident = threading.active_count(), _resident()[0]
    first = JournaledQueue(folder, "first")
    idle = max(1, _descriptors() - before)
    first.put(ITEM)
    busy = _descriptors() - before
    first.erase()
    in_use = max(1, int(BUSY_QUEUES * scale))
    room = (limit - before - SPARE_DESCRIPTORS - in_use * (busy - idle)) // idle
    count = min(max(2, int(FOLDER_QUEUES * scale)), room)
    names = [f"q{number:05}" for number in range(count)]
    began = time.perf_counter()
    for name in names:
        with JournaledQueue(folder, name) as queue:
            queue.put(ITEM)
    made = time.perf_counter()
    queues = [JournaledQueue(folder, name) for name in names]
    opened = time.perf_counter()
    puts = [queue.put for queue in queues[:in_use]]
    for put in puts:
        put(ITEM)
    ready = time.perf_counter()
    for _ in range(BUSY_ROUNDS):
        for put in puts:
            put(ITEM)
    figures: Figures = {
        "queues": count,
        "descriptors allowed": limit,
        "ms a queue to make, put one and close": (made - began) / count * 1e3,
        "ms a queue to open again": (opened - made) / count * 1e3,
        "s to open all again": opened - made,
        "ms a queue for its first put": (ready - opened) / len(puts) * 1e3,
        "puts/s in turn into those busy": len(puts) * BUSY_ROUNDS / (time.perf_counter() - ready),
    }
    figures["MiB resident"] = _resident()[0] - resident
    figures["threads"] = threading.active_count() - threads
    figures["descriptors"] = _descriptors() - before
    began = time.perf_counter()
    for queue in queues:
        queue.close()
    figures["s to close all"] = time.perf_counter() - began
    return figures


def _import(module: str, folder: Path, scale: float) -> Figures:
    """The best of many starts with the import, less the best of as many without; all of it compiled beforehand."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder)

    def start(code: str) -> float:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=_HOME, env=environment, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise ImportError(done.stderr.strip().splitlines()[-1], name=module)
        return (time.perf_counter() - began) * 1e3

    start(f"import {module}")
    pairs = [(start("pass"), start(f"import {module}")) for _ in range(max(1, int(IMPORTS * scale)))]
    bare = min(without for without, _ in pairs)
    return {"ms over a bare interpreter": min(whole for _, whole in pairs) - bare, "ms, bare interpreter": bare}


def _elsewhere(name: str, folder: Path, scale: float) -> Figures:
    """Do one of the above in a process of its own."""
    command = [sys.executable, "-m", "bench.scale", name, str(folder), str(scale)]
    done = subprocess.run(command, cwd=_HOME, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


APART: dict[str, Callable[[Path, float], Figures]] = {
    "backlog": backlog,
    "reopen": reopen,
    "killed": killed,
    "disk": disk,
    "thousand": thousand,
    "thousand, never": partial(thousand, sync="never"),
    "files": thousand_files,
    "folder": folder_of_queues,
}


def _once(name: str, text: str, *contenders: Contender, repeats: int = 1) -> Workload:
    """A workload that takes long, or of which one round says all."""
    taking_part = contenders or (Contender("kestrelpy", partial(_elsewhere, name)),)
    return Workload(name, text, "", taking_part, max_repeats=repeats, warm_up=False)


WORKLOADS = (
    _once("backlog", f"{BACKLOG_ITEMS:,} items of 100 bytes wait: memory, and a get in front of them", repeats=3),
    _once(
        "reopen",
        f"open a queue with {REOPEN_BYTES / 1e9:,.0f} GB of backlog, its files as the page cache has them",
        Contender("kestrelpy", _reopen),
    ),
    _once("disk", "disk space of a queue that holds three small items"),
    _once(
        "thousand",
        f"{QUEUES:,} queues opened in one process, one item put into each",
        Contender("kestrelpy", partial(_elsewhere, "thousand")),
        Contender("kestrelpy never", partial(_elsewhere, "thousand, never")),
        Contender("floor: files", partial(_elsewhere, "files")),
        repeats=7,
    ),
    _once("folder", f"{FOLDER_QUEUES:,} queues in one folder, {BUSY_QUEUES:,} of them busy"),
)
IMPORTING = Workload(
    "import",
    f"time to start an interpreter and import, over starting it: the best of {IMPORTS} each",
    "",
    tuple(
        Contender(module, partial(_import, module))
        for module in ("kestrelpy", "queue", "queuelib", "persistqueue", "litequeue", "diskcache", "sqlite3", "culsans")
    ),
)


if __name__ == "__main__":
    print(json.dumps(APART[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]))))
