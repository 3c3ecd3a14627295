"""Each rule of docs/guarantees.md, the tests that fail when it is broken, and how to break it.

A break is a patch of the library for the life of a process. This module is a plugin of pytest: with ``KESTRELPY_BREAK``
naming a rule, it breaks that one before any test is imported, and the tests named here must fail::

    KESTRELPY_BREAK=R7 python -m pytest -p tests.regressions.breaking tests/...

``test_rules`` does that. A rule whose tests bring their own planted twin is not broken here.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from kestrelpy import _process
from kestrelpy._disk import real as real_module
from kestrelpy._disk.memory import MemoryFile
from kestrelpy._disk.real import RealDirectory, RealFile
from kestrelpy._journal import checkpoint, file_names, journal, recovery, view
from kestrelpy._journal import format as format_module
from kestrelpy._journal import segment as segment_module
from kestrelpy._journal.growth import Growth
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, Recovery
from kestrelpy._journal.retention import Retention
from kestrelpy._reading.burial import Burial
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing import syncer as syncer_module
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy.inbox import moves, publishing
from kestrelpy.inbox.ingest import Ingest
from kestrelpy.inbox.ledger import IngestLedger
from kestrelpy.item import Item
from kestrelpy.queue import JournaledQueue
from tests.support.paths import PYTHONPATH, ROOT


@dataclass(frozen=True)
class Rule:
    """``tests``: names of test functions, each of which fails when the rule is broken. ``broken``: how, or ``None``
    where these tests have a planted twin.
    """

    tests: tuple[str, ...]
    broken: Callable[[], None] | None


RULES: dict[str, Rule] = {}


def rule(name: str, *tests: str) -> Callable[[Callable[[], None]], None]:
    def note(broken: Callable[[], None]) -> None:
        RULES[name] = Rule(tests, broken)

    return note


def twins(name: str, *tests: str) -> None:
    RULES[name] = Rule(tests, None)


def pytest_configure() -> None:
    """Break what is asked for."""
    name = os.environ.get("KESTRELPY_BREAK")
    if name:
        broken = RULES[name].broken
        assert broken is not None
        broken()


# -- finding and running the tests -----------------------------------------------------------------------------------


@cache
def places() -> dict[str, str]:
    """Every test function of the suite, and the file that it is in."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE):
            found[name] = str(path.relative_to(ROOT))
    return found


def drawn(seed: int, count: int) -> list[str]:
    """So many of the rules that can be broken here, drawn with a seed; all if there are no more."""
    breakable = [name for name, rule in RULES.items() if rule.broken is not None]
    return random.Random(seed).sample(breakable, min(count, len(breakable)))


def unnoticed_by(name: str) -> tuple[list[str], str]:
    """Break a rule and run its tests, in a process of their own: those that have not failed, and what was printed."""
    tests = RULES[name].tests
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.regressions.breaking",
            "-rf",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
        ]
        + [f"{places()[test]}::{test}" for test in tests],
        env={**os.environ, "KESTRELPY_BREAK": name, "PYTHONPATH": PYTHONPATH},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = done.stdout + done.stderr
    failed = [test for test in tests if re.search(rf"^FAILED .*::{test}\b", done.stdout, re.MULTILINE)]
    if done.returncode != 1:
        failed = []
    return [test for test in tests if test not in failed], told


def run(seed: int, limit: int = 40) -> Counter[str]:
    """Break at most ``limit`` rules one after the other; how many, and how many were noticed by all of their tests."""
    counts: Counter[str] = Counter()
    for name in drawn(seed, limit):
        counts["rules broken"] += 1
        counts["noticed"] += not unnoticed_by(name)[0]
    return counts


# -- how to break them -----------------------------------------------------------------------------------------------


