"""``serve`` under systemd: readiness, the watchdog, passed sockets, restarts, and the units of ``contrib/systemd``.

Here, this test is systemd: it has the socket for messages, and the listening sockets. ``systemd-analyze`` and
``systemd-socket-activate`` are the real ones. What is not seen here: a unit that a real systemd starts, which needs one
as the first process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.cli import _systemd, build_parser, main
from kestrelpy.cli._common import CommandError
from kestrelpy.cli._systemd import Supervisor, passed_sockets
from tests.server.beanstalk_harness import PATIENCE, Client
from tests.support.paths import ROOT

UNITS = ROOT / "contrib" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
PROGRAM = "/opt/kestrelpy/bin/kestrelpy"
KESTRELPY = (sys.executable, "-m", "kestrelpy", "serve")
LAUNCHER = """
import os, resource, sys
number, names = int(sys.argv[1]), sys.argv[2]
for at in range(number):  # from above: no descriptor that is still wanted is closed
    os.dup2(int(sys.argv[3 + at]), 1000 + at)
for at in range(number):
    os.dup2(1000 + at, 3 + at)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(number), LISTEN_FDNAMES=names)
os.environ.update(WATCHDOG_PID=str(os.getpid()))
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))  # both, as LimitNOFILE does
os.execv(sys.argv[3 + number], sys.argv[3 + number:])
"""
HIGHEST_EXPOSURE = 2.0


class Manager:
    """systemd, as far as a service sees it: a socket for its messages, and sockets that stay when it ends."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.messages.bind(address.replace("@", "\0"))
        self.messages.settimeout(PATIENCE)
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *options: str,
        sockets: dict[str, socket.socket] | None = None,
        watchdog_us: int = 0,
        through: Sequence[str] = (),
    ) -> None:
        """Start the service; ``sockets`` by their names, ``through`` a program that becomes it."""
        passed = sockets or {}
        numbers = [one.fileno() for one in passed.values()]
        command = [sys.executable, "-c", LAUNCHER, str(len(passed)), ":".join(passed), *map(str, numbers)]
        environment = {**os.environ, "NOTIFY_SOCKET": self.address}
        if watchdog_us:
            environment["WATCHDOG_USEC"] = str(watchdog_us)
        self.process = subprocess.Popen(
            [*command, *through, *KESTRELPY, *options], env=environment, pass_fds=numbers, stderr=subprocess.DEVNULL
        )

    def message(self, but: str = "WATCHDOG=1") -> list[str]:
        """The lines of the next message that is not ``but``."""
        while True:
            lines = self.messages.recv(4096).decode().split("\n")
            if lines != [but]:
                return lines

    def has_message(self) -> bool:
        """Whether one comes within two of the watchdog's limits in these tests."""
        return bool(select.select([self.messages], [], [], 0.4)[0])

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.messages.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@kestrelpy-test-{os.getpid()}"
    made = Manager(address)
    yield made
    made.close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def asked(address: Any, question: bytes, reply: bytes) -> None:
    client = Client(address)
    client.ask(question, reply)
    client.hang_up()


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_service_is_ready_when_it_is_reached_and_says_when_it_ends(tmp_path: Path, manager: Manager) -> None:
    manager.start("beanstalk", "--dir", str(tmp_path / "jobs"), "--listen", "127.0.0.1:0")
    ready, status = manager.message()
    assert ready == "READY=1"
    host, port = status.removeprefix("STATUS=listening at ").split(":")
    asked((host, int(port)), b"use a\r\n", b"USING a\r\n")
    assert manager.process is not None
    manager.process.send_signal(signal.SIGUSR1)
    assert manager.message() == ["STATUS=draining: puts are refused from now on"]
    assert manager.end() == 0
    assert manager.message() == ["STOPPING=1", "STATUS=stopped by SIGTERM"]


def test_a_reload_is_told(tmp_path: Path, manager: Manager) -> None:
    manager.start("kestrel", "--dir", str(tmp_path / "queues"), "--listen", "127.0.0.1:0")
    assert manager.message()[0] == "READY=1"
    assert manager.process is not None
    manager.process.send_signal(signal.SIGHUP)
    word, instant = manager.message()
    assert (word, manager.message()) == ("RELOADING=1", ["READY=1"])
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", instant)
    assert manager.end() == 0
    assert manager.message()[0] == "STOPPING=1"


