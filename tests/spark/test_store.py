"""The batch read from a store: the same rows as from the owner's folder, and errors for what is not there.

Mostly without Spark: parts are pickled, and read as an executor does, with nothing but the part and the environment.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, LessThan
from pyspark.sql.pandas.types import from_arrow_schema

from kestrelpy import CorruptJournal, InvalidName, JournaledQueue
from kestrelpy._journal import format as fmt
from kestrelpy.arrow.columns import ARROW_SCHEMA
from kestrelpy.arrow.objects import SealedPiece, SlotPiece, StorePiece, read_objects
from kestrelpy.ship import BadStoreURL, NoSuchQueue, Ship, StoreDamaged, open_store
from kestrelpy.spark.read.batch import BatchReader, FilteringReader, batch_reader
from kestrelpy.spark.read.store_part import StorePart
from kestrelpy.spark.stores import store_of
from tests.ship.in_store import log_of
from tests.spark.conftest import SEGMENT_BYTES
from tests.spark.journals import Shipped, executed, flush, rows_of
from tests.spark.sessions import spark  # noqa: F401 - a fixture
from tests.spark.test_batch import collected, load
from tests.support import seaweed
from tests.support.journals import ROW, fill, scanned
from tests.support.patience import until

COLUMNS = from_arrow_schema(ARROW_SCHEMA)
_numbers = itertools.count(1)


@pytest.fixture
def jobs(ship: Shipped) -> JournaledQueue:
    """A shipped queue of several segments, one of which is not closed, in which some items were aborted."""
    queue = ship()
    some(queue)
    return queue


def some(queue: JournaledQueue) -> None:
    """Items of every kind. The last ones are not in a closed segment."""
    rnd = random.Random(3)
    for _ in range(10):
        fill(queue, rnd, 40)
        flush(queue)
    for item in queue.get_many(5):
        queue.abort(item)
    queue.checkpoint(durable=True)
    queue.put(b"the last one")
    flush(queue)


def read(place: Path | str, **options: str) -> list[ROW]:
    return executed(BatchReader({"path": str(place), "queue": "jobs", **options}, COLUMNS).partitions())


def pieces(place: Path, **options: str) -> list[StorePiece]:
    parts = BatchReader({"path": str(place), "queue": "jobs", **options}, COLUMNS).partitions()
    return [piece for part in parts if isinstance(part, StorePart) for piece in part.pieces]


def wait_for_errors(place: Path) -> None:
    """Until the reader's checkpoint with the error counts is in the log."""
    store = open_store(f"file://{place}")
    until(lambda: (state := log_of(store).checkpoints.get("")) is not None and state.error_counts)


# -- rows ------------------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_folder(folder: Path, place: Path, jobs: JournaledQueue) -> None:
    wait_for_errors(place)
    rows = scanned(folder)
    assert read(place) == rows
    assert read(f"file:{place}", minPartitionBytes="1") == rows
    assert sum(row[3] for row in rows) == 5
    kinds = [type(piece) for piece in pieces(place)]
    assert kinds == sorted(kinds, key=lambda kind: kind is SlotPiece), "segments, and then slots"
    assert kinds.count(SealedPiece) > 2
    assert kinds.count(SlotPiece) > 0


