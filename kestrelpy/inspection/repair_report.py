"""What a repair has found and done: ``RepairReport``."""

from __future__ import annotations

from kestrelpy._journal.purpose import ITEMS
from kestrelpy._value import Value

Spans = tuple[tuple[int, int], ...]
"""Ids as spans: the first and the last id of each."""


class RepairLoss(Value):
    """One place that was damaged: ``size`` bytes of the file ``path`` from ``offset`` on (0: what should be there is
    missing), and why. The items ``first_id`` to ``last_id`` are lost with it; both are 0 if none is. ``kept``: the file
    that has the bytes now; empty if there were none.
    """

    path: str
    offset: int
    size: int
    reason: str
    first_id: int = 0
    last_id: int = 0
    kept: str = ""


class JobDoubts(Value, kw_only=True):
    """Of a work queue whose records were lost. ``missing``: ids of jobs of which any may be lost, but for those deleted
    since. ``doubtful``: jobs whose last changes may be forgotten: a deleted job may be back, another may have its older
    state.
    """

    missing: tuple[tuple[int, int], ...] = ()
    doubtful: tuple[tuple[int, int], ...] = ()


class RepairReport(Value, kw_only=True):
    """What ``repair`` found. ``losses``: each place that was damaged. ``reset_readers``: readers whose checkpoint was
    damaged, and that begin with the earliest item. ``refused_batches``: published batches that were damaged, and are
    kept aside as a whole. ``jobs``: of a work queue that has lost records. ``kind``: as in ``VerifyReport``, and
    ``"archive"``. ``resumed``: this repair has first finished one that was cut short, and what that one found is among
    the losses. ``dry_run``: nothing was written.
    """

    queue: str
    kind: str = ITEMS
    losses: tuple[RepairLoss, ...] = ()
    reset_readers: tuple[str, ...] = ()
    refused_batches: tuple[str, ...] = ()
    jobs: JobDoubts | None = None
    resumed: bool = False
    dry_run: bool = False

    @property
    def lost_ids(self) -> tuple[tuple[int, int], ...]:
        """The ids of the lost items, as spans: the first and the last id of each, rising."""
        spans: list[tuple[int, int]] = []
        for first, last in sorted((loss.first_id, loss.last_id) for loss in self.losses if loss.first_id):
            if spans and first <= spans[-1][1] + 1:
                spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
            else:
                spans.append((first, last))
        return tuple(spans)

    @property
    def ok(self) -> bool:
        """Whether nothing was damaged."""
        return not self.losses
