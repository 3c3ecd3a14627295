"""The owner of two shipped queues that gets killed: ``killed_shipper.py FOLDER URL``. It puts numbered items into
``in`` until there is a file ``all.put``, and takes into ``out`` what Spark publishes in the store, until there is
``done``.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship

BATCH, PACE = 5, 0.05


def main(folder: Path, url: str) -> None:
    ship = Ship(url, interval=0.1, inbox_interval=0.1)
    pause = threading.Event().wait
    with (
        JournaledQueue(folder / "queues", "in", segment_bytes=1 << 16, ship=ship) as queue,
        JournaledQueue(folder / "queues", "out", segment_bytes=1 << 16, ship=ship),
    ):
        while not (folder / "all.put").exists():
            first = queue.stats().tail_id + 1
            queue.put_many([b"%d" % number for number in range(first, first + BATCH)])
            pause(PACE)
        assert queue.shipping is not None
        queue.shipping.flush()
        (folder / "put").write_text(str(queue.stats().tail_id))
        while not (folder / "done").exists():
            pause(PACE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
