"""What asyncio needs of everything that is open: a close that does not block the event loop.

NOTE ON LOCKING: no lock. A close runs on a thread of its own, and not on one of the loop's pool: all threads of the
pool may wait in calls that only the close would end.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kestrelpy._process import StaysInProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self


async def run_apart(call: Callable[[], object]) -> None:
    """Run ``call`` on a thread of its own while the event loop goes on; raises what it raises.

    ``call`` is never left half done: a task that is cancelled meanwhile waits until it has ended, and raises
    ``CancelledError`` then. If no thread can be started, ``call`` runs on the loop's thread.
    """
    from asyncio import CancelledError, get_running_loop, shield  # imported here: others must not pay for it

    loop = get_running_loop()
    ended, raised = loop.create_future(), list[BaseException]()

    def arrive() -> None:
        if not ended.done():
            ended.set_result(None)

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrive)

    try:
        threading.Thread(target=run, name="kestrelpy-close").start()
    except RuntimeError:  # no thread can be started
        run()
    cancelled: CancelledError | None = None
    while not ended.done():
        try:
            await shield(ended)
        except CancelledError as error:
            cancelled = error
    try:
        if raised:
            raise raised[0]
        if cancelled is not None:
            raise cancelled
    finally:
        raised.clear()  # its traceback refers to this frame: no reference cycle
        del cancelled


class ClosesInTask(StaysInProcess):
    """``async with`` for what has a ``close`` that may wait for the disk."""

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """``close`` for asyncio: it does not block the event loop. ``async with`` ends with it. Raises as ``close``.

        It runs on a thread of its own. A task that is cancelled meanwhile waits until everything is closed, and raises
        ``CancelledError`` then.
        """
        await run_apart(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
