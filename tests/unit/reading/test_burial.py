"""Moves of dead items to another queue, and of dead letters back: each once, whatever fails on the way."""

from __future__ import annotations

import copy
import errno
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import (
    CorruptJournal,
    DeadLetter,
    InvalidName,
    ItemTooLarge,
    JournaledQueue,
    LagPolicy,
    QueueEmpty,
    QueueLocked,
    Reader,
    ReaderConfig,
    UnknownItem,
    dead_letters,
    inbox,
    inspect,
    open_reader,
    queue_names,
    scan,
)
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.burial import MOST_NOTES, Burial
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.inbox import moves
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk, PowerModel
from kestrelpy.testing._choices import Corner
from kestrelpy.work import WorkQueue

Open = Callable[..., JournaledQueue]
DEAD = ReaderConfig(max_deliveries=1, dead_letter="dead")


def kill(queue: JournaledQueue, count: int = 1, *, reason: str | None = None) -> None:
    """Let so many items die."""
    for item in queue.get_many(count, timeout=0):
        item.abort(reason=reason)


def letters_of(folder: Path, name: str = "dead") -> list[DeadLetter]:
    return list(dead_letters(folder, name))


def burial_of(queue: JournaledQueue | Reader) -> Burial:
    return checkpointer_of(queue if isinstance(queue, Reader) else queue.reader()).burial


def try_again(queue: JournaledQueue | Reader) -> None:
    """As the timer does, on this thread."""
    burial = burial_of(queue)
    burial._wake()
    burial.run()


def later(clock: ManualClock) -> None:
    """The timer has called, and what it started has ended."""
    clock.advance(1)
    for thread in threading.enumerate():
        if thread.name == "kestrelpy-dead-letters":
            thread.join(30)


def rest_of(reader: JournaledQueue | Reader) -> list[bytes]:
    try:
        return [item.data for item in reader.get_many(100, timeout=0)]
    except QueueEmpty:
        return []


# -- there and back ----------------------------------------------------------------------------------------------------


def test_a_dead_item_is_a_letter_in_the_other_queue(open_queue: Open, folder: Path, clock: ManualClock) -> None:
    queue = open_queue(readers={"audit": DEAD})
    audit = queue.reader("audit")
    queue.put(b"data\n\xff")
    added_ms = clock.time_ns() // 1_000_000
    clock.advance(2)
    with pytest.raises(ValueError, match="no such"), audit.get():
        raise ValueError("no such address")
    assert audit.items == 0
    stats = audit.stats()
    assert (stats.dead, stats.dead_letter_failures, stats.aborted) == (1, 0, 1)
    [letter] = letters_of(folder)
    assert letter == DeadLetter(
        b"data\n\xff", "jobs", "audit", 1, added_ms, added_ms + 2000, 1, "ValueError: no such address", 1
    )
    [record] = scan(folder, "dead")
    assert record.dead_letter == letter
    assert record.data.startswith(b'{"dead_letter": 1, "queue": "jobs", "reader": "audit", "id": 1, ')
    assert record.data.endswith(b"}\ndata\n\xff")


