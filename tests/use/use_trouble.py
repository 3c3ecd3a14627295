"""Operations that are not calls: time, the disk's troubles, the collector, and what is repeated many times."""

from __future__ import annotations

import errno
import gc
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

from kestrelpy import Item, KestrelError, LagPolicy, QueueLocked, ReaderConfig
from kestrelpy._disk.memory import MemoryNode
from kestrelpy._reading.retries import is_plain
from tests.use.use_disk import UseDisk
from tests.use.use_model import QueueModel
from tests.use.use_opening import FOLDER
from tests.use.use_operations import choose_opened, choose_reader, is_here, operation, settle_puts
from tests.use.use_outside import check_batches, choose_model, see_batches
from tests.use.use_skips import LOOKED_WITHIN

if TYPE_CHECKING:
    from tests.use.use_world import Process, World


FORGOTTEN = 8.0
"""So many seconds after the disk is well nothing is wrong any more: everybody has looked again, and tried again."""

# -- time ----------------------------------------------------------------------------------------------------------


@operation("advance", 3, nestable=False)
def advance(w: World, rng: random.Random, process: Process) -> None:
    del process
    pass_time(w, rng.choice((0.0, 0.05, 0.11, 0.5, 1.0, 1.1, 5.0)))


def pass_time(w: World, seconds: float) -> None:
    w.now_ms += round(seconds * 1000)
    w.elapsed += seconds
    w.ships.pass_time(seconds)
    w.skips.look()
    w.advancing = True
    for process in w.processes:
        until = process.clock.monotonic() + seconds
        for _ in range(20):
            result = w.call(process, _advance(process), max(0.0, until - process.clock.monotonic()))
            if not result.interrupted:
                break
    w.advancing = False
    for process in w.processes:
        process.deadlines = [each for each in process.deadlines if not each[1].done()]
        late = [deadline for deadline, _ in process.deadlines if deadline < process.clock.monotonic()]
        w.require(not late, f"{len(late)} futures have not timed out")
    if w.mended_at is not None and w.elapsed - w.mended_at > FORGOTTEN:
        w.trouble.fired = w.trouble.refused_blocks = 0  # from here on it is no excuse
        w.mended_at = None
    for model in w.models.values():
        see_batches(w, model)
    w.graves.look()
    w.graves.check_waiting()
    w.skips.look()
    if seconds > LOOKED_WITHIN:
        w.skips.check_within()
    check_batches(w)


def _advance(process: Process) -> Callable[[float], None]:
    def run(seconds: float) -> None:
        """Raises nothing of the library's."""
        process.clock.advance(seconds)

    return run


@operation("jump", 0.3, nestable=False)
def jump(w: World, rng: random.Random, process: Process) -> None:
    del process
    seconds = rng.choice((-3600, -2, 2, 3600))
    if seconds < 0:
        for model in w.models.values():
            for reader in model.readers.values():
                reader.doubt_expired()
    w.now_ms += seconds * 1000
    w.jumps += 1
    for each in w.processes:
        each.clock.jump(seconds)
    w.saw("the clock jumps back" if seconds < 0 else "the clock jumps")


# -- the disk ------------------------------------------------------------------------------------------------------

KINDS = {
    "EMFILE": (errno.EMFILE, ("open", "create", "lock", "directory")),
    "ENOSPC": (errno.ENOSPC, ("write", "grow", "create")),
    "EIO": (errno.EIO, ("read", "write", "rename", "names")),
    "EACCES": (errno.EACCES, ("open", "create", "unlink", "rename", "lock")),
    "sync": (errno.EIO, ("sync", "sync_directory")),
}


@operation("fault", 0.7, nestable=False)
def fault(w: World, rng: random.Random, process: Process) -> None:
    del process
    kinds = sorted(w.swarm.faults & KINDS.keys())
    if not kinds:
        return
    name = rng.choice(kinds)
    error, operations = KINDS[name]
    w.mended_at = None
    w.trouble.arm(error, operations, after=rng.choice((0, 0, 1, 3, 10)), times=rng.choice((1, 1, 2, 30)))
    w.tags.add(name)
    w.saw("something is wrong with the disk")


