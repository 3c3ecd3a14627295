"""What the codecs of ``kestrelpy.ship`` are fuzzed with; ``codec_targets.py`` says how, and has them with its own.

One value has one encoding: what decodes encodes to the same bytes. What is not valid decodes to ``None``, or is one of
the documented errors. The second reader, written from docs/format.md alone, sees a structure in the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import check_name
from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.format import BATCH_MAGIC
from kestrelpy.ship import Listed, StoreDamaged
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.garbage import parts_of, sort_out
from kestrelpy.ship.identity import decode_identity, encode_identity
from kestrelpy.ship.log import decode_manifest, decode_slot
from kestrelpy.ship.manifest import LogState, Manifest
from kestrelpy.ship.outside_reader import (
    decode_outside,
    encode_outside,
    outside_key,
    outside_version,
    parse_outside_key,
)
from kestrelpy.ship.ship_file import SHIP_MAGIC, decode_ship_file, encode_ship_file
from kestrelpy.ship.slots import Slot
from tests.ship import second_reader
from tests.ship.logs import QUEUE_ID, random_log, renumbered, resealed_manifest, resealed_slot, slots_of

LARGEST = (1 << 62) - 1
PREFIX = "jobs/"
MOST_KEY = 200
"""No key of a queue is longer."""


def agrees(found: object, theirs: Callable[[], object]) -> bool:
    """Whether it is one: for the library, and for the second reader."""
    try:
        theirs()
    except second_reader.Bad:
        assert found is None
        return False
    assert found is not None
    return True


# -- slots -----------------------------------------------------------------------------------------------------------


def ship_slot(data: bytes) -> None:
    """Any bytes as an object of the log."""
    slot = codec.decode_slot(data)
    if agrees(slot, lambda: second_reader.read_slot(data)):
        assert slot is not None
        assert codec.encode_slot(slot) == data
        assert slot.crc == codec.slot_crc(data)
        assert (slot.sealed is not None) == (slot.header.kind == codec.SEAL)
        assert len(slot.owner.encode()) <= codec.MAX_OWNER_BYTES
        assert 0 <= slot.forgets_below <= LARGEST
        assert decode_slot("key", slot.header.slot, data) == slot
    else:
        with contextlib.suppress(StoreDamaged, UnsupportedFormat):
            decode_slot("key", 1, data)
            raise AssertionError("what is no slot was taken for one")
    assert slot is None or (codec.slot_version(data), codec.slot_kind(data)) == (1, slot.header.kind)


def sealed_ship_slot(data: bytes) -> None:
    """A slot from its kind on, but for what says that it is one: the note is as long as is left."""
    body = data.ljust(164 - 14, b"\0")
    made = bytearray(b"KSTRLSLT\1\0" + body[:2] + b"\xa0\0\0\0" + body[2:])
    lengths = [int.from_bytes(made[at : at + size], "little") for at, size in ((104, 8), (128, 4), (132, 4))]
    made[136:140] = max(0, len(made) - 164 - sum(lengths)).to_bytes(8, "little")[:4]
    made[140:156] = bytes(16)
    ship_slot(resealed_slot(bytes(made)))


def sealed_ship_header(data: bytes) -> None:
    """A header alone."""
    body = b"KSTRLSLT\1\0" + data[:2].ljust(2, b"\0") + b"\xa0\0\0\0" + data[2:126].ljust(124, b"\0") + bytes(16)
    made = body + crc32(body).to_bytes(4, "little")
    header = codec.decode_header(made)
    if agrees(header, lambda: second_reader.slot_header(made)):
        assert header is not None
        assert codec.encode_header(header) == made


def ship_states(data: bytes) -> None:
    """Checkpoints, one after another; they have no checksum of their own."""
    states = codec.decode_states(data, QUEUE_ID)
    if agrees(states, lambda: second_reader.checkpoints(data, QUEUE_ID)):
        assert states is not None
        assert codec.encode_states(states) == data
        for state in states:
            assert not state.reader or check_name(state.reader)


def sealed_ship_note(data: bytes) -> None:
    """The note of a SEAL: its key and sizes as they are, a footer with the right checksum, and a header."""
    key = data[1 : 1 + data[0] % 50] if data else b""
    rest = data[1 + len(key) :].ljust(12 + 96 + 88, b"\0")
    body = rest[12 + 96 : 12 + 96 + 56] + fmt.FOOTER_MAGIC
    marker, last_id = (int.from_bytes(rest[at : at + size], "little") for at, size in ((164, 4), (168, 8)))
    footer = fmt.pack_frame(64, last_id, fmt.KIND_FOOTER << fmt.KIND_SHIFT, 0, marker) + body
    footer = fmt.pack_crc(crc32(footer)) + footer
    header = rest[12 : 12 + 92]
    made = len(key).to_bytes(2, "little") + key + rest[:12] + header + crc32(header).to_bytes(4, "little") + footer
    found = codec.decode_sealed(made, 0)

    def whole() -> None:
        bytes_of = second_reader.Bytes(made)
        second_reader.segment(bytes_of)
        bytes_of.end()

    if agrees(found, whole):
        assert found is not None
        segment, end = found
        assert (codec.encode_sealed(segment), end) == (made, len(made))
        parsed = codec.parse_segment_key(segment.key)
        assert parsed is not None
        assert parsed[0] == segment.number > 0
        assert segment.segment_footer().records_end < segment.file_bytes


def sealed_ship_ledger(data: bytes) -> None:
    """The number of the last batch, and records: each of as many bytes as its first one says."""
    made, rest = data[:8], data[8:]
    while rest:
        body, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        made += crc32(body, len(body)).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    for ledger in (made, data):
        if agrees(codec.is_ledger(ledger) or None, functools.partial(second_reader.ledger, ledger)):
            found = codec.decode_shipped_ledger(ledger)
            assert codec.encode_shipped_ledger(found) == ledger
            assert found is None or found.taken <= LARGEST
            if found is not None:
                found.state()


# -- what they add up to ---------------------------------------------------------------------------------------------


def ship_manifest(data: bytes) -> None:
    """Any bytes as a manifest."""
    manifest = manifests.decode_manifest(data)
    if manifest is None:
        with contextlib.suppress(StoreDamaged, UnsupportedFormat):
            decode_manifest("key", 1, data)
            raise AssertionError("what is no manifest was taken for one")
        return
    second_reader.read_manifest(data)
    assert manifests.encode_manifest(manifest) == data
    assert manifests.manifest_version(data) == manifests.MANIFEST_VERSION
    assert decode_manifest("key", manifest.header.slot, data) == manifest
    assert_consistent(manifest)
    LogState(manifest)._check()


def assert_consistent(manifest: Manifest) -> None:
    header = manifest.header
    tail, names = manifest.tail, [state.reader for state in manifest.checkpoints]
    numbers = [segment.number for segment in manifest.segments]
    last_ids = [segment.segment_footer().last_id for segment in manifest.segments]
    assert all(one < other for one, other in pairwise(names))
    for rising in (manifest.fences, numbers, [each.slot for each in tail], [each.offset for each in tail]):
        assert all(one < other for one, other in pairwise(rising))
    assert manifest.fences[0] == 1
    assert len(manifest.fences) == header.epoch
    assert max(manifest.fences[-1], *(each.slot for each in tail), 0) <= header.slot
    assert all(state.highest_id <= header.last_id for state in manifest.checkpoints)
    assert max(last_ids, default=0) <= header.last_id
    assert max(numbers, default=0) <= header.number


def sealed_ship_manifest(data: bytes) -> None:
    """A manifest from the kind of its slot on."""
    body = data.ljust(164 - 14 + 20, b"\0")
    made = b"KSTRLMAN\2" + bytes(15) + b"KSTRLSLT\1\0" + body[:2] + b"\xa0\0\0\0" + body[2:]
    ship_manifest(resealed_manifest(made[:164] + bytes(16) + made[180:]))


@functools.cache
def log_of_seed(seed: int) -> list[bytes]:
    return random_log(seed, 10).log


def sealed_ship_log(data: bytes) -> None:
    """A log with changes: the first byte says which log; then a slot, two bytes for a place in it, and eight to put
    there. Numbers and checksums are made right.
    """
    log = log_of_seed(data[0] % 16 if data else 0).copy()
    for at in range(1, len(data) - 10, 11):
        which, place = (
            data[at] % len(log),
            int.from_bytes(data[at + 1 : at + 3], "little") % len(log[data[at] % len(log)]),
        )
        changed = log[which][:place] + data[at + 3 : at + 11] + log[which][place + 8 :]
        log[which] = changed[: len(log[which])]
    log = renumbered(log)
    slots = list(map(codec.decode_slot, log))
    if None in slots:
        return
    state, is_log = LogState(), True
    for slot in slots_of(log):
        is_log = is_log and _applied(state, slot)
    if agrees(is_log or None, lambda: second_reader.add_up(log)):
        ship_manifest(manifests.encode_manifest(state.manifest()))


def _applied(state: LogState, slot: Slot) -> bool:
    before = manifests.encode_manifest(state.manifest()) if state.slot else b""
    objection = state.apply(slot)
    state._check()
    assert objection is None or before == (manifests.encode_manifest(state.manifest()) if state.slot else b"")
    return objection is None


# -- the small ones --------------------------------------------------------------------------------------------------


def sealed_ship_file(data: bytes) -> None:
    """``jobs.ship``: its body, and any bytes."""
    prefix = SHIP_MAGIC + b"\1" + bytes(7)
    for made in (data, prefix + crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data):
        found = decode_ship_file(made)
        if found is not None:
            assert encode_ship_file(found) == made
            found.opening(b"n" * 16)
            assert decode_ship_file(encode_ship_file(found.opening(b"n" * 16))) is not None


def ship_identity(data: bytes) -> None:
    """``queue.json``."""
    with contextlib.suppress(StoreDamaged, UnsupportedFormat):
        found = decode_identity("key", data)
        assert encode_identity(found) == data
        assert check_name(found.queue)
        assert 0 <= found.made_ms <= LARGEST


def sealed_ship_commit(data: bytes) -> None:
    """The commit of a reader outside: all but its checksum, and with what says that it is one."""
    for body in (data, b"KSTRLOUT\1" + bytes(7) + data[:40].ljust(40, b"\0"), b"KSTRLOUT" + data[:48].ljust(48, b"\0")):
        made = body + crc32(body).to_bytes(4, "little")
        found = decode_outside(made)
        if found is not None:
            assert encode_outside(found) == made
            assert outside_version(made) == 1
            assert found.id <= LARGEST


def ship_batch(data: bytes) -> None:
    """A published batch in a store: the parts that it names are objects of the inbox, and nothing else."""
    body = crc32(data, len(data)).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data
    for made in (data, BATCH_MAGIC + b"\1" + bytes(7) + body):
        keys = parts_of(made)
        if keys is not None:
            assert sort_out(PREFIX, [Listed(PREFIX + key, 1, 1) for key in keys]).parts.keys() == keys


def ship_keys(data: bytes) -> None:
    """Of what is taken for an object of a queue, and may be deleted, the key is exactly as it is made here."""
    key = data.decode("utf-8", "surrogateescape")
    made: set[str] = set()
    if (segment := codec.parse_segment_key(key)) is not None:
        made.add(codec.segment_key(*segment))
    if (commit := parse_outside_key(key)) is not None:
        assert check_name(commit[0])
        made.add(outside_key(*commit))
    found = sort_out(PREFIX, [Listed(PREFIX + key, 1, 1)])
    made.update(map(codec.slot_key, found.slots))
    made.update(map(manifests.manifest_key, found.manifests))
    made.update(f"in/{number:013d}.batch" for number in found.batches)
    for key_of in (*found.parts, *found.probes):
        folder, _, name = key_of.partition("/")
        made.add(f"{folder}/{bytes.fromhex(name.removesuffix('.part')).hex()}{name[32:]}")
    assert made <= {key}
    assert not made or (len(key) < MOST_KEY and key.isascii() and ".." not in key)
    assert any(found) == bool(made)
    assert not any(sort_out(PREFIX, [Listed(key, 1, 1)])) or key.startswith(PREFIX)


SHIP_TARGETS: dict[str, Callable[[bytes], Any]] = {
    target.__name__: target
    for target in (
        ship_slot, sealed_ship_slot, sealed_ship_header, ship_states, sealed_ship_note, sealed_ship_ledger,
        ship_manifest, sealed_ship_manifest, sealed_ship_log, sealed_ship_file, ship_identity, sealed_ship_commit,
        ship_batch, ship_keys,
    )
}  # fmt: skip
