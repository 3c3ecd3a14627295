"""A queue whose closed segments come from the store when somebody reads them: ``restore(..., lazy=True)``.

Rules:
1. The file of a segment that is not here yet has its header, its footer, and a hole in between. ``jobs.lazy`` lists
   these segments. It is there durably before the queue can be opened, and until the last one is whole.
2. While it is there, only the owner opens the queue, through a ``LazyFolder``, which hides it. To everybody else it is
   a restore that has not ended. A program that does not know the file finds zeros in a closed segment: damage, and
   never a gap that nobody notices.
3. A segment is whole when all of it was fetched, has the crc that its SEAL says, and is synced. Then the list is
   replaced by one without it. Cut short at any place, it is fetched again.
4. Whoever reads a segment that is not whole waits for it. A thread fetches the others meanwhile, those after the last
   one that was read first. For a work queue all are fetched before it is open: it reads its records as others do.

docs/format.md is the specification of ``jobs.lazy``:  | KSTRLLZY | 1 2 | 0 6 | crc 4 | length 4 | segments |, each as
in a SEAL.

NOTE ON LOCKING: the lock of a segment is held while it is fetched, and the list's while that is replaced. A reader may
hold its own lock (R in docs/locking.md); nobody who has one of these takes any other but them, in this order.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, cast

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_ROOM, Directory, File, Lock
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.file_names import lazy_name, lock_name, segment_name
from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.errors import CorruptJournal, QueueDiskFull
from kestrelpy.ship.errors import StoreDamaged, StoreUnavailable
from kestrelpy.ship.framed import FramedFormat
from kestrelpy.ship.manifest import MAX_MANIFEST_BYTES
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.slots import SealedSegment, decode_sealed, encode_sealed
from kestrelpy.ship.store import Store

LAZY_MAGIC = b"KSTRLLZY"
LAZY_VERSION = 1
RETRY_SECONDS = 5.0
"""So long the thread waits after a fetch that has failed."""
CLOSE_SECONDS = 15.0
"""So long a close waits for a request that is under way."""
_FORMAT = FramedFormat(LAZY_MAGIC, LAZY_VERSION, MAX_MANIFEST_BYTES)  # a manifest names all of these segments, too


def encode_lazy(segments: list[SealedSegment]) -> bytes:
    """The whole file."""
    return _FORMAT.encode(b"".join(map(encode_sealed, segments)))


def decode_lazy(data: bytes) -> list[SealedSegment] | None:
    """The segments that are not here; ``None`` unless ``data`` is exactly one list of this version."""
    body = _FORMAT.body_of(data)
    if body is None:
        return None
    found: list[SealedSegment] = []
    at = 0
    while at < len(body):
        each = decode_sealed(body, at)
        if each is None:
            return None
        found.append(each[0])
        at = each[1]
    return found


def read_lazy(folder: Directory, queue: str) -> list[SealedSegment] | None:
    """The segments of ``queue`` that are not here; ``None`` if there is no such list. Raises ``CorruptJournal``,
    ``UnsupportedFormat`` and ``OSError``.
    """
    name = lazy_name(queue)
    data = _FORMAT.read(folder, name)
    if data is None:
        return None
    found = decode_lazy(data)
    if found is None:
        raise CorruptJournal(f"{folder.path}/{name}", 0, "it does not say which segments are not here: restore again")
    return found


def write_lazy(folder: Directory, queue: str, segments: list[SealedSegment]) -> None:
    """Replace the list, or remove it if it would be empty. It is durable when this returns. Raises ``OSError``."""
    if segments:
        replace_file(folder, lazy_name(queue), encode_lazy(segments))
        return
    folder.unlink(lazy_name(queue))
    folder.sync()


def drop_missing(folder: Directory, queue: str) -> set[int]:
    """Remove the files of the segments that are not here, and then the list. Returns their numbers. May be repeated.
    Raises as ``read_lazy``.
    """
    segments = read_lazy(folder, queue) or []
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):
            folder.unlink(segment_name(queue, segment.number))
    folder.sync()
    write_lazy(folder, queue, [])
    return {segment.number for segment in segments}


def may_be_lazy(segment: SealedSegment) -> bool:
    """Whether the file of a segment can be made without its frames. One whose header was damaged is fetched at once."""
    return segment.segment_header() is not None and segment.file_bytes > fmt.HEADER_BYTES + fmt.FOOTER_BYTES


def write_outline(folder: Directory, queue: str, segment: SealedSegment) -> None:
    """Make the file of a segment with a hole in place of its frames. Raises ``OSError``."""
    file = folder.create(segment_name(queue, segment.number))
    try:
        file.write(0, segment.header)
        file.write(segment.file_bytes - fmt.FOOTER_BYTES, segment.footer)
        file.sync()
    finally:
        file.close()


class _Missing:
    """A segment that is not here. ``lock``: held while it is fetched. ``is_missing``: guarded by it."""

    def __init__(self, segment: SealedSegment) -> None:
        self.segment = segment
        self.lock = threading.Lock()
        self.is_missing = True


class LazyFolder:
    """A folder whose queue is not completely here: a ``Directory`` for the owner of that queue. ``inner``: the folder
    itself; it is closed with this one. ``at_once``: all is fetched when the queue is locked.

    What it does not have itself is the folder's own. Raises as the folder, and ``StoreUnavailable``, ``StoreDamaged``
    and ``QueueDiskFull`` where a segment has to be fetched.
    """

    def __init__(
        self, inner: Directory, queue: str, segments: list[SealedSegment], store: Store, *, at_once: bool
    ) -> None:
        self._inner = inner
        self._queue = queue
        self._at_once = at_once
        self._shipped = ShippedQueue(store, queue)
        self._listing = threading.Lock()
        self._missing = self._named(segments)
        """By name, in order. Once the queue is locked, entries are removed under ``_listing``, and never added."""
        self._asked = ""
        self._is_closed = False
        self._bell = ThreadWaiter()
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _named(self, segments: list[SealedSegment]) -> dict[str, _Missing]:
        return {segment_name(self._queue, each.number): _Missing(each) for each in segments}

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """As of the folder. With the queue's lock in hand, the rest is fetched, now or ahead. Raises as ``read_lazy``,
        too.
        """
        lock = self._inner.lock(name, wait=wait)
        if name != lock_name(self._queue):
            return lock
        try:  # until now the queue may have had another owner, who fetched and retired segments
            self._missing = self._named(read_lazy(self._inner, self._queue) or [])
            if self._at_once:
                self._fetch_all()
            elif self._missing:
                self._start()
        except BaseException:
            lock.release()
            raise
        return lock

    def _fetch_all(self) -> None:
        while self.fetch_next():
            pass

    def _start(self) -> None:
        """Begin to fetch ahead. If no thread can be started, segments are fetched when they are read."""
        thread = threading.Thread(
            target=_fetch_ahead,
            args=(weakref.ref(self), self._bell),
            name=f"kestrelpy-fetch-{self._queue}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def names(self) -> list[str]:
        mine = lazy_name(self._queue)
        return [name for name in self._inner.names() if name != mine]

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> File:
        missing = self._missing.get(name)
        if missing is None:
            return self._inner.open(name, write=write, linked=linked)
        if write:
            self.fetch(name)
        return cast(File, _LazyFile(self._inner.open(name, write=write, linked=linked), self, name, missing.segment))

    def rename(self, old: str, new: str) -> None:
        self.fetch(old)
        self._inner.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        self.fetch(one)
        self.fetch(other)
        self._inner.exchange(one, other)

    def link(self, old: str, new: str) -> None:
        self.fetch(old)
        self._inner.link(old, new)

    def move(self, name: str, target: Directory, new: str) -> None:
        self.fetch(name)
        self._inner.move(name, target, new)

    def unlink(self, name: str) -> None:
        missing = self._missing.get(name)
        if missing is None:
            self._inner.unlink(name)
            return
        with missing.lock:
            self._inner.unlink(name)
            missing.is_missing = False
        self._forget(name)

    def close(self) -> None:
        self._is_closed = True
        self._shipped.store.stop()
        self._bell.give(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._inner.close()

    # -- fetching ----------------------------------------------------------------------------------------------------

    def fetch(self, name: str, *, ahead: bool = False) -> None:
        """Return when that file is whole. Other files than those of missing segments are. ``ahead``: nobody waits."""
        missing = self._missing.get(name)
        if missing is None:
            return
        if not ahead:
            self._asked = name
        with missing.lock:
            if missing.is_missing:
                self._fetch(name, missing.segment)
                missing.is_missing = False
        self._forget(name)

    def _fetch(self, name: str, segment: SealedSegment) -> None:
        """Fill the hole. Header and footer are not written again: a power cut may leave half of a write."""
        file = self._inner.open(name, write=True)
        try:
            at, end = 0, segment.file_bytes - fmt.FOOTER_BYTES
            for part in self._shipped.segment_parts(segment):
                first, last = max(at, fmt.HEADER_BYTES), min(at + len(part), end)
                if first < last:
                    file.write(first, part[first - at : last - at])
                at += len(part)
            file.sync()
        except OSError as error:
            if error.errno in NO_ROOM:
                raise QueueDiskFull(self._inner.path) from error
            raise
        finally:
            file.close()

    def _forget(self, name: str) -> None:
        """The file is whole, or gone: the list does not name it any more."""
        with self._listing:
            if self._missing.pop(name, None) is not None:
                write_lazy(self._inner, self._queue, [each.segment for each in self._missing.values()])

    def fetch_next(self) -> bool:
        """Fetch the first segment after the one that was read last. Returns whether there is more to do."""
        waiting = list(self._missing)
        name = next((each for each in waiting if each > self._asked), next(iter(waiting), None))
        if name is None or self._is_closed:
            return False
        self.fetch(name, ahead=True)
        return True


def _fetch_ahead(folder_of: weakref.ref[LazyFolder], bell: ThreadWaiter) -> None:
    """Fetch all that is missing, until the folder is closed, or is gone."""
    trouble = _logging.Trouble()
    while True:
        folder = folder_of()
        if folder is None or folder._is_closed:
            return
        what = f"fetching what queue {folder._queue} has in its store"
        try:
            goes_on = folder.fetch_next()
            trouble.end(what)
        except (StoreUnavailable, StoreDamaged, OSError) as error:
            trouble.begin(what, error)
            del folder
            bell.wait(RETRY_SECONDS)
            continue
        if not goes_on:
            return


class _LazyFile:
    """A file of a segment that may be missing: a ``File`` that is only read."""

    def __init__(self, inner: File, folder: LazyFolder, name: str, segment: SealedSegment) -> None:
        self._inner = inner
        self._folder = folder
        self._name = name
        self._footer_at = segment.file_bytes - fmt.FOOTER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, offset: int, size: int) -> bytes:
        """As of a ``File``; what is neither header nor footer is fetched first."""
        if offset + size > fmt.HEADER_BYTES and offset < self._footer_at:
            self._folder.fetch(self._name)
        return self._inner.read(offset, size)
