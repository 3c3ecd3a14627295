"""What a store has of a queue: its status, and a check that finds each byte that is not what was put there."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy import UnsupportedFormat
from kestrelpy.errors import InvalidName
from kestrelpy.ship import (
    NoSuchQueue,
    RemoteReport,
    StoreDamaged,
    StoreUnavailable,
    queues,
    reading,
    remote_check,
    restore,
    status,
    verify,
)
from kestrelpy.ship import slots as codec
from kestrelpy.ship.identity import IDENTITY_KEY, QueueIdentity, decode_identity, encode_identity
from kestrelpy.ship.manifest import manifest_key
from kestrelpy.ship.slots import DATA, MOST_SLOTS, SEAL
from kestrelpy.testing import MemoryDisk
from kestrelpy.testing.stores import MemoryStore, SimulatedStore
from tests.ship.logs import resealed_manifest
from tests.ship.restores import collect, grown, queue_on, small_log
from tests.ship.shipped import QUEUE, Shipper
from tests.support.budget import ALL, SEED, Tally, drawn
from tests.support.seaweed import BUCKET, Seaweed

ID = bytes(range(16))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0,) * 3)


# -- queue.json ------------------------------------------------------------------------------------------------------


_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", fullmatch=True)


@given(_names, st.binary(min_size=16, max_size=16), st.integers(0, (1 << 62) - 1))
def test_an_identity_is_read_as_it_was_written(queue: str, queue_id: bytes, made_ms: int) -> None:
    identity = QueueIdentity(queue, queue_id, made_ms)
    assert decode_identity("k", encode_identity(identity)) == identity


def test_the_bytes_of_an_identity() -> None:
    data = encode_identity(QueueIdentity("jobs", ID, 255))
    assert data == b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 255}'


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"format": 1}', b'{"format": 0}', b'{"format": true}'),
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 255} ',
        b'{"format":1,"queue":"jobs","queue_id":"000102030405060708090a0b0c0d0e0f","made_ms":255}',
        b'{"format": 1, "queue": "a/b", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 255}',
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090A0B0C0D0E0F", "made_ms": 255}',
        b'{"format": 1, "queue": "jobs", "queue_id": "0001", "made_ms": 255}',
        b'{"format": 1, "queue": "jobs", "queue_id": 5, "made_ms": 255}',
        b'{"format": 1, "queue": 5, "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 255}',
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": -1}',
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 1.5}',
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": true}',
        b'{"format": 1, "queue": "jobs", "queue_id": "000102030405060708090a0b0c0d0e0f", "made_ms": 1, "more": 1}',
        b'{"format": 2, "more": "' + b"x" * 5000 + b'"}',
        b'{"format": ' + b"9" * 4070 + b"}",
    ],
)
def test_what_is_no_identity(data: bytes) -> None:
    with pytest.raises(StoreDamaged, match="k, offset 0: it does not say which queue this is"):
        decode_identity("k", data)


def test_a_newer_identity_is_told_from_damage() -> None:
    with pytest.raises(UnsupportedFormat) as error:
        decode_identity("k", b'{"format": 2, "more": []}')
    assert (error.value.path, error.value.version, error.value.supported) == ("k", 2, 1)


def test_an_identity_that_nobody_would_read_is_not_made() -> None:
    for wrong in (QueueIdentity("a/b", ID, 1), QueueIdentity("jobs", b"", 1), QueueIdentity("jobs", ID, -1)):
        with pytest.raises((InvalidName, ValueError)):
            encode_identity(wrong)


# -- status and queues -----------------------------------------------------------------------------------------------


def test_the_status_says_where_the_log_ends() -> None:
    shipper = small_log()
    found = status(shipper.store, QUEUE)
    at = shipper.state.header
    assert at is not None
    assert (found.queue_id, found.slot, found.epoch, found.owner) == (at.queue_id.hex(), at.slot, 2, "host:2")
    assert (found.lease, found.closed, found.last_id, found.written_ms) == (None, False, at.last_id, at.written_ms)
    assert found.first_ms == shipper.moments[0].written_ms
    assert (found.segments, found.slots) == (len(shipper.state.segments), at.slot)
    assert found.bytes == sum(each.size_bytes for each in shipper.store.list(f"{QUEUE}/"))
    assert found.readers == {"audit": 3, "spark": 0}
    assert found.fences == tuple(shipper.state.fences)
    shipper.fence(lease_ms=15_000)
    shipper.close()
    again = status(shipper.store, QUEUE)
    assert (again.lease, again.closed, again.epoch) == (15.0, True, 3)


def test_from_when_on_there_is_something_to_restore() -> None:
    shipper = small_log()
    collect(shipper, shipper.state.slot)
    assert status(shipper.store, QUEUE).first_ms == shipper.moments[-1].written_ms


def test_a_queue_that_is_not_there() -> None:
    store = MemoryStore()
    for look in (status, verify):
        with pytest.raises(NoSuchQueue, match="it is not there"):
            look(store, QUEUE)
        with pytest.raises(InvalidName):
            look(store, "../jobs")
    assert queues(store) == []


def test_the_queues_of_a_store() -> None:
    store = MemoryStore()
    for key in ("b/queue.json", "a/log/0000000000000001", "c/seg/x", "d/log/1", "-e/queue.json", "f/g/queue.json", "x"):
        store.create(key, b"")
    assert queues(store) == ["a", "b"]


# -- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [MOST_SLOTS, 10**9])
def test_a_number_is_nothing_to_allocate_by(number: int) -> None:
    """The only manifest is one of a slot that is far away: nothing that costs as much as its number."""
    store = MemoryStore()
    shipper = small_log(store, with_manifest=False)
    shipper.close()
    shipper.manifest()
    objects = store.contents()
    data, modified_ms = objects.pop(f"{QUEUE}/{manifest_key(shipper.state.slot)}")
    forged = resealed_manifest(data[:40] + number.to_bytes(8, "little") + data[48:])
    objects[f"{QUEUE}/{manifest_key(number)}"] = forged, modified_ms
    store.replace_all(objects)
    tracemalloc.start()
    try:
        assert verify(store, QUEUE).manifests == 1
        assert status(store, QUEUE).slot == number
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_numbers_begin_at_one() -> None:
    """An object that is numbered 0 is none of a queue's, and changes nothing."""
    shipper = small_log()
    collect(shipper, shipper.state.slot)
    expected = status(shipper.store, QUEUE), verify(shipper.store, QUEUE)
    for key in (codec.slot_key(0), manifest_key(0)):
        shipper.store.create(f"{QUEUE}/{key}", b"")
    assert (status(shipper.store, QUEUE), verify(shipper.store, QUEUE)) == expected
    with pytest.raises(NoSuchQueue, match="kept no more"):
        restore(shipper.store, QUEUE, "/elsewhere", at_slot=2, disk=MemoryDisk())


