"""The dashboard in a real browser: figures that change, a thousand queues, hostile bytes, a server that goes and comes
back; and for each of these a planted fault that is seen.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kestrelpy import DeadLetter, JournaledQueue, dead_letters, inbox, inspect
from kestrelpy.letter import encode_letter
from kestrelpy.work import WorkQueue
from tests.dashboard.chromium import click, open_queue, rows, text_of, until
from tests.dashboard.conftest import complaints
from tests.dashboard.servers import dashboard, processor_seconds
from tests.support.budget import SHARE, takes_long
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE
from tests.support.queues import forge_jobs

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.usefixtures("installed")

MANY = 1000 if SHARE >= 0.25 else 250
SERVICE = """
import sys, time
from kestrelpy import JournaledQueue
with JournaledQueue(sys.argv[1], "service", checkpoint_interval=0.1) as queue:
    while True:
        queue.put_many([b"x" * 50] * 20)
        queue.commit_many(queue.get_many(10))
        time.sleep(0.02)
"""
"""A service that puts twice as much as it takes."""
EVIL = "window.evil=1"
HOSTILE = (
    f"<script>{EVIL}</script>",
    f'<img src="x" onerror="{EVIL}">',
    f"</td></table><svg onload={EVIL}>",
    f'"><iframe srcdoc="<script>parent.{EVIL}</script>">',
    f"<a href='javascript:{EVIL}'>click</a>",
    "<img src=x onerror=alert(1)>",
    "{{7*7}}${7*7}",
    "\u202egnp.exe\x1b[2J\0",
)
WIDE_OPEN = (
    "from kestrelpy.dashboard import app, guard\nguard.HEADERS = ()\n"
    "usual = app._Answers.__init__\ndef begin(self, *args, **options):\n    usual(self, *args, **options)\n"
    "    script = self._files['dashboard.js'].replace(b'made.textContent = text', b'made.innerHTML = text')\n"
    "    assert script != self._files['dashboard.js']\n    self._files = {**self._files, 'dashboard.js': script}\n"
    "app._Answers.__init__ = begin"
)
"""Text as markup, and no policy."""


def number(text: str) -> float:
    return float(text.replace(",", "").replace("k", "e3").replace("\u2013", "nan"))


def ready(driver: Chrome, url: str) -> None:
    """Go to the page, and wait for figures."""
    driver.get(url)
    until(lambda: rows(driver), "rows of the table")


def evil(driver: Chrome) -> bool:
    """Whether a script of somebody else has run."""
    from selenium.common.exceptions import NoAlertPresentException, UnexpectedAlertPresentException

    try:
        driver.switch_to.alert.accept()
    except NoAlertPresentException:
        pass
    else:
        return True
    try:
        return bool(driver.execute_script("return window.evil === 1"))
    except UnexpectedAlertPresentException:
        return True


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Path]:
    """A folder in which another process works."""
    folder = tmp_path / "queues"
    process = subprocess.Popen([sys.executable, "-c", SERVICE, str(folder)], cwd=ROOT)
    try:
        until(lambda: list(folder.glob("service+.checkpoint")), "the service's first checkpoint")
        yield folder
    finally:
        process.kill()
        process.wait()


def test_figures_change_while_a_service_works(driver: Chrome, service: Path) -> None:
    with dashboard(service) as served:
        ready(driver, served.url)
        first = number(rows(driver)["service"][1])
        until(lambda: number(rows(driver)["service"][1]) > first + 100, "more items")
        until(lambda: number(rows(driver)["service"][2]) > 50, "a rate in")
        until(lambda: number(rows(driver)["service"][3]) > 20, "a rate out")
        open_queue(driver, "service")
        until(lambda: driver.execute_script("return document.querySelectorAll('#rate-chart path').length"), "lines")
        script = "return document.querySelector('#rate-chart svg').getAttribute('aria-label')"
        label = driver.execute_script(script)  # in one step: each refresh draws another chart
        assert re.match(r"Now: in [\d.,k]+, out [\d.,k]+", str(label))
        assert text_of(driver, "state").startswith("as of")


def test_a_planted_fault_figures_that_stand_still_are_seen(driver: Chrome, service: Path) -> None:
    patch = "from kestrelpy.dashboard.sampler import Sampler\nSampler._run = lambda self: None"
    with dashboard(service, patched_by=patch) as served:
        ready(driver, served.url)
        before = rows(driver)["service"][1]
        ticks = text_of(driver, "state")
        until(lambda: text_of(driver, "state") != ticks, "a refresh")
        assert rows(driver)["service"][1] == before


# -- a thousand queues -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand queues, in ``make test`` a quarter of that: copies of one, under other names."""
    folder = tmp_path_factory.mktemp("many") / "queues"
    with JournaledQueue(folder, "one") as queue:
        queue.put_many([b"x" * 100] * 50)
        queue.commit_many(queue.get_many(20))
    files = [path for path in folder.iterdir() if path.name.startswith("one") and not path.name.endswith(".lock")]
    for at in range(MANY):
        for path in files:
            shutil.copy(path, folder / f"q{at:04d}{path.name[3:]}")
    for path in folder.glob("one*"):
        path.unlink()
    return folder


