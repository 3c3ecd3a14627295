"""``verify`` of a store reads the inbox: each batch and each part, byte by byte."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.inbox.format import BatchPart
from kestrelpy.ship import PartUploader, RemoteReport, Ship, in_objects, publish, verify
from kestrelpy.ship.in_check import InboxObjects
from kestrelpy.testing.stores import MemoryStore
from tests.support.budget import ALL


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """A store with three batches of two parts each that nobody has taken in yet."""
    made = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(made, interval=0, inbox_interval=None)) as queue:
        queue.put(b"one")
    for number in range(3):
        parts: list[BatchPart] = []
        for each in range(2):
            with PartUploader(made, "jobs") as uploader:
                uploader.add([b"item %d of part %d" % (number, each)])
                parts.extend(uploader.finish())
        publish(made, "jobs", parts)
    return made


def inbox_keys(store: MemoryStore, ending: str) -> list[str]:
    return sorted(key for key in store.contents() if key.startswith("jobs/in/") and key.endswith(ending))


def put_back(store: MemoryStore, key: str, data: bytes | None) -> None:
    store.delete([key])
    if data is not None:
        assert store.create(key, data)


def look(store: MemoryStore) -> RemoteReport:
    return verify(store, "jobs")


def test_a_whole_inbox(store: MemoryStore) -> None:
    report = look(store)
    assert report.ok
    assert (report.batches, report.parts) == (3, 6)


def test_each_byte_of_the_inbox(store: MemoryStore) -> None:
    for key in (inbox_keys(store, ".batch")[0], inbox_keys(store, ".part")[0]):
        data = store.contents()[key][0]
        for at in range(0, len(data), 1 if ALL else 13):
            if not 8 <= at < 16 or key.endswith(".part"):  # a batch of a newer version; and bytes that say nothing
                put_back(store, key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                assert not look(store).ok, f"byte {at} of {key}"
        put_back(store, key, data)
    assert look(store).ok


@pytest.mark.parametrize("ending", [".batch", ".part"])
def test_what_is_missing(store: MemoryStore, ending: str) -> None:
    key = inbox_keys(store, ending)[0]
    put_back(store, key, None)
    (problem,) = look(store).problems
    assert key in problem
    assert "it is not there" in problem


def test_what_no_batch_names_is_no_problem(store: MemoryStore) -> None:
    with PartUploader(store, "jobs") as uploader:
        uploader.add([b"nobody's yet"])
        (part,) = uploader.finish()
    key = f"jobs/{in_objects.part_key(part.part_id)}"
    put_back(store, key, b"anything")
    report = look(store)
    assert report.ok
    assert report.parts == 6


def test_a_check_that_does_not_read_parts_is_caught(store: MemoryStore) -> None:
    key = inbox_keys(store, ".part")[0]
    data = store.contents()[key][0]
    put_back(store, key, data[:-1] + b"?")
    with patch.object(InboxObjects, "_why_damaged", return_value=None):
        assert look(store).ok  # test_each_byte_of_the_inbox would fail
    assert not look(store).ok
