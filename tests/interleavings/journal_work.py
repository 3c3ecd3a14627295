"""A journaled queue on a disk that yields: who puts, who gets, and the accounts they keep."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any

from kestrelpy import DurabilityUnknown, KestrelError, QueueClosed, QueueEmpty, Reader
from tests.interleavings.scene import Ledger, Scene, YieldingDisk, require

LONG = 1_000_000.0
"""Seconds that end only where nobody else can do anything: a wake-up is missing then."""


class Work:
    """A queue, who puts, who gets, and the accounts."""

    def __init__(self, scene: Scene, disk: Any = None, **options: Any) -> None:
        self.scene = scene
        self.disk = disk if disk is not None else YieldingDisk(scene)
        self.sync = options.setdefault("sync", scene.rng.choice(("always", "always", 0.1, "never")))
        options.setdefault("segment_bytes", scene.rng.choice((4096, 8192, 1 << 20)))
        self.options = options
        self.queue = scene.open(self.disk, **options)
        self.ledger = Ledger(scene)

    def reader(self, name: str) -> Reader:
        self.ledger.add_reader(name)
        return self.queue.reader(name)

    # -- producers ---------------------------------------------------------------------------------------------------

    def produce(self, name: str, count: int) -> None:
        for number in range(count):
            items = [self.scene.payload(f"{name} {number}")]
            if self.scene.chance(0.2):
                items.append(self.scene.payload(f"{name} {number} too"))
            self.ledger.doubtful.update(items)  # for who looks at it in the middle of the put
            try:
                ids = self._put(items)
            except DurabilityUnknown:
                return
            except (QueueClosed, OSError) as error:  # OSError: the disk failed before anything was stored
                if "erased" not in str(error):  # else somebody may have seen the item in time
                    self.ledger.doubtful.subtract(items)
                    self.ledger.refused.update(items)
                return
            for item_id, data in zip(ids, items, strict=False):  # none: it was not waited for
                self.ledger.acknowledge(item_id, data)

    def _put(self, items: list[bytes]) -> list[int]:
        queue, timeout = self.queue, LONG
        if len(items) > 1:
            ids = list(queue.put_many(items, timeout=timeout))
        elif self.scene.chance(0.3):
            future = queue.put_future(items[0], timeout=timeout)
            future.add_done_callback(self._check_free)
            if self.scene.chance(0.2):  # which does not take the item back
                future.cancel()
            try:
                ids = [future.result()]
            except CancelledError:
                return []
        else:
            ids = [queue.put(items[0], timeout=timeout)]
        if self.sync == "always" and ids:
            require(
                max(queue._journal.durable_id, queue._syncer.commit.durable_id) >= ids[-1],
                "acknowledged before its sync",
            )
        return ids

    def _check_free(self, future: Future[Any]) -> None:
        if not future.cancelled():
            self.scene.check_free("a future is completed")

    # -- consumers ---------------------------------------------------------------------------------------------------

    def consume(self, reader: Reader) -> None:
        """Get and settle until the reader is closed."""
        while True:
            try:
                for item in self._get(reader):
                    self.scene.point()
                    self.ledger.settle(reader, item)
            except QueueEmpty:
                continue
            except (QueueClosed, DurabilityUnknown):
                return
            except KestrelError as error:  # of a future with a timeout
                require("maintenance thread" in str(error), f"{error!r}")

    def _get(self, reader: Reader) -> list[Any]:
        way = self.scene.rng.randrange(8)
        if way == 0:
            items = [reader.get(timeout=0.5)]
        elif way == 1:
            items = reader.get_many(3, timeout=LONG)
        elif way in (2, 3):
            items = self._get_future(reader)
        elif way == 4:
            reader.peek(0.5)
            return []
        else:
            items = [reader.get()]
        for item in items:
            self.ledger.deliver(reader.name, item)
        return items

    def _get_future(self, reader: Reader) -> list[Any]:
        future = reader.get_future(self.scene.rng.choice((None, 0.5)))
        future.add_done_callback(self._check_free)
        self.scene.point()
        return [] if self.scene.chance(0.4) and future.cancel() else [future.result()]

    def settle_all(self, *readers: Reader) -> None:
        """Wait until every reader has committed everything, also what was put and not waited for. Nothing is done
        here that would wake anybody: a sync would.
        """
        until = self.scene.scheduler.now + 100
        while self.queue._source.pending or any(reader.items for reader in readers):
            self.scene.sleep(0.05)
            require(self.scene.scheduler.now < until, "somebody was not woken")

    # -- the end -----------------------------------------------------------------------------------------------------

    def reopen_and_check(self, *names: str, crashed: bool = False, dropped: int = 0) -> None:
        """What the readers are still given by a queue opened on the same files."""
        queue = self.scene.open(self.disk, sync="never")
        for name in names:
            rest = drain(queue.reader(name))
            self.ledger.check_rest(name, rest, crashed=crashed, dropped=dropped)
        queue._check()
        queue.close()


def drain(reader: Reader) -> dict[int, bytes]:
    rest: dict[int, bytes] = {}
    while True:
        try:
            item = reader.get_nowait()
        except QueueEmpty:
            return rest
        rest[item.id] = item.data
        reader.commit(item)
