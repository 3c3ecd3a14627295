"""Every system call of a small workload fails once, or from some point on, in a real interpreter, by strace.

A forked child waits until strace has attached to it, so that only the workload's own calls are counted and none of the
interpreter's start. What it was told (puts that returned, puts that raised, commits, checkpoints) it tells over a pipe.
Then a fresh process without strace opens the queue and everything is held against the promises. ``run`` goes through
all calls, or as many as ``limit`` says, chosen by the seed.

A call that strace makes fail is not made at all: so a failed sync loses nothing here, and what is seen is only whether
the library takes the failure as it should.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import portalocker  # noqa: F401 - imported here, so that no import is among the calls that fail

import kestrelpy.inbox.host
import kestrelpy.inbox.watcher  # noqa: F401 - the same, for what the first queue on a disk would import
from kestrelpy import DurabilityUnknown, JournaledQueue, KestrelError, QueueEmpty, Reader, scan
from tests.processes.programs import as_program, rounds

FAULTS = {
    "fdatasync": ("EIO", "ENOSPC"),
    "fsync": ("EIO",),
    "pwrite64": ("EIO", "ENOSPC"),
    "pwritev2": ("EIO", "ENOSPC"),
    "pread64": ("EIO",),
    "ftruncate": ("EIO",),
    "fallocate": ("ENOSPC", "EIO", "EOPNOTSUPP"),
    "fadvise64": ("EIO",),
    "openat": ("ENOSPC", "EMFILE", "EACCES"),
    "newfstatat": ("EIO",),
    "getdents64": ("EIO",),
    "renameat": ("EIO", "ENOSPC"),
    "unlinkat": ("EIO", "EACCES"),
    "mkdir": ("ENOSPC",),
    "flock": ("ENOLCK",),
    "mmap": ("ENOMEM",),
    "mremap": ("ENOMEM",),
    "close": ("EIO",),
}
SYNCS = ("fdatasync", "fsync")
EXPECTED = (OSError, KestrelError, MemoryError, RuntimeError)
"""What may be raised; of the last one only that no thread can be started, which is for want of memory as well."""
SEGMENT_BYTES = 4096
PATIENCE = 30
_SET_PTRACER = 0x59616D61


@dataclass(frozen=True)
class Case:
    """The ``at``-th ``call`` fails with ``error``; all later ones too if ``sticky``."""

    call: str
    error: str
    at: int
    sticky: bool
    sync: str

    @property
    def injection(self) -> str:
        return f"inject={self.call}:error={self.error}:when={self.at}{'+' if self.sticky else ''}"


@dataclass
class Told:
    """What the workload was told."""

    put: dict[int, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Puts that raised and stored nothing."""
    doubtful: list[str] = field(default_factory=list)
    """Puts that raised ``DurabilityUnknown``."""
    in_doubt: list[int] = field(default_factory=list)
    """Ids that a ``DurabilityUnknown`` named."""
    committing: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unexpected: str = ""
    lost: list[str] = field(default_factory=list)
    """What nobody closed, and what else was raised where nobody could be told."""


# -- what is done under strace ---------------------------------------------------------------------------------------


