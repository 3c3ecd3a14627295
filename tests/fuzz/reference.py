"""Small queues whose every item is known, as the files that a close or a death of the process leaves: what is damaged.

``healthy(seed)`` makes one; the same seed makes the same bytes. ``small()`` is the one of about 2 KB whose every bit is
flipped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from kestrelpy import JournaledQueue, Reader
from kestrelpy._journal.format import decode_checkpoints
from kestrelpy._process import forget
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.fuzz.naive_reader import read_segment

FOLDER = "/q"
NAME = "jobs"
NOW_MS = 1_700_000_000_000
SEGMENT_BYTES = 4096


@dataclass
class Case:
    """The files of one queue and the truth about it."""

    files: dict[str, bytes]
    put: dict[int, bytes] = field(default_factory=dict)
    torn: list[tuple[int, bytes]] = field(default_factory=list)
    """Put under an id, then torn off by a crash: its id may have been given out again."""
    older: list[dict[str, bytes]] = field(default_factory=list)
    """The same files at earlier moments."""
    queue_ids: set[bytes] = field(default_factory=set)
    """Whose the segments are; filled in when it is asked for."""


def files_of(disk: MemoryDisk) -> dict[str, bytes]:
    """What is in the folder, but for the locks and the spare files, which say nothing. Of checkpoints what is in use,
    as older versions made them: what is done to the zeros behind does nothing.
    """
    directory = disk.directory(FOLDER)
    found = {}
    for name in directory.names():
        if not name.endswith((".lock", ".tmp")):
            file = directory.open(name)
            data = file.read(0, file.size())
            in_use = decode_checkpoints(data)[1] if name.endswith((".checkpoint", ".mark")) else len(data)
            found[name] = data[:in_use]
    return found


def disk_of(files: Mapping[str, bytes]) -> MemoryDisk:
    """A disk that holds these files."""
    disk = MemoryDisk()
    directory = disk.directory(FOLDER, create=True)
    for name, data in files.items():
        directory.create(name).write(0, data)
    return disk


@contextlib.contextmanager
def counted_randomness(generator: random.Random) -> Iterator[None]:
    """What the library takes from the system's randomness comes from the seed."""
    with mock.patch.object(os, "urandom", generator.randbytes):
        yield


def open_queue(disk: MemoryDisk, **options: Any) -> JournaledQueue:
    return JournaledQueue(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS + 1000), **options)


def let_die(queue: JournaledQueue, disk: MemoryDisk) -> None:
    """The death of the process: nothing is written any more."""
    disk.kill()
    forget(queue)
    queue._abandon()


def healthy(seed: int, steps: int = 12) -> Case:
    """A queue with batches, expiry, one reader or two, rotations, deaths with torn tails, and a close or a death at the
    end.
    """
    generator = random.Random(seed)
    case = Case({})
    disk = MemoryDisk()
    with counted_randomness(generator):
        for _ in range(generator.randint(1, 3)):
            queue = open_queue(disk, sync="never", segment_bytes=SEGMENT_BYTES)
            readers = [queue.reader(name) for name in (("a", "b") if seed % 3 == 0 else ("",))]
            for _ in range(generator.randint(1, steps)):
                step(queue, readers, generator, case)
                if generator.random() < 0.1:
                    case.older.append(files_of(disk))
            end(queue, disk, generator, case)
    case.files = files_of(disk)
    return case


def step(queue: JournaledQueue, readers: list[Reader], generator: random.Random, case: Case) -> None:
    """One call, chosen by the generator."""
    choice = generator.random()
    if choice < 0.55:
        data = generator.randbytes(generator.choice([0, 1, 5, 30, 100, 100, 700]))
        case.put[queue.put(data, expires_in=generator.choice([None, None, 1e6]))] = data
    elif choice < 0.75:
        items = [generator.randbytes(generator.randint(0, 40)) for _ in range(generator.randint(1, 6))]
        ids = queue.put_many(items, expires_in=generator.choice([None, 1e6]))
        case.put.update(zip(ids, items, strict=True))
    elif choice < 0.87:
        reader = generator.choice(readers)
        if reader.items > reader.open_items:
            taken = reader.get_many(generator.randint(1, 5))
            reader.abort(taken.pop())
            reader.commit_many([item for item in taken if generator.random() < 0.7])
    elif choice < 0.94:
        queue.sync()
    else:
        queue.checkpoint(durable=generator.random() < 0.5)


def end(queue: JournaledQueue, disk: MemoryDisk, generator: random.Random, case: Case) -> None:
    """A close, a death, or a death that tears off the end of what was not durable, as a power cut may."""
    durable_id = queue.stats().durable_id
    if generator.random() < 0.5:
        queue.close()
        return
    let_die(queue, disk)
    if generator.random() < 0.5:
        return
    name = max((name for name in files_of(disk) if name.endswith(".segment")), default=None)
    if name is None:
        return
    data = files_of(disk)[name]
    last = read_segment(int(name.split(".")[1]), data).frames[-1:]
    if last and last[0].first_id > durable_id:
        at = generator.randrange(last[0].offset, last[0].end)
        disk.directory(FOLDER).open(name, write=True).write(at, bytes(len(data) - at))
        if data[at : last[0].end].strip(b"\0"):
            for record in last[0].records:
                case.torn.append((record.id, case.put.pop(record.id)))


@functools.cache
def small() -> Case:
    """About 2 KB: a batch, an expiry, a closed segment and an open one, two readers with spans and error counts."""
    case, disk = Case({}), MemoryDisk()
    with counted_randomness(random.Random(1)):
        for life in (1, 2):
            queue = open_queue(disk, sync="never")
            first, second = queue.reader("a"), queue.reader("b")
            items = [b"%d of life %d" % (n, life) for n in range(6)]
            case.put.update(zip(queue.put_many(items), items, strict=True))
            case.put[queue.put(b"expires", expires_in=1e6)] = b"expires"
            for n in range(4):
                case.put[queue.put(b"item %d" % n)] = b"item %d" % n
            queue.sync()
            case.put[queue.put(b"")] = b""
            taken = first.get_many(5)
            first.commit_many([taken[0], taken[2]])
            first.abort(taken[1])
            second.commit_many(second.get_many(2))
            queue.checkpoint(durable=True)
            case.put[queue.put(b"after the checkpoint")] = b"after the checkpoint"
            if life == 1:
                queue.close()
            else:
                let_die(queue, disk)
    files = files_of(disk)
    case.files = {name: trimmed(name, data) for name, data in files.items()}
    return case


def trimmed(name: str, data: bytes) -> bytes:
    """A segment with few of the zeros that wait behind its frames."""
    return data.rstrip(b"\0") + bytes(64) if name.endswith(".segment") and data.endswith(bytes(64)) else data