def test_a_standby_is_ready_when_it_follows(tmp_path: Path, manager: Manager) -> None:
    store = f"file://{tmp_path}/store"
    manager.start("beanstalk", "--dir", str(tmp_path / "jobs"), "--ship", store, "--standby", watchdog_us=60_000_000)
    ready, status = manager.message()
    assert (ready, status[:15]) == ("READY=1", "STATUS=standby,")
    assert manager.message(but="") == ["WATCHDOG=1"]
    assert manager.end() == 0
    assert manager.message() == ["STOPPING=1", "STATUS=stopped by SIGTERM"]


def test_the_watchdog_hears_a_loop_that_goes_on_and_no_other(tmp_path: Path, manager: Manager) -> None:
    manager.start("beanstalk", "--listen", "127.0.0.1:0", watchdog_us=200_000)
    assert manager.message()[0] == "READY=1"
    for _ in range(3):
        assert manager.message(but="") == ["WATCHDOG=1"]
    assert manager.process is not None
    manager.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, manager.process.pid, os.WSTOPPED)
    while manager.has_message():  # one that was on its way
        manager.message(but="")
    manager.process.send_signal(signal.SIGCONT)
    assert manager.message(but="") == ["WATCHDOG=1"]


def test_without_its_variables_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_systemd.socket, "socket", None)
    systemd = Supervisor()
    systemd.ready("x")
    systemd.reloaded()
    systemd.beat()
    systemd.beat_on(None)  # type: ignore[arg-type]
    systemd.stopping("x")
    with contextlib.ExitStack() as opened:
        assert passed_sockets(opened) == []


def test_children_do_not_see_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5000000", "LISTEN_PID": "1", "LISTEN_FDS": "1"}
    for name, text in said.items():
        monkeypatch.setenv(name, text)
    assert Supervisor().beat_seconds == 2.5
    with contextlib.ExitStack() as opened:
        assert passed_sockets(opened) == [], "they are for process 1"
    assert not said.keys() & os.environ.keys()


@pytest.mark.parametrize(("limit", "process"), [("", ""), ("x", ""), ("5000000", "1")])
def test_a_watchdog_of_nobody_or_of_another_process(monkeypatch: pytest.MonkeyPatch, limit: str, process: str) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", limit)
    monkeypatch.setenv("WATCHDOG_PID", process)
    assert Supervisor().beat_seconds == 0


