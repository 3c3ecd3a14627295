"""A queue as Arrow record batches: what ``scan`` shows, whatever the queue went through."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kestrelpy.arrow
from kestrelpy import CorruptJournal, InvalidName, JournaledQueue, RestoreIncomplete, WrongKind, inbox, scan
from kestrelpy.arrow import FilesNotSeen, read
from kestrelpy.arrow.columns import COLUMNS, MOST_BYTES, MOST_ROWS
from kestrelpy.ship import BadStoreURL, NoSuchQueue, Ship
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.arrow.rows import read_rows, rows_of, until_error
from tests.golden.test_golden import CASES, HERE
from tests.support.disks import CountingDisk
from tests.support.journals import ROW, fill, fill_over_time, scanned
from tests.support.paths import PYTHONPATH
from tests.support.patience import PATIENCE
from tests.support.queues import START_MS, drain

Open = Callable[..., JournaledQueue]


@pytest.fixture
def jobs(folder: Path, open_queue: Open, clock: ManualClock) -> JournaledQueue:
    """A queue of several segments in which time goes by, and which is still open."""
    queue = open_queue(segment_bytes=16 << 10)
    fill_over_time(queue, clock)
    return queue


def consume(queue: JournaledQueue, count: int) -> None:
    queue.commit_many(queue.get_many(count))
    queue.checkpoint(durable=True)


def instant(milliseconds: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds)


# -- what is read ----------------------------------------------------------------------------------------------------


def test_what_arrow_reads_is_what_scan_reads(folder: Path, jobs: JournaledQueue) -> None:
    for item in jobs.get_many(9):
        item.abort()
    jobs.checkpoint()
    rows = scanned(folder)
    assert sum(row[3] for row in rows) == 9, "error counts are shown"
    assert len({row[5] for row in rows}) > 3
    assert read_rows(folder) == rows
    assert read_rows(str(folder)) == rows
    jobs.close()
    assert read_rows(folder) == scanned(folder) == rows


def test_bounds_are_those_of_scan_and_of_spark(folder: Path, jobs: JournaledQueue) -> None:
    """Starts are inclusive, ends are not."""
    rows = scanned(folder)
    then_ms = rows[300][1] // 1000
    assert read_rows(folder, start_id=7, end_id=9) == rows[6:8]
    assert read_rows(folder, start_id=0, end_id=0) == []
    assert read_rows(folder, start_id=10**30) == []
    before = [row for row in rows if row[1] < then_ms * 1000]
    after = [row for row in rows if row[1] >= then_ms * 1000]
    assert before
    assert after
    here = timezone(timedelta(hours=5))
    for then in (then_ms, instant(then_ms), instant(then_ms).astimezone(here), instant(then_ms - 0.5)):
        assert read_rows(folder, end_time=then) == before, then
        assert read_rows(folder, start_time=then) == after, then
    assert read_rows(folder, start_time=instant(then_ms + 0.5)) == [row for row in rows if row[1] > then_ms * 1000]
    assert read_rows(folder, start_time=datetime.max.replace(tzinfo=UTC)) == []
    assert read_rows(folder, end_time=-5) == []


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"columns": ["id", "dat", "x"]},
            ValueError,
            "no column 'dat', 'x'; the columns are queue, id, added",
        ),
        ({"columns": []}, ValueError, "at least one"),
        ({"columns": ["id", "id"]}, ValueError, "each column once"),
        ({"columns": "data"}, TypeError, r"such as \['data'\]"),
        ({"start_id": -1}, ValueError, "'start_id' must not be negative, not -1"),
        ({"end_id": 2.0}, TypeError, "'end_id' must be an id, not 2.0"),
        ({"start_id": True}, TypeError, "'start_id' must be an id, not True"),
        ({"start_time": datetime(2026, 1, 1)}, ValueError, "'start_time' must have a time zone"),
        ({"end_time": "2026-01-01"}, TypeError, "'end_time' must be a datetime or milliseconds since 1970"),
        ({"end_time": False}, TypeError, "'end_time' must be a datetime"),
    ],
)
def test_what_is_wrong_is_said_at_once(folder: Path, options: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        read(folder, "jobs", **options)


def test_columns_are_those_that_are_named_in_their_order(folder: Path, jobs: JournaledQueue) -> None:
    whole = read(folder, "jobs").read_all()
    assert tuple(whole.schema.names) == COLUMNS
    for names in (["data"], ["data", "id"], ("segment", "expires", "queue"), list(reversed(COLUMNS))):
        reader = read(folder, "jobs", columns=names)
        assert reader.schema.names == list(names)
        assert reader.read_all() == whole.select(list(names))


def test_expired_items_are_there(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    queue.put(b"old", expires_in=1)
    queue.put(b"new")
    clock.advance(60)
    assert [(row[2], row[4]) for row in read_rows(folder)] == [((START_MS + 1000) * 1000, b"old"), (None, b"new")]


def test_what_is_published_and_not_ingested_is_not_there(folder: Path) -> None:
    JournaledQueue(folder, "jobs").close()
    with JournaledQueue(folder, "jobs", inbox_interval=None) as queue:
        queue.put(b"mine")
        with inbox.PartWriter(folder, "jobs") as writer:
            writer.add([b"theirs"])
            part = writer.seal()
        inbox.publish(folder, "jobs", [part])
        assert inbox.pending(folder, "jobs") == 1
        assert [row[4] for row in read_rows(folder)] == [b"mine"]
        queue.take_in()
        assert [row[4] for row in read_rows(folder)] == [b"mine", b"theirs"]


def test_large_items(folder: Path) -> None:
    """One that is larger than a batch should be, and the largest that a segment has room for."""
    sizes = [5, MOST_BYTES + 1, 30 << 20, 0, MOST_BYTES - 1, MOST_BYTES, 7]
    with JournaledQueue(folder, "jobs", sync="never", segment_bytes=64 << 20) as queue:
        sizes.append(queue.max_item_bytes)
        for at, size in enumerate(sizes):
            queue.put(bytes([at]) * size)
        found = [value for batch in read(folder, "jobs", columns=["data"]) for value in batch["data"].to_pylist()]
    assert [len(value) for value in found] == sizes
    assert [value[:1] for value in found] == [bytes([at])[: bool(size)] for at, size in enumerate(sizes)]


def test_an_empty_queue_has_columns_and_no_rows(folder: Path, open_queue: Open) -> None:
    open_queue()
    table = read(folder, "jobs", columns=["data", "id"]).read_all()
    assert (table.num_rows, table.schema.names) == (0, ["data", "id"])


def test_what_is_not_there_is_an_error_at_once(folder: Path, open_queue: Open) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such folder") as caught:
        read(folder, "jobs")
    assert caught.value.filename == str(folder)
    for name in ("a", "b", "c", "d", "e", "f"):
        open_queue(name)
    with pytest.raises(FileNotFoundError, match=r"there is no queue 'jobs'; it has a, b, c, d, e \.\.\."):
        read(folder, "jobs")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        read(folder, "a", archive=folder / "archive")
    with pytest.raises(InvalidName):
        read(folder, "../a")
    (folder / "a.restore").touch()
    with pytest.raises(RestoreIncomplete):
        read(folder, "a")


def test_a_work_queue_is_refused(folder: Path) -> None:
    """Its records are no items; Spark does the same."""
    with WorkQueue(folder, "jobs") as work:
        work.put(b"job")
        with pytest.raises(WrongKind, match="work queue"):
            read(folder, "jobs")


@pytest.mark.parametrize("case", CASES)
def test_what_earlier_releases_wrote(case: str) -> None:
    rows = scanned(HERE / case, "golden")
    assert rows
    assert read_rows(HERE / case, "golden") == rows


# -- how it is read --------------------------------------------------------------------------------------------------


def test_nothing_is_read_before_the_first_batch() -> None:
    disk = MemoryDisk()
    with JournaledQueue("/q", "jobs", segment_bytes=4096, disk=disk) as queue:
        fill(queue, random.Random(1), 300)
        counting = CountingDisk(disk)
        reader = read("/q", "jobs", disk=counting)
        assert counting.calls == {"names": 1, "close": 1}
        fill(queue, random.Random(2), 300)
        tail_id = queue.stats().tail_id
        assert len(rows_of([reader.read_next_batch()])) > 0
        rest = rows_of(reader)
        assert rest[-1][0] == tail_id, "what was put between the call and the first batch is there"
        assert set(counting.calls) <= {"names", "open", "close", "status"}, "no lock, and nothing is written"


def test_nothing_is_written(folder: Path, jobs: JournaledQueue) -> None:
    jobs.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert read_rows(folder) == scanned(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_memory_is_bounded_whatever_the_size_of_the_queue(folder: Path) -> None:
    with JournaledQueue(folder, "jobs", sync="never") as queue:
        for size in (10, 1000, 3_000_000):
            for _ in range(min(40_000, (40 << 20) // size)):
                queue.put_many([bytes(size)] * 1)
    total = 0
    tracemalloc.start()
    try:
        held = pa.total_allocated_bytes()
        for batch in read(folder, "jobs"):
            assert batch.num_rows <= MOST_ROWS
            assert batch.nbytes < MOST_BYTES + MOST_ROWS * 64
            assert pa.total_allocated_bytes() - held < 2 * MOST_BYTES
            total += batch.nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 80 << 20
    assert peak < 40 << 20


def test_files_are_closed_when_a_reader_is_dropped(folder: Path, jobs: JournaledQueue) -> None:
    before = os.listdir("/proc/self/fd")
    reader = read(folder, "jobs")
    reader.read_next_batch()
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del reader
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_batches_may_be_taken_on_other_threads(folder: Path, jobs: JournaledQueue) -> None:
    reader, rows = read(folder, "jobs"), list[ROW]()

    def take() -> None:
        rows.extend(rows_of([reader.read_next_batch()]))

    for _ in range(3):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(PATIENCE)
    rows += rows_of(reader)
    assert rows == scanned(folder)


# -- beside a writer -------------------------------------------------------------------------------------------------


def test_segments_that_are_retired_meanwhile_have_no_rows(folder: Path, jobs: JournaledQueue) -> None:
    rows = scanned(folder)
    reader = read(folder, "jobs")
    found = rows_of([reader.read_next_batch()])
    consume(jobs, 900)
    kept = scanned(folder)
    assert 0 < len(kept) < len(rows) - len(found)
    assert found + rows_of(reader) == rows[: len(found)] + kept


@pytest.mark.parametrize("times", range(1, 9))
def test_what_is_retired_while_the_proof_is_looked_for_is_no_damage(times: int) -> None:
    """The writer retires all that was listed, again and again, between a listing and what is done with it."""
    disk, left = MemoryDisk(), 0

    def go_on() -> None:
        nonlocal left
        if left:
            left -= 1
            queue.put_many([bytes(500)] * 30)
            consume(queue, 1000)

    with JournaledQueue("/q", "jobs", segment_bytes=4096, disk=disk) as queue:
        queue.put_many([bytes(100)] * 100)
        queue.put_many([bytes(100)] * 100)
        queue.put_many([bytes(100)] * 100)
        reader = read("/q", "jobs", disk=CountingDisk(disk, go_on))
        found = rows_of([reader.read_next_batch()])
        left = 1
        go_on()
        left = times
        assert found + rows_of(reader) == found
        assert left == 0


def test_segments_that_are_archived_meanwhile_are_read_there(folder: Path, open_queue: Open) -> None:
    archive = folder.parent / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    fill(queue, random.Random(3), 300)
    rows = scanned(folder)
    reader = read(folder, "jobs", archive=archive)
    found = rows_of([reader.read_next_batch()])
    consume(queue, 300)
    assert len(list(archive.iterdir())) > 1
    assert found + rows_of(reader) == rows
    assert read_rows(folder, archive=archive) == rows == scanned(folder, archive_dir=archive)
    assert read_rows(folder) == scanned(folder)
    assert len(read_rows(folder)) < len(rows)


def test_what_is_gone_and_was_not_retired_is_an_error(folder: Path, jobs: JournaledQueue) -> None:
    consume(jobs, 10)
    segments = sorted(folder.glob("*.segment"))
    reader = read(folder, "jobs")
    rows_of([reader.read_next_batch()])
    segments[1].unlink()
    _, error = until_error(reader)
    assert isinstance(error, CorruptJournal)
    assert "a reader needs item 11; this segment is gone" in str(error)
    jobs.close()
    with pytest.raises(CorruptJournal, match="it does not follow the segment before it"):
        read_rows(folder)


def test_another_queue_in_the_place_of_one_is_an_error(folder: Path, jobs: JournaledQueue, open_queue: Open) -> None:
    reader = read(folder, "jobs")
    rows_of([reader.read_next_batch()])
    jobs.erase()
    open_queue().put(b"another")
    with pytest.raises(FilesNotSeen, match="another queue of that name is there"):
        reader.read_all()


WRITER = """
    import sys
    from kestrelpy import JournaledQueue
    with JournaledQueue(sys.argv[1], "jobs", segment_bytes=8192, archive_dir=sys.argv[2]) as queue:
        for number in range(1, 3_000):
            queue.put(b"%d" % number + bytes(number % 300))
            if number % 7 == 0:
                queue.commit_many(queue.get_many(5))
            if number % 50 == 0:
                queue.checkpoint()
            print(number, flush=True)
        sys.stdin.read()
