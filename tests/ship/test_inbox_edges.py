"""The owner's inbox where little happens: files that are in the way, and numbers that are not its turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue
from kestrelpy._journal.format import FORMAT_VERSION
from kestrelpy.inbox import format as inbox_format
from kestrelpy.inbox import ingest as ingesting
from kestrelpy.inbox.format import BatchPart, Intent, LedgerState, PublishedBatch, decode_ledger, encode_ledger
from kestrelpy.ship import Ship
from kestrelpy.testing.stores import MemoryStore
from tests.ship.test_store_inbox import look, put_there


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    store = MemoryStore()
    shipped = Ship(store, interval=0, inbox_interval=None)
    with JournaledQueue(tmp_path, "jobs", ship=shipped, inbox_interval=None) as queue:
        assert queue.shipping is not None
        queue.put(b"x")
        queue.shipping.flush()
        put_there(store, b"1")
        look(queue, 2)
        yield queue


def ingest_of(queue: JournaledQueue) -> ingesting.Ingest:
    assert queue._inbox is not None
    ingest = queue._inbox._ingest
    assert ingest is not None
    return ingest


def test_a_file_in_the_way_of_the_next_batch(
    queue: JournaledQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = ingest_of(queue)
    assert ingest.next_stored() == 2
    (tmp_path / "inbox" / "jobs.9000000000001.batch").mkdir()  # no file of anybody
    assert ingest.next_stored() == 2
    newer = tmp_path / "inbox" / "jobs.9000000000002.batch"
    newer.write_bytes(inbox_format.BATCH_MAGIC + (FORMAT_VERSION + 9).to_bytes(2, "little") + bytes(60))
    assert ingest.next_stored() == 0
    newer.unlink()

    def refused(folder: Any, name: str) -> None:
        raise PermissionError(13, name)

    monkeypatch.setattr(ingesting, "read_batch", refused)
    with pytest.raises(PermissionError):
        ingest.next_stored()
    monkeypatch.undo()
    (tmp_path / "inbox" / "jobs.9000000000001.batch").rmdir()


def test_a_batch_is_passed_over_in_its_turn_alone(queue: JournaledQueue) -> None:
    ingest = ingest_of(queue)
    assert not ingest.pass_over(7, None)
    assert ingest.next_stored() == 2
    known = PublishedBatch(bytes(16), 1, "app", 3, (BatchPart(bytes(16), 1, 1, 1),), stored=2)
    ingest._ledger.state.note_done(known.batch_id, 1, "app", 3)
    assert ingest._is_known(known)
    assert ingest.next_stored() == 3


@pytest.mark.parametrize("is_copied", [False, True])
def test_an_intent_is_given_up(queue: JournaledQueue, monkeypatch: pytest.MonkeyPatch, *, is_copied: bool) -> None:
    ledger = ingest_of(queue)._ledger
    monkeypatch.setattr(ledger._copied, "copied_items", lambda: 0)  # its thread may ship them at any time
    before = list(ledger._later)
    ledger.begin(Intent(bytes(16), queue._journal.queue_id, 1, 3, 2, 1, 2, "app"))
    assert len(ledger._later) == len(before) + 1
    if is_copied:
        ledger._base.intent = ledger.state.intent
        ledger._later.clear()
    ledger.give_up()
    assert ledger.state.intent is ledger._base.intent is None
    assert ledger._later == ([] if is_copied else before)


def test_a_record_of_no_batch_ends_a_ledger() -> None:
    whole = encode_ledger(LedgerState(), None, from_store=True)
    about = (inbox_format._IS_TAKEN, bytes(16), 0, 1, 0, 0, 0)
    state, end = decode_ledger(whole + inbox_format._record(inbox_format._TAKEN.pack(*about)))
    assert (state.taken, end) == (0, len(whole))
