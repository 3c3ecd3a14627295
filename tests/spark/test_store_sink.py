"""The sink to a store: rows become items of a shipped queue, whose owner may be anywhere.

Mostly without Spark: a sink and its messages are pickled, as on their way to a task and back.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.ship import BatchRefused, NoSuchQueue, NotTakenIn, StoreUnavailable, open_store
from kestrelpy.spark.write import targets
from kestrelpy.spark.write.sink import BatchSink, Sealed, SinkMistake, StreamSink
from tests.spark.conftest import SEGMENT_BYTES
from tests.spark.journals import Shipped
from tests.spark.sessions import spark  # noqa: F401 - a fixture
from tests.spark.test_sink import ROWS, batch_of
from tests.support import seaweed
from tests.support.patience import PATIENCE

_numbers = itertools.count(1)
WAIT = str(PATIENCE)


def sink_of(place: Path | str, kind: Any = BatchSink, **options: str) -> Any:
    made = kind({"path": str(place), "queue": "jobs", **options}, ROWS, False)
    return pickle.loads(pickle.dumps(made))


def sealed(sink: Any, *data: bytes) -> Sealed:
    message = pickle.loads(pickle.dumps(sink.write(iter([batch_of(*data)]))))
    assert isinstance(message, Sealed)
    return message


def got(queue: JournaledQueue, count: int) -> list[bytes]:
    return [queue.get(timeout=PATIENCE).data for _ in range(count)]


def in_store(place: Path) -> list[str]:
    return [each.key for each in open_store(f"file://{place}").list("jobs/in/")]


def test_rows_come_to_the_owner_once(place: Path, ship: Shipped) -> None:
    queue = ship(inbox_interval=0.02)
    sink = sink_of(place, txnAppId="nightly", txnVersion="1", txnWait=WAIT)
    sink.commit([sealed(sink, b"one", b"two"), None, sealed(sink, b"three")])
    again = sink_of(place, txnAppId="nightly", txnVersion="1", txnWait=WAIT)
    again.commit([sealed(again, b"one", b"two")])
    other = sink_of(f"file:{place}", txnWait=WAIT)
    other.commit([sealed(other, b"four")])
    assert got(queue, 4) == [b"one", b"two", b"three", b"four"]
    assert queue.stats().tail_id == 4
    assert queue.shipping is not None
    assert queue.shipping.status().taken_batch == 2


@pytest.mark.parametrize("options", [{}, {"txnWait": "1"}])
def test_a_queue_that_the_store_has_not_is_no_queue_of_a_folder(
    place: Path, ship: Shipped, options: dict[str, str]
) -> None:
    """By a slip of the pen, a folder of queues was made in the store, and the rows went there."""
    ship()
    before = sorted(each.name for each in place.iterdir())
    with pytest.raises(SinkMistake, match="is a store, and has no queue 'jbos'"):
        sink_of(place, **{"queue": "jbos"} | options)
    assert sorted(each.name for each in place.iterdir()) == before


def test_many_rows_are_several_parts(place: Path, ship: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.ship.part_upload.MOST_PART_BYTES", 1 << 20)
    queue = ship(inbox_interval=0.02)
    sink = sink_of(place, txnWait=WAIT)
    data = [b"%04d" % number * 1500 for number in range(500)]
    message = sealed(sink, *data)
    assert len(message.parts) > 2
    sink.commit([message])
    assert got(queue, 500) == data


def test_a_stream_publishes_each_micro_batch_once(place: Path, ship: Shipped) -> None:
    queue = ship(inbox_interval=0.02)
    for batch_id in (0, 1, 1, 0, 2):
        sink = sink_of(place, StreamSink, txnAppId="query", txnWait=WAIT)
        sink.commit([sealed(sink, b"%d" % batch_id)], batch_id)
    assert got(queue, 3) == [b"0", b"1", b"2"]
    assert queue.stats().tail_id == 3


def test_a_commit_does_not_wait_for_the_owner(place: Path, ship: Shipped) -> None:
    ship().close()
    sink = sink_of(place)
    sink.commit([sealed(sink, b"one")])
    late = sink_of(place, txnWait="0.3")
    with pytest.raises(NotTakenIn):
        late.commit([sealed(late, b"two")])
    assert got(ship(inbox_interval=0.02), 2) == [b"one", b"two"]


def test_what_the_owner_refuses_is_an_error_of_who_waits(place: Path, ship: Shipped) -> None:
    queue = ship(inbox_interval=0.02)
    sink = sink_of(place, txnWait=WAIT)
    with pytest.raises(BatchRefused):
        sink.commit([sealed(sink, bytes(2 * SEGMENT_BYTES))])
    sink.commit([sealed(sink, b"small")])
    assert got(queue, 1) == [b"small"]
    assert queue.shipping is not None
    assert queue.shipping.status().refused_batches == 1


def test_parts_of_a_failed_job(
    place: Path, ship: Shipped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are removed if a task has failed; if a commit has, it may have published all the same."""
    ship().close()
    sink = sink_of(place)
    sink.abort([sealed(sink, b"one"), None])
    assert in_store(place) == []
    sink.abort([sealed(sink, b"one")])
    assert len(in_store(place)) == 1

    def rows() -> Any:
        yield batch_of(b"one")
        raise OSError("the disk of the shuffle")

    with pytest.raises(OSError, match="shuffle"):
        sink.write(rows())
    assert len(in_store(place)) == 1

    def refuse(self: object, keys: object) -> None:
        raise StoreUnavailable("store", "key", "403")

    monkeypatch.setattr("kestrelpy.ship.folder_store.FolderStore.delete", refuse)
    with caplog.at_level(logging.WARNING):
        sink.abort([sealed(sink, b"two"), None])
    assert "the parts of a failed job stay in file://" in caplog.text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"accessKey": "k"}, "environment"),
        ({"txnWait": "-1"}, "not negative"),
        ({"txnWait": "soon"}, "not negative"),
        ({"archive": "/a"}, "unknown option"),
        ({"storeEndpoint": "http://user@host"}, "environment"),
    ],
)
def test_mistakes_are_found_on_the_driver(place: Path, ship: Shipped, options: dict[str, str], word: str) -> None:
    ship().close()
    with pytest.raises(SinkMistake, match=word):
        sink_of(place, **options)


