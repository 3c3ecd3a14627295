"""One run of one job: its handler is called, and what came of it becomes an outcome, which somebody saves.

Rules:
1. What a handler, a hook, a codec or a predicate of the user raises never gets out of here.
2. Hooks are called once the outcome is saved, and not if it was refused because the token was no longer good.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from asyncio import CancelledError, timeout
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox._logging import log
from kestrelpy.outbox.backoff import exponential, seconds_of
from kestrelpy.outbox.context import restored
from kestrelpy.outbox.job import CONTEXT, ID, LANE, TRIES, GiveUp, Job, RetryLater, running

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.queues import QueueConsumer

__all__ = ["Attempt", "Outcome", "call_hooks", "failure_of", "lapse_of", "outcome_of", "unexpected"]

MAX_ERROR_BYTES = 16 << 10
_DEFAULT_BACKOFF = exponential()
_TEXT, _BINARY = 7, 8


class Attempt:
    """A claimed job that is about to run, or runs. ``token``: of the claim."""

    __slots__ = (
        "connection",
        "consumer",
        "core",
        "in_hook",
        "is_lost",
        "is_reported",
        "is_retry",
        "row",
        "started",
        "token",
        "until",
        "value",
        "warned",
        "where",
    )

    def __init__(self, core: OutboxCore, consumer: QueueConsumer, row: Sequence[Any], token: int) -> None:
        self.core = core
        self.consumer = consumer
        self.row = row
        self.token = token
        self.started: float | None = None  # by the monotonic clock
        self.where: Any = None  # the thread's number, or the task
        self.connection: Any = None  # that a transactional handler is given
        self.until = 0.0  # when its lease is over, by the monotonic clock
        self.is_retry = False
        self.is_lost = False  # its lease could not be renewed: somebody else has it
        self.is_reported = False  # its outcome is known to the writer
        self.warned = 0  # how often it was logged for being slow
        self.value: Any = None  # what the handler has returned, for the test kit
        self.in_hook = False

    @property
    def id(self) -> int:
        """The job's id."""
        found: int = self.row[ID]
        return found

    def job(self) -> Job:
        """The job as it was claimed."""
        return Job(self.row[:19], self.core.queues)

    def payload(self) -> Any:
        """Raises what the codec raises."""
        binary = self.row[_BINARY]
        return self.consumer.options.codec.decode(self.row[_TEXT] if binary is None else bytes(binary))

    def run(self, clock: Callable[[], float]) -> Outcome:
        """Call a ``def`` handler, in an empty context with the job's own in it, and log a failure there."""
        return Context().run(self._run, clock)

    def _run(self, clock: Callable[[], float]) -> Outcome:
        self.started = started = clock()
        outcome = None
        try:
            with self._entered():
                try:
                    self.value = self._call()
                except BaseException as error:
                    outcome = outcome_of(self, error, clock() - started)
                    raise
        except BaseException as error:
            return outcome if outcome is not None else outcome_of(self, error, clock() - started)
        return Outcome(self, "done")

    async def arun(self, clock: Callable[[], float], is_stopping: Callable[[], bool] = lambda: False) -> Outcome:
        """``run`` for an ``async`` handler, in a task whose context is empty. Cancelled by a stop, it is given back."""
        self.started = started = clock()
        outcome = None
        try:
            with self._entered():
                try:
                    async with timeout(self.consumer.options.timeout):
                        self.value = await self._call()
                except CancelledError as error:
                    outcome = Outcome(self, "back") if is_stopping() else outcome_of(self, error, clock() - started)
                    raise
                except BaseException as error:
                    outcome = outcome_of(self, error, clock() - started)
                    raise
        except BaseException as error:
            return outcome if outcome is not None else outcome_of(self, error, clock() - started)
        return Outcome(self, "done")

    def _entered(self) -> AbstractContextManager[None]:
        running.set(self)
        return restored(self.core.context, self.row[CONTEXT], log)

    def _call(self) -> Any:
        handler = self.consumer.handler
        assert handler is not None
        if self.consumer.options.transactional:
            value = handler(self.payload(), self.connection)
        else:
            value = handler(self.payload())
        if not self.consumer.is_async and inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{handler!r} gave a coroutine, which nobody awaits: register the async function itself")
        return value


class Outcome:
    """What came of an attempt: ``status`` is ``"done"``, ``"error"``, ``"dead"`` or ``"back"`` (given back, untried).

    ``delay_ms``: until it comes again; ``None`` with ``"back"``: as before. ``exception``: what the handler has raised,
    also where that is no failure. ``is_saved``: a transactional handler's transaction has marked it done. ``freed``:
    the queues in which jobs became ready with this one, or with one that was saved beside it.
    """

    __slots__ = ("attempt", "delay_ms", "error", "exception", "freed", "is_saved", "status")

    def __init__(
        self,
        attempt: Attempt,
        status: str,
        *,
        delay_ms: int | None = None,
        error: str = "",
        exception: BaseException | None = None,
    ) -> None:
        self.attempt = attempt
        self.status = status
        self.delay_ms = delay_ms
        self.error = error
        self.exception = exception
        self.is_saved = False
        self.freed: Sequence[str] = ()

    @property
    def is_given_back(self) -> bool:
        """Whether the job may run at once, here or elsewhere."""
        return self.status == "back" and self.delay_ms is None

    @property
    def lane(self) -> tuple[str, str] | None:
        """The lane that may go on now, if the job has one and has left it."""
        lane = self.attempt.row[LANE]
        return None if lane is None or self.status == "error" else (self.attempt.consumer.queue, lane)


