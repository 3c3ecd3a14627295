"""``Standby``, with its thread, its lease and its takeovers."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import ForkedQueue, JournaledQueue, QueueClosed, QueueDiskFull, QueueLocked, scan
from kestrelpy.ship import (
    BadStoreURL,
    Fenced,
    HistoryMismatch,
    OwnerAlive,
    Ship,
    Standby,
    StandbyStatus,
    StoreUnavailable,
    opened,
    reading,
    restore,
)
from kestrelpy.ship import lease as leases
from kestrelpy.ship import slots as codec
from kestrelpy.testing import FailingDisk, MemoryDisk
from kestrelpy.testing.stores import MemoryStore, SimulatedStore
from kestrelpy.work import WorkQueue
from tests.ship.in_store import items_of, log_of
from tests.ship.restores import grown, queue_on, small_log
from tests.ship.shipped import QUEUE, Shipper
from tests.support.budget import share
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

HERE = "/elsewhere"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())


def standby(store: Any, disk: Any = None, **more: Any) -> Standby:
    return Standby(HERE, QUEUE, store, disk=disk or MemoryDisk(), **({"poll_interval": 0.01} | more))


def follows_to(here: Standby, slot: int) -> StandbyStatus:
    until(lambda: here.status().slot >= slot and here.status().state in ("following", "over"))
    with here._its.turn_now():  # the look that has found it is over: the lease was looked at, too
        return here.status()


class Hurried:
    """A clock for leases that a test turns on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        made = leases.LeaseWatch.__init__
        monkeypatch.setattr(
            leases.LeaseWatch, "__init__", lambda watch, _elapsed=None: made(watch, lambda: self.seconds)
        )


def leased_log(store: Any = None, *, lease_ms: int = 10_000) -> tuple[Shipper, JournaledQueue]:
    disk = MemoryDisk()
    queue = queue_on(disk)
    queue.put(b"1")
    shipper = Shipper(store if store is not None else MemoryStore(), disk)
    shipper.fence(lease_ms=lease_ms)
    shipper.ship()
    return shipper, queue


# -- following -------------------------------------------------------------------------------------------------------


