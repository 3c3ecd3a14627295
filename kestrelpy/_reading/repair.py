"""What an exception from outside left of a reader's bookkeeping, put right (R13).

An item that a thread was moving from one place to another when it was interrupted may be in none of them. It comes
back, ahead of the unread ones, as if it had not been taken; and what is counted is counted anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrelpy._reading.backlog import Unread
    from kestrelpy._reading.progress import Progress
    from kestrelpy._reading.source import Source


def mend_locked(reader: Unread, block_bytes: int) -> None:
    """Give every id up to the next one its place again. Reads those from the journal that have none.

    Raises ``KestrelError`` or ``OSError`` for what can't be read; what was found before that is in its place.
    """
    progress, source = reader._progress, reader._source
    progress.absorb()
    returned = reader._returned
    for places in (reader._open, reader._settling, returned.entries):
        for item_id in [item_id for item_id in places if progress.is_done(item_id)]:
            del places[item_id]
    held = reader._open.keys() | reader._settling.keys() | returned.entries.keys()
    progress.next_id = max(progress.next_id, max(held, default=0) + 1)
    for first_id, last_id in list(_strays(reader, held)):
        item_id = first_id
        while item_id <= last_id:
            block = source.read(item_id, last_id, block_bytes, None)
            for found_id, entry in block.entries.items():
                if item_id <= found_id <= last_id:
                    progress.pass_over(item_id, found_id - 1)
                    returned.add(found_id, entry)
                    item_id = found_id + 1
            if item_id < block.next_id:
                progress.pass_over(item_id, min(block.next_id - 1, last_id))
                item_id = block.next_id
    items, size = done_before(source, progress, progress.next_id)
    opened = [*reader._open.values(), *reader._settling.values()]
    progress.released_items = items - len(opened) - len(returned)
    progress.released_bytes = size - sum(len(item.data) for item in opened)
    progress.released_bytes -= sum(len(entry[0]) for entry in returned.entries.values())


def done_before(source: Source, progress: Progress, item_id: int) -> tuple[int, int]:
    """How many items were put before ``item_id``, and of those from there on how many are done; and their bytes."""
    items, size = source.before(item_id)
    for first_id, last_id in progress.done_spans():
        if last_id >= item_id:
            (items_to, size_to), (items_from, size_from) = (
                source.before(last_id + 1),
                source.before(max(first_id, item_id)),
            )
            items, size = items + items_to - items_from, size + size_to - size_from
    return items, size


def _strays(reader: Unread, held: set[int]) -> Iterator[tuple[int, int]]:
    """Runs of ids before the next one that are not done and nowhere."""
    progress = reader._progress
    first_id = 0
    for item_id in range(progress.head + 1, progress.next_id):
        if item_id in held or progress.is_done(item_id):
            if first_id:
                yield first_id, item_id - 1
            first_id = 0
        elif not first_id:
            first_id = item_id
    if first_id:
        yield first_id, progress.next_id - 1
