"""The streaming read from a store: offsets, commits, restarts, takeovers, what is lost; and whole queries."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from kestrelpy import InvalidName, JournaledQueue, KestrelError, UnsupportedFormat
from kestrelpy._disk.real import RealDisk
from kestrelpy.arrow.columns import ARROW_SCHEMA
from kestrelpy.arrow.objects import SealedPiece
from kestrelpy.ship import NoSuchQueue, Ship, StoreDamaged, StoreUnavailable, garbage, log, open_store, reading, restore
from kestrelpy.ship.log import Steps, carry_out
from kestrelpy.ship.outside_reader import OutsideReader, decode_outside, encode_outside
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.store import Store
from kestrelpy.spark.read import store_reader
from kestrelpy.spark.read.store_part import StorePart
from kestrelpy.spark.read.store_reader import StoreReader
from kestrelpy.spark.read.stream import DataLoss, Offset, StreamReader
from kestrelpy.spark.stores import StorePlace
from kestrelpy.testing.stores import MemoryStore
from tests.ship.shipped import Shipper
from tests.spark.journals import Shipped, executed, flush
from tests.spark.sessions import SPARK_PATIENCE, spark  # noqa: F401 - a fixture
from tests.spark.test_stream import limited
from tests.support.journals import ROW, fill, scanned

COLUMNS = from_arrow_schema(ARROW_SCHEMA)
Query = Callable[..., StreamReader]
ALL = ReadAllAvailable()
GAP = 1 << 30


@pytest.fixture
def query(place: Path) -> Query:
    """``query(**options)``: the source of a query on ``jobs`` in the store, by the reader ``spark``."""

    def make(**options: str) -> StreamReader:
        return StreamReader({"path": str(place), "queue": "jobs", "reader": "spark", **options}, COLUMNS)

    return make


def put(queue: JournaledQueue, count: int, size: int = 100) -> None:
    for _ in range(count):
        queue.put(bytes(size))
    flush(queue)


def commits(place: Path, name: str = "spark") -> list[OutsideReader]:
    """What the reader has said in the store, in order."""
    folder = place / "jobs" / "reader" / name
    found = [decode_outside(path.read_bytes()) for path in sorted(folder.iterdir())] if folder.exists() else []
    return [each for each in found if each is not None]


def ids_of(rows: list[ROW]) -> list[int]:
    return [row[0] for row in rows]


def follow(source: StreamReader, offset: Offset, limit: ReadLimit = ALL) -> tuple[list[ROW], Offset]:
    """All rows after ``offset``, batch by batch, each of which is committed; and the last offset."""
    rows: list[ROW] = []
    while (latest := source.latestOffset(offset, limit)) != offset:
        rows += executed(list(source.partitions(offset, latest)))
        source.commit(latest)
        offset = latest
    return rows, offset


# -- offsets and batches ---------------------------------------------------------------------------------------------


def test_batches_are_the_items_in_order(folder: Path, place: Path, ship: Shipped, query: Query) -> None:
    rnd = random.Random(1)
    queue = ship()
    source = query()
    flush(queue)
    offset, rows = source.initialOffset(), []
    assert offset["id"] == 0
    kinds = set()
    for _ in range(6):
        fill(queue, rnd, 60)
        flush(queue)
        latest = source.latestOffset(offset, ALL)
        assert latest == {"id": queue.stats().tail_id, "queue": offset["queue"]}
        assert source.reportLatestOffset() == latest
        parts = list(source.partitions(offset, latest))
        kinds |= {type(piece) for part in parts if isinstance(part, StorePart) for piece in part.pieces}
        rows += executed(parts)
        source.commit(latest)
        source.commit(latest)
        offset = latest
    assert rows == scanned(folder)
    assert len(kinds) == 2
    assert source.latestOffset(offset, ALL) is offset
    assert source.partitions(offset, offset) == []
    made = commits(place)
    assert made[0].id == 0, "before the first batch is read, the store keeps it"
    assert made[-1].id == offset["id"]
    assert len(made) == 7
    assert {(each.nonce, each.queue_id.hex()) for each in made} == {(made[0].nonce, offset["queue"])}


def test_a_batch_is_the_same_when_it_runs_again(place: Path, ship: Shipped, query: Query) -> None:
    """Its items came from slots, and are in closed segments then."""
    queue = ship()
    put(queue, 10)
    source = query()
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    rows = executed(list(source.partitions(start, end)))
    put(queue, 200)
    parts = list(query().partitions(start, end))
    assert isinstance(parts[0], StorePart)
    assert isinstance(parts[0].pieces[0], SealedPiece)
    assert executed(parts) == rows
    assert ids_of(rows) == [*range(1, 11)]


def test_a_query_goes_on_where_it_was(place: Path, ship: Shipped, query: Query) -> None:
    queue = ship()
    put(queue, 100)
    source = query()
    start = source.initialOffset()
    middle = source.latestOffset(start, ReadMaxRows(40))
    source.commit(middle)
    end = source.latestOffset(middle, ALL)
    source.commit(end)
    source.stop()
    source.stop()
    assert query().initialOffset() == end, "a query without a checkpoint of Spark's begins at its reader's position"
    again = query()  # one whose checkpoint is older needs what is after that
    assert again.latestOffset(middle, ALL) == end
    assert commits(place)[-1].id == 40
    again.commit(end)
    assert [each.id for each in commits(place)] == [0, 40, 100, 40, 100]
    assert len({each.nonce for each in commits(place)}) == 2


def test_a_new_query_begins_where_it_is_told_to(place: Path, ship: Shipped, query: Query) -> None:
    queue = ship()
    put(queue, 10)
    assert query(reader="a").initialOffset()["id"] == 0
    assert query(reader="b", startingPosition="latest").initialOffset()["id"] == 10
    assert query(reader="c", startingPosition="4").initialOffset()["id"] == 3
    assert query(reader="d", startingPosition="99").initialOffset()["id"] == 10
    assert not (place / "jobs" / "reader").exists()


def test_a_query_need_not_hold_anything_back(place: Path, ship: Shipped, query: Query) -> None:
    queue = ship()
    put(queue, 10)
    one, two = query(holdsRetention="false"), query(holdsRetention="false")
    for source in (one, two):
        assert len(follow(source, source.initialOffset(), ReadMaxRows(4))[0]) == 10
    assert not (place / "jobs" / "reader").exists()


def test_items_and_bytes_of_a_batch_are_limited(ship: Shipped, query: Query) -> None:
    """Items exactly, and bytes by whole slots and segments."""
    queue = ship()
    for _ in range(5):
        put(queue, 10)
    assert query(maxItemsPerTrigger="20").getDefaultReadLimit() == ReadMaxRows(20)
    assert limited(query(), ALL) == [50]
    assert limited(query(), ReadMaxRows(20)) == [20, 40, 50]
    ends = limited(query(), ReadMaxBytes(1))
    assert 5 <= len(ends) <= 50
    assert ends[-1] == 50
    assert len(limited(query(), ReadMaxBytes(3000))) in (2, 3)
    assert limited(query(), ReadMaxBytes(1 << 20)) == [50]
    put(queue, 300)
    ends = limited(query(startingPosition="5"), ReadMaxBytes(1))
    assert ends[0] > 50, "the segment is closed, and is one object"
    assert ends[-1] == 350
    assert limited(query(maxBytesPerTrigger="1"), ReadMaxRows(3))[:3] == [3, 6, 9]


def test_a_run_may_end_with_what_is_there_now(ship: Shipped, query: Query) -> None:
    queue = ship()
    put(queue, 10)
    source = query()
    source.prepareForTriggerAvailableNow()
    put(queue, 10)
    assert source.latestOffset(source.initialOffset(), ALL)["id"] == 10


def test_a_source_that_plans_has_nothing_open(ship: Shipped, query: Query) -> None:
    """Spark pickles it, with what the tasks run."""
    put(ship(), 10)
    source = query()
    start = source.initialOffset()
    parts = source.partitions(start, source.latestOffset(start, ALL))
    fresh = pickle.loads(pickle.dumps(query()))
    assert fresh.reportLatestOffset() is None
    assert sum(batch.num_rows for part in parts for batch in fresh.read(part)) == 10


# -- readers ---------------------------------------------------------------------------------------------------------


def test_a_reader_belongs_to_one_query(ship: Shipped, query: Query) -> None:
    queue = ship()
    put(queue, 10)
    one, two = query(), query()
    start = one.initialOffset()
    assert two.initialOffset() == start
    end = one.latestOffset(start, ReadMaxRows(5))
    sentence = r"reader 'spark' of queue 'jobs' in file:///\S* has been moved by another query"
    with pytest.raises(KestrelError, match=sentence):
        two.latestOffset(start, ALL)
    one.commit(end)
    other = query()
    assert other.initialOffset() == end
    other.commit(other.latestOffset(end, ALL))
    with pytest.raises(KestrelError, match="a reader belongs to one query; set the option reader to another name"):
        one.commit(one.latestOffset(end, ALL))
    assert query(reader="another").initialOffset() == start


class Doubtful:
    """A ``Store`` that loses answers: ``before`` and ``after`` so many creates."""

    def __init__(self, store: Store, *, before: int = 0, after: int = 0, listed: bool = True) -> None:
        self.store = store
        self.before, self.after = before, after
        self.listed = listed

    def create(self, key: str, data: bytes) -> bool:
        if self.before:
            self.before -= 1
            raise StoreUnavailable("store", key, "no answer")
        created = self.store.create(key, data)
        if self.after:
            self.after -= 1
            raise StoreUnavailable("store", key, "no answer")
        return created

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self.store.read(key, start, length)

    def list(self, prefix: str) -> Any:
        return self.store.list(prefix) if self.listed else []

    def delete(self, keys: Any) -> None:
        self.store.delete(keys)

    def describe(self) -> str:
        return "store"


def reader_of(store: Store, queue_id: bytes = bytes(16)) -> StoreReader:
    return StoreReader(ShippedQueue(store, "jobs"), "spark", queue_id)


def test_a_commit_whose_answer_is_lost_counts_once() -> None:
    store = MemoryStore()
    reader = reader_of(Doubtful(store, after=1))
    reader.commit(3)
    reader_of(Doubtful(store, before=1)).commit(5)
    assert [each.key for each in store.list("jobs/")] == [f"jobs/reader/spark/{n:013d}" for n in (1, 2)]
    with pytest.raises(KestrelError, match="moved by another query"):
        reader.commit(4)
    away = reader_of(Doubtful(store, before=9))
    with pytest.raises(StoreUnavailable):
        away.commit(7)
    assert away.id == 5


def test_a_listing_that_lags_hides_no_commit() -> None:
    store = MemoryStore()
    reader = reader_of(store)
    for last_id in (3, 5, 9):
        reader.commit(last_id)
    again = reader_of(Doubtful(store, listed=False))
    assert again.id == 9
    again.commit(10)
    assert reader_of(store).id == 10


def test_the_newest_commit_may_be_the_only_one() -> None:
    """Garbage collection deletes those before."""
    store = MemoryStore()
    reader = reader_of(store)
    for last_id in (3, 5):
        reader.commit(last_id)
    store.delete(["jobs/reader/spark/0000000000001"])
    assert reader_of(store).id == 5
    assert reader_of(store, b"x" * 16).id is None, "of another queue, it says nothing"


def test_a_commit_that_cannot_be_read_is_an_error() -> None:
    key = "jobs/reader/spark/0000000000001"
    data = encode_outside(OutsideReader(bytes(16), bytes(16), 3))
    newer = bytearray(data[:-4])
    newer[8] = 2
    for there, error in (
        (data[:-1], StoreDamaged),
        (b"", StoreDamaged),
        (bytes(newer) + crc32(newer).to_bytes(4, "little"), UnsupportedFormat),
    ):
        store = MemoryStore()
        store.create(key, there)
        with pytest.raises(error):
            reader_of(store)


class Unreliable(Doubtful):
    """A ``Store`` of which any request may fail: before or after it is carried out."""

    def __init__(self, store: Store, rnd: random.Random) -> None:
        super().__init__(store)
        self.random = rnd
        self.failures = 0

    def _fail(self, key: str) -> None:
        if self.random.random() < 0.2:
            self.failures += 1
            raise StoreUnavailable("store", key, "no answer in time")

    def create(self, key: str, data: bytes) -> bool:
        self._fail(key)
        created = super().create(key, data)
        self._fail(key)
        return created

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        self._fail(key)
        return super().read(key, start, length)

    def list(self, prefix: str) -> Any:
        self._fail(prefix)
        return super().list(prefix)


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_fail_lose_and_double_nothing(
    folder: Path, place: Path, ship: Shipped, query: Query, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A query is started again from its last offset, as Spark does it: with the batch that it had planned."""
    rnd = random.Random(seed)
    unreliable = Unreliable(open_store(f"file://{place}"), rnd)
    for module in (reading, store_reader):
        monkeypatch.setattr(module, "PAUSES", (0.0,))
    monkeypatch.setattr(StorePlace, "open", lambda _: unreliable)
    queue = ship()
    rows: list[ROW] = []
    source, start, planned = query(), None, None
    restarts = 0
    for round_ in range(200):
        if round_ % 5 == 0 and round_ < 150:
            fill(queue, rnd, 20)
            flush(queue)
        try:
            start = start or source.initialOffset()
            planned = planned or source.latestOffset(start, ReadMaxRows(30))
            if planned != start:
                found = [row for part in source.partitions(start, planned) for row in executed([part])]
                rows, start = rows + found, planned
                source.commit(planned)
            planned = None
        except StoreUnavailable:
            source, restarts = query(), restarts + 1
    assert rows == scanned(folder)
    assert restarts > 5
    assert unreliable.failures > 100
    assert commits(place)[-1].id <= len(rows)


