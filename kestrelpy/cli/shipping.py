"""The commands of ``kestrelpy.ship``: ``restore``, and ``ship`` with its own.

They look at a store, bring a queue back from it, and ship a queue that nobody has open. The queues of a running program
are shipped by that program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from kestrelpy import JournaledQueue
from kestrelpy.cli import _common as common
from kestrelpy.cli._common import CommandError, counted, escaped, iso
from kestrelpy.cli._ship_options import StoreProgress, add_store_options, store_errors, store_options
from kestrelpy.errors import KestrelError

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands
    from kestrelpy.ship import RemoteSlot, RemoteStatus, Restored, Shipping, StandbyStatus

__all__ = ["add_commands"]

_LOOK_SECONDS = 1.0
"""So often a change of a standby's state is looked for."""
STALL_SECONDS = 60.0
"""``ship once`` gives up when nothing has come to the store for so long."""
_DESCRIPTION = """\
Look at the queues in a store (a folder, or an object store), check them, and ship a queue that nobody has open. A store
is a URL: file:///folder, s3://bucket/prefix, gs://, az:// or abfss://. Secrets come from the environment.
"""
_EPILOG = """\
exit status: 0 done; 1 the store is too weak, the queue is damaged, or is not there, or the command was refused; 2 wrong
use.

  kestrelpy ship check s3://bucket/prod
  kestrelpy ship status s3://bucket/prod
  kestrelpy ship log s3://bucket/prod jobs --from 100
  kestrelpy ship once /var/lib/queues jobs s3://bucket/prod
  kestrelpy restore s3://bucket/prod jobs /var/lib/queues
  kestrelpy standby s3://bucket/prod jobs /var/lib/queues --exec python3 service.py
"""


# -- parsers ---------------------------------------------------------------------------------------------------------


