"""Disks for tests: one that counts calls, and one whose syncs wait at a gate."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kestrelpy._disk.real import RealDisk
from tests.support.patience import PATIENCE


class CountingDisk:
    """A disk that counts what is asked of its folders. ``after_listing`` is called after each listing."""

    def __init__(self, inner: Any, after_listing: Callable[[], object] = bool) -> None:
        self.inner = inner
        self.after_listing = after_listing
        self.calls: Counter[str] = Counter()

    def directory(self, path: str, *, create: bool = False) -> Any:
        return _CountingDirectory(self, self.inner.directory(path, create=create))


class _CountingDirectory:
    def __init__(self, disk: CountingDisk, inner: Any) -> None:
        self.disk, self.inner = disk, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found
        self.disk.calls[name] += 1
        return found

    def names(self) -> list[str]:
        self.disk.calls["names"] += 1
        found: list[str] = self.inner.names()
        self.disk.after_listing()
        return found

    def move(self, name: str, target: Any, new: str) -> None:
        self.inner.move(name, target.inner, new)


class GatedDisk:
    """A disk whose file syncs wait while its gate is shut. ``syncs`` counts them; ``started`` is released by each."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner if inner is not None else RealDisk()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.syncs = 0
        self.error: OSError | None = None

    def directory(self, path: str, *, create: bool = False) -> Any:
        return _GatedDirectory(self, self.inner.directory(path, create=create))


class _GatedDirectory:
    def __init__(self, disk: GatedDisk, inner: Any) -> None:
        self.disk, self.inner = disk, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, name: str, *, write: bool = False) -> Any:
        return _GatedFile(self.disk, self.inner.open(name, write=write))

    def create(self, name: str) -> Any:
        return _GatedFile(self.disk, self.inner.create(name))


class _GatedFile:
    def __init__(self, disk: GatedDisk, inner: Any) -> None:
        self.disk, self.inner = disk, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sync(self) -> None:
        disk = self.disk
        disk.syncs += 1
        disk.started.release()
        assert disk.gate.wait(PATIENCE)
        if disk.error is not None:
            raise disk.error
        self.inner.sync()