# -- takeovers, and what is lost -------------------------------------------------------------------------------------


def test_a_takeover_is_no_loss(tmp_path: Path, place: Path, ship: Shipped, query: Query) -> None:
    """Neither while the query runs nor between two runs of it."""
    first = ship()
    put(first, 150)
    source = query()
    rows, offset = follow(source, source.initialOffset(), ReadMaxRows(70))
    put(first, 20)
    restore(f"file://{place}", "jobs", tmp_path / "second")
    second = ship(where=tmp_path / "second")
    put(second, 30)
    more, offset = follow(source, offset, ReadMaxRows(15))
    rows += more
    source.stop()
    restore(f"file://{place}", "jobs", tmp_path / "third")
    third = ship(where=tmp_path / "third")
    put(third, 200)
    more, offset = follow(query(), offset, ReadMaxRows(70))
    rows += more
    far = 170 + GAP
    farther = far + 29 + GAP
    assert ids_of(rows) == [*range(1, 171), *range(far, far + 30), *range(farther, farther + 200)]
    assert commits(place)[-1].id == offset["id"] == farther + 199


def test_a_queue_that_was_restored_and_shipped_elsewhere_goes_on(
    tmp_path: Path,
    place: Path,
    ship: Shipped,
    query: Query,
) -> None:
    with ship() as queue:
        put(queue, 50)
        source = query()
        rows, offset = follow(source, source.initialOffset())
        put(queue, 20)
    url = f"file://{tmp_path}/another store"
    restore(f"file://{place}", "jobs", tmp_path / "elsewhere")
    os.unlink(tmp_path / "elsewhere" / "jobs.ship")
    with JournaledQueue(tmp_path / "elsewhere", "jobs", ship=Ship(url, interval=0)) as moved:
        put(moved, 10)
        more, offset = follow(query(path=url), offset)
    ids = ids_of(rows + more)
    assert ids[:70] == [*range(1, 71)]
    assert len(ids) == 80


