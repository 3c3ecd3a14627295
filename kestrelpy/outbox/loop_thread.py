"""``LoopThread``: an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from kestrelpy.outbox._logging import log

__all__ = ["LoopThread", "loop_here"]

T = TypeVar("T")


def loop_here() -> asyncio.AbstractEventLoop | None:
    """The event loop that the caller runs on."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopThread:
    """An event loop on a thread of its own. All it does is done within ``around()``."""

    def __init__(self, name: str, around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext) -> None:
        self._around = around
        self.loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        around = self._around()
        self.loop.run_until_complete(around.__aenter__())
        while not self._is_closing:
            try:
                self.loop.run_forever()
            except BaseException:  # a SystemExit in a task or a callback of a handler gets out of the loop
                log.exception("something on an event loop of the outbox wanted to end it")
        self.loop.run_until_complete(around.__aexit__(None, None, None))
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self, timeout: float = 5.0) -> None:
        """Cancel what runs there, and end the thread when it has ended; wait for that."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self._thread.join(timeout)

    async def _end(self) -> None:
        await _cancel_all()
        self._is_closing = True
        self.loop.stop()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
