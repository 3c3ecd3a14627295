"""PostgreSQL servers of the tests' own, made from the programs of Debian's package. No server that runs is touched.

1. All that a cluster has is in one temporary folder: data, socket, log. ``initdb`` refuses to run as root, so root
   gives the folder and the processes to the user ``postgres`` or ``nobody``.
2. A *keeper* ends the server and removes the folder: a shell that waits for the end of a pipe, whose other end is here.
   The pipe ends when the cluster is closed and also when this process dies, whichever way. So a normal run takes the
   same way as one that is killed. A child that was forked here holds that end, too: the server ends after it.
   (PR_SET_PDEATHSIG would not do: it looks at the thread that started the server.)
3. ``quick_cluster`` is for tests: it forgets everything at a crash, and is in memory where that has room.
   ``private_cluster`` is for faults and benchmarks: on the disk, with a server's usual settings.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg

from tests.support.patience import PATIENCE, until

NOT_INSTALLED = "postgresql is not installed: apt install postgresql"
DEBIAN = Path("/usr/lib/postgresql")
MEMORY = "/dev/shm"
LOOPBACK = "127.0.0.1"
ROOM = (512 << 20) * (os.cpu_count() or 1)
"""Bytes that must be free in memory: each process of a run has a cluster, of 30 MB and what its tests write. Where
there is less, as in many containers, the files are on the disk: a database takes 20 ms there, and on ext4, which is
slow to make files after others were removed, 250.
"""
LONGEST_FOLDER = 107 - len("/.s.PGSQL.12345")
"""The kernel allows no longer path of a socket."""
PORTS = range(15_000, 32_000)
"""Below those that the kernel gives to connections: between a stop and a start, none of these takes the port."""
ATTEMPTS = 5
FILES = " STRATEGY file_copy"
"""10 ms in memory. The default from PostgreSQL 15 on writes all of it into the log, too: 20 to 200."""

QUICK = {
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "jit": "off",
    "shared_buffers": "16MB",
    "min_wal_size": "2MB",
    "max_wal_size": "32MB",
    "wal_init_zero": "off",
    "wal_recycle": "off",
}
KEEPER = r"""
read -r _
for _ in 1 2 3 4 5 6 7 8 9 10; do
    pid=$(head -n 1 "$1/data/postmaster.pid")
    turn=0
    while [ -n "$pid" ] && [ $turn -lt 900 ] && grep -qF "$1" "/proc/$pid/cmdline"; do
        case $turn in
            0) kill -QUIT "$pid"; kill -CONT "$pid" ;;
            800) kill -KILL "$pid" ;;
        esac
        turn=$((turn + 1))
        sleep 0.01
    done
    rm -rf "$1" && exit
    sleep 0.1
