"""A cluster whose executors do not see the owner's folder, beside a store: what the programs on it and their tests
begin with.

The executors are processes of ``local-cluster``. Their Python workers run in a mount namespace of their own, in which
an empty file system lies over the folder. So this needs a user who may mount, as in a container of CI.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kestrelpy.ship import Ship
from tests.spark.sessions import need_java
from tests.support import seaweed
from tests.support.paths import ROOT

_numbers = itertools.count(1)
_PYTHON = """\
#!/bin/sh
# Python for Spark; for an executor, with nothing in the owner's folder.
if tr '\\0' ' ' < "/proc/$PPID/cmdline" | grep -q CoarseGrainedExecutorBackend; then
    exec unshare -m sh -c 'mount -t tmpfs hidden "$0" && exec "$@"' "{folder}" "{python}" "$@"
fi
exec "{python}" "$@"
"""
_BEGINNING = """\
import os, sys
sys.path[:0] = sys.argv[5:]
from tests.spark.sessions import cluster
base, url, endpoint, python = sys.argv[1:5]
options = {"queue": "jobs"}
if endpoint:
    options |= {"storeEndpoint": endpoint, "storeRegion": "us-east-1", "storeAllowHttp": "true"}
"""


class StoreCluster(NamedTuple):
    """``folder``: the owner's. ``url``, ``options``: of the store. ``command``, ``environment``: of the program."""

    folder: Path
    url: str
    options: dict[str, Any] | None
    command: list[str]
    environment: dict[str, str]

    def ship(self, **more: Any) -> Ship:
        """How the owner ships its queue."""
        return Ship(self.url, interval=0, options=self.options, **more)


def store_cluster(tmp_path: Path, kind: str, request: pytest.FixtureRequest, program: str) -> StoreCluster:
    """``kind``: of the store, ``"s3"`` or ``"folder"``. ``program`` finds ``base``, which is ``tmp_path``, ``url``,
    ``options``, those of a read or write, and ``python``, that of ``cluster``. Skips the test where it can't run.
    """
    need_java()
    folder = tmp_path / "queues"
    folder.mkdir()
    _need_mounts(folder)
    environment = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path / "work"), "OWNERS_FOLDER": str(folder)}
    url, endpoint, options = f"file://{tmp_path}/store", "", None
    if kind == "s3":
        s3: seaweed.Seaweed = request.getfixturevalue("s3")
        url, endpoint, options = f"s3://{seaweed.BUCKET}/cluster-{next(_numbers)}", s3.endpoint, s3.options()
        environment |= {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret}
    python = tmp_path / "python"
    python.write_text(_PYTHON.format(folder=folder, python=sys.executable))
    python.chmod(0o755)
    text = _BEGINNING + textwrap.dedent(program)
    command = [sys.executable, "-c", text, str(tmp_path), url, endpoint, str(python), str(ROOT)]
    return StoreCluster(folder, url, options, command, environment)


def _need_mounts(folder: Path) -> None:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "hidden", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode:
        pytest.skip("this user may not mount")
