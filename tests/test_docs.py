"""What the documents show is run: Python and shell blocks of README.md and docs/*.md, and the format's example in hex.

- All ``python`` blocks of a page are one program, run in order in an empty folder, warnings being errors; and once more
  in the same folder, as a reader does. ``print(...)  # words`` prints these words both times (tests/support/shown.py).
- ``console`` and ``sh`` blocks with a ``kestrelpy`` line are run in order, a page in one folder, and once more. What
  follows a ``$`` line of a ``console`` block is its output: ``...`` in it matches anything.
- A block whose first line says ``norun`` behind its language is left alone.
"""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kestrelpy
from kestrelpy.spark.session import JavaMissing, check_java
from tests.support import api_page
from tests.support.budget import BRIEF_JAVA, SLOW_SPARK
from tests.support.paths import PYTHONPATH
from tests.support.shown import checked, shown

ROOT = Path(__file__).parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
SECONDS = 60
ON_SPARK = {"spark.md": 180}
"""Pages that start a session of Spark, which warns of this and that, and how many seconds they may take."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of its first line, its text, and the line it begins on."""

    language: str
    about: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        language, _, about = match[1].strip().partition(" ")
        found.append(Block(language, about, match[2], text.count("\n", 0, match.start()) + 2))
    return found


def program(text: str) -> str:
    """The Python blocks of a page as one program, on the lines where they stand in the page."""
    lines = [""] * text.count("\n")
    for block in blocks(text):
        if block.language == "python" and "norun" not in block.about:
            for number, line in enumerate(block.text.splitlines(), start=block.line - 1):
                lines[number] = line
    return "\n".join(lines).strip("\n") and "\n".join(lines)


def commands(block: Block) -> list[tuple[str, str | None]]:
    """The commands of a shell block, each with the output that is shown for it, or ``None`` if none is."""
    if block.language != "console":
        return [(block.text, None)]
    found: list[tuple[str, str | None]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            command, output = found[-1]
            found[-1] = (command, f"{output}{line}\n")
    return found


def pattern(output: str) -> str:
    """A regular expression for output as shown."""
    return ".*".join(re.escape(part) for part in output.split("..."))


def _names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def _environment(folder: Path) -> dict[str, str]:
    """Where ``kestrelpy`` is this one, and homes and paths are the folder."""
    shim = folder / ".bin" / "kestrelpy"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kestrelpy "$@"\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    paths = {
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "TMPDIR": str(folder),
        "JDK_JAVA_OPTIONS": BRIEF_JAVA,
    }
    return {**os.environ, **paths}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=SLOW_SPARK if page.name in ON_SPARK else []) for page in PAGES],
    ids=_names(PAGES),
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    source = program(page.read_text("utf-8"))
    if not source:
        pytest.skip("no Python on this page")
    script = tmp_path / f"{page.stem}_page.py"  # no page takes the place of a module
    script.write_text(checked(source), encoding="utf-8")
    strict = [] if page.name in ON_SPARK else ["-X", "dev", "-W", "error"]
    if page.name in ON_SPARK and not os.environ.get("CI"):
        try:
            check_java()
        except JavaMissing as missing:
            pytest.skip(str(missing))
    environment = _environment(tmp_path)
    for time in ("first", "second"):  # what the first run has left is there in the second one
        done = subprocess.run(
            [sys.executable, *strict, script.name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=ON_SPARK.get(page.name, SECONDS),
            check=False,
        )
        where = f"{page.name}, {time} run (the lines are the page's):"
        assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
        assert "ResourceWarning" not in done.stderr, f"{where}\n{done.stderr}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the shell blocks are for bash")
@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    shown = [block for block in blocks(page.read_text("utf-8")) if block.language in ("console", "sh", "bash")]
    shown = [block for block in shown if re.search(r"\bkestrelpy ", block.text) and "norun" not in block.about]
    if not shown:
        pytest.skip("no kestrelpy commands on this page")
    environment = _environment(tmp_path)
    for time in ("first", "second"):
        for block in shown:
            for command, output in commands(block):
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                where = f"{page.name}, {time} run, block on line {block.line}: {command}"
                assert done.returncode in ((0,) if output is None else (0, 1)), f"{where}\n{done.stdout}"
                assert "Traceback" not in done.stdout, f"{where}\n{done.stdout}"
                if output:
                    shows = re.fullmatch(pattern(output), done.stdout, re.DOTALL)
                    assert shows, f"{where}\nprinted:\n{done.stdout}\nand the page says:\n{output}"


