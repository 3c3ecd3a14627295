"""What is known of each thread: whether it is storing a record, and whether records that it logs are stored.

A record that is logged while its thread stores another one (by a codec, by a finaliser that the garbage collector runs,
by kestrelpy itself) must not go into the queue in the middle of that: it waits for the end of the first. What is logged
while those that waited are stored is left out, or there would be no end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadState(threading.local):
    """``is_silent``: this thread moves records, and what it logs is not stored. ``waiting``: what is to be stored after
    the record that is being stored; ``None`` if there is no such record. ``accepts``: whether more may wait.
    """

    is_silent = False
    accepts = True
    waiting: list[Callable[[], object]] | None = None


state = ThreadState()
