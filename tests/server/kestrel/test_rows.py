"""Every row of the tables of docs/kestrel-protocol.md that says what the server does is covered by a test.

A test covers a row if its docstring begins with "Row:" and has the words in code of the row's first cell.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent.parent / "docs" / "kestrel-protocol.md"
SECTIONS = ("The command", "Configuration", "The memcache protocol", "The text protocol", "Thrift", "Status")


def words_of_rows(page: str) -> set[str]:
    """The words in code of the first cells, and of the sentences that name commands."""
    words = set()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if title not in SECTIONS:
            continue
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
        for part in rows if rows else [text]:
            words |= {code.split("[")[0].split()[0].split("=")[0] for code in re.findall(r"`([^`]+)`", part)}
    return {word for word in words if re.fullmatch(r"(?:--)?[a-zA-Z_][a-zA-Z_-]+|t", word)}


def words_of_tests() -> set[str]:
    """The words of all docstrings that begin with "Row:"."""
    words = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                about = ast.get_docstring(node) or ""
                if re.match(r"(?:[A-Z]+-\w+: )?Row:", about):
                    words |= set(re.findall(r"-{0,2}\w[\w-]*", about))
    return words


def test_every_row_has_a_test() -> None:
    rows = words_of_rows(PAGE.read_text())
    assert len(rows) > 70
    assert sorted(rows - words_of_tests()) == []


def test_a_row_without_a_test_is_seen() -> None:
    page = PAGE.read_text().replace("| `open` |", "| `opens-anew` |")
    assert sorted(words_of_rows(page) - words_of_tests()) == ["opens-anew"]
