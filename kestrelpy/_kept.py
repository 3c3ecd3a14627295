"""Errors that are kept, to be raised by every later call.

The same object must not be raised twice: each time it passes a frame it keeps that frame alive, with all that the
caller had in hand there; and two threads that raise it write into each other's traceback.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def copy_of(error: E) -> E:
    """An error like this one, with its facts and its cause, and with a traceback of its own.

    One that can't be made anew (an exception of a user's, say) is given back itself, without its traceback.
    """
    try:
        reduced = error.__reduce__()
        assert isinstance(reduced, tuple)
        again = reduced[0](*reduced[1])
        again.__dict__.update(reduced[2] if len(reduced) > 2 and reduced[2] else {})
    except Exception:
        again = None
    if type(again) is not type(error):
        return error.with_traceback(None)
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again
