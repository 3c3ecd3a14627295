"""A reader's saved state on disk: appended, replaced, and never a reason to skip."""

from __future__ import annotations

import errno
from contextlib import nullcontext

import pytest

from kestrelpy import UnsupportedFormat
from kestrelpy import _format as fmt
from kestrelpy._checkpoint import REPLACE_BYTES, CheckpointFile, load_checkpoint, replace_file
from kestrelpy._disk import Directory
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk, PowerModel

NAME = "jobs+a.checkpoint"


def state(head: int, **more: object) -> fmt.Checkpoint:
    return fmt.Checkpoint(b"q" * 16, "a", head, head, head, head * 10, **more)  # type: ignore[arg-type]


def without_claim(found: tuple[fmt.Checkpoint | None, bool]) -> tuple[fmt.Checkpoint | None, bool]:
    """Without what a state says of older ones."""
    return found[0] and found[0]._replace(durable_head=0), found[1]


def loaded(directory: Directory) -> tuple[fmt.Checkpoint | None, bool]:
    return without_claim(load_checkpoint(directory, NAME))


def test_the_last_state_saved_is_the_one_loaded() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    assert loaded(directory) == (None, False)
    file = CheckpointFile(directory, NAME)
    for head in range(20):
        file.save(state(head), durable=head % 3 == 0)
        assert loaded(directory) == (state(head), True)
    assert file.durable == state(18)
    assert directory.names() == [NAME]


# LK-F89, R3: a new file is whole and durable before it has the name.
def test_lk_f89_the_first_save_replaces_and_is_durable() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=False)
    assert file.durable == state(1)
    assert (disk.counts["create"], disk.counts["sync"], disk.counts["rename"], disk.counts["sync_directory"]) == (
        1,
        1,
        1,
        1,
    )
    file.save(state(2), durable=True)
    assert (disk.counts["create"], disk.counts["sync"], disk.counts["rename"]) == (1, 2, 1), "appended"
    file.save(state(3), durable=False)
    assert disk.counts["sync"] == 2


def test_a_grown_file_is_replaced_by_one_state() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    largest = 0
    for head in range(2000):
        file.save(state(head), durable=False)
        largest = max(largest, directory.open(NAME).size())
    assert disk.counts["rename"] > 1
    assert largest <= REPLACE_BYTES
    assert loaded(directory)[0] == state(1999)


def test_a_large_state_does_not_replace_the_file_every_time() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    large = state(1, done=tuple((n, n) for n in range(3, 12_003, 2)))
    for _ in range(8):
        file.save(large, durable=False)
    assert 2 <= disk.counts["rename"] <= 4


def test_a_save_that_fails_leaves_the_last_state_and_the_next_begins_anew() -> None:
    inner = MemoryDisk()
    counting = FailingDisk(inner)
    file = CheckpointFile(counting.directory("/q", create=True), NAME)
    file.save(state(1), durable=True)
    before = counting.operations
    file.save(state(2), durable=True)
    operations = counting.operations - before
    said = operations - 1  # from here on it is only said in the file that it is durable: open, write
    for at in range(1, operations + 1):
        for short in (0, 5):
            disk = FailingDisk(MemoryDisk())
            directory = disk.directory("/q", create=True)
            file = CheckpointFile(directory, NAME)
            file.save(state(1), durable=True)
            disk.arm(errno.EIO, at=at, short_bytes=short)
            with pytest.raises(OSError, match="Input/output") if at < said else nullcontext():
                file.save(state(2), durable=True)
            assert disk.failures == 1
            disk.disarm()
            assert loaded(directory)[0] in ((state(1), state(2)) if at < said else (state(2),))
            file.save(state(3), durable=True)
            assert loaded(directory) == (state(3), True)
            assert file.durable == state(3)


def test_a_state_that_a_power_cut_undid_never_counts_again() -> None:
    """It is behind the end of the file on the disk, where ext4 has written the block and lost the size. Appended to,
    the file had it back at the next power cut: a reader missed what it had been delivered again.
    """
    disk = CrashingDisk()
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    file.save(state(2), durable=False)
    undone = 0
    for first in disk.power_states(PowerModel.EXT4, 100):
        directory = first.directory("/q")
        if loaded(directory)[0] != state(1):
            continue
        undone += 1
        file = CheckpointFile(directory, NAME)
        file.load()
        file.save(state(3), durable=False)
        for second in first.power_states(PowerModel.EXT4, 100):
            assert loaded(second.directory("/q"))[0] in (state(1), state(3))
    assert undone > 1


@pytest.mark.parametrize("data", [b"", b"K", bytes(100), b"garbage" * 20, fmt.checkpoint_prefix()])
def test_garbage_is_no_state(data: bytes) -> None:
    """logstash #8218, #12554; Kafka 16541: a zero-byte file, zeros, garbage."""
    directory = MemoryDisk().directory("/q", create=True)
    directory.create(NAME).write(0, data)
    assert loaded(directory) == (None, True)


