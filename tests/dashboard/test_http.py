"""The dashboard over HTTP: who is answered, what is said, what may be changed; and that each guard is needed."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, inbox, inspect
from kestrelpy.cli import main
from kestrelpy.work import WorkQueue
from tests.dashboard.conftest import make_queues
from tests.dashboard.servers import Answer, Served, ask, dashboard
from tests.support.patience import PATIENCE, until

pytest.importorskip("starlette", reason="starlette is not installed: the extra [dashboard] has it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: the extra [dashboard] has it")

TOKEN = "a-token-of-the-tests"
JSON = {"Content_Type": "application/json", "X_Kestrelpy": "1"}
LETTERS = {"keeper": "", "from_queue": "orders", "from_reader": ""}
DROP = json.dumps({"queue": "orders", "reader": "mail"}).encode()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test of this module changes."""
    return make_queues(tmp_path_factory.mktemp("still") / "queues")


@pytest.fixture(scope="module")
def served(still: Path) -> Iterator[Served]:
    """A dashboard of the folder that nobody changes."""
    with dashboard(still) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(still: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that would change the folder, for requests that are refused."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    with dashboard(still, "--allow-changes", "--token-file", str(file)) as served:
        yield served


@pytest.fixture
def changing(queues: Path, tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with dashboard(queues, "--allow-changes", "--token-file", str(file)) as served:
        yield served


def found(answer: Answer) -> Any:
    assert answer.status == 200, answer
    return json.loads(answer.body)


def readers(folder: Path) -> list[str]:
    return [reader.name for reader in inspect(folder, "orders").readers]


# -- what is said ----------------------------------------------------------------------------------------------------


def test_the_table_and_a_queue(served: Served, still: Path) -> None:
    table = found(ask(served, "/api/queues?sort=items"))
    assert [row["name"] for row in table["rows"]] == ["orders", "work", "alerts"]
    assert table["totals"]["queues"] == 3
    assert table["totals"]["items"] == 31
    assert table["totals"]["troubles"] == 0
    assert found(ask(served, f"/api/queues?sort=items&seen={table['look']}")).get("unchanged") in (True, None)
    assert [row["name"] for row in found(ask(served, "/api/queues?filter=OR"))["rows"]] == ["orders", "work"]
    one = found(ask(served, "/api/queue?name=orders"))
    assert {reader["name"]: reader["items"] for reader in one["readers"]} == {"audit": 30, "mail": 20}
    assert len(one["lines"]["in"]) == 360
    assert set(one["lines"]["lag"]) == {"audit", "mail"}
    assert ask(served, "/api/queue?name=none").status == 404
    about = found(ask(served, "/api/about"))
    assert about == {"directory": str(still), "changes": [], "show_data": True}


def test_only_new_points_of_lines_are_sent(served: Served) -> None:
    lines = found(ask(served, "/api/queue?name=orders"))["lines"]
    last = lines["first"] + 359
    assert len(found(ask(served, f"/api/queue?name=orders&after={last - 1}"))["lines"]["in"]) in (1, 2)


def test_tubes_and_newest_items(served: Served) -> None:
    (tube,) = found(ask(served, "/api/tubes?name=work"))["tubes"]
    assert (tube["name"], tube["ready"], tube["buried"]) == ("prints", 2, 3)
    assert ask(served, "/api/tubes?name=orders").status == 404
    items = found(ask(served, "/api/newest?name=orders"))["items"]
    assert [item["id"] for item in items] == list(range(30, 10, -1))
    assert items[0]["head"] == "order 29"
    assert found(ask(served, "/api/newest?name=work"))["items"][0]["head"] == "job 4"


def test_no_data_is_none_in_the_answers(queues: Path) -> None:
    with dashboard(queues, "--no-data") as served:
        assert found(ask(served, "/api/about"))["show_data"] is False
        paths = ("/api/newest?name=orders", "/api/newest?name=work", "/api/queue?name=orders", "/api/queue?name=work")
        answers = [ask(served, path) for path in (*paths, "/api/tubes?name=work", "/api/queues?lines=1")]
        assert [answer.status for answer in answers] == [403, 403, 200, 200, 200, 200]
        for answer in answers:
            assert "order 2" not in answer.body
            assert "job " not in answer.body


def test_what_waits_in_the_inbox_is_shown(queues: Path) -> None:
    for name in ("alerts", "order", "order"):
        inbox.put_many(queues, name, [b"x"])
    before = sorted(path.name for path in queues.iterdir())
    with dashboard(queues) as served:
        table = found(ask(served, "/api/queues"))
        shown = {row["name"]: (row["pending"], row["exists"], row["problem"]) for row in table["rows"]}
        assert shown == {
            "alerts": (1, True, ""),
            "order": (2, False, ""),
            "orders": (0, True, ""),
            "work": (0, True, ""),
        }
        assert table["totals"]["queues"] == 3
        one = found(ask(served, "/api/queue?name=order"))
        assert (one["pending"], one["items"], one["readers"]) == (2, 0, [])
        assert found(ask(served, "/api/newest?name=order")) == {"items": []}
        assert ask(served, "/api/tubes?name=order").status == 404
        assert found(ask(served, "/api/dead?name=order"))["boxes"][0]["waiting"] == 2
        assert ask(served, "/api/verify", b'{"queue": "order"}', **JSON).status == 404
    assert sorted(path.name for path in queues.iterdir()) == before


def test_an_inbox_that_can_not_be_read_is_said(queues: Path) -> None:
    shutil.rmtree(queues / "inbox", ignore_errors=True)
    (queues / "inbox").write_bytes(b"no folder")
    with dashboard(queues) as served:
        table = found(ask(served, "/api/queues"))
        assert str(queues / "inbox") in table["inbox_problem"]
        assert (table["problem"], len(table["rows"])) == ("", 3)


def test_a_damaged_queue_is_in_trouble_and_the_others_are_not(queues: Path) -> None:
    def states(of: Served) -> dict[str, bool]:
        return {row["name"]: bool(row["problem"]) for row in found(ask(of, "/api/queues"))["rows"]}

    with dashboard(queues) as served:
        assert states(served) == {"alerts": False, "orders": False, "work": False}
        next(queues.glob("alerts.*.segment")).write_bytes(b"\xff" * 300)
        until(lambda: states(served) == {"alerts": True, "orders": False, "work": False})
        assert found(ask(served, "/api/queues?sort=trouble"))["rows"][0]["name"] == "alerts"
        assert found(ask(served, "/api/queues"))["totals"]["troubles"] == 1


def test_a_folder_that_goes_is_said_and_comes_back(queues: Path) -> None:
    away = queues.with_name("away")
    with dashboard(queues) as served:
        queues.rename(away)
        until(lambda: found(ask(served, "/api/queues"))["problem"])
        assert found(ask(served, "/api/queues"))["totals"]["queues"] == 3  # as of before
        away.rename(queues)
        until(lambda: not found(ask(served, "/api/queues"))["problem"])


def test_a_check_says_what_it_found(served: Served) -> None:
    assert found(ask(served, "/api/verify", b'{"queue": "orders"}', **JSON)) == {"running": "orders"}
    until(lambda: found(ask(served, "/api/verify"))["results"])
    (result,) = found(ask(served, "/api/verify"))["results"]
    assert (result["queue"], result["ok"], result["items"]) == ("orders", True, 30)
    assert ask(served, "/api/verify", b'{"queue": "none"}', **JSON).status == 404
    assert ask(served, "/api/verify", b"[" * 3000, **JSON).status == 404


# -- who is answered -------------------------------------------------------------------------------------------------


def test_headers_of_every_answer(served: Served) -> None:
    refused = {"Host": "evil.example"}
    for answer in (ask(served, "/"), ask(served, "/api/queues"), ask(served, "/none"), ask(served, "/", **refused)):
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8922", "127.0.0.1.evil.example", "localhost.evil.example:1", "", "[::1", "a:b"],
)
@pytest.mark.parametrize("path", ["/", "/api/queues", "/static/dashboard.js"])
def test_another_host_is_refused(served: Served, host: str, path: str) -> None:
    assert ask(served, path, Host=host).status in (400, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:99", "LOCALHOST", "[::1]:8922", "192.0.2.7:1"])
def test_addresses_and_localhost_are_answered(served: Served, host: str) -> None:
    assert ask(served, "/api/queues", Host=host).status == 200


def test_two_hosts_or_none_are_refused(served: Served) -> None:
    for head in ("Host: 127.0.0.1\r\nHost: evil.example\r\n", ""):
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as raw:
            raw.sendall(f"GET /api/queues HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] in (b"400", b"403")


def test_a_name_that_is_allowed(queues: Path) -> None:
    with dashboard(queues, "--allow-host", "queues.example") as served:
        assert ask(served, "/api/queues", Host="Queues.Example:8922").status == 200
        assert ask(served, "/api/queues", Host="other.example").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_pages_of_other_sites_are_refused(guarded: Served, still: Path, headers: dict[str, str]) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(guarded, "/api/queues", **headers, **token).status == 403
    assert ask(guarded, "/api/change/drop-reader", DROP, **JSON, **headers, **token).status == 403
    assert "mail" in readers(still)


def test_the_page_itself_may_be_linked_to(served: Served) -> None:
    assert ask(served, "/", Sec_Fetch_Site="cross-site").status == 200
    own = served.url.rstrip("/")
    assert ask(served, "/api/queues", Origin=own, Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"]
)
def test_without_the_token_there_is_nothing(guarded: Served, still: Path, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for path in ("/api/about", "/api/queues", "/api/queue?name=orders", "/api/newest?name=orders", "/api/verify"):
        assert ask(guarded, path, **headers).status == 401
    assert ask(guarded, "/api/change/drop-reader", DROP, **JSON, **headers).status == 401
    assert "mail" in readers(still)
    assert ask(guarded, "/").status == 200  # it says nothing of the folder


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_a_post_changes(guarded: Served, still: Path, method: str) -> None:
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
    assert ask(guarded, "/api/change/drop-reader", DROP, method, **headers).status == 405
    assert "mail" in readers(still)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "application/json"}, 403),
        ({"Content_Type": "application/x-www-form-urlencoded", "X_Kestrelpy": "1"}, 415),
        ({"Content_Type": "text/plain", "X_Kestrelpy": "1"}, 415),
    ],
)
def test_a_post_that_a_form_could_send_is_refused(
    guarded: Served, still: Path, headers: dict[str, str], status: int
) -> None:
    answer = ask(guarded, "/api/change/drop-reader", DROP, Authorization=f"Bearer {TOKEN}", **headers)
    assert answer.status == status
    assert "mail" in readers(still)


def test_a_large_body_is_not_read(served: Served) -> None:
    assert ask(served, "/api/verify", b" " * 5000, **JSON).status == 413
    for length in ("00000000000005000", "99999999999999999999", "0" * 15 + "4097"):
        assert ask(served, "/api/verify", b" " * 5000, **JSON, Content_Length=length).status == 413
    assert ask(served, "/api/verify", b" ", **JSON, Content_Length="0" * 15 + "1").status == 404
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as raw:
        head = "POST /api/verify HTTP/1.1\r\nHost: localhost\r\nX-Kestrelpy: 1\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        assert raw.makefile("rb").readline().split()[1] == b"411"


# -- what may be changed ---------------------------------------------------------------------------------------------


def test_a_reader_is_dropped_with_the_token(changing: Served, queues: Path) -> None:
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
    assert found(ask(changing, "/api/about", **headers))["changes"] == ["drop-reader", "kick", "requeue"]
    assert "dropped" in found(ask(changing, "/api/change/drop-reader", DROP, **headers))["said"]
    assert readers(queues) == ["audit"]
    assert ask(changing, "/api/change/drop-reader", DROP, **headers).status == 409
    assert ask(changing, "/api/change/none", DROP, **headers).status == 404


def test_jobs_are_kicked_with_the_token(changing: Served, queues: Path) -> None:
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
    for fields in (
        {},
        {"queue": "work", "tube": "prints", "count": True},
        {"queue": "orders", "tube": "a", "count": 1},
    ):
        assert ask(changing, "/api/change/kick", json.dumps(fields).encode(), **headers).status == 409
    body = json.dumps({"queue": "work", "tube": "prints", "count": 2}).encode()
    assert found(ask(changing, "/api/change/kick", body, **headers))["said"].startswith("2 jobs")
    with WorkQueue(queues, "work") as jobs:
        assert jobs.stats_tube("prints").buried == 1


@pytest.mark.parametrize("name", ["../escape", "none", "a/b", ""])
def test_no_change_makes_a_queue(changing: Served, queues: Path, name: str) -> None:
    before = sorted(path.name for path in queues.parent.rglob("*"))
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
    for change, fields in (
        ("drop-reader", {"reader": "mail"}),
        ("kick", {"tube": "a", "count": 1}),
        ("requeue", LETTERS),
    ):
        body = json.dumps({"queue": name, **fields}).encode()
        assert ask(changing, f"/api/change/{change}", body, **headers).status == 409
    assert sorted(path.name for path in queues.parent.rglob("*")) == before


def test_beside_an_owner_a_change_is_refused(changing: Served, queues: Path) -> None:
    headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
    with JournaledQueue(queues, "orders"):
        answer = ask(changing, "/api/change/drop-reader", DROP, **headers)
    assert answer.status == 409
    assert "held by" in answer.body
    assert "mail" in readers(queues)


def test_without_allow_changes_nothing_is_changed(queues: Path) -> None:
    before = {path.name: path.read_bytes() for path in queues.iterdir()}
    with dashboard(queues, env={"KESTRELPY_DASHBOARD_TOKEN": TOKEN}) as served:
        headers = {**JSON, "Authorization": f"Bearer {TOKEN}"}
        assert served.token == ""
        assert ask(served, "/api/queues").status == 401
        assert found(ask(served, "/api/about", **headers))["changes"] == []
        assert ask(served, "/api/change/drop-reader", DROP, **headers).status == 403
        for path in ("/", "/api/queues?lines=1", "/api/newest?name=orders", "/api/tubes?name=work"):
            assert ask(served, path, **headers).status == 200
    assert {path.name: path.read_bytes() for path in queues.iterdir()} == before


def test_a_token_is_made_and_said_once(queues: Path) -> None:
    with dashboard(queues, "--allow-changes") as served:
        assert len(served.token) >= 30
        assert ask(served, "/api/queues").status == 401
        assert ask(served, "/api/queues", Authorization=f"Bearer {served.token}").status == 200


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:1", "host.example:1"])
def test_other_addresses_than_loopback_want_a_token(
    queues: Path, listen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KESTRELPY_DASHBOARD_TOKEN", raising=False)
    for options in ([], ["--allow-changes"]):
        assert main(["dashboard", str(queues), "--listen", listen, *options]) == 2
        assert "give a token" in capsys.readouterr().err


def test_a_local_name_that_stands_for_another_address_wants_a_token(
    queues: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KESTRELPY_DASHBOARD_TOKEN", raising=False)
    everywhere = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("0.0.0.0", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [everywhere])
    assert main(["dashboard", str(queues), "--listen", "localhost:0"]) == 2
    assert "0.0.0.0 can be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["--listen", "127.0.0.1"], "", "is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "", "is not HOST:PORT"),
        (["--listen", "::1:80"], "", "is not HOST:PORT"),
        (["--token-file"], "short", "at least 16 characters"),
        (["--token-file"], "with a space in the middle", "without spaces"),
        (["--token-file"], "ä" * 20, "ASCII"),
    ],
)
def test_wrong_use(
    queues: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], token: str, words: str
) -> None:
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    file.chmod(stat.S_IRUSR)
    files = [str(file)] if token else []
    assert main(["dashboard", str(queues), *arguments, *files]) == 2
    assert words in capsys.readouterr().err


