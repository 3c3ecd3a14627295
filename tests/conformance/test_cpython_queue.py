"""CPython's own tests of ``queue``, those of the interpreter that runs this, applied to the queues in memory.

The cases are taken from the standard library's ``test`` package at run time; where that was left out of the
installation, they are skipped. Left out here, by name, is what tests a part of ``queue.Queue`` that these queues do
not have.
"""

from __future__ import annotations

import queue
import types
import unittest
from typing import Any

import pytest

from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue

cases = pytest.importorskip("test.test_queue", reason="this Python comes without its own tests (the package 'test')")

TASK_DONE = "it uses task_done() or join()"
LEFT_OUT = {
    "test_queue_task_done": TASK_DONE,
    "test_queue_join": TASK_DONE,
    "test_shutdown_all_methods_in_one_thread": TASK_DONE,
    "test_shutdown_immediate_all_methods_in_one_thread": TASK_DONE,
    "test_shutdown_all_methods_in_many_threads": TASK_DONE,
    "test_shutdown_immediate_all_methods_in_many_threads": TASK_DONE,
    "test_shutdown_join": TASK_DONE,
    "test_shutdown_immediate_join": TASK_DONE,
    "test_shutdown_put_join": TASK_DONE,
    "test_shutdown_immediate_put_join": TASK_DONE,
    "test_shutdown_get_task_done_join": TASK_DONE,
}
"""Of the cases of ``queue.Queue``. (Those of a queue that fails, of LIFO and of priority queues are other classes.)"""


def _module(queue_class: type[Any]) -> types.SimpleNamespace:
    """What the cases take for the module ``queue``: ours, under the name that they look for."""
    as_queue = type("Queue", (queue_class,), {})
    errors = {name: getattr(queue, name) for name in ("Empty", "Full", "ShutDown") if hasattr(queue, name)}
    return types.SimpleNamespace(Queue=as_queue, **errors)


def _suite(name: str, queue_class: type[Any], base: type, **namespace: Any) -> type[unittest.TestCase]:
    left_out = {name: None for name in LEFT_OUT if hasattr(base, name)}
    namespace = {"queue": _module(queue_class), "type2test": queue_class, **left_out, **namespace}
    return type(name, (base, unittest.TestCase), {"__module__": __name__, **namespace})


TestSimpleAsSimpleQueue = _suite("TestSimpleAsSimpleQueue", SimpleBlockingQueue, cases.BaseSimpleQueueTest)
TestConcurrentAsSimpleQueue = _suite(
    "TestConcurrentAsSimpleQueue",
    ConcurrentBlockingQueue,
    cases.BaseSimpleQueueTest,
    test_reentrancy=cases.CSimpleQueueTest.test_reentrancy,  # which CPython asks of the queue written in C only
)
TestSimpleAsQueue = _suite("TestSimpleAsQueue", SimpleBlockingQueue, cases.QueueTest)
TestConcurrentAsQueue = _suite("TestConcurrentAsQueue", ConcurrentBlockingQueue, cases.QueueTest)


@pytest.mark.parametrize(
    ("suite", "at_least"),
    [
        (TestSimpleAsSimpleQueue, {"test_basic", "test_order", "test_many_threads", "test_references"}),
        (TestConcurrentAsSimpleQueue, {"test_basic", "test_many_threads_timeout", "test_reentrancy"}),
        (TestSimpleAsQueue, {"test_basic", "test_nowait", "test_shrinking_queue"}),
        (TestConcurrentAsQueue, {"test_basic", "test_negative_timeout_raises_exception"}),
    ],
)
def test_the_cases_are_there(suite: type[unittest.TestCase], at_least: set[str]) -> None:
    names = set(unittest.TestLoader().getTestCaseNames(suite))
    assert at_least <= names
    assert not names & set(LEFT_OUT)


@pytest.mark.skipif(not hasattr(queue, "ShutDown"), reason="this Python's queues cannot be shut down")
def test_shutting_down_is_among_them() -> None:
    names = set(unittest.TestLoader().getTestCaseNames(TestConcurrentAsQueue))
    assert {"test_shutdown_empty", "test_shutdown_nonempty", "test_shutdown_pending_get"} <= names
    assert set(LEFT_OUT) <= set(dir(cases.QueueTest))
