"""``kestrelpy serve beanstalk --ship``: jobs that outlive their machine, with real server processes."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import greenstalk
import pytest

from kestrelpy.cli import main, serving
from kestrelpy.clock import SystemClock
from kestrelpy.server import BeanstalkServer, serve_in_thread
from kestrelpy.ship import Fenced, NoSuchQueue, Ship, StoreUnavailable, opened, read_log, restore, status
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.server.harness import Client
from tests.server.test_serve_command import SERVE, Process, running
from tests.support.budget import takes_long
from tests.support.patience import PATIENCE, until

FAR = 1 << 30
"""So far the ids of a new owner's jobs are above those of the one before."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@contextlib.contextmanager
def shipping(folder: Path, url: str, *options: str, command: Sequence[str] = SERVE) -> Iterator[Process]:
    with running("-b", str(folder), "-p", "0", "--ship", url, *options, command=command) as process:
        yield process


def put_until_the_end(address: Any, name: str, put: dict[int, str]) -> None:
    """Put jobs until the server is gone; ``put`` gets those that it has acknowledged."""
    with contextlib.suppress(OSError, greenstalk.Error), greenstalk.Client(address) as client:
        for number in range(1_000_000):
            body = f"{name} {number}"
            put[client.put(body)] = body


@takes_long
def test_a_burnt_machine_takes_no_acknowledged_job(tmp_path: Path, url: str) -> None:
    put: dict[int, str] = {}
    deleted: set[int] = set()
    with shipping(tmp_path / "here", url, "--ship-acks", "shipped") as one:
        threads = [threading.Thread(target=put_until_the_end, args=(one.address, f"c{n}", put)) for n in range(8)]
        for thread in threads:
            thread.start()
        with greenstalk.Client(one.address) as client:
            for _ in range(10):
                job = client.reserve(int(PATIENCE))
                client.delete(job)
                deleted.add(job.id)
            client.reserve(int(PATIENCE))  # the server dies with this one reserved
            one.process.kill()
        for thread in threads:
            thread.join()
    shutil.rmtree(tmp_path / "here")
    assert len(put) >= 20
    restore(url, "work", tmp_path / "there")
    left = {job_id: body for job_id, body in put.items() if job_id not in deleted}
    found: dict[int, str] = {}
    with shipping(tmp_path / "there", url, "--ship-acks", "shipped") as two:
        with greenstalk.Client(two.address) as client:
            assert client.put("new") > FAR
            while len(found) < 1_000_000:
                try:
                    job = client.reserve(0)
                except greenstalk.TimedOutError:
                    break
                assert isinstance(job.body, str)
                found[job.id] = job.body
                client.bury(job)
        assert two.end() == 0
    assert left.items() <= found.items()
    assert not deleted & found.keys()


def test_one_wait_for_the_store_is_enough_for_all_clients(tmp_path: Path) -> None:
    class Counted(MemoryStore):
        slots = 0

        def create(self, key: str, data: bytes) -> bool:
            all_sent.wait(PATIENCE)
            self.slots += "/log/" in key
            return super().create(key, data)

    all_sent = threading.Event()
    all_sent.set()
    store = Counted()
    with serve_in_thread(tmp_path, ship=Ship(store, acks="shipped", interval=0.2)) as server:
        clients = [Client(server.addresses[0]) for _ in range(30)]
        before = store.slots
        all_sent.clear()
        for client in clients:
            client.send(b"put 0 0 60 1\r\nx\r\n" * 3)
        all_sent.set()
        for client in clients:
            assert [client.line()[:9] for _ in range(3)] == [b"INSERTED "] * 3
        assert store.slots - before <= 6, "far less than one for each of 90 puts"
        for client in clients:
            client.hang_up()


def test_a_reply_means_that_the_change_is_in_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    with serve_in_thread(tmp_path / "here", ship=Ship(store, acks="shipped", interval=0)) as server:
        client = Client(server.addresses[0])
        for number, (said, reply) in enumerate(
            [
                (b"put 5 0 60 1\r\na\r\n", b"INSERTED 1\r\n"),
                (b"put 6 0 60 1\r\nb\r\n", b"INSERTED 2\r\n"),
                (b"reserve\r\ndelete 1\r\n", b"RESERVED 1 1\r\na\r\nDELETED\r\n"),
                (b"reserve\r\nbury 2 7\r\n", b"RESERVED 2 1\r\nb\r\nBURIED\r\n"),
            ]
        ):
            client.ask(said, reply)
            restore(store, "work", tmp_path / str(number))
        client.hang_up()
    seen = []
    for number in range(4):
        with WorkQueue(tmp_path / str(number), ship=False) as queue:
            seen.append([(job.id, job.state) for job in queue.jobs()])
    assert seen == [[(1, "ready")], [(1, "ready"), (2, "ready")], [(2, "ready")], [(2, "buried")]]


