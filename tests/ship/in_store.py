"""What is in a store, read by its slots: the items, and where the readers are."""

from __future__ import annotations

from kestrelpy._journal import format as fmt
from kestrelpy.ship.log import carry_out, read_end, read_slot
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.store import Store


def no_pause(seconds: float) -> None:
    raise AssertionError(f"reading does not pause, and not for {seconds} s")


def log_of(store: Store, queue: str = "jobs") -> LogState:
    """All that the slots add up to."""
    return carry_out(read_end(f"{queue}/"), store, no_pause)


def items_of(store: Store, queue: str = "jobs") -> dict[int, bytes]:
    """All items in the log, by id."""
    state, prefix = log_of(store, queue), f"{queue}/"
    items: dict[int, bytes] = {}
    for segment in state.segments:
        data = store.read(prefix + segment.key)
        assert data is not None
        assert len(data) == segment.file_bytes
        items |= _frames(data[: segment.segment_footer().records_end], segment.marker)
    tail = b""
    for each in state.tail:
        slot = carry_out(read_slot(prefix, each.slot), store, no_pause)
        assert slot is not None
        assert len(tail) == each.offset
        tail += slot.frames
    if tail:
        items |= _frames(tail, state.place.marker)
    assert max(items, default=0) <= state.place.last_id
    return items


def _frames(data: bytes, marker: int) -> dict[int, bytes]:
    items: dict[int, bytes] = {}
    at = fmt.HEADER_BYTES
    while at < len(data):
        frame = fmt.decode_frame(data, at, marker)
        assert frame is not None
        items |= {item_id: entry[0] for item_id, entry in enumerate(frame.entries, frame.first_id)}
        at += frame.size
    return items
