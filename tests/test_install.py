"""What users install: the wheel, with no extra and with each extra alone, and the source archive.

Each environment is new, and has nothing of this tree. The packages of an extra are those that the metadata of the wheel
asks for, and what these ask for; they are links into the environment of these tests, so nothing is fetched. What pip
itself would resolve is not seen.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.budget import takes_long
from tests.support.paths import ROOT

pytest.importorskip("build", reason="build is not installed: the extra [dev] has it")
from packaging.requirements import Requirement

SECONDS = 300
OUTSIDE = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
FACE = [
    "tests/test_package.py",
    *(f"tests/unit/test_{name}.py" for name in ("queue", "blocking", "errors", "value", "bad_input")),
    "tests/unit/inspection/test_inspection.py",
    *(f"tests/cli/test_{name}.py" for name in ("jobs", "dead")),
]
"""The tests of the public face that need no extra."""

CORE = """
import kestrelpy, tempfile
from kestrelpy import JournaledQueue, codecs, inbox, logging, outbox, server, ship, work
with tempfile.TemporaryDirectory() as folder:
    with JournaledQueue(folder, "jobs", codec=codecs.JSON) as queue:
        queue.put([1])
        with queue.get() as item:
            assert item.value == [1]
    with work.WorkQueue(folder, "work") as jobs, jobs.session() as session:
        jobs.put(b"x")
        session.reserve(timeout=0).delete()
    assert kestrelpy.verify(folder, "jobs").ok
"""
EXTRAS = {
    "arrow": """
import tempfile
from kestrelpy import JournaledQueue, arrow
with tempfile.TemporaryDirectory() as folder:
    with JournaledQueue(folder, "jobs") as queue:
        queue.put(b"x")
    assert arrow.read(folder, "jobs").read_all().num_rows == 1
""",
    "cli": """
from kestrelpy.cli import _folder_top
import rich.live, rich.table
""",
    "completion": "import argcomplete",
    "dashboard": """
import kestrelpy.dashboard.app, uvicorn
from kestrelpy.dashboard import make_app, serve
""",
    "server": """
import socket
from kestrelpy.server import serve_in_thread
with serve_in_thread() as server, socket.create_connection(server.addresses[0]) as client:
    client.sendall(b"use a\\r\\n")
    assert client.recv(100) == b"USING a\\r\\n"
""",
    "outbox": """
from sqlalchemy import create_engine
from kestrelpy.outbox import Outbox
Outbox(create_engine("sqlite://"))
""",
    "outbox-async": """
from sqlalchemy.ext.asyncio import create_async_engine
from kestrelpy.outbox import Outbox
Outbox(create_async_engine("sqlite+aiosqlite://"))
""",
    "postgres": "import psycopg",
    "metrics": """
import tempfile
from kestrelpy import JournaledQueue
from kestrelpy.metrics import Collector
with tempfile.TemporaryDirectory() as folder:
    JournaledQueue(folder, "jobs").close()
    assert list(Collector(folder).collect())
""",
    "otel": """
import tempfile
from kestrelpy.metrics import observe
with tempfile.TemporaryDirectory() as folder:
    observe(None, folder)
""",
    "ship": """
from kestrelpy.ship import open_store
open_store("s3://bucket/prefix", options={"region": "eu-central-1"})
""",
    "msgspec": """
from kestrelpy import codecs
codec = codecs.msgspec(list[int])
assert codec.decode(codec.encode([1])) == [1]
""",
    "pydantic": """
from kestrelpy import codecs
codec = codecs.pydantic(list[int])
assert codec.decode(codec.encode([1])) == [1]
""",
    "zstd": """
from kestrelpy import codecs
codec = codecs.zstd()
assert codec.decode(codec.encode(b"x")) == b"x"
""",
    "encrypted": """
from kestrelpy import codecs
codec = codecs.encrypted({"a": bytes(32)})
assert codec.decode(codec.encode(b"x")) == b"x"
""",
    "codecs": """
from kestrelpy import codecs
codec = codecs.encrypted({"a": bytes(32)}, codecs.zstd(codecs.msgspec(list[int])))
assert codec.decode(codec.encode([1])) == [1]
codecs.pydantic(list[int])
""",
    "spark": """
import pyspark
from kestrelpy.spark import DriverBuffer, register
""",
}
"""For each extra, what a user does with it. ``bench`` and ``dev`` are not for users."""
NOTHING_MORE = {"server"}
"""Extras without a package, whose programs run without them, too."""


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that is made from it: what ``make wheel`` makes."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def wanted(wheel: Path, extras: Iterable[str]) -> Iterator[Requirement]:
    """What the wheel asks for with these extras. An extra that is made of others is those."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    for requirement in map(Requirement, asked):
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": one}) for one in ("", *extras)):
            if requirement.name == "kestrelpy":
                yield from wanted(wheel, requirement.extras)
            else:
                yield requirement


def distributions(requirements: Iterable[Requirement]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that meet these requirements here, with all that they ask for."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    open_ = list(requirements)
    while open_:
        requirement = open_.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = one = importlib.metadata.distribution(requirement.name)
        for each in map(Requirement, one.requires or ()):
            extras = ("", *requirement.extras)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                open_.append(each)
    return found


def link(one: importlib.metadata.Distribution, place: Path) -> None:
    """Link its packages; of a folder that several distributions share, only its own part."""
    files = [file for file in one.files or () if file.parts[0] != ".."]
    packages = {file.parent for file in files if file.name == "__init__.py" or file.parent.suffix == ".dist-info"}
    for file in files:
        top = next((folder for folder in reversed(file.parents) if folder in packages), file)
        target = place / top
        if not target.is_symlink() and not any(folder.is_symlink() for folder in target.parents):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(str(one.locate_file(top)))


def place_of(environment: Path) -> Path:
    """Where its packages are."""
    return Path(sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})["purelib"])


