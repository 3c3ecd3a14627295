"""What is interrupted: every operation of a journaled queue, in the situations that lead it along different ways.

Each is a function that prepares a scene and returns the call to be struck. ``CENTRAL`` are struck at every place in
every run of the suite.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

from kestrelpy import FullPolicy, Item, QueueClosed, QueueEmpty, ReaderConfig
from kestrelpy._process import forget
from kestrelpy._waiting.put_future import PutFuture
from kestrelpy._waiting.waiters import FutureWaiter, ThreadWaiter
from kestrelpy._writing.backpressure import ProducerThread
from kestrelpy._writing.group_commit import _Link
from tests.interrupts.scenes import FAR, Scene, demand
from tests.interrupts.strikes import Interrupter

SMALL = 4096
"""The smallest segment there is."""
Call = Callable[[], object]


@dataclass
class Prepared:
    """A scene, the call that is struck, and what is done before the checks if it was interrupted, or in any case."""

    scene: Scene
    call: Call
    afterwards: Call | None = None
    always: bool = False


Operation = Callable[[Interrupter], Prepared]
OPERATIONS: dict[str, Operation] = {}
CENTRAL: list[str] = []


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


def central(function: Operation) -> Operation:
    CENTRAL.append(function.__name__)
    return operation(function)


def attached(**options: Any) -> Scene:
    """A reader that shares the window, with open reads, unread and returned items."""
    scene = Scene(**options)
    scene.fill(1)
    scene.take(1)
    scene.user.commit(scene.reader, 1)
    return scene


# -- putting ---------------------------------------------------------------------------------------------------------


@central
def put_plain(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)
    return Prepared(scene, lambda: scene.do_put(b"new"))


@central
def put_first(_: Interrupter) -> Prepared:
    scene = Scene()
    return Prepared(scene, lambda: scene.do_put(b"new"))


@operation
def put_growing(_: Interrupter) -> Prepared:
    scene = attached()
    scene.do_put(bytes(60_000) + b"x")
    return Prepared(scene, lambda: scene.do_put(b"y" * 10_000))


@central
def put_rotating(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL)
    scene.do_put(b"x" * 3500)
    return Prepared(scene, lambda: scene.do_put(b"y" * 1000))


@operation
def put_that_fills_the_window(_: Interrupter) -> Prepared:
    config = ReaderConfig(memory_bytes=1000)
    scene = attached(default_reader=config)
    scene.fill(3)
    return Prepared(scene, lambda: scene.do_put(b"y" * 400))


@operation
def put_with_expiry(_: Interrupter) -> Prepared:
    scene = attached()
    return Prepared(scene, lambda: scene.do_put(b"new", expires_in=1000.0))


@operation
def put_many(_: Interrupter) -> Prepared:
    scene = attached()
    return Prepared(scene, lambda: scene.do_put(b"one", b"two", b"three"))


@central
def put_always(_: Interrupter) -> Prepared:
    scene = attached(sync="always")
    scene.fill(1)
    return Prepared(scene, lambda: scene.do_put(b"new"))


@operation
def put_many_always(_: Interrupter) -> Prepared:
    scene = attached(sync="always")
    return Prepared(scene, lambda: scene.do_put(b"one", b"two", b"three"))


@operation
def put_with_futures_in_line(_: Interrupter) -> Prepared:
    scene = attached()
    scene.futures += [scene.queue.get_future() for _ in range(2)]
    return Prepared(scene, lambda: scene.do_put(b"new"))


@operation
def put_many_with_futures_in_line(_: Interrupter) -> Prepared:
    scene = attached(sync="always")
    scene.futures += [scene.queue.get_future() for _ in range(2)]
    return Prepared(scene, lambda: scene.do_put(b"one", b"two", b"three"))


@operation
def put_dropping_the_oldest(_: Interrupter) -> Prepared:
    config = ReaderConfig(max_items=2, full_policy=FullPolicy.DROP_OLDEST)
    scene = Scene(default_reader=config)
    scene.dropped = True
    scene.fill(2)
    return Prepared(scene, lambda: scene.do_put(b"new"))


@operation
def put_that_waits_for_room(_: Interrupter) -> Prepared:
    scene = Scene(default_reader=ReaderConfig(max_items=3, full_policy=FullPolicy.BLOCK))
    scene.fill(3)
    scene.take(3)
    sleeps: list[float | None] = []

    def sleep(_: ProducerThread, seconds: float | None) -> None:
        if not sleeps:
            scene.user.commit(scene.reader, 2)  # an interrupt in this reaches the put as well
        sleeps.append(seconds)

    def call() -> None:
        with mock.patch.object(ProducerThread, "sleep", sleep):
            scene.do_put(b"new", timeout=None)

    def afterwards() -> None:
        demand(not scene.queue._room, "(12) somebody stands in the line of producers who is gone")
        scene.queue._registry.may_limit = False  # for the puts of the checks, as the next line
        scene.queue._registry.update_limits()
        scene.options.clear()

    return Prepared(scene, call, afterwards, always=True)


@operation
def put_future(_: Interrupter) -> Prepared:
    scene = attached(sync="always")
    made: list[Future[int]] = []

    def call() -> None:
        scene.trying.append((b"new",))
        made.append(scene.queue.put_future(b"new"))
        scene.clock.advance(0)
        scene.acknowledge((b"new",), [made[0].result(0)])

    return Prepared(scene, call, lambda: scene.clock.advance(1))


# -- getting ---------------------------------------------------------------------------------------------------------


@central
def get_from_the_window(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(3)
    return Prepared(scene, lambda: scene.user.got([scene.queue.get(timeout=0)]))


@central
def get_from_the_journal(_: Interrupter) -> Prepared:
    scene = Scene(segment_bytes=SMALL, default_reader=ReaderConfig(memory_bytes=500))
    scene.fill(4, b"x" * 2000)
    scene.take(1)
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


@operation
def get_of_two_readers(_: Interrupter) -> Prepared:
    scene = Scene(readers=("one", "two"))
    scene.fill(3)
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


@operation
def get_returned(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(3)
    scene.take(2)
    scene.user.abort(scene.reader, 2)
    scene.user.abort(scene.reader, 3)
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


@operation
def get_past_expired(_: Interrupter) -> Prepared:
    scene = attached()
    scene.dropped = True
    scene.do_put(b"short-lived", expires_in=1.0)
    scene.do_put(b"short too", expires_in=1.0)
    scene.fill(2)
    scene.clock.advance(2.0)
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


@operation
def get_with_hooks(_: Interrupter) -> Prepared:
    config = ReaderConfig(on_expired=lambda item: None, on_delivery=lambda reader, seconds: None, max_age=10.0)
    scene = Scene(default_reader=config)
    scene.dropped = True
    scene.do_put(b"short-lived", expires_in=1.0)
    scene.fill(2)
    scene.clock.advance(2.0)
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


def waits(scene: Scene, interrupter: Interrupter, call: Call, arrive: Call) -> Call:
    """``call`` with ``arrive`` done, undisturbed, when it has gone to sleep."""

    def wait(waiter: ThreadWaiter, timeout: float | None, sleep: Any = ThreadWaiter.wait) -> bool:
        with interrupter.paused():
            arrive()
        return bool(sleep(waiter, timeout))

    def struck() -> None:
        with mock.patch.object(ThreadWaiter, "wait", wait):
            call()

    return struck


@operation
def get_that_waits(interrupter: Interrupter) -> Prepared:
    scene = attached()
    call = waits(
        scene, interrupter, lambda: scene.user.got([scene.queue.get()]), lambda: scene.do_put(b"what it waits for")
    )
    return Prepared(scene, call)


@operation
def get_that_waits_in_vain(interrupter: Interrupter) -> Prepared:
    scene = attached()

    def call() -> None:
        try:
            scene.queue.get(timeout=0.001)
        except QueueEmpty:
            return

    return Prepared(scene, waits(scene, interrupter, call, lambda: None))


@operation
def get_future(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(1)

    def call() -> None:
        future = scene.queue.get_future()
        scene.futures.append(future)
        scene.futures.append(scene.queue.get_future())

    return Prepared(scene, call)


@operation
def cancel_future(_: Interrupter) -> Prepared:
    scene = attached()
    scene.futures += [scene.queue.get_future() for _ in range(2)]
    return Prepared(scene, scene.futures[0].cancel)


@operation
def get_many(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(4)
    return Prepared(scene, lambda: scene.take(3))


@central
def get_many_from_a_batch(_: Interrupter) -> Prepared:
    scene = attached()
    scene.do_put(*(b"%d" % number for number in range(9)))
    return Prepared(scene, lambda: scene.take(6))


@central
def get_from_a_batch(_: Interrupter) -> Prepared:
    scene = attached()
    scene.do_put(*(b"%d" % number for number in range(5)))
    scene.take(2)
    return Prepared(scene, lambda: scene.take(1))


@operation
def get_many_from_everywhere(_: Interrupter) -> Prepared:
    scene = Scene(segment_bytes=SMALL)
    scene.fill(5, b"x" * 1500)
    scene.take(2)
    scene.user.abort(scene.reader, 1)
    return Prepared(scene, lambda: scene.user.got(scene.reader.get_many(4, max_bytes=4000, timeout=0)))


@operation
def peek(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)
    return Prepared(scene, scene.reader.peek)


# -- settling --------------------------------------------------------------------------------------------------------


@central
def commit(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(3)
    scene.take(2)
    return Prepared(scene, lambda: scene.user.commit(scene.queue, 2))


@central
def commit_by_id_out_of_order(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(3)
    scene.take(3)

    def call() -> None:
        scene.user.committing.add(3)
        scene.queue.commit(3)
        scene.user.committed([3])

    return Prepared(scene, call)


@central
def commit_that_closes_a_gap(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(4)
    scene.take(4)
    scene.user.abort(scene.reader, 2)
    scene.take(1)
    scene.user.commit(scene.reader, 3)
    scene.user.commit(scene.reader, 4)
    return Prepared(scene, lambda: scene.user.commit(scene.reader, 2))


@operation
def commit_many(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(5)
    scene.take(5)
    return Prepared(scene, lambda: scene.user.commit(scene.reader, 2, 3, 5))


@operation
def commit_many_of_all_that_is_open(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(5)
    scene.take(5)
    return Prepared(scene, lambda: scene.user.commit(scene.reader, *sorted(scene.user.held)))


@operation
def abort(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(3)
    scene.take(3)
    scene.user.abort(scene.reader, 3)
    return Prepared(scene, lambda: scene.user.abort(scene.reader, 2))


@operation
def abort_with_a_future_in_line(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(1)
    scene.take(1)
    scene.futures.append(scene.queue.get_future())
    return Prepared(scene, lambda: scene.user.abort(scene.reader, 2))


@operation
def abort_with_a_hook(_: Interrupter) -> Prepared:
    scene = attached(default_reader=ReaderConfig(on_abort=lambda item: False))
    scene.fill(2)
    scene.take(2)
    return Prepared(scene, lambda: scene.user.abort(scene.reader, 2))


# -- moving and saving -----------------------------------------------------------------------------------------------


@operation
def flush(_: Interrupter) -> Prepared:
    scene = attached()
    scene.dropped = True
    scene.fill(5)
    scene.take(3)
    scene.user.commit(scene.reader, 3)
    scene.user.abort(scene.reader, 2)
    return Prepared(scene, scene.reader.flush)


@operation
def seek(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(5)
    scene.take(3)

    def call() -> None:
        user = scene.user
        user.held.clear()  # in any case: a handle from before a seek means nothing after it
        scene.queue.seek(3)

    def afterwards() -> None:
        scene.queue.seek(3)
        scene.user.done |= {1, 2}

    return Prepared(scene, call, afterwards, always=True)


@operation
def discard(_: Interrupter) -> Prepared:
    scene = attached()
    scene.dropped = True
    scene.fill(6)
    scene.take(3)
    scene.user.abort(scene.reader, 2)
    return Prepared(scene, lambda: scene.reader.discard([2, 3, 5, 6, 99]))


@operation
def peek_future(_: Interrupter) -> Prepared:
    scene = attached()
    futures: list[Future[Item]] = []

    def call() -> None:
        futures.append(scene.reader.peek_future())
        scene.do_put(b"new")

    def afterwards() -> None:
        scene.do_put(b"another")
        demand(all(future.done() for future in futures), "(7) a peek is left in line though there are items")

    return Prepared(scene, call, afterwards)


@operation
def configure(_: Interrupter) -> Prepared:
    scene = attached()
    scene.dropped = True
    scene.fill(5)
    scene.take(2)
    config = ReaderConfig(max_items=3, full_policy=FullPolicy.DROP_OLDEST, counts_open=False)

    def afterwards() -> None:
        scene.reader.configure(ReaderConfig())

    return Prepared(scene, lambda: scene.reader.configure(config), afterwards, always=True)


@central
def checkpoint_appending(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)
    scene.queue.checkpoint(durable=True)
    scene.take(2)
    scene.user.commit(scene.reader, 3)
    return Prepared(scene, scene.queue.checkpoint)


@central
def checkpoint_durable(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL)
    scene.fill(3, b"x" * 2000)
    scene.take(2)
    scene.user.commit(scene.reader, 2)
    scene.queue._registry._files[scene.reader]._size = 0  # a grown one: it is replaced
    return Prepared(scene, lambda: scene.queue.checkpoint(durable=True))


@operation
def checkpoint_archiving(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL, archive_dir="/archive")
    scene.fill(5, b"x" * 2000)
    scene.take(5)
    scene.user.commit(scene.reader, 2, 3, 4)
    return Prepared(scene, lambda: scene.queue.checkpoint(durable=True))


@operation
def maintenance(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL)
    scene.fill(5, b"x" * 2000)
    scene.take(5)
    scene.user.commit(scene.reader, 2, 3, 4)
    return Prepared(scene, lambda: scene.clock.advance(5.0))


# -- syncing ---------------------------------------------------------------------------------------------------------


@operation
def sync_alone(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)
    return Prepared(scene, scene.queue.sync)


def _lead_elsewhere(scene: Scene) -> Any:
    """Another thread leads a sync now; returns what it does when the disk has answered."""
    commit = scene.queue._syncer.commit
    commit._leader = leader = object()
    commit_id = scene.queue._journal.tail_id

    def answered() -> None:
        if commit._leader is leader:
            commit._finish(leader, commit_id)

    return answered


@operation
def sync_behind_a_leader(interrupter: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)
    answered = _lead_elsewhere(scene)
    return Prepared(scene, waits(scene, interrupter, scene.queue.sync, answered), answered)


@operation
def sync_that_inherits_the_lead(interrupter: Interrupter) -> Prepared:
    """What it waits for was put after the other's sync began: it is handed the lead."""
    scene = attached()
    scene.fill(2)
    answered = _lead_elsewhere(scene)
    scene.fill(2, b"later")
    return Prepared(scene, waits(scene, interrupter, scene.queue.sync, answered), answered)


