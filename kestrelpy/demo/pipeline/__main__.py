"""``python -m kestrelpy.demo.pipeline``: run the whole pipeline, kill the producer and the query, prove the totals."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import kestrelpy
from kestrelpy.demo.corpus import NoLines, gather
from kestrelpy.demo.pipeline import proof
from kestrelpy.demo.pipeline._plan import PipelineRun, items
from kestrelpy.demo.progress import ProgressLine
from kestrelpy.spark import JavaMissing, archive_to_parquet, load_report, local_session
from kestrelpy.spark.session import check_java

PRODUCER, QUERY, CONSUMER = "producer", "query", "consumer"
STALL_SECONDS = 120.0


class PipelineFailed(Exception):
    """A process ended with an error, or there is no progress any more."""


@dataclass
class Stage:
    """The processes of the pipeline."""

    plan: PipelineRun
    progress: ProgressLine
    kills: int = 0
    _workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str) -> None:
        """Start a process, for the first time or again. Its output goes into a file."""
        home = str(Path(kestrelpy.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
        with open(self.plan.root / f"{role}.log", "ab") as log:
            self._workers[role] = subprocess.Popen(
                [sys.executable, "-m", f"kestrelpy.demo.pipeline.{role}", self.plan.folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def kill(self, role: str, when: str) -> None:
        """SIGKILL a process and its children, and start it again."""
        worker = self._workers[role]
        _kill_group(worker)
        self.kills += 1
        self.progress.say(f"      SIGKILL to the {role}, {when}")
        self.start(role)

    def watch(self) -> None:
        """Raise ``PipelineFailed`` if a process has failed."""
        for role, worker in self._workers.items():
            if worker.poll():
                raise PipelineFailed(f"the {role} ended with status {worker.returncode}: {self._last_words(role)}")

    def is_over(self, role: str) -> bool:
        """True if a process has ended without an error."""
        return self._workers[role].poll() == 0

    def end(self) -> None:
        """Kill and reap all processes that are left."""
        for worker in self._workers.values():
            _kill_group(worker)

    def number(self, name: str) -> int:
        """The number that a process has last written into the file ``name``; 0 if there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.plan.root / name).read_text(encoding="ascii"))
        return 0

    def _last_words(self, role: str) -> str:
        text = (self.plan.root / f"{role}.log").read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else "it printed nothing"


