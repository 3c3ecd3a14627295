"""The logger ``kestrelpy``. ``logging`` is imported at the first message: its import costs more than this package.

An error that a user's handler or filter raises goes no further. Threads that all queues rely on log here, and so do
calls that have already done what they promise.
"""

from __future__ import annotations

import contextlib


def warning(message: str, *arguments: object, error: bool = False) -> None:
    """Log a warning; with ``error``, also the exception being handled."""
    with contextlib.suppress(Exception, SystemExit):
        import logging

        logging.getLogger("kestrelpy").warning(message, *arguments, exc_info=error)


def exception(message: str, *arguments: object) -> None:
    """Log an error and the exception being handled."""
    with contextlib.suppress(Exception, SystemExit):
        import logging

        logging.getLogger("kestrelpy").exception(message, *arguments)


def debug(error: BaseException, message: str, *arguments: object) -> None:
    """Log ``error`` with its traceback, for those who look for its cause."""
    with contextlib.suppress(Exception, SystemExit):
        import logging

        logging.getLogger("kestrelpy").debug(message, *arguments, exc_info=error)


class Trouble:
    """Logs a repeated failure in one line once, and once more when it works again; its traceback at ``DEBUG``."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def begin(self, what: str, error: BaseException) -> None:
        """``what`` has failed, and will be tried again."""
        why = f"{type(error).__name__}: {error}"
        if self._said.get(what) != why:
            warning("%s failed and will be tried again, in silence until it works: %s", what, why)
            debug(error, "%s failed", what)
            self._said[what] = why

    def end(self, what: str) -> None:
        """``what`` has not failed."""
        if self._said and self._said.pop(what, None) is not None:
            warning("%s works again", what)
