"""Items that fail: when they are due again, when they are given up, and where they are then. The model of it.

Rules:
1. An aborted item is not delivered before its time, and must be delivered from then on.
2. An item that is given up is in one of two queues, once. Until it is known in which one, its reader has it in
   ``pending``; it is ``dying`` as long as that reader is open and nothing has moved it.
3. What is there as a dead letter says where it comes from, as of the call that gave it up.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kestrelpy import Item, KestrelError, Reader, ReaderConfig, scan
from kestrelpy._journal.format import SEGMENT_OVERHEAD
from tests.use.use_model import DOUBTFUL, LETTER, REFUSED, Put, QueueModel, ReaderModel

if TYPE_CHECKING:
    from tests.use.use_world import Process, Result, World

PENDING, SURE, OPEN, NEVER = "in one of the two", "there", "perhaps there", "not there"
MOVED_WITHIN = 3.0
"""Seconds: what could not be moved is tried again each second."""
LARGE = 4096 - SEGMENT_OVERHEAD
"""An item with more bytes may be too large for the queue of the dead letters: this is the least that one takes."""
REASONS = (None, "", "it fails", "\n", "é" * 700, "half \udc80 of it")


def cut(reason: str | None) -> str:
    """As it is kept: 1,024 bytes of it, as JSON."""
    text = (reason or "").replace("\udc80", "\\udc80")
    while len(json.dumps(text)) - 2 > 1024:
        text = text[:-1]
    return text


def count_dead(handle: Reader | None) -> int:
    """How many the reader says; 0 if it says nothing, as its queue was erased."""
    assert handle is not None
    try:
        return handle.stats().dead
    except (KestrelError, OSError):
        return 0


class Moving:
    """One item that goes from ``reader`` to another queue, where it is ``copy``."""

    def __init__(self, graves: Graves, reader: ReaderModel, put: Put, copy: Put, model: QueueModel) -> None:
        self.graves = graves
        self.reader = reader
        self.put = put
        self.copies = [copy]
        self.model = model
        self.state = PENDING
        self.since = graves.world.elapsed
        """Since when there is no excuse that it is not there."""

    @property
    def is_seen(self) -> bool:
        return any(copy.id for copy in self.copies)

    def leave_open(self) -> None:
        if self.state == PENDING:
            self.state = OPEN

    def arrive(self) -> None:
        """It is in the other queue."""
        if self.state == PENDING:
            self.state = SURE
            self.reader.arrived(self.put)

    def stay(self) -> None:
        """It is not, and never will be."""
        self.state = NEVER
        if self.is_seen:
            raise self.graves.world.fail(f"{self.put} of {self.reader.full_name} is in queue {self.model.name}, too")
        for copy in self.copies:
            copy.state = REFUSED
            self.model.flying.discard(copy)


class Letter(Moving):
    """A dead letter. ``about``: what its first line says, but for the reader, whose name may change meanwhile."""

    def __init__(
        self, graves: Graves, reader: ReaderModel, put: Put, copy: Put, model: QueueModel, about: dict[str, Any]
    ) -> None:
        super().__init__(graves, reader, put, copy, model)
        self.about = about
        self.readers = {reader.name}

    def fits(self, data: bytes) -> bool:
        head, _, content = data.partition(b"\n")
        if content != self.put.data or not data.startswith(LETTER):
            return False
        about = json.loads(head)
        is_right = about.pop("dead_letter") == 1 and about.pop("crc") == crc32(content)
        return is_right and about.pop("reader") in self.readers | {self.reader.name} and about == self.about

    def see(self, copy: Put, data: bytes) -> None:
        """It has come out."""
        if self.state == NEVER:
            raise self.graves.world.fail(f"{self.put} of {self.reader.full_name} is a dead letter, and it is not dead")
        copy.data = data
        self.arrive()


class RetryDelay:
    """A function for ``retry_delay``. ``said``: the delays that count, one for each call."""

    def __init__(self, world: World, process: Process, values: tuple[Any, ...]) -> None:
        self.world = world
        self.process = process
        self.values = values
        self.most = max((each for each in values if isinstance(each, float) and 0 <= each < 1e9), default=0.0)
        self.said: list[float] = []

    def __call__(self, error_count: int) -> Any:
        try:
            self.world.act(self.process, "retry_delay")
        except BaseException:
            self.said.append(0.0)
            raise
        value = self.values[error_count % len(self.values)]
        self.said.append(value if isinstance(value, float) and 0 <= value < 1e9 else 0.0)
        return value


class Graves:
    """What is known of the items that have failed, in one world."""

    def __init__(self, world: World) -> None:
        from tests.use.use_world import DEAD

        self.world = world
        self.name = DEAD
        self.moving: list[Moving] = []
        self.failed_at: dict[ReaderModel, float] = {}
        """When an item of a reader was not moved at once: its reader rests, also if a seek takes the item back."""

    # -- options -----------------------------------------------------------------------------------------------------

    def options(self, rng: random.Random, process: Process, queue: str) -> dict[str, Any]:
        """Of a reader of ``queue``."""
        has, options = self.world.swarm.options, dict[str, Any]()
        if "retry delay" in has and rng.random() < 0.7:
            values = rng.choice(((0.3,), (0.0, 2.0, 0.5), (0.5, float("nan")), ("soon",), (-1.0, 1.0), (float("inf"),)))
            options["retry_delay"] = rng.choice((0.3, 2, 0.0, RetryDelay(self.world, process, values)))
        if {"max deliveries", "dead letter"} & has and rng.random() < 0.8:
            options["max_deliveries"] = rng.choice((1, 2, 2, 3))
        if "dead letter" in has and rng.random() < 0.8 and queue != self.name:
            options["dead_letter"] = self.name
        return options

    def instead_of(self, rng: random.Random, name: str) -> str:
        """The queue of the dead letters, now and then."""
        is_drawn = "dead letter" in self.world.swarm.options and rng.random() < 0.3
        return self.name if is_drawn else name

    def draw_abort(self, rng: random.Random, options: dict[str, Any]) -> None:
        has = self.world.swarm.options
        if "retry delay" in has and rng.random() < 0.5:
            options["delay"] = rng.choice((None, 0, 0.3, 2.0))
        if {"max deliveries", "dead letter"} & has:
            options["counts"] = rng.random() < 0.9
            options["reason"] = rng.choice(REASONS)

    # -- what becomes of them ----------------------------------------------------------------------------------------

    def bury(self, reader: ReaderModel, put: Put, item: Item, count: int, reason: str | None, died_ms: int) -> Letter:
        """From now on it may be a dead letter."""
        model = self.world.models[self.name]
        about: dict[str, Any] = {"queue": reader.queue.name, "id": item.id, "added_ms": item.added_ms}
        about |= {"died_ms": died_ms, "error_count": count, "reason": cut(reason)}
        copy = model.new_copy(put.number, put.data + bytes(250 + len(json.dumps(cut(reason)))))
        letter = copy.letter = Letter(self, reader, put, copy, model, about)
        self.moving.append(letter)
        reader.pending[put] = letter
        self.world.touched.add(model.name)
        return letter

    def taken(self, reader: ReaderModel, put: Put) -> None:
        """A hook has taken it: it is not moved."""
        moving = reader.pending.pop(put, None)
        if moving is not None:
            moving.stay()

    def check_delivery(self, reader: ReaderModel, put: Put, item: Item) -> None:
        early = reader.too_early(put)
        if early > 0:
            raise self.world.fail(f"{reader.full_name} delivers item {item.id} {early:.2f} s too early")
        reader.delayed.pop(put, None)
        if put in reader.dying:
            raise self.world.fail(f"{reader.full_name} delivers item {item.id}, which is dead")
        moving = reader.pending.pop(put, None)
        if moving is not None:
            self.world.saw("an item that died comes again")
            moving.stay()
        least, most = reader.errors.get(put, (0, 0))
        model = reader.queue
        if not least <= item.error_count <= most and not (model.damaged or model.erased or model.unsure):
            said = f"{least} to {most}" if least < most else f"{most}"
            raise self.world.fail(
                f"{reader.full_name} delivers item {item.id}, which has failed {item.error_count} times, and not {said}"
            )

    def note_opening(self, reader: ReaderModel, handle: Reader) -> None:
        """Its checkpoint says what was to be moved: that is held back, or is moved by now."""
        backlog = handle._backlog
        for put, moving in list(reader.pending.items()):
            if put.id in backlog.with_hook:
                reader.dying.add(put)
                reader.settling.add(put)
                moving.since = self.world.elapsed
            elif backlog.progress.is_done(put.id):
                self.world.saw("an opening finds an item that was moved")
                moving.arrive()

    def give_up(self, reader: ReaderModel) -> None:
        """The reader is gone, with what it has said of its items."""
        for moving in reader.pending.values():
            moving.leave_open()
        reader.pending.clear()
        reader.dying.clear()

    def note_erased(self, model: QueueModel) -> None:
        """What was in it is gone, or comes again into the one after it."""
        after = self.world.models[model.name]
        for reader in model.readers.values():
            self.give_up(reader)
        for moving in self.moving:
            if moving.model is model and moving.state != NEVER:
                moving.reader.pending.pop(moving.put, None)
                moving.state, moving.model = OPEN, after
                if after is not model:
                    copy = after.new_copy(moving.put.number, moving.copies[0].data)
                    copy.letter = moving if isinstance(moving, Letter) else None
                    copy.state = DOUBTFUL
                    after.flying.discard(copy)
                    after.holes = True
                    moving.copies.append(copy)

    # -- looking -----------------------------------------------------------------------------------------------------

    def excuse(self, moving: Moving) -> bool:
        """Whether there may be a reason that nothing moves it now."""
        w, model, reader = self.world, moving.model, moving.reader
        trouble = w.trouble
        if trouble.fired or trouble.refused_blocks or trouble.times or "full" in w.tags or w.swarm.ships:
            return True
        if (
            reader.queue.failed
            or reader.queue.damaged
            or reader.queue.erased
            or model.damaged
            or model.failed
            or model.erased
        ):
            return True
        owned = (
            model.writer is not None or w.depth > 0 or w.locks_unsure
        )  # then it takes in when it looks, and has room
        if len(moving.put.data) > LARGE:  # it stays where it is, and keeps back no other
            w.saw("a dead item that may be too large for its dead letter")
            return True
        return owned

    def look(self) -> None:
        """After a step: which of them are where?"""
        if not self.moving:
            return
        w = self.world
        for model in w.models.values():
            if not model.made and any(name.startswith(f"{model.name}.") for name in self._segments()):
                model.made = True
        unseen = [each for each in self.moving if not each.is_seen and each.state != NEVER]
        for name in {each.model.name for each in unseen if isinstance(each, Letter) or each.state == PENDING}:
            self._see(w.models[name])
        for moving in self.moving:
            if moving.state == PENDING and moving.is_seen:
                moving.arrive()
        for reader in w.open_readers():
            backlog = reader.handle._backlog if reader.handle is not None else None
            for put in list(reader.dying) if backlog is not None and backlog.broken is None else ():
                assert backlog is not None
                if put.id in backlog.with_hook:
                    continue
                moving = reader.pending[put]
                if backlog.progress.is_done(put.id):
                    w.saw("a move is done that had failed")
                    moving.arrive()
                else:
                    reader.doubt([put])

    def _segments(self) -> list[str]:
        from tests.use.use_world import FOLDER

        return [name for name in self.world.disk.folders[FOLDER].names if name.endswith(".segment")]

    def _see(self, model: QueueModel) -> None:
        """All that it has."""
        from tests.use.use_opening import FOLDER, looking

        if model.damaged or model.erased or not model.made:
            return
        for record in scan(FOLDER, model.name, disk=looking(self.world), start_id=1):
            put = model.see(record.id, record.data)
            put.added_ms, put.expires_ms = record.added_ms, record.expires_ms
            if put.letter is not None:
                model.flying.discard(put)
                self.world.saw("a dead letter")

    def check_waiting(self) -> None:
        """Nothing waits for long to be moved, unless there is a reason."""
        w = self.world
        for reader in w.open_readers():
            for put in reader.dying:
                moving = reader.pending[put]
                if self.excuse(moving):
                    moving.since = w.elapsed
                late = w.elapsed - moving.since
                w.require(late <= MOVED_WITHIN, f"{put} of {reader.full_name} is dead, and nothing moves it")

    def account(self) -> None:
        """At the end, when all queues were opened and read: each of them is in one of the two."""
        w = self.world
        for model in w.models.values():
            if w.locks_unsure or model.damaged or model.may_refuse or model.unsure or not model.made:
                continue
            unseen = model.tail_id - len(model.stored)  # taken in, read and gone within one step
            moving = [each for each in self.moving if each.model is model and not each.is_seen]
            moving = [each for each in moving if not each.reader.half_dropped]
            lost = [each.put for each in moving if each.state == SURE]
            w.require(len(lost) <= unseen, f"{lost[:3]} are lost on their way to queue {model.name}")
            moving = [each for each in moving if each.state == PENDING and not each.reader.queue.erased]
            left = [each.put for each in moving if not each.reader.is_expired(each.put, w.now_ms)]  # without an intent
            w.require(len(left) <= unseen, f"{left[:3]}: in neither of the queues, on their way to queue {model.name}")


class Abort:
    """One abort: made before the call, with its options."""

    def __init__(
        self, w: World, process: Process, reader: ReaderModel, put: Put, item: Item, options: dict[str, Any]
    ) -> None:
        self.w, self.process, self.reader, self.put = w, process, reader, put
        self.handle, self.moves, self.nested = reader.handle, reader.moves, w.nested
        self.was = item.error_count
        self.counts = bool(options.get("counts", True))
        count = self.was + self.counts
        config = reader.config or ReaderConfig()
        reader.errors[put] = count, count
        reader.most_errors[put] = max(count, reader.most_errors.get(put, 0))
        self.dies = self.counts and config.max_deliveries is not None and count >= config.max_deliveries
        self.letter: Letter | None = None
        self.dead = 0
        self.asked: RetryDelay | None = None
        if self.dies:
            self.dead = count_dead(self.handle)
            if config.dead_letter is not None:
                died_ms = process.clock.time_ns() // 1_000_000
                self.letter = w.graves.bury(reader, put, item, count, options.get("reason"), died_ms)
        elif self.counts:
            self._wait(config, options.get("delay"))

    def _wait(self, config: ReaderConfig, delay: float | None) -> None:
        seconds: Any = config.retry_delay if delay is None else delay
        now = self.process.clock.monotonic()
        if isinstance(seconds, RetryDelay):
            self.asked, self.said = seconds, len(seconds.said)
            self.reader.delayed[self.put] = 0.0, now + seconds.most
        elif seconds:
            self.reader.delayed[self.put] = now + seconds, now + seconds
            self.w.saw("an item is delayed")

    def went(self) -> None:
        """The call has returned, or has raised what the block of a ``with`` raised."""
        w, reader, put, handle = self.w, self.reader, self.put, self.handle
        if put in reader.done:
            return
        if self.moves != reader.moves or reader.handle is not handle or handle is None:
            reader.doubt([put])
        elif not self.dies:
            self._narrow()
        elif self.letter is None:
            reader.finish(put)
            dead = count_dead(handle) - self.dead
            silent = self.nested != w.nested or reader.queue.erased
            w.require(dead == 1 or silent, f"{put} of {reader.full_name} is dead, and {dead} count")
            w.saw("an item is given up")
        elif put.id in handle._backlog.with_hook:
            reader.dying.add(put)
            reader.settling.add(put)
            failed_at = w.graves.failed_at.get(reader, -MOVED_WITHIN)
            rests = len(reader.dying) > 1 or w.elapsed < failed_at + MOVED_WITHIN  # the timer has not tried it again
            w.graves.failed_at[reader] = w.elapsed
            calm = self.nested == w.nested and not w.depth and not rests and not w.graves.excuse(self.letter)
            w.require(not calm, f"{put} of {reader.full_name} is dead, and was not moved")
            w.saw("an item is dead, and is not moved yet")
        elif handle._backlog.progress.is_done(put.id):
            self.letter.arrive()
            w.saw("an item is moved to the dead letters")
        else:
            reader.doubt([put])

    def _narrow(self) -> None:
        """The function has said how long."""
        if self.asked is None or self.put not in self.reader.delayed or self.nested != self.w.nested:
            return
        said = self.asked.said[self.said :]
        took = self.reader.config is not None and self.reader.config.on_abort is not None
        if len(said) != 1:
            self.w.require(took and not said, f"retry_delay was asked {len(said)} times for {self.put}")
            return
        now = self.process.clock.monotonic()
        self.reader.delayed[self.put] = now + said[0], now + said[0]
        if not said[0]:
            del self.reader.delayed[self.put]

    def failed(self, result: Result) -> None:
        """The call has raised."""
        reader, put = self.reader, self.put
        if result.interrupted or self.moves != reader.moves:
            reader.doubt([put])
            return
        reader.errors[put] = self.was, self.was + self.counts
        reader.delayed.pop(put, None)
        moving = reader.pending.pop(put, None)
        if moving is not None:
            moving.leave_open()
