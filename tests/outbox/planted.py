"""Faults that are planted into the outbox, each with a test that fails because of it. What this table has and the tests
of this folder do not find would be found by a user.

It is a plugin of pytest, too: ``KESTRELPY_PLANTED=NAME pytest -p tests.outbox.planted TEST``. What a test starts in
other processes has the fault as well, if it calls ``plant_from_environment``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

VARIABLE = "KESTRELPY_PLANTED"
FAULTS: dict[str, Fault] = {}
OVERLAPS = "tests/outbox/faults/test_overlaps.py::test_transactions_overlap"


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


def in_statements(old: str, new: str, *, beside: str = "") -> None:
    """Change the text of all statements, or of those with ``beside`` in them."""
    from kestrelpy.outbox.sql import Compiler

    compile_it = Compiler._compile

    def compile_changed(self: Compiler, text: str, known_as: str) -> Any:
        return compile_it(self, text.replace(old, new) if beside in text else text, known_as)

    _replace(Compiler, "_compile", compile_changed)


def _replace(owner: Any, name: str, other: Any) -> None:
    assert hasattr(owner, name), f"there is no {name} any more"
    setattr(owner, name, other)


# -- tokens and leases -----------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[leases-postgresql-0]", "refused|accepted twice|run again")
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


# -- dependencies and lanes ------------------------------------------------------------------------------------------


@fault(f"{OVERLAPS}[marks-postgresql-0]", "left behind")
def overlooked_dependants_are_not_swept() -> None:
    in_statements("WHERE status = 'waiting' AND NOT EXISTS", "WHERE false AND NOT EXISTS")


@fault(f"{OVERLAPS}[marks-sqlite-0]", "before [0-9]+ is done")
def a_dependant_is_ready_at_once() -> None:
    from kestrelpy.outbox import puts

    find = puts._dependency

    def ready(*args: Any) -> Generator[Any, Any, tuple[int | None, str]]:
        depends_on, _ = yield from find(*args)
        return depends_on, "ready"

    _replace(puts, "_dependency", ready)


@fault(f"{OVERLAPS}[lanes-postgresql-0]", "at the same time|is claimed before", share=0.2)
def two_claims_of_a_lane_touch_no_common_row() -> None:
    from kestrelpy.outbox.schema import OutboxTables

    index = OutboxTables._index

    @functools.wraps(index)
    def not_unique(self: OutboxTables, purpose: str, *columns: Any, **options: Any) -> None:
        index(self, purpose, *columns, **{**options, "unique": purpose == "key"})

    _replace(OutboxTables, "_index", not_unique)


@fault(f"{OVERLAPS}[lanes-sqlite-0]", "left behind")
def lanes_are_not_freed() -> None:
    in_statements(") AND held RETURNING", ") AND false RETURNING")


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


@fault("tests/outbox/faults/test_full_disk.py", "room for")
def a_batch_that_fails_is_not_taken_back() -> None:
    from kestrelpy.outbox.flavours import Sqlite

    _replace(Sqlite, "aborts", True)
