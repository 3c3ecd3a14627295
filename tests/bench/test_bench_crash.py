"""The comparison of what queues keep: that it runs and counts rightly, not what comes out for others."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.crash import ends, page, rounds
from bench.crash.__main__ import main
from bench.crash.peers import PEERS, Kestrel, Peer
from tests.support.paths import ROOT


def run_in_a_process_of_its_own(*arguments: str) -> dict[str, Any]:
    """It forks; and what others leave to their finalisers is none of this suite's business."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.crash", *arguments, "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize("peer", PEERS, ids=[peer.name for peer in PEERS])
def test_a_kill(peer: type[Peer], tmp_path: Path) -> None:
    if peer.module:
        pytest.importorskip(peer.module, reason=f"{peer.package} is not installed")
    facts = run_in_a_process_of_its_own("--kills", "3", "--cuts", "0", "--only", peer.name, "--dir", str(tmp_path))
    (found,) = facts["peers"]
    counts = found["results"]["kill"]
    assert counts["rounds"] == 3
    assert counts["acknowledged"] > 0, "a kill may come before the first put has returned, but not three times"
    assert found["version"]
    if issubclass(peer, Kestrel):
        assert counts["marked rounds"] == 0
    assert list(tmp_path.iterdir()) == []


def ledger_after(*said: tuple[bytes, int]) -> tuple[rounds.Ledger, Counter[str]]:
    ledger, counts = rounds.Ledger(), Counter[str]()
    for kind, number in said:
        ledger.hear(kind, number, counts)
    return ledger, counts


def test_what_counts_as_what() -> None:
    """Items 1 to 6 are put; 1 is done, 2 is being done, 3 is in hand; 7 is in flight."""
    puts = [(rounds.PUT, number) for number in range(1, 7)]
    work = [(rounds.TAKEN, 1), (rounds.FINISHING, 1), (rounds.DONE, 1)]
    work += [(rounds.TAKEN, 2), (rounds.FINISHING, 2), (rounds.TAKEN, 3)]
    cases: dict[tuple[int, ...], dict[str, int]] = {
        (3, 4, 5, 6): {},
        (2, 3, 4, 5, 6, 7): {},
        (3, 4, 6): {"lost": 1, "holes": 1},
        (4, 5, 6): {"lost": 1, "in hand": 1},
        (1, 3, 4, 5, 6): {"again": 1},
        (3, 4, 4, 5, 6): {"twice": 1},
        (3, 4): {"lost": 2},
        (3, 4, 6, 5): {"disorder": 1},
        (3, 4, 5, 6, 99): {"phantom": 1},
        (): {"lost": 4, "in hand": 1},
    }
    for found, expected in cases.items():
        ledger, counts = ledger_after(*puts, *work)
        ledger.tried.add(7)
        ledger.compare(list(found), True, counts)
        del counts["acknowledged"]
        assert {name: count for name, count in counts.items() if count} == expected, found


def test_items_that_are_not_whole_have_no_number() -> None:
    import random

    data = rounds.payload(5, random.Random(1))
    assert rounds.number_of(data) == 5
    assert rounds.number_of(data[:-1] + bytes([data[-1] ^ 1])) is None
    assert rounds.number_of(data[:9]) is None


class Forgetful(Kestrel):
    """A peer that loses every tenth put, to see that it is seen."""

    name = "forgetful"

    def open(self) -> None:
        super().open()
        self.puts = 0

    def put(self, data: bytes) -> None:
        self.puts += 1
        if self.puts % 10:
            super().put(data)


class Deaf(Kestrel):
    """A peer that does not sync."""

    name = "deaf"

    @classmethod
    def load(cls) -> None:
        from kestrelpy._disk.real import RealFile

        RealFile.sync = lambda self: None  # type: ignore[method-assign]


def counted(peer: type[Peer], end: str, count: int, folder: Path) -> dict[str, int]:
    """Rounds of a peer of this module, in a process of its own."""
    source = """
        import json, sys
        from contextlib import nullcontext
        from pathlib import Path
        from tests.bench import test_bench_crash
        from bench.crash import ends, rounds
        name, end, count, folder = sys.argv[1:]
        peer = getattr(test_bench_crash, name)
        peer.load()
        with nullcontext(ends.Kill(Path(folder))) if end == "kill" else ends.cuts(Path(folder)) as chosen:
            print(json.dumps(rounds.run(peer, chosen, int(count), 1)))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), peer.__name__, end, str(count), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_library_that_loses_items_is_found_out(tmp_path: Path) -> None:
    counts = counted(Forgetful, "kill", 3, tmp_path)
    assert counts["lost"] > 0 < counts["marked rounds"]


def test_a_power_cut_finds_a_missing_sync(tmp_path: Path) -> None:
    if reason := ends.reason_no_cuts():
        pytest.skip(reason)
    assert counted(Deaf, "cut", 4, tmp_path)["lost"] > 0
    good = counted(Kestrel, "cut", 4, tmp_path)
    assert good["acknowledged"] > good["lost"] == good["marked rounds"] == 0


def test_the_page_has_every_library_and_every_column() -> None:
    counts = dict.fromkeys(page.COLUMNS, 0)
    facts = {
        "machine": dict.fromkeys(("system", "python", "sqlite", "cores", "processor", "file_system"), "?"),
        "date": "2026-01-01",
        "settings": {"kills": 1, "cuts": 0, "seed": 1},
        "left_out": {"cut": "mounting a file system needs root"},
        "peers": [
            {"name": peer.name, "version": "1", "settings": peer.settings, "promise": peer.promise, "left_out": ""}
            | {"results": {"kill": counts}}
            for peer in PEERS
        ],
    }
    text = page.page(facts)
    assert "Not done: mounting a file system needs root." in text
    assert all(text.count(peer.name) >= 2 for peer in PEERS)
    assert all(f"| {title} |" in text for title in page.COLUMNS.values())
    assert "not done, mounting a file system needs root" in page.text(facts)


def test_a_library_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "no library of that name" in capsys.readouterr().err
