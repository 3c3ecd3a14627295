"""Prints records for people and programs: the output of ``scan`` and ``peek``."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy import scan
from kestrelpy.cli._common import counted, instant_ms, iso, item_id, printable, table
from kestrelpy.cli._framing import Framing, add_framing, join, write_out

if TYPE_CHECKING:
    from kestrelpy import DeadLetter
    from kestrelpy.item import Record

    Commands = argparse._SubParsersAction[Any]


_BATCH, _LARGE = 256, 1 << 16  # with --raw, so many contents are written at once, if they are small


def add_range(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which items are read, and from where."""
    parser.add_argument("--archive-dir", metavar="DIR", help="first read the archived segments in DIR")
    parser.add_argument("--start-id", type=item_id, metavar="ID", help="only items with this id or later")
    parser.add_argument("--stop-id", type=item_id, metavar="ID", help="only items before this id")
    parser.add_argument(
        "--start-time",
        type=instant_ms,
        metavar="TIME",
        help="only items added at this time (ISO 8601 or milliseconds) or later",
    )
    parser.add_argument("--stop-time", type=instant_ms, metavar="TIME", help="only items added before this time")


def within_range(args: argparse.Namespace) -> Iterator[Record]:
    """The records that the options of ``add_range`` name. Raises as ``scan``."""
    return scan(
        args.directory,
        args.queue,
        archive_dir=args.archive_dir,
        start_id=args.start_id,
        stop_id=args.stop_id,
        start_ms=args.start_time,
        stop_ms=args.stop_time,
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the options for how records are shown."""
    group = parser.add_mutually_exclusive_group()
    for name, text in (
        ("summary", "show only the counts of each segment"),
        ("no-data", "show everything about the items except their contents"),
        ("hex", "show contents in hexadecimal"),
        ("base64", "show contents in base64"),
        ("json", "write one JSON object for each item, with contents in base64"),
        ("raw", "write only the contents, as get does"),
    ):
        flags = ["-q", f"--{name}"] if name == "summary" else [f"--{name}"]
        group.add_argument(*flags, dest="format", action="store_const", const=name, help=text)
    parser.set_defaults(format="text")
    add_framing(parser)


def write(records: Iterable[Record], args: argparse.Namespace) -> int:
    """Print records in the format that ``args`` names. Returns the exit status: 1 if there were no records."""
    if args.format == "summary":
        return _write_summary(records)
    count = 0
    if args.format == "raw":
        return _write_raw(records, args.framing)
    line = json_line if args.format == "json" else _text_line(_CONTENTS[args.format])
    for record in records:
        sys.stdout.write(line(record))
        count += 1
    return 0 if count else 1


def _write_raw(records: Iterable[Record], framing: Framing) -> int:
    count = 0
    batch: list[bytes] = []
    for record in records:
        batch.append(record.data)
        count += 1
        if len(batch) == _BATCH or len(record.data) > _LARGE:
            write_out(join(batch, framing))
            batch.clear()
    write_out(join(batch, framing))
    return 0 if count else 1


def _hex(data: bytes) -> str:
    return data.hex(" ")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_CONTENTS: dict[str, Callable[[bytes], str] | None] = {
    "text": printable,
    "hex": _hex,
    "base64": _base64,
    "no-data": None,
}


def _text_line(contents: Callable[[bytes], str] | None) -> Callable[[Record], str]:
    def line(record: Record) -> str:
        parts = [f"{record.id}", iso(record.added_ms), f"{len(record.data)} B"]
        if record.expires_ms is not None:
            parts.append(f"expires={iso(record.expires_ms)}")
        if record.error_count:
            parts.append(f"errors={record.error_count}")
        if contents is None:
            parts.append(record.segment)
        else:
            parts.append(contents(record.data))
        return "  ".join(parts) + "\n"

    return line


def json_line(record: Record) -> str:
    """A record as an object of JSON on one line, in ASCII. ``data`` is in base64."""
    return json.dumps({**_facts(record), "data": _base64(record.data)}) + "\n"


def text_json_line(record: Record) -> str:
    """As ``json_line``, but data that is UTF-8 is there as ``text``, and not as ``data``."""
    try:
        text = record.data.decode()
    except UnicodeDecodeError:
        return json_line(record)
    return json.dumps({**_facts(record), "text": text}) + "\n"


def _facts(record: Record) -> dict[str, Any]:
    letter = record.dead_letter
    return {
        "id": record.id,
        "added_ms": record.added_ms,
        "expires_ms": record.expires_ms,
        "error_count": record.error_count,
        "segment": record.segment,
        **({} if letter is None else {"dead_letter": letter_facts(letter)}),
    }


def letter_facts(letter: DeadLetter) -> dict[str, object]:
    """A dead letter for JSON, its data in base64."""
    names = ("queue", "reader", "id", "added_ms", "died_ms", "error_count", "reason")
    return {**{name: getattr(letter, name) for name in names}, "data": _base64(letter.data)}


def _write_summary(records: Iterable[Record]) -> int:
    rows = [("segment", "items", "bytes", "first id", "last id", "first added", "last added")]
    totals = [0, 0]
    segment, facts = "", [0, 0, 0, 0, 0, 0]

    def close() -> None:
        items, size, first, last, low, high = facts
        rows.append((segment, f"{items:,}", f"{size:,}", str(first), str(last), iso(low), iso(high)))
        totals[0] += items
        totals[1] += size

    for record in records:
        if record.segment != segment:
            if segment:
                close()
            segment, facts = record.segment, [0, 0, record.id, record.id, record.added_ms, record.added_ms]
        facts[0] += 1
        facts[1] += len(record.data)
        facts[3] = record.id
        facts[4] = min(facts[4], record.added_ms)
        facts[5] = max(facts[5], record.added_ms)
    if not segment:
        return 1
    close()
    sys.stdout.write(table(rows, numbers=(1, 2, 3, 4)))
    segments = len(rows) - 1
    print(f"{counted(totals[0], 'item')}, {counted(totals[1], 'byte')} in {counted(segments, 'segment')}")
    return 0
