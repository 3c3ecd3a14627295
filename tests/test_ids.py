"""Every id that the tests name is in docs/ids.md, and every row of that page leads to tests that name its id.

An id is found by its form alone, so one that nobody has written down is found too: in the names of tests, in comments
and docstrings, and in the tables of planted faults and broken rules. ``named`` says where.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.regressions.breaking import RULES
from tests.support.paths import ROOT
from tests.use.planting import DEFECTS

PAGE = ROOT / "docs" / "ids.md"
ID = re.compile(r"\b(?:[A-Z]{2,4}-[A-Z]?\d{1,3}[a-z]?|[A-Z]\d{1,2}[a-z]?|bug \d+|house-\d+)\b")
"""``LK-F38``, ``BD-W9``, ``R13``, ``C17b``, ``bug 4``."""
PREFIXED = re.compile(r"\b[A-Z]{2,4}-[A-Z]?\d{1,3}[a-z]?\b")
THREADS = re.compile(r"\b([A-Za-z][\w-]*)(?: Queue)? (#\d+(?:(?:,| and|, and) #\d+)*)")
"""``nsq #471 and #1033``, ``Chronicle Queue #629``: threads of another project."""
THREAD_OF = re.compile(r"#(\d+) of ([a-z][\w-]*)")
ISSUE_OF_KAFKA = re.compile(r"\bkafka[ -](\d+)", re.IGNORECASE)
NO_PROJECTS = {"of", "and", "in", "see"}
NAME = re.compile(r"^test_(?:([a-z]{2,3})_)?([a-z]\d{1,3})(?=_|$)")
"""``test_lk_f38_...``, ``test_r13_...``."""
NAME_OF_THREAD = re.compile(r"^test_(?:history_|(?=nsq_))([a-z_]+?)_((?:\d+_)+)")
"""``test_history_go_diskqueue_28_31_34_...``, ``test_nsq_938_...``."""
WITHOUT_PREFIX = {"tests/server/test_server.py": "BD-"}
"""Here all ids have the same prefix, which is left out."""
TABLES = {"defect", "rule", "twins", "fault"}
"""What enters a planted fault or a broken rule into a table: the first argument is an id, or several."""
KEYS = "tests/use/"
"""Here a string that is an id and nothing else is the key of a table."""


class Note(NamedTuple):
    """An id, and the line that names it."""

    id: str
    line: int


class Row(NamedTuple):
    """A row of the page. ``places``: a file of the tests, and a function of it, or nothing for the whole file."""

    id: str
    line: int
    places: tuple[tuple[str, str], ...]


# -- what the tests name ---------------------------------------------------------------------------------------------


