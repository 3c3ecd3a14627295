"""A reader in another process: how long an item takes to get there, and what waiting for one costs.

``python -m bench.detached KIND FOLDER`` is that other process. It says on its standard output that it is there, then a
byte for each item, and at the end, in one line of JSON, for each item how many nanoseconds it took and how much
processor time the process had used by then. Items begin with the moment they were put; the clock is the machine's.

Flat out, the writer is the faster one, and what an item takes is mostly what those in front of it take: therefore also
with a bound on how many are under way.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from bench.measure import Contender, Figures, Workload, percentile

ITEM_BYTES = 100
BUSY = {200: 300, 2_000: 1_000}
"""Puts a second, and how many in a round."""
FLAT_OUT = 20_000
AHEAD = 64
IDLE_SECONDS = 2.0
_STAMP = struct.Struct("<q")
_REST = bytes(ITEM_BYTES - _STAMP.size)
_END = bytes(ITEM_BYTES)
_HOME = Path(__file__).parent.parent

Send = Callable[[bytes], object]


@dataclass
class Far:
    """The process at the other end, and what has come from it."""

    process: subprocess.Popen[bytes]
    send: Send
    sent: int = 0
    heard: int = 0
    rest: bytes = b""
    parts: dict[str, range] = field(default_factory=dict)

    def put(self) -> None:
        """Put one item that says when."""
        self.send(_STAMP.pack(time.monotonic_ns()) + _REST)
        self.sent += 1

    def hear(self, most: int) -> None:
        """Wait until at most so many items are under way."""
        assert self.process.stdout is not None
        while self.sent - self.heard > most:
            came = os.read(self.process.stdout.fileno(), 1 << 16)
            if not came:
                raise RuntimeError("the process at the other end has died")
            self.heard += len(came)

    def part(self, name: str, count: int, ahead: int, pause: float = 0.0) -> float:
        """Put so many items under a name, at most so many ahead; returns how many a second came through."""
        began = time.monotonic()
        for _ in range(count):
            self.put()
            self.hear(ahead)
            if pause:
                time.sleep(pause)
        self.hear(0)
        self.parts[name] = range(self.sent - count, self.sent)
        return count / (time.monotonic() - began)

    def end(self) -> list[tuple[float, float]]:
        """Tell it to end; returns what it has noted of each item."""
        assert self.process.stdout is not None
        self.send(_END)
        notes = self.process.stdout.read()
        if self.process.wait():
            raise RuntimeError(f"the process at the other end has ended with {self.process.returncode}")
        return cast(list[tuple[float, float]], json.loads(notes))


def _begin(kind: str, folder: Path, stack: ExitStack, send: Send | None = None) -> Far:
    command = [sys.executable, "-m", "bench.detached", kind, str(folder)]
    process = subprocess.Popen(command, cwd=_HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    stack.callback(process.stdin.close)
    if process.stdout.read(1) != b"!":
        raise RuntimeError("the process at the other end did not start")
    return Far(process, send or partial(os.write, process.stdin.fileno()))


def _measure(far: Far, scale: float) -> Figures:
    figures: Figures = {}
    for rate, count in BUSY.items():
        far.part(f"{rate:,}/s", max(5, int(count * scale)), ahead=count, pause=1 / rate)
    count = max(5, int(FLAT_OUT * scale))
    figures[f"items/s, flat out, {AHEAD} ahead"] = far.part(f"flat out, {AHEAD} ahead", count, ahead=AHEAD)
    figures["items/s, flat out"] = far.part("flat out", count, ahead=count)
    far.part("before idling", 1, ahead=0)
    idle = max(0.1, IDLE_SECONDS * scale)
    time.sleep(idle)
    far.part("after idling", 1, ahead=0)
    notes = far.end()
    for name, part in far.parts.items():
        if len(part) > 1:
            waits = [notes[number][0] / 1e3 for number in part]
            figures[f"us p50, {name}"] = percentile(waits, 0.5)
            figures[f"us p99, {name}"] = percentile(waits, 0.99)
    before, after = (notes[far.parts[name][0]][1] for name in ("before idling", "after idling"))
    figures["ms of processor a second, idle"] = (after - before) / 1e6 / idle
    return figures


def _kestrel(folder: Path, scale: float) -> Figures:
    from kestrelpy import JournaledQueue

    with ExitStack() as stack:
        queue = stack.enter_context(JournaledQueue(folder, "bench", sync="never"))
        return _measure(_begin("reader", folder, stack, queue.put), scale)


def _pipe(folder: Path, scale: float) -> Figures:
    with ExitStack() as stack:
        return _measure(_begin("pipe", folder, stack), scale)


# -- the other process -----------------------------------------------------------------------------------------------


def _listen(take: Callable[[], bytes]) -> None:
    """Take items until the last one; ``take`` has them out for good."""
    say = partial(os.write, sys.stdout.fileno())
    now, used = time.monotonic_ns, time.process_time_ns
    notes: list[tuple[int, int]] = []
    say(b"!")
    while (data := take()) != _END:
        at = now()
        notes.append((at - _STAMP.unpack_from(data)[0], used()))
        say(b".")
    print(json.dumps(notes))


def _far_reader(folder: Path) -> None:
    from kestrelpy import open_reader

    reader = open_reader(folder, "bench", "far", create=True)

    def take() -> bytes:
        item = reader.get()
        reader.commit(item)
        return item.data

    _listen(take)
    reader.close()


def _far_pipe(_folder: Path) -> None:
    _listen(partial(os.read, sys.stdin.fileno(), ITEM_BYTES))


FAR = {"reader": _far_reader, "pipe": _far_pipe}
WORKLOADS = (
    Workload(
        "detached",
        "from a put to the get of a reader in another process, and what that process costs while nothing comes",
        "",
        (Contender("kestrelpy", _kestrel), Contender("floor: a pipe", _pipe)),
    ),
)


if __name__ == "__main__":
    FAR[sys.argv[1]](Path(sys.argv[2]))
