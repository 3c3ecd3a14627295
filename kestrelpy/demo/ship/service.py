"""The service of the demo: it puts lines into two queues that are shipped, and reads them.

    python -m kestrelpy.demo.ship.service FOLDER STORE LIFE SEED

Its machine is the folder ``machine-LIFE``. The first one begins with nothing. Each later one restores the queues from
the store, and goes on. It runs until SIGTERM: then it puts no more, reads what is left, and closes. Or until it burns.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from kestrelpy import JournaledQueue, QueueEmpty
from kestrelpy.demo.ship.ledger import KEPT, LOOSE, OutsideLedger, line_of, noted
from kestrelpy.ship import Ship, restore

ACKS: dict[str, Literal["disk", "shipped"]] = {KEPT: "shipped", LOOSE: "disk"}
BATCH_LINES = {KEPT: 50, LOOSE: 5}
PAUSE_SECONDS = {KEPT: 0.0, LOOSE: 0.005}
SEGMENT_BYTES = 256 << 10
"""Small, so that a life has several of them."""


class MachineQueue:
    """One queue on one machine: a thread puts, and another one reads."""

    def __init__(self, folder: Path, store: str, life: int, seed: int, name: str) -> None:
        self._name = name
        self._seed = seed
        self._puts = OutsideLedger(folder, f"{name}.put")
        self._gots = OutsideLedger(folder, f"{name}.got")
        self._next = 1 + max((int(words[2]) for words in noted(folder, f"{name}.put") if words[0] == b"try"), default=0)
        machine = folder / f"machine-{life}"
        last_id = restore(store, name, machine).last_id if life else 0
        ship = Ship(store, acks=ACKS[name], owner=f"machine {life}")
        self._queue = JournaledQueue(machine, name, segment_bytes=SEGMENT_BYTES, ship=ship)
        self._puts.note("begin", life, last_id)
        self._gots.note("begin", life, last_id)
        self._putter = threading.Thread(target=self._guarded, args=(self._put,), name=f"{name}-put")
        self._reader = threading.Thread(target=self._guarded, args=(self._read,), name=f"{name}-read")
        self._stopping = threading.Event()
        self.failed: BaseException | None = None

    def start(self) -> None:
        self._putter.start()
        self._reader.start()

    def stop(self) -> None:
        """Put no more. Read what is left, and close the queue."""
        self._stopping.set()
        self._putter.join()
        self._reader.join()
        self._queue.close()
        self._puts.close()
        self._gots.close()

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            self.failed = error
            self._stopping.set()

    def _put(self) -> None:
        name = self._name
        while not self._stopping.is_set():
            first, last = self._next, self._next + BATCH_LINES[name] - 1
            self._puts.note("try", first, last)
            lines = [line_of(self._seed, name, number) for number in range(first, last + 1)]
            ids = self._queue.put_many(lines)
            self._puts.note("put", first, last, ids[0])
            self._next = last + 1
            time.sleep(PAUSE_SECONDS[name])

    def _read(self) -> None:
        while True:
            try:
                items = self._queue.get_many(200, timeout=0.1)
            except QueueEmpty:
                if self._stopping.is_set() and not self._putter.is_alive():
                    return
                continue
            self._gots.got((item.id, item.data) for item in items)
            self._queue.commit_many(items)


def main(arguments: list[str]) -> int:
    """One life of the service. Returns the exit status."""
    folder, store, life, seed = arguments
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    queues = [MachineQueue(Path(folder), store, int(life), int(seed), name) for name in (KEPT, LOOSE)]
    for queue in queues:
        queue.start()
    while not ended.wait(0.1):
        if any(queue.failed for queue in queues):
            break
    for queue in queues:
        queue.stop()
    failures = [queue.failed for queue in queues if queue.failed is not None]
    for failure in failures:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