def test_requeue_puts_the_data_back(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    for data in (b"a", b"b", b"c"):
        queue.put(data)
    kill(queue, 3)
    for letter in dead_letters(folder, "dead"):
        if letter.data != b"b":
            letter.requeue()
    assert queue.take_in() == 2
    assert rest_of(queue) == [b"a", b"c"]
    [letter] = letters_of(folder)
    letter.requeue()  # after the iteration: the reader is opened again
    assert letters_of(folder) == []
    queue.take_in()
    assert rest_of(queue) == [b"b"]
    with pytest.raises(UnknownItem):
        letter.requeue()
    queue._check()


def test_drop_takes_a_letter_out(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    kill(queue, 2)
    with dead_letters(folder, "dead") as letters:
        next(letters).drop()
    assert [letter.data for letter in letters_of(folder)] == [b"b"]
    with pytest.raises(ValueError, match="not read by"):
        DeadLetter(b"", "jobs", "", 1, 0, 0, 1, "").drop()


def test_a_letter_is_dropped_once(open_queue: Open, folder: Path) -> None:
    """While its queue is read, and after that: then the reader is opened again, and reads up to it."""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    kill(queue, 2)
    with dead_letters(folder, "dead") as letters:
        first = next(letters)
        first.drop()
        with pytest.raises(UnknownItem):
            first.drop()
    last = letters_of(folder)[-1]
    with pytest.raises(UnknownItem):
        first.drop()
    last.drop()
    with pytest.raises(UnknownItem):
        last.drop()
    assert letters_of(folder) == []


def test_a_letter_from_another_process_is_not_put_back(open_queue: Open, folder: Path) -> None:
    with open_queue(default_reader=DEAD) as queue:
        queue.put(b"1")
        kill(queue)
    (letter,) = letters_of(folder)
    for each in (pickle.loads(pickle.dumps(letter)), copy.copy(letter)):
        assert each == letter
        for call in (each.requeue, each.drop):
            with pytest.raises(ValueError, match="was not read by"):
                call()


def test_what_is_no_letter_is_shown_as_it_is(open_queue: Open, folder: Path) -> None:
    with open_queue("dead") as dead:
        dead.put_many([b"foreign", b'{"dead_letter": 1, "queue": "x"}\n', b'{"dead_letter": 1, ' + b"[" * 9000])
    with dead_letters(folder, "dead") as letters:
        for letter in letters:
            assert (letter.queue, letter.id, letter.died_ms) == ("", 0, 0)
            with pytest.raises(ValueError, match="is no dead letter"):
                letter.requeue()
    assert len(letters_of(folder)) == 3


def test_letters_of_a_queue_that_is_not_there(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    assert letters_of(folder) == []
    assert list(folder.iterdir()) == []
    with pytest.raises(InvalidName):
        letters_of(folder, "../dead")


def test_letters_of_dead_letters(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    kill(queue)
    dead = open_queue("dead", default_reader=ReaderConfig(max_deliveries=1, dead_letter="grave"))
    kill(dead, reason="again")
    dead.close()
    [letter] = letters_of(folder, "grave")
    assert (letter.queue, letter.reason) == ("dead", "again")
    letter.requeue()
    [letter] = letters_of(folder)
    assert (letter.queue, letter.data) == ("jobs", b"data")


def test_a_reason_has_at_most_a_kibibyte(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"", b""])
    kill(queue, 1, reason="ä" * 1000)
    kill(queue, 1, reason="\ud800")
    assert [letter.reason for letter in letters_of(folder)] == ["ä" * 170, "\\ud800"]


def test_two_who_move_at_once_do_not_wait_for_each_other(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"a")
    with burial_of(queue).moving:
        kill(queue)
    assert letters_of(folder) == []
    try_again(queue)
    assert len(letters_of(folder)) == 1


def test_many_that_die_are_few_moves(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"%d" % at for at in range(2 * MOST_NOTES + 50)])
    burial_of(queue)._is_resting = True
    kill(queue, 2 * MOST_NOTES + 50)
    with patch.object(moves, "publish_move", wraps=moves.publish_move) as publish_move:
        try_again(queue)
    assert publish_move.call_count == 3
    assert [letter.data for letter in letters_of(folder)] == [b"%d" % at for at in range(2 * MOST_NOTES + 50)]


def test_a_queue_that_is_open_here_gets_them(open_queue: Open) -> None:
    queue, dead = open_queue(default_reader=DEAD), open_queue("dead")
    queue.put(b"data")
    kill(queue)
    assert inbox.pending(queue.directory, "dead") == 1
    assert dead.take_in() == 1
    assert dead.get(False).data.endswith(b"\ndata")


# -- the configuration -------------------------------------------------------------------------------------------------


def test_a_queue_is_not_its_own(open_queue: Open, folder: Path) -> None:
    own = ReaderConfig(dead_letter="jobs")
    for options in ({"default_reader": own}, {"readers": {"audit": own}}):
        with pytest.raises(ValueError, match="is the queue itself"):
            open_queue(**options)
    with pytest.raises(InvalidName):
        open_queue(default_reader=ReaderConfig(dead_letter="no/name"))
    queue = open_queue()
    queue.put(b"")
    with pytest.raises(ValueError, match="is the queue itself"):
        queue.reader().configure(own)
    with pytest.raises(ValueError, match="is the queue itself"):
        open_reader(folder, "jobs", "far", config=own, create=True)


def test_a_queue_in_memory_has_no_folder(open_queue: Open) -> None:
    with pytest.raises(ValueError, match="needs a folder"):
        open_queue(journaled=False, default_reader=DEAD)
    queue = open_queue(journaled=False)
    with pytest.raises(ValueError, match="needs a folder"):
        queue.reader().configure(DEAD)


def test_the_configuration_counts_from_the_next_abort(open_queue: Open, folder: Path) -> None:
    queue = open_queue()
    queue.put(b"data")
    queue.get().abort()
    queue.reader().configure(ReaderConfig(max_deliveries=2, dead_letter="other"))
    kill(queue)
    assert [letter.error_count for letter in letters_of(folder, "other")] == [2]


# -- rules -------------------------------------------------------------------------------------------------------------


def test_the_intent_is_on_disk_before_anything_is_published(clock: ManualClock) -> None:
    """(R44)"""
    disk = CrashingDisk()
    queue = JournaledQueue("/q", "jobs", default_reader=DEAD, disk=disk, clock=clock, inbox_interval=None)
    queue.put(b"data")
    real = moves.publish_move
    states: list[CrashingDisk] = []

    def publish_move(*about: Any, **how: Any) -> None:
        states.append(disk.after_power_cut(Corner(last=False), PowerModel.PREFIX))
        real(*about, **how)

    with patch.object(moves, "publish_move", publish_move):
        kill(queue)
    [state] = states
    with JournaledQueue("/q", "jobs", disk=state, clock=clock) as later:
        assert later.reader().items == 0
    assert [letter.data for letter in dead_letters("/q", "dead", disk=state, clock=clock)] == [b"data"]
    queue.close()


def test_each_opening_has_a_stream_of_its_own(open_queue: Open, folder: Path) -> None:
    """(R45) Its numbers begin again: under the old stream they would be dropped as known."""
    for at in range(3):
        with open_queue(default_reader=DEAD) as queue:
            queue.put_many([b"%d" % at, b"%d" % at])
            kill(queue, 1)
            kill(queue, 1)
            assert burial_of(queue)._number == 2
    assert [letter.data for letter in letters_of(folder)] == [b"0", b"0", b"1", b"1", b"2", b"2"]


def left_in_the_middle(disk: MemoryDisk, clock: ManualClock, *, published: bool) -> None:
    """Two of four items die, and the process is killed before or after it has published them; then it is closed."""
    queue = JournaledQueue("/q", "jobs", default_reader=DEAD, disk=disk, clock=clock, inbox_interval=None)
    queue.put_many([b"a", b"b", b"c", b"d"])
    items = queue.get_many(4, timeout=0)
    real = moves.publish_move

    def publish_move(*about: Any, **how: Any) -> None:
        if published:
            real(*about, **how)
        raise OSError(errno.EIO, "it breaks")

    burial_of(queue)._is_resting = True
    items[1].abort(reason="b")
    items[3].abort(reason="d")
    with patch.object(moves, "publish_move", publish_move):
        try_again(queue)
    assert burial_of(queue).failures == 1
    assert queue.reader().items == 4
    queue.close()


@pytest.mark.parametrize("published", [False, True])
def test_an_opening_carries_out_what_was_begun(clock: ManualClock, published: bool) -> None:
    """(R46)"""
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=published)
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        assert rest_of(queue) == [b"a", b"c"]
        queue._check()
    assert [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)] == [b"b", b"d"]


