"""The records in the journal of a work queue, encoded to bytes and decoded.

A record is one item of a journaled queue; the item's id is its sequence number. A record says how something *is*, not
how it changed. So the last record counts, and reading a record twice does no harm:

======== ==========================================================================================================
PUT      a new job: how it was put, its body
CARRIED  a job written again: how it was put, its state, its body. Its old record held a segment back, or it has got
         another body
STATE    the state of a job from here on
GONE     a job that was deleted, or has expired
TUBE     the counters and the pause of a tube
TOTALS   the counters of the queue, and the last id that it has given out
======== ==========================================================================================================

Numbers are little-endian. Durations are seconds (float), times are milliseconds since the Unix epoch. The first byte of
a record is its kind; readers refuse a kind that they do not know. docs/work.md has the layout.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import NamedTuple

from kestrelpy.errors import UnsupportedFormat

PUT, CARRIED, STATE, GONE, TUBE, TOTALS = range(1, 7)
LAST_KIND = 15
"""Kinds up to this one are left for later versions: so a newer record differs from bytes that are no record."""
READY, DELAYED, RESERVED, BURIED = range(4)
STATES = ("ready", "delayed", "reserved", "buried")

DELETED, EXPIRED, TIMED_OUT = range(3)
"""Why a job is gone. TIMED_OUT: it expired when its reservation ended, and no other record counts that timeout."""
LAST_CAUSE = TIMED_OUT

# kind, bytes of the tube's name and of the key, priority, id, put at, delay, time to run, expires at (0: never)
_PUT = Struct("<BBHIQQddQ")
# state, timeouts since the last record, priority, delay, due at, reserves, timeouts, releases, buries, kicks, burial
_STATE = Struct("<BHIdQIIIIIQ")
_OF_JOB = Struct("<BBQ")  # kind, bytes of the tube's name or the cause, id
_TUBE = Struct("<BBQQQdQ")  # kind, bytes of the name, jobs put, deletes, pauses, length of the pause, paused until
_TOTALS = Struct("<BQQQQ")  # kind, last id, jobs put, timeouts, burials

PUT_BYTES = _PUT.size
pack_put = _PUT.pack
unpack_put = _PUT.unpack_from
"""``pack_put(PUT, tube bytes, key bytes, priority, id, added_ms, delay, ttr, expires_ms)``; body, tube and key follow.
``unpack_put`` reads it back."""

pack_gone = _OF_JOB.pack
"""``pack_gone(GONE, cause, id)``."""


class Origin(NamedTuple):
    """How a job was put, without its body."""

    job_id: int
    tube: str
    key: str | None
    priority: int
    delay: float
    ttr: float
    added_ms: int
    expires_ms: int


class State(NamedTuple):
    """The state of a job. ``new_timeouts``: timeouts since the record before. ``burial``: orders the buried jobs."""

    state: int
    priority: int
    delay: float
    due_ms: int
    reserves: int
    timeouts: int
    releases: int
    buries: int
    kicks: int
    burial: int
    new_timeouts: int = 0


class TubeFigures(NamedTuple):
    """The counters of a tube, and its pause."""

    name: str
    total_jobs: int
    deletes: int
    pauses: int
    pause: float
    paused_until_ms: int


class Totals(NamedTuple):
    """The counters of the queue, and the last id that it has given out."""

    last_id: int
    total_jobs: int
    timeouts: int
    burials: int


def encode_put(origin: Origin, body: bytes, state: State | None = None) -> bytes:
    """A PUT record; with ``state``, a CARRIED record."""
    tube = origin.tube.encode()
    key = b"" if origin.key is None else origin.key.encode()
    head = pack_put(
        PUT if state is None else CARRIED,
        len(tube),
        len(key),
        origin.priority,
        origin.job_id,
        origin.added_ms,
        origin.delay,
        origin.ttr,
        origin.expires_ms,
    )
    return b"".join((head, body, tube, key, b"" if state is None else _pack_state(state)))


def split_carried(data: bytes) -> tuple[bytes, State]:
    """Split a CARRIED into the bytes that a PUT would have, and the state after them. Raises ``ValueError``."""
    end = len(data) - _STATE.size
    if end < PUT_BYTES:
        raise ValueError("it is shorter than any job")
    return data[:end], _unpack_state(data, end)


def encode_state(job_id: int, tube: str, state: State) -> bytes:
    """A STATE record. It has the tube, because a job may be moved."""
    name = tube.encode()
    return _OF_JOB.pack(STATE, len(name), job_id) + _pack_state(state) + name


def decode_state(data: bytes) -> tuple[int, str, State]:
    """Id, tube and state. Raises ``ValueError``."""
    try:
        _, size, job_id = _OF_JOB.unpack_from(data)
        state = _unpack_state(data, _OF_JOB.size)
    except struct.error as error:
        raise ValueError(str(error)) from None
    name = data[_OF_JOB.size + _STATE.size :]
    if len(name) != size:
        raise ValueError("the length of the state is not the one it gives")
    return job_id, name.decode(), state


def _pack_state(state: State) -> bytes:
    return _STATE.pack(
        state.state,
        min(state.new_timeouts, 0xFFFF),
        state.priority,
        state.delay,
        state.due_ms,
        state.reserves,
        state.timeouts,
        state.releases,
        state.buries,
        state.kicks,
        state.burial,
    )


def _unpack_state(data: bytes, at: int) -> State:
    state, new_timeouts, *others = _STATE.unpack_from(data, at)
    if state not in (READY, DELAYED, BURIED):
        raise ValueError(f"there is no state {state}")
    return State._make((state, *others, new_timeouts))


def decode_gone(data: bytes) -> tuple[int, int]:
    """Id and cause. Raises ``ValueError``."""
    try:
        _, cause, job_id = _OF_JOB.unpack(data)
    except struct.error as error:
        raise ValueError(str(error)) from None
    return job_id, cause


def encode_tube(figures: TubeFigures) -> bytes:
    name = figures.name.encode()
    return _TUBE.pack(TUBE, len(name), *figures[1:]) + name


def decode_tube(data: bytes) -> TubeFigures:
    """Raises ``ValueError``."""
    try:
        _, size, *figures = _TUBE.unpack_from(data)
    except struct.error as error:
        raise ValueError(str(error)) from None
    name = data[_TUBE.size :]
    if len(name) != size:
        raise ValueError("the length of the tube's name is not the one it gives")
    return TubeFigures(name.decode(), *figures)


def encode_totals(totals: Totals) -> bytes:
    return _TOTALS.pack(TOTALS, *totals)


def decode_totals(data: bytes) -> Totals:
    """Raises ``ValueError``."""
    try:
        return Totals(*_TOTALS.unpack(data)[1:])
    except struct.error as error:
        raise ValueError(str(error)) from None


def job_of(data: bytes) -> int:
    """The id of the job that a PUT, CARRIED or STATE is about."""
    return int(_PUT.unpack_from(data)[4] if data[0] in (PUT, CARRIED) else _OF_JOB.unpack_from(data)[2])


def refuse_kind(where: str, kind: int) -> None:
    """Raise for a record of a kind that this version does not know: ``UnsupportedFormat`` if it may be one of a later
    version, ``ValueError`` if no version will have it.
    """
    if TOTALS < kind <= LAST_KIND:
        raise UnsupportedFormat(where, kind, TOTALS)
    raise ValueError(f"it begins with byte {kind}")
