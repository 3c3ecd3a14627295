"""Who has a queue open, by the locks that the kernel lists: nothing is locked to find out."""

from __future__ import annotations

import os

__all__ = ["owner_of", "owners_in"]

_LOCKS = "/proc/locks"


def owner_of(directory: str, queue: str) -> int | None:
    """The process that has the queue open for writing; ``None`` if none is known. Where the kernel lists no locks, none
    is ever known; of a process in another container the number may be 0.
    """
    try:
        about = os.stat(os.path.join(directory, f"{queue}.lock"), follow_symlinks=False)
    except OSError:
        return None
    return owners_in().get((os.major(about.st_dev), os.minor(about.st_dev), about.st_ino))


def owners_in(path: str = _LOCKS) -> dict[tuple[int, int, int], int]:
    """The holders of exclusive locks on whole files: device (major, minor) and inode of the file, and the process."""
    found: dict[tuple[int, int, int], int] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.split()  # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:262146 0 EOF
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
            major, _, rest = words[5].partition(":")
            minor, _, inode = rest.partition(":")
            found[int(major, 16), int(minor, 16), int(inode)] = max(0, int(words[4]))
    return found
