"""Defects of puts: limits, waiting for room, dropping the oldest, hooks of items that expire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy import FullPolicy, JournaledQueue, Reader
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.hooks import Hooks
from kestrelpy._reading.limits import Limited
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing import put_path as put_module
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.maintenance import Maintenance
from kestrelpy._writing.put_path import PutPath
from kestrelpy.blocking import JournaledBlockingQueue
from tests.use.planting import defect

CANCELLED = "tests/unit/writing/test_backpressure.py::test_a_cancelled_aput_that_waits_for_room_has_put_nothing"
NO_THREAD = "tests/unit/writing/test_backpressure.py::test_tasks_that_wait_for_room_take_no_thread"


@defect(
    "C4",
    "DROP_OLDEST: an error while dropping makes a put raise whose item is stored, and ends group commit",
    test="tests/unit/test_queue.py::test_an_error_while_dropping_fails_no_put",
)
def errors_while_dropping_reach_the_put() -> Iterator[None]:
    with patch.object(Dispatcher, "keep_limits", Dispatcher._drop_oldest):
        yield


@defect(
    "C24",
    "DROP_OLDEST with max_bytes: a put that is larger is accepted, and drops itself",
    test="tests/unit/test_queue.py::test_drop_oldest_keeps_the_newest_item_however_large_it_is",
)
def the_newest_item_is_dropped_for_bytes() -> Iterator[None]:
    def is_over_limit(self: Backlog) -> bool:
        max_items, max_bytes = self.config.max_items, self.config.max_bytes
        return (max_items is not None and self.items > max_items) or (max_bytes is not None and self.bytes > max_bytes)

    with patch.object(Backlog, "is_over_limit", is_over_limit):
        yield


@defect(
    "C19",
    "Two producers without room and a hook that raises wake each other, thousands of times a second",
    test="tests/unit/reading/test_reader.py::test_a_hook_that_raised_has_another_go_and_nobody_is_told_in_vain",
)
def a_hook_that_raised_again_wakes_producers() -> Iterator[None]:
    real = Hooks.try_failed_again

    def try_again(self: Hooks) -> None:
        real(self)
        self._caller.notify()

    with patch.object(Hooks, "try_failed_again", try_again):
        yield


def _all_that_hooks_have_is_shown_again() -> Iterator[None]:
    real = Dispatcher.discard_expired

    def discard(self: Dispatcher, limit: int | None = None) -> int:
        backlog = self.backlog
        with backlog.lock:
            self.hooks.failed = {
                item.id: item
                for item in backlog.with_hook.values()
                if backlog.is_expired((b"", item.added_ms, item.expires_ms))
            }
        return real(self, limit)

    with (
        patch.object(Dispatcher, "discard_expired", discard),
        patch.object(Hooks, "show_expired", Hooks._show),
    ):
        yield


defect(
    "H4",
    "on_expired is called for an item that another thread's hook has, and recurses",
    test="tests/unit/reading/test_reader.py::test_an_expired_item_is_shown_once_while_its_hook_runs",
)(_all_that_hooks_have_is_shown_again)
defect(
    "H5",
    "An item that on_abort has is dropped, or shown to on_expired too",
    test="tests/unit/reading/test_reader.py::test_an_item_that_on_abort_has_is_shown_to_no_other_hook",
)(_all_that_hooks_have_is_shown_again)


def _aput_takes_a_thread() -> Iterator[None]:
    real, real_face = JournaledQueue.aput, JournaledBlockingQueue.aput

    async def aput(self: JournaledQueue, data: Any, *, timeout: float | None = None, **options: Any) -> int:
        if timeout == 0:
            return await real(self, data, **options)
        return await asyncio.to_thread(self.put, data, timeout=timeout, **options)

    async def aput_face(self: JournaledBlockingQueue, item: Any, timeout: float | None = None) -> None:
        if self.full():
            await asyncio.to_thread(self.put, item, True, timeout)
        else:
            await real_face(self, item, timeout)

    with patch.object(JournaledQueue, "aput", aput), patch.object(JournaledBlockingQueue, "aput", aput_face):
        yield


for _name, _symptom, _test in (
    ("C9", "aput: items are put after a cancel, and asyncio.run never returns", CANCELLED),
    ("H6", "A cancelled aput that waits for room puts its item later", CANCELLED),
    ("U2", "Producers in aput take all threads of the loop, and their consumer waits for one", NO_THREAD),
    ("H7", "Few waiting aputs hold up all others of the process", NO_THREAD),
):
    defect(_name, _symptom, test=_test)(_aput_takes_a_thread)


@defect(
    "C6",
    "A default reader that another process took over refuses every put; one made elsewhere is not limited",
    test="tests/unit/writing/test_backpressure.py::test_a_default_reader_that_another_process_took_over_refuses_nothing",
)
def limits_are_worked_out_when_readers_change_here() -> Iterator[None]:
    with patch.object(ReaderRegistry, "refresh_limits", lambda self: False):
        yield


@defect(
    "C13",
    "A producer that waits for room is not woken when its reader is handed over to another process",
    test="tests/unit/writing/test_backpressure.py::test_a_producer_is_woken_when_its_reader_is_handed_over",
)
def a_reader_that_closes_rings_nobody() -> Iterator[None]:
    def closed(self: Maintenance, reader: Reader) -> None:
        self._registry.closed(reader)

    with patch.object(Maintenance, "reader_closed", closed), patch.object(Room, "pass_over", lambda self: None):
        yield


@defect(
    "C27",
    "put_many of more than max_items, with BLOCK, waits for what can't be",
    test="tests/unit/writing/test_backpressure.py::test_a_batch_that_can_never_fit_is_refused_at_once",
)
def what_never_fits_waits() -> Iterator[None]:
    with patch.object(put_module, "never_fits", lambda reader, parcel: False):
        yield


@defect(
    "H9",
    "A batch passes max_bytes by any amount",
    test="tests/unit/writing/test_backpressure.py::test_a_batch_overshoots_bytes_by_one_item_as_single_puts_do",
)
def only_what_is_there_counts_for_bytes() -> Iterator[None]:
    def is_refused(self: PutPath, reader: Limited, parcel: put_module.PutRequest) -> bool:
        dropping = reader.config.full_policy is FullPolicy.DROP_OLDEST
        return not dropping and not self.fits(reader, len(parcel.items))

    with patch.object(PutPath, "_is_refused", is_refused):
        yield
