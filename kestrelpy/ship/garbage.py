"""Garbage of a shipped queue: what may be deleted, when, and in which order. The rules G1 to G6, without I/O or clock.

What stays is what is needed to read any moment of the last ``history``, and what a reader has not passed. H is the
newest manifest that is older than ``history``. A moment of the history is read from H, or from a later manifest, and
from the slots after it. So of what is not in use, all is garbage that only manifests before H lead to:

1. Ages are differences of the store's own dates (G1). "Now" is the date of the last slot of ours that is listed. It is
   never later than the true now; so what is deleted is older than it seems. An object with a date in the future makes
   nothing old, unless it is that slot.
2. Slots up to that of H, but no FENCE (S7), and none of H's tail: these make the active segment at H. The tail of a
   later manifest is made of these slots and of later ones. A FENCE that is in no state was created in a hole and is
   void: it is no FENCE of this log.
3. A segment that H does not name was forgotten by then, if its number is not above that of H's last one: segments are
   closed in the order of their numbers, and the last closed one is named always. So nothing after H names it either. It
   is also garbage if an earlier epoch has uploaded it, and its number is above that of the last segment of the log:
   nobody is left who could close it. What this epoch has uploaded and not closed yet is never garbage, whatever its
   age: its SEAL may be under way.
4. A batch that was taken in by H, by its ledger, and the parts that it alone names: a moment after H at which it was
   being taken in is restored with its items, and needs it. A part stays for a day after it was written, whoever names
   it: who publishes it later than that may find it gone. The batch that names it may be one that a publisher has
   created in the hole of another, and he is about to publish its parts under the next number. If a batch is listed
   and is not there, the listing may also lack batches, and no part is deleted.
5. Keys that are not exactly of the known patterns are left alone. ``queue.json`` is one of those.

The order (``Plan.in_order``), and why. What could be taken for the end of the log is a slot that is missing. H is older
than the history, and no listing is: so whoever lists the manifests after a deletion sees H, or a newer one, and both
are behind every slot that is deleted. That is why an opening lists them once more after its FENCE (S6), and why
``read_end_surely`` does. So H is there before, and is not deleted in the same collection; and nothing is deleted that a
later manifest needs. Within these bounds what leads to something is deleted before it: manifests, then slots, then
segments; batches, then parts. If a collection ends in the middle, no manifest is listed that leads to a hole, and what
was left over is garbage of the next collection, for the same reasons. Several keys of one request may be deleted in any
order; so each kind has requests of its own, and the next one waits for the answer. Without an answer, the collection
ends: it is not known whether the first step was done.

All of that stays true for ever once it is true of a log. But one who was fenced knows neither the options of the owner
after him, who may keep a longer history, nor his readers. So a slot of this epoch is appended between the plan and its
first deletion (G5): then the plan was made by the owner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from kestrelpy._journal.format import LARGEST
from kestrelpy._value import Value
from kestrelpy.inbox.format import decode_batch_file
from kestrelpy.ship import in_objects, log, outside_reader
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.log import Delete, ListBelow, Opening, Read, Steps
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import DATA, Slot
from kestrelpy.ship.store import Listed, Listing

DAY_MS = 86_400_000
"""So old is what nobody uses yet, or any more, before it is garbage: parts that no batch names, and probes."""
MOST_KEYS = 1000
"""So many keys are deleted with one request: as many as one request of S3 takes."""
_SLOT = re.compile(r"log/([0-9]{16})")
_MANIFEST = re.compile(r"manifest/([0-9]{16})")
_PROBE = re.compile(r"probe/[0-9a-f]{32}")

Parts: TypeAlias = frozenset[str] | None
"""The keys of the parts that a batch names; ``None``: it cannot be read, or is gone."""
Known: TypeAlias = dict[Listed, Parts]


class Collected(Value):
    """What a collection has deleted. ``bytes``: of all objects, also of those that are not counted here."""

    slots: int
    segments: int
    manifests: int
    batches: int
    bytes: int


class Found(NamedTuple):
    """The objects of a queue that a listing shows, by number; segments and parts by their keys, below the queue's."""

    slots: dict[int, Listed]
    manifests: dict[int, Listed]
    segments: dict[str, Listed]
    batches: dict[int, Listed]
    parts: dict[str, Listed]
    readers: dict[str, dict[int, Listed]]
    probes: dict[str, Listed]


