"""Each rule of docs/guarantees.md has tests that fail when it is broken: the table is ``breaking.RULES``. And the tests
of rules that none had before.

One rule, drawn with ``KESTRELPY_SEED``, is broken in a run of ``make test``, four are in one of ``make test-all``, and
their tests must fail; with ``KESTRELPY_SHARE=10`` all are.
"""

from __future__ import annotations

import contextlib
import errno
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, DurabilityUnknown, JournaledQueue, scan
from kestrelpy._disk import memory
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy.clock import Timer
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from tests.regressions.breaking import ROOT, RULES, drawn, places, unnoticed_by
from tests.regressions.relatives import change, content, on_disk, power_states, segments, take, vanish
from tests.support.budget import ALL, LONG, SEED

RELATIVES = """
    kestrel_1 kestrel_69 libkestrel_4 libkestrel_truncates libkestrel_makes_a_corrupt_bookmark
    libkestrel_gives_an_id_out_twice go_diskqueue_28 go_diskqueue_31 go_diskqueue_34 nsq_938 nsq_1033 nsq_471
    logstash_8218 logstash_12554 kafka_3968 kafka_10101 kafka_16541 chronicle_629 chronicle_793 beanstalkd_546
    etcd_14370 bbolt_567 persist_queue_180 persist_queue_56 persist_queue_142 persist_queue_89 queuelib_5
    queuelib_14 diskcache_287 diskcache_300
"""
"""Whose faults have a test each, in the modules beside this one."""


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_rule_has_tests_and_they_exist() -> None:
    assert list(RULES) == [f"R{number}" for number in range(1, 48)]
    missing = {(name, test) for name, rule in RULES.items() for test in rule.tests if test not in places()}
    assert not missing
    assert all(rule.tests for rule in RULES.values())


def test_every_rule_of_the_page_is_in_the_table() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    named = set(re.findall(r"\bR\d+\b", page))
    assert len(named) > 30
    assert named <= RULES.keys()


def test_every_fault_of_a_relative_has_its_test() -> None:
    faults = re.findall(r"\w+", RELATIVES)
    here = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_history_*.py"))
    without = [fault for fault in faults if not re.search(rf"^def test_history_{fault}[_(]", here, re.MULTILINE)]
    assert not without
    assert len(re.findall(r"^@history\(", here, re.MULTILINE)) == len(faults) == 30


@pytest.mark.parametrize("name", drawn(SEED, len(RULES) if LONG else 4 if ALL else 1))
def test_its_tests_fail_when_a_rule_is_broken(name: str) -> None:
    passed, told = unnoticed_by(name)
    assert not passed, f"broken, and not noticed by {passed}\n{told}"


# -- rules that had no test of their own -----------------------------------------------------------------------------


def test_r4_a_checkpoint_on_disk_names_nothing_that_is_not() -> None:
    """Whatever of a checkpoint a power cut leaves: the items up to the highest that it names are there too."""
    disk = CrashingDisk()
    states: list[CrashingDisk] = []
    queue = on_disk(disk)
    reader = queue.reader()
    disk.before_operation = lambda: states.extend(power_states(disk, 6))
    for n in range(6):
        queue.put(b"item %d" % n)
        reader.get_nowait().commit()
        reader.checkpoint(durable=n % 2 == 0)
    states.extend(power_states(disk, 6))
    disk.before_operation = None
    vanish(queue, disk)
    named = set()
    for state in states:
        saved, _ = load_checkpoint(state.directory("/q"), "jobs+.checkpoint")
        assert saved is not None
        there = max((record.id for record in scan("/q", "jobs", disk=state)), default=0)
        assert saved.highest_id <= there
        named.add(saved.highest_id)
    assert len(named) > 4


