"""``DurableHandler``: what is stored, what fails without the caller, what does not loop, what other processes do."""

from __future__ import annotations

import gc
import json
import logging
import logging.config
import logging.handlers
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kestrelpy import (
    InvalidName,
    JournaledQueue,
    QueueClosed,
    QueueDiskFull,
    QueueFull,
    ReaderConfig,
    codecs,
    inbox,
    scan,
)
from kestrelpy.codecs import JSON
from kestrelpy.logging import RECORDS, DurableHandler, collect
from kestrelpy.logging.records import decode_record
from tests.support.packages import need_codecs
from tests.support.paths import PYTHONPATH
from tests.support.small_disk import SmallDisk

need_codecs()
Open = Callable[..., JournaledQueue]


class Complaints(DurableHandler):
    """A handler that keeps what it could not store, in place of printing it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.complaints: list[tuple[str, BaseException | None]] = []

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        self.complaints.append((record.getMessage() if record.args != ("x",) else "", sys.exc_info()[1]))


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[logging.Logger, Complaints]]]:
    """``made(*arguments, **options)``: a logger of its own, and its handler, which is closed at the end."""
    handlers: list[Complaints] = []

    def make(*arguments: Any, **options: Any) -> tuple[logging.Logger, Complaints]:
        logger = logging.Logger("shop")
        handlers.append(Complaints(*arguments, **options))
        logger.addHandler(handlers[-1])
        return logger, handlers[-1]

    yield make
    for handler in handlers:
        handler.close()


Made = Callable[..., tuple[logging.Logger, Complaints]]


def messages(queue: JournaledQueue) -> list[str]:
    return [decode_record(item.data).getMessage() for item in queue.get_many(1000, timeout=0)]


def stored(folder: Path, name: str = "logs") -> list[str]:
    """What an owner finds after everybody has brought his records."""
    collect(folder, name)
    inbox.take_in(folder, name)
    return [decode_record(record.data).getMessage() for record in scan(folder, name)]


# -- in the process that owns the queue ------------------------------------------------------------------------------


def test_records_are_stored(open_queue: Open, made: Made) -> None:
    queue = open_queue()
    logger, handler = made(queue)
    logger.warning("sold %d of %s", 3, "apples", extra={"user": 7})
    found = decode_record(queue.get_nowait().data)
    assert (found.getMessage(), found.name, found.__dict__["user"]) == ("sold 3 of apples", "shop", 7)
    assert (handler.failed_count, handler.skipped_count) == (0, 0)


def test_levels_filters_and_a_formatter(open_queue: Open, made: Made) -> None:
    queue = open_queue()
    logger, handler = made(queue, level=logging.WARNING)
    handler.addFilter(lambda record: "secret" not in record.getMessage())
    handler.setFormatter(logging.Formatter("<%(levelname)s %(message)s>"))
    logger.info("not at this level")
    logger.error("secret")
    try:
        raise LookupError("x")
    except LookupError:
        logger.exception("shown")
    (only,) = queue.get_many(9, timeout=0)
    found = decode_record(only.data)
    assert found.getMessage().startswith("<ERROR shown>\nTraceback")
    assert found.exc_text is None


def test_a_queue_that_is_full_and_one_that_is_closed_are_not_the_caller_s_trouble(open_queue: Open, made: Made) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=1))
    logger, handler = made(queue)
    for number in range(3):
        logger.warning("record %d", number)
    assert messages(queue) == ["record 0"]
    queue.close()
    logger.warning("late")
    handler.flush()
    kinds = [type(error) for _, error in handler.complaints]
    assert kinds == [QueueFull, QueueFull, QueueClosed]
    assert [text for text, _ in handler.complaints] == ["record 1", "record 2", "late"]
    assert handler.failed_count == 3


def test_a_full_disk(made: Made) -> None:
    disk = SmallDisk(20)
    with JournaledQueue("/q", "logs", disk=disk, segment_bytes=16384, sync="never") as queue:
        queue.reader()
        logger, handler = made(queue)
        while not handler.failed_count:
            logger.warning("x" * 1000)
        count = queue.stats().tail_id
        assert [type(error) for _, error in handler.complaints] == [QueueDiskFull]
        disk.room = 60
        logger.warning("room again")
        assert messages(queue)[count:] == ["room again"]


def test_a_record_that_can_not_be_formatted(open_queue: Open, made: Made) -> None:
    queue = open_queue()
    logger, handler = made(queue)
    logger.warning("%d", "x")
    logger.warning("good")
    assert messages(queue) == ["good"]
    assert [type(error) for _, error in handler.complaints] == [TypeError]
    assert handler.failed_count == 1


def test_the_handler_of_the_standard_library_prints_the_error(
    open_queue: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = DurableHandler(open_queue())
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("x",)}))
    handler.close()
    assert "--- Logging error ---" in capsys.readouterr().err


def test_an_interrupt_is_the_caller_s(open_queue: Open, made: Made) -> None:
    class Interrupting:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    queue = open_queue()
    logger, handler = made(queue)
    with pytest.raises(KeyboardInterrupt):
        logger.warning("x", extra={"value": Interrupting()})
    logger.warning("after it")
    assert messages(queue) == ["after it"]
    assert handler.failed_count == 0


@pytest.mark.parametrize(
    "codec", [None, codecs.zstd(), codecs.encrypted({"k": bytes(16)}), JSON, RECORDS, codecs.zstd(RECORDS)]
)
def test_every_codec_that_takes_records(codec: Any, tmp_path: Path, made: Made) -> None:
    """In the owner, and by name."""
    with JournaledQueue(tmp_path, "logs", codec=codec) as queue:
        logger, handler = made(queue)
        logger.warning("from the owner")
        assert handler.failed_count == 0
    logger, handler = made("logs", tmp_path, codec=codec)
    logger.warning("by name")
    handler.close()
    inbox.take_in(tmp_path, "logs")
    with JournaledQueue(tmp_path, "logs", codec=codec) as queue:
        values = [item.value for item in queue.get_many(9)]
    texts = [str(value if isinstance(value, bytes | dict) else value.getMessage()) for value in values]
    assert ["from the owner" in texts[0], "by name" in texts[1], len(texts)] == [True, True, 2]


def test_a_codec_that_takes_no_records() -> None:
    for codec in (codecs.UTF8, codecs.msgspec(int)):
        with pytest.raises(TypeError, match="takes no log records"):
            DurableHandler("logs", "/nowhere", codec=codec)


def test_arguments(open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue()
    for arguments in ((7,), ("logs",), (queue, tmp_path), (queue.reader(),)):
        with pytest.raises(TypeError):
            DurableHandler(*arguments)
    with pytest.raises(TypeError):
        DurableHandler(queue, codec=JSON)
    with pytest.raises(InvalidName):
        DurableHandler("no/name", tmp_path)
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="flush_interval"):
            DurableHandler("logs", tmp_path, flush_interval=seconds)


# -- no record without an end ----------------------------------------------------------------------------------------


def test_what_is_logged_while_a_record_is_stored_comes_after_it(open_queue: Open, made: Made) -> None:
    """By an argument, a codec, or a finaliser: once, and what that logs in turn is left out."""
    queue = open_queue()
    logger, handler = made(queue)

    class Talkative:
        def __str__(self) -> str:
            logger.warning("shown: %s", self)
            return "talkative"

    logger.warning("got %s", Talkative())
    assert messages(queue) == ["got talkative", "shown: talkative"]
    assert handler.skipped_count == 1
    logger.warning("and on")
    assert messages(queue) == ["and on"]


def test_a_finaliser_that_logs_in_the_middle_of_a_put(open_queue: Open, made: Made) -> None:
    """The thread has the queue's lock at that moment, and would wait for itself."""
    queue = open_queue()
    logger, _ = made(queue)
    enqueue: Any = queue._append

    class Dying:
        def __del__(self) -> None:
            logger.warning("a finaliser")

    def append(*arguments: Any) -> Any:
        Dying()
        gc.collect()
        return enqueue(*arguments)

    with mock.patch.object(queue, "_append", append), mock.patch.object(queue._puts, "_append", append):
        logger.warning("a record")
    assert messages(queue) == ["a record", "a finaliser"]


