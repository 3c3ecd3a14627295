"""A KeyboardInterrupt at every place of every operation of a journaled queue; the rules are in ``scenes.py``.

The central operations are struck at every place by ``make test-all`` and at some by ``make test``, the others at some,
drawn by a seed that is printed; with ``KESTRELPY_SHARE=10`` all of them at all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from kestrelpy import JournaledQueue, QueueDiskFull, open_reader
from kestrelpy._journal import format as fmt
from kestrelpy._journal.journal import Journal
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.reader import Reader
from kestrelpy.testing import CrashingDisk, ManualClock
from tests.interrupts import interrupting, strikes
from tests.interrupts.operations import CENTRAL, OPERATIONS
from tests.interrupts.scenes import Broken, Scene
from tests.support.budget import ALL, LONG, SEED
from tests.support.queues import take_all

pytestmark = pytest.mark.usefixtures("small_batches")

SAMPLE = 25 if ALL else 8
PACKAGE = Path(strikes.__file__).parents[2] / "kestrelpy"


@pytest.mark.parametrize("name", CENTRAL)
def test_a_central_operation_at_every_place(name: str) -> None:
    print(f"seed {SEED}")
    counts = interrupting.run(SEED, [name], limit=None if ALL else 60)
    assert counts[name] >= 4, "the tracer sees nothing"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in CENTRAL])
def test_an_operation_at_some_places(name: str) -> None:
    print(f"seed {SEED}")
    counts = interrupting.run(SEED, [name], limit=None if LONG else SAMPLE)
    assert counts[name] >= 4, "the tracer sees nothing"


# -- what the table above can't show ---------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def test_no_loop_hides_an_interrupt_from_its_handler() -> None:
    """By the exception tables of the Python that runs this: 3.13 is the one that has something to say."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name in ("cli", "testing"):  # their locks end with the process, or with the test
            continue
        for code in _codes(compile(path.read_text(), str(path), "exec")):
            found += [f"{path.name}, line {line}" for line in strikes.Layout(code).unhandled_jumps()]
    assert not found


@pytest.mark.parametrize("what", ["queue", "reader", "reader in another process"])
def test_what_was_committed_before_an_interrupted_close_does_not_come_again(what: str) -> None:
    def reader_of(queue: JournaledQueue) -> Reader:
        if what != "reader in another process":
            return queue.reader("one", start="earliest")
        return open_reader("/data", "jobs", "one", create=True, start="earliest", clock=clock, disk=disk)

    for at in itertools.count(1):
        striker, clock, disk = strikes.interrupter_at(at), ManualClock(), CrashingDisk()
        queue = JournaledQueue("/data", "jobs", clock=clock, disk=disk)
        queue.put_many([b"1", b"2", b"3"])
        reader = reader_of(queue)
        future, items = reader.get_future(), reader.get_many(2)
        reader.commit(future.result(0))
        reader.commit(items[1])
        closing = queue if what == "queue" else reader
        struck = striker.run(closing.close)
        closing.close()
        queue.close()
        again = JournaledQueue("/data", "jobs", clock=clock, disk=disk)
        found = [item.id for item in take_all(again.reader("one"))]
        again.close()
        assert found == [2], striker.where
        if not struck:
            break
    assert at > 50, "the tracer sees nothing"


def test_the_segment_of_an_interrupted_beginning_goes_before_the_next(clock: ManualClock) -> None:
    """Left between two others, a later opening would take it for damage."""
    total = interrupting.strike("put_rotating", 0, 1).places
    removed = 0
    for at in range(1, total + 1):
        striker = strikes.interrupter_at(at)
        scene = Scene(segment_bytes=4096)
        scene.do_put(b"x" * 3500)
        with contextlib.suppress(KeyboardInterrupt):
            striker.run(functools.partial(scene.queue.put, b"y" * 1000))
        begun = scene.queue._journal._begun
        there = scene.disk.directory("/data").names()
        scene.queue.put(b"z" * 1000)
        removed += begun in there
        assert begun not in scene.disk.directory("/data").names()
        scene.vanish()
    assert removed > 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_beginning_that_could_not_be_cleaned_up_is_cleaned_up_later(error: int, clock: ManualClock) -> None:
    queue = JournaledQueue("/data", "jobs", clock=clock, disk=CrashingDisk())

    def half_made(directory: Any, name: str, *_: Any) -> None:
        directory.create(name).close()
        raise OSError(error, os.strerror(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kestrelpy._journal.journal.create_segment", half_made)
        with pytest.raises(QueueDiskFull if error == errno.ENOSPC else OSError):
            queue.put(b"a")
    (left,) = [name for name in queue._held.files.directory.names() if name.endswith(".segment")]
    assert queue.put(b"b") == 1
    assert left not in queue._held.files.directory.names()
    queue.close()


# -- does it catch anything? -----------------------------------------------------------------------------------------


def _caught(*names: str) -> bool:
    try:
        interrupting.run(1, names)
    except Broken:
        return True
    return False


def _pop_first(self: Reader, item: Any) -> None:
    backlog = self._backlog
    with backlog.lock:
        backlog.opened.pop(item.id)
        backlog.progress.release(item.id, len(item.data))


def _acquire_by_hand(self: Reader, *_: Any, **__: Any) -> Any:
    backlog = self._backlog
    backlog.lock.acquire()
    found = backlog.find([])
    assert found is not None
    item = backlog.open_read(*found)
    backlog.lock.release()
    return item


def _count_first(self: Journal, data: bytes, added_ms: int) -> int:
    if self._at[0] + 32 + len(data) > self._room:
        self._make_room(32 + len(data), added_ms)
    offset, tail_id, total = self._at
    self._at = (offset + 32 + len(data), tail_id + 1, total + len(data))
    frame = fmt.encode_item(tail_id + 1, data, added_ms, None, self.durable_id, self._marker)
    assert self._buffer is not None
    self._buffer[offset : offset + len(frame)] = frame
    return tail_id + 1


def _forget_nothing(self: Any, *_: Any) -> None:
    """Nobody looks for what an interrupted one had in its hands."""


def _find_all_well(self: Backlog) -> None:
    self.disturbed = False
    self.update_fast_path()


PLANTED: dict[str, tuple[tuple[Any, str, Any], tuple[str, ...]]] = {
    "a commit that takes the item out first": ((Reader, "commit", _pop_first), ("commit",)),
    "a lock that is taken without with": ((Reader, "get", _acquire_by_hand), ("get_from_the_window",)),
    "a journal that counts before it stores": ((Journal, "append", _count_first), ("put_first",)),
    "an interrupted get that keeps its item": ((Dispatcher, "recover", _forget_nothing), ("get_from_the_window",)),
    "a repair that repairs nothing": ((Backlog, "_repair", _find_all_well), ("abort",)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_faults_are_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, name, fault), operations = PLANTED[what]
    assert not _caught(*operations)
    monkeypatch.setattr(owner, name, fault)
    assert _caught(*operations)
