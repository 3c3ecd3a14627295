"""A page about the queues of a folder, for a browser: ``kestrelpy dashboard``, or ``serve`` and ``make_app`` here.

Needs the extra ``[dashboard]`` (starlette, uvicorn). docs/dashboard.md is the guide, docs/security.md says who may do
what.

    history   the last hour of each queue, in bounded memory
    sampler   looks at the folder each second or so, on a thread of its own
    letters   dead letters: where they are, and where they come from
    views     what the page is told, as JSON
    changes   what the page may change, if it may
    guard     who is answered: host, origin, token; and the headers of every answer
    app       the pages and endpoints        serving   the address, the token, the server
    static/   the page: HTML, CSS and JavaScript, without a build step
"""

from __future__ import annotations

from kestrelpy.dashboard.app import make_app
from kestrelpy.dashboard.serving import DashboardMistake, serve

__all__ = ["DashboardMistake", "make_app", "serve"]
