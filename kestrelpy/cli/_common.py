"""Shared by all commands: their error, the types of arguments, the names of queues, tables."""

from __future__ import annotations

import argparse
import datetime
import errno
import os
import sys
from collections.abc import Sequence
from typing import Literal

from kestrelpy import inbox, queue_names
from kestrelpy.errors import InvalidName, WrongKind

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MOST_SECONDS = 1e15
"""The limit of a duration in seconds: thirty million years."""
_MILLISECOND = datetime.timedelta(milliseconds=1)

Start = Literal["tail", "earliest"] | int


class CommandError(Exception):
    """The command failed. ``str(error)`` is the message for the user, ``status`` the exit status of the process."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


# -- argument types --------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """A whole number above zero. One that is larger than any number of items is the largest of these."""
    number = _number(text, int)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above zero, not {text}")
    return min(int(number), sys.maxsize)


def item_id(text: str) -> int:
    """An item's id: a whole number, not negative."""
    number = _number(text, int)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return int(number)


def seconds(text: str) -> float:
    """A duration in seconds, not negative."""
    number = _number(text, float)
    if not 0 <= number < _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 on, not {text}")
    return float(number)


def sync_mode(text: str) -> float | Literal["always", "never"]:
    """``always``, ``never`` or seconds."""
    return text if text in ("always", "never") else seconds(text)  # type: ignore[return-value]


def start(text: str) -> Start:
    """``tail``, ``earliest`` or an item's id."""
    return text if text in ("tail", "earliest") else item_id(text)  # type: ignore[return-value]


def instant_ms(text: str) -> int:
    """Milliseconds since the Unix epoch, or a time in ISO 8601, which is UTC if it has no offset."""
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        message = f"must be milliseconds since the epoch, or a time such as 2026-01-31T12:00:00, not {text!r}"
        raise argparse.ArgumentTypeError(message) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // _MILLISECOND


def _number(text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Add the first two arguments of most commands: the folder and the queue."""
    parser.add_argument("directory", metavar="DIR", help="the folder of the queue")
    parser.add_argument("queue", metavar="QUEUE", help="the queue's name")


# -- queues ----------------------------------------------------------------------------------------------------------


def queues_in(directory: str) -> list[str]:
    """The names of the queues in a folder, sorted. Raises ``CommandError`` if there is no such folder."""
    if not os.path.isdir(directory):
        raise CommandError(f"{directory}: no such folder")
    return sorted(queue_names(directory))


def pending_in(directory: str) -> dict[str, int]:
    """How many published batches wait in the inbox of a folder, by queue. An inbox that cannot be read has none: what
    is wrong with it is reported with the queues that have it.
    """
    try:
        return inbox.pending_queues(directory)
    except OSError:
        return {}


def pending_text(batches: int) -> str:
    """``1 batch pending``: published, and not ingested yet."""
    return f"{counted(batches, 'batch', 'batches')} pending"


NO_OWNER = "no owner yet"
"""What is said of a name that has batches in the inbox, and no queue: the first owner makes it, and ingests them."""


def is_work_queue(directory: str, queue: str) -> bool:
    """True if the queue holds jobs (docs/format.md). Damage to the queue does not matter."""
    return os.path.lexists(os.path.join(directory, f"{queue}.work"))


def refuse_work_queue(directory: str, queue: str) -> None:
    """Raise ``WrongKind`` for a work queue: its records are no items that a command could put or get."""
    if is_work_queue(directory, queue):
        raise WrongKind(f"{directory}/{queue}", "work queue")


def require_queue(directory: str, queue: str) -> None:
    """Raise ``CommandError`` unless the queue exists: commands that only look or get never make a queue."""
    names = queues_in(directory)
    if queue in names:
        return
    if not queue:
        raise InvalidName(queue, "the name of a queue must not be empty")
    pending = pending_in(directory)
    why = f": {pending_text(pending[queue])} in the inbox, {NO_OWNER}" if queue in pending else ""
    unowned = [] if why else sorted(pending.keys() - set(names))
    there = f"; it has {_first(names)}" if names else ""
    others = f"; the inbox has batches for {_first(unowned)}, {NO_OWNER}" if unowned else ""
    raise CommandError(f"no queue {queue!r} in {directory}{why}{there}{others}")


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"


def os_error_text(error: OSError) -> str:
    """An error of the system as text for people: the file, and what is wrong with it."""
    if error.filename is None or error.strerror is None:
        return str(error)
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
    if error.errno == errno.ELOOP:  # the system says "too many levels", and there is one
        return f"{name}: this is a symbolic link, and is never read"
    return f"{name}: {error.strerror}"


# -- words and tables ------------------------------------------------------------------------------------------------


def has_screen() -> bool:
    """Whether standard output is a terminal that can be drawn on. One with ``TERM=dumb``, as in Emacs, is none."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def iso(instant: int) -> str:
    """A time in milliseconds since the epoch, as text for people: ISO 8601, UTC, with milliseconds."""
    try:
        moment = _EPOCH + instant * _MILLISECOND
    except OverflowError:
        return f"{instant}ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """``1 item``, ``2,000 items``; ``nouns``: where the plural has no plain s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def binary_size(size: int) -> str:
    """A number of bytes as text for people: ``17 B``, ``1.5 KiB``, ``2.0 GiB``."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            return f"{value:,.1f} {unit}"
    raise AssertionError


def printable(data: bytes) -> str:
    """Data on one line: text as it is; control characters for a terminal, and bytes that are no text, are escaped."""
    return escaped(data.decode("utf-8", "backslashreplace"))


def escaped(text: str) -> str:
    """Text on one line: control characters for a terminal, and all else that it does not print, are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def table(rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of ``rows``; the first is the heading. The columns ``numbers`` are right-aligned. Ends in a newline."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
