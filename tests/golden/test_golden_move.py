"""The golden files of a move under way: it is finished for ever, and who knows the first version alone refuses it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from unittest import mock

import pytest

from kestrelpy import JournaledQueue, UnsupportedFormat, dead_letters, verify
from kestrelpy._journal import format as fmt
from kestrelpy.inbox import moves
from kestrelpy.testing import ManualClock
from tests.golden import make_move

NOW_MS = make_move.NOW_MS
FILE = "golden+.checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(make_move.HERE, tmp_path / "q")
    return tmp_path / "q"


def opened(folder: Path) -> JournaledQueue:
    clock = ManualClock(NOW_MS + 60_000)
    return JournaledQueue(folder, "golden", clock=clock, default_reader=make_move.CONFIG)


def test_an_opening_finishes_it(folder: Path) -> None:
    for _ in range(2):
        with opened(folder) as queue:
            assert [(item.id, item.data) for item in queue.get_many(5)] == [(3, b"good too")]
        with dead_letters(folder, "dead") as letters:
            [letter] = letters
        assert (letter.data, letter.queue, letter.reader, letter.id) == (b"poison", "golden", "", 2)
        assert (letter.added_ms, letter.died_ms, letter.error_count) == (NOW_MS, NOW_MS + 1000, 1)
        assert letter.reason == "ValueError: häßlich"
        assert verify(folder, "golden").ok
    assert struct.unpack_from("<8sH", (folder / FILE).read_bytes()) == (b"KSTRLCKP", 1)


def test_an_opening_that_publishes_nothing_is_seen(folder: Path) -> None:
    """What the first test asks can fail: then there is no letter."""
    with mock.patch.object(moves, "publish_move"), opened(folder) as queue:
        assert [item.id for item in queue.get_many(5)] == [3]
    assert list(dead_letters(folder, "dead")) == []


def test_who_knows_the_first_version_alone_refuses_it(folder: Path) -> None:
    before = (folder / FILE).read_bytes()
    assert struct.unpack_from("<8sH", before) == (b"KSTRLCKP", 2)
    with mock.patch.object(fmt, "MOVES_VERSION", fmt.FORMAT_VERSION), pytest.raises(UnsupportedFormat) as refused:
        opened(folder)
    assert (refused.value.version, refused.value.supported) == (2, 1)
    assert (folder / FILE).read_bytes() == before


def test_this_release_still_writes_the_same_bytes() -> None:
    golden = {path.name: path.read_bytes() for path in make_move.HERE.iterdir()}
    assert make_move.make() == golden


def test_the_script_refuses_to_make_them_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_move.main() == 1
    assert "never made again" in capsys.readouterr().err
