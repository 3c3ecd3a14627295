"""Looking at queues without a lock: ``scan`` their items, ``verify`` their files, ``inspect`` what they hold, and
follow all queues of a folder with ``FolderWatch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrelpy.inspection.folder_watch import FolderWatch, WatchedQueue, WatchedReader

__all__ = ["FolderWatch", "WatchedQueue", "WatchedReader"]


def __getattr__(name: str) -> Any:
    """Import them on first use: a program that only scans does not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kestrelpy.inspection import folder_watch

    return getattr(folder_watch, name)
