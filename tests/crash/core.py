"""The core alone: what a disk after a crash holds for each reader, without locks, threads, windows and clocks.

A queue that opens goes through ``Recovery``, its readers through ``progress_of``, and what they read through the
journal's ``read``. Here the same is done with nothing around it, in less than half the time.
"""

from __future__ import annotations

import os
from typing import NamedTuple, cast

from kestrelpy import KestrelError
from kestrelpy._journal.format import Checkpoint, Entry
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovery
from kestrelpy._reading.backlog import BLOCK_BYTES
from kestrelpy._reading.limits import progress_of
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.source import Source
from kestrelpy.testing import CrashingDisk
from tests.crash.promise import READERS, BrokenPromise, Promise
from tests.crash.recovered import Seen, Unread, check_reader


class Glance(NamedTuple):
    """What one recovery of the core brought."""

    seen: Seen
    tail_id: int


def glance(disk: CrashingDisk, promise: Promise, *, power: bool, least: int = 0) -> Glance:
    """Recover and read everything, and hold it against what was promised. Leaves the disk recovered.

    ``least``: ids up to here were given out. Raises ``BrokenPromise``.
    """
    try:
        unread, tail_id = contents(disk, READERS, promise.now_ms)
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(10) recovering or reading raised {error!r}") from error
    if tail_id < least:
        raise BrokenPromise(f"(7) ids up to {least} were in use, and only {tail_id} of them are known now")
    known = promise.known()
    for name, items in unread.items():
        check_reader(name, items, promise, known, power=power)
    disk.kill()
    return Glance({name: {item.id: item.data for item in items} for name, items in unread.items()}, tail_id)


def contents(disk: CrashingDisk, names: tuple[str, ...], now_ms: int) -> tuple[dict[str, list[Unread]], int]:
    """What each of the readers named would get, and the last id that was given out. Leaves the disk recovered.

    Raises what an opening raises, and ``BrokenPromise`` if the figures say other than what is there.
    """
    files, journal = _recover(disk)
    there, everything = files.directory.names(), _read(journal)
    unread = {name: _unread(journal, everything, _load(files, journal, there, name), name, now_ms) for name in names}
    return unread, journal.tail_id


def _recover(disk: CrashingDisk) -> tuple[QueueFiles, Journal]:
    directory = disk.directory("/data", create=True)
    files, names = QueueFiles(directory, "jobs"), directory.names()
    files.remove_leftovers(names)
    found = Recovery(directory, "jobs", files.load_all(names), quarantine=False).run(names)
    return files, Journal(directory, "jobs", found, segment_bytes=1 << 20, randomness=os.urandom)


def _load(files: QueueFiles, journal: Journal, names: list[str], name: str) -> Checkpoint | None:
    """A reader's saved state. The first named one inherits the default reader's."""
    readers = files.reader_names(names)
    if readers == {""} and name == READERS[0]:
        return files.load("", journal.queue_id)
    return files.load(name, journal.queue_id) if name in readers else None


def _read(journal: Journal) -> dict[int, Entry]:
    """All that is there."""
    entries: dict[int, Entry] = {}
    next_id = journal.first_id
    while next_id <= journal.tail_id:
        block = journal.read(next_id, journal.tail_id, BLOCK_BYTES)
        entries.update(block.entries)
        next_id = block.next_id
    return entries


def _unread(
    journal: Journal, everything: dict[int, Entry], state: Checkpoint | None, name: str, now_ms: int
) -> list[Unread]:
    """What is not done, as far as ``state`` says, and has not expired. Its figures must say as much."""
    first_id = journal.first_id
    source = cast("Source", journal)  # as far as it is asked here
    progress = progress_of(state, source) if state else Progress(first_id - 1, *journal.before(first_id))
    left = [
        Unread(item_id, data, expires_ms, progress.error_counts.get(item_id, 0))
        for item_id, (data, _, expires_ms) in everything.items()
        if not progress.is_done(item_id)
    ]
    counts = journal.tail_id - journal.missing - progress.released_items, journal.total_bytes - progress.released_bytes
    if counts != (len(left), sum(len(item.data) for item in left)):
        raise BrokenPromise(f"(15) {name}: counts {counts}, and there are {[item.id for item in left]}")
    return [item for item in left if item.expires_ms is None or item.expires_ms > now_ms]
