"""The future of a put: whatever a ``concurrent.futures.Future`` does, before and after somebody has looked at it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, InvalidStateError, as_completed, wait

import pytest

from kestrelpy._waiting.put_future import PutFuture


@pytest.fixture(params=["light", "looked at"])
def promise(request: pytest.FixtureRequest) -> PutFuture[int]:
    """One that nobody has asked for its condition, and one that somebody has."""
    made: PutFuture[int] = PutFuture()
    if request.param == "looked at":
        assert made._condition
    return made


@pytest.fixture
def quick_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_it_is_pending_then_done(promise: PutFuture[int]) -> None:
    assert isinstance(promise, Future)
    assert not promise.done()
    assert not promise.running()
    assert not promise.cancelled()
    with pytest.raises(TimeoutError):
        promise.result(0)
    assert promise.claim()
    promise.give(7)
    assert promise.done()
    assert not promise.running()
    assert not promise.cancelled()
    assert promise.result() == promise.result(0) == 7
    assert promise.exception() is None
    assert "finished returned int" in repr(promise)


def test_it_fails(promise: PutFuture[int]) -> None:
    promise.fail(OSError("no disk"))
    assert promise.done()
    with pytest.raises(OSError, match="no disk"):
        promise.result()
    assert isinstance(promise.exception(), OSError)


def test_giving_and_failing_may_be_repeated(promise: PutFuture[int]) -> None:
    promise.give(1)
    promise.give(2)
    promise.fail(OSError())
    assert promise.result() == 1
    assert promise.exception() is None
    assert not promise.claim()


def test_a_cancelled_one_is_not_completed(promise: PutFuture[int]) -> None:
    assert promise.cancel()
    promise.claim()
    promise.give(1)
    promise.fail(OSError())
    assert promise.cancelled()
    assert promise.done()
    with pytest.raises(CancelledError):
        promise.result()


def test_a_done_one_cannot_be_cancelled(promise: PutFuture[int]) -> None:
    promise.give(1)
    assert not promise.cancel()
    with pytest.raises(InvalidStateError):
        promise.set_result(2)


def test_what_its_holder_has_completed_stays(promise: PutFuture[int]) -> None:
    promise.set_result(5)
    promise.give(1)
    promise.fail(OSError())
    assert promise.result() == 5


def test_callbacks_before_and_after(promise: PutFuture[int]) -> None:
    called: list[int] = []
    promise.add_done_callback(lambda done: called.append(done.result()))
    promise.give(3)
    promise.add_done_callback(lambda done: called.append(done.result() + 1))
    assert called == [3, 4]


def test_the_standard_ways_to_wait(promise: PutFuture[int]) -> None:
    other: PutFuture[int] = PutFuture()
    other.give(2)
    assert wait([promise, other], return_when=FIRST_COMPLETED).done == {other}
    promise.give(1)
    assert {each.result() for each in as_completed([promise, other], timeout=5)} == {1, 2}


def test_asyncio_awaits_it(promise: PutFuture[int]) -> None:
    async def use() -> int:
        threading.Timer(0.01, promise.give, [9]).start()
        return await asyncio.wait_for(asyncio.wrap_future(promise), 5)

    assert asyncio.run(use()) == 9


def test_an_unknown_attribute_is_an_error(promise: PutFuture[int]) -> None:
    with pytest.raises(AttributeError, match="colour"):
        promise.colour  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made.result(10),
        lambda made: wait([made], timeout=10).done.pop().result(),
        lambda made: next(as_completed([made], timeout=10)).result(),
    ],
    ids=["result", "wait", "as_completed"],
)
@pytest.mark.usefixtures("quick_switches")
def test_whoever_begins_to_wait_as_it_is_given_gets_it(use: Callable[[PutFuture[int]], int]) -> None:
    """A looker that comes between the giver's look and its store would sleep for ever."""
    rounds = 3000
    promises: list[PutFuture[int]] = [PutFuture() for _ in range(rounds)]
    gate = threading.Barrier(2)

    def give() -> None:
        for number, made in enumerate(promises):
            gate.wait()
            made.give(number)

    giver = threading.Thread(target=give)
    giver.start()
    for number, made in enumerate(promises):
        gate.wait()
        assert use(made) == number
    giver.join()


@pytest.mark.usefixtures("quick_switches")
def test_a_cancel_and_a_give_agree() -> None:
    """Exactly one of them wins, and all see the same winner."""
    rounds = 3000
    promises: list[PutFuture[int]] = [PutFuture() for _ in range(rounds)]
    gate = threading.Barrier(2)

    def give() -> None:
        for made in promises:
            gate.wait()
            made.give(1)

    giver = threading.Thread(target=give)
    giver.start()
    won = []
    for made in promises:
        gate.wait()
        won.append(made.cancel())
    giver.join()
    assert [made.cancelled() for made in promises] == won
    assert all(made.done() for made in promises)