def test_an_opening_that_cannot_yet_holds_the_items_back(clock: ManualClock) -> None:
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=False)
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock)
        reader = queue.reader()
        assert (reader.items, reader.stats().dead_letter_failures) == (4, 1)
        first = queue.get(False)
        assert first.data == b"a"
        assert rest_of(queue) == [b"c"]
        queue._check()
        first.commit()
        queue.flush()
        assert reader.items == 3
    try_again(queue)
    assert reader.items == 1
    queue._check()
    queue.close()
    assert [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)] == [b"b", b"d"]


def test_a_default_reader_that_gets_a_name_keeps_its_intent(clock: ManualClock) -> None:
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=True)
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        assert rest_of(queue.reader("audit")) == [b"a", b"c"]
    assert len(list(dead_letters("/q", "dead", disk=disk, clock=clock))) == 2


def test_a_reader_elsewhere_carries_it_out_too(clock: ManualClock) -> None:
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=False)
    far = open_reader("/q", "jobs", "", disk=disk, clock=clock)
    assert rest_of(far) == [b"a", b"c"]
    far._check()
    far.close()
    assert len(list(dead_letters("/q", "dead", disk=disk, clock=clock))) == 2


def test_an_erased_queue_is_made_again_with_the_intent(clock: ManualClock) -> None:
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=True)
    JournaledQueue("/q", "dead", disk=disk, clock=clock).erase()
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        assert rest_of(queue) == [b"a", b"c"]
    assert [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)] == [b"b", b"d"]


def test_a_seek_takes_back_what_is_not_published(open_queue: Open, folder: Path) -> None:
    """(R47)"""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        kill(queue, 1)
        queue.seek(1)
    assert rest_of(queue) == [b"a", b"b"]
    try_again(queue)
    queue._check()
    assert letters_of(folder) == []


def test_a_seek_finishes_what_is_published(open_queue: Open, folder: Path) -> None:
    """(R47)"""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    real = moves.publish_move

    def publish_move(*about: Any, **how: Any) -> None:
        real(*about, **how)
        raise OSError(errno.EIO, "nobody knows")

    with patch.object(moves, "publish_move", publish_move):
        kill(queue, 1)
    assert queue.reader().items == 2
    with patch.object(moves, "was_published", side_effect=OSError(errno.EIO, "no")), pytest.raises(OSError, match="no"):
        queue.seek(2)
    assert queue.reader().items == 2
    queue.seek(2)
    assert (queue.reader().items, burial_of(queue).dead) == (1, 1)
    assert rest_of(queue) == [b"b"]
    assert len(letters_of(folder)) == 1


