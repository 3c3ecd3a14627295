"""Threads that upload segments. All shipped queues of a process share them; each queue asks for a few at a time.

NOTE ON LOCKING: ``_lock`` guards the pool's figures and is a leaf. It is not held while anything is uploaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kestrelpy._process import reset_after_fork
from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.ship.owner import Uploaded

IDLE_SECONDS = 10.0
"""A thread without work for so long ends."""


class PendingUpload:
    """An upload that a thread carries out, or has carried out."""

    def __init__(self, work: Callable[[], Uploaded | None]) -> None:
        self._work = work
        self._done = ThreadWaiter()
        self._result: Uploaded | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.give(None)

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended, after a wait of so many seconds at most. The end is waited for once."""
        return self._done.wait(seconds)

    def result(self) -> Uploaded | None:
        """What came of it, when it has ended. Raises what was raised there."""
        if self._error is not None:
            raise self._error
        return self._result


class UploadPool:
    """Threads, begun when they are needed, that end by themselves. ``most``: as many as the largest wish."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: SimpleQueue[PendingUpload] = SimpleQueue()
        self._threads = self._idle = self._most = 0

    def begin(self, work: Callable[[], Uploaded | None], most: int) -> PendingUpload:
        """Have a thread do ``work``; there are at most ``most`` threads, or as many as another caller has asked for.
        If none can be begun, this thread does it.
        """
        pending = PendingUpload(work)
        with self._lock:
            self._most = max(self._most, most)
            begins = self._idle <= self._work.qsize() and self._threads < self._most
            self._threads += begins
        self._work.put(pending)
        if begins:
            try:
                threading.Thread(target=self._run, name="kestrelpy-upload", daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._threads -= 1
                    is_alone = not self._threads
                if is_alone:
                    self._work.get().run()
        return pending

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                pending = self._work.get(timeout=IDLE_SECONDS)
            except Exception:  # queue.Empty, which is another class in each way of building Python
                with self._lock:
                    self._idle -= 1
                    if self._work.empty():
                        self._threads -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
            pending.run()
            del pending


pool = UploadPool()


def _reset_after_fork() -> None:
    global pool
    pool = UploadPool()


reset_after_fork(_reset_after_fork)
