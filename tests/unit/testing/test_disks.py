"""The simulated disks: what may be left after a kill or a power cut, and which operations fail.

The contract that they share with the real disk is in ``test_disk.py``. Here every power model is held against states
that were worked out by hand, and against a model of which bytes are in doubt.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy._disk import memory
from kestrelpy._disk.interface import Directory, Disk, File
from kestrelpy._disk.memory import MemoryFile
from kestrelpy.errors import QueueLocked
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk, PowerModel
from kestrelpy.testing.disks import OPERATIONS
from tests.support.patience import PATIENCE

PAGE = 4096
PREFIX, EXT4, ANY, HOSTILE = PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY, PowerModel.HOSTILE
HONEST = (PREFIX, EXT4, ANY)
Files = dict[str, bytes]


class Always:
    """Chooses the first, or the last, of whatever there is."""

    def __init__(self, *, last: bool) -> None:
        self.last = last

    def randrange(self, stop: int, /) -> int:
        return stop - 1 if self.last else 0


class Fixed:
    """Makes these choices."""

    def __init__(self, *choices: int) -> None:
        self.choices = list(choices)

    def randrange(self, stop: int, /) -> int:
        assert self.choices[0] < stop
        return self.choices.pop(0)


LOST, KEPT = Always(last=False), Always(last=True)


@contextlib.contextmanager
def fails(number: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what matters
        yield
    assert caught.value.errno == number


def look(disk: Disk, path: str = "/q") -> Files | None:
    """The files in a folder; ``None``: there is no such folder."""
    try:
        directory = disk.directory(path)
    except FileNotFoundError:
        return None
    found = {}
    for name in directory.names():
        with contextlib.suppress(OSError):  # a folder
            file = directory.open(name)
            found[name] = file.read(0, file.size())
            file.close()
    directory.close()
    return found


def states(disk: CrashingDisk, model: PowerModel, limit: int = 500, path: str = "/q") -> list[Files | None]:
    """What is seen in each state. They are checked to differ, if only by what is behind the end of a file."""
    found = list(disk.power_states(model, limit))
    assert len({state.digest() for state in found}) == len(found)
    return [look(state, path) for state in found]


def distinct(found: list[Files | None]) -> set[object]:
    """Comparable."""
    return {None if files is None else frozenset(files.items()) for files in found}


def contents(disk: CrashingDisk, model: PowerModel) -> set[bytes]:
    return {(files or {})["f"] for files in states(disk, model)}


def expect(*files: Files | None) -> set[object]:
    return distinct(list(files))


def started(**files: bytes) -> tuple[CrashingDisk, Directory]:
    """A disk on which a folder with these files is durable."""
    disk = CrashingDisk()
    directory = disk.directory("/q", create=True)
    for name, data in files.items():
        file = directory.create(name)
        file.write(0, data)
        file.sync()
    directory.sync()
    return disk, directory


def put(directory: Directory, name: str, data: bytes, *, sync: bool = False) -> File:
    file = directory.create(name)
    file.write(0, data)
    if sync:
        file.sync()
    return file


# -- a kill ----------------------------------------------------------------------------------------------------------


def test_a_kill_keeps_what_was_seen_and_frees_locks() -> None:
    disk, directory = started(f=b"old", g=b"gone")
    lock = directory.lock("l")
    file = directory.open("f", write=True)
    file.write(0, b"new")
    directory.unlink("g")
    put(directory, "h", b"made")
    clone = disk.after_kill()
    assert look(clone) == look(disk) == {"f": b"new", "h": b"made", "l": b""}
    clone.directory("/q").lock("l").release()
    with pytest.raises(QueueLocked):
        directory.lock("l")
    lock.release()


def test_clones_are_independent() -> None:
    disk, directory = started(f=b"x" * 5000)
    clone = disk.after_kill()
    other = disk.after_power_cut(LOST, PREFIX)
    file = directory.open("f", write=True)
    file.write(0, b"here")
    second = disk.after_kill()
    file.write(0, b"HERE")
    clone.directory("/q").open("f", write=True).write(0, b"clone")
    other.directory("/q").open("f", write=True).grow(9000)[4990:4995] = b"other"
    other.directory("/q").create("g")
    assert look(disk) == {"f": b"HERE" + b"x" * 4996}
    assert look(second) == {"f": b"here" + b"x" * 4996}
    assert look(clone) == {"f": b"clone" + b"x" * 4995}
    assert look(other) == {"f": b"x" * 4990 + b"other" + b"x" * 5 + bytes(4000), "g": b""}
    for one in (disk, clone, other):
        one._check()


def test_what_was_not_synced_is_not_synced_after_a_kill_either() -> None:
    disk, directory = started(f=b"old")
    directory.open("f", write=True).write(0, b"new")
    put(directory, "g", b"", sync=True)
    clone = disk.after_kill()
    assert look(clone.after_power_cut(LOST, EXT4)) == {"f": b"old"}
    assert look(clone.after_power_cut(KEPT, EXT4)) == {"f": b"new", "g": b""}
    reopened = clone.directory("/q")
    reopened.open("f").sync()
    reopened.sync()
    for model in HONEST:
        assert states(clone, model) == [{"f": b"new", "g": b""}]
    assert look(disk.after_power_cut(LOST, EXT4)) == {"f": b"old"}


@pytest.mark.parametrize("make", [MemoryDisk, CrashingDisk])
def test_handles_of_a_killed_disk_are_dead(make: Callable[[], MemoryDisk]) -> None:
    disk = make()
    directory = disk.directory("/q", create=True)
    file = directory.create("f")
    buffer = file.grow(100)
    buffer[0:3] = b"abc"
    lock = directory.lock("l")
    disk.kill()
    calls: list[Callable[[], object]] = [
        directory.names,
        directory.sync,
        lambda: directory.create("g"),
        lambda: directory.open("f"),
        lambda: directory.rename("f", "g"),
        lambda: directory.unlink("f"),
        lambda: directory.lock("l"),
        lambda: file.read(0, 1),
        lambda: file.write(0, b"x"),
        lambda: buffer.__setitem__(slice(0, 1), b"x"),
        lambda: file.grow(200),
        lambda: file.truncate(0),
        file.size,
        file.sync,
        file.forget,
    ]
    for call in calls:
        with fails(errno.EBADF):
            call()
    again = disk.directory("/q")
    with fails(errno.EBADF):
        again.move("f", directory, "g")
    held = again.lock("l")
    lock.release()
    with pytest.raises(QueueLocked):
        again.lock("l")
    held.release()
    file.close()
    directory.close()
    assert look(disk) == {"f": b"abc" + bytes(97), "l": b""}


def test_a_waiter_for_a_lock_wakes_when_everybody_is_killed() -> None:
    disk, waits = MemoryDisk(), threading.Event()
    directory = disk.directory("/q", create=True)
    held = directory.lock("l")
    ended: list[object] = []

    def about_to_wait(real: Callable[[], None] = disk._wait) -> None:
        waits.set()
        real()

    def wait() -> None:
        try:
            directory.lock("l", wait=True)
        except OSError as error:
            ended.append(error.errno)

    thread = threading.Thread(target=wait)
    with patch.object(disk, "_wait", about_to_wait):
        thread.start()
        assert waits.wait(PATIENCE)
        disk.kill()
        thread.join(PATIENCE)
    assert ended == [errno.EBADF]
    held.release()


def test_who_is_killed_on_the_way_to_a_lock_does_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    directory = disk.directory("/q", create=True)

    class Deadly:
        """The guard of all disks in memory; another thread, which kills everybody, had it first."""

        __exit__ = memory._guard.__exit__

        def __enter__(self) -> None:
            monkeypatch.undo()
            disk.kill()
            memory._guard.__enter__()

    monkeypatch.setattr(memory, "_guard", Deadly())
    with fails(errno.EBADF):
        directory.lock("l")
    assert look(disk) == {}


def test_a_store_under_way_at_a_kill_is_there_in_part() -> None:
    disk, directory = started()
    buffer = directory.create("f").grow(8)
    seen: set[bytes] = set()

    def crash() -> None:
        for seed in range(200):
            found = look(disk.after_kill(random.Random(seed)))
            assert found is not None
            seen.add(found["f"])
        assert look(disk.after_kill()) == {"f": bytes(8)}
        assert look(disk.after_kill(LOST)) == {"f": bytes(8)}
        assert look(disk.after_kill(KEPT)) == {"f": b"\0\0abc\0\0\0"}

    disk.before_operation = crash
    buffer[2:5] = b"abc"
    disk.before_operation = None
    parts = [b"\0\0\0", b"a\0\0", b"ab\0", b"abc", b"\0\0c", b"\0bc"]
    assert seen == {b"\0\0" + part + b"\0\0\0" for part in parts}
    assert look(disk.after_kill(KEPT)) == {"f": b"\0\0abc\0\0\0"}


def test_the_part_of_a_write_that_a_kill_left_is_lost_with_the_power() -> None:
    disk, directory = started(f=b"12345")
    file = directory.open("f", write=True)
    cut: list[Files | None] = []
    disk.before_operation = lambda: cut.extend(states(disk.after_kill(KEPT), PREFIX))
    file.write(3, b"abc")
    assert expect(*cut) == expect({"f": b"12345"}, {"f": b"123abc"})


# -- the hook --------------------------------------------------------------------------------------------------------


def test_the_hook_is_called_before_everything_that_changes_the_disk() -> None:
    disk = CrashingDisk()
    calls: list[tuple[str, str]] = []
    disk.before_operation = lambda: calls.append(disk.next_operation)
    directory = disk.directory("/q", create=True)
    archive = disk.directory("/a", create=True)
    file = directory.create("f")
    buffer = file.grow(8192)
    buffer[0:3] = b"abc"
    file.write(3, b"def")
    file.truncate(100)
    file.sync()
    directory.rename("f", "g")
    directory.link("g", "second")
    directory.unlink("second")
    directory.move("g", archive, "h")
    archive.sync()
    archive.unlink("h")
    lock = directory.lock("l")
    before = len(calls)
    lock.release()
    directory.lock("l").release()
    file.read(0, 10)
    file.size()
    file.forget()
    directory.names()
    file.close()
    directory.close()
    assert len(calls) == before == disk.operations
    assert calls == [
        ("mkdir", "/q"),
        ("sync_directory", "/"),
        ("mkdir", "/a"),
        ("sync_directory", "/"),
        ("create", "f"),
        ("grow", "f"),
        ("store", "f"),
        ("write", "f"),
        ("truncate", "f"),
        ("sync", "f"),
        ("rename", "f"),
        ("link", "g"),
        ("unlink", "second"),
        ("move", "g"),
        ("sync_directory", "/a"),
        ("unlink", "h"),
        ("create", "l"),
    ]


def test_what_the_hook_raises_prevents_the_operation() -> None:
    class Frozen(Exception):
        pass

    def freeze() -> None:
        raise Frozen

    disk, directory = started(f=b"abc")
    file = directory.open("f", write=True)
    buffer = file.grow(3)
    operations, digest = disk.operations, disk.digest()
    disk.before_operation = freeze
    calls: list[Callable[[], object]] = [
        lambda: buffer.__setitem__(slice(0, 1), b"x"),
        lambda: file.write(0, b"x"),
        lambda: file.grow(100),
        file.sync,
        lambda: directory.create("g"),
        lambda: directory.rename("f", "g"),
        lambda: directory.unlink("f"),
        lambda: directory.lock("l"),
        directory.sync,
        lambda: disk.directory("/new", create=True),
        lambda: file.truncate(0),
    ]
    for call in calls:
        with pytest.raises(Frozen):
            call()
    assert (disk.operations, disk.digest()) == (operations, digest)
    assert look(disk) == {"f": b"abc"}
    disk._check()


def test_states_before_each_operation_of_a_replaced_file() -> None:
    """The whole way of a small file being replaced, with a kill or a cut at each step: it is the old or the new one."""
    disk, directory = started(c=b"old")
    found: set[frozenset[tuple[str, bytes]]] = set()

    def crash() -> None:
        for clone in (disk, disk.after_kill(), disk.after_kill(random.Random(disk.operations))):
            for model in HONEST:
                found.update(
                    frozenset((files or {}).items()) for files in states(clone, model, 100) if files is not None
                )

    disk.before_operation = crash
    file = put(directory, "c.tmp", b"new", sync=True)
    file.close()
    directory.rename("c.tmp", "c")
    directory.sync()
    crash()
    assert {dict(files)["c"] for files in found} == {b"old", b"new"}
    assert states(disk, EXT4) == [{"c": b"new"}]


# -- a power cut: what is durable ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", HONEST)
def test_a_name_is_durable_only_when_its_folder_is_synced(model: PowerModel) -> None:
    disk, directory = started()
    put(directory, "f", b"abc", sync=True)
    assert expect(*states(disk, model)) == expect({}, {"f": b"abc"})
    directory.sync()
    assert states(disk, model) == [{"f": b"abc"}]


@pytest.mark.parametrize("model", HONEST)
def test_content_is_durable_only_when_the_file_is_synced(model: PowerModel) -> None:
    disk, directory = started()
    file = put(directory, "f", b"abc")
    directory.sync()
    found = states(disk, model)
    assert {"f": b""} in found
    assert {"f": b"abc"} in found
    assert ({"f": bytes(3)} in found) == (model is not PREFIX)
    file.sync()
    assert states(disk, model) == [{"f": b"abc"}]


@pytest.mark.parametrize("model", HONEST)
def test_a_sync_makes_the_size_durable(model: PowerModel) -> None:
    disk, directory = started(f=b"abc")
    file = directory.open("f", write=True)
    file.grow(20_000)
    sizes = {len((files or {})["f"]) for files in states(disk, model)}
    assert {3, 20_000} <= sizes
    assert (len(sizes) > 2) == (model is ANY)
    file.sync()
    assert states(disk, model) == [{"f": b"abc" + bytes(19_997)}]
    file.truncate(2)
    sizes = {len((files or {})["f"]) for files in states(disk, model)}
    assert sizes == {2, 20_000} if model is not ANY else sizes >= {2, 20_000}
    file.sync()
    assert states(disk, model) == [{"f": b"ab"}]


@pytest.mark.parametrize("model", HONEST)
def test_a_sync_of_one_file_is_not_one_of_another(model: PowerModel) -> None:
    disk, directory = started(f=b"f", g=b"g")
    first, second = (directory.open(name, write=True) for name in "fg")
    first.write(0, b"F")
    second.write(0, b"G")
    second.sync()
    found = states(disk, model)
    assert {"f": b"f", "g": b"G"} in found
    assert all((files or {})["g"] == b"G" for files in found)


@pytest.mark.parametrize("model", HONEST)
def test_an_unlinked_file_may_come_back(model: PowerModel) -> None:
    disk, directory = started(f=b"abc")
    directory.unlink("f")
    assert expect(*states(disk, model)) == expect({}, {"f": b"abc"})
    directory.sync()
    assert states(disk, model) == [{}]


@pytest.mark.parametrize("model", HONEST)
def test_a_replacing_rename_leaves_the_old_file_or_the_new_one(model: PowerModel) -> None:
    disk, directory = started(c=b"old")
    put(directory, "t", b"new", sync=True)
    directory.rename("t", "c")
    assert expect(*states(disk, model)) == expect({"c": b"old"}, {"c": b"old", "t": b"new"}, {"c": b"new"})
    put(directory, "t", b"newer", sync=True)
    directory.rename("t", "c")
    found = states(disk, model)
    assert {(files or {})["c"] for files in found} == {b"old", b"new", b"newer"}
    directory.sync()
    assert states(disk, model) == [{"c": b"newer"}]


def test_a_rename_before_the_content_is_synced_may_leave_an_empty_file() -> None:
    disk, directory = started(c=b"old")
    put(directory, "t", b"new")
    directory.rename("t", "c")
    directory.sync()
    assert expect(*states(disk, EXT4)) == expect({"c": b""}, {"c": bytes(3)}, {"c": b"new"})
    # In their order the rename would be last; but it is durable, and so came before the write.
    assert expect(*states(disk, PREFIX)) == expect({"c": b""}, {"c": b"new"})


@pytest.mark.parametrize("model", HONEST)
def test_a_folder_is_a_name_in_its_parent(model: PowerModel) -> None:
    disk = CrashingDisk()
    operations: list[Files | None] = []
    disk.before_operation = lambda: operations.extend(states(disk, model))
    directory = disk.directory("/q", create=True)
    disk.before_operation = None
    assert operations == [None, None, {}]  # before it is made; made but not synced: not there, or there
    put(directory, "f", b"abc", sync=True)
    directory.sync()
    assert states(disk, model) == [{"f": b"abc"}]


def test_a_folder_that_was_not_synced_takes_all_with_it_and_is_synced_by_the_next_who_opens_it() -> None:
    disk = CrashingDisk()

    def die_at_the_sync() -> None:
        if disk.next_operation[0] == "sync_directory":
            raise KeyboardInterrupt

    disk.before_operation = die_at_the_sync
    with pytest.raises(KeyboardInterrupt):
        disk.directory("/q/r", create=True)
    killed = disk.after_kill()
    careless = killed.directory("/q")
    put(careless, "f", b"abc", sync=True)
    careless.sync()
    for model in HONEST:
        assert expect(*states(killed, model)) == expect(None, {"f": b"abc"})
        assert set(killed.after_power_cut(LOST, model).folders) == {"/"}
    killed.directory("/q/r", create=True)
    for model in HONEST:
        assert states(killed, model) == [{"f": b"abc"}]
        assert states(killed, model, path="/q/r") == [{}]


# -- a power cut: moves between folders ------------------------------------------------------------------------------


def moved() -> tuple[CrashingDisk, Directory, Directory]:
    disk, directory = started(f=b"abc")
    archive = disk.directory("/a", create=True)
    directory.move("f", archive, "g")
    return disk, directory, archive


def both(disk: CrashingDisk, model: PowerModel) -> set[tuple[bool, bool]]:
    """Whether the file is where it was, and where it went."""
    found = set()
    for state in disk.power_states(model, 100):
        files, archived = look(state, "/q"), look(state, "/a")
        assert files in ({}, {"f": b"abc"})
        assert archived in ({}, {"g": b"abc"})
        found.add((bool(files), bool(archived)))
    return found


@pytest.mark.parametrize("model", [PREFIX, EXT4])
def test_a_move_is_one_transaction_of_a_journal(model: PowerModel) -> None:
    disk, _, _ = moved()
    assert both(disk, model) == {(True, False), (False, True)}
    for end in (0, 1):
        disk, *ends = moved()
        ends[end].sync()
        assert both(disk, model) == {(False, True)}
        assert both(disk.after_kill(), model) == {(False, True)}


def test_a_move_has_two_ends_where_there_is_no_journal() -> None:
    disk, directory, archive = moved()
    assert both(disk, ANY) == {(True, False), (True, True), (False, True)}
    archive.sync()
    assert both(disk, ANY) == {(True, True), (False, True)}
    directory.sync()
    assert both(disk, ANY) == {(False, True)}
    disk, directory, archive = moved()
    directory.sync()
    assert both(disk, ANY) == {(False, True), (False, False)}
    archive.sync()
    assert both(disk, ANY) == {(False, True)}


def test_a_file_at_both_ends_of_a_move_is_two_files() -> None:
    disk, _, archive = moved()
    archive.sync()
    state = disk.after_power_cut(LOST, ANY)
    state.directory("/a").open("g", write=True).write(0, b"A")
    assert look(state, "/q") == {"f": b"abc"}


def test_a_mount_is_another_file_system() -> None:
    for disk in (MemoryDisk(mounts=["/mnt/archive"]), CrashingDisk(mounts=["/mnt/archive/"])):
        here = disk.directory("/mnt/queues", create=True)
        there = disk.directory("/mnt/archive/old", create=True)
        beside = disk.directory("/mnt/archive2", create=True)
        put(here, "f", b"abc")
        with fails(errno.EXDEV):
            here.move("f", there, "f")
        with fails(errno.ENOENT):
            here.move("g", there, "g")
        here.move("f", beside, "f")
        beside.move("f", here, "f")
        other = MemoryDisk().directory("/", create=True)
        with fails(errno.EXDEV):
            here.move("f", other, "f")
        assert look(disk, "/mnt/queues") == {"f": b"abc"}


# -- a power cut: each model on a small case, worked out by hand -----------------------------------------------------


def small_case() -> CrashingDisk:
    """Pending, in this order: a store into page 0, one into page 1, a new file, its two bytes, the other name gone."""
    disk, directory = started(f=b"a" * 2 * PAGE, old=b"")
    file = directory.open("f", write=True)
    file.write(0, b"X")
    file.write(PAGE, b"Y")
    put(directory, "g", b"12")
    directory.unlink("old")
    return disk


A = b"a" * (PAGE - 1)
BOTH_OLD, FIRST_NEW = b"a" + A + b"a" + A, b"X" + A + b"a" + A
SECOND_NEW, BOTH_NEW = b"a" + A + b"Y" + A, b"X" + A + b"Y" + A


def test_prefix_by_hand() -> None:
    assert expect(*states(small_case(), PREFIX)) == expect(
        {"f": BOTH_OLD, "old": b""},
        {"f": FIRST_NEW, "old": b""},
        {"f": BOTH_NEW, "old": b""},
        {"f": BOTH_NEW, "old": b"", "g": b""},
        {"f": BOTH_NEW, "old": b"", "g": b"12"},
        {"f": BOTH_NEW, "g": b"12"},
    )


def test_ext4_by_hand() -> None:
    """Names in their order; each page, each size by itself: also the second page without the first, a hole."""
    wanted = []
    for content in (BOTH_OLD, FIRST_NEW, SECOND_NEW, BOTH_NEW):
        wanted.append({"f": content, "old": b""})
        for new in (b"", bytes(2), b"12"):
            wanted.append({"f": content, "old": b"", "g": new})
            wanted.append({"f": content, "g": new})
    assert expect(*states(small_case(), EXT4)) == expect(*wanted)


def test_any_by_hand() -> None:
    """Two bytes of one page: kept, old, zeros, two kinds of garbage, the first only, the second only."""
    disk, directory = started(f=b"abcd")
    directory.open("f", write=True).write(1, b"XY")
    found = {(files or {})["f"] for files in states(disk, ANY)}
    noise = found - {b"abcd", b"aXYd", b"a\0\0d", b"a\xff\xffd", b"aXcd", b"abYd"}
    assert len(found) == 7
    assert len(noise) == 1
    assert [one[:1] + one[3:] for one in noise] == [b"ad"]


def test_any_names_by_hand() -> None:
    """Operations on different names are independent; those on one name, and the two names of a rename, are not."""
    disk, directory = started(f=b"", t=b"T")
    directory.unlink("f")
    put(directory, "g", b"", sync=True)
    directory.rename("t", "g")
    names = {frozenset((files or {}).items()) for files in states(disk, ANY)}
    wanted = []
    for unlinked, second in itertools.product((False, True), (0, 1, 2)):
        rest: Files = {} if unlinked else {"f": b""}
        wanted.append(rest | ({"t": b"T"}, {"t": b"T", "g": b""}, {"g": b"T"})[second])
    assert names == expect(*wanted)


def test_operations_on_one_name_keep_their_order() -> None:
    disk, directory = started(a=b"x")
    directory.rename("a", "b")
    directory.rename("b", "c")
    directory.unlink("c")
    for model in HONEST:
        assert expect(*states(disk, model)) == expect({"a": b"x"}, {"b": b"x"}, {"c": b"x"}, {})


def test_a_hole_is_possible_under_ext4_and_not_in_a_prefix() -> None:
    disk, directory = started()
    file = directory.create("f")
    buffer = file.grow(3 * PAGE)
    file.sync()
    directory.sync()
    for page in range(3):
        buffer[page * PAGE : page * PAGE + 1] = b"x"
    patterns = {
        model: {bytes((files or {})["f"][::PAGE]) for files in states(disk, model)} for model in (PREFIX, EXT4, ANY)
    }
    assert patterns[PREFIX] == {b"\0\0\0", b"x\0\0", b"xx\0", b"xxx"}
    assert patterns[EXT4] == {bytes(p) for p in itertools.product(b"\0x", repeat=3)}
    assert patterns[ANY] >= patterns[EXT4]


def test_a_page_may_be_as_any_of_its_stores_left_it() -> None:
    disk, directory = started(f=bytes(10))
    file = directory.open("f", write=True)
    for at in range(3):
        file.write(at, b"x")
    wanted = {b"\0\0\0\0", b"x\0\0\0", b"xx\0\0", b"xxx\0"}
    for model in (PREFIX, EXT4):
        assert {content[:4] for content in contents(disk, model)} == wanted
    between = {(look(disk.after_power_cut(Fixed(choice), ANY)) or {})["f"][:4] for choice in (5, 6)}
    assert between == {b"x\0\0\0", b"xx\0\0"}


def test_a_truncate_and_what_was_written_after_it() -> None:
    """Written anew in place: the old file, an empty one, zeros, the new one; never old bytes under a new size, or new
    ones under the old size."""
    disk, directory = started(f=b"a" * 6000)
    file = directory.open("f", write=True)
    file.truncate(0)
    file.write(0, b"new")
    file.grow(5000)
    old, new = b"a" * 6000, b"new"
    assert expect(*states(disk, PREFIX)) == expect({"f": old}, {"f": b""}, {"f": new}, {"f": new + bytes(4997)})
    assert expect(*states(disk, EXT4)) == expect(
        {"f": old}, {"f": b""}, {"f": bytes(3)}, {"f": new}, {"f": bytes(5000)}, {"f": new + bytes(4997)}
    )
    disk._check()


def test_room_that_was_cut_and_comes_back_is_zeros() -> None:
    """Also where nothing was to be cut any more: zeros were stored over what is durable."""
    disk, directory = started(f=b"a" * 2 * PAGE)
    file = directory.open("f", write=True)
    file.write(PAGE, bytes(PAGE))
    file.truncate(PAGE)
    file.grow(2 * PAGE - 1)
    found = {content for content in contents(disk, EXT4) if len(content) == 2 * PAGE - 1}
    assert found == {b"a" * PAGE + bytes(PAGE - 1)}


def test_a_truncate_in_the_middle_of_a_page() -> None:
    disk, directory = started(f=b"a" * 100)
    file = directory.open("f", write=True)
    file.write(50, b"b" * 10)
    file.truncate(55)
    file.write(55, b"c" * 5)
    wanted = [b"a" * 100, b"a" * 50 + b"b" * 10 + b"a" * 40, b"a" * 50 + b"b" * 5, b"a" * 50 + b"b" * 5 + b"c" * 5]
    assert expect(*states(disk, PREFIX)) == expect(*({"f": content} for content in wanted))
    wanted.append(b"a" * 50 + b"b" * 5 + bytes(5))
    assert expect(*states(disk, EXT4)) == expect(*({"f": content} for content in wanted))


def two_lives(between: Callable[[File], None] = lambda _: None) -> dict[PowerModel, set[bytes]]:
    """What two power cuts may leave where each life appended six bytes to four and synced nothing, by the model of the
    second one; after the first, which was an ext4's, only the four were seen. ``between``: done to the file then.
    """
    disk, directory = started(f=b"base")
    directory.open("f", write=True).write(4, b"first!")
    found: dict[PowerModel, set[bytes]] = {model: set() for model in HONEST}
    for state in disk.power_states(EXT4, 100):
        if look(state) == {"f": b"base"}:
            file = state.directory("/q").open("f", write=True)
            between(file)
            file.write(4, b"second")
            for model in HONEST:
                found[model] |= contents(state, model)
    return found


def test_what_was_lost_behind_the_end_comes_back_at_the_next_power_cut() -> None:
    """ext4 writes a last block and loses the new size; then it keeps a newer size and loses the block."""
    found = two_lives()
    assert found[PREFIX] == {b"base", b"basesecond"}
    assert found[EXT4] == {b"base", b"basesecond", b"base" + bytes(6), b"basefirst!"}
    assert found[ANY] >= found[EXT4]


def test_what_was_lost_is_gone_when_the_block_is_written() -> None:
    def rewrite(file: File) -> None:
        file.write(0, b"b")
        file.sync()

    def truncate(file: File) -> None:
        file.write(4, b"x")
        file.truncate(4)
        file.sync()

    for between in (rewrite, truncate):
        assert two_lives(between)[EXT4] == {b"base", b"basesecond", b"base" + bytes(6)}
    assert b"basefirst!" in two_lives(lambda file: file.sync())[EXT4], "nothing was written"


def test_what_was_lost_behind_the_end_is_never_seen_in_between() -> None:
    ways: tuple[Callable[[File], object], ...] = (lambda file: file.grow(10), lambda file: file.write(9, b"!"))
    for how in ways:
        disk, directory = started(f=b"base")
        directory.open("f", write=True).write(4, b"first!")
        for state in disk.power_states(EXT4, 100):
            if look(state) == {"f": b"base"}:
                how(state.directory("/q").open("f", write=True))
                assert (look(state.after_kill()) or {})["f"][:9] == b"base" + bytes(5)


def test_any_tears_at_bytes_sectors_and_pages() -> None:
    disk, directory = started(f=b"a" * 3 * PAGE)
    directory.open("f", write=True).write(100, b"b" * 2 * PAGE)
    kinds = set()
    for files in states(disk, ANY, 400):
        content = (files or {})["f"]
        assert content[:100] == b"a" * 100
        assert content[100 + 2 * PAGE :] == b"a" * (PAGE - 100)
        edges = [at for at in range(1, len(content)) if content[at] != content[at - 1]]
        if set(content) == set(b"ab") and edges:
            inner = [at for at in edges if at not in (100, 100 + 2 * PAGE)]
            kinds.add("page" if all(at % PAGE == 0 for at in inner) else "")
            kinds.add("sector" if any(at % 512 == 0 and at % PAGE for at in inner) else "")
            kinds.add("byte" if any(at % 512 for at in inner) else "")
        elif set(content) <= set(b"ab\0"):
            kinds.add("zeros")
        else:
            kinds.add("garbage")
    assert kinds >= {"page", "sector", "byte", "zeros", "garbage"}


def test_any_may_leave_garbage_in_room_that_was_not_synced() -> None:
    disk, directory = started(f=b"abc", g=b"another file's bytes")
    file = directory.open("f", write=True)
    file.grow(3 * PAGE)
    found = [(files or {})["f"] for files in states(disk, ANY, 500)]
    assert all(content[:3] == b"abc" for content in found)
    spoilt = [content for content in found if content[3:].strip(b"\0")]
    assert spoilt
    assert any(b"file's bytes" in content for content in spoilt)  # what was in that block before
    file.sync()
    assert states(disk, ANY) == [{"f": b"abc" + bytes(3 * PAGE - 3), "g": b"another file's bytes"}]


def test_garbage_comes_up_to_the_bytes_that_were_synced() -> None:
    """In room that was grown by, beside what was stored there; and never from another page of the same file."""
    disk, directory = started(f=b"own bytes" * 1000 + b"abc")
    file = directory.open("f", write=True)
    at = file.size()
    file.grow(at + 100)
    file.write(at + 50, b"x")
    found = contents(disk, ANY)
    assert all(content[:at] == b"own bytes" * 1000 + b"abc" for content in found if len(content) >= at)
    assert any(content[at : at + 50].strip(b"\0") for content in found)
    assert not any(b"own" in content[at:] for content in found)


def test_hostile_damages_what_was_durable() -> None:
    disk, _ = started(f=b"a" * 100, g=b"b" * 5000)
    found = [files or {} for files in states(disk, HOSTILE, 300)]
    intact = {"f": b"a" * 100, "g": b"b" * 5000}
    assert intact in found
    assert any("f" not in files for files in found)
    assert any("g" in files and len(files["g"]) < 5000 for files in found)
    assert any("g" in files and b"\0" in files["g"] for files in found)
    flipped = [files["f"] for files in found if len(files.get("f", b"")) == 100 and files["f"] != b"a" * 100]
    assert any(sum((one ^ ord("a")).bit_count() for one in content) == 1 for content in flipped)


# -- a sync that fails -----------------------------------------------------------------------------------------------


def after_a_failed_sync() -> tuple[CrashingDisk, FailingDisk, File]:
    """Two pages stored into, and a sync that failed."""
    crashing, directory = started(f=b"a" * 2 * PAGE)
    directory.close()
    failing = FailingDisk(crashing)
    file = failing.directory("/q").open("f", write=True)
    file.write(0, b"X")
    file.write(PAGE, b"Y")
    failing.arm(errno.EIO, kinds={"sync"})
    with fails(errno.EIO):
        file.sync()
    return crashing, failing, file


def test_a_sync_after_one_that_failed_proves_nothing() -> None:
    """The heart of rule R9: what is seen is not on disk, and a second sync, which succeeds, does not bring it there."""
    disk, _, file = after_a_failed_sync()
    file.sync()
    assert file.read(0, 2 * PAGE) == BOTH_NEW
    assert contents(disk, PREFIX) == {BOTH_OLD}
    assert contents(disk, EXT4) == {BOTH_OLD, FIRST_NEW, SECOND_NEW, BOTH_NEW}
    killed = disk.after_kill()
    assert contents(killed, EXT4) == contents(disk, EXT4)
    killed.directory("/q").open("f").sync()
    assert contents(killed, PREFIX) == {BOTH_OLD}
    assert BOTH_OLD in contents(disk, ANY)
    disk._check()


def test_a_page_that_is_stored_into_again_is_written_whole() -> None:
    disk, _, file = after_a_failed_sync()
    file.write(PAGE + 5, b"Z")
    assert contents(disk, PREFIX) == {BOTH_OLD, b"a" + A + b"YaaaaZ" + A[5:]}
    file.sync()
    assert contents(disk, PREFIX) == {b"a" + A + b"YaaaaZ" + A[5:]}
    assert contents(disk, EXT4) == {b"a" + A + b"YaaaaZ" + A[5:], b"X" + A + b"YaaaaZ" + A[5:]}
    disk._check()


def test_forgetting_the_cache_shows_what_the_disk_has() -> None:
    """Rule R10: 12 MB to be seen, the second sync succeeds, and 8.8 MB are there without the cache."""
    disk, _, file = after_a_failed_sync()
    file.write(PAGE + 5, b"Z")
    assert len(contents(disk, EXT4)) == 6
    file.forget()
    assert len(contents(disk, EXT4)) == 3
    assert file.read(0, 2 * PAGE) == b"a" + A + b"YaaaaZ" + A[5:]
    disk._check()
    file.sync()
    for model in HONEST:
        assert contents(disk, model) == {b"a" + A + b"YaaaaZ" + A[5:]}


def test_sizes_and_truncates_are_no_pages() -> None:
    disk, _, file = after_a_failed_sync()
    file.truncate(PAGE + 1)
    file.write(PAGE + 1, b"tail")
    disk._check()
    file.sync()
    assert contents(disk, PREFIX) == {b"a" + A + b"Ytail"}
    disk, failing, file = after_a_failed_sync()
    file.truncate(10)
    failing.arm(errno.EIO, kinds={"sync"})
    with fails(errno.EIO):
        file.sync()
    file.grow(PAGE + 10)
    cut = b"Xaaaaaaaaa"
    assert contents(disk, PREFIX) == {BOTH_OLD, cut, cut + bytes(PAGE)}
    file.forget()
    disk._check()
    assert file.read(0, 20) == b"Xaaaaaaaaa" + bytes(10)
    file.sync()
    disk._check()
    assert all(content[10:] == bytes(PAGE) for model in HONEST for content in contents(disk, model))


def test_names_that_met_a_failed_sync_stay_in_doubt() -> None:
    disk, _ = started(f=b"")
    failing = FailingDisk(disk)
    folder = failing.directory("/q")
    folder.create("g").sync()
    folder.create("h").sync()
    folder.unlink("f")
    failing.arm(errno.EIO, kinds={"sync_directory"})
    with fails(errno.EIO):
        folder.sync()
    folder.rename("h", "i")
    folder.create("j").sync()
    disk = disk.after_kill()
    directory = disk.directory("/q")
    directory.sync()
    disk._check()
    names = {frozenset(files or {}) for files in states(disk, ANY)}
    assert names == {frozenset("ij" + extra) for extra in ("", "f", "g", "fg")}
    assert look(disk.after_power_cut(LOST, PREFIX)) == {"f": b"", "i": b"", "j": b""}
    assert look(disk.after_power_cut(KEPT, PREFIX)) == {"g": b"", "i": b"", "j": b""}
    assert sorted(directory.names()) == ["g", "i", "j"]


# -- drawing states --------------------------------------------------------------------------------------------------


def large_case() -> CrashingDisk:
    disk, directory = started(f=b"a" * 20 * PAGE)
    buffer = directory.open("f", write=True).grow(20 * PAGE)
    for page in range(20):
        buffer[page * PAGE : page * PAGE + 10] = b"x" * 10
    for name in "ghij":
        put(directory, name, b"1")
    return disk


@pytest.mark.parametrize("model", PowerModel)
def test_states_are_limited_distinct_and_decided_by_the_seed(model: PowerModel) -> None:
    def digests(seed: int) -> list[int]:
        return [state.digest() for state in large_case().power_states(model, 60, seed=seed)]

    one = digests(1)
    assert one == digests(1)
    assert len(set(one)) == len(one) == (26 + 4 - 1 if model is PREFIX else 60)
    assert (one == digests(2)) == (model is PREFIX)


@pytest.mark.parametrize("model", HONEST)
def test_corners_are_among_the_states(model: PowerModel) -> None:
    disk = large_case()
    found = states(disk, model, 30)
    assert look(disk.after_power_cut(LOST, model)) in found
    assert look(disk.after_power_cut(KEPT, model)) == look(disk)
    assert look(disk) in found


def test_each_single_thing_is_lost_and_kept() -> None:
    patterns = {(files or {})["f"][::PAGE] for files in states(large_case(), EXT4, 200)}
    for page in range(20):
        assert b"a" * page + b"x" + b"a" * (19 - page) in patterns
        assert b"x" * page + b"a" + b"x" * (19 - page) in patterns


@pytest.mark.parametrize("model", PowerModel)
def test_single_cuts_are_decided_by_who_chooses(model: PowerModel) -> None:
    disk = large_case()
    one, two = (disk.after_power_cut(random.Random(7), model).digest() for _ in range(2))
    assert one == two
    assert len({disk.after_power_cut(random.Random(seed), model).digest() for seed in range(20)}) > 5


def test_states_are_of_the_moment_when_they_were_asked_for() -> None:
    disk, directory = started(f=b"abc")
    file = directory.open("f", write=True)
    file.write(0, b"X")
    drawing = disk.power_states(EXT4, 10)
    first = next(drawing)
    file.write(1, b"Y")
    file.sync()
    directory.unlink("f")
    assert [look(first), *map(look, drawing)] == [{"f": b"abc"}, {"f": b"Xbc"}]


def test_a_restored_disk_is_durable_and_whole() -> None:
    for state in large_case().power_states(ANY, 50):
        state._check()
        again = list(state.power_states(ANY, 10))
        assert [one.digest() for one in again] == [state.digest()]
        assert state.operations == 0


def test_digests_tell_disks_apart() -> None:
    disk, directory = started(f=b"a")
    same, _ = started(f=b"a")
    assert disk.digest() == same.digest()
    directory.open("f", write=True).grow(2)
    longer = disk.digest()
    assert longer != same.digest()
    directory.open("f", write=True).truncate(1)
    assert disk.digest() == same.digest()
    directory.rename("f", "g")
    assert disk.digest() != same.digest()


# -- random histories, against a model -------------------------------------------------------------------------------


@dataclass
class ModelFile:
    """What a file holds, what of it is durable, and which bytes of that are in doubt."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    sizes: set[int] = field(default_factory=lambda: {0})
    in_doubt: set[int] = field(default_factory=set)
    dirty: set[int] = field(default_factory=set)
    """Pages that a sync would write."""
    failed: set[int] = field(default_factory=set)
    """Pages that a sync that failed marked clean, and that are not dirty again."""

    def store(self, at: int, data: bytes) -> None:
        if at + len(data) > len(self.live):
            self.resize(at + len(data))
        self.live[at : at + len(data)] = data
        self._touch(range(at, at + len(data)))

    def resize(self, size: int) -> None:
        if size < len(self.live):
            self._touch(range(size, len(self.live)))
        self.live[size:] = bytes(max(0, size - len(self.live)))
        self.sizes.add(size)

    def _touch(self, span: range) -> None:
        self.in_doubt.update(span)
        pages = {at // PAGE for at in span}
        self.dirty |= pages
        self.failed -= pages

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.sizes = {len(self.live)}
        self.in_doubt = {at for at in self.in_doubt if at // PAGE in self.failed}
        self.dirty = set()

    def fail_sync(self) -> None:
        self.failed |= self.dirty
        self.dirty = set()

    def forget(self, content: bytes) -> None:
        """``content`` is what is to be seen now; it may differ where a sync failed."""
        assert len(content) == len(self.live)
        changed = {at for at, (one, old) in enumerate(zip(content, self.live, strict=True)) if one != old}
        assert changed <= self.in_doubt
        assert {at // PAGE for at in changed} <= self.failed
        self.live[:] = content

    def check(self, content: bytes, model: PowerModel) -> None:
        assert min(self.sizes) <= len(content) <= max(self.sizes)
        assert model is ANY or len(content) in self.sizes
        differing = {at for at, (one, old) in enumerate(zip(content, self.durable, strict=False)) if one != old}
        assert differing <= self.in_doubt

    def check_disk(self, disk: CrashingDisk, choose: random.Random, *, exact: bool) -> None:
        """``exact``: no sync failed, so it is known what is there if nothing, or everything, is lost."""
        disk._check()
        assert look(disk) == {"f": bytes(self.live)}
        for power in HONEST:
            cut = disk.after_power_cut(choose, power)
            cut._check()
            self.check((look(cut) or {})["f"], power)
            if exact or power is not PREFIX:
                assert look(disk.after_power_cut(KEPT, power)) == {"f": bytes(self.live)}
            if exact:
                assert look(disk.after_power_cut(LOST, power)) == {"f": self.durable}


SMALL = st.integers(0, 60).map(lambda number: number * 300)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), SMALL, st.integers(1, 5000)),
        st.tuples(st.just("grow"), SMALL, st.just(0)),
        st.tuples(st.just("truncate"), SMALL, st.just(0)),
        st.tuples(st.sampled_from(["sync", "fail_sync", "forget", "kill"]), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, choose=st.randoms(use_true_random=False))
def test_random_histories_of_a_file(steps: list[tuple[str, int, int]], choose: random.Random) -> None:
    disk, directory = started(f=b"")
    file, model, exact = directory.open("f", write=True), ModelFile(), True
    for number, (step, at, size) in enumerate(steps):
        if step == "store":
            data = bytes([number + 1]) * size
            file.write(at, data)
            model.store(at, data)
        elif step == "grow" and at > len(model.live):
            file.grow(at)
            model.resize(at)
        elif step == "truncate":
            file.truncate(at)
            model.resize(at)
        elif step == "sync":
            file.sync()
            model.sync()
        elif step == "fail_sync":
            cast(MemoryFile, file).fail_sync()
            model.fail_sync()
            exact = False
        elif step == "forget":
            file.forget()
            model.forget(file.read(0, file.size()))
        elif step == "kill":
            disk = disk.after_kill()
            file = disk.directory("/q").open("f", write=True)
        model.check_disk(disk, choose, exact=exact)


NAMES = st.sampled_from("abc")
NAME_STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "rename", "unlink", "sync", "kill"]), NAMES, NAMES), max_size=15
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=NAME_STEPS, choose=st.randoms(use_true_random=False))
def test_random_histories_of_a_folder(steps: list[tuple[str, str, str]], choose: random.Random) -> None:
    """Every model leaves each name as it was at some moment since the last sync, and a file has one name."""
    disk, directory = started()
    past: list[Files] = [{}]
    for number, (step, name, other) in enumerate(steps):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            if step == "create":
                put(directory, name, b"%d" % number, sync=True).close()
            elif step == "rename":
                directory.rename(name, other)
            elif step == "unlink":
                directory.unlink(name)
            elif step == "sync":
                directory.sync()
                past.clear()
            elif step == "kill":
                disk = disk.after_kill()
                directory = disk.directory("/q")
        now = look(disk)
        assert now is not None
        past.append(now)
        disk._check()
        for model in HONEST:
            found = look(disk.after_power_cut(choose, model))
            assert found is not None
            assert len(set(found.values())) == len(found)
            if model is not ANY:
                assert found in past
            for one in "abc":
                assert found.get(one) in [files.get(one) for files in past]
            assert look(disk.after_power_cut(KEPT, model)) == now
            assert look(disk.after_power_cut(LOST, model)) == past[0]


