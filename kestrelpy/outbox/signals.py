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


def until_signal(stop: Callable[[], object]) -> None:
    """Wait for the first signal, and call ``stop`` after it. A second signal does what it did before this call."""
    asked = threading.Event()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(_number: int, _frame: FrameType | None) -> None:
        _restore(before)  # the next one ends the process now
        asked.set()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        while True:  # see docs/interrupts.md, rule 3
            if asked.wait(3600.0):
                break
        stop()
    finally:
        _restore(before)


async def auntil_signal(stop: Callable[[], Awaitable[object]]) -> None:
    """``until_signal`` on an event loop."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(_number: int, _frame: FrameType | None) -> None:
        _restore(before)
        loop.call_soon_threadsafe(asked.set)

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        await asked.wait()
        await stop()
    finally:
        _restore(before)


def _restore(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
