"""The inbox in bytes: published batches, and the ledger of a queue.

docs/format.md is the specification. The rules are those of ``kestrelpy._journal.format``: no file, no lock, no clock;
every length is checked before anything is sliced; bytes that are not a whole, valid structure decode to ``None``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple
from zlib import crc32

from kestrelpy._journal.format import LARGEST
from kestrelpy._value import Value

BATCH_MAGIC = b"KSTRLBAT"
LEDGER_MAGIC = b"KSTRLMEM"
PLAIN_VERSION, STORE_VERSION = 1, 2
"""The versions of both files: without, and with what came from a store (``kestrelpy.ship``)."""
MAX_APP_ID_BYTES = 500
MOST_APP_IDS = 10_000
"""The ledger remembers the version of this many app_ids: those used last."""
MOST_MARKS = 10_000
"""The ledger remembers this many batches of a store: the last ones."""

_PREFIX = struct.Struct("<8sH6x")
_RECORD = struct.Struct("<II")
_BATCH = struct.Struct("<16sQQQQHI")
_STORE_BATCH = struct.Struct("<16sQQQQHIQ")
_PART = struct.Struct("<16sQQI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_VERSION = struct.Struct("<BQ")
_INTENT = struct.Struct("<B16s16sQQQQQ")
_DONE = struct.Struct("<B16sQQ")
_TAKEN = struct.Struct("<B16sQQBQQ")
_STORE_INTENT = struct.Struct("<B16s16sQQQQQQ")
_IS_VERSION, _IS_INTENT, _IS_DONE, _IS_TAKEN, _IS_STORE_INTENT = 1, 2, 3, 4, 5
_REFUSED, _INGESTED = 1, 2
_NO_ID = bytes(16)


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
    """A published batch. ``app_id`` is empty if it has none. ``stored``: its number in the store that it came from; 0
    if it was published here.
    """

    batch_id: bytes
    number: int
    app_id: str
    version: int
    parts: tuple[BatchPart, ...]
    stored: int = 0

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
    stored: int = 0
    """The number of the batch in the store that it came from; 0 if it was published here."""


class StoreMark(NamedTuple):
    """What became of a batch of a store. ``taken_ms``: when, by the owner's clock."""

    batch_id: bytes
    taken_ms: int
    refused: bool


class LedgerState:
    """The content of a queue's ledger.

    ``versions``: the last version of each app_id, the least recently used first. ``finished``: the ids and numbers of
    ingested batches whose files may still exist, or may come back after a power cut. ``intent``: see ``Intent``.
    ``taken``: the number of the last batch that was taken from a store, where nothing is left to do for it and those
    before it; 0 if none was. ``marks``: by number, those of them that are remembered: refused ones, and those that only
    their id tells from another.
    """

    __slots__ = ("finished", "intent", "marks", "taken", "versions")

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.finished: dict[bytes, int] = {}
        self.intent: Intent | None = None
        self.taken = 0
        self.marks: dict[int, StoreMark] = {}

    def copy(self) -> LedgerState:
        copied = LedgerState()
        copied.versions, copied.finished, copied.marks = self.versions.copy(), self.finished.copy(), self.marks.copy()
        copied.intent, copied.taken = self.intent, self.taken
        return copied

    def apply(self, record: bytes) -> None:
        """Apply a whole record."""
        assert _apply(self, record[_RECORD.size :])

    def knows(self, batch: PublishedBatch) -> bool:
        """True if the batch was ingested, or if its version is not above the last one of its app_id."""
        last = self.versions.get(batch.app_id) if batch.app_id else None
        if batch.batch_id in self.finished or (last is not None and batch.version <= last):
            return True
        return any(mark.batch_id == batch.batch_id and not mark.refused for mark in self.marks.values())

    def is_over(self, batch: PublishedBatch) -> bool:
        """True if the batch came from a store, and nothing is left to do for its number there."""
        return 0 < batch.stored <= self.taken

    def has_refused(self, stored: int, batch_id: bytes) -> bool:
        """True if that was the store's batch of that number, and it was refused."""
        mark = self.marks.get(stored)
        return mark is not None and mark.refused and mark.batch_id == batch_id

    def note_version(self, app_id: str, version: int) -> None:
        if app_id:
            self.versions[app_id] = max(version, self.versions.pop(app_id, version))
            if len(self.versions) > MOST_APP_IDS:
                del self.versions[next(iter(self.versions))]

    def note_done(self, batch_id: bytes, number: int, app_id: str, version: int) -> None:
        self.finished[batch_id] = number
        self.note_version(app_id, version)
        self.intent = None

    def note_taken(self, number: int, mark: StoreMark, *, remembers: bool) -> None:
        """Nothing is left to do for the store's batch of that number."""
        self.taken = max(self.taken, number)
        if remembers:
            self.marks[number] = mark
            if len(self.marks) > MOST_MARKS:
                del self.marks[min(self.marks)]

    def forget_marks(self, before_ms: int) -> None:
        """Forget the batches of a store that were taken before that time."""
        self.marks = {number: mark for number, mark in self.marks.items() if mark.taken_ms >= before_ms}


