"""The wheel: what is in it, and what the type checkers of those who install it see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.budget import takes_long

pytest.importorskip("hatchling", reason="hatchling is not installed: the extra [dev] has it")
ROOT = Path(__file__).parent.parent

PROGRAM = """
from __future__ import annotations

from concurrent.futures import Future
from typing import assert_type

from kestrelpy import (
    CorruptJournal,
    Item,
    JournaledQueue,
    QueueStats,
    Reader,
    ReaderConfig,
    Record,
    VerifyReport,
    open_reader,
    queue_names,
    scan,
    verify,
)
from kestrelpy.codecs import UTF8
from kestrelpy.inbox import Part, PartWriter, publish
from kestrelpy import QueueInspection, inspect
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import Job, WorkQueue


def work(folder: str) -> int:
    with JournaledQueue(folder, "jobs", sync="always", default_reader=ReaderConfig(max_items=10)) as queue:
        assert_type(queue.put(b"x"), int)
        assert_type(queue.put_future(b"x"), Future[int])
        with queue.get() as item:
            assert_type(item, Item)
            assert_type(item.id, int)
        assert_type(queue.reader("mail"), Reader)
        assert_type(queue.stats(), QueueStats)
        return queue.stats().items


def look(folder: str) -> str | None:
    assert_type(queue_names(folder), list[str])
    assert_type(verify(folder, "jobs"), VerifyReport)
    assert_type(inspect(folder, "jobs"), QueueInspection)
    for record in scan(folder, "jobs"):
        assert_type(record, Record)
        assert_type(record.data, bytes)
    try:
        assert_type(open_reader(folder, "jobs", "mail"), Reader)
    except CorruptJournal as damage:
        assert_type(damage.offset, int)
        return damage.reason
    return None


def send(folder: str) -> bool:
    with PartWriter(folder, "jobs") as writer:
        writer.add([b"x"])
        part = writer.seal()
    assert_type(part, Part)
    return publish(folder, "jobs", [part], app_id="nightly", version=7)


def jobs() -> bytes:
    with WorkQueue(None, clock=ManualClock(), disk=MemoryDisk()) as queue, queue.session() as session:
        assert_type(queue.put(b"x", delay=1.5), int)
        job = session.reserve(timeout=0)
        assert_type(job, Job)
        return job.body


async def wait(queue: JournaledQueue) -> None:
    assert_type(await queue.aget(timeout=1.0), Item)


texts = JournaledQueue("folder", "texts", codec=UTF8)
"""

MISTAKES = """
from kestrelpy import JournaledQueue, queue_names

names: int = queue_names("folder")
JournaledQueue("folder", "jobs", sync="sometimes")
JournaledQueue("folder", "jobs").gett()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def project(wheel: Path, tmp_path: Path) -> Path:
    """A folder of a user's, with an environment that has the wheel and nothing of ours besides."""
    venv.create(tmp_path / "env", symlinks=True)
    places = sysconfig.get_paths(vars={"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(places["purelib"])
    settings = {"venvPath": str(tmp_path), "venv": "env", "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "mistakes.py").write_text(textwrap.dedent(MISTAKES))
    return tmp_path


def run(project: Path, *command: str | Path) -> tuple[int, str]:
    """Run a checker with the path of these tests for itself; what it checks does not see that."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    environment["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    start = f"import runpy, sys; sys.path[:] = {sys.path!r}; del sys.argv[0]; runpy.run_module(sys.argv[0], "
    start += "run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", start, *command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def mypy(project: Path, program: str) -> tuple[int, str]:
    pytest.importorskip("mypy", reason="mypy is not installed: the extra [dev] has it")
    python = project / "env" / "bin" / "python"
    return run(project, "mypy", "--strict", "--cache-dir", os.devnull, "--python-executable", python, program)


def pyright(project: Path, program: str) -> tuple[int, str]:
    pytest.importorskip("pyright", reason="pyright is not installed: the extra [dev] has it")
    return run(project, "pyright", program)


Checker = Callable[[Path, str], tuple[int, str]]


def test_the_wheel_has_the_package_its_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "kestrelpy").rglob("*.py")} | {"kestrelpy/py.typed"}
    assert wanted <= there
    assert {name for name in there if not name.startswith("kestrelpy/")} == set()


@takes_long
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_strict_checker_sees_the_types_of_the_wheel(project: Path, checker: Checker) -> None:
    status, said = checker(project, "program.py")
    assert status == 0, said


@takes_long
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_strict_checker_sees_mistakes(project: Path, checker: Checker) -> None:
    """Else it would see nothing at all, and say so of a program that is right, too."""
    status, said = checker(project, "mistakes.py")
    lines = [f"mistakes.py:{line}:" for line in (4, 5, 6)]
    assert status != 0
    assert all(line in said for line in lines), said
