"""``kestrelpy jobs``: what it shows, what it changes, and that beside an owner it only looks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.cli import _owners, working
from kestrelpy.work import WorkQueue
from tests.cli.programs import Run, refused
from tests.support.queues import forge_jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder with work queue ``work``: jobs 1 to 6 in tubes a and b, of which 5 is delayed and 6 is buried."""
    with WorkQueue(tmp_path, "work") as queue, queue.session() as session:
        for number in range(1, 7):
            queue.put(b"job %d" % number, tube="ab"[number % 2], delay=1000 if number == 5 else 0, key=f"k{number}")
        session.reserve_job(6).bury()
    return tmp_path


def states(folder: Path) -> dict[int, str]:
    """By id, of the queue itself."""
    with WorkQueue(folder, "work") as queue:
        return {job.id: job.state for tube in queue.tubes() for job in queue.jobs(tube)}


BEFORE = {1: "ready", 2: "ready", 3: "ready", 4: "ready", 5: "delayed", 6: "buried"}


def everything_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ls_is_the_default_and_writes_nothing(jobs: Path, run: Run) -> None:
    before = everything_in(jobs)
    done = run("jobs", jobs, "work")
    rows = [line.split() for line in done.out.decode().splitlines()]
    assert rows[0] == ["id", "tube", "state", "priority", "added", "due", "tries", "key", "body"]
    assert [(row[0], row[1], row[2]) for row in rows[1:]] == [
        ("2", "a", "ready"),
        ("4", "a", "ready"),
        ("6", "a", "buried"),
        ("1", "b", "ready"),
        ("3", "b", "ready"),
        ("5", "b", "delayed"),
    ]
    assert done.status == 0
    assert done.err == ""
    assert everything_in(jobs) == before
    assert run("jobs", jobs, "work", "ls").out.decode() == done.out.decode()


def test_ls_chooses(jobs: Path, run: Run) -> None:
    def ids(*options: object) -> list[int]:
        return [
            json.loads(line)["id"]
            for line in run("jobs", jobs, "work", "ls", "--json", *options).out.decode().splitlines()
        ]

    assert ids("--tube", "a") == [2, 4, 6]
    assert ids("--state", "ready", "--limit", "3") == [2, 4, 1]
    assert ids("--tube", "none") == []
    nothing = run("jobs", jobs, "work", "ls", "--tube", "none")
    assert (nothing.status, nothing.err) == (1, "kestrelpy jobs: no such jobs in work\n")
    line = json.loads(run("jobs", jobs, "work", "ls", "--json").out.decode().splitlines()[0])
    assert base64.b64decode(line["body"]) == b"job 2"
    assert line["key"] == "k2"


def test_a_limit_may_be_any_number(jobs: Path, run: Run) -> None:
    for action in ("ls", "peek"):
        done = run("jobs", jobs, "work", action, "--json", "--limit", 10**30)
        assert (done.status, len(done.out.splitlines())) == (0, 6)


@pytest.mark.parametrize("arguments", [("--tube", "a", "kick", "--limit", 1), ("delete", "--tube", "kick", 3, 4)])
def test_what_comes_after_the_options_is_said(jobs: Path, run: Run, arguments: tuple[object, ...]) -> None:
    done = run("jobs", jobs, "work", *arguments)
    rest = "kick" if "delete" not in arguments else "3 4"
    text = f"kestrelpy jobs: unrecognized arguments: {rest}: arguments without -- go before the options"
    assert done.err == f"{text} (see kestrelpy jobs --help)\n"
    assert done.status == 2
    assert states(jobs) == BEFORE
    assert "go before" not in run("ls", jobs, "work").err


def test_peek_shows_whole_jobs(jobs: Path, run: Run) -> None:
    done = run("jobs", jobs, "work", "peek", 3)
    assert done.out.decode().splitlines()[-1] == "    job 3"
    assert "job 5" in run("jobs", jobs, "work", "peek", "--state", "delayed").out.decode()
    refusal = run("jobs", jobs, "work", "peek", 3, 99)
    assert "there is no job 99" in refusal.err
    assert "job 3" in refusal.out.decode()
    assert refusal.status == 1


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (("kick", 5, 6), {5: "ready", 6: "ready"}),
        (("kick", "--tube", "a"), {6: "ready"}),
        (("bury", 1, 5), {1: "buried", 5: "buried"}),
        (("delete", 1, 6), {1: None, 6: None}),
        (("clear", "--tube", "b"), {1: None, 3: None, 5: None}),
    ],
)
def test_changes_are_made(jobs: Path, run: Run, arguments: tuple[object, ...], changed: dict[int, str | None]) -> None:
    done = run("jobs", jobs, "work", *arguments)
    assert done.status == 0, done.err
    assert states(jobs) == {job: state for job, state in {**BEFORE, **changed}.items() if state is not None}


