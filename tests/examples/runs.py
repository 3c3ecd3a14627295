"""Examples as a stranger runs them: a real process in a folder, the output that is promised, and SIGKILL."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.support.budget import BRIEF_JAVA
from tests.support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 120.0
"""An example takes a few; one on Spark, on a busy machine, a minute."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its status, what it has printed, and whether processes that it has started go on."""

    status: int
    output: str
    errors: str
    goes_on: bool = False


def promised(source: str) -> str:
    """What the docstring says that the example prints: the indented block after ``It prints:``."""
    about = ast.get_docstring(ast.parse(source), clean=False) or ""
    found = re.search(r"prints:\n\n((?:    .*\n)+)", about)
    return textwrap.dedent(found[1]) if found else ""


def is_kept(promise: str, output: str) -> bool:
    """Whether the output is what was promised. A line ``...`` is any number of lines, ``...`` in a line is any text."""
    wanted = ""
    for line in promise.splitlines():
        if line == "...":
            wanted += r"(?:.*\n)*?"
        else:
            wanted += ".*".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(wanted, output) is not None


def run(example: Path, folder: Path, kill_at: float | None = None) -> Ended:
    """Run an example in a folder to its end, or until it and all its processes get SIGKILL: when it has printed so many
    lines (a whole number), or so many seconds after its start (any other number). One that ends before is not killed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JDK_JAVA_OPTIONS": BRIEF_JAVA}
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(example)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # whoever kills it kills the processes that it has started, too
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None

        def kill() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(process.stderr.read() if process.stderr else ""))
        reading.start()
        after = kill_at if isinstance(kill_at, float) else SECONDS
        timer = threading.Timer(after, kill)
        timer.start()
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if len(lines) == kill_at:
                    kill()
        finally:
            status = process.wait()
            timer.cancel()
            timer.join()
            reading.join()
    return Ended(status, "".join(lines), "".join(errors), goes_on(process.pid))


def goes_on(group: int) -> bool:
    """Whether a process group has a process that does not end by itself soon. It has none after this."""
    event = threading.Event()
    for _ in range(200):
        if not has_processes(group):
            return False
        event.wait(0.01)
    os.killpg(group, signal.SIGKILL)
    return True


def has_processes(group: int) -> bool:
    """Whether a process of the group runs: ``/proc/N/stat`` has its name in brackets, its state, parent and group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text("utf-8").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
