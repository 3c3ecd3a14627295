"""Faults of relatives' small files that say how far somebody is: lost, behind, zeroed, torn, left over. Each test fails
where the fault is back, and a twin with the fault planted shows that it does.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import CorruptJournal
from kestrelpy._journal import checkpoint as checkpoint_module
from kestrelpy._journal import queue_files
from kestrelpy._journal.checkpoint import CheckpointFile, FileWithSpare
from kestrelpy._journal.recovery import Recovered
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk, PowerModel
from tests.regressions.relatives import (
    CHECKPOINT,
    content,
    history,
    in_folder,
    item,
    on_disk,
    overwrite,
    power_states,
    read,
    segments,
    take,
    vanish,
)


def garbage(good: bytes) -> Iterator[bytes]:
    """What crashes and disks have made of small files."""
    good = good.rstrip(b"\0")
    yield from (b"", bytes(len(good)), bytes(4096), good[:20], good[: len(good) // 2], b"\xff" * 60)
    yield good[:16] + bytes(len(good) - 16)
    yield good[: len(good) // 2] + bytes(len(good) - len(good) // 2)


# -- lost and zeroed -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def begins_at_the_tail() -> Iterator[None]:
    real = ReaderRegistry._beginning
    with patch.object(ReaderRegistry, "_beginning", lambda self, _: real(self, "tail")):
        yield


@history(begins_at_the_tail)
def test_history_libkestrel_makes_a_corrupt_bookmark_anew_at_the_tail(tmp_path: Path) -> None:
    """libkestrel passed over a reader whose bookmark it could not read; asked for again, it began behind everything,
    and what it had not read was erased. Here: the bookmark of one of two readers, spoiled or gone; a checkpoint and a
    rotation follow, which might erase.
    """
    for spoiled in [*garbage(b"x" * 100), None]:
        disk = MemoryDisk()
        with on_disk(disk, segment_bytes=4096) as queue:
            queue.reader("ahead")
            queue.reader("behind")
            for n in range(9):
                queue.put(item(n) * 150)
            ahead = queue.reader("ahead")
            ahead.commit_many(ahead.get_many(9))
        name = "jobs+behind.checkpoint"
        if spoiled is None:
            disk.directory("/q").unlink(name)
        else:
            overwrite(disk, name, spoiled)
        with on_disk(disk, segment_bytes=4096) as queue:
            queue.reader("behind" if spoiled is None else "ahead")
            queue.checkpoint(durable=True)
            for n in range(9, 12):
                queue.put(item(n) * 150)
            assert list(take(queue.reader("behind")).values()) == [item(n) * 150 for n in range(12)]
            assert list(take(queue.reader("ahead"))) == [10, 11, 12]


@contextlib.contextmanager
def what_cannot_be_read_raises() -> Iterator[None]:
    """The file is decoded as it is, and whoever opens the queue gets what comes of that."""
    real = checkpoint_module.load_checkpoint

    def load(directory: Any, name: str) -> Any:
        found = real(directory, name)
        if found == (None, True):
            raise EOFError("ran out of input")
        return found

    with patch.object(queue_files, "load_checkpoint", load):
        yield


@history(what_cannot_be_read_raises, raises=(EOFError,))
def test_history_persist_queue_180_a_zeroed_state_keeps_the_queue_shut(tmp_path: Path) -> None:
    """persist-queue #180: after a power cut the file ``info`` was zeros, and the queue could not be opened any more.
    Here: every small file there is, zeroed, emptied or cut, one at a time and all together, under the real names.
    """
    with in_folder(tmp_path) as queue:
        queue.put_many([item(n) for n in range(3)])
        queue.commit_many(queue.get_many(1))
    small = [tmp_path / CHECKPOINT, tmp_path / "jobs.mark"]
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for spoiled in garbage(kept[small[0]]):
        for paths in ([small[0]], [small[1]], small):
            for path in [*tmp_path.iterdir()]:
                path.unlink()
            for path, data in kept.items():
                path.write_bytes(data)
            for path in paths:
                path.write_bytes(spoiled)
            with in_folder(tmp_path) as queue:
                found = list(take(queue))
                assert found == ([2, 3] if paths == [small[1]] else [1, 2, 3])
                assert queue.put(b"new") == 4


@contextlib.contextmanager
def overwritten_in_place() -> Iterator[None]:
    """The old state is truncated, then the new one is written over it."""

    def write_over(self: FileWithSpare, data: bytes, size: int) -> int:
        try:
            file = self._directory.open(self.name, write=True)
        except FileNotFoundError:
            file = self._directory.create(self.name)
        file.truncate(0)
        file.write(0, data, bytes(size - len(data)))
        file.sync()
        file.close()
        self._directory.sync()
        return size

    with patch.object(FileWithSpare, "replace", write_over):
        yield


def heads_after_each_crash(disk: CrashingDisk, saves: int, model: PowerModel) -> Iterator[tuple[int, int]]:
    """Checkpoints of a reader that commits one item after the other, each of them on disk when its call returns, and a
    kill and power cuts before every operation: what was saved then, and where the reader is after it.
    """
    states: list[tuple[int, CrashingDisk]] = []
    saved = 0

    def clone() -> None:
        states.append((saved, disk.after_kill()))
        states.extend((saved, state) for state in power_states(disk, 4, model))

    queue = on_disk(disk, sync="always")
    for n in range(saves + 1):
        queue.put(item(n))
    reader = queue.reader()
    queue.checkpoint(durable=True)
    disk.before_operation = clone
    for n in range(saves):
        reader.get_nowait().commit()
        queue._registry._files[reader]._size = 0  # replaced, not appended to
        reader.checkpoint(durable=True)
        saved = n + 1
    disk.before_operation = None
    vanish(queue, disk)
    for at_least, state in states:
        found = take(on_disk(state))
        assert found == {n + 1: item(n) for n in range(min(found) - 1, saves + 1)}
        yield at_least, min(found) - 1


@history(overwritten_in_place)
def test_history_logstash_8218_a_checkpoint_of_no_bytes(tmp_path: Path) -> None:
    """logstash #8218: a crash between the creation of a checkpoint and its first byte left an empty file, and logstash
    did not start. Here: a kill or a power cut before every operation of checkpoints that replace their file. The queue
    opens, and what was saved does not come again.
    """
    seen = 0
    for saved, head in heads_after_each_crash(CrashingDisk(), 3, PowerModel.PREFIX):
        assert saved <= head <= saved + 1
        seen += 1
    assert seen > 30


class _Unsynced:
    """A directory whose files are not synced."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, name: str, *, write: bool = False) -> Any:
        return self._deaf(self._inner.open(name, write=write))

    def create(self, name: str) -> Any:
        return self._deaf(self._inner.create(name))

    def _deaf(self, file: Any) -> Any:

        class Deaf:
            write, close, size, read, truncate = file.write, file.close, file.size, file.read, file.truncate

            def sync(self) -> None:
                """The fault."""

        return Deaf()


