"""The check of all objects of a queue in a store, each byte. It is part of ``remote``.

Rules:
1. From the oldest manifest on, every slot must be there. Before it, garbage may have been collected: only the FENCEs
   and the slots that make that manifest's active segment must be there.
2. A problem does not end the check. Where the log is damaged, it goes on at the next manifest.
3. What was damaged before it was shipped is a problem as well: whoever restores it meets it.
4. The inbox in the store is checked as ``in_check`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import frames_of, load_segment
from kestrelpy._value import Value
from kestrelpy.errors import CorruptJournal
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.identity import IDENTITY_KEY, decode_identity
from kestrelpy.ship.in_check import InboxObjects
from kestrelpy.ship.log import decode_manifest, decode_slot, follow
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.reading import PART_BYTES, ShippedQueue, has_all
from kestrelpy.ship.slots import FENCE, SealedSegment, ShippedLedger, Slot

if TYPE_CHECKING:
    from kestrelpy._disk.interface import File

WINDOW_BYTES = 32 << 20
"""A segment is read in windows of this size. Most have no more, and are read once."""


class RemoteReport(Value, kw_only=True):
    """What ``verify`` found. ``problems``: one sentence for each, which begins with the key. ``slots``, ``segments``,
    ``manifests``: how many were read; ``bytes``: of these. ``garbage``: objects that nothing needs: no problem.
    ``batches``, ``parts``: those of the inbox that were read.
    """

    problems: tuple[str, ...] = ()
    slots: int = 0
    segments: int = 0
    manifests: int = 0
    bytes: int = 0
    garbage: int = 0
    batches: int = 0
    parts: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is there, and as it was put there."""
        return not self.problems


