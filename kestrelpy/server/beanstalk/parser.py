"""``BeanstalkParser``: turns bytes into commands of the beanstalk protocol, as beanstalkd 1.12 does.

1. No I/O: ``feed`` takes the bytes that arrived, ``next`` gives the next command or ``None``. How the bytes were cut
   into pieces does not matter. No input raises an error.
2. A command is a tuple: its verb, then its arguments, checked and converted. Input that the server would refuse in any
   state is a command too: ``("refused", reply)``, and the four constants below.
3. The common forms are recognised by their first word, strictly. A line that fails there is read again by the lax rules
   of beanstalkd (commands are matched by prefix, numbers are read as by ``strtoul``), which are slow and rarely needed.

The commands: ``("put", priority, delay, ttr, body)``; ``reserve``, ``quit``, ``stats``, ``list-tubes``,
``list-tube-used``, ``list-tubes-watched``, ``peek-ready``, ``peek-delayed``, ``peek-buried`` alone;
``("reserve-with-timeout", seconds)``, ``None`` for ever; ``peek``, ``delete``, ``touch``, ``kick-job``, ``reserve-job``
and ``stats-job`` with an id; ``("release", id, priority, delay)``; ``("bury", id, priority)``; ``("kick", count)``;
``use``, ``watch``, ``ignore`` and ``stats-tube`` with a tube's name; ``("pause-tube", name, seconds)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["MAX_LINE_BYTES", "BeanstalkParser", "Command"]

Command = tuple[Any, ...]

MAX_LINE_BYTES = 224
"""The longest line, with its CRLF: the size of beanstalkd's buffer. A longer line is discarded up to its end."""

_MAX_U32 = 0xFFFFFFFF
_MAX_U64 = 0xFFFFFFFFFFFFFFFF
_MAX_LONG = 0x7FFFFFFFFFFFFFFF
_SAFE_DIGITS = 19
"""Any number of so many decimal digits fits into 64 bits."""

BAD_FORMAT: Command = ("refused", b"BAD_FORMAT\r\n")
UNKNOWN_COMMAND: Command = ("refused", b"UNKNOWN_COMMAND\r\n")
TOO_BIG: Command = ("too-big",)
"""A put whose body was larger than allowed; the body was discarded."""
EXPECTED_CRLF: Command = ("expected-crlf",)
"""A put whose body was not followed by CRLF. It has used up an id."""
BAD_PUT: Command = ("bad-put",)
"""BAD_FORMAT, but counted as a put."""
BAD_PAUSE: Command = ("bad-pause",)
"""BAD_FORMAT, but counted as a pause-tube."""

_NAME = re.compile(rb"[A-Za-z0-9+/;.$_()][A-Za-z0-9+/;.$_()-]{0,199}").fullmatch


