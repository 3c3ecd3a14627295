"""What the outbox is to reach. Costs are times, as in ``bench/goals.py``."""

from __future__ import annotations

from collections.abc import Iterator

from bench.goals import Figure, Goal
from bench.outbox.crowded import ALONE, beside
from bench.outbox.draining import A_SECOND, AN_ITEM
from bench.outbox.peers.floor import PostgresFloor
from bench.outbox.peers.ours import OnJournal, OnPostgres, OnSqlite
from bench.outbox.peers.with_huey import PostgresHuey, SqliteHuey
from bench.outbox.peers.with_procrastinate import Procrastinate
from bench.outbox.putting import A_JOB, BY_DRIVER, BY_SQLALCHEMY, TWO

OURS = OnPostgres.name
POLLS_A_SECOND = 0.25
"""One look in five seconds, and one more at an end of the time that is measured."""


def _puts() -> Iterator[Goal]:
    for workload, text in (("put", "PostgreSQL"), ("put-sqlite", "SQLite")):
        for phase in (BY_DRIVER, BY_SQLALCHEMY):
            over, under = Figure(workload, OURS, phase), Figure(workload, TWO, phase)
            yield Goal(f"{text}, {phase}: put over a second INSERT", over, under, at_most=1.3)
    for workload, text in (("batch", "PostgreSQL"), ("batch-sqlite", "SQLite")):
        over, under = Figure(workload, "floor", A_JOB), Figure(workload, OURS, A_JOB)
        yield Goal(f"{text}: a batch INSERT's time over put_many(1000)'s", over, under, at_least=0.6)


def _draining() -> Iterator[Goal]:
    ours = Figure("jobs", OURS, AN_ITEM)
    for peer, times in ((Procrastinate, 8.0), (PostgresHuey, 3.0), (PostgresFloor, 0.6)):
        over = Figure("jobs", peer.name, AN_ITEM)
        yield Goal(f"PostgreSQL, 4 threads: {peer.name}'s time over ours", over, ours, at_least=times)
    yield Goal("PostgreSQL, 4 threads: jobs/s", Figure("jobs", OURS, A_SECOND), at_least=3_000)
    huey = Figure("sqlite", SqliteHuey.name, AN_ITEM)
    for name, text, times, least in (
        (OnSqlite.name, "SQLite, 4 threads", 5.0, 4_000),
        (OnJournal.name, "journal store", 10.0, 30_000),
    ):
        yield Goal(f"{text}: huey's time over ours", huey, Figure("sqlite", name, AN_ITEM), at_least=times)
        yield Goal(f"{text}: jobs/s", Figure("sqlite", name, A_SECOND), at_least=least)
    yield Goal("relay: items/s", Figure("relay", OURS, A_SECOND), at_least=20_000)


def _waiting() -> Iterator[Goal]:
    for workload, text, phase, most in (
        ("latency", "PostgreSQL", "p50", 5),
        ("latency", "PostgreSQL", "p99", 25),
        ("latency-sqlite", "SQLite", "p99", 30),
    ):
        figure = Figure(workload, OURS, f"commit to start, {phase}")
        yield Goal(f"{text}: ms from commit to start, {phase}", figure, at_most=most)
    for name in (OURS, f"{OnSqlite.name} SQLite"):
        yield Goal(f"idle, {name}: % of a core", Figure("idle", name, "% of a core, consumer"), at_most=1)
    most_frequent = Figure("idle", OURS, "of these the most frequent one/s")
    yield Goal("idle: statements/s of the most frequent one: polls", most_frequent, at_most=POLLS_A_SECOND)


def _crowded() -> Iterator[Goal]:
    for workload, text in (("claims", "PostgreSQL"), ("claims-sqlite", "SQLite")):
        for what in ("ready", "done", "error"):
            over, under = Figure(workload, OURS, beside(what)), Figure(workload, OURS, ALONE)
            yield Goal(f"{text}: a claim beside {beside(what)}, over one alone", over, under, at_most=1.5)


GOALS: tuple[Goal, ...] = (*_puts(), *_draining(), *_waiting(), *_crowded())
