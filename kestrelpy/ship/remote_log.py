"""The log of a queue in a store for people, slot by slot: ``read_log``. And ``drop_reader``, of readers outside.

``read_log`` changes nothing, and may run while the owner ships. ``drop_reader`` deletes what a reader outside has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrelpy._checks import check_whole
from kestrelpy._journal.file_names import check_name
from kestrelpy._value import ReadOnlyDict, Value
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import NoSuchQueue
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.outside_reader import parse_outside_key
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.slots import CLOSE, DATA, FENCE, SEAL, DroppedReader, Slot
from kestrelpy.ship.store import Store

__all__ = ["RemoteSlot", "drop_reader", "read_log"]

_WORDS = {FENCE: "fence", DATA: "data", SEAL: "seal", CLOSE: "close"}


class RemoteSlot(Value, kw_only=True):
    """A slot of a log.

    ``kind``: ``"fence"``: an owner has come, ``owner``; ``"data"``; ``"seal"``: a segment is closed and in the store;
    ``"close"``: the owner has left. ``written_ms``: by its owner's clock. ``segment``: the number of the one that the
    log ends in with this slot; 0 if there is none. ``offset``, ``length``: the bytes of that segment that this slot
    has; of a seal ``offset`` is where its records end. ``first_id``, ``last_id``: of the items in it, or in a seal's
    segment; 0 if there are none. Of a fence ``first_id`` is the least id that its epoch may give out, and ``last_id``
    the last one in the log. ``readers``: the heads of the readers whose positions it has; ``None``: that reader was
    dropped. ``bytes``: of the object.
    """

    number: int
    kind: str
    epoch: int
    owner: str
    written_ms: int
    segment: int
    offset: int
    length: int
    first_id: int
    last_id: int
    readers: ReadOnlyDict[str, int | None]
    bytes: int


def read_log(
    store: str | Store | Any, queue: str, *, start: int = 1, options: Mapping[str, Any] | None = None
) -> Iterator[RemoteSlot]:
    """The slots of ``queue`` in ``store``, from number ``start`` on, as far as they are kept. ``store``, ``options``:
    as for ``open_store``.

    Each is read when it is asked for. Slots that garbage collection has deleted are left out, also those that it
    deletes meanwhile; whether one is missing, ``verify`` says. Each slot is checked by itself, and by the one before if
    that is there: ``StoreDamaged``.

    Raises ``NoSuchQueue`` if there is no slot from ``start`` on, ``UnsupportedFormat``, ``StoreUnavailable``,
    ``BadStoreURL``, ``InvalidName``, ``ValueError``. Cost: a listing, and one request for each slot.
    """
    check_name(queue)
    check_whole("start", start, 1)
    shipped = ShippedQueue(open_store(store, options=options), queue)
    there = shipped.slots()
    wanted = [number for number in there if number >= start]
    if not wanted and shipped.slot_is_missing(start):  # a listing may lag
        reason = f"its log ends at slot {there[-1]}" if there else "it is not there"
        raise NoSuchQueue(shipped.store.describe(), queue, reason)
    return _slots(shipped, wanted or [start])


def _slots(shipped: ShippedQueue, listed: list[int]) -> Iterator[RemoteSlot]:
    before: Slot | None = None
    for number in listed:
        slot = shipped.slot(number)
        if slot is not None:
            yield _checked(shipped, before, slot)
            before = slot
    last = listed[-1]
    while before is not None and before.header.slot == last:  # what came after the listing
        last += 1
        slot = shipped.slot(last)
        if slot is not None:
            yield _checked(shipped, before, slot)
            before = slot


def _checked(shipped: ShippedQueue, before: Slot | None, slot: Slot) -> RemoteSlot:
    header = slot.header
    if before is not None and before.header.slot + 1 == header.slot and before.crc != header.crc_before:
        raise shipped.damage(codec.slot_key(header.slot), "it does not follow the slot before it", header.slot - 1)
    has_ids = header.kind == FENCE or header.first_id <= header.last_id
    return RemoteSlot(
        number=header.slot,
        kind=_WORDS[header.kind],
        epoch=header.epoch,
        owner=slot.owner,
        written_ms=header.written_ms,
        segment=header.number,
        offset=header.offset,
        length=header.length,
        first_id=header.first_id if has_ids else 0,
        last_id=header.last_id if has_ids else 0,
        readers=ReadOnlyDict(
            {each.reader: None if isinstance(each, DroppedReader) else each.head for each in slot.checkpoints}
        ),
        bytes=header.slot_bytes,
    )


def drop_reader(store: str | Store | Any, queue: str, reader: str, *, options: Mapping[str, Any] | None = None) -> int:
    """Forget a reader outside: one that reads the store without the owner, as a Spark query does. From then on it holds
    back no segment. ``store``, ``options``: as for ``open_store``.

    Returns how many objects were deleted; 0: there is no such reader. One that is still at work comes back with its
    next commit. A reader of the queue itself is dropped by its owner: ``JournaledQueue.drop_reader``.

    Raises ``StoreUnavailable``, ``BadStoreURL``, ``InvalidName``. After an error, repeat it.
    """
    check_name(queue)
    check_name(reader)
    shipped = ShippedQueue(open_store(store, options=options), queue)
    listing = shipped.store.list(f"{shipped.prefix}reader/{reader}/")
    found = [each.key for each in listing if _is_of(reader, each.key.removeprefix(shipped.prefix))]
    shipped.store.delete(found)
    return len(found)


def _is_of(reader: str, key: str) -> bool:
    """Whether this is the key of a commit of that reader. Others are let be."""
    parsed = parse_outside_key(key)
    return parsed is not None and parsed[0] == reader
