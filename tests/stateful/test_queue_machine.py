"""The journaled queue on a disk that crashes: reopen, kill and power cut are rules among others, and all choices are
hypothesis's.

The model: which items are acknowledged, up to which id they must survive a power cut, and what one reader has
committed, saved and saved durably. A crash may strike in the middle of a call; what that call was about may have
happened or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kestrelpy import Item, JournaledQueue, QueueEmpty, ReaderConfig
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from tests.support.budget import share
from tests.support.queues import Sync

pytestmark = pytest.mark.usefixtures("small_batches")

SIZES = st.lists(st.sampled_from([0, 3, 300, 1500]), min_size=1, max_size=3)
MODELS = st.sampled_from([PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY])
CHOICES = st.randoms(use_true_random=False)


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        sync=st.sampled_from(["always", 0.1, "never"]),
        segment_bytes=st.sampled_from([4096, 20_000]),
        archive=st.booleans(),
        other_mount=st.booleans(),
    )
    def set_up(self, sync: Sync, segment_bytes: int, archive: bool, other_mount: bool) -> None:
        self.options: dict[str, Any] = {
            "sync": sync,
            "segment_bytes": segment_bytes,
            "archive_dir": "/archive" if archive else None,
            "readers": {"r": ReaderConfig(memory_bytes=1000)},
        }
        self.disk = CrashingDisk(mounts=["/archive"] if other_mount else [])
        self.serial = 0
        self.acknowledged: dict[int, bytes] = {}
        self.in_flight: list[bytes] = []
        self.tail_id = self.durable_id = 0
        self.committed: set[int] = set()
        self.saved: set[int] = set()
        self.saved_durably: set[int] = set()
        self.open()

    def open(self) -> None:
        self.clock = ManualClock(1_000_000)
        self.queue = JournaledQueue("/data", "jobs", disk=self.disk, clock=self.clock, **self.options)
        self.reader = self.queue.reader("r", start="earliest")
        self.opened: list[Item] = []

    # -- calls -------------------------------------------------------------------------------------------------------

    def do_put(self, sizes: list[int]) -> None:
        self.serial += 1
        self.in_flight = [b"%d.%d " % (self.serial, at) + bytes(size) for at, size in enumerate(sizes)]
        items = self.in_flight
        first_id = self.queue.put(items[0]) if len(items) == 1 else self.queue.put_many(items)[0]
        assert first_id == self.tail_id + 1
        for item_id, data in enumerate(self.in_flight, first_id):
            self.acknowledged[item_id] = data
            self.tail_id = item_id
        self.in_flight = []
        if self.options["sync"] == "always":
            self.durable_id = self.tail_id

    def do_sync(self) -> None:
        self.queue.sync()
        self.durable_id = self.tail_id

    def do_checkpoint(self, durable: bool) -> None:
        self.queue.checkpoint(durable)
        self.saved = set(self.committed)
        if durable:
            self.saved_durably = set(self.committed)

    def do_reopen(self) -> None:
        self.queue.close()
        self.durable_id = self.tail_id
        self.saved = set(self.committed)
        self.saved_durably = set(self.committed)
        self.open()

    def do_advance(self) -> None:
        self.clock.advance(1.5)
        if self.options["sync"] == 0.1:
            self.durable_id = self.tail_id

    @rule(sizes=SIZES)
    def put(self, sizes: list[int]) -> None:
        self.do_put(sizes)

    @rule(count=st.integers(1, 6))
    def get(self, count: int) -> None:
        try:
            items = self.reader.get_many(count, timeout=0)
        except QueueEmpty:
            assert set(self.acknowledged) == self.committed | {item.id for item in self.opened}
            return
        for item in items:
            assert item.data == self.acknowledged[item.id]
            assert item.id not in self.committed
            assert item.id not in {other.id for other in self.opened}
            self.opened.append(item)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.opened), unique_by=id)) if self.opened else []
        self.reader.commit_many(chosen)
        self.committed |= {item.id for item in chosen}
        self.opened = [item for item in self.opened if item not in chosen]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.opened:
            item = self.opened.pop(data.draw(st.integers(0, len(self.opened) - 1)))
            item.abort()
            assert self.reader.peek().id <= item.id

    @rule()
    def sync(self) -> None:
        self.do_sync()

    @rule(durable=st.booleans())
    def checkpoint(self, durable: bool) -> None:
        self.do_checkpoint(durable)

    @rule()
    def advance(self) -> None:
        self.do_advance()

    @rule()
    def reopen(self) -> None:
        self.do_reopen()

    # -- crashes -----------------------------------------------------------------------------------------------------

    @rule()
    def kill(self) -> None:
        self.crash(self.disk.after_kill(), power=False)

    @rule(choose=CHOICES, model=MODELS)
    def cut_the_power(self, choose: Any, model: PowerModel) -> None:
        self.crash(self.disk.after_power_cut(choose, model), power=True)

    @rule(
        sizes=SIZES,
        call=st.sampled_from(["put", "sync", "checkpoint", "reopen", "advance"]),
        at=st.integers(1, 12),
        choose=CHOICES,
        model=st.none() | MODELS,
    )
    def crash_in_the_middle(self, sizes: list[int], call: str, at: int, choose: Any, model: PowerModel | None) -> None:
        """The ``at``-th operation of a call is not done, or in part: the model stays as before the call."""
        calls: dict[str, Callable[[], None]] = {
            "put": lambda: self.do_put(sizes),
            "sync": self.do_sync,
            "checkpoint": lambda: self.do_checkpoint(True),
            "reopen": self.do_reopen,
            "advance": self.do_advance,
        }
        left, crashed = at, None
        before: dict[str, Any] = {}

        def watch() -> None:
            nonlocal left, crashed
            left -= 1
            if left == 0:
                crashed = self.disk.after_kill(choose)
                before["in_flight"] = list(self.in_flight)

        kept = (dict(self.acknowledged), self.tail_id, self.durable_id, set(self.saved), set(self.saved_durably))
        self.disk.before_operation = watch
        calls[call]()
        self.disk.before_operation = None
        if crashed is not None:
            self.acknowledged, self.tail_id, self.durable_id, self.saved, self.saved_durably = kept
            self.in_flight = before["in_flight"]
            power = model is not None
            self.crash(crashed.after_power_cut(choose, model) if model else crashed, power=power)

    def crash(self, disk: CrashingDisk, *, power: bool) -> None:
        """Go on with this disk; everything that was promised must be on it, and nothing else."""
        self.vanish()
        self.disk = disk
        self.open()
        try:
            while True:
                self.opened += self.reader.get_many(50, timeout=0)
        except QueueEmpty:
            pass
        seen = {item.id: item.data for item in self.opened}
        assert list(seen) == sorted(seen)
        known = {**self.acknowledged, **dict(enumerate(self.in_flight, self.tail_id + 1))}
        assert seen.items() <= known.items()
        started = seen.keys() - self.acknowledged.keys()
        assert len(started) in (0, len(self.in_flight))
        kept_id = self.durable_id if power else self.tail_id
        must = {item_id for item_id in self.acknowledged if item_id <= max(kept_id, max(seen, default=0))}
        assert must - self.committed <= seen.keys()
        assert not (self.saved_durably if power else self.saved) & seen.keys()
        self.acknowledged = {key: data for key, data in known.items() if key in seen or key <= kept_id}
        self.in_flight = []
        self.committed = self.acknowledged.keys() - seen.keys()
        self.saved = set(self.committed)
        self.saved_durably = set(self.committed) if power else self.saved_durably & self.committed
        tail_id = self.queue.stats().tail_id
        assert tail_id >= max(self.acknowledged, default=0)
        assert tail_id >= self.reader.head
        self.tail_id = self.durable_id = tail_id

    def vanish(self) -> None:
        self.disk.kill()
        forget(self.queue)
        self.queue._abandon()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "queue"):
            self.queue._check()
            self.disk._check()
            assert self.reader.items == len(self.acknowledged.keys() - self.committed)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.vanish()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=max(100, share(400)),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
