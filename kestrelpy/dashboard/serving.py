"""Serves the dashboard: the address, the token, the server, until a signal ends it."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterable

import uvicorn

from kestrelpy.dashboard.app import make_app
from kestrelpy.dashboard.sampler import Sampler

MIN_TOKEN_CHARACTERS = 16
_TOKEN_BYTES = 24
_BACKLOG = 128
_MOST_CONNECTIONS = 200
_ENDING_SECONDS = 2


class DashboardMistake(Exception):
    """The options do not go together, or the address is none."""


def serve(
    directory: str,
    *,
    listen: str = "127.0.0.1:8922",
    token: str | None = None,
    allow_changes: bool = False,
    show_data: bool = True,
    hosts: Iterable[str] = (),
    say: Callable[[str], object] = bool,
) -> None:
    """Serve the dashboard of ``directory`` at ``listen`` (HOST:PORT) until a signal ends it.

    ``token``: what a browser has to know. With ``allow_changes``, one is made if none is given; ``say`` is told it
    once, with the address. An address that is not loopback wants a token that was given. ``hosts``: names of this
    machine that browsers use. Raises ``DashboardMistake``, ``OSError``.
    """
    host, port = parse_listen(listen)
    if token is not None:
        check_token(token)
    else:
        _require_loopback(host)
    made = secrets.token_urlsafe(_TOKEN_BYTES) if allow_changes and token is None else None
    names = {*hosts, host} - {""}
    sampler = Sampler(directory)
    app = make_app(
        directory,
        sampler,
        token=token if made is None else made,
        allow_changes=allow_changes,
        show_data=show_data,
        hosts=names,
    )
    bound = _bind(host, port)
    try:
        if token is None:
            _require_loopback(bound.getsockname()[0])  # what the name stands for here
        sampler.start()
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound.getsockname()[1]}/"
        say(f"listening at {url}" + (f"#token={made}" if made is not None else ""))
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_ENDING_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        sampler.stop()
        bound.close()


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``DashboardMistake``."""
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise DashboardMistake(f"--listen: {listen!r} is not HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name but ``localhost`` may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise DashboardMistake(
            f"{host} can be reached from other machines: give a token, by --token-file or KESTRELPY_DASHBOARD_TOKEN"
        )


def check_token(token: str) -> None:
    """Raise ``DashboardMistake`` for a token that is easily guessed, or that a header cannot carry."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise DashboardMistake(f"a token has at least {MIN_TOKEN_CHARACTERS} characters, not {len(token)}")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise DashboardMistake("a token is ASCII without spaces")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound
