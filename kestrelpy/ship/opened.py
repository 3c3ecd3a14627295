"""Opening the log of a queue, for the process that opens the queue: rules S5, S6, S8 and S13 of docs/ship.md."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.file_names import ship_name
from kestrelpy._journal.recovery import Recovered, write_mark
from kestrelpy._journal.segment import Segment
from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.ship.checking import probe
from kestrelpy.ship.errors import (
    Fenced,
    HistoryMismatch,
    NoSuchQueue,
    OwnerAlive,
    ShippingRequired,
    StoreUnavailable,
)
from kestrelpy.ship.history import ID_JUMP, History
from kestrelpy.ship.identity import IDENTITY_KEY, QueueIdentity, encode_identity
from kestrelpy.ship.lease import LeaseWatch, OwnLease
from kestrelpy.ship.log import FIRST_PAUSE, Opening, carry_out, open_log, read_on
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.opening import url_of
from kestrelpy.ship.options import Ship
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.ship_file import ShipFile, read_ship_file, remove_ship_file, write_ship_file
from kestrelpy.ship.slots import CLOSE, Slot
from kestrelpy.ship.store import Store
from kestrelpy.ship.takeover import Takeover

if TYPE_CHECKING:
    from kestrelpy._journal.queue_files import QueueFiles

LISTING_SECONDS = 10.0
"""For so long the end of a log is looked for again, if it is below a slot that was ours: listings lag."""
PATIENCE = 5.0
"""Seconds that an opening waits beyond the lease of another owner."""
LOOK_SECONDS, LEAST_SECONDS = 0.5, 0.001
"""So often it looks meanwhile whether that owner appends anything, at least and at most."""


class OpenLog:
    """A log in which this owner has the last FENCE. ``first_id``: the least id that it may give out. ``jump``: of a
    work queue, how far the ids of jobs must jump. ``taken_over``: the log's last owner was another one.
    """

    def __init__(
        self,
        options: Ship,
        store: Store,
        queue: str,
        opening: Opening,
        state: LogState,
        first_id: int,
        now_ms: Callable[[], int],
        directory: Directory,
        file: ShipFile,
        jump: int,
        lease: OwnLease | None,
        *,
        taken_over: bool,
    ) -> None:
        self.options = options
        self.store = store
        self.queue = queue
        self.prefix = f"{queue}/"
        self.opening = opening
        self.state = state
        self.now_ms = now_ms
        self.first_id = first_id
        self.jump = jump
        self.lease = lease
        self.taken_over = taken_over
        self.taken = state.ledger.taken if state.ledger is not None else 0
        """The last batch that was taken from the store when the log was opened."""
        self._directory = directory
        self._file = file

    def note_jumped(self) -> None:
        """The ids of jobs have jumped, and that is on disk. Raises ``OSError``."""
        self._file = self._file._replace(jumped=True)
        write_ship_file(self._directory, self.queue, self._file)

    def note_slot(self, state: LogState) -> None:
        """Note in ``jobs.ship`` that the log has come so far. Raises ``OSError``."""
        self._file = self._file._replace(slot=state.slot)
        write_ship_file(self._directory, self.queue, self._file)


class _IsAlive(Exception):
    """The owner of the log that ends with ``state`` has a lease, and it may not be over."""

    def __init__(self, state: LogState) -> None:
        super().__init__()
        self.state = state


class LogOpening:
    """One opening of a queue's log, while nobody else has the queue open here. ``found``: its journal."""

    def __init__(
        self, ship: Ship | Takeover, files: QueueFiles, found: Recovered, clock: Clock, *, of_jobs: bool = False
    ) -> None:
        self._options = options = ship.options if isinstance(ship, Takeover) else ship
        self._claimed_epoch = ship.epoch if isinstance(ship, Takeover) else None
        self._of_jobs = of_jobs
        self._queue = files.queue
        self._directory = files.directory
        self._found = found
        self._clock = clock
        self._store = store = options.open()
        self._shipped = ShippedQueue(store, files.queue)
        self._prefix = f"{files.queue}/"
        self._deadline = SystemClock.monotonic() + options.close_timeout
        self._watch = LeaseWatch()
        self._over = (-1, 0)
        self._alive_until = 0.0

    def run(self) -> OpenLog:
        """Append a FENCE. From here on the log is ours, and ``found`` says where ids begin.

        Raises ``StoreTooWeak``, ``StoreUnavailable``, ``StoreDamaged``, ``HistoryMismatch``, ``Fenced``,
        ``OwnerAlive``, ``OSError``.
        """
        probe(self._store, self._prefix)
        file = self._identify()
        state = self._end_of_log(file)
        if file.lease_over and file.restored_slot == state.slot:
            self._over = (state.slot, state.crc)
        found, of_jobs = self._found, self._of_jobs
        history = History(file, found.segments, found.tail_id, self._read, of_jobs=of_jobs)
        first_id, taken_over, judged = 0, False, (-1, 0)

        def judge(state: LogState) -> int:
            nonlocal first_id, taken_over, judged
            if judged != (state.slot, state.crc):  # it reads a segment: once for each end of the log
                self._check_claim(state)
                fence = self._fence(state, len(state.fences))
                header, owner = (fence.header, fence.owner) if fence is not None else (None, "")
                first_id = history.judge(state, header, self._shipped_id(state, file), owner)
                taken_over = state.slot > 0 and not history.is_ours(state)
                judged = (state.slot, state.crc)
            if taken_over and self._may_be_alive(state):
                raise _IsAlive(state)
            return first_id

        file, opening, lease, state = self._append_fence(file, judge, state)
        found.queue_id = file.queue_id
        above = first_id - found.tail_id - 1
        jump = -(-above // ID_JUMP) * ID_JUMP if of_jobs and above > 0 else 0
        if not of_jobs and first_id > found.tail_id + 1:
            found.tail_id = first_id - 1
            write_mark(self._directory, self._queue, found, found.watermark)  # whoever takes batches in asks no log
        return OpenLog(
            self._options,
            self._store,
            self._queue,
            opening,
            state,
            first_id,
            self._now_ms,
            self._directory,
            file,
            jump,
            lease,
            taken_over=taken_over,
        )

    def _append_fence(
        self, file: ShipFile, judge: Callable[[LogState], int], state: LogState
    ) -> tuple[ShipFile, Opening, OwnLease | None, LogState]:
        """Append a FENCE as soon as ``judge`` lets us. Before that, nothing is written but our nonce."""
        options, nonce = self._options, os.urandom(16)
        owner = options.owner or f"{socket.gethostname()}:{os.getpid()}"
        has_noted = False
        while True:
            opening = Opening(file.queue_id, nonce, owner, options.lease_ms, self._now_ms())
            lease = OwnLease(options.lease) if options.lease is not None else None  # before the FENCE is sent
            try:
                judge(state)  # before anything is written
                if not has_noted:
                    file = file.opening(nonce)
                    write_ship_file(self._directory, self._queue, file)
                    has_noted = True
                state = carry_out(open_log(self._prefix, opening, judge, state), self._shipped.store, self._wait)
                break
            except _IsAlive as alive:
                state = self._await_lease(alive.state)
        assert state.header is not None
        file = file.opened(nonce, state.header.epoch, state.slot)
        write_ship_file(self._directory, self._queue, file)
        return file, opening, lease, state

    # -- another owner's lease ---------------------------------------------------------------------------------------

    def _check_claim(self, state: LogState) -> None:
        """A standby takes the queue from that owner whose lease it has watched, and from no other one."""
        header = state.header
        if self._claimed_epoch is not None and header is not None and header.epoch != self._claimed_epoch:
            owner = self._shipped.fence(state, header.epoch).owner
            raise Fenced(header.epoch, owner, self._found.tail_id + 1, self._found.tail_id)

    def _may_be_alive(self, state: LogState) -> bool:
        """Whether the log's owner has a lease, and has not left, and nobody knows that it is over."""
        header = state.header
        has_lease = header is not None and header.lease_ms > 0 and header.kind != CLOSE
        return has_lease and self._claimed_epoch is None and (state.slot, state.crc) != self._over

    def _await_lease(self, state: LogState) -> LogState:
        """Wait until the lease of the log's owner is over. Returns the end of the log. Raises ``OwnerAlive`` if that
        does not come within the lease and ``PATIENCE``.
        """
        while self._may_be_alive(state):
            self._watch.see(state)
            left, now = self._watch.left or 0.0, SystemClock.elapsed()
            assert state.header is not None
            self._alive_until = self._alive_until or now + state.header.lease_ms / 1000 + PATIENCE
            if not left:
                self._over = (state.slot, state.crc)
            elif now > self._alive_until:
                raise OwnerAlive(self._shipped.fence(state, state.header.epoch).owner, left)
            else:
                pause(min(max(left, LEAST_SECONDS), LOOK_SECONDS))
                self._deadline = SystemClock.monotonic() + self._options.close_timeout
                state = carry_out(read_on(self._prefix, state), self._shipped.store, self._wait)
        return state

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000

    def _wait(self, seconds: float) -> None:
        """Between two repetitions of a request. A queue is not opened while its store is away."""
        if SystemClock.monotonic() + seconds > self._deadline:
            raise StoreUnavailable(self._store.describe(), self._prefix, "no answer in time")
        pause(seconds)

    def _identify(self) -> ShipFile:
        """Which queue this is, here and in the store. A new queue has its id in ``jobs.ship`` before the store has it:
        if this is cut short, the next opening is the same queue's.
        """
        url = url_of(self._options.store, self._store)
        file = read_ship_file(self._directory, self._queue)
        here = self._found.queue_id or (file.queue_id if file is not None else b"")
        there = self._shipped.identity()
        if there is None:
            if file is not None and file.url == url and file.slot_there:
                reason = f"the store has nothing of this queue, and slot {file.slot_there} of its log was there"
                raise HistoryMismatch(reason, self._found.tail_id, 0)
            if not here:
                here = os.urandom(16)
                write_ship_file(self._directory, self._queue, ShipFile(url, here))
            mine = QueueIdentity(self._queue, here, self._now_ms(), self._of_jobs)
            self._store.create(self._prefix + IDENTITY_KEY, encode_identity(mine))
            there = self._shipped.identity()
        if there is None:
            raise StoreUnavailable(self._store.describe(), self._prefix, "what was created is not there")
        if there.queue_id == here and not self._found.queue_id:  # whoever takes batches in begins no other queue
            write_mark(self._directory, self._queue, Recovered(queue_id=here, tail_id=self._found.tail_id), 0)
        if there.queue_id != here:
            reason = "another queue of this name" if here else "this queue, and the folder has not: restore it first"
            raise HistoryMismatch(f"the store has {reason}", self._found.tail_id, 0)
        if there.of_jobs != self._of_jobs:
            kinds = ("a queue", "a work queue")
            reason = f"in the store this is {kinds[there.of_jobs]}, and it is opened as {kinds[self._of_jobs]}"
            raise HistoryMismatch(reason, self._found.tail_id, 0)
        return ShipFile(url, here) if file is None or file.url != url else file

    def _end_of_log(self, file: ShipFile) -> LogState:
        """Where the log ends. A listing may lag, and show none of its manifests (S6). One that shows a later slot says
        that one is lost: a FENCE must not stand in its place.
        """
        until, seconds = SystemClock.monotonic() + LISTING_SECONDS, FIRST_PAUSE
        while True:
            try:
                state = self._shipped.at_end()
            except NoSuchQueue:
                state = LogState()
            if state.slot >= file.slot_there or SystemClock.monotonic() + seconds > until:
                return state
            pause(seconds)
            seconds *= 2

    def _fence(self, state: LogState, epoch: int) -> Slot | None:
        """The FENCE of an epoch; ``None`` if the log has no such epoch."""
        return self._shipped.fence(state, epoch) if 0 < epoch <= len(state.fences) else None

    def _shipped_id(self, state: LogState, file: ShipFile) -> int:
        """The last id in the log when our last epoch ended; 0 if it has not ended, or there was none."""
        after = self._fence(state, file.epoch + 1) if file.epoch else None
        return after.header.last_id if after is not None else 0

    def _read(self, segment: Segment, offset: int, size: int) -> bytes:
        file = self._directory.open(segment.name)
        try:
            return file.read(offset, size)
        finally:
            file.close()


def pause(seconds: float) -> None:
    """Sleep. Signals are handled meanwhile."""
    ThreadWaiter().wait(seconds)


def open_log_of(
    ship: str | Ship | Takeover | Literal[False] | None,
    files: QueueFiles,
    names: list[str],
    found: Recovered,
    clock: Clock,
    *,
    of_jobs: bool,
) -> OpenLog | None:
    """Open the log of a queue that is being opened; ``None`` if the queue is not shipped. ``names``: the files in its
    folder. ``found``: its journal; it is told where ids begin. ``of_jobs``: it is a work queue's.

    Raises ``ShippingRequired`` if nothing was said of a queue that is shipped, ``TypeError``, and what
    ``LogOpening.run`` raises. With ``False`` the queue is detached.
    """
    if ship is None:
        file = read_ship_file(files.directory, files.queue)
        if file is None:
            return None
        raise ShippingRequired(files.queue, file.url)
    if ship is False:
        if ship_name(files.queue) in names:
            remove_ship_file(files.directory, files.queue)
        return None
    options = Ship(ship) if isinstance(ship, str) else ship
    if not isinstance(options, Ship | Takeover):
        raise TypeError(f"ship must be a URL, a Ship, None or False, not {type(ship).__name__}")
    return LogOpening(options, files, found, clock, of_jobs=of_jobs).run()
