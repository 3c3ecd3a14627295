"""Manifests: what slots add up to, which slot may follow, and the bytes that say so."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import JournaledQueue
from kestrelpy._journal import format as fmt
from kestrelpy.ship import manifest as codec
from kestrelpy.ship import slots as slot_codec
from kestrelpy.ship.manifest import LogState, Manifest, TailSlot
from kestrelpy.ship.slots import DATA, FENCE, SEAL, DroppedReader, SealedSegment, ShippedLedger, Slot
from tests.ship import second_reader
from tests.ship.examples import CHECKPOINT, SEALED, example_log
from tests.ship.logs import (
    QUEUE_ID,
    Author,
    flipped,
    mutated,
    random_log,
    renumbered,
    resealed_manifest,
    resealed_slot,
    slots_of,
)
from tests.ship.test_slots import assert_same_segment, state_facts, their_facts
from tests.support.budget import SEED, share
from tests.support.paths import ROOT
from tests.support.queues import let_die

GOLDEN = {
    3: """
    4b5354524c4d414e02000000000000008d4424090b0200004b5354524c534c5401000200a0000000
    03000000000000000100000000000000101112131415161718191a1b1c1d1e1f0001020304050607
    08090a0b0c0d0e0f010100000000000000e408c0983a00000068e5cf8b010000443322919412d369
    85000000000000002000000000000000020000000000000002000000000000008200000099000000
    0000000000000000000000000000000000000000c8791ac82bc7d667010000000000000002000000
    82000000990000000100000000000000020000000000000000000000000000000100000000000000
    030000000000000085000000000000000200000000000000007d000000000102030405060708090a
    0b0c0d0e0f00000000000000000100000000000000000000000000000000000000000000000068e5
    cf8b0100006000000000000000010000000000000000000000000000000000050001000000010000
    00617564697402000000000000000200000000000000010000000000000003000000070000000000
    0000198f96690c00000001080000000000000061707034ee29482100000003626262626262626262
    6262626262626206000000000000000000000000000000d2eb5e054c000000026363636363636363
    6363636363636363000102030405060708090a0b0c0d0e0f07000000000000000300000000000000
    020000000000000005000000000000000900000000000000617070
    """,
    5: """
    4b5354524c4d414e0200000000000000076c18144b0200004b5354524c534c5401000200a0000000
    05000000000000000100000000000000101112131415161718191a1b1c1d1e1f0001020304050607
    08090a0b0c0d0e0f03010000000000003aca9d81983a00000068e5cf8b010000443322919412d369
    a5000000000000000000000000000000030000000000000002000000000000000a00000000000000
    0800000000000000000000000000000000000000298d635a04fcbc29010000000100000000000000
    0000000099000000010000000000000024007365672f313730303030303030303030302d312d3130
    3131313231332e7365676d656e740501000000000000845dec524b5354524c534547010060004433
    2291000102030405060708090a0b0c0d0e0f0068e5cf8b0100000100000000000000000000000000
    0000000000000000000000000000000000000000000000000000000000000000000000000000043d
    0387051edea240000000020000000000000000000000000008000000000044332291010000000000
    000002000000000000000500000000000000ff000000000000000001000000000000a50000000000
    00000068e5cf8b0100004b5354524c454e440700000000000000198f96690c000000010800000000
    00000061707034ee2948210000000362626262626262626262626262626262060000000000000000
    00000000000000d2eb5e054c00000002636363636363636363636363636363630001020304050607
    08090a0b0c0d0e0f0700000000000000030000000000000002000000000000000500000000000000
    0900000000000000617070
    """,
}
"""The manifests of ``example_log`` after these slots: with a tail, and with a closed segment. Never edited."""
BYTES = {slot: bytes.fromhex(text) for slot, text in GOLDEN.items()}


def added_up(slots: list[Slot], begun: LogState | None = None) -> LogState:
    """The state after these slots, which may follow one another."""
    state = begun if begun is not None else LogState()
    for slot in slots:
        assert state.apply(slot) is None
        state._check()
    return state


def whole(data: bytes) -> Manifest:
    manifest = codec.decode_manifest(data)
    assert manifest is not None
    return manifest


EXAMPLE = slots_of(example_log())


@pytest.mark.parametrize("slot", GOLDEN)
def test_golden_bytes(slot: int) -> None:
    manifest = added_up(EXAMPLE[:slot]).manifest()
    assert codec.encode_manifest(manifest) == BYTES[slot]
    assert whole(BYTES[slot]) == manifest
    assert codec.manifest_version(BYTES[slot]) == codec.MANIFEST_VERSION == 2


def test_what_a_manifest_says() -> None:
    with_tail, closed = whole(BYTES[3]), whole(BYTES[5])
    assert (with_tail.segments, with_tail.tail) == ((), (TailSlot(2, 0, 1), TailSlot(3, 133, 2)))
    assert (closed.segments, closed.tail) == ((SEALED,), ())
    assert (with_tail.checkpoints, closed.checkpoints) == ((CHECKPOINT,), ())
    assert with_tail.ledger == closed.ledger == EXAMPLE[2].ledger
    assert with_tail.fences == closed.fences == (1,)
    assert (closed.header, closed.crc) == (EXAMPLE[4].header, EXAMPLE[4].crc)
    assert codec.manifest_key(5) == "manifest/0000000000000005"


def test_documented_example() -> None:
    """The bytes that docs/format.md shows: the manifest of the slot shown there."""
    shown = re.search(r"```hex example=manifest\n(.*?)```", (ROOT / "docs" / "format.md").read_text(), re.DOTALL)
    assert shown is not None
    data = bytes.fromhex(shown[1])
    slot = example_log()[0]
    assert codec.encode_manifest(added_up(EXAMPLE[:1]).manifest()) == data
    assert data[:16] == b"KSTRLMAN\2" + bytes(7)
    assert data[16:20] == crc32(data[24:], len(data) - 24).to_bytes(4, "little")
    assert data[20:24] == (len(data) - 24).to_bytes(4, "little")
    assert data[24:184] == slot[:160]
    assert data[184:188] == slot[-4:]
    assert data[188:] == (1).to_bytes(4, "little") + bytes(16) + (1).to_bytes(8, "little")


@pytest.mark.parametrize("slot", GOLDEN)
def test_every_flipped_bit_and_every_cut_of_a_manifest_is_seen(slot: int) -> None:
    """The version alone is covered by no checksum: a flipped bit in it is refused, too, as a version that is not known.
    To tell that from damage, the manifest of the same slot can be computed.
    """
    data = BYTES[slot]
    for bit in range(len(data) * 8):
        changed = flipped(data, bit)
        assert codec.decode_manifest(changed) is None
        is_reserved = 8 * 10 <= bit < 8 * 16
        expected = int.from_bytes(changed[8:10], "little") if 8 * 8 <= bit < 8 * 10 else 2 if is_reserved else None
        assert codec.manifest_version(changed) == expected
    for size in range(len(data)):
        assert codec.decode_manifest(data[:size]) is None
    assert codec.decode_manifest(data + b"\0") is None


# -- a function of the slots -----------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 32), st.data())
def test_whoever_computes_it_gets_the_same_bytes(seed: int, data: st.DataObject) -> None:
    """From slot 1, or from the bytes of any manifest on the way."""
    slots = slots_of(random_log(seed).log)
    end = codec.encode_manifest(added_up(slots).manifest())
    at = data.draw(st.integers(1, len(slots)))
    middle = codec.encode_manifest(added_up(slots[:at]).manifest())
    assert whole(middle) == added_up(slots[:at]).manifest()
    later = added_up(slots[at:], LogState(whole(middle)))
    assert codec.encode_manifest(later.manifest()) == end
    assert (later.slot, later.last_id) == (len(slots), slots[-1].header.last_id)


def test_a_state_that_was_begun_at_a_manifest_does_not_change_it() -> None:
    manifest = whole(BYTES[3])
    added_up(EXAMPLE[3:], LogState(manifest))
    assert manifest == whole(BYTES[3])


def test_an_empty_state() -> None:
    state = LogState()
    state._check()
    assert (state.slot, state.last_id, state.header) == (0, 0, None)


def test_the_second_reader_agrees() -> None:
    """On random logs, and on forged ones: where they end, and what is in their manifests."""
    random, seen = Random(SEED), Counter[bool]()
    for seed in range(share(300)):
        log = random_log(SEED * 1000 + seed).log
        assert assert_same_log(log)
        for _ in range(6):
            seen[assert_same_log(forged_log(log, random))] += 1
    assert seen[True] > seen[False] / 20 > 0


def forged_log(log: list[bytes], random: Random) -> list[bytes]:
    """A slot is left out, repeated, exchanged or changed; then numbers and checksums are made right."""
    log, at, what = log.copy(), random.randrange(len(log)), random.randrange(4)
    if what == 0:
        del log[at]
    elif what == 1:
        log.insert(at, random.choice(log))
    elif what == 2:
        log[at], log[at - 1] = log[at - 1], log[at]
    else:
        tries = [resealed_slot(mutated(log[at], random)) for _ in range(40)]
        log[at] = next((each for each in tries if slot_codec.decode_slot(each) is not None), log[at])
    return renumbered(log) if random.random() < 0.9 else log


def assert_same_log(log: list[bytes]) -> bool:
    """Whether it is a log: for the library and for the second reader."""
    state = LogState()
    is_log = all(state.apply(slot) is None for slot in slots_of(log))
    state._check()
    try:
        theirs = second_reader.add_up(log)
    except second_reader.Bad:
        assert not is_log
        return False
    assert is_log
    manifest = state.manifest()
    data = codec.encode_manifest(manifest)
    assert second_reader.read_manifest(data) == theirs
    assert (manifest.crc, list(manifest.fences), list(map(tuple, manifest.tail))) == (
        theirs["crc"],
        theirs["fences"],
        theirs["tail"],
    )
    assert list(map(state_facts, manifest.checkpoints)) == list(map(their_facts, theirs["checkpoints"]))
    for segment, its in zip(manifest.segments, theirs["segments"], strict=True):
        assert_same_segment(segment, its)
    return True


def test_forged_manifests() -> None:
    """What the library takes for one has one encoding, and the second reader sees no fault. It does not check whether
    slots can add up to it, which the library does.
    """
    random, seen = Random(SEED), Counter[bool]()
    for seed in range(share(400)):
        data = codec.encode_manifest(added_up(slots_of(random_log(SEED * 1000 + seed).log)).manifest())
        for _ in range(20):
            forged = mutated(data, random)
            codec.decode_manifest(forged)
            forged = resealed_manifest(forged)
            manifest = codec.decode_manifest(forged)
            seen[manifest is not None] += 1
            if manifest is not None:
                second_reader.read_manifest(forged)
                assert codec.encode_manifest(manifest) == forged
                LogState(manifest)._check()
    assert seen[True] > 0 < seen[False]


# -- which slot may follow -------------------------------------------------------------------------------------------

Change = Callable[[Slot], Slot]


def header(**fields: Any) -> Change:
    """Other values in the header of a slot."""
    return lambda slot: slot._replace(header=slot.header._replace(**fields))


def again(slot: Slot) -> Slot:
    found = slot_codec.decode_slot(slot_codec.encode_slot(slot))
    assert found is not None
    return found


FENCE_2 = EXAMPLE[0]._replace(
    header=EXAMPLE[5].header._replace(
        kind=FENCE, slot=7, epoch=2, nonce=b"n" * 16, lease_ms=0, written_ms=1, crc_before=EXAMPLE[5].crc, first_id=9
    )
)


@pytest.mark.parametrize(
    ("slot", "change", "objection"),
    [
        (1, header(kind=DATA), "the first slot is no FENCE"),
        (1, header(epoch=2), "its epoch is 2, after epoch 0"),
        (1, header(crc_before=1), "another slot before it"),
        (1, header(slot=2), "slot 2 is not the one after slot 0"),
        (1, header(last_id=1, first_id=2), "not where the log ends"),
        (2, header(slot=3), "slot 3 is not the one after slot 1"),
        (2, header(crc_before=1), "another slot before it"),
        (2, header(queue_id=b"q" * 16), "another queue's"),
        (2, header(epoch=2), "its epoch is 2, in epoch 1"),
        (2, header(nonce=b"n" * 16), "nonce or lease"),
        (2, header(lease_ms=0), "nonce or lease"),
        (2, header(written_ms=254), "written before"),
        (2, header(offset=96), "whose beginning is not in the log"),
        (2, header(marker=5), "the segment's header says something else"),
        (2, header(number=5), "the segment's header says something else"),
        (2, header(first_id=2, last_id=2), "the segment's header says something else"),
        (2, header(segment_crc=5), "segment_crc"),
        (3, header(offset=134), "do not continue"),
        (3, header(offset=132), "do not continue"),
        (3, header(number=5), "do not continue"),
        (3, header(marker=5), "do not continue"),
        (3, header(first_id=3, last_id=3), "begins with item 3, and item 2 is due"),
        (3, header(first_id=1), "begins with item 1, and item 2 is due"),
        (3, header(segment_crc=5), "segment_crc"),
        (3, lambda slot: slot._replace(frames=slot.frames[:-1] + b"x"), "segment_crc"),
        (4, header(segment_crc=5), "the segment is not the one in the log"),
        (5, header(offset=164), "not where the log ends"),
        (5, header(queue_id=b"q" * 16), "it is another queue's"),
        (5, header(segment_crc=5), "not where the log ends"),
        (5, header(last_id=3, first_id=4), "not where the log ends"),
        (6, header(kind=FENCE, epoch=3), "its epoch is 3, after epoch 1"),
        (6, header(kind=FENCE), "its epoch is 1, after epoch 1"),
        (7, header(kind=DATA, epoch=1, nonce=EXAMPLE[0].header.nonce, lease_ms=15_000, written_ms=999), "had left"),
        (7, header(number=5), "not where the log ends"),
        (3, lambda slot: slot._replace(checkpoints=(CHECKPOINT._replace(head=3, done=()),)), "'audit' is ahead"),
        (3, lambda slot: slot._replace(checkpoints=(CHECKPOINT._replace(done=((2, 3),)),)), "'audit' is ahead"),
        (3, lambda slot: slot._replace(checkpoints=(CHECKPOINT._replace(watermark=3),)), "'audit' is ahead"),
        (4, lambda slot: slot._replace(ledger=ShippedLedger(6, b"")), "fewer batches"),
    ],
)
def test_a_slot_that_may_not_follow(slot: int, change: Change, objection: str) -> None:
    state = added_up([*EXAMPLE, FENCE_2][: slot - 1])
    good = [*EXAMPLE, FENCE_2][slot - 1]
    assert state.objection(good) is None
    before = state.manifest() if state.header is not None else None
    assert objection in str(state.apply(change(good)))
    assert (state.manifest() if state.header is not None else None) == before, "nothing is changed"
    assert state.apply(good) is None


def test_the_beginning_of_another_queues_segment_is_seen() -> None:
    slot = EXAMPLE[1]
    their = fmt.encode_header(fmt.SegmentHeader(slot.header.marker, b"q" * 16, slot.header.number, 1, 0, 0, 0, 0, 0))
    assert added_up(EXAMPLE[:1]).objection(slot._replace(frames=their + slot.frames[96:])) == (
        "the segment is another queue's"
    )
    cut = slot._replace(frames=b"?" + slot.frames[1:])
    assert "whose beginning is not in the log" in str(added_up(EXAMPLE[:1]).objection(cut))


def test_a_new_epoch_has_another_nonce_lease_and_clock() -> None:
    state = added_up([*EXAMPLE, FENCE_2])
    assert state.fences == [1, 7]
    assert state.header is not None
    assert (state.header.epoch, state.header.lease_ms, state.header.written_ms) == (2, 0, 1)


def author_with(*segments: int) -> Author:
    """An author whose log has so many closed segments, each after so many slots of its own; and nothing else in it."""
    author = Author(SEED)
    author.extras = dict  # type: ignore[method-assign]
    author.damaged, author.least = 0, 1
    author.fence()
    for count in segments:
        for _ in range(count):
            author.data()
        author.seal()
    return author


def state_of(author: Author) -> LogState:
    return added_up(slots_of(author.log))


def last_objection(author: Author) -> str:
    """The objection to the last slot of a log whose other slots may follow one another."""
    *slots, last = slots_of(author.log)
    return str(added_up(slots).objection(last))


def test_a_segment_that_is_left_out_is_seen() -> None:
    """The next one, by its first bytes or by its SEAL alone, names it as the one before."""
    for follow in (Author.data, Author.seal):
        author = author_with(1)
        kept, crc = len(author.log), author.crc
        author.seal()
        del author.log[kept:]
        author.crc = crc
        follow(author)
        assert "does not follow the last one" in last_objection(author)


def test_a_seal_of_another_segment_than_the_active_one_is_seen() -> None:
    author = author_with(1)
    author.data()
    author.first_id = 0  # forgotten by its owner
    author.seal()
    assert "another segment" in last_objection(author)


def test_a_seal_before_the_end_of_the_log_is_seen() -> None:
    slot = EXAMPLE[3]
    footer = fmt.encode_footer(fmt.SegmentFooter(1, 1, 1, 5, 255, 255, 133), SEALED.number, SEALED.marker)
    note = slot_codec.encode_sealed(SEALED._replace(footer=footer))
    early = again(header(offset=133, last_id=1, segment_crc=EXAMPLE[1].header.segment_crc)(slot)._replace(note=note))
    assert "before the end that it has in the log" in str(added_up(EXAMPLE[:3]).objection(early))
    footer = fmt.encode_footer(fmt.SegmentFooter(1, 2, 2, 5, 255, 255, 133), SEALED.number, SEALED.marker)
    note = slot_codec.encode_sealed(SEALED._replace(footer=footer))
    shorter = again(header(offset=133)(slot)._replace(note=note))
    assert "before the end that it has in the log" in str(added_up(EXAMPLE[:3]).objection(shorter))
    in_time = again(header(slot=3, crc_before=EXAMPLE[1].crc)(early))
    assert added_up(EXAMPLE[:2]).objection(in_time) is None
    footer = fmt.encode_footer(fmt.SegmentFooter(1, 0, 0, 0, 0, 0, 165), SEALED.number, SEALED.marker)
    note = slot_codec.encode_sealed(SEALED._replace(footer=footer))
    fewer = again(header(slot=3, crc_before=EXAMPLE[1].crc, last_id=0)(slot)._replace(note=note))
    assert "before the end that it has in the log" in str(added_up(EXAMPLE[:2]).objection(fewer))


def sealed(number: int, first_id: int, last_id: int, **previous: int) -> SealedSegment:
    """A segment of these ids. Without ``previous`` its header is damaged."""
    footer = fmt.SegmentFooter(first_id, last_id, last_id + 1 - first_id, 0, 0, 0, 165)
    key = slot_codec.segment_key(number, 1, b"nonce")
    header = b"?" * 96
    if previous:
        header = fmt.encode_header(
            fmt.SegmentHeader(SEALED.marker, EXAMPLE[0].header.queue_id, number, first_id, 0, 0, **previous)
        )
    return SealedSegment(key, 300, 1, header, fmt.encode_footer(footer, number, SEALED.marker))


@pytest.mark.parametrize(
    ("segment", "objection"),
    [
        (sealed(SEALED.number + 1, 3, 4), None),
        (sealed(SEALED.number + 1, 2, 4), "not a later one"),
        (sealed(SEALED.number, 3, 4), "not a later one"),
        (sealed(SEALED.number + 1, 3, 4, previous_number=SEALED.number, previous_last_id=2, previous_end=165), None),
        (
            sealed(SEALED.number, 3, 4, previous_number=SEALED.number, previous_last_id=2, previous_end=165),
            "does not follow",
        ),
        (
            sealed(SEALED.number + 1, 3, 4, previous_number=SEALED.number, previous_last_id=2, previous_end=164),
            "does not follow",
        ),
        (
            sealed(SEALED.number + 1, 3, 4, previous_number=SEALED.number, previous_last_id=1, previous_end=165),
            "does not follow",
        ),
        (
            sealed(SEALED.number + 1, 3, 4, previous_number=SEALED.number - 1, previous_last_id=2, previous_end=165),
            "does not follow",
        ),
    ],
)
def test_a_seal_of_a_segment_that_is_in_no_slot(segment: SealedSegment, objection: str | None) -> None:
    state = added_up(EXAMPLE[:4])
    change = header(
        slot=5, crc_before=EXAMPLE[3].crc, number=segment.number, first_id=segment.segment_footer().first_id
    )
    slot = change(EXAMPLE[3]._replace(note=slot_codec.encode_sealed(segment)))
    slot = again(slot._replace(header=slot.header._replace(last_id=4, segment_crc=9)))
    found = state.objection(slot)
    assert found is None if objection is None else objection in str(found)


def test_a_seal_may_end_beyond_the_log() -> None:
    """What was in no slot is in the object."""
    slot = EXAMPLE[3]
    state = added_up(EXAMPLE[:2])
    assert state.apply(again(header(slot=3, crc_before=EXAMPLE[1].crc)(slot))) is None
    state._check()
    assert (state.last_id, state.tail) == (2, [])


def test_segments_that_are_forgotten() -> None:
    """Those below the number, but the last one; and none that a reader in the log needs."""
    author = author_with(1, 2, 0)
    numbers = [each.number for each in author.sealed]
    ends = [each.segment_footer().last_id for each in author.sealed]

    def forgets(number: int, *states: fmt.Checkpoint | DroppedReader) -> Slot:
        return again(author.slot(DATA, note=slot_codec.forget_note(number), checkpoints=states))

    def named(slot: Slot) -> list[int]:
        state = state_of(author)
        assert state.apply(slot) is None
        state._check()
        return [each.number for each in state.segments]

    reader = fmt.Checkpoint(QUEUE_ID, "audit", ends[0], 0, 0, 0)
    assert named(forgets(numbers[1])) == numbers[1:], "without readers the owner alone decides"
    assert named(forgets(numbers[2] + 1)) == numbers[2:]
    assert named(forgets(numbers[1], reader)) == numbers[1:]
    assert named(forgets(numbers[0], reader._replace(head=0))) == numbers
    assert named(forgets(numbers[2], reader, DroppedReader("audit"))) == numbers[2:]
    for slot in (
        forgets(numbers[1], reader._replace(head=ends[0] - 1)),
        forgets(numbers[2], reader),
        forgets(numbers[2], reader._replace(head=ends[2]), reader._replace(reader="")),
    ):
        assert "that a reader needs" in str(state_of(author).objection(slot))


def test_the_last_of_several_records_of_a_reader_counts() -> None:
    slot = EXAMPLE[2]
    later = CHECKPOINT._replace(head=2, done=())
    for states, expected in (
        ((CHECKPOINT, later), [later]),
        ((CHECKPOINT, DroppedReader("audit")), []),
        ((DroppedReader("audit"), CHECKPOINT), [CHECKPOINT]),
        (
            (later._replace(reader="b"), later._replace(reader="")),
            [later._replace(reader=""), later._replace(reader="b")],
        ),
    ):
        state = added_up([*EXAMPLE[:2], again(slot._replace(checkpoints=states))])
        assert list(state.manifest().checkpoints) == expected


def test_the_segments_of_a_real_journal_follow_one_another(tmp_path: Path) -> None:
    """After a clean close, and after a kill. Each is shipped in two slots, or in none, and closed."""
    for turn in range(4):
        queue = JournaledQueue(tmp_path, "jobs", segment_bytes=4096, max_item_bytes=100)
        reader = queue.reader("audit")
        for _ in range(60):
            queue.put(bytes(turn))
        queue.put_many([b"one", b"two"])
        reader.commit_many(reader.get_many(10))
        queue.checkpoint()
        if turn % 2:
            let_die(queue)
        else:
            queue.close()
    JournaledQueue(tmp_path, "jobs").close()
    author = Author(SEED)
    author.extras = dict  # type: ignore[method-assign]
    first, *_ = files = [path.read_bytes() for path in sorted(tmp_path.glob("jobs.*.segment"))]
    author.queue_id = first[16:32]
    author.fence()
    for file in files:
        ship(author, file, in_slots=author.random.random() < 0.7)
    state = fmt.decode_checkpoints((tmp_path / "jobs+audit.checkpoint").read_bytes())[0]
    assert state is not None
    author.add(author.slot(DATA, checkpoints=(state,)))
    assert assert_same_log(author.log)
    manifest = state_of(author).manifest()
    assert len(manifest.segments) == len(files) >= 4
    assert manifest.header.last_id >= 4 * 62
    assert manifest.checkpoints[0].head == 40


def ship(author: Author, file: bytes, *, in_slots: bool) -> None:
    """Ship a closed segment."""
    about = fmt.decode_header(file)
    assert about is not None
    footer = fmt.decode_footer(file[-96:], about)
    assert footer is not None
    author.number, author.marker, author.file = about.number, about.marker, b""
    if in_slots:
        frames = [(at, frame) for at, frame in fmt.frames_in(file, 96, about.marker) if frame.footer is None]
        half = frames[len(frames) // 2][0]
        for start, end in ((0, half), (half, footer.records_end)):
            part = [frame for at, frame in frames if start <= at < end]
            author.last_id = part[-1].last_id
            author.add(author.slot(DATA, author.grow(file[start:end]), first_id=part[0].first_id))
    author.last_id, author.file = footer.last_id, b""
    author.grow(file[: footer.records_end])
    key = slot_codec.segment_key(about.number, author.epoch, author.nonce)
    note = slot_codec.encode_sealed(SealedSegment(key, len(file), crc32(file), file[:96], file[-96:]))
    author.add(author.slot(SEAL, first_id=footer.first_id, note=note))


# -- a manifest that no slots add up to ------------------------------------------------------------------------------

TAILED, CLOSED = whole(BYTES[3]), whole(BYTES[5])
OTHER = SEALED._replace(header=b"?" * 96)


@pytest.mark.parametrize(
    "manifest",
    [
        CLOSED._replace(segments=(sealed(SEALED.number, 1, 1), sealed(SEALED.number, 2, 2))),
        CLOSED._replace(segments=(sealed(SEALED.number - 1, 1, 1), sealed(SEALED.number, 1, 2))),
        TAILED._replace(segments=(sealed(SEALED.number, 1, 0),)),  # the active one is closed
        TAILED._replace(fences=()),
        TAILED._replace(fences=(2,)),
        TAILED._replace(fences=(1, 2)),
        TAILED._replace(fences=(1, 9), header=TAILED.header._replace(epoch=2)),
        TAILED._replace(fences=(1, 3), header=TAILED.header._replace(epoch=2)),  # slot 3 is no FENCE
        TAILED._replace(tail=()),
        TAILED._replace(tail=TAILED.tail[:1]),
        TAILED._replace(tail=TAILED.tail[1:]),
        TAILED._replace(tail=(TailSlot(3, 0, 1), TailSlot(3, 133, 2))),
        TAILED._replace(tail=(TailSlot(2, 0, 1), TailSlot(3, 0, 2))),
        TAILED._replace(tail=(TailSlot(2, 0, 3), TailSlot(3, 133, 2))),
        TAILED._replace(tail=(TailSlot(2, 0, 0), TailSlot(3, 133, 2))),
        TAILED._replace(header=TAILED.header._replace(offset=165, length=0, first_id=3)),  # slot 3 has no bytes
        TAILED._replace(
            header=TAILED.header._replace(slot=4), tail=(TailSlot(2, 0, 1), TailSlot(3, 0, 2), TailSlot(4, 133, 2))
        ),
        TAILED._replace(header=TAILED.header._replace(kind=SEAL, slot=4, offset=165, length=0)),
        TAILED._replace(segments=(SEALED,)),
        TAILED._replace(checkpoints=(CHECKPOINT, CHECKPOINT)),
        TAILED._replace(checkpoints=(CHECKPOINT, CHECKPOINT._replace(reader="a"))),
        TAILED._replace(checkpoints=(CHECKPOINT._replace(watermark=3),)),
        CLOSED._replace(segments=()),
        CLOSED._replace(segments=(SEALED, SEALED)),
        CLOSED._replace(tail=TAILED.tail),
        CLOSED._replace(header=CLOSED.header._replace(offset=166)),
        CLOSED._replace(header=CLOSED.header._replace(last_id=3, first_id=4)),
        CLOSED._replace(header=CLOSED.header._replace(queue_id=b"q" * 16)),
    ],
)
def test_manifests_that_no_slots_add_up_to(manifest: Manifest) -> None:
    assert codec.decode_manifest(codec.encode_manifest(manifest)) is None


def test_manifests_with_more_than_one_segment() -> None:
    for manifest in (
        CLOSED._replace(segments=(sealed(SEALED.number - 1, 1, 1), sealed(SEALED.number, 2, 2))),
        TAILED._replace(segments=(sealed(SEALED.number - 1, 1, 0),)),
    ):
        assert whole(codec.encode_manifest(manifest)) == manifest


def test_a_manifest_names_a_damaged_segment_as_it_is() -> None:
    assert whole(codec.encode_manifest(CLOSED._replace(segments=(OTHER,)))).segments == (OTHER,)


def test_a_dropped_reader_is_in_no_manifest() -> None:
    made = TAILED._replace(checkpoints=(DroppedReader("audit"),))  # type: ignore[arg-type]
    assert codec.decode_manifest(codec.encode_manifest(made)) is None


# -- forged bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(188, 208, 4))
@pytest.mark.parametrize("slot", GOLDEN)
def test_counts_that_claim_more_than_there_is_cost_nothing(slot: int, at: int) -> None:
    data = BYTES[slot]
    forged = resealed_manifest(data[:at] + b"\xff" * 4 + data[at + 4 :])
    tracemalloc.start()
    try:
        assert codec.decode_manifest(forged) is None
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024
    finally:
        tracemalloc.stop()


def test_a_manifest_that_would_be_too_large_is_not_made() -> None:
    names = codec.MAX_MANIFEST_BYTES // len(slot_codec.encode_sealed(SEALED))
    with pytest.raises(ValueError, match="more than 67108864"):
        codec.encode_manifest(CLOSED._replace(segments=(SEALED,) * (names + 1)))


@given(st.binary(max_size=400))
def test_decoders_take_any_bytes(data: bytes) -> None:
    assert (codec.decode_manifest(data), codec.manifest_version(data)) == (None, None)
    begun = codec.MANIFEST_MAGIC + b"\2" + bytes(7) + data
    assert codec.decode_manifest(begun) is None
    for body in (data, BYTES[3][24:184] + data):
        forged = resealed_manifest(begun[:16] + bytes(8) + body)
        assert codec.manifest_version(forged) == 2
        codec.decode_manifest(forged)
