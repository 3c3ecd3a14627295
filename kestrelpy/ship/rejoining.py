"""What an owner that was taken over had not shipped: it is set aside, and named. ``rejoin`` and ``orphans``.

Rules:
1. Nothing is merged into the log, and nothing is deleted. Whole segments are set aside, from the first one with an item
   that is not in the log: that one is copied, as it has shipped items, too; the others are moved, the newest first.
2. ``jobs.orphans`` lists the folders. An entry is there, durably, before the first segment goes into its folder, and
   has its folder's name: so what was interrupted goes on, and a second orphan of an epoch gets a folder of its own.
3. The step that ends it is ``jobs.standby``: from then on the files here count as those of the log, and are cut back to
   it. It comes after everything is on disk in the folder. ``jobs.restore`` comes just before: till the files are those
   of the log, nobody opens them.
4. An owner whose epoch is the log's last one has nothing to set aside: what it has not shipped it ships when it is
   opened.

NOTE ON LOCKING: none of its own; the caller has the queue's lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.segment import iterate_frames, read_footer, read_header
from kestrelpy._journal.small_files import read_small
from kestrelpy._value import Value
from kestrelpy.errors import CorruptJournal, UnsupportedFormat
from kestrelpy.ship.errors import HistoryMismatch
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.opening import open_store, url_of
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.ship_file import ShipFile, read_ship_file
from kestrelpy.ship.standby_folder import StandbyFolder
from kestrelpy.ship.store import Store

__all__ = ["Orphan", "orphans", "rejoin"]

ORPHANS_FORMAT = 1
_COPY_BYTES = 1 << 20
_MOST_LIST_BYTES = 8 << 20
"""No list of orphans is longer: each takes a hundred bytes, and a takeover."""


class Orphan(Value, kw_only=True):
    """Items that their owner had not shipped when it was taken over, in the folder ``path``: read them with
    ``scan(path, queue, start_id=first_id)``. ``epoch``: that of the owner. ``first_id``, ``last_id``: the first and the
    last of them. ``items``, ``bytes``: how many there are, and their size.
    """

    path: str
    epoch: int
    first_id: int
    last_id: int
    items: int
    bytes: int


class _Entry(NamedTuple):
    """What ``jobs.orphans`` says of a folder. ``whole``: everything is in it."""

    folder: str
    epoch: int
    first_id: int
    whole: bool


def rejoin(
    directory: str | os.PathLike[str],
    queue: str,
    store: str | Store | Any,
    *,
    options: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
) -> Orphan | None:
    """Make the files of an owner that was taken over those of a standby. What it had not shipped is set aside in the
    folder ``QUEUE.EPOCH.orphan`` beside them, and its ids are logged as a warning. Returns what was set aside; ``None``
    if everything was shipped. ``options`` are those of ``open_store``.

    Nothing is merged, and nothing is deleted. When this returns, all is on disk. Cut short, it is repeated. From then
    on nobody opens the queue here before a ``Standby`` has followed the log. A ``Standby`` does all this by itself.

    Raises ``QueueLocked`` if somebody has the queue or one of its readers open; ``HistoryMismatch`` if the log's last
    owner is this queue, here, and has not shipped all (an opening ships it), if the store has another queue of this
    name, or was put back; ``RestoreTargetExists`` if the queue here is not shipped; ``NoSuchQueue``, ``StoreDamaged``,
    ``StoreUnavailable``, ``BadStoreURL``, ``CorruptJournal``, ``InvalidName``, ``OSError``.
    """
    file_names.check_name(queue)
    opened = open_store(store, options=options)
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    try:
        shipped = ShippedQueue(opened, queue)
        mine = StandbyFolder(folder, shipped, url_of(store, opened), disk)
        mine.lock()
        try:
            return set_aside(mine, shipped, disk)
        finally:
            mine.unlock()
    finally:
        folder.close()


def orphans(directory: str | os.PathLike[str], queue: str, *, disk: Disk | None = None) -> list[Orphan]:
    """What was set aside beside the queue in ``directory``, and is there, the oldest first. Read-only; reads the
    segments. Raises ``CorruptJournal`` if the list is damaged, ``InvalidName``, ``OSError``.
    """
    file_names.check_name(queue)
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    try:
        entries = _read_list(folder, queue)
        found = (_describe(folder, queue, each, disk) for each in entries if each.whole)
        return list(filter(None, found))
    finally:
        folder.close()


def set_aside(mine: StandbyFolder, shipped: ShippedQueue, disk: Disk | None) -> Orphan | None:
    """``rejoin``, with the queue's lock. Does nothing if the files are a standby's already, or there are none."""
    folder, queue = mine.directory, mine.queue
    names = file_names.of_queue(folder.names(), queue)
    if file_names.standby_name(queue) in names:
        return _finish(mine, disk)
    file = read_ship_file(folder, queue)
    if file is None:  # new, or a restore that was cut short: ``lock`` has refused all else
        return None
    state = shipped.at_end()
    assert state.header is not None
    segments = file_names.segments_among(names, queue)
    last_id = max((_last_id(folder, name) for _, name in segments), default=0)
    if file.queue_id != state.header.queue_id:
        raise HistoryMismatch("the store has another queue of this name", last_id, state.last_id)
    if state.slot < file.slot:
        reason = f"the log ends at slot {state.slot}, and slot {file.slot} was ours"
        raise HistoryMismatch(reason, last_id, state.last_id)
    epoch, first_id = _first_unshipped(shipped, state, file)
    if epoch and last_id >= first_id:
        if epoch == state.header.epoch:
            reason = "the log's last owner is this queue, here: open it with ship=..., and the rest is shipped"
            raise HistoryMismatch(reason, last_id, state.last_id)
        _move(folder, queue, _entry(folder, queue, epoch, first_id, disk), disk)
    mine.sign()
    return _finish(mine, disk)


def _first_unshipped(shipped: ShippedQueue, state: LogState, file: ShipFile) -> tuple[int, int]:
    """Our last epoch in the log, and the first id that was not in the log when it ended; 0 if none is ours."""
    epoch, first_id = 0, 0
    if not file.nonces:  # a copy that was never opened
        return epoch, first_id
    for number in range(max(file.epoch, 1), len(state.fences) + 1):
        fence = shipped.slot_there(state.fences[number - 1]).header
        if number == file.epoch and fence.nonce not in file.nonces:
            raise HistoryMismatch(f"epoch {number} of the log was ours, and is another's", 0, state.last_id)
        if fence.nonce in file.nonces:
            epoch, first_id = number, state.last_id + 1
        elif epoch == number - 1:
            first_id = fence.last_id + 1
    return epoch, first_id


# -- the folder ------------------------------------------------------------------------------------------------------


def _entry(folder: Directory, queue: str, epoch: int, first_id: int, disk: Disk | None) -> _Entry:
    """The entry that goes on. If there is none, choose a folder that is not there, and note it durably."""
    entries, number = _read_list(folder, queue), 1
    if entries and entries[-1] == _Entry(entries[-1].folder, epoch, first_id, whole=False):
        return entries[-1]
    while True:
        name = file_names.orphan_name(queue, epoch, number)
        if not _is_taken(folder, name, entries, disk):
            entry = _Entry(name, epoch, first_id, whole=False)
            _write_list(folder, queue, [*entries, entry])
            return entry
        number += 1


def _is_taken(folder: Directory, name: str, entries: list[_Entry], disk: Disk | None) -> bool:
    if any(each.folder == name for each in entries):
        return True
    try:
        (disk or RealDisk()).directory(f"{folder.path}/{name}").close()
    except FileNotFoundError:
        return False
    return True


def _move(folder: Directory, queue: str, entry: _Entry, disk: Disk | None) -> None:
    """Bring the segments into the folder of the entry."""
    target = (disk or RealDisk()).directory(f"{folder.path}/{entry.folder}", create=True)
    try:
        segments = file_names.segments_among(folder.names(), queue)
        at = next((at for at, each in enumerate(segments) if _last_id(folder, each[1]) >= entry.first_id), None)
        rest = segments[at:] if at is not None else []
        for _, name in reversed(rest[1:]):
            try:
                folder.move(name, target, name)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _copy(folder, name, target)
                target.sync()
                folder.unlink(name)
            target.sync()
            folder.sync()
        for _, name in rest[:1]:
            _copy(folder, name, target)
        target.sync()
    finally:
        target.close()


def _copy(folder: Directory, name: str, target: Directory) -> None:
    """Copy a file, as a whole or not at all. Its name is not synced."""
    temporary = file_names.temporary_name(name)
    with contextlib.suppress(FileNotFoundError):
        target.unlink(temporary)
    source = folder.open(name)
    try:
        copy = target.create(temporary)
        try:
            for at in range(0, source.size(), _COPY_BYTES):
                copy.write(at, source.read(at, _COPY_BYTES))
            copy.sync()
        finally:
            copy.close()
    finally:
        source.close()
    target.rename(temporary, name)


def _finish(mine: StandbyFolder, disk: Disk | None) -> Orphan | None:
    """The files are a standby's. Note that the last folder is whole, if that is not known yet."""
    folder, queue = mine.directory, mine.queue
    entries = _read_list(folder, queue)
    if not entries or entries[-1].whole:
        return None
    entry = entries[-1]._replace(whole=True)
    found = _describe(folder, queue, entry, disk)
    if found is not None:
        _logging.warning(
            "queue %s has another owner: items %d to %d of epoch %d are in no log, and are kept in %s",
            queue,
            found.first_id,
            found.last_id,
            found.epoch,
            found.path,
        )
    _write_list(folder, queue, [*entries[:-1], entry])
    return found


