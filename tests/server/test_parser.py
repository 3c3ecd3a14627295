"""The parser: every command, beanstalkd's laxness, its limits, and that neither cuts nor garbage disturb it.

The expectations of the tables were compared with beanstalkd 1.12 over a socket.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy.server.beanstalk.parser import (
    BAD_FORMAT,
    BAD_PAUSE,
    BAD_PUT,
    EXPECTED_CRLF,
    MAX_LINE_BYTES,
    TOO_BIG,
    UNKNOWN_COMMAND,
    BeanstalkParser,
    Command,
)
from tests.server.parsing import memory_of
from tests.support.budget import share

U32 = 0xFFFFFFFF
U64 = 0xFFFFFFFFFFFFFFFF


def parsed(*pieces: bytes, max_job_bytes: int = 65535) -> list[Command]:
    """The commands in these pieces, each drawn as soon as it is there."""
    parser = BeanstalkParser(max_job_bytes)
    found = []
    for piece in pieces:
        parser.feed(piece)
        parser._check()
        while (command := parser.next()) is not None:
            found.append(command)
            parser._check()
    parser._check()
    return found


def line(command: bytes) -> list[Command]:
    return parsed(command + b"\r\n")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (b"reserve", ("reserve",)),
        (b"peek-ready", ("peek-ready",)),
        (b"peek-delayed", ("peek-delayed",)),
        (b"peek-buried", ("peek-buried",)),
        (b"stats", ("stats",)),
        (b"list-tubes", ("list-tubes",)),
        (b"list-tube-used", ("list-tube-used",)),
        (b"list-tubes-watched", ("list-tubes-watched",)),
        (b"quit", ("quit",)),
        (b"delete 17", ("delete", 17)),
        (b"touch 17", ("touch", 17)),
        (b"peek 17", ("peek", 17)),
        (b"kick-job 17", ("kick-job", 17)),
        (b"reserve-job 17", ("reserve-job", 17)),
        (b"stats-job 17", ("stats-job", 17)),
        (b"release 17 5 6", ("release", 17, 5, 6)),
        (b"bury 17 5", ("bury", 17, 5)),
        (b"kick 100", ("kick", 100)),
        (b"reserve-with-timeout 5", ("reserve-with-timeout", 5)),
        (b"use jobs", ("use", "jobs")),
        (b"watch jobs", ("watch", "jobs")),
        (b"ignore jobs", ("ignore", "jobs")),
        (b"stats-tube jobs", ("stats-tube", "jobs")),
        (b"pause-tube jobs 60", ("pause-tube", "jobs", 60)),
    ],
)
def test_commands(text: bytes, command: Command) -> None:
    assert line(text) == [command]


LAX = [
    (b"quitfoo", ("quit",)),
    (b"kick -1", ("kick", U32)),
    (b"kick 5abc", ("kick", 5)),
    (b"kick  +3", ("kick", 3)),
    (b"kick \t3", ("kick", 3)),
    (b"kick \x0b7", ("kick", 7)),
    (b"kick 4294967297", ("kick", 1)),
    (b"kick 18446744073709551615", ("kick", U32)),
    (b"reserve-with-timeout 0x", ("reserve-with-timeout", 0)),
    (b"reserve-with-timeout ", ("reserve-with-timeout", 0)),
    (b"reserve-with-timeout x", ("reserve-with-timeout", 0)),
    (b"reserve-with-timeout  7", ("reserve-with-timeout", 7)),
    (b"reserve-with-timeout 2147483647", ("reserve-with-timeout", 2147483647)),
    (b"reserve-with-timeout 2147483648", ("reserve-with-timeout", None)),
    (b"reserve-with-timeout -1", ("reserve-with-timeout", None)),
    (b"reserve-with-timeout 4294967297", ("reserve-with-timeout", 1)),
    (b"reserve-with-timeout 9223372036854775807", ("reserve-with-timeout", None)),
    (b"peek  1", ("peek", 1)),
    (b"peek 18446744073709551615", ("peek", U64)),
    (b"release 1  2   3", ("release", 1, 2, 3)),
    (b"bury   1  2", ("bury", 1, 2)),
    (b"pause-tubejobs 0", ("pause-tube", "jobs", 0)),
    (b"pause-tube  jobs  0", ("pause-tube", "jobs", 0)),
    (b"use a_$().;/+-", ("use", "a_$().;/+-")),
    (b"use " + b"a" * 200, ("use", "a" * 200)),
    (b"pause-tube " + b"a" * 200 + b" 0", ("pause-tube", "a" * 200, 0)),
]


@pytest.mark.parametrize(("text", "command"), LAX)
def test_what_beanstalkd_is_lax_about(text: bytes, command: Command) -> None:
    assert line(text) == [command]


@pytest.mark.parametrize(
    "text",
    [
        *(b"kick a", b"kick -", b"kick  ", b"kick 18446744073709551616"),
        *(b"reserveX", b"reserve ", b"reserve-with-timeout", b"reserve-with-timeout0", b"reserve-jobx"),
        *(b"reserve-with-timeout 9223372036854775808", b"reserve-with-timeout -9223372036854775809"),
        *(b"stats ", b"stats-job", b"stats-job x", b"stats-tube", b"stats-tube ", b"stats-tubefoo", b"stats-tube a b"),
        *(b"pause-tube", b"pause-tube a", b"pause-tube a 0 ", b"pause-tube a 0x", b"pause-tube a -1"),
        *(b"pause-tube a!b 0", b"pause-tube a 4294967296"),
        *(b"peek 1x", b"peek 1 ", b"peek -1", b"peek 18446744073709551616", b"peek-readyX"),
        *(b"put ", b"put 1 2 3", b"put 4294967296 0 0 1", b"put 0 0 0 4294967296", b"put 0 0 0 -1", b"put +1 0 0 0"),
        *(b"put 1 1\t1 1", b"put 0,0 0 1", b"put 1a 0 0 1"),
        *(b"use ", b"use  a", b"use a ", b"use -a", b"use a b", b"use a\x80", b"use a\nb", b"use " + b"a" * 201),
        *(b"watch -", b"ignore ", b"ignore -"),
        *(b"list-tubesX", b"list-tube-usedX", b"list-tubes-watchedX"),
        *(b"touch 1x", b"bury 1", b"bury 1 2 3", b"bury 1 4294967296", b"bury 18446744073709551616 1"),
        *(b"release 1 2", b"release 1 2 3x", b"release 1 2 3 ", b"release 1x 2 3", b"release 1 2 4294967296"),
        *(b"delete 1 ", b"delete +1", b"delete x", b"kick-job x"),
        *(b"a\0b", b"use a\0", b"quit\0", b"\0", b"put 0 0 0 1\0"),
    ],
)
def test_bad_format(text: bytes) -> None:
    assert line(text) == [BAD_FORMAT]


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b" ", b" stats", b"USE a", b"put", b"use", b"watch", b"kick", b"peek", b"peek-", b"delete", b"touch"]
    + [b"list-tube", b"kick-jobx", b"foo", b"\xff\xfe"],
)
def test_unknown_commands(text: bytes) -> None:
    assert line(text) == [UNKNOWN_COMMAND]


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_put_brings_its_body() -> None:
    assert parsed(b"put 1 2 3 5\r\nhello\r\nstats\r\n") == [("put", 1, 2, 3, b"hello"), ("stats",)]
    assert parsed(b"put 4294967295 4294967295 4294967295 0\r\n\r\n") == [("put", U32, U32, U32, b"")]
    assert parsed(b"put  00  0  1  1\r\n\0\r\n") == [("put", 0, 0, 1, b"\0")]


def test_a_body_may_hold_line_ends() -> None:
    assert parsed(b"put 0 0 9 6\r\n\r\n\r\n\r\n\r\nquit\r\n") == [("put", 0, 0, 9, b"\r\n" * 3), ("quit",)]


def test_a_ttr_of_none_is_one() -> None:
    assert parsed(b"put 0 0 0 1\r\nx\r\n") == [("put", 0, 0, 1, b"x")]


def test_a_body_without_a_line_end_is_swallowed_with_what_stands_there() -> None:
    assert parsed(b"put 0 0 0 1\r\nabcstats\r\n") == [EXPECTED_CRLF, ("stats",)]
    assert parsed(b"put 0 0 0 1\r\nabcd\r\nstats\r\n") == [EXPECTED_CRLF, UNKNOWN_COMMAND, ("stats",)]


def test_a_body_too_big_is_swallowed() -> None:
    assert parsed(b"put 0 0 0 4\r\nabcd\r\nstats\r\n", max_job_bytes=3) == [TOO_BIG, ("stats",)]
    assert parsed(b"put 0 0 0 4 garbage\r\nabcd\r\nstats\r\n", max_job_bytes=3) == [TOO_BIG, ("stats",)]
    assert parsed(b"put 0 0 0 3\r\nabc\r\nstats\r\n", max_job_bytes=3) == [("put", 0, 0, 1, b"abc"), ("stats",)]


def test_the_body_of_a_put_that_is_refused_is_a_command() -> None:
    assert parsed(b"put 0 0 0 4 5\r\nquit\r\n") == [BAD_PUT, ("quit",)]
    assert parsed(b"put 0 0 0 4x\r\nquit\r\n") == [BAD_PUT, ("quit",)]
    assert parsed(b"put 0 0 x 4\r\nquit\r\n") == [BAD_FORMAT, ("quit",)]


def test_a_pause_of_a_bad_name_counts_as_one() -> None:
    assert line(b"pause-tube -a 0") == [BAD_PAUSE]
    assert line(b"pause-tube " + b"a" * 201 + b" 0") == [BAD_PAUSE]


def test_one_is_in_a_put_while_its_body_is_missing() -> None:
    parser = BeanstalkParser()
    for piece in (b"put 0 0 1 3\r\n", b"ab", b"c\r"):
        parser.feed(piece)
        assert parser.next() is None
        assert parser.in_put
        assert parser.held == 0
    parser.feed(b"\nsta")
    assert parser.next() == ("put", 0, 0, 1, b"abc")
    assert not parser.in_put
    assert parser.held == 3


@pytest.mark.parametrize("rest", [b"", b"reser", b"put 0 0 60 10\r\nhalf"])
@pytest.mark.parametrize("cut", [10, 19, 1000, 100_000])
def test_a_body_that_was_passed_on_is_not_kept(rest: bytes, cut: int) -> None:
    parser, stream = BeanstalkParser(200_000), b"put 0 0 60 100000\r\n" + b"x" * 100_000 + b"\r\n" + rest
    found = []
    for part in (stream[:cut], stream[cut:]):
        parser.feed(part)
        while (command := parser.next()) is not None:
            found.append(command)
        parser._check()
    assert found == [("put", 0, 0, 60, b"x" * 100_000)]
    assert len(parser._data) + len(parser._body) <= len(rest)


def test_a_body_too_big_is_not_kept() -> None:
    parser = BeanstalkParser()
    parser.feed(b"put 0 0 0 4000000000\r\n")
    for _ in range(1000):
        parser.feed(b"x" * 1000)
        assert parser.next() is None
        assert parser.held == 0
    assert not parser.in_put
    assert parser.in_big_put


def test_a_body_in_tiny_pieces_takes_its_own_size() -> None:
    assert memory_of(BeanstalkParser(100_000), b"put 0 0 0 100000\r\n" + b"x" * 99_999) < 130_000


# -- lines that are too long -----------------------------------------------------------------------------------------

ASK = b"list-tube-used\r\n"
ANSWER = ("list-tube-used",)


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        (b"x" * 222 + b"\r\n" + ASK, [UNKNOWN_COMMAND, ANSWER]),
        (b"x" * 224 + b"\r\n" + ASK + ASK, [BAD_FORMAT, ANSWER, ANSWER]),
        (b"x" * 500 + b"\r\n" + ASK, [BAD_FORMAT, ANSWER]),
        (b"use " + b" " * 215 + b"\r\n" + ASK, [BAD_FORMAT, ANSWER]),
        # A line end that the border of two buffers cuts is not seen, and the next line is lost with it.
        (b"x" * 223 + b"\r\n" + ASK + ASK, [BAD_FORMAT, ANSWER]),
        (b"x" * 447 + b"\r\n" + ASK + ASK, [BAD_FORMAT, ANSWER]),
        (b"x" * 446 + b"\r\n" + ASK + ASK, [BAD_FORMAT, ANSWER, ANSWER]),
        # A CR that begins no line end hides the line end behind it, until the buffer is full.
        (b"a\rb\r\n" + ASK, []),
        (b"a\rb\r\n" + ASK * 20, [BAD_FORMAT] + [ANSWER] * 6),
        (b"\r\r\n" + ASK * 20, [BAD_FORMAT] + [ANSWER] * 6),
        (b"x" * 300 + b"\ry\r\n" + ASK + ASK, []),
    ],
)
def test_long_lines(text: bytes, commands: list[Command]) -> None:
    assert parsed(text) == commands
    assert parsed(*(text[at : at + 1] for at in range(len(text)))) == commands


def test_a_long_line_is_not_kept() -> None:
    parser = BeanstalkParser()
    for _ in range(1000):
        parser.feed(b"x" * 1000)
        assert parser.next() is None
        assert parser.held < MAX_LINE_BYTES


# -- any bytes, cut anywhere -----------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        b"put 0 0 1 3\r\nabc\r\n",
        b"put 1 1 1 9\r\nabc\r\ndefg\r\n",
        b"put 0 0 0 20\r\n",
        b"put 0 0 0 300\r\n" + b"x" * 302,
    ]
    + [
        b"put 0 0 0 1\r\nabcd",
        b"reserve\r\n",
        b"delete 5\r\n",
        b"use a\r\n",
        b"\r\n",
        b"\r",
        b"\n",
        b"x" * 230,
        b"kick",
    ]
    + [b"pause-tube a 0\r\n", b"\0", b" ", b"stats\r\n", b"a\rb\r\n", b"put 0 0 0 3 3\r\n"]
)
STREAMS = st.lists(st.one_of(WORDS, st.binary(max_size=40)), max_size=12).map(b"".join)


@settings(max_examples=share(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS, st.lists(st.integers(0, 2000), max_size=30))
def test_cuts_change_nothing_and_nothing_is_raised(stream: bytes, cuts: list[int]) -> None:
    whole = parsed(stream, max_job_bytes=250)
    places = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    assert parsed(*(stream[a:b] for a, b in itertools.pairwise(places)), max_job_bytes=250) == whole
    assert parsed(*(stream[at : at + 1] for at in range(len(stream))), max_job_bytes=250) == whole


@settings(max_examples=share(300), deadline=None)
@given(st.binary(max_size=230))
def test_any_line_is_some_command(text: bytes) -> None:
    for command in parsed(text + b"\r\n" * 4 + b"x" * 500 + b"\r\n"):
        assert isinstance(command[0], str)


@settings(max_examples=share(200), deadline=None)
@given(
    st.sampled_from([b"put", b"release", b"bury", b"kick", b"delete", b"peek", b"reserve-with-timeout", b"stats-job"]),
    st.lists(
        st.one_of(st.integers(0, 1 << 66).map(lambda n: b"%d" % n), st.sampled_from([b"", b"0", b"x"])), max_size=5
    ),
)
def test_the_strict_forms_are_the_lax_ones(verb: bytes, words: list[bytes]) -> None:
    """What the fast way accepts, the slow one reads in the same way: another space sends it there."""
    text = b" ".join((verb, *words))
    assert line(text) == line(text.replace(b" ", b"  ", 1))
