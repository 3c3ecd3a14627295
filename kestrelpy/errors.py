"""Every error of kestrelpy: one base class, and one class for each thing that a caller can act on.

Each error carries its facts as attributes, so that nobody has to parse a message.
"""

from __future__ import annotations

import errno
import os
import queue
import sys
from typing import TypeVar

__all__ = [
    "BatchTooLarge",
    "CorruptJournal",
    "DurabilityUnknown",
    "ForkedQueue",
    "InvalidName",
    "ItemTooLarge",
    "KestrelError",
    "NoDefaultReader",
    "QueueClosed",
    "QueueDiskFull",
    "QueueEmpty",
    "QueueFull",
    "QueueLocked",
    "RepairIncomplete",
    "RepairRefused",
    "RestoreIncomplete",
    "UnknownItem",
    "UnsupportedFormat",
    "WrongKind",
]

E = TypeVar("E", bound=BaseException)

_SHOWN = 10
"""So many names are in a message."""

if sys.version_info >= (3, 13):
    from queue import ShutDown as _ShutDown
else:

    class _ShutDown(Exception):
        """The base of ``QueueClosed`` where the standard library has none."""


class KestrelError(Exception):
    """The base of every error that kestrelpy itself raises. Each can be pickled, with its facts."""

    def __reduce__(self) -> tuple[object, ...]:
        where = (self.filename,) if isinstance(self, OSError) and self.filename is not None else ()
        return _restore, (type(self), (*self.args, *where), self.__dict__)


def _restore(kind: type[KestrelError], arguments: tuple[object, ...], facts: dict[str, object]) -> KestrelError:
    """Rebuild an error. Its ``__init__`` is not called, because it takes the facts and not the message."""
    error = kind.__new__(kind)
    base = OSError if isinstance(error, OSError) else Exception
    base.__init__(error, *arguments)
    error.__dict__.update(facts)
    return error


class QueueEmpty(KestrelError, queue.Empty):
    """Nothing arrived in time, or the waiters of the queue were evicted."""


class QueueFull(KestrelError, queue.Full):
    """The queue, or one of its readers, refuses the put; nothing was stored.

    ``reader`` is the full name of the reader that refused, or ``None``.
    """

    def __init__(self, message: str = "the queue is full", *, reader: str | None = None) -> None:
        super().__init__(message)
        self.reader = reader


class QueueClosed(KestrelError, _ShutDown):
    """The queue was used after ``close()`` or ``shutdown()``. Calls that were waiting on it end with this error."""


class ItemTooLarge(KestrelError, ValueError):
    """An item of ``item_bytes`` is larger than ``max_item_bytes``; nothing was stored."""

    def __init__(self, item_bytes: int, max_item_bytes: int) -> None:
        super().__init__(f"an item of {item_bytes:,} bytes is larger than max_item_bytes={max_item_bytes:,}")
        self.item_bytes = item_bytes
        self.max_item_bytes = max_item_bytes


class BatchTooLarge(ItemTooLarge):
    """The items of a batch have ``batch_bytes`` together, which is more than ``max_batch_bytes``; nothing was stored.

    Each item alone may be small enough: put them in several batches.
    """

    def __init__(self, batch_bytes: int, max_batch_bytes: int) -> None:
        super().__init__(batch_bytes, max_batch_bytes)
        self.args = (f"a batch of {batch_bytes:,} bytes is larger than {max_batch_bytes:,}: split it into several",)
        self.batch_bytes = batch_bytes
        self.max_batch_bytes = max_batch_bytes


class InvalidName(KestrelError, ValueError):
    """``name`` is no legal queue or reader name: 1 to 100 of ``A-Z a-z 0-9 _ -``, not starting with ``-``."""

    def __init__(self, name: object, reason: str) -> None:
        super().__init__(f"invalid name {name!r}: {reason}")
        self.name = name
        self.reason = reason


class NoDefaultReader(KestrelError, LookupError):
    """The default reader was asked for, but the queue has named readers (``readers``): one of them has taken over the
    default reader's checkpoint, or the queue never had a default reader.
    """

    def __init__(self, queue_name: str, readers: tuple[str, ...]) -> None:
        super().__init__(
            f"queue {queue_name!r} has named readers ({', '.join(readers)}) and so no default reader: use reader(name)"
        )
        self.queue_name = queue_name
        self.readers = readers


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


class UnknownReader(KestrelError, LookupError):
    """``open_reader`` was asked for a reader that the queue does not have, without ``create=True``. ``readers``: the
    named readers that it has. ``queues``: if the queue itself is not there, those that are; else ``None``.
    """

    def __init__(
        self, queue_name: str, reader: str, readers: tuple[str, ...], queues: tuple[str, ...] | None = None
    ) -> None:
        if queues is not None:
            has = f"the folder has {_first(queues)}" if queues else "the folder has no queue"
            text = f"there is no queue {queue_name!r} ({has}): create=True makes reader {reader!r} ahead of it"
        else:
            has = f"its readers: {_first(readers)}" if readers else "it has no named reader"
            text = f"queue {queue_name!r} has no reader {reader!r} ({has}): create=True makes one"
        super().__init__(text)
        self.queues = queues
        self.queue_name = queue_name
        self.reader = reader
        self.readers = readers


class UnknownItem(KestrelError, LookupError):
    """``item_id`` is not an open read of ``reader``: it was never opened, or is already committed or aborted."""

    def __init__(self, item_id: int, reader: str) -> None:
        super().__init__(f"item {item_id} is not an open read of reader {reader!r}")
        self.item_id = item_id
        self.reader = reader


