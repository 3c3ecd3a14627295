"""``StoreInbox``: the thread that takes in what was published in the store, for the queue's owner.

Rules:
1. One batch after another, in the order of their numbers: batch n + 1 is looked for when n is over. Which one is the
   next says the ledger of the inbox, which is shipped with the items: so a restart, a restore and a takeover know it.
2. A batch is fetched into the inbox of the folder, under names of our own, and then taken in like any other. What is
   known already is passed over, and nothing of it is fetched.
3. What is damaged or missing is read again, ``MOST_LOOKS`` times in all. Then the batch is refused: it must not stop
   those after it. A batch of a newer version waits, and so do those after it.
4. The store is asked without any lock. One part is in memory at a time.
5. The thread holds its queue by a weak reference, so that a queue that nobody has ends.

NOTE ON LOCKING: none of its own. The thread takes the locks that ``InboxHost`` says. The attributes that others read
change by one store each, and the bell is atomic.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy import _logging
from kestrelpy._journal.file_names import part_name
from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.errors import KestrelError
from kestrelpy.inbox.format import BatchPart, LedgerState, PublishedBatch, StoreMark
from kestrelpy.ship import fetching, in_objects
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.log import Steps, ask, carry_out, resume
from kestrelpy.ship.opened import OpenLog, pause

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Directory
    from kestrelpy.inbox.format import Intent

MOST_LOOKS = 3
"""So often something is read that is damaged or missing, before its batch is refused."""
LONGEST_WAIT = 60.0
"""Seconds between two looks, at most, if the store does not answer or the disk is full."""
JOIN_SECONDS = 0.5
_NO_ID = bytes(16)


class Target(Protocol):
    """The inbox of the queue that is open here: an ``InboxHost``."""

    name: str

    @property
    def is_open(self) -> bool: ...

    def now_ms(self) -> int: ...

    def open_folder(self) -> Directory: ...

    def next_stored(self) -> int: ...

    def knows(self, batch: PublishedBatch) -> bool: ...

    def pass_over(self, stored: int, mark: StoreMark | None) -> None: ...

    def take_stored(self, batch: PublishedBatch) -> bool: ...

    def look(self) -> None: ...

    def store_figures(self) -> tuple[int, int]: ...


class LedgerShipper(Protocol):
    """Who ships the ledger: a ``Shipper``."""

    def copied_items(self) -> int: ...

    def note_ledger(self, state: LedgerState, from_items: int) -> None: ...


class StoreInbox:
    """Takes in the batches of the store for one open queue. ``error``: why the next one is not taken in now."""

    def __init__(self, log: OpenLog, shipper: LedgerShipper, target: Target) -> None:
        self.taken = log.taken
        self.remembers_ms = log.options.history_ms
        self.error = ""
        self._log = log
        self._shipper = shipper
        self._target = weakref.ref(target)
        self._queue = target.name
        self._interval = log.options.inbox_interval
        self._trouble = _logging.Trouble()
        self._bell = ThreadWaiter()
        self._is_over = False
        self._number = self._looks = 0  # of the batch that is being fetched
        self._fetched: dict[bytes, BatchPart] = {}
        self._thread: threading.Thread | None = None

    # -- the copy of the inbox ---------------------------------------------------------------------------------------

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        """``LogOwner.note_ledger``."""
        self._shipper.note_ledger(state, from_items)

    def copied_items(self) -> int:
        """How many items are in the log, of all that were ever put."""
        return self._shipper.copied_items()

    def fetch_unfinished(self, folder: Directory, intent: Intent) -> None:
        """At an opening: fetch a batch that another owner has begun. Raises ``StoreUnavailable``, ``OSError``."""
        log = self._log
        steps = fetching.fetch_unfinished(log.prefix, self._queue, intent, folder, log.now_ms())
        carry_out(steps, log.store, pause)

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look. If no thread can be started, batches wait for the next opening, and that is logged."""
        if self._interval is None:
            return
        thread = threading.Thread(target=self._run, name=f"kestrelpy-ship-in-{self._queue}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._note_error(error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Look no more. The thread ends when its request is answered, and does nothing more. May be repeated."""
        self._is_over = True
        self._bell.give(None)

    def join(self) -> None:
        """Wait for the end of the thread, after ``stop``: not for long, as it may wait for the store."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def figures(self) -> tuple[int, int]:
        """The last batch that was taken in, and how many are remembered that were refused."""
        target = self._target()
        return (self.taken, 0) if target is None else target.store_figures()

    def _run(self) -> None:
        interval = seconds = self._interval or LONGEST_WAIT
        while not self._is_over:
            goes_on, is_well = self._look_once()
            if goes_on is None:
                return
            seconds = interval if is_well else max(interval, min(2 * seconds, LONGEST_WAIT))
            if not goes_on:
                self._bell.wait(seconds)

    def _look_once(self) -> tuple[bool | None, bool]:
        """One look. Returns whether there may be more at once, ``None`` at the end, and whether all went well."""
        target = self._target()
        if target is None or not target.is_open:
            return None, True
        what = f"taking in what was published in the store for queue {self._queue}"
        try:
            goes_on = self._carry_out(self.look(target))
        except BaseException as error:
            self._note_error(error)
            self._trouble.begin(what, error)
            return False, False
        self._trouble.end(what)
        self.error = ""
        return goes_on, True

    def _note_error(self, error: BaseException) -> None:
        self.error = str(error) if isinstance(error, KestrelError) else f"{type(error).__name__}: {error}"

    def _carry_out(self, steps: Steps[bool]) -> bool:
        """Carry out a look, until the queue is closed."""
        answer: object = None
        while not self._is_over:
            try:
                request: Any = resume(steps, answer)
            except StopIteration as end:
                goes_on: bool = end.value
                return goes_on
            answer = ask(request, self._log.store, pause)
        return False

    # -- a look, without I/O on the store ----------------------------------------------------------------------------

    def look(self, target: Target) -> Steps[bool]:
        """Take in the next batch, if it is published. Returns whether there may be another one at once.

        Raises ``StoreUnavailable``, ``StoreDamaged``, ``UnsupportedFormat`` and ``OSError``; the next look goes on.
        """
        number = target.next_stored()
        if not number:  # one is here and is not over: perhaps it waits for room
            if target.is_open:
                target.look()
            return target.next_stored() > 0
        if number != self._number:
            self._forget_parts(target)
            self._number = number
        batch: PublishedBatch | None = None
        try:
            batch = yield from fetching.read_batch(self._log.prefix, number)
            if batch is None:
                return False
            if target.knows(batch):
                target.pass_over(number, None)
                return True
            parts = yield from self._fetch(target, batch)
        except StoreDamaged as damage:
            self._looks += 1
            if self._looks < MOST_LOOKS:
                raise
            self._refuse(target, number, damage, _NO_ID if batch is None else batch.batch_id)
            return True
        if not target.take_stored(batch._replace(parts=parts, stored=number)):
            return False
        self._fetched.clear()  # they are the batch's now
        return target.next_stored() > 0

    def _fetch(self, target: Target, batch: PublishedBatch) -> Steps[tuple[BatchPart, ...]]:
        """Fetch the parts that are not here yet, of this and earlier looks."""
        missing = [part for part in batch.parts if part.part_id not in self._fetched]
        folder = target.open_folder()
        try:
            for part in missing:
                steps = fetching.fetch_part(self._log.prefix, part, folder, self._queue, target.now_ms())
                self._fetched[part.part_id] = yield from steps
        finally:
            folder.close()
        return tuple(self._fetched[part.part_id] for part in batch.parts)

    def _refuse(self, target: Target, number: int, damage: StoreDamaged, batch_id: bytes) -> None:
        key = self._log.prefix + in_objects.batch_key(number)
        _logging.warning("%s of %s is refused: %s", key, self._log.store.describe(), damage)
        target.pass_over(number, StoreMark(batch_id, target.now_ms(), refused=True))
        self._forget_parts(target)

    def _forget_parts(self, target: Target) -> None:
        """Delete parts that were fetched for a batch that is over."""
        self._looks = 0
        if self._fetched:
            fetched, self._fetched = list(self._fetched.values()), {}
            folder = target.open_folder()
            try:
                for part in fetched:
                    with suppress(FileNotFoundError):
                        folder.unlink(part_name(self._queue, part.part_id))
            finally:
                folder.close()