@operation
def sync_in_a_chain(interrupter: Interrupter) -> Prepared:
    """Somebody else is behind it, whom it is to wake."""
    scene = attached()
    scene.fill(2)
    answered = _lead_elsewhere(scene)
    tail_id, behind = scene.queue._journal.tail_id, _Link()
    elsewhere = mock.Mock(ident=0)

    def arrive() -> None:
        if scene.queue._syncer.commit.durable_id < tail_id:
            scene.queue._syncer.commit._tickets.append((tail_id, behind))
        answered()

    def sync() -> None:
        with mock.patch.object(threading, "main_thread", return_value=elsewhere):
            scene.queue.sync()

    def afterwards() -> None:
        arrive()
        demand(behind.wait(0), "(7) who is behind in the chain was not woken")

    return Prepared(scene, waits(scene, interrupter, sync, arrive), afterwards, always=True)


@operation
def lead_in_a_chain(interrupter: Interrupter) -> Prepared:
    """What it waits for was put later: it is to lead, and to wake somebody before that."""
    scene = attached()
    scene.fill(2)
    answered = _lead_elsewhere(scene)
    tail_id, behind = scene.queue._journal.tail_id, _Link()
    elsewhere = mock.Mock(ident=0)
    scene.fill(2, b"later")

    def arrive() -> None:
        if scene.queue._syncer.commit.durable_id < tail_id:
            scene.queue._syncer.commit._tickets.append((tail_id, behind))
        answered()

    def sync() -> None:
        with mock.patch.object(threading, "main_thread", return_value=elsewhere):
            scene.queue.sync()

    def afterwards() -> None:
        arrive()
        demand(behind.wait(0), "(7) who is behind in the chain was not woken")
        scene.queue.sync()
        demand(scene.queue._syncer.commit._leader is None, "(7) the lead is left with one who has gone")

    return Prepared(scene, waits(scene, interrupter, sync, arrive), afterwards, always=True)


