"""Other systems than Linux, as far as Linux can play them: each call that macOS has not is taken away, and all of them.

What is seen here is that the library goes on without them, not how macOS behaves.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, QueueDiskFull, open_reader, scan, verify
from kestrelpy._disk import real as real_module
from kestrelpy._disk.real import RealDisk
from kestrelpy.inbox import PartWriter, publish, take_in
from kestrelpy.inspection.summary import inspect
from kestrelpy.work import WorkQueue

Take = Callable[[pytest.MonkeyPatch], object]


def without(name: str) -> Take:
    return lambda patch: patch.delattr(os, name)


class MapOfOneSize(mmap.mmap):
    """As it is without ``mremap``."""

    def resize(self, size: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


class MapWithoutResize(mmap.mmap):
    @property
    def resize(self) -> Any:
        raise AttributeError("resize")


def without_proc(patch: pytest.MonkeyPatch) -> None:
    """No table of what is mounted: of no folder it is known which file system it is on."""
    real = builtins.open

    def opened(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "no such table", path)
        return real(path, *rest, **options)

    patch.setattr("builtins.open", opened)


TAKEN: dict[str, Take] = {
    "posix_fallocate": without("posix_fallocate"),
    "fdatasync": without("fdatasync"),
    "posix_fadvise": without("posix_fadvise"),
    "POSIX_FADV_DONTNEED": without("POSIX_FADV_DONTNEED"),
    "pwritev": without("pwritev"),
    "O_PATH": without("O_PATH"),
    "mremap": lambda patch: patch.setattr(mmap, "mmap", MapOfOneSize),
    "mmap.resize": lambda patch: patch.setattr(mmap, "mmap", MapWithoutResize),
    "proc": without_proc,
}


def take_all(patch: pytest.MonkeyPatch) -> None:
    for name, take in TAKEN.items():
        if name not in ("mremap", "POSIX_FADV_DONTNEED"):
            take(patch)
    patch.delattr(os, "POSIX_FADV_DONTNEED")


ITEMS = [b"small", bytes(30_000), bytes(70_000), bytes(1_500_000), b"", *(b"%d" % at * 500 for at in range(200))]


def use_everything(folder: Path) -> None:
    """Durable puts, growing and closing segments, reading from elsewhere, the archive, a crash, the inbox, jobs."""
    archive = folder / "archive"
    with JournaledQueue(folder, "jobs", sync="always", segment_bytes=1_600_000, archive_dir=archive) as queue:
        queue.reader("main")
        for data in ITEMS[:10]:
            queue.put(data)
        queue.put_many(ITEMS[10:])
        assert [record.data for record in scan(folder, "jobs")] == ITEMS
        reader = open_reader(folder, "jobs", "other", create=True, start="earliest")
        assert [item.data for item in reader.get_many(1000)] == ITEMS
        reader.close()
        queue.drop_reader("other")
        main = queue.reader("main")
        main.commit_many(main.get_many(8))
        queue.checkpoint(durable=True)
        assert inspect(folder, "jobs").tail_id == len(ITEMS)
        queue.put_future(b"last").result(20)
    with PartWriter(folder, "jobs") as writer:
        writer.add([b"published"])
        publish(folder, "jobs", [writer.seal()])
    assert take_in(folder, "jobs") == 1
    assert verify(folder, "jobs").ok
    assert [record.data for record in scan(folder, "jobs", archive_dir=archive)] == [*ITEMS, b"last", b"published"]
    with JournaledQueue(folder, "jobs", sync=0.01) as queue:
        left = [item.data for item in queue.reader("main").get_many(1000)]
        assert left == [*ITEMS[8:], b"last", b"published"]
        queue.erase()
    with WorkQueue(folder, "work", sync="always") as work, work.session() as session:
        work.put(b"job")
        session.reserve(timeout=0).delete()
    assert os.listdir(archive)


@pytest.mark.parametrize("name", TAKEN)
def test_everything_goes_on_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TAKEN[name](monkeypatch)
    use_everything(tmp_path / "queues")


def test_everything_goes_on_without_any_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_all(monkeypatch)
    use_everything(tmp_path / "queues")


def test_a_killed_queue_is_opened_without_any_of_them(
    folder: Path, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_all(monkeypatch)
    killed(lambda queue: [queue.put(data) for data in ITEMS])
    with JournaledQueue(folder, "jobs") as queue:
        assert [item.data for item in queue.get_many(1000)] == ITEMS


def test_what_is_synced_is_out_of_the_drives_cache_where_that_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: ``fsync`` alone is not enough there."""
    asked: list[int] = []
    refusal: list[OSError] = []

    def control(descriptor: int, call: int) -> int:
        assert call == 51
        asked.append(descriptor)
        if refusal:
            raise refusal[0]
        return 0

    synced: list[int] = []
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", synced.append)
    folder = RealDisk().directory(str(tmp_path))
    file = folder.create("file")
    file.sync()
    folder.sync()
    assert (len(asked), synced) == (2, [])
    refusal.append(OSError(errno.ENOTSUP, "not on this file system"))
    file.sync()
    assert (len(asked), len(synced)) == (3, 1)
    refusal[0] = OSError(errno.EIO, "the disk is broken")
    with pytest.raises(OSError, match="broken"):
        file.sync()
    assert len(synced) == 1, "what has failed is not tried in a weaker way"
    file.close()
    folder.close()


