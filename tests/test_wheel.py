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
from logging import LogRecord
from typing import Any, assert_type

from kestrelpy import (
    BlockingQueue,
    Codec,
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
from kestrelpy.codecs import JSON, UTF8, encrypted, msgspec, pydantic, zstd
from kestrelpy.logging import RECORDS, DurableHandler, DurableListener
from kestrelpy.inbox import Part, PartWriter, publish
from kestrelpy import QueueInspection, inspect
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import Job, WorkQueue


def work(folder: str) -> int:
    with JournaledQueue(folder, "jobs", sync="always", default_reader=ReaderConfig(max_items=10)) as queue:
        assert_type(queue.put(b"x"), int)
        assert_type(queue.put_future(b"x"), Future[int])
        with queue.get() as item:
            assert_type(item, Item[bytes])
            assert_type(item.id, int)
            assert_type(item.value, bytes)
        assert_type(queue.reader("mail"), Reader[bytes])
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
        assert_type(open_reader(folder, "jobs", "mail", create=True), Reader[bytes])
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
        assert_type(job, Job[bytes])
        return job.body


async def wait(queue: JournaledQueue) -> None:
    assert_type(await queue.aget(timeout=1.0), Item)


texts = JournaledQueue("folder", "texts", codec=UTF8)
assert_type(texts, JournaledQueue[str])
assert_type(texts.get().value, str)
assert_type(texts.reader("mail").get_many(3), list[Item[str]])
face: BlockingQueue[str] = texts.as_blocking_queue()
assert_type(face.get(), str)
assert_type(open_reader("folder", "texts", "mail", codec=UTF8).get().value, str)
assert_type(JournaledQueue("folder", "values", codec=JSON).get().value, Any)
texts.put("one")
texts.put_many(["two", "three"])


class Order:
    pass


class Orders:
    def encode(self, value: Order, /) -> bytes:
        return repr(value).encode()

    def decode(self, data: bytes, /) -> Order:
        return Order()


def chosen(codec: Codec[Order]) -> Order:
    with JournaledQueue("folder", "orders", codec=codec, sync="always") as orders:
        orders.put(Order())
        return orders.get().value


def coded(keys: dict[str, bytes]) -> None:
    assert_type(msgspec(Order), Codec[Order])
    assert_type(msgspec(Order, "msgpack"), Codec[Order])
    assert_type(pydantic(Order), Codec[Order])
    assert_type(zstd(), Codec[bytes])
    assert_type(encrypted(keys), Codec[bytes])
    assert_type(JournaledQueue("folder", "orders", codec=encrypted(keys, zstd(msgspec(Order)))).get().value, Order)


def logged(queue: JournaledQueue[LogRecord | None]) -> None:
    with DurableListener(queue, DurableHandler(queue), respect_handler_level=True) as listener:
        assert_type(listener.failed_count, int)
    DurableHandler("logs", "folder", level="INFO", codec=RECORDS)


logged(JournaledQueue("folder", "logs", codec=RECORDS))


def any_queue(queue: JournaledQueue, reader: Reader, item: Item) -> None:
    queue.put(reader.get().value if item.value else 1)


def jobs_of_orders(codec: Codec[Order]) -> None:
    with WorkQueue("folder", codec=codec, max_jobs=10) as queue, queue.session("orders") as session:
        assert_type(queue, WorkQueue[Order])
        queue.put(Order(), tube="orders")
        assert_type(session.reserve(timeout=1).value, Order)
        assert_type(queue.peek_ready("orders"), Job[Order])
        session.reserve().release(body=Order())
    assert_type(WorkQueue(None).session().reserve().value, bytes)


any_queue(texts, texts.reader("mail"), texts.get())
chosen(Orders())


class OrderQueue(JournaledQueue[Order]):
    pass
"""

MISTAKES = """
from kestrelpy import JournaledQueue, queue_names
from kestrelpy.codecs import UTF8
from kestrelpy.work import WorkQueue

names: int = queue_names("folder")
JournaledQueue("folder", "jobs", sync="sometimes")
JournaledQueue("folder", "jobs").gett()
JournaledQueue("folder", "jobs").put("text")
JournaledQueue("folder", "texts", codec=UTF8).put(b"bytes")
number: int = JournaledQueue("folder", "texts", codec=UTF8).get().value
JournaledQueue("folder", "jobs", codec=7)
WorkQueue("folder").put("text")
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
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "kestrelpy" / "dashboard" / "static").iterdir()}
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
    lines = [f"mistakes.py:{line}:" for line in range(6, 14)]
    assert status != 0
    assert all(line in said for line in lines), said
