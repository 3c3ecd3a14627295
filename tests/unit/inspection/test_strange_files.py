"""What stands under the name of a queue's file and is no file of it: links, folders, pipes, holes, and files that may
not be read. ``verify`` names it; ``repair`` changes nothing, or makes a queue that opens.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kestrelpy import JournaledQueue, RepairRefused, repair, verify
from kestrelpy._disk.real import RealDirectory
from kestrelpy._journal.segment import MAX_SEGMENT_BYTES
from kestrelpy.inspection import strange_files
from tests.fuzz.misplaced import queue_world

NAME = "jobs"
JOURNAL = [".segment", "+a.checkpoint", ".mark"]
INBOX = [".batches", ".batch", ".part"]
pytestmark = pytest.mark.usefixtures("quiet")


def placed(folder: Path) -> Path:
    """A queue with an inbox."""
    for name, data in queue_world(1).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def named(folder: Path, ending: str) -> Path:
    return sorted(folder.rglob(f"*{ending}"))[0]


def link(path: Path) -> None:
    """Somebody has moved the file to a larger disk."""
    away = path.parent.parent / f"{path.name}.away"
    path.rename(away)
    path.symlink_to(away)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_bytes(b"mine")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def second_name(path: Path) -> None:
    """A backup by hard links."""
    os.link(path, path.parent.parent / f"{path.name}.backup")


STRANGE = [link, dangling, folder, pipe, second_name]


def verify_names(queue: Path, path: Path) -> None:
    damage = verify(queue, NAME).damage
    assert damage
    assert any(path.name in each.path + each.reason for each in damage)


@pytest.mark.parametrize("ending", JOURNAL)
@pytest.mark.parametrize("make", STRANGE)
def test_a_file_of_the_journal_that_is_none(tmp_path: Path, make: Callable[[Path], None], ending: str) -> None:
    queue = placed(tmp_path / "q")
    path = named(queue, ending)
    whole = path.read_bytes()
    make(path)
    verify_names(queue, path)
    before = content(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(RepairRefused, match=re.escape(path.name)):
            repair(queue, NAME, dry_run=dry_run)
    assert content(tmp_path) == before
    path.rename(tmp_path / "moved")
    path.write_bytes(whole)  # as the error says
    assert verify(queue, NAME).ok
    assert repair(queue, NAME).ok


@pytest.mark.parametrize("ending", INBOX)
@pytest.mark.parametrize("make", STRANGE)
def test_a_file_of_the_inbox_that_is_none(tmp_path: Path, make: Callable[[Path], None], ending: str) -> None:
    queue = placed(tmp_path / "q")
    path = named(queue, ending)
    make(path)
    verify_names(queue, path)
    assert repair(queue, NAME, dry_run=True).losses == repair(queue, NAME).losses != ()
    assert verify(queue, NAME).ok
    assert repair(queue, NAME).ok
    JournaledQueue(queue, NAME).close()


@pytest.mark.parametrize("make", STRANGE)
def test_an_archive(tmp_path: Path, make: Callable[[Path], None]) -> None:
    archive, queue = tmp_path / "archive", tmp_path / "q"
    placed(queue)
    archive.mkdir()
    for number in (1, 2):
        with JournaledQueue(tmp_path / "other", NAME, archive_dir=archive, segment_bytes=4096) as filled:
            filled.put(b"%d" % number * 3000)
            filled.commit(filled.get())
            filled.checkpoint(durable=True)
    path = named(archive, ".segment")
    make(path)
    assert [damage.path for damage in verify(archive, NAME).damage] == [str(path)]
    assert str(path) in [damage.path for damage in verify(queue, NAME, archive_dir=archive).damage]
    with pytest.raises(RepairRefused, match=re.escape(path.name)):
        repair(archive, NAME)


@pytest.mark.parametrize("size", [100 << 20, MAX_SEGMENT_BYTES + 1])
@pytest.mark.parametrize("ending", [*JOURNAL, *INBOX])
def test_a_hole_in_place_of_a_file(tmp_path: Path, ending: str, size: int) -> None:
    queue = placed(tmp_path / "q")
    path = named(queue, ending)
    path.write_bytes(b"")
    os.truncate(path, size)
    verify_names(queue, path)
    assert not repair(queue, NAME).ok
    assert verify(queue, NAME).ok
    assert repair(queue, NAME).ok
    JournaledQueue(queue, NAME).close()
    assert sum(each.stat().st_blocks for each in queue.rglob("*")) * 512 < 10 << 20  # no hole was filled


@pytest.mark.parametrize("ending", [*JOURNAL, *INBOX])
def test_a_file_that_may_not_be_read(tmp_path: Path, ending: str) -> None:
    """``PermissionError`` names it, and nothing is changed."""
    queue = placed(tmp_path / "q")
    path, real = named(queue, ending), RealDirectory.open

    def refusing(self: RealDirectory, name: str, **options: Any) -> Any:
        if name == path.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(self, name, **options)

    before = content(queue)
    with mock.patch.object(RealDirectory, "open", refusing):
        for call in (verify, repair):
            with pytest.raises(PermissionError, match=re.escape(path.name)):
                call(queue, NAME)
    assert content(queue) == before
    assert repair(queue, NAME).ok


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_permissions_taken_away(tmp_path: Path) -> None:
    queue = placed(tmp_path / "q")
    path = named(queue, ".segment")
    path.chmod(0)
    with pytest.raises(PermissionError, match=re.escape(path.name)):
        verify(queue, NAME)
    path.chmod(0o600)
    assert verify(queue, NAME).ok


def test_a_check_that_sees_nothing_is_caught(tmp_path: Path) -> None:
    queue = placed(tmp_path / "q")
    path = named(queue, ".segment")
    folder(path)
    with mock.patch.object(strange_files, "_is_read", return_value=True), pytest.raises(OSError, match="regular file"):
        verify_names(queue, path)
