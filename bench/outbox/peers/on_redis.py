"""dramatiq and rq with Redis. They are filled before the syncs that are measured are turned on.

``python -m bench.outbox.peers.on_redis URL CLASS`` is one worker of rq.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from bench.outbox.peers.base import QUEUE, THREADS, Handler, Peer, payload

ROOT = Path(__file__).parent.parent.parent.parent
SETTING = "appendfsync"


class _OnRedis(Peer):
    """Whatever the library."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.client = import_module("redis").Redis.from_url(where)

    def create(self) -> None:
        """There is nothing to make."""

    def fill(self, numbers: Sequence[int]) -> None:
        wanted = self.client.config_get(SETTING)[SETTING]
        self.client.config_set(SETTING, "no")
        for number in numbers:
            self.put(number)
        self.client.config_set(SETTING, wanted)

    def close(self) -> None:
        self.client.close()


class Dramatiq(_OnRedis):
    """A worker with four threads."""

    name = "dramatiq"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._library: Any = import_module("dramatiq")
        self._broker = import_module("dramatiq.brokers.redis").RedisBroker(url=where)
        self._handler: Handler = lambda _text: None
        self._worker: Any = None

        def job(text: str) -> None:
            self._handler(text)

        self._actor = self._library.actor(queue_name=QUEUE, broker=self._broker)(job)

    def put(self, number: int) -> None:
        self._actor.send(payload(number))

    def left(self) -> int:
        return int(self.client.hlen(f"dramatiq:{QUEUE}.msgs"))

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._worker = self._library.Worker(self._broker, worker_threads=THREADS)
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()

    def close(self) -> None:
        self._broker.close()
        super().close()


def nothing(_text: str) -> None:
    """The handler of rq, which finds it by its name."""


class Rq(_OnRedis):
    """Four workers, each a process that forks for each job, as ``rq worker`` does."""

    name = "rq"
    tells_starts = False
    worker: ClassVar[str] = "Worker"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        library = import_module("rq")
        self._queue = library.Queue(QUEUE, connection=self.client)
        self._registry = import_module("rq.registry").StartedJobRegistry(queue=self._queue)
        self._workers: list[subprocess.Popen[bytes]] = []

    def put(self, number: int) -> None:
        self._queue.enqueue(nothing, payload(number))

    def left(self) -> int:
        return int(self.client.llen(self._queue.key)) + int(self.client.zcard(self._registry.key))

    def start(self, handler: Handler) -> None:  # noqa: ARG002
        command = [sys.executable, "-m", __name__, self.where, self.worker]
        self._workers = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            for _ in range(THREADS)
        ]

    def stop(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()


class RqWithoutForks(Rq):
    """Four processes that run jobs themselves."""

    name = "rq, no forks"
    worker = "SimpleWorker"


def main(url: str, kind: str) -> None:
    """Work until a signal."""
    library = import_module("rq")
    client = import_module("redis").Redis.from_url(url)
    worker = getattr(library, kind)([QUEUE], connection=client)
    worker.work(logging_level="WARNING")


if __name__ == "__main__":
    main(*sys.argv[1:])
