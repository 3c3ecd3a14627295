"""``OpenJournal``: the lock, the journal and the archive that one queue holds open on disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_ROOM, Directory, Disk, Lock
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.format import FLAG_MARK, Checkpoint
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.purpose import refuse_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, Recovery, write_mark

FARTHEST = 1 << 24
"""No crash takes so many records of a work queue: what its mark says to be given out beyond that are ids of jobs."""


class StoredLog(Protocol):
    """The log of a queue that is shipped. Only ``kestrelpy.ship`` looks further into it.

    ``jump``: of a work queue, how far the ids of jobs must jump.
    """

    jump: int

    def note_jumped(self) -> None:
        """It is on disk that they have. Raises ``OSError``."""


class OpenJournal:
    """The open files of one queue, from ``open`` until ``release``."""

    journal: Journal
    found: Recovered
    names: list[str]
    """The names in the queue's folder, as they were when the queue was opened."""
    log: StoredLog | None = None
    """The log in a store, if the queue is shipped."""

    def __init__(self, files: QueueFiles) -> None:
        self.files = files
        self.syncing = threading.Lock()
        """S in docs/locking.md: held during a sync of the active segment, and while another segment becomes active."""
        self._is_open = False
        self._lock: Lock | None = None
        self.archive: Directory | None = None

    def open(
        self,
        archive_dir: str | os.PathLike[str] | None,
        disk: Disk | None,
        open_log: Callable[[], StoredLog | None],
        *,
        segment_bytes: int,
        quarantine: bool,
        of_jobs: bool,
    ) -> None:
        """Take ownership of the queue, and recover its journal. ``open_log`` is called once ``found`` is known, and
        before anything relies on it.

        Raises as ``JournaledQueue``; then ``release`` releases whatever was open by then.
        """
        files = self.files
        queue, directory = files.queue, files.directory
        self._lock, self.names = files.lock()
        if not of_jobs:
            refuse_jobs(directory, queue, self.names)
        files.remove_leftovers(self.names)
        if archive_dir is not None:
            self.archive = archive = (disk or RealDisk()).directory(os.fspath(archive_dir), create=True)
            self._check_apart(archive)
            archive.sync()  # a segment moved there is durable there before its removal here is durable
        states = files.load_all(self.names)
        if of_jobs:
            states = [_without_jump(state) for state in states]
        self.found = Recovery(directory, queue, states, quarantine=quarantine).run(self.names)
        self.log = open_log()
        files.end_standby(self.names)  # before an item is put: what follows a log is cut back to it
        self.journal = Journal(
            directory,
            queue,
            self.found,
            segment_bytes=segment_bytes,
            randomness=os.urandom,
            archive=self.archive,
            quarantine=quarantine,
            exclusive=self.syncing,
        )
        self._is_open = True

    def _check_apart(self, archive: Directory) -> None:
        """Raise ``ValueError`` if the archive is the folder of a queue of this name.

        In the queue's own folder, each segment would count as archived already, and would be deleted. In the folder of
        another queue of the same name, that queue could not tell its segments from these. Each of these folders has the
        lock file; this queue's own lock file is there by now.
        """
        queue = self.files.queue
        try:
            archive.open(file_names.lock_name(queue)).close()
        except FileNotFoundError:
            return
        raise ValueError(f"archive_dir must not be where a queue named {queue!r} lives: {archive.path}")

    def check_there(self) -> None:
        """Raise ``FileNotFoundError`` if somebody has deleted the lock file or the active segment: then another process
        may have opened the queue, or what is put goes into a file that nobody will find. Call under ``syncing``.
        """
        directory, queue = self.files.directory, self.files.queue
        if self._lock is not None and not self._lock.is_current():
            raise _deleted(directory, file_names.lock_name(queue), "another process may have opened the queue")
        segment = self.journal.tip()[0]
        if segment is None:
            return
        for name in (segment.name, file_names.lasting_name(segment.name)):  # a sync that was interrupted has renamed it
            with suppress(FileNotFoundError):
                directory.status(name)
                return
        raise _deleted(directory, segment.name, "what was put into it is gone")

    def save_mark(self, tail_id: int) -> None:
        """Save the tail in the mark, by which the next opening sees that items are missing.

        On a full disk without room for the mark, the old mark stays.
        """
        if tail_id == self.found.tail_id:
            return
        files, journal = self.files, self.journal
        mark = Recovered(queue_id=journal.queue_id, tail_id=tail_id)
        try:
            write_mark(files.directory, files.queue, mark, journal.durable_id)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            _logging.warning("there is no room for the mark of queue %s, so the old mark stays: %s", files.queue, error)

    def keep_name(self) -> None:
        """The queue is being erased: no sync renames the active segment from here on."""
        with self.syncing:
            self.journal.keep_name()

    def _abandon_journal(self) -> None:
        if self._is_open:
            with self.syncing:  # not while it is being synced
                self.journal.abandon()

    def release(self, rest: ExitStack) -> None:
        """Add the release of everything to ``rest``: the journal goes before the lock (R25). May be repeated."""
        rest.callback(self.files.directory.close)
        if self._lock is not None:
            rest.callback(self._lock.release)
        if self.archive is not None:
            rest.callback(self.archive.close)
        rest.callback(self._abandon_journal)

    def abandon(self) -> None:
        """In a forked child: abandon everything, as it belongs to the parent."""
        self.journal.abandon()
        if self._lock is not None:
            self._lock.abandon()
        self.files.directory.close()


def _deleted(directory: Directory, name: str, so: str) -> FileNotFoundError:
    path = f"{directory.path}/{name}"
    return FileNotFoundError(errno.ENOENT, f"{name} was deleted while the queue was open: {so}", path)


def _without_jump(state: Checkpoint) -> Checkpoint:
    """Of a work queue: its mark without the ids that a restore keeps used, since a FENCE says that they may have been
    given out. These are ids of jobs. Those of records are known to nobody, and a work queue has a byte for each.
    """
    is_far = state.flags & FLAG_MARK and state.head - state.watermark >= FARTHEST
    return state._replace(head=state.watermark) if is_far else state
