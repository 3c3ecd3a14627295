"""Random programs of calls against a model, step by step, on both databases: after each step all rows are compared.

One thread plays everybody, and the clock stands still between the steps. What happens when transactions overlap is
asked elsewhere.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import sqlalchemy
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kestrelpy.outbox import DuplicateJob, InvalidPayload, Job, JobNotFound, Outbox, UnknownDependency
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant, Claimed
from tests.outbox.model import SHOWN, Duplicate, ModelRow, OutboxModel, Unknown
from tests.outbox.planted import VARIABLE
from tests.support.budget import ALL, share
from tests.support.queues import START_MS

QUEUES = ("mail", "bills")
MENDS = ["retry", "retry", "cancel", "retry_all", "prune", "pause", "resume", "resume"]
KEEP_MS = {"done": 20_000, "cancelled": 20_000, "dead": 40_000}
NOWHERE = 1 << 40
KEYS = st.sampled_from(["a", "b", "ü", None])
queues = st.sampled_from(QUEUES)
some_queues = st.sets(queues, min_size=1)
outcomes = st.sampled_from(["done", "done", "deleted", "error", "error", "dead", "back", "later", "renew"])
common_options: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "group": st.sampled_from([None, "g", "h"]),
        "lane": st.sampled_from([None, None, "x", "y"]),
        "priority": st.sampled_from([-1, 0, 0, 5]),
    }
)
WHENS: list[dict[str, Any]]
WHENS = [{}, {}, {"delay": 1}, {"delay": 7.5}, {"at_ms": START_MS - 5}, {"at_ms": START_MS + 9000}]
due = st.sampled_from(WHENS)
exists = st.sampled_from(["raise", "return", "replace"])


PHASES = (Phase.generate,) if VARIABLE in os.environ else (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
"""With a planted fault it is enough that it is found. Each step asks a database: to explain a failure takes minutes."""


class OutboxMachine(RuleBasedStateMachine):
    """``engine``: with the tables, whose rows belong to nobody else."""

    engine: sqlalchemy.Engine

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(START_MS)
        self.outbox = Outbox(self.engine, clock=self.clock)
        for queue in QUEUES:
            self.outbox.queue(queue, keep_done=20, keep_dead=40)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM kestrel_jobs")
            connection.exec_driver_sql("DELETE FROM kestrel_jobs_queues")
        self.claimant = Claimant(self.outbox)
        self.model = OutboxModel()
        self.claims: list[Claimed] = []
        self.count = 0

    def teardown(self) -> None:
        self.outbox.close()

    @property
    def now(self) -> int:
        return self.clock.time_ns() // 1_000_000

    # -- transactions of callers -------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def put_some(self, data: st.DataObject) -> None:
        with self.outbox.begin() as connection:
            for _ in range(6):
                self.put(data, connection, many=False)

    @rule(data=st.data())
    def put_one_more(self, data: st.DataObject) -> None:
        with self.outbox.begin() as connection:
            self.put(data, connection, many=False)

    @rule(data=st.data(), commits=st.sampled_from([True, True, False]))
    def transaction(self, data: st.DataObject, commits: bool) -> None:
        before = self.model.copy()
        with self.outbox.begin() as connection:
            self.steps(data, connection, depth=2)
            self.compare(connection)
            if not commits:
                connection.rollback()
        if not commits:
            self.model = before

    def steps(self, data: st.DataObject, connection: sqlalchemy.Connection, depth: int) -> None:
        for _ in range(data.draw(st.integers(1, 4), "steps")):
            names = ["put", "put", "put_many", "mend", "invalid", *(["savepoint"] if depth else [])]
            step = data.draw(st.sampled_from(names), "step")
            if step == "savepoint":
                before = self.model.copy()
                savepoint = connection.begin_nested()
                self.steps(data, connection, depth - 1)
                if data.draw(st.booleans(), "kept"):
                    savepoint.commit()
                else:
                    savepoint.rollback()
                    self.model = before
                    self.compare(connection)
            elif step == "mend":
                self.mend(data, connection)
            elif step == "invalid":
                with pytest.raises(InvalidPayload):
                    self.outbox.put_many(connection, "mail", [1, (2,)], keys=["a", "b"])
            else:
                self.put(data, connection, many=step == "put_many")

    def put(self, data: st.DataObject, connection: sqlalchemy.Connection, *, many: bool) -> None:
        queue, options, when = data.draw(queues), data.draw(common_options), data.draw(due)
        if_exists, depends_on = data.draw(exists), data.draw(st.sampled_from(self.dependencies()), "depends_on")
        keys = data.draw(st.lists(KEYS, min_size=0, max_size=4).filter(_are_unique)) if many else [data.draw(KEYS)]
        payloads = [{"number": self.count + place} for place in range(len(keys))]
        self.count += len(keys)
        due_ms = when.get("at_ms", self.now + round(when.get("delay", 0) * 1000))
        common = {"added_ms": self.now, "due_ms": due_ms, **options}
        given: dict[str, Any] = {"if_exists": if_exists, "depends_on": depends_on}

        def put() -> list[Job]:
            if many:
                return self.outbox.put_many(connection, queue, payloads, keys=keys, **given, **options, **when)
            return [self.outbox.put(connection, queue, payloads[0], key=keys[0], **given, **options, **when)]

        try:
            items = list(zip(payloads, keys, strict=True))
            expected = self.model.put(queue, items, **given, **common) if items else []
        except Duplicate as refusal:
            there = refusal.job_id
            with pytest.raises(DuplicateJob) as caught:
                put()
            assert caught.value.job_id == there
        except Unknown:
            with pytest.raises(UnknownDependency):
                put()
        else:
            self.note(put(), expected)

    def note(self, found: list[Job], expected: list[tuple[ModelRow, bool]]) -> None:
        """What a put has given; new jobs become a part of the model."""
        new_ids = [job.id for job in found if job.is_new]
        assert new_ids == sorted(new_ids)
        assert not new_ids or new_ids[0] > max(self.model.rows, default=0)
        for job, (row, is_new) in zip(found, expected, strict=True):
            assert job.is_new == is_new
            if is_new:
                self.model.add(row, job.id)
            assert job.id == row.id
            assert {name: getattr(job, name) for name in SHOWN} == row.shown()

    def dependencies(self) -> list[Any]:
        """None most of the time, and seldom a job that is not there."""
        there: list[Any] = list(self.model.rows)
        keyed = [(row.queue, row.key) for row in self.model.rows.values() if row.key is not None]
        return [*[None] * (len(there) + 5), *there, *keyed, NOWHERE, ("bills", "nobody's")]

    # -- consumers ---------------------------------------------------------------------------------------------------

    @rule(status=st.sampled_from(["ready", "ready", "error"]), names=some_queues, jobs=st.integers(0, 5))
    def claim(self, status: str, names: set[str], jobs: int) -> None:
        self.claim_at_once(status, names, jobs)

    def claim_at_once(self, status: str, names: set[str], jobs: int) -> list[Claimed]:
        assert self.claimant.sweep() == []
        expected = self.model.to_claim(status, names, self.now)[:jobs]
        found = self.claimant.claim(*sorted(names), status=status, jobs=jobs)
        assert {each.id for each in found} == {row.id for row in expected}
        for each in found:
            self.model.claim(self.model.rows[each.id], each.token, self.now)
        self.claims = [*self.claims, *found][-20:]
        return found

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), how=outcomes)
    def finish(self, data: st.DataObject, how: str) -> None:
        """Of some claims, of which some may be no longer good."""
        places = st.lists(st.sampled_from(range(len(self.claims))), unique=True, max_size=4)
        self.save([self.claims[at] for at in data.draw(places, "claims")], how)

    @rule(data=st.data(), seconds=st.sampled_from([0, 4, 9]))
    def consume(self, data: st.DataObject, seconds: float) -> None:
        """Two first runs and a retry, from the claim to the outcome."""
        self.clock.advance(seconds)
        for status, jobs in (("ready", 2), ("error", 1)):
            for each in self.claim_at_once(status, set(QUEUES), jobs):
                self.save([each], data.draw(outcomes, "how"))

    def save(self, chosen: list[Claimed], how: str) -> None:
        rows = [row for row in (self.model.of_claim(*each.own) for each in chosen) if row is not None]
        if not chosen:
            return  # a batch is of something
        saved = {
            "done": lambda: self.claimant.done(*chosen),
            "deleted": lambda: self.claimant.done(*chosen, delete=True),
            "error": lambda: self.claimant.fail(*chosen, seconds=4),
            "dead": lambda: self.claimant.fail(*chosen, is_dead=True),
            "back": lambda: self.claimant.give_back(*chosen),
            "later": lambda: self.claimant.give_back(*chosen, seconds=3),
            "renew": lambda: self.claimant.renew(*chosen),
        }[how]()
        assert saved == {row.id for row in rows}
        for row in rows:
            if how in ("done", "deleted"):
                self.model.done(row, self.now, delete=how == "deleted")
            elif how in ("error", "dead"):
                self.model.fail(row, self.now, 4000, "Boom", is_dead=how == "dead")
            elif how == "renew":
                row.due_ms = self.now + 30_000
            else:
                self.model.give_back(row, self.now, 3000 if how == "later" else None)

    @rule(names=some_queues, is_dead=st.booleans())
    def lapse(self, names: set[str], is_dead: bool) -> None:
        expected = self.model.lapsed(names, self.now)
        assert self.claimant.lapse(*sorted(names), seconds=2, is_dead=is_dead) == {row.id for row in expected}
        for row in expected:
            self.model.fail(row, self.now, 2000, "its lease was over", is_dead=is_dead)

    @rule(seconds=st.sampled_from([0.001, 1, 1, 5, 31]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- mending -----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def mend_alone(self, data: st.DataObject) -> None:
        self.mend(data, None)

    def mend(self, data: st.DataObject, connection: sqlalchemy.Connection | None) -> None:
        model, now, at = self.model, self.now, {"connection": connection}
        call = data.draw(st.sampled_from(MENDS), "call")
        queue = data.draw(queues)
        if call in ("retry", "cancel"):
            job_id = data.draw(st.sampled_from([*model.rows, NOWHERE]), "id")
            method = getattr(self.outbox, call)
            if job_id == NOWHERE:
                with pytest.raises(JobNotFound):
                    method(job_id, **at)
            else:
                assert method(job_id, **at) == getattr(model, call)(model.rows[job_id], now)
        elif call == "retry_all":
            status = data.draw(st.sampled_from(["error", "dead", "cancelled", "done"]), "status")
            rows = [row for row in model.rows.values() if (row.queue, row.status) == (queue, status)]
            assert self.outbox.retry_all(queue, status, **at) == len(rows)
            for row in rows:
                model.retry(row, now)
        elif call == "prune":
            assert self.outbox.prune(**at) == model.prune(KEEP_MS, now)
        elif call == "pause":
            self.outbox.pause(queue, **at)
            model.paused.add(queue)
        else:
            self.outbox.resume(queue, **at)
            model.paused.discard(queue)

    # -- compared ----------------------------------------------------------------------------------------------------

    @invariant()
    def all_rows_are_those_of_the_model(self) -> None:
        self.compare(None)
        assert [tuple(each) for each in map(_count, self.outbox.stats())] == self.model.counts()

    def compare(self, connection: sqlalchemy.Connection | None) -> None:
        found = self.outbox.jobs(limit=10_000, connection=connection)
        assert [job.id for job in found] == sorted(self.model.rows)
        for job in found:
            assert {name: getattr(job, name) for name in SHOWN} == self.model.rows[job.id].shown()


def _are_unique(keys: list[str | None]) -> bool:
    given = [key for key in keys if key is not None]
    return len(set(given)) == len(given)


def _count(each: Any) -> tuple[str, str, int]:
    return each.queue, each.status, each.count


@pytest.mark.parametrize("part", range(4 if ALL else 1))
def test_random_programs(engine: sqlalchemy.Engine, part: int) -> None:
    with Outbox(engine) as outbox:
        outbox.create_tables()
    machine = type("OnThisEngine", (OutboxMachine,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(20, share(50)),
            stateful_step_count=40,
            deadline=None,
            phases=PHASES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
