"""``gate``: no fork while a thread of an outbox is in a transaction of SQLite.

The library of SQLite keeps in memory which locks this process has on a file. A child that is forked meanwhile has that
memory, and no thread that would ever release them: whatever it does, the database is locked for it. So a fork waits for
these transactions; not for those of the thread that forks, and not for ever, as a handler may take long.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from types import TracebackType

__all__ = ["ForkGate", "gate"]

PATIENCE = 1.0
"""Seconds that a fork waits."""


class ForkGate:
    """A context manager around a transaction."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()  # guarded by self._changed: by thread
        self._is_closed = False  # guarded by self._changed

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if not self._inside[me]:
                self._changed.wait_for(lambda: not self._is_closed, PATIENCE)
            self._inside[me] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
            self._changed.notify_all()

    def close(self) -> None:
        """Before a fork: wait for the other threads, and let none in."""
        me = threading.get_ident()
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._inside.keys() <= {me}, PATIENCE)

    def open(self) -> None:
        """After it, in the parent."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()

    def reset(self) -> None:
        """After it, in the child, which has this thread alone."""
        mine = self._inside[threading.get_ident()]
        self._changed = threading.Condition()
        self._inside = Counter({threading.get_ident(): mine} if mine else {})
        self._is_closed = False


gate = ForkGate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.reset)
