"""Queues with dead letters: ``kestrelpy top``, ``/metrics`` of the folder and of the open queue, and ``stats()`` agree.

Of all that a death takes, the files know that an item is done here and is there in the other queue. Who died is counted
by the owner alone (``kestrel_dead_total``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, ReaderConfig, dead_letters
from kestrelpy.cli._folder_top import FolderLooker
from kestrelpy.inspection import followed
from kestrelpy.testing import ManualClock
from tests.metrics.pages import about, figure, figures_on, page_of
from tests.support.patience import until

CONFIG = ReaderConfig(max_deliveries=2, dead_letter="dead", retry_delay=60)
FILES = ("kestrel_items", "kestrel_bytes", "kestrel_lag_bytes")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


def top_of(folder: Path) -> dict[str, Any]:
    """What ``kestrelpy top --json`` prints, by queue."""
    looker = FolderLooker(str(folder))
    looker.look()
    return {one["name"]: one for one in map(json.loads, looker.as_json())}


def check(folder: Path, *queues: JournaledQueue) -> None:
    """All figures that two of them have are the same."""
    for queue in queues:
        queue.checkpoint()
    files, top = figures_on(page_of(folder)), top_of(folder)
    for queue in queues:
        stats, opened, mine = queue.stats(), figures_on(page_of(queue)), {"queue": queue.name}
        one = top[queue.name]
        for name, value in (("kestrel_segments", stats.segments), ("kestrel_journal_bytes", stats.journal_bytes)):
            assert value == figure(opened, name, **mine) == figure(files, name, **mine), name
        assert (one["segments"], one["journal_bytes"]) == (stats.segments, stats.journal_bytes)
        assert one["put_items"] == figure(files, "kestrel_put_total", **mine) == stats.tail_id
        for reader in stats.readers.values():
            both = {**mine, "reader": reader.name}
            (shown,) = [each for each in one["readers"] if each["name"] == reader.name]
            assert (shown["items"], shown["bytes"]) == (reader.items, reader.bytes)
            by_files = {name: value for name, value in about(files, **both).items() if name in FILES}
            assert by_files == {name: value for name, value in about(opened, **both).items() if name in FILES}
            assert by_files["kestrel_items"] == reader.items
            assert figure(opened, "kestrel_dead_total", **both) == reader.dead
            assert ("kestrel_dead_total", frozenset(both.items())) not in files


def die(queue: JournaledQueue, clock: ManualClock, count: int) -> None:
    """Fail so many items until they are dead."""
    before = queue.stats().readers[""].dead
    for _ in range(2):
        for item in queue.get_many(count, timeout=0):
            item.abort(reason="no")
        clock.advance(60)
    until(lambda: queue.stats().readers[""].dead == before + count)


def live(folder: Path, clock: ManualClock) -> None:
    """Items are delayed, die, are counted in the other queue, and come back."""
    with JournaledQueue(folder, "mails", clock=clock, default_reader=CONFIG) as mails:
        mails.put_many([b"x" * size for size in range(20)])
        held = mails.get(timeout=0)
        mails.get(timeout=0).abort(delay=600)
        check(folder, mails)  # one is open, and one is delayed
        die(mails, clock, 5)
        check(folder, mails)
        assert mails.stats().readers[""].items == 15
        held.commit()
        with dead_letters(folder, "dead", clock=clock) as letters:
            next(letters).requeue()
        with JournaledQueue(folder, "dead", clock=clock) as dead:
            dead.reader()
            assert dead.stats().readers[""].items == 4
            check(folder, mails, dead)
        mails.take_in()
        check(folder, mails)
        assert mails.stats().readers[""].items == 15


def test_the_figures_are_the_same_while_items_die(tmp_path: Path, clock: ManualClock) -> None:
    live(tmp_path, clock)


def test_dead_items_that_cannot_be_moved_are_counted_here(tmp_path: Path, clock: ManualClock) -> None:
    with JournaledQueue(tmp_path, "dead", clock=clock, max_item_bytes=100) as dead:
        dead.put(b"x")
    with JournaledQueue(tmp_path, "mails", clock=clock, default_reader=CONFIG) as mails:
        mails.put_many([b"y" * 200] * 3)
        for _ in range(2):
            mails.get(timeout=0).abort(reason="no")
            clock.advance(60)
        until(lambda: mails.stats().readers[""].dead_letter_failures > 0)
        assert mails.stats().readers[""].items == 3
        check(tmp_path, mails)


def test_a_planted_fault_a_look_that_forgets_the_dead_is_seen(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the reader at the first look is kept: what dies after it is still counted."""
    usual = followed.load_checkpoint
    first: dict[str, Any] = {}
    monkeypatch.setattr(followed, "load_checkpoint", lambda folder, name: first.setdefault(name, usual(folder, name)))
    with pytest.raises(AssertionError):
        live(tmp_path, clock)
