"""A store in a folder: nothing is half there, what was acknowledged outlives a power cut, and errors leave nothing."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy.ship import StoreUnavailable, open_store
from kestrelpy.ship.folder_store import FolderStore
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk
from kestrelpy.testing._power import PowerModel

KEY = "jobs/log/0000000000000001"
DATA = b"a slot " * 1000
HONEST = [model for model in PowerModel if model is not PowerModel.HOSTILE]
"""A disk that damages what it has synced is for the checksums of what is stored."""


class Crash(BaseException):
    """The process dies."""


def crash_at(disk: CrashingDisk, number: int) -> None:
    """Before the ``number``-th operation from now."""
    left = number

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Crash

    disk.before_operation = count


def crashed(disk: CrashingDisk, number: int) -> bool:
    """Whether a create crashes before its ``number``-th operation."""
    crash_at(disk, number)
    try:
        FolderStore("/store", disk=disk).create(KEY, DATA)
    except Crash:
        return True
    finally:
        disk.before_operation = None
    return False


@pytest.mark.parametrize("model", HONEST)
def test_a_power_cut_leaves_all_of_it_or_nothing(model: PowerModel) -> None:
    states, number, going = 0, 1, True
    while going:
        disk = CrashingDisk()
        going = crashed(disk, number)
        number += 1
        for state in disk.power_states(model, 20, seed=number):
            states += 1
            store = FolderStore("/store", disk=state)
            data = store.read(KEY)
            assert data == DATA or (data is None and going)
            assert [each.key for each in store.list("")] == ([KEY] if data else [])
            assert store.create(KEY, b"another") == (data is None)
    assert number > 6
    assert states > 20


def test_what_another_has_created_outlives_a_power_cut_when_we_are_told_that_it_exists() -> None:
    """The other one may have died before it synced the folder."""
    number = 1
    disk = CrashingDisk()
    while crashed(disk, number) and FolderStore("/store", disk=disk.after_kill()).read(KEY) is None:
        disk, number = CrashingDisk(), number + 1
    left = disk.after_kill()
    assert not FolderStore("/store", disk=left).create(KEY, b"another")
    for model in HONEST:
        for state in left.power_states(model, 20):
            assert FolderStore("/store", disk=state).read(KEY) == DATA


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_each_operation_of_a_create_fails_once(error: int) -> None:
    at, failed = 1, True
    while failed:
        disk = FailingDisk(MemoryDisk())
        store = FolderStore("/store", disk=disk)
        disk.arm(error, at=at)
        failed, at = is_refused(lambda: store.create(KEY, DATA), error), at + 1  # noqa: B023 - called at once
        disk.disarm()
        store.create(KEY, DATA)
        assert store.read(KEY) == DATA
    assert at > 6


def is_refused(request: Callable[[], object], error: int) -> bool:
    try:
        request()
    except StoreUnavailable as refused:
        cause = refused.__cause__
        return isinstance(cause, OSError) and cause.errno == error
    return False


REQUESTS: dict[str, Callable[[FolderStore], object]] = {
    "read": lambda store: store.read(KEY),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete([KEY]),
}


@pytest.mark.parametrize("request_", sorted(REQUESTS))
def test_other_requests_fail(request_: str) -> None:
    disk = FailingDisk(MemoryDisk())
    store = FolderStore("/store", disk=disk)
    store.create(KEY, DATA)
    disk.arm(errno.EIO, at=1)
    assert is_refused(lambda: REQUESTS[request_](store), errno.EIO)
    disk.disarm()
    assert not is_refused(lambda: REQUESTS[request_](store), errno.EIO)


def test_a_failed_create_leaves_no_temporary_file() -> None:
    inner = MemoryDisk()
    disk = FailingDisk(inner)
    store = FolderStore("/store", disk=disk)
    for kind in ("write", "sync", "link"):
        disk.arm(errno.ENOSPC, kinds=[kind])
        with pytest.raises(StoreUnavailable):
            store.create(KEY, DATA)
        assert inner.directory("/store/jobs/log").names() == []


def test_what_a_crash_has_left_is_read_and_goes_with_a_later_delete(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.create(KEY, DATA)
    log = tmp_path / "jobs" / "log"
    os.link(log / "0000000000000001", log / ".0000000000000001.0a1b.tmp")  # died between the link and the unlink
    (log / ".0000000000000002.0a1b.tmp").write_bytes(b"half")
    assert store.read(KEY) == DATA
    assert [each.key for each in store.list("jobs/")] == [KEY]
    store.delete(["jobs/log/0000000000000009"])
    assert len(os.listdir(log)) == 3  # it may be at work
    store.create("jobs/log/0000000000000003", b"newer")
    yesterday = (log / "0000000000000003").stat().st_mtime - 25 * 3600
    for name in os.listdir(log):
        if not name.endswith("3"):
            os.utime(log / name, (yesterday, yesterday))
    store.delete(["jobs/log/0000000000000009"])
    assert sorted(os.listdir(log)) == ["0000000000000001", "0000000000000003"]
    assert store.read(KEY) == DATA


def test_a_foreign_file_is_no_object(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.create(KEY, DATA)
    os.mkfifo(tmp_path / "jobs" / "pipe")
    os.symlink("/etc/passwd", tmp_path / "jobs" / "link")
    assert [each.key for each in store.list("")] == [KEY]
    for name in ("pipe", "link"):
        with pytest.raises(StoreUnavailable):
            store.read(f"jobs/{name}")


def test_files_are_the_owner_s(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/store").create(KEY, DATA)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "store" / KEY).stat().st_mode & 0o777 == 0o600


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.create(KEY, DATA)
    before = len(os.listdir("/proc/self/fd"))
    calls: list[Callable[[], object]] = [
        lambda: store.create(KEY, DATA),
        lambda: store.create(f"jobs/{random.getrandbits(60)}", DATA),
        lambda: store.read(KEY),
        lambda: store.read("nowhere/else"),
        lambda: store.list(""),
        lambda: store.delete(["jobs/1"]),
    ]
    for call in calls * 5:
        call()
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_in_folders_are_listed_however_deep() -> None:
    """Whoever writes the store makes them: a listing is no deeper for that."""
    store = FolderStore("/store", disk=MemoryDisk())
    keys = sorted([f"jobs/{'d/' * (100 * depth)}object" for depth in range(15)])
    for key in sorted(keys, key=len):
        store.create(key, b"")
    assert [each.key for each in store.list("jobs/")] == keys
