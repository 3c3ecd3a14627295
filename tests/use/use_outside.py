"""Operations from outside of a queue: the inbox, scans, checks."""

from __future__ import annotations

import os
import random
import tempfile
from typing import TYPE_CHECKING, Any

from kestrelpy import ItemTooLarge, JournaledQueue, QueueLocked, inbox, inspect, queue_names, scan, verify
from tests.use.use_model import Batch, Put, QueueModel
from tests.use.use_opening import ARCHIVE, FOLDER, MOST_LISTINGS, looking
from tests.use.use_operations import check_error, choose_opened, operation

if TYPE_CHECKING:
    from tests.use.use_world import Process, World

INBOX = FOLDER + "/inbox"


def choose_model(w: World, rng: random.Random) -> QueueModel:
    return w.models["b" if "second queue" in w.swarm.options and rng.random() < 0.4 else "a"]


# -- the inbox -----------------------------------------------------------------------------------------------------


@operation("publish", 1)
def publish(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    if model.is_going:
        return  # of which queue it is then, nobody says
    named: list[tuple[Any, list[Put]]] = []
    at_once = rng.random() < 0.3
    if at_once:
        named.append((None, new_puts(w, rng, model)))
    for _ in range(0 if at_once else rng.choice((1, 1, 2))):
        made = make_part(w, rng, process, model)
        if made is None:
            return
        named.append(made)
    mine = [put for _, puts in named for put in puts]
    odd = not at_once and rng.random() < 0.15
    if odd:
        again = [each for each in w.parts if each[2] is model]
        named.append(named[0] if not again or rng.random() < 0.5 else rng.choice(again)[:2])
        w.saw("a part named twice")
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options = {"app_id": rng.choice("xy"), "version": rng.randint(1, 12)}
    nested = w.nested
    call: Any = inbox.put_many if at_once else inbox.publish
    what = [put.data for put in mine] if at_once else [part for part, _ in named]
    where: dict[str, Any] = {"disk": process.disk, "clock": process.clock}
    result = w.call(process, call, FOLDER, model.name, what, **where, **options)
    w.note_fault(model, result)
    if model.erased and result.ok:  # meanwhile: it is of the queue that comes after it, unless its parts are gone
        model = w.models[model.name]
        model.by_number.update((put.number, put) for put in mine)
        model.may_refuse = model.holes = True
        for put in mine:
            model.may_be_there(put)
    known = model.versions.get(options.get("app_id", ""), -1)
    if result.ok and result.value:
        sure = not (model.may_refuse or model.damaged)  # one that is refused leaves no version
        if options and nested == w.nested and sure:
            w.require(options["version"] > known, f"version {options['version']} is published after {known}")
        owner = model.writer.queues[model.name].queue if model.writer is not None else None
        could_say = not w.trouble.fired  # in a file, what it takes
        if owner is not None and nested == w.nested and not w.depth and could_say:
            largest = max(len(put.data) for put in mine)
            said = f"an item of {largest} bytes is published, and its queue takes {owner.max_item_bytes}"
            w.require(largest <= owner.max_item_bytes, said)
        puts = list({put: None for _, each in named for put in each})
        model.batches.append(Batch(puts, w.elapsed))
        if not at_once:
            w.parts += [(*each, model) for each in named]
        if options:
            model.versions[options["app_id"]] = options["version"]
        w.saw("items are put through the inbox in one call" if at_once else "a batch is published")
        return
    if result.ok:
        late = nested != w.nested or w.batches_unsure
        w.require(options and (options["version"] <= known or late), "publish() says that it was known")
    elif isinstance(result.error, ItemTooLarge):
        w.require(model.may_refuse, f"{result.error!r}")
        w.saw("a part with an item that is too large")
    elif isinstance(result.error, OSError) and not odd:
        check_error(w, model, result, process)
        model.holes = True
        for put in mine:  # it may be published all the same
            model.may_be_there(put)
        w.batches_unsure = True
        return
    elif not odd:
        w.require(
            not isinstance(result.error, ValueError | TypeError), f"publish raised {result.error!r} for {options}"
        )
        check_error(w, model, result, process)
    for put in mine:
        model.refuse(put)


def new_puts(w: World, rng: random.Random, model: QueueModel) -> list[Put]:
    puts = [w.new_put(model, rng, None, rng.choice((0, 10, 300))) for _ in range(rng.choice((1, 2, 5)))]
    if rng.random() < 0.05:
        puts.append(w.new_put(model, rng, None, 5000))
        model.may_refuse = True  # another owner may take none as large
    for put in puts:
        put.added_ms = w.now_ms
    return puts


def make_part(w: World, rng: random.Random, process: Process, model: QueueModel) -> tuple[Any, list[Put]] | None:
    puts = new_puts(w, rng, model)

    def write() -> Any:
        with inbox.PartWriter(FOLDER, model.name, disk=process.disk, clock=process.clock) as writer:
            writer.add([put.data for put in puts])
            return writer.seal()

    write.__doc__ = "Raises ``OSError``, ``ItemTooLarge``."
    result = w.call(process, write)
    if result.ok:
        return result.value, puts
    if isinstance(result.error, ItemTooLarge):
        largest = max(len(put.data) for put in puts)
        w.require(largest > 3000, f"{result.error!r} for {largest} bytes")
        w.saw("a part with an item that is too large")
    w.note_fault(model, result)
    check_error(w, model, result, process)
    for put in puts:
        model.refuse(put)
    return None


def see_batches(w: World, model: QueueModel) -> None:
    """Which batches have been taken in since: their files are gone, and all of their items are in the queue."""
    folder = w.disk.folders.get(INBOX)
    if folder is None or not model.batches or model.erased:
        return
    prefix = model.name + "."
    left = sum(name.startswith(prefix) and name.endswith(".batch") for name in folder.names)
    if not model.damaged and not model.may_refuse:
        refused = [name for name in folder.names if name.startswith(prefix) and name.endswith(".refused")]
        w.require(not refused, f"a published batch was refused: {refused}")
    if left >= len(model.batches) or model.damaged or w.batches_unsure or model.may_refuse:
        return
    taken = len(model.batches) - left
    for record in scan(FOLDER, model.name, disk=looking(w), start_id=1):
        put = model.see(record.id, record.data)
        put.added_ms, put.expires_ms = record.added_ms, record.expires_ms
    for batch in model.batches[:taken]:
        settle_batch(w, model, batch)
    del model.batches[:taken]
    w.saw("a batch is taken in")
    w.drop_oldest(model, [])


def settle_batch(w: World, model: QueueModel, batch: Batch) -> None:
    """All of it is in the queue, in one piece; some of it may be gone again."""
    known = [(at, put.id) for at, put in enumerate(batch.puts) if put.id]
    if not known:
        owner = model.writer.queues.get(model.name) if model.writer is not None else None
        flying = model.flying.difference(*(each.puts for each in model.batches))
        if owner is not None and owner.queue._status.error is None and not model.holes and not flying:
            tail_id = owner.queue.stats().tail_id
            w.require(tail_id >= len(model.stored) + len(batch.puts), f"a batch is gone, and the tail is {tail_id}")
        model.holes = True
        for put in batch.puts:
            model.may_be_there(put)
        return
    first_id = known[0][1] - known[0][0]
    ids = [put.id for put in batch.puts]
    w.require(all(item_id == first_id + at for at, item_id in known), f"a batch has become the items {ids}")
    for at, put in enumerate(batch.puts):
        model.store(put, first_id + at)


def check_batches(w: World) -> None:
    """A batch does not wait for longer than its queue's ``inbox_interval``, unless there is no room."""
    for model in w.models.values():
        opened = model.writer.queues.get(model.name) if model.writer is not None else None
        if opened is None or not model.batches or opened.queue._status.error is not None or w.trouble.fired:
            continue
        if model.may_refuse or model.damaged or model.failed or "full" in w.tags:
            continue
        if {"journal limit", "lag refuses"} & w.swarm.options:
            continue
        interval = opened.options["inbox_interval"]
        configs = [opened.options.get("default_reader"), *opened.options["readers"].values()]
        if interval is None or any(c is not None and (c.max_items or c.max_bytes) for c in configs) or w.batches_unsure:
            continue
        since = max(model.batches[0].published_at, opened.opened_at, w.mended_at or 0.0)
        w.require(w.elapsed - since <= 3 * interval + 1.0, f"a batch waits for {w.elapsed - since} s, of {interval}")


@operation("memory_queue", 0.1)
def memory_queue(w: World, rng: random.Random, process: Process) -> None:
    """A queue in memory beside a folder with a published batch, on the real disk: it must leave that alone."""
    del rng
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        with inbox.PartWriter(folder, "jobs") as writer:
            writer.add([b"one"])
            inbox.publish(folder, "jobs", [writer.seal()])
        with JournaledQueue(folder, "jobs", journaled=False, clock=process.clock, inbox_interval=0.1) as queue:
            queue.take_in()
            process.clock.advance(0)  # somebody else's callback may raise
            queue.put(b"mine")
            item = queue.get(timeout=0)
            left = inbox.pending(folder, "jobs")
        w.require(item.data == b"mine", f"a queue in memory has {item}")
        w.require(left == 1, "a queue in memory has taken a published batch in")


@operation("take_in", 1)
def take_in(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    result = w.call(process, opened.queue.take_in)
    w.note_fault(opened.model, result)
    check_error(w, opened.model, result, process)


@operation("visit", 0.5)
def visit(w: World, rng: random.Random, process: Process) -> None:
    """``take_in`` for a queue that nobody has open."""
    model = choose_model(w, rng)
    if model.batches:
        w.touched.add(model.name)
    nested = w.nested
    result = w.call(process, inbox.take_in, FOLDER, model.name, disk=process.disk, clock=process.clock)
    w.note_fault(model, result)
    if isinstance(result.error, QueueLocked):
        w.require(
            model.writer is not None or w.depth or nested != w.nested, f"{result.error!r}, and nobody has it open"
        )
        return
    check_error(w, model, result, process)
    if result.ok and nested == w.nested and not w.depth:
        w.require(model.writer is None, "a queue that is open was visited")
        there = queue_names(FOLDER, disk=looking(w))
        w.require(set(there) <= w.touched, f"queue_names() is {there} after a visit; nobody has opened them")
        w.saw("a queue is visited")


@operation("inbox_figures", 0.5)
def inbox_figures(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    nested = w.nested
    result = w.call(process, inbox.pending, FOLDER, model.name, disk=process.disk)
    if result.ok and nested == w.nested and not w.batches_unsure and "publish" not in w.stack[:-1]:
        w.require(result.value <= len(model.batches), f"pending() says {result.value}, of {len(model.batches)}")
    result = w.call(process, inbox.last_version, FOLDER, model.name, "x", disk=process.disk)
    if (
        result.ok
        and nested == w.nested
        and not w.batches_unsure
        and not model.damaged
        and not (w.erasures or model.is_going)
        and not model.may_refuse
    ):
        w.require(result.value == model.versions.get("x"), f"last_version() is {result.value}")


# -- looking -------------------------------------------------------------------------------------------------------


@operation("scan", 1)
def scan_queue(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    check_scan(w, process, model, rng)


def check_scan(w: World, process: Process, model: QueueModel, rng: random.Random) -> None:
    options: dict[str, Any] = {"disk": process.disk}
    archived = model.archive == ARCHIVE and ARCHIVE in w.disk.folders
    if archived:
        options["archive_dir"] = ARCHIVE
    nested, fired = w.nested, w.trouble.fired
    names = w.trouble.counts["names"]

    def read() -> list[Any]:
        return list(scan(FOLDER, model.name, **options))

    read.__doc__ = scan.__doc__
    needed = model.needed()
    result = w.call(process, read)
    w.note_fault(model, result)
    quiet = nested == w.nested and fired == w.trouble.fired and not w.depth
    if not result.ok:
        check_error(w, model, result, process)
        return
    if quiet:
        spent = w.trouble.counts["names"] - names
        w.require(spent <= MOST_LISTINGS, f"scan has listed the folder {spent} times")
    ids = [record.id for record in result.value]
    check_shown(
        w, model, "scan", [(record.id, record.data) for record in result.value], sure=not (w.erasures and archived)
    )
    if model.erased or (w.erasures and archived):
        return
    if quiet and not model.damaged:
        check_needed(w, model, needed, {record.id: record.data for record in result.value})
        if model.archive is not None and model.always_archived and not model.holes and not w.trouble.fired:
            ids_put = [put.id for put in model.stored]
            lost = sorted(set(ids_put) - set(ids))
            w.require(not lost, f"journal and archive have {len(ids)} of {len(ids_put)} items: not {lost[:5]}")
    del rng


def check_shown(w: World, model: QueueModel, who: str, shown: list[tuple[int, bytes]], *, sure: bool) -> None:
    """Ids rise, and if it is ``sure`` that they are those of this queue, each has the item that was put under it."""
    ids = [item_id for item_id, _ in shown]
    w.require(ids == sorted(set(ids)), f"{who} gives items out of order")
    if model.erased or not sure:
        return
    for item_id, data in shown:
        put = model.find(data, item_id)
        w.require(put.id in (0, item_id), f"{who} shows {put} as item {item_id}")


def check_needed(w: World, model: QueueModel, needed: set[Put], shown: dict[int, bytes]) -> None:
    lost = sorted(put.id for put in needed - {model.find(data, item_id) for item_id, data in shown.items()})
    w.require(not lost, f"items {lost[:5]} are needed by a reader, and are not in the journal")


@operation("verify", 0.6)
def verify_queue(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    result = w.call(process, verify, FOLDER, model.name, disk=process.disk)
    w.note_fault(model, result)
    check_error(w, model, result, process)
    if result.ok and not model.damaged and not model.erased and not w.trouble.fired:
        w.require(not result.value.damage, f"verify says {result.value.damage}")


@operation("inspect", 0.6)
def inspect_queue(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    result = w.call(process, inspect, FOLDER, model.name, disk=process.disk)
    w.note_fault(model, result)
    check_error(w, model, result, process)


@operation("queue_names", 0.2)
def names(w: World, rng: random.Random, process: Process) -> None:
    del rng
    result = w.call(process, queue_names, FOLDER, disk=process.disk)
    if result.ok and not w.nested and not w.depth:
        known = {name for name, model in w.models.items() if model.made and not model.half_erased}
        w.require(known <= set(result.value), f"queue_names() is {result.value}, and there are {known}")
        w.require(set(result.value) <= w.touched, f"queue_names() is {result.value}; nobody has opened them")
