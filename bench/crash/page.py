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

The same loop runs over several libraries. Its process is killed with SIGKILL, or the power of a
real file system is cut. `python -m bench.crash --write docs/comparison.md` writes this page. The
top of `bench/crash/__init__.py` says how the loop works, and the top of `bench/crash/rounds.py`
says what is counted.

## How to read it, and how not to
Most of these libraries do not promise to survive a power cut. queuelib says plainly that it
survives no end without `close()`. Where a library promises nothing, a loss is not its fault: the
tables show what happens, for readers who have to choose. The last column of the first table has the
promise of each library, in the words of its documents where there are any. Each library was used in
the way that its documents describe for the most safety. Other settings may give less, or more. One
process puts and takes, because all of these libraries allow that.

- *Acknowledged*: puts that had returned when the process ended. *Lost*: acknowledged items that had
  not been taken out and done before the end, and were not there afterwards. Items in a queue that
  cannot be read count, too.
- *In hand*: the item had been handed to the consumer, and the consumer was not done with it. If a
  library has no acknowledgement by the consumer, this item is gone when the consumer dies: that is
  how such a queue works. *Holes*: lost items, except those in hand, before an item that is still
  there.
- *Again*: items that were done and come again. For kestrelpy (never) this is by design: commits are
  saved once a second, and a round is shorter. Nothing is lost by it, but work is done twice.
- *Twice*: items that come two times in one reading. *Phantom*: items that nobody put, or with other
  bytes. *Out of order*: items that come after a later item. *Unreadable*: the queue could not be
  opened, or raised before it was empty. *Hung*: a process was still busy after 20 seconds. *Rounds
  with any of it*: "again" does not count, and "in hand" does not count where there is no
  acknowledgement. For kestrelpy (never), a round with a power cut that loses a suffix is within its
  promise.
- The rounds are short, and the power fails in the middle of a round. A program that puts an item a
  minute, on a system that writes back every few seconds, loses less. So whether a library loses
  items says more than how many it loses.
- The disk keeps its word. It is a loop device over memory, on which a sync is nearly free, so this
  page cannot show how fast a library is. A round that shows nothing proves nothing. Hundreds of
  such rounds make a fault unlikely, no more.
- A file system like this one writes the name of a new file together with its content. A library
  that does not sync folders passes here, and may fail on another file system.

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
