"""The errors of shipping. Their texts name stores and objects; no secret, and no value of an option."""

from __future__ import annotations

import errno
from math import inf

from kestrelpy.errors import KestrelError

__all__ = [
    "BadStoreURL",
    "BatchRefused",
    "Fenced",
    "HistoryMismatch",
    "NoSuchQueue",
    "NotShipped",
    "NotTakenIn",
    "OwnerAlive",
    "RestoreTargetExists",
    "ShipError",
    "ShippingRequired",
    "StoreDamaged",
    "StoreTooWeak",
    "StoreUnavailable",
]


class ShipError(KestrelError):
    """The base of the errors of ``kestrelpy.ship``."""


class BadStoreURL(ShipError, ValueError):
    """A store's URL, or one of the options beside it, cannot be used. ``url``: what of it may be shown."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class StoreUnavailable(ShipError, OSError):
    """A request to a store failed, or was not answered in time. Whether it was carried out is not known.

    ``store``: as its ``describe()``. ``key``: of the object, or the prefix of a listing. ``reason``: the kind of error,
    with the server's status and code if there are any.
    """

    def __init__(self, store: str, key: str, reason: str) -> None:
        super().__init__(errno.EIO, reason, f"{store}: {key}")
        self.store = store
        self.key = key
        self.reason = reason


class StoreTooWeak(ShipError):
    """A store said of an object that was there that it had created it: nothing can be shipped to it in safety."""

    def __init__(self, store: str) -> None:
        super().__init__(f"{store} does not refuse to create an object that exists: a queue cannot be shipped there")
        self.store = store


class StoreDamaged(ShipError):
    """What is in a store is not what was put there: ``key``, ``offset`` in that object, ``reason``.

    ``last_good_slot``: up to this one the log is whole; 0 if that is not known.
    """

    def __init__(self, key: str, offset: int, reason: str, last_good_slot: int) -> None:
        super().__init__(f"{key}, offset {offset}: {reason}")
        self.key = key
        self.offset = offset
        self.reason = reason
        self.last_good_slot = last_good_slot


class HistoryMismatch(ShipError):
    """The queue here and the log in the store are not one history, so nothing was written. ``reason`` says why.

    ``local_id``, ``remote_id``: the last id here, and in the log.
    """

    def __init__(self, reason: str, local_id: int, remote_id: int) -> None:
        super().__init__(f"{reason} (the last id here is {local_id:,}, and in the store {remote_id:,})")
        self.reason = reason
        self.local_id = local_id
        self.remote_id = remote_id


class Fenced(ShipError):
    """Another owner has the queue now, and here it takes nothing any more. The items here from ``first_unshipped_id``
    to ``last_id`` are in no log; there are none if the first is above the last.

    ``epoch``, ``owner``: of the other one, as far as it is known.
    """

    def __init__(self, epoch: int, owner: str, first_unshipped_id: int, last_id: int) -> None:
        who = f"{owner!r}, in epoch {epoch}" if owner else f"the owner of epoch {epoch}"
        left = f"{first_unshipped_id:,} to {last_id:,}" if first_unshipped_id <= last_id else "none"
        super().__init__(f"the queue has another owner: {who}. Items here that are not in the store: {left}")
        self.epoch = epoch
        self.owner = owner
        self.first_unshipped_id = first_unshipped_id
        self.last_id = last_id


class NotShipped(ShipError, TimeoutError):
    """Items ``first_id`` to ``last_id`` are on this disk, and were not in the store in time. They are shipped when the
    store comes back, and readers see them then: do not put them again.

    If ``first_id`` is above ``last_id``, there are none. Then a put was refused, and nothing of it was stored: the
    queue's lease is about to run out, as the store does not answer, and another owner may take the queue over. Or
    everything was shipped before a ``close``, but the store did not answer any more when it should have said that the
    queue was handed over.
    """

    def __init__(self, first_id: int, last_id: int, *, hands_over: bool = False) -> None:
        said = f"items {first_id:,} to {last_id:,} are on disk here, and not in the store yet"
        if first_id > last_id:
            said = "nothing was put: the store does not answer, and another owner may take the queue over soon"
            if hands_over:
                said = (
                    "everything is in the store, but not that the queue was handed over: nobody takes it before "
                    "this owner's lease is over, or by force"
                )
        super().__init__(said)
        self.first_id = first_id
        self.last_id = last_id

    @classmethod
    def by_lease(cls, last_id: int) -> NotShipped:
        """Of a put that was refused when ``last_id`` was the last item."""
        return cls(last_id + 1, last_id)


class ShippingRequired(ShipError):
    """The queue in this folder is shipped to ``url``: open it with ``ship=``, or detach it with ``ship=False``."""

    def __init__(self, queue: str, url: str) -> None:
        super().__init__(f"queue {queue!r} is shipped to {url}: open it with ship=..., or with ship=False to detach it")
        self.queue = queue
        self.url = url


class NoSuchQueue(ShipError, LookupError):
    """A store has no queue of that name, or not as of the moment that was asked for.

    ``store``: as its ``describe()``. ``queue``: its name. ``reason``: what is not there. ``first_slot``, ``first_ms``:
    from which slot and which time on it can be restored; 0 if there is nothing.
    """

    def __init__(self, store: str, queue: str, reason: str, *, first_slot: int = 0, first_ms: int = 0) -> None:
        super().__init__(f"{store}, queue {queue!r}: {reason}")
        self.store = store
        self.queue = queue
        self.reason = reason
        self.first_slot = first_slot
        self.first_ms = first_ms


class RestoreTargetExists(ShipError, FileExistsError):
    """The folder of a restore, or of a standby, has files of a queue of that name, which nobody ships from there.
    Nothing was changed. ``path``: folder and name.
    """

    def __init__(self, path: str, reason: str = "a queue of this name is there: restore into another folder") -> None:
        super().__init__(errno.EEXIST, reason, path)
        self.path = path


class OwnerAlive(ShipError):
    """The queue has an owner whose lease is not over: another process may be using the queue. Nothing was written.

    ``owner``: what it is called. ``seconds``: until its lease is over, if it appends nothing more; infinite if it has
    no lease.
    """

    def __init__(self, owner: str, seconds: float) -> None:
        lease = "without a lease" if seconds == inf else "with a lease"
        when = "by force alone" if seconds == inf else f"in {seconds:.1f} s at the earliest"
        super().__init__(f"the queue has an owner {lease}, {owner!r}: it may be taken over {when}")
        self.owner = owner
        self.seconds = seconds


class BatchRefused(ShipError):
    """The owner of a queue could not take in a batch that was published in the store, and has passed over it: a part is
    missing or damaged, or an item is larger than the owner accepts. ``key``, ``number``: of the batch.
    """

    def __init__(self, key: str, number: int) -> None:
        super().__init__(f"{key}: the queue's owner has refused this batch; its log says why")
        self.key = key
        self.number = number


class NotTakenIn(ShipError, TimeoutError):
    """A batch is published, and was not taken in within ``seconds``. It will be: do not publish its items again.

    ``queue``, ``number``: of the batch in the store.
    """

    def __init__(self, queue: str, number: int, seconds: float) -> None:
        super().__init__(f"batch {number} of queue {queue!r} is published, and was not taken in within {seconds} s")
        self.queue = queue
        self.number = number
        self.seconds = seconds
