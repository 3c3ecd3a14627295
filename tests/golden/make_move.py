"""Makes the golden files of a move under way: ``python -m tests.golden.make_move``.

A reader has given an item up, its intent is on disk, and the process is dead before anything was published. As the
other golden files, these are made once, and this script refuses to make them again.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from pathlib import Path
from unittest import mock

from kestrelpy import JournaledQueue, ReaderConfig
from kestrelpy._reading.burial import Burial  # noqa: F401 - before random bytes are counted
from kestrelpy.inbox import moves
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.golden.make_golden import NOW_MS, files_of

HERE = Path(__file__).parent / "moves" / "begun"
CONFIG = ReaderConfig(max_deliveries=1, dead_letter="dead")


def make() -> dict[str, bytes]:
    """The files, by name."""
    disk, clock, counter = MemoryDisk(), ManualClock(NOW_MS), itertools.count(1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(os, "urandom", lambda size: next(counter).to_bytes(2, "big") * (size // 2)),
        mock.patch.object(moves, "publish_move", side_effect=full),
    ):
        queue = JournaledQueue(
            "/q", "golden", disk=disk, clock=clock, sync="never", segment_bytes=4096, default_reader=CONFIG
        )
        queue.put_many([b"good", b"poison", b"good too"])
        clock.advance(1)
        items = queue.get_many(2)
        items[0].commit()
        items[1].abort(reason="ValueError: häßlich")
        files = {name: data for name, data in files_of(disk).items() if name.endswith((".segment", ".checkpoint"))}
        disk.kill()
        queue._abandon()
    return files


def main() -> int:
    if HERE.exists():
        print(f"{HERE} is there: golden files are never made again", file=sys.stderr)
        return 1
    HERE.mkdir(parents=True)
    for name, data in make().items():
        (HERE / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
