"""What an outbox is bound to, and the store that works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.store import JobStore

__all__ = ["open_store"]


def open_store(core: OutboxCore, bind: Any) -> JobStore:
    """Raises what ``Outbox`` raises. A work queue needs no SQLAlchemy."""
    if isinstance(bind, WorkQueue):
        from kestrelpy.outbox.journal_store import JournalStore

        return JournalStore(core, bind)
    compilers = core.compilers  # first: it says which package is missing
    from kestrelpy.outbox.database import open_database
    from kestrelpy.outbox.store import DatabaseStore

    return DatabaseStore(compilers, open_database(bind, compilers))
