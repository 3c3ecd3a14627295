"""The options of queues, what is checked and encoded before a put writes anything, and who consumes what."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Protocol

from kestrelpy._value import Value
from kestrelpy.errors import InvalidName
from kestrelpy.outbox._checks import check_count, check_number
from kestrelpy.outbox.backoff import exponential
from kestrelpy.outbox.errors import InvalidPayload, UnknownQueue
from kestrelpy.outbox.payload import JsonText

__all__ = ["KnownQueues", "PayloadCodec", "QueueConsumer", "QueueOptions", "check_name", "check_text"]

DAY = 86_400.0
MAX_TEXT = 255
_LEGAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


class PayloadCodec(Protocol):
    """Makes text or bytes of a payload, and a payload of them."""

    def encode(self, value: Any) -> str | bytes: ...
    def decode(self, data: Any) -> Any: ...


class QueueOptions(Value, kw_only=True):
    """How a queue works: its payloads, its retries, its limits and its hooks. docs/outbox.md has a table of them.

    Durations are seconds. Raises ``TypeError`` and ``ValueError``.
    """

    codec: PayloadCodec = JsonText()
    validate: Callable[[Any], object] | None = None
    depends_on: Callable[[Any], Any] | None = None
    max_payload_bytes: int = 1 << 20
    max_retries: int | None = 10_000
    backoff: float | Callable[[int], float] = exponential()
    stop_at_failure: bool = True
    done_on: type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], object] = ()
    transactional: bool = False
    concurrency: int | None = None
    slow_after: float = 300.0
    hung_after: float = 1800.0
    timeout: float | None = None
    keep_done: float | None = 7 * DAY
    keep_dead: float | None = None
    on_error: Callable[[Any, BaseException], object] | None = None
    on_dead: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(self.codec, name, None)):
                raise TypeError(f"codec must have encode and decode, not {self.codec!r}")
        for name in ("validate", "depends_on", "on_error", "on_dead"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, or None, not {function!r}")
        for name in ("validate", "depends_on", "backoff", "done_on", "on_error", "on_dead"):
            if is_async(getattr(self, name)):
                raise TypeError(f"{name} must be a def function: nobody would await {getattr(self, name)!r}")
        check_count("max_payload_bytes", self.max_payload_bytes)
        if self.max_retries is not None:
            check_count("max_retries", self.max_retries)
        if self.concurrency is not None:
            check_count("concurrency", self.concurrency, 1)
        for name in ("slow_after", "hung_after"):
            check_number(name, getattr(self, name))
        for name in ("timeout", "keep_done", "keep_dead"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if not callable(self.backoff):
            check_number("backoff", self.backoff)
        for name in ("stop_at_failure", "transactional"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_done_on()

    def _check_done_on(self) -> None:
        kinds = self.done_on if isinstance(self.done_on, tuple) else (self.done_on,)
        are_types = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
        if not are_types and not callable(self.done_on):
            raise TypeError(f"done_on must be exception types, or a function of an exception, not {self.done_on!r}")

    def counts_as_done(self, error: BaseException) -> bool:
        """Whether ``done_on`` says that this error of a handler is success. Raises what its predicate raises."""
        if isinstance(self.done_on, type | tuple):
            return isinstance(error, self.done_on)
        return bool(self.done_on(error))

    def failed(self, tries: int, seconds: float) -> tuple[str, int]:
        """The status of a job that failed at its ``tries``-th run, and the milliseconds until it comes again."""
        is_worn_out = self.max_retries is not None and tries > self.max_retries
        return ("dead", 0) if is_worn_out else ("error", round(seconds * 1000))


class QueueConsumer:
    """A queue that is consumed here (``handler``), or only declared (``None``)."""

    __slots__ = ("given", "handler", "is_async", "options", "queue")

    def __init__(
        self,
        queue: str,
        handler: Callable[..., Any] | None,
        options: QueueOptions,
        given: frozenset[str] = frozenset(),
    ) -> None:
        self.queue = queue
        self.handler = handler
        self.options = options
        self.given = given  # the names of the options that are not the library's own defaults
        self.is_async = handler is not None and is_async(handler)


class KnownQueues:
    """The queues of an outbox. Decodes the payloads of jobs, with the codec of their queue."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = defaults
        self.defaults = QueueOptions(**defaults)
        self._known: dict[str, QueueConsumer] = {}
        self._relays: dict[str, str] = {}  # by queue: the name of its relay
        self._check: Callable[[QueueConsumer], object] | None = None

    def add(
        self, queue: str, handler: Callable[..., Any] | None, options: dict[str, Any], *, replace: bool = False
    ) -> QueueConsumer:
        """Raises ``InvalidName``, ``ValueError`` for a second consumer, ``TypeError`` for what can't be called."""
        check_name(queue)
        if handler is not None:
            check_handler(handler)
        found = self._known.get(queue)
        if handler is not None and queue in self._relays:
            raise ValueError(f"queue {queue!r} has the relay {self._relays[queue]!r}: it can't have a consumer, too")
        if found is not None and found.handler is not None and handler is not None and not replace:
            raise ValueError(f"queue {queue!r} has a consumer already: pass replace=True to replace it")
        if found is not None and not options and not replace:
            made = QueueConsumer(queue, handler or found.handler, found.options, found.given)
        else:
            given = {**self._defaults, **options}
            known = found.handler if found else None
            made = QueueConsumer(queue, handler or known, QueueOptions(**given), frozenset(given))
        if self._check is not None:
            self._check(made)
        self._known[queue] = made
        return made

    def copy(self) -> KnownQueues:
        """The same queues; what is registered in one of the two is not in the other."""
        made = KnownQueues(self._defaults)
        made._known = dict(self._known)
        made._relays = dict(self._relays)
        return made

    def add_relay(self, queue: str, name: str) -> None:
        """Declare a queue that a relay moves. Raises ``ValueError`` if it has a consumer or a relay, or if the name is
        another relay's.
        """
        found = self._known.get(queue)
        if found is not None and found.handler is not None:
            raise ValueError(f"queue {queue!r} has a consumer: it can't have a relay, too")
        if queue in self._relays:
            raise ValueError(f"queue {queue!r} has a relay already: {self._relays[queue]!r}")
        if name in self._relays.values():
            raise ValueError(f"name: another queue has a relay of the name {name!r}")
        if found is None:
            self.add(queue, None, {})
        self._relays[queue] = name

    def check_all(self, check: Callable[[QueueConsumer], object]) -> None:
        """Call ``check`` with each that is known, and from now on with each that is to be added."""
        for each in (QueueConsumer("defaults", None, self.defaults, frozenset(self._defaults)), *self.all()):
            check(each)
        self._check = check

    def remove(self, queue: str) -> None:
        """Let ``queue`` be declared only. Raises ``UnknownQueue`` if it has no consumer."""
        found = self._known.get(queue)
        if found is None or found.handler is None:
            raise UnknownQueue(queue)
        self._known[queue] = QueueConsumer(queue, None, found.options, found.given)

    def find(self, queue: str | Callable[..., Any]) -> QueueConsumer:
        """By name, or by the function that consumes it. Raises ``UnknownQueue``, ``InvalidName``."""
        if callable(queue):
            found = [each for each in list(self._known.values()) if each.handler == queue]  # methods are made anew
            if len(found) != 1:
                name = getattr(queue, "__qualname__", repr(queue))
                raise UnknownQueue(name) if not found else ValueError(f"{name} consumes several queues: name one")
            return found[0]
        known = self._known.get(queue)
        if known is None:
            raise UnknownQueue(check_name(queue))
        return known

    def options(self, queue: str) -> QueueOptions:
        """Of a queue, also of one that is not known here: the defaults."""
        known = self._known.get(queue)
        return self.defaults if known is None else known.options

    def all(self) -> list[QueueConsumer]:
        """All that are known, in the order of being added."""
        return list(self._known.values())

    def consumed(self) -> list[QueueConsumer]:
        """Those that have a handler here."""
        return [each for each in self._known.values() if each.handler is not None]

    def decode(self, queue: str, stored: str | bytes) -> Any:
        """Raises what the codec raises."""
        return self.options(queue).codec.decode(stored)


