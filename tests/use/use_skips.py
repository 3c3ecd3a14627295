"""``LagPolicy.SKIP``: which readers may be moved forward, how far, and what is said of it.

Rules:
1. What a reader is moved past is done, for good; its figure ``skipped`` counts exactly that.
2. It is moved only if it is further behind than its limit, and a look later it is within it.
3. Whoever opens a reader that was moved while nobody had it open is told by how many items.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from kestrelpy import KestrelError, LagPolicy, Reader
from tests.use.use_model import Put, ReaderModel, drops

if TYPE_CHECKING:
    from tests.use.use_world import World

SAID: deque[str] = deque(maxlen=100)
"""What the library has logged as warnings."""
LOOKED_WITHIN = 4.0
"""Seconds within which every owner looks how far its readers are behind."""


def log(text: str, *arguments: object, error: bool = False) -> None:
    """Stands in for the warnings of the library."""
    del error
    SAID.append(text % arguments)


def skips(reader: ReaderModel) -> bool:
    return reader.config is not None and reader.config.lag_policy is LagPolicy.SKIP


def bytes_from(reader: ReaderModel, item_id: int) -> int:
    return sum(len(put.data) for put in reader.queue.stored if put.id >= item_id)


class Skips:
    """What is known of it in one world. ``counted``: the figures of open readers, when they were looked at last."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counted: dict[int, int] = {}
        self.through: dict[ReaderModel, tuple[int, int]] = {}
        """Up to which id a reader was moved, if it was not moved back since."""

    def options(self, rng: random.Random) -> dict[str, Any]:
        if "lag skips" not in self.world.swarm.options or rng.random() < 0.3:
            return {}
        return {"max_lag_bytes": rng.choice((500, 3000, 20_000)), "lag_policy": LagPolicy.SKIP}

    def passed(self, reader: ReaderModel, head: int) -> list[Put]:
        """What is done by now, and was not before."""
        return [put for put in reader.queue.stored if put.id <= head and put not in reader.done]

    def is_exact(self, reader: ReaderModel) -> bool:
        w, model = self.world, reader.queue
        doubtful = model.holes or model.flying or model.damaged or model.erased or model.expires or model.unsure
        aged = reader.config is not None and reader.config.max_age is not None
        return not (doubtful or aged or drops(reader.config) or reader.optional or reader.settling or w.swarm.ships)

    def look(self) -> None:
        """After a step: who was moved?"""
        if "lag skips" not in self.world.swarm.options:
            return
        self._doubt_absent()
        self.settle()
        for reader in self.world.open_readers():
            handle = reader.handle
            if handle is None or not skips(reader) or handle._backlog.broken is not None:
                continue
            with self.world.ships.alone():  # this is no call of a process: one that came in between would wait for it
                skipped = _skipped(handle)
            count = skipped - self.counted.get(id(handle), 0)
            self.counted[id(handle)] = skipped
            passed = self.passed(reader, handle.head)
            exact = self.is_exact(reader)
            if exact:
                what = f"{reader.full_name} has {len(passed)} items less, and says that it was moved past {count}"
                self.world.require(len(passed) == count, what)
            if not count:
                continue
            if exact and passed and reader.config is not None:
                behind = bytes_from(reader, passed[0].id)
                what = f"{reader.full_name} was moved, {behind} bytes behind, of {reader.config.max_lag_bytes}"
                self.world.require(behind > (reader.config.max_lag_bytes or 0), what)
            self.world.saw("a reader is moved forward")
            self.through[reader] = handle.head, reader.seeks
            for put in passed:
                reader.arrived(put)

    def settle(self) -> None:
        """Puts may return after the reader was moved past their items."""
        for reader, (head, seeks) in self.through.items():
            for put in self.passed(reader, head) if seeks == reader.seeks else ():
                reader.doubt([put])

    def _doubt_absent(self) -> None:
        """Whom nobody has open, the owner of the queue moves."""
        for process in self.world.processes:
            for opened in process.queues.values():
                for reader in opened.model.readers.values():
                    config = opened.config(reader.name)
                    left = [put for put in opened.model.stored if put not in reader.done]
                    if reader.handle is not None or config.lag_policy is not LagPolicy.SKIP or not left:
                        continue
                    if bytes_from(reader, left[0].id) > (config.max_lag_bytes or 0):
                        reader.optional.update(left)

    def at_opening(self, reader: ReaderModel, handle: Reader) -> None:
        """It may have been moved while nobody had it open."""
        if "lag skips" not in self.world.swarm.options:
            return
        if reader.handle is handle:
            return  # a default reader that gets a name
        count, passed = _skipped(handle), self.passed(reader, handle.head)
        self.counted[id(handle)] = count
        sure = [put for put in passed if put not in reader.optional and not reader.is_expired(put, self.world.now_ms)]
        if reader.queue.damaged or reader.queue.unsure or self.world.depth:
            return
        if count:
            text = f"reader {reader.full_name} was moved past {count:,} items since it was opened last"
            self.world.require(any(text in each for each in SAID), f"nobody was told: {text}")
            self.world.saw("a reader was moved while nobody had it open")
        if len(sure) <= count:
            for put in sure:
                reader.arrived(put)

    def check_within(self) -> None:
        """Time has passed: nobody is too far behind any more."""
        w = self.world
        if w.trouble.fired or w.trouble.times or "full" in w.tags or w.swarm.ships or w.locks_unsure:
            return
        for reader in w.open_readers():
            config, model = reader.config, reader.queue
            if config is None or not skips(reader) or model.failed or model.damaged or model.erased or model.flying:
                continue
            if reader.handle is None or reader.handle._backlog.broken is not None or model.holes:
                continue
            behind = bytes_from(reader, reader.handle.head + 1)
            what = f"{reader.full_name} stays {behind} bytes behind, of {config.max_lag_bytes}"
            w.require(behind <= (config.max_lag_bytes or 0), what)


def _skipped(handle: Reader) -> int:
    try:
        return handle.stats().skipped
    except (KestrelError, OSError):
        return 0
