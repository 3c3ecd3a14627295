"""Two servers for the differential test, and how to set their time: the real beanstalkd, and ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from kestrelpy.server import BeanstalkServer
from kestrelpy.testing import ManualClock
from tests.server.differential_sequences import MAX_JOB_BYTES

BEANSTALKD = shutil.which("beanstalkd") or "/usr/bin/beanstalkd"
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
START_S = 1_700_000_000
SECOND = 1_000_000_000
"""Times are integers, in nanoseconds since the start."""
PATIENCE = 10.0
"""Seconds after which an answer that must come is taken not to come."""


def missing() -> str:
    """What this machine lacks for comparing with the real one; empty if nothing."""
    lacking = [
        name
        for name, there in (("beanstalkd", Path(BEANSTALKD).exists()), ("faketime", FAKETIME is not None))
        if not there
    ]
    return f"not installed: {', '.join(lacking)} (Debian packages)" if lacking else ""


class Server(Protocol):
    """What the harness drives."""

    name: str

    def connect(self) -> socket.socket:
        """A new connection."""

    def go_to(self, now_ns: int, late_ns: int) -> None:
        """Set its time, ``late_ns`` later for one that needs that. What falls due happens when it is next spoken to."""

    def next_due(self) -> int | None:
        """When something will happen by itself, if it knows."""

    def turn(self) -> None:
        """Let it work, if it does not by itself."""

    def drain(self) -> None:
        """What SIGUSR1 does."""

    def kill(self) -> None:
        """End it as kill -9 does, and start another on what it left."""

    def close(self) -> None:
        """End it."""


class Beanstalkd:
    """The real one, in a process whose time is in a file."""

    def __init__(
        self, folder: Path, *options: str, name: str = "beanstalkd", max_job_bytes: int = MAX_JOB_BYTES
    ) -> None:
        self.name = name
        self._socket = folder / "socket"
        self._options = ("-z", str(max_job_bytes), *options)
        self._now = os.open(folder / "now", os.O_RDWR | os.O_CREAT, 0o600)
        self._environment = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_TIMESTAMP_FILE": str(folder / "now"),
            "TZ": "UTC",
        }
        self.go_to(0, 0)
        self._start()

    def _start(self) -> None:
        command = [BEANSTALKD, "-l", f"unix:{self._socket}", *self._options]
        self._process = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                self.connect().close()
                return
            assert self._process.poll() is None, f"{command} has ended with {self._process.returncode}"
            assert time.monotonic() < until, f"{command} does not listen"
            os.sched_yield()

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(str(self._socket))
        except OSError:
            made.close()
            raise
        return made

    def go_to(self, now_ns: int, late_ns: int) -> None:
        seconds, rest = divmod(now_ns + late_ns, SECOND)
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(START_S + seconds))
        # half a microsecond more: libfaketime computes with floats, and beanstalkd cuts off what is smaller
        os.pwrite(self._now, b"%b.%06d5\n" % (text.encode(), rest // 1000), 0)

    def next_due(self) -> int | None:
        return None

    def turn(self) -> None:
        pass

    def has_crashed(self) -> bool:
        """Whether it has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        return self._process.returncode is not None

    def drain(self) -> None:
        os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.unlink()
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._now)


class SteppedClock(ManualClock):
    """A manual clock that says when its next timer is due."""

    def next_due_ns(self) -> int | None:
        """Nanoseconds after this clock's start."""
        with self._lock:
            self._heap.clear_out()
            return int(self._heap.next_due()) if self._heap else None

    def go_to_ns(self, elapsed_ns: int) -> None:
        """Advance to this many nanoseconds after the start."""
        self.advance(max(0, elapsed_ns - self._elapsed_ns) / SECOND)


class CountingSelector(selectors.DefaultSelector):
    """A selector that says whether there has been anything to do."""

    seen = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.seen += len(found)
        return found


class Kestrel:
    """Ours, in this process, on a loop that turns when it is told to."""

    def __init__(self, folder: Path, *, directory: Path | None = None, **options: Any) -> None:
        self.name = "kestrelpy"
        self._folder, self._directory = folder, directory
        self._options = {"max_job_bytes": MAX_JOB_BYTES, **options}
        self._selector = CountingSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._began_ns = 0
        self._start()

    def _start(self) -> None:
        self._clock = SteppedClock(START_S * 1000 + self._began_ns // 1_000_000)
        self._server = BeanstalkServer(
            self._directory,
            listen=f"unix:{self._folder / 'socket'}",
            clock=self._clock,
            **self._options,
        )
        self._loop.run_until_complete(self._server.start())
        self.connect().close()  # the real one has had such a visitor too, asking whether it listens
        self.turn()

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(self._folder / "socket"))
        return made

    def go_to(self, now_ns: int, late_ns: int) -> None:
        self._loop.call_soon(self._clock.go_to_ns, now_ns - self._began_ns)
        self.turn()

    def next_due(self) -> int | None:
        due = self._clock.next_due_ns()
        return None if due is None else due + self._began_ns

    def turn(self) -> None:
        """Until there is nothing left to do."""
        while True:
            self._selector.seen = 0
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
            if not self._selector.seen and not self._loop._ready:  # type: ignore[attr-defined]
                return

    def drain(self) -> None:
        self._server.drain()

    def kill(self) -> None:
        assert self._directory is not None
        left = self._folder / "left"
        shutil.copytree(self._directory, left)
        self._loop.run_until_complete(self._server.stop())
        shutil.rmtree(self._directory)
        left.rename(self._directory)
        (self._folder / "socket").unlink(missing_ok=True)
        self._began_ns += int(self._clock.monotonic() * SECOND)
        self._start()

    def close(self) -> None:
        self._loop.run_until_complete(self._server.stop())
        self.turn()
        self._loop.close()