def test_no_mapping_where_no_room_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into a page without room would be a SIGBUS, and not ``QueueDiskFull``."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(mmap, "mmap", None)
    with JournaledQueue(tmp_path, "jobs", sync="never") as queue:
        queue.put(b"x")

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no room")

        with monkeypatch.context() as now:
            now.setattr(os, "pwritev", full)
            with pytest.raises(QueueDiskFull):
                queue.put(b"y")
        queue.put(b"z")
        assert [item.data for item in queue.get_many(10)] == [b"x", b"z"]


def test_a_mapping_that_cannot_be_resized_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", MapOfOneSize)
    folder = RealDisk().directory(str(tmp_path))
    file = folder.create("file")
    first = file.grow(8192)
    first[0:5] = b"first"
    second = file.grow(1 << 20)
    second[500_000:500_006] = b"second"
    first[8000:8004] = b"also"  # who has it still may store there
    assert second is not first
    assert (file.read(0, 5), file.read(8000, 4), file.read(500_000, 6)) == (b"first", b"also", b"second")
    file.close()
    folder.close()


# -- what can't be done without --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["O_DIRECTORY", "O_NOFOLLOW", "pread", "fsync"])
def test_a_system_that_has_too_little_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as now:
        now.delattr(os, name)
        lacking = real_module._missing_calls()
    check_refusal(tmp_path, monkeypatch, lacking, name)


@pytest.mark.parametrize("call", [os.open, os.unlink, os.rename, os.stat])
def test_a_system_without_dir_fd_says_so(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as now:
        now.setattr(os, "supports_dir_fd", os.supports_dir_fd - {call})
        lacking = real_module._missing_calls()
    check_refusal(tmp_path, monkeypatch, lacking, f"{call.__name__} with dir_fd")


def check_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: list[str], name: str) -> None:
    assert lacking == [name]
    monkeypatch.setattr(real_module, "_MISSING_CALLS", lacking)
    for call in (lambda: JournaledQueue(tmp_path, "jobs"), lambda: list(scan(tmp_path, "jobs"))):
        with pytest.raises(OSError, match=f"this system has no {name}") as caught:
            call()
        assert caught.value.errno == errno.ENOSYS
    assert os.listdir(tmp_path) == []
    with JournaledQueue(tmp_path, "jobs", journaled=False) as queue:
        queue.put(b"x")
        assert queue.get().data == b"x"
