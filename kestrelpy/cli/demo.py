"""``kestrelpy demo``: sends real lines through one durable queue, kills processes meanwhile, and ends with a proof.

    this process  ----- starts, kills, starts again -----.
        |                                                |
        |        process "write"                         |     process "read"
        |        puts lines -> [ queue ] -> reader near  |     reader far <- the same queue, by open_reader
        |             |                         |        |         |
        '--- proof <- put.ledger          near.ledger    '--- far.ledger

The proof (``kestrelpy.demo.queue.proof``) compares the ledgers, which are outside the queue, with the input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import kestrelpy
from kestrelpy.cli import _common
from kestrelpy.demo.corpus import Corpus, NoLines, gather
from kestrelpy.demo.progress import ProgressLine
from kestrelpy.demo.queue.ledger import last_id
from kestrelpy.demo.queue.proof import Finding, Reference, check_files, open_reference, write_reference
from kestrelpy.demo.queue.worker import FINISH, PLANTS, WorkerPlan

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

WRITER, FAR = "write", "read"
NAMES = {WRITER: "the process that writes (and reads as near)", FAR: "the process that reads as far"}
MIN_LINES, MIN_BYTES = 300_000, 48 << 20  # a smaller input is repeated, so that it lasts until the kills
STALL_SECONDS = 60.0
_TICK_SECONDS = 0.01


def add_commands(commands: Commands) -> None:
    """Add the parser of ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="send real lines through a queue, kill processes, and prove the result",
        description="Send every line of the Python standard library's sources (or of your own files) through one "
        "durable queue to two readers in two processes, kill the processes with SIGKILL meanwhile, and prove from "
        "records outside the queue that each reader saw every line, in order. The exit status is 1 if the proof fails.",
    )
    demo.add_argument("--input", metavar="FILE_OR_DIR", help="use the lines of these files instead")
    demo.add_argument(
        "--dir", metavar="SCRATCH", help="make the scratch folder in SCRATCH (default: the folder of temporary files)"
    )
    demo.add_argument("--kills", type=int, default=6, metavar="N", help="the number of kills (6)")
    demo.add_argument(
        "--seconds", type=_common.seconds, default=0.0, help="spread the puts over about so long (default: no pauses)"
    )
    demo.add_argument(
        "--sync",
        type=_common.sync_mode,
        default=0.1,
        metavar="MODE",
        help="always, never, or every so many seconds (0.1)",
    )
    demo.add_argument("--seed", type=int, help="the seed for the times of the kills")
    demo.add_argument("--keep", action="store_true", help="keep the scratch folder")
    demo.add_argument("--plant", choices=PLANTS, default="", help="plant a fault, to see the proof fail")
    demo.add_argument("--min-lines", type=int, default=MIN_LINES, help=argparse.SUPPRESS)
    demo.set_defaults(run=run_demo)


class DemoFailed(_common.CommandError):
    """The demo could not get as far as its proof."""


