"""Prints records for people and programs: the output of ``scan`` and ``peek``."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kestrelpy.cli._common import counted, iso, printable, table
from kestrelpy.cli._framing import Framing, add_framing, join, write_out

if TYPE_CHECKING:
    from kestrelpy.item import Record

    Commands = argparse._SubParsersAction[Any]


_BATCH, _LARGE = 256, 1 << 16  # with --raw, so many contents are written at once, if they are small


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
    line = _json_line if args.format == "json" else _text_line(_CONTENTS[args.format])
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


def _json_line(record: Record) -> str:
    facts = {
        "id": record.id,
        "added_ms": record.added_ms,
        "expires_ms": record.expires_ms,
        "error_count": record.error_count,
        "segment": record.segment,
        "data": _base64(record.data),
    }
    return json.dumps(facts) + "\n"


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
