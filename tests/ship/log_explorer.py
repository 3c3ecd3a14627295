"""The log on a simulated store: clients that open it, append to it and collect garbage, in an order that a seed draws.

Each client is a generator of requests (``kestrelpy.ship.log``), so between any two of its requests others may go on,
for as long as they like. A request may be lost, be carried out twice, or land late; listings lag, but not beyond the
last deletion. A client that dies forgets everything, and opens the log again.

The truth is what was first created in each slot, and in the order of slots. ``World.check`` says what must hold.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy.ship import StoreUnavailable, log
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.log import Create, ListBelow, Opening, Request, SlotTaken, Steps
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import DATA, FENCE, Slot, SlotHeader
from kestrelpy.testing.stores import Fault, SimulatedClient, SimulatedStore
from kestrelpy.testing.stores import Request as Sent

PREFIX = "jobs/"
QUEUE_ID = bytes(range(16))
FAULTS = (Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE, Fault.LATE)


class Wrong(AssertionError):
    """What must never be."""


class World:
    """A store, its clients, and what truly happened. ``owner`` makes a client."""

    owner: Callable[[World, int], Owner]

    def __init__(self, seed: int, clients: int = 3) -> None:
        self.random = random.Random(seed)
        self.fault_rate = self.random.choice((0.0, 0.1, 0.4))
        self.store = SimulatedStore()
        self.store.before_request = self._fault
        self.truth: list[bytes] = []
        self.acknowledged: dict[int, bytes] = {}
        self.deleted_to = 0
        self.counts: Counter[str] = Counter()
        self.clients = [self.owner(self, number) for number in range(clients)]

    def _fault(self, request: Sent) -> Fault:
        del request
        return self.random.choice(FAULTS) if self.random.random() < self.fault_rate else Fault.NONE

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice(self.clients).step()
            if self.random.random() < 0.05:
                self.store.clock.advance(self.random.choice((1, 30, 600)))
            self.note_truth()
        self.store.before_request = lambda _: Fault.NONE
        self.store.clock.advance(3600)
        self.note_truth()
        self.check()

    def note_truth(self) -> None:
        """A late request may have created several: each is looked for where the truth ends."""
        while (data := self.store.objects.read(PREFIX + codec.slot_key(len(self.truth) + 1))) is not None:
            self.truth.append(data)

    def lag(self, client: SimulatedClient) -> None:
        """Its next listing is as old as it may be: it shows the manifest up to which was deleted."""
        client.list_lag = self.random.choice((0, 0, 1, 5, 20))
        while client.list_lag and not self._shows_the_last_deletion(client.list_lag):
            client.list_lag -= 1

    def _shows_the_last_deletion(self, lag: int) -> bool:
        key = PREFIX + manifests.manifest_key(self.deleted_to)
        return not self.deleted_to or any(each.key == key for each in self.store.listing(lag))

    def check(self) -> None:
        """One history, everything that was acknowledged is in it, and a newcomer reads just that."""
        whole = LogState()
        for number, data in enumerate(self.truth, 1):
            slot = codec.decode_slot(data)
            if slot is None:
                raise Wrong(f"slot {number} is no slot")
            objection = whole.apply(slot)
            if objection is not None:
                raise Wrong(f"slot {number}: {objection}")
            there = self.store.objects.read(PREFIX + codec.slot_key(number))
            if there != data and (slot.header.kind == FENCE or number > self.deleted_to):
                raise Wrong(f"slot {number} is gone, or another one")
        for number, data in self.acknowledged.items():
            if self.truth[number - 1 : number] != [data]:
                raise Wrong(f"slot {number} was acknowledged, and is not in the log")
        seen = log.carry_out(log.read_end(PREFIX), self.store.client("newcomer"), lambda _: None)
        if seen.slot != whole.slot or (whole.slot and seen.manifest() != whole.manifest()):
            raise Wrong(f"a newcomer reads up to slot {seen.slot}, of {whole.slot}")


class Owner:
    """A client that opens the log, and does what an owner does until it is fenced, or dies."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._random = world.random
        self._client = world.store.client(f"owner {number}")
        self._running: Steps[None] | None = None
        self._answer: object = None

    def step(self) -> None:
        """One request, or a death."""
        if self._running is None or self._random.random() < 0.01:
            self._running, self._answer = self._live(), None
        try:
            request = log.resume(self._running, self._answer)
        except StopIteration:
            self._running = None
        except StoreUnavailable:
            self._running = None
            self._world.counts["openings given up"] += 1
        else:
            self._answer = self._ask(request)

    def _ask(self, request: Request) -> object:
        if isinstance(request, ListBelow):
            self._world.lag(self._client)
        return log.ask(request, self._client, lambda _: None)

    def _live(self) -> Steps[None]:
        opening = Opening(
            QUEUE_ID, self._random.randbytes(16), "somebody", 0, self._world.store.clock.time_ns() // 10**6
        )
        state = yield from log.open_log(PREFIX, opening, lambda state: state.last_id + 1)
        self._world.counts["openings"] += 1
        self._acknowledge(state, None)
        try:
            while True:
                yield from self._random.choice((self._append, self._append, self._append, self._collect))(
                    state, opening
                )
        except SlotTaken as taken:
            self._world.counts["fenced"] += 1
            if taken.slot.header.nonce == opening.nonce:
                raise Wrong("an owner is fenced by itself") from None

    def _acknowledge(self, state: LogState, slot: Slot | None) -> None:
        """What ``append`` has returned for is in the log."""
        if slot is not None:
            self._world.acknowledged[state.slot] = codec.encode_slot(slot)
            self._world.counts["slots acknowledged"] += 1
        header = state.header
        assert header is not None
        if state.slot > len(self._world.truth):
            self._world.note_truth()
        truth = codec.decode_slot(self._world.truth[state.slot - 1])
        if truth is None or truth.header != header:
            raise Wrong(f"an owner believes that slot {state.slot} is its own")

    def _append(self, state: LogState, opening: Opening) -> Steps[None]:
        slot = data_slot(state, opening, self._random)
        yield from log.append(PREFIX, state, slot)
        self._acknowledge(state, slot)

    def _collect(self, state: LogState, opening: Opening) -> Steps[None]:
        """Write a manifest, or delete what is up to one, after a slot of its own."""
        if self._random.random() < 0.5:
            data = manifests.encode_manifest(state.manifest())
            try:
                yield Create(PREFIX + manifests.manifest_key(state.slot), data)
            except StoreUnavailable:
                return
            self._world.counts["manifests"] += 1
            return
        try:
            plan = yield from log.newest_manifest(PREFIX)
        except StoreUnavailable:
            return
        if plan <= self._world.deleted_to:
            return
        yield from log.append(PREFIX, state, Slot(log.empty_header(state, DATA, opening)))
        self._acknowledge(state, None)
        self._delete_up_to(plan)

    def _delete_up_to(self, plan: int) -> None:
        world = self._world
        world.deleted_to = max(world.deleted_to, plan)
        for number, data in enumerate(world.truth[:plan], 1):
            slot = codec.decode_slot(data)
            if slot is not None and self.is_deletable(slot):
                world.store.delete_now([PREFIX + codec.slot_key(number)])
        world.counts["collections"] += 1

    @staticmethod
    def is_deletable(slot: Slot) -> bool:
        return slot.header.kind != FENCE


