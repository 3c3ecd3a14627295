"""``SharedJournal``: what a queue and its fan-outs share on disk: one journal, and a reader for each of them.

1. Nothing is on disk before the first item, or the first fan-out. So consumers that poll names cost no files.
2. Without fan-outs, the queue reads with the default reader. The first fan-out's mention renames that reader to ``_``,
   and then makes the fan-out's reader, at the tail.
3. One put is one record: after a crash, the queue and all fan-outs have it, or none has.
4. If one of them is full and refuses, none gets the item.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kestrelpy import ItemTooLarge, JournaledQueue, KestrelError, QueueDiskFull, QueueFull, Reader, ReaderConfig
from kestrelpy._disk.interface import NO_ROOM
from kestrelpy.server.kestrel import names

if TYPE_CHECKING:
    from kestrelpy.server.kestrel.queue import ServedQueue

__all__ = ["OWN_READER", "SharedJournal"]

OWN_READER = "_"
"""The reader of the queue itself, if it has fan-outs."""


class JournalStorage(Protocol):
    """The part of ``Storage`` that a journal uses."""

    synced_each_turn: set[JournaledQueue]

    def open(self, library_name: str, name: bytes) -> JournaledQueue:
        """Open, or make, a queue of the library."""

    def note_written(self, journal: JournaledQueue) -> None:
        """This queue of the library is to be synced before the turn's replies."""

    def erase(self, journal: JournaledQueue) -> None:
        """Delete a queue of the library."""

    def note_reader(self, journal: JournaledQueue, reader: str) -> None:
        """A reader of this queue of the library is about to be opened or made."""

    def drop_reader(self, journal: JournaledQueue, reader: str) -> None:
        """Delete a reader of a queue of the library."""


def _has_made_room(make: Callable[[], None]) -> bool:
    """Make files. False if there is no room for them."""
    try:
        make()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return False
    return True


