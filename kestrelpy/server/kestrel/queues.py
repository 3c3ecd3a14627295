"""``Queues``: all queues of a server by name, what clients do with them, and the end of a turn.

Everything here runs on the thread of the loop. A turn ends in this order (``commit``), before its replies are sent:
1. Items go to those who wait in line for them. What plain gets have taken for clients that are gone meanwhile comes
   back, and goes to the next one.
2. Journals whose ``sync_journal`` is 0 are synced, each once.
3. What is done is written to the log of acknowledgements, which is synced if a queue with ``sync_journal`` 0 is among
   it.
4. What plain gets have taken is committed. If 2 or 3 has failed, it comes back instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from kestrelpy import JournaledQueue, KestrelError, QueueClosed, WrongKind, queue_names
from kestrelpy import inspect as inspect_queue
from kestrelpy._disk.interface import NO_ROOM
from kestrelpy._disk.real import RealDisk
from kestrelpy.server.kestrel import names
from kestrelpy.server.kestrel.ack_log import ALL, AckLog, Acks, Dropped
from kestrelpy.server.kestrel.ack_log import NAME as ACKS_NAME
from kestrelpy.server.kestrel.acknowledgements import Acknowledgements, OffLoop
from kestrelpy.server.kestrel.config import ConfigError
from kestrelpy.server.kestrel.journal import OWN_READER, SharedJournal
from kestrelpy.server.kestrel.listing import ListedDisk
from kestrelpy.server.kestrel.queue import OpenRead, ServedQueue

if TYPE_CHECKING:
    from kestrelpy import Clock, Item
    from kestrelpy._disk.interface import Disk
    from kestrelpy.server._connection import Connection
    from kestrelpy.server._rounds import Rounds
    from kestrelpy.server.kestrel.config import Config, QueueConfig

__all__ = ["Queues", "TooManyQueues"]

DESCRIPTORS_OF_A_JOURNAL = 4
"""How many files a queue of the library has open, besides one for each of its readers."""
SWEEP_SLICE = 200
"""How many queues one step of the expiration timer looks at, before clients are served."""

_logger = logging.getLogger("kestrelpy.server")


class TooManyQueues(Exception):
    """There are ``max_queues`` already, or as many files are open as may be."""


class Alias:
    """An alias: what it stands for, and its figures."""

    def __init__(self, name: bytes, targets: tuple[bytes, ...]) -> None:
        self.name = name
        self.targets = targets
        self.put_items = 0
        self.put_bytes = 0


class Queues:
    """The queues of one server. ``directory``: ``None`` for queues in memory. ``open`` reads what is on disk.

    ``clock`` runs its timers in the loop; ``disk_clock`` runs the syncs and checkpoints of the queues elsewhere.
    """

    def __init__(
        self,
        directory: str | None,
        config: Config,
        off_loop: OffLoop,
        rounds: Rounds,
        clock: Clock,
        disk_clock: Clock,
        disk: Disk | None = None,
        on_corruption: Literal["raise", "quarantine"] = "raise",
    ) -> None:
        self._on_corruption = on_corruption
        self.directory = directory
        self.config = config
        self._off_loop = off_loop
        self.rounds = rounds
        self.clock = clock
        self._disk_clock = disk_clock
        self._disk = ListedDisk(disk if disk is not None else RealDisk())
        self.by_name: dict[bytes, ServedQueue] = {}
        self.aliases: dict[bytes, Alias] = {}
        self._journals: dict[bytes, SharedJournal] = {}
        self._dirty: dict[ServedQueue, None] = {}
        self._woken_later: dict[ServedQueue, None] = {}
        self._written: dict[JournaledQueue, None] = {}
        self.numbered: dict[int, OpenRead] = {}
        """The open reads of thrift's clients, by number."""
        self.last_number = clock.time_ns() // 1_000_000 << 20
        """Not from 1: a client that confirms a read of an earlier life of the server must not hit another's."""
        self._plain: list[tuple[Item, ServedQueue, Connection]] = []
        self._acks: Acknowledgements | None = None
        self._in_memory: set[JournaledQueue] = set()
        self._on_disk: set[JournaledQueue] = set()
        self.has_descriptors: Callable[[int], bool] = lambda _wanted: True
        """Whether so many more files may be open. Asked once the start is over."""
        self.synced_each_turn: set[JournaledQueue] = set()
        """The queues of the library whose changes are on disk before they are acknowledged."""
        self.is_ending = False
        """The server ends: open reads are unread at its next start, and count as no aborts."""
        self._is_closed = False
        self._sides: set[str] = set()
        """The side queues that were on disk at the start, and that no fan-out has."""
        self._sweep: Iterator[None] | None = None
        """The round of the expiration timer that is under way."""
        # figures
        self.creates = self.deletes = self.expires = 0
        self.total_items = 0
        self.gets = self.sets = self.peeks = 0
        self.hits = self.misses = 0

    def _check(self) -> None:
        for name, queue in self.by_name.items():
            assert queue.name == name
            queue._check()
        for journal in self._journals.values():
            journal._check()
        for number, read in self.numbered.items():
            assert read.number == number
            assert read in read.queue.reads

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open all queues that are on disk. Raises what opening a queue raises; ``QueueLocked`` for another server."""
        self._set_aliases()
        if self.directory is None:
            return
        log = AckLog(self.directory, self._disk_clock, self._disk, self._on_corruption)
        self._acks = Acknowledgements(log, self.clock, self._off_loop)
        try:
            self.check_archives(self.config)
            done, dropped = log.read()
            self._finish_deletions(dropped)
            there = set(queue_names(self.directory, disk=self._disk)) - {ACKS_NAME}
            self._restore_all(there)
            self._apply_acks(done, there)
            log.drop_through(log.last)
            for queue in self.by_name.values():
                queue.start_counting()
        except BaseException:
            self.close()
            raise
        finally:
            self._disk.stop()

    def check_archives(self, config: Config) -> None:
        """Raise ``ConfigError`` if an archive is the folder of the queues. There, each segment would seem archived."""
        for path in config.archive_dirs() if self._acks is not None else ():
            try:
                is_of_queues = ACKS_NAME in queue_names(path, disk=self._disk)
            except OSError:  # it is made later, or each put tells
                continue
            if is_of_queues:
                raise ConfigError(f"archive_dir: {path} is a folder of queues")

    def _restore_all(self, there: set[str]) -> None:
        for library_name in sorted(there):
            name = names.original_name(library_name)
            if name is None or b"+" in name:  # it is a side queue, of which its fan-out knows
                self._sides.add(library_name)
            else:
                try:
                    self._restore(library_name, name)
                except WrongKind as error:
                    _logger.warning("a queue is left alone, and not served: %s", error)
        for queue in list(self.by_name.values()):
            self._find_side(queue)

    def _find_side(self, queue: ServedQueue) -> None:
        """Open the side queue of a fan-out, if it was on disk when the server began."""
        if self._sides and b"+" in queue.name and self.side_name(queue.name) in self._sides:
            self._sides.discard(self.side_name(queue.name))
            self.journal_of(queue).open_side(queue)

    def _restore(self, library_name: str, name: bytes) -> None:
        assert self.directory is not None
        inspected = inspect_queue(self.directory, library_name, disk=self._disk)
        readers = [reader.name for reader in inspected.readers]
        journal = self._journal(name)
        journal.restore(self.open_journal(library_name, name))  # from here on, closing the journal closes it
        if OWN_READER in readers:  # killed while the default reader became this one, the server has left both
            readers = [reader for reader in readers if reader]
        if not readers:  # the server was killed between the journal and its first reader: it has no item either
            readers = [""]
        for reader in readers:
            if reader in ("", OWN_READER):
                queue = journal.own = self._new(name, journal)
            else:
                part = names.original_name(reader)
                if part is None:
                    _logger.warning(
                        "reader %s+%s is no fan-out of this server, and is left alone", library_name, reader
                    )
                    continue
                queue = self._new(name + b"+" + part, journal)
                journal.children[queue.name] = queue
            try:
                journal.restore_reader(queue, reader)
            except OSError as error:  # only a reader without a checkpoint takes room
                if error.errno not in NO_ROOM:
                    raise
                _logger.warning("queue %r is opened when there is room on the disk", queue.name)
                if not inspected.put_items:  # its first put found no room for all of its files
                    self.delete(queue)

    def _finish_deletions(self, dropped: Dropped) -> None:
        """Delete what was being deleted when the server died."""
        assert self.directory is not None
        there = queue_names(self.directory, disk=self._disk)
        for library_name, reader in dropped:
            if library_name in there:
                with contextlib.closing(self._open_unserved(library_name)) as journal:
                    if reader == ALL:
                        journal.erase()
                    else:
                        journal.drop_reader(reader)

    def _apply_acks(self, done: Acks, there: set[str]) -> None:
        """Commit what the log says was acknowledged, and save that: rule 3 of ``ack_log``."""
        assert self.directory is not None
        opened = {queue.name: queue for queue in self._open_journals() if queue not in self._in_memory}
        by_queue: dict[str, dict[str, set[int]]] = {}
        for (library_name, reader), ids in done.items():
            by_queue.setdefault(library_name, {})[reader] = ids
        for library_name, readers in by_queue.items():
            journal = opened.get(library_name)
            if journal is not None:
                _discard(journal, readers)
            elif library_name in there:  # it is not served: keep_journal is false now, or it belonged to a fan-out
                inspected = inspect_queue(self.directory, library_name, disk=self._disk)
                with contextlib.closing(self._open_unserved(library_name)) as journal:
                    for saved in inspected.readers:
                        journal.reader(saved.name)
                    _discard(journal, readers)

    def _open_journals(self) -> list[JournaledQueue]:
        shared = [journal.queue for journal in self._journals.values()]
        sides = [queue.side for queue in self.by_name.values()]
        return [each for each in [*shared, *sides] if each is not None]

    def open_journal(self, library_name: str, name: bytes) -> JournaledQueue:
        """Open, or make, a queue of the library, with the options of the queue ``name``."""
        config = self.config.for_queue(name)
        if self.directory is None or not config.keep_journal:
            journal = self._open("memory", library_name, config)
            self._in_memory.add(journal)
            return journal
        if not self.has_descriptors(DESCRIPTORS_OF_A_JOURNAL):
            raise TooManyQueues
        if self._acks is not None:
            self._acks.note_make(library_name, ALL)
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
            clock=self._disk_clock,
            disk=self._disk,
        )

    def close(self) -> None:
        """Close all queues, whatever some of them raise; raises the last error. May be repeated, after an interrupt."""
        self._is_closed = True
        if self._acks is not None:
            self._acks.stop()
        for queue in self.by_name.values():
            for read in queue.reads:
                read.stop_timer()
            queue.reads.clear()
        with contextlib.ExitStack() as rest:
            if self._acks is not None:
                rest.callback(self._acks.close)
            with contextlib.ExitStack() as journals:
                for journal in self._journals.values():
                    journals.callback(journal.close)
            if self._acks is not None:
                self._acks.forget()

    # -- names ---------------------------------------------------------------------------------------------------------

    def reader_name(self, name: bytes) -> str:
        """The library's name of a fan-out's reader."""
        child = names.split(name)[1]
        assert child is not None
        return names.library_name(child)

    def side_name(self, name: bytes) -> str:
        """The library's name of a fan-out's side queue."""
        return names.side_name(name)

    def find(self, name: bytes) -> ServedQueue | None:
        """The queue of that name, if it is there and no alias hides it."""
        return None if name in self.aliases else self.by_name.get(name)

    def get(self, name: bytes) -> ServedQueue | None:
        """The queue of that name; it is made if need be. ``None`` for an alias. Raises ``TooManyQueues``."""
        if name in self.aliases:
            return None
        queue = self.by_name.get(name)
        return queue if queue is not None else self._make(name)

    def _make(self, name: bytes) -> ServedQueue:
        if len(self.by_name) >= self.config.server.max_queues:
            raise TooManyQueues
        parent, child = names.split(name)
        journal = self._journal(parent)
        queue = self._new(name, journal)
        try:
            if child is None:
                journal.own = queue
                journal.changed()
            else:
                journal.make_child(queue)
                self._find_side(queue)
        except BaseException:
            self.by_name.pop(name, None)
            self.creates -= 1
            journal.children.pop(name, None)
            if not journal.members():  # nor was there anything before
                self._journals.pop(parent, None)
                journal.discard()
            raise
        return queue

    @property
    def descriptors(self) -> int:
        """How many files the queues have open, or will have."""
        return DESCRIPTORS_OF_A_JOURNAL * len(self._on_disk) + len(self.by_name)

    def _journal(self, parent: bytes) -> SharedJournal:
        journal = self._journals.get(parent)
        if journal is None:
            journal = self._journals[parent] = SharedJournal(parent, names.library_name(parent), self)
        return journal

    def journal_of(self, queue: ServedQueue) -> SharedJournal:
        """What the queue and its fan-outs, or its parent, share."""
        return self._journals[queue.parent]

    def _new(self, name: bytes, journal: SharedJournal) -> ServedQueue:
        queue = self.by_name[name] = ServedQueue(name, self.config.for_queue(name), journal, self)
        self.creates += 1
        return queue

    def _set_aliases(self) -> None:
        old = self.aliases
        self.aliases = {
            name: old[name] if name in old and old[name].targets == targets else Alias(name, targets)
            for name, targets in self.config.aliases.items()
        }

    # -- putting -------------------------------------------------------------------------------------------------------

    def add(self, name: bytes, data: bytes, expires_at_ms: int | None) -> bool:
        """Put an item, as a client's ``set``. False if it was refused. Raises ``TooManyQueues``, ``OSError``."""
        if name in self.aliases:
            return self._add_to_alias(self.aliases[name], data, expires_at_ms)
        queue = self.by_name.get(name)
        if queue is None:
            queue = self._make(name)
        journal = self._journals[queue.parent]
        if queue is journal.own:
            taken = journal.add(data, expires_at_ms)
            self.total_items += taken * (1 + len(journal.children))
        else:
            taken = journal.add_to_child(queue, data, expires_at_ms)
            self.total_items += taken
        return taken

    def _add_to_alias(self, alias: Alias, data: bytes, expires_at_ms: int | None) -> bool:
        took_all = True
        for target in alias.targets:
            took_all = self.add(target, data, expires_at_ms) and took_all
        alias.put_items += 1
        alias.put_bytes += len(data)
        return took_all

    def move(self, name: bytes, data: bytes) -> bool:
        """Put an item that another queue gave up: it is no client's, and does not count. Raises nothing.

        It is on disk before it is noted that the other queue is done with it.
        """
        total = self.total_items
        try:
            taken = self.add(name, data, None)
        except (KestrelError, OSError, TooManyQueues):
            return False
        finally:
            self.total_items = total
        if taken:
            self._sync_this_turn(name)
        return taken

    def _sync_this_turn(self, name: bytes) -> None:
        alias = self.aliases.get(name)
        for target in () if alias is None else alias.targets:
            self._sync_this_turn(target)
        queue = self.find(name)
        if queue is not None:
            for journal in (self.journal_of(queue).queue, queue.side):
                if journal is not None and journal not in self._in_memory:
                    self.note_written(journal)

    def largest_item(self, name: bytes) -> int:
        """The largest item that can be taken, in bytes, as far as is known before it arrives."""
        alias = self.aliases.get(name)
        if alias is not None:
            return max(self.largest_item(target) for target in alias.targets)
        config = self.config.for_queue(name)
        largest = config.default_journal_size
        if config.max_item_size is not None and config.max_item_size < largest:
            largest = config.max_item_size
        queue = self.by_name.get(name)
        return largest if queue is None else min(largest, self.journal_of(queue).max_item_bytes())

    # -- getting -------------------------------------------------------------------------------------------------------

    def next_item(self, queue: ServedQueue) -> Item | None:
        """Open a read of the next item, unless others are before this client in line."""
        if queue.line:
            queue.serve()
        return queue.take()

    def take_plain(self, queue: ServedQueue, item: Item, connection: Connection) -> None:
        """The item is done when its reply is sent: at the end of this turn."""
        self._plain.append((item, queue, connection))
        self.rounds.schedule()

    def wake(self, queue: ServedQueue) -> None:
        """Items have come: at the end of this turn, they go to those in line."""
        if queue.line:
            self._dirty[queue] = None
            self.rounds.schedule()

    def wake_later(self, queue: ServedQueue) -> None:
        """As ``wake``, in the next turn."""
        if not self._woken_later:
            self.rounds.next_turn(self._wake_now)
        self._woken_later[queue] = None

    def _wake_now(self) -> None:
        later, self._woken_later = self._woken_later, {}
        for queue in later:
            self.wake(queue)

    def note_written(self, journal: JournaledQueue) -> None:
        """This queue of the library is to be synced before the turn's replies."""
        self._written[journal] = None
        self.rounds.schedule()

    def count_hit(self) -> None:
        self.hits += 1

    def count_miss(self) -> None:
        self.misses += 1

    def note_ack(self, journal: JournaledQueue, reader: str, item_id: int) -> None:
        """An item of that reader is done: it must not come again after a kill, once this turn's replies are sent."""
        if self._acks is not None and journal not in self._in_memory:
            self._acks.note(journal, reader, item_id, durable=journal in self.synced_each_turn)
            self.rounds.schedule()

    # -- the end of a turn ---------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The end of a turn. Raises ``DurabilityUnknown`` if a sync failed."""
        self._serve_lines()
        try:
            self._sync_written()
            for item, queue, _ in self._plain:
                queue.note_done(item)
            has_saved = self._acks is None or self._acks.write()
        except BaseException:
            for item, queue, _ in self._take_plain():
                queue.give_back(item)
            raise
        for item, _, connection in self._take_plain():
            try:
                item.commit()
            except QueueClosed:  # the queue was deleted in this turn
                continue
            except KestrelError as error:  # it is in trouble: a sync of its own has failed
                _logger.error("a client gets an error: %s", error)
                connection.take_back_replies()
        if self._acks is not None:
            if not has_saved:
                self._acks.save_now()
            self._acks.save_in_time()

    def _serve_lines(self) -> None:
        while True:
            while self._dirty:
                self._dirty.popitem()[0].serve()
            gone = [each for each in self._plain if not each[2].is_open]
            if not gone:
                return
            self._plain = [each for each in self._plain if each not in gone]
            for item, queue, _ in gone:
                queue.give_back(item)

    def _sync_written(self) -> None:
        written, self._written = self._written, {}
        for journal in written:
            if not journal.closed:
                journal.sync()

    def _take_plain(self) -> list[tuple[Item, ServedQueue, Connection]]:
        plain, self._plain = self._plain, []
        return plain

    # -- deleting ------------------------------------------------------------------------------------------------------

    def delete(self, queue: ServedQueue) -> None:
        """Delete a queue. Those in its line get nothing, its open reads are forgotten."""
        journal = self.journal_of(queue)
        journal.delete(queue)  # this may raise: then the queue stays as it is
        queue.dismiss_all()
        for read in list(queue.reads):
            queue.forget(read)
        self._plain = [each for each in self._plain if each[1] is not queue]
        self._dirty.pop(queue, None)
        self.by_name.pop(queue.name, None)
        self.deletes += 1
        if not journal.members():
            self._journals.pop(journal.name, None)

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
        if self._acks is not None and journal not in self._in_memory:
            self._acks.note_make(journal.name, reader)

    def drop_reader(self, journal: JournaledQueue, reader: str) -> None:
        """Delete a reader of a queue of the library."""
        self._note_drop(journal, reader)
        journal.drop_reader(reader)

    def _note_drop(self, journal: JournaledQueue, reader: str) -> None:
        if self._acks is not None and journal not in self._in_memory:
            self._acks.note_drop(journal, reader)

    # -- time and configuration ----------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """A round of the expiration timer: drop expired items, delete queues older than ``max_queue_age``."""
        if self._sweep is None:
            self._sweep = self._sweep_all(list(self.by_name.values()))
            self._sweep_on()

    def _sweep_on(self) -> None:
        """A slice of the round; the next one when clients were served."""
        if self._sweep is None or self._is_closed:
            return
        try:
            next(self._sweep)
        except StopIteration:
            self._sweep = None
        else:
            self.clock.call_later(0, self._sweep_on)

    def _sweep_all(self, queues: list[ServedQueue]) -> Iterator[None]:
        for number, queue in enumerate(queues, start=1):
            try:
                for dropped in queue.flush_expired():
                    if dropped:
                        yield
                age = queue.config.max_queue_age
                is_old = age is not None and self.clock.monotonic() - queue.made_at > age
                if is_old and not (queue.items or queue.reads or queue.line) and self.by_name.get(queue.name) is queue:
                    self.delete(queue)
                    self.expires += 1
                    yield
            except (KestrelError, OSError) as error:
                _logger.error("queue %r: %s", queue.name, error)
            if not number % SWEEP_SLICE:
                yield

    def reload(self, config: Config) -> list[str]:
        """Use another configuration for all queues. Returns what changes only at the next start."""
        later = []
        old, self.config = self.config, config
        self._set_aliases()
        for queue in self.by_name.values():
            new = config.for_queue(queue.name)
            later += _later(queue.name, old.for_queue(queue.name), new)
            queue.configure(new)
        for journal in self._journals.values():
            journal.changed()
        return later


def _discard(journal: JournaledQueue, done: dict[str, set[int]]) -> None:
    """Commit these ids of these readers, and save that."""
    for name, ids in done.items():
        reader = journal.readers.get(name)
        if reader is None and not name:  # it was renamed since
            reader = journal.readers.get(OWN_READER)
        if reader is not None:
            reader.discard(sorted(ids))
    journal.checkpoint(durable=True)


def _later(name: bytes, old: QueueConfig, new: QueueConfig) -> list[str]:
    from kestrelpy.server.kestrel.config import changes_at_next_start

    return [f"{name!r}: {key} changes at the next start" for key in changes_at_next_start(old, new)]
