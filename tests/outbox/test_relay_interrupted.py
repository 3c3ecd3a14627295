"""The relay is interrupted, killed, halted or out of room at any point: each job is moved exactly once."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator

import pytest
import sqlalchemy

from kestrelpy.testing import FailingDisk, MemoryDisk
from kestrelpy.testing._power import PowerModel
from tests.outbox.relaying import World, pointed_inbox, run_crashing, run_interrupted, run_schedule
from tests.support.budget import ALL, SEED, Tally, share

STEP = 1 if ALL else 5


def every_point() -> Iterator[int]:
    """All of them, or a fifth of them, drawn by the seed."""
    return itertools.count(1 + SEED % STEP, STEP)


@pytest.mark.parametrize("how", ["error", "kill"])
def test_interrupted_anywhere(engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for at in every_point():
        world = World(engine, f"events{at}")
        with monkeypatch.context() as patch:
            pointed_inbox(world, patch)
            world.put(7)
            goes_on = run_interrupted(world, at, how)
            world.check()
        if not goes_on:
            break
    assert at > 60


@pytest.mark.parametrize("share_of_poison", [0.0, 0.2])
def test_two_relays_of_one_name(
    engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch, tally: Tally, share_of_poison: float
) -> None:
    for seed in range(SEED, SEED + share(100)):
        world = World(engine, f"events{seed}")
        with monkeypatch.context() as patch:
            pointed_inbox(world, patch)
            counts = run_schedule(world, seed, share_of_poison=share_of_poison)
            world.check(late=counts["kills"])
        tally.add("batches of two relays", counts["batches"])
        tally.add("relays halted for good", counts["kills"])


@pytest.mark.parametrize("model", [None, PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY])
def test_crashes_at_each_operation_of_the_disk(
    engine: sqlalchemy.Engine, model: PowerModel | None, tally: Tally
) -> None:
    for at in every_point():
        world = World(engine, f"events{at}")
        world.put(7)
        goes_on = run_crashing(world, at, model)
        world.check()
        if not goes_on:
            break
    tally.add("crashes of a relay", at)
    assert at > 40


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("sticky", [False, True])
def test_each_operation_of_the_disk_fails(engine: sqlalchemy.Engine, number: int, sticky: bool, tally: Tally) -> None:
    for at in every_point():
        world = World(engine, f"events{at}")
        disk = world.disk = FailingDisk(MemoryDisk())
        world.put(7)
        moving = world.relay()
        disk.arm(number, at=at, sticky=sticky)
        with contextlib.suppress(OSError):
            world.drain(moving)
        goes_on = disk.failures > 0
        disk.disarm()
        world.drain(moving)
        world.disk = disk.inner
        world.check()
        if not goes_on:
            break
    tally.add("failing disks of a relay", at)
    assert at > 40
