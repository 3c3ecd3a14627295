"""The disk: one contract over every implementation, and what only the real one can show."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import multiprocessing
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kestrelpy._disk import real as real_module
from kestrelpy._disk.interface import Directory, Disk, File
from kestrelpy._disk.real import RealDisk
from kestrelpy.errors import QueueLocked
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk

DISKS: dict[str, Callable[[], Disk]] = {
    "real": RealDisk,
    "real-plain": lambda: RealDisk(mapped=False),
    "memory": MemoryDisk,
    "crashing": CrashingDisk,
    "failing-memory": lambda: FailingDisk(MemoryDisk()),
    "failing-memory-plain": lambda: FailingDisk(MemoryDisk(), mapped=False),
    "failing-crashing": lambda: FailingDisk(CrashingDisk()),
    "failing-real": lambda: FailingDisk(RealDisk()),
}
FORK = multiprocessing.get_context("fork")
# Newer Pythons warn of forking beside threads, which other tests may have left; these children do next to nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest) -> Disk:
    return DISKS[request.param]()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "queues")


@pytest.fixture
def directory(disk: Disk, path: str) -> Iterator[Directory]:
    directory = disk.directory(path, create=True)
    yield directory
    directory.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Directory]:
    directory = RealDisk().directory(str(tmp_path))
    yield directory
    directory.close()


@contextlib.contextmanager
def fails(number: int, kind: type[OSError] = OSError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.errno == number


def make(directory: Directory, name: str, data: bytes = b"") -> None:
    file = directory.create(name)
    file.write(0, data)
    file.close()


def content(directory: Directory, name: str) -> bytes:
    file = directory.open(name)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


# -- the contract: directories ---------------------------------------------------------------------------------------


def test_a_directory_is_made_with_its_parents_and_only_if_asked_to(disk: Disk, path: str) -> None:
    with fails(errno.ENOENT, FileNotFoundError):
        disk.directory(path + "/a/b")
    disk.directory(path + "/a/b", create=True).close()
    directory = disk.directory(path + "/a/b", create=True)
    assert directory.path == path + "/a/b"
    assert directory.names() == []
    parent = disk.directory(path + "/a/")
    assert parent.path == path + "/a"
    assert parent.names() == ["b"]
    parent.close()
    directory.close()


def test_a_second_name(disk: Disk, path: str, directory: Directory) -> None:
    make(directory, "f", b"abc")
    make(directory, "taken", b"x")
    disk.directory(f"{path}/folder", create=True).close()
    directory.link("f", "g")
    for name in ("taken", "folder", "f"):
        with fails(errno.EEXIST, FileExistsError):
            directory.link("f", name)
    with fails(errno.ENOENT, FileNotFoundError):
        directory.link("missing", "h")
    file = directory.open("g", linked=True)
    assert file.read(0, 10) == b"abc"
    file.close()
    directory.unlink("f")
    assert content(directory, "g") == b"abc"
    assert sorted(directory.names()) == ["folder", "g", "taken"]


def test_the_size_of_a_file_without_opening_it(disk: Disk, path: str, directory: Directory) -> None:
    make(directory, "f", b"abc")
    disk.directory(f"{path}/folder", create=True).close()
    status = directory.status("f")
    assert status is not None
    assert status.size == 3
    assert status.modified_ms >= 0
    with fails(errno.ENOENT, FileNotFoundError):
        directory.status("missing")
    with fails(errno.EISDIR, IsADirectoryError):
        directory.status("folder")


def test_a_file_is_no_directory(disk: Disk, directory: Directory) -> None:
    make(directory, "f")
    for create in (False, True):
        with fails(errno.ENOTDIR, NotADirectoryError):
            disk.directory(directory.path + "/f", create=create)
        with fails(errno.ENOTDIR, NotADirectoryError):
            disk.directory(directory.path + "/f/g", create=create)


def test_a_directory_is_no_file(disk: Disk, directory: Directory) -> None:
    disk.directory(directory.path + "/d", create=True).close()
    make(directory, "f")
    with fails(errno.EISDIR, IsADirectoryError):
        directory.open("d", write=True)
    with fails(errno.EINVAL):
        directory.open("d")
    with fails(errno.EEXIST, FileExistsError):
        directory.create("d")
    with fails(errno.EISDIR, IsADirectoryError):
        directory.rename("f", "d")
    with fails(errno.EISDIR, IsADirectoryError):
        directory.unlink("d")
    assert sorted(directory.names()) == ["d", "f"]


def test_names_create_open_unlink(directory: Directory) -> None:
    with fails(errno.ENOENT, FileNotFoundError):
        directory.open("f")
    with fails(errno.ENOENT, FileNotFoundError):
        directory.open("f", write=True)
    make(directory, "f", b"hello")
    with fails(errno.EEXIST, FileExistsError):
        directory.create("f")
    make(directory, "g")
    assert sorted(directory.names()) == ["f", "g"]
    assert content(directory, "f") == b"hello"
    directory.unlink("f")
    assert directory.names() == ["g"]
    with fails(errno.ENOENT, FileNotFoundError):
        directory.unlink("f")
    make(directory, "f")
    assert content(directory, "f") == b""
    directory.sync()


def test_rename_replaces(directory: Directory) -> None:
    make(directory, "new", b"new")
    make(directory, "old", b"old")
    directory.rename("new", "old")
    assert directory.names() == ["old"]
    assert content(directory, "old") == b"new"
    directory.rename("old", "old")
    assert content(directory, "old") == b"new"
    with fails(errno.ENOENT, FileNotFoundError):
        directory.rename("new", "old")


def test_move(disk: Disk, directory: Directory) -> None:
    archive = disk.directory(directory.path + "/archive", create=True)
    make(directory, "f", b"moved")
    directory.move("f", archive, "g")
    assert directory.names() == ["archive"]
    assert content(archive, "g") == b"moved"
    with fails(errno.ENOENT, FileNotFoundError):
        directory.move("f", archive, "g")
    make(directory, "f", b"again")
    directory.move("f", archive, "g")
    assert content(archive, "g") == b"again"
    directory.sync()
    archive.sync()
    archive.close()


def test_an_open_file_outlives_its_name(directory: Directory) -> None:
    file = directory.create("f")
    file.write(0, b"still here")
    directory.unlink("f")
    file.write(6, b"HERE")
    file.sync()
    assert file.read(0, 100) == b"still HERE"
    file.close()
    assert directory.names() == []


def test_a_closed_directory_is_of_no_use(directory: Directory) -> None:
    directory.close()
    directory.close()
    calls: list[Callable[[], object]] = [
        directory.names,
        directory.sync,
        lambda: directory.open("f"),
        lambda: directory.create("f"),
        lambda: directory.rename("f", "g"),
        lambda: directory.unlink("f"),
        lambda: directory.lock("f"),
    ]
    for call in calls:
        with fails(errno.EBADF):
            call()


def test_handles_of_one_directory_are_independent(disk: Disk, directory: Directory) -> None:
    other = disk.directory(directory.path)
    other.close()
    make(directory, "f")
    assert directory.names() == ["f"]


# -- the contract: files ---------------------------------------------------------------------------------------------


def test_read_and_write(directory: Directory) -> None:
    file = directory.create("f")
    assert file.size() == 0
    assert file.read(0, 10) == b""
    file.write(0, b"hello")
    file.write(5, b" world")
    file.write(0, b"J")
    assert file.size() == 11
    assert file.read(0, 5) == b"Jello"
    assert file.read(6, 100) == b"world"
    assert file.read(11, 5) == b""
    assert file.read(500, 5) == b""
    assert file.read(3, 0) == b""
    file.write(20, b"end")
    assert file.read(0, 100) == b"Jello world" + bytes(9) + b"end"
    file.write(2, b"")
    file.write(10_000, b"")
    assert file.size() == 23
    file.close()


def test_what_is_written_across_pages_is_read_back(directory: Directory) -> None:
    file = directory.create("f")
    data = bytes(range(256)) * 64
    file.write(4090, data)
    assert file.read(4090, len(data)) == data
    assert file.read(4000, 5000) == bytes(90) + data[:4910]
    file.write(8191, b"xy")
    assert file.read(8190, 4) == data[4100:4101] + b"xy" + data[4103:4104]
    file.close()


def test_handles_share_the_file(directory: Directory) -> None:
    writer = directory.create("f")
    reader = directory.open("f")
    writer.grow(8192)[0:5] = b"hello"
    assert reader.size() == 8192
    assert reader.read(0, 6) == b"hello\0"
    directory.rename("f", "g")
    writer.write(0, b"J")
    assert reader.read(0, 5) == b"Jello"
    reader.close()
    writer.close()


def test_grow(directory: Directory) -> None:
    file = directory.create("f")
    first = file.grow(65536)
    assert file.size() == 65536
    assert file.read(0, 70000) == bytes(65536)
    first[0:5] = b"hello"
    first[65531:65536] = b"world"
    second = file.grow(3 * 65536)
    assert file.size() == 3 * 65536
    first[5:6] = b"!"  # a buffer from before the growth is as good
    second[65536 : 65536 + 3000] = b"x" * 3000
    assert file.read(0, 7) == b"hello!\0"
    assert file.read(65531, 6) == b"worldx"
    assert file.read(65536 + 2999, 2) == b"x\0"
    file.grow(3 * 65536)[6:7] = b"?"
    assert file.read(0, 8) == b"hello!?\0"
    assert file.size() == 3 * 65536
    file.sync()
    file.close()


def test_growing_for_what_is_written_next(directory: Directory) -> None:
    file = directory.create("f")
    file.grow(8192)[0:5] = b"hello"
    buffer = file.grow(200_000, fill=False)
    assert (file.size(), file.read(0, 200_000)) == (200_000, b"hello" + bytes(199_995))
    data = bytes(range(250)) * 400
    file.write(8192, b"head", data, b"")
    assert file.read(8190, 100_100) == bytes(2) + b"head" + data + bytes(94)
    buffer[108_196:108_199] = b"abc"  # a store behind it, and one into it
    buffer[8192:8193] = b"H"
    file.grow(300_000)[299_999:300_000] = b"z"
    assert file.read(8190, 7) == bytes(2) + b"Head\0"
    assert file.read(108_194, 191_806) == data[-2:] + b"abc" + bytes(191_800) + b"z"
    file.sync()
    file.close()


def test_grow_behind_what_was_written(directory: Directory) -> None:
    make(directory, "f", b"abc")
    file = directory.open("f", write=True)
    buffer = file.grow(100)
    assert file.read(0, 200) == b"abc" + bytes(97)
    buffer[3:6] = b"def"
    file.write(6, b"ghi")
    assert file.read(0, 10) == b"abcdefghi\0"
    file.close()


def test_truncate_cuts_and_leaves_no_trace(directory: Directory) -> None:
    file = directory.create("f")
    file.grow(20_000)[0:20_000] = b"x" * 20_000
    file.truncate(5000)
    assert file.size() == 5000
    assert file.read(0, 20_000) == b"x" * 5000
    file.write(5000, b"footer")
    assert file.read(4999, 100) == b"xfooter"
    file.truncate(10)
    file.truncate(6000)
    assert file.read(0, 7000) == b"x" * 10 + bytes(5990)
    file.grow(20_000)[19_999:20_000] = b"y"
    assert file.read(5999, 20_000) == bytes(14_000) + b"y"
    file.close()


def test_sync_and_forget_change_nothing_that_is_seen(directory: Directory) -> None:
    file = directory.create("f")
    file.grow(8192)[10:13] = b"abc"
    file.sync()
    file.grow(8192)[13:16] = b"def"
    file.forget()
    assert file.read(10, 7) == b"abcdef\0"
    file.sync()
    file.forget()
    assert file.read(10, 7) == b"abcdef\0"
    file.close()


def test_a_file_opened_for_reading_is_not_written(directory: Directory) -> None:
    make(directory, "f", b"abc")
    file = directory.open("f")
    with fails(errno.EBADF):
        file.write(0, b"x")
    with fails(errno.EINVAL):
        file.truncate(0)
    with fails(errno.EBADF):
        file.grow(100)
    file.sync()
    file.forget()
    assert file.read(0, 10) == b"abc"
    file.close()


def test_a_closed_file_is_of_no_use(directory: Directory) -> None:
    file = directory.create("f")
    buffer = file.grow(4096)
    file.close()
    file.close()
    calls: list[Callable[[], object]] = [
        file.size,
        file.sync,
        file.forget,
        lambda: file.read(0, 1),
        lambda: file.write(0, b"x"),
        lambda: file.grow(8192),
        lambda: file.truncate(0),
    ]
    for call in calls:
        with fails(errno.EBADF):
            call()
    with pytest.raises((ValueError, OSError)):
        buffer[0:1] = b"x"


# -- the contract: locks ---------------------------------------------------------------------------------------------


def test_a_lock_is_held_by_one(disk: Disk, directory: Directory) -> None:
    lock = directory.lock("q.lock")
    other = disk.directory(directory.path)
    for who in (directory, other):
        with pytest.raises(QueueLocked) as caught:
            who.lock("q.lock")
        assert caught.value.path == directory.path + "/q.lock"
        assert caught.value.pid == os.getpid()
    directory.lock("other.lock").release()
    lock.release()
    lock.release()
    assert sorted(directory.names()) == ["other.lock", "q.lock"]
    again = other.lock("q.lock")
    lock.release()  # not its lock any more
    with pytest.raises(QueueLocked):
        directory.lock("q.lock")
    again.release()
    other.close()


def test_a_lock_is_of_the_file_and_not_of_the_name(directory: Directory) -> None:
    """Rule R25 turned round: whoever removes a lock file has removed the lock."""
    first = directory.lock("q.lock")
    directory.unlink("q.lock")
    second = directory.lock("q.lock")
    first.release()
    with pytest.raises(QueueLocked):
        directory.lock("q.lock")
    second.release()


def test_a_waiting_lock_comes_when_the_other_goes(disk: Disk, directory: Directory) -> None:
    if isinstance(disk, CrashingDisk) or (isinstance(disk, FailingDisk) and isinstance(disk.inner, CrashingDisk)):
        lock = directory.lock("q.lock", wait=True)
        with pytest.raises(RuntimeError, match="one thread"):
            directory.lock("q.lock", wait=True)
        lock.release()
        return
    lock = directory.lock("q.lock", wait=True)
    entered = threading.Event()
    order: list[str] = []

    def wait() -> None:
        entered.set()
        other = directory.lock("q.lock", wait=True)
        order.append("second")
        other.release()

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    order.append("first")
    lock.release()
    thread.join()
    assert order == ["first", "second"]
    directory.lock("q.lock").release()


# -- the real one: files ---------------------------------------------------------------------------------------------


def test_modes_are_private_whatever_the_umask_allows(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        directory = RealDisk().directory(str(tmp_path / "a" / "b"), create=True)
        directory.create("f").close()
        directory.lock("l").release()
    finally:
        os.umask(old)
    for folder in ("a", "a/b"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    for name in ("f", "l"):
        assert stat.S_IMODE((tmp_path / "a/b" / name).stat().st_mode) == 0o600
    directory.close()


def test_only_regular_files_with_one_link_are_opened(tmp_path: Path, real: Directory) -> None:
    """Rule R22."""
    make(real, "f", b"abc")
    os.link(tmp_path / "f", tmp_path / "hard")
    os.symlink("f", tmp_path / "soft")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(tmp_path)  # the path of a socket must be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
    for write in (False, True):
        with fails(errno.ELOOP):
            real.open("soft", write=write)
        with fails(errno.ENXIO):
            real.open("socket", write=write)
        for name in ("f", "hard", "fifo"):
            with fails(errno.EINVAL):
                real.open(name, write=write)
        with fails(errno.EINVAL):
            real.open("fifo", write=write, linked=True)
    real.open("hard", linked=True).close()
    assert (real.status("fifo"), real.status("soft")) == (None, None)
    os.unlink(tmp_path / "hard")
    assert content(real, "f") == b"abc"


def test_nothing_is_created_through_a_link(tmp_path: Path, real: Directory) -> None:
    os.symlink("target", tmp_path / "soft")
    with fails(errno.EEXIST, FileExistsError):
        real.create("soft")
    with fails(errno.ELOOP):
        real.lock("soft")
    os.mkfifo(tmp_path / "fifo")
    with fails(errno.EINVAL):
        real.lock("fifo")
    assert not (tmp_path / "target").exists()


def test_a_refused_open_leaves_no_descriptor(tmp_path: Path, real: Directory) -> None:
    os.mkfifo(tmp_path / "fifo")
    held = real.lock("l")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with fails(errno.EINVAL):
            real.open("fifo")
        with fails(errno.EINVAL):
            real.lock("fifo")
        with pytest.raises(QueueLocked):
            real.lock("l")
        with fails(errno.ENOTDIR):
            RealDisk().directory(str(tmp_path / "fifo"))
    assert sorted(os.listdir("/proc/self/fd")) == before
    held.release()


def test_grown_room_is_really_there(tmp_path: Path, real: Directory) -> None:
    file = real.create("f")
    file.grow(1 << 20)
    assert (tmp_path / "f").stat().st_blocks * 512 >= 1 << 20
    file.close()


def test_where_reserving_is_not_known_zeros_are_written(tmp_path: Path, real: Directory) -> None:
    for number in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        with mock.patch("os.posix_fallocate", side_effect=OSError(number, "no")):
            file = real.create(f"f{number}")
            file.grow(1 << 20)[5:8] = b"abc"
        assert file.read(0, 10) == b"\0\0\0\0\0abc\0\0"
        assert (tmp_path / f"f{number}").stat().st_blocks * 512 >= 1 << 20
        file.close()


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EACCES, errno.ENOTSUP])
def test_where_mappings_are_refused_stores_are_writes(real: Directory, number: int) -> None:
    file = real.create("f")
    with mock.patch("mmap.mmap", side_effect=OSError(number, "no")) as refused:
        buffer = file.grow(8192)
        buffer[4000:4200] = b"x" * 200
        file.grow(16384)[16000:16010] = b"y" * 10
    assert refused.call_count == 1
    buffer[0:1] = b"z"
    assert file.size() == 16384
    assert file.read(0, 16384) == b"z" + bytes(3999) + b"x" * 200 + bytes(11800) + b"y" * 10 + bytes(374)
    file.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_a_mapping_that_fails_leaves_the_file_as_it_was(real: Directory, number: int) -> None:
    file = real.create("f")
    file.write(0, b"abc")
    with mock.patch("mmap.mmap", side_effect=OSError(number, "no")), fails(number):
        file.grow(8192)
    assert file.read(0, 10) == b"abc"
    file.grow(8192)[3:6] = b"def"
    assert file.read(0, 7) == b"abcdef\0"
    file.close()


def check_growth_without_room(file: File, number: int, room: int) -> None:
    """``file`` has 4096 bytes and may grow to ``room``: to grow past it changes nothing, to grow up to it works."""
    buffer = file.grow(4096)
    buffer[0:5] = b"hello"
    for size in (room + 1, room + 4096, 4 * room):
        with fails(number):
            file.grow(size)
        assert file.size() == 4096
    buffer[5:6] = b"!"
    buffer[4095:4096] = b"."
    assert file.read(0, 10) == b"hello!\0\0\0\0"
    bigger = file.grow(room)
    bigger[room - 3 : room] = b"end"
    assert file.read(room - 4, 10) == b"\0end"


@pytest.mark.parametrize("mapped", [True, False])
def test_grow_past_a_limit_leaves_everything_as_it_was(tmp_path: Path, mapped: bool) -> None:
    directory = RealDisk(mapped=mapped).directory(str(tmp_path))
    file = directory.create("f")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        check_growth_without_room(file, errno.EFBIG, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    directory.close()


@pytest.mark.parametrize("reserving", [True, False])
def test_a_write_that_is_cut_short_by_a_limit_says_so(tmp_path: Path, reserving: bool) -> None:
    """Without reserving, a growth writes zeros up to the limit before it fails: they go again."""
    directory = RealDisk().directory(str(tmp_path))
    file = directory.create("f")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        if reserving:
            with fails(errno.EFBIG):
                file.write(9_990, b"x" * 100)
            assert file.read(9_990, 200) == b"x" * 10
        else:
            with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSYS, "no")), fails(errno.EFBIG):
                file.grow(20_000)
            assert file.size() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    directory.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system that is small enough to fill")
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(point)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_grow_on_a_full_disk_leaves_everything_as_it_was(small_tmpfs: Path, mapped: bool) -> None:
    directory = RealDisk(mapped=mapped).directory(str(small_tmpfs))
    file = directory.create("f")
    check_growth_without_room(file, errno.ENOSPC, 256 << 10)
    file.close()
    directory.close()


def test_a_full_disk_keeps_no_lock_from_being_taken(small_tmpfs: Path) -> None:
    directory = RealDisk().directory(str(small_tmpfs))
    directory.create("q.lock").close()
    filler = directory.create("filler")
    filler.grow((256 << 10) - 4096 * 2)
    with pytest.raises(OSError, match="space"):
        filler.write(filler.size(), bytes(1 << 20))
    lock = directory.lock("q.lock")
    with pytest.raises(QueueLocked) as caught:
        directory.lock("q.lock")
    assert caught.value.pid is None
    lock.release()
    filler.close()
    directory.close()


def test_reading_over_several_short_reads(real: Directory) -> None:
    make(real, "f", bytes(range(100)))
    file = real.open("f")
    pread = os.pread
    with mock.patch("os.pread", lambda number, size, offset: pread(number, min(size, 7), offset)):
        assert file.read(10, 50) == bytes(range(10, 60))
        assert file.read(90, 50) == bytes(range(90, 100))
    file.close()


def test_writing_over_several_short_writes(real: Directory) -> None:
    file = real.create("f")
    pwrite, pwritev = os.pwrite, os.pwritev
    with (
        mock.patch("os.pwritev", lambda number, parts, offset: pwritev(number, [b"".join(parts)[:7]], offset)),
        mock.patch("os.pwrite", lambda number, data, offset: pwrite(number, data[:7], offset)),
    ):
        file.write(3, bytes(range(50)))
        file.write(53, bytes(range(50, 54)), b"", bytes(range(54, 100)))
    assert file.read(0, 200) == bytes(3) + bytes(range(100))
    file.close()


def test_a_large_write_is_on_its_way_to_the_disk_by_whole_pages(real: Directory) -> None:
    file = real.create("f")
    advised: list[tuple[int, int]] = []
    with mock.patch("os.posix_fadvise", lambda number, offset, size, advice: advised.append((offset, size))):
        file.grow(1 << 22)
        file.write(0, bytes(100))
        for n in range(11):
            file.write(100 + n * 300_032, bytes(32), bytes(300_000))
    assert len(advised) == 2, "not for the zeros of a growth, nor for every write"
    (start, size), (then, more) = advised
    assert (start, then) == (0, size)
    assert size >= 1 << 20
    assert more >= 1 << 20
    assert (size % mmap.PAGESIZE, more % mmap.PAGESIZE) == (0, 0)
    with mock.patch("os.posix_fadvise", mock.Mock(side_effect=OSError(errno.EIO, "no"))) as refused:
        file.write(4_000_000, b"x" * (1 << 20))
    assert refused.call_count == 1
    assert file.read(4_000_000, 9) == b"x" * 9, "it is only a hurry"
    file.close()


# -- the real one: directories ---------------------------------------------------------------------------------------


def synced_paths(disk: RealDisk, path: str) -> list[str]:
    """Which folders ``directory(path, create=True)`` syncs, in order."""
    synced: list[str] = []
    fsync = os.fsync

    def note(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    with mock.patch("os.fsync", note):
        disk.directory(path, create=True).close()
    return synced


def test_a_directory_that_is_made_is_synced_into_its_parent(tmp_path: Path) -> None:
    """Rule R2; the one that was there as well: its maker may have been killed between making and syncing it."""
    disk = RealDisk()
    made = synced_paths(disk, str(tmp_path / "a" / "b"))
    assert made == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]
    assert synced_paths(disk, str(tmp_path / "a" / "b")) == [str(tmp_path / "a")]
    assert synced_paths(disk, "/") == ["/"]


def test_a_folder_that_is_open_here_is_synced_into_its_parent_once(tmp_path: Path) -> None:
    """A thousand queues in it would cost a thousand syncs."""
    disk = RealDisk()
    folder, other = str(tmp_path / "a"), str(tmp_path / "b")
    os.mkdir(folder)
    first = disk.directory(folder)
    assert synced_paths(disk, folder) == [str(tmp_path)], "whoever opened it has not made it"
    assert synced_paths(disk, folder) == []
    os.rename(folder, other)
    assert synced_paths(disk, other) == [str(tmp_path)]
    assert synced_paths(disk, folder) == [str(tmp_path.parent), str(tmp_path)], "another folder"
    first.close()
    assert synced_paths(disk, other) == [str(tmp_path)], "it may have been made anew since"


def test_a_parent_that_cannot_be_synced_matters_only_for_what_is_made(tmp_path: Path) -> None:
    disk = RealDisk()
    disk.directory(str(tmp_path / "a"), create=True).close()
    for number in (errno.EACCES, errno.EINVAL, errno.EROFS):
        with mock.patch("os.fsync", side_effect=OSError(number, "no")):
            disk.directory(str(tmp_path / "a"), create=True).close()
            with fails(number):
                disk.directory(str(tmp_path / f"b{number}"), create=True)
    with mock.patch("os.fsync", side_effect=OSError(errno.EIO, "no")), fails(errno.EIO):
        disk.directory(str(tmp_path / "a"), create=True)


def test_directories_of_one_folder_share_one_descriptor(tmp_path: Path) -> None:
    disk = RealDisk()
    before = len(os.listdir("/proc/self/fd"))
    directories = [disk.directory(str(tmp_path)) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for directory in directories[1:]:
        directory.close()
    assert directories[0].names() == []
    directories[0].close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_that_list_one_folder_each_see_all_of_it(tmp_path: Path) -> None:
    names = {f"file-{number:04}" for number in range(500)}
    for name in names:
        (tmp_path / name).touch()
    directories = [RealDisk().directory(str(tmp_path)) for _ in range(3)]
    seen: list[set[str]] = []

    def look(directory: Directory) -> None:
        seen.extend(set(directory.names()) for _ in range(40))

    threads = [threading.Thread(target=look, args=(directory,)) for directory in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found == names for found in seen)
    assert len(seen) == 120
    for directory in directories:
        directory.close()


def test_moving_to_another_file_system_is_an_error(small_tmpfs: Path, real: Directory) -> None:
    other = RealDisk().directory(str(small_tmpfs))
    make(real, "f", b"abc")
    with fails(errno.EXDEV):
        real.move("f", other, "f")
    assert content(real, "f") == b"abc"
    assert other.names() == []
    other.close()


def pretend_mounted(tmp_path: Path, kind: str) -> contextlib.AbstractContextManager[object]:
    """A table of mounts in which the file system of ``tmp_path`` is one of ``kind``."""
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 27 0:0 / /proc rw,relatime - proc proc rw\n"
        f"27 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {kind} server:/export rw\n"
    )
    return mock.patch.object(real_module, "open", lambda path, **how: open(table, **how), create=True)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p", "ceph"])
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    """Rule R28."""
    before = len(os.listdir("/proc/self/fd"))
    with pretend_mounted(tmp_path, kind):
        with pytest.raises(OSError, match=f"{kind} is a network") as caught:
            RealDisk().directory(str(tmp_path))
        assert caught.value.errno == errno.ENOTSUP
        RealDisk(allow_network=True).directory(str(tmp_path)).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_local_file_systems_are_not(tmp_path: Path) -> None:
    with pretend_mounted(tmp_path, "xfs"):
        RealDisk().directory(str(tmp_path)).close()
    with mock.patch.object(real_module, "open", mock.Mock(side_effect=FileNotFoundError), create=True):
        RealDisk().directory(str(tmp_path)).close()


def buffer_of_a_file_made_on(tmp_path: Path, table: contextlib.AbstractContextManager[object]) -> object:
    with table, contextlib.closing(RealDisk().directory(str(tmp_path))) as directory:
        file = directory.create("new")
        try:
            buffer = file.grow(8192)
            buffer[10:13] = b"abc"
            assert file.read(0, 20) == bytes(10) + b"abc" + bytes(7)
            return type(buffer)
        finally:
            file.close()
            directory.unlink("new")


@pytest.mark.parametrize("kind", ["btrfs", "bcachefs", "zfs", "nilfs2", "ubifs", "overlay"])
def test_nothing_is_mapped_where_a_store_may_need_room(tmp_path: Path, kind: str) -> None:
    """Reserved or not, written or not: on a full file system that copies on write, a store would be a SIGBUS."""
    assert buffer_of_a_file_made_on(tmp_path, pretend_mounted(tmp_path, kind)) is not mmap.mmap


def test_files_are_mapped_where_stores_go_to_the_blocks_that_are_there(tmp_path: Path) -> None:
    for kind in ("ext4", "xfs", "tmpfs"):
        assert buffer_of_a_file_made_on(tmp_path, pretend_mounted(tmp_path, kind)) is mmap.mmap
    unknown = mock.patch.object(real_module, "open", mock.Mock(side_effect=FileNotFoundError), create=True)
    assert buffer_of_a_file_made_on(tmp_path, unknown) is not mmap.mmap


@pytest.mark.parametrize(("kind", "is_mapped"), [("ext4", True), ("btrfs", False), ("overlay", False)])
def test_an_overlay_is_what_its_upper_part_is(tmp_path: Path, kind: str, is_mapped: bool) -> None:
    """Where that can be seen: from inside a container it can't."""
    upper, table = tmp_path / "upper", tmp_path / "mountinfo"
    if kind != "overlay":
        upper.mkdir()
    parts = f"lowerdir=/a:/b,upperdir={upper},workdir=/w"
    table.write_text(f"7 1 0:7 / / rw - overlay overlay rw,{parts}\n8 1 0:8 / /upper rw - {kind} /dev/sda rw\n")

    def opened(path: str, **how: Any) -> Any:
        """The table; and a folder's number of its mount, which is that of the overlay unless it is the upper part."""
        if "fdinfo" not in path:
            return open(table, **how)
        folder = os.readlink(path.replace("fdinfo", "fd"))
        return io.StringIO(f"pos:\t0\nmnt_id:\t{8 if folder == str(upper) else 7}\n")

    pretended = mock.patch.object(real_module, "open", opened, create=True)
    assert (buffer_of_a_file_made_on(tmp_path, pretended) is mmap.mmap) == is_mapped


