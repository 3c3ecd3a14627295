"""Servers from npm, for tests: installed once into a cache, and run on the loopback until the test is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.budget import ALL

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrelpy" / "npm"
"""Each version of a package has a folder here. ``make test-all`` installs it; other runs use what is there."""
SECONDS = 300
KEEPER = r"""
folder=$1; shift
"$@" >"$folder/log" 2>&1 </dev/null &
read -r _
kill -KILL $!
rm -rf "$folder"
"""
"""Ends the server and removes its folder when a pipe ends: so also when this process dies, whichever way."""


class Package(NamedTuple):
    """A package of npm, and the program in it."""

    name: str
    version: str
    program: str

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.version}"

    @property
    def path(self) -> Path:
        return self.folder / "node_modules" / ".bin" / self.program


AZURITE = Package("azurite", "3.35.0", "azurite-blob")
S3RVER = Package("s3rver", "3.7.1", "s3rver")


def missing(package: Package) -> str:
    """Why the package cannot be used, in one line; empty if it can. Installs it, in ``make test-all``."""
    if package.path.exists():
        return ""
    if not ALL:
        return f"{package.name} is not in {CACHE}: make test-all installs it"
    npm = shutil.which("npm")
    if npm is None:
        return f"{package.name} is not installed, and there is no npm"
    return _install(npm, package)


def _install(npm: str, package: Package) -> str:
    """Into a folder of its own, which gets its name when it is whole: two test processes may do so at once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f"{package.name}-", dir=CACHE)
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder]
    try:
        subprocess.run(
            [*command, f"{package.name}@{package.version}"], check=True, capture_output=True, timeout=SECONDS
        )
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(folder, package.folder)
    except (subprocess.SubprocessError, OSError) as error:
        return f"{package.name} does not install: {type(error).__name__}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "" if package.path.exists() else f"{package.name} has no program {package.program}"


@contextlib.contextmanager
def running(package: Package, *arguments: str) -> Iterator[None]:
    """Run the program. ``FOLDER`` in an argument is an empty folder of its own."""
    folder = tempfile.mkdtemp(prefix=f"kestrelpy-{package.name}-")
    command = [str(package.path), *(each.replace("FOLDER", f"{folder}/data") for each in arguments)]
    os.mkdir(f"{folder}/data")
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", KEEPER, "sh", folder, *command], stdin=subprocess.PIPE, start_new_session=True
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        keeper.stdin.close()
        keeper.wait()
