"""One folder of queues, and the processes that use it: all in this one, each with a disk, a clock and its own life.

Rules:
1. A process is ``busy`` while a call of it is under way. Another process may do a whole step in the middle of it, at
   any operation of the disk; the same process may do so only out of a hook or a callback.
2. Every call goes through ``World.call``, which holds what it raises against the call's docstring.
3. A failure is kept in ``World.failure`` too: hooks are called by a library that catches what they raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, cast

from kestrelpy import (
    CorruptJournal,
    DurabilityUnknown,
    Item,
    JournaledQueue,
    KestrelError,
    Reader,
    ReaderConfig,
)
from kestrelpy._process import forget
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.inspection import FolderWatch
from kestrelpy.testing import ManualClock
from tests.use.use_coverage import Coverage
from tests.use.use_disk import UseDisk
from tests.use.use_graves import Graves
from tests.use.use_hooks import Hooks
from tests.use.use_limits import Limits
from tests.use.use_model import DOUBTFUL, Put, QueueModel, ReaderModel, UseFailure, drops
from tests.use.use_outcomes import documented
from tests.use.use_ships import Ships
from tests.use.use_skips import Skips
from tests.use.use_swarm import Swarm

START_MS = 1_700_000_000_000
FOLDER = "/queues"
ARCHIVE = "/archive"
QUEUES = ("a", "b")
DEAD = "c"
"""The queue of the dead letters of the others."""
MOST_NESTED = 5
MOST_DEEP = 2


class Hang(BaseException):
    """The watchdog's word: nothing went on for seconds."""


class Result:
    """What a call has come to."""

    __slots__ = ("error", "interrupted", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None, *, interrupted: bool = False) -> None:
        self.value = value
        self.error = error
        self.interrupted = interrupted

    @property
    def ok(self) -> bool:
        return self.error is None


class Opened:
    """A queue that a process has open for writing."""

    def __init__(self, queue: JournaledQueue, model: QueueModel, options: dict[str, Any]) -> None:
        self.queue = queue
        self.model = model
        self.options = options
        self.opened_at = 0.0
        self.is_ending = False
        self.tail_id = model.tail_id
        """The last id that was there at the opening."""
        self.must_refuse = ""
        """Why puts must be refused now, by what is known of its shipping."""
        self.broken = False
        """Whether a call may have left it half closed: an exception has struck while it was closed."""

    def config(self, name: str) -> ReaderConfig:
        found: ReaderConfig | None = self.options.get("readers", {}).get(name) or self.options.get("default_reader")
        return found or ReaderConfig()

    @property
    def always(self) -> bool:
        return self.options.get("sync") in ("always", 0)


