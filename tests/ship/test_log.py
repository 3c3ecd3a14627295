"""The log's end and its appends: over random worlds nothing is lost, and each planted fault is found by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import UnsupportedFormat
from kestrelpy.ship import Listed, StoreUnavailable, log
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.log import Opening, SlotTaken, Steps
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import CLOSE, DATA, FENCE, Slot
from kestrelpy.ship.store import Listing
from kestrelpy.testing.stores import Fault, MemoryStore, SimulatedStore
from tests.ship import log_explorer
from tests.ship.log_explorer import PREFIX, QUEUE_ID, Owner, World, Wrong, data_slot, explore
from tests.ship.logs import resealed_slot
from tests.support.budget import SEED, Tally, share

OPENING = Opening(QUEUE_ID, b"n" * 16, "me", 0, 1_700_000_000_000)
OTHER = OPENING._replace(nonce=b"o" * 16, owner="another")


def test_worlds(tally: Tally) -> None:
    counts = explore(SEED * 1_000_000, share(5_000))
    for what in ("openings", "fenced", "slots acknowledged", "manifests", "collections", "openings given up"):
        assert counts[what] > share(5_000) // 4, counts
    tally.add("requests of shipping to a simulated store", counts["requests"])
    tally.add("slots acknowledged by a simulated store", counts["slots acknowledged"])


# -- planted faults --------------------------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {}
real_is_created, real_newest = log._is_created, log.newest_manifest


def planted(plant: Callable[[], Iterator[None]]) -> None:
    PLANTED[plant.__name__] = contextlib.contextmanager(plant)


@planted
def fence_collected() -> Iterator[None]:
    with patch.object(Owner, "is_deletable", staticmethod(lambda _: True)):
        yield


@planted
def own_slot_unknown() -> Iterator[None]:
    def is_created(key: str, data: bytes, number: int) -> Steps[bool]:
        created = yield from real_is_created(key, data, number)
        if created and (yield log.Create(key, data)) is False and number % 5 == 0:
            raise SlotTaken(log.decode_slot(key, number, data))
        return created

    with patch.object(log, "_is_created", is_created):
        yield


@planted
def regathered_retry() -> Iterator[None]:
    def append(prefix: str, state: LogState, slot: Slot) -> Steps[None]:
        number = state.slot + 1
        key, data = prefix + codec.slot_key(number), codec.encode_slot(slot)
        while not (yield from log._is_created(key, data, number)):
            slot = slot._replace(header=slot.header._replace(written_ms=slot.header.written_ms + 1))
            data = codec.encode_slot(slot)
        log.follow(prefix, state, log.decode_slot(key, number, data))

    with patch.object(log, "append", append):
        yield


@planted
def two_creates_under_way() -> Iterator[None]:
    """The next one is sent while this one is in doubt."""

    def is_created(key: str, data: bytes, number: int) -> Steps[bool]:
        yield from real_is_created(key, data, number)
        return True

    with patch.object(log, "_is_created", is_created):
        yield


def after_fences(change: Callable[[int], int]) -> contextlib.AbstractContextManager[object]:
    """What the listing after a FENCE is taken to show."""

    def open_log(prefix: str, opening: Opening, judge: Any, state: LogState | None = None) -> Steps[LogState]:
        while True:
            state = yield from log.read_end(prefix) if state is None else log.read_on(prefix, state)
            header = log.empty_header(state, FENCE, opening, first_id=judge(state))
            try:
                yield from log.append(prefix, state, Slot(header))
            except SlotTaken:
                continue
            if change((yield from real_newest(prefix))) < state.slot:
                return state
            state = None

    return patch.object(log, "open_log", open_log)


@planted
def fence_in_a_hole() -> Iterator[None]:
    with after_fences(lambda _: 0):
        yield


@planted
def only_a_higher_manifest_is_a_hole() -> Iterator[None]:
    with after_fences(lambda newest: newest - 1):
        yield


@planted
def miss_taken_for_end() -> Iterator[None]:
    """Who finds a hole goes on at the newest manifest that he knew."""

    def read_on(prefix: str, state: LogState) -> Steps[LogState]:
        while (slot := (yield from log.read_slot(prefix, state.slot + 1))) is not None:
            log.follow(prefix, state, slot)
        return state

    with patch.object(log, "read_on", read_on):
        yield


@planted
def restart_without_fence() -> Iterator[None]:
    def open_log(prefix: str, opening: Opening, judge: Any, state: LogState | None = None) -> Steps[LogState]:
        state = yield from log.read_end(prefix)
        if not state.slot:
            yield from log.append(prefix, state, Slot(log.empty_header(state, FENCE, opening, first_id=judge(state))))
        return state

    with patch.object(log, "open_log", open_log):
        yield


@planted
def listings_older_than_the_history() -> Iterator[None]:
    """Not promised: this shows that the promise is needed."""
    with patch.object(World, "_shows_the_last_deletion", lambda *_: True):
        yield


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_is_found(name: str, tally: Tally) -> None:
    with PLANTED[name](), pytest.raises(Wrong):
        explore(1, 3_000)
    tally.add("planted faults caught", 1)


# -- one client ------------------------------------------------------------------------------------------------------


def opened(store: MemoryStore, opening: Opening = OPENING) -> LogState:
    return log.carry_out(log.open_log(PREFIX, opening, lambda state: state.last_id + 1), store, lambda _: None)


def appended(store: Any, state: LogState, slot: Slot, pauses: list[float] | None = None) -> None:
    log.carry_out(log.append(PREFIX, state, slot), store, (pauses if pauses is not None else []).append)


def rng() -> Any:
    return log_explorer.random.Random(1)


def test_the_first_owner_and_the_next() -> None:
    store = MemoryStore()
    state = opened(store)
    assert (state.slot, state.last_id) == (1, 0)
    appended(store, state, data_slot(state, OPENING, rng()))
    appended(store, state, data_slot(state, OPENING, rng()))
    other = opened(store, OTHER)
    assert (other.slot, other.last_id) == (4, 2)
    assert other.header is not None
    assert (other.header.epoch, other.header.nonce) == (2, OTHER.nonce)
    with pytest.raises(SlotTaken, match="slot 4 is of epoch 2") as taken:
        appended(store, state, data_slot(state, OPENING, rng()))
    assert taken.value.slot.owner == "another"
    assert state.slot == 3


def test_nobody_appends_after_a_close_but_a_new_owner() -> None:
    store = MemoryStore()
    state = opened(store)
    appended(store, state, Slot(log.empty_header(state, CLOSE, OPENING), note=codec.close_note(handed_over=True)))
    assert state.objection(Slot(log.empty_header(state, DATA, OPENING))) == "the owner had left"
    assert opened(store, OTHER).slot == 3


def test_a_slot_that_cannot_be_the_next_one_is_not_sent() -> None:
    """In the log it would be damage, for everybody and for good."""
    store = MemoryStore()
    state = opened(store)
    before = store.contents()
    slot = data_slot(state, OPENING, rng())
    for wrong in ({"epoch": 7}, {"slot": 2, "crc_before": 1}, {"segment_crc": 1}, {"nonce": OTHER.nonce}):
        with pytest.raises(ValueError, match="jobs/log/0000000000000002: "):
            appended(store, state, slot._replace(header=slot.header._replace(**wrong)))
    assert store.contents() == before
    appended(store, state, slot)


def test_the_judge_sees_the_end_and_may_refuse() -> None:
    store = MemoryStore()
    opened(store)
    before = store.contents()

    def refuse(state: LogState) -> int:
        raise PermissionError(f"the log ends at {state.slot}")

    with pytest.raises(PermissionError, match="ends at 1"):
        log.carry_out(log.open_log(PREFIX, OTHER, refuse), store, lambda _: None)
    assert store.contents() == before


def test_pauses_grow_and_the_bytes_stay() -> None:
    simulated = SimulatedStore()
    client = simulated.client("me")
    state = log.carry_out(log.open_log(PREFIX, OPENING, lambda _: 1), client, lambda _: None)
    sent: list[bytes] = []
    pauses: list[float] = []
    create = client.create

    def note(key: str, data: bytes) -> bool:
        sent.append(data)
        return create(key, data)

    simulated.before_request = lambda _: Fault.LOST_BEFORE if len(pauses) < 9 else Fault.NONE
    with patch.object(client, "create", note):
        appended(client, state, data_slot(state, OPENING, rng()), pauses)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert len(sent) == 10
    assert set(sent) == {simulated.objects.read(PREFIX + codec.slot_key(2))}


def test_a_wait_that_raises_ends_the_steps() -> None:
    simulated = SimulatedStore()
    client = simulated.client("me")
    state = log.carry_out(log.open_log(PREFIX, OPENING, lambda _: 1), client, lambda _: None)
    simulated.is_away = True

    def end(seconds: float) -> None:
        raise TimeoutError(seconds)

    with pytest.raises(TimeoutError):
        log.carry_out(log.append(PREFIX, state, data_slot(state, OPENING, rng())), client, end)
    assert state.slot == 1


def test_an_opening_says_that_the_store_is_away() -> None:
    simulated = SimulatedStore()
    simulated.is_away = True
    with pytest.raises(StoreUnavailable):
        log.carry_out(log.open_log(PREFIX, OPENING, lambda _: 1), simulated.client("me"), lambda _: None)


def written(slots: int) -> MemoryStore:
    store = MemoryStore()
    state = opened(store)
    while state.slot < slots:
        appended(store, state, data_slot(state, OPENING, rng()))
    store.create(PREFIX + manifests.manifest_key(slots - 1), b"")
    store.delete([PREFIX + manifests.manifest_key(slots - 1)])
    return store


def test_every_damaged_byte_of_every_slot_is_damage_or_another_end() -> None:
    """A flipped bit is never taken for something else. A damaged slot is not the end of the log."""
    whole = written(4).contents()
    for key, (data, date) in whole.items():
        for at in range(len(data)):
            store = MemoryStore()
            store.replace_all({**whole, key: (data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :], date)})
            with pytest.raises((StoreDamaged, UnsupportedFormat)) as found:
                log.carry_out(log.read_end(PREFIX), store, lambda _: None)
            assert key in str(found.value)


def test_a_missing_slot_is_the_end_and_the_fence_after_it_is_void() -> None:
    """If slots were deleted that no manifest covers, the store has lost them: nothing tells."""
    store = written(4)
    store.delete([PREFIX + codec.slot_key(4)])
    assert log.carry_out(log.read_end(PREFIX), store, lambda _: None).slot == 3


@pytest.mark.parametrize("data", [b"", b"nonsense", b"KSTRLMAN" + bytes(200)])
def test_a_manifest_that_is_none(data: bytes) -> None:
    store = written(3)
    store.create(PREFIX + manifests.manifest_key(2), data)
    with pytest.raises(StoreDamaged, match="no manifest of that slot"):
        log.carry_out(log.read_end(PREFIX), store, lambda _: None)


def test_a_manifest_under_another_number() -> None:
    store = written(3)
    state = log.carry_out(log.read_end(PREFIX), store, lambda _: None)
    store.create(PREFIX + manifests.manifest_key(2), manifests.encode_manifest(state.manifest()))
    with pytest.raises(StoreDamaged, match="no manifest of that slot"):
        log.carry_out(log.read_end(PREFIX), store, lambda _: None)


def test_foreign_keys_are_left_alone() -> None:
    store = written(3)
    for key in ("manifest/9", "manifest/0000000000000009.tmp", "manifest/deep/0000000000000009", "manifest/x"):
        store.create(PREFIX + key, b"foreign")
    assert log.carry_out(log.read_end(PREFIX), store, lambda _: None).slot == 3


def test_a_log_that_begins_at_a_manifest_is_the_same() -> None:
    store = written(5)
    whole = log.carry_out(log.read_end(PREFIX), store, lambda _: None)
    part = LogState()
    for number in (1, 2, 3):
        data = store.read(PREFIX + codec.slot_key(number))
        assert data is not None
        log.follow(PREFIX, part, log.decode_slot("", number, data))
    store.create(PREFIX + manifests.manifest_key(3), manifests.encode_manifest(part.manifest()))
    store.delete([PREFIX + codec.slot_key(number) for number in (1, 2, 3)])
    assert log.carry_out(log.read_end(PREFIX), store, lambda _: None).manifest() == whole.manifest()


# -- readers ---------------------------------------------------------------------------------------------------------


def test_a_hole_is_not_the_end_for_a_reader() -> None:
    store = written(6)
    whole = log.carry_out(log.read_end(PREFIX), store, lambda _: None)
    old, newer = LogState(), LogState()
    for state, last in ((old, 2), (newer, 5)):
        for number in range(1, last + 1):
            data = store.read(PREFIX + codec.slot_key(number))
            assert data is not None
            log.follow(PREFIX, state, log.decode_slot("", number, data))
    store.create(PREFIX + manifests.manifest_key(5), manifests.encode_manifest(newer.manifest()))
    log.ask(log.Delete(tuple(PREFIX + codec.slot_key(number) for number in (3, 4, 5))), store, lambda _: None)
    assert log.carry_out(log.read_on(PREFIX, old), store, lambda _: None).slot == 2
    found = log.carry_out(log.read_end_surely(PREFIX, old), store, lambda _: None)
    assert (found.begun_at, found.manifest()) == (5, whole.manifest())
    assert log.carry_out(log.read_end_surely(PREFIX), store, lambda _: None).manifest() == whole.manifest()
    store.create(PREFIX + codec.slot_key(3), b"somebody took the hole for the end")
    assert log.carry_out(log.read_on(PREFIX, old), store, lambda _: None).manifest() == whole.manifest()


def test_a_manifest_that_is_not_there() -> None:
    assert log.carry_out(log.read_manifest(PREFIX, 2), written(3), lambda _: None) is None


class StaleListings(MemoryStore):
    """Its listings show so many times a manifest that is gone."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def list(self, prefix: str) -> Listing:
        found, self.times = super().list(prefix), self.times - 1
        return [*found, Listed(PREFIX + manifests.manifest_key(2), 1, 1)] if self.times >= 0 else found


def test_a_manifest_that_is_listed_and_gone() -> None:
    """A collection may have deleted it since. One that is listed again and again is lost."""
    for times in (1, 4):
        store = StaleListings(times)
        store.replace_all(written(3).contents())
        assert log.carry_out(log.read_end(PREFIX), store, lambda _: None).slot == 3
    store = StaleListings(5)
    with pytest.raises(StoreDamaged, match="it is listed, and is not there"):
        log.carry_out(log.read_end(PREFIX), store, lambda _: None)


def test_a_newer_version_is_told_from_damage() -> None:
    store = written(2)
    slot = store.read(PREFIX + codec.slot_key(2))
    assert slot is not None
    newer = resealed_slot(slot[:8] + b"\3" + slot[9:])
    assert codec.slot_version(newer) == 3
    store.create(PREFIX + codec.slot_key(3), newer)
    with pytest.raises(UnsupportedFormat):
        log.carry_out(log.read_end(PREFIX), store, lambda _: None)
