"""Real processes on a real folder: killed, stopped, forked. ``run(seed, steps)``; what was acknowledged must be so.

Two or three programs (``use_child_program``) are told over pipes what to do. What returned to a program that was killed
afterwards counts; of what it was doing then, anything may have happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kestrelpy import JournaledQueue, QueueEmpty, scan
from kestrelpy.ship import queues, restore
from kestrelpy.work import WorkQueue
from tests.support.paths import ROOT

PATIENCE = 20.0
"""Seconds that an answer may take on a machine that is busy."""
PROGRAM = Path(__file__).with_name("use_child_program.py")
READERS = ("r", "s")
LOCKED = {"QueueLocked"}


class Broken(AssertionError):
    """A promise was broken."""


class Program:
    """One process."""

    def __init__(self, folder: str) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.has_queue = self.has_work = False
        self.reader = ""
        self.is_here = False
        self.held: list[int] = []
        self.committed: set[int] = set()
        """What it has committed of its reader and not saved."""
        self.jobs: list[int] = []

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        self.tell(what, *arguments)
        return self.answer(what)

    def tell(self, what: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE):
                raise Broken(f"{what} has not come back for {PATIENCE} s")
        line = self.process.stdout.readline()
        if not line:
            raise Broken(f"the program is gone in the middle of {what}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Children:
    """One folder, its processes, and the accounts."""

    def __init__(self, seed: int, folder: str) -> None:
        self.rng = random.Random(f"children {seed}")
        self.folder = folder
        self.number = 0
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.ids: dict[int, str] = {}
        self.there: set[str] = set()
        self.maybe: set[str] = set()
        self.published: set[str] = set()
        self.done: dict[str, set[int]] = {name: set() for name in READERS}
        self.perhaps_done: dict[str, set[int]] = {name: set() for name in READERS}
        self.jobs: set[str] = set()
        self.jobs_done: set[str] = set()
        self.jobs_maybe: set[str] = set()
        self.job_bodies: dict[int, str] = {}
        with JournaledQueue(folder, "a", segment_bytes=8192, inbox_interval=None) as queue:
            for name in READERS:
                queue.reader(name)
        WorkQueue(folder, "jobs", segment_bytes=8192, max_job_bytes=4000).close()
        self.ships = seed % 2 == 0
        self.acks = "disk"
        self.in_store: set[str] = set()
        """Bodies of which a call has said that they are in the store."""
        self.programs = [Program(folder) for _ in range(2)]

    def require(self, condition: object, what: str) -> None:
        if not condition:
            raise Broken(what)

    def draw(self) -> list[str]:
        """Bodies of items, no two the same."""
        bodies = []
        for _ in range(self.rng.choice((1, 1, 3, 20))):
            self.number += 1
            bodies.append(f"{self.number}:" + "x" * self.rng.choice((0, 50, 900)))
        return bodies

    # -- what is done --------------------------------------------------------------------------------------------------

    def step(self, program: Program) -> None:
        ways = [self.open, self.read, self.kill_some, self.publish, self.fork, self.work_open, self.wrong, self.stop]
        if program.has_queue:
            ways += [self.put] * 6 + [self.flush] * self.ships
        if program.reader:
            ways += [self.get] * 5 + [self.commit] * 4 + [self.save] * 2
        if program.has_work:
            ways += [self.work_put] * 3 + [self.work_get] * 4
        if program.has_queue or program.reader or program.has_work:
            ways.append(self.close)
        way = self.rng.choice(ways)
        self.counts[way.__name__] += 1
        way(program)

    def owner(self, attribute: str) -> Program | None:
        return next((each for each in self.programs if getattr(each, attribute)), None)

    def open(self, program: Program) -> None:
        if not self.ships:
            self.open_as(program, "open", "has_queue")
            return
        acks = self.rng.choice(("disk", "shipped"))
        if self.open_as(program, "open", "has_queue", acks):
            self.acks = acks

    def open_as(self, program: Program, what: str, has: str, *arguments: str) -> bool:
        """Open the queue or the work queue, which one process at a time has. Whether it was opened."""
        owner = self.owner(has)
        if owner is program:
            return False
        answer = program.ask(what, *arguments)
        if owner is None:
            self.require("error" not in answer, f"{what}: {answer}")
            setattr(program, has, True)
        else:
            self.require(answer.get("error") in LOCKED, f"{what}, and it is open: {answer}")
        return owner is None

    def flush(self, program: Program) -> None:
        """All that was put before is in the store then."""
        bodies = set(self.there)
        answer = program.ask("flush")
        self.require("error" not in answer, f"flush: {answer}")
        self.in_store |= bodies

    def put(self, program: Program) -> None:
        bodies = self.draw()
        if self.rng.random() < 0.1:  # it dies in the middle
            self.maybe.update(bodies)
            program.tell("put", bodies)
            self.kill(program)
            return
        answer = program.ask("put", bodies)
        self.require("error" not in answer, f"put: {answer}")
        self.there.update(bodies)
        if self.ships and self.acks == "shipped":
            self.in_store.update(bodies)
        for item_id, body in zip(answer["value"], bodies, strict=True):
            self.know(item_id, body)

    def know(self, item_id: int, body: str) -> None:
        self.require(self.ids.setdefault(item_id, body) == body, f"item {item_id} is {body[:9]} and another")
        known = body in self.there or body in self.maybe or body in self.published
        self.require(known, f"item {item_id} is {body[:20]!r}, which nobody has put")

    def read(self, program: Program) -> None:
        if program.reader:
            return
        name, writer = self.rng.choice(READERS), self.owner("has_queue")
        here = writer is program
        taken = any(each.reader == name for each in self.programs)
        answer = program.ask("read", name, here)
        if taken:
            self.require(answer.get("error") in LOCKED, f"reader {name}, which another process has: {answer}")
            return
        self.require("error" not in answer, f"reader {name}: {answer}")
        program.reader, program.is_here = name, here

    def get(self, program: Program) -> None:
        answer = program.ask("get", self.rng.choice((1, 5, 50)))
        self.require("error" not in answer, f"get: {answer}")
        for item_id, body in answer["value"]:
            self.know(item_id, body)
            done = self.done[program.reader] | program.committed
            self.require(item_id not in done, f"{program.reader} delivers item {item_id}, which is done")
            self.require(item_id not in program.held, f"{program.reader} delivers item {item_id} twice")
            program.held.append(item_id)

    def commit(self, program: Program) -> None:
        ids = program.held[: self.rng.choice((1, 3, 100))]
        if not ids:
            return
        del program.held[: len(ids)]
        self.perhaps_done[program.reader].update(ids)
        if self.rng.random() < 0.05:
            program.tell("commit", ids)
            self.kill(program)
            return
        answer = program.ask("commit", ids)
        self.require("error" not in answer, f"commit: {answer}")
        program.committed.update(ids)

    def save(self, program: Program) -> None:
        answer = program.ask("save")
        self.require("error" not in answer, f"checkpoint: {answer}")
        self.done[program.reader] |= program.committed

    def close(self, program: Program) -> None:
        answer = program.ask("close")
        self.require("error" not in answer, f"close: {answer}")
        if program.reader:
            self.done[program.reader] |= program.committed
        self.forget(program)

    def forget(self, program: Program) -> None:
        program.has_queue = program.has_work = program.is_here = False
        program.reader = ""
        program.held, program.jobs, program.committed = [], [], set()

    def kill_some(self, program: Program) -> None:
        if self.rng.random() < 0.3:
            self.kill(program)

    def kill(self, program: Program) -> None:
        self.counts["SIGKILL"] += 1
        program.kill()
        self.programs[self.programs.index(program)] = Program(self.folder)

    def publish(self, program: Program) -> None:
        bodies = self.draw()[:3]
        self.version += 1
        self.maybe.update(bodies)
        if self.rng.random() < 0.15:
            program.tell("publish", self.version, bodies)
            self.kill(program)
            return
        answer = program.ask("publish", self.version, bodies)
        self.require(answer.get("value") is True, f"publish: {answer}")
        self.published.update(bodies)

    def fork(self, program: Program) -> None:
        answer = program.ask("fork")
        self.require(answer.get("value") == "nothing", f"a forked child: {answer}")

    def stop(self, program: Program) -> None:
        """One is stopped with a lock in its hand: the other goes on, but for what saves a place, which may wait."""
        other = next(each for each in self.programs if each is not program)
        if self.rng.random() < 0.6:
            answer = program.ask("hold")
            if "error" in answer:
                return
        else:
            answer = {}
        program.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                ways = [self.put] * other.has_queue + [self.get, self.commit] * bool(other.reader)
                if ways and other in self.programs:
                    self.rng.choice(ways)(other)
        finally:
            program.process.send_signal(signal.SIGCONT)
        if answer:
            program.ask("let_go")

    # -- jobs --------------------------------------------------------------------------------------------------------

    def work_open(self, program: Program) -> None:
        self.open_as(program, "work_open", "has_work")

    def work_put(self, program: Program) -> None:
        bodies = self.draw()
        if self.rng.random() < 0.1:
            self.jobs_maybe.update(bodies)
            program.tell("work_put", bodies)
            self.kill(program)
            return
        answer = program.ask("work_put", bodies)
        self.require("error" not in answer, f"put of jobs: {answer}")
        self.jobs.update(bodies)

    def work_get(self, program: Program) -> None:
        if not program.jobs:
            answer = program.ask("work_get", 5)
            self.require("error" not in answer, f"reserve: {answer}")
            for job_id, body in answer["value"]:
                self.require(body in self.jobs | self.jobs_maybe, f"job {job_id} is {body[:20]!r}")
                self.require(body not in self.jobs_done, f"job {job_id} was deleted, and is given out")
                self.job_bodies[job_id] = body
                program.jobs.append(job_id)
            return
        job_id = program.jobs.pop()
        body = self.job_bodies[job_id]
        if self.rng.random() < 0.05:
            self.jobs.discard(body)
            self.jobs_maybe.add(body)
            program.tell("work_delete", job_id)
            self.kill(program)
            return
        answer = program.ask("work_delete", job_id)
        self.require("error" not in answer, f"delete: {answer}")
        self.jobs_done.add(body)

    def wrong(self, program: Program) -> None:
        way = self.rng.choice(("queue", "reader", "writer", "get"))
        answer = program.ask("work_wrong", way)
        if way == "get":
            code, said = answer["value"]
            self.require(code and "work queue" in said, f"kestrelpy get on a work queue: {code} {said}")
        else:
            refused = answer.get("error") in {"WrongKind", *LOCKED}
            self.require(refused, f"a work queue is taken for another ({way}): {answer}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        for program in self.programs:
            program.kill()
        if self.ships and self.counts["open"]:
            self.check_store()
        with JournaledQueue(self.folder, "a", segment_bytes=8192, inbox_interval=None, ship=False) as queue:
            for name in READERS:
                self.drain(queue, name, self.there | self.published)
        with WorkQueue(self.folder, "jobs", segment_bytes=8192, max_job_bytes=4000) as work:
            bodies = [work.peek(stats.id).body.decode() for stats in work.jobs()]
        self.require(len(bodies) == len(set(bodies)), "a job is there twice")
        lost = self.jobs - self.jobs_done - set(bodies)
        self.require(not lost, f"jobs are lost: {sorted(lost)[:3]}")
        back = self.jobs_done & set(bodies)
        self.require(not back, f"jobs have come back: {sorted(back)[:3]}")

    def check_store(self) -> None:
        """What is in the store, restored elsewhere: a beginning of what was put, with all that was said to be there."""
        url, elsewhere = f"file://{self.folder}/store", f"{self.folder}/elsewhere"
        if "a" not in queues(url):
            self.require(not self.in_store, "the store has no queue, and items of it were said to be there")
            return
        restore(url, "a", elsewhere)
        ids = [record.id for record in scan(elsewhere, "a")]
        self.require(ids == list(range(ids[0], ids[-1] + 1)) if ids else True, f"there is a hole in the store: {ids}")
        options: dict[str, Any] = {"inbox_interval": None, "ship": False, "on_corruption": "quarantine"}
        with JournaledQueue(elsewhere, "a", **options) as queue:
            for name in READERS:
                self.drain(queue, name, self.in_store, of_copy=True)
        self.counts["restored"] += 1

    def drain(self, queue: JournaledQueue, name: str, due: set[str], *, of_copy: bool = False) -> None:
        """``due``: what the reader must have got, or get. ``of_copy``: it may be as it was some time ago."""
        reader, seen = queue.reader(name), dict[int, str]()
        with contextlib.suppress(QueueEmpty):
            while True:
                for item in reader.get_many(100, timeout=0):
                    self.know(item.id, item.data.decode())
                    again = item.id in self.done[name] and not of_copy
                    self.require(not again, f"{name} delivers item {item.id}, which was done")
                    seen[item.id] = item.data.decode()
        bodies = list(seen.values())
        self.require(len(bodies) == len(set(bodies)), f"{name} has an item twice")
        over = {self.ids[item_id] for item_id in self.perhaps_done[name]}
        lost = due - set(bodies) - over
        self.require(not lost, f"{name} has lost items: {sorted(lost)[:3]}")


def run(seed: int, steps: int) -> Counter[str]:
    """So many steps in a folder of their own. Raises ``Broken``."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        children = Children(seed, folder)
        try:
            for _ in range(steps):
                children.step(children.rng.choice(children.programs))
            children.finish()
        except Broken as broken:
            raise Broken(f"seed {seed}, after {children.counts.total()} steps: {broken}") from broken
        finally:
            for program in children.programs:
                program.kill()
        return children.counts


if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100))
