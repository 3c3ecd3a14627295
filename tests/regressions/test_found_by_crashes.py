"""Faults that the explorer found, each as small as it gets."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import (
    DurabilityUnknown,
    JournaledQueue,
    QueueDiskFull,
    QueueFull,
    Reader,
    ReaderConfig,
    open_reader,
    scan,
    verify,
)
from kestrelpy._journal.format import FRAME_BYTES, HEADER_BYTES
from kestrelpy._reading.local_source import LocalSource
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Corner, Leaning
from tests.crash.recovered import read_all, vanish


def open_queue(disk: CrashingDisk, *, segment_bytes: int = 1 << 20) -> JournaledQueue:
    return JournaledQueue(
        "/data", "jobs", sync="never", segment_bytes=segment_bytes, clock=ManualClock(1_000), disk=disk
    )


def all_lost(disk: CrashingDisk) -> CrashingDisk:
    """The power goes, and nothing is left but what was synced."""
    return disk.after_power_cut(Corner(last=False), PowerModel.PREFIX)


def crashes_during(disk: CrashingDisk, work: Callable[[], object]) -> list[tuple[str, CrashingDisk]]:
    """What a kill before each operation of ``work`` leaves, with the operation."""
    found: list[tuple[str, CrashingDisk]] = []
    disk.before_operation = lambda: found.append((disk.next_operation[0], disk.after_kill()))
    work()
    disk.before_operation = None
    return found


def lose_frame(disk: CrashingDisk, name: str, data: bytes) -> None:
    """A power cut has lost a block: zeros where the first frame with ``data`` was."""
    file = disk.directory("/data").open(name, write=True)
    end = file.read(0, file.size()).index(data) + len(data)
    file.write(end - len(data) - FRAME_BYTES, bytes(FRAME_BYTES + len(data)))
    disk.kill()


def contents(disk: CrashingDisk) -> dict[int, bytes]:
    queue = open_queue(disk)
    items = {item.id: item.data for item in read_all(queue.reader())}
    queue.close()
    return items


def test_a_segment_that_could_neither_be_made_nor_removed_is_in_nobodys_way() -> None:
    disk = CrashingDisk()
    failing = FailingDisk(disk, mapped=False)
    queue = JournaledQueue("/data", "jobs", sync="never", segment_bytes=4096, clock=ManualClock(1_000), disk=failing)
    queue.put(b"first" * 700)
    for _ in range(2):
        failing.arm(errno.EIO, sticky=True, kinds={"store", "unlink"})
        with pytest.raises(OSError, match="Input/output error"):
            queue.put(b"second" * 600)
        failing.disarm()
        queue.put(b"third" * 700)
    queue.sync()
    vanish(queue, disk)
    assert len(contents(all_lost(disk))) == 3
    assert len(contents(disk)) == 3


def stored(disk: CrashingDisk, name: str, data: bytes) -> None:
    """A file that is there, and all of it on disk."""
    folder = disk.directory("/data")
    file = folder.create(name)
    file.write(0, data)
    file.sync()
    folder.sync()


@pytest.mark.parametrize("lost", [0, HEADER_BYTES])
def test_the_room_of_a_new_segment_may_hold_a_part_of_an_old_one(lost: int) -> None:
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        queue.put(b"an item")
    old = next(name for name in disk.directory("/data").names() if name.endswith(".segment"))
    data = disk.directory("/data").open(old).read(0, 1 << 20)
    stored(disk, "jobs.0000000009000.new.segment", bytes(lost) + data[lost:])  # a crash in the making of this one
    assert verify("/data", "jobs", disk=disk).ok or not lost
    assert contents(disk) == {1: b"an item"}
    assert [name for name in disk.directory("/data").names() if "quarantine" in name]


def test_several_segments_whose_making_a_crash_has_ended_are_none() -> None:
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        queue.put(b"an item")
    stored(disk, "jobs.0000000009000.new.segment", bytes(5000))
    stored(disk, "jobs.0000000009001.new.segment", b"")
    assert contents(disk) == {1: b"an item"}


def test_where_every_segment_is_set_aside_there_is_nothing_to_read() -> None:
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        for item_id in range(1, 5):
            queue.put(b"%d" % item_id)
        queue.get().commit()
    folder = disk.directory("/data")
    for name in folder.names():
        if name.endswith(".segment"):
            folder.unlink(name)
    disk.kill()
    queue = JournaledQueue("/data", "jobs", sync="never", clock=ManualClock(), disk=disk, on_corruption="quarantine")
    assert read_all(queue.reader()) == []
    assert queue.put(b"new") == 5
    assert [item.data for item in read_all(queue.reader())] == [b"new"]
    queue.close()


def test_a_sync_from_elsewhere_does_not_vouch_for_what_a_failed_one_has_lost() -> None:
    """It succeeds, as that of the writer has been told of the loss; the items were in doubt and are no damage."""
    disk = CrashingDisk()
    failing, clock = FailingDisk(disk), ManualClock(1_000)
    queue = JournaledQueue("/data", "jobs", sync="never", clock=clock, disk=failing)
    queue.reader("left")
    queue.put(b"on disk")
    queue.sync()
    queue.put(b"in doubt")
    failing.arm(errno.EIO, at=1, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.sync()
    elsewhere = open_reader("/data", "jobs", "right", clock=clock, disk=failing, create=True)
    assert elsewhere.head == 2
    elsewhere.checkpoint(durable=True)
    vanish(queue, disk, elsewhere)
    queue = open_queue(disk)
    assert [item.data for item in read_all(queue.reader("left"))] == [b"on disk"]
    assert queue.put(b"another") == 3  # the reader's place names 2
    assert [item.data for item in read_all(queue.reader("right"))] == [b"another"]
    queue.close()


def settle(reader: Reader, last_id: int, *, durable: bool) -> None:
    """All items up to ``last_id`` are done, and that is saved."""
    reader.commit_many([item for item in read_all(reader) if item.id <= last_id])
    reader.checkpoint(durable)


def test_a_seek_backwards_that_may_get_to_the_disk_holds_segments_back() -> None:
    """Saved and not synced, it may be what a power cut leaves, rather than the place that was synced before it."""
    disk = CrashingDisk()
    queue = open_queue(disk, segment_bytes=4096)
    reader = queue.reader()
    for _ in range(9):
        queue.put(bytes(1000))
    settle(reader, 4, durable=True)
    reader.seek(2)
    settle(reader, 9, durable=False)
    queue._registry.retire(queue._source)
    heads = set()
    for seed in range(60):
        left = disk.after_power_cut(Leaning(random.Random(seed)), PowerModel.ANY)
        again = open_queue(left)
        heads.add(again.reader().head)
        vanish(again, left)
    assert heads == {9}  # saved durably before anything was retired
    vanish(queue, disk)


def test_a_place_whose_sync_has_failed_elsewhere_retires_nothing() -> None:
    """A sync from here of what is in the page cache alone, and taken for written since then, succeeds."""
    disk = CrashingDisk()
    failing, clock = FailingDisk(disk), ManualClock(1_000)
    queue = open_queue(disk, segment_bytes=4096)
    mine = queue.reader("left")
    elsewhere = open_reader("/data", "jobs", "right", create=True, start="earliest", clock=clock, disk=failing)
    ids = {queue.put(bytes(1000)) for _ in range(9)}
    settle(mine, 9, durable=True)
    settle(elsewhere, 1, durable=True)
    elsewhere.commit_many(read_all(elsewhere))
    queue.sync()
    failing.arm(errno.EIO, at=1, kinds={"sync"})
    with pytest.raises(OSError, match="Input/output error"):
        elsewhere.checkpoint(durable=True)
    queue.checkpoint(durable=True)
    vanish(queue, disk, elsewhere)
    queue = open_queue(all_lost(disk))
    assert {item.id for item in read_all(queue.reader("right"))} == ids - {1}
    queue.close()


def test_a_footer_that_a_kill_left_unsynced_is_synced_before_it_is_believed() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.put(b"first")
    for _, killed in crashes_during(disk, queue.close):
        reopened = open_queue(killed)
        reopened.put(b"second")
        reopened.sync()
        vanish(reopened, killed)
        assert contents(all_lost(killed)) == {1: b"first", 2: b"second"}


def test_no_footer_is_on_disk_before_the_frames_in_front_of_it() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    for data in (b"a" * 3000, b"b" * 3000, b"c" * 3000):
        queue.put(data)
    states = 0
    for _, killed in crashes_during(disk, queue.close):
        for model in (PowerModel.EXT4, PowerModel.ANY):
            for state in killed.power_states(model, 40):
                found = contents(state)
                assert list(found) == [1, 2, 3][: len(found)]
                states += 1
    assert states > 100


def test_lost_ids_are_not_taken_for_durable_ones() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.put(b"kept")
    queue.sync()
    for _ in range(3):
        queue.put(b"lost")
    vanish(queue, disk)
    lose_frame(disk, "jobs.0000000001000.segment", b"lost")
    for _ in range(2):  # the second opening believed a checkpoint of the first, that items up to 4 were on disk
        queue = open_queue(disk)
        assert [item.id for item in read_all(queue.reader())] == [1]
        queue.sync()
        queue.checkpoint(durable=True)
        vanish(queue, disk)
    queue = open_queue(disk)
    assert queue.put(b"new") == 5
    queue.close()
    assert contents(disk) == {1: b"kept", 5: b"new"}


def test_empty_segments_in_a_row_do_not_hide_what_follows() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.put(b"lost")
    vanish(queue, disk)
    lose_frame(disk, "jobs.0000000001000.new.segment", b"lost")
    queue = open_queue(disk)
    for _ in range(3):
        queue.put(b"lost")
    vanish(queue, disk)
    lose_frame(disk, "jobs.0000000001001.new.segment", b"lost")
    queue = open_queue(disk)  # two segments without an item, and ids that were given out and are lost
    reader = queue.reader()
    item_id = queue.put(b"there")
    assert item_id == 4
    assert [item.id for item in read_all(reader)] == [item_id]
    queue.close()
    assert contents(disk) == {item_id: b"there"}


def test_a_crash_while_a_named_reader_takes_over_does_not_set_it_back() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.put(b"done")
    queue.put(b"next")
    queue.get().commit()
    queue.checkpoint()
    for _, killed in crashes_during(disk, lambda: queue.reader("audit")):
        reopened = open_queue(killed)
        assert [item.data for item in read_all(reopened.reader("audit"))] == [b"next"]
        reopened.close()
    queue.close()


def test_a_seek_into_a_batch_counts_its_items_exactly() -> None:
    with open_queue(CrashingDisk()) as queue:
        reader = queue.reader()
        queue.put_many([b"a", b"bb", b"ccc"])
        queue.put_many([b"dddd", b"eeeee"])
        for item_id, items, size in ((1, 5, 15), (2, 4, 14), (3, 3, 12), (4, 2, 9), (5, 1, 5), (6, 0, 0)):
            reader.seek(item_id)
            assert (reader.items, reader.bytes) == (items, size)
            assert [item.id for item in read_all(reader)] == list(range(item_id, 6))


def test_the_next_item_is_behind_the_head_when_a_commit_closes_a_gap() -> None:
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        for data in (b"first", b"second", b"third"):
            queue.put(data)
        queue.get()
        queue.get().commit()
    with open_queue(disk) as queue:
        queue.get().commit()
        assert queue.reader().head == 2
        queue._check()
        assert queue.get().data == b"third"


def test_a_reader_elsewhere_may_save_its_place_while_the_queue_is_opened() -> None:
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        queue.reader("inside")
        queue.put(b"an item")
    failing = FailingDisk(disk)
    outside = open_reader("/data", "jobs", "outside", create=True, start="earliest", clock=ManualClock(), disk=failing)
    outside.get_nowait().commit()
    failing.arm(errno.EIO, kinds={"write"})
    with pytest.raises(OSError, match="Input/output error"):
        outside.checkpoint()
    opened = 0

    def open_meanwhile() -> None:
        nonlocal opened
        if disk.next_operation == ("rename", "jobs+outside.checkpoint.tmp"):
            disk.before_operation = None
            open_queue(disk).close()
            opened += 1

    disk.before_operation = open_meanwhile
    outside.checkpoint()  # writes a new file, as it does not know what the last one holds
    assert opened == 1
    outside.close()


def test_a_sync_that_failed_elsewhere_is_no_good_here() -> None:
    """A reader in another process syncs the journal for its checkpoint (R4). If that fails, pages are marked clean that
    are not on disk; the writer's next sync is told, as every handle of a file is."""
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.reader("inside")
    queue.put(b"an item")
    failing = FailingDisk(disk)
    outside = open_reader("/data", "jobs", "outside", create=True, start="earliest", clock=ManualClock(), disk=failing)
    outside.get_nowait().commit()
    failing.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(OSError, match="Input/output error"):
        outside.checkpoint()
    with pytest.raises(DurabilityUnknown):
        queue.sync()
    with pytest.raises(OSError, match="Input/output error"):  # a later sync is not believed here either (R9)
        outside.checkpoint()
    vanish(queue, disk, outside)


