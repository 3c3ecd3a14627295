"""Who is answered, and the headers of every answer.

Rules:
1. ``Host`` is an IP address, ``localhost`` or a name that was allowed. A page of somebody else whose name leads to this
   address (DNS rebinding) has another one.
2. Where there is an ``Origin``, it is that of ``Host``; an endpoint is not answered for a page of another site.
3. A POST has the header ``X-Kestrelpy``, which a form of another site cannot send, and a body of JSON that is small.
   There are no cookies, so nothing is sent along by itself.
4. If there is a token, endpoints want it, as ``Authorization: Bearer``. It is compared in constant time. The page
   itself and its files say nothing of the folder, and are sent without.
5. No answer is stored or framed. Scripts and styles come from this server alone, none is inline, and the browser turns
   no text into markup (``require-trusted-types-for``).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 4096
CHANGE_HEADER = "x-kestrelpy"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    reason: str


class Guard:
    """Stands before an ASGI app. ``hosts``: names that ``Host`` may have, beside addresses. ``token``: as above."""

    def __init__(self, app: App, *, hosts: Iterable[str], token: str | None) -> None:
        self._app = app
        self._hosts = {name.lower() for name in hosts}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(refusal, send)
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        path = scope["path"]
        host = headers.get("host", [])
        if len(host) != 1 or not self.is_known_host(host[0]):
            return Refusal(403, "this name of the server is not known to it; see --allow-host")
        origins = headers.get("origin", [])
        if any(origin.partition("://")[2].lower() != host[0].lower() for origin in origins):
            return Refusal(403, "the request comes from a page of another site")
        is_endpoint = path.startswith("/api/")
        if is_endpoint and not set(headers.get("sec-fetch-site", [])) <= {"same-origin", "none"}:
            return Refusal(403, "the request comes from a page of another site")
        if scope["method"] not in ("GET", "HEAD"):
            refusal = _refusal_of_post(scope["method"], headers)
            if refusal is not None:
                return refusal
        if is_endpoint and self._token is not None and not self._has_token(headers.get("authorization", [])):
            return Refusal(401, "the token is missing or wrong")
        return None

    def is_known_host(self, host: str) -> bool:
        """Whether ``Host`` may say so: with a port or without."""
        name = host.lower()
        if name.startswith("["):
            name, bracket, rest = name[1:].partition("]")
            port = rest[1:] if rest.startswith(":") else ("0" if bracket and not rest else "")
        else:
            name, colon, port = name.partition(":")
            port = port if colon else "0"
        if not (port.isascii() and port.isdigit()):
            return False
        return name == "localhost" or name in self._hosts or _is_address(name)

    def _has_token(self, given: list[str]) -> bool:
        assert self._token is not None
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._token.encode())


def _refusal_of_post(method: str, headers: dict[str, list[str]]) -> Refusal | None:
    if method != "POST":
        return Refusal(405, "GET or POST")
    if headers.get(CHANGE_HEADER) != ["1"]:
        return Refusal(403, "a POST wants the header X-Kestrelpy: 1")
    if headers.get("content-type", [""])[0].partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, "the body is to be JSON")
    length = headers.get("content-length", [""])
    if len(length) != 1 or not (length[0].isascii() and length[0].isdigit()) or "transfer-encoding" in headers:
        return Refusal(411, "the length of the body is not known")
    if int(length[0].lstrip("0")[:10] or "0") > MAX_BODY_BYTES:
        return Refusal(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    return None


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = refusal.reason.encode()
    kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": [*kind, *HEADERS]})
    await send({"type": "http.response.body", "body": body})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
