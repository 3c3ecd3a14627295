"""``kestrelpy serve beanstalk``, as a process: its options, its signals, its ends."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.cli import build_parser, main, serving
from tests.server.beanstalk_harness import PATIENCE, Client

SERVE = (sys.executable, "-m", "kestrelpy", "serve", "beanstalk")


class Process:
    """A server in a process, started by ``command``. ``clients`` connect where it says that it listens."""

    def __init__(self, *options: str, command: Sequence[str] = SERVE) -> None:
        self.clients: list[Client] = []
        self.process = subprocess.Popen(
            (*command, "-V", *options),
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline().decode()
        assert "listening at " in said, said
        where = said.strip().partition("listening at ")[2]
        self.address: Any = where.removeprefix("unix:")
        if not where.startswith("unix:"):
            host, _, port = where.rpartition(":")
            self.address = (host.strip("[]"), int(port))

    def client(self, address: Any = None) -> Client:
        self.clients.append(Client(address or self.address))
        return self.clients[-1]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit status after this signal; it must say what its signals did, and nothing else."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE)
        lines = said.decode().splitlines()
        drained = [line for line in lines if line == "kestrelpy serve: draining: puts are refused from now on"]
        assert lines == [*drained, f"kestrelpy serve: stopped by {signal.Signals(number).name}"]
        return self.process.returncode


@contextlib.contextmanager
def running(*options: str, command: Sequence[str] = SERVE) -> Iterator[Process]:
    process = Process(*options, command=command)
    try:
        yield process
    finally:
        for client in process.clients:
            client.hang_up()
        process.process.kill()
        process.process.wait()
        assert process.process.stderr is not None
        process.process.stderr.close()


def refused(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit status and what was said, of one that does not start."""
    status = main(["serve", "beanstalk", *options])
    return status, capfd.readouterr().err


def test_jobs_are_kept_and_signals_understood(tmp_path: Path) -> None:
    directory = str(tmp_path / "jobs")
    with running("-b", directory, "-p", "0", "-f", "0") as one:
        client = one.client()
        client.ask(b"put 0 0 100 3\r\nabc\r\n", b"INSERTED 1\r\n")
        client.ask(b"reserve\r\n", b"RESERVED 1 3\r\nabc\r\n")
        other = one.client()
        other.send(b"reserve\r\n")
        one.process.send_signal(signal.SIGUSR1)
        answers = set()
        while b"DRAINING\r\n" not in answers:
            client.send(b"put 0 0 100 3\r\nabc\r\n")
            answers.add(client.line())
        assert one.end(signal.SIGTERM) == 0
        client.hear_the_end()
    with running("--dir", directory, "--listen", "127.0.0.1:0", "-F") as one:
        client = one.client()
        client.ask(b"reserve\r\n", b"RESERVED 1 3\r\nabc\r\n")
        assert one.end(signal.SIGINT) == 0


def test_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    with running("-b", str(tmp_path), "-p", "0") as one:
        one.client().ask(b"put 0 0 100 3\r\nabc\r\n", b"INSERTED 1\r\n")
        one.process.kill()
        one.process.wait()
    with running("-b", str(tmp_path), "-p", "0") as one:
        one.client().ask(b"peek 1\r\n", b"FOUND 1 3\r\nabc\r\n")


def test_without_a_directory_jobs_live_in_memory(tmp_path: Path) -> None:
    with running("-p", "0", "-z", "10", "--max-jobs", "1", "--max-connections", "1", "-c", "-n") as one:
        client = one.client()
        client.ask(b"put 0 0 1 11\r\nhello world\r\n", b"JOB_TOO_BIG\r\n")
        client.ask(b"put 0 0 1 1\r\na\r\nput 0 0 1 1\r\na\r\n", b"INSERTED 1\r\nOUT_OF_MEMORY\r\n")
        one.client().hear(b"OUT_OF_MEMORY\r\n")
        figures = client.figures(b"stats")
        assert (figures["max-job-size"], figures["pid"]) == ("10", str(one.process.pid))
        assert one.end() == 0


