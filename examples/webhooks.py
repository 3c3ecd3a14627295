"""Webhooks with retries: a back-off, a limit of attempts, and dead letters.

    python webhooks.py

Three hooks are stored and called. The receiver is a local HTTP server. It accepts the first hook, fails twice for the
second one, and always for the third one. Look at the pauses, which double, and at the dead letter with its reason. It
prints:

    stored ... /ok
    stored ... /flaky
    stored ... /gone
    ...
    delivered ... /flaky after 2 failures
    ...
    failure 4 of /gone: HTTP Error 500: Internal Server Error
    left: 0, after ... seconds
    dead letter: ... /gone (HTTPError: HTTP Error 500: Internal Server Error)

A kill at any moment loses no hook that was stored: start the program again in the same folder. A hook may be called
twice after that, so each one carries an id by which its receiver can know it.
"""

import collections
import http.server
import threading
import time
import urllib.request
import uuid

from kestrelpy import JournaledQueue, ReaderConfig, dead_letters

FOLDER = "webhooks-data"
CONFIG = ReaderConfig(
    retry_delay=lambda errors: min(60.0, 0.02 * 2**errors),  # seconds; in real life from a second up to an hour
    max_deliveries=4,
    dead_letter="dead-hooks",
)
calls = collections.Counter[str]()


class Receiver(http.server.BaseHTTPRequestHandler):
    """The other side of the hooks. What it has accepted is in the file ``received.txt``."""

    def do_POST(self) -> None:
        name = self.rfile.read(int(self.headers["Content-Length"])).decode()
        calls[name] += 1
        fails = self.path == "/gone" or (self.path == "/flaky" and calls[name] <= 2)
        if not fails:
            with open("received.txt", "a") as file:
                file.write(f"{name}\n")
        self.send_response(500 if fails else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """It keeps quiet."""


def deliver(queue: JournaledQueue[bytes], address: str) -> None:
    """Call hooks until none is left, those of a killed run too. In real life: ``while True``, in several threads."""
    while queue.reader().items:  # also counts hooks that wait for their next attempt
        item = queue.get()
        name, path = item.data.decode().split()
        try:
            with item:  # commits at the end; a block that raises aborts, and the delay begins
                urllib.request.urlopen(address + path, data=name.encode(), timeout=5).close()
                print(f"delivered {name} {path} after {item.error_count} failures", flush=True)
        except OSError as error:
            print(f"failure {item.error_count + 1} of {path}: {error}", flush=True)


def store_and_deliver(address: str) -> None:
    with JournaledQueue(FOLDER, "hooks", default_reader=CONFIG) as queue:
        for path in ("/ok", "/flaky", "/gone"):
            name = uuid.uuid4().hex
            queue.put(f"{name} {path}".encode())  # when it returns, a kill does not lose the hook
            print(f"stored {name} {path}", flush=True)
        started = time.monotonic()
        deliver(queue, address)
        print(f"left: {queue.reader().items}, after {time.monotonic() - started:.1f} seconds")


def main() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store_and_deliver(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    with dead_letters(FOLDER, "dead-hooks") as letters:
        for letter in letters:
            print(f"dead letter: {letter.data.decode()} ({letter.reason})", flush=True)
            letter.drop()  # or letter.requeue(), once the receiver is well


if __name__ == "__main__":
    main()
