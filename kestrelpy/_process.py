"""Forks, the end of the interpreter, and queues that nobody closed.

The interpreter ends in steps: the main thread ends; threads that are not daemons are joined; functions registered with
``atexit`` are called. Waiters in a queue are dismissed at the first step: else their threads would never be joined
(R29). Queues are closed at the last step: threads that work until then can put, get what is there, and commit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol, cast

from kestrelpy import _logging
from kestrelpy.errors import QueueClosed


class StaysInProcess:
    """What is open in one process: it is neither pickled nor copied."""

    def __reduce__(self) -> NoReturn:
        """Raise ``TypeError``: it can't be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied: it is open in this process. Give another process the "
            "folder and the name: it reads with open_reader, and puts through kestrelpy.inbox or a server"
        )


class Unclosed(Protocol):
    """Something that a user opens and has to close."""

    @property
    def _what(self) -> str:
        """What the user calls it: its class, its name and its folder."""


class Closeable(Protocol):
    """Something open that has to be notified."""

    def close(self) -> None: ...

    def _dismiss(self, error: QueueClosed) -> object:
        """Wake all waiters, with ``error``: nobody may wait any more. Everything else still works."""

    def _abandon(self) -> None:
        """In a forked child: release everything without disturbing the parent (R26)."""


_live: weakref.WeakKeyDictionary[Closeable, bool] = weakref.WeakKeyDictionary()  # whether it has to be closed
_resets: list[Callable[[], object]] = []
_guard = threading.Lock()
_is_ending = False
_knows_pools = False  # dismiss_all was registered after concurrent.futures.thread had registered what joins its threads


def remember(thing: Closeable, *, must_close: bool = True) -> None:
    """Close ``thing`` when the interpreter ends, and abandon it in a forked child. ``must_close``: warn at the end if
    nobody has closed it.
    """
    with _guard:
        _live[thing] = must_close


def forget(thing: Closeable) -> None:
    with _guard:
        _live.pop(thing, None)


def warn_unclosed(thing: Unclosed) -> None:
    """Warn of an object that nobody closed: from its ``__del__``, which saves nothing (R31), or as the program ends.
    With ``tracemalloc`` the warning shows where it was opened.
    """
    warnings.warn(f"unclosed {thing._what}", ResourceWarning, stacklevel=2, source=thing)


def why_not_wait() -> QueueClosed | None:
    """A waiter that has entered a line calls this before it sleeps. Returns the error that it must raise instead if
    the interpreter is ending.

    The function registered last is called first. If ``concurrent.futures.thread`` was imported after us, it would wait
    for its threads before we have dismissed those of them that wait here.
    """
    if not _knows_pools and _pools_are_there():
        _register()
    return QueueClosed("the interpreter is ending: nobody may wait any more") if _is_ending else None


def hand_out_future() -> None:
    """Called before a future is handed out: a pool's worker may wait for it, and no call of ours would notice.

    So the pools' function is registered now, and ours after it.
    """
    if not _knows_pools:
        import concurrent.futures.thread  # noqa: F401 - here: programs without futures must not pay for it

        _register()


def dismiss_all() -> None:
    """The main thread has ended: no waiter in a queue, present or future, may keep the interpreter from ending."""
    global _is_ending
    _is_ending = True  # first: a new waiter looks at it after it has entered a line
    error = why_not_wait()
    assert error is not None
    for thing in _open_objects():
        try:
            thing._dismiss(error)
        except BaseException:  # also a SystemExit of a callback: the others must hear of it
            _logging.exception("dismissing the waiters of %r at the end of the interpreter failed", thing)
    if _is_pool_child():
        close_all()


def close_all() -> None:
    """At the end of the interpreter: close what is still open, with a warning for each (R31). Raises nothing, as
    no caller could get it: an error of a ``close``, or of a callback that it calls, is logged, and a warning that a
    filter has made an error is shown.
    """
    for thing in _open_objects():
        try:
            try:
                if _live.get(thing):
                    warn_unclosed(cast("Unclosed", thing))
            except ResourceWarning as warning:
                warnings.showwarning(warning, ResourceWarning, __file__, 0)
            finally:
                thing.close()
        except BaseException:
            _logging.exception("closing %r at the end of the interpreter failed", thing)


def _open_objects() -> list[Closeable]:
    with _guard:
        return list(_live)


def _pools_are_there() -> bool:
    return hasattr(sys.modules.get("concurrent.futures.thread"), "ThreadPoolExecutor")


def _is_pool_child() -> bool:
    """Whether this is a child of ``multiprocessing``: it may end without calling the functions that ``atexit`` has."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _register() -> None:
    global _is_ending, _knows_pools
    _knows_pools = _pools_are_there()
    try:
        threading._register_atexit(dismiss_all)  # type: ignore[attr-defined]  # as concurrent.futures does
    except RuntimeError:  # the end has begun
        _is_ending = True


def reset_after_fork(reset: Callable[[], object]) -> None:
    """Have ``reset`` called in every forked child, before any open object is abandoned: it replaces locks that were
    made at import, which a thread of the parent may have held.
    """
    _resets.append(reset)


def _abandon_all() -> None:
    global _guard, _live
    _guard = threading.Lock()
    for reset in _resets:
        reset()
    things = list(_live)
    _live = weakref.WeakKeyDictionary()
    for thing in things:
        thing._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
atexit.register(close_all)
_register()
