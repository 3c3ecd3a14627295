"""SIGKILL at any moment of publishers, owners and visitors of an inbox: each published version is there once and whole.

Two publishers write versions that rise, each of two parts; who comes after one that was killed asks for the last one,
publishes that again, and goes on. An owner puts its own items beside them and takes in, or visitors do. Whoever
is killed is followed by another one. At last all is taken in and counted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kestrelpy import JournaledQueue, QueueLocked, queue_names, scan
from kestrelpy.inbox import Part, PartWriter, last_version, pending, publish, take_in
from tests.processes.programs import as_program, rounds

SIZES = (1, 100, 3000)
APPS = ("left", "right")


def part(folder: str, app_id: str, version: int, half: int) -> Part:
    sized = random.Random(f"{app_id} {version} {half}")
    with PartWriter(folder, "jobs") as writer:
        for at in range(5):
            data = f"{app_id}|{version}|{half}|{at}|".encode() + bytes(sized.choice(SIZES))
            writer.add([data], expires_ms=(1 << 50) + at % 2)
        return writer.seal()


def publish_version(folder: str, app_id: str, version: int) -> bool:
    parts = [part(folder, app_id, version, half) for half in (0, 1)]
    return publish(folder, "jobs", parts, app_id=app_id, version=version)


def publisher(folder: str, app_id: str) -> None:
    last = last_version(folder, "jobs", app_id)
    if last is not None and publish_version(folder, app_id, last):
        raise AssertionError(f"{app_id} {last} was published, and is published again")
    version = -1 if last is None else last
    while True:
        version += 1
        if not publish_version(folder, app_id, version):
            raise AssertionError(f"{app_id} {version} is said to be published")


def owner(folder: str) -> None:
    with JournaledQueue(folder, "jobs", sync="never", segment_bytes=1 << 16, inbox_interval=0.002) as queue:
        while True:
            queue.put(b"own")
            time.sleep(0.001)


def visitor(folder: str) -> None:
    while True:
        try:
            take_in(folder, "jobs")
        except QueueLocked:
            time.sleep(0.001)


def start(work: Callable[..., None], *arguments: Any) -> int:
    """Another process."""
    pid = os.fork()
    if not pid:
        try:
            work(*arguments)
        except BaseException as error:  # to be seen by who runs this
            print(f"{work.__name__}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    return pid


def end(pid: int) -> None:
    """Kill it, which must be what ends it."""
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise AssertionError("it had ended by itself")


def published(folder: str) -> int:
    """How many batches there are so far."""
    last = [last_version(folder, "jobs", app_id) for app_id in APPS]
    return sum(version + 1 for version in last if version is not None)


def check(folder: str, counts: Counter[str]) -> None:
    """All that is published is there once, as a whole, and nothing else."""
    take_in(folder, "jobs")
    assert pending(folder, "jobs") == 0
    seen: list[tuple[str, int, int, int]] = []
    for record in scan(folder, "jobs"):
        if record.data != b"own":
            app_id, version, half, at, _ = record.data.split(b"|", 4)
            seen.append((app_id.decode(), int(version), int(half), int(at)))
    whole = [(half, at) for half in (0, 1) for at in range(5)]
    versions_of = {app_id: last_version(folder, "jobs", app_id) for app_id in APPS}
    wanted = {(app_id, at) for app_id, last in versions_of.items() for at in range(-1 if last is None else last + 1)}
    batches = [seen[at : at + 10] for at in range(0, len(seen), 10)]
    for batch in batches:
        assert len({each[:2] for each in batch}) == 1, batch
        assert [each[2:] for each in batch] == whole, batch
    versions = [batch[0][:2] for batch in batches]
    assert len(versions) == len(set(versions)), "a batch is there twice"
    assert set(versions) == wanted
    counts["batches"] += len(batches)


def main(what: str, seed: int, limit: int | None, seconds: float | None, _plant: object) -> Counter[str]:
    choose, counts = random.Random(seed), Counter[str]()
    folder = tempfile.mkdtemp()
    work: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
        "left": (publisher, ("left",)),
        "right": (publisher, ("right",)),
        "own": (owner if what == "owner" else visitor, ()),
    }
    running: dict[str, int] = {}
    for _ in rounds(limit, seconds, lambda: published(folder) > (limit or 0) // 4):
        for name in work.keys() - running.keys():
            program, arguments = work[name]
            running[name] = start(program, folder, *arguments)
        time.sleep(choose.random() * 0.08)
        for name in list(running) if choose.random() < 0.2 else [choose.choice(sorted(running))]:
            end(running.pop(name))
            counts["kills"] += 1
    for pid in running.values():
        end(pid)
    check(folder, counts)
    assert queue_names(folder) == ["jobs"]
    shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    as_program(main)