def _kill_group(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def main(arguments: list[str] | None = None) -> int:
    """Run the pipeline. Returns the exit status: 1 if the proof fails, 2 if the pipeline cannot run."""
    parser = argparse.ArgumentParser(prog="python -m kestrelpy.demo.pipeline", description=__doc__)
    parser.add_argument("--input", metavar="FILE_OR_DIR", help="use the lines of these files instead")
    parser.add_argument("--store", metavar="URL", help="ship the queues there, and let Spark read and write them there")
    parser.add_argument("--lines", type=int, default=300_000, metavar="N", help="the most lines to put (300,000)")
    parser.add_argument("--pace", type=float, default=12_000.0, metavar="N", help="lines per second (12,000)")
    parser.add_argument("--seed", type=int, help="the seed for the times of the kills")
    parser.add_argument("--keep", metavar="FOLDER", help="keep everything in FOLDER: queues, Parquet, lake, report")
    args = parser.parse_args(arguments)
    progress = ProgressLine()
    try:
        check_java()
        with _scratch(args.keep) as folder:
            return run(folder, args, progress)
    except (JavaMissing, PipelineFailed, NoLines) as error:
        progress.clear()
        print(f"pipeline: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _scratch(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        folder = Path(kept).resolve()
        folder.mkdir(parents=True)
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="kestrelpy-pipeline-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, args: argparse.Namespace, progress: ProgressLine) -> int:
    """Run the pipeline in one folder, and then its proof."""
    began = time.monotonic()
    corpus = gather(args.input)
    corpus.save(folder / "corpus.json")
    wanted = proof.account(items(corpus, args.lines))
    url = f"{args.store.rstrip('/')}/pipeline-{random.randrange(1 << 32):08x}" if args.store else ""
    plan = PipelineRun(str(folder), wanted.total, args.pace, store=url)
    plan.save()
    source = args.input or "the Python standard library"
    progress.say(
        f"{wanted.total:,} lines of {len(wanted.lines):,} files of {source}, {len(wanted.alerts):,} alerts in them"
    )
    stage = Stage(plan, progress)
    try:
        _perform(stage, random.Random(args.seed))
    finally:
        stage.end()
        progress.clear()
    progress.say(
        f"everything is read after {time.monotonic() - began:.0f} s; now the archive becomes a lake, the lake a report"
    )
    complaints = _prove(plan, wanted, progress)
    print(f"kills survived  {stage.kills}\ntook            {time.monotonic() - began:.0f} s")
    for complaint in complaints:
        print(f"  {complaint}")
    if complaints:
        print("THE PROOF FAILED")
        return 1
    if url:
        _clear(url)
    print("proven: every line counted once, every alert delivered once, every byte in the lake or still in the queue")
    return 0


def _clear(url: str) -> None:
    """Delete what this run has put into the store."""
    from kestrelpy.ship import open_store

    store = open_store(url)
    store.delete([each.key for each in store.list("")])


def _perform(stage: Stage, chance: random.Random) -> None:
    """Start all processes, kill the query in one of its first batches and the producer halfway, wait for the end."""
    lines = stage.plan.lines
    for role in (PRODUCER, CONSUMER):
        stage.start(role)
    _until(stage, lambda: stage.number("put") > 0)  # the query's reader exists
    stage.start(QUERY)
    batch, put = chance.randint(1, 2), int(lines * chance.uniform(0.4, 0.7))
    due: dict[str, Callable[[], bool]] = {
        QUERY: lambda: stage.number("batch") >= batch,
        PRODUCER: lambda: stage.number("put") >= put,
    }
    while due:
        _until(stage, lambda: any(is_due() for is_due in due.values()))
        role = next(role for role, is_due in due.items() if is_due())
        del due[role]
        time.sleep(chance.uniform(0.0, 0.5))
        stage.kill(role, f"in batch {stage.number('batch')}, with {stage.number('put'):,} lines put")
    _until(stage, lambda: all(stage.is_over(role) for role in (QUERY, PRODUCER, CONSUMER)))


def _until(stage: Stage, condition: Callable[[], bool]) -> None:
    moved, last = time.monotonic(), (0, 0)
    while not condition():
        stage.watch()
        now = (stage.number("put"), stage.number("batch"))
        stage.progress.show(now[0] / stage.plan.lines, f"put {now[0]:,}  in batch {now[1]}")
        if now != last:
            moved, last = time.monotonic(), now
        elif time.monotonic() - moved > STALL_SECONDS:
            raise PipelineFailed(f"no progress for {STALL_SECONDS:.0f} seconds: put {now[0]:,}, batch {now[1]}")
        time.sleep(0.05)


def _prove(plan: PipelineRun, wanted: proof.Account, progress: ProgressLine) -> list[str]:
    spark = local_session(**{"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": False})
    lake = f"{plan.folder}/lake"
    try:
        done = archive_to_parquet(spark, plan.archive, lake)
        load_report(spark, lake, f"{plan.folder}/report")
        words = spark.read.parquet(plan.words).groupBy("file").agg({"lines": "sum", "words": "sum"})
        rows = [(row["file"], row["sum(lines)"], row["sum(words)"]) for row in words.collect()]
        figures = proof.lake_figures(spark, plan, lake)
    finally:
        spark.stop()
    with open(plan.root / "alerts.ledger", encoding="utf-8") as ledger:
        alerts = list(ledger)
    progress.say(f"lake            {done.segments} segments, {done.items:,} items; report/index.html with plots")
    progress.say(
        f"counted         {sum(row[1] for row in rows):,} lines, {sum(row[2] for row in rows):,} words, "
        f"{len(alerts):,} alerts"
    )
    return proof.check_words(rows, wanted) + proof.check_alerts(alerts, wanted) + proof.check_lake(*figures, wanted)


if __name__ == "__main__":
    sys.exit(main())
