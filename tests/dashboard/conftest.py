"""A folder of queues, dashboards of it, and one browser for all tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.work import WorkQueue
from tests.dashboard import chromium

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def installed() -> None:
    """A browser and what drives it. CI must have them."""
    why = chromium.missing()
    if why and os.environ.get("CI"):
        pytest.fail(f"CI must have a browser: {why}")
    if why:
        pytest.skip(why)


@pytest.fixture(scope="module")
def driver(installed: None) -> Iterator[Chrome]:
    with chromium.browser() as driver:
        yield driver


@pytest.fixture(autouse=True)
def clean_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test in a browser: nothing was refused by the page's policy, and no script has failed."""
    if "driver" not in request.fixturenames:
        yield
        return
    driver: Chrome = request.getfixturevalue("driver")
    driver.get_log("browser")  # type: ignore[no-untyped-call]
    yield
    assert complaints(driver) == []
    driver.get("about:blank")


def complaints(driver: Chrome) -> list[str]:
    """What the browser says about policies and failed scripts. That a server is gone is no complaint."""
    said = [str(entry["message"]) for entry in driver.get_log("browser")]  # type: ignore[no-untyped-call]
    return [text for text in said if "net::ERR" not in text and "Failed to load resource" not in text]


@pytest.fixture
def queues(tmp_path: Path) -> Path:
    """A folder of three queues, for one test."""
    return make_queues(tmp_path / "queues")


def make_queues(folder: Path) -> Path:
    """A queue with two readers, one with the default reader, and one of jobs."""
    with JournaledQueue(folder, "orders") as queue:
        mail = queue.reader("mail")
        queue.reader("audit")
        queue.put_many([b"order %d" % number for number in range(30)])
        mail.commit_many(mail.get_many(10))
    with JournaledQueue(folder, "alerts") as queue:
        queue.put(b"alert")
    with WorkQueue(folder, "work") as jobs, jobs.session() as session:
        for number in range(5):
            jobs.put(b"job %d" % number, tube="prints")
        session.watch("prints")
        for _ in range(3):
            session.reserve(timeout=0).bury()
    return folder
