"""The gate between transactions of SQLite and forks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kestrelpy.outbox import fork_gate
from kestrelpy.outbox.fork_gate import ForkGate
from tests.support.patience import until

Start = Callable[..., threading.Thread]


def test_a_fork_waits_for_who_is_inside(start: Start) -> None:
    gate, leave = ForkGate(), threading.Event()
    order: list[str] = []

    def transact() -> None:
        with gate, gate:
            order.append("in")
            leave.wait(20)
            order.append("out")

    def fork() -> None:
        gate.close()
        order.append("forks")
        gate.open()

    start(transact)
    until(lambda: order == ["in"])
    forking = start(fork)
    assert not threading.Event().wait(0.05)
    leave.set()
    forking.join(20)
    assert order == ["in", "out", "forks"]


def test_nobody_enters_while_it_is_closed_but_who_is_inside(start: Start) -> None:
    gate, entered = ForkGate(), threading.Event()

    def transact() -> None:
        with gate:
            entered.set()

    with gate:
        gate.close()  # not for the thread that forks
        with gate:
            start(transact)
            assert not entered.wait(0.05)
    gate.open()
    assert entered.wait(20)


def test_a_fork_does_not_wait_for_ever(start: Start) -> None:
    gate, leave = ForkGate(), threading.Event()
    inside = threading.Event()

    def transact() -> None:
        with gate:
            inside.set()
            leave.wait(20)

    start(transact)
    assert inside.wait(20)
    gate.close()
    gate.open()
    leave.set()
    assert fork_gate.PATIENCE < 2


def test_the_child_has_this_thread_alone(start: Start) -> None:
    gate, leave = ForkGate(), threading.Event()
    inside = threading.Event()

    def transact() -> None:
        with gate:
            inside.set()
            leave.wait(20)

    start(transact)
    assert inside.wait(20)
    with gate:
        gate.reset()
        gate.close()  # at once: the other thread is not there
        gate.open()
    leave.set()
