"""Garbage: what is needed stays, over random worlds, what is not goes, and each planted fault is found."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kestrelpy._journal.format import Checkpoint
from kestrelpy.inbox.format import BatchPart, LedgerState, PublishedBatch, encode_batch_file
from kestrelpy.ship import Listed, StoreDamaged, StoreUnavailable, garbage, log
from kestrelpy.ship import slots as codec
from kestrelpy.ship.garbage import DAY_MS, Collected, Found, Plan, Survey
from kestrelpy.ship.log import Delete, SlotTaken, Steps
from kestrelpy.ship.manifest import LogState, encode_manifest, manifest_key
from kestrelpy.ship.outside_reader import OutsideReader, encode_outside, outside_key
from kestrelpy.ship.slots import DATA, DroppedReader, ShippedLedger
from kestrelpy.testing.stores import Fault, MemoryStore
from tests.ship.garbage_explorer import FOREIGN, HOUR_MS, Changed, Owner, Rules, World, explore
from tests.ship.log_explorer import PREFIX, Wrong
from tests.ship.logs import QUEUE_ID, random_log, slots_of
from tests.support.budget import SEED, Tally, share


@pytest.mark.parametrize("part", range(8))
def test_worlds(part: int, tally: Tally) -> None:
    worlds = share(300)
    counts = explore(SEED * 1_000_000 + part * 100_000, worlds, Rules())
    for what in ("collections", "given up", "slots collected", "readers that began again"):
        assert counts[what] >= worlds, counts
    for what in (
        "manifests collected",
        "deaths",
        "fenced",
        "segments collected",
        "batches collected",
        "void FENCEs seen",
    ):
        assert counts[what] >= worlds // 50, counts
    tally.add("requests of shipping to a simulated store", counts["requests"])
    tally.add("moments that garbage collection has left readable", counts["moments"])
    tally.add("readers that garbage collection has overtaken", counts["readers that began again"])


# -- planted faults --------------------------------------------------------------------------------------------------

PLANTED: dict[str, type[Changed]] = {}


def planted(name: str) -> Callable[[type[Changed]], type[Changed]]:
    def plant(fault: type[Changed]) -> type[Changed]:
        return PLANTED.setdefault(name, fault)

    return plant


@planted("fence_collected")
class FenceCollected(Changed):
    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        last = seen.begin.header.slot if seen.begin is not None else 0
        fences = (each for number, each in seen.found.slots.items() if number in owner.state.fences and number <= last)
        return made._replace(slots=(*made.slots, *fences))


@planted("ages_by_own_clock")
class AgesByOwnClock(Changed):
    """It is two days ahead."""

    def collect(self, owner: Owner) -> Steps[Collected]:
        ahead = 2 * DAY_MS
        history = owner.history_ms - ahead
        seen = yield from garbage.survey(PREFIX, owner.state, history_ms=history, known=owner.known)
        seen = seen._replace(now_ms=seen.now_ms + ahead)
        made = garbage.plan(owner.state, seen, history_ms=owner.history_ms, keep_ms=owner.keep_ms)
        yield from owner.append(made)
        return (yield from garbage.delete(made))


@planted("delete_after_fenced")
class DeleteAfterFenced(Changed):
    def append(self, owner: Owner, made: Plan) -> Steps[None]:
        try:
            yield from super().append(owner, made)
        except SlotTaken:
            return


@planted("tail_of_h_collected")
class TailOfHCollected(Changed):
    def seen(self, owner: Owner, seen: Survey) -> Survey:
        return seen._replace(begin=seen.begin._replace(tail=())) if seen.begin is not None else seen


@planted("needed_segment_collected")
class NeededSegmentCollected(Changed):
    """Readers outside are not asked."""

    def seen(self, owner: Owner, seen: Survey) -> Survey:
        return seen._replace(passed={})


class ByTheEndOfTheLog(Changed):
    """The batches that the log has taken in by now, and not by H. ``age_ms``: how old they have to be."""

    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        if seen.begin is None:
            return made
        now = seen._replace(begin=seen.begin._replace(ledger=owner.state.ledger))
        batches, parts = garbage._of_the_inbox(now, self.age_ms(owner))
        return made._replace(batches=batches, parts=parts)

    def age_ms(self, owner: Owner) -> int:
        return -1


@planted("taken_batch_too_early")
class TakenBatchTooEarly(ByTheEndOfTheLog):
    """As soon as it was taken in, and not when it is older than the history."""


@planted("batch_of_a_moment_collected")
class BatchOfAMomentCollected(ByTheEndOfTheLog):
    """It is old and was taken in, and at a moment of the history only half of it was."""

    def age_ms(self, owner: Owner) -> int:
        return owner.history_ms


@planted("batch_before_it_is_taken")
class BatchBeforeItIsTaken(Changed):
    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        old = (each for each in seen.found.batches.values() if seen.is_older(each, owner.history_ms))
        return made._replace(batches=tuple(old)[:-1])


@planted("segment_of_a_moment_collected")
class SegmentOfAMomentCollected(Changed):
    """What the log names no more, though H does."""

    def seen(self, owner: Owner, seen: Survey) -> Survey:
        return seen._replace(begin=seen.begin._replace(segments=seen.begin.segments[-1:])) if seen.begin else seen


@planted("forgotten_since_collected")
class ForgottenSinceCollected(Changed):
    """What neither H nor the log names, but was closed in between."""

    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        begin = seen.begin.segments if seen.begin is not None else ()
        named = {each.key for each in (*begin, *owner.state.segments)}
        return made._replace(segments=tuple(each for key, each in seen.found.segments.items() if key not in named))


@planted("own_upload_collected")
class OwnUploadCollected(Changed):
    """An upload whose SEAL is not in the log yet."""

    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        last = max((each.number for each in owner.state.segments), default=0)
        old = (each for each in seen.found.segments.items() if seen.is_older(each[1], owner.history_ms))
        pending = (each for key, each in old if (codec.parse_segment_key(key) or (0,))[0] > last)
        return made._replace(segments=tuple({*made.segments, *pending}))


@planted("slots_before_manifests")
class SlotsBeforeManifests(Changed):
    def collect(self, owner: Owner) -> Steps[Collected]:
        seen = yield from garbage.survey(PREFIX, owner.state, history_ms=owner.history_ms, known=owner.known)
        made = self.plan(owner, seen)
        yield from owner.append(made)
        yield from garbage.delete(made._replace(manifests=()))
        return (yield from garbage.delete(made))


@planted("shared_part_collected")
class SharedPartCollected(Changed):
    """A part of a batch that goes, though one that stays names it too."""

    def plan(self, owner: Owner, seen: Survey) -> Plan:
        made = super().plan(owner, seen)
        going = {key for each in made.batches for key in owner.known[each] or ()}
        return made._replace(parts=tuple(each for key, each in seen.found.parts.items() if key in going))


@planted("part_before_it_is_published")
class PartBeforeItIsPublished(Changed):
    def plan(self, owner: Owner, seen: Survey) -> Plan:
        named = set().union(*(parts or () for parts in seen.named.values()))
        made = super().plan(owner, seen)
        return made._replace(parts=tuple(each for key, each in seen.found.parts.items() if key not in named))


@planted("all_commits_collected")
class AllCommitsCollected(Changed):
    def plan(self, owner: Owner, seen: Survey) -> Plan:
        commits = (each for every in seen.found.readers.values() for each in every.values())
        return super().plan(owner, seen)._replace(readers=tuple(commits))


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_is_found(name: str, tally: Tally) -> None:
    with pytest.raises(Wrong):
        explore(1, 1_000, PLANTED[name]())
    tally.add("planted faults caught", 1)


def test_the_same_in_steps_has_no_fault() -> None:
    explore(1, share(200), Changed())


# -- what goes -------------------------------------------------------------------------------------------------------


def calm(seed: int = 1) -> World:
    """A world in which nothing goes wrong, with an owner who keeps an hour."""
    world = World(seed, Rules())
    world.fault_rate = 0.0
    world.writer.damaged, world.writer.least = 0.0, 1
    settle(world)
    return world


def settle(world: World) -> None:
    world.fault_rate = 0.0
    world.replace_owner()
    world.owner.history_ms, world.owner.keep_ms, world.owner.oldest_here = HOUR_MS, 0, 1 << 62


def collected(world: World, **options: Any) -> Collected:
    """By the owner, without an end in the middle."""
    owner = world.owner
    owner.state = world.copy()
    about: dict[str, Any] = {"history_ms": owner.history_ms, "keep_ms": owner.keep_ms, "known": owner.known}
    steps = garbage.collect(PREFIX, owner.state, owner.append, **about | options)
    found = log.carry_out(steps, owner.client, lambda _: None)
    world.note_truth()
    world.check()
    return found


def checkpoint(world: World, head: int, name: str = "audit") -> Checkpoint:
    return Checkpoint(QUEUE_ID, name, head, 0, 5, 50, world.writer.number, 96, 1, 2)


def catch_up(world: World) -> None:
    """All readers are at the end, and all batches are taken in."""
    writer, last_id = world.writer, world.whole.last_id
    states = tuple(checkpoint(world, last_id, name) for name in {*world.whole.checkpoints, "audit"})
    writer.taken = len(world.published)
    writer.add(writer.slot(DATA, checkpoints=states, ledger=ShippedLedger.of(writer.taken, LedgerState())))
    for name, commits in world.commits.items():
        if commits:
            commits.append(last_id)
            commit = OutsideReader(QUEUE_ID, b"q" * 16, last_id)
            world.put(outside_key(name, len(commits)), encode_outside(commit))
            world.needed[name] = set()


def present(world: World) -> Found:
    return garbage.sort_out(PREFIX, world.store.objects.list(PREFIX))


@pytest.mark.parametrize("seed", range(20))
def test_in_the_end_all_garbage_is_gone(seed: int) -> None:
    world = World(seed, Rules())
    world.run(150)
    settle(world)
    world.writer.seal()
    catch_up(world)
    for _ in range(5):
        world.save_manifest()
        world.store.clock.advance(2 * DAY_MS / 1000)
        collected(world)
    left = present(world)
    oldest, _ = sorted(left.manifests)
    assert {number for number in left.slots if number <= oldest} == {
        each for each in world.whole.fences if each <= oldest
    }
    assert set(left.segments) == {each.key for each in world.whole.segments}
    assert len(left.segments) == 1
    assert set(left.batches) == ({len(world.published)} if world.published else set())
    assert set(left.parts) == {key for _, keys in world.published[-1:] for key in keys[1:]}
    assert {name: set(every) for name, every in left.readers.items()} == {
        name: {len(commits)} for name, commits in world.commits.items() if commits
    }
    assert left.probes == {}
    assert all(world.store.objects.read(PREFIX + key) == b"{}" for key in FOREIGN)


def grown(world: World, segments: int = 3) -> None:
    """So many closed segments more, an hour and more apart, with manifests between them."""
    for _ in range(segments):
        world.writer.data()
        world.writer.seal()
        world.save_manifest()
        world.store.clock.advance(4000)


def test_what_a_collection_counts() -> None:
    world = calm()
    grown(world)
    catch_up(world)
    before = present(world)
    first = collected(world)
    assert (first.segments, first.batches) == (0, 0)
    forgotten = world.whole.segments
    assert len(forgotten) == 1
    for _ in range(2):
        world.save_manifest()
        world.store.clock.advance(4000)
        catch_up(world)
    second = collected(world)
    after = present(world)
    assert second.segments == len(before.segments) - 1 == 2
    assert first.manifests + second.manifests == len({*before.manifests} - {*after.manifests})
    assert second.bytes > sum(before.segments[key].size_bytes for key in before.segments.keys() - after.segments.keys())


def test_without_an_old_manifest_nothing_of_the_log_goes() -> None:
    world = calm()
    world.writer.data()
    world.store.clock.advance(10 * DAY_MS / 1000)
    world.writer.data()
    world.save_manifest()
    assert collected(world) == Collected(0, 0, 0, 0, 0)
    world.store.clock.advance(10 * DAY_MS / 1000)
    world.writer.data()
    assert collected(world) == Collected(0, 0, 0, 0, 0)  # it is old now, and the only one: two stay


def test_a_manifest_of_another_log_leads_to_nothing() -> None:
    """It is whole, and under the number of H; but its tail and its segments are not those of this log."""
    world, other = calm(), random_log(5)
    grown(world)
    world.store.clock.advance(10 * DAY_MS / 1000)
    world.writer.data()
    found = present(world).manifests
    number = sorted(found)[-2]
    state = LogState()
    for slot in slots_of(other.log)[:number]:
        assert state.apply(slot) is None
    objects = world.store.objects.contents()
    objects[found[number].key] = encode_manifest(state.manifest()), found[number].modified_ms
    world.store.objects.replace_all(objects)
    with pytest.raises(StoreDamaged, match="another log"):
        collected(world)
    assert world.store.objects.contents() == objects


def test_keys_that_are_not_below_the_queue_are_left_alone() -> None:
    keys = (
        codec.slot_key(3), manifest_key(3), codec.segment_key(5, 1, bytes(16)), outside_key("spark", 2),
        "in/0000000000007.batch", f"in/{'0' * 32}.part", f"probe/{'0' * 32}",
    )  # fmt: skip
    whole = garbage.sort_out(PREFIX, [Listed(PREFIX + key, 1, 1) for key in keys])
    assert all(len(each) == 1 for each in whole)
    for before in ("", "other/", "/", "../", f"{PREFIX}{PREFIX}", PREFIX.upper(), f"{PREFIX}/", f"x{PREFIX}"):
        assert not any(garbage.sort_out(PREFIX, [Listed(before + key, 1, 1) for key in keys])), before


NEARLY = (
    "log/0000000000000000", "log/000000000000003", "log/00000000000000003", "log/0000000000000003/",
    "LOG/0000000000000003", "log/../log/0000000000000003", "log//0000000000000003", "log/0000000000000003\n",
    "log/000000000000000\u0663", "manifest/0000000000000000", "in/0000000000000.batch", "in/0000000000007.batch.tmp",
    f"in/{'A' * 32}.part", f"in/{'0' * 31}.part", f"probe/{'0' * 33}", "reader//0000000000001",
    "reader/../0000000000001", "reader/spark/0000000000000", "seg/0000000000005-0-00000000.segment", "queue.json", "",
    "log/" + "0" * (1 << 20),
)  # fmt: skip


def test_keys_that_are_nearly_those_of_a_queue_are_left_alone() -> None:
    """What is sorted out may be deleted."""
    for key in NEARLY:
        assert not any(garbage.sort_out(PREFIX, [Listed(PREFIX + key, 1, 1)])), key[:100]


def test_two_manifests_stay() -> None:
    world = calm()
    grown(world)
    world.store.clock.advance(10 * DAY_MS / 1000)
    world.writer.data()
    before = sorted(present(world).manifests)
    collected(world)
    assert sorted(present(world).manifests) == before[-2:]


def test_a_queue_at_rest_is_collected_too() -> None:
    """The slot of a collection is the clock of the next one."""
    world = calm()
    grown(world)
    world.owner.history_ms = 3 * HOUR_MS
    world.store.clock.advance(10 * DAY_MS / 1000)
    assert collected(world) == Collected(0, 0, 0, 0, 0)
    assert collected(world).manifests == 1


def test_a_date_in_the_future_makes_nothing_old() -> None:
    world = calm()
    grown(world, 1)
    world.writer.data()
    world.save_manifest()
    objects = world.store.objects.contents()
    future = world.now_ms + 100 * DAY_MS
    objects[PREFIX + "probe/" + 32 * "0"] = b"", future
    objects[PREFIX + f"in/{32 * '0'}.part"] = b"", future
    objects[PREFIX + codec.slot_key(world.whole.slot + 1000)] = b"", future
    world.store.put_back(objects)
    world.owner.history_ms = 2 * HOUR_MS
    assert collected(world) == Collected(0, 0, 0, 0, 0)


def test_the_history_begins_after_h() -> None:
    """A manifest that is just as old as the history is not older."""
    world = calm()
    grown(world, 2)
    world.writer.data()
    for history_ms, is_older in ((8_000_000, False), (7_999_999, True)):
        steps = garbage.survey(PREFIX, world.whole, history_ms=history_ms)
        seen = log.carry_out(steps, world.owner.client, lambda _: None)
        assert (seen.begin is not None) == is_older


def test_a_manifest_after_the_own_slots_is_not_looked_at() -> None:
    world = calm()
    early = world.copy()
    grown(world, 4)
    old_enough = -10 * DAY_MS  # whatever its date is
    seen = log.carry_out(garbage.survey(PREFIX, early, history_ms=old_enough), world.owner.client, lambda _: None)
    assert seen.begin is None
    assert len(seen.found.manifests) == 4
    seen = log.carry_out(garbage.survey(PREFIX, world.whole, history_ms=old_enough), world.owner.client, lambda _: None)
    assert seen.begin is not None


@pytest.mark.parametrize(("epochs_ago", "hours", "is_gone"), [(0, 1000, False), (1, 3, False), (1, 5, True)])
def test_an_upload_that_is_not_closed(epochs_ago: int, hours: int, is_gone: bool) -> None:
    """One of this epoch stays: its SEAL may be under way. Nobody can close an earlier one: it goes when it is old."""
    world = calm()
    grown(world)
    world.owner.keep_ms = 3 * HOUR_MS
    key = codec.segment_key(world.writer.number + 1, world.writer.epoch - epochs_ago, world.writer.nonce)
    world.upload(key, 100)
    world.store.clock.advance(hours * 3600)
    world.writer.data()
    collected(world)
    assert (key not in present(world).segments) == is_gone


# -- what is not forgotten -------------------------------------------------------------------------------------------


def forgets(world: World, **options: Any) -> int:
    """How many segments the log forgets."""
    before = len(world.whole.segments)
    collected(world, **options)
    return before - len(world.whole.segments)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 3), ({"keep_ms": None}, 0), ({"keep_ms": 3 * HOUR_MS}, 2), ({"keep_ms": DAY_MS}, 0)],
)
def test_segments_are_kept(options: dict[str, Any], count: int) -> None:
    world = calm()
    grown(world, 4)
    catch_up(world)
    assert forgets(world, **options) == count


def test_a_segment_whose_age_is_not_known_is_not_forgotten() -> None:
    """A listing lags, and does not show it."""
    world = calm()
    grown(world, 4)
    catch_up(world)
    seen = log.carry_out(garbage.survey(PREFIX, world.whole, history_ms=1), world.owner.client, lambda _: None)
    assert garbage.plan(world.whole, seen, history_ms=1, keep_ms=0).forgets_below == world.whole.segments[2].number + 1
    del seen.found.segments[world.whole.segments[1].key]
    assert garbage.plan(world.whole, seen, history_ms=1, keep_ms=0).forgets_below == world.whole.segments[0].number + 1


def test_what_is_on_the_owner_s_disk_is_not_forgotten() -> None:
    world = calm()
    grown(world, 4)
    catch_up(world)
    assert forgets(world, oldest_here=world.whole.segments[1].number) == 1


def test_without_a_reader_nothing_is_forgotten() -> None:
    """Nobody has passed anything: the first reader may not have come yet."""
    world = calm()
    grown(world, 4)
    world.writer.add(world.writer.slot(DATA, checkpoints=tuple(map(DroppedReader, world.whole.checkpoints))))
    assert forgets(world) == 0


def test_a_segment_of_a_reader_is_not_forgotten() -> None:
    world = calm()
    grown(world, 4)
    catch_up(world)
    head = world.whole.segments[1].segment_footer().last_id
    world.writer.add(world.writer.slot(DATA, checkpoints=(checkpoint(world, head, "slow"),)))
    assert forgets(world) == 2


@pytest.mark.parametrize(
    ("commit", "count"),
    [
        (lambda at: encode_outside(OutsideReader(QUEUE_ID, b"q" * 16, at)), 2),
        (lambda at: encode_outside(OutsideReader(b"another queue, 1", b"q" * 16, 0)), 3),
        (lambda at: b"nonsense", 0),
    ],
    ids=["as far as it has come", "another queue's", "damaged"],
)
def test_a_reader_outside(commit: Callable[[int], bytes], count: int) -> None:
    world = calm()
    grown(world, 4)
    catch_up(world)
    head = world.whole.segments[1].segment_footer().last_id
    world.put(outside_key("spark", 1), commit(head))
    assert forgets(world) == count


# -- the inbox -------------------------------------------------------------------------------------------------------


def test_a_batch_is_read_once_and_a_damaged_one_keeps_all_parts() -> None:
    world = calm()
    asked: Counter[str] = Counter()
    world.store.before_request = lambda sent: asked.update([sent.key]) or Fault.NONE
    for _ in range(3):
        world.publish()
    world.put("in/0000000000004.batch", b"damaged")
    world.published.append((world.now_ms, ("in/0000000000004.batch",)))
    world.leave_something()
    catch_up(world)
    for _ in range(3):
        world.save_manifest()
        world.store.clock.advance(2 * DAY_MS / 1000)
        world.writer.beat()
        before = present(world)
        collected(world)
        assert present(world).parts == before.parts
        assert {each.key for each in world.owner.known} == {f"{PREFIX}in/{at:013d}.batch" for at in before.batches}
    assert set(present(world).batches) == {4}
    assert all(asked[f"{PREFIX}in/{number:013d}.batch"] <= 2 for number in (1, 2, 3, 4)), asked
    assert asked[f"{PREFIX}in/0000000000004.batch"] == 1


def test_a_batch_goes_with_its_parts_and_loose_ones_stay_for_a_day() -> None:
    world = calm()
    for number in (1, 2):
        part = BatchPart(bytes([number]) * 16, 1, 1, 1)
        batch = PublishedBatch(bytes([number]) * 16, number, "", 0, (part,))
        world.put(f"in/{part.part_id.hex()}.part", b"part")
        world.put(f"in/{number:013d}.batch", encode_batch_file(batch))
        world.published.append((world.now_ms, (f"in/{number:013d}.batch",)))
    world.leave_something()
    catch_up(world)
    world.save_manifest()
    world.writer.beat()
    world.save_manifest()
    last = {f"in/{'02' * 16}.part"}
    young = {f"in/{'01' * 16}.part", *last, *world.loose}
    for hours, parts, probes in ((2, young, 1), (20, young, 1), (3, last, 0)):
        world.store.clock.advance(hours * 3600)
        world.writer.beat()
        collected(world)
        left = present(world)
        assert set(left.batches) == {2}
        assert (set(left.parts), len(left.probes)) == (parts, probes)


def test_a_listing_that_shows_a_batch_that_is_gone_is_too_old_for_parts() -> None:
    """Another batch may name the same part, which the listing does not show yet."""
    world = calm()
    part = BatchPart(b"p" * 16, 1, 1, 1)
    first, second = (encode_batch_file(PublishedBatch(b"b" * 16, number, "", 0, (part,))) for number in (1, 2))
    world.put(f"in/{part.part_id.hex()}.part", b"part")
    world.put("in/0000000000001.batch", first)
    world.store.clock.advance(2 * DAY_MS / 1000)
    world.writer.beat()
    world.put("in/0000000000002.batch", second)
    world.store.delete_now([f"{PREFIX}in/0000000000001.batch"])
    world.owner.client.list_lag = 2
    seen = log.carry_out(garbage.survey(PREFIX, world.whole, history_ms=1), world.owner.client, lambda _: None)
    assert (set(seen.found.batches), len(seen.found.parts)) == ({1}, 1)
    assert garbage.plan(world.whole, seen, history_ms=1, keep_ms=0).parts == ()


def test_what_a_batch_names() -> None:
    batch = PublishedBatch(b"b" * 16, 1, "app", 1, (BatchPart(bytes(range(16)), 2, 3, 4),))
    assert garbage.parts_of(encode_batch_file(batch)) == frozenset({"in/000102030405060708090a0b0c0d0e0f.part"})
    assert garbage.parts_of(b"") is None


# -- how it is deleted -----------------------------------------------------------------------------------------------


def listed(kind: str, count: int) -> tuple[Listed, ...]:
    return tuple(Listed(f"{kind}/{number}", 1, 1) for number in range(count))


def test_each_kind_has_requests_of_its_own() -> None:
    made = Plan(0, **{kind: listed(kind, 1001) for kind in Plan._fields[1:]})
    sent: list[tuple[str, int]] = []

    class Noting(MemoryStore):
        def delete(self, keys: Iterable[str]) -> None:
            every = list(keys)
            (kind,) = {key.partition("/")[0] for key in every}
            sent.append((kind, len(every)))

    found = log.carry_out(garbage.delete(made), Noting(), lambda _: None)
    assert sent == [(kind, count) for kind in Plan._fields[1:] for count in (1000, 1)]
    assert Plan._fields[1:5] == ("manifests", "slots", "segments", "batches")
    assert found == Collected(1001, 1001, 1001, 1001, 7 * 1001)


@pytest.mark.parametrize("seed", range(5))
def test_it_may_end_at_any_request(seed: int) -> None:
    """With the half of that request done, or nothing of it; and the next owner deletes what is left."""
    for is_half_done in (False, True):
        left: set[str] = set()
        ends = 0
        while True:
            world = World(seed, Rules())
            world.fault_rate = 0.0
            world.run(80)
            settle(world)
            catch_up(world)
            world.save_manifest()
            world.store.clock.advance(DAY_MS / 1000)
            world.writer.beat()
            is_over = collect_until(world, ends, is_half_done=is_half_done)
            world.note_truth()
            world.check()
            world.visit_all()
            settle(world)
            collected(world)
            found = {each.key for each in world.store.objects.list(PREFIX)}
            left = left or found
            assert {key for key in found ^ left if "/log/" not in key} == set()
            ends += 1
            if is_over:
                break
        assert ends > 5


def collect_until(world: World, requests: int, *, is_half_done: bool) -> bool:
    """Carry out so many requests of a collection. Returns whether those were all."""
    owner = world.owner
    owner.state = world.copy()
    steps = garbage.collect(PREFIX, owner.state, owner.append, history_ms=HOUR_MS, keep_ms=0, known=owner.known)
    answer: object = None
    for _ in range(requests):
        try:
            request = log.resume(steps, answer)
        except StopIteration:
            return True
        answer = log.ask(request, owner.client, lambda _: None)
    if is_half_done:
        with contextlib.suppress(StopIteration):
            request = log.resume(steps, answer)
            if isinstance(request, Delete):
                world.store.delete_now(request.keys[::2])
    return False


def test_without_an_answer_it_ends() -> None:
    steps = garbage.delete(Plan(0, manifests=listed("manifest", 1), slots=listed("log", 1)))
    next(steps)
    with pytest.raises(StoreUnavailable):
        steps.throw(StoreUnavailable("store", "manifest/0", "no answer in time"))


def test_one_who_was_fenced_deletes_nothing() -> None:
    world = calm()
    grown(world)
    late = world.owner
    late.state = world.copy()
    world.replace_owner()
    before = world.store.objects.contents()
    with pytest.raises(SlotTaken):
        log.carry_out(
            garbage.collect(PREFIX, late.state, late.append, history_ms=1, keep_ms=0), late.client, lambda _: None
        )
    assert world.store.objects.contents() == before