class Away(MemoryStore):
    """A store that can be sent away."""

    is_away = False

    def create(self, key: str, data: bytes) -> bool:
        if self.is_away:
            raise StoreUnavailable("the store", key, "it is away")
        return super().create(key, data)


def wait_for_the_store(server: BeanstalkServer, seconds: float) -> None:
    """From here on, a reply waits for the store for so long, and not for ``ack_timeout``."""
    journal = server.queue._core.journal
    assert journal is not None
    acks = journal.queue._syncer.acks
    assert acks._absent is not None
    acks._absent = acks._absent._replace(patience=seconds)


def test_a_store_that_is_away_ends_no_server(tmp_path: Path) -> None:
    store = Away()
    options = Ship(store, acks="shipped", interval=0, ack_timeout=PATIENCE)
    with serve_in_thread(tmp_path, ship=options) as server:
        client, waiting = Client(server.addresses[0]), Client(server.addresses[0])
        client.ask(b"put 0 0 60 1\r\na\r\n", b"INSERTED 1\r\n")
        waiting.ask(b"watch other\r\nignore default\r\n", b"WATCHING 2\r\nWATCHING 1\r\n")
        waiting.send(b"reserve\r\n")
        store.is_away = True
        wait_for_the_store(server, 0.2)
        client.ask(b"put 0 0 60 1\r\nb\r\n", b"INTERNAL_ERROR\r\n")
        client.ask(b"use other\r\n", b"USING other\r\n")
        wait_for_the_store(server, PATIENCE)
        store.is_away = False
        client.ask(b"put 0 0 60 1\r\nc\r\n", b"INSERTED 3\r\n")
        waiting.hear(b"RESERVED 3 1\r\nc\r\n")
        client.ask(b"peek 2\r\n", b"FOUND 2 1\r\nb\r\n")
        for each in (client, waiting):
            each.hang_up()


SILENT = """
import sys
from kestrelpy.cli import main
from kestrelpy.work import WorkQueue
WorkQueue.__init__.__kwdefaults__["checkpoint_interval"] = 1e6
sys.exit(main())
"""
"""A server that writes and ships nothing but what its clients change: it would find out by itself who has its jobs."""


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_a_fenced_server_ends(tmp_path: Path, url: str, acks: str) -> None:
    command = (sys.executable, "-c", SILENT, "serve", "beanstalk")
    with shipping(tmp_path / "here", url, "--ship-acks", acks, command=command) as one:
        client, waiting = one.client(), one.client()
        client.ask(b"put 0 0 60 1\r\na\r\n", b"INSERTED 1\r\n")
        waiting.ask(b"watch other\r\nignore default\r\n", b"WATCHING 2\r\nWATCHING 1\r\n")
        waiting.send(b"reserve\r\n")
        until_shipped(url)
        restore(url, "work", tmp_path / "there")
        with WorkQueue(tmp_path / "there", ship=url) as taken:
            assert taken.peek(1).body == b"a"
            client.send(b"put 0 0 60 1\r\nb\r\n")
            reply = client.line()
            assert reply == b"INTERNAL_ERROR\r\n" if acks == "shipped" else reply.startswith(b"INSERTED ")
            waiting.hear(b"INTERNAL_ERROR\r\n")
            for each in (client, waiting):
                each.hear_the_end()
            _, said = one.process.communicate(timeout=PATIENCE)
            assert one.process.returncode == serving.FENCED == 11
            lines = said.decode().splitlines()
            assert "has another owner" in lines[-1]
            assert lines[-1].startswith("kestrelpy serve: ")
            assert "Traceback" not in said.decode()
            assert [job.body for job in taken.jobs()] == [b"a"]


def until_shipped(url: str) -> None:
    """Wait until the job is in the store, and where its reader is, in a slot after it."""

    def is_there() -> bool:
        with contextlib.suppress(NoSuchQueue):
            return status(url, "work").last_id >= 1 and [*read_log(url, "work")][-1].first_id == 0
        return False

    until(is_there)


