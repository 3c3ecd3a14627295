"""``Follower``: reads the log of a queue slot by slot, keeps a folder at its end, and watches its owner's lease.

Rules:
1. What is missing after the last slot is the end of the log only if the manifests that were listed since that slot was
   found name no later one. Else this follower has slept longer than the history, and begins again at the newest
   manifest (G6). The listing is repeated after ``LISTING_SECONDS``: a history is longer.
2. A lease is over only by a look at the log that was answered, and that found the slot in which the log ended still
   there. A store that is away, was put back, or is a folder that is not mounted says nothing of an owner.
3. Nothing is appended here.

NOTE ON LOCKING: none of its own; its owner does one thing at a time. What ``Standby.status`` reads meanwhile changes by
one store each.
"""

from __future__ import annotations

from collections.abc import Callable

from kestrelpy._value import Value
from kestrelpy.clock import SystemClock
from kestrelpy.ship import log
from kestrelpy.ship.errors import HistoryMismatch, StoreDamaged
from kestrelpy.ship.lease import LeaseWatch
from kestrelpy.ship.log import Steps, carry_out
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.slots import CLOSE, Slot
from kestrelpy.ship.standby_folder import StandbyFolder

__all__ = ["StandbyStatus"]

LISTING_SECONDS = 30.0
"""After so long, the manifests are listed once more before a missing slot is taken for the end."""
RESERVED_SECONDS = 10.0
"""For so long a queue that was handed over is left to other machines by the one that has done it."""
MOST_BYTES = 8 << 20
"""So many bytes of slots are read before they are written."""
_MOST_BEGINNINGS = 3
"""So often one look begins again at a newer manifest."""


class StandbyStatus(Value, kw_only=True):
    """How a standby follows its queue, at one moment.

    ``state``: ``"following"``; ``"behind"``: the end of the log is not reached yet; ``"away"``: the store does not
    answer, or does not have the queue; ``"full"``: there is no room on disk here; ``"damaged"``: something in the store
    or in the folder is wrong; each of these is tried again. ``"over"``: the queue may be taken over. ``"taken"``: it
    was, by this standby; ``"closed"``. ``slot``, ``last_id``: up to there everything is on disk here.
    ``behind_seconds``: since the end of the log was last reached; 0 while it is. ``owner``: what the last owner is
    called. ``lease_left``: seconds until its lease is over, if it appends nothing more; ``None`` if it has none.
    ``last_error``: the last one, empty if there was none.
    """

    slot: int
    last_id: int
    behind_seconds: float
    owner: str
    lease_left: float | None
    state: str
    last_error: str


