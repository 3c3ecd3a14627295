"""Running outboxes and processes: signals, forks, ends, and several that share the work."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from kestrelpy.outbox import Outbox
from tests.support.outboxes import all_become, becomes, put, put_each
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

PROGRAM = """
import faulthandler
import asyncio, os, signal, sys, threading
from kestrelpy.outbox import Outbox, OutboxError
url, folder = sys.argv[1:3]
gate = threading.Event()
outbox = Outbox(url)
faulthandler.register(signal.SIGUSR1)

def note(name, text=""):
    with open(os.path.join(folder, name), "a") as file:
        file.write(f"{text}\\n")

def seen(name, text):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return False
    with open(path) as file:
        return text in file.read().split()

@outbox.consumer("q")
def work(payload):
    note("done", payload)

@outbox.consumer("slow")
def slow(payload):
    note("began")
    while not os.path.exists(os.path.join(folder, "go")):
        gate.wait(0.001)
    note("done", payload)

@outbox.consumer("stuck")
def stuck(payload):
    note("began")
    gate.wait(100)

@outbox.consumer("astuck")
async def astuck(payload):
    note("began")
    await asyncio.sleep(100)
"""


one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""Where the other one would show nothing else: each process takes half a second to import what it needs."""


class Program:
    """A process that runs ``PROGRAM`` and then some more."""

    def __init__(self, url: str, folder: Path, source: str) -> None:
        self.folder = folder
        command = [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(source), url, str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
        )

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    def wait_for(self, name: str) -> None:
        """For a file of this name to be there."""
        until(lambda: (self.folder / name).exists() or self.process.poll() is not None)
        assert (self.folder / name).exists(), self.end()

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        """Its status, and what it has printed."""
        try:
            said, _ = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, signal.SIGUSR1)  # what hangs says where
                self.process.wait(0.5)
            self.kill()
            raise AssertionError(self.process.communicate()[0]) from None
        return self.process.returncode, said

    def kill(self) -> None:
        """With the children that it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def outbox(engine: sqlalchemy.Engine) -> Iterator[Outbox]:
    """To put with, and to look with."""
    with Outbox(engine) as made:
        made.create_tables()
        for queue in ("q", "slow", "stuck", "astuck"):
            made.queue(queue)
        yield made


@pytest.fixture
def start(
    outbox: Outbox, engine: sqlalchemy.Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Program]]:
    """``start(source)``: a process that has the outbox as ``outbox``."""
    del outbox
    started: list[Program] = []

    def run(source: str) -> Program:
        url = engine.url.render_as_string(hide_password=False)
        started.append(Program(url, tmp_path_factory.mktemp("program"), source))
        return started[-1]

    yield run
    for program in started:
        if program.process.poll() is None:
            program.kill()
            program.process.communicate()


# -- run() and signals -----------------------------------------------------------------------------------------------

RUNS = {"run": "outbox.run(threads=2)", "arun": "asyncio.run(outbox.arun(threads=2))"}


@pytest.mark.parametrize(("how", "number"), [("run", signal.SIGTERM), ("arun", signal.SIGINT)])
def test_a_signal_drains(outbox: Outbox, start: Callable[[str], Program], how: str, number: signal.Signals) -> None:
    program = start(RUNS[how] + "\nnote('after')")
    becomes(outbox, put(outbox, "q", 1), "done")
    job = put(outbox, "slow", 2)
    program.wait_for("began")
    program.process.send_signal(number)
    other = put(outbox, "slow", 3)
    program.go()
    assert program.end() == (0, "")
    assert outbox.get(job.id).status == "done"
    others = {"ready": [], "done": ["3"]}[outbox.get(other.id).status]  # it may have been claimed just before
    assert (program.lines("done")[0], sorted(program.lines("done"))) == ("1", ["1", "2", *others])
    assert (program.folder / "after").exists()


@one_database
@pytest.mark.parametrize(("how", "number"), [("run", signal.SIGTERM), ("run", signal.SIGINT), ("arun", signal.SIGINT)])
def test_a_second_signal_ends_it_now(
    outbox: Outbox, start: Callable[[str], Program], how: str, number: signal.Signals
) -> None:
    program = start(RUNS[how])
    job = put(outbox, "stuck", 1)
    program.wait_for("began")
    program.process.send_signal(number)
    until(lambda: not catches_sigterm(program.process.pid))
    began = time.monotonic()
    program.process.send_signal(number)
    status, said = program.end()
    assert time.monotonic() - began < PATIENCE / 2
    assert status != 0
    assert ("KeyboardInterrupt" in said) is (number == signal.SIGINT)
    assert outbox.get(job.id).status == ("ready" if number == signal.SIGINT else "running")


def catches_sigterm(pid: int) -> bool:
    """The first signal of either kind gives the second one its usual meaning again."""
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    assert caught is not None
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@one_database
def test_a_signal_during_the_start_stops_it(outbox: Outbox, start: Callable[[str], Program]) -> None:
    program = start("""
        true_start = outbox.start
        def start(*args, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            true_start(*args, **options)
        outbox.start = start
        outbox.run(threads=1)
        note("after")
    """)
    assert program.end() == (0, "")
    assert (program.folder / "after").exists()


@one_database
def test_after_run_the_handlers_of_signals_are_those_from_before(start: Callable[[str], Program]) -> None:
    program = start("""
        def mine(*_): ...
        signal.signal(signal.SIGTERM, mine)
        def interrupt():
            while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                gate.wait(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        outbox.run(threads=1)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        asyncio.run(asyncio.sleep(0))
    """)
    assert program.end() == (0, "")


@one_database
def test_run_on_another_thread_says_that_it_can_not(start: Callable[[str], Program]) -> None:
    """And one that runs goes on."""
    program = start("""
        said = []
        def run():
            for call in outbox.run, lambda: asyncio.run(outbox.arun()):
                try:
                    call()
                except OutboxError as error:
                    said.append(str(error))
        outbox.start(threads=1)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert ["main thread" in text for text in said] == [True, True], said
        with outbox.begin() as connection:
            outbox.put(connection, "q", 1)
        while not seen("done", "1"):
            gate.wait(0.001)
        assert outbox.stop()
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    """)
    assert program.end() == (0, "")


# -- interrupts ------------------------------------------------------------------------------------------------------


@one_database
def test_an_interrupted_stop_goes_on_and_can_be_waited_for_again(
    outbox: Outbox, start: Callable[[str], Program]
) -> None:
    job = put(outbox, "slow", 1)
    program = start("""
        outbox.start(threads=1)
        while not os.path.exists(os.path.join(folder, "began")):
            gate.wait(0.001)
        def interrupt():
            while not outbox._lifecycle._runner.is_stopping:
                gate.wait(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        interrupting = threading.Thread(target=interrupt)
        try:
            interrupting.start()
            outbox.stop()
        except KeyboardInterrupt:
            note("interrupted")
        interrupting.join()
        assert outbox.stop()
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        outbox.start(threads=1)
        assert outbox.stop()
    """)
    program.wait_for("interrupted")
    program.go()
    assert program.end() == (0, "")
    assert outbox.get(job.id).status == "done"


def test_a_start_that_is_interrupted_anywhere_can_be_stopped_and_done_again(start: Callable[[str], Program]) -> None:
    """An interrupt at each of the first lines that a start runs, as far as it gets."""
    program = start("""
        lines = 0
        def trace(frame, event, _argument):
            global left
            if event == "line" and "kestrelpy/outbox" in frame.f_code.co_filename:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace
        number, is_over = 1, False
        while not is_over:
            left = number
            sys.settrace(trace)
            try:
                outbox.start(threads=1)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            is_over = left > 0
            assert outbox.stop()
            number += 1 + number // 8
        outbox.start(threads=1)
        assert outbox.stop()
        left = [thread.name for thread in threading.enumerate()]
        assert left == ["MainThread"], left
        note("lines", number)
    """)
    assert program.end() == (0, "")
    assert int(program.lines("lines")[0]) > 50


# -- the end of the interpreter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["q", "stuck", "astuck"])
def test_the_interpreter_ends_though_nobody_stopped(
    outbox: Outbox, start: Callable[[str], Program], queue: str
) -> None:
    """In a second or two, without a word; and what ran is given back."""
    job = put(outbox, queue, 1)
    program = start("""
        outbox.start(threads=2)
        while not {"began", "done"} & set(os.listdir(folder)):
            gate.wait(0.001)
    """)
    assert program.end() == (0, "")
    found = outbox.get(job.id)
    assert (found.status, found.tries) == (("done", 1) if queue == "q" else ("ready", 0))


@one_database
def test_an_outbox_of_a_program_that_fails_ends_with_it(outbox: Outbox, start: Callable[[str], Program]) -> None:
    put(outbox, "stuck", 1)
    program = start("outbox.start(threads=2)\nraise SystemExit(3)")
    assert program.end() == (3, "")


# -- forks -----------------------------------------------------------------------------------------------------------

FORK = """
    def run(payload):
        with outbox.begin() as connection:
            outbox.put(connection, "q", payload)
        while not seen("done", payload):
            gate.wait(0.001)

    def fork(work):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def in_grandchild():
        assert outbox.stop()
        outbox.start(threads=1)
        outbox.close()

    def in_child():
        assert outbox.stop()
        outbox.start(threads=1)
        run("child")
        assert outbox.core.worker.endswith(f":{os.getpid()}")
        fork(in_grandchild)
        assert outbox.stop()
        outbox.close()

    outbox.start(threads=2)
    run("before")
    fork(in_child)
    run("after")
    assert outbox.stop()
"""


BINDS = {
    "url": "",
    "engine": """
        import sqlalchemy
        engine = sqlalchemy.create_engine(url)
        other, outbox = outbox, Outbox(engine)
        outbox.add_consumer("q", work)
    """,
    "async": """
        from sqlalchemy.ext.asyncio import create_async_engine
        engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        other, outbox = outbox, Outbox(engine)
        outbox.add_consumer("q", work)
        outbox.begin = other.begin
    """,
}
ENDS = {"url": "", "engine": "engine.dispose()", "async": "asyncio.run(engine.dispose())"}


@pytest.mark.parametrize("bind", list(ENDS))
def test_a_forked_child_has_a_stopped_outbox_of_its_own(
    outbox: Outbox, start: Callable[[str], Program], bind: str
) -> None:
    """Also on an engine of the caller's, whose pool has connections of the parent."""
    program = start(textwrap.dedent(BINDS[bind]) + textwrap.dedent(FORK) + ENDS[bind])
    assert program.end() == (0, "")
    assert program.lines("done") == ["before", "child", "after"]
    assert [job.tries for job in outbox.jobs("q")] == [1, 1, 1]


@one_database
@pytest.mark.parametrize("bind", ["url", "async"])
def test_no_fork_strikes_a_transaction_of_sqlite(outbox: Outbox, start: Callable[[str], Program], bind: str) -> None:
    """The child would have its locks, for ever. Each fork comes while the last job is marked."""
    program = start(
        textwrap.dedent(BINDS[bind])
        + textwrap.dedent("""
            outbox.start(threads=2)
            for number in range(20):
                with outbox.begin() as connection:
                    outbox.put(connection, "q", f"parent-{number}")
                while not seen("done", f"parent-{number}"):
                    gate.wait(0.0005)
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    with outbox.begin() as connection:
                        outbox.put(connection, "q", f"child-{number}")
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            assert outbox.stop()
        """)
        + ENDS[bind]
    )
    assert program.end() == (0, "")
    assert len(outbox.jobs("q")) == 40


# -- the end of an event loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database_url", "driver"),
    [("postgresql", "asyncpg"), ("postgresql", "psycopg"), ("sqlite", "aiosqlite")],
    indirect=["database_url"],
)
def test_an_event_loop_that_ends_without_astop(outbox: Outbox, start: Callable[[str], Program], driver: str) -> None:
    """The job that ran is given back, and the outbox can be started on the next loop. Drivers may complain."""
    job = put(outbox, "q", 1)
    program = start(f"""
        from sqlalchemy import make_url
        from sqlalchemy.ext.asyncio import create_async_engine
        found = make_url(url)
        engine = create_async_engine(found.set(drivername=f"{{found.get_backend_name()}}+{driver}"))
        outbox = Outbox(engine)

        @outbox.consumer("q", max_retries=0)
        async def work(payload):
            if not seen("began", "1"):
                note("began", payload)
                await asyncio.Event().wait()
            note("done", payload)

        async def until(name):
            while not seen(name, "1"):
                await asyncio.sleep(0.001)

        async def forget():
            await outbox.astart(threads=1)
            await until("began")

        async def again():
            await outbox.astart(threads=1)
            await until("done")
            assert await outbox.astop()
            note("stopped")

        asyncio.run(forget())
        asyncio.run(again())
        sys.stdout.flush()
        os._exit(0)
    """)
    status, said = program.end()
    assert status == 0, said
    assert (program.folder / "stopped").exists(), said
    assert (outbox.get(job.id).status, outbox.get(job.id).tries) == ("done", 1)


# -- several processes -----------------------------------------------------------------------------------------------


def test_two_processes_share_the_work_without_doubles(outbox: Outbox, start: Callable[[str], Program]) -> None:
    jobs = put_each(outbox, "q", range(200))
    programs = [start("outbox.run(threads=2, prefetch=3)") for _ in range(2)]
    until(lambda: all(program.lines("done") for program in programs) or not outbox.jobs("q", status="ready", limit=1))
    more = put_each(outbox, "q", range(200, 400))
    all_become(outbox, "q", "done")
    until(lambda: all(catches_sigterm(program.process.pid) for program in programs))  # the first may have done it all
    for program in programs:
        program.process.send_signal(signal.SIGTERM)
    assert [program.end() for program in programs] == [(0, ""), (0, "")]
    done = [sorted(map(int, program.lines("done"))) for program in programs]
    assert sorted(done[0] + done[1]) == list(range(len(jobs) + len(more)))
    assert all(job.tries == 1 for job in outbox.jobs("q", limit=1000))


def test_a_job_is_given_to_another_process_when_its_own_dies(
    outbox: Outbox, engine: sqlalchemy.Engine, start: Callable[[str], Program]
) -> None:
    """After its lease, and it has cost a try."""
    job = put(outbox, "slow", 1)
    dying = start("outbox.core.settings.lease = 0.5\noutbox.start(threads=1)\ngate.wait(100)")
    dying.wait_for("began")
    dying.process.kill()
    dying.end()
    assert outbox.get(job.id).status == "running"
    other = Outbox(engine)
    other.add_consumer("slow", lambda _: None, backoff=0)
    other.start(threads=1, poll_interval=0.05)
    try:
        found = becomes(other, job, "done")
    finally:
        other.close()
    assert (found.tries, found.worker) == (2, f"{os.uname().nodename}:{os.getpid()}")
