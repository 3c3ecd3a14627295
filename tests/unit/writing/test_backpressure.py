"""Limits and the line of producers: who is refused, who waits for room, in which order, and what wakes them."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import (
    FullPolicy,
    JournaledQueue,
    NoDefaultReader,
    QueueClosed,
    QueueFull,
    Reader,
    ReaderConfig,
    open_reader,
)
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._writing import backpressure
from kestrelpy._writing import put_path as put_module
from kestrelpy._writing.gate import Gate
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.testing import ManualClock
from tests.support.patience import PATIENCE, until
from tests.support.queues import drain

Open = Callable[..., JournaledQueue]
Start = Callable[..., threading.Thread]
BLOCK, REFUSE, DROP_OLDEST = FullPolicy.BLOCK, FullPolicy.REFUSE, FullPolicy.DROP_OLDEST


def limited(max_items: int | None = 1, policy: FullPolicy = BLOCK, **options: Any) -> ReaderConfig:
    return ReaderConfig(max_items=max_items, full_policy=policy, **options)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Without waiting for the threads of the loop: an ``aput`` that takes one fails here, and does not hang."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


async def entered(queue: JournaledQueue, count: int = 1) -> None:
    """So many producers are in line."""
    for _ in range(10_000):
        if len(queue._room) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{len(queue._room)} producers wait")


def aput_of(queue: JournaledQueue, face: bool) -> Callable[..., Awaitable[Any]]:
    return queue.as_blocking_queue().aput if face else queue.aput


# -- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", [False, True])
def test_a_cancelled_aput_that_waits_for_room_has_put_nothing(face: bool, folder: Path) -> None:
    async def work() -> None:
        aput = aput_of(queue, face)
        queue.put(b"a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aput(b"b", timeout=None), 0.01)
        first, second = asyncio.ensure_future(aput(b"c", timeout=None)), asyncio.ensure_future(aput(b"d", timeout=None))
        await entered(queue, 2)
        queue.get_nowait().commit()  # it is rung ...
        first.cancel()  # ... and cancelled before it has looked: the turn is the next one's
        await second
        assert [first.cancelled(), len(queue._room)] == [True, 0]

    with JournaledQueue(folder, "jobs", default_reader=limited()) as queue:
        queue.reader()
        run(work())
        assert drain(queue) == [b"d"]


@pytest.mark.parametrize("face", [False, True])
@pytest.mark.parametrize("sync", ["always", 0.01, "never"])
def test_tasks_that_wait_for_room_take_no_thread(face: bool, sync: Any, folder: Path) -> None:
    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        aput = aput_of(queue, face)
        producers = [asyncio.ensure_future(aput(b"%d" % number, timeout=None)) for number in range(20)]
        got: list[bytes] = []
        for _ in producers:
            item = await queue.aget(timeout=20)
            await asyncio.wait_for(asyncio.to_thread(got.append, item.data), 3)
            item.commit()
        await asyncio.gather(*producers)
        assert got == [b"%d" % number for number in range(20)], "in the order in which they came"

    with JournaledQueue(folder, "jobs", sync=sync, default_reader=limited()) as queue:
        queue.reader()
        run(work())


@pytest.mark.parametrize("face", [False, True])
def test_the_deadline_of_an_aput_follows_the_clock(face: bool, open_queue: Open, clock: ManualClock) -> None:
    async def work() -> None:
        task = asyncio.ensure_future(aput_of(queue, face)(b"b", timeout=0.3))
        await entered(queue)
        clock.advance(0.1 + 0.2 - 0.001)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        clock.advance(0.001)
        with pytest.raises(QueueFull):
            await task
        assert not queue._room
        with pytest.raises(QueueFull):
            await aput_of(queue, face)(b"b", timeout=0)
        with pytest.raises(ValueError, match="timeout"):
            await aput_of(queue, face)(b"b", timeout=-1)

    queue = open_queue(default_reader=limited(), sync="never")
    queue.put(b"a")
    timers = clock.timer_count
    asyncio.run(work())
    assert clock.timer_count == timers, "none is left behind"
    assert drain(queue) == [b"a"]


def test_an_aput_is_refused_where_the_policy_does_not_wait(open_queue: Open) -> None:
    queue = open_queue(default_reader=limited(1, REFUSE))
    queue.put(b"a")
    with pytest.raises(QueueFull):
        asyncio.run(queue.aput(b"b", timeout=None))


@pytest.mark.parametrize("end", ["close", "shutdown", "fail"])
def test_the_end_of_a_queue_wakes_tasks_and_threads(end: str, open_queue: Open, start: Start) -> None:
    def put() -> None:
        with pytest.raises(expected):
            face.put(b"c")

    async def work() -> None:
        task = asyncio.ensure_future(face.aput(b"b"))
        await entered(queue, 2)
        if end == "close":
            queue.close()
        elif end == "shutdown":
            face.shutdown()
        else:
            queue._syncer.fail(queue._journal.fail(OSError(errno.EIO, "oh")))
        with pytest.raises(expected):
            await task

    expected: Any = OSError if end == "fail" else QueueClosed
    queue = open_queue(default_reader=limited())
    queue.put(b"a")
    face = queue.as_blocking_queue()
    thread = start(put)
    until(lambda: len(queue._room) == 1)
    asyncio.run(work())
    thread.join(20)
    assert not queue._room


def test_a_task_that_is_thrown_away_leaves_the_line_under_any_lock(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited())
    reader = queue.reader()
    queue.put(b"a")

    def abandoned() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(queue.aput(b"b", timeout=None))
        loop.run_until_complete(entered(queue))
        task.get_loop().close()

    def collect() -> None:
        with queue._lock, reader._backlog.lock:
            gc.collect()

    abandoned()
    assert len(queue._room) == 1
    reader.get_nowait().commit()
    assert not queue._room, "its loop is closed"
    leaves: list[Any] = []
    with patch.object(backpressure.ProducerTask, "stop", lambda self: leaves.append(self)):
        thread = start(collect)
        thread.join(20)
    assert not thread.is_alive()
    assert len(leaves) == 1
    assert queue.put(b"c", timeout=None) == 2


@pytest.mark.parametrize("state", ["closed", "stopped", "busy"])
def test_a_task_that_does_not_come_holds_nobody_up(
    state: str, open_queue: Open, start: Start, clock: ManualClock
) -> None:
    async def block() -> None:
        entered_it.set()
        assert leave.wait(20)

    queue = open_queue(default_reader=limited())
    queue.put(b"a")
    loop = asyncio.new_event_loop()
    task = loop.create_task(queue.aput(b"b", timeout=None))
    loop.run_until_complete(entered(queue))
    entered_it, leave = threading.Event(), threading.Event()
    if state == "closed":
        loop.close()
    elif state == "busy":
        start(loop.run_until_complete, block())
        assert entered_it.wait(20)
    thread = start(lambda: queue.put(b"c", timeout=None))
    until(lambda: len(queue._room) == 2)
    queue.get_nowait().commit()
    if state == "busy":
        clock.advance(2)  # it is looked for who does not come
    thread.join(20)
    assert not thread.is_alive()
    assert queue.get_nowait().data == b"c"
    leave.set()
    if state == "busy":
        until(lambda: not loop.is_running())
    if state != "closed":
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()


def test_a_cancel_while_it_waits_for_the_disk_leaves_the_item(folder: Path, clock: ManualClock) -> None:
    async def work() -> None:
        task = asyncio.ensure_future(queue.aput(b"stays", timeout=None))
        while not queue._syncer.commit._tickets:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with JournaledQueue(folder, "jobs", clock=clock, default_reader=limited()) as queue:
        asyncio.run(work())
        assert drain(queue) == [b"stays"]


# -- order -----------------------------------------------------------------------------------------------------------


def test_producers_are_served_in_the_order_in_which_they_came(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited())
    queue.put(b"a")
    for number in range(8):
        start(lambda number=number: queue.put(b"%d" % number, timeout=None))

        def is_in_line(number: int = number) -> bool:
            return len(queue._room) == number + 1

        until(is_in_line)
    served = []
    for _ in range(9):
        item = queue.get(timeout=20)
        item.commit()
        served.append(item.data)
    assert served == [b"a", *(b"%d" % number for number in range(8))]
    assert not queue._room


def test_a_large_batch_is_not_overtaken_by_others_that_wait(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited(3))
    queue.put_many([b"1", b"2", b"3"])
    start(lambda: queue.put_many([b"x"] * 3, timeout=None))
    until(lambda: len(queue._room) == 1)
    start(lambda: queue.put(b"late", timeout=None))
    until(lambda: len(queue._room) == 2)
    for expected in (b"1", b"2", b"3", b"x", b"x", b"x", b"late"):
        item = queue.get(timeout=20)
        assert item.data == expected
        item.commit()


def test_one_who_does_not_wait_takes_what_room_there_is(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited(3))
    queue.put_many([b"1", b"2"])
    thread = start(lambda: queue.put_many([b"x"] * 2, timeout=None))
    until(lambda: len(queue._room) == 1)
    assert queue.put(b"3", timeout=0) == 3
    queue.get_nowait().commit()
    queue.get_nowait().commit()
    thread.join(20)
    assert queue.stats().tail_id == 5


def test_who_gives_up_leaves_its_turn_to_the_next(open_queue: Open, start: Start) -> None:
    def give_up() -> None:
        with pytest.raises(QueueFull):
            queue.put_many([b"x"] * 3, timeout=0.05)

    real, may_give_up = backpressure.ProducerThread.is_late, threading.Event()

    def is_late(producer: backpressure.ProducerThread) -> bool:
        late = real(producer)
        assert not late or may_give_up.wait(PATIENCE)
        return late

    queue = open_queue(default_reader=limited(3))
    queue.put(b"1")
    with patch.object(backpressure.ProducerThread, "is_late", is_late):
        start(give_up)
        until(lambda: len(queue._room) == 1)
        thread = start(lambda: queue.put(b"2", timeout=None))
        until(lambda: len(queue._room) == 2)
        may_give_up.set()
        thread.join(20)
    assert not thread.is_alive()
    assert queue.stats().tail_id == 2


def test_a_callback_of_a_producer_in_line_may_wait_for_room_itself(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited())
    queue.put(b"1")
    thread = start(lambda: queue.put(b"2", timeout=None))
    until(lambda: len(queue._room) == 1)
    item = queue.get_nowait()

    def reply(future: Any) -> None:
        future.result().commit()
        queue.put(b"reply", timeout=None)

    queue.get_future().add_done_callback(reply)
    item.commit()
    thread.join(10)
    assert not thread.is_alive()
    assert drain(queue) == [b"reply"]


# -- what wakes a producer -------------------------------------------------------------------------------------------


def test_a_producer_is_woken_when_its_reader_is_handed_over(open_queue: Open, folder: Path, start: Start) -> None:
    queue = open_queue(readers={"w": limited(2)}, inbox_interval=None)
    reader = queue.reader("w")
    queue.put_many([b"1", b"2"])
    thread = start(lambda: queue.put(b"3", timeout=None))
    until(lambda: len(queue._room) == 1)
    reader.close()
    elsewhere = open_reader(folder, "jobs", "w", create=True)
    try:
        for _ in range(2):
            elsewhere.get(timeout=20).commit()
        elsewhere.checkpoint(durable=True)
        thread.join(20)
        assert not thread.is_alive()
    finally:
        elsewhere.close()


def test_a_producer_is_woken_when_its_reader_gets_another_configuration(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited(), readers={"large": ReaderConfig()})
    queue.put(b"1")
    thread = start(lambda: queue.put(b"2", timeout=None))
    until(lambda: len(queue._room) == 1)
    assert queue.reader("large").items >= 1
    thread.join(20)
    assert not thread.is_alive()


def test_a_producer_waits_for_a_reader_that_closes_in_this_moment(open_queue: Open, start: Start) -> None:
    """It has looked, and not slept: what is decided then by a reader that is closed is looked at again."""
    queue = open_queue(readers={"w": limited(1)}, inbox_interval=None)
    reader = queue.reader("w")
    queue.put(b"1")
    real = backpressure.ProducerThread.sleep

    def sleep(self: Any, seconds: float | None) -> None:
        if reader._backlog.broken is None:
            reader.close()
            queue.drop_reader("w")
        real(self, seconds)

    with patch.object(backpressure.ProducerThread, "sleep", sleep):
        thread = start(lambda: queue.put(b"2", timeout=None))
        thread.join(20)
    assert not thread.is_alive()


def test_a_hook_that_raises_has_another_go_while_a_producer_waits(
    open_queue: Open, start: Start, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(put_module, "HOOK_SECONDS", 0.01)
    calls: list[int] = []

    def hook(item: Any) -> None:
        calls.append(item.id)
        if len(calls) < 3:
            raise RuntimeError("oh")

    queue = open_queue(default_reader=limited(on_expired=hook))
    queue.reader()
    queue.put(b"1", expires_in=0.0)
    thread = start(lambda: queue.put(b"2", timeout=None))
    thread.join(20)
    assert not thread.is_alive()
    assert calls == [1, 1, 1]


def test_where_no_thread_can_be_started_a_producer_looks_by_itself(open_queue: Open, start: Start) -> None:
    class Threadless(ManualClock):
        def call_later(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("can't start new thread")

    clock = Threadless()
    queue = open_queue(default_reader=limited(), clock=clock, sync="never", inbox_interval=None)
    queue.reader()
    queue.put(b"1", expires_in=1)
    thread = start(lambda: queue.put(b"2", timeout=None))
    until(lambda: len(queue._room) == 1)
    clock.advance(1)
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(QueueFull):
        asyncio.run(queue.aput(b"3", timeout=0.01))


def test_a_queue_that_nobody_has_is_not_kept_for_its_limits(folder: Path, clock: ManualClock) -> None:
    queue = JournaledQueue(folder, "jobs", clock=clock, default_reader=limited(), inbox_interval=None)
    queue.close()
    clock.advance(1)
    assert clock.timer_count == 0, "a closed one looks at nothing any more"
    JournaledQueue(folder, "other", clock=clock, default_reader=limited(), inbox_interval=None)  # and dropped
    with pytest.warns(ResourceWarning):
        gc.collect()


# -- readers elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["put", "wait", "aput", "take_in"])
def test_a_default_reader_that_another_process_took_over_refuses_nothing(
    way: str, open_queue: Open, folder: Path
) -> None:
    policy = BLOCK if way in ("wait", "aput") else REFUSE
    queue = open_queue(default_reader=limited(2, policy), sync="never", inbox_interval=None)
    worker = open_reader(folder, "jobs", "worker", create=True)
    try:
        for number in range(10):
            data = b"%d" % number
            if way == "put":
                queue.put(data)
            elif way == "wait":
                queue.put(data, timeout=20)
            elif way == "aput":
                asyncio.run(queue.aput(data, timeout=20))
            else:
                publish_items(folder, data)
                assert queue.take_in() == 1
            worker.get(timeout=20).commit()
            worker.checkpoint()
    finally:
        worker.close()


def publish_items(folder: Path, *items: bytes) -> None:
    with PartWriter(folder, "jobs") as writer:
        writer.add(items)
        publish(folder, "jobs", [writer.seal()])


def test_the_limits_of_a_reader_made_elsewhere_count_before_long(
    open_queue: Open, folder: Path, clock: ManualClock
) -> None:
    queue = open_queue(readers={"audit": limited(10, REFUSE)}, inbox_interval=None)
    reader = queue.reader("own")
    audit = open_reader(folder, "jobs", "audit", create=True)
    try:
        clock.advance(1)
        for _ in range(10):
            queue.put(b"x")
        with pytest.raises(QueueFull) as caught:
            queue.put(b"x")
        assert caught.value.reader == "jobs+audit"
        audit.commit_many(audit.get_many(10))
        audit.checkpoint()
        assert queue.put(b"x") == 11
    finally:
        audit.close()
    assert reader.items == 11
    with pytest.raises(NoDefaultReader):
        queue.get()


def test_what_can_t_be_looked_at_counts_as_it_was(open_queue: Open, monkeypatch: Any) -> None:
    def fail(*_: object) -> Any:
        raise OSError(errno.EMFILE, "oh")

    queue = open_queue(readers={"absent": limited(1, REFUSE)}, inbox_interval=None)
    queue.reader("absent").close()
    queue.put(b"1")
    monkeypatch.setattr(queue._held.files, "reader_names", fail)
    with pytest.raises(QueueFull):
        queue.put(b"2")
    monkeypatch.undo()
    reader = queue.reader("absent")
    monkeypatch.setattr(reader, "discard_expired", fail)
    with pytest.raises(QueueFull):
        queue.put(b"2")


def test_a_put_looks_at_the_folder_only_before_it_is_refused(open_queue: Open, monkeypatch: Any) -> None:
    looks: list[None] = []
    queue = open_queue(readers={"absent": limited(2, REFUSE), "here": limited(3, REFUSE)}, inbox_interval=None)
    queue.reader("absent").close()
    here = queue.reader("here")
    real = queue._held.files.reader_names

    def names(*arguments: Any) -> set[str]:
        looks.append(None)
        return real(*arguments)

    monkeypatch.setattr(queue._held.files, "reader_names", names)
    queue.put(b"1")
    queue.put(b"2")
    assert looks == []
    with pytest.raises(QueueFull):
        queue.put(b"3")
    assert len(looks) == 1
    queue.drop_reader("absent")
    looks.clear()
    queue.put(b"3")
    with pytest.raises(QueueFull):
        queue.put(b"4")
    assert looks == [], "what is known here needs no look"
    assert here.items == 3


# -- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BLOCK, REFUSE])
@pytest.mark.parametrize("timeout", [0.2, 0])
def test_a_batch_that_can_never_fit_is_refused_at_once(
    policy: FullPolicy, timeout: float | None, open_queue: Open
) -> None:
    queue = open_queue(default_reader=limited(3, policy))
    queue.reader()
    with pytest.raises(QueueFull, match=r"4 items at once never fit reader jobs \(max_items=3\)") as caught:
        queue.put_many([b"x"] * 4, timeout=timeout)
    assert caught.value.reader == "jobs"
    assert queue.put_many([b"x"] * 3, timeout=timeout) == range(1, 4)


def test_nobody_waits_for_room_where_there_never_is_any(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(full_policy=BLOCK, max_bytes=0))
    face = queue.as_blocking_queue()
    for call in (lambda: queue.put(b"x", timeout=None), lambda: face.put(b"x"), lambda: asyncio.run(face.aput(b"x"))):
        with pytest.raises(QueueFull):
            call()


def test_a_put_waits_unless_it_is_told_not_to(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited(1))
    queue.put(b"1")
    start(queue.put, b"2")
    until(lambda: len(queue._room) == 1)
    start(queue.put_many, [b"3"])
    until(lambda: len(queue._room) == 2)
    start(lambda: asyncio.run(queue.aput(b"4")))
    until(lambda: len(queue._room) == 3)
    with pytest.raises(QueueFull, match="no room within the timeout"):
        queue.put(b"5", timeout=0)
    with pytest.raises(QueueFull):
        queue.put_future(b"5")
    assert [take(queue) for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    queue.sync()  # the task waits for that


@pytest.mark.parametrize(
    ("options", "error"), [({"expires_in": -1.0}, ValueError), ({"expires_at_ms": 1.5}, TypeError)]
)
def test_a_put_that_would_be_refused_in_the_end_does_not_wait(open_queue: Open, options: Any, error: Any) -> None:
    queue = open_queue(default_reader=limited(1))
    queue.put(b"1")
    with pytest.raises(error, match="expires"):
        queue.put(b"2", **options)
    with pytest.raises(error, match="expires"):
        asyncio.run(queue.aput(b"2", **options))


def test_a_task_waits_until_a_gate_is_lifted(open_queue: Open) -> None:
    queue = open_queue(sync="never")

    async def put() -> None:
        queue._status.gate = Gate("jobs", lambda: QueueFull("behind"), waits=True)
        with pytest.raises(QueueFull, match="behind"):
            await queue.aput(b"0", timeout=0)
        task = asyncio.create_task(queue.aput(b"1"))
        await entered(queue)
        queue._status.gate = None
        queue._room.ring_all()
        assert await task == 1

    run(put())


def take(queue: JournaledQueue) -> bytes:
    item = queue.get(timeout=PATIENCE)
    item.commit()
    return item.data


@pytest.mark.parametrize("way", ["on_expired", "on_abort"])
def test_a_put_in_a_hook_does_not_wait_for_the_item_that_the_hook_has(way: str, open_queue: Open, clock: Any) -> None:
    seen: list[type[BaseException]] = []

    def again(item: Any) -> bool:
        try:
            queue.put(item.data)
        except QueueFull as full:
            seen.append(type(full))
            with pytest.raises(QueueFull):
                queue.put_many([item.data], timeout=0.01)  # who says how long waits so long
        return True

    hooks: dict[str, Any] = {way: again}
    queue = open_queue(default_reader=ReaderConfig(max_items=1, full_policy="block", **hooks))
    queue.put(b"1", expires_in=1.0)
    if way == "on_abort":
        queue.get().abort()
    else:
        clock.advance(2.0)
        queue.reader().discard_expired()
    assert seen == [QueueFull]
    queue.put(b"2")  # the hook is over, and its item is gone
    assert queue.get().data == b"2"


def test_a_batch_overshoots_bytes_by_one_item_as_single_puts_do(open_queue: Open) -> None:
    queue = open_queue(default_reader=limited(None, REFUSE, max_bytes=1000))
    queue.reader()
    queue.put(bytes(500))
    with pytest.raises(QueueFull):
        queue.put_many([bytes(500), bytes(1)])
    assert queue.put_many([bytes(499), bytes(5000)]) == range(2, 4)
    with pytest.raises(QueueFull):
        queue.put_many([b""])
    drain(queue)
    assert len(queue.put_many([bytes(1000)] * 3)) == 3, "into an empty reader, as a batch of the inbox"


def test_a_batch_larger_than_the_limit_of_bytes_waits_until_the_reader_is_empty(open_queue: Open, start: Start) -> None:
    queue = open_queue(default_reader=limited(None, BLOCK, max_bytes=10))
    queue.put_many([b"1", b"2"])
    thread = start(lambda: queue.put_many([bytes(20)] * 2, timeout=None))
    until(lambda: len(queue._room) == 1)
    queue.get().commit()
    assert queue.stats().tail_id == 2
    queue.get().commit()
    thread.join(20)
    assert queue.stats().tail_id == 4


def test_bytes_that_are_not_on_disk_yet_count(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(sync="always", default_reader=limited(None, REFUSE, max_bytes=10))
    queue.reader()
    futures = [queue.put_future(bytes(9)), queue.put_future(bytes(9))]
    with pytest.raises(QueueFull):
        queue.put_future(bytes(9))
    clock.advance(1)
    assert [future.result(0) for future in futures] == [1, 2]


def test_a_batch_of_the_inbox_keeps_to_bytes_too(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=limited(None, REFUSE, max_bytes=10), inbox_interval=None)
    queue.reader()
    queue.put(bytes(5))
    publish_items(folder, bytes(3), bytes(3))
    assert queue.take_in() == 0
    drain(queue)
    assert queue.take_in() == 2


def test_who_refuses_at_once_is_heard_first(open_queue: Open) -> None:
    queue = open_queue(readers={"a": limited(1, BLOCK), "b": limited(1, REFUSE)})
    readers = [queue.reader("a"), queue.reader("b")]
    queue.put(b"1")
    with pytest.raises(QueueFull) as caught:
        queue.put(b"2", timeout=None)
    assert caught.value.reader == "jobs+b"
    assert [reader.items for reader in readers] == [1, 1]


# -- every policy, every way, every mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["always", 0.01, "never"])
@pytest.mark.parametrize("policy", [BLOCK, REFUSE, DROP_OLDEST])
@pytest.mark.parametrize("way", ["put", "put_many", "put_future", "aput", "take_in", "face", "face aput"])
def test_policies(way: str, policy: FullPolicy, sync: Any, folder: Path, start: Start) -> None:
    with JournaledQueue(folder, "jobs", sync=sync, default_reader=limited(2, policy), inbox_interval=None) as queue:
        reader = queue.reader()
        ways: dict[str, Callable[[], object]] = {
            "put": lambda: queue.put(b"new", timeout=20),
            "put_many": lambda: queue.put_many([b"new"], timeout=20),
            "put_future": lambda: queue.put_future(b"new", timeout=20).result(20),
            "aput": lambda: asyncio.run(queue.aput(b"new", timeout=20)),
            "face": lambda: queue.as_blocking_queue().put(b"new", timeout=20),
            "face aput": lambda: asyncio.run(queue.as_blocking_queue().aput(b"new", timeout=20)),
        }
        queue.put_many([b"1", b"2"])
        if way == "take_in":
            publish_items(folder, b"new")
            assert queue.take_in() == (1 if policy is DROP_OLDEST else 0)
            check_new(reader, policy is DROP_OLDEST)
            assert queue.take_in() == (0 if policy is DROP_OLDEST else 1)
            return
        waits = policy is BLOCK or way.startswith("face")
        if policy is DROP_OLDEST:
            ways[way]()
            check_new(reader, True)
        elif waits:
            thread = start(ways[way])
            until(lambda: len(queue._room) == 1)
            reader.get_nowait().commit()
            thread.join(20)
            check_new(reader, True)
        else:
            with pytest.raises(QueueFull):
                ways[way]()
            check_new(reader, False)


def check_new(reader: Reader, is_there: bool) -> None:
    expected = [b"2", b"new"] if is_there else [b"1", b"2"]
    items = reader.get_many(10, timeout=0)
    assert [item.data for item in items] == expected
    reader.commit_many(items)


def test_a_place_elsewhere_is_looked_at_before_it_refuses_also_where_another_reader_has_refused_first(
    open_queue: Open, folder: Path, clock: ManualClock
) -> None:
    few = ReaderConfig(max_items=3, full_policy=FullPolicy.REFUSE)
    queue = open_queue(default_reader=few)
    here = queue.reader("a")
    far = open_reader(folder, "jobs", "b", clock=clock, create=True)
    clock.advance(10)  # the writer has seen it
    queue.put_many([b"1", b"2", b"3"], expires_in=0.0)
    assert far.flush() == 3
    far.close()
    assert queue.put(b"4") == 4, "what is here had expired, and what is elsewhere has been done"
    assert here.items == 1


def test_a_reader_counts_whose_making_has_raised_when_it_was_there(open_queue: Open) -> None:
    queue = open_queue(readers={"t": ReaderConfig(max_items=1)})
    queue.reader()
    with (
        patch.object(QueueFiles, "readers", side_effect=OSError(errno.EIO, "no listing")),
        pytest.raises(OSError, match="no l"),
    ):
        queue.reader("t")
    queue.put(b"1")
    with pytest.raises(QueueFull):
        queue.put(b"2")
