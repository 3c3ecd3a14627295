"""Real processes, real files, SIGKILL: nothing acknowledged is lost, nothing comes twice beyond what was not saved.

The test starts this file as a program, small and with one thread, which forks: a writer with a reader of its own, and a
reader in a process of its own. Both tell over pipes what they were told: that an item is put, with the checksum of its
data; that it was delivered, committed, saved. One of them, or both, are killed after some number of such messages, or
while they open the queue; the next generation goes on in the same folder. In the end a fresh process reads everything,
and scans live and archived segments.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn
from zlib import crc32

import pytest

import kestrelpy
from kestrelpy import JournaledQueue, QueueEmpty, Reader, open_reader, scan

LONG = os.environ.get("KESTRELPY_LONG") == "1"
KILLS = 5_000 if LONG else 250
SEGMENT_BYTES = 16 << 10
PUT, DELIVERED, COMMITTED, SAVED, READY = b"P", b"D", b"C", b"S", b"R"
MESSAGE = struct.Struct("<cQI")


@pytest.mark.parametrize("sync", ["always", "0.02", "never"])
def test_killed_at_any_moment(sync: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("KESTRELPY_SEED", "1"))
    environment = {**os.environ, "PYTHONPATH": str(Path(kestrelpy.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), sync, str(KILLS), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=KILLS,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    counts = json.loads(done.stdout)
    assert counts["kills"] >= KILLS
    assert counts["acknowledged"] > KILLS
    assert counts["archived"] > 2
    assert counts["redelivered"] > 0  # otherwise no kill has struck between a commit and its checkpoint


# -- the processes that are killed -----------------------------------------------------------------------------------


def payload(choose: random.Random) -> bytes:
    """Random bytes, and their checksum at the end."""
    data = choose.randbytes(choose.choice((0, 10, 100, 1000, 5000)))
    return data + crc32(data).to_bytes(4, "little")


def check_payload(data: bytes) -> None:
    if crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise AssertionError(f"an item of {len(data)} bytes is not whole")


def consume(reader: Reader, choose: random.Random, tell: Callable[[bytes, int, int], None], timeout: float) -> None:
    """Get some, commit them, and save that now and then."""
    try:
        items = reader.get_many(choose.randrange(1, 12), timeout=timeout)
    except QueueEmpty:
        return
    for item in items:
        check_payload(item.data)
        tell(DELIVERED, item.id, crc32(item.data))
    reader.commit_many(items)
    tell(COMMITTED, items[-1].id, 0)
    if choose.random() < 0.3:
        reader.checkpoint(durable=choose.random() < 0.3)
        tell(SAVED, items[-1].id, 0)


def write(folder: str, sync: float | str, seed: int, tell: Callable[[bytes, int, int], None]) -> NoReturn:
    choose = random.Random(seed)
    queue = open_queue(folder, sync)
    inside = queue.reader("inside")
    tell(READY, 0, 0)
    while True:
        action = choose.random()
        if action < 0.5:
            data = payload(choose)
            tell(PUT, queue.put(data), crc32(data))
        elif action < 0.65:
            items = [payload(choose) for _ in range(choose.randrange(2, 5))]
            for item_id, data in zip(queue.put_many(items), items, strict=True):
                tell(PUT, item_id, crc32(data))
        elif action < 0.97:
            consume(inside, choose, tell, 0)
        else:
            queue.checkpoint()


def read_outside(folder: str, seed: int, tell: Callable[[bytes, int, int], None]) -> NoReturn:
    choose = random.Random(seed)
    reader = open_reader(folder, "jobs", "outside", poll_interval=0.002)
    tell(READY, 0, 0)
    while True:
        consume(reader, choose, tell, 0.05)


def open_queue(folder: str, sync: float | str) -> JournaledQueue:
    return JournaledQueue(
        folder,
        "jobs",
        sync=sync,  # type: ignore[arg-type]
        segment_bytes=SEGMENT_BYTES,
        archive_dir=os.path.join(folder, "archive"),
        checkpoint_interval=0.02,
    )


class Child:
    """A forked process and the pipe on which it talks."""

    def __init__(self, work: Callable[[Callable[[bytes, int, int], None]], NoReturn]) -> None:
        self.pipe, other = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.pipe)

                def tell(kind: bytes, item_id: int, crc: int) -> None:
                    os.write(other, MESSAGE.pack(kind, item_id, crc))

                work(tell)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(other)
        self.rest = b""

    def listen(self, messages: int, seconds: float, hear: Callable[[bytes, int, int], None]) -> int:
        """Hear at least so many messages, or as many as come in that time; how many."""
        heard, deadline = 0, time.monotonic() + seconds
        while heard < messages and (left := deadline - time.monotonic()) > 0:
            if select.select([self.pipe], [], [], left)[0]:
                data = os.read(self.pipe, 1 << 16)
                if not data:
                    raise AssertionError("a process ended by itself")
                heard += self._hear(data, hear)
        return heard

    def _hear(self, data: bytes, hear: Callable[[bytes, int, int], None]) -> int:
        data = self.rest + data
        whole = len(data) - len(data) % MESSAGE.size
        self.rest = data[whole:]
        for message in MESSAGE.iter_unpack(data[:whole]):
            hear(*message)
        return whole // MESSAGE.size

    def kill(self, hear: Callable[[bytes, int, int], None]) -> None:
        """SIGKILL; and what it had said until then."""
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        while data := os.read(self.pipe, 1 << 16):
            self._hear(data, hear)
        os.close(self.pipe)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise AssertionError(f"a process ended by itself, with status {status}")


# -- what is promised ------------------------------------------------------------------------------------------------


class Ledger:
    """Items by id, as far as anybody knows of them: those acknowledged, and others, seen by a reader."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def put(self, item_id: int, crc: int) -> None:
        assert item_id not in self.acknowledged, f"id {item_id} was given out twice"
        assert item_id > max(self.acknowledged, default=0), f"id {item_id} does not rise"
        assert self.seen.get(item_id, crc) == crc, f"item {item_id} is not the one that was delivered before"
        self.acknowledged[item_id] = crc

    def deliver(self, item_id: int, crc: int) -> None:
        known = self.acknowledged.get(item_id, self.seen.get(item_id, crc))
        assert known == crc, f"item {item_id} has other data"
        self.seen[item_id] = crc


