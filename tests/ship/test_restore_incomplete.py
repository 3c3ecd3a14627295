"""A queue that is not completely restored: nobody opens it, or reads it from outside, or changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy import JournaledQueue, RestoreIncomplete, inbox, inspect, open_reader, queue_names, scan, verify
from kestrelpy.testing import MemoryDisk
from kestrelpy.work import WorkQueue

FOLDER = "/queues"
OPENINGS: dict[str, Callable[[Any], Any]] = {
    "JournaledQueue": lambda disk: JournaledQueue(FOLDER, "jobs", disk=disk),
    "WorkQueue": lambda disk: WorkQueue(FOLDER, "jobs", disk=disk),
    "open_reader": lambda disk: open_reader(FOLDER, "jobs", "audit", disk=disk, create=True),
    "scan": lambda disk: list(scan(FOLDER, "jobs", disk=disk)),
    "verify": lambda disk: verify(FOLDER, "jobs", disk=disk),
    "inspect": lambda disk: inspect(FOLDER, "jobs", disk=disk),
    "inbox.take_in": lambda disk: inbox.take_in(FOLDER, "jobs", disk=disk),
}


def unrestored(*, with_items: bool) -> MemoryDisk:
    disk = MemoryDisk()
    if with_items:
        with JournaledQueue(FOLDER, "jobs", disk=disk) as queue:
            queue.put(b"one")
            queue.reader("audit")
    disk.directory(FOLDER, create=True).create("jobs.restore").close()
    return disk


def contents(disk: MemoryDisk) -> dict[str, bytes]:
    """Every file but locks, which say who has asked for them."""
    folder = disk.directory(FOLDER)
    found: dict[str, bytes] = {}
    for name in folder.names():
        if not name.endswith(".lock") and name != "inbox":
            file = folder.open(name)
            found[name] = file.read(0, file.size())
    return found


@pytest.mark.parametrize("with_items", [False, True])
@pytest.mark.parametrize("opening", OPENINGS)
def test_every_opening_is_refused_and_changes_nothing(opening: str, *, with_items: bool) -> None:
    disk = unrestored(with_items=with_items)
    before = contents(disk)
    with pytest.raises(RestoreIncomplete, match="/queues/jobs is not completely restored") as refused:
        OPENINGS[opening](disk)
    assert refused.value.path == "/queues/jobs"
    assert contents(disk) == before
    disk.directory(FOLDER).unlink("jobs.restore")
    if opening != "WorkQueue":
        made = OPENINGS[opening](disk)
        if hasattr(made, "close"):
            made.close()


def test_other_queues_of_the_folder_do_not_care() -> None:
    disk = unrestored(with_items=True)
    with JournaledQueue(FOLDER, "jobs-2", disk=disk) as queue:
        queue.put(b"two")
    assert [each.data for each in scan(FOLDER, "jobs-2", disk=disk)] == [b"two"]
    assert queue_names(FOLDER, disk=disk) == ["jobs", "jobs-2"]
