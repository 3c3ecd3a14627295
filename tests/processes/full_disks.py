"""Real file systems that somebody else fills: what was acknowledged holds over kills and restarts, and puts resume.

A round of *jobs*: a work queue takes jobs, a neighbour takes the rest of the file system, puts go on until there is no
room, then jobs are deleted, and the process is killed at any moment of that, now and then more than once, while the
disk stays full. A round of *items*: a queue that was read before or not fills the file system, is closed or killed, and
is consumed by the next process, which has not one free block. In the end the neighbour goes: no delete that returned
was undone, nothing is lost, puts go on.

``run`` takes the kind of file system and returns what it counted. A broken promise is an ``AssertionError`` with the
seed and the file system; ``table`` goes on instead, and counts what is broken. For root. As a program:
``full_disks.py table 200`` prints the table of docs/guarantees.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from kestrelpy import JournaledQueue, QueueDiskFull, QueueEmpty
from kestrelpy.work import WorkQueue
from tests.processes import loop_mount
from tests.processes.loop_mount import LoopFileSystem, let_go, mount, own_mounts
from tests.processes.programs import as_program, rounds

KINDS = ("ext4", "xfs", "btrfs", "tmpfs")
SIZE_MB = {"ext4": 32, "xfs": 300, "btrfs": 128, "tmpfs": 16}
ROUNDS_A_MOUNT = 50
"""After so many rounds the file system is made anew."""
PATIENCE = 20.0
"""Seconds in which a process must say something."""
COUNTS = ("deletes acknowledged", "deletes refused", "came back", "lost", "puts resumed", "made room by itself")
Message = dict[str, Any]


# -- a file system ---------------------------------------------------------------------------------------------------


class Place:
    """A mounted file system, and the neighbour who fills it."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind = kind
        self._made: LoopFileSystem | None = None
        if kind == "tmpfs":
            self.path = str(Path(folder, "tmpfs.mount"))
            os.makedirs(self.path, exist_ok=True)
            mount("tmpfs", self.path, "tmpfs", f"size={SIZE_MB[kind]}m,mode=0700")
        else:
            self._made = LoopFileSystem(kind, SIZE_MB[kind], folder)  # type: ignore[arg-type]
            self.path = self._made.path
        self.fills = 0

    @property
    def free(self) -> int:
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_bsize

    def leave(self, size: int) -> None:
        """Somebody has taken all but ``size``."""
        self.fills += 1
        with contextlib.suppress(OSError), open(f"{self.path}/neighbour.{self.fills}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free - size))

    def fill(self) -> None:
        """Somebody takes the rest, to the last block."""
        self.leave(1 << 20)
        newest = max((name for name in os.listdir(self.path) if name.startswith("neighbour")), key=_number)
        with open(f"{self.path}/{newest}", "ab", buffering=0) as file:  # on a full XFS no new file can be made
            for size in (1 << 20, 1 << 16, 4096, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
                if self._made is not None:
                    with contextlib.suppress(OSError):
                        os.fsync(file.fileno())

    def empty(self) -> None:
        """The neighbour goes."""
        for name in os.listdir(self.path):
            if name.startswith("neighbour"):
                os.unlink(f"{self.path}/{name}")
        if self._made is not None:
            os.sync()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        else:
            let_go(self.path)


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


# -- a process -------------------------------------------------------------------------------------------------------


class Voice:
    """How a process tells what it does, and waits to be told to go on."""

    def __init__(self, out: int, ear: int) -> None:
        self._out, self._ear = out, ear

    def tell(self, **message: object) -> None:
        os.write(self._out, json.dumps(message).encode() + b"\n")

    def wait(self) -> None:
        """Until the parent says go."""
        assert os.read(self._ear, 1)


class Child:
    """A process that runs ``act``; what it tells is heard by ``hear``."""

    def __init__(self, act: Callable[[Voice], object], plant: Callable[[], object] | None) -> None:
        self._pipe, out = os.pipe()
        ear, self._control = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            os.close(self._control)
            status = 1
            try:
                if plant is not None:
                    plant()
                act(Voice(out, ear))
                status = 0
            except BaseException as error:  # to be seen by who runs this
                with contextlib.suppress(OSError):
                    where = "".join(traceback.format_tb(error.__traceback__)[-7:])
                    Voice(out, ear).tell(broken=f"{type(error).__name__}: {error}\n{where}"[:3000])
            os._exit(status)
        os.close(out)
        os.close(ear)

    def go_on(self) -> None:
        os.write(self._control, b".")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def hear(self) -> Iterator[Message]:
        """All that it tells, until it ends."""
        rest = b""
        while True:
            if not select.select([self._pipe], [], [], PATIENCE)[0]:
                raise AssertionError(f"it has said nothing for {PATIENCE:.0f} seconds")
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                assert "broken" not in message, message["broken"]
                yield message

    def end(self) -> None:
        """It is killed if it lives still."""
        self.kill()
        os.close(self._pipe)
        os.close(self._control)
        os.waitpid(self.pid, 0)


def many_times(choose: random.Random) -> float:
    """How much of something, from nothing to all of it: both ends often."""
    return choose.choice((0.0, 1.0, choose.random(), choose.random()))


# -- jobs ------------------------------------------------------------------------------------------------------------


class JobsRound:
    """One life of a work queue, in several processes."""

    def __init__(self, place: Place, seed: str, counts: Counter[str], plant: Callable[[], object] | None) -> None:
        self.place, self.counts, self.plant = place, counts, plant
        self.folder = f"{place.path}/jobs"
        self.choose = choose = random.Random(seed)
        self.sync: Any = choose.choice(("always", "never", 0.01))
        self.segment_bytes = choose.choice((1 << 14, 1 << 16, 1 << 18, 1 << 20))
        self.interval = choose.choice((0.02, 0.2, 1.0))
        self.body = choose.choice((10, 100, 500, 2000))
        self.order = choose.choice(("random", "fifo"))
        self.room = choose.randrange(300_000, 1_500_000)
        self.live: set[int] = set()
        self.gone: set[int] = set()
        self.under_way: Message | None = None

    def open(self) -> WorkQueue:
        return WorkQueue(
            self.folder, sync=self.sync, segment_bytes=self.segment_bytes, checkpoint_interval=self.interval,
            max_job_bytes=4000,
        )  # fmt: skip

    def run(self) -> None:
        choose, place = self.choose, self.place
        place.leave(self.room)
        first, rest = choose.randrange(0, 400), choose.randrange(0, 3000)
        self.live_through(Child(lambda voice: self.put_and_delete(voice, first, rest), self.plant), kills=True)
        while choose.random() < 0.5:
            place.fill()
            self.live_through(Child(self.delete_on, self.plant), kills=True)
        place.empty()
        self.live_through(Child(self.resume, self.plant), kills=False)
        self.live_through(Child(self.end, self.plant), kills=False)

    def live_through(self, child: Child, *, kills: bool) -> None:
        """Hear it to its end, or until it is killed, at any moment of its deletes."""
        deletes = int(many_times(self.choose) * len(self.live)) if self.live else int(self.choose.expovariate(1 / 500))
        greedy, killed = self.choose.random() < 0.5, False
        try:
            for message in child.hear():
                self.take(message, child)
                done = message.get("deleted")
                if done:
                    deletes -= 1
                    if greedy and not deletes % 50:
                        self.place.fill()
                if kills and not killed and ("over" in message or (done and deletes <= 0)):
                    killed = True
                    if self.choose.random() < 0.5:
                        time.sleep(self.choose.random() * 0.03)
                    child.kill()
        finally:
            child.end()

    def take(self, message: Message, child: Child) -> None:
        if "fill" in message:
            self.place.fill()
            child.go_on()
        elif "found" in message:
            self.compare(set(message["found"]))
        elif "begun" in message:
            self.under_way = message
        elif "put" in message:
            self.live.add(message["put"])
            self.under_way = None
        elif "deleted" in message:
            self.live.discard(message["deleted"])
            self.gone.add(message["deleted"])
            self.counts["deletes acknowledged"] += 1
            self.under_way = None
        elif "refused" in message:
            self.counts[f"{message['refused']}s refused"] += 1
            self.under_way = None
        elif "resumed" in message:
            self.counts["puts resumed"] += 1
        elif "room" in message:
            self.counts["made room by itself"] += 1

    def compare(self, found: set[int]) -> None:
        doubtful = set() if self.under_way is None else {self.under_way["id"]}
        new = found - self.live - self.gone - doubtful
        assert not new or (self.under_way is not None and not self.under_way["id"]), f"jobs from nowhere: {new}"
        self.note("came back", (found & self.gone) - doubtful)
        self.note("lost", self.live - found - doubtful)
        self.gone |= self.live - found
        self.live, self.under_way = found, None

    def note(self, what: str, ids: set[int]) -> None:
        self.counts[what] += len(ids)
        if ids and self.counts["strict"]:
            raise AssertionError(f"{len(ids)} jobs {what}: {sorted(ids)[:10]}")

    # In the child:

    def put_and_delete(self, voice: Voice, first: int, rest: int) -> None:
        queue = self.open()
        voice.tell(found=[])
        for _ in range(first):
            self.put(queue, voice)
        if self.choose.random() < 0.5:
            queue.checkpoint()
        voice.tell(fill=True)
        voice.wait()
        refused = 0
        for _ in range(rest):
            refused += not self.put(queue, voice)
            if refused > 3:
                break
        self.delete_some(queue, voice)

    def delete_on(self, voice: Voice) -> None:
        queue = self.open()
        queue._check()
        voice.tell(found=[job.id for tube in queue.tubes() for job in queue.jobs(tube)])
        self.delete_some(queue, voice)

    def delete_some(self, queue: WorkQueue, voice: Voice) -> None:
        """All, or nearly all, with puts in between."""
        ids = [job.id for job in queue.jobs("default")]
        if self.order == "random":
            self.choose.shuffle(ids)
        spared = len(ids) // self.choose.choice((3, 20, 10_000))
        session = queue.session()
        for at, job_id in enumerate(ids[spared:]):
            voice.tell(begun="delete", id=job_id)
            try:
                if self.order == "fifo" and not spared and at % 2:
                    job = session.reserve(0)
                    job_id = job.id
                    job.delete()
                else:
                    queue.delete(job_id)
            except QueueDiskFull:
                voice.tell(refused="delete")
            else:
                voice.tell(deleted=job_id)
            if not at % 100:
                self.put(queue, voice)
        voice.tell(over=True)
        while True:
            time.sleep(0.02)
            if self.put(queue, voice):
                voice.tell(room=True)
                break
        time.sleep(60)

    def put(self, queue: WorkQueue, voice: Voice) -> bool:
        voice.tell(begun="put", id=0)
        try:
            voice.tell(put=queue.put(bytes(self.body)))
        except QueueDiskFull:
            voice.tell(refused="put")
            return False
        return True

    def resume(self, voice: Voice) -> None:
        """There is room."""
        with contextlib.closing(self.open()) as queue:
            queue._check()
            voice.tell(found=[job.id for tube in queue.tubes() for job in queue.jobs(tube)])
            if sum(self.put(queue, voice) for _ in range(20)) == 20:
                voice.tell(resumed=True)

    def end(self, voice: Voice) -> None:
        with contextlib.closing(self.open()) as queue:
            voice.tell(found=[job.id for tube in queue.tubes() for job in queue.jobs(tube)])
            for job in list(queue.jobs("default")):
                voice.tell(begun="delete", id=job.id)
                queue.delete(job.id)
                voice.tell(deleted=job.id)


# -- items -----------------------------------------------------------------------------------------------------------


class ItemsRound:
    """One life of a queue, in several processes."""

    def __init__(self, place: Place, seed: str, counts: Counter[str], plant: Callable[[], object] | None) -> None:
        self.place, self.counts, self.plant = place, counts, plant
        self.folder = f"{place.path}/items"
        self.choose = choose = random.Random(seed)
        self.sync: Any = choose.choice(("always", "never"))
        self.segment_bytes = choose.choice((1 << 14, 1 << 16, 1 << 18, 1 << 20, 16 << 20))
        self.item = choose.choice((10, 500, 2000, 10_000))
        self.interval = choose.choice((0.02, 0.2))
        self.reader = choose.choice(("", "", "audit"))
        self.early = choose.random() < 0.5  # whether it is read before the disk is full
        self.room = choose.randrange(300_000, 3_000_000)
        self.put_ids: set[int] = set()
        self.committed: set[int] = set()
        self.unsaved: set[int] = set()  # committed in this life
        self.saved: set[int] = set()

    def open(self) -> JournaledQueue:
        return JournaledQueue(
            self.folder, "items", sync=self.sync, segment_bytes=self.segment_bytes, checkpoint_interval=self.interval,
            max_item_bytes=12_000,
        )  # fmt: skip

    def run(self) -> None:
        self.place.leave(self.room)
        closes = self.choose.random() < 0.5
        self.live_through(lambda voice: self.fill(voice, closes))
        for _ in range(self.choose.choice((1, 1, 2, 3))):
            self.place.fill()
            closes, part = self.choose.random() < 0.5, many_times(self.choose)
            self.live_through(partial(self.consume, closes=closes, part=part))
        self.place.empty()
        self.live_through(self.resume)

    def live_through(self, act: Callable[[Voice], object]) -> None:
        self.unsaved = set()
        child = Child(act, self.plant)
        try:
            for message in child.hear():
                self.take(message, child)
        finally:
            child.end()

    def take(self, message: Message, child: Child) -> None:
        if "fill" in message:
            self.place.fill()
            child.go_on()
        elif "put" in message:
            self.put_ids.add(message["put"])
        elif "committed" in message:
            self.committed.update(message["committed"])
            self.unsaved.update(message["committed"])
        elif "saved" in message:
            self.saved |= self.unsaved
        elif "refused" in message:
            self.counts["readers refused"] += 1
        elif "came" in message:
            came = set(message["came"])
            assert came <= self.put_ids, f"items from nowhere: {sorted(came - self.put_ids)[:10]}"
            assert sorted(came) == message["came"], "they come out of order, or twice"
            self.note("came back", came & self.saved)
            self.note("lost", set(message["whole"]) - came - self.committed if message["whole"] else set())
        elif "all came" in message:
            self.note("lost", self.put_ids - self.committed)
        elif "resumed" in message:
            self.counts["puts resumed"] += 1
        elif "room" in message:
            self.counts["made room by itself"] += 1
        elif "consumed" in message:
            self.counts["consumed on a full disk"] += 1
            self.counts["of one segment"] += message["consumed"] < 2

    def note(self, what: str, ids: set[int]) -> None:
        self.counts[what] += len(ids)
        if ids and self.counts["strict"]:
            raise AssertionError(f"{len(ids)} items {what}: {sorted(ids)[:10]}")

    # In the child:

    def fill(self, voice: Voice, closes: bool) -> None:
        queue = self.open()
        if self.early:
            queue.reader(self.reader, start="earliest")
        with contextlib.suppress(QueueDiskFull):
            for _ in range(self.choose.randrange(1, self.choose.choice((30, 300, 3000)))):
                voice.tell(put=queue.put(bytes(self.item)))
        if self.early and self.choose.random() < 0.5:
            self.take_some(queue, voice, 10)
        voice.tell(fill=True)
        voice.wait()
        with contextlib.suppress(QueueDiskFull):
            while True:
                voice.tell(put=queue.put(bytes(self.item)))
        if closes:
            queue.close()
            voice.tell(saved=True)
        else:
            os._exit(0)

    def take_some(self, queue: JournaledQueue, voice: Voice, most: int) -> int:
        """Up to ``most`` items, committed; how many it were."""
        reader = queue.reader(self.reader, start="earliest")
        try:
            items = reader.get_many(min(most, 100), timeout=0)
        except QueueEmpty:
            return 0
        voice.tell(came=[item.id for item in items], whole=[])
        reader.commit_many(items)
        voice.tell(committed=[item.id for item in items])
        return len(items)

    def consume(self, voice: Voice, closes: bool, part: float) -> None:
        queue = self.open()
        segments = queue.stats().segments
        queue._check()
        with self.forgiving(voice):
            reader = queue.reader(self.reader, start="earliest")
        left = int(part * reader.items)
        while left > 0 and (taken := self.take_some(queue, voice, left)):
            left -= taken
        if part == 1.0:
            voice.tell(**{"all came": True})
            voice.tell(consumed=segments)
            for _ in range(12):
                try:
                    voice.tell(put=queue.put(bytes(self.item)))
                except QueueDiskFull:
                    time.sleep(0.05)
                else:
                    voice.tell(room=True)
                    break
        with self.forgiving(voice):
            if closes:
                queue.close()
                voice.tell(saved=True)
            elif self.choose.random() < 0.5:
                queue.checkpoint()
                voice.tell(saved=True)
        os._exit(0)

    @contextlib.contextmanager
    def forgiving(self, voice: Voice) -> Iterator[None]:
        """On a full XFS the files of a reader that is new there may find no room for their names."""
        try:
            yield
        except OSError as error:
            if (error.errno, self.place.kind, self.early) != (errno.ENOSPC, "xfs", False):
                raise
            voice.tell(refused=True)
            os._exit(0)

    def resume(self, voice: Voice) -> None:
        """There is room."""
        queue = self.open()
        for _ in range(20):
            voice.tell(put=queue.put(bytes(self.item)))
        voice.tell(resumed=True)
        while self.take_some(queue, voice, 100):
            pass
        queue._check()
        voice.tell(**{"all came": True})
        queue.close()


# -- runs ------------------------------------------------------------------------------------------------------------

ROUNDS: dict[str, type[JobsRound | ItemsRound]] = {"jobs": JobsRound, "items": ItemsRound}


def run(
    kind: str,
    seed: int,
    *,
    limit: int | None = None,
    seconds: float | None = None,
    plant: Callable[[], object] | None = None,
    strict: bool = True,
    what: str = "jobs items",
) -> dict[str, Counter[str]]:
    """So many rounds of each sort on file systems of this kind. Raises ``AssertionError``, unless ``strict`` is false:
    then what is broken is counted, and printed.
    """
    counts = {sort: Counter[str](strict=strict) for sort in what.split()}
    with tempfile.TemporaryDirectory() as folder:
        place: Place | None = None
        try:
            for number in rounds(limit, seconds):
                if place is None or not number % ROUNDS_A_MOUNT:
                    if place is not None:
                        place.close()
                    place = Place(kind, folder)
                for sort, counted in counts.items():
                    _one(sort, f"{kind} {seed + number}", place, counted, plant)
        finally:
            if place is not None:
                place.close()
    for counted in counts.values():
        del counted["strict"]
    return counts


def _one(sort: str, seed: str, place: Place, counts: Counter[str], plant: Callable[[], object] | None) -> None:
    one = ROUNDS[sort](place, seed, counts, plant)
    counts["rounds"] += 1
    try:
        one.run()
    except (AssertionError, OSError) as error:
        if counts["strict"]:
            raise AssertionError(f"{sort}, {seed}: {error}") from error
        counts["rounds broken"] += 1
        print(f"{sort}, {seed}: {error}", file=sys.stderr, flush=True)
    finally:
        place.empty()
        shutil.rmtree(one.folder, ignore_errors=True)


@cache
def reason_not_available(kind: str) -> str | None:
    """Why there can be no such file system here; ``None`` if there can."""
    if kind != "tmpfs":
        return loop_mount.reason_not_available(kind)
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    try:
        with tempfile.TemporaryDirectory() as folder:
            Place(kind, folder).close()
    except OSError as error:
        return f"a tmpfs can't be mounted here: {os.strerror(error.errno or errno.EIO)}"
    return None


def table(number: int, seed: int, what: str, kinds: tuple[str, ...]) -> None:
    """Print what so many rounds of each sort give on each file system."""
    print("| file system | what | rounds | " + " | ".join(COUNTS) + " | rounds broken |")
    print("|---" * (len(COUNTS) + 4) + "|")
    for kind in kinds:
        begun = time.monotonic()
        for sort, counts in run(kind, seed, limit=number, strict=False, what=what).items():
            cells = [kind, sort, *(f"{counts[name]:,}" for name in ("rounds", *COUNTS, "rounds broken"))]
            print("| " + " | ".join(cells) + " |", flush=True)
            print({key: value for key, value in counts.items() if key not in COUNTS}, file=sys.stderr)
        print(f"{kind}: {time.monotonic() - begun:.0f} s", file=sys.stderr)


def main(what: str, seed: int, limit: int | None, seconds: float | None, plant: Any) -> Counter[str]:
    """``what``: a kind of file system."""
    own_mounts()
    return sum(run(what, seed, limit=limit, seconds=seconds, plant=plant).values(), Counter[str]())


if __name__ == "__main__":
    if sys.argv[1] == "table":
        own_mounts()
        limit, begin = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
        sorts = sys.argv[4] if len(sys.argv) > 4 else "jobs items"
        table(limit, begin, sorts, tuple(sys.argv[5:]) or KINDS)
    else:
        as_program(main)
