"""A web service with three gunicorn workers that put, and one process that reads.

    python gunicorn_service.py            # starts gunicorn, sends thirty requests, reads what arrived
    gunicorn -w 3 gunicorn_service:app    # the service alone

One process owns a queue. If each worker opened it, two of three would get ``QueueLocked``. So the workers publish
through the inbox, and the owner, here the main process, takes the orders in. A request is answered when its order is on
disk; the owner may be away meanwhile. Instead of gunicorn, ``uvicorn --workers 3`` does as well. It needs gunicorn. It
prints:

    answers: 30 times 202
    workers that have answered: ...
    orders that arrived: 30, each once: True
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator

from kestrelpy import JournaledQueue, inbox

FOLDER, REQUESTS = os.path.abspath("gunicorn-data"), 30


def app(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
    """The WSGI application, which each worker runs."""
    body = environ["wsgi.input"].read()  # type: ignore[attr-defined]  # WSGI has no types of its own
    inbox.put_many(FOLDER, "orders", [body])
    start_response("202 Accepted", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


@contextlib.contextmanager
def service() -> Iterator[str]:
    """gunicorn with three workers, and its address."""
    command = [sys.executable, "-m", "gunicorn", "-w", "3", "-b", "127.0.0.1:0", "gunicorn_service:app"]
    here = os.path.dirname(os.path.abspath(__file__))
    with subprocess.Popen([*command, "--pythonpath", here], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line.split("Listening at: ")[1].split()[0] for line in process.stderr if "Listening at" in line)
        try:
            yield address
        finally:
            process.terminate()
            process.stderr.read()


def main() -> None:
    run, answers, workers = uuid.uuid4().hex, collections.Counter[int](), set()
    with service() as address:
        for number in range(REQUESTS):
            body = json.dumps({"run": run, "order": number}).encode()
            with urllib.request.urlopen(address, data=body, timeout=10) as answer:
                answers[answer.status] += 1
                workers.add(answer.read())
    orders = []
    with JournaledQueue(FOLDER, "orders") as queue:  # takes in what was published; while it is open, every 0.5 s
        while queue.reader().items:
            with queue.get() as item:
                orders.append(json.loads(item.data))
    mine = sorted(order["order"] for order in orders if order["run"] == run)
    print(f"answers: {answers[202]} times 202")
    print("workers that have answered:", len(workers))  # one to three: whichever was free
    print(f"orders that arrived: {len(mine)}, each once: {mine == list(range(REQUESTS))}")


if __name__ == "__main__":
    main()
