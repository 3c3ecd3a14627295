"""Random dialogues of several connections with the kestrel server, beside a model that says what each reply must be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.server.harness import Client
from tests.server.kestrel.kestrel_harness import Kestrel, kestrel
from tests.support.budget import SEED, Tally, share

DIALOGUES = 120
COMMANDS = 60
MOST = 3
"""``max_open_transactions``."""
NAMES = (b"q", b"q+a", b"q+b", b"r")
END, ERROR, DELETED, STORED = b"END\r\n", b"ERROR\r\n", b"DELETED\r\n", b"STORED\r\n"


class ModelQueue:
    """What waits, by the number of its put, and what each client has open, the oldest first."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.open: dict[int, list[int]] = {}

    def put(self, item: int) -> None:
        self.waiting = sorted([*self.waiting, item])


class Model:
    """The whole server. A client is a number; a reply that ends its connection is a pair with True."""

    def __init__(self) -> None:
        self.queues: dict[bytes, ModelQueue] = {}
        self.items = 0

    def _queue(self, name: bytes) -> ModelQueue:
        return self.queues.setdefault(name, ModelQueue())

    def set(self, name: bytes) -> bytes:
        self._queue(name)
        self.items += 1
        children = [each for each in self.queues if each.startswith(name + b"+")]
        for each in [name, *children]:
            self.queues[each].put(self.items)
        return STORED

    def get(self, client: int, name: bytes, *options: str) -> tuple[bytes, bool]:
        if "abort" in options or options == ("close",):
            queue = self.queues.get(name)
            mine = queue.open.get(client, []) if queue is not None else []
            if queue is not None and mine:
                item = mine.pop(0)
                if "abort" in options:
                    queue.put(item)
            return END, False
        if "close" in options and name in self.queues and self.queues[name].open.get(client):
            self.queues[name].open[client].pop(0)
        queue = self._queue(name)
        if "peek" in options:
            return value(name, queue.waiting[0]) if queue.waiting else END, False
        mine = queue.open.setdefault(client, [])
        opens = "open" in options
        if (opens and len(mine) >= MOST) or (mine and not opens):
            self.leave(client)
            return ERROR, True
        if not queue.waiting:
            return END, False
        item = queue.waiting.pop(0)
        if opens:
            mine.append(item)
        return value(name, item), False

    def confirm(self, client: int, name: bytes, count: int) -> bytes:
        mine = self.queues[name].open.get(client, []) if name in self.queues else []
        if not 1 <= count <= len(mine):
            return ERROR
        del mine[:count]
        return END

    def flush(self, name: bytes) -> bytes:
        if name in self.queues:
            self.queues[name].waiting.clear()
        return END

    def delete(self, name: bytes) -> bytes:
        self.queues.pop(name, None)
        return DELETED

    def leave(self, client: int) -> None:
        for queue in self.queues.values():
            for item in queue.open.pop(client, []):
                queue.put(item)


def value(name: bytes, item: int) -> bytes:
    body = b"%d" % item
    return b"VALUE %b 0 %d\r\n%b\r\nEND\r\n" % (name, len(body), body)


class Dialogue:
    """One seed: several clients, one after another, and sometimes many commands at once."""

    def __init__(self, it: Kestrel, seed: int) -> None:
        self._it = it
        self._rng = random.Random(seed)
        self._model = Model()
        self._clients: dict[int, Client] = {}
        self._numbers = iter(range(10_000))

    def run(self) -> int:
        for _ in range(COMMANDS):
            self._it.call(lambda: self._it.clock.jump(0.001))
            if not self._clients or (len(self._clients) < 3 and self._rng.random() < 0.2):
                self._clients[next(self._numbers)] = self._it.client()
            number = self._rng.choice(list(self._clients))
            if self._rng.random() < 0.04:
                self._clients.pop(number).hang_up()
                self._it.until(lambda: len(self._it.server.connections) == len(self._clients))
                self._model.leave(number)
            else:
                self._command(number)
        return COMMANDS

    def _command(self, number: int) -> None:
        rng, model = self._rng, self._model
        name, client = rng.choice(NAMES), self._clients[number]
        what = rng.choices(("set", "get", "confirm", "flush", "delete"), (8, 12, 2, 0.4, 0.4))[0]
        ends = False
        if what == "set":
            said = model.set(name)
            body = b"%d" % model.items
            line = b"set %b 0 0 %d\r\n%b\r\n" % (name, len(body), body)
        elif what == "get":
            options = rng.choice(((), ("open",), ("open",), ("close",), ("close", "open"), ("abort",), ("peek",)))
            said, ends = model.get(number, name, *options)
            line = b"get %b\r\n" % "/".join([name.decode(), *options]).encode()
        elif what == "confirm":
            count = rng.randint(0, 3)
            said = model.confirm(number, name, count)
            line = b"confirm %b %d\r\n" % (name, count)
        else:
            said = model.flush(name) if what == "flush" else model.delete(name)
            line = b"%b %b\r\n" % (what.encode(), name)
        client.ask(line, said)
        if ends:
            client.hear_the_end()
            self._clients.pop(number).hang_up()
            self._it.until(lambda: len(self._it.server.connections) == len(self._clients))


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_dialogues(place: str, tmp_path: Path, tally: Tally) -> None:
    for number in range(share(DIALOGUES)):
        folder = None if place == "memory" else tmp_path / str(number)
        with kestrel(folder, max_open_transactions=MOST, sync_journal="never") as it:
            try:
                tally.add("commands of dialogues with the kestrel server", Dialogue(it, SEED * 1000 + number).run())
            except AssertionError as error:
                raise AssertionError(f"dialogue {SEED * 1000 + number}: {error}") from error
