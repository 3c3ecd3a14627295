"""``run`` and ``arun``: until a signal asks the process to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType
from typing import Any

__all__ = ["auntil_signal", "until_signal"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def until_signal(start: Callable[[], object], stop: Callable[[], object]) -> None:
    """Call ``start``, wait for the first signal, which may come before, and call ``stop``. A second signal does what it
    did before this call.
    """
    asked = threading.Lock()  # an event's own lock may be held when the handler strikes; this one is all there is
    asked.acquire()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(_number: int, _frame: FrameType | None) -> None:
        _restore(before)  # the next one ends the process now
        asked.release()

    try:
        for number in SIGNALS:
            signal.signal(number, ask)
        start()
        while True:  # see docs/interrupts.md, rule 3
            if asked.acquire(timeout=3600.0):
                break
        stop()
    finally:
        _restore(before)


async def auntil_signal(start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]) -> None:
    """``until_signal`` on an event loop."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(_number: int, _frame: FrameType | None) -> None:
        _restore(before)
        loop.call_soon_threadsafe(asked.set)

    try:
        for number in SIGNALS:
            signal.signal(number, ask)
        await start()
        await asked.wait()
        await stop()
    finally:
        _restore(before)


def _restore(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