class Survey(NamedTuple):
    """What there is, and what of it had to be read. ``now_ms``: see rule 1. ``begin``: H, or ``None``. ``passed``: of
    each reader outside, the id up to which it needs nothing. ``named``: by the number of the batch.
    """

    now_ms: int
    found: Found
    begin: manifests.Manifest | None
    passed: Mapping[str, int]
    named: Mapping[int, Parts]

    def is_older(self, there: Listed, age_ms: int) -> bool:
        return self.now_ms - there.modified_ms > age_ms


class Plan(NamedTuple):
    """``forgets_below``: the log may forget the segments below this number, in the slot that is appended next; 0: none.
    The rest is deleted after that slot is in the log.
    """

    forgets_below: int
    manifests: tuple[Listed, ...] = ()
    slots: tuple[Listed, ...] = ()
    segments: tuple[Listed, ...] = ()
    batches: tuple[Listed, ...] = ()
    parts: tuple[Listed, ...] = ()
    readers: tuple[Listed, ...] = ()
    probes: tuple[Listed, ...] = ()

    def in_order(self) -> tuple[tuple[Listed, ...], ...]:
        """What is deleted: each kind when the one before is gone."""
        return self.manifests, self.slots, self.segments, self.batches, self.parts, self.readers, self.probes


def collect(
    prefix: str,
    state: LogState,
    append_slot: Callable[[Plan], Steps[None]],
    *,
    history_ms: int,
    keep_ms: int | None,
    oldest_here: int = LARGEST,
    known: Known | None = None,
) -> Steps[Collected]:
    """Make a plan, append a slot, and delete. ``state``: what the owner's log adds up to.

    ``append_slot`` appends a slot of this epoch at once, ``slot_of`` the plan; it raises ``SlotTaken`` if another owner
    has the log, and then nothing is deleted. The other arguments are as in ``plan`` and ``survey``. Raises
    ``StoreUnavailable``; then the next collection goes on. Raises ``StoreDamaged`` and ``UnsupportedFormat`` as
    ``survey``.
    """
    seen = yield from survey(prefix, state, history_ms=history_ms, known=known)
    made = plan(state, seen, history_ms=history_ms, keep_ms=keep_ms, oldest_here=oldest_here)
    yield from append_slot(made)
    return (yield from delete(made))


def slot_of(made: Plan, state: LogState, opening: Opening) -> Slot:
    """The slot that is appended between the plan and the deletion. It is needed also if there is nothing to delete: its
    date is the next collection's now.
    """
    note = codec.forget_note(made.forgets_below) if made.forgets_below else b""
    return Slot(log.empty_header(state, DATA, opening), note=note)


def delete(made: Plan) -> Steps[Collected]:
    """Delete what the plan says. The slot after the plan is in the log."""
    for objects in made.in_order():
        keys = tuple(each.key for each in objects)
        for at in range(0, len(keys), MOST_KEYS):
            yield Delete(keys[at : at + MOST_KEYS])
    size = sum(each.size_bytes for objects in made.in_order() for each in objects)
    return Collected(len(made.slots), len(made.segments), len(made.manifests), len(made.batches), size)


# -- what there is ---------------------------------------------------------------------------------------------------


