"""What the tests of the command line say of a command that has ended, and of one that runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: bytes
    err: str


Run = Callable[..., Done]
Process = subprocess.Popen[bytes]
Spawn = Callable[..., Process]


def refused(done: Done, status: int, *words: str) -> None:
    """It ended so, with one line that has these words."""
    assert done.status == status, done
    assert done.err.count("\n") == 1, done
    assert done.err.startswith("kestrelpy")
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, done
