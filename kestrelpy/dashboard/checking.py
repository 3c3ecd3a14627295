"""Checks of whole queues on request: one at a time, on a thread of its own, so that figures go on meanwhile.

NOTE ON LOCKING: ``_lock`` guards the fields; it is never held during a check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kestrelpy import Clock, KestrelError, VerifyReport, verify

KEPT = 20
"""So many results are kept, of different queues."""
SHOWN_DAMAGE = 20


class Checker:
    """Checks queues of ``directory``. ``check``: instead of ``kestrelpy.verify``, for tests."""

    def __init__(
        self, directory: str, clock: Clock, *, check: Callable[[str, str], VerifyReport] | None = None
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._check = check or verify
        self._lock = threading.Lock()
        self._running = ""
        self._results: dict[str, dict[str, Any]] = {}

    def start(self, queue: str) -> bool:
        """Begin a check. False if another one is under way."""
        with self._lock:
            if self._running:
                return False
            self._running = queue
        threading.Thread(target=self._run, args=(queue,), name="kestrelpy-verify", daemon=True).start()
        return True

    def state(self) -> dict[str, Any]:
        """The queue that is being checked, empty if none is, and the last results by queue."""
        with self._lock:
            return {"running": self._running, "results": list(self._results.values())}

    def _run(self, queue: str) -> None:
        began = self._clock.monotonic()
        result: dict[str, Any] = {"queue": queue}
        try:
            result |= _shown(self._check(self._directory, queue))
        except (KestrelError, OSError) as error:
            result |= {"ok": False, "error": str(error)}
        except Exception as error:  # a mistake of ours: the next check must be possible
            result |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        result |= {"seconds": round(self._clock.monotonic() - began, 3), "at_ms": self._clock.time_ns() // 1_000_000}
        with self._lock:
            self._results.pop(queue, None)
            self._results[queue] = result
            for oldest in list(self._results)[:-KEPT]:
                del self._results[oldest]
            self._running = ""


def _shown(report: VerifyReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "items": report.items,
        "bytes": report.bytes,
        "segments": report.segments,
        "torn_bytes": report.torn_bytes,
        "damage": [{"path": d.path, "offset": d.offset, "reason": d.reason} for d in report.damage[:SHOWN_DAMAGE]],
        "damages": len(report.damage),
    }
