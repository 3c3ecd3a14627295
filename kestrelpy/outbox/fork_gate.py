"""``gate``: no fork while a thread of an outbox is in a transaction of SQLite.

The library of SQLite keeps in memory which locks this process has on a file. A child that is forked meanwhile has that
memory, and no thread that would ever release them: whatever it does, the database is locked for it. So a fork waits for
these transactions; not for those of the thread that forks, and not for ever, as a handler may take long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["ForkGate", "gate"]

PATIENCE = 1.0
"""Seconds that a fork waits."""
STEP = 0.001
"""Seconds between two looks, of which a fork that meets a transaction needs a few."""


class ForkGate:
    """A context manager around a transaction.

    It has no lock that an interrupt could leave held: a thread changes its own entry alone, registers, and then looks
    whether a fork is on its way, which closes the gate and then looks who is registered. So one of them sees the other.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # by thread, how often; changed by that thread alone
        self._is_closed = False
        self._never = _held_lock()

    def __enter__(self) -> None:
        me = threading.get_ident()
        before = self._inside.get(me, 0)
        self._inside[me] = before + 1
        if self._is_closed and not before:
            del self._inside[me]
            self._sleep_while(lambda: self._is_closed)
            self._inside[me] = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        left = self._inside.get(me, 0) - 1
        if left > 0:
            self._inside[me] = left
        else:
            self._inside.pop(me, None)

    def close(self) -> None:
        """Before a fork: wait for the other threads, and let none in."""
        me = threading.get_ident()
        self._is_closed = True
        self._sleep_while(lambda: any(thread != me for thread in list(self._inside)))

    def open(self) -> None:
        """After it, in the parent."""
        self._is_closed = False

    def reset(self) -> None:
        """After it, in the child, which has this thread alone."""
        me = threading.get_ident()
        self._inside = {me: self._inside[me]} if me in self._inside else {}
        self._is_closed = False
        self._never = _held_lock()

    def _sleep_while(self, condition: Callable[[], bool]) -> None:
        """Until it is not so, or patience is over."""
        for _ in range(round(PATIENCE / STEP)):
            if not condition():
                return
            self._never.acquire(timeout=STEP)


def _held_lock() -> threading.Lock:
    """A lock that is never released: to wait for it is to sleep, in a call that no interrupt divides."""
    lock = threading.Lock()
    lock.acquire()
    return lock


gate = ForkGate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.reset)
