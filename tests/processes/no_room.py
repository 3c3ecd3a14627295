"""Disks that fill up at every byte and at every page: a put that finds no room leaves nothing, and all else goes on.

Every byte: ``RLIMIT_FSIZE``, for which the kernel writes what fits, says so, and refuses the rest. Every page: a tmpfs
of one's own (root) with a ballast in it, where whatever is left runs out anywhere: segments, checkpoints, locks. For
each room the same queue is filled, emptied, filled again, given room and reopened; and so is a copy of what the death
of its process would leave before it is given room. ``run_bytes`` and ``run_pages`` take the rooms that they are to try
and return what they counted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

from kestrelpy import JournaledQueue, QueueDiskFull, QueueEmpty, scan
from tests.processes.loop_mount import let_go, mount, own_mounts
from tests.processes.programs import as_program, rounds


class Size(NamedTuple):
    """Of a queue that is to run out of room."""

    segment_bytes: int
    item_bytes: int


SMALL = Size(4096, 500)
GROWING = Size(256 << 10, 20_000)
"""Its segments grow, from 64 KiB on."""
BYTES = SMALL.segment_bytes + 300
"""A bit more than a segment: above it there is room for all files of the small queue."""
PAGES = 150
"""More than the growing queue's segments take."""
ITEMS = 18
FEW = 2
"""So many and a few more fit into one segment of the small queue."""
ENOUGH = 2 << 20

Limited = Callable[[int], AbstractContextManager[None]]


