"""A work queue whose records are damaged is repaired: which jobs are in doubt, and no job's id is given out again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kestrelpy import CorruptJournal, repair, scan, verify
from kestrelpy.work import WorkQueue, doubts, records

NAME = "work"
pytestmark = pytest.mark.usefixtures("quiet")


def fill(folder: Path) -> None:
    """Five jobs; job 2 is buried, and job 3 deleted."""
    with WorkQueue(folder, NAME) as queue:
        for number in range(1, 6):
            queue.put(b"job %d" % number * 20)
        with queue.session() as session:
            session.reserve_job(2).bury()
        queue.delete(3)
    assert not verify(folder, NAME).damage


def hit_record(folder: Path, kind: int, job_id: int) -> int:
    """Damage the first record of that kind about that job; returns the id of the record."""
    for record in scan(folder, NAME):
        if record.data[0] == kind and records.job_of(record.data) == job_id:
            (path,) = folder.glob(f"{NAME}.*.segment")
            data = path.read_bytes()
            at = data.index(record.data)
            path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
            return record.id
    raise AssertionError("there is no such record")


def test_a_job_whose_record_is_lost(tmp_path: Path) -> None:
    fill(tmp_path)
    lost = hit_record(tmp_path, records.PUT, 4)
    with pytest.raises(CorruptJournal):
        WorkQueue(tmp_path, NAME)
    said = repair(tmp_path, NAME, dry_run=True)
    report = repair(tmp_path, NAME)
    assert said.jobs == report.jobs
    assert report.lost_ids == ((lost, lost),)
    assert report.jobs is not None
    assert report.jobs.missing == ((4, 4),)
    assert report.jobs.doubtful == ((1, 1),)  # job 2 has a later record
    assert verify(tmp_path, NAME).ok
    with WorkQueue(tmp_path, NAME) as queue:
        assert sorted(job.id for job in queue.jobs()) == [1, 2, 5]
        assert queue.peek(2).body == b"job 2" * 20


def fill_and_die(folder: Path) -> None:
    """Five jobs, of which the first is deleted; nothing was written after that. The last put is lost."""
    with WorkQueue(folder.parent / "alive", NAME, sync="always") as queue:
        for number in range(1, 6):
            queue.put(b"job %d" % number * 20)
        queue.delete(1)
        shutil.copytree(folder.parent / "alive", folder)
    hit_record(folder, records.PUT, 5)


def test_m7_no_id_of_a_lost_job_is_given_out_again(tmp_path: Path) -> None:
    fill_and_die(tmp_path / "dead")
    report = repair(tmp_path / "dead", NAME)
    assert report.jobs is not None
    assert report.jobs.missing == ((5, 5),)
    with WorkQueue(tmp_path / "dead", NAME) as queue:
        assert queue.put(b"new") > 5


def test_records_that_are_committed_are_no_loss(tmp_path: Path) -> None:
    with WorkQueue(tmp_path, NAME) as queue:
        queue.put(b"done" * 30)
        queue.put(b"here" * 30)
        queue.delete(1)
    fill_more(tmp_path)
    report = repair(tmp_path, NAME)
    assert report.ok
    assert report.jobs is None


def fill_more(folder: Path) -> None:
    with WorkQueue(folder, NAME) as queue:
        queue.checkpoint()


@contextmanager
def no_totals() -> Iterator[None]:
    real = doubts.jobs_in_doubt

    def without(*args: object) -> object:
        missing, doubtful, _ = real(*args)  # type: ignore[arg-type]
        return missing, doubtful, records.encode_totals(records.Totals(0, 0, 0, 0))

    with mock.patch.object(doubts, "jobs_in_doubt", without):
        yield


def test_a_repair_that_forgets_the_last_id_is_caught(tmp_path: Path) -> None:
    fill_and_die(tmp_path / "dead")
    with no_totals():
        repair(tmp_path / "dead", NAME)
    with WorkQueue(tmp_path / "dead", NAME) as queue:
        assert queue.put(b"new") == 5  # as the first test would see
