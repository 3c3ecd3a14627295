"""Queue servers, over the loopback: started by the adapter on a free port, their files in the folder they are given.

They are looked for where programs are (Debian: ``redis-server``, ``beanstalkd``). One that is not there is left out.
Every item crosses between two processes, as it does with all servers; that is what one is to see here.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from bench.measure import LeftOut
from bench.rivals.base import Rival

START_SECONDS = 20.0


class Server(Rival):
    """A program that is started for a contender, and ended after it."""

    program: ClassVar[str]

    def open(self) -> None:
        self.load()
        path = shutil.which(self.program)
        if path is None:
            raise LeftOut(f"{self.program} is not installed")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        command = [path, *self.arguments()]
        self._process = subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._await_port()
            self.connect()
        except BaseException:
            self._end()
            raise

    def _await_port(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise LeftOut(f"{self.program} does not start here") from None
                time.sleep(0.01)

    def close(self) -> None:
        try:
            self.disconnect()
        finally:
            self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def load(self) -> None:
        """Import what it takes."""

    def arguments(self) -> list[str]:
        """Of the program, with the port in them."""
        raise NotImplementedError

    def connect(self) -> None:
        """Connect, and set ``put`` and ``take``."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Let go of the connection."""
        raise NotImplementedError


class Redis(Server):
    """redis, a list: RPUSH; LMOVE to a second list and LREM from there. It appends to its log, the system syncs."""

    name = "redis"
    program = "redis-server"
    share = 0.05

    def load(self) -> None:
        self._module = import_module("redis")

    def arguments(self) -> list[str]:
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "yes", "appendfsync": "no"}
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def connect(self) -> None:
        self.client: Any = self._module.Redis(host="127.0.0.1", port=self.port)
        self.client.ping()
        self.put, self.take = partial(self.client.rpush, "items"), self._take

    def _take(self) -> bytes:
        item: bytes = self.client.lmove("items", "open", "LEFT", "RIGHT")
        self.client.lrem("open", 1, item)
        return item

    def disconnect(self) -> None:
        self.client.close()


class Beanstalkd(Server):
    """beanstalkd with its log, the system syncs: put; reserve and delete. The client is these lines."""

    name = "beanstalkd"
    program = "beanstalkd"
    share = 0.05

    def arguments(self) -> list[str]:
        return ["-l", "127.0.0.1", "-p", str(self.port), "-b", str(self.folder), "-F"]

    def connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self.put, self.take = self._put, self._take

    def _ask(self, command: bytes, expected: bytes) -> list[bytes]:
        self._socket.sendall(command)
        words = self._answers.readline().split()
        if words[:1] != [expected]:
            raise ConnectionError(f"beanstalkd answers {words!r} to {command[:20]!r}")
        return words

    def _put(self, item: bytes) -> None:
        self._ask(b"put 0 0 3600 %d\r\n%b\r\n" % (len(item), item), b"INSERTED")

    def _take(self) -> bytes:
        _, job, size = self._ask(b"reserve\r\n", b"RESERVED")
        item = self._answers.read(int(size) + 2)[:-2]
        self._ask(b"delete %b\r\n" % job, b"DELETED")
        return item

    def disconnect(self) -> None:
        self._answers.close()
        self._socket.close()