def test_spark_reads_a_store(spark: Any, folder: Path, place: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    wait_for_errors(place)
    rows = scanned(folder)
    frame = load(spark, place, queue="jobs", minPartitionBytes=1)
    assert collected(frame) == rows
    assert frame.rdd.getNumPartitions() > 3
    assert load(spark, place).rdd.getNumPartitions() == 1
    assert frame.where("id < 10").count() == 9
    some_columns = spark.read.format("kestrel").schema("data binary, id bigint").load(f"file:{place}")
    assert sorted((row.id, row.data) for row in some_columns.collect()) == [(row[0], row[4]) for row in rows]


def test_the_same_items_are_the_same_rows_once_their_segment_is_closed(
    folder: Path, place: Path, ship: Shipped
) -> None:
    queue = ship()
    seen: dict[int, ROW] = {}
    rnd, from_slots = random.Random(5), 0
    for _ in range(60):
        fill(queue, rnd, 10)
        flush(queue)
        assert {row[0]: row for row in read(place)}.items() >= seen.items()
        seen |= {row[0]: row for row in read(place)}
        from_slots += sum(isinstance(each, SlotPiece) for each in pieces(place))
    assert [seen[number] for number in sorted(seen)] == scanned(folder)
    assert from_slots > 60


def test_an_object_store_is_read_with_what_the_environment_has(
    folder: Path, ship: Shipped, s3: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{seaweed.BUCKET}/spark-{next(_numbers)}"
    queue = ship(url=url, options=s3.options())
    some(queue)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    options = {"path": url, "storeEndpoint": s3.endpoint, "storeRegion": "us-east-1", "storeAllowHttp": "true"}
    reader = BatchReader(options, COLUMNS)
    parts = reader.partitions()
    rows = executed(parts)
    assert [row[:3] + row[4:] for row in rows] == [row[:3] + row[4:] for row in scanned(folder)]
    assert BatchReader({**options, "queue": "jobs", "endId": "7"}, COLUMNS).partitions()
    sent = pickle.dumps((reader, parts))
    for secret in (s3.access_key, s3.secret):
        assert secret.encode() not in sent
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(OSError, match=r"403|PermissionDenied") as caught:
        executed(parts)
    assert s3.access_key not in str(caught.value)


def test_all_queues_of_a_store(spark: Any, place: Path, jobs: JournaledQueue, ship: Shipped) -> None:  # noqa: F811
    for number in range(3):
        queue = ship(f"q{number}")
        queue.put(b"%d" % number)
        flush(queue)
    counts = {row["queue"]: row["count"] for row in load(spark, place).groupBy("queue").count().collect()}
    assert counts == {"jobs": len(read(place)), "q0": 1, "q1": 1, "q2": 1}


def test_a_queue_without_items_has_no_rows(place: Path, ship: Shipped) -> None:
    queue = ship()
    assert read(place) == []
    queue.put(b"1")
    flush(queue)
    assert [row[4] for row in read(place)] == [b"1"]


def test_a_closed_segment_is_read_block_by_block(folder: Path, place: Path, ship: Shipped) -> None:
    """Also if a frame has several blocks, and if only some ids are wanted."""
    queue = ship()
    rnd = random.Random(2)
    fill(queue, rnd, 100, largest=6000)
    flush(queue)
    rows = scanned(folder)
    store = open_store(f"file://{place}")
    for start, stop in ((1, 1000), (20, 30), (len(rows) - 3, 1000)):
        wanted = pieces(place, startId=str(start), endId=str(stop))
        for block in (100, 1000, 1 << 20):
            found = rows_of(read_objects(store, tuple(wanted), block_bytes=block))
            assert found == [row for row in rows if start <= row[0] < stop]


# -- what is left out ------------------------------------------------------------------------------------------------


def test_ids_and_times_leave_objects_out(folder: Path, place: Path, jobs: JournaledQueue) -> None:
    wait_for_errors(place)
    rows, every = scanned(folder), pieces(place)
    last = every[-1]
    assert isinstance(last, SlotPiece)
    first_id = last.span.first_id
    assert [piece.number for piece in pieces(place, startId=str(first_id))] == [last.number]
    assert read(place, startId=str(first_id)) == [row for row in rows if row[0] >= first_id]
    assert [type(piece) for piece in pieces(place, endId="4")] == [SealedPiece]
    assert read(place, startId="2", endId="4") == rows[1:3]
    middle = rows[len(rows) // 2][1] // 1000
    assert read(place, startTime=str(middle)) == [row for row in rows if row[1] >= middle * 1000]
    assert read(place, endTime=str(middle)) == [row for row in rows if row[1] < middle * 1000]
    assert all(isinstance(piece, SlotPiece) for piece in pieces(place, startTime="2100-01-01"))
    assert pieces(place, startId="9", endId="3") == []
    assert pieces(place, endTime="1980-01-01") == [] or read(place, endTime="1980-01-01") == []


def test_filters_are_followed(folder: Path, place: Path, jobs: JournaledQueue) -> None:
    rows = scanned(folder)
    then = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=rows[50][1])
    cases: list[tuple[list[Filter], list[ROW]]] = [
        ([EqualTo(("id",), 100)], [row for row in rows if row[0] == 100]),
        ([LessThan(("added",), then)], [row for row in rows if row[1] < rows[50][1]]),
        ([EqualTo(("queue",), "other")], []),
    ]
    for filters, right in cases:
        reader = FilteringReader({"path": str(place)}, COLUMNS)
        assert list(reader.pushFilters(filters)) == []
        assert [row[0] for row in executed(reader.partitions())] == [row[0] for row in right]


# -- which kind of place it is ---------------------------------------------------------------------------------------


def test_a_url_says_that_it_is_a_store() -> None:
    for url in ("s3://bucket/a", "gs://bucket", "az://container/x", "abfss://c@account.dfs.core.windows.net/p"):
        found = store_of({"path": url})
        assert found is not None
        assert found.url == url
    found = store_of({"path": "S3://Bucket/a", "storeRegion": "r", "storeAllowHttp": "TRUE"})
    assert found is not None
    assert (found.url, found.region, found.allow_http) == ("s3://Bucket/a", "r", True)


def test_a_folder_may_be_both(tmp_path: Path, ship: Shipped) -> None:
    """A store's queue is named by its folder, those of a folder of queues by their files."""
    shipped = ship(url=f"file://{tmp_path}/both", where=tmp_path / "elsewhere")
    shipped.put(b"in the store")
    flush(shipped)
    with JournaledQueue(tmp_path / "both", "other") as queue:
        queue.put(b"in a file")
    assert [row[4] for row in read(tmp_path / "both")] == [b"in the store"]
    (part,) = BatchReader({"path": f"{tmp_path}/both", "queue": "other"}, COLUMNS).partitions()
    assert [value for batch in part.batches() for value in batch["data"].to_pylist()] == [b"in a file"]
    with pytest.raises(ValueError, match="is a store and a folder of queues: name one of its queues"):
        BatchReader({"path": f"{tmp_path}/both"}, COLUMNS)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"queue": "other"}, LookupError, "neither its files, as in a folder of queues, nor other/queue.json, as in a"),
        ({"queue": "a/b"}, InvalidName, "invalid name 'a/b'"),
        ({"archive": "/x"}, ValueError, "the option archive goes with a folder of queues"),
        ({"storeRegon": "x"}, ValueError, "reading kestrel from a store has no option 'storeRegon'; the options are "),
        ({"storeAllowHttp": "yes"}, ValueError, "option storeAllowHttp must be true or false, not 'yes'"),
        ({"storeRegion": "x"}, BadStoreURL, r"a folder has no options \(region\)"),
        ({"storeEndpoint": "http://me:pass@host"}, ValueError, "the option storeEndpoint is a URL without a user"),
        ({"path": "s3://me:pass@bucket/x"}, BadStoreURL, r"s3://\*\*\*@bucket/x: a URL with a user part is refused"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    place: Path, jobs: JournaledQueue, options: dict[str, str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        batch_reader({"path": str(place), **options}, COLUMNS).partitions()
    assert ":pass" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["accessKeyId", "storeKey", "aws_secret_access_KEY", "sessiontoken", "clientSecret", "Password", "signature"],
)
def test_a_secret_does_not_belong_into_options(place: Path, jobs: JournaledQueue, name: str) -> None:
    for path in (str(place), "s3://bucket/x", "/nowhere"):
        with pytest.raises(ValueError, match=r"looks like a secret.*environment") as caught:
            batch_reader({"path": path, name: "VALUE"}, COLUMNS)
        assert "VALUE" not in str(caught.value)


def test_a_folder_that_is_neither_is_an_error(spark: Any, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(LookupError, match=r"is neither a folder of queues .* nor a store \(no \*/queue\.json\)"):
        BatchReader({"path": str(tmp_path)}, COLUMNS)
    with pytest.raises(Exception, match="is neither a folder of queues"):
        load(spark, tmp_path).count()


def test_a_store_without_that_queue_is_an_error(s3: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    url = f"s3://{seaweed.BUCKET}/spark-{next(_numbers)}"
    options = {"path": url, "storeEndpoint": s3.endpoint, "storeRegion": "us-east-1", "storeAllowHttp": "true"}
    with pytest.raises(NoSuchQueue, match="queue 'jobs': it is not there"):
        BatchReader({**options, "queue": "jobs"}, COLUMNS).partitions()
    with pytest.raises(LookupError, match=f"there is no queue in the store {url}"):
        BatchReader(options, COLUMNS)


# -- damage ----------------------------------------------------------------------------------------------------------


def a_byte_of(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def segments_of(place: Path) -> list[Path]:
    return sorted((place / "jobs" / "seg").iterdir())


def last_slot(place: Path) -> Path:
    last = pieces(place)[-1]
    assert isinstance(last, SlotPiece)
    return place / "jobs" / "log" / f"{last.span.slot:016d}"


@pytest.mark.parametrize(
    ("happens", "sentence"),
    [
        (lambda place: segments_of(place)[1].unlink(), r"seg/\S+, offset 0: it is not there"),
        (lambda place: a_byte_of(segments_of(place)[1], 200), "its crc is not the one in its SEAL"),
        (lambda place: a_byte_of(segments_of(place)[1], -1), "its crc is not the one in its SEAL"),
        (lambda place: os.truncate(segments_of(place)[1], 5000), "it has fewer than"),
        (lambda place: os.truncate(segments_of(place)[1], 1 << 20), "it has more than"),
        (
            lambda place: segments_of(place)[0].write_bytes(segments_of(place)[1].read_bytes()),
            "it has (more|fewer) than|its crc is",
        ),
        (lambda place: last_slot(place).unlink(), "when this read was planned, and is gone"),
        (lambda place: a_byte_of(last_slot(place), 170), "it is not slot"),
        (lambda place: a_byte_of(last_slot(place), 20), "it is not slot"),
        (lambda place: os.truncate(last_slot(place), 100), "it is not slot"),
    ],
)
def test_what_is_not_as_planned_is_an_error(
    place: Path, jobs: JournaledQueue, happens: Callable[[Path], object], sentence: str
) -> None:
    parts = BatchReader({"path": str(place), "queue": "jobs"}, COLUMNS).partitions()
    happens(place)
    with pytest.raises(StoreDamaged, match=sentence) as caught:
        executed(parts)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.key, str(again)) == (StoreDamaged, caught.value.key, str(caught.value))


def test_a_slot_of_another_log_is_told(tmp_path: Path, place: Path, jobs: JournaledQueue, ship: Shipped) -> None:
    """Another queue of this name, in the place of the one for which the read was planned."""
    parts = BatchReader({"path": str(place), "queue": "jobs"}, COLUMNS).partitions()
    slot = last_slot(place)
    other = ship(url=f"file://{tmp_path}/another", where=tmp_path / "other")
    for number in range(int(slot.name)):
        other.put(b"%d" % number)
        flush(other)
    slot.write_bytes((tmp_path / "another" / "jobs" / "log" / slot.name).read_bytes())
    with pytest.raises(StoreDamaged, match="it is not the slot that was there when this read was planned"):
        executed(parts)


def test_spark_shows_the_damage(spark: Any, place: Path, jobs: JournaledQueue) -> None:  # noqa: F811
    segments_of(place)[1].unlink()
    with pytest.raises(Exception, match=r"StoreDamaged: jobs/seg/\S+, offset 0: it is not there"):
        load(spark, place, queue="jobs").count()


def test_what_was_damaged_before_it_was_shipped_is_as_in_a_folder(folder: Path, place: Path) -> None:
    with JournaledQueue(folder, "jobs", segment_bytes=SEGMENT_BYTES) as queue:
        fill(queue, random.Random(3), 400)
    path = min(folder.glob("*.segment"))
    a_byte_of(path, fmt.HEADER_BYTES + 5000)
    with JournaledQueue(folder, "jobs", segment_bytes=SEGMENT_BYTES, ship=Ship(f"file://{place}")) as queue:
        flush(queue)
    expected, here = rows_before_damage(folder)
    found, there = rows_before_damage(place)
    assert found == expected
    assert len(found) > 10
    assert here.item_id == there.item_id
    assert f"{place}/jobs/seg/" in str(there)


def rows_before_damage(folder: Path) -> tuple[list[ROW], CorruptJournal]:
    (part,) = BatchReader({"path": str(folder), "queue": "jobs"}, COLUMNS).partitions()
    batches, rows = part.batches(), []
    try:
        for batch in batches:
            rows += rows_of([batch])
    except CorruptJournal as error:
        return rows, error
    raise AssertionError("there was no damage")
