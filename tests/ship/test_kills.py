"""Machines that are lost: the owner is killed, its folder is deleted, and another one goes on from the store. At the
end the store has everything that was acknowledged as shipped; of what was acknowledged on disk it has all but the last
seconds of each life, and never a hole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kestrelpy.ship import Store, open_store, verify
from tests.ship.in_store import items_of
from tests.support import seaweed
from tests.support.budget import SEED, Tally, share, takes_long
from tests.support.paths import PYTHONPATH
from tests.support.patience import PATIENCE
from tests.support.seaweed import Seaweed

SERVER_KILLS = 5
"""So often a server is killed in one test: it takes 20 seconds until it answers again."""
LOST_SECONDS = 2.0
"""So much of what was acknowledged on disk may be lost with a machine; and as much again on a machine that is busy."""


class Acknowledged(NamedTuple):
    number: int
    item_id: int
    at: float


class Life:
    """One process that owns the queue, from its start until it is killed."""

    def __init__(self, folder: Path, url: str, acks: str, options: dict[str, Any], first: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ship.killed_owner", str(folder), url, acks, json.dumps(options), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.killed_at = 0.0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + 3 * PATIENCE
        while len(self.lines) <= count:
            if time.monotonic() > until or (self.process.poll() is not None and not self._reader.is_alive()):
                raise AssertionError(f"the owner has not acknowledged {count} puts: {self.lines[-3:]}")
            time.sleep(0.002)

    def kill(self) -> list[Acknowledged]:
        self.killed_at = time.monotonic()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        whole = [line.split() for line in self.lines[1:] if line.endswith("\n")]
        return [Acknowledged(int(number), int(item_id), float(at)) for number, item_id, at in whole]


def burn(
    tmp_path: Path,
    url: str,
    options: dict[str, Any],
    acks: str,
    count: int,
    server: Seaweed | None = None,
    seed: int = SEED,
) -> int:
    """Lose ``count`` machines, one after another. Returns how many puts were lost. ``server``: it is killed in the
    middle of each life, and starts again.
    """
    draw, store = random.Random(seed), open_store(url, options=options or None)
    number = lost = 0
    for burned in range(count):
        folder = tmp_path / f"machine-{burned}"
        life = Life(folder, url, acks, options, number)
        life.wait_for(0)
        if server is not None:
            life.wait_for(draw.choice((1, 5, 20)))
            server.kill()
            time.sleep(draw.uniform(0, 0.5))
            server.start()
        life.wait_for(draw.choice((1, 5, 30, 200 if acks == "disk" else 40)))
        time.sleep(draw.uniform(0, 0.3))
        acknowledged = life.kill()
        shutil.rmtree(folder)
        number = acknowledged[-1].number + 10  # puts that were under way have numbers of their own
        lost += check(store, acknowledged, acks, life.killed_at)
    assert verify(store, "jobs").ok
    return lost


def check(store: Store, acknowledged: list[Acknowledged], acks: str, killed_at: float) -> int:
    items = items_of(store)
    for item_id, data in items.items():
        assert data == data[: data.index(b".") + 1] * (1 + int(data[: data.index(b".")]) % 50), item_id
    there = [items.get(each.item_id, b"").startswith(b"%d." % each.number) for each in acknowledged]
    assert there == sorted(there, reverse=True), "what is lost is the end of it"
    missing = [each for each, is_there in zip(acknowledged, there, strict=True) if not is_there]
    if acks == "shipped":
        assert not missing
    elif missing:
        assert killed_at - missing[0].at < 2 * LOST_SECONDS
    return len(missing)


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_machines_are_lost_and_the_folder_has_it(tmp_path: Path, acks: str, tally: Tally) -> None:
    count = share(20)
    lost = burn(tmp_path, f"file://{tmp_path}/store", {}, acks, count)
    tally.add(f"machines lost, with their disks (acks={acks!r}, a folder)", count)
    tally.add("puts lost with them that were acknowledged on disk", lost)


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_machines_are_lost_and_the_object_store_has_it(tmp_path: Path, s3: Seaweed, acks: str, tally: Tally) -> None:
    count = share(10)
    burn(tmp_path, f"s3://kestrel/kills-{acks}-{os.getpid()}", s3.options(), acks, count)
    tally.add(f"machines lost, with their disks (acks={acks!r}, s3)", count)


@takes_long
@pytest.mark.parametrize("number", range(share(6)))
def test_the_object_store_is_killed_too(tmp_path: Path, number: int, tally: Tally) -> None:
    if seaweed.program() is None:
        pytest.skip(seaweed.NOT_INSTALLED)
    with seaweed.seaweed() as server:
        seed = 1000 * SEED + number
        burn(tmp_path, "s3://kestrel/kills", server.options(), "shipped", SERVER_KILLS, server, seed)
    tally.add("kills of an object store while a queue is shipped to it", SERVER_KILLS)
