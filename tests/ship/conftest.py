"""Stores for the tests: each test has a place of its own in every kind of store that there is here."""

from __future__ import annotations

import itertools
from pathlib import Path

import obstore.store
import pytest

from kestrelpy.ship import Store, open_store
from kestrelpy.ship.folder_store import FolderStore
from kestrelpy.testing import MemoryDisk
from tests.support import seaweed

_numbers = itertools.count(1)


@pytest.fixture(params=["folder", "folder in memory", "obstore's memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    if request.param == "folder in memory":
        return FolderStore("/store", disk=MemoryDisk())
    if request.param == "s3":
        server: seaweed.Seaweed = request.getfixturevalue("s3")
        return server.store(f"place-{next(_numbers)}")
    return open_store(obstore.store.MemoryStore())
