"""``NewJob``: one job of a batch that ``WorkQueue.put_all`` puts."""

from __future__ import annotations

from typing import Any

from kestrelpy._value import Value

__all__ = ["NewJob"]


class NewJob(Value):
    """A job for ``WorkQueue.put_all``. The fields are the arguments of ``WorkQueue.put``; ``put_all`` checks them."""

    body: Any
    tube: str = "default"
    priority: int = 65536
    delay: float = 0
    ttr: float = 60
    key: str | None = None
    expires_in: float | None = None
    job_id: int | None = None
