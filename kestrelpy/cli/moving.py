"""The commands that put, get and show items: ``put``, ``get``, ``peek``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol, cast

from kestrelpy import JournaledQueue, QueueEmpty, open_reader
from kestrelpy.cli import _common, _framing, _records, _signals, _unread
from kestrelpy.errors import ItemTooLarge, UnknownReader

if TYPE_CHECKING:
    from kestrelpy import Reader
    from kestrelpy.cli._records import Commands

CHUNK_BYTES = 1 << 18
BATCH_ITEMS, BATCH_BYTES = 1000, 1 << 20
GET_ITEMS = 256


class _Source(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def add_commands(commands: Commands) -> None:
    """Add the parsers of ``put``, ``get`` and ``peek``."""
    put = commands.add_parser(
        "put", help="put items, one per line", description="Put items. A missing queue or folder is made."
    )
    _common.add_queue(put)
    put.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="the file to read; - or nothing: standard input"
    )
    _framing.add_framing(put)
    put.add_argument(
        "--sync",
        type=_common.sync_mode,
        default=0.1,
        metavar="MODE",
        help="always, never, or every so many seconds (0.1)",
    )
    put.add_argument("--expires-in", type=_common.seconds, metavar="SECONDS", help="the items expire after this time")
    put.add_argument("-q", "--quiet", action="store_true", help="print nothing at the end")
    put.set_defaults(run=run_put)

    get = commands.add_parser(
        "get",
        help="get items, and commit them when they are written",
        description="Get the items that are there and write them to standard output. Items are committed "
        "(acknowledged) once they are written and flushed. This works while another process puts. The exit status is 1 "
        "if there were no items. What is written into a pipe is committed, also if the program behind it ends without "
        "reading it: use --max N rather than head.",
    )
    _common.add_queue(get)
    _add_reader(get)
    get.add_argument("--follow", action="store_true", help="when no item is left, wait for more, until interrupted")
    get.add_argument("--max", type=_common.positive, metavar="N", help="stop after N items")
    get.add_argument(
        "--timeout", type=_common.seconds, default=0.0, metavar="SECONDS", help="how long to wait for an item (0)"
    )
    get.add_argument("--create", action="store_true", help="make the reader if the queue does not have it")
    get.add_argument(
        "--start",
        type=_common.start,
        default="tail",
        metavar="WHERE",
        help="where a reader that --create makes begins: tail (default), earliest, or the id of an item; the first "
        "named reader of a queue takes over the default reader's position instead",
    )
    _framing.add_framing(get)
    get.set_defaults(run=run_get)

    peek = commands.add_parser(
        "peek",
        help="show the next items of a reader, without getting them",
        description="Show the next items that a reader would get, by its last checkpoint. Read-only, takes no lock.",
    )
    _common.add_queue(peek)
    _add_reader(peek)
    peek.add_argument("--max", type=_common.positive, default=1, metavar="N", help="how many items to show (1)")
    _records.add_format(peek)
    peek.set_defaults(run=run_peek)


def _add_reader(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reader", metavar="R", default="", help="the name of the reader; without it, the default reader of the queue"
    )


# -- put -------------------------------------------------------------------------------------------------------------


def run_put(args: argparse.Namespace) -> int:
    """``kestrelpy put``."""
    count, first, last, size = 0, 0, 0, 0
    with (
        _input(args.file) as source,
        JournaledQueue(args.directory, args.queue, sync=args.sync) as queue,
    ):
        try:
            for items in _framing.split(_chunks(source), args.framing, queue.max_item_bytes):
                for batch in _framing.batches(items, BATCH_ITEMS, BATCH_BYTES):
                    if len(batch) == 1:  # a batch needs a little more room than the largest item leaves
                        last = queue.put(batch[0], expires_in=args.expires_in)
                    else:
                        last = queue.put_many(batch, expires_in=args.expires_in)[-1]
                    first = first or last - len(batch) + 1
                    count += len(batch)
                    size += sum(map(len, batch))
        except ItemTooLarge as error:
            raise _common.CommandError(f"input item {count + 1}: {error}; {_put_so_far(count, last)}") from None
        if args.sync != "never" and count:
            queue.sync()
    if not args.quiet:
        span = f", ids {first} to {last}" if count else ""
        print(f"put {_common.counted(count, 'item')}, {_common.counted(size, 'byte')}{span}")
    return 0


def _put_so_far(count: int, last: int) -> str:
    return (
        f"the {_common.counted(count, 'item')} before it are in the queue, up to id {last}"
        if count
        else "nothing was put"
    )


@contextlib.contextmanager
def _input(name: str) -> Iterator[_Source]:
    if name == "-":
        yield cast(_Source, sys.stdin.buffer)
    else:
        with open(name, "rb") as file:
            yield file


def _chunks(source: _Source) -> Iterator[bytes]:
    """Yield the input as it arrives. So an item is put as soon as it is whole, however slow the writer is."""
    while chunk := source.read1(CHUNK_BYTES):
        yield chunk


# -- get -------------------------------------------------------------------------------------------------------------


def run_get(args: argparse.Namespace) -> int:
    """``kestrelpy get``."""
    _common.require_queue(args.directory, args.queue)
    timeout = None if args.follow else args.timeout
    left: float = args.max or float("inf")
    count, some = 0, 1
    with contextlib.closing(_open_reader(args)) as reader:
        while left > 0:
            try:
                items = reader.get_many(int(min(left, some)), max_bytes=BATCH_BYTES, timeout=timeout)
            except QueueEmpty:
                break
            data = _framing.join([item.data for item in items], args.framing)
            with _signals.held():  # written items are committed, even if a signal arrives in between
                _framing.write_out(data)
                reader.commit_many(items)
            count += len(items)
            left -= len(items)
            some = min(2 * some, GET_ITEMS)  # few at first: whoever reads them may want no more
    return 0 if count else 1


def _open_reader(args: argparse.Namespace) -> Reader:
    """The reader that the command line names. Says on standard error if it is made."""
    try:
        return open_reader(args.directory, args.queue, args.reader)
    except UnknownReader as unknown:
        if not args.create:
            raise _common.CommandError(f"{str(unknown).partition(': create=')[0]}: --create makes it") from None
    reader = open_reader(args.directory, args.queue, args.reader, create=True, start=args.start)
    sys.stderr.write(f"kestrelpy get: made reader {args.reader!r} of {args.queue}, from item {reader.head + 1} on\n")
    return reader


# -- peek ------------------------------------------------------------------------------------------------------------


def run_peek(args: argparse.Namespace) -> int:
    """``kestrelpy peek``."""
    _common.require_queue(args.directory, args.queue)
    _common.refuse_work_queue(args.directory, args.queue)
    unread = _unread.unread(args.directory, args.queue, args.reader, now_ms=time.time_ns() // 1_000_000)
    return _records.write(islice(unread, args.max), args)
