"""The rivals of the benchmarks are queues: what is put comes out, in that order, and no more of it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import cast

import pytest

from bench import rivals
from bench.floor import make_floor, make_memory_floor, make_sync_floor
from bench.measure import LeftOut
from bench.rivals import BATCH, Rival, servers

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ALL = tuple(dict.fromkeys((*rivals.WAKING, *rivals.MEMORY, *rivals.PUTTING, *rivals.BATCHED, *rivals.LARGE)))
COUNT = 7


def _open(rival: type[Rival], folder: Path, count: int) -> Rival:
    try:
        return rival(folder, count)
    except LeftOut as error:
        pytest.skip(str(error))
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")


def test_the_names_are_unique() -> None:
    assert len({rival.name for rival in ALL}) == len(ALL) - 1  # the floors in memory and on disk


@pytest.mark.parametrize("rival", ALL, ids=[f"{rival.__module__}.{rival.__name__}" for rival in ALL])
def test_what_is_put_comes_out(rival: type[Rival], tmp_path: Path) -> None:
    items = [f"{number:0100}".encode() for number in range(COUNT)]
    many = BATCH * 2 if rival.least == BATCH else COUNT
    made = _open(rival, tmp_path, 3 * many)
    try:
        for item in items[:4]:
            made.put(item)
        assert [made.take() for _ in range(3)] == items[:3]
        for item in items[4:]:
            made.put(item)
        assert [made.take() for _ in range(COUNT - 3)] == items[3:]
        made.fill(many, items[0])  # as many go in and come out as are asked for: the next one out is the next one put
        made.drain(many)
        made.put(items[1])
        assert made.take() == items[1]
        stocked = max(3, rival.least)
        made.stock(stocked, items[2])
        made.cycle(COUNT, items[3])
        left = ([items[2]] * stocked + [items[3]] * COUNT)[COUNT:]
        assert [made.take() for _ in left] == left
        made.put(items[4])
        assert made.take() == items[4]
    finally:
        made.close()


@pytest.mark.parametrize("rival", [one for one in rivals.BATCHED if one.least == BATCH], ids=lambda one: str(one.name))
def test_batches_are_of_what_was_put(rival: type[Rival], tmp_path: Path) -> None:
    made = _open(rival, tmp_path, 2 * BATCH + 2)
    try:
        made.fill(BATCH, b"a" * 100)
        made.put(b"b" * 100)
        made.drain(BATCH)
        assert made.take() == b"b" * 100
        made.fill(BATCH, b"c" * 100)
        assert {made.take() for _ in range(BATCH)} == {b"c" * 100}
    finally:
        made.close()


@pytest.mark.parametrize("rival", rivals.BLOCKING, ids=lambda one: str(one.name))
def test_who_waits_is_woken(rival: type[Rival], tmp_path: Path) -> None:
    """Four on each side, again and again with a queue that is empty: a wake-up that is lost shows as one who waits."""
    made = _open(rival, tmp_path, 0)
    sides, each = 4, 1000
    got: list[list[bytes]] = [[] for _ in range(sides)]

    def consume(mine: list[bytes]) -> None:
        mine.extend(made.take() for _ in range(each))

    consumers = [threading.Thread(target=consume, args=(mine,), daemon=True) for mine in got]
    producers = [threading.Thread(target=made.fill, args=(each, b"x"), daemon=True) for _ in range(sides)]
    for thread in (*consumers, *producers):
        thread.start()
    for thread in (*producers, *consumers):
        thread.join(30)
    try:
        assert [len(mine) for mine in got] == [each] * sides
    finally:
        made.close()


def test_a_server_that_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LeftOut, match="beanstalkd is not installed"):
        servers.Beanstalkd(tmp_path, 1)


def test_a_server_that_does_not_start_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "beanstalkd"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(LeftOut, match="does not start here"):
        servers.Beanstalkd(tmp_path, 1)


def test_the_floor_is_a_queue_of_sorts(tmp_path: Path) -> None:
    floor = make_floor(tmp_path / "floor", 1000)
    assert [floor.put(b"a"), floor.put(b"b")] == [1, 2]
    assert floor.take()[:2] == (1, b"a")
    floor.commit(1)
    assert floor.take()[:2] == (2, b"b")
    floor.put_many([b"c", b"dd", b"e"])
    taken = floor.take_many(2)
    assert [item[:2] for item in taken] == [(3, b"c"), (4, b"dd")]
    floor.commit_many(taken)
    with pytest.raises(KeyError):
        floor.commit(3)
    floor.close()
    stored = (tmp_path / "floor").read_bytes()
    assert stored[32:33] == b"a"
    assert b"cdde" in stored


def test_the_floor_of_a_sync_stores_one_behind_the_other(tmp_path: Path) -> None:
    put, close = make_sync_floor(tmp_path / "floor", 100)
    put(b"first")
    put(b"second")
    close()
    stored = (tmp_path / "floor").read_bytes()
    assert (stored[4:9], stored[13:19]) == (b"first", b"second")
    assert struct.unpack_from("<I", stored)[0]


def test_the_floor_in_memory_leaves_nobody_waiting_for_what_is_there() -> None:
    """The item that comes between the look and the registration is seen by the second look."""
    put, take = make_memory_floor()
    closure = cast("FunctionType", take).__closure__
    assert closure is not None
    wait: Callable[[], object] = closure[1].cell_contents
    put(1)
    assert wait() == 1
    put(2)
    assert take() == 2
