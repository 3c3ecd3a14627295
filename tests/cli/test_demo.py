"""The demo: its proof must find whatever can go wrong, and the real thing must prove itself, kills and all."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.cli import demo
from kestrelpy.demo import corpus as demo_corpus
from kestrelpy.demo.corpus import Corpus, NoLines
from kestrelpy.demo.progress import ProgressLine
from kestrelpy.demo.queue import proof as demo_proof
from kestrelpy.demo.queue import worker as demo_worker
from kestrelpy.demo.queue.ledger import BEGIN, ENTRY, PUT, Ledger, digest, entries, last_id
from kestrelpy.demo.queue.proof import Finding, Reference, check_puts, check_reader
from tests.support.paths import ROOT

LINES = [b"one", b"", b"three", b"four", b"five"]
REFERENCE = Reference(b"".join(digest(line) for line in LINES), 1, sum(map(len, LINES)))
Entry = tuple[int, float, bytes]


# -- the corpus ------------------------------------------------------------------------------------------------------


def corpus_of(folder: Path, *contents: bytes, repeat: int = 1) -> Corpus:
    """Files with these contents."""
    for number, content in enumerate(contents):
        (folder / f"{number}.txt").write_bytes(content)
    return Corpus(demo_corpus.gather(str(folder)).files, repeat)


def lines_of(corpus: Corpus) -> list[bytes]:
    """All its lines."""
    return [line for block in corpus.blocks() for line in block]


def test_lines_are_what_stands_between_line_ends(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, b"a\n\nb\r\n", b"", b"\n", b"no end")
    assert lines_of(corpus) == [b"a", b"", b"b\r", b"", b"no end"]


def test_long_lines_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_corpus, "MAX_LINE_BYTES", 4)
    content = b"abcd\nabcde\nabcdefgh\nabcdefghij"
    wanted = [b"abcd", b"abcd", b"e", b"abcd", b"efgh", b"abcd", b"efgh", b"ij"]
    corpus = corpus_of(tmp_path, content)
    for size in (1, 3, 7, 100):
        monkeypatch.setattr(demo_corpus, "_BLOCK_BYTES", size)
        assert lines_of(corpus) == wanted


@given(
    contents=st.lists(st.lists(st.sampled_from([b"", b"x", b"yy"]), max_size=8).map(b"\n".join), max_size=4),
    repeat=st.integers(1, 3),
    data=st.data(),
)
def test_batches_go_on_from_any_line(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], repeat: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    files = []
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)
        files.append((str(folder / str(number)), len(content)))
    corpus = Corpus(tuple(files), repeat)
    lines = lines_of(corpus)
    skip = data.draw(st.integers(0, len(lines)))
    count = data.draw(st.integers(1, 5))
    batches = list(corpus.batches(skip, count, 3))
    assert [line for batch in batches for line in batch] == lines[skip:]
    assert all(0 < len(batch) <= count for batch in batches)


def test_a_growing_file_is_read_to_the_size_it_had(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, b"a\nb\n")
    with open(tmp_path / "0.txt", "ab") as file:
        file.write(b"more\n")
    assert lines_of(corpus) == [b"a", b"b"]


def test_gathering_skips_what_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n")
    (tmp_path / ".hidden").write_bytes(b"h\n")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"b\n")
    os.mkfifo(tmp_path / "pipe")
    names = [Path(name).name for name, _ in demo_corpus.gather(str(tmp_path)).files]
    assert names == ["a.txt", "b.txt"]


def test_gathering_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoLines, match="no lines"):
        demo_corpus.gather(str(tmp_path))
    with pytest.raises(NoLines, match="no such file"):
        demo_corpus.gather(str(tmp_path / "nowhere"))


def test_the_standard_library_is_the_default() -> None:
    names = [name for name, _ in demo_corpus.gather(None).files]
    assert any(name.endswith("queue.py") for name in names)
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)


def test_a_corpus_is_saved_and_loaded(tmp_path: Path) -> None:
    corpus = Corpus((("a", 1), ("b", 2)), 3)
    corpus.save(tmp_path / "corpus.json")
    assert Corpus.load(tmp_path / "corpus.json") == corpus


# -- ledgers ---------------------------------------------------------------------------------------------------------


def test_a_ledger_keeps_what_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    assert last_id(path) == 0
    ledger = Ledger(path)
    assert ledger.is_new
    ledger.begin(0)
    ledger.put(7)
    ledger.got([(8, digest(b"a")), (9, digest(b"b"))])
    ledger.close()
    noted = list(entries(path))
    assert [(number, kind) for number, _, kind in noted] == [
        (0, BEGIN),
        (7, PUT),
        (8, digest(b"a")),
        (9, digest(b"b")),
    ]
    assert [moment for _, moment, _ in noted] == sorted(moment for _, moment, _ in noted)
    assert last_id(path) == 9


@pytest.mark.parametrize("cut", range(1, ENTRY.size))
def test_a_torn_entry_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.ledger"
    path.write_bytes(ENTRY.pack(1, 0.0, PUT) + ENTRY.pack(2, 0.0, PUT)[:cut])
    assert last_id(path) == 1
    ledger = Ledger(path)
    assert not ledger.is_new
    ledger.put(3)
    ledger.close()
    assert [number for number, _, _ in entries(path)] == [1, 3]


# -- the proof: a reader's ledger ------------------------------------------------------------------------------------


def got(*lives: Iterable[int], lines: list[bytes] = LINES) -> list[Entry]:
    """A ledger of a reader that got these lines in each of its lives."""
    ledger: list[Entry] = []
    moment = 0.0
    for life in lives:
        ledger.append((0, moment, BEGIN))
        for number in life:
            moment += 1
            ledger.append((number, moment, digest(lines[number - 1])))
    return ledger


def problem_of(found: Finding) -> str:
    """What it complains of, in one string."""
    return "; ".join(found.problems)


def test_every_line_in_order_is_proven() -> None:
    found = check_reader(got([1, 2, 3, 4, 5]), REFERENCE, "far")
    assert not found.problems
    assert (found.lines, found.again, found.lives, found.seconds) == (5, 0, 1, 5.0)
    assert found.digest == REFERENCE.digest()


def test_what_came_again_after_a_kill_is_counted() -> None:
    found = check_reader(got([1, 2, 3], [2, 3, 4], [], [4, 5]), REFERENCE, "far")
    assert not found.problems
    assert (found.lines, found.again, found.lives) == (5, 3, 4)
    assert found.digest == REFERENCE.digest()


@pytest.mark.parametrize(
    ("ledger", "complaint"),
    [
        (got([1, 2, 4, 5]), "lines 3 to 3 never came"),
        (got([2, 3, 4, 5]), "lines 1 to 1 never came"),
        (got([1, 2, 3]), "lines 4 to 5 never came"),
        (got([]), "lines 1 to 5 never came"),
        ([], "lines 1 to 5 never came"),
        (got([1, 2, 2, 3, 4, 5]), "line 2 came again or out of order, although nothing was killed"),
        (got([1, 3, 2, 4, 5]), "line 2 came again or out of order"),
        (got([1, 2], [4, 5]), "lines 3 to 3 never came"),
        (got([1, 2, 3, 4, 5], lines=[b"one", b"", b"THREE", b"four", b"five"]), "line 3 differs from the input"),
        (got([1, 2, 3, 4, 5, 6], lines=[*LINES, b"six"]), "line 6 differs from the input"),
        (
            [*got([1, 2, 3]), *got([2, 3, 4, 5], lines=[b"one", b"other", b"three", b"four", b"five"])],
            "line 2 differs from the input",
        ),
    ],
)
def test_what_is_wrong_with_a_reader_is_found(ledger: list[Entry], complaint: str) -> None:
    assert complaint in problem_of(check_reader(ledger, REFERENCE, "far"))


@given(lives=st.lists(st.lists(st.integers(1, 7), max_size=8), max_size=4))
def test_a_ledger_is_proven_if_and_only_if_it_should_be(lives: list[list[int]]) -> None:
    lines = [*LINES, b"not", b"there"]
    firsts: list[int] = []
    sound = True
    for life in lives:
        sound = sound and life == sorted(set(life))
        for number in life:
            if number > len(firsts):
                sound = sound and number == len(firsts) + 1
                firsts += range(len(firsts) + 1, number + 1)
    sound = sound and len(firsts) == len(LINES)
    found = check_reader(got(*lives, lines=lines), REFERENCE, "far")
    assert (not found.problems) == sound


def test_an_input_that_is_repeated() -> None:
    twice = Reference(b"".join(digest(line) for line in LINES), 2, 16)
    assert (twice.lines, twice.data_bytes) == (10, 32)
    ledger = got(range(1, 11), lines=LINES * 2)
    found = check_reader(ledger, twice, "far")
    assert not found.problems
    assert found.digest == twice.digest() != REFERENCE.digest()


def test_many_problems_are_not_all_told() -> None:
    found = check_reader(got([5, 4, 3, 2, 1] * 10), REFERENCE, "far")
    assert len(found.problems) == demo_proof.MAX_PROBLEMS + 1


# -- the proof: the producer's ledger --------------------------------------------------------------------------------


def put(*lives: tuple[int, list[int]]) -> list[Entry]:
    """A ledger of a producer whose lives began at these ends of the journal and put up to these ids."""
    ledger: list[Entry] = []
    moment = 0.0
    for tail, ids in lives:
        ledger.append((tail, moment, BEGIN))
        for number in ids:
            moment += 1
            ledger.append((number, moment, PUT))
    return ledger


def test_puts_are_proven_whether_or_not_the_last_one_was_acknowledged() -> None:
    for ledger in (put((0, [2, 4, 5])), put((0, [2]), (2, [4, 5])), put((0, [2]), (4, [5])), put((0, [2, 4]), (5, []))):
        found = check_puts(ledger, 5)
        assert not found.problems
        assert found.lines == 5


@pytest.mark.parametrize(
    ("ledger", "complaint"),
    [
        (put((0, [2, 4]), (2, [4, 5])), "2 acknowledged lines were missing after a restart"),
        (put((0, [2, 4])), "4 lines are in the queue, 5 are in the input"),
        (put((0, [2, 4, 6])), "6 lines are in the queue"),
        (put((0, [2, 2, 5])), "line 2 was put after line 2"),
        ([], "0 lines are in the queue"),
    ],
)
def test_what_is_wrong_with_puts_is_found(ledger: list[Entry], complaint: str) -> None:
    assert complaint in problem_of(check_puts(ledger, 5))


def test_rates_leave_out_the_time_between_lives() -> None:
    ledger = [(0, 0.0, BEGIN), (10, 2.0, PUT), (10, 100.0, BEGIN), (20, 102.0, PUT)]
    found = check_puts(ledger, 20)
    assert (found.seconds, found.per_second) == (4.0, 5.0)


# -- the show --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    bar = Terminal()
    progress = ProgressLine(bar)
    progress.show(0.5, "put 10")
    progress.say("killed")
    progress.show(1.0, "put 20")
    progress.clear()
    assert "[########........]  50%  put 10" in bar.getvalue()
    assert "killed\n" in bar.getvalue()
    plain = io.StringIO()
    progress = ProgressLine(plain)
    for step in range(101):
        progress.show(step / 100, f"put {step}")
    assert len(plain.getvalue().splitlines()) == 10
    assert "\r" not in plain.getvalue()


def test_kills_are_spread_and_take_turns() -> None:
    schedule = demo._schedule(6, random.Random(1))
    assert [role for _, role in schedule] == [demo.WRITER, demo.FAR] * 3
    moments = [moment for moment, _ in schedule]
    assert moments == sorted(moments)
    assert moments[0] > 0.0
    assert moments[-1] < 0.9
    assert demo._schedule(6, random.Random(2)) != schedule


def run_demo(tmp_path: Path, *options: str, lines: int = 40_000) -> subprocess.CompletedProcess[str]:
    """The demo on a small input, in a process of its own."""
    source = tmp_path / "input.txt"
    chance = random.Random(lines)
    source.write_bytes(b"".join(b"x" * chance.randrange(60) + b"%d\n" % number for number in range(lines)))
    command = [sys.executable, "-m", "kestrelpy", "demo", "--input", str(source), "--dir", str(tmp_path / "scratch")]
    return subprocess.run(
        [*command, "--min-lines", "1", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_demo_proves_itself_over_kills(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--kills", "4", "--seconds", "2", lines=100_000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    kills = re.search(r"kills survived +(\d+): (\d+) of the writing process, (\d+) of the other", done.stdout)
    assert kills is not None, done.stdout
    assert int(kills[1]) == done.stdout.count("SIGKILL to") == 4
    assert int(kills[2]) >= 1
    assert int(kills[3]) >= 1
    assert re.search(r"items +100,000 +100,000 +100,000", done.stdout)
    written = re.search(r"segments +(\d+) written, (\d+) retired", done.stdout)
    assert written is not None
    assert 0 < int(written[2]) < int(written[1])
    assert "proven: " in done.stdout
    assert os.listdir(tmp_path / "scratch") == [], "the scratch folder is removed"


@pytest.mark.parametrize("plant", demo_worker.PLANTS)
def test_the_proof_fails_on_a_planted_fault(tmp_path: Path, plant: str) -> None:
    done = run_demo(tmp_path, "--kills", "0", "--plant", plant, lines=5_000)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "THE PROOF FAILED" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_short_input_is_streamed_over_and_over(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--kills", "0", "--min-lines", "100", lines=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 lines" in done.stdout
    assert "4 times over" in done.stdout
    assert "120 lines" in done.stdout


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kestrelpy", "demo", "--seconds", "20", "--dir", str(tmp_path)]
    show = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert show.stdout is not None
    while b"SIGKILL" not in show.stdout.readline():
        assert show.poll() is None
    show.send_signal(signal.SIGINT)
    _, err = show.communicate(timeout=30)
    assert (show.returncode, err) == (128 + signal.SIGINT, b"")
    assert list(tmp_path.iterdir()) == []


def test_an_input_without_lines_is_refused(tmp_path: Path) -> None:
    done = run_demo(tmp_path, lines=0)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no lines" in done.stderr


def test_a_worker_that_fails_ends_the_demo(tmp_path: Path) -> None:
    show = demo.Show(tmp_path, 10, ProgressLine(io.StringIO()))
    (tmp_path / "plan.json").write_text("{}")  # no lines in it: the worker cannot start
    try:
        with pytest.raises(demo.DemoFailed, match="ended with status 1: TypeError"):
            demo._perform(show, [])
    finally:
        show.end()
