"""How a task of asyncio waits for the disk, where a thread would wait in ``WorkCore.sync``."""

from __future__ import annotations

from kestrelpy._tasks import run_apart
from kestrelpy.work.core import WorkCore


async def acknowledged(core: WorkCore) -> None:
    """Return when what earlier calls have written is as safe as each call makes it before it returns: with
    ``sync="always"``, on disk. The event loop is not blocked, and no thread waits: one sync in the background serves
    all tasks that wait at that moment. Raises ``DurabilityUnknown``.

    A task that is cancelled here has made its change before. The change stays, and is on disk as soon as it would have
    been.
    """
    journal, held = core.journal, core.held
    if not core.always or journal is None or held is None:
        return
    from asyncio import wrap_future  # imported here: callers who do not use asyncio must not pay for it

    await wrap_future(journal.queue.acknowledged())
    if held.is_unsynced:  # the disk is full, or was a moment ago
        await run_apart(held.sync)
