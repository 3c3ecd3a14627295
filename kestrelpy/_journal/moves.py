"""The intent to move items to another queue, as a reader's checkpoint has it.

It is on disk before the items are published for the other queue, and is gone from the checkpoint that has the items as
done (docs/dead-letters.md). Encoding and decoding know no files, locks or clocks.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import NamedTuple

from kestrelpy._journal.file_names import is_name

#   | stream 16 | number 8 | target_bytes 2 | kind 2 | notes 4 | target | notes |
#   a note: | id 8 | error_count 4 | died_ms 8 | reason_bytes 2 | reason |
_MOVE = struct.Struct("<16sQHHI")
_NOTE = struct.Struct("<QIQH")
_DEAD, _REQUEUED = 1, 2
_LARGEST = (1 << 62) - 1
MAX_REASON_BYTES = 1024
"""The reason of a death has at most so many bytes as JSON in ASCII, and so in UTF-8. In what an earlier version has
saved, in UTF-8 alone.
"""
_MOVES = "kestrelpy-move-"
"""How the application ids of moves begin."""


class MoveNote(NamedTuple):
    """One item of a move. ``died_ms``: when it died; ``error_count``, ``reason``: why. All are 0 or empty if it is put
    back into the queue that it came from.
    """

    item_id: int
    error_count: int = 0
    died_ms: int = 0
    reason: str = ""


class Move(NamedTuple):
    """One move. ``stream``: random, of one opening of the reader, in which moves have rising numbers, from 1: the two
    together are never used for another move. ``target``: the queue that gets the items. ``is_requeue``: the items are
    dead letters, whose data goes back; else they become dead letters. ``notes``: by rising id.
    """

    stream: bytes
    number: int
    target: str
    is_requeue: bool
    notes: tuple[MoveNote, ...]

    @property
    def app_id(self) -> str:
        """The application id under which the batch is published; its version is ``number``."""
        return _MOVES + self.stream.hex()


def encode_move(move: Move) -> bytes:
    target = move.target.encode("ascii")
    kind = _REQUEUED if move.is_requeue else _DEAD
    parts = [_MOVE.pack(move.stream, move.number, len(target), kind, len(move.notes)), target]
    for item_id, error_count, died_ms, reason in move.notes:
        text = reason.encode()
        parts += [_NOTE.pack(item_id, error_count, died_ms, len(text)), text]
    return b"".join(parts)


def decode_move(data: bytes) -> Move | None:
    """What ``encode_move`` has made; ``None`` unless that is all of ``data``."""
    if len(data) < _MOVE.size:
        return None
    stream, number, target_bytes, kind, count = _MOVE.unpack_from(data)
    at = _MOVE.size + target_bytes
    target = _text(data[_MOVE.size : at])
    notes: list[MoveNote] = []
    last_id = 0
    while at + _NOTE.size <= len(data) and len(notes) < count:
        item_id, error_count, died_ms, size = _NOTE.unpack_from(data, at)
        at += _NOTE.size + size
        reason = _text(data[at - size : at])
        if reason is None or size > MAX_REASON_BYTES or not last_id < item_id <= _LARGEST or died_ms > _LARGEST:
            return None
        notes.append(MoveNote(item_id, error_count, died_ms, reason))
        last_id = item_id
    if at != len(data) or len(notes) != count or not notes or kind not in (_DEAD, _REQUEUED):
        return None
    if target is None or not is_name(target) or not 0 < number <= _LARGEST:
        return None
    return Move(stream, number, target, kind == _REQUEUED, tuple(notes))


def is_move(app_id: str) -> bool:
    """Whether a batch with this application id is a move. Who makes a move checks the sizes of its items."""
    return app_id.startswith(_MOVES)


def cut_reason(text: str) -> str:
    """The text, or as much of its beginning as ``MAX_REASON_BYTES`` hold: a character that is not ASCII takes 6 bytes
    of them, or 12.
    """
    from json import dumps  # here and not above: programs without dead letters must not pay for it

    text = text[:MAX_REASON_BYTES].encode("utf-8", "backslashreplace").decode()
    sizes = accumulate(len(dumps(character)) - 2 for character in text)
    return text[: sum(size <= MAX_REASON_BYTES for size in sizes)]


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
