"""The parts of the dashboard without a server: lines in bounded memory, the sampler's pace, checks one at a time."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from kestrelpy import SystemClock, VerifyReport, verify
from kestrelpy.testing import ManualClock
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE
from tests.support.queues import START_MS

pytest.importorskip("starlette", reason="starlette is not installed: the extra [dashboard] has it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: the extra [dashboard] has it")

from kestrelpy.dashboard import history, make_app, views
from kestrelpy.dashboard.checking import Checker
from kestrelpy.dashboard.history import OF_ALL, SLOTS, HourLine, LastHour
from kestrelpy.dashboard.sampler import Sampler
from kestrelpy.dashboard.serving import is_loopback, parse_listen
from kestrelpy.inspection import WatchedQueue, WatchedReader


def one(name: str, *readers: str, rate: float = 1.0, items: int = 5) -> WatchedQueue:
    found = tuple(WatchedReader(reader, 0, items, 50, 0, 0.0) for reader in readers)
    return WatchedQueue(name, "queue", items, 50, 9, 90, 9, START_MS, rate, 2.0, 1, 90, 100, found, False, "")


def test_a_point_is_the_mean_of_its_slot_and_gaps_stay_gaps() -> None:
    line = HourLine()
    for slot, value in ((100, 1.0), (100, 3.0), (103, 8.0)):
        line.add(slot, value)
    assert line.points(98, 104) == [None, None, 2.0, None, None, 8.0, None]
    line.add(103 + SLOTS, 1.0)
    assert line.points(103, 103 + SLOTS)[:-1] == [None] * (SLOTS - 1)


def test_a_line_goes_round() -> None:
    line = HourLine()
    for slot in range(10, 10 + 3 * SLOTS):
        line.add(slot, float(slot))
    assert line.points(9 + 2 * SLOTS + 1, 9 + 3 * SLOTS) == [
        float(slot) for slot in range(10 + 2 * SLOTS, 10 + 3 * SLOTS)
    ]
    assert len(line.points(0, 9 + 3 * SLOTS)) == SLOTS
    assert line.coarse(9 + 3 * SLOTS, 60)[-1] == float(f"{9 + 3 * SLOTS - 2.5:.3g}")


def test_the_sum_of_all_and_queues_that_go() -> None:
    kept = LastHour()
    kept.add(1, [one("a", "r", rate=1.0), one("b", rate=2.0)], START_MS)
    total = kept.of(OF_ALL)
    assert total is not None
    assert total.rate_in.points(1, 1) == [3.0]
    assert kept.lines == 4 + 5 + 4
    kept.add(2, [one("a", "other")], START_MS + 7000)
    assert kept.of("b") is None
    found = kept.of("a")
    assert found is not None
    assert list(found.lag) == ["other"]
    assert found.oldest.points(1, 2) == [0.0, 7.0]
    assert kept.lines == 4 + 5


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_LINES", 50)
    kept = LastHour()
    for slot in range(20):
        kept.add(slot, [one(f"q{number}", *"abc") for number in range(slot, slot + 30)], START_MS)
        assert kept.lines <= 50
    counted = sum(lines.count for name in (OF_ALL, *(f"q{n}" for n in range(60))) if (lines := kept.of(name)))
    assert counted == kept.lines


def test_the_sampler_keeps_what_it_saw_when_a_look_fails(tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    folder = tmp_path / "queues"
    folder.mkdir()
    sampler = Sampler(str(folder), clock=clock)
    sampler.look()
    assert sampler.snapshot.problem == ""
    folder.rmdir()
    sampler.look()
    assert (sampler.snapshot.number, bool(sampler.snapshot.problem)) == (2, True)
    sampler.stop()


def test_one_check_at_a_time_and_then_the_next() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(directory: str, queue: str) -> VerifyReport:
        begun.set()
        assert may_end.wait(PATIENCE)
        raise OSError("gone")

    checker = Checker("nowhere", ManualClock(START_MS), check=slow)
    assert checker.start("a")
    assert begun.wait(PATIENCE)
    assert not checker.start("b")
    assert checker.state() == {"running": "a", "results": []}
    may_end.set()
    ended(checker)
    assert checker.state()["results"][0]["error"] == "gone"
    assert checker.start("b")
    ended(checker)
    assert [result["queue"] for result in checker.state()["results"]] == ["a", "b"]


def test_a_check_that_fails_in_a_new_way_does_not_block_the_next() -> None:
    def wrong(directory: str, queue: str) -> VerifyReport:
        raise RuntimeError("a mistake")

    checker = Checker("nowhere", ManualClock(START_MS), check=wrong)
    assert checker.start("a")
    ended(checker)
    assert "a mistake" in checker.state()["results"][0]["error"]
    assert checker.start("a")
    ended(checker)


def test_damage_is_in_the_result(queues: Path) -> None:
    segment = next(queues.glob("orders.*.segment"))
    data = bytearray(segment.read_bytes())
    data[data.index(b"order 3")] ^= 1
    segment.write_bytes(data)
    checker = Checker(str(queues), ManualClock(START_MS), check=verify)
    assert checker.start("orders")
    ended(checker)
    (result,) = checker.state()["results"]
    assert not result["ok"]
    assert result["damages"] == len(result["damage"]) > 0


def test_a_work_queue_with_very_many_jobs_is_not_followed(queues: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    sampler = Sampler(str(queues), clock=clock)
    sampler.look()
    seen = views.Views(str(queues), sampler, clock, show_data=True)
    tubes, newest = seen.tubes("work"), seen.newest("work")
    assert tubes is not None
    assert newest is not None
    assert (len(tubes["tubes"]), len(newest["items"])) == (1, 5)
    monkeypatch.setattr(views, "MOST_RECORDS", 3)
    tubes, newest = seen.tubes("work"), seen.newest("work")
    assert tubes is not None
    assert newest is not None
    assert (tubes["tubes"], newest["items"]) == ([], [])
    assert "kestrelpy jobs" in tubes["reason"]
    assert "kestrelpy jobs" in newest["reason"]
    sampler.stop()


def ended(checker: Checker) -> None:
    """Wait for the thread of the check."""
    for thread in threading.enumerate():
        if thread.name == "kestrelpy-verify":
            thread.join(PATIENCE)
    assert checker.state()["running"] == ""


def test_addresses() -> None:
    assert parse_listen("[::1]:80") == ("::1", 80)
    assert parse_listen("localhost:0") == ("localhost", 0)
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "localhost.example", "")))


def test_changes_without_a_token_are_no_app(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        make_app(str(tmp_path), Sampler(str(tmp_path)), allow_changes=True)


def test_the_page_makes_no_markup_of_text_and_has_nothing_inline() -> None:
    folder = ROOT / "kestrelpy" / "dashboard" / "static"
    page, *scripts = ((folder / name).read_text("utf-8") for name in ("index.html", "dashboard.js", "charts.js"))
    assert found_in(page, *scripts) == []
    for fault in ('<p onclick="x()">', "<p style='x'>", "<script>x</script>", '<img src="//cdn.example/x">'):
        assert found_in(page + fault) != []
    for fault in ("p.innerHTML = x", "document.write(x)", "eval(x)", "p.insertAdjacentHTML(x)", "new Function(x)"):
        assert found_in(page, fault) != []


def found_in(page: str, *scripts: str) -> list[str]:
    """What must not be in the page, or in its scripts."""
    inline = r"<[^>]*\s(?:on\w+|style)\s*=[^>]*>|<script(?![^>]*\ssrc=)[^>]*>|<style[^>]*>"
    elsewhere = r"(?:src|href)=\"(?:https?:)?//[^\"]*"
    made = r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|srcdoc|DOMParser)\b|new Function"
    return re.findall(f"{inline}|{elsewhere}", page) + [each for script in scripts for each in re.findall(made, script)]
