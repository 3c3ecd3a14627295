"""``DurableListener``: each record at least once, in order, and no longer than its tries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, codecs, open_reader
from kestrelpy.logging import DurableHandler, DurableListener
from kestrelpy.logging.records import encode_record

Open = Callable[..., JournaledQueue]


class Seen(logging.Handler):
    """Keeps the texts that it gets; those that ``fails`` has raise so many times first."""

    def __init__(self, level: int = logging.NOTSET, **fails: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []
        self.fails = fails
        self.tries = 0
        self.got = threading.Semaphore(0)
        self.failed = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.tries += 1
        if self.fails.get(text, 0):
            self.fails[text] -= 1
            self.failed.release()
            raise LookupError(text)
        self.texts.append(text)
        self.got.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.got.acquire(timeout=20)


def put(queue: JournaledQueue, *texts: str, level: int = logging.INFO) -> None:
    handler = DurableHandler(queue)
    for text in texts:
        handler.handle(logging.makeLogRecord({"name": "shop", "msg": text, "levelno": level, "levelname": "X"}))
    handler.close()


def test_records_are_handed_on_in_order_and_committed(open_queue: Open) -> None:
    queue, seen = open_queue(), Seen()
    put(queue, "a", "b")
    with DurableListener(queue, seen) as listener:
        put(queue, "c")
        seen.wait(3)
        put(queue, "d")
    assert seen.texts == ["a", "b", "c", "d"]
    assert (listener.handled_count, listener.failed_count) == (4, 0)
    assert queue.reader().items == 0


def test_a_stop_handles_what_is_there(open_queue: Open) -> None:
    queue, seen = open_queue(), Seen()
    put(queue, *map(str, range(500)))
    listener = DurableListener(queue, seen)
    listener.start()
    listener.stop()
    listener.stop()
    assert seen.texts == [str(number) for number in range(500)]
    put(queue, "while it is stopped")
    listener.start()
    listener.stop()
    assert seen.texts[-1] == "while it is stopped"


def test_a_stop_ends_though_producers_go_on(open_queue: Open) -> None:
    queue = open_queue()

    class Feeding(Seen):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            queue.put(encode_record(record))

    seen = Feeding()
    put(queue, "a", "b", "c")
    listener = DurableListener(queue, seen)
    listener.start()
    seen.wait(1)
    listener.stop()
    assert seen.texts[:3] == ["a", "b", "c"]
    assert queue.reader().items > 0


def test_start_twice_and_stop_without_a_start(open_queue: Open) -> None:
    listener = DurableListener(open_queue(), Seen())
    listener.stop()
    with listener, pytest.raises(RuntimeError, match="started already"):
        listener.start()


def test_levels(open_queue: Open) -> None:
    queue, low, high = open_queue(), Seen(), Seen(logging.ERROR)
    put(queue, "info")
    put(queue, "error", level=logging.ERROR)
    with DurableListener(queue, low, high, respect_handler_level=True):
        pass
    assert (low.texts, high.texts) == (["info", "error"], ["error"])
    put(queue, "info")
    with DurableListener(queue, high):
        pass
    assert high.texts == ["error", "info"], "as QueueListener, which asks for no level unless it is told to"


def test_a_handler_that_raises_gets_the_record_again_and_the_others_do_not(open_queue: Open) -> None:
    queue, good, bad = open_queue(), Seen(), Seen(b=2)
    put(queue, "a", "b", "c")
    with DurableListener(queue, good, bad, retry_delay=0) as listener:
        bad.wait(3)
    assert good.texts == bad.texts == ["a", "b", "c"]
    assert bad.tries == 5
    assert (listener.handled_count, listener.failed_count) == (3, 0)


def test_a_listener_that_commits_first_is_caught(open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it is for."""
    queue, seen = open_queue(), Seen(a=1)
    put(queue, "a", "b")
    deliver = DurableListener._deliver

    def commits_first(listener: DurableListener, item: Any) -> None:
        item.commit()
        deliver(listener, item)

    monkeypatch.setattr(DurableListener, "_deliver", commits_first)
    with DurableListener(queue, seen, retry_delay=0):
        seen.wait(1)
    assert seen.texts == ["b"]


def test_a_record_is_given_up_after_its_tries(open_queue: Open, caplog: pytest.LogCaptureFixture) -> None:
    queue, seen = open_queue(), Seen(b=99)
    put(queue, "a", "b", "c")
    with DurableListener(queue, seen, retry_delay=0, max_tries=4) as listener:
        seen.wait(2)
    assert seen.texts == ["a", "c"]
    assert 99 - seen.fails["b"] == 4
    assert (listener.handled_count, listener.failed_count) == (2, 1)
    assert queue.reader().items == 0
    assert "log record 2 is given up after 4 tries: LookupError('b')" in caplog.text