def test_it_follows_an_owner(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with (
        JournaledQueue(tmp_path / "here", "jobs", segment_bytes=4096, ship=Ship(store, interval=0)) as queue,
        Standby(tmp_path / "there", "jobs", store, poll_interval=0.01) as here,
    ):
        assert queue.shipping is not None
        put = {}
        for number in range(30):
            put[queue.put(b"%d" % number * 100)] = b"%d" % number * 100
            if number % 10 == 9:
                status = follows_to(here, queue.shipping.flush(PATIENCE))
                assert (status.last_id, status.behind_seconds, status.lease_left) == (number + 1, 0.0, None)
                assert {each.id: each.data for each in scan(tmp_path / "there", "jobs")} == put
        assert str(os.getpid()) in here.status().owner
        with pytest.raises(QueueLocked):
            JournaledQueue(tmp_path / "there", "jobs", ship=store)
        with pytest.raises(QueueLocked):
            Standby(tmp_path / "there", "jobs", store)
        assert not here.wait(0)
        assert "following" in repr(here)


def test_a_scan_at_any_time_sees_a_beginning(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    there, seen, puts = tmp_path / "there", set[int](), max(60, share(300))
    put_ids: list[int] = []
    with (
        JournaledQueue(tmp_path / "here", "jobs", segment_bytes=4096, ship=Ship(store, interval=0)) as queue,
        Standby(there, "jobs", store, poll_interval=0.001) as here,
    ):
        assert queue.shipping is not None
        queue.put(b"first" * 100)
        follows_to(here, queue.shipping.flush(PATIENCE))

        def put() -> None:
            for number in range(20 * puts):  # more of them where scans are slow
                if number >= puts and len(seen) > 5:
                    return
                put_ids.append(queue.put(b"%d" % number * 200))
                if number % 3 == 0 and queue.shipping is not None:
                    queue.shipping.flush(PATIENCE)

        thread = threading.Thread(target=put)
        thread.start()
        while thread.is_alive():
            ids = [record.id for record in scan(there, "jobs")]
            assert ids == list(range(1, len(ids) + 1))
            seen.add(len(ids))
        thread.join()
        follows_to(here, queue.shipping.flush(PATIENCE))
        assert len(list(scan(there, "jobs"))) == 1 + len(put_ids)
    assert len(seen) > 5


def test_it_may_be_there_before_its_queue() -> None:
    store = SimulatedStore()
    with standby(store.client("me")) as here:
        until(lambda: here.status().state == "away")
        assert "NoSuchQueue" in here.status().last_error
        shipper = small_log(store.client("owner"))
        assert follows_to(here, shipper.state.slot).last_id == shipper.state.last_id


def test_a_store_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Hurried(monkeypatch), SimulatedStore()
    shipper, queue = leased_log(store.client("owner"))
    with standby(store.client("me")) as here:
        follows_to(here, shipper.state.slot)
        store.is_away = True
        until(lambda: here.status().state == "away")
        clock.seconds += 100
        assert not here.wait(0.1)  # a store that is away says nothing of an owner
        assert here.status().behind_seconds > 0
        with pytest.raises(StoreUnavailable):
            here.take_over(force=True)
        store.is_away = False
        queue.put(b"2")
        shipper.ship()
        assert follows_to(here, shipper.state.slot).state == "following"
    queue.close()


def test_a_full_disk_is_said_and_nothing_is_taken_over() -> None:
    shipper, disk = grown(3), FailingDisk(MemoryDisk())
    with standby(shipper.store, disk) as here:
        follows_to(here, shipper.state.slot)
        fences = len(log_of(shipper.store).fences)
        disk.arm(errno.ENOSPC, at=1, sticky=True)
        with pytest.raises(QueueDiskFull):
            here.take_over(force=True)
        assert here.status().state == "full"
        assert len(log_of(shipper.store).fences) == fences
        disk.disarm()
        until(lambda: here.status().state == "following")
        with here.take_over(force=True, segment_bytes=4096):
            assert len(log_of(shipper.store).fences) == fences + 1


def test_damage_is_said_until_it_is_gone() -> None:
    shipper = small_log(with_manifest=False)
    store, objects = MemoryStore(), shipper.store.contents()  # type: ignore[attr-defined]
    key = f"{QUEUE}/log/{6:016d}"
    store.replace_all({**objects, key: (b"damage", 0)})
    with standby(store) as here:
        until(lambda: here.status().state == "damaged")
        assert key in here.status().last_error
        with pytest.raises(Exception, match=key):
            here.take_over(force=True)
        store.replace_all(objects)
        follows_to(here, shipper.state.slot)


# -- the lease -------------------------------------------------------------------------------------------------------


def test_an_owner_with_a_lease_is_taken_over_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hurried(monkeypatch)
    shipper, queue = leased_log()
    with standby(shipper.store, owner="me") as here:
        assert follows_to(here, shipper.state.slot).lease_left == 10.0
        clock.seconds += 9
        assert not here.wait(0.05)
        with pytest.raises(OwnerAlive) as alive:
            here.take_over()
        assert (alive.value.owner, alive.value.seconds) == ("host:1", 1.0)
        queue.put(b"2")
        shipper.ship()
        assert follows_to(here, shipper.state.slot).lease_left == 10.0
        clock.seconds += 9
        assert not here.wait(0.05)
        clock.seconds += 1
        assert here.wait(PATIENCE)
        assert here.status().state == "over"
        with here.take_over(segment_bytes=4096) as taken:
            assert [taken.get().data for _ in range(2)] == [b"1", b"2"]
            assert here.status().state == "taken"
            with pytest.raises(QueueClosed):
                here.wait(0)
            with pytest.raises(QueueClosed):
                here.take_over()
            assert taken.shipping is not None
    assert len(log_of(shipper.store).fences) == 2
    queue.close()


def test_an_owner_that_comes_back_in_time_is_no_longer_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hurried(monkeypatch)
    shipper, queue = leased_log()
    with standby(shipper.store) as here:
        follows_to(here, shipper.state.slot)
        clock.seconds += 10
        assert here.wait(PATIENCE)
        queue.put(b"2")
        shipper.ship()
        follows_to(here, shipper.state.slot)
        assert not here.wait(0)
        with pytest.raises(OwnerAlive):
            here.take_over()
    queue.close()


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("begins", ["before", "after", "at a manifest"])
def test_a_plain_close_is_no_hand_over(begins: str, monkeypatch: pytest.MonkeyPatch, *, handed_over: bool) -> None:
    clock = Hurried(monkeypatch)
    shipper, queue = leased_log()
    queue.close()

    def close() -> None:
        shipper.append(codec.CLOSE, note=codec.close_note(handed_over=handed_over))
        if begins == "at a manifest":
            shipper.manifest()

    if begins != "before":
        close()
    with standby(shipper.store) as here:
        follows_to(here, shipper.state.slot)
        if begins == "before":
            close()
            follows_to(here, shipper.state.slot)
        if not handed_over:
            assert not here.wait(0.1)
            clock.seconds += 10
        assert here.wait(PATIENCE)
        here.take_over().close()


# -- takeovers -------------------------------------------------------------------------------------------------------


def test_an_owner_without_a_lease_is_taken_over_by_force_alone() -> None:
    shipper = small_log()
    with standby(shipper.store) as here:
        follows_to(here, shipper.state.slot)
        with pytest.raises(OwnerAlive):
            here.take_over()
        here.take_over(force=True).close()


def test_one_of_two_standbys_gets_it_and_the_other_follows_on() -> None:
    shipper = small_log()
    with standby(shipper.store) as one, standby(shipper.store) as other:
        follows_to(one, shipper.state.slot)
        follows_to(other, shipper.state.slot)
        made = other._its.make_ready

        def meanwhile(size: int, *, force: bool) -> int:
            epoch = made(size, force=force)
            with one.take_over(force=True) as taken:
                taken.put(b"new")
                assert taken.shipping is not None
                taken.shipping.flush(PATIENCE)
            other._its.make_ready = made  # type: ignore[method-assign]
            return epoch

        other._its.make_ready = meanwhile  # type: ignore[method-assign]
        before = dict(items_of(shipper.store))
        with pytest.raises(Fenced):
            other.take_over(force=True)
        slot = log_of(shipper.store).slot
        assert items_of(shipper.store).items() > before.items()
        follows_to(other, slot)
        with other.take_over(force=True) as taken:
            assert taken.put(b"newer") > max(items_of(shipper.store)) + (1 << 29)


def test_what_the_old_owner_appends_meanwhile_is_applied(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "here", "jobs", ship=Ship(store, interval=0)) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        with Standby(tmp_path / "there", "jobs", store, poll_interval=0.01) as here:
            made, left = here._its.make_ready, [b"2", b"3", b"4"]

            def meanwhile(size: int, *, force: bool) -> int:
                epoch = made(size, force=force)
                if left:
                    queue.put(left.pop(0))
                    assert queue.shipping is not None
                    queue.shipping.flush(PATIENCE)
                return epoch

            here._its.make_ready = meanwhile  # type: ignore[method-assign]
            with here.take_over(force=True) as taken:
                assert [taken.get().data for _ in range(4)] == [b"1", b"2", b"3", b"4"]
        queue.put(b"5")
        with pytest.raises(Fenced):
            queue.shipping.flush(PATIENCE)
        with pytest.raises(Fenced):
            queue.get(timeout=PATIENCE)


def test_a_work_queue_is_taken_over_as_one(tmp_path: Path) -> None:
    store = MemoryStore()
    with WorkQueue(tmp_path / "here", "work", ship=Ship(store, interval=0)) as work:
        work.put(b"job")
    with Standby(tmp_path / "there", "work", store, poll_interval=0.01) as here:
        until(lambda: here.status().slot == log_of(store, "work").slot)
        with here.take_over(force=True, max_jobs=10) as taken:
            assert isinstance(taken, WorkQueue)
            with taken.session() as session:
                job = session.reserve(timeout=0)
                assert job is not None
                assert job.body == b"job"


def test_options_of_the_queue_and_of_its_shipping() -> None:
    shipper = small_log()
    with standby(shipper.store) as here:
        with pytest.raises(ValueError, match="another store"):
            here.take_over(force=True, ship=Ship("file:///another"))
        with pytest.raises(TypeError):
            here.take_over(force=True, ship=False)
        with pytest.raises(TypeError):
            here.take_over(force=True, no_such_option=1)
        with pytest.raises(TypeError, match="segment_bytes"):
            here.take_over(force=True, segment_bytes="x")
        with pytest.raises(ValueError, match="segment_bytes must"):
            here.take_over(force=True, segment_bytes=-1)
        assert here.status().state == "following"
        with here.take_over(force=True, ship=Ship(shipper.store, acks="shipped", interval=0)) as taken:
            item_id = taken.put(b"there")
            assert items_of(shipper.store)[item_id] == b"there"


def test_a_takeover_that_fails_is_followed_by_following(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimulatedStore()
    shipper = small_log(store.client("owner"))
    with standby(store.client("me")) as here:
        follows_to(here, shipper.state.slot)

        def refuse(*_: object, **__: object) -> Any:
            raise StoreUnavailable("the store", "key", "no answer in time")

        with monkeypatch.context() as patch:
            patch.setattr(opened, "open_log_of", refuse)
            with pytest.raises(StoreUnavailable):
                here.take_over(force=True)
        shipper.append(2)
        follows_to(here, shipper.state.slot)
        with here.take_over(force=True) as taken:
            assert {each.id for each in scan(HERE, QUEUE, disk=here._disk)} <= shipper.items.keys()
            assert taken.put(b"new") > 1 << 30


def test_a_fence_of_ours_that_was_in_doubt_needs_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    Hurried(monkeypatch)
    store = MemoryStore()
    shipper, queue = leased_log(store)
    queue.close()
    with standby(store) as here:
        follows_to(here, shipper.state.slot)

        def give_up(*arguments: Any, **more: Any) -> Any:
            state = made(*arguments, **more)

            def steps() -> Any:
                yield from state
                raise StoreUnavailable("the store", "key", "the answer was lost")

            return steps()

        with monkeypatch.context() as patch:
            made = opened.open_log
            patch.setattr(opened, "open_log", give_up)
            with pytest.raises(StoreUnavailable):
                here.take_over(force=True)
        assert len(log_of(store).fences) == 2
        until(lambda: here.status().slot == log_of(store).slot)
        with here.take_over():
            assert len(log_of(store).fences) == 3


def test_somebody_else_here_was_quicker() -> None:
    shipper, disk = small_log(), MemoryDisk()
    with standby(shipper.store, disk) as here:
        follows_to(here, shipper.state.slot)
        unlock = here._its.folder.unlock
        others: list[JournaledQueue] = []

        def quicker() -> None:
            unlock()
            here._its.folder.unlock = unlock  # type: ignore[method-assign]
            others.append(JournaledQueue(HERE, QUEUE, disk=disk, ship=Ship(shipper.store)))

        here._its.folder.unlock = quicker  # type: ignore[method-assign]
        with pytest.raises(QueueLocked):
            here.take_over(force=True)
        assert here.status().state == "closed"
        with pytest.raises(QueueClosed, match="somebody else"):
            here.wait(0)
        others[0].close()


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_standby_ends() -> None:
    shipper = small_log()
    here = standby(shipper.store)
    until(lambda: here.status().state == "following")
    waiting: list[object] = []

    def wait() -> None:
        try:
            waiting.append(here.wait())
        except QueueClosed as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    here.close()
    here.close()
    thread.join(PATIENCE)
    assert isinstance(waiting[0], QueueClosed)
    assert here.status().state == "closed"
    assert not here._its.thread.is_alive()


def test_who_does_not_close_a_standby_is_warned() -> None:
    shipper, disk = small_log(), MemoryDisk()
    here = standby(shipper.store, disk)
    thread = here._its.thread
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del here
        gc.collect()
    assert any("unclosed Standby of queue 'jobs' in " in str(each.message) for each in seen)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadStoreURL):
        Standby(tmp_path, "jobs", "nowhere")
    with pytest.raises(ValueError, match="poll_interval"):
        Standby(tmp_path, "jobs", MemoryStore(), poll_interval=0)
    with JournaledQueue(tmp_path / "queues", "jobs", ship=f"file://{tmp_path}/one") as queue:
        queue.put(b"1")
    with pytest.raises(HistoryMismatch, match="shipped to"):
        Standby(tmp_path / "queues", "jobs", f"file://{tmp_path}/other")


def in_a_child(call: Callable[[], object]) -> str:
    """What ``call`` raises in a forked child, by name."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        name = "nothing"
        try:
            call()
        except BaseException as error:
            name = type(error).__name__
        os.write(writing, name.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        name = pipe.read().decode()
    os.waitpid(child, 0)
    return name


def test_a_forked_child_has_no_standby(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with JournaledQueue(tmp_path / "here", "jobs", ship=store) as queue:
        queue.put(b"1")
    with Standby(tmp_path / "there", "jobs", store, poll_interval=0.01) as here:
        until(lambda: here.status().state == "following")
        assert in_a_child(lambda: here.wait(0)) == ForkedQueue.__name__
        assert in_a_child(lambda: here.take_over(force=True)) == ForkedQueue.__name__
        assert in_a_child(here.close) == "nothing"
        with here.take_over(force=True) as taken:
            assert taken.get().data == b"1"


def test_the_interpreter_ends_with_a_standby(tmp_path: Path) -> None:
    program = f"""
from kestrelpy import JournaledQueue
from kestrelpy.ship import Standby
with JournaledQueue({str(tmp_path / "here")!r}, "jobs", ship="file://{tmp_path}/store") as queue:
    queue.put(b"1")
standby = Standby({str(tmp_path / "there")!r}, "jobs", "file://{tmp_path}/store")
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT
    )
    assert done.returncode == 0
    assert f"unclosed Standby of queue 'jobs' in {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_uses_no_standby_pays_for_none() -> None:
    program = (
        "import sys, kestrelpy.ship; assert not {'kestrelpy.work', 'kestrelpy.ship.standby'} & set(sys.modules); "
        "from kestrelpy.ship import Standby; assert 'Standby' in dir(kestrelpy.ship); assert Standby.__name__"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_copy_may_become_a_standby(tmp_path: Path) -> None:
    """A restored folder, also one of an earlier moment, is followed on from there."""
    shipper = small_log()
    restore(shipper.store, QUEUE, tmp_path, at_slot=5)
    with Standby(tmp_path, QUEUE, shipper.store, poll_interval=0.01) as here:
        follows_to(here, shipper.state.slot)
        with here.take_over(force=True):
            assert [each.id for each in scan(tmp_path, QUEUE)][-1] == shipper.state.last_id


def test_who_has_handed_a_queue_over_leaves_it_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Hurried(monkeypatch), MemoryStore()
    with JournaledQueue(tmp_path, QUEUE, ship=Ship(store)) as queue:
        queue.put(b"x")
        assert queue.shipping is not None
        queue.shipping.hand_over()
    with Standby(tmp_path, QUEUE, store, poll_interval=0.01) as mine, standby(store) as other:
        assert other.wait(PATIENCE)
        follows_to(mine, other.status().slot)
        assert not mine.wait(0.1)
        clock.seconds += 11
        assert mine.wait(PATIENCE)
