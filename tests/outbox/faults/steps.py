"""Several transactions in one thread, one statement after the other in an order that the test chooses.

An *actor* is a function that calls the outbox as any program does, in a greenlet of its own. It pauses before each
statement, commit and rollback on the engine of ``Steps``; ``Steps.run`` lets one of them take a step, then another. The
calls are the real ones: nothing of what they send is repeated here.

A statement that waits for another transaction's lock pauses, too: the driver's wait is replaced by one that looks
whether the answer is there. An actor that waits is asked again when another one has ended a transaction.
"""

from __future__ import annotations

import random
import select
import sqlite3
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import greenlet
import psycopg
import sqlalchemy
from psycopg.waiting import Ready, Wait

T = TypeVar("T")
LOOK_MS = 2
"""So long an answer may take before its actor counts as waiting. One that is only slow is asked again, too."""
PATIENCE_MS = 20_000


class Actor:
    """``work`` in a greenlet. ``error`` is there when it has ended with one."""

    def __init__(self, steps: Steps, name: str, work: Callable[[], object]) -> None:
        self.greenlet = greenlet.greenlet(self._work, steps.scheduler)
        self.greenlet.actor = self
        self.name = name
        self.error: Exception | None = None
        self.waits = False
        """For a lock."""
        self.patience_ms = LOOK_MS
        self.at_commit: Callable[[], object] | None = None
        """Called once, right before its next commit, or before a statement that commits itself."""
        self._call = work
        self._scheduler = steps.scheduler

    def _work(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error

    def pause(self, *, waits: bool = False) -> None:
        """Let others go on."""
        self.waits = waits
        self._scheduler.switch()


def current() -> Actor | None:
    """The actor that runs, if one does."""
    found: Actor | None = getattr(greenlet.getcurrent(), "actor", None)
    return found


class Steps:
    """``engine``: on the database of ``url``, for actors, and for calls outside of them, which do not pause."""

    def __init__(self, url: str) -> None:
        self.scheduler = greenlet.getcurrent()
        self.actors: list[Actor] = []
        self.waited = 0
        """How often a statement has waited for another transaction."""
        self.taken: list[str] = []
        """The names of the actors, in the order of the steps."""
        self._ended = False  # a transaction, in the last step
        self.engine = sqlalchemy.create_engine(url, creator=_creator(url), poolclass=sqlalchemy.QueuePool, pool_size=9)
        sqlalchemy.event.listen(self.engine, "before_cursor_execute", lambda each, *_: self._execute(each))
        sqlalchemy.event.listen(self.engine, "commit", lambda _: self._commit())
        sqlalchemy.event.listen(self.engine, "rollback", lambda _: self._end())

    def add(self, name: str, work: Callable[[], object]) -> Actor:
        self.actors.append(Actor(self, name, work))
        return self.actors[-1]

    def run(self, choose: random.Random) -> None:
        """Until all actors have ended. Raises what one of them raised."""
        actors, self.actors, self.taken = self.actors, [], []
        living = list(actors)
        while living:
            able = [actor for actor in living if not actor.waits]
            if not able:  # a deadlock, which the server ends; or one of them is only slow
                for actor in living:
                    actor.patience_ms = PATIENCE_MS if len(living) == 1 else 50 * LOOK_MS
                able = living
            actor = choose.choice(able)
            self.taken.append(actor.name)
            self._ended = False
            actor.greenlet.switch()
            actor.patience_ms = LOOK_MS
            living = [actor for actor in living if not actor.greenlet.dead]
            if self._ended or actor.greenlet.dead:
                for other in living:
                    other.waits = False
        for actor in actors:
            if actor.error is not None:
                raise actor.error

    def close(self) -> None:
        self.engine.dispose()

    def _execute(self, connection: sqlalchemy.Connection) -> None:
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            self._commit()
        else:
            self._pause()

    def _commit(self) -> None:
        self._end()
        here = current()
        if here is not None and here.at_commit is not None:
            here.at_commit()
            here.at_commit = None

    def _end(self) -> None:
        self._pause()
        self._ended = True

    def _pause(self) -> None:
        here = current()
        if here is not None:
            here.pause()


def _creator(url: str) -> Callable[[], Any]:
    parts = sqlalchemy.make_url(url)
    if parts.get_backend_name() == "sqlite":
        path = parts.database or ""
        return lambda: _open_sqlite(path)
    conninfo = parts.set(drivername="postgresql").render_as_string(hide_password=False)
    return lambda: PausingPsycopg.connect(conninfo, options="-c deadlock_timeout=10ms")


def _open_sqlite(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=0, factory=PausingSqlite)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


class PausingPsycopg(psycopg.Connection[Any]):
    """A connection that lets others go on while an answer is not there."""

    def wait(self, gen: Generator[Any, Any, T], *_: Any, **__: Any) -> T:
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send(self._wait_once(wanted))
        except StopIteration as end:
            result: T = end.value
            return result

    def _wait_once(self, wanted: Wait) -> Ready:
        poll = select.poll()
        poll.register(
            self.fileno(), (select.POLLIN if wanted & Wait.R else 0) | (select.POLLOUT if wanted & Wait.W else 0)
        )
        while True:
            actor = current()
            found = poll.poll(PATIENCE_MS if actor is None else actor.patience_ms)
            if found:
                event = found[0][1]
                ready = (Ready.R if event & ~select.POLLOUT else 0) | (Ready.W if event & select.POLLOUT else 0)
                return Ready(ready)
            assert actor is not None, "the server does not answer"
            actor.pause(waits=True)


class PausingSqlite(sqlite3.Connection):
    """A connection that waits for a lock by letting others go on."""

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(PausingCursor)

    def commit(self) -> None:
        _patiently(super().commit)


class PausingCursor(sqlite3.Cursor):
    """Its cursor."""

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        return _patiently(lambda: super(PausingCursor, self).execute(sql, parameters))


def _patiently(call: Callable[[], T]) -> T:
    """As SQLite's busy handler does it, which gives up where waiting can't help: a snapshot that is too old."""
    actor = current()
    while True:
        try:
            return call()
        except sqlite3.OperationalError as error:
            is_hopeless = getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY_SNAPSHOT"
            if actor is None or "locked" not in str(error) or is_hopeless or actor.patience_ms > LOOK_MS:
                raise
        actor.pause(waits=True)
