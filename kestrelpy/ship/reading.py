"""Reading a queue from a store: the log up to a moment, and whole segments. Nothing here writes.

Rules:
1. Everything that is read is checked: a slot by its predecessor, a segment by the size and the crc in its SEAL. What is
   missing or different is ``StoreDamaged``, with the key.
2. A slot that is missing is the end of the log only if no later slot is listed. (If the last slot itself is lost, and
   no manifest has it, nothing shows that.)
3. A request that fails is sent again, a few times: a restore of many objects meets a busy server now and then.
4. A segment is read in parts, so a caller holds one part of it at a time.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from zlib import crc32

from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import NoSuchQueue, StoreDamaged, StoreUnavailable
from kestrelpy.ship.identity import IDENTITY_KEY, QueueIdentity, decode_identity
from kestrelpy.ship.log import carry_out, decode_manifest, decode_slot, follow, read_end, read_on
from kestrelpy.ship.manifest import LogState, Manifest
from kestrelpy.ship.slots import FENCE, SealedSegment, Slot
from kestrelpy.ship.store import Listing, Store

T = TypeVar("T")

PART_BYTES = 4 << 20
"""A segment is read in parts of this size."""
PAUSES = (0.1, 0.5, 2.0)
"""Seconds before a failed request is sent again."""
_NUMBERED = re.compile(r"(manifest|log)/([0-9]{16})")


class PatientStore:
    """A store whose failed reads and listings are sent again, after ``PAUSES``. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopping = threading.Event()

    def describe(self) -> str:
        return self._store.describe()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self._patiently(lambda: self._store.read(key, start, length))

    def list(self, prefix: str) -> Listing:
        return self._patiently(lambda: self._store.list(prefix))

    def create(self, key: str, data: bytes) -> bool:
        return self._store.create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    def stop(self) -> None:
        """Wait no more: from here on, a request that fails is not sent again."""
        self._stopping.set()

    def _patiently(self, send: Callable[[], T]) -> T:
        for seconds in PAUSES:
            try:
                return send()
            except StoreUnavailable:
                if self._stopping.wait(seconds):
                    raise
        return send()


