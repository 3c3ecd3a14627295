"""Publishing to a queue in its store: parts that were uploaded become a batch, which the queue's owner takes in once.

Rules:
1. Batches are numbered without a gap, and whoever creates ``in/<n>.batch`` has published batch n. The first n that may
   be free is the one after the last that was taken in, by the log; from there on it is read, not listed.
2. If n exists and is ours, or has our app_id and our version or a later one, it is published already; else n + 1. So a
   publisher who comes back after a kill or a lost answer publishes nothing twice.
3. Batches that were taken in are deleted one day. Who has slept for so long may create one in the hole. So the log is
   read once more after the create: if it says that n was taken in, and does not know our batch, n was another one's.
4. What is published is complete by itself: a publisher may die at once.

``publish_steps`` and ``wait_steps`` are generators of requests, as in ``log``: a test stops them at each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from kestrelpy._checks import check_seconds
from kestrelpy._journal.file_names import check_name
from kestrelpy.clock import SystemClock
from kestrelpy.errors import UnsupportedFormat, WrongKind
from kestrelpy.inbox.format import BatchPart, LedgerState, PublishedBatch
from kestrelpy.inbox.publishing import MOST_PARTS, batch_id_of, check_version
from kestrelpy.ship import in_objects
from kestrelpy.ship.errors import BatchRefused, NoSuchQueue, NotTakenIn, StoreDamaged, StoreUnavailable
from kestrelpy.ship.log import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Create,
    Pause,
    Read,
    Steps,
    carry_out,
    read_end_surely,
    read_on,
)
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.opened import pause
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.reading import PatientStore, ShippedQueue
from kestrelpy.ship.store import Store

T = TypeVar("T")
__all__ = ["publish"]

PUBLISH_SECONDS = 60.0
"""For so long a publisher asks a store that does not answer."""
LOOK_SECONDS = 0.25
"""Seconds between two looks at the log, of one who waits until his batch is taken in."""


class Publication(NamedTuple):
    """A batch that is published. ``number``: in the store; 0 if the log knew it before. ``is_new``: by this call.
    ``state``: what the log added up to.
    """

    number: int
    is_new: bool
    state: LogState


def publish(
    store: str | Store | Any,
    queue: str,
    parts: Iterable[BatchPart],
    *,
    app_id: str | None = None,
    version: int = 0,
    wait: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Publish parts that were uploaded (``PartUploader``) as one batch, all of them or none. Returns True if it is new.

    ``store``, ``options``: as for ``open_store``. When this returns, the batch is in the store, and the owner of the
    queue takes it in once, as a whole, in the order of the parts. ``False`` means that ``version`` of ``app_id``, or a
    later version, is published or was taken in already; then these parts are dropped. The queue remembers the last
    version of each of the 10,000 app_ids used last. Without an ``app_id`` a batch is known by its parts alone, and is
    remembered for the owner's ``history``, and among the last 10,000. Any number of processes may call this at once,
    and may call it again after any kill or error, if their parts are younger than a day: older ones that no batch names
    are deleted. A part belongs to one batch.

    ``wait``: seconds to wait until the log says that it was taken in.

    Raises ``BatchRefused`` while it waits, if the owner could not take it in, and ``NotTakenIn`` if that was too short;
    the batch stays published. Raises ``NoSuchQueue`` if nothing of the queue was ever shipped there, ``WrongKind`` for
    a work queue, ``ValueError``, ``InvalidName``, ``BadStoreURL``, ``StoreDamaged``, ``UnsupportedFormat``, and
    ``StoreUnavailable``: then it is published, or not, or will be: call this again. Cost: the slots after the newest
    manifest, and four requests.
    """
    check_name(queue)
    check_version(app_id, version)
    check_seconds("wait", wait)
    if version and app_id is None:
        raise ValueError(f"version={version} needs an app_id: give both, or neither")
    named = tuple(part for part in parts if part.items)
    if len(named) > MOST_PARTS or len({part.part_id for part in named}) < len(named):
        raise ValueError(f"a batch has at most {MOST_PARTS:,} parts, and each of them once")
    if not named and app_id is None:
        return True
    shipped = ShippedQueue(open_store(store, options=options), queue)
    identity = shipped.identity()
    if identity is None:
        raise NoSuchQueue(shipped.store.describe(), queue, "its owner has shipped nothing there yet")
    if identity.of_jobs:
        raise WrongKind(f"{shipped.store.describe()}/{queue}", "work queue")
    batch = PublishedBatch(batch_id_of(named, app_id or "", version), 1, app_id or "", version, named)
    away = StoreUnavailable(shipped.store.describe(), f"{shipped.prefix}in/", "whether it is published is not known")
    done = _carry_out(publish_steps(shipped.prefix, batch), shipped.store, PUBLISH_SECONDS, away)
    if wait and done.number:
        _carry_out(wait_steps(shipped.prefix, batch, done), shipped.store, wait, NotTakenIn(queue, done.number, wait))
    return done.is_new


