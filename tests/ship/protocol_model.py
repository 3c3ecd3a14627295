"""The protocol of the log as a model, explored in every interleaving: how slots are created, and what is collected.

Two clients open the log, append to it and collect garbage. Each step of a client is one request, and between two steps
any other may happen: pauses have any length. A create may be answered, be lost before or after it is carried out, or
land late. A listing may be as old as the promise allows: no older than the manifest up to which slots were deleted.

The model keeps the truth beside the store: what was first created in each slot. ``wrong`` says what must never be.
``explore`` visits every state that can be reached, and counts the ways to an end that lead through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

FENCE, DATA = "fence", "data"
OFF, LISTS, READS, SENDS, LOOKS, LISTS_AGAIN, OWNS, DELETES, FENCED = [
    "off",
    "lists",
    "reads",
    "sends",
    "looks",
    "lists-again",
    "owns",
    "deletes",
    "fenced",
]


class Entry(NamedTuple):
    """What is in a slot. ``version`` tells two gatherings of the same slot apart."""

    kind: str
    epoch: int
    writer: int
    version: int = 0


class Client(NamedTuple):
    """Where a client stands. ``slot``: the last one that it has read or decided. ``entry``: what it is sending."""

    at: str = OFF
    slot: int = 0
    epoch: int = 0
    entry: Entry | None = None
    appends: int = 0
    collects: int = 0
    openings: int = 0
    up_to: int = 0
    """The manifest that its plan deletes up to; while it sends: of the plan that waits for this slot."""


class World(NamedTuple):
    """The store, the truth, and the clients."""

    slots: tuple[Entry | None, ...] = ()
    truth: tuple[Entry, ...] = ()
    manifests: frozenset[int] = frozenset()
    deleted_to: int = 0
    late: frozenset[tuple[int, Entry]] = frozenset()
    acknowledged: frozenset[tuple[int, Entry]] = frozenset()
    faults: int = 0
    clients: tuple[Client, ...] = (Client(), Client())

    def read(self, slot: int) -> Entry | None:
        return self.slots[slot - 1] if slot <= len(self.slots) else None

    def create(self, slot: int, entry: Entry) -> World:
        """As the store does it: nothing happens if the slot is there."""
        if self.read(slot) is not None:
            return self
        slots = self.slots + (None,) * (slot - len(self.slots))
        world = self._replace(slots=(*slots[: slot - 1], entry, *slots[slot:]))
        return world._replace(truth=(*self.truth, entry)) if slot == len(self.truth) + 1 else world

    def of(self, number: int, client: Client) -> World:
        """With this client in place of another."""
        return self._replace(clients=(*self.clients[:number], client, *self.clients[number + 1 :]))


class Limits(NamedTuple):
    """How much the clients do: what is left out grows the model beyond all bounds."""

    appends: int = 2
    collects: int = 1
    openings: int = 2
    faults: int = 1
    slots: int = 7


class Model:
    """The rules. A planted fault is a subclass with one of them changed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def steps(self, world: World) -> Iterator[World]:
        """Every world that is one step away."""
        for number, client in enumerate(world.clients):
            step = getattr(self, client.at.replace("-", "_"))
            yield from step(world, number, client)
        for slot, entry in world.late:
            yield world._replace(late=world.late - {(slot, entry)}).create(slot, entry)

    # -- opening -------------------------------------------------------------------------------------------------------

    def off(self, world: World, number: int, client: Client) -> Iterator[World]:
        if client.openings < self.limits.openings:
            yield world.of(number, client._replace(at=LISTS, openings=client.openings + 1))

    def listed(self, world: World) -> set[int]:
        """The newest manifests that a listing may show: it is younger than the deletion of what was before one."""
        return {slot for slot in world.manifests if slot >= world.deleted_to} or {0}

    def lists(self, world: World, number: int, client: Client) -> Iterator[World]:
        for slot in self.listed(world):
            epoch = world.truth[slot - 1].epoch if slot else 0
            yield world.of(number, client._replace(at=READS, slot=slot, epoch=epoch))

    def reads(self, world: World, number: int, client: Client) -> Iterator[World]:
        entry = world.read(client.slot + 1)
        if entry is not None:
            yield world.of(number, client._replace(slot=client.slot + 1, epoch=entry.epoch))
        elif client.slot + 1 < self.limits.slots:
            yield world.of(number, client._replace(at=SENDS, entry=Entry(FENCE, client.epoch + 1, number)))

    # -- appending -----------------------------------------------------------------------------------------------------

    def sends(self, world: World, number: int, client: Client) -> Iterator[World]:
        slot, entry = client.slot + 1, client.entry
        assert entry is not None
        done = world.create(slot, entry)
        created = done is not world
        yield self.decided(done, number, client) if created else done.of(number, client._replace(at=LOOKS))
        if world.faults < self.limits.faults:
            doubt = client._replace(at=LOOKS)
            for after in (world, done, world._replace(late=world.late | {(slot, entry)})):
                yield after._replace(faults=world.faults + 1).of(number, doubt)

    def looks(self, world: World, number: int, client: Client) -> Iterator[World]:
        """The slot exists, or nobody knows: read it ."""
        entry = world.read(client.slot + 1)
        if entry is None:
            yield world.of(number, client._replace(at=SENDS, entry=self.again(client)))
        elif entry == client.entry:
            yield self.decided(world, number, client)
        elif client.entry is not None and client.entry.kind == FENCE:
            yield world.of(number, client._replace(at=READS, entry=None))
        else:
            yield world.of(number, client._replace(at=FENCED, entry=None))

    def again(self, client: Client) -> Entry | None:
        """What is sent again: the same bytes ."""
        return client.entry

    def decided(self, world: World, number: int, client: Client) -> World:
        entry, slot = client.entry, client.slot + 1
        assert entry is not None
        client = client._replace(slot=slot, epoch=entry.epoch, entry=None)
        if entry.kind == FENCE:
            return world.of(number, client._replace(at=self.after_fence()))
        world = world._replace(acknowledged=world.acknowledged | {(slot, entry)})
        return world.of(number, client._replace(at=DELETES if client.up_to else OWNS))

    def after_fence(self) -> str:
        return LISTS_AGAIN

    def lists_again(self, world: World, number: int, client: Client) -> Iterator[World]:
        """A manifest of this slot or a higher one: our FENCE stands in a hole. Begin again."""
        for slot in self.listed(world):
            is_void = slot >= client.slot
            yield world.of(number, client._replace(at=OFF if is_void else OWNS))

    # -- owning --------------------------------------------------------------------------------------------------------

    def owns(self, world: World, number: int, client: Client) -> Iterator[World]:
        entry = Entry(DATA, client.epoch, number)
        if client.slot + 1 < self.limits.slots:
            if client.appends < self.limits.appends:
                yield world.of(number, client._replace(at=SENDS, entry=entry, appends=client.appends + 1))
            for slot in self.listed(world) if client.collects < self.limits.collects else ():
                if slot:
                    plan = client._replace(at=self.after_plan(), entry=entry, collects=client.collects + 1, up_to=slot)
                    yield world.of(number, plan)
        if client.slot not in world.manifests:
            yield world._replace(manifests=world.manifests | {client.slot})
        yield world.of(number, Client(openings=client.openings, appends=client.appends, collects=client.collects))

    def after_plan(self) -> str:
        """The plan is made; a slot of this epoch is created before anything is deleted."""
        return SENDS

    def deletes(self, world: World, number: int, client: Client) -> Iterator[World]:
        slots = tuple(
            entry if slot > client.up_to or entry is None or self.stays(entry) else None
            for slot, entry in enumerate(world.slots, 1)
        )
        deleted_to = max(world.deleted_to, client.up_to)
        manifests = frozenset(slot for slot in world.manifests if slot >= deleted_to)
        world = world._replace(slots=slots, deleted_to=deleted_to, manifests=manifests)
        yield world.of(number, client._replace(at=OWNS, up_to=0, entry=None))

    def stays(self, entry: Entry) -> bool:
        """FENCEs are never deleted."""
        return entry.kind == FENCE

    def fenced(self, world: World, number: int, client: Client) -> Iterator[World]:
        """It opens the log once more."""
        yield from self.off(world, number, client)