# -- the disk that fails ---------------------------------------------------------------------------------------------


def workload(disk: Disk) -> None:
    """One operation of every kind."""
    directory = disk.directory("/q", create=True)
    archive = disk.directory("/a", create=True)
    lock = directory.lock("l")
    file = directory.create("f")
    file.grow(100)[0:4] = b"data"
    file.write(4, b"more")
    file.sync()
    directory.sync()
    file.forget()
    file.truncate(8)
    file.close()
    directory.rename("f", "g")
    file = directory.open("g")
    assert file.read(0, file.size()) == b"datamore"
    file.close()
    directory.link("g", "second")
    directory.unlink("second")
    directory.move("g", archive, "h")
    assert directory.names() == ["l"]
    archive.unlink("h")
    lock.release()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("make", [MemoryDisk, CrashingDisk])
def test_every_operation_is_counted_and_can_fail(make: Callable[[], Disk], mapped: bool) -> None:
    disk = FailingDisk(make(), mapped=mapped)
    workload(disk)
    total = disk.operations
    assert set(disk.counts) == (OPERATIONS if not mapped else OPERATIONS - {"store"})
    assert disk.failures == 0
    assert not disk.armed
    for at in range(1, total + 1):
        disk = FailingDisk(make(), mapped=mapped)
        disk.arm(errno.EIO, at=at)
        with fails(errno.EIO):
            workload(disk)
        assert disk.operations == at
        assert disk.failures == 1
        assert not disk.armed
    disk = FailingDisk(make(), mapped=mapped)
    disk.arm(errno.EIO, at=total + 1)
    workload(disk)
    assert disk.armed


