"""A crawler on a work queue: priorities, unique keys, delays, and three workers.

    python crawler.py

Each URL is a job. Its priority is its depth, so that near pages come first. Its key is a hash of the URL, so that no
URL is queued twice: a key has at most 255 bytes, and a URL may have more. A page that answers "busy" is asked again
after a delay. A worker leaves when no job is ready, reserved or delayed. The site is a table. It prints:

    a new crawl
    ...
    fetched /
    ...
    busy: /slow-page, again in 1 second
    ...
    fetched /slow-page
    ...
    12 pages, 0 jobs left

A kill at any moment is no harm: the next run in the same folder continues the crawl (it prints "resumed"). Every page
is in pages.txt then. A page that a worker had in hand at the kill may be there twice.
"""

import contextlib
import hashlib
import threading
import time

from kestrelpy import QueueEmpty
from kestrelpy.work import DuplicateJob, WorkQueue

FOLDER, PAGES = "crawler-data", "pages.txt"
SITE = {
    "/": ["/news", "/about", "/slow-page"],
    "/news": [f"/news/{number}" for number in range(8)],
    "/about": ["/", "/news"],
    **{f"/news/{number}": ["/", f"/news/{(number + 1) % 8}"] for number in range(8)},
    "/slow-page": [],
}
busy = {"/slow-page"}  # answers the first request with "503 busy"
seen: set[str] = set()  # what is in pages.txt: a key is free again as soon as its job is done
lock = threading.Lock()


def fetch(url: str) -> list[str] | None:
    """The links of a page, or ``None`` if the site is busy. In real life: httpx and an HTML parser."""
    time.sleep(0.01)
    if url in busy:
        busy.remove(url)
        return None
    return SITE[url]


def schedule(work: WorkQueue, url: str, depth: int) -> None:
    """Put a URL, unless it is fetched already, or queued: then its key is taken."""
    with lock, contextlib.suppress(DuplicateJob):
        if url not in seen:
            key = hashlib.sha256(url.encode()).hexdigest()
            work.put(f"{depth} {url}".encode(), key=key, priority=depth, ttr=30)


def worker(work: WorkQueue) -> None:
    """Take jobs until none is left, and none can come any more: a page that is being fetched may have new links."""
    with work.session() as session:
        while True:
            try:
                job = session.reserve(timeout=0.5)
            except QueueEmpty:
                stats = work.stats()
                if stats.ready or stats.reserved or stats.delayed:
                    continue
                return
            depth, url = job.body.decode().split()
            links = fetch(url)
            if links is None:
                print(f"busy: {url}, again in 1 second\n", end="", flush=True)
                job.release(delay=1)
                continue
            for link in links:  # before the job is deleted: otherwise a kill in between would lose them
                schedule(work, link, int(depth) + 1)
            with lock, open(PAGES, "a") as file:
                file.write(f"{url}\n")
                seen.add(url)
            job.delete()
            print(f"fetched {url}\n", end="", flush=True)  # one write: threads do not mix their lines


def main() -> None:
    with WorkQueue(FOLDER) as work:
        if work.stats().jobs:
            print("resumed", flush=True)
            with open(PAGES) as file:
                seen.update(file.read().split())
        else:
            print("a new crawl", flush=True)
            open(PAGES, "w").close()
            schedule(work, "/", 0)
        workers = [threading.Thread(target=worker, args=(work,)) for _ in range(3)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        print(f"{len(seen)} pages, {work.stats().jobs} jobs left")


if __name__ == "__main__":
    main()