def test_a_stop_does_not_wait_for_a_handler_that_fails(open_queue: Open) -> None:
    """Nor does it use up the tries of the record."""
    queue, seen = open_queue(), Seen(a=99)
    put(queue, "a", "b")
    listener = DurableListener(queue, seen, retry_delay=1000)
    listener.start()
    assert seen.failed.acquire(timeout=20)
    listener.stop()
    assert (seen.texts, queue.reader().items) == ([], 2)
    assert queue.get_nowait().error_count == 1


def test_tries_survive_a_restart(tmp_path: Path) -> None:
    seen = Seen(a=99)
    for _ in range(3):
        with JournaledQueue(tmp_path, "logs") as queue:
            if not queue.stats().tail_id:
                put(queue, "a")
            listener = DurableListener(queue, seen, retry_delay=1000, max_tries=3)
            listener.start()
            assert seen.failed.acquire(timeout=20)
            listener.stop()
    assert listener.failed_count == 1


def test_the_delay_grows(open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, seen, waits = open_queue(), Seen(a=9), list[float]()
    put(queue, "a")
    listener = DurableListener(queue, seen, retry_delay=0.5, max_tries=None)
    monkeypatch.setattr(listener._stopping, "wait", waits.append)
    with listener:
        seen.wait(1)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_an_item_that_is_no_record_is_given_up_too(open_queue: Open) -> None:
    queue, seen = open_queue(), Seen()
    queue.put(b"no record")
    put(queue, "a")
    with DurableListener(queue, seen, retry_delay=0, max_tries=2) as listener:
        seen.wait(1)
    assert (seen.texts, listener.failed_count) == (["a"], 1)


def test_several_listeners_by_readers_and_one_in_another_process(tmp_path: Path) -> None:
    one, two, three = Seen(), Seen(), Seen()
    codec = codecs.encrypted({"k": bytes(16)})
    with JournaledQueue(tmp_path, "logs", codec=codec) as queue:
        readers = [queue.reader("one"), queue.reader("two")]
        outside = open_reader(tmp_path, "logs", "three", create=True, codec=codec)
        with DurableListener(readers[0], one), DurableListener(readers[1], two), DurableListener(outside, three):
            put(queue, "a", "b")
            for seen in (one, two, three):
                seen.wait(2)
        outside.close()
    assert one.texts == two.texts == three.texts == ["a", "b"]


def test_a_queue_that_is_closed_under_the_listener(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with JournaledQueue(tmp_path, "logs") as queue:
        listener = DurableListener(queue, Seen())
        listener.start()
        thread: Any = listener._thread
    thread.join(20)
    assert not thread.is_alive()
    listener.stop()
    assert "has ended" not in caplog.text


def test_what_handlers_log_is_not_stored(open_queue: Open) -> None:
    """Or each record that is shipped would make another one."""
    queue = open_queue()
    logger = logging.Logger("http")
    durable = DurableHandler(queue)
    logger.addHandler(durable)

    class Chatty(Seen):
        def emit(self, record: logging.LogRecord) -> None:
            logger.warning("sent %s", record.getMessage())
            super().emit(record)

    seen = Chatty()
    put(queue, "a")
    with DurableListener(queue, seen):
        seen.wait(1)
    durable.close()
    assert seen.texts == ["a"]
    assert (durable.skipped_count, queue.stats().tail_id) == (1, 1)


def test_a_subclass_prepares_records(open_queue: Open) -> None:
    class Shouting(DurableListener):
        def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
            record.msg = record.getMessage().upper()
            return record

    queue, seen = open_queue(), Seen()
    put(queue, "a")
    with Shouting(queue, seen):
        pass
    assert seen.texts == ["A"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_ends_the_thread_loses_nothing(open_queue: Open) -> None:
    class Ending(Seen):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit

    queue = open_queue()
    put(queue, "a")
    listener = DurableListener(queue, Ending())
    listener.start()
    thread: Any = listener._thread
    thread.join(20)
    item = queue.get_nowait()
    assert (item.id, item.error_count) == (1, 0)


def test_arguments(open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(TypeError, match="JournaledQueue or a Reader"):
        DurableListener("logs", Seen())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tries"):
        DurableListener(queue, max_tries=0)
    with pytest.raises(ValueError, match="retry_delay"):
        DurableListener(queue, retry_delay=-1)
