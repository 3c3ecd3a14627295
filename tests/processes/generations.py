"""One queue through thousands of violent ends: processes killed, power cut, at any moment of a life or of an opening.

A generation is a writer with two readers of its own and a reader in another process, all at work; an end; openings that
are ended too; and one that is let through and tells what is left, which the ledger holds against the promises. Then the
next generation goes on in the same folder. ``run_kills`` and ``run_cuts`` are the loops; both come to an end after
``limit`` ends or ``seconds``, and return what they counted. The parent has nothing open and no thread, so that forking
is quick and clean.
"""

from __future__ import annotations

import gc
import os
import random
import select
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import portalocker  # noqa: F401 - imported once here and not by every child

from tests.processes.loop_mount import Kind, LoopFileSystem, own_mounts
from tests.processes.programs import as_program
from tests.processes.system_actors import (
    ABORTS,
    COMMITS,
    DELIVERED,
    DONE,
    DURABLE,
    END,
    LEFT,
    PATIENCE,
    PUT,
    READY,
    RECORD,
    SAVED,
    SAVED_DURABLY,
    Actor,
    Life,
    Message,
    Plant,
    open_queue,
    read_elsewhere,
    tell_what_is_left,
    write,
)
from tests.processes.system_ledger import BrokenPromise, Kept, Ledger

INSIDE, OUTSIDE = ("one", "two"), "elsewhere"
SYNCS = ("always", 0.02, "never")
MOST_UNREAD = 400
MOST_ARCHIVED = 12
"""Files in the archive, above which it is emptied."""


