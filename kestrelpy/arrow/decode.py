"""Decodes bytes of a segment into numpy arrays, without a Python object for each item. No files, no locks.

Rules:
1. The checksums of a run of frames are right as a whole, or the frames are checked one by one. Repeated calls of
   ``decode`` return exactly the frames that ``format.decode_frame`` takes for valid, and end where it would end.
2. Every frame has the segment's marker at the same offset in its head. A payload may have the marker too, so an offset
   is the start of a frame only if the frame before ends there.
3. No number is used as a length, a count or an offset before it is known to stay within the given bytes (R21).

One CRC checks a whole run. The CRC register after a message and that message's own checksum is always the same number,
``_RESIDUE``. A frame's checksum stands in front of its message. So in a copy of the run each checksum moves to the next
frame's checksum field, directly after its message. The CRC of each frame must start from an empty register. For a CRC,
feeding 4 bytes into a register gives the same result as feeding (bytes xor register xor empty register) into an empty
register. So the first 4 bytes of each message are xored with the difference between ``_RESIDUE`` and the empty
register. The run is right if the register at the end is ``_RESIDUE`` again. Each step of the register can be undone, so
intact frames after a single wrong frame cannot hide it: the check finds it as surely as the frame's own checksum does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kestrelpy._journal import format as fmt

Numbers: TypeAlias = npt.NDArray[np.int64]
Data: TypeAlias = bytes | memoryview

_RESIDUE = 0x2144DF1C  # as crc32 returns it: the register xor _ONES
_ONES = 0xFFFFFFFF
_TO_EMPTY = _RESIDUE  # the register after a frame, xor the empty register, which is _ONES

_HEAD = np.dtype(
    [("crc", "<u4"), ("length", "<u4"), ("id", "<u8"), ("stamp", "<u8"), ("lag", "<u4"), ("marker", "<u4")]
)
_SOME = 16
"""If so many frames at the start have one length, it is worth checking whether all have."""
_LARGE = 2048
"""Frames of at least this average size are checksummed one by one: copying them takes longer than the calls."""
_FIXED = fmt.FRAME_BYTES
_EXPIRY = 8
_COUNT = 4


class Run(NamedTuple):
    """The items of whole, consecutive frames. Item ``n`` of them, counted from 0, has the id ``first_id + n``.

    ``starts`` and ``sizes`` say where in the bytes each item's data is. ``expires_ms`` is ``None`` if no item expires;
    otherwise it has ``NEVER`` for the items that do not expire. ``end`` is the offset at which the next frame would
    begin. If the frames have batches, all arrays have one element for each item.
    """

    first_id: int
    added_ms: Numbers
    expires_ms: npt.NDArray[np.uint64] | None
    starts: Numbers
    sizes: Numbers
    end: int

    @property
    def next_id(self) -> int:
        return self.first_id + len(self.starts)


NEVER = (1 << 64) - 1


def decode(data: Data, marker: int, first_id: int) -> Run:
    """The items of the frames at the start of ``data`` that are whole, valid and in order from ``first_id`` on.

    If there are such frames, the run has at least one of them, but not always all: a caller that wants all frames calls
    again with the rest of ``data``. The caller also finds out what ends the frames: the end of ``data`` inside a frame,
    a footer, or damage.
    """
    starts, heads = _chain(data, marker)
    bodies, lengths, counts = _bodies(data, starts, heads)
    count = _in_order(heads, lengths, counts, first_id)
    if count and not _is_intact(data, starts[:count], heads[:count]):
        count = _intact(data, starts[:count], heads[:count])
    starts, heads = starts[:count], heads[:count]
    bodies, lengths, counts = bodies[:count], lengths[:count], counts[:count]
    end = int(starts[-1]) + _FIXED + int(heads["length"][-1]) if count else 0
    added = (heads["stamp"] & np.uint64(fmt.ADDED_MASK)).astype(np.int64)
    expires = _expiries(data, starts, heads)
    if not count or not counts.any():
        return Run(first_id, added, expires, bodies, lengths, end)
    return _expand(data, Run(first_id, added, expires, bodies, lengths, end), starts, counts)


def _chain(data: Data, marker: int) -> tuple[Numbers, npt.NDArray[np.void]]:
    """The starts and heads of consecutive frames, from the first byte of ``data`` on. All frames end within ``data``.

    Checks the markers and the lengths only.
    """
    uniform = _uniform(data, marker)
    if uniform is not None:
        return uniform
    starts = _candidates(data, marker)
    if not len(starts) or starts[0] != 0:
        return np.empty(0, np.int64), np.empty(0, _HEAD)
    raw: Any = np.ndarray(len(data) - _FIXED + 1, f"V{_FIXED}", data, strides=(1,))
    heads = raw[starts].view(_HEAD)
    ends = starts + _FIXED + heads["length"]
    if (ends[:-1] == starts[1:]).all():
        count = len(starts) - int(ends[-1] > len(data))
        return starts[:count], heads[:count]
    kept = _walk(starts, ends, len(data))
    return starts[kept], heads[kept]


def _walk(starts: Numbers, ends: Numbers, size: int) -> npt.NDArray[np.intp]:
    """Which of the candidates are a chain of frames from the first one on. Others are markers inside a payload."""
    broken = np.flatnonzero(ends[:-1] != starts[1:])
    following = np.searchsorted(starts, ends[broken])
    stretches, at = [], 0
    while True:
        turn = int(np.searchsorted(broken, at))
        if turn == len(broken):
            stretches.append(np.arange(at, len(starts) - int(ends[-1] > size)))
            break
        last, then = int(broken[turn]), int(following[turn])
        stretches.append(np.arange(at, last + int(ends[last] <= size)))
        if then == len(starts) or starts[then] != ends[last]:
            break
        at = then
    return np.concatenate(stretches)


def _uniform(data: Data, marker: int) -> tuple[Numbers, npt.NDArray[np.void]] | None:
    """As ``_chain``, at a tenth of the cost. ``None`` unless frames of one length make up at least half of ``data``."""
    if len(data) < _FIXED:
        return None
    stride = _FIXED + int.from_bytes(data[4:8], "little")
    count = len(data) // stride
    if count < _SOME:
        return None
    heads = np.ndarray(count, _HEAD, data, strides=(stride,))
    for some in (_SOME, count):
        wrong = (heads["marker"][:some] != marker) | (heads["length"][:some] != stride - _FIXED)
        if wrong.any():
            count = int(wrong.argmax())
            if some == _SOME or count * stride * 2 < len(data):
                return None
    return np.arange(0, count * stride, stride), heads[:count]


def _candidates(data: Data, marker: int) -> Numbers:
    """Every offset in ``data`` at which a frame with this marker may begin, in rising order."""
    found = []
    for shift in range(4):
        words = (len(data) - shift - fmt.MARKER_OFFSET) // 4
        if words > 0:
            view = np.frombuffer(data, "<u4", words, shift + fmt.MARKER_OFFSET)
            found.append(np.flatnonzero(view == marker) * 4 + shift)
    places = np.concatenate(found) if found else np.empty(0, np.int64)
    places.sort()
    return places.astype(np.int64, copy=False)


def _words(data: Data, places: Numbers, size: int = 4) -> npt.NDArray[Any]:
    """The integers of ``size`` bytes at the offsets ``places``. All of them must end within ``data``."""
    if not len(places):
        return np.empty(0, f"<u{size}")
    view: npt.NDArray[Any] = np.ndarray(len(data) - size + 1, f"<u{size}", data, strides=(1,))
    return view[places]


# -- the checks of a frame -------------------------------------------------------------------------------------------


def _bodies(data: Data, starts: Numbers, heads: npt.NDArray[np.void]) -> tuple[Numbers, Numbers, Numbers]:
    """For each frame: the offset and the length of its items' data, and the number of items if it is a batch, else 0.

    The length is below 0 if the frame's body does not fit the frame's kind.
    """
    kinds = heads["stamp"] >> np.uint64(fmt.KIND_SHIFT)
    bodies, lengths = starts + _FIXED, heads["length"].astype(np.int64)
    counts = np.zeros(len(starts), np.int64)
    if not kinds.any():
        return bodies, lengths, counts
    expiry = (kinds & np.uint64(fmt.KIND_EXPIRES)).astype(np.int64) * _EXPIRY
    bodies, lengths = bodies + expiry, lengths - expiry
    lengths[kinds > fmt.KIND_EXPIRES | fmt.KIND_BATCH] = -1
    batches = np.flatnonzero(((kinds & np.uint64(fmt.KIND_BATCH)) != 0) & (lengths >= _COUNT))
    claimed = _words(data, bodies[batches]).astype(np.int64)
    tables = _COUNT * (claimed + 1)
    counts[batches] = claimed
    bodies[batches] += tables
    lengths[batches] -= tables
    too_short = ((kinds & np.uint64(fmt.KIND_BATCH)) != 0) & (counts == 0)
    lengths[too_short] = -1
    return bodies, lengths, counts


def _in_order(heads: npt.NDArray[np.void], lengths: Numbers, counts: Numbers, first_id: int) -> int:
    """How many frames from the first on hold items, have consecutive ids, and have a body that fits their kind."""
    right = (lengths >= 0) & (heads["lag"] <= heads["id"])
    room = np.maximum(counts, 1)
    room[~right] = 1  # the count of a frame that does not fit may be any number
    due = np.cumsum(room) - room + first_id
    right &= (heads["id"] == due.astype(np.uint64)) & (due > 0) & (due <= fmt.LARGEST)
    return len(right) if right.all() else int(right.argmin())


def _is_intact(data: Data, starts: Numbers, heads: npt.NDArray[np.void]) -> bool:
    """True if the checksums of all frames are right. The module's docstring explains how."""
    size = int(starts[-1]) + _FIXED + int(heads["length"][-1])
    if size >= _LARGE * len(starts):
        return _intact(data, starts, heads) == len(starts)
    copy = np.frombuffer(data, np.uint8, size).copy()
    if len(starts) > 1 and (starts[1:] - starts[:-1] == starts[1]).all():
        moved = np.ndarray(len(starts), _HEAD, copy, strides=(int(starts[1]),))
        moved["crc"][1:] = heads["crc"][:-1]
        moved["length"] ^= np.uint32(_TO_EMPTY)
    else:
        words: npt.NDArray[Any] = np.ndarray(size - 3, "<u4", copy, strides=(1,))
        words[starts[1:]] = heads["crc"][:-1]
        words[starts + 4] = heads["length"] ^ np.uint32(_TO_EMPTY)
    copy[4:8] = np.frombuffer(data, np.uint8, 4, 4)  # the first frame starts from an empty register anyway
    return crc32(heads["crc"][-1:].tobytes(), crc32(copy[4:].data)) == _RESIDUE