def test_without_the_extra_it_is_named(
    queues: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["dashboard", str(queues)]) == 2
    assert "pip install 'kestrelpy[dashboard]'" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err


# -- planted faults: without its guard each of these requests would be answered ----------------------------------------

GUARD = "from kestrelpy.dashboard import guard\n"
PLANTED = {
    "host": (GUARD + "guard.Guard.is_known_host = lambda self, host: True", "/api/queues", {"Host": "evil.example"}),
    "token": (GUARD + "guard.Guard._has_token = lambda self, given: True", "/api/queues", {}),
    "origin": (
        "from kestrelpy.dashboard import app, guard\n"
        "usual = guard.Guard._refusal\n"
        "def refusal(self, scope):\n"
        "    hidden = (b'origin', b'sec-fetch-site')\n"
        "    return usual(self, {**scope, 'headers': [h for h in scope['headers'] if h[0] not in hidden]})\n"
        "guard.Guard._refusal = refusal",
        "/api/queues",
        {"Origin": "http://evil.example", "Authorization": f"Bearer {TOKEN}"},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(queues: Path, fault: str) -> None:
    patch, path, headers = PLANTED[fault]
    env = {"KESTRELPY_DASHBOARD_TOKEN": TOKEN}
    given = {"Authorization": f"Bearer {TOKEN}", **headers} if fault == "host" else headers
    with dashboard(queues, env=env) as served:
        assert ask(served, path, **given).status in (401, 403)
    with dashboard(queues, env=env, patched_by=patch) as served:
        assert ask(served, path, **given).status == 200


def test_a_planted_post_guard_is_seen(queues: Path) -> None:
    env = {"KESTRELPY_DASHBOARD_TOKEN": TOKEN}
    patch = GUARD + "guard._refusal_of_post = lambda method, headers: None"
    with dashboard(queues, "--allow-changes", env=env, patched_by=patch) as served:
        form = {"Content_Type": "text/plain", "Authorization": f"Bearer {TOKEN}"}
        assert ask(served, "/api/change/drop-reader", DROP, **form).status == 200
    assert "mail" not in readers(queues)


def test_planted_data_is_seen(queues: Path) -> None:
    patch = "from kestrelpy.dashboard import app\nusual = app._Answers.__init__\n"
    patch += "def begin(self, *args, **options):\n    usual(self, *args, **{**options, 'show_data': True})\n"
    patch += "app._Answers.__init__ = begin"
    with dashboard(queues, "--no-data", patched_by=patch) as served:
        assert "order 2" in ask(served, "/api/newest?name=orders").body