@pytest.mark.parametrize("kind", sorted(OPERATIONS))
def test_kinds_are_armed_alone(kind: str) -> None:
    disk = FailingDisk(MemoryDisk(), mapped=False)
    disk.arm(errno.ENOSPC, kinds={kind})
    with fails(errno.ENOSPC):
        workload(disk)
    assert disk.counts[kind] == 1
    disk = FailingDisk(MemoryDisk(), mapped=False)
    disk.arm(errno.ENOSPC, kinds=OPERATIONS - {kind}, at=1000)
    workload(disk)


def test_sticky_failures_last_until_disarmed() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file = directory.create("f")
    disk.arm(errno.ENOSPC, at=2, sticky=True, kinds={"write", "grow"})
    file.write(0, b"abc")
    for _ in range(3):
        with fails(errno.ENOSPC):
            file.write(3, b"def")
        with fails(errno.ENOSPC):
            file.grow(100)
    assert file.read(0, 10) == b"abc"
    assert disk.failures == 6
    disk.disarm()
    file.write(3, b"def")
    assert file.read(0, 10) == b"abcdef"


def test_the_error_is_of_the_class_of_its_errno() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    disk.arm(errno.EACCES)
    with pytest.raises(PermissionError) as caught:
        directory.open("f")
    assert caught.value.filename == "/q/f"
    with pytest.raises(ValueError, match="errno"):
        disk.arm(0)
    with pytest.raises(ValueError, match="counts from 1"):
        disk.arm(errno.EIO, at=0)
    with pytest.raises(ValueError, match="writes"):
        disk.arm(errno.EIO, kinds=["writes"])


