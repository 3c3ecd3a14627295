"""Faults of relatives that show when the power fails, or a process dies in its first moments. Each test fails where the
fault is back, and a twin with the fault planted shows that it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy._journal import format as fmt
from kestrelpy._journal import journal
from kestrelpy._journal import segment as segment_module
from kestrelpy._journal.recovery import Recovery
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy.testing import CrashingDisk, PowerModel
from tests.regressions.relatives import (
    content,
    headerless_file_refused,
    history,
    on_disk,
    power_states,
    segments,
    take,
    vanish,
)


class Deaf:
    """A file or directory that is not synced and not dropped from the cache."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sync(self) -> None:
        """The fault."""

    def forget(self) -> None:
        """The fault."""


def clones_of(disk: CrashingDisk, limit: int, *, kills: bool = False) -> tuple[list[CrashingDisk], Callable[[], None]]:
    """States that kills or power cuts leave before each operation from now on, and a function that stops that."""
    clones: list[CrashingDisk] = []

    def clone() -> None:
        if kills:
            clones.append(disk.after_kill())
        else:
            clones.extend(power_states(disk, limit))

    disk.before_operation = clone

    def stop() -> None:
        disk.before_operation = None

    return clones, stop


# -- what was said to be on disk -------------------------------------------------------------------------------------


def names_not_synced() -> Any:
    """A new segment's content is on disk, its name need not be."""
    real = journal.sync_and_name
    return patch.object(journal, "sync_and_name", lambda directory, *rest: real(Deaf(directory), *rest))


@history(names_not_synced, raises=(CorruptJournal,))
def test_history_kafka_3968_a_new_file_whose_directory_is_not_synced(tmp_path: Path) -> None:
    """Kafka-3968: a new segment was synced and its directory was not; a power cut took the file with all that was in
    it. Here: puts that wait for the disk, through three segments, and power cuts after each of them, in any legal
    way.
    """
    disk = CrashingDisk()
    queue = on_disk(disk, sync="always", segment_bytes=4096)
    put: dict[int, bytes] = {}
    seen = 0
    for n in range(6):
        data = b"%d" % n * 1500
        put[queue.put(data)] = data
        for state in power_states(disk, 8):
            assert content(state) == put
            seen += 1
    vanish(queue, disk)
    assert len(segments(disk)) == 3
    assert seen >= 18


def acknowledged_at_once() -> Any:
    """A put returns, and its sync comes some time."""
    return patch.object(GroupCommit, "wait", lambda *_, **__: None)


@history(acknowledged_at_once)
def test_history_etcd_14370_acknowledged_before_it_is_synced(tmp_path: Path) -> None:
    """etcd #14370: with one member, a write was acknowledged beside the sync of its log and not after it. Here: the
    power fails before each operation; what was acknowledged until then is there, whatever is lost.
    """
    disk = CrashingDisk()
    acknowledged: list[bytes] = []
    states: list[tuple[int, CrashingDisk]] = []

    def clone() -> None:
        states.extend((len(acknowledged), state) for state in power_states(disk, 3))

    queue = on_disk(disk, sync="always")
    disk.before_operation = clone
    for n in range(5):
        queue.put(b"item %d" % n)
        acknowledged.append(b"item %d" % n)
        clone()
    queue.put_many([b"one", b"batch"])
    acknowledged += [b"one", b"batch"]
    clone()
    disk.before_operation = None
    vanish(queue, disk)
    assert len(states) > 30
    for count, state in states:
        assert list(content(state).values())[:count] == acknowledged[:count]


@contextlib.contextmanager
def recovered_from_the_cache() -> Iterator[None]:
    """A recovery reads what is in the page cache, and nothing makes it durable."""
    real = Recovery._load

    class Directory(Deaf):
        def open(self, name: str, *, write: bool = False) -> Any:
            file = self._inner.open(name, write=write)
            return Deaf(file) if write else file

        def sync(self) -> None:
            self._inner.sync()

    def load(self: Recovery, *arguments: Any) -> Any:
        with patch.object(self, "_directory", Directory(self._directory)):
            return real(self, *arguments)

    with patch.object(Recovery, "_load", load):
        yield


@history(recovered_from_the_cache, raises=(CorruptJournal,))
def test_history_kafka_10101_shown_after_a_recovery_and_then_gone(tmp_path: Path) -> None:
    """KAFKA-10101: a broker that was killed read its log back from the page cache and went on behind it, although the
    disk did not have it; when the power failed, what had been shown was gone. Here: a kill, a recovery, a look, and
    power cuts: everything that was seen is there.
    """
    disk = CrashingDisk()
    queue = on_disk(disk)
    expected = {n + 1: b"item %d" % n for n in range(5)}
    for data in expected.values():
        queue.put(data)
    vanish(queue, disk)
    again = on_disk(disk)
    assert take(again) == expected
    states = list(power_states(disk, 30))
    vanish(again, disk)
    assert states
    for state in states:
        assert content(state) == expected


