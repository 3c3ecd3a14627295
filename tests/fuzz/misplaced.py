"""Queues among whose files hands have been: files of another queue, swapped, copied, older, cut, and no files at all.

``queue_world`` makes a queue with an archive, an inbox and earlier copies of its files, ``work_world`` a work queue. A
*mishap* takes ``(files, generator, world, other)``, changes ``files`` in place and returns the names of the files that
are not right any more. Files of the inbox have names that begin with ``inbox/``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kestrelpy import scan
from kestrelpy._journal import file_names
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.fuzz.reference import FOLDER, NAME, NOW_MS, SEGMENT_BYTES, counted_randomness, let_die, open_queue

ARCHIVE = "/archive"
INBOX = f"{file_names.INBOX}/"
BLOCK = 512
MOST_JOB_BYTES = 2000
Files = dict[str, bytes]


@dataclass
class World:
    """The files of one queue, and the truth about it."""

    files: Files
    archive: Files = field(default_factory=dict)
    older: list[Files] = field(default_factory=list)
    """The files at earlier moments."""
    records: dict[int, bytes] = field(default_factory=dict)
    """The items that the journal has."""
    archived: dict[int, bytes] = field(default_factory=dict)
    batches: dict[str, list[bytes]] = field(default_factory=dict)
    """The items of the published batches that are not ingested, by the names of their files."""
    jobs: bool = False
    """Whether this is a work queue."""

    def named(self, ending: str) -> list[str]:
        return sorted(name for name in self.files if name.endswith(ending))


Mishap = Callable[[Files, random.Random, World, World], list[str]]


def contents(disk: MemoryDisk, path: str, prefix: str = "") -> Files:
    """The files of a folder but for spare files, and for locks that are not a reader's: those say that it was there."""
    folder = disk.directory(path)
    found = {}
    for name in folder.names():
        is_lock = name.endswith(".lock") and "+" not in name
        if not name.endswith(".tmp") and not is_lock and name != file_names.INBOX:
            file = folder.open(name)
            found[prefix + name] = file.read(0, file.size())
            file.close()
    return found


def all_of(disk: MemoryDisk, path: str = FOLDER) -> Files:
    """The files of a queue and of its inbox."""
    found = contents(disk, path)
    if f"{path}/{file_names.INBOX}" in disk.folders:
        found |= contents(disk, f"{path}/{file_names.INBOX}", INBOX)
    return found


def published(disk: MemoryDisk, items: list[bytes], clock: ManualClock) -> str:
    """Publish a batch; returns the name of its file."""
    before = all_of(disk)
    with PartWriter(FOLDER, NAME, disk=disk, clock=clock) as writer:
        writer.add(items)
        part = writer.seal()
    assert publish(FOLDER, NAME, [part], disk=disk, clock=clock)
    (name,) = (name for name in all_of(disk).keys() - before.keys() if name.endswith(".batch"))
    return name


@functools.cache
def queue_world(seed: int) -> World:
    """A queue with two readers, an archive, a batch that is ingested, two that are not, and a close or a death."""
    generator, disk, world = random.Random(seed), MemoryDisk(), World({})
    clock = ManualClock(NOW_MS)
    with counted_randomness(generator):
        for life in range(3):
            queue = open_queue(disk, sync="never", segment_bytes=SEGMENT_BYTES, archive_dir=ARCHIVE)
            queue.checkpoint(durable=True)
            readers = [queue.reader(name) for name in "ab"]
            for _ in range(generator.randint(4, 8)):
                queue.put(generator.randbytes(generator.choice([0, 30, 400, 900, 900])))
                queue.put_many([generator.randbytes(60) for _ in range(generator.randint(1, 4))])
            queue.sync()
            if generator.random() < 0.8:
                world.older.append(all_of(disk))
            for reader in readers:
                taken = reader.get_many(generator.randint(2, 14))
                reader.commit_many([item for item in taken if generator.random() < 0.9])
            queue.checkpoint(durable=True)
            if life < 2 or generator.random() < 0.5:
                queue.close()
            else:
                let_die(queue, disk)
            clock.advance(1.0)
            if life < 2:
                world.older.append(all_of(disk))
                published(disk, [generator.randbytes(50) for _ in range(3)], clock)
                clock.advance(1.0)
        world.records = {record.id: record.data for record in scan(FOLDER, NAME, disk=disk)}
        for _ in range(2):
            items = [generator.randbytes(50) for _ in range(generator.randint(1, 3))]
            world.batches[published(disk, items, clock)] = items
            clock.advance(1.0)
    world.files, world.archive = all_of(disk), contents(disk, ARCHIVE)
    world.archived = {record.id: record.data for record in scan(ARCHIVE, NAME, disk=disk)} if world.archive else {}
    return world


@functools.cache
def work_world(seed: int) -> World:
    """A work queue with jobs in each state."""
    generator, disk, world = random.Random(f"work {seed}"), MemoryDisk(), World({}, jobs=True)
    with counted_randomness(generator):
        for _ in range(2):
            clock = ManualClock(NOW_MS)
            with WorkQueue(
                FOLDER, NAME, disk=disk, clock=clock, segment_bytes=SEGMENT_BYTES, max_job_bytes=MOST_JOB_BYTES
            ) as queue:
                for _ in range(generator.randint(4, 9)):
                    queue.put(generator.randbytes(generator.choice([30, 400, 900])))
                with queue.session() as session:
                    for job in [session.reserve(timeout=0) for _ in range(3)]:
                        getattr(job, generator.choice(["delete", "bury", "release"]))()
                world.older.append(all_of(disk))
    world.files = all_of(disk)
    world.records = {record.id: record.data for record in scan(FOLDER, NAME, disk=disk)}
    return world