@takes_long
def test_a_thousand_queues_stay_usable(driver: Chrome, many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dashboard(many) as served:
        began = time.monotonic()
        ready(driver, served.url)
        first = time.monotonic() - began
        assert text_of(driver, "matching") == f"{MANY:,} of {MANY:,}"
        assert len(rows(driver)) == 50
        driver.execute_cdp_cmd("Performance.enable", {})
        click(driver, "#next")
        until(lambda: "q0050" in rows(driver), "the second page")
        driver.find_element("id", "filter").send_keys("177")
        until(lambda: list(rows(driver)) == ["q0177"], "the filtered table")
        driver.execute_script("document.getElementById('filter').value = ''")
        driver.find_element("id", "filter").send_keys(" \b")
        until(lambda: len(rows(driver)) == 50, "the whole table again")
        page, server, took = cost_of_refreshes(driver, served.process, 5)
    with capsys.disabled():
        print(
            f"\n{MANY:,} queues: first figures after {first:.2f} s; processor of a refresh: {page:.0f} ms in the page, "
        )
        print(f"{server:.0f} ms in the server with its looks; {took:.0f} ms until it is drawn")
    assert first < 3, "1 s on a machine of its own"
    assert page + server < 400, "200 ms on a machine of its own"


def cost_of_refreshes(driver: Chrome, process: subprocess.Popen[bytes], count: int) -> tuple[float, float, float]:
    """Milliseconds of processor that a refresh takes in the page and in the server, and until it is drawn."""

    def busy() -> float:
        metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def look() -> int:
        return int(driver.execute_script("return state.look"))

    page, server, seen, before = busy(), processor_seconds(process), 0, look()
    while seen < count:
        driver.execute_async_script(
            "const done = arguments[1], at = arguments[0];"
            "const wait = () => state.look === at ? setTimeout(wait, 20) : done(); wait()",
            before,
        )
        before, seen = look(), seen + 1
    took = float(driver.execute_script("return state.tookMs"))
    return (busy() - page) * 1000 / count, (processor_seconds(process) - server) * 1000 / count, took


@takes_long
def test_a_planted_fault_a_slow_look_is_seen(driver: Chrome, many: Path) -> None:
    patch = "import time\nfrom kestrelpy.inspection import followed\n"
    patch += "usual = followed.FollowedQueue.look\n"
    patch += "def look(self, *args):\n    end = time.thread_time() + 0.0006\n"
    patch += "    while time.thread_time() < end: pass\n    return usual(self, *args)\n"
    patch += "followed.FollowedQueue.look = look"
    with dashboard(many, patched_by=patch) as served:
        ready(driver, served.url)
        driver.execute_cdp_cmd("Performance.enable", {})
        driver.set_script_timeout(4 * PATIENCE)  # the dashboard looks less often where a look takes long
        try:
            page, server, _ = cost_of_refreshes(driver, served.process, 2)
        finally:
            driver.set_script_timeout(PATIENCE)
        assert page + server > 400


# -- hostile bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Items, tubes, file names and the folder's own name that would like to be markup."""
    return make_hostile(tmp_path / "<img src=x onerror=window.evil=1>" / "queues", HOSTILE)


@pytest.fixture
def without_dialogs(tmp_path: Path) -> Path:
    """The same without what opens a dialog: one that is open would stop the browser for the tests after it."""
    return make_hostile(tmp_path / "queues", tuple(text for text in HOSTILE if "alert" not in text))


def make_hostile(folder: Path, texts: tuple[str, ...]) -> Path:
    with JournaledQueue(folder, "items") as queue:
        for text in texts:
            queue.put(text.encode())
        queue.put(bytes(range(256)))
    forge_jobs(folder, texts, texts[0].encode())
    with JournaledQueue(folder, "letters") as queue:
        for number, text in enumerate(texts):
            queue.put(encode_letter(DeadLetter(text.encode(), text, text, number, 1, 2, 3, text)))
    with JournaledQueue(folder, "damaged") as queue:
        queue.put(b"x")
    next(folder.glob("damaged.*.segment")).write_bytes(b"\xff" * 200)
    for name in ("<script>window.evil=1<!--.mark", "<img src=x onerror=alert(1)>.lock", "a.<b>.segment"):
        (folder / name).write_bytes(b"")
    return folder


def look_at_everything(driver: Chrome, url: str) -> None:
    ready(driver, url)
    open_queue(driver, "items")
    until(lambda: evil(driver) or "Id" in text_of(driver, "newest"), "the newest items")
    if evil(driver):
        return
    open_queue(driver, "letters")
    until(lambda: evil(driver) or "Died" in text_of(driver, "dead"), "the dead letters")
    if evil(driver):
        return
    open_queue(driver, "work")
    until(lambda: evil(driver) or "Tube" in text_of(driver, "tubes"), "the tubes")
    until(lambda: evil(driver) or "Id" in text_of(driver, "newest"), "the newest jobs")


def test_hostile_bytes_and_names_do_not_run(driver: Chrome, hostile: Path) -> None:
    with dashboard(hostile) as served:
        look_at_everything(driver, served.url)
        assert not evil(driver)
        for text in HOSTILE[:7]:
            assert text in text_of(driver, "tubes")
        open_queue(driver, "items")
        until(lambda: HOSTILE[1] in text_of(driver, "newest"), "the item's bytes as text")
        shown = text_of(driver, "newest")
        assert r"\x1b[2J\x00" in shown
        assert r"\u202egnp" in shown
        assert "<img src=x" in text_of(driver, "folder")
        counts = driver.execute_script(
            "return ['script', 'img', 'iframe', 'a[href^=javascript]'].map(s => document.querySelectorAll(s).length)"
        )
        assert counts == [2, 1, 0, 0]  # those of the page itself
        open_queue(driver, "letters")
        until(lambda: HOSTILE[1] in text_of(driver, "dead"), "the letters as text")
        script = "return [...document.querySelectorAll('#dead tbody tr')[1].children].map(c => c.textContent)"
        cells = driver.execute_script(script)
        assert cells[0].startswith(r"{{7*7}}")
        assert cells[-2:] == [HOSTILE[6], HOSTILE[6]]
        assert r"\x1b[2J\x00" in text_of(driver, "dead")
        assert HOSTILE[0] in text_of(driver, "dead-origins")
        assert not evil(driver)
        open_queue(driver, "damaged")
        assert "no valid header" in text_of(driver, "detail-problem")
        assert not evil(driver)


def test_a_planted_fault_text_as_markup_runs(driver: Chrome, without_dialogs: Path) -> None:
    with dashboard(without_dialogs, patched_by=WIDE_OPEN) as served:
        look_at_everything(driver, served.url)
        assert evil(driver)
        driver.execute_script("window.stop()")
        driver.get("about:blank")
        driver.get_log("browser")  # type: ignore[no-untyped-call]


def test_a_planted_fault_letters_as_markup_run(driver: Chrome, without_dialogs: Path) -> None:
    """As before, with nothing else that is hostile on the page."""
    for name in ("items", "work"):
        for path in without_dialogs.glob(f"{name}[.+]*"):
            path.unlink()
    with dashboard(without_dialogs, patched_by=WIDE_OPEN) as served:
        ready(driver, served.url)
        driver.execute_script("document.getElementById('newest-panel').remove(); lookAtNewest = () => undefined")
        place = "element('div', {id: 'newest-panel'}, element('div', {id: 'newest'}))"
        driver.execute_script(f"byId('dead-panel').after({place})")
        open_queue(driver, "letters")
        until(lambda: evil(driver), "a script of a letter")
        driver.execute_script("window.stop()")
        driver.get("about:blank")
        driver.get_log("browser")  # type: ignore[no-untyped-call]


def test_the_policy_stops_what_the_page_would_let_through(driver: Chrome, without_dialogs: Path) -> None:
    """Markup in spite of all: nothing runs, and the browser's log says so."""
    patch = WIDE_OPEN.replace("guard.HEADERS = ()\n", "")
    with dashboard(without_dialogs, patched_by=patch) as served:
        driver.get(served.url)
        said = until(lambda: complaints(driver), "a complaint of the browser")
        assert any("TrustedHTML" in text or "Content Security Policy" in text for text in said)
        assert not evil(driver)
        driver.get("about:blank")
        driver.get_log("browser")  # type: ignore[no-untyped-call]


def test_an_inline_script_is_refused_and_seen(driver: Chrome, queues: Path) -> None:
    patch = "from kestrelpy.dashboard import app\nusual = app._Answers.__init__\n"
    patch += "def begin(self, *args, **options):\n    usual(self, *args, **options)\n"
    patch += "    page = self._files['index.html'].replace(b'<main', b'<script>window.evil=1</script><main')\n"
    patch += "    self._files = {**self._files, 'index.html': page}\napp._Answers.__init__ = begin"
    with dashboard(queues, patched_by=patch) as served:
        ready(driver, served.url)
        assert not evil(driver)
        assert any("inline script" in text for text in complaints(driver))


def test_nothing_comes_from_another_host(driver: Chrome, queues: Path) -> None:
    with dashboard(queues) as served:
        ready(driver, served.url)
        open_queue(driver, "orders")
        names = driver.execute_script("return performance.getEntries().map(e => e.name).filter(n => n.includes('://'))")
        assert len(names) > 5
        assert [name for name in names if not name.startswith(served.url)] == []
        assert driver.get_cookies() == []


# -- tokens and data -------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_leaves_the_address(driver: Chrome, queues: Path) -> None:
    with dashboard(queues, "--allow-changes") as served:
        driver.get(served.url)
        until(lambda: driver.find_element("id", "token-form").is_displayed(), "the question for the token")
        assert rows(driver) == {}
        driver.find_element("id", "token").send_keys("not-the-right-token")
        click(driver, "#token-form button")
        until(lambda: driver.find_element("id", "token-form").is_displayed(), "the question again")
        assert rows(driver) == {}
        driver.find_element("id", "token").send_keys(served.token)
        click(driver, "#token-form button")
        until(lambda: rows(driver), "figures")
        driver.get("about:blank")
        ready(driver, served.whole_url)
        assert driver.current_url == served.url
        kept = driver.execute_script("return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert json.loads(kept) == [{}, {}, ""]


def test_no_data_shows_none(driver: Chrome, queues: Path) -> None:
    with dashboard(queues) as served:
        ready(driver, served.url)
        open_queue(driver, "orders")
        until(lambda: "order 29" in text_of(driver, "newest"), "the newest item")
    with dashboard(queues, "--no-data") as served:
        ready(driver, served.url)
        open_queue(driver, "orders")
        assert not driver.find_element("id", "newest-panel").is_displayed()
        assert "order 2" not in driver.page_source


# -- trouble ---------------------------------------------------------------------------------------------------------


def test_a_server_that_stops_is_said_and_one_that_is_back_is_used(driver: Chrome, queues: Path) -> None:
    with dashboard(queues) as served:
        ready(driver, served.url)
        port = served.port
    until(lambda: "does not answer" in text_of(driver, "banner"), "the page says that the server is gone")
    assert driver.find_element("id", "banner").is_displayed()
    assert text_of(driver, "state") == "not connected"
    assert "orders" in rows(driver)  # as of before
    with JournaledQueue(queues, "later") as queue:
        queue.put(b"x")
    with dashboard(queues, port=port):
        until(lambda: "later" in rows(driver), "figures of the new server")
        assert not driver.find_element("id", "banner").is_displayed()
        assert text_of(driver, "state").startswith("as of")


def test_a_damaged_queue_is_in_trouble(driver: Chrome, queues: Path) -> None:
    with dashboard(queues) as served:
        ready(driver, served.url)
        assert rows(driver)["alerts"][8] == "fine"
        next(queues.glob("alerts.*.segment")).write_bytes(b"\xff" * 200)
        until(lambda: rows(driver)["alerts"][8] == "in trouble", "trouble")
        assert rows(driver)["orders"][8] == "fine"
        open_queue(driver, "alerts")
        assert driver.find_element("id", "detail-problem").is_displayed()


def test_what_waits_in_the_inbox_is_shown(driver: Chrome, queues: Path) -> None:
    with dashboard(queues) as served:
        ready(driver, served.url)
        assert rows(driver)["alerts"][8] == "fine"
        for name in ("alerts", "order", "order"):
            inbox.put_many(queues, name, [b"x"])
        waits = "2 batches pending, no owner yet"  # of which a look may have seen one
        until(lambda: rows(driver).get("order", [""] * 9)[8] == waits, "the name that is no queue")
        until(lambda: rows(driver)["alerts"][8] == "1 batch pending", "what waits for a queue")
        assert text_of(driver, "matching") == "4 of 4"
        open_queue(driver, "order")
        assert "2 batches pending, no owner yet" in text_of(driver, "facts")
        assert text_of(driver, "detail-kind") == "no queue yet"
        assert not driver.find_element("id", "verify").is_displayed()  # it would be answered: no such queue
        until(lambda: "2 published batches wait for order: " in text_of(driver, "dead-note"), "a note")
        open_queue(driver, "alerts")
        assert driver.find_element("id", "verify").is_displayed()
        until(lambda: "1 published batch waits for alerts: " in text_of(driver, "dead-note"), "a note")


def test_a_planted_fault_a_page_that_hides_trouble_is_seen(driver: Chrome, queues: Path) -> None:
    """The server gone and a queue damaged, and the page says neither."""
    patch = "from kestrelpy.dashboard import app\nusual = app._Answers.__init__\n"
    patch += "def begin(self, *args, **options):\n    usual(self, *args, **options)\n"
    patch += "    script = self._files['dashboard.js']\n"
    patch += "    script = script.replace(b'function failed(error) {', b'function failed() { return;')\n"
    patch += "    script = script.replace(b'one.problem', b'\"\"')\n"
    patch += "    assert len(script) != len(self._files['dashboard.js'])\n"
    patch += "    self._files = {**self._files, 'dashboard.js': script}\napp._Answers.__init__ = begin"
    next(queues.glob("alerts.*.segment")).write_bytes(b"\xff" * 200)
    with dashboard(queues, patched_by=patch) as served:
        ready(driver, served.url)
        assert rows(driver)["alerts"][8] != "in trouble"
    pause = threading.Event()
    pause.wait(3)  # a refresh and a half
    assert not driver.find_element("id", "banner").is_displayed()


def test_a_check_on_request_does_not_hold_up_the_figures(driver: Chrome, queues: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    patch = "import os, time\nfrom kestrelpy.dashboard import checking\nusual = checking.verify\n"
    patch += f"def verify(*args):\n    while not os.path.exists({str(gate)!r}):\n        time.sleep(0.01)\n"
    patch += "    return usual(*args)\nchecking.verify = verify"
    with dashboard(queues, patched_by=patch) as served:
        ready(driver, served.url)
        open_queue(driver, "orders")
        click(driver, "#verify")
        until(lambda: "Checking" in text_of(driver, "verify-result"), "the check begins")
        with JournaledQueue(queues, "orders") as queue:
            queue.put(b"late")
        until(lambda: rows(driver)["orders"][1] == "31", "figures go on")
        assert "Checking" in text_of(driver, "verify-result")
        gate.touch()
        until(lambda: "31 items in" in text_of(driver, "verify-result"), "the result")
        assert "no damage" in text_of(driver, "verify-result")


# -- changes, by hand ------------------------------------------------------------------------------------------------


def test_a_reader_is_dropped_after_a_question(driver: Chrome, queues: Path) -> None:
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "orders")
        until(lambda: "Drop" in text_of(driver, "readers"), "the button")
        driver.execute_script("document.querySelectorAll('#readers button')[1].click()")
        until(lambda: driver.find_element("id", "ask").is_displayed(), "the question")
        assert "mail of orders" in text_of(driver, "ask-text")
        click(driver, "#ask-no")
        assert {reader.name for reader in inspect(queues, "orders").readers} == {"audit", "mail"}
        driver.execute_script("document.querySelectorAll('#readers button')[1].click()")
        click(driver, "#ask-yes")
        until(lambda: "is dropped" in text_of(driver, "said"), "what was done")
        assert {reader.name for reader in inspect(queues, "orders").readers} == {"audit"}


def test_a_question_right_after_another_has_its_own_answer(driver: Chrome, queues: Path) -> None:
    """A dialog tells that it was closed a moment later: the next question may be open by then."""
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "orders")
        until(lambda: "Drop" in text_of(driver, "readers"), "the button")
        drop = "document.querySelectorAll('#readers button')[1].click();"
        driver.execute_script(f"{drop} document.getElementById('ask-no').click(); {drop}")
        click(driver, "#ask-yes")
        until(lambda: "is dropped" in text_of(driver, "said"), "what was done")
    assert {reader.name for reader in inspect(queues, "orders").readers} == {"audit"}


@takes_long
def test_a_question_left_with_escape_is_answered_no(driver: Chrome, queues: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "orders")
        until(lambda: "Drop" in text_of(driver, "readers"), "the button")
        for key in (Keys.ESCAPE, Keys.ENTER):  # No has the focus
            driver.execute_script("document.querySelectorAll('#readers button')[1].click()")
            until(lambda: driver.find_element("id", "ask").is_displayed(), "the question")
            driver.switch_to.active_element.send_keys(key)
            until(lambda: not driver.find_element("id", "ask").is_displayed(), "no question")
        looked = driver.execute_script("return state.look")
        until(lambda: driver.execute_script("return state.look") > looked, "a refresh")
    assert {reader.name for reader in inspect(queues, "orders").readers} == {"audit", "mail"}


def test_jobs_are_kicked_after_a_question(driver: Chrome, queues: Path) -> None:
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "work")
        until(lambda: "Kick" in text_of(driver, "tubes"), "the button")
        driver.execute_script("document.querySelector('#tubes button').click()")
        until(lambda: driver.find_element("id", "ask-input").is_displayed(), "the question")
        click(driver, "#ask-yes")
        until(lambda: "3 jobs of prints" in text_of(driver, "said"), "what was done")
    with WorkQueue(queues, "work") as jobs:
        assert jobs.stats_tube("prints").buried == 0


