"""Standbys in worlds of owners, and the planted faults that these, or the tests of following, must find."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import QueueDiskFull
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy.ship import following, rejoining, standby_folder
from kestrelpy.ship.following import Follower
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.reading import PART_BYTES, ShippedQueue
from kestrelpy.ship.slots import SealedSegment
from kestrelpy.ship.standby import Standby, _Following
from kestrelpy.ship.standby_folder import ActivePart, StandbyFolder
from kestrelpy.testing import FailingDisk, MemoryDisk
from tests.ship import test_following, test_standby
from tests.ship.in_store import log_of
from tests.ship.restores import small_log
from tests.ship.standby_explorer import explore
from tests.support.budget import SEED, Tally, share

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_worlds(tally: Tally) -> None:
    worlds = max(60, share(1_050))
    counts = explore(SEED * 1_000_000, worlds)
    for what in ("takeovers", "looks", "kills", "power cuts", "items set aside", "followed to the end"):
        assert counts[what] > worlds // 3, counts
    for what in ("takeovers lost", "owners after all"):
        assert counts[what] > worlds // 50, counts
    tally.add("crashes of owners and of standbys", counts["kills"] + counts["power cuts"])
    tally.add("takeovers of a queue by a standby, in a simulated world", counts["takeovers"])


def test_a_takeover_needs_room_for_a_segment() -> None:
    """There is room for what is small, and not for a segment."""
    shipper, disk = small_log(), FailingDisk(MemoryDisk())
    with Standby("/elsewhere", "jobs", shipper.store, poll_interval=0.01, disk=disk) as here:
        test_standby.follows_to(here, shipper.state.slot)
        disk.arm(errno.ENOSPC, at=1, sticky=True, kinds={"grow"})
        with pytest.raises(QueueDiskFull):
            here.take_over(force=True).close()
        disk.disarm()
        assert len(log_of(shipper.store).fences) == 2
        with here.take_over(force=True):
            assert len(log_of(shipper.store).fences) == 3


# -- planted faults --------------------------------------------------------------------------------------------------

Plant = Callable[[], Iterator[None]]
PLANTED: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], Callable[[], object]]] = {}


def planted(find: Callable[[], object]) -> Callable[[Plant], None]:
    """``find``: the test that must fail."""

    def plant(fault: Plant) -> None:
        PLANTED[fault.__name__] = contextlib.contextmanager(fault), find

    return plant


def worlds() -> None:
    explore(SEED * 1_000_000, 2_000)


def cut_short() -> None:
    for name in test_following.LOGS:
        test_following.explore(name, 10_000)


@planted(worlds)
def orphan_merged() -> Iterator[None]:
    """The old owner ships what it has, although another one has the queue."""
    real = rejoining._first_unshipped

    def first_unshipped(*arguments: Any) -> tuple[int, int]:
        return real(*arguments)[0], standby_folder.fmt.LARGEST

    with patch.object(rejoining, "_first_unshipped", first_unshipped):
        yield


@planted(worlds)
def sign_stays_while_an_owner_puts() -> Iterator[None]:
    with patch.object(QueueFiles, "end_standby", lambda self, names: None):
        yield


@planted(test_following.test_who_has_slept_longer_than_the_history_begins_at_a_newer_manifest)
def hole_taken_for_the_end() -> Iterator[None]:
    with patch.object(Follower, "_is_end", lambda self: True):
        yield


@planted(test_following.test_the_manifests_are_listed_again_after_a_while)
def listed_once_for_ever() -> Iterator[None]:
    with patch.object(following, "LISTING_SECONDS", 1e9):
        yield


@planted(cut_short)
def checkpoint_before_its_items() -> Iterator[None]:
    real = StandbyFolder._complete, StandbyFolder._extend

    def early(method: Any) -> Any:
        def call(self: StandbyFolder, *arguments: Any) -> None:
            if isinstance(arguments[0], LogState):
                self._save_states(arguments[0])
            method(self, *arguments)

        return call

    with (
        patch.object(StandbyFolder, "_complete", early(real[0])),
        patch.object(StandbyFolder, "_extend", early(real[1])),
    ):
        yield


@planted(cut_short)
def torn_tail_believed() -> Iterator[None]:
    def part_here(self: StandbyFolder, file: Any, state: LogState) -> ActivePart:
        place = state.place
        if file.size() >= place.offset:
            return ActivePart(place.number, place.offset, place.segment_crc)
        file.truncate(0)
        return ActivePart(place.number, 0, 0)

    with patch.object(StandbyFolder, "_part_here", part_here):
        yield


@planted(worlds)
def bytes_beyond_the_log_stay() -> Iterator[None]:
    class Uncut:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def truncate(self, size: int) -> None:
            """Not at all."""

    real = StandbyFolder._part_here

    def part_here(self: StandbyFolder, file: Any, state: LogState) -> ActivePart:
        return real(self, Uncut(file), state)

    with patch.object(StandbyFolder, "_part_here", part_here):
        yield


@planted(cut_short)
def footer_before_the_rest() -> Iterator[None]:
    def fetch(self: StandbyFolder, file: Any, segment: SealedSegment, start: int, crc: int) -> None:
        at = start
        for part in self._shipped.segment_parts(segment, start, crc):
            file.write(at, part)
            at += len(part)
        file.sync()

    with patch.object(StandbyFolder, "_fetch", fetch):
        yield


@planted(cut_short)
def next_segment_before_the_last_one_is_whole() -> Iterator[None]:
    real = StandbyFolder._remove_old

    def remove_old(self: StandbyFolder, wanted: set[int]) -> None:
        real(self, wanted - {min(wanted, default=0)} if len(wanted) > 2 else wanted)

    with patch.object(StandbyFolder, "_remove_old", remove_old):
        yield


@planted(cut_short)
def names_not_synced() -> Iterator[None]:
    def settle(self: StandbyFolder, state: LogState) -> None:
        self.directory.unlink("jobs.restore")

    with patch.object(StandbyFolder, "_settle", settle), patch.object(StandbyFolder, "_sign", lambda *_: None):
        yield


@planted(lambda: test_following.test_a_damaged_segment_is_never_taken_for_whole("other bytes"))
def segment_completed_without_a_crc() -> Iterator[None]:
    def parts(self: ShippedQueue, segment: SealedSegment, start: int = 0, crc: int = 0) -> Iterator[bytes]:
        for at in range(start, segment.file_bytes, PART_BYTES):
            yield self.store.read(self.prefix + segment.key, at, PART_BYTES) or b""

    with patch.object(ShippedQueue, "segment_parts", parts):
        yield


@planted(test_following.test_a_store_that_was_put_back_takes_nothing_away)
def cut_back_for_a_store_that_was_put_back() -> Iterator[None]:
    real = StandbyFolder._ship_file

    def ship_file(self: StandbyFolder) -> Any:
        file = real(self)
        return None if file is None else file._replace(restored_slot=0)

    with patch.object(StandbyFolder, "_ship_file", ship_file):
        yield


@planted(test_a_takeover_needs_room_for_a_segment)
def fence_without_room() -> Iterator[None]:
    with patch.object(StandbyFolder, "hold_room", lambda self, size: None):
        yield


@planted(worlds)
def opened_without_a_last_look() -> Iterator[None]:
    """And what the old owner appends meanwhile is no reason to look again."""
    with patch.object(_Following, "has_grown", lambda self, slot: False):
        yield


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tally: Tally) -> None:
    plant, find = PLANTED[name]
    with plant(), pytest.raises((Exception, pytest.fail.Exception)) as raised:
        find()
    assert not isinstance(raised.value, AttributeError | NameError | TypeError), "the plant itself is wrong"
    tally.add("planted faults caught", 1)


def test_what_finds_them_finds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_following, "drawn", lambda cases, count: [])
    cut_short()