def test_r5_segments_wait_for_a_durable_checkpoint() -> None:
    """A reader that is past a segment, by a checkpoint that the disk need not have, still keeps it."""
    disk = CrashingDisk()
    queue = on_disk(disk, segment_bytes=4096)
    reader = queue.reader()
    put = {}
    for n in range(9):
        put[queue.put(b"%d" % n * 1500)] = b"%d" % n * 1500
    reader.checkpoint(durable=True)
    states: list[tuple[int, CrashingDisk]] = []
    done = 0

    def clone() -> None:
        states.extend((done, state) for state in power_states(disk, 3))

    disk.before_operation = clone
    for n in range(6):
        reader.get_nowait().commit()
        done = n + 1
        reader.checkpoint()
        queue._registry.retire(queue._source)
    disk.before_operation = None
    assert len(segments(disk)) < 5
    vanish(queue, disk)
    for at_most, state in states:
        found = content(state)
        assert found, "all of it was done?"
        assert min(found) <= at_most + 1
        assert found == {item_id: data for item_id, data in put.items() if min(found) <= item_id <= max(found)}


def test_r7_no_hole_where_a_segment_ends() -> None:
    """Nobody syncs; segments fill and close; the power goes. What is there is the front of what was put."""
    disk = CrashingDisk()
    states: list[CrashingDisk] = []
    queue = on_disk(disk, segment_bytes=4096)
    disk.before_operation = lambda: states.extend(
        power_states(disk, 4, PowerModel.EXT4, PowerModel.ANY) if disk.next_operation[0] != "store" else ()
    )
    put = {n + 1: b"%d" % n * 1500 for n in range(8)}
    for data in put.values():
        queue.put(data)
    states.extend(power_states(disk, 10))
    disk.before_operation = None
    vanish(queue, disk)
    assert len(segments(disk)) == 4
    lengths = set()
    for state in states:
        found = content(state)
        assert found == dict(list(put.items())[: len(found)])
        lengths.add(len(found))
    assert lengths >= {0, 2, 4, 6}


def test_r9_a_second_sync_is_not_believed() -> None:
    """A sync fails, and a second one would succeed: nothing is acknowledged on its word, now or later."""
    disk = CrashingDisk()
    failing = FailingDisk(disk)
    queue = on_disk(failing, sync="always")
    acknowledged = {queue.put(b"safe"): b"safe"}
    failing.arm(errno.EIO, kinds={"sync"})
    for data in (b"doubtful" * 1000, b"later"):
        with contextlib.suppress(DurabilityUnknown):
            acknowledged[queue.put(data)] = data
    for state in power_states(disk, 20):
        assert acknowledged.items() <= content(state).items()
    assert acknowledged == {1: b"safe"}
    vanish(queue, disk)


def test_r10_what_a_failed_sync_left_in_the_cache_is_not_believed() -> None:
    """A sync fails and marks its pages clean; the process dies. The items can be seen, and the disk does not have them:
    what the next opening shows must still be there after a power cut.
    """
    disk = CrashingDisk()
    failing = FailingDisk(disk)
    queue = on_disk(failing)
    queue.put(b"safe")
    queue.sync()
    queue.put(b"only in the cache" * 1000)
    failing.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.sync()
    vanish(queue, disk)
    again = on_disk(disk)
    shown = take(again)
    states = list(power_states(disk, 20))
    vanish(again, disk)
    assert shown[1] == b"safe"
    for state in states:
        assert content(state) == shown


def test_r17_the_ids_of_a_torn_tail_stay_used() -> None:
    """Also when the opening that cut the tail put nothing and was killed."""
    disk = CrashingDisk()
    queue = on_disk(disk)
    for n in range(3):
        queue.put(b"item %d" % n)
    vanish(queue, disk)

    def tear(data: bytearray) -> None:
        data[data.index(b"item 0")] ^= 1

    change(disk, segments(disk)[-1], tear)
    for _ in range(2):
        assert content(disk) == {}
    queue = on_disk(disk)
    assert queue.put(b"new") == 4
    vanish(queue, disk)