# -- what is there ---------------------------------------------------------------------------------------------------


def _frames(folder: Directory, name: str) -> Iterator[fmt.Frame]:
    """The whole frames of a segment, up to the first one that is not; none if its header is damaged."""
    file = folder.open(name)
    try:
        header = read_header(file, f"{folder.path}/{name}")
        if header is None:
            return
        due = header.first_id
        for _, frame in iterate_frames(file, header.marker, fmt.HEADER_BYTES, file.size()):
            if frame.footer is not None or frame.first_id != due:
                return
            yield frame
            due = frame.last_id + 1
    finally:
        file.close()


def _last_id(folder: Directory, name: str) -> int:
    """The last id in a segment. One whose header is damaged may have any."""
    file = folder.open(name)
    try:
        header = read_header(file, f"{folder.path}/{name}")
        if header is None:
            return fmt.LARGEST if file.read(fmt.HEADER_BYTES, file.size()).strip(b"\0") else 0
        footer = read_footer(file, header)
        if footer is not None:
            return footer.last_id
    finally:
        file.close()
    last_id = header.first_id - 1
    for frame in _frames(folder, name):
        last_id = frame.last_id
    return last_id


def _describe(folder: Directory, queue: str, entry: _Entry, disk: Disk | None) -> Orphan | None:
    """What is in the folder of an entry; ``None`` if it is gone, or has none of the items."""
    path = f"{folder.path}/{entry.folder}"
    try:
        target = (disk or RealDisk()).directory(path)
    except FileNotFoundError:
        return None
    last_id = items = size = 0
    try:
        for item_id, length in _sizes_from(target, queue, entry.first_id):
            last_id, items, size = item_id, items + 1, size + length
    finally:
        target.close()
    if not items:
        return None
    return Orphan(path=path, epoch=entry.epoch, first_id=entry.first_id, last_id=last_id, items=items, bytes=size)