def install(environment: Path, requirements: Iterable[Requirement]) -> None:
    for one in distributions(requirements).values():
        link(one, place_of(environment))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A new environment into which pip has installed the wheel, with no extra."""
    folder = tmp_path_factory.mktemp("plain") / "env"
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(python_of(folder)), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--quiet", str(wheel)], check=True, capture_output=True, timeout=SECONDS)
    install(folder, wanted(wheel, ()))
    return folder


def with_packages(plain: Path, folder: Path, requirements: Iterable[Requirement]) -> Path:
    """A new environment with what the plain one has, and these."""
    venv.create(folder, symlinks=True)
    for each in place_of(plain).iterdir():
        (place_of(folder) / each.name).symlink_to(each)
    install(folder, requirements)
    return folder


def tried(environment: Path, program: str, folder: Path) -> tuple[int, str]:
    """Run a program there, far from the tree."""
    command = [str(python_of(environment)), "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=folder, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


# -- archives ----------------------------------------------------------------------------------------------------------


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist()}


@takes_long
def test_the_source_archive_makes_the_wheel_of_the_tree(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)
    (of_the_tree,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(of_the_tree)


@takes_long
def test_the_source_archive_has_what_its_packagers_need_and_no_more(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        there = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"} <= there
    parts = ("kestrelpy", "tests", "bench")
    here = {str(path.relative_to(ROOT)) for part in parts for path in (ROOT / part).rglob("*.py")}
    assert here <= there
    assert {"docs/guide.md", ".ci/run", "contrib/systemd/kestrelpy-beanstalk.service"} <= there
    assert not [name for name in there if re.search(r"__pycache__|\.venv|\.hypothesis|^bench/results|_cache/", name)]
    assert {name.partition("/")[0] for name in there} <= {
        *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md"),
        *("bench", "contrib", "docs", "kestrelpy", "pyproject.toml", "tests"),
    }


# -- the wheel, and nothing else ---------------------------------------------------------------------------------------


@takes_long
def test_the_wheel_works_with_no_extra(plain: Path, tmp_path: Path) -> None:
    assert tried(plain, CORE, tmp_path) == (0, "")
    status, where = tried(plain, "import kestrelpy; print(kestrelpy.__file__)", tmp_path)
    assert status == 0
    assert Path(where.strip()).is_relative_to(plain)


@takes_long
def test_the_command_is_installed(plain: Path, tmp_path: Path) -> None:
    command = [str(plain / "bin" / "kestrelpy")]

    def run(*arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*command, *arguments],
            input=stdin,
            cwd=tmp_path,
            env=OUTSIDE,
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        return done.stdout

    run("put", "queues", "jobs", stdin="one\ntwo\n")
    assert run("get", "queues", "jobs", "--max", "2") == "one\ntwo\n"
    (tmp_path / "some.txt").write_text("a line\n" * 5_000)
    assert "proven: each reader saw every line" in run("demo", "--input", "some.txt")


@takes_long
def test_an_import_takes_no_longer_than_that_of_asyncio(plain: Path, tmp_path: Path) -> None:
    """docs/performance.md has it in milliseconds; a ratio is the same on a busy machine. Each in a process of its own:
    who comes second finds half of what it needs there.
    """

    def cumulative(module: str) -> int:
        done = subprocess.run(
            [str(python_of(plain)), "-X", "importtime", "-c", f"import {module}"],
            cwd=tmp_path,
            env=OUTSIDE,
            capture_output=True,
            text=True,
            check=True,
        )
        (line,) = (line for line in done.stderr.splitlines() if line.endswith(f"| {module}"))
        return int(line.split("|")[1])

    ratios = [cumulative("kestrelpy") / cumulative("asyncio") for _ in range(5)]
    assert min(ratios) < 1.0, ratios


@takes_long
def test_the_tests_of_the_face_pass_against_the_wheel(plain: Path, tmp_path: Path) -> None:
    environment = with_packages(plain, tmp_path / "env", map(Requirement, ("pytest", "hypothesis")))
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tests", project / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", project)
    command = [str(python_of(environment)), "-m", "pytest", "-p", "no:cacheprovider", "--cases", "1", *FACE]
    done = subprocess.run(
        command,
        cwd=project,
        env={**OUTSIDE, "KESTRELPY_SHARE": "0.05"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
    assert not (project / "kestrelpy").exists(), "it was the wheel"


# -- extras ------------------------------------------------------------------------------------------------------------


@takes_long
def test_each_extra_has_a_program(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = set(Parser().parsestr(archive.read(name).decode()).get_all("Provides-Extra", []))
    assert extras - {"bench", "dev", "docs"} == set(EXTRAS)


@takes_long
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_needs_nothing_but_itself(extra: str, wheel: Path, plain: Path, tmp_path: Path) -> None:
    try:
        environment = with_packages(plain, tmp_path / "env", wanted(wheel, [extra]))
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: the extra [{extra}] has it")
    assert tried(environment, EXTRAS[extra], tmp_path) == (0, "")
    status, said = tried(plain, EXTRAS[extra], tmp_path)
    assert (status == 0) == (extra in NOTHING_MORE), "and without it, there is nothing that it could have come from"
    assert status == 0 or "pip install" in said or "No module named" in said
