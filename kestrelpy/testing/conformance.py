"""What any ``kestrelpy.memory.BlockingQueue`` must do, as checks that the author of such a queue can run.

The checks use ``bytes`` as items, so that they suit a queue that stores nothing else. They synchronise by
``waiter_count``, and do not rely on pauses of a fixed length. If something expected does not happen within
``PATIENCE``, the check fails.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kestrelpy.errors import QueueClosed, QueueEmpty
from kestrelpy.memory import BlockingQueue

__all__ = ["CHECKS", "check_blocking_queue"]

PATIENCE = 30.0
"""The most seconds to wait for something that must happen."""

LEAST_ROOM = 2000
"""The number of items for which the queues from ``make`` must have room."""

_Queue = BlockingQueue[bytes]


def check_blocking_queue(make: Callable[[], BlockingQueue[bytes]]) -> None:
    """Raise ``AssertionError`` unless the queues that ``make`` returns pass every check of ``CHECKS``.

    ``make()`` returns a fresh, empty queue each time, with room for 2,000 items. The queue is closed after its check.
    The checks of tasks that wait for room fill a queue whose ``maxsize`` is at most 2000, and pass any other queue. So
    run all checks with queues whose ``maxsize`` is 2000, too. A check of ``put_head`` or ``get_if`` passes if the queue
    raises ``NotImplementedError`` for the call. The error names every check that failed, with its traceback. Takes
    about a second.

    >>> from kestrelpy.memory import ConcurrentBlockingQueue
    >>> check_blocking_queue(ConcurrentBlockingQueue)
    """
    failures = []
    for name, check in CHECKS.items():
        try:
            check(make)
        except Exception:
            failures.append(f"{name}:\n{traceback.format_exc()}")
    if failures:
        raise AssertionError(f"{len(failures)} of {len(CHECKS)} checks failed\n\n" + "\n".join(failures))


CHECKS: dict[str, Callable[[Callable[[], BlockingQueue[bytes]]], None]] = {}
"""The checks by name; each takes ``make`` and raises ``AssertionError``."""


def _check(function: Callable[[_Queue], None]) -> Callable[[_Queue], None]:
    """Add ``function`` to ``CHECKS``. It runs with a fresh queue, which is closed after it."""

    def run(make: Callable[[], _Queue]) -> None:
        tested = make()
        try:
            function(tested)
        finally:
            tested.close()

    CHECKS[function.__name__] = run
    return function


def _expect(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _expect_equal(found: object, expected: object, what: str) -> None:
    _expect(found == expected, f"{what} is {found!r} and not {expected!r}")


@contextmanager
def _raises(error: type[BaseException], what: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{what} did not raise {error.__name__}")


class _Thread:
    """Runs ``call`` on a thread. ``result()`` returns its result, or raises its error."""

    def __init__(self, call: Callable[..., Any], *args: object) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(call, args), daemon=True).start()

    def _run(self, call: Callable[..., Any], args: tuple[object, ...]) -> None:
        try:
            self._outcome.put((call(*args), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> Any:
        try:
            value, error = self._outcome.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError("a call that should return is still waiting") from None
        if error is not None:
            raise error
        return value


def _until(condition: Callable[[], object], what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError(f"this did not happen: {what}")


def _parked(q: _Queue, call: Callable[..., Any], *args: object) -> _Thread:
    """Start a thread in ``call``, which is a get, and return the thread once it waits in line."""
    count = q.waiter_count + 1
    thread = _Thread(call, *args)
    _until(lambda: q.waiter_count == count, "a consumer gets into line")
    return thread


def _drain(q: _Queue) -> list[bytes]:
    found = []
    try:
        while True:
            found.append(q.get_nowait())
    except QueueEmpty:
        return found


def _fill(q: _Queue, count: int) -> list[bytes]:
    items = [b"item %d" % number for number in range(count)]
    for item in items:
        q.put(item)
    return items


@_check
def first_in_first_out(q: _Queue) -> None:
    items = _fill(q, 10)
    _expect_equal([q.get() for _ in items], items, "what came out")


@_check
def an_empty_item_is_an_item(q: _Queue) -> None:
    q.put(b"")
    _expect_equal(q.get(timeout=0), b"", "what came out")


@_check
def sizes(q: _Queue) -> None:
    _expect(q.empty() and not q.full() and len(q) == 0, "a fresh queue is not empty")
    _expect_equal(q.dropped_count, 0, "dropped_count of a fresh queue")
    _fill(q, 3)
    _expect_equal((q.qsize(), len(q), q.empty(), q.full()), (3, 3, False, False), "qsize, len, empty, full")
    q.get()
    _expect_equal(q.qsize(), 2, "qsize")


@_check
def an_empty_queue_says_so(q: _Queue) -> None:
    calls: dict[str, Callable[[], object]] = {
        "get(block=False)": lambda: q.get(block=False),
        "get(timeout=0)": lambda: q.get(timeout=0),
        "get(timeout=0.001)": lambda: q.get(timeout=0.001),
        "get_nowait": q.get_nowait,
        "peek": q.peek,
        "get_future(timeout=0)": lambda: q.get_future(timeout=0).result(PATIENCE),
    }
    for what, call in calls.items():
        with _raises(QueueEmpty, what):
            call()
    _expect(issubclass(QueueEmpty, queue.Empty), "QueueEmpty is not a subclass of queue.Empty")


@_check
def timeouts_are_not_negative(q: _Queue) -> None:
    q.put(b"stays")
    with _raises(ValueError, "get(timeout=-1)"):
        q.get(timeout=-1)
    with _raises(ValueError, "get_future(timeout=-1)"):
        q.get_future(timeout=-1)
    with _raises(ValueError, "put(timeout=-1)"):
        q.put(b"comes not", timeout=-1)
    _expect_equal(_drain(q), [b"stays"], "the list of items in the queue")


@_check
def peek_leaves_the_item(q: _Queue) -> None:
    items = _fill(q, 2)
    _expect_equal((q.peek(), q.peek(), q.qsize()), (items[0], items[0], 2), "what was peeked")
    _expect_equal(_drain(q), items, "the list of items in the queue")


@_check
def put_head_goes_first(q: _Queue) -> None:
    items = _fill(q, 2)
    try:
        q.put_head(b"head")
    except NotImplementedError:
        return
    q.put_head(b"new head")
    _expect_equal(_drain(q), [b"new head", b"head", *items], "the list of items in the queue")


@_check
def put_head_wakes_a_consumer(q: _Queue) -> None:
    waiting = q.get_future()
    try:
        q.put_head(b"head")
    except NotImplementedError:
        return
    _expect_equal(waiting.result(PATIENCE), b"head", "what the consumer got")


@_check
def get_if_looks_at_the_head_only(q: _Queue) -> None:
    items = _fill(q, 2)
    try:
        taken = q.get_if(lambda item: item == items[0])
    except NotImplementedError:
        return
    _expect_equal(taken, items[0], "what was taken")
    q.put(items[0])
    with _raises(QueueEmpty, "get_if of an item after the head"):
        q.get_if(lambda item: item == items[0])
    with _raises(ZeroDivisionError, "get_if with a predicate that raises"):
        q.get_if(lambda _: 1 / 0)
    _expect_equal(_drain(q), [items[1], items[0]], "the list of items in the queue")


@_check
def flush_drops_the_items(q: _Queue) -> None:
    _fill(q, 3)
    _expect_equal((q.flush(), q.flush(), q.qsize()), (3, 0, 0), "what flush returned, and qsize")
    items = _fill(q, 2)
    _expect_equal(_drain(q), items, "the list of items in the queue")


@_check
def flush_leaves_the_waiters(q: _Queue) -> None:
    waiting = q.get_future()
    q.flush()
    _expect_equal(q.waiter_count, 1, "waiter_count")
    q.put(b"item")
    _expect_equal(waiting.result(PATIENCE), b"item", "what the consumer got")


@_check
def a_waiting_thread_gets_the_item(q: _Queue) -> None:
    consumer = _parked(q, q.get)
    q.put(b"item")
    _expect_equal(consumer.result(), b"item", "what the consumer got")
    _expect_equal((q.qsize(), q.waiter_count), (0, 0), "qsize and waiter_count")


@_check
def consumers_are_served_in_order(q: _Queue) -> None:
    consumers: list[_Thread] = []
    futures = []
    for _ in range(5):
        consumers.append(_parked(q, q.get, True, PATIENCE))
        futures.append(q.get_future())
    items = _fill(q, 10)
    found = []
    for consumer, future in zip(consumers, futures, strict=True):
        found += [consumer.result(), future.result(PATIENCE)]
    _expect_equal(found, items, "what the consumers got, by arrival")


@_check
def a_consumer_that_gave_up_takes_nothing(q: _Queue) -> None:
    with _raises(QueueEmpty, "get(timeout=0.01)"):
        q.get(timeout=0.01)
    late = q.get_future(timeout=0.01)
    with _raises(QueueEmpty, "get_future(timeout=0.01)"):
        late.result(PATIENCE)
    items = _fill(q, 2)
    _expect_equal(q.waiter_count, 0, "waiter_count")
    _expect_equal(_drain(q), items, "the list of items in the queue")


@_check
def a_future_of_what_is_there_is_done(q: _Queue) -> None:
    items = _fill(q, 2)
    future = q.get_future()
    _expect(future.done(), "a future of an item that was there is not done")
    _expect_equal([future.result(0), *_drain(q)], items, "what came out")


@_check
def a_cancelled_future_leaves_the_line(q: _Queue) -> None:
    first, second = q.get_future(), q.get_future(timeout=PATIENCE)
    _expect_equal(q.waiter_count, 2, "waiter_count")
    _expect(first.cancel(), "a waiting future could not be cancelled")
    _expect_equal(q.waiter_count, 1, "waiter_count")
    items = _fill(q, 2)
    _expect_equal([second.result(PATIENCE), *_drain(q)], items, "what came out")
    _expect(not second.cancel(), "a future with a result could be cancelled")


@_check
def evicted_waiters_get_nothing(q: _Queue) -> None:
    consumer, future = _parked(q, q.get), q.get_future(timeout=PATIENCE)
    _expect_equal(q.evict_waiters(), 2, "what evict_waiters returned")
    with _raises(QueueEmpty, "an evicted get"):
        consumer.result()
    with _raises(QueueEmpty, "an evicted future"):
        future.result(PATIENCE)
    items = _fill(q, 1)
    _expect_equal((q.evict_waiters(), _drain(q)), (0, items), "the pair of the result of evict_waiters and the items")


@_check
def asyncio_consumers_are_served_in_order(q: _Queue) -> None:
    async def consume() -> list[bytes]:
        tasks = [asyncio.create_task(q.aget(PATIENCE)) for _ in range(5)]
        await asyncio.sleep(0)
        for number in range(5):
            await q.aput(b"item %d" % number)
        return await asyncio.gather(*tasks)

    _expect_equal(asyncio.run(consume()), [b"item %d" % number for number in range(5)], "what the tasks got")


async def _waiting_puts(q: _Queue, count: int) -> list[asyncio.Task[None]]:
    """Fill a queue, and return tasks that wait for room. No tasks if it has more room, or if its puts do not wait."""
    if not 0 < q.maxsize <= LEAST_ROOM:
        return []
    for _ in range(q.maxsize):
        q.put(b"filled")
    tasks = [asyncio.create_task(q.aput(b"waited %d" % number, PATIENCE)) for number in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    if not any(task.done() for task in tasks):
        return tasks
    await asyncio.gather(*tasks, return_exceptions=True)
    return []


@_check
def tasks_are_let_in_in_order(q: _Queue) -> None:
    async def work() -> list[bytes]:
        for task in await _waiting_puts(q, 5):
            q.get_nowait()
            await asyncio.wait_for(task, PATIENCE)
        return _drain(q)

    waited = [item for item in asyncio.run(work()) if item != b"filled"]
    _expect_equal(waited, sorted(waited), "what the tasks put")


@_check
def a_cancelled_aput_has_put_nothing(q: _Queue) -> None:
    async def work() -> None:
        tasks = await _waiting_puts(q, 3)
        if tasks:
            tasks[0].cancel()
            q.get_nowait()  # now there is room for one task, which is cancelled before it can put
            tasks[1].cancel()
            await asyncio.wait_for(tasks[2], PATIENCE)
            _expect(tasks[0].cancelled() and tasks[1].cancelled(), "a cancelled aput was not cancelled")
            await asyncio.sleep(0)
            _expect_equal(_drain(q)[-2:], [b"filled", b"waited 2"], "what came out last")

    asyncio.run(work())


@_check
def asyncio_and_threads_meet(q: _Queue) -> None:
    async def consume() -> bytes:
        return await q.aget(PATIENCE)

    consumer = _parked(q, asyncio.run, consume())
    q.put(b"item")
    _expect_equal(consumer.result(), b"item", "what the task got")


@_check
def an_asyncio_deadline_passes(q: _Queue) -> None:
    with _raises(QueueEmpty, "aget(timeout=0)"):
        asyncio.run(_aget(q, 0))
    with _raises(QueueEmpty, "aget(timeout=0.01)"):
        asyncio.run(_aget(q, 0.01))
    _expect_equal(q.waiter_count, 0, "waiter_count")
    items = _fill(q, 1)
    _expect_equal(_drain(q), items, "the list of items in the queue")


async def _aget(q: _Queue, timeout: float) -> bytes:
    return await q.aget(timeout)


@_check
def cancelled_tasks_lose_nothing(q: _Queue) -> None:
    async def cancel_after_the_items_came() -> None:
        tasks = [asyncio.create_task(q.aget()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        _fill(q, 3)  # assigned to tasks that cannot run before they are cancelled
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel_after_the_items_came())
    _expect_equal(q.waiter_count, 0, "waiter_count")
    _expect_equal(_drain(q), [b"item 0", b"item 1", b"item 2"], "the list of items in the queue")


@_check
def shutdown_lets_the_items_out(q: _Queue) -> None:
    items = _fill(q, 2)
    q.shutdown()
    for what, call in _puts(q).items():
        with _raises(QueueClosed, what + " after shutdown"):
            call()
    _expect_equal([q.get(), q.get()], items, "what came out after shutdown")
    for what, call in _gets(q).items():
        with _raises(QueueClosed, what + " of a queue that is shut down and empty"):
            call()


@_check
def close_drops_the_items(q: _Queue) -> None:
    _fill(q, 2)
    q.close()
    q.close()
    for what, call in {**_puts(q), **_gets(q)}.items():
        with _raises(QueueClosed, what + " after close"):
            call()


@_check
def shutdown_wakes_the_waiters(q: _Queue) -> None:
    consumer, future = _parked(q, q.get), q.get_future()
    q.shutdown()
    with _raises(QueueClosed, "a get that waited"):
        consumer.result()
    with _raises(QueueClosed, "a future that waited"):
        future.result(PATIENCE)
    _expect_equal(q.waiter_count, 0, "waiter_count")


def _puts(q: _Queue) -> dict[str, Callable[[], object]]:
    def put_head() -> None:
        try:
            q.put_head(b"item")
        except NotImplementedError:
            raise QueueClosed from None

    return {"put": lambda: q.put(b"item"), "put_nowait": lambda: q.put_nowait(b"item"), "put_head": put_head}


def _gets(q: _Queue) -> dict[str, Callable[[], object]]:
    return {"get": q.get, "get(timeout)": lambda: q.get(timeout=PATIENCE), "get_nowait": q.get_nowait}


@_check
def many_threads(q: _Queue) -> None:
    count, threads = 500, 4
    producers = [_Thread(_put_all, q, [b"%d %d" % (who, number) for number in range(count)]) for who in range(threads)]
    consumers = [_Thread(_get_all, q, count) for _ in range(threads)]
    for producer in producers:
        producer.result()
    found = [consumer.result() for consumer in consumers]
    put = [b"%d %d" % (who, number) for who in range(threads) for number in range(count)]
    _expect_equal(sorted(item for items in found for item in items), sorted(put), "what came out")
    for items in found:
        for who in range(threads):
            numbers = [int(item.split()[1]) for item in items if item.startswith(b"%d " % who)]
            _expect(numbers == sorted(numbers), "a consumer got items of one producer out of order")
    _expect_equal((q.qsize(), q.waiter_count), (0, 0), "qsize and waiter_count")


def _put_all(q: _Queue, items: list[bytes]) -> None:
    for item in items:
        q.put(item)


def _get_all(q: _Queue, count: int) -> list[bytes]:
    return [q.get(timeout=PATIENCE) for _ in range(count)]
