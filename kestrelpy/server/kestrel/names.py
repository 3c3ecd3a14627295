"""Names: which names of queues are legal, and what they are called on disk.

A client's name may have any bytes but a few. A name of the library has letters, digits, ``_`` and ``-``. A name that
fits is itself there; every other name is ``x--`` and its bytes in hexadecimal. So the name of a part has at most 48
bytes, if it does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256

__all__ = ["is_legal", "library_name", "original_name", "reader_name", "side_name", "split"]

ESCAPE = "x--"
HASHED = "x--z"
"""The beginning of a side queue's name whose own name is too long for hexadecimal."""
MAX_HEX_BYTES = 48
OWN_READER = b"_"
"""The reader of a queue with fan-outs has this name: a fan-out of this name is called otherwise on disk."""

MAX_NAME_BYTES = 100 + 1 + 100
"""The longest name is that of a fan-out whose two parts fit."""
KNOWN_NAMES = 4096

_ILLEGAL = re.compile(rb"[ \r\n\0./~]")
_FITS = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


class _Known(dict[bytes, bool]):
    """Whether names are legal, of those that were asked for last. A name too long for any queue is not kept."""

    def __missing__(self, name: bytes) -> bool:
        if len(name) > MAX_NAME_BYTES:
            return False
        parent, child = split(name)
        legal = _ILLEGAL.search(name) is None and _is_part(parent) and (child is None or _is_part(child))
        if len(self) >= KNOWN_NAMES:
            self.clear()
        self[name] = legal
        return legal


is_legal: Callable[[bytes], bool] = _Known().__getitem__
"""Whether a client may use this name for a queue: ``orders``, or ``orders+audit`` for a fan-out."""


def _is_part(part: bytes) -> bool:
    return 0 < len(part) <= MAX_HEX_BYTES or _fits(part)


def _fits(part: bytes) -> bool:
    return _FITS.fullmatch(part) is not None and not part.startswith(b"x--") and part != OWN_READER


def split(name: bytes) -> tuple[bytes, bytes | None]:
    """The parent's name, and the fan-out's own; ``None`` if the name is no fan-out's."""
    parent, plus, child = name.partition(b"+")
    return parent, child if plus else None


def library_name(part: bytes) -> str:
    """What a parent, or the part of a fan-out's name after the ``+``, is called on disk."""
    return part.decode("ascii") if _fits(part) else ESCAPE + part.hex()


def original_name(name: str) -> bytes | None:
    """The client's name for what is called ``name`` on disk; ``None`` if no client can name it."""
    if not name.startswith(ESCAPE):
        encoded = name.encode("ascii")
        return encoded if _fits(encoded) else None
    digits = name.removeprefix(ESCAPE)
    if _HEX.fullmatch(digits) is None:
        return None
    part = bytes.fromhex(digits)
    return part if library_name(part) == name else None


def side_name(name: bytes) -> str:
    """What the side queue of a fan-out is called on disk: what was put for this fan-out alone."""
    if len(name) <= MAX_HEX_BYTES:
        return ESCAPE + name.hex()
    return HASHED + sha256(name).hexdigest()[:48]


def reader_name(name: bytes) -> str:
    """The library's name of a fan-out's reader."""
    child = split(name)[1]
    assert child is not None
    return library_name(child)
