"""What the tests of the modules share: a clock that stands still, a folder, queues that are closed at the end, a
disk with a gate, and a tally of what the long ones have seen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kestrelpy import JournaledQueue
from kestrelpy._reading import backlog
from kestrelpy._writing import put_path as put_module
from kestrelpy.testing import ManualClock
from tests.support import seaweed
from tests.support.budget import Tally, left_out
from tests.support.disks import GatedDisk
from tests.support.paths import QUICK_START, ROOT
from tests.support.patience import PATIENCE
from tests.support.queues import START_MS, let_die

for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:  # "make test &" of a shell, nohup: every child would inherit it
        signal.signal(number, usual)


paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if str(QUICK_START) not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(QUICK_START)])

# An example that takes 0.2 s, or a second to be drawn, has met a busy machine.
settings.register_profile("kestrelpy", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kestrelpy")

gc.disable()  # until all tests are collected: a million objects are made meanwhile, and all of them stay

OF_A_QUEUE = tuple(f"kestrelpy-{what}-" for what in ("ship", "gate", "fetch", "standby"))
"""Threads of one queue, which end with it. Those that several share end a while after the last one."""


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A test leaves no thread of a queue behind: it would be seen by tests that come later, and not by this one."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(OF_A_QUEUE):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} goes on after the test"


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    """``tally.add(name, count)``: shown at the end of the run, summed over all tests."""
    mine = Tally()
    yield mine
    record_property("tally", dict(mine.counts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, metavar="N", help="of a test with more cases run N, drawn by KESTRELPY_SEED")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker of a run of all tests imports them from another one on. Where the bytecode of the tests is not there
    yet, or is old, each then compiles its part of it and finds the rest, and does not compile all that the others do.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        paths = sorted((ROOT / "tests").rglob("test_*.py"))
        first = len(paths) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for path in paths[first:] + paths[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says it
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests in a session of Spark come first: so one worker has them all, as others take over from its end, and
    no second one starts a Java.
    """
    most = config.getoption("--cases")
    if most is not None:
        out = left_out(items, most)
        config.hook.pytest_deselected(items=sorted(out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of hundreds that a test asks for looks only at what the
    tests have made, and not at half a million objects of pytest and of modules each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The same again after each module: those that are imported late are large, and a collection may take 50 ms."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What all tests together have counted."""
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                for name, value in report.user_properties:
                    if name == "tally":
                        total.update(value)
    if total:
        terminalreporter.section("seen in this run")
        for name in sorted(total):
            terminalreporter.line(f"{total[name]:>12,}  {name}")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing is logged: where thousands of checkpoints are lost on purpose, that costs more than the recovery."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def small_batches() -> Iterator[None]:
    """Every ``put_many`` stays together in the window, and is read by twos: where a few items have to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(put_module, "LARGE_BATCH", 2)
        patch.setattr(backlog, "EXPANDED", 2)
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator[seaweed.Seaweed]:
    """A real ``s3`` server, started by the first test of this process that wants it. Do not stop it."""
    if seaweed.program() is None:
        pytest.skip(seaweed.NOT_INSTALLED)
    with seaweed.seaweed() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands at ``START_MS`` until it is advanced."""
    return ManualClock(START_MS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the queues of a test are; not there yet."""
    return tmp_path / "queues"


@pytest.fixture
def open_queue(folder: Path, clock: ManualClock) -> Iterator[Callable[..., JournaledQueue]]:
    """``open_queue(**options)``: the queue ``jobs`` in ``folder``, on the manual clock; closed at the end of the
    test.
    """
    opened: list[JournaledQueue] = []

    def open_one(name: str = "jobs", **options: Any) -> JournaledQueue:
        options.setdefault("clock", clock)
        opened.append(JournaledQueue(folder, name, **options))
        return opened[-1]

    yield open_one
    for queue in opened:
        with contextlib.suppress(Exception):
            queue.close()


@pytest.fixture
def killed(folder: Path, clock: ManualClock) -> Callable[..., None]:
    """``killed(work, **options)``: the files that ``work(queue)`` leaves behind when its process dies right after
    it.
    """

    def run(work: Callable[[JournaledQueue], object], name: str = "jobs", **options: Any) -> None:
        options.setdefault("clock", clock)
        queue = JournaledQueue(folder, name, **options)
        work(queue)
        let_die(queue)

    return run


@pytest.fixture
def gated_disk() -> Iterator[GatedDisk]:
    """The real disk behind a gate."""
    disk = GatedDisk()
    yield disk
    disk.gate.set()


@pytest.fixture
def start() -> Iterator[Callable[..., threading.Thread]]:
    """``start(work, *arguments)`` on a thread of its own; all of them must have ended, without an error, when the
    test has.
    """
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def run(work: Callable[..., object], *arguments: object) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield run
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """``script(source, *arguments)``: run it in another Python; what it printed. It must end by itself, well."""

    def run(source: str, *arguments: object, status: int = 0) -> str:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout.strip()

    return run