class SharedJournal:
    """The journal of one parent name. ``own`` is the queue of that name, if it is there; ``children`` its fan-outs."""

    def __init__(self, name: bytes, storage: JournalStorage, wake: Callable[[ServedQueue], None]) -> None:
        self.name = name
        self._storage = storage
        self._wake = wake
        self.queue: JournaledQueue | None = None
        self.own: ServedQueue | None = None
        self.children: dict[bytes, ServedQueue] = {}
        self.puts = 0
        self.waiting: dict[ServedQueue, None] = {}
        """Those of its queues that have somebody in line."""
        self._is_ready = False  # the journal is open, and all who read it have their readers
        self._max_item_bytes = 0
        self._limited_here: list[ServedQueue] = []
        self._syncs_each_turn = False

    def _check(self) -> None:
        members = self.members()
        assert all(queue.line for queue in self.waiting)
        assert all(queue in members for queue in self.waiting)
        assert not self._is_ready or all(queue.reader is not None for queue in self._readers())

    def members(self) -> list[ServedQueue]:
        return [*([self.own] if self.own is not None else []), *self.children.values()]

    def _readers(self) -> list[ServedQueue]:
        """The queues that get what is put here."""
        return [queue for queue in self.members() if queue is not self.own or not self.is_for_children_only]

    @property
    def is_for_children_only(self) -> bool:
        """``fanout_only``. Items that the queue has already are read first: until then, it also takes new ones."""
        own = self.own
        return own is not None and own.config.fanout_only and (own.reader is None or not own.reader.items)

    def changed(self) -> None:
        """A queue was made or deleted, or the configuration has changed: look again at the next put."""
        self._is_ready = False

    # -- putting -------------------------------------------------------------------------------------------------------

    def add(self, data: bytes, expires_at_ms: int | None) -> bool:
        """Put an item for the queue and all its fan-outs. False if one of them has no room, or the disk is full."""
        if not self._is_ready and not _has_made_room(self._make_ready):
            return False
        queue = self.queue
        if queue is None:  # fanout_only, and there are no fan-outs
            return True
        if len(data) > self._max_item_bytes or not all(each.has_room() for each in self._limited_here):
            return False
        try:
            if expires_at_ms is None:
                queue.put(data, timeout=0)
            else:
                queue.put(data, expires_at_ms=expires_at_ms, timeout=0)
        except (QueueFull, QueueDiskFull, ItemTooLarge):
            return False
        self.puts += 1
        if self._syncs_each_turn:
            self._storage.note_written(queue)
        for each in self._limited_here:
            each.keep_limits()
        for each in self.waiting:
            self._wake(each)
        return True

    def add_to_child(self, child: ServedQueue, data: bytes, expires_at_ms: int | None) -> bool:
        """Put an item for one fan-out alone. False if there is no room."""
        limit = child.config.max_item_size
        if not child.has_room() or (limit is not None and len(data) > limit):
            return False
        if child.side is None and not _has_made_room(partial(self.open_side, child)):
            return False
        side = child.side
        assert side is not None
        try:
            side.put(data, expires_at_ms=expires_at_ms, timeout=0)
        except (QueueFull, QueueDiskFull, ItemTooLarge):
            return False
        child.side_puts += 1
        if side in self._storage.synced_each_turn:
            self._storage.note_written(side)
        child.keep_limits()
        self._wake(child)
        return True

    def max_item_bytes(self) -> int:
        """The largest item that all who read here take."""
        if self._is_ready:
            return self._max_item_bytes
        limits = [queue.config.max_item_size for queue in self._readers() if queue.config.max_item_size is not None]
        if self.queue is not None:
            limits.append(self.queue.max_item_bytes)
        return min(limits, default=1 << 62)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        self._end_own_reader()
        readers = self._readers()
        if readers or self.queue is not None:
            self._open()
        for queue in readers:
            if queue.reader is None:
                self._make_reader(queue)
        self._max_item_bytes = self.max_item_bytes()
        self._limited_here = [queue for queue in readers if queue.side is not None or queue.config.max_items == 0]
        self._syncs_each_turn = self.queue in self._storage.synced_each_turn
        self._is_ready = True

    def _end_own_reader(self) -> None:
        """The queue is for its fan-outs only from now on, and has no item: end its reader."""
        own, journal = self.own, self.queue
        if own is None or own.reader is None or journal is None or not self.is_for_children_only:
            return
        reader, own.reader = own.reader, None
        if self.children:
            self._storage.drop_reader(journal, reader.name)
        else:
            self.queue = None
            self._storage.erase(journal)

    def _open(self) -> JournaledQueue:
        if self.queue is None:
            self.queue = self._storage.open(names.library_name(self.name), self.name)
        return self.queue

    def _make_reader(self, queue: ServedQueue) -> None:
        journal = self._open()
        if queue is not self.own:
            own = self.own
            if own is not None and own.reader is not None and not own.reader.name:
                self._storage.note_reader(journal, OWN_READER)
                journal.reader(OWN_READER)  # renames the default reader, which is the same object
                own.reader.configure(own.reader_config())
            name = names.reader_name(queue.name)
        else:
            name = OWN_READER if self.children else ""
        queue.reader = self._reader(journal, name, queue.reader_config())

    def _reader(self, journal: JournaledQueue, name: str, config: ReaderConfig) -> Reader:
        self._storage.note_reader(journal, name)
        reader = journal.reader(name, start="tail")
        reader.configure(config)
        return reader

    def restore(self, journal: JournaledQueue) -> None:
        """The journal was on disk when the server began."""
        self.queue = journal

    def restore_reader(self, queue: ServedQueue, name: str) -> None:
        """This queue's reader was on disk when the server began."""
        assert self.queue is not None
        queue.reader = self._reader(self.queue, name, queue.reader_config())

    def make_child(self, child: ServedQueue) -> None:
        """From now on the fan-out gets what is put: its reader is on disk when this returns."""
        self.children[child.name] = child
        self.changed()
        self._make_reader(child)

    def open_side(self, child: ServedQueue) -> None:
        """Open, or make, the queue of what is put for this fan-out alone."""
        child.set_side(self._storage.open(names.side_name(child.name), child.name))
        child.configure(child.config)
        self.changed()

    # -- deleting ------------------------------------------------------------------------------------------------------

    def delete(self, queue: ServedQueue) -> None:
        """Delete a queue, its items, and its files. Its fan-outs stay."""
        if queue.side is not None:
            self._storage.erase(queue.side)
            queue.set_side(None)
        others = [each for each in self.members() if each is not queue and each.reader is not None]
        if self.queue is not None and not others:  # without a reader, all items would come again
            self._storage.erase(self.queue)
            self.queue = None
        elif self.queue is not None and queue.reader is not None:
            self._storage.drop_reader(self.queue, queue.reader.name)
        queue.reader = None
        self.waiting.pop(queue, None)
        if queue is self.own:
            self.own = None
        else:
            del self.children[queue.name]
        self.changed()

    def discard(self) -> None:
        """What could not be made is not kept: its files are erased as far as the disk allows it."""
        journal, self.queue = self.queue, None
        if journal is not None:
            with contextlib.suppress(OSError, KestrelError):
                self._storage.erase(journal)
            journal.close()

    def close(self) -> None:
        """The server ends. May be repeated."""
        sides = [child.side for child in self.children.values() if child.side is not None]
        with contextlib.ExitStack() as rest:
            for side in sides:
                rest.callback(side.close)
            if self.queue is not None:
                rest.callback(self.queue.close)
