"""Operations of readers, here and elsewhere."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy import Item, QueueEmpty, UnknownItem, scan
from tests.use.use_graves import Abort
from tests.use.use_model import Put, QueueModel, ReaderModel, drops
from tests.use.use_opening import FOLDER, get_reader, looking
from tests.use.use_operations import check_error, choose_opened, choose_reader, is_here, operation
from tests.use.use_writing import put_many

if TYPE_CHECKING:
    from tests.use.use_world import Process, Result, World


def is_exact(w: World, reader: ReaderModel, nested: int) -> bool:
    model = reader.queue
    return nested == w.nested and not w.depth and not reader.waiting and not model.damaged and not model.erased


def check_empty(w: World, process: Process, reader: ReaderModel, result: Result, nested: int) -> bool:
    """Whether nothing was got; that must have a reason."""
    if result.ok:
        return False
    w.note_fault(reader.queue, result)
    if isinstance(result.error, QueueEmpty):
        if is_exact(w, reader, nested) and not reader.queue.failed:
            left = reader.surely_left(w.now_ms)
            w.require(not left, f"{reader.full_name} is empty, and item {left[0].id if left else 0} is there")
    else:
        check_error(w, reader.queue, result, process, reader)
    return True


def receive(w: World, reader: ReaderModel, items: list[Item], nested: int) -> None:
    exact = is_exact(w, reader, nested)
    handle = reader.handle
    for item in items:
        opens = handle is not None and handle.is_open(item)
        if opens or exact:
            put = w.deliver(reader, item, exact=exact and opens)
            if not opens:
                raise w.fail(f"{reader.full_name} has delivered {put}, whose read is not open")
        else:
            reader.queue.see(item.id, item.data)  # a hook has moved the reader, or settled the item, meanwhile


@operation("get", 8)
def get(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    handle, nested = reader.handle, w.nested
    if rng.random() < 0.5:
        result = w.call(process, handle.get_nowait)
    else:
        result = w.call(process, handle.get, timeout=0 if rng.random() < 0.9 else 0.0005)
    if not check_empty(w, process, reader, result, nested):
        receive(w, reader, [result.value], nested)


@operation("get_many", 3)
def get_many(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested = w.nested
    count, most = rng.choice((1, 2, 5, 50)), rng.choice((None, None, 500))
    result = w.call(process, reader.handle.get_many, count, max_bytes=most, timeout=0)
    if check_empty(w, process, reader, result, nested):
        return
    items: list[Item] = result.value
    w.require(len(items) <= count, f"get_many({count}) has returned {len(items)} items")
    if most is not None and len(items) > 1:
        w.require(sum(len(item.data) for item in items) <= most, f"get_many returned more than max_bytes={most}")
    receive(w, reader, items, nested)


@operation("queue_get", 1)
def queue_get(w: World, rng: random.Random, process: Process) -> None:
    """``get`` of the queue: of the default reader, which is made by it."""
    opened = choose_opened(rng, process)
    if opened is None:
        return
    reader = get_reader(w, process, opened, "")
    if reader is None or reader.handle is None:
        return
    nested = w.nested
    result = w.call(process, opened.queue.get_nowait)
    if not check_empty(w, process, reader, result, nested):
        receive(w, reader, [result.value], nested)


@operation("get_future", 2)
def get_future(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    wait_for_one(w, process, reader, rng.choice((None, None, 0, 1.0, 30.0)))


def wait_for_one(w: World, process: Process, reader: ReaderModel, timeout: float | None) -> None:
    handle = reader.handle
    assert handle is not None
    reader.waiting += 1
    result = w.call(process, handle.get_future, timeout)
    if result.error is not None:
        reader.waiting -= 1
        w.note_fault(reader.queue, result)
        check_error(w, reader.queue, result, process, reader)
        return

    if timeout is not None:
        process.deadlines.append((process.clock.monotonic() + timeout, result.value))

    def arrive(done: Future[Item]) -> None:
        reader.waiting -= 1
        w.nested += 1  # whatever is under way is not alone
        if done.cancelled() or done.exception() is not None:
            w.act(process, "a callback of get_future")
            return
        item = done.result()
        if handle.is_open(item) and w.handles.get(id(handle)) is reader:
            w.deliver(reader, item, exact=False)
        else:
            reader.queue.see(item.id, item.data)
        w.act(process, "a callback of get_future")

    process.futures.append(result.value)
    result.value.add_done_callback(arrive)


@operation("cancel", 1)
def cancel(w: World, rng: random.Random, process: Process) -> None:
    waiting = [future for future in process.futures if not future.done()]
    if waiting:
        rng.choice(waiting).cancel()
        w.saw("a future is cancelled")


@operation("peek", 1)
def peek(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested = w.nested
    result = w.call(process, reader.handle.peek)
    if check_empty(w, process, reader, result, nested):
        return
    if is_exact(w, reader, nested):
        w.deliver(reader, result.value, exact=True, opens=False)
    else:
        reader.queue.see(result.value.id, result.value.data)


@operation("peek_future", 1)
def peek_future(w: World, rng: random.Random, process: Process) -> None:
    """Of what is there: a future that waits is asked for its result when it has one."""
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested = w.nested
    result = w.call(process, reader.handle.peek_future, 0)
    if result.error is not None:
        w.note_fault(reader.queue, result)
        check_error(w, reader.queue, result, process, reader)
        return
    future: Future[Item] = result.value
    error = future.exception(0)
    if error is not None:
        result.error = error
        check_empty(w, process, reader, result, nested)
    elif is_exact(w, reader, nested):
        w.deliver(reader, future.result(0), exact=True, opens=False)
    else:
        reader.queue.see(future.result(0).id, future.result(0).data)


# -- settling ------------------------------------------------------------------------------------------------------


def some_open(w: World, rng: random.Random, process: Process) -> tuple[ReaderModel, list[Put]] | None:
    readers = [reader for reader in process.readers if reader.handle is not None and reader.open]
    if not readers:
        return None
    reader = rng.choice(readers)
    return reader, sorted(reader.open)


def check_settled(w: World, process: Process, reader: ReaderModel, puts: list[Put], moves: int, result: Result) -> bool:
    """Whether a commit or an abort of open reads was taken; an error must have a reason."""
    if result.ok:
        return True
    w.note_fault(reader.queue, result)
    if result.interrupted:
        reader.doubt(puts)
    elif isinstance(result.error, UnknownItem):
        w.require(moves != reader.moves or w.depth, f"{result.error!r}, and it is open")
    else:
        check_error(w, reader.queue, result, process, reader)
    return False


@operation("commit", 7)
def commit(w: World, rng: random.Random, process: Process) -> None:
    found = some_open(w, rng, process)
    if found is None:
        return
    reader, puts = found
    put = rng.choice(puts)
    item, handle, moves = reader.open[put], reader.handle, reader.moves
    assert handle is not None
    how = rng.randrange(3)
    if how == 0:
        result = w.call(process, handle.commit, item)
    elif how == 1:
        result = w.call(process, handle.commit, item.id)
    else:
        result = w.call(process, item.commit)
    if check_settled(w, process, reader, [put], moves, result):
        note_done(w, reader, [put], moves)


def note_done(w: World, reader: ReaderModel, puts: list[Put], moves: int) -> None:
    w.may_drop_meanwhile(reader)  # others beside them
    for put in puts:
        if moves == reader.moves:
            reader.finish(put)
        else:
            reader.doubt([put])


@operation("commit_many", 3)
def commit_many(w: World, rng: random.Random, process: Process) -> None:
    found = some_open(w, rng, process)
    if found is None:
        return
    reader, puts = found
    chosen = puts if rng.random() < 0.6 else rng.sample(puts, rng.randint(1, len(puts)))
    handle, moves = reader.handle, reader.moves
    assert handle is not None
    named: list[Any] = [put.id if rng.random() < 0.2 else reader.open[put] for put in chosen]
    result = w.call(process, handle.commit_many, named)
    if check_settled(w, process, reader, chosen, moves, result):
        note_done(w, reader, chosen, moves)


@operation("abort", 2)
def abort(w: World, rng: random.Random, process: Process) -> None:
    found = some_open(w, rng, process)
    if found is None:
        return
    reader, puts = found
    put = rng.choice(puts)
    item, handle, moves = reader.open[put], reader.handle, reader.moves
    assert handle is not None
    w.may_drop_meanwhile(reader)
    named, options = (item if rng.random() < 0.5 else item.id), {"counts": rng.random() < 0.7}
    w.graves.draw_abort(rng, options)
    aborted = Abort(w, process, reader, put, item, options)
    del reader.open[put]  # before: it may be handed on at once
    result = w.call(process, handle.abort, named, **options)
    if check_settled(w, process, reader, [put], moves, result):
        aborted.went()
    else:
        aborted.failed(result)
        if handle.is_open(item):
            reader.open.setdefault(put, item)


@operation("with", 1)
def with_item(w: World, rng: random.Random, process: Process) -> None:
    """``with reader.get() as item``, whose block may raise."""
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested, moves = w.nested, reader.moves
    result = w.call(process, reader.handle.get_nowait)
    if check_empty(w, process, reader, result, nested):
        return
    receive(w, reader, [result.value], nested)
    item: Item = result.value
    put = reader.queue.find(item.data, item.id)
    raises = rng.random() < 0.4

    def leave() -> None:
        with item:
            if raises:
                raise KeyError("the block")

    leave.__doc__ = "Raises ``KeyError``, ``QueueClosed``, ``DurabilityUnknown``, ``UnknownItem``, ``OSError``."
    aborted = None
    if raises and put in reader.open:  # and who waits gets it in the middle of the call
        aborted = Abort(w, process, reader, put, item, {"reason": "KeyError: 'the block'"})
        reader.open.pop(put, None)
        reader.settling.add(put)
    result = w.call(process, leave)
    reader.settling.discard(put)
    w.note_fault(reader.queue, result)
    if isinstance(result.error, UnknownItem):
        w.require(moves != reader.moves or nested != w.nested or w.depth, f"{result.error!r}, and it is open")
    elif not isinstance(result.error, KeyError):
        check_error(w, reader.queue, result, process, reader)
    if aborted is not None and isinstance(result.error, KeyError):
        aborted.went()
    elif aborted is not None:
        aborted.failed(result)
    if moves != reader.moves or nested != w.nested or result.interrupted:
        reader.doubt([put])
    elif not raises and result.ok:
        reader.finish(put)


@operation("odd_commit", 0.5)
def odd_commit(w: World, rng: random.Random, process: Process) -> None:
    """What is not open must be refused: done ones, ids of nobody, and what is no id."""
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    handle = reader.handle
    unopened = [put.id for put in reader.queue.stored if put not in reader.open]
    what: Any = rng.choice((True, 10**9, -1, 0, *unopened[-3:]))
    calls = [
        lambda: w.call(process, handle.commit, what),
        lambda: w.call(process, handle.abort, what),
        lambda: w.call(process, handle.commit_many, [what]),
    ]
    nested, unseen = w.nested, handle.open_items != len(reader.open)
    result = rng.choice(calls)()
    if result.ok and (w.depth or unseen):  # who has called the hook may be about to be given it
        reader.doubt_all()
        return
    w.require(not result.ok or nested != w.nested, f"{what!r} was settled, which is not open")
    w.note_fault(reader.queue, result)
    check_error(w, reader.queue, result, process, reader)


# -- moving --------------------------------------------------------------------------------------------------------


@operation("flush", 0.6)
def flush(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested, sure = w.nested, reader.surely_left(w.now_ms, delayed=True)
    left = reader.available()
    result = w.call(process, reader.handle.flush)
    w.note_fault(reader.queue, result)
    if result.ok and is_exact(w, reader, nested):
        back = list(reader.returning)
        most = len(left) + len(back) + len(reader.queue.flying) + (1000 if reader.queue.holes else 0)
        w.require(len(sure) <= result.value <= most, f"flush() says {result.value}; there were {len(sure)} to {most}")
        for put in left:
            if put in reader.queue.flying:  # somebody elsewhere has seen it, and it is not on disk yet
                reader.optional.add(put)
            elif put not in reader.optional:  # one of which nothing is known may be open still
                reader.finish(put)
        reader.doubt(back)
        reader.optional |= reader.queue.unsettled()
        reader.moves += 1
        reader.note_saved()
        return
    check_error(w, reader.queue, result, process, reader)
    unread = [put for put in reader.queue.stored if put not in reader.open and put not in reader.settling]
    reader.doubt([*unread, *reader.returning])
    reader.optional |= reader.queue.unsettled()
    reader.saved_optional.update(reader.optional)
    reader.moves += 1


@operation("join", 0.6)
def join(w: World, rng: random.Random, process: Process) -> None:
    """``join`` that has no time, and what ``queue.Queue`` is asked: both say whether anything is left."""
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    handle, nested = reader.handle, w.nested
    held = [put for put in reader.open if put not in reader.settling and put not in reader.optional]
    sure = [*reader.surely_left(w.now_ms, delayed=True), *held]
    unread = len(reader.available()) + len(reader.returning) + len(reader.queue.flying) + len(reader.pending)
    result = w.call(process, handle.join, 0)
    w.note_fault(reader.queue, result)
    if not result.ok:
        check_error(w, reader.queue, result, process, reader)
    elif is_exact(w, reader, nested):
        left = unread + len(reader.open) + len(reader.settling) + (1000 if reader.queue.holes else 0)
        w.require(not (result.value and sure), f"join() of {reader.full_name} says that all is done; left: {sure[:3]}")
        w.require(result.value or left, f"join() of {reader.full_name} says that items are left, and there are none")
        size = w.call(process, handle.qsize)
        if size.ok and nested == w.nested and not reader.queue.holes:
            w.require(size.value <= left, f"qsize() of {reader.full_name} is {size.value}, and there are {left}")
            w.require(handle.empty() is not bool(len(handle)), f"empty() and len() of {reader.full_name} differ")
        w.saw("a join of all that is done" if result.value else "a join of what is not done")


@operation("discard", 0.5)
def discard(w: World, rng: random.Random, process: Process) -> None:
    """Drop some by their ids: unread ones, open ones, done ones and ids of nobody."""
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested, moves = w.nested, reader.moves
    known = [put for put in reader.queue.stored if put.id]
    chosen = rng.sample(known, min(len(known), rng.choice((0, 1, 3, 20))))
    sure = [put for put in chosen if put in set(reader.surely_left(w.now_ms, delayed=True))]
    w.may_drop_meanwhile(reader)
    result = w.call(process, reader.handle.discard, [*(put.id for put in chosen), 10**9, 0])
    w.note_fault(reader.queue, result)
    waiting = [put for put in chosen if put not in reader.open and put not in reader.settling]
    exact = result.ok and is_exact(w, reader, nested) and moves == reader.moves  # if not, a task may have got some
    if exact:
        most = len([put for put in waiting if put not in reader.done])
        what = f"discard() says {result.value}; there were {len(sure)} to {most}"
        w.require(len(sure) <= result.value <= most, what)
    elif not result.ok:
        check_error(w, reader.queue, result, process, reader)
    for put in waiting:
        if exact and put in sure:
            reader.finish(put)
        elif put not in reader.done:
            reader.doubt([put])


@operation("seek", 1)
def seek(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    handle, model, nested = reader.handle, reader.queue, w.nested
    waiting = reader.waiting
    if waiting:  # somebody may be served in the middle of it
        reader.doubt_all()
    back = set(reader.done)
    leaning, timed = "seek" in w.swarm.lean, False
    if leaning or rng.random() < 0.7:
        item_id = 1 if leaning else rng.choice((1, rng.randint(1, model.tail_id + 2), model.tail_id + 1))
        result = w.call(process, handle.seek, item_id)
    else:
        time_ms = w.now_ms - rng.choice((0, 1000, 60_000))
        item_id, timed = first_since(w, model, time_ms), True
        result = w.call(process, handle.seek, time_ms=time_ms)
    w.note_fault(model, result)
    if not result.ok or waiting or not is_exact(w, reader, nested):
        check_error(w, model, result, process, reader)
        if not waiting:
            reader.doubt_all()
        reader.made_at = float("inf")  # as below
        return
    head = handle.head
    if item_id and not model.flying and not model.holes:
        w.require(head >= min(item_id, model.tail_id + 1) - 1, f"seek({item_id}) has gone to {head + 1}")
        needed = [put.id for put in model.needed() if put.id >= item_id and put not in back]
        w.require(not needed or head < min(needed) or min(needed) < item_id, f"seek({item_id}) has passed {needed[:3]}")
        w.require(not timed or head + 1 == item_id, f"a seek by time has gone to {head + 1}, and not to {item_id}")
    reader.move_to(head + 1)
    reader.note_saved()
    reader.made_at = float("inf")  # elsewhere: a place that is moved back is not read again before it would refuse
    if drops(reader.config):  # it may be over its limit again; when that is seen to is not said
        reader.doubt_all()
    if head < max((put.id for put in back), default=0):
        w.saw("a seek back")


def first_since(w: World, model: QueueModel, time_ms: int) -> int:
    """The first item that is kept and was added then or later; 0 where that is not known."""
    if model.damaged or model.flying or model.holes or model.erased or w.jumps or w.depth:
        return 0
    records = scan(FOLDER, model.name, disk=looking(w), start_ms=time_ms)
    return next((record.id for record in records), model.tail_id + 1)


@operation("discard_expired", 1)
def discard_expired(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    limit = rng.choice((None, 0, 1, 3))
    nested, expired = w.nested, expired_in_front(w, reader)
    result = w.call(process, reader.handle.discard_expired, limit)
    w.note_fault(reader.queue, result)
    check_error(w, reader.queue, result, process, reader)
    if result.ok and limit is not None:
        w.require(result.value <= limit, f"discard_expired({limit}) says {result.value}")
    if result.ok and expired is not None and is_exact(w, reader, nested) and not reader.queue.failed:
        most = len(expired) if limit is None else min(limit, len(expired))
        w.require(result.value <= most, f"discard_expired({limit}) says {result.value}, of {len(expired)}")
        left = sum(put not in reader.done for put in reader.queue.stored) - len(expired)
        behind = sum(reader.is_expired(put, w.now_ms) for put in reader.available()) - len(expired)  # or dropped before
        items = None if limit is not None or reader.handle is None else reader.handle.items
        w.require(
            items is None or left - behind <= items <= left, f"discard_expired() has left {items} items, not {left}"
        )


def expired_in_front(w: World, reader: ReaderModel) -> list[Put] | None:
    """What ``discard_expired`` drops; ``None`` where that is not known, or where a hook has a word in it."""
    config, model = reader.config, reader.queue
    if config is None or config.on_expired is not None or config.max_expire_sweep is not None or drops(config):
        return None
    if reader.optional or reader.settling or model.unsettled() or not w.is_here(reader):
        return None
    expired: list[Put] = []
    for put in reader.available():
        if reader.is_delayed(put):
            if reader.too_early(put) <= 0:
                return None
            continue
        if not reader.is_expired(put, w.now_ms):
            break
        expired.append(put)
    return expired


@operation("checkpoint", 1.5)
def checkpoint(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is None or reader.handle is None:
        return
    nested = w.nested
    result = w.call(process, reader.handle.checkpoint, rng.random() < 0.5)
    w.note_fault(reader.queue, result)
    check_error(w, reader.queue, result, process, reader)
    if result.ok and nested == w.nested and reader.handle is not None:
        reader.note_saved()


@operation("checkpoint_all", 1.5)
def checkpoint_all(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    nested = w.nested
    result = w.call(process, opened.queue.checkpoint, rng.random() < 0.5)
    w.note_fault(opened.model, result)
    check_error(w, opened.model, result, process)
    if result.ok and nested == w.nested:
        for reader in process.readers:
            if reader.queue is opened.model and is_here(process, reader):
                reader.note_saved()


@operation("churn", 0.5)
def churn(w: World, rng: random.Random, process: Process) -> None:
    """A queue at work: some segments are filled, read, committed and retired."""
    put_many(w, rng, process)
    for call in (put_many, take_all, commit_all, save_all, checkpoint_all):
        if w.failure is None:
            call(w, rng, process)


def save_all(w: World, rng: random.Random, process: Process) -> None:
    for reader in list(process.readers):
        if reader.handle is not None and not is_here(process, reader):
            nested = w.nested
            result = w.call(process, reader.handle.checkpoint, True)
            w.note_fault(reader.queue, result)
            check_error(w, reader.queue, result, process, reader)
            if result.ok and nested == w.nested and reader.handle is not None:
                reader.note_saved()
    del rng


def take_all(w: World, rng: random.Random, process: Process) -> None:
    for reader in list(process.readers):
        if reader.handle is not None:
            nested = w.nested
            result = w.call(process, reader.handle.get_many, 100, timeout=0)
            if not check_empty(w, process, reader, result, nested):
                receive(w, reader, result.value, nested)
    del rng


def commit_all(w: World, rng: random.Random, process: Process) -> None:
    for reader in list(process.readers):
        if reader.handle is not None and reader.open:
            puts, handle, moves = sorted(reader.open), reader.handle, reader.moves
            result = w.call(process, handle.commit_many, [reader.open[put] for put in puts])
            if check_settled(w, process, reader, puts, moves, result):
                note_done(w, reader, puts, moves)
    del rng


@operation("evict", 0.4)
def evict(w: World, rng: random.Random, process: Process) -> None:
    reader = choose_reader(w, rng, process)
    if reader is not None and reader.handle is not None:
        waiting, nested = reader.handle.waiter_count, w.nested
        result = w.call(process, reader.handle.evict_waiters)
        if result.ok and nested == w.nested:
            w.require(result.value <= waiting, f"{result.value} of {waiting} waiters were evicted")
        if result.ok:
            gone = process.lost_loops  # who waits there is told nothing, and leaves when the collector comes
            w.require(result.value or not waiting or gone, f"none of {waiting} waiters was evicted")


@operation("figures", 1)
def figures(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is not None:
        stats = w.call(process, opened.queue.stats).value
        if stats is not None:
            w.require(stats.durable_id <= stats.tail_id, f"{stats}")
            for name, each in stats.readers.items():
                w.require(each.items >= each.open_items >= 0, f"{name}: {each}")
        repr(opened.queue)
    reader = choose_reader(w, rng, process)
    if reader is not None and reader.handle is not None:
        w.call(process, reader.handle.stats)
        repr(reader.handle)  # which must never raise
