"""Ctrl-C at any place of an abort with a delay, of one that makes an item dead, of a requeue, and of a seek that has to
end a move first: each item is there once, no lock is held, and what was begun is finished.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kestrelpy import DeadLetter, Item, JournaledQueue, QueueEmpty, Reader, ReaderConfig, dead_letters
from kestrelpy._reading.delays import Delays
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.dead_queue import DeadLetters
from kestrelpy.inbox import moves
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.interrupts.strikes import Interrupter, interrupter_at, watchdog
from tests.support.budget import SEED, Tally, share

CONFIG = ReaderConfig(max_deliveries=1, dead_letter="dead")
PLACES = share(600)
DATA = [b"a", b"b", b"c"]


class Setting:
    """A queue of three items on a disk in memory; the calls that are struck; and what must hold after each."""

    def __init__(self, config: ReaderConfig = CONFIG) -> None:
        self.clock = ManualClock(1_000_000)
        self.disk = MemoryDisk()
        self.queue = self.open(config)
        self.queue.put_many(DATA)
        self.letters: DeadLetters | None = None

    def open(self, config: ReaderConfig = CONFIG) -> JournaledQueue:
        return JournaledQueue(
            "/q", "jobs", default_reader=config, disk=self.disk, clock=self.clock, inbox_interval=None
        )

    def got(self, count: int) -> list[Item]:
        return self.queue.get_many(count, timeout=0)

    def look(self) -> Counter[bytes]:
        """No lock is held; what was begun is finished by another call; then all that is in the two queues."""
        reader = self.queue.reader()
        saver = checkpointer_of(reader)
        for lock in (saver.burial.moving, saver.lock, reader._backlog.lock):
            assert lock.acquire(False), "a lock is held"
            lock.release()
        reader._check()
        assert not saver.burial._pauses
        saver.burial._is_resting = False
        saver.burial.run()
        assert not reader._backlog.with_hook
        self.clock.advance(100)
        if self.letters is not None:
            self.letters.close()
        self.queue.take_in()
        there = Counter(rest_of(reader))
        there.update(item.data for item in reader._backlog.opened.values() if not there[item.data])
        self.queue.close()
        for _ in range(2):  # an intent of the letters' reader is carried out by its opening
            with dead_letters("/q", "dead", disk=self.disk, clock=self.clock) as letters:
                dead = [letter.data for letter in letters]
        with self.open() as queue:
            queue.take_in()
            again = Counter(rest_of(queue.reader()))
        again.update(dead)
        return again


def rest_of(reader: Reader) -> list[bytes]:
    try:
        return [item.data for item in reader.get_many(100, timeout=0)]
    except QueueEmpty:
        return []


def aborting_later(_: Interrupter) -> tuple[Setting, Callable[[], object]]:
    setting = Setting(ReaderConfig(retry_delay=2.0))
    items = setting.got(2)
    return setting, items[0].abort


def dying(_: Interrupter) -> tuple[Setting, Callable[[], object]]:
    setting = Setting()
    items = setting.got(2)
    return setting, lambda: items[0].abort(reason="it fails")


def putting_back(_: Interrupter) -> tuple[Setting, Callable[[], object]]:
    setting = Setting()
    for item in setting.got(2):
        item.abort()
    setting.letters = dead_letters("/q", "dead", disk=setting.disk, clock=setting.clock)
    letter: DeadLetter = next(setting.letters)
    return setting, letter.requeue


def seeking(_: Interrupter) -> tuple[Setting, Callable[[], object]]:
    """The move of the item has failed, so that the seek has to know what became of it."""
    setting = Setting()
    real = moves.publish_move

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "it breaks")

    moves.publish_move = fail
    try:
        setting.got(1)[0].abort()
    finally:
        moves.publish_move = real
    return setting, lambda: setting.queue.seek(1)


OPERATIONS = (aborting_later, dying, putting_back, seeking)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: str(each.__name__))
def test_each_item_is_there_once_after_an_interrupt(
    operation: Callable[[Interrupter], tuple[Setting, Callable[[], object]]], tally: Tally
) -> None:
    striker = interrupter_at(0)
    setting, call = operation(striker)
    assert not striker.run(call)
    assert setting.look() == Counter(DATA)
    places = list(range(1, striker.places + 1))
    chosen = places if len(places) <= PLACES else random.Random(SEED).sample(places, PLACES)
    struck = 0
    for at in chosen:
        striker = interrupter_at(at)
        setting, call = operation(striker)
        with watchdog(20):
            struck += striker.run(call)
            there = setting.look()
        assert there == Counter(DATA), f"place {at}, {striker.where}: {there}"
    tally.add("interrupts of dead letters", struck)
    assert struck > len(chosen) // 2


def test_the_timer_of_a_delay_is_there_after_an_interrupt() -> None:
    """An item whose delay was noted is due, timer or not, at the next get that finds nothing else."""
    setting = Setting(ReaderConfig(retry_delay=2.0))
    first = setting.got(3)[0]
    real = Delays.arm_locked

    def arm_locked(self: Delays) -> None:
        real(self)
        raise KeyboardInterrupt

    Delays.arm_locked = arm_locked  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            first.abort()
    finally:
        Delays.arm_locked = real  # type: ignore[method-assign]
    setting.clock.advance(2)
    assert rest_of(setting.queue.reader()) == [b"a"]
    setting.queue.close()
