"""A reader's saved state on disk: appended, replaced, and never a reason to skip."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest

from kestrelpy import UnsupportedFormat
from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import (
    BLOCK,
    FIRST_BLOCKS,
    REPLACE_BYTES,
    CheckpointFile,
    _fill,
    load_checkpoint,
    replace_file,
)
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk, PowerModel
from kestrelpy.testing._failing import FailingDirectory, FailingFile
from kestrelpy.testing._history import CrashingFolder

NAME = "jobs+a.checkpoint"
SPARE = "jobs+a.checkpoint.tmp"


def state(head: int, **more: Any) -> fmt.Checkpoint:
    return fmt.Checkpoint(b"q" * 16, "a", head, head, head, head * 10, **more)


def without_claim(found: tuple[fmt.Checkpoint | None, bool]) -> tuple[fmt.Checkpoint | None, bool]:
    """Without what a state says of older ones."""
    return found[0] and found[0]._replace(durable_head=0), found[1]


def loaded(directory: Directory) -> tuple[fmt.Checkpoint | None, bool]:
    return without_claim(load_checkpoint(directory, NAME))


def used(directory: Directory) -> int:
    file = directory.open(NAME)
    return len(file.read(0, file.size()).rstrip(b"\0"))


def test_the_last_state_saved_is_the_one_loaded() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    assert loaded(directory) == (None, False)
    file = CheckpointFile(directory, NAME)
    for head in range(20):
        file.save(state(head), durable=head % 3 == 0)
        assert loaded(directory) == (state(head), True)
    assert file.durable == state(18)
    assert sorted(directory.names()) == [NAME, SPARE]


# LK-F89, R3: a new file is whole and durable before it has the name.
def test_lk_f89_the_first_save_replaces_and_is_durable() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=False)
    assert file.durable == state(1)
    done = [disk.counts[each] for each in ("create", "sync", "rename", "sync_directory")]
    assert done == [2, 1, 1, 1], "the file, and a spare one"
    file.save(state(2), durable=True)
    assert [disk.counts[each] for each in ("create", "sync", "rename")] == [2, 2, 1], "appended"
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
    assert (caught.value.path, caught.value.version, caught.value.supported) == (f"/q/{NAME}", 3, 2)


def test_a_torn_append_leaves_the_state_before() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    size = used(directory)
    file.save(state(2), durable=False)
    for end in range(size, used(directory)):
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
    assert sorted(directory.names()) == [NAME, SPARE]
    assert loaded(directory) == (state(2), True)


def test_a_large_file_is_read_as_far_as_its_states_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: not by its size, which may be that of a hole."""
    directory = MemoryDisk().directory("/q", create=True)
    whole = fmt.checkpoint_prefix() + b"".join(fmt.encode_checkpoint(state(head)) for head in range(40))
    file = directory.create(NAME)
    file.write(0, whole)
    for block in (1, 16, 20, len(whole) - 4, len(whole), len(whole) + 1):
        monkeypatch.setattr("kestrelpy._journal.checkpoint.READ_BYTES", block)
        assert loaded(directory) == (state(39), True)
    file.truncate(1 << 20)
    monkeypatch.setattr("kestrelpy._journal.checkpoint.READ_BYTES", 4096)
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


# -- a disk that is full ---------------------------------------------------------------------------------------------