def test_the_example_of_the_format_is_what_the_codec_writes() -> None:
    from kestrelpy._journal import format as format_module

    text = (ROOT / "docs" / "format.md").read_text("utf-8")
    examples = [block for block in blocks(text) if (block.language, block.about) == ("hex", "example=item")]
    assert len(examples) == 1
    shown = bytes.fromhex(examples[0].text)
    about = re.search(r"marker `(0x[0-9a-f]+)`; item (\d+), added at (\d+) ms, watermark (\d+), data `(\w+)`", text)
    assert about is not None, "the sentence above the example names its values"
    marker, item_id, added_ms, watermark = int(about[1], 16), int(about[2]), int(about[3]), int(about[4])
    data = about[5].encode("ascii")
    assert (item_id, data, added_ms, watermark, marker) == (100, b"hello", 255, 99, 0x11223344)
    written = format_module.encode_item(item_id, data, added_ms, None, watermark, marker)
    assert shown == written
    frame = format_module.decode_frame(shown, 0, marker)
    assert frame is not None
    assert (frame.first_id, frame.watermark, frame.entries[0][0]) == (item_id, watermark, data)


# -- examples in docstrings ------------------------------------------------------------------------------------------

ELSEWHERE = {
    "kestrelpy.inbox": "folder = 'queues'",
    "kestrelpy.logging": "import logging\nserve = lambda: logging.warning('served')",
    "kestrelpy.codecs": "import dataclasses\nnew_key, old_key = bytes(32), bytes(16)\n"
    "Order = dataclasses.make_dataclass('Order', [('number', int), ('article', str)])",
}
"""By module: what an example of its docstrings has from elsewhere."""


def docstring_examples() -> dict[str, tuple[str, str]]:
    """By public name: its module, and the indented block of its docstring, which is a program."""
    found = {}
    for module_name in api_page.MODULES:
        module = importlib.import_module(f"kestrelpy.{module_name}" if module_name else "kestrelpy")
        things = {module.__name__: module} | {
            f"{module.__name__}.{each}": getattr(module, each) for each in module.__all__
        }
        for name, thing in things.items():
            said = re.split(r"\n\s*\n", inspect.getdoc(thing) or "")
            shown = [each for each in said if each.startswith("    ") and re.match(r" +(with|for|\w+ =) ", each)]
            if shown:
                found[name] = (module.__name__, textwrap.dedent("\n\n".join(shown)))
    return found