class ShippedQueue:
    """A queue in a store, for reading. ``prefix``: of its keys. Its methods raise ``StoreUnavailable``,
    ``StoreDamaged`` and ``UnsupportedFormat``. Thread-safe.
    """

    def __init__(self, store: Store, queue: str) -> None:
        self.store = PatientStore(store)
        self.queue = queue
        self.prefix = f"{queue}/"
        self.of_jobs = False
        """Whether it is a work queue, once the log was read."""

    # -- the log -----------------------------------------------------------------------------------------------------

    def at_end(self) -> LogState:
        """What all slots add up to. Raises ``NoSuchQueue`` if there are none."""
        return self.settled(self._at_end)

    def at_slot(self, number: int) -> tuple[LogState, bool]:
        """What the slots up to that one add up to, and whether the log ends there. Later ones are not looked at: the
        log may be damaged there. Raises ``NoSuchQueue`` if that slot is not there, or not any more.
        """
        return self.settled(lambda: self._at_slot(number))

    def at_time(self, at_ms: int) -> tuple[LogState, bool]:
        """What the slots up to the last one that was written at ``at_ms`` or before add up to, and whether the log ends
        there. Raises ``NoSuchQueue`` if that slot is not there any more, or if there never was one.
        """
        return self.settled(lambda: self._at_time(at_ms))

    def settled(self, read: Callable[[], T]) -> T:
        """The result of ``read``. It is called once more if it finds damage, and garbage was collected meanwhile."""
        known = self.manifests()
        try:
            return read()
        except StoreDamaged:
            if self.manifests()[:1] == known[:1]:
                raise
        return read()

    def _at_end(self) -> LogState:
        state = carry_out(read_end(self.prefix), self.store, bool)
        if self.is_slot_after(state.slot):  # a slot that is missing, or one that was just created
            state = carry_out(read_on(self.prefix, state), self.store, bool)
            if self.slot(state.slot + 1) is None and self.is_slot_after(state.slot + 1):
                raise self.damage(codec.slot_key(state.slot + 1), "it is not there, and later ones are", state.slot)
        if not state.slot:
            raise self._none("it is not there")
        self._check_identity(state)
        return state

    def _at_slot(self, number: int) -> tuple[LogState, bool]:
        known = self.manifests()
        start = bisect_right(known, number)
        state = self._walk(known[start - 1] if start else 0, number)
        self._check_identity(state)
        return state, self.slot_is_missing(number + 1) and not self.is_slot_after(number)

    def _at_time(self, at_ms: int) -> tuple[LogState, bool]:
        end = self._at_end()
        last = end.slot
        for fence in reversed(end.fences):
            if self.slot_there(fence).header.written_ms <= at_ms:
                break
            last = fence - 1
        else:
            first_ms = self.slot_there(1).header.written_ms
            raise self._none(f"its log begins later, at {first_ms} ms", first_slot=1, first_ms=first_ms)
        # The clocks of two owners differ, so times may fall from one epoch to the next. Within this one they do not.
        known = [number for number in self.manifests() if number <= last]
        start = bisect_right(known, at_ms, key=lambda number: self.written_ms(number) if number >= fence else 0)
        state = self._walk(known[start - 1] if start else 0, last, at_ms, sure=fence)
        return state, state.slot == end.slot

    def _walk(self, begin: int, last: int, at_ms: int | None = None, *, sure: int = 0) -> LogState:
        """Apply the slots after the manifest ``begin`` (0: from slot 1 on) up to ``last``, or up to the last one that
        was written at ``at_ms`` or before. Those up to ``sure`` count whatever their times are.
        """
        state = self.state_at(begin)
        while state.slot < last:
            slot = self.slot(state.slot + 1)
            if slot is None:
                raise self._missing(state.slot, last)
            if at_ms is not None and slot.header.slot > sure and slot.header.written_ms > at_ms:
                break
            follow(self.prefix, state, slot)
        return state

    def _missing(self, good: int, wanted: int) -> Exception:
        """The error if slot ``good + 1`` is not there on the way to slot ``wanted``."""
        kept = next(iter(self.manifests()), 0)
        if kept > good + 1:  # garbage collection has come so far
            first_ms = self.written_ms(kept)
            reason = f"slot {wanted} is kept no more: it can be restored from slot {kept} on, of {first_ms} ms"
            return self._none(reason, first_slot=kept, first_ms=first_ms)
        if self.is_slot_after(good + 1):
            return self.damage(codec.slot_key(good + 1), "it is not there, and later ones are", good)
        return self._none(f"slot {wanted} is not there: its log ends at slot {good}" if good else "it is not there")

    def _none(self, reason: str, *, first_slot: int = 0, first_ms: int = 0) -> NoSuchQueue:
        return NoSuchQueue(self.store.describe(), self.queue, reason, first_slot=first_slot, first_ms=first_ms)

    def damage(self, key: str, reason: str, last_good_slot: int = 0, *, offset: int = 0) -> StoreDamaged:
        return StoreDamaged(self.prefix + key, offset, reason, last_good_slot)

    def _check_identity(self, state: LogState) -> None:
        """Check that ``queue.json`` says which queue this is. The log is whole without it: a missing one is left to
        ``verify``.
        """
        identity = self.identity()
        self.of_jobs = False
        if identity is not None:
            assert state.header is not None
            if (identity.queue, identity.queue_id) != (self.queue, state.header.queue_id):
                raise self.damage(IDENTITY_KEY, "it is of another queue than the log")
            self.of_jobs = identity.of_jobs

    def identity(self) -> QueueIdentity | None:
        """What ``queue.json`` says; ``None`` if it is not there."""
        key = self.prefix + IDENTITY_KEY
        data = self.store.read(key)
        return None if data is None else decode_identity(key, data)

    def given_out(self, state: LogState) -> int:
        """The last id that may have been given out before the last epoch began, as its FENCE says."""
        return self.fence(state, len(state.fences)).header.first_id - 1

    def fence(self, state: LogState, epoch: int) -> Slot:
        """The FENCE of an epoch of the log. It is there as long as the log is: what is not that is damage."""
        number, at = state.fences[epoch - 1], state.header
        assert at is not None
        slot = self.slot_there(number)
        found = slot.header
        nonce = at.nonce if epoch == at.epoch else found.nonce
        if (found.kind, found.epoch, found.nonce, found.queue_id) != (FENCE, epoch, nonce, at.queue_id):
            raise self.damage(codec.slot_key(number), f"it is not the FENCE of epoch {epoch}", number - 1)
        return slot

    # -- objects -----------------------------------------------------------------------------------------------------

    def manifests(self) -> list[int]:
        """The slots that have a manifest, as far as a listing shows, in order."""
        return self._numbers("manifest")

    def slots(self) -> list[int]:
        """The slots that are there, as far as a listing shows, in order."""
        return self._numbers("log")

    def _numbers(self, kind: str) -> list[int]:
        listing = self.store.list(f"{self.prefix}{kind}/")
        found = (_NUMBERED.fullmatch(each.key.removeprefix(self.prefix)) for each in listing)
        return sorted({int(each[2]) for each in found if each is not None} - {0})  # they are numbered from 1

    def is_slot_after(self, number: int) -> bool:
        """Whether a listing shows a slot with a higher number."""
        return max(self.slots(), default=0) > number

    def slot(self, number: int) -> Slot | None:
        """A slot; ``None`` if it is not there."""
        key = self.prefix + codec.slot_key(number)
        data = self.store.read(key)
        return None if data is None else decode_slot(key, number, data)

    def slot_is_missing(self, number: int) -> bool:
        return self.store.read(self.prefix + codec.slot_key(number), 0, 1) is None

    def slot_there(self, number: int) -> Slot:
        """A slot that must be there."""
        slot = self.slot(number)
        if slot is None:
            raise self.damage(codec.slot_key(number), "it is not there")
        return slot

    def manifest(self, number: int) -> Manifest:
        """The manifest of a slot, which must be there."""
        key = self.prefix + manifests.manifest_key(number)
        data = self.store.read(key)
        if data is None:
            raise StoreDamaged(key, 0, "it is not there", 0)
        return decode_manifest(key, number, data)

    def state_at(self, number: int) -> LogState:
        """The log up to a slot with a manifest, or before slot 1 for 0."""
        return LogState(self.manifest(number) if number else None)

    def written_ms(self, number: int) -> int:
        """When the slot of a manifest was written."""
        return self.manifest(number).header.written_ms

    def segment_parts(self, segment: SealedSegment, start: int = 0, crc: int = 0) -> Iterator[bytes]:
        """The bytes of a segment, in parts. Raises ``StoreDamaged`` after the last one if they are not those that its
        SEAL has named. ``start``: from there on; then ``crc`` is that of the bytes before.
        """
        for at in range(start, segment.file_bytes, PART_BYTES):
            size = min(PART_BYTES, segment.file_bytes - at)
            is_last = at + size == segment.file_bytes
            part = self.store.read(self.prefix + segment.key, at, size + is_last)  # one more, if there is one
            if part is None:
                raise self.damage(segment.key, "it is not there")
            if len(part) != size:
                reason = f"it has {'fewer' if len(part) < size else 'more'} than {segment.file_bytes} bytes"
                raise self.damage(segment.key, reason, offset=at + min(len(part), size))
            crc = crc32(part, crc)
            yield part
        if crc != segment.crc:
            raise self.damage(segment.key, "its crc is not the one in its SEAL")

    def tail_parts(self, state: LogState) -> Iterator[bytes]:
        """The bytes of the active segment that are in the log, slot by slot. Raises ``StoreDamaged`` for a slot that
        does not continue the one before.
        """
        place, crc, end = state.place, 0, 0
        assert state.header is not None
        for number, offset, first_id in state.tail:
            slot = self.slot_there(number)
            header = slot.header
            crc = crc32(slot.frames, crc)
            said = (header.queue_id, header.number, header.marker, header.offset, header.first_id, header.segment_crc)
            if said != (state.header.queue_id, place.number, place.marker, offset, first_id, crc) or offset != end:
                raise self.damage(codec.slot_key(number), "it is not the slot that a manifest names", number - 1)
            end = header.end
            yield slot.frames
        if state.tail and (end, crc) != (place.offset, place.segment_crc):
            raise self.damage(codec.slot_key(state.slot), "the active segment is not the one in the log")


def has_all(numbers: Sequence[int], last: int) -> bool:
    """Whether all numbers from 1 to ``last`` are in ``numbers``, which are above 0 and in order, each once."""
    return bisect_right(numbers, last) == last
