"""Faults of relatives between threads and processes: locks, forks, ends without a goodbye, consumers side by side. Each
test fails where the fault is back, and a twin with the fault planted shows that it does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import CorruptJournal, JournaledQueue, QueueEmpty, QueueLocked, Reader, codecs
from kestrelpy._disk.real import RealDirectory
from kestrelpy._journal.view import JournalView
from kestrelpy._reading.progress import Progress
from kestrelpy.testing import MemoryDisk
from tests.regressions.relatives import change, history, in_folder, on_disk, segments, take, vanish
from tests.support.paths import PYTHONPATH

PRELUDE = ""
"""What a child process does first: where a fault is planted in it."""
PATIENCE = 20.0
"""Seconds after which something that must end is taken not to end."""


def child(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, the fault in it if there is one."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(source), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PATIENCE": str(PATIENCE)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@contextlib.contextmanager
def planted_in_children(prelude: str) -> Iterator[None]:
    module = sys.modules[__name__]
    with patch.object(module, "PRELUDE", textwrap.dedent(prelude)), patch.object(module, "PATIENCE", 1.0):
        yield


# -- ends without a goodbye ------------------------------------------------------------------------------------------


def kept_until_close() -> Any:
    """What is stored waits in a buffer for ``close()``."""
    return planted_in_children("""
        from kestrelpy._disk.real import RealFile
        class Held:
            def __setitem__(self, span, data):
                pass
        grow = RealFile.grow
        RealFile.grow = lambda self, size: (grow(self, size), Held())[1]
        """)


@history(kept_until_close)
def test_history_queuelib_5_empty_after_an_exit_without_close(tmp_path: Path) -> None:
    """queuelib #5: after a process had ended without ``close()``, its queue looked empty: the count of its items was
    written when it was closed, and what they were was in a buffer. Here: processes that end at once, in three ways.
    """
    for at, end in enumerate(("os._exit(0)", "os.kill(os.getpid(), 9)", "raise SystemExit")):
        folder = tmp_path / str(at)
        child(
            f"""
            import os, sys
            from kestrelpy import JournaledQueue
            queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
            for n in range(200):
                queue.put(b"%d" % n)
            print(queue.stats().tail_id)
            {end}
            """,
            folder,
        )
        with in_folder(folder) as queue:
            assert list(take(queue).values()) == [b"%d" % n for n in range(200)], end


# -- locks and forks -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locks_stolen_after_a_time() -> Iterator[None]:
    """A lock that is older than fifteen seconds is overridden."""
    real = RealDirectory.lock

    def lock(self: RealDirectory, name: str, *, wait: bool = False) -> Any:
        path = Path(self.path) / name
        if path.exists() and time.time() - path.stat().st_mtime > 15:
            path.unlink()
        return real(self, name, wait=wait)

    with patch.object(RealDirectory, "lock", lock):
        yield


@history(locks_stolen_after_a_time)
def test_history_chronicle_629_a_lock_is_taken_over_after_a_time(tmp_path: Path) -> None:
    """Chronicle Queue #629: whoever had waited fifteen seconds for the write lock overrode it; its owner was alive, two
    wrote into one file, and messages were overwritten. Here: a lock that has been held for four months, by all that
    its file says, is asked for from this process and from another.
    """
    queue = in_folder(tmp_path)
    old = time.time() - 10**7
    for path in tmp_path.glob("*.lock"):
        os.utime(path, (old, old))
    asked = child(
        """
        import sys
        from kestrelpy import JournaledQueue
        JournaledQueue(sys.argv[1], "jobs").close()
        """,
        tmp_path,
    )
    assert "QueueLocked" in asked.stderr
    with contextlib.suppress(QueueLocked):
        in_folder(tmp_path)
        raise AssertionError("the lock was taken over")
    assert queue.put(b"mine") == 1
    assert take(queue) == {1: b"mine"}
    queue.close()


def locks_left_as_they_are() -> Any:
    """A forked child keeps the locks as the fork found them."""
    return planted_in_children("""
        from kestrelpy import JournaledQueue
        JournaledQueue._abandon = lambda self: None
        """)


@history(locks_left_as_they_are)
def test_history_diskcache_300_a_fork_in_the_middle_of_a_transaction(tmp_path: Path) -> None:
    """diskcache #300: forked while another thread was in a transaction, the child had a lock that nobody would ever
    release, and waited for it. Here: a fork while another thread is inside a put that rotates, with the queue's lock
    held: every call of the child ends at once, and the parent goes on.
    """
    done = child(
        """
        import os, signal, sys, threading, warnings
        from kestrelpy import ForkedQueue, JournaledQueue
        from kestrelpy._disk.real import RealFile
        warnings.simplefilter("ignore", DeprecationWarning)
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never", segment_bytes=4096)
        reader = queue.reader()
        inside, gate = threading.Event(), threading.Event()
        sync = RealFile.sync
        def held(self):
            inside.set()
            assert gate.wait(60)
            sync(self)
        queue.put(bytes(3000))
        RealFile.sync = held
        worker = threading.Thread(target=queue.put, args=(bytes(3000),))
        worker.start()
        assert inside.wait(60)
        forked = os.fork()
        if not forked:
            signal.setitimer(signal.ITIMER_REAL, float(os.environ["PATIENCE"]))
            refused = 0
            for call in (lambda: queue.put(b"y"), reader.get, queue.checkpoint, queue.sync):
                try:
                    call()
                except ForkedQueue:
                    refused += 1
            os._exit(refused)
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        RealFile.sync = sync
        gate.set()
        worker.join()
        assert queue.put(b"z") == 3
        queue.close()
        print(status)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4", "the child was not told at once"