def test_a_server_hands_its_jobs_over(tmp_path: Path, url: str) -> None:
    with shipping(tmp_path / "here", url, "--ship-lease", "60") as one:
        client = one.client()
        client.ask(b"put 0 0 60 1\r\na\r\n", b"INSERTED 1\r\n")
        one.process.send_signal(signal.SIGUSR2)
        client.hear_the_end()
        _, said = one.process.communicate(timeout=PATIENCE)
        assert one.process.returncode == 0
        assert "stopped by SIGUSR2: handing the jobs over" in said.decode()
    assert [slot.kind for slot in read_log(url, "work")][-1] == "close"
    restore(url, "work", tmp_path / "there")
    began = SystemClock.elapsed()
    with shipping(tmp_path / "there", url) as two:
        two.client().ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    assert SystemClock.elapsed() - began < 30  # it did not wait for the lease


class Pair:
    """Two servers: the one that owns the jobs listens, and the other one follows."""

    def __init__(self, folder: Path, url: str, acks: str) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.places = {"a": one.getsockname(), "b": other.getsockname()}
        self._options = ("--ship", url, "--ship-acks", acks, "--ship-lease", "5")
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *more: str) -> None:
        with open(self._folder / f"{name}.log", "ab") as log:
            listen = f"127.0.0.1:{self.places[name][1]}"
            command = (*SERVE, "-b", str(self._folder / name), "--listen", listen, *self._options, *more)
            self.servers[name] = subprocess.Popen(command, stderr=log)

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def change_places(self, owner: str, other: str, how: signal.Signals, put: list[dict[int, str]]) -> None:
        """End the owner while clients put; the other one goes on, and the old one follows."""
        until(lambda: "standby, following" in self.said(other).rpartition("listening at")[2])
        until(lambda: all(len(each) > 5 for each in put))
        starts = self.said(other).count("listening at")
        self.servers[owner].send_signal(how)
        self.servers[owner].wait()
        before = [len(each) for each in put]
        until(lambda: self.said(other).count("listening at") > starts)
        self.start(owner, "--standby")
        until(lambda: all(len(each) > count + 5 for each, count in zip(put, before, strict=True)))

    def end(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait()


def put_through_all(places: list[Any], name: str, put: dict[int, str], ending: threading.Event) -> None:
    """Put jobs, and connect to the other server when one is gone, until ``ending``."""
    number = 0
    for address in itertools.cycle(places):
        if ending.is_set():
            return
        with contextlib.suppress(OSError, greenstalk.Error), greenstalk.Client(address) as client:
            while not ending.is_set():
                number += 1
                put[client.put(f"{name} {number}")] = f"{name} {number}"
        ending.wait(0.05)


@takes_long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGUSR2])
def test_clients_of_two_servers_only_connect_again(tmp_path: Path, url: str, how: signal.Signals) -> None:
    pair, ending = Pair(tmp_path, url, "shipped"), threading.Event()
    put: list[dict[int, str]] = [{} for _ in range(4)]
    clients = [
        threading.Thread(target=put_through_all, args=([*pair.places.values()], f"c{n}", each, ending))
        for n, each in enumerate(put)
    ]
    try:
        pair.start("a")
        until(lambda: "listening at" in pair.said("a"))
        pair.start("b", "--standby")
        for client in clients:
            client.start()
        for owner, other in (("a", "b"), ("b", "a")):
            pair.change_places(owner, other, how, put)
        ending.set()
        for client in clients:
            client.join()
        jobs = {job_id: body for each in put for job_id, body in each.items()}
        assert len(jobs) == sum(map(len, put)), "an id was given to two jobs"
        found: dict[int, str] = {}
        with greenstalk.Client(pair.places["a"]) as reader, contextlib.suppress(greenstalk.TimedOutError):
            while True:
                job = reader.reserve(0)
                assert isinstance(job.body, str)
                assert job.id not in found
                found[job.id] = job.body
                reader.bury(job)
        assert jobs.items() <= found.items()
    finally:
        ending.set()
        pair.end()