@pytest.mark.parametrize("refused", [False, True])
def test_files_on_btrfs_are_stored_into_in_place(tmp_path: Path, refused: bool) -> None:
    calls: list[tuple[int, int]] | OSError = [] if not refused else OSError(errno.ENOTTY, "no")

    def ioctl(_descriptor: int, request: int, data: bytes) -> bytes:
        if isinstance(calls, OSError):
            raise calls
        calls.append((request, int.from_bytes(data, sys.byteorder)))
        return (0x10).to_bytes(8, sys.byteorder)

    with mock.patch("fcntl.ioctl", ioctl), pretend_mounted(tmp_path, "btrfs"):
        directory = RealDisk().directory(str(tmp_path))
        directory.create("f").close()
        directory.close()
    assert refused or calls == [(0x80086601, 0), (0x40086602, 0x00800010)]


# -- the real one: locks ---------------------------------------------------------------------------------------------


def hold_lock(path: str, ready: Any, done: Any) -> None:
    lock = RealDisk().directory(path).lock("q.lock")
    ready.set()
    done.wait()
    lock.release()


def test_the_holder_in_another_process_is_named(tmp_path: Path, real: Directory) -> None:
    ready, done = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold_lock, args=(str(tmp_path), ready, done))
    holder.start()
    ready.wait()
    with pytest.raises(QueueLocked) as caught:
        real.lock("q.lock")
    assert caught.value.pid == holder.pid
    assert str(holder.pid) in str(caught.value)
    done.set()
    holder.join()
    real.lock("q.lock").release()