# -- a published batch -----------------------------------------------------------------------------------------------


def encode_batch_file(batch: PublishedBatch) -> bytes:
    app_id = batch.app_id.encode()
    about = (batch.batch_id, batch.number, batch.items, batch.data_bytes, batch.version, len(app_id), len(batch.parts))
    head = _STORE_BATCH.pack(*about, batch.stored) if batch.stored else _BATCH.pack(*about)
    body = b"".join((head, app_id, *(_PART.pack(*part) for part in batch.parts)))
    return _prefix(BATCH_MAGIC, from_store=bool(batch.stored)) + _record(body)


def _prefix(magic: bytes, *, from_store: bool) -> bytes:
    return _PREFIX.pack(magic, STORE_VERSION if from_store else PLAIN_VERSION)


def file_version(data: bytes, magic: bytes) -> int | None:
    """The format version that a file claims, or ``None`` if it does not begin with ``magic``."""
    if len(data) < _PREFIX.size or data[:8] != magic:
        return None
    return int(_PREFIX.unpack_from(data)[1])


def decode_batch_file(data: bytes) -> PublishedBatch | None:
    """Decode a whole file: ``None`` unless ``data`` is exactly one published batch."""
    kind = file_version(data, BATCH_MAGIC)
    layout = {PLAIN_VERSION: _BATCH, STORE_VERSION: _STORE_BATCH}.get(kind or 0)
    body = _body_at(data, _PREFIX.size) if layout is not None else None
    if layout is None or body is None or _PREFIX.size + _RECORD.size + len(body) != len(data):
        return None
    if len(body) < layout.size:
        return None
    batch_id, number, items, size, version, app_bytes, count, *store = layout.unpack_from(body)
    stored = store[0] if store else 0
    parts_at = layout.size + app_bytes
    if parts_at + count * _PART.size != len(body) or max(number, items, size, version, stored) > LARGEST:
        return None
    app_id = _text(body[layout.size : parts_at])
    parts = tuple(BatchPart(*each) for each in _PART.iter_unpack(body[parts_at:]))
    if app_id is None or not all(part.items for part in parts) or bool(store) != bool(stored):
        return None
    batch = PublishedBatch(batch_id, number, app_id, version, parts, stored)
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


def encode_ledger(state: LedgerState, intent: Intent | None, *, from_store: bool = False) -> bytes:
    """Encode a whole ledger: ``state``, with ``intent`` in place of the intent of ``state``. ``from_store``: a record
    of what came from a store follows.
    """
    records = [_record(_VERSION.pack(_IS_VERSION, version) + key.encode()) for key, version in state.versions.items()]
    records += [encode_done(batch_id, number, "", 0) for batch_id, number in state.finished.items()]
    records += [encode_mark(number, mark) for number, mark in sorted(state.marks.items())]
    if state.taken and state.taken not in state.marks:
        records.append(encode_mark(state.taken, None))
    if intent is not None:
        records.append(encode_intent(intent))
    return _prefix(LEDGER_MAGIC, from_store=from_store or needs_store_version(state, intent)) + b"".join(records)


def needs_store_version(state: LedgerState, intent: Intent | None) -> bool:
    """Whether a ledger has anything that came from a store."""
    return bool(state.taken or (intent is not None and intent.stored))


def encode_intent(intent: Intent) -> bytes:
    *about, version, app_id, stored = intent
    if stored:
        return _record(_STORE_INTENT.pack(_IS_STORE_INTENT, *about, stored, version) + app_id.encode())
    return _record(_INTENT.pack(_IS_INTENT, *about, version) + app_id.encode())


def encode_done(batch_id: bytes, number: int, app_id: str, version: int) -> bytes:
    return _record(_DONE.pack(_IS_DONE, batch_id, number, version) + app_id.encode())


