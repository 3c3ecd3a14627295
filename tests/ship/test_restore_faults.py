"""Restoring, when something goes wrong: damage, a restore that is cut short, bad stores. All or nothing, and loud."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from kestrelpy import QueueDiskFull, RestoreIncomplete, UnsupportedFormat, verify
from kestrelpy.inbox import last_version
from kestrelpy.ship import (
    NoSuchQueue,
    RestoreTargetExists,
    StoreDamaged,
    StoreUnavailable,
    reading,
    restore,
)
from kestrelpy.ship import slots as codec
from kestrelpy.ship.identity import QueueIdentity, encode_identity
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk
from kestrelpy.testing.disks import PowerModel
from kestrelpy.testing.stores import Fault, MemoryStore, Request, SimulatedStore
from tests.ship.restores import (
    HERE,
    check_restored,
    collect,
    grown,
    log_with_a_batch,
    queue_on,
    rest_due,
    rest_of,
    small_log,
)
from tests.ship.shipped import QUEUE, Shipper
from tests.support.budget import ALL, SEED, Tally, drawn
from tests.support.seaweed import BUCKET, Seaweed


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0,) * 5)


# -- damage ----------------------------------------------------------------------------------------------------------


def end_or_error(objects: dict[str, tuple[bytes, int]], due: dict[str, Any], **how: Any) -> bool:
    """Restore what is in a damaged store. Returns whether that worked; then it is what was to be restored."""
    store, disk = MemoryStore(), MemoryDisk()
    store.replace_all(objects)
    try:
        restore(store, QUEUE, HERE, disk=disk, **how)
    except (StoreDamaged, UnsupportedFormat, NoSuchQueue):
        return False
    assert rest_of(disk) == due
    return True


@pytest.mark.parametrize("with_manifest", [True, False])
def test_every_byte_changed_is_an_error_or_does_not_matter(tally: Tally, *, with_manifest: bool) -> None:
    shipper = small_log(with_manifest=with_manifest)
    objects = cast("MemoryStore", shipper.store).contents()
    due, random = rest_due(shipper.moments[-1], shipper.items), Random(SEED)
    needed = unneeded = 0
    places = [(key, at) for key, (data, _) in objects.items() for at in range(len(data))]
    for key, at in drawn(places, 600):
        data = bytearray(objects[key][0])
        data[at] ^= 1 << random.randrange(8)
        if end_or_error({**objects, key: (bytes(data), 0)}, due):
            unneeded += 1
        else:
            needed += 1
    assert needed > 100
    tally.add("bytes of a store changed, and restored from", needed + unneeded)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_every_object_missing_or_cut_is_an_error_or_does_not_matter(*, with_manifest: bool) -> None:
    shipper = small_log(with_manifest=with_manifest)
    objects = cast("MemoryStore", shipper.store).contents()
    due = rest_due(shipper.moments[-1], shipper.items)
    last = f"{QUEUE}/{codec.slot_key(shipper.state.slot)}"
    for key, (data, _) in objects.items():
        cuts = (data[:-1], data[: len(data) // 2], b"", data + b"\0")
        for changed in cuts:
            end_or_error({**objects, key: (changed, 0)}, due)
        rest = {other: kept for other, kept in objects.items() if other != key}
        if key == last and not with_manifest:  # nothing shows that there was another slot
            due_then = rest_due(shipper.moments[-2], shipper.items)
            assert end_or_error(rest, due_then)
        else:
            end_or_error(rest, due)


def test_damage_is_named_and_the_slots_before_it_can_be_restored() -> None:
    shipper = small_log(with_manifest=False)
    objects = cast("MemoryStore", shipper.store).contents()
    key = f"{QUEUE}/{codec.slot_key(5)}"
    for changed in (objects[key][0][:-1] + b"x", None):
        store = MemoryStore()
        store.replace_all({name: kept for name, kept in objects.items() if name != key})
        if changed is not None:
            store.create(key, changed)
        with pytest.raises(StoreDamaged) as error:
            restore(store, QUEUE, HERE, disk=MemoryDisk())
        assert (error.value.key, error.value.last_good_slot) == (key, 4)
        shipper.store = store
        check_restored(shipper, shipper.moments[3], at_slot=error.value.last_good_slot)


def test_another_queue_s_objects_are_not_believed() -> None:
    shipper = small_log()
    objects = cast("MemoryStore", shipper.store).contents()
    for name, key in (("jobs-2", f"{QUEUE}/"), (QUEUE, f"{QUEUE}/queue.json")):
        store = MemoryStore()
        moved = {f"{name}/{key.removeprefix(f'{QUEUE}/')}": kept for key, kept in objects.items()}
        if name == QUEUE:
            foreign = QueueIdentity(QUEUE, bytes(16), 255)
            moved[f"{QUEUE}/queue.json"] = (encode_identity(foreign), 0)
        store.replace_all(moved)
        with pytest.raises(StoreDamaged, match=f"{name}/queue.json, offset 0: it is of another queue") as error:
            restore(store, name, HERE, disk=MemoryDisk())
        assert error.value.key == f"{name}/queue.json", key


# -- cut short -------------------------------------------------------------------------------------------------------


def check_cut_short(disk: Any, shipper: Shipper, due: dict[str, Any], counts: Counter[str]) -> None:
    """What a restore that was cut short has left: nothing, or what nobody opens, or all of it. A restore goes on."""
    try:
        names = disk.directory(HERE).names()
    except FileNotFoundError:
        names = []
    mine = {name for name in names if name.startswith((f"{QUEUE}.", f"{QUEUE}+"))} - {"jobs.lock"}
    if f"{QUEUE}.restore" not in mine and mine:
        counts["complete"] += 1
        with pytest.raises(RestoreTargetExists):
            restore(shipper.store, QUEUE, HERE, disk=disk, threads=1)
    else:
        counts["incomplete" if mine else "nothing"] += 1
        if mine:
            with pytest.raises(RestoreIncomplete):
                queue_on(disk, HERE)
        restore(shipper.store, QUEUE, HERE, disk=disk, threads=1)
    assert verify(HERE, QUEUE, disk=disk).ok
    assert last_version(HERE, QUEUE, "app", disk=disk) == 4
    assert rest_of(disk) == due


class Killed(BaseException):
    """The process is killed here."""


@pytest.mark.parametrize("after", [0, 5, 15, 40])
def test_a_kill_or_a_power_cut_at_every_operation(after: int, tally: Tally) -> None:
    """``after``: the operations of a restore before this one, which was killed after so many; 0: there was none."""
    shipper = log_with_a_batch()
    due, counts = rest_due(shipper.moments[-1], shipper.items), Counter[str]()
    begun = CrashingDisk()

    def at(disk: CrashingDisk, operation: int, then: Callable[[], object]) -> None:
        def stop() -> None:
            if disk.operations == operation:
                then()
                raise Killed

        disk.before_operation = stop
        with contextlib.suppress(Killed):
            restore(shipper.store, QUEUE, HERE, disk=disk, threads=1)
        disk.before_operation = None

    if after:
        at(begun, after, bool)
    whole = begun.after_kill()
    restore(shipper.store, QUEUE, HERE, disk=whole, threads=1)
    states = 0

    def look(disk: CrashingDisk, seed: int) -> None:
        nonlocal states
        limits = {PowerModel.PREFIX: 2, PowerModel.EXT4: 3, PowerModel.ANY: 20 if ALL else 10}
        cut = [each for model, limit in limits.items() for each in disk.power_states(model, limit, seed=seed)]
        for each in (disk.after_kill(), *cut):
            states += 1
            check_cut_short(each, shipper, due, counts)

    for operation in sorted({*drawn(range(whole.operations), 30), whole.operations}):
        disk = begun.after_kill()
        at(disk, operation, partial(look, disk, operation))
        if operation == whole.operations:
            before = counts["complete"], states
            look(disk, operation)
            assert counts["complete"] - before[0] == states - before[1]  # it has returned: it is on disk
    assert counts["incomplete"] > states // 2
    assert counts["complete"]
    tally.add("states of a disk after a restore that was cut short", states)


def test_the_second_restore_may_be_to_another_moment() -> None:
    shipper, disk = log_with_a_batch(), MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=disk)
    disk.directory(HERE).create(f"{QUEUE}.restore").close()  # as before its last step
    restore(shipper.store, QUEUE, HERE, at_slot=1, disk=disk)
    assert last_version(HERE, QUEUE, "app", disk=disk) is None
    assert rest_of(disk) == {"": []}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("sticky", [False, True])
def test_an_error_at_every_operation(code: int, *, sticky: bool) -> None:
    shipper = log_with_a_batch()
    due, counts = rest_due(shipper.moments[-1], shipper.items), Counter[str]()
    whole = FailingDisk(MemoryDisk())
    restore(shipper.store, QUEUE, HERE, disk=whole, threads=1)
    for operation in drawn(range(1, whole.operations + 1), 40):
        disk = FailingDisk(MemoryDisk())
        disk.arm(code, at=operation, sticky=sticky)
        error: OSError | None = None
        try:
            restore(shipper.store, QUEUE, HERE, disk=disk, threads=1)
        except OSError as raised:
            error = raised
        if error is not None:
            assert error.errno == code
            assert isinstance(error, QueueDiskFull) == (code == errno.ENOSPC)
        disk.disarm()
        check_cut_short(disk.inner, shipper, due, counts)
    assert counts["incomplete"] > 10


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_leaves_what_the_next_restore_repeats(threads: int, error: type[BaseException]) -> None:
    shipper, disk = grown(3, steps=60), MemoryDisk()
    calls = 0

    def interrupt(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error

    with pytest.raises(error):
        restore(shipper.store, QUEUE, HERE, disk=disk, threads=threads, all=True, progress=interrupt)
    with pytest.raises(RestoreIncomplete):
        queue_on(disk, HERE)
    assert not [each for each in threading.enumerate() if each.name.startswith("kestrelpy-restore")]
    restore(shipper.store, QUEUE, HERE, disk=disk)
    assert rest_of(disk) == rest_due(shipper.moments[-1], shipper.items)


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30 if ALL else 4))
def test_requests_that_fail_are_repeated(seed: int) -> None:
    simulated, random = SimulatedStore(), Random(seed)
    shipper = grown(seed, simulated.client("owner"))
    client = simulated.client("me")
    client.list_lag = random.choice((0, 0, 3))
    faults = (Fault.NONE, Fault.NONE, Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE)
    simulated.before_request = lambda request: random.choice(faults) if request.client == "me" else Fault.NONE
    disk, moment = MemoryDisk(), shipper.moments[-1]
    try:
        found = restore(client, QUEUE, HERE, disk=disk, threads=3)
    except StoreUnavailable:
        simulated.before_request = lambda _: Fault.NONE
        found = restore(client, QUEUE, HERE, disk=disk, threads=3)
    assert found.slot == moment.slot
    assert rest_of(disk) == rest_due(moment, shipper.items)


def restored_meanwhile(seed: int) -> bool:
    """Restore while the owner ships, and collects all that he may. Returns whether that was no error."""
    simulated, random, disk = SimulatedStore(), Random(seed), MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"first")
        shipper = Shipper(simulated.client("owner"), disk, seed=seed)
        shipper.fence()

        def step() -> None:
            queue.put_many([random.randbytes(random.choice((10, 600, 900))) for _ in range(random.randrange(1, 4))])
            if random.random() < 0.4:
                queue.get_nowait().commit()
                queue.checkpoint()
            shipper.ship(most=random.choice((1, 9)), seals_alone=random.random() < 0.5)
            if random.random() < 0.3:
                shipper.manifest()
            kept = reading.ShippedQueue(shipper.store, QUEUE).manifests()
            if len(kept) > 2 and random.random() < 0.5:
                collect(shipper, kept[-2])

        def before(request: Request) -> Fault:
            if request.client == "me" and random.random() < 0.3:
                step()
            return Fault.NONE

        for _ in range(25):
            step()
        simulated.before_request = before
        other, at = (
            MemoryDisk(),
            random.choice((None, shipper.state.slot - random.randrange(5), random.randrange(1, 20))),
        )
        try:
            found = restore(simulated.client("me"), QUEUE, HERE, disk=other, at_slot=at, threads=1)
        except (NoSuchQueue, StoreDamaged):
            return False
        moment = shipper.moments[found.slot - 1]
        assert (found.last_id, found.written_ms) == (moment.last_id, moment.written_ms)
        assert at in (None, found.slot)
        assert rest_of(other) == rest_due(moment, shipper.items)
        return True


def test_the_owner_ships_and_collects_meanwhile() -> None:
    """What is restored is what the log was at the slot that it says. There is an error if what was to be read next has
    been collected: here that may be a moment after it was written.
    """
    seeds = range(300 if ALL else 30)
    assert sum(map(restored_meanwhile, seeds)) > len(seeds) // 3


def test_a_read_is_sent_again_a_few_times() -> None:
    simulated = SimulatedStore()
    simulated.client("owner").create("jobs/one", b"1")
    patient = reading.PatientStore(simulated.client("me"))
    for failures in range(len(reading.PAUSES) + 1):
        left = iter([Fault.LOST_BEFORE] * failures)
        simulated.before_request = lambda _, left=left: next(left, Fault.NONE)  # type: ignore[misc]
        assert patient.read("jobs/one") == b"1"
        left = iter([Fault.LOST_AFTER] * failures)
        simulated.before_request = lambda _, left=left: next(left, Fault.NONE)  # type: ignore[misc]
        assert [each.key for each in patient.list("jobs/")] == ["jobs/one"]
    simulated.is_away = True
    asked = simulated.requests
    with pytest.raises(StoreUnavailable):
        patient.read("jobs/one")
    assert simulated.requests == asked + len(reading.PAUSES) + 1
    patient.stop()
    with pytest.raises(StoreUnavailable):
        patient.read("jobs/one")
    assert simulated.requests == asked + len(reading.PAUSES) + 2


def test_a_store_that_is_away_is_said_so_and_nothing_is_made() -> None:
    simulated, disk = SimulatedStore(), MemoryDisk()
    grown(1, simulated.client("owner"))
    simulated.is_away = True
    with pytest.raises(StoreUnavailable):
        restore(simulated.client("me"), QUEUE, HERE, disk=disk)
    with pytest.raises(FileNotFoundError):
        disk.directory(HERE)


def test_segments_are_read_in_parts_and_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shipper = grown(3, steps=80)
    monkeypatch.setattr(reading, "PART_BYTES", 100)
    asked: list[tuple[str, int | None]] = []
    reading_now: set[int] = set()
    most = 0
    read = shipper.store.read

    def noted(key: str, start: int = 0, length: int | None = None) -> bytes | None:
        nonlocal most
        asked.append((key, length))
        if "/seg/" in key:
            reading_now.add(threading.get_ident())
            most = max(most, len(reading_now))
        return read(key, start, length)

    monkeypatch.setattr(shipper.store, "read", noted)
    check_restored(shipper, shipper.moments[-1], all=True, threads=3)
    parts = [length for key, length in asked if "/seg/" in key]
    assert len(parts) > 100
    assert all(length is not None and length <= 101 for length in parts)
    assert most <= 3


def test_on_a_real_store(s3: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipper = grown(11, s3.store("restored"))
    url = f"s3://{BUCKET}/restored"
    found = restore(url, QUEUE, tmp_path / "here", options=s3.options())
    assert (found.slot, found.last_id) == (shipper.state.slot, shipper.state.last_id)
    assert rest_of(None, str(tmp_path / "here")) == rest_due(shipper.moments[-1], shipper.items)
    for path in (tmp_path / "here").iterdir():
        assert path.is_dir() or s3.secret.encode() not in path.read_bytes()
    middle = shipper.moments[len(shipper.moments) // 2]
    restore(s3.store("restored"), QUEUE, tmp_path / "middle", at_slot=middle.slot)
    assert rest_of(None, str(tmp_path / "middle")) == rest_due(middle, shipper.items)
    with pytest.raises(NoSuchQueue) as error:
        restore(url, "other", tmp_path / "other", options=s3.options())
    assert s3.secret not in str(error.value) + repr(error.value)
