"""What a streaming query needs of the place that its items come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from pyspark.sql.datasource import InputPartition


class Loss(NamedTuple):
    """Items that were there and are there no more, and why."""

    first_id: int
    last_id: int
    reason: str


class Feed(Protocol):
    """A queue and the query's reader of it. Only the process that plans the query opens it; before that, it is a few
    names that can be pickled.

    ``first_id``, ``last_id``: of the items that are there, as far as it is known; if there are none, the last id is one
    below the first. ``head``: the reader's position, that is, the last id up to which all items are done.
    """

    @property
    def is_open(self) -> bool: ...

    @property
    def queue_id(self) -> bytes: ...

    @property
    def first_id(self) -> int: ...

    @property
    def last_id(self) -> int: ...

    @property
    def head(self) -> int: ...

    def open(self, start_id: int | None) -> None:
        """Open the reader. A new one begins after ``start_id``, or where the query's options say."""

    def look(self) -> int:
        """Look for new items. Returns ``last_id``."""

    def spans(self) -> Iterable[tuple[int, int]]:
        """The ids that are there: the first and the last one of each stretch without a gap, rising."""

    def losses(self, start_id: int) -> list[Loss]:
        """The items after ``start_id`` that are lost."""

    def keep_after(self, start_id: int) -> None:
        """Keep all items after ``start_id``, if the reader is further on: the query resumes from there."""

    def make_durable(self, last_id: int) -> None:
        """Return when no power cut can give ids up to ``last_id`` to other items."""

    def reach(self, first_id: int, last_id: int, max_bytes: int) -> int:
        """The end of a batch of about ``max_bytes`` that begins at ``first_id``: at least that, at most ``last_id``."""

    def parts(self, first_id: int, last_id: int) -> Sequence[InputPartition]:
        """The tasks that read these items."""

    def commit(self, last_id: int) -> None:
        """Move the reader, durably, to ``last_id``, and never back. Items up to there need not be kept."""

    def close(self) -> None:
        """Close the reader, if it is open."""
