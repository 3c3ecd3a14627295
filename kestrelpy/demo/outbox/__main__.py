"""``python -m kestrelpy.demo.outbox``: orders and mails in one transaction, with SIGKILLs on the way, and a proof.

    shop     INSERT order, put "mail", put "book"   ── one transaction, one in ten is rolled back
    mailers  two processes that run the jobs: a mail is a line in a ledger, a booking is a row, written transactionally

The proof compares the table of orders with the ledger and the bookings: each order that was committed has its mail, at
least once, and its booking, exactly once; no order that was rolled back has either.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, func, select

import kestrelpy
from kestrelpy.demo.outbox.shop import BOOKINGS, METADATA, ORDERS, engine_of, outbox_of, plain
from kestrelpy.demo.progress import ProgressLine
from kestrelpy.outbox import Outbox

ROLES = {"shop": "sell", "first mailer": "mail", "second mailer": "mail"}
THREADS = 2
STALL_SECONDS = 60.0


class DemoStuck(Exception):
    """A process ended with an error, or there is no progress any more."""


class Shop:
    """The processes of the demo."""

    def __init__(self, url: str, folder: Path, orders: int) -> None:
        self._arguments = [url, str(folder), str(orders)]
        self._folder = folder
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: Counter[str] = Counter()

    def start(self, role: str) -> None:
        """Start a process, for the first time or again. Its output goes into a file."""
        home = str(Path(kestrelpy.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
        with open(self._folder / f"{role}.log", "ab") as log:
            self._workers[role] = subprocess.Popen(
                [sys.executable, "-m", "kestrelpy.demo.outbox.shop", *self._arguments, ROLES[role]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def kill(self, role: str) -> None:
        """SIGKILL a process, and start it again."""
        worker = self._workers[role]
        if worker.poll() is None:
            worker.kill()
            worker.wait()
            self.kills[role] += 1
        self.start(role)

    def watch(self) -> None:
        """Raise ``DemoStuck`` if a process has failed."""
        for role, worker in self._workers.items():
            if worker.poll():
                words = (self._folder / f"{role}.log").read_text(encoding="utf-8", errors="replace").strip()
                last = words.splitlines()[-1] if words else "it printed nothing"
                raise DemoStuck(f"the {role} ended with status {worker.returncode}: {last}")

    def end(self) -> None:
        """Ask all processes to end, and wait for them."""
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGTERM)
        for worker in self._workers.values():
            worker.wait()


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 1 if the proof fails, 2 if the demo can't run."""
    parser = argparse.ArgumentParser(prog="python -m kestrelpy.demo.outbox", description=__doc__)
    parser.add_argument("--bind", metavar="URL", help="a PostgreSQL or SQLite database (default: a new SQLite file)")
    parser.add_argument("--orders", type=int, default=3000, metavar="N", help="how many orders (3,000)")
    parser.add_argument("--kills", type=int, default=6, metavar="N", help="the number of SIGKILLs (6)")
    parser.add_argument("--seed", type=int, help="the seed for the times of the kills")
    args = parser.parse_args(arguments)
    progress = ProgressLine()
    with _scratch() as folder:
        url = args.bind or f"sqlite:///{folder}/shop.db"
        engine = engine_of(url)
        try:
            with outbox_of(engine) as outbox:
                return run(url, engine, outbox, folder, args, progress)
        except DemoStuck as error:
            progress.clear()
            print(f"demo-outbox: {error}", file=sys.stderr)
            return 2
        finally:
            engine.dispose()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kestrelpy-outbox-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    url: str, engine: Engine, outbox: Outbox, folder: Path, args: argparse.Namespace, progress: ProgressLine
) -> int:
    """Run the shop to its end, and then the proof."""
    began = time.monotonic()
    progress.say(f"{args.orders:,} orders into {plain(url)}, each with a mail and a booking; {args.kills} kills")
    for metadata in (METADATA, outbox.metadata):
        metadata.drop_all(engine)
    METADATA.create_all(engine)
    outbox.create_tables()
    shop = Shop(url, folder, args.orders)
    try:
        _perform(shop, engine, outbox, args, progress)
    finally:
        shop.end()
        progress.clear()
    complaints, figures = prove(engine, outbox, folder / "mails.ledger", sum(shop.kills.values()))
    for name, value in figures.items():
        print(f"{name:<22} {value:,}")
    print(f"{'took':<22} {time.monotonic() - began:.0f} s")
    for complaint in complaints:
        print(f"  {complaint}")
    if complaints:
        print("THE PROOF FAILED")
        return 1
    print("proven: each order that was committed has its mail and exactly one booking; no other order has either")
    return 0


def _perform(shop: Shop, engine: Engine, outbox: Outbox, args: argparse.Namespace, progress: ProgressLine) -> None:
    """Start all processes, kill some on the way, and wait until no job is left."""
    chance = random.Random(args.seed)
    due = sorted(chance.uniform(0.1, 0.9) * args.orders for _ in range(args.kills))
    for role in ROLES:
        shop.start(role)
    moved, last = time.monotonic(), (0, 0)
    while True:
        shop.watch()
        with engine.connect() as connection:
            sold = connection.scalar(select(func.coalesce(func.max(ORDERS.c.id), 0))) or 0
            booked = connection.scalar(select(func.count()).select_from(BOOKINGS)) or 0
        progress.show(sold / args.orders, f"order {sold:,}, {booked:,} booked, {sum(shop.kills.values())} kills")
        while due and sold >= due[0]:
            due.pop(0)
            role = chance.choice(list(ROLES))
            time.sleep(chance.uniform(0.0, 0.05))
            shop.kill(role)
            progress.say(f"      SIGKILL to the {role}, at order {sold:,}")
        if sold >= args.orders and not due and not _active(outbox):
            return
        if (sold, booked) != last:
            moved, last = time.monotonic(), (sold, booked)
        elif time.monotonic() - moved > STALL_SECONDS:
            raise DemoStuck(f"no progress for {STALL_SECONDS:.0f} seconds: order {sold:,}, {booked:,} booked")
        time.sleep(0.05)


def _active(outbox: Outbox) -> bool:
    return any(outbox.jobs(status=status, limit=1) for status in ("ready", "waiting", "running", "error"))


def prove(engine: Engine, outbox: Outbox, ledger: Path, kills: int) -> tuple[list[str], dict[str, int]]:
    """Compare the orders with the mails and the bookings. Returns complaints, and figures."""
    with engine.connect() as connection:
        orders = set(connection.scalars(select(ORDERS.c.id)))
        booked = Counter(connection.scalars(select(BOOKINGS.c.order_id)))
    mailed = Counter(int(line) for line in ledger.read_text(encoding="ascii").split())
    again = sum(mailed.values()) - len(mailed)
    complaints = []
    for what, found in (("mail", mailed), ("booking", booked)):
        if orders - found.keys():
            complaints.append(f"{len(orders - found.keys())} orders without a {what}")
        if found.keys() - orders:
            complaints.append(f"{len(found.keys() - orders)} {what}s of orders that were rolled back")
    doubly = sum(count > 1 for count in booked.values())
    if doubly:
        complaints.append(f"{doubly} orders booked more than once")
    left = [job for job in outbox.jobs(limit=10) if job.status != "done"]
    if left:
        complaints.append(f"jobs that are not done: {left}")
    last = max(orders, default=0)
    return complaints, {
        "orders committed": len(orders),
        "orders rolled back": last - len(orders),
        "mails sent": sum(mailed.values()),
        "mails sent again": again,
        "bookings": sum(booked.values()),
        "kills survived": kills,
    }


if __name__ == "__main__":
    sys.exit(main())
