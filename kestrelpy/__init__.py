"""Durable blocking queues inside your process, without a server.

``JournaledQueue`` keeps its items in a write-ahead log on disk: they survive the death of the process, and power cuts
once they are synced. ``open_reader`` reads such a queue from another process. ``scan``, ``verify`` and ``inspect`` look
at a queue without changing it.
``ConcurrentBlockingQueue`` and ``SimpleBlockingQueue`` keep their items in memory. ``kestrelpy.work`` has queues of
jobs (retries, delay, priority), ``kestrelpy.inbox`` is for producers in other processes, and ``kestrelpy.spark`` reads
and writes queues from Spark.

    with JournaledQueue("queues", "jobs") as queue:
        queue.put(b"resize photo 7")
        with queue.get(timeout=5) as item:  # committed at the end of the block
            print(item.data)

PYTEST_DONT_REWRITE
"""
# The last line is for pytest. It finds the plugin of kestrelpy.outbox where kestrelpy is installed, and would warn of
# each program that has imported this package before pytest started.

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy._reading.reader import Reader
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, FullPolicy, QueueStats, ReaderConfig, ReaderStats
from kestrelpy.errors import (
    BatchTooLarge,
    CorruptJournal,
    DurabilityUnknown,
    ForkedQueue,
    InvalidName,
    ItemTooLarge,
    KestrelError,
    NoDefaultReader,
    QueueClosed,
    QueueDiskFull,
    QueueEmpty,
    QueueFull,
    QueueLocked,
    RestoreIncomplete,
    UnknownItem,
    UnsupportedFormat,
    WrongKind,
)
from kestrelpy.item import Item, Record
from kestrelpy.memory import BlockingQueue, ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.queue import JournaledQueue

if TYPE_CHECKING:
    from kestrelpy._reading.detached_source import open_reader
    from kestrelpy.inspection.scan import scan
    from kestrelpy.inspection.summary import QueueInspection, SavedReader, SegmentInfo, inspect, queue_names
    from kestrelpy.inspection.verify import Damage, VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "BatchTooLarge",
    "BlockingQueue",
    "Clock",
    "Codec",
    "ConcurrentBlockingQueue",
    "CorruptJournal",
    "Damage",
    "DurabilityUnknown",
    "ForkedQueue",
    "FullPolicy",
    "InvalidName",
    "Item",
    "ItemTooLarge",
    "JournaledQueue",
    "KestrelError",
    "NoDefaultReader",
    "QueueClosed",
    "QueueDiskFull",
    "QueueEmpty",
    "QueueFull",
    "QueueInspection",
    "QueueLocked",
    "QueueStats",
    "Reader",
    "ReaderConfig",
    "ReaderStats",
    "Record",
    "RestoreIncomplete",
    "SavedReader",
    "SegmentInfo",
    "SimpleBlockingQueue",
    "SystemClock",
    "UnknownItem",
    "UnsupportedFormat",
    "VerifyReport",
    "WrongKind",
    "inspect",
    "open_reader",
    "queue_names",
    "scan",
    "verify",
]

if not TYPE_CHECKING:  # type checkers see the imports above; with a __getattr__ they would accept any name
    _LATER = {
        "open_reader": "_reading.detached_source",
        "scan": "inspection.scan",
        **dict.fromkeys(
            ("QueueInspection", "SavedReader", "SegmentInfo", "inspect", "queue_names"), "inspection.summary"
        ),
        **dict.fromkeys(("Damage", "VerifyReport", "verify"), "inspection.verify"),
    }
    _MODULES = ("codecs", "inbox", "outbox", "server", "spark", "testing", "work")

    def __getattr__(name: str) -> object:
        """Import on first use (PEP 562): a program that only uses its own queue does not need these names."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_LATER[name]}"), name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, *_MODULES})
