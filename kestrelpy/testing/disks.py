"""Disks for tests: in memory, failing on demand, and crashing.

Each of them replaces the real disk of ``kestrelpy`` behind the same interface. A test of crashes, in short::

    disk = CrashingDisk()
    disk.before_operation = take_clones  # at each operation: disk.after_kill(), disk.power_states(model, limit)
    workload(disk)
"""

from __future__ import annotations

from kestrelpy._disk.memory import MemoryDisk
from kestrelpy.testing._choices import Choose
from kestrelpy.testing._crash import CrashingDisk
from kestrelpy.testing._failing import OPERATIONS, FailingDisk
from kestrelpy.testing._power import PowerModel

__all__ = ["OPERATIONS", "Choose", "CrashingDisk", "FailingDisk", "MemoryDisk", "PowerModel"]
