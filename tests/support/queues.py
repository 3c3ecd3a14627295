"""What tests do with queues: end one as a kill would, take all that is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from kestrelpy import JournaledQueue
from kestrelpy.work.records import Origin, encode_put

Sync = float | Literal["always", "never"]
"""When a queue brings to the disk what was put."""
START_MS = 1_700_000_000_000
"""What the clock of a test says at its beginning."""


def let_die(queue: JournaledQueue) -> None:
    """Leave a queue as the death of its process would: nothing is written any more, descriptors and locks are gone."""
    files = {path: path.read_bytes() for path in Path(queue.directory).iterdir()}
    with contextlib.suppress(Exception):
        queue.close()
    for path in Path(queue.directory).iterdir():
        if path not in files:
            path.unlink()
    for path, data in files.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def drain(source: Any) -> list[bytes]:
    """The data of all items there are, each committed."""
    found = []
    while (items := take_all(source)) != []:
        found += [item.data for item in items]
        source.commit_many(items)
    return found


def take_all(source: Any) -> list[Any]:
    """Open reads of all items there are."""
    try:
        return list(source.get_many(1000, timeout=0))
    except Exception as error:
        if type(error).__name__ != "QueueEmpty":
            raise
        return []


def forge_jobs(folder: Path, tubes: Iterable[str], body: bytes = b"x", queue: str = "work") -> None:
    """A work queue with a job in each of these tubes, as one makes it who writes the files by hand: a tube may have any
    name there.
    """
    with JournaledQueue(folder, queue) as journal:
        for number, tube in enumerate(tubes, 1):
            journal.put(encode_put(Origin(number, tube, None, 65536, 0.0, 60.0, START_MS, 0), body))
    (folder / f"{queue}.work").touch()
