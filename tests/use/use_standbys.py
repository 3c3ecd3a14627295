"""Standbys of the shipped queues of a world: each on a machine of its own, which nothing happens to but what its store
does. What a standby has, when it may take a queue over, and what comes back afterwards.

Rules:
1. A standby looks when a step says so, and in its own calls. Its lease is measured by the clock of shipping.
2. It may see another store than everybody else does: a folder that is not mounted, or not mounted any more
   (``View``). That never leads to a takeover.
3. When a queue may be taken over is told from the store itself: the last slot, and when it was created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy import JournaledQueue, QueueEmpty, QueueLocked, RestoreIncomplete, open_reader, scan, verify
from kestrelpy._disk.memory import MemoryDisk
from kestrelpy._process import forget
from kestrelpy.ship import Fenced, HistoryMismatch, NoSuchQueue, Standby, StoreDamaged, StoreUnavailable, orphans
from kestrelpy.ship.log import carry_out, read_slot
from kestrelpy.ship.store import Listing
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import MemoryStore
from tests.ship.in_store import no_pause
from tests.use.use_courier import ShipClock
from tests.use.use_model import STORED, QueueModel

if TYPE_CHECKING:
    from tests.use.use_ships import Log
    from tests.use.use_stores import WorldStore
    from tests.use.use_world import World

FOLDER = "/queues"
OTHERS = b"of another owner"
MOST_LOOKS = 60


class View:
    """A store as one machine sees it. ``is_gone``: there is another folder in its place, with nothing in it."""

    def __init__(self, store: WorldStore) -> None:
        self._store = store
        self._empty = MemoryStore()
        self.is_gone = False

    @property
    def _seen(self) -> Any:
        return self._empty if self.is_gone else self._store

    def describe(self) -> str:
        return self._store.describe()

    def create(self, key: str, data: bytes) -> bool:
        created: bool = self._seen.create(key, data)
        return created

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        data: bytes | None = self._seen.read(key, start, length)
        return data

    def list(self, prefix: str) -> Listing:
        listing: Listing = self._seen.list(prefix)
        return listing

    def delete(self, keys: Iterable[str]) -> None:
        self._seen.delete(keys)


class Machine:
    """The machine of a standby. It keeps its disk when the standby is closed or killed."""

    def __init__(self, world: World, log: Log) -> None:
        self.world = world
        self._store, self._name = log.store, log.name
        self.view = View(log.store)
        self.disk = MemoryDisk()
        self.standby: Standby | None = None
        self.could_take = False
        """Whether the queue could be taken over without force when that was last tried."""

    @property
    def log(self) -> Log:
        """The log that it follows, as it is known now."""
        return self.world.ships.logs[self._store.number, self._name]

    @property
    def following(self) -> Any:
        assert self.standby is not None
        return self.standby._its

    def begin(self) -> None:
        name, view, disk = self.log.name, self.view, self.disk

        def begin() -> Standby:
            return Standby(FOLDER, name, view, disk=disk)

        begin.__doc__ = Standby.__doc__
        result = self.world.call(self.world.processes[0], begin)
        self.world.require(result.ok, f"a standby does not begin: {result.error!r}")
        self.standby = result.value

    def close(self, *, kill: bool = False) -> None:
        standby, self.standby = self.standby, None
        if standby is None:
            return
        if kill:
            self.disk.kill()
            forget(standby)
            standby._abandon()
            return
        with self.world.ships.asking():
            standby.close()

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """One look. Returns whether there may be more."""
        w, following, log = self.world, self.following, self.log
        failures, nested, slot = w.ships.failures(), w.nested, log.state.slot
        with w.ships.asking(), following.turn:
            try:
                more: bool = following._look(surely=w.rng.random() < 0.3)
            except Exception as error:
                following._note_error(error)
                quiet = failures == w.ships.failures() and nested == w.nested and slot == log.state.slot
                self._judge(error, quiet=quiet)
                more = False
        if self.view.is_gone:
            w.require(not following.follower.is_over, f"{self.standby!r} sees another store, and would take over")
        if not more and following._trouble == "" and following.follower.is_at_end and not self.view.is_gone:
            self.check()
        return more

    def _judge(self, error: Exception, *, quiet: bool) -> None:
        w = self.world
        if isinstance(error, StoreUnavailable):
            w.require(not quiet, f"{error!r} of a standby, and nothing is wrong with the store")
        elif isinstance(error, NoSuchQueue | HistoryMismatch):
            w.require(self.view.is_gone or not quiet, f"{error!r} of a standby, and the log is there")
            w.saw("a standby sees another store")
        elif isinstance(error, StoreDamaged):
            w.require(self.view.is_gone or not quiet, f"{error!r} of a standby, and nothing was deleted meanwhile")
        else:
            raise w.fail(f"a standby has died of {error!r}") from error

    def check(self) -> None:
        """What is on its disk at the end of the log."""
        w, log = self.world, self.log
        assert self.standby is not None
        status = self.standby.status()
        if status.slot != log.state.slot:
            return  # somebody has gone on since
        w.saw("a standby is at the end of its log")
        check_items(w, log, self.disk)
        if not isinstance(log.life, QueueModel):
            return
        for open_it in (
            lambda: JournaledQueue(FOLDER, log.name, disk=self.disk, clock=ManualClock(w.now_ms), inbox_interval=None),
            lambda: open_reader(FOLDER, log.name, "x", create=True, disk=self.disk),
        ):
            with expected(w, "the folder of a standby is opened", QueueLocked):
                open_it().close()

    def may_take(self) -> bool:
        """Whether the queue may be taken over without force."""
        header = self.log.state.header
        assert header is not None
        slot = carry_out(read_slot(f"{self.log.name}/", header.slot), self.log.store.inner, no_pause)
        if slot is not None and slot.handed_over:
            return True
        since = ShipClock.seconds - self.log.store.slot_at.get(self.log.name, 0.0)
        return header.lease_ms > 0 and since >= header.lease_ms / 1000

    # -- taking over -------------------------------------------------------------------------------------------------

    def take_over(self, options: Any, *, force: bool) -> JournaledQueue | None:
        """The queue, if it is taken over. ``options``: its ``Ship``."""
        w, log, standby = self.world, self.log, self.standby
        assert standby is not None
        failures, nested, slot = w.ships.failures(), w.nested, log.state.slot
        self.could_take = self.may_take()
        w.ships.courier.meanwhile = w.ships.idle_turn
        try:
            with w.ships.asking():
                result = w.call(
                    w.processes[0],
                    standby.take_over,
                    force=force,
                    ship=options,
                    clock=ManualClock(w.now_ms),
                    inbox_interval=None,
                    segment_bytes=16384,
                )
        finally:
            w.ships.courier.meanwhile = bool
        quiet = failures == w.ships.failures() and nested == w.nested and slot == log.state.slot
        if result.ok:
            self.standby = None
            queue: JournaledQueue = result.value
            if self.view.is_gone:
                forget(queue)
                queue._abandon()
                raise w.fail("a standby that sees another store has taken the queue over")
            return queue
        if not self.view.is_gone and quiet:
            w.require(not force or isinstance(result.error, HistoryMismatch), f"{result.error!r}, and it is forced")
            w.require(not isinstance(result.error, Fenced | StoreUnavailable | StoreDamaged), f"{result.error!r}")
        if standby.status().state == "closed":
            self.standby = None
        return None


@contextlib.contextmanager
def expected(w: World, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """What is done here must raise one of these."""
    try:
        yield
    except kinds:
        return
    raise w.fail(what)


def copy_of(disk: MemoryDisk) -> MemoryDisk:
    """The same files on a disk of their own, of which nobody has anything open."""
    copy = MemoryDisk()
    for path, folder in sorted(disk.folders.items()):
        target = copy.directory(path, create=True)
        for name, node in folder.names.items():
            file = target.create(name)
            file.write(0, node.read(0, node.size))
            file.close()
        target.close()
    return copy


# -- what must be there ----------------------------------------------------------------------------------------------


def check_items(w: World, log: Log, disk: MemoryDisk) -> dict[int, bytes]:
    """The items in a folder that is at the end of a log are those that the owner has put, without a hole."""
    model, last_id = log.life, log.state.place.last_id
    if not isinstance(model, QueueModel):
        w.require(verify(FOLDER, log.name, disk=disk).ok, f"the copy of work queue {log.name} is damaged")
        return {}
    if model.damaged:  # that was shipped as it is
        return {}
    there = {record.id: record.data for record in scan(FOLDER, log.name, disk=disk)}
    report = verify(FOLDER, log.name, disk=disk)
    w.require(report.ok, f"the copy of queue {log.name} is damaged: {report.damage}")
    w.require(max(there, default=0) <= last_id, f"items after {last_id} are there: {sorted(there)[-3:]}")
    for item_id, data in there.items():
        put = model.find(data) if data != OTHERS else None
        w.require(put is None or put.id in (0, item_id), f"{put} is there as item {item_id}")
    first_id = min(there, default=last_id + 1)
    lost = [put.id for put in model.stored if first_id <= put.id <= log.last_id and put.id not in there]
    w.require(not lost, f"items {lost[:5]} are not there, and later ones are")
    return there


def check_readers(w: World, log: Log, queue: JournaledQueue, get: Callable[[Any], list[Any]] | None = None) -> None:
    """Each reader that the log knows goes on: in order, and with all that it has not done. ``get``: how it gets."""
    model, last_id = log.life, log.last_id
    assert isinstance(model, QueueModel)
    ever = w.ships.ever_done.get(model.name, {})
    for name in sorted(log.state.checkpoints, reverse=True):
        reader = model.readers.get(name)
        if reader is None:
            continue
        got: list[int] = []
        handle = queue.reader(name)
        while True:
            try:
                items = get(handle) if get is not None else handle.get_many(100, timeout=0)
            except QueueEmpty:
                break
            got += [item.id for item in items]
        w.require(got == sorted(set(got)), f"a reader gets {got} elsewhere")
        sure = [put for put in reader.surely_left(w.now_ms) if put.id <= last_id]
        passed = [put.id for put in sure if put.id not in got and put.id not in ever.get(name, ())]
        w.require(not passed, f"{reader.full_name} goes on elsewhere, and has passed {passed[:5]}")


def check_orphans(w: World, log: Log, disk: MemoryDisk) -> set[int]:
    """After ``rejoin``: all that was put here and is not in the log is set aside, and nothing else. Returns its ids."""
    model = log.life
    assert isinstance(model, QueueModel)
    aside: dict[int, bytes] = {}
    for orphan in orphans(FOLDER, log.name, disk=disk):
        found = {each.id: each.data for each in scan(orphan.path, log.name, start_id=orphan.first_id, disk=disk)}
        said = (orphan.first_id, orphan.last_id, orphan.items, orphan.bytes)
        due = (min(found, default=0), max(found, default=0), len(found), sum(map(len, found.values())))
        w.require(said[1:] == due[1:] and said[0] <= due[0], f"{orphan} is said to have {said}, and has {due}")
        aside |= found
    for item_id, data in aside.items():
        w.require(model.find(data).id in (0, item_id), f"{model.find(data)} is set aside as item {item_id}")
    merged = [item_id for item_id in aside if item_id <= log.last_id]
    w.require(not merged, f"items {merged[:5]} are set aside, and are in the log")
    sure = [put.id for put in model.stored if put.id > log.last_id and put.state == STORED]
    lost = [item_id for item_id in sure if item_id not in aside]
    w.require(not lost or model.flying, f"items {lost[:5]} are in no log, and are not set aside")
    with expected(w, "an old owner's folder is opened before it follows", RestoreIncomplete):
        clock = ManualClock(w.now_ms)
        JournaledQueue(FOLDER, log.name, disk=disk, clock=clock, inbox_interval=None, ship=False).close()
    with expected(w, "a reader of an old owner's folder is opened", RestoreIncomplete, QueueLocked):
        open_reader(FOLDER, log.name, "x", create=True, disk=disk).close()
    if aside:
        w.saw("what was not shipped is set aside")
    return set(aside)
