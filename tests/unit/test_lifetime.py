"""Forks, the end of the interpreter, and queues that nobody closed; each in a Python of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import DurabilityUnknown, FullPolicy, JournaledQueue, QueueClosed, ReaderConfig, _process
from kestrelpy._waiting import put_future as put_future_module
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.support.paths import PYTHONPATH
from tests.support.patience import PATIENCE
from tests.support.queues import drain


# R26: the child is told, the parent is not disturbed.
@pytest.mark.parametrize("waiting", [False, True])
def test_r26_a_forked_child_is_told_and_the_parent_is_not_disturbed(waiting: bool, script: Any, folder: Path) -> None:
    told = script(
        """
        import os, sys, threading, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        from kestrelpy import ForkedQueue, JournaledQueue, QueueLocked, ReaderConfig, open_reader
        folder, waiting = sys.argv[1], sys.argv[2] == "True"
        queue = JournaledQueue(folder, "jobs", readers={"a": ReaderConfig(max_items=100)})
        reader = queue.reader("a")
        other = open_reader(folder, "jobs", "b", create=True, start="earliest")
        queue.put_many([b"1", b"2"])
        item = reader.get()
        reader.get().commit()
        got = []
        if waiting:
            thread = threading.Thread(target=lambda: got.append(reader.get(timeout=20).data))
            thread.start()
            while not reader.waiter_count:
                time.sleep(0.001)
        parent = os.getpid()
        child = os.fork()
        if not child:
            status = 1
            try:
                calls = [
                    lambda: queue.put(b"x"), lambda: queue.put(b"x", expires_in=1), lambda: queue.put_many([b"x"]),
                    lambda: queue.put_many([]), lambda: queue.put_future(b"x"), queue.sync, queue.checkpoint,
                    queue.flush,
                    queue.reader, lambda: queue.reader("c"), lambda: queue.drop_reader("a"), reader.get,
                    reader.get_nowait,
                    lambda: reader.get_many(2), reader.get_future, reader.peek, item.commit, item.abort, reader.flush,
                    reader.checkpoint, lambda: reader.seek(1), reader.discard_expired, other.get_nowait, other.flush,
                ]
                for each in (reader, other):
                    each.close()  # which does nothing, and changes nothing
                    repr(each), each.stats()
                for number, call in enumerate(calls):
                    try:
                        call()
                    except ForkedQueue as error:
                        assert error.opened_by == parent
                    else:
                        raise AssertionError(number)
                for attempt in (lambda: JournaledQueue(folder, "jobs"), lambda: open_reader(folder, "jobs", "b")):
                    try:
                        attempt()
                    except QueueLocked as error:
                        assert error.pid == parent
                    else:
                        raise AssertionError("the parent's lock was lost")
                with JournaledQueue(folder, "mine") as mine:  # one of its own works
                    mine.put(b"child")
                    assert mine.get(timeout=5).data == b"child"
                queue.close()
                reader.close()
                other.close()
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        item.commit()
        queue.put(b"3")
        if waiting:
            thread.join(20)
            assert got == [b"3"]
        assert len(other.get_many(5)) >= 2
        other.close()
        queue.close()
        with JournaledQueue(folder, "jobs") as again:
            assert again.stats().tail_id == 3
        print("undisturbed")
        """,
        folder,
        waiting,
    )
    assert told == "undisturbed"


def test_diskcache_300_a_child_does_not_hang_on_a_lock_that_was_held(script: Any, folder: Path) -> None:
    """A fork while another thread is in the middle of a put: the child's calls raise and do not wait for its locks."""
    assert (
        script(
            """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from kestrelpy import ForkedQueue, JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        reader = queue.reader()
        stop = threading.Event()
        def work():
            while not stop.is_set():
                queue.put(b"x")
                reader.get_nowait().commit()
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(10):
            child = os.fork()
            if not child:
                status = 0
                for call in (lambda: queue.put(b"y"), reader.get, queue.close, reader.flush):
                    try:
                        call()
                    except ForkedQueue:
                        pass
                    except BaseException:
                        status = 1
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
        queue.close()
        print("done")
        """,
            folder,
        )
        == "done"
    )


