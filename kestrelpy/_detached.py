"""A reader in another process than the writer: it reads segments and writes its own checkpoint, nothing else.

Rules:
1. What is seen ends at the first frame that is not whole: the writer may be in the middle of it, or may have died
   there. A footer says which, in time.
2. Nobody wakes this process: while somebody waits in line, the files are looked at again, soon at first and then more
   seldom, and the more often the less time has passed since something came.

NOTE ON LOCKING: ``_looking`` guards the view while it follows the writer; a reader's lock may be held when it is
asked for, and nothing is asked for while it is held.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from kestrelpy import _format as fmt
from kestrelpy._checkpoint import known_queue_id
from kestrelpy._disk import Directory, File
from kestrelpy._format import Checkpoint
from kestrelpy._home import Home
from kestrelpy._kept import copy_of
from kestrelpy._lifetime import forget, remember
from kestrelpy._names import is_new, segments_among
from kestrelpy._readership import Readership
from kestrelpy._segment import (
    FOREIGN,
    Listed,
    Place,
    Segment,
    first_header,
    is_none,
    iterate_frames,
    load_segment,
    open_segment,
    read_footer,
    read_header,
    wrong_header,
)
from kestrelpy._source import Served, Take
from kestrelpy._taking import Taking
from kestrelpy._view import Block, JournalView
from kestrelpy.clock import Clock, Timer
from kestrelpy.config import FullPolicy
from kestrelpy.errors import CorruptJournal, ForkedQueue, KestrelError, QueueClosed, QueueLocked
from kestrelpy.reader import Reader

FIRST_POLL = 0.0005
"""Seconds before the first look; no wait is shorter. A look costs 25 microseconds, 3 of its own and the rest to wake up
for it.
"""

POLL_SHARE = 1 / 32
"""No wait between two looks is a larger share of the time since something came (but for ``FIRST_POLL``). Of items that
come one by one at any pace, each so waits for at most this share of the pause before it, and half of that on average.
"""

CHECKPOINT_INTERVAL = 1.0


class FollowingView(JournalView):
    """The journal as another process writes it. ``follow`` brings it up to date.

    ``check`` is called before new segments are taken for this journal's, and raises if the queue has gone: they are of
    one that was made anew, under the same name.
    """

    def __init__(self, directory: Directory, queue: str, check: Callable[[], object] = bool) -> None:
        super().__init__(directory, queue)
        self._check = check
        self._file: File | None = None
        self._at = (0, 0)
        self.queue_id = bytes(16)
        self.durable_id = 0  # by the writer's word: what a sync from here says of it may be wrong
        self._synced_id = 0
        self.holes: tuple[tuple[int, int, str], ...] = ()
        """First and last id of what was in segments that are not there, and the path of the one behind. Retired ones
        are among them: readers need nothing of those.
        """
        self._doubted: tuple[File, OSError] | None = None  # a file of which a sync has failed

    @property
    def tail_id(self) -> int:
        return self._at[0]

    @property
    def total_bytes(self) -> int:
        return self._at[1]

    def _end(self) -> tuple[int, int]:
        return self._at

    def follow(self) -> None:
        """See what the writer has done since. Raises ``CorruptJournal``, ``OSError``, ``UnsupportedFormat``.

        The folder is listed once for all that are new, and once more to see whether there are others by then.
        """
        later: Listed | None = None
        while True:
            last = self.segments[-1] if self.segments else None
            if last is not None and not last.closed and not self._follow_active(last):
                if last.items or last.number in self._numbers():
                    return
                last = self._forget_last()
            number = last.number if last is not None else -1
            if later is None or not self._take_following(later, number):
                later = self._list_behind(number)
                if not self._take_following(later, number):
                    return

    def _list_behind(self, number: int) -> Listed:
        """What is there behind the segment of that number."""
        later = [each for each in segments_among(self._directory.names(), self._queue) if each[0] > number]
        if later and not any(self.queue_id):
            newest = first_header(self._directory, reversed(later))
            self.queue_id = newest.queue_id if newest is not None else self.queue_id
        return Listed(self._directory, later, self.queue_id if any(self.queue_id) else b"")

    def _forget_last(self) -> Segment | None:
        """The last segment could not be made after all, and has gone. Returns the one before."""
        self.close()
        self.segments = self.segments[:-1]
        return self.segments[-1] if self.segments else None

    def _follow_active(self, segment: Segment) -> bool:
        """Read on in the last segment; true if it turns out to be closed."""
        file = self._file
        assert file is not None
        if not file.read(segment.records_end, fmt.FRAME_BYTES).strip(b"\0"):
            return False
        try:
            for offset, frame in iterate_frames(file, segment.header.marker, segment.records_end, file.size()):
                if frame.footer is not None or frame.first_id != segment.last_id + 1:
                    break
                segment.count(offset, frame)
            footer = read_footer(file, segment.header)
            if footer is not None:
                segment.apply(footer)
        finally:  # what was counted is not looked at again, whatever can't be read now
            self._at = (segment.last_id, segment.header.base_bytes + segment.data_bytes)
        if footer is not None:
            file.close()
            self._file = None
            self.durable_id = segment.last_id
        return footer is not None

    def _take_following(self, later: Listed, last_number: int) -> bool:
        """Add what the list has behind the segment of that number, up to the first one that is not closed; whether
        that was any.
        """
        added: list[Segment] = []
        try:
            self._follow_list(later, bisect_right(later.numbered, last_number, key=_number), added)
        finally:
            if added:
                self._check_and_add(added)
        return bool(added)

    def _check_and_add(self, added: list[Segment]) -> None:
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self._add(added)

    def _follow_list(self, later: Listed, start: int, added: list[Segment]) -> None:
        for at in range(start, len(later)):
            try:
                file = open_segment(self._directory, later.numbered[at][1])
            except FileNotFoundError:
                continue  # retired in this moment
            try:
                segment = self._load(file, later, at)
            except BaseException:
                file.close()
                raise
            if segment is not None:
                added.append(segment)
                if not segment.closed:
                    self._file = file
                    return
            file.close()
            if segment is None and later.header_from(at + 1) is None:  # being made in this moment
                return

    def _load(self, file: File, later: Listed, at: int) -> Segment | None:
        """The next segment; ``None`` if the file is none, or not yet. Raises ``CorruptJournal`` for one that is not of
        this queue or not in its place.
        """
        number, name = later.numbered[at]
        path = f"{self._directory.path}/{name}"
        header = read_header(file, path)
        if header is None or header.number != number:
            if is_none(file, name, number, None, later.header_from(at + 1)):
                return None
            header = read_header(file, path)  # it may have been made meanwhile
            if header is None or header.number != number:
                raise wrong_header(header).error(path)
        if any(self.queue_id) and header.queue_id != self.queue_id:
            raise FOREIGN.error(path)
        segment = load_segment(file, name, header)
        after = later.header_from(at + 1) if not segment.closed else None
        return None if after is not None and is_none(file, name, number, header, after) else segment

    def _add(self, added: list[Segment]) -> None:
        segment = added[-1]
        header = segment.header
        self._note_holes(added)
        self.queue_id = header.queue_id
        self.durable_id = segment.last_id if segment.closed else header.previous_last_id
        self.segments = (*self.segments, *added)  # once for all of them: there may be very many
        self._at = (segment.last_id, header.base_bytes + segment.data_bytes)
        self.missing = header.first_id - 1 - header.base_items

    def _note_holes(self, added: list[Segment]) -> None:
        end_id = self.segments[-1].last_id if self.segments else 0
        for segment in added:
            previous_id = segment.header.previous_last_id
            if previous_id > end_id:
                path = f"{self._directory.path}/{segment.name}"
                self.holes = (*self.holes, (end_id + 1, previous_id, path))
            end_id = segment.last_id

    def whole_to(self, item_id: int, last_id: int) -> int:
        """The last id up to ``last_id`` in front of which no segment is missing, for a reader that needs ``item_id``.

        Raises ``CorruptJournal`` if that was in one: what a reader needs was not retired.
        """
        for first_id, end_id, path in self.holes:
            if first_id <= item_id <= end_id:
                reason = f"a reader needs item {item_id}; what is there begins with item {end_id + 1}"
                raise CorruptJournal(path, fmt.HEADER_OFFSET["previous_last_id"], reason, item_id=item_id)
            if item_id < first_id <= last_id:
                last_id = first_id - 1
        return last_id

    def make_durable(self, item_id: int) -> None:
        """Sync the writer's file from here (R4): a checkpoint must not name what a power cut may take.

        If that fails, no later sync of the file is believed (R9); the writer's footer is. And if it does not, that is
        no proof: of a sync of the writer's that has failed before, this one hears nothing. So nobody is told by it
        that the items are on disk.
        """
        if item_id > max(self.durable_id, self._synced_id) and self._file is not None:
            tail_id = self.tail_id
            if self._doubted is not None and self._doubted[0] is self._file:
                raise copy_of(self._doubted[1])
            try:
                self._file.sync()
                if is_new(self.segments[-1].name):
                    self._directory.sync()
            except OSError as error:
                self._doubted = self._file, error
                raise
            self._synced_id = max(self._synced_id, tail_id)

    def is_left_alone(self) -> bool:
        """Whether the last segment that was seen is there, and not another queue's that is as old."""
        if not self.segments:
            return False
        number = self.segments[-1].number
        last = [each for each in segments_among(self._directory.names(), self._queue) if each[0] == number]
        header = first_header(self._directory, last)
        return header is not None and header.queue_id == self.queue_id

    def _numbers(self) -> set[int]:
        """Of the segments that are there. Names change: a new one is given its lasting one."""
        return {number for number, _ in segments_among(self._directory.names(), self._queue)}

    def forget_gone(self) -> None:
        """Segments that every reader was past may have been retired since."""
        there = self._numbers()
        gone = [at for at, segment in enumerate(self.segments[:-1]) if segment.number not in there]
        if gone:
            self.segments = self.segments[gone[-1] + 1 :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _number(each: tuple[int, str]) -> int:
    return each[0]


class Places:
    """A queue's folder, for who saves a reader's place there and does not own the queue. Every file is looked up,
    made and renamed under the guard, and only as long as ``check`` raises nothing: a queue that is erased meanwhile
    and made anew, with a reader of that name, is another one.
    """

    GUARDED = ("open", "create", "rename", "exchange", "unlink")

    def __init__(self, home: Home, check: Callable[[], None]) -> None:
        self._home = home
        self._check = check

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._home.directory, name)
        return partial(self._guarded, call) if name in self.GUARDED else call

    def _guarded(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._check()  # first: to ask for the guard makes its file
        with nullcontext() if self._home.is_guarded else self._home.guard():
            self._check()
            return call(*arguments, **options)


class Outside:
    """The ``Source`` of a reader in another process."""

    view_type = FollowingView
    knows_heads = False
    _gone = False  # guarded by self._looking: the reader is closed, and the files with it

    def __init__(
        self, directory: Directory, queue: str, clock: Clock, poll_interval: float, readership: Readership
    ) -> None:
        self.name = queue
        self.clock = clock
        self.waiting: dict[Served, None] = {}
        self._directory = directory
        self._poll_interval = poll_interval
        self._first_poll = min(FIRST_POLL, poll_interval)
        self._readership = readership
        self._view = self.view_type(directory, queue, self._check_there)
        self._looking = threading.Lock()
        self._polling = False
        self._maintenance_armed = False
        self._next_poll: Timer | None = None
        self._next_round: Timer | None = None
        self._reader: Reader | None = None
        self._pid = os.getpid()
        readership._home.places = cast("Directory", Places(readership._home, self._check_there))
        self._look()
        self._moved_at = clock.monotonic()
        remember(self)

    def _look(self) -> None:
        with self._looking:
            self._view.follow()
            if not self._view.segments:
                states = self._readership._home.load_all(self._directory.names())
                self._view.queue_id = known_queue_id(states) or self._view.queue_id
        self._seen_id = self._view.tail_id

    def look_again(self) -> None:
        """Until there is a lock of ours, nothing tells of a queue that is erased, and perhaps made anew, after the
        first look.
        """
        if not self._view.is_left_alone():
            self._view.close()
            self._view = self.view_type(self._directory, self.name, self._check_there)
            self._look()

    @property
    def visible_id(self) -> int:
        """The last whole item there is, looked up anew; once the reader is closed, the last one that was seen. Raises
        ``QueueClosed`` if the queue was erased.
        """
        view = self._view
        with self._looking:
            seen = view.tail_id
            if self._gone:
                return seen
            with self._telling():
                view.follow()
        if view.tail_id == seen:
            self._check_there()
        return view.tail_id

    @property
    def seen_id(self) -> int:
        return self._view.tail_id

    def _check_there(self) -> None:
        if self._readership.is_robbed():
            raise QueueClosed(f"queue {self.name!r} was erased")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Of a queue that was erased no file is found any more, or another queue's."""
        try:
            yield
        except (CorruptJournal, FileNotFoundError):
            self._check_there()
            raise

    @property
    def missing(self) -> int:
        return self._view.missing

    @property
    def visible_bytes(self) -> int:
        return self._view.total_bytes

    @property
    def first_id(self) -> int:
        """The earliest id that is kept, looked up anew."""
        with self._looking:
            self._view.forget_gone()
        return self._view.first_id

    @property
    def queue_id(self) -> bytes:
        return self._view.queue_id

    @property
    def directory(self) -> Directory:
        return self._directory

    @property
    def durable_id(self) -> int:
        return self._view.durable_id

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, Place] | None) -> Block:
        with self._telling():
            return self._view.read(item_id, self._view.whole_to(item_id, last_id), max_bytes, hint)

    def is_gap(self, item_id: int) -> bool:
        return self._view.is_gap(item_id)

    def before(self, item_id: int) -> tuple[int, int]:
        with self._telling():
            return self._view.before(item_id)

    def find_time(self, time_ms: int, last_id: int) -> int:
        with self._telling():
            with self._looking:
                self._view.forget_gone()
            return self._view.find_time(time_ms, last_id)

    def hint(self, item_id: int) -> tuple[int, Place]:
        return self._view.hint(item_id)

    def window(self, reader: Taking) -> Take | None:  # noqa: ARG002 - there is none to share
        return None

    def attach(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)

    def detach(self, reader: Reader) -> None:
        """Nothing is shared."""

    def decode(self, data: bytes) -> Any:
        return data

    def make_durable(self, item_id: int) -> None:
        with self._looking:
            self._view.make_durable(item_id)

    def guard(self) -> AbstractContextManager[None]:
        return self._readership.guard()

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None:
        try:
            self._readership.save(reader, state, durable)
        except QueueClosed:
            if reader._broken is None:
                raise
            return  # it closes, and its queue has gone before
        with self._looking:
            self._view.forget_gone()

    # -- looking again -----------------------------------------------------------------------------------------------

    def polls(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)
        if not self._polling:
            self._polling = True
            try:
                self._poll_in(self._first_poll)
            except BaseException:
                self._polling = False
                raise

    def _poll_in(self, seconds: float) -> None:
        self._next_poll = self.clock.call_later(seconds, lambda: self._poll(seconds), on_lost=self._lost)

    def _poll(self, waited: float) -> None:
        reader = self._reader
        if reader is None or reader._broken is not None or not reader._line:
            self._polling = False
            if reader is not None and reader._line:  # somebody came in between
                self.polls(reader)
            return
        if self._is_orphan(reader):
            return
        try:
            reader._hand_off()
        finally:  # whatever a callback raises: the others wait for the next look
            tail_id, now = self._view.tail_id, self.clock.monotonic()
            if tail_id != self._seen_id:  # in this look, or in one that the reader took by itself
                self._seen_id, self._moved_at = tail_id, now
            seconds = min(waited * 2, (now - self._moved_at) * POLL_SHARE)
            self._poll_in(min(max(seconds, self._first_poll), self._poll_interval))

    def _is_orphan(self, reader: Reader) -> bool:
        """Whether the queue was erased: then who waits is told, and every later call."""
        try:
            self._check_there()
        except QueueClosed as error:
            self._polling = False
            reader._orphan(copy_of(error))
            return True
        return False

    def _lost(self, cause: BaseException) -> None:
        if self._reader is not None:
            self._reader._break(KestrelError(f"the maintenance thread died: {cause!r}"))

    def moved(self, reader: Taking) -> None:
        self._reader = cast(Reader, reader)
        if not self._maintenance_armed:
            self._maintenance_armed = True
            try:
                call_later = self.clock.call_later
                self._next_round = call_later(CHECKPOINT_INTERVAL, self._maintain, on_lost=self._lost)
            except RuntimeError:  # no thread can be started: the next commit tries again
                self._maintenance_armed = False
            except BaseException:
                self._maintenance_armed = False
                raise

    def _maintain(self) -> None:
        self._maintenance_armed = False
        reader = self._reader
        if reader is None or reader._broken is not None or self._is_orphan(reader):
            return
        reader._quiet = False
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            reader._keep_limits()
        if reader._unsaved:
            trouble, what = self._readership.trouble, f"saving the place of {reader.full_name}"
            try:
                with self._readership.guard(wait=False):  # else this thread would wait, and all timers of the process
                    pass
                reader.checkpoint(durable=True)
                trouble.end(what)
            except QueueLocked:
                self.moved(reader)
            except (OSError, QueueClosed) as error:
                trouble.begin(what, error)
                self.moved(reader)

    # -- the end -----------------------------------------------------------------------------------------------------

    def closed_reader(self, reader: Reader) -> None:
        """The reader has closed, and with it all that was opened for it."""
        forget(self)
        try:
            self._readership.release(reader)
        finally:
            self._readership.leave()
            self._let_go()

    def _let_go(self) -> None:
        for timer in (self._next_poll, self._next_round):
            if timer is not None:  # it would keep all of this alive
                timer.cancel()
        with self._looking:
            self._gone = True
            self._view.close()
        self._directory.close()

    def _dismiss(self, error: QueueClosed) -> None:
        if self._reader is not None:
            self._reader._dismiss(error)

    def close(self) -> None:
        """At the end of the interpreter, or when the reader could not be made."""
        forget(self)
        try:
            if self._reader is not None:
                self._reader.close()
        finally:
            self._readership.leave()
            self._let_go()

    def _abandon(self) -> None:
        self._readership.abandon(ForkedQueue(self._pid))
        self._looking = threading.Lock()
        self._gone = True  # figures go by what was seen
        self._view.close()
        self._directory.close()
