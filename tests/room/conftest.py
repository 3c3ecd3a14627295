"""Opens and closes the queues of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.room.rooms import Rooms


@pytest.fixture
def rooms() -> Iterator[Rooms]:
    made = Rooms()
    yield made
    made.close()
