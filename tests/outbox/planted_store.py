"""More faults, planted as in ``planted``, which must be a plugin, too: of what puts, claims and mends jobs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.outbox.planted import fault, in_statements

TESTS = "tests/outbox"


def replace(owner: Any, name: str, other: Any) -> None:
    assert hasattr(owner, name), f"there is no {name} any more"
    setattr(owner, name, other)


# -- puts ------------------------------------------------------------------------------------------------------------


@fault(f"{TESTS}/test_puts.py::test_due_times", "assert")
def a_delay_is_in_milliseconds() -> None:
    from kestrelpy.outbox import core

    due = core._due

    def in_milliseconds(delay: float, at_ms: int | None) -> tuple[int, int | None]:
        delay_ms, instant = due(delay, at_ms)
        return delay_ms // 1000, instant

    replace(core, "_due", in_milliseconds)


@fault(f"{TESTS}/test_races.py::test_a_key_that_another_transaction_holds", "UniqueViolation|IntegrityError|assert")
def a_put_looks_for_the_key_first() -> None:
    """And inserts if it has seen none."""
    from kestrelpy.outbox import outbox, puts

    put = puts.put_one

    def look_and_put(sql: Any, new: Any, payload: Any) -> Generator[Any, Any, Any]:
        there = yield sql(puts._FIND_KEY), {**new.parameters(sql), "key": payload.key}
        if there:
            return (yield from put(sql, new, payload))
        depends_on, status = yield from puts._dependency(sql, payload.depends_on)
        plain = puts._INSERT.replace('ON CONFLICT (queue, "key") WHERE "key" IS NOT NULL DO NOTHING', "")
        rows = yield sql(plain), {**new.parameters(sql), **puts._own(payload, depends_on, status)}
        return puts._row(new, payload, status, depends_on, rows[0]), True

    replace(outbox, "put_one", look_and_put)


@fault(f"{TESTS}/test_put_many.py::test_one_key_there_and_nothing_is_written", "assert|DuplicateJob")
def a_batch_that_meets_a_key_is_left_half() -> None:
    in_statements("DELETE FROM {jobs} WHERE id {is_one_of}", "DELETE FROM {jobs} WHERE false AND id {is_one_of}")


@fault(f"{TESTS}/test_races.py::test_a_slow_caller_holds_up_no_consumer", "IndexError|assert not True")
def a_batch_locks_jobs_that_run() -> None:
    in_statements(" AND status IN ('ready', 'waiting', 'error') ORDER BY id {for_update}", " ORDER BY id {for_update}")


@fault(f"{TESTS}/test_races.py::test_a_batch_that_meets_its_conflict_late_replaces_nothing", "assert|DID NOT RAISE")
def a_batch_is_replaced_one_by_one() -> None:
    from kestrelpy.outbox import outbox, puts

    put_all = puts.put_all

    def one_by_one(sql: Any, new: Any, payloads: Any) -> Generator[Any, Any, Any]:
        if new.if_exists != "replace":
            return (yield from put_all(sql, new, payloads))
        found: list[Any] = [None] * len(payloads)
        for place, payload in enumerate(payloads):
            found[place] = yield from puts.put_one(sql, new, payload)
        return found

    replace(outbox, "put_all", one_by_one)


@fault(f"{TESTS}/test_put_many.py::test_thousands_in_order", "assert")
def a_batch_is_returned_as_the_database_gives_it() -> None:
    from kestrelpy.outbox import puts

    in_order = puts._in_order

    def shuffled(new: Any, made: Any, *others: Any) -> Any:
        upside_down = [(-row[0], *row[1:]) for row in made]
        return [((abs(row[0]), *row[1:]), is_new) for row, is_new in in_order(new, upside_down, *others)]

    replace(puts, "_in_order", shuffled)


@fault(f"{TESTS}/test_puts.py::test_the_size_is_in_bytes_as_stored", "DID NOT RAISE")
def a_size_is_in_characters() -> None:
    from kestrelpy.outbox import core, queues

    encode = queues.encode

    def count_characters(queue: str, options: Any, payload: Any) -> tuple[Any, int]:
        stored = options.codec.encode(payload)
        return encode(queue, options, payload) if len(stored) > options.max_payload_bytes else (stored, len(stored))

    replace(core, "encode", count_characters)


@fault(f"{TESTS}/test_dependencies.py::test_of_a_job_in_any_status", "assert")
def what_depends_on_a_done_job_waits() -> None:
    from kestrelpy.outbox import puts

    find = puts._dependency

    def wait(*args: Any) -> Generator[Any, Any, tuple[int | None, str]]:
        depends_on, _ = yield from find(*args)
        return depends_on, "ready" if depends_on is None else "waiting"

    replace(puts, "_dependency", wait)


# -- connections -----------------------------------------------------------------------------------------------------


@fault(f"{TESTS}/test_connections.py::test_a_connection_that_commits_each_statement_is_refused", "DID NOT RAISE")
def a_connection_that_commits_each_statement_is_taken() -> None:
    from kestrelpy.outbox import connections

    replace(connections, "_commits_each", lambda adapted, driver: False)


@fault(f"{TESTS}/test_connections.py", "NotInTransaction")
def a_transaction_that_was_begun_by_hand_is_not_seen() -> None:
    from kestrelpy.outbox import connections

    replace(connections, "_in_transaction", lambda driver: False)


@fault(f"{TESTS}/test_connections.py::test_a_transaction_that_begins_with_a_savepoint", "assert")
def a_savepoint_is_a_transaction_of_sqlite() -> None:
    from kestrelpy.outbox import database

    replace(database, "begin_for_caller", lambda connection: None)


@fault(f"{TESTS}/test_tables.py::test_its_own_transactions_are_whole_on_any_engine", "NotInTransaction")
def an_engine_without_transactions_is_taken_as_it_is() -> None:
    from kestrelpy.outbox import database

    replace(database, "commits_each", lambda connection: False)


@fault(f"{TESTS}/test_races.py::test_a_claim_on_sqlite_takes_the_lock_before_it_looks", "written|locked")
def the_recipe_begins_without_the_lock() -> None:
    from kestrelpy.outbox import database

    begin = database.begin_sqlite

    def begin_unless_begun(connection: Any, *, is_reading: bool) -> None:
        begin(connection, is_reading=is_reading or database.in_transaction(connection))

    replace(database, "begin_sqlite", begin_unless_begun)


@fault(f"{TESTS}/test_tables.py::test_by_many_threads_at_once", "already exists|UniqueViolation|duplicate")
def tables_are_made_without_a_lock() -> None:
    from kestrelpy.outbox import database

    create = database.create_tables

    def create_unlocked(connection: Any, tables: Any) -> None:
        dialect = connection.dialect
        name, dialect.name = dialect.name, "postgresql without locks"
        try:
            create(connection, tables)
        finally:
            dialect.name = name

    replace(database, "create_tables", create_unlocked)


# -- claims ----------------------------------------------------------------------------------------------------------


@fault(f"{TESTS}/test_claims.py::test_the_most_urgent_first[sqlite]", "assert")
def a_larger_number_is_more_urgent() -> None:
    in_statements("SELECT min(priority)", "SELECT max(priority)")
    in_statements("AND priority > :level", "AND priority < :level")


@fault(f"{TESTS}/test_claims.py::test_the_most_urgent_first", "assert")
def a_claim_is_in_the_order_of_the_update() -> None:
    """Which is any order."""
    from kestrelpy.outbox import claims

    claim = claims.claim

    def unordered(*args: Any) -> Generator[Any, Any, Any]:
        rows = yield from claim(*args)
        return sorted(rows, key=lambda row: -row[0])

    replace(claims, "claim", unordered)


@fault(f"{TESTS}/test_races.py::test_a_claim_passes_what_another_one_is_about_to_take", "could not obtain lock")
def a_claim_minds_the_locks_of_another_one() -> None:
    """It would wait; so that the test need not, it fails at once."""
    in_statements("FOR UPDATE SKIP LOCKED", "FOR UPDATE NOWAIT")


@fault(f"{TESTS}/test_claims.py::test_no_queue_hides_another_one[postgresql-ready]", "assert")
def the_first_queues_hide_the_others() -> None:
    from kestrelpy.outbox import flavours

    claim_of = flavours._claim_of
    replace(flavours, "_claim_of", lambda status, queues: claim_of(status, 1))


@fault(f"{TESTS}/test_claims.py::test_nothing_of_a_paused_queue", "assert")
def a_pause_is_not_kept() -> None:
    from kestrelpy.outbox import admin

    pause = admin.set_paused

    def forget(sql: Any, queue: str, is_paused: bool) -> Generator[Any, Any, None]:
        yield from pause(sql, queue, False)

    replace(admin, "set_paused", forget)


@fault(f"{TESTS}/test_races.py::test_of_two_claims_that_overlap_one_takes_the_lane", "UniqueViolation|assert")
def the_index_of_lanes_is_an_error_of_the_claim() -> None:
    from kestrelpy.outbox import database

    replace(database, "_is_conflict", lambda error: False)


@fault(f"{TESTS}/test_races.py::test_nor_does_one_who_cancels", "assert not True")
def a_mark_waits_for_a_caller() -> None:
    in_statements("{skip_locked}", "", beside="w.depends_on")


@fault(f"{TESTS}/test_claims.py::test_what_is_given_back_was_not_tried", "assert")
def what_is_given_back_was_tried() -> None:
    in_statements("tries = j.tries - 1", "tries = j.tries")


@fault(f"{TESTS}/test_claims.py::test_a_lease_that_is_renewed_at_the_last_moment", "assert")
def a_lapse_ignores_the_renewal() -> None:
    in_statements(" AND j.due_ms <= {now} RETURNING id", " RETURNING id")


@fault(f"{TESTS}/test_lanes.py::test_one_in_error_holds_its_lane_while_it_backs_off", "assert")
def a_lane_goes_on_while_one_backs_off() -> None:
    in_statements("a.status IN ('running', 'error') OR", "a.status IN ('running') OR")


# -- mending ---------------------------------------------------------------------------------------------------------


@fault(f"{TESTS}/test_admin.py::test_prune_never_deletes_what_another_job_waits_for", "assert")
def prune_deletes_what_another_job_waits_for() -> None:
    in_statements("AND NOT EXISTS (SELECT 1 FROM {jobs} w WHERE w.status = 'waiting' AND w.depends_on = f.id)", "")


@fault(f"{TESTS}/test_admin.py::test_cancel", "assert")
def a_running_job_is_cancelled() -> None:
    in_statements("'error', 'dead') RETURNING", "'error', 'dead', 'running') RETURNING", beside="'cancelled'")


@fault(f"{TESTS}/test_admin.py::test_errors_the_oldest_failure_first", "assert")
def the_last_failure_counts_as_the_first() -> None:
    in_statements("first_error_ms = coalesce(j.first_error_ms, {now})", "first_error_ms = {now}")


# -- found by the model ----------------------------------------------------------------------------------------------


@fault(f"{TESTS}/test_model.py", "assert|Error", share=2.5)
def a_retry_that_is_given_back_is_a_first_run() -> None:
    in_statements("CASE WHEN j.first_error_ms IS NULL THEN 'ready' ELSE 'error' END", "'ready'")


@fault(f"{TESTS}/test_model.py", "assert|Error", share=1.0)
def a_replaced_job_waits_no_longer() -> None:
    in_statements("CASE WHEN status = 'waiting' THEN 'waiting' ELSE 'ready' END", "'ready'")


@fault(f"{TESTS}/test_model.py", "assert|Error", share=1.0)
def a_done_job_frees_nobody_if_it_is_deleted() -> None:
    from kestrelpy.outbox import claims

    def free_nobody(sql: Any, done: Any) -> Generator[Any, Any, list[str]]:
        yield sql("SELECT 1"), {}
        return []

    delete = claims.delete_done

    def delete_only(sql: Any, done: Any) -> Generator[Any, Any, Any]:
        free, claims.free_waiting = claims.free_waiting, free_nobody
        try:
            return (yield from delete(sql, done))
        finally:
            claims.free_waiting = free

    replace(claims, "delete_done", delete_only)
