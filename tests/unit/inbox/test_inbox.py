"""The inbox: parts, publishing, taking in, what is remembered, and what can't be taken."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    CorruptJournal,
    DurabilityUnknown,
    ForkedQueue,
    InvalidName,
    ItemTooLarge,
    JournaledQueue,
    QueueClosed,
    QueueDiskFull,
    QueueEmpty,
    QueueLocked,
    ReaderConfig,
    UnsupportedFormat,
    inspect,
    queue_names,
    scan,
    verify,
)
from kestrelpy._disk.file import RealFile
from kestrelpy._disk.real import RealDirectory, RealDisk
from kestrelpy._journal import bodies
from kestrelpy._process import forget
from kestrelpy.clock import SystemClock
from kestrelpy.config import FullPolicy
from kestrelpy.inbox import Part, PartWriter, discard, last_version, pending, pending_queues, publish, put_many, take_in
from kestrelpy.inbox import format as inbox_format
from kestrelpy.inbox.format import BatchPart, Intent, LedgerState, PublishedBatch
from kestrelpy.inbox.host import InboxHost
from kestrelpy.inbox.ingest import OLD_SECONDS, Ingest
from kestrelpy.inbox.ledger import IngestLedger, read_batch
from kestrelpy.inbox.watcher import InboxWatcher, _forget_watches
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.support.disks import GatedDisk
from tests.support.patience import until
from tests.support.queues import START_MS

Open = Callable[..., JournaledQueue]
NAME = "jobs"


def host_of(queue: JournaledQueue) -> InboxHost:
    assert queue._inbox is not None
    return queue._inbox


def part_of(folder: Path, items: list[bytes], *, expires_ms: int | None = None, name: str = NAME) -> Part:
    with PartWriter(folder, name) as writer:
        writer.add(items, expires_ms=expires_ms)
        return writer.seal()


def pack(items: list[bytes]) -> tuple[bytes, bytes, int]:
    return struct.pack(f"<{len(items)}I", *map(len, items)), b"".join(items), len(items)


def publish_items(folder: Path, *items: bytes, **about: Any) -> bool:
    return publish(folder, NAME, [part_of(folder, list(items))], **about)


def inbox_files(folder: Path, ending: str = "") -> list[str]:
    return sorted(path.name for path in (folder / "inbox").iterdir() if path.name.endswith(ending))


def items_of(queue: JournaledQueue) -> list[bytes]:
    with contextlib.suppress(QueueEmpty):
        return [item.data for item in queue.get_many(10_000, timeout=0)]
    return []


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_part_says_what_it_has_and_can_be_pickled(folder: Path) -> None:
    part = part_of(folder, [b"a", bytearray(b"bb"), memoryview(b"")])  # type: ignore[list-item]
    assert (part.items, part.data_bytes) == (3, 3)
    assert pickle.loads(pickle.dumps(part)) == part
    assert inbox_files(folder) == [part.name]
    assert (folder / "inbox").stat().st_mode & 0o777 == 0o700
    assert (folder / "inbox" / part.name).stat().st_mode & 0o777 == 0o600
    assert queue_names(folder) == []


def test_a_part_of_nothing_has_no_file(folder: Path) -> None:
    with PartWriter(folder, NAME) as writer:
        writer.add([])
        writer.add_packed(b"", b"", 0)
        part = writer.seal()
    assert (part.items, inbox_files(folder)) == (0, [])
    discard(folder, NAME, [part])


def test_what_is_not_sealed_is_discarded(folder: Path) -> None:
    with PartWriter(folder, NAME) as writer:
        writer.add_packed(*pack([b"x"]))
        assert inbox_files(folder) == [writer.name]
    assert inbox_files(folder) == []
    writer.discard()
    for call in (writer.seal, lambda: writer.add([b"y"]), lambda: writer.add_packed(b"", b"", 0)):
        with pytest.raises(ValueError, match="was discarded"):
            call()
    with PartWriter(folder, NAME):
        pass
    with PartWriter(folder, NAME) as writer:
        writer.add_packed(*pack([b"x"]))
        os.unlink(folder / "inbox" / writer.name)


def test_what_no_part_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidName):
        PartWriter(folder, "no.name")
    monkeypatch.setattr("kestrelpy.inbox.parts.MAX_ITEM_BYTES", 3)
    with PartWriter(folder, NAME) as writer:
        with pytest.raises(TypeError, match="must be bytes"):
            writer.add(["text"])  # type: ignore[list-item]
        with pytest.raises(ItemTooLarge):
            writer.add([b"four"])
        with pytest.raises(ItemTooLarge):
            writer.add_packed(*pack([b"four"]))
        with pytest.raises(ValueError, match="bytes of lengths"):
            writer.add_packed(b"123", b"", 1)
        with pytest.raises(ValueError, match="the lengths make 3 bytes"):
            writer.add_packed(pack([b"abc"])[0], b"ab", 1)
        with pytest.raises(ValueError, match="expires_ms"):
            writer.add([b"x"], expires_ms=-1)
        assert writer.seal().items == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("expires_ms", [None, START_MS + 10_000])
@pytest.mark.parametrize("segment_bytes", [4096, 16 << 20])
def test_items_come_out_as_they_went_in(
    folder: Path, open_queue: Open, packed: bool, expires_ms: int | None, segment_bytes: int
) -> None:
    items = [b"%d" % at + bytes(at * 37 % 2600) for at in range(120)] + [b"", bytes(3800)]
    with PartWriter(folder, NAME) as writer:
        for first in (0, 1, 60):
            some = items[first : {0: 1, 1: 60, 60: None}[first]]
            if packed:
                lengths, data, count = pack(some)
                writer.add_packed(lengths, memoryview(data), count, expires_ms=expires_ms)
            else:
                writer.add(some, expires_ms=expires_ms)
        part = writer.seal()
    assert publish(folder, NAME, [part])
    queue = open_queue(segment_bytes=segment_bytes)
    got = queue.get_many(1000, timeout=0)
    assert [item.data for item in got] == items
    assert {(item.added_ms, item.expires_ms) for item in got} == {(START_MS, expires_ms)}
    queue._check()
    assert verify(folder, NAME).ok


def test_many_items_are_several_frames(folder: Path, monkeypatch: pytest.MonkeyPatch, open_queue: Open) -> None:
    monkeypatch.setattr("kestrelpy.inbox.parts.FRAME_TARGET_BYTES", 1000)
    monkeypatch.setattr("kestrelpy.inbox.parts.MOST_IN_FRAME", 7)
    small, large = [b"%d" % at for at in range(30)], [bytes([at]) * 400 for at in range(9)]
    with PartWriter(folder, NAME) as writer:
        writer.add(small)
        writer.add_packed(*pack(small))
        writer.add(large)
        writer.add_packed(*pack(large))
        part = writer.seal()
    assert publish(folder, NAME, [part])
    assert items_of(open_queue()) == (small + large[:0] + small) + large + large


# -- publishing ------------------------------------------------------------------------------------------------------


def test_what_waits_is_counted_for_all_names(folder: Path, open_queue: Open) -> None:
    assert pending_queues(folder) == {}
    for name in (NAME, "jobs2", "jobs2"):
        put_many(folder, name, [b"x"])
    part_of(folder, [b"not published"], name="jobs3")
    (folder / "inbox" / "jobs4.0000000000001.batch.refused").touch()
    (folder / "inbox" / "foreign.batch").touch()
    assert pending_queues(folder) == {NAME: 1, "jobs2": 2}
    open_queue()
    assert pending_queues(folder) == {"jobs2": 2}


def test_a_version_is_published_once(folder: Path, open_queue: Open) -> None:
    assert last_version(folder, NAME, "app") is None
    assert pending(folder, NAME) == 0
    assert publish_items(folder, b"one", app_id="app", version=1)
    assert not publish_items(folder, b"again", app_id="app", version=1)
    assert not publish_items(folder, b"late", app_id="app", version=0)
    assert publish_items(folder, b"other", app_id="other")
    assert publish_items(folder, b"three", app_id="app", version=3)
    assert (pending(folder, NAME), last_version(folder, NAME, "app")) == (3, 3)
    queue = open_queue()
    assert (pending(folder, NAME), last_version(folder, NAME, "app")) == (0, 3)
    assert not publish_items(folder, b"again", app_id="app", version=3)
    assert queue.take_in() == 0
    assert items_of(queue) == [b"one", b"other", b"three"]
    assert inbox_files(folder) == ["jobs.batches", "jobs.lock"]


def test_the_same_parts_twice_are_one_batch(folder: Path, open_queue: Open) -> None:
    batches: tuple[dict[str, Any], ...] = ({}, {"app_id": "app", "version": 7})
    for about in batches:
        part = part_of(folder, [b"once"])
        assert publish(folder, NAME, [part], **about)
        assert not publish(folder, NAME, [part], **about)
        discard(folder, NAME, [part])  # it belongs to the batch
    assert items_of(open_queue()) == [b"once", b"once"]
    with pytest.raises(FileNotFoundError):
        publish(folder, NAME, [part])


@pytest.mark.parametrize("about", [{}, {"app_id": "app", "version": 1}])
def test_a_part_named_twice_is_refused(folder: Path, open_queue: Open, about: dict[str, Any]) -> None:
    part, other = part_of(folder, [b"one"]), part_of(folder, [b"two"])
    with pytest.raises(ValueError, match=f"part {part.name} is named twice"):
        publish(folder, NAME, [part, other, part], **about)
    assert pending(folder, NAME) == 0
    assert publish(folder, NAME, [part, other], **about)
    assert items_of(open_queue()) == [b"one", b"two"]


@pytest.mark.parametrize("first", [{}, {"app_id": "app", "version": 1}])
@pytest.mark.parametrize("second", [{}, {"app_id": "app", "version": 2}, {"app_id": "other", "version": 1}])
def test_a_part_of_another_batch_is_refused(
    folder: Path, open_queue: Open, first: dict[str, Any], second: dict[str, Any]
) -> None:
    part, other = part_of(folder, [b"one"]), part_of(folder, [b"two"])
    assert publish(folder, NAME, [part], **first)
    with pytest.raises(ValueError, match=f"part {part.name} belongs to jobs"):
        publish(folder, NAME, [other, part], **second)
    assert pending(folder, NAME) == 1
    assert publish(folder, NAME, [other], **second)
    assert items_of(open_queue()) == [b"one", b"two"]
    assert inbox_files(folder, ".refused") == []
    with pytest.raises(FileNotFoundError):
        publish(folder, NAME, [part], app_id="third")


def test_a_part_of_a_batch_that_is_being_cleared_away_is_not_free(folder: Path, open_queue: Open) -> None:
    """A kill may leave either of them: never a part of which nobody knows that it was taken in."""
    parts = [part_of(folder, [b"one"]), part_of(folder, [b"two"])]
    queue = open_queue(inbox_interval=None)
    assert queue._inbox is not None
    assert queue._inbox._ingest is not None
    unlink, seen = queue._inbox._ingest._unlink, []

    def look(name: str) -> None:
        unlink(name)
        seen.append((len(inbox_files(folder, ".batch")), len(inbox_files(folder, ".part"))))

    queue._inbox._ingest._unlink = look  # type: ignore[method-assign]
    publish(folder, NAME, parts)
    queue.take_in()
    assert seen == [(1, 1), (1, 0), (0, 0)]


def test_a_version_needs_its_app_id(folder: Path) -> None:
    part = part_of(folder, [b"x"])
    with pytest.raises(ValueError, match="version=3 needs an app_id"):
        publish(folder, NAME, [part], version=3)
    assert publish(folder, NAME, [part], version=0)


def test_a_visitor_makes_no_queue_for_nothing(tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    assert take_in(folder, NAME) == 0
    assert (queue_names(folder), os.listdir(folder)) == ([], [])
    assert take_in(tmp_path / "nowhere", NAME) == 0
    assert not (tmp_path / "nowhere").exists()
    publish_items(folder, b"x", app_id="app", version=1)
    with pytest.raises(ValueError, match="named twice"):
        publish(folder, NAME, [part_of(folder, [b"y"])] * 2)
    assert (take_in(folder, "others"), os.listdir(folder)) == (0, ["inbox"])
    assert (take_in(folder, NAME), take_in(folder, NAME)) == (1, 0)
    with JournaledQueue(folder, NAME), pytest.raises(QueueLocked):
        take_in(folder, NAME)


def test_a_batch_of_nothing_is_remembered_by_its_version(folder: Path, open_queue: Open) -> None:
    assert publish(folder, NAME, [])
    assert not (folder / "inbox").exists()
    assert publish(folder, NAME, [], app_id="app", version=4)
    queue = open_queue()
    assert (queue.take_in(), last_version(folder, NAME, "app"), pending(folder, NAME)) == (0, 4, 0)


def test_what_is_not_published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(folder, [b"x"])
    for bad in (0, "", "x" * 501):
        with pytest.raises(ValueError, match="app_id"):
            publish(folder, NAME, [part], app_id=bad)  # type: ignore[arg-type]
    for version in (-1, True, 1.5):
        with pytest.raises(ValueError, match="version"):
            publish(folder, NAME, [part], app_id="app", version=version)  # type: ignore[arg-type]
    for name in ("other.batch", part.name + ".tmp", part_of(folder, [b"y"], name="other").name):
        with pytest.raises(ValueError, match="is not a part of queue"):
            publish(folder, NAME, [Part(name, 1, 1, 0)])
    monkeypatch.setattr("kestrelpy.inbox.publishing.MOST_PARTS", 2)
    with pytest.raises(ValueError, match="at most 2 parts"):
        publish(folder, NAME, [part] * 3)
    path = folder / "inbox" / part.name
    whole = path.read_bytes()
    for damaged in (b"", whole[:50], whole[:-1], whole + b"\0", b"x" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptJournal):
            publish(folder, NAME, [part])
    path.write_bytes(whole)
    with pytest.raises(CorruptJournal, match="has 1 items"):
        publish(folder, NAME, [Part(part.name, 2, 1, part.digest)])
    assert pending(folder, NAME) == 0
    discard(folder, NAME, [part, part])
    assert not path.exists()


def test_numbers_rise_whatever_the_clock_says(folder: Path, open_queue: Open) -> None:
    for at in range(3):
        assert publish_items(folder, b"%d" % at, clock=ManualClock(START_MS - at * 1000))
    assert items_of(open_queue()) == [b"0", b"1", b"2"]


# -- taking in -------------------------------------------------------------------------------------------------------


def test_it_is_looked_for_every_so_often(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue, other = open_queue(inbox_interval=2.0), open_queue("other", inbox_interval=3.0)
    clock.advance(2.0)
    publish_items(folder, b"a")
    clock.advance(1.9)
    assert host_of(queue).watcher is host_of(other).watcher
    assert items_of(queue) == []
    clock.advance(0.1)
    assert queue.get(timeout=20).data == b"a"
    queue.close()
    timers = clock.timer_count
    other.close()
    assert clock.timer_count == timers - 1


def test_a_queue_that_looks_more_often_is_not_kept_waiting_by_another(
    folder: Path, open_queue: Open, clock: ManualClock
) -> None:
    """C20; and one that has closed asks for nothing any more."""
    rare = open_queue("other", inbox_interval=3600)
    often = open_queue(inbox_interval=0.1)
    publish_items(folder, b"x")
    clock.advance(0.2)
    until(lambda: often.stats().tail_id == 1)
    often.close()
    host = host_of(rare)
    until(lambda: host.watcher is not None and host.watcher._timer is not None)
    clock.advance(0.2)
    watch = host.watcher
    assert watch is not None
    until(lambda: watch._timer is not None and watch._due > clock.monotonic() + 3000)


def test_it_is_looked_for_by_the_systems_clock(folder: Path) -> None:
    with JournaledQueue(folder, NAME, inbox_interval=0.01) as queue:
        publish_items(folder, b"a")
        assert queue.get(timeout=20).data == b"a"


def test_nobody_looks_where_nobody_asked(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(inbox_interval=None)
    publish_items(folder, b"a")
    clock.advance(100)
    assert items_of(queue) == []
    assert queue.take_in() == 1
    assert items_of(queue) == [b"a"]
    for bad in (0, -1.0):
        with pytest.raises(ValueError, match="inbox_interval"):
            JournaledQueue(folder, "other", inbox_interval=bad)


def test_nobody_is_left_to_look_for(folder: Path, clock: ManualClock) -> None:
    queue = JournaledQueue(folder, "other", clock=clock, disk=RealDisk())
    host = host_of(queue)
    watch = host.watcher
    assert watch is not None
    queue.close()
    watch._look()
    watch._lost(RuntimeError())
    watch.leave(host)
    assert not watch._members


def test_a_failing_look_is_logged_and_tried_again(
    folder: Path,
    open_queue: Open,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FailingDisk(RealDisk())
    queue = open_queue(disk=disk)
    publish_items(folder, b"a")
    disk.arm(errno.EMFILE)
    clock.advance(0.5)
    assert "looking at the inbox" in caplog.text
    raised: list[int] = []
    with monkeypatch.context() as patched:

        def run(self: Ingest) -> int:
            raised.append(1)
            raise OSError(errno.EIO, "no")

        def raised_often() -> bool:
            clock.advance(0.5)
            return len(raised) > 2

        patched.setattr(Ingest, "run", run)
        until(raised_often)
    (said,) = (each for each in caplog.records if "can't be ingested now" in each.getMessage() and each.levelno > 10)
    assert said.getMessage().endswith("it is tried again: OSError: [Errno 5] no")
    assert not said.exc_info, "the traceback is at DEBUG, as the guide says"

    def taken_in() -> bool:
        clock.advance(0.5)
        return queue.stats().tail_id == 1

    until(taken_in)
    assert items_of(queue) == [b"a"]


def test_no_thread_to_be_had(
    folder: Path, open_queue: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    publish_items(folder, b"a")
    with monkeypatch.context() as patched:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", start)
        clock.advance(0.5)
    clock.advance(0.5)
    assert queue.get(timeout=20).data == b"a"


def test_a_queue_without_a_journal_has_no_inbox(folder: Path) -> None:
    with JournaledQueue(folder, NAME, journaled=False) as queue:
        assert queue.take_in() == 0
    with JournaledQueue(folder, NAME) as queue:
        assert queue.take_in() == 0
    assert not (folder / "inbox").exists()


@pytest.mark.parametrize("opened", [False, True])
def test_a_queue_in_memory_leaves_the_inbox_to_its_owner(folder: Path, open_queue: Open, opened: bool) -> None:
    owner = open_queue(inbox_interval=None) if opened else None
    publish_items(folder, b"durable", app_id="app", version=7)
    before = inbox_files(folder)
    with JournaledQueue(folder, NAME, journaled=False) as queue:
        assert (queue.take_in(), items_of(queue), pending(folder, NAME)) == (0, [], 1)
        queue.erase()
    assert inbox_files(folder) == before
    owner = owner or open_queue(inbox_interval=None)
    owner.take_in()
    assert items_of(owner) == [b"durable"]


def test_a_forked_child_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = threading.Lock()
    guard.acquire()
    monkeypatch.setattr(InboxWatcher, "_guard", guard)
    monkeypatch.setattr(InboxWatcher, "_shared", {1: 2})
    _forget_watches()
    assert not InboxWatcher._shared
    assert not InboxWatcher._guard.locked()


@pytest.mark.parametrize("sync", ["always", 0.1, "never"])
def test_readers_see_a_batch_at_once_among_puts(folder: Path, open_queue: Open, sync: Any) -> None:
    queue = open_queue(sync=sync, segment_bytes=4096)
    queue.put(b"before")
    reader = queue.reader()
    assert reader.get().data == b"before"
    queue.put(b"waits")
    batch = [bytes([at]) * 700 for at in range(20)]
    publish_items(folder, *batch)
    assert queue.take_in() == 20
    queue.put(b"after")
    assert reader.bytes == 6 + 5 + 20 * 700 + 5
    assert items_of(queue) == [b"waits", *batch, b"after"]
    queue.put(b"more")
    assert items_of(queue) == [b"more"]
    assert queue.stats().durable_id >= 22
    queue._check()


def test_a_sync_that_fails_in_the_background_is_told_at_the_end(
    folder: Path, open_queue: Open, clock: ManualClock
) -> None:
    disk = FailingDisk(RealDisk())
    queue = open_queue(disk=disk, sync="never")
    publish_items(folder, b"a")
    queue.put(b"x")
    disk.arm(errno.EIO, kinds={"sync"})
    clock.advance(0.5)
    until(lambda: queue._status.error is not None)
    with pytest.raises(DurabilityUnknown):
        queue.close()


def test_a_forked_child_lets_go_of_the_inbox(folder: Path, open_queue: Open) -> None:
    publish_items(folder, b"a")
    queue = open_queue()
    assert queue._inbox is not None
    assert queue._inbox._folder is not None
    forget(queue)
    queue._abandon()
    assert queue._inbox._folder is None


def test_a_child_forked_while_a_batch_is_taken_in_is_refused_and_does_not_hang(folder: Path, open_queue: Open) -> None:
    disk = GatedDisk()
    queue = open_queue(disk=disk, inbox_interval=None, clock=SystemClock())
    publish_items(folder, b"a", b"b")
    disk.gate.clear()
    thread = threading.Thread(target=queue.take_in)
    thread.start()
    until(lambda: queue._status.is_unfinished)
    child = os.fork()
    if not child:
        refused = 0
        try:
            signal.alarm(20)
            for call in (queue.put, lambda item: queue.put_many([item]), queue.put_future, lambda _: queue.take_in()):
                with contextlib.suppress(ForkedQueue):
                    call(b"x")
                    refused -= 1
                refused += 1
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    disk.gate.set()
    thread.join()
    assert queue.put(b"c") == 3
    assert items_of(queue) == [b"a", b"b", b"c"]


def test_who_waits_is_served(folder: Path, open_queue: Open) -> None:
    queue = open_queue(inbox_interval=None)
    future = queue.get_future()
    publish_items(folder, b"a")
    queue.take_in()
    assert future.result(20).data == b"a"


def test_a_limit_keeps_a_batch_out_until_there_is_room(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=3), inbox_interval=None)
    reader = queue.reader()
    queue.put(b"1", expires_in=5)
    queue.put(b"2")
    publish_items(folder, b"a", b"b")
    publish_items(folder, b"c", b"d", b"e", b"f")
    assert queue.take_in() == 0
    clock.advance(6)
    assert queue.take_in() == 2
    reader.commit_many(reader.get_many(2))
    assert queue.take_in() == 0  # it will never have room, and waits until it is empty
    reader.commit(reader.get())
    assert queue.take_in() == 4
    assert items_of(queue) == [b"c", b"d", b"e", b"f"]


def test_limits_of_readers_that_are_not_open_and_of_those_that_drop(folder: Path, open_queue: Open) -> None:
    configs = {
        "kept": ReaderConfig(max_items=1),
        "dropping": ReaderConfig(max_items=2, full_policy=FullPolicy.DROP_OLDEST),
    }
    queue = open_queue(readers=configs)
    queue.reader("kept").close()
    dropping = queue.reader("dropping")
    queue.put(b"x")
    publish_items(folder, b"a", b"b", b"c")
    assert queue.take_in() == 0
    queue.drop_reader("kept")
    assert queue.take_in() == 3
    assert [item.data for item in dropping.get_many(9, timeout=0)] == [b"b", b"c"]


def test_expired_items_that_have_a_hook_count(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    gone: list[bytes] = []
    config = ReaderConfig(max_items=1, on_expired=lambda item: gone.append(item.data))
    queue = open_queue(default_reader=config, inbox_interval=None)
    queue.reader()
    queue.put(b"1", expires_in=1)
    publish_items(folder, b"a")
    clock.advance(2)
    assert (queue.take_in(), gone) == (0, [])
    queue.discard_expired()
    assert (queue.take_in(), gone) == (1, [b"1"])


def test_who_closes_takes_nothing_in_any_more(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    queue.close()
    publish_items(folder, b"a")
    calls: tuple[Callable[[], object], ...] = (queue.take_in, lambda: queue._inbox and queue._inbox.take_in())
    for call in calls:
        with pytest.raises(QueueClosed):
            call()
    assert queue._inbox is not None
    queue._inbox.look()
    assert pending(folder, NAME) == 1


def test_erase_takes_the_inbox_with_it(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    publish_items(folder, b"a", app_id="app")
    queue.take_in()
    publish_items(folder, b"b")
    part_of(folder, [b"c"])
    kept = part_of(folder, [b"d"], name="other")
    queue.erase()
    assert inbox_files(folder) == [kept.name]
    with JournaledQueue(folder, "third") as third:
        third.erase()
    memory = open_queue()
    memory.erase()


# -- without an owner ------------------------------------------------------------------------------------------------


def test_a_visitor_takes_in_and_touches_nothing_else(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096, inbox_interval=None)
    reader = queue.reader("named")
    for at in range(8):
        queue.put(b"%d" % at + bytes(1500))
    queue.close()
    del reader
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert take_in(folder, NAME) == 0
    publish_items(folder, b"a", bytes(3000), app_id="app")
    assert take_in(folder, NAME, clock=clock) == 2
    assert take_in(folder, NAME) == 0
    now = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    changed = {name for name in files if files[name] != now.get(name)}
    assert changed <= {"jobs.mark", "jobs.mark.tmp", "jobs.lock"}
    assert [record.data[:1] for record in scan(folder, NAME)][-2:] == [b"a", b"\0"]
    with JournaledQueue(folder, NAME) as owner:
        with pytest.raises(QueueLocked):
            take_in(folder, NAME)
        assert len(owner.reader("named").get_many(20)) == 10


def test_a_visitor_makes_the_queue(folder: Path, open_queue: Open) -> None:
    assert take_in(folder, NAME) == 0
    publish_items(folder, b"a")
    assert take_in(folder, NAME) == 1
    assert items_of(open_queue()) == [b"a"]


def test_a_visitor_whose_disk_fails() -> None:
    """At each of its operations; what it leaves, the next one goes on with."""
    errors, at, is_over = set(), 0, False
    while not is_over:
        at += 1
        disk = FailingDisk(MemoryDisk())
        for first in (b"a", b"c"):
            with PartWriter("/data", NAME, disk=disk) as writer:
                writer.add([first, bytes([first[0] + 1])])
                part = writer.seal()
            publish("/data", NAME, [part], disk=disk)
        disk.arm(errno.EIO, at=at)
        try:
            take_in("/data", NAME, disk=disk)
        except OSError as error:
            errors.add(type(error))
        is_over = disk.armed
        disk.disarm()
        take_in("/data", NAME, disk=disk)
        assert pending("/data", NAME, disk=disk) == 0
        assert [record.data for record in scan("/data", NAME, disk=disk)] == [b"a", b"b", b"c", b"d"]
    assert errors == {OSError, DurabilityUnknown}


# -- what goes wrong -------------------------------------------------------------------------------------------------


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_batch_that_can_never_be_taken_is_kept_aside(
    folder: Path, open_queue: Open, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [part_of(folder, [b"x%d" % at] * 3) for at in range(7)]
    for part in parts:
        publish(folder, NAME, [part])
    publish_items(folder, bytes(101))
    publish_items(folder, b"good")
    paths = [folder / "inbox" / part.name for part in parts]
    damage(paths[0], 150)
    paths[1].unlink()
    paths[2].write_bytes(paths[3].read_bytes())
    paths[3].unlink()
    paths[3].symlink_to("elsewhere")
    batches = [folder / "inbox" / name for name in inbox_files(folder, ".batch")]
    damage(batches[4], 60)
    batches[5].rename(folder / "inbox" / "jobs.0000000000009.batch")
    batches[6].unlink()
    batches[6].mkdir()
    queue = open_queue(max_item_bytes=100)
    assert items_of(queue) == [b"good"]
    assert len(inbox_files(folder, ".refused")) == 8
    assert caplog.text.count("kept as .refused") == 8
    assert queue.take_in() == 0
    assert queue.stats().refused_batches == 8
    queue.close()
    queue = open_queue(inbox_interval=None)
    assert items_of(queue) == [b"good"]
    assert queue.stats().refused_batches == verify(folder, NAME).refused_batches == 8
    assert inspect(folder, NAME).refused_batches == 8
    assert (queue_names(folder), inspect(folder, "other").refused_batches) == ([NAME], 0)


def limits(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.limit"))


def test_what_the_owner_does_not_take_is_not_published(folder: Path, open_queue: Open) -> None:
    """Also when nobody has it open; as the last owner has said."""
    open_queue(max_item_bytes=1000, inbox_interval=None).close()
    whole = part_of(folder, [b"small", bytes(1000)])
    with PartWriter(folder, NAME) as writer, pytest.raises(ItemTooLarge, match="1,001 bytes is larger than max_item"):
        writer.add([bytes(1001)])
    with PartWriter(folder, NAME) as writer, pytest.raises(ItemTooLarge):
        writer.add_packed(*pack([b"a", bytes(1001)]))
    open_queue(max_item_bytes=999, inbox_interval=None).close()
    assert limits(folder) == ["jobs.999.limit"]
    for part in (whole, Part(whole.name, whole.items, whole.data_bytes, whole.digest)):  # one that does not say
        with pytest.raises(ItemTooLarge, match="1,000 bytes is larger than max_item_bytes=999") as caught:
            publish(folder, NAME, [part])
        assert (caught.value.item_bytes, caught.value.max_item_bytes) == (1000, 999)
    assert pending(folder, NAME) == 0
    queue = open_queue(max_item_bytes=1000, inbox_interval=None)
    assert publish(folder, NAME, [whole])
    assert queue.take_in() == 2
    assert queue.stats().refused_batches == 0
    queue.erase()
    assert limits(folder) == []


def test_what_nobody_has_opened_yet_has_no_limit(folder: Path, open_queue: Open) -> None:
    """The first owner refuses what is too large for it, and says so."""
    publish_items(folder, bytes(5000))
    queue = open_queue(segment_bytes=4096, inbox_interval=None)
    assert (queue.stats().tail_id, queue.stats().refused_batches) == (0, 1)
    publish_items(folder, bytes(3000))
    assert queue.take_in() == 1


def test_the_smaller_limit_counts_where_an_owner_was_killed_on_the_way(folder: Path, open_queue: Open) -> None:
    open_queue(max_item_bytes=10).close()
    (folder / "jobs.7.limit").touch()
    (folder / "jobs.x.limit").touch()
    with PartWriter(folder, NAME) as writer, pytest.raises(ItemTooLarge, match="max_item_bytes=7"):
        writer.add([bytes(8)])
    open_queue(max_item_bytes=10, inbox_interval=None)
    assert limits(folder) == ["jobs.10.limit", "jobs.x.limit"]


def test_a_limit_that_cannot_be_left_keeps_no_queue_from_opening(
    folder: Path, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = RealDirectory.create

    def full(directory: RealDirectory, name: str) -> RealFile:
        if name.endswith(".limit"):
            raise OSError(errno.ENOSPC, "full")
        return create(directory, name)

    monkeypatch.setattr(RealDirectory, "create", full)
    assert open_queue().put(b"a") == 1
    assert limits(folder) == []


def test_what_a_part_must_be_like(folder: Path, open_queue: Open) -> None:
    """Each byte of it counts, and so does what the batch says of it."""
    part = part_of(folder, [b"a", b"bb"])
    path = folder / "inbox" / part.name
    whole = path.read_bytes()
    queue = open_queue(inbox_interval=None)
    for at in range(0, len(whole), 3):
        path.write_bytes(whole)
        with contextlib.suppress(CorruptJournal):
            other = Part(part.name, part.items, part.data_bytes, part.digest ^ (at == 0))
            assert publish(folder, NAME, [other], app_id="app", version=at)
            damage(path, at) if at else None
            assert queue.take_in() == 0
    assert queue.stats().tail_id == 0


def test_forged_frames_are_not_read_beyond_their_file(folder: Path, open_queue: Open) -> None:
    from kestrelpy._journal import format as fmt

    part = part_of(folder, [b"abcd"])
    path = folder / "inbox" / part.name
    whole = path.read_bytes()
    header = fmt.decode_header(whole)
    assert header is not None
    footer = fmt.SegmentFooter(1, 1, 1, 4, 0, 0, 0)
    queue = open_queue(inbox_interval=None)
    for kind, body in ((2, b""), (2, b"\1\0\0\0"), (2, bytes(8)), (3, b"1234"), (4, b"abcd"), (8, b"abcd"), (0, None)):
        length = 1 << 31 if body is None else len(body)
        head = fmt.pack_frame(length, 1, kind << fmt.KIND_SHIFT, 0, header.marker)
        frame = fmt.pack_crc(fmt.crc32(head + (body or b""))) + head + (body or b"")
        for middle in (frame, frame[:20]):
            end = fmt.HEADER_BYTES + len(middle)
            sealed = fmt.encode_footer(footer._replace(records_end=end), 0, header.marker)
            path.write_bytes(whole[: fmt.HEADER_BYTES] + middle + sealed)
            assert publish(folder, NAME, [part])
            assert queue.take_in() == 0
    assert len(inbox_files(folder, ".refused")) == 14


def test_a_newer_version_waits_and_all_behind_it(
    folder: Path, open_queue: Open, caplog: pytest.LogCaptureFixture
) -> None:
    publish_items(folder, b"a")
    path = folder / "inbox" / inbox_files(folder, ".batch")[0]
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    os.utime(path)
    (folder / "inbox" / "jobs.batches.tmp").write_bytes(b"left over")
    queue = open_queue(inbox_interval=None)
    assert "newer version" in caplog.text
    assert "could not be removed" in caplog.text
    assert (queue.take_in(), pending(folder, NAME)) == (0, 1)
    queue.close()
    memory = folder / "inbox" / "jobs.batches"
    memory.write_bytes(b"KSTRLMEM\x09\0" + bytes(6))
    with pytest.raises(UnsupportedFormat):
        open_queue()


@pytest.mark.parametrize("how", ["flip", "foreign", "link", "huge"])
def test_a_damaged_memory_is_kept_aside(folder: Path, open_queue: Open, how: str, caplog: Any) -> None:
    publish_items(folder, b"a", app_id="first", version=5)
    publish_items(folder, b"b", app_id="second", version=5)
    open_queue().close()
    path = folder / "inbox" / "jobs.batches"
    if how == "flip":
        damage(path, 30)
    elif how == "foreign":
        path.write_bytes(b"not ours")
    elif how == "huge":
        os.truncate(path, 1 << 40)
    else:
        path.unlink()
        path.symlink_to("elsewhere")
    queue = open_queue()
    assert "batches are forgotten" in caplog.text
    assert len(inbox_files(folder, ".batches.damaged")) == 1
    assert publish_items(folder, b"c", app_id="third", version=1)
    assert queue.take_in() == 1
    assert last_version(folder, NAME, "third") == 1


def test_a_torn_memory_counts_up_to_there(folder: Path, open_queue: Open) -> None:
    publish_items(folder, b"a", app_id="app", version=5)
    open_queue().close()
    path = folder / "inbox" / "jobs.batches"
    path.write_bytes(path.read_bytes() + b"torn")
    queue = open_queue()
    assert not publish_items(folder, b"b", app_id="app", version=5)
    assert publish_items(folder, b"c", app_id="app", version=6)
    assert queue.take_in() == 1
    assert inbox_files(folder, ".damaged") == []


def test_what_was_left_over_goes_after_a_day(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    def begun(seconds: float, *, name: str = NAME, sealed: bool = True) -> Part:
        writer = PartWriter(folder, name, clock=ManualClock(START_MS - int(seconds * 1000)))
        writer.add_packed(*pack([b"x"]))
        return writer.seal() if sealed else Part(writer.name, 0, 0, 0)

    old, new = OLD_SECONDS + 1, OLD_SECONDS - 1
    kept = [begun(new), begun(old, name="other")]
    named = begun(old)
    publish(folder, NAME, [named], clock=clock)
    gone = [begun(old), begun(old, sealed=False)]
    foreign = ["jobs.txt", "jobs.0000000000001.batches.damaged", "README"]
    for name in [*foreign, "jobs.0000000000001.batch.tmp"]:
        (folder / "inbox" / name).write_bytes(b"")
    inbox = RealDisk().directory(str(folder / "inbox"))
    lock = inbox.lock("jobs.lock")
    open_queue(inbox_interval=None, max_item_bytes=1).close()
    assert {part.name for part in gone} <= set(inbox_files(folder))  # somebody publishes
    lock.release()
    inbox.close()
    (folder / "inbox" / "jobs.0000000000002.batch.refused").write_bytes(b"nobody knows what it names")
    open_queue(inbox_interval=None).close()
    assert {part.name for part in gone} <= set(inbox_files(folder))
    (folder / "inbox" / "jobs.0000000000002.batch.refused").unlink()
    open_queue(inbox_interval=None).close()
    assert set(inbox_files(folder)) == {*(part.name for part in kept), *foreign, "jobs.batches", "jobs.lock"}


def test_app_ids_are_forgotten_by_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_format, "MOST_APP_IDS", 3)
    state = LedgerState()
    for at in range(3):
        state.note_version(f"app{at}", at)
    state.note_version("app0", 9)
    state.note_done(b"1" * 16, 1, "app3", 7)
    state.note_done(b"2" * 16, 2, "", 0)
    assert state.versions == {"app2": 2, "app0": 9, "app3": 7}
    again, end = inbox_format.decode_ledger(data := inbox_format.encode_ledger(state, None))
    assert (again.versions, again.finished, end) == (state.versions, state.finished, len(data))


def test_the_memory_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.inbox.ledger.REPLACE_BYTES", 500)
    with JournaledQueue(folder, NAME, inbox_interval=None) as queue:
        for at in range(40):
            publish_items(folder, b"%d" % at, **({"app_id": "app", "version": at} if at % 2 else {}))
            assert queue.take_in() == 1
        assert (folder / "inbox" / "jobs.batches").stat().st_size < 1000
    state, _ = inbox_format.decode_ledger((folder / "inbox" / "jobs.batches").read_bytes())
    assert state.versions == {"app": 39}
    assert len(state.finished) < 10


# -- half of a batch -------------------------------------------------------------------------------------------------


def full_in_the_middle(folder: Path, disk: FailingDisk, **options: Any) -> JournaledQueue:
    """A queue with half of a batch in it, on a disk that is full."""
    queue = JournaledQueue(
        folder, NAME, disk=disk, inbox_interval=None, segment_bytes=4096, clock=ManualClock(START_MS), **options
    )
    queue.put(b"first")
    with PartWriter(folder, NAME) as writer:
        for at in range(6):
            writer.add([bytes([at]) * 1500], expires_ms=START_MS + 1_000_000 + at)
        part = writer.seal()
    publish(folder, NAME, [part], app_id="app", version=1)
    disk.arm(errno.ENOSPC, sticky=True, kinds={"grow"})
    with pytest.raises(QueueDiskFull):
        queue.take_in()
    assert queue._status.is_unfinished
    return queue


@pytest.mark.parametrize("sync", ["always", "never"])
def test_half_a_batch_is_not_seen_and_the_rest_follows(folder: Path, sync: Any) -> None:
    disk = FailingDisk(RealDisk())
    queue = full_in_the_middle(folder, disk, sync=sync)
    assert 1 < queue.stats().tail_id < 7
    assert (queue.reader().items, queue.reader().bytes) == (1, 5)
    assert items_of(queue) == [b"first"]
    queue.commit(1)
    for put in (
        lambda: queue.put(b"x"),
        lambda: queue.put_many([b"x", b"y"]),
        lambda: queue.put_future(b"x"),
        queue.take_in,
    ):
        with pytest.raises(QueueDiskFull):
            put()
    with pytest.raises(QueueDiskFull):
        queue._append(b"x", 0)  # a put that was on its way
    queue.sync()
    assert items_of(queue) == []
    queue._check()
    disk.disarm()
    assert queue.put(b"last") == 8
    assert [data[:1] for data in items_of(queue)] == [b"\0", b"\1", b"\2", b"\3", b"\4", b"\5", b"l"]
    assert pending(folder, NAME) == 0
    assert not publish_items(folder, b"again", app_id="app", version=1)
    queue._check()
    queue.close()


@pytest.mark.parametrize(("kind", "at"), [("create", 1), ("write", 1), ("create", 2), ("write", 3), ("grow", 1)])
def test_a_disk_that_is_full_for_a_batch_is_said_to_be_full(folder: Path, kind: str, at: int) -> None:
    """Whether there is no room for what is remembered of the batch, or for its items. Writes into segments, such as the
    second one here, a footer, need no room.
    """
    disk = FailingDisk(RealDisk())
    with JournaledQueue(folder, NAME, disk=disk, inbox_interval=None, segment_bytes=4096, sync="never") as queue:
        queue.put(b"first")
        publish_items(folder, *[b"x" * 1000] * 6)
        disk.arm(errno.ENOSPC, at=at, sticky=True, kinds={kind})
        with pytest.raises(QueueDiskFull):
            queue.take_in()
        if queue._status.is_unfinished:
            with pytest.raises(QueueDiskFull):
                queue.put(b"y")
        disk.disarm()
        queue.put(b"z")
        queue.take_in()
        assert sorted(data[:1] for data in items_of(queue)) == [b"f", *[b"x"] * 6, b"z"]


def test_half_a_batch_in_a_closed_queue(folder: Path) -> None:
    disk = FailingDisk(RealDisk())
    queue = full_in_the_middle(folder, disk)
    disk.disarm()
    queue.close()
    with pytest.raises(QueueClosed):
        queue.put(b"x")
    assert take_in(folder, NAME) == 6


def test_half_a_batch_survives_a_close(folder: Path) -> None:
    disk = FailingDisk(RealDisk())
    full_in_the_middle(folder, disk).close()
    disk.arm(errno.ENOSPC, sticky=True, kinds={"grow"})
    clock = ManualClock(START_MS)
    with JournaledQueue(folder, NAME, disk=disk, segment_bytes=4096, inbox_interval=None, clock=clock) as queue:
        assert [data[:1] for data in items_of(queue)] == [b"f"]
        disk.disarm()
        assert queue.take_in() == 6
        assert len(items_of(queue)) == 6
    full = [record.data for record in scan(folder, NAME)]
    assert len(full) == len(set(full)) == 7


def test_half_a_batch_whose_other_half_is_lost(folder: Path, open_queue: Open, caplog: Any) -> None:
    disk = FailingDisk(RealDisk())
    full_in_the_middle(folder, disk).close()
    name = inbox_files(folder, ".part")[0]
    (folder / "inbox" / name).unlink()
    with pytest.raises(CorruptJournal, match="of its 6 items are ingested, but"):
        open_queue()
    queue = open_queue(on_corruption="quarantine")
    assert "items of batch" in caplog.text
    assert 1 < len(items_of(queue)) < 7
    assert last_version(folder, NAME, "app") == 1
    queue.close()
    open_queue().close()


class Uncopied:
    """A queue that nobody copies."""

    def items(self) -> int:
        return 0

    def copied_items(self) -> None:
        return None

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        del state, from_items


@pytest.mark.parametrize(("first_id", "known"), [(3, None), (1, 4)])
def test_an_intent_whose_batch_is_gone(folder: Path, open_queue: Open, first_id: int, known: int | None) -> None:
    """It is none any more where nothing of it is there; where all of it is, it is done."""
    queue = open_queue(inbox_interval=None)
    queue.put_many([b"a", b"b"])
    queue.close()
    inbox = RealDisk().directory(str(folder / "inbox"), create=True)
    intent = Intent(bytes(16), queue._journal.queue_id, 1, first_id, first_id - 1, 2, 4, "app")
    IngestLedger(inbox, NAME, START_MS, Uncopied()).begin(intent)
    inbox.close()
    queue = open_queue(inbox_interval=None)
    assert last_version(folder, NAME, "app") == known
    assert items_of(queue) == [b"a", b"b"]


def test_an_intent_of_another_queue_is_none(folder: Path, open_queue: Open) -> None:
    publish_items(folder, b"a", app_id="app")
    open_queue(inbox_interval=None).close()
    publish_items(folder, b"b", app_id="app", version=1)
    (name,) = inbox_files(folder, ".batch")
    inbox = RealDisk().directory(str(folder / "inbox"))
    batch = read_batch(inbox, name)
    assert batch is not None
    IngestLedger(inbox, NAME, START_MS, Uncopied()).begin(
        Intent(batch.batch_id, b"other" + bytes(11), batch.number, 1, 0, 1, 1, "app")
    )
    inbox.close()
    assert items_of(open_queue(inbox_interval=None)) == [b"a", b"b"]


@pytest.mark.parametrize("at", range(1, 5))
def test_a_sync_that_fails_ends_the_queue(folder: Path, open_queue: Open, at: int) -> None:
    disk = FailingDisk(RealDisk())
    queue = open_queue(disk=disk, sync="never", inbox_interval=None)
    queue.put(b"first")
    publish_items(folder, b"a", app_id="app")
    disk.arm(errno.EIO, at=at, kinds={"sync"})
    try:
        queue.take_in()
    except DurabilityUnknown:
        with pytest.raises(DurabilityUnknown):
            queue.put(b"x")
        assert queue._inbox is not None
        queue._inbox.look()
    except OSError:  # of what is remembered: that may be done again
        assert queue.take_in() == 1
    queue.close()
    assert items_of(open_queue(inbox_interval=None)) == [b"first", b"a"]


@pytest.mark.parametrize("at", range(1, 4))
def test_a_sync_that_fails_where_a_put_goes_on(folder: Path, at: int) -> None:
    disk = FailingDisk(RealDisk())
    queue = full_in_the_middle(folder, disk)
    disk.arm(errno.EIO, at=at, kinds={"sync"})
    with pytest.raises(OSError, match=r"in doubt|put/output"):
        queue.put(b"x")
    with contextlib.suppress(DurabilityUnknown):
        queue.close()
    disk.disarm()
    assert take_in(folder, NAME) == 6
    assert len(list(scan(folder, NAME))) == 7


def test_a_sync_that_fails_at_opening(folder: Path) -> None:
    disk = FailingDisk(RealDisk())
    full_in_the_middle(folder, disk).close()
    told = set()
    for at in range(1, 12):
        disk.arm(errno.EIO, at=at, kinds={"sync"})
        try:
            JournaledQueue(folder, NAME, disk=disk, segment_bytes=4096, inbox_interval=None).close()
        except OSError as error:
            told.add(type(error))
    assert DurabilityUnknown in told
    disk.disarm()
    with JournaledQueue(folder, NAME, inbox_interval=None) as queue:
        assert queue.stats().tail_id >= 7
    assert len({record.data for record in scan(folder, NAME)}) == len(list(scan(folder, NAME))) == 7


# -- in bytes --------------------------------------------------------------------------------------------------------

BATCH = PublishedBatch(b"i" * 16, 17, "app", 3, (BatchPart(b"p" * 16, 2, 9, 5), BatchPart(b"q" * 16, 1, 0, 6)))


def test_a_published_batch_in_bytes() -> None:
    data = inbox_format.encode_batch_file(BATCH)
    assert inbox_format.decode_batch_file(data) == BATCH
    for at in range(len(data)):
        assert inbox_format.decode_batch_file(data[:at]) is None
        flipped = bytearray(data)
        flipped[at] ^= 1
        if at not in range(10, 16):  # reserved
            assert inbox_format.decode_batch_file(bytes(flipped)) is None
    assert inbox_format.decode_batch_file(data + b"\0") is None


@pytest.mark.parametrize(
    "batch",
    [
        BATCH._replace(version=1 << 62),
        BATCH._replace(parts=(BatchPart(b"p" * 16, 0, 0, 0),)),
    ],
)
def test_what_is_no_batch(batch: PublishedBatch) -> None:
    assert inbox_format.decode_batch_file(inbox_format.encode_batch_file(batch)) is None


def forge(body: bytes, magic: bytes = inbox_format.BATCH_MAGIC) -> bytes:
    return inbox_format._PREFIX.pack(magic, 1) + inbox_format._record(body)


def test_forged_bodies_are_no_batch() -> None:
    body = inbox_format.encode_batch_file(BATCH)[24:]
    assert inbox_format.decode_batch_file(forge(body)) == BATCH
    app_at = inbox_format._BATCH.size
    for bad in (
        body[:-1],
        body[: app_at - 1],
        body[:app_at] + b"\xff" + body[app_at + 1 :],
        body[:24] + b"\x09" + body[25:],
    ):
        assert inbox_format.decode_batch_file(forge(bad)) is None


def test_forged_records_are_not_remembered() -> None:
    good = inbox_format._VERSION.pack(1, 7) + b"app"
    intent = inbox_format._INTENT.pack(2, bytes(16), bytes(16), 1, 1, 0, 1, 0)
    for bad in (b"", b"\x09" + bytes(20), b"\1", inbox_format._VERSION.pack(1, 1 << 62), good + b"\xff", intent[:-1]):
        data = forge(good, inbox_format.LEDGER_MAGIC) + inbox_format._record(bad)
        state, end = inbox_format.decode_ledger(data)
        assert (state.versions, state.intent, end) == ({"app": 7}, None, len(data) - len(bad) - 8)
        assert not inbox_format.whole_record_behind(data, end)
        assert inbox_format.whole_record_behind(data + inbox_format._record(intent), end)


@pytest.mark.parametrize("expires_ms", [None, 5])
@pytest.mark.parametrize("most", [1, 60, 200, 10_000])
def test_bodies_are_cut_to_size(expires_ms: int | None, most: int) -> None:
    items = [bytes([at]) * (at * 7 % 50) for at in range(40)]
    whole = bodies.pack_body(items, expires_ms)
    lengths = bodies.body_lengths(whole.kind, whole.data)
    assert lengths == tuple(map(len, items))
    for skip in (0, 1, 39):
        found: list[bytes] = []
        for body in bodies.cut_body(whole.kind, whole.data, lengths, skip, most):
            assert len(body.data) <= most or body.items == 1
            sizes = bodies.body_lengths(body.kind, body.data)
            assert sizes is not None
            assert (len(sizes), sum(sizes)) == (body.items, body.size)
            at = len(body.data) - body.size
            for size in sizes:
                found.append(body.data[at : at + size])
                at += size
        assert found == items[skip:]
    alone = bodies.pack_body([bytes(100)], expires_ms)
    assert list(bodies.cut_body(alone.kind, alone.data, (100,), 0, most)) == [alone]


def test_the_clock_of_the_system_is_one_and_others_are_themselves(folder: Path, clock: ManualClock) -> None:
    with (
        JournaledQueue(folder, "a") as first,
        JournaledQueue(folder, "b", clock=SystemClock()) as second,
        JournaledQueue(folder, "c", clock=clock) as third,
    ):
        assert host_of(first).watcher is host_of(second).watcher is not host_of(third).watcher


def test_a_disk_in_memory_has_inboxes_too() -> None:
    disk = MemoryDisk()
    with PartWriter("/data", NAME, disk=disk) as writer:
        writer.add([b"a"])
        part = writer.seal()
    assert publish("/data", NAME, [part], disk=disk)
    with JournaledQueue("/data", NAME, disk=disk) as queue:
        assert items_of(queue) == [b"a"]


def test_who_is_told_that_an_item_is_on_disk_finds_it(open_queue: Open) -> None:
    """A rotation syncs what is put; ``take_in`` told of that before readers were shown it."""
    queue = open_queue(sync="always", segment_bytes=4096)
    first = queue.put_future(bytes(queue.max_item_bytes))
    queue.put_future(b"in the next segment")
    queue.take_in()
    assert first.done() == bool(queue.reader().items)


def test_an_opening_that_fails_behind_its_journal_keeps_no_file_open(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.put(b"1")
    publish(folder, NAME, [part_of(folder, [b"2"])])
    before = len(os.listdir("/proc/self/fd"))
    failures = []
    for at in range(1, 9):
        disk = FailingDisk(RealDisk())
        disk.arm(errno.EIO, kinds={"sync"}, at=at)
        try:
            open_queue(disk=disk).close()
        except OSError as error:
            failures.append(type(error))
        assert len(os.listdir("/proc/self/fd")) == before, at
    assert DurabilityUnknown in failures


def test_what_is_no_part_is_refused_by_name(folder: Path) -> None:
    from kestrelpy import inbox

    for what in ("x", b"x", 7):
        with pytest.raises(TypeError, match=r"a part is what PartWriter\.seal\(\) returns, not "):
            inbox.publish(folder, "jobs", [what])  # type: ignore[list-item]
    assert inbox.pending(folder, "jobs") == 0


def test_an_opening_that_ingests_saves_positions_later_on(folder: Path, clock: ManualClock) -> None:
    """The first segment of a life was begun in the opening: the round that this asks for must not be lost."""
    with JournaledQueue(folder, NAME, clock=clock) as queue:
        queue.put(b"before")
        queue.get().commit()
    put_many(folder, NAME, [b"published"])
    with JournaledQueue(folder, NAME, clock=clock) as queue:
        clock.advance(5)
        queue.get().commit()
        clock.advance(1.5)
        assert inspect(folder, NAME).readers[0].items == 0
