"""The index of failed jobs, against a list of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.outbox.failed_jobs import FailedJob, FailedJobs
from kestrelpy.outbox.journal_body import DEAD, ERROR, LAPSED, STATUSES

SMALL = st.integers(-2, 5)
JOBS = st.builds(
    FailedJob, st.integers(1, 12), st.sampled_from("ab"), st.sampled_from([ERROR, ERROR, DEAD, LAPSED]), *[SMALL] * 3
)


@given(st.lists(JOBS | st.integers(1, 12), max_size=30), SMALL, st.integers(0, 5))
def test_it_is_a_list_of_jobs(steps: list[FailedJob | int], at: int, most: int) -> None:
    index, jobs = FailedJobs(), dict[int, FailedJob]()
    for step in steps:
        if isinstance(step, int):
            index.discard(step)
            jobs.pop(step, None)
        else:
            index.add(step)
            jobs[step.id] = step
        index._check()
    for queue in ("a", "b", "c"):
        errors = sorted((job.due, job.id) for job in jobs.values() if (job.queue, job.status) == (queue, ERROR))
        assert index.due(queue, at, most) == [each for each in errors if each[0] <= at][:most]
        assert index.next_due(queue) == (errors[0][0] if errors else None)
        assert index.next_due(queue, at) == next((due for due, _ in errors if due > at), None)
        dead = {job.id for job in jobs.values() if (job.queue, job.status) == (queue, DEAD) and job.finished_ms <= at}
        assert set(index.dead_until(queue, at)) == dead
        assert {job.id for job in index.lapsed([queue])} == {
            job.id for job in jobs.values() if (job.queue, job.status) == (queue, LAPSED)
        }
    for which in (None, "a", "c"):
        failed = [job for job in jobs.values() if job.status != LAPSED and which in (None, job.queue)]
        assert list(index.oldest_first(which)) == [
            job.id for job in sorted(failed, key=lambda job: (job.first_error_ms, job.id))
        ]
    assert index.count_until(at) == sum(job.status != LAPSED and job.first_error_ms <= at for job in jobs.values())
    assert index.counts() == Counter((job.queue, STATUSES[job.status]) for job in jobs.values())
    assert [index.get(job_id) for job_id in range(1, 13)] == [jobs.get(job_id) for job_id in range(1, 13)]
