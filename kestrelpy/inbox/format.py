"""The inbox in bytes: published batches, and the ledger of a queue.

docs/format.md is the specification. The rules are those of ``kestrelpy._journal.format``: no file, no lock, no clock;
every length is checked before anything is sliced; bytes that are not a whole, valid structure decode to ``None``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from kestrelpy._journal.format import FORMAT_VERSION, LARGEST
from kestrelpy._value import Value

BATCH_MAGIC = b"KSTRLBAT"
LEDGER_MAGIC = b"KSTRLMEM"
MAX_APP_ID_BYTES = 500
MOST_APP_IDS = 10_000
"""The ledger remembers the version of this many app_ids: those used last."""

_PREFIX = struct.Struct("<8sH6x")
_RECORD = struct.Struct("<II")
_BATCH = struct.Struct("<16sQQQQHI")
_PART = struct.Struct("<16sQQI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_VERSION = struct.Struct("<BQ")
_INTENT = struct.Struct("<B16s16sQQQQQ")
_DONE = struct.Struct("<B16sQQ")
_IS_VERSION, _IS_INTENT, _IS_DONE = 1, 2, 3


class Part(Value):
    """A sealed part file: its writer passes this value to the publisher. Can be pickled.

    ``name``: its file in the inbox. ``items``, ``data_bytes``: the number of its items, and their bytes together; a
    part without items has no file. ``digest``: the digest of its checksums, which identifies the content.
    ``largest_bytes``: the size of its largest item, or ``None`` if unknown.
    """

    name: str
    items: int
    data_bytes: int
    digest: int
    largest_bytes: int | None = None


class BatchPart(NamedTuple):
    """A part as a published batch names it. ``part_id``: the 32 hex digits in the part's file name, as 16 bytes."""

    part_id: bytes
    items: int
    data_bytes: int
    digest: int


class PublishedBatch(NamedTuple):
    """A published batch. ``app_id`` is empty if it has none."""

    batch_id: bytes
    number: int
    app_id: str
    version: int
    parts: tuple[BatchPart, ...]

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)

    @property
    def data_bytes(self) -> int:
        return sum(part.data_bytes for part in self.parts)


class Intent(NamedTuple):
    """The intent to ingest a batch, which is in the ledger before the first item is in the journal.

    Before the batch, the journal had ``base_items`` items, up to id ``first_id - 1``. Nothing else is put between the
    items of the batch. Recovery counts items to find how many are there, as ids may jump at a crash.
    """

    batch_id: bytes
    queue_id: bytes
    number: int
    first_id: int
    base_items: int
    items: int
    version: int
    app_id: str


class LedgerState:
    """The content of a queue's ledger.

    ``versions``: the last version of each app_id, the least recently used first. ``finished``: the ids and numbers of
    ingested batches whose files may still exist, or may come back after a power cut. ``intent``: see ``Intent``.
    """

    __slots__ = ("finished", "intent", "versions")

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.finished: dict[bytes, int] = {}
        self.intent: Intent | None = None

    def knows(self, batch: PublishedBatch) -> bool:
        """True if the batch was ingested, or if its version is not above the last one of its app_id."""
        last = self.versions.get(batch.app_id) if batch.app_id else None
        return batch.batch_id in self.finished or (last is not None and batch.version <= last)

    def note_version(self, app_id: str, version: int) -> None:
        if app_id:
            self.versions[app_id] = max(version, self.versions.pop(app_id, version))
            if len(self.versions) > MOST_APP_IDS:
                del self.versions[next(iter(self.versions))]

    def note_done(self, batch_id: bytes, number: int, app_id: str, version: int) -> None:
        self.finished[batch_id] = number
        self.note_version(app_id, version)
        self.intent = None


# -- a published batch -----------------------------------------------------------------------------------------------


def encode_batch_file(batch: PublishedBatch) -> bytes:
    app_id = batch.app_id.encode()
    body = b"".join(
        (
            _BATCH.pack(
                batch.batch_id,
                batch.number,
                batch.items,
                batch.data_bytes,
                batch.version,
                len(app_id),
                len(batch.parts),
            ),
            app_id,
            *(_PART.pack(*part) for part in batch.parts),
        )
    )
    return _PREFIX.pack(BATCH_MAGIC, FORMAT_VERSION) + _record(body)


def file_version(data: bytes, magic: bytes) -> int | None:
    """The format version that a file claims, or ``None`` if it does not begin with ``magic``."""
    if len(data) < _PREFIX.size or data[:8] != magic:
        return None
    return int(_PREFIX.unpack_from(data)[1])


