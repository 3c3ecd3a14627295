"""Moving a reader forward that is too far behind: its progress, open here or in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kestrelpy._reading.backlog import done_before

if TYPE_CHECKING:
    from kestrelpy._reading.progress import Progress
    from kestrelpy._reading.source import Source


def moved_past(source: Source, progress: Progress, item_id: int, held: Mapping[int, int]) -> Progress:
    """A copy of ``progress`` in which every id before ``item_id`` is done, and ``skipped`` has counted the items that
    were not. ``held``: the items before ``next_id`` that are not done, and their sizes. May read one segment.

    Nothing moves back, and no id from ``item_id`` on changes.
    """
    moved = progress.copy()
    dropped = {key: size for key, size in sorted(held.items()) if key < item_id}
    for key in dropped:
        moved.pass_over(key, key)
    if progress.next_id < item_id:
        moved.skip_to(item_id)
        moved.absorb()
        moved.released_items, moved.released_bytes = done_before(source, moved, item_id)
    else:
        moved.absorb()
        moved.released_items += len(dropped)
        moved.released_bytes += sum(dropped.values())
    moved.forget_errors()
    moved.skipped += max(0, moved.released_items - progress.released_items)
    return moved
