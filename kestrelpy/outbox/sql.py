"""Statements: SQL with ``:names``, compiled once for a driver, and the operations that are made of them.

An operation is a generator. It yields a statement with its parameters, is sent the rows, and returns its result. It
does no input or output by itself, so one text serves SQLAlchemy's connections, sync and async, and the plain
connections of ``sqlite3`` and ``psycopg``: ``run`` and ``arun`` drive it with what executes a statement there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect

    from kestrelpy.outbox.schema import OutboxTables

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Arguments = Mapping[str, Any] | tuple[Any, ...]


class Statement:
    """SQL in the parameter style of a driver. ``names``: the parameters in their order, or ``None`` if by name."""

    __slots__ = ("names", "sql")

    def __init__(self, sql: str, names: tuple[str, ...] | None) -> None:
        self.sql = sql
        self.names = names

    def arguments(self, parameters: Mapping[str, Any]) -> Arguments:
        """The parameters as the driver takes them."""
        if self.names is None:
            return parameters
        return tuple([parameters[name] for name in self.names])


Query = tuple[Statement, Mapping[str, Any]]
Operation = Generator[Query, Rows, T]
Op = TypeVar("Op", bound=Callable[..., Generator[Query, Rows, Any]])
Fetch = Callable[[str, Arguments], Rows]
AsyncFetch = Callable[[str, Arguments], Awaitable[Rows]]


def run(operation: Operation[T], fetch: Fetch) -> T:
    """Run an operation with ``fetch``, which executes one statement and returns its rows. An error of it, or an
    interrupt, is raised in the operation, too, which may have something to take back.
    """
    try:
        statement, parameters = next(operation)
        while True:
            try:
                while True:  # the jump is inside, where an interrupt may strike: docs/interrupts.md, rule 3
                    statement, parameters = operation.send(fetch(statement.sql, statement.arguments(parameters)))
            except StopIteration:
                raise
            except BaseException as error:
                statement, parameters = operation.throw(error)
    except StopIteration as end:
        result: T = end.value
        return result


async def arun(operation: Operation[T], fetch: AsyncFetch) -> T:
    """``run`` with a ``fetch`` that is awaited."""
    try:
        statement, parameters = next(operation)
        while True:
            try:
                while True:
                    rows = await fetch(statement.sql, statement.arguments(parameters))
                    statement, parameters = operation.send(rows)
            except StopIteration:
                raise
            except BaseException as error:
                statement, parameters = operation.throw(error)
    except StopIteration as end:
        result: T = end.value
        return result


Kind = Literal["write", "read", "single", "look"]
"""What transaction an operation needs: ``read`` takes no write lock of SQLite, and neither waits for a writer nor holds
one up; ``single`` is one statement on PostgreSQL, or several that need not be one transaction, and saves the round
trips of BEGIN and COMMIT there; ``look`` is both.
"""
_KINDS: dict[Callable[..., Operation[Any]], Kind] = {}


def reading(operation: Op) -> Op:
    """Decorates an operation that writes nothing."""
    _KINDS[operation] = "read"
    return operation


def looking(operation: Op) -> Op:
    """Decorates an operation that writes nothing, of one statement, or of several that need not agree."""
    _KINDS[operation] = "look"
    return operation


def single(operation: Op) -> Op:
    """Decorates an operation of one statement."""
    _KINDS[operation] = "single"
    return operation


def kind_of(operation: Callable[..., Operation[Any]]) -> Kind:
    """What transaction an operation needs."""
    return _KINDS.get(operation, "write")


MAX_CLAIM = 1000
"""The most jobs that one claim takes, also told to PostgreSQL's planner, which knows no parameter's value."""
MAX_BYTES = 16 << 20
"""A claim ends with the job whose payload comes to so many bytes with those before."""


class Claim:
    """Who claims, and how much."""

    __slots__ = ("jobs", "lease_ms", "max_bytes", "token", "worker")

    def __init__(self, *, worker: str, token: int, lease_ms: int, jobs: int, max_bytes: int = MAX_BYTES) -> None:
        self.worker = worker
        self.token = token
        self.lease_ms = lease_ms
        self.jobs = min(jobs, MAX_CLAIM)
        self.max_bytes = max_bytes

    def parameters(self) -> dict[str, Any]:
        return {
            "worker": self.worker,
            "token": self.token,
            "lease_ms": self.lease_ms,
            "jobs": self.jobs,
            "max_bytes": self.max_bytes,
        }


class Flavour(Protocol):
    """One of the two. Its ``fields`` are what the shared statements have in braces. ``aborts``: an error of a statement
    ends the caller's transaction.
    """

    name: str
    aborts: bool
    updates_in_with: bool
    fields: Mapping[str, str]

    def list_of(self, values: Iterable[Any]) -> Any:
        """A list as the value of a parameter of ``{is_one_of}`` or ``{is_one_of_names}``."""

    def rows(self, columns: Mapping[str, str]) -> str:
        """Rows in a FROM clause, as ``r``: names and types of their columns. Parameters begin with ``rows``."""

    def row_values(self, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], /) -> dict[str, Any]:
        """The parameters of ``rows``."""

    def batches(
        self, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Rows to be inserted, in as many statements as are best: what stands for ``{rows}``, how many these are, and
        their parameters.
        """

    def claim(self, sql: Compiler, status: str, queues: Sequence[tuple[str, int]], claim: Claim) -> Operation[Rows]:
        """Claim jobs of this status: rows of ``CLAIMED``. ``queues``: names, each with the most jobs of it."""

    def next_due_ms(self, sql: Compiler, queues: Sequence[str]) -> Operation[tuple[int, int | None, int | None]]:
        """The time, and when the next job is due that is ready, and that is in error."""