def test_r20_recovery_killed_at_each_of_its_steps() -> None:
    """A torn tail; the opening is killed before each of its operations, and that of the next, too: all see the same."""
    disk = CrashingDisk()
    queue = on_disk(disk, segment_bytes=4096)
    for n in range(5):
        queue.put(b"%d" % n * 1200)
    vanish(queue, disk)
    change(disk, segments(disk)[-1], lambda data: data.__delitem__(slice(len(data.rstrip(b"\0")) - 30, len(data))))

    def killed(start: CrashingDisk) -> list[CrashingDisk]:
        clones: list[CrashingDisk] = []
        trial = start.after_kill()
        trial.before_operation = lambda: clones.append(trial.after_kill())
        content(trial)
        trial.before_operation = None
        return clones

    expected = content(disk.after_kill())
    assert list(expected) == [1, 2, 3, 4]
    first = killed(disk)
    assert len(first) > 5
    for clone in first:
        assert content(clone.after_kill()) == expected
        for again in killed(clone)[::3]:
            assert content(again) == expected


def test_a_length_beyond_the_segment_is_damage() -> None:
    """R21: a record that claims to be longer than its segment is damage; that many bytes are not asked for."""
    disk = CrashingDisk()
    with on_disk(disk) as queue:
        queue.reader()
        for n in range(3):
            queue.put(b"item %d" % n)

    def lie(data: bytearray) -> None:
        at = data.index(b"item 1") - fmt.FRAME_BYTES
        data[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")

    change(disk, segments(disk)[0], lie)
    asked: list[int] = []
    real = memory.MemoryFile.read

    def read(self: memory.MemoryFile, offset: int, size: int) -> bytes:
        asked.append(size)
        if len(asked) > 1000:
            raise AssertionError("it does not end")
        return real(self, offset, size)

    with patch.object(memory.MemoryFile, "read", read):
        queue = on_disk(disk)
        assert queue.get_nowait().data == b"item 0"
        with pytest.raises(CorruptJournal):
            queue.get_nowait()
    assert max(asked) < 1 << 20
    vanish(queue, disk)


CONSUMER = """
    import sys, threading
    from kestrelpy import JournaledQueue, QueueClosed
    queue = JournaledQueue(sys.argv[1], "jobs")
    reader = queue.reader()
    started = threading.Event()
    def wait():
        started.set()
        try:
            reader.get(timeout=float(sys.argv[2]))
        except QueueClosed:
            print("closed")
    threading.Thread(target=wait).start()
    started.wait()
    """
KEPT = """
import kestrelpy._process as _process
class Forgetful(type(_process._live)):
    def __setitem__(self, thing, must_close): pass
_process._live = Forgetful()
"""


@pytest.mark.parametrize("planted", [False, True], ids=["as-it-is", "planted"])
def test_r29_a_waiting_thread_does_not_keep_the_interpreter(planted: bool, tmp_path: Path) -> None:
    """The main thread ends while another waits in a get; with the fault, the interpreter waits as long as the get."""
    source = (KEPT if planted else "") + textwrap.dedent(CONSUMER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, str(tmp_path), "0.5" if planted else "60"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout.strip() == "closed") is not planted, done.stderr


class Dying(ManualClock):
    """A clock whose maintenance thread can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[Callable[[BaseException], object]] = []

    def call_later(self, seconds: float, callback: Any, *, on_lost: Any = None) -> Timer:
        if on_lost is not None:
            self.lost.append(on_lost)
        return super().call_later(seconds, callback)


def test_r30_a_queue_whose_maintenance_thread_died_says_so() -> None:
    """Nobody would sync any more: puts and waiting gets are told, instead of waiting for ever."""
    clock = Dying()
    queue: JournaledQueue = on_disk(CrashingDisk(), clock=clock, sync=0.1)
    future = queue.get_future()
    other = queue.get_future()
    queue.put(b"shown")
    assert future.result(0).data == b"shown"
    for lost in list(clock.lost):
        lost(SystemExit())
    assert isinstance(other.exception(0), DurabilityUnknown)
    for call in (lambda: queue.put(b"more"), queue.sync, lambda: queue.get_nowait()):
        with pytest.raises(DurabilityUnknown):
            call()
    with contextlib.suppress(DurabilityUnknown):
        queue.close()
