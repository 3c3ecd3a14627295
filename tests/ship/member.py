"""One of the machines that may own a shipped queue: it follows the log, takes the queue over when it may, and puts
until another one has it; then it follows again. SIGUSR1: hand the queue over. SIGUSR2: take it over, whoever has it.

    python -m tests.ship.member FOLDER URL ACKS OPTIONS LEASE NAME first|later

``OPTIONS``: of the store, as JSON. ``LEASE``: 0 is none. ``first``: begin with an opening. What it prints, each line
with the time at its end: ``standby``; ``follows``, when it has come to the end of the log; ``owner EPOCH``; ``put
NUMBER ID``, when a put has returned; ``refused``; ``fenced FIRST LAST``; ``orphan EPOCH FIRST LAST``; ``gave-up
REASON``.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kestrelpy import JournaledQueue, KestrelError
from kestrelpy.ship import Fenced, NotShipped, OwnerAlive, Ship, Standby, orphans

PUT_SECONDS = 0.002
"""A pause after each put, so that many members share two processors."""
HURRIED_SECONDS = 0.0005
"""The same for members without a lease, of which there are two."""
SEGMENT_BYTES = 64 << 10


class HandOver(Exception):
    """SIGUSR1 has come."""


def say(*words: object) -> None:
    print(*words, f"{time.monotonic():.6f}", flush=True)


def data_of(name: str, epoch: object, number: int, *, has_lease: bool) -> bytes:
    """What a member puts; without a lease of many sizes, so that segments end within seconds."""
    return f"{name} {epoch} {number}.".encode() * (1 if has_lease else 1 + number % 50)


class Told:
    """Whether SIGUSR2 has come since the last takeover."""

    def __init__(self) -> None:
        self.is_told = False
        signal.signal(signal.SIGUSR2, self._hear)

    def _hear(self, _number: int, _frame: Any) -> None:
        self.is_told = True


def own(queue: JournaledQueue, name: str, *, has_lease: bool) -> None:
    """Put, until another one has the queue or SIGUSR1 comes."""
    shipping = queue.shipping
    assert shipping is not None
    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))
    say("owner", shipping.status().epoch)
    number = 0
    try:
        while not wanted:
            number += 1
            try:
                item_id = queue.put(data_of(name, shipping.status().epoch, number, has_lease=has_lease))
            except NotShipped as error:
                say("refused" if error.first_id > error.last_id else "late")
                time.sleep(0.05)
                continue
            say("put", number, item_id)
            time.sleep(PUT_SECONDS if has_lease else HURRIED_SECONDS)
        say("hands-over")
        shipping.hand_over()
        say("handed-over")
    except Fenced as error:
        say("fenced", error.first_unshipped_id, error.last_id)
    finally:
        with contextlib.suppress(KestrelError):
            queue.close()


def follow(folder: str, url: str, ship: Ship, options: Any, name: str, told: Told) -> JournaledQueue | None:
    """Follow, until the queue is ours; ``None`` if that was not to be."""
    seconds, follows = (0.5, False) if ship.lease else (0.02, False)
    known = {each.path for each in orphans(folder, "jobs")} if Path(folder).exists() else set()
    with Standby(folder, "jobs", url, poll_interval=seconds / 2.5, options=options, owner=name) as standby:
        say("standby")
        while not standby.wait(seconds) and not told.is_told:
            if not follows and standby.status().state == "following":
                follows = True
                say("follows")
            for each in orphans(folder, "jobs"):
                if each.path not in known:
                    known.add(each.path)
                    say("orphan", each.epoch, each.first_id, each.last_id)
        try:
            return standby.take_over(force=told.is_told, ship=ship, segment_bytes=SEGMENT_BYTES)
        except (Fenced, OwnerAlive, OSError) as error:
            say("gave-up", type(error).__name__)
            return None


def main() -> None:
    folder, url, acks, options, lease, name, when = sys.argv[1:]
    store_options = json.loads(options) or None
    ship = Ship(
        url,
        acks=acks,  # type: ignore[arg-type]
        lease=float(lease) or None,
        owner=name,
        options=store_options,
        request_timeout=2.0,
        close_timeout=2.0,
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    told, has_lease = Told(), ship.lease is not None
    if when == "first":
        own(JournaledQueue(folder, "jobs", segment_bytes=SEGMENT_BYTES, ship=ship), name, has_lease=has_lease)
    while True:
        queue = follow(folder, url, ship, store_options, name, told)
        told.is_told = False
        if queue is not None:
            own(queue, name, has_lease=has_lease)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


if __name__ == "__main__":
    main()
