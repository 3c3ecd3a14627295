"""``Relay``: moves the jobs of one queue into a ``JournaledQueue``, each exactly once, in batches.

A batch goes through these steps. Whoever is killed between two of them is followed by somebody, in this process or in
another one, who goes on with the same batch before any other one is begun:

    number    a transaction gives the next number to jobs that are due; they are running then, in this batch for good
    write     their items are written into a part file of the inbox (``kestrelpy.inbox``)
    seal      a transaction records what the file holds: from now on this file is the batch
    publish   the inbox takes the file, as the relay's app_id, with the batch's number as version
    finish    a transaction deletes the jobs, or marks them done

Why each job is there once:
1. The inbox takes a version once, and no lower one later, however many processes publish it.
2. One part file is published under a number, and no other: so a batch that is known there is known with all the jobs
   that have its number here. Before it is sealed, nothing has been published; a job that can't be moved leaves it then,
   and whatever ``encode`` gives at the second time does no harm.
3. A part file that is gone can't be published any more. If the queue does not know the version after that, the batch is
   written anew.
4. Who has lost the lease while it was at work can't seal or finish. What it may still do is publish the sealed file.

NOTE ON LOCKING: none. One thread at a time calls ``step`` and ``release``; a ``twin`` is for another thread, and the
lease keeps the two apart as it does two processes. ``give_up`` is called by any thread.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy import CorruptJournal, ItemTooLarge
from kestrelpy.inbox import Part, PartWriter, discard, last_version, publish
from kestrelpy.outbox import relay_operations as operations
from kestrelpy.outbox._checks import check_count
from kestrelpy.outbox._logging import log
from kestrelpy.outbox.errors import OutboxError
from kestrelpy.outbox.execution import Attempt, Outcome, call_hooks, failure_of
from kestrelpy.outbox.job import Job
from kestrelpy.outbox.queues import QueueConsumer, check_name
from kestrelpy.outbox.relay_operations import FULL, NARROW, RelayBatch, RelayLease, RelayLook, RelayState

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Disk
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.store import JobStore

__all__ = ["Relay"]

MAX_BATCH = 100_000
MAX_NAME_BYTES = 400
ID, TEXT, BINARY, LANE = range(4)
"""Places in a row of ``NARROW``."""
LANE_IN_FULL = 4
Encoded = tuple[Sequence[Any], bytes]
"""The row of a job, and its item."""


class RelaySession:
    """What a relay knows while it has the lease: the highest number that is known to be published, and its batch.

    ``sealed``: the part file of the ``unfinished`` batch, if that is sealed; ``part``: its name, if it is not.
    """

    __slots__ = ("app_id", "held", "last", "part", "sealed", "store", "unfinished")

    def __init__(self, store: JobStore, state: RelayState, last: int) -> None:
        self.store = store
        self.app_id = state.app_id
        self.held = state.held
        self.last = last
        self.unfinished = state.unfinished
        self.part = state.part
        self.sealed = None
        if state.part is not None and state.sealed is not None:
            self.sealed = Part(state.part, *json.loads(state.sealed))


class Relay:
    """Moves the jobs of ``queue`` into the queue ``into`` of ``directory``. ``Outbox.add_relay`` says what it promises.

    ``disk``: where ``directory`` is. Raises ``InvalidName``, ``TypeError``, ``ValueError``.
    """

    def __init__(
        self,
        core: OutboxCore,
        queue: str,
        directory: str | os.PathLike[str],
        into: str,
        *,
        name: str | None = None,
        batch: int = 1000,
        encode: Callable[[Job], bytes | str] | None = None,
        delete: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self.queue = check_name(queue)
        self.into = check_name(into)
        self.directory = _check_directory(directory)
        if encode is not None and (not callable(encode) or inspect.iscoroutinefunction(encode)):
            raise TypeError(f"encode must be a function of a job, not async, or None, not {encode!r}")
        if not isinstance(delete, bool):
            raise TypeError(f"delete must be True or False, not {delete!r}")
        self.batch = check_count("batch", batch, 1)
        if self.batch > MAX_BATCH:
            raise ValueError(f"batch must be at most {MAX_BATCH:,}, not {batch!r}")
        table = core.table if core.schema is None else f"{core.schema}.{core.table}"
        self.name = f"{table}/{queue}/{into}" if name is None else _check_relay_name(name)
        self._core = core
        self._encode = encode
        self._deletes = delete
        self._disk = disk
        self._pid = 0
        self._owner = ""
        self._may_own = False
        self._session: RelaySession | None = None
        self._has_more = True  # the last batch was full
        self._store: JobStore | None = None  # where a twin works, whatever the outbox is bound to later
        self._is_given_up = False
        self.idle_seconds: float | None = 0.0

    # -- for a running outbox, and its test kit ------------------------------------------------------------------------

    def twin(self, store: JobStore, directory: str | os.PathLike[str] | None = None) -> Relay:
        """Another one, which works on this store, as another process would have it; ``directory``: for its own."""
        made = copy.copy(self)
        if directory is not None:
            made.directory = _check_directory(directory)
        made._pid, made._store, made._session, made._may_own = 0, store, None, False
        return made

    def give_up(self) -> None:
        """Let another process go on at once, though a step goes on here: that can change nothing in the database."""
        self._is_given_up = True
        self._release()

    def step(self) -> int:
        """Move one batch. Returns how many jobs were moved; 0 if none is due, or if another process has the lease.

        After a 0, ``idle_seconds`` is how long there is nothing to do, as far as is known; 0 if that is not known, and
        ``None`` if there may be more at once.

        An unfinished batch, of this process or another one, is moved before a new one. Raises what the database raises,
        and ``OSError``, ``WrongKind``, ``UnsupportedFormat`` of the queue's folder; the next call goes on.
        """
        self._look_at_process()
        self.idle_seconds = 0.0
        session = self._session
        if session is not None and session.store is not (self._store or self._core.store):
            session = None  # the test kit has bound the outbox to another database
        self._session = None  # whatever is raised, the next step looks at what is there
        if session is None:
            session = self._open()
        moved = None if session is None else self._move(session)
        if moved is not None:
            self._session = session
        return moved or 0

    def release(self) -> None:
        """Let another process go on at once. An error is logged: the lease lapses by itself."""
        self._look_at_process()
        self._session = None
        self._release()

    def _release(self) -> None:
        if self._may_own:
            self._may_own = False
            try:
                self._here().perform(None, operations.release_lease, self._lease())
            except Exception as error:
                log.warning("relay %r: its lease could not be released, and lapses by itself: %s", self.name, error)

    # -- the session -------------------------------------------------------------------------------------------------

    def _look_at_process(self) -> None:
        """In a forked child, be somebody else."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._owner = f"{self._core.worker}/{self._core.token():016x}"
            self._may_own = False
            self._session = None

    def _lease(self) -> RelayLease:
        return RelayLease(
            name=self.name, queue=self.queue, owner=self._owner, lease_ms=round(self._core.settings.lease * 1000)
        )

    def _here(self) -> JobStore:
        return self._store or self._core.open_store()

    def _perform(self, operation: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if self._is_given_up:
            raise OutboxError(f"the relay {self.name!r} was stopped during a step, which ends here")
        return self._here().perform(None, operation, *args, **kw)

    def _open(self) -> RelaySession | None:
        """Take the lease, and see what there is; ``None`` if another process has it."""
        left_ms = self._perform(operations.peek_relay, self._lease())
        if left_ms:
            self.idle_seconds = left_ms / 1000
            return None
        app_id = f"{self.name}/{self._core.token():016x}"  # no other database has it, whatever its relays are called
        self._may_own = True
        state = self._perform(operations.open_relay, self._lease(), app_id)
        if state is None:
            self._may_own = False
            return None
        for other, count in state.strangers:
            log.warning("relay %r: %s jobs of queue %r are in a batch of %r", self.name, count, self.queue, other)
        known = last_version(self.directory, self.into, state.app_id, disk=self._disk)
        finished = state.batch if state.unfinished is None else state.batch - 1
        if known is None and finished > 0:
            log.warning(
                "relay %r: queue %r of %s knows none of its %s batches: was the folder moved, or emptied?",
                self.name,
                self.into,
                self.directory,
                finished,
            )
        self._has_more = True
        if state.part is not None and not state.part.startswith(f"{self.into}."):
            log.warning("relay %r: its last batch was on its way to another queue: %s", self.name, state.part)
            state.part = state.sealed = None
        return RelaySession(self._here(), state, known or 0)

    # -- a batch -----------------------------------------------------------------------------------------------------

    def _move(self, session: RelaySession) -> int | None:
        """Move one batch: how many jobs; ``None`` if the lease is lost."""
        if session.unfinished is not None:
            return self._repeat(session)
        if not self._has_more or session.held:
            found: RelayLook | None = self._perform(operations.look, self._lease(), session.held)
            if found is None or (found.must_renew and not self._perform(operations.renew_lease, self._lease())):
                return None
            session.held.difference_update(found.empty_lanes)
            if found.open_lanes:
                self._perform(operations.free_held, self._lease(), found.open_lanes)
            elif not found.is_due:
                third = self._core.settings.lease / 3
                self.idle_seconds = third if found.wait_ms is None else min(third, found.wait_ms / 1000)
                return 0
        moved = self._begin(session)
        if moved == 0 and self._has_more:
            self.idle_seconds = None
        return moved

    def _begin(self, session: RelaySession) -> int | None:
        while True:
            with self._writer() as writer:
                batch = self._perform(
                    operations.begin_batch,
                    self._lease(),
                    jobs=self.batch,
                    last=session.last,
                    part=writer.name,
                    columns=self._columns,
                )
                if batch is None:
                    return None
                session.held |= batch.held
                self._has_more = batch.is_full
                if batch.rows:
                    return self._write(session, batch, writer)
            if not batch.held:
                return 0

    def _repeat(self, session: RelaySession) -> int | None:
        """Go on with a batch that somebody has begun."""
        assert session.unfinished is not None
        if session.sealed is None:
            if session.part is not None:
                self._discard(Part(session.part, 1, 0, 0))
            return self._rewrite(session)
        try:
            self._publish(session, session.sealed)
        except (FileNotFoundError, CorruptJournal, ItemTooLarge) as error:
            log.warning("relay %r: batch %s is written anew: %s", self.name, session.unfinished, error)
            self._discard(session.sealed)  # who has lost the lease can't publish it any more
            session.last = self._last_version(session) or 0
            if session.last < session.unfinished:
                return self._rewrite(session)
        return self._finish(session)

    def _rewrite(self, session: RelaySession) -> int | None:
        """Write a part file anew of a batch of which nothing is published, and never will be."""
        assert session.unfinished is not None
        with self._writer() as writer:
            batch = self._perform(
                operations.begin_again,
                self._lease(),
                number=session.unfinished,
                new_number=max(session.unfinished, session.last + 1),
                part=writer.name,
                columns=self._columns,
            )
            return None if batch is None else self._write(session, batch, writer)

    def _write(self, session: RelaySession, batch: RelayBatch, writer: PartWriter) -> int | None:
        """Write, seal and publish the items of a batch, and finish it. Jobs that can't be moved leave it first."""
        session.unfinished, session.part, session.sealed = batch.number, writer.name, None
        encoded = self._encoded(batch.rows)
        if encoded is None:
            return None
        items, failed = encoded
        while True:
            if failed:
                left = self._drop(session, items, failed)
                if left is None:
                    return None
                items = left
            failed = _add(writer, items)
            if not failed:
                break
        if not items:
            session.unfinished = session.part = None
            return 0
        part = writer.seal()
        sealed = json.dumps([part.items, part.data_bytes, part.digest, part.largest_bytes])
        if not self._perform(operations.seal_batch, self._lease(), number=batch.number, part=part.name, sealed=sealed):
            self._discard(part)
            return None
        session.sealed = part
        if self._publish(session, part):
            return self._finish(session)
        log.error(
            "relay %r: somebody else publishes into queue %r of %s as %r, which must be this relay's alone: is there a "
            "copy of the database, or was an older state of it restored?",
            self.name,
            self.into,
            self.directory,
            session.app_id,
        )
        session.last = self._last_version(session) or batch.number
        return self._rewrite(session)  # if another process has not taken the lease, and has published the batch

    def _finish(self, session: RelaySession) -> int | None:
        """After the batch is published: mark its jobs."""
        assert session.unfinished is not None
        moved: int | None = self._perform(
            operations.finish_batch,
            self._lease(),
            number=session.unfinished,
            deletes=self._deletes or self._core.queues.options(self.queue).keep_done == 0,
        )
        if moved is not None:
            session.last = max(session.last, session.unfinished)
            session.unfinished = session.part = session.sealed = None
        return moved

    # -- items -------------------------------------------------------------------------------------------------------

    @property
    def _columns(self) -> str:
        return NARROW if self._encode is None else FULL

    def _lane(self, row: Sequence[Any]) -> str | None:
        lane: str | None = row[LANE if self._encode is None else LANE_IN_FULL]
        return lane

    def _encoded(self, rows: Sequence[Sequence[Any]]) -> tuple[list[Encoded], dict[int, BaseException]] | None:
        """The items, and the errors by id; ``None`` if the lease is lost. It is renewed as long as this takes."""
        encode = self._encode
        failed: dict[int, BaseException] = {}
        if encode is None:
            return [(row, row[TEXT].encode() if row[BINARY] is None else bytes(row[BINARY])) for row in rows], {}
        items: list[Encoded] = []
        clock, third = self._core.time.monotonic, self._core.settings.lease / 3
        renew_at = clock() + third
        for row in rows:
            try:
                items.append((row, _as_item(encode(Job(row, self._core.queues)))))
            except (Exception, SystemExit) as error:
                failed[row[ID]] = error
            if clock() >= renew_at:
                if not self._perform(operations.renew_lease, self._lease()):
                    return None
                renew_at = clock() + third
        return items, failed

    def _drop(
        self, session: RelaySession, items: list[Encoded], failed: dict[int, BaseException]
    ) -> list[Encoded] | None:
        """Take jobs out of the batch whose items can't be made, or are too large: they are in error, or dead. Who is
        behind one in error in its lane waits for it. Returns what is left; ``None`` if the lease is lost.
        """
        consumer = QueueConsumer(self.queue, None, self._core.queues.options(self.queue))
        outcomes: list[Outcome] = []
        stopped: dict[str, int] = {}  # by lane: the first job that is in error
        behind: list[int] = []
        for row in self._perform(operations.jobs_of, sorted(failed)):
            lane = row[LANE_IN_FULL]
            if lane is not None and lane in stopped:
                behind.append(row[ID])
                continue
            outcome = failure_of(Attempt(self._core, consumer, row, 0), failed[row[ID]], 0.0)
            outcomes.append(outcome)
            if lane is not None and outcome.status == "error":
                stopped[lane] = row[ID]
        left: list[Encoded] = []
        for item in items:
            row, lane = item[0], self._lane(item[0])
            if row[ID] in failed:
                continue
            if lane is not None and row[ID] > stopped.get(lane, row[ID]):
                behind.append(row[ID])
            else:
                left.append(item)
        failures = [(each.attempt.id, each.status, each.delay_ms or 0, each.error) for each in outcomes]
        if not self._perform(
            operations.drop_failed, self._lease(), number=session.unfinished, failed=failures, behind=behind
        ):
            return None
        session.held |= stopped.keys()
        for outcome in outcomes:
            call_hooks(outcome)
        return left

    # -- the inbox ---------------------------------------------------------------------------------------------------

    def _writer(self) -> PartWriter:
        return PartWriter(self.directory, self.into, disk=self._disk, clock=self._core.time)

    def _publish(self, session: RelaySession, part: Part) -> bool:
        assert session.unfinished is not None
        return publish(
            self.directory,
            self.into,
            [part],
            app_id=session.app_id,
            version=session.unfinished,
            disk=self._disk,
            clock=self._core.time,
        )

    def _discard(self, part: Part) -> None:
        discard(self.directory, self.into, [part], disk=self._disk)

    def _last_version(self, session: RelaySession) -> int | None:
        return last_version(self.directory, self.into, session.app_id, disk=self._disk)


def _add(writer: PartWriter, items: Sequence[Encoded]) -> dict[int, BaseException]:
    """Add all items, or none: the errors of those that are too large."""
    try:
        writer.add([data for _, data in items])
    except ItemTooLarge as error:
        most = error.max_item_bytes
        return {row[ID]: ItemTooLarge(len(data), most) for row, data in items if len(data) > most}
    return {}


def _as_item(data: object) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"encode must give bytes or a str, not {type(data).__name__}")


def _check_directory(directory: str | os.PathLike[str]) -> str:
    found = os.fspath(directory)
    if not isinstance(found, str):
        raise TypeError(f"directory must be a str or a path, not {directory!r}")
    return found


def _check_relay_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, or None, not {name!r}")
    try:
        is_good = 0 < len(name.encode()) <= MAX_NAME_BYTES and "\0" not in name
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ValueError(f"name must have 1 to {MAX_NAME_BYTES} bytes in UTF-8, and no NUL, not {name!r}")
    return str(name)