def add_commands(commands: Commands) -> None:
    """Add ``restore``, and ``ship`` and its commands, to the parser."""
    restorer = commands.add_parser(
        "restore",
        help="make the files of a queue again, from the store that it is shipped to",
        description="Make the files of a queue in DIR again, from the store at URL that it is shipped to: as of the "
        "end of its log, or as of a moment. Every byte is checked. Cut short, it is repeated. The folder must not have "
        "a queue of that name.",
    )
    _add_remote(restorer)
    restorer.add_argument("directory", metavar="DIR", help="the folder; made if it is missing")
    moment = restorer.add_mutually_exclusive_group()
    moment.add_argument(
        "--at",
        metavar="TIME",
        type=common.instant_ms,
        help="as of this time: ISO 8601 (UTC if it has no offset) or milliseconds, by the clock of the queue's owner",
    )
    moment.add_argument("--slot", metavar="N", type=common.positive, help="as of this slot of the log")
    restorer.add_argument("--all", action="store_true", help="also the segments that all readers have passed")
    restorer.add_argument(
        "--lazy", action="store_true", help="fetch the end alone; the owner of the queue fetches the rest when it reads"
    )
    _finish(restorer, run_restore)

    _add_standby(commands)
    ship = commands.add_parser(
        "ship",
        help="look at queues in an object store, check them, and ship one that nobody has open",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = ship.add_subparsers(title="commands", metavar="COMMAND", dest="ship_command", required=True)
    _add_looking(inner)
    _add_changing(inner)


def _add_standby(commands: Commands) -> None:
    standby = commands.add_parser(
        "standby",
        help="follow a shipped queue on another machine, until it may be taken over",
        description="Keep the files of a queue in DIR at the end of its log in the store at URL, until it may be taken "
        "over: its owner's lease is over, or it was handed over. Then run CMD in place of this process, which takes it "
        "over by opening it in DIR with ship=; without CMD, end. What an owner that was taken over had not shipped is "
        "set aside first.",
    )
    _add_remote(standby)
    standby.add_argument("directory", metavar="DIR", help="the folder; made if it is missing")
    standby.add_argument(
        "--interval", metavar="S", type=common.seconds, default=1.0, help="seconds between looks (default: 1)"
    )
    add_store_options(standby)
    standby.add_argument(
        "--exec",
        dest="program",
        metavar="CMD",
        nargs=argparse.REMAINDER,
        help="the program to run at the takeover, and its arguments: all that follows",
    )
    standby.set_defaults(run=run_standby)


def _parser(commands: Any, name: str, text: str, more: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip()
    )
    return parser


def _add_remote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the store")
    parser.add_argument("queue", metavar="QUEUE", help="the queue's name")


def _finish(parser: argparse.ArgumentParser, run: Any, *, has_json: bool = True, has_store: bool = True) -> None:
    """Add what most commands have."""
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON objects, one on each line")
    if has_store:
        add_store_options(parser)
    parser.set_defaults(run=run)


def _add_looking(commands: Any) -> None:
    check = _parser(
        commands,
        "check",
        "find out whether a queue can be trusted to a store",
        "Creates objects below probe/ and deletes them, for up to a minute. The exit status is 1 if it can't.",
    )
    check.add_argument("url", metavar="URL", help="the store")
    _finish(check, run_check)

    status = _parser(commands, "status", "show the queues in a store, or one of them", "Read-only.")
    status.add_argument("url", metavar="URL", help="the store")
    status.add_argument("queue", metavar="QUEUE", nargs="?", help="the queue's name (default: all queues)")
    _finish(status, run_status)

    log = _parser(
        commands,
        "log",
        "show the log of a queue in a store, a line a slot",
        "The columns are: number, kind, epoch, time written, segment, offset and length in it, ids, and the positions "
        "of readers. Slots that are kept no more are left out. Read-only.",
    )
    _add_remote(log)
    log.add_argument("--from", dest="start", metavar="N", type=common.positive, default=1, help="from slot N on")
    _finish(log, run_log)

    verify = _parser(
        commands,
        "verify",
        "check every byte of a queue in a store",
        "Read-only; reads all of it. The exit status is 1 if there is damage.",
    )
    _add_remote(verify)
    _finish(verify, run_verify)


def _add_changing(commands: Any) -> None:
    once = _parser(
        commands,
        "once",
        "ship a queue that nobody has open, and close it",
        "From then on it is a queue that is shipped: a program opens it with ship=, or detaches it. It is opened as "
        "its owner opens it: segments that are passed by all readers may be retired.",
    )
    common.add_queue(once)
    once.add_argument("url", metavar="URL", help="the store")
    _finish(once, run_once)

    again = _parser(
        commands,
        "rejoin",
        "make the folder of an owner that was taken over that of a standby",
        "What it had not shipped is set aside in a folder beside it. Nothing is merged or deleted. Nobody may have the "
        "queue open.",
    )
    common.add_queue(again)
    again.add_argument("url", metavar="URL", help="the store")
    _finish(again, run_rejoin)

    detach = _parser(
        commands,
        "detach",
        "let a queue be shipped no more",
        "Works while the store is away. What is in the store stays. Nobody may have the queue open.",
    )
    common.add_queue(detach)
    _finish(detach, run_detach, has_json=False, has_store=False)

    drop = _parser(
        commands,
        "drop-reader",
        "forget a reader that reads the store, such as a Spark query",
        "From then on it holds back no segment in the store. A reader of the queue itself: kestrelpy drop-reader.",
    )
    _add_remote(drop)
    drop.add_argument("reader", metavar="READER", help="the reader's name")
    _finish(drop, run_drop_reader, has_json=False)


# -- restore ---------------------------------------------------------------------------------------------------------


def run_restore(args: argparse.Namespace) -> int:
    """``kestrelpy restore``."""
    from kestrelpy.ship import restore

    if args.lazy and (args.at is not None or args.slot is not None):
        raise CommandError("--lazy goes with the end of the log, not with --at or --slot", status=2)
    with store_errors(), StoreProgress("restored") as progress:
        made = restore(
            args.url,
            args.queue,
            args.directory,
            at_ms=args.at,
            at_slot=args.slot,
            all=args.all,
            lazy=args.lazy,
            options=store_options(args.option),
            progress=progress,
        )
    if args.json:
        print(json.dumps(dataclasses.asdict(made)))
    else:
        sys.stdout.write(_restored_text(made))
    return 0


def _restored_text(made: Restored) -> str:
    facts = (
        ("queue", made.queue),
        ("as of", f"slot {made.slot}, epoch {made.epoch}, written {iso(made.written_ms)}"),
        ("items", f"{made.items:,}, the last id is {made.last_id}"),
        ("journal", f"{counted(made.segments, 'segment')}, {counted(made.bytes, 'byte')}"),
        ("readers", _names(made.readers)),
        ("took", f"{made.seconds:.1f} s"),
    )
    return "".join(f"{name:<9}{text}\n" for name, text in facts)


def _names(readers: Any) -> str:
    return ", ".join(name or "(default)" for name in readers) or "none"


# -- a standby -------------------------------------------------------------------------------------------------------


def run_standby(args: argparse.Namespace) -> int:
    """``kestrelpy standby``."""
    from kestrelpy.ship import Standby

    if args.program is not None and not args.program:
        raise CommandError("--exec needs a program to run", status=2)
    if args.program and shutil.which(args.program[0]) is None:
        raise CommandError(f"--exec: there is no program {args.program[0]!r}", status=2)
    if not args.interval:
        raise CommandError("--interval must be above 0", status=2)
    with store_errors():
        standby = Standby(
            args.directory,
            args.queue,
            args.url,
            poll_interval=args.interval,
            options=store_options(args.option),
        )
    with standby:
        said = ""
        while True:
            is_over = standby.wait(timeout=_LOOK_SECONDS)
            status = standby.status()
            if (text := _standby_text(status)) != said:
                said = text
                _say(text)
            if is_over:
                break
    if args.program is None:
        _say(f"queue {args.queue} may be taken over: open it in {args.directory} with ship=")
        return 0
    _say(f"running {args.program[0]}")
    return _become(args.program)


def _become(program: list[str]) -> NoReturn:
    """Run a program in place of this process."""
    sys.stdout.flush()
    os.execvp(program[0], program)


def _standby_text(status: StandbyStatus) -> str:
    """A line that changes when the state does, and not with each slot."""
    owner = f", owner {escaped(status.owner)}" if status.owner else ""
    error = f": {escaped(status.last_error)}" if status.state in ("away", "full", "damaged") else ""
    return f"{status.state}{owner}{error}"


def _say(text: str) -> None:
    sys.stderr.write(f"kestrelpy standby: {text}\n")
    sys.stderr.flush()


def run_rejoin(args: argparse.Namespace) -> int:
    """``kestrelpy ship rejoin``."""
    from kestrelpy.ship import rejoin

    common.require_queue(args.directory, args.queue)
    with store_errors():
        found = rejoin(args.directory, args.queue, args.url, options=store_options(args.option))
    if args.json:
        print(json.dumps(None if found is None else dataclasses.asdict(found)))
    elif found is None:
        print("everything was shipped: nothing is set aside")
    else:
        ids = f"ids {found.first_id} to {found.last_id} of epoch {found.epoch}"
        print(f"set aside {counted(found.items, 'item')}, {counted(found.bytes, 'byte')}, {ids}: {found.path}")
    return 0


# -- looking ---------------------------------------------------------------------------------------------------------


def run_check(args: argparse.Namespace) -> int:
    """``kestrelpy ship check``."""
    from kestrelpy.ship import check

    with store_errors():
        report = check(args.url, options=store_options(args.option))
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        for result in report.results:
            print(f"{'ok' if result.ok else 'FAILED':<7} {result.name}{f': {result.detail}' * (not result.ok)}")
        print(
            "the store is good enough" if report.ok else "THE STORE IS NOT GOOD ENOUGH: no queue can be shipped there"
        )
    return 0 if report.ok else 1


def run_status(args: argparse.Namespace) -> int:
    """``kestrelpy ship status``."""
    from kestrelpy.ship import StoreUnavailable, queues, status

    options = store_options(args.option)
    with store_errors():
        if args.queue is not None:
            found = status(args.url, args.queue, options=options)
            sys.stdout.write(_json_of(args.queue, found) if args.json else _status_text(args.queue, found))
            return 0
        names = queues(args.url, options=options)
    rows = [("queue", "slot", "epoch", "last id", "written", "size", "owner")]
    exit_status = 0 if names else 1
    for name in names:
        try:
            found = status(args.url, name, options=options)
        except StoreUnavailable:  # that is no damage, and the next queue has no better luck
            raise
        except KestrelError as error:
            exit_status = 1
            rows.append((name, "", "", "", f"damaged: {error}", "", ""))
            if args.json:
                print(json.dumps({"queue": name, "damaged": str(error)}))
            continue
        if args.json:
            sys.stdout.write(_json_of(name, found))
        size = common.binary_size(found.bytes)
        row = (str(found.slot), str(found.epoch), str(found.last_id), iso(found.written_ms), size, _owner(found))
        rows.append((name, *row))
    if names and not args.json:
        sys.stdout.write(common.table(rows, numbers=(1, 2, 3, 5)))
    return exit_status


def _json_of(queue: str, found: RemoteStatus) -> str:
    return json.dumps({"queue": queue, **dataclasses.asdict(found)}) + "\n"


def _owner(found: RemoteStatus) -> str:
    return f"{escaped(found.owner)}{' (has left)' if found.closed else ''}"


def _status_text(queue: str, found: RemoteStatus) -> str:
    readers = ", ".join(f"{name or '(default)'} at {head}" for name, head in found.readers.items()) or "none"
    facts = (
        ("queue", f"{queue}, id {found.queue_id}"),
        ("owner", f"{_owner(found)}, epoch {found.epoch}"),
        ("log", f"ends at slot {found.slot}, written {iso(found.written_ms)}"),
        ("last id", str(found.last_id)),
        ("readers", readers),
        ("restore", f"from {iso(found.first_ms)} on"),
        ("there", f"{counted(found.slots, 'slot')}, {counted(found.segments, 'segment')}, "
         f"{counted(found.bytes, 'byte')} ({common.binary_size(found.bytes)})"),
    )  # fmt: skip
    return "".join(f"{name:<9}{text}\n" for name, text in facts)


def run_log(args: argparse.Namespace) -> int:
    """``kestrelpy ship log``."""
    from kestrelpy.ship import read_log

    with store_errors():
        for slot in read_log(args.url, args.queue, start=args.start, options=store_options(args.option)):
            print(json.dumps(dataclasses.asdict(slot)) if args.json else _slot_text(slot))
    return 0


def _slot_text(slot: RemoteSlot) -> str:
    ids = f"{slot.first_id}-{slot.last_id}" if slot.last_id or slot.first_id else "-"
    if slot.kind == "fence":
        ids = f"from {slot.first_id}"
    readers = ", ".join(
        f"{name or '(default)'}={'dropped' if head is None else head}" for name, head in slot.readers.items()
    )
    where = f"{slot.segment or '-':>13}  {f'{slot.offset}+{slot.length}':>16}"
    about = f"by {escaped(slot.owner)}" if slot.kind == "fence" else readers
    line = f"{slot.number:>8}  {slot.kind:<5}  {slot.epoch:>5}  {iso(slot.written_ms)}  {where}  {ids:>16}  {about}"
    return line.rstrip()


def run_verify(args: argparse.Namespace) -> int:
    """``kestrelpy ship verify``."""
    from kestrelpy.ship import verify

    with store_errors(), StoreProgress("read") as progress:
        report = verify(args.url, args.queue, options=store_options(args.option), progress=progress)
    if args.json:
        print(json.dumps({"queue": args.queue, "ok": report.ok, **dataclasses.asdict(report)}))
        return 0 if report.ok else 1
    there = (counted(report.slots, "slot"), counted(report.segments, "segment"), counted(report.manifests, "manifest"))
    print(f"read     {', '.join(there)}, {counted(report.bytes, 'byte')}")
    if report.garbage:
        print(f"garbage  {counted(report.garbage, 'object')} that nothing needs; no damage")
    for problem in report.problems:
        print(f"damage   {escaped(problem)}")
    print("no damage" if report.ok else f"DAMAGED in {counted(len(report.problems), 'place')}")
    return 0 if report.ok else 1


# -- changing --------------------------------------------------------------------------------------------------------


def run_once(args: argparse.Namespace) -> int:
    """``kestrelpy ship once``."""
    from kestrelpy.ship import Ship, shipped_to
    from kestrelpy.work import WorkQueue

    common.require_queue(args.directory, args.queue)
    url = args.url.rstrip("/")
    there = shipped_to(args.directory, args.queue)
    if there not in (None, url):
        raise CommandError(f"queue {args.queue!r} is shipped to {there}: detach it first, to ship it to another store")
    options = Ship(url, interval=0, options=store_options(args.option))
    with store_errors():
        opened = WorkQueue if common.is_work_queue(args.directory, args.queue) else JournaledQueue
        with opened(args.directory, args.queue, ship=options) as queue:
            assert queue.shipping is not None
            slot = _shipped_whole(queue.shipping)
            done = queue.shipping.status()
    facts = {"queue": args.queue, "store": done.store, "epoch": done.epoch, "slot": slot, "last_id": done.shipped_id}
    if args.json:
        print(json.dumps(facts))
    else:
        print(f"shipped {args.queue} to {done.store}, up to id {done.shipped_id}: slot {slot}, epoch {done.epoch}")
    return 0


def _shipped_whole(shipping: Shipping) -> int:
    """Wait until everything is in the store. Gives up when nothing has come there for a while."""
    from kestrelpy.ship import NotShipped

    moved, before = time.monotonic(), -1
    with StoreProgress("shipped") as progress:
        while True:
            try:
                return shipping.flush(timeout=0.5)
            except NotShipped:
                status = shipping.status()
            if status.shipped_bytes != before:
                moved, before = time.monotonic(), status.shipped_bytes
            elif time.monotonic() - moved > STALL_SECONDS:
                raise CommandError(f"nothing comes to {status.store} any more: {status.last_error or status.state}")
            progress(status.shipped_bytes, status.shipped_bytes + status.unshipped_bytes)


def run_detach(args: argparse.Namespace) -> int:
    """``kestrelpy ship detach``."""
    from kestrelpy.ship import detach

    if not detach(args.directory, args.queue):
        common.require_queue(args.directory, args.queue)
        raise CommandError(f"queue {args.queue!r} in {args.directory} is not shipped")
    return 0


def run_drop_reader(args: argparse.Namespace) -> int:
    """``kestrelpy ship drop-reader``."""
    from kestrelpy.ship import drop_reader

    with store_errors():
        if not drop_reader(args.url, args.queue, args.reader, options=store_options(args.option)):
            raise CommandError(f"queue {args.queue!r} in this store has no reader outside named {args.reader!r}")
    return 0
