"""The figures of a queue: of its journal, and of the readers that are open here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy._value import ReadOnlyDict
from kestrelpy.config import QueueStats

if TYPE_CHECKING:
    from kestrelpy._writing.put_path import PutPath


def figures_of(puts: PutPath, opened_at: tuple[int, int], refused_batches: int) -> QueueStats:
    """``JournaledQueue.stats``. ``opened_at``: the tail and the bytes of the journal when the queue was opened."""
    journal, registry, syncer = puts.journal, puts.registry, puts.syncer
    sync_buckets, sync_seconds = syncer.times.figures
    figures = {name: reader.stats() for name, reader in registry.open.items()}
    tail_id, total_bytes = journal.tail_id, journal.total_bytes
    left = list(registry.undisposed)  # retired, but the archive has no room for them, say
    segments = [*left, *journal.segments]
    return QueueStats(
        items=sum(each.items for each in figures.values()),
        bytes=sum(each.bytes for each in figures.values()),
        journal_bytes=journal.journal_bytes + sum(each.size for each in left),
        segments=len(segments),
        archived_segments=journal.archived_count,
        tail_id=tail_id,
        durable_id=max(journal.durable_id, syncer.commit.durable_id),
        put_count=tail_id - opened_at[0],
        put_bytes=total_bytes - opened_at[1],
        sync_count=syncer.commit.sync_count,
        quarantined=journal.quarantined,
        refused_batches=refused_batches,
        rotations=journal.rotation_count,
        readers=ReadOnlyDict(figures),
        oldest_segment=segments[0].number if segments else 0,
        newest_segment=segments[-1].number if segments else 0,
        waiting_producers=puts.waiting,
        refused=puts.refused,
        usable=puts.status.error is None,
        sync_buckets=sync_buckets,
        sync_seconds=sync_seconds,
    )
