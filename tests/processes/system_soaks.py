"""The long runs of this folder, by name: each takes a seed and a time, and says what it counted."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType

from tests.processes import fork_races, full_disks, generations, loop_mount, no_room, owner_races, syscall_faults
from tests.processes.programs import counts_of

SOAKS: dict[str, tuple[ModuleType, str]] = {
    "kills": (generations, "kills"),
    "power cuts on ext4": (generations, "ext4"),
    "power cuts on xfs": (generations, "xfs"),
    "failing calls": (syscall_faults, "calls"),
    "full files": (no_room, "bytes"),
    "full file systems": (no_room, "pages"),
    **{f"a full {kind}": (full_disks, kind) for kind in full_disks.KINDS},
    "forks": (fork_races, "forks"),
    "races for a queue": (owner_races, "owners"),
    "races for a reader": (owner_races, "readers"),
}
FULL = {f"a full {kind}": kind for kind in full_disks.KINDS}
FOR_ROOT = ("power cuts on ext4", "power cuts on xfs", "full file systems", *FULL)


def reason_not_available(name: str) -> str | None:
    """Why it can't be run here; ``None`` if it can."""
    if name == "power cuts on ext4":
        return loop_mount.reason_not_available("ext4")
    if name == "power cuts on xfs":
        return loop_mount.reason_not_available("xfs")
    if name in FULL:
        return full_disks.reason_not_available(FULL[name])
    if name == "failing calls":
        return syscall_faults.reason_not_available()
    if name == "full file systems":
        return no_room.reason_not_available()
    return None


def soak(name: str, seed: int, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Run it for ``limit`` rounds, for ``seconds``, or until it is through. Raises ``AssertionError``, with the seed,
    when a promise is broken.
    """
    harness, what = SOAKS[name]
    with tempfile.TemporaryDirectory() as folder:
        return Counter(counts_of(harness, Path(folder), what, seed, limit=limit or 0, seconds=seconds or 0))
