"""The command ``dead``: looks at the dead letters of a queue, puts them back, drops them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kestrelpy import DeadLetter, ItemTooLarge, Record, WrongKind, dead_letters, inbox
from kestrelpy.cli import _common, _records, _unread

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands


def add_commands(commands: Commands) -> None:
    """Add the parser of ``dead``."""
    dead = commands.add_parser(
        "dead",
        help="look at dead letters, put them back, drop them",
        description="Items that consumers have given up are dead letters in another queue (ReaderConfig, dead_letter).",
    )
    actions = dead.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, text, run in (
        ("ls", "List the dead letters. Read-only, takes no lock.", run_ls),
        ("show", "Show dead letters with their data. Read-only, takes no lock.", run_show),
        (
            "requeue",
            "Put the data of dead letters back into the queues that they come from, exactly once.",
            run_requeue,
        ),
        ("drop", "Delete dead letters for good.", run_drop),
    ):
        action = actions.add_parser(name, help=text[0].lower() + text[1:].split(".")[0], description=text)
        _common.add_queue(action)
        action.add_argument(
            "--reader", metavar="R", default="", help="the reader of the dead letters (the default one)"
        )
        if name in ("requeue", "drop"):
            which = action.add_mutually_exclusive_group(required=True)
            which.add_argument("--all", action="store_true", help="all of them")
        else:
            which = action.add_mutually_exclusive_group()
            which.add_argument("--all", action="store_true", help="all of them; this is the default")
            action.add_argument("--json", action="store_true", help="write one JSON object for each letter")
        which.add_argument(
            "--id", dest="ids", type=_common.item_id, nargs="+", default=[], metavar="N", help="the ids that ls shows"
        )
        action.set_defaults(run=run)


# -- ls and show -----------------------------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    """``kestrelpy dead ls``."""
    letters = list(_shown(args))
    if args.json:
        return _write_json(letters)
    rows = [("id", "from", "item", "died", "errors", "size", "reason")]
    for record, letter in letters:
        if letter is None:
            rows.append((f"{record.id}", "(no dead letter)", "", "", "", f"{len(record.data)} B", ""))
        else:
            rows.append(
                (
                    f"{record.id}",
                    _origin(letter),
                    f"{letter.id}",
                    _common.iso(letter.died_ms),
                    f"{letter.error_count}",
                    f"{len(letter.data)} B",
                    _common.escaped(letter.reason),
                )
            )
    if letters:
        sys.stdout.write(_common.table(rows, numbers=(0, 2, 4, 5)))
    return _end(args, letters)


def run_show(args: argparse.Namespace) -> int:
    """``kestrelpy dead show``."""
    letters = list(_shown(args))
    if args.json:
        return _write_json(letters)
    for record, letter in letters:
        facts: list[tuple[str, str]] = [("id", f"{record.id}")]
        if letter is None:
            facts += [("from", "(no dead letter)"), ("data", _common.printable(record.data))]
        else:
            facts += [
                ("from", f"{_origin(letter)}, item {letter.id}"),
                ("added", _common.iso(letter.added_ms)),
                ("died", _common.iso(letter.died_ms)),
                ("errors", f"{letter.error_count}"),
                ("reason", _common.escaped(letter.reason)),
                ("data", _common.printable(letter.data)),
            ]
        sys.stdout.write("".join(f"{name:<8}{text}\n" for name, text in facts) + "\n")
    return _end(args, letters)


def _shown(args: argparse.Namespace) -> Iterator[tuple[Record, DeadLetter | None]]:
    """The unread items of the queue, and the dead letters that they are."""
    if not inbox.pending(args.directory, args.queue):
        _common.require_queue(args.directory, args.queue)
    elif args.queue not in _common.queues_in(args.directory):
        return
    _common.refuse_work_queue(args.directory, args.queue)
    for record in _unread.unread(args.directory, args.queue, args.reader, now_ms=time.time_ns() // 1_000_000):
        if not args.ids or record.id in args.ids:
            yield record, record.dead_letter


def _end(args: argparse.Namespace, letters: list[tuple[Record, DeadLetter | None]]) -> int:
    """What waits to be taken in is said, and is not shown: only an owner may take it in. It may be a move of dead
    letters, or items that somebody has put.
    """
    waiting = inbox.pending(args.directory, args.queue)
    if waiting:
        print(f"not shown: {_common.pending_text(waiting)} in the inbox, not taken in yet by an owner", file=sys.stderr)
    elif not letters and not args.ids:
        print(f"kestrelpy dead: nothing is unread in {args.queue}", file=sys.stderr)
    return 0 if letters else 1


def _origin(letter: DeadLetter) -> str:
    return _common.escaped(f"{letter.queue}+{letter.reader}" if letter.reader else letter.queue)


def _write_json(letters: Iterable[tuple[Record, DeadLetter | None]]) -> int:
    count = 0
    for count, (record, letter) in enumerate(letters, 1):  # noqa: B007 - counted
        facts = None if letter is None else _records.letter_facts(letter)
        print(json.dumps({"id": record.id, "dead_letter": facts}))
    return 0 if count else 1


# -- requeue and drop ------------------------------------------------------------------------------------------------


def run_requeue(args: argparse.Namespace) -> int:
    """``kestrelpy dead requeue``."""
    return _do_each(args, "put back", DeadLetter.requeue)


def run_drop(args: argparse.Namespace) -> int:
    """``kestrelpy dead drop``."""
    return _do_each(args, "dropped", DeadLetter.drop)


def _do_each(args: argparse.Namespace, what: str, do: Callable[[DeadLetter], None]) -> int:
    """``do`` each chosen letter. Those that can't be put back are named, and stay. They do not keep the others."""
    if not inbox.pending(args.directory, args.queue):
        _common.require_queue(args.directory, args.queue)
    wanted, done, foreign = set(args.ids), 0, []
    refused: list[str] = []
    origins: set[str] = set()
    with dead_letters(args.directory, args.queue, reader=args.reader) as letters:
        for letter in letters:
            if args.all or letter.letter_id in wanted:
                wanted.discard(letter.letter_id)
                if do is DeadLetter.requeue and not letter.queue:
                    foreign.append(letter.letter_id)
                    continue
                try:
                    do(letter)
                    done += 1
                    if do is DeadLetter.requeue:
                        origins.add(letter.queue)
                except (ItemTooLarge, WrongKind, ValueError) as error:
                    refused.append(f"{letter.letter_id} stays: {error}")
            if not args.all and not wanted:
                break
    print(f"{_common.counted(done, 'dead letter')} {what}")
    waiting = sorted(name for name in origins if inbox.pending(args.directory, name))
    if waiting:
        print(f"published, until the owner takes them in: {', '.join(waiting)}", file=sys.stderr)
    if foreign:
        refused.append(f"no dead letters, and left there: {', '.join(map(str, foreign))}")
    if wanted:
        ids = ", ".join(map(str, sorted(wanted)))
        refused.append(f"not in queue {args.queue!r}: {ids} (the ids are those that 'kestrelpy dead ls' shows first)")
    if refused:
        raise _common.CommandError("; ".join(refused))
    return 0 if done else 1