def test_lines_of_the_library_itself_are_stored_by_another_thread(open_queue: Open, made: Made) -> None:
    """Whoever logs one may hold the queue's lock."""
    queue = open_queue()
    _, handler = made(queue)
    with queue._lock:
        handler.handle(logging.makeLogRecord({"name": "kestrelpy", "msg": "a sync failed", "levelno": 30}))
    assert decode_record(queue.get(timeout=10).data).getMessage() == "a sync failed"


def test_the_library_s_own_lines_do_not_loop(tmp_path: Path, made: Made) -> None:
    """A queue that fails logs that, into a queue that fails."""
    logger = logging.getLogger("kestrelpy")
    with JournaledQueue(tmp_path, "logs", default_reader=ReaderConfig(max_items=1)) as queue:
        queue.put(b"{}")
        _, handler = made(queue)
        logger.addHandler(handler)
        try:
            for _ in range(3):
                logger.warning("a line of the library's")
            for thread in threading.enumerate():
                if thread.name == "kestrelpy-logging":
                    thread.join(10)
        finally:
            logger.removeHandler(handler)
    assert 1 <= handler.failed_count + handler.skipped_count <= 3


# -- the end ---------------------------------------------------------------------------------------------------------


def test_flush_and_close_may_be_repeated(open_queue: Open, made: Made) -> None:
    queue = open_queue(sync="never")
    logger, handler = made(queue)
    logger.warning("one")
    assert queue.stats().durable_id == 0
    handler.flush()
    assert queue.stats().durable_id == 1
    handler.close()
    handler.close()
    logger.warning("two")
    assert messages(queue) == ["one", "two"]
    assert not queue.closed


