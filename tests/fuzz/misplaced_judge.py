"""Queues among whose files hands have been (``misplaced``) are verified and repaired, and judged by the truth of them.

1. The repair ends. A dry run says the same, and writes nothing.
2. After it ``verify`` finds nothing, a second repair finds and writes nothing, and the queue opens with
   ``on_corruption="raise"``.
3. Every item of a segment whose file was not touched is there, under its id; and no item is there that is not this
   queue's.
4. An item that is gone is said to be lost, if a reader had not had it; none that is there is said to be lost.
5. What was taken out of the queue is kept aside, byte by byte.
6. Each reader gets every item that is there and that it had not had. A new item gets a new id; so does a new job.
7. ``verify`` finds damage where ``repair`` does, and names the file. An older copy of a file, and a file of the same
   queue's archive, may not show: then nothing is lost.
8. Each published batch that was not touched is ingested once, and no batch of another queue is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from kestrelpy import JournaledQueue, QueueEmpty, RepairReport, VerifyReport, repair, scan, verify
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy.inbox.format import decode_batch_file
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.fuzz.misplaced import INBOX, MOST_JOB_BYTES, Files, World, all_of, disk_with
from tests.fuzz.reference import FOLDER, NAME, NOW_MS, Case, disk_of
from tests.fuzz.repairing import check_bytes, frames_of, require

LATER_MS = NOW_MS + 100_000
"""After all that the worlds have done."""


def judge(files: Files, world: World, touched: Collection[str], *, hides: bool = False) -> str:
    """Repair ``files``, of which those ``touched`` are not what they were in ``world``. ``hides``: what was done to
    them may not show (7). Raises ``BrokenRepair``.
    """
    disk = disk_with(files)
    checked = verify(FOLDER, NAME, disk=disk)
    report = _repaired(disk)
    require(checked.ok == report.ok, f"7: {checked.damage}, and {report.losses}")
    if not checked.ok and not hides:
        _check_named(checked, touched)
    there = _items(disk)
    _check_items(there, files, world, report)
    _check_aside(files, all_of(disk), world, report)
    if world.jobs:
        _check_jobs(disk, world, report)
    else:
        _check_going_on(disk, there, world, touched)
    require(verify(FOLDER, NAME, disk=disk).ok, "2: damaged after going on")
    return "no damage" if report.ok else "damaged"


def _items(disk: MemoryDisk) -> dict[int, bytes]:
    return {record.id: record.data for record in scan(FOLDER, NAME, disk=disk)}


def _repaired(disk: MemoryDisk) -> RepairReport:
    """Repair the queue, after a dry run (1), and again (2)."""
    clock, before = ManualClock(LATER_MS), all_of(disk)
    said = repair(FOLDER, NAME, dry_run=True, disk=disk, clock=clock)
    require(all_of(disk) == before, "1: the dry run has written")
    done = repair(FOLDER, NAME, disk=disk, clock=clock)
    facts = ("losses", "reset_readers", "refused_batches", "jobs", "kind")
    require(all(getattr(said, name) == getattr(done, name) for name in facts), f"1: {said} and {done}")
    after = all_of(disk)
    require(not done.ok or after == before, "1: nothing was damaged, and it has written")
    checked = verify(FOLDER, NAME, disk=disk)
    require(checked.ok, f"2: {checked.damage} after {done}")
    require(repair(FOLDER, NAME, disk=disk, clock=clock).ok, "2: a second repair finds damage")
    require(all_of(disk) == after, "2: a second repair has written")
    return done


def _check_named(checked: VerifyReport, touched: Collection[str]) -> None:
    """One of the files that were touched is named, by its path or in a reason (7)."""
    said = " ".join(f"{damage.path} {damage.reason}" for damage in checked.damage)
    require(any(name.removeprefix(INBOX) in said for name in touched), f"7: {touched} not named: {checked.damage}")


def _heads(files: Mapping[str, bytes]) -> dict[str, fmt.Checkpoint]:
    """The states of the readers."""
    found = {}
    for reader in file_names.readers_among(files, NAME):
        state = fmt.decode_checkpoints(files[file_names.checkpoint_name(NAME, reader)])[0]
        assert state is not None
        found[reader] = state
    return found


def _check_items(there: Mapping[int, bytes], files: Files, world: World, report: RepairReport) -> None:
    """3 and 4."""
    known, last = world.archived | world.records, max(world.records)
    added = world.jobs and report.jobs is not None  # a repair adds one record, of the last id
    strange = {key for key, data in there.items() if known.get(key) != data and not (added and key > last)}
    require(not strange, f"3: {strange} are not this queue's")
    whole: set[int] = set()
    for name in world.named(".segment"):
        if files.get(name) == world.files[name]:
            whole.update(*(frame.ids for frame in frames_of(files[name])))
    gone = world.records.keys() - there.keys()
    require(not gone & whole, f"3: {gone & whole} are gone, and were not touched: {report.losses}")
    lost = {each for first, end in report.lost_ids for each in range(first, min(end, last) + 1)}
    require(not lost & there.keys(), f"4: {lost & there.keys()} are said to be lost, and are there")
    heads = [state.head for reader, state in _heads(world.files).items() if _is_same(files, world, reader)]
    needed = {each for each in gone if heads and each > min(heads)}  # what the others needed, nothing says any more
    require(lost >= needed - _torn(world), f"4: {needed - lost} are gone, and nothing says so: {report.losses}")


def _is_same(files: Files, world: World, reader: str) -> bool:
    name = file_names.checkpoint_name(NAME, reader)
    return files.get(name) == world.files[name]


def _torn(world: World) -> set[int]:
    """The ids that nothing but their own frames says to have been put: a crash may have torn them off."""
    name = max(world.named(".segment"))
    header = fmt.decode_header(world.files[name])
    assert header is not None
    if fmt.decode_footer(world.files[name][-fmt.FOOTER_BYTES :], header) is not None:
        return set()
    durable_id = max([header.previous_last_id, *(state.watermark for state in _heads(world.files).values())])
    return {each for each in world.records if each > durable_id}


def _check_aside(files: Files, after: Files, world: World, report: RepairReport) -> None:
    """5."""
    journal = {name: data for name, data in files.items() if not name.startswith(INBOX)}
    check_bytes(journal, after, Case(world.files))
    for loss in report.losses:
        name = loss.path.removeprefix(f"{FOLDER}/")
        if name.endswith((".checkpoint", ".mark", ".batch", ".batches")):
            kept = after.get(loss.kept.removeprefix(f"{FOLDER}/"))
            require(kept is not None and kept.rstrip(b"\0") == files[name].rstrip(b"\0"), f"5: {name} is not kept")


def _check_going_on(disk: MemoryDisk, there: Mapping[int, bytes], world: World, touched: Collection[str]) -> None:
    """2, 6 and 8: the queue is opened, which ingests what was published, and drained."""
    states, clock = _heads(world.files), ManualClock(LATER_MS)
    with JournaledQueue(FOLDER, NAME, disk=disk, clock=clock, on_corruption="raise") as queue:
        new_id = queue.put(b"new")
        require(new_id > max(there, default=0), f"6: id {new_id} is given out again")
        now = _items(disk)
        for reader_name, state in states.items():
            reader = queue.reader(reader_name)
            got = {}
            with contextlib.suppress(QueueEmpty):
                got = {item.id: item.data for item in reader.get_many(10_000, timeout=0)}
            require(all(now.get(key) == data for key, data in got.items()), f"6: {reader_name!r} got other items")
            had = {key for key in now if key <= state.head or any(a <= key <= b for a, b in state.done)}
            require(got.keys() >= now.keys() - had, f"6: reader {reader_name!r} misses {now.keys() - had - got.keys()}")
        queue.checkpoint(durable=True)
    _check_batches([now[key] for key in sorted(now) if key not in there][:-1], world, touched)


def _check_batches(ingested: list[bytes], world: World, touched: Collection[str]) -> None:
    """8. ``ingested``: the items that the opening has put."""
    wanted: list[bytes] = []
    for name, items in world.batches.items():
        is_touched = name in touched or any(INBOX + part in touched for part in _parts_of(world.files[name]))
        if (
            not is_touched or ingested[len(wanted) : len(wanted) + len(items)] == items
        ):  # or what was done does not show
            wanted += items
    require(ingested == wanted, f"8: {len(ingested)} items are ingested, not {len(wanted)}")


def _parts_of(data: bytes) -> list[str]:
    """The names of the parts of a published batch."""
    batch = decode_batch_file(data)
    assert batch is not None
    return [file_names.part_name(NAME, part.part_id) for part in batch.parts]


def _check_jobs(disk: MemoryDisk, world: World, report: RepairReport) -> None:
    """2 and 6: the work queue is opened; every job is one of before, and a new one has a new id."""
    before = _jobs_of(disk_of(world.files))
    clock = ManualClock(LATER_MS)
    with WorkQueue(FOLDER, NAME, disk=disk, clock=clock, max_job_bytes=MOST_JOB_BYTES) as queue:
        bodies = {job.id: job.body for job in queue.jobs()}
        if report.ok:
            require(bodies.keys() >= before.keys(), f"3: jobs {before.keys() - bodies.keys()} are gone")
        require(all(before.get(key, body) == body for key, body in bodies.items()), "3: a job has another body")
        missing = [last for _, last in report.jobs.missing] if report.jobs is not None else []
        new_id = queue.put(b"new")
        require(new_id > max([*bodies, *missing], default=0), f"6: job {new_id} is given out again")


def _jobs_of(disk: MemoryDisk) -> dict[int, bytes]:
    """The jobs of a work queue."""
    clock = ManualClock(LATER_MS)
    with WorkQueue(FOLDER, NAME, disk=disk, clock=clock, max_job_bytes=MOST_JOB_BYTES) as queue:
        return {job.id: job.body for job in queue.jobs()}