def test_a_killed_holder_holds_nothing(tmp_path: Path, real: Directory) -> None:
    ready, done = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold_lock, args=(str(tmp_path), ready, done))
    holder.start()
    ready.wait()
    holder.kill()
    holder.join()
    real.lock("q.lock").release()


def test_an_unreadable_lock_file_names_nobody(tmp_path: Path, real: Directory) -> None:
    lock = real.lock("q.lock")
    for left in (b"", b"soon\n", b"12 34\n", b"-1"):
        (tmp_path / "q.lock").write_bytes(left)
        with pytest.raises(QueueLocked) as caught:
            real.lock("q.lock")
        assert caught.value.pid is None
    lock.release()


def test_a_lock_file_that_is_replaced_meanwhile_is_locked_again(tmp_path: Path, real: Directory) -> None:
    """Rule R25: what is locked must be what the name means."""
    is_at = real_module.RealDirectory._is_at
    inodes: list[int] = []

    def replace_once(self: real_module.RealDirectory, descriptor: int, name: str) -> bool:
        inodes.append(os.fstat(descriptor).st_ino)
        if len(inodes) == 1:
            (tmp_path / "new").touch()
            os.rename(tmp_path / "new", tmp_path / name)
        if len(inodes) == 2:
            os.unlink(tmp_path / name)
        return is_at(self, descriptor, name)

    with mock.patch.object(real_module.RealDirectory, "_is_at", replace_once):
        lock = real.lock("q.lock")
    assert len(inodes) == 3
    assert (tmp_path / "q.lock").stat().st_ino == inodes[2]
    with pytest.raises(QueueLocked):
        real.lock("q.lock")
    lock.release()


