"""The commands of ``kestrelpy.ship``, on a store in a folder; the store's options on a real ``s3`` server."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import obstore
import pytest

from kestrelpy import JournaledQueue, QueueLocked
from kestrelpy.cli import _ship_options, main, shipping
from kestrelpy.cli._ship_options import store_options
from kestrelpy.ship import Ship, StoreUnavailable, detach, open_store, read_log, shipped_to
from kestrelpy.ship.outside_reader import OutsideReader, encode_outside, outside_key
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.cli.programs import Run, refused
from tests.support.seaweed import BUCKET, Seaweed


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def shipped(tmp_path: Path, url: str) -> Path:
    """A queue of three items, of which one is read, in the folder ``here``, and in the store."""
    with JournaledQueue(tmp_path / "here", "jobs", ship=Ship(url, owner="me")) as queue:
        for data in (b"one", b"two", b"three"):
            queue.put(data)
        queue.commit(queue.get())
    return tmp_path / "here"


def lines_of(done: Any) -> list[str]:
    assert (done.status, done.err) == (0, ""), done
    return str(done.out.decode()).splitlines()


# -- restore ---------------------------------------------------------------------------------------------------------


def test_a_queue_is_restored(run: Run, shipped: Path, url: str, tmp_path: Path) -> None:
    shutil.rmtree(shipped)
    there = tmp_path / "there"
    said = lines_of(run("restore", url, "jobs", there))
    assert said[0] == "queue    jobs"
    assert "items    3, the last id is 3" in said
    assert "readers  (default)" in said
    assert run("get", there, "jobs").out == b"two\nthree\n"
    refused(run("restore", url, "jobs", there), 1, "restore into another folder")
    made = json.loads(run("restore", url, "jobs", tmp_path / "more", "--all", "--json").out)
    assert (made["queue"], made["last_id"], made["readers"]) == ("jobs", 3, [""])


def test_a_queue_is_restored_lazily(run: Run, url: str, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "here", "jobs", segment_bytes=4096, ship=url) as queue:
        for number in range(100):
            queue.put(b"%d." % number * 50)
    refused(run("restore", url, "jobs", tmp_path / "there", "--lazy", "--slot", "1"), 2, "--lazy goes with the end")
    assert "items    100, the last id is 100" in lines_of(run("restore", url, "jobs", tmp_path / "there", "--lazy"))
    refused(run("get", tmp_path / "there", "jobs"), 1, "the rest is fetched")
    with JournaledQueue(tmp_path / "there", "jobs", ship=url) as queue:
        assert [queue.get(timeout=0).data for _ in range(100)] == [b"%d." % number * 50 for number in range(100)]


def test_a_queue_is_restored_to_a_moment(run: Run, tmp_path: Path, url: str) -> None:
    with JournaledQueue(tmp_path / "here", "jobs", ship=Ship(url, interval=0)) as queue:
        assert queue.shipping is not None
        queue.put(b"one")
        slot = queue.shipping.flush(10)
        queue.put(b"two")
    times = {each.number: each.written_ms for each in read_log(url, "jobs")}
    assert run("restore", url, "jobs", tmp_path / "1", "--slot", slot).status == 0
    assert run("get", tmp_path / "1", "jobs").out == b"one\n"
    assert run("restore", url, "jobs", tmp_path / "2", "--at", max(times.values())).status == 0
    assert run("get", tmp_path / "2", "jobs").out == b"one\ntwo\n"
    assert run("restore", url, "jobs", tmp_path / "3", "--at", "2100-01-01T00:00:00+02:00").status == 0
    refused(run("restore", url, "jobs", tmp_path / "4", "--at", "2001-01-01T00:00"), 1, "begins later")
    refused(run("restore", url, "jobs", tmp_path / "4", "--slot", 99), 1, "ends at slot")
    assert not (tmp_path / "4").exists()


def test_what_is_not_there_is_not_restored(run: Run, url: str, tmp_path: Path) -> None:
    refused(run("restore", url, "jobs", tmp_path / "there"), 1, "not there")
    refused(run("restore", url, "a/b", tmp_path / "there"), 2, "invalid name")
    assert not (tmp_path / "there").exists()


def test_a_restore_shows_how_far_it_is_on_a_terminal(
    run: Run, shipped: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(_ship_options.sys, "stderr", shown)
    assert main(["restore", url, "jobs", str(tmp_path / "there")]) == 0
    assert "100%  restored" in shown.getvalue()
    assert shown.getvalue().endswith("\r")


@pytest.mark.parametrize(
    "words",
    [
        ("restore", "URL", "jobs", "x", "--at", "soon"),
        ("restore", "URL", "jobs", "x", "--at", "1", "--slot", "1"),
        ("restore", "URL", "jobs", "x", "--slot", "0"),
        ("restore", "URL", "jobs"),
        ("restore", "http://here", "jobs", "x"),
        ("ship",),
        ("ship", "check"),
        ("ship", "check", "nowhere"),
        ("ship", "check", "file:///x", "--option", "region=here"),
        ("ship", "status", "s3://bucket?sig=secret"),
        ("ship", "log", "URL", "jobs", "--from", "-1"),
        ("ship", "verify", "URL"),
        ("ship", "detach", ".", "jobs", "--json"),
    ],
)
def test_wrong_use_of_a_store(run: Run, url: str, words: tuple[str, ...]) -> None:
    done = run(*(url if word == "URL" else word for word in words))
    refused(done, 2)
    assert "sig=secret" not in done.err


# -- looking ---------------------------------------------------------------------------------------------------------


def test_a_store_is_checked(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_of(run("ship", "check", url))
    assert said[0] == "ok      a second create is refused"
    assert said[-1] == "the store is good enough"

    class Weak(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            super().create(key, data)
            return True

    weak = Weak()
    monkeypatch.setattr("kestrelpy.ship.checking.open_store", lambda store, options: weak)
    done = run("ship", "check", url)
    assert done.status == 1
    assert b"FAILED  a second create is refused: the store says that it created what was there" in done.out
    assert b"NOT GOOD ENOUGH" in done.out
    report = json.loads(run("ship", "check", url, "--json").out)
    assert not report["ok"]
    assert not report["results"][0]["ok"]


def test_queues_in_a_store_are_shown(run: Run, shipped: Path, url: str, tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "here", "other", ship=url) as queue:
        queue.put(b"x")
    heading, jobs, other = lines_of(run("ship", "status", url))
    assert heading.split()[:3] == ["queue", "slot", "epoch"]
    assert jobs.split()[0] == "jobs"
    assert jobs.endswith("me (has left)")
    assert other.split()[0] == "other"
    found = [json.loads(line) for line in lines_of(run("ship", "status", url, "--json"))]
    assert [(each["queue"], each["last_id"]) for each in found] == [("jobs", 3), ("other", 1)]
    said = lines_of(run("ship", "status", url, "jobs"))
    assert "owner    me (has left), epoch 1" in said
    assert "readers  (default) at 1" in said
    found = [json.loads(run("ship", "status", url, "jobs", "--json").out)]
    assert (found[0]["readers"], found[0]["closed"]) == ({"": 1}, True)
    refused(run("ship", "status", url, "nobody"), 1, "not there")
    (tmp_path / "store/jobs/log/0000000000000001").write_bytes(b"damaged")
    done = run("ship", "status", url)
    assert done.status == 1
    assert b"damaged: jobs/log/0000000000000001" in done.out
    assert b"other" in done.out


def test_a_store_that_is_away_is_not_damaged(
    run: Run, shipped: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> Any:
        raise StoreUnavailable("the store", "jobs/log/", "it is away")

    monkeypatch.setattr("kestrelpy.ship.status", away)
    done = run("ship", "status", url)
    refused(done, 1, "it is away")
    assert done.out == b""


def test_an_empty_store_has_nothing_to_show(run: Run, url: str) -> None:
    assert run("ship", "status", url) == (1, b"", "")


def test_a_log_is_shown_slot_by_slot(run: Run, shipped: Path, url: str, tmp_path: Path) -> None:
    fence, *middle, close = lines_of(run("ship", "log", url, "jobs"))
    assert fence.split()[:3] == ["1", "fence", "1"]
    assert fence.endswith("from 1  by me")
    assert close.split()[1] == "close"
    assert any(line.split()[1] in ("data", "seal") and "1-3" in line for line in middle)
    assert "(default)=1" in "".join([*middle, close])
    found = [json.loads(line) for line in lines_of(run("ship", "log", url, "jobs", "--json", "--from", 2))]
    assert [each["number"] for each in found] == list(range(2, 2 + len(middle) + 1))
    assert found[-1]["kind"] == "close"
    refused(run("ship", "log", url, "jobs", "--from", 99), 1, "ends at slot")
    refused(run("ship", "log", url, "nobody"), 1, "not there")
    (tmp_path / "store/jobs/log/0000000000000002").write_bytes(b"damaged")
    done = run("ship", "log", url, "jobs")
    assert (done.status, done.out.decode().splitlines()) == (1, [fence])
    assert "jobs/log/0000000000000002" in done.err


def test_a_queue_in_a_store_is_verified(run: Run, shipped: Path, url: str, tmp_path: Path) -> None:
    said = lines_of(run("ship", "verify", url, "jobs"))
    assert said[-1] == "no damage"
    assert json.loads(run("ship", "verify", url, "jobs", "--json").out)["ok"]
    segment = next((tmp_path / "store/jobs/seg").iterdir())
    segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    done = run("ship", "verify", url, "jobs")
    assert done.status == 1
    assert done.out.decode().splitlines()[-1].startswith("DAMAGED in ")
    report = json.loads(run("ship", "verify", url, "jobs", "--json").out)
    assert not report["ok"]
    assert "seg/" in report["problems"][0]
    refused(run("ship", "verify", url, "nobody"), 1, "not there")


def test_slots_that_are_kept_no_more_are_left_out(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        assert queue.shipping is not None
        for number in range(4):
            queue.put(b"%d" % number)
            queue.shipping.flush(10)
    numbers = [each.number for each in read_log(store, "jobs")]
    store.delete(["jobs/log/0000000000000003"])
    assert [each.number for each in read_log(store, "jobs")] == [number for number in numbers if number != 3]


# -- changing --------------------------------------------------------------------------------------------------------


def test_a_queue_is_shipped_once(run: Run, url: str, tmp_path: Path) -> None:
    run("put", tmp_path / "q", "jobs", stdin=b"one\ntwo\n")
    said = lines_of(run("ship", "once", tmp_path / "q", "jobs", url + "/"))
    assert said == [f"shipped jobs to {url}, up to id 2: slot 2, epoch 1"]
    assert shipped_to(tmp_path / "q", "jobs") == url
    refused(run("put", tmp_path / "q", "jobs", stdin=b"three"), 1, "is shipped to", url)
    again = json.loads(run("ship", "once", tmp_path / "q", "jobs", url, "--json").out)
    assert (again["epoch"], again["last_id"]) == (2, 2)
    refused(run("ship", "once", tmp_path / "q", "jobs", url + "2"), 1, "detach it first")
    assert run("restore", url, "jobs", tmp_path / "r").status == 0
    assert run("get", tmp_path / "r", "jobs").out == b"one\ntwo\n"
    refused(run("ship", "once", tmp_path / "q", "nobody", url), 1, "no queue")
    with JournaledQueue(tmp_path / "q", "jobs", ship=url):
        refused(run("ship", "once", tmp_path / "q", "jobs", url), 1, "held by")


def test_a_work_queue_is_shipped_once(run: Run, url: str, tmp_path: Path) -> None:
    with WorkQueue(tmp_path / "q", "work") as work:
        work.put(b"job")
    assert run("ship", "once", tmp_path / "q", "work", url).status == 0
    assert run("restore", url, "work", tmp_path / "r").status == 0
    with WorkQueue(tmp_path / "r", "work", ship=url) as work:
        assert work.peek_ready().body == b"job"


def test_shipping_once_gives_up_when_nothing_comes(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        def flush(self, timeout: float) -> int:
            from kestrelpy.ship import NotShipped

            raise NotShipped(1, 2)

        def status(self) -> Any:
            return queue.shipping.status() if queue.shipping is not None else None

    monkeypatch.setattr(shipping, "STALL_SECONDS", -1.0)
    with JournaledQueue(tmp_path, "jobs", ship=url) as queue, pytest.raises(Exception, match="nothing comes to"):
        shipping._shipped_whole(Stuck())  # type: ignore[arg-type]


def test_a_queue_is_detached_while_its_store_is_away(
    run: Run, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> Any:
        raise StoreUnavailable("the store", "key", "it is away")

    monkeypatch.setattr("kestrelpy.ship.opening.FolderStore", away)
    before = {path.name for path in shipped.iterdir()}
    assert run("ship", "detach", shipped, "jobs") == (0, b"", "")
    assert before - {path.name for path in shipped.iterdir()} == {"jobs.ship"}
    assert shipped_to(shipped, "jobs") is None
    refused(run("ship", "detach", shipped, "jobs"), 1, "is not shipped")
    refused(run("ship", "detach", shipped, "nobody"), 1, "no queue")
    refused(run("ship", "detach", tmp_path / "nowhere", "jobs"), 1, "nowhere")
    assert not (tmp_path / "nowhere").exists()
    assert run("get", shipped, "jobs").out == b"two\nthree\n"


def test_a_queue_is_not_detached_while_it_is_open(shipped: Path, url: str) -> None:
    with JournaledQueue(shipped, "jobs", ship=url):
        with pytest.raises(QueueLocked):
            detach(shipped, "jobs")
        assert shipped_to(shipped, "jobs") == url
    (shipped / "jobs.ship").write_bytes(b"damaged")
    assert detach(shipped, "jobs")
    JournaledQueue(shipped, "jobs").close()


def test_a_reader_outside_is_dropped(run: Run, shipped: Path, url: str) -> None:
    store = open_store(url)
    commit = encode_outside(OutsideReader(bytes(16), bytes(16), 1))
    mine = [f"jobs/{outside_key('spark', number)}" for number in (1, 2)]
    others = [f"jobs/{outside_key('spark2', 1)}", "jobs/reader/spark/else", f"other/{outside_key('spark', 1)}"]
    for key in (*mine, *others):
        store.create(key, commit)
    assert run("ship", "drop-reader", url, "jobs", "spark") == (0, b"", "")
    assert [store.read(key) is None for key in (*mine, *others)] == [True, True, False, False, False]
    refused(run("ship", "drop-reader", url, "jobs", "spark"), 1, "no reader outside named 'spark'")
    refused(run("ship", "drop-reader", url, "jobs", "a/b"), 2, "invalid name")


# -- the store's options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "access_key_id",
        "AWS_SECRET_ACCESS_KEY",
        "session_token",
        "password",
        "sas_signature",
        "client_options.Authorization",
    ],
)
@pytest.mark.parametrize("command", [("ship", "status", "s3://bucket"), ("restore", "s3://bucket", "jobs", "x")])
def test_a_secret_is_refused_and_not_shown(run: Run, command: tuple[str, ...], name: str) -> None:
    done = run(*command, "--option", f"{name}=open-sesame")
    refused(done, 2, name, "environment")
    assert "open-sesame" not in done.err


def test_options_that_are_none(run: Run) -> None:
    done = run("ship", "status", "s3://bucket", "--option", "open-sesame")
    refused(done, 2, "name=value")
    assert "open-sesame" not in done.err
    done = run("ship", "status", "s3://bucket", "--option", "endpoint=http://me:open-sesame@host")
    refused(done, 2, "user part")
    assert "open-sesame" not in done.err
    refused(run("ship", "status", "s3://bucket", "--option", "nonsense=1"), 2, "nonsense")


def test_options_of_the_connection_are_by_themselves() -> None:
    given = [("region", "a"), ("client_options.allow_http", "true"), ("client_options.user_agent", "b")]
    assert store_options(given) == {"region": "a", "client_options": {"allow_http": True, "user_agent": "b"}}
    assert store_options([("allow_http", "true")]) == {"client_options": {"allow_http": True}}
    assert store_options([]) is None


def test_options_of_the_connection_are_those_of_obstore() -> None:
    """Among those of the store, one of them is a panic of its client: pages of text on standard error."""
    page = (Path(obstore.__file__).parent / "_store" / "_client.pyi").read_text()
    names = re.findall(r"^    (\w+): ", page[page.index("class ClientConfig") :], re.MULTILINE)
    assert set(names) - {"default_headers"} == _ship_options._CONNECTION


def test_a_store_with_options(
    run: Run,
    s3: Seaweed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    words = ("--option", f"endpoint={s3.endpoint}", "--option", "allow_http=true")
    url = f"s3://{BUCKET}/commands"
    run("put", tmp_path / "q", "jobs", stdin=b"one\n")
    assert run("ship", "once", tmp_path / "q", "jobs", url, *words).status == 0
    assert run("ship", "verify", url, "jobs", *words).status == 0
    assert run("restore", url, "jobs", tmp_path / "r", *words).status == 0
    assert run("get", tmp_path / "r", "jobs").out == b"one\n"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    done = run("ship", "status", url, "jobs", *words)
    refused(done, 1, "403")
    assert "another" not in done.err