def test_what_is_kept_no_more_is_lost(folder: Path, place: Path, query: Query) -> None:
    with JournaledQueue(folder, "jobs", segment_bytes=4096, sync="always") as queue:
        for _ in range(100):
            queue.put(bytes(100))
        shipper = Shipper(open_store(f"file://{place}"), RealDisk(), folder=str(folder))
        shipper.fence()
        shipper.ship()
        source = query()
        start = source.initialOffset()
        assert start["id"] == 0
        segments = list(shipper.state.segments)
        assert len(segments) > 2
        first_id = segments[2].segment_footer().first_id
        queue.commit_many(queue.get_many(first_id))
        queue.checkpoint(durable=True)
        shipper.ship()
        shipper.forget_below(segments[2].number)
    sentence = (
        f"items 1 to {first_id - 1} of queue 'jobs' are lost to this query: the store has the items from {first_id}"
    )
    for each in (source, query()):
        with pytest.raises(DataLoss, match=sentence):
            each.latestOffset(start, ALL)
    lenient = query(failOnDataLoss="false")
    assert lenient.latestOffset(start, ReadMaxRows(10)) == {**start, "id": first_id + 9}
    parts = lenient.partitions(start, {**start, "id": first_id + 9})
    assert ids_of(executed(list(parts))) == [*range(first_id, first_id + 10)]
    assert query().latestOffset({**start, "id": first_id - 1}, ALL)["id"] == 100, "what is before was read"
    new = query(reader="new")
    assert new.initialOffset()["id"] == first_id - 1
    assert new.latestOffset(new.initialOffset(), ALL)["id"] == 100