def test_a_pause_lasts_and_ends(jobs: Path, run: Run) -> None:
    assert "paused a until" in run("jobs", jobs, "work", "pause", "--tube", "a", "--seconds", "100").out.decode()
    with WorkQueue(jobs, "work") as queue:
        assert queue.stats_tube("a").pause_left > 90
    assert "not paused" in run("jobs", jobs, "work", "pause", "--tube", "a", "--seconds", "0").out.decode()
    with WorkQueue(jobs, "work") as queue:
        assert queue.stats_tube("a").pause_left == 0
    refused(run("jobs", jobs, "work", "pause", "--tube", "z", "--seconds", "1"), 1, "no tube 'z'")
    refused(run("jobs", jobs, "work", "pause", "--tube", "a", "--seconds", "1e14"), 2, "from 0 to 4294967296 seconds")


def test_one_job_that_is_not_there_does_not_keep_the_others(jobs: Path, run: Run) -> None:
    done = run("jobs", jobs, "work", "delete", 1, 99, 2)
    assert done.status == 1
    assert "job 99" in done.err
    assert done.out.decode() == "deleted 2 jobs\n"
    assert states(jobs).keys() == {3, 4, 5, 6}


@pytest.mark.parametrize(
    "arguments",
    [
        ("delete",),
        ("bury",),
        ("clear",),
        ("pause", "--tube", "a"),
        ("kick",),
        ("kick", 1, "--tube", "a"),
        ("peek", 1, "--tube", "a"),
        ("clear", 1, "--tube", "a"),
        ("delete", 1, "--json"),
        ("brew",),
    ],
)
def test_wrong_use(jobs: Path, run: Run, arguments: tuple[object, ...]) -> None:
    assert run("jobs", jobs, "work", *arguments).status == 2
    assert states(jobs) == BEFORE


@pytest.fixture
def owned(jobs: Path) -> Iterator[WorkQueue]:
    with WorkQueue(jobs, "work") as queue:
        yield queue


def test_beside_an_owner_it_looks_and_says_so(owned: WorkQueue, jobs: Path, run: Run) -> None:
    owned.put(b"late", tube="c")
    done = run("jobs", jobs, "work", "ls", "--tube", "c")
    assert done.status == 0
    assert "late" in done.out.decode()
    assert "has work open: looking only" in done.err


@pytest.mark.parametrize("arguments", [("kick", 6), ("bury", 1), ("delete", 1), ("clear", "--tube", "a")])
def test_beside_an_owner_nothing_is_changed(
    owned: WorkQueue, jobs: Path, run: Run, arguments: tuple[object, ...]
) -> None:
    done = run("jobs", jobs, "work", *arguments)
    assert done.status == working.LOCKED
    assert "nothing was changed" in done.err
    assert {job.id: job.state for tube in owned.tubes() for job in owned.jobs(tube)} == BEFORE


def test_a_job_larger_than_a_usual_segment_can_be_kicked(tmp_path: Path, run: Run) -> None:
    size = 20 << 20
    with WorkQueue(tmp_path, "work", max_job_bytes=size, segment_bytes=2 * size) as queue, queue.session() as session:
        job_id = queue.put(bytes(size))
        session.reserve().bury()
    assert run("jobs", tmp_path, "work", "kick", job_id).status == 0


def test_other_queues_are_refused(tmp_path: Path, run: Run) -> None:
    with JournaledQueue(tmp_path, "orders") as queue:
        queue.put(b"x")
    refused(run("jobs", tmp_path, "orders"), 1, "no work queue")
    refused(run("jobs", tmp_path, "none"), 1, "no queue 'none'")
    assert not list(tmp_path.glob("none*"))


def test_bodies_and_tubes_give_no_orders_to_a_terminal(tmp_path: Path, run: Run) -> None:
    forge_jobs(tmp_path, ("\x1b]0;title\x07",), b"\x1b[2Jred")
    for arguments in ((), ("peek",)):
        assert "\x1b" not in run("jobs", tmp_path, "work", *arguments).out.decode()


def test_owners_are_found_in_the_list_of_locks(tmp_path: Path) -> None:
    listed = tmp_path / "locks"
    listed.write_text(
        "1: FLOCK  ADVISORY  WRITE 1234 fe:01:262146 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 99 fe:01:262146 0 EOF\n"
        "2: POSIX  ADVISORY  WRITE 77 fe:01:5 0 EOF\n3: FLOCK  ADVISORY  READ 78 fe:01:6 0 EOF\n"
    )
    assert _owners.owners_in(str(listed)) == {(0xFE, 1, 262146): 1234}
    assert _owners.owners_in(str(tmp_path / "none")) == {}
    assert _owners.owner_of(str(tmp_path), "none") is None