class Followed:
    """One reader, whoever owns it: its deliveries go on where they must, and not before."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger
        self.last_id = self.committed_id = self.saved_id = 0
        self.fresh = True
        self.redelivered = 0

    def hear(self, kind: bytes, item_id: int, crc: int) -> None:
        if kind == PUT:
            self.ledger.put(item_id, crc)
        elif kind == DELIVERED:
            self.deliver(item_id, crc)
        elif kind == COMMITTED:
            self.committed_id = item_id
        elif kind == SAVED:
            self.saved_id = item_id

    def restart(self) -> None:
        """Its process is gone: what was not saved may come again."""
        self.fresh = True

    def deliver(self, item_id: int, crc: int) -> None:
        self.ledger.deliver(item_id, crc)
        if self.fresh:
            assert item_id > self.saved_id, f"{self.name}: {item_id} was saved as committed, up to {self.saved_id}"
            assert item_id <= self.committed_id + 1, f"{self.name}: {item_id} comes after {self.committed_id}"
            self.redelivered += max(0, self.last_id - item_id + 1)
            self.fresh = False
        else:
            assert item_id == self.last_id + 1, f"{self.name}: {item_id} comes after {self.last_id}"
        self.last_id = item_id


def run(folder: str, sync: float | str, kills: int, seed: int) -> dict[str, int]:
    choose = random.Random(seed)
    ledger = Ledger()
    inside, outside = Followed("inside", ledger), Followed("outside", ledger)
    with open_queue(folder, sync) as queue:
        for name in ("inside", "outside"):
            queue.reader(name, start="earliest")
    count, generation = 0, 0
    other: Child | None = None
    while count < kills:
        generation += 1
        if other is None:
            other = Child(partial(read_outside, folder, seed + generation))
        writer = Child(partial(write, folder, sync, seed + generation))
        if choose.random() < 0.2:
            writer.listen(1, choose.random() * 0.004, inside.hear)  # killed while it opens the queue
        else:
            writer.listen(choose.randrange(1, 120), 10, inside.hear)
        other.listen(1 << 30, 0, outside.hear)
        first = choose.random() < 0.5
        if choose.random() < 0.3:
            if first:
                other.kill(outside.hear)
            writer.kill(inside.hear)
            if not first:
                other.listen(choose.randrange(40), 0.01, outside.hear)
                other.kill(outside.hear)
            outside.restart()
            other = None
            count += 2
        else:
            writer.kill(inside.hear)
            count += 1
        inside.restart()
    if other is not None:
        other.kill(outside.hear)
        outside.restart()
        count += 1
    return {
        "kills": count,
        "generations": generation,
        "acknowledged": len(ledger.acknowledged),
        "redelivered": inside.redelivered + outside.redelivered,
        "archived": verify(folder, ledger, (inside, outside)),
    }


def verify(folder: str, ledger: Ledger, readers: tuple[Followed, ...]) -> int:
    """Nobody is killed any more: the rest comes, and the segments hold every item once; how many are archived."""
    records = {}
    with open_queue(folder, "never") as queue:
        for followed in readers:
            reader = queue.reader(followed.name)
            while reader.items:
                for item in reader.get_many(100, timeout=0):
                    check_payload(item.data)
                    followed.deliver(item.id, crc32(item.data))
                    item.commit()
            assert followed.last_id >= max(ledger.acknowledged), f"{followed.name} ends at {followed.last_id}"
        archived = queue.stats().archived_segments
    for record in scan(folder, "jobs", archive_dir=os.path.join(folder, "archive")):
        assert record.id not in records
        records[record.id] = crc32(record.data)
    assert list(records) == sorted(records)
    assert ledger.acknowledged.items() <= records.items(), "items are neither in the journal nor in the archive"
    assert records == ledger.seen, "items are there that were not delivered"
    assert archived <= len(os.listdir(os.path.join(folder, "archive")))
    return len(os.listdir(os.path.join(folder, "archive")))


if __name__ == "__main__":
    mode = sys.argv[2]
    print(json.dumps(run(sys.argv[1], mode if mode in ("always", "never") else float(mode), *map(int, sys.argv[3:5]))))
