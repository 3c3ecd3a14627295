"""The methods of ``queue.Queue`` on what a journaled queue offers, side by side with ``queue.Queue`` itself."""

from __future__ import annotations

import queue as standard
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from kestrelpy import Item, JournaledQueue, QueueClosed, Reader, ReaderConfig, open_reader
from kestrelpy._reading.local_source import LocalSource
from kestrelpy.blocking import JournaledBlockingQueue
from tests.support.patience import PATIENCE, until


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the class of ``queue`` of what it raises."""
    try:
        return call()
    except standard.Empty:
        return standard.Empty
    except standard.Full:
        return standard.Full
    except ValueError:
        return ValueError


def is_joined(queue: Any) -> bool:
    """Whether ``join`` would return at once: ``queue.Queue`` has no timeout for it."""
    if isinstance(queue, standard.Queue):
        return queue.unfinished_tasks == 0
    joined: bool = queue.join(0)
    return joined


CALLS: dict[str, Callable[[Any], object]] = {
    "put": lambda queue: queue.put(b"x", timeout=0.0),
    "put_nowait": lambda queue: queue.put_nowait(b"y"),
    "get": lambda queue: queue.get(timeout=0.0),
    "get_nowait": lambda queue: queue.get_nowait(),
    "task_done": lambda queue: queue.task_done(),
    "qsize": lambda queue: queue.qsize(),
    "empty": lambda queue: queue.empty(),
    "full": lambda queue: queue.full(),
    "maxsize": lambda queue: queue.maxsize,
    "joined": is_joined,
}


def compare(folder: Path, seed: int) -> None:
    """The same calls on both; a ``task_done`` before its get is left out: there ours is stricter."""
    rng = random.Random(seed)
    limit = rng.choice((0, 3))
    theirs: standard.Queue[bytes] = standard.Queue(limit)
    config = ReaderConfig(max_items=limit or None)
    with JournaledQueue(folder, "jobs", default_reader=config) as opened:
        ours, taken = opened.as_blocking_queue(), 0
        for step in range(60):
            name = rng.choice(list(CALLS))
            if name == "task_done" and not taken and theirs.unfinished_tasks:
                continue
            expected, found = outcome(partial(CALLS[name], theirs)), outcome(partial(CALLS[name], ours))
            assert found == expected, f"seed {seed}, step {step}: {name}"
            taken += (name.startswith("get") and isinstance(found, bytes)) - (name == "task_done" and found is None)


@pytest.mark.parametrize("seed", range(20))
def test_the_calls_answer_as_those_of_the_standard_queue(tmp_path: Path, seed: int) -> None:
    compare(tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("task_done", lambda self: None),
        ("join", lambda self, timeout: True),
        ("full", lambda self: False),
        ("qsize", lambda self: self._reader.items + self._taken),
    ],
)
def test_a_method_that_answers_otherwise_is_found(tmp_path: Path, name: str, wrong: Callable[..., Any]) -> None:
    def all_seeds() -> None:
        for seed in range(20):
            folder = tmp_path / str(seed)
            folder.mkdir()
            compare(folder, seed)

    with patch.object(JournaledBlockingQueue, name, wrong), pytest.raises(AssertionError, match="seed"):
        all_seeds()


def test_more_task_dones_than_gets_are_refused(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as opened:
        queue = opened.as_blocking_queue()
        queue.put(b"a")
        with pytest.raises(ValueError, match="more often than items were got"):
            queue.task_done()
        queue.get()
        queue.task_done()
        assert queue.join(0)


def test_the_end_of_a_block_closes_the_queue(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs").as_blocking_queue() as face:
        face.put(b"x")
    with pytest.raises(QueueClosed):
        face.put(b"y")
    with JournaledQueue(tmp_path, "jobs").as_blocking_queue() as face:
        assert face.get() == b"x"


def test_put_nowait_of_a_queue_does_not_wait(tmp_path: Path) -> None:
    config = ReaderConfig(max_items=1, full_policy="block")
    with JournaledQueue(tmp_path, "jobs", default_reader=config) as opened:
        assert opened.put_nowait(b"a") == 1
        with pytest.raises(standard.Full):
            opened.put_nowait(b"b")


def joins(source: Any) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []

    def run() -> None:
        try:
            said.append(source.join())
        except QueueClosed as error:
            said.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_join_waits_until_all_work_is_done(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as opened:
        queue = opened.as_blocking_queue()
        for number in range(3):
            queue.put(b"%d" % number)
        thread, said = joins(queue)
        for _ in range(3):
            queue.get()
        assert not queue.join(0.05)
        for _ in range(3):
            assert not said
            queue.task_done()
        thread.join(PATIENCE)
        assert said == [True]


def test_join_waits_for_what_a_get_is_about_to_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each moment of the get: none may find that no item is left, and that none was taken."""
    with JournaledQueue(tmp_path, "jobs") as opened:
        queue, found, commit = opened.as_blocking_queue(), list[bool](), Item.commit

        def commit_and_look(item: Item[bytes]) -> None:
            found.append(queue.join(0))
            commit(item)
            found.append(queue.join(0))

        monkeypatch.setattr(Item, "commit", commit_and_look)
        queue.put(b"1")
        queue.get()
        monkeypatch.undo()
        queue.task_done()
        queue.put(b"2")

        def get_and_count(reader: Any) -> int:
            monkeypatch.undo()
            queue.get()
            return len(reader)

        monkeypatch.setattr(Reader, "items", property(get_and_count))
        assert [*found, queue.join(0)] == [False] * 3
        queue.task_done()
        assert queue.join(0)


