"""Durable blocking queues inside your process: nothing lost, at the speed of doing nothing.

``ConcurrentBlockingQueue`` and ``SimpleBlockingQueue`` live in memory; ``JournaledQueue`` survives whatever its
machine does to it; ``open_reader`` reads one from another process; ``scan`` and ``verify`` look at one without
touching it.
"""

from __future__ import annotations

from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, FullPolicy, QueueStats, ReaderConfig, ReaderStats
from kestrelpy.errors import (
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
    UnknownItem,
    UnsupportedFormat,
)
from kestrelpy.folder import Damage, VerifyReport, open_reader, queue_names, scan, verify
from kestrelpy.inspection import QueueInspection, SavedReader, SegmentInfo, inspect
from kestrelpy.item import Item, Record
from kestrelpy.memory import BlockingQueue, ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.queue import JournaledQueue
from kestrelpy.reader import Reader

__version__ = "0.1.0"

__all__ = [
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
    "SavedReader",
    "SegmentInfo",
    "SimpleBlockingQueue",
    "SystemClock",
    "UnknownItem",
    "UnsupportedFormat",
    "VerifyReport",
    "inspect",
    "open_reader",
    "queue_names",
    "scan",
    "verify",
]
