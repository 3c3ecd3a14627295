"""Stores that somebody else can write: whatever is in one, a call ends, in one of its documented errors or with items
that were put: never with another one. No file is made but the queue's own in its folder, no object of another queue is
touched, and no more memory is taken than a few times what the objects have.

What an accident has done to one object is an error, or makes no difference.
"""

from __future__ import annotations

import contextlib
import os
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from kestrelpy import JournaledQueue, KestrelError, UnsupportedFormat, scan
from kestrelpy._journal.file_names import is_name, parse_owner
from kestrelpy.clock import SystemClock
from kestrelpy.inbox.format import LedgerState
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NoSuchQueue,
    NotShipped,
    OwnerAlive,
    RemoteReport,
    Ship,
    Store,
    StoreDamaged,
    StoreUnavailable,
    garbage,
    log,
    open_store,
    opened,
    queues,
    read_log,
    reading,
    restore,
    shipper,
    status,
    verify,
)
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.folder_store import FolderStore
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import DATA, SEAL, DroppedReader
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.testing.stores import MemoryStore
from tests.fuzz.hostile_stores import ACCIDENTS, FORGERIES, OTHER, Log, Objects, logs, store_of
from tests.fuzz.judge import BrokenInvariant, rearm, require, watched
from tests.fuzz.test_hostile_folders import KINDS, place
from tests.ship.examples import CHECKPOINT, FILE, FIRST, SEALED, SECOND, example_log, header
from tests.ship.logs import resealed_manifest, resealed_slot, slots_of
from tests.ship.restores import HERE, queue_on
from tests.ship.shipped import QUEUE
from tests.support.budget import SEED, Tally, share

INPUTS = 3000
SECONDS = 2.0
"""For one input, in processor time; it takes milliseconds."""
LOOKING = (NoSuchQueue, StoreDamaged, UnsupportedFormat)
OPENING = (*LOOKING, HistoryMismatch, Fenced, NotShipped, OwnerAlive, StoreUnavailable)
NEW = b"put after all that"
OPENED_EVERY = 8


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and pauses are over at once, by a clock that goes on when somebody waits."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    def elapsed() -> float:
        now[0] += 1e6
        return now[0]

    monkeypatch.setattr(opened, "pause", pause)
    monkeypatch.setattr(opened, "LISTING_SECONDS", 0.0)
    monkeypatch.setattr(shipper, "RESTARTS", (0.0,) * 3)
    monkeypatch.setattr(SystemClock, "elapsed", staticmethod(elapsed))


# -- what is asked of each -------------------------------------------------------------------------------------------


def judge(whole: Log, objects: Objects, random: Random, *, forged: bool, opens: bool) -> Counter[str]:
    """Let every call meet a store with these objects. Returns what came of it."""
    counts: Counter[str] = Counter()
    store = store_of(objects)
    report = look(store, counts)
    ways: list[dict[str, Any]] = [{}, {"all": True}, {"at_slot": random.randrange(1, 40)}]
    ways.append({"at_ms": random.choice((0, 1 << 70, 1_700_000_000_000 + random.randrange(9000)))})
    for how in ways:
        made = restored(whole, store, how, counts, forged=forged)
        require(made or how or report is None or not report.ok, f"verify says it is whole: {objects.keys()}")
    require(store.contents() == objects, "a look has changed the store")
    collected(whole, objects, counts)
    if opens:
        opened_there(whole, objects, counts)
    return counts


def look(store: MemoryStore, counts: Counter[str]) -> RemoteReport | None:
    calls: dict[str, Callable[[], Any]] = {
        "queues": lambda: queues(store),
        "status": lambda: status(store, QUEUE),
        "log": lambda: list(read_log(store, QUEUE)),
        "verify": lambda: verify(store, QUEUE),
    }
    results: dict[str, Any] = {}
    for name, call in calls.items():
        with contextlib.suppress(*LOOKING):
            results[name] = call()
            counts[name] += 1
    require(all(is_name(name) for name in results["queues"]), "2: a queue without a legal name")
    report: RemoteReport | None = results.get("verify")
    counts["whole"] += report is not None and report.ok
    return report


def restored(whole: Log, store: MemoryStore, how: dict[str, Any], counts: Counter[str], *, forged: bool) -> bool:
    """Whether it can be restored. Then what is there are items of this queue."""
    disk, made = MemoryDisk(), None
    try:
        made = restore(store, QUEUE, HERE, disk=disk, threads=1, **how)
    except LOOKING:
        counts["not restored"] += 1
    check_files(disk)
    if made is None:
        return False
    counts["restored"] += 1
    try:
        check_items(whole, store, disk)
    except (KestrelError, OSError) as error:
        require(forged, f"it was restored, and cannot be opened: {error}")
        counts["restored, and not opened"] += 1
    if not forged and not how:
        require((made.slot, made.last_id) == (whole.state.slot, whole.state.last_id), f"another end: {made}")
    return True


