"""The readers of a queue: opening, taking over, saving and dropping them; retiring the segments that they are past.

A reader in another process than the writer has a registry of its own.

NOTE ON LOCKING: ``_opening`` is held while readers are made, renamed and dropped. It comes before every other lock, and
``close`` of a reader does not take it. The folder's ``readers.lock`` is taken after it. ``_limiting`` is held while the
readers with limits are worked out. ``open`` is replaced as a whole, under ``_listing``, a leaf; so it can be read
without a lock.

A queue that ends first says so, and then looks for its readers. A thread that makes a reader first lists it, and then
looks whether the queue has ended (``_check_again``). So one of the two breaks the reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from kestrelpy._checks import check_whole
from kestrelpy._disk.interface import Lock
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import CheckpointFile, take_over
from kestrelpy._journal.format import LARGEST, Checkpoint
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.retention import KEEP_NOTHING
from kestrelpy._journal.segment import Segment
from kestrelpy._logging import Trouble
from kestrelpy._reading.backlog import has_limits
from kestrelpy._reading.burial import check_dead_letter
from kestrelpy._reading.checkpointer import Checkpointer, guard_and_saving
from kestrelpy._reading.dispatch import Dispatcher, Notify
from kestrelpy._reading.lag import has_lag_limits
from kestrelpy._reading.limits import Limited, OfflineReader, progress_of
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy._reading.source import Source
from kestrelpy.clock import Timer
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, NoDefaultReader, QueueClosed, QueueLocked, copy_of

T = TypeVar("T")
Start = str | int


def check_start(start: Start) -> None:
    """Raise ``ValueError`` unless ``start`` is ``"tail"``, ``"earliest"`` or an item id."""
    try:
        if start not in ("tail", "earliest") and (isinstance(start, str) or check_whole("start", start) < 1):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"start must be 'tail', 'earliest' or an item id, not {start!r}") from None


def named(state: Checkpoint, name: str, *, inherited: bool) -> Checkpoint:
    """The state under the name of its file: it may have been saved under another one, by the default reader."""
    return state._replace(reader=name, flags=fmt.FLAG_INHERITED if inherited else 0)


class ReaderRegistry:
    """All readers of one queue, whether open here or not."""

    def __init__(
        self,
        files: QueueFiles,
        configs: Mapping[str, ReaderConfig],
        default_config: ReaderConfig,
        changed: Callable[[], object],
        check: Callable[[], object] = bool,
    ) -> None:
        for config in (default_config, *configs.values()):
            check_dead_letter(config, files.queue, journaled=files.disk is not None)
        self.files = files
        self._configs = dict(configs)
        self._default_config = default_config
        self._changed = changed
        self._check = check  # raises once the queue has ended
        self._opening = threading.Lock()
        self._listing = threading.Lock()
        self._limiting = threading.Lock()
        self._locks: dict[Reader, Lock] = {}
        self._files: dict[Reader, CheckpointFile] = {}
        self.undisposed: list[Segment] = []
        """Segments that are retired, and not yet archived or deleted."""
        self.retire_limit: Callable[[], int] | None = None
        """No segment with a number above it is retired; ``None``: the readers alone decide. A segment without items
        ends with an id of the one before, so ids would not do.
        """
        self.retention = KEEP_NOTHING
        """Which segments are kept although every reader is past them."""
        self.on_disposed: Callable[[], object] = bool  # called after segments were deleted or archived, with no lock
        self.timer: Timer | None = None  # of the next checkpoints and retiring; closing the queue cancels it
        self.may_limit = any(map(has_limits, (default_config, *configs.values())))
        self.may_block = any(each.full_policy is FullPolicy.BLOCK for each in (default_config, *configs.values()))
        self.may_lag = any(map(has_lag_limits, (default_config, *configs.values())))
        self.on_configured: Callable[[], object] = bool  # called when a reader is there, or has another configuration
        self.trouble = Trouble()
        self._stopped: Exception | None = None
        self.began_to_limit: Callable[[], object] = bool  # called once, when a reader gets limits as the first one
        self.source: Source
        self.open: dict[str, Reader] = {}
        self.alone: Reader | None = None
        """The default reader, if it is open here. The queue's own ``get`` and ``commit`` use it."""
        self.limited: tuple[Limited, ...] = ()  # changed with self._limiting held, as a whole

    def _set_open(self, readers: dict[str, Reader]) -> None:
        self.open = readers
        self.alone = readers.get("")

    def config_for(self, name: str) -> ReaderConfig:
        return self._configs.get(name, self._default_config)

    def configure(self, reader: Reader, config: ReaderConfig) -> None:
        """This reader has other limits and hooks from now on, as long as the queue is open."""
        name = reader.name
        self._configs = {**self._configs, name: config}
        if has_limits(config) and not self.may_limit:
            self.may_limit = True
            self.began_to_limit()
        self.may_lag = self.may_lag or has_lag_limits(config)
        self.on_configured()
        self.refresh_limits()
        if config.full_policy is FullPolicy.DROP_OLDEST:
            checkpointer_of(reader).dispatcher.keep_limits()

    def tidy(self, names: set[str]) -> None:
        """When a queue is opened: remove a left-over checkpoint of the default reader that a named reader has taken
        over, unless it is in use. A checkpoint that nobody has taken over is still the default reader's, whatever other
        readers there are. ``names``: the readers that have a checkpoint.
        """
        if "" in names and self.files.has_heir(names - {""}, self.source.queue_id):
            with self.files.guard():
                if not self.files.is_owned(""):
                    self.files.drop("")
        self.update_limits()

    def update_limits(self) -> bool:
        """Work out whose limits puts have to respect; true if that has changed. While there is no other reader, the
        default reader counts, even if nobody has made it.
        """
        with self._limiting:
            limited = self.limited
            try:
                limited = tuple(self._find_limited()) if self.may_limit else ()
            except (KestrelError, OSError):  # others count as before, readers open here at once
                limited = tuple(self._known_limited())
                raise
            finally:
                changed = limited != self.limited
                self.limited = limited
                self._changed()
        return changed

    def _known_limited(self) -> Iterator[Limited]:
        """The readers open here; and those counted before that are not open: a closed reader counts with what it had
        when it closed.
        """
        counted = {each.name: each for each in self.limited}
        for name, reader in self.open.items():
            saver = checkpointer_of(reader)
            if has_limits(self.config_for(name)) and (name in counted or not saver.is_closed):
                yield saver.dispatcher
        for name, each in counted.items():
            if name not in self.open:
                yield each

    def _find_limited(self) -> Iterator[Limited]:
        known = {(each.name, id(each.config)): each for each in self.limited if isinstance(each, OfflineReader)}
        for name in sorted(self.files.readers(self.source.queue_id, known=self.open) | set(self.open)) or [""]:
            config = self.config_for(name)
            if has_limits(config):
                saver = self._open_here(name)
                if saver is not None and not saver.is_closed:
                    yield saver.dispatcher
                elif (name, id(config)) in known:
                    absent = known[name, id(config)]
                    absent.refresh()
                    yield absent
                else:
                    yield OfflineReader(self.files, self.source, name, config)

    def refresh_limits(self) -> bool:
        """``update_limits`` after changes by other processes. A reader that can't be read now counts as before."""
        if self.may_limit:
            with contextlib.suppress(KestrelError, OSError):
                return self.update_limits()
        return False

    def _open_here(self, name: str) -> Checkpointer | None:
        """The reader of that name, if it is open here."""
        reader = self.open.get(name)
        return None if reader is None else checkpointer_of(reader)

    def of_each(self, call: Callable[[Reader], T]) -> list[T]:
        """``call`` of every reader open here, except one that is closed meanwhile."""
        results = []
        for reader in list(self.open.values()):
            try:
                results.append(call(reader))
            except QueueClosed:
                self._check()
        return results

    def keep_limits(self) -> None:
        """After items have become visible: have the readers with ``DROP_OLDEST`` drop their oldest items. Called with
        no lock held; raises nothing, as the new items are stored.
        """
        for reader in self.limited:
            if reader.config.full_policy is FullPolicy.DROP_OLDEST and isinstance(reader, Dispatcher):
                reader.keep_limits()

    # -- opening -----------------------------------------------------------------------------------------------------

    def reader(self, name: str, start: Start) -> Reader:
        """The reader of that name; makes it if it is not open. Raises as ``JournaledQueue.reader``."""
        found = self.open.get(name)
        if found is not None and not checkpointer_of(found).is_half_closed:
            return found
        if name:
            file_names.check_name(name)
        check_start(start)
        with self._opening:
            found = self.open.get(name)
            if found is not None and not checkpointer_of(found).is_half_closed:
                return found
            try:
                if found is not None:  # closing it was interrupted
                    self.release(found)
                self._release_left(name)
                default = self._open_here("") if name else None  # it may get that name
                guard = self.guard_open
                with guard() if default is None else guard_and_saving(guard, default.lock):
                    self.source.look_again()
                    reader = self._make(name, start)
                with self._listing:
                    self._set_open({**self.open, reader.name: reader})
            except BaseException:
                self._reopen()
                raise
        self._check_again(reader)
        self.on_configured()
        self.update_limits()
        dispatcher = checkpointer_of(reader).dispatcher
        self.source.attach(dispatcher.backlog)
        checkpointer_of(reader).burial.run()  # an intent that an earlier owner has left
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            dispatcher.keep_limits()
        return reader

    @contextlib.contextmanager
    def guard_open(self, *, wait: bool = True) -> Iterator[None]:
        """The guard of a queue that has not ended. If the queue was erased, the guard's file is removed, too."""
        with self.files.guard(wait=wait):
            try:
                self._check()
            except Exception:
                with contextlib.suppress(OSError):  # its folder is closed, for example
                    self.files.unlink_guard_if_last()
                raise
            yield

    def _check_again(self, reader: Reader) -> None:
        """After a reader was made: break it if the queue has ended, perhaps without seeing it. With no lock held."""
        try:
            self._check()
        except Exception as error:
            try:
                checkpointer_of(reader).dispatcher.fail_waiting(error)
            finally:
                self.release(reader)
            raise

    def _reopen(self) -> None:
        """Making a reader was interrupted: list the readers that exist as open."""
        with self._listing:
            self._set_open(self._made())

    def _made(self) -> dict[str, Reader]:
        return {reader.name: reader for reader in self.owned() if not checkpointer_of(reader).is_closed}

    def _shut(self, reader: Reader) -> None:
        with self._listing:
            self._set_open(self._all_but(reader))

    def _all_but(self, reader: Reader) -> dict[str, Reader]:
        return {name: each for name, each in self.open.items() if each is not reader}

    def _make(self, name: str, start: Start) -> Reader:
        files = self.files
        names = files.directory.names()
        on_disk = files.reader_names(names)
        if not name:
            self._check_default(on_disk)
        default = self.open.get("")
        is_first = bool(name) and next(self._named(on_disk), None) is None
        if is_first and default is not None:
            return self._take_over_open(default, name)
        known = file_names.reader_lock_name(files.queue, name) in names  # whether it was ever owned
        lock = files.lock_reader(name)
        try:
            if is_first and (not known or "" in on_disk):  # known: a crash in the middle of a takeover
                inherited = self._inherit_default(name)
                progress = inherited or self._beginning("earliest" if known else start)
                return self._start(name, lock, progress, inherited=inherited is not None)
            if name in on_disk:
                file = files.checkpoint_file(name)
                if file_names.temporary_name(file.name) not in names:
                    file.hold()
                state = files.load(name, self.source.queue_id, file)
                if state is not None:
                    return self._go_on(name, lock, state, file)
            # If the checkpoint is lost or damaged, and for the default reader: begin at the earliest item kept: never
            # skip one.
            lost = known or not name or (name in on_disk and files.is_there(name, self.source.queue_id))
            return self._start(name, lock, self._beginning("earliest" if lost else start))
        except BaseException:
            for reader in [reader for reader, its in list(self._locks.items()) if its is lock]:
                self._locks.pop(reader, None)
                self._files.pop(reader, None)
            try:
                if not known:
                    files.forget_owner(name, self.source.queue_id)
            finally:
                lock.release()
            raise

    def _named(self, on_disk: set[str]) -> Iterator[str]:
        """The named readers that exist, open here or not. Those open here come first: they cost no look at the disk."""
        yield from filter(None, self.open)
        for name in sorted(on_disk - set(self.open) - {""}):
            if self.files.is_there(name, self.source.queue_id):
                yield name

    def _check_default(self, on_disk: set[str]) -> None:
        """Raise ``NoDefaultReader`` if there are named readers, unless the default reader has a checkpoint that none of
        them has taken over.
        """
        files, queue_id = self.files, self.source.queue_id
        named = tuple(self._named(on_disk))
        if named and not ("" in on_disk and files.is_there("", queue_id) and not files.has_heir(named, queue_id)):
            raise NoDefaultReader(files.queue, tuple(sorted(named)))

    def _beginning(self, start: Start) -> Progress:
        source = self.source
        visible_id = source.visible_id
        if start == "tail":
            return Progress(visible_id, *source.before(visible_id + 1))
        item_id = source.first_id if start == "earliest" else max(source.first_id, min(int(start), visible_id + 1))
        return Progress(item_id - 1, *source.before(item_id))

    def _inherit_default(self, name: str) -> Progress | None:
        """The progress that the first named reader takes over; ``None`` if another process has the default reader."""
        try:
            lock = self.files.lock_reader("")
        except QueueLocked:
            return None
        try:
            state = self.files.load("", self.source.queue_id)
            if state is None:
                self.files.give_spare_to(name)
                return self._beginning("earliest")
            queue = self.files.queue
            take_over(
                self.files.directory, file_names.checkpoint_name(queue, ""), file_names.checkpoint_name(queue, name)
            )
            return progress_of(state, self.source)
        finally:
            lock.release()

    def _take_over_open(self, reader: Reader, name: str) -> Reader:
        """The default reader is open here: the same reader gets the new name (LK-F32). Not while a checkpoint of it is
        being saved, which would make the old file again.
        """
        lock, file_name = self.files.lock_reader(name), file_names.checkpoint_name(self.files.queue, name)
        try:
            self._files[reader].rename(file_name)
            self._rename(reader, name, lock)
        except BaseException:
            if file_name in self.files.directory.names():  # it is renamed: there is no way back
                self._rename(reader, name, lock)
                self.files.directory.sync()
            else:
                lock.release()
            raise
        return reader

    def _rename(self, reader: Reader, name: str, lock: Lock) -> None:
        """Give an open reader its new name and ``lock``. May be repeated after an interrupt."""
        old, self._locks[reader] = self._locks[reader], lock
        file = self._files[reader]
        file.name, file.inherited = file_names.checkpoint_name(self.files.queue, name), True
        checkpointer_of(reader).dispatcher.rename(name, self.config_for(name))
        self._shut(reader)
        if old is not lock:
            old.release()

    def _start(self, name: str, lock: Lock, progress: Progress, *, inherited: bool = False) -> Reader:
        """Make the reader, and save its position durably: from here on, the items that it needs are kept (R5).

        A named reader makes the default reader's checkpoint void. If a process that was killed had renamed that
        checkpoint, the new name must be on disk before.
        """
        if name:
            self.files.directory.sync()
        reader = Reader(self.source, name, self.config_for(name), progress)
        self._files[reader] = file = self.files.checkpoint_file(name)
        file.inherited = inherited
        self._locks[reader] = lock
        saver = checkpointer_of(reader)
        saver.tell_skipped()
        saver.save_alone(True)
        saver.dispatcher.look_again()
        return reader

    def _go_on(self, name: str, lock: Lock, state: Checkpoint, file: CheckpointFile) -> Reader:
        """Make a reader that continues where its checkpoint says. The checkpoint may not be durable: until the reader
        saves a durable one, nothing is retired because of it."""
        progress = progress_of(state, self.source)
        file.inherited = state.has_inherited(name)
        # By quarantine the journal may be open without its beginning. A reader in another process can't know that: its
        # get raises, and it may seek.
        if progress.head + 1 < self.source.first_id and self.source.knows_heads:
            beginning = self._beginning("earliest")
            beginning.move = progress.move
            return self._start(name, lock, beginning, inherited=file.inherited)
        reader = Reader(self.source, name, self.config_for(name), progress)
        saver = checkpointer_of(reader)
        if state.hint_number:
            saver.backlog.hint = (state.hint_number, (state.hint_id, state.hint_offset))
        saver.note_saved()
        saver.tell_skipped()
        self._files[reader], self._locks[reader] = file, lock
        saver.dispatcher.look_again()
        return reader

    # -- saving and leaving ------------------------------------------------------------------------------------------

    def guard(self, *, wait: bool = True) -> contextlib.AbstractContextManager[None]:
        """Held while a reader's position moves back, and while readers are made and segments retired."""
        return self.files.guard(wait=wait)

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None:
        if self._stopped is not None:  # the queue is being erased: a checkpoint saved now would stay
            raise copy_of(self._stopped)
        file = self._files.get(reader)
        if file is None:  # another thread closed the reader meanwhile, and has saved its position
            if checkpointer_of(reader).backlog.broken is None:
                raise QueueClosed(f"reader {reader.full_name} is closed")
            return
        file.save(state, durable=durable)

    def closed(self, reader: Reader) -> None:
        """A reader has closed: from now on it counts by its checkpoint, and others may own it. May be repeated."""
        if reader in self._locks:
            try:
                self.update_limits()
            finally:
                self.release(reader)

    def is_erased(self) -> bool:
        """Whether the lock file of a reader owned here is gone, because the queue was erased."""
        return not all(lock.is_current() for lock in list(self._locks.values()))

    def owned(self) -> list[Reader]:
        """The readers whose locks are held: those open here, and those whose closing was interrupted."""
        return list(self._locks)

    def leave(self) -> None:
        """Release everything that is still owned after an interrupt."""
        self.files.leave_guard()
        for reader in self.owned():
            self.release(reader)

    def _release_left(self, name: str) -> None:
        """Release what an interrupted closing of a reader of that name has left owned."""
        for reader in self.owned():
            if reader.name == name and self.open.get(name) is not reader:
                self.release(reader)

    def release(self, reader: Reader) -> None:
        """Give up the ownership of a reader that is closed. May be repeated."""
        lock = self._locks.get(reader)
        try:
            saver = checkpointer_of(reader)
            self.source.detach(saver.backlog)
            with saver.burial.moving, saver.lock:  # not while it is saved or renamed, nor in the middle of a move
                self._files.pop(reader, None)
                self._shut(reader)
        finally:
            if lock is not None:
                lock.release()
        self._locks.pop(reader, None)  # last: everything is done

    def drop(self, name: str) -> None:
        """Close a reader and delete its checkpoint; no effect if there is no such reader. Raises ``QueueLocked``."""
        while True:
            reader = self.open.get(name)
            if reader is not None:
                reader.close()  # with no lock held: it completes futures
            with self._opening:
                if self.open.get(name) not in (None, reader):  # made again meanwhile
                    continue
                self._release_left(name)
                with self.guard_open():
                    names = self.files.directory.names()
                    if name in self.files.reader_names(names) | self.files.lost_names(names, set()):
                        lock = self.files.lock_reader(name)
                        try:
                            self.files.drop(name)
                        finally:
                            lock.release()
                self.update_limits()
                return

    def stop(self, error: Exception, notify: Notify) -> None:
        """From now on, let no reader open here save anything. ``notify``: as ``Dispatcher.fail_waiting``."""
        self._stopped = error  # before the loop: a save that gets the lock after it sees this
        for reader in self.open.values():
            saver = checkpointer_of(reader)
            saver.dispatcher.fail_waiting(error, notify)
            with saver.lock:  # wait for a checkpoint that is under way
                pass

    def abandon(self, error: Exception) -> None:
        """In a forked child."""
        for reader in self.open.values():
            checkpointer_of(reader).abandon(error)
        for lock in self._locks.values():
            lock.abandon()
        self._opening = threading.Lock()
        self._limiting = threading.Lock()
        self._listing = threading.Lock()

    # -- retiring ----------------------------------------------------------------------------------------------------

    def retire(self, source: LocalSource, *, wait: bool = True, excess: int = 0) -> None:
        """Delete or archive the segments that every reader's durable checkpoint is past (R5), but for those that are
        kept. ``excess``: so many bytes of these go all the same, the oldest first. Raises ``OSError``, and without
        ``wait`` ``QueueLocked`` while somebody makes or drops a reader, or retires.
        """
        journal = source.journal
        segments = journal.segments
        if len(segments) < 2 and not self.undisposed:
            return
        first_last_id = segments[0].last_id
        limit = LARGEST if self.retire_limit is None else self.retire_limit()
        limit = min(limit, self._last_due(source, LARGEST, excess))
        if limit < segments[0].number and not self.undisposed:
            return
        own = list(self.open.values())
        for reader in own:
            if reader.head < first_last_id:
                if self.undisposed:
                    continue  # nothing new goes, but these do
                return
            if self._durable_head(reader) < first_last_id:
                with contextlib.suppress(QueueClosed):  # closed meanwhile: it counts by its file
                    reader.checkpoint(durable=True)
        with self.files.guard(wait=wait):
            heads = [min(self._durable_head(reader), reader.head) for reader in own]
            others = self.files.lowest_head_of_others({reader.name for reader in own}, first_last_id, source.queue_id)
            if others is not None:
                heads.append(others)
            if heads:
                with source.lock:
                    limit = min(limit, self._last_due(source, min(heads), excess))
                    self.undisposed += journal.take_retired(min(heads), limit)
            count = len(self.undisposed)
            while True:  # and no condition: docs/interrupts.md, rule 3
                if not self.undisposed or (heads and self.undisposed[0].last_id > min(heads)):
                    break  # the latter: disposing of it failed, and a reader in another process moved back to it
                journal.dispose(self.undisposed[0])
                del self.undisposed[0]
        if count:
            self.on_disposed()

    def _last_due(self, source: LocalSource, head: int, excess: int) -> int:
        """The number of the last segment that is not kept, of those that hold nothing above ``head``; 0 if all are."""
        if not self.retention.keeps:
            return LARGEST
        segments = source.journal.segments
        consumed = [segment for segment in segments[:-1] if segment.last_id <= head]
        now_ms = source.clock.time_ns() // 1_000_000
        count = self.retention.count_due(consumed, now_ms, following=segments[len(consumed) :], excess=excess)
        return consumed[count - 1].number if count else 0

    def states(self) -> tuple[dict[str, Checkpoint], set[str]]:
        """Where each reader is: those open here as they are now, the others as they are saved. And the names of the
        readers that are there without a state that can be read now. Raises ``OSError``.
        """
        names = self.files.directory.names()
        states: dict[str, Checkpoint] = {}
        for name, reader in list(self.open.items()):
            state, file = checkpointer_of(reader).state(), self._files.get(reader)
            if state is not None and file is not None:
                states[name] = named(state, name, inherited=file.inherited)
        there = self.files.reader_names(names)
        for name in there - states.keys():
            state = self.files.find(name, self.source.queue_id)
            if state is not None:
                states[name] = named(state, name, inherited=state.has_inherited(name))
        return states, (there | file_names.owned_among(names, self.files.queue) - {""}) - states.keys()

    def _durable_head(self, reader: Reader) -> int:
        file = self._files.get(reader)
        return file.durable_head if file is not None and file.durable is not None else 0

    def dispose_stale(self, segments: list[Segment]) -> None:
        """Segments that came back after they were deleted: retire them again, together with the next ones."""
        self.undisposed += segments

    def waits_for_others(self, source: LocalSource) -> bool:
        """Whether segments are kept that only readers in other processes may still need: then the queue has to look now
        and then.
        """
        segments = source.journal.segments
        if len(segments) < 2 or self._last_due(source, LARGEST, 0) < segments[0].number:
            return False
        names = self.files.directory.names()
        there = self.files.readers(source.queue_id, names, known=self.open)
        return bool((there | self.files.lost_names(names, there)) - set(self.open))
