"""Stores of objects for tests: in memory, and simulated with all that may go wrong between a client and a store.

A test of lost answers, in short::

    store = SimulatedStore()
    store.before_request = lambda request: Fault.LOST_AFTER if request.kind == "create" else Fault.NONE
    client = store.client("owner")
    ...  # client.create() is carried out, and raises StoreUnavailable
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from kestrelpy.clock import Clock, SystemClock
from kestrelpy.ship import Listed, Store, StoreUnavailable, check
from kestrelpy.ship.store import Listing
from kestrelpy.testing.clock import ManualClock

T = TypeVar("T")
__all__ = ["Fault", "MemoryStore", "Request", "SimulatedStore", "check_store"]


def check_store(make: Callable[[], Store], *, races: int = 20) -> None:
    """Raise ``AssertionError`` if a store is not what ``Store`` says: for a store of your own, or a bucket of yours.

    ``make`` opens the store; it is called twice, and each of the two must see what the other one does. What is created
    is deleted at the end. ``races``: as in ``kestrelpy.ship.check``, which this calls.
    """
    one, other = make(), make()
    report = check(one, races=races)
    wrong = [f"{result.name}: {result.detail}" for result in report.results if not result.ok]
    assert not wrong, "; ".join(wrong)
    key = "probe/two-clients"
    assert one.create(key, b"one"), f"{key} was there already"
    try:
        assert other.read(key) == b"one", "one client does not see what the other one has created"
        assert not other.create(key, b"other"), "one client has created what the other one had created"
    finally:
        other.delete([key])
    assert one.read(key) is None, "one client sees what the other one has deleted"


class MemoryStore:
    """A ``Store`` in memory, for tests. ``clock``: gives the objects' dates."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}  # guarded by self._lock

    def describe(self) -> str:
        return "a store in memory"

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data), self._clock.time_ns() // 1_000_000
            return True

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        with self._lock:
            found = self._objects.get(key)
        return found[0][start : None if length is None else start + length] if found is not None else None

    def list(self, prefix: str) -> Listing:
        with self._lock:
            every = sorted(self._objects.items())
        return [Listed(key, len(data), modified_ms) for key, (data, modified_ms) in every if key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def contents(self) -> dict[str, tuple[bytes, int]]:
        """All objects: data and date, by key."""
        with self._lock:
            return dict(self._objects)

    def replace_all(self, objects: Mapping[str, tuple[bytes, int]]) -> None:
        """Make these all objects that there are: as of a backup, say, or damaged."""
        with self._lock:
            self._objects = dict(objects)


class Fault(enum.Enum):
    """What happens to a request."""

    NONE = "it is carried out and answered"
    LOST_BEFORE = "it is not carried out, and not answered"
    LOST_AFTER = "it is carried out, and not answered"
    TWICE = "it is carried out twice, as a client or a proxy repeats it; the second answer counts"
    LATE = "it is not answered, and carried out ``late_seconds`` later"


class Request(NamedTuple):
    """A request that a client is about to send. ``kind``: ``create``, ``read``, ``list`` or ``delete``."""

    client: str
    kind: str
    key: str


class SimulatedStore:
    """A store with clients, of which each request may go wrong as ``before_request`` says.

    ``clock`` is the store's own, and gives the objects' dates: ``advance`` it to let late requests land.
    ``ignores_conditions``: it creates what is there already, as weak stores do.
    """

    def __init__(self, *, clock: ManualClock | None = None, ignores_conditions: bool = False) -> None:
        self.clock = clock or ManualClock(1_700_000_000_000)
        self.objects = MemoryStore(clock=self.clock)
        """What is in the store, whatever its clients see."""
        self.before_request: Callable[[Request], Fault] = lambda _: Fault.NONE
        self.is_away = False
        """No request is carried out or answered."""
        self.late_seconds = 60.0
        self.requests = 0
        self._ignores_conditions = ignores_conditions
        self._listings: list[Listing] = [[]]  # after each change

    def client(self, name: str) -> SimulatedClient:
        """A client of its own: the ``Store`` that one process has."""
        return SimulatedClient(self, name)

    def create_now(self, key: str, data: bytes) -> bool:
        """Create an object as the store does it for a request that arrives."""
        if self._ignores_conditions:
            self.objects.delete([key])
        created = self.objects.create(key, data)
        self._note_change()
        return created

    def delete_now(self, keys: Iterable[str]) -> None:
        """Delete objects as the store does it for a request that arrives."""
        self.objects.delete(keys)
        self._note_change()

    def put_back(self, objects: Mapping[str, tuple[bytes, int]]) -> None:
        """Put the store back to what ``objects.contents()`` was, as from a backup."""
        self.objects.replace_all(objects)
        self._note_change()

    def listing(self, lag: int) -> Listing:
        """All objects, as they were ``lag`` changes ago."""
        return self._listings[max(len(self._listings) - 1 - lag, 0)]

    def _note_change(self) -> None:
        listing = self.objects.list("")
        if listing != self._listings[-1]:
            self._listings.append(listing)


class SimulatedClient:
    """A ``Store``: one client of a ``SimulatedStore``. ``list_lag``: its listings are so many changes old."""

    def __init__(self, store: SimulatedStore, name: str) -> None:
        self._store = store
        self.name = name
        self.list_lag = 0

    def __repr__(self) -> str:
        return f"SimulatedClient({self.name!r})"

    def describe(self) -> str:
        return f"a simulated store, by {self.name}"

    def create(self, key: str, data: bytes) -> bool:
        return self._send("create", key, lambda: self._store.create_now(key, data))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self._send("read", key, lambda: self._store.objects.read(key, start, length))

    def list(self, prefix: str) -> Listing:
        every = self._send("list", prefix, lambda: self._store.listing(self.list_lag))
        return [each for each in every if each.key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        every = list(keys)
        self._send("delete", every[0] if every else "", lambda: self._store.delete_now(every))

    def _send(self, kind: str, key: str, carry_out: Callable[[], T]) -> T:
        store = self._store
        store.requests += 1
        fault = store.before_request(Request(self.name, kind, key))
        if store.is_away:
            fault = Fault.LOST_BEFORE
        if fault is Fault.LATE:
            store.clock.call_later(store.late_seconds, carry_out)
        if fault in (Fault.LOST_BEFORE, Fault.LATE):
            raise StoreUnavailable(self.describe(), key, "no answer in time")
        answer = carry_out()
        if fault is Fault.LOST_AFTER:
            raise StoreUnavailable(self.describe(), key, "the answer was lost")
        return carry_out() if fault is Fault.TWICE else answer