@pytest.mark.parametrize(("short_bytes", "stored"), [(0, 0), (1, 1), (4, 4), (100, 4), (-1, 4), (-4, 1), (-100, 0)])
@pytest.mark.parametrize("plain", [False, True])
def test_a_failing_write_may_store_a_part(short_bytes: int, stored: int, plain: bool) -> None:
    disk = FailingDisk(MemoryDisk(), mapped=not plain)
    file = disk.directory("/q", create=True).create("f")
    buffer = file.grow(10)
    disk.arm(errno.ENOSPC, kinds={"store", "write"}, short_bytes=short_bytes)
    with fails(errno.ENOSPC):
        if plain:
            buffer[2:7] = b"12345"
        else:
            file.write(2, b"12345")
    assert file.read(0, 10) == b"\0\0" + b"12345"[:stored] + bytes(8 - stored)
    assert file.size() == 10


def test_what_fails_has_no_effect() -> None:
    inner = MemoryDisk()
    disk = FailingDisk(inner)
    directory = disk.directory("/q", create=True)
    archive = disk.directory("/a", create=True)
    file = directory.create("f")
    buffer = file.grow(100)
    calls: list[Callable[[], Any]] = [
        lambda: disk.directory("/new", create=True),
        lambda: directory.create("g"),
        lambda: directory.rename("f", "g"),
        lambda: directory.move("f", archive, "g"),
        lambda: directory.unlink("f"),
        lambda: directory.lock("l"),
        lambda: file.grow(200),
        lambda: file.truncate(10),
        file.sync,
        directory.sync,
    ]
    disk.arm(errno.EIO, sticky=True)
    for call in calls:
        with fails(errno.EIO):
            call()
    disk.disarm()
    buffer[0:3] = b"abc"
    assert set(inner.folders) == {"/", "/q", "/a"}
    assert look(inner) == {"f": b"abc" + bytes(97)}
    assert look(inner, "/a") == {}


