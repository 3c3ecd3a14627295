"""The outbox on a work queue beside one on SQLite: the same random calls on both, and the same jobs afterwards.

What is done or cancelled is compared no longer. Jobs are known by their payloads: each has another one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy.outbox import DuplicateJob, JobNotFound, Outbox
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.outbox.claimant import Claimant, Claimed
from tests.outbox.journal.looks import check, die
from tests.support.budget import SEED, share
from tests.support.queues import START_MS

QUEUES = ("mail", "bills")
KEYS = (None, None, "a", "b", "ü")
ENDED = ("done", "cancelled")
FIELDS = ("status", "tries", "key", "group", "priority", "added_ms", "first_error_ms", "finished_ms", "error")
STEPS = {
    "put": 8, "put_many": 3, "transaction": 3, "claim": 8, "claim_retries": 6, "finish": 14, "renew": 2, "lapse": 3,
    "retry": 2, "retry_all": 0.5, "cancel": 1.5, "pause": 0.7, "resume": 1.2, "prune": 0.5, "advance": 5,
    "restart": 0.7,
}  # fmt: skip
"""How often each step comes, next to the others."""


class Side:
    """One of the two. ``held``: what is claimed, or was, by payload."""

    def __init__(self, bind: Any, clock: ManualClock) -> None:
        self.clock = clock
        self.held: dict[int, Claimed] = {}
        self.open(bind)

    def open(self, bind: Any) -> None:
        self.outbox = Outbox(bind, clock=self.clock)
        self.outbox.create_tables()
        for queue in QUEUES:
            self.outbox.queue(queue, keep_dead=100)
        self.claimant = Claimant(self.outbox)

    def id_of(self, payload: int) -> int | None:
        return next((job.id for job in self.outbox.jobs(limit=10_000) if job.payload == payload), None)

    def jobs(self) -> dict[int, tuple[Any, ...]]:
        found = [job for job in self.outbox.jobs(limit=10_000) if job.status not in ENDED]
        return {job.payload: (job.queue, *(getattr(job, name) for name in FIELDS), self.due(job)) for job in found}

    def due(self, job: Any) -> Any:
        return job.due_ms if job.status in ("ready", "error") else None

    def note(self, claimed: list[Claimed]) -> list[int]:
        """The payloads of what was claimed now."""
        for each in claimed:
            self.held[int(each.row["payload"])] = each
        return sorted(int(each.row["payload"]) for each in claimed)

    def payloads(self, ids: set[int]) -> set[int]:
        return {payload for payload, each in self.held.items() if each.id in ids}


class OnJournal(Side):
    """On a work queue on a disk in memory."""

    def __init__(self, clock: ManualClock) -> None:
        self.disk = MemoryDisk()
        super().__init__(self.queue(clock), clock)

    def queue(self, clock: ManualClock) -> WorkQueue:
        self.work = WorkQueue("/work", clock=clock, disk=self.disk, segment_bytes=8192, max_job_bytes=4000)
        return self.work

    def restart(self, *, is_kill: bool) -> None:
        if is_kill:
            die(self.outbox)
            self.disk.kill()
        else:
            self.outbox.close()
            self.work.close()
        self.open(self.queue(self.clock))

    def close(self) -> None:
        check(self.outbox)
        self.outbox.close()
        self.work.close()


class Beside:
    """Random steps on both."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.clock = ManualClock(START_MS)
        self.sqlite = Side("sqlite://", self.clock)
        self.journal = OnJournal(self.clock)
        self.sides: tuple[Side, ...] = (self.sqlite, self.journal)
        self.count = 0

    def run(self, steps: int) -> None:
        for number in range(steps):
            (name,) = self.choose.choices(list(STEPS), list(STEPS.values()))
            getattr(self, name)()
            found, wanted = self.journal.jobs(), self.sqlite.jobs()
            assert found == wanted, (number, name)
            assert self.stats(self.journal) == self.stats(self.sqlite), (number, name)
            errors = [[job.payload for job in side.outbox.errors()] for side in self.sides]
            assert sorted(errors[0]) == sorted(errors[1]), (number, name)
            looks = [side.outbox.health() for side in self.sides]
            assert looks[0].errors == looks[1].errors, (number, name)
            check(self.journal.outbox)

    def stats(self, side: Side) -> list[Any]:
        return [each for each in side.outbox.stats() if each.status not in ENDED]

    def both(self, step: Callable[[Side], Any]) -> Any:
        """Do it on both; the results must be the same."""
        results = [self.outcome(step, side) for side in self.sides]
        assert results[0] == results[1], results
        return results[0]

    def outcome(self, step: Callable[[Side], Any], side: Side) -> Any:
        try:
            return step(side)
        except (DuplicateJob, JobNotFound) as error:
            return type(error)

    def options(self) -> dict[str, Any]:
        choose = self.choose
        found: dict[str, Any] = {"priority": choose.choice((0, 0, -5, 7)), "group": choose.choice((None, "g"))}
        if choose.random() < 0.3:
            found["delay"] = choose.choice((1, 2.5, 40))
        return found

    def number(self) -> int:
        self.count += 1
        return self.count

    def there(self) -> int:
        """A payload of a job that lives, or lived."""
        alive = list(self.sqlite.jobs())
        return self.choose.choice(alive) if alive and self.choose.random() < 0.9 else self.choose.randrange(1000)

    # -- steps -------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        payload, options = self.number(), self.options()
        how = {**options, "key": self.choose.choice(KEYS), "if_exists": self.choose.choice(("raise", "return"))}
        queue = self.choose.choice(QUEUES)
        self.forget_done()

        def step(side: Side) -> Any:
            with side.outbox.begin() as opened:
                job = side.outbox.put(None if side is self.journal else opened, queue, payload, **how)
            return job.payload, job.is_new, job.status, side.due(job)

        self.both(step)

    def put_many(self) -> None:
        payloads, options = [self.number() for _ in range(self.choose.randrange(1, 5))], self.options()
        keys = self.choose.sample((None, None, None, *KEYS), len(payloads))
        keys = [key if key not in keys[:at] else None for at, key in enumerate(keys)]
        queue, if_exists = self.choose.choice(QUEUES), self.choose.choice(("raise", "return"))
        self.forget_done()

        def step(side: Side) -> Any:
            with side.outbox.begin() as opened:
                where = None if side is self.journal else opened
                jobs = side.outbox.put_many(where, queue, payloads, keys=keys, if_exists=if_exists, **options)
            return [(job.payload, job.is_new) for job in jobs]

        self.both(step)

    def transaction(self) -> None:
        puts = [(self.number(), self.options(), self.choose.choice(KEYS)) for _ in range(self.choose.randrange(4))]
        queue, is_rolled_back = self.choose.choice(QUEUES), self.choose.random() < 0.3
        self.forget_done()

        def put(side: Side, opened: Any, payload: int, options: dict[str, Any], key: str | None) -> Any:
            try:
                job = side.outbox.put(opened, queue, payload, key=key, **options)
            except DuplicateJob:
                return DuplicateJob
            return job.payload, job.is_new

        def step(side: Side) -> Any:
            found = []
            with contextlib.suppress(ZeroDivisionError), side.outbox.begin() as opened:
                found += [put(side, opened, *each) for each in puts]
                if is_rolled_back:
                    raise ZeroDivisionError
            return found

        self.both(step)

    def forget_done(self) -> None:
        """A key of a done row is not free on SQLite: delete such rows."""
        with self.sqlite.outbox.begin() as connection:
            connection.exec_driver_sql("DELETE FROM kestrel_jobs WHERE status IN ('done', 'cancelled')")

    def claim(self) -> None:
        """All that is ready, or nothing else could be compared: the order differs."""
        queues = self.choose.choice((QUEUES, QUEUES[:1], QUEUES[1:]))
        self.both(lambda side: side.note(side.claimant.claim(*queues, jobs=1000)))

    def claim_retries(self) -> None:
        self.both(lambda side: side.note(side.claimant.claim(*QUEUES, jobs=1000, status="error")))

    def finish(self) -> None:
        payloads = self.some_held()
        kind = self.choose.choice(("done", "done", "error", "error", "at once", "dead", "back", "later"))

        def step(side: Side) -> set[int]:
            jobs = [side.held[payload] for payload in payloads]
            if kind == "done":
                return side.payloads(side.claimant.done(*jobs))
            if kind in ("back", "later"):
                return side.payloads(side.claimant.give_back(*jobs, seconds=3 if kind == "later" else None))
            seconds = 0 if kind == "at once" else 5
            return side.payloads(side.claimant.fail(*jobs, seconds=seconds, is_dead=kind == "dead", error=f"E {kind}"))

        self.both(step)

    def some_held(self) -> list[int]:
        held = sorted(self.sqlite.held.keys() & self.journal.held.keys())
        return self.choose.sample(held, min(len(held), self.choose.randrange(1, 4)))

    def renew(self) -> None:
        payloads = self.some_held()
        self.both(lambda side: side.payloads(side.claimant.renew(*[side.held[payload] for payload in payloads])))

    def lapse(self) -> None:
        is_dead = self.choose.random() < 0.3
        self.both(lambda side: len(side.claimant.lapse(*QUEUES, seconds=2, is_dead=is_dead)))

    def retry(self) -> None:
        payload = self.there()
        self.both(lambda side: (job_id := side.id_of(payload)) and side.outbox.retry(job_id))

    def retry_all(self) -> None:
        queue, status = self.choose.choice(QUEUES), self.choose.choice(("dead", "error"))
        self.both(lambda side: side.outbox.retry_all(queue, status))

    def cancel(self) -> None:
        payload = self.there()
        self.both(lambda side: (job_id := side.id_of(payload)) and side.outbox.cancel(job_id))

    def pause(self) -> None:
        queue = self.choose.choice(QUEUES)
        self.both(lambda side: side.outbox.pause(queue))

    def resume(self) -> None:
        queue = self.choose.choice(QUEUES)
        self.both(lambda side: side.outbox.resume(queue))

    def prune(self) -> None:
        self.forget_done()
        self.both(lambda side: side.outbox.prune())

    def advance(self) -> None:
        self.clock.advance(self.choose.choice((0.5, 1, 3, 20, 31)))

    def restart(self) -> None:
        """After so long that on SQLite, too, all leases are over."""
        self.clock.advance(31)
        self.journal.restart(is_kill=self.choose.random() < 0.5)
        self.journal.held.clear()

    def close(self) -> None:
        self.journal.close()
        self.sqlite.outbox.close()


@pytest.mark.parametrize("part", range(4))
def test_both_have_the_same_jobs(part: int) -> None:
    for number in range(max(2, share(40))):
        seed = (SEED * 4 + part) * 1000 + number
        beside = Beside(seed)
        try:
            beside.run(150)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            beside.close()
