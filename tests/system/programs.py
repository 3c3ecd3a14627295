"""How the harnesses of this folder are run: each as a program of its own, small and with one thread.

A harness is a module with a ``main(what, seed, limit, seconds, plant)`` that counts what it did and raises when a
promise is broken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from spoilt import PLANTS

import kestrelpy


def rounds(limit: int | None, seconds: float | None) -> Iterator[int]:
    """0, 1, 2, and so on: ``limit`` of them, or as many as begin within ``seconds``."""
    deadline = None if seconds is None else time.monotonic() + seconds
    number = 0
    while (limit is None or number < limit) and (deadline is None or time.monotonic() < deadline):
        yield number
        number += 1


def as_program(main: Callable[..., Counter[str]]) -> None:
    """``main`` with what the command line says; prints what was counted."""
    what, seed, limit, seconds, plant = sys.argv[1:6]
    counts = main(what, int(seed), int(limit) or None, float(seconds) or None, PLANTS.get(plant))
    print(json.dumps(counts))


def run(
    harness: ModuleType, folder: Path, what: str, seed: int, *, limit: int = 0, seconds: float = 0, plant: str = ""
) -> subprocess.CompletedProcess[str]:
    """``harness`` in a Python of its own, whose temporary files are in ``folder``: for ``limit`` rounds or so, for
    ``seconds``, or until it is through.
    """
    package = str(Path(kestrelpy.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package, "TMPDIR": str(folder)}
    command = [sys.executable, "-W", "error", str(harness.__file__), what, str(seed), str(limit), str(seconds), plant]
    patience = 120 + 2 * limit + 2 * seconds if limit or seconds else None
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)


def counts_of(
    harness: ModuleType, folder: Path, what: str, seed: int, *, limit: int = 0, seconds: float = 0
) -> dict[str, int]:
    """What it counted. It must end well."""
    done = run(harness, folder, what, seed, limit=limit, seconds=seconds)
    assert done.returncode == 0, f"{what}, seed {seed}\n{done.stdout}\n{done.stderr}"
    counts: dict[str, int] = json.loads(done.stdout)
    return counts