def ids_of_text(text: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The ids in a comment or a docstring, each with its line in the text."""
    for number, line in enumerate(text.splitlines()):
        words = re.sub(r"#\s*(?:noqa|type: ignore)\b.*", "", line)
        for match in ID.finditer(words):
            yield (prefix if "-" not in match[0] else "") + match[0], number
        for match in THREADS.finditer(words):
            if match[1] not in NO_PROJECTS:
                yield from ((f"{match[1].lower()} {thread}", number) for thread in re.findall(r"#\d+", match[2]))
        yield from ((f"{match[2]} #{match[1]}", number) for match in THREAD_OF.finditer(words))
        yield from ((f"kafka #{match[1]}", number) for match in ISSUE_OF_KAFKA.finditer(words))


def ids_of_name(name: str) -> Iterator[str]:
    """The ids that the name of a test begins with."""
    if match := NAME.match(name):
        yield f"{match[1]}-{match[2]}".upper() if match[1] else match[2].upper()
    if match := NAME_OF_THREAD.match(name):
        yield from (f"{match[1].replace('_', '-')} #{number}" for number in match[2].strip("_").split("_"))


@lru_cache(maxsize=1)
def nodes(source: str) -> list[ast.AST]:
    """The nodes of a source. It is kept for who asks for the same source next: parsing takes longest of all here."""
    return list(ast.walk(ast.parse(source)))


def _notes_of_strings(path: str, source: str, prefix: str) -> Iterator[Note]:
    """Docstrings, also those below assignments; keys of tables; and ids with a prefix in every other string."""
    for node in nodes(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from (Note(found, node.lineno + line) for found, line in ids_of_text(node.value.value, prefix))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TABLES and node.args:
            key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                whole = node.func.id == "defect"
                found = [key.value] if whole else [word for word, _ in ids_of_text(key.value)]
                yield from (Note(each, node.lineno) for each in found)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (Note(found, node.lineno) for found in PREFIXED.findall(node.value))
            if path.startswith(KEYS) and ID.fullmatch(node.value):
                yield Note(node.value, node.lineno)


def notes(path: str, source: str) -> Iterator[Note]:
    """Every id that a file of the tests names."""
    prefix = WITHOUT_PREFIX.get(path, "")
    yield from _notes_of_strings(path, source, prefix)
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (Note(found, node.lineno) for found in ids_of_name(node.name))
    hashed = "\n".join(re.findall("#.*", source)).replace("noqa", "").replace("type: ignore", "")
    if any(ids_of_text(hashed)):  # else no comment can have one, and most files end here
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield from (Note(found, token.start[0]) for found, _ in ids_of_text(token.string, prefix))


@cache
def spans(source: str) -> dict[str, range]:
    """The lines of each function, with its decorators and the comment in front of it."""
    lines = source.splitlines()
    found = {}
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            while first > 1 and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            found[node.name] = range(first, (node.end_lineno or first) + 1)
    return found


def places_of(path: str, source: str) -> dict[str, set[str]]:
    """The ids of a file, and for each the functions that name it; a name that is empty is the file itself."""
    found: dict[str, set[str]] = defaultdict(set)
    functions = spans(source)
    for note in notes(path, source):
        found[note.id] |= {"", *(name for name, lines in functions.items() if note.line in lines)}
    return found


@cache
def sources() -> dict[str, str]:
    """The files of the tests but this one, which plants ids that nobody knows."""
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


@cache
def named() -> dict[str, set[tuple[str, str]]]:
    """Every id of the tests: the files and functions that name it, or that a table names for it."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    functions: dict[str, set[str]] = defaultdict(set)
    for path, source in sources().items():
        for each, names in places_of(path, source).items():
            found[each] |= {(path, name) for name in names}
        for name in spans(source):
            functions[name].add(path)
    for module in sorted((ROOT / "tests" / "use").glob("planted_*.py")):
        importlib.import_module(f"tests.use.{module.stem}")
    for key, defect in DEFECTS.items():
        path, _, test = defect.test.partition("::")
        found[key] |= {(path, ""), (path, test.split("[")[0])}
    for key, rule in RULES.items():
        found[key] |= {(path, name) for test in rule.tests for path in functions[test] for name in ("", test)}
    return found


# -- what the page says ----------------------------------------------------------------------------------------------


def rows(page: str) -> list[Row]:
    """The rows of the tables whose first column is ``id``."""
    found, is_table = [], False
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        is_table = line.startswith("|") and (is_table or cells[0] == "id")
        if is_table and cells[0] != "id" and not cells[0].startswith("-"):
            places = []
            for file, functions in re.findall(r"\]\(\.\./(tests/[^)]+)\)((?: `\w+`)*)", cells[-1]):
                places += [(file, name) for name in re.findall(r"`(\w+)`", functions) or [""]]
            found.append(Row(cells[0], number, tuple(places)))
    return found


def complaints(page: str, ids: dict[str, set[tuple[str, str]]], files: dict[str, str]) -> list[str]:
    """What is not in the page, and what in the page is not so."""
    listed = rows(page)
    known = [row.id for row in listed]
    found = []
    for each in sorted(ids.keys() - set(known)):
        where = sorted(file for file, name in ids[each] if not name)
        found.append(f"{each} is not in docs/ids.md; it is named in {', '.join(where)}")
    for row in listed:
        at = f"docs/ids.md:{row.line}: {row.id}"
        if known.count(row.id) > 1:
            found.append(f"{at} is there more than once")
        if not row.places:
            found.append(f"{at} names no test")
        for file, name in row.places:
            if file not in files:
                found.append(f"{at}: there is no {file}")
            elif name and name not in spans(files[file]):
                found.append(f"{at}: there is no {name} in {file}")
            elif (file, name) not in ids.get(row.id, set()):
                found.append(f"{at}: {name or file} does not name it")
    return found


# -- the page and the tests agree ------------------------------------------------------------------------------------


def test_every_id_is_in_the_page_and_every_row_leads_to_tests_that_name_it() -> None:
    wrong = complaints(PAGE.read_text("utf-8"), named(), sources())
    if wrong:
        pytest.fail("\n" + "\n".join(wrong), pytrace=False)


def test_the_finder_finds_what_there_is() -> None:
    """Each way to name an id, at a place that has used it for long; and a page that is not empty."""
    assert len(rows(PAGE.read_text("utf-8"))) > 200
    assert ("tests/unit/reading/test_reader.py", "test_lk_f5_future") in named()["LK-F5"]
    assert {"R1", "R39", "C17b", "U9 lock", "BD-S7", "SS-B2", "bug 4", "house-6", "nsq #938"} <= named().keys()


# -- the checks see what they are for --------------------------------------------------------------------------------

UNKNOWN = {
    "a name": ("def test_lk_z99_nothing() -> None: ...\n", "LK-Z99"),
    "a name without a prefix": ("def test_z9_nothing() -> None: ...\n", "Z9"),
    "a name of a thread": ("def test_history_some_queue_4711_nothing() -> None: ...\n", "some-queue #4711"),
    "a docstring": ('def test_it() -> None:\n    """QX-W7: something."""\n', "QX-W7"),
    "a comment": ("def test_it() -> None: ...  # (R98)\n", "R98"),
    "a comment in front": ("# C98b: something\n", "C98b"),
    "a string": ('WHY = "as the others do (QX-W8)"\n', "QX-W8"),
    "a bug": ("# bug 99\n", "bug 99"),
    "a table": ('@defect(\n    "C99 beside it",\n    "symptom",\n)\ndef plant() -> None: ...\n', "C99 beside it"),
    "a rule": ('@rule("R97", "test_it")\ndef broken() -> None: ...\n', "R97"),
    "a fault": ('@fault("R1 R96", "(1)")\ndef plant() -> None: ...\n', "R96"),
    "a hunt": ('HUNTS = {"H99": 1}\n', "H99"),
    "a thread": ("# otherqueue #1 and #4712: something\n", "otherqueue #4712"),
    "a thread that comes first": ("# #4713 of otherqueue\n", "otherqueue #4713"),
    "an issue of Kafka": ("# Kafka-4714\n", "kafka #4714"),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_an_unknown_id_is_seen(way: str) -> None:
    source, planted = UNKNOWN[way]
    path = "tests/use/test_planted_here.py"
    ids = {**named(), **{each: {(path, name) for name in names} for each, names in places_of(path, source).items()}}
    assert f"{planted} is not in docs/ids.md; it is named in {path}" in complaints(PAGE.read_text("utf-8"), ids, {})


def test_what_is_no_id_is_not_seen() -> None:
    source = (
        "import x  # noqa: F401\n# UTF-16LE, ext4, of #28\nNAME = 'C1'\ndef test_hadoops_name_of_s3_is_known(): ...\n"
    )
    assert not list(notes("tests/test_x.py", source))


def test_an_id_belongs_to_the_function_whose_comment_names_it() -> None:
    source = "# R1: so\n@decorated\ndef test_a() -> None:\n    pass\n\n\ndef test_b() -> None:\n    pass  # R2\n"
    assert places_of("tests/test_x.py", source) == {"R1": {"", "test_a"}, "R2": {"", "test_b"}}
    assert places_of("tests/server/test_server.py", "# (F1, S2)\n").keys() == {"BD-F1", "BD-S2"}


@pytest.mark.parametrize(
    ("places", "complaint"),
    [
        ("[x](../tests/test_x.py) `test_a`", ""),
        ("[x](../tests/test_x.py), [y](../tests/test_y.py)", "R1: tests/test_y.py does not name it"),
        ("[x](../tests/test_x.py) `test_a` `test_b`", "R1: test_b does not name it"),
        ("[x](../tests/test_x.py) `test_c`", "R1: there is no test_c in tests/test_x.py"),
        ("[z](../tests/test_z.py)", "R1: there is no tests/test_z.py"),
        ("everywhere", "R1 names no test"),
    ],
)
def test_a_row_that_leads_nowhere_is_seen(places: str, complaint: str) -> None:
    source = "def test_a() -> None:\n    pass  # R1\n\n\ndef test_b() -> None: ...\n"
    files = {"tests/test_x.py": source, "tests/test_y.py": ""}
    ids = {"R1": {("tests/test_x.py", name) for name in places_of("tests/test_x.py", source)["R1"]}}
    found = complaints(f"| id | tests |\n|---|---|\n| R1 | {places} |\n", ids, files)
    assert found == ([f"docs/ids.md:3: {complaint}"] if complaint else [])


def test_a_row_that_is_there_twice_is_seen() -> None:
    ids = {"R1": {("tests/test_x.py", "")}}
    page = "| id | tests |\n|---|---|\n" + "| R1 | [x](../tests/test_x.py) |\n" * 2
    assert "R1 is there more than once" in complaints(page, ids, {"tests/test_x.py": ""})[0]