def test_directories_of_a_failing_disk_know_each_other_also_unwrapped() -> None:
    inner = MemoryDisk()
    disk = FailingDisk(inner)
    here = disk.directory("/q", create=True)
    put(here, "f", b"abc")
    here.move("f", inner.directory("/a", create=True), "g")
    disk.directory("/a").move("g", here, "h")
    assert look(inner) == {"h": b"abc"}


# -- what a disk in memory is like -----------------------------------------------------------------------------------


def test_a_buffer_is_as_strict_as_a_mapping() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = directory.create("f")
    buffer = file.grow(10)
    for span, data in ((slice(0, 3), b"ab"), (slice(8, 12), b"abcd"), (slice(10, 11), b"a")):
        with pytest.raises(IndexError):
            buffer[span] = data
    file.truncate(5)
    with pytest.raises(ValueError, match="closed"):
        buffer[0:1] = b"x"
    again = file.grow(10)
    again[9:10] = b"x"
    file.close()
    with pytest.raises(ValueError, match="closed"):
        again[0:1] = b"x"


def test_paths_are_made_absolute() -> None:
    disk = MemoryDisk()
    assert disk.directory("/").names() == []
    directory = disk.directory("a/../b//c/", create=True)
    assert directory.path == "/b/c"
    assert disk.directory("//b/c").path == "/b/c"
    assert disk.directory("/").names() == ["b"]


def test_threads_create_each_name_once() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    made: list[int] = []

    def create() -> None:
        for number in range(200):
            with contextlib.suppress(FileExistsError):
                directory.create(f"{number}")
                made.append(number)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(200))
