"""A consumer in a process of its own: ``python -m bench.outbox.consumer SPEC``, and ``Consumer``, who starts it.

SPEC is a JSON object: ``peer`` (module:class), ``where``, ``fill`` (how many jobs to put before it starts), ``count``
(it ends by itself when it has run so many and they are finished; 0: when its input ends). It says ``filled``, waits for
a line, says ``started``, and at its end what it has seen, as JSON, or why it can't take part. Instants are nanoseconds
of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from bench.measure import LeftOut
from bench.outbox.peers.base import Peer, number_of

DEADLINE_SECONDS = 1800.0
LOOK_SECONDS = 0.002
SELDOM_SECONDS = 0.02
"""Where looking costs the server something."""
ROOT = Path(__file__).parent.parent.parent


class Ran(NamedTuple):
    """What a consumer has seen. ``starts``: number of each job, and when its handler started."""

    first_ns: int
    marked_ns: int
    processor_seconds: float
    starts: list[tuple[int, int]]


class Consumer:
    """A consumer of ``peer`` at ``where``; a context manager."""

    def __init__(self, peer: type[Peer], where: str, *, fill: int = 0, count: int = 0) -> None:
        named = f"{peer.__module__}:{peer.__qualname__}"
        specification = {"peer": named, "where": where, "fill": fill, "count": count}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(specification)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            self._hear("filled")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _hear(self, wanted: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the consumer has died")
        said = json.loads(line)
        if "left_out" in said:
            raise LeftOut(said["left_out"])
        return said[wanted]

    def _tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def start(self) -> None:
        """Let it run jobs."""
        self._tell()
        self._hear("started")

    def result(self) -> Ran:
        """Wait for its end, if it counts."""
        first, marked, processor, starts = self._hear("ran")
        return Ran(first, marked, processor, [(number, at) for number, at in starts])

    def stop(self) -> Ran:
        """End it, if it does not count."""
        self._tell()
        return self.result()

    def close(self) -> None:
        """See that it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was said to it and not heard
                    pipe.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the process -----------------------------------------------------------------------------------------------------


def _say(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)


def _processor_seconds() -> float:
    """Of this process and of those it has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _until(condition: Callable[[], bool], look_seconds: float = LOOK_SECONDS) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {DEADLINE_SECONDS:,.0f} s not all jobs are done")
        time.sleep(look_seconds)


def _run(peer: Peer, fill: int, count: int) -> None:
    if fill:
        peer.create()
        peer.fill(range(fill))
    _say("filled", fill)
    sys.stdin.readline()
    starts: list[tuple[str, int]] = []
    clock = time.monotonic_ns

    def handler(text: str) -> None:
        starts.append((text, clock()))

    began = _processor_seconds()
    first = 0
    peer.start(handler)
    _say("started", True)
    if not count:
        sys.stdin.readline()
    elif peer.tells_starts:
        _until(lambda: len(starts) >= count)
        _until(lambda: not peer.left())
        first = starts[0][1]
    else:  # its handlers run elsewhere: what can be seen is the queue
        _until(lambda: peer.left() < count)
        first = clock()
        _until(lambda: not peer.left(), SELDOM_SECONDS)
    marked = clock()
    peer.stop()
    used = _processor_seconds() - began
    _say("ran", [first, marked, used, [(number_of(text), at) for text, at in starts]])


def main(specification: dict[str, Any]) -> None:
    """Be the consumer that is asked for."""
    try:
        module, _, name = specification["peer"].partition(":")
        peer: Peer = getattr(import_module(module), name)(specification["where"])
        _run(peer, specification["fill"], specification["count"])
        peer.close()
    except ImportError as error:
        _say("left_out", f"{error.name or 'it'} is not installed")
    except LeftOut as error:
        _say("left_out", str(error))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
