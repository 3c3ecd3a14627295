"""A line of waiters whose leader is a thread elsewhere: who waits is told once or gives up, and nobody is forgotten."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from kestrelpy._waiting.put_future import PutFuture
from kestrelpy._writing.group_commit import Absent, GroupCommit
from tests.support.budget import Tally, share
from tests.support.patience import PATIENCE, until


class Late(Exception):
    """Nobody came in time, for these ids."""


def a_line(patience: float | None = PATIENCE) -> tuple[GroupCommit, list[None]]:
    asked: list[None] = []
    leader = Absent(lambda: asked.append(None), patience, Late)
    return GroupCommit(lambda: pytest.fail("nobody else leads"), lambda: None, leader=leader), asked


def test_whoever_waits_asks_and_is_told() -> None:
    line, asked = a_line()
    threads = [threading.Thread(target=line.wait, args=(item_id,)) for item_id in (1, 2, 3)]
    for thread in threads:
        thread.start()
    until(lambda: len(asked) == 3)
    line.note_later(2)
    until(lambda: sum(thread.is_alive() for thread in threads) == 1)
    line.note_later(3)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    line.wait(3)
    assert len(asked) == 3, "it was covered"


def test_whoever_waits_too_long_gives_up_alone() -> None:
    line, _ = a_line(0.01)
    with pytest.raises(Late) as raised:
        line.wait(7, first_id=5)
    assert raised.value.args == (5, 7)
    with pytest.raises(Late) as raised:
        line.wait(7)
    assert raised.value.args == (7, 7)
    line.note_later(7)
    line.wait(7)
    assert not line._tickets


def test_a_future_is_completed_and_an_error_reaches_all() -> None:
    line, asked = a_line()
    done: PutFuture[int] = PutFuture()
    failed: PutFuture[int] = PutFuture()
    line.add(1, done, soon=True)
    line.add(2, failed, soon=True)
    assert len(asked) == 2
    line.note_later(1)
    assert done.result(PATIENCE) == 1
    assert not failed.done()
    line.fail(Late("over"))
    line.notify()
    with pytest.raises(Late, match="over"):
        failed.result(PATIENCE)
    with pytest.raises(Late, match="over"):
        line.wait(2)
    line.wait(1)


@pytest.fixture
def _eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_eager_switches")
def test_races_of_those_that_are_told_and_those_that_give_up(tally: Tally) -> None:
    rounds = share(100_000)
    line, _ = a_line(0.0002)
    written, is_over = 0, False
    wrong: list[int] = []
    counts = {"told": 0, "late": 0}

    def lead() -> None:
        draw = random.Random(1)
        while not is_over:
            line.note_later(max(line.durable_id, written - draw.randrange(3)))

    def put(seed: int) -> None:
        nonlocal written
        draw = random.Random(seed)
        for _ in range(rounds // 4):
            written += 1
            item_id = written + draw.randrange(2)
            try:
                line.wait(item_id)
            except Late:
                counts["late"] += 1
                continue
            counts["told"] += 1
            if line.durable_id < item_id:
                wrong.append(item_id)

    leader = threading.Thread(target=lead)
    putters = [threading.Thread(target=put, args=(seed,)) for seed in range(4)]
    for thread in (leader, *putters):
        thread.start()
    for thread in putters:
        thread.join(60 + rounds / 100)
        assert not thread.is_alive(), "nobody has told it, and it has not given up"
    is_over = True
    leader.join(PATIENCE)
    assert not wrong
    assert counts["told"] > rounds // 20
    assert not line._tickets
    tally.add("waits for an absent leader, told or given up, in races", rounds)
