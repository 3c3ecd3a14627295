"""What the reports of an outbox return: values that do not change. ``reports`` fills them in."""

from __future__ import annotations

from kestrelpy._value import Value

__all__ = ["Health", "QueueCount", "RetryStats", "Times"]


class QueueCount(Value):
    """So many jobs of ``queue`` are in ``status`` (the statuses of ``Job``). ``count`` is at least 1."""

    queue: str
    status: str
    count: int


class RetryStats(Value):
    """How often the jobs of a queue had to be run again.

    ``ok``: done jobs. ``errors``: jobs in error or dead. ``running``: jobs that run now. ``retries``: the runs after
    the first, of all jobs. ``retry_percentage``: 100 x retries / ok, or ``None`` as long as no job is done.
    """

    ok: int
    retries: int
    errors: int
    running: int
    retry_percentage: float | None


class Times(Value):
    """How long the done jobs of a queue took, in seconds. ``count``: how many jobs these are.

    ``p50`` to ``p99`` are percentiles by nearest rank: the smallest time that at least so many percent of the jobs did
    not exceed. Each is the time of a job, and none is interpolated.
    """

    count: int
    min: float
    avg: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Health(Value):
    """How an outbox is. ``reasons``: one sentence for each thing that makes it unhealthy; none if it is ``healthy``.

    ``errors``: jobs in error or dead whose first failure is ``healthy_error_age`` ago. ``slow``: handlers of this
    process that have run for longer than ``slow_after``. ``waiting_on_dead``: jobs that wait for a dead or cancelled
    one; they do not make it unhealthy. ``oldest_ready_age``: for how many seconds the job has been due that waits
    longest for a free handler; ``None`` if no job does. Where the database did not answer, ``errors`` and
    ``waiting_on_dead`` are 0, and ``oldest_ready_age`` is ``None``.
    """

    healthy: bool
    reasons: tuple[str, ...]
    errors: int
    slow: int
    waiting_on_dead: int
    oldest_ready_age: float | None