class BeanstalkParser:
    """The reading side of one connection. Not thread-safe.

    ``in_put`` is true when a put's line has been read and its body has not arrived: at this moment beanstalkd counts
    the put, and gives the job its id. ``in_big_put``: the same for a put whose body is discarded.
    """

    __slots__ = ("_at", "_body", "_data", "_discarding", "_is_too_big", "_max_job_bytes", "_missing", "_put", "_skip")

    def __init__(self, max_job_bytes: int = 65535) -> None:
        self._max_job_bytes = max_job_bytes
        self._data = b""
        self._at = 0  # all bytes of _data before this index are done
        self._put: tuple[int, int, int, int] | None = None  # priority, delay, ttr, size; the body comes next
        self._body = bytearray()  # what has arrived of a body that comes in pieces, with its CRLF
        self._missing = 0  # how many bytes of that body are missing; while there are any, _data is empty
        self._is_too_big = False  # a body is being discarded; the reply comes after all of it
        self._skip = 0  # how many bytes of that body are still to come
        self._discarding = False  # the beginning of a line that is too long is gone; its end is searched for

    @property
    def in_put(self) -> bool:
        return self._put is not None

    @property
    def in_big_put(self) -> bool:
        return self._is_too_big

    @property
    def held(self) -> int:
        """How many bytes were fed and belong to no command yet, without an incomplete body."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """Take the bytes that arrived. The cost grows with the bytes that are held, and with nothing else."""
        if self._missing:
            here = data[: self._missing]
            self._body += here
            self._missing -= len(here)
            data = data[len(here) :]
        elif self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        self._data = self._data[self._at :] + data if self.held else data
        self._at = 0

    def next(self) -> Command | None:
        """The next command, or ``None``: more bytes are needed."""
        if self._missing or self._skip:
            return None
        if self._put is not None:
            return self._end_put(*self._put)
        if self._is_too_big:
            self._is_too_big = False
            return TOO_BIG
        if self._discarding:
            return self._discard()
        data, at = self._data, self._at
        end = data.find(b"\r\n", at, at + MAX_LINE_BYTES)
        if end < 0:
            return self._overlong()
        line = data[at:end]
        command = _ALONE.get(line)
        if command is None:
            words = line.split(b" ")
            read = _STRICT.get(words[0])
            command = read(words) if read is not None else None
            if command is None:
                if b"\r" in line:  # beanstalkd looks only at the first CR, and finds no end of line there
                    return self._overlong()
                command = _read_laxly(line)
        self._at = end + 2
        if command[0] == "put":
            command = self._start_put(*command[1:])
        if self._at == len(self._data):
            self.trim()
        return command

    def trim(self) -> None:
        """Drop the bytes that are done: a client that is silent for hours must not keep its last job in memory."""
        self._data, self._at = self._data[self._at :], 0

    def _check(self) -> None:
        assert 0 <= self._at <= len(self._data)
        assert self._missing >= 0
        assert self._skip >= 0
        assert not (self._put is not None and self._is_too_big)
        assert self._put is not None or not self._body
        assert self._put is None or len(self._body) + self._missing == self._put[3] + 2
        assert self._is_too_big or not self._skip
        assert not (self._missing or self._skip) or not self.held

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _start_put(self, priority: int, delay: int, ttr: int, size: int, trailing: bytes = b"") -> Command | None:
        if size > self._max_job_bytes:
            self._is_too_big = True
            skipped = min(size + 2, self.held)
            self._at += skipped
            self._skip = size + 2 - skipped
            return self.next()
        if trailing:
            return BAD_PUT
        return self._read_body(priority, delay, ttr or 1, size)

    def _read_body(self, priority: int, delay: int, ttr: int, size: int) -> Command | None:
        data, at = self._data, self._at
        stop = at + size
        if len(data) < stop + 2:
            self._put = (priority, delay, ttr, size)
            self._body += data[at:]
            self._missing = stop + 2 - len(data)
            self._data, self._at = b"", 0
            return None
        self._at = stop + 2
        if data[stop : stop + 2] != b"\r\n":
            return EXPECTED_CRLF
        return ("put", priority, delay, ttr, data[at:stop])

    def _end_put(self, priority: int, delay: int, ttr: int, _size: int) -> Command:
        """The body has arrived in pieces."""
        self._put = None
        came, self._body = self._body, bytearray()
        if not came.endswith(b"\r\n"):
            return EXPECTED_CRLF
        del came[-2:]
        return ("put", priority, delay, ttr, bytes(came))

    # -- lines that are too long ---------------------------------------------------------------------------------------

    def _overlong(self) -> Command | None:
        """There is no end of line. Once there are ``MAX_LINE_BYTES`` of the line, discard it."""
        if self.held < MAX_LINE_BYTES:
            if self._at:
                self.trim()
            return None
        self._at += MAX_LINE_BYTES
        self._discarding = True
        return self._discard()

    def _discard(self) -> Command | None:
        """Look for the end of the line as beanstalkd does: a buffer at a time, and only at the first CR of each.

        So a CRLF that is cut by the border of two buffers is not found, and the next line is lost too.
        """
        data = self._data
        while True:
            found = data.find(b"\r", self._at, self._at + MAX_LINE_BYTES - 1)
            if found >= 0 and data[found + 1 : found + 2] == b"\n":
                self._at = found + 2
                self._discarding = False
                return BAD_FORMAT
            if self.held < MAX_LINE_BYTES:
                return None
            self._at += MAX_LINE_BYTES


# -- the strict forms --------------------------------------------------------------------------------------------------


def _strict_put(words: list[bytes]) -> Command | None:
    if len(words) != 5:
        return None
    _, priority, delay, ttr, size = words
    if not (priority.isdigit() and delay.isdigit() and ttr.isdigit() and size.isdigit()):
        return None
    command = ("put", int(priority), int(delay), int(ttr), int(size))
    return command if max(command[1:]) <= _MAX_U32 else None


def _strict_release(words: list[bytes]) -> Command | None:
    if len(words) != 4:
        return None
    _, job_id, priority, delay = words
    if not (job_id.isdigit() and priority.isdigit() and delay.isdigit() and len(job_id) <= _SAFE_DIGITS):
        return None
    command = ("release", int(job_id), int(priority), int(delay))
    return command if command[2] <= _MAX_U32 and command[3] <= _MAX_U32 else None


def _strict_bury(words: list[bytes]) -> Command | None:
    if len(words) != 3 or not (words[1].isdigit() and words[2].isdigit() and len(words[1]) <= _SAFE_DIGITS):
        return None
    priority = int(words[2])
    return ("bury", int(words[1]), priority) if priority <= _MAX_U32 else None


def _strict_number(verb: str, limit: int) -> Callable[[list[bytes]], Command | None]:
    def read(words: list[bytes]) -> Command | None:
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > _SAFE_DIGITS:
            return None
        number = int(words[1])
        return (verb, number) if number <= limit else None

    return read


def _strict_name(verb: str) -> Callable[[list[bytes]], Command | None]:
    def read(words: list[bytes]) -> Command | None:
        return (verb, words[1].decode("ascii")) if len(words) == 2 and _NAME(words[1]) else None

    return read


_ALONE: dict[bytes, Command] = {
    verb.encode("ascii"): (verb,)
    for verb in (
        "reserve",
        "peek-ready",
        "peek-delayed",
        "peek-buried",
        "stats",
        "list-tubes",
        "list-tube-used",
        "list-tubes-watched",
        "quit",
    )
}
_OF_A_JOB = ("delete", "touch", "peek", "kick-job", "reserve-job", "stats-job")
_OF_A_TUBE = ("use", "watch", "ignore", "stats-tube")
_STRICT: dict[bytes, Callable[[list[bytes]], Command | None]] = {
    b"put": _strict_put,
    b"release": _strict_release,
    b"bury": _strict_bury,
    b"kick": _strict_number("kick", _MAX_U32),
    b"reserve-with-timeout": _strict_number("reserve-with-timeout", 0x7FFFFFFF),
    **{verb.encode("ascii"): _strict_number(verb, _MAX_U64) for verb in _OF_A_JOB},
    **{verb.encode("ascii"): _strict_name(verb) for verb in _OF_A_TUBE},
}

# -- the lax forms -----------------------------------------------------------------------------------------------------

_FOUR_NUMBERS = re.compile(rb" *([0-9]+) +([0-9]+) +([0-9]+) +([0-9]+)(.*)", re.DOTALL).fullmatch
_THREE_NUMBERS = re.compile(rb" *([0-9]+) +([0-9]+) +([0-9]+)").fullmatch
_TWO_NUMBERS = re.compile(rb" *([0-9]+) +([0-9]+)").fullmatch
_NUMBER = re.compile(rb" *([0-9]+)").fullmatch
_C_NUMBER = re.compile(rb"[ \t-\r]*([+-]?)([0-9]+)").match
"""What ``strtol`` and ``strtoul`` accept. They ignore the rest of the line."""
_NAME_AND_NUMBER = re.compile(rb" *([A-Za-z0-9+/;.$_()-]+) +([0-9]+)").fullmatch


def _read_laxly(line: bytes) -> Command:
    """Read any line by beanstalkd's own rules: the first prefix that fits decides."""
    if b"\0" in line:
        return BAD_FORMAT
    for prefix, read in _PREFIXES:
        if line.startswith(prefix):
            return read(line[len(prefix) :]) or BAD_FORMAT
    return UNKNOWN_COMMAND


