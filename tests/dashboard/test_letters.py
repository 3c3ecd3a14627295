"""The dashboard's dead letters, without a browser: what is counted, what is said, and what is put back by whom."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import DeadLetter, JournaledQueue, ReaderConfig, dead_letters, inbox
from kestrelpy.dashboard import changes, letters
from kestrelpy.dashboard.changes import ChangeRefused, requeue
from kestrelpy.dashboard.letters import FoundLetters, LetterBox, LetterOrigin
from kestrelpy.inspection import FolderWatch
from kestrelpy.letter import encode_letter
from kestrelpy.testing import ManualClock
from tests.dashboard.servers import Served, ask, dashboard
from tests.support.budget import SEED
from tests.support.patience import until
from tests.support.queues import START_MS

pytest.importorskip("starlette", reason="starlette is not installed: the extra [dashboard] has it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: the extra [dashboard] has it")

TOKEN = "a-token-of-the-tests"
JSON = {"Content_Type": "application/json", "X_Kestrelpy": "1"}
GIVEN = {**JSON, "Authorization": f"Bearer {TOKEN}"}
MAILS = {"queue": "dead", "keeper": "", "from_queue": "mails", "from_reader": ""}


def letter(number: int, queue: str = "mails", reader: str = "") -> bytes:
    return encode_letter(DeadLetter(b"data %d" % number, queue, reader, number, 1, number, 3, f"reason {number}"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``mails``, whose reader has really given one item up; and letters of two readers in ``dead``."""
    config = ReaderConfig(max_deliveries=1, dead_letter="dead")
    with JournaledQueue(tmp_path, "mails", default_reader=config) as queue:
        queue.put(b"data 1")
        queue.get(timeout=1).abort(reason="reason 1")
    with JournaledQueue(tmp_path, "dead") as queue:
        queue.put_many([letter(2), letter(3, "bills", "audit"), b"no letter", letter(4)])
    with JournaledQueue(tmp_path, "bills") as queue:
        queue.put(b"x")
    return tmp_path


@pytest.fixture
def changing(folder: Path) -> Iterator[Served]:
    with dashboard(folder, "--allow-changes", env={"KESTRELPY_DASHBOARD_TOKEN": TOKEN}) as served:
        yield served


def dead_of(served: Served, name: str) -> Any:
    answer = ask(served, f"/api/dead?name={name}", **GIVEN)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def post(served: Served, fields: dict[str, Any], **headers: str) -> tuple[int, Any]:
    answer = ask(served, "/api/change/requeue", json.dumps(fields).encode(), **(headers or GIVEN))
    return answer.status, json.loads(answer.body) if answer.body.startswith("{") else answer.body


def left(folder: Path) -> list[int]:
    with dead_letters(folder, "dead") as found:
        return [each.id for each in found if each.queue]


def drained(folder: Path, name: str) -> list[bytes]:
    with JournaledQueue(folder, name) as queue:
        return [item.data for item in queue.get_many(100)]


# -- what is said ----------------------------------------------------------------------------------------------------


def test_letters_are_counted_by_origin(changing: Served) -> None:
    said = dead_of(changing, "dead")
    counts = {(each["queue"], each["reader"], each["box"]): each["count"] for each in said["origins"]}
    assert counts == {("mails", "", "dead"): 3, ("bills", "audit", "dead"): 1}
    assert said["boxes"] == [{"name": "dead", "waiting": 0, "others": 1, "is_whole": True}]
    assert [each["item"] for each in said["letters"]] == [1, 4, 3, 2], "the one that has died now, and the others"
    one = said["letters"][1]
    assert (one["queue"], one["reader"], one["errors"], one["about"]) == ("mails", "", 3, "reason 4")
    assert (one["died_ms"], one["head"], one["bytes"]) == (4, "data 4", 6)


def test_a_queue_shows_those_that_come_from_it(changing: Served) -> None:
    said = dead_of(changing, "bills")
    assert [(each["queue"], each["count"]) for each in said["origins"]] == [("bills", 1)]
    assert [each["item"] for each in said["letters"]] == [3]
    assert ask(changing, "/api/dead?name=none", **GIVEN).status == 404