@contextlib.contextmanager
def renamed_without_a_sync() -> Iterator[None]:
    real = FileWithSpare.replace

    def replace(self: FileWithSpare, *rest: Any) -> Any:
        with patch.object(self, "_directory", _Unsynced(self._directory)):
            return real(self, *rest)

    with patch.object(FileWithSpare, "replace", replace):
        yield


@history(renamed_without_a_sync)
def test_history_kafka_16541_a_checkpoint_renamed_before_it_is_on_disk(tmp_path: Path) -> None:
    """Kafka-16541: the temporary file of a checkpoint was flushed but not synced before it was renamed; a power cut
    left garbage under the right name. Here: what power cuts leave, at every operation of checkpoints, in any legal
    way.
    """
    for model in (PowerModel.EXT4, PowerModel.ANY):
        for saved, head in heads_after_each_crash(CrashingDisk(), 3, model):
            assert saved <= head <= saved + 1


@contextlib.contextmanager
def cut_whatever_was_durable() -> Iterator[None]:
    with patch.object(Recovered, "watermark", property(lambda _: 0, lambda *_: None)):
        yield


@history(cut_whatever_was_durable)
def test_history_logstash_12554_a_page_of_zeros(tmp_path: Path) -> None:
    """logstash #12554: a page of the queue was zeros after a crash. Here: zeros from each multiple of 512 on, to the
    end of a segment that was not closed, or over one sector, after everything in it was synced and a checkpoint says
    so. That is an error that names the item, or in quarantine exactly what is missing; it is never an emptier queue.
    """
    disk = CrashingDisk()
    queue = on_disk(disk)
    expected = {n + 1: item(n) * 20 for n in range(40)}
    for data in expected.values():
        queue.put(data)
    queue.sync()
    queue.reader()
    queue.checkpoint(durable=True)
    vanish(queue, disk)
    name = segments(disk)[-1]
    good = read(disk, name)
    used = len(good.rstrip(b"\0"))
    for start in range(512, used, 512):
        for stop in (start + 512, len(good)):
            spoiled = disk.after_kill()
            overwrite(spoiled, name, good[:start] + bytes(stop - start) + good[stop:])
            with contextlib.suppress(CorruptJournal):
                content(spoiled.after_kill())
                raise AssertionError(f"zeros from {start} to {stop} are not reported")
            queue = on_disk(spoiled, on_corruption="quarantine")
            found = take(queue)
            assert found.items() <= expected.items()
            assert 0 < len(expected) - len(found) == queue.stats().quarantined
            vanish(queue, spoiled)


