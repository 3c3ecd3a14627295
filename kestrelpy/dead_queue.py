"""``dead_letters``: reads the dead letters of a queue, and puts them back or drops them (docs/dead-letters.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kestrelpy._disk.interface import Disk, text_of
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._reading.detached_source import open_reader
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy.clock import Clock
from kestrelpy.errors import QueueEmpty, QueueLocked, UnknownItem
from kestrelpy.inbox.publishing import take_in
from kestrelpy.letter import DeadLetter, decode_letter, with_owner

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kestrelpy.item import Item

__all__ = ["DeadLetters", "dead_letters"]


class DeadLetters:
    """The dead letters of a queue, one after another: an iterator, made by ``dead_letters``.

    Each letter is an open read: nobody else gets it meanwhile. The end of the iteration closes the reader, and so do
    ``close()`` and the end of a ``with`` block; letters that were neither put back nor dropped come again. A letter can
    be put back or dropped after that, too: then the reader is opened again for it, and reads up to that letter.

    It is for one thread. Memory: all letters that were read, until the reader is closed.
    """

    def __init__(self, directory: str, name: str, reader: str, disk: Disk | None, clock: Clock | None) -> None:
        self._where = (directory, name, reader, disk, clock)
        self._reader: Reader | None = None
        self._open: dict[int, Item] = {}
        file_names.check_name(name)
        with contextlib.suppress(QueueLocked):  # its owner takes in what was published
            take_in(directory, name, disk=disk, clock=clock)
        if _is_there(directory, name, disk):
            self._reader = open_reader(directory, name, reader, start="earliest", disk=disk, clock=clock)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeadLetter:
        """The next letter, without waiting for one. Raises as ``Reader.get``: ``CorruptJournal`` for a damaged one."""
        reader = self._reader
        if reader is None:
            raise StopIteration
        try:
            item = reader.get(False)
        except QueueEmpty:
            self.close()
            raise StopIteration from None
        self._open[item.id] = item
        letter = decode_letter(item.data, item.id)
        if letter is None:
            letter = DeadLetter(item.data, "", "", 0, item.added_ms, 0, item.error_count, "", item.id)
        return with_owner(letter, self)

    def requeue(self, letter: DeadLetter) -> None:
        """``DeadLetter.requeue``."""
        if not file_names.is_name(letter.queue):
            raise ValueError(f"item {letter.letter_id} of queue {self._where[1]!r} is no dead letter: it has no origin")
        with self._read_of(letter) as (reader, item):
            checkpointer_of(reader).burial.take_over(item, letter.queue)

    def drop(self, letter: DeadLetter) -> None:
        """``DeadLetter.drop``."""
        with self._read_of(letter) as (reader, item):
            reader.commit(item)
            reader.checkpoint(durable=True)

    @contextlib.contextmanager
    def _read_of(self, letter: DeadLetter) -> Iterator[tuple[Reader, Item]]:
        """The reader, and the open read of the letter. If the reader is closed, another one for the block."""
        if self._reader is not None:
            item = self._open.get(letter.letter_id)
            if item is None:
                raise UnknownItem(letter.letter_id, self._reader.full_name)
            yield self._reader, item
            self._open.pop(letter.letter_id, None)
            return
        with DeadLetters(*self._where) as again:
            found = again._find(letter)
            if found is not None:
                yield found
                return
        raise UnknownItem(letter.letter_id, self._where[1])

    def _find(self, letter: DeadLetter) -> tuple[Reader, Item] | None:
        """The reader, and the open read of the letter that another reader has read before."""
        for other in self:
            if other.letter_id == letter.letter_id and other.data == letter.data and self._reader is not None:
                return self._reader, self._open[other.letter_id]
        return None

    def close(self) -> None:
        """Close the reader: letters that are neither put back nor dropped come again. Idempotent. Raises ``OSError`` if
        the reader's position can't be saved: the reader is closed all the same.
        """
        reader, self._reader = self._reader, None
        self._open = {}
        if reader is not None:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dead_letters(
    directory: str | os.PathLike[str],
    name: str,
    *,
    reader: str = "",
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> DeadLetters:
    """The dead letters in queue ``name``, by a reader of it that this process owns until the iteration ends.

    What was published for the queue is taken in first, unless a process has the queue open: then that process does so.
    It does not wait for letters. An item that is no dead letter is shown as it is, with an empty ``queue``. There are
    no letters if there is no such queue.

    Raises ``QueueLocked`` if the reader has another owner, ``NoDefaultReader`` if ``reader`` is empty and the queue has
    named readers, and otherwise as ``open_reader``. Close it, or use it as a context manager, if you leave the loop
    early.

        for letter in dead_letters("queues", "dead"):
            if "timeout" in letter.reason:
                letter.requeue()
    """
    return DeadLetters(text_of(directory), name, reader, disk, clock)


def _is_there(directory: str, queue: str, disk: Disk | None) -> bool:
    folder = (disk or RealDisk()).directory(directory)
    try:
        return bool(file_names.but_for_locks(folder.names(), queue))
    finally:
        folder.close()
