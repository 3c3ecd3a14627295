"""What the history tests share: a test beside its twin in which the relative's fault is planted, and ends of processes.

Rules:
1. A history test is a function of a folder that fails where kestrelpy has the fault. ``@history(plant)`` makes two
   tests of it: as the library is, which must pass, and with the relative's fault planted, which must fail.
2. A plant is put in from outside, by patches, and does what the relative did, as near as this library lets it.
3. All of them have a twin. ``raises`` of ``@history`` is for faults that make the library itself raise, where the
   relative raised too, or where a check of this library meets what the fault has done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, QueueEmpty, Reader
from kestrelpy._journal.recovery import Recovery
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel

FOUND = (AssertionError, pytest.fail.Exception)
"""How a test fails, unless a plant says that the library itself raises."""
START_MS = 1_700_000_000_000
CHECKPOINT = "jobs+.checkpoint"

Check = Callable[[Path], None]
Plant = Callable[[], AbstractContextManager[object]]


def history(plant: Plant, *, raises: tuple[type[BaseException], ...] = ()) -> Callable[[Check], Callable[..., None]]:
    """Make a test, and its planted twin, of a check; ``raises``: what the library raises with the fault in it."""

    def decorate(check: Check) -> Callable[..., None]:
        assert check.__doc__, "what happened there?"

        def test(tmp_path: Path, planted: bool) -> None:
            try:
                if not planted:
                    check(tmp_path)
                    return
                with plant(), pytest.raises((*FOUND, *raises)):
                    check(tmp_path)
            finally:
                close_all()

        test.__name__ = test.__qualname__ = check.__name__
        test.__module__, test.__doc__ = check.__module__, check.__doc__
        return pytest.mark.parametrize("planted", [False, True], ids=["as-it-is", "planted"])(test)

    return decorate


# -- queues on simulated disks ---------------------------------------------------------------------------------------

_opened: list[JournaledQueue] = []


def on_disk(disk: Any, **options: Any) -> JournaledQueue:
    """The queue ``jobs`` in the folder ``/q`` of a disk in memory, on a clock that stands still."""
    options = {"clock": ManualClock(START_MS), "sync": "never", **options}
    _opened.append(JournaledQueue("/q", "jobs", disk=disk, **options))
    return _opened[-1]


def in_folder(folder: Path, **options: Any) -> JournaledQueue:
    """The queue ``jobs`` in a real folder, on a clock that stands still."""
    options = {"clock": ManualClock(START_MS), "sync": "never", **options}
    _opened.append(JournaledQueue(folder, "jobs", **options))
    return _opened[-1]


def vanish(queue: JournaledQueue, disk: Any = None) -> None:
    """The death of the process: no call is made, nothing is written."""
    if disk is not None:
        disk.kill()
    forget(queue)
    queue._abandon()


def close_all() -> None:
    """Let go of every queue that a failing check has left open."""
    while _opened:
        queue = _opened.pop()
        if not queue.closed:
            forget(queue)
            queue._abandon()


def power_states(disk: CrashingDisk, limit: int, *models: PowerModel) -> Iterator[CrashingDisk]:
    """What power cuts may leave of a disk, ``limit`` states for each model (all models that a promise holds for)."""
    for model in models or (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY):
        yield from disk.power_states(model, limit)


def take(source: JournaledQueue | Reader) -> dict[int, bytes]:
    """Open reads of all items there are, by id."""
    found: dict[int, bytes] = {}
    with contextlib.suppress(QueueEmpty):
        while True:
            found |= {item.id: item.data for item in source.get_many(1000, timeout=0)}
    return found


def content(disk: Any, **options: Any) -> dict[int, bytes]:
    """What a queue on a disk in memory holds for a reader that has done nothing yet, by id; the disk is recovered."""
    queue = on_disk(disk, **options)
    found = take(queue.reader())
    vanish(queue, disk)
    return found


def segments(disk: Any) -> list[str]:
    """The names of the segments in ``/q``."""
    return sorted(name for name in disk.directory("/q").names() if name.endswith(".segment"))


def change(disk: Any, name: str, edit: Callable[[bytearray], None]) -> None:
    """Edit the bytes of a file in ``/q``."""
    file = disk.directory("/q").open(name, write=True)
    data = bytearray(file.read(0, file.size()))
    edit(data)
    file.truncate(len(data))
    file.write(0, bytes(data))
    file.close()


def item(n: int) -> bytes:
    """The data of an item."""
    return b"item %03d" % n


def read(disk: Any, name: str) -> bytes:
    """All bytes of a file in ``/q``."""
    file = disk.directory("/q").open(name)
    data: bytes = file.read(0, file.size())
    file.close()
    return data


def overwrite(disk: Any, name: str, data: bytes) -> None:
    """Let a file in ``/q`` hold these bytes and no others."""
    file = disk.directory("/q").open(name, write=True)
    file.truncate(0)
    file.write(0, data)
    file.close()


# -- a plant for two relatives ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def headerless_file_refused() -> Iterator[None]:
    """A last segment that a crash left without a header keeps the queue from opening."""

    def refuse(self: Recovery, _file: object, at: int, *_: object) -> None:
        raise CorruptJournal(self._path(self._listed.numbered[at][1]), 0, "this segment has no valid header")

    with patch.object(Recovery, "_without_header", refuse):
        yield