def test_options_of_a_store_beside_a_folder(folder: Path) -> None:
    with pytest.raises(SinkMistake, match="goes with a store"):
        sink_of(folder, txnWait="1")


def test_a_queue_that_was_never_shipped(tmp_path: Path) -> None:
    sink = targets.StoreTarget(targets.StorePlace(f"file://{tmp_path}"), "jobs", 0.0)
    with pytest.raises(NoSuchQueue):
        sink.publish([], "app", 1)


def test_spark_writes_to_a_store(spark: Any, place: Path, ship: Shipped) -> None:  # noqa: F811
    queue = ship(inbox_interval=0.02)
    rows = spark.createDataFrame([(b"%d" % number,) for number in range(100)], "data binary").repartition(4)
    rows.write.format("kestrel").option("queue", "jobs").option("txnWait", WAIT).mode("append").save(str(place))
    assert sorted(got(queue, 100), key=int) == [b"%d" % number for number in range(100)]
    assert queue.stats().tail_id == 100


def test_an_object_store_is_written_with_what_the_environment_has(
    ship: Shipped, s3: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{seaweed.BUCKET}/sink-{next(_numbers)}"
    queue = ship(url=url, options=s3.options(), inbox_interval=0.05)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    options = {"storeEndpoint": s3.endpoint, "storeRegion": "us-east-1", "storeAllowHttp": "true", "txnWait": WAIT}
    sink = sink_of(url, **options)
    message = sealed(sink, b"one", b"two")
    sink.commit([message])
    assert got(queue, 2) == [b"one", b"two"]
    sent = pickle.dumps((sink, message))
    for secret in (s3.access_key, s3.secret):
        assert secret.encode() not in sent
