"""``kestrelpy repair``, and what ``kestrelpy verify`` says of inboxes and archives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.cli import main


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """A queue with three items, of which the second is damaged."""
    folder = tmp_path / "queues"
    with JournaledQueue(folder, "jobs") as queue:
        for data in (b"one", b"two", b"three"):
            queue.put(data)
    (segment,) = folder.glob("jobs.*.segment")
    segment.write_bytes(segment.read_bytes().replace(b"two", b"2wo"))
    return folder


def test_m5_repair(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(spoilt), "jobs"]) == 1
    capsys.readouterr()
    assert main(["repair", str(spoilt), "jobs", "--dry-run"]) == 1
    said = capsys.readouterr().out
    assert "lost      items 2\n" in said
    assert "DAMAGED in 1 place; nothing was written" in said
    assert main(["repair", str(spoilt), "jobs"]) == 0
    done = capsys.readouterr().out
    assert done.splitlines()[:-1] == said.splitlines()[:-1]
    assert done.endswith("repaired in 1 place\n")
    assert "kept      " in done
    assert main(["repair", str(spoilt), "jobs"]) == 0
    assert capsys.readouterr().out == "queue     jobs\nno damage\n"
    assert main(["verify", str(spoilt), "jobs"]) == 0


def test_as_json(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(spoilt), "jobs", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ok"], facts["lost_ids"], facts["losses"][0]["first_id"]) == (False, [[2, 2]], 2)


def test_what_is_wrong_is_one_line(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", str(spoilt), "other"]) == 1
    assert "no queue 'other'" in capsys.readouterr().err
    with JournaledQueue(spoilt, "jobs", on_corruption="quarantine"):
        assert main(["repair", str(spoilt), "jobs"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "kestrelpy repair: " in error


def test_verify_of_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, archive = tmp_path / "q", tmp_path / "archive"
    with JournaledQueue(folder, "jobs", segment_bytes=4096, archive_dir=archive) as queue:
        for _ in range(9):
            queue.put(b"x" * 1000)
        queue.commit_many(queue.get_many(8))
        queue.checkpoint(durable=True)
    assert main(["verify", str(folder), "jobs", "--archive-dir", str(archive)]) == 0
    assert "archive   2, 6 items" in capsys.readouterr().out
    assert main(["verify", str(archive), "jobs"]) == 0
    assert "kind      archive\n" in capsys.readouterr().out
