"""Makes the golden files of the format version that this library writes: ``python -m tests.golden.make_golden``.

Run once for each format version, when it is released; the files are never made again, and this script refuses to.
Time stands still and
what is random is counted, so that nothing but the format decides about their bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kestrelpy import JournaledQueue
from kestrelpy._journal.format import FORMAT_VERSION
from kestrelpy.testing import ManualClock, MemoryDisk

HERE = Path(__file__).parent
NOW_MS = 1_700_000_000_000


def plain(queue: JournaledQueue, clock: ManualClock) -> None:
    """Items as they are put, in a segment that is not closed."""
    queue.put(b"first")
    queue.put(b"")
    clock.advance(0.255)
    queue.put(bytes(range(256)))
    queue.sync()
    queue.put("häßlich".encode())


def expiring(queue: JournaledQueue, clock: ManualClock) -> None:
    queue.put(b"soon", expires_in=1000)
    queue.put(b"never")
    queue.put(b"far", expires_at_ms=(1 << 63) - 1)


def batch(queue: JournaledQueue, clock: ManualClock) -> None:
    queue.put_many([b"one", b"", b"three"])
    queue.put(b"alone")
    queue.put_many([b"x" * 300, b"y"], expires_in=1_000_000)


def checkpoint(queue: JournaledQueue, clock: ManualClock) -> None:
    """Two readers: done spans above the head, and error counts."""
    first, second = queue.reader("first"), queue.reader("second")
    for n in range(1, 13):
        queue.put(b"item %d" % n)
    items = first.get_many(10)
    first.commit_many([items[n - 1] for n in (1, 2, 4, 5, 6, 9)])
    for _ in range(3):
        first.abort(3)
        items[2] = first.get_nowait()
    first.abort(7)
    second.commit_many(second.get_many(12)[:11])
    queue.sync()
    queue.checkpoint(durable=True)


def closed(queue: JournaledQueue, clock: ManualClock) -> None:
    """Closed properly: three segments, a footer in each, and the mark."""
    for n in range(12):
        queue.put(b"%02d" % n * 450)
        clock.advance(1)
    queue.get_nowait().commit()


def torn(queue: JournaledQueue, clock: ManualClock) -> None:
    """The last item is cut short, as by a crash."""
    queue.put(b"whole")
    queue.put(b"whole too")
    queue.put(b"torn in the middle")


CASES: dict[str, tuple[Callable[[JournaledQueue, ManualClock], None], bool]] = {
    "plain": (plain, False),
    "expiring": (expiring, False),
    "batch": (batch, False),
    "checkpoint": (checkpoint, False),
    "closed": (closed, True),
    "torn": (torn, False),
}


class Recording(JournaledQueue):
    """A queue that keeps a list of what was put: id, data, added_ms, expires_ms."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.record: list[tuple[int, str, int, int | None]] = []
        super().__init__(*arguments, **options)

    def put(self, data: Any, **options: Any) -> int:
        item_id = super().put(data, **options)
        self._note(item_id, data, **options)
        return item_id

    def put_many(self, items: Any, **options: Any) -> range:
        ids = super().put_many(items, **options)
        for item_id, data in zip(ids, items, strict=True):
            self._note(item_id, data, **options)
        return ids

    def _note(self, item_id: int, data: bytes, expires_in: int | None = None, expires_at_ms: int | None = None) -> None:
        now_ms = self._clock.time_ns() // 1_000_000
        self.record.append(
            (item_id, data.hex(), now_ms, expires_at_ms if expires_in is None else now_ms + 1000 * expires_in)
        )


def files_of(disk: MemoryDisk) -> dict[str, bytes]:
    directory = disk.directory("/q")
    found = {}
    for name in directory.names():
        if not name.endswith(".lock"):
            file = directory.open(name)
            found[name] = file.read(0, file.size())
    return found


def make(name: str) -> dict[str, bytes]:
    """The files of one case, and ``expected.json``: what is in them, told without the library's decoder."""
    work, close = CASES[name]
    disk, clock, counter = MemoryDisk(), ManualClock(NOW_MS), itertools.count(1)
    with mock.patch.object(os, "urandom", lambda size: next(counter).to_bytes(2, "big") * (size // 2)):
        queue = Recording("/q", "golden", disk=disk, clock=clock, sync="never", segment_bytes=4096)
        work(queue, clock)
        put = queue.record
        readers = {
            reader.name: {
                "head": reader.head,
                "items": reader.items,
                "bytes": reader.bytes,
                "error_counts": dict(reader._backlog.progress.error_counts),
            }
            for reader in queue.readers.values()
        }
        if not close:
            disk.kill()
        with contextlib.suppress(OSError):
            queue.close()
    files = files_of(disk)
    if name == "torn":
        segment = next(each for each in files if each.endswith(".segment"))
        used = len(files[segment].rstrip(b"\0"))
        files[segment] = files[segment][: used - 9] + bytes(len(files[segment]) - used + 9)
        put.pop()
    files["expected.json"] = json.dumps({"items": put, "readers": readers}, indent=1).encode() + b"\n"
    return files


def main() -> int:
    target = HERE / f"v{FORMAT_VERSION}"
    if target.exists():
        print(f"{target} is there: golden files are never made again", file=sys.stderr)
        return 1
    for name in CASES:
        folder = target / name
        folder.mkdir(parents=True)
        for file_name, data in make(name).items():
            (folder / file_name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
