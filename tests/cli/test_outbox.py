"""``kestrelpy outbox``: what each command prints, how it ends, and that neither a password nor a control character of
somebody's text gets out.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy.cli import _database, _jobs, _top
from kestrelpy.outbox import Outbox
from tests.cli.programs import Done, Run, Spawn, refused
from tests.support.budget import ALL
from tests.support.paths import PYTHONPATH, ROOT
from tests.support.patience import PATIENCE, until

LOOKING = ("stats", "jobs", "errors", "health", "top --once")


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KESTRELPY_OUTBOX", raising=False)
    monkeypatch.delenv("KESTRELPY_TRACEBACK", raising=False)


@pytest.fixture
def url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a database with tables; the commands find it in the environment."""
    with Outbox(database_url) as box:
        box.create_tables()
    monkeypatch.setenv("KESTRELPY_OUTBOX", database_url)
    return database_url


@pytest.fixture
def outbox(url: str) -> Iterator[Outbox]:
    """On the same database, with queues ``mail`` and ``bills``."""
    with Outbox(url) as box:
        box.queue("mail")
        box.queue("bills")
        yield box


@pytest.fixture
def lite(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """``url`` for what does not depend on the database."""
    with Outbox(sqlite_url) as box:
        box.create_tables()
    monkeypatch.setenv("KESTRELPY_OUTBOX", sqlite_url)
    return sqlite_url


def put(outbox: Outbox, queue: str = "mail", payload: Any = None, **options: Any) -> int:
    with outbox.begin() as connection:
        return outbox.put(connection, queue, payload, **options).id


def change(outbox: Outbox, job_id: int, **columns: Any) -> None:
    """Let these be columns of a row."""
    table = outbox.metadata.tables["kestrel_jobs"]
    with outbox.begin() as connection:
        connection.execute(table.update().where(table.c.id == job_id).values(**columns))


def fails(outbox: Outbox, job_id: int, status: str = "error") -> None:
    """Let it have failed long ago."""
    text = "Traceback (most recent call last):\n  ...\nValueError: no such address\n"
    change(outbox, job_id, status=status, error=text, tries=3, first_error_ms=1000, finished_ms=1000)


def rows(done: Done) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in done.out.decode().splitlines()]


