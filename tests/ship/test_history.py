"""Whether a queue here and a log in a store are one history: each reason why not, and where ids begin if they are."""

from __future__ import annotations

import pytest

from kestrelpy._journal import format as fmt
from kestrelpy._journal.recovery import MOST_LOST
from kestrelpy._journal.segment import Segment
from kestrelpy.ship import Fenced, HistoryMismatch
from kestrelpy.ship.history import ID_JUMP, ID_STEP, History
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.ship_file import ShipFile
from kestrelpy.ship.slots import SlotHeader
from tests.ship.examples import FILE, FIRST, MARKER, NONCE, NUMBER, QUEUE_ID, SECOND, example_log
from tests.ship.logs import slots_of

END = len(FIRST + SECOND)
LATER = NUMBER + 5
MINE = ShipFile("s3://bucket", QUEUE_ID, (NONCE,), 1, 1)
THEIRS = ShipFile("s3://bucket", QUEUE_ID, (b"n" * 16,))


def log_of(slots: int) -> LogState:
    """The first slots of the example: 0; FENCE; item 1; item 2; the SEAL; and more without items."""
    state = LogState()
    for slot in slots_of(example_log())[:slots]:
        assert state.apply(slot) is None
    return state


def fence_of(first_id: int, last_id: int = 0) -> SlotHeader:
    return slots_of(example_log())[0].header._replace(first_id=first_id, last_id=last_id)


def first(last_id: int = 2, records_end: int = END, marker: int = MARKER) -> Segment:
    """The segment of the example."""
    return Segment("", fmt.SegmentHeader(marker, QUEUE_ID, NUMBER, 1, 0, 0, 0, 0, 0), last_id, 5, records_end)


def second(first_id: int = 3, last_id: int = 2, previous: int = NUMBER) -> Segment:
    """The one after it."""
    return Segment("", fmt.SegmentHeader(MARKER, QUEUE_ID, LATER, first_id, 2, 5, previous, 2, END), last_id, 5, 96)


def judged(
    slots: int,
    file: ShipFile,
    segments: list[Segment],
    last_id: int,
    *,
    fence: SlotHeader | None = None,
    data: bytes = FILE,
    of_jobs: bool = False,
    shipped_id: int = 0,
) -> int:
    """Where ids begin. The journal here has these segments; the first one has the bytes ``data``."""
    history = History(file, segments, last_id, lambda segment, at, size: data[at : at + size], of_jobs=of_jobs)
    state = log_of(slots)
    return history.judge(state, fence or (fence_of(1) if slots else None), shipped_id)


def test_a_log_that_is_empty_takes_what_is_here() -> None:
    assert judged(0, THEIRS, [first()], 2) == 3
    assert judged(1, MINE, [first()], 2) == 3


def test_a_log_that_is_ours_goes_on() -> None:
    for slots in (2, 3, 4, 6):
        assert judged(slots, MINE, [first()], 2) == 3
    assert judged(3, MINE, [first()], 2, fence=fence_of(100)) == 100
    assert judged(3, MINE._replace(jumped=True), [first()], 2, fence=fence_of(100), of_jobs=True) == 3
    assert judged(4, MINE, [second(last_id=7)], 7) == 8  # the first segment is retired here


def test_the_log_of_another_owner_goes_on_far_above() -> None:
    assert judged(3, THEIRS, [first()], 2) == 2 + ID_JUMP
    assert judged(3, THEIRS, [first()], 2, fence=fence_of(500, 2)) == 500 + ID_STEP
    assert judged(3, THEIRS, [first()], 2, of_jobs=True) == 2 + ID_JUMP
    assert judged(3, THEIRS, [first()], 2, of_jobs=True, fence=fence_of(3 + ID_JUMP, 2)) == 2 + 3 * ID_JUMP
    assert judged(4, THEIRS, [second()], 2) == 2 + ID_JUMP


@pytest.mark.parametrize(
    ("slots", "file", "segments", "last_id", "options", "reason"),
    [
        (3, MINE._replace(slot=4), [first()], 2, {}, "the log ends at slot 3, and slot 4 was ours"),
        (0, MINE, [first()], 2, {}, "the log ends at slot 0, and slot 1 was ours"),
        (0, THEIRS._replace(restored_slot=2), [first()], 2, {}, "the log ends at slot 0, and slot 2 was there"),
        (3, THEIRS._replace(restored_slot=4, restored_to_end=True), [first()], 2, {}, "and slot 4 was there"),
        (3, MINE._replace(queue_id=b"q" * 16), [first()], 2, {}, "the log of another queue of this name"),
        (3, THEIRS._replace(restored_slot=2), [first()], 2, {}, "restored to a moment before the log's end"),
        (2, THEIRS, [first()], 2, {}, "has items that are not in the log, and the log's owner was another"),
        (1, THEIRS, [first()], 2, {}, "has items that are not in the log, and the log's owner was another"),
        (3, THEIRS, [first()], 2, {"fence": fence_of(3 + MOST_LOST, 2)}, "owner after owner has had the queue"),
        (3, MINE, [first(1, len(FIRST))], 1, {}, f"segment {NUMBER} here ends before it does in the log"),
        (3, MINE, [first(marker=7)], 2, {}, f"segment {NUMBER} here ends before it does in the log"),
        (3, MINE, [first()], 2, {"data": FILE[:-200] + b"x" * 200}, f"segment {NUMBER} here is not the one in the log"),
        (3, MINE, [first()], 2, {"data": FILE[:100]}, f"segment {NUMBER} here is not the one in the log"),
        (3, MINE, [second()], 2, {}, f"segment {NUMBER}, in which the log ends, is not here"),
        (4, MINE, [], 0, {}, f"segment {NUMBER}, in which the log ends, is not here"),
        (4, MINE, [second(first_id=2)], 2, {}, f"segment {NUMBER}, in which the log ends, is not here"),
        (4, MINE, [second(previous=7)], 2, {}, f"segment {NUMBER}, in which the log ends, is not here"),
    ],
)
def test_what_is_not_one_history(
    slots: int, file: ShipFile, segments: list[Segment], last_id: int, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(HistoryMismatch, match=reason) as error:
        judged(slots, file, segments, last_id, **options)  # type: ignore[arg-type]
    assert error.value.local_id == last_id


def test_an_owner_that_was_followed_by_another_one_is_over() -> None:
    with pytest.raises(Fenced) as error:
        judged(3, THEIRS._replace(epoch=1), [first()], 2, shipped_id=1)
    assert (error.value.epoch, error.value.first_unshipped_id, error.value.last_id) == (1, 2, 2)
