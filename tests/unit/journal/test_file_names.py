"""Names: what is legal, and which file is whose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import InvalidName, JournaledQueue
from kestrelpy._journal import file_names as names

LEGAL = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_-]{0,99}\Z")


@pytest.mark.parametrize("name", ["a", "A9_-", "0", "_", "x" * 100, "jobs-2"])
def test_legal_names_come_back(name: str) -> None:
    assert names.check_name(name) == name


# LK-F30: names outside the rule are refused at construction; LK-B12: the same rule for readers.
@pytest.mark.parametrize(
    "name",
    ["", "-a", "a.b", "a b", "a+b", "a/b", "../x", "a~", "a^", "a:b", "\u00e4", "\u0661", "a\n", "x" * 101, "a\0"],
)
def test_lk_f30_illegal_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidName) as caught:
        JournaledQueue(tmp_path, name)
    assert caught.value.name == name
    assert caught.value.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [None, 3, b"jobs"])
def test_a_name_is_a_str(name: object) -> None:
    with pytest.raises(InvalidName) as caught:
        names.check_name(name)  # type: ignore[arg-type]
    assert caught.value.name == name


@given(queue=LEGAL, reader=LEGAL | st.just(""), number=st.integers(0, 10**18), offset=st.integers(0, 10**18))
def test_every_name_made_is_recognised(queue: str, reader: str, number: int, offset: int) -> None:
    made = [
        names.segment_name(queue, number),
        names.archived_name(queue, number, b"\xab" * 16),
        names.new_segment_name(queue, number),
        names.quarantine_name(queue, number, offset),
        names.mark_name(queue),
        names.lock_name(queue),
        names.readers_lock_name(queue),
        names.checkpoint_name(queue, reader),
        names.reader_lock_name(queue, reader),
    ]
    for name in made:
        assert names.parse_owner(name) == (queue, False)
        assert names.parse_owner(names.temporary_name(name)) == (queue, True)
    assert {names.parse_segment(name, queue) for name in made[:3]} == {number}
    assert [names.is_new(name) for name in made[:3]] == [False, False, True]
    assert [names.lasting_name(name) for name in made[:3]] == [made[0], made[1], made[0]]
    assert names.parse_checkpoint(names.checkpoint_name(queue, reader), queue) == reader


@given(queue=LEGAL, other=LEGAL, number=st.integers(0, 10**13))
def test_a_file_belongs_to_one_queue(queue: str, other: str, number: int) -> None:
    assert (names.parse_segment(names.segment_name(queue, number), other) == number) is (queue == other)
    assert (names.parse_checkpoint(names.checkpoint_name(queue, "r"), other) == "r") is (queue == other)


# LK-F81: what is a segment.
@pytest.mark.parametrize(
    "name", ["jobs", "jobs.segment", "jobs.1.seg", "jobs.1a.segment", "jobs.1.segment.tmp",
             "jobs.12345678901234567890.segment",
             "xjobs.1.segment", "jobs.-1.segment", "jobs.1.segment\n", "jobs.\u0661.segment", "jobs.1.0123456.segment"]
)  # fmt: skip
def test_lk_f81_other_files_are_no_segments(name: str) -> None:
    assert names.parse_segment(name, "jobs") is None


@given(st.text(max_size=40))
def test_strange_names_are_nobodys_or_fit_the_table(name: str) -> None:
    owner = names.parse_owner(name)
    assert owner is None or re.fullmatch(r"[\w-]+[.+][\w.+-]*", name, re.ASCII)


def test_a_segment_listed_under_both_of_its_names_is_one() -> None:
    both = ["jobs.2.new.segment", "jobs.1.segment", "jobs.1.new.segment", "jobs.1.0a0b0c0d.segment", "jobs.3.segment"]
    assert names.segments_among(both, "jobs") == [
        (1, "jobs.1.0a0b0c0d.segment"),
        (1, "jobs.1.segment"),
        (2, "jobs.2.new.segment"),
        (3, "jobs.3.segment"),
    ]


def test_segments_sort_by_number() -> None:
    assert names.segment_name("jobs", 9) < names.segment_name("jobs", 1_700_000_000_000)
