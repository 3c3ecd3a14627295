"""Each kind of store does what ``Store`` says; what goes wrong is ``StoreUnavailable``; a weak store is found out."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import obstore.store
import pytest

from kestrelpy import ForkedQueue
from kestrelpy.ship import Listed, Store, StoreTooWeak, StoreUnavailable, check, open_store
from kestrelpy.ship.checking import probe
from kestrelpy.ship.object_store import ObjectStore
from kestrelpy.testing.stores import check_store
from tests.ship.weak_stores import WEAK, Weak
from tests.support import seaweed
from tests.support.budget import takes_long
from tests.support.seaweed import LOOPBACK, Seaweed

# -- what a store does -----------------------------------------------------------------------------------------------


def test_an_object_is_created_once(store: Store) -> None:
    assert store.create("jobs/log/0000000000000001", b"first")
    assert not store.create("jobs/log/0000000000000001", b"second")
    assert store.read("jobs/log/0000000000000001") == b"first"


def test_an_empty_object_is_there(store: Store) -> None:
    assert store.create("jobs/empty", b"")
    assert store.read("jobs/empty") == b""
    assert store.read("jobs/empty", 0, 10) == b""
    assert not store.create("jobs/empty", b"more")


def test_what_is_not_there_is_none(store: Store) -> None:
    store.create("jobs/log/1", b"data")
    for key in ("jobs/log/2", "other/log/1", "jobs/log", "jobs", "jobs/log/1/deeper"):
        assert store.read(key) is None, key
        assert store.read(key, 5, 5) is None, key


@pytest.mark.parametrize(
    ("start", "length"), [(0, 3), (7, 3), (7, 100), (10, 1), (100, 1), (3, 0), (4, None), (99, None)]
)
def test_a_part_is_read(store: Store, start: int, length: int | None) -> None:
    store.create("jobs/part", b"0123456789")
    assert store.read("jobs/part", start, length) == b"0123456789"[start : None if length is None else start + length]


def test_a_listing_is_of_what_is_below(store: Store) -> None:
    for key in ("jobs/log/2", "jobs/log/1", "jobs/log/deep/er", "jobs/logs", "jobs/queue.json", "jobs2/log/1"):
        store.create(key, key.encode())
    assert [each.key for each in store.list("jobs/log/")] == ["jobs/log/1", "jobs/log/2", "jobs/log/deep/er"]
    assert store.list("nothing/") == []
    everything = store.list("")
    assert [each.key for each in everything] == sorted(each.key for each in everything)
    assert len(everything) == 6
    assert all(each.size_bytes == len(each.key) for each in everything)


def test_dates_are_the_store_s(store: Store) -> None:
    store.create("jobs/one", b"1")
    store.create("jobs/two", b"2")
    one, two = store.list("jobs/")
    assert abs(one.modified_ms - two.modified_ms) < 60_000


def test_deleted_is_gone_and_missing_is_fine(store: Store) -> None:
    for key in ("jobs/1", "jobs/2", "jobs/3"):
        store.create(key, b"data")
    store.delete(["jobs/1", "jobs/never", "jobs/3", "nowhere/4"])
    store.delete([])
    assert [each.key for each in store.list("jobs/")] == ["jobs/2"]
    assert store.create("jobs/1", b"again")


def test_many_threads_have_one_winner(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(10):
            key = f"jobs/log/{number}"
            won = list(pool.map(lambda bid: store.create(key, b"%d" % bid), range(8)))  # noqa: B023 - used at once
            assert won.count(True) == 1
            assert store.read(key) == b"%d" % won.index(True)


def test_it_passes_the_check_and_the_check_leaves_nothing(store: Store) -> None:
    check_store(lambda: store, races=3)
    probe(store, "jobs/")
    assert store.list("") == []


def test_it_says_what_it_is(store: Store) -> None:
    assert store.describe()
    assert "object at 0x" not in repr(store)


# -- weak stores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weakness", sorted(WEAK))
def test_a_weak_store_is_found_out(weakness: str) -> None:
    report = check(Weak(weakness), races=20)
    assert not report.ok
    assert {result.name for result in report.results if not result.ok} >= WEAK[weakness]


def test_a_probe_refuses_a_store_that_creates_twice() -> None:
    with pytest.raises(StoreTooWeak):
        probe(Weak("conditions are ignored"))
    for weakness in sorted(WEAK.keys() - {"conditions are ignored"}):
        probe(Weak(weakness))


class Away:
    """A store that cannot be reached."""

    def _fail(self, *_: object) -> StoreUnavailable:
        return StoreUnavailable("away://", "key", "no connection")

    def create(self, key: str, data: bytes) -> bool:
        raise self._fail(key, data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        raise self._fail(key, start, length)

    def list(self, prefix: str) -> list[Listed]:
        raise self._fail(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        raise self._fail(keys)

    def describe(self) -> str:
        return "away://"


def test_a_store_of_one_s_own_is_taken_as_it_is() -> None:
    away = Away()
    assert open_store(away) is away
    report = check(away, races=1)
    assert not report.ok
    assert all("no connection" in result.detail for result in report.results)


# -- what goes wrong -------------------------------------------------------------------------------------------------

REQUESTS: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.create("jobs/1", b"data"),
    "read": lambda store: store.read("jobs/1"),
    "a part": lambda store: store.read("jobs/1", 1, 2),
    "list": lambda store: store.list("jobs/"),
    "delete": lambda store: store.delete(["jobs/1", "jobs/2"]),
}


@pytest.mark.parametrize("request_", sorted(REQUESTS))
def test_no_secret_is_in_what_a_refused_request_raises(s3: Seaweed, request_: str) -> None:
    wrong = "Wr0ngSecretThatMustNotBeSeen"
    store = s3.store("refused", secret_access_key=wrong)
    with pytest.raises(StoreUnavailable) as caught:
        REQUESTS[request_](store)
    error = caught.value
    told = "".join((str(error), repr(error), repr(error.__dict__), repr(store), store.describe()))
    assert error.reason.endswith("403 SignatureDoesNotMatch")
    assert (error.__cause__, error.__context__) == (None, None)
    for secret in (wrong, s3.access_key, s3.secret, "Signature="):
        assert secret not in told
        assert secret.encode() not in pickle.dumps(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.store, again.key, again.reason) == (str(error), error.store, error.key, error.reason)


def test_a_part_is_one_request_unless_it_begins_at_the_end(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = s3.store("parts"), []
    head = obstore.head
    monkeypatch.setattr(obstore, "head", lambda inner, key: asked.append(key) or head(inner, key))  # type: ignore[func-returns-value]
    assert store.create("jobs/1", b"data")
    assert [store.read("jobs/1", *which) for which in ((1, 2), (1, 9), (2, None), (3, 1))] == [
        b"at",
        b"ata",
        b"ta",
        b"a",
    ]
    assert store.read("jobs/2", 1, 2) is None
    assert not asked
    assert [store.read("jobs/1", *which) for which in ((4, 1), (4, None), (9, 2), (1, 0))] == [b""] * 4
    assert len(asked) == 4


def test_a_store_of_objects_is_not_pickled(s3: Seaweed) -> None:
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(s3.store("pickled"))


@pytest.mark.parametrize("request_", sorted(REQUESTS))
def test_nobody_listens(request_: str) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "s", "region": "r"}
    store = open_store("s3://bucket", options={**options, "client_options": {"allow_http": True}}, request_timeout=0.5)
    with pytest.raises(StoreUnavailable, match=r"connection refused|no connection|no answer in time"):
        REQUESTS[request_](store)


def test_an_endpoint_without_tls_has_to_be_allowed() -> None:
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "s", "region": "r"}
    store = open_store("s3://bucket", options=options, request_timeout=0.5)
    with pytest.raises(StoreUnavailable, match="without TLS needs client_options"):
        store.read("key")


def test_a_forked_child_makes_no_request() -> None:
    """Its runtime has no threads in the child: a request there would wait for ever."""
    store = open_store(obstore.store.MemoryStore())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen = []
        for attempt in (lambda: store.read("key"), lambda: ObjectStore(obstore.store.MemoryStore(), "new")):
            try:
                attempt()
                seen.append("nothing")
            except ForkedQueue:
                seen.append("ForkedQueue")
        os.write(writing, " ".join(seen).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        assert told.read() == b"ForkedQueue ForkedQueue"
    os.waitpid(child, 0)


def test_importing_it_loads_no_client(script: Callable[..., str]) -> None:
    told = script("import sys, kestrelpy.ship; print([name for name in sys.modules if 'obstore' in name])")
    assert told.strip() == "[]"
    assert sys.modules["obstore"]


@takes_long
@pytest.mark.usefixtures("s3")  # or it is left out
def test_a_server_whose_port_was_taken_meanwhile_takes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports are looked for before the server is started, and another one may be started beside it."""
    taken = socket.create_server((LOOPBACK, 0))
    find, first = seaweed.free_ports, [taken.getsockname()[1]]
    monkeypatch.setattr(seaweed, "free_ports", lambda count: [*first, *find(count)[len(first) :]])
    begin = Seaweed.start

    def start(server: Seaweed) -> None:
        monkeypatch.setattr(seaweed, "free_ports", find)
        begin(server)

    monkeypatch.setattr(Seaweed, "start", start)
    with taken, seaweed.seaweed() as server:
        assert server.store("here").create("key", b"data")
