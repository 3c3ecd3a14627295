"""``TextParser``: turns bytes into commands of kestrel's text protocol.

1. No I/O, as ``MemcacheParser``. No input raises an error, and none ends the connection.
2. What is wrong is a command too: ``("refused", message)``.
3. The items of a ``put`` are lines up to an empty one. They come in pieces of at most ``ITEMS_A_PIECE`` items. After a
   ``put`` that is refused they are swallowed.

The commands: ``("put", name, expiry_ms or None, items, is_last)``, ``("get", name, timeout_ms)``, ``("peek", name,
timeout_ms)``, ``("monitor", name, timeout_ms)``, ``("confirm", name, count)``, ``("flush", name)``, ``("delete",
name)``, ``("flush_expired", name)``, ``("flush_all",)``, ``("flush_all_expired",)``, ``("reload",)``, ``("status",)``,
``("status", word)``, ``("shutdown",)``, ``("version",)``, ``("quit",)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kestrelpy.server.kestrel.names import is_legal

__all__ = ["Command", "TextParser"]

Command = tuple[Any, ...]

ITEMS_A_PIECE = 1024
BYTES_A_PIECE = 1 << 20
CR = 13
ILLEGAL_NAME = b"Queue name contains illegal characters (one of: ~ . /)."

_NUMBER = re.compile(rb"[+-]?[0-9]{1,20}")
_NAMED = {b"flush", b"delete", b"flush_expired"}
_ALONE = {b"flush_all", b"flush_all_expired", b"reload", b"shutdown", b"version", b"quit"}
_TIMED = {b"get", b"peek"}


def _refused(message: bytes) -> Command:
    return ("refused", message)


class TextParser:
    """The parser of one connection. ``largest_item`` says how large an item for a queue may be: what is larger is left
    out, and not held.
    """

    def __init__(self, largest_item: Callable[[bytes], int], max_line_bytes: int = 8192) -> None:
        self._largest_item = largest_item
        self._max_item_bytes = 0  # of the ``put`` whose items are read; none is wanted if it is refused
        self._max_line_bytes = max_line_bytes
        self._data = b""
        self._at = 0  # all bytes of _data before this index are done
        self._later = bytearray()  # bytes after those of _data; if there are none, a line whose end has not arrived
        self._is_too_long = False  # the beginning of a line that is too long is gone
        self._put: Command | None = None  # the ``put`` whose items are read; a refusal: its items are swallowed
        self._items: list[bytes] = []
        self._item_bytes = 0

    def _check(self) -> None:
        assert 0 <= self._at <= len(self._data)
        assert self._data or (b"\n" not in self._later and len(self._later) <= self._most)
        assert self._item_bytes == sum(map(len, self._items))
        assert self._put is not None or not self._items

    @property
    def held(self) -> int:
        """How many bytes were fed and belong to no command yet, without the items of a ``put`` that is being read.

        A line whose end has not arrived counts if another line is before it.
        """
        return len(self._data) - self._at + len(self._later) if self._data else 0

    def trim(self) -> None:
        """Drop the bytes that are done: a client that waits for hours must not keep its last items in memory."""
        if self._data:
            rest = b"".join((self._data[self._at :], self._later))
            self._data, self._at = b"", 0
            self._later = bytearray()
            self.feed(rest)

    def feed(self, data: bytes) -> None:
        """Take the bytes that arrived."""
        if self._data:
            self._later += data
        elif b"\n" in data:
            if self._later:
                self._later += data
                data = bytes(self._later)
                self._later = bytearray()
            self._data = data
        elif not self._is_too_long:
            self._later += data
            if len(self._later) > self._most:
                self._later = bytearray()
                self._is_too_long = True

    @property
    def _most(self) -> int:
        """The longest line that can have a meaning now, with its CR."""
        if self._put is None:
            return self._max_line_bytes + 1
        return self._max_item_bytes + 1

    def next(self) -> Command | None:
        """The next command, or ``None``: more bytes are needed."""
        while self._data:
            if self._put is not None:
                command = self._read_items(self._put)
            else:
                data, at = self._data, self._at
                end = data.find(b"\n", at)
                if end < 0:
                    self.trim()
                    continue
                line: bytes | None = data[at : end - 1 if data[end - 1] == CR and end > at else end]
                self._at = end + 1
                if self._is_too_long:
                    self._is_too_long = False
                    line = None
                command = self._read_line(line)
            if command is not None:
                return command
        return None

    # -- items ---------------------------------------------------------------------------------------------------------

    def _read_items(self, put: Command) -> Command | None:
        """Read items up to the empty line, or so many that they make a piece. ``None``: there are no more lines."""
        data, at, items, size = self._data, self._at, self._items, self._item_bytes
        most = self._max_item_bytes
        while (end := data.find(b"\n", at)) >= 0:
            item = data[at : end - 1 if data[end - 1] == CR and end > at else end]
            at = end + 1
            if self._is_too_long:
                self._is_too_long = False
            elif not item:
                self._at, self._put = at, None
                return self._piece(put, is_last=True) if put[0] == "put" else put
            elif len(item) <= most:
                items.append(item)
                size += len(item)
                if len(items) >= ITEMS_A_PIECE or size >= BYTES_A_PIECE:
                    self._at = at
                    return self._piece(put, is_last=False)
        self._at, self._item_bytes = at, size
        self.trim()
        return None

    def _piece(self, put: Command, *, is_last: bool) -> Command:
        items, self._items, self._item_bytes = self._items, [], 0
        return ("put", put[1], put[2], items, is_last)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _read_line(self, line: bytes | None) -> Command | None:
        """The command of a line; ``None`` if it is a ``put`` whose items come next."""
        if line is None or len(line) > self._max_line_bytes:
            return _refused(b"Line too long.")
        words = line.split(b" ")  # and at no other blanks: these may be in names
        if b"" in words:
            words = [word for word in words if word] or [b""]
        word = words[0].lower()
        if word == b"put":
            return self._read_put(words)
        if word in _TIMED or word == b"monitor":
            return self._read_timed(word, words)
        if word == b"confirm":
            return self._read_confirm(words)
        if word in _NAMED:
            refused = _why_not(words)
            return refused or (word.decode("ascii"), words[1])
        if word in _ALONE:
            return (word.decode("ascii"),)
        if word == b"status":
            return ("status", words[1]) if len(words) > 1 else ("status",)
        return _refused(b"Unknown command: " + words[0])

    def _read_put(self, words: list[bytes]) -> Command | None:
        """``put q:`` or ``put q ms:``. Without the colon, no items follow: it is a ``put`` of none."""
        has_items = words[-1].endswith(b":")
        if has_items:
            words[-1:] = [words[-1][:-1]] if words[-1] != b":" else []
        refused = _why_not(words)
        expiry_ms = None
        if refused is None and len(words) > 2:
            if _NUMBER.fullmatch(words[2]) is None:
                refused = _refused(b"Error parsing expiration time.")
            else:
                expiry_ms = int(words[2])
        put = refused or ("put", words[1], expiry_ms)
        if has_items:
            self._put = put
            self._max_item_bytes = 0 if refused is not None else self._largest_item(words[1])
            return None
        return refused or (*put, [], True)

    def _read_timed(self, word: bytes, words: list[bytes]) -> Command:
        needs_time = word == b"monitor"
        if needs_time and len(words) < 3:
            return _refused(b"Queue name & timeout required.")
        refused = _why_not(words)
        if refused is not None:
            return refused
        timeout = words[2] if len(words) > 2 else b"0"
        if _NUMBER.fullmatch(timeout) is None:
            return _refused(b"Error parsing timeout.")
        return (word.decode("ascii"), words[1], max(0, int(timeout)))

    def _read_confirm(self, words: list[bytes]) -> Command:
        if len(words) < 3:
            return _refused(b"Queue name & count required.")
        refused = _why_not(words)
        if refused is not None:
            return refused
        if _NUMBER.fullmatch(words[2]) is None:
            return _refused(b"Error parsing count.")
        return ("confirm", words[1], int(words[2]))


def _why_not(words: list[bytes]) -> Command | None:
    """Why a command with a queue's name cannot be done; ``None`` if it can."""
    if len(words) < 2:
        return _refused(b"Queue name required.")
    return None if is_legal(words[1]) else _refused(ILLEGAL_NAME)