def check_items(whole: Log, store: MemoryStore, disk: MemoryDisk) -> None:
    """Open what is there, and compare. Where ``queue.json`` is missing, whoever has put the whole log of another queue
    there has made that queue's log of it.
    """
    with queue_on(disk, HERE):
        pass
    known = [whole.items] if f"{QUEUE}/queue.json" in store.contents() else [whole.items, whole.others]
    for record in scan(HERE, QUEUE, disk=disk):
        is_known = record.data == NEW or any(items.get(record.id) == record.data for items in known)
        require(is_known, f"item {record.id} is another one")


def check_files(disk: MemoryDisk) -> None:
    for path, folder in disk.folders.items():
        require(path in ("/", HERE, f"{HERE}/inbox"), f"there is a folder {path}")
        for name in folder.names:
            is_ours = path != "/" and "/" not in name and (parse_owner(name) or ("",))[0] == QUEUE
            require(is_ours or name.startswith(f"{QUEUE}."), f"there is a file {name} in {path}")


def collected(whole: Log, objects: Objects, counts: Counter[str]) -> None:
    """Let the owner collect garbage. What its log needs stays, and so does what is not its own."""
    store, state = store_of(objects), LogState(whole.state.manifest())

    def note(plan: garbage.Plan) -> log.Steps[None]:
        del plan
        return
        yield

    steps = garbage.collect(f"{QUEUE}/", state, note, history_ms=0, keep_ms=0)
    try:
        log.carry_out(steps, store, bool)
        counts["collected"] += 1
    except LOOKING:
        counts["not collected"] += 1
    left = store.contents().keys()
    needed = {codec.slot_key(number) for number in (*state.fences, *(each.slot for each in state.tail))}
    needed |= {each.key for each in state.segments} | {"queue.json"}
    gone = objects.keys() - left
    counts["objects deleted"] += len(gone)
    require(not gone & {f"{QUEUE}/{key}" for key in needed}, f"what is needed was deleted: {sorted(gone)}")
    require(all(key.startswith(f"{QUEUE}/") and len(key) < 200 for key in gone), f"deleted: {sorted(gone)}")


def opened_there(whole: Log, objects: Objects, counts: Counter[str]) -> None:
    """Open the queue, as it was restored from the store when that was whole, and ship it there."""
    store, disk = store_of(objects), MemoryDisk()
    restore(store_of(whole.objects), QUEUE, HERE, disk=disk, threads=1)
    try:
        options = Ship(store, interval=0, history=1.0, close_timeout=2.0)
        queue = JournaledQueue(HERE, QUEUE, disk=disk, clock=ManualClock(1 << 40), inbox_interval=None, ship=options)
        with queue:
            queue.put(NEW)
            assert queue.shipping is not None
            queue.shipping.flush(1.0)
            queue.shipping.collect(1.0)
        counts["shipped on"] += 1
    except OPENING as error:
        counts[f"opening: {type(error).__name__}"] += 1
    there = store.contents()
    require({k: v for k, v in there.items() if k.startswith(f"{OTHER}/")}
            == {k: v for k, v in objects.items() if k.startswith(f"{OTHER}/")}, "another queue's objects")  # fmt: skip
    check_items(whole, store_of(whole.objects), disk)
    again = MemoryDisk()
    with contextlib.suppress(*LOOKING):
        restore(store, QUEUE, HERE, disk=again, threads=1)
        with contextlib.suppress(KestrelError):
            check_items(whole, store_of(objects), again)


def run(kind: str, seed: int, limit: int) -> Counter[str]:
    """Judge so many inputs. Input n of a seed is always the same. Raises ``AssertionError`` with its number."""
    damages = ACCIDENTS if kind == "accidents" else FORGERIES
    counts: Counter[str] = Counter()
    with watched():
        for number in range(limit):
            rearm()
            random = Random(f"{kind} {seed} {number}")
            whole = random.choice(logs())
            objects, names = dict(whole.objects), random.choices(sorted(damages), k=1 if kind == "accidents" else 2)
            for name in names:
                damages[name](objects, random)
            before = time.process_time()
            try:
                forged = kind != "accidents"
                counts += judge(whole, objects, random, forged=forged, opens=number % OPENED_EVERY == 0)
            except BrokenInvariant as broken:
                raise AssertionError(f"input {number} of {kind}, seed {seed}, {names}: {broken}") from broken
            except Exception as error:
                what = f"{type(error).__name__} escaped: {error}"
                raise AssertionError(f"input {number} of {kind}, seed {seed}, {names}: {what}") from error
            spent = time.process_time() - before
            assert spent < SECONDS, f"input {number} of {kind}, seed {seed}, {names}: {spent} s"
    return counts