@operation("mend", 0.7, nestable=False)
def mend(w: World, rng: random.Random, process: Process) -> None:
    del rng, process
    w.trouble.disarm()
    w.trouble.blocks = None
    if "sync" not in w.swarm.faults:  # a sync that failed once is never believed again, by readers elsewhere too
        w.mended_at = w.elapsed
    if w.tags & {*KINDS, "full"}:
        w.saw("the disk is well again")
    w.tags -= {*KINDS, "full"}


@operation("fill", 0.3, nestable=False)
def fill(w: World, rng: random.Random, process: Process) -> None:
    """Somebody else takes the room that is left."""
    del process
    if "full" in w.swarm.faults:
        w.mended_at = None
        w.trouble.blocks = w.disk.used_blocks() + rng.choice((0, 0, 1, 2))
        w.tags.add("full")
        w.saw("zero free blocks")


def files_of(w: World, model: QueueModel, end: str) -> list[str]:
    names = w.disk.folders[FOLDER].names
    return sorted(
        name for name in names if name.startswith((model.name + ".", model.name + "+")) and name.endswith(end)
    )


@operation("flip", 0.15, nestable=False)
def flip(w: World, rng: random.Random, process: Process) -> None:
    """One bit of a segment is flipped."""
    del process
    if "flip" not in w.swarm.faults:
        return
    model = choose_model(w, rng)
    segments = files_of(w, model, ".segment")
    if segments:
        node = cast("MemoryNode", w.disk.folders[FOLDER].names[rng.choice(segments)])
        used = len(bytes(node.data).rstrip(b"\0"))
        if used > 100:
            node.data[rng.randrange(64, used)] ^= 1 << rng.randrange(8)
            model.damaged = True
            w.tags.add("damaged")
            w.saw("one flipped bit")


@operation("delete", 0.15, nestable=False)
def delete(w: World, rng: random.Random, process: Process) -> None:
    """Somebody deletes a file."""
    del process
    if "delete" not in w.swarm.faults:
        return
    model = choose_model(w, rng)
    if model.writer is not None or any(reader.process for reader in model.readers.values()):
        return  # nobody promises anything where files go under an open queue
    files = [*files_of(w, model, ".checkpoint"), *files_of(w, model, ".segment")]
    if files:
        name = rng.choice(files)
        del w.disk.folders[FOLDER].names[name]
        for reader in model.readers.values():
            if name == f"{model.name}+{reader.name}.checkpoint":  # it begins anew
                reader.doubt_all()
        model.damaged = True
        w.tags.add("damaged")
        w.saw("a deleted file")


@operation("stop", 0.3, nestable=False)
def stop(w: World, rng: random.Random, process: Process) -> None:
    """A process is stopped (SIGSTOP, a debugger) while it makes a reader: nobody's maintenance may wait for it."""
    model = choose_model(w, rng)
    if not model.made:
        return  # to make a reader makes the queue
    stopped = UseDisk(w.disk)
    try:
        lock = stopped.directory(FOLDER).lock(f"{model.name}.readers.lock")
    except (OSError, QueueLocked):
        return
    waited = [each.disk.waited for each in w.processes]
    pass_time(w, 1.2)
    calm = waited == [each.disk.waited for each in w.processes] or w.nested
    w.require(calm, "maintenance waits for a process that is stopped")
    lock.release()
    w.saw("a process is stopped")
    del process


# -- the collector -------------------------------------------------------------------------------------------------


@operation("collector", 0.7, nestable=False)
def collector(w: World, rng: random.Random, process: Process) -> None:
    """One step during which the collector runs at every so many allocations."""
    name = rng.choice(("put", "get_many", "get_many")) if rng.random() < 0.6 else w.swarm.draw_nested(rng)
    if name is None:
        return
    before = gc.get_threshold()
    gc.set_threshold(rng.choice((1, 2, 5, 10, 20, 40)))
    gc.enable()
    try:
        w.run_step(name, rng, process)
    finally:
        gc.disable()
        gc.set_threshold(*before)


