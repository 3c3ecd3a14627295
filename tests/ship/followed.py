"""A folder that follows a log, without a thread: look by look, of as much of the log as the test lets be seen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kestrelpy import scan, verify
from kestrelpy.ship import Listed, Store
from kestrelpy.ship.following import Follower
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.standby_folder import StandbyFolder
from kestrelpy.ship.store import Listing
from tests.ship.restores import HERE, rest_due, rest_of
from tests.ship.shipped import QUEUE, Shipper

URL = "store://of/the/test"
_NUMBERED = re.compile(r".*/(?:log|manifest)/([0-9]{16})")


class Window:
    """A store of which the slots and manifests up to ``limit`` are seen."""

    def __init__(self, store: Store, limit: int = 1 << 50) -> None:
        self.store = store
        self.limit = limit

    def _is_seen(self, key: str) -> bool:
        match = _NUMBERED.fullmatch(key)
        return match is None or int(match[1]) <= self.limit

    def describe(self) -> str:
        return self.store.describe()

    def create(self, key: str, data: bytes) -> bool:
        raise AssertionError(f"a standby creates nothing, and not {key} with {len(data)} bytes")

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self.store.read(key, start, length) if self._is_seen(key) else None

    def list(self, prefix: str) -> Listing:
        return [Listed(*each) for each in self.store.list(prefix) if self._is_seen(each.key)]

    def delete(self, keys: Iterable[str]) -> None:
        raise AssertionError(f"a standby deletes nothing, and not {list(keys)}")


class Followed:
    """A standby's files on ``disk``, and its follower. ``seconds``: the time that has passed."""

    def __init__(self, store: Store, disk: Any, *, url: str = URL) -> None:
        self.window = Window(store)
        self.disk = disk
        self.seconds = 0.0
        shipped = ShippedQueue(self.window, QUEUE)
        self.folder = StandbyFolder(disk.directory(HERE, create=True), shipped, url, disk)
        self.folder.lock()
        self.follower = Follower(self.folder, shipped, lambda: self.seconds)

    def to(self, slot: int) -> None:
        """Follow up to that slot."""
        self.window.limit = slot
        while self.follower.look():
            self.folder._check()
        self.folder._check()

    def close(self) -> None:
        self.folder.unlock()
        self.folder.directory.close()


@contextlib.contextmanager
def followed(store: Store, disk: Any) -> Iterator[Followed]:
    made = Followed(store, disk)
    try:
        yield made
    finally:
        made.close()


def follow_to_end(store: Store, disk: Any) -> None:
    """Follow a log to its end, and leave the folder."""
    with followed(store, disk) as here:
        here.to(1 << 50)


def check_followed(shipper: Shipper, disk: Any, at: int = -1) -> None:
    """Compare a folder that nobody follows any more with the log at its slot ``at``. The queue is opened for that."""
    moment = shipper.moments[at]
    due = {key: data for key, data in shipper.items.items() if key <= moment.last_id}
    there = [(record.id, record.data) for record in scan(HERE, QUEUE, disk=disk)]
    assert there == sorted(due.items())[len(due) - len(there) :]
    assert verify(HERE, QUEUE, disk=disk).ok
    names = disk.directory(HERE).names()
    assert f"{QUEUE}.standby" in names
    assert f"{QUEUE}.restore" not in names
    assert rest_of(disk) == rest_due(moment, shipper.items)
    assert f"{QUEUE}.standby" not in disk.directory(HERE).names()
