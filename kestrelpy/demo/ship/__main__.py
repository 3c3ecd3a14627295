"""``python -m kestrelpy.demo.ship``: machines burn, the queues go on from the store, and a proof of what is left.

    machine 0   puts and reads ── ships ──>  store  <── restores ── machine 1   puts and reads ── ships ──>  ...
    SIGKILL, folder deleted                                         SIGKILL, folder deleted

Of the queue ``safe`` (acks="shipped") no acknowledged line may be missing. The queue ``fast`` (acks="disk") may lose
the last two seconds or so of each machine. What was put, found and read is noted outside of the machines. With
``--spark``, the last machine's folder is deleted, too, and Spark reads all of both queues from the store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kestrelpy
from kestrelpy.demo.progress import ProgressLine
from kestrelpy.demo.ship.ledger import QUEUES, OutsideLedger, noted
from kestrelpy.demo.ship.proof import BurnProof, prove
from kestrelpy.ship import ShipError, open_store

STALL_SECONDS = 60.0


class DemoBurnt(Exception):
    """The service ended with an error, or there is no progress any more."""


class Machines:
    """The machines, of which one lives at a time."""

    def __init__(self, folder: Path, store: str, seed: int) -> None:
        self._folder = folder
        self._store = store
        self._seed = seed
        self._burns = OutsideLedger(folder, "burns")
        self._service: subprocess.Popen[bytes] | None = None
        self.life = -1

    def begin(self) -> None:
        """Start the service on a new machine, and wait until it has acknowledged lines of both queues."""
        self.life += 1
        with open(self._folder / "service.log", "ab") as log:
            self._service = subprocess.Popen(
                [sys.executable, "-m", "kestrelpy.demo.ship.service"]
                + [str(self._folder), self._store, str(self.life), str(self._seed)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
            )
        until = time.monotonic() + STALL_SECONDS
        while not all(self._has_put(queue) for queue in QUEUES):
            self.watch()
            if time.monotonic() > until:
                raise DemoBurnt(f"machine {self.life} has acknowledged nothing in {STALL_SECONDS:.0f} seconds")
            time.sleep(0.02)

    def _has_put(self, queue: str) -> bool:
        words = [each[0] + each[1] for each in noted(self._folder, f"{queue}.put") if each[0] in (b"begin", b"put")]
        mine = b"begin%d" % self.life
        return mine in words and words.index(mine) < len(words) - 1

    def watch(self) -> None:
        """Raise ``DemoBurnt`` if the service has failed."""
        if self._service is not None and self._service.poll():
            words = (self._folder / "service.log").read_text(encoding="utf-8", errors="replace").strip()
            last = words.splitlines()[-1] if words else "it printed nothing"
            raise DemoBurnt(f"machine {self.life} ended with status {self._service.returncode}: {last}")

    def burn(self) -> None:
        """Kill the service, and delete its folder."""
        assert self._service is not None
        self._burns.note("burn", self.life)
        self._service.kill()
        self._service.wait()
        shutil.rmtree(self._folder / f"machine-{self.life}")

    def query(self) -> None:
        """Delete the last machine's folder, too, and have Spark read the queues from the store."""
        shutil.rmtree(self._folder / f"machine-{self.life}")
        command = [sys.executable, "-m", "kestrelpy.demo.ship.query", str(self._folder), self._store]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        if done.returncode:
            raise DemoBurnt(
                f"Spark ended with status {done.returncode}: {(done.stderr.split(chr(10)) or [''])[-2:][0]}"
            )

    def end(self) -> None:
        """Ask the last service to end, and wait until it has read what is left."""
        assert self._service is not None
        self._service.terminate()
        try:
            self._service.wait(STALL_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoBurnt(f"machine {self.life} does not end") from None
        self.watch()

    def close(self) -> None:
        """Leave no process behind."""
        if self._service is not None and self._service.poll() is None:
            self._service.kill()
            self._service.wait()
        self._burns.close()


def _environment() -> dict[str, str]:
    """That of this process, with this kestrelpy."""
    home = str(Path(kestrelpy.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 1 if the proof fails, 2 if the demo can't run."""
    parser = argparse.ArgumentParser(prog="python -m kestrelpy.demo.ship", description=__doc__)
    parser.add_argument("--store", metavar="URL", help="a store, such as s3://bucket/prefix (default: a folder)")
    parser.add_argument("--burns", type=int, default=4, metavar="N", help="how many machines burn (4)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="how long each one lives, or so (4)")
    parser.add_argument("--spark", action="store_true", help="let Spark read the queues from the store, at the end")
    parser.add_argument("--seed", type=int, help="the seed for the times of the burns")
    args = parser.parse_args(arguments)
    progress = ProgressLine()
    with _scratch() as folder:
        try:
            return run(folder, args, progress)
        except (DemoBurnt, ShipError) as error:
            progress.clear()
            print(f"demo-ship: {error}", file=sys.stderr)
            return 2


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kestrelpy-ship-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, args: argparse.Namespace, progress: ProgressLine) -> int:
    """Let the machines burn, and then prove."""
    began = time.monotonic()
    seed = random.randrange(1 << 32)
    url = f"{args.store.rstrip('/')}/demo-{seed:08x}" if args.store else f"file://{folder}/store"
    store = open_store(url)  # a bad URL is found before anything is started
    progress.say(f"two queues, shipped to {store.describe()}; {args.burns} machines burn")
    machines = Machines(folder, url, seed)
    try:
        _perform(machines, folder, args, progress)
    finally:
        machines.close()
        progress.clear()
    proof = prove(folder, seed)
    _tell(proof, args.burns, time.monotonic() - began)
    if proof.complaints:
        print("THE PROOF FAILED")
        return 1
    store.delete([each.key for each in store.list("")])
    print(
        "proven: no acknowledged line of safe is missing, and fast has lost nothing but the last moments of a machine"
    )
    return 0


def _perform(machines: Machines, folder: Path, args: argparse.Namespace, progress: ProgressLine) -> None:
    chance = random.Random(args.seed)
    for life in range(args.burns + 1):
        machines.begin()
        until = time.monotonic() + args.seconds * chance.uniform(0.5, 1.5)
        while time.monotonic() < until:
            machines.watch()
            lines = [sum(words[0] == b"put" for words in noted(folder, f"{queue}.put")) for queue in QUEUES]
            progress.show(life / (args.burns + 1), f"machine {life}: {lines[0]:,} and {lines[1]:,} batches put")
            time.sleep(0.2)
        if life < args.burns:
            machines.burn()
            progress.say(f"      machine {life} has burnt: SIGKILL, and its folder is deleted")
    machines.end()
    if args.spark:
        progress.show(1.0, "Spark reads both queues from the store")
        machines.query()


def _tell(proof: BurnProof, burns: int, seconds: float) -> None:
    """The table at the end."""
    figures = [proof.queues[queue] for queue in QUEUES]
    rows = [
        ("", 'safe (acks="shipped")', 'fast (acks="disk")'),
        ("lines acknowledged", *(f"{one.put:,}" for one in figures)),
        ("lines read", *(f"{one.read:,}" for one in figures)),
        ("read again", *(f"{one.read_again:,}" for one in figures)),
        *([("read by Spark", *(f"{one.by_spark:,}" for one in figures))] if figures[0].by_spark is not None else []),
        ("lost with machines", *(f"{one.lost:,}" for one in figures)),
        ("the most in one burn", *(f"{one.worst_seconds:.1f} s" for one in figures)),
    ]
    for name, safe, fast in rows:
        print(f"{name:<22} {safe:>22} {fast:>22}")
    print(f"{'machines burnt':<22} {burns:>22}")
    if proof.takeovers:
        mean = sum(proof.takeovers) / len(proof.takeovers)
        took = f"{mean:.1f} s each, {max(proof.takeovers):.1f} s at most"
        print(f"{'takeover':<22} {took:>22}, from the burn to the next acknowledged line of each queue")
    print(f"{'took':<22} {f'{seconds:.0f} s':>22}")
    for complaint in proof.complaints:
        print(f"  {complaint}")


if __name__ == "__main__":
    sys.exit(main())
