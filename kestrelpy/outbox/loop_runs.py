"""``LoopRuns``: ``async`` handlers, each in a task of its own, on the caller's event loop or on one on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from functools import partial
from typing import Any

from kestrelpy.outbox.execution import Attempt, Outcome, unexpected
from kestrelpy.outbox.loop_thread import LoopThread, loop_here

__all__ = ["LoopRuns"]


class LoopRuns:
    """``given``: the loop of ``astart``; ``None``: one is made when it is needed. ``run`` is the coroutine of a task;
    ``on_end`` is called with what came of it, on the loop, however it ended. ``around``: see ``LoopThread``.
    """

    def __init__(
        self,
        given: asyncio.AbstractEventLoop | None,
        run: Callable[[Attempt], Coroutine[Any, Any, Outcome | None]],
        on_end: Callable[[Attempt, Outcome | None], object],
        around: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        self.given = given
        self._around = around
        self._run = run
        self._on_end = on_end
        self._thread: LoopThread | None = None
        self._tasks: dict[Attempt, asyncio.Task[Outcome | None]] = {}  # changed on the loop only

    def attempts(self) -> list[Attempt]:
        """Those that have a task now."""
        return list(self._tasks)

    def is_closed(self) -> bool:
        """Whether the loop of ``astart`` is."""
        return self.given is not None and self.given.is_closed()

    def is_here(self) -> bool:
        """Whether the caller runs on the loop of ``astart``."""
        return self.given is not None and loop_here() is self.given

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Make a task for each. Raises ``RuntimeError`` if the loop of ``astart`` is closed."""
        if self.given is None and self._thread is None:
            self._thread = LoopThread("kestrelpy-outbox-loop", self._around)
        loop = self._loop()
        assert loop is not None
        loop.call_soon_threadsafe(self._spawn, attempts)

    def cancel(self, seconds: float) -> None:
        """Cancel all tasks, and wait a little for them to end."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):  # it was closed just now
            loop.call_soon_threadsafe(self._cancel)
        pause = threading.Event()
        for _ in range(round(seconds / 0.01)):
            if not self._tasks:
                break
            pause.wait(0.01)

    def end(self, timeout: float) -> None:
        """End the thread, if there is one; what still runs there ends it later."""
        if self._thread is not None:
            self._thread.close(timeout)

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        return self.given if self._thread is None else self._thread.loop

    def _spawn(self, attempts: Sequence[Attempt]) -> None:
        loop = asyncio.get_running_loop()
        for attempt in attempts:
            self._tasks[attempt] = task = loop.create_task(self._run(attempt), context=Context())
            attempt.where = task
            task.add_done_callback(partial(self._end_task, attempt))

    def _end_task(self, attempt: Attempt, task: asyncio.Task[Outcome | None]) -> None:
        self._tasks.pop(attempt, None)
        if task.cancelled():  # before it began
            outcome: Outcome | None = Outcome(attempt, "back")
        elif (error := task.exception()) is not None:
            outcome = unexpected(attempt, error)
        else:
            outcome = task.result()
        self._on_end(attempt, outcome)

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()
