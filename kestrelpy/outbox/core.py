"""``OutboxCore``: what the parts of one outbox share: its queues, its store, its clock, and the checks of a put."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy import Clock, InvalidName, SystemClock
from kestrelpy.outbox._checks import check_number
from kestrelpy.outbox.context import capture, check_context
from kestrelpy.outbox.errors import InvalidPayload, MissingPackage, NotSupported, OutboxError
from kestrelpy.outbox.job import Job
from kestrelpy.outbox.puts import Dependency, NewPayload, PutOptions
from kestrelpy.outbox.queues import KnownQueues, QueueConsumer, check_name, check_text, encode

if TYPE_CHECKING:
    from kestrelpy.outbox.database import Compilers
    from kestrelpy.outbox.schema import OutboxTables
    from kestrelpy.outbox.store import JobStore

__all__ = ["OutboxCore", "Settings", "put_options"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
_MAX_CHANNEL = 63
"""Bytes of a name in PostgreSQL."""
MAX_SECONDS = 1 << 32
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_MS = (1 << 53) - 1
"""The latest instant, in milliseconds: a whole number in every JSON."""
IF_EXISTS = ("raise", "return", "replace")


class Settings:
    """The options of an outbox that are not options of queues, checked."""

    __slots__ = (
        "error_text",
        "health_grace",
        "healthy_error_age",
        "lease",
        "listen_url",
        "notify",
        "on_system_error",
        "on_system_recovery",
    )

    def __init__(
        self,
        *,
        lease: float,
        notify: bool,
        listen_url: Any,
        health_grace: float,
        healthy_error_age: float,
        on_system_error: Callable[[], object] | None,
        on_system_recovery: Callable[[], object] | None,
        error_text: str,
    ) -> None:
        self.lease = check_number("lease", lease, 0.001, MAX_SECONDS)
        self.health_grace = check_number("health_grace", health_grace)
        self.healthy_error_age = check_number("healthy_error_age", healthy_error_age)
        for name, function in (("on_system_error", on_system_error), ("on_system_recovery", on_system_recovery)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, or None, not {function!r}")
        if error_text not in ("full", "type"):
            raise ValueError(f"error_text must be 'full' or 'type', not {error_text!r}")
        self.notify = bool(notify)
        self.listen_url = listen_url
        self.on_system_error = on_system_error
        self.on_system_recovery = on_system_recovery
        self.error_text = error_text


class Relaying(Protocol):
    """A relay, as a running outbox sees it."""

    queue: str
    name: str
    idle_seconds: float | None
    """After a step that has moved nothing: how long there is nothing to do; 0: unknown; ``None``: there may be more."""

    def step(self) -> int:
        """Move one batch. Returns how many jobs that were."""

    def release(self) -> None:
        """Let another process go on at once."""

    def give_up(self) -> None:
        """The same while a step goes on on another thread."""

    def twin(self, store: JobStore, directory: str | os.PathLike[str] | None = None) -> Relaying:
        """Another one, which works on this store, as another process would have it; ``directory``: for its own."""


class OutboxCore:
    """Shared by an ``Outbox``, what runs its jobs, and its test kit.

    ``store`` is where the operations run, or ``None`` until the outbox is bound; ``clock`` what the caller gave, and
    ``time`` that or the system's; ``random`` gives numbers from 0 up to 1, for jitter and tokens.
    """

    def __init__(
        self,
        table: str,
        schema: str | None,
        context: Mapping[str, Any] | None,
        clock: Clock | None,
        settings: Settings,
        queue_options: dict[str, Any],
    ) -> None:
        self.table = check_identifier("table", table)
        self.schema = None if schema is None else check_identifier("schema", schema)
        self.context = check_context(context)
        self.settings = settings
        self.queues = KnownQueues(queue_options)
        self.clock = clock
        self.time: Clock = clock if clock is not None else SystemClock()
        self.store: JobStore | None = None
        self.random: Callable[[], float] = _random
        self.worker = _worker()
        self.relays: list[Relaying] = []
        self.slow: Callable[[], int] = _none  # how many handlers run for longer than slow_after
        self.started_ms: int | None = None  # when this process has started it
        self.is_virtual = False  # under the test kit: nothing is started
        self._tables: OutboxTables | None = None
        self._compilers: Compilers | None = None

    def abandon(self) -> None:
        """In a forked child: nothing runs, and the connections are the parent's."""
        self.worker = _worker()
        self.slow = _none
        self.started_ms = None
        if self.store is not None:
            self.store.abandon()

    @property
    def tables(self) -> OutboxTables:
        """SQLAlchemy's tables. Raises ``MissingPackage``."""
        if self._tables is None:
            try:
                from kestrelpy.outbox.schema import OutboxTables
            except ModuleNotFoundError:
                raise MissingPackage("sqlalchemy", "outbox") from None
            self._tables = OutboxTables(self.table, self.schema)
        return self._tables

    @property
    def compilers(self) -> Compilers:
        if self._compilers is None:
            tables = self.tables
            from kestrelpy.outbox.database import Compilers

            clock = self.clock
            clock_ms = None if clock is None else lambda: clock.time_ns() // 1_000_000
            self._compilers = Compilers(tables, clock_ms, self.now_ms, self.channel)
        return self._compilers

    @property
    def channel(self) -> str | None:
        """What PostgreSQL's NOTIFY wakes, or ``None`` if it must not."""
        if not self.settings.notify:
            return None
        name = self.table if self.schema is None else f"{self.schema}.{self.table}"
        return name if len(name) <= _MAX_CHANNEL else f"{name[:50]}_{sum(map(ord, name)):x}"

    def now_ms(self) -> int:
        """By the clock that was given, or this machine's."""
        return self.time.time_ns() // 1_000_000

    def open_store(self) -> JobStore:
        """Raises ``OutboxError`` if the outbox is bound to nothing."""
        if self.store is None:
            raise OutboxError("this outbox is not bound: pass Outbox(bind), or call outbox.bind(...) first")
        return self.store

    def add_relay(self, relay: Relaying) -> None:
        """Raises ``ValueError`` if its queue has a consumer or a relay, or if another queue's has its name, and
        ``NotSupported`` without a database.
        """
        if self.store is not None and not self.store.has_relays:
            raise NotSupported("relay")
        self.queues.add_relay(relay.queue, relay.name)
        self.relays.append(relay)

    def check_supported(self, store: JobStore) -> None:
        """Raises ``NotSupported`` for what is registered, and is registered later, and this store does not have."""
        if self.relays and not store.has_relays:
            raise NotSupported("relay")
        self.queues.check_all(store.check_consumer)

    def needed(self, connection: Any, begin: str = "begin") -> Any:
        """Raises ``TypeError`` for a put without a connection, where there are some."""
        if connection is None and self.open_store().needs_connection:
            raise TypeError(f"put takes the connection of your transaction: use outbox.{begin}() if you have none")
        return connection

    def switch(self, clock: Clock, random: Callable[[], float], worker: str) -> Callable[[], None]:
        """For the test kit: work with these and with no store yet, until the function is called that is returned. That
        undoes all changes, also of what is registered.
        """
        before = vars(self).copy()
        self.clock = self.time = clock
        self.random = random
        self.worker = worker
        self.queues = self.queues.copy()
        self.relays = list(self.relays)
        self.store = self._compilers = None
        self.is_virtual = True
        return lambda: vars(self).update(before)

    def token(self) -> int:
        """For a claim: 62 random bits."""
        return int(self.random() * (1 << 53)) << 9 | int(self.random() * (1 << 9))

    def job(self, row: Sequence[Any], *, is_new: bool = False) -> Job:
        return Job(row, self.queues, is_new=is_new)

    def prepare(
        self,
        queue: str | Callable[..., Any],
        payloads: Sequence[Any],
        keys: Sequence[str | None],
        *,
        if_exists: str,
        depends_on: Any,
        group: str | None,
        lane: str | None,
        priority: int,
        delay: float,
        at_ms: int | None,
    ) -> tuple[PutOptions, list[NewPayload]]:
        """Check and encode all that a put is given, before anything is sent. Raises what ``Outbox.put`` raises."""
        consumer = self.queues.find(queue)
        if if_exists not in IF_EXISTS:
            raise ValueError(f"if_exists must be 'raise', 'return' or 'replace', not {if_exists!r}")
        delay_ms, due_ms = _due(delay, at_ms)
        new = PutOptions(
            consumer.queue,
            if_exists=if_exists,
            group=check_text("group", group),
            lane=check_text("lane", lane),
            priority=_check_priority(priority),
            delay_ms=delay_ms,
            at_ms=due_ms,
            context=capture(self.context, consumer.queue),
        )
        names = [check_text("key", key) for key in keys]
        given = [name for name in names if name is not None]
        if len(set(given)) != len(given):
            raise ValueError("keys: a key is there twice")
        common = _dependency(depends_on)
        return new, [
            NewPayload(
                *encode(consumer.queue, consumer.options, payload),
                key,
                _own(consumer, payload) if common is None else common,
            )
            for payload, key in zip(payloads, names, strict=True)
        ]

    def prepare_many(
        self,
        queue: str | Callable[..., Any],
        payloads: Sequence[Any],
        keys: Sequence[str | None] | None,
        options: dict[str, Any],
    ) -> tuple[PutOptions, list[NewPayload]]:
        """``prepare`` with a key for each payload, or none. Raises what ``Outbox.put_many`` raises."""
        given = list(payloads)
        names = [None] * len(given) if keys is None else list(keys)
        if len(names) != len(given):
            raise ValueError(f"keys: {len(names)} of them for {len(given)} payloads")
        return self.prepare(queue, given, names, **put_options(options))


