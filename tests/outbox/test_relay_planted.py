"""Faults planted into the relay: the harness of ``relaying`` must find each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.inbox import Part
from kestrelpy.outbox import relay, relay_operations
from kestrelpy.outbox.relay import Relay, RelaySession
from tests.outbox.relaying import World, pointed_inbox, run_interrupted, run_schedule
from tests.support.budget import drawn

Plant = Callable[[pytest.MonkeyPatch], None]


def without(text: str, *statements: str) -> Plant:
    """Leave ``text`` out of statements."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for statement in statements:
            found = getattr(relay_operations, statement)
            assert text in found
            patch.setattr(relay_operations, statement, found.replace(text, ""))

    return plant


def a_new_number_on_repeat(patch: pytest.MonkeyPatch) -> None:
    """The batch is the same, and the queue takes it for another one."""

    def repeat(self: Relay, session: RelaySession) -> int | None:
        assert session.unfinished is not None
        session.last = session.unfinished
        return rewrite(self, session)

    patch.setattr(Relay, "_repeat", repeat)


def rewrite(self: Relay, session: RelaySession) -> int | None:
    """As the relay does it with a batch that is not sealed."""
    part = session.part if session.sealed is None else session.sealed.name
    if part is not None:
        self._discard(Part(part, 1, 0, 0))
    return self._rewrite(session)


def jobs_chosen_again_on_repeat(patch: pytest.MonkeyPatch) -> None:
    """The batch keeps its number, and has whatever is due by now."""
    begin_again = relay_operations.begin_again

    def choose(sql: Any, lease: Any, *, number: int, **options: Any) -> Any:
        give_back = "UPDATE {jobs} SET status = 'ready', relay_batch = NULL" + relay_operations._OF_BATCH
        yield sql(give_back), {**lease.parameters(sql), "number": number}
        rows = yield from relay_operations._pick(sql, lease.parameters(sql), 3)
        ids = sql.flavour.list_of([row[0] for row in rows])
        yield (
            sql(relay_operations._ASSIGN + "id"),
            {**lease.parameters(sql), "number": number, "ids": ids},
        )
        return (yield from begin_again(sql, lease, number=number, **options))

    patch.setattr(relay_operations, "begin_again", choose)
    patch.setattr(Relay, "_repeat", rewrite)


def marked_before_it_is_published(patch: pytest.MonkeyPatch) -> None:
    publish, finish = Relay._publish, Relay._finish
    finished: dict[int, int | None] = {}

    def finish_and_publish(self: Relay, session: RelaySession, part: Any) -> bool:
        number = session.unfinished
        assert number is not None
        finished[number] = finish(self, session)
        session.unfinished = number
        return publish(self, session, part)

    def finish_late(self: Relay, session: RelaySession) -> int | None:
        number, session.unfinished = session.unfinished, None
        return finished[number or 0]

    patch.setattr(Relay, "_publish", finish_and_publish)
    patch.setattr(Relay, "_finish", finish_late)


def the_lease_is_nobodys(patch: pytest.MonkeyPatch) -> None:
    """Every process takes itself for the owner."""
    without(" AND (owner = :owner OR owner IS NULL OR until_ms <= {now})", "_TAKE")(patch)
    without(" AND owner = :owner", "_RENEW", "_NUMBER", "_SEAL", "_FINISH")(patch)

    def state(sql: Any, lease: Any) -> Any:
        return (yield sql(relay_operations._STATE), lease.parameters(sql))[0]

    patch.setattr(relay_operations, "_own_state", state)

    def peek(_sql: Any, _lease: Any) -> Any:
        return False
        yield

    patch.setattr(relay_operations, "peek_relay", peek)


