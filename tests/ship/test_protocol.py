"""The protocol of the log keeps its promises in every interleaving, and each planted change of it is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ship import protocol_model as protocol
from tests.ship.protocol_model import Client, Entry, Limits, Model, World, explore
from tests.support.budget import Tally, takes_long

EVERYTHING = {
    *(protocol.OFF, protocol.LISTS, protocol.READS, protocol.SENDS, protocol.LOOKS),
    *(protocol.LISTS_AGAIN, protocol.OWNS, protocol.DELETES, protocol.FENCED),
}


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Limits(appends=1, collects=1, openings=1, faults=1, slots=6), id="a request goes wrong"),
        pytest.param(Limits(1, 1, 2, 0, 6), id="they open the log again", marks=takes_long),
        pytest.param(Limits(2, 0, 1, 2, 6), id="two requests go wrong", marks=takes_long),
    ],
)
def test_every_interleaving(limits: Limits, tally: Tally) -> None:
    found = explore(Model(limits))
    assert not found.wrong, found
    assert found.interleavings >= 1_000_000
    assert found.seen >= {"all have appended"} | (EVERYTHING | {"deleted"} if limits.collects else set())
    tally.add("states of the log's protocol", found.states)


class FencesAreCollected(Model):
    def stays(self, entry: Entry) -> bool:
        del entry
        return False


class AFenceInAHoleCounts(Model):
    def after_fence(self) -> str:
        return protocol.OWNS


class OnlyAHigherManifestIsAHole(Model):
    """As the first sketch of the protocol had it."""

    def lists_again(self, world: World, number: int, client: Client) -> Iterator[World]:
        for slot in self.listed(world):
            yield world.of(number, client._replace(at=protocol.OFF if slot > client.slot else protocol.OWNS))


class ARetryIsGatheredAgain(Model):
    def again(self, client: Client) -> Entry | None:
        return client.entry and client.entry._replace(version=client.entry.version + 1)


class WhatExistsIsOurs(Model):
    def looks(self, world: World, number: int, client: Client) -> Iterator[World]:
        if world.read(client.slot + 1) is not None:
            yield self.decided(world, number, client)
        else:
            yield from super().looks(world, number, client)


class ADoubtIsSuccess(Model):
    def looks(self, world: World, number: int, client: Client) -> Iterator[World]:
        yield self.decided(world, number, client)


class DeletesWithoutASlotOfItsOwn(Model):
    def after_plan(self) -> str:
        return protocol.DELETES


class ListingsOlderThanTheHistory(Model):
    """Not promised, and so a client that meets one may go wrong."""

    def listed(self, world: World) -> set[int]:
        return {0, *world.manifests}


class AnyFirstEpoch(Model):
    """An opening that does not say that it is another one."""

    def reads(self, world: World, number: int, client: Client) -> Iterator[World]:
        for after in super().reads(world, number, client):
            opened = after.clients[number]
            if opened.entry is not None and client.epoch:
                opened = opened._replace(entry=opened.entry._replace(epoch=client.epoch))
            yield after.of(number, opened)


@pytest.mark.parametrize("planted", Model.__subclasses__())
def test_a_planted_change_is_found(planted: type[Model], tally: Tally) -> None:
    assert explore(planted(Limits(appends=1, collects=1, openings=1, faults=1, slots=6))).wrong
    tally.add("planted faults caught", 1)