def survey(prefix: str, state: LogState, *, history_ms: int, known: Known | None = None) -> Steps[Survey]:
    """List the queue's objects, and read H, the last commit of each reader outside, and the batches.

    ``known``: what batches name; those in it are not read again, and it is brought up to date. Batches never change.

    Raises ``StoreDamaged`` and ``UnsupportedFormat`` if H cannot be read, or is of another log: what only older
    manifests lead to is not known then.
    """
    known = {} if known is None else known
    listing: Listing = yield ListBelow(prefix)
    found = sort_out(prefix, listing)
    now_ms = found.slots[last].modified_ms if (last := _last_of_ours(found, state)) else 0
    number = _begin(found, state, now_ms - history_ms)
    begin = (yield from log.read_manifest(prefix, number)) if number else None
    if begin is not None and not _is_of_log(begin, state):
        raise StoreDamaged(prefix + manifests.manifest_key(number), 0, "it is of another log", 0)
    passed = {}
    for name, commits in found.readers.items():
        data: bytes | None = yield Read(commits[max(commits)].key)
        if (up_to := _passed(data, state)) is not None:
            passed[name] = up_to
    for each in known.keys() - set(found.batches.values()):
        del known[each]
    for each in found.batches.values():
        if each not in known:
            batch: bytes | None = yield Read(each.key)
            known[each] = parts_of(batch) if batch is not None else None
    return Survey(now_ms, found, begin, passed, {at: known[each] for at, each in found.batches.items()})


def sort_out(prefix: str, listing: Listing) -> Found:
    """The objects of a listing whose keys are exactly those of a queue."""
    found = Found({}, {}, {}, {}, {}, {}, {})
    numbered = ((_SLOT, found.slots), (_MANIFEST, found.manifests))
    for each in listing:
        if not each.key.startswith(prefix):
            continue
        key = each.key[len(prefix) :]
        for pattern, by_number in numbered:
            if (match := pattern.fullmatch(key)) is not None and int(match[1]):
                by_number[int(match[1])] = each
        if codec.parse_segment_key(key) is not None:
            found.segments[key] = each
        elif (commit := outside_reader.parse_outside_key(key)) is not None:
            found.readers.setdefault(commit[0], {})[commit[1]] = each
        elif (batch := in_objects.parse_batch_key(key)) != 0:
            found.batches[batch] = each
        elif in_objects.is_part_key(key):
            found.parts[key] = each
        elif _PROBE.fullmatch(key):
            found.probes[key] = each
    return found


def _last_of_ours(found: Found, state: LogState) -> int:
    return max((number for number in found.slots if number <= state.slot), default=0)


def _begin(found: Found, state: LogState, before_ms: int) -> int:
    """The number of H: the newest manifest that was made before the history, and is not the newest of all (G2)."""
    numbers = sorted(number for number in found.manifests if number <= state.slot)[:-1]
    return max((number for number in numbers if found.manifests[number].modified_ms < before_ms), default=0)


def _is_of_log(begin: manifests.Manifest, state: LogState) -> bool:
    """Whether a manifest can be an earlier one of this log."""
    assert state.header is not None
    begun = len(begin.fences)
    return (begin.header.queue_id, begin.fences) == (state.header.queue_id, tuple(state.fences[:begun]))


def _passed(data: bytes | None, state: LogState) -> int | None:
    """What the last commit of a reader outside says. One that cannot be read needs everything; one of another queue,
    which had this name, is no reader of this queue: ``None``.
    """
    commit = outside_reader.decode_outside(data) if data is not None else None
    if commit is None:
        return 0
    return commit.id if state.header is not None and commit.queue_id == state.header.queue_id else None


def parts_of(data: bytes) -> Parts:
    """The keys of the parts that a batch names, below the queue's."""
    batch = decode_batch_file(data)
    return frozenset(in_objects.part_key(part.part_id) for part in batch.parts) if batch is not None else None


# -- what of it is garbage -------------------------------------------------------------------------------------------


