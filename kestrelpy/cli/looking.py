"""The commands that look at queues without changing them: ``ls``, ``stat``, ``scan``, ``verify``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import kestrelpy
from kestrelpy import verify
from kestrelpy.cli import _common, _records
from kestrelpy.errors import KestrelError

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

_SHOWN = 20  # stat prints at most so many spans and error counts, and then the number of the others


def add_listing_commands(commands: Commands) -> None:
    """Add the parsers of ``ls`` and ``stat``."""
    ls = commands.add_parser(
        "ls", help="list the queues in a folder", description="List the queues in a folder. Read-only."
    )
    ls.add_argument("directory", metavar="DIR", help="the folder")
    ls.add_argument("--json", action="store_true", help="print one JSON object for each queue")
    ls.set_defaults(run=run_ls)

    stat = commands.add_parser(
        "stat",
        help="show a queue and its readers",
        description="Show the segments of a queue, and its readers as of their last checkpoints. Read-only, takes no "
        "lock.",
    )
    _common.add_queue(stat)
    stat.add_argument("--reader", metavar="R", help="show the whole saved state of this reader")
    stat.add_argument("--json", action="store_true", help="print one JSON object")
    stat.set_defaults(run=run_stat)


def add_content_commands(commands: Commands) -> None:
    """Add the parsers of ``scan`` and ``verify``."""
    scanner = commands.add_parser(
        "scan",
        help="print all records of a queue",
        description="Print the records of all segments that are still there, whether they were read or not. Read-only, "
        "takes no lock.",
    )
    _common.add_queue(scanner)
    _records.add_range(scanner)
    _records.add_format(scanner)
    scanner.set_defaults(run=run_scan)

    checker = commands.add_parser(
        "verify",
        help="check every byte of a queue, or of an archive",
        description="Check every record, header, footer and checkpoint, and the inbox. DIR may also be an archive. "
        "Read-only. The exit status is 1 if there is damage.",
    )
    _common.add_queue(checker)
    checker.add_argument("--archive-dir", metavar="DIR", help="also check the archived segments in DIR")
    checker.add_argument("--json", action="store_true", help="print the report as one JSON object")
    checker.set_defaults(run=run_verify)


# -- ls --------------------------------------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    """``kestrelpy ls``."""
    queues, pending = _common.queues_in(args.directory), _common.pending_in(args.directory)
    names = sorted({*queues, *pending})
    rows: list[tuple[str, ...]] = [("queue", "unread", "last id", "segments", "size")]
    status = 0 if names else 1
    for name in names:
        try:
            saved = kestrelpy.inspect(args.directory, name)
        except (KestrelError, OSError) as error:  # the other queues have to be listed
            status = 1
            what, why = _trouble(error)
            rows.append((name, f"{what}: {why}", "", "", ""))
            if args.json:
                print(json.dumps({"name": name, what: why}))
            continue
        if args.json:
            print(json.dumps(dataclasses.asdict(saved)))
        unread = ", ".join(f"{one.name}: {one.items:,}" if one.name else f"{one.items:,}" for one in saved.readers)
        if saved.pending_batches:
            unread += f" (+ {_common.pending_text(saved.pending_batches)})"
        if saved.kind != "queue":  # its records are no unread items: several records may be about one job
            unread = f"({saved.kind})"
        if name not in queues:
            rows.append((name, f"{_common.pending_text(pending[name])}, {_common.NO_OWNER}", "", "", ""))
            continue
        size = _common.binary_size(saved.file_bytes)
        rows.append((name, unread, str(saved.tail_id), str(len(saved.segments)), size))
    if names and not args.json:
        sys.stdout.write(_common.table(rows, numbers=(2, 3, 4)))
    return status


def _trouble(error: KestrelError | OSError) -> tuple[str, str]:
    """What is wrong with a queue that cannot be looked at: in a word, and why."""
    if isinstance(error, KestrelError):
        return "damaged", str(error)
    return "unreadable", _common.os_error_text(error)


# -- stat ------------------------------------------------------------------------------------------------------------


def run_stat(args: argparse.Namespace) -> int:
    """``kestrelpy stat``."""
    _common.require_queue(args.directory, args.queue)
    saved = kestrelpy.inspect(args.directory, args.queue)
    if args.reader is not None:
        return _stat_reader(saved, args.reader, as_json=args.json)
    if args.json:
        print(json.dumps(dataclasses.asdict(saved)))
        return 0
    closed = sum(segment.closed for segment in saved.segments)
    kept = f"ids {saved.segments[0].first_id} to {saved.tail_id}" if saved.segments else "none"
    facts = (
        ("queue", saved.name),
        *((("kind", f"{saved.kind}: the items are records of jobs"),) if saved.kind != "queue" else ()),
        ("segments", f"{len(saved.segments)} ({closed} closed), {kept}"),
        ("on disk", f"{saved.file_bytes:,} bytes ({_common.binary_size(saved.file_bytes)})"),
        ("ever put", f"{_common.counted(saved.put_items, 'item')}, {_common.counted(saved.put_bytes, 'byte')}"),
        *((("pending", _pending(saved.pending_batches)),) if saved.pending_batches else ()),
        *((("refused", _refused(saved.refused_batches)),) if saved.refused_batches else ()),
        ("readers", "as of their last checkpoints:"),
    )
    sys.stdout.write("".join(f"{name:<10}{text}\n" for name, text in facts))
    rows = [["reader", "head", "unread", "bytes", "done ahead", "aborted"]]
    for one in saved.readers:
        ahead = sum(last - first + 1 for first, last in one.done)
        counts = (one.head, one.items, one.bytes, ahead, len(one.error_counts))
        rows.append([one.name or "(default)", *(f"{count:,}" for count in counts)])
    sys.stdout.write(_common.table(rows, numbers=range(1, 6)))
    return 0


def _pending(batches: int) -> str:
    return f"{_common.pending_text(batches)} in the inbox, not in the queue yet"


def _refused(batches: int) -> str:
    """The number of refused batches, and the pattern of their names."""
    return f"{batches:,} published, which could not be ingested: inbox/*.batch.refused"


def _stat_reader(saved: kestrelpy.QueueInspection, name: str, *, as_json: bool) -> int:
    reader = next((one for one in saved.readers if one.name == name), None)
    if reader is None:
        raise _common.CommandError(f"queue {saved.name!r} has no reader {name!r}")
    if as_json:
        print(json.dumps(dataclasses.asdict(reader)))
        return 0
    spans = [f"{first}" if first == last else f"{first}-{last}" for first, last in reader.done]
    errors = [f"{item}: {count}" for item, count in reader.error_counts]
    facts = (
        ("reader", reader.name or "(default)"),
        ("head", str(reader.head)),
        ("unread", f"{_common.counted(reader.items, 'item')}, {_common.counted(reader.bytes, 'byte')}"),
        ("done ahead", _shortened(spans)),
        ("aborted", _shortened(errors)),
    )
    sys.stdout.write("".join(f"{title:<12}{text}\n" for title, text in facts))
    return 0


def _shortened(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more or "none"


# -- scan and verify -------------------------------------------------------------------------------------------------


def run_scan(args: argparse.Namespace) -> int:
    """``kestrelpy scan``."""
    if args.archive_dir is None:
        _common.require_queue(args.directory, args.queue)
    if _common.is_work_queue(args.directory, args.queue):
        sys.stderr.write(f"kestrelpy scan: {args.queue} is a work queue: these are records of jobs\n")
    return _records.write(_records.within_range(args), args)


def run_verify(args: argparse.Namespace) -> int:
    """``kestrelpy verify``."""
    _common.require_queue(args.directory, args.queue)
    report = verify(args.directory, args.queue, archive_dir=args.archive_dir)
    if args.json:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}))
        return 0 if report.ok else 1
    readers = ", ".join(name or "(default)" for name in report.readers) or "none"
    ids = f", ids {report.first_id} to {report.last_id}" if report.items else ""
    print(f"queue     {report.queue}")
    if report.kind != "queue":
        print(f"kind      {report.kind}{': the items are records of jobs' if report.kind == 'work queue' else ''}")
    print(f"segments  {report.segments:,}")
    print(f"items     {report.items:,}, {_common.counted(report.bytes, 'byte')}{ids}")
    print(f"readers   {readers}")
    if report.batches:
        print(f"inbox     {report.batches:,} published, {_common.counted(report.parts, 'part')}")
    if args.archive_dir is not None:
        print(f"archive   {report.archived_segments:,}, {_common.counted(report.archived_items, 'item')}")
    if report.torn_bytes:
        print(f"torn      {_common.counted(report.torn_bytes, 'byte')} that a crash left after the end; no damage")
    if report.refused_batches:
        print(f"refused   {_refused(report.refused_batches)}")
    for name in report.unknown_files:
        print(f"unknown   {name}")
    for damage in report.damage:
        print(f"damage    {damage.path}, offset {damage.offset:,}: {damage.reason}")
    print("no damage" if report.ok else f"DAMAGED in {_common.counted(len(report.damage), 'place')}")
    return 0 if report.ok else 1
