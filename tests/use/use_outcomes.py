"""The oracle of errors: what a call may raise is what its docstring lists, and nothing else.

``documented(JournaledQueue.put)`` reads the docstring. It takes every name of an exception in it, follows "as ``put``"
and "``get`` of the default reader", and adds what the docstring of the class says of every call.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable
from typing import Any

from kestrelpy import DeadLetter, JournaledQueue, Reader, arrow, errors, open_reader
from kestrelpy import ship as shipping
from kestrelpy.ship.shipping import Shipping
from kestrelpy.work import Job, Session, WorkQueue
from kestrelpy.work import errors as work_errors

_NAME = re.compile(r"``([A-Za-z_.]+)(?:\([^`]*\))?``")
_READ: dict[tuple[str, str, str | None], tuple[type[BaseException], ...]] = {}
_IF_SHIPPED = re.compile(r"Of a queue that is\s+shipped, calls(.*?)\.(?:\s|$)", re.DOTALL)
_EVERY_CALL = re.compile(r"Every call raises(.*?)\.(?:\s|$)", re.DOTALL)


def _exceptions_in(text: str) -> set[type[BaseException]]:
    found: set[type[BaseException]] = set()
    for name in _NAME.findall(text):
        homes: tuple[Any, ...] = (errors, work_errors, builtins, shipping, arrow)
        kind = next((there for home in homes if (there := getattr(home, name, None)) is not None), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            found.add(kind)
    return found


def documented(function: Callable[..., Any]) -> tuple[type[BaseException], ...]:
    """The exceptions that the docstring of ``function`` lists, directly or by referring to another call. What was read
    is kept by what it is called, and not by the function: a closure would keep its world.
    """
    named = (function.__module__, function.__qualname__, function.__doc__)
    if named not in _READ:
        _READ[named] = _read(function)
    return _READ[named]


def _read(function: Callable[..., Any]) -> tuple[type[BaseException], ...]:
    text = inspect.getdoc(function) or ""
    owner = function.__qualname__.split(".")[0]
    found = _exceptions_in(text)
    for other in _referred(function, owner, text):
        found.update(documented(other))
    home: Any = {"JournaledQueue": JournaledQueue, "Reader": Reader}.get(owner)
    if owner == "Waiting":
        home = Reader
    if home is not None:
        for part in _EVERY_CALL.findall(inspect.getdoc(home) or ""):
            found |= _exceptions_in(part)
    if function.__module__.startswith("kestrelpy.work."):
        found |= _work(owner)
    elif function.__name__ == "__init__" or "what the opening raises" in text:
        found |= _exceptions_in(inspect.getdoc(JournaledQueue) or "")
    return tuple(found)


def _work(owner: str) -> set[type[BaseException]]:
    """What any call of a work queue may raise: what is said of its journal, of the queue, and of its jobs."""
    found = {errors.QueueClosed, errors.DurabilityUnknown, errors.QueueDiskFull, OSError}
    for part in _IF_SHIPPED.findall(inspect.getdoc(WorkQueue) or ""):
        found |= _exceptions_in(part)
    if owner == "WorkQueue":
        found |= _exceptions_in(inspect.getdoc(JournaledQueue) or "") | _exceptions_in(inspect.getdoc(WorkQueue) or "")
    return found | (_exceptions_in(inspect.getdoc(Job) or "") if owner == "Job" else set())


def _referred(function: Callable[..., Any], owner: str, text: str) -> list[Callable[..., Any]]:
    """The calls whose errors the docstring takes over."""
    others = []
    if "of the default reader" in text or "Reader." in text or "reader open here" in text:
        others.append(getattr(Reader, function.__name__, None))
        others.append(JournaledQueue.reader)  # it may have to be made first
    if "``open_reader``" in text:
        others.append(open_reader)
    for name in re.findall(r"(?:[Aa]s|what)\s+``([a-z_.]+)``", text) + re.findall(r"^``([a-z_]+)[(`]", text):
        home: Any = Reader if owner in ("Reader", "Waiting") else JournaledQueue
        home = DeadLetter if owner == "DeadLetter" else home
        if function.__module__.startswith("kestrelpy.work."):
            home = Session if owner == "Session" else WorkQueue
        if owner == "Shipping" and hasattr(Shipping, name):
            home = Shipping
        others.append(getattr(home, name.split(".")[-1], None))
    return [other for other in others if other is not None and other is not function]
