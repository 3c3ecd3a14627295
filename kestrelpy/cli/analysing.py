"""The commands that need Spark: ``lake`` and ``report``. Spark is imported only when one of them runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kestrelpy.cli import _common

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

WRONG_USE = 2
_MISSING = "this needs the extra [spark]: pip install 'kestrelpy[spark]'"
_QUIET = {"spark.ui.showConsoleProgress": "false"}


def add_commands(commands: Commands) -> None:
    """Add the parsers of ``lake`` and ``report``."""
    lake = commands.add_parser(
        "lake",
        help="convert archived segments to Parquet",
        description="Convert the new segments of an archive to Parquet files by queue and day. Each item is there "
        "once, even if a run was killed. Run the command again for later segments. Needs the extra [spark] and Java.",
    )
    lake.add_argument("archive", metavar="ARCHIVE", help="the folder of archived segments, or its URI")
    lake.add_argument("target", metavar="TARGET", help="the folder of the lake, or its URI")
    lake.add_argument("--delete", action="store_true", help="delete a segment when its rows were read back")
    lake.add_argument("--skip-damaged", action="store_true", help="skip damaged segments, and name them at the end")
    lake.set_defaults(run=run_lake)

    report = commands.add_parser(
        "report",
        help="write a report of the load",
        description="Write a page, charts and tables about the load: items and data per minute, sizes, bursts, expiry "
        "and errors. Needs the extra [spark] and Java.",
    )
    report.add_argument("source", metavar="SOURCE", help="a lake, an archive, or a folder of queues")
    report.add_argument("out", metavar="OUT", help="the folder to write into")
    report.set_defaults(run=run_report)


def run_lake(args: argparse.Namespace) -> int:
    """``kestrelpy lake``."""
    with _session() as spark:
        from kestrelpy.spark import archive_to_parquet

        how = "skip" if args.skip_damaged else "raise"
        summary = archive_to_parquet(spark, args.archive, args.target, delete=args.delete, on_corruption=how)  # type: ignore[arg-type]
    print(
        f"{_common.counted(summary.segments, 'segment')} converted: {_common.counted(summary.items, 'item')}, "
        f"{_common.binary_size(summary.data_bytes)} of data, {_common.binary_size(summary.file_bytes)} of Parquet; "
        f"{summary.known:,} known, {summary.deleted:,} deleted"
    )
    for error in summary.damaged:
        sys.stderr.write(f"kestrelpy lake: {error}\n")
    return 1 if summary.damaged else 0


def run_report(args: argparse.Namespace) -> int:
    """``kestrelpy report``."""
    with _session() as spark:
        from kestrelpy.spark import load_report

        summary = load_report(spark, args.source, args.out)
    size = _common.binary_size(summary.data_bytes)
    print(f"{_common.counted(summary.items, 'item')}, {size}: {args.out}/{summary.page}")
    return 0


@contextmanager
def _session() -> Iterator[Any]:
    """A quiet session on this machine, stopped at the end.

    Raises ``CommandError`` if there can be no session, and if something fails in Spark.
    """
    try:
        import matplotlib  # noqa: F401 - a part of the extra, as the next import
        import pyarrow  # noqa: F401
        from pyspark.errors import PySparkException
    except ImportError:
        raise _common.CommandError(_MISSING, status=WRONG_USE) from None
    from kestrelpy.spark import JavaMissing, local_session

    try:
        with _silenced():
            spark = local_session(**_QUIET)
    except JavaMissing as missing:
        raise _common.CommandError(str(missing), status=WRONG_USE) from None
    try:
        yield spark
    except PySparkException as error:
        raise _common.CommandError(_reason(str(error))) from error
    finally:
        spark.stop()


@contextmanager
def _silenced() -> Iterator[None]:
    """Processes started inside the block get no standard error: Spark's log is long, and an error here is one line.

    With KESTRELPY_TRACEBACK set, they keep standard error.
    """
    if os.environ.get("KESTRELPY_TRACEBACK"):
        yield
        return
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _reason(message: str) -> str:
    """The error of a task, from the traceback in Spark's message; else the first line of the message."""
    lines = message.strip().splitlines()
    ours = [line for line in lines if line.startswith("kestrelpy.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[0] if lines else "Spark failed"