@pytest.mark.parametrize("kind", ["accidents", "forgeries"])
def test_hostile_stores(kind: str, tally: Tally) -> None:
    limit = share(INPUTS)
    counts = run(kind, SEED, limit)
    print(f"{kind}: {dict(counts)}")
    tally.add("stores that somebody else has written", limit)
    assert counts["restored"] > limit / 10
    assert counts["not restored"] > limit / 4
    assert counts["collected"] > limit / 4


# -- a store in a folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_where_an_object_should_be(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store in a folder, at the name of an object of each kind: it is neither followed nor read nor waited for."""
    monkeypatch.setattr(reading, "PAUSES", ())
    whole = logs()[0]
    outside = tmp_path / "outside"
    outside.mkdir()
    manifest = manifests.manifest_key(whole.state.slot)
    for number, key in enumerate(("queue.json", codec.slot_key(1), manifest, whole.state.segments[0].key)):
        folder = tmp_path / f"store{number}"
        store = open_store(f"file://{folder}")
        for each, (data, _) in whole.objects.items():
            if each.startswith(f"{QUEUE}/"):
                store.create(each, data)
        precious = whole.objects[f"{QUEUE}/{key}"][0]  # whoever follows a link finds nothing wrong
        (outside / "precious").write_bytes(precious)
        place(kind, folder / QUEUE / key, outside)
        before = os.lstat(folder / QUEUE / key)
        is_found = meets(store)
        matters = key != manifest and kind != "hard link"  # the log is whole without it; and that is an object
        assert is_found or not matters, f"{key} was believed"
        assert os.lstat(folder / QUEUE / key)[:3] == before[:3]
        assert [path.name for path in outside.iterdir()] == ["precious"]
        assert (outside / "precious").read_bytes() == precious


