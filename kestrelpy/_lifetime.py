"""What outlives a queue's user: forks, the end of the interpreter, and queues that nobody closed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from typing import Protocol


class Lasting(Protocol):
    """Something open that has to be told."""

    def close(self) -> None: ...

    def _abandon(self) -> None:
        """In a forked child: let go of everything without disturbing the parent (R26)."""


_live: weakref.WeakSet[Lasting] = weakref.WeakSet()
_guard = threading.Lock()


def remember(thing: Lasting) -> None:
    with _guard:
        _live.add(thing)


def forget(thing: Lasting) -> None:
    with _guard:
        _live.discard(thing)


def warn_unclosed(thing: object) -> None:
    """For ``__del__``: nothing is saved from there (R31), it is only said."""
    warnings.warn(f"{thing!r} was never closed", ResourceWarning, stacklevel=2, source=thing)


def close_all() -> None:
    """At the end of the interpreter: a consumer that waits in a queue must not keep it from ending (R29)."""
    with _guard:
        things = list(_live)
    for thing in things:
        with contextlib.suppress(Exception):
            thing.close()


def _abandon_all() -> None:
    global _guard
    _guard = threading.Lock()
    things = list(_live)
    _live.clear()
    for thing in things:
        thing._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
try:
    # Before threads are joined, unlike atexit: a thread that waits in a queue would never be joined.
    threading._register_atexit(close_all)  # type: ignore[attr-defined]  # as concurrent.futures does
except (AttributeError, RuntimeError):
    atexit.register(close_all)
