"""How the jobs of an outbox are shown: a line, a page, or a JSON object for each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from kestrelpy.cli._common import escaped, iso, printable, table

if TYPE_CHECKING:
    from kestrelpy.outbox import Job

_MAX_CELL = 60
_FACTS = (
    ("id", "id"),
    ("queue", "queue"),
    ("key", "key"),
    ("group", "group"),
    ("lane", "lane"),
    ("status", "status"),
    ("priority", "priority"),
    ("tries", "tries"),
    ("waits for", "depends_on"),
    ("worker", "worker"),
    ("added", "added_ms"),
    ("due", "due_ms"),
    ("started", "started_ms"),
    ("finished", "finished_ms"),
    ("first error", "first_error_ms"),
    ("context", "context"),
)
"""The lines of a page about a job, and the attributes that are on them."""


def json_line(job: Job) -> str:
    """A job as a JSON object. The payload is under ``payload`` if it is JSON, and else under ``payload_text`` or, if
    the codec gave bytes, in base64 under ``payload_base64``.
    """
    fields: dict[str, Any] = {name: getattr(job, name) for _, name in _FACTS}
    fields["error"] = job.error
    stored = job.stored
    if isinstance(stored, bytes):
        fields["payload_base64"] = base64.b64encode(stored).decode("ascii")
        return json.dumps(fields)
    try:
        fields["payload"] = json.loads(stored, parse_constant=_refuse)
        return json.dumps(fields)
    except (ValueError, RecursionError):
        fields.pop("payload", None)
        fields["payload_text"] = stored
        return json.dumps(fields)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def jobs_table(jobs: Iterable[Job]) -> str:
    """A line for each job."""
    rows = [("id", "queue", "key", "status", "tries", "added", "due", "payload")]
    for job in jobs:
        due = iso(job.due_ms) if job.status in ("ready", "running", "error") else ""
        names = (str(job.id), escaped(job.queue), _cut(job.key or ""), escaped(job.status))
        rows.append((*names, f"{job.tries:,}", iso(job.added_ms), due, _cut(job.stored)))
    return table(rows, numbers=(0, 4))


def errors_table(jobs: Iterable[Job]) -> str:
    """A line for each job that has failed."""
    rows = [("id", "queue", "key", "status", "tries", "first error", "due", "error")]
    for job in jobs:
        due = iso(job.due_ms) if job.status == "error" else ""
        first = "" if job.first_error_ms is None else iso(job.first_error_ms)
        names = (str(job.id), escaped(job.queue), _cut(job.key or ""), escaped(job.status))
        rows.append((*names, f"{job.tries:,}", first, due, _cut(last_line(job.error))))
    return table(rows, numbers=(0, 4))


def page(job: Job) -> str:
    """All that is known of a job. What it was given and how it failed come last, on lines of their own."""
    lines = []
    for title, name in _FACTS:
        value = getattr(job, name)
        if value is not None:
            text = iso(value) if name.endswith("_ms") else str(value)
            lines.append(f"{title:<12}{escaped(text)}")
    stored = job.stored
    lines += ["", "payload", f"    {_shown(stored)}"]
    if job.error:
        lines += ["", "error", *(f"    {escaped(line)}" for line in job.error.splitlines())]
    return "\n".join(lines) + "\n"


def last_line(error: str | None) -> str:
    """Of a traceback: what was raised."""
    lines = (error or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _shown(stored: str | bytes) -> str:
    return printable(stored) if isinstance(stored, bytes) else escaped(stored)


def _cut(stored: str | bytes) -> str:
    """The beginning, for a cell of a table."""
    text = _shown(stored[: _MAX_CELL + 1])
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "..."