def test_logging_shutdown_brings_all(tmp_path: Path) -> None:
    handler = DurableHandler("logs", tmp_path, flush_interval=1000)
    handler.handle(logging.makeLogRecord({"msg": "last words", "name": "x", "levelno": 20}))
    assert inbox.pending(tmp_path, "logs") == 0
    logging.shutdown([lambda: handler])
    assert inbox.pending(tmp_path, "logs") == 1
    logging.shutdown([lambda: handler])
    assert stored(tmp_path) == ["last words"]


# -- by name ---------------------------------------------------------------------------------------------------------


def test_by_name_records_arrive_by_themselves(tmp_path: Path, made: Made) -> None:
    logger, _ = made("logs", tmp_path, flush_interval=0.01)
    with JournaledQueue(tmp_path, "logs", inbox_interval=0.01) as queue:
        logger.warning("one")
        assert decode_record(queue.get(timeout=20).data).getMessage() == "one"
        logger.warning("two")
        assert decode_record(queue.get(timeout=20).data).getMessage() == "two"


def test_before_and_after_anybody_owns_the_queue(tmp_path: Path, made: Made) -> None:
    logger, handler = made("logs", tmp_path / "later")
    logger.warning("nobody there")
    handler.flush()
    with JournaledQueue(tmp_path / "later", "logs") as queue:
        assert messages(queue) == ["nobody there"]
    logger.warning("gone again")
    handler.close()
    logger.warning("after close")
    handler.close()
    assert stored(tmp_path / "later") == ["nobody there", "gone again", "after close"]


def test_two_handlers_of_a_process_have_a_spool_each(tmp_path: Path, made: Made) -> None:
    one, _ = made("logs", tmp_path)
    two, _ = made("logs", tmp_path)
    one.warning("one")
    two.warning("two")
    for logger in (one, two):
        logger.handlers[0].close()
    assert sorted(stored(tmp_path)) == ["one", "two"]


