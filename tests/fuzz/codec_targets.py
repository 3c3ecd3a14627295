"""What the codecs are fuzzed with: each target takes any bytes and raises ``AssertionError`` where an invariant breaks.

Targets whose name begins with ``sealed_`` put the right checksum onto the bytes first: a fuzzer does not guess one.
Used by ``fuzz_codecs.py``, which looks for new inputs, and by ``test_corpus.py``, which plays those found again.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable

from kestrelpy import InvalidName, codecs
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from tests.fuzz.campaign import compare_checkpoints, compare_segments
from tests.fuzz.ship_targets import SHIP_TARGETS
from tests.fuzz.value_targets import VALUE_TARGETS

MARKER = 0x8A11223344 & 0xFFFFFFFF
NUMBER = 7
HEADER = fmt.SegmentHeader(MARKER, b"q" * 16, NUMBER, 1, 0, 0, 0, 0, 0)


def frame(data: bytes) -> None:
    """Any bytes as a frame, at any offset."""
    for marker in (MARKER, int.from_bytes(data[28:32], "little")):
        for offset in (0, 1, len(data) - 32):
            found = fmt.decode_frame(data, offset, marker)
            assert found is None or offset + found.size <= len(data)


def sealed_frame(data: bytes) -> None:
    """The first two bytes say which kind; the rest is the body."""
    kind = int.from_bytes(data[:2], "little") % 11
    body = data[2:]
    made = fmt.pack_frame(len(body), 5, 255 | kind << fmt.KIND_SHIFT, 2, MARKER) + body
    made = fmt.pack_crc(zlib.crc32(made)) + made
    found = fmt.decode_frame(made, 0, MARKER)
    if found is None:
        return
    assert found.size == len(made)
    if found.footer is not None:
        again = fmt.encode_footer(found.footer, fmt.footer_number(made), MARKER)
        assert again[32:] == made[32:]
        return
    items = [entry[0] for entry in found.entries]
    _, added_ms, expires_ms = found.entries[0]
    if kind & fmt.KIND_BATCH:
        assert fmt.encode_batch(5, items, list(map(len, items)), added_ms, expires_ms, found.watermark, MARKER) == made
    else:
        assert fmt.encode_item(5, items[0], added_ms, expires_ms, found.watermark, MARKER) == made


def sealed_header(data: bytes) -> None:
    body = (fmt.SEGMENT_MAGIC + b"\1\0\x60\0" + data + bytes(92))[:92]
    made = body + fmt.pack_crc(zlib.crc32(body))
    found = fmt.decode_header(made)
    if found is not None:
        assert fmt.encode_header(found)[:88] == made[:88]
        assert found.first_id > found.previous_last_id


def sealed_footer(data: bytes) -> None:
    body = (data + bytes(64))[:56] + fmt.FOOTER_MAGIC
    last_id = int.from_bytes(data[56:64], "little")
    made = fmt.pack_frame(64, last_id, fmt.KIND_FOOTER << fmt.KIND_SHIFT, 0, MARKER) + body
    made = fmt.pack_crc(zlib.crc32(made)) + made
    found = fmt.decode_footer(made, HEADER)
    if found is not None:
        assert fmt.encode_footer(found, NUMBER, MARKER) == made
        assert found.items == found.last_id >= 0


def checkpoint(data: bytes) -> None:
    compare_checkpoints(data)
    compare_checkpoints(fmt.checkpoint_prefix() + data)


def sealed_checkpoint(data: bytes) -> None:
    """As states one behind the other, each of as many bytes as its first two say."""
    made = fmt.checkpoint_prefix()
    while len(data) > 2:
        size = 2 + int.from_bytes(data[:2], "little") % 400
        body = (data[2:size] + bytes(92))[: max(92, size - 2)]
        made += struct.pack("<II", zlib.crc32(body, len(body)), len(body)) + body
        data = data[size:]
    compare_checkpoints(made)


def segment(data: bytes) -> None:
    compare_segments(NUMBER, data)
    compare_segments(NUMBER, fmt.encode_header(HEADER) + data)


def sealed_segment(data: bytes) -> None:
    """A good header, then frames: two bytes for kind and id, one for the length, and the body."""
    made = fmt.encode_header(HEADER)
    while len(data) > 3:
        kind, step, size = data[0] % 11, data[1], data[2]
        body, data = data[3 : 3 + size], data[3 + size :]
        item = fmt.pack_frame(len(body), step, 255 | kind << fmt.KIND_SHIFT, step & 3, MARKER) + body
        made += fmt.pack_crc(zlib.crc32(item)) + item
    compare_segments(NUMBER, made)


def names(data: bytes) -> None:
    """Of what is taken for a file of a queue, every part is a legal name; nothing else is raised."""
    name = data.decode("utf-8", "surrogateescape")
    owner = file_names.parse_owner(name)
    if owner is not None:
        file_names.check_name(owner[0])
        assert name.startswith((owner[0] + ".", owner[0] + "+"))
        assert "/" not in name
        assert "\n" not in name
        reader = file_names.parse_checkpoint(name, owner[0])
        assert not reader or file_names.check_name(reader)
        number = file_names.parse_segment(name, owner[0])
        assert number is None or 0 <= number < 10**19
    with contextlib.suppress(InvalidName):
        assert file_names.check_name(name).isascii()
        assert file_names.parse_segment(file_names.segment_name(name, 1), name) == 1


def json_codec(data: bytes) -> None:
    """What is no JSON, or too deep, is a ``ValueError``; what is, comes back."""
    with contextlib.suppress(ValueError):
        value = codecs.JSON.decode(data)
        with contextlib.suppress(ValueError):
            again = codecs.JSON.decode(codecs.JSON.encode(value))
            assert again == value or "nan" in repr(value)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        frame, sealed_frame, sealed_header, sealed_footer, checkpoint, sealed_checkpoint, segment, sealed_segment,
        names, json_codec,
    )
} | SHIP_TARGETS | VALUE_TARGETS  # fmt: skip
