"""``queue.json``: whose objects those below a queue's name are. Created once, by the first owner.

docs/format.md is the specification:  {"format": 1, "queue": "jobs", "queue_id": 32 hex digits, "made_ms": n}, and of a
work queue also  "kind": "work queue"
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kestrelpy._journal.file_names import check_name
from kestrelpy._journal.format import LARGEST
from kestrelpy.errors import InvalidName, UnsupportedFormat
from kestrelpy.ship.errors import StoreDamaged

IDENTITY_KEY = "queue.json"
"""The key, below that of the queue."""
IDENTITY_FORMAT = 1
MAX_IDENTITY_BYTES = 4096
"""No format's is larger. What is larger is not looked at."""
_QUEUE_ID_BYTES = 16
_WORK = "work queue"


class QueueIdentity(NamedTuple):
    """A queue in a store. ``made_ms``: when its first owner came there, by his clock. ``of_jobs``: a work queue."""

    queue: str
    queue_id: bytes
    made_ms: int
    of_jobs: bool = False


def encode_identity(identity: QueueIdentity) -> bytes:
    """The object. Raises ``InvalidName`` and ``ValueError`` for what nobody would read."""
    check_name(identity.queue)
    is_whole = type(identity.made_ms) is int and 0 <= identity.made_ms <= LARGEST
    if len(identity.queue_id) != _QUEUE_ID_BYTES or not is_whole:
        raise ValueError(f"a queue_id has {_QUEUE_ID_BYTES} bytes, and made_ms is from 0 to {LARGEST}")
    said = {"format": IDENTITY_FORMAT, "queue": identity.queue, "queue_id": identity.queue_id.hex()}
    kind = {"kind": _WORK} if identity.of_jobs else {}
    return json.dumps({**said, "made_ms": identity.made_ms, **kind}).encode("ascii")


def decode_identity(key: str, data: bytes) -> QueueIdentity:
    """Decode the object at ``key``. One value has one encoding, byte for byte.

    Raises ``UnsupportedFormat`` for a newer format, ``StoreDamaged`` for anything else that is none.
    """
    said = _fields(data)
    if said is None:
        raise StoreDamaged(key, 0, "it does not say which queue this is", 0)
    version = said.get("format")
    if type(version) is int and IDENTITY_FORMAT < version <= LARGEST:
        raise UnsupportedFormat(key, version, IDENTITY_FORMAT)
    try:
        of_jobs = said.get("kind") == _WORK
        identity = QueueIdentity(said["queue"], bytes.fromhex(said["queue_id"]), said["made_ms"], of_jobs)
        is_whole = encode_identity(identity) == data
    except (InvalidName, KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise StoreDamaged(key, 0, "it does not say which queue this is", 0)
    return identity


def _fields(data: bytes) -> dict[str, Any] | None:
    """The fields of a JSON object of any format; ``None`` if this is none, or is too large."""
    if len(data) > MAX_IDENTITY_BYTES:
        return None
    try:
        said = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
