"""Relays in the test kit: they move when a test says so, and nothing else there touches their jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import scan
from kestrelpy.inbox import take_in
from kestrelpy.outbox import Job, NotSupported, Outbox, OutboxError, UnknownQueue
from kestrelpy.outbox.testing import VirtualOutbox, virtual
from kestrelpy.work import WorkQueue

pytestmark = pytest.mark.filterwarnings("error")


def encode(job: Job) -> str:
    if job.payload < 0:
        raise ValueError("negative")
    return str(job.payload)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    made = Outbox()
    made.add_relay("events", tmp_path / "own", "log", batch=3, encode=encode)
    made.queue("events", backoff=10.0)
    made.add_consumer("mail", lambda payload: payload)
    return made


@pytest.fixture
def kit(outbox: Outbox, bind: Any) -> Iterator[VirtualOutbox]:
    with virtual(outbox, bind) as opened:
        yield opened


def items(folder: Path) -> list[int]:
    take_in(folder, "log")
    return [int(record.data) for record in scan(folder, "log")]


def test_what_is_due_is_moved(kit: VirtualOutbox, tmp_path: Path) -> None:
    for number in range(7):
        kit.put("events", number)
    kit.put("events", 7, delay=5)
    assert kit.relay("events") == 7
    assert kit.relay("events") == 0
    assert items(tmp_path / "own") == list(range(7))
    kit.clock.advance(5)
    assert kit.relay("events") == 1
    assert items(tmp_path / "own") == list(range(8))
    assert kit.jobs("events") == []


def test_another_folder(kit: VirtualOutbox, tmp_path: Path) -> None:
    kit.put("events", 1)
    assert kit.relay("events", tmp_path / "other") == 1
    assert items(tmp_path / "other") == [1]
    assert not (tmp_path / "own").exists()
    with pytest.raises(TypeError):
        kit.relay("events", b"bytes")  # type: ignore[arg-type]


def test_what_can_not_be_moved_is_in_error_and_the_rest_is_moved(kit: VirtualOutbox, tmp_path: Path) -> None:
    for number in (-1, -2, -3, -4, 5):
        kit.put("events", number)
    assert kit.relay("events") == 1
    assert items(tmp_path / "own") == [5]
    assert [(job.status, job.tries) for job in kit.jobs("events")] == [("error", 1)] * 4
    kit.clock.advance(10)
    assert kit.relay("events") == 0


def test_the_other_calls_let_it_be(kit: VirtualOutbox) -> None:
    kit.put("events", 1)
    kit.put("mail", 2)
    assert [run.value for run in kit.run_due()] == [2]
    assert kit.drain() == []
    assert kit.sweep() == []
    kit.assert_put("events", 1, status="ready", tries=0)
    for call in (kit.consume, kit.run_once, kit.take, kit.run_due, kit.drain, kit.force_retry):
        with pytest.raises(
            OutboxError, match=r"queue 'events' has a relay, and no handler: use test\.relay\('events'\)"
        ):
            call("events")
    kit.assert_put("events", 1, status="ready", tries=0)


def test_dependencies_between_a_relay_and_a_handler(kit: VirtualOutbox, tmp_path: Path) -> None:
    first = kit.put("mail", 1)
    second = kit.put("events", 2, depends_on=first)
    kit.put("mail", 3, depends_on=second)
    assert kit.relay("events") == 0
    assert [run.value for run in kit.drain()] == [1]
    assert kit.relay("events") == 1
    assert [run.value for run in kit.drain()] == [3]
    assert items(tmp_path / "own") == [2]


def test_a_queue_without_a_relay(kit: VirtualOutbox) -> None:
    with pytest.raises(OutboxError, match="queue 'mail' has no relay"):
        kit.relay("mail")
    with pytest.raises(UnknownQueue):
        kit.relay("evnets")


def test_an_error_of_the_folder_is_raised_and_the_next_call_goes_on(kit: VirtualOutbox, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("no folder")
    kit.put("events", 1)
    with pytest.raises(OSError, match="own"):
        kit.relay("events")
    (tmp_path / "own").unlink()
    assert kit.relay("events") == 1
    assert items(tmp_path / "own") == [1]


def test_one_test_after_the_other_in_one_folder(outbox: Outbox, tmp_path: Path) -> None:
    for number in range(3):
        with virtual(outbox) as test:
            test.put("events", number)
            assert test.relay("events") == 1
    assert items(tmp_path / "own") == [0, 1, 2]


def test_a_work_queue_has_none(outbox: Outbox) -> None:
    with pytest.raises(NotSupported, match="relay"), virtual(outbox, WorkQueue):
        pass
    assert not outbox.core.is_virtual
    with virtual(Outbox(), WorkQueue) as test:
        test._outbox.queue("events")
        with pytest.raises(OutboxError, match="has no relay"):
            test.relay("events")


def test_outside_of_the_block(outbox: Outbox) -> None:
    with virtual(outbox) as test:
        pass
    with pytest.raises(OutboxError, match="within its block"):
        test.relay("events")
