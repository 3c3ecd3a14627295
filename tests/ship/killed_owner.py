"""A process that owns a shipped queue, and puts numbered lines until somebody kills it.

Arguments: folder, URL, ``acks``, the options of the store as JSON, the first number. Each line of its output is the
number of an item whose put has returned, its id, and the time then.
"""

from __future__ import annotations

import json
import sys
import time

from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship


def main() -> None:
    folder, url, acks, options, first = sys.argv[1:]
    ship = Ship(url, acks=acks, options=json.loads(options) or None, on_missing="restore")  # type: ignore[arg-type]
    with JournaledQueue(folder, "jobs", segment_bytes=64 << 10, ship=ship) as queue:
        print("open", flush=True)
        number = int(first)
        while True:
            item_id = queue.put(b"%d." % number * (1 + number % 50))
            print(number, item_id, time.monotonic(), flush=True)
            number += 1
            if acks == "disk":
                time.sleep(0.0005)


if __name__ == "__main__":
    main()
