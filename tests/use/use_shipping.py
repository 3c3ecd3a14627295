"""Operations on the shipping of queues: it goes on, its stores fail, another owner comes, a copy is restored."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

from kestrelpy import CorruptJournal, JournaledQueue, KestrelError, QueueClosed, RestoreIncomplete, open_reader, scan
from kestrelpy._disk.memory import MemoryDisk
from kestrelpy.ship import NotShipped, OwnerAlive, Ship, ShipError, StoreUnavailable, rejoin, restore
from kestrelpy.ship.history import ID_JUMP
from kestrelpy.ship.log import Opening, carry_out, open_log
from kestrelpy.testing import ManualClock
from tests.ship.in_store import no_pause
from tests.use.use_courier import ASLEEP, ShipClock
from tests.use.use_model import QueueModel
from tests.use.use_opening import FOLDER, end_queue
from tests.use.use_operations import check_error, operation
from tests.use.use_ships import ANOTHERS, OURS, Log
from tests.use.use_standbys import (
    MOST_LOOKS,
    OTHERS,
    Machine,
    check_items,
    check_orphans,
    check_readers,
    copy_of,
    expected,
)
from tests.use.use_stores import AWAY, FLAKY, RAISES, READ_ONLY, STUCK, WELL

if TYPE_CHECKING:
    from tests.use.use_world import Opened, Process, World

LONG = 30.0
"""Seconds of the clock of shipping: enough for anything, if a store answers."""


def choose_shipped(w: World, rng: random.Random, process: Process) -> Opened | None:
    shipped = [opened for opened in process.queues.values() if w.ships.log_of(opened) is not None]
    return rng.choice(shipped) if shipped else None


def is_quiet(w: World, opened: Opened) -> bool:
    """Whether nothing is wrong that could keep items from the store."""
    thread: Any = opened.queue._shipment._shipper._thread  # type: ignore[union-attr]
    log = w.ships.log_of(opened)
    calm = not (w.trouble.times or w.trouble.fired or w.trouble.blocks is not None or w.depth or w.ships.raised)
    owned = log is not None and log.owner == OURS and log.store.mode == WELL
    return calm and owned and not thread.is_running and not opened.model.failed and not opened.model.damaged


@operation("ship_run", 6)
def go_on(w: World, rng: random.Random, process: Process) -> None:
    """The threads of shipping of a process go on for a while; one that sleeps may wake up."""
    threads = w.ships.threads_of(process)
    count = rng.choice((1, 2, 5, 50))
    for thread in threads:
        w.did = True
        if thread.state == ASLEEP and not w.depth and rng.random() < 0.5:
            w.ships.courier.advance(min(1.0, thread.until - ShipClock.seconds))
        w.ships.courier.turn(thread, count)


@operation("ship_flush", 2)
def flush(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_shipped(w, rng, process)
    if opened is None or opened.is_ending:
        return
    shipping, model = opened.queue.shipping, opened.model
    log = w.ships.log_of(opened)
    assert shipping is not None
    assert log is not None
    quiet, nested = is_quiet(w, opened), w.nested
    timeout = rng.choice((0, 0.2, LONG, None) if quiet else (0, 0.2, 3.0))
    due = max((put.id for put in model.stored if put not in model.flying), default=0)
    result = w.call(process, shipping.flush, timeout)
    if result.ok and not model.damaged and not model.erased:
        w.require(log.last_id >= due, f"flush() has returned, and the log ends with {log.last_id}, not {due}")
        w.saw("a flush")
    elif isinstance(result.error, NotShipped) and timeout in (0, 0.2):
        w.require(result.error.first_id <= result.error.last_id, f"{result.error!r} of a flush")
    elif quiet and nested == w.nested:
        w.require(not isinstance(result.error, NotShipped), f"{result.error!r} in {timeout} s, and all is well")
    if not isinstance(result.error, NotShipped):
        check_error(w, model, result, process)


@operation("ship_collect", 0.6)
def collect(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_shipped(w, rng, process)
    if opened is None or opened.is_ending:
        return
    shipping, quiet, nested = opened.queue.shipping, is_quiet(w, opened), w.nested
    assert shipping is not None
    failures = w.ships.failures()
    result = w.call(process, shipping.collect, rng.choice((0, 1.0, LONG)) if not quiet else rng.choice((LONG, None)))
    if result.ok:
        w.saw("garbage is collected")
    elif isinstance(result.error, StoreUnavailable):
        w.require(w.ships.failures() != failures, f"{result.error!r}, and the store answers")
    elif isinstance(result.error, TimeoutError) and not isinstance(result.error, KestrelError):
        w.require(not quiet or nested != w.nested, f"{result.error!r}, and the store answers")
    else:
        check_error(w, opened.model, result, process)


@operation("ship_status", 0.7)
def status(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_shipped(w, rng, process)
    if opened is not None and opened.queue.shipping is not None:
        shipping = opened.queue.shipping
        said = w.call(process, shipping.status).value
        repr(shipping)
        log = w.ships.log_of(opened)
        if said is not None and log is not None and not opened.model.damaged and log.owner == OURS:
            w.require(said.shipped_id <= log.last_id, f"by {said} more is in the log than there is: {log.last_id}")
    if not w.ships.closed:
        return
    shipping = rng.choice(w.ships.closed)
    call = rng.choice((shipping.flush, shipping.collect, shipping.hand_over, shipping.status))
    result = w.call(process, call)
    if call == shipping.status:
        w.require(result.value.state in ("closed", "fenced", "failed"), f"after close: {result.value}")
    else:
        over = isinstance(result.error, QueueClosed | ShipError | OSError)
        w.require(over, f"after close, {call.__name__} has returned {result.value!r}, {result.error!r}")


@operation("ship_hand_over", 0.3)
def hand_over(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_shipped(w, rng, process)
    if opened is None or opened.is_ending or opened.queue.shipping is None or opened.queue.closed:
        return
    shipping, timeout = opened.queue.shipping, rng.choice((0.0, LONG, LONG))
    state = w.call(process, shipping.status).value

    def leave() -> None:
        shipping.hand_over(timeout)

    leave.__doc__ = f"{type(shipping).hand_over.__doc__} {JournaledQueue.close.__doc__}"
    if state is not None and state.state == "closed":
        w.require(not w.call(process, leave).ok, "a queue whose shipping has ended is handed over")
        return
    end_queue(w, process, opened, way=leave)
    w.saw("a queue is handed over")


# -- the stores --------------------------------------------------------------------------------------------------------


@operation("ship_store", 1.2, nestable=False)
def change_store(w: World, rng: random.Random, process: Process) -> None:
    """Something is wrong with a store, or nothing any more."""
    del process
    if not w.ships.stores:
        return
    store = rng.choice(w.ships.stores)
    store.mode = rng.choice((WELL, WELL, WELL, AWAY, READ_ONLY, STUCK, FLAKY, FLAKY, RAISES))
    w.did = True
    w.saw(f"a store is {store.mode}")


@operation("ship_take", 0.5, nestable=False)
def take(w: World, rng: random.Random, process: Process) -> None:
    """Another owner takes a queue: at once, or as its opening allows."""
    logs = [log for log in w.ships.logs.values() if log.owner == OURS and log.state.slot]
    if not logs:
        return
    log = rng.choice(logs)
    if rng.random() < 0.5:
        header = log.state.header
        assert header is not None
        opening = Opening(header.queue_id, rng.randbytes(16), "another", 0, header.written_ms)
        log.store.version += 1
        carry_out(
            open_log(f"{log.name}/", opening, lambda state: state.place.last_id + ID_JUMP), log.store.inner, no_pause
        )
        log.take()
        w.did = True
        w.saw("another owner takes a queue")
    elif log.store.mode == WELL and log.name in w.models:
        move(w, rng, process, log)


@operation("ship_lazy", 0.4, nestable=False)
def move_lazily(w: World, rng: random.Random, process: Process) -> None:
    """A queue with closed segments is restored lazily elsewhere, and opened there."""
    logs = [log for log in w.ships.logs.values() if log.owner == OURS and log.state.segments and log.name in w.models]
    if logs:
        log = rng.choice(logs)
        log.store.mode = WELL
        move(w, rng, process, log, lazy=True)


def move(w: World, rng: random.Random, process: Process, log: Log, *, lazy: bool = False) -> None:
    """Somebody restores the queue elsewhere and opens it there."""
    model = w.models[log.name]
    if log.life is not model or model.damaged or model.batches:
        return
    disk, ships = MemoryDisk(), w.ships
    mine = is_open(w, log)
    lease_ms = log.state.header.lease_ms if log.state.header is not None else 0
    is_lazy = False
    ships.courier.meanwhile = ships.idle_turn
    before, nested = log.state.slot, w.nested
    try:
        with ships.asking():
            if lazy or rng.random() < 0.5:
                restore(log.store, log.name, FOLDER, disk=disk, threads=1, lazy=lazy)
                is_lazy = lazy and refuses_readers(w, log, disk)
            copy = open_copy(w, log, disk, draw_owner(w, rng, log.store))
    except OwnerAlive as error:
        alive = (lease_ms and mine and log.state.slot > before) or nested != w.nested
        w.require(alive, f"{error!r}, and the owner does nothing")
        w.saw("an owner with a lease is alive")
        return
    except ShipError as error:  # the owner has gone on since the copy was made
        w.require(log.state.slot > before, f"{error!r}, and nobody has gone on")
        return
    except CorruptJournal as error:  # the log ends amid a batch of the inbox of the other folder
        w.require("the published batch is missing" in error.reason, f"{error!r} of a queue that was restored")
        log.take(by_lease=bool(lease_ms and mine))
        w.saw("a log that ends amid a batch is restored")
        return
    finally:
        ships.courier.meanwhile = bool
    log = ships.logs[log.store.number, log.name]  # it may have been opened here in between
    log.take(by_lease=bool(lease_ms and mine))
    if is_lazy:
        read_lazily(w, rng, log, copy)
    own(w, rng, copy)
    if is_lazy:
        check_items(w, log, disk)
    w.did = True
    w.saw("a queue is taken over elsewhere")


def is_open(w: World, log: Log) -> bool:
    """Whether the log's owner has its queue open here."""
    model = w.models[log.name]
    owner = model.writer.queues.get(model.name) if model.writer is not None else None
    return owner is not None and w.ships.log_of(owner) is log


