"""The log in a store: where it ends, and how a slot is appended. The rules S2 to S6, without I/O.

Each function here is a generator: it yields a request, and is sent the answer, or ``StoreUnavailable`` is thrown into
it. ``carry_out`` does that with a store. So a test can stop it at every request, and let anything happen in between.

Whoever creates slot n + 1 has appended. So one create is under way at a time; its bytes are made before it is first
sent, and are the same in every repetition; and if there is any doubt, the slot is read, and says whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kestrelpy.errors import UnsupportedFormat
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged, StoreUnavailable
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import FENCE, Slot, SlotHeader
from kestrelpy.ship.store import Listing, Store

T = TypeVar("T")
R = TypeVar("R")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two repetitions of a create; each pause is twice the one before."""
_MANIFEST = re.compile(r"manifest/([0-9]{16})")
_LISTINGS = 5
"""So often the manifests are listed, if each time the newest one is gone when it is read."""


class Create(NamedTuple):
    """Answered by True, or by False if the key exists."""

    key: str
    data: bytes


class Read(NamedTuple):
    """Answered by the bytes, or by ``None``. ``start``, ``length``: as for ``Store.read``."""

    key: str
    start: int = 0
    length: int | None = None


class ListBelow(NamedTuple):
    """Answered by a listing."""

    prefix: str


class Delete(NamedTuple):
    """Answered by ``None``. Of several keys some may be deleted and others not, if it goes wrong."""

    keys: tuple[str, ...]


class Pause(NamedTuple):
    """Answered by ``None``, some time later."""

    seconds: float


Request: TypeAlias = Create | Read | ListBelow | Delete | Pause
Steps: TypeAlias = Generator[Request, Any, T]