class Case:
    """One queue in one folder, with little room."""

    def __init__(self, folder: str, size: Size, sync: Literal["always", "never"], counts: Counter[str]) -> None:
        self._folder, self._size, self._sync, self._counts = folder, size, sync, counts
        self._put: dict[int, bytes] = {}
        self._committed: set[int] = set()
        self._saved: set[int] = set()
        self._number = 0

    def run(self, limited: AbstractContextManager[None], *, begun: bool, puts: int) -> None:
        """``begun``: the room is limited when there is a segment already, and a checkpoint. Then twice ``puts``."""
        queue = self._open(self._folder) if begun else None
        if queue is not None:
            queue.reader("a", start="earliest")
            self._put_some(queue, 3)
        with limited:
            try:
                queue = queue or self._open(self._folder)
            except OSError:
                self._counts["openings refused"] += 1
            else:
                self._fill(queue, puts)
                self._empty(queue)
                self._fill(queue, puts)
        self._check_again(shutil.copytree(self._folder, f"{self._folder}.killed"))
        self._go_on(queue or self._open(self._folder))
        self._check_again(self._folder)

    def _open(self, folder: str) -> JournaledQueue:
        return JournaledQueue(
            folder, "jobs", sync=self._sync, segment_bytes=self._size.segment_bytes, checkpoint_interval=3600
        )

    def _item(self) -> bytes:
        self._number += 1
        return (b"%06d" % self._number) * (self._size.item_bytes // 6)

    def _put_some(self, queue: JournaledQueue, count: int) -> None:
        for _ in range(count):
            item = self._item()
            self._put[queue.put(item)] = item

    def _fill(self, queue: JournaledQueue, puts: int) -> None:
        """Put until it is full, and then some more: nothing is left of what is refused."""
        try:
            queue.reader("a", start="earliest")
        except OSError:  # its checkpoint finds no room
            self._counts["readers refused"] += 1
        for _ in range(puts):
            item = self._item()
            try:
                self._put[queue.put(item)] = item
            except QueueDiskFull:
                self._counts["refused"] += 1
        self._check_there(self._folder)

    def _empty(self, queue: JournaledQueue) -> None:
        """Gets and commits go on; a checkpoint may find no room, and then counts for nothing."""
        try:
            reader = queue.reader("a", start="earliest")
        except OSError:
            return
        items = []
        with contextlib.suppress(QueueEmpty):
            items = reader.get_many(1000, timeout=0)
        assert [item.data for item in items] == list(self._put.values())
        reader.commit_many(items)
        self._committed.update(item.id for item in items)
        try:
            queue.checkpoint()
        except OSError:
            self._counts["checkpoints refused"] += 1
        else:
            self._saved |= self._committed

    def _go_on(self, queue: JournaledQueue) -> None:
        """There is room again."""
        self._put_some(queue, 3)
        self._check_there(self._folder)
        queue._check()
        queue.close()

    def _check_there(self, folder: str) -> None:
        """Every item that is kept is one that was acknowledged, and what is missing of those was retired."""
        there = {record.id: record.data for record in scan(folder, "jobs")}
        assert there.items() <= self._put.items(), "there is an item that was refused"
        gone = self._put.keys() - there.keys()
        assert gone <= self._saved, f"acknowledged and gone: {sorted(gone)}"
        assert list(there) == sorted(there)

    def _check_again(self, folder: str) -> None:
        """After reopening: what was not saved as done comes, and nothing else, in order."""
        with contextlib.closing(self._open(folder)) as queue:
            self._check_there(folder)
            left = []
            with contextlib.suppress(QueueEmpty):
                left = queue.reader("a", start="earliest").get_many(1000, timeout=0)
            ids = [item.id for item in left]
            assert ids == sorted(ids)
            assert not self._saved & set(ids), f"saved as done and delivered again: {sorted(self._saved & set(ids))}"
            assert all(self._put[item.id] == item.data for item in left)
            assert self._put.keys() - self._committed <= set(ids), "there are items that do not come"
            queue._check()


def _run(rooms: Iterable[int], folder: str, sizes: Sequence[Size], limited: Limited) -> Counter[str]:
    counts: Counter[str] = Counter()
    for room in rooms:
        for size, begun in itertools.product(sizes, (False, True)):
            sync: Literal["always", "never"] = "never" if (room + begun) % 2 else "always"
            # A limit below what a file has already lets no footer be written into it, though its room is reserved; a
            # full disk does. So there is no rotation then.
            puts = FEW if begun and limited is files_up_to and room < size.segment_bytes else ITEMS
            place = os.path.join(folder, "queues")
            counts["rooms"] += 1
            try:
                Case(place, size, sync, counts).run(limited(room), begun=begun, puts=puts)
            except BaseException as error:
                error.add_note(f"with room for {room}, {size}, sync={sync!r}, begun={begun}")
                raise
            finally:
                for each in (place, f"{place}.killed"):
                    shutil.rmtree(each, ignore_errors=True)
    return counts


def _in_time(rooms: Sequence[int], seconds: float | None) -> Iterator[int]:
    for room, _ in zip(rooms, rounds(None, seconds), strict=False):
        yield room


# -- every byte ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process may grow above ``size``. (Python ignores SIGXFSZ; so it is an error, EFBIG.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_bytes(seed: int, *, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Files end at every byte up to a bit over a segment; with ``limit`` where a checkpoint or a segment just fits or
    not, and at so many others as the seed chooses; or for ``seconds``.
    """
    chosen = list(range(BYTES))
    if limit is not None and limit < BYTES:
        corners = [*range(400), *range(SMALL.segment_bytes - 20, SMALL.segment_bytes + 20)]
        chosen = sorted({*corners, *random.Random(seed).sample(chosen, limit)})
    elif seconds is not None:
        random.Random(seed).shuffle(chosen)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # syncs cost less there, and are not what is tested
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        return _run(_in_time(chosen, seconds), folder, [SMALL], files_up_to)


# -- every page ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pages_left(folder: str, pages: int) -> Iterator[None]:
    """A ballast leaves so many pages free in the file system of ``folder``."""
    ballast = Path(folder, "ballast")
    about = os.statvfs(folder)
    size = max(0, about.f_bavail - pages) * about.f_bsize
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
    try:
        yield
    finally:
        ballast.unlink()


def run_pages(seed: int, *, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """So many pages are free in all, from none to more than is needed. For root, in a process of its own mounts."""
    chosen = list(range(PAGES))
    if limit is not None and limit < PAGES:
        chosen = sorted({*range(4), *random.Random(seed).sample(chosen, limit)})
    with tempfile.TemporaryDirectory() as folder:
        mount("tmpfs", folder, "tmpfs", f"size={ENOUGH},mode=0700")
        try:
            return _run(_in_time(chosen, seconds), folder, [SMALL, GROWING], lambda pages: pages_left(folder, pages))
        finally:
            let_go(folder)


def reason_not_available() -> str | None:
    """Why ``run_pages`` can't be had; ``None`` if it can."""
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    try:
        with tempfile.TemporaryDirectory() as folder:
            mount("tmpfs", folder, "tmpfs", f"size={ENOUGH}")
            let_go(folder)
    except OSError as error:
        return f"a tmpfs can't be mounted here: {error}"
    return None


def main(
    what: str, seed: int, limit: int | None, seconds: float | None, plant: Callable[[], object] | None
) -> Counter[str]:
    """``bytes`` or ``pages``, as a program of its own."""
    if plant is not None:
        plant()
    if what == "bytes":
        return run_bytes(seed, limit=limit, seconds=seconds)
    own_mounts()
    return run_pages(seed, limit=limit, seconds=seconds)


if __name__ == "__main__":
    as_program(main)