done 2>/dev/null
"""
"""A pid counts only while its command line names the folder: after a SIGKILL of the server it may be anybody's. After 5
seconds the server itself kills what does not end. The removal is tried again because an ``initdb`` may still write.
"""


class ServerNotStarted(Exception):
    """The server, or ``initdb``, ended at once; the text is what it said."""


class Cluster:
    """A server with its data, running from the start. Use as a context manager: nothing of it is left at the end.

    ``parent``: where its folder is made. ``durable``: whether a crash of the machine may lose nothing. It accepts the
    role ``postgres`` over its socket, and on 127.0.0.1 by a random password. Not thread-safe.
    """

    def __init__(self, programs: Path, parent: str, settings: Mapping[str, str], *, durable: bool) -> None:
        self._programs = programs
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._was_killed = False
        self._password = secrets.token_hex(16)
        self._owner = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="kestrelpy-pg-", dir=parent))
        """Of the socket, and of the server's files in ``data`` and ``log``."""
        self.port = 0
        """Of the loopback; part of the socket's name, too."""
        try:
            if self._owner:
                os.chown(self.folder, self._owner["user"], self._owner["group"])
            self._keeper = self._spawn("/bin/sh", "-c", KEEPER, "sh", str(self.folder), stdin=subprocess.PIPE)
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        try:
            self._create(durable)
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def url(self, database: str = "postgres", *, driver: str | None = "psycopg", tcp: bool = False) -> str:
        """For SQLAlchemy; with ``driver=None`` for ``psycopg.connect`` and ``asyncpg.connect`` themselves."""
        scheme = f"postgresql+{driver}" if driver else "postgresql"
        if tcp:
            return f"{scheme}://postgres:{self._password}@{LOOPBACK}:{self.port}/{database}"
        return f"{scheme}://postgres@/{database}?host={quote(str(self.folder), safe='/')}&port={self.port}"

    @property
    def log(self) -> str:
        """What all of its servers have logged so far."""
        return (self.folder / "log").read_text("utf-8", errors="replace")

    @property
    def pids(self) -> list[int]:
        """The processes of the server that runs, first the one that the others are children of; else none."""
        if self._process is None:
            return []
        return [self._process.pid, *_children(self._process.pid)]

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The name of a new, empty database; dropped at the end, whoever is still connected. The server must run."""
        self._databases += 1
        name = f"test_{self._databases}"
        self._execute(lambda version: f"CREATE DATABASE {name} TEMPLATE template0{FILES if version >= 150000 else ''}")
        try:
            yield name
        finally:
            self._execute(lambda _: f"DROP DATABASE {name} WITH (FORCE)")

    def start(self) -> None:
        """Start again after ``stop`` or ``kill9``, on the same port. It accepts connections when this returns."""
        assert self._process is None, "it runs"
        server = (self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder, "-p", self.port)
        settings = [f"--{name}={value}" for name, value in {"listen_addresses": LOOPBACK, **self._settings}.items()]
        with open(self.folder / "log", "ab") as log:
            process = self._spawn(*map(str, server), *settings, stdout=log, stderr=log)
        self._process = process
        until(lambda: process.poll() is not None or self._accepts(process.pid))
        if process.poll() is not None:
            self._process = None
            raise ServerNotStarted(self.log[-2000:])

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """As ``pg_ctl stop -m`` does it. Immediate: no checkpoint, the next start recovers as after a crash."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self._process.wait(PATIENCE)
        self._process = None

    def kill9(self) -> None:
        """SIGKILL to all processes of the server at once. They are gone when this returns."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGSTOP)  # it starts no child that is overlooked here
        until(lambda: _state(self._process) == "T")
        mine = self.pids
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        until(lambda: not any(is_alive(pid) for pid in mine))
        self._process = None
        self._was_killed = True

    def close(self) -> None:
        """End the server at once and remove the folder. A second time it does nothing."""
        if self._was_killed and self._process is None and self.folder.exists():
            with contextlib.suppress(ServerNotStarted):
                self.start()  # only a server removes the shared memory that the killed one has left
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(PATIENCE)
        if self._process is not None:
            self._process.wait(PATIENCE)
            self._process = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """A process of the server's user that no Ctrl-C reaches: its own session."""
        environment = {**os.environ, "LC_ALL": "C"}
        usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "cwd": self.folder}
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=environment, **{**usual, **options}, **self._owner
        )
        return process

    def _create(self, durable: bool) -> None:
        password = self.folder / "password"
        password.write_text(self._password)
        if self._owner:
            os.chown(password, self._owner["user"], self._owner["group"])
        access = ("--auth-local=trust", "--auth-host=scram-sha-256", "--username=postgres", f"--pwfile={password}")
        kind = ("--no-locale", "--encoding=UTF8", *(() if durable else ("--no-sync", "--wal-segsize=1")))
        command = (str(self._programs / "initdb"), f"--pgdata={self.folder / 'data'}", *access, *kind)
        initdb = self._spawn(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = initdb.communicate()
        password.unlink()
        if initdb.returncode:
            raise ServerNotStarted(said.decode(errors="replace"))

    def _start_on_a_free_port(self) -> None:
        """Another process may take the port between the look and the start."""
        for attempts_left in reversed(range(ATTEMPTS)):
            self.port = _free_port()
            try:
                self.start()
            except ServerNotStarted as error:
                if not attempts_left or "Address already in use" not in str(error):
                    raise
            else:
                return

    def _accepts(self, pid: int) -> bool:
        """The server writes into this file who it is, and how far its start is; ``pg_ctl`` looks there, too."""
        with contextlib.suppress(FileNotFoundError):  # not written yet
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"
        return False

    def _execute(self, statement: Callable[[int], str]) -> None:
        """On a connection of its own: a test may end every one that it sees. ``statement``: of the server's version."""
        with psycopg.connect(self.url(driver=None), autocommit=True) as connection:
            connection.execute(statement(connection.info.server_version).encode())


@functools.cache
def programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``; ``None`` where there is none. Debian has them outside of PATH."""
    candidates = []
    if found := shutil.which("initdb"):
        candidates.append(Path(found).resolve().parent)
    if shutil.which("pg_config"):
        said = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        candidates.append(Path(said.stdout.strip() or "/nonexistent"))
    candidates += sorted(DEBIAN.glob("[0-9]*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    there = (folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists())
    return next(there, None)


def quick_cluster() -> Cluster:
    """One for many tests, each with a database of its own; a start takes half a second. Nothing of it is durable."""
    memory_has_room = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free >= ROOM and os.access(MEMORY, os.W_OK)
    return Cluster(_programs(), MEMORY if memory_has_room else _parent(), QUICK, durable=False)


def private_cluster(
    *, fsync: bool = True, settings: Mapping[str, str] | None = None, folder: str | None = None
) -> Cluster:
    """One for faults and benchmarks: to be stopped, killed and started again. ``settings``: of ``postgresql.conf``.

    ``folder``: where to make its own, short, for every user to pass; by default that of temporary files. A benchmark
    that syncs should give one that is on a disk.
    """
    chosen = {"fsync": "on" if fsync else "off"} | dict(settings or {})
    return Cluster(_programs(), folder or _parent(), chosen, durable=fsync)


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended. One that nobody has waited for has ended."""
    return _state(pid) not in ("", "Z", "X")


def _programs() -> Path:
    found = programs()
    if found is None:
        raise ServerNotStarted(NOT_INSTALLED)
    return found


def _unprivileged() -> dict[str, Any]:
    """Arguments of ``Popen`` for another user, where this one is root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise ServerNotStarted("initdb refuses to run as root, and there is no user postgres or nobody")


def _parent() -> str:
    """A folder for temporary files that the server's user may pass and whose path leaves room for a socket's name."""
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(folder).resolve()
        is_open = os.geteuid() != 0 or all(each.stat().st_mode & 0o001 for each in (path, *path.parents))
        if is_open and len(f"{path}/kestrelpy-pg-12345678") <= LONGEST_FOLDER:
            return str(path)
    raise ServerNotStarted("no folder for temporary files that an unprivileged user can reach: set TMPDIR")


def _free_port() -> int:
    for port in random.Random().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return port
    raise ServerNotStarted("no free port")


def _stat(pid: int) -> list[str]:
    """State, parent and so on, from ``/proc``; empty where there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _state(process: int | subprocess.Popen[bytes] | None) -> str:
    pid = process.pid if isinstance(process, subprocess.Popen) else process
    return (_stat(pid) or [""])[0] if pid else ""


def _children(pid: int) -> list[int]:
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [each for each in everyone if _stat(each)[1:2] == [str(pid)]]