@operation
def lead_to_a_chain(_: Interrupter) -> Prepared:
    """A leader who has a chain to set off, with the next leader in it."""
    scene = attached()
    scene.fill(2)
    commit = scene.queue._syncer.commit
    tail_id, links = scene.queue._journal.tail_id, [_Link(), _Link(), _Link()]
    commit._tickets = [(tail_id, links[0]), (tail_id + 1, links[1]), (tail_id, links[2])]

    def afterwards() -> None:
        scene.fill(1)
        commit.run()  # unless somebody leads
        while woken := [link for link in links if link.wait(0)]:
            for link in woken:  # what their threads would do
                links.remove(link)
                link.wake_next()
                if commit._leader is link:
                    commit._lead(link)
        demand(not links, "(7) one of a chain was not woken")
        demand(not commit._tickets and commit._leader is None, "(7) the lead is left with one who has gone")

    return Prepared(scene, scene.queue.sync, afterwards, always=True)


@operation
def sync_for_others(_: Interrupter) -> Prepared:
    """A leader who has others' tickets to complete."""
    scene = attached(sync="always")
    tickets = [cast("PutFuture[int]", FutureWaiter()) for _ in range(2)]

    def call() -> None:
        scene.trying.append((b"new",))
        with mock.patch.object(scene.queue._syncer.commit, "wait"):
            item_id = scene.queue.put(b"new")
        for ticket in tickets:
            scene.queue._syncer.commit.add(item_id, ticket, soon=False)
        scene.queue.sync()
        scene.acknowledge((b"new",), [item_id])

    def afterwards() -> None:
        scene.queue.sync()
        left = [ticket for _, ticket in scene.queue._syncer.commit._tickets]
        demand(not left, "(7) somebody waits for a sync that has been")

    return Prepared(scene, call, afterwards)


