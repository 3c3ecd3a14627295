"""A headless Chromium (Debian's ``chromium`` and ``chromium-driver``), driven by selenium, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

POLL_SECONDS = 0.05


def missing() -> str:
    """What is not installed; empty if all is there."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"there is no {program}: apt install {package}"
    for module in ("selenium", "starlette", "uvicorn"):
        if find_spec(module) is None:
            return f"{module} is not installed: the extra [dev] has it"
    return ""


@contextlib.contextmanager
def browser(*, width: int = 1400, height: int = 1000, dark: bool = False) -> Iterator[Chrome]:
    """A browser of its own, with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--lang=en-GB", "--hide-scrollbars"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses root with it
        if dark:
            flags.append("--force-dark-mode")
        for flag in flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(PATIENCE)
            driver.set_script_timeout(PATIENCE)
            yield driver
        finally:
            driver.quit()


def until(true: Callable[[], Any], what: str) -> Any:
    """Wait until it is true, and return it. A page is asked now and then, not as often as a thread of our own."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / POLL_SECONDS)):
        if found := true():
            return found
        pause.wait(POLL_SECONDS)
    raise AssertionError(f"in vain: {what}")


def text_of(driver: Chrome, element_id: str) -> str:
    """The text of an element as the page has it, shown or not."""
    return str(driver.execute_script("return document.getElementById(arguments[0]).textContent", element_id))


def rows(driver: Chrome) -> dict[str, list[str]]:
    """The rows of the table of queues: their cells by name."""
    script = "return [...document.querySelectorAll('#rows tr')].map(r => [...r.children].map(c => c.textContent))"
    return {cells[0]: cells for cells in driver.execute_script(script)}


def click(driver: Chrome, selector: str) -> None:
    """Click what a selector finds, as a user does."""
    driver.find_element("css selector", selector).click()


def open_queue(driver: Chrome, name: str) -> None:
    """Click a queue's name, and wait for its figures."""
    until(lambda: name in rows(driver), f"{name} in the table")
    script = "[...document.querySelectorAll('#rows button')].find(b => b.textContent === arguments[0]).click()"
    driver.execute_script(script, name)
    until(lambda: "Ever put" in text_of(driver, "facts"), f"figures of {name}")
