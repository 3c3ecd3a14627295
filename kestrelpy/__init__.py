"""Durable blocking queues inside your process, without a server.

``JournaledQueue`` keeps its items in a write-ahead log on disk: they survive the death of the process, and power cuts
once they are synced. ``open_reader`` reads such a queue from another process. ``scan``, ``verify`` and ``inspect`` look
at a queue without changing it; ``repair`` makes a damaged queue one that opens.
``ConcurrentBlockingQueue`` and ``SimpleBlockingQueue`` keep their items in memory. ``kestrelpy.work`` has queues of
jobs (retries, delay, priority), ``kestrelpy.inbox`` is for producers in other processes, ``kestrelpy.logging`` for log
records, and ``kestrelpy.spark`` reads and writes queues from Spark. ``kestrelpy.codecs`` turns values into bytes.
``kestrelpy.server`` serves queues to clients in any language, ``kestrelpy.outbox`` has jobs in the transaction of a
database, ``kestrelpy.ship`` copies a queue to an object store, ``kestrelpy.arrow`` reads it as a table, and
``kestrelpy.metrics`` has its figures. ``help(kestrelpy.JournaledQueue)`` is the place to begin.

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

from kestrelpy import _platform as _platform  # first of all: it refuses Windows
from kestrelpy._reading.reader import Reader
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, FullPolicy, LagPolicy, QueueStats, ReaderConfig, ReaderStats
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
    RepairIncomplete,
    RepairRefused,
    RestoreIncomplete,
    UnknownItem,
    UnknownReader,
    UnsupportedFormat,
    WrongKind,
)
from kestrelpy.item import Item, Record
from kestrelpy.letter import DeadLetter
from kestrelpy.memory import BlockingQueue, ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.queue import JournaledQueue

if TYPE_CHECKING:
    from kestrelpy._reading.detached_source import open_reader
    from kestrelpy.dead_queue import DeadLetters, dead_letters
    from kestrelpy.inspection.repair import repair
    from kestrelpy.inspection.repair_report import JobDoubts, RepairLoss, RepairReport
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
    "DeadLetter",
    "DeadLetters",
    "DurabilityUnknown",
    "ForkedQueue",
    "FullPolicy",
    "InvalidName",
    "Item",
    "ItemTooLarge",
    "JobDoubts",
    "JournaledQueue",
    "KestrelError",
    "LagPolicy",
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
    "RepairIncomplete",
    "RepairLoss",
    "RepairRefused",
    "RepairReport",
    "RestoreIncomplete",
    "SavedReader",
    "SegmentInfo",
    "SimpleBlockingQueue",
    "SystemClock",
    "UnknownItem",
    "UnknownReader",
    "UnsupportedFormat",
    "VerifyReport",
    "WrongKind",
    "dead_letters",
    "inspect",
    "open_reader",
    "queue_names",
    "repair",
    "scan",
    "verify",
]

if not TYPE_CHECKING:  # type checkers see the imports above; with a __getattr__ they would accept any name
    _LATER = {
        **dict.fromkeys(("DeadLetters", "dead_letters"), "dead_queue"),
        "open_reader": "_reading.detached_source",
        "repair": "inspection.repair",
        "scan": "inspection.scan",
        **dict.fromkeys(("JobDoubts", "RepairLoss", "RepairReport"), "inspection.repair_report"),
        **dict.fromkeys(
            ("QueueInspection", "SavedReader", "SegmentInfo", "inspect", "queue_names"), "inspection.summary"
        ),
        **dict.fromkeys(("Damage", "VerifyReport", "verify"), "inspection.verify"),
    }
    _MODULES = {"arrow", "codecs", "dashboard", "inbox", "inspection", "logging", "metrics", "outbox", "server", "ship"}
    _MODULES |= {"spark", "testing", "work"}

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
