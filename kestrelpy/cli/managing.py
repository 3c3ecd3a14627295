"""The commands ``drop-reader`` and ``bench``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kestrelpy
from kestrelpy import JournaledQueue
from kestrelpy.cli import _common

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands


def add_commands(commands: Commands) -> None:
    """Add the parsers of ``drop-reader`` and ``bench``."""
    drop = commands.add_parser(
        "drop-reader",
        help="delete a reader and its checkpoint",
        description="Delete a reader and its checkpoint. Segments that only this reader needs may then be retired. "
        "No process may have the queue or the reader open.",
    )
    _common.add_queue(drop)
    drop.add_argument("reader", metavar="READER", help="the reader's name")
    drop.set_defaults(run=run_drop_reader)

    bench = commands.add_parser(
        "bench",
        help="run the benchmarks (in a checkout of the source)",
        description="Run the benchmarks of a checkout of the source. The arguments are those of python -m bench.",
    )
    bench.add_argument("arguments", nargs="*", metavar="...", help="try --help, --list")
    bench.set_defaults(run=run_bench)


def bench_arguments(arguments: list[str]) -> argparse.Namespace | None:
    """The arguments of ``bench``, taken as they are, options too: argparse would refuse options it does not know."""
    if arguments[:1] != ["bench"]:
        return None
    return argparse.Namespace(command="bench", arguments=arguments[1:], run=run_bench)


def run_drop_reader(args: argparse.Namespace) -> int:
    """``kestrelpy drop-reader``."""
    _common.require_queue(args.directory, args.queue)
    _common.refuse_work_queue(args.directory, args.queue)
    names = [reader.name for reader in kestrelpy.inspect(args.directory, args.queue).readers]
    lost = Path(args.directory, f"{args.queue}+{args.reader}.lock")  # a reader whose checkpoint is lost
    if args.reader not in names and not (args.reader and lost.is_file()):
        there = ", ".join(name for name in names if name)
        raise _common.CommandError(
            f"queue {args.queue!r} has no reader {args.reader!r}" + (f"; it has {there}" if there else "")
        )
    with JournaledQueue(args.directory, args.queue) as queue:
        queue.drop_reader(args.reader)
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """``kestrelpy bench``."""
    checkout = Path(kestrelpy.__file__).parent.parent
    if not (checkout / "bench" / "__main__.py").is_file():
        raise _common.CommandError(
            "the benchmarks are not part of the installed package; run this in a checkout of the source"
        )
    return subprocess.call([sys.executable, "-m", "bench", *args.arguments], cwd=checkout)