def mourn(folder: Path, count: int) -> None:
    """So many dead letters of ``orders``, given up by the reader ``mail``."""
    with JournaledQueue(folder, "dead", sync="never") as queue:
        letters = (DeadLetter(b"lost %d" % n, "orders", "mail", n, 1, n, 3, f"reason {n}") for n in range(1, count + 1))
        queue.put_many([encode_letter(letter) for letter in letters])


def press(driver: Chrome, table: str, row: int) -> None:
    """The button in that row of a table, and Yes."""
    until(lambda: "Requeue" in text_of(driver, table), "the button")
    driver.execute_script(f"document.querySelectorAll('#{table} tbody button')[{row}].click()")
    until(lambda: driver.find_element("id", "ask").is_displayed(), "the question")
    click(driver, "#ask-yes")


@takes_long
def test_dead_letters_go_back_after_a_question(driver: Chrome, queues: Path) -> None:
    mourn(queues, 5)
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "orders")
        press(driver, "dead", 1)
        until(lambda: "1 dead letter is back in orders" in text_of(driver, "said"), "what was done")
        assert "item 4, given up by orders, reader mail" in text_of(driver, "ask-text")
        with dead_letters(queues, "dead") as letters:
            assert [letter.id for letter in letters] == [1, 2, 3, 5]
        until(lambda: "reason 4" not in text_of(driver, "dead"), "the letters that are left")
        press(driver, "dead-origins", 0)
        until(lambda: "4 dead letters are back" in text_of(driver, "said"), "what was done")
        until(lambda: "Requeue" not in text_of(driver, "dead-panel"), "no letters")
        assert "batches wait for orders: its owner" in text_of(driver, "dead-note")
    with JournaledQueue(queues, "orders") as queue:
        back = [item.data for item in queue.reader("audit").get_many(100)][30:]
    assert sorted(back) == [b"lost %d" % number for number in range(1, 6)]
    assert back[0] == b"lost 4"


