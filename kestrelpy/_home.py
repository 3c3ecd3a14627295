"""A queue's place in a folder: its locks, its readers' checkpoints, what is left over, what may be retired.

Used by the process that writes the queue and by those that read it from outside; neither knows the other but through
these files.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kestrelpy import _log, _names
from kestrelpy._checkpoint import CheckpointFile, load_checkpoint
from kestrelpy._disk import Directory, Lock
from kestrelpy._format import Checkpoint
from kestrelpy.errors import InvalidName, QueueLocked


class Home:
    """The files of one queue in one directory."""

    def __init__(self, directory: Directory, queue: str) -> None:
        self.directory = directory
        self.queue = queue
        self._guards: dict[int, Lock] = {}  # by thread
        self._missed: set[str] = set()  # of which readers it was said that their places are gone

    def lock(self) -> tuple[Lock, list[str]]:
        """Lock the queue for writing; also what there is of it in the folder then, for the rest of an opening to go by:
        a folder may be full of others' files.

        Raises ``QueueLocked``, ``InvalidName`` for a name that differs from another only in case (R23).
        """
        name = _names.lock_name(self.queue)
        lock = self.directory.lock(name)
        try:
            names = _names.of_queue(self.directory.names(), self.queue)
            if name not in names:
                raise InvalidName(self.queue, "another queue here has this name but for upper and lower case")
        except BaseException:
            lock.release()
            raise
        return lock, names

    def remove_leftovers(self, names: list[str]) -> None:
        """Remove temporary files of this queue, by exact pattern (R8). Under the queue's lock.

        A reader that another process has open may be saving its place in this moment: its file is left to it.
        """
        for name in names:
            if name.endswith(".tmp") and _names.parse_owner(name) == (self.queue, True):
                reader = _names.parse_checkpoint(name.removesuffix(".tmp"), self.queue)
                if reader is None:
                    self.directory.unlink(name)
                    continue
                with self.guard(), contextlib.suppress(FileNotFoundError, QueueLocked):
                    if _names.reader_lock_name(self.queue, reader) not in self.directory.names():
                        self.directory.unlink(name)  # it was dropped
                        continue
                    lock = self.lock_reader(reader)  # nobody asks for it meanwhile: that is done under the guard
                    try:
                        self.directory.unlink(name)
                    finally:
                        lock.release()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Held while readers are made or dropped and while segments are retired, by whichever process.

        A thread that was interrupted on its way out of this may have it still, as long as its exception is looked at:
        it does not wait for itself.
        """
        self.leave_guard()
        thread = threading.get_ident()
        self._guards[thread] = lock = self.directory.lock(_names.readers_lock_name(self.queue), wait=True)
        try:
            yield
        finally:
            try:
                lock.release()
            except BaseException:  # interrupted before it began: others wait for this lock
                lock.release()
                raise
            if self._guards.get(thread) is lock:
                del self._guards[thread]

    def leave_guard(self) -> None:
        """Release the guard if this thread has it still."""
        left = self._guards.get(threading.get_ident())
        if left is not None:
            left.release()

    # -- readers -----------------------------------------------------------------------------------------------------

    def reader_names(self, names: list[str] | None = None) -> set[str]:
        """The readers that have a place, by their checkpoints; the default reader's name is empty."""
        names = self.directory.names() if names is None else names
        return _names.readers_among(names, self.queue)

    def lost_names(self, names: list[str] | None = None) -> set[str]:
        """The readers that were owned and have no place any more: they begin with the earliest item when they are
        opened. A default reader's place may have been taken over, and its lock file is left.
        """
        names = self.directory.names() if names is None else names
        return _names.owned_among(names, self.queue) - self.reader_names(names) - {""}

    def lock_reader(self, reader: str) -> Lock:
        """Own a reader. Raises ``QueueLocked``."""
        return self.directory.lock(_names.reader_lock_name(self.queue, reader))

    def is_owned(self, reader: str) -> bool:
        """Whether somebody has the reader open."""
        try:
            lock = self.lock_reader(reader)
        except QueueLocked:
            return True
        lock.release()
        return False

    def checkpoint_file(self, reader: str) -> CheckpointFile:
        return CheckpointFile(self.directory, _names.checkpoint_name(self.queue, reader))

    def load(self, reader: str, queue_id: bytes, file: CheckpointFile | None = None) -> Checkpoint | None:
        """A reader's saved state; ``None`` if it is missing, damaged or of another queue: never a reason to skip.

        With ``file``, saves to that go on from there.
        """
        name = _names.checkpoint_name(self.queue, reader)
        state, exists = load_checkpoint(self.directory, name) if file is None else file.load()
        if state is not None and is_place_of(state, reader, queue_id):
            return state
        if exists:
            _log.warning("checkpoint %s is damaged: its reader starts at the earliest item kept", name)
        return None

    def has_place(self, reader: str, queue_id: bytes) -> bool:
        """Whether a reader's saved state is whole and its own."""
        state, _ = load_checkpoint(self.directory, _names.checkpoint_name(self.queue, reader))
        return state is not None and is_place_of(state, reader, queue_id)

    def load_all(self, names: list[str]) -> list[Checkpoint]:
        """The mark and every reader's state, those that are whole: what recovery goes by."""
        files = [_names.mark_name(self.queue)]
        files += [_names.checkpoint_name(self.queue, reader) for reader in sorted(self.reader_names(names))]
        states = (load_checkpoint(self.directory, name)[0] for name in files)
        return [state for state in states if state is not None]

    def drop(self, reader: str) -> None:
        """Forget a reader's place, durably. Its lock file goes too, while it is held: a lock that is waited for is
        compared with the path after it is had (R25). It goes first, and is gone for good before the place goes: alone
        it would say that the place was lost.
        """
        for name in (_names.reader_lock_name(self.queue, reader), _names.checkpoint_name(self.queue, reader)):
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
            self.directory.sync()

    def forget_owner(self, reader: str) -> None:
        """A reader could not be made: unless it has a place already, it never was. While its lock is held."""
        with contextlib.suppress(OSError):
            if reader not in self.reader_names():
                self.directory.unlink(_names.reader_lock_name(self.queue, reader))

    def lowest_head_elsewhere(self, own: set[str], wanted: int) -> int | None:
        """The lowest durable head of the readers that are not open here, 0 where one has lost its place; ``None`` if
        there are none. ``wanted``: a lower one is of no use. Under ``guard``.
        """
        names = self.directory.names()
        lost = self.lost_names(names) - own
        for reader in lost - self._missed:
            name = _names.checkpoint_name(self.queue, reader)
            _log.warning("checkpoint %s is gone: nothing is retired until its reader is opened, or dropped", name)
        self._missed = lost
        if lost:
            return 0
        lowest: int | None = None
        for reader in self.reader_names(names) - own:
            head = self._durable_head_elsewhere(reader, wanted)
            lowest = head if lowest is None else min(lowest, head)
        return lowest

    def _durable_head_elsewhere(self, reader: str, wanted: int) -> int:
        """What its owner says. The place of a reader that nobody owns is saved anew, if that helps."""
        state, _ = load_checkpoint(self.directory, _names.checkpoint_name(self.queue, reader))
        if state is None:
            return 0
        if state.durable_head < wanted <= state.head:
            try:
                lock = self.lock_reader(reader)
            except QueueLocked:
                return state.durable_head
            try:
                file = self.checkpoint_file(reader)
                state, _ = file.load()
                if state is None:
                    return 0
                with contextlib.suppress(OSError):  # no room, say: what was said before counts
                    file.save(state, durable=True)
                    return state.head
            finally:
                lock.release()
        return min(state.head, state.durable_head)

    def erase(self) -> None:
        """Delete every file of this queue and no other; the locks last. What is left after a crash on the way may be
        opened: places go before what they point to, and segments from the oldest on.
        """
        mine = [name for name in self.directory.names() if (_names.parse_owner(name) or ("", False))[0] == self.queue]
        for name in sorted(mine, key=lambda name: (name.endswith(".lock"), name.endswith(".segment"), len(name), name)):
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
        self.directory.sync()


def is_place_of(state: Checkpoint, reader: str, queue_id: bytes) -> bool:
    """Whether a state found under a reader's name is its place in the queue of that id."""
    if state.queue_id == queue_id:
        return state.reader in (reader, "")  # the default reader's may be renamed for the first named one
    # Saved elsewhere, before there was a segment to know the queue by.
    return not any(state.queue_id) and not state.highest_id and state.reader == reader
