"""The picture in docs/dashboard.md: ``python -m tests.dashboard.picture docs/dashboard.png`` (``make pictures``).

An hour of a shop is played to the sampler on a clock of its own, and a real browser takes the picture.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kestrelpy import DeadLetter, JournaledQueue, QueueEmpty, SystemClock
from kestrelpy.letter import encode_letter
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue
from tests.dashboard.chromium import browser, missing, open_queue, rows, until

MINUTES = 60
SLOT = 10
MAX_BYTES = 300_000
SHOWN_FOLDER = "/var/lib/shop/queues"
SHOP = {"orders": 12.0, "emails": 7.0, "thumbnails": 20.0, "webhooks": 4.0, "search-index": 15.0, "audit-log": 24.0}
"""Queues, and how many items a second are put at noon."""


LOST = (
    "TimeoutError: the bank does not answer",
    "ValueError: no such currency: XBT",
    "TimeoutError: the bank does not answer",
)
"""Why orders were given up."""


LATE = ("webhooks", "thumbnails", "audit-log")
"""Queues whose workers do not keep up in the end."""


def play(folder: Path) -> ManualClock:
    """Make the queues, as they are an hour before the picture."""
    clock = ManualClock(SystemClock().time_ns() // 1_000_000 - MINUTES * 60_000)
    with WorkQueue(folder, "jobs", clock=clock) as jobs, jobs.session() as session:
        for number in range(40):
            jobs.put(b'{"render": %d}' % number, tube=("invoices", "reports")[number % 3 == 0])
        session.watch("reports")
        for _ in range(3):
            session.reserve(timeout=0).bury()
    return clock


def an_hour(folder: Path, clock: ManualClock) -> Iterator[None]:
    """Put and take, ten seconds at a step. Readers of ``orders`` fall behind for a while."""
    dice = random.Random(7)
    with contextlib.ExitStack() as stack:
        queues = {name: stack.enter_context(JournaledQueue(folder, name, clock=clock, sync="never")) for name in SHOP}
        readers = {name: queue.reader("worker") for name, queue in queues.items()}
        billing = queues["orders"].reader("billing")
        for step in range(MINUTES * 60 // SLOT):
            wave = 1 + 0.5 * math.sin(step / 40) + 0.1 * math.sin(step / 5)
            for name, queue in queues.items():
                count = int(SHOP[name] * SLOT * wave * dice.uniform(0.8, 1.2))
                queue.put_many([b'{"order": %d, "total": 12.50}' % dice.randrange(10**6) for _ in range(count)])
                slow = 0.6 if name == "orders" and 120 < step < 220 else 0.93 if name in LATE and step > 200 else 1.25
                take(readers[name], int(SHOP[name] * SLOT * wave * slow) + 3)
            take(billing, 160 if step < 250 else 300 if step < 320 else 120)
            for queue in queues.values():
                queue.checkpoint()
            clock.advance(SLOT)
            yield
    with JournaledQueue(folder, "dead", clock=clock) as dead:
        dead.put_many([lost_order(number, why, clock) for number, why in enumerate(LOST)])


def lost_order(number: int, why: str, clock: ManualClock) -> bytes:
    """A dead letter of ``orders``."""
    now_ms = clock.time_ns() // 1_000_000 - 400_000 + 70_000 * number
    data = b'{"order": %d, "total": 12.50}' % (270_414 + 90_010 * number)
    return encode_letter(DeadLetter(data, "orders", "billing", 31_000 + 700 * number, now_ms, now_ms, 5, why))


def take(reader: object, count: int) -> None:
    """Commit up to so many items."""
    with contextlib.suppress(QueueEmpty):
        reader.commit_many(reader.get_many(count, timeout=0))  # type: ignore[attr-defined]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The dashboard of the folder after an hour; gives its address."""
    import uvicorn

    from kestrelpy.dashboard import make_app
    from kestrelpy.dashboard.sampler import Sampler

    clock = play(folder)
    sampler = Sampler(str(folder), clock=clock)
    hour = an_hour(folder, clock)
    for _ in hour:
        sampler.look()
    sampler.look()
    app = make_app(str(folder), sampler, clock=clock)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
            sampler.stop()


def take_picture(target: Path) -> int:
    """Write the picture, and return its size in bytes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "queues") as url,
        browser(width=1280, height=1870) as driver,
    ):
        driver.get(url)
        until(lambda: rows(driver), "figures")
        open_queue(driver, "orders")
        until(lambda: driver.execute_script("return document.querySelectorAll('#lag-chart path').length"), "lines")
        until(lambda: driver.find_element("id", "dead-panel").is_displayed(), "dead letters")
        driver.execute_script("byId('newest-panel').remove(); setText(byId('folder'), arguments[0])", SHOWN_FOLDER)
        driver.execute_script("window.scrollTo(0, 0)")
        driver.save_screenshot(str(target))
    return target.stat().st_size


def main() -> int:
    """The command."""
    why = missing()
    if why:
        print(why, file=sys.stderr)
        return 1
    size = take_picture(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {size:,} bytes")
    return 0 if size < MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
