"""The suite itself, under conditions in which people start it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.paths import PYTHONPATH, ROOT

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


@pytest.mark.skipif(find_spec("redis") is None, reason="redis is not installed")
def test_no_redis_is_imported_by_what_a_test_starts() -> None:
    """``quick_start`` says why. Without it, a queue imports redis."""
    for paths, is_imported in ((os.environ["PYTHONPATH"], "False"), (PYTHONPATH, "False"), (str(ROOT), "True")):
        command = [sys.executable, "-c", "import portalocker, sys; print('redis' in sys.modules)"]
        environment = {**os.environ, "PYTHONPATH": paths}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == is_imported, paths