# -- the first moments -----------------------------------------------------------------------------------------------


@history(headerless_file_refused, raises=(CorruptJournal,))
def test_history_bbolt_567_a_power_cut_in_the_first_initialisation(tmp_path: Path) -> None:
    """bbolt #567: a power cut while a new database was made left a file that could not be opened, nor made again. Here:
    power cuts before each operation of the first opening, the first reader and the first puts.
    """
    disk = CrashingDisk()
    clones, stop = clones_of(disk, 3)
    queue = on_disk(disk, sync="always")
    queue.reader()
    for n in range(2):
        queue.put(b"item %d" % n)
    stop()
    vanish(queue, disk)
    assert len(clones) > 30
    for state in clones:
        queue = on_disk(state)
        found = list(take(queue.reader()).values())
        assert found == [b"item 0", b"item 1"][: len(found)]
        new_id = queue.put(b"new")
        vanish(queue, state)
        assert content(state)[new_id] == b"new"


@contextlib.contextmanager
def a_header_of_zeros_is_a_version() -> Iterator[None]:
    """What no header has been written to yet is taken for a file of version 0."""
    real = segment_module.read_header

    def read(file: Any, path: str) -> Any:
        header = real(file, path)
        if header is None:
            raise UnsupportedFormat(path, 0, fmt.FORMAT_VERSION)
        return header

    with patch.object(segment_module, "read_header", read):
        yield


@history(a_header_of_zeros_is_a_version, raises=(UnsupportedFormat,))
def test_history_beanstalkd_546_killed_while_it_makes_a_file(tmp_path: Path) -> None:
    """beanstalkd #546: killed while it made a log file, beanstalkd found "unknown version: 0" at its next start and
    warned of missing data. Here: a kill before each operation of an opening with items from before, and of puts that
    begin new files; a kill at the same places of the next opening, too.
    """
    disk = CrashingDisk()
    with on_disk(disk) as queue:
        queue.put(b"from before")
    clones, stop = clones_of(disk, 0, kills=True)
    queue = on_disk(disk, segment_bytes=4096)
    for n in range(4):
        queue.put(b"%d" % n * 1500)
    stop()
    vanish(queue, disk)
    assert len(clones) > 12
    for state in clones:
        again, stop = clones_of(state, 0, kills=True)
        first = content(state, segment_bytes=4096)
        stop()
        assert list(first.values()) == [b"from before", *(b"%d" % n * 1500 for n in range(len(first) - 1))]
        for killed_again in again:
            assert content(killed_again) == first


@contextlib.contextmanager
def records_behind_a_hole() -> Iterator[None]:
    """Zeros are passed over, and what stands behind them counts."""
    real = Recovery._follow

    def follow(self: Recovery, file: Any, segment: Any, offset: int, size: int) -> int:
        while True:
            offset = real(self, file, segment, offset, size)
            left = file.read(offset, size - offset)
            hit = fmt.find_frame(left, 0, segment.header.marker, segment.last_id + 1)
            if segment.closed or hit is None or hit[1].footer is not None:
                return offset
            segment.last_id = hit[1].first_id - 1
            offset += hit[0]

    with patch.object(Recovery, "_follow", follow):
        yield


@history(records_behind_a_hole, raises=(CorruptJournal,))
def test_history_persist_queue_56_zeros_between_items_after_a_reset(tmp_path: Path) -> None:
    """persist-queue #56: after a hard reset the file had zeros between its items, and reading it ended there with an
    error, with whole items behind them. Here: 60 kB that nobody synced, and the power fails: what is there is the front
    of what was put, without a hole, the queue opens, and goes on.
    """
    disk = CrashingDisk()
    queue = on_disk(disk)
    put = {n + 1: b"%04d" % n * 250 for n in range(60)}
    for data in put.values():
        queue.put(data)
    states = [*disk.power_states(PowerModel.EXT4, 60), *disk.power_states(PowerModel.ANY, 60)]
    vanish(queue, disk)
    lengths = set()
    for state in states:
        queue = on_disk(state)
        found = take(queue.reader())
        assert found == dict(list(put.items())[: len(found)])
        lengths.add(len(found))
        new_id = queue.put(b"new")
        vanish(queue, state)
        assert content(state) == found | {new_id: b"new"}
    assert len(lengths) > 5, "the power cuts have shown little"