def test_examples_in_docstrings_run_twice_in_a_folder(tmp_path: Path) -> None:
    found = docstring_examples()
    assert {"kestrelpy", "kestrelpy.dead_letters", "kestrelpy.inbox", "kestrelpy.codecs"} <= found.keys()
    for name, (module, example) in found.items():
        folder = tmp_path / name
        (folder / "queues").mkdir(parents=True)
        program = f"from kestrelpy import *\nfrom {module} import *\n{ELSEWHERE.get(module, '')}\n{example}"
        for time in ("first", "second"):
            done = subprocess.run(
                [sys.executable, "-X", "dev", "-W", "error", "-c", program],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert done.returncode == 0, f"{name}, {time} run:\n{program}\n{done.stderr}"


def test_sessions_in_docstrings_run_twice_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [path for path in (ROOT / "kestrelpy").rglob("*.py") if re.search(r"^ *>>> ", path.read_text(), re.M)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources]
    assert {"kestrelpy.testing.clock", "kestrelpy.server._process"} <= {*names}
    for _ in range(2):
        for name in names:
            outcome = doctest.testmod(importlib.import_module(name))
            assert outcome.attempted, name
            assert outcome.failed == 0, name


# -- help() says what there is to say --------------------------------------------------------------------------------

FOR_TESTS = {"clock", "disk"}
"""Options that stand in for the system's own; the classes that take them say so."""
OTHERWISE = ("outbox", "outbox.testing", "testing")
"""Modules whose docstrings do it otherwise: docs/outbox.md has the tables of options, and the fakes are for tests."""


def silent_options(name: str, call: Callable[..., Any]) -> list[str]:
    """Options of a call (parameters that have a default) that its docstring does not name."""
    said = inspect.getdoc(call) or ""
    options = [each.name for each in inspect.signature(call).parameters.values() if each.default is not each.empty]
    options = [each for each in options if each not in FOR_TESTS and not each.startswith("_")]
    return [f"{name}: {option}" for option in options if not re.search(rf"\b{option}\b", said)]


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and methods of public classes, with their names."""
    for module_name in set(api_page.MODULES) - {*OTHERWISE}:
        module = importlib.import_module(f"kestrelpy.{module_name}" if module_name else "kestrelpy")
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, type):
                found = [(each, call) for each, call in api_page.members(thing) if inspect.isfunction(call)]
                yield from ((f"{module.__name__}.{name}.{each}", call) for each, call in found)
            elif inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing


def test_help_names_each_option_of_a_call() -> None:
    calls = dict(public_calls())
    assert {"kestrelpy.JournaledQueue.get", "kestrelpy.scan", "kestrelpy.work.Session.release"} <= calls.keys()
    assert [each for name, call in calls.items() for each in silent_options(name, call)] == []


def silent_members(name: str, kind: type[enum.Enum]) -> list[str]:
    """Members of an enumeration that its docstring does not name: ``help`` shows what stands below them to nobody."""
    said = inspect.getdoc(kind) or ""
    return [f"{name}: {member.name}" for member in kind if f"``{member.name}``" not in said]


def test_help_names_each_member_of_an_enumeration() -> None:
    things = {name: getattr(kestrelpy, name) for name in kestrelpy.__all__}
    kinds = {name: thing for name, thing in things.items() if isinstance(thing, type) and issubclass(thing, enum.Enum)}
    assert kinds.keys() == {"FullPolicy", "LagPolicy"}
    assert [each for name, kind in kinds.items() for each in silent_members(name, kind)] == []


def test_an_option_that_help_does_not_name_is_seen() -> None:
    def get(item: int, timeout: float | None = None, *, clock: object = None) -> None:
        """Wait a while for ``item``."""

    assert silent_options("get", get) == ["get: timeout"]
    get.__doc__ = "Wait up to ``timeout`` seconds."
    assert silent_options("get", get) == []

    class Colour(enum.Enum):
        """``RED``, and others."""

        RED = 1
        BLUE = 2

    assert silent_members("Colour", Colour) == ["Colour: BLUE"]


# -- the above does what it says -------------------------------------------------------------------------------------

PAGE = """\
# A page

```python
x = 1
```
text
```python norun
x = nonsense(
```
```python
assert x == 1
```
```console
$ kestrelpy ls .
jobs ...
$ kestrelpy ls nowhere
```
"""


def test_blocks_are_found_where_they_stand() -> None:
    found = blocks(PAGE)
    assert [(block.language, block.about, block.line) for block in found] == [
        ("python", "", 4),
        ("python", "norun", 8),
        ("python", "", 11),
        ("console", "", 14),
    ]
    assert program(PAGE).splitlines()[3] == "x = 1"
    assert program(PAGE).splitlines()[10] == "assert x == 1"
    assert "nonsense" not in program(PAGE)
    assert program("# nothing\n") == ""


def test_commands_and_their_output_are_told_apart() -> None:
    assert commands(blocks(PAGE)[3]) == [("kestrelpy ls .", "jobs ...\n"), ("kestrelpy ls nowhere", "")]
    assert commands(Block("sh", "", "a\nb\n", 1)) == [("a\nb\n", None)]
    assert re.fullmatch(pattern("jobs ...\n"), "jobs  1  2\n", re.DOTALL)
    assert not re.fullmatch(pattern("jobs ...\n"), "works  1  2\n", re.DOTALL)


def test_what_is_printed_is_compared() -> None:
    says = checked("\nfor x in (1, 2):\n    print(x, x)  # 1 1\nprint(7)\n")
    assert says.splitlines()[2] == "    _shown('1 1', x, x)"
    assert says.splitlines()[3] == "print(7)"
    shown("b'...' 3", b"any", 3)
    with pytest.raises(AssertionError, match="the page says '1 1', and '2 2' is printed"):
        shown("1 1", 2, 2)


def test_the_page_of_the_interface_is_what_the_docstrings_say() -> None:
    """``make api`` writes it again."""
    assert api_page.PAGE.read_text("utf-8") == api_page.markdown()


def test_every_entry_of_the_interface_says_something() -> None:
    silent = re.findall(r"^(?:- `[^`]*`|### \w+):? *$(?=\n\n(?:- `|#))", api_page.markdown(), re.MULTILINE)
    assert silent == []
