"""Scenes of the readers of a journaled queue: made and dropped, from outside, behind other faces, in coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from kestrelpy import (
    DurabilityUnknown,
    FullPolicy,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    Reader,
    ReaderConfig,
    clock,
    open_reader,
)
from tests.interleavings.journal_work import LONG, Work, drain
from tests.interleavings.scene import Loop, Scene, require


def readers_come_and_go(scene: Scene) -> None:
    """A reader is made, closed, made again, dropped during puts; each sees every item from its beginning on."""
    rng = scene.rng
    work = Work(scene, segment_bytes=4096, checkpoint_interval=0.2)
    steady = work.reader("steady")
    producers = [scene.start(work.produce, f"p{at}", 4) for at in range(2)]
    consumer = scene.start(work.consume, steady)
    started: list[int] = []

    def come_and_go() -> None:
        reader = work.queue.reader("other", start="earliest")
        started.append(reader.head)
        seen: set[int] = set()
        for _ in range(rng.randrange(1, 8)):
            try:
                item = reader.get(timeout=0.2)
            except QueueEmpty:
                continue
            require(item.id not in seen, f"{item.id} was given again")
            require(not seen or item.id == max(seen) + 1, f"{item.id} after {max(seen, default=0)}: items were skipped")
            require(seen or item.id == reader.head + 1, f"{item.id} is not the first one")
            seen.add(item.id)
            reader.commit(item)
            if scene.chance(0.2):
                reader.close()
                reader = work.queue.reader("other")
        if scene.chance(0.5):
            with contextlib.suppress(QueueEmpty):
                while True:
                    reader.get_nowait()
            waiting = reader.get_future()
            waiting.add_done_callback(lambda done: scene.check_free("a future is completed"))
            work.queue.drop_reader("other")

    def retire() -> None:
        for _ in range(rng.randrange(4)):
            work.queue.checkpoint()
            scene.sleep(0.05)

    other = scene.start(come_and_go)
    for task in (*producers, other, scene.start(retire)):
        task.join()
    work.settle_all(steady)
    work.queue.close()
    consumer.join()
    work.reopen_and_check("steady")


def detached(scene: Scene) -> None:
    """A reader as of another process, beside the writer: it sees every item once, in order."""
    rng = scene.rng
    work = Work(scene, segment_bytes=4096, checkpoint_interval=0.2)
    own = work.reader("own")
    work.ledger.add_reader("outside")
    outside = open_reader("/data", "jobs", "outside", create=True, start="earliest", disk=work.disk)
    producers = [scene.start(work.produce, f"p{at}", rng.randrange(1, 4)) for at in range(2)]
    consumer = scene.start(work.consume, own)
    seen: list[int] = []

    def follow() -> None:
        while True:
            try:
                item = outside.get(timeout=LONG) if scene.chance(0.8) else outside.get_future(LONG).result()
            except QueueClosed:
                return
            work.ledger.deliver("outside", item)
            require(not seen or item.id == seen[-1] + 1, f"{item.id} after {seen[-1:]}")
            seen.append(item.id)
            work.ledger.commit("outside", item, outside.commit)

    follower = scene.start(follow)
    for task in producers:
        task.join()
    work.settle_all(own, outside)
    if scene.chance(0.5):
        work.queue.checkpoint()
    outside.close()
    work.queue.close()
    consumer.join()
    follower.join()
    require(set(work.ledger.acknowledged) <= set(seen), f"it has seen {seen}")
    work.reopen_and_check("own", "outside")


def blocking_face(scene: Scene) -> None:
    """``as_blocking_queue``: gets and puts against a shutdown or a close."""
    rng = scene.rng
    config = ReaderConfig(max_items=rng.choice((None, 1)))
    work = Work(scene, default_reader=config)
    queue = work.queue.as_blocking_queue()
    put: list[bytes] = []
    got: list[bytes] = []
    refused: list[bytes] = []

    def produce(name: str) -> None:
        for number in range(3):
            data = f"{name} {number}".encode()
            try:
                queue.put(data, timeout=LONG)
            except QueueClosed:
                refused.append(data)
                return
            put.append(data)

    def consume() -> None:
        while True:
            try:
                if scene.chance(0.3):
                    future = queue.get_future()
                    scene.point()
                    if scene.chance(0.4) and future.cancel():
                        continue
                    got.append(future.result())
                else:
                    got.append(queue.get())
            except QueueClosed:
                return

    producers = [scene.start(produce, f"p{at}") for at in range(rng.randrange(1, 3))]
    consumers = [scene.start(consume) for _ in range(rng.randrange(1, 3))]
    immediately = scene.chance(0.4)
    if not immediately and scene.chance(0.5):
        for task in producers:
            task.join()
    for _ in range(rng.randrange(20)):
        scene.point()
    queue.shutdown(immediately)
    for task in (*producers, *consumers):
        task.join()
    work.queue.close()
    again = scene.open(work.disk, sync="never")
    left = list(drain(again.reader()).values())
    again.close()
    require(len(set(got + left)) == len(got + left), f"got {got}, and then {left}")
    require(set(put) == set(got + left), f"put {put}, refused {refused}, got {got}, left {left}")


def maintenance_dies(scene: Scene) -> None:
    """R30: what one of the two threads dies of reaches everybody who counts on it; nobody waits for it in vain."""
    work = Work(scene, sync=scene.rng.choice(("always", 0.1)), checkpoint_interval=0.2)
    reader = work.reader("")

    dying = scene.rng.choice((clock._timers, clock._syncs))

    def strike(now: float) -> NoReturn:
        raise SystemExit

    def die() -> None:
        """What strikes the thread itself; a callback may raise what it likes."""
        scene.sleep(scene.rng.choice((0.0, 0.1, 0.15, 0.3)))
        dying._pop_due_locked = strike  # type: ignore[method-assign]
        dying._ring()

    producers = [scene.start(work.produce, f"p{at}", 4) for at in range(2)]
    consumer = scene.start(work.consume, reader)
    scene.start(die).join()
    for task in producers:
        task.join()
    if scene.chance(0.5):
        scene.sleep(1.0)
    with contextlib.suppress(DurabilityUnknown):  # nobody may have heard of it yet
        work.queue.close()
    consumer.join()


def coroutines(scene: Scene) -> None:
    """``aget`` and ``aput`` with tasks that are cancelled; no item is lost, none is given twice."""
    work = Work(scene)
    reader = work.reader("")

    async def get(timeout: float | None) -> None:
        item = await reader.aget(timeout)
        work.ledger.deliver("", item)
        work.ledger.commit("", item, reader.commit)

    async def put(data: bytes) -> None:
        work.ledger.doubtful[data] += 1
        work.ledger.acknowledge(await work.queue.aput(data), data)

    async def run() -> None:
        tasks = [asyncio.ensure_future(get(scene.rng.choice((None, 0.5)))) for _ in range(3)]
        tasks += [asyncio.ensure_future(put(b"async %d" % number)) for number in range(2)]
        for _ in range(scene.rng.randrange(6)):
            await asyncio.sleep(scene.rng.choice((0, 0, 0.3)))
        for task in tasks:
            if scene.chance(0.5):
                task.cancel()
        reader.evict_waiters()
        await asyncio.wait(tasks, timeout=5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, QueueEmpty):
                raise error

    def run_loop() -> None:
        loop = Loop(scene)
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()

    producer, consumer = scene.start(work.produce, "p", 4), scene.start(work.consume, reader)
    scene.start(run_loop).join()
    producer.join()
    work.queue.close()
    consumer.join()
    work.reopen_and_check("")


def in_line(scene: Scene) -> None:
    """Threads and tasks wait for room; some give up, or are cancelled, before it is their turn, or when it has come.
    All others get room by what is handed on, and by nothing else: no timer looks for them.
    """
    rng = scene.rng
    policy = rng.choice((FullPolicy.BLOCK, FullPolicy.REFUSE))  # with the latter commits are quiet
    config = ReaderConfig(max_items=rng.choice((1, 2)), full_policy=policy)
    work = Work(scene, default_reader=config, checkpoint_interval=2 * LONG)
    queue = work.queue.as_blocking_queue()
    put: list[bytes] = []
    got: list[bytes] = []
    doubtful: set[bytes] = set()  # of tasks that were cancelled, perhaps while they waited for the disk

    def produce(name: str) -> None:
        for number in range(2):
            data = f"{name} {number}".encode()
            with contextlib.suppress(QueueFull):
                queue.put(data, timeout=rng.choice((LONG, LONG, 0.2)))
                put.append(data)

    async def aput(data: bytes) -> None:
        doubtful.add(data)
        with contextlib.suppress(QueueFull):
            await queue.aput(data, rng.choice((LONG, LONG, 0.2)))
            put.append(data)

    async def run() -> None:
        tasks = [asyncio.ensure_future(aput(b"task %d" % number)) for number in range(rng.randrange(1, 4))]
        await asyncio.sleep(rng.choice((0, 0, 0.1, 0.3)))
        for task in tasks:
            if scene.chance(0.3):
                task.cancel()
        await asyncio.wait(tasks)

    def run_loop() -> None:
        loop = Loop(scene)
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()

    def consume() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                got.append(queue.get())
                if scene.chance(0.3):
                    scene.sleep(0.1)

    producers = [scene.start(produce, f"p{at}") for at in range(rng.randrange(1, 4))]
    producers.append(scene.start(run_loop))
    scene.sleep(rng.choice((0.0, 0.1, 0.3)))
    consumer = scene.start(consume)
    for task in producers:
        task.join()
    require(scene.scheduler.now < LONG, "a producer was not woken")
    while work.queue._source.pending:  # of a task that was cancelled
        scene.sleep(0.05)
    queue.shutdown()
    consumer.join()
    require(len(work.queue._room) == 0, "somebody is left in line")
    work.queue.close()
    require(len(set(got)) == len(got), f"given twice: {got}")
    require(set(put) <= set(got) <= set(put) | doubtful, f"put {put}, got {got}")


def made_while_retiring(scene: Scene) -> None:
    """A reader that begins at the earliest item, while the segments before it are being retired."""
    work = Work(scene, sync="never", segment_bytes=4096)
    steady = work.reader("steady")
    for number in range(7):
        work.queue.put(b"%d %s" % (number, bytes(1400)))
        if number < 5:
            steady.get().commit()
    found: list[int] = []

    def make() -> None:
        reader = work.queue.reader("other", start="earliest")
        first_id = reader.head + 1
        found.extend(drain(reader))
        require(found == list(range(first_id, 8)), f"it began at {first_id}, and was given {found}")

    for task in [scene.start(make), scene.start(work.queue.checkpoint, True)]:
        task.join()
    work.queue.close()


def counted(scene: Scene) -> None:
    """A reader is made at the tail, and another flushed, between puts: items and bytes are counted of one moment."""
    work = Work(scene, sync="never")
    flushed = work.reader("flushed")

    def put() -> None:
        for number in range(4):
            work.queue.put(b"%d" % number * 100)

    tasks = [scene.start(put), scene.start(work.queue.reader, "late"), scene.start(flushed.flush)]
    for task in tasks:
        task.join()
    for reader in (flushed, work.queue.reader("late")):
        drain(reader)
        require((reader.items, reader.bytes) == (0, 0), f"{reader.items} items and {reader.bytes} bytes of nothing")
    work.queue._check()
    work.queue.close()


def parting(scene: Scene) -> None:
    """A queue ends, or a sync of it fails, while one reader is made and another closes: each is told, no lock is left
    with anybody, and no commit is lost.
    """
    how = scene.rng.choice(("close", "erase", "fail"))
    work = Work(scene, sync="never")
    old = work.reader("old")
    for _ in range(3):
        work.queue.put(b"item")
    old.commit_many(old.get_many(3))
    made: list[Reader] = []
    fails = (DurabilityUnknown, OSError) if how == "fail" else ()  # the sync may be that of a place, which says so

    def make() -> None:
        with contextlib.suppress(QueueClosed, *fails):
            made.append(work.queue.reader("new", start="earliest"))

    def part() -> None:
        with contextlib.suppress(*fails):
            old.close()

    tasks = [scene.start(make), scene.start(part)]
    for _ in range(scene.rng.randrange(40)):
        scene.point()
    if how == "fail":
        work.disk.fail_at = work.disk.syncs + 1
        with contextlib.suppress(*fails):
            work.queue.sync()
    elif how == "close":
        work.queue.close()
    else:
        work.queue.erase()
    for task in tasks:
        task.join()
    state = work.queue._status.error
    require(state is None or all(reader._backlog.broken is not None for reader in made), f"{made} were told nothing")
    if how == "erase":
        left = set(work.disk.directory("/data").names()) - {"jobs.readers.lock"}  # that of who asked for it too late
        require(not left, f"{left} is left")
        return
    work.disk.fail_at = 0
    with contextlib.suppress(*fails):
        work.queue.close()
    queue = scene.open(work.disk, sync="never")
    require(queue.reader("new").items >= 0, "it can be opened")
    if how == "close":
        require(not queue.reader("old").items, "what was committed comes again")
    queue.close()


SCENES = (
    parting,
    readers_come_and_go,
    detached,
    blocking_face,
    maintenance_dies,
    coroutines,
    in_line,
    made_while_retiring,
    counted,
)
