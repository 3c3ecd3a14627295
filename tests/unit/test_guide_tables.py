"""The guide's tables "From queue.Queue" and "From multiprocessing.Queue": each row is a program that does the same on
both, and compares what came out. A row without a program, or a program without a row, fails.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    ConcurrentBlockingQueue,
    JournaledQueue,
    QueueClosed,
    ReaderConfig,
    inbox,
    inspect,
    open_reader,
)
from kestrelpy.codecs import JSON
from kestrelpy.work import WorkQueue
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE

GUIDE = ROOT / "docs" / "guide.md"
SHUT = getattr(queue, "ShutDown", QueueClosed)
"""What ``queue.Queue`` raises after its shutdown, from Python 3.13 on."""


def rows(text: str, heading: str) -> list[str]:
    """The first cells of the table under a heading."""
    section = re.split(r"^#+ ", text.partition(heading + "\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines[1:]]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error of the standard library that it raises."""
    try:
        return call()
    except queue.Empty:
        return "Empty"
    except queue.Full:
        return "Full"
    except SHUT:
        return "ShutDown"
    except ValueError:
        return "ValueError"


# -- queue.Queue: a row is a program for any queue with its interface, and one for a JournaledQueue ------------------


class Plain:
    """A ``JournaledQueue`` used as the third column says, so that a program for ``queue.Queue`` drives it."""

    def __init__(self, folder: Path, maxsize: int = 0) -> None:
        limits = ReaderConfig(max_items=maxsize, full_policy="block") if maxsize else ReaderConfig()
        self.queue = JournaledQueue(folder, "plain", default_reader=limits)

    def put(self, data: bytes, timeout: float | None = None) -> None:
        assert self.queue.put(data, timeout=timeout) == self.queue.stats().tail_id

    def put_nowait(self, data: bytes) -> None:
        assert self.queue.put_nowait(data) == self.queue.stats().tail_id

    def get(self, timeout: float | None = None) -> bytes:
        return self._done(self.queue.get(timeout=timeout))

    def get_nowait(self) -> bytes:
        return self._done(self.queue.get_nowait())

    def _done(self, item: Any) -> bytes:
        data: bytes = item.data
        item.commit()
        return data

    def qsize(self) -> int:
        assert len(self.queue) == self.queue.qsize()
        return self.queue.qsize()

    def empty(self) -> bool:
        return self.queue.empty()

    def full(self) -> bool:
        return self.queue.full()

    def shutdown(self, immediate: bool = False) -> None:
        self.queue.close()

    def close(self) -> None:
        self.queue.close()


def in_order(made: Any) -> list[Any]:
    for data in (b"1", b"2", b"3"):
        made.put(data)
    return [made.get() for _ in range(3)]


def limited(made: Any) -> list[Any]:
    """A put that finds no room waits for it; one that need not wait says so."""
    made.put(b"1")
    made.put(b"2")
    found = [outcome(lambda: made.put_nowait(b"3")), outcome(lambda: made.put(b"3", timeout=0.01))]
    thread = threading.Thread(target=made.put, args=(b"4",))
    thread.start()
    found.append(made.get(timeout=PATIENCE))
    thread.join(PATIENCE)
    return [*found, thread.is_alive(), made.get(timeout=PATIENCE), made.get(timeout=PATIENCE)]


def waiting_put(made: Any) -> list[Any]:
    return [outcome(lambda: made.put(b"1", timeout=1)), outcome(lambda: made.put(b"2", timeout=-1)), made.get()]


def waiting_get(made: Any) -> list[Any]:
    """A get waits for a put in another thread, and not longer than it was told."""
    found = [outcome(lambda: made.get(timeout=0.01)), outcome(lambda: made.get(timeout=-1))]
    thread = threading.Timer(0.01, made.put, (b"late",))
    thread.start()
    found.append(made.get(timeout=PATIENCE))
    thread.join(PATIENCE)
    return found


def counted(made: Any) -> list[Any]:
    sizes = [(made.qsize(), made.empty())]
    for step in (lambda: made.put(b"1"), lambda: made.put(b"2"), made.get, made.get):
        step()
        sizes.append((made.qsize(), made.empty()))
    return sizes


