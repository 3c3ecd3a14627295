"""Claims of a future, in each of its states, and while another thread has its lock."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from kestrelpy._waiting.queue_future import QueueFuture
from tests.support.patience import until


@pytest.mark.parametrize("claim", [QueueFuture.claim, QueueFuture.claim_now])
def test_a_claim_lasts_until_the_future_is_done(claim: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(claim)
    future = QueueFuture[int]()
    assert [claim(future), claim(future), future.cancel()] == [True, True, False]
    future.set_result(1)
    assert claim(future) is False
    cancelled = QueueFuture[int]()
    cancelled.cancel()
    assert [claim(cancelled), claim(cancelled)] == [False, False]
    assert not caplog.records


def test_a_claim_notifies_who_waits_for_a_cancelled_future_and_claim_now_leaves_that() -> None:
    future = QueueFuture[int]()
    future.cancel()
    assert future.claim_now() is False
    assert concurrent.futures.wait([future], timeout=0).not_done == {future}
    assert not future.claim()
    assert concurrent.futures.wait([future], timeout=0).done == {future}


def test_claim_now_waits_for_no_other_thread() -> None:
    future, ended = QueueFuture[int](), list[bool]()

    def wait() -> None:
        future.wait_for_lock()
        ended.append(True)

    with future._condition:
        assert future.claim_now()  # this thread has the lock, and may take it again
        waiting = [
            threading.Thread(target=wait),
            threading.Thread(target=lambda: ended.append(future.claim())),
        ]
        asking = threading.Thread(target=lambda: ended.append(future.claim_now() is None))
        for thread in (*waiting, asking):
            thread.start()
        asking.join(30)
        assert ended == [True]
    for thread in waiting:
        thread.join(30)
    until(lambda: ended == [True] * 3)
