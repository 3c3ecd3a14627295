"""The memcache parser without a network: bytes cut anywhere, hostile bytes, bounded memory. And names."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy.server.kestrel import names
from kestrelpy.server.kestrel.memcache_parser import Command, MemcacheParser
from tests.server.parsing import commands, cut, memory_of

WORDS = [
    b"set",
    b"get",
    b"gets",
    b"monitor",
    b"confirm",
    b"delete",
    b"flush",
    b"flush_all",
    b"flush_expired",
    b"stats",
    b"dump_stats",
    b"status",
    b"version",
    b"cas",
    b"quit",
    b"SET",
    b"Get",
]
PIECES = [*WORDS, b" ", b"\r\n", b"\n", b"q", b"q+a", b"q/open", b"/t=5", b"0", b"3", b"-1", b"noreply", b"abc", b"~"]


def new(max_line_bytes: int = 8192) -> MemcacheParser:
    return MemcacheParser(lambda name: 999 if name != b"full" else -1, max_line_bytes)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (b"set q 0 5 3\r\nabc\r\n", ("set", b"q", 5, b"abc", False)),
        (b"SET q 0 -5 0 noreply\r\n\r\n", ("set", b"q", -5, b"", True)),
        (b"set full 0 0 3\r\nabc\r\n", ("unwanted", b"full", False)),
        (b"get q\r\n", ("get", b"q", 0, False, False, False, False, False)),
        (b"gets q  \r\n", ("get", b"q", 0, False, False, False, False, True)),
        (b"get q/close/open/t=25/what\r\n", ("get", b"q", 25, True, True, False, False, False)),
        (b"get q/abort/t=+1\r\n", ("get", b"q", 1, False, False, True, False, False)),
        (b"monitor q 5\r\n", ("monitor", b"q", 5, None)),
        (b"monitor q -5 7\r\n", ("monitor", b"q", 0, 7)),
        (b"confirm q -3\r\n", ("confirm", b"q", -3)),
        (b"delete q\r\n", ("delete", b"q", False)),
        (b"flush q noreply\r\n", ("flush", b"q", True)),
        (b"delete noreply\r\n", ("delete", b"noreply", False)),
        (b"flush_all\r\n", ("flush_all", False)),
        (b"flush_all noreply\r\n", ("flush_all", True)),
        (b"flush_expired q\r\n", ("flush_expired", b"q")),
        (b"flush_all_expired\r\n", ("flush_all_expired",)),
        (b"stats items\r\n", ("stats",)),
        (b"dump_stats\r\n", ("dump_stats", [])),
        (b"dump_config a b+c\r\n", ("dump_config", [b"a", b"b+c"])),
        (b"status\r\n", ("status",)),
        (b"status up\r\n", ("status", b"up")),
        (b"version\r\n", ("version",)),
        (b"reload\r\n", ("reload",)),
        (b"quit\r\n", ("quit",)),
        (b"shutdown\r\n", ("shutdown",)),
        (b"get q/peek/abort\r\n", ("client-error", True)),
        (b"get q/t=5x\r\n", ("client-error", False)),
        (b"get q/t=123456789012345678901\r\n", ("client-error", False)),
    ],
)
def test_commands(line: bytes, command: Command) -> None:
    assert commands(new(), line) == [command]
    assert commands(new(), *[line[at : at + 1] for at in range(len(line))]) == [command]


def test_nothing_comes_after_the_end() -> None:
    parser = new()
    assert commands(parser, b"bogus\r\nget q\r\n", b"get q\r\n") == [("client-error", True)]
    assert parser.held == 0


@pytest.mark.parametrize("word", ["quit", "shutdown"])
def test_nothing_comes_after_quit(word: str) -> None:
    line = word.upper().encode() + b" now\r\n"
    parser = new()
    assert commands(parser, line + b"get q\r\nset q 0 0 5\r\nab", b"get q\r\n") == [(word,)]
    assert parser.held == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.randoms(use_true_random=False))
def test_cuts_do_not_matter(pieces: list[bytes], rng: random.Random) -> None:
    data = b"".join(pieces)
    whole = commands(new(), data)
    assert commands(new(), *cut(data, rng)) == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    parser = new(max_line_bytes=100)
    for piece in pieces:
        commands(parser, piece)
        assert parser.held <= 101 + len(piece)


def test_memory_is_bounded() -> None:
    parser = new()
    assert commands(parser, b"set full 0 0 2147483647\r\n") == []
    for _ in range(100):
        assert commands(parser, b"x" * 100_000) == []
        assert parser.held == 0
    assert not parser._body
    endless = new()
    assert commands(endless, b"get ", *[b"a" * 1000] * 9) == [("client-error", True)]


def test_a_body_arrives_in_pieces() -> None:
    parser = MemcacheParser(lambda _name: 1 << 30)
    body = bytes(range(256)) * 4096
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    found = commands(parser, b"set q 0 0 %d\r\n" % len(body), *pieces, b"\r", b"\nget q\r\n")
    assert found[0] == ("set", b"q", 0, body, False)
    assert found[1][0] == "get"


def test_a_body_in_tiny_pieces_takes_its_own_size() -> None:
    assert memory_of(MemcacheParser(lambda _name: 1 << 30), b"set q 0 0 100000\r\n" + b"x" * 99_999) < 130_000


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [b"q", b"Q", b"q+a", b"q+a+b", b"\xff\x01", b"-x", b"x--y", b"a" * 100, b"q+" + b"a" * 100]
)
def test_legal_names(name: bytes) -> None:
    """KP-2.1, KP-2.2."""
    assert names.is_legal(name)


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"+",
        b"q+",
        b"+q",
        b"a b",
        b"a.b",
        b"a/b",
        b"a~",
        b"a\0b",
        b"a\r",
        b"a" * 101,
        b"\xff" * 49,
        b"x--" + b"a" * 46,
    ],
)
def test_illegal_names(name: bytes) -> None:
    """KP-2.1, KP-2.2: names: an empty part is illegal; what does not fit has at most 48 bytes."""
    assert not names.is_legal(name)


def test_hostile_names_take_no_memory() -> None:
    """A name in thrift may have 16 MiB: what is remembered of names is short, and has an end."""
    tracemalloc.start()
    try:
        for number in range(2000):
            assert not names.is_legal(b"%d" % number + b"x" * 8000)
            assert not names.is_legal(b"%d" % number + b"~" * 8000)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
        for number in range(30_000):
            assert names.is_legal(b"%d+" % number + b"x" * 100)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()


def test_names_on_disk() -> None:
    """KP-2.3: names: what fits is itself there, everything else is hexadecimal."""
    assert names.library_name(b"Orders-2_a") == "Orders-2_a"
    assert names.library_name(b"x--a") == "x--782d2d61"
    assert names.library_name(b"-a") == "x--2d61"
    assert names.library_name(b"_") == "x--5f"
    assert names.library_name(b"\xc3\xa4") == "x--c3a4"
    assert names.original_name("x--acks") is None
    assert names.original_name("x--4141") is None  # AA fits, and is never written so


@given(st.binary(min_size=1, max_size=48))
def test_names_come_back(name: bytes) -> None:
    parent, child = names.split(name)
    if names.is_legal(name):
        for part in (parent, child):
            if part is not None:
                assert names.original_name(names.library_name(part)) == part
        if child is not None:
            assert names.side_name(name) != names.library_name(parent)
            assert names.original_name(names.side_name(name)) in (name, None)
