"""``Claimant``: what a running outbox does to jobs, one step at a time and in the calling thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrelpy.outbox import Outbox, claims
from kestrelpy.outbox.claims import Finish
from kestrelpy.outbox.flavours import CLAIMED
from kestrelpy.outbox.sql import Claim
from kestrelpy.outbox.sweeping import Sweep

FIELDS = [name.strip().strip('"') for name in CLAIMED.split(",")]


class Claimed:
    """A job as it was claimed: its columns by name, and the token of its claim."""

    def __init__(self, row: Sequence[Any], token: int) -> None:
        self.row = dict(zip(FIELDS, row, strict=True))
        self.token = token

    @property
    def id(self) -> int:
        found: int = self.row["id"]
        return found

    @property
    def own(self) -> tuple[int, int]:
        """Its id and token, as the operations on outcomes take them."""
        return self.id, self.token

    def __repr__(self) -> str:
        return f"<{self.id} of {self.row['queue']}, token {self.token}>"


class Claimant:
    """One process of ``outbox``. Each call is a transaction of its own, or two where a running outbox has two."""

    def __init__(self, outbox: Outbox, worker: str = "tests") -> None:
        self.outbox = outbox
        self.worker = worker
        self.store = outbox.core.open_store()

    def rows(self, *queues: str, jobs: int = 100, status: str = "ready", most: int = 1000, **options: Any) -> Any:
        """One claim, with the rows that it held among them, and its token."""
        token = self.outbox.core.token()
        wanted = Claim(worker=self.worker, token=token, lease_ms=30_000, jobs=jobs, **options)
        names = [(name, most) for name in queues or ("mail",)]
        return self.store.perform(None, claims.claim, status, names, wanted), token

    def claim(self, *queues: str, jobs: int = 100, **options: Any) -> list[Claimed]:
        """All that is to be had, at most ``jobs``: claims again as long as there were jobs that had to be held."""
        found: list[Claimed] = []
        while len(found) < jobs:
            rows, token = self.rows(*queues, jobs=jobs - len(found), **options)
            found += [Claimed(row, token) for row in claims.claimed_among(rows)]
            lanes = claims.lanes_of(rows)
            if not lanes:
                break
            self.store.perform(None, claims.free_lanes, lanes)
        return found

    def ids(self, *queues: str, **options: Any) -> list[int]:
        """``claim``, and the ids of what it found."""
        return [each.id for each in self.claim(*queues, **options)]

    def done(self, *jobs: Claimed, delete: bool = False) -> set[int]:
        """Mark them done, and free their lanes. The ids of those whose token was still good."""
        what = Finish()
        (what.deleted if delete else what.done).extend(each.own for each in jobs)
        return self._finish(what, jobs)

    def fail(self, *jobs: Claimed, seconds: float = 5.0, is_dead: bool = False, error: str = "Boom") -> set[int]:
        """Failures: they come again in ``seconds``, or are dead."""
        what = Finish()
        status, delay_ms = ("dead", 0) if is_dead else ("error", round(seconds * 1000))
        what.failed.extend((*each.own, status, delay_ms, error) for each in jobs)
        return self._finish(what, jobs if is_dead else ())

    def give_back(self, *jobs: Claimed, seconds: float | None = None) -> set[int]:
        """Not begun, or ``RetryLater(seconds)``."""
        what = Finish()
        what.returned.extend((*each.own, None if seconds is None else round(seconds * 1000)) for each in jobs)
        return self._finish(what, jobs)

    def renew(self, *jobs: Claimed, seconds: float = 30.0) -> set[int]:
        """Renew their leases."""
        return self.store.perform(None, claims.renew, [each.own for each in jobs], round(seconds * 1000))

    def lapse(self, *queues: str, seconds: float = 5.0, is_dead: bool = False) -> set[int]:
        """Find the leases that are over, and note the failures. The ids of these jobs."""
        rows = self.store.perform(None, claims.lapsed, queues or ("mail",))
        return self.note_lapses(rows, seconds=seconds, is_dead=is_dead)

    def note_lapses(self, rows: Sequence[Any], *, seconds: float = 5.0, is_dead: bool = False) -> set[int]:
        status, delay_ms = ("dead", 0) if is_dead else ("error", round(seconds * 1000))
        failures = [(row[0], row[-1], status, delay_ms, "its lease was over") for row in rows]
        return self.store.perform(None, claims.fail, failures, are_lapsed=True) if failures else set()

    def sweep(self) -> list[int]:
        """Free what nobody else has freed. The ids of the dependants that were overlooked."""
        return [row[0] for row in Sweep(self.store).all()]

    def _finish(self, what: Finish, freeing: Sequence[Claimed]) -> set[int]:
        saved, _ = self.store.perform(None, claims.finish, what)
        lanes = sorted({(each.row["queue"], each.row["lane"]) for each in freeing if each.row["lane"] is not None})
        if lanes:
            self.store.perform(None, claims.free_lanes, lanes)
        return saved
