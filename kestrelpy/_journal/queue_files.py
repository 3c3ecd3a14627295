"""The files of one queue in its folder: locks, readers' checkpoints, leftovers, and what may be retired.

The process that writes the queue uses them, and so do those that read it from outside. These files are all that they
know of each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Iterable, Iterator

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory, Disk, Lock
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import BLOCK, FIRST_BLOCKS, CheckpointFile, FileWithSpare, load_checkpoint
from kestrelpy._journal.format import Checkpoint
from kestrelpy.errors import InvalidName, QueueLocked


class QueueFiles:
    """The files of one queue in one directory."""

    def __init__(self, directory: Directory, queue: str, disk: Disk | None = None) -> None:
        """``disk``: that of the folder, for an owner of a reader, who moves dead letters to other queues there."""
        self.directory = directory
        self.disk = disk
        self.checkpoint_directory = directory  # for saving checkpoints; see detached_source.CheckpointDirectory
        self.queue = queue
        self._guards: dict[int, Lock] = {}  # by thread
        self._inside: set[int] = set()  # the threads that have the guard
        self._missed: set[str] = set()  # the readers whose lost checkpoints were logged

    def lock(self, *, restoring: bool = False, repairing: bool = False) -> tuple[Lock, list[str]]:
        """Lock the queue for writing. Also returns the names of its files in the folder at that time, for the rest of
        the opening: a folder may be full of other queues' files.

        Raises ``QueueLocked``, ``InvalidName`` for a name that differs from another only in case (R23), and
        ``RestoreIncomplete`` unless this is the restore (``restoring``), ``RepairIncomplete`` unless this is the repair
        (``repairing``).
        """
        name = file_names.lock_name(self.queue)
        lock = self.directory.lock(name)
        try:
            names = file_names.of_queue(self.directory.names(), self.queue)
            if name not in names:
                raise InvalidName(self.queue, "another queue in this folder has a name that differs only in case")
            if not restoring:
                file_names.refuse_unrestored(names, self.queue, self.directory.path, repairing=repairing)
        except BaseException:
            lock.release()
            raise
        return lock, names

    def end_standby(self, names: list[str]) -> None:
        """These files follow no log any more. That is on disk when this returns. Call under the queue's lock."""
        if file_names.standby_name(self.queue) in names:
            self.directory.unlink(file_names.standby_name(self.queue))
            self.directory.sync()

    def remove_leftovers(self, names: list[str]) -> None:
        """Remove temporary files of this queue, by exact pattern (R8), except spare files. Call under the queue's lock.

        A reader that another process has open may be saving its checkpoint at this moment: its file stays. If the guard
        is held, the files of all readers stay: no opening waits for the guard.
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
                        self.directory.unlink(name)  # the reader was dropped
                        continue
                    lock = self.lock_reader(reader)  # nobody else asks for it meanwhile: that needs the guard
                    try:
                        self.directory.unlink(name)
                    finally:
                        lock.release()

    def _spare_names(self, names: list[str]) -> set[str]:
        """The names of the spare files of the checkpoints and of the mark."""
        places = [file_names.checkpoint_name(self.queue, reader) for reader in self.reader_names(names) or {""}]
        files = [*places, file_names.mark_name(self.queue)]
        second = {self._second} if not self.reader_names(names) else set()
        return {file_names.temporary_name(name) for name in files} | second

    @property
    def _second(self) -> str:
        """The name of the file that is held beside the first reader's spare file, to be the next spare file."""
        return file_names.temporary_name(file_names.reader_lock_name(self.queue, ""))

    def hold_back(self, names: list[str]) -> None:
        """Hold, as far as there is room now, what a full disk has no room for: what the mark needs at the close. If
        there is no reader yet, also what the first reader needs: a lock file (some file systems make none when they are
        full), a checkpoint and its spare file. A full disk must not keep anybody from reading.

        The latter under the guard: a reader that is made meanwhile takes the file for its own, and needs nothing held.
        """
        mark = file_names.mark_name(self.queue)
        if file_names.temporary_name(mark) not in names:
            with contextlib.suppress(OSError):
                FileWithSpare(self.directory, mark).hold(BLOCK)
        if self._needs_spare(names):
            with contextlib.suppress(QueueLocked), self.guard(wait=False):
                if self._needs_spare(self.directory.names()):
                    spare = self.checkpoint_file("")
                    spare.hold()
                    if not self._reserve_next_spare():
                        spare.hold(FIRST_BLOCKS)
                    with contextlib.suppress(OSError):
                        self.directory.create(file_names.reader_lock_name(self.queue, "")).close()

    def _reserve_next_spare(self) -> bool:
        """Hold room for the second file. Returns whether there was any."""
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

    def give_spare_to(self, reader: str) -> None:
        """Give what is held for the first reader to this reader, which has another name."""
        with contextlib.suppress(FileNotFoundError):
            self.directory.rename(
                *(file_names.temporary_name(file_names.checkpoint_name(self.queue, each)) for each in ("", reader))
            )

    @contextlib.contextmanager
    def guard(self, *, wait: bool = True) -> Iterator[None]:
        """Held while readers are made or dropped and while segments are retired, in any process. Without ``wait`` it
        raises ``QueueLocked`` if another has it. That may last long, if the other process is stopped.

        A thread that was interrupted on its way out of the guard may still have it, as long as the exception is kept.
        Such a thread releases it first: it does not wait for itself.
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
                except BaseException:  # interrupted before the release began: others wait for this lock
                    lock.release()
                    raise
            if self._guards.get(thread) is lock:
                del self._guards[thread]

    def leave_guard(self) -> None:
        """Release the guard if this thread still has it."""
        thread = threading.get_ident()
        left = self._guards.get(thread)
        if left is not None:
            self._inside.discard(thread)
            left.release()

    def unlink_guard_if_last(self) -> None:
        """Under the guard: delete the guard's own file if no other file of this queue, which was erased, is there."""
        guard = file_names.readers_lock_name(self.queue)
        if self._mine() == [guard]:
            self.directory.unlink(guard)

    @property
    def is_guarded(self) -> bool:
        """Whether this thread has the guard."""
        return threading.get_ident() in self._inside

    # -- readers -----------------------------------------------------------------------------------------------------

    def reader_names(self, names: list[str] | None = None) -> set[str]:
        """The readers that have a checkpoint file; the default reader's name is empty. The checkpoint may be that of
        another queue: see ``readers``.
        """
        names = self.directory.names() if names is None else names
        return file_names.readers_among(names, self.queue)

    def readers(self, queue_id: bytes, names: list[str] | None = None, *, known: Container[str] = ()) -> set[str]:
        """The readers that have a checkpoint, intact or damaged. ``known``: readers that need not be looked up."""
        return {each for each in self.reader_names(names) if each in known or self.is_there(each, queue_id)}

    def lost_names(self, names: list[str], there: set[str]) -> set[str]:
        """The readers that were owned and have no checkpoint any more: they begin with the earliest item when they are
        opened. The default reader is left out: its checkpoint may have been taken over, with its lock file left.
        ``there``: the result of ``readers``.
        """
        return file_names.owned_among(names, self.queue) - there - {""}

    def lock_reader(self, reader: str) -> Lock:
        """Take the lock of a reader's owner. Raises ``QueueLocked``."""
        return self.directory.lock(file_names.reader_lock_name(self.queue, reader))

    def is_owned(self, reader: str) -> bool:
        """Whether the reader is open, in any process."""
        try:
            lock = self.lock_reader(reader)
        except QueueLocked:
            return True
        lock.release()
        return False

    def checkpoint_file(self, reader: str) -> CheckpointFile:
        return CheckpointFile(self.checkpoint_directory, file_names.checkpoint_name(self.queue, reader), self._second)

    def load(self, reader: str, queue_id: bytes, file: CheckpointFile | None = None) -> Checkpoint | None:
        """``find`` for opening the reader: damage is logged. With ``file``, saves to it continue from that state."""
        name = file_names.checkpoint_name(self.queue, reader)
        state, exists = load_checkpoint(self.directory, name) if file is None else file.load()
        if state is not None and is_checkpoint_of(state, reader, queue_id):
            return state
        if exists:
            _logging.warning("checkpoint %s is damaged: its reader starts at the earliest item kept", name)
        return None

    def find(self, reader: str, queue_id: bytes) -> Checkpoint | None:
        """A reader's saved state; ``None`` if it is missing, damaged or of another queue: no reason to skip items."""
        state, _ = load_checkpoint(self.directory, file_names.checkpoint_name(self.queue, reader))
        return state if state is not None and is_checkpoint_of(state, reader, queue_id) else None

    def is_there(self, reader: str, queue_id: bytes) -> bool:
        """Whether a reader has a checkpoint, intact or damaged. A state of another queue does not count."""
        state, exists = load_checkpoint(self.directory, file_names.checkpoint_name(self.queue, reader))
        return exists and (state is None or not is_foreign(state, queue_id))

    def has_heir(self, readers: Iterable[str], queue_id: bytes) -> bool:
        """Whether one of these readers has taken over the default reader's checkpoint. A reader beside the default
        reader has not: it was made while the default reader was open.
        """
        for reader in readers:
            state = self.find(reader, queue_id)
            if state is not None and state.has_inherited(reader):
                return True
        return False

    def load_all(self, names: list[str]) -> list[Checkpoint]:
        """The whole states of the mark and of every reader, for recovery."""
        files = [file_names.mark_name(self.queue)]
        files += [file_names.checkpoint_name(self.queue, reader) for reader in sorted(self.reader_names(names))]
        states = (load_checkpoint(self.directory, name)[0] for name in files)
        return [state for state in states if state is not None]

    def drop(self, reader: str) -> None:
        """Delete a reader's checkpoint, durably. Its lock file goes too, while the lock is held: whoever waits for a
        lock compares it with the path after getting it (R25). The lock file goes first, and durably: without the
        checkpoint it would mean that the checkpoint was lost.
        """
        place = file_names.checkpoint_name(self.queue, reader)
        for name in (file_names.reader_lock_name(self.queue, reader), place):
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
            self.directory.sync()
        with contextlib.suppress(FileNotFoundError):
            self.directory.unlink(file_names.temporary_name(place))

    def forget_owner(self, reader: str, queue_id: bytes) -> None:
        """Undo the failed making of a reader, unless it has a checkpoint already. Call while its lock is held."""
        with contextlib.suppress(OSError):
            if not self.is_there(reader, queue_id):
                self.directory.unlink(file_names.reader_lock_name(self.queue, reader))
                self.directory.unlink(file_names.temporary_name(file_names.checkpoint_name(self.queue, reader)))

    def lowest_head_of_others(self, own: set[str], wanted: int, queue_id: bytes) -> int | None:
        """The lowest durable head of the readers that are not open here; 0 if one has lost its checkpoint; ``None`` if
        there are none. ``wanted``: a lower head is of no use. Call under ``guard``.
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
        """The durable head as the reader's owner states it. If nobody owns the reader, its state is saved again, if
        that helps.
        """
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
                with contextlib.suppress(OSError):  # no room, for example: then the older statement counts
                    file.save(state, durable=True)
                    return state.head
            finally:
                lock.release()
        return min(state.head, state.durable_head)

    def erase(self) -> None:
        """Delete every file of this queue and no other; the locks last. After a crash on the way, the rest may be
        opened: checkpoints are deleted before the segments that they point to, segments from the oldest on, and a work
        queue is one until nothing of it is left.

        Under the guard, which is deleted too: a reader in another process that saves its checkpoint at this moment has
        either done so before, or finds its lock file gone.
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
        mine = sorted(self._mine(), key=lambda name: (*(name.endswith(end) for end in reversed(last)), len(name), name))
        first = [name for name in mine if not name.endswith(last)]
        for names in (first, mine[len(first) :]):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self.directory.unlink(name)
            self.directory.sync()  # also in between: no power cut may leave a checkpoint without its segments


def is_foreign(state: Checkpoint, queue_id: bytes) -> bool:
    """Whether a state was saved for another queue of the same name, for example one that was erased. ``queue_id`` is
    zero while it is not known.
    """
    return any(queue_id) and any(state.queue_id) and state.queue_id != queue_id


def is_checkpoint_of(state: Checkpoint, reader: str, queue_id: bytes) -> bool:
    """Whether a state found under a reader's name is that reader's checkpoint in the queue of that id."""
    if state.reader not in (reader, ""):  # the first named reader may have taken over the default reader's file
        return False
    # A zero id: saved in another process, before a segment gave the queue its id.
    return state.queue_id == queue_id or (not any(state.queue_id) and not state.highest_id)
