"""The inbox of a shipped queue: an intent is in the log no later than the first item of its batch, "taken in" no
earlier than the last one. A restored queue, with the same inbox beside it, has each batch once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, QueueEmpty, inbox
from kestrelpy.ship import Ship, log, owner, restore
from kestrelpy.ship.owner import LogOwner
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.slots import ShippedLedger
from kestrelpy.testing.stores import MemoryStore
from tests.ship.in_store import log_of
from tests.ship.owner_explorer import answer_of, single_threaded
from tests.support.budget import Tally


def publish(folder: Path, name: bytes, count: int, size: int) -> list[bytes]:
    items = [b"%s-%d." % (name, number) * size for number in range(count)]
    with inbox.PartWriter(folder, "jobs") as part:
        for item in items:
            part.add([item])
        sealed = part.seal()
    assert inbox.publish(folder, "jobs", [sealed])
    return items


def everything(folder: Path) -> list[bytes]:
    """All items of a queue, with what is in its inbox taken in."""
    with JournaledQueue(folder, "jobs", segment_bytes=8192, ship=False, inbox_interval=None) as queue:
        queue.take_in()
        found: list[bytes] = []
        with contextlib.suppress(QueueEmpty):
            while True:
                found.append(queue.get(block=False).data)
        return found


def ship_and_restore(tmp_path: Path) -> int:
    """Ship a queue with batches slot by slot. Whatever slot the log ends with, the restored queue has each batch once.
    Returns how many slots there were.
    """
    store, here = MemoryStore(), tmp_path / "here"
    options = Ship(store, interval=0, chunk_bytes=64 << 10)
    put: list[bytes] = []
    with (
        single_threaded(),
        patch.object(owner, "MOST_TAIL_SLOTS", 3),
        JournaledQueue(here, "jobs", segment_bytes=8192, ship=options, inbox_interval=None) as queue,
    ):
        published: list[tuple[int, dict[str, bytes]]] = []
        for number in range(3):
            queue.put(b"before %d" % number)
            put.append(b"before %d" % number)
            ship_all(queue, 1)
            put += publish(here, b"batch %d" % number, 40, 60)
            files = {path.name: path.read_bytes() for path in (here / "inbox").iterdir()}
            queue.take_in()
            last_id = queue.stats().tail_id
            published.append((last_id, {name: files[name] for name in files if name.endswith((".part", ".batch"))}))
            ship_all(queue, 2 if number < 2 else 1000)
        ship_all(queue, 1000)
    slots = log_of(store).slot
    for slot in range(2, slots + 1):
        there = tmp_path / f"slot-{slot}"
        end = restore(store, "jobs", there, at_slot=slot).last_id
        (there / "inbox").mkdir(exist_ok=True)
        for last_id, files in published:
            for name in files if last_id > end else ():  # what was taken in completely was deleted
                (there / "inbox" / name).write_bytes(files[name])
        found = everything(there)
        batches = [item for item in put if not item.startswith(b"before")]
        assert sorted(item for item in found if not item.startswith(b"before")) == sorted(batches), slot
    return slots


def ship_all(queue: JournaledQueue, most: int) -> None:
    """Carry out so many steps of the shipping, on this thread."""
    assert queue._shipment is not None
    shipper: Shipper = queue._shipment._shipper
    for _ in range(most):
        steps, answer = shipper._owner.step(0.0), None
        try:
            while True:
                answer = answer_of(shipper, log.resume(steps, answer))
        except StopIteration as end:
            if not end.value:
                return


def test_each_batch_is_there_once_whatever_slot_the_log_ends_with(tmp_path: Path, tally: Tally) -> None:
    slots = ship_and_restore(tmp_path)
    assert slots > 10
    tally.add("slots restored with an inbox beside them", slots - 1)


PLANTED: dict[str, Callable[[], Any]] = {}


def planted(plant: Callable[[], Iterator[None]]) -> None:
    PLANTED[plant.__name__] = contextlib.contextmanager(plant)


@planted
def intent_late() -> Iterator[None]:
    real = LogOwner.note_ledger

    def note(self: LogOwner, ledger: ShippedLedger, from_items: int) -> None:
        intent = ledger.state().intent
        real(self, ledger, from_items if intent is None else from_items + intent.items)

    with patch.object(LogOwner, "note_ledger", note):
        yield


@planted
def taken_in_early() -> Iterator[None]:
    real = LogOwner.note_ledger

    def note(self: LogOwner, ledger: ShippedLedger, from_items: int) -> None:
        real(self, ledger, from_items if ledger.state().intent is not None else from_items - 39)

    with patch.object(LogOwner, "note_ledger", note):
        yield


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tmp_path: Path, tally: Tally) -> None:
    with PLANTED[name](), pytest.raises(Exception) as raised:  # noqa: PT011 - a fault may end in any error
        ship_and_restore(tmp_path)
    assert not isinstance(raised.value, AttributeError | NameError | TypeError), "the plant itself is wrong"
    tally.add("planted faults caught", 1)
