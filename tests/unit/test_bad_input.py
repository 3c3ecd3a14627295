"""Bad input: each gets its error, with the facts in it and one clear sentence, and nothing is lost or half done."""

from __future__ import annotations

import copy
import os
import pickle
import socket
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    FullPolicy,
    InvalidName,
    JournaledQueue,
    ReaderConfig,
    UnknownItem,
    open_reader,
)
from kestrelpy._disk.real import RealDisk
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.support.queues import drain

Open = Callable[..., JournaledQueue]


def unharmed(queue: JournaledQueue) -> None:
    """The queue holds what was put before, and goes on."""
    queue._check()
    tail_id = queue.stats().tail_id
    assert queue.put(b"later") == tail_id + 1


@pytest.mark.parametrize("data", ["text", 5, None, 1.5, [b"x"], {"a": 1}, object()])
def test_items_of_a_wrong_type(data: Any, open_queue: Open) -> None:
    queue = open_queue()
    calls: list[Callable[[], object]] = [
        lambda: queue.put(data), lambda: queue.put(data, expires_in=1), lambda: queue.put_future(data),
        lambda: queue.put_many([b"good", data]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=type(data).__name__):
            call()
    assert queue.stats().tail_id == 0
    unharmed(queue)


@pytest.mark.parametrize("items", [5, None, b"bytes", "text"])
def test_batches_of_a_wrong_type(items: Any, open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(TypeError):
        queue.put_many(items)
    assert queue.stats().tail_id == 0
    unharmed(queue)


def test_a_batch_whose_iterator_raises_stores_nothing(open_queue: Open) -> None:
    def items() -> Any:
        yield b"good"
        raise KeyError

    queue = open_queue()
    with pytest.raises(KeyError):
        queue.put_many(items())
    assert queue.stats().tail_id == 0
    unharmed(queue)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf")])
@pytest.mark.parametrize("filled", [False, True])
def test_negative_timeouts(timeout: float, filled: bool, open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    if filled:
        queue.put(b"x")
    calls: list[Callable[[], object]] = [
        lambda: reader.get(timeout=timeout), lambda: reader.get(True, timeout),
        lambda: reader.get_many(1, timeout=timeout),
        lambda: reader.get_future(timeout), lambda: reader.peek(timeout), lambda: queue.get(timeout=timeout),
        lambda: queue.put(b"y", timeout=timeout), lambda: queue.put_many([b"y"], timeout=timeout),
        lambda: queue.put_future(b"y", timeout=timeout), lambda: queue.as_blocking_queue().get(timeout=timeout),
        lambda: queue.as_blocking_queue().put(b"y", timeout=timeout),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="timeout"):
            call()
    assert reader.items == int(filled)
    assert reader.waiter_count == reader.open_items == 0
    assert reader.get(False, -1).data == b"x" if filled else True, "what does not wait has no timeout"
    unharmed(queue)


@pytest.mark.parametrize("timeout", ["1", b"1", [1], object()])
def test_timeouts_of_a_wrong_type(timeout: Any, open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    queue.put(b"x")
    for call in (
        lambda: reader.get(timeout=timeout), lambda: reader.get_future(timeout), lambda: reader.peek(timeout),
        lambda: queue.put(b"y", timeout=timeout),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="timeout must be"):
            call()
    assert (reader.items, reader.open_items) == (1, 0)
    unharmed(queue)


@pytest.mark.parametrize(
    "options",
    [
        {"expires_in": -1}, {"expires_in": float("nan")}, {"expires_in": float("inf")}, {"expires_in": 1e300},
        {"expires_in": 1e17}, {"expires_at_ms": -1}, {"expires_at_ms": 1 << 63}, {"expires_in": 1, "expires_at_ms": 1},
    ],
)  # fmt: skip
def test_expiries_out_of_range(options: dict[str, Any], open_queue: Open) -> None:
    queue = open_queue()
    for call in (
        lambda: queue.put(b"x", **options), lambda: queue.put_many([b"x", b"y"], **options),
        lambda: queue.put_future(b"x", **options),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expire"):
            call()
    assert queue.stats().tail_id == 0
    unharmed(queue)


@pytest.mark.parametrize("options", [{"expires_in": "1"}, {"expires_at_ms": "1"}, {"expires_at_ms": 1.5}])
def test_expiries_of_a_wrong_type(options: dict[str, Any], open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be"):
        queue.put(b"x", **options)
    assert queue.stats().tail_id == 0
    unharmed(queue)


def test_the_largest_expiry_is_kept(open_queue: Open) -> None:
    queue = open_queue()
    queue.put(b"x", expires_at_ms=(1 << 63) - 1)
    assert queue.get_nowait().expires_ms == (1 << 63) - 1


@pytest.mark.parametrize("what", ["1", None, 1.0, b"x", object()])
def test_commits_of_what_is_no_item(what: Any, open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    queue.put(b"x")
    reader.get_nowait()
    calls: tuple[Callable[[], object], ...] = (
        lambda: reader.commit(what),
        lambda: reader.abort(what),
        lambda: reader.commit_many([1, what]),
    )
    for call in calls:
        with pytest.raises((TypeError, UnknownItem, AttributeError)):
            call()
    assert (reader.open_items, reader.items) == (1, 1)
    reader.commit(1)
    unharmed(queue)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_items": -1}, ValueError), ({"max_bytes": -1}, ValueError), ({"max_age": -0.1}, ValueError),
        ({"max_idle": -1}, ValueError), ({"memory_bytes": -1}, ValueError), ({"max_expire_sweep": -1}, ValueError),
        ({"full_policy": "full"}, ValueError), ({"full_policy": 1}, TypeError), ({"max_items": 0}, ValueError),
        ({"unknown": 1}, TypeError), ({"max_items": "3"}, TypeError),
    ],
)  # fmt: skip
def test_reader_configs(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options)) if error is ValueError else None):
        ReaderConfig(**options)


def test_a_reader_config_is_frozen() -> None:
    config = ReaderConfig(full_policy=FullPolicy.BLOCK)
    with pytest.raises(AttributeError):
        config.max_items = 3  # type: ignore[misc]


# -- files -----------------------------------------------------------------------------------------------------------

SEGMENT = "jobs.0000000000001.segment"


def foreign(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        (path.parent.parent / "elsewhere").write_bytes(b"precious")
        path.symlink_to(path.parent.parent / "elsewhere")
    elif kind == "dangling symlink":
        path.symlink_to(path.parent.parent / "nowhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "hard link":
        (path.parent.parent / "elsewhere").write_bytes(b"precious")
        os.link(path.parent.parent / "elsewhere", path)
    else:
        listener = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)
            listener.close()


# R22: only regular files with one link.
KINDS = ["fifo", "symlink", "dangling symlink", "directory", "hard link", "socket"]
NAMES = [SEGMENT, "jobs+a.checkpoint", "jobs.mark", "jobs.lock", "jobs.readers.lock"]


@pytest.mark.parametrize(
    ("kind", "name"),
    # Lock files too: the owner's process id is written there, through whatever link.
    [(kind, name) for kind in KINDS for name in NAMES],
)
def test_r22_what_is_no_file_is_refused_and_not_followed(
    kind: str, name: str, folder: Path, clock: ManualClock
) -> None:
    folder.mkdir()
    foreign(kind, folder / name)

    def use() -> None:
        with JournaledQueue(folder, "jobs", clock=clock) as queue:
            queue.reader()

    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is the system's choice
        use()
    assert caught.value.errno is not None
    assert os.path.lexists(folder / name)
    if (folder.parent / "elsewhere").exists():
        assert (folder.parent / "elsewhere").read_bytes() == b"precious"
    assert not (folder.parent / "nowhere").exists()
    (folder / name).rmdir() if kind == "directory" else (folder / name).unlink()
    with JournaledQueue(folder, "jobs", clock=clock) as queue:
        assert queue.put(b"x") == 1


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"directory|exists"):
            JournaledQueue(directory, "jobs")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("directory", [None, 5, [b"x"]])
def test_a_directory_of_a_wrong_type(directory: Any) -> None:
    with pytest.raises(TypeError):
        JournaledQueue(directory, "jobs")


def test_foreign_files_are_left_alone(folder: Path, open_queue: Open) -> None:
    """R8, invariant 9: nothing that is not ours is read, changed or removed."""
    folder.mkdir()
    names = ["jobs", "jobs.txt", "jobs.1.segment.bak", "jobs.tmp", "README", ".hidden", "jobs+a", "jobs.x.segment",
             "kobs.1.segment", "jobs+a.b.checkpoint", "jobs.1.segment.tmp~"]  # fmt: skip
    for name in names:
        (folder / name).write_text(f"content of {name}")
    with open_queue(segment_bytes=4096) as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        drain(queue)
        queue.checkpoint(durable=True)
    with open_queue() as queue:
        queue.erase()
    assert sorted(os.listdir(folder)) == sorted(names)
    assert all((folder / name).read_text() == f"content of {name}" for name in names)


# R23: on a file system that ignores case, a name that differs only in case is refused.
def test_r23_a_name_that_differs_only_in_case(clock: ManualClock, folder: Path) -> None:
    class Folding:
        """A disk whose directories find names whatever their case, as some systems do."""

        def directory(self, path: str, *, create: bool = False) -> Any:
            inner = RealDisk().directory(path, create=create)

            class Directory:
                def __getattr__(_, name: str) -> Any:  # noqa: N805
                    return getattr(inner, name)

                def lock(_, name: str, *, wait: bool = False) -> Any:  # noqa: N805
                    same = [other for other in inner.names() if other.lower() == name.lower()]
                    return inner.lock(same[0] if same else name, wait=wait)

            return Directory()

    with JournaledQueue(folder, "jobs", clock=clock, disk=Folding()) as queue:
        queue.put(b"x")
    with pytest.raises(InvalidName) as caught:
        JournaledQueue(folder, "JOBS", clock=clock, disk=Folding())
    assert caught.value.name == "JOBS"
    with JournaledQueue(folder, "jobs", clock=clock, disk=Folding()) as queue:
        assert drain(queue) == [b"x"]


def test_open_reader_of_a_wrong_type(open_queue: Open, folder: Path) -> None:
    open_queue()
    before = sorted(folder.iterdir())
    for arguments in ((folder, None, "a"), (folder, "jobs", 5), (folder, b"jobs", "a")):
        with pytest.raises(InvalidName):
            open_reader(*arguments, create=True)
    assert sorted(folder.iterdir()) == before


def test_a_payload_that_looks_like_a_journal_is_a_payload(open_queue: Open, killed: Any, folder: Path) -> None:
    """An item may hold the bytes of a segment, of this very queue even: it is never taken for records."""
    with open_queue() as queue:
        queue.put(b"first")
    (path,) = folder.glob("*.segment")
    whole = path.read_bytes()
    killed(
        lambda queue: [queue.put(whole), queue.put(whole[96:]), queue.put(bytes(500)), queue.put(b"last" * 50)],
        sync="never",
    )
    last = max(folder.glob("*.segment"))
    data = last.read_bytes().rstrip(b"\0")
    last.write_bytes(data[:-3])
    with open_queue() as queue:
        assert drain(queue) == [b"first", whole, whole[96:], bytes(500)]


@pytest.mark.parametrize("what", ["1", None, 1.5, b"x"])
def test_only_items_and_ids_are_committed_or_aborted(what: Any, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"x")
        item = queue.get()
        for call in (queue.commit, queue.abort, lambda each: queue.commit_many([each])):
            with pytest.raises(TypeError, match="an item or its id"):
                call(what)
        queue.commit(item)


def test_the_default_reader_is_configured_by_its_own_option() -> None:
    with pytest.raises(InvalidName, match="default_reader="):
        JournaledQueue("/q", "jobs", readers={"": ReaderConfig()}, disk=MemoryDisk())


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy, ForkingPickler.dumps])
def test_what_is_open_does_not_go_to_another_process(way: Callable[[object], object], folder: Path) -> None:
    """``multiprocessing`` pickles the arguments of a process that it spawns."""
    with JournaledQueue(folder, "jobs") as queue, WorkQueue(folder, "work") as work, work.session() as session:
        for each in (queue, queue.reader(), queue.as_blocking_queue(), work, session):
            name = type(each).__name__
            with pytest.raises(TypeError, match=f"a {name} can't be pickled or copied.*open_reader.*inbox"):
                way(each)
        queue.put(b"goes on")
