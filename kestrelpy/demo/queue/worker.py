"""The demo's worker processes, which are killed: ``python -m kestrelpy.demo.queue.worker write|read FOLDER``.

*write*: opens the queue, puts lines from the end of the journal on, and runs reader *near* on another thread.
*read*: opens reader *far* in a process of its own. Both keep ledgers in the folder (see ``ledger``). If the standard
input of a worker ends, its parent is gone, and the worker ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kestrelpy import FullPolicy, Item, JournaledQueue, QueueEmpty, QueueLocked, Reader, ReaderConfig, open_reader
from kestrelpy.demo.corpus import Corpus
from kestrelpy.demo.queue.ledger import Ledger, digest

QUEUE = "lines"
NEAR, FAR = "near", "far"
FINISH = b"finish\n"
PLANTS = ("lost-line", "lost-item", "swapped", "changed", "repeated")
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerPlan:
    """The parent's instructions for its workers, passed in a file. ``plant``: a fault to plant, or empty."""

    lines: int
    sync: float | Literal["always", "never"] = 0.1
    segment_bytes: int = 4 << 20
    put_items: int = 200
    get_items: int = 500
    batch_bytes: int = 1 << 20
    checkpoint_seconds: float = 0.25
    max_ahead: int = 100_000  # the producer waits while near has so many unread lines
    pace: float = 0.0  # lines per second; 0: as fast as possible
    plant: str = ""

    def save(self, folder: Path) -> None:
        """Write the plan to a file."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="ascii")

    @classmethod
    def load(cls, folder: Path) -> WorkerPlan:
        """Read the plan that ``save`` wrote."""
        return cls(**json.loads((folder / "plan.json").read_text(encoding="ascii")))


def write(folder: Path, plan: WorkerPlan, finish: threading.Event) -> None:
    """Put the missing lines and read them as *near*, until the parent says that *far* is done too."""
    ledger = Ledger(folder / "put.ledger")
    with JournaledQueue(
        folder / "queue",
        QUEUE,
        sync=plan.sync,
        segment_bytes=plan.segment_bytes,
        checkpoint_interval=plan.checkpoint_seconds,
        readers={NEAR: ReaderConfig(max_items=plan.max_ahead, full_policy=FullPolicy.BLOCK)},
    ) as queue:
        near = queue.reader(NEAR, start="earliest")
        if ledger.is_new:  # both readers exist before the first line, or far would miss retired lines
            queue.reader(FAR, start="earliest").close()
        tail = queue.stats().tail_id
        ledger.begin(tail)
        consumer = threading.Thread(target=_or_die, args=(consume, near, folder, NEAR, plan))
        consumer.start()
        for ids in put_lines(queue, Corpus.load(folder / "corpus.json"), tail, plan):
            ledger.put(ids[-1])
        (folder / "put.done").touch()
        consumer.join()
        finish.wait()
        queue.checkpoint()  # every reader is done: this retires the segments


def put_lines(queue: JournaledQueue, corpus: Corpus, tail: int, plan: WorkerPlan) -> Iterator[range]:
    """Put the lines after the first ``tail`` lines, in batches. Yields the ids of each batch.

    One line is one item, and ids rise by one from 1, so line n has the id n. ``tail`` comes from the journal and not
    from the ledger, because a put that a kill interrupted is in the journal or not.
    """
    began = time.monotonic()
    position = tail
    planted = plan.lines // 2 if plan.plant == "lost-line" else 0
    for batch in corpus.batches(tail, plan.put_items, plan.batch_bytes):
        if position < planted <= position + len(batch):
            del batch[planted - position - 1]
            planted = 0
        if not batch:
            continue
        ids = queue.put_many(batch, timeout=None)
        if ids != range(position + 1, position + len(batch) + 1):
            raise RuntimeError(f"a batch of {len(batch)} items after id {position} got the ids {ids}")
        position = ids[-1]
        yield ids
        if plan.pace and (ahead := (position - tail) / plan.pace - (time.monotonic() - began)) > 0:
            time.sleep(ahead)


def read(folder: Path, plan: WorkerPlan) -> None:
    """Read as *far*, while another process writes."""
    reader = _open_far(folder)
    try:
        consume(reader, folder, FAR, plan)
    finally:
        reader.close()


def _open_far(folder: Path) -> Reader:
    """Open reader *far*. A killed process releases the reader's lock, but perhaps a moment later: wait for that."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return open_reader(folder / "queue", QUEUE, FAR, create=True)
        except QueueLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def consume(reader: Reader, folder: Path, name: str, plan: WorkerPlan) -> None:
    """Get, note and commit items, until the last line was seen, or until all are put and none is left."""
    ledger = Ledger(folder / f"{name}.ledger")
    ledger.begin(0)
    note = _planted(ledger, plan) if name == FAR and plan.plant else _note(ledger)
    put_is_done = folder / "put.done"
    saved = time.monotonic()
    seen = 0
    while seen < plan.lines:
        was_done = put_is_done.exists()  # checked before the get: first done and then empty means the end
        try:
            items = reader.get_many(plan.get_items, max_bytes=plan.batch_bytes, timeout=0.2)
        except QueueEmpty:
            if was_done:
                break
            continue
        note(items)
        reader.commit_many(items)
        seen = items[-1].id
        if (now := time.monotonic()) - saved >= plan.checkpoint_seconds:
            reader.checkpoint()
            saved = now
    reader.checkpoint()
    ledger.close()


def _note(ledger: Ledger) -> Callable[[list[Item]], None]:
    return lambda items: ledger.got([(item.id, digest(item.data)) for item in items])


def _planted(ledger: Ledger, plan: WorkerPlan) -> Callable[[list[Item]], None]:
    """A note with one error, halfway, to show that the proof finds it."""
    target = max(2, plan.lines // 2)

    def note(items: list[Item]) -> None:
        notes = [(item.id, digest(item.data)) for item in items]
        at = max(1, target - items[0].id)
        if items[0].id <= target <= items[-1].id and at < len(notes):
            if plan.plant == "lost-item":
                del notes[at]
            elif plan.plant == "swapped":
                (one, here), (other, there) = notes[at], notes[at - 1]
                notes[at], notes[at - 1] = (other, there), (one, here)
            elif plan.plant == "changed":
                notes[at] = (notes[at][0], digest(b"not this line"))
            elif plan.plant == "repeated":
                notes.insert(at, notes[at])
        ledger.got(notes)

    return note


def _or_die(work: Callable[..., None], *args: object) -> None:
    """Run a thread's work. If it fails, end the process."""
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _obey(finish: threading.Event) -> None:
    """Wait for the parent's message on standard input. If the parent is gone, end the process."""
    if (
        os.read(0, len(FINISH)) == FINISH
    ):  # not sys.stdin: its lock, held by this thread, would stop the interpreter's exit
        finish.set()
    else:
        os._exit(3)


def main(argv: list[str]) -> int:
    """Run the worker that ``argv`` names."""
    role, folder = argv[0], Path(argv[1])
    finish = threading.Event()
    threading.Thread(target=_obey, args=(finish,), daemon=True).start()
    plan = WorkerPlan.load(folder)
    if role == "write":
        write(folder, plan, finish)
    else:
        read(folder, plan)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
