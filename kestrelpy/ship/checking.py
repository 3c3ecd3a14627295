"""Whether a store is good enough: ``probe`` asks at each opening for writing, ``check`` before one trusts a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any

from kestrelpy._value import Value
from kestrelpy.ship.errors import StoreTooWeak, StoreUnavailable
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.store import Store

__all__ = ["CheckReport", "CheckResult", "check", "probe"]

LARGE_BYTES = 16 * 1024 * 1024


class CheckResult(Value):
    """One thing that a store was asked for. ``detail``: what was wrong, or empty."""

    name: str
    ok: bool
    detail: str = ""


class CheckReport(Value):
    """What ``check`` found: ``ok`` if every one of ``results`` is."""

    ok: bool
    results: tuple[CheckResult, ...]


def probe(store: Store, prefix: str = "") -> None:
    """Create an object below ``prefix`` twice. Raises ``StoreUnavailable``, and ``StoreTooWeak`` if the store says both
    times that it was created.
    """
    key = f"{prefix}probe/{os.urandom(16).hex()}"
    store.create(key, b"kestrelpy")
    again = store.create(key, b"another")
    store.delete([key])
    if again:
        raise StoreTooWeak(store.describe())


def check(
    store: str | Store, *, races: int = 100, writers: int = 8, options: Mapping[str, Any] | None = None
) -> CheckReport:
    """Try a store, as ``open_store`` takes it with ``options``, before a queue is trusted to it. That takes up to a
    minute, and leaves nothing.

    ``races`` times ``writers`` threads create one object, and just one of them may be told that it did. Objects are
    read, read in part, listed and deleted as ``Store`` says; one of them has 16 MiB. Raises ``BadStoreURL``; whatever
    else goes wrong is in the report.
    """
    trial = _Trial(open_store(store, options=options), races, writers)
    results = tuple(_result(name, what) for name, what in trial.steps().items())
    return CheckReport(all(result.ok for result in results), results)


def _result(name: str, what: Callable[[], str]) -> CheckResult:
    try:
        detail = what()
    except StoreUnavailable as error:
        detail = str(error)
    return CheckResult(name, not detail, detail)


class _Trial:
    """The steps of a check, below one key. Each returns what was wrong, or nothing."""

    def __init__(self, store: Store, races: int, writers: int) -> None:
        self._store = store
        self._races = races
        self._writers = writers
        self._at = f"probe/{os.urandom(16).hex()}"

    def steps(self) -> dict[str, Callable[[], str]]:
        return {
            "a second create is refused": self.refuses,
            "an object is not changed by a create": self.keeps,
            "a missing object is missing": self.misses,
            "an empty object is there": self.takes_empty,
            "a part of an object is read": self.reads_parts,
            f"an object of {LARGE_BYTES >> 20} MiB": self.takes_large,
            "every legal name": self.takes_names,
            f"{self._races} races of {self._writers} have one winner each": self.has_one_winner,
            "objects are listed": self.lists,
            "a listing is of what is below": self.lists_below,
            "objects are deleted": self.deletes,
        }

    def _key(self, name: str) -> str:
        return f"{self._at}/{name}"

    def refuses(self) -> str:
        self._store.create(self._key("twice"), b"first")
        if self._store.create(self._key("twice"), b"second"):
            return "the store says that it created what was there"
        return ""

    def keeps(self) -> str:
        data = self._store.read(self._key("twice"))
        return "" if data == b"first" else f"it was {b'first'!r} and is {data!r}"

    def misses(self) -> str:
        self._store.create(self._key("folder/object"), b"data")
        for name in ("missing", "folder", "folder/object/below"):
            data = self._store.read(self._key(name))
            if data is not None:
                return f"{name} was never created, and {len(data)} bytes of it were read"
        return ""

    def takes_empty(self) -> str:
        self._store.create(self._key("empty"), b"")
        for data in (self._store.read(self._key("empty")), self._store.read(self._key("empty"), 0, 10)):
            if data != b"":
                return f"it was read as {data!r}"
        return "" if not self._store.create(self._key("empty"), b"more") else "it was created again"

    def reads_parts(self) -> str:
        key, data = self._key("part"), bytes(range(200))
        self._store.create(key, data)
        for start, length in ((0, 10), (190, 10), (190, 100), (200, 10), (300, 10), (5, 0), (7, None)):
            part = self._store.read(key, start, length)
            if part != data[start : None if length is None else start + length]:
                return f"{length} bytes from {start} of {len(data)} were {part!r}"
        return ""

    def takes_large(self) -> str:
        data = os.urandom(1024) * (LARGE_BYTES // 1024)
        self._store.create(self._key("large"), data)
        return "" if self._store.read(self._key("large")) == data else "it was read back as another"

    def takes_names(self) -> str:
        for name in ("A-Z_a-z-0-9", "x" * 100, "1700000000000-1-0a1b2c3d.segment", "deep/er/0000000000000001"):
            self._store.create(self._key(name), name.encode())
            if self._store.read(self._key(name)) != name.encode():
                return f"{name} was not read back"
        return ""

    def has_one_winner(self) -> str:
        bids = [b"%d" % writer for writer in range(self._writers)]
        with ThreadPoolExecutor(self._writers) as pool:
            outcomes = (self._race(number, bids, pool) for number in range(self._races))
            return next(filter(None, outcomes), "")

    def _race(self, number: int, bids: list[bytes], pool: ThreadPoolExecutor) -> str:
        key = self._key(f"race/{number}")
        won = list(compress(bids, pool.map(partial(self._store.create, key), bids)))
        data = self._store.read(key)
        if len(won) > 1 or data not in (won or bids):  # none: its answer was lost, and the client asked again
            return f"race {number}: {len(won)} were told that they had created it; {data!r} is there"
        return ""

    def lists(self) -> str:
        listed = {each.key: each.size_bytes for each in self._store.list(f"{self._at}/")}
        wanted = {self._key("twice"): 5, self._key("part"): 200, self._key("large"): LARGE_BYTES}
        wrong = [key for key, size in wanted.items() if listed.get(key) != size]
        return f"not listed, or with another size: {', '.join(wrong)}" if wrong else ""

    def lists_below(self) -> str:
        names = ("one/2", "one/1", "one/deep/er", "ones", "one-more/1")
        for name in names:
            self._store.create(self._key(name), b"")
        listed = [each.key for each in self._store.list(self._key("one/"))]
        wanted = [self._key(name) for name in ("one/1", "one/2", "one/deep/er")]
        return "" if listed == wanted else f"{wanted} are below, {listed} were listed"

    def deletes(self) -> str:
        keys = [each.key for each in self._store.list(f"{self._at}/")]
        self._store.delete([*keys, self._key("missing"), self._key("nowhere/missing")])
        self._store.delete([])
        left = [key for key in keys if self._store.read(key) is not None]
        return f"{len(left)} of {len(keys)} are still there" if left else ""