@pytest.mark.parametrize("count", [5, 400])
def test_what_was_gone_before_shipping_began_is_lost(folder: Path, ship: Shipped, query: Query, count: int) -> None:
    """To a query that has not read it; whether the log's first segment is closed or not."""
    with JournaledQueue(folder, "jobs", segment_bytes=8 << 10) as queue:
        for _ in range(200):
            queue.put(bytes(100))
        queue.commit_many(queue.get_many(200))
        queue.checkpoint(durable=True)
    queue = ship()
    put(queue, count)
    source = query()
    start = source.initialOffset()
    first_id = start["id"] + 1
    assert 100 < first_id <= 201
    assert query(startingPosition="7", reader="new").initialOffset() == start
    assert source.latestOffset(start, ALL)["id"] == 200 + count
    sentence = rf"items 8 to {first_id - 1} of queue 'jobs' are lost to this query: the store has the items from"
    with pytest.raises(DataLoss, match=sentence):
        query().latestOffset({**start, "id": 7}, ALL)


def test_another_queue_and_an_earlier_end_are_told(
    tmp_path: Path,
    place: Path,
    ship: Shipped,
    query: Query,
) -> None:
    queue = ship()
    put(queue, 10)
    source = query()
    offset = source.latestOffset(source.initialOffset(), ALL)
    with pytest.raises(DataLoss, match=r"items 11 to 30 .* the journal ends with item 10"):
        query().latestOffset({**offset, "id": 30}, ALL)
    other = ship(where=tmp_path / "other", url=f"file://{tmp_path}/other store")
    put(other, 20)
    with pytest.raises(DataLoss, match=r"items 1 to 10 .* another queue of that name is in their place"):
        query(path=f"{tmp_path}/other store").latestOffset(offset, ALL)
    lenient = query(path=f"{tmp_path}/other store", failOnDataLoss="false")
    assert len(follow(lenient, offset)[0]) == 20
    assert commits(tmp_path / "other store")[-1].id == 20