@takes_long
def test_ten_thousand_dead_letters_stay_usable(driver: Chrome, queues: Path) -> None:
    mourn(queues, 10_000)
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "dead")
        until(lambda: "10,000" in text_of(driver, "dead-origins"), "all of them are counted")
        assert driver.execute_script("return document.querySelectorAll('#dead tbody tr').length") == 20
        before = driver.execute_script("return state.look")
        until(lambda: driver.execute_script("return state.look") > before, "a refresh")
        assert driver.execute_script("return state.tookMs") < 2000
        press(driver, "dead", 0)
        until(lambda: "1 dead letter is back" in text_of(driver, "said"), "what was done")
        until(lambda: "9,999" in text_of(driver, "dead-origins"), "one less")


def test_without_changes_there_is_no_button(driver: Chrome, queues: Path) -> None:
    mourn(queues, 3)
    with dashboard(queues) as served:
        ready(driver, served.url)
        open_queue(driver, "orders")
        assert "Drop" not in text_of(driver, "readers")
        until(lambda: "reason 3" in text_of(driver, "dead"), "the letters")
        assert driver.execute_script("return document.querySelectorAll('#dead-panel button').length") == 0


# -- for everybody ---------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough_and_keeps_its_place(driver: Chrome, queues: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    def focused() -> Any:
        return driver.switch_to.active_element

    with dashboard(queues) as served:
        ready(driver, served.url)
        names: list[str] = []
        for _ in range(40):
            focused().send_keys(Keys.TAB)
            names.append(focused().text)
            if names[-1] == "orders":
                break
        assert "Items" in names  # the heads of columns are among what is reached
        looked = driver.execute_script("return state.look")
        with JournaledQueue(queues, "aaa") as queue:  # a row before it
            queue.put(b"x")
        until(lambda: "aaa" in rows(driver) and driver.execute_script("return state.look") > looked, "another row")
        assert focused().text == "orders"
        focused().send_keys(Keys.ENTER)
        until(lambda: "Ever put" in text_of(driver, "facts"), "the queue's figures")
        assert text_of(driver, "detail-title") == "orders"


