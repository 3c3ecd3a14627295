"""The command ``dashboard``: a page about a folder of queues, for a browser."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from kestrelpy.cli import _common
from kestrelpy.cli._common import CommandError

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

TOKEN_VARIABLE = "KESTRELPY_DASHBOARD_TOKEN"
_MOST_TOKEN_BYTES = 4096


def add_commands(commands: Commands) -> None:
    """Add the parser of ``dashboard``."""
    parser = commands.add_parser(
        "dashboard",
        help="a page with queues, rates and lag, for a browser",
        description="Serve a page about the queues of a folder: figures, the last hour as lines, the beginnings of the "
        "newest items, and a check of a queue on request. Beside whoever has the queues open, and read-only without "
        f"--allow-changes. A token comes from --token-file or from {TOKEN_VARIABLE}. Needs the extra [dashboard].",
    )
    parser.add_argument("directory", metavar="DIR", help="the folder")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8922", help="where to listen (default: 127.0.0.1:8922)"
    )
    parser.add_argument("--no-data", action="store_true", help="show nothing of what is in items and jobs")
    parser.add_argument(
        "--allow-changes", action="store_true", help="allow to drop readers and to kick jobs, with a token"
    )
    parser.add_argument("--token-file", metavar="FILE", help="the token is the first line of this file")
    parser.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="a name of this machine that browsers use"
    )
    parser.set_defaults(run=run_dashboard)


def run_dashboard(args: argparse.Namespace) -> int:
    """``kestrelpy dashboard``."""
    try:
        import starlette  # noqa: F401 - it is the extra
        import uvicorn  # noqa: F401 - as above
    except ImportError:
        raise CommandError("this needs the extra [dashboard]: pip install 'kestrelpy[dashboard]'", status=2) from None
    from kestrelpy.dashboard import DashboardMistake, serve

    _common.queues_in(args.directory)

    def said(text: str) -> None:
        sys.stderr.write(f"kestrelpy dashboard: {text}\n")
        sys.stderr.flush()

    try:
        serve(
            args.directory,
            listen=args.listen,
            token=_token_of(args),
            allow_changes=args.allow_changes,
            show_data=not args.no_data,
            hosts=args.allow_host,
            say=said,
        )
    except DashboardMistake as error:
        raise CommandError(str(error), status=2) from None
    return 0


def _token_of(args: argparse.Namespace) -> str | None:
    """The token that was given; ``None`` if none was. Raises ``CommandError``, ``OSError``."""
    if args.token_file is None:
        return os.environ.get(TOKEN_VARIABLE)
    with open(args.token_file, "rb") as file:
        first = file.read(_MOST_TOKEN_BYTES).partition(b"\n")[0].strip()
    try:
        return first.decode("ascii")
    except UnicodeDecodeError:
        raise CommandError("--token-file: a token is ASCII", status=2) from None