def test_another_log_in_the_place_of_the_one_that_a_query_follows(
    tmp_path: Path,
    place: Path,
    ship: Shipped,
    query: Query,
) -> None:
    """Shorter than the one before, so that the slot that would be next is not there."""
    queue = ship()
    for _ in range(10):
        put(queue, 3)
    strict, lenient = query(), query(failOnDataLoss="false", reader="lenient")
    offset = strict.latestOffset(strict.initialOffset(), ALL)
    assert follow(lenient, lenient.initialOffset())[1] == offset
    assert strict.latestOffset(offset, ALL) == offset
    other = ship(where=tmp_path / "other", url=f"file://{tmp_path}/other store")
    put(other, 5)
    place.rename(tmp_path / "away")
    with pytest.raises(NoSuchQueue):
        strict.latestOffset(offset, ALL)
    (tmp_path / "other store").rename(place)
    with pytest.raises(DataLoss, match=r"items 1 to 30 .* another queue of that name is in their place"):
        strict.latestOffset(offset, ALL)
    rows, end = follow(lenient, offset)
    assert ids_of(rows) == [1, 2, 3, 4, 5]
    made = commits(place, "lenient")
    assert [each.id for each in made] == [5]
    assert {each.queue_id.hex() for each in made} == {end["queue"]}
    place.rename(tmp_path / "other store")
    (tmp_path / "away").rename(place)


