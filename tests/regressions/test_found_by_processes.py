"""What the harnesses of this folder have found, each as a small test of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, open_reader
from kestrelpy._disk.interface import Directory
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.checkpoint import CheckpointFile, load_checkpoint, replace_file
from kestrelpy._journal.format import Checkpoint
from tests.processes.loop_mount import LoopFileSystem, reason_not_available, write_back


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
        open_reader(folder, "jobs", "elsewhere", create=True).close()
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
    open_reader(folder, "jobs", "elsewhere", create=True).close()
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


@pytest.mark.root
def test_a_place_that_a_power_cut_undid_never_counts_again(tmp_path: Path) -> None:
    """Its bytes were behind the end of the file, in a block that ext4 had written before it lost the size. A state that
    was appended there, and lost when its size was not, left them as what the file says. Now there is nothing behind the
    end: what was written is there, and stays.
    """
    if (reason := reason_not_available("ext4")) is not None:
        pytest.skip(reason)
    with LoopFileSystem("ext4", 16, tmp_path) as power:

        def place() -> tuple[Directory, CheckpointFile, int]:
            directory = RealDisk().directory(f"{power.path}/queues", create=True)
            file = CheckpointFile(directory, "jobs+a.checkpoint")
            found, _ = file.load()
            return directory, file, found.head if found is not None else 0

        directory, file, _ = place()
        file.save(Checkpoint(b"q" * 16, "a", 1, 1, 1, 1), durable=True)
        file.save(Checkpoint(b"q" * 16, "a", 2, 2, 2, 2), durable=False)
        write_back(f"{directory.path}/{file.name}")
        directory.close()
        power.cut()
        directory, file, head = place()
        assert head == 2, "its block was written, and no size had to be"
        for later in (3, 4):
            file.save(Checkpoint(b"q" * 16, "a", later, later, later, later), durable=False)
        replace_file(directory, "other", b"")  # whatever is synced takes all sizes along
        directory.close()
        power.cut()
        directory, _, head = place()
        directory.close()
        assert head >= 3, "the first save of a life is on disk"


def test_a_folder_of_which_nothing_can_be_told_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as missing, and so did its parent, up to the root and for ever."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as nothing_told:
        nothing_told.setattr(os, "stat", fails)
        nothing_told.setattr(os, "fstat", fails)
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
