"""What the harnesses of this folder have found, each as a small test of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, open_reader
from kestrelpy._checkpoint import load_checkpoint
from kestrelpy._disk import RealDisk


def queue_ids(folder: Path) -> set[bytes]:
    directory = RealDisk().directory(str(folder))
    try:
        names = [name for name in directory.names() if name.endswith(".checkpoint")]
        states = [load_checkpoint(directory, name)[0] for name in names]
        return {state.queue_id for state in states if state is not None}
    finally:
        directory.close()


def test_a_reader_elsewhere_leaves_a_queue_without_items_its_id(
    folder: Path, open_queue: Callable[..., JournaledQueue], caplog: pytest.LogCaptureFixture
) -> None:
    """It wrote a checkpoint with an id of zeros; the next opening took that for the queue's, and all other
    checkpoints for damaged.
    """
    with open_queue() as queue:
        queue.reader("one")
        open_reader(folder, "jobs", "elsewhere").close()
    assert len(queue_ids(folder)) == 1
    with open_queue() as queue:
        queue.reader("one")
        queue.reader("elsewhere")
        queue.put(b"x")
    assert not caplog.records


def test_a_reader_elsewhere_may_be_there_before_the_queue(
    folder: Path, open_queue: Callable[..., JournaledQueue], caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    open_reader(folder, "jobs", "elsewhere").close()
    with open_queue() as queue:
        queue.put(b"x")
        queue.reader("elsewhere").get().commit()
    assert queue_ids(folder) != {bytes(16)}
    with open_queue() as queue:
        assert queue.reader("elsewhere").items == 0
    assert not caplog.records


def test_r4_a_checkpoint_names_no_aborted_item_that_is_not_on_disk(open_queue: Callable[..., JournaledQueue]) -> None:
    """Its error count survived a power cut that the item did not, and was the next item's of that id."""
    queue = open_queue(sync="never")
    queue.put_many([b"1", b"2", b"3"])
    queue.get()
    item = queue.get()
    item.abort()
    queue.checkpoint()
    assert queue.stats().durable_id >= item.id


def test_a_folder_of_which_nothing_can_be_told_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as missing, and so did its parent, up to the root and for ever."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "stat", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        RealDisk().directory(str(tmp_path / "queues"), create=True)


@pytest.mark.parametrize("fails", ["stat", "pread"])
def test_a_lock_that_is_not_had_is_let_go(fails: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stayed open, and locked, as long as anybody had the error."""
    directory = RealDisk().directory(str(folder), create=True)
    held = directory.lock("a") if fails == "pread" else None

    def raises(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, raises)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            directory.lock("a")
    assert len(os.listdir("/proc/self/fd")) == before, caught
    if held is not None:
        held.release()
    directory.lock("a").release()
    directory.close()