def test_a_work_queue_is_refused(tmp_path: Path, made: Made) -> None:
    from kestrelpy import WrongKind
    from kestrelpy.work import WorkQueue

    WorkQueue(tmp_path, "jobs").close()
    logger, handler = made("jobs", tmp_path)
    logger.warning("no job")
    assert [type(error) for _, error in handler.complaints] == [WrongKind]


def test_by_dict_config(tmp_path: Path) -> None:
    """By folder and name, and with an object."""
    with JournaledQueue(tmp_path, "own") as queue:
        settings: dict[str, Any] = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"short": {"format": "%(levelname)s %(message)s"}},
            "handlers": {
                "named": {
                    "class": "kestrelpy.logging.DurableHandler",
                    "queue": "logs",
                    "directory": str(tmp_path),
                    "level": "WARNING",
                },
                "open": {"class": "kestrelpy.logging.DurableHandler", "queue": queue, "formatter": "short"},
            },
            "loggers": {"configured": {"handlers": ["named", "open"], "level": "INFO", "propagate": False}},
        }
        logger = logging.getLogger("configured")
        try:
            logging.config.dictConfig(settings)
            logger.info("one")
            logger.warning("two")
        finally:
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                handler.close()
        assert messages(queue) == ["INFO one", "WARNING two"]
    assert stored(tmp_path) == ["two"]


def test_a_folder_that_can_not_be_used(tmp_path: Path, made: Made) -> None:
    """No caller has trouble with it, and records are stored as soon as it can."""
    (tmp_path / "spool").write_text("in the way")
    logger, handler = made("logs", tmp_path)
    logger.warning("lost")
    handler.flush()
    (tmp_path / "spool").unlink()
    logger.warning("stored")
    handler.close()
    assert [(text, isinstance(error, OSError)) for text, error in handler.complaints] == [("lost", True)]
    assert stored(tmp_path) == ["stored"]


def test_a_folder_that_is_not_there_is_made_by_the_first_record(tmp_path: Path, made: Made) -> None:
    logger, handler = made("logs", tmp_path / "no" / "where")
    assert not list(tmp_path.iterdir())
    logger.warning("one")
    handler.flush()
    assert inbox.pending_queues(tmp_path / "no" / "where") == {"logs": 1}
    assert (tmp_path / "no").stat().st_mode & 0o777 == 0o700
    assert handler.complaints == []


