"""The form of what the server answers: what beanstalkd 1.12 said to the same commands, byte for byte."""

from __future__ import annotations

from kestrelpy.server.beanstalk import replies
from kestrelpy.work import JobStats, TubeStats

JOB = JobStats(
    id=7,
    tube="null",
    state="delayed",
    priority=1,
    age=3.9,
    delay=2.0,
    ttr=3.0,
    time_left=1.99,
    reserves=4,
    timeouts=5,
    releases=6,
    buries=8,
    kicks=9,
    body_bytes=4,
    key=None,
    body=b"body",
)


def test_a_job() -> None:
    assert replies.reserved(3, b"a\r\nb") == b"RESERVED 3 4\r\na\r\nb\r\n"
    assert replies.found(3, b"") == b"FOUND 3 0\r\n\r\n"


def test_a_list() -> None:
    assert replies.names(["default", "b"]) == b"OK 18\r\n---\n- default\n- b\n\r\n"


def test_the_figures_of_a_job() -> None:
    assert replies.stats_job(JOB) == (
        b"OK 142\r\n---\nid: 7\ntube: null\nstate: delayed\npri: 1\nage: 3\ndelay: 2\nttr: 3\ntime-left: 1\nfile: 0\n"
        b"reserves: 4\ntimeouts: 5\nreleases: 6\nburies: 8\nkicks: 9\n\r\n"
    )


def test_only_who_waits_for_time_has_time_left() -> None:
    for state, left in (("ready", b"0"), ("buried", b"0"), ("reserved", b"1"), ("delayed", b"1")):
        assert b"\ntime-left: " + left + b"\n" in replies.stats_job(JOB._replace(state=state))


def test_the_figures_of_a_tube() -> None:
    tube = TubeStats(
        name="default",
        urgent=1,
        ready=2,
        reserved=3,
        delayed=4,
        buried=5,
        total_jobs=6,
        using=7,
        watching=8,
        waiting=9,
        deletes=10,
        pauses=11,
        pause=12.5,
        pause_left=0.25,
    )
    assert replies.stats_tube(tube) == (
        b"OK 268\r\n---\nname: default\ncurrent-jobs-urgent: 1\ncurrent-jobs-ready: 2\ncurrent-jobs-reserved: 3\n"
        b"current-jobs-delayed: 4\ncurrent-jobs-buried: 5\ntotal-jobs: 6\ncurrent-using: 7\ncurrent-watching: 8\n"
        b"current-waiting: 9\ncmd-delete: 10\ncmd-pause-tube: 11\npause: 12\npause-time-left: 0\n\r\n"
    )


def test_every_length_is_that_of_the_body() -> None:
    for reply in (replies.names(["a" * 200]), replies.stats_job(JOB)):
        head, body = reply.split(b"\r\n", 1)
        assert int(head.split()[1]) == len(body) - 2
