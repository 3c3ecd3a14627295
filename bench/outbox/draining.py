"""Jobs that wait already, through four threads: PostgreSQL, SQLite, the journal store, Redis; and the relay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.measure import Contender, Figures, Workload
from bench.outbox.consumer import Consumer
from bench.outbox.peers import floor, ours, relays
from bench.outbox.peers.base import Peer
from bench.outbox.peers.on_redis import Dramatiq, Rq, RqWithoutForks
from bench.outbox.peers.with_huey import PostgresHuey, SqliteHuey
from bench.outbox.peers.with_procrastinate import Procrastinate
from bench.outbox.servers import Cluster, Redis

JOBS = 10_000
RELAYED = 100_000
RQ_SHARE = 0.2
"""rq runs so many of them: it takes a fifth of a minute for a thousand."""
SYNCS = ("always", "everysec")
AN_ITEM, A_SECOND = "us a job", "jobs/s"


def drain(peer: type[Peer], where: str, count: int, server: Cluster | Redis | None) -> Figures:
    """Run so many jobs, which are put first."""
    with Consumer(peer, where, fill=count, count=count) as consumer:
        before = server.processor_seconds if server is not None else 0.0
        consumer.start()
        ran = consumer.result()
        after = server.processor_seconds if server is not None else 0.0
    if peer.tells_starts and sorted(number for number, _ in ran.starts) != list(range(count)):
        raise RuntimeError(f"{peer.name}: {len(ran.starts)} jobs were run of {count}")
    seconds = (ran.marked_ns - ran.first_ns) / 1e9
    figures: Figures = {
        AN_ITEM: seconds / count * 1e6,
        A_SECOND: count / seconds,
        "us of processor a job, consumer": ran.processor_seconds / count * 1e6,
    }
    if server is not None:
        figures["us of processor a job, server"] = (after - before) / count * 1e6
    return figures


def on_postgres(peer: type[Peer], jobs: int, folder: Path, scale: float) -> Figures:
    """With a cluster of its own."""
    with Cluster(folder) as cluster:
        return drain(peer, cluster.url, max(10, int(jobs * scale)), cluster)


def on_redis(peer: type[Peer], sync: str, share: float, folder: Path, scale: float) -> Figures:
    """With a Redis of its own."""
    with Redis(folder, sync) as redis:
        return drain(peer, redis.url, max(10, int(JOBS * share * scale)), redis)


def in_folder(peer: type[Peer], folder: Path, scale: float) -> Figures:
    """With files, and no server."""
    return drain(peer, str(folder / "jobs.db"), max(10, int(JOBS * scale)), None)


def _all(peers: Sequence[type[Peer]]) -> tuple[Contender, ...]:
    return tuple(Contender(peer.name, partial(on_postgres, peer, JOBS)) for peer in peers)


WORKLOADS = (
    Workload(
        "jobs",
        "10,000 jobs in PostgreSQL, four threads; Redis with appendfsync always and everysec",
        "",
        (
            *_all((ours.OnPostgres, floor.PostgresFloor, floor.PostgresFloorOne, Procrastinate, PostgresHuey)),
            *(
                Contender(f"{peer.name}, {sync}", partial(on_redis, peer, sync, share))
                for peer, share in ((Dramatiq, 1.0), (Rq, RQ_SHARE), (RqWithoutForks, RQ_SHARE))
                for sync in SYNCS
            ),
        ),
        max_repeats=5,
    ),
    Workload(
        "sqlite",
        "10,000 jobs in a SQLite file, four threads; the journal store",
        "",
        tuple(
            Contender(peer.name, partial(in_folder, peer))
            for peer in (ours.OnSqlite, ours.OnJournal, floor.SqliteFloor, floor.SqliteFloorOne, SqliteHuey)
        ),
        max_repeats=5,
    ),
    Workload(
        "relay",
        "100,000 jobs from PostgreSQL into a journaled queue; the floor takes some twice after a crash",
        "",
        tuple(
            Contender(peer.name, partial(on_postgres, peer, RELAYED)) for peer in (relays.OurRelay, relays.FloorRelay)
        ),
        max_repeats=3,
    ),
)
