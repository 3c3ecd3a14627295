"""A queue's place in a folder: its locks, its readers' checkpoints, what is left over, what may be retired.

Used by the process that writes the queue and by those that read it from outside; neither knows the other but through
these files.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Iterable, Iterator

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory, Lock
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import BLOCK, FIRST_BLOCKS, CheckpointFile, SparedFile, load_checkpoint
from kestrelpy._journal.format import Checkpoint
from kestrelpy.errors import InvalidName, QueueLocked


class QueueFiles:
    """The files of one queue in one directory."""

    def __init__(self, directory: Directory, queue: str) -> None:
        self.directory = directory
        self.checkpoint_directory = directory  # for who saves a place; see _detached.CheckpointDirectory
        self.queue = queue
        self._guards: dict[int, Lock] = {}  # by thread
        self._inside: set[int] = set()  # the threads that have the guard
        self._missed: set[str] = set()  # of which readers it was said that their places are gone

    def lock(self) -> tuple[Lock, list[str]]:
        """Lock the queue for writing; also what there is of it in the folder then, for the rest of an opening to go by:
        a folder may be full of others' files.

        Raises ``QueueLocked``, ``InvalidName`` for a name that differs from another only in case (R23).
        """
        name = file_names.lock_name(self.queue)
        lock = self.directory.lock(name)
        try:
            names = file_names.of_queue(self.directory.names(), self.queue)
            if name not in names:
                raise InvalidName(self.queue, "another queue here has this name but for upper and lower case")
        except BaseException:
            lock.release()
            raise
        return lock, names

    def remove_leftovers(self, names: list[str]) -> None:
        """Remove temporary files of this queue, by exact pattern (R8), but for those that are spare files. Under the
        queue's lock.

        A reader that another process has open may be saving its place in this moment: its file is left to it. So are
        all of readers while somebody has the guard: no opening waits for that.
        """
        spare = self._spare_names(names)
        for name in names:
            if name not in spare and name.endswith(".tmp") and file_names.parse_owner(name) == (self.queue, True):
                reader = file_names.parse_checkpoint(name.removesuffix(".tmp"), self.queue)
                if reader is None:
                    self.directory.unlink(name)
                    continue
                with contextlib.suppress(FileNotFoundError, QueueLocked), self.guard(wait=False):
                    if file_names.reader_lock_name(self.queue, reader) not in self.directory.names():
                        self.directory.unlink(name)  # it was dropped
                        continue
                    lock = self.lock_reader(reader)  # nobody asks for it meanwhile: that is done under the guard
                    try:
                        self.directory.unlink(name)
                    finally:
                        lock.release()

    def _spare_names(self, names: list[str]) -> set[str]:
        """The names of the spare files of all that there is."""
        places = [file_names.checkpoint_name(self.queue, reader) for reader in self.reader_names(names) or {""}]
        files = [*places, file_names.mark_name(self.queue)]
        second = {self._second} if not self.reader_names(names) else set()
        return {file_names.temporary_name(name) for name in files} | second

    @property
    def _second(self) -> str:
        """The name of what is held beside the first reader's spare file, to be the next one."""
        return file_names.temporary_name(file_names.reader_lock_name(self.queue, ""))

    def hold_back(self, names: list[str]) -> None:
        """Hold back what a full disk has no room for, as far as there is room now: what the mark will need at the end,
        and where there is no reader yet, what the first one will need, a lock file (some file systems make none when
        they are full), a checkpoint and its spare file. A full disk is no reason why nobody can read.

        Under the guard: a reader that is made meanwhile takes the file for its own. That one needs nothing held back.
        """
        mark = file_names.mark_name(self.queue)
        if file_names.temporary_name(mark) not in names:
            with contextlib.suppress(OSError):
                SparedFile(self.directory, mark).hold(BLOCK)
        if self._needs_spare(names):
            with contextlib.suppress(QueueLocked), self.guard(wait=False):
                if self._needs_spare(self.directory.names()):
                    spare = self.checkpoint_file("")
                    spare.hold()
                    if not self._hold_second():
                        spare.hold(FIRST_BLOCKS)
                    with contextlib.suppress(OSError):
                        self.directory.create(file_names.reader_lock_name(self.queue, "")).close()

    def _hold_second(self) -> bool:
        """Whether there was room for it."""
        with contextlib.suppress(OSError):
            file = self.directory.create(self._second)
            try:
                file.grow(BLOCK)
                return True
            finally:
                file.close()
        return False

    def _needs_spare(self, names: list[str]) -> bool:
        spare = file_names.temporary_name(file_names.checkpoint_name(self.queue, ""))
        return not self.reader_names(names) and spare not in names

    def hand_down(self, reader: str) -> None:
        """What is held for the first reader is for this one, which has another name."""
        with contextlib.suppress(FileNotFoundError):
            self.directory.rename(
                *(file_names.temporary_name(file_names.checkpoint_name(self.queue, each)) for each in ("", reader))
            )

    @contextlib.contextmanager
    def guard(self, *, wait: bool = True) -> Iterator[None]:
        """Held while readers are made or dropped and while segments are retired, by whichever process. Without
        ``wait`` it raises ``QueueLocked`` if another has it: that may be for long, if its process is stopped.

        A thread that was interrupted on its way out of this may have it still, as long as its exception is looked at:
        it does not wait for itself.
        """
        self.leave_guard()
        thread = threading.get_ident()
        self._guards[thread] = lock = self.directory.lock(file_names.readers_lock_name(self.queue), wait=wait)
        try:
            self._inside.add(thread)
            yield
        finally:
            try:
                self._inside.discard(thread)
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
        thread = threading.get_ident()
        left = self._guards.get(thread)
        if left is not None:
            self._inside.discard(thread)
            left.release()

    def leave_nothing(self) -> None:
        """Under the guard: if nothing else is there of this queue, which was erased, the guard's own file goes too."""
        guard = file_names.readers_lock_name(self.queue)
        if self._mine() == [guard]:
            self.directory.unlink(guard)

    @property
    def is_guarded(self) -> bool:
        """Whether this thread has the guard."""
        return threading.get_ident() in self._inside

    # -- readers -----------------------------------------------------------------------------------------------------

    def reader_names(self, names: list[str] | None = None) -> set[str]:
        """The names of all checkpoints; the default reader's name is empty. One of another queue is no reader's: see
        ``readers``.
        """
        names = self.directory.names() if names is None else names
        return file_names.readers_among(names, self.queue)

    def readers(self, queue_id: bytes, names: list[str] | None = None, *, known: Container[str] = ()) -> set[str]:
        """The readers that have a place, which may be damaged. ``known``: those of whom that need not be looked up."""
        return {each for each in self.reader_names(names) if each in known or self.is_there(each, queue_id)}

    def lost_names(self, names: list[str], there: set[str]) -> set[str]:
        """The readers that were owned and have no place any more: they begin with the earliest item when they are
        opened. A default reader's place may have been taken over, and its lock file is left. ``there``: ``readers``.
        """
        return file_names.owned_among(names, self.queue) - there - {""}

    def lock_reader(self, reader: str) -> Lock:
        """Own a reader. Raises ``QueueLocked``."""
        return self.directory.lock(file_names.reader_lock_name(self.queue, reader))

    def is_owned(self, reader: str) -> bool:
        """Whether somebody has the reader open."""
        try:
            lock = self.lock_reader(reader)
        except QueueLocked:
            return True
        lock.release()
        return False

    def checkpoint_file(self, reader: str) -> CheckpointFile:
        return CheckpointFile(self.checkpoint_directory, file_names.checkpoint_name(self.queue, reader), self._second)

    def load(self, reader: str, queue_id: bytes, file: CheckpointFile | None = None) -> Checkpoint | None:
        """``find``, for who opens the reader: damage is logged. With ``file``, saves to that go on from there."""
        name = file_names.checkpoint_name(self.queue, reader)
        state, exists = load_checkpoint(self.directory, name) if file is None else file.load()
        if state is not None and is_checkpoint_of(state, reader, queue_id):
            return state
        if exists:
            _logging.warning("checkpoint %s is damaged: its reader starts at the earliest item kept", name)
        return None

    def find(self, reader: str, queue_id: bytes) -> Checkpoint | None:
        """A reader's saved state; ``None`` if it is missing, damaged or of another queue: never a reason to skip."""
        state, _ = load_checkpoint(self.directory, file_names.checkpoint_name(self.queue, reader))
        return state if state is not None and is_checkpoint_of(state, reader, queue_id) else None

    def is_there(self, reader: str, queue_id: bytes) -> bool:
        """Whether a reader has a place, which may be damaged. A state of another queue is none."""
        state, exists = load_checkpoint(self.directory, file_names.checkpoint_name(self.queue, reader))
        return exists and (state is None or not is_foreign(state, queue_id))

    def has_heir(self, readers: Iterable[str], queue_id: bytes) -> bool:
        """Whether one of these readers has taken over the default reader's place. One that stands beside the default
        reader has not: it was made while somebody had that open.
        """
        for reader in readers:
            state = self.find(reader, queue_id)
            if state is not None and state.has_inherited(reader):
                return True
        return False

    def load_all(self, names: list[str]) -> list[Checkpoint]:
        """The mark and every reader's state, those that are whole: what recovery goes by."""
        files = [file_names.mark_name(self.queue)]
        files += [file_names.checkpoint_name(self.queue, reader) for reader in sorted(self.reader_names(names))]
        states = (load_checkpoint(self.directory, name)[0] for name in files)
        return [state for state in states if state is not None]

    def drop(self, reader: str) -> None:
        """Forget a reader's place, durably. Its lock file goes too, while it is held: a lock that is waited for is
        compared with the path after it is had (R25). It goes first, and is gone for good before the place goes: alone
        it would say that the place was lost.
        """
        place = file_names.checkpoint_name(self.queue, reader)
        for name in (file_names.reader_lock_name(self.queue, reader), place):
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
            self.directory.sync()
        with contextlib.suppress(FileNotFoundError):
            self.directory.unlink(file_names.temporary_name(place))

    def forget_owner(self, reader: str, queue_id: bytes) -> None:
        """A reader could not be made: unless it has a place already, it never was. While its lock is held."""
        with contextlib.suppress(OSError):
            if not self.is_there(reader, queue_id):
                self.directory.unlink(file_names.reader_lock_name(self.queue, reader))
                self.directory.unlink(file_names.temporary_name(file_names.checkpoint_name(self.queue, reader)))

    def lowest_head_elsewhere(self, own: set[str], wanted: int, queue_id: bytes) -> int | None:
        """The lowest durable head of the readers that are not open here, 0 where one has lost its place; ``None`` if
        there are none. ``wanted``: a lower one is of no use. Under ``guard``.
        """
        names = self.directory.names()
        there = self.readers(queue_id, names, known=own)
        lost = self.lost_names(names, there) - own
        for reader in lost - self._missed:
            name = file_names.checkpoint_name(self.queue, reader)
            _logging.warning("checkpoint %s is gone: nothing is retired until its reader is opened, or dropped", name)
        self._missed = lost
        if lost:
            return 0
        lowest: int | None = None
        for reader in there - own:
            head = self._durable_head_elsewhere(reader, wanted, queue_id)
            lowest = head if lowest is None else min(lowest, head)
        return lowest

    def _durable_head_elsewhere(self, reader: str, wanted: int, queue_id: bytes) -> int:
        """What its owner says. The place of a reader that nobody owns is saved anew, if that helps."""
        state = self.find(reader, queue_id)
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
                if state is None or not is_checkpoint_of(state, reader, queue_id):
                    return 0
                with contextlib.suppress(OSError):  # no room, say: what was said before counts
                    file.save(state, durable=True)
                    return state.head
            finally:
                lock.release()
        return min(state.head, state.durable_head)

    def erase(self) -> None:
        """Delete every file of this queue and no other; the locks last. What is left after a crash on the way may be
        opened: places go before what they point to, and segments from the oldest on; what is a work queue is one until
        nothing is left of it.

        Under the guard, which goes too: a reader in another process that saves its place in this moment has done so, or
        finds its lock file gone.
        """
        with self.guard():
            self._remove_all()

    def _mine(self) -> list[str]:
        """The names of all files of this queue."""
        return [
            name for name in self.directory.names() if (file_names.parse_owner(name) or ("", False))[0] == self.queue
        ]

    def _remove_all(self) -> None:
        last = (".segment", file_names.work_name(self.queue), ".lock")
        for name in sorted(
            self._mine(), key=lambda name: (*(name.endswith(end) for end in reversed(last)), len(name), name)
        ):
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
        self.directory.sync()


def is_foreign(state: Checkpoint, queue_id: bytes) -> bool:
    """Whether a state was saved for another queue than that of this id, under the same name: one that was erased, say.
    ``queue_id`` is zero while nothing says what it is.
    """
    return any(queue_id) and any(state.queue_id) and state.queue_id != queue_id


def is_checkpoint_of(state: Checkpoint, reader: str, queue_id: bytes) -> bool:
    """Whether a state found under a reader's name is its place in the queue of that id."""
    if state.reader not in (reader, ""):  # the default reader's may be renamed for the first named one
        return False
    # Saved elsewhere, before there was a segment to know the queue by.
    return state.queue_id == queue_id or (not any(state.queue_id) and not state.highest_id)
