"""The blocking-queue face of a journaled queue. What it shares with the other queues is in the conformance suite."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import queue as standard
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import BlockingQueue, JournaledQueue, QueueClosed, QueueEmpty, QueueFull, ReaderConfig
from kestrelpy._reading.local_source import LocalSource
from kestrelpy.blocking import JournaledBlockingQueue
from kestrelpy.codecs import JSON
from kestrelpy.testing import ManualClock
from tests.support.patience import until

Open = Callable[..., JournaledQueue]


# LK-F47: commits at the get; put_head and get_if are not offered.
def test_lk_f47_a_get_commits(open_queue: Open) -> None:
    with open_queue() as journaled:
        face = journaled.as_blocking_queue()
        face.put(b"1")
        face.put_nowait(b"2")
        assert (face.qsize(), len(face), face.empty(), face.full()) == (2, 2, False, False)
        assert face.peek() == b"1"
        assert face.get() == b"1"
        assert journaled.reader().head == 1
        assert journaled.reader().open_items == 0
        for call in (lambda: face.put_head(b"x"), lambda: face.get_if(bool)):
            with pytest.raises(NotImplementedError):
                call()
        assert face.get_nowait() == b"2"
        for call in (face.get_nowait, face.peek, lambda: face.get(timeout=0.001)):
            with pytest.raises(standard.Empty):
                call()
    with open_queue() as journaled:
        assert journaled.reader().items == 0


def test_values_go_through_the_codec(open_queue: Open) -> None:
    face = open_queue(codec=JSON).as_blocking_queue()
    face.put({"a": 1})
    face.put([2])
    assert face.peek() == {"a": 1}
    assert face.get() == {"a": 1}
    assert face.get_future().result(0) == [2]


GETS: dict[str, Callable[[BlockingQueue[Any]], Any]] = {
    "get": lambda face: face.get(),
    "get_future": lambda face: face.get_future().result(0),
    "aget": lambda face: asyncio.run(face.aget()),
}


class Seeking:
    """A codec that moves the reader while it decodes the first item: between a get and its commit."""

    def __init__(self, seek: Callable[[], object], *, fails: bool = False) -> None:
        self._left = [seek]
        self._fails = fails

    def encode(self, value: Any) -> bytes:
        return bytes(value)

    def decode(self, data: bytes) -> bytes:
        while self._left:
            self._left.pop()()
            if self._fails:
                raise ValueError(data)
        return data


@pytest.mark.parametrize("get", GETS)
@pytest.mark.parametrize(("item_id", "left"), [(1, [b"1", b"2", b"3"]), (2, [b"2", b"3"]), (3, [b"3"])])
def test_a_get_beside_a_seek_returns_its_item(open_queue: Open, get: str, item_id: int, left: list[bytes]) -> None:
    journaled = open_queue(codec=Seeking(lambda: journaled.seek(item_id)))
    journaled.put_many([b"1", b"2", b"3"])
    face = journaled.as_blocking_queue()
    assert GETS[get](face) == b"1"
    assert [face.get_nowait() for _ in left] == left
    assert (face.qsize(), journaled.reader().open_items) == (0, 0)
    journaled._check()


@pytest.mark.parametrize("get", GETS)
def test_a_get_beside_a_seek_raises_what_its_codec_raises(open_queue: Open, get: str) -> None:
    journaled = open_queue(codec=Seeking(lambda: journaled.seek(1), fails=True))
    journaled.put_many([b"1", b"2"])
    face = journaled.as_blocking_queue()
    with pytest.raises(ValueError, match="1"):
        GETS[get](face)
    assert [face.get_nowait(), face.get_nowait()] == [b"1", b"2"]


def test_qsize_counts_unread_items(open_queue: Open) -> None:
    journaled = open_queue()
    face = journaled.as_blocking_queue()
    journaled.put_many([b"1", b"2", b"3"])
    item = journaled.get_nowait()
    assert face.qsize() == 2
    item.abort()
    assert face.qsize() == 3
    assert repr(face) == "<JournaledBlockingQueue jobs: 3 items, 0 waiters>"


def test_put_waits_for_room_whatever_the_policy(open_queue: Open, start: Any) -> None:
    journaled = open_queue(default_reader=ReaderConfig(max_items=1))  # REFUSE
    face = journaled.as_blocking_queue()
    assert face.maxsize == 1
    face.put(b"1")
    assert face.full()
    calls: tuple[Callable[[], object], ...] = (lambda: face.put_nowait(b"2"), lambda: face.put(b"2", False))
    for call in calls:
        with pytest.raises(QueueFull):
            call()
    start(face.put, b"2")
    until(lambda: len(journaled._room) == 1)
    assert face.get() == b"1"
    until(lambda: face.qsize() == 1)
    assert face.get() == b"2"


def test_aput_and_aget(open_queue: Open) -> None:
    async def work() -> None:
        journaled = open_queue(default_reader=ReaderConfig(max_items=1))
        face = journaled.as_blocking_queue()
        await face.aput(b"1")
        task = asyncio.ensure_future(face.aput(b"2", timeout=20))
        while not journaled._room:
            await asyncio.sleep(0)
        assert await face.aget() == b"1"
        await task
        assert await face.aget() == b"2"
        with pytest.raises(QueueEmpty):
            await face.aget(0)
        waiting = asyncio.ensure_future(face.aget())
        while not face.waiter_count:
            await asyncio.sleep(0)
        journaled.put(b"3")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert face.get_nowait() == b"3", "a cancelled aget loses no item"

    asyncio.run(work())


def test_futures(open_queue: Open, clock: ManualClock) -> None:
    journaled = open_queue()
    face = journaled.as_blocking_queue()
    cancelled, kept, late = face.get_future(), face.get_future(), face.get_future(1)
    assert cancelled.cancel()
    assert face.waiter_count == 2
    journaled.put(b"1")
    assert kept.result(0) == b"1"
    assert (journaled.reader().head, journaled.reader().open_items) == (1, 0)
    clock.advance(1)
    assert isinstance(late.exception(0), QueueEmpty)
    waiting = face.get_future()
    assert face.evict_waiters() == 1
    assert isinstance(waiting.exception(0), QueueEmpty)


def test_flush_and_dropped_count(open_queue: Open) -> None:
    journaled = open_queue()
    face = journaled.as_blocking_queue()
    for _ in range(3):
        face.put(b"x")
    assert face.flush() == 3
    assert face.empty()
    assert face.dropped_count == 0


def test_shutdown_refuses_puts_and_lets_gets_go_on(open_queue: Open, start: Any) -> None:
    journaled = open_queue()
    face = journaled.as_blocking_queue()
    waiting = face.get_future()
    face.put(b"1")
    assert waiting.result(0) == b"1"
    waiting = face.get_future()
    journaled.reader()
    face.shutdown()
    face.shutdown()
    assert isinstance(waiting.exception(0), QueueClosed)
    puts: tuple[Callable[[], object], ...] = (lambda: face.put(b"x"), lambda: face.put_nowait(b"x"))
    for call in puts:
        with pytest.raises(QueueClosed):
            call()
    journaled.put(b"2")
    assert face.get() == b"2"
    for call in (face.get, face.get_nowait, lambda: asyncio.run(face.aget())):
        with pytest.raises(QueueClosed):
            call()
    assert not journaled.closed


def test_who_waits_gets_what_was_put_before_a_shutdown(open_queue: Open) -> None:
    """Found by the scheduler: a put had returned, and who led its sync had not come to serve those who wait."""
    face = open_queue().as_blocking_queue()
    waiting = [face.get_future(), face.get_future()]
    with patch.object(LocalSource, "wake", lambda self: None):
        face.put(b"1")
    face.shutdown()
    assert waiting[0].result(0) == b"1"
    assert isinstance(waiting[1].exception(0), QueueClosed)


def test_shutdown_wakes_puts_and_refuses_every_way_in(open_queue: Open, start: Any) -> None:
    journaled = open_queue(default_reader=ReaderConfig(max_items=1))
    face = journaled.as_blocking_queue()
    face.put(b"1")

    def put() -> None:
        with pytest.raises(QueueClosed):
            face.put(b"2")

    thread = start(put)
    until(lambda: len(journaled._room) == 1)
    face.shutdown()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(QueueClosed):
        asyncio.run(face.aput(b"2"))
    assert face.get() == b"1"
    with pytest.raises(QueueClosed):
        face.get_future().result(0)


def test_close_closes_the_queue_and_keeps_the_items(open_queue: Open) -> None:
    journaled = open_queue()
    face = journaled.as_blocking_queue()
    face.put(b"1")
    waiting = [face.get_future(), face.get_future()]
    assert waiting[0].result(0) == b"1"
    face.put(b"2")
    assert waiting[1].result(0) == b"2"
    face.put(b"3")
    face.close()
    face.close()
    assert journaled.closed
    for call in (face.get, lambda: face.put(b"x"), face.get_nowait):
        with pytest.raises(QueueClosed):
            call()
    with open_queue() as again:
        assert again.get_nowait().data == b"3"


# -- logging ---------------------------------------------------------------------------------------------------------


class LogRecords:
    """As docs/guide.md has it."""

    def encode(self, value: Any) -> bytes:
        return json.dumps(None if value is None else vars(value), default=str).encode()

    def decode(self, data: bytes) -> Any:
        values = json.loads(data)
        return None if values is None else logging.makeLogRecord(values)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_log_records_go_through_a_queue_with_a_codec(folder: Path) -> None:
    logger = logging.Logger("shop")
    with JournaledQueue(folder, "log", codec=LogRecords()) as logs:
        logger.addHandler(logging.handlers.QueueHandler(logs.as_blocking_queue()))
        logger.warning("sold %d of %s", 3, "apples", extra={"shelf": folder})
        try:
            raise KeyError("pears")
        except KeyError:
            logger.exception("none left")
    kept = Kept()
    with JournaledQueue(folder, "log", codec=LogRecords()) as logs:
        with logs.get(timeout=0) as item:
            kept.handle(item.value)
        assert item.value.shelf == str(folder)
        listener = logging.handlers.QueueListener(logs.as_blocking_queue(), kept)
        listener.start()
        listener.stop()
        assert logs.stats().items == 0
    assert kept.lines[0] == "sold 3 of apples"
    assert kept.lines[1].startswith("none left\nTraceback")
    assert kept.lines[1].endswith("KeyError: 'pears'")


def test_what_is_not_bytes_says_that_a_codec_takes_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("shop")
    with JournaledQueue(folder, "log") as logs:
        logger.addHandler(logging.handlers.QueueHandler(logs.as_blocking_queue()))
        logger.warning("sold")
        assert logs.stats().items == 0
    said = "must be bytes, bytearray or memoryview, not LogRecord: for other values open the queue with codec="
    assert said in capsys.readouterr().err
    with (
        JournaledQueue(folder, "log", codec=Wrong()) as logs,
        pytest.raises(TypeError, match=r"Wrong.* encodes to must"),
    ):
        logs.put(1)


class Wrong:
    def encode(self, value: Any) -> Any:
        return value

    def decode(self, data: bytes) -> Any:
        return data


def test_an_item_that_cannot_be_decoded_stays(open_queue: Open) -> None:
    queue = open_queue(codec=JSON)
    face = queue.as_blocking_queue()
    with patch.object(queue._puts, "_codec", None):
        queue.put(b"no JSON")
    with pytest.raises(ValueError, match="Expecting value"):
        face.get(False)
    future = face.get_future()
    with pytest.raises(ValueError, match="Expecting value"):
        future.result(0)
    with pytest.raises(ValueError, match="Expecting value"):
        asyncio.run(face.aget())
    item = queue.get_nowait()
    assert (item.data, item.error_count) == (b"no JSON", 3)


def test_what_ends_the_thread_that_brings_an_item_is_told_to_who_was_to_get_it(open_queue: Open) -> None:
    class Leaves:
        def encode(self, value: object) -> bytes:
            return str(value).encode()

        def decode(self, data: bytes) -> object:
            raise SystemExit(data.decode())

    queue = open_queue(codec=Leaves())
    future = queue.as_blocking_queue().get_future()
    with pytest.raises(SystemExit):
        queue.put("1")
    assert isinstance(future.exception(0), SystemExit)
    assert queue.get_nowait().data == b"1"


def test_a_get_that_is_interrupted_with_its_item_in_hand_gives_it_back(open_queue: Open) -> None:
    face = open_queue().as_blocking_queue()
    face.put(b"1")
    with patch.object(JournaledBlockingQueue, "_done", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            face.get(False)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(face.aget())
    assert face.get(False) == b"1"