def is_async(function: object) -> bool:
    """Whether it is an ``async def`` function, or an object with an async ``__call__``."""
    return inspect.iscoroutinefunction(function) or (
        not isinstance(function, type) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    )


def check_handler(handler: object) -> None:
    """Raises ``TypeError`` for what can't be called, and for a generator, of which a call would run nothing."""
    if not callable(handler):
        raise TypeError(f"a handler is a function, not {handler!r}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(f"a handler must not be a generator: a call of {handler!r} would run nothing of it")


def check_name(queue: object) -> str:
    """Raises ``InvalidName`` for what is no name of a queue."""
    if not isinstance(queue, str):
        raise InvalidName(queue, "a name is a str")
    if not _LEGAL.fullmatch(queue):
        raise InvalidName(queue, "1 to 100 characters of A-Z a-z 0-9 _ -, not starting with -")
    return queue


def check_text(what: str, value: object) -> str | None:
    """A key, a group or a lane. Raises ``ValueError``, ``TypeError``."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, or None, not {value!r}")
    if not 0 < len(value) <= MAX_TEXT or "\0" in value:
        raise ValueError(f"{what} must have 1 to {MAX_TEXT} characters, and no NUL, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be encodable in UTF-8, not {value!r}") from None
    return str(value)


def encode(queue: str, options: QueueOptions, payload: Any) -> tuple[str | bytes, int]:
    """The payload as it is stored, and its bytes. Raises ``InvalidPayload``, ``JobTooBig``."""
    _validate(queue, options, payload)
    try:
        stored = options.codec.encode(payload)
    except Exception as error:
        raise InvalidPayload(queue, f"the codec refuses it: {error}") from error
    if isinstance(stored, str):
        try:
            payload_bytes = len(stored) if stored.isascii() else len(stored.encode())
        except UnicodeEncodeError:
            raise InvalidPayload(queue, "the codec gives text with a lone surrogate") from None
        if "\0" in stored:
            raise InvalidPayload(queue, "the codec gives text with a NUL, which PostgreSQL can't store")
    elif isinstance(stored, bytes | bytearray | memoryview):
        stored = bytes(stored)
        payload_bytes = len(stored)
    else:
        raise InvalidPayload(queue, f"the codec gives {type(stored).__name__}, neither str nor bytes")
    if payload_bytes > options.max_payload_bytes:
        from kestrelpy.work import JobTooBig

        raise JobTooBig(payload_bytes, options.max_payload_bytes)
    return stored, payload_bytes


def _validate(queue: str, options: QueueOptions, payload: Any) -> None:
    if options.validate is None:
        return
    try:
        is_valid = options.validate(payload)
    except Exception as error:
        raise InvalidPayload(queue, f"validate raised {type(error).__name__}: {error}") from error
    if not is_valid:
        raise InvalidPayload(queue, "validate refuses it")