def draw_owner(w: World, rng: random.Random, store: Any) -> Ship:
    """How somebody elsewhere owns a queue."""
    del w
    return Ship(store, lease=rng.choice((None, 6.0)), close_timeout=LONG, on_missing="restore", inbox_interval=None)


def open_copy(w: World, log: Log, disk: MemoryDisk, ship: Any) -> JournaledQueue:
    return JournaledQueue(FOLDER, log.name, disk=disk, clock=ManualClock(w.now_ms), inbox_interval=None, ship=ship)


def own(w: World, rng: random.Random, queue: JournaledQueue) -> None:
    """Be the owner of a queue elsewhere for a moment."""
    first_id = queue.stats().tail_id + 1
    for _ in range(rng.choice((0, 3))):
        w.require(queue.put(OTHERS) >= first_id, "an id is given out twice")
    if rng.random() < 0.3:
        assert queue.shipping is not None
        queue.shipping.hand_over(LONG)
    else:
        queue.close()


def refuses_readers(w: World, log: Log, disk: MemoryDisk) -> bool:
    """Whether not all of a copy is here: then only its owner opens it."""
    if f"{log.name}.lazy" not in disk.directory(FOLDER).names():
        return False
    for open_it in (
        lambda: open_reader(FOLDER, log.name, "x", create=True, disk=disk).close(),
        lambda: open_copy(w, log, disk, False).close(),
        lambda: list(scan(FOLDER, log.name, disk=disk)),
    ):
        with expected(w, "a queue that is not all here is opened", RestoreIncomplete):
            open_it()
    return True


