"""Single calls, measured with pyperf: ``python -m bench.micro``; ``--fast`` for a quick look, ``-o FILE`` to keep it,
``python -m pyperf compare_to`` for two of them.

What a put, a get and a commit are made of stands beside them: the store into a mapping, the checksum, the frame, the
time, the system call that is avoided. A queue is emptied outside of the time that counts where it would grow.
"""

from __future__ import annotations

import mmap
import os
import queue
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any
from zlib import crc32

from bench.floor import FRAME_BYTES, make_memory_floor
from bench.rivals import ITEM, Rival
from bench.rivals.durable import Floor, Kestrel, Queuelib

Loop = Callable[[int], float]
"""Runs something so many times, and returns the seconds that it took."""


def _timed(work: Callable[[], object], loops: int) -> float:
    began = time.perf_counter()
    for _ in repeat(None, loops):
        work()
    return time.perf_counter() - began


def _pair(put: Callable[[Any], object], take: Callable[[], object]) -> Loop:
    def run(loops: int) -> float:
        began = time.perf_counter()
        for _ in repeat(None, loops):
            put(ITEM)
            take()
        return time.perf_counter() - began

    return run


def _in_folder(rival: type[Rival], work: Callable[[Rival, int], float]) -> Loop:
    """Of a queue that is new each time."""

    def run(loops: int) -> float:
        with tempfile.TemporaryDirectory(prefix="kestrelpy-micro-") as folder:
            made = rival(Path(folder), loops)
            try:
                return work(made, loops)
            finally:
                made.close()

    return run


def _put(made: Rival, loops: int) -> float:
    return _timed(lambda: made.fill(loops, ITEM), 1)


def _take(made: Rival, loops: int) -> float:
    made.stock(loops, ITEM)
    return _timed(lambda: made.drain(loops), 1)


def _cycle(made: Rival, loops: int) -> float:
    return _timed(lambda: made.cycle(loops, ITEM), 1)


def _store(loops: int) -> float:
    """A store of one frame into a mapping, again and again at the same place."""
    frame, size = bytes(FRAME_BYTES) + ITEM, FRAME_BYTES + len(ITEM)
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
            began = time.perf_counter()
            for _ in repeat(None, loops):
                mapped[0:size] = frame
            return time.perf_counter() - began


def _write(loops: int) -> float:
    """The same by a system call."""
    frame = bytes(FRAME_BYTES) + ITEM
    with tempfile.TemporaryFile() as file:
        descriptor, write = file.fileno(), os.pwrite
        began = time.perf_counter()
        for _ in repeat(None, loops):
            write(descriptor, frame, 0)
        return time.perf_counter() - began


def calls() -> dict[str, Loop]:
    """What is measured, by name."""
    from kestrelpy import ConcurrentBlockingQueue, SimpleBlockingQueue

    concurrent: Any = ConcurrentBlockingQueue()
    simple: Any = SimpleBlockingQueue()
    standard: queue.Queue[Any] = queue.Queue()
    in_c: queue.SimpleQueue[Any] = queue.SimpleQueue()
    bare: deque[Any] = deque()
    pack = struct.Struct("<IQQII").pack
    return {
        "memory put, get: kestrelpy Concurrent": _pair(concurrent.put, concurrent.get),
        "memory put, get: kestrelpy Simple": _pair(simple.put, simple.get),
        "memory put, get: floor": _pair(*make_memory_floor()),
        "memory put, get: queue.Queue": _pair(standard.put, standard.get),
        "memory put, get: queue.SimpleQueue": _pair(in_c.put, in_c.get),
        "memory put, get: collections.deque": _pair(bare.append, bare.popleft),
        "put: kestrelpy never": _in_folder(Kestrel, _put),
        "put: floor": _in_folder(Floor, _put),
        "put: queuelib": _in_folder(Queuelib, _put),
        "get, commit: kestrelpy never": _in_folder(Kestrel, _take),
        "get, commit: floor": _in_folder(Floor, _take),
        "pop: queuelib": _in_folder(Queuelib, _take),
        "put, get, commit: kestrelpy never": _in_folder(Kestrel, _cycle),
        "put, get, commit: floor": _in_folder(Floor, _cycle),
        "push, pop: queuelib": _in_folder(Queuelib, _cycle),
        "part: store of 132 bytes into a mapping": _store,
        "part: pwrite of 132 bytes": _write,
        "part: checksum of 100 bytes": lambda loops: _timed(lambda: crc32(ITEM), loops),
        "part: five fields packed": lambda loops: _timed(lambda: pack(100, 1, 1, 1, 1), loops),
        "part: the time": lambda loops: _timed(time.time_ns, loops),
        "part: nothing, by a lambda": lambda loops: _timed(lambda: None, loops),
    }


def main() -> None:
    """Hand all of them to pyperf, which has its own arguments."""
    try:
        pyperf = import_module("pyperf")
    except ImportError:
        sys.exit("pyperf is not installed: it comes with the bench extra")
    runner = pyperf.Runner(program_args=("-m", "bench.micro"))
    for name, loop in calls().items():
        runner.bench_time_func(name, loop)


if __name__ == "__main__":
    main()
