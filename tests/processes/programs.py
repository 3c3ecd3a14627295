"""How the harnesses of this folder are run: each as a program of its own, small and with one thread.

A harness is a module with a ``main(what, seed, limit, seconds, plant)`` that counts what it did and raises when a
promise is broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import kestrelpy
from tests.processes.spoilt import PLANTS
from tests.support.paths import QUICK_START

PATIENCE = 120  # seconds for a harness, whatever it does
ROUND = 1  # and for each round: many times what one takes on a slow machine
MOST_TIMES = 20
"""So many times the rounds that were asked for, and no more, where too little is done in them."""


def rounds(limit: int | None, seconds: float | None, is_enough: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """0, 1, 2, and so on: ``limit`` of them, or as many as begin within ``seconds``. Where too little was done in them,
    as by processes that had to wait for a processor until they were killed: until ``is_enough``.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    number = 0
    while deadline is None or time.monotonic() < deadline:
        if limit is not None and number >= limit and (is_enough() or number >= MOST_TIMES * limit):
            return
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
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{QUICK_START}", "TMPDIR": str(folder)}
    python = [sys.executable, "-W", "error", "-X", "faulthandler"]
    command = [*python, str(harness.__file__), what, str(seed), str(limit), str(seconds), plant]
    patience = PATIENCE + ROUND * limit + 2 * seconds
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # to be ended as one, with all of its children
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # and it says where it is
            raise AssertionError(f"{what} hangs: {_last_words(process)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _last_words(process: subprocess.Popen[str]) -> str:
    """What it has printed, though a child may keep the pipe open."""
    try:
        return "\n".join(process.communicate(timeout=5))
    except subprocess.TimeoutExpired as expired:
        return f"{expired.stdout!r}\n{expired.stderr!r}"


def counts_of(
    harness: ModuleType, folder: Path, what: str, seed: int, *, limit: int = 0, seconds: float = 0
) -> dict[str, int]:
    """What it counted. It must end well."""
    done = run(harness, folder, what, seed, limit=limit, seconds=seconds)
    assert done.returncode == 0, f"{what}, seed {seed}\n{done.stdout}\n{done.stderr}"
    counts: dict[str, int] = json.loads(done.stdout)
    return counts
