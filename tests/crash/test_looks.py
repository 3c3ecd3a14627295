"""What ``scan``, ``verify`` and ``inspect`` say of what a crash has left is what an opening says.

A real opening, of a copy of the disk, is the judge.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from functools import partial

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, inspect, open_reader, scan, verify
from kestrelpy._journal import format as fmt
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from tests.crash.recovered import read_all, vanish
from tests.regressions.test_found_by_crashes import crashes_during, open_queue, stored

pytestmark = pytest.mark.usefixtures("quiet")
Items = dict[int, bytes]


def opened(disk: CrashingDisk) -> Items | None:
    """What a reader that begins with the earliest item gets; ``None`` if the queue does not open, or reading raises."""
    copy, queue, items = disk.after_kill(), None, None
    with contextlib.suppress(CorruptJournal):
        queue = open_queue(copy)
        items = {item.id: item.data for item in read_all(queue.reader("judge", start="earliest"))}
    if queue is not None:
        vanish(queue, copy)
    return items


def looked_at(disk: CrashingDisk) -> Items | None:
    """The same by the looks, which must be of one mind. They leave no trace."""
    report = verify("/data", "jobs", disk=disk)
    items: Items | None = None
    with contextlib.suppress(CorruptJournal):
        items = {record.id: record.data for record in scan("/data", "jobs", disk=disk)}
    assert report.ok == (items is not None), report.damage
    if items is not None:
        inspection = inspect("/data", "jobs", disk=disk)
        assert report.items == len(items)
        assert (report.segments, report.last_id) == (len(inspection.segments), inspection.tail_id)
    return items


def unfinished(fails: str) -> Iterator[CrashingDisk]:
    """Crashes of every kind beside segments that could neither be made nor removed. ``fails``: what of the making."""
    disk = CrashingDisk()
    failing = FailingDisk(disk, mapped=False)
    queue = JournaledQueue("/data", "jobs", sync="never", segment_bytes=4096, clock=ManualClock(1_000), disk=failing)
    queue.put(b"first" * 700)
    for data in (b"second" * 600, b"third" * 700):
        queue.sync()
        failing.arm(errno.EIO, sticky=True, kinds={fails, "unlink"})
        with pytest.raises(OSError, match="Input/output error"):
            queue.put(b"refused" * 500)
        yield disk.after_kill()
        failing.disarm()
        for _, killed in crashes_during(disk, partial(queue.put, data)):
            yield killed
            yield killed.after_power_cut(random.Random(0), PowerModel.ANY)
    vanish(queue, disk)


def going_on(disk: CrashingDisk) -> Iterator[CrashingDisk]:
    """What a power cut leaves in the middle of an opening, and of the put behind it."""

    def work() -> None:
        with contextlib.suppress(CorruptJournal):
            queue = open_queue(working)
            queue.put(b"one more")
            vanish(queue, working)

    working = disk.after_kill()
    for at, (_, killed) in enumerate(crashes_during(working, work)):
        yield killed.after_power_cut(random.Random(at), PowerModel.ANY)


@pytest.mark.parametrize("fails", ["grow", "store"])
def test_several_segments_that_were_not_finished(fails: str) -> None:
    states, several = 0, 0
    for disk in unfinished(fails):
        for once in going_on(disk):
            for state in going_on(once):
                expected = opened(state)
                assert expected is not None
                assert looked_at(state) == expected
                states += 1
                several += len(without_footer(state)) > 1
    assert states > 500
    assert several > 50


def without_footer(disk: CrashingDisk) -> list[str]:
    folder = disk.directory("/data")
    names = [name for name in folder.names() if name.endswith(".segment")]
    return [name for name in names if b"KSTRLEND" not in folder.open(name).read(0, 1 << 20)]


@pytest.mark.parametrize("lost", [0, 1, 96])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("behind", [True, False])
def test_the_room_of_new_segments_may_hold_old_ones(lost: int, count: int, behind: bool) -> None:
    """A part of one, or all of it: a whole header, of another number."""
    disk = CrashingDisk()
    with open_queue(disk) as queue:
        queue.put(b"an item")
    old = next(name for name in disk.directory("/data").names() if name.endswith(".segment"))
    data = disk.directory("/data").open(old).read(0, 1 << 20)
    for n in range(count):
        stored(disk, f"jobs.{9000 + n if behind else 1001 + n:013d}.new.segment", bytes(lost) + data[lost:])
    if not behind:
        with JournaledQueue("/data", "jobs", clock=ManualClock(20_000), disk=(other := disk.after_kill())) as queue:
            queue.put(b"another")
        last = max(name for name in other.directory("/data").names() if name.endswith(".segment"))
        stored(disk, last, other.directory("/data").open(last).read(0, 1 << 20))
    assert looked_at(disk) == opened(disk) == {1: b"an item", **({} if behind else {2: b"another"})}


def three_segments() -> CrashingDisk:
    disk = CrashingDisk()
    for n in range(3):
        with JournaledQueue("/data", "jobs", clock=ManualClock(1_000 * (n + 1)), disk=disk) as queue:
            queue.put(b"%d" % n)
    return disk


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("spoil", ["header", "footer", "both", "all", "gone", "number", "queue", "frame"])
def test_what_an_opening_refuses_is_reported(at: int, spoil: str) -> None:
    """And what it accepts is not."""
    disk = three_segments()
    folder = disk.directory("/data")
    name = sorted(name for name in folder.names() if name.endswith(".segment"))[at]
    file = folder.open(name, write=True)
    header = fmt.decode_header(file.read(0, fmt.HEADER_BYTES))
    assert header is not None
    if spoil in ("header", "both"):
        file.write(40, b"\xff")
    if spoil in ("footer", "both"):
        file.write(file.size() - 40, b"\xff")
    if spoil == "frame":
        file.write(fmt.HEADER_BYTES, b"\xff")
    if spoil == "all":
        file.write(0, bytes(file.size()))
    if spoil == "gone":
        folder.unlink(name)
    if spoil in ("number", "queue"):
        number = 0 if spoil == "queue" else 1
        file.write(
            0,
            fmt.encode_header(
                fmt.SegmentHeader(
                    header.marker,
                    header.queue_id if number else bytes(16),
                    header.number + number,
                    *(
                        getattr(header, field)
                        for field in (
                            "first_id",
                            "base_items",
                            "base_bytes",
                            "previous_number",
                            "previous_last_id",
                            "previous_end",
                        )
                    ),
                )
            ),
        )
    disk.kill()
    assert looked_at(disk) == opened(disk)


def test_a_segment_of_an_impossible_number_and_a_mark_of_impossible_ids() -> None:
    """Nothing is passed over by an opening here, but it refuses to go on from there."""
    disk = three_segments()
    folder = disk.directory("/data")
    stored(disk, f"jobs.{fmt.LARGEST}.segment", bytes(100))
    assert opened(disk) is None
    assert [damage.offset for damage in verify("/data", "jobs", disk=disk).damage] == [0]
    folder.unlink(f"jobs.{fmt.LARGEST}.segment")
    assert looked_at(disk) == opened(disk)
    mark, _ = fmt.decode_checkpoints(folder.open("jobs.mark").read(0, 1 << 20))
    assert mark is not None
    forged = fmt.Checkpoint(mark.queue_id, "", 1 << 40, 0, 0, 0, flags=fmt.FLAG_MARK)
    folder.unlink("jobs.mark")
    stored(disk, "jobs.mark", fmt.checkpoint_prefix() + fmt.encode_checkpoint(forged))
    assert opened(disk) is None
    (damage,) = verify("/data", "jobs", disk=disk).damage
    assert "said to be given out" in damage.reason


def test_a_reader_that_was_opened_elsewhere_before_the_first_put_is_no_foreigner() -> None:
    disk = CrashingDisk()
    queue = open_queue(disk)
    outside = open_reader("/data", "jobs", "outside", clock=ManualClock(), disk=disk, create=True)
    for _ in range(2):
        assert verify("/data", "jobs", disk=disk).ok
        queue.put(b"an item")
    vanish(queue, disk, outside)
    assert verify("/data", "jobs", disk=disk).ok
