"""Garbage collection on a simulated store: random logs and histories, and owners that collect, are fenced and die.

One writer makes the log (``logs.Author``), with segments, checkpoints, batches and commits of readers outside. The
owner of the last epoch collects, one request after another; between two of them anything may happen. Any request may be
lost, land late, or be the owner's last; of a deletion that is its last, any part may be done. Owners that were fenced
do not know, and go on. Others open the log, or read it, and began long ago.

After each deletion ``World.check`` says what must hold. A planted fault is a subclass of ``Rules``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kestrelpy._journal.format import Checkpoint
from kestrelpy.inbox.format import BatchPart, PublishedBatch, encode_batch_file
from kestrelpy.ship import StoreUnavailable, garbage, log
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.garbage import DAY_MS, Collected, Plan, Survey
from kestrelpy.ship.log import Delete, ListBelow, Opening, SlotTaken, Steps
from kestrelpy.ship.manifest import LogState, Manifest
from kestrelpy.ship.outside_reader import OutsideReader, encode_outside, outside_key
from kestrelpy.ship.slots import CLOSE, DATA, FENCE, SavedState, ShippedLedger, Slot
from kestrelpy.testing.stores import Fault, SimulatedStore
from tests.ship.log_explorer import FAULTS, PREFIX, Wrong
from tests.ship.logs import QUEUE_ID, Author

HOUR_MS = 3_600_000
FOREIGN = (
    "queue.json",
    "log/1",
    "log/0000000000000000",
    "manifest/0000000000000001.tmp",
    "seg/1-1-00000000.segment",
    "in/0000000000001.batch.refused",
    "in/x.part",
    "reader/spark/1",
    "probe/x",
    "other",
)
"""Keys that are not of a known pattern, or that are never deleted."""


class Rules:
    """How an owner collects."""

    def collect(self, owner: Owner) -> Steps[Collected]:
        return garbage.collect(
            PREFIX,
            owner.state,
            owner.append,
            history_ms=owner.history_ms,
            keep_ms=owner.keep_ms,
            oldest_here=owner.oldest_here,
            known=owner.known,
        )


class Changed(Rules):
    """The same in three steps, each of which a planted fault may change."""

    def collect(self, owner: Owner) -> Steps[Collected]:
        seen = yield from garbage.survey(PREFIX, owner.state, history_ms=owner.history_ms, known=owner.known)
        made = self.plan(owner, self.seen(owner, seen))
        yield from self.append(owner, made)
        return (yield from garbage.delete(made))

    def seen(self, owner: Owner, seen: Survey) -> Survey:
        return seen

    def plan(self, owner: Owner, seen: Survey) -> Plan:
        return garbage.plan(
            owner.state, seen, history_ms=owner.history_ms, keep_ms=owner.keep_ms, oldest_here=owner.oldest_here
        )

    def append(self, owner: Owner, made: Plan) -> Steps[None]:
        return owner.append(made)


class Watched(SimulatedStore):
    """A store that notes that something was deleted."""

    deleted = False

    def delete_now(self, keys: Iterable[str]) -> None:
        super().delete_now(keys)
        self.deleted = True


class Writer(Author):
    """Puts its log into the store. It forgets nothing by itself, and takes in what was published."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(seed)
        self.world = world

    def add(self, slot: Slot) -> None:
        sealed = slot.sealed
        if sealed is not None and sealed.key not in self.world.uploaded:
            self.world.upload(sealed.key, sealed.file_bytes)
        super().add(slot)
        self.world.put(codec.slot_key(len(self.log)), self.log[-1])

    def beat(self) -> None:
        self.add(self.slot(DATA, **self.extras()))

    def extras(self) -> dict[str, Any]:
        states: list[SavedState] = []
        while self.random.random() < 0.3:
            states.append(self.state())
        if self.random.random() < 0.8:
            return {"checkpoints": tuple(states)}
        self.taken += self.taken < len(self.world.published)
        return {"checkpoints": tuple(states), "ledger": ShippedLedger.of(self.taken, self.ledger())}

    def catch_up(self) -> None:
        """All readers are at the end."""
        self.heads = dict.fromkeys(self.heads or ("audit",), self.last_id)
        at = Checkpoint(QUEUE_ID, "", self.last_id, 0, 5, 50, self.number, 96, 1, 2)
        states = tuple(at._replace(reader=name, flags=2 * bool(name)) for name in sorted(self.heads))
        self.add(self.slot(DATA, checkpoints=states))

    def note(self, slot: Slot, data: bytes) -> None:
        """Somebody else has appended this slot: a collector, or an opening."""
        self.log.append(data)
        self.crc, self.written_ms = slot.crc, slot.header.written_ms
        if slot.header.kind == FENCE:
            self.epoch, self.nonce, self.lease_ms = slot.header.epoch, slot.header.nonce, slot.header.lease_ms
            self.closed = False