def _lax_put(rest: bytes) -> Command | None:
    found = _FOUR_NUMBERS(rest)
    if found is None:
        return None
    numbers = [int(digits) for digits in found.groups()[:4]]
    return ("put", *numbers, found[5]) if max(numbers) <= _MAX_U32 else None


def _lax_release(rest: bytes) -> Command | None:
    found = _THREE_NUMBERS(rest)
    if found is None:
        return None
    job_id, priority, delay = (int(digits) for digits in found.groups())
    fit = job_id <= _MAX_U64 and priority <= _MAX_U32 and delay <= _MAX_U32
    return ("release", job_id, priority, delay) if fit else None


def _lax_bury(rest: bytes) -> Command | None:
    found = _TWO_NUMBERS(rest)
    if found is None:
        return None
    job_id, priority = int(found[1]), int(found[2])
    return ("bury", job_id, priority) if job_id <= _MAX_U64 and priority <= _MAX_U32 else None


def _lax_kick(rest: bytes) -> Command | None:
    """``strtoul`` into 32 bits: the text after the number is ignored, and ``-1`` is the largest number."""
    found = _C_NUMBER(rest)
    if found is None or int(found[2]) > _MAX_U64:
        return None
    return ("kick", int(found[1] + found[2]) & _MAX_U32)


