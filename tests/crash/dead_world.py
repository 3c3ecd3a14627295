"""A seeded run of items that fail and die, of their letters that are put back, of owners, readers elsewhere, deaths and
failing disks; what is promised of it; and the judge of what a crash has left.

The letters in the messages are those of the invariants: (a) an item whose put is on disk is there, in one of the two
queues; (b) no item is there twice, in one of them or in both; (c) a letter says where it comes from, and has the data;
(d) opening, reading and moving raise nothing; (e) nothing is there that nobody put; (f) a reader
finds itself in order.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from kestrelpy import (
    DeadLetter,
    DurabilityUnknown,
    Item,
    JournaledQueue,
    KestrelError,
    QueueEmpty,
    Reader,
    ReaderConfig,
    dead_letters,
    open_reader,
)
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.inbox import take_in
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock
from kestrelpy.testing._choices import Leaning
from tests.crash.inbox_world import KINDS
from tests.crash.promise import BrokenPromise
from tests.crash.recovered import MODELS, bury, opened, vanish
from tests.crash.world_explorer import CrashingWorld
from tests.support.queues import Sync

CONFIG = ReaderConfig(memory_bytes=2048, max_deliveries=2, dead_letter="dead")
SIZES = (0, 10, 300, 900, 2500)
AnyDisk = CrashingDisk | FailingDisk
far: WeakSet[Reader] = WeakSet()


@dataclass(frozen=True)
class Habits:
    """What a world leans to: the weights of its steps."""

    steps: int = 16
    puts: int = 4
    fails: int = 6
    commits: int = 2
    saves: int = 2
    requeues: int = 3
    drops: int = 1
    owners: int = 2
    """Weight of an owner of the queue of the dead letters, who comes or goes."""
    opens: int = 3
    seeks: int = 1
    renames: int = 1
    deaths: int = 2
    sizes: tuple[int, ...] = SIZES
    sync: Sync | None = None
    within: int = 40


@dataclass
class Known:
    """What was promised so far. ``puts``: acknowledged; ``durable`` of them for good; ``doubtful`` may be there, too.
    ``taken``: committed by a consumer, or dropped: it may come again, and need not.
    """

    puts: dict[bytes, None] = field(default_factory=dict)
    durable: set[bytes] = field(default_factory=set)
    doubtful: set[bytes] = field(default_factory=set)
    taken: set[bytes] = field(default_factory=set)

    def copy(self) -> Known:
        return Known(dict(self.puts), set(self.durable), set(self.doubtful), set(self.taken))

    def check(self, there: Counter[bytes], *, power: bool) -> None:
        """Raises ``BrokenPromise``."""
        for data, count in there.items():
            if count > 1:
                raise BrokenPromise(f"(b) {data[:20]!r} is there {count} times")
            if data not in self.puts and data not in self.doubtful:
                raise BrokenPromise(f"(e) nobody put {data[:20]!r}")
        for data in self.durable if power else self.puts:
            if data not in self.taken and not there[data]:
                raise BrokenPromise(f"(a) {data[:20]!r} is lost")

    def adopt(self, there: Counter[bytes]) -> None:
        """A new life: what was put and is there, is; for good when the queue is open again."""
        known = self.puts.keys() | self.doubtful
        self.puts = dict.fromkeys(data for data in sorted(known) if there[data] or data in self.taken)
        self.durable &= self.puts.keys()
        self.doubtful = set()

    def settle(self) -> None:
        """All that was put is on disk."""
        self.durable = set(self.puts)


def open_jobs(disk: AnyDisk, sync: Sync) -> JournaledQueue:
    return _open(disk, sync, "jobs", CONFIG)


def open_dead(disk: AnyDisk, sync: Sync) -> JournaledQueue:
    return _open(disk, sync, "dead", ReaderConfig(memory_bytes=2048))


def open_far(disk: AnyDisk) -> Reader:
    """The reader elsewhere. ``leave_readers`` ends those that a broken promise has left open."""
    clock = ManualClock(1_000_000)
    reader = open_reader("/data", "jobs", "far", config=CONFIG, create=True, start="earliest", clock=clock, disk=disk)
    far.add(reader)
    return reader


def leave_readers() -> None:
    for reader in list(far):
        if not checkpointer_of(reader).is_closed:
            bury(reader)
    far.clear()


def _open(disk: AnyDisk, sync: Sync, name: str, config: ReaderConfig) -> JournaledQueue:
    queue = JournaledQueue(
        "/data",
        name,
        sync=sync,
        segment_bytes=8192 if sync == "always" else 24_000,
        inbox_interval=None,
        default_reader=config,
        clock=ManualClock(1_000_000),
        disk=disk,
    )
    opened.add(queue)
    return queue


def read_back(reader: Reader) -> list[Item]:
    """What a reader would get, nothing of which is taken."""
    items: list[Item] = []
    try:
        while True:
            items += reader.get_many(50, timeout=0)
    except QueueEmpty:
        pass
    for item in reversed(items):
        item.abort(counts=False)
    return items


class DeadWorld(CrashingWorld[Known]):
    """Owners of a queue and of that of its dead letters, and their consumers."""

    def __init__(self, seed: int, watch: Callable[[], None], habits: Habits, *, failing: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.habits = habits
        either: tuple[Sync, ...] = ("always", "never")
        self.sync = self.random.choice(either) if habits.sync is None else habits.sync
        self.truth = Known()
        self.fails = self.random.random() < failing
        self.detached = self.random.random() < 0.25
        """Whether the reader is elsewhere, and the queue's owner only puts."""
        self.name = "far" if self.detached else ""
        self.serial = 0
        self.queue: JournaledQueue | None = None
        self.reader: Reader | None = None
        self.dead: JournaledQueue | None = None
        super().__init__(watch)

    def _start(self) -> None:
        self.queue = open_jobs(self.failing, self.sync)
        self.truth.settle()
        self.reader = self._open_reader(self.failing)

    def _open_reader(self, disk: AnyDisk) -> Reader:
        if not self.detached:
            assert self.queue is not None
            return self.queue.reader(self.name, start="earliest")
        return open_far(disk)

    def run(self) -> None:
        habits = self.habits
        steps: list[tuple[int, Callable[[], object]]] = [
            (habits.puts, self._put),
            (habits.fails, self._fail),
            (habits.commits, self._commit),
            (habits.saves, self._save),
            (habits.requeues, self._requeue),
            (habits.drops, self._drop),
            (habits.owners, self._owner_comes_or_goes),
            (habits.opens, self._reopen),
            (habits.seeks, self._seek),
            (habits.renames, self._rename),
            (habits.deaths, self._die),
        ]
        self._do(self._start)
        for _ in range(habits.steps):
            if self.fails and self.random.random() < 0.4:
                error = self.random.choice((errno.ENOSPC, errno.EIO, errno.ENOSPC))
                at, sticky = self.random.randrange(1, habits.within), self.random.random() < 0.3
                self.failing.arm(error, at=at, sticky=sticky, kinds=KINDS)
            self._do(self.random.choices([step for _, step in steps], [weight for weight, _ in steps])[0])
            if self.random.random() < 0.6:
                self.failing.disarm()

    def _do(self, step: Callable[[], object]) -> None:
        try:
            step()
        except DurabilityUnknown:
            if not self.failing.failures:
                raise
            self._die()
        except (OSError, KestrelError):
            if not self.failing.failures:
                raise
            if self.queue is None or self.queue.closed or self.reader is None:
                self._die()
        self._check_inside()

    def _check_inside(self) -> None:
        if self.queue is not None and self.reader is not None and not self.queue.closed:
            with self._undisturbed():
                self.reader._check()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        assert self.queue is not None
        for _ in range(self.random.randrange(1, 4)):
            self.serial += 1
            data = b"item|%d|%s" % (self.serial, self.random.randbytes(self.random.choice(self.habits.sizes)))
            self.truth.doubtful.add(data)
            self.queue.put(data)
            self.truth.puts[data] = None
            if self.sync == "always":
                self.truth.settle()

    def _got(self, most: int) -> list[Item]:
        assert self.reader is not None
        try:
            return self.reader.get_many(most, timeout=0)
        except QueueEmpty:
            return []

    def _fail(self) -> None:
        """Some items fail, a part of them for the last time."""
        assert self.reader is not None
        burial = checkpointer_of(self.reader).burial
        burial._is_resting = self.random.random() < 0.2  # as if a move had failed: several die, and are one move
        for item in self._got(self.random.randrange(1, 5)):
            item.abort(reason=f"it is item {item.id}")
        burial._is_resting = False
        if self.random.random() < 0.8:
            burial.run()

    def _commit(self) -> None:
        for item in self._got(self.random.randrange(1, 3)):
            self.truth.taken.add(item.data)
            item.commit()

    def _save(self) -> None:
        assert self.queue is not None
        assert self.reader is not None
        self.reader.checkpoint(self.random.random() < 0.5)
        if self.random.random() < 0.3:
            self.queue.take_in()

    def _requeue(self) -> None:
        if self.dead is None:
            self._each_letter(lambda letter: letter.requeue() if self.random.random() < 0.6 else None)
            assert self.queue is not None
            if self.random.random() < 0.5:
                self.queue.take_in()

    def _drop(self) -> None:
        def drop(letter: DeadLetter) -> None:
            if self.random.random() < 0.3:
                self.truth.taken.add(letter.data)
                letter.drop()

        if self.dead is None:
            self._each_letter(drop)

    def _each_letter(self, do: Callable[[DeadLetter], None]) -> None:
        clock = ManualClock(1_000_000)
        with dead_letters("/data", "dead", disk=self.failing, clock=clock) as letters:
            for letter in letters:
                _check_letter(letter, self.name)
                do(letter)

    def _owner_comes_or_goes(self) -> None:
        if self.dead is None:
            self.dead = open_dead(self.failing, self.sync)
        else:
            dead, self.dead = self.dead, None
            dead.close()

    def _reopen(self) -> None:
        """Close the reader, or all of it, and open it again."""
        assert self.queue is not None
        assert self.reader is not None
        self.reader.close()
        if self.random.random() < 0.6:
            self.queue.close()
            self.truth.settle()
            self.queue = open_jobs(self.failing, self.sync)
        self.reader = self._open_reader(self.failing)

    def _seek(self) -> None:
        """To where it is: what is on its way is finished, or comes again; nothing else changes."""
        assert self.reader is not None
        backlog = self.reader._backlog
        if not backlog.progress.done_spans():
            self.reader.seek(self.reader.head + 1)

    def _rename(self) -> None:
        if not self.detached and not self.name and self.random.random() < 0.3:
            assert self.queue is not None
            name = self.name = "near"
            self.reader = self.queue.reader(name)

    def _die(self) -> None:
        """All processes die, or the power goes; what is found then is how it is."""
        power = self.random.random() < 0.5
        self.disk.before_operation = None
        self._vanish()
        failed = self.failing.failures > 0
        disk = self.disk.after_kill()
        if power:
            disk = self.disk.after_power_cut(Leaning(self.random), self.random.choice(MODELS))
        there = judge(disk.after_kill(), self.sync, self.truth, self.name, power=power or failed, choose=self.random)
        self.truth.adopt(there)
        self._use(disk)
        self._start()

    def _vanish(self) -> None:
        if self.detached and self.reader is not None:
            bury(self.reader)
        for queue in (self.queue, self.dead):
            if queue is not None:
                vanish(queue, self.disk)
        self.queue = self.reader = self.dead = None


