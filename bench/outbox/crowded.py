"""Claims beside a million rows that are none of the claim's business, and beside a transaction that stays open."""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_left
from functools import partial
from pathlib import Path

import psycopg

from bench.measure import Contender, Figures, Workload
from bench.outbox.consumer import Consumer
from bench.outbox.peers import floor, ours
from bench.outbox.peers.base import Peer
from bench.outbox.peers.with_huey import PostgresHuey
from bench.outbox.peers.with_procrastinate import Procrastinate
from bench.outbox.servers import Cluster, programs

ALONE = "1,000 alone"
JOBS, CROWD = 1_000, 1_000_000
CLAIMS = 10
"""Claims that are timed, one after the other; each takes what the one before has left."""
UNTIMED = 6
"""Claims before these, of jobs of their own: after the fifth time psycopg prepares a statement."""
UNSYNCED = {"synchronous_commit": "off"}
"""Claims are timed without the sync of their commit, which takes longer than they do, and varies."""

RATE, PUTS_A_SECOND = 1_000, 20
AROUND_SECONDS = 15.0
"""Before the transaction begins and after it has ended."""
SLICE_SECONDS = 5.0
SLICE = "seconds a slice"
STARTED, CLAIM, WAIT = "jobs/s", "ms a claim", "ms from commit to start, p50"
STATISTICS = {"shared_preload_libraries": "pg_stat_statements"}
CLAIM_TIMES = """
    SELECT coalesce(sum(calls), 0), coalesce(sum(total_exec_time), 0) FROM pg_stat_statements
    WHERE query ~* 'skip locked|fetch_job' AND query !~* 'pg_stat_statements'
"""


def beside(what: str) -> str:
    """The name of a figure."""
    return f"{CROWD:,} {what}"


def claims(kind: type[Peer], where: str, crowd: str | None, scale: float) -> list[float]:
    """Milliseconds of each claim."""
    peer = kind(where)
    count = max(1, int(CROWD * scale))
    try:
        peer.create()
        peer.fill(range(UNTIMED * peer.claims))
        for _ in range(UNTIMED):
            peer.claim()
        if crowd is not None:  # before the jobs: it is in front of them, where the order is by time or id
            peer.crowd(crowd, count)
        peer.fill(range(JOBS))
        if where.startswith("postgresql:"):  # as autovacuum would have done within a minute
            with psycopg.connect(where, autocommit=True) as connection:
                connection.execute("VACUUM ANALYZE")
        times = []
        for _ in range(CLAIMS):
            began = time.perf_counter()
            found = peer.claim()
            times.append((time.perf_counter() - began) * 1e3)
            if found != peer.claims:
                raise RuntimeError(f"{peer.name}: a claim beside {crowd} has taken {found}, not {peer.claims}")
        return times
    finally:
        peer.close()