class Compiler:
    """Compiles the statements of one outbox for one dialect of SQLAlchemy, each once.

    ``{jobs}``, ``{queues}``, ``{relays}``, ``{version}`` stand for the tables; ``{now}`` for the time in milliseconds,
    and the other fields for what the flavour has. ``now_ms``: the clock, or ``None`` where the server's decides.
    ``channel``: where consumers listen for what is put, or ``None``.
    """

    def __init__(
        self,
        dialect: Dialect,
        tables: OutboxTables,
        flavour: Flavour,
        now_ms: Callable[[], int] | None,
        channel: str | None = None,
    ) -> None:
        self.flavour = flavour
        self.channel = channel
        self._now_ms = now_ms
        self._dialect = dialect
        quoted = dialect.identifier_preparer.format_table
        self._fields = {
            "jobs": quoted(tables.jobs),
            "queues": quoted(tables.queues),
            "relays": quoted(tables.relays),
            "version": quoted(tables.version),
            **flavour.fields,
        }
        self._compiled: dict[str, Statement] = {}

    def time(self) -> dict[str, Any]:
        """The parameter of ``{now}``, if it is one. Read as late as can be: after the wait for a lock."""
        return {} if self._now_ms is None else {"now": self._now_ms()}

    def rows(self, text: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> tuple[Statement, Any]:
        """A query with ``{rows}`` in it, which are these."""
        found = self._compiled.get(text)
        if found is None:
            found = self._compile(text.replace("{rows}", self.flavour.rows(columns)), text)
        return found, {**self.time(), **self.flavour.row_values(columns, rows)}

    def batches(
        self, text: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[Statement, dict[str, Any]]]:
        """``rows`` for an INSERT of many: it may be several statements."""
        for clause, count, values in self.flavour.batches(columns, rows):
            known_as = f"{count}:{text}"
            found = self._compiled.get(known_as)
            if found is None:
                found = self._compile(text.replace("{rows}", clause), known_as)
            yield found, values

    def __call__(self, text: str) -> Statement:
        found = self._compiled.get(text)
        return found if found is not None else self._compile(text, text)

    def _compile(self, text: str, known_as: str) -> Statement:
        from sqlalchemy import text as as_clause

        compiled = as_clause(text.format_map(self._fields)).compile(dialect=self._dialect)
        order = getattr(compiled, "positiontup", None)
        statement = self._compiled[known_as] = Statement(str(compiled), None if order is None else tuple(order))
        return statement
