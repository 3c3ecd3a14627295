"""The items that a reader would get if it were opened now, by its last checkpoint. The reader is not opened."""

from __future__ import annotations

from collections.abc import Iterator

from kestrelpy import inspect, scan
from kestrelpy.cli._common import CommandError
from kestrelpy.errors import NoDefaultReader
from kestrelpy.item import Record


def unread(directory: str, queue: str, reader: str, *, now_ms: int) -> Iterator[Record]:
    """Yield the items that a reader would get if it were opened now, in order, without expired items.

    Raises ``CommandError`` if there is no such reader, ``NoDefaultReader`` if the default reader is asked for and the
    queue has named readers instead.
    """
    saved = inspect(directory, queue)
    state = next((one for one in saved.readers if one.name == reader), None)
    if state is None:
        others = tuple(one.name for one in saved.readers if one.name)
        if not reader and others:
            raise NoDefaultReader(queue, others)
        raise CommandError(
            f"queue {queue!r} has no reader {reader!r}" + (f"; it has {', '.join(others)}" if others else "")
        )
    return _not_done(scan(directory, queue, start_id=state.head + 1), state.done, now_ms)


def _not_done(records: Iterator[Record], done: tuple[tuple[int, int], ...], now_ms: int) -> Iterator[Record]:
    spans = list(reversed(done))
    for record in records:
        while spans and spans[-1][1] < record.id:
            spans.pop()
        is_done = bool(spans) and spans[-1][0] <= record.id
        is_expired = record.expires_ms is not None and record.expires_ms <= now_ms
        if not is_done and not is_expired:
            yield record