def test_everything_has_a_name_for_screen_readers(driver: Chrome, queues: Path) -> None:
    with dashboard(queues, "--allow-changes") as served:
        ready(driver, served.whole_url)
        open_queue(driver, "orders")
        until(lambda: driver.execute_script("return document.querySelectorAll('#lag-chart svg').length"), "a chart")
        nameless = driver.execute_script(
            "return [...document.querySelectorAll('button, input, svg, section, dialog')].filter(e => !("
            "e.textContent.trim() && e.tagName === 'BUTTON' || e.getAttribute('aria-label') || (e.labels || []).length"
            " || document.getElementById(e.getAttribute('aria-labelledby')))).map(e => e.outerHTML.slice(0, 80))"
        )
        assert nameless == []
        driver.execute_script("document.querySelectorAll('#head button')[1].click()")
        until(lambda: driver.find_element("css selector", "#head [aria-sort]").text.startswith("Items"), "sorted")
        assert driver.execute_script("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(driver: Chrome, queues: Path, scheme: str) -> None:
    with dashboard(queues) as served:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        ready(driver, served.url)
        names = ("ground", "panel", "text", "faint", "accent", "accent-text", "bad", "bad-ground", "good", "hover")
        script = "const s = getComputedStyle(document.documentElement); "
        script += "return arguments[0].map(n => s.getPropertyValue('--' + n).trim())"
        colour = dict(zip(names, driver.execute_script(script, names), strict=True))
        pairs = [(front, back) for front in ("text", "faint", "accent", "bad", "good") for back in ("ground", "panel")]
        pairs += [("accent-text", "accent"), ("bad", "bad-ground"), ("text", "hover"), ("accent", "hover")]
        weak = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in pairs}
        assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.1."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