def test_a_forked_child_does_not_keep_a_lock_that_was_released(real: Directory) -> None:
    """Rule R26: the child has a copy of the descriptor; the lock is the parent's to release."""
    lock = real.lock("q.lock")
    done = FORK.Event()
    child = FORK.Process(target=done.wait)
    child.start()
    lock.release()
    real.lock("q.lock").release()
    done.set()
    child.join()


def test_a_forked_child_that_lets_go_of_a_lock_leaves_it_to_the_parent(real: Directory) -> None:
    lock = real.lock("q.lock")
    child = FORK.Process(target=lock.abandon)
    child.start()
    child.join()
    with pytest.raises(QueueLocked):
        real.lock("q.lock")
    lock.release()


def open_and_list(path: str, inherited: Directory) -> None:
    directory = RealDisk().directory(path)
    assert directory.names() == []
    inherited.close()
    assert directory.names() == []
    directory.close()


def test_a_child_forked_while_a_folder_is_opened_can_open_folders(tmp_path: Path, real: Directory) -> None:
    with real_module._Descriptor.guard:
        child = FORK.Process(target=open_and_list, args=(str(tmp_path), real))
        child.start()
    child.join(10)
    assert child.exitcode == 0
    assert real.names() == []


def test_a_system_without_locks_says_so(real: Directory) -> None:
    """Rule R28: ENOLCK is an error of its own and not a lock that another holds."""
    with mock.patch("portalocker.lock") as lock:
        import portalocker

        def refuse(*_: object) -> None:
            try:
                raise OSError(errno.ENOLCK, "no locks")
            except OSError as error:
                raise portalocker.LockException(error) from error

        lock.side_effect = refuse
        with fails(errno.ENOLCK):
            real.lock("q.lock")


