"""The errors that a work queue raises beside those of the journaled queue."""

from __future__ import annotations

from kestrelpy.errors import ItemTooLarge, KestrelError

__all__ = ["DeadlineSoon", "Draining", "DuplicateJob", "JobNotFound", "JobTooBig", "NotReserved", "TubeNotFound"]


class JobNotFound(KestrelError, LookupError):
    """No live job has ``job_id``, or its state does not allow the call. ``job_id`` is ``None`` if none was named."""

    def __init__(self, job_id: int | None, reason: str = "there is no such job") -> None:
        super().__init__(reason if job_id is None else f"job {job_id}: {reason}")
        self.job_id = job_id


class NotReserved(KestrelError, LookupError):
    """Job ``job_id`` lives, but this session does not have it reserved: the reservation ended, or is another's."""

    def __init__(self, job_id: int) -> None:
        super().__init__(f"job {job_id} is not reserved by this session")
        self.job_id = job_id


class DuplicateJob(KestrelError, ValueError):
    """The live job ``job_id`` of ``tube`` has ``key`` already. Nothing was stored.

    ``job_id`` is ``None`` if two jobs of one ``put_all`` have the key.
    """

    def __init__(self, job_id: int | None, tube: str, key: str) -> None:
        if job_id is None:
            super().__init__(f"two of these jobs have the key {key!r} in tube {tube!r}")
        else:
            super().__init__(f"job {job_id} of tube {tube!r} has the key {key!r} already")
        self.job_id = job_id
        self.tube = tube
        self.key = key


class Draining(KestrelError):
    """The queue refuses new jobs: ``drain()`` was called."""


class DeadlineSoon(KestrelError):
    """No job is ready, and the time to run of ``job_id``, which this session has reserved, ends within a second.

    Source: beanstalkd's DEADLINE_SOON, which does not say which job it is.
    """

    def __init__(self, job_id: int) -> None:
        super().__init__(f"no job is ready, and this session's reservation of job {job_id} ends within a second")
        self.job_id = job_id


class JobTooBig(ItemTooLarge):
    """A job of ``item_bytes`` is larger than ``max_job_bytes`` (``max_item_bytes``); nothing was stored."""

    def __init__(self, job_bytes: int, max_job_bytes: int) -> None:
        super().__init__(job_bytes, max_job_bytes)
        self.args = (f"a job of {job_bytes:,} bytes is larger than max_job_bytes={max_job_bytes:,}",)


class TubeNotFound(KestrelError, LookupError):
    """There is no tube ``tube``: it has no jobs, and nobody uses or watches it."""

    def __init__(self, tube: str) -> None:
        super().__init__(f"there is no tube {tube!r}")
        self.tube = tube
