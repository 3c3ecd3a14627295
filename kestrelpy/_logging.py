"""The logger ``kestrelpy``. ``logging`` is imported when there is something to say: it costs more than this package.

What a handler or a filter of a user's raises goes no further: threads that all queues count on log, and so do calls
that have done what they promise.
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


class Trouble:
    """What fails again and again is said once, and once more when it works."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def begin(self, what: str, error: BaseException) -> None:
        """It has failed, and will be tried again."""
        why = f"{type(error).__name__}: {error}"
        if self._said.get(what) != why:
            warning("%s failed and will be tried again, in silence until it works: %s", what, why)
            self._said[what] = why

    def end(self, what: str) -> None:
        """It has not failed."""
        if self._said and self._said.pop(what, None) is not None:
            warning("%s works again", what)
