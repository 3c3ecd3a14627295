"""Folders that somebody else can write: whatever stands where a file of a queue should be, nothing blocks, nothing is
followed or written through, no device is read, and only documented errors come out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from kestrelpy import (
    JournaledQueue,
    KestrelError,
    QueueEmpty,
    ReaderConfig,
    arrow,
    open_reader,
    queue_names,
    scan,
    verify,
)
from kestrelpy.inspection.strange_files import WHY_NOT_READ
from kestrelpy.inspection.summary import inspect
from kestrelpy.testing import ManualClock
from tests.fuzz.judge import watched
from tests.support.budget import share

NOW_MS = 1_700_000_000_000
FIRST = f"jobs.{NOW_MS}.segment"
NAMES = [
    FIRST, f"jobs.{NOW_MS + 9}.segment", "jobs+a.checkpoint", "jobs+b.checkpoint", "jobs.mark", "jobs.lock",
    "jobs.readers.lock", "jobs+a.lock", "jobs.mark.tmp", "jobs+a.checkpoint.tmp", f"{FIRST}.tmp",
    f"jobs.{NOW_MS}.96.quarantine", "jobs.ship",
]  # fmt: skip
KINDS = [
    "fifo", "socket", "link to a file", "link to a device", "dangling link", "link to a folder", "device", "hard link",
    "folder",
]  # fmt: skip
PRECIOUS = b"precious"
SECONDS = 10.0
"""For one call, in processor time; they take milliseconds."""
MOST_BYTES = 64 << 20


def build(folder: Path) -> None:
    """A queue of two segments, closed, with a reader and a mark."""
    clock = ManualClock(NOW_MS)
    with JournaledQueue(folder, "jobs", clock=clock, segment_bytes=4096) as queue:
        reader = queue.reader("a")
        for n in range(8):
            queue.put(b"%d" % n * 700)
        reader.commit(reader.get_nowait())
        queue.checkpoint(durable=True)


def place(kind: str, path: Path, outside: Path) -> None:
    """Put something else where ``path`` is. What must not be touched is in ``outside``."""
    if path.exists():
        path.unlink()
    target = outside / "precious"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only root may make a device")
    elif kind == "hard link":
        os.link(target, path)
    elif kind == "folder":
        path.mkdir()
    else:
        devices = Path("/dev/zero")
        ends = {"link to a file": target, "link to a device": devices, "link to a folder": outside}
        path.symlink_to(ends.get(kind, outside / "nowhere"))


def open_and_use(folder: Path, mode: Literal["raise", "quarantine"] = "raise") -> None:
    with JournaledQueue(folder, "jobs", clock=ManualClock(NOW_MS + 5), on_corruption=mode) as queue:
        queue.put(b"new")
        for name in ("a", "b"):
            with contextlib.suppress(QueueEmpty):
                while True:
                    queue.reader(name).get_nowait().commit()
        queue.checkpoint(durable=True)


def open_and_erase(folder: Path) -> None:
    JournaledQueue(folder, "jobs", clock=ManualClock(NOW_MS + 5)).erase()


def read_from_outside(folder: Path) -> None:
    reader = open_reader(folder, "jobs", "a", config=ReaderConfig(), clock=ManualClock(NOW_MS), create=True)
    with contextlib.suppress(QueueEmpty):
        while True:
            reader.get_nowait().commit()
    reader.close()


def verify_and_raise(folder: Path) -> None:
    """Such a file is damage in the report. Here it is raised as the error that the other calls raise."""
    for damage in verify(folder, "jobs").damage:
        if damage.reason == WHY_NOT_READ:
            raise OSError(errno.EINVAL, damage.reason, damage.path)


CALLS: dict[str, Callable[[Path], object]] = {
    "queue_names": queue_names,
    "scan": lambda folder: list(scan(folder, "jobs")),
    "scan with an archive": lambda folder: list(scan(folder, "jobs", archive_dir=folder)),
    "arrow": lambda folder: arrow.read(folder, "jobs").read_all(),
    "verify": verify_and_raise,
    "inspect": lambda folder: inspect(folder, "jobs"),
    "open_reader": read_from_outside,
    "open": open_and_use,
    "open with quarantine": lambda folder: open_and_use(folder, "quarantine"),
    "erase": open_and_erase,
}


def attempt(call: Callable[[Path], object], folder: Path) -> BaseException | None:
    """Make a call, within its time; the documented error it ended in, if any."""
    before = time.process_time()
    caught = None
    with watched():
        try:
            call(folder)
        except (KestrelError, OSError) as error:
            caught = error
    assert time.process_time() - before < SECONDS
    return caught


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the queue's. Nothing in it may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_bytes(PRECIOUS)
    yield folder
    assert [path.name for path in folder.iterdir()] == ["precious"]
    assert (folder / "precious").read_bytes() == PRECIOUS
    assert (folder / "precious").stat().st_mode & 0o777 == 0o644 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_where_a_file_should_be(kind: str, tmp_path: Path, outside: Path) -> None:
    """R22: at every name, every call. What it is, is neither followed nor written through nor waited for."""
    build(tmp_path / "built")
    for n, (name, (called, call)) in enumerate(itertools.product(NAMES, CALLS.items())):
        folder = tmp_path / f"q{n}"
        shutil.copytree(tmp_path / "built", folder)
        place(kind, folder / name, outside)
        before = os.lstat(folder / name)
        caught = attempt(call, folder)
        if name.endswith((".segment", ".mark", "+a.checkpoint")) and called != "queue_names":
            needed = name != "jobs.mark" or called not in ("scan", "arrow", "open_reader")
            assert isinstance(caught, OSError) or not needed, f"{called} took a {kind} for {name}"
            if called == "verify" and isinstance(caught, OSError):
                assert Path(caught.filename).name == name
        if os.path.lexists(folder / name) and not name.endswith(".tmp") and caught is not None:
            assert os.lstat(folder / name)[:3] == before[:3], f"{called} has replaced {name}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_in_an_archive(kind: str, tmp_path: Path, outside: Path) -> None:
    """R6: at the name that a segment would get there."""
    folder, archive = tmp_path / "q", tmp_path / "archive"
    build(folder)
    archive.mkdir()
    place(kind, archive / FIRST, outside)
    before = os.lstat(archive / FIRST)

    def use(folder: Path) -> None:
        with JournaledQueue(folder, "jobs", clock=ManualClock(NOW_MS + 5), archive_dir=archive) as queue:
            reader = queue.reader("a")
            reader.commit_many(reader.get_many(100))
            queue.checkpoint(durable=True)

    assert attempt(use, folder) is None
    assert os.lstat(archive / FIRST)[:3] == before[:3]
    assert any(path.name.startswith(f"jobs.{NOW_MS}.") and path.name != FIRST for path in archive.iterdir())


def test_a_file_that_may_not_be_read(outside: Path) -> None:
    """Permission is the system's to refuse; the error says so, and nothing is changed."""
    with tempfile.TemporaryDirectory() as temporary:
        user = 65534 if os.geteuid() == 0 else os.geteuid()
        for n, name in enumerate([FIRST, "jobs+a.checkpoint", "jobs.mark"]):
            folder = Path(temporary) / str(n)
            build(folder)
            (folder / name).chmod(0)
            for path in (Path(temporary), folder, *folder.iterdir()):
                os.chown(path, user, -1)
            with acting_as(user):
                if os.access(folder / name, os.R_OK, effective_ids=True):
                    pytest.skip("this user may read everything, whatever its mode")
                for called, call in CALLS.items():
                    if called not in ("queue_names", "erase") and not (name == "jobs.mark" and called == "open_reader"):
                        assert isinstance(attempt(call, folder), PermissionError), f"{called}, {name}"
            assert (folder / name).stat().st_mode & 0o777 == 0


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """With the rights of another user, where this one is root."""
    was = os.geteuid()
    if user != was:
        os.seteuid(user)
    try:
        yield
    finally:
        if user != was:
            os.seteuid(was)


