"""Operations that open, close, kill, drop and erase: queues, and readers here and elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrelpy import (
    JournaledQueue,
    NoDefaultReader,
    QueueClosed,
    QueueLocked,
    Reader,
    ReaderConfig,
    open_reader,
)
from kestrelpy._disk.memory import MemoryDisk
from kestrelpy._journal.file_names import readers_among
from tests.use.use_model import QueueModel, ReaderModel, drops
from tests.use.use_operations import check_error, choose_opened, choose_reader, is_here, operation
from tests.use.use_options import READERS, queue_options, reader_config

if TYPE_CHECKING:
    from tests.use.use_world import Opened, Process, Result, World

FOLDER, ARCHIVE = "/queues", "/archive"


def looking(w: World) -> MemoryDisk:
    """The folder as somebody sees it whom nothing happens to."""
    disk = MemoryDisk()
    disk.folders = w.disk.folders
    return disk


# -- queues --------------------------------------------------------------------------------------------------------


@operation("open", 4)
def open_queue(w: World, rng: random.Random, process: Process) -> None:
    if {"close", "erase", "ship_hand_over"} & set(w.stack[:-1]):
        return  # out of a callback of its end it may be opened again already, or not yet
    name = "b" if "second queue" in w.swarm.options and rng.random() < 0.4 else "a"
    name = w.graves.instead_of(rng, name)
    model = w.models[name]
    options = queue_options(w, rng, process, name)
    odd = options.pop("odd", False)
    if w.ships.is_on and name != w.graves.name:
        options["ship"] = w.ships.draw(rng, name, model)
    nested, before = w.nested, w.ships.before(name, options.get("ship"))
    from tests.use.use_world import Opened

    w.touched.add(name)
    result = w.call(process, JournaledQueue, FOLDER, name, clock=process.clock, disk=process.disk, **options)
    model = w.models[name]  # somebody may have erased the one before meanwhile
    if w.ships.judge_opening(name, model, options.get("ship"), result, before):
        return
    if isinstance(result.error, QueueLocked):
        w.require(model.writer is not None or nested != w.nested or w.depth, "QueueLocked, and nobody has it open")
        w.saw("a queue is open elsewhere")
        return
    if isinstance(result.error, ValueError | TypeError):
        w.require(odd, f"{result.error!r} for {options}")
        w.saw("an odd option of a queue is refused")
        return
    if result.error is not None:
        w.note_fault(model, result)
        check_error(w, model, result, process)
        return
    if model.writer is not None:
        raise w.fail(f"queue {name} is open twice")
    model.writer, model.made, model.failed = process, True, False
    process.queues[name] = Opened(result.value, model, options)
    process.queues[name].opened_at = w.elapsed
    w.ships.note_hidden(process.queues[name])
    if "archive_dir" not in options and model.stored:
        model.always_archived = False
    model.archive = options.get("archive_dir", model.archive)
    check_places(w, model)
    if model.stored:
        w.saw("a queue is opened again")
        if w.trouble.blocks is not None and w.disk.used_blocks() >= w.trouble.blocks:
            w.saw("zero free blocks after a restart")


def check_places(w: World, model: QueueModel) -> None:
    """Every reader whose place was saved has one."""
    if model.damaged or model.unsure or w.depth or w.trouble.fired:
        return
    names = w.disk.folders[FOLDER].names
    there = [reader for reader in model.readers.values() if reader.exists]
    lost = [reader for reader in there if f"{model.name}+{reader.name}.checkpoint" not in names]
    w.require(not lost, f"the places of the readers {[reader.name for reader in lost]} are gone")


@operation("close", 1.5)
def close_queue(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is not None:
        end_queue(w, process, opened)


def end(w: World, process: Process, close: Callable[[], None]) -> tuple[Result, bool]:
    """Close something; once more if a callback of ours has raised something out of that. Whether nothing that was wrong
    with the disk may have been kept back by it.
    """
    fired = w.trouble.fired
    result = w.call(process, close)
    if not result.interrupted:
        return result, True
    clean = fired == w.trouble.fired
    w.cut_ends += 1
    return w.call(process, close), clean


def end_queue(
    w: World, process: Process, opened: Opened, *, erase: bool = False, way: Callable[[], None] | None = None
) -> None:
    """``way``: how, if it is not by ``close`` or ``erase``."""
    model = opened.model
    mine = [reader for reader in process.readers if reader.queue is model and is_here(process, reader)]
    if opened.is_ending:  # out of a callback of that, which goes on: it has nothing to do
        w.call(process, opened.queue.erase if erase else opened.queue.close)
        return
    opened.broken = opened.is_ending = True
    was = {reader: reader.moves for reader in mine}
    model.is_going, was_failed, cut_ends = erase, model.failed, w.cut_ends
    result, clean = end(w, process, way or (opened.queue.erase if erase else opened.queue.close))
    model.is_going = opened.is_ending = False
    w.ships.note_closed(opened, result, was_failed=was_failed, erased=erase, was_cut=cut_ends != w.cut_ends)
    w.note_fault(model, result)
    check_error(w, model, result, process)
    if process.queues.get(model.name) is not opened:
        return  # a callback has closed it
    del process.queues[model.name]
    if model.writer is process:
        model.writer = None
    for reader in mine:
        let_go(w, process, reader, saved=clean and result.ok and not model.failed and was[reader] == reader.moves)
    for put in list(model.flying):
        model.may_be_there(put)
        model.holes = True
    model.failed = False
    if erase and not result.ok:
        model.damaged = model.half_erased = True  # what is left of it is not said
        w.graves.note_erased(model)
        for reader in model.readers.values():  # its place may be gone, and come anew
            reader.half_dropped = True
            if reader.handle is None:
                reader.doubt_all()
    elif erase:
        w.ships.attached[model.name] = frozenset({None})
        model.erased = True
        w.erasures += 1
        w.models[model.name] = QueueModel(model.name, w.now)
        w.models[model.name].unsure = w.locks_unsure
        w.graves.note_erased(model)
    w.saw("a queue is closed" if not erase else "a queue is erased")


def let_go(w: World, process: Process, reader: ReaderModel, *, saved: bool) -> None:
    """The reader has no owner from now on."""
    if reader.handle is not None:
        w.handles.pop(id(reader.handle), None)
        w.graveyard.append(reader.handle)  # so that its id is not given out again
    if reader in process.readers:
        process.readers.remove(reader)
    if saved:
        reader.doubt(list(reader.in_hook))
        reader.note_saved()
        reader.leave()
    else:
        reader.restart()


@operation("erase", 0.25)
def erase(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is not None:
        end_queue(w, process, opened, erase=True)


@operation("kill", 0.5, nestable=False)
def kill(w: World, rng: random.Random, process: Process) -> None:
    del rng
    if process.queues or process.readers:
        w.saw("a process is killed")
        w.kill(process)


# -- readers -------------------------------------------------------------------------------------------------------


def draw_start(w: World, rng: random.Random, model: QueueModel) -> str | int:
    if rng.random() < 0.4:
        return "earliest"
    if rng.random() < 0.2:
        return rng.randint(1, model.tail_id + 2)
    return "tail"


@operation("reader", 3)
def reader_here(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    name, start = rng.choice(READERS), draw_start(w, rng, opened.model)
    get_reader(w, process, opened, name, start)


def get_reader(w: World, process: Process, opened: Opened, name: str, start: str | int = "tail") -> ReaderModel | None:
    nested = w.nested
    result = w.call(process, opened.queue.reader, name, start=start)
    return bind(w, process, opened.model, name, start, result, opened.config(name), nested, here=True)


@operation("open_reader", 2)
def open_elsewhere(w: World, rng: random.Random, process: Process) -> None:
    model = w.models["b" if "second queue" in w.swarm.options and rng.random() < 0.4 else "a"]
    model = w.models[w.graves.instead_of(rng, model.name)]
    name, start = rng.choice(READERS), draw_start(w, rng, model)
    config = reader_config(w, rng, process, model.name) or ReaderConfig()
    w.touched.add(model.name)
    is_known = name in model.readers and not model.unsure
    if name not in model.readers and not (model.unsure or w.depth or model.erased):
        refused = w.call(process, open_reader, FOLDER, model.name, name, clock=process.clock, disk=process.disk)
        if refused.error is None:
            refused.value.close()
            w.require(False, f"open_reader has opened {name}, which there is not")
    nested = w.nested
    names = w.trouble.counts["names"]
    result = w.call(
        process,
        open_reader,
        FOLDER,
        model.name,
        name,
        config=config,
        create=not is_known,
        start=start,
        poll_interval=rng.choice((0.05, 0.01)),
        clock=process.clock,
        disk=process.disk,
    )
    if nested == w.nested and not w.trouble.fired and not drops(config):  # each item that is dropped takes a look
        spent = w.trouble.counts["names"] - names
        w.require(spent <= MOST_LISTINGS, f"open_reader has listed the folder {spent} times")
    reader = bind(w, process, model, name, start, result, config, nested, here=False)
    if reader is not None:
        w.saw("a reader is open elsewhere")


MOST_LISTINGS = 12


def bind(
    w: World,
    process: Process,
    model: QueueModel,
    name: str,
    start: str | int,
    result: Result,
    config: ReaderConfig,
    nested: int,
    *,
    here: bool,
) -> ReaderModel | None:
    """Tell the model what the opening of a reader has come to."""
    quiet = nested == w.nested and not w.depth and not model.unsure
    known = model.readers.get(name)
    default = model.readers.get("")
    error = result.error
    if isinstance(error, QueueLocked):
        owned = known is not None and known.process is not None
        beside = bool(name) and not model.named() and default is not None and default.process is not None
        excused = owned or beside or not quiet or model.erased or w.locks_unsure
        w.require(excused, f"{error!r} for reader {name!r}, which nobody has")
        w.saw("a reader is open elsewhere already")
        return None
    if isinstance(error, NoDefaultReader):
        stays = default is not None and default.exists
        reason = f"{error!r}, and there are {sorted(model.readers)}"
        w.require((not name and model.named() and not stays) or not quiet or model.damaged, reason)
        w.saw("no default reader")
        return None
    if error is not None:
        w.note_fault(model, result)
        check_error(w, model, result, process)
        if not isinstance(error, ValueError):
            model.unsure = w.locks_unsure = True
            if known is not None and known.process is None:
                known.doubt_all()  # it may be open all the same, and by these options
            if name and default is not None and default.handle is not None and default.handle.name == name:
                default.doubt_all()  # it has that name all the same, and its limits
                default.config, default.name = config, name
                model.readers[name] = model.readers.pop("")
            elif name and default is not None and default.handle is None and not model.named():
                default.may_have_name = True
        return None
    handle: Reader = result.value
    already = w.handles.get(id(handle))
    if already is not None and already.name == name:
        return already
    if not name and model.named() and quiet and (known is None or not known.exists) and not model.damaged:
        raise w.fail(f"the default reader is opened beside {model.named()}")
    # Who makes a reader while the queue is erased has one of that which comes after it, or of none; and out of a
    # callback of a queue's closing, one whose place the queue has left already.
    left = [each.handle for each in (known, default) if each is not None and each.handle is not None]
    if (
        model.is_going
        or model.erased
        or (w.depth and any(isinstance(each._backlog.broken, QueueClosed) for each in left))
    ):
        if default is not None:
            default.may_have_name = True
        w.call(process, handle.close)
        w.locks_unsure = model.unsure = w.models[model.name].unsure = True
        return None
    if known is not None and known.process is not None:
        w.require(model.damaged, f"reader {known.full_name} is open twice")
        let_go(w, known.process, known, saved=False)  # its lock went with an erase that failed
    there = readers_among(w.disk.folders[FOLDER].names, model.name)
    beside = nested != w.nested and "" in there  # it was open, then
    beside = beside or bool(w.depth and there - {"", name} - set(model.readers))  # whose making is not over yet
    reader = known if known is not None or beside else inherit(w, process, model, name, handle, here=here)
    if reader is None:
        reader = begin(w, model, name, start, handle, quiet=quiet and not drops(config))
        if name and nested != w.nested and default is not None and default.handle is None and not default.exists:
            del model.readers[""]  # it was the first one: those that there are were made around it
    else:
        resume(w, reader, handle, quiet=quiet and not drops(config))
    if reader.may_have_name or reader.half_dropped:  # then it may have been made anew
        reader.doubt_all()
        reader.may_have_name = False
    reader.doubt_expired()  # by the options that it has had until now
    reader.process, reader.handle, reader.config = process, handle, config
    w.handles[id(handle)] = reader
    if reader not in process.readers:
        process.readers.append(reader)
    reader.exists = True
    if config.max_age is not None or any(put.expires_ms is not None for put in model.stored):
        model.expires = True
    w.may_drop_at_opening(reader, config)
    return reader


def inherit(
    w: World, process: Process, model: QueueModel, name: str, handle: Reader, *, here: bool
) -> ReaderModel | None:
    """The first named reader takes over the default one's place, unless somebody has that open elsewhere."""
    default = model.readers.get("")
    if not name or default is None or (model.named() and default.handle is not handle):
        return None
    if default.process is not None and default.handle is not handle:
        w.saw("a foreign first reader while the default one is open")
        return None
    if default.handle is handle:
        w.require(here and default.process is process, "a default reader was taken over by another process")
        w.saw("an open default reader gets a name")
    elif default.saved or default.done:
        w.saw("a first reader takes over a place")
    del model.readers[""]
    model.readers[name] = default
    default.made_at = w.elapsed
    default.name, default.former = name, default.config
    default.may_have_name = default.may_have_name or model.unsure
    return default