def outcome_of(attempt: Attempt, error: BaseException | None, seconds: float = 0.0) -> Outcome:
    """The outcome of an attempt that took ``seconds`` and raised ``error``, or nothing. A failure is logged."""
    if error is None:
        return Outcome(attempt, "done")
    if isinstance(error, RetryLater):
        later = _milliseconds(error)
        if later is not None:
            return Outcome(attempt, "back", delay_ms=later, exception=error)
    options = attempt.consumer.options
    try:
        if options.counts_as_done(error):
            return Outcome(attempt, "done", exception=error)
    except (Exception, SystemExit):
        log.exception("queue %r: done_on failed; the error of job %s counts", attempt.consumer.queue, attempt.id)
    return failure_of(attempt, error, seconds)


def failure_of(attempt: Attempt, error: BaseException, seconds: float) -> Outcome:
    """The outcome of an attempt that failed with ``error``: it comes again, or is dead. It is logged."""
    if isinstance(error, GiveUp):
        status, delay_ms = "dead", 0
    else:
        status, delay_ms = _failed(attempt, attempt.row[TRIES])
    tries = attempt.row[TRIES]
    level = logging.ERROR if tries >= 3 or status == "dead" else logging.WARNING
    log.log(
        level,
        "job %s of queue %r %s after %.3f s%s",
        attempt.id,
        attempt.consumer.queue,
        f"is dead: {_words_of(error)}" if isinstance(error, GiveUp) else f"failed at try {tries}",
        seconds,
        f"; again in {delay_ms / 1000:.1f} s" if status == "error" else "; it is dead",
        exc_info=error,
    )
    return Outcome(attempt, status, delay_ms=delay_ms, error=_text_of(error, attempt.core), exception=error)


def unexpected(attempt: Attempt, error: BaseException) -> Outcome:
    """For what the outbox itself, or a back-off or a predicate of the user's, raises where nothing should."""
    log.error("job %s of queue %r failed in an unexpected way", attempt.id, attempt.consumer.queue, exc_info=error)
    return Outcome(attempt, "error", delay_ms=5000, error=type(error).__qualname__, exception=error)


def lapse_of(attempt: Attempt) -> Outcome:
    """The outcome of a job whose lease is over: a failure, or its death if it is worn out."""
    status, delay_ms = _failed(attempt, attempt.row[TRIES])
    text = f"its lease was over at try {attempt.row[TRIES]}: its process died, hung, or lost the database"
    log.warning("job %s of queue %r: %s; it is %s", attempt.id, attempt.consumer.queue, text, status)
    return Outcome(attempt, status, delay_ms=delay_ms, error=text)


def _failed(attempt: Attempt, tries: int) -> tuple[str, int]:
    options, queue = attempt.consumer.options, attempt.consumer.queue
    seconds = seconds_of(options.backoff, max(tries, 1), attempt.core.random(), _DEFAULT_BACKOFF, queue=queue)
    return options.failed(tries, seconds)


def call_hooks(outcome: Outcome) -> None:
    """Call ``on_error`` and ``on_dead`` after the outcome was saved, each as it applies, in the job's context."""
    if outcome.status not in ("error", "dead"):
        return
    options = outcome.attempt.consumer.options
    hooks: list[Callable[[], object]] = []
    row = list(outcome.attempt.row[:19])
    row[5], row[17] = outcome.status, outcome.error
    job = Job(row, outcome.attempt.core.queues)
    error = outcome.exception
    if options.on_error is not None and error is not None:
        on_error = options.on_error
        hooks.append(lambda: on_error(job, error))
    if options.on_dead is not None and outcome.status == "dead":
        on_dead = options.on_dead
        hooks.append(lambda: on_dead(job))
    for hook in hooks:
        Context().run(_within, outcome.attempt, hook)


def _within(attempt: Attempt, hook: Callable[[], object]) -> None:
    attempt.in_hook = True  # for a carrier that does something once a run
    running.set(attempt)
    with restored(attempt.core.context, attempt.row[CONTEXT], log):
        try:
            hook()
        except BaseException:
            log.exception("queue %r: a hook failed for job %s", attempt.consumer.queue, attempt.id)


def _milliseconds(error: RetryLater) -> int | None:
    """``None`` for what is no number of seconds."""
    try:
        number = float(error.seconds)
    except Exception:  # OverflowError, and what a subclass raises, or a __float__
        return None
    return round(min(number, 1 << 32) * 1000) if number >= 0 and not math.isnan(number) else None


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a __str__ of the user's
        return type(error).__name__


def _text_of(error: BaseException, core: OutboxCore) -> str:
    """The traceback, at most 16 KiB, its end; or the type alone."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    if core.settings.error_text == "type":
        return name
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # of a __str__ of the user's
        text = name
    data = text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\x00")
    return data[-MAX_ERROR_BYTES:].decode("utf-8", "ignore")
