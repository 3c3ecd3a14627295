"""The body of a job in a work queue: what an outbox knows of the job, and its payload.

    magic          4 bytes, b"kOB" and the version, 1
    status         u8: 0 ready, 1 error, 2 dead, 3 lapsed
    is_binary      u8: whether the codec gave bytes, and not text
    tries          u32: the runs so far ...
    reserves       u32: ... when the work queue had counted so many reservations of the job
    added_ms       i64
    due_ms         i64: when it may run; of a dead job, when it was due before its last run
    started_ms     i64: of the last run that failed; -1: there is none
    finished_ms    i64: when it died; -1: it did not
    first_error_ms i64: -1: there is none
    sizes          of the group u16, of the context u32, of the error u16
    group, context, error: UTF-8, empty for None; the rest is the payload

Integers are little-endian, without padding. The work queue itself has the queue of the job (its tube), its id, key,
priority, delay and state. The head has a fixed size, so that no change of it makes a body longer; only an error does.

``tries`` counts no reservation by itself: a job that is claimed is reserved, and the work queue counts that. So a claim
writes no new body, and the tries are ``tries`` plus the reservations since.

A body without the magic was put by other means than an outbox. It is a payload as it is.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrelpy import UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kestrelpy import work

__all__ = [
    "DEAD",
    "ERROR",
    "LAPSED",
    "NONE",
    "READY",
    "STATUSES",
    "JobBody",
    "body_of_row",
    "check_version",
    "decode",
    "new_body",
    "payload_bytes",
    "stored_priority",
]

READY, ERROR, DEAD, LAPSED = range(4)
"""LAPSED: it was running when its process died. Its lease is over."""
STATUSES = ("ready", "error", "dead", "running")
"""What a ``Job`` says of these."""
MAGIC = b"kOB\x01"
NONE = -1
_HEAD = Struct("<4sBBIIqqqqqHIH")
_SIZES = Struct("<HIH")
_SIZE = _HEAD.size
_unpack = _HEAD.unpack_from
MAX_ERROR_BYTES = (1 << 16) - 1
PRIORITIES = 1 << 31
"""An outbox has priorities from minus this up to this, a work queue from 0 up to twice this."""


class JobBody(NamedTuple):
    """A body, decoded. ``payload`` is as it was stored: a text is in UTF-8."""

    status: int
    is_binary: int
    tries: int
    reserves: int
    added_ms: int
    due_ms: int
    started_ms: int
    finished_ms: int
    first_error_ms: int
    group: str | None
    context: str | None
    error: str | None
    payload: bytes
    is_own: bool = True
    """Whether an outbox has put the job."""

    def encode(self, most: int | None = None) -> bytes:
        """At most ``most`` bytes: the error is cut to its end, if that is necessary."""
        group = b"" if self.group is None else self.group.encode()
        context = b"" if self.context is None else self.context.encode()
        error = b"" if self.error is None else self.error.encode("utf-8", "backslashreplace")
        if error:
            room = MAX_ERROR_BYTES
            if most is not None:
                room = max(0, min(room, most - _SIZE - len(group) - len(context) - len(self.payload)))
            if len(error) > room:
                error = error[len(error) - room :].decode("utf-8", "ignore").encode()
        sizes = (len(group), len(context), len(error))
        return b"".join((_HEAD.pack(MAGIC, *self[:9], *sizes), group, context, error, self.payload))

    def tries_at(self, reserves: int) -> int:
        """The runs, the one that began with this reservation included."""
        return self.tries + reserves - self.reserves

    def row(self, job: work.Job | work.JobStats, status: str) -> list[Any]:
        """A row of ``COLUMNS``, of the job that has this body."""
        text, binary = (None, self.payload) if self.is_binary else (self.payload.decode(), None)
        return [
            job.id,
            job.tube,
            job.key,
            self.group,
            None,
            status,
            job.priority - PRIORITIES,
            text,
            binary,
            self.context,
            None,
            self.tries_at(job.reserves),
            self.added_ms,
            self.due_ms,
            _known(self.started_ms),
            _known(self.finished_ms),
            _known(self.first_error_ms),
            self.error,
            None,
        ]


def check_version(body: bytes, where: str) -> None:
    """Raises ``UnsupportedFormat`` for a body of a later version; ``where`` names the job."""
    if body[:3] == MAGIC[:3] and body[:4] > MAGIC:
        raise UnsupportedFormat(where, body[3], MAGIC[3])


def decode(body: bytes, now_ms: int) -> JobBody:
    """A body of an outbox, or one that is a payload as it is: that was added and due ``now_ms``."""
    if body[:4] != MAGIC or len(body) < _SIZE:
        return _foreign(body, now_ms)
    head = _unpack(body)
    group_bytes, context_bytes, error_bytes = head[10:]
    group = context = error = None
    at = _SIZE
    if group_bytes:
        group = body[at : at + group_bytes].decode()
        at += group_bytes
    if context_bytes:
        context = body[at : at + context_bytes].decode()
        at += context_bytes
    if error_bytes:
        error = body[at : at + error_bytes].decode()
        at += error_bytes
    made: JobBody = JobBody._make((*head[1:10], group, context, error, body[at:], True))
    return made


def payload_bytes(body: bytes) -> int:
    """The size of the payload in a body."""
    if body[:4] != MAGIC or len(body) < _SIZE:
        return len(body)
    group_bytes, context_bytes, error_bytes = _SIZES.unpack_from(body, _SIZE - _SIZES.size)
    return len(body) - _SIZE - int(group_bytes) - int(context_bytes) - int(error_bytes)


def _foreign(body: bytes, now_ms: int) -> JobBody:
    try:
        body.decode()
    except UnicodeDecodeError:
        is_binary = 1
    else:
        is_binary = 0
    return JobBody(READY, is_binary, 0, 0, now_ms, now_ms, NONE, NONE, NONE, None, None, None, body, is_own=False)


def new_body(stored: str | bytes, *, added_ms: int, due_ms: int, group: str | None, context: str | None) -> bytes:
    """The body of a new job."""
    is_text = isinstance(stored, str)
    payload = stored.encode() if isinstance(stored, str) else stored
    new = JobBody(READY, not is_text, 0, 0, added_ms, due_ms, NONE, NONE, NONE, group, context, None, payload)
    return new.encode()


def body_of_row(row: Sequence[Any], due_ms: int) -> JobBody:
    """The body of a ready job, of a row of ``COLUMNS`` of it."""
    text, binary, context, tries, added_ms, error = (row[at] for at in (7, 8, 9, 11, 12, 17))
    payload = binary if text is None else text.encode()
    first_error_ms = NONE if row[16] is None else row[16]
    instants = (added_ms, due_ms, NONE, NONE, first_error_ms)
    return JobBody(READY, binary is not None, tries, 0, *instants, row[3], context, error, payload)


def stored_priority(priority: int) -> int:
    """A priority of an outbox, as the work queue has it."""
    return priority + PRIORITIES


def _known(instant_ms: int) -> int | None:
    return None if instant_ms == NONE else instant_ms