# -- consumers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def looks_again_for_ever() -> Iterator[None]:
    """What cannot be had is looked for again, at once."""
    real, stop = Reader.peek, threading.Event()

    def peek(self: Reader, *arguments: Any, **options: Any) -> Any:
        while not stop.is_set():
            with contextlib.suppress(CorruptJournal):
                return real(self, *arguments, **options)
            stop.wait(0.001)
        raise QueueEmpty

    with patch.object(Reader, "peek", peek), patch.object(sys.modules[__name__], "PATIENCE", 0.2):
        try:
            yield
        finally:
            stop.set()


def ends(work: Any) -> str:
    """How a call ends: what it raised, or ``"good"``. It must end."""
    told: list[str] = []

    def run() -> None:
        try:
            work()
            told.append("good")
        except (CorruptJournal, QueueEmpty, OSError) as error:
            told.append(type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert told, "it does not end"
    return told[0]


@history(looks_again_for_ever)
def test_history_diskcache_287_a_peek_that_does_not_end(tmp_path: Path) -> None:
    """diskcache #287: ``peekleft`` looked again and again for a large value whose file was gone, and never returned.
    Here: peeks at a large item, at one that is damaged, at one whose segment is gone, and at nothing: each ends.
    """
    disk = MemoryDisk()
    with on_disk(disk, segment_bytes=4096) as queue:
        reader = queue.reader()
        assert ends(lambda: reader.peek(0)) == "QueueEmpty"
    with on_disk(disk) as queue:
        queue.put(b"large" * 100_000)
        assert ends(queue.reader().peek) == "good"
    (name,) = segments(disk)
    change(disk, name, lambda data: data.__setitem__(300_000, data[300_000] ^ 1))
    for mode, expected in (("raise", "CorruptJournal"), ("quarantine", "QueueEmpty")):
        queue = on_disk(disk, on_corruption=mode)
        reader = queue.reader()
        for _ in range(2):
            assert ends(partial(reader.peek, 0)) == expected
        vanish(queue, disk)
    queue = on_disk(disk)
    disk.directory("/q").unlink(name)
    assert ends(lambda: queue.reader().peek(0)) == "FileNotFoundError"
    vanish(queue, disk)


def stops_at_the_bad_one() -> Any:
    """A bad record stays at the head, in quarantine mode too."""

    def read_around(_self: object, _file: object, _segment: object, damage: CorruptJournal, *_: object) -> None:
        raise damage

    return patch.object(JournalView, "_read_around", read_around)


@history(stops_at_the_bad_one, raises=(CorruptJournal,))
def test_history_persist_queue_142_a_bad_item_that_nobody_gets_past(tmp_path: Path) -> None:
    """persist-queue #142: one item that could not be unpickled was at the head, and every ``get`` raised; the 233
    behind it could not be had. Here: a bad record among others, which quarantine passes over, and an item that is
    whole but means nothing to the codec, which is delivered all the same and can be committed away.
    """
    disk = MemoryDisk()
    with on_disk(disk) as queue:
        queue.reader()
        for n in range(20):
            queue.put(b"item %02d" % n)
    (name,) = segments(disk)

    def spoil(data: bytearray) -> None:
        data[data.index(b"item 00")] ^= 1

    change(disk, name, spoil)
    queue = on_disk(disk, on_corruption="quarantine")
    assert list(take(queue)) == list(range(2, 21))
    assert queue.stats().quarantined == 1
    vanish(queue, disk)
    disk = MemoryDisk()
    with on_disk(disk) as queue:
        queue.reader()
        queue.put(b"{ no JSON")
        queue.put(b"[1, 2]")
    with on_disk(disk, codec=codecs.JSON) as queue:
        bad, good = queue.get_many(2)
        with contextlib.suppress(ValueError):
            bad.value  # noqa: B018 - decoding is what is tested
            raise AssertionError("that is no JSON")
        assert good.value == [1, 2]
        queue.commit_many([bad, good])
        assert queue.reader().items == 0


@contextlib.contextmanager
def done_means_all_up_to_there() -> Iterator[None]:
    """What is saved is the highest id that is done, as if all before it were."""
    real = Progress.checkpoint

    def checkpoint(self: Progress, *arguments: Any) -> Any:
        state = real(self, *arguments)
        return state._replace(head=state.done[-1][1], done=()) if state.done else state

    with patch.object(Progress, "checkpoint", checkpoint):
        yield


@history(done_means_all_up_to_there)
def test_history_persist_queue_89_one_workers_done_is_anothers_failure(tmp_path: Path) -> None:
    """persist-queue #89: ``task_done`` saved how far all workers had read. One worker failed, another one was done, and
    after a restart the item of the first was gone. Here: two threads, one of which never commits; a close, and a kill.
    """
    for end in (JournaledQueue.close, vanish):
        folder = tmp_path / end.__name__
        queue: JournaledQueue = in_folder(folder)
        queue.put_many([b"fails", b"works", b"waits"])
        taken = threading.Barrier(2)

        def fail(queue: JournaledQueue = queue, taken: threading.Barrier = taken) -> None:
            assert queue.get_nowait().data == b"fails"
            taken.wait(PATIENCE)

        def work(queue: JournaledQueue = queue, taken: threading.Barrier = taken) -> None:
            taken.wait(PATIENCE)
            queue.get_nowait().commit()
            queue.checkpoint()

        threads = [threading.Thread(target=fail), threading.Thread(target=work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end(queue)
        with in_folder(folder) as queue:
            assert list(take(queue).values()) == [b"fails", b"waits"], end.__name__