class SlotTaken(Exception):
    """Another owner has created the slot that was to be appended: ``slot``."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(f"slot {slot.header.slot} is of epoch {slot.header.epoch}")
        self.slot = slot


class Opening(NamedTuple):
    """Who opens a log. ``nonce``: 16 random bytes, fresh for each opening. ``lease_ms``: 0 for none."""

    queue_id: bytes
    nonce: bytes
    owner: str
    lease_ms: int
    written_ms: int


def carry_out(steps: Steps[T], store: Store, wait: Callable[[float], object]) -> T:
    """Carry out all requests of ``steps``, and return its result. ``wait``: called with the seconds of a pause; what it
    raises ends the steps.
    """
    answer: object = None
    while True:
        try:
            request = resume(steps, answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = ask(request, store, wait)


def resume(steps: Generator[R, Any, T], answer: object) -> R:
    """Give ``steps`` an answer of ``ask``, at first ``None``, and return the next request."""
    return steps.throw(answer) if isinstance(answer, StoreUnavailable) else steps.send(answer)


def ask(request: Request, store: Store, wait: Callable[[float], object]) -> object:
    """Carry out one request. Returns the answer, or the ``StoreUnavailable`` that there was instead."""
    try:
        match request:
            case Create(key, data):
                return store.create(key, data)
            case Read(key, start, length):
                return store.read(key, start, length)
            case ListBelow(prefix):
                return store.list(prefix)
            case Delete(keys):
                store.delete(keys)
                return None
            case _:
                return wait(request.seconds)
    except StoreUnavailable as error:
        return error


# -- reading ---------------------------------------------------------------------------------------------------------


def read_end(prefix: str) -> Steps[LogState]:
    """What all slots add up to: the newest manifest that is listed, then slot after slot until one is missing (S6).

    ``prefix``: of the queue's keys; it ends in ``/``. Raises ``StoreDamaged``, ``UnsupportedFormat``, and
    ``StoreUnavailable``.
    """
    state = yield from _read_newest_manifest(prefix)
    return (yield from read_on(prefix, state))


def read_on(prefix: str, state: LogState) -> Steps[LogState]:
    """Apply the slots after ``state``, until one is missing. Returns ``state``, or another one: who was away for longer
    than the history may find a hole, with the FENCE of somebody who took the hole for the end. Then what he reads does
    not fit together, and he begins again at a newer manifest. Raises as ``read_end``.
    """
    while True:
        try:
            slot = yield from read_slot(prefix, state.slot + 1)
            if slot is None:
                return state
            follow(prefix, state, slot)
        except StoreDamaged:
            if (yield from newest_manifest(prefix)) <= state.begun_at:
                raise
            state = yield from _read_newest_manifest(prefix)


def read_end_surely(prefix: str, state: LogState | None = None) -> Steps[LogState]:
    """``read_end``, or ``read_on`` from ``state``, for somebody who appends nothing. What looks like the end may be a
    hole that garbage collection has left: then there is a manifest of a later slot, and he begins again at that one.
    An opening finds that out after its FENCE.
    """
    while True:
        state = yield from read_end(prefix) if state is None else read_on(prefix, state)
        if (yield from newest_manifest(prefix)) <= state.slot:
            return state
        state = None


def follow(prefix: str, state: LogState, slot: Slot) -> None:
    """Apply the next slot. Raises ``StoreDamaged`` if it cannot be the next one."""
    last_good_slot = state.slot
    objection = state.apply(slot)
    if objection is not None:
        raise StoreDamaged(prefix + codec.slot_key(last_good_slot + 1), 0, objection, last_good_slot)


def newest_manifest(prefix: str) -> Steps[int]:
    """The slot of the newest manifest that a listing shows; 0 if it shows none."""
    listing: Listing = yield ListBelow(f"{prefix}manifest/")
    found = (_MANIFEST.fullmatch(each.key.removeprefix(prefix)) for each in listing)
    return max((int(each[1]) for each in found if each is not None), default=0)


def _read_newest_manifest(prefix: str) -> Steps[LogState]:
    number = 0
    for _ in range(_LISTINGS):
        number = yield from newest_manifest(prefix)
        if not number:
            return LogState()
        found = yield from read_manifest(prefix, number)
        if found is not None:
            return LogState(found)
    raise StoreDamaged(prefix + manifests.manifest_key(number), 0, "it is listed, and is not there", 0)


def read_manifest(prefix: str, number: int) -> Steps[manifests.Manifest | None]:
    """A manifest; ``None`` if it is not there. Raises as ``read_end``."""
    key = prefix + manifests.manifest_key(number)
    data: bytes | None = yield Read(key)
    return None if data is None else decode_manifest(key, number, data)


def decode_manifest(key: str, number: int, data: bytes) -> manifests.Manifest:
    """Decode the object at ``key``. Raises ``StoreDamaged`` and ``UnsupportedFormat``."""
    version = manifests.manifest_version(data)
    if version is not None and version not in (manifests.MANIFEST_VERSION, manifests.MOVES_VERSION):
        raise UnsupportedFormat(key, version, manifests.MOVES_VERSION)
    found = manifests.decode_manifest(data)
    if found is None or found.header.slot != number:
        raise StoreDamaged(key, 0, "it is no manifest of that slot", 0)
    return found


def read_slot(prefix: str, number: int) -> Steps[Slot | None]:
    """A slot; ``None`` if it is not there. Raises as ``read_end``."""
    key = prefix + codec.slot_key(number)
    data: bytes | None = yield Read(key)
    return None if data is None else decode_slot(key, number, data)


def decode_slot(key: str, number: int, data: bytes) -> Slot:
    """Decode the object at ``key``. Raises ``StoreDamaged`` and ``UnsupportedFormat``."""
    version = codec.slot_version(data)
    if version is not None and version not in (codec.SLOT_VERSION, codec.MOVES_VERSION):
        raise UnsupportedFormat(key, version, codec.MOVES_VERSION)
    slot = codec.decode_slot(data)
    if slot is None or slot.header.slot != number:
        raise StoreDamaged(key, 0, f"it is not slot {number}", number - 1)
    return slot


# -- appending -------------------------------------------------------------------------------------------------------


def empty_header(state: LogState, kind: int, opening: Opening, *, first_id: int | None = None) -> SlotHeader:
    """The header of the next slot of this owner, if it has no bytes: the log goes on where it is."""
    at, place, begins = state.header, state.place, kind == FENCE
    epoch = (at.epoch if at is not None else 0) + begins
    written_ms = max(opening.written_ms, at.written_ms) if at is not None and not begins else opening.written_ms
    return SlotHeader(
        kind,
        state.slot + 1,
        epoch,
        opening.nonce,
        opening.queue_id,
        written_ms,
        state.crc,
        opening.lease_ms,
        place.number,
        place.marker,
        place.segment_crc,
        place.offset,
        0,
        place.last_id + 1 if first_id is None else first_id,
        place.last_id,
    )


def append(prefix: str, state: LogState, slot: Slot) -> Steps[None]:
    """Create the next slot, and apply it. Asks until it is decided. Raises ``SlotTaken``, with ``state`` as it was, and
    ``StoreDamaged`` if what is there is no slot. Raises ``ValueError`` for one that cannot be the next one: it is not
    sent, as it would end the log for everybody.
    """
    number = state.slot + 1
    key, data = prefix + codec.slot_key(number), codec.encode_slot(slot)  # fixed before it is first sent (S3)
    mine = decode_slot(key, number, data)
    objection = state.objection(mine)
    if objection is not None:
        raise ValueError(f"{key}: {objection}")
    pause = FIRST_PAUSE
    while not (yield from _is_created(key, data, number)):
        yield Pause(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    state.add(mine)


def _is_created(key: str, data: bytes, number: int) -> Steps[bool]:
    """Send a create once. If there is any doubt, read the slot (S4). Returns False if nothing is decided."""
    try:
        if (yield Create(key, data)):
            return True
        there: bytes | None = yield Read(key)
    except StoreUnavailable:
        there = yield from _read_in_doubt(key)
    if there is None or there == data:
        return there is not None
    raise SlotTaken(decode_slot(key, number, there))


def _read_in_doubt(key: str) -> Steps[bytes | None]:
    try:
        there: bytes | None = yield Read(key)
    except StoreUnavailable:
        return None
    return there


def open_log(
    prefix: str, opening: Opening, judge: Callable[[LogState], int], state: LogState | None = None
) -> Steps[LogState]:
    """Append a FENCE: from here on, the log is this owner's. Returns what the slots up to it add up to.

    ``judge`` is called with the log's end before each FENCE that is sent, and returns the least id that this epoch may
    give out; it raises if this owner must not have the log. ``state``: what is known of the log already.
    """
    while True:
        state = yield from read_end(prefix) if state is None else read_on(prefix, state)
        try:
            header = empty_header(state, FENCE, opening, first_id=judge(state))
            yield from append(prefix, state, Slot(header, note=codec.owner_note(opening.owner)))
        except SlotTaken:
            continue
        if (yield from newest_manifest(prefix)) < state.slot:
            return state
        state = None  # our FENCE stands in a hole that garbage collection left (S6): it is void