# -- readers ---------------------------------------------------------------------------------------------------------


@operation
def make_reader(_: Interrupter) -> Prepared:
    scene = Scene(readers=("one",))
    scene.fill(2)
    return Prepared(scene, lambda: scene.queue.reader("two"), lambda: scene.queue.drop_reader("two"), always=True)


@operation
def take_over_the_default_reader(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)

    def afterwards() -> None:
        scene.users = {"named": scene.user}
        scene.queue.reader("named")

    return Prepared(scene, lambda: scene.queue.reader("named"), afterwards, always=True)


@operation
def drop_reader(_: Interrupter) -> Prepared:
    scene = Scene(readers=("one",))
    scene.fill(2)
    scene.queue.reader("two", start="earliest").get()
    return Prepared(scene, lambda: scene.queue.drop_reader("two"), lambda: scene.queue.drop_reader("two"), always=True)


@operation
def close_reader(_: Interrupter) -> Prepared:
    scene = Scene(readers=("one", "two"))
    scene.fill(2)
    scene.take(1)
    reader = scene.reader

    def afterwards() -> None:
        reader.close()
        scene.user.held.clear()

    return Prepared(scene, reader.close, afterwards, always=True)


# -- opening and closing ---------------------------------------------------------------------------------------------


def _reopening(scene: Scene) -> Prepared:
    return Prepared(scene, scene.reopen, scene.reopen)