def decode_batch_file(data: bytes) -> PublishedBatch | None:
    """Decode a whole file: ``None`` unless ``data`` is exactly one published batch."""
    if file_version(data, BATCH_MAGIC) != FORMAT_VERSION:
        return None
    body = _body_at(data, _PREFIX.size)
    if body is None or _PREFIX.size + _RECORD.size + len(body) != len(data) or len(body) < _BATCH.size:
        return None
    batch_id, number, items, size, version, app_bytes, count = _BATCH.unpack_from(body)
    parts_at = _BATCH.size + app_bytes
    if parts_at + count * _PART.size != len(body) or max(number, items, size, version) > LARGEST:
        return None
    app_id = _text(body[_BATCH.size : parts_at])
    parts = tuple(BatchPart(*each) for each in _PART.iter_unpack(body[parts_at:]))
    if app_id is None or not all(part.items for part in parts):
        return None
    batch = PublishedBatch(batch_id, number, app_id, version, parts)
    return batch if (batch.items, batch.data_bytes) == (items, size) else None


def _record(body: bytes) -> bytes:
    return _RECORD.pack(crc32(body, len(body)), len(body)) + body


def _body_at(data: bytes, at: int) -> bytes | None:
    """The body of the record that begins at ``at``, or ``None`` if the record is not whole."""
    if at + _RECORD.size > len(data):
        return None
    crc, length = _RECORD.unpack_from(data, at)
    body = data[at + _RECORD.size : at + _RECORD.size + length]
    return body if len(body) == length and crc32(body, length) == crc else None


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# -- the ledger ------------------------------------------------------------------------------------------------------


def encode_ledger(state: LedgerState, intent: Intent | None) -> bytes:
    """Encode a whole ledger: ``state``, with ``intent`` in place of the intent of ``state``."""
    records = [_record(_VERSION.pack(_IS_VERSION, version) + key.encode()) for key, version in state.versions.items()]
    records += [encode_done(batch_id, number, "", 0) for batch_id, number in state.finished.items()]
    if intent is not None:
        records.append(encode_intent(intent))
    return _PREFIX.pack(LEDGER_MAGIC, FORMAT_VERSION) + b"".join(records)


def encode_intent(intent: Intent) -> bytes:
    *about, app_id = intent
    return _record(_INTENT.pack(_IS_INTENT, *about) + app_id.encode())


def encode_done(batch_id: bytes, number: int, app_id: str, version: int) -> bytes:
    return _record(_DONE.pack(_IS_DONE, batch_id, number, version) + app_id.encode())


def decode_ledger(data: bytes) -> tuple[LedgerState, int]:
    """Decode a ledger. Returns its state and where its last whole record ends; 0 if the prefix is not valid."""
    state = LedgerState()
    if file_version(data, LEDGER_MAGIC) != FORMAT_VERSION:
        return state, 0
    at = _PREFIX.size
    while (body := _body_at(data, at)) is not None and _apply(state, body):
        at += _RECORD.size + len(body)
    return state, at


def whole_record_behind(data: bytes, at: int) -> bool:
    """True if a whole record stands after the broken one at ``at``: then this is damage, and not a torn tail."""
    for start in range(at + 1, len(data) - _RECORD.size - _VERSION.size + 1):
        if _RECORD.unpack_from(data, start)[1] > _INTENT.size + MAX_APP_ID_BYTES:
            continue
        body = _body_at(data, start)
        if body and _apply(LedgerState(), body):
            return True
    return False


def _apply(state: LedgerState, body: bytes) -> bool:
    """Apply the record ``body`` to ``state``; False if the record is not valid."""
    kind = body[0] if body else 0
    layout = {_IS_VERSION: _VERSION, _IS_INTENT: _INTENT, _IS_DONE: _DONE}.get(kind)
    if layout is None or len(body) < layout.size:
        return False
    *about, version = layout.unpack_from(body)
    app_id = _text(body[layout.size :])
    if app_id is None or max(version, *[each for each in about if isinstance(each, int)]) > LARGEST:
        return False
    if kind == _IS_INTENT:
        _, batch_id, queue_id, number, first_id, base_items, items = about
        state.intent = Intent(batch_id, queue_id, number, first_id, base_items, items, version, app_id)
        return state.intent.first_id > 0
    if kind == _IS_DONE:
        state.note_done(about[1], about[2], app_id, version)
    else:
        state.note_version(app_id, version)
    return True
