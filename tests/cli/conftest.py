"""Commands in this process and in processes of their own, and the databases of the outbox's tests."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from kestrelpy.cli import main
from tests.cli.programs import Done, Process, Run, Spawn
from tests.support.paths import ROOT

if importlib.util.find_spec("sqlalchemy") is not None:  # without it, the other commands are tested all the same
    from tests.outbox.conftest import (  # noqa: F401 - fixtures, also of this folder
        database_url,
        postgres_cluster,
        postgres_installed,
        postgres_url,
        pytest_runtest_makereport,
        sqlite_url,
    )


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process."""

    def one(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main([str(argument) for argument in arguments])
        out, err = capsysbinary.readouterr()
        return Done(status, out, err.decode())

    return one


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a command in a process of its own; none is left behind."""
    started: list[Process] = []

    def one(*arguments: object, stdout: int | BinaryIO = subprocess.PIPE, unbuffered: bool = False) -> Process:
        command = [sys.executable, *(["-u"] if unbuffered else []), "-m", "kestrelpy", *map(str, arguments)]
        pipe = subprocess.PIPE
        process = Process(command, cwd=ROOT, stdin=pipe, stdout=stdout, stderr=pipe, bufsize=0)
        started.append(process)
        return process

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