def plan(state: LogState, seen: Survey, *, history_ms: int, keep_ms: int | None, oldest_here: int = LARGEST) -> Plan:
    """What the log may forget now, and what may be deleted.

    Any moment of the last ``history_ms`` can be read afterwards. A segment that no reader needs is named until it is
    ``keep_ms`` old, for reads that are no reader's, and stays for ``history_ms`` more; ``None``: for ever.
    ``oldest_here``: the number of the oldest segment on the owner's disk; it and what follows are not forgotten, as a
    reader may need them whose checkpoint is not in the log yet.
    """
    batches, parts = _of_the_inbox(seen, history_ms)
    commits = (each for every in seen.found.readers.values() for each in _all_but_the_last(every))
    probes = (each for each in seen.found.probes.values() if seen.is_older(each, DAY_MS))
    begin = seen.begin
    return Plan(
        _forgets_below(state, seen, keep_ms, oldest_here),
        () if begin is None else _until(seen.found.manifests, begin.header.slot - 1),
        () if begin is None else _slots(state, seen.found, begin),
        () if begin is None or keep_ms is None else _segments(state, seen, begin, history_ms + keep_ms),
        batches,
        parts,
        tuple(commits),
        tuple(probes),
    )


def _forgets_below(state: LogState, seen: Survey, keep_ms: int | None, oldest_here: int) -> int:
    """The first segment that is needed, or is not old enough (G4). If no reader has a checkpoint in the log, nobody has
    passed anything.
    """
    if keep_ms is None:
        return 0
    head = min((each.head for each in state.checkpoints.values()), default=0)
    passed = min((head, *seen.passed.values()))
    below = 0
    for segment in state.segments[:-1]:
        there = seen.found.segments.get(segment.key)
        if segment.number >= oldest_here or segment.segment_footer().last_id > passed:
            break
        if there is None or not seen.is_older(there, keep_ms):
            break
        below = segment.number + 1
    return below


def _until(objects: Mapping[int, Listed], last: int, staying: Iterable[int] = ()) -> tuple[Listed, ...]:
    """Those with numbers up to ``last``, in their order."""
    return tuple(objects[number] for number in sorted(objects.keys() - set(staying)) if number <= last)


def _slots(state: LogState, found: Found, begin: manifests.Manifest) -> tuple[Listed, ...]:
    staying = {*state.fences, *(each.slot for each in begin.tail)}
    return _until(found.slots, begin.header.slot, staying)


def _segments(state: LogState, seen: Survey, begin: manifests.Manifest, age_ms: int) -> tuple[Listed, ...]:
    """See rule 3."""
    named = {each.key for each in (*begin.segments, *state.segments)}
    last_at_begin = max((each.number for each in begin.segments), default=0)
    last = max((each.number for each in state.segments), default=0)
    epoch = state.header.epoch if state.header is not None else 0
    garbage = []
    for key, there in seen.found.segments.items():
        parsed = codec.parse_segment_key(key)
        assert parsed is not None
        number, its_epoch, _ = parsed
        is_led_to = number > last_at_begin and (number <= last or its_epoch >= epoch)
        if key not in named and not is_led_to and seen.is_older(there, age_ms):
            garbage.append(there)
    return tuple(garbage)


def _of_the_inbox(seen: Survey, history_ms: int) -> tuple[tuple[Listed, ...], tuple[Listed, ...]]:
    """Batches that H had taken in, and parts. The last batch stays, so that a list shows how far they were numbered."""
    found = seen.found
    taken = seen.begin.ledger.taken if seen.begin is not None and seen.begin.ledger is not None else 0
    batches = {at: each for at, each in found.batches.items() if at <= taken and seen.is_older(each, history_ms)}
    batches.pop(max(found.batches, default=0), None)
    if None in seen.named.values():  # it may name any part; or the listing is old, and others name them that it lacks
        return tuple(batches.values()), ()
    staying = {key for at in found.batches.keys() - batches.keys() for key in seen.named[at] or ()}
    going = {key for at in batches for key in seen.named[at] or ()}
    parts = (
        there
        for key, there in found.parts.items()
        if key not in staying and seen.is_older(there, max(history_ms, DAY_MS) if key in going else DAY_MS)
    )
    return tuple(batches.values()), tuple(parts)


def _all_but_the_last(commits: Mapping[int, Listed]) -> Iterable[Listed]:
    return (each for number, each in commits.items() if number != max(commits))
