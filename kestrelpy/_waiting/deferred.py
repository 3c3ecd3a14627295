"""Calls that a finaliser leaves to another thread.

A finaliser runs wherever something is allocated, in any thread, with whatever locks that thread has; and so does the
end of a task that nobody will run again. It can't take a lock, which its own thread may have. What has to be done under
one is left here, and a thread that has none does it at once.

NOTE ON LOCKING: there is no lock here, and ``leave`` takes none. It appends, then reads ``_working``; the thread
stores that it goes, then looks once more: so one of them sees the other.
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
    """Have ``call`` made by a thread that holds no lock. If there can be none, the next one that is begun makes it."""
    global _working
    _left.append(call)
    if not _working:
        _working = True
        try:
            _thread.start_new_thread(_work, ())
        except RuntimeError:  # there are too many, or the interpreter ends
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
        except BaseException:  # of a callback, say: nobody is there to raise it to
            _logging.exception("what a finaliser has left to be done has failed")


def _reset_after_fork() -> None:
    """In a forked child: the thread did not come along, and what was left to it is the parent's."""
    global _working
    _working = False
    _left.clear()


reset_after_fork(_reset_after_fork)
