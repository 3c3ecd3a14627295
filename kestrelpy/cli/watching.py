"""The command ``top``, which watches a folder of queues while it is in use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kestrelpy.cli import _common

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands


def add_commands(commands: Commands) -> None:
    """Add the parser of ``top``."""
    top = commands.add_parser(
        "top",
        help="a live table of queues and readers",
        description="A live table of the queues of a folder, by their files: beside whoever has them open, read-only "
        "and without a lock. Readers are as of their last checkpoints. Below a work queue are its tubes; reserved jobs "
        "count as ready. Keys: n i p o a l d t sort, r reverses, j k scroll, q ends. Not on a terminal it is one plain "
        "table. The exit status of a single table is 1 if a queue is in trouble.",
    )
    top.add_argument("directory", metavar="DIR", help="the folder")
    top.add_argument("--once", action="store_true", help="print one table and end")
    top.add_argument("--json", action="store_true", help="print one JSON object for each queue and end")
    top.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=2.0, help="seconds between two looks (default: 2)"
    )
    top.add_argument(
        "--sort", choices=("name", "items", "in", "out", "oldest", "lag", "disk", "trouble"), default="name"
    )
    top.set_defaults(run=run_top)


def run_top(args: argparse.Namespace) -> int:
    """``kestrelpy top``."""
    from kestrelpy.cli import _folder_top

    _common.queues_in(args.directory)
    names = {"in": "in/s", "out": "out/s"}
    wanted = names.get(args.sort, args.sort)
    order = next(key for key, (name, _) in _folder_top.ORDERS.items() if name == wanted)
    looker = _folder_top.FolderLooker(args.directory, order=order)
    return _folder_top.show(looker, once=args.once, as_json=args.json, interval=args.interval)


def _interval(text: str) -> float:
    seconds = _common.seconds(text)
    if seconds < 0.1:
        raise argparse.ArgumentTypeError(f"must be at least 0.1 seconds, not {text}")
    return seconds
