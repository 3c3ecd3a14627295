"""A consumer that mostly waits: how soon it starts a job, and what it costs while there is none."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.measure import Contender, Figures, Workload, percentile
from bench.outbox.consumer import Consumer
from bench.outbox.peers import floor, ours
from bench.outbox.peers.base import Peer
from bench.outbox.peers.with_huey import PostgresHuey, SqliteHuey
from bench.outbox.peers.with_procrastinate import Procrastinate
from bench.outbox.servers import Cluster

SAMPLES = 200
SHORTEST, LONGEST = 0.02, 0.18
"""Seconds between two puts."""
SETTLE_SECONDS, IDLE_SECONDS = 5.0, 30.0
LOGGED = {"log_statement": "all", "log_line_prefix": ""}
STATEMENT = re.compile(r"^LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)$", re.MULTILINE)
"""All lines of it: those after the first one begin with a tab in the log."""
TRANSACTION = re.compile(r"^(BEGIN|COMMIT|ROLLBACK)\b", re.IGNORECASE)
SQLITE = " SQLite"

ON_POSTGRES: tuple[type[Peer], ...] = (ours.OnPostgres, floor.PostgresFloor, Procrastinate, PostgresHuey)
ON_SQLITE: tuple[type[Peer], ...] = (ours.OnSqlite, floor.SqliteFloor, SqliteHuey)


def latency(kind: type[Peer], where: str, scale: float) -> Figures:
    """One job at a time."""
    count = max(5, int(SAMPLES * scale))
    gaps = random.Random(1)
    calls, returns = [], []
    peer = kind(where)
    peer.create()
    try:
        with Consumer(kind, where, count=count) as consumer:
            consumer.start()
            time.sleep(min(1.0, scale * 100))  # whatever it does at its start is over
            for number in range(count):
                time.sleep(gaps.uniform(SHORTEST, LONGEST))
                calls.append(time.monotonic_ns())
                peer.put(number)
                returns.append(time.monotonic_ns())
            starts = dict(consumer.result().starts)
    finally:
        peer.close()
    after = [(starts[number] - returns[number]) / 1e6 for number in range(count)]
    whole = [(starts[number] - calls[number]) / 1e6 for number in range(count)]
    return {
        "commit to start, p50": percentile(after, 0.5),
        "commit to start, p99": percentile(after, 0.99),
        "call of the put to start, p50": percentile(whole, 0.5),
        "call of the put to start, p99": percentile(whole, 0.99),
    }


def _used(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def statements(log: str) -> tuple[int, int]:
    """How many statements a log has, and how many of the most frequent one; BEGIN and COMMIT are not that one."""
    found = Counter(text.strip() for text in STATEMENT.findall(log))
    others = [count for text, count in found.items() if not TRANSACTION.match(text)]
    return found.total(), max(others, default=0)


def idle(kind: type[Peer], where: str, scale: float, cluster: Cluster | None) -> Figures:
    """Nothing to do."""
    peer = kind(where)
    peer.create()
    peer.close()
    with Consumer(kind, where) as consumer:
        consumer.start()
        time.sleep(SETTLE_SECONDS * min(1.0, scale * 10))
        log_from = cluster.log.stat().st_size if cluster is not None else 0
        server = cluster.processor_seconds if cluster is not None else 0.0
        used, began = _used(consumer.pid), time.monotonic()
        time.sleep(max(0.5, IDLE_SECONDS * scale))
        seconds = time.monotonic() - began
        used = _used(consumer.pid) - used
        server = cluster.processor_seconds - server if cluster is not None else 0.0
        log = cluster.log.read_bytes()[log_from:].decode("utf-8", "replace") if cluster is not None else ""
        consumer.stop()
    figures: Figures = {"% of a core, consumer": used / seconds * 100}
    if cluster is not None:
        total, most = statements(log)
        figures["% of a core, server"] = server / seconds * 100
        figures["statements/s"] = total / seconds
        figures["of these the most frequent one/s"] = most / seconds
    return figures


def latency_on_postgres(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """With a cluster of its own."""
    with Cluster(folder) as cluster:
        return latency(kind, cluster.url, scale)


def latency_in_file(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """With a file."""
    return latency(kind, str(folder / "jobs.db"), scale)


def idle_on_postgres(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """With a cluster that logs all statements."""
    with Cluster(folder, LOGGED) as cluster:
        return idle(kind, cluster.url, scale, cluster)


def idle_in_file(kind: type[Peer], folder: Path, scale: float) -> Figures:
    """With a file."""
    return idle(kind, str(folder / "jobs.db"), scale, None)


def _each(kinds: Sequence[type[Peer]], work: object, suffix: str = "") -> tuple[Contender, ...]:
    assert callable(work)
    return tuple(Contender(kind.name + suffix, partial(work, kind)) for kind in kinds)


WORKLOADS = (
    Workload(
        "latency",
        "one job at a time in PostgreSQL",
        "ms",
        _each(ON_POSTGRES, latency_on_postgres),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "latency-sqlite",
        "one job at a time in a SQLite file",
        "ms",
        _each(ON_SQLITE, latency_in_file),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "idle",
        "a consumer with nothing to do",
        "",
        (*_each(ON_POSTGRES, idle_on_postgres), *_each(ON_SQLITE, idle_in_file, SQLITE)),
        max_repeats=1,
        warm_up=False,
    ),
)
