"""Reading a log from a store that others write meanwhile, and in which something is missing or forged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kestrelpy.ship import StoreDamaged, StoreUnavailable, reading, restore, status
from kestrelpy.ship import slots as codec
from kestrelpy.ship.identity import IDENTITY_KEY, QueueIdentity, encode_identity
from kestrelpy.ship.manifest import manifest_key
from kestrelpy.ship.reading import PatientStore, ShippedQueue, has_all
from kestrelpy.testing import MemoryDisk
from kestrelpy.testing.stores import MemoryStore
from tests.ship.logs import resealed_manifest, resealed_slot
from tests.ship.restores import HERE, small_log
from tests.ship.shipped import QUEUE, Shipper


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0,) * 3)


def left_open() -> Shipper:
    """A log that ends with a CLOSE and a manifest of it, and has an active segment."""
    shipper = small_log(with_manifest=False)
    shipper.close()
    shipper.manifest()
    assert shipper.state.tail
    return shipper


def changed(shipper: Shipper, key: str, change: Callable[[bytes], bytes]) -> MemoryStore:
    """A store in which one object was changed."""
    store = MemoryStore()
    objects = cast("MemoryStore", shipper.store).contents()
    data, modified_ms = objects[f"{QUEUE}/{key}"]
    store.replace_all({**objects, f"{QUEUE}/{key}": (change(data), modified_ms)})
    return store


class Late(MemoryStore):
    """The object ``late`` is not there for so many reads."""

    late, misses = "", 0

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.misses -= key == self.late
        return None if key == self.late and self.misses >= 0 else super().read(key, start, length)


@pytest.mark.parametrize("misses", [1, 2])
def test_a_slot_that_was_just_created_is_no_hole(misses: int) -> None:
    """A listing shows it before it can be read. How far the log is read then does not matter."""
    store = Late()
    shipper = small_log(store, with_manifest=False)
    last = shipper.state.slot
    store.late, store.misses = f"{QUEUE}/{codec.slot_key(last)}", misses
    assert ShippedQueue(store, QUEUE).at_end().slot == (last if misses == 1 else last - 1)


def test_a_slot_that_is_never_there_is_a_hole() -> None:
    shipper = small_log(with_manifest=False)
    shipper.store.delete([f"{QUEUE}/{codec.slot_key(5)}"])
    for how in ({}, {"at_slot": 7}):
        with pytest.raises(StoreDamaged, match="it is not there, and later ones are") as error:
            restore(shipper.store, QUEUE, HERE, disk=MemoryDisk(), **cast("dict[str, Any]", how))
        assert error.value.last_good_slot == 4


def test_the_fence_of_another_opening_is_none() -> None:
    shipper = left_open()
    store = changed(
        shipper,
        codec.slot_key(shipper.state.fences[-1]),
        lambda data: resealed_slot(data[:32] + bytes(16) + data[48:]),
    )
    with pytest.raises(StoreDamaged, match="it is not the FENCE of epoch 2"):
        status(store, QUEUE)


def test_a_slot_of_the_tail_is_the_one_that_the_manifest_names() -> None:
    shipper = left_open()
    place = shipper.state.tail[-1].slot
    store = changed(shipper, codec.slot_key(place), lambda data: resealed_slot(data[:92] + bytes(4) + data[96:]))
    with pytest.raises(StoreDamaged, match="it is not the slot that a manifest names") as error:
        restore(store, QUEUE, HERE, disk=MemoryDisk())
    assert error.value.key == f"{QUEUE}/{codec.slot_key(place)}"


def test_the_tail_ends_where_the_manifest_says() -> None:
    shipper = left_open()
    key = manifest_key(shipper.state.slot)
    store = changed(shipper, key, lambda data: resealed_manifest(data[:116] + bytes(4) + data[120:]))
    with pytest.raises(StoreDamaged, match="the active segment is not the one in the log"):
        restore(store, QUEUE, HERE, disk=MemoryDisk())


def test_all_numbers_up_to_one() -> None:
    assert has_all([], 0)
    assert has_all([1, 2, 3, 7], 3)
    assert not has_all([1, 3, 4, 5], 4)
    assert not has_all([2, 3], 3)
    assert not has_all([1], 10**18)


def test_what_is_written_and_deleted_is_sent_once() -> None:
    store = PatientStore(MemoryStore())
    assert store.create("key", b"data")
    assert not store.create("key", b"other")
    assert store.read("key") == b"data"
    store.delete(["key"])
    assert store.read("key") is None


class Away(MemoryStore):
    """It does not answer."""

    asked = 0

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.asked += 1
        raise StoreUnavailable(self.describe(), key, "no answer in time")


def test_who_has_stopped_asks_once() -> None:
    store = Away()
    patient = PatientStore(store)
    for asked in (4, 5):
        with pytest.raises(StoreUnavailable):
            patient.read("key")
        assert store.asked == asked
        patient.stop()


def test_what_is_damaged_is_read_again_if_garbage_was_collected_meanwhile() -> None:
    store = cast("MemoryStore", small_log(with_manifest=False).store)
    shipped = ShippedQueue(store, QUEUE)
    calls: list[int] = []

    def read() -> int:
        calls.append(len(calls))
        if len(calls) < 2:
            raise shipped.damage("key", "it was deleted while it was read")
        return 7

    with pytest.raises(StoreDamaged):
        shipped.settled(read)
    calls.clear()

    def collect_and_read() -> int:
        store.create(f"{QUEUE}/{manifest_key(5)}", b"")
        return read()

    assert shipped.settled(collect_and_read) == 7


def test_the_identity_is_of_the_queue_of_the_log_or_missing() -> None:
    shipper = left_open()
    other = encode_identity(QueueIdentity(QUEUE, bytes(16), 1))
    with pytest.raises(StoreDamaged, match="it is of another queue than the log"):
        status(changed(shipper, IDENTITY_KEY, lambda _: other), QUEUE)
    shipper.store.delete([f"{QUEUE}/{IDENTITY_KEY}"])
    assert status(shipper.store, QUEUE).slot == shipper.state.slot


def test_a_manifest_that_must_be_there() -> None:
    with pytest.raises(StoreDamaged, match="it is not there"):
        ShippedQueue(small_log().store, QUEUE).manifest(99)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "it has fewer than"),
        (lambda data: data + b"x", "it has more than"),
        (lambda data: b"x" + data[1:], "its crc is not the one in its SEAL"),
        (lambda data: b"", "it has fewer than"),
    ],
)
def test_a_segment_that_is_not_the_one_in_its_seal(change: Callable[[bytes], bytes], reason: str) -> None:
    shipper = small_log()
    segment = shipper.state.segments[0]
    store = changed(shipper, segment.key, change)
    with pytest.raises(StoreDamaged, match=reason):
        list(ShippedQueue(store, QUEUE).segment_parts(segment))
    store.delete([f"{QUEUE}/{segment.key}"])
    with pytest.raises(StoreDamaged, match="it is not there"):
        list(ShippedQueue(store, QUEUE).segment_parts(segment))
