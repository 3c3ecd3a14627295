"""``max_lag_bytes``, ``max_lag_age``, ``lag_policy``: readers that are too far behind."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    FullPolicy,
    JournaledQueue,
    LagPolicy,
    QueueFull,
    ReaderConfig,
    UnknownItem,
    open_reader,
    scan,
)
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy.testing import FailingDisk, ManualClock
from tests.room.rooms import ITEM, SEGMENT, Rooms, drain, feed, lines

MOST = 8_000
"""The lag in bytes that the readers of this module may have: eight items."""


def lagging(policy: LagPolicy | str = LagPolicy.WARN, **options: Any) -> ReaderConfig:
    return ReaderConfig(**{"max_lag_bytes": MOST, "lag_policy": policy, **options})


def stats_of(queue: JournaledQueue, name: str = "") -> Any:
    return queue.stats().readers[name]


def saved_head(rooms: Rooms, name: str = "jobs+.checkpoint") -> int:
    folder = rooms.disk.directory("/q")
    try:
        state, _ = load_checkpoint(folder, name)
    finally:
        folder.close()
    assert state is not None
    return state.head


# -- WARN --------------------------------------------------------------------------------------------------------------


def test_one_line_when_it_begins_and_one_when_it_is_over(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open(default_reader=lagging())
    queue.reader()
    feed(queue, 8)
    rooms.look()
    assert (stats_of(queue).lagging, lines(caplog)) == (False, []), "within is not behind"
    feed(queue, 1)
    for _ in range(5):
        rooms.look()
    assert stats_of(queue).lagging
    assert lines(caplog) == ["reader jobs is too far behind (max_lag_bytes=8,000)"]
    drain(queue, 1)
    for _ in range(5):
        rooms.look()
    assert not stats_of(queue).lagging
    assert lines(caplog) == ["reader jobs is not too far behind any more"]
    assert stats_of(queue).skipped == 0
    queue.close()


def test_by_age(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open(default_reader=ReaderConfig(max_lag_age=100.0))
    feed(queue, 2, each=50, clock=rooms.clock)
    queue.reader()
    rooms.clock.advance(0.5)
    assert not stats_of(queue).lagging
    rooms.look()
    assert stats_of(queue).lagging, "the first item is older than 100 seconds"
    drain(queue, 1)
    rooms.look()
    assert not stats_of(queue).lagging
    rooms.clock.advance(60)
    assert stats_of(queue).lagging
    drain(queue, 1)
    rooms.look()
    assert not stats_of(queue).lagging
    assert {line.partition(" (")[0] for line in lines(caplog)} == {
        "reader jobs is too far behind",
        "reader jobs is not too far behind any more",
    }
    queue.close()


def test_by_age_without_a_read_where_the_segments_say_it(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = rooms.open(default_reader=ReaderConfig(max_lag_age=100.0))
    reader = queue.reader()
    feed(queue, 4, each=1, clock=rooms.clock)
    monkeypatch.setattr(type(queue._journal), "read", _must_not_read)
    rooms.clock.advance(90)
    assert not stats_of(queue).lagging
    rooms.clock.jump(20)
    rooms.look()
    assert stats_of(queue).lagging
    monkeypatch.undo()
    reader.close()
    queue.close()


def _must_not_read(*_: object) -> None:
    raise AssertionError("the segments say it already")


def test_an_open_read_holds_the_reader_back(rooms: Rooms) -> None:
    """All after it is done: the journal keeps it all the same, but for what is in the segment of the open read."""
    queue = rooms.open(default_reader=lagging())
    item = queue.get_future()
    feed(queue, 13)
    item.result()
    drain(queue, 12)
    assert queue.reader().bytes == len(ITEM)
    rooms.look()
    assert stats_of(queue).lagging
    queue.close()


def test_a_reader_that_nobody_has_open_or_has_made(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open(readers={"audit": lagging()}, default_reader=lagging())
    feed(queue, 9)
    rooms.look()
    assert lines(caplog) == ["reader jobs is too far behind (max_lag_bytes=8,000)"], "the one that will be made"
    queue.reader("audit", start="earliest").close()
    rooms.look()
    assert lines(caplog) == ["reader jobs+audit is too far behind (max_lag_bytes=8,000)"]
    queue.drop_reader("audit")
    rooms.look()
    rooms.look()
    assert lines(caplog) == ["reader jobs is too far behind (max_lag_bytes=8,000)"]
    queue.close()


def test_the_owner_sees_a_reader_that_is_open_elsewhere(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open(readers={"audit": lagging()}, default_reader=ReaderConfig())
    reader = rooms.elsewhere()
    feed(queue, 9)
    rooms.look()
    assert lines(caplog) == ["reader jobs+audit is too far behind (max_lag_bytes=8,000)"]
    drain(reader, 9)
    rooms.clock.advance(3)
    assert lines(caplog) == ["reader jobs+audit is not too far behind any more"]
    reader.close()
    queue.close()


def test_a_reader_elsewhere_looks_by_itself(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open()
    reader = rooms.elsewhere()
    feed(queue, 9)
    rooms.look()
    assert not reader.stats().lagging
    reader.configure(lagging())
    rooms.look()
    assert reader.stats().lagging
    assert lines(caplog) == ["reader jobs+audit is too far behind (max_lag_bytes=8,000)"]
    drain(reader, 9)
    rooms.look()
    assert not reader.stats().lagging
    reader.close()
    rooms.look()
    queue.close()


def test_a_configuration_that_comes_later_counts(rooms: Rooms) -> None:
    queue = rooms.open()
    feed(queue, 9)
    reader = queue.reader()
    rooms.look()
    assert not reader.stats().lagging
    reader.configure(lagging())
    rooms.look()
    assert reader.stats().lagging
    reader.configure(ReaderConfig())
    rooms.look()
    reader.configure(lagging(LagPolicy.SKIP))
    rooms.look()
    assert (reader.stats().lagging, reader.stats().skipped) == (False, 3)
    queue.close()


# -- SKIP --------------------------------------------------------------------------------------------------------------


def test_r40_a_reader_is_moved_to_the_first_segment_from_which_it_is_within(rooms: Rooms) -> None:
    queue = rooms.open(default_reader=lagging("skip"))
    feed(queue, 29)
    reader = queue.reader()
    rooms.look()
    assert (reader.head, reader.items, reader.bytes) == (21, 8, 8000), "segments begin with the ids 1, 4, 7 ..."
    assert reader.stats().skipped == 21
    assert not reader.stats().lagging
    assert saved_head(rooms) == 21
    assert drain(reader, 8) == list(range(22, 30))
    reader._check()
    queue.close()


def test_within_the_newest_segment_item_by_item(rooms: Rooms) -> None:
    queue = rooms.open(segment_bytes=1 << 20, default_reader=lagging("skip"))
    feed(queue, 30)
    reader = queue.reader()
    rooms.look()
    assert (reader.head, reader.bytes) == (22, MOST)
    assert saved_head(rooms) == 22
    reader._check()
    queue.close()


def test_by_age_up_to_the_first_item_that_is_young_enough(rooms: Rooms) -> None:
    config = ReaderConfig(max_lag_age=10.0, lag_policy=LagPolicy.SKIP)
    queue = rooms.open(segment_bytes=1 << 20, default_reader=config, checkpoint_interval=100.0)
    reader = queue.reader()
    feed(queue, 30, each=1, clock=rooms.clock)
    rooms.clock.advance(70)
    assert (reader.head, reader.stats().skipped) == (30, 30), "all of them are too old by now"
    feed(queue, 95, each=1, clock=rooms.clock)
    rooms.clock.advance(5)
    assert reader.head == 30 + 90, "the items of the last 10 seconds are left"
    queue.close()


def test_open_reads_and_aborted_items_before_it_are_dropped_and_those_after_it_stay(rooms: Rooms) -> None:
    queue = rooms.open(default_reader=lagging("skip"))
    feed(queue, 29)
    reader = queue.reader()
    items = reader.get_many(28)
    items[1].abort()
    items[23].abort()
    items[24].commit()
    rooms.look()
    assert (reader.head, reader.items) == (21, 7)
    assert reader.stats().skipped == 21
    reader._check()
    with pytest.raises(UnknownItem):
        items[0].commit()
    with items[2]:
        pass  # what was skipped is done: nothing is left to say
    assert reader.get(block=False).id == 24
    assert reader.get(block=False).id == 29
    for at in (21, 22, 25, 26, 27):
        items[at].commit()
    reader.commit(24)
    reader.commit(29)
    assert (reader.head, reader.items, reader.bytes) == (29, 0, 0)
    queue.close()


def test_a_reader_that_nobody_has_open_is_moved_and_its_opening_says_so(
    rooms: Rooms, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rooms.open(readers={"audit": lagging("skip")}, default_reader=ReaderConfig())
    queue.reader("audit", start="earliest").close()
    feed(queue, 29)
    rooms.look()
    assert saved_head(rooms, "jobs+audit.checkpoint") == 21
    feed(queue, 30)
    rooms.look()
    assert lines(caplog) == ["reader jobs+audit was too far behind (max_lag_bytes=8,000): it was moved past 21 items"]
    rooms.clock.advance(60)
    feed(queue, 30)
    rooms.look()
    assert lines(caplog) == ["reader jobs+audit was too far behind (max_lag_bytes=8,000): it was moved past 60 items"]
    queue.checkpoint()
    assert queue.stats().segments <= 4, "the disk is free again"
    queue.close()
    queue = rooms.open()
    reader = queue.reader("audit")
    said = "reader jobs+audit was moved past 81 items since it was opened last, as it was too far behind"
    assert lines(caplog) == [said + ": they are not delivered to it"]
    assert (reader.head, reader.stats().skipped) == (81, 81)
    reader.close()
    reader = queue.reader("audit")
    assert (lines(caplog), reader.stats().skipped) == ([], 0), "it is said once"
    queue.close()


def test_the_default_reader_that_nobody_has_made_is_moved_too(rooms: Rooms) -> None:
    queue = rooms.open(default_reader=lagging("skip"))
    feed(queue, 30)
    rooms.look()
    queue.checkpoint()
    assert queue.stats().segments == 2
    queue.close()
    queue = rooms.open()
    assert queue.get(block=False).id == 25
    assert stats_of(queue).skipped == 24
    queue.close()


def test_a_reader_that_another_process_has_open_is_moved_by_that_process_alone(
    rooms: Rooms, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rooms.open(readers={"audit": lagging("skip")})
    reader = rooms.elsewhere()
    feed(queue, 29)
    rooms.clock.advance(3)
    assert reader.get(block=False).id == 1, "it is open there, and its own configuration says nothing of it"
    more = ": another process has it open, and only that process moves it"
    assert lines(caplog) == ["reader jobs+audit is too far behind (max_lag_bytes=8,000)" + more]
    reader.configure(lagging("skip"))
    rooms.look()
    assert (reader.head, reader.stats().skipped) == (21, 21)
    reader._check()
    assert drain(reader, 8) == list(range(22, 30))
    reader.close()
    feed(queue, 12)
    rooms.look()
    assert saved_head(rooms, "jobs+audit.checkpoint") == 33, "nobody has it open now"
    queue.close()


def test_readers_that_are_within_are_left_alone(rooms: Rooms) -> None:
    queue = rooms.open(default_reader=lagging("skip"))
    here, there = queue.reader("here"), queue.reader("there")
    feed(queue, 29)
    drain(there, 25)
    rooms.look()
    assert (here.head, there.head) == (21, 25)
    assert there.stats().skipped == 0
    assert next(record.id for record in scan("/q", "jobs", disk=rooms.disk)) in (19, 22)
    queue.close()


def test_r40_a_skip_that_cannot_be_saved_moves_nothing(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    rooms.disk = failing = FailingDisk(rooms.disk)
    queue = rooms.open(default_reader=lagging("skip"))
    reader = queue.reader()
    feed(queue, 29)
    queue.sync()
    caplog.clear()
    failing.arm(errno.EIO, kinds={"write"}, sticky=True)
    rooms.look()
    assert (reader.head, reader.stats().skipped) == (0, 0)
    failing.disarm()
    rooms.look()
    assert (reader.head, reader.stats().skipped) == (21, 21)
    said = lines(caplog)
    assert any("looking how far readers of jobs are behind failed" in line for line in said)
    assert "looking how far readers of jobs are behind works again" in said
    queue.close()


def test_commits_after_it_and_kept_places_are_not_lost_by_a_skip(rooms: Rooms) -> None:
    queue = rooms.open(default_reader=lagging("skip"))
    feed(queue, 29)
    reader = queue.reader()
    for item in reader.get_many(29):
        if item.id in (23, 25, 26):
            item.commit()
    rooms.look()
    queue.close()
    queue = rooms.open()
    assert drain(queue, 5) == [22, 24, 27, 28, 29]
    queue.close()


# -- REFUSE ------------------------------------------------------------------------------------------------------------


def test_puts_are_refused_and_the_reader_is_named(rooms: Rooms) -> None:
    queue = rooms.open(readers={"audit": lagging("refuse")}, default_reader=ReaderConfig(), segment_bytes=1 << 20)
    audit = queue.reader("audit")
    feed(queue, 9)
    rooms.look()
    assert audit.stats().lagging
    for put in (
        queue.put,
        queue.put_future,
        lambda data: queue.put_many([data]),
        lambda data: asyncio.run(queue.aput(data)),
    ):
        with pytest.raises(QueueFull, match=r"too far behind \(max_lag_bytes=8,000\)") as full:
            put(ITEM)
        assert full.value.reader == "jobs+audit"
    drain(audit, 1)
    assert queue.put(ITEM) == 10, "a put looks again"
    queue.close()


def test_the_journal_sees_it_where_it_grows_without_a_look(rooms: Rooms) -> None:
    queue = rooms.open(readers={"audit": lagging("refuse")}, default_reader=ReaderConfig())
    queue.reader("audit").close()
    queue.close()
    queue = rooms.open(readers={"audit": lagging("refuse")}, default_reader=ReaderConfig())
    with pytest.raises(QueueFull) as full:
        feed(queue, 100)
    assert full.value.reader == "jobs+audit"
    assert queue.stats().tail_id <= 8 + 3, "a segment further at most"
    reader = rooms.elsewhere()
    drain(reader, 6)
    reader.checkpoint()
    feed(queue, 3)
    reader.close()
    queue.close()


def test_block_waits_until_the_reader_has_come_closer(rooms: Rooms) -> None:
    config = lagging("refuse", full_policy=FullPolicy.BLOCK)
    queue = rooms.open(default_reader=config, segment_bytes=1 << 20)
    feed(queue, 9)
    queue.reader()
    rooms.look()
    with pytest.raises(QueueFull):
        queue.put(ITEM, timeout=0.01)
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.append(queue.put(ITEM, timeout=60)))
    thread.start()
    while not queue._room:
        thread.join(0.001)
    drain(queue, 2)
    thread.join(60)
    assert ids == [10]
    queue.close()


def test_a_reader_that_is_dropped_refuses_nothing(rooms: Rooms) -> None:
    queue = rooms.open(readers={"audit": lagging("refuse")}, default_reader=ReaderConfig())
    queue.reader("audit")
    feed(queue, 9)
    rooms.look()
    with pytest.raises(QueueFull):
        queue.put(ITEM)
    queue.drop_reader("audit")
    queue.reader("other")
    feed(queue, 20)
    queue.close()


def test_by_age_it_is_seen_at_the_next_look(rooms: Rooms) -> None:
    config = ReaderConfig(max_lag_age=10.0, lag_policy=LagPolicy.REFUSE)
    queue = rooms.open(default_reader=config)
    queue.put(ITEM)
    rooms.clock.advance(12)
    with pytest.raises(QueueFull, match="max_lag_age=10"):
        queue.put(ITEM)
    drain(queue, 1)
    queue.put(ITEM)
    queue.close()


# -- the configuration -------------------------------------------------------------------------------------------------


def test_the_policy_is_spelled_as_the_full_policy_is() -> None:
    assert ReaderConfig().lag_policy is LagPolicy.WARN
    for policy in LagPolicy:
        assert ReaderConfig(lag_policy=policy.value).lag_policy is policy
    with pytest.raises(ValueError, match="lag_policy must be one of 'warn', 'skip', 'refuse', not 'wait'"):
        ReaderConfig(lag_policy="wait")
    with pytest.raises(TypeError, match="lag_policy must be a LagPolicy, not 7"):
        ReaderConfig(lag_policy=7)  # type: ignore[arg-type]
    assert ReaderConfig(lag_policy="SKIP").lag_policy is LagPolicy.SKIP
    with pytest.raises(ValueError, match="max_lag_bytes"):
        ReaderConfig(max_lag_bytes=-1)
    with pytest.raises(ValueError, match="max_lag_age"):
        ReaderConfig(max_lag_age=float("nan"))
    with pytest.raises(TypeError, match="max_lag_bytes"):
        ReaderConfig(max_lag_bytes=1.5)  # type: ignore[arg-type]


def test_without_options_nobody_looks(rooms: Rooms) -> None:
    queue = rooms.open()
    queue.reader()
    assert not queue._disk_room._is_watching
    assert queue._status.fast
    queue.close()
    assert SEGMENT < MOST


def test_a_put_is_looked_at_for_room_after_its_readers_were_read_again(folder: Path, clock: ManualClock) -> None:
    """The reader elsewhere is not full any more, which its file says; and another one was opened, whose lag is to be
    looked at before the journal grows.
    """
    full = ReaderConfig(max_bytes=1000)
    watched = ReaderConfig(max_lag_bytes=100_000)
    with JournaledQueue(folder, "jobs", clock=clock, segment_bytes=4096, readers={"far": full, "t": watched}) as queue:
        queue.reader("far").close()
        far = open_reader(folder, "jobs", "far", clock=clock)
        queue.put(bytes(1000))
        with pytest.raises(QueueFull):
            queue.put(b"x", timeout=0)
        queue.reader("t")
        far.get(timeout=0).commit()
        far.checkpoint()
        assert queue.put(bytes(3000), timeout=0) == 2
        far.close()
