"""What a shell completes, asked by a real bash and a real zsh, through the command that they would run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.work import WorkQueue
from tests.support.paths import ROOT

argcomplete = pytest.importorskip("argcomplete", reason="argcomplete is not installed: the extra [completion] has it")

SECONDS = 60
REGISTER = "from argcomplete import shellcode; print(shellcode(['kestrelpy'], shell={shell!r}))"
SCRIPTS = {
    "bash": """
eval "$("$1" -c "$2")"
COMP_LINE=$3 COMP_POINT=${#3} COMP_TYPE=9
_python_argcomplete kestrelpy
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { : }
_describe() { print -rl -- "${(@P)2}" }
eval "$("$1" -c "$2")"
words=(kestrelpy) BUFFER=$3 CURSOR=${#3}
_python_argcomplete
""",
}
"""A program for each shell: what it does when the tabulator is pressed behind its last argument."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with queues, and a command ``kestrelpy``."""
    made = tmp_path_factory.mktemp("completion")
    with JournaledQueue(made / "queues", "jobs") as queue:
        queue.reader("mail")
        queue.reader("audit")
    JournaledQueue(made / "queues", "journal").close()
    with WorkQueue(made / "queues", "work") as jobs:
        jobs.put(b"x", tube="photos")
    (made / "bin").mkdir()
    command = made / "bin" / "kestrelpy"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kestrelpy "$@"\n')
    command.chmod(0o755)
    return made


def completed(shell: str, folder: Path, line: str) -> list[str]:
    """What this shell offers behind ``line``, without descriptions and final blanks."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not there: apt install {shell}")
    options = ["--norc", "--noprofile"] if shell == "bash" else ["-f"]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [program, *options, "-c", SCRIPTS[shell], shell, sys.executable, REGISTER.format(shell=shell), line],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return sorted(each.partition(":")[0].strip() for each in done.stdout.splitlines() if each.strip())


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes_what_is_there(shell: str, folder: Path) -> None:
    for line, wanted in {
        "kestrelpy ver": ["verify"],
        "kestrelpy stat --js": ["--json"],
        "kestrelpy get queues jo": ["jobs", "journal"],
        "kestrelpy get queues jobs --reader ": ["audit", "mail"],
        "kestrelpy jobs queues work ls --tube ": ["photos"],
    }.items():
        assert completed(shell, folder, line) == wanted, line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kestrelpy serve bean", ["beanstalk"]),
        ("kestrelpy ls q", ["queues/"]),
        ("kestrelpy get ~/queues jo", ["jobs", "journal"]),
        ("kestrelpy get ~/queues jobs --reader ", ["audit", "mail"]),
        ("kestrelpy get missing ", []),
        ("kestrelpy get s3://bucket/prefix ", []),
        ("kestrelpy jobs queues jobs ls --tube ", []),
        ("kestrelpy get queues jobs --max ", []),
    ],
)
def test_bash_completes(line: str, wanted: list[str], folder: Path) -> None:
    """And offers no name where there is none, with no traceback and no new file."""
    before = sorted(folder.rglob("*"))
    assert [each for each in completed("bash", folder, line) if not each.startswith("-")] == wanted
    assert sorted(folder.rglob("*")) == before


def test_the_command_is_found_by_global_completion() -> None:
    """It looks at the head of the module that the entry point names."""
    for path in ("kestrelpy/cli/__init__.py", "kestrelpy/__main__.py"):
        assert "PYTHON_ARGCOMPLETE_OK" in (ROOT / path).read_text()[:1024]


@pytest.mark.parametrize(("asked", "loaded"), [("", False), ("1", True)])
def test_a_command_pays_for_it_only_when_a_shell_asks(asked: str, loaded: bool) -> None:
    program = """
import os, sys
from kestrelpy.cli import main
if os.environ["ASKED"]:
    os.environ["_ARGCOMPLETE"], sys.modules["argcomplete"] = "1", None  # it would end the process
main(["ls", "/no/such/folder"])
print("kestrelpy.cli._completion" in sys.modules or bool(sys.modules.get("argcomplete")))
"""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("_ARGCOMPLETE")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "ASKED": asked},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == f"{loaded}\n", done.stderr


def test_without_argcomplete_a_command_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrelpy.cli import main

    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert main(["ls", "/no/such/folder"]) == 1
