"""Operations of asyncio: tasks that wait, are cancelled, are thrown away with their loop."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, cast

from kestrelpy._disk.memory import MemoryNode
from tests.use.use_model import Put, QueueModel
from tests.use.use_opening import FOLDER
from tests.use.use_operations import choose_opened, choose_reader, operation, settle_puts
from tests.use.use_trouble import files_of
from tests.use.use_writing import draw_expiry, draw_puts, value_of

if TYPE_CHECKING:
    from tests.use.use_world import Process, World


def loop_of(process: Process) -> asyncio.AbstractEventLoop:
    if process.loop is None:
        process.loop = asyncio.new_event_loop()
    return process.loop


def is_thrown(error: BaseException) -> bool:
    """Whether a hook of ours has thrown it: it may come out of the loop, and later."""
    return isinstance(error, SystemExit | MemoryError) and str(error).startswith("thrown by")


def turn(w: World, process: Process) -> None:
    """Let the loop of a process do what is ready."""
    if process.loop is None or process.loop.is_running() or asyncio._get_running_loop() is not None:
        return
    process.busy += 1
    try:
        for _ in range(4):
            try:
                process.loop.run_until_complete(asyncio.sleep(0))
            except BaseException as error:
                if not is_thrown(error):
                    raise
    finally:
        process.busy -= 1
    threads = threading.active_count() - len(w.ships.courier.threads)
    w.require(threads <= w.threads, f"tasks that wait have taken {threads - w.threads} threads")
    for task in [task for task in process.tasks if task.done()]:
        process.tasks.remove(task)
        if not task.cancelled() and (raised := task.exception()) is not None and not is_thrown(raised):
            raise w.fail(f"a task has ended with {raised!r}") from raised


@operation("aget", 1)
def aget(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None or asyncio._get_running_loop() is not None:
        return
    handle, timeout = reader.handle, rng.choice((None, None, 0, 1.0))

    async def consume() -> None:
        reader.waiting += 1
        try:
            item = await handle.aget(timeout)
        except asyncio.CancelledError:
            raise
        except GeneratorExit:  # the task was thrown away: what it had in hand goes back a moment later
            if reader.handle is handle:
                reader.returning.update(reader.available())
                reader.settling |= reader.returning
            raise
        except Exception as error:
            w.judge(handle.aget, error)
            return
        finally:
            reader.waiting -= 1
            w.nested += 1
        if handle.is_open(item) and w.handles.get(id(handle)) is reader:
            w.deliver(reader, item, exact=False)
        else:
            reader.queue.see(item.id, item.data)
        w.saw("a task has got an item")

    process.tasks.append(loop_of(process).create_task(consume()))
    turn(w, process)


@operation("aput", 1)
def aput(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None or asyncio._get_running_loop() is not None:
        return
    puts = draw_puts(w, rng, opened, 1)
    options = draw_expiry(w, rng, opened, puts)
    if rng.random() < 0.4:
        options["timeout"] = rng.choice((None, 1.0, 30.0))
    put = puts[0]
    value = value_of(opened, puts[0], rng)
    from tests.use.use_world import Result

    async def produce() -> None:
        try:
            result = Result(await opened.queue.aput(value, **options))
        except asyncio.CancelledError:
            if put in opened.model.flying:
                if is_stored(w, opened.model, put):
                    opened.model.holes = True  # it stays under way: readers here see it when it is on disk
                else:  # it waited for room
                    opened.model.refuse(put)
                    w.saw("a cancelled aput")
            raise
        except Exception as error:
            result = w.judge(opened.queue.aput, error)
        if puts[0] in opened.model.flying and not (opened.model.is_going or opened.model.erased):
            settle_puts(w, process, opened, puts, result, -1)  # other steps were between
        w.saw("a task has put an item")

    process.tasks.append(loop_of(process).create_task(produce()))
    turn(w, process)


def is_stored(w: World, model: QueueModel, put: Put) -> bool:
    """Whether the item is in the files, or may have been."""
    if put.id or model.writer is None or model.damaged:  # damaged: its bytes may be others now
        return True
    if model.writer.queues[model.name].queue._source.first_id > 1:
        return True  # it may have been retired
    folder = cast("dict[str, MemoryNode]", w.disk.folders[FOLDER].names)
    return any(put.data in bytes(folder[name].data) for name in files_of(w, model, ".segment"))


@operation("loop", 2)
def loop_on(w: World, rng: random.Random, process: Process) -> None:
    del rng
    w.did = bool(process.tasks)
    turn(w, process)


@operation("cancel_task", 0.7)
def cancel_task(w: World, rng: random.Random, process: Process) -> None:
    if process.tasks:
        rng.choice(process.tasks).cancel()
        w.saw("a task is cancelled")
        if rng.random() < 0.7:
            turn(w, process)


@operation("abandon_loop", 0.4)
def abandon_loop(w: World, rng: random.Random, process: Process) -> None:
    """A loop is closed with its tasks still waiting, and all of it is thrown away."""
    del rng
    if process.loop is not None and not process.loop.is_running():
        w.saw("a loop is thrown away")
        w.drop_loop(process)