def may_refuse(config: ReaderConfig) -> bool:
    """Whether a put may be refused for a reader that commits nothing."""
    lags = config.max_lag_bytes is not None or config.max_lag_age is not None
    return bool(config.max_items or config.max_bytes) or (lags and config.lag_policy is LagPolicy.REFUSE)


@operation("chain", 0.1, nestable=False)
def chain(w: World, rng: random.Random, process: Process) -> None:
    """Three hundred futures wait, and the callback of each puts the next item."""
    reader, opened = choose_reader(w, rng, process), choose_opened(rng, process)
    if reader is None or opened is None or reader.queue is not opened.model or not is_here(process, reader):
        return
    configs = [opened.options.get("default_reader"), *opened.options["readers"].values()]
    limited = any(config is not None and may_refuse(config) for config in configs)
    limited = limited or opened.options.get("max_journal_bytes") is not None
    busy = reader.available() or reader.waiting or reader.queue.flying or w.trouble.times or "full" in w.tags
    limited = limited or getattr(opened.options.get("ship"), "acks", "disk") == "shipped"  # then each put waits
    if limited or busy or opened.options.get("codec") is not None or opened.queue._status.error is not None:
        return
    left = [300]

    def go_on() -> None:
        put = w.new_put(opened.model, rng, None, 0)
        result = w.call(process, opened.queue.put, put.data)
        settle_puts(w, process, opened, [put], result, w.nested - 1)

    def arrive(done: Future[Item]) -> None:
        reader.waiting -= 1
        w.nested += 1
        if not done.cancelled() and done.exception() is None:
            w.deliver(reader, done.result(), exact=False)
            left[0] -= 1
            if left[0]:
                go_on()

    assert reader.handle is not None
    for _ in range(300):
        reader.waiting += 1
        reader.handle.get_future().add_done_callback(arrive)
    go_on()
    w.require(
        not left[0] or opened.queue._status.error is not None, f"a chain of callbacks ends {left[0]} items too early"
    )
    w.saw("a chain of callbacks")


# -- again and again -----------------------------------------------------------------------------------------------


@operation("repeat", 0.25, nestable=False)
def repeat(w: World, rng: random.Random, process: Process) -> None:
    """What changes nothing, a hundred times: memory must not grow by it."""
    reader, opened = choose_reader(w, rng, process), choose_opened(rng, process)
    if reader is None or reader.handle is None or w.trouble.times or reader.waiting:
        return
    handle = reader.handle
    hooked = reader.config is not None and not is_plain(reader.config)  # that would kill the item, or wait
    hooked = hooked or any(
        getattr(reader.config, name, None) for name in ("on_abort", "on_delivery", "on_timeout", "on_expired")
    )
    if hooked or reader.queue.failed or reader.queue.damaged or reader.queue.erased:
        return
    choices = ["peek", "get and abort", "future"]
    if opened is not None:
        choices.append("a put that is refused")
    what = rng.choice(choices)
    aborted: dict[int, bytes] = {}

    def once() -> None:
        try:
            if what == "peek":
                handle.peek()
            elif what == "get and abort":
                item = handle.get_nowait()
                aborted[item.id] = item.data
                item.abort()
            elif what == "future":
                handle.get_future(3600.0).cancel()
            else:
                assert opened is not None
                opened.queue.put(b"never", timeout=-1)
        except (KestrelError, ValueError):
            pass

    if what == "future" and (reader.surely_left(w.now_ms) or reader.optional or reader.queue.unsettled()):
        return
    for _ in range(40):
        once()
    gc.freeze()  # what is older is not looked at: that would take its time
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(150):
        once()
    gc.collect()
    grown = sys.getallocatedblocks() - before
    gc.unfreeze()
    for item_id, data in aborted.items():
        put = reader.queue.see(item_id, data)  # its put may be under way
        reader.most_errors[put] = 1 << 30
        reader.doubt_errors(put)
    w.require(grown < 450, f"150 times {what!r}: {grown} blocks of memory more")
    w.saw("the same again and again")
