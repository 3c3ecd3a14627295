"""The same answers as the real beanstalkd, byte for byte: thousands of sequences of commands, sent to both.

A failure prints the seed and the shortest sequence that still shows the difference, as Python. What is different on
purpose is in ``DIFFERENCES``, each with a sequence that shows it.
"""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.server import differential, differential_servers
from tests.server.differential import Difference, Pair, Side, compare
from tests.server.differential_sequences import (
    Close,
    Drain,
    Move,
    Open,
    Send,
    Step,
    as_text,
    commands_of,
    sequence,
    shrunk,
)
from tests.server.differential_servers import Beanstalkd, Kestrel, Server
from tests.support.budget import SEED, Tally, share

pytestmark = pytest.mark.skipif(bool(differential_servers.missing()), reason=differential_servers.missing())

PARTS = 8
SEQUENCES = share(2000) // PARTS + 1
"""In each part."""
TOGETHER = 50
"""Sequences on one pair of servers."""
MAX_KNOWN = 0.02
"""The share of sequences that may break off because of a difference that is listed, and cannot be masked."""

Folders = Iterator[Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """New folders, one after the other."""

    def made() -> Folders:
        for number in itertools.count():
            (folder := tmp_path / str(number)).mkdir()
            yield folder

    return made()


def both(folders: Folders) -> Pair:
    """The real one and ours."""
    return Pair(Beanstalkd(next(folders)), Kestrel(next(folders)))


def two_real_ones(folders: Folders, second: Callable[..., Server] = Beanstalkd) -> Pair:
    """What must agree, if the harness is right."""
    return Pair(Beanstalkd(next(folders)), second(next(folders), name="another"))


def seeds(count: int, part: int = 0) -> range:
    """Those of a part of so many."""
    first = SEED * 1_000_000 + part * count
    return range(first, first + count)


def check(make: Callable[[], Pair], wanted: range) -> Counter[str]:
    """Run these sequences, some on one pair after the other; what was seen. Fails at the first difference."""
    counts: Counter[str] = Counter()
    pair = make()
    for number, seed in enumerate(wanted, 1):
        steps = sequence(seed)
        try:
            difference = pair.run(steps)
        except OSError as error:
            if not pair.has_crashed():
                pair.close()
                pytest.fail(f"seed {seed}: {error!r}\n{as_text(steps)}")
            difference = Difference(0, "", {}, known="it has crashed")
            counts["crashes of the real beanstalkd"] += 1
        if difference is not None and not difference.known:
            pair.close()
            pytest.fail(report(make, seed, steps, difference), pytrace=False)
        counts["commands answered alike by beanstalkd and ours"] += commands_of(steps)
        counts["sequences broken off by a listed difference"] += difference is not None
        if difference is not None or number % TOGETHER == 0 or number == len(wanted):
            counts.update({word.decode(): times for word, times in pair.seen.items()})
            pair.close()
            pair = make()
    pair.close()
    return counts


def report(make: Callable[[], Pair], seed: int, steps: Sequence[Step], difference: Difference) -> str:
    """What a failure says: the seed, what differs, and the shortest sequence that shows it on servers of its own."""

    def fails(candidate: Sequence[Step]) -> bool:
        try:
            found = compare(make, candidate)
        except OSError:  # one of them has ended: that is another matter
            return False
        return found is not None and not found.known

    text = f"seed {seed}: {difference}"
    if not fails(steps):
        return f"{text}\nonly after the sequences before it: {as_text(steps)}"
    short = shrunk(steps, fails)
    return f"{text}\nin short, {compare(make, short)}\n{as_text(short)}"


# -- what is different on purpose ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """A difference: what it is about, why, steps that show it, and what each then says (of its answers, some bytes)."""

    name: str
    why: str
    steps: tuple[Step, ...]
    theirs: bytes
    ours: bytes


PUT = b"put 0 0 %d 1\r\na\r\n"
DIFFERENCES = (
    Listed(
        "the order of those who wait",
        "first come, first served; beanstalkd takes turns from both ends (BD-S7)",
        (
            *(Open(number) for number in range(7)),
            *(Send(number, (b"reserve\r\n",)) for number in range(6)),
            *(Send(6, (PUT % 60,)) for _ in range(4)),
        ),
        b"",
        b"RESERVED 4 1\r\na\r\n",
    ),
    Listed(
        "a pause of a tube that nobody uses",
        "a pause keeps its tube, and survives a restart; beanstalkd forgets it with the tube",
        (
            Open(0),
            Open(1),
            Send(0, (b"watch x\r\n",)),
            Send(1, (b"pause-tube x 60\r\n",)),
            Close(0),
        ),
        b"\ncurrent-tubes: 1\n",
        b"\ncurrent-tubes: 2\n",
    ),
    Listed(
        "the order of list-tubes",
        "oldest first; beanstalkd puts the newest where one has gone",
        (Open(0), Open(1), Send(0, (b"watch x\r\n",)), Send(1, (b"watch y\r\nwatch z\r\n",)), Close(0))
        + (Send(1, (b"list-tubes\r\n",)),),
        b"- default\n- z\n- y\n",
        b"- default\n- y\n- z\n",
    ),
    Listed(
        "a job whose body has not come yet",
        "it is no job yet; beanstalkd tells of it, and peek even shows what happens to be in its memory",
        (Open(0), Open(1), Send(0, (b"put 0 0 60 9\r\nhalf",)), Send(1, (b"stats-job <1>\r\n",))),
        b"\nstate: invalid\n",
        b"NOT_FOUND\r\n",
    ),
    Listed(
        "a job that does not run out",
        "beanstalkd looks at a connection too early after DEADLINE_SOON, and then not before it speaks again",
        (
            Open(0),
            Send(0, (PUT % 3,)),
            Send(0, (b"reserve\r\n",)),
            Send(0, (b"reserve-with-timeout 2\r\n",)),
            Move(2.0),
            Send(0, (b"touch <1>\r\n",)),
            Move(2.5),
            Move(2.5),
        ),
        b"\njob-timeouts: 0\n",
        b"\njob-timeouts: 1\n",
    ),
)


@pytest.mark.parametrize("listed", DIFFERENCES, ids=lambda listed: listed.name.replace(" ", "-"))
def test_what_is_listed_is_different(listed: Listed, folders: Folders) -> None:
    difference = compare(lambda: both(folders), listed.steps, strict=True)
    assert difference is not None, "they agree: it need not be listed"
    theirs, ours = difference.answers.values()
    assert listed.theirs in theirs
    assert listed.ours in ours
    assert not compare(lambda: two_real_ones(folders), listed.steps, strict=True)


# -- the harness -----------------------------------------------------------------------------------------------------


def test_two_real_ones_agree(folders: Folders) -> None:
    counts = check(lambda: two_real_ones(folders), seeds(share(60)))
    assert not counts["sequences broken off by a listed difference"]


class _SpoiltSocket(socket.socket):
    """A connection on which one answer is another one."""

    def recv(self, *arguments: int) -> bytes:
        return super().recv(*arguments).replace(b"KICKED 1\r\n", b"KICKED 0\r\n")


class _Spoilt(Beanstalkd):
    def connect(self) -> socket.socket:
        return _SpoiltSocket(fileno=super().connect().detach())


def test_a_planted_difference_is_found_and_shrunk(folders: Folders) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        check(lambda: two_real_ones(folders, _Spoilt), seeds(200))
    said = str(failure.value)
    assert f"seed {SEED}" in said
    short = said[said.index("[") :]
    assert "KICKED" in said
    steps = eval(short, {"Open": Open, "Send": Send, "Move": Move, "Close": Close, "Drain": Drain})
    assert compare(lambda: two_real_ones(folders, _Spoilt), steps) is not None
    assert compare(lambda: two_real_ones(folders), steps) is None
    assert commands_of(steps) <= 6  # an example: put, reserve, bury, kick


def test_a_sequence_is_shrunk_to_what_matters() -> None:
    steps: list[Step] = [Open(0), *(Send(0, (b"a", b"%d" % number, b"c")) for number in range(40)), Move(1.0)]

    def fails(candidate: Sequence[Step]) -> bool:
        parts = {part for step in candidate if isinstance(step, Send) for part in step.parts}
        return {b"7", b"31"} <= parts

    assert shrunk(steps, fails) == [Send(0, (b"7",)), Send(0, (b"31",))]


def test_what_cannot_agree_is_masked_by_key() -> None:
    text = b"---\ncurrent-jobs-urgent: 1\npid: 17\nuptime: 3\nid: 0011223344556677\n"
    answer = b"OK %d\r\n%b\r\n" % (len(text), text)
    expected = b"OK *\r\n---\ncurrent-jobs-urgent: 1\npid: *\nuptime: *\nid: *\n\r\n"
    assert differential.masked(answer) == expected
    assert differential.masked(b"OK 3\r\n" + answer.partition(b"\r\n")[2]) != expected
    assert differential.masked(b"OK 7\r\n---\nid: 3\n\r\n") == b"OK 7\r\n---\nid: 3\n\r\n"


# -- what it is for --------------------------------------------------------------------------------------------------

ANSWERS = frozenset(
    {"INSERTED", "RESERVED", "DELETED", "RELEASED", "BURIED", "TOUCHED", "KICKED", "FOUND", "NOT_FOUND", "USING"}
    | {"WATCHING", "NOT_IGNORED", "PAUSED", "OK", "TIMED_OUT", "DEADLINE_SOON", "EXPECTED_CRLF", "JOB_TOO_BIG"}
    | {"BAD_FORMAT", "UNKNOWN_COMMAND", "(closed)"}
)


@pytest.mark.parametrize("part", range(PARTS))
def test_ours_answers_as_beanstalkd(part: int, folders: Folders, tally: Tally) -> None:
    counts = check(lambda: both(folders), seeds(SEQUENCES, part))
    for name in counts:
        if name not in ANSWERS:
            tally.add(name, counts[name])
    if SEQUENCES >= 100:
        assert counts.keys() >= ANSWERS, "there are answers that no sequence has led to"
    assert counts["sequences broken off by a listed difference"] <= 1 + MAX_KNOWN * SEQUENCES


@pytest.mark.parametrize("seed", range(share(20)))
def test_draining(seed: int, folders: Folders) -> None:
    steps = sequence(SEED * 1_000_000 + seed)
    steps.insert(len(steps) // 2, Drain())
    make = partial(both, folders)
    pair = make()
    try:
        difference = pair.run(steps, clean=False)
    finally:
        pair.close()
    assert difference is None or difference.known, difference


# -- after a crash ---------------------------------------------------------------------------------------------------

LARGE = 65535
"""More than any job here has. At opening, beanstalkd takes a job that had but a byte to spare for one that is too big,
and forgets it and all that was written after it."""
LASTING = ("id", "tube", "ttr", "age")
"""What both keep of a job, whatever was done to it."""


def facts(side: Side, job_id: int) -> dict[str, str]:
    """What ``stats-job`` says of a job, and its body; empty if there is none."""
    said = side.ask(b"stats-job %d\r\npeek %d\r\n?\r\n" % (job_id, job_id), 3)
    while not said.endswith(b"UNKNOWN_COMMAND\r\n"):
        said += side.ask(b"", 1)
    if said.startswith(b"NOT_FOUND\r\n"):
        return {}
    stats, body = said.split(b"\n\r\n", 1)
    return dict(line.split(": ") for line in stats.decode().split("\n") if ": " in line) | {"body": repr(body)}


def same_after_a_crash(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """The keys in which two jobs differ though they must not.

    beanstalkd forgets a release without delay and its priority (BD-W5), and what reserve-job took out of a state; it
    counts a bury more for every restart (BD-W6); what it does write down is the same.
    """
    if not theirs or not ours:
        return [] if theirs == ours else ["whether it is there"]
    must = [*LASTING, "body"]
    if theirs["releases"] == ours["releases"] and theirs["state"] == ours["state"]:
        must += ["pri", "delay", "time-left"]
    differing = [key for key in must if theirs[key] != ours[key]]
    return differing + [key for key in ("timeouts", "releases", "kicks") if int(theirs[key]) > int(ours[key])]


@pytest.mark.parametrize("part", range(2))
def test_after_kill_9_the_same_jobs_are_there(part: int, folders: Folders, tally: Tally) -> None:
    for seed in seeds(share(20), part):
        theirs, ours = next(folders), next(folders)
        (theirs / "journal").mkdir()
        first = Beanstalkd(theirs, "-b", str(theirs / "journal"), "-F", max_job_bytes=LARGE)
        pair = Pair(first, Kestrel(ours, directory=ours / "journal", max_job_bytes=LARGE))
        try:
            steps = sequence(seed, commands=40)
            difference = pair.run(steps, clean=False)
            if difference is not None:
                assert difference.known, f"seed {seed}: {difference}\n{as_text(steps)}"
                continue
            newest = pair.kill()
            for job_id in range(1, newest + 1):
                found = [facts(side, job_id) for side in pair.sides]
                assert not same_after_a_crash(*found), f"seed {seed}, job {job_id}: {found}\n{as_text(steps)}"
                tally.add("jobs alike after kill -9 in beanstalkd and ours", bool(found[0]))
        finally:
            pair.close()
