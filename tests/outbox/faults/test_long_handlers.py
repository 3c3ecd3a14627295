"""A handler that takes longer than the lease: it is renewed, and nobody else runs the job."""

from __future__ import annotations

import threading

import pytest

from kestrelpy.outbox.outbox import Outbox
from tests.support.patience import until

LEASE = 1.5


@pytest.mark.parametrize("transactional", [False, True])
def test_a_lease_is_renewed_as_long_as_the_handler_runs(database_url: str, transactional: bool) -> None:
    begun: list[str] = []
    ended = threading.Event()
    outboxes = [Outbox(database_url, lease=LEASE, backoff=0.0) for _ in range(2)]
    for number, outbox in enumerate(outboxes):

        def handle(name: str, *_: object, number: int = number) -> None:
            begun.append(f"{name} by {number}")
            if name == "long":
                ended.wait(2.5 * LEASE)
                ended.set()

        outbox.add_consumer("q", handle, transactional=transactional)
    try:
        outboxes[0].create_tables()
        with outboxes[0].begin() as connection:
            job = outboxes[0].put(connection, "q", "long")
        for outbox in outboxes:
            outbox.start(threads=2, poll_interval=0.1, retry_interval=0.01)
        until(ended.is_set)
        until(lambda: outboxes[1].get(job.id).status == "done")
        assert len(begun) == 1, begun
        assert outboxes[1].get(job.id).tries == 1
    finally:
        for outbox in outboxes:
            outbox.close()