@given(st.integers(0, 10_000))
@settings(max_examples=100 if ALL else 15, deadline=None)
def test_what_was_shipped_is_whole(seed: int) -> None:
    shipper = grown(seed)
    seen: list[tuple[int, int]] = []
    report = verify(shipper.store, QUEUE, progress=lambda *each: seen.append(each))
    assert report.problems == ()
    assert (report.slots, report.garbage) == (shipper.state.slot, 0)
    assert report.bytes == sum(each.size_bytes for each in shipper.store.list(f"{QUEUE}/"))
    assert seen[-1] == (report.bytes, report.bytes)
    shipper.manifest()
    collect(shipper, shipper.state.slot)
    after = verify(shipper.store, QUEUE)
    assert after.problems == ()
    assert (after.manifests, after.segments, after.garbage) == (1, len(shipper.state.segments), 0)
    assert after.slots <= report.slots


def test_garbage_is_counted_and_what_is_not_ours_is_left_alone() -> None:
    shipper = small_log()
    shipper.store.create(f"{QUEUE}/{codec.segment_key(7, 1, bytes(16))}", b"never sealed")
    shipper.store.create(f"{QUEUE}/reader/spark/0000000000001", b"")
    shipper.store.create(f"{QUEUE}/what/ever", b"")
    report = verify(shipper.store, QUEUE)
    assert report.ok
    assert report.garbage == 1
    manifest = reading.ShippedQueue(shipper.store, QUEUE).manifest(shipper.state.slot)
    needed = {1, shipper.state.slot, *manifest.fences, *(each.slot for each in manifest.tail)}
    unneeded = sorted(set(range(1, shipper.state.slot)) - needed)
    shipper.store.delete([f"{QUEUE}/{codec.slot_key(unneeded[0])}"])  # a collection that was cut short
    report = verify(shipper.store, QUEUE)
    assert report.ok
    assert report.garbage == len(unneeded)