def test_a_seek_that_fails_drops_no_dead_item(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        kill(queue, 1)
    guard = patch.object(type(queue._source), "before", side_effect=OSError(errno.EIO, "no"))
    with guard, pytest.raises(OSError, match="no"):
        queue.seek(2)
    try_again(queue)
    assert [letter.data for letter in letters_of(folder)] == [b"a"]
    queue._check()


SKIPS = ReaderConfig(max_deliveries=1, dead_letter="dead", max_lag_bytes=2000, lag_policy=LagPolicy.SKIP)


def skip_past(queue: JournaledQueue, item_id: int) -> int:
    """As the look at readers that are too far behind does."""
    return checkpointer_of(queue.reader()).skip_to(item_id)


def test_a_dead_item_that_is_skipped_is_not_counted_as_moved(open_queue: Open, folder: Path) -> None:
    """While its move fails: one is in an intent, one waits for the next move, and one is after the new position."""
    queue = open_queue(default_reader=SKIPS)
    queue.put_many([b"a", b"b", b"c", b"d"])
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        kill(queue, 1)
        kill(queue, 2)
        assert skip_past(queue, 2) == 1
        assert skip_past(queue, 3) == 1
    try_again(queue)
    stats = queue.reader().stats()
    assert (stats.dead, stats.skipped, stats.items) == (1, 2, 1)
    assert [letter.data for letter in letters_of(folder)] == [b"c"]
    queue._check()


def test_a_dead_item_that_was_skipped_before_an_opening_is_not_counted_as_moved(clock: ManualClock) -> None:
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=False)
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        queue = JournaledQueue("/q", "jobs", default_reader=SKIPS, disk=disk, clock=clock)
        assert skip_past(queue, 3) == 2
        queue.close()
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        stats = queue.reader().stats()
        assert (stats.dead, stats.skipped, stats.items) == (1, 2, 1)
    assert [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)] == [b"d"]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_dead_item_is_not_delivered_while_its_move_fails(open_queue: Open, folder: Path, clock: ManualClock) -> None:
    """(R43) The timer tries it again."""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        kill(queue, 1)
        assert [rest_of(queue), rest_of(queue)] == [[b"b"], []]
        stats = queue.stats().readers[""]
        assert (stats.dead, stats.dead_letter_failures, stats.items) == (0, 1, 2)
    later(clock)
    assert queue.stats().readers[""].dead == 1
    assert [letter.data for letter in letters_of(folder)] == [b"a"]


@pytest.mark.parametrize("at", range(1, 40))
def test_a_disk_that_fails_at_any_step(clock: ManualClock, at: int) -> None:
    inner = MemoryDisk()
    disk = FailingDisk(inner)
    queue = JournaledQueue("/q", "jobs", default_reader=DEAD, disk=disk, clock=clock, inbox_interval=None)
    queue.put_many([b"a", b"b", b"c"])
    queue.sync()
    items = queue.get_many(2, timeout=0)
    disk.arm(errno.ENOSPC, at=at)
    for item in items:
        item.abort()
    disk.disarm()
    queue._check()
    for _ in range(2):
        try_again(queue)
    assert (queue.reader().items, queue.stats().readers[""].dead) == (1, 2)
    queue._check()
    queue.close()
    assert [letter.data for letter in dead_letters("/q", "dead", disk=inner, clock=clock)] == [b"a", b"b"]


def test_an_owner_who_takes_nothing_in_has_no_room(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=DEAD, inbox_interval=None)
    dead = open_queue("dead", default_reader=ReaderConfig(max_items=1), inbox_interval=None)
    dead.put(b"full")
    queue.put_many([b"a", b"b", b"c"])
    kill(queue, 1)  # nobody can know yet: it waits in the inbox
    dead.take_in()
    assert (dead.reader().items, queue.stats().readers[""].dead) == (1, 1)
    clock.advance(3)
    kill(queue, 2)
    stats = queue.stats().readers[""]
    assert (stats.dead, stats.dead_letter_failures, stats.items) == (1, 1, 2)
    dead.get(False).commit()
    dead.take_in()
    try_again(queue)
    assert queue.stats().readers[""].dead == 3
    queue._check()


def test_many_batches_are_taken_in_if_nobody_else_does(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD, inbox_interval=None)
    queue.put_many([b"%d" % at for at in range(12)])
    with patch.object(moves, "MOST_WAITING", 4):
        for _ in range(12):
            kill(queue, 1)
            assert inbox.pending(folder, "dead") <= 4
    assert inspect(folder, "dead").put_items > 4
    assert len(letters_of(folder)) == 12