def test_a_daemon_that_changes_its_folder(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger, handler = made("logs", "q")
    monkeypatch.chdir("/")
    logger.warning("stored")
    handler.close()
    assert stored(tmp_path / "q") == ["stored"]


# -- forks and other processes ---------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Fork, work, and end without a word; the exit status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_has_a_part_of_its_own(tmp_path: Path, made: Made) -> None:
    with JournaledQueue(tmp_path, "logs", codec=codecs.encrypted({"k": bytes(16)})) as queue:
        logger, handler = made(queue)
        logger.warning("before")
        assert in_child(lambda: logger.warning("in the child")) == 0
        logger.warning("in the parent")
        assert collect(tmp_path, "logs") == 1
        assert collect(tmp_path, "logs") == 0
        queue.take_in()
        found = [decode_record(item.value).getMessage() for item in queue.get_many(9)]
    assert found == ["before", "in the parent", "in the child"]
    assert handler.failed_count == 0


def test_a_fork_of_a_handler_by_name(tmp_path: Path, made: Made) -> None:
    """The parent's spool stays the parent's, and a fork while it is being used disturbs nobody."""
    logger, handler = made("logs", tmp_path, flush_interval=0)
    for number in range(5):
        logger.warning("parent %d", number)
        assert in_child(lambda number=number: logger.warning("child %d", number)) == 0  # type: ignore[misc]
    handler.close()
    found = stored(tmp_path)
    assert [text for text in found if "parent" in text] == [f"parent {number}" for number in range(5)]
    assert sorted(text for text in found if "child" in text) == [f"child {number}" for number in range(5)]


def test_a_fork_while_a_thread_opens_the_spool(tmp_path: Path, made: Made) -> None:
    logger, handler = made("logs", tmp_path)
    with handler._courier._opening, handler._courier._moving:
        assert in_child(lambda: logger.warning("in the child")) == 0
    assert stored(tmp_path) == ["in the child"]


def test_a_child_that_closes_brings_its_records_itself(tmp_path: Path, made: Made) -> None:
    with JournaledQueue(tmp_path, "logs") as queue:
        logger, handler = made(queue)

        def work() -> None:
            logger.warning("in the child")
            handler.close()

        assert in_child(work) == 0
        assert queue.take_in() == 1


def test_a_child_of_a_queue_in_memory_has_nowhere_to_go(tmp_path: Path, made: Made) -> None:
    with JournaledQueue(tmp_path, "logs", journaled=False) as queue:
        logger, handler = made(queue)

        def work() -> None:
            logger.warning("lost")
            assert handler.failed_count == 1

        assert in_child(work) == 0
    assert list(tmp_path.iterdir()) == []


SPAWNED = """
import logging, logging.config, multiprocessing, sys

def work(folder, number):
    logging.config.dictConfig({
        "version": 1,
        "handlers": {"h": {"class": "kestrelpy.logging.DurableHandler", "queue": "logs", "directory": folder}},
        "root": {"handlers": ["h"], "level": "INFO"},
    })
    logging.info("child %d", number)

if __name__ == "__main__":
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        children = [context.Process(target=work, args=(sys.argv[1], number)) for number in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0, child
"""


def test_children_of_multiprocessing(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", script, tmp_path / "q"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert inbox.pending(tmp_path / "q", "logs") == 4, "they have brought their records at their end"
    assert sorted(stored(tmp_path / "q")) == ["child 0", "child 0", "child 1", "child 1"]


AT_THE_END = """
import atexit, logging, sys
from kestrelpy.logging import DurableHandler

handler = DurableHandler("logs", sys.argv[1], flush_interval=1000)
logging.getLogger().addHandler(handler)
atexit.register(logging.warning, "at the end")
logging.warning("while it runs")
"""


def test_a_program_that_closes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", AT_THE_END, tmp_path],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert stored(tmp_path) == ["while it runs", "at the end"]


def test_threads_lose_nothing(open_queue: Open, made: Made) -> None:
    queue = open_queue()
    logger, _ = made(queue)

    def work(name: str) -> None:
        for number in range(200):
            logger.warning("%s %d", name, number)

    threads = [threading.Thread(target=work, args=(str(at),)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [text.split() for text in [decode_record(item.data).getMessage() for item in queue.get_many(2000)]]
    for at in range(8):
        assert [number for name, number in found if name == str(at)] == [str(number) for number in range(200)]


def test_the_standard_handler_and_listener_with_the_codec(tmp_path: Path) -> None:
    """``QueueHandler(queue.as_blocking_queue())`` needs a codec, and says which one."""
    with JournaledQueue(tmp_path, "bytes") as queue:
        handler = logging.handlers.QueueHandler(queue.as_blocking_queue())
        with pytest.raises(TypeError, match=r"kestrelpy\.logging"):
            handler.enqueue(logging.makeLogRecord({"msg": "x"}))
    seen: list[str] = []
    target = logging.Handler()
    target.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    with JournaledQueue(tmp_path, "records", codec=RECORDS) as queue:
        face: Any = queue.as_blocking_queue()
        listener = logging.handlers.QueueListener(face, target)
        listener.start()
        logging.handlers.QueueHandler(face).handle(logging.makeLogRecord({"msg": "sold %d", "args": (3,)}))
        listener.stop()
    assert seen == ["sold 3"]
    assert json.loads(next(iter(scan(tmp_path, "records"))).data)["message"] == "sold 3"
