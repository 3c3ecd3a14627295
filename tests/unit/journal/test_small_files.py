"""Small files beside a journal, and signs."""

from __future__ import annotations

import errno

import pytest

from kestrelpy._journal.small_files import make_sign, read_small
from kestrelpy.testing import FailingDisk, MemoryDisk


@pytest.mark.parametrize(("size", "found"), [(0, 0), (9, 9), (10, 10), (11, 11), (1 << 20, 11)])
def test_no_more_is_read_than_says_that_it_is_too_much(size: int, found: int) -> None:
    folder = MemoryDisk().directory("/q", create=True)
    folder.create("file").write(0, b"x" * size)
    assert read_small(folder, "file", 10) == b"x" * found


def test_a_file_that_is_not_there() -> None:
    assert read_small(MemoryDisk().directory("/q", create=True), "file", 10) is None


@pytest.mark.parametrize("is_full", [False, True])
def test_of_a_sign_the_name_counts(is_full: bool) -> None:
    disk = FailingDisk(MemoryDisk())
    folder = disk.directory("/q", create=True)
    if is_full:
        disk.arm(errno.ENOSPC, sticky=True, kinds=("write",))
    make_sign(folder, "sign", b"for people")
    assert folder.names() == ["sign"]
    assert read_small(folder, "sign", 100) == (b"" if is_full else b"for people")
    with pytest.raises(FileExistsError):
        make_sign(folder, "sign", b"another text")