def verified(objects: dict[str, tuple[bytes, int]]) -> RemoteReport | None:
    """The report on a store with these objects; ``None`` if they are of a newer version, or none of a queue."""
    store = MemoryStore()
    store.replace_all(objects)
    try:
        return verify(store, QUEUE)
    except (UnsupportedFormat, NoSuchQueue):
        return None


@pytest.mark.parametrize("is_collected", [False, True])
def test_every_byte_changed_is_found(tally: Tally, *, is_collected: bool) -> None:
    shipper, random = small_log(), Random(SEED)
    if is_collected:
        collect(shipper, shipper.state.slot)
    objects = cast("MemoryStore", shipper.store).contents()
    when = objects[f"{QUEUE}/{IDENTITY_KEY}"][0].index(b'"made_ms": ') + len(b'"made_ms": ')
    places = [(key, at) for key, (data, _) in objects.items() for at in range(len(data))]
    # Nothing says when the queue was made but its digits there.
    places = [(key, at) for key, at in places if not key.endswith(IDENTITY_KEY) or at < when]
    for key, at in (chosen := drawn(places, 400)):
        data = bytearray(objects[key][0])
        data[at] ^= 1 << random.randrange(8)
        report = verified({**objects, key: (bytes(data), 0)})
        assert report is None or any(key in problem for problem in report.problems), (key, at)
    tally.add("bytes of a store changed, and verified", len(chosen))


@pytest.mark.parametrize("is_collected", [False, True])
def test_every_object_missing_or_cut_is_found(*, is_collected: bool) -> None:
    shipper = small_log()
    if is_collected:
        collect(shipper, shipper.state.slot)
    objects = cast("MemoryStore", shipper.store).contents()
    manifest = next(key for key in objects if "/manifest/" in key)
    for key, (data, _) in objects.items():
        for changed in (data[:-1], b"", data + b"\0"):
            report = verified({**objects, key: (changed, 0)})
            assert report is not None
            assert any(key in problem for problem in report.problems), key
        report = verified({other: kept for other, kept in objects.items() if other != key})
        if key == manifest and not is_collected:
            assert report is not None
            assert report.ok  # it can be made again from the slots
        elif "/log/" in key and not is_collected:
            continue  # as if garbage had been collected: the manifest of the last slot has all
        else:
            assert report is not None
            assert not report.ok, key