def objects(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


# -- which database --------------------------------------------------------------------------------------------------


def test_no_database_is_wrong_use(run: Run) -> None:
    for command in ("init", "stats", "top"):
        refused(run("outbox", command), 2, "--bind", "KESTRELPY_OUTBOX")
    refused(run("outbox"), 2, "COMMAND")
    refused(run("outbox", "stats", "--bind", ""), 2, "--bind")


@pytest.mark.parametrize(
    "text", ["jobs.db", "postgresql://u:hush@host:seven/db", "postgresql://u:hu:7sh@[::1/db", "://hush"]
)
def test_what_is_no_url_is_wrong_use_and_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    done = run("outbox", "stats", "--bind", text)
    refused(done, 2, "--bind: this is no URL")
    assert "hush" not in done.err
    monkeypatch.setenv("KESTRELPY_OUTBOX", text)
    refused(run("outbox", "stats"), 2, "KESTRELPY_OUTBOX: this is no URL")


def test_a_database_that_can_hold_no_outbox(run: Run) -> None:
    done = run("outbox", "stats", "--bind", "mysql://me:hush@host/db")
    refused(done, 1, "mysql can't hold an outbox")
    assert "hush" not in done.err
    refused(run("outbox", "sql", "--bind", "mysql://host/db"), 2, "no SQL for mysql")


def test_only_init_makes_a_file(run: Run, tmp_path: Path) -> None:
    bind = f"sqlite:///{tmp_path / 'new.db'}"
    for command in (*LOOKING, "show 1", "retry 1", "cancel 1", "prune", "pause mail", "resume mail"):
        refused(run("outbox", *command.split(), "--bind", bind), 1, "no such file", "init")
    assert list(tmp_path.iterdir()) == []
    assert run("outbox", "init", "--bind", bind) == (0, b"", "")
    assert run("outbox", "init", "--bind", bind) == (0, b"", "")
    assert run("outbox", "stats", "--bind", bind) == (1, b"", "")
    refused(run("outbox", "init", "--bind", f"sqlite:///{tmp_path}/nowhere/new.db"), 1, "unable to open")


def test_no_tables_and_other_tables(run: Run, database_url: str) -> None:
    engine = sqlalchemy.create_engine(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (number int)")
    engine.dispose()
    for command in ("stats", "jobs", "errors", "show 1", "retry 1", "cancel 1", "prune", "pause mail", "top --once"):
        words = ["outbox", *command.split(), "--bind", database_url]
        refused(run(*words), 1, "there is no table kestrel_jobs in ", "outbox init", "--table")
        if command != "pause mail":
            refused(run(*words, "--table", "orders"), 1, "table orders in ", "holds no jobs of an outbox")
    refused(run("outbox", "stats", "--bind", database_url, "--table", "o-o"), 2, "table must be")
    refused(run("outbox", "stats", "--bind", database_url, "--schema", "nowhere"), 1, "nowhere")
    done = run("outbox", "health", "--bind", database_url)
    assert (done.status, done.err) == (1, "")
    assert b"kestrel_jobs" in done.out


def test_another_table(run: Run, lite: str) -> None:
    assert run("outbox", "init", "--table", "other") == (0, b"", "")
    with Outbox(lite, table="other") as box:
        box.queue("mail")
        put(box)
    assert run("outbox", "stats").status == 1
    assert rows(run("outbox", "stats", "--table", "other"))[1][:2] == ["mail", "1"]


@pytest.mark.parametrize("command", ["stats", "jobs", "health", "health --json", "top --once", "init"])
def test_a_server_that_is_not_there(run: Run, command: str) -> None:
    bind = "postgresql+psycopg://me:hush@127.0.0.1:1/db?sslpassword=hidden"
    done = run("outbox", *command.split(), "--bind", bind)
    assert done.status == 1
    assert "refused" in done.out.decode() + done.err
    assert not re.search("hush|hidden|Traceback|sqlalche", done.out.decode() + done.err)
    assert len(done.err.splitlines()) == (not command.startswith("health"))


def test_passwords_in_what_a_driver_says() -> None:
    url = sqlalchemy.make_url("postgresql://me:hu%40sh@h/d?password=hidden&application_name=x")
    said = "postgresql://you:your@h: FATAL hu@sh, hidden\x1b[0m"
    assert _database.without_password(said, url) == "postgresql://you:***@h: FATAL ***, ***\\x1b[0m"
    assert _database.shown(url) == "postgresql://me@h/d"


def test_a_traceback_on_request(run: Run, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite3.connect(sqlite_url.removeprefix("sqlite:///")).close()
    Path(sqlite_url.removeprefix("sqlite:///")).touch()
    monkeypatch.setenv("KESTRELPY_TRACEBACK", "1")
    with pytest.raises(sqlalchemy.exc.OperationalError):
        run("outbox", "stats", "--bind", sqlite_url)


@pytest.mark.parametrize(
    ("package", "command", "words"),
    [
        ("sqlalchemy", "stats", "pip install kestrelpy[outbox]"),
        ("sqlalchemy", "sql", "pip install kestrelpy[outbox]"),
        ("rich", "top", "this needs the extra [cli]: pip install 'kestrelpy[cli]'"),
        ("psycopg", "stats", "pip install kestrelpy[postgres]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, command: str, words: str) -> None:
    program = f"""
        import sys
        sys.modules[{package!r}] = None
        from kestrelpy.cli import main
        sys.exit(main(["outbox", {command!r}, "--bind", "postgresql+psycopg://h/d"]))
        """
    lines = "\n".join(line.strip() for line in program.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, cwd=ROOT)
    if command == "sql":
        assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


# -- sql -------------------------------------------------------------------------------------------------------------


def test_sql_makes_what_init_makes(run: Run, database_url: str) -> None:
    """It is complete: an outbox starts on it, and finds nothing that is missing."""
    done = run("outbox", "sql", "--bind", database_url)
    assert (done.status, done.err) == (0, "")
    engine = sqlalchemy.create_engine(database_url)
    with engine.begin() as connection:
        for statement in done.out.decode().split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    with Outbox(engine) as box:
        box.add_consumer("mail", lambda _: None)
        put(box)
        with box.running(threads=1):
            until(lambda: box.group_progress("mail", "nobody") == {} and box.stats()[0].status == "done")
        before = indexes(engine)
        box.create_tables()
        assert indexes(engine) == before
        assert before == {index.name for index in box.metadata.tables["kestrel_jobs"].indexes}
    engine.dispose()


def indexes(engine: sqlalchemy.Engine) -> set[str | None]:
    return {index["name"] for index in sqlalchemy.inspect(engine).get_indexes("kestrel_jobs")}


def test_sql_needs_no_database(run: Run, tmp_path: Path) -> None:
    postgresql = run("outbox", "sql").out.decode()
    assert "GENERATED BY DEFAULT AS IDENTITY" in postgresql
    assert run("outbox", "sql").out.decode() == postgresql
    lite = run("outbox", "sql", "--dialect", "sqlite", "--table", "mine", "--schema", "app").out.decode()
    assert "CREATE TABLE app.mine (" in lite
    assert "AUTOINCREMENT" in lite
    assert "INSERT INTO app.mine_version (version) VALUES (1);" in lite
    assert "AUTOINCREMENT" in run("outbox", "sql", "--bind", f"sqlite:///{tmp_path}/none.db").out.decode()
    assert run("outbox", "sql", "--bind", "postgresql://127.0.0.1:1/d").out.decode() == postgresql
    assert list(tmp_path.iterdir()) == []
    refused(run("outbox", "sql", "--dialect", "mysql"), 2, "--dialect")
    refused(run("outbox", "sql", "--table", "a b"), 2, "table must be")


# -- looking ---------------------------------------------------------------------------------------------------------


def test_stats(run: Run, outbox: Outbox) -> None:
    assert run("outbox", "stats") == (1, b"", "")
    first = put(outbox)
    put(outbox, "bills", depends_on=first)
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", [None] * 1000)
    outbox.pause("mail")
    found = rows(run("outbox", "stats"))
    assert found[0] == ["queue", "ready", "waiting", "running", "error", "done", "dead", "cancelled"]
    assert found[1:] == [["bills", *"0100000"], ["mail", "1,001", *"000000", "paused"]]
    assert objects(run("outbox", "stats", "--json")) == [
        {"queue": "bills", "status": "waiting", "count": 1},
        {"queue": "mail", "status": "ready", "count": 1001},
    ]
    assert len(rows(run("outbox", "stats", "bills"))) == 2
    refused(run("outbox", "stats", "no name"), 2, "no name")


def test_stats_of_retries_and_times(run: Run, outbox: Outbox) -> None:
    job_id = put(outbox)
    assert rows(run("outbox", "stats", "--retries"))[1] == ["mail", "0", "0", "0", "0", "-"]
    assert run("outbox", "stats", "--times", "run") == (1, b"", "")
    change(outbox, job_id, status="done", tries=3, started_ms=1000, finished_ms=2250)
    found = rows(run("outbox", "stats", "--times", "run"))
    assert found[0] == ["queue", "count", "min", "avg", "p50", "p90", "p95", "p99", "max"]
    assert found[1] == ["mail", "1", *["1.250"] * 7]
    assert rows(run("outbox", "stats", "--retries"))[1] == ["mail", "1", "2", "0", "0", "200.000"]
    (fields,) = objects(run("outbox", "stats", "--retries", "--json"))
    assert fields == {"queue": "mail", "ok": 1, "retries": 2, "errors": 0, "running": 0, "retry_percentage": 200.0}
    assert objects(run("outbox", "stats", "--times", "run", "--json"))[0]["p99"] == 1.25
    assert run("outbox", "stats", "--retries", "--age-days", "0").status == 1
    refused(run("outbox", "stats", "--retries", "--times", "run"), 2, "not allowed with")
    refused(run("outbox", "stats", "--times", "all"), 2, "--times")


def test_jobs(run: Run, outbox: Outbox) -> None:
    assert run("outbox", "jobs") == (1, b"", "")
    ids = [put(outbox, payload=number, key=f"k{number}", group="g" if number else None) for number in range(3)]
    put(outbox, "bills", {"to": "ann"}, delay=3600)
    fails(outbox, ids[1], "dead")
    found = rows(run("outbox", "jobs"))
    assert found[0] == ["id", "queue", "key", "status", "tries", "added", "due", "payload"]
    assert [row[:5] for row in found[1:4]] == [
        [str(ids[0]), "mail", "k0", "ready", "0"],
        [str(ids[1]), "mail", "k1", "dead", "3"],
        [str(ids[2]), "mail", "k2", "ready", "0"],
    ]
    assert found[4][-1] == '{"to":"ann"}'
    assert len(rows(run("outbox", "jobs", "mail", "--status", "ready"))) == 3
    assert [one["id"] for one in objects(run("outbox", "jobs", "--group", "g", "--json"))] == ids[1:]
    assert [one["id"] for one in objects(run("outbox", "jobs", "--json", "--limit", 1, "--after-id", ids[0]))] == [
        ids[1]
    ]
    for words in (("--status", "gone"), ("--limit", 0), ("--after-id", 1 << 63), ("--after-id", -1)):
        refused(run("outbox", "jobs", *words), 2, words[0])


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        ('{"a": [1, null]}', {"payload": {"a": [1, None]}}),
        ("null", {"payload": None}),
        ("gAAAA=", {"payload_text": "gAAAA="}),
        ("[NaN]", {"payload_text": "[NaN]"}),
        ("[" * 100_000, {"payload_text": "[" * 100_000}),
        (b"\0\xff", {"payload_base64": "AP8="}),
    ],
)
def test_payloads_as_json(run: Run, outbox: Outbox, stored: str | bytes, fields: dict[str, Any]) -> None:
    column = {"payload": stored} if isinstance(stored, str) else {"payload": None, "payload_binary": stored}
    change(outbox, put(outbox), **column)
    (found,) = objects(run("outbox", "jobs", "--json"))
    assert {name: value for name, value in found.items() if name.startswith("payload")} == fields
    assert run("outbox", "jobs").status == run("outbox", "show", found["id"]).status == 0


def test_errors(run: Run, outbox: Outbox) -> None:
    first, second, _ = (put(outbox) for _ in range(3))
    assert run("outbox", "errors") == (1, b"", "")
    fails(outbox, first)
    fails(outbox, second, "dead")
    change(outbox, second, first_error_ms=500)
    text = run("outbox", "errors").out.decode()
    assert [line.split()[0] for line in text.splitlines()] == ["id", str(second), str(first)]
    assert "1970-01-01T00:00:00.500Z" in text
    assert text.count("ValueError: no such address") == 2
    assert [one["id"] for one in objects(run("outbox", "errors", "mail", "--limit", 1, "--json"))] == [second]
    assert run("outbox", "errors", "bills").status == 1


def test_show(run: Run, outbox: Outbox) -> None:
    job_id = put(outbox, payload={"to": "ann"}, key="order-7", lane="l", group="g")
    fails(outbox, job_id)
    done = run("outbox", "show", job_id)
    assert done == run("outbox", "show", "--queue", "mail", "--key", "order-7")
    lines = done.out.decode().splitlines()
    assert lines[:3] == [f"id          {job_id}", "queue       mail", "key         order-7"]
    assert "first error 1970-01-01T00:00:01.000Z" in lines
    assert lines[lines.index("payload") + 1] == '    {"to":"ann"}'
    assert lines[lines.index("error") + 1 :][0] == "    Traceback (most recent call last):"
    assert lines[-1] == "    ValueError: no such address"
    (fields,) = objects(run("outbox", "show", job_id, "--json"))
    assert (fields["payload"], fields["lane"], fields["tries"]) == ({"to": "ann"}, "l", 3)
    refused(run("outbox", "show", 99), 1, "there is no job 99")
    refused(run("outbox", "show", "--queue", "mail", "--key", "x"), 1, "'mail'", "'x'")
    for words in (
        (),
        ("--queue", "mail"),
        ("--key", "k"),
        (1, "--queue", "mail"),
        (1, "--queue", "mail", "--key", "k"),
    ):
        refused(run("outbox", "show", *words), 2, "which job?")
    refused(run("outbox", "show", 1 << 64), 2, "there is no id")
    refused(run("outbox", "show", "--queue", "no name", "--key", "k"), 2, "no name")


def test_health(run: Run, outbox: Outbox) -> None:
    done = run("outbox", "health")
    assert (done.status, done.err) == (0, "")
    assert done.out.decode().splitlines()[0] == "healthy"
    job_id = put(outbox)
    fails(outbox, job_id, "dead")
    put(outbox, "bills", depends_on=job_id)
    done = run("outbox", "health")
    assert (done.status, done.err) == (1, "")
    lines = done.out.decode().splitlines()
    assert lines[0] == "UNHEALTHY"
    assert "1 job in error or dead" in lines[1]
    assert lines[2] == "jobs that wait for a dead or cancelled one: 1"
    done = run("outbox", "health", "--json")
    assert done.status == 1
    (fields,) = objects(done)
    assert (fields["healthy"], fields["errors"], fields["waiting_on_dead"]) == (False, 1, 1)
    assert run("outbox", "health", "--error-age", "1e12").status == 0
    refused(run("outbox", "health", "--error-age", "-1"), 2, "--error-age")


# -- mending ---------------------------------------------------------------------------------------------------------


def test_retry(run: Run, outbox: Outbox) -> None:
    ids = [put(outbox, key=f"k{number}") for number in range(4)]
    for job_id in ids[:3]:
        fails(outbox, job_id, "dead")
    assert run("outbox", "retry", ids[0], ids[1]) == (0, b"", "")
    assert outbox.get(ids[1]).status == "ready"
    refused(run("outbox", "retry", ids[3]), 1, f"job {ids[3]} is ready: not retried")
    done = run("outbox", "retry", ids[3], 99, ids[2], "--json")
    assert objects(done) == [
        {"id": ids[3], "retried": False},
        {"id": 99, "retried": False},
        {"id": ids[2], "retried": True},
    ]
    assert (done.status, done.err.count("\n")) == (1, 2)
    fails(outbox, ids[0])
    assert run("outbox", "retry", "--queue", "mail", "--key", "k0") == (0, b"", "")
    assert outbox.get(ids[0]).tries == 0


def test_retry_all(run: Run, outbox: Outbox) -> None:
    for number in range(4):
        fails(outbox, put(outbox), "error" if number else "dead")
    assert run("outbox", "retry", "--queue", "mail", "--all") == (0, b"1 job retried\n", "")
    done = run("outbox", "retry", "--queue", "mail", "--all", "--status", "error", "--json")
    assert objects(done) == [{"retried": 3}]
    assert run("outbox", "retry", "--queue", "mail", "--all").out == b"0 jobs retried\n"
    for words in (("--all",), (1, "--all", "--queue", "mail"), ("--queue", "mail", "--key", "k", "--all")):
        refused(run("outbox", "retry", *words), 2, "--all needs")
    refused(run("outbox", "retry", 1, "--status", "dead"), 2, "--status is for --all")
    refused(run("outbox", "retry", "--queue", "mail", "--all", "--status", "ready"), 2, "--status")
    refused(run("outbox", "retry"), 2, "which job?")


def test_cancel(run: Run, outbox: Outbox) -> None:
    first, second = put(outbox), put(outbox, key="k")
    assert run("outbox", "cancel", first) == (0, b"", "")
    refused(run("outbox", "cancel", first), 1, f"job {first} is cancelled: not cancelled")
    done = run("outbox", "cancel", "--queue", "mail", "--key", "k", "--json")
    assert objects(done) == [{"id": second, "cancelled": True}]
    refused(run("outbox", "cancel"), 2, "which job?")


def test_prune(run: Run, outbox: Outbox) -> None:
    done, dead, cancelled, waited, _ = (put(outbox) for _ in range(5))
    put(outbox, "bills", depends_on=waited)
    for job_id, status in ((done, "done"), (dead, "dead"), (cancelled, "cancelled"), (waited, "dead")):
        change(outbox, job_id, status=status, finished_ms=outbox.core.now_ms() - 3 * 86_400_000)
    change(outbox, put(outbox, "bills"), status="done", finished_ms=0)
    assert run("outbox", "prune", "--queue", "bills", "--json").out == b'{"deleted": 1}\n'
    assert run("outbox", "prune") == (0, b"0 jobs deleted\n", "")
    assert run("outbox", "prune", "--older-than", "2d", "--status", "dead") == (0, b"1 job deleted\n", "")
    assert run("outbox", "prune", "--older-than", "71.5h") == (0, b"2 jobs deleted\n", "")
    assert [job.status for job in outbox.jobs("mail")] == ["dead", "ready"], "one is waited for"
    for text in ("", "7", "7y", "-7d", "d", "1e3d", "inf"):
        expected = 0 if text == "7" else 2
        assert run("outbox", "prune", "--older-than", text).status == expected, text


def test_prune_of_a_queue_that_no_outbox_has_put(run: Run, outbox: Outbox) -> None:
    change(outbox, put(outbox), queue="no name\x1b[2J", status="done", finished_ms=0)
    refused(run("outbox", "prune"), 1, r"no name\x1b[2J: no name of a queue")
    assert len(outbox.jobs()) == 1


def test_pause_and_resume(run: Run, outbox: Outbox) -> None:
    put(outbox)
    put(outbox, "bills")
    assert run("outbox", "pause", "mail", "bills") == (0, b"", "")
    assert [row[-1] for row in rows(run("outbox", "stats"))[1:]] == ["paused", "paused"]
    assert run("outbox", "resume", "mail") == (0, b"", "")
    assert [row[-1] for row in rows(run("outbox", "stats"))[1:]] == ["paused", "0"]
    refused(run("outbox", "pause", "no name"), 2, "no name")
    refused(run("outbox", "pause"), 2, "QUEUE")


@pytest.mark.parametrize("driver", ["sqlite+aiosqlite", "postgresql+asyncpg"])
def test_urls_of_asyncio(run: Run, request: pytest.FixtureRequest, driver: str) -> None:
    name = "sqlite_url" if driver.startswith("sqlite") else "postgres_url"
    url = request.getfixturevalue(name)
    bind = ("--bind", driver + url[url.index(":") :])
    assert run("outbox", "init", *bind) == (0, b"", "")
    with Outbox(url) as box:
        box.queue("mail")
        job_id = put(box)
    assert rows(run("outbox", "stats", *bind))[1][:2] == ["mail", "1"]
    assert run("outbox", "cancel", job_id, *bind) == (0, b"", "")
    assert run("outbox", "health", *bind).status == 0
    assert b"mail" in run("outbox", "top", "--once", *bind).out
    refused(run("outbox", "jobs", *bind, "--table", "none"), 1, "there is no table none")


# -- text of others --------------------------------------------------------------------------------------------------

HOSTILE = st.text(
    st.one_of(st.sampled_from("\x1b\x07\r\n\t\x9b\u202e\u2028[]m0;ax/"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=12,
).filter(lambda text: "\0" not in text)


@settings(
    max_examples=30 if ALL else 5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(queue=HOSTILE, key=HOSTILE, payload=HOSTILE, error=HOSTILE, group=HOSTILE, worker=HOSTILE, context=HOSTILE)
def test_nothing_that_a_terminal_acts_upon_is_shown_as_it_is(
    run: Run, outbox: Outbox, queue: str, key: str, payload: str, error: str, **more: str
) -> None:
    with outbox.begin() as connection:
        connection.execute(outbox.metadata.tables["kestrel_jobs"].delete())
    job_id = put(outbox)
    fails(outbox, job_id, "error")
    columns = {"worker": more["worker"], "context": more["context"], "job_group": more["group"]}
    change(outbox, job_id, queue=queue, key=key, payload=payload, error=error, **columns)
    shown = [run("outbox", *command.split()) for command in (*LOOKING, f"show {job_id}", "stats --retries")]
    as_json = [run("outbox", command, "--json") for command in ("stats", "jobs", "errors")]
    for done in (*shown, *as_json):
        assert done.err == ""
        assert all(line.isprintable() for line in done.out.decode().split("\n"))
    for done in as_json:
        assert objects(done)[0]["queue"] == queue
    fields = objects(as_json[1])[0]
    assert (fields["key"], fields["error"]) == (key, error)


def test_markup_of_rich_is_text(run: Run, outbox: Outbox) -> None:
    job_id = put(outbox)
    fails(outbox, job_id)
    change(outbox, job_id, queue="[red]x[/red]", error="[/nothing] :smile: https://example.org")
    out = run("outbox", "top", "--once").out.decode()
    assert "[red]x[/red]" in out
    assert "[/nothing] :smile:" in out


# -- pipes and signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["stats", "jobs", "jobs --json", "errors", "show 1", "health", "top --once", "sql"])
def test_a_closed_pipe_ends_it_quietly(spawn: Spawn, lite: str, command: str) -> None:
    with Outbox(lite) as box:
        box.queue("mail")
        fails(box, put(box))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        process = spawn("outbox", *command.split(), stdout=closed)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (141, b"")


def test_streams_that_are_closed(lite: str) -> None:
    for redirection in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        line = f"{sys.executable} -m kestrelpy outbox retry 99 {redirection}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, check=False, cwd=ROOT, timeout=60)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr


# -- top -------------------------------------------------------------------------------------------------------------


def test_top_once(run: Run, outbox: Outbox) -> None:
    done = run("outbox", "top", "--once")
    assert (done.status, done.err) == (0, "")
    assert rows(done)[0][:3] == [
        "kestrel_jobs",
        "in",
        _database.shown(sqlalchemy.make_url(os.environ["KESTRELPY_OUTBOX"])),
    ]
    job_id = put(outbox)
    put(outbox, "bills")
    fails(outbox, job_id, "dead")
    outbox.pause("mail")
    out = run("outbox", "top", "--once").out.decode()
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[1].startswith("UNHEALTHY: 1 job in error or dead")
    assert lines[3].split() == ["queue", *_top.STATUSES, "done/s"]
    assert lines[4].split() == ["bills", *"1000000", "0.0"]
    assert lines[5].split() == ["mail", *"0000100", "0.0", "paused"]
    assert lines[-1].split()[:4] == [str(job_id), "mail", "dead", "3"]
    assert lines[-1].endswith("ValueError: no such address")
    assert run("outbox", "top").status == 0, "no terminal: once"
    refused(run("outbox", "top", "--interval", "0"), 2, "--interval")


def test_a_look_that_fails_is_shown_and_the_table_stays(outbox: Outbox, url: str) -> None:
    parsed = sqlalchemy.make_url(url)
    put(outbox)
    looker = _top.Looker(outbox, "kestrel_jobs", parsed)
    text = frame(looker)
    assert "not looked yet" in text
    looker.look()
    assert "healthy; the oldest ready job has been due for" in frame(looker)
    with outbox.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE kestrel_jobs RENAME TO elsewhere")
    with pytest.raises(sqlalchemy.exc.SQLAlchemyError):
        looker.look()
    text = frame(looker)
    assert "the last look failed: there is no table kestrel_jobs" in text
    assert "mail" in text
    with outbox.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO kestrel_jobs")
    looker.look()
    assert "failed" not in frame(looker)


def frame(looker: _top.Looker) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(looker.frame())
    return captured.get()


def test_the_rate_is_that_of_done_jobs(outbox: Outbox, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_top, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    ids = [put(outbox) for _ in range(10)]
    looker = _top.Looker(outbox, "kestrel_jobs", sqlalchemy.make_url(url))
    looker.look()
    for job_id in ids[:5]:
        change(outbox, job_id, status="done")
    now[0] += 2
    looker.look()
    assert "2.5" in frame(looker)
    with outbox.begin() as connection:
        connection.execute(outbox.metadata.tables["kestrel_jobs"].delete().where(sqlalchemy.text("status = 'done'")))
    now[0] += 2
    looker.look()
    assert "0.0" in frame(looker), "pruned jobs are no negative rate"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "kestrelpy", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""

    def read_until(self, words: bytes) -> None:
        """Read until these words come that were not there before this call."""
        begin = len(self.seen)
        while words not in self.seen[begin:]:
            ready, _, _ = select.select([self._master], [], [], PATIENCE)
            assert ready, self.seen[begin:]
            self.seen += os.read(self._master, 1 << 16)

    def end(self, number: signal.Signals) -> tuple[int, bytes]:
        """The exit status after this signal, and what was written on standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=PATIENCE)
        while select.select([self._master], [], [], 0)[0]:
            try:
                more = os.read(self._master, 1 << 16)
            except OSError:  # the other side is closed, and all is read
                break
            self.seen += more
        return self.process.returncode, err

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_lives_and_gives_the_terminal_back(
    terminal: Callable[..., Terminal], lite: str, number: signal.Signals
) -> None:
    with Outbox(lite) as box:
        box.queue("mail")
        put(box)
        shown = terminal("outbox", "top", "--interval", "0.1")
        shown.read_until(b"healthy")
        fails(box, 1, "dead")
        shown.read_until(b"no such address")
    assert shown.end(number) == (128 + number, b"")
    assert b"\x1b[?1049h" in shown.seen, "it has a screen of its own"
    assert shown.seen.rindex(b"\x1b[?1049l") > shown.seen.rindex(b"\x1b[?1049h")
    assert shown.seen.rindex(b"\x1b[?25h") > shown.seen.rindex(b"\x1b[?25l"), "the cursor is there again"


# -- run -------------------------------------------------------------------------------------------------------------

APPLICATION = """
import os
from kestrelpy.outbox import Outbox

class Holder:
    outbox = Outbox({bind})

outbox = Holder.outbox
number = 7

@outbox.consumer("mail")
def send(payload):
    with open({folder!r} + "/sent", "a") as file:
        file.write(str(payload) + "\\n")

@outbox.consumer("bills")
def bill(payload):
    open({folder!r} + "/billed", "w").close()
"""


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a module ``shop.jobs`` in a folder, and go there."""

    def make(bind: str = "", more: str = "") -> Path:
        folder = tmp_path / "app"
        (folder / "shop").mkdir(parents=True)
        (folder / "shop" / "jobs.py").write_text(APPLICATION.format(bind=bind, folder=str(folder)) + more)
        return folder

    return make


def start_in(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    known = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    command = [sys.executable, "-m", "kestrelpy", "outbox", "run", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=known)


def ended(process: subprocess.Popen[bytes]) -> Done:
    out, err = process.communicate(timeout=PATIENCE)
    return Done(process.returncode, out, err.decode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_until_a_signal(url: str, outbox: Outbox, application: Callable[..., Path], number: signal.Signals) -> None:
    folder = application(repr(url))
    for payload in range(20):
        put(outbox, payload=payload)
    process = start_in(folder, "shop.jobs:outbox", "--threads", "2")
    until(lambda: all(one.status == "done" for one in outbox.stats("mail")))
    process.send_signal(number)
    done = ended(process)
    assert done.status == 0
    assert "Traceback" not in done.err
    assert sorted(map(int, (folder / "sent").read_text().split())) == list(range(20))


def test_run_of_some_queues_of_an_outbox_that_is_not_bound(lite: str, application: Callable[..., Path]) -> None:
    folder = application()
    with Outbox(lite) as box:
        box.queue("mail")
        box.queue("bills")
        put(box, "bills")
        put(box)
        for how in ({"KESTRELPY_OUTBOX": lite}, {"KESTRELPY_OUTBOX": ""}):
            bind = () if how["KESTRELPY_OUTBOX"] else ("--bind", lite)
            put(box)
            process = start_in(folder, "shop.jobs:Holder.outbox", "--queue", "mail", *bind, **how)
            until(lambda: all(one.status == "done" for one in box.stats("mail")))
            process.terminate()
            assert ended(process).status == 0
        assert not (folder / "billed").exists()


def test_a_second_signal_ends_it_now(lite: str, application: Callable[..., Path]) -> None:
    more = """
@outbox.consumer("slow")
def hang(payload):
    import time
    open(payload, "w").close()
    time.sleep(600)
"""
    folder = application(repr(lite), more)
    with Outbox(lite) as box:
        box.queue("slow")
        put(box, "slow", str(folder / "begun"))
    process = start_in(folder, "shop.jobs:outbox")
    until((folder / "begun").exists)
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    done = ended(process)
    assert done.status in (143, -signal.SIGTERM)
    assert "Traceback" not in done.err


def test_what_can_not_be_run(lite: str, application: Callable[..., Path], tmp_path: Path) -> None:
    folder = application(repr(lite))
    (folder / "broken.py").write_text("raise ValueError('postgresql://me:hush@host\\nsecond line')\n")
    for target, status, words in (
        ("shop.jobs", 2, "MODULE:OUTBOX"),
        (":outbox", 2, "MODULE:OUTBOX"),
        ("shop.nothing:outbox", 1, "shop.nothing can't be imported: ModuleNotFoundError"),
        ("broken:outbox", 1, "broken can't be imported: ValueError: postgresql://me:***@host\\nsecond line"),
        ("shop.jobs:outbocks", 1, "shop.jobs has no outbocks"),
        ("shop.jobs:number", 1, "shop.jobs:number is no Outbox, but int"),
    ):
        done = ended(start_in(folder, target))
        refused(done, status, words)
        assert "hush" not in done.err
    refused(ended(start_in(folder, "shop.jobs:outbox", "--bind", "sqlite://")), 1, "bound already")
    refused(ended(start_in(folder, "shop.jobs:outbox", "--threads", "0")), 2, "--threads")


def test_run_without_tables_or_a_bind(sqlite_url: str, application: Callable[..., Path], run: Run) -> None:
    folder = application(repr(sqlite_url))
    refused(ended(start_in(folder, "shop.jobs:outbox")), 1, "kestrel_jobs", "create_tables()")
    (folder / "shop" / "jobs.py").write_text("from kestrelpy.outbox import Outbox\noutbox = Outbox()\n")
    refused(ended(start_in(folder, "shop.jobs:outbox")), 1, "not bound")


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "line"), [(None, ""), ("", ""), ("\n", ""), ("a\n  b\n\n", "b")])
def test_the_last_line_of_an_error(error: str | None, line: str) -> None:
    assert _jobs.last_line(error) == line
