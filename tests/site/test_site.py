"""The site builds without a warning, holds every public name, finds it by its search, and asks no other host.

``make docs`` builds the same. Each check is tested on a planted fault.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import portalocker
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tests.dashboard import chromium
from tests.support import api_page, site_pages
from tests.support.budget import takes_long
from tests.support.paths import ROOT

CONFIG = ROOT / "mkdocs.yml"
LOADS = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
}
"""Elements that fetch something by themselves, and the attributes that say from where."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it; once for all processes of a run."""
    base, run = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = base.parent / f"site-{run}" if run else base / "site"
    with portalocker.Lock(f"{folder}.lock", timeout=120):
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "WARNING" not in done.stderr, done.stderr
    return folder


class _Page(HTMLParser):
    """The ids of a page, the hosts that it fetches from, and what stands in its paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.foreign: list[str] = []
        self.paragraphs: list[str] = []
        self._is_in_paragraph = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        for name in LOADS.get(tag, ()):
            is_icon_of_text = tag == "link" and given.get("rel") in ("canonical", "next", "prev")
            if re.search(r"(^|[\s,])(https?:)?//", given.get(name, "")) and not is_icon_of_text:
                self.foreign.append(f"{tag} {name}={given[name]}")
        if tag == "p":
            self._is_in_paragraph = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._is_in_paragraph = False

    def handle_data(self, data: str) -> None:
        if self._is_in_paragraph:
            self.paragraphs[-1] += data


def unrendered(page: _Page) -> list[str]:
    """Paragraphs in which Markdown is left: a list without a blank line before it, a fence, the word after a fence."""
    return [text for text in page.paragraphs if re.search(r"(^|\n)(- |\d+\. )|```|\bnorun\b", text)]


def foreign_styles(css: str) -> list[str]:
    """What a style sheet fetches from another host."""
    return re.findall(r"(?:url\(|@import\s*)[\"']?((?:https?:)?//[^\"')\s]+)", css)


def public_names(text: str) -> dict[str, list[str]]:
    """By module: the names that a page like ``docs/api.md`` has, those of methods as ``Class.method``."""
    found: dict[str, list[str]] = {}
    module, owner = "", ""
    for line in text.splitlines():
        if match := re.match(r"## (kestrelpy\S*)", line):
            module = match[1]
            found[module] = []
        elif match := re.match(r"### (Errors of .*|\w+)$", line):
            owner = "" if match[1].startswith("Errors of") else match[1]
            found[module] += [owner] if owner else []
        elif match := re.match(r"- `(?:async )?(\w+)", line):
            found[module].append(f"{owner}.{match[1]}" if owner else match[1])
    return found


def lacking(names: dict[str, list[str]], anchors: dict[str, set[str]]) -> list[str]:
    """Names without an anchor on the page of their module."""
    return [f"{mod}.{name}" for mod, each in names.items() for name in each if f"{mod}.{name}" not in anchors[mod]]


def private(anchors: set[str]) -> list[str]:
    """Anchors of names that nobody but the library calls."""
    return sorted(each for each in anchors if each.startswith("kestrelpy.") and "._" in each)


def _names() -> dict[str, list[str]]:
    return public_names(api_page.PAGE.read_text("utf-8"))


@takes_long
def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    names = _names()
    assert {"JournaledQueue.get", "dead_letters", "QueueFull"} <= {*names["kestrelpy"]}
    anchors = {name: _Page((site / "reference" / name / "index.html").read_text("utf-8")).ids for name in names}
    assert lacking(names, anchors) == []
    assert [each for found in anchors.values() for each in private(found)] == []


@takes_long
def test_the_search_knows_every_public_name(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    known = {entry["location"]: entry["title"] for entry in entries}
    names = _names()
    anchors = {
        name: {place.partition("#")[2] for place in known if place.startswith(f"reference/{name}/#")} for name in names
    }
    assert lacking(names, anchors) == []
    assert "dead_letters" in known["reference/kestrelpy/#kestrelpy.dead_letters"]


@takes_long
def test_no_page_asks_another_host_or_shows_markdown(site: Path) -> None:
    pages = {path: _Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 40
    foreign = [(path.relative_to(site), each) for path, page in pages.items() for each in page.foreign]
    foreign += [
        (path.relative_to(site), url) for path in site.rglob("*.css") for url in foreign_styles(path.read_text())
    ]
    assert foreign == []
    assert [(path.relative_to(site), text) for path, page in pages.items() for text in unrendered(page)] == []


@takes_long
def test_each_example_is_a_page(site: Path) -> None:
    for path in site_pages.examples():
        page = site / "cookbook" / path.stem / "index.html"
        assert page.exists()
        assert f'href="{path.stem}/"' in (site / "cookbook" / "index.html").read_text("utf-8").replace(
            "../cookbook/", ""
        )


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site behind a server of its own."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@takes_long
def test_search_finds_a_name_and_opens_its_place(address: str) -> None:
    why = chromium.missing()
    if why:
        assert not os.environ.get("CI"), f"CI must have a browser: {why}"
        pytest.skip(why)
    with chromium.browser() as driver:
        driver.get(address)
        driver.find_element("css selector", "input.md-search__input").send_keys("dead_letters")
        first = "return document.querySelector('.md-search-result__item a.md-search-result__link')"
        found = chromium.until(lambda: driver.execute_script(first), "a result of the search")
        assert found.get_attribute("href").partition("?")[0].startswith(address)
        script = "return [...document.querySelectorAll('.md-search-result__item a')].map(a => a.getAttribute('href'))"
        results = [href.partition("?")[0] + "#" + href.partition("#")[2] for href in driver.execute_script(script)]
        assert any(href.endswith("reference/kestrelpy/#kestrelpy.dead_letters") for href in results[:3]), results
        driver.execute_script(
            "[...document.querySelectorAll('.md-search-result__item a')]"
            ".find(a => a.getAttribute('href').endsWith('#kestrelpy.dead_letters')).click()"
        )
        heading = "const at = document.getElementById('kestrelpy.dead_letters'); return at && at.textContent"
        chromium.until(lambda: driver.execute_script(heading), "the place of dead_letters")
        assert "dead_letters" in driver.execute_script(heading)
        assert driver.current_url.endswith("#kestrelpy.dead_letters")
        fetched = driver.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert fetched
        assert [url for url in fetched if not url.startswith((address, "data:", "blob:"))] == []


# -- the above sees what it is for, and links are followed -----------------------------------------------------------


def test_a_page_that_asks_another_host_is_seen() -> None:
    assert _Page('<script src="https://unpkg.com/x.js"></script>').foreign
    assert _Page('<link rel="stylesheet" href="//fonts.example.org/x">').foreign
    assert _Page('<img srcset="small.png 1x, https://example.org/x.png 2x">').foreign
    assert not _Page('<a href="https://example.org">text</a><img src="x.png"><link rel="next" href="../x/">').foreign
    assert foreign_styles("@import 'https://example.org/x.css'; a { background: url(//example.org/y) }")
    assert not foreign_styles("a { background: url(y.png); mask: url('data:image/svg+xml;utf8,<svg>') }")


def test_markdown_that_is_left_is_seen() -> None:
    assert unrendered(_Page("<p>Three things:\n- one\n- two</p>"))
    assert unrendered(_Page("<p><code>python norun\nx = 1</code></p>"))
    assert not unrendered(_Page("<p>One - or two.</p><ul><li>three</li></ul>"))


def test_a_name_without_a_place_is_seen() -> None:
    page = "## kestrelpy\n### Item\n- `commit()`: x\n- `async aget() -> int`: x\n"
    page += "### Errors of kestrelpy\n- `Full(Error)`: x\n"
    names = public_names(page)
    assert names == {"kestrelpy": ["Item", "Item.commit", "Item.aget", "Full"]}
    assert lacking(names, {"kestrelpy": {"kestrelpy.Item", "kestrelpy.Item.aget", "kestrelpy.Full"}}) == [
        "kestrelpy.Item.commit"
    ]


def test_a_private_name_in_the_reference_is_seen() -> None:
    assert private({"kestrelpy.Item", "kestrelpy.Item.__init__", "_top"}) == ["kestrelpy.Item.__init__"]


@pytest.mark.parametrize("link", ["nowhere.md", "page.md#nowhere", "/page.md"])
def test_a_dead_link_fails_the_build(tmp_path: Path, link: str) -> None:
    """As strictly as the site is built, but two pages and no reference."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# A page\n\n## A part\n")

    def made(target: str) -> None:
        (docs / "index.md").write_text(f"# Start\n\n[there]({target})\n")
        with CONFIG.open("rb") as opened:
            build(
                load_config(
                    opened,
                    docs_dir=str(docs),
                    site_dir=str(tmp_path / "site"),
                    strict=True,
                    nav=["index.md", "page.md"],
                    hooks=[],
                    plugins=[],
                )
            )

    made("page.md#a-part")
    with pytest.raises(Abort):
        made(link)


