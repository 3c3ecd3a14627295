"""What the owner of a shipped queue sends, and in which order: rules S1 to S4 and S9 to S11 of docs/ship.md, without
threads and without I/O on a store.

As in ``log``, each piece of work is a generator of requests. One ``step`` is one slot. A closed segment goes first, as
a whole, and then the log says that it is there; else bytes of the segment that is being written; else where readers
are.

NOTE ON LOCKING: none of its own; its owner does one thing at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.format import LARGEST, Checkpoint
from kestrelpy._journal.segment import Segment
from kestrelpy._writing.export import Tip
from kestrelpy.ship import garbage
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged, StoreUnavailable
from kestrelpy.ship.garbage import Collected
from kestrelpy.ship.lease import OwnLease
from kestrelpy.ship.log import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Create,
    Delete,
    ListBelow,
    Opening,
    Pause,
    Request,
    Steps,
    append,
    empty_header,
    resume,
)
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import CLOSE, DATA, SEAL, DroppedReader, SavedState, SealedSegment, ShippedLedger, Slot
from kestrelpy.ship.store import Store

T = TypeVar("T")

MOST_FRAME_BYTES = 60 << 20
"""A frame above this is in no slot: its segment is closed, and shipped whole."""
LARGE_STATE_BYTES = 256 << 10
"""A reader's state above this is shipped at most each ``LARGE_STATE_SECONDS``."""
LARGE_STATE_SECONDS = 10.0
MOST_STATE_BYTES = 2 << 20
"""States above this, together, are not all sent in one slot."""
STATE_SECONDS = 1.0
"""So often it is looked where the readers are."""
SEALS_PER_MANIFEST = 100
MANIFEST_SHARE = 20
"""Manifests are at most one part in so many of all bytes that are shipped ..."""
MANIFESTS_A_HISTORY = 24
"""... but for so many in the time of a history."""
MOST_TAIL_SLOTS = 1000
"""A segment that is in so many slots is closed, however small it is: a restore reads each of these slots."""


class ShippedJournal(Protocol):
    """What an owner asks of its queue: ``kestrelpy._writing.export.Export`` has it."""

    def look(self) -> tuple[list[Segment], Tip]: ...

    def make_durable(self, last_id: int) -> None: ...

    def read(self, segment: Segment, offset: int, size: int) -> bytes: ...

    def read_file(self, segment: Segment) -> bytes: ...

    def close_segment(self) -> None: ...

    def totals_through(self, item_id: int) -> tuple[int, int]: ...

    def readers(self) -> tuple[dict[str, Checkpoint], set[str]]: ...


class Upload(NamedTuple):
    """Put a closed segment into the store. Answered by an ``Uploaded``, by ``None`` if it is not known what is there
    then, or by ``UNDER_WAY`` if the owner should append something meanwhile. ``records_end``: of the segment. ``load``:
    reads the file.
    """

    key: str
    records_end: int
    load: Callable[[], bytes]


class Uploaded(NamedTuple):
    """A segment in the store. ``file_bytes``, ``crc``, ``header``, ``footer``: of the file. ``segment_crc``: of the
    file up to its ``records_end``.
    """

    file_bytes: int
    crc: int
    header: bytes
    footer: bytes
    segment_crc: int


UNDER_WAY = "under way"
"""The answer to an upload that takes so long that the lease has to be renewed."""


class Expect(NamedTuple):
    """These uploads will be asked for, in this order: they may be begun. Answered by ``None``."""

    uploads: tuple[Upload, ...]


Work: TypeAlias = Generator[Request | Upload | Expect, Any, T]


def carry_upload(upload: Upload, store: Store) -> Uploaded | None:
    """Upload a segment, and read back its end: so its size is known (S9). Raises ``StoreUnavailable``, ``StoreDamaged``
    if something else is there, and ``OSError``.
    """
    data = upload.load()
    store.create(upload.key, data)
    footer = data[-fmt.FOOTER_BYTES :]
    there = store.read(upload.key, len(data) - len(footer), len(footer) + 1)
    if there is None:
        return None
    if there != footer:
        raise StoreDamaged(upload.key, len(data) - len(footer), "it is not the segment that was uploaded", 0)
    view = memoryview(data)
    segment_crc = crc32(view[: upload.records_end])
    crc = crc32(view[upload.records_end :], segment_crc)
    return Uploaded(len(data), crc, data[: fmt.HEADER_BYTES], footer, segment_crc)


class Shipped(NamedTuple):
    """How far the log has come: the last id, and the number and the bytes of all items ever put up to it."""

    last_id: int
    total_items: int
    total_bytes: int

    @classmethod
    def by(cls, segment: Segment) -> Shipped:
        """To the end of a closed segment."""
        header = segment.header
        return cls(segment.last_id, header.base_items + segment.items, header.base_bytes + segment.data_bytes)