def read_lazily(w: World, rng: random.Random, log: Log, queue: JournaledQueue) -> None:
    """Read what comes from the store then, which may be away for some time, and fetch the rest."""
    folder: Any = queue._journal._directory
    store = log.store
    with w.ships.asking():

        def get(handle: Any) -> list[Any]:
            store.mode = rng.choice((WELL, WELL, AWAY))
            if rng.random() < 0.3:
                with contextlib.suppress(StoreUnavailable):
                    folder.fetch_next()
            try:
                return list(handle.get_many(3, timeout=0))
            except StoreUnavailable as error:
                w.require(store.mode == AWAY, f"{error!r} of a get, and the store is there")
                w.saw("an item is not here, and the store is away")
                return []
            finally:
                store.mode = WELL

        check_readers(w, log, queue, get)
        while folder.fetch_next():
            pass
    w.saw("a queue is restored lazily")


@operation("ship_restore", 0.5)
def restore_elsewhere(w: World, rng: random.Random, process: Process) -> None:
    del process
    logs = [log for log in w.ships.logs.values() if isinstance(log.life, QueueModel) and log.owner == OURS]
    logs = [log for log in logs if log.life is w.models.get(log.name)]
    if logs and not w.depth:
        log = rng.choice(logs)
        w.did = True
        w.ships.check_restored(log, w.models[log.name], whole=rng.random() < 0.5)