# -- left over -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_new_name_for_each_temporary() -> Iterator[None]:
    numbers = count()

    def replace(self: FileWithSpare, data: bytes, size: int) -> int:
        temporary = f"{self.name}.{next(numbers)}.tmp"
        file = self._directory.create(temporary)
        file.write(0, data, bytes(size - len(data)))
        file.sync()
        file.close()
        self._directory.rename(temporary, self.name)
        self._directory.sync()
        return size

    with patch.object(FileWithSpare, "replace", replace), patch.object(FileWithSpare, "hold", lambda *_: None):
        yield


@history(a_new_name_for_each_temporary)
def test_history_nsq_938_thousands_of_empty_temporaries(tmp_path: Path) -> None:
    """nsq #938: on a full disk every attempt to save the metadata left another empty file with a name of its own, 3,000
    of them, for good. Here: a hundred checkpoints without room, also without room for cleaning up; then the disk has
    room, and an opening. What an older version might have left under the names of temporaries goes too.
    """
    disk = CrashingDisk()
    failing = FailingDisk(disk)
    queue = on_disk(failing)
    queue.put(item(0))
    reader = queue.reader()
    before = set(disk.directory("/q").names())
    failing.arm(errno.ENOSPC, sticky=True, kinds={"write", "truncate"})
    for _ in range(100):
        with contextlib.suppress(OSError):
            reader.checkpoint(durable=True)
        queue._registry._files[reader]._size = 0  # replaced, not appended to
    assert failing.failures > 50
    assert len(set(disk.directory("/q").names()) - before) <= 1
    failing.disarm()
    reader.get_nowait().commit()
    reader.checkpoint(durable=True)
    vanish(queue, disk)
    for name in (f"jobs+reader{n}.checkpoint.tmp" for n in range(300)):
        disk.directory("/q").create(name).close()
    queue = on_disk(disk)
    assert take(queue) == {}
    left = {name for name in disk.directory("/q").names() if name.endswith(".tmp")}
    assert left == {"jobs+.checkpoint.tmp", "jobs.mark.tmp"}, "the spare files of the mark, and of the only reader"


def test_a_checkpoint_file_is_replaced_as_these_tests_mean_it(tmp_path: Path) -> None:
    """Setting ``_size`` back to 0, as above, makes the next save a replacement."""
    disk = MemoryDisk()
    with on_disk(disk) as queue:
        reader = queue.reader()
        file = queue._registry._files[reader]
        assert isinstance(file, CheckpointFile)
        size = len(read(disk, CHECKPOINT).rstrip(b"\0"))
        reader.checkpoint(durable=True)
        assert len(read(disk, CHECKPOINT).rstrip(b"\0")) > size
        file._size = 0
        reader.checkpoint(durable=True)
        assert len(read(disk, CHECKPOINT).rstrip(b"\0")) == size