class LogOwner:
    """Ships one queue, slot by slot. ``state``: what is in the log."""

    def __init__(
        self,
        prefix: str,
        opening: Opening,
        state: LogState,
        journal: ShippedJournal,
        now_ms: Callable[[], int],
        *,
        chunk_bytes: int = 1 << 20,
        uploads: int = 4,
        manifest_interval: float = 60.0,
        history: float = 86_400.0,
        data_first: bool = False,
        lease: OwnLease | None = None,
    ) -> None:
        self.state = state
        self.shipped = Shipped(state.place.last_id, *journal.totals_through(state.place.last_id))
        self._ledgers: deque[tuple[int, ShippedLedger]] = deque()
        """The states of the inbox's ledger that are not in the log: from how many items on, and the state."""
        self.data_slots = self.slots = self.segments = self.sent_bytes = self._manifest_bytes = 0
        self._prefix = prefix
        self._opening = opening
        self._journal = journal
        self._now_ms = now_ms
        self._chunk_bytes = chunk_bytes
        self._uploads = uploads
        self._manifest_interval = manifest_interval
        self._history = history
        self._data_first = data_first
        self._lease = lease
        self._seals = 0  # since the last manifest
        self._manifest_at: float | None = None
        self._states_at: float | None = None
        self._readers: tuple[dict[str, Checkpoint], set[str]] = ({}, set())
        self._large_at: dict[str, float] = {}

    @property
    def sealed_number(self) -> int:
        """The number of the last segment that is whole in the log: no later one may be retired here (S10)."""
        return self.state.segments[-1].number if self.state.segments else 0

    def note_ledger(self, ledger: ShippedLedger, from_items: int) -> None:
        """The inbox's ledger has another state. A slot has it with which the log has so many items, or more: an intent
        comes no later than the first item of its batch, and "taken in" no earlier than the last one (S12). Items are
        counted from the first one ever, as ids jump. Any thread.
        """
        self._ledgers.append((from_items, ledger))

    def _ledger_for(self, last_id: int) -> ShippedLedger | None:
        """The ledger for a slot that ends with ``last_id``; ``None`` if it is as before."""
        noted = list(self._ledgers)
        if all(ledger == self.state.ledger for _, ledger in noted):
            return None
        found, items = None, self._items_through(last_id)
        for from_items, ledger in noted:
            if from_items <= items:  # a later state may count earlier: no item of its batch has come
                found = ledger
        return None if found == self.state.ledger else found

    def _forget_ledgers(self) -> None:
        """Forget the states that the log has got, or got over."""
        while len(self._ledgers) > 1 and self._ledgers[1][0] <= self.shipped.total_items:
            self._ledgers.popleft()

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, now: float, *, ending: bool = False, may_send: bool = True) -> Work[bool]:
        """Append the next slot, if there is something for it. Returns whether there was. ``now``: seconds of a clock
        that does not jump. ``ending``: look at the readers now. ``may_send``: bytes of the segment that is being
        written, too.

        Raises as ``append``, and as the queue's journal.
        """
        if ending or self._states_at is None or now >= self._states_at + STATE_SECONDS:
            self._readers = self._journal.readers()  # before the look at the journal: the slot then covers them
            self._states_at = now
        if len(self.state.tail) >= MOST_TAIL_SLOTS:
            self._journal.close_segment()
        closed, tip = self._journal.look()
        waiting = [each for each in closed if each.number > self.sealed_number]
        if waiting:
            rest = self._rest_of(waiting[0]) if self._data_first and len(waiting) == 1 else None
            if rest is not None and (yield from self._append_data(rest, now)):
                return True
            yield from self._seal(waiting, now)
        else:
            goes_on = may_send and (yield from self._append_data(tip, now))
            if not goes_on and not (yield from self._append_states(now)) and not (yield from self._renew_lease()):
                return False
        yield from self._write_manifest(now)
        return True

    def close(self, now: float, *, handed_over: bool = False) -> Steps[None]:
        """Say that this owner has left. Call it when ``step`` has nothing to do."""
        states = self._moved_readers(self.state.place.last_id, now, ending=True)
        yield from self._append(CLOSE, checkpoints=states, note=codec.close_note(handed_over=handed_over))

    def collect(self, now: float, history_ms: int, keep_ms: int | None, known: garbage.Known) -> Steps[Collected]:
        """Delete what is needed no more (``garbage.collect``)."""
        closed, tip = self._journal.look()
        here = [each.number for each in (*closed, *([tip.segment] if tip.segment is not None else []))]
        steps = garbage.collect(
            self._prefix,
            self.state,
            self._append_planned,
            history_ms=history_ms,
            keep_ms=keep_ms,
            oldest_here=min(here, default=LARGEST),
            known=known,
        )
        done = yield from self._renewing(steps)
        yield from self._write_manifest(now)
        return done

    def _append_planned(self, plan: garbage.Plan) -> Steps[None]:
        opening = self._opening._replace(written_ms=self._now_ms())
        yield from self._append_slot(garbage.slot_of(plan, self.state, opening))

    def _append(self, kind: int, *, checkpoints: tuple[SavedState, ...] = (), note: bytes = b"") -> Steps[None]:
        yield from self._append_slot(Slot(self._header(kind), checkpoints=checkpoints, note=note))

    def _header(self, kind: int) -> codec.SlotHeader:
        return empty_header(self.state, kind, self._opening._replace(written_ms=self._now_ms()))

    def _append_slot(self, slot: Slot) -> Steps[None]:
        if self._lease is not None:
            self._lease.begin()
        yield from append(self._prefix, self.state, slot._replace(ledger=self._ledger_for(slot.header.last_id)))
        if self._lease is not None:
            self._lease.renew()
        self._forget_ledgers()
        header = self.state.header
        assert header is not None
        self.slots += 1
        self.sent_bytes += header.slot_bytes

    # -- the lease ---------------------------------------------------------------------------------------------------

    def _renew_lease(self) -> Steps[bool]:
        """Append an empty slot, if it is time. Returns whether it was."""
        if self._lease is None or self._lease.next_beat > 0:
            return False
        yield from self._append(DATA)
        return True

    def _renewing(self, steps: Steps[T]) -> Steps[T]:
        """Do ``steps``, and renew the lease before each listing and each deletion: no slot is under way then."""
        answer: object = None
        while True:
            try:
                request = resume(steps, answer)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(request, ListBelow | Delete):
                yield from self._renew_lease()
            try:
                answer = yield request
            except StoreUnavailable as error:
                answer = error

    # -- closed segments ---------------------------------------------------------------------------------------------

    def _rest_of(self, segment: Segment) -> Tip | None:
        """What of a closed segment is not in the log, if its beginning is: puts wait for it."""
        place = self.state.place
        if (
            not self.state.tail
            or place.number != segment.number
            or segment.records_end - place.offset > self._chunk_bytes
        ):
            return None
        return Tip(segment, segment.records_end, *Shipped.by(segment))

    def _seal(self, waiting: list[Segment], now: float) -> Work[None]:
        """Upload the first segment, and then say so (S9)."""
        uploads = tuple(map(self._upload_of, waiting[: self._uploads]))
        segment = waiting[0]
        uploaded = yield from self._uploaded(uploads)
        sealed = SealedSegment(uploads[0].key.removeprefix(self._prefix), *uploaded[:4])
        header = self._header(SEAL)._replace(
            number=segment.number,
            marker=segment.header.marker,
            segment_crc=uploaded.segment_crc,
            offset=segment.records_end,
            first_id=segment.first_id,
            last_id=segment.last_id,
        )
        states = self._moved_readers(segment.last_id, now)
        yield from self._append_slot(Slot(header, checkpoints=states, note=codec.encode_sealed(sealed)))
        self.segments += 1
        self.sent_bytes += sealed.file_bytes
        self._seals += 1
        self.shipped = Shipped.by(segment)

    def _uploaded(self, uploads: tuple[Upload, ...]) -> Work[Uploaded]:
        """Upload the first of these; the others may be begun. The lease is renewed meanwhile."""
        yield Expect(uploads)
        pause = FIRST_PAUSE
        while True:
            answer: Uploaded | str | None = None
            with contextlib.suppress(StoreUnavailable):
                answer = yield uploads[0]
            if isinstance(answer, Uploaded):
                return answer
            yield from self._renew_lease()
            if answer is None:
                yield Pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _upload_of(self, segment: Segment) -> Upload:
        key = codec.segment_key(segment.number, self.state.header.epoch, self._opening.nonce)  # type: ignore[union-attr]
        journal = self._journal
        return Upload(self._prefix + key, segment.records_end, lambda: journal.read_file(segment))

    # -- the segment that is being written ---------------------------------------------------------------------------

    def _append_data(self, tip: Tip, now: float) -> Steps[bool]:
        """Append what was put since the last slot, or the first part of it."""
        segment, place, begins = tip.segment, self.state.place, not self.state.tail
        if segment is None or tip.last_id < segment.first_id:
            return False
        start = 0 if begins else place.offset
        if start >= tip.end:
            return False
        self._journal.make_durable(tip.last_id)  # S1
        part = self._part(segment, start, tip)
        if part is None:
            self._journal.close_segment()
            return True
        frames, last_id = part
        header = self._header(DATA)._replace(
            number=segment.number,
            marker=segment.header.marker,
            segment_crc=crc32(frames, 0 if begins else place.segment_crc),
            offset=start,
            first_id=segment.first_id if begins else place.last_id + 1,
            last_id=last_id,
        )
        states = self._moved_readers(last_id, now)
        yield from self._append_slot(Slot(header._replace(length=len(frames)), frames, states))
        self.data_slots += 1
        totals = tip[3:] if last_id == tip.last_id else self._journal.totals_through(last_id)
        self.shipped = Shipped(last_id, *totals)
        return True

    def _part(self, segment: Segment, start: int, tip: Tip) -> tuple[bytes, int] | None:
        """Whole frames from ``start`` on, and the last id in them: all that there is, or as much as one slot takes.
        ``None`` if no slot takes the first frame.
        """
        wanted = tip.end - start
        if wanted <= self._chunk_bytes:
            return self._journal.read(segment, start, wanted), tip.last_id
        data = self._journal.read(segment, start, self._chunk_bytes + fmt.FRAME_BYTES)
        at = fmt.HEADER_BYTES if start == 0 else 0
        last_id, first = tip.last_id, True
        while True:
            first_id, size = fmt.frame_span(data, at)
            if not first and at + size > self._chunk_bytes:
                return data[:at], first_id - 1
            at += size
            if at > MOST_FRAME_BYTES:
                return None
            if first and at > self._chunk_bytes:  # one frame that is larger than a slot usually is
                data = self._journal.read(segment, start, min(at + fmt.FRAME_BYTES, wanted))
            if start + at == tip.end:
                return data[:at], last_id
            first = False

    # -- readers -----------------------------------------------------------------------------------------------------

    def _append_states(self, now: float) -> Steps[bool]:
        """Append where readers are, and the ledger, if they have changed, and nothing was put."""
        last_id = self.state.place.last_id
        states = self._moved_readers(last_id, now)
        if not states and self._ledger_for(last_id) is None:
            return False
        yield from self._append(DATA, checkpoints=states)
        return True

    def _moved_readers(self, last_id: int, now: float, *, ending: bool = False) -> tuple[SavedState, ...]:
        """The states of readers that have changed, as far as a log that ends with ``last_id`` covers them (S11)."""
        states, unknown = self._readers
        known = self.state.checkpoints
        moved: list[SavedState] = [DroppedReader(name) for name in known if name not in states and name not in unknown]
        left = MOST_STATE_BYTES
        for name, state in sorted(states.items()):
            shown = self._covered(state, last_id)
            if shown is None or shown == known.get(name):
                continue
            size = len(fmt.encode_checkpoint_body(shown))
            if size > LARGE_STATE_BYTES and not ending:
                if now < self._large_at.get(name, now) + (LARGE_STATE_SECONDS if name in self._large_at else 0):
                    continue
                self._large_at[name] = now
            if size > left and left < MOST_STATE_BYTES:
                break
            left -= size
            moved.append(shown)
        return tuple(moved)

    def _items_through(self, last_id: int) -> int:
        shipped = self.shipped
        return shipped.total_items if last_id == shipped.last_id else self._journal.totals_through(last_id)[0]

    def _covered(self, state: Checkpoint, last_id: int) -> Checkpoint | None:
        """What a slot says of a reader, if it covers the reader's state. A reader that has passed over ids after
        ``last_id`` that have no item is before them.
        """
        if state.head > last_id and self._journal.totals_through(state.head)[0] == self._items_through(last_id):
            state = state._replace(head=last_id)
        if state.highest_id > last_id or (state.move is not None and state.move.notes[-1].item_id > last_id):
            return None
        if state.hint_number > self.state.place.number:
            state = state._replace(hint_number=0, hint_offset=0, hint_id=0)
        errors = tuple(each for each in state.error_counts if each[0] <= last_id)
        watermark = min(state.watermark, last_id)
        return state._replace(watermark=watermark, durable_head=0, error_counts=errors)

    # -- manifests ---------------------------------------------------------------------------------------------------

    def _write_manifest(self, now: float) -> Steps[None]:
        """Write a manifest of what is in the log, if it is time. Without an answer, the next one will do."""
        if self._manifest_at is None:
            self._manifest_at = now
        if now < self._manifest_at + self._manifest_interval and self._seals < SEALS_PER_MANIFEST:
            return
        data = manifests.encode_manifest(self.state.manifest())
        is_rare = now >= self._manifest_at + self._history / MANIFESTS_A_HISTORY
        if not is_rare and (self._manifest_bytes + len(data)) * MANIFEST_SHARE > self.sent_bytes:
            return
        self._manifest_at, self._seals = now, 0
        try:
            yield Create(self._prefix + manifests.manifest_key(self.state.slot), data)
        except StoreUnavailable:
            return
        self._manifest_bytes += len(data)
        self.sent_bytes += len(data)