def test_large_jobs_need_no_larger_files(tmp_path: Path) -> None:
    with running("-b", str(tmp_path), "-p", "0", "-z", "20000000", "-s", "4096") as one:
        body = b"x" * 20_000_000
        one.client().ask(b"put 0 0 1 20000000\r\n" + body + b"\r\npeek 1\r\n", b"INSERTED 1\r\nFOUND 1 20000000\r\n")
        assert one.end() == 0


def test_it_listens_at_a_path(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        with running("-l", f"unix:{path}") as one:
            assert one.address == str(path)
            one.client().ask(b"use a\r\n", b"USING a\r\n")
    assert path.exists()  # killed, it has left it there, and the second one did not mind


def test_another_file_at_the_path_is_let_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    status, said = refused(capfd, "-l", f"unix:{path}")
    assert (status, path.read_text()) == (1, "mine")
    assert said == f"kestrelpy serve: cannot listen at unix:{path}: Address already in use\n"


def test_the_queue_of_another_process_is_let_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running("-b", str(tmp_path), "-p", "0"):
        status, said = refused(capfd, "-b", str(tmp_path), "-p", "0")
    assert status == serving.LOCKED == 10
    assert str(tmp_path) in said
    assert said.count("\n") == 1


def test_an_address_in_use_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused(capfd, "-l", "127.0.0.1", "-p", str(port))
    assert (status, said) == (1, f"kestrelpy serve: cannot listen at 127.0.0.1:{port}: Address already in use\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-p", "70000"), "must be a port, not '70000'"),
        (("-p", "x"), "must be a port, not 'x'"),
        (("--listen", "here:there"), "'there' is not a port"),
        (("--listen", "127.0.0.1:1", "-p", "1"), "--listen has the address and the port: remove -l and -p"),
        (("-l", "unix:"), "unix: needs a path"),
        (("-z", "0"), "must be above zero"),
        (("-z", str((1 << 30) + 1)), "-z: at most 1073741824 bytes"),
        (("-f", "-1"), "must be a number of milliseconds"),
        (("-f", "1", "-F"), "not allowed with argument"),
        (("--max-jobs", "0"), "must be above zero"),
        (("--max-tubes", "0"), "must be above zero"),
        (("--on-corruption", "ignore"), "invalid choice: 'ignore'"),
    ],
)
def test_wrong_use(capfd: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    status, heard = refused(capfd, *options)
    assert status == 2
    assert said in heard
    assert heard.count("\n") == 1


def test_options_reach_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr("kestrelpy.server.serve", lambda _, **options: seen.update(options))
    options = ("--max-tubes", "7", "--max-jobs", "8", "--max-bytes", "9", "--max-attempts", "5")
    assert main(["serve", "beanstalk", "--listen", "127.0.0.1:0", "--on-corruption", "quarantine", *options]) == 0
    assert (seen["on_corruption"], seen["max_tubes"], seen["max_jobs"]) == ("quarantine", 7, 8)
    assert (seen["max_bytes"], seen["max_attempts"]) == (9, 5)


def test_a_queue_of_items_is_let_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with JournaledQueue(tmp_path, "work") as queue:
        queue.put(b"item")
    status, said = refused(capfd, "-b", str(tmp_path), "--listen", "127.0.0.1:0")
    assert status == 1
    assert "no work queue" in said
    with JournaledQueue(tmp_path, "work") as queue:
        assert queue.get(timeout=0).data == b"item"


def test_no_such_user(capfd: pytest.CaptureFixture[str]) -> None:
    status, said = refused(capfd, "-u", "nobody-of-this-name", "-p", "0")
    assert (status, said) == (1, "kestrelpy serve: -u: there is no user 'nobody-of-this-name'\n")


@pytest.mark.root
def test_it_becomes_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    tmp_path.chmod(0o755)
    home = tmp_path / "jobs"
    home.mkdir()
    nobody = pwd.getpwnam("nobody")
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    with running("-u", "nobody", "-p", "0") as one:
        status = Path(f"/proc/{one.process.pid}/status").read_text()
        one.client().ask(b"put 0 0 1 1\r\na\r\n", b"INSERTED 1\r\n")
    assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}" in status