_PUT_OPTIONS: dict[str, Any] = {
    "if_exists": "raise",
    "depends_on": None,
    "group": None,
    "lane": None,
    "priority": 0,
    "delay": 0,
    "at_ms": None,
}


def put_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a put, with the defaults of those that are not given. Raises ``TypeError`` for an unknown one."""
    unknown = options.keys() - _PUT_OPTIONS.keys()
    if unknown:
        raise TypeError(f"put has no option {sorted(unknown)[0]!r}")
    return {**_PUT_OPTIONS, **options}


def check_identifier(what: str, name: object) -> str:
    """Raises ``InvalidName``."""
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise InvalidName(name, f"{what} must be 1 to 41 characters of A-Z a-z 0-9 _, not starting with a digit")
    return name


def _worker() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _none() -> int:
    return 0


def _random() -> float:
    return int.from_bytes(os.urandom(7), "big") / (1 << 56)


def _check_priority(priority: int) -> int:
    try:
        number = MAX_PRIORITY + 1 if isinstance(priority, bool) else index(priority)
    except TypeError:
        number = MAX_PRIORITY + 1
    if not MIN_PRIORITY <= number <= MAX_PRIORITY:
        raise ValueError(f"priority must be an int from {MIN_PRIORITY} to {MAX_PRIORITY}, not {priority!r}")
    return number


def _due(delay: float, at_ms: int | None) -> tuple[int, int | None]:
    """Milliseconds from now, or an instant."""
    if at_ms is None:
        if type(delay) is int and 0 <= delay <= MAX_SECONDS:
            return delay * 1000, None
        return math.ceil(check_number("delay", delay, 0.0, MAX_SECONDS) * 1000), None
    if delay != 0:
        raise ValueError("give delay or at_ms, not both")
    try:
        instant = -1 if isinstance(at_ms, bool) else index(at_ms)
    except TypeError:
        raise TypeError(f"at_ms must be a whole number of milliseconds, not {at_ms!r}") from None
    if not 0 <= instant <= MAX_MS:
        raise ValueError(f"at_ms must be milliseconds since the Unix epoch, from 0 to {MAX_MS}, not {at_ms!r}")
    return 0, instant


def _dependency(depends_on: Any) -> Dependency | None:
    """An id, or a queue and a key. Raises ``TypeError``, ``ValueError``, ``InvalidName``."""
    if depends_on is None:
        return None
    if isinstance(depends_on, Job):
        return depends_on.id
    if isinstance(depends_on, tuple) and len(depends_on) == 2:
        key = check_text("the key of depends_on", depends_on[1])
        if key is None:
            raise ValueError("depends_on: the key must not be None")
        return check_name(depends_on[0]), key
    try:
        number = None if isinstance(depends_on, bool) else index(depends_on)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"depends_on must be a Job, an id, or a queue and a key, not {depends_on!r}")
    if not 0 <= number < 1 << 63:
        raise ValueError(f"depends_on: there is no id {number}")
    return number


def _own(consumer: QueueConsumer, payload: Any) -> Dependency | None:
    """What the queue's option says that this payload depends on."""
    if consumer.options.depends_on is None:
        return None
    try:
        return _dependency(consumer.options.depends_on(payload))
    except Exception as error:
        raise InvalidPayload(consumer.queue, f"depends_on failed: {type(error).__name__}: {error}") from error