def numbers_that_begin_again(patch: pytest.MonkeyPatch) -> None:
    """Each process counts from 1, and takes False for "published already"."""
    open_relay = relay_operations.open_relay

    def start(sql: Any, lease: Any, app_id: str) -> Any:
        state = yield from open_relay(sql, lease, app_id)
        if state is not None and state.unfinished is None:
            yield sql("UPDATE {relays} SET batch = 0 WHERE name = :name"), {"name": lease.name}
        return state

    publish = Relay._publish
    patch.setattr(relay_operations, "open_relay", start)
    patch.setattr(relay, "last_version", lambda *_, **__: None)
    patch.setattr(Relay, "_publish", lambda self, session, part: publish(self, session, part) or True)


def published_without_a_seal(patch: pytest.MonkeyPatch) -> None:
    """Each attempt publishes what it has encoded itself."""
    without(", sealed = :sealed", "_SEAL")(patch)


def sealed_by_who_has_lost_the_lease(patch: pytest.MonkeyPatch) -> None:
    without(" AND owner = :owner", "_SEAL")(patch)
    without(" AND part = :part AND sealed IS NULL", "_SEAL")(patch)


def finished_whatever_publish_says(patch: pytest.MonkeyPatch) -> None:
    """An error of the disk is taken for success."""
    publish = Relay._publish

    def careless(self: Relay, session: RelaySession, part: Any) -> bool:
        try:
            return publish(self, session, part)
        except RuntimeError:
            return True

    patch.setattr(Relay, "_publish", careless)


def parts_that_are_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Relay, "_discard", lambda *_: None)


def poison_that_leaves_a_sealed_batch(patch: pytest.MonkeyPatch) -> None:
    """A sealed batch is written anew, and jobs leave it that may have been published."""
    patch.setattr(Relay, "_repeat", rewrite)


def lanes_that_nobody_looks_at(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(_sql: Any, _parameters: Any, picked: Any, _lanes: Any) -> Any:
        return picked, []
        yield

    patch.setattr(relay_operations, "_in_order_of_lanes", all_of_them)


def interrupted_anywhere(engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        goes_on = False
        for how in ("kill", "error"):
            world = World(engine, f"{how}-{at}")
            with monkeypatch.context() as patch:
                pointed_inbox(world, patch)
                plant(patch)
                world.put(7)
                goes_on |= run_interrupted(world, at, how)
                world.check()


def two_relays(engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    for seed in range(20):
        world = World(engine, f"events-{seed}")
        with monkeypatch.context() as patch:
            pointed_inbox(world, patch)
            plant(patch)
            counts = run_schedule(world, seed, share_of_poison=0.2, lets_be=(OSError,))
            world.check(late=counts["kills"])


PLANTED: dict[str, tuple[Plant, Callable[..., None], str]] = {
    f"{plant.__name__}-{hunt.__name__}": (plant, hunt, complaint)
    for plant, hunt, complaint in (
        (a_new_number_on_repeat, interrupted_anywhere, "twice"),
        (jobs_chosen_again_on_repeat, interrupted_anywhere, "twice"),
        (marked_before_it_is_published, interrupted_anywhere, "missing"),
        (the_lease_is_nobodys, interrupted_anywhere, "lease"),
        (the_lease_is_nobodys, two_relays, "twice|missing"),
        (numbers_that_begin_again, interrupted_anywhere, "missing"),
        (published_without_a_seal, interrupted_anywhere, "twice"),
        (sealed_by_who_has_lost_the_lease, two_relays, "twice"),
        (finished_whatever_publish_says, interrupted_anywhere, "missing"),
        (parts_that_are_left, interrupted_anywhere, "parts"),
        (poison_that_leaves_a_sealed_batch, interrupted_anywhere, "twice"),
        (lanes_that_nobody_looks_at, two_relays, "a lane"),
    )
}


@pytest.mark.parametrize("name", drawn(PLANTED, 4))
def test_planted_faults_are_found(sqlite_url: str, monkeypatch: pytest.MonkeyPatch, name: str, quiet: None) -> None:
    plant, hunt, complaint = PLANTED[name]
    engine = sqlalchemy.create_engine(sqlite_url)
    with pytest.raises(AssertionError, match=complaint):
        hunt(engine, monkeypatch, plant)
    engine.dispose()
