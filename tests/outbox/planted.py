"""Faults that are planted into the outbox, each with a test that fails because of it. What this table has and the tests
of this folder do not find would be found by a user.

It is a plugin of pytest, too: ``KESTRELPY_PLANTED=NAME pytest -p tests.outbox.planted TEST``. What a test starts in
other processes has the fault as well, if it calls ``plant_from_environment``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

VARIABLE = "KESTRELPY_PLANTED"
FAULTS: dict[str, Fault] = {}
FOLDER = "tests/outbox/faults"
OVERLAPS = f"{FOLDER}/test_overlaps.py::test_transactions_overlap"
KILLS = f"{FOLDER}/test_kills.py::test_a_consumer_is_killed"


class Fault(NamedTuple):
    """``plant`` changes the library. ``test`` fails then, and ``says`` this; at this ``share`` of a campaign."""

    plant: Callable[[], None]
    test: str
    says: str
    share: float


def fault(test: str, says: str, *, share: float = 0.05) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[plant.__name__] = Fault(plant, test, says, share)
        return plant

    return note


def plant_from_environment() -> None:
    """Plant the fault that the environment names, if it does."""
    name = os.environ.get(VARIABLE)
    if name:
        FAULTS[name].plant()


def pytest_configure() -> None:
    plant_from_environment()


def pytest_sessionfinish() -> None:
    for old in PENDING:
        print(f"{NOT_PLANTED}: no statement has {old!r}")


NOT_PLANTED = "not planted"
PENDING: set[str] = set()
"""Texts that no statement had so far."""


def in_statements(old: str, new: str, *, beside: str = "") -> None:
    """Change the text of all statements, or of those with ``beside`` in them."""
    from kestrelpy.outbox.sql import Compiler

    compile_it = Compiler._compile

    PENDING.add(old)

    def compile_changed(self: Compiler, text: str, known_as: str) -> Any:
        if beside in text and old in text:
            PENDING.discard(old)
            text = text.replace(old, new)
        return compile_it(self, text, known_as)

    _replace(Compiler, "_compile", compile_changed)


def _replace(owner: Any, name: str, other: Any) -> None:
    assert hasattr(owner, name), f"there is no {name} any more"
    setattr(owner, name, other)


# -- tokens and leases -----------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[leases-postgresql-0]", "NotNull|refused|accepted twice|run again")
def no_token_is_compared() -> None:
    in_statements(" AND j.token = r_token", "")


@fault(f"{OVERLAPS}[leases-sqlite-0]", "refused|accepted twice|run again")
def all_claims_have_the_same_token() -> None:
    from kestrelpy.outbox.core import OutboxCore

    _replace(OutboxCore, "token", lambda self: 1)


@fault(f"{OVERLAPS}[leases-sqlite-wal-0]", "NOT NULL|refused|accepted twice|claimed twice")
def a_job_is_given_back_without_a_token() -> None:
    in_statements(" AND j.token = r_token", "", beside="tries = j.tries - 1")


@fault(f"{OVERLAPS}[leases-sqlite-0]", "renewed and then refused")
def a_lease_is_renewed_without_a_token() -> None:
    in_statements(" AND j.token = r_token", "", beside="SET due_ms = {now} + CAST(:lease_ms AS bigint)")


@fault(f"{OVERLAPS}[leases-postgresql-0]", "refused|accepted twice|run again")
def a_done_job_is_deleted_without_a_token() -> None:
    in_statements(" AND token = :token", "", beside="DELETE")


@fault(f"{OVERLAPS}[leases-postgresql-0]", "renewed and then refused")
def the_sweep_takes_a_lease_that_was_renewed() -> None:
    in_statements(" AND j.due_ms <= {now} RETURNING id", " RETURNING id")


# -- claims ----------------------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[marks-postgresql-0]", "left behind")
def a_cursor_instead_of_the_status() -> None:
    """Ids above the last one that was claimed."""
    seen = "i.id > (SELECT coalesce(max(m.id), 0) FROM {jobs} m WHERE m.tries > 0)"
    in_statements("i.status = 'ready'", f"i.status = 'ready' AND {seen}")


@fault(f"{OVERLAPS}[marks-sqlite-wal-0]", "locked")
def sqlite_reads_before_it_takes_the_lock() -> None:
    from kestrelpy.outbox import database

    begin = database.begin_sqlite
    _replace(database, "begin_sqlite", lambda connection, **_: begin(connection, is_reading=True))


@fault("tests/outbox/test_claims.py::test_no_more_than_asked_for", "assert")
def an_update_where_id_is_in_a_limited_select() -> None:
    """A planner that runs the SELECT again for each row takes more than the limit."""
    from kestrelpy.outbox.flavours import CLAIMED, Postgresql

    naive = (
        """UPDATE {jobs} SET status = 'running', token = :token, worker = :worker, tries = tries + 1,
        started_ms = {now}, was_due_ms = due_ms, due_ms = {now} + CAST(:lease_ms AS bigint)
        WHERE id IN (SELECT i.id FROM {jobs} i WHERE i.queue = ANY (CAST(:queues AS text[])) AND i.status = 'ready'
                     AND i.due_ms <= {now} ORDER BY i.priority, i.due_ms, i.id LIMIT :jobs FOR UPDATE SKIP LOCKED)
        RETURNING """
        + CLAIMED
    )

    def claim(self: Postgresql, sql: Any, status: str, queues: Any, claim: Any) -> Generator[Any, Any, Any]:
        for kind in ("hashjoin", "mergejoin", "hashagg", "sort", "material"):
            yield sql(f"SELECT set_config('enable_{kind}', 'off', false)"), {}
        names = [name for name, _ in queues]
        return (yield sql(naive), {**claim.parameters(), **sql.time(), "queues": names})

    _replace(Postgresql, "claim", claim)


# -- dependencies and lanes ------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[marks-postgresql-0]", "left behind")
def overlooked_dependants_are_not_swept() -> None:
    in_statements("depends_on > :after", "false")


@fault(f"{OVERLAPS}[marks-sqlite-0]", "before [0-9]+ is done")
def a_dependant_is_ready_at_once() -> None:
    from kestrelpy.outbox import puts

    find = puts._dependency

    def ready(*args: Any) -> Generator[Any, Any, tuple[int | None, str]]:
        depends_on, _ = yield from find(*args)
        return depends_on, "ready"

    _replace(puts, "_dependency", ready)


@fault(f"{OVERLAPS}[lanes-postgresql-0]", "at the same time|is claimed before", share=0.3)
def two_claims_of_a_lane_touch_no_common_row() -> None:
    from kestrelpy.outbox.schema import OutboxTables

    index = OutboxTables._index

    @functools.wraps(index)
    def not_unique(self: OutboxTables, purpose: str, *columns: Any, **options: Any) -> None:
        index(self, purpose, *columns, **{**options, "unique": purpose == "key"})

    _replace(OutboxTables, "_index", not_unique)


@fault(f"{OVERLAPS}[lanes-sqlite-0]", "left behind")
def lanes_are_not_freed() -> None:
    in_statements("WHERE f.held AND", "WHERE false AND")


# -- puts ------------------------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[keys-sqlite-0]", "rolled back")
def a_put_commits() -> None:
    from kestrelpy.outbox import store

    run = store.run

    def run_and_commit(operation: Any, fetch: Any) -> Any:
        found = run(operation, fetch)
        connection = fetch.__closure__[0].cell_contents
        connection.connection.driver_connection.commit()
        return found

    _replace(store, "run", run_and_commit)


@fault(f"{OVERLAPS}[keys-postgresql-0]", "UniqueViolation|IntegrityError")
def a_key_that_is_there_is_a_unique_violation() -> None:
    in_statements('ON CONFLICT (queue, "key") WHERE "key" IS NOT NULL DO NOTHING', "")


@fault("tests/outbox/test_races.py::test_a_slow_caller_holds_up_no_consumer", "assert not True")
def a_put_locks_the_job_it_depends_on() -> None:
    in_statements(
        "SELECT id, status FROM {jobs} WHERE id = :id", "SELECT id, status FROM {jobs} WHERE id = :id FOR UPDATE"
    )


@fault(f"{FOLDER}/test_full_disk.py", "room for")
def a_batch_that_fails_is_not_taken_back() -> None:
    from kestrelpy.outbox.flavours import Sqlite

    _replace(Sqlite, "aborts", True)


# -- running ---------------------------------------------------------------------------------------------------------


@fault(f"{FOLDER}/test_long_handlers.py", "by 0.*by|by 1.*by|== 1|did not happen")
def a_lease_is_not_renewed() -> None:
    from kestrelpy.outbox.runner import Runner

    _replace(Runner, "_renew", lambda self, now: None)


@fault(f"{KILLS}[postgresql-1]", "done without having run", share=0.4)
def a_job_is_marked_before_its_handler_returns() -> None:
    from kestrelpy.outbox.execution import Outcome
    from kestrelpy.outbox.runner import Runner

    run = Runner._outcome_of

    def mark_and_run(self: Runner, attempt: Any) -> Outcome | None:
        if not attempt.consumer.options.transactional:
            self._writer.put(Outcome(attempt, "done"))
        return run(self, attempt)

    _replace(Runner, "_outcome_of", mark_and_run)


@fault(f"{KILLS}[sqlite-1]", "not there exactly once|an order with two jobs", share=0.4)
def a_transactional_handler_is_committed_before_the_mark() -> None:
    import threading

    from kestrelpy.outbox import runner
    from kestrelpy.outbox.execution import Outcome

    def run_within(store: Any, attempt: Any, clock: Any) -> Outcome:
        def work(connection: Any) -> Outcome:
            attempt.connection = connection
            outcome: Outcome = attempt.run(clock)
            if outcome.status != "done":
                connection.rollback()
            return outcome

        outcome: Outcome = store.database.transact(work)
        threading.Event().wait(0.1)
        return outcome

    _replace(runner, "run_within", run_within)


@fault(
    "tests/outbox/running/test_start_stop.py::test_what_was_claimed_and_not_begun_is_given_back_in_its_order", "assert"
)
def a_stop_forgets_what_is_queued() -> None:
    from queue import Empty

    from kestrelpy.outbox.execution import Attempt
    from kestrelpy.outbox.runner import Runner

    def forget(self: Runner) -> None:
        with contextlib.suppress(Empty):
            while True:
                item = self._jobs.get_nowait()
                if isinstance(item, Attempt):
                    self._claimed.forget(item)

    _replace(Runner, "_give_back_queued", forget)


@fault(f"{FOLDER}/test_clock_jumps.py::test_a_failure_is_refused_whose_lease_a_jump_has_taken", "assert not")
def hooks_are_called_before_the_save() -> None:
    from kestrelpy.outbox.execution import call_hooks
    from kestrelpy.outbox.runner import Runner

    run = Runner._outcome_of

    def run_and_call(self: Runner, attempt: Any) -> Any:
        outcome = run(self, attempt)
        if outcome is not None:
            call_hooks(outcome)
        return outcome

    _replace(Runner, "_outcome_of", run_and_call)


@fault(f"{FOLDER}/test_restarts.py", "no job for|threads that ended")
def the_feeder_ends_with_the_first_error_of_the_database() -> None:
    from kestrelpy.outbox.runner import Runner

    def fail(self: Runner, error: BaseException) -> float:
        raise error

    _replace(Runner, "_failed", fail)


@fault(f"{FOLDER}/test_interrupts.py::test_start_and_stop_are_done_or_not_done", "kestrelpy-outbox")
def the_threads_are_started_by_the_caller() -> None:
    """So an interrupt of the start leaves some that nobody ends."""
    from kestrelpy.outbox.runner import Runner

    start = Runner.start

    def start_by_hand(self: Runner) -> None:
        for thread in self._threads:
            thread.start()
        self._threads = []
        start(self)

    _replace(Runner, "start", start_by_hand)


# -- by hand ---------------------------------------------------------------------------------------------------------


@fault(f"{FOLDER}/test_interrupts.py::test_a_call_is_done_or_not_done[sqlite-retry]", "== 0")
def a_retry_keeps_the_tries() -> None:
    in_statements(" tries = 0,", "", beside="AS j SET due_ms = {now}")


@fault(
    f"{FOLDER}/test_interrupts.py::test_ctrl_c_in_a_handler_that_is_run_by_hand_is_a_failure_and_is_raised", "DID NOT"
)
def retry_one_swallows_an_interrupt() -> None:
    from kestrelpy.outbox import by_hand, outbox

    retry_one = by_hand.retry_one

    def swallow(*args: Any) -> Any:
        try:
            return retry_one(*args)
        except KeyboardInterrupt:
            return None

    _replace(by_hand, "retry_one", swallow)
    assert outbox


# -- without a database ----------------------------------------------------------------------------------------------

JOURNAL = "tests/outbox/journal"


@fault(f"{JOURNAL}/test_journal_store.py::test_a_transaction_is_whole_after_a_power_cut", "assert")
def the_jobs_of_a_transaction_are_put_one_by_one() -> None:
    from kestrelpy.work import WorkQueue

    put_all = WorkQueue.put_all

    def put_each(self: WorkQueue, jobs: Any) -> list[int]:
        return [job_id for job in jobs for job_id in put_all(self, [job])]

    _replace(WorkQueue, "put_all", put_each)


@fault(f"{JOURNAL}/test_journal_store.py::test_a_transaction_that_raises_stores_nothing", "assert")
def a_transaction_is_stored_if_it_raises() -> None:
    from kestrelpy.outbox.journal_puts import JournalTransaction

    def end(self: JournalTransaction) -> None:
        if self.is_open:
            self.commit()

    _replace(JournalTransaction, "end", end)


@fault(f"{JOURNAL}/test_journal_jobs.py::test_a_late_outcome_is_refused[another token-renew]", "assert")
def no_token_of_a_reservation_is_compared() -> None:
    from kestrelpy.outbox.journal_jobs import JournalJobs, RunningJob

    def claimed_by(self: JournalJobs, job_id: int, token: int) -> RunningJob | None:
        return self.running.get(job_id)

    _replace(JournalJobs, "claimed_by", claimed_by)


@fault(f"{JOURNAL}/test_journal_jobs.py::test_a_job_that_kills_wears_out_although_nobody_sweeps_in_between", "assert")
def a_claim_is_not_on_disk_before_its_jobs_begin() -> None:
    from kestrelpy.work import WorkQueue

    _replace(WorkQueue, "save_reserves", lambda self: None)


@fault(f"{JOURNAL}/test_journal_jobs.py::test_what_ran_when_the_process_died_has_lapsed", "assert")
def what_ran_when_the_process_died_is_ready() -> None:
    from kestrelpy.outbox.journal_jobs import JournalJobs

    _replace(JournalJobs, "_set_aside_locked", lambda self, stats, body: None)


@fault(f"{JOURNAL}/test_journal_jobs.py::test_on_a_full_disk_jobs_run_and_failures_are_saved_later", "assert")
def what_a_failed_save_has_saved_is_forgotten() -> None:
    from kestrelpy.outbox.journal_claims import JournalClaims

    finish = JournalClaims.finish

    def forgetful(self: JournalClaims, what: Any) -> Any:
        self._unreported.clear()
        return finish(self, what)

    _replace(JournalClaims, "finish", forgetful)
