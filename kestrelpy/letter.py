"""``DeadLetter``: an item that its consumers have given up, with where it comes from; and the bytes it is kept as.

In its queue, a dead letter is an item like any other. Its first line says where it comes from, as JSON in ASCII; all
after that line is the data, byte for byte (docs/format.md). So each tool that shows items shows it, and one call of any
language takes it apart.
"""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

from kestrelpy._value import Value, set_field

__all__ = ["DeadLetter"]

_BEGIN = b'{"dead_letter": 1, '
MOST_HEAD_BYTES = 16 << 10
"""The first line is not longer: two names, a reason of 1 KiB with an escape for each of its bytes, and numbers."""
_MOST_NESTED = 8
"""A dead letter may die, too. So many first lines are looked through."""
_LARGEST = (1 << 62) - 1
_NUMBERS = ("id", "added_ms", "died_ms", "error_count")
_TEXTS = ("queue", "reader", "reason")


class LetterOwner(Protocol):
    """What a dead letter needs from where it was read: a session of ``dead_letters``."""

    def requeue(self, letter: DeadLetter) -> None: ...

    def drop(self, letter: DeadLetter) -> None: ...


class DeadLetter(Value):
    """An item that its consumers have given up.

    ``data``: the item, as it was put. ``queue``, ``reader``, ``id``, ``added_ms``: where it was, and when it was put
    there (milliseconds since 1970). ``died_ms``, ``error_count``, ``reason``: when it was given up, how often it had
    failed, and the last failure. ``letter_id``: its own id in the queue of the dead letters; 0 if nobody knows.

    An item of that queue that is no dead letter is shown with an empty ``queue`` and all of its bytes as ``data``.
    """

    __slots__ = (
        "_owner",
        "added_ms",
        "data",
        "died_ms",
        "error_count",
        "id",
        "letter_id",
        "queue",
        "reader",
        "reason",
    )
    data: bytes
    queue: str
    reader: str
    id: int
    added_ms: int
    died_ms: int
    error_count: int
    reason: str
    letter_id: int

    def __init__(
        self,
        data: bytes,
        queue: str,
        reader: str,
        id: int,
        added_ms: int,
        died_ms: int,
        error_count: int,
        reason: str,
        letter_id: int = 0,
    ) -> None:
        set_field(self, "data", data)
        set_field(self, "queue", queue)
        set_field(self, "reader", reader)
        set_field(self, "id", id)
        set_field(self, "added_ms", added_ms)
        set_field(self, "died_ms", died_ms)
        set_field(self, "error_count", error_count)
        set_field(self, "reason", reason)
        set_field(self, "letter_id", letter_id)
        set_field(self, "_owner", None)

    def requeue(self) -> None:
        """Put ``data`` back into ``queue``, as a new item for all its readers, and take the letter out: exactly once,
        also across a kill or a power cut. Both are on disk when this returns.

        The item is in the queue as soon as the owner of the queue takes it in, or the next owner opens the queue.
        Raises ``ValueError`` if this is no dead letter, or was not read by ``dead_letters``; ``UnknownItem`` if
        the letter is gone; ``ItemTooLarge``, ``WrongKind``: then the letter stays. Raises ``QueueLocked`` if another
        process has the reader of the dead letters, and ``OSError``: then it is tried again, also by the next opening.
        """
        self._needed_owner().requeue(self)

    def drop(self) -> None:
        """Take the letter out for good, with its data. It is on disk when this returns. Raises as ``requeue``."""
        self._needed_owner().drop(self)

    def _needed_owner(self) -> LetterOwner:
        owner: LetterOwner | None = getattr(self, "_owner", None)  # a slot, and no field: a copy does not have it
        if owner is None:
            raise ValueError("this dead letter was not read by kestrelpy.dead_letters()")
        return owner


def with_owner(letter: DeadLetter, owner: LetterOwner) -> DeadLetter:
    """The letter, which ``owner`` can put back or drop from now on."""
    set_field(letter, "_owner", owner)
    return letter


def encode_letter(letter: DeadLetter) -> bytes:
    """The bytes of an item that is this dead letter."""
    import json  # here and not above: programs without dead letters must not pay for it

    about = {
        "dead_letter": 1,
        "queue": letter.queue,
        "reader": letter.reader,
        "id": letter.id,
        "added_ms": letter.added_ms,
        "died_ms": letter.died_ms,
        "error_count": letter.error_count,
        "reason": letter.reason,
        "crc": crc32(letter.data),
    }
    return json.dumps(about).encode("ascii") + b"\n" + letter.data


def decode_letter(data: bytes, letter_id: int = 0) -> DeadLetter | None:
    """The dead letter; ``None`` if these bytes are none, or are damaged."""
    if not data.startswith(_BEGIN):
        return None
    end = data.find(b"\n", 0, MOST_HEAD_BYTES)
    about = _parsed(data[:end]) if end > 0 else None
    if about is None:
        return None
    numbers, texts = [about.get(name) for name in _NUMBERS], [about.get(name) for name in _TEXTS]
    if not all(type(each) is int and 0 <= each <= _LARGEST for each in numbers):
        return None
    if not all(isinstance(each, str) and _is_text(each) for each in texts):
        return None
    content = data[end + 1 :]
    if about.get("dead_letter") != 1 or about.get("crc") != crc32(content):
        return None
    item_id, added_ms, died_ms, error_count = numbers
    queue, reader, reason = texts
    return DeadLetter(content, queue, reader, item_id, added_ms, died_ms, error_count, reason, letter_id)  # type: ignore[arg-type]


def content_bytes(data: bytes) -> int:
    """The size of an item without what makes it a dead letter: its first line, and those of the letters in it."""
    for _ in range(_MOST_NESTED):
        letter = decode_letter(data)
        if letter is None:
            break
        data = letter.data
    return len(data)


def _parsed(line: bytes) -> dict[str, object] | None:
    import json

    try:
        about = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None


def _is_text(text: str) -> bool:
    """Whether it can be shown and written: JSON may have halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
