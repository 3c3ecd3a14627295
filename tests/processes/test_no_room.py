"""No room, at every byte and every page: nothing is left of what is refused, and puts go on when there is room.

``no_room.py`` says what is done. Every run takes the bytes at which something just fits or not, and a sample of all.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes import no_room
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share, takes_long

BYTES = share(150)
PAGES = max(40, share(40))


@takes_long
def test_files_end_at_every_byte(tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(no_room, tmp_path, "bytes", SEED, limit=BYTES)
    tally.add("full disks", counts["rooms"])
    assert counts["rooms"] > 2 * BYTES
    for refused in ("readers refused", "checkpoints refused", "refused"):
        assert counts[refused] > 0, refused


@pytest.fixture
def _tmpfs() -> None:
    reason = no_room.reason_not_available()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.root
@pytest.mark.usefixtures("_tmpfs")
def test_a_file_system_ends_at_every_page(tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(no_room, tmp_path, "pages", SEED, limit=PAGES)
    tally.add("full disks", counts["rooms"])
    assert counts["rooms"] >= 2 * min(PAGES, no_room.PAGES)
    assert counts["readers refused"] > 0
    assert counts["refused"] > 0


def test_a_planted_fault_is_found_by_bytes(tmp_path: Path, tally: Tally) -> None:
    done = run(no_room, tmp_path, "bytes", SEED, limit=1, plant="writes short")
    assert "saved as done and delivered again" in done.stderr
    tally.add("planted faults caught", 1)


@pytest.mark.root
@pytest.mark.usefixtures("_tmpfs")
def test_a_planted_fault_is_found_by_pages(tmp_path: Path, tally: Tally) -> None:
    assert run(no_room, tmp_path, "pages", SEED, limit=40, plant="grows sparse").returncode == -signal.SIGBUS
    tally.add("planted faults caught", 1)