def test_join_waits_for_what_a_worker_puts_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker puts the next item and commits its own while ``join`` looks: there is an item at each moment."""
    with JournaledQueue(tmp_path, "jobs") as opened:
        opened.put(b"a page")
        reader, face, work = opened.reader(), opened.as_blocking_queue(), [opened.get()]

        def and_work(figure: property) -> property:
            def look(source: LocalSource) -> int:
                seen: int = figure.__get__(source)
                monkeypatch.undo()
                opened.put(b"a page that it links to")
                work.pop().commit()
                work.append(opened.get())
                return seen

            return property(look)

        looks: tuple[Callable[[], bool], ...] = (
            lambda: not opened.join(0),
            lambda: not face.join(0),
            lambda: reader.items > 0,
            lambda: reader.bytes > 0,
        )
        for look in looks:
            for figure in ("missing", "visible_bytes"):
                monkeypatch.setattr(LocalSource, figure, and_work(getattr(LocalSource, figure)))
            assert look()
            monkeypatch.undo()
        work.pop().commit()
        assert opened.join(0)


@pytest.mark.parametrize(
    ("call", "opens"),
    [
        *((name, True) for name in ("__len__", "qsize", "empty", "full", "join", "as_blocking_queue", "peek", "get")),
        *((name, False) for name in ("__bool__", "__repr__", "stats", "sync", "evict_waiters")),
    ],
)
def test_what_opens_the_default_reader(tmp_path: Path, call: str, opens: bool) -> None:
    """As the guide says: from then on, the first named reader of another process inherits nothing."""
    with JournaledQueue(tmp_path, "jobs") as opened:
        opened.put(b"1")
        getattr(opened, call)(*((0,) if call == "join" else ()))
        with open_reader(tmp_path, "jobs", "mail", create=True) as mail:
            assert len(mail) == (0 if opens else 1)


def test_a_qsize_beside_a_get_is_not_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "jobs") as opened:
        reader, face = opened.reader(), opened.as_blocking_queue()

        def look_and_get(reader: Reader) -> int:
            monkeypatch.undo()
            seen = reader.items
            opened.put(b"1")
            opened.get()
            return seen

        for size in (reader.__len__, face.__len__, face.qsize):
            monkeypatch.setattr(Reader, "items", property(look_and_get))
            assert size() == 0
        assert (reader.open_items, face.empty()) == (3, True)


def test_a_get_whose_commit_fails_was_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "jobs") as opened:
        queue = opened.as_blocking_queue()
        queue.put(b"1")
        monkeypatch.setattr(Item, "commit", Mock(side_effect=OSError(5, "no")))
        with pytest.raises(OSError, match="no"):
            queue.get()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="task_done"):
            queue.task_done()


@pytest.mark.parametrize("named", [False, True])
def test_join_of_a_reader_waits_for_commits(tmp_path: Path, named: bool) -> None:
    with JournaledQueue(tmp_path, "jobs") as opened:
        source: Any = opened.reader("mail") if named else opened
        assert source.join(0)
        opened.put_many([b"a", b"b", b"c"])
        thread, said = joins(source)
        first, second = source.get(), source.get()
        first.commit()
        second.abort()
        assert source.join(0.05) is False, "one is unread, one comes again"
        for item in (source.get(), source.get()):
            assert not said
            item.commit()
        thread.join(PATIENCE)
        assert said == [True]
        with pytest.raises(ValueError, match="timeout"):
            source.join(-1)


def test_join_of_what_is_closed_raises_if_items_are_left(tmp_path: Path) -> None:
    opened = JournaledQueue(tmp_path, "jobs")
    opened.put(b"a")
    waiting = [joins(opened), joins(opened.reader()), joins(opened.as_blocking_queue())]
    until(lambda: all(thread.is_alive() for thread, _ in waiting))
    opened.close()
    for thread, said in waiting:
        thread.join(PATIENCE)
        assert said == [QueueClosed]
