"""``Queues``: all queues of a server by name, what clients do with them, and the end of a turn.

Everything here runs on the thread of the loop, but the saving of checkpoints (``_save``), on a thread of its own.

A turn ends in this order (``commit``), before the replies of the turn are sent:
1. Items go to those who wait in line for them.
2. What plain gets have taken is committed, unless the client is gone: then it comes back, and goes to the next one.
3. Journals whose ``sync_journal`` is 0 are synced, each once.
4. The turn's commits are noted in the log of acknowledgements; it is synced if a queue with ``sync_journal`` 0 has one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue, KestrelError, QueueClosed, queue_names
from kestrelpy import inspect as inspect_queue
from kestrelpy._disk.interface import NO_ROOM
from kestrelpy._disk.real import RealDisk
from kestrelpy.server.kestrel import names
from kestrelpy.server.kestrel.ack_log import ALL, AckLog, Acks, Dropped
from kestrelpy.server.kestrel.ack_log import NAME as ACKS_NAME
from kestrelpy.server.kestrel.journal import OWN_READER, SharedJournal
from kestrelpy.server.kestrel.listing import ListedDisk
from kestrelpy.server.kestrel.queue import OpenRead, ServedQueue

if TYPE_CHECKING:
    from kestrelpy import Clock, Item
    from kestrelpy._disk.interface import Disk
    from kestrelpy.clock import Timer
    from kestrelpy.server._connection import Connection
    from kestrelpy.server._rounds import Rounds
    from kestrelpy.server.kestrel.config import Config, QueueConfig

__all__ = ["Queues", "TooManyQueues"]

SAVE_SECONDS = 5.0
"""How often the readers' checkpoints are saved, so that the log of acknowledgements stays short."""
SAVE_RECORDS = 100_000
"""... and after how many records at the latest."""
SWEEP_SLICE = 200
"""How many queues one step of the expiration timer looks at, before clients are served."""

OffLoop = Callable[[Callable[[], None], Callable[[BaseException | None], None]], None]
"""Makes the first call on another thread, and then the second on the loop's, with the error of the first, if any."""

_logger = logging.getLogger("kestrelpy.server")