class Full(FailingDisk):
    """A disk on which no file grows and none is made, while it is ``full``."""

    def __init__(self, inner: MemoryDisk) -> None:
        super().__init__(inner)
        self.full = False

    def due(self, kind: str, path: str = "") -> OSError | None:
        if self.full and kind in ("create", "grow"):
            return OSError(errno.ENOSPC, "full", path)
        return super().due(kind, path)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    disk = Full(CrashingDisk())
    write = FailingFile.write

    def write_where_there_is_room(file: FailingFile, offset: int, *parts: bytes) -> None:
        if disk.full and offset + sum(map(len, parts)) > -(-file.size() // BLOCK) * BLOCK:
            raise OSError(errno.ENOSPC, "full")
        write(file, offset, *parts)

    monkeypatch.setattr(FailingFile, "write", write_where_there_is_room)
    return disk


def test_a_full_disk_has_room_for_every_save(full: Full) -> None:
    """Of this process and of each later one, for ever: whatever is replaced makes room for the next one."""
    directory = full.directory("/q", create=True)
    CheckpointFile(directory, NAME).save(state(1), durable=True)
    full.full = True
    head = 1
    for _ in range(5):
        file = CheckpointFile(directory, NAME)
        file.load()
        for _ in range(100):
            head += 1
            file.save(state(head), durable=head % 2 == 0)
            assert loaded(directory) == (state(head), True)
    assert directory.open(NAME).size() == directory.open(SPARE).size() == BLOCK


def test_the_spare_file_grows_with_the_state(full: Full) -> None:
    """As long as there is room; so it has room for a state that is somewhat larger than the last one."""
    directory = full.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    spans = tuple((n, n) for n in range(3, 2003, 2))
    file.save(state(1, done=spans), durable=True)
    full.full = True
    for _ in range(20):
        file.save(state(1, done=spans[:900]), durable=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1, done=(*spans, (3001, 3009))), durable=True)
    assert loaded(directory)[0] == state(1, done=(*spans, (3001, 3009)))
    with pytest.raises(OSError, match="full"):
        file.save(state(1, done=tuple((n, n) for n in range(3, 40_003, 2))), durable=True)
    file.save(state(2), durable=True)
    assert loaded(directory)[0] == state(2)


def test_what_is_held_for_the_first_reader_is_enough_for_two_files(full: Full) -> None:
    directory = full.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.hold(FIRST_BLOCKS)
    assert directory.open(SPARE).size() == FIRST_BLOCKS * BLOCK
    full.full = True
    freed = Full.due

    def due(disk: Full, kind: str, path: str = "") -> OSError | None:
        if kind == "truncate":  # there is room for a new file then
            disk.full = False
        error = freed(disk, kind, path)
        disk.full = disk.full or kind == "rename"
        return error

    with patch.object(Full, "due", due):
        file.save(state(1), durable=True)
    assert sorted(directory.names()) == [NAME, SPARE]
    for head in range(2, 300):
        file.save(state(head), durable=True)
    assert loaded(directory) == (state(299), True)


@pytest.mark.parametrize("exchange", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_where_names_cannot_be_exchanged_one_is_given_up(exchange: int) -> None:
    directory = FailingDisk(MemoryDisk()).directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(0), durable=True)
    with patch.object(FailingDirectory, "exchange", side_effect=OSError(exchange, "no")) as refused:
        for head in range(1, 100):
            file.save(state(head), durable=True)
            assert loaded(directory) == (state(head), True)
    assert refused.called
    assert sorted(directory.names()) == [NAME, SPARE]


def test_no_state_of_a_spare_file_counts(full: Full) -> None:
    """At every operation of a replacement by a later life, whatever the power leaves."""
    directory = full.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    for head in range(1, 4):
        file._size = 0
        file.save(state(head), durable=True)
    disk = full.inner
    assert isinstance(disk, CrashingDisk)
    seen: set[int] = set()

    def look() -> None:
        for model in (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY):
            for left in disk.power_states(model, 30):
                found = loaded(left.directory("/q"))[0]
                assert found is not None, "what was durable is gone"
                seen.add(found.head)

    later = CheckpointFile(directory, NAME)
    later.load()
    disk.before_operation = look
    later.save(state(4), durable=False)
    look()
    assert seen == {3, 4}


