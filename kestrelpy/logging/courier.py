"""``Courier``: how a process that does not own a queue brings its records there.

``put`` stores a record in the spool of this process, and returns. A thread publishes what is in the spool, so many
times a second. A forked child has a spool of its own.

NOTE ON LOCKING: ``_moving`` is held while records are published, ``_opening`` while the spool is opened or replaced.
``_moving`` comes first. A put takes neither, if the spool is open. In a forked child both are made again.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from kestrelpy import DurabilityUnknown, KestrelError, QueueClosed, SystemClock
from kestrelpy._process import forget, remember
from kestrelpy.logging.spool import SWEEP_SECONDS, Spool, collect
from kestrelpy.logging.threads import state

_TRIES = 5
_RETRY_SECONDS = 1.0


class Courier:
    """Brings records to ``queue`` in ``directory``. Thread-safe. It opens nothing before the first record."""

    def __init__(self, directory: str, queue: str, flush_interval: float) -> None:
        self._directory = directory
        self._queue = queue
        self._flush_interval = flush_interval
        self._trouble: str | None = None
        self._set_up()

    def _set_up(self) -> None:
        self._opening = threading.Lock()
        self._moving = threading.Lock()
        self._news = threading.Event()
        self._spool: Spool | None = None  # guarded by self._opening
        self._thread: threading.Thread | None = None  # guarded by self._opening
        remember(self, must_close=False)

    def put(self, data: bytes) -> None:
        """Store a record. When this returns, the record survives the death of the process. Raises ``KestrelError``
        (``QueueDiskFull``, ``ItemTooLarge``), ``OSError``.
        """
        for _ in range(_TRIES):
            spool = self._spool or self._open()
            try:
                spool.put(data, timeout=0)
            except QueueClosed:  # by another thread, which has closed the handler: the next spool is open
                continue
            except DurabilityUnknown:  # a sync has failed, and nothing is put there until it is opened again
                self._give_up(spool)
                continue
            if not self._news.is_set():
                self._news.set()
            return
        raise QueueClosed(f"log records for queue {self._queue!r} can't be stored: each spool is closed, or fails")

    def _give_up(self, spool: Spool) -> None:
        """Leave a spool that has failed. Its records stay, and whoever opens it next publishes them."""
        with self._opening:
            if self._spool is spool:
                self._spool = None
                with suppress(KestrelError, OSError):  # the error that is known
                    spool.journal.close()

    def _open(self) -> Spool:
        with self._opening:
            if self._spool is None:
                spool = Spool.open(self._directory, self._queue)
                forget(spool.journal)  # this object closes and abandons it
                self._spool = spool
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kestrelpy-logging", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending: close() publishes the records
                    self._thread.start()
            return self._spool

    def _run(self) -> None:
        """The thread: waits for a record, lets others join it, and publishes them."""
        state.is_silent = True
        thread, paused, clock = threading.current_thread(), threading.Event(), SystemClock()
        pause, sweep_at = self._flush_interval, clock.monotonic() + SWEEP_SECONDS
        while self._thread is thread:
            if self._news.wait(SWEEP_SECONDS):
                paused.wait(pause)
            self._news.clear()
            pause = self._flush_interval if self._publish() else max(self._flush_interval, _RETRY_SECONDS)
            if clock.monotonic() >= sweep_at:
                sweep_at = clock.monotonic() + SWEEP_SECONDS
                with suppress(KestrelError, OSError):  # they are looked for again
                    collect(self._directory, self._queue)

    def _publish(self) -> bool:
        """Publish what is in the spool; returns False if that fails, which is logged once."""
        try:
            with self._moving:
                spool = self._spool
                if spool is not None:
                    spool.publish()
        except (KestrelError, OSError) as error:
            self._news.set()
            why = f"{type(error).__name__}: {error}"
            if why != self._trouble:
                self._say("log records for queue %s can't be published, and stay until they can: %s", why)
                self._trouble = why
            return False
        if self._trouble is not None:
            self._trouble = None
            self._say("log records for queue %s are published again%s", "")
        return True

    def _say(self, text: str, why: str) -> None:
        was_silent, state.is_silent = state.is_silent, True
        try:
            logging.getLogger("kestrelpy").warning(text, self._queue, why)
        finally:
            state.is_silent = was_silent

    def flush(self) -> None:
        """Publish all records that were put before. An error is logged; then they stay in the spool."""
        self._publish()

    def close(self) -> None:
        """Publish all records, and give the spool up to the next process. May be repeated, and a ``put`` after it opens
        a spool again. Raises ``KestrelError``, ``OSError`` if the spool can't be closed; no record is lost by it.
        """
        self._publish()
        with self._moving, self._opening:
            spool, self._spool, self._thread = self._spool, None, None
            self._news.set()  # the thread sees that it is over
            if spool is not None:
                spool.journal.close()

    def _dismiss(self, error: QueueClosed) -> None:
        """At the end of the interpreter: nobody waits here."""

    def _abandon(self) -> None:
        """In a forked child: the spool is the parent's."""
        spool = self._spool
        self._set_up()
        if spool is not None:
            spool.journal._abandon()
