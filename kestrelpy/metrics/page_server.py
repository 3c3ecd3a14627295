"""``MetricsServer``: the page ``/metrics`` for Prometheus, in a program that serves no pages of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer"]

CLIENTS = 16
"""How many clients are served at a time. Others are hung up on: a page for one or two Prometheus needs no more."""
PATIENCE_SECONDS = 10.0
"""How long a client may take to say what it wants, and to read a part of the page."""
PATH = "/metrics"

_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves the page of a registry of ``prometheus_client`` at ``http://HOST:PORT/metrics``, and nothing else.

    It listens when it is made, and serves from ``start`` to ``close``, on threads of its own. Port 0: any free port;
    ``address`` says which. There is no encryption and no password: whoever reaches the port sees the names of queues
    and their figures, and no items. Raises ``OSError`` if it can't listen there, ``ImportError`` without
    ``prometheus_client``.
    """

    def __init__(self, registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 9464) -> None:
        try:
            from prometheus_client import make_wsgi_app
        except ImportError as error:
            raise ImportError("a MetricsServer needs prometheus_client: pip install 'kestrelpy[metrics]'") from error
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = (found[0][0], found[0][4]) if host else (socket.AF_INET, ("", port))
        self.registry = registry
        self._server = _Server(family, address, _only_page(make_wsgi_app(registry)))
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Begin to serve. Raises ``RuntimeError`` if no thread can be started."""
        thread = threading.Thread(target=self._server.serve_forever, name="kestrelpy-metrics", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Serve no more, and give up the port. May be repeated."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._server.shutdown()
            thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(WSGIRequestHandler):
    """One client. What it does wrong is not logged: a stranger would fill the log."""

    timeout = PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CLIENTS

    def __init__(self, family: int, address: Any, app: _App) -> None:
        self.address_family = family
        self._room = threading.BoundedSemaphore(CLIENTS)
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind, without the look for the host's full name, which may wait for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has hung up, or was too slow: nobody has to know."""


def _only_page(app: _App) -> _App:
    """``app``, for GET and HEAD of the page alone. The query is not looked at."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        if environ["PATH_INFO"] != PATH:
            return _refuse(start_response, "404 Not Found", [], f"the page is {PATH}\n")
        if method not in ("GET", "HEAD"):
            return _refuse(start_response, "405 Method Not Allowed", [("Allow", "GET, HEAD")], "GET or HEAD\n")
        found: list[Any] = []

        def keep(status: str, headers: list[tuple[str, str]]) -> None:
            found.extend((status, headers))

        body = b"".join(app({**environ, "REQUEST_METHOD": "GET", "QUERY_STRING": ""}, keep))
        status, headers = found
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body] if method == "GET" else []

    return answer


def _refuse(
    start_response: Callable[..., Any], status: str, headers: list[tuple[str, str]], text: str
) -> Iterable[bytes]:
    body = text.encode()
    plain = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, [*headers, *plain])
    return [body]
