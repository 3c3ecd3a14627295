"""A repair that is killed, or cut short by a power cut, or finds no room, at each operation on the disk: the next one
finishes, and nothing more is lost. Planted faults are found.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from kestrelpy import JournaledQueue, KestrelError, QueueDiskFull, RepairIncomplete, RepairReport, repair, verify
from kestrelpy.inspection import repair_files
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock
from kestrelpy.testing._power import PowerModel
from tests.fuzz.reference import FOLDER, NAME, NOW_MS, disk_of, small
from tests.fuzz.repairing import BrokenRepair, all_files, goes_on, items_in, require
from tests.support.budget import ALL

pytestmark = pytest.mark.usefixtures("quiet")
MODELS = [PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY]
STATES = 12 if ALL else 3


def damaged_files() -> dict[str, bytes]:
    """Two damaged frames in one segment, a damaged header, a damaged checkpoint."""
    files = dict(small().files)
    first, second = sorted(name for name in files if name.endswith(".segment"))
    for name, at in ((first, 150), (first, 300), (second, 20), ("jobs+a.checkpoint", 60)):
        data = files[name]
        files[name] = data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]
    return files


def crashing_disk() -> CrashingDisk:
    """A disk with these files, all of them durable."""
    disk = CrashingDisk()
    folder = disk.directory(FOLDER, create=True)
    for name, data in damaged_files().items():
        file = folder.create(name)
        file.write(0, data)
        file.sync()
        file.close()
    folder.sync()
    return next(iter(disk.power_states(PowerModel.PREFIX, 1)))


def mend(disk: Any) -> RepairReport:
    return repair(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS))


def wanted() -> tuple[dict[int, bytes], tuple[tuple[int, int], ...]]:
    """What is there after a repair that nothing disturbs, and what is lost."""
    disk = disk_of(damaged_files())
    report = mend(disk)
    return items_in(disk), report.lost_ids


def finish(disk: CrashingDisk, where: str) -> None:
    """Whoever comes after the crash."""
    there, lost = wanted()
    names = disk.directory(FOLDER).names()
    if f"{NAME}.repair" in names:
        with pytest.raises(RepairIncomplete):
            JournaledQueue(FOLDER, NAME, disk=disk)
    else:  # an opening may come first: it removes what was staged
        try:
            JournaledQueue(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS), on_corruption="quarantine").close()
        except ValueError as error:
            raise BrokenRepair(f"{where}: {error}") from error
    report = mend(disk)
    after = items_in(disk)
    require(after == there, f"{where}: {there.keys() ^ after.keys()} differ after a second repair")
    require(not report.lost_ids or report.lost_ids == lost, f"{where}: {report.lost_ids} instead of {lost}")
    require(verify(FOLDER, NAME, disk=disk).ok, f"{where}: still damaged")
    require(any(name.endswith(".quarantine") for name in all_files(disk)), f"{where}: no bytes are kept")
    goes_on(disk, there)


def crash_everywhere() -> Counter[str]:
    """Crash at each operation, in each way."""
    counter = Counter[str]()
    disk = crashing_disk()
    states: list[tuple[str, CrashingDisk]] = []

    def look() -> None:
        where = f"operation {disk.operations}, {disk.next_operation}"
        states.append((f"{where}, kill", disk.after_kill()))
        for model in MODELS:
            states.extend((f"{where}, {model.name}", one) for one in disk.power_states(model, STATES))

    disk.before_operation = look
    mend(disk)
    disk.before_operation = None
    look()
    seen = set()
    for where, state in states:
        if state.digest() not in seen:
            seen.add(state.digest())
            finish(state, where)
            counter[where.rpartition(", ")[2]] += 1
    return counter


def test_m4_a_crash_at_each_operation() -> None:
    counter = crash_everywhere()
    assert counter["kill"] > 20
    assert counter.total() > 60


def test_a_crash_of_the_repair_that_resumes() -> None:
    disk = crashing_disk()
    states: list[CrashingDisk] = []
    disk.before_operation = lambda: states.append(disk.after_kill())
    mend(disk)
    resumed = [state for state in states if f"{NAME}.repair" in state.directory(FOLDER).names()]
    assert len(resumed) > 5
    state = resumed[len(resumed) // 2]
    later: list[CrashingDisk] = []
    state.before_operation = lambda: later.append(state.after_kill())
    report = mend(state)
    assert report.resumed
    assert report.lost_ids == wanted()[1]
    for at, one in enumerate(later):
        finish(one, f"operation {at} of the second")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_operation_that_fails(error: int) -> None:
    """No room, or an error, at each operation: an error is raised, and the next repair does it all."""
    counting = FailingDisk(disk_of(damaged_files()))
    mend(counting)
    items, _ = wanted()
    raised = Counter[type[Exception]]()
    for at in range(1, counting.operations + 1):
        inner = disk_of(damaged_files())
        disk = FailingDisk(inner)
        before = all_files(inner)
        disk.arm(error, at=at)
        with suppress_and_count(raised):
            mend(disk)
        disk.disarm()
        after = all_files(inner)
        if f"{NAME}.repair" not in after and f"{NAME}.mark.tmp" not in after:
            same = {name: data for name, data in after.items() if not name.endswith((".lock", ".tmp"))}
            assert same == before, f"operation {at} has left something"
        mend(inner)
        assert items_in(inner) == items
        assert verify(FOLDER, NAME, disk=inner).ok
    assert raised.total() > 20
    assert error != errno.ENOSPC or raised[QueueDiskFull] > 5


@contextmanager
def suppress_and_count(raised: Counter[type[Exception]]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raised[type(error)] += 1


# -- planted faults --------------------------------------------------------------------------------------------------


@contextmanager
def no_commit() -> Iterator[None]:
    """The steps are carried out at once."""
    with (
        mock.patch("kestrelpy.inspection.repair.commit", return_value=None),
        mock.patch.object(repair_files, "_end", return_value=None),
    ):
        yield


@contextmanager
def no_sync_of_new_files() -> Iterator[None]:
    real = repair_files.RepairStage.write

    def unsynced(self: Any, *args: Any) -> None:
        with mock.patch("kestrelpy._disk.memory.MemoryFile.sync", return_value=None):
            real(self, *args)

    with mock.patch.object(repair_files.RepairStage, "write", unsynced):
        yield


@contextmanager
def ends_too_early() -> Iterator[None]:
    """What is to be done is forgotten before it is done."""
    real = repair_files.apply_steps

    def early(files: Any, steps: Any) -> None:
        repair_files._end(files)
        with mock.patch.object(repair_files, "_end", return_value=None):
            real(files, steps)

    with mock.patch("kestrelpy.inspection.repair.apply_steps", early):
        yield


@contextmanager
def old_files_first() -> Iterator[None]:
    """The damaged files are removed before the repair is committed."""
    real = repair_files.commit

    def late(files: Any, steps: Any) -> None:
        for name in {*steps.removes, *steps.installs} & set(files.directory.names()):
            files.directory.unlink(name)
        real(files, steps)

    with mock.patch("kestrelpy.inspection.repair.commit", late):
        yield


@pytest.mark.parametrize("plant", [no_commit, no_sync_of_new_files, ends_too_early, old_files_first])
def test_a_planted_fault_is_caught(plant: Callable[[], Any]) -> None:
    with pytest.raises((BrokenRepair, KestrelError, OSError)), plant():
        crash_everywhere()
