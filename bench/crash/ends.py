"""How a round ends: a kill, or a power cut on a file system of the round's own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tests.processes import loop_mount

MEGABYTES = 128


class End(Protocol):
    """``folder``: where the queues are. ``strike`` ends the process ``pid`` one way or the other, with all it has."""

    folder: Path
    is_sharp: bool
    """Whether everything that a process said until it was gone has happened."""

    def write_back(self) -> None:
        """What the kernel does when it likes: write what it has."""

    def settle(self) -> None:
        """Between two rounds: everything that was done is on disk."""

    def strike(self, pid: int) -> None: ...


class Kill:
    """SIGKILL."""

    is_sharp = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_back(self) -> None:
        """Makes no difference to a kill."""

    def settle(self) -> None:
        """Makes no difference to a kill."""

    def strike(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


class Cut:
    """The power of a real ext4: nothing reaches its device any more; then the process goes, and it is mounted again."""

    is_sharp = False

    def __init__(self, system: Any) -> None:
        self._system = system
        self.folder = Path(system.path)

    def write_back(self) -> None:
        number = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            loop_mount._libc.syncfs(number)
        finally:
            os.close(number)

    def settle(self) -> None:
        self.write_back()

    def strike(self, pid: int) -> None:
        self._system.shut_down()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._system.remount()


def reason_no_cuts() -> str | None:
    """Why the power cannot be cut here; ``None`` if it can."""
    return loop_mount.reason_not_available("ext4")


@contextlib.contextmanager
def cuts(scratch: Path) -> Iterator[Cut]:
    """A file system to cut the power of, mounted below ``scratch``, seen by this process alone."""
    loop_mount.own_mounts()
    with loop_mount.LoopFileSystem("ext4", MEGABYTES, scratch) as system:
        yield Cut(system)