def test_links_to_files_outside_docs_are_followed() -> None:
    page = "[a](../CHANGELOG.md) [b](guide.md#x) [c](../contrib/grafana) [d](../tests/conftest.py) "
    page += "[e](https://e.org) [f](#g)"
    assert site_pages.rewritten(page, "metrics.md") == (
        "[a](changes.md) [b](guide.md#x) [c](source/contrib/grafana/index.md) [d](source/tests/conftest.py.txt) "
        "[e](https://e.org) [f](#g)"
    )
    assert site_pages.rewritten("[a](docs/guide.md#x) [b](CONTRIBUTING.md)", "index.md") == (
        "[a](guide.md#x) [b](contributing.md)"
    )
    assert site_pages.rewritten("[a](../docs/ids.md)", "tests.md") == "[a](ids.md)"
    assert site_pages.rewritten("[a](../examples/crawler.py) [b](../examples)", "guide.md") == (
        "[a](cookbook/crawler.md) [b](cookbook/index.md)"
    )
    assert site_pages.rewritten("[a](crawler.py)", "cookbook/index.md") == "[a](crawler.md)"
    assert site_pages.rewritten("[a](../docs/guide.md#x)", "cookbook/crawler.md") == "[a](../guide.md#x)"
    assert (
        site_pages.rewritten("[a][b] c.\n\n[b]: ../Makefile\n", "guide.md") == "[a][b] c.\n\n[b]: source/Makefile.txt\n"
    )
    code = "```python norun\n[a](docs/guide.md)\n```\n"
    assert site_pages.rewritten(code, "index.md") == "```python\n[a](docs/guide.md)\n```\n"


def test_an_example_becomes_a_page_and_none_do_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_pages, "EXAMPLES", tmp_path / "examples")
    assert site_pages.examples() == []
    assert "no programs yet" in site_pages.cookbook()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "log_shipper.py").write_text('"""Ships logs: ``put``.\n\nAnd\nmore.\n"""\n\nprint(1)\n')
    (tmp_path / "examples" / "_helper.py").write_text('"""No example."""\n')
    (only,) = site_pages.examples()
    assert site_pages.example(only) == (
        "# Log shipper\n\nShips logs: `put`.\n\nAnd more.\n\n"
        "`examples/log_shipper.py`:\n\n`````python\nprint(1)\n`````\n"
    )
    assert "- [Log shipper](log_shipper.py): Ships logs: `put`." in site_pages.cookbook()
    (tmp_path / "examples" / "README.md").write_text("# Programs\n")
    assert site_pages.cookbook().startswith("# Programs\n\n- [Log shipper]")
    config = load_config(CONFIG.open("rb"), plugins=[], hooks=[])
    nav = site_pages.on_config(config).nav
    assert nav is not None
    assert {"Cookbook": ["cookbook/index.md", "cookbook/log_shipper.md"]} in nav