def test_a_standby_that_is_ended_before_its_time(tmp_path: Path, url: str) -> None:
    with WorkQueue(tmp_path / "here", ship=url) as queue:
        queue.put(b"a")
        standby = subprocess.Popen(
            (*SERVE, "-b", str(tmp_path / "there"), "-p", "0", "--ship", url, "--standby"), stderr=subprocess.PIPE
        )
        assert standby.stderr is not None
        while b"standby, following" not in (said := standby.stderr.readline()):
            assert said
        for number in (signal.SIGUSR2, signal.SIGUSR1):  # for the one that has the jobs
            standby.send_signal(number)
            assert standby.stderr.readline().decode() == (
                f"kestrelpy serve: {number.name} changes nothing: this is a standby, and has no jobs yet\n"
            )
        standby.terminate()
        _, said = standby.communicate(timeout=PATIENCE)
        assert (standby.returncode, said) == (0, b"kestrelpy serve: stopped by SIGTERM\n")


def test_a_server_is_not_started_beside_one_with_a_lease(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = 3 * PATIENCE  # no owner is so late that it loses this
    monkeypatch.setattr(opened, "PATIENCE", 0.5 - lease)  # half a second is waited, and not the whole lease
    with WorkQueue(tmp_path / "here", ship=Ship(url, lease=lease, owner="the other one")) as queue:
        queue.put(b"a")
        restore(url, "work", tmp_path / "there")
        assert main(["serve", "beanstalk", "-b", str(tmp_path / "there"), "-p", "0", "--ship", url]) == 11
        assert "the other one" in capfd.readouterr().err
        queue.put(b"b")


def test_a_server_whose_jobs_another_one_has_does_not_start(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkQueue(tmp_path / "here", ship=url) as queue:
        queue.put(b"a")
    restore(url, "work", tmp_path / "there")
    WorkQueue(tmp_path / "there", ship=url).close()
    assert main(["serve", "beanstalk", "-b", str(tmp_path / "here"), "-p", "0", "--ship", url]) == 11
    said = capfd.readouterr().err
    assert "has another owner" in said
    assert said.count("\n") == 1
    assert main(["serve", "beanstalk", "-b", str(tmp_path / "here"), "-p", "0"]) == 1
    assert f"these jobs are shipped to {url}: use --ship" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ship", "file:///x"), "--ship goes with --dir"),
        (("-b", "DIR", "--ship-acks", "shipped"), "go with --ship"),
        (("-b", "DIR", "--ship-option", "region=here"), "go with --ship"),
        (("-b", "DIR", "--ship-lease", "15"), "go with --ship"),
        (("-b", "DIR", "--standby"), "--standby goes with --ship"),
        (("-b", "DIR", "--ship", "file:///x", "--ship-lease", "1"), "--ship-lease: lease must be 5"),
        (("-b", "DIR", "--ship", "here"), "its scheme must be"),
        (("-b", "DIR", "--ship", "file:///x", "--ship-acks", "never"), "invalid choice"),
        (("-b", "DIR", "--ship", "s3://b/x", "--ship-option", "secret_access_key=open-sesame"), "environment"),
    ],
)
def test_wrong_use_of_a_store(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    exit_status = main(["serve", "beanstalk", "-p", "0", *(str(tmp_path) if one == "DIR" else one for one in options)])
    heard = capfd.readouterr().err
    assert (exit_status, heard.count("\n")) == (2, 1)
    assert said in heard
    assert "open-sesame" not in heard


def test_options_of_the_store_reach_the_queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("kestrelpy.server.serve", lambda _, **options: seen.update(options))
    words = ["--ship", "s3://b/x", "--ship-acks", "shipped", "--ship-option", "client_options.allow_http=true"]
    assert main(["serve", "beanstalk", "-b", str(tmp_path), "-p", "0", *words]) == 0
    assert seen["ship"] == Ship("s3://b/x", acks="shipped", options={"client_options": {"allow_http": True}})


def test_a_queue_that_groups_its_commits_waits_when_it_is_told_to(tmp_path: Path) -> None:
    store = Away()
    with WorkQueue(tmp_path, ship=Ship(store, acks="shipped", interval=0), group_commit=True) as queue:
        store.is_away = True
        queue.put(b"a")  # returns
        store.is_away = False
        queue.sync()
        restore(store, "work", tmp_path / "there")
    with WorkQueue(tmp_path / "there", ship=False) as queue:
        assert queue.peek(1).body == b"a"
    with WorkQueue(tmp_path, ship=Ship(store, acks="shipped", interval=0), group_commit=True) as queue:
        queue.put(b"b")
        queue.sync()
        restore(store, "work", tmp_path / "elsewhere")
        with WorkQueue(tmp_path / "elsewhere", ship=Ship(store)):
            queue.put(b"c")
            with pytest.raises(Fenced):
                queue.sync()
