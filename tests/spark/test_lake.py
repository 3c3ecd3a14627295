"""``archive_to_parquet``: every row of an archive once, whatever is killed, damaged, run again or run at once.

Where Spark is not what is tested, its tasks are called here one after the other.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy._journal import format as fmt
from kestrelpy.spark import LAKE_SCHEMA, FilesNotSeen, LakeSummary, archive_to_parquet
from kestrelpy.spark.lake import conversion
from kestrelpy.spark.lake.parquet import Digest, to_day_files
from kestrelpy.spark.lake.store import FileStore
from tests.spark.archives import DAY_MS, Row, archived, make_archive
from tests.spark.sessions import spark  # noqa: F401
from tests.support.budget import ALL


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of a run are done here, without Spark."""
    monkeypatch.setattr(conversion, "_run", lambda _, job, names: [job.found(name) for name in names])


def convert(folder: Path, **options: Any) -> LakeSummary:
    return archive_to_parquet(None, folder / "archive", folder / "lake", **options)  # type: ignore[arg-type]


def rows_in(folder: Path) -> list[Row]:
    """The rows of the lake, and where each is: the partition says the queue and the day."""
    found = []
    for path in sorted((folder / "lake").glob("queue=*/day=*/*.parquet")):
        queue, day = path.parent.parent.name[6:], path.parent.name[4:]
        table = pq.read_table(str(path), partitioning=None)
        assert {str(value)[:10] for value in table["added"].to_pylist()} == {day}
        assert set(table["error_count"].to_pylist()) == {0}
        added, expires = (table[name].cast(pa.int64()).to_pylist() for name in ("added", "expires"))
        for item_id, then, until, data in zip(
            table["id"].to_pylist(), added, expires, table["data"].to_pylist(), strict=True
        ):
            found.append(Row(queue, item_id, then // 1000, None if until is None else until // 1000, data))
    return ordered(found)


def ordered(rows: list[Row]) -> list[Row]:
    """By queue and id; two queues of one name have the same ids."""
    return sorted(rows, key=lambda row: (row.queue, row.id, row.added_ms, row.data))


# -- what comes out --------------------------------------------------------------------------------------------------


def test_an_archive_becomes_partitions_of_queue_and_day(tmp_path: Path, spark: Any) -> None:  # noqa: F811
    rows = make_archive(tmp_path, "jobs") + make_archive(tmp_path, "007", items=100, seed=2)
    segments = archived(tmp_path)
    target = (tmp_path / "lake").as_uri()
    summary = archive_to_parquet(spark, (tmp_path / "archive").as_uri(), target)
    assert (summary.segments, summary.items, summary.known, summary.deleted) == (len(segments), len(rows), 0, 0)
    assert summary.data_bytes == sum(len(row.data) for row in rows)
    assert rows_in(tmp_path) == ordered(rows)
    table = spark.read.schema(LAKE_SCHEMA).parquet(target)
    told = table.selectExpr("queue", "id", "unix_millis(added)", "unix_millis(expires)", "data").collect()
    assert ordered([Row(row[0], row[1], row[2], row[3], bytes(row[4])) for row in told]) == ordered(rows)
    by_day = {(row.queue, str(row.day)): row["count"] for row in table.groupBy("queue", "day").count().collect()}
    assert len({day for _, day in by_day}) >= 3
    again = archive_to_parquet(spark, (tmp_path / "archive").as_uri(), target, delete=True)
    assert (again.segments, again.known, again.deleted) == (0, len(segments), len(segments))
    assert not archived(tmp_path)
    assert rows_in(tmp_path) == ordered(rows)
    assert archive_to_parquet(spark, tmp_path / "archive", target) == LakeSummary()


def test_only_what_is_new_is_converted(tmp_path: Path, here: None) -> None:
    rows = make_archive(tmp_path, items=100)
    first = convert(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "lake").rglob("*.parquet")}
    rows += make_archive(tmp_path, "more", items=100, seed=2)
    second = convert(tmp_path)
    assert (second.known, first.items + second.items) == (first.segments, len(rows))
    assert all(path.stat().st_mtime_ns == then for path, then in files.items())
    assert rows_in(tmp_path) == ordered(rows)


def test_what_is_converted_and_verified_may_be_deleted(tmp_path: Path, here: None) -> None:
    rows = make_archive(tmp_path)
    segments = len(archived(tmp_path))
    summary = convert(tmp_path, delete=True)
    assert (summary.segments, summary.deleted) == (segments, segments)
    assert not archived(tmp_path)
    assert rows_in(tmp_path) == ordered(rows)


@pytest.mark.parametrize("harm", ["truncate", "remove", "other rows", "note"])
def test_nothing_is_deleted_of_which_the_lake_has_lost_rows(tmp_path: Path, here: None, harm: str) -> None:
    rows = make_archive(tmp_path)
    convert(tmp_path)
    files = sorted((tmp_path / "lake").glob("queue=*/day=*/*.parquet"))
    victim = files[1]
    if harm == "truncate":
        victim.write_bytes(victim.read_bytes()[:-9])
    elif harm == "remove":
        victim.unlink()
    elif harm == "other rows":
        table = pq.read_table(str(victim), partitioning=None)
        pq.write_table(table.set_column(4, "data", pa.array([b"?"] * len(table))), str(victim))
    else:
        note = next((tmp_path / "lake" / "_kestrel" / "notes").iterdir())
        note.write_bytes(note.read_bytes()[:40])
    summary = convert(tmp_path, delete=True)
    assert summary.segments == 1  # once more, and now it reads back
    assert not archived(tmp_path)
    assert rows_in(tmp_path) == ordered(rows)


def test_what_does_not_read_back_is_not_deleted(tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make_archive(tmp_path)
    segments = archived(tmp_path)
    put = FileStore.put
    monkeypatch.setattr(
        FileStore, "put", lambda store, name, data: put(store, name, bytes(data)[: -1 if "day=" in name else None])
    )
    with pytest.raises(OSError, match="does not read back"):
        convert(tmp_path, delete=True)
    assert archived(tmp_path) == segments


def test_segments_of_the_same_name_are_told_apart(tmp_path: Path, here: None) -> None:
    """A queue is erased and made again; its segments may have the names of those that were deleted."""
    first = make_archive(tmp_path, items=60)
    convert(tmp_path, delete=True)
    for path in (tmp_path / "queues").iterdir():
        path.unlink()
    second = make_archive(tmp_path, items=60, seed=5)
    assert convert(tmp_path, delete=True).items == len(second)
    assert rows_in(tmp_path) == ordered(first + second)


@pytest.mark.parametrize("what", ["archive", "lake"])
def test_tasks_that_see_another_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What they do not find was not deleted; and where they have written it, nothing reads back for the driver."""
    make_archive(tmp_path, items=60)
    segments = archived(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    theirs = {what: FileStore(tmp_path / "elsewhere")}
    monkeypatch.setattr(
        conversion, "_run", lambda _, job, names: [job._replace(**theirs).found(name) for name in names]
    )
    with pytest.raises(FilesNotSeen, match="a task has"):
        convert(tmp_path, delete=True)
    assert archived(tmp_path) == segments


def test_what_goes_from_the_archive_meanwhile_must_be_in_the_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_archive(tmp_path, items=60)

    def convert_all(job: Any, names: list[str]) -> list[Any]:
        return [job.found(name) for name in names]

    def run(_: Any, job: Any, names: list[str]) -> Any:
        if by_another_run:
            convert_all(job, names)
        for path in archived(tmp_path):
            path.unlink()
        return convert_all(job, names)

    monkeypatch.setattr(conversion, "_run", run)
    by_another_run = False
    with pytest.raises(FilesNotSeen, match="the lake does not have it"):
        convert(tmp_path)
    for path in (tmp_path / "queues").iterdir():
        path.unlink()
    make_archive(tmp_path, items=60)
    by_another_run = True
    assert convert(tmp_path).segments == 0


def test_no_archive_is_an_error_and_an_empty_one_is_not(tmp_path: Path, here: None) -> None:
    with pytest.raises(FileNotFoundError):
        convert(tmp_path)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "notes.txt").write_text("not ours")
    (tmp_path / "archive" / "jobs.0000000000001.segment.tmp").write_bytes(b"being copied")
    assert convert(tmp_path) == LakeSummary()
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        convert(tmp_path, on_corruption="ignore")


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_segment_is_named_when_all_others_are_converted(tmp_path: Path, here: None) -> None:
    rows = make_archive(tmp_path)
    segments = archived(tmp_path)
    harm_at = fmt.HEADER_BYTES + 700
    data = bytearray(segments[1].read_bytes())
    data[harm_at] ^= 1
    segments[1].write_bytes(data)
    segments[2].write_bytes(segments[2].read_bytes()[:-1])
    with pytest.raises(CorruptJournal, match=segments[1].name) as caught:
        convert(tmp_path, delete=True)
    assert caught.value.offset <= harm_at
    assert caught.value.item_id is not None
    assert segments[2].name in caught.value.__notes__[0]
    assert archived(tmp_path) == segments[1:3]
    ids = {row.id for row in rows_in(tmp_path)}
    assert 0 < len(ids) < len(rows)
    summary = convert(tmp_path, on_corruption="skip")
    assert [error.path for error in summary.damaged] == [str(path) for path in segments[1:3]]  # type: ignore[attr-defined]
    assert {row.id for row in rows_in(tmp_path)} == ids


def test_every_byte_of_a_small_segment(tmp_path: Path, here: None) -> None:
    """A wrong byte anywhere is seen, or is one of those behind the frames that nobody reads."""
    make_archive(tmp_path, items=12, days=0.1)
    path = archived(tmp_path)[0]
    whole = path.read_bytes()
    (tmp_path / "lake").mkdir()
    job = conversion._Job(
        FileStore(tmp_path / "archive"), FileStore(tmp_path / "lake", beside=conversion.BESIDE), frozenset(), False
    )
    unseen = []
    for at in range(0, len(whole), 1 if ALL else 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        if job.found(path.name).outcome == "converted":
            unseen.append(at)
    assert not unseen


def test_a_newer_format_is_named(tmp_path: Path, here: None) -> None:
    make_archive(tmp_path, items=12, days=0.1)
    path = archived(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:8] + b"\x09\x00" + path.read_bytes()[10:])
    with pytest.raises(UnsupportedFormat) as caught:
        convert(tmp_path)
    assert (caught.value.version, caught.value.supported) == (9, fmt.FORMAT_VERSION)


# -- kills -----------------------------------------------------------------------------------------------------------


class Steps:
    """The steps of a run that touch files, each before it is done and after it; a write also half way."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        """The step that the process dies at; 0: none."""

    def step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stepped(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*each: Any, **more: Any) -> Any:
                self.step()
                result = inner(*each, **more)
                self.step()
                return result

            return call

        write = FileStore._write

        def write_in_halves(store: FileStore, path: str, data: Any) -> None:
            self.step()
            write(store, path, memoryview(data)[: len(memoryview(data)) // 2].tobytes())
            self.step()
            write(store, path, data)

        monkeypatch.setattr(FileStore, "_write", write_in_halves)
        for name in ("_replace", "sync", "delete"):
            monkeypatch.setattr(FileStore, name, stepped(getattr(FileStore, name)))


@pytest.mark.parametrize("delete", [False, True])
def test_kills_at_every_step(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch, delete: bool, tally: Any
) -> None:
    """A run is killed at its n-th step, for n in a seeded order, again and again on what the one before has left, until
    none is left to do; every row is there once, also in between."""
    rows = make_archive(tmp_path, items=400 if ALL else 120)
    steps = Steps()
    steps.watch(monkeypatch)
    draw, kills, whole = random.Random(7), 0, set(rows)
    while True:
        steps.count, steps.last = 0, draw.randrange(1, 25)
        child = os.fork()
        if child == 0:
            convert(tmp_path, delete=delete)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = rows_in(tmp_path)
        assert len(set(found)) == len(found)
        assert set(found) <= whole
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert rows_in(tmp_path) == ordered(rows)
    assert bool(archived(tmp_path)) is not delete
    assert kills >= 5
    tally.add("kills of a conversion to Parquet", kills)


def test_what_a_kill_has_left_beside_its_place_goes_after_a_day(tmp_path: Path, here: None) -> None:
    make_archive(tmp_path, items=20, days=0.1)
    beside = tmp_path / "lake" / "_kestrel" / "tmp"
    beside.mkdir(parents=True)
    for name, age in (("old", 100_000), ("new", 10)):
        (beside / name).write_bytes(b"PAR1")
        then = (beside / name).stat().st_mtime - age
        os.utime(beside / name, (then, then))
    convert(tmp_path)
    assert [path.name for path in beside.iterdir()] == ["new"]


# -- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["mock", "subtree", "uploads"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    if request.param == "mock":
        yield FileStore("lake", pafs._MockFileSystem())
    else:
        (tmp_path / "mount").mkdir()
        made = FileStore("a/lake", pafs.SubTreeFileSystem(str(tmp_path / "mount"), pafs.LocalFileSystem()))
        if request.param == "uploads":
            made._uploads = True
            made._fs.create_dir("a/lake/x")
        yield made


def test_a_store_puts_files_whole(store: FileStore) -> None:
    assert store.names("x") == []
    store.put("x/one", b"1" * 1000)
    store.put("x/one", b"2")
    store.put("x/two", pa.py_buffer(b"3"))
    store.sync(["x/one", "x/two"])
    assert (store.read("x/one"), store.read("x/two")) == (b"2", b"3")
    assert store.names("x") == ["x/one", "x/two"]
    assert store.names(recursive=True) == ["x/one", "x/two"]
    assert store.delete("x/one")
    assert not store.delete("x/one")
    with pytest.raises(OSError, match="x/one"):
        store.open("x/one")


def test_a_store_that_fails_leaves_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("x", b"old")
    with pytest.raises(TypeError):
        store.put("x", "no bytes")
    assert store.names(recursive=True) == ["x"]
    assert store.read("x") == b"old"


def test_an_archive_on_another_file_system(tmp_path: Path, here: None) -> None:
    rows = make_archive(tmp_path, items=60)
    remote = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    told = archive_to_parquet(None, "archive", "lake", delete=True, archive_filesystem=remote, target_filesystem=remote)  # type: ignore[arg-type]
    assert told.items == len(rows)
    assert rows_in(tmp_path) == ordered(rows)


def test_hadoops_name_of_s3_is_understood() -> None:
    store = FileStore("s3a://user:secret@bucket/lake?region=eu-west-1")
    assert store.path("x") == "bucket/lake/x"
    assert store._uploads
    assert store.name == "s3a://bucket/lake"  # what errors say


# -- rows ------------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_the_rows_and_not_of_the_batches() -> None:
    def batch(first: int, count: int, other: int = -1) -> pa.RecordBatch:
        ids = range(first, first + count)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(ids, pa.int64()),
                pa.array([n * 1000 for n in ids], pa.timestamp("us", tz="UTC")),
                pa.array([n * 5000 if n % 3 else None for n in ids], pa.timestamp("us", tz="UTC")),
                pa.array([b"x" * (n % 5 + (n == other)) for n in ids], pa.binary()),
            ],
            ["id", "added", "expires", "data"],
        )

    def digest(*batches: pa.RecordBatch) -> str:
        made = Digest()
        for each in batches:
            made.add(each)
        return made.hexdigest()

    whole = digest(batch(0, 20))
    assert digest(batch(0, 7), batch(7, 13)) == whole
    assert digest(batch(0, 20).slice(0, 11), batch(0, 20).slice(11)) == whole
    assert digest(batch(0, 19)) != whole
    assert digest(batch(0, 20, other=4)) != whole


def test_rows_are_cut_at_midnight() -> None:
    instants = [DAY_MS - 1, DAY_MS, 3 * DAY_MS - 1]
    table = pa.RecordBatch.from_arrays(
        [
            pa.array([1, 2, 3], pa.int64()),
            pa.array([each * 1000 for each in instants], pa.timestamp("us", tz="UTC")),
            pa.nulls(3, pa.timestamp("us", tz="UTC")),
            pa.array([0, 0, 0], pa.int32()),
            pa.array([b"a", b"b", b"c"]),
            pa.array(["s", "s", "s"]),
        ],
        ["id", "added", "expires", "error_count", "data", "segment"],
    )
    days = [
        (day.day, pq.read_table(pa.BufferReader(content))["id"].to_pylist()) for day, content in to_day_files([table])
    ]
    assert days == [("1970-01-01", [1]), ("1970-01-02", [2]), ("1970-01-03", [3])]
