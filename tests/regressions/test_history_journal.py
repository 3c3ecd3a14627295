"""Faults of relatives' journals: rotation, full disks, bad records, lengths, ids. Each test fails where the fault is
back, and a twin with the fault planted shows that it does.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import CorruptJournal, JournaledQueue
from kestrelpy._journal import format as fmt
from kestrelpy._journal import recovery, view
from kestrelpy._journal import segment as segment_module
from kestrelpy._journal.journal import Journal
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk
from tests.regressions.relatives import (
    change,
    content,
    headerless_file_refused,
    history,
    in_folder,
    on_disk,
    power_states,
    segments,
    take,
    vanish,
)

NO_ROOM = errno.ENOSPC


def numbered(n: int, size: int = 1500) -> bytes:
    return b"%04d" % n * (size // 4)


# -- rotation --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rolled_by_copying() -> Iterator[None]:
    """The old file is moved out of the way and written anew under its name."""
    real = Journal.rotate

    def rotate(self: Journal) -> None:
        real(self)
        name = self.segments[-1].name
        self._directory.rename(name, "away")
        old, new = self._directory.open("away"), self._directory.create(name)
        new.write(0, old.read(0, old.size()))
        new.sync()
        self._directory.unlink("away")
        old.close()
        new.close()

    with patch.object(Journal, "rotate", rotate):
        yield


@history(rolled_by_copying, raises=(CorruptJournal,))
def test_history_kestrel_1_a_journal_roll_loses_items(tmp_path: Path) -> None:
    """kestrel #1: at a roll the journal was renamed and its items were played into a new file under the old name; a
    crash meanwhile lost them. Here: a kill, or a power cut, before every operation of puts that rotate.
    """
    disk = CrashingDisk()
    queue = on_disk(disk, sync="always", segment_bytes=4096)
    clones: list[tuple[int, CrashingDisk]] = []
    put = 0

    def clone() -> None:
        clones.append((put, disk.after_kill()))
        clones.extend((put, state) for state in power_states(disk, 1))

    disk.before_operation = clone
    for put in range(6):
        queue.put(numbered(put))
    vanish(queue, disk)
    assert len(segments(disk)) == 3
    assert len(clones) > 60
    for acknowledged, state in clones:
        found = list(content(state).values())
        assert found[:acknowledged] == [numbered(n) for n in range(acknowledged)]
        assert found[acknowledged:] in ([], [numbered(acknowledged)])


@contextlib.contextmanager
def two_files_a_rotation() -> Iterator[None]:
    """Whoever comes second to a rotation makes a file too and leaves it empty."""
    real = Journal._begin

    def begin(self: Journal, frame_bytes: int, added_ms: int) -> None:
        real(self, frame_bytes, added_ms)
        self._last_number += 1
        self._directory.create(f"jobs.{self._last_number:013d}.segment").close()

    with patch.object(Journal, "_begin", begin):
        yield


@history(two_files_a_rotation)
def test_history_libkestrel_4_empty_files_from_rotations_at_the_same_time(tmp_path: Path) -> None:
    """libkestrel #4: two threads that rotated at the same time left files of zero bytes. Here: four producers at files
    of three items.
    """
    with in_folder(tmp_path, segment_bytes=4096) as queue:
        queue.reader()

        def produce(thread: int) -> None:
            for n in range(15):
                queue.put(numbered(100 * thread + n, 1200))

        threads = [threading.Thread(target=produce, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = queue.stats()
        files = [path for path in tmp_path.iterdir() if path.suffix == ".segment"]
        assert all(path.stat().st_size > 3000 for path in files)
        assert len(files) == stats.segments == 20
        assert list(take(queue)) == list(range(1, 61))


# -- full disks and failed writes ------------------------------------------------------------------------------------


@history(headerless_file_refused, raises=(CorruptJournal,))
def test_history_kestrel_69_zeros_of_a_full_disk_stop_the_start(tmp_path: Path) -> None:
    """kestrel #69: a file system that filled up left zero bytes in the journal, and the server did not start any more.
    Here: no room at each operation of a rotation, for ever, also for cleaning up; then a kill; then a start.
    """
    for at in range(1, 8):
        disk = CrashingDisk()
        failing = FailingDisk(disk, mapped=False)
        queue = on_disk(failing, segment_bytes=4096)
        for n in range(2):
            queue.put(numbered(n))
        failing.arm(NO_ROOM, at=at, sticky=True, kinds={"create", "grow", "write", "store", "truncate", "unlink"})
        acknowledged = 2
        with contextlib.suppress(OSError):
            for n in range(2, 5):
                queue.put(numbered(n))
                acknowledged += 1
        assert failing.failures, at
        vanish(queue, disk)
        again = on_disk(disk, segment_bytes=4096)
        assert take(again) == {n + 1: numbered(n) for n in range(acknowledged)}
        assert again.put(b"there is room again") > acknowledged
        vanish(again, disk)


def refused_put(short_bytes: int, data: bytes) -> tuple[JournaledQueue, CrashingDisk]:
    """A queue with one item, and a put that failed after so many bytes (below 0: all but that many)."""
    disk = CrashingDisk()
    failing = FailingDisk(disk, mapped=False)
    queue = on_disk(failing)
    queue.put(b"stored")
    failing.arm(NO_ROOM, kinds={"store"}, short_bytes=short_bytes)
    with contextlib.suppress(OSError):
        queue.put(data)
        raise AssertionError("the put did not fail")
    failing.disarm()
    return queue, disk


def nothing_undone() -> Any:
    """What a failed write has left stays where it is."""
    return patch.object(Journal, "_undo", lambda *_: None)


@history(nothing_undone)
def test_history_chronicle_793_dirty_bytes_past_a_failed_write(tmp_path: Path) -> None:
    """Chronicle Queue #793: a write that failed left dirty bytes behind the end; a shorter one that followed did not
    cover them, and they were read as a message. Here: a put fails with all but its last byte stored, which is zero
    anyway; then the process is killed, or puts something shorter first.
    """
    for shorter in (None, b"", b"short", b"x" * 20):
        queue, disk = refused_put(-1, b"refused" + bytes(30))
        expected = {1: b"stored"}
        if shorter is not None:
            expected[queue.put(shorter)] = shorter
        vanish(queue, disk)
        assert content(disk) == expected


@contextlib.contextmanager
def counted_before_it_is_stored() -> Iterator[None]:
    """The end of the file moves although the write failed."""

    def undo(self: Journal, _: BaseException) -> None:
        offset, tail_id, total_bytes = self._at
        self._at = (offset + 9, tail_id, total_bytes)

    with patch.object(Journal, "_undo", undo):
        yield


@history(counted_before_it_is_stored, raises=(CorruptJournal,))
def test_history_queuelib_14_a_failed_write_spoils_what_follows(tmp_path: Path) -> None:
    """queuelib #14: a push that failed for want of room left a part of itself, and no pop worked from then on. Here: a
    put fails after every number of bytes; what is put next is delivered, by this process and by the next.
    """
    for part in range(fmt.FRAME_BYTES + 4):
        queue, disk = refused_put(part, b"a" * 1000)
        assert queue.put(b"next") == 2
        assert take(queue) == {1: b"stored", 2: b"next"}
        vanish(queue, disk)
        assert content(disk) == {1: b"stored", 2: b"next"}


# -- bad records -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cut_at_the_bad_record() -> Iterator[None]:
    """Whatever segment it is: what is behind the first bad record does not count."""
    real = segment_module.load_segment

    def load(file: Any, queue: str, header: fmt.SegmentHeader) -> segment_module.Segment:
        segment = real(file, queue, header)
        frames = list(segment_module.iterate_frames(file, header.marker, fmt.HEADER_BYTES, segment.records_end))
        if segment.closed and frames and frames[-1][1].last_id < segment.last_id:
            segment.last_id = frames[-1][1].last_id
            segment.records_end = frames[-1][0] + frames[-1][1].size
        return segment

    with patch.object(recovery, "load_segment", load):
        yield


@history(cut_at_the_bad_record)
def test_history_libkestrel_truncates_any_segment_at_a_bad_record(tmp_path: Path) -> None:
    """libkestrel cut any segment at a bad record, not only the last, and everything behind it in that file was gone.
    Here: a flipped bit in the first of four segments. The bytes of no file change; all but that record is there.
    """
    with in_folder(tmp_path, segment_bytes=4096) as queue:
        queue.reader()
        for n in range(9):
            queue.put(numbered(n, 1200))
    first = min(tmp_path.glob("*.segment"))
    data = bytearray(first.read_bytes())
    data[data.index(numbered(1, 1200)) + 5] ^= 1
    first.write_bytes(data)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.segment")}
    with contextlib.suppress(CorruptJournal), in_folder(tmp_path) as queue:
        take(queue)
        raise AssertionError("the damage is not reported")
    with in_folder(tmp_path, on_corruption="quarantine") as queue:
        assert list(take(queue).values()) == [numbered(n, 1200) for n in range(9) if n != 1]
        assert queue.stats().quarantined == 1
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.segment")}
    assert {name: after[name] for name in before} == before


@contextlib.contextmanager
def lengths_believed() -> Iterator[None]:
    """As many bytes are asked for as a length claims."""
    real = segment_module.iterate_frames

    def iterate(file: Any, marker: int, offset: int, end: int) -> Iterator[tuple[int, fmt.Frame]]:
        while offset < end:
            data = file.read(offset, segment_module._claimed_bytes(file, offset) or fmt.FRAME_BYTES)
            found = next(real(file, marker, offset, end), None)
            del data
            if found is None:
                return
            yield found
            offset = found[0] + found[1].size

    with patch.object(recovery, "iterate_frames", iterate):
        yield


@history(lengths_believed)
def test_history_nsq_471_a_length_is_believed(tmp_path: Path) -> None:
    """nsq #471: the queue on disk took the length in front of a message as it came and made room for it. Here: each
    record of a segment that was not closed claims up to 64 MB; opening and reading take no more than the file needs.
    """
    queue = in_folder(tmp_path, sync="never")
    for n in range(6):
        queue.put(numbered(n, 400))
    queue.sync()
    (path,) = tmp_path.glob("*.segment")
    good = path.read_bytes()
    vanish(queue)
    offsets = [good.index(numbered(n, 400)) - fmt.FRAME_BYTES for n in (1, 4)]
    for offset in offsets:
        for length in (0, 1, 399, 401, 1 << 16, 64 << 20):
            for name in tmp_path.iterdir():
                name.unlink()
            changed = bytearray(good)
            changed[offset + 4 : offset + 8] = length.to_bytes(4, "little")
            path.write_bytes(changed)
            tracemalloc.start()
            try:
                with in_folder(tmp_path, on_corruption="quarantine") as queue:
                    found = list(take(queue).values())
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < 4 << 20, f"{peak} bytes for a file of {len(good)}"
            assert set(found) <= {numbered(n, 400) for n in range(6)}
            assert numbered(0, 400) in found


@contextlib.contextmanager
def a_new_file_at_every_look() -> Iterator[None]:
    """What is bad is saved under another name each time that it is met."""
    names = count()

    def name(queue: str, number: int, _offset: int) -> str:
        return f"{queue}.{number:013d}.{next(names)}.quarantine"

    with patch.object(view, "quarantine_name", name):
        yield


@history(a_new_file_at_every_look)
def test_history_nsq_1033_a_bad_file_is_saved_for_ever(tmp_path: Path) -> None:
    """nsq #1033: a file that could not be read was to be saved as bad, which failed, was tried again, and so on: nsqd
    hung, and a restart did not help. Here: a bad record and a missing segment. A start ends after some operations, and
    five more starts leave no more files than the first did.
    """
    disk = MemoryDisk()
    with on_disk(disk, segment_bytes=4096) as queue:
        queue.reader()
        for n in range(9):
            queue.put(numbered(n, 1200))
    names = segments(disk)
    change(disk, names[0], lambda data: data.__setitem__(200, data[200] ^ 1))
    disk.directory("/q").unlink(names[1])
    seen = set()
    for _ in range(6):
        counting = FailingDisk(disk)
        queue = on_disk(counting, on_corruption="quarantine")
        assert len(take(queue)) == 5
        vanish(queue, disk)
        assert counting.operations < 120
        seen.add(frozenset(name for name in disk.directory("/q").names() if name.endswith(".quarantine")))
    assert len(seen) == 1


# -- ids -------------------------------------------------------------------------------------------------------------


@history(lambda: patch.object(recovery, "write_mark", lambda *_: None))
def test_history_libkestrel_gives_an_id_out_twice(tmp_path: Path) -> None:
    """libkestrel's tail after a recovery was the last id of the last file: the ids of lost records were given out
    again, below places that readers had saved. Here: a torn tail with ids seen behind it, a kill in the next opening
    before anything is put, and then a put.
    """
    disk = CrashingDisk()
    queue = on_disk(disk)
    for n in range(4):
        queue.put(b"item %d" % n)
    vanish(queue, disk)

    def tear(data: bytearray) -> None:
        data[data.index(b"item 1")] ^= 1

    change(disk, segments(disk)[-1], tear)
    assert content(disk) == {1: b"item 0"}
    again = on_disk(disk)
    assert again.put(b"new") == 5
    vanish(again, disk)
    assert content(disk) == {1: b"item 0", 5: b"new"}
