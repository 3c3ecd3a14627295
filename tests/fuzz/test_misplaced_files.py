"""What hands do to the files of a queue, drawn by seeds: each queue is verified, repaired, and judged by
``misplaced_judge``. Faults that are planted in the repair are found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from kestrelpy._journal import format as fmt
from kestrelpy._journal import salvage
from kestrelpy.inspection import inbox_check, repair, repair_files, verify
from kestrelpy.work import doubts, records
from tests.fuzz.misplaced import BLOCK, HIDDEN, MISHAPS, OF_ANOTHER_QUEUE, queue_world, work_world
from tests.fuzz.misplaced_judge import judge
from tests.fuzz.repairing import BrokenRepair, move_heads
from tests.support.budget import SEED, Tally, drawn, share

pytestmark = pytest.mark.usefixtures("quiet")
WORLDS = 12
OFTEN = 2 / 3
"""How often there is one mishap, and not two."""
PATIENCE = 400
"""So many seeds a planted fault has to be found in."""


def explore(seed: int) -> tuple[str, str]:
    """One queue, or work queue, and what hands have done to it. Returns that, and what came of it. Raises
    ``BrokenRepair``.
    """
    generator = random.Random(f"misplaced {seed}")
    made = work_world if generator.random() < 0.3 else queue_world
    world, other = (made(number) for number in generator.sample(range(WORLDS), 2))
    files, touched, kinds = dict(world.files), set[str](), list[str]()
    for _ in range(1 if generator.random() < OFTEN else 2):
        kind = generator.choice(sorted(MISHAPS))
        if not (kind in OF_ANOTHER_QUEUE and OF_ANOTHER_QUEUE.intersection(kinds)):
            kinds.append(kind)
            touched.update(MISHAPS[kind](files, generator, world, other))
    touched = {name for name in touched if files.get(name) != world.files.get(name)}
    try:
        found = judge(files, world, touched, hides=bool(HIDDEN.intersection(kinds)))
    except BrokenRepair as broken:
        raise BrokenRepair(f"seed {seed}, {kinds} of {sorted(touched)}: {broken}") from broken
    return kinds[0], found


def test_m9_misplaced_files(tally: Tally) -> None:
    counter = Counter(explore(SEED * 1_000_000 + seed) for seed in range(share(2_000)))
    damaged = sum(count for (_, found), count in counter.items() if found == "damaged")
    assert damaged > counter.total() / 3
    tally.add("queues with misplaced files, repaired", counter.total())


@pytest.mark.parametrize("name", MISHAPS)
def test_each_mishap(name: str) -> None:
    """Alone, with each world."""
    counter = Counter[str]()
    for made in (queue_world, work_world):
        for number in range(share(WORLDS)):
            world, other = made(number), made(number + 1)
            files = dict(world.files)
            touched = MISHAPS[name](files, random.Random(number), world, other)
            counter[judge(files, world, touched, hides=name in HIDDEN)] += 1
    assert counter.total() == 2 * share(WORLDS)
    assert counter["damaged"] or name in (*HIDDEN, "all_zero", "cut_at_a_block") or share(WORLDS) < 4


def test_every_file_cut_at_every_block() -> None:
    for world in (queue_world(3), work_world(3)):
        cuts = [
            (name, at)
            for name, data in sorted(world.files.items())
            if not name.endswith((".lock", ".limit", ".work"))
            for at in range(0, len(data), BLOCK)
        ]
        for name, at in drawn(cuts, share(len(cuts))):
            judge({**world.files, name: world.files[name][:at]}, world, {name})


# -- planted faults --------------------------------------------------------------------------------------------------


def believe_newest() -> Any:
    return mock.patch.object(salvage, "likely_queue_id", lambda headers, _: headers[0].queue_id)


def read_other_queues() -> Any:
    return mock.patch.object(salvage.Salvage, "_is_ours", return_value=True)


def believe_checkpoints() -> Any:
    return mock.patch.object(repair, "is_checkpoint_of", return_value=True)


def believe_readers() -> Any:
    def same_queue(state: fmt.Checkpoint, reader: str, queue_id: bytes) -> bool:
        del reader
        return state.queue_id == queue_id

    return mock.patch.object(repair, "is_checkpoint_of", same_queue)


@contextmanager
def remove_what_is_set_aside() -> Iterator[None]:
    real = repair_files.apply_steps

    def removing(files: Any, steps: Any) -> None:
        real(files, steps)
        for _, name in steps.moves:
            files.directory.unlink(name)

    with mock.patch.object(repair, "apply_steps", removing):
        yield


def leave_batches() -> Any:
    return mock.patch.object(inbox_check.InboxRepair, "write", return_value=None)


def verify_no_states() -> Any:
    return mock.patch.object(verify.Verification, "_check_states", return_value=None)


def verify_no_inbox() -> Any:
    return mock.patch.object(verify, "check_inbox", return_value=None)


def say_no_ids() -> Any:
    real = salvage.Salvage._miss

    def missing(self: salvage.Salvage, name: str, offset: int, reason: str, last_id: int, after: Any) -> None:
        del last_id
        real(self, name, offset, reason, after.previous_last_id, after)

    return mock.patch.object(salvage.Salvage, "_miss", missing)


@contextmanager
def give_ids_again() -> Iterator[None]:
    real = doubts.jobs_in_doubt

    def without(*args: Any) -> Any:
        missing, doubtful, _ = real(*args)
        return missing, doubtful, records.encode_totals(records.Totals(0, 0, 0, 0))

    with mock.patch.object(doubts, "jobs_in_doubt", without):
        yield


@contextmanager
def always_write() -> Iterator[None]:
    """A repair writes the mark again, whether anything is damaged or not."""
    real = repair.RepairSteps.__bool__

    def never_empty(self: Any) -> bool:
        if not real(self):
            self.readers[""] = fmt.encode_checkpoint_body(fmt.Checkpoint(bytes(16), "", 0, 0, 0, 0)).hex()
        return True

    with mock.patch.object(repair.RepairSteps, "__bool__", never_empty):
        yield


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "the newest segment says whose the queue is": (believe_newest, "3"),
    "segments of another queue are left": (read_other_queues, "2"),
    "a checkpoint of another queue is believed": (believe_checkpoints, "27"),
    "a checkpoint of another reader is believed": (believe_readers, "267"),
    "what is set aside is removed": (remove_what_is_set_aside, "5"),
    "batches that are not right are left": (leave_batches, "25"),
    "a reader is moved over items": (move_heads, "6"),
    "verify reads no checkpoints": (verify_no_states, "7"),
    "verify does not look at the inbox": (verify_no_inbox, "7"),
    "which items are missing is not said": (say_no_ids, "4"),
    "ids of lost jobs are given out again": (give_ids_again, "6"),
    "it writes though nothing is damaged": (always_write, "12"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    plant, rules = FAULTS[name]

    def hunt() -> None:
        for seed in range(PATIENCE):
            explore(seed)

    with plant(), pytest.raises(BrokenRepair, match=f": [{rules}]: "):
        hunt()