def claims_on_postgres(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """Each crowd in a cluster of its own."""
    figures: Figures = {}
    for crowd in (None, *kind.crowds):
        mine = folder / str(crowd).replace(" ", "-")
        mine.mkdir()
        with Cluster(mine, UNSYNCED) as cluster:
            figures[ALONE if crowd is None else beside(crowd)] = claims(kind, cluster.url, crowd, scale)
    return figures


def claims_in_files(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """Each crowd in a file of its own."""
    return {
        ALONE if crowd is None else beside(crowd): claims(kind, str(folder / f"{crowd}.db"), crowd, scale)
        for crowd in (None, *kind.crowds)
    }


# -- a transaction that stays open -----------------------------------------------------------------------------------


class _Load(threading.Thread):
    """Puts jobs at a steady rate; ``puts``: number of the first job of each put after it, and when it was committed."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(daemon=True)
        self.puts: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._peer = peer

    def run(self) -> None:
        each = RATE // PUTS_A_SECOND
        began, number = time.monotonic(), 0
        while not self._ended.wait(max(0.0, began + number / RATE - time.monotonic())):
            self._peer.fill(range(number, number + each))
            number += each
            self.puts.append((number, time.monotonic_ns()))

    def end(self) -> None:
        """Put no more."""
        self._ended.set()
        if self.is_alive():
            self.join()


class _ClaimTimes:
    """What the server has counted of claims since the last look; nothing without pg_stat_statements."""

    def __init__(self, connection: psycopg.Connection[tuple[float, float]]) -> None:
        self._connection = connection
        self._last = (0.0, 0.0)
        try:
            connection.execute("CREATE EXTENSION pg_stat_statements")
            self.is_there = True
        except psycopg.Error:
            self.is_there = False

    def milliseconds(self) -> float | None:
        """Of a claim."""
        row = self._connection.execute(CLAIM_TIMES).fetchone() if self.is_there else None
        if row is None:
            return None
        calls, spent = float(row[0]) - self._last[0], float(row[1]) - self._last[1]
        self._last = (float(row[0]), float(row[1]))
        return spent / calls if calls else None


def _settings() -> dict[str, str]:
    """pg_stat_statements, if it is installed."""
    there = (programs().parent / "lib" / "pg_stat_statements.so").exists()
    return STATISTICS if there else {}


def held(kind: type[Peer], minutes: float, folder: Path, scale: float) -> Figures:
    """Jobs at a steady rate: some seconds, then with a snapshot held open, then without it again."""
    around = max(0.6, AROUND_SECONDS * scale)
    parts = {"before": around, "held": max(0.6, minutes * 60 * scale), "after": around}
    length = min(SLICE_SECONDS, around / 3)
    slices: list[tuple[str, int, int, float | None]] = []
    with Cluster(folder, _settings()) as cluster:
        peer = kind(cluster.url)
        peer.create()
        load = _Load(peer)
        try:
            with (
                Consumer(kind, cluster.url) as consumer,
                psycopg.connect(cluster.url, autocommit=True) as looking,
                psycopg.connect(cluster.url) as holding,
            ):
                claimed = _ClaimTimes(looking)
                consumer.start()
                load.start()
                time.sleep(min(1.0, around))  # not in the figures: the first jobs find nothing prepared
                claimed.milliseconds()
                for part, seconds in parts.items():
                    if part == "held":
                        holding.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                        holding.execute("SELECT count(*) FROM pg_class")
                    elif part == "after":
                        holding.rollback()
                    for _ in range(max(1, round(seconds / length))):
                        began = time.monotonic_ns()
                        time.sleep(length)
                        slices.append((part, began, time.monotonic_ns(), claimed.milliseconds()))
                load.end()
                starts = consumer.stop().starts
        finally:
            load.end()
            peer.close()
    return {**series(slices, starts, load.puts), SLICE: length}


def series(
    slices: list[tuple[str, int, int, float | None]], starts: list[tuple[int, int]], puts: list[tuple[int, int]]
) -> Figures:
    """For each part, in the order of time: what was seen in each of its slices."""
    figures: dict[str, list[float]] = {}
    ends = [after for after, _ in puts]
    ordered = sorted(starts, key=lambda start: start[1])
    instants = [at for _, at in ordered]
    for part, began, ended, claim in slices:
        mine = ordered[bisect_left(instants, began) : bisect_left(instants, ended)]
        figures.setdefault(f"{part}: {STARTED}", []).append(len(mine) / (ended - began) * 1e9)
        waits = [(at - puts[bisect_left(ends, number + 1)][1]) / 1e6 for number, at in mine if number < ends[-1]]
        if waits:
            figures.setdefault(f"{part}: {WAIT}", []).append(statistics.median(waits))
        if claim is not None:
            figures.setdefault(f"{part}: {CLAIM}", []).append(claim)
    order = (STARTED, CLAIM, WAIT)
    return {name: figures[name] for name in sorted(figures, key=lambda name: order.index(name.partition(": ")[2]))}


ON_POSTGRES: tuple[type[Peer], ...] = (
    ours.OnPostgres,
    floor.PostgresFloor,
    floor.PostgresFloorOne,
    Procrastinate,
    PostgresHuey,
)


def workloads(minutes: float) -> tuple[Workload, ...]:
    """These; a transaction is held open for so many minutes."""
    return (
        Workload(
            "claims",
            "a claim of 100 jobs (ours, the floor) or of one, in PostgreSQL, commits unsynced; rounds are claims",
            "ms",
            tuple(Contender(kind.name, partial(claims_on_postgres, kind)) for kind in ON_POSTGRES),
            max_repeats=1,
            warm_up=False,
        ),
        Workload(
            "claims-sqlite",
            "a claim of 100 jobs in a SQLite file; rounds are claims",
            "ms",
            tuple(Contender(kind.name, partial(claims_in_files, kind)) for kind in (ours.OnSqlite, floor.SqliteFloor)),
            max_repeats=1,
            warm_up=False,
        ),
        Workload(
            "held",
            f"1,000 jobs/s beside a transaction held open for {minutes:g} min; rounds are slices of 5 s",
            "",
            tuple(Contender(kind.name, partial(held, kind, minutes)) for kind in ON_POSTGRES),
            max_repeats=1,
            warm_up=False,
        ),
    )
