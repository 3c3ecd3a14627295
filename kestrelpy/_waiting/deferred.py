"""Calls that a finaliser leaves to another thread.

A finaliser runs wherever something is allocated, in any thread, whatever locks that thread holds; and so does the end
of a task that nobody will run again. It can't take a lock, because its own thread may hold it. A call that needs a lock
is left here, and a thread that holds none makes it at once.

NOTE ON LOCKING: there is no lock here, and ``leave`` takes none. It appends, then reads ``_working``. The thread
stores that it ends, then looks for calls once more. So one of the two sees the other.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable

from kestrelpy import _logging
from kestrelpy._process import reset_after_fork

_left: deque[Callable[[], object]] = deque()
_working = False


def leave(call: Callable[[], object]) -> None:
    """Have ``call`` made by a thread that holds no lock. If none can be started, the next one that starts makes it."""
    global _working
    _left.append(call)
    if not _working:
        _working = True
        try:
            _thread.start_new_thread(_work, ())
        except RuntimeError:  # there are too many threads, or the interpreter ends
            _working = False
        except BaseException:
            _working = False
            raise


def _work() -> None:
    global _working
    while True:
        try:
            call = _left.popleft()
        except IndexError:
            _working = False
            if not _left:
                return
            _working = True
            continue
        try:
            call()
        except BaseException:  # from a callback, for example: there is no caller to raise it to
            _logging.exception("a call that a finaliser left to another thread raised")


def _reset_after_fork() -> None:
    """In a forked child: the thread does not exist here, and the calls left to it are the parent's."""
    global _working
    _working = False
    _left.clear()


reset_after_fork(_reset_after_fork)
