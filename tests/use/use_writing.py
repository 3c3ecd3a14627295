"""Operations that put."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy import DurabilityUnknown
from kestrelpy.ship.history import ID_STEP
from tests.use.use_model import Put
from tests.use.use_operations import check_error, choose_opened, operation, settle_puts

if TYPE_CHECKING:
    from tests.use.use_world import Opened, Process, World


def value_of(opened: Opened, put: Put, rng: random.Random) -> Any:
    codec = opened.options.get("codec")
    if codec is not None:
        return put.data.decode()
    if rng.random() < 0.1:
        return bytearray(put.data)
    return put.data


def draw_expiry(w: World, rng: random.Random, opened: Opened, puts: list[Put]) -> dict[str, Any]:
    now_ms = opened.queue._clock.time_ns() // 1_000_000
    expires_ms: int | None = None
    options: dict[str, Any] = {}
    if "expiry" in w.swarm.options and rng.random() < 0.5:
        if rng.random() < 0.7:
            seconds = rng.choice((0.0, 0.5, 3.0, 60.0))
            expires_ms = now_ms + int(seconds * 1000)
            options["expires_in"] = seconds
        else:
            expires_ms = now_ms + rng.choice((-5000, 0, 2000))
            options["expires_at_ms"] = expires_ms
        opened.model.expires = True
    for put in puts:
        put.added_ms, put.expires_ms = now_ms, expires_ms
    return options


def draw_puts(w: World, rng: random.Random, opened: Opened, count: int) -> list[Put]:
    puts = [w.new_put(opened.model, rng, None) for _ in range(count)]
    if rng.random() < 0.02:
        opened.model.flying.discard(puts[-1])
        del opened.model.by_number[puts[-1].number]
        puts[-1] = w.new_put(opened.model, rng, None, opened.queue.max_item_bytes + 1 - rng.choice((0, 8, 2000)))
    return puts


def wait_not(w: World, options: dict[str, Any]) -> None:
    """By default a put waits for ever, and here nobody would make room meanwhile."""
    if "block" in w.swarm.options or w.swarm.ships:
        options.setdefault("timeout", 0)


@operation("put", 9)
def put_one(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    puts = draw_puts(w, rng, opened, 1)
    options = draw_expiry(w, rng, opened, puts)
    if rng.random() < 0.1:
        options["timeout"] = 0.0005
    wait_not(w, options)
    nested = w.nested
    result = w.call(process, opened.queue.put, value_of(opened, puts[0], rng), **options)
    w.note_fault(opened.model, result)
    settle_puts(w, process, opened, puts, result, nested)


@operation("put_many", 3)
def put_many(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    count = rng.choice((1, 2, 3, 6, 20)) if "large batches" in w.swarm.options else rng.choice((1, 2, 3))
    puts = draw_puts(w, rng, opened, count)
    options = draw_expiry(w, rng, opened, puts)
    alone = all(not reader.available() and not reader.open for reader in opened.model.readers.values())
    if alone and not opened.model.flying and not opened.model.holes and rng.random() < 0.3 and not w.swarm.ships:
        options["timeout"] = None  # there is nobody to wait for: it must not wait
        w.saw("a batch that may wait for ever")
    wait_not(w, options)
    nested = w.nested
    values = [value_of(opened, put, rng) for put in puts]
    result = w.call(process, opened.queue.put_many, values, **options)
    w.note_fault(opened.model, result)
    settle_puts(w, process, opened, puts, result, nested)


@operation("put_future", 2)
def put_future(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    puts = draw_puts(w, rng, opened, 1)
    options = draw_expiry(w, rng, opened, puts)
    model, nested = opened.model, w.nested
    result = w.call(process, opened.queue.put_future, value_of(opened, puts[0], rng), **options)
    w.note_fault(model, result)
    if result.error is not None:
        settle_puts(w, process, opened, puts, result, nested)
        return
    put = puts[0]

    def arrive(done: Future[int]) -> None:
        if done.cancelled():  # which does not take the item back: it is there before long
            return
        error = done.exception()
        if error is None:
            model.store(put, done.result())
            w.drop_oldest(model, [put])
            w.saw("a put from a callback's turn") if w.depth else None
        else:
            model.holes = True
            model.may_be_there(put)
            if isinstance(error, DurabilityUnknown):
                model.failed = True
        w.act(process, "a callback of put_future")

    future: Future[int] = result.value
    process.futures.append(future)
    future.add_done_callback(arrive)


@operation("sync", 1)
def sync(w: World, rng: random.Random, process: Process) -> None:
    opened = choose_opened(rng, process)
    if opened is None:
        return
    result = w.call(process, opened.queue.sync)
    w.note_fault(opened.model, result)
    check_error(w, opened.model, result, process)
    if result.ok and not w.nested:
        stats = opened.queue.stats()
        has_jumped = stats.tail_id - opened.model.tail_id >= ID_STEP  # ids that no item has are not synced
        durable = stats.durable_id == stats.tail_id or opened.model.damaged or has_jumped
        w.require(durable, f"after sync() {stats.durable_id} of {stats.tail_id} are durable")


@operation("odd_put", 0.3)
def odd_put(w: World, rng: random.Random, process: Process) -> None:
    """Arguments that must be refused."""
    opened = choose_opened(rng, process)
    if opened is None or opened.options.get("codec") is not None:
        return
    puts = [w.new_put(opened.model, rng, None)]
    odd: dict[str, Any] = rng.choice(
        (
            {"expires_in": -1.0},
            {"expires_in": float("nan")},
            {"expires_in": float("inf")},
            {"expires_at_ms": 1.5},
            {"expires_at_ms": -1},
            {"timeout": -1},
            {"timeout": float("nan")},
            {"expires_in": 1.0, "expires_at_ms": 1},
        )
    )
    nested = w.nested
    result = w.call(process, opened.queue.put, puts[0].data, **odd)
    w.note_fault(opened.model, result)
    w.require(not result.ok, f"put took {odd}")
    settle_puts(w, process, opened, puts, result, nested)
