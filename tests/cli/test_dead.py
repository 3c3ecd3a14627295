"""``kestrelpy dead``: what it shows, what it puts back or drops, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, ReaderConfig, inbox, scan
from kestrelpy.work import WorkQueue
from tests.cli.programs import Run, refused

DEAD = ReaderConfig(max_deliveries=1, dead_letter="dead")


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A folder with queue ``jobs``, of which three items have died, and a foreign item in ``dead``."""
    with JournaledQueue(tmp_path, "jobs", readers={"audit": DEAD}) as queue:
        queue.put_many([b"a", b"b\x1b[2J", b"c"])
        for item in queue.reader("audit", start="earliest").get_many(3):
            item.abort(reason=f"no {item.data.decode()}")
    with JournaledQueue(tmp_path, "dead") as dead:
        dead.put(b"foreign")
        dead.reader()
    return tmp_path


def unread(folder: Path) -> list[bytes]:
    with JournaledQueue(folder, "jobs") as queue:
        return [item.data for item in queue.reader("audit").get_many(10, timeout=0)]


def test_ls_and_show(run: Run, letters: Path) -> None:
    status, out, err = run("dead", "ls", letters, "dead")
    lines = out.decode().splitlines()
    assert (status, err, len(lines)) == (0, "", 5)
    assert lines[0].split() == ["id", "from", "item", "died", "errors", "size", "reason"]
    assert lines[1].split()[:3] == ["1", "jobs+audit", "1"]
    assert lines[1].endswith("1 B  no a")
    assert "\x1b" not in out.decode()
    assert "(no dead letter)" in lines[4]
    status, out, err = run("dead", "show", letters, "dead", "--id", 2, 4)
    assert status == 0
    assert b"from    jobs+audit, item 2\n" in out
    assert b"data    b\\x1b[2J\n" in out
    assert b"data    foreign\n" in out
    assert b"id      1\n" not in out


def test_as_json(run: Run, letters: Path) -> None:
    shown = [json.loads(line) for line in run("dead", "ls", letters, "dead", "--json").out.splitlines()]
    assert [each["id"] for each in shown] == [1, 2, 3, 4]
    assert shown[0]["dead_letter"]["reason"] == "no a"
    assert shown[0]["dead_letter"]["data"] == "YQ=="
    assert shown[3]["dead_letter"] is None
    again = [json.loads(line) for line in run("scan", letters, "dead", "--json").out.splitlines()]
    assert [each.get("dead_letter") for each in again] == [each["dead_letter"] for each in shown]
    assert run("dead", "show", letters, "dead", "--json", "--id", 9).status == 1


def test_requeue_and_drop(run: Run, letters: Path) -> None:
    waits = "published, until the owner takes them in: jobs\n"
    assert run("dead", "requeue", letters, "dead", "--id", 3, 1) == (0, b"2 dead letters put back\n", waits)
    assert unread(letters) == [b"a", b"c"]
    assert run("dead", "drop", letters, "dead", "--id", 2) == (0, b"1 dead letter dropped\n", "")
    done = run("dead", "requeue", letters, "dead", "--all")
    assert (done.status, done.err) == (1, "kestrelpy dead: no dead letters, and left there: 4\n")
    assert run("dead", "drop", letters, "dead", "--all").status == 0
    assert run("dead", "ls", letters, "dead") == (1, b"", "kestrelpy dead: nothing is unread in dead\n")
    assert len(list(scan(letters, "jobs"))) >= 2


def test_a_letter_that_can_not_be_put_back_does_not_keep_the_others(run: Run, tmp_path: Path) -> None:
    for name, data in (("gone", b"a"), ("small", b"x" * 101), ("jobs", b"b"), ("jobs", b"c")):
        with JournaledQueue(tmp_path, name, default_reader=DEAD) as queue:
            queue.put(data)
            queue.get().abort()
    for path in tmp_path.iterdir():
        if path.name.startswith(("gone", "small")):
            path.unlink()
    WorkQueue(tmp_path, "gone").close()
    JournaledQueue(tmp_path, "small", max_item_bytes=100).close()
    for put_back in (b"2 dead letters", b"0 dead letters"):
        done = run("dead", "requeue", tmp_path, "dead", "--all")
        assert (done.status, done.out) == (1, put_back + b" put back\n")
        assert "1 stays: " in done.err
        assert "is a work queue" in done.err
        assert "2 stays: an item of 101 bytes" in done.err
    with JournaledQueue(tmp_path, "jobs") as queue:
        assert [item.data for item in queue.get_many(10, timeout=0)] == [b"b", b"c"]
    assert run("dead", "drop", tmp_path, "dead", "--all").out == b"2 dead letters dropped\n"


def test_what_is_not_there(run: Run, letters: Path) -> None:
    done = run("dead", "requeue", letters, "dead", "--id", 1, 77)
    assert (done.status, done.out) == (1, b"1 dead letter put back\n")
    assert "not in queue 'dead': 77" in done.err
    refused(run("dead", "ls", letters, "other"), 1, "no queue 'other'")
    refused(run("dead", "requeue", letters, "other", "--all"), 1, "no queue 'other'")
    assert run("dead", "requeue", letters, "dead").status == 2
    assert run("dead", "drop", letters, "dead", "--all", "--id", 1).status == 2
    assert run("dead").status == 2


def test_looking_leaves_everything_as_it_is(run: Run, letters: Path) -> None:
    with JournaledQueue(letters, "jobs", readers={"audit": DEAD}) as queue:
        queue.put(b"d")
        queue.reader("audit").get().abort()
    assert inbox.pending(letters, "dead") == 1
    before = {path: path.read_bytes() for path in letters.rglob("*") if path.is_file()}
    done = run("dead", "ls", letters, "dead")
    assert done.err == "not shown: 1 batch pending in the inbox, not taken in yet by an owner\n"
    assert {path: path.read_bytes() for path in letters.rglob("*") if path.is_file()} == before


def test_batches_that_wait_are_not_called_moves(run: Run, letters: Path) -> None:
    """They are items like others, which somebody has put."""
    for name in ("dead", "dead", "new"):
        inbox.put_many(letters, name, [b"x"])
    told = "not shown: 2 batches pending in the inbox, not taken in yet by an owner\n"
    assert (run("dead", "ls", letters, "dead").err, run("dead", "show", letters, "dead").err) == (told, told)
    done = run("dead", "ls", letters, "new")
    assert (done.status, done.err) == (1, told.replace("2 batches", "1 batch"))


def test_a_queue_that_a_service_has_open(run: Run, letters: Path) -> None:
    with JournaledQueue(letters, "dead") as dead:
        dead.reader()
        assert run("dead", "ls", letters, "dead").status == 0
        refused(run("dead", "requeue", letters, "dead", "--all"), 1, "is held by")