def _die(scene: Scene) -> None:
    scene.disk.kill()
    forget(scene.queue)
    scene.queue._abandon()


@operation
def open_fresh(_: Interrupter) -> Prepared:
    scene = Scene()
    scene.queue.erase()
    return _reopening(scene)


@operation
def open_after_close(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL)
    scene.fill(4, b"x" * 2000)
    scene.queue.close()
    return _reopening(scene)


@operation
def open_after_kill(_: Interrupter) -> Prepared:
    """With a torn tail."""
    scene = attached(segment_bytes=SMALL)
    scene.fill(4, b"x" * 2000)
    journal = scene.queue._journal
    assert journal._buffer is not None
    end = journal._at[0]
    journal._buffer[end : end + 40] = b"half a frame, which the kill cut short.."
    _die(scene)
    return _reopening(scene)


@operation
def open_with_quarantine(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL, on_corruption="quarantine")
    scene.fill(4, b"x" * 2000)
    scene.queue.close()
    folder = scene.disk.directory("/data")
    first = sorted(name for name in folder.names() if name.endswith(".segment"))[0]
    file = folder.open(first, write=True)
    file.write(150, b"damage")
    file.close()
    del scene.put[2]
    scene.dropped = True
    return _reopening(scene)


@central
def close(_: Interrupter) -> Prepared:
    scene = attached(segment_bytes=SMALL)
    scene.fill(4, b"x" * 2000)
    scene.take(3)
    scene.user.commit(scene.reader, 2, 4)
    futures: list[Future[Item]] = []

    def call() -> None:
        scene.queue.close()

    def afterwards() -> None:
        scene.queue.close()
        for future in futures:
            assert isinstance(future.exception(0), QueueClosed)
        scene.reopen()

    while len(scene.reader._backlog.opened) < 2:
        scene.take(1)
    futures += [scene.queue.get_future()]
    return Prepared(scene, call, afterwards, always=True)