def wrong(world: World) -> str:
    """What must never be; empty if all is well."""
    epoch = 0
    for slot, entry in enumerate(world.truth, 1):
        if entry.epoch != epoch + (entry.kind == FENCE):
            return f"slot {slot}: {entry} follows epoch {epoch}"
        epoch = entry.epoch
        if entry.kind == FENCE and world.read(slot) != entry:
            return f"slot {slot}: the FENCE is gone, or another one: {world.read(slot)}"
        if slot > world.deleted_to and world.read(slot) != entry:
            return f"slot {slot}: it was {entry}, and is {world.read(slot)}"
    for slot, entry in world.acknowledged:
        if world.truth[slot - 1 : slot] != (entry,):
            return f"slot {slot}: {entry} was acknowledged, and is not in the log"
    for client in world.clients:
        if client.at in (OWNS, DELETES) and world.truth[client.slot - 1].epoch != client.epoch:
            return f"slot {client.slot}: {client} owns what is not its own"
    return ""


class Explored(NamedTuple):
    """``interleavings``: the ways from the beginning to an end, each through ``states`` that were all checked."""

    states: int
    interleavings: int
    wrong: str
    seen: frozenset[str] = frozenset()
    at: World | None = None


def explore(model: Model) -> Explored:
    """Visit every world that can be reached. Stops at the first that is wrong."""
    begin = World()
    ways: dict[World, int] = {}
    seen: set[str] = set()
    stack: list[tuple[World, list[World] | None]] = [(begin, None)]
    while stack:
        world, following = stack.pop()
        if following is not None:
            ways[world] = sum(ways[each] for each in following if each in ways) or 1
            continue
        if world in ways:
            continue
        if found := wrong(world):
            return Explored(len(ways), 0, found, frozenset(seen), world)
        ways[world] = 0  # on its way: a circle does not count
        seen.update(client.at for client in world.clients)
        if len({entry.writer for _, entry in world.acknowledged}) == len(world.clients):
            seen.add("all have appended")
        if world.deleted_to:
            seen.add("deleted")
        after = list(model.steps(world))
        stack.append((world, after))
        stack.extend((each, None) for each in after if each not in ways)
    return Explored(len(ways), ways[begin], "", frozenset(seen))
