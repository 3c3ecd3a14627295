"""The explorer finds each defect that is planted. What it can't find by design says why; its test is named."""

from __future__ import annotations

import ast
import gc
import importlib
import warnings
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.use.planting import DEFECTS
from tests.use.use_hunts import HUNTS, LATER, search

HERE = Path(__file__).parent

for _each in sorted(HERE.glob("planted_*.py")):
    importlib.import_module(f"tests.use.{_each.stem}")


@pytest.mark.parametrize("name", [name for name in HUNTS if name in DEFECTS])
def test_found(name: str) -> None:
    with DEFECTS[name].plant():
        failure, steps = search(HUNTS[name])
    is_found, failure = failure is not None, None
    with warnings.catch_warnings():  # a world that fails leaves open what it had open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert is_found, f"{name} is not found in {steps} steps: {DEFECTS[name].symptom}"


@pytest.mark.parametrize("name", DEFECTS)
def test_its_own_test_is_there(name: str) -> None:
    path, _, function = DEFECTS[name].test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert function.split("[")[0].split("::")[0] in names


def test_every_defect_has_a_hunt_or_says_why_not() -> None:
    left = [
        name for name, defect in DEFECTS.items() if not defect.unreachable and name not in HUNTS and name not in LATER
    ]
    assert left == []
    assert set(HUNTS) <= set(DEFECTS)
    assert len(HUNTS) >= 30
