"""The calls of a process that does not own a queue: publish and discard parts, look into the inbox, ingest from it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from kestrelpy._disk.interface import Directory, Disk, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.format import LARGEST
from kestrelpy._journal.item_limit import limit_of
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.moves import is_move
from kestrelpy._journal.purpose import refuse_jobs, refuse_jobs_in
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, Recovery, write_mark
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.errors import ItemTooLarge
from kestrelpy.inbox.format import MAX_APP_ID_BYTES, BatchPart, LedgerState, Part, PublishedBatch, encode_batch_file
from kestrelpy.inbox.ingest import Ingest, last_number
from kestrelpy.inbox.ledger import read_batch, read_ledger
from kestrelpy.inbox.parts import PartFile, as_batch_part, open_inbox

MOST_PARTS = 500_000
VISITOR_SEGMENT_BYTES = 16 << 20


def publish(
    directory: StrPath,
    queue: str,
    parts: Iterable[Part],
    *,
    app_id: str | None = None,
    version: int = 0,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> bool:
    """Publish sealed parts as one batch, all of them or none. Returns True if the batch is new.

    When this returns, the batch is on disk as published, by this call or an earlier one. It will be ingested once, as a
    whole, in the order of the parts. ``False`` means that ``version`` of ``app_id``, or a later version, is published
    or was ingested already; then these parts are dropped, unless that batch is made of them. Versions of an ``app_id``
    (up to 500 bytes in UTF-8) must rise. The queue remembers the last version of each of the 10,000 app_ids used last.
    Without an ``app_id``, a batch is known by its parts alone, and is not remembered once it is ingested. A batch has
    at most 500,000 parts. A part belongs to one batch, once.

    A batch without items is remembered, too, if it has an ``app_id``. Any number of processes may call this at once,
    and may call it again after any kill or error.

    Raises ``CorruptJournal`` for a part that is not sealed; ``ItemTooLarge`` for a part with an item larger than the
    ``max_item_bytes`` of the queue's present or last owner; ``ValueError`` for a part of another queue, a part that is
    named twice or that another published batch names, and for a ``version`` without an ``app_id``; ``WrongKind`` for a
    work queue; ``InvalidName``; ``OSError`` (``FileNotFoundError`` for a part that is gone, as the parts of an ingested
    batch are); ``UnsupportedFormat`` if a newer version of kestrelpy has published or ingested here. With any of these
    errors nothing is published; but after an ``OSError`` of the last sync the batch may be: call this again.

    ``max_item_bytes`` is not known before the queue was opened once, and the next owner may set a lower one. A batch
    with an item that is too large then is kept aside as ``.refused``, and counted (``JournaledQueue.stats``,
    ``verify``).
    """
    file_names.check_name(queue)
    check_version(app_id, version)
    if version and app_id is None:
        raise ValueError(f"version={version} needs an app_id: give both, or neither")
    parts = list(parts)
    _check_parts(parts)
    named = tuple(as_batch_part(part, queue) for part in parts if part.items)
    if len(named) > MOST_PARTS:
        raise ValueError(f"a batch has at most {MOST_PARTS:,} parts, not {len(named):,}")
    _check_named_once(queue, named)
    sizes = [part.largest_bytes for part in parts if part.items]
    refuse_jobs_in(directory, queue, disk)
    if not named and app_id is None:
        return True
    with _publishing(directory, queue, disk) as folder:
        names = folder.names()
        batch_id = batch_id_of(named, app_id or "", version)
        there = _published(folder, queue, names)
        last = None if app_id is None else _last_version(folder, queue, app_id, there)
        is_there = any(batch.batch_id == batch_id for batch in there)
        if is_there or (last is not None and version <= last):
            folder.sync()  # the process that published it may have been killed before its own sync
            _remove(folder, queue, named, there)
            return False
        _check_free(queue, named, there)
        limit = None if is_move(app_id or "") else limit_of(directory, queue, disk)
        for part, largest in zip(named, sizes, strict=True):
            _check_part(folder, queue, part, largest, limit)
        folder.sync()  # the names of the parts are durable before a batch names them
        clock = clock if clock is not None else SystemClock()
        number = max(clock.time_ns() // 1_000_000, last_number(names, queue) + 1)
        batch = PublishedBatch(batch_id, number, app_id or "", version, named)
        replace_file(folder, file_names.batch_name(queue, number), encode_batch_file(batch))
    return True


def discard(directory: StrPath, queue: str, parts: Iterable[Part], *, disk: Disk | None = None) -> None:
    """Remove parts that will not be published. Parts of a published batch stay. A part that is gone is no error.

    If parts are neither published nor discarded, the queue's owner removes them, a day later. Raises ``OSError``,
    ``InvalidName``, ``UnsupportedFormat``, ``ValueError`` for a part of another queue.
    """
    file_names.check_name(queue)
    named = tuple(as_batch_part(part, queue) for part in parts if part.items)
    if named:
        with _publishing(directory, queue, disk) as folder:
            _remove(folder, queue, named, _published(folder, queue, folder.names()))


def last_version(directory: StrPath, queue: str, app_id: str, *, disk: Disk | None = None) -> int | None:
    """The last version of ``app_id`` that is published or was ingested; ``None`` if none is known. It is on disk.

    Raises ``InvalidName``, ``ValueError``, ``UnsupportedFormat``, ``OSError``. Cost: O(published batches).
    """
    file_names.check_name(queue)
    check_version(app_id, 0)
    with _looking(directory, disk) as folder:
        if folder is None:
            return None
        found = _last_version(folder, queue, app_id, _published(folder, queue, folder.names()))
        if found is not None:
            folder.sync()
        return found


def pending(directory: StrPath, queue: str, *, disk: Disk | None = None) -> int:
    """The number of batches that are published and not ingested yet. Raises ``InvalidName``, ``OSError``."""
    file_names.check_name(queue)
    with _looking(directory, disk) as folder:
        return 0 if folder is None else len(file_names.batches_among(folder.names(), queue))


def pending_queues(directory: StrPath, *, disk: Disk | None = None) -> dict[str, int]:
    """``pending`` of all queues for which something waits, by name, in the order of names. A queue need not exist: that
    nobody has ever opened it, or that the name has a slip in it, is seen here. Raises ``OSError``. Cost: O(files).
    """
    with _looking(directory, disk) as folder:
        names = [] if folder is None else folder.names()
    found = (file_names.parse_inbox(name) for name in names if name.endswith(".batch"))
    return dict(sorted(Counter(about.queue for about in found if about is not None).items()))


def take_in(directory: StrPath, queue: str, *, disk: Disk | None = None, clock: Clock | None = None) -> int:
    """Ingest the published batches of a queue that nobody has open; returns the number of items.

    The queue is created if need be, but not if nothing is published. Each batch is ingested once and as a whole, in the
    order of publishing, as by ``JournaledQueue.take_in``. But this call does not know the owner's options. So no limit
    of a reader, and no ``max_item_bytes``, keeps a batch out. No segment is retired, archived or deleted, and no
    checkpoint of a reader is touched. Until this returns, opening the queue raises ``QueueLocked``.

    Raises ``QueueLocked`` if a process has the queue open (which ingests by itself); ``WrongKind`` for a work queue;
    ``InvalidName``, ``CorruptJournal``, ``UnsupportedFormat``, ``OSError`` (``QueueDiskFull``, ``DurabilityUnknown``).
    """
    file_names.check_name(queue)
    if not _may_have_work(directory, queue, disk):
        return 0
    folder = (disk or RealDisk()).directory(os.fspath(directory), create=True)
    try:
        refuse_jobs(folder, queue)
        files = QueueFiles(folder, queue)
        lock, names = files.lock()
        try:
            refuse_jobs(folder, queue, names)
            with _looking(directory, disk) as inbox:
                if inbox is None or not _has_work(inbox, queue):
                    return 0
                return _OwnerlessHost(files, names, clock if clock is not None else SystemClock()).take_in(inbox)
        finally:
            lock.release()
    finally:
        folder.close()


class _OwnerlessHost:
    """A queue opened only to ingest: its journal, without readers. A ``Host``."""

    max_item_bytes: int | None = None

    def __init__(self, files: QueueFiles, names: list[str], clock: Clock) -> None:
        files.remove_leftovers(names)
        self._files = files
        self._clock = clock
        self._is_shipped = file_names.ship_name(files.queue) in names
        self._found = Recovery(files.directory, files.queue, files.load_all(names), quarantine=False).run(names)
        self.journal = Journal(
            files.directory,
            files.queue,
            self._found,
            segment_bytes=VISITOR_SEGMENT_BYTES,
            randomness=os.urandom,
        )

    def take_in(self, inbox: Directory) -> int:
        try:
            ingest = Ingest(inbox, self._files.queue, self)
            ingest.open(quarantine=False)
            taken = ingest.run()
            self.journal.rotate()
        finally:
            self.journal.abandon()
        if self.journal.tail_id != self._found.tail_id:
            mark = Recovered(queue_id=self.journal.queue_id, tail_id=self.journal.tail_id)
            write_mark(self._files.directory, self._files.queue, mark, self.journal.durable_id)
        return taken

    def lock(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000

    def has_room_locked(self, batch: PublishedBatch) -> bool:  # noqa: ARG002 - limits are the owner's
        return True

    def sync_locked(self) -> None:
        file, tail_id = self.journal.sync_target()
        if file is not None and self.journal.durable_id < tail_id:
            try:
                self.journal.sync(file)
            except OSError as cause:
                raise self.journal.fail(cause) from cause
        self.journal.durable_id = max(self.journal.durable_id, tail_id)

    def hide_from_locked(self, first_id: int) -> None:
        """Does nothing: there are no readers."""

    def publish_locked(self) -> None:
        """Does nothing: there are no readers."""

    def items(self) -> int:
        return self.journal.tail_id - self.journal.missing

    def copied_items(self) -> int | None:
        return 0 if self._is_shipped else None  # how many, its next owner knows

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        """Nobody copies a queue that nobody has open."""

    def refuse_locked(self, error: Exception) -> None:
        """Does nothing: there are no puts."""


def check_version(app_id: str | None, version: int) -> None:
    if app_id is not None and not (isinstance(app_id, str) and 0 < len(app_id.encode()) <= MAX_APP_ID_BYTES):
        raise ValueError(f"app_id must be a str of 1 to {MAX_APP_ID_BYTES} bytes, not {app_id!r}")
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= LARGEST:
        raise ValueError(f"version must be an int and not negative, not {version!r}")


def _check_part(folder: Directory, queue: str, part: BatchPart, largest: int | None, limit: int | None) -> None:
    """Raise if the part is not sealed, or has an item that is larger than ``limit``.

    ``largest``: the size of the largest item, by the part's writer; if that is ``None``, the part is read.
    """
    file = PartFile(folder, queue, part)
    try:
        file.check_sealed()
        if limit is not None and part.data_bytes > limit:
            largest = file.largest() if largest is None else largest
            if largest > limit:
                raise ItemTooLarge(largest, limit)
    finally:
        file.close()


def _check_parts(parts: list[Part]) -> None:
    for part in parts:
        if not isinstance(part, Part):
            raise TypeError(f"a part is what PartWriter.seal() returns, not {part!r}")


def _check_named_once(queue: str, named: tuple[BatchPart, ...]) -> None:
    """Raise ``ValueError`` for a part that is named twice: it would be ingested twice."""
    seen: set[bytes] = set()
    for part in named:
        if part.part_id in seen:
            raise ValueError(f"part {file_names.part_name(queue, part.part_id)} is named twice")
        seen.add(part.part_id)


def _check_free(queue: str, named: tuple[BatchPart, ...], there: list[PublishedBatch]) -> None:
    """Raise ``ValueError`` for a part that a published batch names.

    The ingest of that batch deletes the part, so a second batch with the part could never be ingested.
    """
    owners = {part.part_id: batch.number for batch in there for part in batch.parts}
    for part in named:
        if part.part_id in owners:
            name, other = file_names.part_name(queue, part.part_id), file_names.batch_name(queue, owners[part.part_id])
            raise ValueError(f"part {name} belongs to {other}, which is published: a part is published once")


@contextlib.contextmanager
def _publishing(directory: StrPath, queue: str, disk: Disk | None) -> Iterator[Directory]:
    """The inbox, made if it is missing. No other process publishes for this queue during the block."""
    folder = open_inbox(os.fspath(directory), disk, create=True)
    try:
        lock = folder.lock(file_names.lock_name(queue), wait=True)
        try:
            yield folder
        finally:
            lock.release()
    finally:
        folder.close()


@contextlib.contextmanager
def _looking(directory: StrPath, disk: Disk | None) -> Iterator[Directory | None]:
    """The inbox, if there is one."""
    try:
        folder = open_inbox(os.fspath(directory), disk, create=False)
    except FileNotFoundError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.close()


def _may_have_work(directory: StrPath, queue: str, disk: Disk | None) -> bool:
    """True if something is published, or the queue exists. Takes no lock, as a lock file would create the queue."""
    with _looking(directory, disk) as inbox:
        if inbox is not None and _has_work(inbox, queue):
            return True
    try:
        folder = (disk or RealDisk()).directory(os.fspath(directory))
    except FileNotFoundError:
        return False
    try:
        return bool(file_names.of_queue(folder.names(), queue))
    finally:
        folder.close()


def _has_work(inbox: Directory, queue: str) -> bool:
    """True if a batch is published, or the ingest of one was begun."""
    return bool(file_names.batches_among(inbox.names(), queue)) or read_ledger(inbox, queue)[0].intent is not None


def _published(folder: Directory, queue: str, names: list[str]) -> list[PublishedBatch]:
    """The batches that are published and not ingested yet, except damaged ones.

    Raises ``UnsupportedFormat``, ``OSError``.
    """
    found = (read_batch(folder, name) for _, name in file_names.batches_among(names, queue))
    return [batch for batch in found if batch is not None]


def _last_version(folder: Directory, queue: str, app_id: str, there: list[PublishedBatch]) -> int | None:
    """The last version of ``app_id``, by the ledger and by ``there``, the published batches.

    ``there`` must be read before this call reads the ledger: a batch is deleted only after the ledger has it.
    """
    known = read_ledger(folder, queue)[0].versions.get(app_id)
    found = [batch.version for batch in there if batch.app_id == app_id]
    return max([*found, *([] if known is None else [known])], default=None)


def batch_id_of(parts: tuple[BatchPart, ...], app_id: str, version: int) -> bytes:
    """The id of a batch is a hash of its content: the same batch, published again, has the same id."""
    from hashlib import blake2b  # imported here: a program that does not publish must not pay for it

    whole = blake2b(digest_size=16)
    for part in parts:
        whole.update(part.part_id)
    whole.update(f"{version} {app_id}".encode())
    return whole.digest()


def _remove(folder: Directory, queue: str, parts: tuple[BatchPart, ...], there: list[PublishedBatch]) -> None:
    """Remove the parts that no published batch names."""
    named = {part.part_id for batch in there for part in batch.parts}
    for part in parts:
        if part.part_id not in named:
            with contextlib.suppress(FileNotFoundError):
                folder.unlink(file_names.part_name(queue, part.part_id))
