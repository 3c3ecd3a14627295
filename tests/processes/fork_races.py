"""Forks at the wrong moment: the child is told, the parent is not disturbed, and no lock outlives its owner.

- ``run_held``: a fork while another thread holds each of the locks of docs/locking.md. The child is refused and hangs
  on none; the parent goes on; and when the parent is killed while the child lives, the next process gets in.
- ``run_forks``: forks at any moment of a busy process; its children end in every way there is.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from kestrelpy import ForkedQueue, JournaledQueue, QueueEmpty, QueueLocked, Reader, _process, clock, open_reader
from kestrelpy._disk import real as real_module
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._waiting import put_future as put_future_module
from kestrelpy.inbox import watcher
from tests.processes.programs import as_program, rounds

PATIENCE = 30
NAME = "jobs"


def child_of(work: Callable[[], object]) -> int:
    """A forked child that does ``work`` within ``PATIENCE`` seconds; its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(PATIENCE)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ends_well(pid: int) -> None:
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"a child ended with status {status}"


def refuses(call: Callable[[], Any], error: type[Exception]) -> None:
    """Assert that ``call`` raises ``error``, and let go of what it opened if it does not."""
    try:
        opened = call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was due, and {opened!r} came")


# -- locks that are held at a fork -----------------------------------------------------------------------------------


class Home:
    """A queue, a reader of it here and one as if elsewhere."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.queue = JournaledQueue(folder, NAME, sync="never")
        self.reader = self.queue.reader("a")
        self.outside = open_reader(folder, NAME, "b", create=True, start="earliest")

    def locks(self) -> dict[str, Any]:
        """Every lock there is, by what it is called in docs/locking.md."""
        queue, source = self.queue, cast("DetachedSource", self.outside._source)
        assert queue._inbox is not None
        return {
            "Q": queue._lock,
            "S": queue._held.syncing,
            "R": self.reader._backlog.lock,
            "C": self.reader._checkpointer.lock,
            "O": queue._registry._opening,
            "I": queue._inbox._lock,
            "T": queue._syncer.commit._lock,
            "listing": queue._registry._listing,
            "limiting": queue._registry._limiting,
            "G": queue._held.files.guard(),
            "L": source._looking,
            "R outside": self.outside._backlog.lock,
            "C outside": self.outside._checkpointer.lock,
            "timers": clock._timers._lock,
            "timers of syncs": clock._syncs._lock,
            "queues alive": _process._guard,
            "promises": put_future_module._making,
            "watches": watcher.InboxWatcher._guard,
            "folders": real_module._Descriptor.guard,
        }

    def use(self) -> None:
        """It works."""
        before = self.queue.stats().tail_id
        assert self.queue.put(b"x") == before + 1
        self.reader.get(timeout=PATIENCE).commit()
        self.outside.get(timeout=PATIENCE).commit()
        self.queue.checkpoint()
        self.queue._check()

    def check_foreign(self) -> None:
        """In a child: everything of the parent's is refused, and one's own works."""
        for call in (lambda: self.queue.put(b"y"), self.reader.get, self.outside.get_nowait, self.queue.checkpoint):
            refuses(call, ForkedQueue)
        refuses(lambda: JournaledQueue(self.folder, NAME), QueueLocked)
        refuses(lambda: open_reader(self.folder, NAME, "b", create=True), QueueLocked)
        with JournaledQueue(self.folder, f"own-{os.getpid()}") as own:
            own.put_future(b"child").add_done_callback(lambda _: None)
            assert own.get(timeout=PATIENCE).data == b"child"
            own.erase()

    def close(self) -> None:
        self.outside.close()
        self.queue.close()


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread holds it."""
    has, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(PATIENCE)
    try:
        yield
    finally:
        release.set()
        thread.join(PATIENCE)


