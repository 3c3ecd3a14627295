"""``MetricsServer``: one page, and nothing else, for whoever asks in whatever way."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kestrelpy import JournaledQueue
from kestrelpy.metrics import Collector, MetricsServer
from kestrelpy.metrics.page_server import CLIENTS
from tests.support.patience import PATIENCE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetricsServer]:
    with JournaledQueue(tmp_path, "jobs") as queue:
        registry = CollectorRegistry()
        registry.register(Collector(queue))
        with MetricsServer(registry, port=0) as server:
            yield server


def ask(server: MetricsServer, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_get_and_head_of_the_page(server: MetricsServer) -> None:
    status, headers, body = ask(server, "GET", "/metrics")
    assert (status, headers["content-length"]) == (200, str(len(body)))
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'kestrel_up{queue="jobs"} 1.0' in body
    head_status, head_headers, nothing = ask(server, "HEAD", "/metrics")
    assert (head_status, nothing) == (200, b"")
    assert head_headers["content-type"] == headers["content-type"]
    assert int(head_headers["content-length"]) > 0


def test_the_query_changes_nothing(server: MetricsServer) -> None:
    assert b"kestrel_up" in ask(server, "GET", "/metrics?name[]=other")[2]


def test_openmetrics_and_compression(server: MetricsServer) -> None:
    accepted = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    status, headers, body = ask(server, "GET", "/metrics", **accepted)
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert gzip.decompress(body).endswith(b"# EOF\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics2", "/favicon.ico", "/%2e%2e/metrics", "*"])
def test_other_pages_are_not_there(server: MetricsServer, path: str) -> None:
    assert ask(server, "GET", path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X"])
def test_other_methods_are_refused(server: MetricsServer, method: str) -> None:
    status, headers, _ = ask(server, method, "/metrics")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "said", [b"\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n", b"G" * 100_000, b""]
)
def test_noise_ends_one_connection(server: MetricsServer, said: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(OSError), socket.create_connection(server.address, timeout=PATIENCE) as noisy:
        noisy.sendall(said)  # the server may hang up in the middle
        noisy.shutdown(socket.SHUT_WR)
        while noisy.recv(65536):
            pass
    assert ask(server, "GET", "/metrics")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_silent_clients_take_no_more_than_their_places(server: MetricsServer) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(server.address)) for _ in range(CLIENTS)]
        with socket.create_connection(server.address, timeout=PATIENCE) as another:
            another.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with suppress(ConnectionResetError):
                assert another.recv(1) == b""
        assert threading.active_count() < 2 * CLIENTS + 20
        for each in silent[:2]:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            each.settimeout(PATIENCE)
            assert each.recv(12) == b"HTTP/1.0 200"


def test_a_port_in_use_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(CollectorRegistry(), *server.address)


def test_closing_it_gives_up_the_port() -> None:
    server = MetricsServer(CollectorRegistry(), port=0)
    address = server.address
    server.start()
    server.close()
    server.close()
    MetricsServer(CollectorRegistry(), *address).close()


def test_ipv6() -> None:
    try:
        server = MetricsServer(CollectorRegistry(), "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        assert server.address[0] == "::1"
        assert ask(server, "GET", "/metrics")[0] == 200
