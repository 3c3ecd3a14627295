"""A queue that is shipped with items on their way to a dead-letter queue: what a restore does with them.

The intent is in the log. A restored queue carries it out; a dead-letter queue that has the move already drops it.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, QueueEmpty, ReaderConfig, dead_letters
from kestrelpy._reading.progress import Progress
from kestrelpy.inbox import moves
from kestrelpy.ship import Ship, restore
from kestrelpy.testing.stores import MemoryStore
from tests.ship.in_store import log_of
from tests.support.patience import PATIENCE

DEAD = ReaderConfig(max_deliveries=1, dead_letter="dead")


@contextmanager
def breaking(*, published: bool) -> Iterator[None]:
    """Each move fails, after it is published or before."""
    real = moves.publish_move

    def publish_move(*about: Any, **how: Any) -> None:
        if published:
            real(*about, **how)
        raise OSError(errno.EIO, "it breaks")

    with patch.object(moves, "publish_move", publish_move):
        yield


def shipped_in_the_middle(folder: Path, store: MemoryStore, *, published: bool) -> None:
    """Of three items one has died, and the owner ends before its move is done."""
    with breaking(published=published):
        options: dict[str, Any] = {"ship": Ship(store, interval=0), "default_reader": DEAD}
        with JournaledQueue(folder, "jobs", inbox_interval=None, **options) as queue:
            queue.put_many([b"a", b"b", b"c"])
            queue.get().abort()
            queue.get().commit()
            queue.checkpoint()
            assert queue.shipping is not None
            queue.shipping.flush(PATIENCE)


def contents(folder: Path, store: MemoryStore) -> tuple[list[bytes], list[bytes]]:
    """What the reader of the restored queue gets, and the dead letters."""
    left = []
    with JournaledQueue(folder, "jobs", ship=Ship(store, interval=0)) as queue:
        queue.put(b"d")  # the log covers the reader from here on
        with suppress(QueueEmpty):
            left = [item.data for item in queue.get_many(10, timeout=0)]
        queue._check()
    return left, [letter.data for letter in dead_letters(folder, "dead")]


def copy_dead(here: Path, there: Path) -> None:
    """The dead-letter queue, as a restore of it would bring it back."""
    shutil.copytree(here / "inbox", there / "inbox", dirs_exist_ok=True)  # the log may have its ledger
    for path in here.glob("dead*"):
        shutil.copy(path, there)


@pytest.mark.parametrize("published", [False, True])
def test_a_restored_queue_carries_out_the_intent(tmp_path: Path, published: bool) -> None:
    store = MemoryStore()
    here, there = tmp_path / "here", tmp_path / "there"
    shipped_in_the_middle(here, store, published=published)
    state = log_of(store).checkpoints[""]
    assert state.move is not None
    assert [note.item_id for note in state.move.notes] == [1]
    restore(store, "jobs", there)
    if published:  # the other queue is there, too, and knows the move
        copy_dead(here, there)
    assert contents(there, store) == ([b"c", b"d"], [b"a"])
    assert log_of(store).checkpoints[""].move is None


def test_an_intent_that_the_restore_forgets_is_seen(tmp_path: Path) -> None:
    """A planted fault: the item is delivered, and is a dead letter as well."""
    store = MemoryStore()
    here, there = tmp_path / "here", tmp_path / "there"
    shipped_in_the_middle(here, store, published=True)
    restore(store, "jobs", there)
    copy_dead(here, there)
    real = Progress.load
    with patch.object(Progress, "load", lambda state: real(state._replace(move=None))):
        left, dead = contents(there, store)
    assert (left, dead) == ([b"a", b"c", b"d"], [b"a"])