def run_held() -> Counter[str]:
    """Each lock once, with the parent going on and with the parent killed."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(folder)
        names = list(home.locks())
        for name in names:
            with held(home.locks()[name]):
                child = child_of(home.check_foreign)
                if name != "G":  # an opening waits for that one: it goes on when it is free
                    ends_well(child)
            if name == "G":
                ends_well(child)
            home.use()
            counts["locks"] += 1
        home.close()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _leave_a_child(folder, name)
        counts["parents killed"] += 1
    return counts


def _leave_a_child(folder: str, name: str) -> None:
    """A process is killed while a thread of it holds a lock and its child lives; then somebody opens the queue."""
    hear, tell = os.pipe()

    def parent() -> None:
        home = Home(folder)
        home.queue.put(b"left")
        with held(home.locks()[name]):
            child_of(sleep)
            signal.pause()

    def sleep() -> None:
        signal.alarm(0)  # it must outlive the next owner's patience
        os.write(tell, os.getpid().to_bytes(4, "little"))
        signal.pause()

    owner = child_of(parent)
    os.close(tell)  # if no child is left to tell anything, the pipe ends
    told = os.read(hear, 4)
    assert told, "there was no child"
    sleeper = int.from_bytes(told, "little")
    try:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        ends_well(child_of(partial(_take_what_is_left, folder)))
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.close(hear)


def _take_what_is_left(folder: str) -> None:
    with JournaledQueue(folder, NAME) as queue:
        assert queue.reader("b").get(timeout=PATIENCE).data == b"left"


# -- forks at any moment ---------------------------------------------------------------------------------------------


class Busy:
    """A process whose threads use a queue all the time, and check that nothing disturbs it."""

    def __init__(self, folder: str) -> None:
        self.home = Home(folder)
        self.errors: list[BaseException] = []
        self.turns: Counter[str] = Counter()
        self._stop = threading.Event()
        works = (self._put, partial(self._get, self.home.reader), partial(self._get, self.home.outside), self._open)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            while not self._stop.is_set():
                work()
        except BaseException as error:
            self.errors.append(error)

    def _put(self) -> None:
        queue = self.home.queue
        number = queue.stats().tail_id + 1
        future = queue.put_future(b"%d" % number)
        future.add_done_callback(lambda _: None)
        assert future.result(PATIENCE) == number
        if number % 50 == 0:
            queue.sync()
            queue.drop_reader("c")
            queue.reader("c")
        if number % 20 == 0:
            time.sleep(0.001)

    def _get(self, reader: Reader) -> None:
        with contextlib.suppress(QueueEmpty):
            with reader.get(timeout=0.01) as item:
                assert item.data == b"%d" % item.id
                assert item.id == reader.head + 1
            if item.id % 30 == 0:
                reader.checkpoint()

    def _open(self) -> None:
        with JournaledQueue(self.home.folder, "other", sync="never") as other:
            other.put(b"x")
        self.turns["opened"] += 1

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads)
        for error in self.errors:
            raise error
        tail_id = self.home.queue.stats().tail_id
        self.home.close()
        with JournaledQueue(self.home.folder, NAME) as queue:
            assert queue.stats().tail_id == tail_id
            queue.reader("a").flush()


def run_forks(seed: int, *, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """So many children, one after the other."""
    choose = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        busy = Busy(folder)
        try:
            for _ in rounds(limit, seconds):
                time.sleep(choose.random() * 0.004)
                end = choose.choice(list(ENDS))
                child = child_of(partial(_be_a_child, busy.home, end))
                status = os.waitpid(child, 0)[1]
                assert status == (signal.SIGKILL if end == "killed" else 0), f"{end}: status {status}"
                counts["forks"] += 1
                counts[end] += 1
                assert not busy.errors, busy.errors
        finally:
            busy.close()
        counts["opened meanwhile"] = busy.turns["opened"]
    return counts


def _be_a_child(home: Home, end: str) -> None:
    home.check_foreign()
    ENDS[end](home)


def _drop(home: Home) -> None:
    del home.queue, home.reader, home.outside
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert not caught, [str(each.message) for each in caught]


ENDS: dict[str, Callable[[Home], object]] = {
    "at once": lambda home: None,
    "closes": Home.close,
    "at exit": lambda home: _process.close_all(),
    "collected": _drop,
    "killed": lambda home: os.kill(os.getpid(), signal.SIGKILL),
}


def main(
    what: str, seed: int, limit: int | None, seconds: float | None, plant: Callable[[], object] | None
) -> Counter[str]:
    """``held`` or ``forks``, as a program of its own."""
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # beside threads: the point
    if plant is not None:
        plant()
    return run_held() if what == "held" else run_forks(seed, limit=limit, seconds=seconds)


if __name__ == "__main__":
    as_program(main)