def test_a_file_and_its_spare_one_never_have_states_of_one_series() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file, heads = CheckpointFile(directory, NAME), iter(range(1, 1000))
    for life in range(20):
        if life % 3 == 0:
            file = CheckpointFile(directory, NAME)  # who makes a place anew has not looked at the one before
        elif life % 3 == 1:
            file = CheckpointFile(directory, NAME)
            file.load()
        else:  # it is replaced, and however often that fails
            disk.arm(errno.EIO, at=1, sticky=True, kinds={"sync"})
            for _ in range(life):
                with pytest.raises(OSError, match="Input/output error"):
                    file.save(state(next(heads)), durable=True)
            disk.disarm()
        for _ in range(3):
            file.save(state(next(heads)), durable=True)
        if life:
            whole, spare = (directory.open(name).read(0, 4 * BLOCK) for name in (NAME, SPARE))
            assert fmt.checkpoint_series(whole) != fmt.checkpoint_series(spare)
            first = fmt.decode_checkpoints(whole[: -(-used(directory) // 2)])
            assert fmt.decode_checkpoints(whole[: first[1]] + spare[first[1] :]) == first


def test_a_spare_file_that_may_be_the_file_itself_is_not_written(full: Full) -> None:
    """A process was killed between the exchange of names and the sync of the folder: on disk it may be undone."""
    disk = full.inner
    assert isinstance(disk, CrashingDisk)
    directory = full.directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    for head in (1, 2):
        file._size = 0
        file.save(state(head), durable=True)
    full.arm(errno.EIO, kinds={"sync_directory"}, at=1)
    file._size = 0
    with patch.object(CrashingFolder, "fail_sync", lambda _: None), pytest.raises(OSError, match="output"):
        file.save(state(3), durable=True)  # as a kill before that sync
    killed = disk.after_kill()
    later = CheckpointFile(killed.directory("/q"), NAME)
    later.load()
    lost: list[tuple[fmt.Checkpoint | None, bool]] = []

    def look() -> None:
        lost.extend(loaded(left.directory("/q")) for left in killed.power_states(PowerModel.ANY, 60))

    killed.before_operation = look
    later.save(state(4), durable=True)
    assert len(lost) > 10
    assert all(found is not None and found.head in (2, 3, 4) for found, _ in lost)


def test_after_a_failed_sync_another_file_is_made() -> None:
    """R9: of the file, of the spare one, of the folder; the next save makes a file that no sync has failed of."""
    for kind in ("sync", "sync_directory"):
        disk = FailingDisk(CrashingDisk())
        directory = disk.directory("/q", create=True)
        file = CheckpointFile(directory, NAME)
        file.save(state(1), durable=True)
        for replaced in (False, True):
            file._size = 0 if replaced or kind == "sync_directory" else file._size
            disk.arm(errno.EIO, kinds={kind})
            with pytest.raises(OSError, match="output"):
                file.save(state(2), durable=True)
            made = disk.counts["create"]
            file.save(state(3), durable=True)
            file._size = 0
            file.save(state(4), durable=True)
            assert disk.counts["create"] > made
            inner = disk.inner
            assert isinstance(inner, CrashingDisk)
            assert {loaded(left.directory("/q")) for left in inner.power_states(PowerModel.ANY, 50)} == {
                (state(4), True)
            }


def test_a_file_that_is_being_written_over_is_looked_at_again() -> None:
    """Who looks from outside may have opened it before it became the spare one."""
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    torn = directory.create("torn")
    torn.write(0, fmt.checkpoint_prefix() + b"half of a state, and the rest of another" * 3)
    opened = iter([torn])

    class Late:
        path = "/q"

        def open(self, name: str) -> File:
            return next(opened, None) or directory.open(name)

    assert without_claim(load_checkpoint(cast(Directory, Late()), NAME)) == (state(1), True)


# -- room that is held back, at its edges ----------------------------------------------------------------------------


def test_room_that_is_held_back_is_held_once() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.hold(2)
    file.hold(1)
    assert directory.open(SPARE).size() == 2 * BLOCK


def test_an_error_that_is_no_lack_of_room_is_raised_while_a_spare_file_is_filled() -> None:
    class FailsBehindTheFirstBlock:
        def size(self) -> int:
            return 0

        def write(self, offset: int, *_: bytes) -> None:
            if offset:
                raise OSError(errno.EIO, "as a disk says it")

    with pytest.raises(OSError, match="as a disk says it"):
        _fill(cast("File", FailsBehindTheFirstBlock()), b"x", 4 * BLOCK)


def test_a_file_that_is_full_has_no_room_to_share() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    size = directory.open(NAME).size()
    file._size = file._end
    file._share_room()
    assert directory.open(NAME).size() == size


def test_a_durable_state_is_not_said_again_where_that_needs_room() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    file.save(state(1), durable=True)
    before = used(directory)
    file._end = file._size
    file._note_durable(state(2))
    assert (used(directory), file.durable, file.durable_head) == (before, state(2), 2)


def test_a_spare_file_for_which_there_was_no_room_is_made_by_a_later_save() -> None:
    """What was cut off the file that had too much may be free a moment later, and not at once."""
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = CheckpointFile(directory, "jobs+.checkpoint")
    file.hold(FIRST_BLOCKS)
    disk.arm(errno.ENOSPC, sticky=True, kinds={"grow"})
    file.save(state(head=1), durable=True)
    disk.disarm()
    assert directory.open("jobs+.checkpoint.tmp").size() == 0
    file.save(state(head=2), durable=False)
    assert directory.open("jobs+.checkpoint.tmp").size() == BLOCK
