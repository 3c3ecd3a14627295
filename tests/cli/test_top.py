"""``kestrelpy top``: the table, its keys, what it prints where there is no terminal, and that it takes no orders from
names.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, inbox
from kestrelpy.cli import _folder_top
from kestrelpy.cli._folder_top import FolderLooker
from kestrelpy.work import WorkQueue
from tests.cli.programs import Run, refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE
from tests.support.queues import forge_jobs

ESCAPES = "tube;\x1b[2Jred"


@pytest.fixture
def queues(tmp_path: Path) -> Path:
    """Two queues of items, one with two readers, and one of jobs."""
    with JournaledQueue(tmp_path, "orders") as queue:
        mail = queue.reader("mail")
        queue.reader("audit")
        queue.put_many([b"x" * 10] * 20)
        mail.commit_many(mail.get_many(5))
    with JournaledQueue(tmp_path, "alerts") as queue:
        queue.put(b"x" * 5000)
    with WorkQueue(tmp_path, "work") as jobs, jobs.session() as session:
        jobs.put(b"abc", tube="mail")
        jobs.put(b"abc", tube="mail", delay=1000)
        jobs.put(b"abc", tube="prints")
        session.watch("prints")
        session.reserve(timeout=0).bury()
        jobs.pause_tube("mail", 1000)
    return tmp_path


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder_top, "FIRST_INTERVAL", 0.01)


def test_one_plain_table_without_a_terminal(queues: Path, run: Run) -> None:
    done = run("top", queues)
    lines = [re.split(r" {2,}", line.strip()) for line in done.out.decode().splitlines()]
    assert done.status == 0
    assert lines[0] == ["queue", "items", "in/s", "out/s", "oldest", "lag", "disk", "segments"]
    assert [line[0] for line in lines[1:]] == ["alerts", "orders", "audit", "mail", "work", "mail", "prints"]
    by_name = {line[0]: line for line in lines[1:4]}
    assert by_name["alerts"][1:4] == ["1", "0.0", "0.0"]
    assert by_name["alerts"][5] == "4.9 KiB"
    assert by_name["orders"][1] == by_name["audit"][1] == "20"
    assert lines[4][1] == "15"  # of the reader mail
    assert lines[5][-1] == "(work queue)"
    assert lines[6][1] == "1"
    assert lines[6][-1].startswith("1 delayed, paused for ")
    assert lines[7][1] == "0"
    assert lines[7][-1] == "1 buried"
    assert done.err == ""
    shutil.rmtree(queues / "inbox", ignore_errors=True)
    (queues / "inbox").write_bytes(b"no folder")
    assert "what is pending is not known" in run("top", queues).err


def test_json_has_readers_and_tubes(queues: Path, run: Run) -> None:
    done = run("top", queues, "--json", "--sort", "items")
    found = {one["name"]: one for one in map(json.loads, done.out.decode().splitlines())}
    assert list(found) == ["orders", "work", "alerts"]
    assert {reader["name"]: reader["items"] for reader in found["orders"]["readers"]} == {"audit": 20, "mail": 15}
    assert {tube["name"]: (tube["ready"], tube["delayed"], tube["buried"]) for tube in found["work"]["tubes"]} == {
        "mail": (1, 1, 0),
        "prints": (0, 0, 1),
    }
    assert "tubes" not in found["orders"]


def test_batches_that_wait_are_shown(queues: Path, run: Run) -> None:
    for name in ("alerts", "order", "order"):
        inbox.put_many(queues, name, [b"x"])
    done = run("top", queues)
    lines = [re.split(r" {2,}", line.strip()) for line in done.out.decode().splitlines()]
    assert done.status == 0
    assert (lines[1][0], lines[1][-1]) == ("alerts", "1 batch pending")
    assert lines[2] == ["order", "2 batches pending, no owner yet"]
    found = {one["name"]: one for one in map(json.loads, run("top", queues, "--json").out.decode().splitlines())}
    waiting = {name: one["pending_batches"] for name, one in found.items()}
    assert waiting == {"alerts": 1, "order": 2, "orders": 0, "work": 0}
    assert not list(queues.glob("order.*"))


def test_rates_are_those_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        looker = FolderLooker(str(tmp_path))
        looker.look()
        queue.put_many([b"x"] * 1000)
        looker.look()
    assert looker.sorted_queues()[0].rate_in > 0


@pytest.mark.parametrize(
    ("key", "first"), [("n", "alerts"), ("i", "orders"), ("l", "alerts"), ("d", "orders"), ("a", "orders")]
)
def test_keys_sort_and_reverse(queues: Path, key: str, first: str) -> None:
    looker = FolderLooker(str(queues))
    looker.look()
    assert looker.press(key)
    names = [one.name for one in looker.sorted_queues()]
    assert names[0] == first
    assert looker.press("r")
    assert [one.name for one in looker.sorted_queues()] == names[::-1]
    assert not looker.press("q")


def test_scrolling_stays_within_the_rows(queues: Path) -> None:
    looker = FolderLooker(str(queues))
    looker.look()
    looker.press("k")
    assert looker.first_row == 0
    for _ in range(30):
        looker.press("j")
    assert looker.first_row == len(looker.rows()) - 1
    looker.press("n")
    assert looker.first_row == 0


def test_trouble_is_shown_and_counts(queues: Path, run: Run) -> None:
    segment = next(queues.glob("alerts.*.segment"))
    segment.write_bytes(b"\xff" * 300)
    done = run("top", queues, "--sort", "trouble")
    assert done.status == 1
    assert done.out.decode().splitlines()[1].startswith("alerts")
    assert "IN TROUBLE" in done.out.decode()


def test_a_link_in_place_of_a_segment_is_trouble_of_its_queue_alone(queues: Path, run: Run, tmp_path: Path) -> None:
    segment = next(queues.glob("alerts.*.segment"))
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    done = run("top", queues, "--json")
    problems = {one["name"]: one["problem"] for one in map(json.loads, done.out.decode().splitlines())}
    assert done.status == 1
    assert "regular file" in problems.pop("alerts")
    assert problems == {"orders": "", "work": ""}


def test_a_folder_that_is_not_there(tmp_path: Path, run: Run) -> None:
    refused(run("top", tmp_path / "none"), 1, "no such folder")
    assert "at least 0.1" in run("top", tmp_path, "--interval", "0").err


def test_names_of_tubes_give_no_orders(tmp_path: Path, run: Run) -> None:
    forge_jobs(tmp_path, (ESCAPES, "[red]markup[/red]"))
    looker = FolderLooker(str(tmp_path))
    looker.look()
    from rich.console import Console

    console = Console(width=200, force_terminal=True)
    with console.capture() as captured:
        console.print(looker.frame(40))
    for text in (captured.get(), run("top", tmp_path).out.decode()):
        assert "\x1b[2J" not in text
        assert r"tube;\x1b[2Jred" in text
        assert "[red]markup[/red]" in text


@contextlib.contextmanager
def on_a_terminal(*arguments: object, term: str = "xterm-256color") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kestrelpy", *map(str, arguments)]
    environment = {**os.environ, "TERM": term, "COLUMNS": "150", "LINES": "40"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str) -> str:
    """What the terminal was sent until ``wanted`` is among it."""
    seen, end = "", time.monotonic() + PATIENCE
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 1 << 16).decode("utf-8", "replace")
    assert wanted in seen, seen[-2000:]
    return seen


def test_a_terminal_has_a_live_table_that_obeys_keys(queues: Path) -> None:
    pytest.importorskip("rich")
    with on_a_terminal("top", queues, "--interval", "0.2") as (process, terminal):
        read_until(terminal, "sorted by name")
        os.write(terminal, b"i")
        read_until(terminal, "sorted by items")
        with JournaledQueue(queues, "alerts") as queue:
            queue.put_many([b"x"] * 7776)
        read_until(terminal, "7,777")
        os.write(terminal, b"q")
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_draws_nothing_gets_a_plain_table(queues: Path, term: str) -> None:
    with on_a_terminal("top", queues, term=term) as (process, terminal):
        assert "\x1b" not in read_until(terminal, "alerts")
        assert process.wait(PATIENCE) == 0


def test_ctrl_c_ends_it_and_gives_the_terminal_back(queues: Path) -> None:
    pytest.importorskip("rich")
    with on_a_terminal("top", queues) as (process, terminal):
        before = termios.tcgetattr(terminal)
        read_until(terminal, "sorted by name")
        assert not termios.tcgetattr(terminal)[3] & termios.ICANON
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGINT
        assert termios.tcgetattr(terminal) == before
        assert "Traceback" not in read_until(terminal, "\x1b[?1049l")  # the screen that was there before
