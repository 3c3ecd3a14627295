"""SIGKILL at any moment of loggers and of the owner of their queue: no record is lost that ``emit`` returned for.

So many loggers are forked from the owner, with the handler that it has; as many are started by themselves, and know the
queue by folder and name. Each numbers its records, and says after each ``emit`` that it has returned: by a byte at the
end of a file of its own, which a kill leaves. The owner logs, too, and a listener of it writes down what it was
handed. Who is killed is followed by another one; loggers that have lost their owner go on for a while. At last what
they have left is collected and counted: each record that was said is there, once, in the order of its process, and at
most one more of each process that was killed; and the listener had each of them at least once.

``what`` is the number of loggers of each kind, and perhaps the name of a fault: ``"16"``, ``"3 buffered"``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from kestrelpy import JournaledQueue, QueueLocked, inbox, scan
from kestrelpy.logging import DurableHandler, DurableListener, collect
from kestrelpy.logging.courier import Courier
from tests.processes.programs import as_program

RECORDS_PER_KILL = 10_000
AFTER_THE_OWNER = 300
"""So many records a logger writes whose owner was killed."""
PACE = 0.0005


def faults(name: str) -> contextlib.AbstractContextManager[Any]:
    """What is planted to be found: ``buffered``, where emit returns first and stores later; ``doubled``, where a batch
    that is published again is another one; ``unordered``, where a batch is turned round.
    """
    if name == "buffered":
        real, held = Courier.put, list[bytes]()

        def put(courier: Courier, data: bytes) -> None:
            held.append(data)
            if len(held) >= 20:
                for each in held:
                    real(courier, each)
                held.clear()

        return mock.patch.object(Courier, "put", put)
    if name == "doubled":
        publish = inbox.publish

        def without_version(directory: Any, queue: Any, parts: Any, **_: Any) -> bool:
            return publish(directory, queue, parts)

        return mock.patch.object(inbox, "publish", without_version)
    if name == "unordered":
        add = inbox.PartWriter.add

        def turned(writer: inbox.PartWriter, items: Any, **options: Any) -> None:
            add(writer, items[::-1], **options)

        return mock.patch.object(inbox.PartWriter, "add", turned)
    return contextlib.nullcontext()


class Logger:
    """Logs numbered records, and says which of them ``emit`` has returned for."""

    def __init__(self, folder: Path, name: str, handler: logging.Handler) -> None:
        self._logger = logging.Logger(name)
        self._logger.addHandler(handler)
        self._said = os.open(folder / "said" / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count = 0

    def log(self) -> None:
        self._logger.info("record %d", self._count, extra={"number": self._count})
        os.write(self._said, b".")
        self._count += 1


def is_over(folder: Path) -> bool:
    return (folder / "stop").exists()


def by_name(folder: Path, name: str) -> None:
    """A logger that was started by itself."""
    handler = DurableHandler("logs", folder / "q", flush_interval=0.1)
    logger = Logger(folder, name, handler)
    while not is_over(folder):
        for _ in range(64):
            logger.log()
            time.sleep(PACE)
    handler.close()


def forked(folder: Path, name: str, handler: logging.Handler, owner: int) -> None:
    """A logger that was forked from the owner. It ends without a word to anybody."""
    logger, left = Logger(folder, name, handler), AFTER_THE_OWNER
    while left > 0 and not is_over(folder):
        if os.getppid() != owner:
            left -= 16
        for _ in range(16):
            logger.log()
            time.sleep(PACE)
    os._exit(0)


class Written(logging.Handler):
    """Writes down what it is handed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = os.open(folder / "handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._file, f"{record.name} {record.number}\n".encode())  # type: ignore[attr-defined]


def opened(folder: Path) -> JournaledQueue:
    while True:
        try:
            return JournaledQueue(
                folder / "q", "logs", archive_dir=folder / "archive", segment_bytes=1 << 20, inbox_interval=0.1
            )
        except QueueLocked:  # the one that was killed is not quite gone
            time.sleep(0.005)


def owner(folder: Path, name: str, loggers: int) -> None:
    """Owns the queue, logs, forks loggers, and hands records to a handler."""
    with opened(folder) as queue:
        handler = DurableHandler(queue, flush_interval=0.1)
        children: dict[int, int] = {}
        made = 0
        logger, pid = Logger(folder, name, handler), os.getpid()
        with DurableListener(queue.reader("written"), Written(folder)):
            while not is_over(folder):
                for slot in range(loggers):
                    child = children.get(slot)
                    if child is None or os.waitpid(child, os.WNOHANG)[0]:
                        made += 1
                        children[slot] = fork(folder, f"{name}-forked-{slot}-{made}", handler, pid)
                for _ in range(64):
                    logger.log()
                    time.sleep(PACE)
            for child in children.values():
                os.waitpid(child, 0)
        handler.close()


def fork(folder: Path, name: str, handler: logging.Handler, pid: int) -> int:
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            (folder / "forked" / str(os.getpid())).touch()
            forked(folder, name, handler, pid)
        os._exit(1)
    return child


PROGRAMS = {"by_name": by_name, "owner": owner}


def start(folder: Path, program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", __file__, "--inside", str(folder), program, *map(str, arguments)]
    return subprocess.Popen(command)


def said(folder: Path) -> dict[str, int]:
    """How many records each process has said to have logged."""
    return {path.name: path.stat().st_size for path in (folder / "said").iterdir()}


def kill_a_forked_one(folder: Path, choose: random.Random) -> bool:
    """Kill one that lives, if there is any: its name is left by whoever has ended."""
    paths = sorted((folder / "forked").iterdir())
    choose.shuffle(paths)
    for path in paths:
        is_there = lives(path)
        path.unlink()
        with contextlib.suppress(ProcessLookupError):
            if is_there:
                os.kill(int(path.name), signal.SIGKILL)
                return True
    return False


def check(folder: Path, counts: Counter[str]) -> None:
    """Each record that was said is there once and in order, and at most one more of each process."""
    there: dict[str, int] = {}
    for record in scan(folder / "q", "logs", archive_dir=folder / "archive"):
        fields = json.loads(record.data)
        name, number = fields["name"], fields["extra"]["number"]
        if number != there.get(name, 0):
            raise AssertionError(f"{name}: record {number} comes after {there.get(name, 0)} others")
        if fields["message"] != f"record {number}":
            raise AssertionError(f"{name}: record {number} says {fields['message']!r}")
        there[name] = number + 1
    for name, count in said(folder).items():
        if not count <= there.get(name, 0) <= count + 1:
            raise AssertionError(f"{name}: emit returned for {count} records, and {there.get(name, 0)} are there")
        counts["records"] += count
    handled: dict[str, set[int]] = {name: set() for name in there}
    for line in (folder / "handled").read_text("ascii").splitlines():
        name, number = line.split()
        handled[name].add(int(number))
        counts["handled"] += 1
    for name, count in there.items():
        if handled[name] != set(range(count)):
            raise AssertionError(f"{name}: {count} records, of which {len(handled[name])} were handled")


def settle(folder: Path) -> None:
    """Collect what processes have left, and let a last listener have all of it."""
    while any(map(lives, (folder / "forked").iterdir())):
        time.sleep(0.01)
    collect(folder / "q", "logs")
    with opened(folder) as queue:
        queue.take_in()
        with DurableListener(queue.reader("written"), Written(folder)):
            pass


def lives(path: Path) -> bool:
    """Whether the logger that the path is named after still runs. Its number may be another process's by now, which has
    not our folder in its command; one that is about to end has no command.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = Path(f"/proc/{path.name}/cmdline").read_bytes()
        state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and (not command or os.fsencode(path.parent.parent) in command)
    return False


def main(what: str, seed: int, limit: int | None, seconds: float | None, _plant: object) -> Counter[str]:
    loggers, _, fault = what.partition(" ")
    choose, counts, folder = random.Random(seed), Counter[str](), Path(tempfile.mkdtemp())
    kills, each = limit or 10, int(loggers)
    os.environ["LOGGING_FAULT"] = fault
    for name in ("said", "forked"):
        (folder / name).mkdir()
    running: dict[str, subprocess.Popen[bytes]] = {}
    made, deadline = 0, time.monotonic() + (seconds or 100)
    target = kills * RECORDS_PER_KILL if each > 8 else kills * 300
    while True:
        for name in ["owner", *(f"named-{slot}" for slot in range(each))]:
            if name not in running:
                made += 1
                program = ("owner", f"owner-{made}", each) if name == "owner" else ("by_name", f"{name}-{made}")
                running[name] = start(folder, *program)
        total = sum(said(folder).values())
        if counts["kills"] >= kills and total >= target:
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"{total} of {target} records and {counts['kills']} kills are too few for the time")
        time.sleep(0.02)
        if total * kills < counts["kills"] * target or counts["kills"] >= kills:
            continue
        victim = choose.choice(["owner", "forked", "forked", f"named-{choose.randrange(each)}"])
        if victim == "forked":
            counts["kills"] += kill_a_forked_one(folder, choose)
            continue
        process = running.pop(victim)
        process.kill()
        if process.wait() != -signal.SIGKILL:
            raise AssertionError(f"{victim} had ended by itself with {process.returncode}")
        counts["kills"] += 1
        counts[f"kills of {'owners' if victim == 'owner' else 'loggers'}"] += 1
    (folder / "stop").touch()
    for name, process in running.items():
        if process.wait():
            raise AssertionError(f"{name} ended with {process.returncode}")
    settle(folder)
    check(folder, counts)
    shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        with faults(os.environ["LOGGING_FAULT"]):
            place, program, *rest = sys.argv[2:]
            PROGRAMS[program](Path(place), rest[0], *map(int, rest[1:]))  # type: ignore[operator]
        sys.exit(0)
    as_program(main)
