"""What a server that is a process of its own logs: where it listens, each signal, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
SIGNALS = {"beanstalk": signal.SIGUSR1, "kestrel": signal.SIGHUP}


@pytest.mark.parametrize("protocol", SIGNALS)
def test_a_server_says_where_it_listens_and_each_signal(protocol: str, tmp_path: Path) -> None:
    program = f"""
import logging, sys
from kestrelpy.server import serve
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
serve({str(tmp_path / "jobs")!r}, protocol={protocol!r}, listen=["127.0.0.1:0", "unix:{tmp_path}/socket"])
"""
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert server.stderr is not None
        name = f"{protocol.capitalize()}Server"
        began = server.stderr.readline()
        assert began.startswith(f"kestrelpy.server {name}: listening at 127.0.0.1:"), began
        assert began.endswith(f", unix:{tmp_path}/socket\n"), began
        server.send_signal(SIGNALS[protocol])
        assert server.stderr.readline() == f"kestrelpy.server {name}: got {SIGNALS[protocol].name}\n"
        server.send_signal(signal.SIGTERM)
        assert server.stderr.readline() == f"kestrelpy.server {name}: got SIGTERM\n"
        assert server.stderr.read() == f"kestrelpy.server {name}: stopped\n"
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.communicate()