def _intact(data: Data, starts: Numbers, heads: npt.NDArray[np.void]) -> int:
    """How many frames from the first on have the right checksum, checked one by one."""
    view, at = memoryview(data), 0
    for start, length, crc in zip(starts.tolist(), heads["length"].tolist(), heads["crc"].tolist(), strict=True):
        if crc32(view[start + 4 : start + _FIXED + length]) != crc:
            break
        at += 1
    return at


# -- items -----------------------------------------------------------------------------------------------------------


def _expiries(data: Data, starts: Numbers, heads: npt.NDArray[np.void]) -> npt.NDArray[np.uint64] | None:
    kinds = heads["stamp"] >> np.uint64(fmt.KIND_SHIFT)
    expiring = np.flatnonzero(kinds & np.uint64(fmt.KIND_EXPIRES))
    if not len(expiring):
        return None
    expires = np.full(len(starts), NEVER, np.uint64)
    expires[expiring] = _words(data, starts[expiring] + _FIXED, 8)
    return expires


def _expand(data: Data, frames: Run, starts: Numbers, counts: Numbers) -> Run:
    """Expand ``frames``, which has one row for each frame, to one row for each item.

    Stop before the first batch whose items' lengths do not add up to the length of its data.
    """
    is_batch, room = counts > 0, np.maximum(counts, 1)
    firsts = np.cumsum(room) - room
    frame = np.repeat(np.arange(len(room)), room)
    within = np.arange(len(frame)) - firsts[frame]
    sizes = frames.sizes[frame]
    of_batch = np.flatnonzero(is_batch[frame])
    tables = frames.starts - _COUNT * counts
    sizes[of_batch] = _words(data, (tables[frame] + _COUNT * within)[of_batch])
    before = np.cumsum(sizes) - sizes
    places = frames.starts[frame] + before - before[firsts][frame]
    total = np.add.reduceat(sizes, firsts)
    right = total == frames.sizes
    if not right.all():
        bad = int(right.argmin())
        stop = int(firsts[bad])
        frame, places, sizes = frame[:stop], places[:stop], sizes[:stop]
        end = int(starts[bad])
    else:
        end = frames.end
    expires = frames.expires_ms
    return Run(frames.first_id, frames.added_ms[frame], None if expires is None else expires[frame], places, sizes, end)
