"""The result as a page of the documents, and as text for a terminal."""

from __future__ import annotations

from typing import Any

COLUMNS = {
    "acknowledged": "acknowledged",
    "lost": "lost",
    "in hand": "of these in hand",
    "holes": "holes",
    "again": "again",
    "twice": "twice",
    "phantom": "phantom",
    "disorder": "out of order",
    "unreadable": "unreadable",
    "hung": "hung",
    "marked rounds": "rounds with any of it",
}
ENDS = {"kill": "Killed with SIGKILL", "cut": "Power cut"}

PAGE = """# What queues keep

The same loop over several libraries: processes killed, and the power of a real file system cut. Written by
`python -m bench.crash --write docs/comparison.md`; how it works is said at the top of `bench/crash/__init__.py`, what
is counted at the top of `bench/crash/rounds.py`.

## How to read it, and how not to
Most of these libraries do not promise to survive a power cut, and queuelib says plainly that it survives no end without
`close()`. A loss where nothing is promised is no fault of theirs; the table says what happens, for those who have to
choose. The last column of the first table has what each one promises, in the words of its documents where there are
any. Each was used in the way that its documents describe for the most safety; other settings may give less, or more.
One process puts and takes, as that is what all of them allow.

- *Acknowledged* are puts that had returned when the end came. *Lost* are those of them that were not taken out and done
  before, and were not there afterwards; what is in a queue that cannot be read counts too.
- *In hand*: an item that had been handed to the consumer, which was not done with it. With a library that knows no
  acknowledgement it is gone when the consumer dies; that is how such a queue works. *Holes*: lost, and a later item
  is there.
- *Again*: items that were done and come again. For kestrelpy (never) that is by design: commits are saved once a
  second, and a round is shorter. Nothing is lost by it, work is done twice.
- *Twice*, *phantom*, *out of order*: items that come two times in one reading, that nobody put or with other bytes,
  that come after a later one. *Unreadable*: the queue could not be opened, or raised before it was empty. *Hung*:
  still at it after 20 seconds. *Rounds with any of it*: without "again", and without "in hand" where there is no
  acknowledgement. For kestrelpy (never) a round with a power cut that loses a suffix is what it promises.
- The rounds are short, and the power goes in the middle of them. Somebody who puts an item a minute on a system that
  writes back every few seconds loses less: that something is lost says more than how much.
- The disk is one that keeps its word: a loop device over memory, on which a sync is as good as free. How fast anything
  is cannot be seen here. A round that shows nothing proves nothing; hundreds of them make a fault unlikely, no more.
- A file system like this one writes the name of a new file with its content. A library that does not sync folders gets
  away with it here, and may not elsewhere.

## Who took part
{peers}

## {kills} kills each
{kill_table}

## {cuts} power cuts each
{cut_table}

## Where and when
{machine}
"""


def page(facts: dict[str, Any]) -> str:
    """The whole page."""
    settings = facts["settings"]
    return PAGE.format(
        peers=_peers(facts),
        kills=settings["kills"],
        kill_table=_table(facts, "kill"),
        cuts=settings["cuts"],
        cut_table=_table(facts, "cut"),
        machine=_machine(facts),
    )


def _peers(facts: dict[str, Any]) -> str:
    lines = ["| | version | used as | promises |", "|---|---|---|---|"]
    for peer in facts["peers"]:
        cells = (peer["name"], peer["version"] or "not installed", peer["settings"], peer["promise"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _table(facts: dict[str, Any], end: str) -> str:
    if reason := facts["left_out"].get(end):
        return f"Not done: {reason}."
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for peer in facts["peers"]:
        counts = peer["results"].get(end)
        if counts is not None:
            figures = (f"{counts[name]:,}" for name in COLUMNS)
            lines.append(f"| {peer['name']} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def _machine(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    return (
        f"{facts['date']}, seed {facts['settings']['seed']}. {machine['system']}, {machine['python']}, SQLite "
        f"{machine['sqlite']}, {machine['cores']} cores ({machine['processor']}). Kills on "
        f"{machine['file_system']}, cuts on ext4."
    )


def text(facts: dict[str, Any]) -> str:
    """The tables for a terminal."""
    blocks = []
    for end, title in ENDS.items():
        if reason := facts["left_out"].get(end):
            blocks.append(f"{title}: not done, {reason}")
            continue
        rows = [(title, *COLUMNS.values())]
        rows += [
            (peer["name"], *(f"{peer['results'][end][name]:,}" for name in COLUMNS))
            for peer in facts["peers"]
            if end in peer["results"]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = zip(row, widths, strict=True)
            blocks.append(
                "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(cells))
            )
    left = [f"left out: {peer['name']}, {peer['left_out']}" for peer in facts["peers"] if peer["left_out"]]
    return "\n".join((*blocks, *left)) + "\n"
