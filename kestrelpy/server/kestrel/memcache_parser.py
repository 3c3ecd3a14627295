"""``MemcacheParser``: turns bytes into commands of kestrel's memcache protocol.

1. No I/O: ``feed`` takes the bytes that arrived, ``next`` gives the next command or ``None``. How the bytes were cut
   into pieces does not matter. No input raises an error.
2. A command is a tuple: a word, then its arguments, checked and converted. What is wrong is a command too:
   ``("client-error", ends)``.
3. After a command that ends the connection nothing follows.
4. A body that nobody wants is swallowed as it arrives. What is held is a line, or a wanted body.

The commands: ``("set", name, expiry, body, noreply)``, ``("unwanted", name, noreply)`` after a body that was swallowed,
``("get", name, timeout_ms, open, close, abort, peek, with_id)``, ``("monitor", name, seconds, max or None)``,
``("confirm", name, count)``, ``("delete", name, noreply)``, ``("flush", name, noreply)``, ``("flush_all", noreply)``,
``("flush_expired", name)``, ``("flush_all_expired",)``, ``("stats",)``, ``("dump_stats", names)``,
``("dump_config", names)``, ``("status",)``, ``("status", word)``, ``("version",)``, ``("reload",)``, ``("quit",)``,
``("shutdown",)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kestrelpy.server.kestrel.names import is_legal

__all__ = ["Command", "MemcacheParser"]

Command = tuple[Any, ...]

MAX_BODY = (1 << 31) - 1
CR = 13

_NUMBER = re.compile(rb"[+-]?[0-9]{1,20}")
_GOES_ON: Command = ("client-error", False)
_ENDS: Command = ("client-error", True)
_ALONE: dict[bytes, Command] = {
    b"stats": ("stats",),
    b"version": ("version",),
    b"reload": ("reload",),
    b"flush_all_expired": ("flush_all_expired",),
}


def _number(word: bytes) -> int | None:
    return int(word) if _NUMBER.fullmatch(word) is not None else None


class MemcacheParser:
    """The parser of one connection. ``largest_item`` says how large a body for a queue may be to be kept."""

    def __init__(self, largest_item: Callable[[bytes], int], max_line_bytes: int = 8192) -> None:
        self._largest_item = largest_item
        self._max_line_bytes = max_line_bytes
        self._data = b""
        self._at = 0  # all bytes of _data before this index are done
        self._set: tuple[bytes, int, int, bool] | None = None  # name, expiry, size, noreply; the body comes next
        self._body = bytearray()  # what has arrived of a body that comes in pieces, with its CRLF
        self._missing = 0  # how many bytes of that body are missing; while there are any, _data is empty
        self._swallowed: Command | None = None  # a body is swallowed; this command comes after it
        self._skip = 0  # how many bytes of that body are still to come, with its CRLF
        self._tail = b""  # the last two bytes of what was swallowed
        self._has_ended = False

    def _check(self) -> None:
        assert 0 <= self._at <= len(self._data)
        assert self._missing >= 0
        assert self._set is not None or not self._body
        assert self._set is None or len(self._body) + self._missing in (0, self._set[2] + 2)
        assert self._skip >= 0
        assert not (self._missing or self._skip) or not self.held

    @property
    def held(self) -> int:
        """How many bytes were fed and belong to no command yet, without an incomplete body."""
        return len(self._data) - self._at

    def trim(self) -> None:
        """Drop the bytes that are done: a client that waits for hours must not keep its last body in memory."""
        self._data, self._at = self._data[self._at :], 0

    def feed(self, data: bytes) -> None:
        """Take the bytes that arrived."""
        if self._has_ended:
            return
        if self._missing:
            here = data[: self._missing]
            self._body += here
            self._missing -= len(here)
            data = data[len(here) :]
        elif self._skip:
            data = self._swallow(data)
        self._data = self._data[self._at :] + data if len(self._data) > self._at else data
        self._at = 0

    def _swallow(self, data: bytes) -> bytes:
        """Drop what belongs to the unwanted body; returns the rest."""
        gone = data[: self._skip]
        self._tail = (self._tail + gone)[-2:]
        self._skip -= len(gone)
        return data[len(gone) :]

    def next(self) -> Command | None:
        """The next command, or ``None``: more bytes are needed."""
        while True:
            if self._missing or self._skip or self._has_ended:
                return None
            command: Command | None
            if self._set is not None:
                command = self._read_body(*self._set)
            elif self._swallowed is not None:
                command = self._swallowed if self._tail == b"\r\n" else _ENDS
                self._swallowed = None
            else:
                line = self._read_line()
                if line is None:
                    return None
                command = self._read_words(line)
            if command is not None:
                break
        if command is _ENDS or self._has_ended:
            self._has_ended = True
            self._data, self._at = b"", 0
        elif self._at == len(self._data):
            self._data, self._at = b"", 0
        return command

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _read_line(self) -> list[bytes] | None:
        """The words of the next line; none for a line that is too long. ``None``: its end has not arrived."""
        data, at = self._data, self._at
        end = data.find(b"\n", at, at + self._max_line_bytes + 1)
        if end < 0:
            return [] if len(data) - at > self._max_line_bytes else None
        self._at = end + 1
        line = data[at : end - 1 if end > at and data[end - 1] == CR else end]
        words = line.split(b" ")
        if not words[-1] and len(words) > 1:
            words = line.rstrip(b" ").split(b" ")
        return words

    def _read_words(self, words: list[bytes]) -> Command | None:
        """The command of a line. ``None``: its body comes next."""
        word = words[0].lower() if words else b""
        read = _READ.get(word)
        if read is None:
            return _ALONE.get(word, _ENDS)
        return read(self, words)

    def _get(self, words: list[bytes], *, with_id: bool = False) -> Command:
        if len(words) < 2:
            return _GOES_ON
        key = words[1]
        name, slash, options = key.partition(b"/")
        if not is_legal(name):
            return _ENDS
        if not slash:
            return ("get", name, 0, False, False, False, False, with_id)
        timeout_ms = 0
        opens = close = abort = peek = False
        for option in options.split(b"/"):
            if option == b"open":
                opens = True
            elif option == b"close":
                close = True
            elif option == b"abort":
                abort = True
            elif option == b"peek":
                peek = True
            elif option.startswith(b"t="):
                number = _number(option[2:])
                if number is None:
                    return _GOES_ON
                timeout_ms = max(0, number)
        if (abort and (opens or close or peek)) or (peek and (opens or close)):
            return _ENDS
        return ("get", name, timeout_ms, opens, close, abort, peek, with_id)

    def _gets(self, words: list[bytes]) -> Command:
        return self._get(words, with_id=True)

    def _monitor(self, words: list[bytes]) -> Command:
        if len(words) < 3:
            return _GOES_ON
        if not is_legal(words[1]):
            return _ENDS
        seconds = _number(words[2])
        most = _number(words[3]) if len(words) > 3 else None
        if seconds is None or (len(words) > 3 and most is None) or (most is not None and most < 0):
            return _GOES_ON
        return ("monitor", words[1], max(0, seconds), most)

    def _confirm(self, words: list[bytes]) -> Command:
        if len(words) < 3:
            return _GOES_ON
        if not is_legal(words[1]):
            return _ENDS
        count = _number(words[2])
        return _GOES_ON if count is None else ("confirm", words[1], count)

    def _named(self, words: list[bytes]) -> Command:
        """A command with the name of a queue and perhaps ``noreply``."""
        if len(words) < 2:
            return _GOES_ON
        if not is_legal(words[1]):
            return _ENDS
        word = words[0].lower().decode("ascii")
        if word == "flush_expired":
            return (word, words[1])
        return (word, words[1], words[-1] == b"noreply" and len(words) > 2)

    def _flush_all(self, words: list[bytes]) -> Command:
        return ("flush_all", words[-1] == b"noreply")

    def _dump(self, words: list[bytes]) -> Command:
        return (words[0].lower().decode("ascii"), words[1:])

    def _status(self, words: list[bytes]) -> Command:
        return ("status", words[1]) if len(words) > 1 else ("status",)

    def _last(self, words: list[bytes]) -> Command:
        """``quit`` or ``shutdown``: the client leaves."""
        self._has_ended = True
        return (words[0].lower().decode("ascii"),)

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _start_body(self, words: list[bytes]) -> Command | None:
        """Read the line of a command with a body. ``None``: its body comes next."""
        size = _number(words[4]) if len(words) > 4 else None
        if size is None or not 0 <= size <= MAX_BODY:
            return _ENDS
        name = words[1]
        noreply = len(words) > 5 and words[-1] == b"noreply"
        flags, expiry = _number(words[2]), _number(words[3])
        instead: Command | None = None
        if words[0].lower() != b"set" or not is_legal(name):
            instead = _ENDS
        elif flags is None or expiry is None:
            instead = _GOES_ON
        elif size > self._largest_item(name):
            instead = ("unwanted", name, noreply)
        if instead is not None or expiry is None:
            self._start_swallowing(size, instead or _GOES_ON)
            return None
        self._set = (name, expiry, size, noreply)
        missing = size + 2 - self.held
        if missing > 0:
            self._body += self._data[self._at :]
            self._missing = missing
            self._data, self._at = b"", 0
        return None

    def _start_swallowing(self, size: int, command: Command) -> None:
        self._swallowed = command
        self._skip = size + 2
        self._tail = b""
        there = self._data[self._at : self._at + self._skip]
        self._at += len(there)
        self._swallow(there)

    def _read_body(self, name: bytes, expiry: int, size: int, noreply: bool) -> Command:
        self._set = None
        if self._body:
            came, self._body = self._body, bytearray()
            if not came.endswith(b"\r\n"):
                return _ENDS
            del came[-2:]
            return ("set", name, expiry, bytes(came), noreply)
        end = self._at + size
        if self._data[end : end + 2] != b"\r\n":
            return _ENDS
        body = self._data[self._at : end]
        self._at = end + 2
        return ("set", name, expiry, body, noreply)


_READ: dict[bytes, Callable[[MemcacheParser, list[bytes]], Command | None]] = {
    b"get": MemcacheParser._get,
    b"gets": MemcacheParser._gets,
    **dict.fromkeys((b"set", b"add", b"replace", b"append", b"prepend", b"cas"), MemcacheParser._start_body),
    b"monitor": MemcacheParser._monitor,
    b"confirm": MemcacheParser._confirm,
    b"delete": MemcacheParser._named,
    b"flush": MemcacheParser._named,
    b"flush_expired": MemcacheParser._named,
    b"flush_all": MemcacheParser._flush_all,
    b"dump_stats": MemcacheParser._dump,
    b"dump_config": MemcacheParser._dump,
    b"status": MemcacheParser._status,
    b"quit": MemcacheParser._last,
    b"shutdown": MemcacheParser._last,
}
