"""What runs the examples sees a promise that is not kept."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, is_kept, promised, run

PROMISE = "first\n...\nitem ... of 3\nlast\n"


@pytest.mark.parametrize("output", ["first\nitem 1 of 3\nlast\n", "first\nand\nmore\nitem  of 3\nlast\n"])
def test_a_promise_that_is_kept(output: str) -> None:
    assert is_kept(PROMISE, output)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "first\nlast\n",  # a line is missing
        "first\nitem 1 of 4\nlast\n",  # another number
        "first\nitem 1 of 3\nlast\nTraceback\n",  # a line more at the end
        "also\nfirst\nitem 1 of 3\nlast\n",  # or at the beginning
        "first\nitem 1 of 3\nmore\nlast\n",  # or where none is promised
        "first\nitem 1 of 3\nlast",  # an end that is cut
    ],
)
def test_a_promise_that_is_not_kept(output: str) -> None:
    assert not is_kept(PROMISE, output)


def test_the_promise_is_the_block_after_it_prints() -> None:
    source = '"""A title.\n\n    python x.py\n\nIt prints:\n\n    one\n    two ...\n\nAnd so on:\n\n    no\n"""\n'
    assert promised(source) == "one\ntwo ...\n"
    assert promised('"""A title."""\n') == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_promises_more_than_anything(example: Path) -> None:
    promise = promised(example.read_text("utf-8"))
    assert promise
    assert not is_kept(promise, "")
    assert not is_kept(promise, "Traceback (most recent call last):\n")


def test_a_kill_is_one_and_takes_the_children(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\nprint('two')\ntime.sleep(60)\n"
    )
    ended = run(program, tmp_path, kill_at=2)
    child, two = ended.output.splitlines()
    assert (ended.status, two) == (-signal.SIGKILL, "two")
    state = Path(f"/proc/{child}/stat")
    started = time.monotonic()
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - started < 20, "the child goes on"


def test_a_process_that_goes_on_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    program.write_text(
        f"import subprocess, sys\nsubprocess.Popen(['sleep', '60'], {quiet}).returncode = 0\nprint('done')\n"
    )
    ended = run(program, tmp_path)
    assert (ended.status, ended.output, ended.goes_on) == (0, "done\n", True)


def test_a_kill_after_some_time_and_none_after_the_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, time\nprint('one')\ntime.sleep(float(sys.argv[1]) if sys.argv[1:] else 60)\n")
    assert run(program, tmp_path, kill_at=0.5).status == -signal.SIGKILL
    program.write_text("print('one')\n")
    assert run(program, tmp_path, kill_at=30.0).status == 0