def test_a_socket_that_systemd_passes(tmp_path: Path) -> None:
    """A process stands in for systemd: it puts the socket at descriptor 3, and becomes the server."""
    with socket.create_server(("127.0.0.1", 0)) as passed:
        code = (
            "import os, sys\n"
            "if int(sys.argv[1]) != 3: os.dup2(int(sys.argv[1]), 3)\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
            "os.execv(sys.argv[2], sys.argv[2:])\n"
        )
        command = [sys.executable, "-c", code, str(passed.fileno()), *SERVE, "-V"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[passed.fileno()]) as process:
            assert process.stderr is not None
            host, port = passed.getsockname()
            assert process.stderr.readline().decode() == f"kestrelpy serve: listening at {host}:{port}\n"
            client = Client((host, port))
            client.ask(b"use a\r\n", b"USING a\r\n")
            client.hang_up()
            process.terminate()
            assert process.wait(PATIENCE) == 0


def test_sockets_that_systemd_can_not_have_passed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "abc")
    status, said = refused(capfd)
    assert (status, said) == (2, "kestrelpy serve: LISTEN_FDS must be a number of sockets, not 'abc'\n")


def test_a_path_whose_server_still_opens_its_queue_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        serving._bound_to_path(path, first)
        with pytest.raises(OSError, match="in use"):
            serving._bound_to_path(path, second)
    with contextlib.ExitStack() as third:  # its server is gone, and has left it
        serving._bound_to_path(path, third)


def test_two_addresses_at_once(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with running("--listen", f"unix:{path}", "--listen", "127.0.0.1:0") as one:
        one.client().ask(b"use a\r\n", b"USING a\r\n")
        assert one.process.stderr is not None
        port = int(one.process.stderr.readline().rpartition(b":")[2])
        one.client(("127.0.0.1", port)).ask(b"list-tubes-watched\r\n", b"OK 14\r\n---\n- default\n\r\n")


def test_the_options_of_beanstalkd_are_there() -> None:
    options = "-b d -f 100 -l 0.0.0.0 -p 11300 -s 1048576 -z 100 -u u -c -n -V -V"
    args = build_parser().parse_args(["serve", "beanstalk", *options.split()])
    assert (args.dir, args.sync_ms, args.l, args.p, args.segment_bytes) == ("d", 100.0, "0.0.0.0", 11300, 1048576)
    assert (args.max_job_bytes, args.user, args.verbose) == (100, "u", 2)


def test_the_version_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "beanstalk", "-v"]) == 0
    assert capfd.readouterr().out.startswith("kestrelpy")


def test_other_commands_do_not_pay_for_it() -> None:
    code = "import sys; import kestrelpy.cli; print('asyncio' in sys.modules, 'kestrelpy.server' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "False False\n"


def test_it_says_where_it_listens_and_what_a_signal_did(tmp_path: Path) -> None:
    command = [*SERVE, "--dir", str(tmp_path / "jobs"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"kestrelpy serve: listening at 127.0.0.1:")
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline() == b"kestrelpy serve: draining: puts are refused from now on\n"
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == b"kestrelpy serve: stopped by SIGTERM\n"


def test_a_folder_without_a_name_and_a_wrong_number_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "beanstalk", "-b", ""]) == 2
    assert "-b: the name of the folder is empty" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "beanstalk", "-f", "-1"])
    assert "must be a number of milliseconds, not -1" in capfd.readouterr().err
