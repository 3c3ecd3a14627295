"""Batches of the store in random worlds: each comes exactly once and whole. And each rule is broken on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, KestrelError
from kestrelpy.inbox.format import LedgerState, PublishedBatch, decode_ledger
from kestrelpy.inbox.host import InboxHost
from kestrelpy.inbox.ledger import IngestLedger
from kestrelpy.ship import garbage, in_objects, publishing
from kestrelpy.ship import store_inbox as feed
from kestrelpy.ship.log import Steps, read_end_surely
from kestrelpy.ship.publishing import Publication
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.slots import ShippedLedger
from kestrelpy.ship.store_inbox import StoreInbox
from kestrelpy.testing.stores import MemoryStore, SimulatedStore
from tests.ship import test_publishing, test_store_inbox
from tests.ship.inbox_explorer import PREFIX, explore
from tests.support.budget import SEED, Tally, share

WORLDS = max(12, share(60))
Plant: TypeAlias = Callable[[], Iterator[None]]
Check: TypeAlias = Callable[[Path], object]
PLANTED: dict[str, tuple[Any, Check]] = {}


def worlds(first: int, count: int = 20) -> Check:
    """The worlds in which a planted fault is looked for."""
    return lambda folder: explore(first, count)


def scenario(run: Callable[[JournaledQueue, MemoryStore], object]) -> Check:
    """A test that must fail with the planted fault."""

    def check(folder: Path) -> None:
        store = MemoryStore()
        with test_store_inbox.opened(folder / "first", store, interval=None) as queue:
            run(queue, store)

    return check


def planted(name: str, check: Check) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        PLANTED[name] = contextlib.contextmanager(plant), check
        return plant

    return note


def slot_by_slot(folder: Path) -> None:
    store = MemoryStore()
    test_store_inbox.opened(folder / "first", store, interval=None).close()
    test_store_inbox.test_whatever_slot_the_log_ends_with(folder, store)


def half_a_batch(folder: Path) -> None:
    store = MemoryStore()
    test_store_inbox.opened(folder / "first", store, interval=None).close()
    test_store_inbox.test_another_owner_finishes_half_a_batch(folder, store, "restore")


def test_each_batch_comes_once_and_whole(tally: Tally) -> None:
    print(f"seed {SEED}")
    counts = explore(SEED % (1 << 32), WORLDS)
    tally.add("worlds of publishers and owners", WORLDS)
    tally.add("batches in a log, once and whole", counts["batches in the log"])
    assert counts["takeovers"] > WORLDS
    assert counts["publishers killed"] > WORLDS
    assert counts["publications"] > 2 * WORLDS
    assert counts["publications found there"] > 0


def in_a_hole(folder: Path) -> None:
    store = SimulatedStore()
    test_publishing.test_a_batch_in_a_hole_is_published_again(store, test_publishing.Log(store))


@planted("batch_number_reused", in_a_hole)
def batch_number_reused() -> Iterator[None]:
    """A publisher does not read the log again, and is content with a batch in a hole."""

    def publish(prefix: str, batch: PublishedBatch) -> Steps[Publication]:
        state = yield from read_end_surely(prefix)
        if publishing._ledger(state).knows(batch):
            return Publication(0, False, state)
        number = publishing.taken_in(state) + 1
        while (is_new := (yield from publishing._claim(prefix, batch._replace(number=number)))) is None:
            number += 1
        return Publication(number, is_new, state)

    with patch.object(publishing, "publish_steps", publish):
        yield


@planted("numbers_begin_anew", scenario(test_store_inbox.test_numbers_go_on_when_old_batches_are_deleted))
def numbers_begin_anew() -> Iterator[None]:
    """The log does not say how many batches were taken in."""
    with patch.object(Shipper, "note_ledger", note_without_number):
        yield


def note_without_number(self: Shipper, state: LedgerState, from_items: int) -> None:
    bare = state.copy()
    bare.taken, bare.marks = 0, {}
    self._owner.note_ledger(ShippedLedger.of(0, bare), from_items)


@planted("taken_forgotten_by_a_kill", worlds(1))
def taken_forgotten_by_a_kill() -> Iterator[None]:
    """That a batch was taken from the store is in memory only, and not in the record that it was ingested."""
    finish = IngestLedger.finish

    def forget(self: IngestLedger, batch: PublishedBatch, now_ms: int) -> None:
        finish(self, batch._replace(stored=0, app_id="", version=0), now_ms)
        self.state.taken = max(self.state.taken, batch.stored)

    with patch.object(IngestLedger, "finish", forget):
        yield


@planted("unfinished_not_fetched", half_a_batch)
def unfinished_not_fetched() -> Iterator[None]:
    """A new owner has the items of half a batch, and not the rest."""
    with (
        patch("kestrelpy.ship.fetching.fetch_unfinished", lambda *_: (_ for _ in ())),
        patch.object(StoreInbox, "fetch_unfinished", lambda *_: None),
    ):
        yield


@planted("restart_without_intents", slot_by_slot)
def restart_without_intents() -> Iterator[None]:
    """A restarted owner ships the ledger as it is at the end of its journal, and items of a batch before that."""

    def load(self: IngestLedger, data: bytes) -> None:
        self._base = self.state = decode_ledger(data)[0]
        self._copied.note_ledger(self.state, self._copied.items())

    with patch.object(IngestLedger, "_load", load):
        yield


@planted("known_batches_taken_again", worlds(1))
def known_batches_taken_again() -> Iterator[None]:
    with patch.object(LedgerState, "knows", lambda self, batch: batch.batch_id in self.finished):
        yield


@planted("jobs_not_remembered", scenario(test_store_inbox.test_a_job_is_remembered_without_an_app_id))
def jobs_not_remembered() -> Iterator[None]:
    """A batch without an app_id is forgotten as soon as it was taken in."""
    note_taken = LedgerState.note_taken

    def forget(self: LedgerState, number: int, mark: Any, *, remembers: bool) -> None:
        note_taken(self, number, mark, remembers=remembers and mark.refused)

    with patch.object(LedgerState, "note_taken", forget):
        yield


@planted("batch_skipped", scenario(test_store_inbox.test_a_batch_that_is_not_there_yet_is_waited_for))
def batch_skipped() -> Iterator[None]:
    """One that is not there yet is passed over when the one after it is."""
    look = StoreInbox.look

    def skip(self: StoreInbox, target: InboxHost) -> Steps[bool]:
        number = target.next_stored()
        if number:
            here = yield in_objects.read_of_batch(PREFIX, number)
            after = yield in_objects.read_of_batch(PREFIX, number + 1)
            if here is None and after is not None:
                target.pass_over(number, None)
        return (yield from look(self, target))

    with patch.object(StoreInbox, "look", skip):
        yield


@planted("parts_of_a_hole_collected", worlds(1))
def parts_of_a_hole_collected() -> Iterator[None]:
    """The parts of a batch that is collected go with it, though its publisher is about to publish them again."""
    with patch.object(garbage, "DAY_MS", 0):
        yield


@planted("damage_at_first_sight", worlds(1))
def damage_at_first_sight() -> Iterator[None]:
    """What was not read is taken for damaged."""

    def read_batch(prefix: str, number: int) -> Steps[PublishedBatch | None]:
        look = in_objects.read_of_batch(prefix, number)
        try:
            data = yield look
        except KestrelError:
            data = b""
        return None if data is None else in_objects.decode_batch(look.key, number, data)

    with patch.object(feed.fetching, "read_batch", read_batch), patch.object(feed, "MOST_LOOKS", 1):
        yield


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_is_found(name: str, tmp_path: Path, tally: Tally) -> None:
    plant, check = PLANTED[name]
    with plant(), pytest.raises((AssertionError, ValueError, KestrelError)) as found:
        check(tmp_path)
    print(found.value)
    tally.add("planted faults caught", 1)
