"""The pages and endpoints of the dashboard, as an ASGI app. Every answer goes through the guard."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kestrelpy import Clock, KestrelError, SystemClock
from kestrelpy.dashboard.changes import CHANGES, ChangeRefused
from kestrelpy.dashboard.checking import Checker
from kestrelpy.dashboard.guard import App, Guard
from kestrelpy.dashboard.sampler import Sampler
from kestrelpy.dashboard.views import Views

FILES = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def make_app(
    directory: str,
    sampler: Sampler,
    *,
    token: str | None = None,
    allow_changes: bool = False,
    show_data: bool = True,
    hosts: Iterable[str] = (),
    clock: Clock | None = None,
) -> App:
    """The dashboard of ``directory``, whose figures come from ``sampler``, which the caller starts and stops.

    ``token``: endpoints want it. ``allow_changes`` needs one. ``hosts``: names of this machine, beside its addresses,
    that browsers may use. Raises ``ValueError``.
    """
    if allow_changes and token is None:
        raise ValueError("allow_changes needs a token")
    clock = clock if clock is not None else SystemClock()
    answers = _Answers(directory, sampler, clock, allow_changes=allow_changes, show_data=show_data)
    routes = [
        Route("/", answers.page),
        Route("/static/{name}", answers.static),
        Route("/api/about", answers.about),
        Route("/api/queues", answers.queues),
        Route("/api/queue", answers.queue),
        Route("/api/tubes", answers.tubes),
        Route("/api/newest", answers.newest),
        Route("/api/dead", answers.dead),
        Route("/api/verify", answers.checks, methods=["GET"]),
        Route("/api/verify", answers.verify, methods=["POST"]),
        Route("/api/change/{name}", answers.change, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), hosts=hosts, token=token)


class _Answers:
    """The endpoints. What reads files runs on a thread; the rest says what the sampler has seen."""

    def __init__(self, directory: str, sampler: Sampler, clock: Clock, *, allow_changes: bool, show_data: bool) -> None:
        self._directory = directory
        self._sampler = sampler
        self._views = Views(directory, sampler, clock, show_data=show_data)
        self._checker = Checker(directory, clock)
        self._allow_changes = allow_changes
        self._show_data = show_data
        folder = resources.files("kestrelpy.dashboard") / "static"
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    async def page(self, _request: Request) -> Response:
        return self._file("index.html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._file(name) if name in self._files else _said(404, "there is no such file")

    def _file(self, name: str) -> Response:
        return Response(self._files[name], headers={"content-type": FILES[name]})

    async def about(self, _request: Request) -> Response:
        changes = sorted(CHANGES) if self._allow_changes else []
        return _json({"directory": self._directory, "changes": changes, "show_data": self._show_data})

    async def queues(self, request: Request) -> Response:
        return _json(self._views.table(request.query_params))

    async def queue(self, request: Request) -> Response:
        found = self._views.queue(request.query_params.get("name", ""), request.query_params)
        return _json(found) if found is not None else _said(404, "there is no such queue")

    async def tubes(self, request: Request) -> Response:
        return await self._read(self._views.tubes, request)

    async def newest(self, request: Request) -> Response:
        if not self._show_data:
            return _said(403, "this dashboard shows nothing of what is in items")
        return await self._read(self._views.newest, request)

    async def dead(self, request: Request) -> Response:
        return await self._read(self._views.dead, request)

    async def _read(self, look: Any, request: Request) -> Response:
        try:
            found = await run_in_threadpool(look, request.query_params.get("name", ""))
        except (KestrelError, OSError) as error:
            return _said(409, str(error))
        return _json(found) if found is not None else _said(404, "there is no such queue")

    async def checks(self, _request: Request) -> Response:
        return _json(self._checker.state())

    async def verify(self, request: Request) -> Response:
        fields = await _fields(request)
        name = None if fields is None else fields.get("queue")
        one = self._sampler.snapshot.queues.get(name) if isinstance(name, str) else None
        if one is None or not one.exists:
            return _said(404, "there is no such queue")
        if not self._checker.start(one.name):
            return _said(409, "another queue is being checked: one at a time")
        return _json({"running": one.name})

    async def change(self, request: Request) -> Response:
        if not self._allow_changes:
            return _said(403, "this dashboard changes nothing: start it with --allow-changes")
        change = CHANGES.get(request.path_params["name"])
        fields = await _fields(request)
        if change is None or fields is None:
            return _said(404, "there is no such change")
        try:
            changed = await run_in_threadpool(change, self._directory, fields)
        except (ChangeRefused, KestrelError, OSError, ValueError) as error:
            return _said(409, str(error))
        return _json(changed._asdict())


async def _fields(request: Request) -> dict[str, Any] | None:
    """The body, which the guard has found to be small; ``None`` if it is no JSON object."""
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _json(value: object) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _said(status: int, reason: str) -> Response:
    return Response(json.dumps({"error": reason}), status_code=status, media_type="application/json")