def filled(made: Any) -> list[Any]:
    found = [made.full()]
    for step in (lambda: made.put(b"1"), lambda: made.put(b"2"), made.get):
        step()
        found.append(made.full())
    return found


def shut(made: Any) -> list[Any]:
    made.put(b"left")
    made.shutdown()
    return [outcome(lambda: made.put(b"late")), outcome(made.get_nowait), outcome(made.get_nowait)]


def shut_at_once(made: Any) -> list[Any]:
    made.put(b"left")
    made.shutdown(immediate=True)
    return [outcome(lambda: made.put(b"late")), outcome(made.get_nowait)]


SAME: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "`Queue()`": (0, in_order),
    "`Queue(maxsize=2)`": (2, limited),
    "`put(item)`": (0, in_order),
    "`put(item, timeout=1)`": (2, waiting_put),
    "`put_nowait(item)`": (2, lambda made: [outcome(lambda: made.put_nowait(b"x")) for _ in range(3)]),
    "`get()`": (0, in_order),
    "`get(timeout=1)`": (0, waiting_get),
    "`get_nowait()`": (0, lambda made: [outcome(made.get_nowait), made.put(b"x"), made.get_nowait()]),
    "`qsize()`": (0, counted),
    "`empty()`": (0, counted),
    "`full()`": (2, filled),
}
"""By row: a limit, and a program of which all four queues make the same."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


def queues(folder: Path, maxsize: int) -> Iterator[Any]:
    """The queues of the columns: in memory, the face, and the journaled queue itself."""
    yield ConcurrentBlockingQueue(maxsize)
    config = ReaderConfig(max_items=maxsize) if maxsize else ReaderConfig()
    yield JournaledQueue(folder, "face", default_reader=config).as_blocking_queue()
    yield Plain(folder, maxsize)


@pytest.mark.parametrize("row", SAME)
def test_a_row_is_the_same_everywhere(row: str, folder: Path) -> None:
    maxsize, program = SAME[row]
    theirs = program(queue.Queue(maxsize))
    for made in queues(folder, maxsize):
        try:
            assert program(made) == theirs, type(made).__name__
        finally:
            made.close()


@pytest.mark.parametrize("policy", ["refuse", "block", "drop_oldest"])
def test_which_policies_a_put_of_the_face_waits_with(policy: str, folder: Path) -> None:
    config = ReaderConfig(max_items=2, full_policy=policy)
    with JournaledQueue(folder, "face", default_reader=config).as_blocking_queue() as face:
        if policy != "drop_oldest":
            assert limited(face) == limited(queue.Queue(2))
            return
        for data in (b"1", b"2", b"3"):
            face.put(data)
        assert [face.get(), face.get()] == [b"2", b"3"]


def test_block_is_no_parameter_of_a_journaled_put(folder: Path) -> None:
    memory, face, plain = queues(folder, 2)
    theirs: queue.Queue[bytes] = queue.Queue(2)
    for made in (theirs, memory, face):
        made.put(b"x", True, 5)
        made.put(b"x", False)
    for arguments in ((True, 5), (False,)):
        with pytest.raises(TypeError):
            plain.queue.put(b"x", *arguments)
    face.close()
    plain.close()


def joined(made: Any, get: Callable[[], Any], done: Callable[[Any], object]) -> list[Any]:
    """A join returns when a worker in another thread has done everything."""
    worked: list[Any] = []

    def work() -> None:
        for _ in range(3):
            got = get()
            worked.append(getattr(got, "data", got))
            done(got)

    worker = threading.Thread(target=work)
    for number in range(3):
        made.put(b"%d" % number)
    worker.start()
    made.join()
    found = list(worked)
    worker.join()
    return found


def joined_row(folder: Path) -> None:
    theirs: queue.Queue[bytes] = queue.Queue()
    memory, face, plain = queues(folder, 0)
    assert joined(theirs, theirs.get, lambda _: theirs.task_done()) == [b"0", b"1", b"2"]
    assert joined(face, face.get, lambda _: face.task_done()) == [b"0", b"1", b"2"]
    assert joined(plain.queue, plain.queue.get, lambda item: item.commit()) == [b"0", b"1", b"2"]
    plain.queue.put(b"open")
    item = plain.queue.get()
    assert not plain.queue.join(timeout=0.01)
    item.commit()
    assert plain.queue.join(timeout=PATIENCE)
    for made in (theirs, face):
        with pytest.raises(ValueError, match="task_done"):
            made.task_done()
    assert not hasattr(memory, "join")
    face.close()
    plain.close()


def shutdown_row(folder: Path) -> None:
    """A shutdown of memory and face leaves what is there to be got; a closed queue gives it when it is opened again."""
    memory, face, plain = queues(folder, 0)
    drained = ["ShutDown", b"left", "ShutDown"]
    if hasattr(queue, "ShutDown"):
        assert shut(queue.Queue()) == drained
    assert shut(memory) == shut(face) == drained
    assert shut(plain) == ["ShutDown", "ShutDown", "ShutDown"]
    face.close()
    with JournaledQueue(folder, "plain") as again:
        assert again.get_nowait().data == b"left"


def immediate_row(folder: Path) -> None:
    memory, face, plain = queues(folder, 0)
    if hasattr(queue, "ShutDown"):
        assert shut_at_once(queue.Queue()) == ["ShutDown", "ShutDown"]
    assert shut_at_once(memory) == shut_at_once(face) == shut_at_once(plain) == ["ShutDown", "ShutDown"]
    for name in ("face", "plain"):  # nothing was dropped
        with JournaledQueue(folder, name) as again:
            assert again.get_nowait().data == b"left"


def lifo_row(folder: Path) -> None:
    theirs: queue.LifoQueue[int] = queue.LifoQueue()
    ours: ConcurrentBlockingQueue[int] = ConcurrentBlockingQueue()
    for number in range(3):
        theirs.put(number)
        ours.put_head(number)
    assert [theirs.get() for _ in range(3)] == [ours.get() for _ in range(3)] == [2, 1, 0]
    face = JournaledQueue(folder, "face").as_blocking_queue()
    with pytest.raises(NotImplementedError):
        face.put_head(b"x")
    face.close()


def priority_row(folder: Path) -> None:
    theirs: queue.PriorityQueue[tuple[int, bytes]] = queue.PriorityQueue()
    with WorkQueue(folder) as work, work.session() as session:
        for priority, body in ((5, b"a"), (1, b"b"), (5, b"c"), (3, b"d")):
            theirs.put((priority, body))
            work.put(body, priority=priority)
        ours = []
        for _ in range(4):
            with session.reserve(timeout=0) as job:
                ours.append(job.body)
    assert ours == [theirs.get()[1] for _ in range(4)] == [b"b", b"d", b"a", b"c"]


def ends_of_a_killed_run(folder: str) -> None:
    """Two workers take their sentinels, and the process is killed before a position is saved."""
    for name, end in (("plain", JSON.encode(None)), ("named", JSON.encode({"end": "first"}))):
        face = JournaledQueue(folder, name, checkpoint_interval=3600).as_blocking_queue()
        for _ in range(2):
            face.put(end)
        assert [face.get(timeout=PATIENCE) for _ in range(2)] == [end, end]
    os.kill(os.getpid(), signal.SIGKILL)


def done_until(end: Any, face: Any) -> list[Any]:
    """What a worker does until it finds its sentinel. It passes over those that name another run."""
    done = []
    while (job := face.get(timeout=PATIENCE)) != end:
        if "end" not in job:
            done.append(job["name"])
    return done


def sentinel_row(folder: Path) -> None:
    theirs: queue.Queue[Any] = queue.Queue()
    memory: ConcurrentBlockingQueue[Any] = ConcurrentBlockingQueue()
    for made in (theirs, memory):
        made.put({"name": "job"})
        made.put(None)
        assert done_until(None, made) == ["job"]
    child = SPAWN.Process(target=ends_of_a_killed_run, args=(str(folder),))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == -signal.SIGKILL
    for name, end, done in (("plain", None, []), ("named", {"end": "second"}, ["job"])):
        with JournaledQueue(folder, name, codec=JSON).as_blocking_queue() as face:
            face.put({"name": "job"})
            face.put(end)
            assert done_until(end, face) == done, "the old sentinels came again"


def ended_by_close(folder: Path) -> None:
    """Without a sentinel: the workers of a queue end at its close, those of a face at its shutdown."""
    done: list[bytes] = []

    def work(pool: JournaledQueue[bytes]) -> None:
        for item in pool:
            with item:
                done.append(item.data)

    with JournaledQueue(folder, "jobs") as pool:
        workers = [threading.Thread(target=work, args=(pool,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        pool.put_many([b"1", b"2"])
        assert pool.join(timeout=PATIENCE)
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    assert sorted(done) == [b"1", b"2"]
    with JournaledQueue(folder, "jobs").as_blocking_queue() as face:
        face.put(b"left")
        face.shutdown()
        assert face.get() == b"left"
        assert outcome(face.get) == "ShutDown"


def endings_row(folder: Path) -> None:
    sentinel_row(folder)
    ended_by_close(folder)


DIFFERENT = {
    "`task_done()`": joined_row,
    "`join()`": joined_row,
    "`shutdown()`": shutdown_row,
    "`shutdown(immediate=True)`": immediate_row,
    "`put(None)` for each worker, to end it": endings_row,
    "`LifoQueue`": lifo_row,
    "`PriorityQueue`": priority_row,
}
"""By row: a program that compares what is the same, and asserts what the last column says."""


@pytest.mark.parametrize("row", DIFFERENT)
def test_a_row_differs_as_it_says(row: str, folder: Path) -> None:
    DIFFERENT[row](folder)


# -- multiprocessing.Queue -------------------------------------------------------------------------------------------

SPAWN = multiprocessing.get_context("spawn")


def in_a_child(target: Callable[..., None], *args: Any) -> None:
    """Run it in a process of its own."""
    child = SPAWN.Process(target=target, args=args)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0


def put_theirs(made: Any) -> None:
    made.put(b"from a child")


def put_ours(folder: str) -> None:
    inbox.put_many(folder, "jobs", [b"from a child"])


def take_theirs(made: Any, results: Any) -> None:
    results.put(made.get())


def take_ours(folder: str, results: Any) -> None:
    reader = open_reader(folder, "jobs", "child", create=True)
    with reader.get(timeout=PATIENCE) as item:
        results.put(item.data)
    reader.close()


def theirs_ended(made: Any) -> None:
    made.close()
    made.join_thread()


def passing_row(folder: Path) -> None:
    """The child has the two strings, and sees what the parent has put."""
    theirs, results = SPAWN.Queue(), SPAWN.Queue()
    theirs.put(b"x")
    in_a_child(take_theirs, theirs, results)
    with JournaledQueue(folder, "jobs") as ours:
        ours.put(b"x")
        in_a_child(take_ours, str(folder), results)
    assert results.get(timeout=PATIENCE) == results.get(timeout=PATIENCE) == b"x"
    theirs_ended(theirs)
    theirs_ended(results)


def owner_row(folder: Path) -> None:
    theirs = SPAWN.Queue()
    with JournaledQueue(folder, "jobs") as ours:
        for data in (b"1", b"2"):
            theirs.put(data)
            ours.put(data)
        assert [theirs.get(timeout=PATIENCE) for _ in range(2)] == [item.data for item in ours.get_many(2)]
        assert inspect(folder, "jobs").put_items == 2  # at once: there is no thread that feeds it
    theirs_ended(theirs)


def others_row(folder: Path) -> None:
    theirs = SPAWN.Queue()
    in_a_child(put_theirs, theirs)
    JournaledQueue(folder, "jobs").close()
    in_a_child(put_ours, str(folder))  # nobody has the queue open
    with JournaledQueue(folder, "jobs") as ours:
        assert ours.get(timeout=PATIENCE).data == theirs.get(timeout=PATIENCE) == b"from a child"
    theirs_ended(theirs)


def last_word_row(folder: Path) -> None:
    """A put of the owner overtakes what is published; after ``take_in`` it does not, and neither does the inbox."""
    with JournaledQueue(folder, "jobs", inbox_interval=None) as ours:
        in_a_child(put_ours, str(folder))
        assert (ours.take_in(), ours.put(b"")) == (1, 2)
        assert [item.data for item in ours.get_many(2)] == [b"from a child", b""]
        in_a_child(put_ours, str(folder))
        inbox.put_many(folder, "jobs", [b""])
        assert (inbox.pending(folder, "jobs"), ours.take_in()) == (2, 2)
        assert [item.data for item in ours.get_many(2)] == [b"from a child", b""]


def take_the_end(folder: str, taken: Any, killed: bool) -> None:
    reader = open_reader(folder, "jobs", "worker")
    with reader.get(timeout=PATIENCE) as item:
        taken.send(item.data)
        if killed:  # its commit is not saved
            os.kill(os.getpid(), signal.SIGKILL)
    reader.close()


def child_ends_row(folder: Path) -> None:
    """A worker that is killed after its sentinel: the next worker of a ``multiprocessing.Queue`` finds the next item,
    and that of a reader the old sentinel, which says by its name that it is for another run.
    """
    here, there = SPAWN.Pipe(duplex=False)
    with JournaledQueue(folder, "jobs") as ours:
        ours.reader("worker").close()
        for run, killed in ((b"first", True), (b"second", False)):
            ours.put(b"end of " + run)
            child = SPAWN.Process(target=take_the_end, args=(str(folder), there, killed))
            child.start()
            assert here.poll(PATIENCE), "the worker has failed"
            assert here.recv() == b"end of first"
            child.join(PATIENCE)
            assert child.exitcode == (-signal.SIGKILL if killed else 0)
    here.close()
    there.close()


def reader_row(folder: Path) -> None:
    with JournaledQueue(folder, "jobs") as ours:
        ours.reader("child").close()
        ours.put(b"x")
        reader = open_reader(folder, "jobs", "child", create=True)
        assert reader.get(timeout=PATIENCE).data == b"x"
        reader.close()  # it did not commit
        reader = open_reader(folder, "jobs", "child", create=True)
        assert reader.get(timeout=PATIENCE).data == b"x"
        reader.close()


def sharing_row(folder: Path) -> None:
    """Two clients of a server share the jobs, as two processes share those of a ``multiprocessing.Queue``."""
    import greenstalk

    from kestrelpy.server import serve_in_thread

    with (
        serve_in_thread(str(folder), listen="127.0.0.1:0") as server,
        greenstalk.Client(server.addresses[0]) as one,
        greenstalk.Client(server.addresses[0]) as two,
    ):
        for number in range(2):
            one.put(str(number))
        taken = [client.reserve(timeout=int(PATIENCE)) for client in (one, two)]
        assert sorted(job.body for job in taken) == ["0", "1"]


def empty_row(folder: Path) -> None:
    theirs = SPAWN.Queue()
    with JournaledQueue(folder, "jobs") as ours:
        reader = ours.reader("r")
        for each in (theirs, reader):
            assert outcome(each.get_nowait) == "Empty"
            assert outcome(partial(each.get, timeout=0.01)) == "Empty"
    theirs_ended(theirs)


def size_row(folder: Path) -> None:
    theirs = SPAWN.Queue()
    with JournaledQueue(folder, "jobs") as ours:
        reader = ours.reader("r")
        assert theirs.empty() == reader.empty()
        theirs.put(b"x")
        ours.put(b"x")
        with suppress(NotImplementedError):  # macOS
            assert theirs.qsize() == reader.qsize() == 1
        reader.checkpoint()
        assert [each.items for each in inspect(folder, "jobs").readers] == [1]
        theirs.get(timeout=PATIENCE)
    theirs_ended(theirs)


def limit_row(folder: Path) -> None:
    theirs = SPAWN.Queue(maxsize=2)
    with JournaledQueue(folder, "jobs", default_reader=ReaderConfig(max_items=2)) as ours:
        found = [
            (outcome(lambda: theirs.put_nowait(b"x")), type(outcome(lambda: ours.put(b"x", timeout=0))))
            for _ in range(3)
        ]
        assert found == [(None, int), (None, int), ("Full", str)]
        assert theirs.full()
        assert outcome(lambda: ours.put(b"x", timeout=0)) == "Full"
        for _ in range(2):
            theirs.get(timeout=PATIENCE)
    theirs_ended(theirs)


def done_row(folder: Path) -> None:
    theirs = SPAWN.JoinableQueue()
    with JournaledQueue(folder, "jobs") as ours:
        theirs.put(b"x")
        ours.put(b"x")
        theirs.get(timeout=PATIENCE)
        item = ours.get(timeout=PATIENCE)
        assert not ours.reader().join(timeout=0)
        theirs.task_done()
        item.commit()
        theirs.join()
        assert ours.reader().join(timeout=PATIENCE)
    theirs_ended(theirs)


def close_row(folder: Path) -> None:
    theirs = SPAWN.Queue()
    ours = JournaledQueue(folder, "jobs")
    theirs_ended(theirs)
    ours.close()
    assert outcome(lambda: theirs.put(b"x")) == "ValueError"
    assert outcome(lambda: ours.put(b"x")) == "ShutDown"


def feeder_row(folder: Path) -> None:
    """A put of ours is there although nothing was closed or joined: the journal's file has it."""
    with JournaledQueue(folder, "jobs", sync="never") as ours:
        ours.put(b"needle")
        assert b"needle" in b"".join(path.read_bytes() for path in folder.glob("jobs.*.segment"))