def test_a_problem_does_not_end_the_check() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"first")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        for at in range(30):
            queue.put(bytes([at]) * 300)
            shipper.ship()
            if at % 10 == 3:
                shipper.manifest()
    objects = cast("MemoryStore", shipper.store).contents()
    keys = [f"{QUEUE}/{codec.slot_key(number)}" for number in (3, 9, shipper.state.slot)]
    keys.append(next(key for key in objects if "/seg/" in key))
    for key in keys:
        data = bytearray(objects[key][0])
        data[len(data) // 2] ^= 1
        objects[key] = (bytes(data), 0)
    del objects[f"{QUEUE}/{codec.slot_key(20)}"]
    report = verified(objects)
    assert report is not None
    for key in (*keys, f"{QUEUE}/{codec.slot_key(20)}"):
        assert any(problem.startswith(key) for problem in report.problems), (key, report.problems)
    assert len(report.problems) == 5, report.problems


def test_a_manifest_that_says_something_else_is_found() -> None:
    """Whole in itself, and not what the slots add up to."""
    from kestrelpy.ship import manifest as manifests

    shipper = small_log(with_manifest=False)
    said = shipper.state.manifest()
    key = f"{QUEUE}/{manifests.manifest_key(shipper.state.slot)}"
    shipper.store.create(key, manifests.encode_manifest(said._replace(checkpoints=said.checkpoints[1:])))
    report = verify(shipper.store, QUEUE)
    assert report.problems == (f"{key}, offset 0: it is not what the slots up to it add up to",)


def test_what_was_damaged_before_it_was_shipped_is_found() -> None:
    disk = MemoryDisk()
    queue = queue_on(disk)
    for at in range(12):
        queue.put(bytes([at]) * 1000)
    queue.close()
    folder = disk.directory("/queues")
    names = sorted(name for name in folder.names() if name.endswith(".segment"))
    for name, at in ((names[0], 50), (names[1], 500)):
        file = folder.open(name, write=True)
        file.write(at, bytes([file.read(at, 1)[0] ^ 1]))
    shipper = Shipper(MemoryStore(), disk)
    shipper.fence()
    shipper.ship_as_they_are()
    problems = verify(shipper.store, QUEUE).problems
    assert len(problems) == 2
    assert "its header is damaged: it was shipped so" in problems[0]
    assert "is not intact here" in problems[1]


def test_a_seal_of_another_header_is_found() -> None:
    disk = MemoryDisk()
    queue = queue_on(disk)
    queue.put(b"one")
    queue.close()
    queue_on(disk).close()
    shipper = Shipper(MemoryStore(), disk)
    shipper.fence()
    real = shipper.append

    def append(kind: int, frames: bytes = b"", **more: Any) -> None:
        if kind == SEAL:
            found = codec.decode_sealed(more["note"], 0)
            assert found is not None
            more["note"] = codec.encode_sealed(found[0]._replace(header=bytes(96)))
        real(kind, frames, **more)

    shipper.append = append  # type: ignore[method-assign]
    shipper.ship_as_they_are()
    (problem,) = verify(shipper.store, QUEUE).problems
    assert problem.endswith("its header or footer is not the one in its SEAL")


def test_a_slot_that_is_needed_no_more_is_checked_all_the_same() -> None:
    shipper = small_log()
    shipper.store.delete([f"{QUEUE}/{codec.slot_key(2)}"])
    key = f"{QUEUE}/{codec.slot_key(4)}"
    data = shipper.store.read(key)
    assert data is not None
    shipper.store.delete([key])
    shipper.store.create(key, data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = verify(shipper.store, QUEUE).problems
    assert problem.startswith(key)


def test_a_slot_with_damaged_frames_is_found() -> None:
    """They are shipped as they are; the slot is whole, and the item in it is not."""
    disk = MemoryDisk()
    queue = queue_on(disk)
    queue.put_many([b"one"])
    queue.put(b"two")
    shipper = Shipper(MemoryStore(), disk)
    shipper.fence()
    real = shipper.append
    made: list[int] = []

    def append(kind: int, frames: bytes = b"", **more: Any) -> None:
        if kind == DATA and frames and not made:
            made.append(shipper.state.slot + 1)
            frames = frames[:-1] + bytes([frames[-1] ^ 1])
        real(kind, frames, **more)

    shipper.append = append  # type: ignore[method-assign]
    shipper.ship()
    queue.close()
    (problem,) = verify(shipper.store, QUEUE).problems
    assert problem.startswith(f"{QUEUE}/{codec.slot_key(made[0])}, offset ")
    assert problem.endswith("item 2 is not intact here: it was shipped so")


def test_large_segments_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    shipper = grown(3, steps=60)
    monkeypatch.setattr(remote_check, "WINDOW_BYTES", 500)
    monkeypatch.setattr(remote_check, "PART_BYTES", 300)
    report = verify(shipper.store, QUEUE)
    assert report.ok
    assert report.segments


def test_a_store_that_is_away() -> None:
    simulated = SimulatedStore()
    grown(1, simulated.client("owner"))
    simulated.is_away = True
    looks: tuple[Any, ...] = (status, verify)
    for look in looks:
        with pytest.raises(StoreUnavailable):
            look(simulated.client("me"), QUEUE)
    with pytest.raises(StoreUnavailable):
        queues(simulated.client("me"))


def test_on_a_real_store(s3: Seaweed) -> None:
    shipper = grown(12, s3.store("remote"))
    url = f"s3://{BUCKET}/remote"
    assert queues(url, options=s3.options()) == [QUEUE]
    assert status(url, QUEUE, options=s3.options()).slot == shipper.state.slot
    report = verify(url, QUEUE, options=s3.options())
    assert report.problems == ()
    assert report.slots == shipper.state.slot