@dataclass
class Show:
    """The worker processes, and what this process knows about their progress."""

    folder: Path
    lines: int
    progress: ProgressLine
    kills: dict[str, int] = field(default_factory=lambda: {WRITER: 0, FAR: 0})
    segments: set[str] = field(default_factory=set)
    _workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=lambda: {"put": 0, "near": 0, "far": 0})
    _done: set[str] = field(default_factory=set)

    def start(self, role: str) -> None:
        """Start a worker, for the first time or again."""
        environment = dict(os.environ)
        home = str(Path(kestrelpy.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environment.get("PYTHONPATH"))))
        with open(self.folder / f"{role}.log", "ab") as log:
            self._workers[role] = subprocess.Popen(
                [sys.executable, "-m", "kestrelpy.demo.queue.worker", role, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then ends them
            )

    def kill(self, role: str) -> bool:
        """SIGKILL a worker and start it again. False if the worker was done already, or had just ended by itself."""
        if role in self._done or (role == FAR and FAR not in self._workers):
            return False
        worker = self._workers[role]
        worker.kill()
        if self._reap(role) != -signal.SIGKILL:
            return False
        self.kills[role] += 1
        at = f"put {self._seen['put']:,}  near {self._seen['near']:,}  far {self._seen['far']:,}"
        self.progress.say(f"      SIGKILL to {NAMES[role]}, pid {worker.pid}, at {at}")
        self.start(role)
        return True

    def _reap(self, role: str) -> int:
        worker = self._workers[role]
        if worker.stdin is not None:
            with contextlib.suppress(OSError):
                worker.stdin.close()
        return worker.wait()

    def watch(self) -> float:
        """Look at the ledgers and the processes. Returns the fraction of all work that is done (0 to 1).

        Raises ``DemoFailed`` if a worker failed.
        """
        for name, seen in self._seen.items():
            self._seen[name] = max(seen, last_id(self.folder / f"{name}.ledger"))
        with contextlib.suppress(FileNotFoundError):
            self.segments.update(self.segments_now())
        for role, worker in list(self._workers.items()):
            status = worker.poll()
            if status is None or role in self._done:
                continue
            if status:
                raise DemoFailed(f"{NAMES[role]} ended with status {status}: {self._last_words(role)}")
            self._done.add(role)
        return min(1.0, sum(self._seen.values()) / (3 * self.lines))

    def segments_now(self) -> list[str]:
        """The names of the journal's files."""
        return [name for name in os.listdir(self.folder / "queue") if name.endswith(".segment")]

    def is_done(self, role: str) -> bool:
        """True if a worker has ended without an error."""
        return role in self._done

    def text(self) -> str:
        """The text beside the progress bar."""
        seen = "  ".join(f"{name} {count:,}" for name, count in self._seen.items())
        return f"{seen}  kills {sum(self.kills.values())}"

    def _last_words(self, role: str) -> str:
        lines = (self.folder / f"{role}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def finish_writer(self) -> None:
        """Tell the writer that the other reader is done."""
        stdin = self._workers[WRITER].stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(FINISH)
                stdin.flush()

    def end(self) -> None:
        """Kill and reap all workers that are left."""
        for role, worker in self._workers.items():
            if worker.poll() is None:
                worker.kill()
            self._reap(role)


def run_demo(args: argparse.Namespace) -> int:
    """``kestrelpy demo``."""
    progress = ProgressLine()
    with _scratch(args.dir, keep=args.keep, progress=progress) as folder:
        try:
            corpus = gather(args.input)
        except NoLines as error:
            raise _common.CommandError(str(error)) from None
        lines, size = write_reference(corpus, folder / "reference")
        repeat = max(1, min(-(-args.min_lines // lines), -(-MIN_BYTES // (size + 32 * lines))))
        corpus = Corpus(corpus.files, repeat)
        reference = open_reference(folder / "reference", repeat, size)
        corpus.save(folder / "corpus.json")
        pace = reference.lines / args.seconds if args.seconds else 0.0
        ahead = max(1000, reference.lines // 8)  # so that all three are in progress at a kill
        WorkerPlan(reference.lines, args.sync, max_ahead=ahead, pace=pace, plant=args.plant).save(folder)
        source = args.input or "the Python standard library"
        times = f", {repeat} times over" if repeat > 1 else ""
        files = _common.counted(len(corpus.files), "file")
        progress.say(f"{lines:,} lines, {_common.binary_size(size)}, in {files} of {source}{times}")
        began = time.monotonic()
        show = Show(folder, reference.lines, progress)
        try:
            _perform(show, _schedule(args.kills, random.Random(args.seed)))
        finally:
            show.end()
            progress.clear()
        seconds = time.monotonic() - began
        progress.say("the queue is closed; now the proof, from the ledgers and the input alone")
        findings = check_files(folder, reference)
        report(show, findings, reference, seconds)
        return 1 if any(found.problems for found in findings) else 0


@contextlib.contextmanager
def _scratch(parent: str | None, *, keep: bool, progress: ProgressLine) -> Iterator[Path]:
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kestrelpy-demo-", dir=parent))
    try:
        yield folder
    finally:
        if keep:
            progress.say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _schedule(kills: int, chance: random.Random) -> list[tuple[float, str]]:
    """When to kill which process: a fraction of all work, and a role. The roles alternate; the fractions are random."""
    return [((turn + chance.uniform(0.35, 1.0)) / (kills + 1), (WRITER, FAR)[turn % 2]) for turn in range(kills)]


def _perform(show: Show, schedule: list[tuple[float, str]]) -> None:
    show.start(WRITER)
    far_runs = writer_ends = False
    moved, last = time.monotonic(), 0.0
    while True:
        fraction = show.watch()
        if not far_runs and last_id(show.folder / "put.ledger"):
            show.start(FAR)  # its reader exists, because an item was put
            far_runs = True
        if show.is_done(FAR) and not writer_ends:
            show.finish_writer()
            writer_ends = True
        if show.is_done(WRITER):
            return
        if schedule and not writer_ends and fraction >= schedule[0][0]:
            _, role = schedule.pop(0)
            if not show.kill(role):
                show.kill(FAR if role == WRITER else WRITER)
        show.progress.show(fraction, show.text())
        if fraction > last:
            moved, last = time.monotonic(), fraction
        elif time.monotonic() - moved > STALL_SECONDS:
            raise DemoFailed(f"no progress for {STALL_SECONDS:.0f} seconds ({show.text()})")
        time.sleep(_TICK_SECONDS)


def report(show: Show, findings: tuple[Finding, ...], reference: Reference, seconds: float) -> None:
    """Print the table and the verdict."""
    retired = len(show.segments - set(show.segments_now()))
    rows: list[tuple[str, ...]] = [("", *(found.role for found in findings))]
    rows.append(("items", *(f"{found.lines:,}" for found in findings)))
    rows.append(("came twice", "-", *(f"{found.again:,}" for found in findings[1:])))
    rows.append(("items per second", *(f"{found.per_second:,.0f}" for found in findings)))
    rows.append(("started", *(f"{found.lives}x" for found in findings)))
    wanted = reference.digest()
    rows.append(("digest", "-", *(found.digest[:12] for found in findings[1:])))
    writes, reads = show.kills[WRITER], show.kills[FAR]
    print(_common.table(rows, numbers=range(1, 4)), end="")
    print(f"input             {reference.lines:,} lines, {reference.data_bytes:,} bytes, digest {wanted[:12]}")
    print(f"kills survived    {writes + reads}: {writes} of the writing process, {reads} of the other reader's")
    print(f"segments          {len(show.segments)} written, {retired} retired")
    print(f"took              {seconds:.1f} s")
    problems = [text for found in findings for text in found.problems]
    if problems:
        for text in problems:
            print(f"  {text}")
        print("THE PROOF FAILED")
    else:
        print("proven: each reader saw every line, in order, none lost; what came twice came after a kill, unchanged")
