"""The cookbook: every example runs twice in the same folder, and prints what its docstring promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, is_kept, promised, run
from tests.support.budget import SLOW_SPARK
from tests.support.paths import ROOT

LEAST_LINES, MOST_LINES = 25, 90
NOISY = {"spark_driver"}
"""Examples whose libraries write to standard error when all is well."""
CASES = [pytest.param(path, id=path.stem, marks=SLOW_SPARK if path.stem == "spark_driver" else []) for path in EXAMPLES]


@pytest.mark.parametrize("example", CASES)
def test_twice_in_the_same_folder(example: Path, tmp_path: Path) -> None:
    promise = promised(example.read_text("utf-8"))
    for _ in range(2):
        ended = run(example, tmp_path)
        assert ended.status == 0, ended.errors
        assert is_kept(promise, ended.output), f"promised:\n{promise}\nprinted:\n{ended.output}"
        assert example.stem in NOISY or ended.errors == ""
        assert not ended.goes_on, "a process that it has started is still there"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_copied(example: Path) -> None:
    """It says what it is and how it is started, fits a page or two, and takes from the library what is public."""
    source = example.read_text("utf-8")
    tree = ast.parse(source)
    about = ast.get_docstring(tree) or ""
    assert re.match(r"[A-Z\w][^\n]{20,}\.\n\n", about), "the first line is the title, a sentence"
    assert f"python {example.name}" in about
    lines = len(source.splitlines()) - len(about.splitlines())
    assert LEAST_LINES <= lines <= MOST_LINES
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]
        assert not names or not names[0].startswith(("tests", "examples")), "it stands alone"


def test_the_table_has_every_example_and_its_title() -> None:
    """``examples/README.md``: a row for each file, and none for one that is not there."""
    rows = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \| (.+?) \| (.+?) \|$", table(), re.MULTILINE)
    assert [name for name, _, _, _ in rows] == [link for _, link, _, _ in rows]
    assert sorted(name for name, _, _, _ in rows) == [path.name for path in EXAMPLES]
    assert all(about and when for _, _, about, when in rows)


def table() -> str:
    return (ROOT / "examples" / "README.md").read_text("utf-8")