def test_a_newer_version_is_unsupported() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    directory.create(NAME).write(0, fmt.CHECKPOINT_MAGIC + b"\3\0" + bytes(6))
    with pytest.raises(UnsupportedFormat) as caught:
        load_checkpoint(directory, NAME)
    assert (caught.value.path, caught.value.version, caught.value.supported) == (f"/q/{NAME}", 3, 1)


def test_a_torn_append_leaves_the_state_before() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    size = directory.open(NAME).size()
    file.save(state(2), durable=False)
    for end in range(size, directory.open(NAME).size()):
        directory.open(NAME, write=True).truncate(end)
        assert loaded(directory) == (state(1), True)
        file = CheckpointFile(directory, NAME)
        file.save(state(1), durable=True)
        file.save(state(2), durable=False)


def test_what_is_on_disk_is_said_in_the_file() -> None:
    """By its owner, after the sync; and no more than every later state still has as done."""
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)

    def said() -> tuple[int, int]:
        found = load_checkpoint(directory, NAME)[0]
        assert found is not None
        return found.head, found.durable_head

    file.save(state(3), durable=False)  # a new file is durable whatever was asked for
    assert said() == (3, 3)
    file.save(state(5), durable=False)
    assert said() == (5, 3)
    file.save(state(7), durable=True)
    assert said() == (7, 7)
    file.save(state(2), durable=False)  # a seek backwards, which may get to the disk
    assert said() == (2, 2)
    file.save(state(9), durable=False)
    assert said() == (9, 2)
    file = CheckpointFile(directory, NAME)
    file.load()
    assert file.durable_head == 2
    file.save(state(11), durable=False)
    assert said() == (11, 11)
    file.save(state(12), durable=False)
    assert said() == (12, 11)


def test_a_failed_sync_is_not_said_to_be_none() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    disk.arm(errno.EIO, at=1, kinds={"sync"})
    with pytest.raises(OSError, match="Input/output"):
        file.save(state(2), durable=True)
    found = load_checkpoint(directory, NAME)[0]
    assert found is not None
    assert (found.head, found.durable_head) == (2, 1)


def test_replace_file_is_atomic_at_every_kill() -> None:
    """R3: at every operation, a process that dies leaves the old file or the new one."""
    disk = CrashingDisk()
    directory = disk.directory("/q", create=True)
    replace_file(directory, "f", b"old")
    seen = set()

    def look(*_: object) -> None:
        clone = disk.after_kill()
        seen.add(clone.directory("/q").open("f").read(0, 9))

    disk.before_operation = look
    replace_file(directory, "f", b"new!")
    look()
    assert seen == {b"old", b"new!"}
    assert directory.names() == ["f"]


def test_a_left_over_temporary_file_is_in_nobodys_way() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    directory.create("f.tmp").write(0, b"left over, and longer")
    replace_file(directory, "f", b"new")
    assert directory.open("f").read(0, 99) == b"new"
    assert directory.names() == ["f"]


def test_rename_takes_the_state_along() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, "jobs+.checkpoint")
    file.save(state(1), durable=True)
    file.rename(NAME)
    file.save(state(2), durable=True)
    assert directory.names() == [NAME]
    assert loaded(directory) == (state(2), True)


def test_a_large_file_is_read_as_far_as_its_states_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: not by its size, which may be that of a hole."""
    directory = MemoryDisk().directory("/q", create=True)
    whole = fmt.checkpoint_prefix() + b"".join(fmt.encode_checkpoint(state(head)) for head in range(40))
    file = directory.create(NAME)
    file.write(0, whole)
    for block in (1, 16, 20, len(whole) - 4, len(whole), len(whole) + 1):
        monkeypatch.setattr("kestrelpy._checkpoint.READ_BYTES", block)
        assert loaded(directory) == (state(39), True)
    file.truncate(1 << 20)
    monkeypatch.setattr("kestrelpy._checkpoint.READ_BYTES", 4096)
    assert loaded(directory) == (state(39), True)
    lying = bytearray(whole)
    lying[20:24] = (1 << 31).to_bytes(4, "little")
    file.write(0, bytes(lying))
    assert loaded(directory) == (None, True)


def test_the_file_of_an_earlier_life_is_replaced() -> None:
    """Whatever is wanted, and once."""
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    assert CheckpointFile(directory, NAME).load() == (None, False)
    CheckpointFile(directory, NAME).save(state(1), durable=True)
    for durable in (False, True):
        file = CheckpointFile(directory, NAME)
        assert without_claim(file.load())[1]
        renames = disk.counts["rename"]
        file.save(state(2), durable=durable)
        file.save(state(3), durable=durable)
        assert without_claim(file.load()) == (state(3), True)
        file.save(state(4), durable=durable)
        assert disk.counts["rename"] == renames + 1
    file.forget()
    assert file.durable is None
    directory.unlink(NAME)
    file.save(state(4), durable=False)
    assert loaded(directory) == (state(4), True)