def begin(w: World, model: QueueModel, name: str, start: str | int, handle: Reader, *, quiet: bool) -> ReaderModel:
    """A new place."""
    reader = ReaderModel(model, name, None)
    reader.made_at = w.elapsed
    head = handle.head
    tail_id = model.tail_id
    if quiet and not model.damaged and not model.holes and not model.flying:
        if start == "tail":
            w.require(head == tail_id, f"a new reader begins at {head + 1}, and the tail is {tail_id}")
        elif isinstance(start, int):
            w.require(head >= min(start, tail_id + 1) - 1, f"a new reader begins at {head + 1}, and not at {start}")
        if start != "tail":
            wanted = 1 if start == "earliest" else start
            needed = sorted(put.id for put in model.needed() if isinstance(wanted, int) and put.id >= wanted)
            w.require(not needed or head < needed[0], f"{start}: begins at {head + 1}, and item {needed[:1]} is needed")
    model.readers[name] = reader
    reader.done = {put for put in model.stored if put.id <= head}
    reader.optional = model.unsettled()
    if not quiet:
        reader.doubt_all()
    reader.note_saved()
    return reader


def resume(w: World, reader: ReaderModel, handle: Reader, *, quiet: bool) -> None:
    """A place that was there: it says itself what of the optional is done."""
    head = handle.head
    if reader.queue.erased:
        return
    w.graves.note_opening(reader, handle)
    w.skips.at_opening(reader, handle)
    for put in reader.queue.stored:
        if put.id > head:
            break
        if put in reader.done:
            continue
        if put not in reader.optional and quiet and not reader.queue.damaged:
            expired = reader.is_expired(put, w.now_ms)
            w.require(expired, f"{reader.full_name} is opened with head {head}, and item {put.id} is not done")
        reader.finish(put)


