"""At the end of a world in which bits were flipped or files deleted, at any step: its queues are repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue, QueueEmpty, RepairReport, RestoreIncomplete, UnsupportedFormat, repair, verify
from kestrelpy.errors import QueueLocked, RepairRefused
from kestrelpy.work import WorkQueue
from tests.use.use_model import QueueModel
from tests.use.use_opening import FOLDER

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Disk
    from tests.use.use_world import World


def repair_at_end(w: World, model: QueueModel) -> None:
    """A repair does what its dry run says; then the queue verifies, opens, and has no item that was never put."""
    disk = w.processes[0].disk
    try:
        said = repair(FOLDER, model.name, dry_run=True, disk=disk)
        done = repair(FOLDER, model.name, disk=disk)
    except (FileNotFoundError, QueueLocked, RepairRefused, RestoreIncomplete, UnsupportedFormat):
        return  # nothing is left of it, it is a standby's, it is shipped, or its version was hit
    w.require(said.losses == done.losses, f"the dry run says {said}, and the repair {done}")
    damage = verify(FOLDER, model.name, disk=disk).damage
    w.require(not damage, f"after {done} verify says {damage}")
    open_again(w, model, done, disk)
    if not done.ok:
        w.saw("a repair of what was damaged")


def open_again(w: World, model: QueueModel, done: RepairReport, disk: Disk) -> None:
    """Open the queue without quarantine, and read all that is there."""
    if done.kind == "work queue":
        WorkQueue(FOLDER, model.name, disk=disk, ship=False).close()
        return
    process = w.processes[0]
    queue = JournaledQueue(FOLDER, model.name, clock=process.clock, disk=disk, inbox_interval=None, ship=False)
    try:
        for name in [name for name in model.readers if (name in model.named()) == bool(model.named())]:
            reader = queue.reader(name)
            items = reader.get_many(100_000, timeout=0) if reader.items else []
            reader.commit_many(items)
    except QueueEmpty:  # all that counted as unread was lost
        pass
    finally:
        queue.close()