def _lax_reserve_with_timeout(rest: bytes) -> Command | None:
    """``strtol`` into a C int: text without a number is 0, and a negative number waits for ever."""
    found = _C_NUMBER(rest)
    seconds = int(found[1] + found[2]) if found is not None else 0
    if not -_MAX_LONG - 1 <= seconds <= _MAX_LONG:
        return None
    seconds &= _MAX_U32
    return ("reserve-with-timeout", seconds if seconds <= 0x7FFFFFFF else None)


def _lax_pause_tube(rest: bytes) -> Command | None:
    found = _NAME_AND_NUMBER(rest)
    if found is None or int(found[2]) > _MAX_U32:
        return None
    if not _NAME(found[1]):
        return BAD_PAUSE
    return ("pause-tube", found[1].decode("ascii"), int(found[2]))


def _lax_id(verb: str) -> Callable[[bytes], Command | None]:
    def read(rest: bytes) -> Command | None:
        found = _NUMBER(rest)
        return (verb, int(found[1])) if found is not None and int(found[1]) <= _MAX_U64 else None

    return read


def _lax_name(verb: str) -> Callable[[bytes], Command | None]:
    return lambda rest: (verb, rest.decode("ascii")) if _NAME(rest) else None


def _alone(verb: str) -> Callable[[bytes], Command | None]:
    """A command whose line must end after its name. A line that does was found in ``_ALONE`` before."""
    return lambda rest: None if rest else (verb,)


_PREFIXES: tuple[tuple[bytes, Callable[[bytes], Command | None]], ...] = (
    (b"put ", _lax_put),
    (b"peek ", _lax_id("peek")),
    (b"peek-ready", _alone("peek-ready")),
    (b"peek-delayed", _alone("peek-delayed")),
    (b"peek-buried", _alone("peek-buried")),
    (b"reserve-with-timeout ", _lax_reserve_with_timeout),
    (b"reserve-job ", _lax_id("reserve-job")),
    (b"reserve", _alone("reserve")),
    (b"delete ", _lax_id("delete")),
    (b"release ", _lax_release),
    (b"bury ", _lax_bury),
    (b"kick ", _lax_kick),
    (b"kick-job ", _lax_id("kick-job")),
    (b"touch ", _lax_id("touch")),
    (b"stats-job ", _lax_id("stats-job")),
    (b"stats-tube ", _lax_name("stats-tube")),
    (b"stats", _alone("stats")),
    (b"use ", _lax_name("use")),
    (b"watch ", _lax_name("watch")),
    (b"ignore ", _lax_name("ignore")),
    (b"list-tubes-watched", _alone("list-tubes-watched")),
    (b"list-tube-used", _alone("list-tube-used")),
    (b"list-tubes", _alone("list-tubes")),
    (b"quit", lambda _rest: ("quit",)),
    (b"pause-tube", _lax_pause_tube),
)
"""In the order in which beanstalkd tries them. ``pause-tube`` needs no space after it; any text may follow ``quit``."""