class Owner:
    """Who has opened the log, and collects. ``state``: as of the last time that he had the log, for all he knows."""

    def __init__(self, world: World, state: LogState) -> None:
        assert state.header is not None
        header = state.header
        self.state = state
        self.nonce = header.nonce
        self.opening = Opening(QUEUE_ID, header.nonce, "somebody", header.lease_ms, header.written_ms)
        self.client = world.store.client(f"owner {header.epoch}")
        self.history_ms = world.random.choice((HOUR_MS, HOUR_MS, 6 * HOUR_MS, 48 * HOUR_MS))
        self.keep_ms = world.random.choice((0, 0, HOUR_MS, None))
        self.oldest_here = world.random.choice((1 << 62, 1 << 62, state.place.number))
        self.known: garbage.Known = {}
        self.running: Steps[Any] | None = None
        self.answer: object = None
        self.planned_at = 0

    def append(self, made: Plan) -> Steps[None]:
        yield from log.append(PREFIX, self.state, garbage.slot_of(made, self.state, self.opening))


class World:
    """A store, its clients, and what truly happened. ``moments``: of each slot its date, and the log up to it."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.fault_rate = self.random.choice((0.0, 0.1, 0.3))
        self.store = Watched()
        self.store.late_seconds = self.random.choice((60.0, 3600.0))
        self.store.before_request = self._fault
        self.counts: Counter[str] = Counter()
        self.moments: list[tuple[int, Manifest]] = []
        self.whole = LogState()
        self.uploaded: set[str] = set()
        self.published: list[tuple[int, tuple[str, ...]]] = []  # date, and keys
        self.loose: dict[str, int] = {}  # parts that no batch names
        self.commits: dict[str, list[int]] = {}
        self.needed: dict[str, set[str]] = {}  # by readers outside
        self.deleted_to = 0
        self.lost_before_ms = 0  # older moments than that were promised to nobody
        self.fenced: list[Owner] = []
        self.guests: list[LogState] = []
        self.openings: list[tuple[Owner, LogState]] = []
        for key in FOREIGN:
            self.put(key, b"{}")
        self.writer = Writer(self, seed)
        self.writer.fence()
        self.owner = Owner(self, self.copy())

    @property
    def now_ms(self) -> int:
        return self.store.clock.time_ns() // 1_000_000

    def copy(self) -> LogState:
        return LogState(self.whole.manifest())

    def _fault(self, request: Any) -> Fault:
        is_safe = request.client.startswith("guest")
        return self.random.choice(FAULTS) if not is_safe and self.random.random() < self.fault_rate else Fault.NONE

    def put(self, key: str, data: bytes) -> None:
        self.store.create_now(PREFIX + key, data)
        self.note_truth()

    def note_truth(self) -> None:
        """Whoever has created slots, at once or late."""
        while (data := self.store.objects.read(PREFIX + codec.slot_key(len(self.moments) + 1))) is not None:
            slot = codec.decode_slot(data)
            objection = self.whole.apply(slot) if slot is not None else "no slot"
            if slot is None or objection is not None:
                raise Wrong(f"slot {len(self.moments) + 1}: {objection}")
            self.moments.append((self.now_ms, self.whole.manifest()))
            if len(self.writer.log) < len(self.moments):
                self.writer.note(slot, data)
            for name, needed in self.needed.items():
                if slot.sealed is not None and slot.header.last_id > self.commits[name][-1]:
                    needed.add(slot.sealed.key)

    # -- what may happen ---------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        choices: dict[Callable[[], None], int] = {
            self.write: 8, self.collect: 12, self.advance: 3, self.save_manifest: 2, self.publish: 1,
            self.read_outside: 1, self.leave_something: 1, self.be_replaced: 1, self.be_late: 2, self.visit: 1,
        }  # fmt: skip
        for _ in range(steps):
            self.random.choices(list(choices), list(choices.values()))[0]()
            self.note_truth()
            if self.store.deleted:
                self.store.deleted = False
                self.check()
        self.visit_all()

    def advance(self) -> None:
        self.store.clock.advance(self.random.choice((1, 60, 1200, 1800, 3600, 90_000)))

    def write(self) -> None:
        """What the owner does beside collecting; or a new owner, if nobody has the log."""
        if self.owner.nonce != self.writer.nonce or self.writer.closed:
            self.replace_owner()
        elif self.owner.running is None:
            writer = self.writer
            what = (writer.data, writer.beat, writer.seal, writer.close, writer.catch_up)
            self.random.choices(what, (8, 3, 4, 0.2, 2))[0]()

    def be_replaced(self) -> None:
        if self.random.random() < 0.3:
            self.replace_owner()

    def replace_owner(self) -> None:
        self.lost_before_ms = max(self.lost_before_ms, self.now_ms - self.owner.history_ms)
        self.fenced.append(self.owner)
        header = self.whole.header
        if header is None or header.kind == CLOSE or header.nonce == self.owner.nonce:
            self.writer.fence()
        self.owner = Owner(self, self.copy())

    def save_manifest(self) -> None:
        self.put(manifests.manifest_key(self.whole.slot), manifests.encode_manifest(self.whole.manifest()))

    def publish(self) -> None:
        number = len(self.published) + 1
        ids = [self.random.randbytes(16) for _ in range(self.random.randrange(3))]
        again = self.published[-1][1][1:] if self.published and self.random.random() < 0.2 else ()
        parts = [BatchPart(each, 1, 1, 1) for each in (*ids, *(bytes.fromhex(key[3:35]) for key in again))]
        keys = [f"in/{part.part_id.hex()}.part" for part in parts]
        for key in keys:
            self.put(key, b"part")
        batch = PublishedBatch(self.random.randbytes(16), number, "", 0, tuple(parts))
        keys.insert(0, f"in/{number:013d}.batch")
        self.put(keys[0], encode_batch_file(batch))
        self.published.append((self.now_ms, tuple(keys)))

    def read_outside(self) -> None:
        """A reader outside commits. A new one comes while nobody plans: he would not be seen."""
        name = self.random.choice(("spark", "other"))
        before = self.commits.setdefault(name, [])
        if not before and self.owner.running is not None:
            return
        last_id = self.whole.last_id
        before.append(self.random.randint(min(before[-1] if before else 0, last_id), last_id))
        self.put(outside_key(name, len(before)), encode_outside(OutsideReader(QUEUE_ID, b"q" * 16, before[-1])))
        named = {each.key: each.segment_footer().last_id for each in self.whole.segments}
        needed = {key for key, last_id in named.items() if last_id > before[-1]}
        self.needed[name] = needed & self.needed[name] if name in self.needed else needed

    def leave_something(self) -> None:
        """A part that is never published, a probe, and an upload that its owner may close, or never does."""
        key = f"in/{self.random.randbytes(16).hex()}.part"
        self.put(key, b"loose")
        self.loose[key] = self.now_ms
        self.put(f"probe/{self.random.randbytes(16).hex()}", b"")
        if self.writer.first_id and self.owner.nonce == self.writer.nonce:
            self.upload(codec.segment_key(self.writer.number, self.writer.epoch, self.writer.nonce), 100)

    def upload(self, key: str, size: int) -> None:
        self.uploaded.add(key)
        self.put(key, bytes(size))

    def be_late(self) -> None:
        """One who was fenced, or an opening that began at an old manifest, goes on."""
        if self.fenced and self.random.random() < 0.7:
            self.step(self.random.choice(self.fenced))
            return
        if not self.openings or self.random.random() < 0.3:
            self.begin_late()
        self.step(self.random.choice(self.openings)[0])

    def begin_late(self) -> None:
        at = self.oldest_listed()
        state = LogState(self.moments[at - 1][1]) if at else LogState()
        opening = Owner(self, self.copy())
        opening.client = self.store.client("opening")
        about = Opening(QUEUE_ID, self.random.randbytes(16), "late", 0, self.writer.written_ms)
        opening.running = log.open_log(PREFIX, about, lambda end: end.last_id + 1, state)
        self.openings.append((opening, state))

    def oldest_listed(self) -> int:
        return min(self.listed_manifests(), default=0)

    def listed_manifests(self) -> list[int]:
        found = garbage.sort_out(PREFIX, self.store.objects.list(PREFIX))
        return sorted(found.manifests)

    def collect(self) -> None:
        if self.owner.running is None:
            if self.owner.nonce != self.writer.nonce or self.writer.closed:
                return
            self.owner.state = self.copy()
        if not self.step(self.owner) and self.random.random() < 0.02:
            self.counts["deaths"] += 1
            self.replace_owner()

    # -- one request -------------------------------------------------------------------------------------------------

    def step(self, owner: Owner) -> bool:
        """Returns whether that was the last one."""
        if owner.running is None:
            owner.running, owner.answer, owner.planned_at = self.rules.collect(owner), None, owner.state.slot
        try:
            request = log.resume(owner.running, owner.answer)
        except StopIteration as end:
            self.note_end(end.value)
        except StoreUnavailable:
            self.counts["given up"] += 1
        except SlotTaken:
            self.counts["fenced"] += 1
        except StoreDamaged as error:
            self.counts["damaged"] += 1
            if not owner.client.name.startswith("opening"):
                raise Wrong(f"an owner finds damage: {error}") from error
        else:
            if isinstance(request, ListBelow):
                self.lag(owner)
            if isinstance(request, Delete):
                self.may_delete(owner)
            owner.answer = self.answer(owner, request)
            self.note_truth()
            return False
        owner.running = None
        self.fenced = [each for each in self.fenced if each is not owner or self.random.random() < 0.5]
        self.openings = [each for each in self.openings if each[0] is not owner]
        return True

    def note_end(self, result: object) -> None:
        if isinstance(result, Collected):
            self.counts["collections"] += 1
            for what in ("slots", "segments", "manifests", "batches"):
                self.counts[f"{what} collected"] += getattr(result, what)

    def answer(self, owner: Owner, request: log.Request) -> object:
        if isinstance(request, Delete) and self.random.random() < 0.1:  # its last one, and half done
            keys = [key for key in request.keys if self.random.random() < 0.5]
            self.store.delete_now(keys)
            return StoreUnavailable("the store", request.keys[0], "no answer in time")
        return log.ask(request, owner.client, lambda _: None)

    def lag(self, owner: Owner) -> None:
        """A listing is as old as it may be: it shows H of the last deletion, or a later manifest, and all readers."""
        owner.client.list_lag = self.random.choice((0, 3, 20))
        while owner.client.list_lag and not self._shows_enough(owner.client.list_lag):
            owner.client.list_lag -= 1

    def _shows_enough(self, lag: int) -> bool:
        found = garbage.sort_out(PREFIX, self.store.listing(lag))
        are_readers_there = all(name in found.readers for name, commits in self.commits.items() if commits)
        return are_readers_there and max(found.manifests, default=0) >= self.deleted_to

    def may_delete(self, owner: Owner) -> None:
        """A slot of his is in the log since he has planned."""
        after = self.moments[owner.planned_at :]
        if not any(at.header.nonce == owner.nonce for _, at in after):
            raise Wrong("one who may have been fenced deletes")

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        there = {key.removeprefix(PREFIX): data for key, (data, _) in self.store.objects.contents().items()}
        listed = self.listed_manifests()
        self.deleted_to = max(self.deleted_to, listed[0] if listed else 0)
        self._check_slots(there, listed)
        self._check_moments(there, listed)
        self._check_inbox(there)
        self.counts["void FENCEs seen"] += self._is_a_fence_void(there)
        for key in FOREIGN:
            self._must(key in there, f"{key} is gone")
        for name, commits in self.commits.items():
            if commits:
                self._must(outside_key(name, len(commits)) in there, f"the last commit of {name} is gone")
        named = {each.key for each in self.whole.segments}
        for name, needed in self.needed.items():
            self._must(needed <= named, f"the reader {name} needs {needed - named}, which the log names no more")
        self.counts["checks"] += 1

    def _is_a_fence_void(self, there: dict[str, bytes]) -> bool:
        """Whether an opening that was late has created one in a hole."""
        pairs = ((there.get(codec.slot_key(number)), data) for number, data in enumerate(self.writer.log, 1))
        return any(found not in (None, data) for found, data in pairs)

    @staticmethod
    def _must(holds: bool, otherwise: str) -> None:
        if not holds:
            raise Wrong(otherwise)

    def _check_slots(self, there: dict[str, bytes], listed: list[int]) -> None:
        """No FENCE is gone, and each manifest that is listed leads to the end."""
        for number, data in enumerate(self.writer.log, 1):
            found = there.get(codec.slot_key(number))
            if number in self.whole.fences or number > (listed[0] if listed else 0):
                self._must(found == data, f"slot {number} is gone, or another one")
        for number in listed:
            self._check_moment(there, number, f"manifest {number}")

    def _check_moment(self, there: dict[str, bytes], number: int, what: str) -> None:
        at = self.moments[number - 1][1]
        for each in at.tail:
            found = there.get(codec.slot_key(each.slot))
            self._must(found == self.writer.log[each.slot - 1], f"slot {each.slot} of the tail of {what} is gone")
        for segment in at.segments:
            self._must(segment.key in there, f"{segment.key} of {what} is gone")

    def _check_moments(self, there: dict[str, bytes], listed: list[int]) -> None:
        """Each moment of the history is read from a manifest before it, and the slots after that one."""
        first = self.first_promised()
        for number in {first, self.random.randint(first, len(self.moments))}:
            self.read_moment(number, max((each for each in listed if each <= number), default=0))
        for number in range(first, len(self.moments) + 1):
            begin = max((each for each in listed if each <= number), default=0)
            for each in range(begin + 1, number + 1):
                self._must(codec.slot_key(each) in there, f"slot {each} is gone, of the moment of slot {number}")
            self._check_moment(there, number, f"the moment of slot {number}")
            self.counts["moments"] += 1

    def first_promised(self) -> int:
        """The slot with which the log ended when the history begins; the first one, if it is younger."""
        since = max(self.lost_before_ms, self.now_ms - self.owner.history_ms)
        return max((number for number, (date, _) in enumerate(self.moments, 1) if date <= since), default=1)

    def read_moment(self, number: int, begin: int) -> None:
        """As a restore does it: from a manifest, slot after slot; and then on to the end."""
        store = self.store.client("guest")

        def steps() -> Steps[LogState]:
            at = (yield from log.read_manifest(PREFIX, begin)) if begin else None
            state = LogState(at)
            while state.slot < number:
                slot = yield from log.read_slot(PREFIX, state.slot + 1)
                self._must(slot is not None, f"slot {state.slot + 1} is gone, of the moment of slot {number}")
                assert slot is not None
                log.follow(PREFIX, state, slot)
            self._must(state.manifest() == self.moments[number - 1][1], f"slot {number} adds up to something else")
            return (yield from log.read_on(PREFIX, state))

        found = log.carry_out(steps(), store, lambda _: None)
        self._must(found.slot == self.whole.slot, f"from slot {number} on, slot {found.slot} is taken for the end")

    def _check_inbox(self, there: dict[str, bytes]) -> None:
        """A batch stays until it was taken in at all moments that can be restored: one of them may have half of it."""
        ledger = self.moments[self.first_promised() - 1][1].ledger
        taken = ledger.taken if ledger is not None else 0
        since = max(self.lost_before_ms, self.now_ms - self.owner.history_ms)
        for number, (date, keys) in enumerate(self.published, 1):
            if number > taken or date >= since:
                for key in keys:
                    self._must(key in there, f"{key} of batch {number} is gone; taken in: {taken}")
            if number == len(self.published):
                self._must(keys[0] in there, "the last batch is gone")
        for key, date in self.loose.items():
            self._must(key in there or date < self.now_ms - DAY_MS, f"{key} may still be published, and is gone")

    # -- who reads ---------------------------------------------------------------------------------------------------

    def visit(self) -> None:
        """Somebody begins to read at a manifest, and one who began before goes on, to the end."""
        for at in self.listed_manifests():
            self.guests.append(LogState(self.moments[at - 1][1]))
        if self.guests:
            self.read(self.guests.pop(self.random.randrange(len(self.guests))))
        self.read(None)

    def visit_all(self) -> None:
        for guest in self.guests:
            self.read(guest)
        self.read(None)

    def read(self, guest: LogState | None) -> None:
        """To the true end, or damage if what he began at is gone."""
        self.note_truth()
        began = guest.begun_at if guest is not None else None
        reading = log.read_end_surely(PREFIX, guest)
        try:
            found = log.carry_out(reading, self.store.client("guest"), lambda _: None)
        except StoreDamaged as error:
            self._must(began is not None and began < self.deleted_to, f"a reader finds damage: {error}")
            return
        self._must(found.slot == self.whole.slot, f"a reader takes slot {found.slot} for the end")
        self._must(found.manifest() == self.whole.manifest(), "a reader has read something else")
        self.counts["readers"] += 1
        self.counts["readers that began again"] += guest is not None and found is not guest


def explore(first_seed: int, worlds: int, rules: Rules, steps: int = 200) -> Counter[str]:
    """Run so many worlds. Raises ``Wrong`` with the seed of the first that is wrong."""
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + worlds):
        world = World(seed, rules)
        try:
            world.run(steps)
        except Wrong as error:
            raise Wrong(f"seed {seed}: {error}") from error
        counts.update(world.counts)
        counts["requests"] += world.store.requests
    return counts