def test_without_data_neither_data_nor_reasons_are_sent(folder: Path) -> None:
    """The reason may quote the data."""
    with dashboard(folder, "--no-data") as served:
        answer = ask(served, "/api/dead?name=dead")
        assert len(json.loads(answer.body)["letters"]) == 4
        assert "data " not in answer.body
        assert "reason " not in answer.body


def test_what_waits_in_the_inbox_is_said(folder: Path) -> None:
    """Letters that nobody has taken in are in no queue yet."""
    config = ReaderConfig(max_deliveries=1, dead_letter="dead")
    with JournaledQueue(folder, "mails", default_reader=config) as queue:
        queue.put(b"late")
        queue.get(timeout=1).abort()
        until(lambda: inbox.pending(folder, "dead") == 1)
        with dashboard(folder) as served:
            assert json.loads(ask(served, "/api/dead?name=dead").body)["boxes"][0]["waiting"] == 1


# -- what is put back ------------------------------------------------------------------------------------------------


def test_one_letter_goes_back_with_the_token(changing: Served, folder: Path) -> None:
    wanted = next(each for each in dead_of(changing, "mails")["letters"] if each["item"] == 2)
    assert post(changing, {**MAILS, "id": wanted["id"]}) == (
        200,
        {"said": "1 dead letter is back in mails", "more": False},
    )
    assert left(folder) == [1, 3, 4]
    assert drained(folder, "mails") == [b"data 2"]
    status, said = post(changing, {**MAILS, "id": wanted["id"]})
    assert (status, "there is no such dead letter" in said["error"]) == (409, True)


def test_all_of_an_origin_go_back_and_the_others_stay(changing: Served, folder: Path) -> None:
    assert post(changing, MAILS) == (200, {"said": "3 dead letters are back in mails", "more": False})
    assert left(folder) == [3]
    assert sorted(drained(folder, "mails")) == [b"data 1", b"data 2", b"data 4"]


WITHOUT_TOKEN = "from kestrelpy.dashboard import guard\nguard.Guard._has_token = lambda self, given: True"


@pytest.mark.parametrize("token", ["", "Bearer wrong-token-of-the-tests", "Basic " + TOKEN])
def test_without_the_token_nothing_goes_back(changing: Served, folder: Path, token: str) -> None:
    headers = {**JSON, **({"Authorization": token} if token else {})}
    assert post(changing, MAILS, **headers)[0] == 401
    assert left(folder) == [1, 2, 3, 4]


def test_a_planted_fault_any_token_will_do_is_seen(folder: Path) -> None:
    env = {"KESTRELPY_DASHBOARD_TOKEN": TOKEN}
    with dashboard(folder, "--allow-changes", env=env, patched_by=WITHOUT_TOKEN) as served:
        assert post(served, MAILS, **JSON)[0] == 200
    assert left(folder) == [3]


def test_without_allow_changes_nothing_goes_back(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with dashboard(folder) as served:
        assert post(served, MAILS, **JSON)[0] == 403
        assert ask(served, "/api/dead?name=dead").status == 200
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_beside_an_owner_of_their_reader_it_is_refused_and_they_are_shown(changing: Served, folder: Path) -> None:
    with JournaledQueue(folder, "dead") as queue:
        queue.reader()
        status, said = post(changing, MAILS)
        assert status == 409
        assert "held by" in said["error"]
        assert len(dead_of(changing, "dead")["letters"]) == 4
    assert left(folder) == [1, 2, 3, 4]


def test_beside_owners_of_the_queues_they_go_back(changing: Served, folder: Path) -> None:
    """To own the queue of the letters is not to own its reader; and who owns their own queue has the items at once."""
    with JournaledQueue(folder, "dead"), JournaledQueue(folder, "mails") as queue:
        assert post(changing, MAILS)[0] == 200
        assert sorted(queue.get(timeout=30).data for _ in range(3)) == [b"data 1", b"data 2", b"data 4"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**MAILS, "id": True},
        {**MAILS, "id": "1"},
        {**MAILS, "keeper": "nobody"},
        {**MAILS, "queue": "../dead"},
        {**MAILS, "queue": "none"},
        {**MAILS, "from_queue": "none"},
        {**MAILS, "from_reader": None},
    ],
)
def test_what_is_no_request_is_refused(folder: Path, fields: dict[str, Any]) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises((ChangeRefused, ValueError)):
        requeue(str(folder), fields)
    assert left(folder) == [1, 2, 3, 4]
    assert {path.name for path in folder.rglob("*") if ".tmp" not in path.name} <= {
        *before,
        "dead+.lock",
        "dead+.checkpoint",
    }


