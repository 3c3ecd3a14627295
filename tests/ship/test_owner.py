"""Owners on simulated disks and a simulated store: nothing is lost, and each planted fault is found in some world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy._journal.format import LARGEST, Checkpoint
from kestrelpy._journal.segment import Segment
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._writing.export import Export
from kestrelpy.ship import history, owner
from kestrelpy.ship.history import History
from kestrelpy.ship.lease import OwnLease
from kestrelpy.ship.opened import LogOpening
from kestrelpy.ship.owner import LogOwner, Upload, Uploaded
from kestrelpy.ship.ship_file import ShipFile
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.store import Store
from tests.ship import owner_explorer
from tests.ship.owner_explorer import EagerReaders, LeasedOwners, World, explore
from tests.support.budget import SEED, Tally, share, takes_long

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_worlds_of_eager_readers(tally: Tally) -> None:
    counts = explore(SEED * 1_000_000, share(200), make=EagerReaders)
    tally.add("crashes of owners that ship", counts["kills"] + counts["power cuts"])


@takes_long
def test_worlds_of_leased_owners(tally: Tally) -> None:
    worlds = share(1_000)
    counts = explore(SEED * 1_000_000, worlds, make=LeasedOwners)
    for what in ("restores", "puts refused", "owners alive", "puts"):
        assert counts[what] > worlds // 50, counts
    tally.add("crashes of owners that ship", counts["kills"] + counts["power cuts"])


def test_worlds(tally: Tally) -> None:
    worlds = share(2_500)
    counts = explore(SEED * 1_000_000, worlds)
    for what in ("openings", "kills", "power cuts", "closes", "restores", "puts"):
        assert counts[what] > worlds // 2, counts
    for what in ("copies refused", "openings refused", "strangers refused"):
        assert counts[what] > worlds // 200, counts
    tally.add("crashes of owners that ship", counts["kills"] + counts["power cuts"])
    tally.add("requests of owners to a simulated store", counts["requests"])


# -- planted faults --------------------------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {}
real_identify = LogOpening._identify
real_covered, real_note, real_seal = LogOwner._covered, Shipper._note, LogOwner._seal


def planted(plant: Callable[[], Iterator[None]]) -> None:
    PLANTED[plant.__name__] = contextlib.contextmanager(plant)


@planted
def ship_before_sync() -> Iterator[None]:
    with patch.object(Export, "make_durable", lambda self, last_id: None):
        yield


@planted
def ids_without_gap() -> Iterator[None]:
    with patch.object(history, "ID_JUMP", 1), patch.object(history, "ID_STEP", 1):
        yield


@planted
def seal_before_upload() -> Iterator[None]:
    def carry(upload: Upload, store: Store) -> Uploaded:
        data = upload.load()
        return Uploaded(len(data), owner.crc32(data), data[:96], data[-96:], owner.crc32(data[: upload.records_end]))

    with patch.object(owner_explorer, "carry_upload", carry):
        yield


@planted
def seal_out_of_order() -> Iterator[None]:
    def seal(self: LogOwner, waiting: list[Segment], now: float) -> Any:
        return real_seal(self, waiting[::-1], now)

    with patch.object(LogOwner, "_seal", seal):
        yield


@planted
def retire_before_seal() -> Iterator[None]:
    with patch.object(Shipper, "_retire_limit", lambda self: lambda: LARGEST):
        yield


@planted
def checkpoint_ahead_of_data() -> Iterator[None]:
    def covered(self: LogOwner, state: Checkpoint, last_id: int) -> Checkpoint | None:
        found = real_covered(self, state, LARGEST)
        return None if found is None else found._replace(head=min(found.head, last_id), done=())

    def overstated(self: LogOwner, state: Checkpoint, last_id: int) -> Checkpoint | None:
        found = covered(self, state, last_id)
        return None if found is None else found._replace(head=last_id)

    with patch.object(LogOwner, "_covered", overstated):
        yield


@planted
def restart_without_fence() -> Iterator[None]:
    def open_log(prefix: str, opening: Any, judge: Any, state: Any) -> Any:
        judge(state)
        return state
        yield

    with patch("kestrelpy.ship.opened.open_log", open_log):
        yield


@planted
def history_not_compared() -> Iterator[None]:
    with patch.object(History, "_compare", lambda self, state: False):
        yield


@planted
def foreign_queue_accepted() -> Iterator[None]:
    def identify(self: LogOpening) -> ShipFile:
        there = self._shipped.identity()
        return real_identify(self) if there is None else ShipFile("a store", there.queue_id)

    with patch.object(LogOpening, "_identify", identify), patch.object(History, "_compare", lambda self, state: False):
        yield


@planted
def ack_before_slot() -> Iterator[None]:
    def note(self: Shipper) -> None:
        real_note(self)
        export = self._export()
        assert export is not None
        export._syncer.acks.note_later(export.last_id)

    with patch.object(Shipper, "_note", note):
        yield


@planted
def shown_before_slot() -> Iterator[None]:
    real = LocalSource.show_durable_locked

    def show(self: LocalSource, durable_id: int, total_bytes: int) -> bool:
        self.shown_limit = None
        return real(self, durable_id, total_bytes)

    with patch.object(LocalSource, "show_durable_locked", show):
        yield


@planted
def id_of_a_new_queue_only_in_the_store() -> Iterator[None]:
    with patch("kestrelpy.ship.opened.write_ship_file", lambda *arguments: None):
        yield


@planted
def fence_of_another_taken_for_ours() -> Iterator[None]:
    with patch.object(History, "is_ours", lambda self, state: True):
        yield


@planted
def lease_from_answer() -> Iterator[None]:
    def renew(self: OwnLease) -> None:
        self._renewed = self._elapsed()

    with patch.object(OwnLease, "renew", renew):
        yield


@planted
def lease_not_asked() -> Iterator[None]:
    with patch.object(OwnLease, "left", 1.0):
        yield


@planted
def lease_of_another_not_asked() -> Iterator[None]:
    with patch.object(LogOpening, "_may_be_alive", lambda self, state: False):
        yield


IN_THEIR_WORLDS: dict[str, type[World]] = {
    "retire_before_seal": EagerReaders,
    "lease_from_answer": LeasedOwners,
    "lease_not_asked": LeasedOwners,
    "lease_of_another_not_asked": LeasedOwners,
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tally: Tally) -> None:
    with PLANTED[name](), pytest.raises(Exception) as raised:  # noqa: PT011 - a fault may end in any error
        explore(SEED * 1_000_000, 2_000, make=IN_THEIR_WORLDS.get(name, World))
    assert not isinstance(raised.value, AttributeError | NameError | TypeError), "the plant itself is wrong"
    tally.add("planted faults caught", 1)