def disk_with(files: Mapping[str, bytes]) -> MemoryDisk:
    """A disk that holds these files."""
    disk = MemoryDisk()
    for path, prefix in ((FOLDER, ""), (f"{FOLDER}/{file_names.INBOX}", INBOX)):
        names = [name for name in files if name.startswith(INBOX) == bool(prefix)]
        folder = disk.directory(path, create=True) if names or not prefix else None
        for name in names:
            assert folder is not None
            file = folder.create(name.removeprefix(INBOX))
            file.write(0, files[name])
            file.close()
    return disk


# -- mishaps ---------------------------------------------------------------------------------------------------------


def _pick(files: Mapping[str, bytes], generator: random.Random, ending: str) -> str:
    return generator.choice(sorted(name for name in files if name.endswith(ending)))


def _any(files: Mapping[str, bytes], generator: random.Random) -> str:
    return generator.choice(sorted(name for name in files if not name.endswith((".lock", ".limit", ".work"))))


def segment_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = _pick(files, generator, ".segment")
    files[name] = other.files[_pick(other.files, generator, ".segment")]
    return [name]


def added_segment_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    source = _pick(other.files, generator, ".segment")
    number = file_names.parse_segment(source, NAME) or 0
    name = file_names.segment_name(NAME, number + generator.choice([-7, 0, 7, 70_000]))
    if name in files:
        return []
    files[name] = other.files[source]
    return [name]


def swapped_segments(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    first, second = _pick(files, generator, ".segment"), _pick(files, generator, ".segment")
    files[first], files[second] = files[second], files[first]
    return [first, second] if first != second else []


def copied_segment(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    source = _pick(files, generator, ".segment")
    number = file_names.parse_segment(source, NAME) or 0
    name = file_names.segment_name(NAME, number + generator.choice([-1, 1, 70_000]))
    if name in files:
        return []
    files[name] = files[source]
    return [name]


def checkpoint_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = _pick(files, generator, ".checkpoint")
    files[name] = other.files[_pick(other.files, generator, ".checkpoint")]
    return [name]


def checkpoint_of_another_reader(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    names = world.named(".checkpoint")
    if len(names) < 2:
        return []
    first, second = names[:2]
    if generator.random() < 0.5:
        files[first], files[second] = files[second], files[first]
        return [first, second]
    files[second] = files[first]
    return [second]


def mark_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = file_names.mark_name(NAME)
    if name not in other.files:
        return []
    files[name] = other.files[name]
    return [name]


def older_file(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    """Of a backup, one file was put back."""
    older = generator.choice(world.older)
    name = _any(older, generator)
    if files.get(name) == older[name]:
        return []
    files[name] = older[name]
    return [name]


def archived_file(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    if not world.archive:
        return []
    name = _pick(world.archive, generator, ".segment")
    files[name] = world.archive[name]
    return [name]


def batch_twice(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    batches = world.named(".batch")
    if not batches:
        return []
    source = generator.choice(batches)
    about = file_names.parse_inbox(source.removeprefix(INBOX))
    assert about is not None
    assert about.number is not None
    name = INBOX + file_names.batch_name(NAME, about.number + generator.choice([-1, 1, 70_000]))
    if name in files:
        return []
    files[name] = files[source]
    return [name]


def batch_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    """Without the parts that it names."""
    if not other.batches:
        return []
    source = generator.choice(sorted(other.batches))
    name = source if generator.random() < 0.5 or not world.batches else generator.choice(sorted(world.batches))
    files[name] = other.files[source]
    return [name]


def ledger_of_another_queue(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = INBOX + file_names.ledger_name(NAME)
    if name not in other.files:
        return []
    files[name] = other.files[name]
    return [name]


def another_kind(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    """A file of a work queue in a queue's folder, or the other way round: but for the one that says what it is."""
    strange = queue_world(0) if world.jobs else work_world(0)
    source = generator.choice(sorted(name for name in strange.files if name.endswith((".segment", ".checkpoint"))))
    ending = source[source.rindex(".") :]
    name = source if generator.random() < 0.4 else _pick(files, generator, ending)
    files[name] = strange.files[source]
    return [name]


def all_zero(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = _any(files, generator)
    files[name] = bytes(generator.choice([len(files[name]), 4096, 1 << 20]))
    return [name]


def cut_at_a_block(files: Files, generator: random.Random, world: World, other: World) -> list[str]:
    name = _any(files, generator)
    blocks = -(-len(files[name]) // BLOCK)
    files[name] = files[name][: BLOCK * generator.randrange(max(blocks, 1))]
    return [name]


MISHAPS: dict[str, Mishap] = {
    mishap.__name__: mishap
    for mishap in (
        segment_of_another_queue, added_segment_of_another_queue, swapped_segments, copied_segment,
        checkpoint_of_another_queue, checkpoint_of_another_reader, mark_of_another_queue, older_file, archived_file,
        batch_twice, batch_of_another_queue, ledger_of_another_queue, another_kind, all_zero, cut_at_a_block,
    )
}  # fmt: skip
HIDDEN = {"older_file", "archived_file", "ledger_of_another_queue"}
"""What leaves nothing but whole files of the queue, or a file that does not say whose it is: it may not show."""
OF_ANOTHER_QUEUE = {
    *("segment_of_another_queue", "added_segment_of_another_queue", "another_kind"),
    *("checkpoint_of_another_queue", "mark_of_another_queue"),
}
"""Of these, one at a time: where more files are another queue's than its own, the queue is that one."""
