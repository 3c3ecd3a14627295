"""Clients that know nothing of us: greenstalk and pystalk, each through its whole interface, on our server.

That it is the whole interface is held, too: what a client can do and is not done here fails the test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import greenstalk
import pystalk
import pytest

from tests.server.beanstalk_harness import Served, served


@pytest.fixture
def it() -> Iterator[Served]:
    with served() as one:
        yield one


class Recorder:
    """A client whose public methods note that they were called."""

    def __init__(self, client: Any, called: set[str]) -> None:
        self.__dict__.update(_client=client, _called=called)

    def __getattr__(self, name: str) -> Any:
        self._called.add(name)
        return getattr(self._client, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._client, name, value)


def interface(kind: type) -> set[str]:
    """Its public methods and properties."""
    return {
        name
        for name, made in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(made) or isinstance(made, property))
    }


def raises(error: type[Exception], function: Callable[[], object]) -> None:
    with pytest.raises(error):
        function()


# -- greenstalk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def called() -> set[str]:
    return set()


def test_greenstalk(it: Served, called: set[str]) -> None:
    with greenstalk.Client(it.server.addresses[0], watch=["default", "work"]) as plain:
        client = Recorder(plain, called)
        client.use("work")
        _produce_and_consume(client)
        _delay_bury_and_kick(it, client)
        _look_around(client)
        _time_out(it, client)
        _be_refused(it, client)
        client.close()
    assert called >= interface(greenstalk.Client), interface(greenstalk.Client) - called


def _produce_and_consume(client: Any) -> None:
    assert client.put("späte Arbeit", priority=20) == 1
    assert client.put("urgent", priority=10) == 2
    assert client.peek_ready().body == "urgent"
    assert [client.reserve().id for _ in range(2)] == [2, 1]
    client.release(client.peek(1), priority=5)
    job = client.reserve(timeout=0)
    assert (job.id, job.body) == (1, "späte Arbeit")
    client.touch(job)
    client.delete(job)
    client.delete(2)
    raises(greenstalk.NotFoundError, lambda: client.peek(2))


def _delay_bury_and_kick(it: Served, client: Any) -> None:
    delayed, buried = client.put("delayed", delay=60), client.put("buried")
    assert client.peek_delayed().id == delayed
    client.bury(client.reserve_job(buried), priority=3)
    assert client.peek_buried().body == "buried"
    assert client.kick(10) == 1
    client.kick_job(delayed)
    raises(greenstalk.NotFoundError, lambda: client.kick_job(delayed))
    raises(greenstalk.NotFoundError, client.peek_buried)
    raises(greenstalk.NotFoundError, client.peek_delayed)
    assert client.reserve().id == buried
    client.release(client.peek(buried), delay=5)
    it.advance(5)
    for _ in range(2):
        client.delete(client.reserve())


def _look_around(client: Any) -> None:
    assert client.using() == "work"
    assert client.watch("other") == 3
    assert client.watching() == ["default", "work", "other"]
    assert client.ignore("other") == 2
    assert client.tubes() == ["default", "work"]
    job_id = client.put("x", ttr=33)
    stats = client.stats_job(job_id)
    assert set(stats) == set(greenstalk.StatsJob.__annotations__)
    assert (stats["id"], stats["tube"], stats["state"], stats["ttr"]) == (job_id, "work", "ready", 33)
    assert set(client.stats_tube("work")) == set(greenstalk.StatsTube.__annotations__)
    assert set(client.stats()) == set(greenstalk.Stats.__annotations__)
    assert client.stats()["current-jobs-ready"] == 1
    client.pause_tube("work", 10)
    raises(greenstalk.TimedOutError, lambda: client.reserve(timeout=0))
    client.pause_tube("work", 0)
    client.delete(client.reserve())
    assert client.encoding == "utf-8"


def _time_out(it: Served, client: Any) -> None:
    job_id = client.put("short", ttr=1)
    assert client.reserve().id == job_id
    raises(greenstalk.DeadlineSoonError, client.reserve)
    it.advance(1)
    raises(greenstalk.NotFoundError, lambda: client.release(client.peek(job_id)))
    assert client.stats_job(job_id)["timeouts"] == 1
    client.delete(job_id)


def _be_refused(it: Served, client: Any) -> None:
    raises(greenstalk.BadFormatError, lambda: client.use("-bad"))
    raises(greenstalk.BadFormatError, lambda: client.use("two words"))
    raises(greenstalk.NotIgnoredError, lambda: [client.ignore("default"), client.ignore("work")])
    raises(greenstalk.JobTooBigError, lambda: client.put("x" * 65536))
    raises(greenstalk.UnknownCommandError, lambda: client._send_cmd(b"fetch", b"FETCHED"))
    it.call(it.server.drain)
    raises(greenstalk.DrainingError, lambda: client.put("late"))


def test_greenstalk_with_bytes(it: Served) -> None:
    body = bytes(range(256)) + b"\r\n" * 3
    with greenstalk.Client(it.server.addresses[0], encoding=None, use="a", watch="a") as client:
        client.put(body)
        assert client.watching() == ["a"]
        assert client.reserve().body == body


# -- pystalk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def uri(it: Served) -> str:
    return "beanstalk://{}:{}".format(*it.server.addresses[0])


def test_pystalk(it: Served, uri: str, called: set[str]) -> None:
    called |= {"from_uri"}
    plain = pystalk.BeanstalkClient.from_uri(uri, socket_timeout=20)
    client = Recorder(plain, called)
    assert client.ping()
    _pystalk_produces(client)
    _pystalk_consumes(it, client)
    _pystalk_looks(client)
    client.close()
    client.put_job_into("work", "after a new connection")  # close() lets it connect again
    assert client.stats()["total-connections"] == 3
    client.close()
    assert called >= interface(pystalk.BeanstalkClient), interface(pystalk.BeanstalkClient) - called


def _pystalk_produces(client: Any) -> None:
    assert client.put_job("one") == (b"INSERTED", 1)
    assert client.put_job_into("work", b"two", pri=5, delay=0, ttr=9) == (b"INSERTED", 2)
    with client.using("work") as inserter:
        assert inserter.put_job("three", pri=6) == (b"INSERTED", 3)
    client.use("work")
    client.watch("work")
    assert client.watchlist == {"work"}


def _pystalk_consumes(it: Served, client: Any) -> None:
    assert [job.job_id for job in client.reserve_iter()] == [2, 3]
    client.release_job(2, pri=7)
    assert client.release_job(3, pri=1, delay=5) == b"RELEASED"
    assert [job.job_id for job in client.peek_delayed_iter() if client.kick_job(job) is None] == [3]
    assert client.peek_ready().job_id == 3
    job = client.reserve_job(0)
    assert (job.job_id, job.job_data) == (3, b"three")
    assert client.bury_job(job) == b"BURIED"
    assert client.peek_buried().job_data == b"three"
    assert client.kick_jobs(10) == (b"KICKED", 1)
    client.put_job("late", delay=10)
    assert client.peek_delayed().job_data == b"late"
    it.advance(10)
    found = []
    for job in client.peek_ready_iter():
        found.append(job.job_data)
        client.delete_job(job)
    assert found == [b"two", b"three", b"late"]
    assert list(client.peek_buried_iter()) == []
    raises(pystalk.BeanstalkError, lambda: client.delete_job(2))


def _pystalk_looks(client: Any) -> None:
    client.watchlist = {"work", "default"}
    client.ignore("default")
    assert client.list_tubes() == ["default", "work"]
    assert client.stats_job(1)["state"] == "ready"
    assert client.stats_tube("work")["current-jobs-ready"] == 0
    assert client.pause_tube("work", 60) == b"PAUSED"
    assert client.stats_tube("work")["pause"] == 60
    assert client.unpause_tube("work") == b"PAUSED"
    stats = client.stats()
    assert stats["current-jobs-ready"] == 1
    assert stats["version"] == "1.12+kestrelpy"


def test_pystalk_s_pool(it: Served, uri: str, called: set[str]) -> None:
    called |= {"from_uris"}
    pool = Recorder(pystalk.ProductionPool.from_uris([uri, uri], socket_timeout=20), called)
    pool.use("work")
    assert [pool.put_job("x")[1], pool.put_job("x")[1], pool.put_job_into("other", "x")[1]] == [1, 2, 3]
    assert it.queue.stats_tube("work").ready == 2
    assert it.queue.stats().sessions == 2
    for record in pool._clients:
        record.client.close()
    assert called >= interface(pystalk.ProductionPool), interface(pystalk.ProductionPool) - called