def test_counts_are_of_what_a_power_cut_has_left() -> None:
    """A place that names items which are lost: its reader, open or not, has nothing to read, and no less than that."""
    disk = CrashingDisk()
    queue = open_queue(disk)
    reader = queue.reader("r", start="earliest")
    queue.put_many([b"one", b"two"])
    reader.commit_many(read_all(reader))
    with patch.object(LocalSource, "make_durable", lambda *_: None):  # as if a sync had lied
        reader.checkpoint(durable=True)
    vanish(queue, disk)
    cut = all_lost(disk)
    queue = JournaledQueue(
        "/data", "jobs", sync="never", clock=ManualClock(), disk=cut, readers={"r": ReaderConfig(max_items=2)}
    )
    queue.put_many([b"three", b"four"])
    with pytest.raises(QueueFull):
        queue.put(b"five")
    reader = queue.reader("r")
    assert (reader.items, reader.bytes) == (2, 9)
    queue.close()


def test_a_move_to_the_archive_that_a_kill_has_cut_short_is_made_durable_by_the_next_opening() -> None:
    disk = CrashingDisk()
    options: dict[str, Any] = {"sync": "never", "segment_bytes": 4096, "archive_dir": "/archive", "disk": disk}
    queue = JournaledQueue("/data", "jobs", clock=ManualClock(1_000), **options)
    for _ in range(3):
        queue.put(bytes(3000))
    queue.sync()
    reader = queue.reader()
    reader.commit_many(read_all(reader))
    moved = [clone for kind, clone in crashes_during(disk, queue.checkpoint) if kind == "sync_directory"]
    vanish(queue, disk)
    for killed in moved:
        options["disk"] = killed
        again = JournaledQueue("/data", "jobs", clock=ManualClock(2_000), **options)
        again.put(b"syncs the folder of the queue, and not the archive")
        again.sync()
        vanish(again, killed)
        for seed in range(20):
            cut = killed.after_power_cut(random.Random(seed), PowerModel.ANY)
            assert [record.id for record in scan("/data", "jobs", archive_dir="/archive", disk=cut)][:3] == [1, 2, 3]


