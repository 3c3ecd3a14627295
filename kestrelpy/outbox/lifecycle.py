"""``Lifecycle``: starts and stops the runner of an outbox, at most one at a time.

Rules:
1. A stop is carried out by the runner's own threads. Who called it only waits: an interrupt, a cancelled task or a
   timeout ends the waiting, and a later call waits again.
2. Nobody waits for himself: not a handler for its own end, nor the thread of an event loop for what runs on it.

NOTE ON LOCKING: ``_starting`` is held from the look whether one runs to the end of the start. A stop does not take it.
``_lock`` guards which runner there is, for a few statements at a time: a stop that has ended forgets its own runner,
and never the one of the next start.
"""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from kestrelpy.outbox._checks import check_count, check_number
from kestrelpy.outbox._logging import log
from kestrelpy.outbox.errors import OutboxError
from kestrelpy.outbox.queues import check_name

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.runner import Runner
    from kestrelpy.outbox.store import JobStore

__all__ = ["EXIT_SECONDS", "Lifecycle"]

EXIT_SECONDS = 1.0
"""How long handlers may go on when the interpreter ends and nobody has stopped the outbox."""


class Lifecycle:
    """Of one outbox in this process."""

    def __init__(self, core: OutboxCore) -> None:
        self._core = core
        self._runner: Runner | None = None  # guarded by self._lock
        self._starting = threading.Lock()
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._runner is not None

    def start(
        self,
        queues: Iterable[str] | None = None,
        *,
        threads: int = 4,
        prefetch: int | None = None,
        poll_interval: float | None = None,
        retry_interval: float = 1.0,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        """Start a runner if none runs. One that is stopping is waited for."""
        from kestrelpy.outbox.runner import Runner

        store = self._core.open_store()
        names = None if queues is None else frozenset(map(check_name, [queues] if isinstance(queues, str) else queues))
        make = partial(
            Runner,
            self._core,
            store,
            queues=names,
            threads=check_count("threads", threads, 1),
            prefetch=None if prefetch is None else check_count("prefetch", prefetch),
            poll_interval=None if poll_interval is None else check_number("poll_interval", poll_interval, 0.001),
            retry_interval=check_number("retry_interval", retry_interval, 0.001),
            loop=loop,
        )
        if self._core.is_virtual:
            return
        with self._starting:
            if self._is_free():
                self._start(make, store, loop)
                self._look_for_consumers(names or ())

    def _look_for_consumers(self, queues: Iterable[str]) -> None:
        known = {each.queue for each in self._core.queues.consumed()}
        for queue in sorted(set(queues) - known):
            log.warning("queue %r has no consumer here: nothing of it is run until it gets one", queue)

    def _is_free(self) -> bool:
        """Whether none runs, now that one that was stopping has ended."""
        before = self._runner
        if before is None:
            return True
        if before.is_orphaned:
            before.stop(2.0)  # its outcomes may have been on their way on that loop
        elif not before.is_stopping:
            return False
        elif before.is_inside():
            raise OutboxError("this outbox is stopping, and waits for this handler: it can't be started in here")
        else:
            before.stop(None)
        return True

    def _start(self, make: Callable[[], Runner], store: JobStore, loop: AbstractEventLoop | None) -> None:
        store.use_loop(loop)
        runner: Runner | None = None
        try:
            runner = make()
            runner.check()
            started_ms = self._core.now_ms()
            with self._lock:
                self._core.started_ms, self._runner = started_ms, runner
            runner.start()
        except BaseException:
            self._core.started_ms = None
            if runner is not None:
                runner.stop(0)
            self._runner = None
            store.use_loop(None)
            raise

    def stop(self, timeout: float | None) -> bool:
        """True if nothing was left running."""
        if timeout is not None:
            check_number("timeout", timeout)
        runner = self._runner
        if runner is None:
            return True
        if runner.is_inside():
            runner.begin_stop(timeout)
            return False
        if runner.would_block_its_loop():
            raise OutboxError("stop() would block the event loop that the handlers run on: use await astop()")
        is_done = runner.stop(timeout)
        with self._lock:
            if self._runner is runner:
                self._runner = None
                self._core.started_ms = None
        return is_done

    def begin_stop(self, timeout: float) -> None:
        """Let a stop begin, and do not wait."""
        runner = self._runner  # once: another thread's stop may forget it
        if runner is not None:
            runner.begin_stop(timeout)

    def wake(self) -> None:
        """There may be a job: look."""
        runner = self._runner
        if runner is not None:
            runner.wake()

    def abandon(self) -> None:
        """In a forked child, where none of the threads is."""
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        if self._runner is not None:
            self._runner.abandon()
        self._runner = None
