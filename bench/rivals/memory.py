"""Queues in memory."""

from __future__ import annotations

import queue
from collections import deque
from importlib import import_module
from typing import Any

from bench.floor import make_memory_floor
from bench.rivals.base import Rival


class ConcurrentMemory(Rival):
    """kestrelpy's ConcurrentBlockingQueue."""

    name = "kestrelpy Concurrent"

    def open(self) -> None:
        from kestrelpy import ConcurrentBlockingQueue

        made: Any = ConcurrentBlockingQueue()
        self.put, self.take = made.put, made.get


class SimpleMemory(Rival):
    """kestrelpy's SimpleBlockingQueue."""

    name = "kestrelpy Simple"

    def open(self) -> None:
        from kestrelpy import SimpleBlockingQueue

        made: Any = SimpleBlockingQueue()
        self.put, self.take = made.put, made.get


class MemoryFloor(Rival):
    """The least code that does a blocking queue's work (``floor.py``)."""

    name = "floor"

    def open(self) -> None:
        self.put, self.take = make_memory_floor()


class StandardQueue(Rival):
    """The standard library's queue.Queue."""

    name = "queue.Queue"

    def open(self) -> None:
        made: queue.Queue[Any] = queue.Queue()
        self.put, self.take = made.put, made.get


class StandardSimpleQueue(Rival):
    """The standard library's queue.SimpleQueue, in C."""

    name = "queue.SimpleQueue"

    def open(self) -> None:
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put, self.take = made.put, made.get


class Culsans(Rival):
    """culsans: a queue for threads and tasks alike, used by threads."""

    name = "culsans"
    share = 0.5

    def open(self) -> None:
        made = import_module("culsans").Queue()
        self.put, self.take, self._close = made.sync_put, made.sync_get, made.close

    def close(self) -> None:
        self._close()


class Deque(Rival):
    """A bare collections.deque: no waiting, no lock."""

    name = "collections.deque"

    def open(self) -> None:
        made: deque[Any] = deque()
        self.put, self.take = made.append, made.popleft
