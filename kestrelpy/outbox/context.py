"""The option ``context`` of an outbox: values that go with a job from its put to its handler.

A value is saved as JSON in the row of the job. What was unset at the put is unset around the handler, whatever the
worker has set. A context variable can't be unset again, so a handler runs in an empty ``contextvars.Context``, and
``restored`` is entered in there: ``Context().run(...)`` for a handler that is ``def``, and for one that is ``async`` a
task with ``context=Context()``. Nothing that a handler sets is left for the next one then, either.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from kestrelpy.outbox.errors import InvalidPayload
from kestrelpy.outbox.payload import exact_json

__all__ = ["Carrier", "capture", "check_context", "restored"]

_UNSET = object()


class Carrier(Protocol):
    """Something that has a value where a job is put, and makes use of it where the job runs."""

    def capture(self) -> Any | None:
        """The value to save with the job that is being put, as JSON can hold it; ``None``: there is none."""

    def restore(self, value: Any) -> AbstractContextManager[object]:
        """A context manager around the handler of the job that has ``value``. It sees what the handler raises, and
        can't change that. An error of its own is logged, and the job runs.
        """
        ...


Source: TypeAlias = "ContextVar[Any] | Carrier"
Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


def check_context(context: Mapping[str, Source] | None) -> dict[str, Source]:
    """The option, as a dict of the outbox's own. Raises ``TypeError`` and ``ValueError``."""
    if context is None:
        return {}
    if not isinstance(context, Mapping):
        raise TypeError(f"context must be a mapping of names to ContextVars and Carriers, not {context!r}")
    checked = dict(context)
    for name, source in checked.items():
        if not isinstance(name, str):
            raise TypeError(f"context: a name must be a str, not {name!r}")
        if not name:
            raise ValueError("context: a name must not be empty")
        exact_json({name: None}, "context")
        if isinstance(source, ContextVar):
            continue
        is_class = isinstance(source, type)
        if is_class or not all(callable(getattr(source, method, None)) for method in ("capture", "restore")):
            advice = ": call it, and pass what it returns" if is_class else ""
            raise TypeError(f"context[{json.dumps(name)}] must be a ContextVar or a Carrier, not {source!r}{advice}")
    return checked


def capture(context: Mapping[str, Source], queue: str) -> str | None:
    """The values that are set, as JSON text; ``None`` if none is.

    Raises ``InvalidPayload`` of ``queue`` for a value that JSON can't hold, and for a carrier that raises.
    """
    values: dict[str, object] = {}
    for name, source in context.items():
        if isinstance(source, ContextVar):
            value = source.get(_UNSET)
            if value is not _UNSET:
                values[name] = value
            continue
        try:
            value = source.capture()
        except Exception as error:
            what = f"context[{json.dumps(name)}] could not be captured: {type(error).__name__}: {error}"
            raise InvalidPayload(queue, what) from error
        if value is not None:
            values[name] = value
    if not values:
        return None
    try:
        return exact_json(values, "context")
    except ValueError as error:
        raise InvalidPayload(queue, str(error)) from error


@contextlib.contextmanager
def restored(context: Mapping[str, Source], text: str | None, log: Log) -> Iterator[None]:
    """Set the variables and enter the carriers that ``text`` has values for, and undo that after the block.

    To be entered in an empty ``contextvars.Context``: see above. What does not restore is logged, and the block runs;
    what the block raises is raised. A name of ``text`` that is not in ``context`` is left alone: the put may be of a
    newer version of the program.
    """
    values = _values_of(text, log) if context and text is not None else {}
    with contextlib.ExitStack() as stack:
        carriers: list[tuple[str, Carrier]] = []
        for name, source in context.items():
            if name not in values:
                continue
            if isinstance(source, ContextVar):
                stack.callback(source.reset, source.set(values[name]))
            else:
                carriers.append((name, source))
        for name, carrier in carriers:  # after the variables: they may read them
            try:
                manager = carrier.restore(values[name])
                manager.__enter__()
            except (Exception, SystemExit):
                _warn(log, "context %r of a job was not restored; the job runs without it", name)
            else:
                stack.push(_Leaving(name, manager, log))
        yield


def _values_of(text: str, log: Log) -> dict[str, Any]:
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"the context of a job must be a JSON object, not {text[:100]!r}")
    except Exception:
        _warn(log, "the context of a job can't be read; the job runs without it")
        return {}
    return values


class _Leaving:
    """Leaves a carrier. An error of the carrier does not become the outcome of the job, and the error of the handler
    stays it, also if the carrier would swallow it.
    """

    def __init__(self, name: str, manager: AbstractContextManager[object], log: Log) -> None:
        self._name = name
        self._manager = manager
        self._log = log

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._manager.__exit__(kind, error, traceback)
        except Exception as own:
            if own is not error:
                _warn(self._log, "context %r of a job: its carrier failed after the handler", self._name)


def _warn(log: Log, message: str, *arguments: object) -> None:
    with contextlib.suppress(Exception):  # a filter or handler of the user's
        log.warning(message, *arguments, exc_info=True)