def test_a_link_that_is_followed_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(store: FolderStore, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        path = Path(store.describe().removeprefix("file://")) / key
        return path.read_bytes()[start : None if length is None else start + length] if path.exists() else None

    monkeypatch.setattr(FolderStore, "read", read)
    with pytest.raises(AssertionError, match="was believed"):
        test_whatever_stands_where_an_object_should_be("link to a file", tmp_path, monkeypatch)


def meets(store: Store) -> bool:
    """Whether ``verify`` finds that something is wrong. Each call ends in its time, in a documented error if in one."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: queues(store),
        lambda: status(store, QUEUE),
        lambda: list(read_log(store, QUEUE)),
        lambda: restore(store, QUEUE, HERE, disk=MemoryDisk()),
        lambda: verify(store, QUEUE).ok,
    )
    result: object = None
    for call in calls:
        began, result = time.process_time(), False
        with watched(), contextlib.suppress(*LOOKING, StoreUnavailable):
            result = call()
        assert time.process_time() - began < SECONDS
    return not result


# -- what it is worth ------------------------------------------------------------------------------------------------


def unchecked_parts(shipped: reading.ShippedQueue, segment: codec.SealedSegment) -> Iterator[bytes]:
    yield shipped.store.read(shipped.prefix + segment.key) or b""


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "the crc of a segment is not checked": (
        "accidents", lambda: mock.patch.object(reading.ShippedQueue, "segment_parts", unchecked_parts),
    ),
    "the slots of the tail are not checked": (
        "accidents",
        lambda: mock.patch.object(
            reading.ShippedQueue, "tail_parts",
            lambda self, state: ((self.slot(each.slot) or codec.Slot(state.header)).frames for each in state.tail),
        ),
    ),
    "a listed slot that is gone is passed over": (
        "forgeries", lambda: mock.patch.object(reading.ShippedQueue, "slot_there", reading.ShippedQueue.slot),
    ),
    "a reader may have any name": ("forgeries", lambda: mock.patch.object(codec, "check_name")),
    "the log of another queue is believed": (
        "forgeries", lambda: mock.patch.object(reading.ShippedQueue, "_check_identity"),
    ),
    "queue.json may be of any depth": (
        "forgeries", lambda: mock.patch("kestrelpy.ship.identity.RecursionError", KeyError, create=True),
    ),
    "what nothing names is garbage at once": (
        "forgeries", lambda: mock.patch.object(garbage, "_until", lambda objects, *_: tuple(objects.values())),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_caught(fault: str) -> None:
    kind, plant = PLANTED[fault]
    with plant(), pytest.raises(AssertionError, match="input"):
        run(kind, 0, INPUTS)


# -- memory ----------------------------------------------------------------------------------------------------------

COUNT = 10_000
TIMES = 20
"""So many times the objects' bytes are taken at most: an id of 8 bytes is an object of 32, and stands in a list."""


def first_slot() -> bytes:
    return example_log()[0]


def second_slot(**more: Any) -> bytes:
    """DATA without bytes, after the FENCE."""
    about = header(DATA, 2, (1, 0), crc_before=codec.slot_crc(first_slot()), place=None)
    return codec.encode_slot(codec.Slot(about, **more))


def manifest_of(about: codec.SlotHeader, fences: int, tail: int = 0) -> bytes:
    """The manifest of a slot that is far away."""
    about = about._replace(slot=2 * COUNT, epoch=fences)
    slots = [manifests.TailSlot(2 * COUNT - tail + 1 + n, 96 * n, 1 + n) for n in range(tail)]
    if tail:
        about = about._replace(offset=96 * (tail - 1), length=96, first_id=tail, last_id=tail)
    return manifests.encode_manifest(manifests.Manifest(about, 0, tuple(range(1, fences + 1)), (), tuple(slots)))


def many_done() -> LedgerState:
    state = LedgerState()
    for number in range(COUNT // 4):
        state.note_done(number.to_bytes(16, "big"), number, f"{number}", number)
    return state


SPANS = tuple((2 * n + 1, 2 * n + 1) for n in range(COUNT))
ABOUT = header(DATA, 2, (1, 0), crc_before=0, place=None)
PLACED = header(DATA, 2, (1, 1), crc_before=0, place=(0, 96))
LARGE: dict[str, Callable[[], dict[str, bytes]]] = {
    "noise": lambda: {key: bytes(range(256)) * 4000 for key in (
        codec.slot_key(1), manifests.manifest_key(9), "queue.json", "in/0000000000007.batch", "reader/x/0000000000001",
    )},
    "dropped readers": lambda: {codec.slot_key(2): second_slot(checkpoints=(DroppedReader(""),) * 4 * COUNT)},
    "spans": lambda: {codec.slot_key(2): second_slot(
        checkpoints=(CHECKPOINT._replace(head=0, done=SPANS, error_counts=((1, 1),) * COUNT),),
    )},
    "a ledger": lambda: {codec.slot_key(2): second_slot(ledger=codec.ShippedLedger.of(0, many_done()))},
    "fences": lambda: {manifests.manifest_key(2 * COUNT): manifest_of(ABOUT, COUNT)},
    "a tail": lambda: {manifests.manifest_key(2 * COUNT): manifest_of(PLACED, 1, COUNT)},
    "a segment of exabytes": lambda: {codec.slot_key(2): codec.encode_slot(codec.Slot(
        header(SEAL, 2, (1, 2), crc_before=codec.slot_crc(first_slot()), place=(len(FIRST + SECOND), 0)),
        note=codec.encode_sealed(SEALED._replace(file_bytes=1 << 61)),
    )), SEALED.key: FILE * 4000},
    "counts": lambda: {
        codec.slot_key(2): resealed_slot(second_slot()[:128] + b"\xff\xff\xff\x03" * 3 + second_slot()[140:]),
        manifests.manifest_key(9): resealed_manifest(manifest_of(ABOUT, 1)[:188] + b"\xff" * 20 + bytes(COUNT)),
        manifests.manifest_key(10): resealed_manifest(
            manifest_of(ABOUT, 1)[:192] + b"\xff" * 4 + manifest_of(ABOUT, 1)[196:]
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_memory_is_bounded_by_the_objects(name: str) -> None:
    """What is claimed costs nothing, and what is there a few times its size."""
    objects = {f"{QUEUE}/{key}": (data, 0) for key, data in LARGE[name]().items()}
    if f"{QUEUE}/{codec.slot_key(1)}" not in objects:
        objects[f"{QUEUE}/{codec.slot_key(1)}"] = first_slot(), 0
    store, size = store_of(objects), sum(len(data) for data, _ in objects.values())
    whole = LogState()
    whole.add(slots_of(example_log())[0])
    calls: dict[str, Callable[[], object]] = {
        "look": lambda: look(store, Counter()),
        "restore": lambda: restore(store, QUEUE, HERE, disk=MemoryDisk(), threads=1),
        "collect": lambda: log.carry_out(garbage.survey(f"{QUEUE}/", whole, history_ms=0), store, bool),
    }
    for call, do in calls.items():
        before = time.process_time()
        tracemalloc.start()
        try:
            with contextlib.suppress(*LOOKING):
                do()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < TIMES * size + (1 << 18), f"{call}: {peak:,} bytes for {size:,}"
        assert time.process_time() - before < 10 * SECONDS, call
        print(f"{name}: {call}: {peak / size:.1f} times {size:,} bytes")


def test_a_count_that_is_believed_is_caught() -> None:
    def believing(data: bytes, count: int) -> None:
        assert len([data] * min(count, 1 << 22)) >= 0

    with (
        mock.patch.object(manifests, "_decode_segments", believing),
        pytest.raises(AssertionError, match="bytes for"),
    ):
        test_memory_is_bounded_by_the_objects("counts")