def test_a_query_keeps_what_it_has_not_read(folder: Path, place: Path, query: Query) -> None:
    """From the owner's garbage collection, when all readers of the queue have passed it."""
    store = open_store(f"file://{place}")
    with JournaledQueue(folder, "jobs", segment_bytes=4096, sync="always") as queue:
        shipper = Shipper(store, RealDisk(), folder=str(folder))
        for _ in range(200):
            queue.put(bytes(100))
        shipper.fence()
        shipper.ship()
        source, careless = query(), query(holdsRetention="false")
        start = source.initialOffset()
        middle = source.latestOffset(start, ReadMaxRows(120))
        source.commit(middle)
        queue.commit_many(queue.get_many(200))
        queue.put(b"the last one")
        queue.checkpoint(durable=True)
        shipper.ship()
    assert careless.latestOffset(start, ALL)["id"] == 201
    for _ in range(4):
        collect_garbage(shipper)
    first_id = shipper.state.segments[0].segment_footer().first_id
    assert 50 < first_id <= 121
    with pytest.raises(DataLoss, match=f"the store has the items from {first_id} on"):
        careless.latestOffset(start, ALL)
    rows, _ = follow(source, middle)
    assert ids_of(rows) == [*range(121, 202)]
    for _ in range(4):
        collect_garbage(shipper)
    assert shipper.state.segments[0].segment_footer().first_id > 121
    assert [each.id for each in commits(place)] == [201]


def collect_garbage(shipper: Shipper) -> None:
    """As an owner does for whom everything is old."""

    def append(made: garbage.Plan) -> Steps[None]:
        slot = garbage.slot_of(made, shipper.state, shipper.opening._replace(written_ms=shipper.written_ms))
        return log.append("jobs/", shipper.state, slot)

    shipper.manifest()
    steps = garbage.collect("jobs/", shipper.state, append, history_ms=-1, keep_ms=-1)
    carry_out(steps, shipper.store, bool)


def test_a_mistake_is_told_in_a_sentence(ship: Shipped, place: Path, query: Query) -> None:
    put(ship(), 1)
    for options, error, sentence in (
        ({"reader": ""}, ValueError, "streaming from kestrel needs the option reader"),
        ({"reader": "a/b"}, InvalidName, "invalid name 'a/b'"),
        ({"holdsRetention": "no"}, ValueError, "option holdsRetention must be true or false"),
        ({"holds": "no"}, ValueError, "streaming from a store has no option 'holds'; the options are failOnDataLoss"),
        ({"archive": "/x"}, ValueError, "the option archive goes with a folder"),
        ({"secretKey": "x"}, ValueError, "looks like a secret"),
        ({"startingPosition": "soon"}, ValueError, "option startingPosition must be"),
    ):
        with pytest.raises(error, match=sentence):
            query(**options)
    (place / "jobs" / "log" / "0000000000000001").unlink()
    with pytest.raises((NoSuchQueue, StoreDamaged)):
        query().initialOffset()


# -- whole queries ---------------------------------------------------------------------------------------------------


def test_a_query_of_spark_goes_on_after_a_takeover(
    spark: Any,  # noqa: F811
    tmp_path: Path,
    place: Path,
    ship: Shipped,
) -> None:
    def run() -> None:
        rows = spark.readStream.format("kestrel").options(queue="jobs", reader="spark", maxItemsPerTrigger=70)
        sink = rows.load(str(place)).select("id", "data", "segment").writeStream.format("parquet")
        started = sink.option("checkpointLocation", f"{tmp_path}/state").trigger(availableNow=True)
        query = started.start(f"{tmp_path}/rows")
        assert query.awaitTermination(SPARK_PATIENCE)

    first = ship()
    put(first, 150)
    run()
    restore(f"file://{place}", "jobs", tmp_path / "second")
    second = ship(where=tmp_path / "second")
    put(second, 100)
    run()
    put(second, 5)
    run()
    found = [row.id for row in spark.read.parquet(f"{tmp_path}/rows").select("id").orderBy("id").collect()]
    assert found == [*range(1, 151), *range(150 + GAP, 150 + GAP + 105)]
    made = commits(place)
    assert made[-1].id > 150
    assert len({each.nonce for each in made}) == 3, "each run is one"
