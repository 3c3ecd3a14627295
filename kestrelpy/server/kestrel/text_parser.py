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
from typing import Any

from kestrelpy.server.kestrel.names import is_legal

__all__ = ["Command", "TextParser"]

Command = tuple[Any, ...]

ITEMS_A_PIECE = 1024
BYTES_A_PIECE = 1 << 20
ILLEGAL_NAME = b"Queue name contains illegal characters (one of: ~ . /)."

_NUMBER = re.compile(rb"[+-]?[0-9]{1,20}")
_NAMED = {b"flush", b"delete", b"flush_expired"}
_ALONE = {b"flush_all", b"flush_all_expired", b"reload", b"shutdown", b"version", b"quit"}
_TIMED = {b"get", b"peek"}


def _refused(message: bytes) -> Command:
    return ("refused", message)


class TextParser:
    """The parser of one connection. Items of more than ``max_item_bytes`` are left out, and not held."""

    def __init__(self, max_item_bytes: int, max_line_bytes: int = 8192) -> None:
        self._max_item_bytes = max_item_bytes
        self._max_line_bytes = max_line_bytes
        self._parts: list[bytes] = []  # a line whose end has not arrived
        self._held = 0  # their bytes
        self._lines: list[bytes | None] = []  # whole lines, the next one last; None: a line that was too long
        self._line_bytes = 0
        self._is_too_long = False  # the beginning of a line that is too long is gone
        self._put: Command | None = None  # the ``put`` whose items are read; a refusal: its items are swallowed
        self._items: list[bytes] = []
        self._item_bytes = 0

    def _check(self) -> None:
        assert self._held == sum(map(len, self._parts))
        assert self._line_bytes == sum(len(line) for line in self._lines if line is not None)
        assert self._item_bytes == sum(map(len, self._items))
        assert self._put is not None or not self._items

    @property
    def held(self) -> int:
        """How many bytes were fed and belong to no command yet, without the items of a ``put`` that is being read."""
        return self._held + self._line_bytes

    def trim(self) -> None:
        """Nothing: what is done is not kept."""

    def feed(self, data: bytes) -> None:
        """Take the bytes that arrived."""
        *lines, rest = data.split(b"\n")
        if lines:
            first = b"".join([*self._parts, lines[0]])
            whole: list[bytes | None] = [None if self._is_too_long else first, *lines[1:]]
            self._parts.clear()
            self._held = 0
            self._is_too_long = False
            self._line_bytes += sum(len(line) for line in whole if line is not None)
            self._lines[:0] = reversed(whole)
        if rest and not self._is_too_long:
            self._parts.append(rest)
            self._held += len(rest)
        if self._held > self._most:
            self._parts.clear()
            self._held = 0
            self._is_too_long = True

    @property
    def _most(self) -> int:
        """The longest line that can have a meaning now."""
        return max(self._max_item_bytes, self._max_line_bytes) + 1

    def next(self) -> Command | None:
        """The next command, or ``None``: more bytes are needed."""
        while self._lines:
            line = self._lines.pop()
            if line is not None:
                self._line_bytes -= len(line)
                if line.endswith(b"\r"):
                    line = line[:-1]
            if self._put is not None:
                if not line and line is not None:
                    return self._end_put()
                self._take_item(line)
                if len(self._items) >= ITEMS_A_PIECE or self._item_bytes >= BYTES_A_PIECE:
                    return self._piece(is_last=False)
                continue
            command = self._read_line(line)
            if command[0] == "put":
                self._put = command
            elif self._put is None:  # else a put that is refused: its reply comes after its items
                return command
        return None

    # -- items ---------------------------------------------------------------------------------------------------------

    def _take_item(self, line: bytes | None) -> None:
        assert self._put is not None
        if self._put[0] == "put" and line is not None and len(line) <= self._max_item_bytes:
            self._items.append(line)
            self._item_bytes += len(line)

    def _piece(self, *, is_last: bool) -> Command:
        assert self._put is not None
        items, self._items, self._item_bytes = self._items, [], 0
        return (*self._put, items, is_last)

    def _end_put(self) -> Command:
        command = self._put
        assert command is not None
        if command[0] == "put":
            command = self._piece(is_last=True)
        self._put = None
        return command

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _read_line(self, line: bytes | None) -> Command:
        if line is None or len(line) > self._max_line_bytes:
            return _refused(b"Line too long.")
        words = line.split()
        if not words:
            return _refused(b"Unknown command: ")
        word = words[0].lower()
        if word == b"put":
            return self._read_put(words, line)
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

    def _read_put(self, words: list[bytes], line: bytes) -> Command:
        """``put q:`` or ``put q ms:``. Without the colon, no items follow."""
        if not line.rstrip().endswith(b":"):
            return _refused(b"Queue name required." if len(words) < 2 else b"Missing colon.")
        words = line.rstrip()[:-1].split()
        refused = _why_not(words)
        expiry_ms = None
        if refused is None and len(words) > 2:
            if _NUMBER.fullmatch(words[2]) is None:
                refused = _refused(b"Error parsing expiration time.")
            else:
                expiry_ms = int(words[2])
        if refused is not None:
            self._put = refused
            return refused
        return ("put", words[1], expiry_ms)

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
