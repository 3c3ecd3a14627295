"""The table of operations: one function for each, with its weight. To add one, write one function.

An operation gets the world, a generator and the process that does it; where it has nothing to do it returns. It calls
the library through ``World.call``, and tells the model what came of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kestrelpy import CorruptJournal, DurabilityUnknown, ForkedQueue, QueueClosed
from kestrelpy.ship import NotShipped
from tests.use.use_model import Put, QueueModel, ReaderModel

if TYPE_CHECKING:
    from tests.use.use_world import Opened, Process, Result, World

Function = Callable[["World", random.Random, "Process"], None]


@dataclass(frozen=True)
class Operation:
    function: Function
    weight: float
    nestable: bool


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, weight: float, *, nestable: bool = True) -> Callable[[Function], Function]:
    """Register a function; ``nestable``: whether a hook, or another process in the middle of a call, may do it."""

    def note(function: Function) -> Function:
        OPERATIONS[name] = Operation(function, weight, nestable)
        return function

    return note


# -- what operations share -----------------------------------------------------------------------------------------


def choose_opened(rng: random.Random, process: Process) -> Opened | None:
    return rng.choice(list(process.queues.values())) if process.queues else None


def choose_reader(w: World, rng: random.Random, process: Process) -> ReaderModel | None:
    readers = [reader for reader in process.readers if reader.handle is not None]
    return rng.choice(readers) if readers else None


def is_here(process: Process, reader: ReaderModel) -> bool:
    """Whether the process that has the reader open is the queue's writer, and has it through the queue."""
    opened = process.queues.get(reader.queue.name)
    return (
        opened is not None
        and reader.handle is not None
        and reader.process is process
        and reader.handle._source is opened.queue._source
    )


def check_error(
    w: World, model: QueueModel, result: Result, process: Process, reader: ReaderModel | None = None
) -> None:
    """An error that is documented must have a reason, too."""
    error = result.error
    if error is None or result.interrupted or model.erased:
        return
    if w.ships.explains(model.name, error):
        return
    troubled = w.trouble.fired or w.trouble.refused_blocks or any(each.disk.waited for each in w.processes)
    if isinstance(error, DurabilityUnknown):
        w.require(model.failed or w.trouble.fired, f"{error!r}, and no sync has failed")
        model.failed = True
    elif isinstance(error, QueueClosed):
        opened = process.queues.get(model.name)
        closed = (opened is None or opened.queue.closed or model.damaged) or (
            reader is not None and (reader.handle is None or w.handles.get(id(reader.handle)) is not reader)
        )
        w.require(
            closed or w.nested or (reader is not None and _is_over(reader)), f"{error!r}, and nobody has closed it"
        )
    elif isinstance(error, ForkedQueue):
        raise w.fail(f"{error!r}, and nobody has forked")
    elif isinstance(error, CorruptJournal):
        w.require(model.damaged, f"{error!r}, and nothing is damaged")
    elif isinstance(error, OSError):
        w.require(troubled or model.damaged, f"{error!r}, and nothing is wrong with the disk")


def _is_over(reader: ReaderModel) -> bool:
    return reader.handle is None


def settle_puts(w: World, process: Process, opened: Opened, puts: list[Put], result: Result, nested: int) -> None:
    """What a put has come to."""
    model = opened.model
    error = result.error
    if error is None:
        ids = list(result.value) if isinstance(result.value, range) else [result.value]
        w.require(len(ids) == len(puts), f"{len(puts)} items were put, and ids are {ids}")
        for put, item_id in zip(puts, ids, strict=True):
            model.store(put, item_id)
        if nested == w.nested and not model.flying and not model.holes and not model.damaged:
            w.require(ids[-1] == model.tail_id == len(model.stored), f"ids are not dense: {ids}, of {model.tail_id}")
        w.limits.check_accepted(opened, puts, nested)
        w.ships.note_accepted(opened, puts, nested)
        w.drop_oldest(model, puts)
    elif isinstance(error, NotShipped) and error.first_id <= error.last_id:
        w.require(error.last_id + 1 - error.first_id == len(puts), f"{len(puts)} items were put, and {error!r}")
        for item_id, put in enumerate(puts, error.first_id):
            model.store(put, item_id)
        model.flying.update(puts)  # readers here see them when they are in the store
        check_error(w, model, result, process)
        w.drop_oldest(model, puts)
    elif (
        result.interrupted
        or isinstance(error, DurabilityUnknown)
        or w.ships.may_be_stored(opened, error, at_once=nested >= 0)
    ):
        model.holes = True
        for put in puts:
            model.may_be_there(put)
        check_error(w, model, result, process)
        w.drop_oldest(model, puts)
    else:
        for put in puts:
            model.refuse(put)
        w.limits.check_refused(opened, puts, error, nested)
        check_error(w, model, result, process)
