"""``DurableHandler``: a handler of ``logging`` that stores records in a journaled queue."""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kestrelpy import ForkedQueue, JournaledQueue, KestrelError, QueueClosed, inbox, queue_names
from kestrelpy._disk.interface import text_of
from kestrelpy.logging.courier import Courier
from kestrelpy.logging.records import decode_record, encode_record
from kestrelpy.logging.spool import SpoolSweep
from kestrelpy.logging.threads import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from kestrelpy.config import Codec

_SAMPLE = encode_record(logging.LogRecord("sample", logging.INFO, "", 0, "", (), None))


class DurableHandler(logging.Handler):
    """Stores each record in a queue, as JSON. When ``emit`` has returned and the record did not fail, it survives the
    death of the process, also by SIGKILL. A power cut may take what the queue has not synced (``sync=``); of a process
    that does not own the queue, the last tenth of a second.

    ``queue`` is a ``JournaledQueue`` that this process has open, or the name of one in the folder ``directory``. By
    name, and in a forked child, the record goes into a file of this process. From there it is published in the queue's
    inbox (``kestrelpy.inbox``), ``flush_interval`` seconds later, and the queue's owner takes it in. Nobody need own
    the queue at that time. A ``directory`` that is not there is made with its parents (mode 0700) when the first record
    is stored, as a queue makes its own: of a slip in the path nothing is said, and the records are there. ``codec`` is
    that of the queue, if it has one. A codec must take bytes (``zstd()``, ``encrypted(keys)``), JSON values, or log
    records (``RECORDS``).

    Without a formatter, message, traceback and stack are stored apart. With a formatter, what it makes is the message.
    A record that can't be formatted or stored (a full queue, a full disk, a closed queue) goes to ``handleError`` and
    is counted in ``failed_count``; the caller sees nothing of it. Records that the same thread logs while it stores one
    are stored after it; those of the threads that move records are left out (``skipped_count``). A line of kestrelpy's
    own is stored by another thread, a moment later.

    Thread-safe; no lock is held while a record is stored. ``level`` and filters are those of every handler. Raises
    ``TypeError`` and ``ValueError`` for its arguments, ``InvalidName``.
    """

    def __init__(
        self,
        queue: JournaledQueue[Any] | str,
        directory: str | os.PathLike[str] | None = None,
        *,
        level: int | str = logging.NOTSET,
        codec: Codec | None = None,
        flush_interval: float = 0.5,
    ) -> None:
        if not 0 <= flush_interval < threading.TIMEOUT_MAX:
            raise ValueError(f"flush_interval must be seconds and not negative, not {flush_interval!r}")
        self._queue = queue if isinstance(queue, JournaledQueue) else None
        if isinstance(queue, JournaledQueue):
            if directory is not None or codec is not None:
                raise TypeError("a queue that is open knows its folder and its codec: give them with a name only")
            directory, codec, name = queue.directory, queue.codec, queue.name
        elif isinstance(queue, str) and directory is not None:
            name = queue
        else:
            raise TypeError(f"queue must be a JournaledQueue, or a name with a directory, not {queue!r}")
        self._codec = codec
        self._value_of = _form_for(codec)
        self._directory = os.path.abspath(text_of(directory))  # a daemon may change its folder
        self._name = name
        with suppress(OSError):  # of a folder that is not there yet, or can't be used now
            inbox.pending(self._directory, name)  # refuses a name that is none
        self._courier = Courier(self._directory, name, flush_interval)
        self._is_on_disk = self._queue is None or self._is_there()
        self._sweep = SpoolSweep(self._directory, name) if self._queue is not None and self._is_on_disk else None
        self.failed_count = 0
        """How many records were not stored, and went to ``handleError``."""
        self.skipped_count = 0
        """How many records were left out, as they were logged by the storing or moving of records itself."""
        super().__init__(level)

    def _is_there(self) -> bool:
        """True if the queue has files: one in memory has none, and a child can bring nothing there."""
        try:
            return self._name in queue_names(self._directory)
        except OSError:
            return False

    def handle(self, record: logging.LogRecord) -> Any:
        """Filter the record, and ``emit`` it. Unlike other handlers, this one holds no lock for that."""
        found: Any = self.filter(record)
        if found:
            self.emit(found if isinstance(found, logging.LogRecord) else record)
        return found

    def emit(self, record: logging.LogRecord) -> None:
        """Store the record. An error goes to ``handleError``; this raises nothing but what that raises."""
        waiting = state.waiting
        if state.is_silent or (waiting is not None and not state.accepts):
            self._count("skipped_count")
        elif waiting is not None:
            waiting.append(lambda: self._store(record))
        elif str(record.name).partition(".")[0] == "kestrelpy":
            # Whoever logs this may hold a lock that a put needs.
            with suppress(RuntimeError):  # the interpreter is ending
                threading.Thread(target=self._store_all, args=(record,), name="kestrelpy-logging", daemon=True).start()
                return
            self._count("skipped_count")
        else:
            self._store_all(record)

    def _store_all(self, record: logging.LogRecord) -> None:
        """Store the record, and then those that were logged meanwhile by this thread."""
        waiting: list[Callable[[], object]] = []
        state.waiting = waiting
        try:
            self._store(record)
            state.accepts = False
            for store in waiting:
                store()
        finally:
            state.waiting, state.accepts = None, True

    def _store(self, record: logging.LogRecord) -> None:
        try:
            self.enqueue(self.prepare(record))
        except Exception:  # of the queue, the disk, a codec, or an argument of the record
            self._count("failed_count")
            self.handleError(record)

    def prepare(self, record: logging.LogRecord) -> bytes:
        """The record as it is stored: JSON, as docs/format.md says. Raises what its formatting raises."""
        return encode_record(record, None if self.formatter is None else self.format(record))

    def enqueue(self, data: bytes) -> None:
        """Store what ``prepare`` has made. When this returns, it survives the death of the process. Raises
        ``KestrelError`` (``QueueFull``, ``QueueDiskFull``, ``QueueClosed``), ``OSError``, and what the codec raises.
        """
        queue = self._queue
        if queue is not None:
            try:
                queue.put(self._value_of(data), timeout=0)
                return
            except ForkedQueue:  # this is a child of the process that has the queue
                if not self._is_on_disk:
                    raise
                self._queue = None
        value = self._value_of(data)
        self._courier.put(value if self._codec is None else self._codec.encode(value))

    def flush(self) -> None:
        """Bring all records onto the disk of the queue: its journal, or its inbox. An error goes to ``handleError``."""
        try:
            with suppress(QueueClosed, ForkedQueue):  # what is closed was synced then
                if self._queue is not None:
                    self._queue.sync()
            self._courier.flush()
        except (KestrelError, OSError):
            self._complain("flushed")

    def close(self) -> None:
        """Publish what is to be published, and release this handler's files. The queue stays open. May be repeated. An
        error goes to ``handleError``. A record that comes later is stored all the same.
        """
        try:
            if self._sweep is not None:
                self._sweep.stop()
            self._courier.close()
        except (KestrelError, OSError):
            self._complain("closed")
        finally:
            super().close()

    def _complain(self, what: str) -> None:
        about = f"the handler for queue {self._name!r} could not be {what}"
        self.handleError(logging.LogRecord("kestrelpy", logging.WARNING, "", 0, about, None, None))

    def _count(self, name: str) -> None:
        with self.lock or threading.Lock():  # after a fork, logging makes the lock again
            setattr(self, name, getattr(self, name) + 1)

    def __repr__(self) -> str:
        return f"<DurableHandler {self._name} ({logging.getLevelName(self.level)})>"


def _form_for(codec: Codec | None) -> Callable[[bytes], Any]:
    """What makes, of a record as JSON, a value that the codec takes. Raises ``TypeError`` if there is none."""
    if codec is None:
        return bytes
    for form in (bytes, json.loads, decode_record):
        sample = form(_SAMPLE)
        with suppress(Exception):  # whatever this codec raises for a value that is none of its own
            again = codec.decode(codec.encode(sample))
            if again == sample or (isinstance(again, logging.LogRecord) and isinstance(sample, logging.LogRecord)):
                return form
    raise TypeError(f"the codec {codec!r} takes no log records: neither bytes, nor JSON values, nor LogRecord")