class Process:
    """One of the processes."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.disk = UseDisk(world.disk)
        self.clock = ManualClock(world.now_ms)
        self.busy = 0
        self.queues: dict[str, Opened] = {}
        self.readers: list[ReaderModel] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.lost_loops = 0
        """How many loops were thrown away under their tasks."""
        self.futures: list[Future[Any]] = []
        self.deadlines: list[tuple[float, Future[Any]]] = []
        """By its clock, of futures that are to time out."""
        self.others: list[Any] = []
        """What else it has open that ends with it (``use_job_model``)."""

    def __repr__(self) -> str:
        return f"process {self.number}"


class World:
    """The folder, its processes, what is known of them, and what has been seen."""

    def __init__(self, swarm: Swarm, coverage: Coverage) -> None:
        self.swarm = swarm
        self.coverage = coverage
        self.disk = UseDisk()
        self.trouble = self.disk.trouble
        self.trouble.meanwhile = self.meanwhile
        self.now_ms = START_MS
        self.elapsed = 0.0
        self.jumps = 0
        self.mended_at: float | None = None
        """Since when nothing is wrong with the disk, as long as what was is an excuse."""
        self.advancing = False
        self.rng = random.Random(0)
        self.models = {name: QueueModel(name, self.now) for name in (*QUEUES, DEAD)}
        self.handles: dict[int, ReaderModel] = {}
        self.number = 0
        self.nested = 0
        self.depth = 0
        self.thrown: list[BaseException] = []
        self.failure: UseFailure | None = None
        self.trail: list[str] | None = None
        """What was called, in words: only where a failure is played once more."""
        self.parts: list[Any] = []
        self.moments: Counter[str] = Counter()
        self.tags: set[str] = set()
        self.graveyard: list[Reader] = []
        self.did = False
        """Whether the step had anything to do."""
        self.stack: list[str] = []
        """The operations that are under way."""
        self.threads = threading.active_count()
        self.locks_unsure = False
        self.touched: set[str] = set()
        """The queues that somebody has tried to open."""
        self.batches_unsure = False
        self.erasures = self.cut_ends = 0
        self.work: Any = None
        """The work queue of the folder, once there is one (``use_job_model``)."""
        self.hooks = Hooks(self)
        self.limits = Limits(self)
        self.ships = Ships(self)
        self.graves = Graves(self)
        self.skips = Skips(self)
        self.disk.directory(FOLDER, create=True)
        self.folder = FOLDER
        self.watch = FolderWatch(FOLDER, disk=self.disk)
        self.processes = [Process(self, number) for number in range(3)]
        self.run_step: Callable[[str, random.Random, Process], None] = lambda *_: None

    # -- failing -----------------------------------------------------------------------------------------------------

    def fail(self, what: str) -> UseFailure:
        error = UseFailure(what)
        if self.failure is None:
            self.failure = error
        return error

    def require(self, condition: object, what: str) -> None:
        if not condition:
            raise self.fail(what)

    def saw(self, state: str) -> None:
        self.did = True
        self.coverage.sometimes[state] += 1

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, process: Process, function: Callable[..., Any], *arguments: Any, **options: Any) -> Result:
        """``function(*arguments, **options)``, a call of the library, as ``process``."""
        process.busy += 1
        self.did = True
        line = self.note_call(process, function, arguments, options) if self.trail is not None else 0
        try:
            result = Result(function(*arguments, **options))
        except (UseFailure, Hang):
            raise
        except BaseException as error:
            if self.trail is not None:
                self.trail[line] += f" raised {error!r}"[:200]
            return self.judge(function, error)
        finally:
            process.busy -= 1
        if self.trail is not None:
            self.trail[line] += f" -> {result.value!r}"[:200]
        return result

    def note_call(
        self, process: Process, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> int:
        assert self.trail is not None
        owner = getattr(function, "__self__", None)
        said = [_short(each) for each in arguments] + [f"{name}={_short(each)}" for name, each in options.items()]
        who = "  " * self.depth + f"{process}: "
        name = getattr(function, "__qualname__", "").split(".<locals>.")[-1]
        of = ""
        if owner is not None:
            with contextlib.suppress(Exception):
                of = f" of {owner!r}"
        self.trail.append(f"{who}{name}({', '.join(said)}){of}")
        return len(self.trail) - 1

    def judge(self, function: Callable[..., Any], error: BaseException) -> Result:
        """What a call has raised must be documented, or be what a hook of ours has thrown."""
        name = getattr(function, "__qualname__", type(function).__name__)
        if sum(frame.f_code is World.call.__code__ for frame in _frames_of(error)) > self.depth + 1:
            raise self.fail(f"{name} raised an error that still holds on to an earlier call: {error!r}") from error
        error.__traceback__ = None if not isinstance(error, KestrelError) else error.__traceback__
        if any(error is thrown for thrown in self.thrown):
            if str(error).startswith("thrown by on_"):
                raise self.fail(f"what a hook has raised comes out of {name}: {error!r}") from error
            return Result(error=error, interrupted=True)
        plain = getattr(function, "__func__", function)
        if isinstance(plain, type):
            kind: Any = plain
            plain = kind.__init__
        if isinstance(error, OSError | CorruptJournal) and self.erasures:  # a reader of a queue that was erased
            return Result(error=error)
        if not isinstance(error, documented(plain)):
            raise self.fail(f"{name} raised {error!r}, which its docstring does not list") from error
        return Result(error=error)

    # -- nested steps ------------------------------------------------------------------------------------------------

    def meanwhile(self) -> None:
        """In the middle of somebody's operation on the disk: another process does a step."""
        idle = [process for process in self.processes if not process.busy]
        storm = "storm" in self.swarm.lean
        if not idle or self.depth >= MOST_DEEP or self.nested >= (12 if storm else MOST_NESTED):
            return
        self.saw("a step of another process in the middle of a call")
        if storm:  # one thing all the time
            wanted = [each for each in ("seek", "erase", "churn") if each in self.swarm.lean]
            name = self.rng.choice(wanted or ["churn"])
            able = [process for process in idle if (process.readers if name == "seek" else process.queues)]
            if able:
                self.nest(able[0], name)
            self.trouble.meanwhile_in = self.rng.choice((1, 2, 4))
            return
        self.nest(self.rng.choice(idle))
        self.trouble.meanwhile_in = self.rng.choice((0, 0, 1, 3))

    def nest(self, process: Process, name: str | None = None) -> None:
        name = name or self.swarm.draw_nested(self.rng)
        if name is None or self.failure is not None:
            return
        self.nested += 1
        self.depth += 1
        if name == "seek" and {"checkpoint_all", "churn", "close"} & set(self.stack):
            self.saw("a seek during a retirement")
        if name.startswith("put") and self.stack[-1:] == ["sync"]:
            self.saw("a put from a callback of a leader")
        trouble, self.trouble.meanwhile_in = self.trouble.meanwhile_in, 0
        try:
            self.run_step(name, self.rng, process)
        finally:
            self.depth -= 1
            self.trouble.meanwhile_in = trouble

    def act(self, process: Process, where: str) -> None:
        """What a hook or a callback of a user's does: nothing, a call, an error."""
        rng, swarm = self.rng, self.swarm
        dice = rng.random()
        if dice < swarm.reentrant and self.depth < MOST_DEEP and self.nested < MOST_NESTED:
            self.saw(f"a call out of {where}")
            self.nest(process)
        elif dice > 1 - swarm.raising:
            kinds: tuple[type[BaseException], ...] = (RuntimeError, RuntimeError, ValueError, *swarm.severe)
            kind = rng.choice(kinds)
            error = kind(f"thrown by {where}")
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                self.thrown.append(error)
            self.saw(f"{kind.__name__} out of {where}")
            raise error

    # -- looking things up -------------------------------------------------------------------------------------------

    def now(self) -> int:
        return self.now_ms

    def new_put(self, model: QueueModel, rng: random.Random, codec: object, size: int | None = None) -> Put:
        self.number += 1
        size = rng.choice((0, 0, 1, 30, 300, 300, 900)) if size is None else size
        data = b"%d:" % self.number + b"x" * size
        if codec is not None and "Json" in type(codec).__name__:
            data = b'"' + data + b'"'
        return model.new_put(self.number, data)

    def open_readers(self, process: Process | None = None) -> list[ReaderModel]:
        return [r for p in self.processes if process in (None, p) for r in p.readers if r.handle is not None]

    def is_here(self, reader: ReaderModel) -> bool:
        """Whether who has the reader open is the writer of its queue, and has it through the queue."""
        process = reader.process
        opened = process.queues.get(reader.queue.name) if process is not None else None
        return opened is not None and reader.handle is not None and reader.handle._source is opened.queue._source

    def configuration(self, reader: ReaderModel) -> ReaderConfig | None:
        """By what a put limits this reader: the writer's word counts."""
        writer = reader.queue.writer
        if writer is None or reader.queue.name not in writer.queues:
            return None
        config: ReaderConfig = writer.queues[reader.queue.name].config(reader.name)
        return config

    # -- deliveries --------------------------------------------------------------------------------------------------

    def deliver(self, reader: ReaderModel, item: Item, *, exact: bool, opens: bool = True) -> Put:
        """``item`` was given to somebody out of ``reader``."""
        put = reader.queue.see(item.id, item.data)
        put.added_ms, put.expires_ms = item.added_ms, item.expires_ms
        if self.is_here(reader):
            self.ships.check_shown(reader, put)
        if put in reader.done and put not in reader.optional:
            raise self.fail(f"{reader.full_name} delivers item {item.id}, which is done")
        if put in reader.open:
            raise self.fail(f"{reader.full_name} delivers item {item.id} twice")
        if put in reader.in_hook:
            raise self.fail(f"{reader.full_name} delivers item {item.id}, which a hook has")
        self.graves.check_delivery(reader, put, item)
        if exact:
            self.may_drop_meanwhile(reader)
            self.check_order(reader, put)
        elif drops(reader.config):  # what was before it may have been dropped before it was handed over
            reader.optional.update(other for other in reader.available() if other.id < put.id)
            reader.optional |= reader.queue.unsettled() - {put}
        reader.settling.discard(put)
        reader.returning.discard(put)
        reader.optional.discard(put)
        if opens:
            reader.open[put] = item
            if drops(reader.config) and not self.is_here(reader):  # it drops later, and others than it would have now
                self.may_drop(reader, reader.config, [])
        return put

    def check_order(self, reader: ReaderModel, put: Put) -> None:
        if drops(reader.config) and not self.is_here(reader):
            self.may_drop(reader, reader.config, [])
        now_ms = self.now_ms
        done, opened, optional, settling = reader.done, reader.open, reader.optional, reader.settling
        flying = reader.queue.flying
        if reader.is_expired(put, now_ms):
            raise self.fail(f"{reader.full_name} delivers item {put.id}, which has expired")
        for other in reader.queue.stored:
            if other.id >= put.id:
                break
            if other in done or other in opened or other in optional or other in settling or other in flying:
                continue
            if not reader.is_expired(other, now_ms) and not reader.is_delayed(other):
                raise self.fail(f"{reader.full_name} delivers item {put.id} before item {other.id}")

    # -- the end of a process ----------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """SIGKILL: its handles are dead, its locks are free, what it has written is there."""
        process.disk.kill()
        for opened in process.queues.values():
            forget(opened.queue)
            opened.queue._abandon()
            model = opened.model
            for put in list(model.flying):
                model.may_be_there(put)
                model.holes = True
            if model.writer is process:
                model.writer = None
                model.failed = False
        for reader in list(process.readers):
            if reader.handle is not None:
                self.handles.pop(id(reader.handle), None)
                source = cast("DetachedSource", reader.handle._source)
                if not any(reader.handle._source is opened.queue._source for opened in process.queues.values()):
                    forget(source)
                    source._abandon()
            reader.restart()
        for other in list(process.others):
            other.kill()
        process.queues.clear()
        process.readers.clear()
        self.ships.courier.end(process.disk)
        self.drop_loop(process)
        process.futures.clear()
        process.deadlines.clear()
        process.disk = UseDisk(self.disk)
        process.clock = ManualClock(self.now_ms)

    def drop_loop(self, process: Process) -> None:
        loop, process.loop = process.loop, None
        tasks, process.tasks = process.tasks, []
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        if loop is not None:
            process.lost_loops += bool(tasks)
            loop.close()

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self, *, thoroughly: bool) -> None:
        """After each step: what the library says of itself is what the model says."""
        if self.failure is not None:
            raise self.failure
        for model in self.models.values():
            for reader in model.readers.values():
                if drops(reader.config):  # over its limit by an abort, or as it has looked: not with a put
                    self.may_drop(reader, reader.config, model.stored[-1:])
        for process in self.processes:
            for other in process.others:
                other.check(thoroughly=thoroughly)
            for opened in process.queues.values():
                if thoroughly and not opened.broken and opened.queue._status.error is None:
                    self.check_invariants(opened)
            for reader in process.readers:
                if reader.handle is not None and not reader.queue.failed and not reader.queue.damaged:
                    self.check_reader(process, reader, reader.handle)

    def check_invariants(self, opened: Opened) -> None:
        try:
            opened.queue._check()
            maintenance = opened.queue._maintenance
            timer, is_armed = maintenance._registry.timer, maintenance._is_armed
            assert not is_armed or (timer is not None and not timer.cancelled), "no round of maintenance will come"
            for reader in opened.queue._registry.open.values():
                skips = checkpointer_of(reader).backlog.may_skip_notify
                assert not skips or is_armed or maintenance._source.waiting, "a commit would arm no round"
        except AssertionError as error:
            raise self.fail(f"an invariant of {opened.queue!r} is broken: {_where(error)}") from error

    def is_calm(self, reader: ReaderModel) -> bool:
        """Whether a reader elsewhere may be asked for its figures, which looks at the folder."""
        model, trouble = reader.queue, self.trouble
        doubtful = model.flying or model.holes or model.batches or model.unsure or model.erased or self.erasures
        return not (doubtful or trouble.fired or trouble.times or self.depth or drops(reader.config))

    def check_reader(self, process: Process, reader: ReaderModel, handle: Reader) -> None:
        model = reader.queue
        if handle._backlog.broken is not None or not (self.is_here(reader) or self.is_calm(reader)):
            return
        del process
        self.may_drop_meanwhile(reader)
        sure, high = self.sure_and_most(reader)
        items = handle.items
        if not len(sure) <= items <= high:
            raise self.fail(
                f"{reader.full_name} says that it has {items} items; it has {len(sure)} to {high}"
                f" (head {handle.head}, model {[put.id for put in model.stored if put not in reader.done][:5]}...)"
            )
        if sure and handle.head >= sure[0].id:
            raise self.fail(f"{reader.full_name} has head {handle.head}, and item {sure[0].id} is not done")
        if handle.waiter_count and handle.open_items == len(reader.open) and self.is_here(reader):
            waiting = [put for put in sure if put not in reader.settling and put not in reader.open]
            waiting = [put for put in waiting if not reader.is_delayed(put)]
            if waiting:
                raise self.fail(f"{handle.waiter_count} wait in {reader.full_name} while item {waiting[0].id} is there")

    def sure_and_most(self, reader: ReaderModel) -> tuple[list[Put], int]:
        """What a reader has for sure, and how many items it has at the most."""
        model = reader.queue
        extra = len(model.flying) + sum(put.state == DOUBTFUL for put in model.every_put() if model.holes)
        left = [put for put in model.stored if put not in reader.done]
        sure = [put for put in left if put not in reader.optional and put not in model.flying]
        if model.expires or (reader.config is not None and reader.config.max_age is not None):
            sure = [put for put in sure if put in reader.open or not reader.is_expired(put, self.now_ms)]
        return sure, len(left) + extra

    def note_fault(self, model: QueueModel, result: Result) -> None:
        """A call has raised: a failed sync is the end of the queue until it is opened again."""
        if isinstance(result.error, DurabilityUnknown) and self.trouble.fired:
            model.failed = True

    def may_drop_at_opening(self, reader: ReaderModel, config: ReaderConfig) -> None:
        if drops(config):
            self.may_drop(reader, config, [])

    def drop_oldest(self, model: QueueModel, newest: list[Put]) -> None:
        """After a put: what readers with ``DROP_OLDEST`` may have dropped. Never what was just put."""
        for reader in model.readers.values():
            elsewhere = reader.handle is not None and not self.is_here(reader)
            config = reader.config if elsewhere else self.configuration(reader)
            if drops(config) or drops(reader.config):
                self.may_drop(reader, config or reader.config, newest)

    def may_drop_meanwhile(self, reader: ReaderModel) -> None:
        """A put that is under way may have dropped the oldest already; this may be a callback of it."""
        if reader.queue.flying and drops(reader.config):
            self.may_drop(reader, reader.config, [])

    def may_drop(self, reader: ReaderModel, config: ReaderConfig | None, newest: list[Put]) -> None:
        assert config is not None
        unsettled = reader.queue.unsettled()
        reader.optional |= unsettled
        left = [put for put in reader.queue.stored if put not in reader.done]
        unseen = 0  # reads that are open by now, and have not been returned: others are dropped in place of them
        if reader.handle is not None:
            unseen = max(0, reader.handle.open_items - len(reader.open))
        held = reader.settling - reader.returning
        free = [put for put in left if put not in reader.open and put not in held]
        if reader.in_hook or reader.delayed or reader.dying:
            # Others may be in hand for it, and count: then what is left is the newest. What is not due is not dropped.
            reader.optional.update(free)
            return
        if not reader.open and not reader.settling and not unseen and not unsettled:
            free = [put for put in free if put not in newest or put.id != reader.queue.tail_id]
        size = sum(len(put.data) for put in left) + sum(len(put.data) for put in unsettled)
        count = len(left) + len(unsettled)
        dropped: list[int] = []
        for put in free:
            stay = sorted(dropped)[-unseen:] if unseen else []
            over = (config.max_items is not None and count - len(dropped) + len(stay) > config.max_items) or (
                config.max_bytes is not None and size - sum(dropped) + sum(stay) > config.max_bytes
            )
            if not over:
                break
            reader.optional.add(put)
            dropped.append(len(put.data))


def _short(what: object) -> str:
    if isinstance(what, ManualClock | UseDisk):
        return "..."
    if isinstance(what, list) and len(what) > 4:
        return f"[{len(what)} x {_short(what[0])}]"
    if isinstance(what, list):
        return f"[{', '.join(map(_short, what))}]"
    if isinstance(what, dict):
        return "{" + ", ".join(f"{key!r}: {_short(each)}" for key, each in what.items()) + "}"
    if isinstance(what, bytes | bytearray | str) and len(what) > 24:
        return f"{what[:16]!r}... ({len(what)})"
    if isinstance(what, ReaderConfig):
        plain = ReaderConfig()
        names = [name for name in ReaderConfig.__annotations__ if getattr(what, name) != getattr(plain, name)]
        said = [f"{name}={_short(getattr(what, name)) if not name.startswith('on_') else '...'}" for name in names]
        return f"ReaderConfig({', '.join(said)})"
    return repr(what)


def _frames_of(error: BaseException) -> list[FrameType]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return repr(error)
    return f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {error}"