class QueueLocked(KestrelError):
    """Another process or object has locked ``path``; ``pid`` is its holder's process id, or ``None`` if unknown.

    One object at a time writes a queue, and one owns a reader. Other processes put through ``kestrelpy.inbox`` or a
    server, and read through readers of their own (``open_reader``).
    """

    def __init__(self, path: str, pid: int | None = None) -> None:
        if pid == os.getpid():
            holder = "this process: it has the queue or the reader open already"
        else:
            holder = "another owner" if pid is None else f"process {pid}"
        super().__init__(f"{path} is held by {holder}")
        self.path = path
        self.pid = pid


class ForkedQueue(KestrelError):
    """The queue was opened by process ``opened_by``. This process is a forked child of it, and must open its own."""

    def __init__(self, opened_by: int) -> None:
        super().__init__(f"this queue was opened by process {opened_by}; a forked child must open its own")
        self.opened_by = opened_by


class CorruptJournal(KestrelError):
    """Bad bytes at ``offset`` of ``path``, where the data was already durable; ``reason`` says what is wrong.

    ``item_id`` is the first item that the damage touches, or ``None`` if that is not known.
    """

    def __init__(self, path: str, offset: int, reason: str, *, item_id: int | None = None) -> None:
        super().__init__(f"{path}, offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason
        self.item_id = item_id


class UnsupportedFormat(KestrelError):
    """``path`` has format ``version``, which is newer than ``supported``, the newest this library reads."""

    def __init__(self, path: str, version: int, supported: int) -> None:
        super().__init__(
            f"{path} has format version {version}; this kestrelpy reads up to {supported}: use a newer one"
        )
        self.path = path
        self.version = version
        self.supported = supported


class WrongKind(KestrelError, ValueError):
    """The queue of ``path`` (folder and name) is a ``kind``, ``"work queue"`` or ``"queue"``: another class opens it.

    Nothing was changed.
    """

    def __init__(self, path: str, kind: str) -> None:
        is_work = kind == "work queue"
        use = "use kestrelpy.work" if is_work else "its records are no jobs, use kestrelpy.JournaledQueue"
        super().__init__(f"{path} is a {kind}{'' if is_work else ' and no work queue'}: {use}")
        self.path = path
        self.kind = kind


class RestoreIncomplete(KestrelError):
    """The queue of ``path`` (folder and name) is being restored from a store, or that was cut short. Nothing was
    changed.

    Restore it again: that removes what is there of it, and begins from the start. If ``lazily`` is true, it was
    restored with ``lazy=True``, and its owner fetches the rest: ``JournaledQueue(..., ship=)`` with the same store. If
    ``follows`` is true, its files are those of a standby that has not come to the end of its log: a
    ``kestrelpy.ship.Standby`` goes on with them.
    """

    def __init__(self, path: str, *, lazily: bool = False, follows: bool = False) -> None:
        what = "restore it again (kestrelpy.ship.restore)"
        if follows:
            what = "start its standby (kestrelpy.ship.Standby), or restore it again"
        elif lazily:
            what = "open it with ship=, and the rest is fetched"
        super().__init__(f"{path} is not completely restored: {what}")
        self.path = path
        self.lazily = lazily
        self.follows = follows


class RepairIncomplete(KestrelError):
    """A repair of the queue of ``path`` (folder and name) was cut short: nobody opens the queue before it has ended.

    Repair it again: that finishes what was begun. Nothing more is lost.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"a repair of {path} was cut short: repair it again (kestrelpy repair), which finishes it")
        self.path = path


class RepairRefused(KestrelError):
    """The queue of ``path`` (folder and name) is damaged, and a repair here would be wrong. Nothing was changed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is not repaired: {reason}")
        self.path = path
        self.reason = reason


class QueueDiskFull(KestrelError, OSError):
    """There is no room on disk for what a call had to write; nothing was stored. Gets and commits still work. An
    ``OSError`` (ENOSPC).
    """

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOSPC, "no room on disk: nothing was stored", path)
        self.path = path


class DurabilityUnknown(KestrelError, OSError):
    """A sync failed: whether items ``first_id`` to ``last_id`` are on disk is unknown until the queue is reopened. No
    item is in doubt if ``last_id`` is below ``first_id``.

    The queue has failed: only ``close()`` still works. Source: rule R9 of docs/guarantees.md (the pages of a failed
    sync are marked clean, so a second sync that succeeds proves nothing).
    """

    def __init__(self, path: str, first_id: int, last_id: int, cause: OSError | None = None) -> None:
        number = cause.errno if cause is not None and cause.errno is not None else errno.EIO
        doubt = f"items {first_id} to {last_id} are in doubt" if first_id <= last_id else "no item is in doubt"
        why = f" ({cause.strerror})" if cause is not None and cause.strerror else ""
        text = f"a sync failed{why}; {doubt}, and only close() works until the queue is reopened"
        super().__init__(number, text, path)
        self.path = path
        self.first_id = first_id
        self.last_id = last_id


def copy_of(error: E) -> E:
    """Copy an error, with its facts and its cause, and with a traceback of its own: for an error that is kept, and that
    every later call raises.

    The same object must not be raised twice. Each time that it passes a frame, it keeps the frame alive, with all that
    the caller held there. Two threads that raise it write into each other's traceback. An error that can't be copied (a
    user's exception, say) is returned itself, without its traceback.
    """
    try:
        reduced = error.__reduce__()
        assert isinstance(reduced, tuple)
        again = reduced[0](*reduced[1])
        again.__dict__.update(reduced[2] if len(reduced) > 2 and reduced[2] else {})
    except Exception:
        again = None
    if type(again) is not type(error):
        return error.with_traceback(None)
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again
