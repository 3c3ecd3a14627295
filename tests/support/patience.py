"""Waiting for other threads, and for no other reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE = 20.0
"""Seconds after which something that must happen is taken not to happen. Nothing waits that long but a failing test."""


def until(condition: Callable[[], object]) -> None:
    """Wait for ``condition`` to be true: for what another thread is about to do, and for nothing else."""
    event = threading.Event()
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("it did not happen")