def test_a_put_that_failed_is_gone_at_once() -> None:
    disk = CrashingDisk()
    failing = FailingDisk(disk, mapped=False)
    queue = JournaledQueue("/data", "jobs", sync="never", clock=ManualClock(), disk=failing)
    queue.put(b"stored")
    failing.arm(errno.ENOSPC, kinds={"store"}, short_bytes=-1)
    with pytest.raises(QueueDiskFull, match="no room"):
        queue.put(b"refused" + bytes(10))  # all but its last byte is stored, and that is zero anyway
    vanish(queue, disk)
    assert contents(disk) == {1: b"stored"}


def test_a_second_name_does_not_make_a_place_void_whose_new_name_is_not_on_disk() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    queue.put_many([b"done", b"to do"])
    queue.get().commit()
    queue.checkpoint(durable=True)
    (killed,) = [
        clone for kind, clone in crashes_during(disk, lambda: queue.reader("left")) if kind == "sync_directory"
    ]
    vanish(queue, disk)
    queue = open_queue(killed)
    for kind, clone in crashes_during(killed, lambda: queue.reader("right", start="earliest")):
        for seed in range(20):
            cut = clone.after_power_cut(random.Random(seed), PowerModel.ANY)
            again = open_queue(cut)
            assert [item.data for item in read_all(again.reader("left", start="earliest"))] == [b"to do"], kind
            vanish(again, cut)
    vanish(queue, killed)