def test_every_lock_that_is_made_at_import_is_made_anew_in_a_forked_child(script: Any) -> None:
    """C12: one that a thread of the parent has at that moment is never released in the child."""
    told = script(
        """
        import importlib, os, pkgutil, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import kestrelpy
        for module in pkgutil.walk_packages(kestrelpy.__path__, "kestrelpy."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError:  # of an extra that is not installed
                    pass
        kinds = tuple({type(kind()) for kind in (threading.Lock, threading.RLock, threading.Condition)})
        def locks():
            for name, module in sorted(sys.modules.items()):
                if name.partition(".")[0] == "kestrelpy":
                    for at, value in list(vars(module).items()):
                        if isinstance(value, kinds):
                            yield f"{name}.{at}", value
                        elif getattr(type(value), "__module__", "") == name or getattr(value, "__module__", "") == name:
                            for inner, held in list(getattr(value, "__dict__", {}).items()):
                                if isinstance(held, kinds):
                                    yield f"{name}.{at}.{inner}", held
        before = dict(locks())
        assert {"kestrelpy._waiting.put_future._making", "kestrelpy.clock._timers._lock"} <= before.keys(), before
        child = os.fork()
        if not child:
            after = dict(locks())
            kept = [name for name, lock in before.items() if after[name] is lock]
            print(*kept or ["none"], flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert told == "none"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is the point
def test_a_childs_own_queue_has_futures_while_the_parents_are_made(folder: Path, start: Any) -> None:
    """C12."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with put_future_module._making:
            held.set()
            release.wait()

    start(hold)
    assert held.wait(20)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        done: list[object] = []
        JournaledQueue(folder, "own", sync="never").put_future(b"mine").add_done_callback(done.append)
        os._exit(0 if done else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it hung"
    finally:
        release.set()


# R29: a blocked get must not keep the interpreter from ending.
@pytest.mark.parametrize("how", ["thread", "future", "put", "outside"])
def test_r29_the_interpreter_ends_with_somebody_waiting(how: str, script: Any, folder: Path) -> None:
    told = script(
        """
        import sys, threading, time
        from kestrelpy import FullPolicy, JournaledQueue, QueueClosed, ReaderConfig, open_reader
        folder, how = sys.argv[1:]
        limited = ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK)
        queue = JournaledQueue(folder, "jobs", default_reader=limited)
        reader = open_reader(folder, "jobs", "far", create=True) if how == "outside" else queue.reader()
        if how == "put":
            queue.put(b"full")
        def work():
            try:
                if how == "put":
                    queue.put(b"x", timeout=None)
                elif how == "future":
                    reader.get_future().result()
                else:
                    reader.get()
            except QueueClosed:
                print("woken", flush=True)
        threading.Thread(target=work).start()  # not a daemon
        while not (reader.waiter_count or queue._room):
            time.sleep(0.001)
        """,
        folder,
        how,
    )
    assert told == "woken"


IMPORTS = [
    "from kestrelpy import JournaledQueue; from concurrent.futures import ThreadPoolExecutor",
    "from concurrent.futures import ThreadPoolExecutor; from kestrelpy import JournaledQueue",
    "import concurrent.futures, kestrelpy; from kestrelpy import JournaledQueue\n"
    "from concurrent.futures import ThreadPoolExecutor",
]


@pytest.mark.parametrize(("imports", "how"), [(0, "waits"), (1, "waits"), (2, "waits"), (0, "is about to wait")])
def test_r29_a_pool_that_waits_does_not_keep_the_interpreter_from_ending(
    imports: int, how: str, script: Any, folder: Path
) -> None:
    """C16: whatever was imported first."""
    told = script(
        IMPORTS[imports]
        + """
import sys, threading, time
from kestrelpy import QueueClosed
queue = JournaledQueue(sys.argv[1], "jobs")
reader = queue.reader()
last_line = threading.Event()
def work():
    if sys.argv[2] != "waits":
        last_line.wait()
        time.sleep(0.1)
    try:
        queue.get()
    except QueueClosed:
        print("told", flush=True)
ThreadPoolExecutor(1).submit(work)
while sys.argv[2] == "waits" and not reader.waiter_count:
    time.sleep(0.001)
last_line.set()
""",
        folder,
        how,
    )
    assert told == "told"


@pytest.mark.parametrize("kind", ["items", "jobs"])
def test_r29_a_pool_that_waits_for_a_future_does_not_keep_the_interpreter_from_ending(
    kind: str, script: Any, folder: Path
) -> None:
    """The future was handed out before anything of pools was imported."""
    told = script(
        """
        import sys
        from kestrelpy import JournaledQueue, QueueClosed
        from kestrelpy.work import WorkQueue
        if sys.argv[2] == "items":
            queue = JournaledQueue(sys.argv[1], "jobs")
            future = queue.get_future()
        else:
            queue = WorkQueue(sys.argv[1])
            session = queue.session()
            future = session.reserve_future()
        from concurrent.futures import ThreadPoolExecutor
        def work():
            try:
                future.result()
            except QueueClosed:
                print("told", flush=True)
        ThreadPoolExecutor(1).submit(work)
        """,
        folder,
        kind,
    )
    assert told == "told"


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
def test_a_callback_that_ends_the_program_keeps_no_other_queue_open(error: str, script: Any, folder: Path) -> None:
    """Every queue is dismissed and closed: its commits are saved, and its threads end."""
    told = script(
        f"""
        import logging, sys, threading, time
        from kestrelpy import JournaledQueue, QueueClosed
        logging.disable(logging.CRITICAL)
        queues = [JournaledQueue(sys.argv[1], name) for name in "acdefb"]
        def leave(_):
            raise {error}
        for queue in queues[:-1]:
            queue.get_future().add_done_callback(leave)
        queues[-1].put(b"done")
        queues[-1].get().commit()
        def work():
            try:
                queues[-1].get()
            except QueueClosed:
                print("told", flush=True)
        threading.Thread(target=work).start()
        while not queues[-1].reader().waiter_count:
            time.sleep(0.001)
        """,
        folder,
    )
    assert told == "told"
    with JournaledQueue(folder, "b") as queue:
        assert drain(queue) == []


@pytest.mark.parametrize(("imports", "how"), [(0, "pool"), (1, "pool"), (0, "thread")])
def test_threads_at_work_go_on_until_they_have_ended(imports: int, how: str, script: Any, folder: Path) -> None:
    """C16: Python waits for them, and so do their queues."""
    told = script(
        IMPORTS[imports]
        + """
import sys, threading, time
queue = JournaledQueue(sys.argv[1], "jobs")
queue.reader()
last_line = threading.Event()
def work():
    last_line.wait()
    time.sleep(0.1)
    for number in range(3):
        queue.put(b"%d" % number)
    queue.put_future(b"3").result(20)
    queue.put_many([b"4"])
    queue.get_nowait().commit()
    queue.sync()
    print(queue.stats().durable_id, flush=True)
if sys.argv[2] == "pool":
    ThreadPoolExecutor(1).submit(work)
else:
    threading.Thread(target=work).start()
last_line.set()
""",
        folder,
        how,
    )
    assert told == "5"
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_queue_of_a_child_of_multiprocessing_is_closed_at_its_end(method: str, tmp_path: Path, folder: Path) -> None:
    """Such a child may end without what ``atexit`` has."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import multiprocessing, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import kestrelpy
        def work(folder):
            global queue
            queue = kestrelpy.JournaledQueue(folder, "jobs", sync="never")
            queue.put_many([b"1", b"2"])
            queue.get().commit()
        if __name__ == "__main__":
            child = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(sys.argv[1],))
            child.start()
            child.join()
            sys.exit(child.exitcode)
        """)
    )
    run: list[str | Path] = [sys.executable, program, folder, method]
    subprocess.run(run, timeout=60, check=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"2"]


