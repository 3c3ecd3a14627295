"""A reader's bookkeeping, against a plain set of ids."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kestrelpy._journal import format as fmt
from kestrelpy._reading.progress import Progress

QUEUE_ID = b"q" * 16


def saved(progress: Progress) -> fmt.Checkpoint:
    return progress.checkpoint(QUEUE_ID, "r", 99, (3, (1, 96)))


# LK-F90: id == head+1 moves the head over everything done behind it; others go into the done set.
def test_lk_f90_commit_moves_the_head_over_what_is_done() -> None:
    progress = Progress(0, 0, 0)
    progress.next_id = 6
    for item_id in (3, 2, 5):
        progress.release(item_id, 10)
    assert (progress.head, set(progress.done)) == (0, {2, 3, 5})
    progress.release(1, 10)
    assert (progress.head, set(progress.done)) == (3, {5})
    assert (progress.released_items, progress.released_bytes) == (4, 40)
    progress._check()


@given(st.permutations(range(1, 13)), st.integers(0, 12), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)))
def test_any_order_ends_at_the_same_place(order: list[int], count: int, passed: set[int], saves: set[int]) -> None:
    progress = Progress(0, 0, 0)
    progress.next_id = 13
    done = set()
    for item_id in order[:count]:
        done.add(item_id)
        if item_id in passed:
            progress.pass_over(item_id, item_id)
        else:
            progress.release(item_id, 1)
        if item_id in saves:
            saved(progress)
            assert not progress.done
        progress._check()
        assert all(progress.is_done(n) == (n in done) for n in range(1, 14))
        assert progress.head == next(n for n in range(14) if n + 1 not in done)
    assert progress.released_items == len(done - passed)
    spans = progress.done_spans()
    assert {n for first, last in spans for n in range(first, last + 1)} == {n for n in done if n > progress.head}
    assert all(b[0] > a[1] + 1 for a, b in pairwise(spans))


def test_a_checkpoint_behind_an_open_read_that_stays_costs_what_was_done_since() -> None:
    progress = Progress(0, 0, 0)
    progress.next_id = 100_001
    for item_id in range(2, 100_001):
        progress.release(item_id, 1)
    assert saved(progress).done == ((2, 100_000),)
    assert (progress.done, progress.spans) == ({}, {2: 100_000}), "no more is kept of them, or sorted again"
    progress.release(1, 1)
    assert (progress.head, progress.spans) == (100_000, {})


@given(st.sets(st.integers(1, 40)))
def test_lk_b1_done_ids_are_skipped_after_a_reload(done: set[int]) -> None:
    """What a checkpoint says is done is never fetched again."""
    before = Progress(0, 0, 0)
    before.next_id = 41
    for item_id in sorted(done, reverse=True):
        before.release(item_id, 1)
    progress = Progress.load(saved(before))
    progress._check()
    fetched = []
    while progress.next_id <= 41:
        if progress.next_id <= progress.special_through and progress.skip_done():
            continue
        fetched.append(progress.next_id)
        progress.next_id += 1
    assert fetched == [n for n in range(1, 42) if n not in done]
    assert progress.released_items == len(done)


def test_error_counts_are_kept_until_the_item_is_done() -> None:
    progress = Progress(0, 0, 0)
    progress.next_id = 4
    progress.error_counts = {1: 2, 3: 1}
    again = Progress.load(saved(progress))
    assert again.error_counts == {1: 2, 3: 1}
    assert again.special_through == 3
    again.release(1, 5)
    assert again.error_counts == {3: 1}


def test_what_is_moved_forgets_what_was_done_and_keeps_counts_ahead() -> None:
    progress = Progress(0, 0, 0)
    progress.next_id = 10
    progress.error_counts = {2: 1, 8: 4}
    progress.release(5, 1)
    progress.pass_over(7, 9)
    progress = progress.moved_to(4, 3, 30)
    assert (progress.head, progress.next_id, progress.released_items, progress.released_bytes) == (3, 4, 3, 30)
    assert progress.done_spans() == ()
    assert progress.error_counts == {8: 4}
    progress._check()


def test_pass_over_nothing_changes_nothing() -> None:
    progress = Progress(4, 4, 4)
    progress.pass_over(5, 4)
    assert (progress.head, progress.done_spans()) == (4, ())


def test_checkpoint_says_it_all() -> None:
    progress = Progress(2, 2, 20)
    progress.next_id = 9
    progress.release(4, 5)
    progress.pass_over(5, 6)
    progress.error_counts[3] = 1
    state = saved(progress)
    assert state == fmt.Checkpoint(
        QUEUE_ID, "r", 2, 99, 3, 25, hint_number=3, hint_offset=96, hint_id=1, done=((4, 6),), error_counts=((3, 1),)
    )
    assert saved(Progress.load(state)) == state