def _carry_out(steps: Steps[T], store: PatientStore, seconds: float, otherwise: Exception) -> T:
    """Carry out the steps. Raises ``otherwise`` if their pauses are longer than so many seconds."""
    deadline = SystemClock.monotonic() + seconds

    def wait(pause_seconds: float) -> None:
        if SystemClock.monotonic() + pause_seconds > deadline:
            raise otherwise
        pause(pause_seconds)

    return carry_out(steps, store, wait)


# -- without I/O -----------------------------------------------------------------------------------------------------


def taken_in(state: LogState) -> int:
    """The number of the last batch that was taken in, by the log."""
    return state.ledger.taken if state.ledger is not None else 0


def _ledger(state: LogState) -> LedgerState:
    return state.ledger.state() if state.ledger is not None else LedgerState()


def _is_settled(state: LogState, batch: PublishedBatch, number: int) -> bool:
    """Whether the log knows what became of our batch, if that was the one of that number."""
    ledger = _ledger(state)
    return ledger.knows(batch) or ledger.has_refused(number, batch.batch_id)


def publish_steps(prefix: str, batch: PublishedBatch) -> Steps[Publication]:
    """Publish a batch, whatever its ``number`` says. Raises as ``publish``, and what the caller's pause raises."""
    state = yield from read_end_surely(prefix)
    if _ledger(state).knows(batch):
        return Publication(0, False, state)
    number = taken_in(state) + 1
    while True:
        is_new = yield from _claim(prefix, batch._replace(number=number))
        if is_new is not None:
            state = yield from read_end_surely(prefix, state)
            if taken_in(state) < number or _is_settled(state, batch, number):
                return Publication(number, is_new, state)
            number = max(number, taken_in(state))  # it stands in a hole: that number was another batch's
        number += 1


def _claim(prefix: str, batch: PublishedBatch) -> Steps[bool | None]:
    """Create a batch under its number. Returns True if it was created, False if it or a later version of its app_id was
    there, and ``None`` if the number is another one's.
    """
    look, data = in_objects.read_of_batch(prefix, batch.number), in_objects.encode_batch(batch)
    there: bytes | None = yield look
    if there is None:
        return (yield from _create(look, data, batch))
    return _judge(look.key, there, batch)


def _create(look: Read, data: bytes, batch: PublishedBatch) -> Steps[bool | None]:
    seconds = FIRST_PAUSE
    while True:
        try:
            if (yield Create(look.key, data)):
                return True
            there: bytes | None = yield look
        except StoreUnavailable:
            there = yield from _read_in_doubt(look)
        if there is not None:
            return True if there == data else _judge(look.key, there, batch)
        yield Pause(seconds)
        seconds = min(2 * seconds, LONGEST_PAUSE)


def _read_in_doubt(look: Read) -> Steps[bytes | None]:
    try:
        there: bytes | None = yield look
    except StoreUnavailable:
        return None
    return there


def _judge(key: str, data: bytes, batch: PublishedBatch) -> bool | None:
    """Whose batch it is that is there: False for ours, ``None`` for another one. A damaged one is another one's."""
    try:
        there = in_objects.decode_batch(key, batch.number, data)
    except (StoreDamaged, UnsupportedFormat):
        return None
    if there.batch_id == batch.batch_id:
        return False
    is_later = bool(batch.app_id) and there.app_id == batch.app_id and there.version >= batch.version
    return False if is_later else None


def wait_steps(prefix: str, batch: PublishedBatch, done: Publication) -> Steps[None]:
    """Read the log on until it says that the batch was taken in. Raises ``BatchRefused``."""
    state = done.state
    while taken_in(state) < done.number:
        yield Pause(LOOK_SECONDS)
        state = yield from read_on(prefix, state)
    if _ledger(state).has_refused(done.number, batch.batch_id):
        raise BatchRefused(prefix + in_objects.batch_key(done.number), done.number)
