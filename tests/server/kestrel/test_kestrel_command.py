"""``kestrelpy serve kestrel`` as a process: its options, its signals, its exit status, and what survives its death."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import PATIENCE, Client
from tests.server.kestrel.test_memcache import put, value


class Process:
    """The command, once it listens."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kestrelpy", "serve", "kestrel", *options], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], PATIENCE)
        assert ready
        self.said = self.process.stderr.readline()
        self.addresses = [(host, int(port)) for host, port in re.findall(r"(127\.0\.0\.1):(\d+)", self.said)]

    def client(self) -> Client:
        return Client(self.addresses[0])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the signal; the exit status, and what was said beside the signal's name."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE)
        last = f"kestrelpy serve: stopped by {signal.Signals(number).name}\n"
        assert said.endswith(last)
        return self.process.returncode, said.removesuffix(last)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


HERE = ("--listen", "127.0.0.1:0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_status_0(tmp_path: Path, number: int) -> None:
    """KP-1.10: SIGTERM, SIGINT: waiting gets are answered, status 0; printed are where it listens and the signal."""
    with Process("--dir", str(tmp_path / "new"), *HERE) as server:
        assert re.fullmatch(r"kestrelpy serve: listening at 127\.0\.0\.1:\d+\n", server.said)
        client = server.client()
        put(client, b"q", b"a")
        client.send(b"get r/t=60000\r\n")
        with socket.create_connection(server.addresses[0]):
            assert server.end(number) == (0, "")
        client.hear(b"END\r\n")
        client.hear_the_end()
        client.hang_up()


def test_a_config_file_and_its_reload(tmp_path: Path) -> None:
    """KP-1.4, KP-1.18: --config, SIGHUP: as reload."""
    config = tmp_path / "kestrel.toml"
    config.write_text("max_open_transactions = 7\n[queues.q]\nmax_items = 1\n")
    with Process("--config", str(config), *HERE) as server:
        client = server.client()
        put(client, b"q", b"1")
        client.ask(b"set q 0 0 1\r\n2\r\n", b"NOT_STORED\r\n")
        config.write_text("[queues.q]\nmax_items = 2\n")
        server.process.send_signal(signal.SIGHUP)
        while True:
            client.send(b"dump_config q\r\n")
            lines = [client.line() for _ in range(20)]
            client.hear(b"END\r\n")
            if b"  max_items=2\r\n" in lines:
                break
        put(client, b"q", b"2")
        client.send(b"shutdown\r\n")
        assert server.process.wait(PATIENCE) == 0  # a client has ended it
        client.hang_up()


def test_where_it_listens(tmp_path: Path) -> None:
    """KP-1.2, KP-1.3, KP-1.20: --listen, --text, --thrift; listen, text, thrift: may be repeated, and unix sockets;
    the options win.
    """
    config = tmp_path / "kestrel.toml"
    config.write_text('listen = "127.0.0.1:1"\ntext = "127.0.0.1:0"\nthrift = "127.0.0.1:0"\n')
    path = tmp_path / "socket"
    with Process("--config", str(config), "--listen", f"unix:{path}", *HERE, "--text", "127.0.0.1:0") as server:
        assert server.said.count("127.0.0.1:") == 3
        assert f"unix:{path}" in server.said
        for address, line, reply in (
            (str(path), b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n"),
            (server.addresses[0], b"version\r\n", b"VERSION 2.4.7+kestrelpy\r\n"),
            (server.addresses[1], b"version\n", b":2.4.7+kestrelpy\n"),
            (server.addresses[2], b"\0\0\0\x18\x80\x01\0\x01\0\0\0\x0bget_version\0\0\0\x01\0", b"\0\0\0\x2e"),
        ):
            client = Client(address)
            client.ask(line, reply)
            client.hang_up()


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--config", "CONFIG"], 2, r"CONFIG: max_itemz: there is no such key"),
        (["--dir", ""], 2, r"--dir: the name of the folder is empty"),
        (["--listen", "127.0.0.1:99999"], 2, r"is not a port"),
        (["--sync-ms", "x"], 2, r"must be a number of milliseconds"),
        (["--config", "/does/not/exist/kestrel.toml"], 2, r"/does/not/exist/kestrel.toml: No such file"),
        (["--config", ""], 2, r"--config: the name of the file is empty"),
        (["--listen", ""], 2, r"the address is empty|must be an address"),
    ],
)
def test_wrong_use(tmp_path: Path, options: list[str], status: int, said: str) -> None:
    """KP-1.14."""
    config = tmp_path / "CONFIG"
    config.write_text("max_itemz = 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "kestrelpy", "serve", "kestrel", *HERE, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == status
    assert re.search(said, done.stderr)
    assert "Traceback" not in done.stderr


def test_a_second_server_ends_with_status_10(tmp_path: Path) -> None:
    """KP-1.1: --dir: one process at a time: otherwise exit 10 with one line."""
    with Process("--dir", str(tmp_path), *HERE):
        second = subprocess.run(
            [sys.executable, "-m", "kestrelpy", "serve", "kestrel", "--dir", str(tmp_path), *HERE],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert second.returncode == 10
        assert len(second.stderr.splitlines()) == 1


@pytest.mark.parametrize("sync", [("--sync-ms", "0"), ("--sync-ms", "100"), ("--no-sync",)])
def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path, sync: tuple[str, ...]) -> None:
    """KP-1.5, KP-1.6, KP-2.13: crash, --sync-ms, --max-open-reads: STORED is there after kill -9; what was answered
    does not come again.
    """
    options = ("--dir", str(tmp_path), "--max-open-reads", "5", *HERE, *sync)
    with Process(*options) as server:
        client = server.client()
        client.ask(b"get q+a\r\n", b"END\r\n")
        put(client, b"q", *[b"%d" % number for number in range(6)])
        client.ask(b"get q\r\n", value(b"q", b"0"))
        client.ask(b"get q/open\r\nget q/close\r\n", value(b"q", b"1") + b"END\r\n")
        client.ask(b"get q/open\r\nget q/open\r\n", value(b"q", b"2") + value(b"q", b"3"))
        client.ask(b"confirm q 1\r\n", b"END\r\n")
        client.ask(b"get q+a\r\n", value(b"q+a", b"0"))
        client.ask(
            b"delete gone\r\nset gone 0 0 1\r\nx\r\nget gone\r\n", b"DELETED\r\nSTORED\r\n" + value(b"gone", b"x")
        )
        client.ask(b"delete gone\r\nset gone 0 0 1\r\ny\r\n", b"DELETED\r\nSTORED\r\n")
        os.kill(server.process.pid, signal.SIGKILL)
        client.hang_up()
    with Process(*options) as server:
        client = server.client()
        for body in (b"3", b"4", b"5"):
            client.ask(b"get q\r\n", value(b"q", body))
        client.ask(b"get q\r\n", b"END\r\n")
        for body in (b"1", b"2", b"3", b"4", b"5"):
            client.ask(b"get q+a\r\n", value(b"q+a", body))
        client.ask(b"get q+a\r\nget gone\r\n", b"END\r\n" + value(b"gone", b"y"))
        client.hang_up()
        assert server.end()[0] == 0