World.owner = Owner


def data_slot(state: LogState, opening: Opening, rng: random.Random) -> Slot:
    """The next item, in the active segment or in the first one."""
    header = log.empty_header(state, DATA, opening)
    item = state.last_id + 1
    frames, marker, number, offset, crc = b"", header.marker, header.number, header.offset, header.segment_crc
    if not state.tail:
        marker, number, offset, crc = rng.getrandbits(31) + 1, 1, 0, 0
        frames = fmt.encode_header(fmt.SegmentHeader(marker, QUEUE_ID, number, item, 0, 0, 0, 0, 0))
    frames += fmt.encode_item(item, rng.randbytes(8), 1, None, item - 1, marker)
    place = SlotHeader(*header)._replace(
        marker=marker, number=number, offset=offset, segment_crc=crc32(frames, crc), length=len(frames), last_id=item
    )
    return Slot(place._replace(first_id=item), frames)


def explore(first_seed: int, worlds: int, steps: int = 150, make: Callable[[int], World] = World) -> Counter[str]:
    """Run so many worlds. Raises ``Wrong`` with the seed of the first that is wrong."""
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + worlds):
        world = make(seed)
        try:
            world.run(steps)
        except Exception as error:
            raise Wrong(f"seed {seed}: {error!r}") from error
        counts.update(world.counts)
        counts["requests"] += world.store.requests
    return counts
