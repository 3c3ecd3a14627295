"""The command line: what it prints, how it ends, and that it loses nothing when it is cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import JournaledQueue, inbox, open_reader
from kestrelpy.cli import _common, _framing, main
from kestrelpy.cli._framing import Framing
from kestrelpy.errors import ItemTooLarge
from tests.cli.programs import Done, Run, Spawn, refused
from tests.support.paths import ROOT

LIMIT = 1000


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder with queue ``jobs`` of ten items, 0 to 9, in ids 1 to 10."""
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put_many([b"%d" % number for number in range(10)])
    return tmp_path


def everything_in(folder: Path) -> dict[str, bytes]:
    """All files with their contents."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- framing ---------------------------------------------------------------------------------------------------------


def chunks_of(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """Data in pieces of these sizes, then the rest."""
    at = 0
    for size in sizes:
        if at < len(data):
            yield data[at : at + size]
        at += size
    if at < len(data):
        yield data[at:]


@given(items=st.lists(st.binary(max_size=6)), sizes=st.lists(st.integers(1, 9)), framing=st.sampled_from(Framing))
def test_what_is_joined_comes_apart_again(items: list[bytes], sizes: list[int], framing: Framing) -> None:
    if framing is not Framing.LENGTH:
        items = [item.replace(framing.value, b"") for item in items]
    stream = _framing.join(items, framing)
    lists = list(_framing.split(chunks_of(stream, sizes), framing, LIMIT))
    assert [item for one in lists for item in one] == items
    assert all(lists)


@pytest.mark.parametrize("framing", [Framing.LINES, Framing.NULL])
def test_the_last_mark_may_be_missing(framing: Framing) -> None:
    mark = framing.value
    assert list(_framing.split([b"a" + mark + b"b"], framing, LIMIT)) == [[b"a"], [b"b"]]
    assert list(_framing.split([], framing, LIMIT)) == []


@given(sizes=st.lists(st.integers(1, 9)), framing=st.sampled_from(Framing))
def test_an_item_that_is_too_large_comes_after_all_before_it(sizes: list[int], framing: Framing) -> None:
    stream = _framing.join([b"aa", b"", b"bbbb", b"ccccc", b"d"], framing)
    found: list[bytes] = []
    lists = _framing.split(chunks_of(stream, sizes), framing, 4)
    with pytest.raises(ItemTooLarge):
        found.extend(item for items in lists for item in items)
    assert found == [b"aa", b"", b"bbbb"]


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_are_read() -> None:
    def stream() -> Iterator[bytes]:
        yield b"\xff\xff\xff\xff"
        pytest.fail("it went on reading")

    with pytest.raises(ItemTooLarge):
        list(_framing.split(stream(), Framing.LENGTH, 4))


def test_a_stream_that_ends_inside_an_item_is_an_error() -> None:
    for rest in (b"\0", b"\0\0\0\x02", b"\0\0\0\x02a"):
        with pytest.raises(_common.CommandError, match="ends inside an item"):
            list(_framing.split([rest], Framing.LENGTH, LIMIT))


@given(items=st.lists(st.binary(max_size=9)), count=st.integers(1, 4), size=st.integers(1, 12))
def test_batches_keep_items_and_order(items: list[bytes], count: int, size: int) -> None:
    batches = list(_framing.batches(items, count, size)) if items else []
    assert [item for batch in batches for item in batch] == items
    for batch in batches:
        assert 0 < len(batch) <= count
        assert sum(map(len, batch)) <= size or len(batch) == 1


# -- words and argument types ----------------------------------------------------------------------------------------


def test_instants() -> None:
    assert _common.iso(0) == "1970-01-01T00:00:00.000Z"
    assert _common.iso(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert _common.iso(1 << 62) == f"{1 << 62}ms"
    assert _common.instant_ms("1700000000123") == 1_700_000_000_123
    assert _common.instant_ms("2023-11-14T22:13:20.123") == 1_700_000_000_123
    assert _common.instant_ms("2023-11-14T23:13:20+01:00") == 1_700_000_000_000


def test_sizes_and_counts() -> None:
    sizes = [_common.binary_size(size) for size in (0, 1023, 1024, 1536, 1 << 20, (1 << 30) - 1, 5 << 40)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "5.0 TiB"]
    assert _common.counted(1, "item") == "1 item"
    assert _common.counted(2000, "item") == "2,000 items"


def test_nothing_that_a_terminal_acts_upon_is_shown_as_it_is() -> None:
    assert _common.printable("grün".encode()) == "grün"
    assert _common.printable(b"a\x1b[31m\r\nb\xff") == "a\\x1b[31m\\r\\nb\\xff"


def test_tables() -> None:
    assert _common.table([("a", "n"), ("bb", "10")], numbers=(1,)) == "a    n\nbb  10\n"


# -- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("get",),
        ("get", "d"),
        ("get", "d", "q", "--max", "0"),
        ("get", "d", "q", "--max", "many"),
        ("get", "d", "q", "--timeout", "-1"),
        ("get", "d", "q", "--timeout", "nan"),
        ("get", "d", "q", "--start", "-5"),
        ("get", "d", "q", "--null", "--length-prefixed"),
        ("put", "d", "q", "--sync", "sometimes"),
        ("scan", "d", "q", "--start-time", "yesterday"),
        ("scan", "d", "q", "--hex", "--json"),
        ("ls", "d", "--no-such-option"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    refused(run(*arguments), 2, "--help")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("serve", "beanstalk", "--dri", "jobs"),
            "kestrelpy serve beanstalk: unrecognized option --dri: did you mean --dir?",
        ),
        (
            ("serve", "beanstalk", "--dri=jobs"),
            "kestrelpy serve beanstalk: unrecognized option --dri: did you mean --dir?",
        ),
        (
            ("get", "d", "q", "--readr", "a", "--max", "1"),
            "kestrelpy get: unrecognized option --readr: did you mean --reader?",
        ),
        (("ls", "d", "--json", "-x", "e"), "kestrelpy ls: unrecognized option -x"),
        (("ls", "d", "e"), "kestrelpy ls: unrecognized arguments: e"),
        (
            ("ls", "d", "--json", "e"),
            "kestrelpy ls: unrecognized arguments: e: arguments without -- go before the options",
        ),
        (("--jsn", "ls", "d"), "kestrelpy: unrecognized option --jsn"),
    ],
)
def test_an_option_with_a_slip_is_named(run: Run, arguments: tuple[str, ...], text: str) -> None:
    name, _, reason = text.rpartition(": unrecognized")
    assert run(*arguments) == (2, b"", f"{name}: unrecognized{reason} (see {name} --help)\n")


def test_names_outside_the_rule_are_wrong_use(run: Run, jobs: Path) -> None:
    before = everything_in(jobs)
    refused(run("put", jobs / "new", "../x"), 2, "invalid name")
    refused(run("get", jobs, "jobs", "--reader", "a/b"), 2, "invalid name")
    assert everything_in(jobs) == before


def test_help_and_version(run: Run) -> None:
    done = run("--help")
    assert done.status == 0
    for command in b"demo ls stat put get peek scan verify drop-reader bench".split():
        assert command in done.out
    assert run("get", "--help").status == 0
    assert run("--version").out.startswith(b"kestrelpy ")


# -- put -------------------------------------------------------------------------------------------------------------


def test_put_from_standard_input_then_get(run: Run, tmp_path: Path) -> None:
    done = run("put", tmp_path / "new" / "folder", "jobs", stdin=b"one\n\nthree")
    assert done == (0, b"put 3 items, 8 bytes, ids 1 to 3\n", "")
    assert run("get", tmp_path / "new" / "folder", "jobs") == (0, b"one\n\nthree\n", "")
    assert run("get", tmp_path / "new" / "folder", "jobs") == (1, b"", "")


def test_put_from_a_file(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "input"
    source.write_bytes(b"".join(b"%d\n" % number for number in range(5000)))
    assert run("put", tmp_path / "q", "jobs", source).out == b"put 5,000 items, 18,890 bytes, ids 1 to 5000\n"
    assert run("put", tmp_path / "q", "jobs", source, "--quiet").out == b""
    assert run("get", tmp_path / "q", "jobs").out == source.read_bytes() * 2


def test_a_missing_file_makes_no_queue(run: Run, tmp_path: Path) -> None:
    refused(run("put", tmp_path / "q", "jobs", tmp_path / "nowhere"), 1, "nowhere", "No such file")
    assert not (tmp_path / "q").exists()


def test_put_nothing(run: Run, tmp_path: Path) -> None:
    assert run("put", tmp_path, "jobs") == (0, b"put 0 items, 0 bytes\n", "")


@pytest.mark.parametrize("option", ["--null", "--length-prefixed"])
def test_binary_items(run: Run, tmp_path: Path, option: str) -> None:
    framing = Framing.NULL if option == "--null" else Framing.LENGTH
    items = [b"a\nb", b"", b"\xff\x80\n"] + ([b"a\0b"] if framing is Framing.LENGTH else [])
    stream = _framing.join(items, framing)
    assert run("put", tmp_path, "jobs", option, stdin=stream).status == 0
    assert run("get", tmp_path, "jobs", option).out == stream


def test_input_that_ends_inside_an_item(run: Run, tmp_path: Path) -> None:
    refused(run("put", tmp_path, "jobs", "--length-prefixed", stdin=b"\0\0\0\x01a\0\0"), 1, "ends inside an item")
    assert run("get", tmp_path, "jobs").out == b"a\n"


def test_an_item_that_is_too_large_stops_the_put_there(run: Run, tmp_path: Path) -> None:
    done = run("put", tmp_path, "jobs", stdin=b"a\nb\n" + b"x" * (17 << 20) + b"\nc\n")
    refused(done, 1, "input item 3", "larger than", "up to id 2")
    assert run("get", tmp_path, "jobs").out == b"a\nb\n"


def test_the_largest_item_that_fits(run: Run, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        size = queue.max_item_bytes
    assert run("put", tmp_path, "jobs", stdin=b"x" * size).status == 0
    assert run("get", tmp_path, "jobs").out == b"x" * size + b"\n"


def test_items_that_expire(run: Run, tmp_path: Path) -> None:
    assert run("put", tmp_path, "jobs", "--expires-in", "0", stdin=b"gone\n").status == 0
    assert run("put", tmp_path, "jobs", "--expires-in", "1000", stdin=b"there\n").status == 0
    assert run("peek", tmp_path, "jobs", "--raw", "--max", "9").out == b"there\n"
    assert run("get", tmp_path, "jobs").out == b"there\n"


def test_a_queue_that_somebody_writes_is_not_put_to(run: Run, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs"):
        refused(run("put", tmp_path, "jobs", stdin=b"a\n"), 1, "held by")


def test_items_are_put_as_they_arrive(spawn: Spawn, tmp_path: Path) -> None:
    put = spawn("put", tmp_path, "jobs")
    assert put.stdin is not None
    put.stdin.write(b"first\nhalf")
    get = spawn("get", tmp_path, "jobs", "--follow", "--max", "2")
    assert get.stdout is not None
    while True:  # the queue is not there until the first process has started
        line = get.stdout.readline()
        if line or get.wait() != 1:
            break
        get = spawn("get", tmp_path, "jobs", "--follow", "--max", "2")
        assert get.stdout is not None
    assert get.stdout is not None
    assert line == b"first\n"
    out, err = put.communicate(b" and half\n")
    assert (put.returncode, err) == (0, b"")
    assert out == b"put 2 items, 18 bytes, ids 1 to 2\n"
    assert get.stdout.read() == b"half and half\n"
    assert get.wait() == 0


# -- get -------------------------------------------------------------------------------------------------------------


def test_get_takes_and_commits(run: Run, jobs: Path) -> None:
    assert run("get", jobs, "jobs", "--max", "3").out == b"0\n1\n2\n"
    assert run("get", jobs, "jobs", "--max", "3").out == b"3\n4\n5\n"
    assert run("get", jobs, "jobs").out == b"6\n7\n8\n9\n"
    assert run("get", jobs, "jobs").status == 1


def test_get_of_what_is_not_there(run: Run, jobs: Path) -> None:
    before = everything_in(jobs)
    refused(run("get", jobs, "other"), 1, "no queue 'other'", "jobs")
    refused(run("get", jobs / "nowhere", "jobs"), 1, "no such folder")
    assert everything_in(jobs) == before


def test_named_readers(run: Run, jobs: Path) -> None:
    assert run("get", jobs, "jobs", "--reader", "a", "--create", "--max", "2").out == b"0\n1\n"
    assert run("get", jobs, "jobs", "--reader", "b", "--create").status == 1, "a later one begins at the tail"
    assert run("get", jobs, "jobs", "--reader", "c", "--create", "--start", "9").out == b"8\n9\n"
    assert run("get", jobs, "jobs", "--reader", "d", "--create", "--start", "earliest", "--max", "1").out == b"0\n"
    for command in (("get",), ("peek",), ("dead", "ls"), ("dead", "drop", "--all")):
        done = run(*command, jobs, "jobs")
        refused(done, 2, "named readers", "(a, b, c, d)", "use --reader NAME")
        assert "reader(name)" not in done.err
    assert run("get", jobs, "jobs", "--reader", "a", "--create", "--max", "1").out == b"2\n"


def test_no_reader_is_made_by_mistake(run: Run, jobs: Path) -> None:
    before = everything_in(jobs)
    refused(run("get", jobs, "jobs", "--reader", "mial"), 1, "no reader 'mial'", "no named reader", "--create makes it")
    assert everything_in(jobs) == before
    made = run("get", jobs, "jobs", "--reader", "mail", "--create", "--max", "1")
    assert (made.status, made.out) == (0, b"0\n")
    assert made.err == "kestrelpy get: made reader 'mail' of jobs, from item 1 on\n"
    refused(run("get", jobs, "jobs", "--reader", "mial"), 1, "its readers: mail")
    again = run("get", jobs, "jobs", "--reader", "mail", "--create", "--max", "1")
    assert (again.out, again.err) == (b"1\n", "")


def test_a_reader_that_is_open_elsewhere(run: Run, jobs: Path) -> None:
    reader = open_reader(jobs, "jobs", "a", create=True)
    refused(run("get", jobs, "jobs", "--reader", "a", "--create"), 1, "held by")
    reader.close()


def test_get_while_another_process_writes(spawn: Spawn, jobs: Path) -> None:
    with JournaledQueue(jobs, "jobs") as queue:
        queue.reader("here", start="earliest")
        get = spawn(
            "get", jobs, "jobs", "--reader", "there", "--create", "--start", "earliest", "--max", "12", "--follow"
        )
        assert get.stdout is not None
        assert get.stdout.readline() == b"0\n"
        queue.put_many([b"10", b"11"])
        out, err = get.communicate()
        assert (get.returncode, err) == (0, b"kestrelpy get: made reader 'there' of jobs, from item 1 on\n")
        assert out == b"".join(b"%d\n" % number for number in range(1, 12))


def test_what_could_not_be_written_is_not_committed(run: Run, spawn: Spawn, jobs: Path) -> None:
    with open("/dev/full", "wb") as full:
        get = spawn("get", jobs, "jobs", stdout=full)
        _, err = get.communicate()
    assert get.returncode == 1
    assert err.count(b"\n") == 1
    assert b"No space left" in err
    assert run("get", jobs, "jobs").out.startswith(b"0\n1\n")


def test_a_closed_pipe_ends_it_quietly_and_loses_nothing(run: Run, spawn: Spawn, tmp_path: Path) -> None:
    count = 50_000
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put_many([b"%d" % number for number in range(count)])
    get = spawn("get", tmp_path, "jobs")
    assert get.stdout is not None
    assert get.stderr is not None
    taken = get.stdout.read(2)
    get.stdout.close()
    assert (get.wait(), get.stderr.read()) == (128 + signal.SIGPIPE, b"")
    assert taken == b"0\n"
    rest = run("get", tmp_path, "jobs").out.split()
    assert rest == [b"%d" % number for number in range(count - len(rest), count)]
    assert len(rest) > count - 30_000, "what is in flight is bounded by the pipe and a batch"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_quietly_and_keep_its_place(run: Run, spawn: Spawn, jobs: Path, number: signal.Signals) -> None:
    get = spawn("get", jobs, "jobs", "--follow")
    assert get.stdout is not None
    lines = [get.stdout.readline() for _ in range(10)]
    assert lines[-1] == b"9\n"
    get.send_signal(number)
    out, err = get.communicate()
    assert (get.returncode, out, err) == (128 + number, b"", b"")
    assert run("get", jobs, "jobs").status == 1, "all was committed and checkpointed"


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_write_that_nobody_reads_does_not_hold_up_a_signal(
    run: Run, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: bool
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put_many([b"x" * 200_000] * 5)
    get = spawn("get", tmp_path, "jobs", "--follow", unbuffered=unbuffered)
    assert get.stdout is not None
    assert get.stdout.read(1) == b"x"
    get.terminate()
    assert get.wait(timeout=10) == 128 + signal.SIGTERM
    assert run("get", tmp_path, "jobs").out.count(b"\n") == 5, "nothing of the batch was committed"


def test_a_killed_get_delivers_again_at_most_what_was_not_saved(run: Run, spawn: Spawn, jobs: Path) -> None:
    get = spawn("get", jobs, "jobs", "--follow")
    assert get.stdout is not None
    assert get.stdout.readline() == b"0\n"
    get.kill()
    get.communicate()
    rest = run("get", jobs, "jobs").out.split()
    assert rest == [b"%d" % number for number in range(10 - len(rest), 10)]


# -- peek, scan ------------------------------------------------------------------------------------------------------


def test_peek_changes_nothing(run: Run, jobs: Path) -> None:
    run("get", jobs, "jobs", "--max", "2")
    before = everything_in(jobs)
    assert run("peek", jobs, "jobs", "--raw").out == b"2\n"
    assert run("peek", jobs, "jobs", "--raw", "--max", "3").out == b"2\n3\n4\n"
    assert run("peek", jobs, "jobs").out.startswith(b"3  20")
    assert everything_in(jobs) == before


def test_peek_knows_what_is_done_out_of_order(run: Run, jobs: Path) -> None:
    with JournaledQueue(jobs, "jobs") as queue:
        items = queue.get_many(6)
        queue.commit_many([items[0], items[2], items[3], items[5]])
        queue.abort(items[1])
    assert run("peek", jobs, "jobs", "--raw", "--max", "9").out == b"1\n4\n6\n7\n8\n9\n"
    line = run("peek", jobs, "jobs").out
    assert b"errors=1" in line


def test_peek_of_what_is_not_there(run: Run, jobs: Path) -> None:
    refused(run("peek", jobs, "jobs", "--reader", "nobody"), 1, "no reader 'nobody'")
    refused(run("peek", jobs, "other"), 1, "no queue 'other'")
    run("get", jobs, "jobs", "--reader", "a", "--create")
    refused(run("peek", jobs, "jobs"), 2, "named readers")
    assert run("peek", jobs, "jobs", "--reader", "a").status == 1, "nothing left"


def test_scan_shows_everything_read_or_not(run: Run, jobs: Path) -> None:
    run("get", jobs, "jobs", "--max", "4")
    assert run("scan", jobs, "jobs", "--raw").out == b"".join(b"%d\n" % number for number in range(10))
    lines = run("scan", jobs, "jobs").out.decode().splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 11)]
    assert [line.split()[-1] for line in lines] == [str(number) for number in range(10)]


def test_scan_by_id_and_time(run: Run, jobs: Path) -> None:
    assert run("scan", jobs, "jobs", "--raw", "--start-id", "4").out.startswith(b"3\n")
    assert run("scan", jobs, "jobs", "--raw", "--start-id", "4", "--stop-id", "6").out == b"3\n4\n"
    assert run("scan", jobs, "jobs", "--start-time", "2100-01-01").status == 1
    assert run("scan", jobs, "jobs", "--raw", "--stop-time", "2100-01-01").out.startswith(b"0\n")


def test_the_formats_of_scan(run: Run, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"a\x1b\n", expires_at_ms=4_000_000_000_000)
        queue.put(b"bb")
    text = run("scan", tmp_path, "jobs").out.decode().splitlines()
    assert text[0].endswith("3 B  expires=2096-10-02T07:06:40.000Z  a\\x1b\\n")
    assert run("scan", tmp_path, "jobs", "--hex").out.splitlines()[1].endswith(b"2 B  62 62")
    assert run("scan", tmp_path, "jobs", "--base64").out.splitlines()[1].endswith(b"2 B  YmI=")
    assert run("scan", tmp_path, "jobs", "--no-data").out.splitlines()[1].endswith(b".segment")
    assert run("scan", tmp_path, "jobs", "--raw", "--length-prefixed").out == b"\0\0\0\x03a\x1b\n\0\0\0\x02bb"
    facts = [json.loads(line) for line in run("scan", tmp_path, "jobs", "--json").out.splitlines()]
    assert [(one["id"], one["data"]) for one in facts] == [(1, "YRsK"), (2, "YmI=")]
    assert facts[0]["expires_ms"] == 4_000_000_000_000
    summary = run("scan", tmp_path, "jobs", "--summary").out.decode()
    assert summary.splitlines()[-1] == "2 items, 5 bytes in 1 segment"
    assert run("scan", tmp_path, "jobs", "-q").out.decode() == summary


def test_scan_of_an_archive(run: Run, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "q", "jobs", segment_bytes=4096, archive_dir=tmp_path / "old") as queue:
        for number in range(100):
            queue.put(b"%090d" % number)
            queue.get().commit()
        queue.checkpoint()
        assert queue.stats().archived_segments > 0
    count = run("scan", tmp_path / "q", "jobs", "--raw", "--archive-dir", tmp_path / "old").out.count(b"\n")
    assert count == 100
    assert run("scan", tmp_path / "q", "jobs", "--raw").out.count(b"\n") < 100


# -- ls, stat, verify, drop-reader -----------------------------------------------------------------------------------


def test_ls(run: Run, jobs: Path) -> None:
    with JournaledQueue(jobs, "fan") as queue:
        queue.reader("a")
        queue.reader("b")
        queue.put(b"x")
        queue.reader("a").get().commit()
    before = everything_in(jobs)
    lines = run("ls", jobs).out.decode().splitlines()
    assert lines[0].split() == ["queue", "unread", "last", "id", "segments", "size"]
    assert lines[1].split()[:6] == ["fan", "a:", "0,", "b:", "1", "1"]
    assert lines[2].split()[:4] == ["jobs", "10", "10", "1"]
    facts = [json.loads(line) for line in run("ls", jobs, "--json").out.splitlines()]
    assert [one["name"] for one in facts] == ["fan", "jobs"]
    assert everything_in(jobs) == before


def test_a_file_that_cannot_be_opened_is_trouble_of_its_queue_alone(run: Run, jobs: Path, tmp_path: Path) -> None:
    for name in ("linked", "zebra"):
        with JournaledQueue(jobs, name) as queue:
            queue.put(b"x")
    segment = next(jobs.glob("linked.*.segment"))
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    done = run("ls", jobs)
    lines = done.out.decode().splitlines()
    assert (done.status, done.err) == (1, "")
    assert [line.split()[0] for line in lines[1:]] == ["jobs", "linked", "zebra"]
    assert lines[2].endswith(f"unreadable: {segment.name}: this is a symbolic link, and is never read")
    facts = [json.loads(line) for line in run("ls", jobs, "--json").out.splitlines()]
    assert ["unreadable" in one for one in facts] == [False, True, False]
    refused(run("stat", jobs, "linked"), 1, "symbolic link")


def test_ls_of_nothing(run: Run, tmp_path: Path) -> None:
    assert run("ls", tmp_path) == (1, b"", "")
    refused(run("ls", tmp_path / "nowhere"), 1, "no such folder")


def test_stat(run: Run, jobs: Path) -> None:
    with JournaledQueue(jobs, "jobs") as queue:
        items = queue.get_many(5)
        queue.commit_many([items[0], items[2], items[3]])
        queue.abort(items[1])
    before = everything_in(jobs)
    lines = run("stat", jobs, "jobs").out.decode().splitlines()
    assert lines[0].split() == ["queue", "jobs"]
    assert "10 items, 10 bytes" in lines[3]
    assert lines[-1].split() == ["(default)", "1", "7", "7", "2", "1"]
    detail = run("stat", jobs, "jobs", "--reader", "").out.decode()
    assert "3-4" in detail
    assert "2: 1" in detail
    facts = json.loads(run("stat", jobs, "jobs", "--json").out)
    assert (facts["tail_id"], facts["put_items"], facts["readers"][0]["items"]) == (10, 10, 7)
    refused(run("stat", jobs, "jobs", "--reader", "nobody"), 1, "no reader")
    refused(run("stat", jobs, "other"), 1, "no queue")
    assert everything_in(jobs) == before


def test_batches_that_were_refused_are_counted(run: Run, jobs: Path) -> None:
    assert b"refused" not in run("stat", jobs, "jobs").out + run("verify", jobs, "jobs").out
    (jobs / "inbox").mkdir()
    for number in (1, 2):
        (jobs / "inbox" / f"jobs.{number:013d}.batch.refused").touch()
    told = b"refused   2 published, which could not be ingested: inbox/*.batch.refused"
    assert told in run("stat", jobs, "jobs").out.splitlines()
    done = run("verify", jobs, "jobs")
    assert told in done.out.splitlines()
    assert done.status == 0
    for command in ("stat", "verify"):
        assert json.loads(run(command, jobs, "jobs", "--json").out)["refused_batches"] == 2


def test_batches_that_wait_are_counted(run: Run, jobs: Path) -> None:
    assert b"pending" not in run("ls", jobs).out + run("stat", jobs, "jobs").out
    for expected in (b"1 batch", b"2 batches"):
        inbox.put_many(jobs, "jobs", [b"x", b"y"])
        assert b"(+ %s pending)" % expected in run("ls", jobs).out
    assert b"pending   2 batches pending in the inbox" in run("stat", jobs, "jobs").out
    assert json.loads(run("stat", jobs, "jobs", "--json").out)["pending_batches"] == 2


def test_a_name_that_has_batches_and_no_queue_is_shown(run: Run, tmp_path: Path) -> None:
    for count in (1, 2):
        inbox.put_many(tmp_path, "orders", [b"x"] * count)
    before = sorted(tmp_path.rglob("*"))
    done = run("ls", tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[1].decode() == "orders  2 batches pending, no owner yet"
    (facts,) = map(json.loads, run("ls", tmp_path, "--json").out.splitlines())
    assert (facts["name"], facts["pending_batches"], facts["segments"]) == ("orders", 2, [])
    text = f"no queue 'orders' in {tmp_path}: 2 batches pending in the inbox, no owner yet\n"
    for command in ("stat", "verify", "peek", "get", "scan"):
        assert run(command, tmp_path, "orders") == (1, b"", f"kestrelpy {command}: {text}")
    refused(run("stat", tmp_path, "order"), 1, "no queue 'order'", "batches for orders, no owner yet")
    assert sorted(tmp_path.rglob("*")) == before, "a look makes nothing"
    with JournaledQueue(tmp_path, "orders"):
        pass
    assert b"pending" not in run("ls", tmp_path).out


def test_stat_beside_a_live_writer(run: Run, jobs: Path) -> None:
    with JournaledQueue(jobs, "jobs") as queue:
        queue.put_many([b"x"] * 5)
        facts = json.loads(run("stat", jobs, "jobs", "--json").out)
        assert (facts["tail_id"], facts["put_items"], facts["put_bytes"]) == (15, 15, 15)


def test_verify(run: Run, jobs: Path) -> None:
    before = everything_in(jobs)
    done = run("verify", jobs, "jobs")
    assert (done.status, done.err) == (0, "")
    assert done.out.decode().splitlines()[-1] == "no damage"
    facts = json.loads(run("verify", jobs, "jobs", "--json").out)
    assert (facts["ok"], facts["items"], facts["damage"]) == (True, 10, [])
    assert everything_in(jobs) == before


def test_verify_finds_damage(run: Run, jobs: Path) -> None:
    segment = next(jobs.glob("jobs.*.segment"))
    data = bytearray(segment.read_bytes())
    data[150] ^= 1
    segment.write_bytes(data)
    done = run("verify", jobs, "jobs")
    assert done.status == 1
    assert done.out.decode().splitlines()[-1] == "DAMAGED in 1 place"
    assert json.loads(run("verify", jobs, "jobs", "--json").out)["ok"] is False
    assert segment.read_bytes() == bytes(data), "it was looked at, not touched"
    refused(run("scan", jobs, "jobs"), 1, "offset")


def test_verify_of_a_truncated_segment_speaks_of_no_torn_tail(run: Run, jobs: Path) -> None:
    segment = next(jobs.glob("jobs.*.segment"))
    segment.write_bytes(segment.read_bytes()[:150])
    done = run("verify", jobs, "jobs")
    assert (done.status, b"are missing" in done.out, b"torn" in done.out) == (1, True, False)


def test_drop_reader(run: Run, jobs: Path) -> None:
    run("get", jobs, "jobs", "--reader", "a", "--create", "--max", "2")
    refused(run("drop-reader", jobs, "jobs", "b"), 1, "no reader 'b'", "a")
    assert run("drop-reader", jobs, "jobs", "a") == (0, b"", "")
    refused(run("drop-reader", jobs, "jobs", "a"), 1, "no reader 'a'")
    refused(run("drop-reader", jobs, "other", "a"), 1, "no queue")


def test_drop_reader_whose_place_is_lost(run: Run, jobs: Path) -> None:
    """It holds segments until it is opened, or dropped."""
    run("get", jobs, "jobs", "--reader", "a", "--create", "--max", "2")
    (jobs / "jobs+a.checkpoint").unlink()
    assert run("drop-reader", jobs, "jobs", "a") == (0, b"", "")
    refused(run("drop-reader", jobs, "jobs", "a"), 1, "no reader 'a'")


def test_drop_reader_of_an_open_queue(run: Run, jobs: Path) -> None:
    with JournaledQueue(jobs, "jobs") as queue:
        queue.reader("a").close()
        refused(run("drop-reader", jobs, "jobs", "a"), 1, "held by")


# -- bench, and how it all ends --------------------------------------------------------------------------------------


def test_bench_from_a_checkout(spawn: Spawn) -> None:
    bench = spawn("bench", "--list")
    out, err = bench.communicate()
    assert (bench.returncode, err) == (0, b"")
    assert b"put-take" in out


def test_bench_elsewhere_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kestrelpy.__file__", str(tmp_path / "kestrelpy" / "__init__.py"))
    refused(run("bench", "--list"), 1, "checkout")


def test_no_traceback_even_for_what_should_not_happen(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_directory: object) -> list[str]:
        raise RuntimeError("a fault\nin two lines")

    monkeypatch.setattr("kestrelpy.cli._common.queue_names", fail)
    refused(run("ls", tmp_path), 1, "this should not happen", "a fault in two lines")
    monkeypatch.setenv("KESTRELPY_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["ls", str(tmp_path)])


def test_a_folder_that_may_not_be_read(run: Run, jobs: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("everything may be read by root")
    jobs.chmod(0)
    try:
        refused(run("ls", jobs), 1, "Permission denied")
    finally:
        jobs.chmod(0o700)


def test_a_file_in_place_of_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(run("ls", tmp_path / "file"), 1, "no such folder")
    refused(run("put", tmp_path / "file", "jobs", stdin=b"a\n"), 1, "file")


def test_output_that_nobody_reads_is_no_error(jobs: Path) -> None:
    scan = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kestrelpy scan {jobs} jobs | true; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert scan.returncode in (0, 128 + signal.SIGPIPE)
    assert scan.stderr == b""


# -- streams that are not what they were ------------------------------------------------------------------------------


def in_shell(line: str, **environment: str) -> Done:
    command = ["sh", "-c", line.replace("kestrelpy", f"{sys.executable} -m kestrelpy")]
    done = subprocess.run(
        command, capture_output=True, timeout=60, check=False, cwd=ROOT, env={**os.environ, **environment}
    )
    return Done(done.returncode, done.stdout, done.stderr.decode())


def test_what_the_output_has_no_letter_for_is_escaped(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put_many(["caf\u00e9".encode(), b"plain"])
    done = in_shell(f"kestrelpy scan {tmp_path} jobs", PYTHONIOENCODING="ascii")
    assert (done.status, done.err) == (0, "")
    assert b"caf\\xe9" in done.out
    assert b"plain" in done.out


def test_streams_that_are_closed_are_empty(tmp_path: Path) -> None:
    for line in (f"kestrelpy put {tmp_path} jobs <&-", f"kestrelpy ls {tmp_path} >&-"):
        done = in_shell(line)
        assert (done.status, done.err) == (0, ""), (line, done)


def test_an_expiry_beyond_all_time_is_refused(tmp_path: Path, run: Run) -> None:
    assert run("put", tmp_path, "jobs", "--expires-in", "1e300", stdin=b"1").status == 2
