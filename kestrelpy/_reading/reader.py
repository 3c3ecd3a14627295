"""``Reader``: the calls of one reader that users make. Open reads, commit, abort, seek, figures.

Its items are in a ``Backlog``. A ``Dispatcher`` hands them out; a ``Checkpointer`` saves the reader's position.

NOTE ON LOCKING: the lock is the backlog's (R in docs/locking.md). A figure that is one number is read without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from operator import is_
from typing import TYPE_CHECKING, cast

from kestrelpy._checks import check_timeout
from kestrelpy._journal.segment import ITEM_COST
from kestrelpy._reading.burial import check_dead_letter
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.consuming import Consuming
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.retries import Retries, is_plain
from kestrelpy.config import ReaderConfig, ReaderStats, check_delay
from kestrelpy.errors import CorruptJournal, KestrelError, QueueEmpty, UnknownItem, copy_of
from kestrelpy.item import Item, V, id_of, new_item

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy._reading.progress import Progress
    from kestrelpy._reading.source import Source

__all__ = ["Reader"]


class Reader(Consuming[V]):
    """A durable consumer of a queue, with its own cursor. Made by ``JournaledQueue.reader`` or ``open_reader``, never
    directly. An open read is an unacknowledged delivery: a lease without a deadline. ``commit`` acknowledges it.

    A context manager, also of asyncio, that closes the reader. ``for item in reader`` gets items until it is closed.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync of the queue
    has failed, ``ForkedQueue`` in a forked child, ``CorruptJournal`` if it has to read what is damaged on disk,
    ``OSError`` if the system refuses a file, ``TypeError`` for an argument that is neither an item nor an id, and, of a
    queue that is shipped, ``Fenced`` once another owner has it and ``ShipError`` if shipping has failed.
    """

    def __init__(self, source: Source, name: str, config: ReaderConfig, progress: Progress) -> None:
        self._dispatcher = dispatcher = Dispatcher(self, source, name, config, progress)
        self._backlog = dispatcher.backlog
        self._checkpointer = saver = Checkpointer(dispatcher)
        self._retries = Retries(dispatcher, saver.burial)
        self._source = source
        self._committed = self._flushes = 0

    @property
    def name(self) -> str:
        """The reader's name; empty for the default reader."""
        return self._backlog.name

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return self._backlog.full_name

    @property
    def config(self) -> ReaderConfig:
        """The reader's limits and hooks."""
        return self._backlog.config

    # -- getting --------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Item[V]:
        """Open a read of the next item: an aborted one first, else the next unread one.

        Waits in line for up to ``timeout`` seconds of real time (``None``: for ever; ``block=False``: not at all).
        Raises ``QueueEmpty``, ``ValueError`` for a negative timeout, ``CorruptJournal`` if the next item is damaged
        on disk or its segment is missing: ``seek`` past it, or open the queue with ``on_corruption="quarantine"``.
        """
        item = None
        try:
            backlog = self._backlog
            with backlog.lock:
                if backlog.fast and (timeout is None or timeout >= 0 or not block):
                    progress, take = backlog.progress, backlog.take
                    item_id = progress.next_id
                    entry = take(item_id, None)
                    if entry is not None:
                        data, added_ms, expires_ms = entry
                        if expires_ms is None:
                            item = new_item(Item)  # HOT COPY of Item
                            item.id = item_id
                            item.data = data
                            item.added_ms = added_ms
                            item.expires_ms = None
                            item.error_count = 0
                            item._owner = self
                            backlog.opened[item_id] = item
                            progress.next_id = item_id + 1
                            backlog.opened_count += 1
                            return item
                        backlog.ahead[item_id] = entry
        except BaseException as error:
            self._dispatcher.recover(error, [] if item is None else [item.id])
            if isinstance(error, TypeError):
                check_timeout(timeout)  # raises an error that names it
            raise
        return self._dispatcher.get(block, timeout)

    def get_nowait(self) -> Item[V]:
        """``get(block=False)``: raises ``QueueEmpty`` at once if there is no item."""
        return self.get(False)

    def get_future(self, timeout: float | None = None) -> Future[Item[V]]:
        """A future of the next item; never blocks.

        It fails with ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. ``cancel()`` leaves the
        line and loses no item. Raises ``ValueError`` for a negative timeout, and ``RuntimeError`` if a timeout needs
        the maintenance thread and that thread can't be started. Thread-safe.
        """
        return self._dispatcher.get_future(timeout)

    async def aget(self, timeout: float | None = None) -> Item[V]:
        """The next item, for asyncio, from any event loop.

        Raises ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. A task that is cancelled while
        it waits loses no item: an item on its way to the task goes back to its old position. Raises ``RuntimeError`` as
        ``get_future``.
        """
        return await self._dispatcher.aget(timeout)

    def get_many(self, max_items: int, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Item[V]]:
        """Open reads of up to ``max_items`` items: waits for the first as ``get`` does, then takes what is there.

        Waits up to ``timeout`` seconds (``None``: for ever). Stops before the item that would bring the data above
        ``max_bytes``, or where a ``seek`` comes in between, but takes at least one. Raises ``QueueEmpty`` if no item
        came in time, ``ValueError`` for less than one item, and otherwise as ``get``.
        """
        backlog = self._backlog
        if max_items < 1:
            raise ValueError(f"max_items must be at least 1, not {max_items!r}")
        items: list[Item[V]] = []
        expired: list[Item] = []
        first = self.get(True, timeout)
        try:
            items.append(first)
            with backlog.lock:
                if backlog.opened.get(first.id) is first:  # else a seek came in between: what is next is after it
                    backlog.take_more(items, expired, max_items, max_bytes)
            self._dispatcher.after_taking(items[1:], expired)
        except BaseException as error:
            self._dispatcher.recover(error, [first.id, *(item.id for item in items)], expired)
            raise
        return items

    def peek(self, timeout: float | None = 0) -> Item[V]:
        """The next item, without an open read: it can't be committed, and stays where it is.

        Waits up to ``timeout`` seconds (0: not at all; ``None``: for ever). Raises ``QueueEmpty``, ``CorruptJournal``,
        and ``ValueError`` for a negative timeout.
        """
        return self._dispatcher.peek(timeout)

    def peek_future(self, timeout: float | None = None) -> Future[Item[V]]:
        """A future of the next item, without an open read, as of ``peek``; never blocks.

        It fails with ``QueueEmpty`` after ``timeout`` seconds of the queue's clock (``None``: never). Raises as
        ``get_future``.
        """
        return self._dispatcher.peek_future(timeout)

    def discard(self, items: Iterable[Item | int]) -> int:
        """Drop these items (or ids) as far as they are unread or aborted; returns how many. Others are left alone.

        They count as discarded. Cost: O(ids), and two searches of the journal for each run of consecutive ids.
        """
        return self._dispatcher.discard(map(id_of, items))

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front, at most ``limit`` (default: ``max_expire_sweep``); returns how many.

        Only the front is looked at: an expired item after one that has not expired stays until that one is gone.
        """
        return self._dispatcher.discard_expired(limit)

    def evict_waiters(self) -> int:
        """Every waiter gets ``QueueEmpty`` now; returns how many there were."""
        return self._dispatcher.dismiss(QueueEmpty(f"reader {self.full_name}: its waiters were evicted"))

    # -- commit and abort ----------------------------------------------------------------------------------------

    def commit(self, item_or_id: Item | int) -> None:
        """Acknowledge an item: its work is done. In any order, from any thread. Durable with the next checkpoint.

        Raises ``UnknownItem`` if the item is not an open read of this reader.
        """
        backlog = self._backlog
        with backlog.lock:
            opened = backlog.opened
            if type(item_or_id) is int:
                item_id = item_or_id
                item = opened.get(item_id)
                if item is None:
                    raise self._unknown(item_id)
            else:
                item = item_or_id  # type: ignore[assignment]  # mypy does not narrow by type() is
                try:
                    item_id = item.id  # type: ignore[union-attr]
                except AttributeError:
                    item_id = id_of(item_or_id)
                    item = opened.get(item_id)
                    if item is None:
                        raise self._unknown(item_id) from None
                if opened.get(item_id) is not item:
                    raise self._unknown(item_id)
            # HOT COPY of Progress.release. After len() there is no call until the item is done.
            size = len(item.data)  # type: ignore[union-attr]
            progress = backlog.progress
            items, size = progress.released_items + 1, progress.released_bytes + size
            if item_id != progress.head + 1:
                progress.done[item_id] = None
                del opened[item_id]
                progress.released_items, progress.released_bytes = items, size
            else:
                del opened[item_id]
                progress.head, progress.released_items, progress.released_bytes = item_id, items, size
                if progress.done or progress.spans:
                    progress.absorb()
            if progress.error_counts:
                progress.error_counts.pop(item_id, None)
            self._committed += 1
        if not backlog.may_skip_notify:
            self._dispatcher.notify()

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """Commit all these items or none: if one is not an open read, raises ``UnknownItem`` and commits nothing."""
        backlog = self._backlog
        named = list(items)
        try:
            with backlog.lock:
                chosen = self._chosen_locked(named)
                if chosen:
                    self._commit_locked(chosen)
        except BaseException as error:
            self._dispatcher.recover(error)
            raise
        if not backlog.may_skip_notify:
            self._dispatcher.notify()

    def _chosen_locked(self, named: list[Item | int]) -> dict[int, Item]:
        """The open reads that ``named`` means, by id."""
        opened = self._backlog.opened
        if len(named) == len(opened) and all(map(is_, named, opened.values())):
            return opened
        try:
            chosen = {item.id: item for item in cast("list[Item]", named)}
        except AttributeError:  # some are ids, or neither items nor ids
            chosen = {}
        if len(chosen) == len(named) and all(map(is_, map(opened.get, chosen), chosen.values())):
            return chosen
        chosen = {}
        for each in named:
            item_id = id_of(each)
            item = opened.get(item_id)
            if item is None or (isinstance(each, Item) and each is not item) or item_id in chosen:
                raise self._unknown(item_id)
            chosen[item_id] = item
        return chosen

    def _commit_locked(self, chosen: dict[int, Item]) -> None:
        backlog = self._backlog
        opened = backlog.opened
        size = sum(map(len, [item.data for item in chosen.values()]))
        backlog.progress.release_all(chosen, size)  # one step of it marks all of them as done
        if len(opened) == len(chosen):
            opened.clear()
        else:
            for item_id in chosen:
                del opened[item_id]
        self._committed += len(chosen)

    def abort(
        self, item_or_id: Item | int, delay: float | None = None, reason: str | None = None, *, counts: bool = True
    ) -> None:
        """Give an item back, ahead of unread items (a negative acknowledgement). Its ``error_count`` grows by one.
        Aborted items keep the order of their ids.

        ``delay``: it is not delivered again before so many seconds (0: at once); ``None``: as ``retry_delay`` says.
        If the ``error_count`` has reached ``max_deliveries``, the item is dead, and goes to the queue ``dead_letter``
        with ``reason``, of which up to 1 KiB of JSON is kept. That is done when this returns, or, while another thread
        does so for other items or the move fails, soon after. If an ``on_abort`` hook returns true, the item is
        committed instead.

        With ``counts=False`` the item goes back as if it had not been got: the count stays, no hook is called, and
        there is no delay. That is for an item that no consumer has seen. Raises ``UnknownItem`` if it is not open, and
        ``ValueError`` for a ``delay`` that is negative or not finite.
        """
        if delay is not None:
            delay = check_delay("delay", delay)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"reason must be a str, not {type(reason).__name__}")
        if not counts:
            backlog = self._backlog
            with backlog.lock:
                unseen = self._open_read_locked(item_or_id)
            self._dispatcher.unget(unseen)
            return
        self._abort(item_or_id, delay, reason or "", may_die=True)

    def abort_for(self, item: Item, error: BaseException | None) -> None:
        """Abort an open read because ``error`` was raised: what the end of ``with item:`` does. The reason is the type
        and text of the error. If that is no ``Exception``, as Ctrl-C is none, the item does not die of it.
        """
        name = type(error).__name__ if error is not None else ""
        try:
            reason = f"{name}: {error}" if error is not None else ""
        except Exception:  # from its __str__
            reason = name
        self._abort(item, None, reason, may_die=isinstance(error, Exception))

    def _abort(self, item_or_id: Item | int, delay: float | None, reason: str, *, may_die: bool) -> None:
        backlog = self._backlog
        requeuing: list[Item] = []
        try:
            with backlog.lock:
                item = self._open_read_locked(item_or_id)
                item_id = item.id
                entry = (item.data, item.added_ms, item.expires_ms)
                errors = backlog.progress.error_counts
                errors[item_id] = errors.get(item_id, 0) + 1
                del backlog.opened[item_id]
                backlog.aborted_count += 1
                if not delay and is_plain(backlog.config):
                    backlog.requeue(item_id, entry)
                else:
                    again = backlog.make_item(item_id, entry)
                    requeuing.append(again)
                    backlog.with_hook[item_id] = again
            if requeuing:
                self._retries.after_abort(again, delay, reason, may_die=may_die)
                requeuing.clear()
                self._checkpointer.burial.run()
            self._dispatcher.hand_off()
        except BaseException as error:
            self._dispatcher.recover(error, (), requeuing)
            raise
        if not backlog.may_skip_notify:
            self._dispatcher.notify()

    def _open_read_locked(self, item_or_id: Item | int) -> Item:
        item_id = id_of(item_or_id)
        item = self._backlog.opened.get(item_id)
        if item is None or (isinstance(item_or_id, Item) and item_or_id is not item):
            raise self._unknown(item_id)
        return item

    def configure(self, config: ReaderConfig) -> None:
        """Change the limits and hooks of the reader.

        They count at once, for queued items too: ``max_age`` makes old items expire, producers that wait for room look
        again, ``DROP_OLDEST`` drops what is too much. They stay as long as the queue is open, also if the reader is
        closed and opened again. Raises ``TypeError`` for anything but a ``ReaderConfig``, and ``ValueError`` for a
        ``dead_letter`` that can't be one. Thread-safe.
        """
        if not isinstance(config, ReaderConfig):
            raise TypeError(f"config must be a ReaderConfig, not {config!r}")
        check_dead_letter(config, self._source.name, journaled=self._source.disk is not None)
        self._dispatcher.configure(config)
        self._source.configured(self, config)

    # -- moving ---------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop all unread and aborted items; returns how many. Open reads stay open and may be committed or aborted.
        Raises ``OSError`` if the new position could not be saved: the items are dropped even so.
        """
        backlog = self._backlog
        with backlog.lock:
            backlog.check_usable()
            if backlog.disturbed:
                backlog.repair()
            progress, visible_id = backlog.progress, self._source.visible_id
            _, visible_bytes = self._source.before(visible_id + 1)  # as of that moment, whatever is put since
            kept = [*backlog.opened.values(), *backlog.with_hook.values()]
            items_beyond, bytes_beyond = self._done_beyond(visible_id)
            dropped = backlog.items_through(visible_id) + items_beyond - len(kept)
            size = visible_bytes - (progress.released_bytes - bytes_beyond) - sum(len(item.data) for item in kept)
            moved = progress.copy()
            for item_id in backlog.requeued.entries:
                moved.pass_over(item_id, item_id)
            moved.skip_to(visible_id + 1)
            moved.forget_errors()
            moved.released_items += dropped
            moved.released_bytes += size
            backlog.move(moved)
            self._flushes += 1
            backlog.update_fast_path()
        try:
            self.checkpoint()
        finally:
            self._source.moved()
        return dropped

    def _done_beyond(self, item_id: int) -> tuple[int, int]:
        """The number and bytes of the done items after ``item_id``. There are such items if another process had the
        reader open, as it sees items that are not on disk yet.
        """
        backlog = self._backlog
        items = size = 0
        for first, last in [(1, backlog.progress.head), *backlog.progress.done_spans()]:
            if last > item_id:
                items_before, bytes_before = self._source.before(max(first, item_id + 1))
                items_then, bytes_then = self._source.before(last + 1)
                items, size = items + items_then - items_before, size + bytes_then - bytes_before
        return items, size

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """Move the head: the next item is ``item_id``, or the first one added at ``time_ms`` or later.

        It goes back as far as segments are kept (an earlier id means the earliest that is kept), or forward up to the
        end, just after the tail. Open reads and aborted items are dropped; those from the new head on come again. The
        new position is saved when this returns. Cost: one segment is read.

        Raises ``TypeError`` unless exactly one of the two is given, and ``OSError`` if the position could not be saved:
        a reader in the queue's own process has moved all the same, a reader in another process has not.
        """
        if (item_id is None) == (time_ms is None):
            raise TypeError("seek() takes exactly one of item_id and time_ms")
        if item_id is not None:
            item_id = id_of(item_id)
        elif time_ms is not None and isnan(time_ms):
            raise ValueError("time_ms must be milliseconds since 1970, not nan")
        self._checkpointer.seek(item_id, time_ms)

    # -- saving ---------------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the reader's position: items that are committed now do not come again after the process dies.

        With ``durable`` not after a power cut either. Raises ``OSError``; then the checkpoint before counts, which can
        only mean that more items come again.
        """
        self._checkpointer.save(durable)

    def close(self) -> None:
        """Save the position, wake waiters with ``QueueClosed``, give up ownership. Open reads come again. Idempotent.

        If a sync of the queue has failed, so that all calls of the reader raise, nothing is saved any more: items
        committed since its last checkpoint come again. The queue's ``close`` raises the error of that sync, if no call
        of the queue has raised it before.
        """
        self._checkpointer.close()

    # -- figures -----------------------------------------------------------------------------------------------------

    def decode(self, data: bytes) -> V:
        """Decode ``data`` by the queue's codec, or by that of ``open_reader``; without a codec, returns the bytes."""
        decoded: V = self._source.decode(data)
        return decoded

    @property
    def items(self) -> int:
        """Items not done: unread, aborted and open ones. 0 if the reader is past items that are not on disk yet."""
        return self._backlog.items

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        return self._backlog.bytes

    def is_open(self, item: Item) -> bool:
        """Whether ``item`` is an open read of this reader."""
        return self._backlog.opened.get(item.id) is item

    @property
    def _may_bury(self) -> bool:
        """Whether an abort may move an item to the queue ``dead_letter``."""
        return self.config.dead_letter is not None

    def _check_done(self, item: Item) -> None:
        """If the reader can't be used any more, raise why, unless ``item`` was committed or aborted before."""
        backlog = self._backlog
        with backlog.lock:
            progress = backlog.progress
            is_done = progress.is_done(item.id) or progress.error_counts.get(item.id, 0) > item.error_count
        if not is_done:
            backlog.check_usable()

    def _consumed(self) -> Reader[V]:
        return self

    def check_usable(self) -> None:
        """Raise why the reader can't be used any more, if it can't."""
        self._backlog.check_usable()

    @property
    def head(self) -> int:
        """Every id up to and including it is done."""
        return self._backlog.progress.head

    @property
    def open_items(self) -> int:
        """How many reads are open."""
        return len(self._backlog.opened)

    @property
    def open_bytes(self) -> int:
        """Bytes of the items whose reads are open. Cost: O(open reads)."""
        return sum(len(item.data) for item in list(self._backlog.opened.values()))

    @property
    def waiter_count(self) -> int:
        """How many consumers wait in line."""
        return self._dispatcher.waiter_count

    @property
    def age(self) -> float:
        """Seconds since the next deliverable item was put; 0 if there is none, or if it can't be read."""
        backlog = self._backlog
        with backlog.lock:
            try:
                found = None if backlog.broken is not None else backlog.peek()
            except (CorruptJournal, OSError):  # a get raises this; a figure need not
                found = None
        return 0.0 if found is None else max(0.0, self._source.clock.time_ns() / 1e9 - found[1][1] / 1e3)

    @property
    def idle_expired(self) -> bool:
        """Whether ``max_idle`` is set and the reader has been empty that long."""
        max_idle = self.config.max_idle
        return (
            max_idle is not None
            and not self.items
            and self._source.clock.monotonic() - self._dispatcher.busy_at >= max_idle
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes that this reader alone keeps in memory: data and a fixed cost per item. Cost: O(items kept)."""
        return self._in_memory()[1]

    def _in_memory(self) -> tuple[int, int]:
        """The items that this reader alone keeps in memory, and their bytes with a fixed cost for each."""
        backlog = self._backlog
        ahead, batch = list(backlog.ahead.values()), backlog.batch
        kept = [entry[0] for entry in (*ahead, *list(backlog.requeued.entries.values()))]
        if batch is not None:
            first_id, items, _ = batch
            kept += items[max(0, backlog.progress.next_id + len(ahead) - first_id) :]
        return len(kept), sum(map(len, kept)) + ITEM_COST * len(kept)

    def stats(self) -> ReaderStats:
        """The reader's figures at this moment."""
        backlog = self._backlog
        memory_items, memory_bytes = self._in_memory()
        return ReaderStats(
            name=self.name,
            head=self.head,
            items=self.items,
            bytes=self.bytes,
            open_items=self.open_items,
            open_bytes=self.open_bytes,
            waiter_count=self.waiter_count,
            age=self.age,
            get_hits=backlog.opened_count,
            get_misses=self._dispatcher.misses,
            opened=backlog.opened_count,
            committed=self._committed,
            aborted=backlog.aborted_count,
            expired=backlog.expired_count,
            discarded=self._dispatcher.discarded,
            flushes=self._flushes,
            hook_errors=self._dispatcher.hooks.errors,
            memory_bytes=memory_bytes,
            memory_items=memory_items,
            checkpoint_failures=self._checkpointer.failures,
            lagging=self._checkpointer.lagging,
            skipped=self._checkpointer.skipped,
            dead=self._retries.dropped + self._checkpointer.burial.dead,
            dead_letter_failures=self._checkpointer.burial.failures,
            dead_too_large=self._checkpointer.burial.too_large,
        )

    def __repr__(self) -> str:
        state = " closed" if self._backlog.broken else ""
        try:
            items = str(self.items)
        except (KestrelError, OSError):  # the queue was erased, or its files can't be read
            items = "?"
        return (
            f"<Reader {self.full_name}: head={self.head} items={items} open={self.open_items} "
            f"waiters={self.waiter_count}{state}>"
        )

    def _check(self) -> None:
        """Check the invariants; for tests, while nothing else uses the reader."""
        with self._backlog.lock:
            self._check_locked()

    def _check_locked(self) -> None:
        backlog = self._backlog
        backlog.progress._check()
        progress = backlog.progress
        places = [set(backlog.opened), set(backlog.requeued.entries), set(backlog.with_hook)]
        assert sum(map(len, places)) == len(set().union(*places))
        for item_id in set().union(*places):
            assert progress.head < item_id < progress.next_id
            assert item_id not in progress.done
        assert self.items >= sum(map(len, places))
        assert not (backlog.fast and (backlog.requeued or backlog.line))
        assert (self._dispatcher in self._source.waiting) == bool(backlog.line)

    def _unknown(self, item_id: int) -> Exception:
        backlog = self._backlog
        return UnknownItem(item_id, self.full_name) if backlog.broken is None else copy_of(backlog.broken)


def checkpointer_of(reader: Reader) -> Checkpointer:
    """The object by which the rest of the library refers to a reader."""
    return reader._checkpointer
