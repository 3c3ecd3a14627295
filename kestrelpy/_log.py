"""The logger ``kestrelpy``. ``logging`` is imported when there is something to say: it costs more than this package."""

from __future__ import annotations


def warning(message: str, *arguments: object, error: bool = False) -> None:
    """Log a warning; with ``error``, also the exception being handled."""
    import logging

    logging.getLogger("kestrelpy").warning(message, *arguments, exc_info=error)


def exception(message: str, *arguments: object) -> None:
    """Log an error and the exception being handled."""
    import logging

    logging.getLogger("kestrelpy").exception(message, *arguments)
