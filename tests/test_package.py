"""The package: what importing it brings in, and names that are fetched when they are asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import kestrelpy

NOT_NEEDED = [
    "argparse",
    "ast",
    "asyncio",
    "concurrent.futures",
    "dataclasses",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "portalocker",
    "subprocess",
    "tempfile",
    "tokenize",
    "traceback",
    "kestrelpy.arrow",
    "kestrelpy.cli",
    "kestrelpy.codecs",
    "kestrelpy.inspection",
    "kestrelpy.testing",
]
if sys.version_info >= (3, 13):  # before that, typing imports it
    NOT_NEEDED.append("re")


@pytest.mark.parametrize("statement", ["import kestrelpy", "from kestrelpy import JournaledQueue, ReaderConfig"])
def test_importing_is_quick_and_loads_no_extra(script: Any, statement: str) -> None:
    told = script(
        f"""
        import sys
        before = set(sys.modules)  # what the interpreter's site packages need
        {statement}
        print(*sorted(set({NOT_NEEDED}) & (set(sys.modules) - before)))
        """
    )
    assert told == ""


def test_a_reader_and_a_scan_need_no_dataclass(script: Any) -> None:
    told = script(
        """
        import sys
        before = set(sys.modules)
        from kestrelpy import open_reader, scan, verify, inspect
        print(*sorted({"dataclasses", "inspect"} & (set(sys.modules) - before)))
        """
    )
    assert told == ""


def test_a_scan_loads_nothing_that_watches(script: Any) -> None:
    program = """
        import sys
        from kestrelpy import scan
        before = "kestrelpy.inspection.folder_watch" in sys.modules
        from kestrelpy.inspection import FolderWatch
        print(before, FolderWatch.__name__)
    """
    assert script(program) == "False FolderWatch"


@pytest.mark.parametrize("name", kestrelpy.__all__)
def test_each_name_can_be_had_first(script: Any, name: str) -> None:
    if name not in ("Damage", "scan", "inspect", "JournaledQueue"):
        assert getattr(kestrelpy, name).__name__ == name
        return
    told = script(
        f"""
        import kestrelpy
        assert {name!r} in dir(kestrelpy)
        first = kestrelpy.{name}
        from kestrelpy import {name}
        assert first is {name} is vars(kestrelpy)[{name!r}]
        print(first.__name__)
        """
    )
    assert told == name


def test_all_names_at_once(script: Any) -> None:
    told = script(
        """
        import kestrelpy
        from kestrelpy import *
        print(scan.__module__, inspect.__module__, *set(kestrelpy.__all__) - set(globals()))
        """
    )
    assert told.split() == ["kestrelpy.inspection.scan", "kestrelpy.inspection.summary"]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'kestrelpy' has no attribute 'scam'"):
        kestrelpy.scam  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="scam"):
        from kestrelpy import scam  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    "name", ["arrow", "codecs", "dashboard", "inbox", "inspection", "outbox", "server", "ship", "testing", "work"]
)
def test_public_modules_are_there_when_they_are_asked_for(name: str) -> None:
    program = f"import sys, kestrelpy; assert 'kestrelpy.{name}' not in sys.modules; print(kestrelpy.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"kestrelpy.{name}\n"
