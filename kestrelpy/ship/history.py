"""Whether a queue here and a log in a store are one history: rule S8 of docs/ship.md.

If they are not, nothing is written. If they are, and the log's last owner was another one, the ids that this owner
gives out begin far above those in the log (S13): the other one may have given out ids that never came to the log.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from kestrelpy._journal.recovery import MOST_LOST
from kestrelpy._journal.segment import Segment
from kestrelpy.ship.errors import Fenced, HistoryMismatch
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.ship_file import ShipFile
from kestrelpy.ship.slots import SlotHeader

ID_JUMP = 1 << 30
"""A new owner begins ids so far above the last one in the log; and no owner comes so far above what it has shipped."""
ID_STEP = 1 << 25
"""As long as a new owner has shipped nothing, it comes at most so far; and a newer one begins so far above it. Ids far
above all items are damage to whoever opens a journal (``MOST_LOST``), so not each of them may jump.
"""
_READ_BYTES = 1 << 20


class History:
    """What is known here of a queue. ``segments``: all that are here, in order; each is closed. ``last_id``: the last
    id that was ever given out here. ``read``: bytes of a segment's file.

    ``of_jobs``: it is a work queue's journal. The ids of its records are known to nobody, and do not jump; those of
    its jobs do, by as much, as soon as the journal is open (``ShipFile.jumped``). Till then the FENCE says so.
    """

    def __init__(
        self,
        file: ShipFile,
        segments: list[Segment],
        last_id: int,
        read: Callable[[Segment, int, int], bytes],
        *,
        of_jobs: bool = False,
    ) -> None:
        self._file = file
        self._segments = segments
        self._last_id = last_id
        self._read = read
        self._of_jobs = of_jobs

    def is_ours(self, state: LogState) -> bool:
        """Whether the log's last owner was this queue, here."""
        return state.header is not None and state.header.nonce in self._file.nonces

    def judge(self, state: LogState, fence: SlotHeader | None, shipped_id: int = 0, owner: str = "") -> int:
        """The least id that the next epoch may give out. ``fence``, ``owner``: of the log's last epoch, if there is
        one. ``shipped_id``: the last id in the log when our last epoch ended. Raises ``HistoryMismatch`` and
        ``Fenced``.
        """
        last_first_id = fence.first_id if fence is not None else 0
        header = state.header
        if state.slot < self._file.slot_there:
            known, whose = self._file.slot_there, "ours" if self._file.slot else "there"
            raise self._mismatch(state, f"the log ends at slot {state.slot}, and slot {known} was {whose}")
        if header is None:
            return self._last_id + 1
        if header.queue_id != self._file.queue_id:
            raise self._mismatch(state, "the store has the log of another queue of this name")
        ours = self.is_ours(state)
        if not ours and self._file.epoch:
            raise Fenced(header.epoch, owner, shipped_id + 1, self._last_id)
        if self._file.restored_slot and not self._file.restored_to_end:
            raise self._mismatch(state, "the queue was restored to a moment before the log's end: ship it elsewhere")
        has_more = self._compare(state)
        if ours:
            return self._last_id + 1 if self._of_jobs and self._file.jumped else max(self._last_id + 1, last_first_id)
        if has_more:
            raise self._mismatch(
                state, "the queue here has items that are not in the log, and the log's owner was another"
            )
        has_shipped = fence is None or state.place.last_id > fence.last_id
        if self._of_jobs:  # as often as owners have jumped of which the log has nothing else
            jumped = 0 if has_shipped else last_first_id - state.place.last_id
            return state.place.last_id + (-(-jumped // ID_JUMP) + 1) * ID_JUMP
        step = ID_JUMP if has_shipped or last_first_id <= state.place.last_id + 1 else ID_STEP
        first_id = max(state.place.last_id, self._last_id, last_first_id) + step
        if first_id - state.place.last_id > MOST_LOST:
            raise self._mismatch(state, "owner after owner has had the queue, and put nothing into the log")
        return first_id

    def _mismatch(self, state: LogState, reason: str) -> HistoryMismatch:
        return HistoryMismatch(reason, self._last_id, state.place.last_id)

    def _compare(self, state: LogState) -> bool:
        """Compare the place where the log ends. Returns whether there is more here than that."""
        place = state.place
        later = [each for each in self._segments if each.number > place.number]
        has_items = any(each.items for each in later)
        if not place.number:
            return has_items
        here = next((each for each in self._segments if each.number == place.number), None)
        if here is None:
            if state.tail or len(later) != len(self._segments) or not later or self._is_before(later[0], state):
                raise self._mismatch(state, f"segment {place.number}, in which the log ends, is not here")
            return has_items  # it is retired here, which needs its SEAL; the newest one never is
        if here.header.marker != place.marker or here.records_end < place.offset:
            raise self._mismatch(state, f"segment {place.number} here ends before it does in the log")
        if self._crc(here, place.offset) != place.segment_crc:
            raise self._mismatch(state, f"segment {place.number} here is not the one in the log")
        return has_items or here.records_end > place.offset

    def _is_before(self, first: Segment, state: LogState) -> bool:
        """Whether ``first``, the first segment here, does not come after the place where the log ends."""
        header, place = first.header, state.place
        return header.first_id <= place.last_id or header.previous_number < place.number

    def _crc(self, segment: Segment, end: int) -> int:
        at = crc = 0
        while at < end:
            data = self._read(segment, at, min(end - at, _READ_BYTES))
            if not data:
                break
            crc = crc32(data, crc)
            at += len(data)
        return crc
