"""What an owner sends, step by step, over a journal that is bytes in memory: cuts, limits, leases and lost answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import Segment
from kestrelpy._writing.export import Tip
from kestrelpy.inbox.format import LedgerState
from kestrelpy.ship import StoreDamaged, StoreUnavailable, log, owner
from kestrelpy.ship.lease import OwnLease
from kestrelpy.ship.log import Create, ListBelow, Opening, Pause
from kestrelpy.ship.owner import UNDER_WAY, Expect, LogOwner, Upload, carry_upload
from kestrelpy.ship.slots import CLOSE, DATA, SEAL, DroppedReader, ShippedLedger, Slot
from kestrelpy.testing.stores import MemoryStore
from tests.ship.examples import MARKER, NUMBER, QUEUE_ID
from tests.ship.in_store import items_of, log_of

PREFIX = "jobs/"
OPENING = Opening(QUEUE_ID, b"n" * 16, "me", 0, 1_700_000_000_000)


class Journal:
    """``ShippedJournal``. ``file``: of the segment that is being written; ``files``: of those that are closed."""

    def __init__(self) -> None:
        self.last_id = self.data_bytes = 0
        self.segments: list[Segment] = []
        self.files: list[bytes] = []
        self.states: dict[str, fmt.Checkpoint] = {}
        self.segment: Segment
        self.begin(NUMBER)

    def begin(self, number: int) -> None:
        before = self.segments[-1] if self.segments else None
        link = (before.number, before.last_id, before.records_end) if before is not None else (0, 0, 0)
        header = fmt.SegmentHeader(MARKER, QUEUE_ID, number, self.last_id + 1, self.last_id, self.data_bytes, *link)
        self.segment = Segment("", header, self.last_id, 0, fmt.HEADER_BYTES)
        self.file = fmt.encode_header(header)

    def put(self, data: bytes) -> None:
        self.last_id += 1
        self.file += fmt.encode_item(self.last_id, data, 255, None, self.last_id - 1, MARKER)
        self.data_bytes += len(data)
        self.segment.last_id, self.segment.records_end = self.last_id, len(self.file)
        self.segment.data_bytes += len(data)

    def look(self) -> tuple[list[Segment], Tip]:
        return self.segments, Tip(self.segment, len(self.file), self.last_id, self.last_id, self.data_bytes)

    def make_durable(self, last_id: int) -> None:
        assert last_id <= self.last_id

    def read(self, segment: Segment, offset: int, size: int) -> bytes:
        data = self.file if segment is self.segment else self.read_file(segment)
        return data[offset : offset + size]

    def read_file(self, segment: Segment) -> bytes:
        return self.files[self.segments.index(segment)]

    def close_segment(self) -> None:
        self.segments.append(self.segment)
        footer = fmt.encode_footer(self.segment.as_footer(), self.segment.number, MARKER)
        self.files.append(self.file + footer)
        self.begin(self.segment.number + 1)

    def totals_through(self, item_id: int) -> tuple[int, int]:
        return min(item_id, self.last_id), 0

    def readers(self) -> tuple[dict[str, fmt.Checkpoint], set[str]]:
        return dict(self.states), set()


class Shipped:
    """An owner of a log in ``store``. ``is_lost``: which requests are not answered."""

    def __init__(self, **options: Any) -> None:
        self.store, self.journal = MemoryStore(), Journal()
        self.requests: list[Any] = []
        self.answers: list[object] = []  # to uploads, before they are carried out
        self.is_lost: Callable[[Any], bool] = lambda request: False
        state = log.carry_out(log.open_log(PREFIX, OPENING, lambda state: 1), self.store, bool)
        self.owner = LogOwner(PREFIX, OPENING, state, self.journal, lambda: 1_700_000_000_000, **options)

    def carry(self, steps: Any) -> Any:
        answer: object = None
        while True:
            try:
                request = log.resume(steps, answer)
            except StopIteration as end:
                return end.value
            self.requests.append(request)
            answer = self.answer(request)

    def answer(self, request: Any) -> object:
        if isinstance(request, Expect):
            return None
        if isinstance(request, Upload):
            return self.answers.pop(0) if self.answers else carry_upload(request, self.store)
        if self.is_lost(request):
            return StoreUnavailable("the store", "key", "no answer")
        return log.ask(request, self.store, bool)

    def ship(self, now: float = 0.0) -> None:
        while self.carry(self.owner.step(now)):
            pass

    def slots(self, kind: int | None = None) -> list[Slot]:
        found = [log.carry_out(log.read_slot(PREFIX, n), self.store, bool) for n in range(2, self.owner.state.slot + 1)]
        return [slot for slot in found if slot is not None and kind in (None, slot.header.kind)]


def checkpoint(head: int, spans: int = 0, name: str = "audit") -> fmt.Checkpoint:
    done = tuple((head + 2 * n, head + 2 * n) for n in range(1, spans + 1))
    return fmt.Checkpoint(QUEUE_ID, name, head, head, 0, 0, done=done)


def test_what_waits_is_cut_between_frames() -> None:
    shipped = Shipped(chunk_bytes=300)
    for size in (60, 60, 60, 500, 10, 10, 0):
        shipped.journal.put(bytes(size))
    shipped.ship()
    slots = shipped.slots(DATA)
    assert b"".join(slot.frames for slot in slots) == shipped.journal.file
    sizes = [(slot.header.first_id, slot.header.last_id, len(slot.frames)) for slot in slots]
    assert sizes == [(1, 2, 280), (3, 3, 92), (4, 4, 532), (5, 7, 116)]
    assert shipped.owner.data_slots == 4
    assert shipped.owner.shipped.last_id == 7


def test_the_last_of_many_frames_ends_with_the_journal() -> None:
    shipped = Shipped(chunk_bytes=300)
    for size in (100, 100, 136, 400):
        shipped.journal.put(bytes(size))
    shipped.ship()
    assert [len(slot.frames) for slot in shipped.slots(DATA)] == [228, 300, 432]
    assert items_of(shipped.store) == {1: bytes(100), 2: bytes(100), 3: bytes(136), 4: bytes(400)}


def test_a_frame_that_no_slot_takes_is_shipped_with_its_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MOST_FRAME_BYTES", 400)
    shipped = Shipped(chunk_bytes=300)
    shipped.journal.put(bytes(10))
    shipped.ship()
    shipped.journal.put(bytes(1000))
    shipped.journal.put(b"after it")
    shipped.ship()
    assert [slot.header.kind for slot in shipped.slots()] == [DATA, SEAL]
    assert items_of(shipped.store) == {1: bytes(10), 2: bytes(1000), 3: b"after it"}


def test_a_segment_in_too_many_slots_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MOST_TAIL_SLOTS", 3)
    shipped = Shipped()
    for number in range(5):
        shipped.journal.put(b"%d" % number)
        shipped.ship()
    assert [slot.header.kind for slot in shipped.slots()] == [DATA, DATA, DATA, SEAL, DATA, DATA]
    assert shipped.owner.sealed_number == NUMBER


def test_the_rest_of_a_closed_segment_comes_first_if_puts_wait_for_it() -> None:
    for data_first, kinds in ((True, [DATA, DATA, SEAL]), (False, [DATA, SEAL])):
        shipped = Shipped(data_first=data_first)
        shipped.journal.put(b"1")
        shipped.ship()
        shipped.journal.put(b"2")
        shipped.journal.close_segment()
        shipped.ship()
        assert [slot.header.kind for slot in shipped.slots()] == kinds
    shipped = Shipped(data_first=True)
    shipped.journal.put(b"1")
    shipped.journal.close_segment()  # nothing of it is in the log
    shipped.ship()
    assert [slot.header.kind for slot in shipped.slots()] == [SEAL]


def test_a_ledger_comes_with_the_slot_that_it_is_for() -> None:
    shipped = Shipped()
    ledgers = [ShippedLedger.of(number, LedgerState()) for number in range(3)]
    for number, ledger in enumerate(ledgers):
        shipped.owner.note_ledger(ledger, 2 * number)
    for _ in range(4):
        shipped.journal.put(b"x")
        shipped.ship()
    assert [slot.ledger for slot in shipped.slots()] == [ledgers[0], ledgers[1], None, ledgers[2]]
    shipped.owner.note_ledger(ledgers[2], 4)
    shipped.ship()
    assert len(shipped.slots()) == 4  # the log has it


def test_large_states_of_readers_are_sent_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LARGE_STATE_BYTES", 200)
    shipped, heads = Shipped(), []
    for _ in range(50):
        shipped.journal.put(b"x")
    for now in range(0, 26, 2):
        shipped.journal.states = {"audit": checkpoint(now // 2, spans=12)}
        shipped.ship(float(now))
        state = log_of(shipped.store).checkpoints.get("audit")
        heads.append(state.head if state is not None else None)
    assert heads == [0] * 5 + [5] * 5 + [10] * 3
    shipped.journal.states = {"audit": checkpoint(14, spans=12)}
    shipped.carry(shipped.owner.step(30.0, ending=True))
    shipped.carry(shipped.owner.close(30.0))
    assert log_of(shipped.store).checkpoints["audit"].head == 14
    assert shipped.slots()[-1].header.kind == CLOSE


def test_many_states_of_readers_are_sent_in_several_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MOST_STATE_BYTES", 300)
    shipped = Shipped()
    for _ in range(9):
        shipped.journal.put(b"x")
    shipped.ship()
    shipped.journal.states = {name: checkpoint(3, name=name) for name in ("a", "b", "c", "d", "e", "f")}
    shipped.ship(5.0)
    assert [len(slot.checkpoints) for slot in shipped.slots()] == [0, 3, 3]
    del shipped.journal.states["c"]
    shipped.ship(10.0)
    assert shipped.slots()[-1].checkpoints == (DroppedReader("c"),)


def test_a_reader_is_shown_as_far_as_the_log_covers_it() -> None:
    shipped = Shipped()
    for _ in range(4):
        shipped.journal.put(b"x")
    state = checkpoint(2)._replace(watermark=9, durable_head=2, error_counts=((3, 1), (7, 1)), hint_number=NUMBER + 9)
    shipped.journal.states = {
        "audit": state,
        "ahead": checkpoint(9, name="ahead"),  # over ids that have no item
        "between": checkpoint(3, spans=3, name="between"),
    }
    shipped.ship()
    found = log_of(shipped.store).checkpoints
    assert found["audit"] == checkpoint(2)._replace(watermark=4, error_counts=((3, 1),))
    assert found["ahead"].head == 4
    assert "between" not in found


def test_an_upload_is_asked_for_until_it_is_there() -> None:
    lease = OwnLease(12.0, lambda: 0.0)
    shipped = Shipped(lease=lease)
    shipped.journal.put(b"1")
    shipped.journal.close_segment()
    shipped.answers = [UNDER_WAY, None, StoreUnavailable("the store", "key", "no answer")]
    shipped.ship()
    assert [slot.header.kind for slot in shipped.slots()] == [SEAL]
    assert [each.seconds for each in shipped.requests if isinstance(each, Pause)] == [0.1, 0.2]


def test_what_is_there_of_an_upload_is_looked_at() -> None:
    shipped = Shipped()
    shipped.journal.put(b"1")
    shipped.journal.close_segment()
    data = shipped.journal.files[0]
    upload = Upload("key", len(data) - fmt.FOOTER_BYTES, lambda: data)
    found = carry_upload(upload, shipped.store)
    assert found is not None
    assert (found.file_bytes, found.header, found.footer) == (len(data), data[:96], data[-96:])
    for there in (data + b"x", data[:-1], b""):
        store = MemoryStore()
        store.create("key", there)
        with pytest.raises(StoreDamaged, match="it is not the segment that was uploaded"):
            carry_upload(upload, store)

    class Forgetful(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            return True

    assert carry_upload(upload, Forgetful()) is None


def test_the_lease_is_renewed_before_each_listing_and_deletion() -> None:
    clock = [0.0]
    shipped = Shipped(lease=OwnLease(12.0, lambda: clock[0]))
    assert not shipped.carry(shipped.owner.step(0.0))
    clock[0] = 3.0
    assert shipped.carry(shipped.owner.step(3.0))
    assert len(shipped.slots()) == 1
    clock[0] = 6.0
    shipped.carry(shipped.owner.collect(6.0, 0, 0, {}))
    kinds = [type(each) for each in shipped.requests[1:]]
    assert kinds.index(Create) < kinds.index(ListBelow)
    assert len(shipped.slots()) == 3  # a beat, and the slot of the collection


def test_a_collection_without_an_answer_ends() -> None:
    shipped = Shipped()
    shipped.is_lost = lambda request: isinstance(request, ListBelow)
    with pytest.raises(StoreUnavailable):
        shipped.carry(shipped.owner.collect(0.0, 0, 0, {}))
    assert not shipped.slots()


def manifests_of(shipped: Shipped) -> int:
    return len(shipped.store.list(f"{PREFIX}manifest/"))


def test_manifests_are_rare_and_a_lost_one_does_not_matter() -> None:
    shipped = Shipped(manifest_interval=10.0, history=2400.0)
    shipped.journal.put(bytes(100))
    shipped.ship(0.0)
    shipped.journal.put(bytes(100))
    shipped.ship(11.0)
    assert manifests_of(shipped) == 0  # one would be a large part of what was sent
    shipped.journal.put(bytes(100_000))
    shipped.is_lost = lambda request: isinstance(request, Create) and "manifest" in request.key
    shipped.ship(22.0)
    shipped.is_lost = lambda request: False
    assert manifests_of(shipped) == 0
    shipped.journal.put(bytes(100_000))
    shipped.ship(33.0)
    assert manifests_of(shipped) == 1
    shipped.journal.put(b"x")
    shipped.ship(33.0 + 101.0)
    assert manifests_of(shipped) == 2  # in a part of the history there is one
    for _ in range(owner.SEALS_PER_MANIFEST):
        shipped.journal.put(bytes(9000))
        shipped.journal.close_segment()
    shipped.ship(33.0 + 102.0)
    assert manifests_of(shipped) == 3