def _check_letter(letter: DeadLetter, reader: str) -> None:
    is_right = letter.queue == "jobs" and letter.reader in ("", reader) and letter.error_count >= 2
    if not is_right or letter.reason != f"it is item {letter.id}":
        raise BrokenPromise(f"(c) {letter!r}")


def judge(
    disk: CrashingDisk, sync: Sync, known: Known, name: str, *, power: bool, choose: random.Random
) -> Counter[bytes]:
    """Open both queues, in any order, and hold what they have against what is known; in some cases close and open them,
    and look again.
    """
    try:
        there = read_both(disk, sync, name, choose)
        known.check(there, power=power)
        if choose.random() < 0.4:
            later = read_both(disk, sync, name, choose)
            if later != there:
                raise BrokenPromise(f"(a) (b) there was {_brief(there)}, and later there is {_brief(later)}")
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(d) raised {error!r}") from error
    except BrokenPromise:
        raise
    except AssertionError as error:
        raise BrokenPromise(f"(f) {error}") from error
    return there


def _brief(there: Counter[bytes]) -> list[bytes]:
    return sorted(data[:12] for data in there.elements())


def read_both(disk: CrashingDisk, sync: Sync, name: str, choose: random.Random) -> Counter[bytes]:
    """What is in both queues. First both readers are opened: each carries out an intent that it finds."""
    there: Counter[bytes] = Counter()
    early = open_dead(disk, sync) if choose.random() < 0.3 else None
    letters_first = early is None and choose.random() < 0.5
    if letters_first:
        _read_letters(disk, name)
    _read_jobs(disk, sync, name)
    if not letters_first and early is None:
        _read_letters(disk, name)
    if early is not None:
        early.close()
        _read_letters(disk, name)
    there.update(_read_jobs(disk, sync, name))
    there.update(_read_letters(disk, name))
    return there


def _read_jobs(disk: CrashingDisk, sync: Sync, name: str) -> list[bytes]:
    queue = open_jobs(disk, sync)
    reader = open_far(disk) if name == "far" else queue.reader(name, start="earliest")
    queue.take_in()
    if reader._backlog.with_hook:
        raise BrokenPromise("(d) an intent is not carried out by the opening")
    items = read_back(reader)
    reader._check()
    reader.close()
    queue.close()
    return [item.data for item in items]


def _read_letters(disk: CrashingDisk, name: str) -> list[bytes]:
    if "/data" not in disk.folders:  # the power went before it was there
        return []
    clock = ManualClock(1_000_000)
    take_in("/data", "dead", disk=disk, clock=clock)
    found = []
    with dead_letters("/data", "dead", disk=disk, clock=clock) as letters:
        for letter in letters:
            _check_letter(letter, name)
            found.append(letter.data)
    return found
