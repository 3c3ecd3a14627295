"""Each planted fault is found: ``planted.py`` has them, and the test that fails because of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.outbox import planted_store
from tests.outbox.planted import FAULTS, NOT_PLANTED, VARIABLE
from tests.support import postgres
from tests.support.budget import Tally, drawn
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", drawn(FAULTS, 2))
def test_a_planted_fault_is_found(name: str, tally: Tally) -> None:
    fault = FAULTS[name]
    if "postgresql" in fault.test and postgres.programs() is None:
        pytest.skip(postgres.NOT_INSTALLED)
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "tests.outbox.planted")
    plugins = ("-p", planted_store.__name__)
    environment = {**os.environ, VARIABLE: name, "KESTRELPY_SHARE": str(fault.share), "KESTRELPY_SEED": "1"}
    command = [sys.executable, "-m", "pytest", *options, *plugins, fault.test]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert NOT_PLANTED not in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"not found:\n{done.stdout}\n{done.stderr}"
    said = "\n".join(line for line in done.stdout.splitlines() if line.startswith("E "))
    assert re.search(fault.says, said), f"found for another reason:\n{done.stdout}"
    tally.add("planted faults caught", 1)
