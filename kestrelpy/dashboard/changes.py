"""What the page may change, with ``--allow-changes`` and a token.

To drop a reader and to kick jobs, the queue is opened, as by its only owner. Dead letters are put back by a reader of
theirs: another process may have the queue open, but not that reader.

``CHANGES`` is the whole list. A change takes the folder and the fields of the request, and returns what to say. It
raises ``ChangeRefused`` for what cannot be, and what the library raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kestrelpy import (
    Clock,
    DeadLetter,
    DeadLetters,
    InvalidName,
    ItemTooLarge,
    JournaledQueue,
    SystemClock,
    WrongKind,
    dead_letters,
    inspect,
    queue_names,
)
from kestrelpy.work import JobsOutside

MOST_KICKED = 1_000_000
REQUEUE_SECONDS = 4.0
"""For so long one request puts letters back; each takes some syncs. The page asks again for the rest."""


class ChangeRefused(Exception):
    """The request names something that is not there, or misses a field."""


class Changed(NamedTuple):
    """What was done. ``more``: whether there is more to be done, by the same request."""

    said: str
    more: bool = False


def drop_reader(directory: str, fields: Mapping[str, Any]) -> Changed:
    """Delete a reader and its checkpoint, as ``kestrelpy drop-reader``."""
    queue, reader = _text(fields, "queue"), _text(fields, "reader")
    _require(directory, queue)
    saved = inspect(directory, queue)
    if saved.kind != "queue":
        raise WrongKind(f"{directory}/{queue}", saved.kind)
    if not reader or reader not in [each.name for each in saved.readers]:
        raise ChangeRefused(f"queue {queue!r} has no reader {reader!r} that can be dropped")
    with JournaledQueue(directory, queue) as opened:
        opened.drop_reader(reader)
    return Changed(f"reader {reader} of {queue} is dropped")


def kick(directory: str, fields: Mapping[str, Any]) -> Changed:
    """Make jobs of a tube ready, buried ones first, as ``kestrelpy jobs ... kick``."""
    queue, tube, count = _text(fields, "queue"), _text(fields, "tube"), fields.get("count")
    if type(count) is not int or not 0 < count <= MOST_KICKED:
        raise ChangeRefused(f"count is to be a number from 1 to {MOST_KICKED:,}")
    _require(directory, queue)
    if inspect(directory, queue).kind == "queue":
        raise ChangeRefused(f"{queue} holds items, not jobs")
    with JobsOutside(directory, queue).open_queue() as opened:
        kicked = opened.kick(count, tube)
    return Changed(f"{kicked:,} jobs of {tube} are ready")


def requeue(directory: str, fields: Mapping[str, Any], clock: Clock | None = None) -> Changed:
    """Put dead letters back into the queue that they come from, exactly once, as ``kestrelpy dead ... requeue``.

    Of ``fields``: ``queue`` and ``keeper``, the queue that holds them and its reader; ``from_queue`` and
    ``from_reader``, where they come from; ``id`` for one of them, by its id in ``queue``, else all of that origin.
    """
    queue, keeper = _text(fields, "queue"), _text(fields, "keeper")
    origin = _text(fields, "from_queue"), _text(fields, "from_reader")
    wanted = fields.get("id")
    if wanted is not None and type(wanted) is not int:
        raise ChangeRefused("id is to be a number")
    _require(directory, queue)
    if keeper not in [each.name for each in inspect(directory, queue).readers]:
        raise ChangeRefused(f"queue {queue!r} has no reader {keeper!r}")
    done, kept, why, more = 0, 0, "", False
    clock = clock or SystemClock()
    until = clock.monotonic() + REQUEUE_SECONDS
    with dead_letters(directory, queue, reader=keeper) as letters:
        for letter in _wanted(letters, origin, wanted):
            if clock.monotonic() >= until and done:
                more = True
                break
            try:
                letter.requeue()
                done += 1
            except (ItemTooLarge, WrongKind, ValueError) as error:
                kept, why = kept + 1, str(error)
    if not done and not kept:
        raise ChangeRefused("there is no such dead letter: somebody may have put it back, or dropped it")
    if not done:
        raise ChangeRefused(why)
    said = f"{done:,} dead letter{'s are' if done > 1 else ' is'} back in {origin[0]}"
    return Changed(said + (f"; {kept:,} stay: {why}" if kept else ""), more)


def _wanted(letters: DeadLetters, origin: tuple[str, str], wanted: int | None) -> Iterator[DeadLetter]:
    """The dead letters of ``origin``; only that with the id ``wanted``, if it is given."""
    for letter in letters:
        if (letter.queue, letter.reader) == origin and wanted in (None, letter.letter_id):
            yield letter
            if wanted is not None:
                return


CHANGES: dict[str, Callable[[str, Mapping[str, Any]], Changed]] = {
    "drop-reader": drop_reader,
    "kick": kick,
    "requeue": requeue,
}
"""By the last part of the path ``/api/change/...``."""


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ChangeRefused(f"{name} is to be a text")
    return value


def _require(directory: str, queue: str) -> None:
    if queue not in queue_names(directory):
        raise InvalidName(queue, "there is no queue of that name")