class Generations:
    """``step`` is one generation. Without ``power`` its ends are kills.

    ``archives``: folders for the archive, one of which the seed chooses; empty for none.
    """

    def __init__(
        self,
        folder: str,
        seed: int,
        *,
        archives: Sequence[str],
        power: LoopFileSystem | None = None,
        plant: Plant | None = None,
    ) -> None:
        self._folder = os.path.join(folder, "queues")
        self._choose = random.Random(seed)
        chosen = self._choose.choice(archives)
        self._archive = os.path.join(chosen, "archive") if chosen else None
        self._power = power
        self._plant = plant
        self._ledger = Ledger(INSIDE, [OUTSIDE])
        self._elsewhere: Actor | None = None
        self._was_cut = False
        self._opening_seconds = self._looking_seconds = 0.01
        self.counts: Counter[str] = Counter()
        first = Actor(partial(_begin, self._life("never")))
        promised = first.wait()
        words = first.words()
        first.close()
        if promised:
            raise BrokenPromise(words)

    def _life(self, sync: Any = None) -> Life:
        choose = self._choose
        places = self._ledger.places
        unread = max(len(self._ledger.items.keys() - place.begun) for place in places)
        return Life(
            folder=self._folder,
            archive=self._archive,
            generation=self._ledger.generation,
            seed=choose.randrange(1 << 30),
            sync=choose.choice(SYNCS) if sync is None else sync,
            segment_bytes=choose.choice((8 << 10, 16 << 10, 16 << 10, 64 << 10, 256 << 10)),
            inside=INSIDE,
            producers=choose.choice((0, 0, 1, 2)),
            puts=max(0, MOST_UNREAD - unread),
        )

    @property
    def ends(self) -> int:
        return self.counts["kills"] + self.counts["cuts"]

    def step(self) -> None:
        """One generation, from its opening to what is left of it."""
        choose = self._choose
        self._ledger.generation += 1
        life = self._life()
        begun = time.monotonic()
        writer = Actor(partial(write, life), self._plant)
        try:
            if self._elsewhere is None:
                work = partial(read_elsewhere, self._folder, OUTSIDE, len(INSIDE), life.seed)
                self._elsewhere = Actor(work, self._plant)
            if choose.random() < 0.2:
                time.sleep(choose.uniform(0, 1.2) * self._opening_seconds)
                self.counts["ended while opening"] += 1
            else:
                self._listen(writer, 1, PATIENCE)
                self._opening_seconds += 0.1 * (time.monotonic() - begun - self._opening_seconds)
                self._listen(writer, choose.randrange(250), choose.choice((0.003, 0.015, 0.05)))
            self._end(writer)
        finally:
            writer.close()
        while choose.random() < 0.3:
            self._end_while_looking()
        self._look(always=life.sync == "always")
        if self._power is not None and choose.random() < 0.1:  # twice in a row: what was found must be on disk
            self._leave_elsewhere()
            self._cut([])
            self._look(always=True)
        self.counts["generations"] += 1

    # -- ends ------------------------------------------------------------------------------------------------------

    def _end(self, actor: Actor) -> None:
        """The end of ``actor``, of the reader elsewhere, or of both: killed one by one, or by a power cut at once."""
        choose, elsewhere = self._choose, self._elsewhere
        if self._power is not None and choose.random() < 0.8:
            self._cut([actor] if elsewhere is None else [actor, elsewhere])
            self._leave_elsewhere()
            return
        together = elsewhere is not None and choose.random() < 0.3
        if together and choose.random() < 0.5:
            self._kill_elsewhere()
            together = False
        self._check_alive(actor)
        actor.kill()
        self._hear_out(actor)
        self.counts["kills"] += 1
        if together:
            self._kill_elsewhere()

    def _kill_elsewhere(self) -> None:
        actor = self._elsewhere
        assert actor is not None
        self._check_alive(actor)
        actor.kill()
        self._hear_out(actor)
        self.counts["kills"] += 1
        self._leave_elsewhere()

    def _leave_elsewhere(self) -> None:
        """Its process is over, by whatever: before a power cut it must have been killed."""
        if self._elsewhere is not None:
            if self._elsewhere.status is None:
                self._kill_elsewhere()
                return
            self._elsewhere.close()
            self._elsewhere = None

    def _cut(self, actors: list[Actor]) -> None:
        assert self._power is not None
        for actor in actors:
            self._check_alive(actor)
        cut_at = time.monotonic_ns()
        self._power.shut_down()
        for actor in actors:
            actor.kill()
        for actor in actors:
            self._hear_out(actor, cut_at)
        self._power.remount()
        self._was_cut = True
        self.counts["cuts"] += 1

    def _check_alive(self, actor: Actor) -> None:
        if actor.is_gone():
            raise BrokenPromise(f"a process ended by itself, with status {actor.status}:\n{actor.words()}")

    # -- listening -------------------------------------------------------------------------------------------------

    def _listen(self, actor: Actor, messages: int, seconds: float) -> None:
        """Hear at least so many messages of ``actor``, or as many as come in that time."""
        elsewhere = self._elsewhere
        deadline = time.monotonic() + seconds
        pipes = {actor.pipe: actor}
        if elsewhere is not None:
            pipes[elsewhere.pipe] = elsewhere
        while messages > 0 and (left := deadline - time.monotonic()) > 0:
            for pipe in select.select(list(pipes), [], [], left)[0]:
                heard = pipes[pipe].hear()
                if heard is None:
                    raise BrokenPromise(f"a process ended by itself:\n{pipes[pipe].words()}")
                for message in heard:
                    self._note(message)
                if pipes[pipe] is actor:
                    messages -= len(heard)
        if messages > 0 and seconds == PATIENCE:
            raise BrokenPromise(f"nothing is heard of a process for {PATIENCE} seconds")

    def _hear_out(self, actor: Actor, cut_at: int | None = None) -> None:
        """All that a process said before its end. It may have failed because of that end, and of nothing else."""
        while (heard := actor.hear()) is not None:
            for message in heard:
                self._note(message, cut_at)
        if actor.failed_at and (cut_at is None or actor.failed_at < cut_at):
            raise BrokenPromise(actor.words())

    def _note(self, message: Message, cut_at: int | None = None) -> None:
        """What is said after the power was cut is nothing that anybody could have heard. (And it may be wrong: ext4
        lets an ``fdatasync`` succeed whose transaction was aborted by the shutdown in that moment.)
        """
        kind, who, item_id, number, identity, said_at = message
        if cut_at is not None and said_at >= cut_at and kind not in (COMMITS, ABORTS):
            if kind == PUT:
                self._ledger.put_too_late(identity)
        elif kind == PUT:
            self._ledger.put(item_id, identity)
        elif kind == DURABLE:
            self._ledger.durable_id = max(self._ledger.durable_id, item_id)
            self.counts["syncs seen"] += 1
            self.counts["longest wait for a sync, ms"] = max(self.counts["longest wait for a sync, ms"], number)
        elif kind != READY:
            place = self._ledger.places[who]
            if kind == DELIVERED:
                place.deliver(item_id, identity, number)
            elif kind == COMMITS:
                place.begin_commit(item_id)
            elif kind == ABORTS:
                place.begin_abort(item_id)
            else:
                assert kind in (SAVED, SAVED_DURABLY)
                place.save(kind == SAVED_DURABLY)

    # -- what is left ----------------------------------------------------------------------------------------------

    def _looker(self, closes: bool) -> Actor:
        readers = dict(enumerate(INSIDE))
        if self._elsewhere is None:
            readers[len(INSIDE)] = OUTSIDE
        return Actor(partial(tell_what_is_left, self._life("never"), readers, closes), self._plant)

    def _end_while_looking(self) -> None:
        """An opening, a recovery, that comes to its own end."""
        actor = self._looker(closes=True)
        try:
            time.sleep(self._choose.uniform(0, 1.2) * self._looking_seconds)
            if self._power is not None and self._choose.random() < 0.8:
                self._leave_elsewhere()
                cut_at = time.monotonic_ns()
                self._cut([])
                self._finish(actor, cut_at)
            else:
                actor.kill()
                self._finish(actor, None)
                self.counts["kills"] += 1
            self.counts["ended while recovering"] += 1
        finally:
            actor.close()

    def _finish(self, actor: Actor, cut_at: int | None) -> None:
        while actor.hear() is not None:
            pass
        if actor.failed_at and (cut_at is None or actor.failed_at < cut_at):
            raise BrokenPromise(actor.words())

    def _look(self, *, always: bool) -> None:
        """Let a fresh process tell what is left, and hold that against what is promised."""
        begun = time.monotonic()
        closes = self._choose.random() < 0.4
        actor = self._looker(closes)
        try:
            messages = []
            while (heard := actor.hear()) is not None:
                messages += heard
            if actor.wait():
                raise BrokenPromise(f"it can't be opened, status {actor.status}:\n{actor.words()}")
            if actor.words():
                raise BrokenPromise(f"an opening after a legal end warns:\n{actor.words()}")
        finally:
            actor.close()
        self._looking_seconds += 0.1 * (time.monotonic() - begun - self._looking_seconds)
        if self._elsewhere is not None:  # it has told what it begins before it did it
            while select.select([self._elsewhere.pipe], [], [], 0)[0]:
                self._listen(self._elsewhere, 1, PATIENCE)
        self._check(messages, always=always, closed=closes)

    def _check(self, messages: list[Message], *, always: bool, closed: bool) -> None:
        ledger, power = self._ledger, self._was_cut
        told = {kind: [each for each in messages if each[0] == kind] for kind in (RECORD, LEFT, END, DONE)}
        records = [Kept(item_id, identity) for _, _, item_id, _, identity, _ in told[RECORD]]
        _, _, end_id, live_id, *_ = told[END][0]
        assert len(told[DONE]) == closed
        before = set(ledger.items)
        survivors = ledger.check(records, end_id, power=power, always=always, archived=self._archive is not None)
        for who, place in enumerate(ledger.places):
            if who < len(INSIDE) or self._elsewhere is None:
                left = [Kept(i, identity, errors) for _, w, i, errors, identity, _ in told[LEFT] if w == who]
                place.check_left(left, survivors, power)
                place.begin_life(left, survivors, ledger.last_id, power or closed)
        self._was_cut = False
        self.counts["kept, not acknowledged"] += len(survivors.keys() - before)
        self._forget(live_id)

    def _forget(self, live_id: int) -> None:
        """What is retired is not needed any more; the archive is emptied now and then."""
        if self._archive is None:
            self._ledger.forget_below(live_id)
        elif len(names := os.listdir(self._archive)) > MOST_ARCHIVED:
            for name in names:
                os.unlink(os.path.join(self._archive, name))
            self.counts["archived"] += len(names)
            self._ledger.forget_below(live_id)

    def close(self) -> None:
        self._leave_elsewhere()
        self.counts["lost before a sync"] = self._ledger.lost
        self.counts["acknowledged"] = self._ledger.acknowledged
        self.counts["delivered again"] = sum(place.redelivered for place in self._ledger.places)