def _sizes_from(folder: Directory, queue: str, first_id: int) -> Iterator[tuple[int, int]]:
    """The ids from ``first_id`` on, and the sizes of their items in bytes."""
    for _, name in file_names.segments_among(folder.names(), queue):
        for frame in _frames(folder, name):
            for item_id, (data, _, _) in enumerate(frame.entries, frame.first_id):
                if item_id >= first_id:
                    yield item_id, len(data)


def _read_list(folder: Directory, queue: str) -> list[_Entry]:
    """What ``jobs.orphans`` says. Raises ``CorruptJournal``, ``UnsupportedFormat``, ``OSError``."""
    name = file_names.orphans_name(queue)
    data = read_small(folder, name, _MOST_LIST_BYTES)
    if data is None:
        return []
    path = f"{folder.path}/{name}"
    try:
        said = json.loads(data)
        if said["format"] > ORPHANS_FORMAT:
            raise UnsupportedFormat(path, said["format"], ORPHANS_FORMAT)
        return [_checked(_Entry(**each), queue) for each in said["orphans"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptJournal(path, 0, "it does not say what was set aside here") from None


def _checked(entry: _Entry, queue: str) -> _Entry:
    if not entry.folder.startswith(f"{queue}.{int(entry.epoch)}") or "/" in entry.folder or entry.first_id < 1:
        raise ValueError(entry)
    return entry


def _write_list(folder: Directory, queue: str, entries: list[_Entry]) -> None:
    said = {"format": ORPHANS_FORMAT, "orphans": [each._asdict() for each in entries]}
    replace_file(folder, file_names.orphans_name(queue), json.dumps(said).encode("ascii"))