@pytest.mark.parametrize("address", ["/no/such/socket", "@kestrelpy-nobody", "vsock:2:1", "/" + "x" * 300])
def test_a_message_that_nobody_hears_is_no_trouble(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    Supervisor().ready("listening")
    assert main(["serve", "beanstalk", "-z", "0"]) == 2, "and it says what it always says"


def test_nothing_is_ready_any_more_once_it_ends(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    systemd = Supervisor()
    systemd.stopping("a signal\nwhile it opens")
    systemd.ready("listening")
    systemd.reloaded()
    systemd.status("last")
    assert manager.message() == ["STOPPING=1", "STATUS=a signal while it opens"]
    assert manager.message() == ["STATUS=last"]


# -- sockets -----------------------------------------------------------------------------------------------------------


def test_sockets_by_their_names(tmp_path: Path, listening: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as text, socket.socket(socket.AF_UNIX) as path:
        path.bind(str(tmp_path / "socket"))
        path.listen()
        manager = Manager(str(tmp_path / "notify"))
        try:
            named = {"kestrelpy-kestrel.socket": listening, "text": text, "unknown": path}
            manager.start("kestrel", sockets=named)
            assert manager.message()[0] == "READY=1"
            asked(text.getsockname(), b"put q:\nhello\n\n", b"+1\n")
            asked(listening.getsockname(), b"get q\r\n", b"VALUE q 0 5\r\nhello\r\nEND\r\n")
            asked(str(tmp_path / "socket"), b"get q\r\n", b"END\r\n")
        finally:
            manager.close()


def check_restarts(folder: Path, listening: socket.socket, address: Any) -> None:
    """Clients connect, and ask, at any moment of a service's lives: nobody is refused, everybody is served."""
    manager = Manager(str(folder / "notify"))
    options = ("beanstalk", "--dir", str(folder / "jobs"), "--sync-ms", "0")
    try:
        early = Client(address)  # nobody has ever accepted a client
        early.send(b"put 0 0 60 5\r\nearly\r\n")
        manager.start(*options, sockets={"": listening})
        assert manager.message()[0] == "READY=1"
        early.hear(b"INSERTED 1\r\n")
        for life in range(2):
            assert manager.end(signal.SIGTERM if life else signal.SIGKILL) == (0 if life else -signal.SIGKILL)
            between = Client(address)
            between.send(b"peek 1\r\n")
            manager.start(*options, sockets={"": listening})
            between.hear(b"FOUND 1 5\r\nearly\r\n")
            between.hang_up()
        early.hang_up()
    finally:
        manager.close()


def test_nobody_is_refused_while_a_service_is_started_again(tmp_path: Path, listening: socket.socket) -> None:
    check_restarts(tmp_path, listening, listening.getsockname())


def test_a_path_stays_while_a_service_is_started_again(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)
        one.listen()
        check_restarts(tmp_path, one, path)


def test_clients_are_refused_where_the_service_binds_its_own_address(tmp_path: Path, listening: socket.socket) -> None:
    """Else the two tests above would see nothing."""
    address = listening.getsockname()
    listening.close()
    manager = Manager(str(tmp_path / "notify"))
    try:
        manager.start("beanstalk", "--listen", "{}:{}".format(*address))
        assert manager.message()[0] == "READY=1"
        asked(address, b"use a\r\n", b"USING a\r\n")
        assert manager.end() == 0
        with pytest.raises(ConnectionRefusedError):
            Client(address)
    finally:
        manager.close()


def test_a_loop_that_would_remove_the_path_is_told_not_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As from Python 3.13 on."""
    from asyncio import unix_events

    from kestrelpy.server import BeanstalkServer, run_in_thread

    loop: Any = getattr(unix_events, "_UnixSelectorEventLoop")  # noqa: B009 - private, and there is no other way
    create = loop.create_unix_server
    kept = []

    async def newer(self: Any, protocol: Any, *, sock: socket.socket, backlog: int, cleanup_socket: bool = True) -> Any:
        kept.append(not cleanup_socket)
        return await create(self, protocol, sock=sock, backlog=backlog)

    monkeypatch.setattr(loop, "create_unix_server", newer)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        with run_in_thread(BeanstalkServer(sockets=[one])):
            assert kept == [True]


@pytest.mark.parametrize("kind", ["closed", "datagrams", "connected", "a file"])
def test_descriptors_that_do_not_listen(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        if kind == "closed":
            number = 1_000_000
        elif kind == "a file":
            number = os.open(tmp_path, os.O_RDONLY)
        elif kind == "datagrams":
            number = socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()
        else:
            one, other = socket.socketpair()
            held.enter_context(other)
            number = one.detach()
        monkeypatch.setattr(_systemd, "_FIRST_SOCKET", number)
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with pytest.raises(CommandError, match=f"descriptor {number} of LISTEN_FDS") as caught:
            passed_sockets(held)
        assert caught.value.status == 2
        if kind == "a file":
            os.close(number)


def test_the_real_socket_activation(tmp_path: Path) -> None:
    """It starts the service when the first client comes."""
    program = found("systemd-socket-activate")
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = one.getsockname()
    command = [program, "-l", f"{address[0]}:{address[1]}", *KESTRELPY, "beanstalk", "--dir", str(tmp_path / "jobs")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith(b"Listening on 127.0.0.1:")
            asked(address, b"put 0 0 60 1\r\na\r\n", b"INSERTED 1\r\n")
        finally:
            process.terminate()
            _, said = process.communicate(timeout=PATIENCE)
        assert f"listening at {address[0]}:{address[1]}\n".encode() in said
        assert process.returncode == 0


# -- units -------------------------------------------------------------------------------------------------------------


def found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not there: apt install systemd")
    return path


def analyse(folder: Path, *command: str) -> str:
    """What systemd-analyze has to say of the units, with a program that is there. It does not look at others'."""
    if not any(folder.iterdir()):
        for unit in UNITS.iterdir():
            (folder / unit.name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        [found("systemd-analyze"), *command], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.stdout + done.stderr + (f"status {done.returncode}" if done.returncode else "")


def verdict(folder: Path) -> str:
    if not any(folder.iterdir()):
        analyse(folder, "--version")
    return analyse(folder, "verify", "--man=no", *(f"./{unit.name}" for unit in sorted(folder.iterdir())))


def exposure(folder: Path, unit: str) -> float:
    said = analyse(folder, "security", "--offline=true", f"./{unit}")
    rating = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert rating is not None, said
    return float(rating[1])


def change(unit: Path, old: str, new: str) -> None:
    text = unit.read_text()
    assert old in text
    unit.write_text(text.replace(old, new))


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    assert verdict(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kestrelpy-beanstalk.service", "Type=notify", "Typ=notify"),
        ("kestrelpy-beanstalk.service", "ProtectSystem=strict", "ProtectSystem=stricter"),
        ("kestrelpy-beanstalk.service", sys.executable, "/no/such/program"),
        ("kestrelpy-kestrel.socket", "ListenStream=127", "ListenStream=127.x"),
        ("kestrelpy-kestrel-text.socket", "Service=kestrelpy-kestrel", "Service=kestrelpy-missing"),
    ],
)
def test_a_mistake_in_a_unit_is_seen(tmp_path: Path, name: str, old: str, new: str) -> None:
    assert verdict(tmp_path) == ""
    change(tmp_path / name, old, new)
    assert verdict(tmp_path) != ""


@pytest.mark.parametrize("unit", [one.name for one in SERVICES])
def test_a_service_has_no_more_rights_than_it_needs(tmp_path: Path, unit: str) -> None:
    assert exposure(tmp_path, unit) < HIGHEST_EXPOSURE
    text = (tmp_path / unit).read_text()
    (tmp_path / unit).write_text("\n".join(line for line in text.splitlines() if not line.startswith("SystemCall")))
    assert exposure(tmp_path, unit) >= HIGHEST_EXPOSURE, "what is taken away is seen"


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: str(unit.name))
def test_the_commands_of_the_units_are_understood(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.+)", unit.read_text(), re.M)
    program, *arguments = shlex.split(line.replace("${STATE_DIRECTORY}", "/var/lib/x"))
    args = build_parser().parse_args(arguments)
    assert (program, args.dir, args.sync_ms) == (PROGRAM, "/var/lib/x", 0.0)


def allowed_calls(text: str) -> set[str]:
    """The system calls that the filter of this unit allows, as systemd spells the sets out."""

    def spelled(name: str) -> set[str]:
        said = subprocess.run(
            [found("systemd-analyze"), "syscall-filter", name], capture_output=True, text=True, check=True
        )
        words = re.sub(r"#.*", "", said.stdout).split()[1:]
        return {call for word in words for call in (spelled(word) if word.startswith("@") else {word})}

    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.+)", text, re.M):
        calls = set().union(*map(spelled, line.removeprefix("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


@pytest.mark.parametrize("protocol", ["beanstalk", "kestrel"])
def test_the_filter_of_system_calls_lets_a_server_do_its_work(tmp_path: Path, protocol: str) -> None:
    log = tmp_path / "calls"
    manager = Manager(str(tmp_path / "notify"))
    options = ("--dir", str(tmp_path / "queues"), "--sync-ms", "0", "--listen", "127.0.0.1:0")
    try:
        manager.start(protocol, *options, through=[found("strace"), "-D", "-f", "-qq", "-o", str(log)])
        host, _, port = manager.message()[1].removeprefix("STATUS=listening at ").rpartition(":")
        client = Client((host, int(port)))
        body = b"x" * 60_000
        for number in range(1, 300):  # some segments, and compaction
            if protocol == "beanstalk":
                client.ask(b"put 0 0 60 60000\r\n" + body + b"\r\n", b"INSERTED %d\r\n" % number)
                client.ask(b"delete %d\r\n" % number, b"DELETED\r\n")
            else:
                client.ask(b"set q 0 0 60000\r\n" + body + b"\r\n", b"STORED\r\n")
                client.ask(b"get q\r\n", b"VALUE q 0 60000\r\n" + body + b"\r\nEND\r\n")
        client.hang_up()
        assert manager.end() == 0
        manager.message()
    finally:
        manager.close()
    lines = log.read_text().splitlines()
    started = next(at for at, line in enumerate(lines) if "execve(" in line and line.endswith("= 0"))
    called = {call[1] for line in lines[started + 1 :] if (call := re.match(r"\d+ +(\w+)\(", line))}
    unit = (UNITS / f"kestrelpy-{protocol}.service").read_text()
    assert {"fdatasync", "accept4", "sendto", "fallocate"} <= called
    assert called <= allowed_calls(unit)
    planted = allowed_calls(unit + "\nSystemCallFilter=~@sync\n")
    assert called - planted >= {"fdatasync"}, "a call that is not in the filter is seen"
