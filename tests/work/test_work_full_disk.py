"""A work queue on a full disk: what was deleted stays deleted, as room for that was held before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import QueueDiskFull
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Corner
from kestrelpy.work import WorkQueue
from kestrelpy.work.held_room import HeldRoom
from kestrelpy.work.scheduler import Scheduler
from tests.support.small_disk import SmallDisk, SmallFile

BODY = bytes(100)
MARK = "work.work"


class World:
    """One work queue on a disk of so many blocks."""

    def __init__(self, room: int = 300, **options: object) -> None:
        self.disk = SmallDisk(room)
        self.clock = ManualClock()
        self.options: dict[str, Any] = {"sync": "never", "segment_bytes": 1 << 16, "max_job_bytes": 2000, **options}
        self.queue = self.open()

    def open(self) -> WorkQueue:
        return WorkQueue("/w", clock=self.clock, disk=self.disk, **self.options)

    def put(self, count: int = 1_000_000) -> list[int]:
        """Until there is no room."""
        ids: list[int] = []
        with contextlib.suppress(QueueDiskFull):
            while len(ids) < count:
                ids.append(self.queue.put(BODY))
        return ids

    def kill(self) -> None:
        """And open what is left, with not one block free."""
        self.abandon()
        self.disk.fill()
        self.queue = self.open()

    def abandon(self) -> None:
        self.disk.kill()
        forget(self.queue)
        self.queue._abandon()

    def ids(self) -> set[int]:
        self.queue._check()
        return {job.id for job in self.queue.jobs()}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.abandon()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("order", ["random", "first in, first out", "last in, first out"])
def test_what_is_deleted_on_a_full_disk_stays_deleted(world: World, order: str, waits: bool) -> None:
    ids = world.put(3000)
    if waits:
        world.clock.advance(2)  # what is counted is written
    ids += world.put()
    world.disk.fill()
    choose = random.Random(1)
    doomed = ids[:]
    if order == "random":
        choose.shuffle(doomed)
    elif order == "last in, first out":
        doomed.reverse()
    left = set(doomed)
    for some in (doomed[:10], doomed[10:2000], doomed[2000:2001], doomed[2001:-3]):
        for job_id in some:
            world.queue.delete(job_id)
        left -= set(some)
        world.kill()
        assert world.ids() == left
        assert world.queue.stats().total_jobs == len(ids)
        assert world.queue.stats_tube("default").deletes == len(ids) - len(left)
    world.disk.room = 300
    assert world.queue.put(BODY) == len(ids) + 1
    world.clock.advance(3)
    world.kill()
    assert world.ids() == {*left, len(ids) + 1}
    assert world.queue.stats_tube("default").deletes == len(ids) - len(left)


def test_it_is_written_into_the_journal_when_there_is_room(world: World) -> None:
    ids = world.put()
    world.disk.fill()
    for job_id in ids[:-1]:
        world.queue.delete(job_id)
    assert world.queue._core.held is not None
    assert world.queue._core.held.used == len(ids) - 1
    world.disk.room = 300
    world.clock.advance(2)
    assert world.queue._core.held.used == 0
    world.kill()
    assert world.ids() == {ids[-1]}
    assert world.queue._core.held.used == 0


def test_full_and_emptied_again_and_again(world: World) -> None:
    """Slots are used, cleared and used again, over kills."""
    choose = random.Random(2)
    live: set[int] = set()
    for turn in range(12):
        world.disk.room = 40 * (turn % 3)
        live |= set(world.put())
        world.disk.fill()
        doomed = choose.sample(sorted(live), int(len(live) * choose.random()))
        for job_id in doomed:
            world.queue.delete(job_id)
        live -= set(doomed)
        if turn % 2:
            world.clock.advance(1.5)
        if choose.random() < 0.7:
            world.kill()
        assert world.ids() == live
    world.disk.room = 1000
    world.clock.advance(5)
    assert world.put(10)
    assert {job.id for job in world.queue.jobs()} > live


def test_a_put_is_refused_that_has_no_room_for_its_end(world: World) -> None:
    with patch.object(HeldRoom, "hold", side_effect=OSError(28, "no room")):
        assert 0 < len(world.put()) < 1000
        with pytest.raises(QueueDiskFull):
            world.queue.put_many([BODY] * 1000, tube="new")
        assert world.queue.tubes() == ["default"]
    assert world.queue.put(BODY)
    assert world.queue.put_many([BODY] * 1000)


def test_a_delete_for_which_no_room_could_be_held_is_refused(world: World) -> None:
    """A queue of a version that held none, opened when the disk was full."""
    ids = world.put()
    world.abandon()
    file = world.disk.directory("/w").open(MARK, write=True)
    file.truncate(100)
    world.disk.fill()
    world.queue = world.open()
    with pytest.raises(QueueDiskFull):
        world.queue.delete(ids[0])
    session = world.queue.session()
    job = session.reserve(0)
    with pytest.raises(QueueDiskFull):
        job.delete()
    assert session.reserved == (job.id,)
    assert len(world.ids()) == len(ids)
    world.disk.room = 20
    job.delete()
    world.kill()
    assert world.ids() == {*ids} - {job.id}


def test_a_mark_that_somebody_removed_is_made_again(world: World) -> None:
    world.disk.directory("/w").unlink(MARK)
    ids = world.put()
    world.disk.fill()
    world.queue.delete(ids[0])
    world.kill()
    assert world.ids() == {*ids[1:]}


def test_what_has_expired_on_a_full_disk_stays_away(world: World) -> None:
    world.queue.put(BODY, expires_in=5)
    world.put()
    world.disk.fill()
    world.clock.advance(6)
    deletes = world.queue.stats_tube("default").deletes
    assert 1 not in world.ids()
    world.clock.jump(-60)
    world.kill()
    assert 1 not in world.ids()
    assert world.queue.stats_tube("default").deletes == deletes == 0


def test_an_interrupted_delete_leaves_a_job_that_lives(world: World) -> None:
    """Its slot is written, the job is still there in memory: so it is after a restart."""
    ids = world.put()
    world.disk.fill()
    with patch.object(Scheduler, "remove", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        world.queue.delete(ids[5])
    world.queue.delete(ids[6])
    assert world.queue.peek(ids[5])
    world.kill()
    assert world.ids() == {*ids} - {ids[6]}
    world.disk.room = 100
    world.clock.advance(3)
    assert world.ids() == {*ids} - {ids[6]}


def test_a_job_that_was_carried_is_deleted_for_good() -> None:
    """The record that put it, and the one that it was written anew with, are both in the journal."""
    world = World(room=60, segment_bytes=4096)
    old = world.queue.put(BODY)
    for _ in range(400):
        world.queue.delete(world.queue.put(BODY))
        world.clock.advance(0.2)
    assert world.queue.stats().records_migrated
    world.put()
    world.disk.fill()
    world.queue.delete(old)
    world.kill()
    assert old not in world.ids()
    world.abandon()


def test_a_lot_of_room_is_given_back(world: World) -> None:
    world.disk.room = 100_000
    ids = list(world.queue.put_many([b""] * 60_000))
    file = world.disk.directory("/w").open(MARK)
    assert file.size() > 24 * len(ids)
    for job_id in ids[:-10]:
        world.queue.delete(job_id)
    world.clock.advance(2)
    assert file.size() < 10_000
    ids = world.put(1000)
    world.queue._check()
    world.disk.fill()
    world.put()
    world.queue.delete(ids[0])
    world.kill()
    assert ids[0] not in world.ids()


# -- a power cut -----------------------------------------------------------------------------------------------------


def full(disk: CrashingDisk) -> None:
    """From here on nothing is made or grows."""

    def refuse() -> None:
        kind, name = disk.next_operation
        node, offset, data = disk._in_flight or (None, 0, b"")
        if kind in ("grow", "create") or (kind == "write" and node is not None and offset + len(data) > node.size):
            raise OSError(28, "no room", name)

    disk.before_operation = refuse


def cut(disk: CrashingDisk, clock: ManualClock, queue: WorkQueue) -> WorkQueue:
    left = disk.after_power_cut(Corner(last=False), PowerModel.ANY)
    disk.kill()
    forget(queue)
    queue._abandon()
    return WorkQueue("/w", clock=clock, disk=left, sync="always", segment_bytes=1 << 14, max_job_bytes=2000)


@pytest.mark.parametrize("sync", ["always", 0.1])
def test_what_is_deleted_on_a_full_disk_survives_the_power(sync: Any) -> None:
    disk, clock = CrashingDisk(), ManualClock()
    queue = WorkQueue("/w", clock=clock, disk=disk, sync=sync, segment_bytes=1 << 14, max_job_bytes=2000)
    ids = [queue.put(BODY) for _ in range(100)]
    queue.sync()
    full(disk)
    with contextlib.suppress(QueueDiskFull):
        while True:
            ids.append(queue.put(BODY))
    session = queue.session()
    for job_id in ids[::2]:
        queue.delete(job_id)
    session.reserve(0).delete()
    queue = cut(disk, clock, queue)
    assert [job.id for job in queue.jobs()] == ids[3::2]
    queue.close()


def test_no_slot_names_a_record_that_a_power_cut_takes_away() -> None:
    """Ids that are lost are given out again: a slot that was on disk before them would end another job."""
    disk, clock = CrashingDisk(), ManualClock()
    queue = WorkQueue("/w", clock=clock, disk=disk, sync="never", max_job_bytes=2000)
    ids = [queue.put(b"") for _ in range(10)]
    full(disk)
    for body in (bytes(2000), b""):
        with contextlib.suppress(QueueDiskFull):
            while True:
                ids.append(queue.put(body))
    happened: list[tuple[str, str]] = []
    refuse = disk.before_operation
    assert refuse is not None

    def look() -> None:
        happened.append(disk.next_operation)
        refuse()

    disk.before_operation = look
    for job_id in reversed(ids[-10:]):
        queue.delete(job_id)
    kinds = [(kind, name.rpartition(".")[2]) for kind, name in happened if kind in ("sync", "write")]
    assert kinds.index(("sync", "segment")) < kinds.index(("write", "work"))
    disk.before_operation = None
    queue.close()


def test_a_sync_that_fails_is_not_tried_again(world: World) -> None:
    """What it was to bring to the disk may be nowhere but in the cache: a second sync proves nothing."""
    world.abandon()
    world.options["sync"] = "always"
    world.queue = world.open()
    ids = world.put()
    world.disk.fill()
    bad = patch.object(SmallFile, "sync", side_effect=OSError(5, "bad"))
    with bad, pytest.raises(OSError, match="bad"):
        world.queue.delete(ids[0])
    for _ in range(2):
        with pytest.raises(OSError, match="bad"):
            world.queue.delete(ids[1])
