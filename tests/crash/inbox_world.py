"""A seeded run of all that happens at an inbox: parts, publishers, owners and visitors, deaths and failing disks; what
is promised of it; and the judge of what a crash has left.

The letters in the messages are those of the invariants: (a) a batch whose publishing returned is there; (b) once; (c)
as a whole, its items one behind the other; (d) nothing is there that nobody published or put; (e) puts are there, as
the sync mode promises; (f) opening and taking in raise nothing; (g) a batch published again after all that is dropped
if it is there, and is there once if not; (h) readers see all of a batch at once.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kestrelpy import DurabilityUnknown, JournaledQueue, KestrelError, QueueEmpty, Reader, ReaderConfig, scan
from kestrelpy.inbox import Part, PartWriter, discard, pending, publish, take_in
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock
from kestrelpy.testing._choices import Leaning
from kestrelpy.testing._failing import OPERATIONS
from tests.crash.promise import BrokenPromise
from tests.crash.recovered import MODELS, opened, vanish
from tests.crash.world_explorer import CrashingWorld
from tests.support.queues import Sync

APPS = ("a", "b", None)
SIZES = (0, 10, 300, 900, 2500)
KINDS = OPERATIONS - {"sync_directory"}
"""What may fail. A folder whose sync fails ends a real file system."""
Key = tuple[str, int]
CONFIG = ReaderConfig(memory_bytes=2048)


class Killed(BaseException):
    """The death of one process, at an operation that it does not do."""


@dataclass(frozen=True)
class Habit:
    """What a world leans to: the weights of its steps, and what comes into its items."""

    steps: int = 14
    publishes: int = 6
    again: int = 3
    killed: int = 2
    """Weight of a publisher that is killed alone."""
    parts: int = 1
    puts: int = 4
    takes: int = 3
    opens: int = 2
    deaths: int = 2
    sizes: tuple[int, ...] = SIZES
    apps: tuple[str | None, ...] = APPS
    sync: Sync | None = None
    kinds: frozenset[str] = KINDS
    within: int = 30
    """Of so many operations of these kinds one fails, where one does."""


@dataclass
class Published:
    """What may be there of one app_id and version: ``attempts``, each a list of items. ``surely``: one of them is;
    ``only``: it can be no other.
    """

    app_id: str | None
    version: int
    attempts: list[list[bytes]] = field(default_factory=list)
    surely: bool = False
    only: list[bytes] | None = None

    def copy(self) -> Published:
        return Published(self.app_id, self.version, list(self.attempts), self.surely, self.only)


@dataclass
class Ledger:
    """What was promised so far. ``puts``: as acknowledged, ``durable`` of them for good, ``doubtful`` may follow."""

    batches: dict[Key, Published] = field(default_factory=dict)
    puts: list[bytes] = field(default_factory=list)
    durable: int = 0
    doubtful: list[bytes] = field(default_factory=list)

    def copy(self) -> Ledger:
        batches = {key: batch.copy() for key, batch in self.batches.items()}
        return Ledger(batches, list(self.puts), self.durable, list(self.doubtful))

    def check(self, seen: list[bytes], *, power: bool) -> None:
        """Raises ``BrokenPromise``."""
        runs: list[tuple[bytes, list[bytes]]] = []
        for data in seen:
            name = data.partition(b"|")[0]
            if runs and runs[-1][0] == name:
                runs[-1][1].append(data)
            else:
                runs.append((name, [data]))
        puts = [data for name, items in runs if name == b"put" for data in items]
        self._check_puts(puts, power=power)
        there: dict[bytes, list[bytes]] = {}
        for name, items in runs:
            if name != b"put":
                if name in there:
                    raise BrokenPromise(f"(b) (c) {name!r} is there twice, or in pieces")
                there[name] = items
        for key, batch in self.batches.items():
            items = there.pop(_label(key), [])
            if not items and not batch.surely:
                continue
            if items not in batch.attempts or (batch.only is not None and items != batch.only):
                letter = "(a)" if not items else "(b) (c)"
                raise BrokenPromise(f"{letter} of {key} there are {len(items)} items: {[i[:12] for i in items[:3]]}")
        if there:
            raise BrokenPromise(f"(d) nobody published {sorted(there)}")

    def _check_puts(self, puts: list[bytes], *, power: bool) -> None:
        known = self.puts + self.doubtful
        least = self.durable if power else len(self.puts)
        if puts != known[: len(puts)] or len(puts) < least:
            raise BrokenPromise(f"(d) (e) of {len(known)} puts, {least} for sure, there are {len(puts)}")

    def adopt(self, seen: list[bytes]) -> None:
        """A new life: what was put and is there, is; for good when the queue is open again."""
        self.puts = [data for data in seen if data.startswith(b"put|")]
        self.durable, self.doubtful = min(self.durable, len(self.puts)), []

    def settle(self) -> None:
        """All that was put is on disk."""
        self.durable = len(self.puts)


def _label(key: Key) -> bytes:
    return f"{key[0]}:{key[1]}".encode()


def open_queue(disk: CrashingDisk | FailingDisk, sync: Sync) -> JournaledQueue:
    """In smaller segments where puts wait for the disk."""
    queue = JournaledQueue(
        "/data",
        "jobs",
        sync=sync,
        segment_bytes=4096 if sync == "always" else 24_000,
        inbox_interval=None,
        default_reader=CONFIG,
        clock=ManualClock(1_000_000),
        disk=disk,
    )
    opened.add(queue)
    return queue


def write_part(disk: CrashingDisk | FailingDisk, items: list[bytes], *, packed: bool) -> Part:
    with PartWriter("/data", "jobs", disk=disk, clock=ManualClock(1_000_000)) as writer:
        if packed:
            lengths = b"".join(len(data).to_bytes(4, "little") for data in items)
            writer.add_packed(lengths, b"".join(items), len(items))
        else:
            writer.add(items[:1])
            writer.add(items[1:], expires_ms=1 << 50)
        return writer.seal()


def contents(queue: JournaledQueue) -> list[bytes]:
    """What a reader of the queue would get, nothing of which is taken."""
    reader: Reader = queue.reader()
    items = []
    try:
        while True:
            items += reader.get_many(50, timeout=0)
    except QueueEmpty:
        pass
    for item in reversed(items):
        item.abort()
    return [item.data for item in items]


class World(CrashingWorld[Ledger]):
    """Publishers, owners and visitors of one queue."""

    def __init__(self, seed: int, watch: Callable[[], None], style: Habit, *, failing: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.style = style
        either: tuple[Sync, ...] = ("always", "never")
        self.sync = self.random.choice(either) if style.sync is None else style.sync
        self.truth = Ledger()
        self.fails = self.random.random() < failing
        self.queue: JournaledQueue | None = None
        self.serial = 0
        super().__init__(watch)

    def run(self) -> None:
        actions = [
            (self.style.publishes, self._publish),
            (self.style.again, self._publish_again),
            (self.style.killed, self._publisher_dies),
            (self.style.parts, self._leave_a_part),
            (self.style.puts, self._put),
            (self.style.takes, self._take_in),
            (self.style.opens, self._open_or_close),
            (self.style.deaths, self._die),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(self.style.steps):
            if self.fails and self.random.random() < 0.5:
                error = self.random.choice((errno.ENOSPC, errno.EIO, errno.ENOSPC))
                sticky = self.random.random() < 0.3
                self.failing.arm(
                    error, at=self.random.randrange(1, self.style.within), sticky=sticky, kinds=self.style.kinds
                )
            self._do(self.random.choices([action for _, action in actions], weights)[0])
            if self.random.random() < 0.6:
                self.failing.disarm()
        self.failing.disarm()
        self._do(self._close)

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except DurabilityUnknown:
            if not self.failing.failures:
                raise
            self._die()
        except (OSError, KestrelError):
            if not self.failing.failures:
                raise
        if self.queue is not None and not self.queue.closed:
            self._look_inside(self.queue)

    def _look_inside(self, queue: JournaledQueue) -> None:
        """(h) What readers of the owner see at this moment."""
        try:
            with self._undisturbed():
                queue._check()
                seen = contents(queue)
        except DurabilityUnknown:
            return
        ledger = self.truth.copy()
        for batch in ledger.batches.values():
            batch.surely = False  # it may not be taken in yet
        ledger.durable = 0
        try:
            ledger.check(seen, power=True)
        except BrokenPromise as broken:
            raise BrokenPromise(f"(h) seen inside: {broken}") from broken

    # -- publishing --------------------------------------------------------------------------------------------------

    def _items(self, label: bytes) -> list[bytes]:
        self.serial += 1
        count = self.random.randrange(1, 9)
        return [
            b"%s|%d|%d|%s" % (label, self.serial, at, self.random.randbytes(self.random.choice(self.style.sizes)))
            for at in range(count)
        ]

    def _publish(self) -> None:
        app_id = self.random.choice(self.style.apps)
        name = app_id or "-"
        versions = [key[1] for key in self.truth.batches if key[0] == name]
        version = max(versions, default=-1) + self.random.randrange(1, 3)
        self._publish_as(Published(app_id, version), (name, version))

    def _publish_again(self) -> None:
        """What was published, or may have been, with other parts. Without an app_id that is another batch."""
        keys = [key for key, batch in self.truth.batches.items() if batch.app_id is not None]
        if keys:
            key = self.random.choice(keys)
            self._publish_as(self.truth.batches[key], key)

    def _publish_as(self, batch: Published, key: Key) -> None:
        items = self._items(_label(key))
        cut = self.random.randrange(len(items) + 1)
        pieces = [piece for piece in (items[:cut], items[cut:]) if piece]
        parts = [write_part(self.failing, piece, packed=self.random.random() < 0.5) for piece in pieces]
        newest = max((other[1] for other in self.truth.batches if other[0] == key[0]), default=-1)
        surely_late = batch.surely or any(
            other.surely for name, other in self.truth.batches.items() if name[0] == key[0] and name[1] > key[1]
        )
        if not surely_late:
            batch.attempts.append(items)
        self.truth.batches[key] = batch
        new = publish(
            "/data",
            "jobs",
            parts,
            app_id=batch.app_id,
            version=batch.version if batch.app_id else 0,
            disk=self.failing,
            clock=ManualClock(1_000_000),
        )
        if new:
            if surely_late:
                raise BrokenPromise(f"(b) {key} was published already, and is published again")
            batch.surely, batch.only = True, items
        elif not surely_late:
            if newest > key[1]:
                return  # a later one may have come first: then this one is dropped
            batch.surely = True
            batch.attempts.remove(items)
            if not batch.attempts:
                raise BrokenPromise(f"(a) {key} was never published, and is said to be")

    def _publisher_dies(self) -> None:
        """At any of its operations; everybody else goes on."""
        left = self.random.randrange(12)

        def is_due() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self.let_a_publisher_die(is_due)

    def let_a_publisher_die(self, is_due: Callable[[], bool]) -> None:
        """Publish, and kill it at the first operation for which ``is_due``."""
        dead = False

        def watch() -> None:
            nonlocal dead
            dead = dead or is_due()
            if dead:
                raise Killed
            self.watch()

        self.disk.before_operation = watch
        try:
            self._publish()
        except Killed:
            return
        finally:
            self.disk.before_operation = self.watch

    def _leave_a_part(self) -> None:
        part = write_part(self.failing, self._items(b"nobody"), packed=True)
        if self.random.random() < 0.5:
            discard("/data", "jobs", [part], disk=self.failing)

    # -- the owner ---------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        if self.queue is None:
            return
        self.serial += 1
        data = b"put|%d|%s" % (self.serial, self.random.randbytes(self.random.choice(self.style.sizes)))
        self.truth.doubtful = [data]
        self.queue.put(data)
        self.truth.doubtful = []
        self.truth.puts.append(data)
        if self.sync == "always":
            self.truth.durable = len(self.truth.puts)

    def _take_in(self) -> None:
        if self.queue is not None:
            self.queue.take_in()
        else:
            take_in("/data", "jobs", disk=self.failing, clock=ManualClock(1_000_000))
        if pending("/data", "jobs", disk=self.failing) and not self.failing.failures:
            raise BrokenPromise("(f) batches are left after they were taken in")

    def _open_or_close(self) -> None:
        if self.queue is None:
            self.queue = open_queue(self.failing, self.sync)
        else:
            self._close()

    def _close(self) -> None:
        if self.queue is not None:
            queue, self.queue = self.queue, None
            queue.close()
            self.truth.settle()

    def _die(self) -> None:
        """All processes die, or the power goes; what is found then is how it is."""
        power = self.random.random() < 0.5
        self.disk.before_operation = None
        if self.queue is not None:
            vanish(self.queue, self.disk)
        self.queue = None
        failed = self.failing.failures > 0
        disk = self.disk.after_kill()
        if power:
            disk = self.disk.after_power_cut(Leaning(self.random), self.random.choice(MODELS))
        seen = judge(disk.after_kill(), self.sync, self.truth, power=power or failed)
        self.truth.adopt(seen)
        self._use(disk)
        self.queue = open_queue(self.failing, self.sync)
        self.truth.settle()


def judge(
    disk: CrashingDisk, sync: Sync, ledger: Ledger, *, power: bool, then: random.Random | None = None
) -> list[bytes]:
    """Open, take in and read all there is, and hold it against the ledger; with ``then``, go on and look again."""
    try:
        queue = open_queue(disk, sync)
        queue.take_in()
        seen = contents(queue)
        ledger.check(seen, power=power)
        if [record.data for record in scan("/data", "jobs", disk=disk)] != seen:
            raise BrokenPromise("(h) the files say other than the readers")
        if then is None:
            vanish(queue, disk)
            return seen
        _go_on(disk, sync, queue, ledger, seen, then)
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(f) raised {error!r}") from error
    return seen


def _go_on(
    disk: CrashingDisk,
    sync: Sync,
    queue: JournaledQueue,
    ledger: Ledger,
    seen: list[bytes],
    choose: random.Random,
) -> None:
    """(g) All that may be there is published again, and one more; then the queue is closed, or dies, and looked at."""
    ledger = ledger.copy()
    ledger.adopt(seen)
    ledger.settle()
    there = {data.partition(b"|")[0] for data in seen}
    for key, batch in sorted(ledger.batches.items()):
        if batch.app_id is None:
            batch.surely = _label(key) in there
            continue
        later = any(other[0] == key[0] and other[1] > key[1] and _label(other) in there for other in ledger.batches)
        items = [_label(key) + b"|again|%d" % at for at in range(3)]
        part = write_part(disk, items, packed=True)
        new = publish(
            "/data", "jobs", [part], app_id=batch.app_id, version=batch.version if batch.app_id else 0, disk=disk
        )
        if new == (_label(key) in there or later):
            raise BrokenPromise(f"(g) {key} is {'' if new else 'not '}published again, and {sorted(there)} are there")
        batch.surely = new or _label(key) in there
        if new:
            batch.attempts = [items]
            batch.only = items
    data = b"put|last"
    queue.put(data)
    ledger.puts.append(data)
    queue.take_in()
    ledger.check(contents(queue), power=False)
    queue._check()
    if choose.random() < 0.5:
        queue.close()
    else:
        vanish(queue, disk)
    left = disk.after_kill()
    queue = open_queue(left, sync)
    ledger.check(contents(queue), power=False)
    queue.close()