def test_importing_the_disk_does_not_import_the_lock_library() -> None:
    code = "import kestrelpy._disk.real, sys; sys.exit('portalocker' in sys.modules)"
    root = Path(real_module.__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_goes_while_it_is_opened(
    real: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """What has its name by then is meant, not the file without one."""
    (tmp_path / "f").write_bytes(b"old")
    plain_open = os.open

    def opened_and_gone(name: str, *rest: int, **options: int) -> int:
        descriptor = plain_open(name, *rest, **options)
        if name == "f" and (tmp_path / "f").read_bytes() == b"old":
            (tmp_path / "f").unlink()
            if replaced:
                (tmp_path / "f").write_bytes(b"new")
        return descriptor

    monkeypatch.setattr(os, "open", opened_and_gone)
    if replaced:
        assert real.open("f").read(0, 9) == b"new"
    else:
        with fails(errno.ENOENT, FileNotFoundError):
            real.open("f")


def test_a_folder_is_closed_in_a_finaliser_while_another_is_opened(tmp_path: Path) -> None:
    """As a scan is that is thrown away: the collector may come while the table of descriptors is being changed."""
    directory = RealDisk().directory(os.fspath(tmp_path))

    def close() -> None:
        with real_module._Descriptor.guard:
            directory.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    again = RealDisk().directory(os.fspath(tmp_path))
    assert again.names() == []
    again.close()
    about = tmp_path.stat()
    assert (about.st_dev, about.st_ino) not in real_module._Descriptor.shared