def test_a_segment_that_a_kill_has_left_unnamed_is_named_before_another_names_it() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk, segment_bytes=4096)
    queue.put(b"an item" * 500)
    queue.sync()

    def go_on() -> None:
        again = open_queue(killed)
        again.put(b"in a segment of its own")
        vanish(again, killed)

    for kind, killed in crashes_during(disk, lambda: queue.put(b"in the next one" * 100)):
        for kind_then, clone in crashes_during(killed, go_on):
            for seed in range(20):
                cut = clone.after_power_cut(random.Random(seed), PowerModel.ANY)
                assert 1 in contents(cut), (kind, kind_then)
    vanish(queue, disk)


@pytest.mark.parametrize("lives", [1, 2])
def test_what_stands_in_the_spare_file_is_no_place_where_a_power_cut_leaves_it_in_the_file(lives: int) -> None:
    """A state was appended, and in its room the disk has what is there in the spare file: an older state, as long."""
    disk = CrashingDisk()
    queue = open_queue(disk)
    reader = queue.reader("left")
    for item_id in range(1, 5):
        queue.put(b"an item")
        settle(reader, item_id, durable=True)
        if lives > 1:
            queue.close()
            queue = open_queue(disk)
            reader = queue.reader("left")
    queue.put(b"an item")
    (opened,) = read_all(reader)
    opened.commit()
    reader.checkpoint(durable=True)
    states = 0
    for model in (PowerModel.EXT4, PowerModel.ANY):
        for state in disk.power_states(model, 400):
            again = open_queue(state)
            assert again.reader("left").head == 5
            vanish(again, state)
            states += 1
    vanish(queue, disk)
    assert states > 50