class Workload:
    """One queue opened twice in turn: open, put, get, commit, save, rotate, archive, close."""

    def __init__(self, folder: str, sync: Any) -> None:
        self._folder, self._sync = folder, sync
        self.told = Told()
        self._number = 0
        self._last_id = 0

    def run(self) -> Told:
        for _ in range(2):
            queue = self._try(self._open)
            if queue is not None:
                self._use(queue)
                self._try(queue.close)
        return self.told

    def _open(self) -> JournaledQueue:
        return open_queue(self._folder, self._sync)

    def _use(self, queue: JournaledQueue) -> None:
        reader = self._try(lambda: queue.reader("a"))
        for turn in range(4):
            self._put(queue, 1)
            self._put(queue, 3)
            if reader is not None:
                self._consume(queue, reader, turn)
        self._try(queue.sync)

    def _put(self, queue: JournaledQueue, count: int) -> None:
        items = [f"{self._number + at:06d}".ljust(400, ".") for at in range(count)]
        self._number += count
        try:
            ids = queue.put_many([item.encode() for item in items])
        except DurabilityUnknown as error:
            self.told.doubtful += items
            self._note(error)
        except EXPECTED as error:
            self.told.refused += items
            self._note(error)
        else:
            self.told.put.update(zip(ids, items, strict=True))

    def _consume(self, queue: JournaledQueue, reader: Reader, turn: int) -> None:
        items = self._try(lambda: reader.get_many(4, timeout=0)) or []
        for item in items:
            assert item.id > self._last_id or item.error_count or turn == 0, f"{item.id} after {self._last_id}"
            self._last_id = item.id
            assert item.data.decode() not in self.told.refused, f"{item.id} is one that was refused"
        if turn == 1 and items:
            self._try(lambda: reader.abort(items.pop()))
        self.told.committing += [item.id for item in items]

        def commit() -> bool:
            reader.commit_many(items)
            return True

        def checkpoint() -> bool:
            queue.checkpoint(durable=turn % 2 == 0)
            return True

        committed = self._try(commit)
        saved = self._try(checkpoint)
        if committed and saved:
            self.told.saved += [item.id for item in items]

    def _try(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns, or ``None`` if it raises what it may raise."""
        try:
            return call()
        except QueueEmpty:
            return None
        except EXPECTED as error:
            self._note(error)
            return None

    def _note(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError) and "thread" not in str(error):
            raise error
        self.told.errors.append(f"{type(error).__name__}: {error}")
        if isinstance(error, DurabilityUnknown):
            self.told.in_doubt += range(error.first_id, error.last_id + 1)


def open_queue(folder: str, sync: Any) -> JournaledQueue:
    archive = os.path.join(folder, "archive")
    return JournaledQueue(
        folder, "jobs", sync=sync, segment_bytes=SEGMENT_BYTES, archive_dir=archive, checkpoint_interval=3600
    )


def prepare(folder: str) -> None:
    """A queue whose process was killed: its journal has no end, its reader a few reads open."""
    child = os.fork()
    if child == 0:
        queue = open_queue(folder, "never")
        reader = queue.reader("a", start="earliest")
        for number in range(12):
            queue.put(f"old {number}".encode().ljust(300, b"."))
        reader.commit_many(reader.get_many(3))
        reader.abort(reader.get())
        queue.checkpoint()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


# -- strace ----------------------------------------------------------------------------------------------------------


@functools.cache
def reason_not_available() -> str | None:
    """Why calls can't be made to fail here; ``None`` if they can: it is tried, once."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, log = traced(lambda: Told(), "trace=openat", folder)
        except OSError as error:
            return f"strace can't attach to a process here: {error}"
    return None if "exited" in log else "strace sees nothing here"


def traced(work: Callable[[], Told], expression: str, folder: str) -> tuple[Told, str]:
    """What a forked child told that did ``work`` under strace, and what strace saw."""
    go, begin = os.pipe()
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begin)
        os.close(hear)
        _be_traced(work, go, tell)
    os.close(go)
    os.close(tell)
    log = os.path.join(folder, "strace")
    strace = subprocess.Popen(
        ["strace", "-f", "-q", "-o", log, "-e", expression, "-p", str(child)], stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_attached(child, strace)
        os.write(begin, b"!")
        told = _read_all(hear)
        os.waitpid(child, 0)
        strace.wait(PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        strace.kill()
        strace.communicate()
        os.close(begin)
        os.close(hear)
    if not told:
        raise Silent(f"the workload ended without a word: {expression}")
    with open(log, encoding="utf-8", errors="replace") as lines:
        return Told(**_restored(json.loads(told))), lines.read()


class Silent(AssertionError):
    """A workload has ended and told nothing."""


def _restored(facts: dict[str, Any]) -> dict[str, Any]:
    facts["put"] = {int(item_id): data for item_id, data in facts["put"].items()}
    return facts


def _be_traced(work: Callable[[], Told], go: int, tell: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(-1))
    os.read(go, 1)
    signal.alarm(PATIENCE)
    warnings.simplefilter("error", ResourceWarning)
    lost: list[str] = []
    sys.unraisablehook = lambda each: lost.append(f"{each.err_msg} {each.object!r}: {each.exc_value!r}")
    try:
        told = work()
        gc.collect()
        told.lost = lost
    except BaseException as error:
        told = Told(unexpected=f"{type(error).__name__}: {error}")
    os.write(tell, json.dumps(told.__dict__).encode())
    os._exit(0)


def _wait_attached(child: int, strace: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with open(f"/proc/{child}/status", encoding="ascii", errors="replace") as status:
            if re.search(r"^TracerPid:\s*[1-9]", status.read(), re.MULTILINE):
                return
        if strace.poll() is not None:
            assert strace.stderr is not None
            raise OSError(errno.EPERM, strace.stderr.read().strip())
        time.sleep(0.001)
    raise OSError(errno.ETIMEDOUT, "strace does not attach")


def _read_all(pipe: int) -> bytes:
    parts = []
    while part := os.read(pipe, 1 << 16):
        parts.append(part)
    return b"".join(parts)


# -- the loop --------------------------------------------------------------------------------------------------------


MEMORY = ("mmap", "mremap")
"""Calls that the interpreter makes as well, for memory of its own."""


def run(
    seed: int, *, limit: int | None = None, seconds: float | None = None, calls: Container[str] = FAULTS
) -> Counter[str]:
    """All cases of ``calls`` in an order that the seed chooses, up to ``limit`` of them or for ``seconds``."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        template = os.path.join(folder, "template")
        prepare(template)
        cases = [case for case in all_cases(template, folder) if case.call in calls]
        random.Random(seed).shuffle(cases)
        counts["calls there are"] = len(cases)
        for case, _ in zip(cases, rounds(limit, seconds), strict=False):
            place = os.path.join(folder, "queues")
            shutil.copytree(template, place)
            try:
                _try(case, place, folder, counts)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {case}: {error}") from error
            finally:
                shutil.rmtree(place)
    return counts


def all_cases(template: str, folder: str) -> Iterator[Case]:
    """As many of each call as an undisturbed run makes."""
    for sync in ("always", "never"):
        place = os.path.join(folder, "queues")
        shutil.copytree(template, place)
        told, log = traced(Workload(place, sync).run, "trace=" + ",".join(FAULTS), folder)
        shutil.rmtree(place)
        assert not told.unexpected, told.unexpected
        assert not told.errors, told.errors
        imported = re.findall(r"\S+\.py\S*", log)
        assert not imported, f"an import is among the calls that fail: {imported}"
        for call, errors in FAULTS.items():
            for at in range(1, len(re.findall(rf"^\d+ +{call}\(", log, re.MULTILINE)) + 1):
                for error in errors:
                    yield Case(call, error, at, False, sync)
                    yield Case(call, error, at, True, sync)


def _try(case: Case, place: str, folder: str, counts: Counter[str]) -> None:
    counts["cases"] += 1
    try:
        told, log = traced(Workload(place, case.sync).run, case.injection, folder)
    except Silent:
        if case.call not in MEMORY:
            raise
        counts["cases in which the interpreter had no memory to tell"] += 1
        in_a_fresh_process(lambda: what_is_left(place))
        return
    counts["calls that failed"] += log.count("(INJECTED)")
    counts["cases without a failure"] += "(INJECTED)" not in log
    counts["cases with an error told"] += bool(told.errors)
    assert not told.unexpected, told.unexpected
    assert not told.lost or case.call == "close", told.lost
    counts.update({error.partition(":")[0] for error in told.errors})
    if case.call in SYNCS and "(INJECTED)" in log:
        assert told.errors, "a sync failed and nobody was told"
    if case.call not in MEMORY:
        assert not any(error.startswith(("MemoryError", "RuntimeError")) for error in told.errors), told.errors
    left = in_a_fresh_process(lambda: what_is_left(place))
    check(told, left)


def in_a_fresh_process(work: Callable[[], object]) -> Any:
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            found = work()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps(found).encode())
        os._exit(0)
    os.close(tell)
    data = _read_all(hear)
    os.close(hear)
    os.waitpid(child, 0)
    found = json.loads(data)
    assert not isinstance(found, str), f"it can't be opened again: {found}"
    return found


def what_is_left(folder: str) -> list[list[tuple[int, str]]]:
    """Everything in live and archived segments, and what the reader is delivered."""
    with open_queue(folder, "never") as queue:
        reader = queue.reader("a")
        there = [(r.id, r.data.decode()) for r in scan(folder, "jobs", archive_dir=os.path.join(folder, "archive"))]
        delivered: list[tuple[int, str]] = []
        with contextlib.suppress(QueueEmpty):
            while True:
                delivered += [(item.id, item.data.decode()) for item in reader.get_many(100, timeout=0)]
        reader._check()
        queue._check()
        return [there, delivered]


def check(told: Told, left: list[list[tuple[int, str]]]) -> None:
    """Hold what is left against what was told."""
    there, delivered = ([(item_id, data) for item_id, data in part] for part in left)
    items = dict(there)
    ids = [item_id for item_id, _ in there]
    assert ids == sorted(set(ids)), f"ids do not rise: {ids}"
    lost = [i for i, data in told.put.items() if items.get(i) != data and i not in told.in_doubt]
    assert not lost, f"acknowledged and lost: {lost}; {told.errors}"
    known = {*told.put.values(), *told.doubtful}
    strange = [data for data in items.values() if data not in known and not data.startswith("old")]
    assert not strange, f"never put, or refused: {[data.rstrip('.') for data in strange]}; {told.errors}"
    assert sum(data.startswith("old") for data in items.values()) == 12
    again = {item_id for item_id, _ in delivered} & set(told.saved)
    assert not again, f"saved as done and delivered again: {sorted(again)}; {told.errors}"
    assert delivered == sorted(delivered), "not delivered in order"
    passed_over = set(items) - {item_id for item_id, _ in delivered} - set(told.committing) - set(OLD_DONE)
    assert not passed_over, f"never delivered: {sorted(passed_over)}; {told.errors}"
    assert all(items.get(item_id) == data for item_id, data in delivered)


OLD_DONE = (1, 2, 3)
"""What the process that was killed had committed and saved."""


def main(
    _what: str, seed: int, limit: int | None, seconds: float | None, plant: Callable[[], object] | None
) -> Counter[str]:
    """As a program of its own; with a fault planted, only syncs fail."""
    if plant is not None:
        plant()
    return run(seed, limit=limit, seconds=seconds, calls=FAULTS if plant is None else SYNCS)


if __name__ == "__main__":
    as_program(main)
