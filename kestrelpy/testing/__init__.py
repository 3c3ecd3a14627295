"""Help for testing programs that use kestrelpy, and for testing kestrelpy itself."""

from __future__ import annotations

from kestrelpy.testing.disks import CrashingDisk, FailingDisk, MemoryDisk, PowerModel

__all__ = ["CrashingDisk", "FailingDisk", "MemoryDisk", "PowerModel"]
