"""Clients that know nothing of us, on the kestrel server: memcache clients of five authors, and pykestrel's calls."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import libmc
import memcache
import pymemcache
import pytest

from tests.server.kestrel.kestrel_harness import Kestrel, kestrel


@pytest.fixture
def it() -> Iterator[Kestrel]:
    with kestrel(max_open_transactions=10) as running:
        yield running


def place(it: Kestrel) -> str:
    host, port = it.server.addresses[0]
    return f"{host}:{port}"


# -- pymemcache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noreply", [False, True])
def test_pymemcache(it: Kestrel, noreply: bool) -> None:
    """pymemcache: set, get, delete, stats, version, noreply both ways; options by raw_command."""
    client = pymemcache.Client(it.server.addresses[0], default_noreply=noreply, timeout=20)
    assert client.set("q", b"one")
    assert client.set("q", b"two", expire=100)
    assert client.get("q") == b"one"
    reply = client.raw_command("get q/open", end_tokens=b"END\r\n")
    assert b"VALUE q 0 3\r\ntwo\r\n" in reply
    client.raw_command("get q/close", end_tokens=b"END\r\n")
    assert client.get("q") is None
    assert client.version() == b"2.4.7+kestrelpy"
    assert client.stats()[b"queue_q_total_items"] in (2, b"2")
    assert client.delete("q")
    client.set_many({"a": b"1", "b": b"2"})
    assert (client.get("a"), client.get("b")) == (b"1", b"2")
    if noreply:
        client.flush_all()
        assert client.get("q") is None
    client.close()


# -- python-memcached and pykestrel ------------------------------------------------------------------------------------


class Kestrelling:
    """The eight calls of pykestrel 0.5.1, a kestrel client of 2011 for Python 2, on the memcache client under it."""

    def __init__(self, client: Any, queue: str) -> None:
        self._client = client
        self._queue = queue

    def add(self, data: str, expire: int = 0) -> bool:
        return bool(self._client.set(self._queue, data, time=expire))

    def get(self, timeout: int | None = None) -> Any:
        return self._get("" if timeout is None else f"/t={timeout}")

    def next(self, timeout: int | None = None) -> Any:
        return self._get("/close/open" if timeout is None else f"/t={timeout}/close/open")

    def peek(self, timeout: int | None = None) -> Any:
        return self._get("/peek" if timeout is None else f"/t={timeout}/peek")

    def abort(self) -> None:
        self._get("/abort")

    def finish(self) -> None:
        self._get("/close")

    def flush(self) -> None:
        self._client.flush_all()

    def stats(self) -> dict[str, Any]:
        return {key: value for _, figures in self._client.get_stats() for key, value in figures.items()}

    def _get(self, options: str) -> Any:
        data = self._client.get(f"{self._queue}{options}")
        return data.decode() if isinstance(data, bytes) else data


def test_python_memcached_as_pykestrel(it: Kestrel) -> None:
    """python-memcached, pykestrel's eight calls: options in the key."""
    client = memcache.Client([place(it)])
    queue = Kestrelling(client, "q")
    for word in ("one", "two", "three"):
        assert queue.add(word)
    assert queue.peek() == "one"
    assert queue.get() == "one"
    assert queue.next() == "two"
    queue.abort()
    assert queue.next(timeout=100) == "two"
    assert queue.next() == "three"  # the second is finished by it
    queue.finish()
    assert queue.get(timeout=0) is None
    assert queue.peek(timeout=0) is None
    queue.add("four")
    assert queue.stats()["queue_q_items"] == "1"
    queue.flush()
    assert queue.get() is None
    client.disconnect_all()


def test_python_memcached_gets(it: Kestrel) -> None:
    """python-memcached: gets needs the fifth word."""
    client = memcache.Client([place(it)], cache_cas=True)
    client.set("q", "a")
    assert client.gets("q") in ("a", b"a")
    client.disconnect_all()


# -- libmemcached, libmc, aiomcache ------------------------------------------------------------------------------------


def test_libmc(it: Kestrel) -> None:
    """libmc: options in the key, text mode."""
    client = libmc.Client([place(it)])
    assert client.set("q", b"one")
    assert client.set("q", b"two")
    assert client.get("q/peek") == b"one"
    assert client.get("q/t=500/open") == b"one"
    assert client.get("q/close") is None
    assert client.get("q") == b"two"
    assert client.delete("q")
    assert client.version()


def test_pylibmc(it: Kestrel) -> None:
    """pylibmc: options in the key, text mode."""
    if importlib.util.find_spec("pylibmc") is None:
        pytest.skip("pylibmc has no wheel for this Python")
    import pylibmc

    client = pylibmc.Client([place(it)], binary=False)
    assert client.set("q", b"one")
    assert client.set("q", b"two")
    assert client.get("q/t=500/open") == b"one"
    assert client.get("q/close/open") == b"two"
    assert client.get("q/abort") is None
    assert client.get("q") == b"two"
    assert client.delete("q")
    client.disconnect_all()


def test_aiomcache(it: Kestrel) -> None:
    """aiomcache: plain gets, sets."""
    import aiomcache

    async def main() -> None:
        client = aiomcache.Client(*it.server.addresses[0])
        assert await client.set(b"q", b"one")
        assert await client.set(b"q", b"two", exptime=50)
        assert await client.get(b"q") == b"one"
        assert await client.get(b"q") == b"two"
        assert await client.get(b"q") is None
        assert await client.delete(b"q")
        assert await client.version() == b"2.4.7+kestrelpy"
        await client.close()

    asyncio.run(main())