"""


def test_a_writer_in_another_process_works_meanwhile(folder: Path) -> None:
    """What is read is a run of ids without a hole, from the first to at least what was there before."""
    archive = folder.parent / "archive"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(archive)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as writer:
        assert writer.stdout is not None
        reads, done = 0, 0
        while done < 2_999:
            for _ in range(300):
                done = int(writer.stdout.readline() or 2_999)
                if done == 2_999:
                    break
            rows = read_rows(folder, archive=archive)
            reads += 1
            assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
            assert len(rows) >= done
            assert all(row[4] == b"%d" % row[0] + bytes(row[0] % 300) for row in rows)
        writer.communicate("", timeout=PATIENCE)
    assert writer.returncode == 0
    assert reads > 5
    assert len(list(archive.iterdir())) > 3


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damage_is_an_error_after_the_rows_before_it(folder: Path, jobs: JournaledQueue) -> None:
    jobs.close()
    rows = scanned(folder)
    path = sorted(folder.glob("*.segment"))[2]
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    records = []
    with pytest.raises(CorruptJournal) as of_scan:
        records += [record.id for record in scan(folder, "jobs")]
    found, error = until_error(read(folder, "jobs"))
    assert isinstance(error, CorruptJournal)
    assert (error.path, error.offset) == (of_scan.value.path, of_scan.value.offset)
    assert error.path == str(path)
    assert found == rows[: len(found)]
    assert found[-1][5] == path.name
    after = next(row[0] for row in rows if row[5] > path.name)
    assert read_rows(folder, start_id=after) == rows[after - 1 :], "what is damaged elsewhere does not matter"


def test_what_was_put_into_quarantine_is_not_there(folder: Path, jobs: JournaledQueue, open_queue: Open) -> None:
    jobs.close()
    rows = scanned(folder)
    path = sorted(folder.glob("*.segment"))[2]
    data = bytearray(path.read_bytes())
    data[:100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(CorruptJournal):
        read_rows(folder)
    with open_queue(segment_bytes=16 << 10, on_corruption="quarantine") as queue:
        drain(queue)
    kept = scanned(folder)
    assert 0 < len(kept) < len(rows)
    assert read_rows(folder) == kept


# -- a store ---------------------------------------------------------------------------------------------------------


def test_a_shipped_queue_is_read_from_its_store(folder: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    with JournaledQueue(folder, "jobs", segment_bytes=8192, ship=Ship(url, interval=0)) as queue:
        fill(queue, random.Random(5), 300)
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        rows = scanned(folder)
    assert read_rows(url) == rows
    assert read_rows(url, start_id=10, end_id=200) == rows[9:199]
    assert read(url, "jobs", columns=["data", "id"]).read_all().schema.names == ["data", "id"]
    with pytest.raises(ValueError, match="'archive' goes with a folder"):
        read(url, "jobs", archive=tmp_path)
    with pytest.raises(BadStoreURL):
        read("nowhere://bucket", "jobs")
    reader = read(url, "other")
    with pytest.raises(NoSuchQueue):
        reader.read_all()


def test_a_shipped_work_queue_is_refused(folder: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    with WorkQueue(folder, "jobs", ship=Ship(url, interval=0)) as work:
        work.put(b"job")
        assert work.shipping is not None
        work.shipping.flush(PATIENCE)
    reader = read(url, "jobs")
    with pytest.raises(WrongKind, match="work queue"):
        reader.read_all()


# -- what is imported ------------------------------------------------------------------------------------------------


def _run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_spark_and_what_is_optional_are_not_imported(folder: Path, jobs: JournaledQueue) -> None:
    program = """
        import sys
        import kestrelpy.arrow
        assert not {"pyarrow", "numpy", "pyspark"} & set(sys.modules)
        print(kestrelpy.arrow.read(sys.argv[1], "jobs").read_all().num_rows)
        assert not {"pyspark", "obstore", "kestrelpy.spark", "kestrelpy.ship.opening"} & set(sys.modules)
    """
    assert int(_run(program, str(folder))) == len(scanned(folder))


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_without_the_extra_one_line_says_so(missing: str) -> None:
    program = """
        import sys
        import kestrelpy.arrow
        sys.modules[sys.argv[1]] = None
        try:
            kestrelpy.arrow.read("nowhere", "jobs")
        except ImportError as error:
            print(error)
    """
    assert _run(program, missing) == "this needs the extra [arrow]: pip install 'kestrelpy[arrow]'\n"


def test_another_import_that_fails_is_not_hidden(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "kestrelpy.arrow.reading", None)
    with pytest.raises(ImportError, match=r"kestrelpy\.arrow\.reading"):
        kestrelpy.arrow.read(folder, "jobs")
