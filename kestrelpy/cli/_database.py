"""How the commands of ``outbox`` open a database, and what they say of its errors.

What SQLAlchemy and a driver say may take many lines, and may show a password. The user sees one line without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy.cli._common import CommandError, escaped

if TYPE_CHECKING:
    from sqlalchemy import URL

    from kestrelpy.outbox import Outbox

VARIABLE = "KESTRELPY_OUTBOX"
WRONG_USE = 2
_NO_URL = "this is no URL of a database: pass sqlite:///FILE, or postgresql+psycopg://USER@HOST/DATABASE"
_NO_TABLE, _NO_COLUMN = "42P01", "42703"


def add_database(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the jobs are."""
    where = parser.add_argument_group("where the jobs are")
    where.add_argument(
        "--bind", metavar="URL", help=f"the database, as SQLAlchemy names it (default: the variable {VARIABLE})"
    )
    where.add_argument("--table", metavar="NAME", default="kestrel_jobs", help="the table (default: kestrel_jobs)")
    where.add_argument("--schema", metavar="NAME", help="the schema of the table")


@contextlib.contextmanager
def opened(args: argparse.Namespace, *, is_new: bool = False, **options: Any) -> Iterator[Outbox]:
    """The outbox that the arguments name. ``is_new``: a file of SQLite may be missing.

    Raises ``CommandError``, also for what the database raises within the block.
    """
    from kestrelpy.outbox import Outbox

    url = url_of(args)
    if not is_new:
        _require_file(url)
    with said_in_one_line(url, args.table if args.schema is None else f"{args.schema}.{args.table}"):
        outbox = Outbox(url, table=args.table, schema=args.schema, **options)
        try:
            yield outbox
        finally:
            outbox.close()


def url_of(args: argparse.Namespace) -> URL:
    """Raises ``CommandError`` if there is none, or it can't be read. Its text is in no message."""
    text = args.bind or os.environ.get(VARIABLE)
    if not text:
        raise CommandError(f"which database? Pass --bind URL, or set {VARIABLE}", status=WRONG_USE)
    return parsed(text, "--bind" if args.bind else VARIABLE)


def parsed(text: str, name: str) -> URL:
    """``name``: of the option. Raises ``CommandError``, ``MissingPackage``."""
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError:
        from kestrelpy.outbox import MissingPackage

        raise MissingPackage("sqlalchemy", "outbox") from None
    try:
        return make_url(text)
    except (ArgumentError, ValueError):  # of the port; it may quote a part of a password
        raise CommandError(f"{name}: {_NO_URL}", status=WRONG_USE) from None


def _require_file(url: URL) -> None:
    """SQLite would make an empty file. A command that only looks makes none."""
    path = url.database
    is_file = url.get_backend_name() == "sqlite" and path and path != ":memory:" and not path.startswith("file:")
    if is_file and path and not os.path.exists(path):
        raise CommandError(f"{escaped(path)}: no such file; kestrelpy outbox init makes it")


@contextlib.contextmanager
def said_in_one_line(url: URL | None, table: str = "") -> Iterator[None]:
    """Raise ``CommandError`` for what SQLAlchemy raises within the block, unless KESTRELPY_TRACEBACK is set."""
    from kestrelpy.outbox import MissingPackage

    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise MissingPackage("sqlalchemy", "outbox") from None
    try:
        yield
    except SQLAlchemyError as error:
        if os.environ.get("KESTRELPY_TRACEBACK"):
            raise
        raise CommandError(reason_of(error, url, table)) from error


def reason_of(error: Exception, url: URL | None, table: str = "") -> str:
    """What went wrong, in one line, without a password."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    where = "" if url is None else f" in {shown(url)}"
    if table and (state == _NO_TABLE or lines[0].startswith("no such table")):
        return f"there is no table {table}{where}: kestrelpy outbox init makes it, --table and --schema name another"
    if table and (state == _NO_COLUMN or lines[0].startswith("no such column")):
        return f"table {table}{where} holds no jobs of an outbox: {without_password(lines[0], url)}"
    return without_password(lines[0], url)


def paused_queues(outbox: Outbox) -> set[str]:
    """The queues that are paused. Of a database with an asyncio driver they are not known here."""
    from kestrelpy.outbox import OutboxError

    table = next(one for name, one in outbox.metadata.tables.items() if name.endswith("_queues"))
    try:
        with outbox.begin() as connection:
            return set(connection.execute(table.select().where(table.c.paused)).scalars())
    except OutboxError:
        return set()


def shown(url: URL) -> str:
    """A URL for people: without its password, and without its query, which may have one."""
    bare = url.difference_update_query(list(url.query))._replace(password=None)
    return escaped(bare.render_as_string(hide_password=False))


def without_password(text: str, url: URL | None) -> str:
    """The text, escaped, with stars in place of passwords."""
    text = re.sub(r"(://[^:/@\s]*:)[^@\s]*@", r"\1***@", text)
    if url is not None:
        secrets = [url.password, *(value for name, value in url.query.items() if "pass" in name.lower())]
        for secret in secrets:
            if isinstance(secret, str) and secret:
                text = text.replace(secret, "***")
    return escaped(text)
