"""``Storage``: the queues of the library under the server's queues, in one folder or in memory, and what is synced.

The thread is the loop's. Each of the server's queues is a reader of a ``SharedJournal``, which opens its queue of the
library here, and says here what is to be on disk, and what is acknowledged, before the turn's replies are sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from kestrelpy import JournaledQueue, queue_names
from kestrelpy import inspect as inspect_queue
from kestrelpy._disk.real import RealDisk
from kestrelpy.server.kestrel import names
from kestrelpy.server.kestrel.ack_log import ALL, AckLog, Acks, Dropped
from kestrelpy.server.kestrel.ack_log import NAME as ACKS_NAME
from kestrelpy.server.kestrel.acknowledgements import Acknowledgements, OffLoop
from kestrelpy.server.kestrel.config import ConfigError
from kestrelpy.server.kestrel.journal import OWN_READER
from kestrelpy.server.kestrel.listing import ListedDisk

if TYPE_CHECKING:
    from kestrelpy import Clock, QueueInspection
    from kestrelpy._disk.interface import Disk
    from kestrelpy.server.kestrel.config import Config, QueueConfig

__all__ = ["Storage", "TooManyQueues"]

DESCRIPTORS_OF_A_JOURNAL = 4
"""How many files a queue of the library has open, besides one for each of its readers."""


class TooManyQueues(Exception):
    """There are ``max_queues`` already, or as many files are open as may be."""


class Storage:
    """The queues of the library of one server. ``directory``: ``None`` for queues in memory.

    ``clock`` runs the queues' syncs and checkpoints, on a thread of the library. ``schedule`` makes the turn end.
    """

    def __init__(
        self,
        directory: str | None,
        config: Config,
        clock: Clock,
        schedule: Callable[[], None],
        disk: Disk | None = None,
        on_corruption: Literal["raise", "quarantine"] = "raise",
    ) -> None:
        self.directory = directory
        self.config = config
        self._clock = clock
        self._schedule = schedule
        self._disk = ListedDisk(disk if disk is not None else RealDisk())
        self._on_corruption = on_corruption
        self.acks: Acknowledgements | None = None
        self._written: dict[JournaledQueue, None] = {}
        self._in_memory: set[JournaledQueue] = set()
        self._on_disk: set[JournaledQueue] = set()
        self.synced_each_turn: set[JournaledQueue] = set()
        """The queues whose changes are on disk before they are acknowledged."""
        self.has_descriptors: Callable[[int], bool] = lambda _wanted: True
        """Whether so many more files may be open. Asked once the start is over."""

    # -- the start -----------------------------------------------------------------------------------------------------

    def open_log(self, off_loop: OffLoop, timers: Clock) -> AckLog:
        """Open the log of acknowledgements; ``timers`` run on the loop. Raises ``QueueLocked`` for another server."""
        assert self.directory is not None
        log = AckLog(self.directory, self._clock, self._disk, self._on_corruption)
        self.acks = Acknowledgements(log, timers, off_loop)
        return log

    def names(self) -> set[str]:
        """The names of the queues on disk, as the library knows them."""
        assert self.directory is not None
        return set(queue_names(self.directory, disk=self._disk)) - {ACKS_NAME}

    def inspect(self, library_name: str) -> QueueInspection:
        """What is on disk of this queue."""
        assert self.directory is not None
        return inspect_queue(self.directory, library_name, disk=self._disk)

    def started(self) -> None:
        """The start is over: look at the folder itself again, and not at what was read of it."""
        self._disk.stop()

    def check_archives(self, config: Config) -> None:
        """Raise ``ConfigError`` if an archive is the folder of the queues. There, each segment would seem archived."""
        for path in config.archive_dirs() if self.acks is not None else ():
            try:
                is_of_queues = ACKS_NAME in queue_names(path, disk=self._disk)
            except OSError:  # it is made later, or each put tells
                continue
            if is_of_queues:
                raise ConfigError(f"archive_dir: {path} is a folder of queues")

    def finish_deletions(self, dropped: Dropped) -> None:
        """Delete what was being deleted when the server died."""
        there = self.names()
        for library_name, reader in dropped:
            if library_name in there:
                with contextlib.closing(self._open_unserved(library_name)) as journal:
                    if reader == ALL:
                        journal.erase()
                    else:
                        journal.drop_reader(reader)

    def apply_acks(self, done: Acks, there: set[str]) -> None:
        """Commit what the log says was acknowledged, and save that: rule 3 of ``ack_log``."""
        opened = {journal.name: journal for journal in self._on_disk}
        by_queue: dict[str, dict[str, set[int]]] = {}
        for (library_name, reader), ids in done.items():
            by_queue.setdefault(library_name, {})[reader] = ids
        for library_name, readers in by_queue.items():
            journal = opened.get(library_name)
            if journal is not None:
                _discard(journal, readers)
            elif library_name in there:  # it is not served: keep_journal is false now, or it belonged to a fan-out
                with contextlib.closing(self._open_unserved(library_name)) as journal:
                    for saved in self.inspect(library_name).readers:
                        journal.reader(saved.name)
                    _discard(journal, readers)

    # -- queues and readers --------------------------------------------------------------------------------------------

    def open(self, library_name: str, name: bytes) -> JournaledQueue:
        """Open, or make, a queue of the library, with the options of the server's queue ``name``."""
        config = self.config.for_queue(name)
        if self.directory is None or not config.keep_journal:
            journal = self._open("memory", library_name, config)
            self._in_memory.add(journal)
            return journal
        if not self.has_descriptors(DESCRIPTORS_OF_A_JOURNAL):
            raise TooManyQueues
        if self.acks is not None:
            self.acks.note_make(library_name, ALL)
        journal = self._open(self.directory, library_name, config)
        self._on_disk.add(journal)
        if config.sync_journal == 0:
            self.synced_each_turn.add(journal)
        return journal

    def _open_unserved(self, library_name: str) -> JournaledQueue:
        """A queue on disk that no client is served from."""
        assert self.directory is not None
        return self._open(self.directory, library_name, self.config.for_queue(names.original_name(library_name) or b""))

    def _open(self, directory: str, library_name: str, config: QueueConfig) -> JournaledQueue:
        is_on_disk = directory == self.directory
        return JournaledQueue(
            directory,
            library_name,
            sync="never" if config.sync_journal == 0 else config.sync_journal,
            segment_bytes=config.default_journal_size,
            archive_dir=config.archive_dir if is_on_disk else None,
            checkpoint_interval=60.0,
            inbox_interval=None,
            journaled=is_on_disk,
            on_corruption=self._on_corruption,
            clock=self._clock,
            disk=self._disk,
        )

    def is_in_memory(self, journal: JournaledQueue) -> bool:
        return journal in self._in_memory

    @property
    def descriptors(self) -> int:
        """How many files the queues have open, without those of their readers."""
        return DESCRIPTORS_OF_A_JOURNAL * len(self._on_disk)

    def erase(self, journal: JournaledQueue) -> None:
        """Delete a queue of the library."""
        self._note_drop(journal, ALL)
        self._written.pop(journal, None)
        journal.erase()
        self._in_memory.discard(journal)
        self._on_disk.discard(journal)
        self.synced_each_turn.discard(journal)

    def note_reader(self, journal: JournaledQueue, reader: str) -> None:
        """A reader of this queue of the library is about to be opened or made."""
        if self.acks is not None and journal not in self._in_memory:
            self.acks.note_make(journal.name, reader)

    def drop_reader(self, journal: JournaledQueue, reader: str) -> None:
        """Delete a reader of a queue of the library."""
        self._note_drop(journal, reader)
        journal.drop_reader(reader)

    def _note_drop(self, journal: JournaledQueue, reader: str) -> None:
        if self.acks is not None and journal not in self._in_memory:
            self.acks.note_drop(journal, reader)

    # -- a turn --------------------------------------------------------------------------------------------------------

    def note_written(self, journal: JournaledQueue) -> None:
        """This queue of the library is to be synced before the turn's replies."""
        self._written[journal] = None
        self._schedule()

    def note_ack(self, journal: JournaledQueue, reader: str, item_id: int) -> None:
        """An item of that reader is done: it must not come again after a kill, once this turn's replies are sent."""
        if self.acks is not None and journal not in self._in_memory:
            self.acks.note(journal, reader, item_id, durable=journal in self.synced_each_turn)
            self._schedule()

    def sync_written(self) -> None:
        """Sync what was written in this turn, where a reply says that it is on disk. Raises ``DurabilityUnknown``."""
        written, self._written = self._written, {}
        for journal in written:
            if not journal.closed:
                journal.sync()


def _discard(journal: JournaledQueue, done: dict[str, set[int]]) -> None:
    """Commit these ids of these readers, and save that."""
    for name, ids in done.items():
        reader = journal.readers.get(name)
        if reader is None and not name:  # it was renamed since
            reader = journal.readers.get(OWN_READER)
        if reader is not None:
            reader.discard(sorted(ids))
    journal.checkpoint(durable=True)
