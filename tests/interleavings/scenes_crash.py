"""Scenes that end at any point of a schedule, as by a kill or a power cut; then the files are opened again.

What must be there: with ``sync="always"`` and after a kill, every acknowledged item that was not committed. After a
power cut in the other modes: everything up to some item. What was committed before a checkpoint that returned does not
come again.
"""

from __future__ import annotations

from kestrelpy import DurabilityUnknown, JournaledQueue, QueueClosed, QueueEmpty, Reader
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from tests.interleavings.journal_work import Work
from tests.interleavings.scene import Ledger, Scene, YieldingCrashingDisk, require
from tests.interleavings.standins import START_MS

LAST_POINT = 900
MODELS = (None, PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY)
"""``None`` is a kill."""


class Crash:
    """The moment of the crash: the disk, and what had been promised by then."""

    def __init__(self, scene: Scene, work: Work) -> None:
        self.scene = scene
        self.work = work
        self.model = scene.rng.choice(MODELS)
        self.saved: dict[str, set[int]] = {"kill": set(), "power": set()}
        self.disk: CrashingDisk | None = None
        self.promised = Ledger(scene)
        self.kept: set[int] = set()
        scene.scheduler.stop_at = scene.scheduler.points + scene.rng.randrange(1, LAST_POINT)
        scene.scheduler.on_stop = self.strike
        scene.afterwards = self.check

    def strike(self) -> None:
        disk, rng = self.work.disk, self.scene.rng
        assert isinstance(disk, CrashingDisk)
        self.disk = disk.after_kill(rng) if self.model is None else disk.after_power_cut(rng, self.model)
        ledger = self.work.ledger
        self.promised.acknowledged = dict(ledger.acknowledged)
        self.promised.doubtful = ledger.doubtful.copy()
        self.promised.refused = set(ledger.refused)
        for reader in ledger.open:
            self.promised.committed[reader] = set(ledger.committed[reader])
            self.promised.settling[reader] = set(ledger.settling[reader])
        self.kept = set(self.saved["kill" if self.model is None else "power"])

    def check(self) -> None:
        if self.disk is None:  # it was over before
            self.strike()
        assert self.disk is not None
        queue = JournaledQueue(
            "/data", "jobs", sync="never", disk=self.disk, clock=ManualClock(START_MS), inbox_interval=None
        )
        try:
            rest = {}
            reader = queue.reader()
            while True:
                try:
                    item = reader.get_nowait()
                except QueueEmpty:
                    break
                rest[item.id] = item.data
                item.commit()
            again = self.kept & rest.keys()
            require(not again, f"given again after their checkpoint: {sorted(again)}")
            if self.model is not None and self.work.sync != "always":
                end = max(rest, default=0)
                self.promised.acknowledged = {
                    item_id: data for item_id, data in self.promised.acknowledged.items() if item_id <= end
                }
            self.promised.check_rest("", rest, crashed=True)
        finally:
            queue.close()

    def consume(self, reader: Reader) -> None:
        """As ``Work.consume``, with checkpoints of its own."""
        ledger = self.work.ledger
        while True:
            try:
                item = reader.get()
                ledger.deliver("", item)
                ledger.settle(reader, item)
                if self.scene.chance(0.3):
                    durable = self.scene.chance(0.5)
                    before = set(ledger.committed[""])
                    reader.checkpoint(durable)
                    self.saved["kill"] |= before
                    if durable:
                        self.saved["power"] |= before
            except (QueueClosed, DurabilityUnknown):
                return


def cut(scene: Scene) -> None:
    """Puts, commits, checkpoints, rotations and retiring; then nothing more."""
    rng = scene.rng
    work = Work(
        scene,
        YieldingCrashingDisk(scene),
        sync=rng.choice(("always", "always", 0.1, "never")),
        segment_bytes=rng.choice((4096, 4096, 1 << 20)),
        checkpoint_interval=0.2,
    )
    reader = work.reader("")
    crash = Crash(scene, work)
    producers = [scene.start(work.produce, f"p{at}", rng.randrange(2, 6)) for at in range(rng.randrange(2, 4))]
    consumer = scene.start(crash.consume, reader)
    for task in producers:
        task.join()
    if scene.chance(0.5):
        work.queue.checkpoint()
    if scene.chance(0.5):
        work.settle_all(reader)
    work.queue.close()
    consumer.join()


SCENES = (cut,)
