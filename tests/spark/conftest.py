"""Shipped queues for the tests of reading from a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.ship import Fenced, Ship
from tests.spark.journals import Shipped

SEGMENT_BYTES = 8 << 10


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the store in a folder is; not there yet."""
    return tmp_path / "store"


@pytest.fixture
def ship(folder: Path, place: Path) -> Iterator[Shipped]:
    """``ship(name, url=..., where=...)``: a queue in ``folder`` that is shipped to ``place``; closed at the end."""
    opened: list[JournaledQueue] = []

    def open_one(name: str = "jobs", *, url: str | None = None, where: Path = folder, **options: Any) -> JournaledQueue:
        shipped = Ship(url or f"file://{place}", interval=0, **options)
        opened.append(JournaledQueue(where, name, segment_bytes=SEGMENT_BYTES, ship=shipped))
        return opened[-1]

    yield open_one
    for each in opened:
        with contextlib.suppress(Fenced):  # it was taken over
            each.close()
