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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kestrelpy import KestrelError, QueueClosed, WrongKind
from kestrelpy._disk.interface import NO_ROOM
from kestrelpy.server.kestrel import names
from kestrelpy.server.kestrel.acknowledgements import OffLoop
from kestrelpy.server.kestrel.config import changes_at_next_start
from kestrelpy.server.kestrel.journal import OWN_READER, SharedJournal
from kestrelpy.server.kestrel.queue import OpenRead, ServedQueue
from kestrelpy.server.kestrel.storage import Storage, TooManyQueues

if TYPE_CHECKING:
    from kestrelpy import Clock, Item
    from kestrelpy._disk.interface import Disk
    from kestrelpy.server._connection import Connection
    from kestrelpy.server._rounds import Rounds
    from kestrelpy.server.kestrel.config import Config, QueueConfig

__all__ = ["Queues"]

SWEEP_SLICE = 200
"""How many queues one step of the expiration timer looks at, before clients are served."""

_logger = logging.getLogger("kestrelpy.server")


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
        self.config = config
        self.storage = Storage(directory, config, disk_clock, rounds.schedule, disk, on_corruption)
        self._off_loop = off_loop
        self.rounds = rounds
        self.clock = clock
        self.by_name: dict[bytes, ServedQueue] = {}
        self.aliases: dict[bytes, Alias] = {}
        self._journals: dict[bytes, SharedJournal] = {}
        self._dirty: dict[ServedQueue, None] = {}
        self._woken_later: dict[ServedQueue, None] = {}
        self.numbered: dict[int, OpenRead] = {}
        """The open reads of thrift's clients, by number."""
        self.last_number = clock.time_ns() // 1_000_000 << 20
        """Not from 1: a client that confirms a read of an earlier life of the server must not hit another's."""
        self._plain: list[tuple[Item, ServedQueue, Connection]] = []
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
        storage = self.storage
        if storage.directory is None:
            return
        log = storage.open_log(self._off_loop, self.clock)
        try:
            storage.check_archives(self.config)
            done, dropped = log.read()
            storage.finish_deletions(dropped)
            there = storage.names()
            self._restore_all(there)
            storage.apply_acks(done, there)
            log.drop_through(log.last)
            for queue in self.by_name.values():
                queue.start_counting()
        except BaseException:
            self.close()
            raise
        finally:
            storage.started()

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
        if self._sides and b"+" in queue.name and names.side_name(queue.name) in self._sides:
            self._sides.discard(names.side_name(queue.name))
            self.journal_of(queue).open_side(queue)

    def _restore(self, library_name: str, name: bytes) -> None:
        inspected = self.storage.inspect(library_name)
        readers = [reader.name for reader in inspected.readers]
        journal = self._journal(name)
        journal.restore(self.storage.open(library_name, name))  # from here on, closing the journal closes it
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

    def close(self) -> None:
        """Close all queues, whatever some of them raise; raises the last error. May be repeated, after an interrupt."""
        self._is_closed = True
        acks = self.storage.acks
        if acks is not None:
            acks.stop()
        for queue in self.by_name.values():
            for read in queue.reads:
                read.stop_timer()
            queue.reads.clear()
        with contextlib.ExitStack() as rest:
            if acks is not None:
                rest.callback(acks.close)
            with contextlib.ExitStack() as journals:
                for journal in self._journals.values():
                    journals.callback(journal.close)
            if acks is not None:
                acks.forget()

    # -- names ---------------------------------------------------------------------------------------------------------

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
        """How many files the queues have open, or will have: one for the reader of each."""
        return self.storage.descriptors + len(self.by_name)

    def _journal(self, parent: bytes) -> SharedJournal:
        journal = self._journals.get(parent)
        if journal is None:
            journal = self._journals[parent] = SharedJournal(parent, self.storage, self.wake)
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
                if journal is not None and not self.storage.is_in_memory(journal):
                    self.storage.note_written(journal)

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

    def count_hit(self) -> None:
        self.hits += 1

    def count_miss(self) -> None:
        self.misses += 1

    # -- the end of a turn ---------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The end of a turn. Raises ``DurabilityUnknown`` if a sync failed."""
        self._serve_lines()
        acks = self.storage.acks
        try:
            self.storage.sync_written()
            for item, queue, _ in self._plain:
                queue.note_done(item)
            has_saved = acks is None or acks.write()
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
        if acks is not None:
            if not has_saved:
                acks.save_now()
            acks.save_in_time()

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
        self.storage.config = config
        self._set_aliases()
        for queue in self.by_name.values():
            new = config.for_queue(queue.name)
            later += _later(queue.name, old.for_queue(queue.name), new)
            queue.configure(new)
        for journal in self._journals.values():
            journal.changed()
        return later


def _later(name: bytes, old: QueueConfig, new: QueueConfig) -> list[str]:
    return [f"{name!r}: {key} changes at the next start" for key in changes_at_next_start(old, new)]
