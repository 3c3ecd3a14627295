"""Tools to test programs that use kestrelpy, and to test kestrelpy itself."""

from __future__ import annotations

from kestrelpy.testing.clock import ManualClock
from kestrelpy.testing.conformance import check_blocking_queue
from kestrelpy.testing.disks import CrashingDisk, FailingDisk, MemoryDisk, PowerModel

__all__ = ["CrashingDisk", "FailingDisk", "ManualClock", "MemoryDisk", "PowerModel", "check_blocking_queue"]
