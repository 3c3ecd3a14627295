"""What a shell completes: commands and options, folders, and the names of queues, readers and tubes that are there.

argcomplete (the extra ``[completion]``) asks for it: it runs the command with ``_ARGCOMPLETE`` in the environment. Else
this module is not loaded. It only reads, and what cannot be read completes to nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["complete"]

_FILES = ("DIR", "FILE", "PATH", "INPUT", "PROGRAM")


def complete(parser: argparse.ArgumentParser) -> None:
    """Write the completions, and end the process. Returns if argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser, default_completer=_completions)  # type: ignore[arg-type]


def _completions(prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """The values that ``action`` may have here and that begin with ``prefix``."""
    look = _NAMES.get(action.dest)
    directory = getattr(parsed_args, "directory", None)
    if look is None or action.metavar == "DIR" or not isinstance(directory, str):
        if isinstance(action.metavar, str) and action.metavar in _FILES:
            from argcomplete.completers import DirectoriesCompleter, FilesCompleter

            found: Iterable[str] = (DirectoriesCompleter() if action.metavar == "DIR" else FilesCompleter())(prefix)
            return found
        return ()
    try:
        folder = os.path.expanduser(directory)  # the shell has not done so yet
        names = look(folder, getattr(parsed_args, "queue", None))
        return [name for name in names if name.startswith(prefix)]
    except Exception:  # a shell that completes says nothing: the command itself will say what is wrong
        return ()


def _queues(directory: str, _queue: object) -> Iterable[str]:
    from kestrelpy import queue_names

    return queue_names(directory)


def _readers(directory: str, queue: str) -> Iterable[str]:
    from kestrelpy import inspect

    return [reader.name for reader in inspect(directory, queue).readers if reader.name]


def _tubes(directory: str, queue: str) -> Iterable[str]:
    from kestrelpy.work import JobsOutside

    jobs = JobsOutside(directory, queue)
    jobs.look()
    return [tube.name for tube in jobs.tubes()]


_NAMES: dict[str, Callable[[str, Any], Iterable[str]]] = {"queue": _queues, "reader": _readers, "tube": _tubes}
"""By the destination of an argument: what it names, in the folder and the queue that stand before it."""
