"""What is known of the shipped queues of a world: where each is shipped, whose each log is, and what must be in it.

Rules:
1. A log is ``OURS`` while the queue in the folder of the world is its owner, ``ANOTHERS`` once another owner has taken
   it, and ``LEFT`` when the queue was detached from it or is shipped elsewhere.
2. What an opening must raise follows from that, where no request has failed and nobody came between.
3. What is in a log is read from the store itself. It is held against the model of the queue, never against what the
   library says of it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrelpy import JournaledQueue, QueueLocked
from kestrelpy._disk.memory import MemoryDisk
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    OwnerAlive,
    Ship,
    ShipError,
    ShippingRequired,
    StoreUnavailable,
    restore,
)
from kestrelpy.ship.log import carry_out, read_end_surely
from kestrelpy.ship.manifest import LogState
from kestrelpy.testing import ManualClock
from tests.ship.in_store import no_pause
from tests.use.use_courier import ASLEEP, REQUEST, Courier, ShipClock, ShipThread, courier
from tests.use.use_model import STORED, Put, QueueModel, ReaderModel
from tests.use.use_standbys import FOLDER, Machine, check_items, check_readers
from tests.use.use_stores import STUCK, WELL, WorldStore

if TYPE_CHECKING:
    from kestrelpy.work import WorkQueue
    from tests.use.use_job_model import Work
    from tests.use.use_world import Opened, Process, Result, World

OURS, ANOTHERS, LEFT, UNSURE = "ours", "another's", "left", "unsure"
MOST_STORES = 6
AT_ONCE = 40
"""So often a thread of shipping may go on while time passes."""


class Log:
    """The log of one queue in one store. ``life``: the model of the queue whose it is."""

    def __init__(self, store: WorldStore, name: str, life: object, owner: str) -> None:
        self.store = store
        self.name = name
        self.life = life
        self.owner = owner
        self.by_lease = False
        """Whether another owner has it whose opening had to wait for the lease."""
        self.slot_seen, self.seen_at = -1, 0.0
        """The last slot, and when it was first seen, by the clock of shipping."""
        self._state: LogState | None = None
        self._version = -1
        self._end_id: int | None = None

    @property
    def state(self) -> LogState:
        if self._state is None or self._version != self.store.version:
            self._state = carry_out(read_end_surely(f"{self.name}/", self._state), self.store.inner, no_pause)
            self._version = self.store.version
        return self._state

    @property
    def last_id(self) -> int:
        """The last id in it that this queue has put there."""
        return self._end_id if self._end_id is not None else self.state.place.last_id

    def take(self, *, by_lease: bool = False) -> None:
        """Another owner has it from here on, and has put nothing yet."""
        self._end_id, self.owner, self.by_lease = self.last_id, ANOTHERS, by_lease


class Before(NamedTuple):
    """What was so when an opening began."""

    nested: int
    failures: int
    attached: frozenset[int | None]
    log: Log | None


class Ships:
    """All stores of a world, and the logs in them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stores: list[WorldStore] = []
        self.logs: dict[tuple[int, str], Log] = {}
        self.attached: dict[str, frozenset[int | None]] = {}
        """Where the queue of that name may be shipped, by the number of the store; ``None``: it is not."""
        self.asks = 0
        """How many calls are under way that may talk to a store themselves."""
        self.raised = 0
        """How often a store has raised what it must not."""
        self.closed: list[Any] = []
        """``queue.shipping`` of queues that are closed."""
        self.ever_done: dict[str, dict[str, set[int]]] = {}
        """By queue and reader, the ids that have been done at some time, or may have been."""
        self.machines: dict[tuple[int, str], Machine] = {}
        """Of the standby of each log, if it has had one."""
        self.is_on = world.swarm.ships
        if self.is_on:
            courier().alone = self.alone
            courier().is_stuck = self.is_stuck

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        trouble = self.world.trouble
        before, trouble.meanwhile_in = trouble.meanwhile_in, 0
        try:
            yield
        finally:
            trouble.meanwhile_in = before

    @staticmethod
    def is_stuck(thread: ShipThread) -> bool:
        """Whether a request of it is under way to a store that hangs."""
        return thread.state == REQUEST and thread.asks is not None and thread.asks.mode == STUCK

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """While a call is under way that may talk to a store itself."""
        self.asks += 1
        try:
            yield
        finally:
            self.asks -= 1

    @property
    def courier(self) -> Courier:
        return courier()

    def new_store(self, rng: random.Random) -> WorldStore:
        store = WorldStore(self, len(self.stores), rng)
        self.stores.append(store)
        return store

    def moment(self, store: WorldStore) -> None:
        """Somebody's call is about to send a request."""
        w = self.world
        if not self.asks:
            raise w.fail(f"a call that ships nothing talks to {store!r}")
        if w.swarm.meanwhile and w.rng.random() < w.swarm.meanwhile / 4:
            w.meanwhile()

    def failures(self) -> int:
        return sum(store.failures for store in self.stores)

    def is_well(self) -> bool:
        return all(store.mode == WELL for store in self.stores)

    # -- options -----------------------------------------------------------------------------------------------------

    def draw(self, rng: random.Random, name: str, life: object) -> Any:
        """``ship=`` of an opening."""
        where = self.attached.get(name, frozenset({None}))
        here = next((number for number in sorted(each for each in where if each is not None)), None)
        dice = rng.random()
        if here is None:
            if dice < 0.25:
                return None
            if dice < 0.35:
                return False
            return self.draw_ship(rng, self.draw_store(rng, name, life))
        is_over = self.logs[here, name].owner == ANOTHERS
        if dice < 0.06:
            return None
        if dice < (0.4 if is_over else 0.12):
            return False
        if dice < (0.7 if is_over else 0.2):
            return self.draw_ship(rng, self.draw_store(rng, name, life))
        return self.draw_ship(rng, self.stores[here])

    def draw_store(self, rng: random.Random, name: str, life: object) -> WorldStore:
        """Mostly one that has no log of another queue of that name."""
        free = [each for each in self.stores if getattr(self.logs.get((each.number, name)), "life", life) is life]
        if self.stores and rng.random() < 0.15:
            return rng.choice(self.stores)
        if free and (rng.random() < 0.5 or len(self.stores) >= MOST_STORES):
            return rng.choice(free)
        return self.new_store(rng)

    def draw_ship(self, rng: random.Random, store: WorldStore) -> Ship:
        acks = rng.choice(("disk", "disk", "shipped"))
        options: dict[str, Any] = {
            "acks": acks,
            "interval": rng.choice((None, 0, 0.2, 1.0) if acks == "shipped" else (None, 0, 0, 0.2, 10.0)),
            "chunk_bytes": 64 << 10,
            "when_behind": rng.choice(("go_on", "go_on", "refuse", "block")),
            "max_unshipped_bytes": rng.choice((0, 500, 5000, 256 << 20)),
            "max_unshipped_seconds": rng.choice((0.0, 3.0, 60.0)),
            "ack_timeout": 2.0,
            "close_timeout": rng.choice((0.0, 2.0, 2.0, 2.0)),
            "history": rng.choice((5.0, 86_400.0)),
            "keep": rng.choice((0.0, 0.0, None)),
            "manifest_interval": rng.choice((0.5, 60.0)),
            "lease": rng.choice((None, None, 6.0, 12.0)),
            "uploads": rng.choice((1, 4)),
            "inbox_interval": None,  # tests/ship/inbox_explorer.py has worlds of publishers
        }
        return Ship(store, **options)

    # -- openings ----------------------------------------------------------------------------------------------------

    def before(self, name: str, ship: Any) -> Before:
        log = self.logs.get((store_of(ship).number, name)) if isinstance(ship, Ship) else None
        self.asks += 1
        return Before(self.world.nested, self.failures(), self.attached.get(name, frozenset({None})), log)

    def judge_opening(self, name: str, life: Any, ship: Any, result: Result, before: Before) -> bool:
        """Whether an opening has raised, and shipping is the reason."""
        self.asks -= 1
        quiet = before.nested == self.world.nested and not self.world.depth and not getattr(life, "damaged", False)
        if result.error is None:
            self._note_opened(name, life, ship, before, quiet=quiet)
            return False
        if isinstance(ship, Ship):
            return self._note_refused(name, life, store_of(ship), result, before, quiet=quiet)
        if isinstance(result.error, ShippingRequired):
            is_shipped = before.attached != {None}
            self.world.require(ship is None and (is_shipped or not quiet), f"{result.error!r}, and it is not shipped")
            self.world.saw("a queue that is shipped is opened without a word of it")
            return True
        if ship is False:
            self.attached[name] = before.attached | {None}
        return False

    def _note_opened(self, name: str, life: Any, ship: Any, before: Before, *, quiet: bool) -> None:
        w = self.world
        if not isinstance(ship, Ship):
            unsaid = ship is None and None not in before.attached and quiet
            w.require(not unsaid, f"queue {name} is shipped, and is opened without a word of it")
            self._leave(name, None)
            self.attached[name] = frozenset({None})
            return
        number, log = store_of(ship).number, before.log
        is_sure = log is None or (log.life is life and log.owner == OURS and before.attached == {number})
        if log is not None and quiet:
            w.require(
                log.life is life or log.owner == UNSURE,
                f"queue {name} is shipped to the log of another queue of that name",
            )
            over = log.owner == ANOTHERS and before.attached == {number}
            w.require(not over, f"queue {name} is opened, and another owner has it")
        if not is_sure:
            if isinstance(life, QueueModel):
                life.holes = True  # its ids begin far above those in the log
            w.saw("a log is taken up again")
        self._leave(name, number)
        self.attached[name] = frozenset({number})
        new = self.logs[number, name] = Log(store_of(ship), name, life, OURS)
        w.require(new.state.slot > 0, f"queue {name} is open, and has no FENCE in its log")
        w.saw("a queue is shipped")

    def _leave(self, name: str, number: int | None) -> None:
        for (store, of), log in self.logs.items():
            if of == name and store != number and log.owner in (OURS, UNSURE):
                log.owner = LEFT

    def _note_refused(
        self, name: str, life: object, store: WorldStore, result: Result, before: Before, *, quiet: bool
    ) -> bool:
        w, error, log = self.world, result.error, before.log
        key = (store.number, name)
        if isinstance(error, QueueLocked | ValueError | TypeError):
            return False  # before anything was asked
        if isinstance(error, HistoryMismatch):
            ours = log is None or (log.life is life and log.owner == OURS and before.attached == {store.number})
            w.require(not ours or not quiet, f"{error!r}, and it is the queue's own log")
            w.saw("a log that is another's is refused")
            return True
        self.attached[name] = before.attached | {store.number}  # its nonce may have been noted
        if key not in self.logs:
            self.logs[key] = Log(store, name, life, UNSURE)
        elif log is not None and log.owner == LEFT:
            log.owner = UNSURE
        if isinstance(error, Fenced):
            w.require(log is not None and (log.owner != OURS or not quiet), f"{error!r}, and nobody has taken it")
            w.saw("a queue that another owner has is opened again")
            return True
        if isinstance(error, OwnerAlive):
            w.require(log is not None and (log.owner != OURS or not quiet), f"{error!r}, and it is its own log")
            return True
        if isinstance(error, StoreUnavailable):
            w.require(self.failures() != before.failures, f"{error!r}, and nothing is wrong with the store")
            w.saw("a queue is opened while its store is away")
            return True
        if type(error).__name__ == "Unforeseen":
            w.require(self.failures() != before.failures, f"{error!r}")
            return True
        w.require(not isinstance(error, ShipError), f"{error!r}: nobody has damaged the store")
        return False

    # -- an open queue -----------------------------------------------------------------------------------------------

    def log_of(self, opened: Opened) -> Log | None:
        """The log of an open queue; ``None`` if it is not shipped."""
        ship = opened.options.get("ship")
        return self.logs[store_of(ship).number, opened.model.name] if isinstance(ship, Ship) else None

    def threads_of(self, process: Process) -> list[ShipThread]:
        return [thread for thread in self.courier.threads if thread.disk is process.disk]

    def explains(self, name: str, error: BaseException | None) -> bool:
        """Whether this error of a call is shipping's; then it must have a reason."""
        w = self.world
        if not isinstance(error, ShipError):
            return False
        if name in w.models and w.models[name].damaged:
            return True
        logs = [log for (_, of), log in self.logs.items() if of == name]
        if isinstance(error, Fenced):
            w.require(any(log.owner == ANOTHERS for log in logs), f"{error!r}, and nobody has taken it")
            w.saw("a call of a queue that another owner has")
            return True
        if isinstance(error, NotShipped):
            late = self.failures() or not self.is_well() or w.trouble.fired or w.nested or w.depth
            short = any(log.owner == ANOTHERS for log in logs) or error.first_id > error.last_id
            w.require(late or short, f"{error!r}, and nothing is wrong with the store")
            return True
        w.require(self.raised, f"{error!r}, and the store has raised nothing that it must not")
        return True

    def settle(self) -> None:
        """After a step: who waits is told, and what is in the store by now is seen here."""
        w = self.world
        for process in w.processes:
            if process.queues or process.others:
                trail, w.trail = w.trail, None
                w.call(process, turn_of(process))
                w.trail = trail
            for opened in list(process.queues.values()):
                if self.log_of(opened) is not None:
                    self.settle_queue(opened)
                    self.look(opened)

    def settle_queue(self, opened: Opened) -> None:
        log, model, w = self.log_of(opened), opened.model, self.world
        shipment = opened.queue._shipment
        assert log is not None
        assert shipment is not None
        ended = shipment._shipper._ended
        if isinstance(ended, Fenced):
            w.require(log.owner == ANOTHERS, f"{ended!r}, and nobody has taken it")
            model.failed = True
        elif isinstance(ended, ShipError):
            w.require(self.raised or w.trouble.fired, f"shipping has failed, and nothing is wrong: {ended!r}")
            model.failed = model.failed or opened.queue._status.error is not None
        done = self.ever_done.setdefault(model.name, {})
        for name, reader in model.readers.items():
            done.setdefault(name, set()).update(put.id for put in reader.done | reader.optional)
        if not model.failed and opened.options["ship"].acks == "shipped":
            last_id = max(log.last_id, opened.tail_id)  # of a batch, too: nobody has put it here
            model.flying.update(put for put in model.stored if put.id > last_id)
            thread: Any = shipment._shipper._thread
            said = shipment._shipper.status().state
            if thread.state == ASLEEP and said in ("shipping", "behind"):
                shown = [put for put in model.flying if 0 < put.id <= log.last_id and put.state == STORED]
                model.flying.difference_update(shown)

    def note_hidden(self, opened: Opened) -> None:
        """After an opening: what readers here do not see before it is in the store."""
        log = self.log_of(opened)
        if log is not None and opened.options["ship"].acks == "shipped":
            opened.model.flying.update(put for put in opened.model.stored if put.id > log.last_id)

    def check_shown(self, reader: ReaderModel, put: Put) -> None:
        """A reader here has got an item: with ``acks="shipped"`` it is in the store."""
        w, model = self.world, reader.queue
        opened = reader.process.queues[model.name]
        log = self.log_of(opened)
        if log is None or opened.options["ship"].acks != "shipped" or put.id <= opened.tail_id or model.damaged:
            return
        w.require(
            put.id <= log.last_id, f"{reader.full_name} delivers item {put.id}, and the log ends at {log.last_id}"
        )

    def may_be_stored(self, opened: Opened, error: BaseException | None, *, at_once: bool) -> bool:
        """Whether the items of a put that has raised this may be on the disk here: it has waited for that, or for the
        store. ``at_once``: the call does not wait for the disk by itself.
        """
        waits = getattr(opened.options.get("ship"), "acks", "disk") == "shipped" or opened.always or not at_once
        return isinstance(error, ShipError) and not isinstance(error, NotShipped) and waits

    def note_accepted(self, opened: Opened, puts: list[Put], nested: int) -> None:
        """A put has returned."""
        log, w = self.log_of(opened), self.world
        if log is None or nested != w.nested or w.depth:
            return
        name, model = opened.model.name, opened.model
        w.require(not log.by_lease, f"a put is accepted, and the lease of queue {name} is over")
        w.require(not opened.must_refuse, f"a put is accepted, and {opened.must_refuse}")
        if opened.options["ship"].acks == "shipped" and not model.damaged:
            late = [put.id for put in puts if put.id > log.last_id]
            w.require(not late, f"items {late} are acknowledged, and the log ends with {log.last_id}")

    def may_refuse(self, opened: Opened) -> bool:
        """Whether a put may be refused because too much is not in the store."""
        ship, log = opened.options.get("ship"), self.log_of(opened)
        if log is None or not isinstance(ship, Ship) or ship.when_behind == "go_on":
            return False
        status = opened.queue.shipping.status()  # type: ignore[union-attr]
        if status.state == "failed":
            return self.raised > 0
        self.world.saw("a put is refused as the store is behind")
        over = status.unshipped_bytes > ship.max_unshipped_bytes
        return over or status.unshipped_seconds > ship.max_unshipped_seconds

    def jobs_may_be_refused(self, work: Work) -> bool:
        """Whether the work queue may refuse what would be written, as too much is not in the store."""
        if not isinstance(work.ship, Ship) or work.ship.when_behind == "go_on" or work.queue is None:
            return False
        status = work.queue.shipping.status()  # type: ignore[union-attr]
        over = status.unshipped_bytes > work.ship.max_unshipped_bytes
        return over or status.unshipped_seconds > work.ship.max_unshipped_seconds

    def is_shut(self, work: Work) -> bool:
        """Whether nothing can be written about jobs now: what is timed out or buried meanwhile may come back."""
        journal = work.queue._core.journal if work.queue is not None and isinstance(work.ship, Ship) else None
        return journal is not None and journal.queue._status.gate is not None

    def look(self, opened: Opened) -> None:
        """Whoever looks at leases and limits looks now. What must come of it?"""
        log, model, ship = self.log_of(opened), opened.model, opened.options["ship"]
        assert log is not None
        opened.must_refuse = ""
        self.courier.advance(0)
        if log.slot_seen != log.state.slot:
            log.slot_seen, log.seen_at = log.state.slot, ShipClock.seconds
        if ship.lease is not None and ShipClock.seconds > log.seen_at + ship.lease * 2 / 3 + 0.01:
            opened.must_refuse = f"its lease of {ship.lease} s was renewed {ShipClock.seconds - log.seen_at} s ago"
        unsure = model.holes or model.flying or model.damaged or model.batches or self.world.batches_unsure
        if ship.when_behind != "go_on" and not unsure:
            first_id = max(log.last_id + 1, opened.queue._source.first_id)  # what was retired is not waited for
            waiting = sum(len(put.data) for put in model.stored if put.id >= first_id)
            if waiting > ship.max_unshipped_bytes:
                opened.must_refuse = f"{waiting} bytes are not in the store, of {ship.max_unshipped_bytes}"

    def pass_time(self, seconds: float) -> None:
        """The threads of shipping go on, as far as there is something to do for them."""
        if not self.is_on:
            return
        for store in self.stores:
            store.clock.advance(seconds)
        left = seconds
        while True:
            part = min(left, 1.0)
            self.courier.advance(part)
            left -= part
            for thread in list(self.courier.threads):
                self.courier.turn(thread, AT_ONCE)
            if left <= 0:
                return

    def idle_turn(self) -> None:
        """An opening waits: the threads of others go on."""
        busy = [process.disk for process in self.world.processes if process.busy]
        for thread in list(self.courier.threads):
            if thread.disk not in busy:
                self.courier.turn(thread, AT_ONCE)

    def note_closed(self, opened: Opened, result: Result, *, was_failed: bool, erased: bool, was_cut: bool) -> None:
        """A queue that was shipped is closed. ``was_cut``: something was thrown into that, and it was done again."""
        w, log, model = self.world, self.log_of(opened), opened.model
        shipment = opened.queue._shipment
        if log is None or shipment is None or not opened.queue.closed:
            return
        for put in [each for each in model.flying if each.id and each.state == STORED]:
            model.flying.discard(put)  # it is on disk, and nothing hides it any more
        thread: Any = shipment._shipper._thread
        self.courier.turn(thread, AT_ONCE)
        if log.store.mode != STUCK and not thread.is_running:
            w.require(not thread.is_alive(), f"queue {model.name} is closed, and its thread goes on")
        self.closed.append(shipment.shipping(opened.queue.close))
        clean = result.ok and not was_cut and not was_failed and not model.failed and not model.damaged
        if clean and log.owner == OURS and not erased and not model.holes:
            last_id = log.last_id
            left = [put.id for put in model.stored if put.id > last_id and put.state == STORED]
            w.require(not left, f"queue {model.name} is closed, and items {left[:5]} are not in the store")
            w.saw("a queue that is shipped is closed")

    def note_closed_jobs(self, queue: WorkQueue, result: Result) -> None:
        """The work queue is closed."""
        shipping = queue.shipping
        if shipping is None:
            return
        thread: Any = shipping._thread._thread  # type: ignore[attr-defined]
        self.courier.turn(thread, AT_ONCE)
        work = self.world.work
        log = self.logs[store_of(work.ship).number, work.name]
        if log.store.mode != STUCK and not thread.is_running and queue.closed:
            self.world.require(not thread.is_alive(), "the work queue is closed, and its thread goes on")
        self.closed.append(shipping)
        del result

    # -- what is in the store ----------------------------------------------------------------------------------------

    def heal(self) -> None:
        for store in self.stores:
            store.mode = WELL

    def check_restored(self, log: Log, model: QueueModel, *, whole: bool) -> None:
        """Restore the queue from its log into a folder of its own: it must be what the owner had put, up to there."""
        w, state = self.world, log.state
        if not state.slot or model.damaged:
            return
        disk = MemoryDisk()
        restore(log.store.inner, log.name, FOLDER, disk=disk, threads=1, all=whole)
        check_items(w, log, disk)
        queue = JournaledQueue(
            FOLDER,
            log.name,
            disk=disk,
            clock=ManualClock(w.now_ms),
            inbox_interval=None,
            ship=False,
            on_corruption="quarantine",
        )
        try:
            check_readers(w, log, queue)
        finally:
            queue.close()
        w.saw("a queue is restored")

    def end(self) -> None:
        """No standby follows any more."""
        for machine in self.machines.values():
            machine.close()

    def account(self) -> None:
        """At the end, when all is closed: each log that is the queue's own is restored."""
        self.end()
        for log in self.logs.values():
            model = self.world.models.get(log.name)
            if model is not None and log.life is model and log.owner == OURS:
                self.check_restored(log, model, whole=False)


def store_of(ship: Ship) -> WorldStore:
    """The store of this world that a queue is shipped to."""
    store: Any = ship.store
    assert isinstance(store, WorldStore)
    return store


def turn_of(process: Process) -> Callable[[], None]:
    def run() -> None:
        """Raises nothing of the library's."""
        process.clock.advance(0)

    return run
