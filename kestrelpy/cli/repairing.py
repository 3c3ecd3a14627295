"""The command ``repair``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from kestrelpy import RepairReport, repair
from kestrelpy.cli import _common

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

_SHOWN = 20  # at most so many spans of ids are printed, and then the number of the others


def add_commands(commands: Commands) -> None:
    """Add the parser of ``repair``."""
    parser = commands.add_parser(
        "repair",
        help="make a damaged queue one that opens",
        description="Take what is damaged out of the files of a queue, of its inbox or of an archive, keep the bytes "
        "aside, and say what is lost. The exit status is 0 if the queue opens and verifies afterwards; with --dry-run "
        "it is 1 if there is damage.",
    )
    _common.add_queue(parser)
    parser.add_argument("--dry-run", action="store_true", help="write nothing, and say the same")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run_repair)


def run_repair(args: argparse.Namespace) -> int:
    """``kestrelpy repair``."""
    _common.require_queue(args.directory, args.queue)
    report = repair(args.directory, args.queue, dry_run=args.dry_run)
    status = 1 if args.dry_run and not report.ok else 0
    if args.json:
        print(json.dumps({"ok": report.ok, "lost_ids": report.lost_ids, **dataclasses.asdict(report)}))
        return status
    print(f"queue     {report.queue}")
    if report.kind != "queue":
        print(f"kind      {report.kind}{': the items are records of jobs' if report.kind == 'work queue' else ''}")
    if report.resumed:
        print("resumed   a repair that was cut short")
    _print_losses(report)
    if report.ok:
        print("no damage")
    else:
        places = _common.counted(len(report.losses), "place")
        print(f"DAMAGED in {places}; nothing was written" if report.dry_run else f"repaired in {places}")
    return status


def _print_losses(report: RepairReport) -> None:
    for loss in report.losses:
        print(f"damage    {loss.path}, offset {loss.offset:,}: {loss.reason}")
        if loss.kept:
            print(f"kept      {loss.kept}")
    if report.lost_ids:
        print(f"lost      {_in_words(report.lost_ids, 'item')}")
    for reader in report.reset_readers:
        print(f"reader    {reader or '(default)'} begins with the earliest item")
    for name in report.refused_batches:
        print(f"refused   {name}: the whole batch is kept aside")
    if report.jobs is not None:
        print(f"jobs      lost: any of {_in_words(report.jobs.missing, 'job')}, except those deleted since")
        print(f"jobs      in doubt: {_in_words(report.jobs.doubtful, 'job')}; the last changes may be forgotten")


def _in_words(spans: tuple[tuple[int, int], ...], noun: str) -> str:
    """``items 1-3, 7``."""
    if not spans:
        return f"no {noun}"
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:_SHOWN]]
    more = f" and {len(spans) - _SHOWN:,} more spans" if len(spans) > _SHOWN else ""
    return f"{noun}s {', '.join(words)}{more}"