@pytest.mark.parametrize("is_open", [False, True])
def test_what_fits_into_its_queue_fits_as_a_letter_too(open_queue: Open, folder: Path, is_open: bool) -> None:
    """The first line does not count, nor those of a letter that dies; and what goes back fits, too."""
    alike: dict[str, Any] = {"max_item_bytes": 300}
    open_queue("grave", **alike).close()
    dead = open_queue("dead", default_reader=ReaderConfig(max_deliveries=1, dead_letter="grave"), **alike)
    if not is_open:
        dead.close()
    queue = open_queue(default_reader=DEAD, **alike)
    queue.put(bytes(300))
    kill(queue, reason="é" * 1024)
    assert queue.reader().stats().dead == 1
    if not is_open:
        dead = open_queue("dead", default_reader=ReaderConfig(max_deliveries=1, dead_letter="grave"), **alike)
    dead.take_in()
    kill(dead)
    assert dead.reader().stats().dead == 1
    dead.close()
    for name in ("grave", "dead"):
        [letter] = letters_of(folder, name)
        letter.requeue()
    queue.take_in()
    assert rest_of(queue) == [bytes(300)]
    assert queue.stats().refused_batches == 0


def test_a_letter_that_is_too_large_there_stays_here(
    open_queue: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps no other back, is named once, counts, and goes when there is room for it."""
    open_queue("dead", max_item_bytes=300).close()
    queue = open_queue(default_reader=DEAD)
    reader = queue.reader()
    queue.put_many([b"a", bytes(301), b"b", bytes(302), b"c"])
    burial_of(queue)._is_resting = True
    kill(queue, 3)
    burial_of(queue)._wake()
    kill(queue, 2)
    stats = reader.stats()
    assert (stats.dead, stats.dead_letter_failures, stats.dead_too_large, stats.items) == (3, 2, 2, 2)
    assert rest_of(queue) == []
    queue._check()
    for _ in range(3):
        try_again(queue)
    assert (reader.stats().dead, reader.stats().dead_letter_failures, reader.stats().dead_too_large) == (3, 2, 2)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "reader jobs: dead items are too large for queue dead (max_item_bytes=300), and stay here, undelivered: "
        "2 (301 bytes), 4 (302 bytes)"
    )
    assert [letter.data for letter in letters_of(folder)] == [b"a", b"b", b"c"]
    open_queue("dead", max_item_bytes=301).close()
    try_again(queue)
    assert (reader.stats().dead, reader.stats().dead_too_large, reader.items) == (4, 1, 1)
    open_queue("dead").close()
    try_again(queue)
    assert (reader.stats().dead, reader.stats().dead_too_large, reader.items) == (5, 0, 0)
    assert [len(letter.data) for letter in letters_of(folder)] == [1, 1, 1, 301, 302]
    queue._check()


def test_the_timer_looks_at_what_was_too_large(open_queue: Open, clock: ManualClock) -> None:
    open_queue("dead", max_item_bytes=300).close()
    queue = open_queue(default_reader=DEAD)
    queue.put_many([bytes(301), bytes(302)])
    kill(queue)
    kill(queue)
    open_queue("dead").close()
    assert queue.reader().stats().dead_too_large == 2
    later(clock)
    assert (queue.reader().stats().dead, queue.reader().stats().dead_too_large) == (2, 0)


def test_a_second_look_that_fails_is_repeated(open_queue: Open, clock: ManualClock) -> None:
    open_queue("dead", max_item_bytes=300).close()
    queue = open_queue(default_reader=DEAD)
    queue.put_many([bytes(301), b"a"])
    kill(queue)
    with patch.object(moves, "largest_of", side_effect=OSError(errno.EIO, "no")):
        later(clock)
        kill(queue)
    open_queue("dead").close()
    later(clock)
    assert (queue.reader().stats().dead, queue.reader().stats().dead_too_large) == (2, 0)


def test_what_was_too_large_comes_again_after_an_opening(open_queue: Open, folder: Path) -> None:
    """Whether the checkpoint has no intent, as after a close, or has one with it, as after a kill."""
    open_queue("dead", max_item_bytes=300).close()
    queue = open_queue(default_reader=DEAD)
    queue.put_many([bytes(301), b"a"])
    kill(queue, 1)
    queue.close()
    queue = open_queue(default_reader=DEAD)
    [item, _] = queue.get_many(2, timeout=0)
    assert (len(item.data), item.error_count) == (301, 1)
    burial_of(queue)._is_resting = True
    item.abort()
    queue.close()
    queue = open_queue()
    stats = queue.reader().stats()
    assert (stats.dead, stats.dead_too_large, stats.items) == (0, 1, 2)
    assert rest_of(queue) == [b"a"]
    queue._check()


def test_a_seek_moves_what_is_too_large_too(open_queue: Open, folder: Path) -> None:
    open_queue("dead", max_item_bytes=300).close()
    queue = open_queue(default_reader=DEAD)
    queue.put_many([bytes(301), bytes(302)])
    kill(queue)
    kill(queue)
    queue.seek(2)
    assert (queue.reader().stats().dead_too_large, burial_of(queue)._aside) == (0, {})
    assert rest_of(queue) == [bytes(302)]
    open_queue("dead").close()
    try_again(queue)
    assert letters_of(folder) == []


@pytest.mark.parametrize("published", [False, True])
def test_a_limit_that_was_lowered_in_the_middle(clock: ManualClock, published: bool) -> None:
    """What is published already is there, however large it is; what is not, is looked at again."""
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=published)
    JournaledQueue("/q", "dead", disk=disk, clock=clock, max_item_bytes=1).close()
    with (
        patch.object(moves, "too_large", lambda data, most: 2 if data == b"b" and most == 1 else 0),
        JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue,
    ):
        stats = queue.reader().stats()
        assert (stats.dead, stats.dead_too_large) == ((2, 0) if published else (1, 1))
    letters = [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)]
    assert letters == ([b"b", b"d"] if published else [b"d"])


def test_an_owner_takes_in_what_was_published_before_it_set_a_limit(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    dead = open_queue("dead", inbox_interval=None)
    queue.put(bytes(301))
    kill(queue)
    dead.close()
    dead = open_queue("dead", max_item_bytes=300, inbox_interval=None)
    assert (dead.stats().refused_batches, dead.reader().items) == (0, 1)


def test_a_requeue_left_behind_that_is_too_large_stays_a_letter(
    open_queue: Open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps back neither what dies in its queue nor what is put back after it."""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([bytes(301), b"a", b"b"])
    kill(queue, 3)
    queue.close()
    dead = open_queue("dead", default_reader=ReaderConfig(max_deliveries=1, dead_letter="grave"))
    first, second, third = dead.get_many(3, timeout=0)
    burial = burial_of(dead)
    failing = patch.object(moves, "publish_move", side_effect=OSError(errno.EIO, "it breaks"))
    with failing, pytest.raises(OSError, match="it breaks"):
        burial.take_over(first, "jobs")
    open_queue(max_item_bytes=300).close()
    burial.take_over(second, "jobs")
    third.abort()
    assert [letter.data for letter in letters_of(folder, "grave")] == []
    try_again(dead)
    assert len(letters_of(folder, "grave")) == 1
    assert "dead letter 1 of dead can't go back to queue jobs, and stays: an item of 301 bytes" in caplog.text
    waiting = dead.reader().get_future(timeout=None)
    assert waiting.result(0).id == 1
    dead._check()


def test_a_consumer_who_waits_gets_the_letter_that_can_not_go_back(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(bytes(301))
    kill(queue)
    queue.close()
    dead = open_queue("dead")
    failing = patch.object(moves, "publish_move", side_effect=OSError(errno.EIO, "it breaks"))
    with failing, pytest.raises(OSError, match="it breaks"):
        burial_of(dead).take_over(dead.get(False), "jobs")
    open_queue(max_item_bytes=300).close()
    waiting = dead.get_future(timeout=None)
    try_again(dead)
    assert waiting.result(0).id == 1
    dead._check()


def test_a_requeue_that_can_not_be_leaves_the_letter(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(bytes(250))
    kill(queue)
    queue.close()
    open_queue(max_item_bytes=100).close()
    with dead_letters(folder, "dead") as letters:
        letter = next(letters)
        with pytest.raises(ItemTooLarge):
            letter.requeue()
        open_queue().close()
        letter.requeue()
    assert letters_of(folder) == []
    assert rest_of(open_queue()) == [bytes(250)]


def test_a_requeue_that_fails_is_done_by_the_next_opening(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    kill(queue)
    failing = patch.object(moves, "publish_move", side_effect=OSError(errno.EIO, "it breaks"))
    with failing, dead_letters(folder, "dead") as letters, pytest.raises(OSError, match="it breaks"):
        next(letters).requeue()
    assert letters_of(folder) == []
    assert queue.take_in() == 1
    assert rest_of(queue) == [b"data"]


def test_a_work_queue_takes_no_letters(open_queue: Open, folder: Path) -> None:
    WorkQueue(folder, "dead").close()
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    kill(queue)
    assert queue.stats().readers[""].dead_letter_failures == 1
    assert queue_names(folder) == ["dead", "jobs"]


def test_a_lost_ledger_may_bring_a_move_twice(clock: ManualClock) -> None:
    """As docs/dead-letters.md says: without the ledger nobody knows that the intent was published."""
    disk = MemoryDisk()
    left_in_the_middle(disk, clock, published=True)
    inbox.take_in("/q", "dead", disk=disk, clock=clock)
    disk.directory("/q/inbox").unlink("dead.batches")
    JournaledQueue("/q", "jobs", disk=disk, clock=clock).close()
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        queue.reader()
    assert len(list(dead_letters("/q", "dead", disk=disk, clock=clock))) == 4


# -- threads, interrupts, ends -----------------------------------------------------------------------------------------


def test_who_aborts_meanwhile_does_not_wait(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    first, second = queue.get_many(2, timeout=0)
    real = moves.publish_move

    threads: list[threading.Thread] = []

    def publish_move(*about: Any, **how: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=second.abort))
            threads[0].start()
            threads[0].join(30)
            assert not threads[0].is_alive()
        real(*about, **how)

    with patch.object(moves, "publish_move", publish_move):
        first.abort()
    assert [letter.data for letter in letters_of(folder)] == [b"a", b"b"]
    assert queue.reader().items == 0


@pytest.mark.parametrize("at", ["_save", "_publisher", "_settle"])
def test_an_interrupted_move_is_done_later(open_queue: Open, folder: Path, at: str) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    burial = burial_of(queue)
    target: Any = "kestrelpy._reading.burial._publisher" if at == "_publisher" else None
    strike = (
        patch(target, side_effect=KeyboardInterrupt)
        if target
        else patch.object(burial, at, side_effect=KeyboardInterrupt)
    )
    if at == "_publisher":
        burial._stream = moves.new_stream()
    with strike, pytest.raises(KeyboardInterrupt):
        kill(queue)
    queue._check()
    try_again(queue)
    assert queue.reader().items == 0
    assert len(letters_of(folder)) == 1


def test_a_close_in_the_middle_leaves_the_intent(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    burial_of(queue)._is_resting = True
    kill(queue)
    queue.close()  # nothing was tried, and the intent is in the last checkpoint
    assert letters_of(folder) == []
    queue = open_queue()
    assert queue.reader().items == 0
    assert len(letters_of(folder)) == 1


def test_the_reader_of_the_letters_has_one_owner(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"data")
    kill(queue)
    with dead_letters(folder, "dead") as letters:
        next(letters)
        with pytest.raises(QueueLocked):
            dead_letters(folder, "dead")
    assert len(letters_of(folder)) == 1


def test_nothing_is_imported_without_dead_letters() -> None:
    calls: list[Callable[[], object]] = []
    with patch("kestrelpy._reading.burial._publisher", side_effect=calls.append):
        queue = JournaledQueue("/q", "jobs", disk=MemoryDisk(), clock=ManualClock())
        queue.put(b"a")
        queue.get().abort()
        queue.close()
    assert calls == []


# -- what seldom happens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_corruption", ["raise", "quarantine"])
def test_an_item_of_an_intent_that_is_damaged_is_not_moved(clock: ManualClock, on_corruption: Any) -> None:
    """A get says why it can't be read, or it is quarantined. The others are moved."""
    disk = MemoryDisk()
    with JournaledQueue("/q", "jobs", default_reader=DEAD, disk=disk, clock=clock) as queue:
        for data in (b"a", b"good", b"evil"):
            queue.put(data)
        burial_of(queue)._is_resting = True
        kill(queue, 3)
    folder = disk.directory("/q")
    [name] = [name for name in folder.names() if name.startswith("jobs.") and name.endswith(".segment")]
    file = folder.open(name, write=True)
    file.write(file.read(0, file.size()).index(b"evil"), b"good")
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, on_corruption=on_corruption) as queue:
        assert queue.reader().stats().dead == 2
        if on_corruption == "raise":
            with pytest.raises(CorruptJournal):
                queue.get(False)
        else:
            assert rest_of(queue) == []
    assert [letter.data for letter in dead_letters("/q", "dead", disk=disk, clock=clock)] == [b"a", b"good"]


def test_a_skip_without_an_intent_has_nothing_to_count(open_queue: Open, folder: Path) -> None:
    """Nor is there one to make of what was skipped before its move."""
    queue = open_queue(default_reader=SKIPS)
    queue.put_many([b"a", b"b"])
    burial_of(queue)._is_resting = True
    kill(queue, 1)
    assert skip_past(queue, 2) == 1
    assert burial_of(queue).waiting
    try_again(queue)
    assert (burial_of(queue).waiting, queue.reader().stats().dead, letters_of(folder)) == ({}, 0, [])


def test_a_letter_that_is_not_open_any_more_does_not_go_back(open_queue: Open, folder: Path) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"a")
    kill(queue)
    with dead_letters(folder, "dead") as letters:
        letter = next(letters)
        assert letters._reader is not None
        letters._reader.seek(1)
        with pytest.raises(UnknownItem):
            letter.requeue()
    assert len(letters_of(folder)) == 1


def test_an_interrupted_requeue_is_done_by_the_timer(open_queue: Open, folder: Path, clock: ManualClock) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"a")
    kill(queue)
    dead = open_queue("dead")
    item = dead.get(False)
    with patch.object(moves, "publish_move", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        burial_of(dead).take_over(item, "jobs")
    assert rest_of(dead) == []
    later(clock)
    dead._check()
    assert (dead.reader().items, queue.take_in(), rest_of(queue)) == (0, 1, [b"a"])


@pytest.mark.parametrize("repairs", [True, False])
def test_a_settlement_that_is_interrupted_counts_each_item_once(
    open_queue: Open, folder: Path, clock: ManualClock, repairs: bool
) -> None:
    """Whether the repair takes out what is done, or is interrupted, too."""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    burial_of(queue)._is_resting = True
    kill(queue, 2)
    real = Backlog.release
    struck: list[int] = []

    def release(self: Backlog, item_id: int, data: bytes) -> None:
        real(self, item_id, data)
        if not struck:
            struck.append(item_id)
            raise KeyboardInterrupt

    recover = patch.object(Dispatcher, "recover", Dispatcher.recover if repairs else lambda *_: None)
    with recover, patch.object(Backlog, "release", release), pytest.raises(KeyboardInterrupt):
        try_again(queue)
    later(clock)
    assert struck == [1]
    assert (queue.reader().stats().dead, queue.reader().items) == (2, 0)
    assert [letter.data for letter in letters_of(folder)] == [b"a", b"b"]
    queue._check()


def left_too_large(open_queue: Open) -> JournaledQueue:
    """The queue of a dead letter that has begun to go back, and whose queue does not take it any more."""
    queue = open_queue(default_reader=DEAD)
    queue.put(bytes(301))
    kill(queue)
    queue.close()
    dead = open_queue("dead")
    failing = patch.object(moves, "publish_move", side_effect=OSError(errno.EIO, "it breaks"))
    with failing, pytest.raises(OSError, match="it breaks"):
        burial_of(dead).take_over(dead.get(False), "jobs")
    open_queue(max_item_bytes=300).close()
    return dead


def test_a_letter_that_is_skipped_while_it_can_not_go_back(open_queue: Open) -> None:
    dead = left_too_large(open_queue)

    def was_published(*_about: Any, **_how: Any) -> bool:
        assert skip_past(dead, 2) == 1
        return False

    with patch.object(moves, "was_published", was_published):
        try_again(dead)
    assert (dead.reader().items, burial_of(dead)._backlog.progress.move) == (0, None)
    dead._check()


def test_giving_a_letter_back_is_interrupted(open_queue: Open, clock: ManualClock) -> None:
    dead = left_too_large(open_queue)
    with patch.object(Backlog, "requeue", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        try_again(dead)
    later(clock)
    assert [item.id for item in dead.get_many(9, timeout=0)] == [1]
    dead._check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_without_a_timer_the_next_abort_tries_it_again(
    open_queue: Open, folder: Path, clock: ManualClock, error: type[BaseException]
) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"a", b"b"])
    failing = patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full"))
    first, second = queue.get_many(2, timeout=0)
    with failing, patch.object(clock, "call_later", side_effect=error):
        try:
            first.abort()
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
    second.abort()
    assert [letter.data for letter in letters_of(folder)] == [b"a", b"b"]


def test_the_timer_of_a_reader_that_is_closed_does_nothing(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=DEAD)
    queue.put(b"a")
    burial = burial_of(queue)
    with patch.object(moves, "publish_move", side_effect=OSError(errno.ENOSPC, "full")):
        kill(queue, 1)
        queue.close()
    with patch.object(burial, "run", side_effect=AssertionError):
        later(clock)
    assert not burial._is_armed


def test_a_forked_child_has_a_lock_of_its_own(open_queue: Open) -> None:
    burial = burial_of(open_queue())
    with burial.moving:
        burial.abandon()
        assert not burial.moving.locked()


def test_nothing_is_moved_into_another_folder(open_queue: Open, folder: Path) -> None:
    """The folder is renamed while the queue is open, and perhaps another one is made in its place."""
    queue = open_queue(default_reader=DEAD)
    queue.put_many([b"1", b"2"])
    moved = folder.with_name("moved")
    folder.rename(moved)
    kill(queue)
    assert not folder.exists()
    folder.mkdir()
    try_again(queue)
    kill(queue)
    stats = queue.stats().readers[""]
    assert (stats.dead, stats.dead_letter_failures) == (0, 2)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    moved.rename(folder)
    try_again(queue)
    assert [letter.data for letter in letters_of(folder)] == [b"1", b"2"]


def test_a_seek_in_a_renamed_folder_does_not_guess(open_queue: Open, folder: Path) -> None:
    """Whether an intent was published is seen in the other queue alone."""
    queue = open_queue(default_reader=DEAD)
    queue.put(b"1")
    with patch("kestrelpy.inbox.moves.publish_move", side_effect=OSError(errno.EIO, "no")):
        kill(queue)
    folder.rename(moved := folder.with_name("moved"))
    with pytest.raises(FileNotFoundError, match="renamed or removed"):
        queue.seek(1)
    moved.rename(folder)
    try_again(queue)
    assert [letter.data for letter in letters_of(folder)] == [b"1"]
