"""A dashboard in a process of its own, as a shell starts it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT
from tests.support.patience import PATIENCE


class Served(NamedTuple):
    """A dashboard that listens. ``token``: the one that it made, or empty."""

    process: subprocess.Popen[bytes]
    url: str
    token: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].strip("/"))

    @property
    def whole_url(self) -> str:
        """With the token, as the server said it."""
        return self.url + (f"#token={self.token}" if self.token else "")


@contextlib.contextmanager
def dashboard(
    folder: Path, *options: str, port: int = 0, patched_by: str = "", env: dict[str, str] | None = None
) -> Iterator[Served]:
    """A dashboard of ``folder``. ``patched_by``: Python that runs first in its process, to plant a fault."""
    arguments = ["dashboard", str(folder), "--listen", f"127.0.0.1:{port}", *options]
    program = f"{patched_by}\nimport sys\nfrom kestrelpy.cli import main\nsys.exit(main({arguments!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        found = re.search(r"listening at (http://[^#\s]*)(?:#token=(\S+))?", line)
        assert found, line + process.stderr.read().decode()
        yield Served(process, found[1], found[2] or "")
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: str


def ask(served: Served, path: str, body: bytes | None = None, method: str | None = None, /, **headers: str) -> Answer:
    """A request as it stands here; ``_`` in the name of a header is a dash."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.url.rstrip("/") + path, data=body, headers=sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read().decode())


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """What the process has used of a processor so far."""
    words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
