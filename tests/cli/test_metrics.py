"""``kestrelpy metrics``, and ``--metrics`` of the servers: where they listen, how they end, what they refuse."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from tests.cli.programs import Process, Run, Spawn, refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

ANY = "127.0.0.1:0"


def url_of(line: bytes) -> str:
    """The page that a command says it serves."""
    said = line.decode()
    assert "figures at http://" in said, said
    return said.strip().partition("figures at ")[2]


def said_by(process: Process) -> bytes:
    """The next line on its standard error."""
    assert process.stderr is not None
    return process.stderr.readline()


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path: Path, spawn: Spawn, number: signal.Signals) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"x")
        process = spawn("metrics", tmp_path, "--listen", ANY)
        line = said_by(process)
        assert line.startswith(b"kestrelpy metrics: figures at http://127.0.0.1:")
        assert 'kestrel_put_total{queue="jobs"} 1.0' in page(url_of(line))
        queue.put(b"x")
        assert 'kestrel_put_total{queue="jobs"} 2.0' in page(url_of(line))
        process.send_signal(number)
        assert process.communicate(timeout=PATIENCE) == (b"", b"")
        assert process.returncode == 0


def test_it_changes_nothing_in_the_folder(tmp_path: Path, spawn: Spawn) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"x")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    process = spawn("metrics", tmp_path, "--listen", ANY)
    page(url_of(said_by(process)))
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_port_in_use_is_one_line(tmp_path: Path, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(run("metrics", tmp_path, "--listen", address), 1, "cannot listen at", address, "in use")
        for server in ("beanstalk", "kestrel"):
            done = run("serve", server, "--listen", ANY, "--metrics", address)
            refused(done, 1, "cannot listen at", address, "in use")


@pytest.mark.parametrize("address", ["unix:/tmp/x", "127.0.0.1:x", "127.0.0.1:70000", ""])
def test_an_address_that_can_not_be(tmp_path: Path, run: Run, address: str) -> None:
    refused(run("metrics", tmp_path, "--listen", address), 2, "--listen")
    refused(run("serve", "beanstalk", "--listen", ANY, "--metrics", address), 2, "--metrics")


def test_a_folder_that_is_not_there(tmp_path: Path, run: Run) -> None:
    refused(run("metrics", tmp_path / "nowhere", "--listen", ANY), 1, "nowhere", "no such folder")


def test_without_the_extra_it_is_one_line(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    refused(run("metrics", tmp_path, "--listen", ANY), 1, "--listen", "pip install 'kestrelpy[metrics]'")


def test_without_the_extras_the_module_says_what_is_missing(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('prometheus_client', 'prometheus_client.core', 'opentelemetry'): sys.modules[name] = None\n"
        "from kestrelpy.metrics import Collector, MetricsServer, observe\n"
        "for make in (lambda: Collector('x'), lambda: MetricsServer(None), lambda: observe(None, 'x')):\n"
        "    try: make()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    said = done.stdout.splitlines()
    assert [line.partition("pip install ")[2] for line in said] == [
        "'kestrelpy[metrics]'",
        "'kestrelpy[metrics]'",
        "'kestrelpy[otel]'",
    ]


def test_the_page_beside_a_beanstalk_server(tmp_path: Path, spawn: Spawn) -> None:
    process = spawn("serve", "beanstalk", "--dir", tmp_path, "--listen", ANY, "--metrics", ANY)
    listening, line = said_by(process).decode(), said_by(process)
    host, _, port = listening.strip().partition("listening at ")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client, client.makefile("rb") as replies:
        client.sendall(b"use mail\r\nput 0 0 60 1\r\nx\r\nput 0 100 60 1\r\ny\r\nreserve-with-timeout 0\r\n")
        assert [replies.readline() for _ in range(4)][-1] == b"TIMED_OUT\r\n"
        text = page(url_of(line))
        for sample in (
            "kestrel_server_connections 1.0",
            'kestrel_server_commands_total{command="put"} 2.0',
            'kestrel_server_commands_total{command="reserve-with-timeout"} 1.0',
            'kestrel_jobs{queue="work",state="ready",tube="mail"} 1.0',
            'kestrel_jobs{queue="work",state="delayed",tube="mail"} 1.0',
            'kestrel_up{queue="work"} 1.0',
        ):
            assert sample in text.splitlines(), sample
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert said == b"kestrelpy serve: stopped by SIGTERM\n"
    assert process.returncode == 0


def test_the_page_beside_a_kestrel_server(tmp_path: Path, spawn: Spawn) -> None:
    process = spawn("serve", "kestrel", "--dir", tmp_path, "--listen", ANY, "--metrics", ANY)
    listening, line = said_by(process).decode(), said_by(process)
    host, _, port = listening.strip().partition("listening at ")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client, client.makefile("rb") as replies:
        client.sendall(b"set jobs 0 0 1\r\nx\r\nget jobs+audit\r\nset jobs 0 0 3\r\nxyz\r\nget jobs/open\r\n")
        assert [replies.readline() for _ in range(6)][-3:] == [b"VALUE jobs 0 1\r\n", b"x\r\n", b"END\r\n"]
        client.sendall(b'set a"b 0 0 1\r\nx\r\nget jobs+wait/t=100000\r\n')
        assert replies.readline() == b"STORED\r\n"
        url = url_of(line)
        until(lambda: 'kestrel_waiting_consumers{queue="jobs",reader="wait"} 1.0' in page(url))
        text = page(url)
        for sample in (
            "kestrel_server_connections 1.0",
            'kestrel_server_commands_total{command="set"} 3.0',
            'kestrel_items{queue="jobs",reader=""} 2.0',
            'kestrel_open_items{queue="jobs",reader=""} 1.0',
            'kestrel_items{queue="jobs",reader="audit"} 1.0',
            'kestrel_items{queue="a\\"b",reader=""} 1.0',
        ):
            assert sample in text.splitlines(), (sample, text)
