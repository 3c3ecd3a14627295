"""``outbox top``: a live table of the queues of an outbox, with its health and its oldest errors.

Rules:
1. Text of others gets into a frame as ``Text`` and escaped: it is neither markup of rich nor a command to a terminal.
2. If the first look fails, the command ends. A later one that fails is shown, and the table stays: it is wanted most
   when the database goes away.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kestrelpy.cli._common import escaped, has_screen, iso
from kestrelpy.cli._database import paused_queues, reason_of, shown, without_password
from kestrelpy.cli._jobs import last_line

if TYPE_CHECKING:
    from sqlalchemy import URL

    from kestrelpy.outbox import Health, Job, Outbox

__all__ = ["Looker", "show"]

STATUSES = ("ready", "waiting", "running", "error", "dead", "done", "cancelled")
ALARMING = {"error": "yellow", "dead": "red"}
OLDEST_ERRORS = 5
WIDE = 200
"""Columns where there is no terminal, which would say how many it has."""


class Looker:
    """Looks at an outbox, and draws what it has seen last. ``table``, ``url``: where it is."""

    def __init__(self, outbox: Outbox, table: str, url: URL) -> None:
        self._outbox = outbox
        self._table = table
        self._url = url
        self._counts: dict[str, dict[str, int]] = {}
        self._rates: dict[str, float] = {}  # jobs that were done in a second, by queue
        self._paused: set[str] = set()
        self._health: Health | None = None
        self._errors: list[Job] = []
        self._problem = ""
        self._seen_at: float | None = None  # by the monotonic clock

    def look(self) -> None:
        """Raises what the database raises; then ``frame`` shows what was seen before."""
        try:
            counts: dict[str, dict[str, int]] = {}
            for one in self._outbox.stats():
                counts.setdefault(one.queue, {})[one.status] = one.count
            self._paused = paused_queues(self._outbox)
            self._health = self._outbox.health()
            self._errors = self._outbox.errors(limit=OLDEST_ERRORS)
        except Exception as error:
            self._problem = reason_of(error, self._url, self._table)
            raise
        now = time.monotonic()
        if self._seen_at is not None and now > self._seen_at:
            self._rates = {
                queue: (mine.get("done", 0) - self._counts.get(queue, {}).get("done", 0)) / (now - self._seen_at)
                for queue, mine in counts.items()
            }
        self._counts, self._seen_at, self._problem = counts, now, ""

    def frame(self) -> Group:
        """What was seen last."""
        heading = Text.assemble((f"{self._table} in {shown(self._url)}", "bold"), f"   {iso(int(time.time() * 1000))}")
        parts: list[Text | Table] = [heading, self._health_line(), Text(), self._queues()]
        if self._errors:
            parts += [Text(), self._oldest_errors()]
        return Group(*parts)

    def _health_line(self) -> Text:
        health = self._health
        if self._problem:
            return Text(f"the last look failed: {self._problem}", "red")
        if health is None:
            return Text("not looked yet")
        if not health.healthy:
            return Text("UNHEALTHY: " + without_password("; ".join(health.reasons), self._url), "red")
        age = health.oldest_ready_age
        waits = "" if age is None else f"; the oldest ready job has been due for {age:,.1f} s"
        blocked = f"; {health.waiting_on_dead:,} wait for a dead one" if health.waiting_on_dead else ""
        return Text(f"healthy{waits}{blocked}", "green")

    def _queues(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("queue", no_wrap=True)
        for name in (*STATUSES, "done/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for queue, mine in sorted(self._counts.items()):
            cells = [
                Text(f"{mine.get(status, 0):,}", ALARMING.get(status, "") if mine.get(status) else "dim")
                for status in STATUSES
            ]
            rate = Text(f"{max(0.0, self._rates.get(queue, 0.0)):,.1f}")
            table.add_row(Text(escaped(queue)), *cells, rate, Text("paused" if queue in self._paused else "", "yellow"))
        return table

    def _oldest_errors(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("id", "queue", "status", "tries", "first error", "oldest errors"):
            table.add_column(name, justify="right" if name in ("id", "tries") else "left", no_wrap=True)
        for job in self._errors:
            first = "" if job.first_error_ms is None else iso(job.first_error_ms)
            cells = (str(job.id), escaped(job.queue), escaped(job.status), f"{job.tries:,}", first)
            table.add_row(*map(Text, cells), Text(escaped(last_line(job.error))))
        return table


def show(looker: Looker, *, once: bool, interval: float) -> int:
    """Show frames until the process is interrupted; one, if ``once`` or if standard output is no terminal."""
    looker.look()
    is_terminal = has_screen()
    console = Console(file=sys.stdout, width=None if is_terminal else WIDE)
    if once or not is_terminal:
        with console.capture() as captured:
            console.print(looker.frame())
        sys.stdout.write(
            captured.get()
        )  # a closed pipe ends it as it ends the other commands: rich would exit by itself
        return 0
    with Live(looker.frame(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            took = _look_again(looker)
            live.update(looker.frame(), refresh=True)
            time.sleep(max(interval, took))  # a look that takes long is made less often


def _look_again(looker: Looker) -> float:
    """Seconds that it took. What fails is in the next frame."""
    before = time.monotonic()
    with contextlib.suppress(Exception):
        looker.look()
    return time.monotonic() - before
