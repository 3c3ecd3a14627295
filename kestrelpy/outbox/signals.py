"""``run`` and ``arun``: until a signal asks the process to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType
from typing import Any

from kestrelpy.outbox.errors import OutboxError

__all__ = ["auntil_signal", "check_thread", "until_signal", "wait_for"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""In this order they get their usual meaning back: who sees from outside that SIGTERM has it, may send either."""

LOOK_SECONDS = 0.5
"""A signal that comes just before a wait begins does not end it. Python has noted it, and sees that at the next one."""


def wait_for(event: threading.Event) -> bool:
    """Wait until it is set, however long that takes: True."""
    while not event.wait(LOOK_SECONDS):
        pass
    return True


def check_thread(name: str, instead: str) -> None:
    """Raises ``OutboxError`` outside of the main thread, which alone can have signals handled."""
    if threading.current_thread() is not threading.main_thread():
        raise OutboxError(f"{name}() waits for a signal, and only the main thread can: use {instead}()")


def until_signal(start: Callable[[], object], stop: Callable[[], object]) -> None:
    """Call ``start``, wait for the first signal, which may come before, and call ``stop``. A second signal does what it
    did before this call.
    """
    asked = threading.Lock()  # an event's own lock may be held when the handler strikes; this one is all there is
    asked.acquire()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(_number: int, _frame: FrameType | None) -> None:
        _restore(before)  # the next one ends the process now
        with contextlib.suppress(RuntimeError):  # two have come at once
            asked.release()

    try:
        for number in SIGNALS:
            signal.signal(number, ask)
        start()
        while True:  # see docs/interrupts.md, rule 3
            if asked.acquire(timeout=LOOK_SECONDS):
                break
        stop()
    finally:
        _restore(before)


async def auntil_signal(start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]) -> None:
    """``until_signal`` on an event loop."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ticks = loop.create_task(_tick())

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
        ticks.cancel()
        _restore(before)


async def _tick() -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)


def _restore(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
