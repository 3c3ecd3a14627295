"""Servers of a contender's own, in its folder: PostgreSQL and Redis, with their default settings, and ended with it."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.measure import LeftOut
from bench.program import PREFIX

START_SECONDS = 60.0
DEBIAN = Path("/usr/lib/postgresql")
UNPRIVILEGED = "postgres"
"""Who runs the server where the benchmark runs as root, whom PostgreSQL refuses."""


def programs() -> Path:
    """The folder with the programs of the newest PostgreSQL."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    found = [path.parent for path in DEBIAN.glob("*/bin/initdb")]
    if not found:
        raise LeftOut("PostgreSQL is not installed (Debian: postgresql)")
    return max(found, key=lambda path: float(path.parent.name))


def _as_whom() -> dict[str, Any]:
    """What ``subprocess`` is given, so that the server does not run as root."""
    if os.geteuid():
        return {}
    try:
        pwd.getpwnam(UNPRIVILEGED)
    except KeyError:
        raise LeftOut(f"PostgreSQL does not run as root, and there is no user {UNPRIVILEGED}") from None
    return {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []}


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """A fresh cluster, made once and copied for each contender."""
    as_whom = _as_whom()
    folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}initdb-")
    if as_whom:
        shutil.chown(folder.name, UNPRIVILEGED)
    options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--username=bench", "--no-sync"]
    command = [str(programs() / "initdb"), *options, "--pgdata", f"{folder.name}/data"]
    done = subprocess.run(command, cwd=folder.name, capture_output=True, text=True, check=False, **as_whom)
    if done.returncode:
        folder.cleanup()
        raise LeftOut(f"initdb fails here: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def _let_pass(folder: Path) -> None:
    """Let others pass through the folders down to this one, not look; those that this run has made, and no other."""
    folders = (folder, *folder.parents)
    made = next((place for place, path in enumerate(folders) if path.name.startswith(PREFIX)), 0)
    for path in folders[: made + 1]:
        path.chmod(path.stat().st_mode | 0o011)


class _Keeper:
    """Ends a server if this process dies before it has done so: a shell that waits for the end of a pipe from here."""

    def __init__(self, pid: int, **as_whom: Any) -> None:
        command = ["/bin/sh", "-c", 'read -r _; kill -QUIT "$1"', "sh", str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **as_whom)

    def dismiss(self) -> None:
        """The server is about to be ended: from now on its number may be another's."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class Cluster:
    """A running PostgreSQL in ``folder``. ``settings``: beside the default ones."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        as_whom = _as_whom()
        template = Path(_template().name) / "data"
        data = folder / "data"
        subprocess.run(["cp", "-a", str(template), str(data)], check=True)  # with its owner
        subprocess.run(["sync", "-f", str(data)], check=True)  # or the first commits of the contender would wait for it
        if as_whom:
            _let_pass(folder)
            shutil.chown(folder, UNPRIVILEGED)
        self.log = folder / "log"
        told = {"listen_addresses": "", "unix_socket_directories": str(folder), **(settings or {})}
        words = [word for name, value in told.items() for word in ("-c", f"{name}={value}")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(programs() / "postgres"), "-D", str(data), *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **as_whom,
            )
        self._keeper = _Keeper(self._process.pid, **as_whom)
        self.url = f"postgresql://bench@/postgres?host={folder}"
        try:
            self._await()
        except BaseException:
            self.close()
            raise

    def _await(self) -> None:
        """Until it takes connections."""
        import psycopg

        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    lines = self.log.read_text("utf-8", "replace").strip().splitlines()
                    raise LeftOut(f"PostgreSQL does not start here: {lines[-1] if lines else error}") from None
                time.sleep(0.01)
            else:
                return

    @property
    def processor_seconds(self) -> float:
        """Of all of its processes, those that have ended included."""
        mine = self._process.pid
        total = 0.0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(path.parent.name) == mine:
                total += sum(int(field) for field in fields[11:15])
            elif int(fields[1]) == mine:
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it, at once: nobody will read its data again."""
        self._keeper.dismiss()
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Redis:
    """A running Redis, on a free port of the loopback. ``sync``: its appendfsync."""

    def __init__(self, folder: Path, sync: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise LeftOut("redis-server is not installed")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        options = {
            "--port": str(port),
            "--dir": str(folder),
            "--appendonly": "yes",
            "--appendfsync": sync,
            "--save": "",
        }
        self._process = subprocess.Popen(
            [program, *(word for pair in options.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._keeper = _Keeper(self._process.pid)
        self.url = f"redis://127.0.0.1:{port}/0"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise LeftOut("redis-server does not start here") from None
                time.sleep(0.01)

    @property
    def processor_seconds(self) -> float:
        """Of its process."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self._keeper.dismiss()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Redis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
