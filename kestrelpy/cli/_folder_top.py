"""``top``: a live table of the queues of a folder, their readers and their tubes.

Rules:
1. The figures are those of ``kestrelpy.inspection.FolderWatch``, by the files. What only an owner knows, such as who
   waits, is not among them.
2. Text of others gets into a frame as ``Text`` and escaped: it is neither markup of rich nor a command to a terminal.
3. If the first look fails, the command ends. A later one that fails is shown, and the table stays.
4. Not on a terminal, or with ``--json``, rich is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrelpy.cli import _common
from kestrelpy.cli._common import CommandError, binary_size, escaped, iso
from kestrelpy.errors import KestrelError
from kestrelpy.inspection import FolderWatch, WatchedQueue
from kestrelpy.work import JobsOutside, TubeOutside

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["FolderLooker", "show"]

FIRST_INTERVAL = 1.0
"""The most seconds between the two looks that a single frame needs for rates."""
_HEADING = ("queue", "items", "in/s", "out/s", "oldest", "lag", "disk", "segments", "")
_NUMBERS = range(1, 8)
_LONGEST_TEXT = 60
_BESIDE_ROWS = 5
"""Lines of a screen that are no rows."""


def _by(measure: Callable[[WatchedQueue], float]) -> Callable[[WatchedQueue], tuple[float, str]]:
    return lambda one: (-measure(one), one.name)


ORDERS: dict[str, tuple[str, Callable[[WatchedQueue], Any]]] = {
    "n": ("name", lambda one: one.name),
    "i": ("items", _by(lambda one: one.items)),
    "p": ("in/s", _by(lambda one: one.rate_in)),
    "o": ("out/s", _by(lambda one: one.rate_out)),
    "a": ("oldest", lambda one: (one.oldest_ms or 1 << 62, one.name)),
    "l": ("lag", _by(lambda one: one.bytes)),
    "d": ("disk", _by(lambda one: one.file_bytes)),
    "t": ("trouble", lambda one: (not one.problem, one.name)),
}
"""By key: what the queues are sorted by. The largest comes first, but for names."""
_SCROLL = {"j": 1, "k": -1, "\x1b[B": 1, "\x1b[A": -1, " ": 20, "b": -20, "\x1b[6~": 20, "\x1b[5~": -20}


class Row(NamedTuple):
    """A line of the table. ``style``: of its last cell."""

    cells: tuple[str, ...]
    style: str


class FolderLooker:
    """Looks at a folder, and draws what it has seen last. ``order``: a key of ``ORDERS``."""

    def __init__(self, directory: str, *, order: str = "n") -> None:
        self.directory = directory
        self.order = order
        self.is_reversed = False
        self.first_row = 0
        self._watch = FolderWatch(directory)
        self._queues: dict[str, WatchedQueue] = {}
        self._jobs: dict[str, JobsOutside] = {}
        self._tubes: dict[str, list[TubeOutside]] = {}
        self._problem = ""

    def look(self) -> None:
        """Raises ``OSError``; then ``frame`` shows what was seen before."""
        try:
            self._queues = self._watch.look()
        except OSError as error:
            self._problem = str(error)
            raise
        self._problem = ""
        for gone in self._jobs.keys() - self._queues.keys():
            del self._jobs[gone]
            self._tubes.pop(gone, None)
        for name, one in self._queues.items():
            if one.kind != "queue":
                self._look_at_jobs(name, one)

    def _look_at_jobs(self, name: str, one: WatchedQueue) -> None:
        jobs = self._jobs.setdefault(name, JobsOutside(self.directory, name))
        try:
            jobs.look_if_cheap(one.tail_id)
            self._tubes[name] = jobs.tubes()
        except (KestrelError, OSError) as error:
            self._queues[name] = one._replace(problem=one.problem or str(error))

    @property
    def inbox_problem(self) -> str:
        """Why it is not known what is pending, or empty."""
        why = self._watch.inbox_problem
        return f"what is pending is not known, the inbox cannot be read: {escaped(why)}" if why else ""

    @property
    def is_in_trouble(self) -> bool:
        """Whether some queue has a problem."""
        return any(one.problem for one in self._queues.values())

    def press(self, key: str) -> bool:
        """Obey a key. False if it ends the table."""
        if key in ("q", "Q", "\x04"):
            return False
        if key == "r":
            self.is_reversed = not self.is_reversed
        elif key in ORDERS:
            self.is_reversed = self.is_reversed and key == self.order
            self.order, self.first_row = key, 0
        elif key in _SCROLL:
            self.first_row = max(0, min(self.first_row + _SCROLL[key], len(self.rows()) - 1))
        return True

    def sorted_queues(self) -> list[WatchedQueue]:
        """The queues in the order that was asked for."""
        return sorted(self._queues.values(), key=ORDERS[self.order][1], reverse=self.is_reversed)

    def as_json(self) -> Iterator[str]:
        """A JSON object for each queue. ``tubes`` is there for work queues."""
        for one in self.sorted_queues():
            fields: dict[str, Any] = one._asdict()
            fields["readers"] = [reader._asdict() for reader in one.readers]
            if one.name in self._tubes:
                fields["tubes"] = [tube._asdict() for tube in self._tubes[one.name]]
            yield json.dumps(fields)

    def rows(self) -> list[Row]:
        """The lines: of each queue one, and below it those of its readers, or of its tubes."""
        now_ms = int(time.time() * 1000)
        found = []
        for one in self.sorted_queues():
            found.append(self._queue_row(one, now_ms) if one.exists else _missing_row(one))
            if one.kind != "queue":
                found += [_tube_row(tube, now_ms) for tube in self._tubes.get(one.name, ())]
            elif [reader.name for reader in one.readers] not in ([], [""]):
                for reader in one.readers:
                    name = f"  {escaped(reader.name) or '(default)'}"
                    age = _age(reader.oldest_ms, now_ms)
                    lag = binary_size(reader.bytes)
                    cells = (name, f"{reader.items:,}", "", f"{reader.rate:,.1f}", age, lag, "", "", "")
                    found.append(Row(cells, ""))
        return found

    def _queue_row(self, one: WatchedQueue, now_ms: int) -> Row:
        about = "" if one.kind == "queue" else f"({one.kind})"
        if one.pending_batches:
            about = _common.pending_text(one.pending_batches)
        if one.problem:
            about = f"IN TROUBLE: {_cut(one.problem)}"
        items = f"{one.items:,}" if one.kind == "queue" else ""  # its records are no items
        cells = (
            escaped(one.name),
            items,
            f"{one.rate_in:,.1f}",
            f"{one.rate_out:,.1f}",
            _age(one.oldest_ms, now_ms),
            f"{'~' if one.is_estimated else ''}{binary_size(one.bytes)}",
            binary_size(one.file_bytes),
            f"{one.segments:,}",
            about,
        )
        return Row(cells, "red" if one.problem else "dim")

    def plain(self) -> str:
        """One table, for what is no terminal."""
        return _common.table([_HEADING, *(row.cells for row in self.rows())], numbers=_NUMBERS)

    def frame(self, height: int) -> Group:
        """What was seen last, in so many lines."""
        from rich.console import Group
        from rich.text import Text

        order = ORDERS[self.order][0]
        heading = Text.assemble((escaped(self.directory), "bold"), f"   {iso(int(time.time() * 1000))}")
        count = sum(one.exists for one in self._queues.values())
        total = f"{count:,} queues, {sum(one.items for one in self._queues.values()):,} items"
        trouble = f"the last look failed: {escaped(self._problem)}" if self._problem else self.inbox_problem
        state = Text(trouble, "red") if trouble else Text(total)
        keys = ", ".join(f"{key} {name}" for key, (name, _) in ORDERS.items())
        sorted_by = f"{order}{', reversed' if self.is_reversed else ''}"
        help_line = Text(f"sorted by {sorted_by}; {keys}, r reverse, j k scroll, q quit", "dim")
        return Group(heading, state, self._table(max(1, height - _BESIDE_ROWS)), help_line)

    def _table(self, most: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for at, name in enumerate(_HEADING):
            table.add_column(name, justify="right" if at in _NUMBERS else "left", no_wrap=True)
        for row in self.rows()[self.first_row : self.first_row + most]:
            table.add_row(*map(Text, row.cells[:-1]), Text(row.cells[-1], row.style))
        return table


def _missing_row(one: WatchedQueue) -> Row:
    about = f"{_common.pending_text(one.pending_batches)}, {_common.NO_OWNER}"
    return Row((escaped(one.name), *[""] * len(_NUMBERS), about), "yellow")


def _tube_row(tube: TubeOutside, now_ms: int) -> Row:
    parts = [f"{tube.delayed:,} delayed" if tube.delayed else "", f"{tube.buried:,} buried" if tube.buried else ""]
    if tube.paused_until_ms:
        parts.append(f"paused for {(tube.paused_until_ms - now_ms) / 1000:,.0f} s")
    about = ", ".join(part for part in parts if part)
    cells = (f"  {_cut(tube.name)}", f"{tube.ready:,}", "", "", _age(tube.oldest_ms, now_ms), binary_size(tube.bytes))
    return Row((*cells, "", "", about), "yellow" if tube.buried or tube.paused_until_ms else "")


def _age(since_ms: int, now_ms: int) -> str:
    """How long ago: ``-`` for never, ``3.2s``, ``12m 5s``, ``3h 4m``, ``2d 3h``."""
    if not since_ms:
        return "-"
    age = max(0.0, (now_ms - since_ms) / 1000)
    if age < 60:
        return f"{age:.1f}s"
    minutes, hours, days = int(age) // 60, int(age) // 3600, int(age) // 86400
    if hours < 1:
        return f"{minutes}m {int(age) % 60}s"
    return f"{hours}h {minutes % 60}m" if days < 1 else f"{days}d {hours % 24}h"


def _cut(text: str) -> str:
    shown = escaped(text)
    return shown if len(shown) <= _LONGEST_TEXT else shown[: _LONGEST_TEXT - 3] + "..."


def show(looker: FolderLooker, *, once: bool, as_json: bool, interval: float) -> int:
    """Show frames until the process is interrupted, or ``q`` is pressed; a single one if ``once``, ``as_json``, or if
    standard output is no terminal to draw on. Returns the exit status of a single one: 1 if a queue is in trouble.
    """
    looker.look()
    if once or as_json or not _common.has_screen():
        time.sleep(min(interval, FIRST_INTERVAL))  # rates need two looks
        looker.look()
        sys.stdout.write("".join(f"{line}\n" for line in looker.as_json()) if as_json else looker.plain())
        if looker.inbox_problem:
            print(f"kestrelpy top: {looker.inbox_problem}", file=sys.stderr)
        return 1 if looker.is_in_trouble else 0
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise CommandError("this needs the extra [cli]: pip install 'kestrelpy[cli]'", status=2) from None
    console = Console(file=sys.stdout)
    with _keys() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(looker.frame(console.height), refresh=True)
            due = time.monotonic() + interval
            while (left := due - time.monotonic()) > 0:
                key = next_key(left)
                if key and not looker.press(key):
                    return 0
                if key:
                    live.update(looker.frame(console.height), refresh=True)
            with contextlib.suppress(OSError):  # it is in the next frame
                looker.look()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, without a line's end: gives a function that waits for one for some seconds. Without a
    terminal as standard input it waits in vain.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _next_key(seconds: float) -> str:
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    pressed = os.read(sys.stdin.fileno(), 16).decode("ascii", "replace")
    return pressed if pressed.startswith("\x1b[") else pressed[:1] or "q"  # the end of the input ends the table