class Deaf:
    """A file or directory whose syncs do nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sync(self) -> None:
        """The break."""


def nothing(*_: object, **__: object) -> None:
    """What is done instead of what should be done."""


# -- files -----------------------------------------------------------------------------------------------------------


@rule("R1", "test_r1_a_segment_is_new_until_it_is_on_disk_by_content_and_by_name")
def names_of_segments_not_synced() -> None:
    real = segment_module.sync_and_name

    def settle(directory: Any, file: Any, segment: Any) -> None:
        real(Deaf(directory), file, segment)

    segment_module.sync_and_name = journal.sync_and_name = recovery.sync_and_name = settle


@rule("R2", "test_a_directory_that_is_made_is_synced_into_its_parent")
def parents_not_synced() -> None:
    real_module._sync_path = nothing


@rule("R3", "test_lk_f89_the_first_save_replaces_and_is_durable")
def replaced_without_a_sync() -> None:
    def replace(self: Any, data: bytes, size: int) -> int:
        file = self._open_spare()
        file.write(0, data)
        file.close()
        self._directory.rename(file_names.temporary_name(self.name), self.name)
        return size

    checkpoint.FileWithSpare.replace = replace  # type: ignore[method-assign]


@rule("R4", "test_r4_a_checkpoint_on_disk_names_nothing_that_is_not")
def saved_ahead_of_the_journal() -> None:
    LocalSource.make_durable = nothing  # type: ignore[method-assign]


@rule(
    "R5",
    "test_the_writer_keeps_what_it_needs",
    "test_segments_wait_for_a_reader_that_is_not_open",
    "test_r5_segments_wait_for_a_durable_checkpoint",
)
def retired_by_what_is_in_memory() -> None:
    QueueFiles.lowest_head_of_others = nothing  # type: ignore[method-assign]
    ReaderRegistry._durable_head = lambda self, reader: reader.head  # type: ignore[method-assign]


@rule("R6", "test_an_archive_never_overwrites", "test_an_archive_is_never_overwritten")
def archived_over_what_is_there() -> None:
    def archive_over(directory: Any, name: str, archive: Any, queue: str, header: Any) -> bool:
        directory.move(name, archive, name)
        return True

    journal.archive_segment = archive_over


@rule("R7", "test_r7_no_hole_where_a_segment_ends", "test_no_footer_is_on_disk_before_the_frames_in_front_of_it")
def rotated_without_a_sync() -> None:
    real_close, real_name = segment_module.close_segment, segment_module.sync_and_name

    def close(file: Any, segment: Any) -> None:
        real_close(Deaf(file), segment)

    def name(directory: Any, file: Any, segment: Any) -> None:
        real_name(directory, Deaf(file), segment)

    segment_module.close_segment = journal.close_segment = close
    segment_module.sync_and_name = journal.sync_and_name = name


@rule("R8", "test_r8_temporary_files_go_and_foreign_ones_stay", "test_nsq_938_thousands_of_empty_temporaries")
def leftovers_left() -> None:
    QueueFiles.remove_leftovers = nothing  # type: ignore[method-assign]


# -- syncs that failed, crashes --------------------------------------------------------------------------------------


class Retrying(Deaf):
    def sync(self) -> None:
        """A sync that fails is done again."""
        try:
            self._inner.sync()
        except OSError:
            self._inner.sync()


@rule("R9", "test_r9_a_second_sync_is_not_believed")
def a_second_sync_is_believed() -> None:
    real_target, real_active = Journal.sync_target, Journal.is_active

    def target(self: Journal) -> Any:
        file, item_id = real_target(self)
        return (file and Retrying(file)), item_id

    Journal.sync_target = target  # type: ignore[method-assign]

    def is_active(self: Journal, file: Any) -> bool:
        return real_active(self, file._inner)

    Journal.is_active = is_active  # type: ignore[method-assign]


@rule("R10", "test_r10_what_a_failed_sync_left_in_the_cache_is_not_believed")
def the_cache_is_believed() -> None:
    RealFile.forget = MemoryFile.forget = nothing  # type: ignore[method-assign]


@rule("R11", "test_lk_f83_a_torn_tail_never_counted", "test_segments_are_chained")
def the_old_segment_is_not_closed() -> None:
    recovery.close_segment = journal.close_segment = nothing


@rule("R12", "test_a_put_that_failed_is_gone_at_once")
def a_short_store_stays() -> None:
    Journal._undo = nothing  # type: ignore[method-assign]


@rule("R13", "test_r13_an_interrupt_at_any_store_leaves_file_and_memory_of_one_mind")
def memory_changes_before_the_file() -> None:
    def undo(self: Journal, error: BaseException) -> None:
        offset, tail_id, total_bytes = self._at
        self._at = (offset + format_module.FRAME_BYTES, tail_id + 1, total_bytes)

    Journal._undo = undo  # type: ignore[method-assign]


@rule("R14", "test_a_batch_whose_iterator_raises_stores_nothing")
def stored_as_it_is_built() -> None:
    def put_many(self: JournaledQueue, items: Any, **options: Any) -> range:
        ids = [self.put(item, **options) for item in items]
        return range(ids[0], ids[-1] + 1)

    JournaledQueue.put_many = put_many  # type: ignore[method-assign]


@rule("R15", "test_r15_a_later_record_proves_that_an_earlier_one_was_on_disk")
def the_watermark_is_ignored() -> None:
    Recovered.watermark = property(lambda _: 0, nothing)  # type: ignore[assignment, misc]


@rule("R16", "test_r16_a_missing_segment_is_damage")
def the_chain_is_not_checked() -> None:
    Recovery._check_chain = Recovery._check_ends = nothing  # type: ignore[method-assign]


@rule("R17", "test_r17_the_ids_of_a_torn_tail_stay_used")
def used_ids_forgotten() -> None:
    recovery.write_mark = nothing


@rule("R18", "test_history_libkestrel_4_an_unfinished_last_segment")
def an_unfinished_segment_is_damage() -> None:
    recovery.is_abandoned = segment_module.is_abandoned = lambda *_: False


@rule("R19", "test_leftover_bytes_are_kept_and_not_read", "test_lk_f83_a_torn_tail_never_counted")
def a_torn_tail_is_destroyed() -> None:
    real = segment_module.close_segment

    def close(file: Any, segment: Any) -> None:
        size = file.size()
        file.truncate(segment.records_end)
        file.truncate(size)
        real(file, segment)

    segment_module.close_segment = recovery.close_segment = journal.close_segment = close


@rule("R20", "test_r20_recovery_is_repeatable", "test_r20_recovery_killed_at_each_of_its_steps")
def recovery_leaves_less_each_time() -> None:
    real = Recovery._close_last

    def close_last(self: Recovery, file: Any, segment: Any) -> None:
        if segment.records_end <= format_module.HEADER_BYTES:
            used = len(file.read(0, file.size()).rstrip(b"\0"))
            file.truncate(max(used - 700, format_module.HEADER_BYTES))
        real(self, file, segment)

    Recovery._close_last = close_last  # type: ignore[method-assign]


# -- names and bytes from elsewhere ----------------------------------------------------------------------------------


@rule("R21", "test_a_length_beyond_the_segment_is_damage")
def lengths_are_believed() -> None:
    real = view.read_entries

    def read_entries(
        file: Any, marker: int, path: str, position: Any, end: int, first_id: int, last_id: int, max_bytes: int
    ) -> Any:
        return real(file, marker, path, position, 1 << 40, first_id, last_id, max_bytes)

    view.read_entries = read_entries


@rule("R22", "test_only_regular_files_with_one_link_are_opened", "test_r22_what_is_no_file_is_refused_and_not_followed")
def anything_is_opened() -> None:
    def open_any(self: RealDirectory, name: str, *, write: bool = False, linked: bool = True) -> RealFile:
        del linked
        flags = os.O_RDWR if write else os.O_RDONLY
        return RealFile(os.open(name, flags | os.O_NONBLOCK, dir_fd=self._number))

    RealDirectory.open = open_any  # type: ignore[method-assign]


@rule("R23", "test_reader_names_follow_the_rule", "test_lk_b12_reader_names_cannot_leave_the_folder")
def any_name_will_do() -> None:
    file_names.check_name = lambda name: name


@rule("R24", "test_modes_are_private_whatever_the_umask_allows", "test_names_and_directory")
def files_for_everybody() -> None:
    real = RealDirectory.create

    def create(self: RealDirectory, name: str) -> RealFile:
        file = real(self, name)
        os.fchmod(file._descriptor, 0o644)
        return file

    RealDirectory.create = create  # type: ignore[method-assign]


# -- locks, processes, interpreter -----------------------------------------------------------------------------------


@rule("R25", "test_a_lock_file_that_is_replaced_meanwhile_is_locked_again")
def any_file_of_that_name_is_the_lock() -> None:
    RealDirectory._is_at = lambda *_: True  # type: ignore[method-assign]


@rule("R26", "test_a_forked_child_that_lets_go_of_a_lock_leaves_it_to_the_parent")
def a_child_unlocks() -> None:
    real_module._RealLock.abandon = real_module._RealLock.release  # type: ignore[method-assign]


class _NoLock:
    release = abandon = nothing


@rule("R27", "test_lk_b22_a_second_open_is_refused")
def nothing_is_locked() -> None:
    RealDirectory.lock = lambda *_, **__: _NoLock()  # type: ignore[method-assign, assignment]


@rule("R28", "test_network_file_systems_are_refused")
def any_file_system_will_do() -> None:
    real_module._is_network = lambda kind: False


twins("R29", "test_r29_a_waiting_thread_does_not_keep_the_interpreter")


@rule("R30", "test_r30_a_queue_whose_maintenance_thread_died_says_so")
def nobody_is_told_that_maintenance_is_lost() -> None:
    syncer_module.Syncer.lose_thread = nothing  # type: ignore[method-assign]


@rule("R31", "test_a_queue_never_closed_gives_a_resource_warning")
def nothing_is_said_of_what_nobody_closed() -> None:
    _process.warnings = SimpleNamespace(warn=nothing)  # type: ignore[assignment]


@rule("R32", "test_many_queues_few_descriptors_one_thread")
def a_descriptor_more_for_each_file() -> None:
    kept = []
    real = RealFile.__init__

    def start(self: RealFile, descriptor: int, **options: Any) -> None:
        real(self, descriptor, **options)
        kept.append(os.dup(descriptor))

    RealFile.__init__ = start  # type: ignore[method-assign]


@rule("R33", "test_an_error_reaches_the_leader_and_everybody_behind_it")
def followers_take_a_failed_sync_for_a_good_one() -> None:
    def fail(self: GroupCommit, error: BaseException) -> None:
        with self._lock:
            left, self._tickets = self._tickets, []
            self._leader = None
        for item_id, ticket in left:
            if ticket.claim():
                ticket.give(item_id)

    GroupCommit.fail = fail  # type: ignore[method-assign]


@rule("R34", "test_r34_numbers_rise_whatever_the_clock_says")
def numbers_by_the_clock() -> None:
    real = Journal._begin

    def begin(self: Journal, frame_bytes: int, added_ms: int) -> None:
        self._last_number = 0
        real(self, frame_bytes, added_ms)

    Journal._begin = begin  # type: ignore[method-assign]


@rule("R35", "test_a_batch_that_can_never_be_taken_is_kept_aside")
def taken_in_unchecked() -> None:
    Ingest._why_refused = lambda self, batch: None  # type: ignore[method-assign]


@rule("R36", "test_half_a_batch_survives_a_close")
def no_intent() -> None:
    IngestLedger.begin = lambda self, intent: None  # type: ignore[method-assign]


@rule("R37", "test_half_a_batch_is_not_seen_and_the_rest_follows")
def half_a_batch_is_seen() -> None:
    LocalSource.hide_from_locked = lambda self, first_id: None  # type: ignore[method-assign]


@rule("R38", "test_the_memory_does_not_grow_for_ever")
def nothing_is_forgotten() -> None:
    IngestLedger.forget_cleared = lambda self, numbers: None  # type: ignore[method-assign]


@rule("R39", "test_a_version_is_published_once")
def published_without_a_look() -> None:
    publishing._last_version = lambda *_: None


@rule(
    "R40",
    "test_r40_a_reader_is_moved_to_the_first_segment_from_which_it_is_within",
    "test_r40_a_skip_that_cannot_be_saved_moves_nothing",
)
def a_skip_is_not_saved() -> None:
    real = Checkpointer._store

    def store(self: Checkpointer, state: Any, *, durable: bool) -> None:
        if not state.skipped:
            real(self, state, durable=durable)

    Checkpointer._store = store  # type: ignore[method-assign]


@rule(
    "R41",
    "test_r41_a_segment_stays_for_keep_for_after_its_last_item_and_not_longer",
    "test_r41_the_oldest_go_and_the_youngest_stay",
)
def nothing_is_kept() -> None:
    Retention.count_due = lambda self, consumed, *_, **__: len(consumed)  # type: ignore[method-assign]


@rule("R42", "test_r42_a_put_that_would_make_the_journal_larger_is_refused")
def a_journal_grows_as_it_likes() -> None:
    Growth.allow = lambda self, journal, least, most: most  # type: ignore[method-assign]


@rule("R43", "test_a_dead_item_is_not_delivered_while_its_move_fails")
def dead_items_are_delivered() -> None:
    real = Burial.add_locked

    def add_locked(self: Burial, item: Item, *about: Any) -> None:
        real(self, item, *about)
        self._backlog.requeued.add(item.id, (item.data, item.added_ms, item.expires_ms))

    Burial.add_locked = add_locked  # type: ignore[method-assign,assignment]


@rule("R44", "test_the_intent_is_on_disk_before_anything_is_published")
def moved_without_an_intent() -> None:
    real = Burial._carry_out

    def carry_out(self: Burial, move: Any) -> None:
        self._noted = move
        real(self, move)

    Burial._carry_out = carry_out  # type: ignore[method-assign]


@rule("R45", "test_each_opening_has_a_stream_of_its_own")
def one_stream_for_all() -> None:
    moves.new_stream = lambda: bytes(16)


@rule("R46", "test_an_opening_carries_out_what_was_begun")
def intent_forgotten() -> None:
    real = Progress.load

    def load(state: Any) -> Progress:
        return real(state._replace(move=None))

    Progress.load = load  # type: ignore[method-assign]


@rule("R47", "test_a_seek_finishes_what_is_published")
def seek_does_not_ask() -> None:
    moves.was_published = lambda *_, **__: False
