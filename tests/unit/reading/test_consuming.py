"""Loops over items, ``async with`` for queues, readers and items, and the questions of ``queue.Queue``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, NoDefaultReader, QueueClosed, Reader, ReaderConfig, dead_letters, open_reader
from kestrelpy._reading import consuming
from kestrelpy.errors import DurabilityUnknown
from tests.support.disks import GatedDisk
from tests.support.patience import PATIENCE, until

Source = JournaledQueue[bytes] | Reader[bytes]
SOURCES: dict[str, Callable[[JournaledQueue[bytes]], Source]] = {
    "queue": lambda queue: queue,
    "reader": lambda queue: queue.reader(),
    "named reader": lambda queue: queue.reader("mail"),
}


@pytest.fixture(params=SOURCES)
def source_of(request: pytest.FixtureRequest) -> Callable[[JournaledQueue[bytes]], Source]:
    return SOURCES[request.param]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_loop_ends_when_the_queue_is_closed(
    tmp_path: Path, source_of: Callable[[JournaledQueue[bytes]], Source]
) -> None:
    queue = JournaledQueue(tmp_path, "jobs")
    source, seen = source_of(queue), list[bytes]()

    def work() -> None:
        for item in source:
            with item:
                seen.append(item.data)

    thread = threading.Thread(target=work)
    thread.start()
    queue.put_many([b"a", b"b"])
    until(lambda: seen == [b"a", b"b"])
    until(lambda: sum(reader.waiter_count for reader in queue.readers.values()) == 1)
    queue.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert next(iter(source), None) is None, "a loop over what is closed ends at once"


def test_an_async_loop_ends_when_the_queue_is_closed(
    tmp_path: Path, source_of: Callable[[JournaledQueue[bytes]], Source]
) -> None:
    async def scene() -> None:
        seen = list[bytes]()
        async with JournaledQueue(tmp_path, "jobs") as queue:
            source = source_of(queue)

            async def work() -> None:
                async for item in source:
                    async with item:
                        seen.append(item.data)

            tasks = [asyncio.ensure_future(work()) for _ in range(3)]
            await queue.aput(b"a")
            await queue.aput(b"b")
            await turns()
            cancelled = tasks.pop()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await queue.aput(b"c")
            await turns()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        assert sorted(seen) == [b"a", b"b", b"c"]
        assert [item async for item in source] == []

    asyncio.run(scene())
    with JournaledQueue(tmp_path, "jobs") as again:
        assert source_of(again).empty()


@pytest.mark.parametrize("way", ["break", "raise", "abort", "cancel"])
def test_the_last_item_is_what_the_body_has_made_of_it(tmp_path: Path, way: str) -> None:
    async def scene() -> None:
        async with JournaledQueue(tmp_path, "jobs") as queue:
            queue.put_many([b"a", b"b", b"c"])

            async def work() -> None:
                async for item in queue:
                    if item.data == b"a":
                        item.commit()
                        continue
                    if way == "break":
                        break
                    if way == "abort":
                        item.abort()
                        break
                    async with item:
                        if way == "cancel":
                            await asyncio.Event().wait()
                        raise LookupError

            task = asyncio.ensure_future(work())
            await turns()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            reader = queue.reader()
            assert reader.open_items == (way == "break"), "nothing but the body ends an open read"
            assert reader.items == 2, "nothing was got ahead, and nothing is lost"
            first = queue.get(timeout=0)
            assert (first.data, first.error_count) == {
                "break": (b"c", 0),
                "abort": (b"b", 1),
                "raise": (b"b", 1),
                "cancel": (b"b", 1),
            }[way]

    asyncio.run(scene())
    with JournaledQueue(tmp_path, "jobs") as again:
        assert again.get(timeout=0).data == b"b", "an open read comes again at the next opening"


def test_a_loop_raises_what_is_not_its_end(tmp_path: Path) -> None:
    disk = GatedDisk()
    queue = JournaledQueue(tmp_path, "jobs", sync="always", disk=disk)
    disk.error = OSError(5, "the disk has failed")
    with pytest.raises(DurabilityUnknown):
        queue.put(b"a")
    with pytest.raises(DurabilityUnknown):
        next(iter(queue))
    queue.close()
    with JournaledQueue(tmp_path, "named") as queue:
        queue.reader("a")
        queue.reader("b")
        with pytest.raises(NoDefaultReader):
            next(iter(queue))
        with pytest.raises(NoDefaultReader):
            len(queue)
        assert queue, "a queue is true, whatever its length"


@pytest.mark.parametrize("fault", [consuming.Items, consuming.ItemsInTask])
def test_a_loop_that_swallows_errors_would_be_found(tmp_path: Path, fault: type[object]) -> None:
    checks = {consuming.Items: test_a_loop_raises_what_is_not_its_end, consuming.ItemsInTask: check_async_loop}
    with patch.object(consuming, "QueueClosed", Exception), pytest.raises((pytest.fail.Exception, StopIteration)):
        checks[fault](tmp_path)


def check_async_loop(folder: Path) -> None:
    async def scene() -> None:
        async with JournaledQueue(folder, "jobs") as queue:
            queue.reader("a")
            queue.reader("b")
            with pytest.raises(NoDefaultReader):
                [item async for item in queue]

    asyncio.run(scene())


def test_an_async_loop_raises_what_is_not_its_end(tmp_path: Path) -> None:
    check_async_loop(tmp_path)


def test_a_close_does_not_block_the_loop(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        queue = JournaledQueue(tmp_path, "jobs", sync="never", disk=disk)
        async with queue:
            queue.put(b"a")
            queue.get().commit()
            waiting = asyncio.ensure_future(queue.aget())
            await turns()
            disk.gate.clear()
            closing = asyncio.ensure_future(queue.aclose())
            await asyncio.to_thread(disk.started.acquire)
            await turns()
            assert not closing.done()
            closing.cancel()
            await turns()
            assert not closing.done(), "a close is never left half done"
            disk.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert queue.closed
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(outcome, QueueClosed)

    asyncio.run(scene())
    with JournaledQueue(tmp_path, "jobs") as again:
        assert again.empty(), "nobody else has the queue open, and the commit is saved"


def test_a_close_without_threads_is_done_all_the_same(tmp_path: Path) -> None:
    async def scene() -> None:
        queue = JournaledQueue(tmp_path, "jobs")
        with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            await queue.aclose()
        assert queue.closed

    asyncio.run(scene())


def test_readers_are_closed_by_their_blocks(tmp_path: Path) -> None:
    async def scene() -> None:
        async with JournaledQueue(tmp_path, "jobs") as queue:
            async with queue.reader("a") as reader:
                await queue.aput(b"1")
                async with await reader.aget() as item:
                    assert item.data == b"1"
            assert "a" not in queue.readers
            with queue.reader("b") as reader:
                assert reader.empty()
            with pytest.raises(QueueClosed):
                reader.get()

    asyncio.run(scene())
    with open_reader(tmp_path, "jobs", "a") as detached:
        assert detached.empty()
    with pytest.raises(QueueClosed):
        detached.get()


def test_a_move_to_the_dead_letters_does_not_block_the_loop(tmp_path: Path) -> None:
    threads = []
    real = Reader.abort_for

    def abort(self: Reader, *args: Any) -> None:
        threads.append(threading.current_thread().name)
        real(self, *args)

    async def fail(queue: JournaledQueue) -> None:
        async with await queue.aget():
            raise LookupError("no such user")

    async def scene() -> None:
        config = ReaderConfig(max_deliveries=1, dead_letter="dead")
        async with JournaledQueue(tmp_path, "jobs", default_reader=config) as queue:
            queue.put(b"a")
            with pytest.raises(LookupError):
                await fail(queue)
        async with JournaledQueue(tmp_path, "plain") as queue:
            queue.put(b"a")
            with pytest.raises(LookupError):
                await fail(queue)

    with patch.object(Reader, "abort_for", abort):
        asyncio.run(scene())
    assert threads == ["kestrelpy-close", threading.current_thread().name], "a thread is used where there is a move"
    with dead_letters(tmp_path, "dead") as letters:
        assert next(letters).reason == "LookupError: no such user"


def test_the_questions_of_a_reader(tmp_path: Path) -> None:
    limited = ReaderConfig(max_items=2)
    with JournaledQueue(tmp_path, "jobs", default_reader=limited) as queue:
        reader = queue.reader()
        for source in (queue, reader):
            assert (source.qsize(), len(source), source.empty(), source.full()) == (0, 0, True, False)
        queue.put_many([b"a", b"b"])
        item = queue.get()
        for source in (queue, reader):
            assert (source.qsize(), len(source), source.empty(), source.full()) == (1, 1, False, True)
        item.commit()
        for source in (queue, reader):
            assert (source.qsize(), len(source), source.empty(), source.full()) == (1, 1, False, False)