# -- standbys ----------------------------------------------------------------------------------------------------------


@operation("ship_follow", 2, nestable=False)
def follow(w: World, rng: random.Random, process: Process) -> None:
    """A standby looks for what is new; one that is not there begins. Or it is closed, or killed."""
    del process
    logs = [log for log in w.ships.logs.values() if log.owner == OURS and log.state.slot]
    machines = [machine for machine in w.ships.machines.values() if machine.log.owner == OURS]
    if not logs:
        return
    log = rng.choice(logs)
    machine = w.ships.machines.setdefault((log.store.number, log.name), Machine(w, log))
    if machines and rng.random() < 0.8:
        machine = rng.choice(machines)
    w.did = True
    if machine.standby is None:
        machine.begin()
    elif rng.random() < 0.1:
        machine.close(kill=rng.random() < 0.5)
        return
    if rng.random() < 0.2:
        machine.view.is_gone = not machine.view.is_gone
    for _ in range(rng.choice((1, 3, MOST_LOOKS))):
        if not machine.look():
            break
    assert machine.standby is not None
    said, status = w.call(w.processes[0], machine.standby.wait, 0), machine.standby.status()
    repr(machine.standby)
    w.require(said.value == (status.state == "over"), f"wait() says {said.value}, and it is {status}")
    if said.value:
        w.require(machine.may_take(), f"{status}, and the owner is alive")
        w.saw("a standby may take over")


@operation("ship_take_over", 0.7, nestable=False)
def take_over(w: World, rng: random.Random, process: Process) -> None:
    """A standby takes its queue over, if it may."""
    machines = [each for each in w.ships.machines.values() if each.log.owner == OURS and each.standby is not None]
    machines = [each for each in machines if each.log.life is w.models.get(each.log.name)]
    if not machines:
        return
    machine = rng.choice(machines)
    log, model, force = machine.log, w.models[machine.log.name], rng.random() < 0.4
    if model.damaged or model.batches:
        return
    w.did = True
    lease_ms = log.state.header.lease_ms if log.state.header is not None else 0
    queue = machine.take_over(draw_owner(w, rng, machine.view), force=force)
    if queue is None:
        return
    log = machine.log  # it may have been opened here in between
    w.require(force or machine.could_take, f"queue {log.name} is taken over, and its owner is alive")
    log.take(by_lease=bool(lease_ms and not force and is_open(w, log)))
    log.store.mode = WELL
    check_readers(w, log, queue)
    own(w, rng, queue)
    w.saw("a standby takes over")


@operation("ship_rejoin", 0.7, nestable=False)
def come_back(w: World, rng: random.Random, process: Process) -> None:
    """The old owner of a queue that was taken over becomes a standby: on a copy of its disk, and its life goes on."""
    del process
    logs = [log for log in w.ships.logs.values() if log.owner == ANOTHERS and log.life is w.models.get(log.name)]
    logs = [log for log in logs if w.ships.attached.get(log.name) == frozenset({log.store.number})]
    if not logs:
        return
    log = rng.choice(logs)
    model = w.models[log.name]
    if model.damaged or model.batches or model.writer is not None or w.trouble.blocks is not None:
        return
    w.did = True
    machine = Machine(w, log)
    machine.disk, log.store.mode = copy_of(w.disk), WELL
    with w.ships.asking():
        if rng.random() < 0.6:
            rejoin(FOLDER, log.name, machine.view, disk=machine.disk)
            aside = check_orphans(w, log, machine.disk)
            w.require(rejoin(FOLDER, log.name, machine.view, disk=machine.disk) is None, "rejoin says it twice")
        else:
            aside = set()
        machine.begin()
        nested, looks = w.nested, 0
        while machine.look() and looks < MOST_LOOKS:
            looks += 1
        if nested != w.nested or log.owner != ANOTHERS:
            machine.close()
            return
        merged = aside & check_items(w, log, machine.disk).keys()
        w.require(not merged, f"items {sorted(merged)[:5]} were set aside, and are in the log")
    queue = machine.take_over(draw_owner(w, rng, machine.view), force=True)
    if queue is not None:
        check_readers(w, log, queue)
        own(w, rng, queue)
        w.saw("an old owner takes its queue back")
    machine.close()
