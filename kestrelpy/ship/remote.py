"""What a store has of a queue: ``queues``, ``status``, and ``verify``, which reads every byte. Nothing is changed.

They may run while the owner ships. Keys that are none of a queue's are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kestrelpy._journal.file_names import check_name, is_name
from kestrelpy._value import ReadOnlyDict, Value
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.reading import PatientStore, ShippedQueue, has_all
from kestrelpy.ship.remote_check import RemoteCheck, RemoteReport
from kestrelpy.ship.slots import CLOSE
from kestrelpy.ship.store import Store

__all__ = ["RemoteReport", "RemoteStatus", "queues", "status", "verify"]

_KNOWN = re.compile(r"([^/]+)/(?:queue\.json|log/[0-9]{16})")


class RemoteStatus(Value, kw_only=True):
    """The log of a queue. ``queue_id``: 32 hex digits. ``slot``, ``epoch``, ``written_ms``: of the last slot, and when
    it was written, by its owner's clock. ``owner``: what the owner of that epoch is called; ``lease``: its seconds, or
    ``None``. ``closed``: whether the owner has left. ``first_ms``: from when on the queue can be restored.
    ``segments``: how many are named. ``slots``: how many are there. ``bytes``: of all objects. ``readers``: the head of
    each reader, that is, the last id up to which all are done. ``fences``: the slots at which the epochs began.
    """

    queue_id: str
    slot: int
    epoch: int
    owner: str
    lease: float | None
    closed: bool
    last_id: int
    written_ms: int
    first_ms: int
    segments: int
    slots: int
    bytes: int
    readers: ReadOnlyDict[str, int]
    fences: tuple[int, ...]


def queues(store: str | Store | Any, *, options: Mapping[str, Any] | None = None) -> list[str]:
    """The names of the queues in ``store``, sorted. ``store``, ``options``: as for ``open_store``.

    Raises ``StoreUnavailable``, ``BadStoreURL``. Cost: a listing of the whole store.
    """
    listing = PatientStore(open_store(store, options=options)).list("")
    found = (_KNOWN.fullmatch(each.key) for each in listing)
    return sorted({match[1] for match in found if match is not None and is_name(match[1])})


def status(store: str | Store | Any, queue: str, *, options: Mapping[str, Any] | None = None) -> RemoteStatus:
    """Where the log of ``queue`` in ``store`` ends, and what is there. ``store``, ``options``: as for ``open_store``.

    Raises ``NoSuchQueue``, ``StoreDamaged``, ``UnsupportedFormat``, ``StoreUnavailable``, ``BadStoreURL``,
    ``InvalidName``. Cost: the slots after the newest manifest, and a listing of the queue.
    """
    check_name(queue)
    shipped = ShippedQueue(open_store(store, options=options), queue)
    state = shipped.at_end()
    at = state.header
    assert at is not None
    listing = shipped.store.list(shipped.prefix)
    there, known = shipped.slots(), shipped.manifests()
    is_all_there = not known or has_all(there, known[0])
    return RemoteStatus(
        queue_id=at.queue_id.hex(),
        slot=at.slot,
        epoch=at.epoch,
        owner=shipped.fence(state, at.epoch).owner,
        lease=at.lease_ms / 1000 if at.lease_ms else None,
        closed=at.kind == CLOSE,
        last_id=at.last_id,
        written_ms=at.written_ms,
        first_ms=shipped.slot_there(1).header.written_ms if is_all_there else shipped.written_ms(known[0]),
        segments=len(state.segments),
        slots=len(there),
        bytes=sum(each.size_bytes for each in listing),
        readers=ReadOnlyDict({name: state.checkpoints[name].head for name in sorted(state.checkpoints)}),
        fences=tuple(state.fences),
    )


def verify(
    store: str | Store | Any,
    queue: str,
    *,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> RemoteReport:
    """Read everything that ``store`` has of ``queue``, and check each byte. ``store``, ``options``: as for
    ``open_store``.

    Every slot is there and follows the one before. Every manifest is what the slots up to it add up to, as far as they
    are there. Every segment that is named is there, whole, with each of its items. Of the inbox (``in/``), every batch
    is there, with its parts, each whole. ``progress(done_bytes, total_bytes)`` is called now and then. Memory: one
    slot, one part, and 32 MiB.

    Damage is reported, not raised. Raises ``NoSuchQueue``, ``UnsupportedFormat``, ``StoreUnavailable``,
    ``BadStoreURL``, ``InvalidName``.
    """
    check_name(queue)
    shipped = ShippedQueue(open_store(store, options=options), queue)
    check = RemoteCheck(shipped, progress)
    report = check.run()
    while not report.ok and shipped.manifests()[:1] != check.known[:1]:  # garbage was collected meanwhile
        check = RemoteCheck(shipped, progress)
        report = check.run()
    return report
