"""Every blocking queue of the library passes one suite, and the suite notices queues that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.errors import QueueClosed, QueueEmpty, QueueFull
from kestrelpy.memory import BlockingQueue, ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.testing import check_blocking_queue
from kestrelpy.testing.conformance import CHECKS

Make = Callable[[], BlockingQueue[bytes]]


@pytest.fixture(
    params=[
        "simple",
        "concurrent",
        "simple with a limit",
        "concurrent with a limit",
        "journaled",
        "journaled with a limit",
        "volatile",
        "volatile with a limit",
    ]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    in_memory: dict[str, Make] = {
        "simple": SimpleBlockingQueue,
        "concurrent": ConcurrentBlockingQueue,
        "simple with a limit": functools.partial(SimpleBlockingQueue, 2000),
        "concurrent with a limit": functools.partial(ConcurrentBlockingQueue, 2000),
    }
    if request.param in in_memory:
        yield in_memory[request.param]
        return
    from kestrelpy import JournaledQueue, ReaderConfig

    made: list[JournaledQueue] = []
    numbers = itertools.count()

    kind, _, limit = request.param.partition(" ")
    config = ReaderConfig(max_items=2000 if limit else None)

    def make_one() -> BlockingQueue[bytes]:
        name = f"q{next(numbers)}"
        made.append(JournaledQueue(tmp_path, name, journaled=kind == "journaled", default_reader=config))
        return made[-1].as_blocking_queue()

    yield make_one
    for q in made:
        q.close()


@pytest.mark.parametrize("name", CHECKS)
def test_every_queue_passes(make: Make, name: str) -> None:
    CHECKS[name](make)


def test_the_whole_suite_is_one_call() -> None:
    check_blocking_queue(ConcurrentBlockingQueue)


# -- queues that are wrong, each in one way, and a check that must notice ----------------------------------------------


class LastInFirstOut(SimpleBlockingQueue[bytes]):
    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        self.put_head(item)


class ForgetsFalseItems(SimpleBlockingQueue[bytes]):
    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        if item:
            super().put(item, block, timeout)


class CountsWaiters(SimpleBlockingQueue[bytes]):
    def qsize(self) -> int:
        return super().qsize() - self.waiter_count

    def full(self) -> bool:
        return self.qsize() > 2


class ReturnsNone(SimpleBlockingQueue[bytes]):
    def get_nowait(self) -> Any:
        try:
            return super().get_nowait()
        except QueueEmpty:
            return None


class WaitsForEver(SimpleBlockingQueue[bytes]):
    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        return super().get(block, None if timeout is None or timeout < 0 else timeout)


class PeekTakes(SimpleBlockingQueue[bytes]):
    def peek(self) -> bytes:
        return self.get_nowait()


class HeadInOrder(SimpleBlockingQueue[bytes]):
    def put_head(self, item: bytes) -> None:
        super().put_head(item)
        if len(self._items) > 1:
            self._items[0], self._items[1] = self._items[1], self._items[0]


class HeadWakesNobody(SimpleBlockingQueue[bytes]):
    def put_head(self, item: bytes) -> None:
        self._items.appendleft(item)


class LooksFurther(SimpleBlockingQueue[bytes]):
    def get_if(self, predicate: Callable[[bytes], object]) -> bytes:
        for item in list(self._items):
            if predicate(item):
                self._items.remove(item)
                return item
        raise QueueEmpty


class FlushLosesCount(SimpleBlockingQueue[bytes]):
    def flush(self) -> int:
        return super().flush() and 1


class FlushEvicts(SimpleBlockingQueue[bytes]):
    def flush(self) -> int:
        self.evict_waiters()
        return super().flush()


class LosesWakeUps(SimpleBlockingQueue[bytes]):
    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)


class Unfair(SimpleBlockingQueue[bytes]):
    def _match(self) -> None:
        if len(self._line) > 1:
            self._line.waiters.move_to_end(next(reversed(self._line.waiters)), last=False)
        super()._match()


class ServesTheGone(SimpleBlockingQueue[bytes]):
    def _leave(self, waiter: Any) -> bool:
        super()._leave(waiter)
        self._line.add(waiter)
        return True


class FutureIsLate(SimpleBlockingQueue[bytes]):
    def _take_now(self) -> bytes:
        raise QueueEmpty

    def _enter(self, waiter: Any) -> None:
        self._line.add(waiter)


class EvictsHalf(SimpleBlockingQueue[bytes]):
    def evict_waiters(self) -> int:
        return super().evict_waiters() // 2


class LosesWhatCameBack(SimpleBlockingQueue[bytes]):
    def _give_back(self, waiter: Any, item: bytes) -> None:
        """Not."""


class NewestFirstBack(SimpleBlockingQueue[bytes]):
    def _give_back(self, waiter: Any, item: bytes) -> None:
        waiter.order = -len(self._returned)
        super()._give_back(waiter, item)


class PutAfterTheEnd(SimpleBlockingQueue[bytes]):
    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        if not self._closed:
            super().put(item, block, timeout)


class ShutdownDrops(SimpleBlockingQueue[bytes]):
    def shutdown(self, immediate: bool = False) -> None:
        super().shutdown(True)


class CloseKeeps(SimpleBlockingQueue[bytes]):
    def close(self) -> None:
        self.shutdown()


class EmptyAfterTheEnd(SimpleBlockingQueue[bytes]):
    def _nothing(self) -> Any:
        return QueueEmpty()


class EndWakesNobody(SimpleBlockingQueue[bytes]):
    def shutdown(self, immediate: bool = False) -> None:
        gone, self._line.waiters = self._line.waiters, type(self._line.waiters)()
        super().shutdown(immediate)
        self._line.waiters.update(gone)


class DropsSome(SimpleBlockingQueue[bytes]):
    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        if item != b"2 400":
            super().put(item, block, timeout)


class Full(SimpleBlockingQueue[bytes]):
    def __init__(self) -> None:
        super().__init__(2000)


class PutsFromAThread(Full):
    async def aput(self, item: bytes, timeout: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        def put() -> None:
            with contextlib.suppress(QueueFull, QueueClosed, RuntimeError):  # the last one: the loop is closed
                self.put(item, True, timeout)
                loop.call_soon_threadsafe(tell)

        threading.Thread(target=put, daemon=True).start()
        await asyncio.sleep(0.02)  # so that they come in order
        await done


class LastComeFirstServed(Full):
    def _match(self) -> None:
        if len(self._producers) > 1:
            self._producers.waiters.move_to_end(next(reversed(self._producers.waiters)), last=False)
        super()._match()


WRONG: list[tuple[type[SimpleBlockingQueue[bytes]], str]] = [
    (LastInFirstOut, "first_in_first_out"),
    (ForgetsFalseItems, "an_empty_item_is_an_item"),
    (CountsWaiters, "sizes"),
    (ReturnsNone, "an_empty_queue_says_so"),
    (WaitsForEver, "timeouts_are_not_negative"),
    (PeekTakes, "peek_leaves_the_item"),
    (HeadInOrder, "put_head_goes_first"),
    (HeadWakesNobody, "put_head_wakes_a_consumer"),
    (LooksFurther, "get_if_looks_at_the_head_only"),
    (FlushLosesCount, "flush_drops_the_items"),
    (FlushEvicts, "flush_leaves_the_waiters"),
    (LosesWakeUps, "a_waiting_thread_gets_the_item asyncio_and_threads_meet"),
    (Unfair, "consumers_are_served_in_order asyncio_consumers_are_served_in_order"),
    (ServesTheGone, "a_consumer_that_gave_up_takes_nothing a_cancelled_future_leaves_the_line"),
    (ServesTheGone, "an_asyncio_deadline_passes"),
    (FutureIsLate, "a_future_of_what_is_there_is_done"),
    (EvictsHalf, "evicted_waiters_get_nothing"),
    (LosesWhatCameBack, "cancelled_tasks_lose_nothing"),
    (NewestFirstBack, "cancelled_tasks_lose_nothing"),
    (PutAfterTheEnd, "shutdown_lets_the_items_out"),
    (ShutdownDrops, "shutdown_lets_the_items_out"),
    (CloseKeeps, "close_drops_the_items"),
    (EmptyAfterTheEnd, "shutdown_lets_the_items_out close_drops_the_items shutdown_wakes_the_waiters"),
    (EndWakesNobody, "shutdown_wakes_the_waiters"),
    (DropsSome, "many_threads"),
    (PutsFromAThread, "a_cancelled_aput_has_put_nothing"),
    (LastComeFirstServed, "tasks_are_let_in_in_order"),
]


@pytest.mark.parametrize(("wrong", "names"), WRONG)
def test_the_suite_notices(
    wrong: type[SimpleBlockingQueue[bytes]], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrelpy.testing.conformance.PATIENCE", 0.2)
    monkeypatch.setattr("kestrelpy.testing.conformance.CHECKS", {name: CHECKS[name] for name in names.split()})
    with pytest.raises(AssertionError) as caught:
        check_blocking_queue(wrong)
    for name in names.split():
        assert f"{name}:\n" in str(caught.value)


def test_every_check_is_known_to_fail() -> None:
    assert {name for _, names in WRONG for name in names.split()} == set(CHECKS)
