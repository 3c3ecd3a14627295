"""``DurableListener``: hands the log records of a queue to handlers, at least once each.

A record is committed when the handlers have it. A handler that raises gets the record again, and the records after it
wait, so that their order is kept. Handlers that had it already do not get it again, as long as the process lives.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kestrelpy import JournaledQueue, KestrelError, QueueClosed, QueueEmpty, Reader, UnknownItem
from kestrelpy.codecs import DecodeError
from kestrelpy.logging.records import decode_record, record_of
from kestrelpy.logging.spool import SpoolSweep
from kestrelpy.logging.threads import state

if TYPE_CHECKING:
    from typing import Self

    from kestrelpy.item import Item

MOST_DELAY = 60.0
"""Seconds: no wait between two tries is longer."""


class DurableListener:
    """Hands the records of a queue to ``handlers``, on a thread of its own, and commits each one when they have it.

    ``queue_or_reader``: a ``JournaledQueue``, whose default reader is used, or a ``Reader``. Several listeners on one
    queue take a reader each, also in other processes (``open_reader``). With ``respect_handler_level`` a handler gets
    the records of its level and above.

    At least once: a record that was handled, and not committed before the process died, comes again. A handler that
    raises gets the record again after ``retry_delay`` seconds, then after twice that, and so on up to a minute; an item
    that is no log record is tried again likewise. After ``max_tries`` (``None``: never) the record is given up: it is
    committed, logged on ``kestrelpy``, and counted in ``failed_count``. The handlers of the standard library do not
    raise: they call ``handleError``, and for the listener they have the record. What a handler logs, or the listener
    itself, is not stored by a ``DurableHandler``.

    ``start`` and ``stop`` are those of ``logging.handlers.QueueListener``; as a context manager it does both. Raises
    ``TypeError`` and ``ValueError`` for its arguments.
    """

    def __init__(
        self,
        queue_or_reader: JournaledQueue[Any] | Reader[Any],
        *handlers: logging.Handler,
        respect_handler_level: bool = False,
        max_tries: int | None = 10,
        retry_delay: float = 1.0,
    ) -> None:
        if not isinstance(queue_or_reader, JournaledQueue | Reader):
            raise TypeError(f"expected a JournaledQueue or a Reader, not {queue_or_reader!r}")
        if max_tries is not None and max_tries < 1:
            raise ValueError(f"max_tries must be at least 1, or None, not {max_tries!r}")
        if not 0 <= retry_delay < threading.TIMEOUT_MAX:
            raise ValueError(f"retry_delay must be seconds and not negative, not {retry_delay!r}")
        self._given = queue_or_reader
        self.handlers = handlers
        self.respect_handler_level = respect_handler_level
        self.max_tries = max_tries
        self.retry_delay = retry_delay
        self.handled_count = 0
        """How many records all handlers have had."""
        self.failed_count = 0
        """How many records were given up."""
        self._thread: threading.Thread | None = None
        self._sweep: SpoolSweep | None = None
        self._reader: Reader[Any] | None = None
        self._stopping = threading.Event()
        self._left = 0  # how many records a stop still waits for
        self._future: Future[Item] | None = None
        self._had: tuple[int, set[int]] = (0, set())  # an item's id, and which handlers have had it

    def start(self) -> None:
        """Start the thread. Raises ``RuntimeError`` if it runs already, and what ``JournaledQueue.reader`` raises."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the listener is started already")
        given = self._given
        self._reader = given.reader() if isinstance(given, JournaledQueue) else given
        if isinstance(given, JournaledQueue):
            self._sweep = SpoolSweep(given.directory, given.name)
        self._stopping.clear()
        self._thread = threading.Thread(
            target=self._run, args=(self._reader,), name="kestrelpy-logging-listener", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Handle the records that are in the queue now, and end the thread. Waits for that. May be repeated.

        If a handler raises meanwhile, the record and those after it stay for the next start.
        """
        thread, self._thread = self._thread, None
        if self._sweep is not None:
            self._sweep.stop()
        if thread is None or self._reader is None:
            return
        with suppress(KestrelError, OSError):  # of a queue that is closed, which ends the thread, too
            self._left = self._reader.items
        self._stopping.set()
        future = self._future
        if future is not None:
            future.cancel()
        if thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self, reader: Reader[Any]) -> None:
        state.is_silent = True
        try:
            while True:
                item = self._next(reader)
                if item is None:
                    break
                self._deliver(item)
            reader.checkpoint()
        except QueueClosed:  # the queue or the reader is closed, and what is left comes at the next start
            pass
        except Exception:
            logging.getLogger("kestrelpy").exception("the listener of %s has ended", reader.full_name)

    def _next(self, reader: Reader[Any]) -> Item | None:
        """The next item, which this waits for; ``None`` if it is time to stop."""
        while True:
            if self._stopping.is_set():
                self._left -= 1
                with suppress(QueueEmpty):
                    return None if self._left < 0 else reader.get_nowait()
                return None
            with suppress(QueueEmpty):
                return reader.get_nowait()
            self._future = future = reader.get_future()
            if self._stopping.is_set():
                future.cancel()
            with suppress(CancelledError, QueueEmpty):  # of a stop; of somebody who evicts all waiters
                return future.result()

    def _deliver(self, item: Item) -> None:
        """Have the item handled, and commit it, or abort it and wait."""
        tries = item.error_count + 1
        if self._had[0] != item.id:
            self._had = (item.id, set())
        try:
            self.handle(_record_in(item.value))
        except Exception as error:
            if self.max_tries is None or tries < self.max_tries:
                with suppress(UnknownItem):  # of a seek in between
                    item.abort()
                if self._stopping.wait(min(self.retry_delay * 2 ** min(tries - 1, 30), MOST_DELAY)):
                    self._left = 0  # a stop does not wait for what can't be done now
                return
            self.failed_count += 1
            logging.getLogger("kestrelpy").error(
                "log record %d is given up after %d tries: %r", item.id, tries, error, exc_info=error
            )
        except BaseException:
            with suppress(UnknownItem):
                item.abort(counts=False)
            raise
        else:
            self.handled_count += 1
        with suppress(UnknownItem):
            item.commit()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as the handlers get it. A subclass may change it."""
        return record

    def handle(self, record: logging.LogRecord) -> None:
        """Hand the record to each handler that has not had it. If some raise, raises the first of their errors at the
        end.
        """
        first: Exception | None = None
        record, had = self.prepare(record), self._had[1]
        for number, handler in enumerate(self.handlers):
            if number in had or (self.respect_handler_level and record.levelno < handler.level):
                continue
            try:
                handler.handle(record)
                had.add(number)
            except Exception as error:
                first = error if first is None else first
        if first is not None:
            raise first

    def __repr__(self) -> str:
        return f"<DurableListener of {self._given!r}>"


def _record_in(value: Any) -> logging.LogRecord:
    """The record in the value of an item, whichever codec the queue has. Raises ``DecodeError``."""
    if isinstance(value, logging.LogRecord):
        return value
    if isinstance(value, bytes):
        return decode_record(value)
    if isinstance(value, dict):
        return record_of(value)
    raise DecodeError(f"not a log record: {type(value).__name__}")
