"""Defects of clocks, threads and group commit, put back: for the use explorer, and for the tests that were written for
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import kestrelpy._journal.journal
import kestrelpy._reading.backlog
import kestrelpy._reading.detached_source
import kestrelpy._reading.dispatch
import kestrelpy._reading.reader
import kestrelpy._reading.window
import kestrelpy._writing.ending
import kestrelpy._writing.group_commit
import kestrelpy._writing.put_path
import kestrelpy._writing.status
import kestrelpy._writing.syncer
from kestrelpy import _logging, _process, clock
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.hooks import Hooks
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._waiting import put_future
from kestrelpy._writing.ending import Ending
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy.clock import Clock, Timer, TimerHeap
from kestrelpy.inbox.watcher import InboxWatcher
from tests.use.planting import defect


@defect(
    "C2",
    "a callback or hook that puts, syncs or checkpoints hangs a queue with sync='always' for good",
    test="tests/unit/writing/test_durability.py::test_what_a_future_calls_back_may_wait_for_a_sync",
)
def a_leader_calls_back() -> Iterator[None]:
    real = GroupCommit._pass_on

    def pass_on(self: GroupCommit, leader: object) -> None:
        self.notify()
        real(self, leader)

    with patch.object(GroupCommit, "_pass_on", pass_on):
        yield


@defect(
    "C5",
    "a maintenance thread that could not be started once: nothing is synced in the background from then on",
    test="tests/unit/test_clock.py::test_a_thread_that_cannot_be_started_is_told_of_and_started_by_the_next_call",
)
def a_thread_that_cannot_be_started_is_passed_over() -> Iterator[None]:
    real = clock._Timers._start_locked

    def start_locked(self: clock._Timers) -> None:
        with contextlib.suppress(RuntimeError):
            real(self)

    with patch.object(clock._Timers, "_start_locked", start_locked):
        yield


@defect(
    "C10",
    "each refused call keeps its arguments in memory for ever",
    test="tests/unit/writing/test_durability.py::test_an_error_that_is_kept_keeps_no_arguments",
)
def one_error_is_raised_again_and_again() -> Iterator[None]:
    modules: list[Any] = [
        kestrelpy._reading.detached_source,
        kestrelpy._writing.syncer,
        kestrelpy._writing.status,
        kestrelpy._writing.ending,
        kestrelpy._journal.journal,
        kestrelpy._writing.group_commit,
        kestrelpy._reading.dispatch,
        kestrelpy._reading.backlog,
        kestrelpy._reading.reader,
    ]
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "copy_of", lambda error: error))
        yield


@defect(
    "C12",
    "a forked child's own queue hangs in put_future",
    test="tests/unit/test_lifetime.py::test_a_childs_own_queue_has_futures_while_the_parents_are_made",
)
def a_child_keeps_the_lock_of_the_promises() -> Iterator[None]:
    with patch.object(put_future, "_reset_after_fork", lambda: None):
        yield


@defect(
    "C16",
    "a thread of a pool that waits keeps the interpreter from ending",
    test="tests/unit/test_lifetime.py::test_nobody_may_wait_once_the_interpreter_is_ending",
    unreachable="it takes the end of an interpreter, and a certain order of its imports",
)
def who_enters_a_line_at_the_end_waits() -> Iterator[None]:
    with (
        patch.object(kestrelpy._reading.dispatch, "why_not_wait", lambda: None),
        patch.object(kestrelpy._writing.put_path, "why_not_wait", lambda: None),
    ):
        yield


@defect(
    "bug 8",
    "what closing a queue at the interpreter's end raises is swallowed",
    test="tests/unit/test_lifetime.py::test_what_closing_at_the_end_raises_is_logged",
    unreachable="it takes the end of an interpreter",
)
def the_last_error_is_swallowed() -> Iterator[None]:
    def close_all() -> None:
        for thing in _process._open_objects():
            with contextlib.suppress(Exception):
                thing.close()

    with patch.object(_process, "close_all", close_all):
        yield


@defect(
    "C17",
    "SystemExit in one hook or callback fails every queue of the process",
    test="tests/unit/test_clock.py::test_the_thread_outlives_whatever_a_callback_raises",
)
def the_thread_dies_of_what_a_callback_raises() -> Iterator[None]:
    def run_timer(timer: Timer) -> None:
        try:
            timer.callback()
        except Exception:
            _logging.exception("a maintenance call failed")
        finally:
            timer.cancel()

    with patch.object(clock, "_run_timer", run_timer):
        yield


@defect(
    "C18",
    "a slow callback suspends the background syncs of all queues",
    test="tests/unit/writing/test_durability.py::test_a_slow_callback_does_not_hold_up_the_syncs_of_other_queues",
)
def one_thread_for_syncs_and_callbacks() -> Iterator[None]:
    def sync_later(where: Clock, seconds: float, callback: Callable[[], object], on_lost: Any) -> Timer:
        return where.call_later(seconds, callback, on_lost=on_lost)

    with patch.object(kestrelpy._writing.syncer, "sync_later", sync_later):
        yield


@defect(
    "C18b",
    "a process that was stopped while it holds NAME.readers.lock suspends the maintenance of all queues of another",
    test="tests/unit/writing/test_durability.py::test_a_held_guard_does_not_hold_up_other_queues_nor_a_close",
)
def retiring_waits_for_the_guard() -> Iterator[None]:
    real = ReaderRegistry.retire

    def retire(self: ReaderRegistry, source: LocalSource, *, wait: bool = True) -> None:
        real(self, source)

    with patch.object(ReaderRegistry, "retire", retire):
        yield


@defect(
    "C20",
    "the inbox_interval of a second queue in a folder counts only after the first one's next look",
    test="tests/unit/inbox/test_inbox.py::test_a_queue_that_looks_more_often_is_not_kept_waiting_by_another",
)
def a_look_that_is_set_stays() -> Iterator[None]:
    with patch.object(InboxWatcher, "_is_late", lambda self: False):
        yield


@defect(
    "C28",
    "timers that are cancelled stay in memory until their deadline",
    test="tests/unit/test_clock.py::test_cancelled_timers_do_not_stay_until_their_deadline",
)
def cancelled_timers_stay() -> Iterator[None]:
    with patch.object(TimerHeap, "is_stale", property(lambda self: False)):
        yield


@defect(
    "H8",
    "timers of futures that were cancelled, or served, stay in memory until their deadline",
    test="tests/unit/test_clock.py::test_the_clock_that_stands_still_forgets_cancelled_timers_too",
)
def timers_of_served_futures_stay() -> Iterator[None]:
    with patch.object(TimerHeap, "is_stale", property(lambda self: False)):
        yield


@defect(
    "C28b",
    "a closed queue is kept alive by its timers until they are due",
    test="tests/unit/writing/test_durability.py::test_a_closed_queue_is_not_kept_alive_by_its_timers",
)
def the_timers_of_a_closed_queue_stay() -> Iterator[None]:
    with patch.object(Ending, "_cancel_timers", lambda self: None):
        yield


@defect(
    "C28c",
    "each peek of an item that stays keeps 8 bytes for ever",
    test="tests/unit/reading/test_dispatch.py::test_peeks_and_aborts_leave_nothing_behind",
)
def ids_that_are_gone_stay_in_the_heap() -> Iterator[None]:
    with patch.object(kestrelpy._reading.window, "MAX_STALE_IDS", 1 << 62):
        yield


@defect(
    "C21",
    "a chain of callbacks that reaches the recursion limit leaves consumers in line, and an item there",
    test="tests/unit/reading/test_dispatch.py::test_a_long_chain_of_callbacks_is_served_to_its_end",
)
def hand_offs_nest_without_end() -> Iterator[None]:
    with (
        patch.object(kestrelpy._reading.dispatch, "DEEPEST", 1 << 62),
        patch.object(kestrelpy._reading.dispatch, "is_deep", lambda: False),
        patch.object(Dispatcher, "_serve_line", lambda self: self._serve_once()),
    ):
        yield


@defect(
    "C17b",
    "SystemExit in a hook is raised where it is called, and is neither logged nor counted",
    test="tests/unit/reading/test_dispatch.py::test_a_hook_that_calls_exit_is_logged_and_counted",
)
def a_hook_may_exit() -> Iterator[None]:
    real = Hooks.call

    def call(self: Hooks, hook: Callable[..., object], *arguments: object) -> object:
        struck: list[SystemExit] = []

        def noting(*arguments: object) -> object:
            try:
                return hook(*arguments)
            except SystemExit as error:
                struck.append(error)
                return None

        result = real(self, noting, *arguments)
        if struck:
            raise struck[0]
        return result

    with patch.object(Hooks, "call", call):
        yield