class RemoteCheck:
    """One check. ``known``: the slots that have a manifest."""

    def __init__(self, shipped: ShippedQueue, progress: Callable[[int, int], object] | None) -> None:
        self.known = shipped.manifests()
        self._shipped = shipped
        self._prefix = shipped.prefix
        self._progress = progress
        self._there = shipped.slots()
        self._last = max((0, *self._there, *self.known))
        self._has_slot, self._has_manifest = frozenset(self._there), frozenset(self.known)
        self._sizes = {each.key: each.size_bytes for each in shipped.store.list(shipped.prefix)}
        self._total_bytes = sum(self._sizes.values())
        self._done_bytes = 0
        self._counted: set[str] = set()
        self._problems: dict[str, None] = {}  # in the order in which they are found, each once
        self._read_slots: set[int] = set()
        self._base = 0  # from this slot on, all must be there
        self._needed: set[int] = set()  # those before it that must be there, too
        self._named: dict[str, SealedSegment] = {}
        self._segments = self._manifests = 0
        self._ledger: ShippedLedger | None = None  # as of the end of the log
        self._inbox = InboxObjects(shipped.queue, shipped.prefix, self._read)

    def run(self) -> RemoteReport:
        """Check everything. Raises as ``verify``."""
        if not self.known and not self._there:
            self._shipped.at_end()  # raises NoSuchQueue
        queue_id = self._check_log()
        self._attempt(partial(self._check_identity, queue_id))
        for segment in self._named.values():
            self._attempt(partial(self._check_segment, segment))
        keys = [key.removeprefix(self._prefix) for key in self._sizes]
        self._problems.update((str(problem), None) for problem in self._inbox.check(keys, self._ledger))
        named = {self._prefix + key for key in self._named}
        left = [key for key in self._sizes if key not in named and self._is_segment(key)]
        unneeded = [number for number in self._there if number < self._base and number not in self._needed]
        return RemoteReport(
            problems=tuple(self._problems),
            slots=len(self._read_slots),
            segments=self._segments,
            manifests=self._manifests,
            bytes=self._done_bytes,
            garbage=len(left) + len(unneeded),
            batches=self._inbox.batches,
            parts=self._inbox.parts,
        )

    def _is_segment(self, key: str) -> bool:
        return codec.parse_segment_key(key.removeprefix(self._prefix)) is not None

    def _attempt(self, check: Callable[[], object]) -> bool:
        """Whether a check finds nothing. What it finds is noted."""
        try:
            check()
        except (StoreDamaged, CorruptJournal) as problem:
            self._problems[str(problem)] = None
            return False
        return True

    def _read(self, key: str) -> bytes | None:
        data = self._shipped.store.read(self._prefix + key)
        if key not in self._counted:
            self._counted.add(key)
            self._count(len(data or b""))
        return data

    def _count(self, size: int) -> None:
        self._done_bytes += size
        if self._progress is not None:
            self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

    def _check_identity(self, queue_id: bytes) -> None:
        data = self._read(IDENTITY_KEY)
        if data is None:
            raise self._shipped.damage(IDENTITY_KEY, "it is not there")
        identity = decode_identity(self._prefix + IDENTITY_KEY, data)
        if identity.queue != self._shipped.queue or queue_id not in (b"", identity.queue_id):
            raise self._shipped.damage(IDENTITY_KEY, "it is of another queue than the log")

    # -- the log -----------------------------------------------------------------------------------------------------

    def _check_log(self) -> bytes:
        """Go through the log. Returns the queue's id; empty if no slot or manifest says it."""
        state = LogState()
        if not self.known or has_all(self._there, self.known[0]):
            self._base = 1
            self._walk(state)
        for number in self.known:
            if number > state.slot:
                state = self._begin(number) or state
                self._walk(state)
        for number in self._there:
            if number not in self._read_slots:  # it is not needed any more, or the log is damaged around it
                self._attempt(partial(self._slot, number))
        self._ledger = state.ledger
        return state.header.queue_id if state.header is not None else b""

    def _walk(self, state: LogState) -> None:
        """Apply the slots that follow, as far as they do."""
        good = -1
        while good < state.slot:
            good = state.slot
            self._attempt(partial(self._step, state))

    def _step(self, state: LogState) -> None:
        number = state.slot + 1
        slot = self._slot(number)
        if slot is None:
            if self._last > number:
                raise self._shipped.damage(codec.slot_key(number), "it is not there, and later ones are", state.slot)
            return
        follow(self._prefix, state, slot)
        if slot.sealed is not None:
            self._named[slot.sealed.key] = slot.sealed
        if number in self._has_manifest:
            self._attempt(partial(self._check_manifest, state))

    def _slot(self, number: int) -> Slot | None:
        """A slot, with its frames checked; ``None`` if it is not there."""
        key = codec.slot_key(number)
        data = self._read(key)
        if data is None:
            return None
        self._read_slots.add(number)
        slot = decode_slot(self._prefix + key, number, data)
        self._attempt(partial(self._check_frames, slot))
        return slot

    def _check_frames(self, slot: Slot) -> None:
        """Check that a slot's bytes are whole frames, of all items that it says."""
        header = slot.header
        due, at = header.first_id, 0 if header.offset or not header.length else fmt.HEADER_BYTES
        while at < header.length:
            frame = fmt.decode_frame(slot.frames, at, header.marker)
            if frame is None or frame.footer is not None or frame.first_id != due:
                break
            due, at = frame.last_id + 1, at + frame.size
        if header.length and (at, due) != (header.length, header.last_id + 1):
            reason = f"item {due} is not intact here: it was shipped so"
            raise self._shipped.damage(codec.slot_key(header.slot), reason, offset=codec.HEADER_BYTES + at)

    def _check_manifest(self, state: LogState) -> None:
        """Check the manifest of the last slot: it is what the slots up to it add up to."""
        key = manifests.manifest_key(state.slot)
        data = self._read(key)
        if data is None:
            raise self._shipped.damage(key, "it is not there")
        self._manifests += 1
        decode_manifest(self._prefix + key, state.slot, data)
        if data != manifests.encode_manifest(state.manifest()):
            raise self._shipped.damage(key, "it is not what the slots up to it add up to")

    def _begin(self, number: int) -> LogState | None:
        """The log up to a manifest that the slots before it do not lead to: they are gone, or damaged. ``None`` if the
        manifest is, too.
        """
        key = manifests.manifest_key(number)
        data = self._read(key)
        try:
            if data is None:
                raise self._shipped.damage(key, "it is not there")
            self._manifests += 1
            state = LogState(decode_manifest(self._prefix + key, number, data))
        except StoreDamaged as problem:
            self._problems[str(problem)] = None
            return None
        self._base = self._base or number
        self._named.update((each.key, each) for each in state.segments)
        self._attempt(partial(self._check_fences, state))
        self._attempt(partial(self._check_tail, state))
        if number in self._has_slot:
            self._attempt(partial(self._check_last, state))
        return state

    def _check_fences(self, state: LogState) -> None:
        self._needed.update(state.fences)
        for epoch, number in enumerate(state.fences, 1):
            slot = self._slot(number)
            if slot is None or (slot.header.kind, slot.header.epoch) != (FENCE, epoch):
                raise self._shipped.damage(codec.slot_key(number), f"it is not the FENCE of epoch {epoch}")

    def _check_tail(self, state: LogState) -> None:
        self._needed.update(each.slot for each in state.tail)
        for _ in self._shipped.tail_parts(state):
            pass

    def _check_last(self, state: LogState) -> None:
        slot = self._slot(state.slot)
        if slot is not None and (slot.crc, slot.header) != (state.crc, state.header):
            raise self._shipped.damage(manifests.manifest_key(state.slot), "it is of another slot than the one there")

    # -- segments ----------------------------------------------------------------------------------------------------

    def _check_segment(self, segment: SealedSegment) -> None:
        """Check a segment's file as a whole, its header and footer, and each of its items."""
        file = _StoredFile(self._shipped, segment)
        crc = 0
        for at in range(0, segment.file_bytes, PART_BYTES):
            part = file.read(at, PART_BYTES)
            crc = crc32(part, crc)
            self._count(len(part))
        if crc != segment.crc or self._sizes.get(self._prefix + segment.key, segment.file_bytes) != segment.file_bytes:
            raise self._shipped.damage(segment.key, "its crc or size is not the one in its SEAL")
        self._segments += 1
        footer_at = segment.file_bytes - fmt.FOOTER_BYTES
        ends = (file.read(0, fmt.HEADER_BYTES), file.read(footer_at, fmt.FOOTER_BYTES))
        if ends != (segment.header, segment.footer):
            raise self._shipped.damage(segment.key, "its header or footer is not the one in its SEAL")
        header = segment.segment_header()
        if header is None:
            raise self._shipped.damage(segment.key, "its header is damaged: it was shipped so")
        readable = cast("File", file)
        for _ in frames_of(readable, load_segment(readable, segment.key, header), self._prefix + segment.key):
            pass


class _StoredFile:
    """A segment in a store, for the code that reads files."""

    def __init__(self, shipped: ShippedQueue, segment: SealedSegment) -> None:
        self._shipped = shipped
        self._segment = segment
        self._at, self._window = 0, b""

    def size(self) -> int:
        return self._segment.file_bytes

    def read(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size() - offset))
        if not self._at <= offset <= offset + size <= self._at + len(self._window):
            self._at = offset if self.size() > WINDOW_BYTES else 0
            want = max(size, min(WINDOW_BYTES, self.size() - self._at))
            data = self._shipped.store.read(self._shipped.prefix + self._segment.key, self._at, want)
            if data is None:
                raise self._shipped.damage(self._segment.key, "it is not there")
            if len(data) != want:
                reason = f"it has fewer than {self.size()} bytes"
                raise self._shipped.damage(self._segment.key, reason, offset=self._at + len(data))
            self._window = data
        return self._window[offset - self._at : offset - self._at + size]