def _begin(life: Life, _voice: object) -> None:
    with open_queue(life) as queue:
        for name in (*INSIDE, OUTSIDE):
            queue.reader(name, start="earliest")


# -- the loops -------------------------------------------------------------------------------------------------------


def _run(generations: Generations, limit: int | None, seconds: float | None) -> Counter[str]:
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        while (limit is None or generations.ends < limit) and (deadline is None or time.monotonic() < deadline):
            generations.step()
    finally:
        generations.close()
    return generations.counts


def run_kills(
    seed: int, *, limit: int | None = None, seconds: float | None = None, plant: Plant | None = None
) -> Counter[str]:
    """SIGKILL, as often as ``limit`` says or for ``seconds``."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # another file system, mostly
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as other:
        return _run(Generations(folder, seed, archives=[folder, other, ""], plant=plant), limit, seconds)


def run_cuts(
    kind: Kind, seed: int, *, limit: int | None = None, seconds: float | None = None, plant: Plant | None = None
) -> Counter[str]:
    """Power cuts, and some kills, on a file system of its own. For root."""
    with tempfile.TemporaryDirectory() as folder, LoopFileSystem(kind, 64, folder) as power:
        archives = [power.path, power.path, ""]
        return _run(Generations(power.path, seed, archives=archives, power=power, plant=plant), limit, seconds)


def main(what: str, seed: int, limit: int | None, seconds: float | None, plant: Plant | None) -> Counter[str]:
    """``kills``, ``ext4`` or ``xfs``: one loop, as a program of its own, small and with one thread."""
    gc.freeze()
    if what == "kills":
        return run_kills(seed, limit=limit, seconds=seconds, plant=plant)
    own_mounts()
    return run_cuts(cast(Kind, what), seed, limit=limit, seconds=seconds, plant=plant)


if __name__ == "__main__":
    as_program(main)