class TooManyQueues(Exception):
    """There are ``max_queues`` already."""


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
    ) -> None:
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
        self._written: dict[JournaledQueue, None] = {}
        self.numbered: dict[int, OpenRead] = {}
        """The open reads of thrift's clients, by number."""
        self.last_number = 0
        self._plain: list[tuple[Item, ServedQueue, Connection]] = []
        self._acks: AckLog | None = None
        self._noted: dict[tuple[str, str], list[int]] = {}
        self._noted_must_be_durable = False
        self._in_memory: set[JournaledQueue] = set()
        self.synced_each_turn: set[JournaledQueue] = set()
        """The queues of the library whose changes are on disk before they are acknowledged."""
        self._unsaved: dict[JournaledQueue, None] = {}
        self._is_saving = False
        self._save_timer: Timer | None = None
        self._last_record = self._saved_record = 0
        self.is_ending = False
        """The server ends: open reads are unread at its next start, and count as no aborts."""
        self._is_closed = False
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
        self._acks = AckLog(self.directory, self._disk_clock, self._disk)
        try:
            done, dropped = self._acks.read()
            self._finish_deletions(dropped)
            there = set(queue_names(self.directory, disk=self._disk)) - {ACKS_NAME}
            for library_name in sorted(there):
                name = names.original_name(library_name)
                if name is not None and b"+" not in name:  # else it is a side queue, of which its fan-out knows
                    self._restore(library_name, name)
            for queue in list(self.by_name.values()):
                if b"+" in queue.name and self.side_name(queue.name) in there:
                    self.journal_of(queue).open_side(queue)
            self._apply_acks(done)
            for queue in self.by_name.values():
                queue.start_counting()
        except BaseException:
            self.close()
            raise
        finally:
            self._disk.stop()

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
                journal = self.open_journal(library_name, names.original_name(library_name) or b"")
                self._in_memory.discard(journal)
                self.synced_each_turn.discard(journal)
                with contextlib.closing(journal):
                    if reader == ALL:
                        journal.erase()
                    else:
                        journal.drop_reader(reader)

    def _apply_acks(self, done: Acks) -> None:
        """Commit what the log says was acknowledged, and save that: rule 3 of ``ack_log``."""
        assert self._acks is not None
        opened = {queue.name: queue for queue in self._open_journals()}
        for (library_name, reader_name), ids in done.items():
            journal = opened.get(library_name)
            if journal is None:
                continue
            reader = journal.readers.get(reader_name)
            if reader is None and not reader_name:  # it was renamed since
                reader = journal.readers.get(OWN_READER)
            if reader is not None:
                reader.discard(sorted(ids))
        for journal in opened.values():
            if any(key[0] == journal.name for key in done):
                journal.checkpoint(durable=True)
        self._saved_record = self._last_record = self._acks.last
        self._acks.drop_through(self._last_record)

    def _open_journals(self) -> list[JournaledQueue]:
        shared = [journal.queue for journal in self._journals.values()]
        sides = [queue.side for queue in self.by_name.values()]
        return [each for each in [*shared, *sides] if each is not None]

    def open_journal(self, library_name: str, name: bytes) -> JournaledQueue:
        """Open, or make, a queue of the library, with the options of the queue ``name``."""
        config = self.config.for_queue(name)
        is_on_disk = self.directory is not None and config.keep_journal
        if is_on_disk and self._acks is not None:
            self._acks.note_make(library_name, ALL)
        journal = JournaledQueue(
            self.directory if self.directory is not None and is_on_disk else "memory",
            library_name,
            sync="never" if config.sync_journal == 0 else config.sync_journal,
            segment_bytes=config.default_journal_size,
            archive_dir=config.archive_dir if is_on_disk else None,
            checkpoint_interval=60.0,
            inbox_interval=None,
            journaled=is_on_disk,
            clock=self._disk_clock,
            disk=self._disk,
        )
        if not is_on_disk:
            self._in_memory.add(journal)
        elif config.sync_journal == 0:
            self.synced_each_turn.add(journal)
        return journal

    def close(self) -> None:
        """Close all queues, whatever some of them raise; raises the last error. May be repeated, after an interrupt."""
        self._is_closed = True
        if self._save_timer is not None:
            self._save_timer.cancel()
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
            if self._acks is not None and self._last_record > self._saved_record and not self._acks.closed:
                self._acks.drop_through(self._last_record)  # all have saved their positions

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
        except BaseException:
            self.by_name.pop(name, None)
            journal.children.pop(name, None)
            raise
        return queue

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
        """Put an item that another queue gave up: it is no client's, and does not count. Raises nothing."""
        total = self.total_items
        try:
            return self.add(name, data, None)
        except (KestrelError, OSError, TooManyQueues):
            return False
        finally:
            self.total_items = total

    def wants(self, name: bytes, size: int) -> bool:
        """Whether a body of that size can be taken, as far as is known before it arrives."""
        alias = self.aliases.get(name)
        if alias is not None:
            return any(self.wants(target, size) for target in alias.targets)
        config = self.config.for_queue(name)
        limit = config.max_item_size
        if size > config.default_journal_size or (limit is not None and size > limit):
            return False
        queue = self.by_name.get(name)
        return queue is None or size <= self.journal_of(queue).max_item_bytes()

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

    def note_written(self, journal: JournaledQueue) -> None:
        """This queue of the library is to be synced before the turn's replies."""
        self._written[journal] = None
        self.rounds.schedule()

    def count_hit(self) -> None:
        self.hits += 1

    def count_miss(self) -> None:
        self.misses += 1

    def note_ack(self, queue: JournaledQueue, reader: str, item_id: int) -> None:
        """An item of that reader is done: it must not come again after a kill, once this turn's replies are sent."""
        if queue in self._in_memory:
            return
        self._noted.setdefault((queue.name, reader), []).append(item_id)
        self._unsaved[queue] = None
        if queue in self.synced_each_turn:
            self._noted_must_be_durable = True

    # -- the end of a turn ---------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The end of a turn. Raises ``DurabilityUnknown`` if a sync failed."""
        while self._dirty or self._plain:
            while self._dirty:
                self._dirty.popitem()[0].serve()
            plain, self._plain = self._plain, []
            for item, queue, connection in plain:
                self._finish_plain(item, queue, connection)
        if self._written:
            written, self._written = self._written, {}
            for journal in written:
                if not journal.closed:
                    journal.sync()
        if self._noted:
            self._write_acks()

    def _finish_plain(self, item: Item, queue: ServedQueue, connection: Connection) -> None:
        if connection.is_open:
            with contextlib.suppress(QueueClosed):  # the queue was deleted in this turn
                queue.done(item)
        else:
            queue.give_back(item)

    def _write_acks(self) -> None:
        noted, self._noted = self._noted, {}
        must_be_durable, self._noted_must_be_durable = self._noted_must_be_durable, False
        if self._acks is None:
            return
        try:
            self._last_record = self._acks.append(noted)
            if must_be_durable:
                self._acks.sync()
        except OSError as error:  # the disk is full, say: the readers' own checkpoints take no room
            _logger.warning("acknowledgements are saved by checkpoints: %s", error)
            for journal in self._unsaved:
                journal.checkpoint(durable=True)
            self._unsaved.clear()
        if self._save_timer is None:
            self._save_timer = self.clock.call_later(SAVE_SECONDS, self._save)
        elif self._last_record - self._saved_record > SAVE_RECORDS:
            self._save()

    def _save(self) -> None:
        """Save the checkpoints of readers that moved, on another thread, so that the log can forget their records."""
        if self._is_saving or self._acks is None:
            return
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        unsaved, self._unsaved = self._unsaved, {}
        record = self._last_record
        self._is_saving = True
        self._off_loop(partial(_save_all, list(unsaved), self._acks, record), partial(self._saved, unsaved, record))

    def _saved(self, unsaved: dict[JournaledQueue, None], record: int, error: BaseException | None) -> None:
        self._is_saving = False
        if error is None:
            self._saved_record = record
            if self._acks is not None:
                self._acks.forget_drops(record)
        else:
            _logger.warning("checkpoints could not be saved, and are saved later: %s", error)
            self._unsaved |= unsaved
        if self._unsaved and self._save_timer is None and not self._is_closed:
            self._save_timer = self.clock.call_later(SAVE_SECONDS, self._save)

    # -- deleting ------------------------------------------------------------------------------------------------------

    def delete(self, queue: ServedQueue) -> None:
        """Delete a queue. Those in its line get nothing, its open reads are forgotten."""
        queue.dismiss_all()
        for read in list(queue.reads):
            queue.forget(read)
        self._plain = [each for each in self._plain if each[1] is not queue]
        self._dirty.pop(queue, None)
        journal = self.journal_of(queue)
        journal.delete(queue)
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
        if self._acks is None or journal in self._in_memory:
            return
        journal.checkpoint(durable=True)  # what the log says of its items is void from here on
        for key in [key for key in self._noted if key[0] == journal.name and reader in (ALL, key[1])]:
            del self._noted[key]
        if reader == ALL:
            self._unsaved.pop(journal, None)
        try:
            self._acks.note_drop(journal.name, reader)
        except OSError:  # the disk is full, say: without records, there is nothing to say about them
            _save_all(list(self._unsaved), self._acks, self._last_record)

    # -- time and configuration ----------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """A round of the expiration timer: drop expired items, delete queues older than ``max_queue_age``."""
        self._sweep_some(iter(list(self.by_name.values())))

    def _sweep_some(self, queues: Iterator[ServedQueue]) -> None:
        if self._is_closed:
            return
        some = list(islice(queues, SWEEP_SLICE))
        now = self.clock.monotonic()
        for queue in some:
            if self.by_name.get(queue.name) is not queue:
                continue
            try:
                queue.flush_expired()
                age = queue.config.max_queue_age
                if age is not None and now - queue.made_at > age and not (queue.items or queue.reads or queue.line):
                    self.delete(queue)
                    self.expires += 1
            except (KestrelError, OSError) as error:
                self.trouble(queue, error)
        if some:
            self.clock.call_later(0, partial(self._sweep_some, queues))

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

    def trouble(self, queue: ServedQueue, error: BaseException) -> bytes:
        """Log that a queue could not do what was asked. Returns ``SERVER_ERROR``."""
        _logger.error("queue %r: %s", queue.name, error, exc_info=not isinstance(error, OSError | KestrelError))
        return b"SERVER_ERROR\r\n"


def _save_all(journals: list[JournaledQueue], acks: AckLog, record: int) -> None:
    for journal in journals:
        try:
            journal.checkpoint(durable=True)
        except QueueClosed:
            continue
    acks.drop_through(record)


def _later(name: bytes, old: QueueConfig, new: QueueConfig) -> list[str]:
    from kestrelpy.server.kestrel.config import changes_at_next_start

    return [f"{name!r}: {key} changes at the next start" for key in changes_at_next_start(old, new)]
