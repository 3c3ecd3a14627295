"""What the page is told, as JSON: a page of the table, one queue, its newest items.

Rules:
1. Of a thousand queues only those in sight are sent, sorted and filtered here.
2. Bytes of others are sent as escaped text, a bounded part of each; with ``show_data`` false not at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from kestrelpy import Clock, DeadLetter, inbox, scan
from kestrelpy.dashboard.history import OF_ALL, SLOT_SECONDS, SLOTS
from kestrelpy.dashboard.letters import FoundLetters, LetterBox, printable
from kestrelpy.dashboard.sampler import Sampler, Snapshot
from kestrelpy.inspection import WatchedQueue
from kestrelpy.work import JobsOutside

PAGE_ROWS = 50
SMALL_POINTS = 60
NEWEST = 20
HEAD_BYTES = 200
MOST_TUBES = 500
MOST_READERS = 500
MOST_ORIGINS = 100
MOST_RECORDS = 250_000
"""A work queue with more records is not followed: its jobs would take more than 150 MB of this process."""
_FOLLOWED_JOBS = 2
"""So many work queues are followed for their tubes, those that were asked for last."""


_TOO_MANY = f"There are more than {MOST_RECORDS:,} records: kestrelpy jobs has them."


def _first_large(measure: Callable[[WatchedQueue], float]) -> Callable[[WatchedQueue], tuple[float, str]]:
    return lambda one: (-measure(one), one.name)


ORDERS: dict[str, Callable[[WatchedQueue], Any]] = {
    "name": lambda one: one.name,
    "items": _first_large(lambda one: one.items),
    "in": _first_large(lambda one: one.rate_in),
    "out": _first_large(lambda one: one.rate_out),
    "oldest": lambda one: (one.oldest_ms or 1 << 62, one.name),
    "lag": _first_large(lambda one: one.bytes),
    "disk": _first_large(lambda one: one.file_bytes),
    "trouble": lambda one: (not one.problem, one.name),
}
"""What the table is sorted by. The largest comes first, but for names."""


class Views:
    """Answers about ``directory``, from what its sampler has seen.

    NOTE ON LOCKING: ``_following`` guards the followed work queues, ``_finding`` what is known of dead letters; each is
    held while files are read for it, and no other lock is taken meanwhile.
    """

    def __init__(self, directory: str, sampler: Sampler, clock: Clock, *, show_data: bool) -> None:
        self._directory = directory
        self._sampler = sampler
        self._clock = clock
        self._show_data = show_data
        self._following = Lock()
        self._jobs: OrderedDict[str, JobsOutside] = OrderedDict()
        self._finding = Lock()
        self._letters = FoundLetters(directory)

    def table(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the table. Of ``query``: ``filter`` (a part of the name), ``sort``, ``reverse``, ``page`` (from 0),
        ``seen`` (the number of the look that the asker has for the same query), ``lines`` (whether it wants lines).
        """
        seen = self._sampler.snapshot
        if query.get("seen") == str(seen.number):
            return {"look": seen.number, "unchanged": True}
        wanted = query.get("filter", "").lower()
        matching = [one for one in seen.queues.values() if wanted in one.name.lower()]
        order = ORDERS.get(query.get("sort", "name"), ORDERS["name"])
        matching.sort(key=order, reverse=query.get("reverse") == "1")
        pages = max(1, -(-len(matching) // PAGE_ROWS))
        page = min(_number(query.get("page")), pages - 1)
        rows = [_row(one) for one in matching[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]]
        answer = {
            "look": seen.number,
            "now_ms": seen.now_ms,
            "problem": seen.problem,
            "inbox_problem": seen.inbox_problem,
            "totals": _totals(seen),
            "matching": len(matching),
            "names": len(seen.queues),
            "page": page,
            "pages": pages,
            "rows": rows,
        }
        if query.get("lines") == "1":
            for row in rows:
                row["line"] = self._sampler.small_line(row["name"], seen.slot, SMALL_POINTS)
            answer["lines"] = self._lines(OF_ALL, seen.slot, query)
        return answer

    def queue(self, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        """One queue; ``None`` if it is not there. Of ``query``: ``after`` (the last slot that the asker has whole)."""
        seen = self._sampler.snapshot
        one = seen.queues.get(name)
        if one is None:
            return None
        return {
            "look": seen.number,
            "now_ms": seen.now_ms,
            **_row(one),
            "put_items": one.put_items,
            "put_bytes": one.put_bytes,
            "last_id": one.tail_id,
            "readers": [reader._asdict() for reader in one.readers[:MOST_READERS]],
            "reader_count": len(one.readers),
            "lines": self._lines(name, seen.slot, query),
        }

    def _lines(self, name: str, slot: int, query: Mapping[str, str]) -> dict[str, Any] | None:
        first = max(slot + 1 - SLOTS, _number(query.get("after")) + 1)
        points = self._sampler.lines(name, first, slot)
        return None if points is None else {"first": first, "slot_seconds": SLOT_SECONDS, "slots": SLOTS, **points}

    def tubes(self, name: str) -> dict[str, Any] | None:
        """The tubes of a work queue; ``None`` if it is none. Raises what ``JobsOutside`` raises. May take long."""
        one = self._sampler.snapshot.queues.get(name)
        if one is None or one.kind == "queue":
            return None
        if one.items > MOST_RECORDS:
            return {"tubes": [], "tube_count": 0, "reason": _TOO_MANY}
        with self._following:
            jobs = self._followed(name)
            jobs.look_if_cheap(one.tail_id)
            tubes = jobs.tubes()
        return {"tubes": [tube._asdict() for tube in tubes[:MOST_TUBES]], "tube_count": len(tubes)}

    def _followed(self, name: str) -> JobsOutside:
        jobs = self._jobs.pop(name, None) or JobsOutside(
            self._directory, name, head_bytes=HEAD_BYTES if self._show_data else 0, clock=self._clock
        )
        self._jobs[name] = jobs
        while len(self._jobs) > _FOLLOWED_JOBS:
            self._jobs.popitem(last=False)
        return jobs

    def dead(self, name: str) -> dict[str, Any] | None:
        """The dead letters in a queue, and those that come from it and are in others; ``None`` if it is not there.
        Raises what ``scan`` raises. May take long.
        """
        queues = self._sampler.snapshot.queues
        if name not in queues:
            return None
        if queues[name].kind != "queue":
            return {"boxes": [], "origins": [], "origin_count": 0, "letters": []}
        with self._finding:
            boxes = self._letters.boxes_of(name, queues)
            origins = [each for box in boxes for each in _origins(box, name)]
            newest = [
                self._letter(box, letter)
                for box in boxes
                for letter in box.newest(NEWEST, "" if box.name == name else name)
            ]
            kept = [self._box(box.name, box.others, box.is_whole) for box in boxes]
        if not any(box["name"] == name for box in kept) and inbox.pending(self._directory, name):
            kept.append(self._box(name, 0, True))
        newest.sort(key=lambda letter: -letter["died_ms"])
        return {
            "boxes": kept,
            "origins": origins[:MOST_ORIGINS],
            "origin_count": len(origins),
            "letters": newest[:NEWEST],
        }

    def _box(self, name: str, others: int, is_whole: bool) -> dict[str, Any]:
        waiting = inbox.pending(self._directory, name)
        return {"name": name, "waiting": waiting, "others": others, "is_whole": is_whole}

    def _letter(self, box: LetterBox, letter: DeadLetter) -> dict[str, Any]:
        """What is in the item is shown only where data may be: the reason may quote it."""
        shown = {
            "box": box.name,
            "keeper": box.reader,
            "queue": printable(letter.queue)[:HEAD_BYTES],
            "reader": printable(letter.reader)[:HEAD_BYTES],
            "errors": letter.error_count,
            "died_ms": letter.died_ms,
            "item": letter.id,
            **_head(letter.letter_id, letter.added_ms, len(letter.data), letter.data, printable(letter.reason)),
        }
        return shown if self._show_data else {**shown, "head": "", "about": ""}

    def newest(self, name: str) -> dict[str, Any] | None:
        """The beginnings of the items, or jobs, that were put last, the newest first; ``None`` if the queue is not
        there. Call it only where data may be shown. Raises what ``scan`` raises. May take long.
        """
        assert self._show_data
        one = self._sampler.snapshot.queues.get(name)
        if one is None:
            return None
        if not one.exists:
            return {"items": []}
        if one.kind != "queue" and one.items > MOST_RECORDS:
            return {"items": [], "reason": _TOO_MANY}
        if one.kind != "queue":
            with self._following:
                jobs = self._followed(name)
                jobs.look_if_cheap(one.tail_id)
                newest = jobs.newest(NEWEST)
            return {
                "items": [
                    _head(job.id, job.added_ms, job.body_bytes, job.body, f"{job.tube}, {job.state}") for job in newest
                ]
            }
        records = deque(scan(self._directory, name, start_id=max(1, one.tail_id - NEWEST + 1)), NEWEST)
        heads = [_head(record.id, record.added_ms, len(record.data), record.data, "") for record in records]
        return {"items": heads[::-1]}


def _row(one: WatchedQueue) -> dict[str, Any]:
    return {
        "name": one.name,
        "kind": one.kind,
        "items": one.items,
        "bytes": one.bytes,
        "in": round(one.rate_in, 2),
        "out": round(one.rate_out, 2),
        "oldest_ms": one.oldest_ms,
        "disk": one.file_bytes,
        "segments": one.segments,
        "estimated": one.is_estimated,
        "problem": one.problem,
        "pending": one.pending_batches,
        "exists": one.exists,
    }


def _totals(seen: Snapshot) -> dict[str, Any]:
    queues = seen.queues.values()
    return {
        "queues": sum(one.exists for one in queues),
        "items": sum(one.items for one in queues if one.kind == "queue"),
        "in": round(sum(one.rate_in for one in queues), 2),
        "out": round(sum(one.rate_out for one in queues), 2),
        "disk": sum(one.file_bytes for one in queues),
        "oldest_ms": min((one.oldest_ms for one in queues if one.oldest_ms and one.kind == "queue"), default=0),
        "troubles": sum(bool(one.problem) for one in queues),
    }


def _origins(box: LetterBox, name: str) -> list[dict[str, Any]]:
    """Where the letters in ``box`` come from: all of it if ``name`` is its queue, else what comes from ``name``."""
    return [
        {"box": box.name, "keeper": box.reader, "queue": origin.queue, "reader": origin.reader, "count": count}
        for origin, count in box.counts().most_common()
        if name in (box.name, origin.queue)
    ]


def _head(item_id: int, added_ms: int, size: int, data: bytes, about: str) -> dict[str, Any]:
    head = printable(data[:HEAD_BYTES].decode("utf-8", "backslashreplace"))
    return {"id": item_id, "added_ms": added_ms, "bytes": size, "head": head, "about": about}


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else 0