@operation
def erase(_: Interrupter) -> Prepared:
    scene = attached()
    scene.fill(2)

    def afterwards() -> None:
        with contextlib.suppress(QueueClosed):  # it was interrupted when it had closed: files may be left
            scene.queue.erase()
        scene.queue = scene.open()
        scene.queue.erase()
        scene.put.clear()
        scene.users = {"": type(scene.user)()}
        scene.queue = scene.open()

    return Prepared(scene, scene.queue.erase, afterwards, always=True)


# -- from another process --------------------------------------------------------------------------------------------


def far_away(**options: Any) -> Scene:
    scene = Scene(readers=(FAR,), segment_bytes=SMALL, **options)
    scene.fill(4, b"x" * 1500)
    scene.take(1)
    scene.user.commit(scene.reader, 1)
    return scene


@operation
def far_open(_: Interrupter) -> Prepared:
    scene = far_away()
    scene.reader.checkpoint()
    assert scene.far is not None
    scene.far.close()
    scene.far = None
    scene.user.held.clear()
    return Prepared(scene, lambda: scene.reader)


@operation
def far_get(_: Interrupter) -> Prepared:
    scene = far_away()
    return Prepared(scene, lambda: scene.user.got([scene.reader.get(timeout=0)]))


@operation
def far_get_that_waits(interrupter: Interrupter) -> Prepared:
    scene = far_away()
    scene.take(9)

    def arrive() -> None:
        scene.do_put(b"what it waits for")
        scene.clock.advance(1.0)

    return Prepared(scene, waits(scene, interrupter, lambda: scene.user.got([scene.reader.get()]), arrive))


@operation
def far_commit(_: Interrupter) -> Prepared:
    scene = far_away()
    scene.take(2)
    return Prepared(scene, lambda: scene.user.commit(scene.reader, 2))


@operation
def far_checkpoint(_: Interrupter) -> Prepared:
    scene = far_away()
    scene.take(2)
    scene.user.commit(scene.reader, 2)
    return Prepared(scene, lambda: scene.reader.checkpoint(durable=True))


@operation
def far_close(_: Interrupter) -> Prepared:
    scene = far_away()
    scene.take(2)
    reader = scene.reader

    def afterwards() -> None:
        reader.close()
        scene.far = None
        scene.user.unsaved, scene.user.done = scene.user.done, set()
        scene.user.held.clear()

    return Prepared(scene, reader.close, afterwards, always=True)