def test_what_closing_at_the_end_raises_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would hear of it; and the others are closed all the same."""
    disk = FailingDisk(MemoryDisk())
    clock = ManualClock()
    failed = JournaledQueue(folder, "failed", sync=1, disk=disk, clock=clock)
    other = JournaledQueue(folder, "other", disk=disk, clock=clock)
    monkeypatch.setattr(_process, "_live", weakref.WeakKeyDictionary({failed: False, other: False}))
    failed.put(b"x")
    disk.arm(errno.EIO, kinds={"sync"})
    clock.advance(1)
    _process.close_all()
    assert failed.closed
    assert other.closed
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info[0] for record in logged if record.exc_info] == [DurabilityUnknown]
    assert "failed" in logged[0].message


def test_nobody_may_wait_once_the_interpreter_is_ending(
    open_queue: Any, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK))
    future = queue.get_future()
    monkeypatch.setattr(_process, "_is_ending", False)
    monkeypatch.setattr(_process, "_live", weakref.WeakKeyDictionary({queue: False}))
    _process.dismiss_all()
    assert isinstance(future.exception(0), QueueClosed)
    with pytest.raises(QueueClosed, match="ending"):
        queue.get(timeout=20)
    assert isinstance(queue.get_future().exception(0), QueueClosed)
    queue.put(b"x")
    with pytest.raises(QueueClosed, match="ending"):
        queue.put(b"y", timeout=20)
    queue.get(timeout=20).commit()
    queue.put(b"z")


def test_what_was_committed_is_saved_at_the_end_of_the_interpreter(script: Any, folder: Path) -> None:
    script(
        """
        import sys
        from kestrelpy import JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put_many([b"1", b"2", b"3"])
        queue.get().commit()
        queue.get()
        """,
        folder,
    )
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"2", b"3"]


def test_nothing_is_saved_when_the_process_just_goes(script: Any, folder: Path) -> None:
    script(
        """
        import os, sys
        from kestrelpy import JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put_many([b"1", b"2"])
        queue.get().commit()
        os._exit(0)
        """,
        folder,
    )
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"1", b"2"], "puts survive, commits since the last checkpoint come again"


def test_a_queue_left_to_the_collector_warns(script: Any, folder: Path) -> None:
    told = script(
        """
        import gc, sys, warnings
        from kestrelpy import JournaledQueue
        warnings.simplefilter("always")
        caught = []
        warnings.showwarning = lambda message, category, *_: caught.append(category.__name__)
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put(b"x")
        del queue
        gc.collect()
        print(*caught)
        """,
        folder,
    )
    assert "ResourceWarning" in told.split()


UNCLOSED = {
    "queue = JournaledQueue(d, 'jobs')": "unclosed JournaledQueue 'jobs' in {}",
    "JournaledQueue(d, 'jobs').close(); reader = open_reader(d, 'jobs', '')": (
        "unclosed Reader '' of queue 'jobs' in {}"
    ),
    "JournaledQueue(d, 'jobs').close(); reader = open_reader(d, 'jobs', 'mail', create=True)": (
        "unclosed Reader 'mail' of queue 'jobs' in {}"
    ),
    "queue = WorkQueue(d, 'jobs')": "unclosed WorkQueue 'jobs' in {}",
    "queue = WorkQueue(None)": "",
    "queue = WorkQueue(None); session = queue.session()": "",
    "queue = WorkQueue(d, 'jobs'); session = queue.session(); queue.close()": "",
    "queue = WorkQueue(d, 'jobs'); session = queue.session(); session = None; queue.close()": (
        "unclosed Session of WorkQueue 'jobs' in {}"
    ),
    "queue = WorkQueue(d, 'jobs'); session = queue.session(); session.close(); session = None; queue.close()": "",
}


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("made", UNCLOSED)
def test_r31_a_warning_names_what_was_never_closed(made: str, collected: bool, script: Any, folder: Path) -> None:
    """At the end of the program, too; and says no word about a file that no user has opened."""
    said = script(
        f"""
        import gc, sys, warnings
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(message)
        from kestrelpy import JournaledQueue, open_reader
        from kestrelpy.work import WorkQueue
        d = sys.argv[1]
        {made}
        if {collected}:
            reader = queue = session = None
            gc.collect()
        """,
        folder,
    )
    assert said.strip() == UNCLOSED[made].format(folder)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tracemalloc of 3.11 knows no object with a __dict__")
def test_r31_a_warning_shows_where_it_was_opened(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, sys\n"
        "from kestrelpy import JournaledQueue, open_reader\n"
        "from kestrelpy.work import WorkQueue\n"
        "queue = JournaledQueue(sys.argv[1], 'jobs')  # here: the queue\n"
        "queue = None\n"
        "gc.collect()\n"
        "with WorkQueue(sys.argv[1], 'work') as work:\n"
        "    session = work.session()  # here: the session\n"
        "    session = None\n"
        "    gc.collect()\n"
        "reader = open_reader(sys.argv[1], 'jobs', 'mail', create=True)  # here: the reader\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "tracemalloc=8", "-W", "default", program, folder],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    for what in ("queue", "session", "reader"):
        assert f"# here: the {what}" in done.stderr.partition("Object allocated at")[2], done.stderr


def test_r31_a_warning_that_is_an_error_keeps_nothing_open(script: Any, folder: Path) -> None:
    said = script(
        """
        import sys, warnings
        from kestrelpy import JournaledQueue
        warnings.simplefilter("error", ResourceWarning)
        warnings.showwarning = lambda message, *_: print(message)
        queues = [JournaledQueue(sys.argv[1], name) for name in ("one", "two")]
        for queue in queues:
            queue.put(b"x")
        """,
        folder,
    )
    assert sorted(line.partition(":")[0] for line in said.splitlines()) == [
        "unclosed JournaledQueue 'one' in " + str(folder),
        "unclosed JournaledQueue 'two' in " + str(folder),
    ]
    for name in ("one", "two"):
        assert (folder / f"{name}.checkpoint").exists() or list(folder.glob(f"{name}*")), name
        with JournaledQueue(folder, name) as queue:
            assert queue.get_nowait().data == b"x"


def test_r31_a_child_of_multiprocessing_ends_well_where_warnings_are_errors(script: Any, folder: Path) -> None:
    """It leaves a queue open: that is a mistake, and no reason to fail with what it has done."""
    script(
        """
        import multiprocessing, sys, warnings
        from kestrelpy import JournaledQueue

        def work(folder):
            queue = JournaledQueue(folder, "jobs")
            queue.put(b"x")

        child = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],))
        child.start()
        child.join()
        assert child.exitcode == 0, child.exitcode
        """,
        folder,
    )
    with JournaledQueue(folder, "jobs") as queue:
        assert queue.get_nowait().data == b"x"
