"""The end of a world: everything is closed, opened again, and every acknowledged item is accounted for."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy import Item, JournaledQueue, KestrelError, QueueEmpty, Reader, verify
from kestrelpy._writing.maintenance import Maintenance
from kestrelpy._writing.syncer import Syncer
from kestrelpy.work import Job, Session, WorkQueue
from tests.use import use_job_tasks
from tests.use.use_model import QueueModel, ReaderModel, UseFailure
from tests.use.use_opening import FOLDER, check_places, end_queue, end_reader
from tests.use.use_outside import check_scan
from tests.use.use_repair import repair_at_end
from tests.use.use_tasks import turn

if TYPE_CHECKING:
    from tests.use.use_world import Process, World


def account(w: World) -> None:
    """Nobody waits any more, nothing is lost, nothing comes again, and nothing is left behind."""
    w.trouble.disarm()
    w.trouble.blocks = None
    w.trouble.meanwhile_in = 0
    w.swarm.reentrant = w.swarm.raising = 0.0
    w.nested = w.depth = 0
    rng = random.Random(0)
    w.ships.heal()
    use_job_tasks.account(w)
    for process in w.processes:
        turn(w, process)
        for reader in list(process.readers):
            if reader.handle is not None and rng.random() < 0.5:
                end_reader(w, process, reader)
        for opened in list(process.queues.values()):
            end_queue(w, process, opened)
        for reader in list(process.readers):
            if reader.handle is not None:
                end_reader(w, process, reader)
        turn(w, process)
        left = [future for future in process.futures if not future.done()]
        w.require(not left, f"{len(left)} futures are left pending by all that is closed")
        w.drop_loop(process)
        now = process.clock.monotonic()
        timers = [timer.callback for timer in timers_of(process) if not timer.cancelled and timer.deadline > now]
        kept = [
            call
            for call in timers
            if isinstance(getattr(call, "__self__", None), (JournaledQueue, Syncer, Maintenance))
        ]
        w.require(not kept, f"{len(kept)} timers are left of what is closed: {kept[:1]}")
    if w.failure is not None:
        raise w.failure
    w.ships.account()
    w.skips.settle()
    carry_out(w)
    for model in w.models.values():
        if model.made and not model.damaged:
            judge(w, model)
        elif model.made:
            repair_at_end(w, model)
    w.graves.account()


def carry_out(w: World) -> None:
    """Open all readers that have something to move, so that it is in one queue when the queues are read."""
    process = w.processes[0]
    for model in reversed(w.models.values()):
        pending = [reader for reader in model.readers.values() if reader.pending]
        if not pending or not model.made or model.damaged:
            continue
        options: dict[str, Any] = {"archive_dir": model.archive, "ship": False, "inbox_interval": None}
        with JournaledQueue(FOLDER, model.name, clock=process.clock, disk=process.disk, **options) as queue:
            for reader in pending:
                with contextlib.suppress(KestrelError):
                    w.graves.note_opening(reader, queue.reader(reader.name))
        reader.settling.clear()
        reader.dying.clear()
    w.graves.look()


def timers_of(process: Process) -> list[Any]:
    heap: Any = process.clock._heap
    return [entry[2] for entry in getattr(heap, "entries", heap)]


def judge(w: World, model: QueueModel) -> None:
    """Open the queue once more, and read what is left for each reader."""
    process = w.processes[0]
    fired, w.trouble.fired = w.trouble.fired, 0
    queue = JournaledQueue(
        FOLDER,
        model.name,
        clock=process.clock,
        disk=process.disk,
        segment_bytes=16384,
        inbox_interval=None,
        archive_dir=model.archive,
        ship=False,
    )
    try:
        w.trouble.fired = fired
        see_all(w, model)
        if not w.locks_unsure:
            check_places(w, model)
        for name in sorted(model.readers, reverse=True):
            if name or not model.named():
                drain(w, queue, model.readers[name])
        default = model.readers.get("")
        if model.named() and default is not None and default.exists:
            w.saw("a default reader beside named ones, at the end")
            for name in model.named():
                queue.drop_reader(name)
            drain(w, queue, default)
    finally:
        queue.close()
    check_scan(w, process, model, random.Random(0))
    damage = verify(FOLDER, model.name, disk=process.disk).damage
    w.require(not damage, f"at the end verify says {damage}")


def see_all(w: World, model: QueueModel) -> None:
    """Items whose puts were in doubt, or in batches: which are there?"""
    from tests.use.use_outside import see_batches

    see_batches(w, model)
    if model.batches and not w.batches_unsure and not model.may_refuse:
        raise w.fail(f"{len(model.batches)} batches were not taken in by an opening")


def drain(w: World, queue: JournaledQueue, reader: ReaderModel) -> None:
    """What is delivered must be exactly what is left."""
    try:
        handle = queue.reader(reader.name, start="tail")
    except Exception as error:
        if reader.queue.unsure:
            return
        raise w.fail(f"{reader.full_name} can't be opened at the end: {error!r}") from error
    left = {put.id: put for put in reader.available()}
    seen: list[int] = []
    while True:
        try:
            items = handle.get_many(100, timeout=0)
        except QueueEmpty:
            break
        for item in items:
            put = reader.queue.see(item.id, item.data)
            w.graves.check_delivery(reader, put, item)
            if put.id not in left and put in reader.done and put not in reader.optional:
                raise w.fail(f"{reader.full_name} delivers item {item.id} at the end, which is done")
            seen.append(item.id)
        handle.commit_many(items)
    if seen != sorted(set(seen)):
        raise w.fail(f"{reader.full_name} delivers out of order, or twice, at the end: {seen}")
    due = {put.id for put in reader.surely_left(w.now_ms)}
    w.require(
        due <= set(seen) or reader.half_dropped, f"{reader.full_name} has lost the items {sorted(due - set(seen))[:5]}"
    )
    reader.done.update(reader.queue.stored)
    reader.open.clear()


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """After worlds that have come to their ends: no thread, no descriptor, and nothing of a queue is left of them."""
    before = _left()
    yield
    after = _left()
    more = {name: count for name, count in after.items() if count > before[name]}
    if more:
        raise UseFailure(f"there are more of these than before: {more}, and were {before}")


def _left() -> dict[str, int]:
    gc.unfreeze()  # what other tests keep, and somebody has frozen, would only be seen after one who unfreezes it
    for _ in range(3):  # what a finaliser has had in hand goes with the next one
        gc.collect()
    kinds = (JournaledQueue, Reader, Item, WorkQueue, Session, Job)
    found = Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))
    threads = {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}
    return threads | {kind.__name__: found[kind.__name__] for kind in kinds}