def encode_taken(batch: PublishedBatch, taken_ms: int) -> bytes:
    """The record that a batch of a store was ingested: in place of ``encode_done``."""
    about = (batch.batch_id, batch.stored, taken_ms, _INGESTED, batch.number, batch.version)
    return _record(_TAKEN.pack(_IS_TAKEN, *about) + batch.app_id.encode())


def encode_mark(number: int, mark: StoreMark | None) -> bytes:
    """The record that nothing is left to do for the store's batch of that number. ``None``: and that is all."""
    batch_id, taken_ms, refused = mark if mark is not None else StoreMark(_NO_ID, 0, False)
    flags = _REFUSED if refused else 0
    return _record(_TAKEN.pack(_IS_TAKEN, batch_id, number, taken_ms, flags, 0, 0))


def decode_ledger(data: bytes) -> tuple[LedgerState, int]:
    """Decode a ledger. Returns its state and where its last whole record ends; 0 if the prefix is not valid."""
    state = LedgerState()
    if not _is_ledger(data):
        return state, 0
    at = _PREFIX.size
    for record in ledger_records(data, state):
        at += len(record)
    return state, at


def ledger_records(data: bytes, state: LedgerState) -> Iterator[bytes]:
    """The whole records of a ledger, one after another; each is applied to ``state`` when it is yielded."""
    version = file_version(data, LEDGER_MAGIC)
    at = _PREFIX.size
    while _is_ledger(data) and (body := _body_at(data, at)) is not None and _apply(state, body, version or 0):
        end = at + _RECORD.size + len(body)
        yield data[at:end]
        at = end


def _is_ledger(data: bytes) -> bool:
    return file_version(data, LEDGER_MAGIC) in (PLAIN_VERSION, STORE_VERSION)


def whole_record_behind(data: bytes, at: int) -> bool:
    """True if a whole record stands after the broken one at ``at``: then this is damage, and not a torn tail."""
    for start in range(at + 1, len(data) - _RECORD.size - _VERSION.size + 1):
        if _RECORD.unpack_from(data, start)[1] > _STORE_INTENT.size + MAX_APP_ID_BYTES:
            continue
        body = _body_at(data, start)
        if body and _apply(LedgerState(), body):
            return True
    return False


_LAYOUTS = {
    _IS_VERSION: _VERSION,
    _IS_INTENT: _INTENT,
    _IS_DONE: _DONE,
    _IS_TAKEN: _TAKEN,
    _IS_STORE_INTENT: _STORE_INTENT,
}
_LAST_KIND = {PLAIN_VERSION: _IS_DONE, STORE_VERSION: _IS_STORE_INTENT}


def _apply(state: LedgerState, body: bytes, file_version: int = STORE_VERSION) -> bool:
    """Apply the record ``body`` to ``state``; False if the record is not valid in a file of that version."""
    kind = body[0] if body else 0
    layout = _LAYOUTS.get(kind)
    if layout is None or kind > _LAST_KIND[file_version] or len(body) < layout.size:
        return False
    about = layout.unpack_from(body)
    app_id = _text(body[layout.size :])
    if app_id is None or max(each for each in about if isinstance(each, int)) > LARGEST:
        return False
    if kind == _IS_VERSION:
        state.note_version(app_id, about[1])
    elif kind == _IS_DONE:
        state.note_done(about[1], about[2], app_id, about[3])
    elif kind == _IS_TAKEN:
        return _apply_taken(state, about, app_id)
    else:
        *ids, version = about[1:]
        stored = ids.pop() if kind == _IS_STORE_INTENT else 0
        batch_id, queue_id, number, first_id, base_items, items = ids
        state.intent = Intent(batch_id, queue_id, number, first_id, base_items, items, version, app_id, stored)
        return state.intent.first_id > 0 and (kind == _IS_INTENT or stored > 0)
    return True


def _apply_taken(state: LedgerState, about: tuple[Any, ...], app_id: str) -> bool:
    _, batch_id, stored, taken_ms, flags, number, version = about
    if flags not in (0, _REFUSED, _INGESTED) or not stored:
        return False
    if flags == _INGESTED:
        state.note_done(batch_id, number, app_id, version)
    mark = StoreMark(batch_id, taken_ms, flags == _REFUSED)
    state.note_taken(stored, mark, remembers=mark.refused or (batch_id != _NO_ID and not app_id))
    return True