class Follower:
    """Keeps ``folder`` at the end of the log of ``shipped``."""

    def __init__(
        self, folder: StandbyFolder, shipped: ShippedQueue, elapsed: Callable[[], float] = SystemClock.elapsed
    ) -> None:
        self.state: LogState | None = None
        """The log, as far as it was read."""
        self.slot = self.last_id = 0
        """How far the folder has come."""
        self.owner = ""
        self.is_over = False
        """Whether the queue may be taken over, as of the last look."""
        self.is_handed_over = False
        self.at_end_since: float | None = None
        """When the end was last reached."""
        self.is_at_end = False
        """Whether the last look has reached it."""
        self.watch = LeaseWatch(elapsed)
        self._elapsed = elapsed
        self._folder = folder
        self._shipped = shipped
        self._epoch = 0  # whose owner is known
        self._listed_at: float | None = None  # since the last slot that was found

    def look(self, *, surely: bool = False) -> bool:
        """Read what is new in the log, a part of it if it is much, and write it. Returns whether there was something.
        ``surely``: list the manifests if there was nothing, however short ago that was done.

        Raises ``NoSuchQueue``, ``StoreUnavailable``, ``StoreDamaged``, ``HistoryMismatch``, ``UnsupportedFormat``, and
        as ``StandbyFolder.bring_to``.
        """
        if surely:
            self._listed_at = None
        before = self.slot
        try:
            is_end = self._read()
        except StoreDamaged:
            self.is_over = self.is_at_end = False
            self._bring()  # what comes before the damage counts
            raise
        if not is_end:
            self.is_over = self.is_at_end = False
        state = self._bring()
        assert state is not None
        self.is_at_end = is_end
        self._note_owner(state)
        if is_end:
            self.watch.see(state)
            self.at_end_since = self._elapsed()
            may_have_it = self.is_handed_over and self._may_take(state)
            self.is_over = (may_have_it or self.watch.left == 0.0) and self._is_there(state)
        return not is_end or state.slot != before

    def _may_take(self, state: LogState) -> bool:
        """Whether a queue that was handed over is ours to take. Who has handed it over leaves it to others for a while:
        he would be the quickest.
        """
        return not self._folder.was_owner(state) or self.watch.unchanged >= RESERVED_SECONDS

    def _bring(self) -> LogState | None:
        state = self.state
        if state is not None:
            self._folder.bring_to(state)
            self.slot, self.last_id = state.slot, state.last_id
        return state

    def begin_again(self) -> None:
        """Believe nothing of the folder: somebody has opened it, and given that up."""
        self._folder.forget_all()
        self.state = None
        self.is_over = False

    def _read(self) -> bool:
        """Read on. Returns whether the end was reached."""
        if self.state is None:
            self._begin()
        size = begun = 0
        while size < MOST_BYTES and begun < _MOST_BEGINNINGS:
            assert self.state is not None
            try:
                slot = self._ask(log.read_slot(self._shipped.prefix, self.state.slot + 1))
                if slot is not None:
                    log.follow(self._shipped.prefix, self.state, slot)
            except StoreDamaged:
                if self._newest() <= self.state.begun_at:
                    raise
                self._begin()  # a FENCE in a hole: ``log.read_on``
                begun += 1
                continue
            if slot is None:
                if self._is_end():
                    return True
                self._begin()
                begun += 1
                continue
            self._note(slot)
            size += len(slot.frames)
        return False

    def _begin(self) -> None:
        """Begin at the newest manifest."""
        state = self._shipped.at_end()
        assert state.header is not None
        if state.slot < self.slot:
            reason = f"the log ends at slot {state.slot}, and slot {self.slot} was there"
            raise HistoryMismatch(reason, self.last_id, state.last_id)
        self._folder.recent.clear()
        if self.state is not None:
            self._folder.forget_all()
        handed_over = False
        if state.header.kind == CLOSE:  # its note is in no manifest
            slot = self._shipped.slot(state.slot)
            handed_over = slot is not None and slot.handed_over
        self.state, self.is_handed_over, self._listed_at = state, handed_over, None

    def _note(self, slot: Slot) -> None:
        self._listed_at = None
        self.is_handed_over = slot.handed_over
        if slot.frames:
            self._folder.recent[slot.header.slot] = slot

    def _is_end(self) -> bool:
        """Whether what is missing is the end of the log."""
        assert self.state is not None
        now = self._elapsed()
        if self._listed_at is not None and now < self._listed_at + LISTING_SECONDS:
            return True
        if self._newest() > self.state.slot:
            return False
        if not self._is_there(self.state):
            return False
        self._listed_at = now
        return True

    def _is_there(self, state: LogState) -> bool:
        """Whether the slot in which the log ended is still there; if not, there is a later manifest: garbage collection
        never deletes the last slot. Raises ``HistoryMismatch`` if there is neither (rule 2).
        """
        slot = self._ask(log.read_slot(self._shipped.prefix, state.slot))
        if slot is not None and slot.crc == state.crc:
            return True
        self._listed_at = None
        if self._newest() > state.slot:
            return False
        raise HistoryMismatch(f"the log ended at slot {state.slot}, which is not there any more", self.last_id, 0)

    def _newest(self) -> int:
        return self._ask(log.newest_manifest(self._shipped.prefix))

    def _ask(self, steps: Steps[log.T]) -> log.T:
        return carry_out(steps, self._shipped.store, bool)

    def _note_owner(self, state: LogState) -> None:
        """Find out what the owner is called, once for each epoch."""
        if self._epoch != len(state.fences):
            fence = self._shipped.slot_there(state.fences[-1])
            self.owner, self._epoch = fence.owner, len(state.fences)
