"""Takeovers by force: the owner is killed, a standby in another process is told to take the queue over, and the old
owner's folder becomes a standby. What was acknowledged is in the log; what was acknowledged on disk alone may be set
aside instead.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.ship import open_store
from tests.ship.takeovers import Chain, Member
from tests.support.budget import SEED, Tally, share
from tests.support.seaweed import Seaweed


def take_over_in_turn(tmp_path: Path, url: str, options: dict[str, Any], acks: str, count: int) -> tuple[int, int]:
    """``count`` takeovers. Returns how many puts were acknowledged, and how many of them were set aside."""
    draw = random.Random(SEED)
    chain = Chain([Member(tmp_path / name, url, acks, options, lease=0) for name in ("one", "two")])
    try:
        chain.start()
        for _ in range(count):
            (standby,) = (member for member in chain.members if member is not chain.owner())
            if draw.random() < 0.3:
                chain.start_again(standby)
            chain.wait_for_puts(draw.choice((5, 30, 200 if acks == "disk" else 40)))
            chain.fail("kill, and tell")
        chain.finish()
    finally:
        chain.end()
    aside = chain.check(open_store(url, options=options or None), acks)
    return sum(len(member.acknowledged()) for member in chain.members), aside


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_owners_are_killed_and_taken_over_in_a_folder(tmp_path: Path, acks: str, tally: Tally) -> None:
    count = 3 + share(20)
    there, aside = take_over_in_turn(tmp_path, f"file://{tmp_path}/store", {}, acks, count)
    tally.add(f"takeovers by a standby after a SIGKILL (acks={acks!r}, a folder)", count)
    tally.add("acknowledged puts before takeovers", there)
    tally.add("acknowledged puts that were set aside", aside)


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_owners_are_killed_and_taken_over_in_an_object_store(
    tmp_path: Path, s3: Seaweed, acks: str, tally: Tally
) -> None:
    count = 2 + share(10)
    take_over_in_turn(tmp_path, f"s3://kestrel/standbys-{acks}-{os.getpid()}", s3.options(), acks, count)
    tally.add(f"takeovers by a standby after a SIGKILL (acks={acks!r}, s3)", count)
