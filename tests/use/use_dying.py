"""Operations on dead letters: they are read, put back and dropped; and what must be refused."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy import (
    DeadLetter,
    ItemTooLarge,
    KestrelError,
    ReaderConfig,
    UnknownItem,
    UnknownReader,
    dead_letters,
    open_reader,
)
from kestrelpy.dead_queue import DeadLetters
from tests.use.use_graves import Moving
from tests.use.use_model import Batch, Put, ReaderModel
from tests.use.use_opening import FOLDER, bind, end, let_go
from tests.use.use_operations import check_error, operation
from tests.use.use_reading import abort, is_exact
from tests.use.use_trouble import KINDS

if TYPE_CHECKING:
    from tests.use.use_world import Process, Result, World


@operation("dead_read", 4)
def read_letters(w: World, rng: random.Random, process: Process) -> None:
    """Somebody looks at the dead letters, and puts some back, or drops them."""
    model = w.models[w.graves.name]
    if model.is_going:
        return
    name = rng.choice(["", "", *sorted(model.readers)])
    nested, was_there = w.nested, model.made
    w.touched.add(model.name)
    where = {"disk": process.disk, "clock": process.clock}
    result = w.call(process, dead_letters, FOLDER, model.name, reader=name, **where)
    w.graves.look()
    if isinstance(result.error, UnknownReader):
        known = model.readers.get(name)
        w.require(known is None or not known.exists or model.unsure or nested != w.nested, f"{result.error!r}")
        return
    letters = result.value
    if letters is not None and letters._reader is None:
        w.require(
            not was_there or model.erased or nested != w.nested, "there are no dead letters, and there is a queue"
        )
        return
    if letters is not None:
        result.value = letters._reader
    reader = bind(w, process, model, name, "earliest", result, ReaderConfig(), nested, here=False)
    if reader is None or letters is None:
        if letters is not None:
            w.call(process, letters.close)
        return
    later = take_some(w, rng, process, reader, letters)
    reader_moves = reader.moves
    closed, clean = end(w, process, letters.close)
    w.note_fault(model, closed)
    check_error(w, model, closed, process, reader)
    if reader.process is process:
        let_go(w, process, reader, saved=clean and closed.ok and not model.failed and reader_moves == reader.moves)
    w.saw("dead letters are read")
    if later is not None and reader.process is None and rng.random() < 0.5:
        do_one(w, rng, process, reader, *later)
        w.saw("a dead letter after the iteration")


def take_some(
    w: World, rng: random.Random, process: Process, reader: ReaderModel, letters: DeadLetters
) -> tuple[Put, DeadLetter] | None:
    """Read some of them; one that is left alone is returned."""
    later = None
    for _ in range(rng.choice((1, 3, 20))):
        nested = w.nested
        result = w.call(process, next_of(letters))
        if result.error is not None or result.value is None:
            w.note_fault(reader.queue, result)
            check_error(w, reader.queue, result, process, reader)
            if result.ok and is_exact(w, reader, nested) and not reader.queue.failed:
                left = reader.surely_left(w.now_ms)
                w.require(not left, f"there are no more dead letters, and item {left[0].id if left else 0} is there")
            return None if later is None or result.error is not None else later
        letter: DeadLetter = result.value
        put = w.deliver(reader, letters._open[letter.letter_id], exact=is_exact(w, reader, nested))
        check_shown_letter(w, put, letter)
        what = rng.random()
        if what < 0.6:
            do_one(w, rng, process, reader, put, letter)
        else:
            later = put, letter
    return later


def next_of(letters: DeadLetters) -> Any:
    def following() -> DeadLetter | None:
        return next(letters, None)

    following.__doc__ = "Raises ``CorruptJournal``, ``QueueClosed``, ``DurabilityUnknown``, ``OSError``."
    return following


def check_shown_letter(w: World, put: Put, letter: DeadLetter) -> None:
    """It shows what is there."""
    known = put.letter
    if known is None:
        w.require(letter.queue == "" and letter.data == put.data, f"{put} is no dead letter, and is {letter!r}")
        return
    shown = {name: getattr(letter, name) for name in known.about}
    w.require(shown == known.about and letter.data == known.put.data, f"{put} is shown as {letter!r}: {known.about}")


def do_one(w: World, rng: random.Random, process: Process, reader: ReaderModel, put: Put, letter: DeadLetter) -> None:
    """Put it back, or drop it."""
    if rng.random() < 0.3:
        result = w.call(process, letter.drop)
        w.note_fault(reader.queue, result)
        settle(w, process, reader, put, result, None)
        w.saw("a dead letter is dropped" if result.ok else "a dead letter could not be dropped")
        return
    if put.letter is None:
        result = w.call(process, letter.requeue)
        w.require(
            isinstance(result.error, ValueError), f"requeue() of {put}, which is no dead letter: {result.error!r}"
        )
        return
    model = w.models[letter.queue]
    if model.is_going:
        return
    w.touched.add(model.name)
    copy = model.new_copy(put.number, letter.data)
    moving = Moving(w.graves, reader, put, copy, model)
    w.graves.moving.append(moving)
    reader.pending[put] = moving
    reader.open.pop(put, None)
    reader.settling.add(put)
    with failing(w, rng, 0.3):
        result = w.call(process, letter.requeue)
        w.note_fault(reader.queue, result)
        reader.settling.discard(put)
        settle(w, process, reader, put, result, moving)


def settle(w: World, process: Process, reader: ReaderModel, put: Put, result: Result, moving: Moving | None) -> None:
    """What the call has come to."""
    error = result.error
    if error is None:
        if moving is not None:
            moving.state = "there"
            if w.models[moving.model.name] is moving.model:
                moving.model.batches.append(Batch(moving.copies[:1], w.elapsed))
            else:
                moving.model.may_be_there(moving.copies[0])
            w.saw("a dead letter is put back")
        reader.arrived(put)
        return
    if isinstance(error, UnknownItem):
        w.require(w.depth or put not in reader.open or reader.process is None, f"{error!r} of {put}")
    elif not isinstance(error, ItemTooLarge):
        check_error(w, reader.queue, result, process, reader)
    if moving is None:
        reader.doubt([put])
    elif isinstance(error, ItemTooLarge | UnknownItem):
        reader.pending.pop(put, None)
        moving.state = "not there"
        moving.model.refuse(moving.copies[0])
        reader.doubt([put])
    else:
        moving.model.holes = w.batches_unsure = True  # it may be published all the same
        moving.model.may_be_there(moving.copies[0])
        if reader.process is process:
            reader.dying.add(put)
            reader.settling.add(put)
        else:
            reader.optional.add(put)


@contextlib.contextmanager
def failing(w: World, rng: random.Random, often: float) -> Iterator[None]:
    """The disk has no room within this block, now and then; after it, that is no excuse for anything else."""
    trouble = w.trouble
    if trouble.times or w.depth or rng.random() >= often:
        yield
        return
    fired, nested = trouble.fired, w.nested
    error, kinds = KINDS[rng.choice(("ENOSPC", "EMFILE"))]
    trouble.arm(error, kinds, after=rng.choice((0, 1, 2, 3, 5, 8)), times=rng.choice((1, 2, 30)))
    try:
        yield
    finally:
        trouble.disarm()
        if trouble.fired > fired:
            w.saw("a move meets a full disk")
        if nested == w.nested:
            trouble.fired = fired


EVERY = (
    *("read", "write", "grow", "truncate", "sync", "names", "open", "create", "rename", "unlink", "sync_directory"),
    *("lock", "directory"),
)


@operation("dead_fail", 2, nestable=False)
def fail_to_move(w: World, rng: random.Random, process: Process) -> None:
    """Items fail while there is no room; or from some operation on the process does nothing any more, and is killed."""
    for reader in process.readers:
        if reader.config is not None and reader.config.max_deliveries == 1 and not w.swarm.ships:
            if rng.random() < 0.6 or w.depth:
                with failing(w, rng, 0.9):
                    abort(w, rng, process)
                return
            fired = w.trouble.fired
            w.trouble.arm(errno.EIO, EVERY, after=rng.randrange(40), times=1 << 30)
            abort(w, rng, process)
            w.trouble.disarm()
            w.kill(process)
            w.trouble.fired = fired
            w.saw("a process is killed in the middle of a move")
            return


@operation("dead_odd", 0.3)
def odd(w: World, rng: random.Random, process: Process) -> None:
    """What must be refused: a queue that is its own dead-letter queue, and delays that are none."""
    model = w.models["a"]
    if rng.random() < 0.5:
        config = ReaderConfig(dead_letter=model.name)
        where = {"disk": process.disk, "clock": process.clock}
        result = w.call(process, open_reader, FOLDER, model.name, "t", config=config, create=True, **where)
        refused = isinstance(result.error, ValueError | KestrelError | OSError)
        w.require(refused and not result.ok, "a queue is its own dead-letter queue")
        model.unsure = True
        return
    readers = [reader for reader in process.readers if reader.handle is not None and reader.open]
    if readers:
        reader = rng.choice(readers)
        item = rng.choice(list(reader.open.values()))
        result = w.call(process, item.abort, rng.choice((-1, float("nan"), float("inf"))))
        w.require(isinstance(result.error, ValueError), f"abort() took a delay that is none: {result.error!r}")
