"""Every row of the tables of docs/kestrel-protocol.md that says what the server does is covered by a test.

Such a row has an id in its first cell. A test covers the row if its docstring names the id.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent.parent / "docs" / "kestrel-protocol.md"
SECTIONS = {
    "The command": 1,
    "Configuration": 1,
    "Queues": 2,
    "The memcache protocol": 3,
    "The text protocol": 4,
    "Thrift": 5,
    "Status": 6,
    "Figures": 7,
}
"""The sections whose tables have ids, and the first number of these ids."""
ID = re.compile(r"\bKP-(\d+)\.(\d+)\b")


def rows_of(page: str) -> list[tuple[str, str]]:
    """The section and the first cell of each row of the tables that say what the server does, without their heads."""
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        lines = text.splitlines() if title in SECTIONS else []
        for line, following in pairwise([*lines, ""]):
            if line.startswith("| ") and not following.startswith("|--"):
                found.append((title, line.split("|")[1].strip()))
    return found


def named_by_tests(sources: list[str]) -> set[str]:
    """The ids that the docstrings of tests name."""
    found = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= {match[0] for match in ID.finditer(ast.get_docstring(node) or "")}
    return found


def complaints(page: str, sources: list[str]) -> list[str]:
    """What is wrong with the ids of the page, and which rows no test covers."""
    found, known, last = [], set(), (0, 0)
    for title, cell in rows_of(page):
        match = ID.fullmatch(cell)
        if match is None or int(match[1]) != SECTIONS[title]:
            found.append(f"{title}: {cell!r} is no id of this section")
            continue
        number = (int(match[1]), int(match[2]))
        if number <= last:
            found.append(f"{cell} does not rise")
        last = max(last, number)
        known.add(cell)
    named = named_by_tests(sources)
    found += [f"{each} is covered by no test" for each in sorted(known - named)]
    found += [f"{each} is named by a test, and not in the page" for each in sorted(named - known)]
    return found


def sources() -> list[str]:
    return [path.read_text("utf-8") for path in sorted(HERE.glob("test_*.py")) if path != Path(__file__)]


def test_every_row_has_a_test() -> None:
    page = PAGE.read_text("utf-8")
    assert {title for title, _ in rows_of(page)} == SECTIONS.keys()
    assert len(rows_of(page)) > 190
    assert complaints(page, sources()) == []


ROWS = "## Status\n| id | status |\n|---|---|\n| KP-6.1 | `up` |\n| KP-6.2 | `down` |\n"
TEST = 'def test_it() -> None:\n    """%s"""\n'


@pytest.mark.parametrize(
    ("page", "docstring", "complaint"),
    [
        (ROWS, "KP-6.1 and KP-6.2: something.", None),
        (ROWS, "KP-6.1: something.", "KP-6.2 is covered by no test"),
        (ROWS, "KP-6.1, KP-6.2, KP-6.3: something.", "KP-6.3 is named by a test, and not in the page"),
        (ROWS.replace("KP-6.2 ", ""), "KP-6.1: something.", "Status: '' is no id of this section"),
        (ROWS.replace("KP-6.2", "KP-5.2"), "KP-6.1: something.", "Status: 'KP-5.2' is no id of this section"),
        (ROWS.replace("KP-6.2", "KP-6.1"), "KP-6.1: something.", "KP-6.1 does not rise"),
    ],
)
def test_what_is_wrong_is_seen(page: str, docstring: str, complaint: str | None) -> None:
    assert complaints(page, [TEST % docstring]) == ([complaint] if complaint else [])