@operation("close_reader", 1.2)
def close_reader(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is not None:
        end_reader(w, process, reader)


def end_reader(w: World, process: Process, reader: ReaderModel) -> None:
    handle = reader.handle
    assert handle is not None
    moves, failed = (
        reader.moves,
        handle._backlog.broken is not None,
    )  # then nothing is saved, whether anybody was told or not
    result, clean = end(w, process, handle.close)
    w.note_fault(reader.queue, result)
    check_error(w, reader.queue, result, process, reader)
    if reader.handle is not handle:
        return
    if not result.ok:
        w.locks_unsure = w.locks_unsure or result.interrupted
    saved = clean and result.ok and moves == reader.moves and not failed and not reader.queue.failed
    let_go(w, process, reader, saved=saved)
    w.saw("a reader is closed")


@operation("drop_reader", 0.5)
def drop_reader(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    model = opened.model
    name = rng.choice(READERS)
    reader = model.readers.get(name)
    result = w.call(process, opened.queue.drop_reader, name)
    if isinstance(result.error, QueueLocked):
        reader = model.readers.get(name)  # another process may have opened it during the call
        elsewhere = reader is not None and reader.process is not None and not is_here(process, reader)
        w.require(w.depth or w.locks_unsure or elsewhere, f"{result.error!r}, and nobody has it")
        return
    if result.error is not None:
        w.note_fault(model, result)
        check_error(w, model, result, process)
        model.unsure = True
        if reader is not None and reader.process is process and is_here(process, reader):
            let_go(w, process, reader, saved=False)
        if reader is not None:
            reader.exists, reader.half_dropped = False, True
            reader.doubt_all()
        return
    default = model.readers.get("")
    if reader is None and default is not None and default.may_have_name and default.handle is None:
        default.doubt_all()  # whose place that name has taken, though its making has raised
    if reader is None or model.readers.get(name) is not reader:
        return
    if reader.process is process and reader in process.readers:
        let_go(w, process, reader, saved=False)
    elif reader.process is not None and not w.depth:
        raise w.fail(f"reader {reader.full_name} was dropped, and {reader.process} has it open")
    del model.readers[name]
    w.graves.give_up(reader)
    w.saw("a reader is dropped")
    if not model.named() and "" not in model.readers:
        fresh = model.readers[""] = ReaderModel(model, "", None)
        fresh.optional = set(model.stored) | model.unsettled()
        fresh.saved_optional = set(fresh.optional)