def killed_owner(folder: str, ready: Any) -> None:
    ours = JournaledQueue(folder, "jobs")
    ours.put(b"x")
    ours.get()
    ready.set()
    threading.Event().wait()


def killed_row(folder: Path) -> None:
    ready = SPAWN.Event()
    child = SPAWN.Process(target=killed_owner, args=(str(folder), ready))
    child.start()
    assert ready.wait(PATIENCE)
    child.kill()
    child.join(PATIENCE)
    with JournaledQueue(folder, "jobs") as ours:  # its lock has ended with it
        assert ours.get(timeout=0).data == b"x"


FROM_PROCESSES = {
    "`Queue()`, passed to a child": passing_row,
    "`put(obj)` in the process that owns it": owner_row,
    "`put(obj)` in other processes": others_row,
    "`put(None)` when all producers have ended": last_word_row,
    "`put(None)` for each worker, to end it": child_ends_row,
    "`get()` in one other process": reader_row,
    "`get()` in several processes that share the work": sharing_row,
    "`get(timeout=1)`, `get_nowait()`": empty_row,
    "`qsize()`, `empty()`": size_row,
    "`Queue(maxsize=2)`, `full()`, `put_nowait(obj)`": limit_row,
    "`JoinableQueue.task_done()`": done_row,
    "`JoinableQueue.join()`": done_row,
    "`close()`": close_row,
    "`join_thread()`, `cancel_join_thread()`": feeder_row,
    "a process is killed in `put` or `get`": killed_row,
}


@pytest.mark.parametrize("row", FROM_PROCESSES)
def test_a_row_of_processes(row: str, folder: Path) -> None:
    FROM_PROCESSES[row](folder)


def test_each_row_has_its_program() -> None:
    text = GUIDE.read_text("utf-8")
    assert rows(text, "### From `queue.Queue`") == [*SAME, *DIFFERENT]
    assert rows(text, "### From `multiprocessing.Queue`") == [*FROM_PROCESSES]


def test_rows_are_found() -> None:
    page = "# A\n### T\n| x | y |\n|---|---|\n| `a` | b |\n| `c` | d |\n\n## Next\n| e | f |\n"
    assert rows(page, "### T") == ["`a`", "`c`"]
