"""The suite itself, under conditions in which people start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IGNORING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
"""


def test_it_passes_where_signals_are_ignored() -> None:
    """As a shell leaves them for ``make test &``: every child of a test would inherit that."""
    test = "tests/cli/test_cli.py::test_signals_end_it_quietly_and_keep_its_place"
    run = subprocess.run(
        [sys.executable, "-c", IGNORING, test], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stdout
