"""Work queues for the outbox: the fixtures of ``tests.outbox``, with a work queue in the place of a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.outbox import Outbox
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue
from tests.outbox.journal.looks import check


@pytest.fixture
def queue(tmp_path: Path, clock: ManualClock) -> Iterator[WorkQueue]:
    """An empty one, with the clock of the test; closed at the end."""
    with WorkQueue(tmp_path / "work", clock=clock) as made:
        yield made


@pytest.fixture
def make_outbox(queue: WorkQueue, clock: ManualClock) -> Iterator[Callable[..., Outbox]]:
    """``make_outbox(bind, **options)``: with the queues ``mail`` and ``bills``, on ``queue`` and the manual clock
    unless these are given; checked and closed at the end of the test. A work queue has one outbox at a time, so the one
    that was made before is closed.
    """
    made: list[Outbox] = []

    def make(bind: Any = queue, **options: Any) -> Outbox:
        for before in made:
            before.close()
        made.append(Outbox(bind, **{"clock": clock, **options}))
        made[-1].create_tables()
        for name in ("mail", "bills"):
            made[-1].queue(name)
        return made[-1]

    yield make
    for outbox in made[-1:]:
        check(outbox)
        outbox.close()