def test_a_letter_that_cannot_go_back_stays_and_the_others_go(folder: Path) -> None:
    with JournaledQueue(folder, "dead") as queue:
        queue.put(letter(5, "no queue of this name, as it has spaces"))
    fields = {**MAILS, "from_queue": "no queue of this name, as it has spaces"}
    with pytest.raises(ChangeRefused, match="no origin"):
        requeue(str(folder), fields)
    assert left(folder) == [1, 2, 3, 4, 5]


def test_one_request_takes_so_long_and_the_next_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(START_MS)
    usual = DeadLetter.requeue

    def slow(self: DeadLetter) -> None:
        clock.advance(3)
        usual(self)

    monkeypatch.setattr(DeadLetter, "requeue", slow)
    assert requeue(str(folder), MAILS, clock) == ("2 dead letters are back in mails", True)
    assert len(left(folder)) == 2
    assert requeue(str(folder), MAILS, clock) == ("1 dead letter is back in mails", False)


# -- counting --------------------------------------------------------------------------------------------------------


def count_at_random(folder: Path, seed: int) -> None:
    """Letters come and go, in any order; what is counted step by step is what a count of all says."""
    dice = random.Random(seed)
    watch, box = FolderWatch(folder), LetterBox(str(folder), "box")
    with JournaledQueue(folder, "box", checkpoint_interval=3600, inbox_interval=None) as queue:
        there: dict[int, tuple[str, str] | None] = {}
        taken: dict[int, Any] = {}
        number = 0
        for _ in range(40):
            for _ in range(dice.randrange(6)):
                number += 1
                origin = (dice.choice(("a", "b")), dice.choice(("", "r"))) if dice.random() < 0.8 else None
                queue.put(b"x" if origin is None else letter(number, *origin))
                there[number] = origin
            for item in queue.get_many(dice.randint(1, 4), timeout=0) if len(there) > len(taken) + 4 else ():
                taken[item.id] = item
            for each in dice.sample(sorted(taken), min(len(taken), dice.randrange(3))):
                queue.commit(taken.pop(each))
                del there[each]
            queue.checkpoint()
            box.look(watch.look()["box"])
            expected = Counter(LetterOrigin(*each) for each in there.values() if each is not None)
            assert box.counts() == expected
            assert (box.others, box.is_whole) == (sum(each is None for each in there.values()), True)
            newest = [each.id for each in box.newest(3, "a")]
            assert newest == sorted((n for n, each in there.items() if each and each[0] == "a"), reverse=True)[:3]


def test_counts_are_right_at_each_step(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        count_at_random(tmp_path / str(number), SEED + number)


def test_a_planted_fault_done_letters_are_counted_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LetterBox._forget_done
    monkeypatch.setattr(
        LetterBox,
        "_forget_done",
        lambda self, saved: usual(self, saved.__replace__(readers=[r.__replace__(done=()) for r in saved.readers])),
    )
    with pytest.raises(AssertionError):
        test_counts_are_right_at_each_step(tmp_path)


def test_many_letters_are_counted_at_several_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "READ_AT_ONCE", 2)
    one, box = FolderWatch(folder).look()["dead"], LetterBox(str(folder), "dead")
    seen = []
    while not box.is_whole:
        box.look(one)
        seen.append(box.counts().total())
    assert seen == [2, 3, 4]


def test_of_many_queues_some_are_asked_at_each_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "PROBED_AT_ONCE", 2)
    for number in range(5):
        with JournaledQueue(folder, f"a{number}") as queue:
            queue.put(b"x")
    queues = FolderWatch(folder).look()
    found, asked = FoundLetters(str(folder)), 1
    while not found.boxes_of("mails", queues):
        asked += 1
    assert asked == 4, "a0 to a4, bills and dead, two at a request"


def test_the_page_waits_longer_than_a_request_takes() -> None:
    script = (Path(changes.__file__).parent / "static" / "dashboard.js").read_text("utf-8")
    waits = re.search(r"ANSWER_MS = (\d+)", script)
    assert waits is not None
    assert int(waits[1]) / 2 >= changes.REQUEUE_SECONDS * 1000
