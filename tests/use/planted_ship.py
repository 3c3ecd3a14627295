"""Defects of shipping, planted: for the use explorer, and for the tests that were written for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy import JournaledQueue
from kestrelpy._journal.format import Checkpoint
from kestrelpy._journal.journal import Journal
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._writing.export import Export, Tip
from kestrelpy.ship import opened, shipper
from kestrelpy.ship.history import History
from kestrelpy.ship.lease import OwnLease
from kestrelpy.ship.owner import LogOwner, Shipped
from kestrelpy.ship.shipper import Shipper
from kestrelpy.work.job_log import JobLog
from tests.use.planting import defect

TROUBLE = "tests/ship/test_shipping_and_trouble.py"
SHIPPING = "tests/ship/test_shipping.py"


@defect(
    "ship acks",
    "acks='shipped': a put returns when its item is on disk, and not in the store",
    test=f"{SHIPPING}::test_a_put_returns_when_its_slot_is_there_and_readers_see_it_then",
)
def what_is_on_disk_is_acknowledged() -> Iterator[None]:
    real = Export.acknowledge

    def acknowledge(self: Export, last_id: int, total_bytes: int) -> None:
        del last_id, total_bytes
        real(self, self.last_id, self.totals[1])

    with patch.object(Export, "acknowledge", acknowledge):
        yield


@defect(
    "ship shown",
    "acks='shipped': readers see items that are not in the store",
    test=f"{SHIPPING}::test_a_put_returns_when_its_slot_is_there_and_readers_see_it_then",
)
def readers_see_what_is_on_disk() -> Iterator[None]:
    real = LocalSource.show_durable_locked

    def show(self: LocalSource, item_id: int, total_bytes: int) -> None:
        self.shown_limit = None
        real(self, item_id, total_bytes)

    with patch.object(LocalSource, "show_durable_locked", show):
        yield


@defect(
    "ship flush",
    "flush() returns before all that was put is in the store",
    test=f"{SHIPPING}::test_all_that_was_put_is_in_the_store",
)
def a_flush_waits_for_all_but_one() -> Iterator[None]:
    class Flush(shipper._Flush):
        def __init__(self, items: int) -> None:
            super().__init__(items - 1)

    with patch.object(shipper, "_Flush", Flush):
        yield


@defect(
    "ship retire",
    "segments are retired that are not in the store yet",
    test=f"{SHIPPING}::test_no_segment_is_retired_that_is_not_in_the_store",
)
def segments_are_retired_as_without_shipping() -> Iterator[None]:
    with patch.object(Export, "keep_above", lambda self, limit: None):
        yield


@defect(
    "ship files",
    "a file that can not be opened for a moment ends shipping for good",
    test=f"{TROUBLE}::test_files_that_can_not_be_opened_for_a_while_do_not_end_shipping",
)
def a_restart_reads_the_journal_unguarded() -> Iterator[None]:
    real = Shipper._begin_again

    def begin_again(self: Shipper, seconds: float) -> bool:
        goes_on = real(self, seconds)
        export = self._export()
        if goes_on and export is not None:
            last_id = self._owner.state.place.last_id
            self._owner.shipped = Shipped(last_id, *export.totals_through(last_id))
        return goes_on

    with patch.object(Shipper, "_begin_again", begin_again):
        yield


@defect(
    "ship fenced",
    "a queue whose shipping was about to begin again when another owner took it says that shipping has failed",
    test=f"{TROUBLE}::test_another_owner_that_comes_after_an_error_is_named",
)
def whatever_ends_a_restart_is_a_failure() -> Iterator[None]:
    real = Shipper._begin_again

    def begin_again(self: Shipper, seconds: float) -> bool:
        goes_on = real(self, seconds)
        if not goes_on:
            self._fail(RuntimeError(self._last_error))
        return goes_on

    with patch.object(Shipper, "_begin_again", begin_again):
        yield


@defect(
    "ship footer",
    "a segment that could not be closed is shipped as a closed one, and shipping says that the store is damaged",
    test=f"{TROUBLE}::test_a_segment_that_could_not_be_closed_is_not_shipped_as_a_closed_one",
)
def a_segment_without_a_footer_is_closed() -> Iterator[None]:
    real = Export.look

    def look(self: Export) -> tuple[list[Any], Tip]:
        with patch.object(Journal, "sync_target", lambda journal: None):
            return real(self)

    with patch.object(Export, "look", look):
        yield


@defect(
    "ship mark",
    "a batch that is taken in while nobody has the queue open makes another queue of that name",
    test=f"{TROUBLE}::test_a_batch_for_a_shipped_queue_without_an_item_makes_no_other_queue",
)
def the_identity_is_in_no_mark() -> Iterator[None]:
    with patch.object(opened, "write_mark", lambda *arguments: None):
        yield


@defect(
    "ship hand over",
    "hand_over() of a queue that is closed says that it is handed over",
    test=f"{TROUBLE}::test_a_fenced_queue_that_is_closed_is_not_handed_over",
)
def a_closed_queue_is_handed_over() -> Iterator[None]:
    def hand_over(self: Shipper, timeout: float) -> None:
        self._hands_over, self._close_timeout = True, timeout

    with patch.object(Shipper, "hand_over", hand_over):
        yield


@defect(
    "ship waits",
    "flush() and collect() wait for a thread that does nothing any more, after a close that could not wait",
    test=f"{TROUBLE}::test_after_a_close_that_could_not_wait_nothing_waits_and_nothing_is_handed_over",
)
def who_waits_is_forgotten_by_the_close() -> Iterator[None]:
    with (
        patch.object(Shipper, "_goes_on", property(lambda self: self._ended is None)),
        patch.object(Shipper, "_wake_waiters", lambda self: None),
    ):
        yield


@defect(
    "ship jobs",
    "a work queue writes its jobs again and again while the store is away, until the disk is full",
    test=f"{TROUBLE}::test_jobs_are_not_written_again_and_again_while_the_store_is_away",
)
def what_the_store_has_not_got_makes_a_journal_long() -> Iterator[None]:
    def measure(self: JobLog) -> None:
        self.bytes = self.queue.stats().journal_bytes

    with patch.object(JobLog, "measure", measure):
        yield


@defect(
    "ship readers",
    "the log has a reader's position beyond what the reader has done",
    test="tests/ship/test_owner.py::test_worlds",
)
def readers_are_shipped_as_at_the_end() -> Iterator[None]:
    real = LogOwner._covered

    def covered(self: LogOwner, state: Checkpoint, last_id: int) -> Checkpoint | None:
        shown = real(self, state, last_id)
        return None if shown is None else shown._replace(head=last_id, done=())

    with patch.object(LogOwner, "_covered", covered):
        yield


@defect(
    "ship lease",
    "an owner accepts puts when its lease is over",
    test="tests/ship/test_lease.py::test_puts_are_refused_before_the_lease_is_over_and_go_on_later",
)
def a_lease_never_ends() -> Iterator[None]:
    with patch.object(OwnLease, "left", property(lambda self: self.seconds)):
        yield


@defect(
    "ship behind",
    "when_behind: puts go on, however much is not in the store",
    test=f"{SHIPPING}::test_a_queue_that_is_behind",
)
def puts_are_never_refused() -> Iterator[None]:
    with patch.object(Export, "refuse", lambda self, error, waits: None):
        yield


@defect(
    "ship silence",
    "a queue that is shipped is opened without a word of it, and ships nothing from then on",
    test=f"{SHIPPING}::test_a_queue_that_is_shipped_is_not_opened_by_mistake",
)
def a_shipped_queue_opens_as_any_other() -> Iterator[None]:
    real = JournaledQueue._open_log

    def open_log(self: JournaledQueue, ship: Any) -> Any:
        return None if ship is None else real(self, ship)

    with patch.object(JournaledQueue, "_open_log", open_log):
        yield


@defect(
    "ship owner",
    "a queue that another owner has is opened here, and both ship",
    test=f"{SHIPPING}::test_a_queue_with_another_owner_is_over",
)
def every_log_is_ours() -> Iterator[None]:
    with patch.object(History, "is_ours", lambda self, state: True):
        yield


@defect(
    "ship close",
    "close() does not ship what is left",
    test=f"{SHIPPING}::test_the_log_goes_on_after_each_opening",
)
def a_close_leaves_the_rest() -> Iterator[None]:
    def close(self: Shipper) -> None:
        self.release()

    with patch.object(Shipper, "close", close):
        yield


@defect(
    "ship requests",
    "status() asks the store, and hangs when it does",
    test=f"{SHIPPING}::test_puts_go_on_while_the_store_is_away",
)
def a_status_asks_the_store() -> Iterator[None]:
    real = Shipper.status

    def status(self: Shipper) -> Any:
        self._store.list(self.log.prefix)
        return real(self)

    with patch.object(Shipper, "status", status):
        yield
