"""Ctrl-C and SIGTERM: both end a command by an exception, so that readers are closed and no process is left behind.

Between writing items and committing them, a signal is held back (``held``); otherwise the written items would come
again. It is held back for a second at most: then a write that nobody reads is given up, and none of its items are
committed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_PATIENCE_SECONDS = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Signal ``number`` arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _State:
    holding = False
    waiting = 0  # the signal that is being held back, or 0


def _arrive(number: int, _frame: FrameType | None) -> None:
    if _State.holding and not _State.waiting:
        _State.waiting = number
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
        return
    raise Interrupted(_take() or number)


def _take() -> int:
    number, _State.waiting = _State.waiting, 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    return number


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Turn signals into ``Interrupted``, in the main thread. A signal that was ignored before stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    chosen = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, _arrive)) for number in (*chosen, signal.SIGALRM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def unheeded(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Do nothing at these signals, in the main thread: by default they would end the process. Yields those that came,
    in order.
    """
    came: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))

    before = [(number, signal.signal(number, note)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold back a signal that arrives inside the block until the block ends, or for ``_PATIENCE_SECONDS``."""
    _State.holding = True
    try:
        yield
    finally:
        _State.holding = False
        waiting = _take() if _State.waiting else 0
    if waiting:
        raise Interrupted(waiting)
