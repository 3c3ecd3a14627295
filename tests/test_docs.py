"""What the documents show is run: Python and shell blocks of README.md and docs/*.md, and the format's example in hex.

- All ``python`` blocks of a page are one program, run in order in an empty folder, warnings being errors.
- ``console`` and ``sh`` blocks with a ``kestrelpy`` line are run in order, a page in one folder. What follows a ``$``
  line of a ``console`` block is its output: ``...`` in it matches anything.
- A block whose first line says ``norun`` behind its language is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kestrelpy.spark.session import JavaMissing, check_java
from tests.support import api_page
from tests.support.budget import BRIEF_JAVA, SLOW_SPARK

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
        "PYTHONPATH": str(ROOT),
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
    script = tmp_path / f"{page.stem}.py"
    script.write_text(source, encoding="utf-8")
    strict = [] if page.name in ON_SPARK else ["-X", "dev", "-W", "error"]
    if page.name in ON_SPARK and not os.environ.get("CI"):
        try:
            check_java()
        except JavaMissing as missing:
            pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, *strict, script.name],
        cwd=tmp_path,
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=ON_SPARK.get(page.name, SECONDS),
        check=False,
    )
    assert done.returncode == 0, f"{page.name} (the lines are the page's):\n{done.stdout}{done.stderr}"
    assert "ResourceWarning" not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="the shell blocks are for bash")
@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    shown = [block for block in blocks(page.read_text("utf-8")) if block.language in ("console", "sh", "bash")]
    shown = [block for block in shown if re.search(r"\bkestrelpy ", block.text) and "norun" not in block.about]
    if not shown:
        pytest.skip("no kestrelpy commands on this page")
    environment = _environment(tmp_path)
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
            where = f"{page.name}, block on line {block.line}: {command}"
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


def test_the_page_of_the_interface_is_what_the_docstrings_say() -> None:
    """``make api`` writes it again."""
    assert api_page.PAGE.read_text("utf-8") == api_page.markdown()


def test_every_entry_of_the_interface_says_something() -> None:
    silent = re.findall(r"^(?:- `[^`]*`|### \w+):? *$(?=\n\n(?:- `|#))", api_page.markdown(), re.MULTILINE)
    assert silent == []