# -- names -----------------------------------------------------------------------------------------------------------

JUNK = [
    b"jobs", b"jobs.", b"jobs.segment", b"jobs..segment", b"jobs.1.segment\n", b"\njobs.1.segment",
    b"jobs.1.segment.tmp~", b"jobs.-1.segment", b"jobs. 1.segment", b"jobs.1e3.segment", b"jobs.\xff.segment",
    b"\xff\xfe", b"jobs+\xe9.checkpoint", b"jobs+a+b.checkpoint", b"jobs+-a.checkpoint",
    "jobs.\u0661.segment".encode(), b"JOBS.mark.TMP", b"jobs.mark ", b"jobs+a.checkpoint.tmp.tmp", b"a" * 255,
    b".jobs.lock", b"-jobs.lock", b"jobs.1.1.1.quarantine", b"jobs\t.lock",
]  # fmt: skip


def test_names_that_are_nearly_those_of_a_queue(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    build(folder)
    for name in JUNK:
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            file.write(b"junk")
    assert queue_names(folder) == ["jobs"]
    assert len(list(scan(folder, "jobs"))) == 8
    assert verify(folder, "jobs").ok
    for call in CALLS.values():
        assert attempt(call, folder) is None
    assert sorted(os.listdir(os.fsencode(folder))) == sorted(JUNK)
    for name in JUNK:
        with open(os.fsencode(folder) + b"/" + name, "rb") as file:
            assert file.read() == b"junk"


def test_a_hundred_thousand_names(tmp_path: Path) -> None:
    """Each call goes through them once or a few times, and takes no more than seconds. In ``make test`` they are a
    fifth of that.
    """
    folder, count = tmp_path / "q", min(100_000, share(400_000))
    build(folder)
    there = os.open(folder, os.O_RDONLY)
    try:
        for n in range(count):
            os.close(os.open(f"junk.{n}.segment.old", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=there))
        for called, call in CALLS.items():
            if called != "scan with an archive":
                assert attempt(call, folder) is None, called
        assert len(os.listdir(there)) == count
    finally:
        os.close(there)


def test_names_that_differ_in_case_are_two_queues(tmp_path: Path) -> None:
    """R23: where the file system tells them apart; where it does not, the second is refused."""
    folder = tmp_path / "q"
    build(folder)
    if (folder / "JOBS.lock").exists():
        pytest.skip("this file system ignores case; tests/unit/test_bad_input.py imitates one")
    with JournaledQueue(folder, "Jobs", clock=ManualClock(NOW_MS)) as queue:
        queue.put(b"x")
    assert queue_names(folder) == ["Jobs", "jobs"]
    with JournaledQueue(folder, "Jobs", clock=ManualClock(NOW_MS)) as queue:
        queue.erase()
    assert queue_names(folder) == ["jobs"]
    assert len(list(scan(folder, "jobs"))) == 8


@pytest.mark.parametrize("number", ["4611686018427387904", "9223372036854775808", "9999999999999999999", "1" * 25])
@pytest.mark.parametrize("content", ["empty", "copy", "zeros"])
def test_segment_numbers_that_no_clock_shows(number: str, content: str, tmp_path: Path) -> None:
    """Numbers go on from the last one: from there they would leave what a name or a header can hold, and what was put
    then would be lost at the next opening.
    """
    folder = tmp_path / "q"
    build(folder)
    data = {"empty": b"", "copy": (folder / FIRST).read_bytes(), "zeros": bytes(5000)}[content]
    (folder / f"jobs.{number}.segment").write_bytes(data)
    for called, call in CALLS.items():
        if not called.startswith(("open", "erase")):
            attempt(call, folder)
    for mode in ("raise", "quarantine"):
        try:
            with JournaledQueue(folder, "jobs", clock=ManualClock(NOW_MS + 5), on_corruption=mode) as queue:
                queue.put(b"after it")
        except KestrelError:
            continue
        with JournaledQueue(folder, "jobs", clock=ManualClock(NOW_MS + 5), on_corruption=mode) as queue:
            assert [item.data for item in queue.reader("a").get_many(100)][-1] == b"after it"
    assert (folder / f"jobs.{number}.segment").read_bytes() == data


# -- sizes -----------------------------------------------------------------------------------------------------------


def largest(path: Path) -> int:
    """Make a sparse file as large as the file system lets one be; its size."""
    for size in ((1 << 63) - 1, 1 << 62, 1 << 60, 1 << 50, (1 << 44) - 4096, 1 << 43, 1 << 40, 1 << 35):
        try:
            os.truncate(path, size)
        except OSError:
            continue
        return size
    pytest.skip("no sparse file of 32 GB here")


@pytest.mark.parametrize(
    "name", [FIRST, f"jobs.{NOW_MS + 9}.segment", "jobs+a.checkpoint", "jobs+b.checkpoint", "jobs.mark", "jobs.ship"]
)
@pytest.mark.parametrize("filled", [False, True])
def test_a_file_of_exabytes(name: str, filled: bool, tmp_path: Path) -> None:
    """R21: the size of a file is nothing to allocate by. ``filled``: behind what was in it; otherwise holes alone."""
    folder = tmp_path / "q"
    build(folder)
    if not filled or not (folder / name).exists():
        (folder / name).write_bytes(b"")
    assert largest(folder / name) > 1 << 34
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES + (256 << 20), limits[1]))
    try:
        for call in CALLS.values():
            attempt(call, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """A reading goes as far as the file went when it began."""
    folder = tmp_path / "q"
    build(folder)
    newest = max(folder.glob("*.segment"))
    done = threading.Event()

    def grow() -> None:
        with open(newest, "ab", buffering=0) as file:
            while not done.is_set() and file.tell() < 64 << 20:
                file.write(os.urandom(4096))

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for called, call in CALLS.items():
            if called != "erase":
                attempt(call, folder)
    finally:
        done.set()
        thread.join()
