"""``kestrelpy export``: files that are whole or not there, streams that may end early, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kestrelpy import JournaledQueue
from kestrelpy.cli import exporting
from kestrelpy.ship import Ship
from kestrelpy.work import WorkQueue
from tests.arrow.rows import read_rows, rows_of
from tests.cli.programs import Run, Spawn, refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

FORMATS = ("parquet", "arrow", "jsonl")


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder with a queue of 500 items in several segments, and its archive beside it."""
    folder = tmp_path / "queues"
    with JournaledQueue(folder, "jobs", segment_bytes=4096, archive_dir=tmp_path / "archive") as queue:
        for number in range(500):
            queue.put(b"%d" % number if number % 2 else b"\xff" * (number % 60), expires_in=5 if number % 3 else None)
        queue.commit_many(queue.get_many(200))
        queue.checkpoint(durable=True)
    return folder


def parts(folder: Path) -> list[str]:
    """Files that were not finished."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def table_of(kind: str, data: bytes) -> pa.Table:
    if kind == "parquet":
        return pq.read_table(io.BytesIO(data))
    return pa.ipc.open_stream(data).read_all()


# -- what is written -------------------------------------------------------------------------------------------------


def test_files_have_what_is_read(run: Run, jobs: Path, tmp_path: Path) -> None:
    rows = read_rows(jobs)
    done = run("export", jobs, "jobs", "--format", "parquet", "--output", tmp_path / "x.parquet")
    assert (done.status, done.out.endswith(b"x.parquet\n"), done.err) == (0, True, "")
    assert rows_of(pq.read_table(tmp_path / "x.parquet").to_batches()) == rows
    assert run("export", jobs, "jobs", "--format", "arrow", "--output", tmp_path / "x.arrow").status == 0
    with pa.memory_map(str(tmp_path / "x.arrow")) as file:
        assert rows_of(pa.ipc.open_file(file).read_all().to_batches()) == rows
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "x.arrow").stat().st_mode & 0o777 == 0o666 & ~mask, "as any file"
    assert parts(tmp_path) == []


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_standard_output_has_what_is_read(run: Run, jobs: Path, tmp_path: Path, kind: str) -> None:
    rows = read_rows(jobs, archive=tmp_path / "archive")
    done = run("export", jobs, "jobs", "--format", kind, "--archive-dir", tmp_path / "archive")
    assert rows_of(table_of(kind, done.out).to_batches()) == rows
    assert len(rows) == 500
    done = run("export", jobs, "jobs", "--format", kind, "--start-id", 460, "--stop-id", 470)
    assert [row[0] for row in rows_of(table_of(kind, done.out).to_batches())] == list(range(460, 470))
    done = run("export", jobs, "jobs", "--format", kind, "--stop-time", "2001-01-01")
    assert (done.status, table_of(kind, done.out).num_rows) == (0, 0)
    done = run("export", jobs, "jobs", "--format", kind, "--start-time", "2001-01-01T00:00:00Z")
    assert rows_of(table_of(kind, done.out).to_batches()) == read_rows(jobs)


def test_lines_are_those_of_scan(run: Run, jobs: Path, tmp_path: Path) -> None:
    for options in ((), ("--start-id", 450), ("--archive-dir", tmp_path / "archive", "--stop-id", 9)):
        done = run("export", jobs, "jobs", "--format", "jsonl", *options)
        assert done.status == 0
        assert done.out == run("scan", jobs, "jobs", "--json", *options).out
        assert done.out
    assert run("export", jobs, "jobs", "--format", "jsonl", "--output", tmp_path / "x").status == 0
    assert (tmp_path / "x").read_bytes() == run("scan", jobs, "jobs", "--json").out


def test_text_is_text_and_the_rest_says_that_it_is_none(run: Run, tmp_path: Path) -> None:
    items = [b"plain", 'grün\n"'.encode(), b"\xff", b"", b"\0"]
    with JournaledQueue(tmp_path / "q", "jobs") as queue:
        queue.put_many(items)
    lines = run("export", tmp_path / "q", "jobs", "--format", "jsonl", "--text").out.splitlines()
    facts = [json.loads(line) for line in lines]
    assert [each.get("text") for each in facts] == ["plain", 'grün\n"', None, "", "\0"]
    found = [each["text"].encode() if "text" in each else base64.b64decode(each["data"]) for each in facts]
    assert found == items
    assert [("text" in each) + ("data" in each) for each in facts] == [1] * 5


def test_row_groups_and_compression(run: Run, jobs: Path, tmp_path: Path) -> None:
    with patch.object(exporting, "GROUP_ROWS", 200):
        run("export", jobs, "jobs", "--format", "parquet", "--output", tmp_path / "rows")
    with patch.object(exporting, "GROUP_BYTES", 1):
        run("export", jobs, "jobs", "--format", "parquet", "--output", tmp_path / "bytes")
    run("export", jobs, "jobs", "--format", "parquet", "--output", tmp_path / "whole")
    rows, sizes, whole = (pq.ParquetFile(tmp_path / name).metadata for name in ("rows", "bytes", "whole"))
    assert max(rows.row_group(at).num_rows for at in range(rows.num_row_groups)) <= 200
    assert sizes.num_row_groups > rows.num_row_groups > whole.num_row_groups == 1
    ids = [whole.row_group(0).column(at) for at in range(7) if whole.row_group(0).column(at).path_in_schema == "id"]
    assert (ids[0].compression, ids[0].statistics.max) == ("ZSTD", 500)


def test_a_store_is_exported(run: Run, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    with JournaledQueue(tmp_path / "q", "jobs", ship=Ship(url, interval=0)) as queue:
        queue.put_many([b"one", b"two"])
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
    done = run("export", url, "jobs", "--format", "arrow")
    assert table_of("arrow", done.out)["data"].to_pylist() == [b"one", b"two"]
    refused(run("export", url, "jobs", "--format", "jsonl"), 2, "not from stores")
    refused(run("export", url, "other", "--format", "arrow"), 1, "other")


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a" * 255, "\u00e9" * 127], ids=["ASCII", "two bytes each"])
def test_a_name_as_long_as_names_may_be(run: Run, jobs: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "made" / name
    target.parent.mkdir()
    done = run("export", jobs, "jobs", "--format", "jsonl", "--output", target)
    assert (done.status, done.err) == (0, "")
    assert os.listdir(target.parent) == [name]


def test_a_file_that_is_there_is_left_alone(run: Run, jobs: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("mine")
    command = ("export", jobs, "jobs", "--format", "arrow", "--output", path)
    refused(run(*command), 2, "is there already; --force replaces it")
    assert path.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert run(*command[:-1], link, "--force").status == 0
    assert link.is_symlink(), "what it leads to is replaced"
    assert path.read_bytes()[:6] == b"ARROW1"
    for odd in (tmp_path, "/dev/null"):
        refused(run(*command[:-1], odd, "--force"), 2, "no file that could be replaced")
    refused(run(*command[:-1], tmp_path / "nowhere" / "x"), 1, "No such file")
    assert parts(tmp_path) == []


def test_a_file_that_comes_meanwhile_is_left_alone(run: Run, jobs: Path, tmp_path: Path) -> None:
    path, original = tmp_path / "x", exporting._name_new

    def late(temporary: str, shown: str, target: str) -> None:
        path.write_text("theirs")
        original(temporary, shown, target)

    with patch.object(exporting, "_name_new", late):
        refused(run("export", jobs, "jobs", "--format", "jsonl", "--output", path), 2, "is there by now")
    assert path.read_text() == "theirs"
    assert parts(tmp_path) == []


def test_without_links_a_file_is_renamed(run: Run, jobs: Path, tmp_path: Path) -> None:
    with patch.object(os, "link", side_effect=PermissionError(1, "no links here")):
        assert run("export", jobs, "jobs", "--format", "jsonl", "--output", tmp_path / "x").status == 0
    assert (tmp_path / "x").read_bytes() == run("scan", jobs, "jobs", "--json").out
    assert parts(tmp_path) == []


def test_what_makes_no_sense(run: Run, jobs: Path, tmp_path: Path) -> None:
    refused(run("export", jobs, "jobs"), 2, "--format")
    refused(run("export", jobs, "jobs", "--format", "csv"), 2, "csv")
    refused(run("export", jobs, "jobs", "--format", "arrow", "--text"), 2, "--text goes with --format jsonl")
    refused(run("export", jobs, "jobs", "--format", "arrow", "--force"), 2, "--force goes with --output")
    refused(run("export", jobs, "other", "--format", "arrow"), 1, "no queue 'other'")
    refused(run("export", tmp_path / "nowhere", "jobs", "--format", "jsonl"), 1, "no such folder")
    with WorkQueue(tmp_path / "w", "work") as work:
        work.put(b"job")
    for kind in FORMATS:
        refused(run("export", tmp_path / "w", "work", "--format", kind), 1, "work queue")


def test_without_the_extra_one_line_says_so(run: Run, jobs: Path, tmp_path: Path) -> None:
    missing = dict.fromkeys(("pyarrow", "kestrelpy.arrow.reading", "pyarrow.parquet"))
    with patch.dict(sys.modules, missing):
        del sys.modules["kestrelpy.arrow.reading"]  # so that it is imported again, and needs what is not there
        command = ("export", jobs, "jobs", "--format", "parquet", "--output", tmp_path / "x")
        refused(run(*command), 2, "pip install 'kestrelpy[arrow]'")
    assert not (tmp_path / "x").exists()
    assert run("export", jobs, "jobs", "--format", "jsonl").status == 0


def test_a_terminal_gets_no_bytes(jobs: Path) -> None:
    master, slave = pty.openpty()
    try:
        command = [sys.executable, "-m", "kestrelpy", "export", str(jobs), "jobs", "--format", "arrow"]
        done = subprocess.run(command, cwd=ROOT, stdout=slave, stderr=subprocess.PIPE, timeout=PATIENCE, check=False)
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 2
    assert b"no text for a terminal" in done.stderr


# -- what ends early -------------------------------------------------------------------------------------------------


def damage(jobs: Path) -> str:
    path = sorted(jobs.glob("*.segment"))[1]
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    return path.name


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_leaves_no_file(run: Run, jobs: Path, tmp_path: Path, kind: str) -> None:
    name = damage(jobs)
    refused(run("export", jobs, "jobs", "--format", kind, "--output", tmp_path / "x"), 1, name, "offset")
    assert not (tmp_path / "x").exists()
    assert parts(tmp_path) == []
    (tmp_path / "x").write_text("mine")
    refused(run("export", jobs, "jobs", "--format", kind, "--output", tmp_path / "x", "--force"), 1, name)
    assert (tmp_path / "x").read_text() == "mine"


def test_lines_before_damage_are_printed(run: Run, jobs: Path) -> None:
    damage(jobs)
    done = run("export", jobs, "jobs", "--format", "jsonl")
    refused(done, 1, "is not intact here")
    assert done.out == run("scan", jobs, "jobs", "--json").out
    assert done.out


@pytest.mark.parametrize("kind", FORMATS)
def test_head_has_enough_of_it(spawn: Spawn, tmp_path: Path, kind: str) -> None:
    with JournaledQueue(tmp_path / "q", "jobs", sync="never") as queue:
        for _ in range(300):
            queue.put(os.urandom(10_000))
    export = spawn("export", tmp_path / "q", "jobs", "--format", kind)
    assert export.stdout is not None
    assert export.stderr is not None
    assert export.stdout.read(4) in (b"PAR1", b"\xff\xff\xff\xff", b'{"id')
    export.stdout.close()
    assert (export.wait(PATIENCE), export.stderr.read()) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_disk_without_room_is_one_line(spawn: Spawn, jobs: Path, kind: str) -> None:
    with open("/dev/full", "wb") as full:
        export = spawn("export", jobs, "jobs", "--format", kind, stdout=full)
        assert export.stderr is not None
        lines = export.stderr.read().splitlines()
    assert export.wait(PATIENCE) == 1
    assert len(lines) == 1, lines
    assert b"No space left" in lines[0]


def test_a_signal_leaves_no_file(spawn: Spawn, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "q", "jobs", sync="never") as queue:
        for _ in range(40):
            queue.put_many([b"x" * 20] * 5_000)
    export = spawn("export", tmp_path / "q", "jobs", "--format", "jsonl", "--output", tmp_path / "x")
    until(lambda: parts(tmp_path) or export.poll() is not None)
    export.send_signal(signal.SIGTERM)
    assert export.wait(PATIENCE) == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q"]


# -- what is on its way ----------------------------------------------------------------------------------------------


class _Small(io.RawIOBase):
    """A raw file that takes three bytes at a time, and fails after ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        some = bytes(data[: min(3, self.room - len(self.data))])
        if not some:
            raise OSError(28, "No space left on device")
        self.data += some
        return len(some)


def test_all_is_written_by_pieces_and_nothing_after_an_error() -> None:
    file = _Small(10)
    output = exporting.Output(file)  # type: ignore[arg-type]
    assert output.write(memoryview(b"0123456")) == 7
    with pytest.raises(OSError, match="No space"):
        output.write(b"789abc")
    assert (file.data, output.size) == (b"0123456789", 7)
    assert output.write(b"more") == 4
    output.flush()
    assert (file.data, output.size) == (b"0123456789", 7)
