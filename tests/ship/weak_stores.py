"""Stores that are not good enough, each in one way."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kestrelpy.ship import Listed

RACES = "20 races of 8 have one winner each"
WEAK = {
    "conditions are ignored": {"a second create is refused", "an object is not changed by a create", RACES},
    "replaces and says that it did not": {"an object is not changed by a create"},
    "two may win at once": {RACES},
    "parts are ignored": {"a part of an object is read"},
    "what is missing is empty": {"a missing object is missing"},
    "what is empty is missing": {"an empty object is there"},
    "prefixes are of letters": {"a listing is of what is below"},
    "large ones are cut": {"an object of 16 MiB"},
    "long names are cut": {"every legal name"},
    "nothing is listed": {"objects are listed"},
    "nothing is deleted": {"objects are deleted"},
}
"""What is weak, and what of ``check`` finds it."""


class Weak:
    """A ``Store`` in memory with one weakness."""

    def __init__(self, weakness: str) -> None:
        assert weakness in WEAK
        self._weakness = weakness
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._looked = threading.Barrier(2)

    def create(self, key: str, data: bytes) -> bool:
        key = self._stored(key)
        if self._weakness == "two may win at once" and "race" in key:
            return self._create_as_two(key, data)
        with self._lock:
            there = key in self._objects
            if not there or self._weakness in ("conditions are ignored", "replaces and says that it did not"):
                self._objects[key] = data[: 1 << 20] if self._weakness == "large ones are cut" else data
            return not there or self._weakness == "conditions are ignored"

    def _create_as_two(self, key: str, data: bytes) -> bool:
        """The first two look, and only then create."""
        there = key in self._objects
        try:
            self._looked.wait(0.05)
        except threading.BrokenBarrierError:
            self._looked.reset()
        with self._lock:
            if not there:
                self._objects[key] = data
        return not there

    def _stored(self, key: str) -> str:
        return "/".join(part[:60] for part in key.split("/")) if self._weakness == "long names are cut" else key

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        key = key if self._weakness == "long names are cut" else self._stored(key)
        data = self._objects.get(key, b"" if self._weakness == "what is missing is empty" else None)
        if data == b"" and self._weakness == "what is empty is missing":
            return None
        if data is None or self._weakness == "parts are ignored":
            return data
        return data[start : None if length is None else start + length]

    def list(self, prefix: str) -> list[Listed]:
        if self._weakness == "nothing is listed":
            return []
        prefix = prefix.rstrip("/") if self._weakness == "prefixes are of letters" else prefix
        return [Listed(key, len(data), 1) for key, data in sorted(self._objects.items()) if key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        if self._weakness != "nothing is deleted":
            for key in keys:
                self._objects.pop(key, None)

    def describe(self) -> str:
        return "memory"
